"Every limit fires on its condition and is silent beside it; the watch is a fold over rows."
import itertools
import math
import random

import pytest
from hypothesis import given, settings, strategies as st

from esper_nb.record.alarms import (
    ALARM_RULES, LEVELS, STATISTICS, METRICS, AlarmWatch, alarm_rows, find_alarms, find_metric)
from esper_nb.record.rows import make_rows

CASES = [(rule, i) for rule in ALARM_RULES for i, at in enumerate(rule.at) if at is not None]
WORDS, NUMBERS = ([c for c in CASES if (c[0].side == "is") == words] for words in (True, False))


def case_name(x): return LEVELS[x] if isinstance(x, int) else named(x)

def named(rule): return rule.name + rule.metric

def name_of(rule): return rule.metric.replace("*", "speed")

def build(rule, values, **others):
    "Rows with one metric, and what its statistic needs beside it."
    return [{"kind": "update", "lane": 0, "update": t, name_of(rule): v, **others} for t, v in enumerate(values)]

def rows_with(rule, x):
    "Rows at whose end the statistic of this rule is x."
    n, m = rule.rows, rule.statistic
    if m == "value": return build(rule, [x] * n)
    if m == "jump": return build(rule, [1.] * 5 + [x])
    if m == "pace": return build(rule, [10.] * 20 + [10. * x] * n)
    if m == "fall": return build(rule, [50.] * 3 + [50. - x] * 3)
    if m == "fall_share": return build(rule, [10.] * 3 + [10. * (1 - x)] * 3)
    if m == "gain": return build(rule, [50. - 2 * i for i in range(5, 0, -1)] + [50.] + [50. + x] * 10)
    if m == "drift":      # each value at this distance from the average of those before it
        values = [1.] * 10
        for _ in range(n):
            w = [.99**k for k in range(len(values))]
            values.append((1 + x) * sum(a * b for a, b in zip(w, reversed(values))) / sum(w))
        return build(rule, values)
    if m == "waits":
        waits = round(50 * x)
        return build(rule, ["prune"] * 50 + ["wait"] * waits + ["prune"] * (50 - waits))
    if m == "refusals": return build(rule, [True] * (50 - round(50 * x)) + [False] * round(50 * x))
    if m == "ransom": return build(rule, [x] * n, **{"slot.gain_pp": -1.})
    if m == "lean": return build(rule, [2. * x] * n, **{"slot.gain_pp": 2.})
    if m == "gap": return build(rule, [2. * x] * n, **{"train.loss": 2.})
    if m == "of_chance": return build(rule, [2.3 * x] * n, **{"limit.chance_loss": 2.3})
    if m == "of_terms": return build(rule, [x] * n, **{"reward.rent": x - 1})
    raise AssertionError(f"no rows for statistic {m}: add them here")

def levels(rule, rows): return [a.level for a in find_alarms(rows) if a.name == rule.name]

def step(rule):
    "What lies just beyond a limit: a little, or one of the 50 steps that a share is made of."
    return .02 if rule.statistic in ("waits", "refusals") else 1e-6

@pytest.mark.parametrize("rule, i", WORDS, ids=case_name)
def test_each_word_fires_and_others_are_silent(rule, i):
    at = rule.at[i]
    word = "some text" if at == "*" else at.split()[0]
    assert levels(rule, rows_with(rule, word)) == [LEVELS[i]]
    assert levels(rule, rows_with(rule, None)) == []
    assert at == "*" or levels(rule, rows_with(rule, word + "x")) == []

@pytest.mark.parametrize("rule, i", NUMBERS, ids=case_name)
def test_each_limit_fires_beyond_and_is_silent_beside(rule, i):
    at = rule.at[i]
    if math.isinf(at):
        assert levels(rule, rows_with(rule, 1e300)) == []
        assert levels(rule, rows_with(rule, math.nan)) == [LEVELS[i]]
        return
    width = step(rule) * max(1., abs(at)) * (1 if rule.side == "above" else -1)
    beyond, beside = levels(rule, rows_with(rule, at + width)), levels(rule, rows_with(rule, at - width))
    assert beyond[-1:] == [LEVELS[i]], "silent on its condition"
    assert LEVELS[i] not in beside, "fires beside its condition"
    assert i > 0 and rule.at[i - 1] is not None or beside == []

@pytest.mark.parametrize("rule", [r for r in ALARM_RULES if r.rows > 1], ids=named)
def test_a_limit_waits_for_its_rows(rule):
    at, sign = next(x for x in rule.at if x is not None), 1 if rule.side == "above" else -1
    rows = rows_with(rule, at + sign * 1e-6 * max(1., abs(at)))
    assert levels(rule, rows) and not levels(rule, rows[:-1])

@pytest.mark.parametrize("rule", [r for r in ALARM_RULES if r.statistic == "value" and r.side != "is"], ids=named)
def test_not_finite_is_beyond_at_once_and_not_measured_is_nothing(rule):
    worst = [LEVELS[i] for i, at in enumerate(rule.at) if at is not None][-1]
    assert levels(rule, build(rule, [math.nan])) == [worst]
    assert levels(rule, build(rule, [None] * 10)) == []

def test_every_statistic_is_used_and_explained():
    assert {r.statistic for r in ALARM_RULES} == set(STATISTICS) and all(f.__doc__ for f in STATISTICS.values())

@pytest.mark.parametrize("rule", ALARM_RULES, ids=named)
def test_limits_watch_what_is_written(rule):
    metric = find_metric(name_of(rule))
    assert metric.kind and (metric.unit == "text") == (rule.side == "is" or rule.statistic == "waits")

def test_alarms_differ_by_lane_slot_and_seed():
    def slot(lane, name, germination, share):
        metrics = dict(germination=[germination], exploding=[share])
        return make_rows("slot", {"slot": metrics}, lanes=[lane], slot=name, epoch=0)
    rows = slot(0, "a", 1, .2) + slot(1, "a", 1, .2) + slot(0, "b", 1, .2)
    rows += slot(0, "a", 1, .2) + slot(0, "a", 2, .2) + slot(0, "a", 1, .9)
    found = [(a.lane, a.slot, a.level) for a in find_alarms(rows)]
    assert found[:3] == [(0, "a", "warning"), (1, "a", "warning"), (0, "b", "warning")]
    assert found[3:] == [(0, "a", "warning"), (0, "a", "critical")]

def test_a_standing_alarm_goes_out():
    watch, rule = AlarmWatch(), next(r for r in ALARM_RULES if r.name == "policy moved far")
    watch.feed(build(rule, [.2]))
    assert watch.standing == [("warning", rule.name, rule.metric, 0, None)]
    watch.feed(build(rule, [.01]))
    assert watch.standing == []

WATCHED = ["update.approx_kl", "update.entropy_mean", "heldout.accuracy_pp", "train.loss", "slot.health"]
numbers = st.one_of(st.none(), st.floats(0, 100), st.just(math.nan))

@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(WATCHED), numbers), max_size=40),
       st.lists(st.integers(0, 40), max_size=4))
def test_feeding_in_pieces_changes_nothing(events, cuts):
    rows = [{"kind": "epoch", "lane": lane, "epoch": t, name: v} for t, (lane, name, v) in enumerate(events)]
    ends = sorted({0, len(rows), *(c for c in cuts if c < len(rows))})
    watch = AlarmWatch()
    pieces = [a for i, j in itertools.pairwise(ends) for a in watch.feed(rows[i:j])]
    whole = find_alarms(rows)
    assert [str(a) for a in pieces] == [str(a) for a in whole]
    for row in alarm_rows(whole): assert all(find_metric(k).covers(v) for k, v in row.items() if "." in k)

def test_rows_of_a_long_run_are_checked_fast_enough_to_do_it_live():
    g, watch = random.Random(0), AlarmWatch()
    names = [m for m in METRICS if m.startswith(("train.", "heldout.", "slot.")) and METRICS[m].unit != "text"]
    for epoch in range(300):
        place = {"kind": "epoch", "epoch": epoch}
        watch.feed([{**place, "lane": lane, **{n: g.random() for n in names}} for lane in range(4)])
    assert all(len(state.past) <= 200 for state in watch.states.values()) # memory does not grow with the run


# --- episodes

@pytest.mark.parametrize("end", ["episode", None])
def test_a_new_episode_raises_nothing_but_a_fall_within_one_does(end):
    rows = []
    for t in range(48):
        accuracy, loss = 10 + 6 * (t % 12), 2.3 - .18 * (t % 12)
        rows += make_rows("epoch", dict(heldout=dict(accuracy_pp=[accuracy]), train=dict(loss=[loss])), epoch=t)
        if t % 12 < 11 or end is None: continue
        rows += make_rows("episode", dict(episode=dict(total=[5.])), epoch=t)
    assert bool(find_alarms(rows)) == (end is None)
    for t in range(48, 58):     # and one that breaks down in its second half
        heldout = dict(accuracy_pp=[80. if t < 53 else 40.])
        rows += make_rows("epoch", dict(heldout=heldout), epoch=t)
    assert ("accuracy falls", "critical") in {(a.name, a.level) for a in find_alarms(rows)}

def test_a_controller_that_plants_once_an_episode_is_not_one_that_only_waits():
    def steps(ops): return [{"kind": "step", "lane": 0, "epoch": t, "action.op": op} for t, op in enumerate(ops)]
    once = (["germinate"] + 11 * ["wait"]) * 10
    assert find_alarms(steps(once)) == []
    assert [a.name for a in find_alarms(steps(120 * ["wait"]))] == ["only waiting"]
