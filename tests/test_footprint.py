"What a step reads beside its batch is found and replayed to the bit, or named in one right sentence."
import builtins
import csv
import functools
import importlib
import io
import itertools
import logging
import math
import os
import queue
import random
import sys
import threading
import time
import types
import warnings
import zlib
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

from esper_nb.guard import Governor
from esper_nb.guard import footprint as page, rehearsal, writes
from esper_nb.guard.footprint import Footprint, batch_digest, bits_of, names_in
from esper_nb.guard.recorder import StepRecorder
from esper_nb.guard.rehearsal import dry_replay, in_a_fork
from esper_nb.guard.replay import Replay
from esper_nb.guard.snapshots import Snapshot
from esper_nb.guard.writes import PIECE, PIECES, Distances, StateWatch, tensors_of_parts

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
        self.given = []

    def train(self, xy):
        self.given.append(self.footprint.before_step(self.step))
        loss = self.recorder.run(self.step, xy, self.count)
        self.footprint.after_step()
        self.count += 1
        return loss

    def snap(self):
        assert self.snapshot.take(self.count).published
        self.recorder.forget(self.count)
        self.given = []

    def marks(self):
        return {k: bits_of([t]) for k, t in tensors_of_parts(self.snapshot.objects).items()}

    def replay(self, fork=None):
        steps = list(self.recorder.steps)
        incident = self.recorder.incident_from(steps[0].number, self.snapshot)
        replay = Replay(incident)
        def run(i):
            self.footprint.give(self.given[i])
            return incident.steps[i].again()
        return dry_replay(begin=replay.begin, run=run, losses=[float(s.loss) for s in steps], marks=self.marks,
                          aside=lambda: replay, footprint=self.footprint, fork=fork,
                          changed=[what for s in steps if (what := s.changed())])

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

def loader_made_inside(net, opt):
    loader = DataLoader(TensorDataset(*batch(0)), batch_size=4, shuffle=True)
    def step(_):
        x, y = next(iter(loader))
        return update(net, opt, F.cross_entropy(net(x), y))
    return step

def old_gradients(net, opt):
    k = [0]
    def step(xy):
        loss = F.cross_entropy(net(xy[0]), xy[1])
        loss.backward()
        k[0] += 1
        if k[0] % 2: # a snapshot between the two steps of an update has no gradients
            opt.step()
            opt.zero_grad()
        return loss.detach()
    return step

def best_so_far(net, opt):
    best = dict(loss=np.inf, weights=None)
    def step(xy):
        loss = F.cross_entropy(net(xy[0]), xy[1])
        if loss < best["loss"]:
            best.update(loss=loss.item(), weights={k: v.clone() for k, v in net.state_dict().items()})
        pull = sum((p - best["weights"][k]).square().sum() for k, p in net.named_parameters())
        return update(net, opt, loss + pull)
    return step

EXACT = [plain, loader_made_inside, old_gradients, best_so_far, closure_counter, loop_counter, global_counter,
         global_set_by_loop, nonlocal_counter, bound_method, callable_object, dataclass_attribute,
         replay_buffer, replay_buffer_of_loop, torch_generator, numpy_generator, old_numpy_generator,
         python_generator, generator_shared_with_loop, hidden_state, mean_teacher, teacher_by_data,
         target_synced_by_loop, two_optimizers, running_tensor, numpy_state, by_partial, decorated,
         function_attribute, progress_bar, logger, numpy_scheduled, class_attribute, slots]

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

MIXED = [f for f in EXACT if f not in (hidden_state, old_gradients, numpy_scheduled)]

@pytest.mark.parametrize("seed", range(6))
def test_steps_with_several_kinds_of_state_are_replayed_to_the_bit(seed):
    "Each step runs some of them, in turn or by lot."
    rng = random.Random(seed)
    net, opt = parts(seed)
    made = [out if isinstance(out, tuple) else (out, None) for out in (f(net, opt) for f in rng.sample(MIXED, 4))]
    lot, turn = np.random.default_rng(seed), [0]
    def step(xy):
        turn[0] += 1
        which = made[turn[0] % 4][0] if seed % 2 else made[lot.integers(4)][0]
        return which(xy) + .5 * made[0][0](xy)
    run = Run(step, net, opt)
    for k in range(9):
        if k == 4: run.snap()
        for _, before in made:
            if before is not None: before(k)
        run.train(batch(k))
    found = run.replay(fork=bool(seed % 3))
    assert found.exact and len(found.again) == 5, (found, run.footprint.describe())

@pytest.mark.parametrize("kind", EXACT, ids=lambda f: f.__name__)
@pytest.mark.parametrize("fork, later", [(True, 0), (False, 7)], ids=["forked, at first", "in place, later"])
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
    log = open(os.devnull, "w")
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

def clock(net, opt): # a part of a second: seconds since the start may have too many digits for float32
    def step(xy): return update(net, opt, F.cross_entropy(net(xy[0]), xy[1]) * (1 + time.perf_counter() % 1))
    return step

def fresh_generator(net, opt):
    def step(xy): return update(net, opt, F.cross_entropy(net(xy[0]), xy[1]) * np.random.default_rng().random())
    return step

HIDDEN = types.ModuleType("hidden_library")
vars(HIDDEN).update(torch=torch, nn=nn)
exec("""
class Augment:
    def __init__(self): self.inner = [0]
    def __call__(self, x):
        self.inner[0] += 1
        return x * (1 + self.inner[0])
    def pop(self):
        return self.left.pop()

class Holding(nn.Module):
    def __init__(self, targets):
        super().__init__()
        self.layer, self._targets, self.calls = nn.Linear(8, 1), targets, 0
    def loss(self, x):
        self.calls += 1
        return (self.layer(x)[:, 0] - self._targets).square().mean() * (1 + self.calls % 3)

class Task:
    def __init__(self): self._scale, self.calls = torch.ones(()), 0
    def scaled(self, loss):
        self.calls += 1
        return loss * self._scale * (1 + self.calls % 3)

class Graph:
    def __init__(self, **found): self._found = found
    def __getitem__(self, name): return self._found[name]
    def __setitem__(self, name, value): self._found[name] = value

class Moments:
    __slots__ = ("sums", "counts", "calls")
    def __init__(self): self.sums, self.counts, self.calls = {}, {}, 0
    def __call__(self, name, grad):
        self.counts[name] = self.counts.get(name, 0) + 1
        self.sums[name] = .9 * self.sums[name] + grad if name in self.sums else grad
        self.calls += 1
        return self.sums[name] / self.counts[name] * (1 + self.calls % 3)
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

def inherited_by_module():
    "The user's model, whose library keeps the targets: the loop scales them."
    class Mine(HIDDEN.Holding): pass
    net = Mine(torch.ones(16))
    opt = torch.optim.Adam(net.parameters(), 1e-2)
    def step(xy): return update(net, opt, net.loss(xy[0]))
    return step, net, opt, lambda: net._targets.mul_(100.) # noqa: SLF001

def inherited_by_object():
    class Mine(HIDDEN.Task): pass
    (net, opt), task = parts(), Mine()
    def step(xy): return update(net, opt, task.scaled(F.cross_entropy(net(xy[0]), xy[1])))
    return step, net, opt, lambda: setattr(task, "_scale", torch.full((), 100.))

def graph_of_library():
    (net, opt), graph = parts(), HIDDEN.Graph(x=batch(0)[0], y=batch(0)[1])
    def step(_): return update(net, opt, F.cross_entropy(net(graph["x"]), graph["y"]))
    return step, net, opt, lambda: graph.__setitem__("x", graph["x"] * 100)

def moments_of_library():
    (net, _), moments = parts(), HIDDEN.Moments()
    def step(xy):
        loss = F.cross_entropy(net(xy[0]), xy[1])
        grads = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for (name, p), grad in zip(net.named_parameters(), grads): p.sub_(.1 * moments(name, grad))
        return loss.detach()
    return step, net, torch.optim.SGD(net.parameters(), .1), lambda: None

@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("kind", [inherited_by_module, inherited_by_object, graph_of_library, moments_of_library])
def test_what_a_librarys_code_keeps_in_sight_is_recorded_although_no_code_of_the_user_names_it(kind):
    step, net, opt, write = kind()
    run = Run(step, net, opt)
    for k in range(12):
        if k == 6: run.snap()
        if k == 9: write()
        run.train(batch(k))
    write()
    run.train(batch(12))
    found = run.replay(fork=False)
    assert found.exact, found

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

# --- what the walk finds

def found(step, *objects): return Footprint.of(step, objects).describe()

def test_what_was_handed_over_and_what_is_code_is_no_state():
    net, opt = parts()
    assert found(plain(net, opt), net, opt) == ""
    assert "`net`" in found(plain(net, opt), opt) and "`opt`" in found(plain(net, opt), net)

def test_names_of_inner_functions_and_of_methods_that_are_called_are_found():
    def outer(x):
        def inner(y): return y.shape[0] * counter
        return [inner(x) for _ in range(2)]
    assert names_in(outer.__code__) == ({"counter", "range"}, {"shape"})
    net, opt = parts()
    assert found(Trainer(net, opt).step, net, opt) == (
        "recorded with the state: `Trainer`, `self.mean`, `self.seen`")
    assert found(lambda x: helper(x)) == "recorded with the state: `counter`"

def helper(x): return x * counter

data = iter(()) # a variable that has the name of an attribute

def test_an_attribute_is_no_variable_of_that_name():
    assert found(lambda p: p.data.mul_(counter)) == "recorded with the state: `counter`"
    assert "`data` (an iterator)" in found(lambda p: next(data))

def chained(*nets): return itertools.chain(*[net.parameters() for net in nets])
def generated(*nets): yield from chained(*nets)

@pytest.mark.parametrize("make", [generated, pytest.param(chained, marks=pytest.mark.skipif(
    sys.version_info >= (3, 14), reason="a chain does not tell any more whether it has an end"))])
def test_an_iterator_that_is_used_up_needs_no_putting_back(make):
    "Parameters of two critics that an optimizer was made from, and that a step goes through, once more, in vain."
    nets = nn.Linear(2, 1), nn.Linear(2, 1)
    params = make(*nets)
    def step(x):
        for p in params: p.requires_grad_(False)
        return nets[0](x)
    assert "`params` (an iterator)" in found(step, *nets)
    torch.optim.SGD(params, .1)
    assert "cannot" not in found(step, *nets)

def test_a_rollback_past_the_end_of_an_epoch_leaves_its_closed_bar_closed():
    torch.manual_seed(0)
    net, done = nn.Linear(2, 1), 0
    opt = torch.optim.SGD(net.parameters(), lr=.01)
    governor = Governor(net, opt, chance_loss=None)
    for _ in range(4):
        with tqdm(total=20, file=io.StringIO(), mininterval=0) as bar:
            for x in governor.batches([torch.randn(8, 2) for _ in range(20)]):
                if done == 64 and not governor.replaying: net.weight.data[0, 0] = math.nan
                loss = (net(x) - 1).square().mean()
                opt.zero_grad(); loss.backward(); opt.step()
                governor.watch(loss)
                bar.update()
                done += 1
    assert done == 80 and [r.action for r in governor.reports] == ["rollback"]

def sparse_as(layout):
    "A graph of twelve nodes with loops, in one of torch's sparse layouts."
    graph = (torch.rand(12, 12, generator=torch.Generator().manual_seed(0)) < .2).float() + torch.eye(12)
    return graph.to_sparse(layout=layout)

SPARSE = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc]

@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", SPARSE)
@pytest.mark.parametrize("as_batch", [False, True])
def test_a_graph_of_any_layout_is_recorded_and_replayed(layout, as_batch):
    torch.manual_seed(0)
    graph, x, y = sparse_as(layout), torch.randn(12, 4), torch.randint(0, 3, (12,))
    net = nn.Linear(4, 3)
    opt = torch.optim.SGD(net.parameters(), lr=.1)
    governor = Governor(net, opt, chance_loss=math.log(3))
    def step(batch):
        loss = F.cross_entropy((batch if as_batch else graph) @ net(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
        return loss
    for t in range(40):
        if t == 30: net.weight.data[0, 0] = math.nan
        governor.run(step, graph if as_batch else None)
    assert [(r.reason, r.cause) for r in governor.reports] == [("non-finite", "external")]
    assert not governor.summary().remarks

@pytest.mark.parametrize("layout", SPARSE)
def test_a_sparse_tensor_is_put_back(layout):
    graph = sparse_as(layout)
    def step(x): return graph @ x
    found = Footprint.of(step)
    state, before = found.state_dict(), graph.to_dense()
    page.dense_parts(graph)[-1].mul_(2)
    assert found.state_dict() != state
    found.load_state_dict(state)
    assert torch.equal(graph.to_dense(), before)

def test_a_rollback_leaves_alone_what_the_loop_writes_and_restores_what_the_step_writes():
    class Job:
        def __init__(self): self.epoch, self.count, self.target = 0, 0, torch.zeros(2)
        def step(self, x):
            self.count += 1
            return self.epoch + self.count + self.target.sum() + options.get("a", 0)
    job, options = Job(), {}
    def step(x): return job.step(x)
    fp = Footprint.of(step)
    state = fp.state_dict()
    for k in range(3):
        job.epoch = k
        if k: options["a"] = k
        job.target += 1
        fp.before_step()
        step(None)
        fp.after_step()
    assert set(fp.by_loop) == {"job.epoch", "options['a']"}
    inputs = fp.inputs()
    fp.load_state_dict(state)
    assert (job.epoch, job.count, options, job.target.tolist()) == (0, 0, {}, [0., 0.])
    fp.give(inputs)
    assert (job.epoch, job.count, options, job.target.tolist()) == (2, 0, dict(a=2), [0., 0.])

def test_a_look_between_two_steps_does_not_hide_what_the_loop_has_written():
    t, h = dict(i=0), torch.zeros(2)
    own = [0]
    def step(x):
        own[0] += 1
        h.add_(1)
        return t["i"]
    fp = Footprint.of(step)
    fp.before_step()
    step(None)
    fp.after_step()
    good = fp.state_dict()
    t["i"] = 5
    h.mul_(3)
    live = fp.state_dict() # set aside, in the middle of the loop
    fp.load_state_dict(good)
    fp.give(None)
    step(None)
    fp.load_state_dict(live)
    assert (t["i"], own, h.tolist()) == (5, [1], [3., 3.])
    given = fp.before_step()
    assert [place.labels() for place, _ in given.places] == [["t['i']"]] and len(given.kept) == 1
    fp.load_state_dict(good)
    assert fp.before_step() is None and t["i"] == 0

@pytest.mark.parametrize("size", [10, 1000])
def test_containers_in_containers_are_restored(size):
    nested = {k: [k, dict(n=[k])] for k in range(size)}
    def step(k):
        nested[k].append(7)
        nested[k][1]["n"].append(7)
    fp = Footprint.of(step)
    state = fp.state_dict()
    for k in (0, size // 2, size - 1): step(k)
    nested["new"] = 1
    fp.load_state_dict(state)
    assert nested == {k: [k, dict(n=[k])] for k in range(size)}

def test_a_snapshot_with_a_footprint_goes_into_a_file_without_it():
    net, opt = parts()
    t = dict(i=0)
    def step(xy):
        t["i"] += 1
        return update(net, opt, F.cross_entropy(net(xy[0]), xy[1]))
    run = Run(step, net, opt)
    run.train(batch(0))
    run.snap()
    assert run.snapshot.difference() == {}
    saved = run.snapshot.state_dict()
    run.train(batch(1))
    run.snapshot.load_state_dict(saved)
    run.snapshot.restore()
    assert run.snapshot.difference() == dict(step=math.inf) # of which the file knows nothing

@pytest.mark.parametrize("dtype", [object, [("name", object), ("n", float)]], ids=["objects", "rows"])
def test_an_array_that_holds_objects_is_told_by_what_it_refers_to(dtype):
    net, opt = parts()
    table, governor = np.zeros(100, dtype), Governor(net, opt, chance_loss=None)
    def entry(n): return (str(n), float(n)) if table.dtype.names else n
    def step(xy):
        table[0] = entry(1 + governor.watched % 3)
        return update(net, opt, F.cross_entropy(net(xy[0]), xy[1]))
    before = batch_digest(table)
    assert batch_digest(table) == before
    for k in range(8): governor.run(step, batch(k))
    assert batch_digest(table) != before, "a write into it was not seen"
    footprint = Footprint.of(step)
    state = footprint.state_dict()
    table[:] = entry(9)
    footprint.load_state_dict(state)
    assert table[0] == np.array([entry(2)], dtype)[0] and table[5] == np.zeros(1, dtype)[0]

def test_whatever_a_step_makes_of_its_variables_is_put_back():
    few, many, x = {1, 2}, set(range(1000)), torch.zeros(2)
    def step(k):
        few.add(k)
        many.add(-k)
        x.data = torch.ones(3)
        return late
    footprint = Footprint.of(step)
    state = footprint.state_dict()
    late = 3
    assert step(7) == 3
    footprint.load_state_dict(state)
    assert few == {1, 2} and many == set(range(1000)) and torch.equal(x, torch.zeros(2))
    with pytest.raises(NameError): step(8)

def test_an_entry_that_the_loop_takes_out_again_is_given_and_taken_out_in_a_replay():
    net, opt = parts()
    more = dict(on=1.)
    def step(xy): return update(net, opt, F.cross_entropy(net(xy[0]), xy[1]) * (1 + more.get("on", 0)))
    run = Run(step, net, opt)
    for k in range(6):
        if k % 2: more["on"] = float(k)
        else: more.pop("on", None)
        run.train(batch(k))
    found = run.replay(fork=False)
    assert found.exact and found.again == found.losses, (found, run.footprint.describe())

def test_what_nobody_can_look_into_is_named():
    packer, rows = zlib.compressobj(), [[k] for k in range(page.MOST_OBJECTS + 1)]
    def step(x): return packer.compress(x)
    assert "cannot be looked into: `packer` (a Compress)" in found(step)
    def step(x): return rows[x]
    assert "`rows` (more than 20000 objects)" in found(step)

class Board:
    "A log of experiments."
    def add_scalar(self, name, value): pass

@pytest.mark.parametrize("thing, kind", [
    (threading.Thread(), "a process"), (Board(), "a log"), (queue.SimpleQueue(), "a queue"),
    (random.SystemRandom(), "random numbers of the operating system")], ids=lambda x: x if isinstance(x, str) else "")
def test_what_cannot_be_done_twice_is_named(thing, kind):
    def step(x): return thing, x
    assert found(step).endswith(f"cannot be put back: `thing` ({kind})")

class Prickly:
    "Does something when it is looked at from outside."
    touched = 0
    def __init__(self): self.k = 1
    @property
    def fileno(self):
        Prickly.touched += 1
        raise RuntimeError("not now")
    @property
    def step(self): raise RuntimeError("not now")
    reset = optimizer = state_dict = load_state_dict = step
    def run(self, x): return self.k * x

def test_nothing_of_an_object_is_run_by_looking_at_it():
    assert found(Prickly().run) == "recorded with the state: `self.k`" and Prickly.touched == 0

def test_a_writer_of_rows_and_a_tracker_are_named(monkeypatch):
    rows = csv.DictWriter(io.StringIO(), ["a"])
    assert "`rows.writer` (an open file)" in found(lambda x: rows.writerow(dict(a=x)))
    wandb = types.ModuleType("wandb")
    assert "`wandb` (a log)" in found(lambda x: wandb.log(x))

class Sour:
    "State that cannot be read, in a container that cannot be looked at."
    def state_dict(self): raise RuntimeError("not now")
    def load_state_dict(self, state): raise RuntimeError("not now")

def test_a_module_that_logs_is_named_as_it_is_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", wandb := types.ModuleType("wandb"))
    monkeypatch.setitem(globals(), "tracker", wandb)
    def step(x): tracker.log(x) # type: ignore[name-defined]  # noqa: F821  # a global, as in a script
    assert Footprint.of(step).why_not == "your step uses `wandb` (a log), which cannot be put back"

@pytest.mark.usefixtures("library")
def test_what_fails_when_it_is_looked_at_is_named_and_ends_no_run(monkeypatch):
    monkeypatch.setattr(Sour, "__module__", "hidden_library")
    class Bitter(dict):
        def values(self): raise RuntimeError("not now")
    sour, bitter = Sour(), Bitter(a=[1])
    def step(x): return sour, bitter["a"][0] * x
    fp = Footprint.of(step)
    fp.state_dict()
    assert [str(u) for u in fp.unrestorable] == ["`sour` (RuntimeError when its state is read)"]
    assert [str(u) for u in fp.unseen] == ["`bitter` (a Bitter, RuntimeError when it is looked at)"]

def test_a_tensor_that_is_too_large_to_be_given_again_is_named(monkeypatch):
    monkeypatch.setattr(page, "GIVEN", 100)
    x, small = torch.zeros(100), torch.zeros(3)
    fp = Footprint.of(lambda i: x[i] + small[i])
    fp.before_step()
    fp.after_step()
    x += 1
    small += 1
    given = fp.before_step()
    assert given.lost == ("x",) and [leaf.name for leaf, _ in given.kept] == ["small"]

def test_a_lambda_that_is_made_anew_for_every_batch_is_the_same_step():
    net, opt = parts()
    noise = torch.Generator().manual_seed(1)
    t = dict(i=0)
    def inner(x, y, scale):
        t["i"] += 1
        return update(net, opt, scale * F.cross_entropy(net(x + torch.randn(16, 8, generator=noise)), y) / t["i"])
    def made(xy, scale): return lambda _: inner(*xy, scale) # everything it trains on is in its closure
    run = Run(made(batch(0), 1.), net, opt)
    walk = run.footprint.walk
    for k in range(6):
        run.step = made(batch(k), 1. + k)
        run.train(None)
    assert len(run.footprint.steps) == 1 and run.footprint.walk is walk
    assert run.replay().exact
    run.footprint.state_dict()
    assert "`noise`" in run.footprint.describe() and "`t`" in run.footprint.describe()

def test_another_step_is_looked_at_as_well():
    net, opt = parts()
    run = Run(closure_counter(net, opt), net, opt)
    other = torch_generator(net, opt)
    for k in range(4):
        if k == 2:
            run.step = other
            run.footprint.before_step(run.step)
            run.snap()
        run.train(batch(k))
    assert run.replay().exact and run.footprint.describe() == "recorded with the state: `g`, `t`"

def test_the_governor_itself_is_no_state():
    class Job:
        def __init__(self):
            self.net, self.opt = parts()
            self.governor, self.k = Governor(self.net, self.opt, chance_loss=None), 0
        def step(self, x):
            self.k += 1
            return len(self.governor.reports) * x
    job = Job()
    assert found(job.step, job.net, job.opt) == "recorded with the state: `self.k`"

# --- batches

def refilled_array(buffer, k):
    buffer[:] = batch(k)[0].numpy()
    return buffer

BATCHES = {
    "array": lambda b: b, "memory of an array": torch.from_numpy, "in a dict": lambda b: dict(x=b),
    "in an object": lambda b: types.SimpleNamespace(x=[b, 1]), "a part of it": lambda b: b[:8],
    "turned": lambda b: torch.from_numpy(b).T}

@pytest.mark.parametrize("make", BATCHES.values(), ids=BATCHES)
def test_a_buffer_that_is_filled_again_is_noticed(make):
    buffer = np.zeros((16, 8), np.float32)
    given = make(refilled_array(buffer, 0))
    before = batch_digest(given)
    assert batch_digest(given) == before
    refilled_array(buffer, 1)
    assert batch_digest(given) != before

def test_a_buffer_that_is_filled_again_is_replayed_as_it_was():
    net, opt = parts()
    def step(b): return update(net, opt, F.cross_entropy(net(torch.as_tensor(b[0])), b[1]))
    run, buffer = Run(step, net, opt), np.zeros((16, 8), np.float32)
    for k in range(9): run.train((refilled_array(buffer, k), batch(k)[1]))
    found = run.replay()
    assert found.exact and found.to_the_bit, found

@pytest.mark.parametrize("often", [1, 2], ids=["every batch", "every other batch"])
@pytest.mark.parametrize("make", [tuple, dict, lambda b: types.SimpleNamespace(**b)], ids=["tuple", "dict", "object"])
def test_a_step_that_writes_into_its_own_batch_is_replayed_as_often_as_one_likes(make, often):
    net, opt = parts()
    def step(b):
        x, y = b if isinstance(b, tuple) else (b if isinstance(b, dict) else vars(b)).values()
        if int(y[0]) % often == 0: x.mul_(.7).add_(x.flip(0).mul(.3))
        return update(net, opt, F.cross_entropy(net(x), y))
    run = Run(step, net, opt)
    for k in range(9):
        x, y = batch(k)
        run.train((x, y) if make is tuple else make(dict(x=x, y=y)))
    for _ in range(2):
        found = run.replay(fork=False)
        assert found.exact and found.to_the_bit, found

def test_what_cannot_be_copied_is_said_to_be_overwritten_and_nothing_is_replayed():
    class Box:
        def __init__(self, x): self.x = x
        def __deepcopy__(self, memo): raise TypeError("one box only")
    net, opt = parts()
    run = Run(lambda b: update(net, opt, F.cross_entropy(net(b[0].x.div_(2)), b[1])), net, opt)
    for k in range(3): run.train((Box(batch(k)[0]), batch(k)[1]))
    assert "batch 0 was written into, in its step or later" in run.replay().why

def test_batches_that_stay_as_they_are_are_kept_by_reference():
    net, opt = parts()
    run, given = Run(plain(net, opt), net, opt), [batch(k) for k in range(6)]
    for xy in given: run.train(xy)
    assert all(s.batch is xy for s, xy in zip(list(run.recorder.steps)[3:], given[3:])) and not run.recorder.copying

def test_every_write_into_a_batch_of_tensors_is_noticed():
    x, y = batch(0)
    before = batch_digest((x, y))
    y[3] += 0
    assert batch_digest((x, y)) != before
    low = torch.zeros(4, dtype=torch.bfloat16)
    before = batch_digest([low, None, "a", 3])
    assert batch_digest([low, None, "a", 3]) == before
    low += 1
    given = (x, batch(1)[0])
    before = batch_digest(given)
    shared = given[1].numpy() # from here on its memory is seen, which is no change
    assert batch_digest(given) == before
    before = batch_digest(given)
    shared[:] = 3
    assert batch_digest(given) != before
    low += 1
    assert batch_digest([low, None, "a", 3]) != before

# --- a copy of the process

def test_a_fork_that_takes_too_long_ends(monkeypatch):
    made, fork = [], os.fork
    def noted():
        made.append(fork())
        return made[-1]
    monkeypatch.setattr(os, "fork", noted)
    with pytest.raises(TimeoutError, match="more than"): in_a_fork(lambda: time.sleep(60), limit=.3)
    with pytest.raises(TimeoutError, match="died"): in_a_fork(lambda: os._exit(3))
    assert len(made) == 2
    for pid in made:
        with pytest.raises(ChildProcessError): os.waitpid(pid, os.WNOHANG) # none is left

def test_a_fork_beside_other_threads_warns_of_nothing():
    "From Python 3.12 on forking beside threads is told; where warnings are errors, the copy would be nobody's."
    stop = threading.Event()
    beside = threading.Thread(target=stop.wait)
    beside.start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert in_a_fork(lambda: 3) == 3
    stop.set()
    beside.join()

def test_a_fork_leaves_no_trace(capfd, caplog):
    box = []
    def work():
        box.append(1)
        print("printed")
        logging.getLogger("of the test").warning("logged")
        os.write(1, b"written")
        return sum(range(10**5))
    assert in_a_fork(work) == sum(range(10**5)) and not box
    with pytest.raises(RuntimeError, match="a replay failed: ZeroDivisionError"): in_a_fork(lambda: 1 // 0)
    assert capfd.readouterr() == ("", "") and not caplog.records
    assert in_a_fork(lambda: "x" * 10**6) == "x" * 10**6 # more than a pipe holds

def test_where_the_fork_hangs_the_replay_is_made_in_place(monkeypatch):
    net, opt = parts()
    parent = os.getpid()
    def step(xy):
        if os.getpid() != parent: time.sleep(60)
        return update(net, opt, F.cross_entropy(net(xy[0]), xy[1]))
    monkeypatch.setattr(rehearsal, "LIMIT", .5)
    run = Run(step, net, opt)
    for k in range(2): run.train(batch(k))
    found = run.replay()
    assert found.exact and not found.forked

def test_on_several_threads_the_losses_of_a_fork_are_compared_nearly():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = trained(plain).replay()
        assert found.exact and not found.to_the_bit and found.forked
        assert not trained(entropy).replay().exact
    finally: torch.set_num_threads(before)

# --- what is written between two steps

def watched(write, steps=12, every=0, at=8):
    net, opt = parts()
    step = plain(net, opt)
    watch = StateWatch(lambda: tensors_of_parts(dict(model=net, optimizer=opt)), every=every)
    seen = []
    for k in range(steps):
        seen.append(watch.start_of_step())
        step(batch(k))
        watch.end_of_step(k)
        if k == at: write(net, opt, watch)
    return [s for s in seen if s is not None]

def by_data(net, opt, watch):
    for p in net.parameters(): p.data.mul_(1.5)

def one_bit_of_a_moment(net, opt, watch):
    opt.state[net[3].weight]["exp_avg"].numpy().view(np.int32)[2, 3] ^= 1 << 20

def other_memory(net, opt, watch):
    for p in net.parameters(): p.data = p.data.clone()

def other_content(net, opt, watch): net[3].weight.data = net[3].weight.data * 2

def announced(net, opt, watch):
    by_data(net, opt, watch)
    watch.renew()

def nothing(net, opt, watch): return net[0].weight.sum(), opt.state_dict()

def test_nothing_is_said_of_steps_alone_or_of_reads():
    for write in (nothing, announced): assert watched(write, steps=40) == watched(write, every=1) == []

def test_a_write_into_all_weights_past_torch_is_seen_at_once():
    for at in range(3, 9):
        (seen,) = watched(by_data, at=at)
        assert seen.how == "bits" and seen.after == at and seen.names[0].startswith("model.")

def test_memory_that_is_exchanged_is_no_write():
    assert watched(other_memory) == watched(other_memory, every=1) == []
    for at in range(3, 9):
        (seen,) = watched(other_content, at=at) # unless something else is in it
        assert (seen.names, seen.after, seen.how) == (("model.3.weight",), at, "bits")

def test_words_that_change_places_in_a_small_network_are_seen():
    def swapped(net, opt, watch):
        words = net[3].weight.data.numpy().reshape(-1).view(np.int64)
        words[[0, 1]] = words[[1, 0]] # the same bits, in another order
    (seen,) = watched(swapped)
    assert (seen.names, seen.after, seen.how) == (("model.3.weight",), 8, "bits")

def test_a_write_between_two_steps_is_proved_and_is_no_part_of_the_step():
    net, opt = parts()
    run, watch, seen = Run(plain(net, opt), net, opt), StateWatch(lambda: tensors_of_parts(dict(model=net))), []
    for k in range(8):
        if k == 5: nn.init.zeros_(net[0].weight)
        seen.append(watch.start_of_step())
        run.train(batch(k))
        watch.end_of_step(k)
    found = run.replay()
    assert not found.exact and [k for k, w in enumerate(seen) if w] == [5] and seen[5].names == ("model.0.weight",)
    assert [a == b for a, b in zip(found.losses, found.again)].index(False) == 5

def test_a_single_bit_is_seen_when_all_of_it_is_looked_at():
    (seen,) = watched(one_bit_of_a_moment, every=1)
    assert (seen.names, seen.after, seen.how) == (("optimizer.state2.exp_avg",), 8, "bits")

def test_all_of_the_state_is_looked_at_as_often_as_wanted():
    watch, looks = StateWatch(lambda: dict(w=torch.zeros(4)), every=16), 0
    for k in range(1600):
        watch.end_of_step(k)
        looks += watch.sums is not None
    assert 80 <= looks <= 120

def test_a_regular_distance_is_found():
    for numbers, step in {(199, 399, 599): 200, (0, 50, 150): 50, (1, 2, 3): None, (10, 20): None, (5, 17, 40): None,
                          (100, 100, 200, 300): 100, (100, 300, 700): 200, (100, 250, 450): None}.items():
        seen = Distances()
        for k in numbers: seen.add(k)
        assert seen.regular() == step, numbers
        assert str(seen) == ("" if step is None else f"every {step} batches")

def test_python_itself_is_never_put_back(tmp_path, monkeypatch):
    (tmp_path/"own_module.py").write_text("limit, spare = 3., {}\ndef half(x): return x / 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module("own_module")
    kept = [vars(own), sys.modules, builtins.__dict__]
    def step(x): return own.half(x) * getattr(own, "limit") + len(kept) # which name? so all of the module is looked at
    footprint = Footprint(step, {})
    state = footprint.state_dict()
    tables = [h.obj for h, _ in state["state"].places]
    assert not any(t is k for t in tables for k in kept)
    own.limit = 4.
    footprint.load_state_dict(state)
    assert own.limit == 3. and len(builtins.__dict__) > 100
    del sys.modules["own_module"]

def test_what_was_installed_into_a_folder_is_not_the_users_own(tmp_path, monkeypatch):
    for name in ("mine", "target"):
        (tmp_path/name/"package").mkdir(parents=True)
        monkeypatch.syspath_prepend(tmp_path/name)
    (tmp_path/"target"/"package-1.0.dist-info").mkdir()
    assert page.is_own_file(str(tmp_path/"mine"/"package"/"code.py"))
    assert not page.is_own_file(str(tmp_path/"target"/"package"/"code.py"))

def test_tensors_without_values_are_no_state():
    net, opt = parts()
    shape = nn.Linear(8, 4, device="meta") # of networks that are called by their parameters, say
    governor = Governor(net, opt, chance_loss=None)
    def step(x):
        assert shape.weight.shape == (4, 8)
        return update(net, opt, net(x[0]).square().mean())
    for k in range(30): governor.run(step, batch(k))
    assert governor.repairs.reliable

def test_what_a_metric_has_counted_is_put_back_after_a_look():
    metrics = pytest.importorskip("torchmetrics")
    def counted(guarded):
        net, opt = parts()
        mean = metrics.MeanMetric()
        governor = Governor(net, opt, chance_loss=None)
        def step(x):
            loss = net(x[0]).square().mean()
            mean.update(loss.detach())
            update(net, opt, loss)
            return loss
        for k in range(120): governor.run(step, batch(k)) if guarded else step(batch(k))
        return mean.compute().item(), mean.update_count
    assert counted(True) == counted(False)

def test_a_write_into_any_number_of_a_small_network_is_seen_at_once():
    "Past torch: by `.data`, which counts nothing; wherever it is and after whatever step."
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    watch, k = StateWatch(lambda: tensors_of_parts(dict(model=net)), every=0), 0
    for name, p in net.named_parameters():
        for at in range(p.numel()):
            watch.end_of_step(k)
            p.data.view(-1)[at] += 1
            found, k = watch.start_of_step(), k + 1
            assert found is not None and found.names == (f"model.{name}",)

def test_many_tensors_are_looked_at_in_turns():
    net = nn.Sequential(*[nn.Linear(3, 3) for _ in range(20)], nn.Linear(400, 400))
    watch = StateWatch(lambda: tensors_of_parts(dict(model=net)), every=0)
    watch.end_of_step(0)
    assert all(0 < len(turn) <= PIECES for turn in watch.turns)
    assert all(len(turn) == 1 or sum(words.nbytes for _, words in turn) <= PIECE for turn in watch.turns)
    assert sorted({i for turn in watch.turns for i, _ in turn}) == list(range(42))

def test_words_are_found_again_only_where_a_tensor_lies_elsewhere_or_is_another_one(monkeypatch):
    net, looked, words_of = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), [], writes.words_of
    def counted(t):
        looked.append(t)
        return words_of(t)
    monkeypatch.setattr(writes, "words_of", counted)
    watch = StateWatch(lambda: tensors_of_parts(dict(model=net)), every=0)
    def pass_by(steps):
        for k in range(steps):
            assert watch.start_of_step() is None
            watch.end_of_step(k)
    weight = net[0].weight
    for change in (lambda: None, lambda: weight.data.clone(), lambda: weight.data[:2], lambda: weight.data.view(4, 2)):
        if (other := change()) is not None: weight.data = other
        watch.renew()
        looked.clear()
        pass_by(200)
        assert len(looked) == 4 and sum(words.nbytes for _, words in sum(watch.turns, [])) == 4 * sum(
            p.numel() for p in net.parameters())
        weight.data.mul_(2.)
        found = watch.start_of_step()
        assert (found.names, found.how) == (("model.0.weight",), "bits")

class BesideState(torch.optim.Optimizer):
    "Keeps statistics of layers and an optimizer of its own, none of them in its state, as second-order ones do."
    def __init__(self, net):
        super().__init__(net.parameters(), {})
        self.sizes, self.steps = {}, 0
        self.inner = torch.optim.SGD(net.parameters(), lr=.05, momentum=.9)
        for m in net.children(): m.register_forward_pre_hook(self.note)

    def note(self, module, args):
        if self.steps == 0: self.sizes[module] = args[0].detach().square().mean(0)
        self.sizes[module].lerp_(args[0].detach().square().mean(0), .1)

    def step(self, closure=None):
        for module, size in self.sizes.items(): module.weight.grad.div_(size.sqrt() + .1)
        self.inner.step()
        self.steps += 1

def test_what_an_optimizer_keeps_beside_its_state_is_restored():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    opt = BesideState(net)
    governor = Governor(net, opt, chance_loss=None)
    def step(x): return update(net, opt, (net(x) - x.sum(1, keepdim=True)).square().mean())
    for k in range(80):
        if k == 60: net[0].weight.data[0, 0] = torch.nan
        governor.run(step, torch.randn(16, 4))
    assert [(r.reason, r.cause) for r in governor.reports] == [("non-finite", "external")]
    assert all(size.isfinite().all() for size in opt.sizes.values()) and opt.steps == 80
