"What must hold whatever else changes: faults that a system of this kind can have and must not grow."
import gc
import math
import threading
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from test_vector_conformance import TASK, tiny_data
from torch import nn

from esper_nb.control import GrowVecEnv
from esper_nb.core import Workers, by_lane, lane_state
from esper_nb.guard import Governor, GovernorConfig, Snapshot
from esper_nb.learn import Learner, PPOConfig, PolicyConfig
from esper_nb.record import limit_rows, run_rows
from esper_nb.train import FitConfig, evaluate, fit, new_population, run_epoch

pytestmark = pytest.mark.usefixtures("one_thread")

def population(lanes=2, **kw):
    return new_population(TASK, FitConfig(lanes=lanes, workers=1, **kw), data=tiny_data(),
                          blueprints=("norm", "conv_small"))

# --- snapshots and rollback

def test_a_model_without_parameters_is_guarded():
    gov = Governor(nn.ReLU(), chance_loss=None)
    report, = [r for _ in range(3) for r in gov.watch(math.nan)]
    assert (report.reason, report.action) == ("non-finite", "rollback") and "model" in report.restored


def test_a_good_state_is_held_from_the_first_moment():
    net = nn.Linear(2, 2); good = net.weight.detach().clone()
    gov = Governor(net, chance_loss=None)
    net.weight.data.fill_(math.nan)
    report, = gov.watch(math.nan)
    assert torch.equal(net.weight, good) and report.restored_step == 0


def test_a_restore_waits_for_the_device_before_and_after_it_writes(monkeypatch):
    net, calls = nn.Linear(2, 2), []
    snap = Snapshot(net, streams=False)
    snap.take()
    write = snap.parts["model"].write
    monkeypatch.setattr(snap.parts["model"], "write", lambda *a: (calls.append("write"), write(*a)), raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *a: calls.append("wait"))
    snap.restore()
    assert calls == ["wait", "write", "wait"]


def test_two_governors_in_two_threads_do_not_meet():
    def run(seed, out):
        g = torch.Generator().manual_seed(seed)
        net = nn.Linear(4, 4)
        with torch.no_grad():
            for p in net.parameters(): p.copy_(torch.randn(p.shape, generator=g))
        gov = Governor(net, chance_loss=None, config=GovernorConfig(snapshot_every=5, probation=5, lost_confirm=1))
        for t in range(120):
            net.weight.data.add_(.01 * torch.randn(4, 4, generator=g))
            gov.watch(math.nan if t == 40 + seed else float(torch.rand((), generator=g)) * .1 + 1)
        out.append(([(r.step, r.reason, r.action, r.restored_step) for r in gov.reports], net.weight.detach().clone()))
    alone, together = [[], []], [[], []]
    for s in (0, 1): run(s, alone[s])
    threads = [threading.Thread(target=run, args=(s, together[s])) for s in (0, 1)]
    for t in threads: t.start()
    for t in threads: t.join()
    for (a,), (b,) in zip(alone, together):
        assert a[0] == b[0] and len(a[0]) == 1 and torch.equal(a[1], b[1])


def test_weights_are_back_before_seeds_are_pruned(monkeypatch):
    pop = population(governor=GovernorConfig(lowers=0))
    run_epoch(pop)
    def poison(net, stepper, lanes, b, x, y):
        by_lane(next(net.parameters()).data, len(lanes))[0] = math.nan
        return x, y
    def fail(*a): raise OSError("pruning failed")
    monkeypatch.setattr(type(pop.model), "prune_live", fail)
    with pytest.raises(OSError, match="pruning failed"): run_epoch(pop, disturb=poison)
    assert all(t.isfinite().all() for k, t in lane_state(pop.model.host).items())


def test_anomalies_are_told_before_any_rollback():
    gov = Governor(nn.Linear(1, 1), chance_loss=math.log(10))
    for x in .9 * np.exp(.05 * np.random.default_rng(0).standard_normal(60)): assert gov.watch(float(x)) == ()
    calls = []
    for x in (7., 7.5):
        assert gov.watch(x) == ()
        calls.append(limit_rows(gov, step=int(gov.stats.judged[0]))[0]["limit.anomalies"])
    assert calls == [1, 2] and [x for _, x in gov.stats.anomalies(0)] == [7., 7.5]


# --- training

def test_training_figures_cover_every_batch():
    task = TASK.replace(batch_size=2)
    pop = new_population(task, FitConfig(lanes=3, workers=1), data=tiny_data())
    seen = []
    def look(net, stepper, lanes, b, x, y): seen.append(b); return x, y
    r = run_epoch(pop, disturb=look).train
    assert len(seen) == 16 and r.losses.shape == (16, 3)
    torch.testing.assert_close(r.loss, r.losses.mean(0))
    assert [getattr(r, k).shape for k in ("loss", "accuracy_pp", "grad_norm", "skipped")] == [(3,)] * 4, \
        "one tensor for a metric, not one for a lane"
    assert torch.equal(r.accuracy_pp * 32 / 100, (r.accuracy_pp * 32 / 100).round()), "of all 32 examples"


@pytest.mark.parametrize("asked", [None, 8])
def test_the_batch_size_is_the_one_asked_for_and_is_written_down(asked):
    pop, seen = population(batch_size=asked), set()
    def look(net, stepper, lanes, b, x, y): seen.add(len(x)); return x, y
    run_epoch(pop, disturb=look)
    assert seen == {asked or TASK.batch_size} == {run_rows(pop)[0]["run.batch_size"]}


def test_training_prints_nothing(capfd):
    for _ in zip(range(2), fit(population(governor=GovernorConfig()))): pass
    assert capfd.readouterr() == ("", "")


def test_data_are_freed_with_their_last_user():
    data = tiny_data()
    pop = new_population(TASK, FitConfig(lanes=2, workers=1), data=data)
    run_epoch(pop)
    kept = [weakref.ref(t) for t in (*data.x.values(), *data.y.values())]
    del data, pop
    gc.collect()
    assert [ref() for ref in kept] == [None] * 6


def test_what_was_evaluated_can_be_trained_on():
    pop = population()
    r = evaluate(pop.model, pop.task, pop.data)
    assert not r.loss.is_inference()
    (r.loss * torch.ones(2, requires_grad=True)).sum().backward()
    env = GrowVecEnv(task=TASK, data=tiny_data(), num_envs=2, workers=1)
    with torch.inference_mode(): env.reset(seed=0); env.step(np.zeros((2, 8), int))
    env.step(np.zeros((2, 8), int))
    assert not any(t.is_inference() for t in lane_state(env.parts[0][1].model).values())


# --- environments and the learner

def test_a_reset_fills_what_is_there():
    env = GrowVecEnv(task=TASK, data=tiny_data(), num_envs=3, workers=1, autoreset_mode="Disabled")
    env.reset(seed=0)
    pop = env.parts[0][1]
    def places(): return {k: t.data_ptr() for k, t in (lane_state(pop.model) | pop.stepper.state_dict()).items()}
    def banks(): return sorted(t.data_ptr() for bank in pop.governor.snapshot.banks.memory for t in bank.values())
    before, held, workers = places(), banks(), pop.workers
    for _ in range(3): env.step(np.zeros((3, 8), int)); env.reset(options={"reset_mask": np.ones(3, bool)})
    assert places() == before and banks() == held and env.parts[0][1] is pop and pop.workers is workers


def learner(n=4, **kw):
    from test_ppo import Masked
    return Learner(SyncVectorEnv([Masked] * n, autoreset_mode=AutoresetMode.SAME_STEP),
                   PPOConfig(num_steps=12, num_minibatches=2, **kw), PolicyConfig(hidden=8, features=(8,)))


@pytest.mark.parametrize("n", [2, 7])
def test_all_lanes_share_one_call_of_the_policy(n, monkeypatch):
    one, calls = learner(n), []
    one.reset()
    forward = one.policy.forward
    monkeypatch.setattr(one.policy, "forward", lambda obs, *a: (calls.append(obs.shape[1]), forward(obs, *a))[1])
    while not one.rollout.full:
        calls.clear(); one.step_envs()
        assert set(calls) <= {n} and len(calls) <= 2, "one to act, and one more where lanes were cut off"
    assert one.rollout.mask.shape[:2] == (12, n)
    calls.clear(); one.compute_targets()
    assert calls == [n]


def test_a_rollout_that_is_cut_off_goes_on_with_its_memory():
    one = learner(norm_reward=False)
    one.reset()
    while not one.rollout.full: one.step_envs()
    one.compute_targets()
    s, r = one.stream, one.rollout
    with torch.no_grad():
        def values(state): return one.policy(one.view(s.obs)[None], state, s.start[None])[1][0]
        carried, forgotten = values(one.state), values(one.policy.initial_state(one.n))
    assert torch.equal(r.last_value, carried)
    continues = ~s.start
    assert continues.any() and not torch.isclose(carried, forgotten)[continues].any()
    at = continues & r.valid[-1]
    wanted = r.reward[-1] + .99 * carried - r.value[-1]
    torch.testing.assert_close(r.advantage[-1][at], wanted[at])


def test_groups_on_streams_are_ordered_by_two_joins_and_nothing_else(monkeypatch):
    calls = []
    class Stream:
        def __init__(self, name): self.name = name
        def wait_stream(self, other): calls.append(f"{self.name} waits for {other.name}")
    here = Stream("caller")
    w = Workers(1)
    w.count, w.streams, w.pool = 2, [Stream("a"), Stream("b")], None
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: here)
    monkeypatch.setattr(torch.cuda, "stream", lambda s: (calls.append(f"on {s.name}"), nullcontext())[1])
    assert w.map(lambda x: x * x, [1, 2, 3]) == [1, 4, 9]
    assert calls == ["a waits for caller", "b waits for caller", "on a", "on b", "on a", "caller waits for a",
                    "caller waits for b"]
