"""The gate before the update: how far out of line healthy gradients are, what the gate saves alone, and what it costs:

    python -m benchmarks.gate_bench                    # writes nbs/explanations/bench_gate.json; half an hour on a core
    python -m benchmarks.gate_bench healthy --seeds 2 --first 900     # one part, printed only
    python -m benchmarks.gate_bench price

`healthy` trains every loop of loops.py and of healthy_loops.py and the forms below, where nothing is wrong, and notes
for four rules the highest value of what they compare with a threshold. `ruined` ruins runs by what comes through a
gradient, and lets them go on alone, with a gate, and under ZClip. `price` takes training steps with and without, in
turns.
"""
import argparse
import json
import math
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks import healthy_loops, loops
from benchmarks.foreign_rivals import ZClipRule
from benchmarks.loops import descend, mlp
from benchmarks.measure import machine
from esper_nb.guard.gate import GateConfig, NormHistory, UpdateGate, gradients_of

PATH = Path(__file__).resolve().parents[1]/"nbs/explanations/bench_gate.json"
STEPS = 800
X, Y = (t[:1400] for t in loops.pictures())
X = X.flatten(1)
Adam, SGD = torch.optim.Adam, torch.optim.SGD


# --- healthy forms that the two other files have not: each takes its steps, nothing is wrong in any

def draw(size=64, most=1400):
    rows = torch.randint(most, (size,))
    return X[rows], Y[rows]

def plain(t, logits, y): return F.cross_entropy(logits, y)

def classify(net, opt, loss=plain, size=64, most=1400, steps=STEPS, clock=None):
    "Train on digits, with a loss that may change with the step."
    for t in range(steps):
        x, y = draw(size, most)
        descend(opt, loss(t, net(x), y))
        if clock is not None: clock.step()

def reinforce():
    net, base = mlp(64, 64, 10), 0.
    opt = Adam(net.parameters(), 3e-3)
    for _ in range(STEPS):
        x, y = draw()
        choice = torch.distributions.Categorical(logits=net(x))
        a = choice.sample()
        reward = (a == y).float()
        descend(opt, -(choice.log_prob(a) * (reward - base)).mean())
        base = .95 * base + .05 * reward.mean().item()

def penalty():
    net = mlp(64, 64, 10)
    def loss(t, logits, y):
        return F.cross_entropy(logits, y) + .05 * (t >= 400) * sum(p.square().sum() for p in net.parameters())
    classify(net, SGD(net.parameters(), .05, momentum=.9), loss)

def smoothing():
    net = mlp(64, 64, 10)
    def loss(t, logits, y): return F.cross_entropy(logits, y, label_smoothing=.2 * (t >= 400))
    classify(net, torch.optim.AdamW(net.parameters(), 3e-3), loss)

def ignored():
    net = mlp(64, 64, 10)
    def loss(t, logits, y): return F.cross_entropy(logits, torch.full_like(y, -100) if torch.rand(()) < .03 else y)
    classify(net, torch.optim.AdamW(net.parameters(), 3e-3), loss)

def ignored_in_part():
    net = mlp(64, 64, 10)
    def loss(t, logits, y):
        kept = int(torch.randint(1, 65, ()))
        return F.cross_entropy(logits[:kept], y[:kept])
    classify(net, torch.optim.AdamW(net.parameters(), 3e-3), loss)

def pairs():
    net = mlp(64, 64, 10)
    classify(net, SGD(net.parameters(), .02), size=2, steps=1500)

def by_heart():
    net = mlp(64, 128, 10)
    classify(net, Adam(net.parameters(), 3e-3), size=16, most=100, steps=1500)

def deep_with_warm_up():
    net = mlp(64, *[48] * 12, 10, between=nn.Tanh)
    opt = torch.optim.AdamW(net.parameters(), 2e-3)
    classify(net, opt, clock=torch.optim.lr_scheduler.LambdaLR(opt, lambda k: min(1, (k + 1) / 200)))

def unfrozen():
    net = mlp(64, 64, 64, 10)
    for p in net[:4].parameters(): p.requires_grad_(False)
    opt = Adam(net.parameters(), 1e-3)
    classify(net, opt, steps=300)
    for p in net.parameters(): p.requires_grad_(True)
    classify(net, opt, steps=500)

def adding():
    "A plain recurrent network over forty steps, nothing clipped."
    read, head = nn.RNN(2, 32, batch_first=True), nn.Linear(32, 1)
    opt = Adam([*read.parameters(), *head.parameters()], 2e-3)
    for _ in range(STEPS):
        x, rows = torch.rand(32, 40, 2), torch.arange(32)
        x[..., 1] = 0
        for half in (0, 20): x[rows, half + torch.randint(20, (32,)), 1] = 1
        descend(opt, F.mse_loss(head(read(x)[0][:, -1])[:, 0], (x[..., 0] * x[..., 1]).sum(1)))

def experts():
    gate, each = nn.Linear(64, 8), nn.ModuleList(mlp(64, 32, 10) for _ in range(8))
    opt = torch.optim.AdamW([*gate.parameters(), *each.parameters()], 2e-3)
    for _ in range(STEPS):
        x, y = draw()
        weight, which = gate(x).softmax(1).max(1)
        out = torch.zeros(len(x), 10)
        for k in which.unique(): out[which == k] = weight[which == k, None] * each[int(k)](x[which == k])
        descend(opt, F.cross_entropy(out, y))

def counts():
    "Poisson counts, most of them small."
    net, w = mlp(8, 64, 1), torch.randn(8)
    opt = Adam(net.parameters(), 2e-3)
    for _ in range(1000):
        x = torch.randn(64, 8)
        y = torch.poisson((x @ w).clamp(max=6).exp())
        descend(opt, F.poisson_nll_loss(net(x)[:, 0].clamp(max=8), y))

def heavy_tails():
    "Squared error of noise without a variance."
    net, noise = mlp(4, 64, 1), torch.distributions.StudentT(2.)
    opt = Adam(net.parameters(), 1e-3)
    for _ in range(1000):
        x = torch.randn(32, 4)
        descend(opt, F.mse_loss(net(x)[:, 0], x.sum(1) + noise.sample((32,))))

FORMS = {f.__name__.replace("_", " "): f for f in (
    reinforce, penalty, smoothing, ignored, ignored_in_part, pairs, by_heart, deep_with_warm_up, unfrozen, adding,
    experts, counts, heavy_tails)}

def train_loop(name, seed):
    loop = loops.LOOPS[name](seed)
    for i in range(loops.STEPS): loop.step(loop.batch(i))

def healthy_runs():
    "{name: function of a seed} of every healthy loop that there is."
    def form(f, seed):
        torch.manual_seed(seed)
        f()
    return ({name: lambda seed, name=name: train_loop(name, seed) for name in loops.LOOPS}
            | {f"healthy {name}": lambda seed, name=name: healthy_loops.run(name, seed, guarded=False)
               for name in healthy_loops.LOOPS}
            | {name: lambda seed, f=f: form(f, seed) for name, f in FORMS.items()})


# --- rules of others, from their formulas

class Measured:
    "The highest value, over the runs of a loop, of what each rule compares with its threshold."
    def __init__(self): self.largest, self.zclipped, self.updates, self.sides = defaultdict(float), 0, 0, {}

    def begin(self): self.sides = {}

    def __call__(self, optimizer, *_):
        if id(optimizer) not in self.sides: self.sides[id(optimizer)] = NormHistory(GateConfig()), ZClipRule(), [0, []]
        history, zclip, running = self.sides[id(optimizer)]
        each = torch.stack([g.norm() for g in gradients_of(optimizer)]).numpy().astype(np.float64)
        norm = float(np.sqrt((each**2).sum()))
        if history.usual is not None: self.add("gate", norm / history.limit) # above 1 it would act
        history.judge(norm)
        self.zclipped += zclip(norm) < norm
        self.updates += 1
        if zclip.z is not None: self.add("ZClip", zclip.z)
        if len(running[1]) == len(each):
            if running[0] > 32: self.add("AdaGC", float((each / np.maximum(running[1], 1e-12)).max()))
            running[1] = .98 * running[1] + .02 * each
        else: running[1] = each
        running[0] += 1

    def add(self, rule, value): self.largest[rule] = max(self.largest[rule], value)


def healthy(first=0, seeds=5, names=None):
    "Every healthy loop."
    out, runs = {}, healthy_runs()
    for name in names or runs:
        run, measured = runs[name], Measured()
        with torch.random.fork_rng():
            handle = register_optimizer_step_pre_hook(measured)
            for seed in range(first, first + seeds):
                measured.begin()
                run(seed)
            handle.remove()
        out[name] = {k: float(f"{v:.3g}") for k, v in measured.largest.items()} | dict(
            zclipped=measured.zclipped, updates=measured.updates)
        print(name, out[name], flush=True)
    return out


# --- ruined

def zclipping(loop):
    "ZClip as a hook."
    rule = ZClipRule()
    def before(optimizer, *_):
        norm = float(nn.utils.get_total_norm(gradients_of(optimizer)))
        kept = rule(norm)
        if kept < norm: nn.utils.clip_grads_with_norm_(loop.net.parameters(), kept, torch.tensor(norm))
    loop.opt.register_step_pre_hook(before)

ARMS = {"alone": lambda loop: None, "gate": lambda loop: UpdateGate(loop.opt),
        "gate, limit 4": lambda loop: UpdateGate(loop.opt, config=GateConfig(limit=4.)), "ZClip": zclipping}
RUINS = (None, "NaN gradient", "rate × 30, 5 steps", "one batch × 1e4", "sign error, 20 steps",
         "wrong targets, 50 steps")

def ruined_run(name, seed, fault, arm):
    "Score at the end, and what the gate did."
    loop = loops.LOOPS[name](seed)
    gate = ARMS[arm](loop)
    for i in range(loops.STEPS):
        batch, k = loop.batch(i), i - loops.FAULT_AT
        if k >= 0 and fault in loops.FAULTS: batch = loops.FAULTS[fault](loop, k, batch, loops.stream(seed, 3, i))
        spoil = None
        if fault == "NaN gradient" and k == 0:
            spoil = next(iter(loop.net.parameters())).register_hook(lambda grad: grad * math.nan)
        loop.step(batch)
        if spoil is not None: spoil.remove()
    return loop.score(), gate.counts if isinstance(gate, UpdateGate) else None

def pair_run(seed, arm):
    "A pair that is twice the same: its distance has a finite loss, and the gradient of its root is not. Mean error."
    torch.manual_seed(seed)
    a, b = torch.randn(640, 8), torch.randn(640, 8)
    b[300] = a[300]
    class Pairs:
        net = mlp(8, 16, 4)
        opt = Adam(net.parameters(), 1e-3)
    gate = ARMS[arm](Pairs)
    def distance(rows): return (Pairs.net(a[rows]) - Pairs.net(b[rows])).square().sum(1).sqrt()
    for t in range(400):
        if t % 20 == 0: order = torch.randperm(640)
        descend(Pairs.opt, (distance(order[t % 20 * 32:][:32]) - 1).square().mean())
    with torch.no_grad(): off = (distance(torch.arange(640)) - 1).square().mean().item()
    return off, gate.counts if isinstance(gate, UpdateGate) else None

def ruined(first=900, seeds=3, names=("vae", "diffusion", "memory", "dqn")):
    "Every fault that comes through a gradient, under every arm."
    out = {}
    for name in names:
        for fault in RUINS:
            for arm in ARMS:
                runs = [ruined_run(name, s, fault, arm) for s in range(first, first + seeds)]
                key = f"{name}: {fault or 'clean'}"
                out.setdefault(key, {})[arm] = [float(f"{r[0]:.4g}") for r in runs]
                if runs[0][1]: out[key][f"{arm}, acts"] = [r[1]["dropped"] + r[1]["scaled"] for r in runs]
            print(key, out[key], flush=True)
    for arm in ARMS:
        runs = [pair_run(s, arm) for s in range(first, first + seeds)]
        out.setdefault("pairs: root of zero", {})[arm] = [float(f"{r[0]:.4g}") for r in runs]
        if runs[0][1]: out["pairs: root of zero"][f"{arm}, acts"] = [r[1]["dropped"] for r in runs]
    print(out["pairs: root of zero"], flush=True)
    return out


# --- price

def networks():
    "{name: (network, inputs, optimizer)}"
    small, large = mlp(64, 64, 10), mlp(*[600] * 11)
    return {"MLP, 4,810 parameters": (small, torch.randn(64, 64), Adam(small.parameters(), 1e-4)),
            "MLP, 3.6 million": (large, torch.randn(64, 600), torch.optim.AdamW(large.parameters(), 1e-4))}

def price(turns=60):
    "Shortest step with and without a gate, in turns; and with a norm that is offered."
    out = {}
    for name, (net, x, opt) in networks().items():
        best = defaultdict(lambda: math.inf)
        def step(norm=None):
            opt.zero_grad()
            net(x).square().mean().backward()
            if norm is not None: gate.offer(norm)
            opt.step()
        many = 2 if sum(p.numel() for p in net.parameters()) > 10**6 else 40
        for t in range(turns):
            for arm in ("without", "with", "offered") if t % 2 else ("offered", "with", "without"):
                gate = UpdateGate(opt) if arm != "without" else None
                step(1. if arm == "offered" else None)
                for _ in range(many):
                    start = time.thread_time() # of this thread: other programs on the machine do not count
                    step(1. if arm == "offered" else None)
                    best[arm] = min(best[arm], time.thread_time() - start)
                if gate is not None: gate.close()
        out[name] = {k: float(f"{1e6 * v:.4g}") for k, v in best.items()} | {
            f"{k}, per cent": round(100 * (best[k] / best["without"] - 1), 2) for k in ("with", "offered")}
        print(name, out[name], flush=True)
    return out


def main():
    "The parts that are named; all of them are stored."
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*")
    for k in ("first", "seeds"): parser.add_argument(f"--{k}", type=int)
    parser.add_argument("--names", type=lambda text: text.split(","), help="of loops; the others stay as stored")
    args = parser.parse_args()
    torch.set_num_threads(1)
    given = {k: v for k, v in vars(args).items() if k != "parts" and v is not None}
    parts = dict(healthy=lambda: healthy(**given), ruined=lambda: ruined(**given), price=price)
    result = {k: parts[k]() for k in args.parts or parts}
    if given.keys() - {"names"}: return
    stored = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}
    for k, rows in result.items(): stored[k] = stored.get(k, {}) | rows
    stored["machine"] = machine()
    PATH.write_text(json.dumps(stored, separators=(",", ":"), ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__": main()
