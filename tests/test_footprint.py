"What a step reads beside its batch is found and replayed to the bit, or named in one right sentence."
import functools
import io
import itertools
import logging
import os
import random
import sys
import threading
import time
import types
from collections import deque
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from esper_nb.guard import footprint as page
from esper_nb.guard.causes import Replay, StepRecorder
from esper_nb.guard.footprint import (
    Distances, DryReplay, Footprint, StateWatch, batch_digest, bits_of, dry_replay, in_a_fork, names_in, owned_by_parts,
    tensors_of_parts)
from esper_nb.guard.snapshots import Snapshot

pytestmark = pytest.mark.usefixtures("one_thread")

CENTERS = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))

def batch(k):
    g = torch.Generator().manual_seed(k)
    y = torch.randint(0, 4, (16,), generator=g)
    return CENTERS[y] + torch.randn(16, 8, generator=g), y

def parts(seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(.1), nn.Linear(16, 4))
    return net, torch.optim.Adam(net.parameters(), 1e-2)

def update(net, opt, loss):
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.detach()

class Run:
    "A loop that is recorded as the Governor does it, with the footprint of its step as one more part."
    def __init__(self, step, net, opt, **more):
        self.step, self.count = step, 0
        self.snapshot = Snapshot(net, opt, **more)
        self.footprint = Footprint.of(step, self.snapshot.objects.values())
        self.snapshot.add(step=self.footprint)
        self.snapshot.take(0)
        self.recorder = StepRecorder(self.snapshot.objects.values())
        self.given, self.digests = [], []

    def train(self, xy):
        self.given.append(self.footprint.before_step())
        self.digests.append(batch_digest(xy))
        loss = self.recorder.run(self.step, xy, self.count)
        self.footprint.after_step()
        self.count += 1
        return loss

    def snap(self):
        assert self.snapshot.take(self.count).published
        self.recorder.forget(self.count)
        self.given, self.digests = [], []

    def marks(self):
        return {k: bits_of([t]) for k, t in tensors_of_parts(self.snapshot.objects).items()}

    def replay(self, fork=None):
        steps = list(self.recorder.steps)
        incident = self.recorder.incident_from(steps[0].number, self.snapshot)
        replay = Replay(incident)
        def run(i):
            self.footprint.give(self.given[i])
            return incident.steps[i].again()
        changed = [s.number for s, then in zip(steps, self.digests) if batch_digest(s.batch) != then]
        return dry_replay(begin=replay.begin, run=run, losses=[float(s.loss) for s in steps], marks=self.marks,
                          aside=lambda: replay, footprint=self.footprint, changed=changed, fork=fork)

# --- kinds of steps: each returns its step, and what the loop does before every step

counter = 0
box = types.SimpleNamespace(scale=1.)

def plain(net, opt):
    def step(xy): return update(net, opt, F.cross_entropy(net(xy[0]), xy[1]))
    return step

def closure_counter(net, opt):
    t = dict(i=0)
    def step(xy):
        t["i"] += 1
        return update(net, opt, F.cross_entropy(net(xy[0]), xy[1]) * (1 + t["i"] % 3))
    return step

def loop_counter(net, opt):
    t = dict(i=0)
    def step(xy): return update(net, opt, F.cross_entropy(net(xy[0]), xy[1]) * (1 + t["i"] % 3))
    def before(k): t["i"] = k
    return step, before

def global_counter(net, opt):
    def step(xy):
        global counter
        counter += 1
        return update(net, opt, F.cross_entropy(net(xy[0]), xy[1]) / counter)
    return step

def global_set_by_loop(net, opt):
    def step(xy): return update(net, opt, F.cross_entropy(net(xy[0]), xy[1]) * box.scale)
    def before(k): box.scale = 1 + k % 2
    return step, before

def nonlocal_counter(net, opt):
    i = 0
    def step(xy):
        nonlocal i
        i += 1
        return update(net, opt, F.cross_entropy(net(xy[0]), xy[1], label_smoothing=.01 * (i % 5)))
    return step

class Trainer:
    decay = .9
    def __init__(self, net, opt):
        self.net, self.opt, self.mean, self.seen = net, opt, None, []
    def penalty(self): return 1e-3 * sum(p.square().sum() for p in self.net.parameters()) * len(self.seen)
    def step(self, xy):
        loss = F.cross_entropy(self.net(xy[0]), xy[1])
        now = loss.item()
        self.mean = now if self.mean is None else self.decay * self.mean + (1 - self.decay) * now
        self.seen.append(now)
        return update(self.net, self.opt, loss / self.mean + self.penalty())

def bound_method(net, opt): return Trainer(net, opt).step

class CallMe(Trainer):
    __call__ = Trainer.step

def callable_object(net, opt): return CallMe(net, opt)

@dataclass
class Settings:
    power: float = 1.
    count: int = 0

def dataclass_attribute(net, opt):
    s = Settings()
    def step(xy):
        s.count += 1
        s.power *= .9
        return update(net, opt, F.cross_entropy(net(xy[0]), xy[1]) * (1 + s.power) + s.count)
    return step

def replay_buffer(net, opt):
    buffer = deque(maxlen=3)
    def step(xy):
        buffer.append(xy)
        x, y = (torch.cat(t) for t in zip(*buffer))
        return update(net, opt, F.cross_entropy(net(x), y))
    return step

def replay_buffer_of_loop(net, opt):
    buffer = deque(maxlen=200)
    buffer.extend(batch(1000 + k) for k in range(150))
    def step(xy):
        x, y = (torch.cat(t) for t in zip(*list(buffer)[-4:]))
        return update(net, opt, F.cross_entropy(net(x), y))
    def before(k): buffer.append(batch(2000 + k))
    return step, before

def torch_generator(net, opt):
    g = torch.Generator().manual_seed(5)
    def step(xy): return update(net, opt, F.cross_entropy(net(xy[0] + torch.randn(16, 8, generator=g)), xy[1]))
    return step

def numpy_generator(net, opt):
    rng = np.random.default_rng(5)
    def step(xy):
        order = torch.as_tensor(rng.permutation(16)[:8])
        return update(net, opt, F.cross_entropy(net(xy[0][order]), xy[1][order]))
    return step

def old_numpy_generator(net, opt):
    rng = np.random.RandomState(5)
    def step(xy): return update(net, opt, F.cross_entropy(net(xy[0] * rng.uniform(.5, 1.5)), xy[1]))
    return step

def python_generator(net, opt):
    draw = random.Random(3).random
    def step(xy): return update(net, opt, F.cross_entropy(net(xy[0] * draw()), xy[1]))
    return step

def generator_shared_with_loop(net, opt):
    g = torch.Generator().manual_seed(5)
    def step(xy): return update(net, opt, F.cross_entropy(net(xy[0] + torch.randn(16, 8, generator=g)), xy[1]))
    def before(k): torch.randn(k % 3, generator=g)
    return step, before

class Carried(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head, self.h = nn.GRUCell(8, 16), nn.Linear(16, 4), None
    def forward(self, x):
        self.h = self.cell(x, None if self.h is None else self.h.detach())
        return self.head(self.h)

def hidden_state(_, __):
    net = Carried()
    return plain(net, opt := torch.optim.Adam(net.parameters(), 1e-2)), None, net, opt

def mean_teacher(net, opt):
    teacher, _ = parts(1)
    def step(xy):
        with torch.no_grad(): aim = teacher(xy[0])
        loss = update(net, opt, F.cross_entropy(net(xy[0]), xy[1]) + F.mse_loss(net(xy[0]), aim))
        with torch.no_grad():
            for a, b in zip(teacher.parameters(), net.parameters()): a.lerp_(b, .1)
        return loss
    return step

def teacher_by_data(net, opt):
    teacher, _ = parts(1)
    def step(xy):
        aim = teacher(xy[0]).detach()
        loss = update(net, opt, F.cross_entropy(net(xy[0]), xy[1]) + F.mse_loss(net(xy[0]), aim))
        for a, b in zip(teacher.parameters(), net.parameters()): a.data.mul_(.9).add_(b.data, alpha=.1)
        return loss
    return step

def target_synced_by_loop(net, opt):
    target, _ = parts(1)
    def step(xy): return update(net, opt, F.mse_loss(net(xy[0]), target(xy[0]).detach()))
    def before(k):
        if k % 3 == 1: target.load_state_dict(net.state_dict())
    return step, before

def two_optimizers(net, opt):
    other, theirs = parts(1)
    clock = torch.optim.lr_scheduler.LambdaLR(theirs, lambda k: 1 / (1 + k))
    def step(xy):
        update(other, theirs, F.cross_entropy(other(xy[0]), xy[1]))
        clock.step()
        return update(net, opt, F.mse_loss(net(xy[0]), other(xy[0]).detach()))
    return step

def running_tensor(net, opt):
    mean = torch.ones(())
    def step(xy):
        loss = F.cross_entropy(net(xy[0]), xy[1])
        mean.mul_(.9).add_(.1 * loss.detach())
        return update(net, opt, loss / mean)
    return step

def numpy_state(net, opt):
    weights = np.ones(4, np.float32)
    def step(xy):
        weights[:] = .9 * weights + .1 * np.bincount(xy[1].numpy(), minlength=4)
        return update(net, opt, F.cross_entropy(net(xy[0]), xy[1], torch.tensor(weights)))
    return step

def by_partial(net, opt):
    def step(t, net, xy, opt):
        t["k"] = t.get("k", 0) + 1
        return update(net, opt, F.cross_entropy(net(xy[0]), xy[1]) * t["k"])
    return functools.partial(step, {}, net, opt=opt)

def no_extra_grad(step):
    @functools.wraps(step)
    def wrapped(*args):
        with torch.autograd.set_detect_anomaly(False): return step(*args)
    return wrapped

def decorated(net, opt): return no_extra_grad(closure_counter(net, opt))

def function_attribute(net, opt):
    def step(xy):
        step.count += 1
        return update(net, opt, F.cross_entropy(net(xy[0]), xy[1]) * step.count)
    step.count = 0
    return step

def progress_bar(net, opt):
    bar = tqdm(total=100, file=io.StringIO())
    def step(xy):
        bar.update()
        return update(net, opt, F.cross_entropy(net(xy[0]), xy[1]) * bar.n)
    return step

def logger(net, opt):
    log = logging.getLogger("of the test")
    def step(xy):
        loss = update(net, opt, F.cross_entropy(net(xy[0]), xy[1]))
        log.warning("loss %s", loss)
        return loss
    return step

def numpy_scheduled(net, opt):
    rates = np.linspace(1e-2, 1e-3, 100)
    at = itertools.cycle([0])
    del at
    k = [0]
    def step(xy):
        opt.param_groups[0]["lr"] = rates[k[0]]
        k[0] += 1
        return update(net, opt, F.cross_entropy(net(xy[0]), xy[1]))
    return step

class Counted:
    total = 0

def class_attribute(net, opt):
    def step(xy):
        Counted.total += 1
        return update(net, opt, F.cross_entropy(net(xy[0]), xy[1]) * Counted.total)
    return step

class Slotted:
    __slots__ = ("k",)
    def __init__(self): self.k = 1
    def more(self): self.k += 1

def slots(net, opt):
    s = Slotted()
    def step(xy):
        s.more()
        return update(net, opt, F.cross_entropy(net(xy[0]), xy[1]) * s.k)
    return step

EXACT = [plain, closure_counter, loop_counter, global_counter, global_set_by_loop, nonlocal_counter, bound_method,
         callable_object, dataclass_attribute, replay_buffer, replay_buffer_of_loop, torch_generator, numpy_generator,
         old_numpy_generator, python_generator, generator_shared_with_loop, hidden_state, mean_teacher, teacher_by_data,
         target_synced_by_loop, two_optimizers, running_tensor, numpy_state, by_partial, decorated, function_attribute,
         progress_bar, logger, numpy_scheduled, class_attribute, slots]

def made(kind):
    "Return step, what the loop does before a step, and the parts that are handed over."
    net, opt = parts()
    out = kind(net, opt)
    if not isinstance(out, tuple): return out, None, net, opt
    return (*out, net, opt)[:4] if len(out) == 2 else out

def trained(kind, steps=2, later=0):
    step, before, net, opt = made(kind)
    run = Run(step, net, opt)
    for k in range(steps + later):
        if later and k == later: run.snap()
        if before is not None: before(k)
        run.train(batch(k))
    return run

@pytest.mark.parametrize("kind", EXACT, ids=lambda f: f.__name__)
@pytest.mark.parametrize("fork", [True, False], ids=["forked", "in place"])
@pytest.mark.parametrize("later", [0, 7], ids=["at first", "later"])
def test_a_step_that_is_recorded_is_replayed_to_the_bit(kind, fork, later):
    run = trained(kind, steps=3 if later else 2, later=later)
    then = run.marks()
    found = run.replay(fork)
    assert found.exact and found.to_the_bit and found.forked == fork, (found, run.footprint.describe())
    assert found.again == found.losses
    assert run.marks() == then

# --- what cannot be recorded is named

def environment(net, opt):
    env = gym.make("CartPole-v1")
    env.reset(seed=0)
    def step(xy):
        env.step(0)
        return update(net, opt, F.cross_entropy(net(xy[0]), xy[1]))
    return step

def open_file(net, opt):
    log = open(os.devnull, "w") # noqa: SIM115
    def step(xy):
        loss = update(net, opt, F.cross_entropy(net(xy[0]), xy[1]))
        log.write(f"{loss}\n")
        return loss
    return step

def loader_inside(net, opt):
    data = iter(DataLoader(TensorDataset(*batch(0)), batch_size=4, shuffle=True))
    def step(_):
        x, y = next(data)
        return update(net, opt, F.cross_entropy(net(x), y))
    return step

def count_iterator(net, opt):
    k = itertools.count(1)
    def step(xy): return update(net, opt, F.cross_entropy(net(xy[0]), xy[1]) * next(k))
    return step

def generator_function(net, opt):
    class Feed:
        def __init__(self): self.batches = (batch(k) for k in itertools.count())
        def take(self): return next(self.batches)
    feed = Feed()
    def step(_):
        x, y = feed.take()
        return update(net, opt, F.cross_entropy(net(x), y))
    return step

def system_random(net, opt):
    rng = random.SystemRandom()
    def step(xy): return update(net, opt, F.cross_entropy(net(xy[0]), xy[1]) * rng.random())
    return step

def entropy(net, opt):
    def step(xy): return update(net, opt, F.cross_entropy(net(xy[0]), xy[1]) * (1 + os.urandom(8)[0]))
    return step

def clock(net, opt):
    def step(xy): return update(net, opt, F.cross_entropy(net(xy[0]), xy[1]) * time.perf_counter())
    return step

def fresh_generator(net, opt):
    def step(xy): return update(net, opt, F.cross_entropy(net(xy[0]), xy[1]) * np.random.default_rng().random())
    return step

HIDDEN = types.ModuleType("hidden_library")
exec("""
class Augment:
    def __init__(self): self.inner = [0]
    def __call__(self, x):
        self.inner[0] += 1
        return x * (1 + self.inner[0])
    def pop(self):
        return self.left.pop()
""", vars(HIDDEN))

@pytest.fixture
def library(monkeypatch, tmp_path):
    "A module that is no code of the user."
    HIDDEN.__file__ = str(tmp_path/"site-packages"/"hidden_library.py")
    monkeypatch.setitem(sys.modules, "hidden_library", HIDDEN)
    page.is_own_module.cache_clear()

def hidden_in_library(net, opt):
    augment = HIDDEN.Augment()
    def step(xy): return update(net, opt, F.cross_entropy(net(augment(xy[0])), xy[1]))
    return step

def fails_again(net, opt):
    augment = HIDDEN.Augment()
    augment.left = [1., 2.]
    def step(xy): return update(net, opt, F.cross_entropy(net(xy[0]), xy[1]) * augment.pop())
    return step

TIMES = "comes to another result each time"
NAMED = [(environment, "`env` (an environment)", ""), (open_file, "`log` (an open file)", ""),
         (loader_inside, "`data` (an iterator)", ""), (count_iterator, "`k` (an iterator)", ""),
         (generator_function, "`feed.batches` (an iterator)", ""),
         (system_random, "`rng` (random numbers of the operating system)", ""),
         (entropy, TIMES, "the device does not repeat sums"), (clock, TIMES, "the device does not repeat sums"),
         (fresh_generator, TIMES, "the device does not repeat sums"),
         (hidden_in_library, "keeps a state that I do not have (perhaps in `augment` (a Augment))", ""),
         (fails_again, "fails when it is run again: IndexError", "")]

@pytest.mark.parametrize("kind, said, in_place", NAMED, ids=lambda f: getattr(f, "__name__", ""))
@pytest.mark.parametrize("fork", [True, False], ids=["forked", "in place"])
@pytest.mark.usefixtures("library")
def test_what_cannot_be_recorded_is_named(kind, said, in_place, fork):
    run = trained(kind)
    then = run.marks(), torch.get_rng_state(), [p.grad.clone() for p in run.snapshot.objects["model"].parameters()]
    found = run.replay(fork)
    assert not found.exact and (said if fork or not in_place else in_place) in found.why, found
    assert found.why.count(".") <= 1 or "`" in found.why
    assert run.marks() == then[0] and torch.equal(torch.get_rng_state(), then[1])
    for p, g in zip(run.snapshot.objects["model"].parameters(), then[2]): assert torch.equal(p.grad, g)
