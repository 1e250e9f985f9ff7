"Every limit fires on its condition and is silent beside it; the watch is a fold over rows."
import itertools, math, random

import pytest
from hypothesis import given, settings, strategies as st

from esper_nb.record.alarms import LEVELS, ALARM_RULES, MEASURES, AlarmWatch, AlarmRule, alarm_rows, find_alarms, alarm_rules_markdown
from esper_nb.record.metrics import METRICS, find_metric
from esper_nb.record.rows import record_rows

CASES = [(l, i) for l in ALARM_RULES for i, at in enumerate(l.at) if at is not None]
IDS = [f"{l.name}, {LEVELS[i]}, {l.metric}" for l, i in CASES]


def name_of(limit): return limit.metric.replace("*", "speed")

def build(limit, values, **others):
    "Rows with one metric, and what its measure wants beside it."
    return [dict(kind="update", lane=0, update=t) | {name_of(limit): v} | {k: x[t] if isinstance(x, list) else x for k, x in others.items()} for t, v in enumerate(values)]

def rows_with(limit, x):
    "Rows at whose end the measure of this limit is x."
    n, m = limit.rows, limit.measure
    if m == "value": return build(limit, [x] * n)
    if m == "jump": return build(limit, [1.] * 5 + [x])
    if m == "pace": return build(limit, [10.] * 20 + [10. * x] * n)
    if m == "fall": return build(limit, [50.] * 3 + [50. - x] * 3)
    if m == "fall_share": return build(limit, [10.] * 3 + [10. * (1 - x)] * 3)
    if m == "gain": return build(limit, [50. - 2 * i for i in range(5, 0, -1)] + [50.] + [50. + x] * 10)
    if m == "drift":      # each value at this distance from the average of those before it
        values = [1.] * 10
        for _ in range(n):
            w = [.99**k for k in range(len(values))]
            values.append((1 + x) * sum(a * b for a, b in zip(w, reversed(values))) / sum(w))
        return build(limit, values)
    if m == "waits": return build(limit, ["prune"] * 50 + ["wait"] * round(50 * x) + ["prune"] * (50 - round(50 * x)))[:]
    if m == "refusals": return build(limit, [True] * (50 - round(50 * x)) + [False] * round(50 * x))
    if m == "ransom": return build(limit, [x] * n, **{"slot.gain_pp": -1.})
    if m == "lean": return build(limit, [2. * x] * n, **{"slot.gain_pp": 2.})
    if m == "gap": return build(limit, [2. * x] * n, **{"train.loss": 2.})
    if m == "of_chance": return build(limit, [2.3 * x] * n, **{"gate.chance": 2.3})
    if m == "of_phases": return build(limit, [x] * n, **{"phase_s.train": 1 - x})
    if m == "of_terms": return build(limit, [x] * n, **{"reward.rent": x - 1})
    raise AssertionError(f"no rows for measure {m}: add them here")

def levels(limit, rows): return [a.level for a in find_alarms(rows) if a.name == limit.name]

def step(limit):
    "What lies just beyond a limit: a little, or one of the 50 steps that a share is made of."
    return .02 if limit.measure in ("waits", "refusals") else 1e-6

@pytest.mark.parametrize("limit, i", CASES, ids=IDS)
def test_each_limit_fires_beyond_and_is_silent_beside(limit, i):
    at = limit.at[i]
    if limit.side == "is":
        word = "some text" if at == "*" else at.split()[0]
        assert levels(limit, rows_with(limit, word)) == [LEVELS[i]]
        assert levels(limit, rows_with(limit, None)) == [] and (at == "*" or levels(limit, rows_with(limit, word + "x")) == [])
        return
    if math.isinf(at):
        assert levels(limit, rows_with(limit, 1e300)) == [] and levels(limit, rows_with(limit, math.nan)) == [LEVELS[i]]
        return
    sign = 1 if limit.side == "above" else -1
    width = step(limit) * max(1., abs(at)) * sign
    if limit.measure == "waits" and at == .7: assert "warning" not in levels(limit, rows_with(limit, at - 2 * width))
    beyond, beside = levels(limit, rows_with(limit, at + width)), levels(limit, rows_with(limit, at - width))
    assert beyond[-1:] == [LEVELS[i]], "silent on its condition"
    assert LEVELS[i] not in beside, "fires beside its condition"
    assert i > 0 and limit.at[i - 1] is not None or beside == []

@pytest.mark.parametrize("limit", [l for l in ALARM_RULES if l.rows > 1], ids=lambda l: l.name + l.metric)
def test_a_limit_waits_for_its_rows(limit):
    at, sign = next(x for x in limit.at if x is not None), 1 if limit.side == "above" else -1
    rows = rows_with(limit, at + sign * 1e-6 * max(1., abs(at)))
    assert levels(limit, rows) and not levels(limit, rows[:-1])

@pytest.mark.parametrize("limit", [l for l in ALARM_RULES if l.measure == "value" and l.side != "is"], ids=lambda l: l.name + l.metric)
def test_not_finite_is_beyond_at_once_and_not_measured_is_nothing(limit):
    worst = [LEVELS[i] for i, at in enumerate(limit.at) if at is not None][-1]
    assert levels(limit, build(limit, [math.nan])) == [worst] and levels(limit, build(limit, [None] * 10)) == []

def test_every_measure_is_used_and_explained():
    assert {l.measure for l in ALARM_RULES} == set(MEASURES) and all(f.__doc__ for f in MEASURES.values())

@pytest.mark.parametrize("limit", ALARM_RULES, ids=lambda l: l.name + l.metric)
def test_limits_watch_what_is_written(limit):
    metric = find_metric(name_of(limit))
    assert metric.writer and (metric.unit == "text") == (limit.side == "is" or limit.measure == "waits")
    assert alarm_rules_markdown([limit]).count("\n") == 2

def test_alarms_differ_by_lane_slot_and_seed():
    def slot(lane, slot, birth, v): return record_rows("slot", {"slot": dict(birth=[birth], exploding=[v])}, lanes=[lane], slot=slot, epoch=0)
    rows = slot(0, "a", 1, .2) + slot(1, "a", 1, .2) + slot(0, "b", 1, .2) + slot(0, "a", 1, .2) + slot(0, "a", 2, .2) + slot(0, "a", 1, .9)
    assert [(a.lane, a.slot, a.level) for a in find_alarms(rows)] == [(0, "a", "warning"), (1, "a", "warning"), (0, "b", "warning"), (0, "a", "warning"), (0, "a", "critical")]

def test_a_standing_alarm_goes_out():
    watch, limit = AlarmWatch(), next(l for l in ALARM_RULES if l.name == "policy moved far")
    watch.feed(build(limit, [.02]))
    assert watch.standing == [("warning", limit.name, limit.metric, 0, None)]
    watch.feed(build(limit, [.01]))
    assert watch.standing == []

def test_own_limits():
    mine = AlarmRule("mine", "own", "lr", "value", "above", (None, .5, None), "a", "b")
    found = find_alarms([dict(kind="epoch", lane=1, epoch=4, lr=.6)], [mine])
    assert [(a.name, a.lane, a.by, a.at, a.limit) for a in found] == [("mine", 1, "epoch", 4, .5)]
    assert str(found[0]) == "warning, lane 1, epoch 4: mine (lr 0.6, limit 0.5). A. B."

@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["update.approx_kl", "update.entropy_mean", "heldout.accuracy_pp", "train.loss", "slot.health"]),
                          st.one_of(st.none(), st.floats(0, 100), st.just(math.nan))), max_size=40), st.lists(st.integers(0, 40), max_size=4))
def test_feeding_in_pieces_changes_nothing(events, cuts):
    rows = [dict(kind="epoch", lane=lane, epoch=t) | {name: v} for t, (lane, name, v) in enumerate(events)]
    ends = sorted({0, len(rows), *(c for c in cuts if c < len(rows))})
    watch = AlarmWatch()
    pieces = [a for i, j in itertools.pairwise(ends) for a in watch.feed(rows[i:j])]
    whole = find_alarms(rows)
    assert [str(a) for a in pieces] == [str(a) for a in whole]
    assert all(find_metric(k).covers(v) for row in alarm_rows(whole) for k, v in row.items() if "." in k)

def test_rows_of_a_long_run_are_checked_fast_enough_to_do_it_live():
    g = random.Random(0)
    names = [m for m in METRICS if m.startswith(("train.", "heldout.", "slot.")) and METRICS[m].unit != "text"]
    watch = AlarmWatch()
    for epoch in range(300): watch.feed([dict(kind="epoch", lane=lane, epoch=epoch) | {n: g.random() for n in names} for lane in range(4)])
    assert all(len(t.past) <= 200 for t in watch.tracks.values())      # memory does not grow with the run
