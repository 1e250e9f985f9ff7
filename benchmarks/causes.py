"""Twelve kinds of cause × three loops: does the Governor name what ruined a run, and the batch?

    python benchmarks/causes.py --write             # nbs/explanations/bench_causes.json
    python benchmarks/causes.py vae --seeds 1 --kinds "one bad batch"

A run is trained by `governor.run(step, batch)`; at step `AT` a fault begins. Where the Governor has not rolled back
`WAIT` steps later, it is rolled back by hand, as by a person who sees the loss, and then asked to explain. A fault
counts if it did harm: a held-out loss at that place above that of a clean run. In the clean run `governor.explain()` is
asked for at the same place: nothing was wrong. With `--trainscope`, what that says of the first seed's runs stands
beside it: which of its signals was first, and when.
"""
import asyncio
import functools
import json
import logging
import math
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path: sys.path.insert(0, str(ROOT))

from benchmarks import loops
from benchmarks.loops import ConvNet, SmallGPT, VAE, exponent_flip, garbage_momentum, nan_weight, stream

from esper_nb.guard.governor import Governor
from esper_nb.guard.reports import GovernorConfig

AT, WAIT, FIRST = 140, 40, 60_000

CONFIG = GovernorConfig(explain_steps=0, stop_raises=False) # asked for when the run is over, as all that is compared

class TinyGPT(SmallGPT): length = 24

LOOPS = dict(gpt=TinyGPT, convnet=ConvNet, vae=VAE)


# --- kinds: `outside` is called between two steps, `given` makes the batch, `inside` is called by the step itself, with
# the number of steps since the fault began

def bad_batch(loop, k, batch):
    if k != 0: return batch
    if isinstance(loop, SmallGPT): return batch[0], torch.full_like(batch[1], -100) # no target: 0 / 0
    return loop.scaled(batch, 1e4)

def wrong_targets(loop, k, batch): return loop.wrong_targets(batch, stream(loop.seed, 3, k)) if 0 <= k < 20 else batch

def sorted_examples(loop, k, batch):
    "Twenty batches of one class, then of the next."
    if k < 0: return batch
    x, y = loops.pictures()
    of = torch.nonzero(y[:1400] == k // 20 % 10)[:, 0]
    at = of[torch.randint(len(of), (loop.size,), generator=stream(loop.seed, 4, k))]
    if isinstance(loop, ConvNet): return x[at], y[at]
    return x[at].flatten(1), batch[1], x[at].flatten(1)

def rate_by_hand(loop, k):
    if k == 0:
        loop.boost = 30.
        if loop.clock is None: loop.opt.param_groups[0]["lr"] *= 30
        else: loop.clock.base_lrs = [30 * x for x in loop.clock.base_lrs]
    if k >= 0 and loop.clock is not None: loop.opt.param_groups[0]["lr"] = loop.clock.get_last_lr()[0] * 30

def other_setting(loop, k):
    if k == 0: loop.opt.param_groups[0].update(betas=(.9, .0), eps=1e-12, weight_decay=30.)

def corrupted(fault):
    def outside(loop, k): fault(loop, k, None, stream(loop.seed, 5))
    return outside

def rising_schedule(loop, k, step, batch):
    if k >= 0: loop.opt.param_groups[0]["lr"] *= 1.1**k if loop.clock is not None else 1.1
    return step(batch)

def wrong_sign(loop, k, step, batch):
    loop.sign = -1. if k >= 0 else 1.
    return step(batch)

def few_bits(loop, k, step, batch):
    "float16 from here on, with a layer inside which numbers are large: they overflow."
    if k < 0: return step(batch)
    layer = [m for m in loop.net.modules() if isinstance(m, nn.Linear)][-1]
    def larger(m, x): return (x[0] * 2.**15,)
    def smaller(m, x, out): return (out - m.bias) * 2.**-15 + m.bias
    hooks = [layer.register_forward_pre_hook(larger), layer.register_forward_hook(smaller)]
    try:
        with torch.autocast("cpu", torch.float16): return step(batch)
    finally:
        for h in hooks: h.remove()

def no_zero_grad(loop, k, step, batch):
    if k < 0: return step(batch)
    clear, loop.opt.zero_grad = loop.opt.zero_grad, lambda: None
    try: return step(batch)
    finally: loop.opt.zero_grad = clear

GIVEN = {"one bad batch": bad_batch, "wrong targets, 20 batches": wrong_targets, "sorted examples": sorted_examples}
OUTSIDE = {"rate × 30": rate_by_hand, "another setting": other_setting, "exponent flip": corrupted(exponent_flip),
           "NaN weight": corrupted(nan_weight), "garbage momentum": corrupted(garbage_momentum)}
INSIDE = {"rate + 10 % a step": rising_schedule, "sign error": wrong_sign, "float16 overflow": few_bits,
          "no zero_grad": no_zero_grad}
# causes that are right, and the batches it has to begin at, after AT
WANTED = {"one bad batch": ("data",), "wrong targets, 20 batches": ("data",), "sorted examples": ("order", "data"),
          "rate × 30": ("rate",), "another setting": ("settings",), "exponent flip": ("external",),
          "NaN weight": ("external",), "garbage momentum": ("external",), "rate + 10 % a step": ("rate",),
          "sign error": ("step",), "float16 overflow": ("precision",), "no zero_grad": ("gradients",)}
BATCHES = {"one bad batch": [AT], "wrong targets, 20 batches": list(range(AT, AT + 20))}
BEGIN = {"exponent flip": (AT, AT), "NaN weight": (AT, AT), "garbage momentum": (AT, AT + 1)}
KINDS = [*GIVEN, *OUTSIDE, *INSIDE]


def held_out(loop):
    "Loss on clean batches that are never trained on."
    with torch.no_grad(): return float(np.mean([loop.loss(loop.batch(10_000 + i)).item() for i in range(4)]))


def train(loop, kind, governor=None, each=None):
    "Run a loop until it is rolled back, or its time is over; (held-out loss before a rollback, steps)."
    own = loop.step
    def step(batch):
        k = loop.count["taken"] - AT
        loss = INSIDE[kind](loop, k, own, batch) if kind in INSIDE else own(batch)
        return loss
    losses = []
    for i in range(AT + WAIT):
        k = i - AT
        if kind in OUTSIDE: OUTSIDE[kind](loop, k)
        batch = loop.batch(i)
        if kind in GIVEN: batch = GIVEN[kind](loop, k, batch)
        loss = governor.run(step, batch) if governor else step(batch)
        losses.append(float(loss))
        if each is not None: each(i, losses[-1])
        if governor and governor.reports: break
    return losses


@functools.cache
def clean_run(name, seed):
    "What is said of a run without a fault; its held-out loss, and that before training."
    clean = LOOPS[name](seed)
    start = held_out(clean)
    governor = Governor(*clean.parts(), chance_loss=clean.chance, config=CONFIG, count=clean.count)
    train(clean, None, governor)
    good = held_out(clean)
    before = {k: v.clone() for k, v in clean.net.state_dict().items()}
    begun = time.process_time()
    e = governor.explain()
    seconds = time.process_time() - begun
    same = all(torch.equal(v, before[k]) for k, v in clean.net.state_dict().items())
    said = dict(loop=name, kind=None, seed=seed, cause=e.cause, right=e.cause == "healthy", exact=None, harm=0.,
                same=same, steps=e.steps, seconds=seconds, why=e.why, acted=bool(governor.reports),
                incident=e.last - e.first + 1, evidence=[str(x) for x in e.evidence])
    return said, good, start


def one(name, kind, seed):
    "One incident: what was said of it, and what it cost."
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    healthy, good, start = clean_run(name, seed)
    if kind is None: return healthy
    loop = LOOPS[name](seed)
    governor = Governor(*loop.parts(), chance_loss=loop.chance, config=CONFIG, count=loop.count)
    ruined = []
    restore = governor.snapshot.restore
    def seen(*args, **options): # how bad the weights are before a rollback
        ruined.append(held_out(loop))
        return restore(*args, **options)
    governor.snapshot.restore = seen
    begun = time.process_time()
    losses = train(loop, kind, governor)
    step_seconds = (time.process_time() - begun) / max(1, len(losses))
    acted = bool(governor.reports)
    if not acted: governor.rollback()
    harm = (ruined[0] - good) / (abs(start - good) + 1e-9)
    harmful = not math.isfinite(harm) or harm > .05
    begun = time.process_time()
    e = governor.explain()
    seconds = time.process_time() - begun
    exact = None
    if kind in BATCHES: exact = list(e.batches) == [b for b in BATCHES[kind] if b <= e.last]
    if kind in BEGIN: exact = e.begin is not None and BEGIN[kind][0] <= e.begin <= BEGIN[kind][1]
    return dict(loop=name, kind=kind, seed=seed, cause=e.cause, right=e.cause in WANTED[kind], exact=exact,
                harm=harm if math.isfinite(harm) else None, harmful=harmful, acted=acted, steps=e.steps,
                incident=e.last - e.first + 1, seconds=seconds, step_seconds=step_seconds, why=e.why,
                evidence=[str(x) for x in e.evidence])


def trainscope_says(name, kind, seed):
    "The label that the report of trainscope gives to the same run, and when it sees a signal; None: not installed."
    try:
        from trainscope import TrainScope
        from trainscope.core.config import TrainScopeConfig
        from trainscope.report import build_run_report
    except ImportError: return None
    logging.disable(logging.CRITICAL)
    loop = LOOPS[name](seed)
    with tempfile.TemporaryDirectory() as folder:
        config = TrainScopeConfig(run_dir=folder, run_name="run", track_memory=False)
        scope = TrainScope(loop.net, loop.opt, config=config).attach()
        start = time.process_time()
        train(loop, kind, each=lambda i, loss: scope.step(loss, batch_index=i))
        seconds = time.process_time() - start
        scope.detach()
        report = asyncio.run(build_run_report(next(p for p in Path(folder).iterdir() if p.is_dir())))
    found = report["signal_signature"]
    return dict(first=found["first"], steps=found["first_steps"], explosion=found["explosion_step"],
                spikes=report["spike_steps"], seconds=seconds)


def write(rows):
    "Store the rows beside the results of the other benchmarks."
    text = "[" + ",\n".join(json.dumps(r, separators=(",", ":"), ensure_ascii=False) for r in rows) + "]\n"
    (ROOT/"nbs/explanations/bench_causes.json").write_text(text, encoding="utf-8")


def main():
    "Every loop, kind and seed."
    args = sys.argv[1:]
    names = [a for a in args if a in LOOPS] or list(LOOPS)
    seeds = int(args[args.index("--seeds") + 1]) if "--seeds" in args else 10
    first = int(args[args.index("--first") + 1]) if "--first" in args else FIRST
    workers = int(args[args.index("--workers") + 1]) if "--workers" in args else 1
    kinds = args[args.index("--kinds") + 1].split(";") if "--kinds" in args else [None, *KINDS]
    start, rows = time.time(), []
    with ProcessPoolExecutor(workers) as pool:
        jobs = [pool.submit(one, n, k, first + s) for s in range(seeds) for n in names for k in kinds
                if (n, k) != ("gpt", "sorted examples")] # text has no classes
        for j in jobs:
            r = j.result()
            if r["seed"] == first and "--trainscope" in args:
                r["trainscope"] = trainscope_says(r["loop"], r["kind"], r["seed"])
            rows.append(r)
            if "--write" in args: write(rows)
            if not r["right"] or r["exact"] is False or "-v" in args:
                shown = "loop kind seed cause right exact harm acted steps seconds why evidence trainscope".split()
                print(*(f"{k}={r.get(k)}" for k in shown), sep=" | ", flush=True)
    for kind in kinds:
        mine = [r for r in rows if r["kind"] == kind]
        harmful = [r for r in mine if kind is None or r["harmful"]]
        right, exact = sum(r["right"] for r in harmful), [r["exact"] for r in harmful if r["exact"] is not None]
        steps, seconds = (np.median([r[k] for r in mine]) for k in ("steps", "seconds"))
        print(f"{kind!s:28s} right {right}/{len(harmful)} exact {sum(exact)}/{len(exact)} harmless "
              f"{len(mine) - len(harmful)} steps {steps:.0f} seconds {seconds:.2f}",
              dict(Counter(r["cause"] for r in mine)))
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__": main()
