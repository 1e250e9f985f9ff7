"""Real training, ruined on purpose: what the Governor saves, and what is left without it.

    python -m benchmarks.faults                       # about ten minutes on two cores
    python -m benchmarks.faults --quick --out x.json  # only to see that it works

Writes nbs/explanations/bench_faults.json, which results.ipynb and benchmarks.ipynb beside it draw.
"""

import contextlib, importlib, importlib.util, io, json, logging, math, tempfile, warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.measure import machine, run_from_command
from esper_nb.core.devices import keep_freed_memory
from esper_nb.core.workers import use_threads
from esper_nb.guard.reports import Report
from esper_nb.train.data import ImageData, TextData
from esper_nb.train.datasets import synthetic_cifar10
from esper_nb.train.faults import Fault, disturb_at, list_faults
from esper_nb.train.tasks import Task, create_model, get_task
from esper_nb.train.population import FitConfig, new_population
from esper_nb.train.trainer import run_epoch
from esper_nb.train.ablation import evaluate

class FaultWorld(NamedTuple):
    "What is trained, and when it is ruined."
    task: Task
    data: ImageData | TextData
    settings: dict # of `FitConfig`
    epoch: int # in which the fault begins
    batch: int # of that epoch

def fault_worlds() -> dict[str, FaultWorld]:
    "A digits network, a CIFAR-shaped one on made-up images, and a small GPT on prose."
    digits, cifar, prose = get_task("digits"), get_task("cifar_baseline"), get_task("prose")
    cifar = cifar.replace(batch_size=32, host=cifar.host.replace(base=4))
    gpt = prose.host.replace(d=32, layers=2, segments=2, block=32)
    prose = prose.replace(host=gpt, slots=("r0c0",))
    return dict(
        digits=FaultWorld(digits, digits.load(), dict(epochs=25), 12, 5),
        cifar_shaped=FaultWorld(cifar, synthetic_cifar10(640), dict(epochs=24, lr=.02), 12, 5),
        prose=FaultWorld(prose, prose.load(limit=480), dict(epochs=12), 6, 5))

class FaultRun(NamedTuple):
    "What became of a population."
    accuracy_pp: Tensor # (n,), on the test split
    reports: list[Report] # what the Governor did
    losses: Tensor # (batches, n)
    start: int # first batch of the fault

def fault_run(
    world: FaultWorld,
    kinds: Sequence[str], # faults; none: healthy networks
    seeds: int, # of each
    governed: bool,
) -> FaultRun:
    "Train one population in which every lane has a fault of its own."
    settings = dict(world.settings) if governed else dict(world.settings, governor=None)
    pop = new_population(world.task, FitConfig(lanes=seeds * max(1, len(kinds)), **settings), data=world.data)
    faults = [Fault(kind, lane=i * seeds + s, seed=s, epoch=world.epoch, batch=world.batch)
              for i, kind in enumerate(kinds) for s in range(seeds)]
    records = [run_epoch(pop, split=None, disturb=disturb_at(faults, e)) for e in range(pop.epochs)]
    losses = [r.train.losses for r in records]
    return FaultRun(
        evaluate(pop.model, world.task, world.data, "test").accuracy_pp, [x for r in records for x in r.reports],
        torch.cat(losses), world.epoch * len(losses[0]) + world.batch)

class PlainState:
    "The momentum of a plain optimizer, in the form in which faults look for it."
    def __init__(self, opt: torch.optim.Optimizer, net: nn.Module):
        self.opt, self.net, self.lanes = opt, net, 1

    def state_dict(self) -> dict[str, Tensor]:
        "{name: buffer} of what the optimizer has built up."
        parts = enumerate(self.net.parameters())
        return {f"momentum_buffer.{i}": self.opt.state[p]["momentum_buffer"] for i, p in parts if p in self.opt.state}

class PlainStepper(NamedTuple):
    "One network and its plain optimizer, as faults look at a stepper."
    owners: dict[str, PlainState]
    lanes: int = 1

    def lanes_of(self, owner: str) -> Sequence[int]:
        "There is only one."
        return range(self.lanes)

@use_threads(1) # the best setting for one small network
def stability_guard_run(world: FaultWorld, kind: str, seed: int) -> float: # test accuracy, pp
    "One network under `stabilityguard.GuardedOptimizer(nan_action='rollback')`, with a fault."
    guard = importlib.import_module("stabilityguard").GuardedOptimizer
    logging.getLogger("stabilityguard").setLevel(logging.CRITICAL)
    task, data, settings = world.task, world.data, FitConfig(**world.settings)
    net = create_model(task, task.slots, seed=seed).host.train()
    base = torch.optim.SGD(net.parameters(), **task.optimizer_options)
    opt = guard(base, net, nan_action="rollback", verbose=False, log_every=10**9, log_dir=tempfile.gettempdir())
    stepper = PlainStepper(dict(host=PlainState(base, net)))
    fault = Fault(kind, lane=0, seed=seed, epoch=world.epoch, batch=world.batch)
    epochs = world.settings["epochs"]
    for e in range(epochs):
        batches, disturb = data.epoch(seed, [0], e, task.batch_size), fault.at(e)
        for group in base.param_groups: group["lr"] = task.lr * settings.factor(e, epochs)
        for b in range(len(batches)):
            x, y = batches[b]
            if disturb: x, y = disturb(net, stepper, [0], b, x, y)
            loss = task.loss(net(x), y, 1).sum()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.)
            opt.step(loss=loss.item())
    return evaluate(net, task, data, "test").accuracy_pp.item()

def fault_row(
    world: str, # name
    kind: str, # of the fault
    clean: Tensor, # test accuracy without a fault, (seeds,), pp
    guarded: FaultRun, # its lanes are the seeds of this fault
    alone: Tensor, # (seeds,), pp; NaN for a ruined network
    peer: Sequence[float] | None = None, # the same under another tool
) -> dict:
    "What a table says about one fault in one world."
    reports: dict[int, list[Report]] = {}
    for r in guarded.reports: reports.setdefault(r.lane, []).append(r)
    first = [lane[0] for lane in reports.values()]
    delays = sorted(r.step - 1 - guarded.start for r in first)
    return dict(
        world=world, fault=kind, clean=clean.mean().item(), guarded=guarded.accuracy_pp.mean().item(),
        guarded_min=guarded.accuracy_pp.min().item(), alone=alone.nan_to_num(0).mean().item(),
        peer=None if peer is None else sum(peer) / len(peer), caught=len(first), seeds=len(guarded.accuracy_pp),
        delay=delays[len(delays) // 2] if delays else None, reasons=sorted({r.reason for r in first}),
        actions=sorted({r.action for r in guarded.reports}))

def lanes_of_fault(run: FaultRun, at: slice) -> FaultRun:
    "Some lanes of a run, as a run."
    lanes = range(len(run.accuracy_pp))[at]
    return FaultRun(run.accuracy_pp[at], [r for r in run.reports if r.lane in lanes], run.losses[:, at], run.start)

def fault_table_text(result: Mapping) -> str:
    "The figures of `run_fault_bench` as lines of text; accuracies in percentage points on the test split."
    points = f"{'clean':>7}{'guarded':>9}{'worst':>7}{'alone':>7}{'other':>7}"
    lines = [f"{'world':14}{'fault':18}{'caught':>8}{'after':>6}{points}  seen as; actions"]
    for r in result["rows"]:
        delay = "" if r["delay"] is None else r["delay"]
        peer = "" if r["peer"] is None else f"{r['peer']:.1f}"
        seen = f"{r['world']:14}{r['fault']:18}{r['caught']:>5}/{r['seeds']:<2}{delay:>6}"
        points = f"{r['clean']:7.1f}{r['guarded']:9.1f}{r['guarded_min']:7.1f}{r['alone']:7.1f}{peer:>7}"
        lines.append(f"{seen}{points}  {', '.join(r['reasons'])}; {', '.join(r['actions'])}")
    quiet = [f"{name} {v['alarms']} in {v['runs']} runs" for name, v in result["false_alarms"].items()]
    return "\n".join([*lines, "false alarms in clean runs: " + ", ".join(quiet)])

def short_trace(losses: Sequence[float]) -> list[float | None]:
    "Losses with three digits; None where they were not finite."
    return [float(f"{v:.3g}") if math.isfinite(v) else None for v in losses]

def peer_runs(world: FaultWorld, kind: str, seeds: int) -> list[float] | None: # test accuracy, pp
    "The other tool on every seed, where it is installed; it prints and warns a lot."
    if not importlib.util.find_spec("stabilityguard"): return None
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
        return [stability_guard_run(world, kind, s) for s in range(seeds)]

def run_fault_bench(
    quick: bool, # the digits only, three seeds
    out: Path, # where the figures go
) -> dict:
    "Six real faults in three worlds, guarded and alone; prints the table and stores it with the loss traces."
    seeds, kinds = 3 if quick else 10, list_faults()
    rows: list[dict] = []
    false_alarms, traces = {}, {}
    keep_freed_memory()
    for name, world in list(fault_worlds().items())[:1 if quick else None]:
        healthy = fault_run(world, [], seeds, True)
        guarded, alone = fault_run(world, kinds, seeds, True), fault_run(world, kinds, seeds, False)
        false_alarms[name] = dict(runs=seeds, alarms=len(healthy.reports))
        losses = {}
        for i, kind in enumerate(kinds):
            at = slice(i * seeds, (i + 1) * seeds)
            losses[kind] = [short_trace(t) for t in alone.losses[:, at].T.tolist()]
            peer = peer_runs(world, kind, seeds) if name == "digits" else None
            mine = lanes_of_fault(guarded, at)
            rows.append(fault_row(name, kind, healthy.accuracy_pp, mine, alone.accuracy_pp[at], peer))
        traces[name] = dict(start=guarded.start, chance=world.data.chance_loss, losses=losses)
    result = dict(machine=machine(), rows=rows, false_alarms=false_alarms, traces=traces)
    result["table"] = fault_table_text(result)
    out.write_text(json.dumps(result, separators=(",", ":")) + "\n")
    print(result["table"])
    return result

if __name__ == "__main__": run_from_command(run_fault_bench, __doc__, "bench_faults.json")
