"""What lanes are worth, against the best loop over the same networks.

    python -m benchmarks.lanes                       # some minutes on a quiet machine
    python -m benchmarks.lanes --quick --out x.json  # only to see that it works
    python -m benchmarks.lanes --only counts         # how many networks: images for a second of the processor, memory
    python -m benchmarks.lanes --only fused          # blocks in one pass: twenty minutes; needs Numba

Writes nbs/explanations/bench_lanes.json, which results.ipynb and benchmarks.ipynb beside it draw.
"""

import json
import multiprocessing
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.measure import Case, Side, fastest_epoch, machine, machine_text, run_from_command, setting_text
from esper_nb.core.devices import Precision
from esper_nb.train.population import FitConfig, Population, new_population
from esper_nb.train.trainer import run_epoch

LANE_CASES = (
    Case(quick=True),
    Case(batch_size=256, quick=True),
    Case("cifar_baseline", 128),
    Case("cifar_baseline", 128, precision="bf16"),
    Case("cifar_baseline", 64, base=32),
    Case("cifar_baseline", 64, base=64, images=512))

def plain_loop(
    case: Case,
    part: Sequence[int] = (0, 1), # k, m: only every m-th network, from the k-th on
) -> Callable[[int], list[float]]: # runs epoch e: mean training loss of each network
    "Ordinary networks, one after the other, in plain PyTorch."
    task, data = case.load()
    config = FitConfig(lanes=case.lanes, precision=case.precision, governor=None)
    pop = new_population(task, config, data=data)
    return loop_over({i: pop.model.lane(i).host for i in range(part[0], case.lanes, part[1])}, case, pop)

def plain_step(net: nn.Module, opt: torch.optim.Optimizer, precision: Precision, x: Tensor, y: Tensor) -> Tensor:
    "A step of ordinary training; its loss."
    with precision.autocast(x.device): logits = net(x)
    loss = nn.functional.cross_entropy(logits.float(), y)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.)
    opt.step()
    return loss.detach()

def loop_over(
    nets: Mapping[int, nn.Module], # by their lanes
    case: Case,
    pop: Population, # of the same networks: data, precision, options of the optimizer
    layout: torch.memory_format = torch.channels_last,
) -> Callable[[int], list[float]]: # runs epoch e: mean training loss of each network
    "Plain training of some networks."
    for net in nets.values(): net.train().to(memory_format=layout)
    opts = {i: torch.optim.SGD(net.parameters(), **pop.task.optimizer_options) for i, net in nets.items()}
    def train(i: int, e: int) -> float:
        batches, losses = pop.data.epoch(0, [i], e, case.batch_size), []
        for b in range(len(batches)):
            x, y = batches[b]
            losses.append(plain_step(nets[i], opts[i], pop.precision, x, y[:, 0]))
        return torch.stack(losses).mean().item()
    return lambda e: [train(i, e) for i in nets]

@dataclass
class OnePerCore(Side):
    "A loop in several processes, each with a part of the networks."
    parts: int = 2 # processes

    def __enter__(self):
        said = [dict(self.settings, part=[k, self.parts]) for k in range(self.parts)]
        self.sides = [Side(self.make, s, self.threads, self.keep) for s in said]
        self.stack = ExitStack()
        for side in self.sides: self.stack.enter_context(side)
        self.pool = self.stack.enter_context(ThreadPoolExecutor(self.parts))
        return self

    def epoch(self) -> float: # seconds, until the last is through
        "Run one more epoch in all of them."
        start = time.perf_counter()
        list(self.pool.map(Side.epoch, self.sides))
        return time.perf_counter() - start

    def __exit__(self, *error): self.stack.close()

def lane_loop(
    case: Case,
    fused: bool = False, # normalise, rectify and pool in one pass
) -> Callable[[int], list[float]]: # runs epoch e: mean training loss of each network
    "The same networks as lanes, by the default plan; without a Governor, since the loop has none."
    task, data = case.load()
    settings = FitConfig(lanes=case.lanes, epochs=1000, batch_size=case.batch_size, governor=None, fused=fused)
    pop = new_population(task, settings.replace(precision=case.precision), data=data)
    return lambda e: run_epoch(pop, split=None, look=False).train.loss.tolist() # nothing grows: nobody asks where

LOOPS = ("loop", "processes") # one process, and one per core

def lane_side(
    kind: str, # "loop", "processes", "lanes", "fused lanes" or "fp32 lanes"
    case: dict, # as plain values
    part: Sequence[int] = (0, 1), # of the networks, in one of several processes
) -> Callable[[int], object]: # runs epoch e
    "What the process of one side runs."
    wanted = Case.from_dict(case)
    if kind in LOOPS: return plain_loop(wanted, part)
    return lane_loop(wanted.replace(precision="fp32") if kind == "fp32 lanes" else wanted, kind == "fused lanes")

def lane_settings(case: Case) -> list[tuple[str, int, bool]]: # (kind, threads, keep freed memory)
    "What is compared, in turns."
    cores = int(machine()["cores"])
    lanes = [("lanes", cores, True)] + [("fp32 lanes", cores, True)] * (case.precision != "fp32")
    ways = [("loop", threads) for threads in sorted({1, cores})] + [("processes", 1)] * (cores > 1)
    loops = [(*way, keep) for way in ways for keep in (False, True)]
    return [setting for loop in loops for setting in (loop, *lanes)]

def open_side(
    make: str, # address of a maker
    settings: dict, # its arguments; of kind "processes": a loop that understands `part`
    threads: int, # inside an operation
    keep: bool, # keep freed memory
) -> Side: # not running yet
    "One process, or one per core."
    if settings["kind"] != "processes": return Side(make, settings, threads, keep)
    return OnePerCore(make, settings, threads, keep, parts=int(machine()["cores"]))

def way_text(kind: str, threads: int, keep: bool) -> str:
    "How a loop was run, in words."
    return "one process per core, " * (kind == "processes") + setting_text(threads, keep)

def compare_case(
    case: Case,
    passes: int, # over all settings
    rounds: int, # timed epochs of a process, at least
    least: float = 1., # seconds that a process warms up
) -> dict:
    "All settings of one case, in turns; the ratio is the loop's best time over the lanes' best."
    best: dict[tuple[str, int, bool], float] = {}
    for _ in range(passes):
        for setting in lane_settings(case):
            kind, threads, keep = setting
            side = open_side("benchmarks.lanes:lane_side", dict(kind=kind, case=case.to_dict()), threads, keep)
            with side:
                best[setting] = min(best.get(setting, float("inf")), fastest_epoch(side, rounds, least))
    loops = {s: seconds for s, seconds in best.items() if s[0] in LOOPS}
    fastest = min(loops, key=lambda s: loops[s])
    lanes = {s[0]: seconds for s, seconds in best.items() if s[0] not in LOOPS}
    fp32 = lanes.get("fp32 lanes")
    return dict(
        case=case.name, loop_s=loops[fastest], loop_setting=way_text(*fastest), lanes_s=lanes["lanes"],
        ratio=loops[fastest] / lanes["lanes"], over_fp32=fp32 and fp32 / lanes["lanes"],
        all={f"{kind}, {setting_text(t, k)}": seconds for (kind, t, k), seconds in best.items()})

# --- one network, or hundreds of them

COUNTS = (1, 4, 16, 64, 256)

def count_row(
    lanes: int, # networks side by side
    least: float = 3., # seconds of the processor that are measured
) -> dict:
    "Images of the digits for a second of the processor, as lanes and in a loop of one network; memory of the process."
    case = Case(lanes=lanes)
    train, images = lane_loop(case), case.load()[1].num_train // case.batch_size * case.batch_size
    def pace(run: Callable[[int], object], networks: int) -> float: # images a second of the processor
        run(0)
        epochs, begun = 0, time.process_time()
        while time.process_time() - begun < least: run(epochs := epochs + 1)
        return epochs * images * networks / (time.process_time() - begun)
    mine = pace(train, lanes)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    torch.set_num_threads(1) # of which the loop makes the most
    loop = pace(plain_loop(Case(lanes=1)), 1)
    return dict(networks=lanes, images_per_cpu_s=mine, loop_images_per_cpu_s=loop, peak_kb=peak)

def in_a_process(f: Callable[..., dict], *args) -> dict:
    "Call a function in a process of its own, that its peak of memory is its own."
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool: return pool.submit(f, *args).result()

def measure_counts(counts: Sequence[int] = COUNTS, least: float = 3.) -> list[dict]:
    "A row for each number of networks."
    rows = [in_a_process(count_row, n, least) for n in counts]
    for r in rows:
        more = r["networks"] - rows[0]["networks"]
        r["kb_per_lane"] = (r["peak_kb"] - rows[0]["peak_kb"]) / more if more else None
        print(count_text(r), flush=True)
    return rows

def count_text(r: Mapping) -> str:
    "A row of `measure_counts` in words."
    memory = "" if r["kb_per_lane"] is None else f", {r['kb_per_lane'] / 1024:.2f} MB for each further one"
    return (f"{r['networks']:4} networks: {r['images_per_cpu_s']:7,.0f} images for a second of the processor, a loop "
            f"{r['loop_images_per_cpu_s']:7,.0f}{memory}")

# --- blocks in one pass

FUSED = (("processes", 1, False), ("processes", 1, True), ("lanes", None, True), ("fused lanes", None, True))

def fused_row(
    case: Case, # in fp32
    passes: int, # over all ways
    rounds: int, # timed epochs of a process, at least
    least: float = 1., # seconds that a process warms up
) -> dict:
    "One process per core, lanes, and lanes whose blocks are one pass, in turns: seconds of an epoch."
    best: dict[str, float] = {}
    for _ in range(passes):
        for kind, threads, keep in FUSED:
            settings = dict(kind=kind, case=case.to_dict())
            side = open_side("benchmarks.lanes:lane_side", settings, threads or int(machine()["cores"]), keep)
            with side: best[kind] = min(best.get(kind, float("inf")), fastest_epoch(side, rounds, least))
    loop, lanes, fused = (best[kind] for kind in ("processes", "lanes", "fused lanes"))
    row = dict(case=case.name, processes_s=loop, lanes_s=lanes, fused_s=fused, lanes=loop / lanes, fused=loop / fused)
    print(fused_text(row), flush=True)
    return row

def fused_text(r: Mapping) -> str:
    "A row of `fused_row` in words."
    return (f"{r['case']:38} one process per core {r['processes_s']:6.3f} s; lanes {r['lanes_s']:6.3f} s, "
            f"{r['lanes']:.2f}x; blocks in one pass {r['fused_s']:6.3f} s, {r['fused']:.2f}x")

# --- everything

def table_text(result: Mapping) -> str:
    "The figures of `run_lane_bench` as lines of text."
    lines = [f"{'one epoch of 16 networks':36} {'loop s':>8} {'lanes s':>8} {'ratio':>6}   the loop's best setting"]
    for r in result["rows"]:
        figures = f"{r['loop_s']:8.3f} {r['lanes_s']:8.3f} {r['ratio']:5.2f}x"
        lines.append(f"{r['case']:36} {figures}   {r['loop_setting']}")
    return "\n".join([*lines, machine_text(result["machine"])])

def run_lane_bench(
    quick: bool, # the small task only, fewer rounds
    out: Path, # where the figures go
    only: str = "", # "counts" or "fused": the others stay as they are in the file
) -> dict:
    "Measure every case, print the table and store it as JSON with machine and versions."
    result = json.loads(out.read_text()) if only and out.exists() else {}
    if not only:
        rows: list[dict] = []
        result |= dict(machine=machine(), rows=rows)
        passes, rounds = (1, 2) if quick else (2, 3)
        for case in LANE_CASES:
            if quick and not case.quick: continue
            rows.append(compare_case(case, passes, rounds))
            print(table_text(dict(result, rows=rows[-1:])).splitlines()[1], flush=True)
            out.write_text(json.dumps(result | dict(table=table_text(result)), indent=1) + "\n")
        result["table"] = table_text(result)
        print(result["table"])
    if only != "fused":
        result["counts"] = dict(machine=machine(), rows=measure_counts(*(((1, 4), .2) if quick else ())))
    if only != "counts":
        passes, rounds = (1, 2) if quick else (3, 3)
        cases = [case for case in LANE_CASES if case.precision == "fp32" and (case.quick or not quick)]
        result["fused"] = dict(machine=machine(), rows=[])
        for case in cases:
            result["fused"]["rows"].append(fused_row(case, passes, rounds))
            out.write_text(json.dumps(result, indent=1) + "\n")
    out.write_text(json.dumps(result, indent=1) + "\n")
    return result

if __name__ == "__main__":
    run_from_command(run_lane_bench, __doc__, "bench_lanes.json",
                     only="counts: how many networks, fused: blocks in one pass, and nothing else")
