"Properties of masked choices over random shapes, masks and floors."
import math

import gymnasium as gym
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.distributions import Categorical

from esper_nb.learn.distributions import Heads, MaskedHeads, choose, heads_of, to_env

sizes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


def world(sizes, seed, rows=7):
    g = torch.Generator().manual_seed(seed)
    heads = Heads(sizes)
    logits = 4 * torch.randn(rows, heads.count, heads.widest, generator=g)
    flat = torch.rand(rows, heads.flat, generator=g) < 0.6
    start = 0
    for size in sizes:
        flat[torch.arange(rows), start + torch.randint(0, size, (rows,), generator=g)] = True
        start += size
    return heads, logits, flat, heads.legal(flat, torch.zeros(rows, heads.count).long()), g


@settings(deadline=None, max_examples=25)
@given(sizes, st.integers(0, 10**6), st.floats(0, 0.5))
def test_sums_to_one_with_an_exact_floor(sizes, seed, floor):
    heads, logits, flat, legal, g = world(sizes, seed)
    p = MaskedHeads(logits, legal, floor).logp.exp()
    torch.testing.assert_close(p.sum(-1), torch.ones(7, heads.count), atol=1e-5, rtol=0)
    k = legal.sum(-1, keepdim=True)
    least = torch.minimum(torch.tensor(floor), 0.99 / k).expand_as(p)
    assert (p[legal] >= least[legal] - 1e-6).all() and (p[~legal] == 0).all()


@settings(deadline=None, max_examples=25)
@given(sizes, st.integers(0, 10**6))
def test_equals_one_categorical_per_head(sizes, seed):
    heads, logits, flat, legal, g = world(sizes, seed)
    dist = MaskedHeads(logits, legal)
    action, logp = choose(heads, logits, flat, torch.empty_like(logits).exponential_(generator=g))
    for k in range(heads.count):
        ref = Categorical(logits=logits[:, k].masked_fill(~legal[:, k], -1e9))
        torch.testing.assert_close(logp[:, k], ref.log_prob(action[:, k]), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(dist.entropy()[:, k], ref.entropy(), atol=1e-5, rtol=1e-5)
    assert legal.gather(-1, action.unsqueeze(-1)).all(), "only legal choices are drawn"


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 9), st.integers(0, 8), st.floats(-50, 50))
def test_equal_logits_give_k_choices(k, more, level):
    legal = torch.arange(k + more)[None, None] < k
    dist = MaskedHeads(torch.full((1, 1, k + more), level), legal)
    assert abs(dist.entropy().exp().item() - k) < 1e-4
    assert abs(dist.normalized_entropy().item() - (k > 1)) < 1e-5


@settings(deadline=None, max_examples=20)
@given(sizes, st.integers(0, 10**6), st.sampled_from([0., 0.01, 0.2]))
def test_gradients_are_finite_and_zero_where_illegal(sizes, seed, floor):
    heads, logits, flat, legal, g = world(sizes, seed)
    x = (logits * 20).requires_grad_()
    dist = MaskedHeads(x, legal, floor)
    (dist.log_prob(dist.mode()).sum() + dist.entropy().sum()).backward()
    assert torch.isfinite(x.grad).all() and (x.grad[~legal] == 0).all()


def test_illegal_logits_do_not_matter_even_nan():
    legal = torch.tensor([[[1, 1, 0]]]).bool()
    a = MaskedHeads(torch.tensor([[[1., 2., math.nan]]]), legal)
    b = MaskedHeads(torch.tensor([[[1., 2., -7.]]]), legal)
    assert torch.equal(a.logp, b.logp) and a.log_prob(torch.tensor([[2]])).item() == -math.inf


def test_a_floor_per_head():
    logits, legal = torch.tensor([[[9., 0.], [9., 0.]]]), torch.ones(1, 2, 2).bool()
    p = MaskedHeads(logits, legal, torch.tensor([0., 0.1])).logp.exp()
    assert p[0, 0, 1] < 1e-3 and abs(p[0, 1, 1].item() - 0.1) < 1e-3


def test_fp32_from_half_precision_logits():
    logits = torch.randn(3, 1, 5, dtype=torch.bfloat16)
    assert MaskedHeads(logits, torch.ones(3, 1, 5).bool()).logp.dtype == torch.float32


SPACES = [(gym.spaces.Discrete(4, start=2), (4,)), (gym.spaces.MultiDiscrete([2, 5], start=[1, -1]), (2, 5))]

@pytest.mark.parametrize("space, sizes", SPACES)
def test_actions_are_members_of_the_space(space, sizes):
    heads = heads_of(space)
    assert heads.sizes == sizes
    for _ in range(20):
        action = torch.stack([torch.randint(0, s, (3,)) for s in sizes], -1)
        for a in to_env(action, space): assert space.contains(a)
