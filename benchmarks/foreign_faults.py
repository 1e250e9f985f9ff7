"""Supervised loops that no Governor was built on, faults from mild to total, and whole stories of ruin.

A loop here is an object whose `step` trains on a batch; batch number `i` comes from a stream of its own, so that any
can be had again. `parts` is what a newcomer hands over: the network and its optimizer, no more. A fault is called
before every step with the number of steps since it began; it may change the loop, and gives the batch. A `Story` is a
loop whose fault is its own: the same code with its author's mend is the clean run.
"""
import copy
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import loops
from benchmarks.foreign_loops import TRAIN, Adam, Reader, X, Y, counting_text
from benchmarks.loops import Fault, descend, huge_batch, mlp, rate, sign_error, stream, wrong_targets

STEPS, FAULT_AT = 500, 250


class Loop(loops.Loop):
    "A network, its optimizer and its batches: no schedule, and nothing is counted."
    def __init__(self, seed: int):
        torch.manual_seed(seed)
        self.seed, self.sign = seed, 1.
        self.build()

    def step(self, batch) -> Tensor:
        "Train on a batch; its loss."
        loss = self.loss(batch)
        self.opt.zero_grad()
        (self.sign * loss).backward()
        self.opt.step()
        return loss.detach()

    def parts(self) -> tuple: return self.net, self.opt

    @torch.no_grad()
    def judged(self, measure: Callable[[], Tensor]) -> float:
        "A measure of the network in evaluation mode."
        self.net.eval()
        found = float(measure())
        self.net.train()
        return found


class Pictures(Loop):
    "Digits and their labels."
    chance, sizes, rate = math.log(10), (64, 64, 10), 2e-3

    def build(self):
        self.net = mlp(*self.sizes)
        self.opt = Adam(self.net.parameters(), self.rate)

    def batch(self, i):
        at = self.rows(i, TRAIN)
        return X[at], Y[at]
    def loss(self, batch): return F.cross_entropy(self.net(batch[0]), batch[1])
    def wrong_targets(self, batch, g): return batch[0], torch.randint(10, batch[1].shape, generator=g)
    def score(self): return self.judged(lambda: F.cross_entropy(self.net(X[TRAIN:]), Y[TRAIN:]))


class CarriedState(Loop):
    "An LSTM over a long text, whose state is carried from step to step."
    chance, size = math.log(8), 16

    def build(self):
        self.net, self.carried = Reader(), None
        self.opt = Adam(self.net.parameters(), 5e-3)
        self.text = counting_text(10 * STEPS + 1, self.size, stream(self.seed, 1))
        self.other = counting_text(201, 32, stream(1))

    def batch(self, i): return self.text[:, 10 * i:10 * i + 10], self.text[:, 10 * i + 1:10 * i + 11]
    def wrong_targets(self, batch, g): return batch[0], torch.randint(8, batch[1].shape, generator=g)
    def scaled(self, batch, factor): return torch.zeros_like(batch[0]), batch[1]

    def loss(self, batch):
        said, carried = self.net(batch[0], self.carried)
        self.carried = tuple(h.detach() for h in carried)
        return F.cross_entropy(said.flatten(0, 1), batch[1].flatten())

    @torch.no_grad()
    def score(self):
        return F.cross_entropy(self.net(self.other[:, :-1])[0].flatten(0, 1), self.other[:, 1:].flatten()).item()


class UNet(Loop):
    "Finds the ink under noise: down, up, and across, with batch norm."
    chance, size = math.log(2), 12

    def build(self):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                def block(a, b):
                    return nn.Sequential(nn.Conv2d(a, b, 3, 1, 1), nn.BatchNorm2d(b, momentum=.01), nn.ReLU())
                self.down, self.deep, self.up = block(1, 6), block(6, 12), block(18, 6)
                self.say = nn.Conv2d(6, 1, 1)
            def forward(self, x):
                a = self.down(x)
                b = F.interpolate(self.deep(F.max_pool2d(a, 2)), scale_factor=2)
                return self.say(self.up(torch.cat([a, b], 1)))
        self.net = Net()
        self.opt = torch.optim.AdamW(self.net.parameters(), 3e-3)

    def noisy(self, x, g):
        x = x.view(-1, 1, 8, 8)
        return x + .4 * torch.randn(x.shape, generator=g), (x > .5).float()

    def batch(self, i): return self.noisy(X[self.rows(i, TRAIN)], stream(self.seed, 2, i))
    def loss(self, batch): return F.binary_cross_entropy_with_logits(self.net(batch[0]), batch[1])
    def wrong_targets(self, batch, g): return batch[0], batch[1][torch.randperm(self.size, generator=g)].flip(2)

    def score(self):
        x, y = self.noisy(X[TRAIN:], stream(2))
        return self.judged(lambda: F.binary_cross_entropy_with_logits(self.net(x), y))


class Contrastive(Loop):
    "Two noisy views of a digit belong together."
    chance = math.log(64)

    def build(self):
        self.net = mlp(64, 128, 32)
        self.opt = Adam(self.net.parameters(), 1e-3)

    def views(self, x, g): return torch.stack([x + .15 * torch.randn(x.shape, generator=g) for _ in range(2)])
    def batch(self, i): return self.views(X[self.rows(i, TRAIN)], stream(self.seed, 2, i)), 0

    def loss(self, batch):
        a, b = F.normalize(self.net(batch[0]), dim=2)
        return F.cross_entropy(a @ b.T / .1, torch.arange(len(a)))

    def wrong_targets(self, batch, g):
        return torch.stack([batch[0][0], batch[0][1][torch.randperm(self.size, generator=g)]]), 0

    @torch.no_grad()
    def score(self): return self.loss((self.views(X[TRAIN:TRAIN + 256], stream(2)), 0)).item()


class FineTune(Pictures):
    "A trained network with batch norm learns two new digits; its averaged weights count, and are not handed over."
    size = 32

    def build(self):
        self.net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64, momentum=.02), nn.ReLU(), nn.Linear(64, 10))
        opt, known = Adam(self.net.parameters(), 5e-3), torch.nonzero(Y[:TRAIN] < 8)[:, 0]
        for _ in range(80):
            at = known[torch.randint(len(known), (64,))]
            descend(opt, F.cross_entropy(self.net(X[at]), Y[at]))
        self.opt = torch.optim.AdamW(self.net.parameters(), 1e-3)
        self.average = torch.optim.swa_utils.AveragedModel(
            self.net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(.98), use_buffers=True)

    def step(self, batch):
        loss = super().step(batch)
        self.average.update_parameters(self.net)
        return loss

    def score(self):
        self.average.eval()
        with torch.no_grad(): return F.cross_entropy(self.average(X[TRAIN:]), Y[TRAIN:]).item()


class Experts(Pictures):
    "Four small experts and a gate that mixes them, with a loss for an even load."
    def build(self):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.gate, self.experts = nn.Linear(64, 4), nn.ModuleList(mlp(64, 24, 10) for _ in range(4))
            def forward(self, x):
                self.share = self.gate(x).softmax(1)
                return torch.einsum("ne,nec->nc", self.share, torch.stack([e(x) for e in self.experts], 1))
        self.net = Net()
        self.opt = Adam(self.net.parameters(), 3e-3)

    def loss(self, batch): return super().loss(batch) + .1 * 4 * self.net.share.mean(0).square().sum()


class LearntVariance(Loop):
    "A variational autoencoder of digits that learns its variance: the loss is signed and starts far away."
    def build(self):
        self.net = nn.ModuleDict(dict(code=mlp(64, 96, 12), make=mlp(6, 96, 64)))
        self.net.register_parameter("spread", nn.Parameter(torch.zeros(64)))
        self.opt = Adam(self.net.parameters(), 2e-3)

    def batch(self, i):
        x = X[self.rows(i, TRAIN)]
        return x, torch.randn(len(x), 6, generator=stream(self.seed, 2, i)), x

    def loss(self, batch):
        mean, log_var = self.net["code"](batch[0]).chunk(2, 1)
        off = (self.net["make"](mean + (log_var / 2).exp() * batch[1]) - batch[2]).square()
        off = (off / (self.net.spread.exp() + .01) + (self.net.spread.exp() + .01).log()).sum(1) / 2
        return (off + (mean.square() + log_var.exp() - 1 - log_var).sum(1) / 2).mean()

    def wrong_targets(self, batch, g): return *batch[:2], batch[2][torch.randperm(self.size, generator=g)]
    def scaled(self, batch, factor): return batch[0] * factor, batch[1], batch[2] * factor

    @torch.no_grad()
    def score(self): return self.loss((X[TRAIN:], torch.randn(297, 6, generator=stream(2)), X[TRAIN:])).item()


def three_classes(x: Tensor) -> Tensor: return (x[:, :3].sum(1) > 0).long() + (x[:, 3:6].sum(1) > 0).long()

class Table(Loop):
    "A plain network on a table of twenty columns, three classes."
    chance = math.log(3)

    def build(self):
        self.x = torch.randn(3000, 20, generator=stream(4))
        self.y = three_classes(self.x)
        self.net = self.make()
        self.opt = Adam(self.net.parameters(), 2e-3)

    def make(self): return mlp(20, 64, 64, 3)
    def batch(self, i):
        at = self.rows(i, 2000)
        return self.x[at], self.y[at]
    def loss(self, batch): return F.cross_entropy(self.net(batch[0]), batch[1])
    def wrong_targets(self, batch, g): return batch[0], torch.randint(3, batch[1].shape, generator=g)
    def score(self): return self.judged(lambda: F.cross_entropy(self.net(self.x[2000:]), self.y[2000:]))


class NormedTable(Table):
    "The same through batch norm, with momentum."
    def build(self):
        super().build()
        self.opt = torch.optim.SGD(self.net.parameters(), .05, momentum=.9)
    def make(self):
        return nn.Sequential(nn.BatchNorm1d(20, momentum=.01), nn.Linear(20, 64), nn.BatchNorm1d(64, momentum=.01),
                             nn.ReLU(), nn.Linear(64, 3))


class Attention(Loop):
    "Held out: a transformer layer that says which of the symbols of a row comes most often."
    chance, size = math.log(6), 48

    def build(self):
        self.net = nn.Sequential(nn.Embedding(6, 24), nn.TransformerEncoderLayer(24, 2, 48, 0., batch_first=True),
                                 nn.Flatten(), nn.Linear(24 * 9, 6))
        self.opt = torch.optim.AdamW(self.net.parameters(), 3e-3)

    def ask(self, g, n):
        x = torch.randint(6, (n, 9), generator=g)
        return x, F.one_hot(x, 6).sum(1).add(torch.linspace(0, .5, 6)).argmax(1)

    def batch(self, i): return self.ask(stream(self.seed, 2, i), self.size)
    def loss(self, batch): return F.cross_entropy(self.net(batch[0]), batch[1])
    def wrong_targets(self, batch, g): return batch[0], torch.randint(6, batch[1].shape, generator=g)
    def scaled(self, batch, factor): return torch.zeros_like(batch[0]), batch[1]
    def score(self):
        x, y = self.ask(stream(2), 500)
        return self.judged(lambda: F.cross_entropy(self.net(x), y))


class Siamese(Loop):
    "Held out: squared error of a distance between two digits that is 0 for the same class and 1 for others."
    def build(self):
        self.net = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 12))
        self.opt = torch.optim.RMSprop(self.net.parameters(), 5e-4)

    def pairs(self, a, b): return X[a], X[b], (Y[a] != Y[b]).float()
    def batch(self, i):
        a, g = self.rows(i, TRAIN), stream(self.seed, 2, i)
        of = [torch.nonzero(Y[:TRAIN] == k)[:100, 0] for k in range(10)]
        mates = torch.stack([of[k][torch.randint(100, (), generator=g)] for k in Y[a].tolist()])
        return self.pairs(a, torch.where(torch.rand(len(a), generator=g) < .5, mates, self.rows(10_000 + i, TRAIN)))

    def loss(self, batch):
        far = 1 - F.cosine_similarity(self.net(batch[0]), self.net(batch[1]))
        return F.mse_loss(far, batch[2])

    def wrong_targets(self, batch, g): return *batch[:2], batch[2][torch.randperm(self.size, generator=g)]
    def score(self):
        at = torch.arange(TRAIN, 1797)
        return self.judged(lambda: self.loss(self.pairs(at[:148], at[148:296])))


LOOPS: dict[str, type[Loop]] = dict(
    lstm=CarriedState, unet=UNet, contrastive=Contrastive, finetune=FineTune, experts=Experts, vae=LearntVariance,
    table=Table, normed=NormedTable)
HELD_OUT: dict[str, type[Loop]] = dict(attention=Attention, siamese=Siamese)


# --- faults

def matrices(loop: Loop) -> list[Tensor]: return [p.data for p in loop.net.parameters() if p.ndim > 1]

def nan_weight(loop, k, batch, g):
    if k == 0: matrices(loop)[-1].view(-1)[2] = math.nan
    return batch

def burst(n):
    "Inputs that somebody forgot to divide by 255, n batches."
    def fault(loop, k, batch, g): return loop.scaled(batch, 255.) if k < n else batch
    return fault

def garbage_moments(loop, k, batch, g):
    if k == 0:
        for s in loop.opt.state.values():
            m = s[next(name for name in ("exp_avg", "momentum_buffer", "square_avg") if name in s)]
            m.copy_(torch.randn(m.shape, generator=g).abs() * (30 * m.square().mean().sqrt() + 1e-3))
    return batch

def dead_layer(loop, k, batch, g):
    if k == 0: matrices(loop)[0].mul_(1e-3)
    return batch

def steep(loop, k, batch, g):
    "One gradient × 1000, at a loss like any other."
    loop.sign = 1000. if k == 0 else 1.
    return batch

def bit_flip(loop, k, batch, g):
    "The highest bit of the exponent of one weight."
    if k == 0: matrices(loop)[-1].view(-1).view(torch.int32)[3] ^= 1 << 30
    return batch

def noise(share):
    "Noise of a share of the first layer's own spread, once."
    def fault(loop, k, batch, g):
        if k == 0:
            w = matrices(loop)[0]
            w.add_(share * w.std() * torch.randn(w.shape, generator=g))
        return batch
    return fault

def poisoned_variance(loop, k, batch, g):
    "Running variances × 1e4: nothing in training shows it."
    if k == 0:
        for name, b in loop.net.named_buffers():
            if name.endswith("running_var"): b.mul_(1e4)
    return batch

FAULTS: dict[str, Fault] = {
    "NaN weight": nan_weight, "one batch × 1e4": huge_batch, "20 batches × 255": burst(20),
    "60 batches × 255": burst(60), "rate × 30, 8 steps": rate(8), "rate × 30 for good": rate(-1),
    "wrong labels, 30 batches": wrong_targets(30), "wrong labels, 50 batches": wrong_targets(50),
    "garbage moments": garbage_moments, "dead layer": dead_layer, "sign flip, 20 steps": sign_error,
    "one gradient × 1000": steep, "bit flip": bit_flip, "noise × .5": noise(.5), "noise × 1": noise(1.),
    "noise × 2": noise(2.), "noise × 4": noise(4.), "poisoned variance": poisoned_variance}
NORMED = ("unet", "finetune", "normed") # loops that have running variances
# what may be said of a fault; "unknown" is no lie
TRUE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("NaN weight", "dead layer", "bit flip", "noise × .5", "noise × 1", "noise × 2", "noise × 4",
                     "poisoned variance"), ("external",)),
    **dict.fromkeys(("one batch × 1e4", "20 batches × 255", "60 batches × 255", "wrong labels, 30 batches",
                     "wrong labels, 50 batches"), ("data",)),
    "rate × 30, 8 steps": ("rate",), "rate × 30 for good": ("rate", "lr_too_high"),
    "garbage moments": ("external", "moments"),
    # something outside of the step sets the number that these read
    "sign flip, 20 steps": ("step", "external", "inputs"),
    "one gradient × 1000": ("step", "external", "inputs", "gradient_spike")}


def faults_of(name: str) -> list[str]:
    "The faults that a loop can have."
    return [f for f in FAULTS if f != "poisoned variance" or name in NORMED]


# --- stories: public reports of ruined runs, in small; `ill` is the code as it was reported, and not `ill` its mend

class Story(Loop):
    "A loop that has its fault in itself, in its data, or in what its author does between two steps."
    steps = STEPS
    true: tuple[str, ...] = () # causes that may be named
    mendable = True # by what a guard can do while the run goes on; the code itself it can't

    def __init__(self, seed: int, ill: bool = True):
        self.ill, self.taken = ill, 0 # taken: micro-batches or steps, in stories whose step counts them
        super().__init__(seed)

    def between(self, i: int): "What the author does before step i."
    def epoch_rows(self, i: int, n: int) -> Tensor: # of batch i, every example once an epoch
        per = n // self.size
        return torch.randperm(n, generator=stream(self.seed, 4, i // per))[i % per * self.size:][:self.size]


class Rows(Story):
    "A story of 640 rows, each once an epoch, and others for the score."
    size, true = 32, ("data",)
    data: tuple[Tensor, ...] # of all rows: inputs, and targets last

    def batch(self, i):
        at = self.epoch_rows(i, 640)
        return tuple(t[at] for t in self.data)

    @torch.no_grad()
    def score(self): return self.loss(tuple(t[640:] for t in self.data)).item()


class SamePair(Rows):
    "A distance between a picture and itself: its loss is finite, its gradient is not, and comes once an epoch."
    def build(self):
        g = stream(self.seed, 1)
        a, b = torch.randn(800, 8, generator=g), torch.randn(800, 8, generator=g)
        aim = (a - b)[:, :3].norm(dim=1)
        b[300], aim[300] = a[300], 0
        self.data = a, b, aim
        self.net = mlp(8, 32, 8)
        self.opt = Adam(self.net.parameters(), 3e-3)

    def loss(self, batch):
        far = (self.net(batch[0]) - self.net(batch[1])).square().sum(1)
        return ((far + (0. if self.ill else 1e-9)).sqrt() - batch[2]).square().mean()


class EmptyText(Rows):
    "One text of 640 has no word: its attention is 0 / 0, once an epoch."
    chance = math.log(4)

    def build(self):
        g = stream(self.seed, 1)
        x = torch.randint(1, 20, (800, 12), generator=g)
        x[torch.arange(12) >= torch.randint(4, 13, (800, 1), generator=g)] = 0
        self.data = x, (x % 4 == 1).sum(1).clamp(max=3)
        x[300] = 0
        self.read, self.mark, self.say = nn.Embedding(20, 24), nn.Linear(24, 1), mlp(24, 48, 4)
        self.net = nn.ModuleList([self.read, self.mark, self.say])
        self.opt = Adam(self.net.parameters(), 5e-3)

    def loss(self, batch):
        seen = self.read(batch[0])
        marks = self.mark(seen)[..., 0].masked_fill(batch[0] == 0, -math.inf)
        if not self.ill: marks = marks.masked_fill((batch[0] == 0).all(1, keepdim=True), 0.)
        return F.cross_entropy(self.say((marks.softmax(1)[..., None] * seen).sum(1) * 4), batch[1])


class LogOfZero(Rows):
    "`where(x > 0, log(x), 0)` of a count that is 0 in two rows: its loss is finite, its gradient is not."
    def build(self):
        x = torch.rand(800, 6, generator=stream(self.seed, 1)) + .05
        self.data = x, x.log().sum(1, keepdim=True)
        x[300, 2] = x[310, 4] = 0.
        self.net = nn.ModuleDict(dict(scale=nn.Linear(6, 6, bias=False), say=mlp(6, 32, 1)))
        nn.init.eye_(self.net["scale"].weight)
        self.opt = Adam(self.net.parameters(), 3e-3)

    def loss(self, batch):
        x = batch[0] * self.net["scale"].weight.diagonal()
        seen = torch.where(x > 0, x, torch.ones(())).log() if not self.ill else torch.where(x > 0, x.log(), 0.)
        return F.mse_loss(self.net["say"](seen), batch[1])


class RowOf1e20(Rows):
    "A row of 1e20 in a table: batch norm hides it from the loss, and its running variance is infinite for good."
    chance = math.log(3)

    def build(self):
        x = torch.randn(1000, 20, generator=stream(self.seed, 1))
        self.data = x, three_classes(x)
        if self.ill: x[300] *= 1e20
        self.net = nn.Sequential(nn.BatchNorm1d(20), nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 3))
        self.opt = Adam(self.net.parameters(), 3e-3)

    def loss(self, batch): return F.cross_entropy(self.net(batch[0]), batch[1])
    def score(self): return self.judged(super().score)


class HalfMoments(Pictures, Story):
    "Resumed in the middle from moments that were stored in half precision: the small squares have become 0."
    true, chance = ("external", "moments"), None
    sizes, rate = (64, 48, 48, 10), 1e-2

    def loss(self, batch): return 1e-3 * super().loss(batch)
    def between(self, i):
        if self.ill and i == FAULT_AT:
            for s in self.opt.state.values(): s["exp_avg_sq"] = s["exp_avg_sq"].half().float()


class AverageLeft(Pictures, Story):
    "After every validation the slow averaged weights stay in the network."
    true, rate = ("external",), 1e-3

    def build(self):
        super().build()
        self.slow = copy.deepcopy(self.net)

    def between(self, i):
        with torch.no_grad():
            for a, b in zip(self.slow.parameters(), self.net.parameters()): a.lerp_(b, .01)
        if self.ill and i and i % 140 == 0: self.net.load_state_dict(self.slow.state_dict())


class RateFromStart(Pictures, Story):
    "Resumed with a schedule that begins anew, ten times as high as where it was."
    true = ("rate", "lr_too_high")

    def build(self):
        self.net = mlp(64, 64, 10)
        self.opt = torch.optim.SGD(self.net.parameters(), .6, momentum=.9)

    def between(self, i):
        k = i - FAULT_AT if self.ill and i >= FAULT_AT else i
        self.opt.param_groups[0]["lr"] = .02 + .58 * math.exp(-k / 60) if k > 30 or i < FAULT_AT else 2.5


class HeadLost(Pictures, Story):
    "Resumed in the middle without the last layer, which is as it was made; its moments are there."
    true, rate = ("external",), 1e-3
    def between(self, i):
        if self.ill and i == FAULT_AT: self.net[-1].reset_parameters()


class FallsForEver(Story):
    "The error is divided by a batch mean that is negative for one column: the loss falls without end."
    true, mendable = ("step",), False

    def build(self):
        self.x = torch.randn(2000, 6, generator=stream(self.seed, 1))
        self.x[:, 2] = -1e-3
        self.net = mlp(6, 32, 6)
        self.opt = Adam(self.net.parameters(), 2e-3)

    def batch(self, i): return self.x[self.rows(i, 1800)]

    def loss(self, batch):
        v = batch.var(0)
        spare = batch.mean(0) if self.ill else torch.ones(6)
        return ((self.net(batch) - batch).square() / torch.where(v > 1e-12, v, spare)).sum(1).mean()

    @torch.no_grad()
    def score(self): return (self.net(self.x[1800:]) - self.x[1800:]).square().sum(1).mean().item()


class NeverLearns(Pictures, Story):
    "The optimizer was made before the network was: it holds the weights of another one."
    true, mendable = ("step",), False

    def build(self):
        other, self.net = mlp(64, 64, 10), mlp(64, 64, 10)
        self.opt = Adam((other if self.ill else self.net).parameters(), 2e-3)


class RowsNotScaled(LearntVariance, Story):
    "Three pictures of the data were not divided by 255; they come back by chance."
    true = ("data",)

    def batch(self, i):
        x, e, _ = super().batch(i)
        if self.ill:
            x = x.clone()
            x[torch.isin(self.rows(i, TRAIN), torch.tensor([11, 500, 1200]))] *= 255.
        return x, e, x


class OneMicroBatch(Pictures, Story):
    "Four micro-batches an update, counted by the loop; one micro-batch of 500 is not a number."
    size, rate, true = 16, 3e-3, ("data",)

    def batch(self, i):
        x, y = super().batch(i)
        return (x * math.nan if self.ill and i % 200 == 101 else x), y

    def step(self, batch):
        loss = self.loss(batch)
        (loss / 4).backward()
        self.taken += 1
        if self.taken % 4 == 0:
            self.opt.step()
            self.opt.zero_grad()
        return loss.detach()


class Glitch(Table, Story):
    "The step's own augmentation goes wrong once, by a counter: one batch × 300 with its labels in reverse."
    true = ("data", "step")

    def step(self, batch):
        if self.ill and self.taken == FAULT_AT: batch = batch[0] * 300, batch[1].flip(0)
        self.taken += 1
        return super().step(batch)


class RateInStep(Table, Story):
    "The step sets the rate itself, from a counter, and for eight steps a hundred times too high."
    true = ("rate",)

    def step(self, batch):
        high = self.ill and FAULT_AT <= self.taken < FAULT_AT + 8
        self.opt.param_groups[0]["lr"] = .2 if high else 2e-3
        self.taken += 1
        return super().step(batch)


class SignInStep(Pictures, Story):
    "The step turns its loss around for 40 steps, by a counter of its own."
    true = ("step",)

    def loss(self, batch):
        turned = self.ill and FAULT_AT <= self.taken < FAULT_AT + 40
        self.taken += 1
        return super().loss(batch) * (-1 if turned else 1)


STORIES: dict[str, type[Story]] = {
    "same pair": SamePair, "log of zero": LogOfZero, "empty text": EmptyText, "row of 1e20": RowOf1e20,
    "half moments": HalfMoments, "average left": AverageLeft, "rate from start": RateFromStart, "head lost": HeadLost,
    "falls for ever": FallsForEver, "never learns": NeverLearns, "rows × 255": RowsNotScaled,
    "one micro-batch": OneMicroBatch, "glitch in the step": Glitch, "rate in the step": RateInStep,
    "sign in the step": SignInStep}
