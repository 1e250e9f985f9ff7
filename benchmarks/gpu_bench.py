"""What lanes, PPO, snapshots and graphs are worth on a GPU, in one run on one machine:

    python -m benchmarks.gpu_bench                      # writes nbs/explanations/bench_gpu.json; needs a CUDA device
    python -m benchmarks.gpu_bench --minutes 6          # each section in a process that ends then; again goes on there
    python -m benchmarks.gpu_bench scale snapshots      # some sections anew, beside those that the file has already
    python -m benchmarks.gpu_bench --small --out FILE   # everything in miniature: does it run? No figures to keep

Both sides of a comparison are measured in turns, after both have been warmed up; a figure is the median of the turns,
and every time ends when the device has done its work. The pictures of CIFAR-10 are made up. A section that the file has
of this device, this torch and this code is not measured again, unless it is named; those of others are dropped.
Rows of a section that was given up are under "unfinished".
"""
import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.growth import GrowthCase
from benchmarks.lanes import loop_over, plain_step
from benchmarks.measure import ROOT, STORED, Case, machine
from esper_nb.guard.snapshots import Snapshot
from esper_nb.learn.learner import Learner
from esper_nb.learn.loss import PPOConfig
from esper_nb.learn.policies import PolicyConfig
from esper_nb.train.graphs import Graphs
from esper_nb.train.population import FitConfig, new_population
from esper_nb.train.trainer import run_epoch

FILE = STORED/"bench_gpu.json"
ENOUGH = 20. # seconds of turns, from the third one on


class Size(NamedTuple):
    "How much is measured."
    grown: tuple[GrowthCase, ...]
    alone: tuple[Case, ...] # whose networks are counted up
    lanes: tuple[int, ...] # networks side by side, one number after the other
    turns: int # of both sides, after the warm-up
    envs: int # of PPO
    steps: int # of an environment in a rollout
    numbers: tuple[int, ...] # fp32 numbers in a snapshot


GROWN = tuple(GrowthCase(t, b, mix=m) for t, b in (("digits", 64), ("cifar_baseline", 128)) for m in ("agree", "mixed"))
ALONE = Case(precision="bf16"), Case("cifar_baseline", 128, precision="bf16"), Case()
FULL = Size(grown=GROWN, alone=ALONE, lanes=(1, 16, 64, 256, 1024), turns=7, envs=64,
            steps=128, numbers=(10**6, 10**8, 10**9))
SMALL = Size(grown=(GrowthCase(batch_size=32, lanes=2, mix="mixed"),),
             alone=(Case(batch_size=32, images=64),), lanes=(1, 2), turns=2, envs=2, steps=4, numbers=(1000,))


LAYOUTS = "channels_last", "contiguous_format"


def wait(): torch.cuda.synchronize()


def in_turns(sides, turns, warm=2):
    "Median seconds of each side; name -> a function that is done when its work on the device is."
    times = {k: [] for k in sides}
    for t in range(warm + turns):
        if t > warm + 2 and sum(map(sum, times.values())) > ENOUGH: break
        for name, f in sides.items():
            wait()
            start = time.perf_counter()
            f()
            wait()
            if t >= warm: times[name].append(time.perf_counter() - start)
    return {k: statistics.median(v) for k, v in times.items()}


def loaded(case, limit):
    "A case's task and data on the device."
    task, data = case.load()
    if limit and task.data != "cifar10": data = task.load(limit=limit)
    return task, data.to("cuda")


# --- a loop, and the same networks as lanes

def plain_loop(case, limit, layout):
    "Ordinary networks on the device, one after the other."
    pop = population(case, limit)
    return loop_over({i: pop.model.lane(i).host for i in range(case.lanes)}, case, pop, getattr(torch, layout))


def population(case, limit):
    "The networks of a case as lanes."
    task, data = loaded(case, limit)
    config = FitConfig(lanes=case.lanes, epochs=10**6, batch_size=case.batch_size, governor=None)
    config = config.replace(precision=case.precision)
    return new_population(task, config, data=data, device="cuda")


# --- networks that grow: three live seeds in each, the same ones or each its own

def grown(case, limit):
    "The networks of a case with their seeds, at rest half blended in."
    pop = population(case, limit)
    for i, kinds in enumerate(case.kinds()):
        for slot, kind in zip(pop.model.names, kinds):
            pop.model.germinate(slot, kind, i, tempo=0, goal=.5)
            for _ in range(2): pop.model.advance(slot, i, force=True)
    return pop


def growth(size, limit):
    "Seconds of an epoch: as lanes, as lanes with graphs, and as single networks one after the other."
    for case in size.grown:
        pop, graphed, epoch = grown(case, limit), grown(case, limit), iter(range(10**6))
        pop.graphs, graphed.graphs = None, Graphs()
        loop = loop_over({i: pop.model.lane(i) for i in range(case.lanes)}, case, pop)
        sides = dict(lanes=lambda p=pop: run_epoch(p, split=None), graph=lambda p=graphed: run_epoch(p, split=None),
                     loop=lambda f=loop: f(next(epoch)))
        yield dict(case=case.name, networks=case.lanes, seconds=in_turns(sides, size.turns),
                   replays=graphed.graphs.replays, why_not=sorted(graphed.graphs.said))


# --- how many networks a device takes, with graphs and without, against one network as a graph of its own

def scale(size, limit):
    "Images a second, memory and busy share by the number of lanes; where memory ends, the row says so."
    for case in size.alone:
        alone = {k: plain_loop(case.replace(lanes=1), limit, k) for k in LAYOUTS}
        sides = {k: lambda f=f: f(0) for k, f in alone.items()}
        loops = in_turns(sides | dict(graph=graphed_loop(case, limit)), size.turns)
        yield dict(case=case.name, precision=case.precision, networks=1, alone=loops)
        for n in size.lanes:
            for graphs in (False, True):
                try: yield scale_row(case.replace(lanes=n), size.turns, limit, graphs, loops)
                except torch.cuda.OutOfMemoryError as e:
                    yield dict(case=case.name, networks=n, graphs=graphs, stopped=str(e).splitlines()[0])


def scale_row(case, turns, limit, graphs, loops):
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    pop = population(case, limit)
    pop.graphs = Graphs() if graphs else None
    seconds = in_turns(dict(lanes=lambda: run_epoch(pop, split=None, look=False)), turns)["lanes"]
    images = case.lanes * case.batch_size * (pop.data.num_train // case.batch_size)
    return dict(case=case.name, precision=case.precision, networks=case.lanes, graphs=graphs, seconds=seconds,
                images_per_s=images / seconds, times={k: case.lanes * t / seconds for k, t in loops.items()},
                bytes_per_lane=(torch.cuda.max_memory_allocated() - before) / case.lanes,
                busy=busy(lambda: run_epoch(pop, split=None, look=False), seconds), phases=phases(pop),
                replays=pop.graphs.replays if graphs else 0, why_not=sorted(pop.graphs.said) if graphs else [])


def phases(pop):
    "Seconds of each phase of an epoch, every one until the device is done: where an idle device waits for the host."
    found, begun = {}, [0.]
    def note(name):
        wait()
        now = time.perf_counter()
        found[name], begun[0] = now - begun[0], now
    wait()
    begun[0] = time.perf_counter() # the orders of this epoch were drawn during the one before
    run_epoch(pop, split=None, look=False, clock=note)
    return found


def busy(f, seconds):
    "The share of some seconds in which kernels run; None where the device keeps no account of them."
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as p:
            f()
            wait()
    except AssertionError: return None
    return sum(e.self_device_time_total for e in p.key_averages()) * 1e-6 / seconds


def graphed_loop(case, limit):
    "An epoch of one ordinary network whose step is a CUDA graph, as PyTorch's documentation makes it."
    pop = population(case.replace(lanes=1), limit)
    net = pop.model.lane(0).host.train()
    opt = torch.optim.SGD(net.parameters(), **pop.task.optimizer_options)
    def step(x, y): return plain_step(net, opt, pop.precision, x, y)
    batches, side = pop.data.epoch(0, [0], 0, case.batch_size), torch.cuda.Stream()
    x, y = (t.clone() for t in batches[0])
    y = y[:, 0].clone()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3): step(x, y)
    torch.cuda.current_stream().wait_stream(side)
    whole = torch.cuda.CUDAGraph()
    with torch.cuda.graph(whole, stream=side): loss = step(x, y)
    def epoch():
        losses, order = [], pop.data.epoch(0, [0], 0, case.batch_size)
        for b in range(len(order)):
            u, v = order[b]
            x.copy_(u)
            y.copy_(v[:, 0])
            whole.replay()
            losses.append(loss.clone())
        return torch.stack(losses).cpu()
    epoch.keeps = net, opt # the graph reads their memory
    return epoch


# --- PPO

def learner(size, device, core):
    "A learner whose rollout is full."
    import gymnasium as gym     # the other sections run without it
    envs = gym.make_vec("CartPole-v1", num_envs=size.envs, vectorization_mode="sync")
    config = PPOConfig(num_steps=size.steps, num_minibatches=2)
    new = Learner(envs, config, PolicyConfig(core=core), device=device)
    new.reset()
    while not new.rollout.full: new.step_envs()
    new.compute_targets()
    return new


def ppo(size, limit):
    "Seconds of one pass over a rollout, on the device and on the CPU."
    for core in ("lstm", "none"):
        sides = {}
        for device in ("cuda", "cpu"):
            one = learner(size, device, core)
            batches = list(one.remaining_minibatches())
            sides[device] = lambda one=one, batches=batches: [one.learn(b) for b in batches]
        yield dict(core=core, envs=size.envs, steps=size.steps, seconds=in_turns(sides, size.turns))


# --- snapshots

def snapshots(size, limit):
    "Seconds and GB/s of a snapshot and of a restore, beside a plain copy to pinned memory."
    for numbers in size.numbers:
        net = nn.Module()
        net.weight = nn.Parameter(torch.ones(numbers, device="cuda"), requires_grad=False)
        snap, pinned = Snapshot(net, streams=False), torch.empty(numbers, pin_memory=True)
        def copy(t=pinned, w=net.weight): t.copy_(w, non_blocking=True)
        seconds = in_turns(dict(take=snap.take, restore=snap.restore, copy=copy), size.turns)
        yield dict(megabytes=numbers * 4e-6, seconds=seconds,
                   gb_per_s={k: numbers * 4e-9 / s for k, s in seconds.items()})
        del snap, pinned, net


SECTIONS = dict(scale=scale, growth=growth, snapshots=snapshots, ppo=ppo)


def device_text():
    "What the figures were measured on."
    major, minor = torch.cuda.get_device_capability()
    return machine() | dict(device=torch.cuda.get_device_name(), devices=torch.cuda.device_count(),
                            compute=f"{major}.{minor}", cuda=torch.version.cuda)


def revision():
    "What git calls the package as it is, with a mark where something has changed since; None outside of git."
    def git(*args): return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    changed = git("status", "--porcelain", "--", "esper_nb")
    known = git("rev-parse", "--short", "HEAD:esper_nb")
    return f"{known}, changed" if known and changed else known or None


def run_alone(section, given, seconds):
    "Measure a section in a process of its own, which is given up after some seconds; return how that ended."
    words = [sys.executable, "-m", "benchmarks.gpu_bench", section, "--out", str(given.out)]
    try: done = subprocess.run([*words, *(["--small"] if given.small else [])], cwd=ROOT, timeout=seconds)
    except subprocess.TimeoutExpired: return f"given up after {seconds:.0f} s"
    return "failed" if done.returncode else "measured"


def main(args=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("sections", nargs="*", help=f"some of {', '.join(SECTIONS)}; default all")
    p.add_argument("--small", action="store_true", help="in miniature: whether it runs, no figures")
    p.add_argument("--minutes", type=float, default=float("inf"), help="a section that takes longer is given up")
    p.add_argument("--out", type=Path, default=FILE)
    given = p.parse_args(args)
    odd = sorted(set(given.sections) - set(SECTIONS))
    if odd: p.error(f"sections {odd}: expected some of {', '.join(SECTIONS)}")
    if not torch.cuda.is_available():
        sys.exit(f"gpu_bench: needs a CUDA device, and torch {torch.__version__} sees none; nothing was measured")
    if given.small and given.out == FILE: p.error("--small wants an --out of its own: its figures mean nothing")
    begun, about = time.monotonic(), device_text() | dict(code=revision())
    out = json.loads(given.out.read_text()) if given.out.exists() else {}
    same = all(out.get("machine", {}).get(k) == about[k] for k in ("device", "torch", "code"))
    if not same: out = {} # figures of two devices, or of two states of the code, never meet
    out["machine"] = about
    size, limit = (SMALL, 128) if given.small else (FULL, None)
    left = given.sections or [name for name in SECTIONS if name not in out]
    while left and time.monotonic() - begun < 60 * given.minutes:
        name = left.pop(0)
        if given.minutes < float("inf"):
            done = run_alone(name, given, 60 * given.minutes - (time.monotonic() - begun))
            print(f"{name}: {done}", flush=True)
            continue
        rows = out.setdefault("unfinished", {})[name] = []
        for row in SECTIONS[name](size, limit):
            rows.append(row)
            print(name, json.dumps(row), flush=True)
            given.out.write_text(json.dumps(out, indent=1) + "\n") # a section that is given up has its rows so far
        out[name] = out["unfinished"].pop(name)
        if not out["unfinished"]: del out["unfinished"]
        given.out.write_text(json.dumps(out, indent=1) + "\n")
    if given.minutes < float("inf") and given.out.exists():
        measured = json.loads(given.out.read_text())
        left = [name for name in given.sections or SECTIONS if name not in measured]
    print(f"{', '.join(left)} left: the same command goes on there" if left else f"all of it is in {given.out}")


if __name__ == "__main__": main()
