"Every blueprint at many widths and lanes, and the registry's refusals."
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from tiny import update

from esper_nb.core import LaneAttention, by_lane, lane_state, num_lanes, reset_lanes, take_lanes, unfold
from esper_nb.grow import (
    FAMILIES, LaneFlexAttention, blueprint, blueprint_size, forget_blueprint, get_blueprint, list_blueprints,
    make_blueprint, norm_groups, open_relu, probe, smoke_test)

torch.set_num_threads(1)
ALL = [(f, k) for f in FAMILIES for k in list_blueprints(family=f)]
DIM = dict(cnn=1, transformer=-1)

def part(x, n, i, family): return unfold(x, n, DIM[family]).select(1 if family == "cnn" else -2, i)

def noisy(module, seed=0):
    g = torch.Generator().manual_seed(seed)
    for p in module.parameters(): p.data.copy_(.3 * torch.randn(p.shape, generator=g))
    return module


@pytest.mark.parametrize("family,name", ALL)
@pytest.mark.parametrize("channels", [4, 8, 12, 64])
@pytest.mark.parametrize("lanes", [1, 3])
def test_keeps_shape_and_layout(family, name, channels, lanes):
    m = make_blueprint(name, family, channels, lanes)
    x = probe(family, lanes * channels)
    y = m(x)
    assert y.shape == x.shape and num_lanes(m) == lanes
    if family == "cnn": assert y.is_contiguous(memory_format=torch.channels_last)
    smoke_test(m, family, lanes * channels)
    assert sum(p.numel() for p in m.parameters()) == lanes * blueprint_size(name, family, channels)
    assert all(t.shape[0] % lanes == 0 for t in lane_state(m).values())


@pytest.mark.parametrize("family,name", ALL)
@pytest.mark.parametrize("training", [True, False])
def test_lanes_are_separate_networks_forward_and_backward(family, name, training):
    n, c = 3, 16
    m = noisy(make_blueprint(name, family, c, n)).train(training)
    x = probe(family, n * c).clone().requires_grad_()
    y = m(x)
    y.backward(torch.cos(x.detach() * 3))
    for i in range(n):
        one = take_lanes(m, [i])
        xi = part(x.detach(), n, i, family).clone().requires_grad_()
        yi = one(xi)
        yi.backward(torch.cos(xi.detach() * 3))
        torch.testing.assert_close(part(y, n, i, family), yi, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(part(x.grad, n, i, family), xi.grad, rtol=1e-4, atol=1e-5)
        for p, q in zip(m.parameters(), one.parameters()):
            mine = by_lane(p.grad, n)[i]
            torch.testing.assert_close(mine, q.grad.view_as(mine), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family,name", ALL)
def test_a_lane_of_nan_stays_alone(family, name):
    n, c = 3, 16
    m, sick = noisy(make_blueprint(name, family, c, n)), noisy(make_blueprint(name, family, c, n))
    for p in sick.parameters(): by_lane(p.data, n)[1] = torch.nan
    out = []
    for net in (m, sick):
        x = probe(family, n * c).clone().requires_grad_()
        y = net(x)
        y.sum().backward()
        out.append((y, x.grad, [p.grad for p in net.parameters()]))
    for i in (0, 2):
        for k in (0, 1): assert torch.equal(part(out[0][k], n, i, family), part(out[1][k], n, i, family))
        for g, h in zip(out[0][2], out[1][2]): assert torch.equal(by_lane(g, n)[i], by_lane(h, n)[i])


@pytest.mark.parametrize("family,name", [k for k in ALL if k[1] != "noop"])
def test_first_steps_reach_every_parameter(family, name):
    "A start at the identity must not be a dead one: after a few steps everything has moved."
    torch.manual_seed(0)
    c = 16
    for zeroed in (False, True):
        m = make_blueprint(name, family, c)
        if zeroed and hasattr(m, "zero_last"): m.zero_last()
        x, opt = probe(family, c), torch.optim.SGD(m.parameters(), .1)
        target = torch.roll(x, 1, DIM[family]) * 1.5
        first, losses = [p.detach().clone() for p in m.parameters()], []
        for _ in range(30):
            loss = update(opt, F.mse_loss(m(x), target))
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        still = [k for a, (k, p) in zip(first, m.named_parameters()) if torch.equal(a, p)]
        assert not still


@pytest.mark.parametrize("family,name", [(f, k) for f, k in ALL if f == "transformer"])
def test_causal(family, name):
    m = noisy(make_blueprint(name, family, 16, 2))
    x = probe(family, 32)
    for t in (1, 4, 7):
        later = x.clone(); later[:, t:] += 1
        assert torch.equal(m(later)[:, :t], m(x)[:, :t])


def test_reset_rows_gives_the_start_that_construction_gives():
    for family, name in ALL:
        m = make_blueprint(name, family, 16, 2)
        reset_lanes(m, [1], 0)
        if hasattr(m, "zero") and m.zero:
            assert torch.equal(part(m(probe(family, 32)), 2, 1, family), part(probe(family, 32), 2, 1, family))


@given(st.integers(1, 600))
@settings(deadline=None, max_examples=60)
def test_norm_groups(c):
    g = norm_groups(c)
    assert c % g == 0 and (g == 1 or c // g >= 16)
    assert all(not (k > g and c % k == 0 and c // k >= 16) for k in (32, 16, 8, 4, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_open_relu_is_relu_with_an_open_gate_at_zero(dtype):
    x = torch.tensor([-2., -1e-3, 0., 1e-3, 2.], dtype=dtype, requires_grad=True)
    y = open_relu(x)
    y.sum().backward()
    assert torch.equal(y, x.relu()) and x.grad.tolist() == [0, 0, 1, 1, 1]


def test_checkpointing_changes_nothing_but_memory():
    a = noisy(make_blueprint("mlp", "transformer", 16, 2))
    b = noisy(make_blueprint("mlp", "transformer", 16, 2, checkpoint=True))
    x = probe("transformer", 32)
    for m in (a, b): m(x).square().sum().backward()
    for p, q in zip(a.parameters(), b.parameters()): assert torch.equal(p.grad, q.grad)


def test_flex_attention_is_causal_attention():
    "The flex kernel's own arithmetic, against the usual kernel: it runs on a CPU as long as no gradient is asked for."
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    a = noisy(LaneAttention(16, 4, 2)); b = LaneFlexAttention(16, 4, 2); b.load_state_dict(a.state_dict())
    x = probe("transformer", 32)
    assert torch.equal(a(x), b(x))
    q, k, v = torch.randn(3, 2, 4, 8, 8)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 8, 8, device="cpu")
    with torch.no_grad():
        mine, usual = flex_attention(q, k, v, block_mask=mask), F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.testing.assert_close(mine, usual, rtol=1e-5, atol=1e-5)


@pytest.mark.cuda
@pytest.mark.real("it needs the compiler")
def test_flex_attention_on_cuda():
    a = noisy(LaneAttention(64, 4, 2)).cuda(); b = LaneFlexAttention(64, 4, 2).cuda(); b.load_state_dict(a.state_dict())
    x = torch.randn(2, 128, 128, device="cuda")
    torch.testing.assert_close(a(x), b(x), rtol=1e-3, atol=1e-3)


def test_smoke_test_leaves_everything_as_it_was():
    m = make_blueprint("conv_light", "cnn", 8)
    state = torch.get_rng_state()
    smoke_test(m.train(), "cnn", 8)
    assert m.training and torch.equal(torch.get_rng_state(), state)
    m.body[1].bias.data.fill_(torch.inf)
    with pytest.raises(RuntimeError, match="not finite"): smoke_test(m, "cnn", 8)


@pytest.mark.parametrize("call,words", [
    (lambda: get_blueprint("norm", "rnn"), "'cnn' or 'transformer'"),
    (lambda: make_blueprint("norm", "cnn", 8, width=2), "it has no options"),
    (lambda: make_blueprint("norm", "cnn", 0), "at least 1"),
    (lambda: make_blueprint("attention", "transformer", 10), "divisor"),
    (lambda: blueprint("new", "rnn", 1), "'cnn' or 'transformer'"),
    (lambda: list_blueprints(family="rnn"), "'cnn' or 'transformer'"),
])
def test_refusals(call, words):
    with pytest.raises(ValueError, match=words): call()


def test_lists_are_sorted_by_size_then_name_and_filtered():
    assert list_blueprints("conv*") == ["conv_small", "conv_light", "conv_heavy"]
    assert list_blueprints(family="transformer")[1:4] == ["norm", "lora", "lora_large"]
    assert list_blueprints("nothing*") == []


# ---- a registry that cannot be corrupted

@pytest.mark.parametrize("name, declared, build, words", [
    ("odd", "2_000", lambda channels, lanes: None, "declared size of odd='2_000'"),
    ("odd", -1, lambda channels, lanes: None, "at least 0"),
    ("odd", True, lambda channels, lanes: None, "whole number"),
    ("odd one", 5, lambda channels, lanes: None, "a name such as"),
    (7, 5, lambda channels, lanes: None, "a name such as"),
    ("odd", 5, lambda channels: None, "arguments of odd"),
    ("odd", 5, lambda channels, lanes, width: None, "that all have a default"),
    ("odd", 5, "conv", "a function or class")])
def test_a_bad_blueprint_is_refused_when_it_is_registered(name, declared, build, words):
    before = list_blueprints()
    with pytest.raises(ValueError, match=words): blueprint(name, "cnn", declared)(build)
    assert list_blueprints() == before

def test_a_blueprint_that_cannot_be_made_breaks_no_slot():
    import warnings
    from esper_nb.grow.slots import Slot
    @blueprint("broken", "cnn", 10)
    def broken(channels, lanes): raise KeyError("nothing here")
    try:
        with pytest.warns(UserWarning, match="blueprint broken cannot be made for 8 channels.*KeyError"):
            slot = Slot("r0c0", "cnn", 8)
        assert "broken" not in slot.blueprints and "conv_light" in slot.blueprints
        with pytest.raises(RuntimeError, match="leave it out of the slot's blueprints"):
            Slot("r0c0", "cnn", 8, blueprints=["broken"])
    finally: forget_blueprint("broken", "cnn")
    with warnings.catch_warnings(action="error"): Slot("r0c0", "cnn", 8)

@pytest.mark.parametrize("name", list_blueprints(family="cnn"))
@pytest.mark.parametrize("lanes", [1, 3])
def test_a_blend_that_multiplies_begins_as_the_identity(name, lanes):
    from esper_nb.grow.blending import Blend
    from esper_nb.grow.slots import Slot
    slot = Slot("r0c0", "cnn", 16, lanes, [name])
    slot.germinate(name, blend=Blend.MULTIPLY, tempo=0, goal=1.)
    for _ in range(3): slot.advance(force=True)
    x = torch.randn(4, 16 * lanes, 6, 6)
    assert slot.state(0).alpha == 1 and torch.equal(slot(x), x)
    if name == "noop": return
    slot(x).mul(torch.cos(x * 9)).sum().backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in slot.parameters())
