"The judge: eleven faults on fresh seeds, false alarms, count rules, purity."
import copy
import math
import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from esper_nb.guard import (
    RULES, DetectorConfig, Governor, GovernorConfig, LossStats, Rule, judge, label_entropy, list_thresholds, threshold)
from esper_nb.record import governor_rows
from esper_nb.show import incident_from_report, plot_incidents, row_incident, rules_help

REASONS = ("healthy", *RULES)

CHANCE = math.log(10)
CLASSIC = DetectorConfig(absolute=None, absolute_loss=12.0, huge=None, cold=None, window=20, min_samples=10, refresh=1,
                         rise=None, collapse_confirm=1, collapse_z=None)


# --- the bench; thresholds were chosen on other seeds

def trace(rng, lanes, steps=2000, noise=.08, floor=.9):
    fall = floor + 1.4 * np.exp(-np.arange(steps) / 150)
    return fall[:, None] * np.exp(noise * rng.standard_normal((steps, lanes)))

AT = 1200
def level(x, value, rng): x[AT:] = value * np.exp(.02 * rng.standard_normal(x[AT:].shape))
def scale(x, factor): x[AT:] *= factor
FAULTS = {"nan": lambda x, r: x.__setitem__(AT, np.nan), "+inf": lambda x, r: x.__setitem__(AT, np.inf),
          "-inf": lambda x, r: x.__setitem__(AT, -np.inf), "x50 once": lambda x, r: x.__setitem__(AT, 50 * x[AT]),
          "x50": lambda x, r: scale(x, 50), "x8": lambda x, r: scale(x, 8), "x3": lambda x, r: scale(x, 3),
          "collapse": lambda x, r: level(x, CHANCE, r), "collapse from 1.3": lambda x, r: level(x, CHANCE, r),
          "collapse to 1.12 chance": lambda x, r: level(x, 1.12 * CHANCE, r), "drift": lambda x,
          r: scale(x, 1.01 ** np.arange(1, len(x) - AT + 1)[:, None])}

def first_failure(x, limits=DetectorConfig(), chance=CHANCE):
    "(n,) step of the first failure, -1 if none, and its reason."
    s, at, why = LossStats(x.shape[1]), np.full(x.shape[1], -1), np.zeros(x.shape[1], int)
    for t, row in enumerate(x):
        v = s.judge(row, limits, np.full(len(row), chance))
        new = (v.code > 0) & (at < 0)
        at[new], why[new] = t, v.code[new]
    return at, why

@pytest.mark.parametrize("name", FAULTS)
def test_eleven_faults_on_forty_fresh_seeds(name):
    rng = np.random.default_rng(777_000 + list(FAULTS).index(name))
    x = trace(rng, 40, AT + 100, floor=1.3 if name.endswith("1.3") else .9)
    FAULTS[name](x, rng)
    at, why = first_failure(x)
    assert (at >= AT).sum() >= 39 and not ((at >= 0) & (at < AT)).any()
    delay = np.median(at[at >= AT] - AT)
    assert delay <= (0 if "nan" in name or "inf" in name else 50 if name == "drift" else 3)
    expected = {"explosion"}
    if name in ("nan", "+inf", "-inf"): expected = {"non-finite"}
    if "collapse" in name: expected = {"collapse"}
    if name in ("x3", "collapse to 1.12 chance"): expected = {"rise", "collapse"}
    if name == "drift": expected = {"rise"}
    assert {REASONS[c] for c in why[at >= AT]} <= expected

@pytest.mark.parametrize("noise,most", [(.08, 0), (.3, 1), (.6, 5)])
def test_false_alarms_per_ten_thousand_steps(noise, most):
    x = trace(np.random.default_rng(888_000 + int(noise * 100)), 100, noise=noise)
    s, alarms = LossStats(100), 0
    for row in x: alarms += (s.judge(row, DetectorConfig(), np.full(100, CHANCE)).code > 0).sum()
    assert alarms <= most * x.size / 1e4


# --- properties

@st.composite
def healthy_runs(draw):
    "A loss that starts near chance, may warm up, falls, may drop with the learning rate; noisy, in any unit."
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    noise, floor = draw(st.floats(0, .3)), draw(st.floats(.001, .9))
    tau, unit = draw(st.floats(20, 3000)), draw(st.sampled_from([1e-3, 1., 50.]))
    steps = draw(st.lists(st.integers(0, 499), max_size=3))
    t = np.arange(500)
    warm = draw(st.integers(0, 100))
    fall = floor + (1 - floor) * np.exp(-np.maximum(t - warm, 0) / tau)
    for drop in steps: fall = fall * np.where(t > drop, draw(st.floats(.3, 1)), 1)
    return fall * unit * np.exp(noise * rng.standard_normal(500)), unit

@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(healthy_runs(), st.booleans())
def test_a_healthy_run_never_fails(run, with_chance):
    x, chance = run
    assert (first_failure(x[:, None], DetectorConfig(), chance)[0] < 0).all() if with_chance else (first_none(x) < 0)

def first_none(x):
    s = LossStats()
    for t, row in enumerate(x):
        if s.judge(np.array([row]), DetectorConfig()).code[0]: return t
    return -1

def learnt(noise=.05, n=1, steps=60, seed=0):
    s = LossStats(n)
    for row in 0.9 * np.exp(noise * np.random.default_rng(seed).standard_normal((steps, n))):
        s, _ = judge(s, row, chance_loss=CHANCE)
    return s

@settings(deadline=None, max_examples=25)
@given(st.lists(st.sampled_from(["fine", "above", "nan"]), min_size=1, max_size=30), st.integers(1, 5))
def test_count_rules(kinds, confirm):
    """An explosion is `confirm` anomalies in a row, or far more than usual among the latest; a healthy loss ends the
    row, a NaN neither adds to it nor ends it."""
    limits, s, row, late, usual = DetectorConfig(confirm=confirm, rise=None), learnt(), 0, 0., 0.
    for kind in kinds:
        s, v = judge(s, dict(fine=.9, above=8., nan=math.nan)[kind], limits, CHANCE)
        row = row + 1 if kind == "above" else row if kind == "nan" else 0
        if kind != "nan": late = late * 31 / 32 + (kind == "above")
        if kind != "nan" and late < 2: usual += ((kind == "above") - usual) / 512
        assert v.count[0] == row == s.count[0] and np.allclose((s.late[0], s.usual[0]), (late, usual))
        many = late >= confirm + .5 + 32 * usual + 4 * (32 * usual)**.5
        exploded = "explosion" if kind == "above" and (row >= confirm or many) else "healthy"
        assert v.reason() == ("non-finite" if kind == "nan" else exploded)

@settings(deadline=None, max_examples=25)
@given(st.lists(st.one_of(st.floats(5.0, 1e30), st.sampled_from([math.nan, math.inf, -math.inf, CHANCE])), min_size=1,
                max_size=20))
def test_statistics_are_unchanged_by_anomalies(losses):
    s = before = learnt()
    for x in losses: s, _ = judge(s, x, chance_loss=CHANCE)
    for k in ("ring", "seen", "mean", "sigma", "level", "spread"):
        assert np.array_equal(getattr(s, k), getattr(before, k)), k
    assert [t for t, _ in s.anomalies(0)] == list(range(60, 60 + len(losses)))[-8:]

@settings(deadline=None, max_examples=20)
@given(st.lists(st.floats(1e-3, 20.) | st.just(math.nan), min_size=1, max_size=60), st.integers(0, 59))
def test_a_round_trip_at_any_point_changes_nothing(losses, cut):
    a = b = learnt()
    for t, x in enumerate(losses):
        if t == cut:
            state = {k: v.clone() for k, v in b.state_dict().items()}
            b = LossStats(); b.load_state_dict(state)
        (a, v), (b, w) = judge(a, x, chance_loss=CHANCE), judge(b, x, chance_loss=CHANCE)
        assert v.code == w.code and np.array_equal(v.limit, w.limit)
    for k, x in a.arrays.items(): assert np.array_equal(x, b.arrays[k], equal_nan=True), k

@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s)), LossStats.copy])
def test_a_copy_of_statistics_goes_on_alike_and_alone(copied):
    a, limits = learnt(), DetectorConfig()
    for loss in (.9, .95): assert a.pass_healthy(loss, limits, CHANCE)
    b, then = copied(a), a.copy()
    for loss in 0.9 * np.exp(.05 * np.random.default_rng(1).standard_normal(40)):
        assert b.pass_healthy(float(loss), limits, CHANCE)
    for k, x in a.arrays.items(): assert np.array_equal(x, then.arrays[k]), k
    for loss in 0.9 * np.exp(.05 * np.random.default_rng(1).standard_normal(40)):
        assert a.pass_healthy(float(loss), limits, CHANCE)
    for k, x in a.arrays.items(): assert np.array_equal(x, b.arrays[k]) and x is getattr(a, k), k

def test_what_somebody_writes_into_the_statistics_counts_for_the_next_loss():
    s, limits = learnt(), DetectorConfig()
    assert s.pass_healthy(.9, limits, CHANCE) and s.judged[0] == 61
    s.judged += 5
    s.cusum[0], s.base[0] = 3 * limits.rise, 0.
    assert not s.pass_healthy(2., limits, CHANCE), "the rule of rises speaks"
    s.calm_down([0])
    assert s.pass_healthy(.9, limits, CHANCE) and s.judged[0] == 67 and s.cusum[0] < limits.rise

@settings(deadline=None, max_examples=15)
@given(st.integers(1, 5), st.integers(0, 10**6))
def test_lanes_are_judged_as_if_alone(n, seed):
    rng = np.random.default_rng(seed)
    x = np.exp(rng.normal(0, .4, (80, n))); x[rng.random((80, n)) < .03] *= 20; x[rng.random((80, n)) < .01] = np.nan
    together, alone = LossStats(n), [LossStats() for _ in range(n)]
    for row in x:
        together, v = judge(together, row, chance_loss=CHANCE)
        for i in range(n):
            alone[i], w = judge(alone[i], row[i], chance_loss=CHANCE)
            assert v.code[i] == w.code[0] and np.isclose(v.limit[i], w.limit[0], rtol=1e-12)

def test_inactive_lanes_stay_as_they_are():
    s = learnt(n=3)
    t, v = judge(s, [math.nan, 50., .9], chance_loss=CHANCE, active=[False, False, True])
    assert v.code.tolist() == [0, 0, 0] and t.judged.tolist() == [60, 60, 61] and np.array_equal(t.count, [0, 0, 0])

@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10**6), st.floats(.01, .8))
def test_plain_numbers_and_arrays_give_the_same_statistics(seed, noise):
    rng = np.random.default_rng(seed); limits = DetectorConfig()
    x = np.exp(noise * rng.standard_normal(300)); x[rng.random(300) < .02] *= 30
    a, b = LossStats(), LossStats()
    for loss in x:
        v = a.judge(np.array([loss]), limits, np.array([CHANCE]))
        if b.pass_healthy(loss, limits, CHANCE): assert v.code[0] == 0
        else: assert b.judge(np.array([loss]), limits, np.array([CHANCE])).code[0] == v.code[0]
    for k in a.arrays: np.testing.assert_allclose(a.arrays[k], b.arrays[k], rtol=1e-9, atol=1e-9)


# --- single rules

def test_the_classic_rule():
    s = LossStats()
    for t in range(9): s, v = judge(s, 2.5, CLASSIC, CHANCE); assert v.code == 0
    s, v = judge(s, 100.0, CLASSIC, CHANCE)
    assert v.code == 0 and s.seen == 10  # less than ten: anything goes
    s = LossStats()
    for t in range(20): s, _ = judge(s, .9, CLASSIC, CHANCE)
    assert judge(s, 11.9, CLASSIC, CHANCE)[1].count == 0 and judge(s, 12.1, CLASSIC, CHANCE)[1].count == 1
    s2 = s
    for expected in (0, 0, 2, 2): s2, v = judge(s2, 13., CLASSIC, CHANCE); assert v.code == expected
    s, v = judge(s, CHANCE * 1.06, CLASSIC, CHANCE); assert v.reason() == "collapse"
    assert judge(s, CHANCE * 1.07, CLASSIC, CHANCE)[1].code == 0

def test_without_a_chance_loss_there_is_no_collapse_and_the_absolute_limit_is_the_run_s_own():
    s = learnt()
    for x in (8., 9., 8.): s, v = judge(s, x, DetectorConfig(rise=None))
    assert v.reason() == "explosion" and np.isclose(v.absolute, np.exp(s.level + 6 * s.spread))
    s = learnt(noise=1.5, steps=300)
    s, v = judge(s, 6 * float(s.highest[0]), DetectorConfig(rise=None)) # k·σ in log space is thousands here
    assert v.anomaly[0] and np.isclose(v.absolute, 5 * s.highest) and not v.failed[0], "one is no proof"
    s = learnt()
    for _ in range(5): s, v = judge(s, CHANCE, DetectorConfig(rise=None)); assert v.code == 0

@pytest.mark.parametrize("share,found", [(0., False), (.01, False), (.3, True)])
def test_anomalies_between_healthy_losses_are_an_explosion_if_they_are_many(share, found):
    rng, answers = np.random.default_rng(3), set()
    for _ in range(8):
        s = learnt(steps=200)
        for bad in rng.random(100) < share:
            s, v = judge(s, 9. if bad else .9, DetectorConfig(rise=None, confirm=4))
            if v.failed[0]: break
        answers.add(v.failed[0])
    assert answers == {found}

def test_anomalies_that_were_always_there_are_none_too_many():
    "Every twentieth loss of a healthy run is far out, from the beginning: no alarm, and snapshots go on."
    rng, calm = np.random.default_rng(4), []
    for _ in range(2):
        s = LossStats()
        for t in range(1500):
            s, v = judge(s, 9. * 1.05**(t % 7) if t > 30 and rng.random() < .05 else .9, DetectorConfig(rise=None))
            assert not v.failed[0] or v.count[0] >= 3, t
            if t > 300: calm.append(s.calm(DetectorConfig(rise=None))[0])
    assert np.mean(calm) > .7

def test_a_run_that_blows_up_at_once_is_seen_without_statistics():
    s = LossStats()
    for x in (2.3, 2.2, 40.): s, v = judge(s, x, chance_loss=CHANCE); assert v.code == 0
    for x in (300., 9000.): s, v = judge(s, x, chance_loss=CHANCE)
    assert v.reason() == "explosion"

def test_negative_and_zero_losses_are_losses():
    s = LossStats()
    for x in np.random.default_rng(0).normal(-3, .5, 300): s, v = judge(s, x); assert v.code == 0
    for x in np.zeros(50): s, v = judge(s, x); assert not np.isnan(s.sigma).any()

def test_label_entropy():
    assert math.isclose(label_entropy(torch.arange(7).repeat(3)), math.log(7))
    assert math.isclose(label_entropy(torch.tensor([3, 3, 3])), 0., abs_tol=1e-12)
    assert math.isclose(label_entropy(torch.tensor([0, 1, -100, -1])), math.log(2))
    for same in ([0, 1], np.array([0, 1]), torch.tensor([0., 1.]), torch.tensor([False, True])):
        assert math.isclose(label_entropy(same), math.log(2))
    for wrong in (torch.tensor([.5, 1.]), torch.tensor([-1, -1]), []):
        with pytest.raises(ValueError, match="expected numbers of classes: whole"): label_entropy(wrong)

def test_a_first_loss_near_zero_says_nothing_about_the_size_of_signed_losses():
    "−0.02, then 0.4: no explosion, since one loss of either sign is no scale to judge by."
    stats, chance = LossStats(1), None
    for loss in (-.022, .389, .578, .32, .239, .146, .477):
        stats, verdict = judge(stats, np.array([loss]), DetectorConfig(), chance)
        assert not verdict.anomaly[0] and verdict.code[0] == 0
    for loss in .3 + .1 * np.random.default_rng(0).standard_normal(20):
        stats, verdict = judge(stats, np.array([loss]), DetectorConfig(), chance)
        assert verdict.code[0] == 0
    stats, verdict = judge(stats, np.array([1e6]), DetectorConfig(), chance)
    assert REASONS[verdict.code[0]] == "explosion"


# --- a rule more

@dataclass(frozen=True)
class StallConfig(GovernorConfig):
    stall: int = threshold(100, 2, 1000, 1) # equal losses in a row that make a stall

def find_stall(look, c, same, last):
    "As many equal losses in a row as the config allows."
    same = look.ops.where(look.ok, look.ops.where(look.loss == last, same + 1, 1), same)
    return look.ok & (same >= c.stall), look.ok & False, same, look.ops.where(look.ok, look.loss, last)

def test_a_rule_is_one_row_that_reports_plots_and_panel_use(monkeypatch):
    "One row and one field: found in full and in plain numbers, reported, recorded, drawn, and explained in the panel."
    row = Rule("stall", "the loss does not move at all", "*", find_stall, dict(same=int, last=float), counts=("same",),
               calm=lambda c, same, last: same < c.stall / 2,
               compared=lambda report, stats, c: f"{int(stats.same[report.lane])} equal losses of {c.stall}")
    monkeypatch.setitem(RULES, "stall", row)
    reports = []
    for lanes in (1, 2):
        gov = Governor(torch.nn.Linear(1, 2), chance_loss=None, lanes=lanes, config=StallConfig())
        found = [(t, r.lane, r.reason, r.action) for t in range(105) for r in gov.watch(torch.full((lanes,), .5))]
        assert found == [(99, lane, "stall", "rollback") for lane in range(lanes)]
        reports += gov.reports
    said = "stall (loss 0.5, 100 equal losses of 100)"
    rows = governor_rows(reports[:1], step=99)
    assert rows[0]["governor.reason"] == "stall"
    assert [str(r).startswith(f"{where}: {said} -> rollback") for where, r in
            zip(("batch 99", "step 100, lane 0", "step 100, lane 1"), reports)] == [True] * 3
    for seen in (incident_from_report(reports[0], number=1, x=99, end=99, back=0), row_incident(rows[0], 99, 1)):
        assert str(seen).startswith(f"lane 0: {said} → rollback"), "in the panel, of a run here and of another process"
    assert "*" in [line.get_marker() for line in plot_incidents(rows).lines]
    assert "<b>stall</b>: the loss does not move at all" in rules_help()
    assert list_thresholds(StallConfig)["stall"] == (2, 1000, 1, "equal losses in a row that make a stall")
    assert "stall" not in list_thresholds(GovernorConfig)

def test_every_rule_judges_in_plain_numbers_as_in_full():
    "What one rule finds in arrays, it finds in plain numbers: healthy losses pass, each other one is declined."
    for bad in (math.nan, math.inf, 60., CHANCE):
        s, config = learnt(), DetectorConfig(collapse_confirm=1, confirm=1)
        assert s.pass_healthy(.9, config, CHANCE) and not s.pass_healthy(bad, config, CHANCE)
        before = s.copy()
        assert not s.pass_healthy(bad, config, CHANCE)
        assert all(np.array_equal(x, s.arrays[k]) for k, x in before.arrays.items()), "declined, so nothing has changed"
