"""The loops and faults of loops.py in frameworks: does a Governor there do what `governor.run` does?

    python benchmarks/framework_loops.py --write      # nbs/explanations/bench_frameworks.json; an hour on one core
    python benchmarks/framework_loops.py vae memory   # one seed, every framework that is installed
    python benchmarks/framework_loops.py vae --arms run,batches,lightning --faults "NaN weight,dead layer" --seeds 2

A run counts as in foreign_bench.py. Its cause is right if it is one that the fault can have: what is written into
weights or moments comes from outside, a rate is a rate, targets and a huge batch are data, a sign is an input of the
step.
"""
import importlib
import importlib.util
import json
import logging
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
from torch.utils.data import DataLoader, IterableDataset

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path: sys.path.insert(0, str(ROOT))

from benchmarks.foreign_bench import verdict
from benchmarks.loops import BEYOND, FAULT_AT, FAULTS, LOOPS, STEPS, stream

from esper_nb.guard import (
    Governor, GovernorConfig, fastai_governor, guard_accelerator, guard_trainer, lightning_governor)

FIRST = 50_000 # a seed that no threshold was chosen on
QUIET = GovernorConfig(stop_raises=False)
RIGHT = {"NaN weight": {"external"}, "exponent flip": {"external"}, "dead layer": {"external"},
         "inf second moment": {"external"}, "garbage momentum": {"external"}, "rate × 30, 5 steps": {"rate"},
         "sign error, 20 steps": {"inputs", "step"}, "wrong targets, 50 steps": {"data"}, "one batch × 1e4": {"data"}}


IN_DATA = {"wrong targets, 50 steps", "one batch × 1e4"} # faults that are part of a batch

class Drawn(IterableDataset):
    "The batches of a loop; what ruins it comes with them, before a step and outside of it."
    def __init__(self, loop, fault, ahead=0): # batches that a framework draws before it trains on one
        self.loop, self.fault, self.ahead = loop, fault, 0 if fault in IN_DATA else ahead

    def __iter__(self):
        for i in range(STEPS):
            batch, at = self.loop.batch(i), i - self.ahead
            if self.fault and at >= FAULT_AT:
                batch = FAULTS[self.fault](self.loop, at - FAULT_AT, batch, stream(self.loop.seed, 3, at))
            yield batch


def signed(loop, batch):
    "The loss, whose gradient has the sign that a fault has chosen."
    loss = loop.loss(batch)
    return loss if loop.sign == 1 else 2 * loss.detach() - loss

def counted(loop):
    "Let the optimizer do what `Loop.step` does after its step: count, and let a target network follow."
    def after(*_):
        loop.count["taken"] += 1
        if hasattr(loop, "old") and loop.count["taken"] % 20 == 0: loop.old.load_state_dict(loop.net.state_dict())
    loop.opt.register_step_post_hook(after)

def loader(loop, fault): return DataLoader(Drawn(loop, fault, ahead=1), batch_size=None)

def given(loop): return dict(chance_loss=loop.chance, config=QUIET, count=loop.count)

def beside(loop):
    "What a framework's guard is told of, beside the framework's own parts."
    return dict(count=loop.count) | (dict(old=loop.old) if hasattr(loop, "old") else {})

def alone(loop, fault):
    for batch in Drawn(loop, fault): loop.step(batch)

def run(loop, fault):
    governor = Governor(*loop.parts(), **given(loop))
    for batch in Drawn(loop, fault): governor.run(loop.step, batch)
    return governor

def batches(loop, fault):
    governor = Governor(*loop.parts(), **given(loop))
    for batch in governor.batches(Drawn(loop, fault)):
        loss = signed(loop, batch)
        loop.opt.zero_grad()
        loss.backward()
        if loop.clip: torch.nn.utils.clip_grad_norm_(loop.net.parameters(), loop.clip)
        loop.opt.step()
        if loop.clock is not None: loop.clock.step()
        governor.watch(loss)
    return governor

def accelerate(loop, fault):
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    net, opt, data = accelerator.prepare(loop.net, loop.opt, loader(loop, fault))
    clock = [] if loop.clock is None else [loop.clock]
    governor = guard_accelerator(accelerator, net, opt, *clock, **given(loop) | beside(loop))
    for batch in governor.batches(data):
        loss = signed(loop, batch)
        opt.zero_grad()
        accelerator.backward(loss)
        if loop.clip: accelerator.clip_grad_norm_(loop.net.parameters(), loop.clip)
        opt.step()
        for c in clock: c.step()
        governor.watch(loss)
    return governor

def lightning(loop, fault):
    import lightning.pytorch as pl
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR) # its import has set another
    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = loop.net
        def configure_optimizers(self):
            if loop.clock is None: return loop.opt
            return dict(optimizer=loop.opt, lr_scheduler=dict(scheduler=loop.clock, interval="step"))
        def training_step(self, batch, i): return signed(loop, batch)
    callback = lightning_governor(loop.chance, QUIET, **beside(loop))
    pl.Trainer(max_epochs=1, accelerator="cpu", callbacks=[callback], gradient_clip_val=loop.clip, logger=False,
               enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
               default_root_dir=tempfile.mkdtemp()).fit(Module(), loader(loop, fault))
    return callback.governor

class Still(torch.optim.lr_scheduler.LRScheduler):
    "A schedule for a Trainer, which needs one: rates stay as they are, a fault's, too."
    def get_lr(self): return [g["lr"] for g in self.optimizer.param_groups]

def trainer(loop, fault):
    import transformers
    transformers.logging.set_verbosity_error()
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = loop.net
        def forward(self, batch): return dict(loss=signed(loop, batch))
    args = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=STEPS, per_device_train_batch_size=1, max_grad_norm=loop.clip,
        report_to=[], logging_strategy="no", save_strategy="no", use_cpu=True, disable_tqdm=True)
    clock = loop.clock or Still(loop.opt)
    data = Drawn(loop, fault, ahead=1)
    made = transformers.Trainer(model=Module(), args=args, train_dataset=data, optimizers=(loop.opt, clock),
                                data_collator=lambda rows: dict(batch=rows[0]))
    made.remove_callback(transformers.PrinterCallback)
    guard = guard_trainer(made, loop.chance, QUIET, **beside(loop))
    made.train()
    return guard.governor

class Counted(Drawn):
    "The same for fastai, which asks for a length, and trains only where a target comes with the inputs."
    def __len__(self): return STEPS
    def __iter__(self): return ((*batch, torch.zeros(())) for batch in super().__iter__())

def fastai(loop, fault):
    importlib.import_module("fastai.callback.progress") # gives a Learner `no_bar`
    from fastai.basics import Callback, DataLoaders, Learner, OptimWrapper
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = loop.net
        def forward(self, *batch): return signed(loop, batch)
    class Usual(Callback):
        def before_step(self):
            if loop.clip: torch.nn.utils.clip_grad_norm_(loop.net.parameters(), loop.clip)
        def after_step(self):
            if loop.clock is not None: loop.clock.step()
    clock = {} if loop.clock is None else dict(clock=loop.clock)
    callback = fastai_governor(loop.chance, QUIET, **beside(loop), **clock)
    data, rate = DataLoader(Counted(loop, fault), batch_size=None), loop.opt.param_groups[0]["lr"]
    data.n_inp = len(loop.batch(0))
    learn = Learner(DataLoaders(data, DataLoader([], batch_size=None)), Module(), loss_func=lambda loss, _: loss,
                    cbs=[Usual(), callback], opt_func=lambda params, **_: OptimWrapper(opt=loop.opt))
    with learn.no_bar(), learn.no_logging(): learn.fit(1, rate)
    return callback.governor


ARMS = dict(run=run, batches=batches, accelerate=accelerate, lightning=lightning, trainer=trainer, fastai=fastai)
NEEDS = dict(accelerate="accelerate", lightning="lightning", trainer="transformers", fastai="fastai")


def one(name, arm, seed, fault):
    "Score, actions with their causes, seconds."
    loop, start = LOOPS[name](seed), time.time()
    if arm not in ("alone", "run"): counted(loop)
    governor = alone(loop, fault) if arm == "alone" else ARMS[arm](loop, fault)
    acts = [] if governor is None else [(r.batch, r.action, r.cause) for r in governor.reports]
    return loop.score(), acts, time.time() - start


def main():
    "Every loop, fault, arm and seed."
    args = sys.argv[1:]
    def option(name, default): return args[args.index(name) + 1].split(",") if name in args else default
    names = [a for a in args if a in LOOPS] or list(LOOPS)
    arms = option("--arms", [a for a in ARMS if a not in NEEDS or importlib.util.find_spec(NEEDS[a])])
    said = ",".join(option("--faults", [f for f in FAULTS if f not in BEYOND]))
    faults = [f for f in FAULTS if f in said] # some names have a comma
    torch.set_num_threads(1)
    logging.getLogger("esper_nb").setLevel(logging.CRITICAL)
    rows = []
    for name in names:
        for seed in range(FIRST, FIRST + int(option("--seeds", ["1"])[0])):
            clean = one(name, "alone", seed, None)[0]
            slack = .02 * abs(LOOPS[name](seed).score() - clean)
            for fault in (None, *faults):
                bad = clean if fault is None else one(name, "alone", seed, fault)[0]
                for arm in arms:
                    with warnings.catch_warnings(action="ignore"): score, acts, seconds = one(name, arm, seed, fault)
                    causes = [c for _, _, c in acts if c]
                    rows.append(dict(loop=name, fault=fault, arm=arm, seed=seed, clean=clean, alone=bad, guarded=score,
                                     verdict=verdict(clean, slack, bad, score), acts=acts,
                                     right=bool(causes) and set(causes) <= RIGHT[fault] if fault else not acts))
                    print(f"{name:9s} {fault!s:24s} {arm:10s} {rows[-1]['verdict']:9s} clean {clean:.4g} alone "
                          f"{bad:.4g} guarded {score:.4g} {acts} {seconds:.0f} s", flush=True)
    for arm in arms:
        mine = [r for r in rows if r["arm"] == arm]
        spoilt = [r for r in mine if r["fault"] and r["acts"]]
        print(f"{arm:10s}", dict(Counter(r["verdict"] for r in mine if r["fault"])), f"causes right "
              f"{sum(r['right'] for r in spoilt)} of {len(spoilt)}; healthy runs bit-equal: "
              f"{sum(r['guarded'] == r['clean'] for r in mine if not r['fault'])} of "
              f"{sum(not r['fault'] for r in mine)}")
    if "--write" in args:
        path = ROOT/"nbs/explanations/bench_frameworks.json"
        def key(r): return r["loop"], r["fault"], r["arm"], r["seed"]
        new = set(map(key, rows))
        old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        rows = [r for r in old if key(r) not in new] + rows
        path.write_text(json.dumps(rows, separators=(",", ":"), ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__": main()
