"Gradient measurements per lane: agreement with torch, separation of lanes, absence told from zero."
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from esper_nb.train.gradients import (
    flat_lanes, gradient_health, lane_grads, norm_ratio, owner_norms, tensor_norms)

SHAPES = [(3, 2, 3, 3), (5,), (4, 7), (1,), (2, 3, 4)]


def with_grads(lanes, seed=0, shapes=SHAPES, exponent=0.):
    "Parameters of `lanes` lanes with random gradients, the convolution in channels_last."
    g = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(torch.randn(lanes * s[0], *s[1:], generator=g)) for s in shapes]
    for p in params:
        if p.ndim == 4: p.data = p.data.contiguous(memory_format=torch.channels_last)
        p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=g) * 10**exponent)
    return params


@settings(deadline=None, max_examples=20)
@given(lanes=st.integers(1, 6), seed=st.integers(0, 1000), exponent=st.floats(-15, 15))
def test_norms_equal_torch_per_lane(lanes, seed, exponent):
    params = with_grads(lanes, seed, exponent=exponent)
    norms = owner_norms(lane_grads(params, lanes))
    for i in range(lanes):
        want = nn.utils.get_total_norm([p.grad.unflatten(0, (lanes, -1))[i] for p in params])
        assert torch.allclose(norms[i], want, rtol=1e-5, atol=0)
    if lanes == 1: assert torch.equal(norms[0], nn.utils.get_total_norm([p.grad for p in params]))


@settings(deadline=None, max_examples=20)
@given(lanes=st.integers(2, 6), seed=st.integers(0, 1000), poison=st.sampled_from([math.nan, math.inf, -math.inf]),
       data=st.data())
def test_a_poisoned_lane_is_seen_alone(lanes, seed, poison, data):
    params = with_grads(lanes, seed)
    before = owner_norms(lane_grads(params, lanes))
    lane, which = data.draw(st.integers(0, lanes - 1)), data.draw(st.integers(0, len(params) - 1))
    grad = lane_grads(params, lanes)[which][lane]
    grad[data.draw(st.integers(0, len(grad) - 1))] = poison
    after = owner_norms(lane_grads(params, lanes))
    others = [i for i in range(lanes) if i != lane]
    assert after[lane] == math.inf and torch.equal(after[others], before[others])
    health = gradient_health(params, lanes)
    assert health.exploding[lane] > 0 and health.health[lane] == 0 and not torch.stack(health).isnan().any()


@pytest.mark.parametrize("shape, format", [
    ((6, 2), None), ((6, 4, 3, 3), torch.channels_last), ((6, 4, 2, 3, 3), torch.channels_last_3d), ((6,), None)])
def test_lanes_are_views(shape, format):
    t = torch.randn(shape)
    if format: t = t.contiguous(memory_format=format)
    for i, own in enumerate(flat_lanes(t, 3)):
        assert torch.equal(own.sort().values, t.unflatten(0, (3, -1))[i].flatten().sort().values)
    flat_lanes(t, 3)[1] = 0
    assert t.unflatten(0, (3, -1))[1].eq(0).all() and t.unflatten(0, (3, -1))[0].ne(0).all()


def test_a_view_into_a_larger_tensor_starts_where_it_should():
    base = torch.arange(24.).view(4, 6)
    assert torch.equal(flat_lanes(base[2:], 2), base[2:])


def test_gradients_in_an_odd_layout_are_made_solid():
    p = nn.Parameter(torch.zeros(4, 3))
    p.grad = torch.arange(12.).view(3, 4).t()
    want = p.grad.clone()
    flat = lane_grads([p], 2)[0]
    assert torch.equal(p.grad, want) and torch.equal(flat, want.reshape(2, 6))
    flat.zero_()
    assert p.grad.eq(0).all()


def test_fractions_count_tensors():
    params = with_grads(2)
    grads = lane_grads(params, 2)
    grads[0][0] = grads[1][0] = 0
    grads[2][1], grads[3][1] = 1e6, math.nan
    health = gradient_health(params, 2, explode=20.)
    assert torch.allclose(health.vanishing, torch.tensor([.4, 0.]))
    assert torch.allclose(health.exploding, torch.tensor([0., .4]))


def test_the_number_of_tensors_does_not_divide_the_norm():
    whole, parts = with_grads(2, shapes=[(8,)]), with_grads(2, shapes=[(4,), (4,)])
    grad = lane_grads(whole, 2)[0]
    for p, columns in zip(parts, (grad[:, :4], grad[:, 4:])): p.grad = columns.reshape(-1).clone()
    assert torch.allclose(owner_norms(lane_grads(whole, 2)), owner_norms(lane_grads(parts, 2)))
    assert torch.equal(tensor_norms(lane_grads(whole, 2))[0], owner_norms(lane_grads(whole, 2)))


def test_ratio_is_free_of_size():
    a, b = torch.randn(100), torch.randn(10_000)
    ratio = norm_ratio(a.norm()[None], b.norm()[None], 100, 10_000)
    assert torch.allclose(ratio, a.square().mean().sqrt() / b.square().mean().sqrt())
    with pytest.raises(ValueError, match="at least one"): norm_ratio(a, b, 0, 1)


@pytest.mark.cuda
def test_norms_on_cuda():
    params = with_grads(3)
    there = [nn.Parameter(p.detach().cuda()) for p in params]
    for p, q in zip(params, there): q.grad = p.grad.cuda()
    assert torch.allclose(owner_norms(lane_grads(params, 3)), owner_norms(lane_grads(there, 3)).cpu(), rtol=1e-5)
