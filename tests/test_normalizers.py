"Statistics: merging in any split, freezing, and what stays outside."
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from esper_nb.learn.normalizers import (
    Moments, ObsNormalizer, RewardNormalizer, ValueNormalizer, _standardize_there, standardize)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.floats(-1e6, 1e6), st.floats(1e-3, 1e3),
       st.integers(0, 10**6))
def test_any_split_gives_the_same_moments(parts, shift, scale, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(parts), 2, generator=g, dtype=torch.float64) * scale + shift
    one, merged = Moments(2), Moments(2)
    for i, part in enumerate(x.split(parts)):
        one.update(part)
        piece = Moments(2); piece.update(part)
        merged.merge(piece)
    if not len(x): assert one.count == 0 and one.var.tolist() == [1, 1]; return
    for m in (one, merged):
        assert m.count == len(x)
        torch.testing.assert_close(m.mean, x.mean(0), rtol=1e-9, atol=1e-9 * scale)
        torch.testing.assert_close(m.var, x.var(0, correction=0), rtol=1e-6, atol=1e-8 * (abs(shift) + scale) ** 2)


@pytest.mark.parametrize("given", [[1e160, 2e160], [1.3e154, 1.3e154]])
def test_numbers_whose_squares_overflow_are_refused_whole(given):
    "Statistics that have met one would be infinite for ever, and say nothing."
    m = Moments(1); m.update(torch.randn(5, 1))
    before = m.state_dict()
    with pytest.raises(ValueError, match="squares are finite"):
        m.update(torch.tensor(given, dtype=torch.float64)[:, None])
    assert m.count == before["count"] and torch.equal(m.mean, before["mean"]) and torch.equal(m.var, before["var"])


@pytest.mark.parametrize("var", [-1., math.nan, math.inf])
def test_statistics_that_cannot_be_are_not_loaded(var):
    "A file in which a mean stood for a variance made every action NaN, and only in some buildings."
    m = ObsNormalizer(1); m.observe(torch.randn(9, 1)); m.commit()
    state = m.state_dict()
    state["moments"]["var"] = torch.tensor([var], dtype=torch.float64)
    with pytest.raises(ValueError, match="variances of 0 or more"): ObsNormalizer(1).load_state_dict(state)


def test_every_state_comes_back():
    obs, rew, val = ObsNormalizer(3), RewardNormalizer(2, 0.9), ValueNormalizer()
    obs.observe(torch.randn(9, 3)); obs.commit(); obs.observe(torch.randn(4, 3))
    rew.observe(torch.randn(7, 2), torch.zeros(7, 2).bool(), torch.ones(7, 2).bool()); val.observe(torch.randn(9))
    obs2, rew2, val2 = ObsNormalizer(3), RewardNormalizer(2, 0.9), ValueNormalizer()
    for a, b in ((obs, obs2), (rew, rew2), (val, val2)): b.load_state_dict(a.state_dict())
    for o in (obs, obs2): o.commit()
    for r in (rew, rew2): r.observe(torch.ones(3, 2), torch.zeros(3, 2).bool(), torch.ones(3, 2).bool())
    x = torch.randn(5, 3)
    assert torch.equal(obs(x), obs2(x)) and rew.scale == rew2.scale and val.scale == val2.scale
    with pytest.raises(ValueError, match="statistics of 4 numbers"): ObsNormalizer(4).load_state_dict(obs.state_dict())
    with pytest.raises(ValueError, match="3 lanes"): RewardNormalizer(3, 0.9).load_state_dict(rew.state_dict())


def test_a_saved_state_is_a_copy():
    m = Moments(1); m.update(torch.randn(9, 1))
    saved = m.state_dict(); keep = saved["mean"].clone()
    m.update(torch.randn(9, 1) + 5)
    assert torch.equal(saved["mean"], keep)


def test_the_discounted_return_goes_on_over_rollouts():
    "Two rollouts of 5 steps give the scale of one of 10."
    g = torch.Generator().manual_seed(0)
    r, start = torch.randn(10, 2, generator=g), torch.rand(10, 2, generator=g) < 0.2
    whole, halves = RewardNormalizer(2, 0.9), RewardNormalizer(2, 0.9)
    counts = torch.ones(10, 2).bool()
    whole.observe(r, start, counts)
    for s in (slice(0, 5), slice(5, 10)): halves.observe(r[s], start[s], counts[s])
    assert abs(whole.scale - halves.scale) < 1e-12


def test_sign_of_rewards_is_kept():
    rn = RewardNormalizer(1, 0.9)
    r = torch.rand(50, 1) + 5
    rn.observe(r, torch.zeros(50, 1).bool(), torch.ones(50, 1).bool())
    assert (rn(r, torch.zeros(50, 1).bool()) > 0).all(), "no mean is subtracted"


@pytest.mark.parametrize("keep", [(3,), (-1,)])
def test_columns_that_are_not_there_cannot_be_kept(keep):
    with pytest.raises(ValueError, match="keep=.*expected columns of an observation of width 3"): ObsNormalizer(3, keep)


@pytest.mark.parametrize("f", [standardize, _standardize_there])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_advantage_that_is_not_finite_stays_in_sight(f, bad):
    adv, valid = torch.tensor([1., bad, 3., bad]), torch.tensor([True, True, True, False])
    assert not f(adv, valid)[:3].isfinite().all()
    seen = valid & adv.isfinite()
    assert f(adv, seen).tolist() == pytest.approx([-2**-.5, 0, 2**-.5, 0], abs=1e-6)
