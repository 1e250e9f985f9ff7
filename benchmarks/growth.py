"""What lanes are worth while networks grow, against the best loop over the same networks.

    python -m benchmarks.growth                       # half an hour on a quiet machine
    python -m benchmarks.growth --quick --out x.json  # only to see that it works
    python -m benchmarks.growth --only "digits, batch 64, mixed" --out x.json

Writes nbs/explanations/bench_growth.json, which results.ipynb and benchmarks.ipynb beside it draw.
"""

import json, os, time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from benchmarks.lanes import LOOPS, open_side, way_text
from benchmarks.measure import Case, Side, machine, machine_text, run_from_command, take_turns
from esper_nb.core.config import check
from esper_nb.core.devices import generator
from esper_nb.core.lanes import take_lanes
from esper_nb.core.workers import Plan, plan, use_threads
from esper_nb.grow.blueprints import list_blueprints
from esper_nb.grow.models import Growing, GrowingModel
from esper_nb.train.tasks import get_task
from esper_nb.train.population import FitConfig, Population, grown_plan, lane_bytes, new_population
from esper_nb.train.trainer import run_epoch
from esper_nb.train.ablation import evaluate, for_all_lanes, measure_ablation

AGREED = ("conv_light", "conv_heavy", "attention")
ALPHA = .5 # of every seed
AIMS = {
    "digits, batch 64, agree": 2.4, "digits, batch 64, mixed": 1.6,
    "digits, batch 256, agree": 1.5, "digits, batch 256, mixed": 1.3,
    "cifar_baseline, batch 128, agree": 1.3, "cifar_baseline, batch 128, mixed": 1.05}

def seed_blueprints() -> list[str]:
    "What may grow in the cases: every blueprint of the family that does something."
    return [kind for kind in list_blueprints(family="cnn") if kind != "noop"]

@dataclass(frozen=True)
class GrowthCase(Case):
    "An epoch of `lanes` networks with three live seeds each."
    mix: str = "agree" # "agree": the same blueprints in every lane; "mixed": each lane its own

    @property
    def name(self) -> str:
        "How tables call it."
        return f"{self.task}, batch {self.batch_size}, {self.mix}"

    @property
    def aim(self) -> float: # times as fast as the loop
        "What the default plan should reach: never less than the loop."
        return AIMS.get(self.name, 1.)

    def kinds(self) -> list[tuple[str, ...]]: # for every lane, the blueprint in each slot
        "What grows where."
        if self.mix == "agree": return [AGREED] * self.lanes
        every = seed_blueprints()
        drawn = torch.randint(len(every), (self.lanes, 3), generator=generator(0, "growth bench"))
        return [tuple(every[k] for k in lane) for lane in drawn.tolist()]

GROWTH_CASES = (
    *(GrowthCase(batch_size=b, mix=m, quick=b == 64) for b in (64, 256) for m in ("agree", "mixed")),
    *(GrowthCase("cifar_baseline", 128, images=512, mix=m) for m in ("agree", "mixed")))

def grown_population(case: GrowthCase) -> Population:
    "A population whose seeds are being blended."
    task, data = case.load()
    settings = FitConfig(lanes=case.lanes, epochs=1000, batch_size=case.batch_size, schedule="constant", governor=None)
    pop = new_population(task, settings, data=data)
    for i, kinds in enumerate(case.kinds()):
        for slot, kind in zip(pop.model.names, kinds):
            pop.model.germinate(slot, kind, i, tempo=0, goal=ALPHA)
            for _ in range(2): pop.model.advance(slot, i, force=True)
    return pop

class PlainGrown(nn.Module):
    "A host and its seeds in ordinary PyTorch: no slots, no tables."
    def __init__(self, model: GrowingModel): # one lane
        super().__init__()
        slots = [model.slot(k) for k in model.names]
        self.host = model.host
        self.at = {i: model.names.index(s.name) for i, s in enumerate(model.host.sites) if s.name in model.names}
        self.seeds = nn.ModuleList(s.banks[s.blueprints[s.state(0).blueprint or 0]] for s in slots)

    def forward(self, x: Tensor, on: int = -1) -> Tensor: # bit j of `on`: seed j takes part
        for i in range(len(self.host.sites) + 1):
            x = self.host.piece(i, x)
            j = self.at.get(i)
            if j is not None and on >> j & 1: x = torch.lerp(x, self.seeds[j](x), ALPHA)
        return x

def train_plain(net: PlainGrown, opt: torch.optim.Optimizer, batches) -> Tensor: # mean training loss
    "One epoch of one network."
    net.train()
    total = torch.zeros(())
    for b in range(len(batches)):
        x, y = batches[b]
        loss = nn.functional.cross_entropy(net(x), y[:, 0])
        opt.zero_grad()
        loss.backward()
        for part in (net.host, *net.seeds): nn.utils.clip_grad_norm_(part.parameters(), 1.)
        opt.step()
        total += loss.detach()
    return total / len(batches)

@torch.inference_mode()
def evaluate_plain(net: PlainGrown, batches: Iterable[tuple[Tensor, Tensor]], size: int) -> Tensor: # (8,), pp
    "Accuracy of every on/off combination over `size` held-out images, one pass for each."
    net.eval()
    out = []
    for on in range(2**len(net.seeds)):
        right = loss = torch.zeros(())
        for x, y in batches:
            logits = net(x, on)
            loss = loss + nn.functional.cross_entropy(logits, y, reduction="sum")
            right = right + (logits.argmax(1) == y).sum()
        out.append(100 * right / size)
    return torch.stack(out)

def grown_loop(
    case: GrowthCase,
    part: Sequence[int] = (0, 1), # k, m: only every m-th network, from the k-th on
) -> Callable[[int], tuple[Tensor, Tensor]]: # runs epoch e
    "One network after the other, with separate passes: training loss (n,) and accuracy (8, n)."
    pop = grown_population(case)
    data, options = pop.data, pop.task.optimizer_options
    mine = range(part[0], case.lanes, part[1])
    nets = [PlainGrown(pop.model.lane(i)).to(memory_format=torch.channels_last) for i in mine]
    opts = [torch.optim.SGD(net.parameters(), fused=True, **options) for net in nets]
    heldout = list(data.evaluate("heldout", 256))
    size = sum(len(y) for _, y in heldout)
    def epoch(e: int):
        losses, tables = [], []
        for i, net, opt in zip(mine, nets, opts):
            losses.append(train_plain(net, opt, data.epoch(0, [i], e, case.batch_size)))
            tables.append(evaluate_plain(net, heldout, size))
        return torch.stack(losses), torch.stack(tables, 1)
    return epoch

GROWTH_PLANS: dict[str, Callable[[Population], Plan]] = {
    "one pass": lambda pop: grown_plan(pop.model.kinds(), 1, 1, pop.lanes),
    "one per core": lambda pop: grown_plan(pop.model.kinds(), pop.workers.count, 1),
    "by kind": lambda pop: plan(pop.model.kinds(), pop.workers.count, lane_bytes(pop.task, pop.batch_size)),
    "default": lambda pop: pop.plan()}

def grown_lanes(case: GrowthCase, plan_name: str = "default") -> Callable[[int], object]: # runs epoch e
    "The same networks as lanes, with one factorial evaluation."
    pop = grown_population(case)
    pop.fixed_plan = GROWTH_PLANS[plan_name](pop)
    return lambda e: run_epoch(pop, look=False) # the others do not look either

def grown_validation(case: GrowthCase, kind: str) -> Callable[[int], list[Tensor]]: # evaluates
    "Validation by the default plan: 'factorial', 'separate' passes for every combination, or one 'plain' pass."
    pop = grown_population(case)
    nets = [take_lanes(pop.model, group) for group in pop.plan()]
    def run(net: Growing) -> Tensor: # (combinations, n), pp
        if kind == "factorial":
            batches = [(for_all_lanes(x, net.lanes), y) for x, y in pop.data.evaluate("heldout", 256)]
            return measure_ablation(net, pop.task, batches).accuracy_pp
        out = []
        for on in range(8) if kind == "separate" else [7]:
            with net.disable_seeds([k for j, k in enumerate(net.names) if not on >> j & 1]):
                out.append(evaluate(net, pop.task, pop.data, "heldout", 256).accuracy_pp)
        return torch.stack(out)
    return lambda e: pop.workers.map(run, nets)

def growth_side(kind: str, case: dict, how: str = "", part: Sequence[int] = (0, 1)) -> Callable[[int], object]:
    "What the process of one side runs: a loop, 'lanes' by the plan `how`, or 'validation' of the kind `how`."
    wanted = GrowthCase.from_dict(case)
    if kind in LOOPS: return grown_loop(wanted, part)
    return grown_lanes(wanted, how) if kind == "lanes" else grown_validation(wanted, how)

def grown_process(kind: str, case: GrowthCase, how: str = "", threads: int = 1, keep: bool = True) -> Side:
    "A process for it."
    settings = dict(kind=kind, case=case.to_dict(), how=how)
    return open_side("benchmarks.growth:growth_side", settings, threads, keep)

_Note = Callable[[str], object] # called after each epoch, with the side's name

def compare_growth(
    case: GrowthCase,
    rounds: int = 7,
    plans: Sequence[str] = tuple(GROWTH_PLANS),
    threads: Sequence[int] = (), # inside the loop's operations; nothing: one, and one per core
    note: _Note = lambda name: None,
) -> dict:
    "The loop at its best setting against lanes under some plans."
    cores = int(machine()["cores"])
    ways = [("loop", t) for t in threads or sorted({1, cores})] + [("processes", 1)] * (1 < cores <= case.lanes)
    loops = {way_text(kind, t, keep): grown_process(kind, case, "", t, keep)
             for kind, t in ways for keep in (False, True)}
    tried = {name: min(seconds) for name, seconds in take_turns(loops, 2, note).items()}
    fastest = min(tried, key=lambda name: tried[name])
    sides = {"loop": loops[fastest]} | {p: grown_process("lanes", case, p, cores) for p in plans}
    times = take_turns(sides, rounds, note)
    seconds = {name: median(v) for name, v in times.items()}
    lanes = {p: seconds[p] for p in plans}
    return dict(case=case.name, loop_setting=fastest, loop_s=seconds["loop"], lanes_s=lanes,
                ratios={p: seconds["loop"] / s for p, s in lanes.items()}, aim=case.aim, rounds=times, tried=tried)

def compare_validation(case: GrowthCase, rounds: int = 15, note: _Note = lambda name: None) -> dict:
    "One factorial evaluation against separate passes and against one plain validation."
    cores, kinds = int(machine()["cores"]), ("factorial", "separate", "plain")
    sides = {kind: grown_process("validation", case, kind, cores) for kind in kinds}
    seconds = {kind: median(v) for kind, v in take_turns(sides, rounds, note).items()}
    return dict(case=case.name, seconds=seconds, faster=seconds["separate"] / seconds["factorial"],
                price=seconds["factorial"] / seconds["plain"], aims=[4., 1.8])

@use_threads(1)
def arithmetic_share(case: GrowthCase) -> dict: # CPU seconds on one thread
    "An epoch of the loop and of the lanes, and what either spends inside convolutions."
    from torch.profiler import ProfilerActivity, profile
    seconds, inside, profiled = {}, {}, {}
    for name, epoch in (("loop", grown_loop(case)), ("lanes", grown_lanes(case, "one pass"))):
        epoch(0)
        begun = time.process_time()
        epoch(1)
        seconds[name] = time.process_time() - begun
        begun = time.perf_counter()
        with profile(activities=[ProfilerActivity.CPU]) as seen: epoch(2)
        profiled[name] = time.perf_counter() - begun # by the profiler's clock
        inside[name] = sum(e.self_cpu_time_total for e in seen.key_averages() if "convolution" in e.key) / 1e6
    return dict(case=case.name, seconds=seconds, profiled=profiled, convolutions=inside,
                ratio=seconds["loop"] / seconds["lanes"], limit=seconds["loop"] / min(inside.values()))

def met_text(ok: bool) -> str:
    "How tables say it."
    return "met" if ok else "MISSED"

def _ratio_lines(rows: Sequence[Mapping]) -> list[str]:
    plans = list(rows[0]["ratios"]) if rows else []
    head = f"{'one epoch, 3 live seeds each':34}{'loop s':>8}" + "".join(f"{p:>14}" for p in plans)
    lines = [head + "   default plan's aim; the loop's best setting"]
    for r in rows:
        figures = f"{r['case']:34}{r['loop_s']:8.3f}" + "".join(f"{r['ratios'][p]:13.2f}x" for p in plans)
        aim = f"   {r['aim']:g}x {met_text(r['ratios']['default'] >= r['aim'])}" if "default" in plans else ""
        lines.append(f"{figures}{aim}; {r['loop_setting']}")
    return lines

def _validation_lines(rows: Sequence[Mapping]) -> list[str]:
    if not rows: return []
    lines = ["", f"{'factorial evaluation':34}{'s':>8}  against separate passes   in plain validations"]
    for r in rows:
        least, most = r["aims"]
        faster = f"{r['faster']:6.2f}x ({least:g}x {met_text(r['faster'] >= least):6})"
        price = f"{r['price']:6.2f} ({most:g} {met_text(r['price'] <= most)})"
        lines.append(f"{r['case']:34}{r['seconds']['factorial']:8.3f}  {faster}     {price}")
    return lines

def _arithmetic_lines(rows: Sequence[Mapping]) -> list[str]:
    if not rows: return []
    head = f"{'CPU time, one thread, one pass':34}{'loop s':>8} {'convolutions':>14}{'lanes s':>9} {'convolutions':>14}"
    lines = ["", head + "   loop / least convolutions"]
    for r in rows:
        loop = f"{r['seconds']['loop']:8.3f}{r['convolutions']['loop']:15.3f}"
        lanes = f"{r['seconds']['lanes']:8.3f}{r['convolutions']['lanes']:15.3f}"
        lines.append(f"{r['case']:34}{loop} {lanes}{r['limit']:27.2f}x")
    return lines

def growth_text(result: Mapping) -> str:
    "The figures of `run_growth_bench` as lines of text."
    lines = _ratio_lines(result["rows"]) + _validation_lines(result["validation"])
    return "\n".join([*lines, *_arithmetic_lines(result["arithmetic"]), machine_text(result["machine"])])

def _epochs(cases: Sequence[GrowthCase], singles: Sequence[GrowthCase], rounds: int, looks: int, loops: int) -> int:
    "How many epochs a run has, for its progress bar."
    ways = loops + (int(machine()["cores"]) > 1)
    return len(cases) * (6 * ways + (rounds + 1) * (1 + len(GROWTH_PLANS))) + len(singles) * 3 * (looks + 1)

def run_growth_bench(
    quick: bool, # the small task at its own batch size only, fewer rounds, the loop with one thread
    out: Path, # where the figures go
    only: str = "", # cases whose name contains this, such as "digits, batch 64, mixed"
) -> dict:
    "Measure growth, print the table and store it as JSON with machine and versions."
    cases = [c for c in GROWTH_CASES if (c.quick or not quick) and only in c.name]
    check(len(cases) > 0, "only", only, "part of a case's name: " + "; ".join(c.name for c in GROWTH_CASES))
    singles = [c for c in cases if c.batch_size == get_task(c.task).batch_size]
    rounds, looks = (3, 5) if quick else (7, 15)
    threads = [1] if quick else sorted({1, int(machine()["cores"])})
    tables: dict[str, list[dict]] = dict(rows=[], validation=[], arithmetic=[])
    result = dict(machine=machine() | dict(load=round(os.getloadavg()[0], 1)), **tables)
    with tqdm(total=_epochs(cases, singles, rounds, looks, len(threads)), unit="epoch") as bar:
        for case in cases:
            def note(name: str, case: GrowthCase = case):
                bar.set_postfix_str(f"{case.name}: {name}", refresh=False)
                bar.update()
            tables["rows"].append(compare_growth(case, rounds, threads=threads, note=note))
            if case in singles:
                tables["validation"].append(compare_validation(case, looks, note))
                tables["arithmetic"].append(arithmetic_share(case))
            out.write_text(json.dumps(result | dict(table=growth_text(result)), indent=1) + "\n")
    print(growth_text(result))
    return result

if __name__ == "__main__":
    run_from_command(run_growth_bench, __doc__, "bench_growth.json", only="cases with this in their name")
