"""Seven small training loops and ten ways to ruin them: what framework_loops.py trains.

A loop draws batch number `i` from its own stream, so that any batch can be had again; `step(batch)` trains on it and
gives the loss, `score()` is what counts at the end (lower is better), measured on data that are never trained on.
"""
import math
from collections.abc import Callable

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

STEPS, FAULT_AT = 600, 300


def stream(seed: int, *words: int) -> torch.Generator:
    "A generator that only these numbers decide."
    state = np.random.SeedSequence([seed, *words]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> 1))


def pictures() -> tuple[Tensor, Tensor]:
    "8×8 digits in [−1, 1] and their labels, in a fixed random order."
    found = load_digits()
    order = torch.randperm(len(found.images), generator=stream(7))
    return torch.as_tensor(found.images, dtype=torch.float32)[order, None] / 8 - 1, torch.as_tensor(found.target)[order]


def mlp(*sizes: int, between: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    "Linear layers with something between them."
    layers = [m for a, b in zip(sizes, sizes[1:]) for m in (nn.Linear(a, b), between())]
    return nn.Sequential(*layers[:-1])


def descend(opt, loss):
    "One step of an optimizer."
    opt.zero_grad()
    loss.backward()
    opt.step()


def split_names(text: str, known) -> list[str]:
    "Names with commas between them, of which some have commas themselves; what is not known stays as it is."
    pieces, out = text.split(","), []
    while pieces:
        k = next((k for k in range(len(pieces), 0, -1) if ",".join(pieces[:k]) in known), 1)
        out.append(",".join(pieces[:k]))
        del pieces[:k]
    return out


class Loop:
    "Model, optimizer, schedule and batches of one run."
    chance: float | None = None # loss of a network that has learnt nothing
    size = 64 # examples a batch
    clip = 0. # norm of the gradients, at most; 0: any

    def __init__(self, seed: int):
        torch.manual_seed(seed)
        self.seed, self.sign, self.count = seed, 1., dict(taken=0)
        self.build()
        self.clock: torch.optim.lr_scheduler.LRScheduler | None = self.schedule()

    def build(self): raise NotImplementedError
    def loss(self, batch) -> Tensor: raise NotImplementedError
    def batch(self, i: int): raise NotImplementedError
    def score(self) -> float: raise NotImplementedError
    def schedule(self): return None
    def wrong_targets(self, batch, g: torch.Generator): raise NotImplementedError
    def scaled(self, batch, factor: float): return (batch[0] * factor, *batch[1:])

    def step(self, batch) -> Tensor:
        "Train on a batch; its loss."
        loss = self.loss(batch)
        self.opt.zero_grad()
        (self.sign * loss).backward()
        if self.clip: nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
        self.opt.step()
        if self.clock is not None: self.clock.step()
        self.count["taken"] += 1
        return loss.detach()

    def parts(self) -> list:
        "Everything that has a state."
        return [self.net, self.opt, *([self.clock] if self.clock is not None else [])]

    def rows(self, i: int, n: int) -> Tensor:
        "Indices of a batch out of n examples."
        return torch.randint(n, (self.size,), generator=stream(self.seed, 1, i))


class ConvNet(Loop):
    "A residual network on digits with label noise, AdamW under OneCycle."
    chance = math.log(10)

    def build(self):
        class Block(nn.Module):
            def __init__(self, c):
                super().__init__()
                self.a, self.b, self.norm = nn.Conv2d(c, c, 3, 1, 1), nn.Conv2d(c, c, 3, 1, 1), nn.BatchNorm2d(c)
            def forward(self, x): return F.relu(x + self.b(F.relu(self.norm(self.a(x)))))
        self.net = nn.Sequential(nn.Conv2d(1, 16, 3, 1, 1), nn.ReLU(), Block(16), nn.MaxPool2d(2), Block(16),
                                 nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
        self.opt = torch.optim.AdamW(self.net.parameters(), 5e-3)
        self.x, self.y = pictures()

    def schedule(self): return torch.optim.lr_scheduler.OneCycleLR(self.opt, 1e-2, STEPS + 1)

    def batch(self, i):
        at, g = self.rows(i, 1400), stream(self.seed, 2, i)
        y = self.y[at]
        noisy = torch.rand(len(y), generator=g) < .1
        return self.x[at], torch.where(noisy, torch.randint(10, y.shape, generator=g), y)

    def loss(self, batch): return F.cross_entropy(self.net(batch[0]), batch[1])
    def wrong_targets(self, batch, g): return batch[0], torch.randint(10, batch[1].shape, generator=g)

    @torch.no_grad()
    def score(self):
        self.net.eval()
        wrong = (self.net(self.x[1400:]).argmax(1) != self.y[1400:]).float().mean().item()
        self.net.train()
        return wrong


class SmallGPT(Loop):
    "A two-layer transformer on a made-up language, AdamW with warm-up and a cosine, gradients clipped."
    chance, size, clip, letters, length = math.log(24), 16, 1., 24, 48

    def build(self):
        class Block(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.a, self.b = nn.LayerNorm(d), nn.LayerNorm(d)
                self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
                self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
            def forward(self, x):
                q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.a(x)).chunk(3, -1))
                x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
                return x + self.mlp(self.b(x))
        class Net(nn.Module):
            def __init__(self, letters, length, d=48):
                super().__init__()
                self.tokens, self.places = nn.Embedding(letters, d), nn.Embedding(length, d)
                self.blocks, self.norm = nn.Sequential(Block(d), Block(d)), nn.LayerNorm(d)
                self.head = nn.Linear(d, letters)
            def forward(self, x):
                x = self.tokens(x) + self.places.weight[:x.shape[1]]
                return self.head(self.norm(self.blocks(x)))
        self.net = Net(self.letters, self.length)
        self.opt = torch.optim.AdamW(self.net.parameters(), 3e-3, weight_decay=.01)
        g = stream(11) # the language: after two letters come a few others, some more often
        self.table = torch.softmax(3.5 * torch.randn(self.letters, self.letters, self.letters, generator=g), -1)

    def schedule(self):
        def rate(k): return min(1, k / 50) * (.55 + .45 * math.cos(math.pi * min(1, k / STEPS)))
        return torch.optim.lr_scheduler.LambdaLR(self.opt, rate)

    def text(self, g, n):
        x = torch.randint(self.letters, (n, 2), generator=g)
        while x.shape[1] < self.length + 1:
            x = torch.cat([x, torch.multinomial(self.table[x[:, -2], x[:, -1]], 1, generator=g)], 1)
        return x[:, :-1], x[:, 1:]

    def batch(self, i): return self.text(stream(self.seed, 2, i), self.size)
    def loss(self, batch): return F.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[1].flatten())
    def wrong_targets(self, batch, g): return batch[0], torch.randint(self.letters, batch[1].shape, generator=g)
    def scaled(self, batch, factor): return batch[0].flip(1) * 0, batch[1]

    @torch.no_grad()
    def score(self): return self.loss(self.text(stream(12), 64)).item()


class VAE(Loop):
    "Digits through eight numbers; the loss is minus a bound of the log-likelihood, and signed."
    def build(self):
        self.coder, self.decoder = mlp(64, 128, 16), mlp(8, 128, 64)
        self.net = nn.ModuleList([self.coder, self.decoder])
        self.opt = torch.optim.Adam(self.net.parameters(), 1e-3)
        self.x, _ = pictures()

    def batch(self, i):
        x = self.x[self.rows(i, 1400)].flatten(1)
        return x, torch.randn(len(x), 8, generator=stream(self.seed, 2, i)), x

    def loss(self, batch):
        x, noise, target = batch
        mean, log_var = self.coder(x).chunk(2, 1)
        made = self.decoder(mean + (log_var / 2).exp() * noise)
        off = (made - target).square().sum(1) / (2 * .2**2) + 64 * math.log(.2)
        return (off + (mean.square() + log_var.exp() - 1 - log_var).sum(1) / 2).mean()

    def wrong_targets(self, batch, g): return *batch[:2], batch[2][torch.randperm(len(batch[2]), generator=g)]
    def scaled(self, batch, factor): return batch[0] * factor, batch[1], batch[2] * factor

    @torch.no_grad()
    def score(self):
        x = self.x[1400:].flatten(1)
        return self.loss((x, torch.randn(len(x), 8, generator=stream(12)), x)).item()


class Triplet(Loop):
    "Digits of one class nearer than those of others, by a margin; many losses are close to zero."
    def build(self):
        self.net = mlp(64, 128, 16)
        self.opt = torch.optim.SGD(self.net.parameters(), .05, momentum=.9)
        self.x, self.y = pictures()
        self.where = [torch.nonzero(self.y[:1400] == k)[:, 0] for k in range(10)]

    def triplets(self, g, n, where):
        a = torch.randint(10, (n,), generator=g)
        b = (a + torch.randint(1, 10, (n,), generator=g)) % 10
        def some(k): return where[int(k)][torch.randint(len(where[int(k)]), (), generator=g)]
        return torch.stack([torch.stack([some(i), some(i), some(j)]) for i, j in zip(a, b)])

    def batch(self, i): return self.x[self.triplets(stream(self.seed, 2, i), self.size, self.where)].flatten(2), 0

    def loss(self, batch):
        a, p, n = F.normalize(self.net(batch[0]), dim=-1).unbind(1)
        return F.relu((a - p).square().sum(1) - (a - n).square().sum(1) + .5).mean()

    def wrong_targets(self, batch, g): return batch[0][:, [0, 2, 1]], 0

    @torch.no_grad()
    def score(self):
        z, keys = (F.normalize(self.net(self.x[part].flatten(1)), dim=1) for part in (slice(1400, None), slice(1400)))
        return (self.y[:1400][(z @ keys.T).argmax(1)] != self.y[1400:]).float().mean().item()


class Diffusion(Loop):
    "A small denoiser of two-dimensional points on a ring of eight."
    size = 128

    def build(self):
        self.net = mlp(4, 96, 96, 2, between=nn.SiLU)
        self.opt = torch.optim.AdamW(self.net.parameters(), 2e-3)

    def points(self, g, n):
        angle = torch.randint(8, (n,), generator=g) * math.pi / 4
        x = 1.5 * torch.stack([angle.cos(), angle.sin()], 1) + .05 * torch.randn(n, 2, generator=g)
        return x, torch.rand(n, 1, generator=g), torch.randn(n, 2, generator=g)

    def batch(self, i): return self.points(stream(self.seed, 2, i), self.size)

    def loss(self, batch):
        x, t, noise = batch
        keep = (t * math.pi / 2).cos()
        seen = keep * x + (1 - keep.square()).sqrt() * noise
        return F.mse_loss(self.net(torch.cat([seen, (3 * t).sin(), (3 * t).cos()], 1)), noise)

    def wrong_targets(self, batch, g): return *batch[:2], batch[2][torch.randperm(len(batch[2]), generator=g)]

    @torch.no_grad()
    def score(self): return self.loss(self.points(stream(12), 4000)).item()


class Memory(Loop):
    "A GRU that remembers one of eight symbols; now and then it has to for five times as long."
    chance, size = math.log(8), 32

    def build(self):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.read, self.gru, self.head = nn.Embedding(9, 16), nn.GRU(16, 32, batch_first=True), nn.Linear(32, 8)
            def forward(self, x): return self.head(self.gru(self.read(x))[0][:, -1])
        self.net = Net()
        self.opt = torch.optim.Adam(self.net.parameters(), 3e-3)

    def ask(self, g, n, delay):
        first = torch.randint(8, (n, 1), generator=g)
        return torch.cat([first, torch.full((n, delay), 8)], 1), first[:, 0]

    def batch(self, i):
        g = stream(self.seed, 2, i)
        return self.ask(g, self.size, 20 if torch.rand((), generator=g) < 1 / 40 else 6)

    def loss(self, batch): return F.cross_entropy(self.net(batch[0]), batch[1])
    def wrong_targets(self, batch, g): return batch[0], torch.randint(8, batch[1].shape, generator=g)
    def scaled(self, batch, factor): return batch[0] * 0, batch[1]
    @torch.no_grad()
    def score(self): return self.loss(self.ask(stream(12), 256, 8)).item()


class QLearning(Loop):
    "Deep Q-learning of CartPole from stored play, with a target network; its loss grows as it learns."
    def build(self):
        self.net, self.old = mlp(4, 64, 64, 2), mlp(4, 64, 64, 2)
        self.old.load_state_dict(self.net.state_dict())
        self.opt = torch.optim.Adam(self.net.parameters(), 1e-3)
        rng, env, rows = np.random.default_rng(5), gym.make("CartPole-v1"), []
        s, _ = env.reset(seed=5)
        while len(rows) < 4000: # a controller that is mostly right
            a = int(s[2] + .3 * s[3] > 0) if rng.random() < .8 else int(rng.integers(2))
            after, r, over, cut, _ = env.step(a)
            rows.append((*s, a, r, *after, float(over)))
            s = env.reset()[0] if over or cut else after
        self.memory = torch.tensor(rows, dtype=torch.float32)

    def parts(self): return [*super().parts(), self.old]
    def batch(self, i): return self.memory[self.rows(i, 3600)], 0

    def td(self, m):
        s, a, r, after, over = m[:, :4], m[:, 4].long(), m[:, 5], m[:, 6:10], m[:, 10]
        with torch.no_grad(): target = r + .95 * (1 - over) * self.old(after).max(1).values
        return F.smooth_l1_loss(self.net(s)[torch.arange(len(a)), a], target)

    def loss(self, batch): return self.td(batch[0])

    def step(self, batch):
        loss = super().step(batch)
        if self.count["taken"] % 20 == 0: self.old.load_state_dict(self.net.state_dict())
        return loss

    def scaled(self, batch, factor):
        m = batch[0].clone()
        m[:, :4], m[:, 5:10] = m[:, :4] * factor, m[:, 5:10] * factor
        return m, 0

    def wrong_targets(self, batch, g):
        m = batch[0].clone()
        m[:, 5] = 10 * torch.randn(len(m), generator=g)
        return m, 0

    @torch.no_grad()
    def score(self): # the error of the values, in units of them
        m = self.memory[3600:]
        return (self.td(m) / (1 + self.net(m[:, :4]).abs().mean())).item()


LOOPS: dict[str, type[Loop]] = dict(convnet=ConvNet, gpt=SmallGPT, vae=VAE, triplet=Triplet, diffusion=Diffusion,
                                    memory=Memory, dqn=QLearning)


# --- faults: called before every step with its number since the fault began; they may change the loop and give a batch

def weights(loop: Loop) -> list[Tensor]: return [p.data for p in loop.net.parameters() if p.ndim > 1]

def nan_weight(loop, k, batch, g):
    if k == 0: weights(loop)[0].view(-1)[3] = math.nan
    return batch

def exponent_flip(loop, k, batch, g):
    "The highest bit of the exponent of one weight."
    if k == 0: weights(loop)[1].view(torch.int32).view(-1)[5] ^= 1 << 30
    return batch

def dead_layer(loop, k, batch, g):
    if k == 0: weights(loop)[len(weights(loop)) // 2].mul_(1e-3)
    return batch

def inf_moment(loop, k, batch, g):
    if k == 0:
        for s in list(loop.opt.state.values())[:1]:
            s["exp_avg_sq" if "exp_avg_sq" in s else "momentum_buffer"].view(-1)[0] = math.inf
    return batch

def garbage_momentum(loop, k, batch, g):
    if k == 0:
        for s in loop.opt.state.values():
            m = s["exp_avg" if "exp_avg" in s else "momentum_buffer"]
            m.copy_(torch.randn(m.shape, generator=g) * (20 * m.std() + 1e-3))
    return batch

def rate(n):
    "The learning rate × 30, for n steps."
    def fault(loop, k, batch, g):
        if k in (0, n):
            for group in loop.opt.param_groups: group["lr"] *= 30 if k == 0 else 1 / 30
        return batch
    return fault

def sign_error(loop, k, batch, g):
    loop.sign = -1. if k < 20 else 1.
    return batch

def wrong_targets(n):
    "Targets of nothing, n batches."
    def fault(loop, k, batch, g): return loop.wrong_targets(batch, g) if k < n else batch
    return fault

def huge_batch(loop, k, batch, g): return loop.scaled(batch, 1e4) if k == 0 else batch
def wrong_scale(loop, k, batch, g): return loop.scaled(batch, .2)

Fault = Callable[[Loop, int, tuple, torch.Generator], tuple]
FAULTS: dict[str, Fault] = {
    "NaN weight": nan_weight, "exponent flip": exponent_flip, "dead layer": dead_layer, "inf second moment": inf_moment,
    "garbage momentum": garbage_momentum, "rate × 30, 5 steps": rate(5), "sign error, 20 steps": sign_error,
    "wrong targets, 50 steps": wrong_targets(50), "one batch × 1e4": huge_batch, "wrong scale for good": wrong_scale}
BEYOND = ("wrong scale for good",) # no rollback can mend what goes on
