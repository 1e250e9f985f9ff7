"The session, the feed and the dashboard without a browser: controls, exactness, bounded memory and traffic."
import importlib, json, re, sys, threading, time, tracemalloc
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from tiny import update

import esper_nb.show.dashboard as dashboard_module
from esper_nb.core import by_lane, lane_state
from esper_nb.control import GrowVecEnv
from esper_nb.grow import Decision, ModuleHostConfig, apply_decision
from esper_nb.guard import (
    DetectorConfig, Governor, GovernorConfig, LossStats, describe_failure, judge, loss_limits)
from esper_nb.learn import Learner, PolicyConfig, PPOConfig, train_ppo
from esper_nb.record import encode_row, read_rows
from esper_nb.run import begin_run, get_recipe, watch_text
from esper_nb.show import (
    THRESHOLDS, ControlBar, Dashboard, DownsampledSeries, EnvSource, Feed, Frame, FrameSource, Incident, LoopSource,
    NotebookOutput, Pacer, Panel, PopulationSource, RowsSource, Session, WidgetFactory, decode_slots, disabled_reasons,
    incident_from_report, lane_limits, live_front_end, log_html, notebook_html, operations_line,
    plot_session, plot_slots, seed_disabled_reasons, session_packet, session_text, status_html, watch)
from esper_nb.train import FitConfig, fit, get_task, new_population, parse_fault, task_from_arrays

torch.set_num_threads(1)


def population(lanes=4, epochs=12, **kw):
    config = FitConfig(lanes=lanes, epochs=epochs, batch_size=256, workers=1, **kw)
    return new_population("digits_impaired", config, blueprints=["norm", "conv_light"])

def weights(pop): return {k: t.clone() for k, t in lane_state(pop.model).items()}

def equal(a, b, lanes=None, n=1):
    def pick(t): return t if lanes is None else by_lane(t, n)[lanes]
    return all(torch.equal(pick(a[k]), pick(b[k])) for k in a)

@pytest.fixture
def run():
    made = []
    def make(source, **kw):
        made.append(Session(source, **kw))
        return made[-1]
    yield make
    for s in made: s.close()

def steps(session, k):
    session.step(k).wait()
    session.wait()

def fake(n=3, lanes=2, loss=1., batches=2):
    for t in range(n): yield Frame(np.full((batches, lanes), loss / (t + 1)), np.full(lanes, 50.))


# --- tracks

@settings(deadline=None, max_examples=25)
@given(st.integers(1, 400), st.sampled_from((4, 8, 32)), st.integers(0, 2**31), st.integers(1, 9))
def test_a_track_is_bounded_and_loses_no_peak(count, capacity, seed, chunk):
    values = np.random.default_rng(seed).normal(size=count).astype(np.float32)
    track = DownsampledSeries(2, capacity)
    data = np.column_stack([np.arange(count, dtype=np.float32), values])
    for i in range(0, count, chunk): track.add(data[i:i + chunk])
    assert track.count <= capacity
    covered = track.count * track.stride
    assert count - track.stride < covered <= count
    assert np.max(track.rows[:, 1], initial=-np.inf) == np.max(values[:covered], initial=-np.inf)
    assert (np.diff(track.rows[:, 0]) == track.stride).all()

@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40))
def test_a_reader_of_news_has_the_whole_track(parts):
    track, seen, have, at = DownsampledSeries(1, 16), None, np.empty((0, 1), np.float32), 0
    for k in parts:
        track.add(np.arange(at, at + k)[:, None]); at += k
        news, whole = track.delta_since(seen)
        have = news if whole else np.concatenate([have, news])
        seen = (track.merges, track.count)
        assert np.array_equal(have, track.rows)


# --- controls

def test_the_life_of_a_session(run):
    s = run(FrameSource(fake(5), 2, 5))
    assert s.state == "ready"
    steps(s, 2)
    assert (s.state, s.steps, s.history.x) == ("paused", 2, 4)
    s.stop().wait()
    assert s.state == "stopped"
    steps(s, 1)
    assert (s.state, s.steps) == ("paused", 3)
    s.start()
    assert s.wait() == "done" and s.steps == 5
    assert [n.text for n in s.notes] == [
        "step: 2 steps at batch 0 (step 0)", "stopped at batch 4 (step 2); the run can be continued exactly from here",
        "step: 1 step at batch 4 (step 2)", "continued at batch 6 (step 3)", "done after 5 steps"]
    assert [n.x for n in s.notes] == [0, 4, 4, 6, 10]                   # the log's numbers are the axis's

@pytest.mark.parametrize("unit, units", [("epoch", "epochs"), ("batch", "batches"), ("step", "steps")])
def test_steps_are_called_by_their_name(run, unit, units):
    s = run(FrameSource(fake(2), 2, 2, unit))
    count = "" if unit == "batch" else f" ({unit} 0)"
    assert s.step(2).wait().message == f"step: 2 {units} at batch 0{count}"
    assert f"4 {units} a second" in [t for t, _ in ControlBar(WidgetFactory(), s, s.ask, int).pace.options]
    s.wait()
    assert s.step().wait().message == f"step: 1 {unit} at batch 4" + ("" if unit == "batch" else f" ({unit} 2)")

def test_requests_take_effect_at_an_edge_and_say_which(run):
    gate, entered = threading.Event(), threading.Event()
    def slow():
        for f in fake(3):
            entered.set(); gate.wait(10)
            yield f
    s = run(FrameSource(slow(), 2, 3))
    s.start(); entered.wait(10)
    r = s.pause()
    time.sleep(.05)
    assert r.ok is None and r.effect is None and "waits" in str(r)      # in the middle of a step nothing happens
    gate.set()
    assert r.wait().effect == 1 and s.wait() == "paused" and s.steps == 1

def test_wrong_requests_are_refused_and_change_nothing(run):
    pop = population(2)
    s, before = run(pop), None
    before = weights(pop)
    for r in (s.provoke("typo", 0), s.provoke("nan", 9), s.seed("germinate", 0, "nowhere", "norm"),
              s.seed("germinate", 0, "r0c0", "typo"), s.seed("prune", 0, "r0c0"),
              s.adjust(multiplyer=2.), s.adjust(window=3), s.rollback(7), s.step(0), s.set_pace(-1)):
        assert r.ok is False and "refused" in r.message, r
    assert s.steps == 0 and equal(before, weights(pop)) and pop.governor.config == population(2).governor.config
    with pytest.raises(ValueError, match="'dance', expected one of"): s.ask("dance")

def test_errors_of_the_thread_are_kept_and_the_session_lives_on(run):
    def broken():
        yield from fake(1)
        raise OSError("the disk is full")
    s = run(FrameSource(broken(), 2))
    s.start()
    assert s.wait() == "failed" and "OSError" in s.notes[-1].text and "Traceback" in s.error
    assert "the disk is full" in session_text(s) and "<pre>" in status_html(s)
    assert s.pause().wait().ok                                          # still answers

def test_a_frame_that_cannot_be_filed_is_an_error_too(run):
    s = run(FrameSource([Frame(np.ones((2, 5)))], 2))
    s.start()
    assert s.wait() == "failed" and s.error

def test_the_end_of_the_budget_is_shown_with_its_report(run):
    s = run(population(1, 30, governor=GovernorConfig(lowers=0, rollbacks=0, max_rollbacks=0)))
    steps(s, 4)
    s.provoke("nan", 0).wait()
    s.start()
    assert s.wait() == "failed" and "Governor stopped the run" in s.notes[-1].text and s.incidents[-1].action == "stop"

def test_pace_holds_the_run_back_and_can_be_changed(run):
    s = run(FrameSource(fake(10_000), 2), pace=30.)
    s.start()
    time.sleep(.1)
    assert s.steps <= 1
    s.set_pace(0).wait()
    time.sleep(.1)
    s.pause().wait()
    assert s.steps > 10

def test_many_threads_may_ask_at_once(run):
    s = run(FrameSource(fake(100_000), 2), pace=.001)
    s.start()
    threads = [threading.Thread(target=lambda: [s.set_pace(.001).wait() for _ in range(20)]) for _ in range(4)]
    for t in threads: t.start()
    for t in threads: t.join(30)
    assert s.state == "running" and s.pause().wait().ok


# --- a population under control

def test_a_run_with_pauses_and_stops_is_the_run_without(run):
    plain, pop = population(3, 6), population(3, 6)
    for _ in fit(plain): pass
    s = run(pop)
    steps(s, 2); s.stop().wait(); steps(s, 1); s.start(); s.wait()
    assert s.state == "done" and equal(weights(plain), weights(pop))

def test_a_provoked_nan_is_rolled_back_and_drawn_where_it_was(run):
    pop = population(4, 30)
    s = run(pop)
    steps(s, 6)
    s.provoke("nan", 2).wait()
    steps(s, 8)
    [i] = s.incidents
    batches = len(pop.last.train.losses)
    assert (i.lane, i.reason, i.action) == (2, "non-finite", "rollback")
    assert i.back % batches == 0 and i.back < i.x <= i.end == 7 * batches and i.lost == i.end - i.back
    assert i.recovered > i.end
    table = s.history.losses.rows
    bad = table[~np.isfinite(table[:, 3]), 0]
    assert i.x == bad[0] and np.isfinite(table[:, [1, 2, 4]]).all()

@pytest.mark.slow
def test_the_place_of_a_second_rollback_counts_from_its_own_snapshot(run):
    s = run(population(3, 60))
    steps(s, 6)
    for lane in (1, 0, 1):
        s.provoke("nan", lane).wait()
        steps(s, 5)
    backs = [(i.lane, i.back, i.x, i.end) for i in s.incidents]
    assert [b[0] for b in backs] == [1, 0, 1]
    for _, back, x, end in backs: assert end - back <= 3 * (s.history.x // s.steps) and back < x <= end

@pytest.mark.slow
def test_late_in_a_run_every_fault_is_answered_or_told_harmless(run):
    faults = PopulationSource(population(1)).faults()
    s = run(population(len(faults), 180))
    steps(s, 130)
    for lane, fault in enumerate(faults): assert s.provoke(fault, lane).wait().ok
    steps(s, 45) # a verdict takes 200 batches
    answered = {i.lane: i.reason for i in s.incidents}
    harmless = {int(re.match(r"lane (\d+)", n.text)[1]) for n in s.notes if " harmless: " in n.text}
    assert {*answered, *harmless} == set(range(len(faults))) and not harmless & set(answered)
    assert {faults[lane] for lane in answered} >= {"nan", "explode", "lobotomy"}, answered
    assert all(i.recovered is not None for i in s.incidents)

class Unwatched(FrameSource):
    "Lanes whose faults nobody answers."
    def provoke(self, fault, lane): return 1

def test_every_fault_gets_its_own_verdict_however_many_follow(run):
    undone = Incident(number=0, lane=0, reason="non-finite", action="rollback", x=182, end=182, back=160, loss="nan",
                      target=1., rollbacks_left=3)
    s = run(Unwatched((Frame(np.tile([9. if 5 <= t < 8 else 1.], (20, 1)), incidents=(undone,) * (t == 9))
                       for t in range(30)), 1))
    steps(s, 5)
    assert s.provoke("drift", 0).wait().ok
    steps(s, 3)
    assert s.provoke("lobotomy", 0).wait().ok
    steps(s, 1)
    assert s.provoke("nan", 0).wait().ok
    steps(s, 2)
    assert [n.text for n in s.notes if " no alarm " in n.text] == [
        "lane 0: drift raised no alarm in 60 batches, loss 9, before 1",
        "lane 0: lobotomy was harmless: no alarm in 20 batches, loss 1, before 9"]

def test_a_cross_stands_only_for_what_is_bad(run):
    s = run(population(2, 40))
    steps(s, 6); s.provoke("nan", 1).wait(); steps(s, 4)
    crossed = [line for line in repr(Dashboard(s, view="text")).splitlines() if "✕" in line]
    assert len(crossed) == 1 and "non-finite" in crossed[0]
    assert any("✓ lane 1: recovered" in line for line in session_text(s).splitlines())

def test_a_rollback_by_hand_restores_one_lane_and_leaves_the_others(run):
    pop = population(3, 30)
    s = run(pop)
    steps(s, 5)
    assert s.snapshot().wait().ok
    saved = weights(pop)
    steps(s, 1)
    before = weights(pop)
    assert s.rollback(1).wait().ok
    after = weights(pop)
    assert equal(saved, after, 1, 3) and equal(before, after, 0, 3) and equal(before, after, 2, 3)
    assert not equal(before, after, 1, 3)
    assert s.incidents[-1].reason == "by hand" and s.incidents[-1].lost == len(pop.last.train.losses)

def test_seeds_by_hand(run):
    pop = population(2, 60)
    s = run(pop)
    assert s.seed("germinate", 1, "r0c1", "conv_light").wait().ok
    assert pop.model.slot("r0c1").state(1).stage.name == "GERMINATED"
    assert pop.model.slot("r0c1").state(0).stage.name == "DORMANT"
    steps(s, 1)
    assert s.seed("advance", 1, "r0c1").wait().ok and pop.model.slot("r0c1").state(1).stage.name == "TRAINING"
    steps(s, 1)
    now = decode_slots(s.history.layout.codes(s.history.states.rows, 1)[-1, 1])            # slot r0c1, lane 1
    assert now.stage == 3 and now.blueprint == pop.model.slot("r0c1").blueprints.index("conv_light")
    assert s.seed("prune", 1, "r0c1").wait().ok and pop.model.slot("r0c1").state(1).stage.name == "PRUNED"

@pytest.mark.slow
def test_every_threshold_moves_while_running(run):
    pop = population(1, 5000)
    s = run(pop)
    s.start()
    for name, (low, high, step, _) in THRESHOLDS.items():
        old = getattr(pop.governor.config, name)
        value = type(old)(min(high, max(low, (old or low) + step))) if old is not None else high / 2
        r = s.adjust(**{name: value}).wait()
        assert r.ok and getattr(pop.governor.config, name) == value and name.replace("_", " ") in r.message
        assert s.adjust(**{name: old}).wait().ok
    assert s.state == "running"
    s.pause().wait()

def test_saving_and_loading_goes_on_exactly(run, tmp_path):
    pop, other = population(2, 8), population(2, 8)
    s, t = run(pop, root=tmp_path), run(other)
    steps(s, 4)
    r = s.save().wait()
    assert r.ok and s.folder.rows()[1:] == s.history.recorder.rows and s.folder.rows()[0]["kind"] == "run"
    steps(s, 3)
    path = s.folder.path/"checkpoint.safetensors"
    assert t.load(path).wait().ok and int(other.epoch[0]) == 4
    steps(t, 3)
    assert equal(weights(pop), weights(other))
    assert s.save().wait().ok and len(s.folder.rows()) == 1 + len(s.history.recorder.rows)   # the same folder again

def test_a_seed_planted_by_hand_is_saved(run, tmp_path):
    pop = population(3, 12)
    s = run(pop, root=tmp_path)
    steps(s, 2)
    assert s.seed("germinate", 1, "r0c1", "conv_light").wait().ok and s.save().wait().ok
    assert [t.get_text() for t in plot_slots(read_rows(s.folder.rows_path), lanes=[1]).texts] == ["G"]      # at once
    steps(s, 2)
    assert s.save().wait().ok
    rows = read_rows(s.folder.rows_path)
    assert {"run", "epoch", "batch", "slot", "seed"} <= {r["kind"] for r in rows}
    assert all(r["lane"] == 1 and r["slot"] == "r0c1" for r in rows if r["kind"] == "slot")
    planted = [r for r in rows if r["kind"] == "seed" and r["seed.event"] == "germinate"]
    assert [(r["epoch"], r["lane"], r["seed.blueprint"], r["seed.reason"])
            for r in planted] == [(2, 1, "conv_light", "by hand")]
    bar = plot_slots(rows, lanes=[1]).patches[0]
    assert (bar.get_x(), bar.get_width() >= 1) == (2, True)
    assert len([r for r in rows if r["kind"] == "batch" and r["lane"] == 1]) == s.history.x

def test_the_rise_line_stands_on_either_scale():
    net = torch.nn.Linear(2, 2)
    for signed in (False, True):
        g = Governor(net, torch.optim.SGD(net.parameters(), lr=.1), chance_loss=None)
        noise = np.random.default_rng(0)
        for _ in range(200): g.watch(float(noise.normal(-5, 1) if signed else noise.lognormal(0, .1)))
        assert bool(g.stats.linear[0]) == signed
        rise = lane_limits(g, 1)[0, -1]
        assert rise == loss_limits(g.stats, g.config, g.chance_loss).rise[0]
        assert (-5 < rise < 0) if signed else (1 < rise < 2), rise


# --- a loop of one's own, and a controller

def loop_source(total=200, **kw):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 3)) # as people build it: no layer is called head
    opt = torch.optim.Adam(net.parameters(), lr=.02)
    x, y = torch.randn(64, 8), torch.randint(3, (64,))
    def loop(disturb):
        while True:
            a, b = disturb(x, y)
            loss = update(opt, torch.nn.functional.cross_entropy(net(a), b))
            yield loss
    rhythm = GovernorConfig(snapshot_every=10, probation=10)
    return LoopSource(loop, Governor(net, opt, chance_loss=1.0986, config=rhythm),
                      net, opt, total, **kw)

@pytest.mark.parametrize("fault", ["nan", "explode", "lobotomy", "corrupt-batch", "poison-optimizer"])
def test_a_guarded_loop_steps_batch_by_batch(run, fault):
    s = run(loop_source(accuracy=lambda: 50., every=10))
    steps(s, 60)
    assert s.history.x == 60 and s.history.accuracy[0] == 50
    s.provoke(fault, 0).wait()
    steps(s, 60)
    assert s.state == "paused" and np.isfinite(s.history.losses.rows[-1, 1])
    if fault == "nan": assert (s.incidents[0].x, s.incidents[0].end) == (61, 61) and s.incidents[0].back in (40, 50)
    s.start()
    assert s.wait() == "done" and s.steps == 200

def test_what_the_governor_only_notes_is_a_line_of_the_log_once(run):
    s = run(loop_source(total=300))
    steps(s, 120)
    s.provoke("explode", 0).wait()
    steps(s, 60)
    s.provoke("nan", 0).wait()
    steps(s, 10)
    lines = [n.text for n in s.notes if n.kind == "control"]
    assert not any("→ wait" in t for t in lines) # for old weights: these cannot be meant
    dropped, = [t for t in lines if t.endswith(" → dropped")]
    assert dropped.startswith("lane 0: update 1") and "not finite" in dropped
    assert len([n for n in s.notes if n.kind == "verdict"]) == 2

def learner(horizon, num_steps):
    envs = GrowVecEnv(task="digits_impaired", num_envs=3, horizon=horizon, gamma=.99, limit=320, workers=1,
                      blueprints=("norm", "conv_light"))
    config = PPOConfig(num_steps=num_steps, num_updates=2, gamma=.99, num_minibatches=1)
    return Learner(envs, config, PolicyConfig(hidden=16), heads=envs.actions)

def test_ppo_over_lanes_runs_in_a_session(run):
    a, b = (learner(horizon=5, num_steps=4) for _ in range(2))
    records = [u for u in train_ppo(a)]
    s = run(EnvSource(b))
    steps(s, 3); s.stop().wait(); s.start()
    assert s.wait() == "done", s.error
    assert s.steps == 8 and b.update == 2 and s.history.numbers["policy loss"] == records[-1].policy_loss
    # the session changes nothing
    assert all(torch.equal(x, y) for x, y in zip(a.policy.parameters(), b.policy.parameters()))
    assert s.rollback(0).wait().ok is False and "punished" in s.notes[-1].text

def test_a_controller_that_has_learnt_before_goes_on_with_its_count(run, tmp_path):
    half, whole = (learner(horizon=5, num_steps=4) for _ in range(2))
    for _ in range(5): half.step()
    for u in train_ppo(whole): pass
    s = run(EnvSource(half), root=tmp_path)
    assert (s.steps, s.source.total) == (5, 8) and s.position == "at step 5"
    s.save().wait()
    s.start()
    assert s.wait() == "done", s.error
    assert s.steps == 8 and half.update == 2
    assert all(torch.equal(x, y) for x, y in zip(half.policy.parameters(), whole.policy.parameters()))
    again = run(EnvSource(learner(horizon=5, num_steps=4)))
    assert again.load(str(s.folder.path/"checkpoint.safetensors")).wait().ok and again.steps == 5
    again.start()
    assert again.wait() == "done" and again.steps == 8

def test_a_population_that_was_trained_before_goes_on_with_its_count(run, tmp_path):
    pop = population(2, 6)
    for r in fit(pop, 2): pass
    batches = pop.data.num_train // pop.batch_size
    s = run(pop, root=tmp_path)
    d = Dashboard(s)
    assert (s.steps, s.history.x) == (2, 2 * batches) and "2 of 6 epochs" in repr(s)
    assert "image/png" not in d._repr_mimebundle_() # nothing is drawn yet
    steps(s, 1)
    s.log(gap=1.)
    assert s.history.losses.rows[:, 0].tolist() == list(range(2 * batches + 1, 3 * batches + 1))
    assert s.history.metrics["gap"].rows[-1, 0] == 3 * batches
    s.save().wait()
    s.start()
    assert s.wait() == "done" and (s.steps, pop.epoch.tolist()) == (6, [6, 6])
    assert s.notes[-1].text == "done after 6 epochs"
    fresh = run(population(2, 6))
    assert fresh.load(str(s.folder.path/"checkpoint.safetensors")).wait().ok and (fresh.steps, fresh.over) == (3, "")
    steps(fresh, 1)
    fresh.load(str(s.folder.path/"checkpoint.safetensors")).wait()
    assert fresh.steps == 4 # its curves go on
    d.close()

def test_a_session_that_is_made_first_begins_where_others_have_left_the_population(run):
    pop = population(2, 6)
    s = run(pop)
    for r in fit(pop, 2): pass
    assert "epoch 2" in str(s.step(1).wait()) and s.wait() == "paused" and s.steps == 3

def test_a_refused_request_names_the_file(run, tmp_path):
    s = run(population(2, 2), root=tmp_path/"file")
    (tmp_path/"file").write_text("")
    for refused in (s.load(str(tmp_path/"nowhere")).wait(), s.save().wait()):
        assert not refused.ok and str(tmp_path) in str(refused) and "Error(" not in str(refused)
    with pytest.raises(ValueError, match="capacity=10, expected a multiple of 4, at least 8"):
        Session(population(2, 2), capacity=10)
    s.log(gap=[1, 2])
    with pytest.raises(ValueError, match="gap=3, expected 2, as before"): s.log(gap=3)

def test_a_loop_that_was_interrupted_is_not_done(run):
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=.1)
    def loop(disturb):
        yield net(torch.ones(4, 2)).square().mean()
        raise KeyboardInterrupt
    s = run(LoopSource(loop, Governor(net, optimizer, chance_loss=None), net, optimizer, total=20))
    for _ in range(2):
        s.start()
        assert s.wait() == "failed" and "KeyboardInterrupt" in s.over and s.steps == 1

def test_a_fault_in_a_controllers_lane_is_an_incident(run):
    s = run(EnvSource(learner(horizon=30, num_steps=8)))
    steps(s, 5)
    s.provoke("nan", 1).wait()
    steps(s, 3)
    assert [(i.lane, i.reason, i.axis) for i in s.incidents] == [(1, "non-finite", "step")] and s.incidents[0].end == 6
    batch, _, loss, _ = s.history.losses.rows.T
    assert np.isnan(loss[batch == 7]).all()                              # it only began its next episode: not measured
    assert np.isinf(loss[5])                                             # which is not "not finite"
    assert "1 incident" in status_html(s)


# --- a run of another process

def grow_file(path, lines, chunk):
    "Write a run's rows bit by bit, lines torn in the middle, as a disk shows them."
    data = b"".join(lines)
    with open(path, "ab") as file:
        for i in range(0, len(data), chunk):
            file.write(data[i:i + chunk]); file.flush()
            time.sleep(.01)

def test_a_folder_that_is_written_is_followed_and_tells_what_the_run_told(run, tmp_path):
    s = run(population(3, 8), root=tmp_path)
    steps(s, 4); s.provoke("nan", 1).wait(); steps(s, 1)
    s.seed("germinate", 2, "r0c0", "norm").wait(); s.start(); s.wait()
    assert s.save().wait().ok
    lines = s.folder.rows_path.read_bytes().splitlines(keepends=True)
    copy = tmp_path/"elsewhere"
    copy.mkdir()
    (copy/"config.json").write_text(s.folder.config_path.read_text())
    (copy/"rows.jsonl").write_bytes(lines[0])
    d = watch(copy)
    d.session.source.every = .02
    writer = threading.Thread(target=grow_file, args=(copy/"rows.jsonl", lines[1:], len(b"".join(lines)) // 60))
    writer.start()
    while d.session.steps < 3: time.sleep(.01)
    assert writer.is_alive() and d.session.state == "running"           # it follows while the file grows
    writer.join()
    (copy/"final.jsonl").touch()
    assert d.session.wait() == "done", d.session.error
    seen = d.session
    assert np.array_equal(seen.history.losses.rows, s.history.losses.rows, equal_nan=True)
    assert [str(i) for i in seen.incidents] == [str(i) for i in s.incidents] and seen.steps == 8
    assert np.allclose(seen.history.accuracy, s.history.accuracy)
    assert any("germinate norm" in n.text for n in seen.notes)
    limit = seen.history.states.rows[-1, 1:1 + 4]
    assert np.allclose(limit, s.history.states.rows[-1, 1:1 + 4], rtol=1e-5, equal_nan=True)
    d.widget()
    assert d.panel.bar.box not in d.panel.box.children and "Button" not in str(d.panel.box.children[1:])
    d.close(); seen.close()

@pytest.mark.slow
def test_a_controllers_run_is_followed_with_its_curves(run, tmp_path):
    settings = {"env.num_envs": 3, "env.horizon": 5, "env.limit": 320, "ppo.num_updates": 2, "ppo.num_steps": 8,
                "ppo.num_minibatches": 1, "env.faults": (parse_fault("nan:1:2"),)}
    r = begin_run(get_recipe("digits_impaired", settings), tmp_path)
    updates = list(r.updates())
    (r.folder.path/"final.jsonl").touch()
    s = watch(r.folder.path).session
    assert s.wait() == "done", s.error
    assert (s.steps, s.history.x, s.source.total) == (16, 16, 16)
    curves = dict(zip(s.history.curve_names, s.history.curves.rows[:, 1:].T))
    entropy = [np.mean([h for h in u.head_entropy if h is not None]) for u in updates]
    assert np.allclose(curves["entropy"][~np.isnan(curves["entropy"])], entropy, rtol=1e-5)
    returns = [x for u in updates for x in u.returns]
    assert np.isfinite(curves["return"]).any() and min(returns) - 1e-3 <= np.nanmin(curves["return"])
    assert s.history.numbers["policy loss"] == updates[-1].policy_loss
    assert [(i.lane, i.reason, i.action, i.axis) for i in s.incidents][:1] == [(1, "non-finite", "rollback", "step")]
    assert 0 <= s.incidents[0].back < s.incidents[0].end == s.incidents[0].x
    first = session_packet(s)
    rows = [row for row in r.folder.rows() if row["kind"] == "episode"]
    assert first.meta["ends"] == [(row["epoch"] + 1, row["lane"]) for row in rows] and len(rows) >= 6
    assert session_packet(s, first.seen).meta["ends"] == []
    shown = []
    watch_text(r.folder.path, .05, shown.append)
    assert any("non-finite" in line for line in shown) and shown[-1].startswith("✓ update 2 of 2")
    s.close()

def test_a_run_that_is_taken_back_is_followed_on(tmp_path):
    (tmp_path/"config.json").write_text('{"fit": {"lanes": 1}}')
    def row(e): return dict(kind="batch", lane=0, epoch=e, batch=0, step=e + 1) | {"batch.loss": 1 / (e + 1)}
    def rows(epochs): return "".join(encode_row(row(e)) + "\n" for e in epochs)
    path = tmp_path/"rows.jsonl"
    path.write_text(rows(range(6)))
    source = RowsSource(tmp_path, every=.01)
    got = [source.step().loss[0, 0] for _ in range(5)]
    path.write_text(rows(range(3)))                                     # a checkpoint knows of three epochs
    assert not source.read()
    with open(path, "a") as file: file.write(rows(range(3, 8)))
    (tmp_path/"final.jsonl").touch()
    while (f := source.step()) is not None: got += list(f.loss[:, 0])
    assert got[:5] == [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5] and got[-5:] == [1 / 4, 1 / 5, 1 / 6, 1 / 7, 1 / 8]
    with pytest.raises(ValueError, match="rows.jsonl"): RowsSource(tmp_path/"nowhere")

def test_a_run_that_is_resumed_for_longer_shows_its_new_end(tmp_path):
    def settings(updates):
        run = dict(env=dict(num_envs=1), ppo=dict(num_updates=updates, num_steps=2))
        (tmp_path/"config.json").write_text(json.dumps(dict(run=run)))
    def row(e): return dict(kind="epoch", lane=0, epoch=e, step=e + 1) | {"train.loss": 1 / (e + 1)}
    settings(2)
    path = tmp_path/"rows.jsonl"
    path.write_text("".join(encode_row(row(e)) + "\n" for e in range(5)))
    session = Session(RowsSource(tmp_path, every=.01))
    assert session.source.total == 4
    session.step(3).wait()
    settings(8)
    with open(path, "a") as file: file.write("".join(encode_row(row(e)) + "\n" for e in range(5, 7)))
    (tmp_path/"final.jsonl").touch()
    session.start().wait(); session.wait()
    assert "step 7 of 16" in session_text(session)
    session.close()

@pytest.mark.parametrize("reason, loss, said", [
    ("non-finite", .7, "(loss 0.7)"), ("collapse", .7, "(loss 0.7)"), ("explosion", .7, "(loss 0.7)"),
    ("explosion", 7., "(loss 7, limit 4.6)"), ("rise", .7, "(loss 0.7, mean 0.03)"), ("rise", .02, "(loss 0.02)")])
def test_a_report_and_its_incident_name_no_limit_that_the_loss_was_below(reason, loss, said):
    stats = LossStats()
    stats.add(np.zeros(30, int), np.full(30, .03), DetectorConfig())
    stats, verdict = judge(stats, .03, DetectorConfig(), chance_loss=2.3)
    report = describe_failure(
        stats, DetectorConfig(), replace(verdict, loss=np.array([loss])), np.array([2.3]), 0, reason)
    incident = incident_from_report(replace(report, action="rollback"), number=1, x=9, end=9, back=4)
    assert f"{reason} {said} -> " in str(report) and f"{reason} {said} → rollback" in str(incident)
    assert "lane 0: state (weights) → rollback" in str(replace(incident, reason="state", loss="none", why="weights"))
    assert "lane 0: by hand → rollback" in str(replace(incident, reason="by hand", loss="none"))


# --- feeds: traffic and memory

class Browser:
    "Answers like the script in the page does, and keeps what it was told."
    def __init__(self, answers=True): self.answers, self.messages, self.table, self.keep = answers, 0, None, True
    def on_msg(self, hear): self.hear = hear
    def send(self, m, buffers):
        self.messages += 1
        news = np.frombuffer(buffers[0], np.float32).reshape(-1, 3)
        if self.keep: self.table = news if m["whole"][0] or self.table is None else np.concatenate([self.table, news])
        if self.answers and m["answer"]: self.hear(self, dict(kind="answer", number=m["number"]))

@pytest.mark.slow
def test_no_growth_of_memory_or_traffic_over_a_long_run(run):
    s, browser = run(FrameSource((Frame(np.random.rand(4, 2), np.zeros(2)) for _ in range(10**9)), 2),
                     capacity=256), Browser()
    feed = Feed(s, browser)
    browser.hear(browser, dict(kind="hello"))
    def work(k):                                                        # a packet every tenth step
        for _ in range(k // 10):
            for f in (s.source.step() for _ in range(10)): s.history.add(f)
            s.history.note("control", "x" * 60)
            feed.pacer.last = -1e9
            feed.update()
    work(1500)
    tracemalloc.start()
    before, at = tracemalloc.get_traced_memory()[0], browser.messages
    work(6000)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 200_000, f"{grown:,} bytes more after 6,000 steps"
    assert len(s.notes) == 200 and len(s.history.losses.rows) <= 256 and browser.messages - at == 600
    assert np.array_equal(browser.table, s.history.losses.rows)
    assert session_packet(s).size < 60_000

def test_a_silent_page_costs_a_few_messages_and_gets_everything_when_it_is_back(run):
    s, browser = run(FrameSource(fake(10**6), 2)), Browser(answers=False)
    feed = Feed(s, browser)
    browser.hear(browser, dict(kind="hello"))
    sent = 0
    for t in np.arange(0, 600, .25):
        s.history.add(s.source.step())
        if feed.pacer.due(t + 1e6): sent += 1
    assert sent < 30
    browser.answers = True
    browser.hear(browser, dict(kind="hello"))                           # a new page
    assert np.array_equal(browser.table, s.history.losses.rows) and feed.pacer.wait == feed.pacer.interval

def test_a_slow_page_is_waited_for_and_an_answer_ends_the_wait():
    with pytest.raises(ValueError, match="at least 0.25"): Feed(SimpleNamespace(), interval=.1)
    p, now = Pacer(.25, every=4), 0.
    while p.wait < 30: now += 60; assert p.due(now)
    assert p.ask and p.unanswered > 8                                   # every packet asks now
    p.answer(p.sent)
    assert p.wait == .25 and not p.ask and p.due(now + .25)

@pytest.mark.slow
def test_a_page_is_answered_after_another_has_deleted_its_subshell_and_while_a_cell_is_busy():
    manager = pytest.importorskip("jupyter_client.manager")
    pytest.importorskip("anywidget")
    km, kc = manager.start_new_kernel(kernel_name="python3")
    def control(kind, **content):
        kc.control_channel.send(kc.session.msg(kind, content))
        return kc.get_control_msg(timeout=60)["content"]
    def hello(subshell):
        "Whether a page that says hello gets the whole run within ten seconds."
        said = dict(method="custom", content=dict(kind="hello"))
        message = kc.session.msg("comm_msg", dict(comm_id=canvas, data=said))
        message["header"]["subshell_id"] = subshell
        kc.shell_channel.send(message)
        return packet(lambda content: "head" in content)
    def packet(wanted, within=10):
        end = time.time() + within
        while time.time() < end:
            try: m = kc.get_iopub_msg(timeout=1)
            except Exception: continue                              # queue.Empty
            content = m["content"].get("data", {}).get("content", {}) if m["msg_type"] == "comm_msg" else {}
            if content.get("kind") == "packet" and wanted(content): return True
        return False
    try:
        kc.execute_interactive("""
import itertools, numpy as np
from esper_nb.show import Dashboard, Frame, FrameSource, Session
session = Session(FrameSource((Frame(np.ones((4, 2))) for _ in itertools.count()), 2), pace=.3)
dashboard = Dashboard(session, view="widgets")
box = dashboard.widget()
session.start()""", timeout=120)
        reply = kc.execute_interactive("", user_expressions=dict(canvas="dashboard.panel.canvas.comm.comm_id"))
        canvas = reply["content"]["user_expressions"]["canvas"]["data"]["text/plain"].strip("'")
        if "subshell_id" not in (made := control("create_subshell_request")): pytest.skip("a kernel without subshells")
        old, new = made["subshell_id"], control("create_subshell_request")["subshell_id"]
        assert hello(old) and packet(lambda content: "head" not in content)
        assert control("delete_subshell_request", subshell_id=old)["status"] == "ok"
        assert hello(new)
        kc.execute("import time; time.sleep(30)")
        assert hello(new)
    finally: kc.stop_channels(); km.shutdown_kernel(now=True)

def test_words_go_with_the_packet_and_only_when_they_changed(board):
    board.widget()
    sent = []
    feed, canvas = board.panel.feed, board.panel.canvas
    canvas.send = lambda m, buffers: sent.append(m)
    feed.close(); feed.thread.join()
    feed.on_message(canvas, dict(kind="hello"))
    assert set(sent[0]["html"]) == {"status", "log", "grow", "policy"} and "head" in sent[0]
    steps(board.session, 1)
    feed.pacer.last = -1e9; feed.update()
    assert "epoch 1 of" in sent[1]["html"]["status"] and "1 epoch at batch 0 (epoch 0)" in sent[1]["html"]["log"]
    with board.session.history.lock: board.session.history.version += 1
    feed.pacer.last = -1e9; feed.update()
    assert sent[2]["html"] == {}

def test_a_loop_that_has_raised_does_not_seem_to_be_done_when_it_is_started_again(run):
    net = torch.nn.Linear(2, 1)
    governor = Governor(net, torch.optim.SGD(net.parameters(), lr=.1), chance_loss=None)
    def loop(disturb):
        yield torch.tensor(1.)
        raise KeyError("mine")
    s = run(LoopSource(loop, governor, net, total=9))
    for said in ("KeyError: 'mine'", "RuntimeError: the loop ended with KeyError: 'mine', and a generator that has"):
        s.start()
        assert s.wait() == "failed" and said in s.error

def test_a_loop_that_hands_over_its_batches_shows_cause_and_what_was_redone(run):
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 3)
    opt = torch.optim.Adam(net.parameters(), lr=.02)
    governor = Governor(net, opt, chance_loss=1.0986, config=GovernorConfig(snapshot_every=10, probation=10))
    x, y = torch.randn(64, 8), torch.randint(3, (64,))
    def step(batch):
        return update(opt, torch.nn.functional.cross_entropy(net(batch[0]), batch[1]))
    def loop(disturb):
        while True: yield governor.run(step, disturb(x, y))
    s = run(LoopSource(loop, governor, net, opt, 100))
    steps(s, 45)
    assert governor.watched == 45
    s.provoke("nan", 0).wait()
    steps(s, 10)
    incident, = s.incidents
    assert incident.cause == "external" and incident.redone > 0 and incident.lost <= 1
    assert "trained on again" in str(incident)
    assert [n.text for n in s.notes if n.kind == "verdict"][0] == str(replace(incident, recovered=None))
    row, = [r for r in s.history.recorder.rows if r["kind"] == "governor"]
    assert (row["governor.cause"], row["governor.redone"]) == ("external", incident.redone)
    assert row["governor.lost"] <= 1 and row["governor.why"] == incident.why
    again = dashboard_module.row_incident(row, end=row["step"], batches=1)
    assert (again.cause, again.redone, again.lost) == (incident.cause, incident.redone, row["governor.lost"])

def test_what_is_new_about_an_incident_is_sent_again(run):
    "Its fault where it begins, its recovery, and a cause that was found later, which stands in the log, too."
    s = run(population(2, 40))
    steps(s, 6); s.provoke("nan", 1).wait()
    before = session_packet(s)
    steps(s, 1)
    fault, = s.history.faults
    assert (fault.lane, fault.kind, fault.x) == (1, "nan", s.incidents[0].x)
    assert [tuple(mark[1:]) for mark in before.meta["faults"]] == [(fault.x, 1, "nan")]
    first, reports = session_packet(s, before.seen), s.source.governor.log.reports
    assert first.meta["faults"] == [] and s.incidents[0].cause is None
    assert [(i["recovered"], i["known_cause"]) for i in first.meta["incidents"]] == [(None, "the injected fault nan")]
    reports[-1] = replace(reports[-1], cause="data", why="without batch 6 the loss stays finite")   # as `explain` does
    steps(s, 4)
    assert str(replace(s.incidents[0], recovered=None)).endswith(", cause: data")
    assert any(n.text == "lane 1: the cause was data: without batch 6 the loss stays finite" for n in s.notes)
    assert [(i["recovered"], i["known_cause"]) for i in session_packet(s, first.seen).meta["incidents"]] == [
        (s.incidents[0].recovered, "data")] and s.incidents[0].recovered is not None


# --- the dashboard without a page

@pytest.fixture
def board(run):
    made = Dashboard(run(population(4, 100)), lane=1)
    yield made
    made.close()

def test_two_threads_that_ask_for_the_panel_get_the_same(board):
    together, boxes = threading.Barrier(2), []
    def get(): together.wait(); boxes.append(board.widget())
    threads = [threading.Thread(target=get) for _ in range(2)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert boxes[0] is boxes[1] is board.panel.box

def press(board, text):
    "Click the button with this text, wherever it is in the panel."
    def find(w):
        if getattr(w, "description", None) == text and hasattr(w, "click"): return w
        return next(filter(None, map(find, getattr(w, "children", ()))), None)
    button = find(board.widget())
    assert button is not None, f"no button {text!r}"
    button.click()
    if board.session.state != "running": time.sleep(.05)
    return button

def test_every_button_works(board):
    s = board.session
    press(board, "▸❙ Step"); s.wait()
    press(board, "▸❙ Step"); s.wait()
    assert s.steps == 2
    press(board, "Germinate"); press(board, "nan"); press(board, "▸❙ Step"); s.wait()
    assert s.incidents[0].lane == 1
    press(board, "◇ Snapshot"); press(board, "↶ Roll back lane"); s.ask("pause").wait()
    assert s.incidents[-1].reason == "by hand"
    board.panel.bar.buttons["start"].click(); press(board, "❙❙ Pause"); s.wait()
    press(board, "■ Stop"); s.ask("pause").wait()
    board.panel.update(False)
    words = {k: w.value for k, w in board.panel.words.items()}
    assert "rolled back lane 1" in words["log"] and "non-finite" in words["log"] and "epoch" in words["status"]

def test_a_threshold_can_be_moved_switched_off_and_on(board):
    board.widget()
    governor = board.session.source.governor
    board.panel.thresholds.sliders["multiplier"].value = 5.; board.session.ask("pause").wait()
    assert governor.config.multiplier == 5.
    panel = board.panel.thresholds
    assert set(panel.sliders) == {"multiplier", "sigma", "absolute", "rise_ratio"}      # the others are folded away
    panel.more.value = True
    assert set(panel.sliders) == set(THRESHOLDS)
    panel.switches["huge"].value = False; board.session.ask("pause").wait()
    assert governor.config.huge is None and panel.sliders["huge"].disabled
    panel.switches["huge"].value = True; board.session.ask("pause").wait()
    assert governor.config.huge == 20.

def texts(w):
    "Everything that a widget and what it holds say, explanations of words left out."
    own = [getattr(w, "value", "") if type(w).__name__ in ("HTML", "Label") else getattr(w, "description", "")]
    said = " ".join([*filter(None, own), *map(texts, getattr(w, "children", ()))])
    return re.sub(r"</?abbr[^>]*>", "", said)

def test_thresholds_say_what_they_do_and_their_default(board):
    board.widget()
    panel = board.panel.thresholds
    said = texts(panel.box)
    for words in ("solid line", "dashed line", "dotted line", "Default 3.", "Default 6.", "28 more thresholds"):
        assert words in said, words
    panel.more.value = True
    said = texts(panel.box)
    assert said.count("Default ") == len(THRESHOLDS)
    assert "losses between snapshots. Default 50." in said

def test_two_panels_on_one_session_agree(run):
    s = run(population(2, 60))
    one, two = Dashboard(s), Dashboard(s)
    one.widget(); two.widget()
    try:
        one.panel.thresholds.sliders["sigma"].value = 9.; s.pause().wait()
        s.adjust(huge=None).wait()
        one.panel.thresholds.more.value = two.panel.thresholds.more.value = True
        one.panel.bar.pace.value = .5; s.pause().wait()
        steps(s, 1)
        asked = len(s.notes)
        for d in (one, two): d.panel.update(False)
        sliders = two.panel.thresholds.sliders
        assert sliders["sigma"].value == 9 and sliders["huge"].disabled and two.panel.bar.pace.value == .5
        assert len(s.notes) == asked                                    # to follow is not to ask
        assert two.panel.words["log"].value == one.panel.words["log"].value
        assert [b.disabled for b in two.panel.bar.buttons.values()] == [
            b.disabled for b in one.panel.bar.buttons.values()]
    finally: one.close(); two.close()

def test_buttons_that_cannot_work_are_off_and_say_why(run):
    s = run(FrameSource(fake(3), 2, 3))
    why = disabled_reasons(s)
    assert not why["start"] and "in progress" in why["pause"] and "no parts" in why["save"]
    assert "no Governor watches" in why["rollback"]
    s.start(); s.wait()
    assert {disabled_reasons(s)[name] for name in ("start", "step", "provoke")} == {"the run is over"}
    d = Dashboard(s); d.widget(); d.panel.update(False)
    save = d.panel.bar.buttons["save"]
    assert save.disabled and save.tooltip == "Not now: this run cannot be saved: its source has no parts"
    d.close()

def test_a_refused_move_says_what_is_missing_and_names_no_gate(run):
    s = run(population(2, 60))
    s.seed("germinate", 1, "r0c0", "norm").wait(); s.seed("advance", 1, "r0c0").wait()
    said = s.seed("advance", 1, "r0c0").wait()
    assert not said.ok and said.message.startswith("seed refused: cannot advance r0c0 of lane 1 now: in 10 more epochs")
    assert s.seed("prune", 0, "r0c0").wait().message.endswith("cannot prune r0c0 of lane 0 now: nothing grows here")

def test_the_log_counts_lanes_where_there_are_many():
    said, = operations_line(["prune", "wait", "prune", *["germinate"] * 14])
    assert said == "prune in lanes 0, 2, germinate in 14 lanes"


@pytest.mark.slow
def test_a_grow_button_is_on_exactly_when_the_move_would_be_done(run):
    pop = population(2, 60)
    s, seen = run(pop), set()
    slot = pop.model.slot("r0c0")
    plan = slot.blueprints[0]
    def agree():
        needs = seed_disabled_reasons(slot, 1)
        for verb, why in needs.items():
            done = apply_decision(deepcopy(pop.model), 1, Decision(verb, "r0c0", plan if verb == "germinate" else None))
            assert done.ok == (why == ""), (slot.state(1), verb, why, done.message)
        seen.add(slot.state(1).stage.name)
    agree()
    s.seed("germinate", 1, "r0c0", plan).wait(); agree()
    for _ in range(34):
        left = seed_disabled_reasons(slot, 1)["advance"]
        if left == "": s.seed("advance", 1, "r0c0").wait(); agree()
        steps(s, 1); agree()
    assert {"DORMANT", "GERMINATED", "TRAINING", "BLENDING", "HOLDING"} <= seen, seen
    s.seed("prune", 1, "r0c0").wait(); agree()
    text = seed_disabled_reasons(slot, 1)["germinate"]
    epochs = int(re.search(r"in (\d+) more epochs", text)[1])
    steps(s, epochs - 1); agree()
    assert seed_disabled_reasons(slot, 1)["germinate"]
    steps(s, 1); agree()
    assert not seed_disabled_reasons(slot, 1)["germinate"]                         # on the epoch that it had named

def test_a_cell_that_runs_twice_leaves_no_run_unseen(run, monkeypatch):
    cell = "a"
    monkeypatch.setattr(dashboard_module, "live_front_end", lambda: True)
    monkeypatch.setattr(dashboard_module, "running_cell", lambda: cell)
    monkeypatch.setattr(dashboard_module.NotebookOutput, "publish", lambda self, lane: None)
    first, second, third = (run(FrameSource(fake(10**9), 2), pace=.01) for _ in range(3))
    def show(s):
        d = Dashboard(s)
        assert set(d._repr_mimebundle_()) == {"text/plain", "application/vnd.jupyter.widget-view+json"}
        return d
    made = [show(first)]
    first.start().wait()
    made.append(show(first))                                            # the same run, shown again: it goes on
    assert first.state == "running"
    made.append(show(second))
    first.pause().wait()
    assert first.state == "stopped" and "the run that this cell showed before was stopped" in second.notes[-1].text
    second.start().wait()
    cell = "b"; made.append(show(second))
    cell = "a"; made.append(show(third))
    second.set_pace(.01).wait()
    assert second.state == "running"                                    # another cell shows it still
    for d in made: d.close()
    dashboard_module.DASHBOARDS.clear()

def test_what_a_notebook_keeps_is_text_and_picture_and_the_way_back(run):
    s = run(population(2, 20))
    first = notebook_html(s)
    assert "ready: epoch 0 of 20" in first and "run this cell again" in first and "<img" not in first
    steps(s, 2)
    s.history.note("control", "<script>alert(1)</script>")
    kept = notebook_html(s, 1)
    assert 'src="data:image/png;base64,' in kept and "epoch 2 of 20" in kept and "<script>" not in kept
    stored, shown = NotebookOutput(s), []
    stored.handles.append(SimpleNamespace(update=lambda bundle, raw: shown.append(bundle)))
    stored.refresh(0); stored.refresh(0)
    assert len(shown) == 1 and set(shown[0]) == {"text/html", "text/plain"}
    s.start(); s.set_pace(.01).wait(); stored.refresh(0)
    assert len(shown) == 1                                               # while it runs, once a minute
    s.pause().wait(); stored.refresh(0)
    assert len(shown) == 2

def test_lane_and_slot_follow_the_pickers_and_the_canvas(board):
    board.widget()
    board.panel.selector.lane.value = 3
    assert board.lane == 3 and board.panel.canvas.lane == 3
    board.panel.canvas.lane = 2                                                # a click in the picture
    selector = board.panel.selector
    assert board.lane == 2 and selector.lane.value == 2 and "lane 2" in texts(selector.titles[0][0])
    board.panel.selector.slot.value = "r0c2"
    press(board, "Germinate"); board.session.ask("pause").wait()
    assert board.session.source.model.slot("r0c2").state(2).stage.name == "GERMINATED"

def test_without_a_page_a_cell_leaves_text_and_then_a_picture(run, monkeypatch):
    s = run(population(2, 20))
    d = Dashboard(s)
    assert not live_front_end() and d.panel is None
    assert set(d._repr_mimebundle_()) == {"text/plain"} and "ready" in repr(d)
    steps(s, 2)
    bundle = d._repr_mimebundle_()
    assert bundle["image/png"][:8] == b"\x89PNG\r\n\x1a\n" and "paused" in bundle["text/plain"] and d.panel is None
    monkeypatch.setattr(dashboard_module, "live_front_end", lambda: True)
    assert "application/vnd.jupyter.widget-view+json" in d._repr_mimebundle_()
    assert set(Dashboard(s, view="text")._repr_mimebundle_()) == {"text/plain"}
    d.close()

def test_in_colab_the_panel_names_the_widget_manager_that_can_draw_it(run, monkeypatch):
    "Colab's own manager has no `canvas`: another one is asked for, and its address goes with the output of the cell."
    url, asked = "https://ssl.gstatic.com/manager", []
    output = SimpleNamespace(enable_custom_widget_manager=lambda: asked.append(1),
                             _widgets=SimpleNamespace(_installed_url=url))
    for name, module in {"google.colab": SimpleNamespace(output=output), "google.colab.output": output}.items():
        monkeypatch.setitem(sys.modules, name, module)
    importlib.import_module("anywidget._util").enable_custom_widget_manager_once.cache_clear()
    board = Dashboard(run(FrameSource(fake(9), 2)))
    data, where = board._repr_mimebundle_()
    name = "application/vnd.jupyter.widget-view+json"
    assert asked and data[name]["model_id"] == board.panel.box.model_id
    assert where == {name: {"colab": {"custom_widget_manager": {"url": url}}}}
    board.close()

def test_a_pictures_legend_covers_no_curve_and_its_rise_is_no_limit(run):
    s = run(population(2, 20))
    steps(s, 8)
    fig = plot_session(s, 0)
    fig.draw_without_rendering()
    ax = fig.axes[0]
    legend = ax.get_legend().get_window_extent()
    assert legend.y0 >= ax.get_window_extent().y1 - 1
    looks = {line.get_label(): line for line in ax.lines}
    assert looks["rise, of the smoothed loss"].get_linestyle() == ":" != looks["limit"].get_linestyle()

def test_a_restored_state_is_drawn_at_its_loss_and_hatched_is_what_was_lost(run):
    def undone(**where):
        return Incident(number=0, lane=0, reason="rise", action="rollback", loss="50", target=40., rollbacks_left=3,
                        cause="external", **where)
    # the second snapshot was taken where the first rollback had discarded the batches
    when = {5: (undone(x=101, end=120, back=80),), 7: (undone(x=125, end=160, back=120, redone=39),)}
    s = run(FrameSource((Frame(np.full((20, 1), 50. if t == 5 else .2), incidents=when.get(t, ()))
                         for t in range(10)), 1))
    steps(s, 8)
    assert [i.level for i in s.incidents] == pytest.approx([.2, .2])
    assert [(i.lost_from, i.lost) for i in s.incidents] == [(80, 40), (159, 1)]
    ax = plot_session(s, 0).axes[0]
    diamonds = [line.get_ydata()[0] for line in ax.lines if line.get_marker() == "D"]
    assert diamonds == pytest.approx([.2, .2])
    assert sorted(p.get_width() for p in ax.patches) == [1, 40]
    assert all("cause: external" in t.get_text() for t in ax.texts if "lost" in t.get_text())
    sent = session_packet(s).meta["incidents"]
    assert [(i["lost_from"], round(i["level"], 6)) for i in sent] == [(80, .2), (159, .2)]

def test_names_of_rollbacks_in_a_picture_are_apart(run):
    s = run(FrameSource(fake(200, 1), 1))
    s.start(); s.wait()
    for x in (150, 160, 170, 300):
        s.history.incidents.append(Incident(
            number=x, lane=0, reason="non-finite", action="rollback", x=x, end=x + 5, back=x - 10, loss="nan",
            target=None, rollbacks_left=3))
    fig = plot_session(s, 0)
    fig.draw_without_rendering()
    boxes = [t.get_window_extent() for t in fig.axes[0].texts if "lost" in t.get_text()]
    assert len(boxes) == 4 and not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])

def test_a_live_page_is_told_from_an_executor(monkeypatch):
    monkeypatch.setenv("SERVER_SOFTWARE", "voila/0.5")
    assert live_front_end()
    monkeypatch.delenv("SERVER_SOFTWARE")
    for metadata, live in (({"cellId": "a"}, True), ({}, False), (None, False)):
        shell = SimpleNamespace(kernel=SimpleNamespace(get_parent=lambda: dict(metadata=metadata)))
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
        assert live_front_end() == live

def test_plain_images_stand_in_where_the_canvas_cannot_be(run, monkeypatch):
    s = run(population(2, 20))
    d = Dashboard(s, image=True)
    d.widget()
    assert d.panel.canvas is None and d.panel.plain.layout.display == "block" and d.panel.plain.value[:4] == b"\x89PNG"
    monkeypatch.setattr(dashboard_module, "canvas_class", lambda: None)             # anywidget is not installed
    e = Dashboard(s)
    e.widget()
    assert e.panel.canvas is None and e.panel.plain.layout.display == "block"
    d.close(); e.close()

def test_plain_images_come_when_no_page_answers(board):
    board.widget()
    panel = board.panel
    panel.update(False)
    assert panel.plain.layout.display == "none"
    panel.shown -= 10
    panel.update(False)
    assert panel.plain.layout.display == "block"
    panel.update(True)                                                     # the canvas answered after all
    assert panel.plain.layout.display == "none"

def test_a_session_without_lanes_slots_or_guard_has_a_panel_too(run):
    s = run(FrameSource(fake(5, lanes=1), 1))
    d = Dashboard(s)
    d.widget(); steps(s, 3)
    plot_session(s)
    assert "batch" in log_html(s) or "step" in log_html(s)
    assert d.session.rollback().wait().ok is False
    d.close()


# --- a network of one's own

def own_network(width=12):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, width), torch.nn.ReLU(),
                               torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))


def test_the_panel_takes_a_network_of_ones_own(run):
    host = ModuleHostConfig(own_network, {"1": "BD", "3": "BD"})
    digits = get_task("digits").load(limit=256)
    task = task_from_arrays(digits.x["test"], digits.y["test"], "own_network_digits", host=host, epochs=8)
    s = run(PopulationSource(new_population(task, FitConfig(lanes=3, epochs=8, workers=1))))
    board = Dashboard(s, lane=1)
    press(board, "▸❙ Step"); s.wait()
    press(board, "Germinate"); press(board, "▸❙ Step"); s.wait()
    assert s.error == "" and s.steps == 2
    stages = s.source.pop.model.status(1)
    assert "GERMINATED" in str(stages) or "TRAINING" in str(stages)
    html, packet = notebook_html(s, 1), session_packet(s)
    assert "<img" in html and "own_network" in html and packet.size < 60_000
    assert len(plot_session(s, 1).axes) >= 2
    board.close()


def test_what_cannot_go_on_offers_no_button_that_would_be_refused(run):
    net = torch.nn.Linear(2, 1)
    governor = Governor(net, torch.optim.SGD(net.parameters(), lr=.1), chance_loss=None)
    def endless(disturb):
        while True: yield torch.tensor(1.)
    def broken(disturb):
        yield torch.tensor(1.)
        raise KeyError("mine")
    for loop, total, state, why in ((endless, 3, "done", "the run is over"), (broken, 9, "failed", "a new LoopSource")):
        s = run(LoopSource(loop, governor, net, total=total))
        panel = Panel(s, s.ask, 0, lambda lane: None, 438, False)
        buttons = [panel.bar.buttons[name] for name in ("start", "step")] + list(panel.faults.buttons.values())
        assert not any(b.disabled for b in buttons)
        s.start()
        assert s.wait() == state
        panel.update(False)
        assert all(b.disabled and why in b.tooltip for b in buttons)
        refused = s.provoke("nan").wait()
        assert not refused.ok and why in refused.message and not s.history.faults
        panel.close()
