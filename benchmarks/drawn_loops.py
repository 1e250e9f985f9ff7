"""Training loops that nobody chose: a seed draws task, network, optimizer, schedule, form of the step, data and shape.

    python -m benchmarks.drawn_loops --seeds 0:50              # healthy runs and ruined ones, a line each
    python -m benchmarks.drawn_loops --seeds 7:8 --show run    # the loop as a script, with its lines for a Governor

A drawn loop is text, as a user writes it: `write` puts the parts of `drawn_parts` together, `played` executes it. Two
faults are drawn as well, and each goes through all ways to guard a loop. A draw that learns nothing when it is left
alone is not counted.
"""
import argparse
import ast
import copy
import json
import linecache
import logging
import math
import random
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import binomtest
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path: sys.path.insert(0, str(ROOT))

from benchmarks.drawn_parts import (
    CLIPS, EXTRAS, FORMATS, FORMS, IMPORTS, NETS, NOISES, OPTIMIZERS, SCHEDULES, SIZE, SOURCES, TASKS, Draw, Source,
    Task, draw, fill, indent)
from benchmarks.foreign_bench import digest, in_a_copy, verdict
from benchmarks.foreign_loops import RING, TRAIN, X, Y, counting_text

from esper_nb import Governor, GovernorStop

LIMIT = 150 # seconds a run
WAYS = ("watch", "run", "batches")


# --- what is written of a draw

def stored(text: str) -> set[str]:
    "The names that a text assigns to, outside of its functions, classes and comprehensions."
    tree, apart = ast.parse(text), (ast.FunctionDef, ast.ClassDef, ast.comprehension)
    inner = {n for d in ast.walk(tree) if isinstance(d, apart) for n in ast.walk(d)}
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)} - {
        n.id for n in inner if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}

class Owned(ast.NodeTransformer):
    "Names as attributes."
    def __init__(self, names: set[str], owner: str = "self"): self.names, self.owner = names, owner
    def visit_Name(self, node):
        return ast.Attribute(ast.Name(self.owner), node.id, node.ctx) if node.id in self.names else node

def owned(text: str, names: set[str], owner: str = "self") -> str:
    "A text whose names belong to an object."
    return ast.unparse(ast.fix_missing_locations(Owned(names, owner).visit(ast.parse(text))))

def write(d: Draw, way: str | None = None) -> str:
    "The script of a draw; `way` is how a Governor guards it."
    task, net, source = TASKS[d.task], NETS[d.net], SOURCES[d.source]
    extras = [EXTRAS[e] for e in d.extras]
    tensors, other, scaled = "tensors" in net.tags, "other = " in OPTIMIZERS[d.optimizer], d.form == "scaled"
    params = "list(weights.values())" if tensors else "net.parameters()"
    if "frozen" in d.net: params = "[p for p in net.parameters() if p.requires_grad]"
    if d.task == "variational": params = f"[*{params.removeprefix('list')}, *decoder.parameters()]"
    opts = [*(["opt"] if "hand" not in d.form else []), *(["other"] if other else [])]
    clock = SCHEDULES[d.schedule]
    ticks = "" if not clock else "clock.step(loss.item())" if d.schedule == "plateau" else "clock.step()"
    _, made, read = FORMATS[d.format]
    values = dict(
        P=params, OUT=str(task.out), SIZE=str(SIZE), MADE=made, TEST=task.test, CLOCK=ticks,
        UPDATES=str(d.steps // 3 if d.form == "accumulated" else d.steps), CLIP=CLIPS[d.clip],
        LOSS=task.loss, FLOSS=task.loss.replace("net(", "out_of("), ZERO="\n".join(f"{o}.zero_grad()" for o in opts),
        STEP="\n".join([*(f"{o}.step()" for o in opts), ticks]), MINE="", EVAL="" if tensors else "net.eval()",
        TRAIN="" if tensors else "net.train()")
    text = net.text
    if "Sparse" in d.optimizer: text = text.replace("nn.Embedding(8, 16)", "nn.Embedding(8, 16, sparse=True)")
    optimizer = OPTIMIZERS[d.optimizer]
    setup = [text, task.setup, optimizer if optimizer.startswith("momenta") else f"opt = {optimizer}" if opts else "",
             f"clock = {clock}" if clock else "", "scaler = torch.amp.GradScaler('cpu', init_scale=256.)" * scaled,
             "micro = 0" if d.form == "accumulated" else "", "norms = []" if d.clip == "logged norm" else "",
             NOISES[d.noise][0], *(e.setup for e in extras)]
    parts = ["*weights.values()" if tensors else "net", *opts, *(["clock"] if clock else [])]
    more = [*(["scaler"] if scaled else []), *(["*momenta"] if "momenta" in optimizer else []),
            *(n for n in task.state if n not in ("baseline", "at")), *(n for e in extras for n in e.parts)]
    if not d.forgets or way == "watch": parts = [*parts, *more]
    state = list(dict.fromkeys((
        "weights" if tensors else "net", *opts, *(["clock"] if clock else []), *(m.strip("*") for m in more),
        *(n for e in extras for n in e.state), *(["draw"] if NOISES[d.noise][0] else []),
        *(["micro"] if d.form == "accumulated" else []), *(n for n in ("baseline", "at") if n in task.state))))
    before = "k = torch.randint(len(X), ($SIZE,))\nx, y = X[k], Y[k]" if d.source == "drawn in the step" else read
    clean = "clean = x" * ("clean" in task.loss)
    core = [before, clean, NOISES[d.noise][1], (task.core or FORMS[d.form]).strip("\n"), task.more]
    def joined(lines): return "\n".join(s for s in (fill(x, **values) for x in lines) if s.strip())
    ready = f"ready(net=net, params=list({params}), opts=[{', '.join(opts)}], clock={'clock' if clock else None}"
    if d.task == "variational": ready += ", decoder=decoder"
    setup = joined([*setup, ready + ")"])
    return laid_out(d, way, setup, joined(core), [joined([e.body]) for e in extras if e.body],
                    joined([FORMATS[d.format][0], source.setup]), joined([e.epoch for e in extras if e.epoch]),
                    (parts, state))

def laid_out(d: Draw, way, setup: str, core: str, after: list[str], data: str, epoch: str, kept) -> str:
    "The lines of a script in their order; names of what is handed over, and of what is compared in the end."
    parts, state = kept
    source, names, me = SOURCES[d.source], stored(setup), ""
    whole = "\n".join([core, *after])
    word = "global" if d.module else "nonlocal"
    def function(name, args, text, ends=""):
        mine = sorted(stored(text) & names)
        return f"def {name}({args}):\n" + indent("\n".join(s for s in (
            f"{word} {', '.join(mine)}" if mine else "", text, ends) if s))
    lines, call = [data, setup], ""
    if d.shape == "trainer class":
        me = "trainer."
        method = f"def train_step(self, batch):\n{indent(owned(whole, names))}\n    return loss"
        lines = [data, f"class Trainer:\n    def __init__(self):\n{indent(owned(setup, names), 2)}\n{indent(method)}\n"
                       f"trainer = Trainer()"]
        call = "trainer.train_step"
    elif d.shape == "callbacks":
        lines += [function(f"after_{i}", "loss", text) for i, text in enumerate(after)]
        lines += [f"callbacks = [{', '.join(f'after_{i}' for i in range(len(after)))}]",
                  function("train_step", "batch", core, "for f in callbacks: f(loss)\nreturn loss")]
        call = "train_step"
    elif d.shape == "step function" or way == "run":
        lines += [function("train_step", "batch", whole, "return loss")]
        call = "train_step"
    if me and epoch: epoch = owned(epoch, names, "trainer")
    if way:
        told = f", chance_loss={TASKS[d.task].chance:.4f}" if d.chance and TASKS[d.task].chance else ""
        handed = [("*" + me + p[1:]) if p.startswith("*") else me + p for p in parts]
        lines.append(f"governor = Governor({', '.join(handed)}{told})\nwatched(governor)")
    body = f"governor.run({call}, batch)" if way == "run" else f"loss = {call}(batch)" if call else whole
    if way in ("watch", "batches"): body += "\ngovernor.watch(loss)"
    lines.append(the_loop(d, way, source, body, epoch))
    lines.append("done(" + ", ".join(f"{s}={me}{s}" for s in state) + ")")
    text = "\n".join(x for x in lines if x)
    return text + "\n" if d.module else f"def main():\n{indent(text)}\n\nmain()\n"

def the_loop(d: Draw, way, source: Source, body: str, epoch: str) -> str:
    "The loop itself."
    feed = f"spoil({source.feed})"
    def guarded(it): return f"governor.batches({it})" if way == "batches" else it
    if source.endless and d.shape == "while" and way != "batches":
        return f"feed, i = iter({feed}), 0\nwhile i < {d.steps}:\n    batch = next(feed)\n{indent(body)}\n    i += 1"
    if source.endless: return f"for batch in {guarded(f'itertools.islice({feed}, {d.steps})')}:\n{indent(body)}"
    epochs = math.ceil(d.steps / math.ceil(TRAIN / SIZE))
    start = f"for epoch in range({epochs}):\n" + (indent(epoch) + "\n" if epoch else "")
    return f"{start}    for batch in {guarded(feed)}:\n{indent(body, 2)}"


# --- faults

class Spoil:
    "Hands batches on, and does something to them or to the run when its time has come."
    def __init__(self, fault: str | None, at: int, seed: int):
        self.fault, self.at, self.seen, self.rng = fault, at, 0, random.Random(f"fault {seed}")
        self.found: dict[str, Any] = {}
        self.undo: list = [] # what is called before the next batch

    def __call__(self, feed):
        if self.fault is None: return feed
        return self.hand_on(feed)

    def hand_on(self, feed):
        for batch in feed:
            k, self.seen = self.seen - self.at, self.seen + 1
            while self.undo: self.undo.pop()()
            yield FAULTS[self.fault].do(self, k, batch)

    def matrix(self) -> Tensor:
        return self.rng.choice([p.data for p in self.found["params"] if p.ndim > 1])

def with_fields(batch, **new):
    "A batch of any format with other contents."
    if isinstance(batch, tuple): return new.get("x", batch[0]), new.get("y", batch[1])
    if isinstance(batch, dict): return batch | new
    made = copy.copy(batch)
    for name, value in new.items(): setattr(made, name, value)
    return made

def field(batch, name: str) -> Tensor:
    if isinstance(batch, tuple): return batch[name == "y"]
    return batch[name] if isinstance(batch, dict) else getattr(batch, name)

def nan_in_batch(spoil, k, batch):
    if k != 0: return batch
    x = field(batch, "x").clone()
    x[3] = math.nan
    return with_fields(batch, x=x)

def huge_batch(spoil, k, batch): return with_fields(batch, x=field(batch, "x") * 1e4) if k == 0 else batch

def wrong_labels(spoil, k, batch):
    y = field(batch, "y")
    if y.is_floating_point(): return with_fields(batch, y=y * 1e3) if 0 <= k < 3 else batch
    return with_fields(batch, y=y.flip(0).roll(k, 0)) if 0 <= k < 25 else batch

def rates(spoil) -> list[tuple[Any, Any]]:
    "Where the learning rates of a run are: a container and a key."
    names = ("lr", "initial_lr", "max_lr", "min_lr")
    found = [(g, k) for o in spoil.found["opts"] for g in o.param_groups for k in names if k in g]
    clocks = [spoil.found["clock"], *getattr(spoil.found["clock"], "_schedulers", [])]
    return found + [(c.base_lrs, i) for c in clocks for i in range(len(getattr(c, "base_lrs", [])))]

def too_fast(steps: int | None):
    def fault(spoil, k, batch):
        if k == 0:
            spoil.before = [(at, key, copy.deepcopy(at[key])) for at, key in rates(spoil)]
            for at, key in rates(spoil): at[key] = at[key] * 300
        elif k == steps:
            for at, key, was in spoil.before: at[key] = was
        return batch
    return fault

def once(act):
    "A fault that is done to the run, before the step."
    def fault(spoil, k, batch):
        if k == 0: act(spoil)
        return batch
    return fault

def moments(spoil) -> list[Tensor]:
    return [v for o in spoil.found["opts"] for s in o.state.values() for v in s.values()
            if isinstance(v, Tensor) and v.ndim and v.is_floating_point()]

def moments_are(value: float | None):
    def act(spoil):
        for m in moments(spoil): m.mul_(1e4) if value is None else m.view(-1)[:1].fill_(value)
    return once(act)

def steep(spoil):
    hooks = [p.register_hook(lambda g: g * 1e6) for p in spoil.found["params"] if p.requires_grad]
    spoil.undo += [h.remove for h in hooks]

def ruined_norm(spoil):
    for name, b in spoil.found["net"].named_buffers():
        if name.endswith("running_var"): b.mul_(1e-8)

class Fault(NamedTuple):
    "What goes wrong, which causes are true of it, and which draws can have it."
    do: Any
    true: tuple[str, ...]
    can: Any = lambda d: True

def has_floats(d): return TASKS[d.task].data in ("pictures", "table") and d.source != "drawn in the step"
def has_labels(d): return d.source != "drawn in the step" and d.task not in ("autoencoder", "variational", "GAN",
                                                                             "momentum queue")
def has_optimizer(d): return "hand" not in d.form
def has_moments(d): return has_optimizer(d) and d.optimizer not in ("SGD", "LBFGS", "SparseAdam", "Rprop", "Adafactor")
OUTSIDE, RATE = ("external",), ("rate", "lr_too_high")
FAULTS: dict[str, Fault] = {
    "NaN in a batch": Fault(nan_in_batch, ("data",), has_floats),
    "one batch × 1e4": Fault(huge_batch, ("data",), has_floats),
    "wrong labels": Fault(wrong_labels, ("data",), has_labels),
    "rate × 300 for good": Fault(too_fast(None), RATE, has_optimizer),
    "rate × 300, 5 steps": Fault(too_fast(5), RATE, has_optimizer),
    "a layer × 1000": Fault(once(lambda s: s.matrix().mul_(1000)), OUTSIDE),
    "a layer turned around": Fault(once(lambda s: s.matrix().neg_()), OUTSIDE),
    "a layer NaN": Fault(once(lambda s: s.matrix().fill_(math.nan)), OUTSIDE),
    "moments × 1e4": Fault(moments_are(None), (*OUTSIDE, "moments"), has_moments),
    "moments NaN": Fault(moments_are(math.nan), (*OUTSIDE, "moments"), has_moments),
    "a gradient × 1e6": Fault(once(steep), ("step", "external", "inputs", "gradient_spike"),
                              lambda d: d.form != "functional"),
    "a ruined variance": Fault(once(ruined_norm), OUTSIDE, lambda d: "norm" in NETS[d.net].tags.split()),
}

def faults_of(d: Draw, n: int = 1) -> list[str]:
    "Some faults that a draw can have."
    return random.Random(f"faults {d.seed}").sample([k for k, f in FAULTS.items() if f.can(d)], n)


# --- a run

class Hangs(BaseException): "A run takes too long."

def hangs(*_): raise Hangs

class Heard(logging.Handler):
    "Warnings of the Governor."
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
    def emit(self, record): self.lines.append(record.getMessage())

def data_of(task: Task) -> dict[str, Tensor]:
    "Pictures, a table, text, or points on a ring: always the same ones."
    g = torch.Generator().manual_seed(7)
    if task.data == "text":
        text = counting_text(13, 1800, g)
        x, y = text[:, :-1], text[:, 1:]
    elif task.data == "table":
        x = torch.randn(1800, 64, generator=g)
        y = torch.stack([x[:, 0] + (2 * x[:, 1]).sin(), x[:, 2] * x[:, 3].sign()], 1)
        y = y + .05 * torch.randn(y.shape, generator=g)
    elif task.data == "ring":
        y = torch.randint(8, (1800,), generator=g)
        x = RING[y] + .05 * torch.randn(1800, 2, generator=g)
    else: x, y = X, Y
    noise = torch.randn(256, 64, generator=g)
    return dict(X=x[:TRAIN], Y=y[:TRAIN], TX=x[TRAIN:], TY=y[TRAIN:], NOISE=noise, RING=RING)

def plain(state: dict) -> dict:
    "Generators as the tensors of their states."
    return {k: v.get_state() if isinstance(v, torch.Generator) else v for k, v in state.items()}

def measured(test: str, space: dict) -> float:
    "A loss on data that are never trained on."
    net, kept = space["net"], torch.get_rng_state()
    if hasattr(net, "eval"): net.eval()
    with torch.no_grad(): found = float(eval(test, space))
    if hasattr(net, "train"): net.train()
    torch.set_rng_state(kept)
    return found

def played(d: Draw, way: str | None = None, fault: str | None = None, seed: int | None = None) -> dict:
    "How a run of a draw ends."
    seed = d.seed if seed is None else seed
    random.seed(seed), np.random.seed(seed % 2**32), torch.manual_seed(seed)
    spoil, heard, kept, text = Spoil(fault, d.at, d.seed), Heard(), {}, write(d, way)
    test, governors = TASKS[d.task].test, []
    def ready(**found):
        spoil.found = found
        if "first" not in kept: kept["first"] = measured(test, space | found)
    space: dict[str, Any] = dict(data_of(TASKS[d.task]), seed=seed, Governor=Governor, spoil=spoil, ready=ready,
                                 done=lambda **state: kept.update(state=digest(plain(state))), watched=governors.append,
                                 __name__="__main__")
    name = f"<drawn {d.seed} {way}>"
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    log, row = logging.getLogger("esper_nb"), dict(ended="", where="")
    log.handlers, log.propagate = [heard], False
    signal.signal(signal.SIGALRM, hangs)
    signal.alarm(LIMIT)
    start = time.process_time()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            exec(IMPORTS, space)
            exec(compile(text, name, "exec"), space)
            if governors: governors[0].close()
        except GovernorStop as e: row |= dict(ended="stopped", why=str(e)[:200])
        except Hangs: row |= dict(ended="hangs", where=traceback.format_exc()[-1500:])
        except Exception as e:
            at = traceback.extract_tb(e.__traceback__)[-1].filename
            row |= dict(ended=f"{type(e).__name__}: {str(e)[:150]}", where="own" if "drawn" in at else
                        "Governor" if "esper_nb" in at else "torch", trace=traceback.format_exc()[-2500:])
        signal.alarm(0)
    row |= dict(seconds=time.process_time() - start, state=kept.get("state"), first=kept.get("first", math.nan),
                score=measured(test, space | spoil.found) if spoil.found else math.nan, log=heard.lines,
                warned=sorted({f"{w.category.__name__}: {w.message}" for w in said}), reports=[], causes=[], notes=[],
                streams=digest((torch.get_rng_state(), np.random.get_state(), random.getstate())))
    if governors: row |= dict(
        reports=[str(r) for r in governors[0].reports], notes=[str(r) for r in governors[0].notes],
        remarks=list(governors[0].log.remarks), causes=[r.cause for r in governors[0].reports if r.cause])
    return row

def alone(d: Draw) -> dict: # with `slack`, and whether it learns
    "A draw without a Governor: with its own seed, and with three others, which say what is as good."
    rows = [in_a_copy(lambda: played(d))]
    first = rows[0]["first"]
    if rows[0]["score"] < .9 * first:
        rows += [in_a_copy(lambda seed=seed: played(d, seed=seed)) for seed in range(77_001, 77_004)]
    scores = [r["score"] for r in rows]
    slack = max(.02 * abs(first - float(np.mean(scores))), 3 * float(np.std(scores)))
    learns = len(rows) == 4 and not any(r["ended"] for r in rows) and max(scores) < .9 * first
    return rows[0] | dict(slack=slack, learns=bool(learns), scores=scores)

def judged_healthy(row: dict, clean: dict) -> list[str]: # empty: all is well
    "What a Governor changed or said in a run in which nothing was wrong."
    found = [k for k in ("state", "score", "streams", "ended") if row[k] != clean[k]]
    found += [f"acted: {r}" for r in row["reports"]] + [f"said: {s}" for s in row["log"]]
    return found + [f"warned: {w}" for w in row["warned"] if w not in clean["warned"]]

def judged_ruined(row: dict, clean: dict, bare: dict, fault: str) -> dict:
    "How a guarded run ends, beside a clean one and the same run alone."
    left = bare["score"] if not bare["ended"] else math.nan
    told = [c for c in row["causes"] if c not in ("unknown", "healthy", "earlier")]
    lie = any(c not in FAULTS[fault].true for c in told)
    return dict(verdict=verdict(clean["score"], clean["slack"], left,
                                row["score"] if row["ended"] in ("", "stopped") else math.nan),
                named="false" if lie else "true" if told else "unknown" if row["causes"] else "", **row)


def told(d: Draw, ways: list[str], faults: int = 2) -> dict: # all there is about a seed
    "Train a draw alone, guarded while nothing is wrong, and guarded with faults; a line each as it is done."
    def seen(way=None, fault=None): return in_a_copy(lambda: played(d, way, fault))
    clean = alone(d)
    row: dict = dict(draw=d._asdict(), learns=clean["learns"], scores=clean["scores"], slack=clean["slack"], healthy={},
                     ruined=[])
    print(f"{d.seed}: {clean['first']:.4f} → {clean['score']:.4f} ± {clean['slack']:.4f} {clean['ended']}  {d}",
          flush=True)
    if not clean["learns"]: return row
    for way in ways:
        guarded = seen(way)
        row["healthy"][way] = judged_healthy(guarded, clean)
        print(f"  healthy, {way}: {row['healthy'][way] or 'as alone'}", flush=True)
    for fault in faults_of(d, faults):
        bare = seen(None, fault)
        for way in ways:
            found = judged_ruined(seen(way, fault), clean, bare, fault)
            row["ruined"].append(dict(fault=fault, way=way, bare=bare["score"], bare_ended=bare["ended"], **found))
            print(f"  {fault}, {way}: {bare['score']:.4f} → {found['score']:.4f} {found['verdict']}, {found['causes']} "
                  f"{found['named']} {found['ended']} {found['where']}", flush=True)
    return row

def share(n: int, of: int) -> str:
    "A share with its 95 % interval."
    if not of: return "0 of 0"
    low, high = binomtest(n, of).proportion_ci(method="wilson")
    return f"{n} of {of} ({100 * n / of:.0f} [{100 * low:.0f}, {100 * high:.0f}] %)"

def table(rows: list[dict]) -> str:
    "What became of all runs, in Markdown."
    rows = [r for r in rows if r["learns"]]
    lines = ["| guarded by | healthy runs as alone, without a word | recovered, of those that a fault damages "
             "| made worse | ended by the guard | causes true, unknown, false |", "|---|---|---|---|---|---|"]
    for way in WAYS:
        healthy = [r["healthy"][way] for r in rows if way in r["healthy"]]
        mine = [x for r in rows for x in r["ruined"] if x["way"] == way]
        def count(key, value, mine=mine): return sum(x[key] == value for x in mine)
        ended = sum(bool(x["ended"] and not x["bare_ended"]) for x in mine)
        lines.append(f"| `{way}` | {share(sum(not h for h in healthy), len(healthy))} | "
                     f"{share(count('verdict', 'recovered'), len(mine) - count('verdict', 'harmless'))} | "
                     f"{share(count('verdict', 'worse'), len(mine))} | {ended} | "
                     f"{', '.join(str(count('named', k)) for k in ('true', 'unknown', 'false'))} |")
    return "\n".join(lines)

def store(path: Path, rows: list[dict], seeds: str):
    "Write what became of every run, without reports and logs."
    kept = ("fault", "way", "bare", "score", "verdict", "named", "ended")
    def plainly(v): return None if isinstance(v, float) and not math.isfinite(v) else v
    brief = [r | dict(scores=[plainly(s) for s in r["scores"]], slack=plainly(r["slack"]), ruined=[
        {k: plainly(x[k]) for k in kept} for x in r["ruined"]]) for r in rows]
    said = dict(seeds=seeds, drawn=len(rows), learn=sum(r["learns"] for r in rows), table=table(rows), rows=brief)
    path.write_text(json.dumps(said, separators=(",", ":"), ensure_ascii=False) + "\n", encoding="utf-8")

def main():
    "Read the command line, and print what was asked for."
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--seeds", default="0:10", help="A:B, up to B − 1")
    ask.add_argument("--show", choices=("alone", *WAYS), help="print the scripts and train nothing")
    ask.add_argument("--ways", default=",".join(WAYS), help="some of them, with commas")
    ask.add_argument("--json", type=Path, help="a file for the rows")
    args = ask.parse_args()
    first, last = map(int, args.seeds.split(":"))
    torch.set_num_threads(1)
    torch.optim.Adam([torch.zeros(1)]) # imports what every copy of the process would import
    draws, rows = [draw(seed) for seed in range(first, last)], []
    for d in draws:
        if args.show: print(f"# {d}", write(d, None if args.show == "alone" else args.show), sep="\n")
        else: rows.append(told(d, args.ways.split(",")))
        if args.json and rows: store(args.json, rows, args.seeds)
    if rows: print(table(rows))


if __name__ == "__main__": main()
