"The pretended device: it refuses what a real one refuses, it sees races, and the main job runs on it."
import copy
import json
import math
import subprocess

import gymnasium as gym
import pytest
import torch
from pretend import PretendedCuda, Race
from benchmarks import gpu_bench
from torch import nn

from esper_nb.core import LaneConv2d, LaneDropout, by_lane, conv2d, devices, lane_state, reset_lanes
from esper_nb.guard import Governor, Snapshot
from esper_nb.learn import Learner, PPOConfig, PolicyConfig
from esper_nb.run import main
from esper_nb.train import (
    FitConfig, Graphs, Group, GroupCopies, evaluate, fit, get_task, grown_plan, new_population, run_epoch, trainer)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def gpu():
    with PretendedCuda(devices=2) as machine: yield machine


# --- tensors and devices

def test_numbers_are_those_of_the_cpu_and_modules_keep_their_parameters(gpu):
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))
    x = torch.randn(5, 1, 4, 4)
    there = copy.deepcopy(net)
    first = there[0].weight
    there.cuda()
    assert there[0].weight is first and isinstance(first, nn.Parameter) and first.device == torch.device("cuda", 0)
    for n, v in ((net, x), (there, x.cuda())): n(v).square().mean().backward()
    for p, q in zip(net.parameters(), there.parameters()):
        assert torch.equal(p, q.cpu()) and torch.equal(p.grad, q.grad.cpu())

def test_two_devices_in_one_operation_are_refused(gpu):
    here, there, other = torch.ones(3), torch.ones(3, device="cuda"), torch.ones(3, device="cuda:1")
    for f in (lambda: here + there, lambda: there + other, lambda: nn.Linear(3, 2)(there), lambda: here[there > 0],
              lambda: torch.cat([here, there]), lambda: there.numpy()):
        with pytest.raises((RuntimeError, TypeError)): f()
    assert (there + torch.tensor(2.)).tolist() == [3., 3., 3.]   # a number without an axis may come along

def test_each_device_draws_from_a_stream_of_its_own(gpu):
    torch.cuda.manual_seed_all(3)
    state = torch.get_rng_state()
    draws = [torch.rand(4, device=d).cpu() for d in ("cuda:0", "cuda:1", "cuda:0")]
    assert not torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert torch.equal(torch.get_rng_state(), state) and sum(gpu.draws.values()) == 3
    with pytest.raises(RuntimeError, match="generator"): torch.rand(3, device="cuda", generator=torch.Generator())

# --- waits and launches

def test_waits_and_launches_are_counted_by_line(gpu):
    x = torch.zeros(4, device="cuda")
    gpu.reset()
    for f in (lambda: x.sum().item(), lambda: x.cpu(), lambda: x[x > 0], lambda: x.nonzero(), lambda: x[[0, 2]],
              lambda: torch.tensor([1.], device="cuda"), lambda: bool(x.any()), torch.cuda.synchronize):
        before = gpu.num_waits
        f()
        assert gpu.num_waits == before + 1
    assert all(where.startswith("test_pretended.py:") for _, where in gpu.waits)
    gpu.reset()
    for f in (lambda: x.view(2, 2), lambda: x[0], lambda: x.masked_fill(x > 0, 1.), lambda: x.mul_(2)): f()
    assert gpu.num_waits == 0 and gpu.num_launches == 3   # views are free
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchronizing"): x.sum().item()

# --- copies that arrive later

def test_a_copy_to_pinned_memory_arrives_when_somebody_waits(gpu):
    x, host = torch.arange(4., device="cuda"), torch.empty(4, pin_memory=True)
    assert host.is_pinned() and not torch.empty(4).is_pinned()
    host.copy_(x, non_blocking=True)
    with pytest.raises(Race, match="under way"): host.sum()
    torch.cuda.current_stream().synchronize()
    assert host.tolist() == [0., 1., 2., 3.]

def test_pinned_memory_must_not_change_before_its_copy_is_made(gpu):
    host = torch.ones(4, pin_memory=True)
    host.to("cuda", non_blocking=True)
    host.zero_()
    with pytest.raises(Race, match="overwritten before"): torch.cuda.synchronize()

# --- streams

def test_a_stream_that_was_not_told_to_wait_is_a_race(gpu):
    s, x = torch.cuda.Stream(), torch.ones(4, device="cuda")
    with torch.cuda.stream(s), pytest.raises(Race, match="may still be writing"): x * 2
    s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s): y = x * 2
    with pytest.raises(Race, match="may still be reading"): x.zero_()
    with pytest.raises(Race, match="may still be writing"): y + 1
    event = s.record_event()
    torch.cuda.current_stream().wait_event(event)
    assert (x.zero_() + y).tolist() == [2.] * 4

def test_memory_that_another_stream_may_still_use_must_not_be_freed():
    with pytest.raises(Race, match="freed"), PretendedCuda():
        s, x = torch.cuda.Stream(), torch.ones(4, device="cuda")
        s.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(s): y = x * 2
        del x
        torch.cuda.synchronize()
        del y

def test_a_piece_of_memory_lies_where_nothing_else_does_while_it_lives(gpu):
    here = [torch.ones(4, device="cuda") for _ in range(50)]
    dying = {x.memory for x in here} # as in a thread that is interrupted between a tensor's numbers and its memory
    del here
    with torch.cuda.stream(torch.cuda.Stream()): fresh = [torch.ones(4, device="cuda") for _ in range(500)]
    assert not dying & {t.memory for t in fresh}

def test_memory_is_pinned_while_it_lives(gpu):
    pinned = [torch.ones(4).pin_memory() for _ in range(50)]
    assert all(t.is_pinned() for t in pinned)
    del pinned
    assert not any(t.is_pinned() for t in [torch.ones(4) for _ in range(500)])


# --- the main job

@pytest.mark.filterwarnings("ignore:graph.*alpha")
@pytest.mark.parametrize("graph", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_the_main_job_runs_on_two_devices(gpu, tmp_path, capsys, graph):
    small = ["env.num_envs=2", "env.limit=192", f"env.graph={graph}", "env.batch_size=32",
             "ppo.num_steps=2", "env.horizon=2", 'env.blueprints=["conv_light"]',
             "ppo.num_updates=1", "ppo.update_epochs=1", "ppo.num_minibatches=2", "env.precision=fp32"]
    sets = [w for s in small for w in ("--set", s)]
    main(["train", "digits_impaired", "--device", "cuda:0,cuda:1", "--quiet", "--out", str(tmp_path), *sets])
    assert "1 update, 4 lane-epochs" in capsys.readouterr().out and gpu.num_launches > 1000
    assert (gpu.launches["graph"] > 0) == (graph == "true")
    assert not gpu.draws   # whatever is drawn has a seed key, and is drawn on the host


# --- what it has shown

FEW = ("norm", "conv_small", "attention", "conv_light")

def small(device, lanes=4, **kw):
    data = get_task("digits").load(device, limit=128)
    config = FitConfig(lanes=lanes, epochs=4, batch_size=32, precision="fp32", **(dict(graph=False) | kw))
    return new_population(get_task("digits"), config, data=data, device=device, blueprints=FEW)

def weights(pop): return {k: t.cpu() for k, t in lane_state(pop.model).items()}

def test_fresh_weights_are_those_of_their_seed_on_every_device(gpu):
    here, there, again = (conv2d(1, 4, 3, 4).to(d) for d in ("cpu", "cuda:0", "cuda:1"))
    for m in (here, there, again): reset_lanes(m, range(4), 7)
    assert torch.equal(here.weight, there.weight.cpu()) and torch.equal(here.weight, again.weight.cpu())
    before = there.weight.cpu()
    torch.rand(3, device="cuda")   # somebody else draws on the device
    reset_lanes(there, [1], 7)
    assert torch.equal(there.weight.cpu(), before) and not [k for k in gpu.draws if k[0] != "rand"]

@pytest.mark.parametrize("seeds", [False, True])
def test_on_a_device_all_lanes_are_one_pass(gpu, seeds):
    pop = small("cuda", 16)
    if seeds:
        slot = pop.model.names[0]
        for i in range(16): pop.model.germinate(slot, list(pop.model.slot(slot).blueprints)[i % 3], [i])
    assert [len(g) for g in pop.plan()] == [16]
    assert [len(g) for g in grown_plan([0] * 16, 1, size=2**26, room=2**62)] == [16]   # a cache has no say
    assert [len(g) for g in grown_plan([0] * 16, 1, size=2**26, room=2**29)] == [8, 8]   # the memory has

def test_after_an_interrupt_every_stream_has_been_waited_for(gpu):
    pop = small("cuda", workers=2)
    run_epoch(pop)
    calls = []
    def interrupt(net, stepper, lanes, b, x, y):
        calls.append(b)
        if len(calls) == 6: raise KeyboardInterrupt
        return x, y
    with pytest.raises(KeyboardInterrupt): run_epoch(pop, disturb=interrupt)
    run_epoch(pop)   # would be a race

@pytest.mark.parametrize("device", ["cpu", "cuda:0", "cuda:1"])
def test_a_batch_is_left_out_before_the_optimizer_steps_on_every_device(gpu, device):
    torch.manual_seed(0)
    net = nn.Linear(4, 4).to(device)
    opt = torch.optim.SGD(net.parameters(), lr=.1)
    gov = Governor(net, opt, chance_loss=2.3)
    for t in range(40):
        with gov.step():
            x = torch.ones(8, 4, device=device) * (math.nan if t == 33 else 1.)
            loss = net(x).square().mean() + .5
            opt.zero_grad()
            loss.backward()
            gov.watch(loss.detach())
            opt.step()
    assert [(r.step, r.action) for r in gov.reports] == [(34, "skip")] and net.weight.isfinite().all()

@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
@pytest.mark.parametrize("what", ["take", "restore"])
def test_a_snapshot_waits_for_every_stream_of_its_devices(gpu, device, what):
    net = nn.Linear(8, 8).to(device)
    snap = Snapshot(net, streams=False)
    snap.take()
    s = torch.cuda.Stream(device)
    s.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(s): net.weight.data.mul_(2.)
    getattr(snap, what)()
    torch.cuda.synchronize(device)
    assert snap.difference() == {}

def test_devices_are_checked_where_they_are_given(gpu):
    envs = gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
    with pytest.raises(RuntimeError, match="out of range"): Learner(envs, device="cuda:7")
    assert devices.check_devices(["cuda:0", "cuda:1"]) == (torch.device("cuda:0"), torch.device("cuda:1"))
    with pytest.raises(ValueError, match="no index"): devices.check_devices(["cuda", "cuda:1"])
    with pytest.raises(ValueError, match="devices"): devices.check_devices([])

def test_sums_are_made_on_the_host_where_a_device_has_no_float64(monkeypatch):
    with PretendedCuda(float64=False):
        pop = small("cuda")
        with pytest.raises(TypeError, match="float64"): torch.ones(2, device="cuda").double()
        monkeypatch.setattr(devices, "NO_FLOAT64", ("cuda",))
        there = evaluate(pop.model, pop.task, pop.data)
    here = small("cpu")
    torch.testing.assert_close(there, evaluate(here.model, here.task, here.data))


# --- waits and launches, path by path

def counted_epoch(gpu, pop):
    "Launches and waits of the batches, and waits of the whole epoch."
    gpu.reset()
    batches = []
    real = Group.step
    def batch(*args, **kw):
        before = gpu.num_launches, gpu.num_waits
        out = real(*args, **kw)
        batches.append((gpu.num_launches - before[0], gpu.num_waits - before[1]))
        return out
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "step", batch)
        run_epoch(pop, None)
    taken = sum(n for (_, where), n in gpu.waits.items() if where.split(".")[0] in ("snapshots", "banks", "devices"))
    return sorted(batches)[(len(batches) - 1) // 2], gpu.num_waits - taken # the lower median: first and last do more

@pytest.mark.parametrize("seeds,launches", [(False, 90), (True, 180 if torch.__version__ >= (2, 12) else 182)])
def test_an_epoch_is_queued_without_a_wait_between_its_batches(gpu, seeds, launches):
    pop = small("cuda", 16)
    if seeds:
        slot = pop.model.names[0]
        known = [b for b in ("conv_light", "attention", "norm", "conv_small") if b in pop.model.slot(slot).blueprints]
        for i in range(16): pop.model.germinate(slot, known[i % len(known)], [i])
        pop.model.advance(slot, force=True)
    run_epoch(pop, None)
    batch, epoch = counted_epoch(gpu, pop)
    assert batch[0] <= launches and batch[1] == 0 and epoch <= 3

def test_an_epoch_with_a_gradient_that_is_not_finite_is_trained_again_with_checks(gpu, monkeypatch):
    def ruined():
        pop = small("cuda", 4, governor=None)
        slot = pop.model.names[0]
        pop.model.germinate(slot, "norm", [1, 2])
        pop.model.advance(slot, [1], force=True)
        run_epoch(pop, None)
        by_lane(next(pop.model.host.parameters()).data, 4)[2] = math.nan
        return pop, run_epoch(pop, None)
    calls = []
    again = GroupCopies.copy_again
    monkeypatch.setattr(GroupCopies, "copy_again", lambda *a: (calls.append(1), again(*a)))
    one, a = ruined()
    monkeypatch.setattr(trainer, "may_defer", lambda *a: False)
    two, b = ruined()
    assert calls == [1, 1] and a.train.skipped.tolist() == b.train.skipped.tolist() and a.train.skipped[2] > 0
    for x, y in zip(a.train, b.train): assert torch.equal(x.nan_to_num(9.), y.nan_to_num(9.))
    for pop in (one, two): pop.state = {k: t.cpu().nan_to_num(9.) for k, t in
                                        {**lane_state(pop.model), **pop.stepper.state_dict()}.items()}
    for k, t in one.state.items(): assert torch.equal(t, two.state[k]), k

@pytest.mark.parametrize("core", ["lstm", "none"])
def test_acting_waits_twice_and_a_gradient_step_once(gpu, core):
    envs = gym.make_vec("CartPole-v1", num_envs=4, vectorization_mode="sync")
    config = PPOConfig(num_steps=6, num_minibatches=2, norm_obs=True, norm_reward=True, norm_value=True)
    learner = Learner(envs, config, PolicyConfig(core=core), device="cuda")
    while learner.step() is None: pass
    learner.step_envs()
    gpu.reset()
    learner.step_envs()
    assert gpu.num_waits <= 2   # is it all finite and legal; what is to be done
    while learner.acts: learner.step_envs()
    learner.compute_targets()
    gpu.reset()
    first, *_ = learner.remaining_minibatches()
    assert gpu.num_waits == 0
    learner.learn(first)
    assert gpu.num_waits <= 1   # the numbers of the step, with the norm of its gradient


# --- graphs

def captured(f, *before, graph=None):
    "A graph of a function, on a stream of its own, after the work that it builds on."
    s, graph = torch.cuda.Stream(), graph or torch.cuda.CUDAGraph()
    s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=s): out = f()
    return graph, out, s

def test_a_capture_computes_nothing_and_a_replay_all_of_it(gpu):
    x, state = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    graph, out, s = captured(lambda: state.add_(x).mul(2.))
    assert state.tolist() == [0.] * 3 and out.isnan().all()
    torch.cuda.current_stream().wait_stream(s)
    gpu.reset()
    for t in (1., 2.):
        graph.replay()
        x.fill_(5.)
    assert gpu.launches["graph"] == 2 and gpu.num_waits == 0
    assert state.tolist() == [6.] * 3 and out.tolist() == [12.] * 3

@pytest.mark.parametrize("what, says", [
    (lambda x: x.sum().item(), "_local_scalar_dense"), (lambda x: x.cpu(), "copy to the host"),
    (lambda x: x[x > 0], "index by a mask"), (lambda x: torch.rand(3), "on the host"),
    (lambda x: torch.rand(3, device="cuda"), "own stream of random numbers"),
    (lambda x: torch.rand(3, device="cuda", generator=torch.Generator("cuda")), "not registered"),
    (lambda x: torch.ones(3).pin_memory(), "pinned memory"), (lambda x: torch.ones(3).to("cuda"), "from the host"),
    (lambda x: torch.ones(3).to("cuda", non_blocking=True), "from the host"),
    (lambda x: torch.cuda.synchronize(), "synchronize"), (lambda x: torch.cuda.manual_seed(3), "generator"),
    (lambda x: beside(x, forked=False), "has not been forked"),
    (lambda x: torch.cuda.current_stream().wait_stream(torch.cuda.default_stream()), "not part of the capture")])
def test_a_capture_refuses_what_no_graph_can_hold(gpu, what, says):
    x, kept = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    with pytest.raises(RuntimeError, match=says): captured(lambda: what(kept.add_(x)))
    assert kept.tolist() == [0.] * 3 and not torch.cuda.is_current_stream_capturing()
    (x + kept).tolist()   # life goes on

def beside(x, forked):
    s, here = torch.cuda.Stream(), torch.cuda.current_stream()
    if forked: s.wait_stream(here)
    with torch.cuda.stream(s): y = x * 2
    if forked: here.wait_stream(s)
    return y

def test_a_stream_that_is_forked_and_joined_is_part_of_the_capture(gpu):
    x = torch.ones(3, device="cuda")
    graph, out, s = captured(lambda: beside(x, forked=True))
    torch.cuda.current_stream().wait_stream(s)
    graph.replay()
    assert out.tolist() == [2.] * 3
    def left():
        t = torch.cuda.Stream()
        t.wait_stream(torch.cuda.current_stream())
    with pytest.raises(RuntimeError, match="never joined"): captured(left)
    with pytest.raises(RuntimeError, match="non-default"): torch.cuda.CUDAGraph().capture_begin()

def test_a_registered_generator_draws_anew_in_every_replay(gpu):
    g, graph = torch.Generator("cuda").manual_seed(3), torch.cuda.CUDAGraph()
    graph.register_generator_state(g)
    _, out, s = captured(lambda: torch.rand(4, device="cuda", generator=g), graph=graph)
    torch.cuda.current_stream().wait_stream(s)
    draws = []
    for _ in range(2):
        graph.replay()
        draws.append(out.tolist())
    again = torch.Generator("cuda").manual_seed(3)
    assert draws == [torch.rand(4, device="cuda", generator=again).tolist() for _ in range(2)]

def test_pinned_memory_is_read_anew_in_every_replay(gpu):
    host, x = torch.ones(3).pin_memory(), torch.zeros(3, device="cuda")
    graph, _, s = captured(lambda: x.copy_(host, non_blocking=True))
    torch.cuda.current_stream().wait_stream(s)
    host.fill_(4.)
    graph.replay()
    assert x.tolist() == [4.] * 3

def test_a_replay_is_behind_what_it_reads_and_reads_nothing_that_is_gone(gpu):
    kept = [torch.ones(3, device="cuda")]
    graph, out, s = captured(lambda: kept[0] * 2)
    with torch.cuda.stream(s): graph.replay()
    with pytest.raises(Race, match="may still be writing"): out + 1
    torch.cuda.current_stream().wait_stream(s)
    kept.clear()
    with pytest.raises(Race, match="has been freed"): graph.replay()


# --- the step of a group as a graph

PLAIN = 10**9 # batches before anything is recorded: the same step, by plain calls

def grown(kind, optimizer=None, **kw):
    "Networks alike, or with seeds of several kinds, heard and unheard."
    task = get_task("digits") if optimizer is None else get_task("digits").replace(optimizer=optimizer, lr=.002)
    data = get_task("digits").load("cuda", limit=320)
    config = FitConfig(**dict(lanes=6, epochs=6, batch_size=32, precision="fp32") | kw)
    pop = new_population(task, config, data=data, device="cuda", blueprints=FEW)
    if kind == "mixed":
        slot = pop.model.names[0]
        for i in range(5): pop.model.germinate(slot, ("norm", "conv_light")[i % 2], [i])
        pop.model.advance(slot, range(5), force=True)
    return pop

def trained(pop, warm, epochs=3, meanwhile=lambda pop, e: None):
    pop.graphs, out = Graphs(warm), []
    for e in range(epochs):
        out.append(run_epoch(pop))
        meanwhile(pop, e)
    return weights(pop) | {k: t.cpu() for k, t in pop.stepper.state_dict().items()}, out, pop.graphs

@pytest.mark.costly
@pytest.mark.parametrize("kind", ["alike", "mixed"])
@pytest.mark.parametrize("optimizer, precision", [(None, "fp32"), (None, "bf16"), ("adamw", "fp32")])
def test_an_epoch_of_replays_is_the_same_epoch_to_the_bit(gpu, kind, optimizer, precision):
    def rates(pop, e): pop.rates.set_lr(.5, [e])
    (a, one, graphs), (b, two, none) = (
        trained(grown(kind, optimizer, precision=precision), warm, 2, rates) for warm in (3, PLAIN))
    assert graphs.replays >= 10 and none.replays == 0 and not graphs.said
    for k, t in a.items(): assert torch.equal(t, b[k]), k
    for x, y in zip(one, two): assert torch.equal(x.train.losses, y.train.losses) and x.lr.equal(y.lr)

@pytest.mark.costly
@pytest.mark.parametrize("kind", ["alike", "mixed"])
def test_an_epoch_of_replays_is_close_to_one_without(gpu, kind):
    a, one, _ = trained(grown(kind), 2, 1)
    pop = grown(kind)
    run_epoch(pop)
    for k, t in (weights(pop) | {k: t.cpu() for k, t in pop.stepper.state_dict().items()}).items():
        torch.testing.assert_close(a[k], t, rtol=1e-3, atol=1e-5)

@pytest.mark.parametrize("kind", ["alike", "mixed"])
def test_a_replay_is_one_launch_a_batch(gpu, kind):
    pop = grown(kind)
    pop.graphs = Graphs(2)
    run_epoch(pop)
    batches = []
    real = Graphs.run
    def run(*args):
        before = gpu.num_launches, gpu.num_waits
        out = real(*args)
        batches.append((gpu.num_launches - before[0], gpu.num_waits - before[1]))
        return out
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Graphs, "run", run)
        run_epoch(pop)
    assert set(batches) == {(4, 0)} and len(batches) == 9   # two inputs in, the graph, its record out

@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:graph.*alpha")
def test_what_grows_is_recorded_anew(gpu):
    def live(pop, e):
        slot = pop.model.names[0]
        if e == 0: pop.model.germinate(slot, "norm", [1, 2], tempo=1, goal=.5)
        if e in (0, 2): pop.model.advance(slot, [1, 2], force=True)     # alpha moves in epoch 3, and is .5 from 4 on
    runs = [trained(grown("alike"), warm, 6, live) for warm in (2, PLAIN)]
    (a, one, graphs), (b, two, _) = runs
    for k, t in a.items(): assert torch.equal(t, b[k]), k
    assert graphs.replays == 7 + 7 + 9 + 7 + 9 + 9 and not graphs.said
    assert len(graphs.made) <= 1   # what was recorded for the others is gone

def test_dropout_waits_for_nothing(gpu):
    there, here = LaneDropout(.3, 6, 1), LaneDropout(.3, 6, 1)
    reset_lanes(there, range(6), 0)
    here.load_state_dict(there.state_dict())
    x = torch.rand(4, 12, 5, 5)
    there, y = there.cuda(), x.cuda()
    before = gpu.num_waits
    out = [there(y) for _ in range(3)]
    assert gpu.num_waits == before
    for o in out: assert torch.equal(o.cpu(), here(x))   # the same masks on every device

@pytest.mark.slow
def test_dropout_is_recorded(gpu):
    def dropping():
        pop = grown("alike")
        drop = LaneDropout(.2, 6, 1)
        reset_lanes(drop, range(6), 0)
        pop.model.host.blocks[0][2] = nn.Sequential(nn.ReLU(), drop.cuda())
        return pop
    (a, _, graphs), (b, _, _), (c, _, _) = (trained(pop, warm) for pop, warm in
                                            ((dropping(), 2), (dropping(), PLAIN), (grown("alike"), PLAIN)))
    assert graphs.replays > 20 and not graphs.said and any(not torch.equal(t, c[k]) for k, t in b.items() if k in c)
    for k, t in a.items(): assert torch.equal(t, b[k]), k

@pytest.mark.slow
def test_an_epoch_of_replays_in_vain_is_done_again(gpu):
    def ruin(pop, e): by_lane(next(pop.model.host.parameters()).data, 6)[2] = math.nan
    runs = [trained(grown("alike", governor=None), warm, 3, ruin) for warm in (2, PLAIN)]
    (a, one, graphs), (b, two, _) = runs
    assert graphs.replays and one[2].train.skipped[2] == 10 and one[2].train.skipped.sum() == 10
    for k, t in a.items(): assert torch.equal(t.nan_to_num(9.), b[k].nan_to_num(9.)), k

def test_what_cannot_be_recorded_is_trained_by_plain_calls_and_said_once(gpu):
    class Asking(nn.Module):
        def forward(self, x): return x * (1. if x.sum().item() else 1.)
    def comparing():
        pop = grown("alike")
        pop.model.host.blocks[0][2] = Asking()   # in place of a ReLU
        return pop
    with pytest.warns(UserWarning, match="the host waits for the device at") as said:
        a, _, graphs = trained(comparing(), 2, 1)
    assert len([w for w in said if "graph:" in str(w.message)]) == 1 and graphs.replays == 0 and not gpu.stuck
    b, _, _ = trained(comparing(), PLAIN, 1)
    for k, t in a.items(): assert torch.equal(t, b[k]), k

def test_fit_records_where_it_is_asked_to(gpu, monkeypatch):
    seen = []
    real = Graphs.sweep
    monkeypatch.setattr(Graphs, "sweep", lambda self: (seen.append(self.replays), real(self)))
    assert len(list(fit(grown("alike", graph=True), 2))) == 2 and seen == [0, 6]
    assert len(list(fit(grown("alike", graph=None), 2))) == 2 and seen[2:] == [0, 6] # on a GPU by default
    assert small("cpu", graph=None).graphs is None
    pop = small("cpu", graph=True)
    with pytest.warns(UserWarning, match="the host checks every batch"): next(fit(pop))

def test_a_recording_that_fails_leaves_the_device_usable(gpu):
    "A wait that nobody told of: it shows in the recording only."
    graphs = Graphs(1)
    def step(x):
        if torch.cuda.is_current_stream_capturing(): x.sum().item()
        return x * 2
    with torch.cuda.stream(torch.cuda.Stream()):
        x = torch.ones(4, device="cuda")
        with pytest.warns(UserWarning, match="operation not permitted"):
            for _ in range(4): assert graphs.run("key", step, (x,), None).tolist() == [2.] * 4
    assert graphs.replays == 0 and not gpu.stuck and torch.rand(3, device="cuda").shape == (3,)

def test_alphas_move_within_an_epoch_of_replays(gpu):
    "They are written where the graph reads them, also where the topology of an earlier graph comes back."
    def blending():
        pop, slot = grown("alike"), get_task("digits").slots[0]
        for i in range(6): pop.model.germinate(slot, ("norm", "conv_light")[i % 2], [i], tempo=(3, 8)[i // 3])
        for _ in range(2): pop.model.advance(slot, range(6), force=True)
        return pop
    (a, one, graphs), (b, two, _) = trained(blending(), 2), trained(blending(), PLAIN)
    assert graphs.replays > 0 and not [w for w in graphs.said if "alpha" in w]
    for x, y in zip(one, two): assert torch.equal(x.train.losses, y.train.losses)
    for k, t in a.items(): assert torch.equal(t, b[k]), k


# --- exact lanes

def test_exact_lanes_use_kernels_that_repeat(gpu):
    "On an H200 fp32 convolutions add in any order by default: a lane alone is not the same to the bit."
    seen = []
    def look(net, stepper, lanes, b, x, y):
        seen.append(torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic)
        return x, y
    few, many = (run_epoch(small("cuda", n, exact=True), None, disturb=look).train.losses for n in (2, 4))
    assert seen and all(seen) and torch.equal(few, many[:, :2])
    assert not torch.are_deterministic_algorithms_enabled()
    seen.clear()
    run_epoch(small("cuda", 2), None, disturb=look)
    assert not any(seen)

# --- lanes that are not finite

@pytest.mark.costly
@pytest.mark.parametrize("how", ["a weight", "a disturbance"])
def test_a_kernel_that_hands_a_nan_on_does_not_reach_the_neighbours(gpu, monkeypatch, how):
    "cuDNN packs lanes of few channels into one tile; here every convolution makes the next lane NaN."
    real = LaneConv2d._conv_forward # noqa: SLF001
    def leaky(self, x, weight, bias):
        out = real(self, x, weight, bias)
        if self.groups == 1 or self.groups != self.lanes: return out
        bad = out.detach().unflatten(1, (self.lanes, -1)).isnan().any(0).any(-1).any(-1).any(-1)
        leak = torch.where(bad.roll(1), torch.nan, 1.).repeat_interleave(self.out_channels // self.lanes)
        return out * leak[:, None, None].to(out)
    def disturb(net, stepper, lanes, b, x, y):
        if b == 2 and 1 in lanes: by_lane(net.blocks[0][0].weight.data, len(lanes))[lanes.index(1)] = torch.nan
        return x, y
    def epochs(poisoned):
        pop = small("cuda", governor=None, lr=.002)
        if poisoned and how == "a weight": by_lane(pop.model.host.blocks[0][0].weight.data, 4)[1] = torch.nan
        hit = disturb if how == "a disturbance" and poisoned else (lambda net, stepper, lanes, b, x, y: (x, y))
        given = hit if how == "a disturbance" else None
        return torch.cat([run_epoch(pop, None, disturb=given).train.losses for _ in range(2)])
    clean = epochs(False)
    monkeypatch.setattr(LaneConv2d, "_conv_forward", leaky)
    odd = epochs(True)
    assert odd[2:, 1].isnan().all() and odd[:, [0, 2, 3]].isfinite().all()
    torch.testing.assert_close(odd[:, [0, 2, 3]], clean[:, [0, 2, 3]], rtol=0, atol=2e-4) # other groups, other sums


# --- the benchmark of a GPU

@pytest.mark.slow
def test_the_benchmark_runs_in_miniature(gpu, tmp_path, capsys):
    gpu_bench.main(["--small", "--out", str(tmp_path/"gpu.json")])
    found = json.loads((tmp_path/"gpu.json").read_text())
    assert found["machine"]["device"] == "pretended" and set(gpu_bench.SECTIONS) < set(found)
    timed = [row["seconds"] for name in gpu_bench.SECTIONS if name != "scale" for row in found[name]]
    assert all(s > 0 for row in timed for s in row.values())
    alone, *rows = found["scale"]
    assert set(alone["alone"]) == {"channels_last", "contiguous_format", "graph"} and found["growth"][0]["replays"] > 0
    assert [(r["networks"], r["graphs"]) for r in rows] == [(1, False), (1, True), (2, False), (2, True)]
    assert all(r["images_per_s"] > 0 and set(r["times"]) == set(alone["alone"]) for r in rows)
    assert all((r["replays"] > 0) == r["graphs"] for r in rows)
    gpu_bench.main(["--small", "snapshots", "--out", str(tmp_path/"gpu.json")])
    assert json.loads((tmp_path/"gpu.json").read_text())["growth"] == found["growth"]
    cut = {k: v for k, v in found.items() if k not in ("ppo", "scale")}   # cut off there
    (tmp_path/"gpu.json").write_text(json.dumps(cut))
    gpu_bench.main(["--small", "--minutes", "0", "--out", str(tmp_path/"gpu.json")])
    assert "scale, ppo left" in capsys.readouterr().out
    gpu_bench.main(["--small", "--out", str(tmp_path/"gpu.json")])
    again = json.loads((tmp_path/"gpu.json").read_text())
    assert set(again) == set(found) and again["growth"] == found["growth"] and again["ppo"] != found["ppo"]
    with pytest.raises(SystemExit): gpu_bench.main(["--small"])   # would overwrite what is stored

def test_rows_of_a_section_are_written_as_they_come(gpu, tmp_path, monkeypatch):
    out = tmp_path/"gpu.json"
    def broken(size, limit):
        yield dict(megabytes=1)
        raise RuntimeError("no memory")
    monkeypatch.setitem(gpu_bench.SECTIONS, "snapshots", broken)
    with pytest.raises(RuntimeError, match="no memory"): gpu_bench.main(["--small", "snapshots", "--out", str(out)])
    found = json.loads(out.read_text())
    assert found["unfinished"] == dict(snapshots=[dict(megabytes=1)]) and "snapshots" not in found
    monkeypatch.setitem(gpu_bench.SECTIONS, "snapshots", lambda *_: iter([dict(megabytes=2), dict(megabytes=3)]))
    gpu_bench.main(["--small", "snapshots", "--out", str(out)])
    found = json.loads(out.read_text())
    assert found["snapshots"] == [dict(megabytes=2), dict(megabytes=3)] and "unfinished" not in found

def test_a_section_that_takes_too_long_is_given_up(gpu, tmp_path, monkeypatch, capsys):
    out, limits = tmp_path/"gpu.json", []
    def measured(words, cwd, timeout):
        limits.append(timeout)
        if words[3] == "ppo": raise subprocess.TimeoutExpired(words, timeout)
        have = json.loads(out.read_text()) if out.exists() else {}
        out.write_text(json.dumps(have | {words[3]: []}))
        return subprocess.CompletedProcess(words, 0)
    monkeypatch.setattr(gpu_bench.subprocess, "run", measured)
    monkeypatch.setattr(gpu_bench, "device_text", lambda: dict(device="a device", torch="of today"))
    monkeypatch.setattr(gpu_bench, "revision", lambda: "of today")
    gpu_bench.main(["--small", "--minutes", "2", "--out", str(out)])
    said = capsys.readouterr().out
    assert "ppo: given up after 120 s" in said and "ppo left" in said and "growth: measured" in said
    assert len(limits) == len(gpu_bench.SECTIONS) and max(limits) <= 120

@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here")
def test_the_benchmark_says_that_it_needs_a_device(tmp_path):
    with pytest.raises(SystemExit, match="needs a CUDA device"): gpu_bench.main(["--out", str(tmp_path/"gpu.json")])
    assert not list(tmp_path.iterdir())
