"""What lanes, PPO, snapshots and graphs are worth on a GPU, in one run on one machine:

    python -m benchmarks.gpu_bench                      # writes nbs/explanations/bench_gpu.json; needs a CUDA device
    python -m benchmarks.gpu_bench graph snapshots      # some sections, beside those that the file has already
    python -m benchmarks.gpu_bench --small --out FILE   # everything in miniature: does it run? No figures to keep

Both sides of a comparison are measured in turns, after both have been warmed up; a figure is the median of the turns,
and every time ends when the device has done its work. The pictures of CIFAR-10 are made up.
"""
import argparse
import json
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym
import torch
from torch import nn

from benchmarks.lanes import OnePerCore
from benchmarks.measure import Case, machine
from esper_nb.core.devices import choose_precision
from esper_nb.guard.snapshots import Snapshot
from esper_nb.learn.learner import Learner
from esper_nb.learn.loss import PPOConfig
from esper_nb.learn.policies import PolicyConfig
from esper_nb.train.graphs import Graphs
from esper_nb.train.population import FitConfig, new_population
from esper_nb.train.trainer import run_epoch

STORED = Path(__file__).resolve().parents[1]/"nbs/explanations/bench_gpu.json"


class Size(NamedTuple):
    "How much is measured."
    cases: tuple[Case, ...]
    turns: int # of both sides, after the warm-up
    envs: int # of PPO
    steps: int # of an environment in a rollout
    numbers: tuple[int, ...] # fp32 numbers in a snapshot


CASES = Case(), Case(lanes=64), Case(precision="bf16"), Case("cifar_baseline", 128, precision="bf16")
FULL = Size(cases=CASES, turns=7, envs=64, steps=128, numbers=(10**6, 10**8, 10**9))
SMALL = Size(cases=(Case(batch_size=32, lanes=2, images=64),), turns=2, envs=2, steps=4, numbers=(1000,))


def wait(): torch.cuda.synchronize()


def in_turns(sides, turns, warm=2):
    "Median seconds of each side; name -> a function that is done when its work on the device is."
    times = {k: [] for k in sides}
    for t in range(warm + turns):
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


# --- lanes, against a loop and against one process for each network

def loop_side(case, part=(0, 1), limit=None):
    "Ordinary networks on the device, one after the other; what `benchmarks.measure` runs in a process, too."
    case = Case.from_dict(case)
    task, data = loaded(case, limit)
    precision = choose_precision(case.precision, "cuda")
    model = new_population(task, FitConfig(lanes=case.lanes, governor=None), data=data, device="cuda").model
    nets = {i: model.lane(i).host.train().to(memory_format=torch.channels_last)
            for i in range(part[0], case.lanes, part[1])}
    opts = {i: torch.optim.SGD(net.parameters(), **task.optimizer_options) for i, net in nets.items()}
    def train(i, e):
        batches, losses = data.epoch(0, [i], e, case.batch_size), []
        for b in range(len(batches)):
            x, y = batches[b]
            with precision.autocast("cuda"): logits = nets[i](x)
            loss = nn.functional.cross_entropy(logits.float(), y[:, 0])
            opts[i].zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(nets[i].parameters(), 1.)
            opts[i].step()
            losses.append(loss.detach())
        return torch.stack(losses).mean().item()
    return lambda e: [train(i, e) for i in nets]


def population(case, limit, seeds=False):
    "The networks of a case as lanes; with seeds: of two kinds in the first slot, trained and not yet heard."
    task, data = loaded(case, limit)
    config = FitConfig(lanes=case.lanes, epochs=10**6, batch_size=case.batch_size, governor=None)
    config = config.replace(precision=case.precision)
    pop = new_population(task, config, data=data, device="cuda")
    if not seeds: return pop
    slot = pop.model.names[0]
    kinds = [b for b in ("conv_light", "norm") if b in pop.model.slot(slot).blueprints]
    for i in range(case.lanes): pop.model.germinate(slot, kinds[i % len(kinds)], [i])
    pop.model.advance(slot, force=True)
    return pop


def each_in_a_process(case, limit):
    "One process for each network, all of them on the device at once."
    settings = dict(case=case.to_dict(), limit=limit)
    return OnePerCore("benchmarks.gpu_bench:loop_side", settings, threads=1, keep=True, parts=case.lanes)


def lanes(size, limit):
    "Seconds of an epoch of all networks of a case."
    rows = []
    for case in size.cases:
        pop, loop, epoch = population(case, limit), loop_side(case.to_dict(), limit=limit), iter(range(10**6))
        with ExitStack() as stack:
            apart = stack.enter_context(each_in_a_process(case, limit))
            sides = dict(lanes=lambda p=pop: run_epoch(p, split=None), loop=lambda f=loop: f(next(epoch)),
                         processes=apart.epoch)
            rows.append(dict(case=case.name, networks=case.lanes, seconds=in_turns(sides, size.turns)))
    return rows


# --- a graph, against plain calls

def graph(size, limit):
    "Seconds of an epoch with graphs and without, and how many of its batches were replays."
    rows = []
    for case in size.cases:
        for seeds in (False, True):
            about = dict(case=case.name, networks=case.lanes, seeds=seeds)
            rows.append(about | graph_row(case, size.turns, limit, seeds))
    return rows


def graph_row(case, turns, limit, seeds):
    one, two = population(case, limit, seeds), population(case, limit, seeds)
    one.graphs = graphs = Graphs()
    sides = dict(graph=lambda: run_epoch(one, split=None), plain=lambda: run_epoch(two, split=None))
    seconds = in_turns(sides, turns, warm=3)
    before, last = graphs.replays, run_epoch(one, split=None)
    return dict(seconds=seconds, batches=len(last.train.losses), replays=graphs.replays - before,
                why_not=sorted(graphs.said))


# --- PPO

def learner(size, device, core):
    "A learner whose rollout is full."
    envs = gym.make_vec("CartPole-v1", num_envs=size.envs, vectorization_mode="sync")
    config = PPOConfig(num_steps=size.steps, num_minibatches=2)
    new = Learner(envs, config, PolicyConfig(core=core), device=device)
    new.reset()
    while not new.rollout.full: new.step_envs()
    new.compute_targets()
    return new


def ppo(size, limit):
    "Seconds of one pass over a rollout, on the device and on the CPU."
    rows = []
    for core in ("lstm", "none"):
        sides = {}
        for device in ("cuda", "cpu"):
            one = learner(size, device, core)
            batches = list(one.remaining_minibatches())
            sides[device] = lambda one=one, batches=batches: [one.learn(b) for b in batches]
        rows.append(dict(core=core, envs=size.envs, steps=size.steps, seconds=in_turns(sides, size.turns)))
    return rows


# --- snapshots

def snapshots(size, limit):
    "Seconds and GB/s of a snapshot and of a restore, beside a plain copy to pinned memory."
    rows = []
    for numbers in size.numbers:
        net = nn.Module()
        net.weight = nn.Parameter(torch.ones(numbers, device="cuda"), requires_grad=False)
        snap, pinned = Snapshot(net, streams=False), torch.empty(numbers, pin_memory=True)
        def copy(t=pinned, w=net.weight): t.copy_(w, non_blocking=True)
        seconds = in_turns(dict(take=snap.take, restore=snap.restore, copy=copy), size.turns)
        rows.append(dict(megabytes=numbers * 4e-6, seconds=seconds,
                         gb_per_s={k: numbers * 4e-9 / s for k, s in seconds.items()}))
        del snap, pinned, net
    return rows


SECTIONS = dict(lanes=lanes, graph=graph, ppo=ppo, snapshots=snapshots)


def device_text():
    "What the figures were measured on."
    major, minor = torch.cuda.get_device_capability()
    return machine() | dict(device=torch.cuda.get_device_name(), devices=torch.cuda.device_count(),
                            compute=f"{major}.{minor}", cuda=torch.version.cuda)


def main(args=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("sections", nargs="*", help=f"some of {', '.join(SECTIONS)}; default all")
    p.add_argument("--small", action="store_true", help="in miniature: whether it runs, no figures")
    p.add_argument("--out", type=Path, default=STORED)
    given = p.parse_args(args)
    odd = sorted(set(given.sections) - set(SECTIONS))
    if odd: p.error(f"sections {odd}: expected some of {', '.join(SECTIONS)}")
    if not torch.cuda.is_available():
        sys.exit(f"gpu_bench: needs a CUDA device, and torch {torch.__version__} sees none; nothing was measured")
    if given.small and given.out == STORED: p.error("--small wants an --out of its own: its figures mean nothing")
    out = json.loads(given.out.read_text()) if given.out.exists() else {}
    if out and out["machine"]["device"] != torch.cuda.get_device_name(): out = {} # figures of two devices never meet
    out["machine"] = device_text()
    size, limit = (SMALL, 128) if given.small else (FULL, None)
    for name in given.sections or SECTIONS:
        out[name] = SECTIONS[name](size, limit)
        print(name, json.dumps(out[name], indent=1), flush=True)
        given.out.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__": main()
