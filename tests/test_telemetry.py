"Telemetry against awkward values, failing writers and concurrent runs."
import dataclasses
import json
import math
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from esper_nb import record
from esper_nb.control import QUICK, QUICK_RULES, GrowVecEnv, Heuristic, as_controller, draw_actions
from esper_nb.guard import Governor, GovernorConfig
from esper_nb.record import (
    KINDS, METRICS, ROW_KEYS, EnvRows, JSONLWriter, Metric, Recorder, RunFolder, TensorBoardWriter, blueprint_stats,
    decode_row, encode_row, find_metric, flatten, governor_rows, lane_scores, limit_rows, make_rows, metric_names,
    metric_table, new_run, pick_rows, population_rows, read_rows, rollbacks, run_rows, seed_lives, series,
    stage_spans)
from esper_nb.train import EvalResult, Fault, FitConfig, disturb_at, fit, get_task, new_population

values = st.one_of(st.none(), st.booleans(), st.integers(-2**63 + 1, 2**63 - 1),
                   st.floats(allow_nan=True, allow_infinity=True), st.text())
# the types of known metrics are checked
names = st.text().filter(lambda k: k not in ("nonfinite", "digest", "kind", "lane", *ROW_KEYS, *METRICS))
rows = st.builds(lambda lane, row: dict(kind="test", lane=lane) | row, st.none() | st.integers(0, 99),
                 st.dictionaries(names, values))


def same(a, b):
    "Equal rows, in types too, where NaN equals NaN and -0.0 is not 0.0."
    def key(v): return type(v).__name__, repr(v)
    return list(a) == list(b) and [key(v) for v in a.values()] == [key(v) for v in b.values()]

def strict(text):
    "JSON as strict readers take it."
    def refuse(word): raise ValueError(word)
    return json.loads(text, parse_constant=refuse)


# --- rows and files

@settings(deadline=None, max_examples=60)
@given(rows)
def test_row_survives_json(row):
    line = encode_row(row)
    assert "\n" not in line and isinstance(strict(line), dict)
    assert same(decode_row(line), row)

@settings(deadline=None, max_examples=25)
@given(st.lists(rows, max_size=6), st.integers(0, 400))
def test_file_cut_anywhere_keeps_its_whole_lines(tmp_path_factory, batch, cut):
    path = tmp_path_factory.mktemp("cut")/"rows.jsonl"
    writer = JSONLWriter(path)
    writer.write(batch)
    writer.close()
    data = path.read_bytes()
    path.write_bytes(data[:cut])
    kept = read_rows(path)
    assert len(kept) == data[:cut].count(b"\n") and all(map(same, kept, batch))
    writer = JSONLWriter(path)      # a resumed run goes on behind the last whole line
    writer.write(batch)
    writer.close()
    assert all(map(same, read_rows(path), kept + batch)) and len(read_rows(path)) == len(kept) + len(batch)

@pytest.mark.parametrize("tail", [0, 1, 65535, 65536, 65537, 200_000])
def test_long_torn_tail_is_cut(tmp_path, tail):
    path = tmp_path/"rows.jsonl"
    path.write_bytes(b'{"a": 1}\n' + b"x" * tail)
    JSONLWriter(path).close()
    assert path.read_bytes() == b'{"a": 1}\n'
    path.write_bytes(b"x" * tail)
    JSONLWriter(path).close()
    assert path.read_bytes() == b""

@pytest.mark.parametrize("end, status", [
    pytest.param("rec.flush(); os._exit(1)", 1, id="killed"),
    pytest.param("", 0, id="never closed", marks=pytest.mark.slow)])
def test_a_process_that_ends_without_closing_keeps_its_rows(tmp_path, end, status):
    path = tmp_path/"rows.jsonl"
    code = f"""
import os
from esper_nb.record.writers import JSONLWriter, Recorder
rec = Recorder([JSONLWriter({str(path)!r})])
for epoch in range(50): rec.log("epoch", {{"lr": [.1, .2]}}, epoch=epoch)
{end}
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == status
    assert len(read_rows(path)) == 100

def test_damage_in_the_middle_is_reported(tmp_path):
    path = tmp_path/"rows.jsonl"
    lines = [encode_row(dict(kind="test", lane=None, a=a)).encode() + b"\n" for a in (1., 2., 3.)]
    for damaged in (lines[1].replace(b"2.0", b"\xff"), lines[1].replace(b"2.0", b"4.0"), lines[1].replace(b"a", b"b")):
        path.write_bytes(lines[0] + damaged + lines[2])
        with pytest.raises(ValueError, match="line 2"): read_rows(path)

@pytest.mark.parametrize("forged", [{"update.loss": "<b>"}, {"run.task": 3}, {"epoch": "3"}, {"lane": 1.5}, {"a": [1]},
                                    {"update.loss": {"a": 1}}, {"kind": None}, {"a": 2**63}, {"slot": 7}])
def test_a_value_of_another_type_is_refused(tmp_path, forged):
    path = tmp_path/"rows.jsonl"
    path.write_text(encode_row(dict(kind="update", lane=None) | forged) + "\n")
    with pytest.raises(ValueError, match="line 1 is no row"): read_rows(path)


# --- flattening

class Verdict(IntEnum):
    FINE, PANIC = range(2)

class Pair(NamedTuple):
    loss: object
    lr: object

@dataclasses.dataclass
class Record:
    train: Pair
    heldout: dict

LANES = [
    torch.tensor([1., 2.]), torch.tensor([1., 2.], dtype=torch.float64), torch.tensor([1, 2]),
    torch.tensor([1., 2.]).bfloat16(), torch.tensor([1., 2.], requires_grad=True),
    np.array([1., 2.], dtype=np.float32), np.array([1, 2]), [1., 2.], (1, 2), [torch.tensor(1.), np.float32(2.)]]

@pytest.mark.parametrize("leaf", LANES, ids=lambda v: type(v).__name__ + str(getattr(v, "dtype", "")))
def test_lane_values_of_any_kind(leaf):
    first, second = make_rows("epoch", Record(Pair(leaf, leaf), {"loss": leaf}), epoch=1)
    assert first == {"kind": "epoch", "epoch": 1, "lane": 0, "train.loss": 1, "train.lr": 1, "heldout.loss": 1}
    assert second["lane"] == 1 and all(type(v) in (int, float) for v in list(second.values())[3:])

@pytest.mark.parametrize("leaf, plain", [
    (torch.tensor(3), 3), (np.float64(.5), .5), (np.array(2.), 2.), (Verdict.PANIC, "PANIC"), (True, True),
    (None, None), ("text", "text"), (torch.tensor(True), True)])
def test_single_values(leaf, plain):
    row, = make_rows("epoch", {"a": {"b": leaf}})
    assert row == {"kind": "epoch", "lane": None, "a.b": plain}
    assert type(row["a.b"]) is type(plain) or isinstance(leaf, np.float64)
    strict(encode_row(row))

@pytest.mark.parametrize("leaf", [torch.zeros(2, 2), [[1], [2]], object(), 1j, {1, 2}, torch.device("cpu"), [object()]])
def test_other_values_are_refused_by_name(leaf):
    with pytest.raises(ValueError, match="a.b holds"): make_rows("epoch", {"a": {"b": leaf}})

@pytest.mark.parametrize("name", ["kind", "lane", "nonfinite", "epoch"])
def test_keys_are_no_metrics(name):
    with pytest.raises(ValueError, match="by keyword"): make_rows("epoch", {name: 1.})

@settings(deadline=None)
@given(st.integers(1, 6), st.dictionaries(st.sampled_from(["a", "b.c", "d"]), st.floats(allow_nan=False)), st.data())
def test_every_number_lands_in_one_row(n, once, data):
    each = st.lists(st.floats(allow_nan=False), min_size=n, max_size=n)
    lanes = {f"lanes.{k}": data.draw(each) for k in data.draw(st.sets(st.sampled_from("xyz")))}
    made = make_rows("epoch", {**once, **lanes}, epoch=0)
    assert len(made) == bool(once) + (n if lanes else 0)
    for name, value in once.items(): assert [r[name] for r in made if name in r] == [value]
    for name, value in lanes.items(): assert series(made, name) == {i: ([0], [v]) for i, v in enumerate(value)}

def test_leaves_do_not_copy_tensors():
    t = torch.zeros(2)
    assert next(flatten(Record(Pair(t, 1), {})))[1] is t


# --- metrics

@pytest.mark.parametrize("name", ["", ".", "train", "train.", "update.head_entropy.", "Train.loss", "train.loss.x"])
def test_unknown_metrics_are_refused(name):
    with pytest.raises(ValueError, match="No metric"): find_metric(name)


# --- recorder and writers

class Gate:
    "A writer that waits until it is let through."
    def __init__(self): self.open, self.rows, self.closed = threading.Event(), [], 0
    def write(self, rows):
        self.open.wait()
        self.rows += rows
    def close(self): self.closed += 1

class Broken:
    "A writer that fails where it is told to."
    def __init__(self, write=None, close=None): self.error, self.last = write, close
    def write(self, rows):
        if self.error: raise self.error
    def close(self):
        if self.last: raise self.last

def test_a_writer_that_never_returns_is_left_behind():
    gate = Gate()
    rec = Recorder([gate])
    rec.log("epoch", {"lr": 1.})
    assert not rec.flush(timeout=.05)
    with pytest.warns(RuntimeWarning, match="left behind"): report, = rec.close(timeout=.05)
    assert report.dropped == 1
    gate.open.set()

ERRORS = [OSError("disk"), ValueError("x"), SystemExit(1), KeyboardInterrupt()]

@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_a_broken_writer_harms_nobody_else(error, tmp_path):
    path = tmp_path/"rows.jsonl"
    rec = Recorder([Broken(write=error), JSONLWriter(path)])
    rec.log("epoch", {"lr": [.1, .2]}, epoch=0)
    rec.flush()
    with pytest.warns(RuntimeWarning, match="Training goes on"): rec.log("epoch", {"lr": [.1, .2]}, epoch=1)
    rec.log("epoch", {"lr": [.1, .2]}, epoch=2)      # warned once
    with pytest.warns(RuntimeWarning, match="wrote 0 of 6"): broken, fine = rec.close()
    assert type(error).__name__ in broken.error and broken.dropped == 6 and fine.dropped == 0 and fine.error is None
    assert read_rows(path) == rec.rows and len(rec.rows) == 6

def test_an_error_on_closing_is_reported():
    rec = Recorder([Broken(close=OSError("late"))])
    rec.log("epoch", {"lr": 1.})
    with pytest.warns(RuntimeWarning, match="late"): report, = rec.close()
    assert report.written == 1 and report.dropped == 0
    assert rec.close() == [report]      # the second time in silence

def test_leaving_a_with_block_closes(tmp_path):
    with pytest.raises(ZeroDivisionError), Recorder([JSONLWriter(tmp_path/"rows.jsonl")]) as rec:
        rec.log("epoch", {"lr": 1.})
        1 / 0
    assert read_rows(tmp_path/"rows.jsonl") == rec.rows
    with pytest.raises(RuntimeError, match="closed"): rec.log("epoch", {"lr": 1.})

def test_one_recorder_in_several_threads_loses_nothing(tmp_path):
    rec = Recorder([JSONLWriter(tmp_path/"rows.jsonl")], queue_size=10_000)
    def log(lanes):
        for epoch in range(100): rec.log("epoch", {"lr": [1., 2.]}, lanes=lanes, epoch=epoch)
    with ThreadPoolExecutor(4) as pool: list(pool.map(log, ([2 * k, 2 * k + 1] for k in range(4))))
    rec.close()
    assert read_rows(tmp_path/"rows.jsonl") == rec.rows and len(rec.rows) == 800
    epochs = {lane: xs for lane, (xs, _) in series(rec.rows, "lr").items()}
    assert epochs == {lane: list(range(100)) for lane in range(8)}


# --- run folders

def test_new_run_never_takes_an_existing_folder(tmp_path):
    (tmp_path/"run").mkdir()
    (tmp_path/"run"/"mine.txt").write_text("kept")
    (tmp_path/"run-2").write_text("a file")
    assert new_run(tmp_path).path.name == "run-3"
    assert [p.name for p in (tmp_path/"run").iterdir()] == ["mine.txt"]

CONFIGS = [(None, {}), ({"a": [1, None]}, {"a": [1, None]}), (Pair(1, .5), {"loss": 1, "lr": .5})]

@pytest.mark.parametrize("config, stored", CONFIGS)
def test_config_is_stored(tmp_path, config, stored):
    run = new_run(tmp_path, config=config)
    assert RunFolder(run.path).config() == stored
    assert [p.name for p in run.path.iterdir()] == ["config.json"]


# --- extras and devices

@pytest.mark.slow
def test_tensorboard_holds_what_was_logged(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    metrics = METRICS | metric_table(Metric("verdict", "text", 0, 1, "the judgement"))
    with Recorder([TensorBoardWriter(tmp_path)], metrics) as rec:
        for epoch in range(3):
            record = {"train.loss": [1. / (epoch + 1), None], "lr": .5, "verdict": "fine"}
            rec.log("epoch", record, epoch=epoch)
        rec.flush()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(events.Tags()["scalars"]) == ["lr", "train.loss/lane0"]
    scalars = [(e.step, e.value) for e in events.Scalars("train.loss/lane0")]
    assert scalars == [(0, 1.), (1, .5), (2, pytest.approx(1 / 3))]
    assert events.Tags()["tensors"] == ["verdict/text_summary"]

@pytest.mark.cuda
def test_rows_from_device_tensors():
    row, = make_rows("epoch", {"train.loss": torch.tensor([1.5], device="cuda")})
    assert row["train.loss"] == 1.5


# --- the rows of this package: typed, complete, and joined again by analytics

@pytest.fixture(scope="module")
def grown():
    "A guarded run with seeds and a NaN: (population, results, rows)."
    torch.set_num_threads(1)
    config = FitConfig(lanes=3, epochs=14)
    pop = new_population("digits_impaired", config, rules=QUICK_RULES, blueprints=["norm", "conv_light"],
                         data=get_task("digits_impaired").load("cpu", None, 512))
    rows, results = run_rows(pop), []
    def disturb(*args):
        due = disturb_at([Fault("nan", 1, 7, 6)], int(pop.epoch.max()))
        return args[-2:] if due is None else due(*args)
    for r in fit(pop, controller=as_controller(Heuristic(QUICK)), disturb=disturb):
        results.append(r)
        rows += population_rows(pop, r)
    return pop, results, rows

def test_every_row_is_of_a_known_kind_with_names_of_its_own(grown):
    for row in grown[2]:
        assert row["kind"] in KINDS and metric_names(row)
        assert {find_metric(k).kind for k in metric_names(row)} == {row["kind"]}

def test_every_metric_of_a_population_is_written_and_in_its_range(grown):
    _, _, rows = grown
    kinds = {row["kind"] for row in rows}
    assert kinds == {"run", "epoch", "batch", "limit", "governor", "slot", "seed"}
    written = {k for row in rows for k in metric_names(row)}
    assert written == {m.name for m in METRICS.values() if m.kind in kinds}
    def odd(row): return any(not find_metric(k).covers(row[k]) for k in metric_names(row))
    assert {(row["lane"], row["epoch"]) for row in rows if odd(row)} == {(1, 7)}

def test_rows_say_what_the_results_say(grown):
    _, results, rows = grown
    for r in results:
        _, *lanes = pick_rows(rows, "epoch", epoch=r.epoch)
        accuracy = [row["heldout.accuracy_pp"] for row in lanes]
        torch.testing.assert_close(torch.tensor(accuracy), r.heldout.accuracy_pp)
        losses = torch.tensor([row["batch.loss"] for row in pick_rows(rows, "batch", epoch=r.epoch)]).view(-1, 3)
        torch.testing.assert_close(losses, r.train.losses.float(), equal_nan=True)
        assert len(pick_rows(rows, "governor", epoch=r.epoch)) == len(r.reports)
    steps = sum(len(r.train.losses) for r in results)
    assert [row["step"] for row in pick_rows(rows, "batch", lane=0)] == list(range(1, steps + 1))

def test_states_of_seeds_agree_with_the_model(grown):
    pop, _, rows = grown
    last = {(row["slot"], row["lane"]): row for row in pick_rows(rows, "slot", epoch=13)}
    for slot in map(pop.model.slot, pop.model.names):
        for i, s in enumerate(slot.states()):
            row = last.get((slot.name, i))
            assert (row is None) == (s.stage.name == "DORMANT")
            if row is None: continue
            assert (row["slot.stage"], row["slot.germination"]) == (s.stage.name, s.germinations)
            assert row["slot.alpha"] == pytest.approx(s.alpha) and row["slot.blueprint"] == slot.blueprints[s.blueprint]

def test_rows_survive_a_file_and_analytics_see_the_same(grown, tmp_path):
    _, _, rows = grown
    with Recorder([JSONLWriter(tmp_path/"rows.jsonl")]) as rec: rec.add(rows)
    back = read_rows(tmp_path/"rows.jsonl")
    assert all(map(same, back, rows)) and len(back) == len(rows)
    for f in (rollbacks, seed_lives, stage_spans, blueprint_stats, lane_scores):
        assert repr(f(back)) == repr(f(rows))

def test_limits_and_verdicts_of_a_plain_loop():
    net = torch.nn.Linear(4, 1)
    governor = Governor(net, chance_loss=None, config=GovernorConfig(lost_confirm=1))
    for _ in range(60): governor.watch(torch.tensor(1.))
    row, = limit_rows(governor, step=60)
    assert row["limit.value"] == pytest.approx(3.) and row["limit.judged"] == 60
    assert row["limit.chance_loss"] is None and row["limit.collapse_low"] is None
    report, = governor.watch(torch.tensor(math.nan))
    row, = governor_rows([report], step=61)
    assert (row["step"], row["governor.shown"], row["governor.batch"]) == (61, "nan", None)
    assert row["governor.lost"] == report.step - report.restored_step
    assert all(find_metric(k).covers(v) for k, v in row.items() if "." in k)

# --- the rows of environments

def play(mode, steps=14, growth=True):
    "Random actions in three lanes of horizon 6, one of them ruined: (environment, rows)."
    fault, dice, rows = Fault("nan", lane=1, epoch=3, batch=2), torch.Generator().manual_seed(1), []
    settings = dict(task="digits_impaired", num_envs=3, horizon=6, limit=300, workers=1,
                    blueprints=("norm", "conv_light"))
    env = GrowVecEnv(**settings, faults=(fault,), autoreset_mode=mode)
    env.reset(seed=2)
    note = EnvRows(growth)
    for t in range(steps):
        env.step(draw_actions(env.actions, env.mask, dice).numpy())
        rows += note(env, epoch=t)
    env.close()
    return env, rows

def test_rows_of_an_environment_tell_every_seed_once():
    env, rows = play("NextStep")
    for row in rows: assert {find_metric(k).kind for k in metric_names(row)} <= {row["kind"]}
    assert all(row["action.refused"] is None or not row["action.ok"] for row in pick_rows(rows, "step"))
    events = [row["seed.event"] for row in pick_rows(rows, "seed")]
    for kinds, counted in ((("germinate",), "germinated"), (("prune", "undone"), "pruned")):
        counted_rows = sum(getattr(r, counted) for r in env.summaries) + int(getattr(env.lanes.sums, counted).sum())
        assert sum(map(events.count, kinds)) == counted_rows > 0
    back, = pick_rows(rows, "governor")
    by = {row["seed.by"] for row in pick_rows(rows, "seed", lane=1, epoch=back["epoch"])}
    assert back["lane"] == 1 and by <= {"governor"}

def test_a_new_episode_is_no_prune():
    env, rows = play("SameStep")
    assert len(pick_rows(rows, "seed")) > 0 and len(env.summaries) >= 4
    ends = {(row["lane"], row["epoch"]) for row in pick_rows(rows, "episode") if not row["episode.rollbacks"]}
    assert not [row for row in pick_rows(rows, "seed") if (row["lane"], row["epoch"]) in ends]

@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_rows_of_an_environment_hold_each_episode_once(mode):
    env, rows = play(mode)
    counted_rows = [(row["lane"], row["episode"], row["episode.length"]) for row in pick_rows(rows, "episode")]
    assert counted_rows == [(r.lane, r.episode, r.epochs) for r in env.summaries] and len(counted_rows) >= 4

def test_rows_without_growth_are_the_others():
    _, every = play("NextStep", steps=5)
    _, fewer = play("NextStep", steps=5, growth=False)
    def kept(row): return row["kind"] not in ("slot", "seed") and "size.growth" not in row
    def key(row): return [(k, repr(v)) for k, v in row.items() if k != "governor.seconds"]
    assert [key(row) for row in every if kept(row)] == [key(row) for row in fewer]


@pytest.mark.parametrize("names, columns", [
    (("no. 1", "1.5", "cat"), ["no_ 1", "1_5", "cat"]), (("a.b", "a_b", "c"), ["0 a_b", "1 a_b", "2 c"]), ((), [])])
def test_every_class_has_a_column_that_a_metric_defines(names, columns):
    data = SimpleNamespace(names=names)
    found = EvalResult(torch.ones(2), torch.tensor([50., 60.]), torch.tensor([[1., 2., 3.], [4., 5., 6.]]))
    first, second = record.test_rows(found, data, epoch=3)
    assert [k for k in first if "class_pp" in k] == [f"test.class_pp.{name}" for name in columns]
    assert all(find_metric(k).kind == "test" for k in first if k.startswith("test."))
    assert (second["lane"], second["epoch"], second["test.accuracy_pp"]) == (1, 3, 60.)
    gone = found._replace(class_pp=torch.tensor([[1., math.nan, 3.], [4., math.nan, 6.]])) # none of it in the split
    assert len([k for k in record.test_rows(gone, data, epoch=3)[0] if "class_pp" in k]) == max(0, len(columns) - 1)
