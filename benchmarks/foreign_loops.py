"""Healthy training loops as strangers write them: what foreign_bench.py holds a Governor against.

A step here reads more than its author hands over (a counter, a flag, a buffer, a generator of its own, a teacher, a
carried state), or its loss is no measure of the weights (a policy gradient, two networks against each other), or its
loss is not a number now and then although nothing is wrong. What is forgotten is forgotten on purpose. Nothing goes
wrong in any of them, so a guarded run has to end as an unguarded one does, to the bit.

A loop is a function of a seed that makes a `Run`.
"""
import copy
import functools
import math
import queue
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from benchmarks.loops import descend, mlp

Adam, SGD = torch.optim.Adam, torch.optim.SGD
STEPS = 600
TRAIN = 1500 # pictures that are trained on; the others are for the score
RING = torch.stack([(torch.arange(8) * math.pi / 4).cos(), (torch.arange(8) * math.pi / 4).sin()], 1) * 2


class Run(NamedTuple):
    "One training run as its author wrote it."
    parts: tuple # what is handed to the Governor
    batches: Iterable # what the author's `for` statement goes through
    step: Callable[[Any], Any] # trains on a batch; its loss
    score: Callable[[], float] # on data that are never trained on; lower is better
    forgotten: Callable[[], Any] = lambda: None # what else there is at the end: plain values, arrays, parts
    chance: float | None = None # loss of a network that has learnt nothing


def load_pictures() -> tuple[Tensor, Tensor]:
    "8×8 digits as (1797, 64) in [0, 1], and their labels, in a fixed random order."
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(3))
    return torch.as_tensor(found.data / 16, dtype=torch.float32)[order], torch.as_tensor(found.target)[order]

X, Y = load_pictures()


def rows(n=STEPS, size=64):
    "Indices of pictures, from the global stream."
    for _ in range(n): yield torch.randint(TRAIN, (size,))

def epochs(n, size=64):
    "(epoch, indices), every picture once an epoch."
    for epoch in range(n):
        for at in torch.randperm(TRAIN).split(size): yield epoch, at

@torch.no_grad()
def error(net, x=X[TRAIN:], y=Y[TRAIN:]) -> float:
    "Share of pictures that a network takes for another digit."
    was = net.training
    net.eval()
    wrong = (net(x).argmax(1) != y).float().mean().item()
    net.train(was)
    return wrong

@torch.no_grad()
def held_out(net, x=X[TRAIN:], y=Y[TRAIN:]) -> float:
    "Cross-entropy on pictures that were not trained on."
    was = net.training
    net.eval()
    loss = F.cross_entropy(net(x), y).item()
    net.train(was)
    return loss

def classifier(rate=2e-3, net=None):
    "A network for the digits and its optimizer."
    net = mlp(64, 64, 10) if net is None else net
    return net, Adam(net.parameters(), rate)


# --- losses that are no yardstick

def name_for_points(wrong: float, right: float) -> Run:
    "REINFORCE with a running baseline: say which digit it is, and get points."
    net, opt = classifier(3e-3, mlp(64, 128, 10))
    baseline = 0.

    def step(at):
        nonlocal baseline
        choice = torch.distributions.Categorical(logits=net(X[at]))
        said = choice.sample()
        points = torch.where(said == Y[at], right, wrong)
        loss = -((points - baseline) * choice.log_prob(said)).mean()
        descend(opt, loss)
        baseline = .9 * baseline + .1 * points.mean().item()
        return loss

    return Run((net, opt), rows(500), step, lambda: error(net), lambda: baseline)

def reinforce(seed):
    "Plain REINFORCE on digits: a point if the digit that was named is right."
    return name_for_points(0., 1.)

def reinforce_signed(seed):
    "The same with a point less for a wrong one."
    return name_for_points(-1., 1.)


def ring_gan(seed):
    "A GAN on a ring of eight: two networks, two optimizers, one step for both."
    judge, maker = mlp(2, 48, 48, 1), mlp(4, 48, 48, 2)
    opt_judge, opt_maker = Adam(judge.parameters(), 1e-3, (.5, .9)), Adam(maker.parameters(), 1e-3, (.5, .9))
    noise = torch.randn(256, 4)

    def step(real):
        fake = maker(torch.randn(len(real), 4))
        loss = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
        descend(opt_judge, loss)
        descend(opt_maker, F.softplus(-judge(fake)).mean())
        return loss.detach()

    @torch.no_grad()
    def score():
        far = torch.cdist(maker(noise), RING)
        return far.min(1).values.mean().item() + far.min(0).values.mean().item()

    batches = (RING[torch.randint(8, (64,))] + .05 * torch.randn(64, 2) for _ in range(STEPS))
    return Run((judge, maker, opt_judge, opt_maker), batches, step, score)


def q_learning(seed):
    "Q-learning of a cart on a track from stored play; the target network follows `if counter % 50`, and is forgotten."
    net = mlp(2, 48, 48, 3)
    target, opt, counter = copy.deepcopy(net), Adam(net.parameters(), 1e-3), 0

    def move(s, a):
        speed = (.9 * s[:, 1] + .2 * (a - 1)).clamp(-1, 1)
        after = torch.stack([(s[:, 0] + .3 * speed).clamp(-2, 2), speed], 1)
        return after, -after[:, 0].abs()

    s, a = 4 * torch.rand(3000, 2) - 2, torch.randint(3, (3000,))
    after, reward = move(s, a)

    def step(at):
        nonlocal counter
        if counter % 50 == 0: target.load_state_dict(net.state_dict())
        counter += 1
        with torch.no_grad(): aim = reward[at] + .9 * target(after[at]).max(1).values
        loss = F.smooth_l1_loss(net(s[at]).gather(1, a[at, None])[:, 0], aim)
        descend(opt, loss)
        return loss

    @torch.no_grad()
    def score():
        x, total = torch.stack([torch.linspace(-2, 2, 64), torch.zeros(64)], 1), 0.
        for _ in range(30):
            x, points = move(x, net(x).argmax(1))
            total -= points.mean().item()
        return total

    batches = (torch.randint(3000, (64,)) for _ in range(STEPS))
    return Run((net, opt), batches, step, score, lambda: (target, counter))


def mean_teacher(seed):
    "Few labels, and a forgotten teacher of averaged weights to agree with; how much that counts grows with a counter."
    net, opt = classifier()
    teacher, taken = copy.deepcopy(net), 0

    def step(at):
        nonlocal taken
        taken += 1
        seen, weight = X[at], 60 * math.exp(-5 * (1 - min(1, taken / 450))**2)
        loss = F.cross_entropy(net(seen[:16]), Y[at[:16]])
        with torch.no_grad(): aim = teacher(seen + .4 * torch.randn_like(seen)).softmax(1)
        loss = loss + weight * F.mse_loss(net(seen + .4 * torch.randn_like(seen)).softmax(1), aim)
        descend(opt, loss)
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), net.parameters()): slow.lerp_(fast, .02)
        return loss.detach()

    return Run((net, opt), rows(), step, lambda: error(teacher), lambda: (teacher, taken))


# --- steps that read what is not handed over

def penalty_switched_on(seed):
    "A weight penalty from epoch 15 on; the step reads the epoch from the loop around it."
    net, opt = classifier()
    epoch = 0

    def batches():
        nonlocal epoch
        for epoch, at in epochs(25): yield X[at], Y[at]

    def step(batch):
        loss = F.cross_entropy(net(batch[0]), batch[1])
        if epoch >= 15: loss = loss + 2e-2 * sum(p.square().sum() for p in net.parameters())
        descend(opt, loss)
        return loss

    return Run((net, opt), batches(), step, lambda: held_out(net), lambda: epoch, math.log(10))


def smoothing_switched_on(seed):
    "A trainer whose labels are smoothed from batch 350 on, by an attribute that the loop sets."
    class Trainer:
        def __init__(self): (self.net, self.opt), self.smoothing = classifier(), 0.
        def train_step(self, batch):
            loss = F.cross_entropy(self.net(batch[0]), batch[1], label_smoothing=self.smoothing)
            descend(self.opt, loss)
            return loss.item()

    trainer = Trainer()

    def batches():
        for i, at in enumerate(rows()):
            if i == 350: trainer.smoothing = .3
            yield X[at], Y[at]

    return Run((trainer.net, trainer.opt), batches(), trainer.train_step, lambda: held_out(trainer.net),
               lambda: trainer.smoothing, math.log(10))


def restarts_by_counter(seed):
    "A cosine that starts again every 150 steps, from a counter of the step's own."
    net = mlp(64, 64, 10)
    opt, taken = Adam(net.parameters()), dict(steps=0)

    def step(batch):
        opt.param_groups[0]["lr"] = 1e-4 + .02 * (1 + math.cos(math.pi * (taken["steps"] % 150) / 150))
        loss = F.cross_entropy(net(batch[0]), batch[1])
        descend(opt, loss)
        taken["steps"] += 1
        return loss

    return Run((net, opt), ((X[at], Y[at]) for at in rows()), step, lambda: held_out(net), lambda: taken, math.log(10))


def rolling_buffer(seed):
    "Every batch goes into a buffer of the last 40, and the step trains on a draw from it; the camera changes once."
    net, opt = classifier(1e-3)
    memory = deque(maxlen=40)

    def batches():
        of = [torch.nonzero(Y[:TRAIN] == k)[:, 0] for k in range(10)]
        for i in range(STEPS):
            k = (i // 15) % 10
            at = torch.cat([of[k][torch.randint(len(of[k]), (4,))], torch.randint(TRAIN, (12,))])
            yield X[at] if i < 350 else .7 * X[at].flip(1), Y[at]

    def step(batch):
        memory.append(batch)
        some = random.sample(memory, min(4, len(memory)))
        loss = F.cross_entropy(net(torch.cat([x for x, _ in some])), torch.cat([y for _, y in some]))
        descend(opt, loss)
        return loss

    return Run((net, opt), batches(), step, lambda: held_out(net), lambda: [x for x, _ in memory], math.log(10))


def torch_generator(seed):
    "Pictures are moved and dimmed by a torch generator of the step's own; now and then comes a night of 25 batches."
    net, opt = classifier()
    draw, night = torch.Generator().manual_seed(seed + 1), 0

    def step(at):
        nonlocal night
        if torch.rand((), generator=draw) < .01: night = 25
        night -= night > 0
        way = int(torch.randint(-1, 2, (), generator=draw))
        light = (.1 if night else .5) + torch.rand(len(at), 1, generator=draw) * (.1 if night else 1)
        x = X[at].view(-1, 8, 8).roll(way, 2).flatten(1) * light
        loss = F.cross_entropy(net(x), Y[at])
        descend(opt, loss)
        return loss

    return Run((net, opt), rows(), step, lambda: held_out(net), lambda: (draw.get_state(), night), math.log(10))


class Spots:
    "Pictures with some of their pixels gone, chosen by a NumPy generator; how many changes slowly."
    def __init__(self, seed): self.rng, self.share = np.random.default_rng(seed), .3
    def __call__(self, x):
        self.share = float(np.clip(self.share + self.rng.normal(0, .04), .1, .8))
        return x * torch.as_tensor(self.rng.random(x.shape) > self.share)


def numpy_generator(seed):
    "The same with a NumPy generator, inside of an object that the step calls."
    net, opt = classifier()
    spots = Spots(seed + 1)

    def step(batch):
        loss = F.cross_entropy(net(spots(batch[0])), batch[1])
        descend(opt, loss)
        return loss

    batches = ((X[at], Y[at]) for at in rows())
    return Run((net, opt), batches, step, lambda: held_out(net), lambda: (spots.rng.bit_generator.state, spots.share),
               math.log(10))


def numpy_buffer(seed):
    "One NumPy array for the pictures and one for the labels, filled again for every batch; 40 batches are dim."
    net, opt = classifier()
    x, y = np.empty((64, 64), np.float32), np.empty(64, np.int64)

    def batches():
        for i, at in enumerate(rows()):
            x[:], y[:] = X[at].numpy() * (.4 if 300 <= i < 340 else 1), Y[at].numpy()
            yield x, y

    def step(batch):
        loss = F.cross_entropy(net(torch.from_numpy(batch[0])), torch.from_numpy(batch[1]))
        descend(opt, loss)
        return loss

    return Run((net, opt), batches(), step, lambda: held_out(net), lambda: (x, y), math.log(10))


def tensor_buffer(seed):
    "The same with tensors, which are filled in place and yielded again."
    net, opt = classifier()
    x, y = torch.empty(64, 64), torch.empty(64, dtype=torch.long)

    def batches():
        for i, at in enumerate(rows()):
            x.copy_(X[at] * (.4 if 300 <= i < 340 else 1))
            y.copy_(Y[at])
            yield x, y

    def step(batch):
        loss = F.cross_entropy(net(batch[0]), batch[1])
        descend(opt, loss)
        return loss

    return Run((net, opt), batches(), step, lambda: held_out(net), lambda: (x, y), math.log(10))


class Reader(nn.Module):
    "Reads digits of a stream one by one and says what the next one is."
    def __init__(self):
        super().__init__()
        self.read, self.lstm, self.say = nn.Embedding(8, 16), nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 8)
    def forward(self, x, state=None):
        h, state = self.lstm(self.read(x), state)
        return self.say(h), state


def counting_text(n, lanes, g=None, hard=()):
    "(lanes, n) symbols: each is the last but three one plus one; one in ten is any, and more in hard passages."
    x = [torch.randint(8, (lanes,), generator=g) for _ in range(4)]
    while len(x) < n:
        share = .4 if len(x) // 100 in hard else .1
        any_, odd = torch.randint(8, (lanes,), generator=g), torch.rand(lanes, generator=g) < share
        x.append(torch.where(odd, any_, (x[-4] + 1) % 8))
    return torch.stack(x, 1)


def carried_state(seed):
    "An LSTM over a long text, ten symbols a step; its state is carried from step to step; three passages are hard."
    net = Reader()
    opt, carried = Adam(net.parameters(), 5e-3), None
    text = counting_text(4001, 16, hard=(15, 24, 25, 33))
    other = counting_text(201, 32, torch.Generator().manual_seed(1))

    def step(batch):
        nonlocal carried
        said, carried = net(batch[0], carried)
        carried = tuple(h.detach() for h in carried)
        loss = F.cross_entropy(said.flatten(0, 1), batch[1].flatten())
        descend(opt, loss)
        return loss

    @torch.no_grad()
    def score(): return F.cross_entropy(net(other[:, :-1])[0].flatten(0, 1), other[:, 1:].flatten()).item()

    batches = ((text[:, i:i + 10], text[:, i + 1:i + 11]) for i in range(0, 4000, 10))
    return Run((net, opt), batches, step, score, lambda: carried, math.log(8))


def accumulation(seed):
    "Four micro-batches an update, counted by the step; of 200 micro-batches 40 are dim."
    net, opt = classifier(4e-3)
    seen = 0

    def step(batch):
        nonlocal seen
        loss = F.cross_entropy(net(batch[0]), batch[1])
        (loss / 4).backward()
        seen += 1
        if seen % 4 == 0:
            opt.step()
            opt.zero_grad()
        return loss.detach()

    def batches():
        for i, at in enumerate(rows(1000, 16)): yield X[at] * (.3 if i % 200 >= 160 else 1), Y[at]

    return Run((net, opt), batches(), step, lambda: held_out(net), lambda: seen, math.log(10))


def averaged_weights(seed):
    "Batch norm, a schedule, and averaged weights from step 300 on; schedule and average are forgotten."
    net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    opt = torch.optim.AdamW(net.parameters(), 5e-3)
    clock = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-2, STEPS + 1)
    average, done = torch.optim.swa_utils.AveragedModel(net, use_buffers=True), 0

    def step(batch):
        nonlocal done
        loss = F.cross_entropy(net(batch[0]), batch[1])
        descend(opt, loss)
        clock.step()
        done += 1
        if done > 300: average.update_parameters(net)
        return loss.item()

    batches = ((X[at], Y[at]) for at in rows())
    return Run((net, opt), batches, step, lambda: held_out(average), lambda: (average, clock, done), math.log(10))


def curriculum(seed):
    "Noise on the pictures grows by a stage every 120 steps; the stage is a variable of the loop."
    net, opt = classifier()
    noise = 0.

    def batches():
        nonlocal noise
        for i, at in enumerate(rows()):
            noise = .25 * (i // 120)
            yield X[at], Y[at]

    def step(batch):
        loss = F.cross_entropy(net(batch[0] + noise * torch.randn_like(batch[0])), batch[1])
        descend(opt, loss)
        return loss

    return Run((net, opt), batches(), step, lambda: held_out(net), lambda: noise, math.log(10))


def hard_negatives(seed):
    "A triplet loss against the nearest strangers of a bank of the step's last outputs, which is forgotten."
    net = mlp(64, 64, 16)
    opt, bank, place = Adam(net.parameters(), 1e-3), F.normalize(torch.randn(256, 16), dim=1), 0
    labels = torch.full((256,), -1)
    of = [torch.nonzero(Y[:TRAIN] == k)[:, 0] for k in range(10)]

    def step(at):
        nonlocal place
        mates = torch.stack([of[k][torch.randint(len(of[k]), ())] for k in Y[at].tolist()])
        a, b = F.normalize(net(X[at]), dim=1), F.normalize(net(X[mates]), dim=1)
        near = (a @ bank.T).masked_fill(labels == Y[at][:, None], -1.).topk(16).values.mean(1)
        loss = F.relu(.3 + near - (a * b).sum(1)).mean()
        descend(opt, loss)
        here = slice(place, place + len(at))
        bank[here], labels[here], place = a.detach(), Y[at], (place + len(at)) % 256
        return loss

    @torch.no_grad()
    def score():
        z, keys = F.normalize(net(X[TRAIN:]), dim=1), F.normalize(net(X[:TRAIN]), dim=1)
        return (Y[:TRAIN][(z @ keys.T).argmax(1)] != Y[TRAIN:]).float().mean().item()

    return Run((net, opt), rows(450, 32), step, score, lambda: (bank, labels, place))


def history(seed):
    "The step keeps a list of its losses and a running mean of them, as most do; forty batches are dim."
    net, opt = classifier()
    losses, mean = [], 0.

    def step(batch):
        nonlocal mean
        loss = F.cross_entropy(net(batch[0]), batch[1])
        descend(opt, loss)
        losses.append(loss.item())
        mean += .05 * (losses[-1] - mean)
        return loss

    batches = ((X[at] * (.3 if 300 <= i < 340 else 1), Y[at]) for i, at in enumerate(rows()))
    return Run((net, opt), batches, step, lambda: held_out(net), lambda: (losses, mean), math.log(10))


HEAT = dict(now=1.) # of the labels that `distilled` learns from

def distilled(seed):
    "Learns from the answers of a trained network, at a temperature that the loop sets in a dict of the module."
    HEAT["now"] = 1.
    (old, first), (net, opt) = classifier(5e-3), classifier()
    for at in rows(100): descend(first, F.cross_entropy(old(X[at]), Y[at]))

    def batches():
        for i, at in enumerate(rows()):
            HEAT["now"] = 1. + 1.5 * (i // 200)
            yield X[at]

    def step(x):
        with torch.no_grad(): aim = (old(x) / HEAT["now"]).softmax(1)
        loss = F.cross_entropy(net(x) / HEAT["now"], aim)
        descend(opt, loss)
        return loss

    return Run((net, opt), batches(), step, lambda: held_out(net), lambda: dict(HEAT), math.log(10))


class Sloppy:
    "A trainer that is called itself, with settings in an object of its own and Python's own generator."
    def __init__(self, seed):
        self.net, self.opt = classifier(net=mlp(64, 64, 10))
        self.state = dict(dice=random.Random(seed), drop=.1, steps=0)

    def __call__(self, scale, batch):
        self.state["steps"] += 1
        if self.state["dice"].random() < .02: self.state["drop"] = self.state["dice"].choice([.1, .3, .6])
        x = F.dropout(batch[0], self.state["drop"])
        loss = F.cross_entropy(self.net(x), batch[1]) * scale["loss"]
        descend(self.opt, loss)
        return loss


def partly_called(seed):
    "`functools.partial` of an object with a call, and a dict of settings that the loop changes once."
    trainer, scale = Sloppy(seed), dict(loss=1.)

    def batches():
        for i, at in enumerate(rows()):
            if i == 400: scale["loss"] = 1.6
            yield X[at], Y[at]

    return Run((trainer.net, trainer.opt), batches(), functools.partial(trainer, scale), lambda: held_out(trainer.net),
               lambda: (trainer.state["steps"], trainer.state["drop"], trainer.state["dice"].getstate()))


def prefetched(seed):
    "A thread makes the batches ahead, with a generator of its own; 50 of them are dim."
    net, opt = classifier()
    ready = queue.Queue(4)

    def fill():
        draw = torch.Generator().manual_seed(seed)
        for i in range(STEPS):
            at = torch.randint(TRAIN, (64,), generator=draw)
            ready.put((X[at] * (.35 if 350 <= i < 400 else 1), Y[at]))

    def batches():
        threading.Thread(target=fill, daemon=True).start()
        for _ in range(STEPS): yield ready.get()

    def step(batch):
        loss = F.cross_entropy(net(batch[0]), batch[1])
        descend(opt, loss)
        return loss

    return Run((net, opt), batches(), step, lambda: held_out(net), chance=math.log(10))


def two_tasks(seed):
    "Two losses by turns, of two heads and of other sizes, with one optimizer; whose turn it is, a counter says."
    body, heads = mlp(64, 64), nn.ModuleList([nn.Linear(64, 10), nn.Linear(64, 64)])
    opt, turn = Adam([*body.parameters(), *heads.parameters()], 2e-3), 0

    def step(at):
        nonlocal turn
        turn = 1 - turn
        h = body(X[at]).relu()
        loss = F.cross_entropy(heads[0](h), Y[at]) if turn else 30 * F.mse_loss(heads[1](h), X[at])
        descend(opt, loss)
        return loss

    whole = nn.Sequential(body, nn.ReLU(), heads[0])
    return Run((body, heads, opt), rows(), step, lambda: held_out(whole), lambda: turn)


def rare_hard_batches(seed):
    "One batch of fifty comes from another camera; the gradients are clipped, and the momentum is long."
    net = mlp(64, 64, 10)
    opt = SGD(net.parameters(), .1, momentum=.95)

    def batches():
        for at in rows():
            other = torch.rand(()) < .02
            yield 2 * X[at].flip(1) if other else X[at], Y[at]

    def step(batch):
        loss = F.cross_entropy(net(batch[0]), batch[1])
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.)
        opt.step()
        return loss

    return Run((net, opt), batches(), step, lambda: held_out(net), chance=math.log(10))


# --- losses that are odd now and then, and steps that answer oddly

def ignored_labels(seed):
    "In 3 % of the batches no example has a label: the loss is 0 / 0, the gradients are 0."
    net, opt = classifier()

    def batches():
        for at in rows(): yield X[at], torch.full_like(Y[at], -100) if torch.rand(()) < .03 else Y[at]

    def step(batch):
        loss = F.cross_entropy(net(batch[0]), batch[1])
        descend(opt, loss)
        return loss

    return Run((net, opt), batches(), step, lambda: held_out(net), chance=math.log(10))



def nothing_selected(seed):
    "The loss is the mean over the pictures that are bright enough; in some batches none is, and it is 0 / 0."
    net, opt = classifier()

    def batches():
        for at in rows(): yield X[at] * (.2 if torch.rand(()) < .03 else 1), Y[at]

    def step(batch):
        bright = batch[0].mean(1) > .15
        loss = F.cross_entropy(net(batch[0]), batch[1], reduction="none")[bright].mean()
        descend(opt, loss)
        return loss

    return Run((net, opt), batches(), step, lambda: held_out(net), chance=math.log(10))


def skips_and_returns_nan(seed):
    "The step looks whether its loss is finite, skips the update where it is not, and returns the loss as it is."
    net, opt = classifier()

    def batches():
        for at in rows():
            x = X[at]
            if torch.rand(()) < .03: x[5] = math.inf
            yield x, Y[at]

    def step(batch):
        loss = F.cross_entropy(net(batch[0]), batch[1])
        opt.zero_grad()
        if loss.isfinite():
            loss.backward()
            opt.step()
        return loss.item()

    return Run((net, opt), batches(), step, lambda: held_out(net), chance=math.log(10))


def scaler_skips(seed):
    "A loss scaler that doubles its scale every 40 steps until half precision overflows, and skips that step."
    net, opt = classifier()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.**10, growth_interval=40)
    largest = float(torch.finfo(torch.float16).max)

    def step(batch):
        loss = F.cross_entropy(net(batch[0]), batch[1])
        opt.zero_grad()
        scaler.scale(loss).backward()
        for p in net.parameters(): p.grad[p.grad.abs() > largest] = math.inf # as it is in half precision
        scaler.step(opt)
        scaler.update()
        return loss.detach()

    batches = ((X[at], Y[at]) for at in rows())
    return Run((net, opt), batches, step, lambda: held_out(net), scaler.state_dict, math.log(10))


def scaler_skips_batches(seed):
    "A loss scaler, and a batch of large pictures now and then that overflows on its way: its loss is inf or NaN."
    net, opt = classifier()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.**8, growth_interval=200)

    def batches():
        for at in rows(): yield X[at] * (1e8 if torch.rand(()) < .02 else 1), Y[at]

    def step(batch):
        x = net[0](batch[0])
        x = x.masked_fill(x.abs() > 65504, math.inf) # as it is in half precision
        loss = F.cross_entropy(net[1:](x), batch[1])
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        return loss.detach()

    return Run((net, opt, scaler), batches(), step, lambda: held_out(net), chance=math.log(10))


def small_last_batch(seed):
    "The loss is summed, so that the last batch of an epoch, of 28 for 64, has less than half of the others' loss."
    net = mlp(64, 64, 10)
    opt = SGD(net.parameters(), 1e-3, momentum=.9)

    def step(batch):
        loss = F.cross_entropy(net(batch[0]), batch[1], reduction="sum")
        descend(opt, loss)
        return loss

    batches = ((X[at], Y[at]) for _, at in epochs(25))
    return Run((net, opt), batches, step, lambda: held_out(net))


def skips_and_returns_none(seed):
    "One batch of forty holds a broken picture: the step sees it, skips the batch and returns nothing."
    net, opt = classifier()

    def batches():
        for at in rows():
            x = X[at]
            if torch.rand(()) < .025: x[3] = math.nan
            yield x, Y[at]

    def step(batch):
        if not batch[0].isfinite().all(): return None
        loss = F.cross_entropy(net(batch[0]), batch[1])
        descend(opt, loss)
        return loss

    return Run((net, opt), batches(), step, lambda: held_out(net), chance=math.log(10))


def loss_and_accuracy(seed):
    "The step returns its loss and the share of pictures that were right."
    net, opt = classifier()

    def step(batch):
        said = net(batch[0])
        loss = F.cross_entropy(said, batch[1])
        descend(opt, loss)
        return loss, (said.argmax(1) == batch[1]).float().mean().item()

    batches = ((X[at], Y[at]) for at in rows())
    return Run((net, opt), batches, step, lambda: held_out(net), chance=math.log(10))


def no_batch(seed):
    "The step draws its batch itself, and the loop has none to hand over."
    net, opt = classifier()

    def step(_):
        at = torch.randint(TRAIN, (64,))
        loss = F.cross_entropy(net(X[at]), Y[at])
        descend(opt, loss)
        return loss

    return Run((net, opt), (None for _ in range(STEPS)), step, lambda: held_out(net), chance=math.log(10))


def next_of_a_loader(seed):
    "The step takes its batch from an iterator of its own, and begins a new epoch when that is over."
    net, opt = classifier()
    feed = iter(())

    def step(i):
        nonlocal feed
        try: at = next(feed)
        except StopIteration:
            feed = iter(torch.randperm(TRAIN).split(64))
            at = next(feed)
        loss = F.cross_entropy(net(X[at]), Y[at])
        descend(opt, loss)
        return loss

    return Run((net, opt), range(STEPS), step, lambda: held_out(net), chance=math.log(10))


# --- held out: nobody runs these while a Governor is written

def actor_critic(seed):
    "A cart is kept on a track that the step drives itself; the policy and the values share a loss."
    net = mlp(2, 48, 48, 4)
    opt, state = Adam(net.parameters(), 2e-3), 4 * torch.rand(32, 2) - 2

    def drive(s, push):
        speed = (.9 * s[:, 1] + .2 * (push - 1)).clamp(-1, 1)
        after = torch.stack([(s[:, 0] + .3 * speed).clamp(-2, 2), speed], 1)
        return after, -after[:, 0].abs()

    def step(i):
        nonlocal state
        out = net(state)
        choice = torch.distributions.Categorical(logits=out[:, :3])
        push = choice.sample()
        after, points = drive(state, push)
        with torch.no_grad(): gain = points + .9 * net(after)[:, 3] - out[:, 3]
        loss = (out[:, 3] - (gain + out[:, 3]).detach()).square().mean() - (gain * choice.log_prob(push)).mean()
        loss = loss - .01 * choice.entropy().mean()
        descend(opt, loss)
        fresh = torch.rand(32, 1) < .05
        state = torch.where(fresh, 4 * torch.rand(32, 2) - 2, after)
        return loss.item()

    @torch.no_grad()
    def score():
        x, total = torch.stack([torch.linspace(-2, 2, 64), torch.zeros(64)], 1), 0.
        for _ in range(30):
            x, points = drive(x, net(x)[:, :3].argmax(1))
            total -= points.mean().item()
        return total

    return Run((net, opt), range(STEPS), step, score, lambda: state)


def hard_examples(seed):
    "The step remembers the loss of every picture and draws the hard ones more often."
    net, opt = classifier()
    remembered, rng, taken = np.full(TRAIN, 2.3), np.random.default_rng(seed), 0

    def step(i):
        nonlocal taken
        share = remembered**.5
        at = torch.as_tensor(rng.choice(TRAIN, 64, p=share / share.sum()))
        losses = F.cross_entropy(net(X[at]), Y[at], reduction="none")
        loss = (losses * torch.as_tensor(1 / share[at.numpy()])).mean().float()
        descend(opt, loss)
        remembered[at.numpy()] = losses.detach().numpy() + .05
        taken += 1
        return loss

    return Run((net, opt), range(STEPS), step, lambda: held_out(net), lambda: (remembered, taken))


HEALTHY: dict[str, Callable[[int], Run]] = {f.__name__.replace("_", "-"): f for f in (
    reinforce, reinforce_signed, ring_gan, q_learning, mean_teacher, penalty_switched_on, smoothing_switched_on,
    restarts_by_counter, rolling_buffer, torch_generator, numpy_generator, numpy_buffer, tensor_buffer, carried_state,
    accumulation, averaged_weights, curriculum, hard_negatives, history, distilled, partly_called, prefetched,
    two_tasks, rare_hard_batches, ignored_labels, nothing_selected, skips_and_returns_nan, scaler_skips,
    scaler_skips_batches, small_last_batch, skips_and_returns_none, loss_and_accuracy, no_batch, next_of_a_loader)}
HELD_OUT: dict[str, Callable[[int], Run]] = {f.__name__.replace("_", "-"): f for f in (actor_critic, hard_examples)}
HELD_OUT_SEEDS = range(9100, 9110)


def begin(loop: Callable[[int], Run], seed: int) -> Run:
    "A run of a loop, with every global stream where the seed puts it."
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return loop(seed)
