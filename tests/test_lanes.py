"Lanes are independent bit for bit, and equal the networks they stand for."
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from esper_nb.core.devices import generator
from esper_nb.grow.hosts import CNNConfig, GPTConfig, new_host
from esper_nb.core.lanes import (lane, lane_state, num_lanes, per_lane, put_lanes, reset_lanes, take_lanes, with_lanes)
from esper_nb.core.layers import (LaneAttention, LaneBatchNorm2d, LaneDropout, LaneEmbedding, LaneLayerNorm,
                                  LaneLinear, Scale, by_lane, conv2d, group_norm, lane_noise, unfold)
from esper_nb.train.tasks import lane_cross_entropy

N = 4
HOSTS = dict(
    cnn=CNNConfig(in_channels=1, size=8, base=4, blocks=3, pools=2),
    gpt=GPTConfig(vocab=13, d=16, heads=2, layers=2, block=8, segments=2),
)


def inputs(kind, seed=0):
    g = generator(seed, "inputs", kind)
    if kind == "cnn":
        x = torch.randn(6, N, 8, 8, generator=g).contiguous(memory_format=torch.channels_last)
        return x, torch.randint(0, 10, (6, N), generator=g)
    tokens = torch.randint(0, 13, (3, 9, N), generator=g)
    return tokens[:, :-1], tokens[:, 1:]


def part(kind, x, y, i):
    return (unfold(x, N)[:, i], y[:, i:i+1]) if kind == "cnn" else (x[..., i:i+1], y[..., i:i+1])


def train(net, kind, steps, batch=lambda s: inputs("cnn", s), lr=.05):
    opt, out = torch.optim.SGD(net.parameters(), lr, momentum=.9, weight_decay=5e-4), []
    for s in range(steps):
        x, y = batch(s)
        logits = net(x)
        opt.zero_grad(); lane_cross_entropy(logits, y, num_lanes(net)).sum().backward()
        out.append((logits.detach(), [p.grad.clone() for p in net.parameters()]))
        opt.step()
    return out


@pytest.mark.parametrize("kind", HOSTS)
def test_lanes_equal_separate_networks(kind):
    wide = new_host(HOSTS[kind], N, seed=3)
    alone = [lane(wide, i) for i in range(N)]
    together = train(wide, kind, 20, lambda s: inputs(kind, s))
    for i, net in enumerate(alone):
        apart = train(net, kind, 20, lambda s: part(kind, *inputs(kind, s), i))
        for (logits, grads), (logits1, grads1) in zip(together, apart):
            torch.testing.assert_close(unfold(logits, N, -1)[..., i, :], logits1, rtol=1e-5, atol=1e-5)
            for g, g1 in zip(grads, grads1):
                torch.testing.assert_close(by_lane(g, N)[i], g1, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", HOSTS)
@pytest.mark.parametrize("poison", range(N))
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -1e38])
def test_poisoned_lane_leaves_the_others_bit_equal(kind, poison, value):
    healthy, ill = (new_host(HOSTS[kind], N, seed=3) for _ in range(2))
    with torch.no_grad():
        for p in list(ill.parameters())[:2]: by_lane(p, N)[poison] = value
    a, b = (train(net, kind, 3, lambda s: inputs(kind, s)) for net in (healthy, ill))
    others = [i for i in range(N) if i != poison]
    for (logits, grads), (logits1, grads1) in zip(a, b):
        for i in others:
            assert torch.equal(unfold(logits, N, -1)[..., i, :], unfold(logits1, N, -1)[..., i, :])
            for g, g1 in zip(grads, grads1): assert torch.equal(by_lane(g, N)[i], by_lane(g1, N)[i])
    for p, q in zip(lane_state(healthy).values(), lane_state(ill).values()):
        for i in others: assert torch.equal(by_lane(p, N)[i], by_lane(q, N)[i])


LAYERS = dict(conv=lambda n: conv2d(4, 8, 3, n, padding=1, groups=2), norm=lambda n: LaneBatchNorm2d(4, n),
              group=lambda n: group_norm(2, 4, n), scale=lambda n: Scale(0.5, n), drop=lambda n: LaneDropout(0.3, n, 1),
              stack=lambda n: nn.Sequential(conv2d(4, 6, 1, n), nn.ReLU(), LaneBatchNorm2d(6, n)),
              foreign=lambda n: per_lane(lambda: nn.Sequential(nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5), nn.PReLU()), n))
SEQUENCES = dict(linear=lambda n: LaneLinear(4, 6, n), layer_norm=lambda n: LaneLayerNorm(4, n),
                 attention=lambda n: LaneAttention(4, 2, n), scale=lambda n: Scale(0.5, n, -1),
                 drop=lambda n: LaneDropout(0.3, n, -1))


@pytest.mark.parametrize("name", LAYERS)
def test_image_layers_take_and_put(name): check_rows(LAYERS[name], torch.randn(2, N * 4, 5, 5), 1)


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequence_layers_take_and_put(name): check_rows(SEQUENCES[name], torch.randn(2, 5, N * 4), -1)


def check_rows(make, x, dim):
    m = make(N)
    reset_lanes(m, range(N), 0)
    wanted = [2, 0]
    few = take_lanes(m, wanted)
    assert num_lanes(few) == 2
    assert [t.shape[1:] for t in lane_state(few).values()] == [t.shape[1:] for t in lane_state(m).values()]
    got = few(
        unfold(x, N, dim)
        .index_select(dim if dim > 0 else x.ndim - 1, torch.tensor(wanted))
        .flatten(*((1, 2) if dim > 0 else (-2, -1)))
    )
    whole = unfold(m(x), N, dim)
    for k, i in enumerate(wanted):
        torch.testing.assert_close(
            unfold(got, 2, dim).select(dim if dim > 0 else -2, k),
            whole.select(dim if dim > 0 else -2, i),
            rtol=1e-5,
            atol=1e-6,
        )
    other = make(N)
    reset_lanes(other, range(N), 1)
    before = {k: t.clone() for k, t in lane_state(other).items()}
    ids = {k: id(t) for k, t in lane_state(other).items()}
    put_lanes(other, wanted, few)
    assert ids == {k: id(t) for k, t in lane_state(other).items()}, "parameters are overwritten, never replaced"
    for k, t in lane_state(other).items():
        for i in range(N):
            assert torch.equal(by_lane(t, N)[i], by_lane(lane_state(few)[k], 2)[wanted.index(i)] if i in wanted
                               else by_lane(before[k], N)[i])


@pytest.mark.parametrize("kind", HOSTS)
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_rows_round_trip(kind, data):
    lanes = data.draw(st.lists(st.integers(0, N - 1), min_size=1, unique=True))
    a, b = new_host(HOSTS[kind], N, seed=0), new_host(HOSTS[kind], N, seed=1)
    want = {k: t.clone() for k, t in lane_state(a).items()}
    saved = take_lanes(a, lanes)
    put_lanes(a, lanes, take_lanes(b, lanes)); put_lanes(a, lanes, saved)
    for k, t in lane_state(a).items(): assert torch.equal(t, want[k])


def test_reset_does_not_depend_on_the_population():
    for make in LAYERS.values():
        a, b = make(8), make(3)
        reset_lanes(a, [1, 7], 5); reset_lanes(b, [1], 5); reset_lanes(b, [2], 5, names=[7])
        for k, t in lane_state(b).items():
            for i, j in ((1, 1), (2, 7)): assert torch.equal(by_lane(t, 3)[i], by_lane(lane_state(a)[k], 8)[j])


def bits_by_hand(stream, count, place):
    "One number of `lane_noise`, by Python's integers."
    def scramble(x):
        x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
        x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
        return x ^ x >> 16
    key = (stream + count * 0x9E3779B97F4A7C15) % 2**64
    x = scramble(scramble(place ^ key % 2**32) ^ key >> 32)
    return x - 2**32 * (x >> 31)


def test_noise_is_the_hash_that_it_says():
    stream, count = torch.tensor([0, 5, 2**62 + 7]), torch.tensor([0, 3, 10**9])
    got = lane_noise(stream, count, (4, 2), 1)
    assert got.dtype == torch.int32 and got.shape == (4, 3, 2)
    for i, (s, c) in enumerate(zip(stream.tolist(), count.tolist())):
        assert got[:, i].flatten().tolist() == [bits_by_hand(s, c, k) for k in range(8)]


@pytest.mark.parametrize("p", [.01, .1, .5, .9])
def test_masks_are_those_of_independent_coins(p):
    "Shares of lanes, batches, places and bits, and how pairs of them agree, within five standard errors."
    stream = torch.randint(2**62, (8,), generator=torch.Generator().manual_seed(0))
    draws = [lane_noise(stream, torch.full((8,), c), (64, 64), 0) for c in range(8)]
    draws = torch.stack(draws, 1) # (lane, batch, 64, 64)
    z = ((draws >= math.floor(p * 2**32) - 2**31).double() - (1 - p)) / math.sqrt(p * (1 - p))
    def fair(x): assert (x.mean().abs() < 5 / math.sqrt(x.numel())), x.mean()
    fair(z)
    for axis in range(4):
        for distance in (1, 2): fair(z * z.roll(distance, axis))  # neighbours in anything
    for part in z.flatten(0, 1): fair(part)
    for bit in range(32): fair((draws >> bit & 1).double() * 2 - 1)


def test_embedding_and_with_lanes_keep_settings():
    e = with_lanes(LaneEmbedding(7, 3, 4), 2)
    assert (e.num_embeddings, e.vocab, e.weight.shape) == (14, 7, (14, 3))
    c = with_lanes(conv2d(2, 6, 3, 4, stride=2, padding=1, bias=False, groups=2), 1)
    assert (c.groups, c.in_channels, c.out_channels, c.stride, c.padding, c.bias) == (2, 2, 6, (2, 2), (1, 1), None)
    frozen = conv2d(2, 2, 1, 4).requires_grad_(False)
    assert not any(p.requires_grad for p in with_lanes(frozen, 2).parameters())


@pytest.mark.cuda
@pytest.mark.parametrize("kind", HOSTS)
def test_cuda_lanes_equal_separate_networks(kind):
    wide = new_host(HOSTS[kind], N, seed=3, device="cuda").double()
    x, y = (t.cuda() for t in inputs(kind))
    x = x.double() if x.is_floating_point() else x
    for i in range(N):
        xi, yi = part(kind, x, y, i)
        torch.testing.assert_close(lane(wide, i)(xi), unfold(wide(x), N, -1)[..., i, :], rtol=1e-6, atol=1e-6)
