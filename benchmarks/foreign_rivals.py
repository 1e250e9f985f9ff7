"""What guards a run in the benchmark of strangers: nothing, a Governor in two forms, and what others use.

A rule that only sounds an alarm gets what its users build around it at best: a checkpoint of all there is, every 50
steps while no alarm sounds, and a return to the latest one, batches going on, as long as it has five returns left.
Guards of gradients are used as their authors show it. ZClip is written here from the formula of its paper.
"""
import contextlib
import copy
import functools
import importlib
import importlib.util
import io
import logging
import math
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.detector_bench import SpikeDetection, llm_foundry

from esper_nb.guard.governor import Governor
from esper_nb.guard.reports import GovernorStop


class Ended(Exception): "A guard has ended the run."


def of_tuple(said):
    "The loss of what a step returns; None if it has skipped."
    return said[0] if isinstance(said, tuple) else said


class Alone:
    "No guard, and what a guard has to offer here."
    def __init__(self, parts, step: Callable[[Any], Any], chance: float | None):
        self.parts, self.step, self.acts = parts, step, []
    def train(self, batch): self.step(batch)
    def close(self): "Training is over."


class Watch(Alone):
    "A Governor that sees the losses, with the settings that it has from the start."
    knows_chance = True # it is told the loss of guessing
    def __init__(self, parts, step, chance):
        super().__init__(parts, step, chance)
        self.governor = Governor(*parts, chance_loss=chance if self.knows_chance else None)
        self.acts = self.governor.reports

    def train(self, batch):
        try: self.one(batch)
        except GovernorStop: raise Ended("stopped") from None

    def one(self, batch):
        loss = of_tuple(self.step(batch))
        if loss is not None: self.governor.watch(loss)

    def close(self): self.governor.close()


class Steps(Watch):
    "A Governor that is handed the step and its batches."
    def one(self, batch): self.governor.run(self.step, batch)


class Rule(Alone):
    "A rule over losses, with checkpoints around it."
    rule: Callable[[], Callable[[float], bool]]
    def __init__(self, parts, step, chance):
        super().__init__(parts, step, chance)
        self.sounds, self.seen, self.left = self.rule(), 0, 5
        self.saved = self.copy()

    def copy(self): return [copy.deepcopy(p.state_dict()) for p in self.parts]

    def train(self, batch):
        loss = of_tuple(self.step(batch))
        if loss is None: return
        self.seen += 1
        alarm = self.sounds(float(loss))
        if alarm and self.left:
            self.left -= 1
            self.acts.append(self.seen)
            for part, state in zip(self.parts, copy.deepcopy(self.saved)): part.load_state_dict(state)
        elif not alarm and self.seen % 50 == 0: self.saved = self.copy()

class KillLossSpike:
    "`detector_bench.llm_foundry`, a loss at a time."
    def __init__(self): self.losses = []

    def __call__(self, loss):
        self.losses.append(loss)
        # it looks back over five losses: asking it every fifth time finds all
        if math.isfinite(loss) and len(self.losses) % 5: return False
        alarm = bool(llm_foundry(np.array(self.losses[-400:])[:, None])[-5:].any())
        if alarm: self.losses = self.losses[:-5]
        return alarm

class Lightning(Rule):
    "Lightning's `SpikeDetection`."
    rule = SpikeDetection

class LLMFoundry(Rule):
    "llm-foundry's `KillLossSpike`."
    rule = KillLossSpike


class ZClip(Alone):
    """Clip gradients whose norm is far outside of its recent distribution, before every update.

    References
    ----------
    A. Kumar et al., "ZClip: Adaptive Spike Mitigation for LLM Pre-Training", 2025, arXiv 2504.02507, with the settings
    that it recommends: a decay of .97, a threshold of 2.5, 25 steps of warm-up, reciprocal clipping.
    """
    def __init__(self, parts, step, chance):
        super().__init__(parts, step, chance)
        for opt in parts:
            if isinstance(opt, torch.optim.Optimizer): opt.register_step_pre_hook(Clip(self.acts))

class ZClipRule:
    "ZClip: running mean and variance of the norm (.97), clipped above z = 2.5 to mean + 2.5²/z · σ, 25 to warm up."
    def __init__(self): self.first, self.mean, self.variance, self.z = [], 0., 0., None

    def __call__(self, norm): # the norm to clip to
        if len(self.first) < 25:
            self.first.append(norm)
            self.mean = sum(self.first) / len(self.first)
            self.variance = sum((x - self.mean)**2 for x in self.first) / len(self.first)
            return norm
        sigma = math.sqrt(self.variance) + 1e-12
        self.z = (norm - self.mean) / sigma
        kept = self.mean + 2.5**2 / self.z * sigma if self.z > 2.5 else norm
        self.mean = .97 * self.mean + .03 * kept
        self.variance = .97 * self.variance + .03 * (kept - self.mean)**2
        return kept

class Clip:
    "ZClip before the updates of one optimizer."
    def __init__(self, acts): self.acts, self.rule, self.seen = acts, ZClipRule(), 0

    def __call__(self, opt, args, options):
        grads = [p.grad for group in opt.param_groups for p in group["params"] if p.grad is not None]
        if not grads: return
        norm = nn.utils.get_total_norm(grads).item()
        kept = self.rule(norm)
        self.seen += 1
        if not kept < norm: return # NaN is not clipped
        for g in grads: g.mul_(kept / (norm + 1e-12))
        self.acts.append(self.seen)


class StabilityGuard(Alone):
    "`stabilityguard.GuardedOptimizer` around every optimizer, which skips an update that looks bad."
    def __init__(self, parts, step, chance):
        super().__init__(parts, step, chance)
        logging.getLogger("stabilityguard").setLevel(logging.CRITICAL)
        made = importlib.import_module("stabilityguard").GuardedOptimizer
        nets = [p for p in parts if isinstance(p, nn.Module)]
        self.guards = []
        for opt in parts:
            if not isinstance(opt, torch.optim.Optimizer): continue
            mine = {id(p) for group in opt.param_groups for p in group["params"]}
            net = next((n for n in nets if {id(p) for p in n.parameters()} & mine), nets[0])
            self.guards.append(made(opt, net, verbose=False, log_every=10**9, log_dir=tempfile.mkdtemp()))
            put_in_place(step, opt, self.guards[-1])

    def train(self, batch):
        before = self.skips
        with contextlib.redirect_stdout(io.StringIO()): self.step(batch)
        self.acts.extend([self.guards[0].step_count] * (self.skips - before))

    @property
    def skips(self) -> int: return sum(g.total_skips for g in self.guards)

    def close(self):
        for guard in self.guards: guard.close()

def put_in_place(step: Callable, old, new):
    "Let a step use another object, as if its author had written so: a cell of its closure or an attribute."
    if isinstance(step, functools.partial): return put_in_place(step.func, old, new)
    for cell in getattr(step, "__closure__", None) or ():
        if cell.cell_contents is old: cell.cell_contents = new
    owner = getattr(step, "__self__", step)
    for name, value in dict(vars(owner)).items():
        if value is old: setattr(owner, name, new)


class DetectAnomaly(Alone):
    "PyTorch's own search for gradients that are not finite: it ends the run and says where."
    def train(self, batch):
        try:
            with torch.autograd.detect_anomaly(): self.step(batch)
        except RuntimeError as e:
            if "nan values" not in str(e): raise
            self.acts.append(str(e))
            raise Ended(str(e)[:80]) from None


GUARDS: dict[str, type[Alone]] = dict(
    none=Alone, watch=Watch, run=Steps, stabilityguard=StabilityGuard, zclip=ZClip, lightning=Lightning,
    foundry=LLMFoundry, anomaly=DetectAnomaly)
OURS = ("watch", "run")
ARMS = tuple(k for k in GUARDS if k != "stabilityguard" or importlib.util.find_spec("stabilityguard"))
