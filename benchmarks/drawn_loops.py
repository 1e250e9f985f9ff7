"""Training loops that nobody chose: a seed draws task, network, optimizer, schedule, form of the step, data and shape.

    python -m benchmarks.drawn_loops --seeds 0:50              # healthy runs and ruined ones, a line each
    python -m benchmarks.drawn_loops --seeds 7:8 --show run    # the loop as a script, with its lines for a Governor

A drawn loop is text, as a user writes it: `write` puts the parts together, `played` executes it. Whether its fault, the
way it is guarded or its seed is good for a Governor is nobody's choice either. A draw that learns nothing by itself, or
whose fault can't be put into it, is drawn again with the next number.
"""
import argparse
import ast
import copy
import json
import linecache
import logging
import math
import random
import re
import signal
import sys
import textwrap
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path: sys.path.insert(0, str(ROOT))

from benchmarks.foreign_bench import digest, in_a_copy, verdict
from benchmarks.foreign_loops import RING, TRAIN, X, Y, counting_text

from esper_nb import Governor, GovernorStop

STEPS, SIZE, LIMIT = 240, 32, 150 # batches; examples a batch; seconds a run
WAYS = ("watch", "run", "batches")

IMPORTS = """
import copy, dataclasses, itertools, math, random
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.func import functional_call, grad_and_value
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
"""


# --- the parts: one row each

class Task(NamedTuple):
    "What is learnt: on `x` and `y` of a batch, by `net`."
    loss: str # lines that end with a `loss`
    test: str # an expression: the loss on data that are never trained on
    data: str = "pictures"
    out: int = 10 # what the network gives
    chance: float | None = None # loss of guessing
    setup: str = "" # lines, once the network is there
    more: str = "" # lines after the update
    state: tuple[str, ...] = () # names of what these lines keep
    core: str = "" # the whole step, if it is not one loss and one update

HALF = "x[:len(x) // 2], x[len(x) // 2:]"
TASKS = {
    "regression": Task("loss = F.mse_loss(net(x), y)", "F.mse_loss(net(TX), TY)", "table", 2),
    "robust regression": Task("loss = F.smooth_l1_loss(net(x), y, beta=.2)", "F.mse_loss(net(TX), TY)", "table", 2),
    "summed regression": Task("loss = (net(x) - y).square().sum()", "F.mse_loss(net(TX), TY)", "table", 2),
    "classification": Task("loss = F.cross_entropy(net(x), y)", "F.cross_entropy(net(TX), TY)", chance=math.log(10)),
    "smoothed classification": Task("loss = F.cross_entropy(net(x), y, label_smoothing=.1)",
                                    "F.cross_entropy(net(TX), TY)", chance=math.log(10)),
    "binary labels": Task("loss = F.binary_cross_entropy_with_logits(net(x), F.one_hot(y, 10).float())",
                          "F.binary_cross_entropy_with_logits(net(TX), F.one_hot(TY, 10).float())"),
    "autoencoder": Task("loss = F.mse_loss(net(x), clean)", "F.mse_loss(net(TX), TX)", out=64),
    "variational": Task(
        "mean, log_var = net(x).chunk(2, 1)\n"
        "z = mean + (log_var / 2).exp() * torch.randn_like(mean)\n"
        "loss = (decoder(z) - clean).square().mean()\n"
        "loss = loss + 1e-3 * (mean.square() + log_var.exp() - 1 - log_var).sum(1).mean()",
        "F.mse_loss(decoder(net(TX)[:, :8]), TX)", out=16, state=("decoder",),
        setup="decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64))"),
    "policy gradient": Task(
        "choice = torch.distributions.Categorical(logits=net(x))\n"
        "said = choice.sample()\n"
        "points = (said == y).float()\n"
        "loss = -((points - baseline) * choice.log_prob(said)).mean() - .01 * choice.entropy().mean()",
        "(net(TX).argmax(1) != TY).float().mean()", setup="baseline = 0.",
        more="baseline = .9 * baseline + .1 * points.mean().item()", state=("baseline",)),
    "siamese": Task(
        f"a, b = {HALF}\nfar = (F.normalize(net(a), dim=1) - F.normalize(net(b), dim=1)).square().sum(1)\n"
        "same = y[:len(y) // 2] == y[len(y) // 2:]\n"
        "loss = torch.where(same, 4 * far, F.relu(1 - far)).mean()",
        "(lambda far, same: torch.where(same, 4 * far, F.relu(1 - far)).mean())((F.normalize(net(TX[:148]), dim=1) - "
        "F.normalize(net(TX[148:296]), dim=1)).square().sum(1), TY[:148] == TY[148:296])", out=16),
    "momentum queue": Task(
        "q = F.normalize(net(x + .1 * torch.randn_like(x)), dim=1)\n"
        "with torch.no_grad(): k = F.normalize(keys(x + .1 * torch.randn_like(x)), dim=1)\n"
        "logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.clone()], 1) / .2\n"
        "loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))",
        "F.cross_entropy(F.normalize(net(TX), dim=1) @ F.normalize(net(.9 * TX + .1 * TX.mean(0)), dim=1).T / .2, "
        "torch.arange(len(TX)))", out=16, state=("keys", "queue", "at"),
        setup="keys = copy.deepcopy(net).requires_grad_(False)\n"
              "queue, at = F.normalize(torch.randn(16, 128), dim=0), 0",
        more="with torch.no_grad():\n"
             "    for slow, fast in zip(keys.parameters(), net.parameters()): slow.lerp_(fast, .02)\n"
             "    queue[:, (at + torch.arange(len(k))) % 128] = k.T.float()\n"
             "at = (at + len(k)) % 128"),
    "GAN": Task(
        "", "torch.cdist(net(NOISE), RING).min(1).values.mean() + torch.cdist(net(NOISE), RING).min(0).values.mean()",
        "ring", 2, setup="judge = nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(.2), nn.Linear(48, 1))\n"
                         "opt_judge = optim.Adam(judge.parameters(), 1e-3, betas=(.5, .9))",
        state=("judge", "opt_judge"), core="""
fake = net(torch.randn(len(x), 64))
loss = F.softplus(-judge(x)).mean() + F.softplus(judge(fake.detach())).mean()
opt_judge.zero_grad()
loss.backward()
opt_judge.step()
of_maker = F.softplus(-judge(fake)).mean()
$ZERO
of_maker.backward()
$CLIP
$STEP"""),
    "language": Task("loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten())",
                     "F.cross_entropy(net(TX).flatten(0, 1), TY.flatten())", "text", 8, math.log(8)),
}


class Net(NamedTuple):
    "A network from 64 numbers, or from twelve symbols, to `$OUT` numbers."
    text: str
    tags: str = "" # norm: running statistics; odd: no torch.func; text: symbols; tensors: no module; tied: as it is

MODULE = "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
def net_of(made: str, forward: str) -> str:
    "A network that is a class."
    return f"{MODULE}{textwrap.indent(made, ' ' * 8)}\n    def forward(self, x):\n        {forward}\nnet = Net()"

def chain(*layers: str) -> str: return f"net = nn.Sequential({', '.join(layers)})"
L64, HEAD = "nn.Linear(64, 64)", "nn.Linear(64, $OUT)"
NETS = {
    "MLP": Net(chain(L64, "nn.ReLU()", HEAD)),
    "deep MLP": Net(chain(L64, "nn.GELU()", L64, "nn.GELU()", L64, "nn.GELU()", HEAD)),
    "MLP with dropout": Net(chain(L64, "nn.ReLU()", "nn.Dropout(.1)", L64, "nn.ReLU()", "nn.Dropout(.1)", HEAD)),
    "MLP with batch norm": Net(chain(L64, "nn.BatchNorm1d(64)", "nn.ReLU()", HEAD), "norm odd"),
    "batch norm of all batches": Net(chain(L64, "nn.BatchNorm1d(64, momentum=None)", "nn.Tanh()", HEAD), "norm odd"),
    "convnet": Net(chain("nn.Unflatten(1, (1, 8, 8))", "nn.Conv2d(1, 8, 3, padding=1)", "nn.BatchNorm2d(8)",
                         "nn.ReLU()", "nn.MaxPool2d(2)", "nn.Conv2d(8, 16, 3, padding=1)", "nn.BatchNorm2d(16)",
                         "nn.ReLU()", "nn.Flatten()", "nn.Linear(256, $OUT)"), "norm odd"),
    "convnet with group norm": Net(chain(
        "nn.Unflatten(1, (1, 8, 8))", "nn.Conv2d(1, 8, 3, 2, padding=1)", "nn.GroupNorm(2, 8)", "nn.SiLU()",
        "nn.Dropout2d(.05)", "nn.Flatten()", "nn.Linear(128, $OUT)")),
    "residual": Net(net_of(
        "self.a, self.b, self.norm, self.say = nn.Linear(64, 64), nn.Linear(64, 64), nn.LayerNorm(64), "
        "nn.Linear(64, $OUT)", "return self.say(x + self.b(F.gelu(self.a(self.norm(x)))))")),
    "GRU over rows": Net(net_of("self.gru, self.say = nn.GRU(8, 48, batch_first=True), nn.Linear(48, $OUT)",
                                "return self.say(self.gru(x.unflatten(1, (8, 8)))[0][:, -1])"), "odd"),
    "transformer over rows": Net(net_of(
        "self.read, self.say = nn.Linear(8, 24), nn.Linear(192, $OUT)\n"
        "self.block = nn.TransformerEncoderLayer(24, 2, 48, dropout=.1, batch_first=True)",
        "return self.say(self.block(self.read(x.unflatten(1, (8, 8)))).flatten(1))"), "odd"),
    "weight norm": Net(chain(f"parametrizations.weight_norm({L64})", "nn.ReLU()", HEAD), "odd"),
    "spectral norm": Net(chain(f"parametrizations.spectral_norm({L64})", "nn.LeakyReLU(.1)", HEAD), "odd"),
    "old spectral norm": Net(chain(f"nn.utils.spectral_norm({L64})", "nn.LeakyReLU(.1)", HEAD), "odd"),
    "first layer frozen": Net(chain(L64, "nn.ReLU()", L64, "nn.ReLU()", HEAD) + "\nnet[0].requires_grad_(False)", "odd"),
    "checkpointed": Net(net_of(
        f"self.a = nn.Sequential({L64}, nn.ReLU(), nn.Dropout(.05), {L64}, nn.ReLU())\nself.say = {HEAD}",
        "return self.say(checkpoint(self.a, x, use_reentrant=False))"), "odd"),
    "dict of tensors": Net(
        "weights = dict(w=torch.randn(64, 64) / 8, b=torch.zeros(64), v=torch.randn(64, $OUT) / 8, "
        "c=torch.zeros($OUT))\nfor w in weights.values(): w.requires_grad_()\n"
        "def forward(x): return (x @ weights['w'] + weights['b']).relu() @ weights['v'] + weights['c']\n"
        "net = forward", "odd tensors"),
    "tied halves": Net(net_of(
        "self.w, self.b, self.c = nn.Linear(64, 24), nn.Parameter(torch.zeros(24)), nn.Parameter(torch.zeros(64))",
        "return (F.linear(x, self.w.weight, self.b)).relu() @ self.w.weight + self.c"), "tied odd"),
    "GRU": Net(net_of("self.read, self.gru, self.say = nn.Embedding(8, 16), nn.GRU(16, 32, batch_first=True), "
                      "nn.Linear(32, $OUT)", "return self.say(self.gru(self.read(x))[0])"), "text odd"),
    "LSTM": Net(net_of("self.read, self.rnn = nn.Embedding(8, 16), nn.LSTM(16, 32, 2, batch_first=True, dropout=.05)\n"
                       "self.say = nn.Linear(32, $OUT)", "return self.say(self.rnn(self.read(x))[0])"), "text odd"),
    "causal transformer": Net(net_of(
        "self.read, self.place, self.say = nn.Embedding(8, 24), nn.Embedding(12, 24), nn.Linear(24, $OUT)\n"
        "self.block = nn.TransformerEncoderLayer(24, 2, 48, dropout=.05, batch_first=True, norm_first=True)\n"
        "self.register_buffer('mask', nn.Transformer.generate_square_subsequent_mask(12), persistent=False)",
        "return self.say(self.block(self.read(x) + self.place.weight, self.mask, is_causal=True))"), "text odd"),
    "tied symbols": Net(net_of(
        "self.read, self.gru, self.say = nn.Embedding(8, 32), nn.GRU(32, 32, batch_first=True), nn.Linear(32, 8)\n"
        "self.say.weight = self.read.weight", "return self.say(self.gru(self.read(x))[0])"), "text odd"),
}

OPTIMIZERS = {
    "SGD": "optim.SGD($P, .05)", "SGD momentum": "optim.SGD($P, .02, momentum=.9)",
    "SGD nesterov": "optim.SGD($P, .02, momentum=.9, nesterov=True, weight_decay=1e-4)",
    "SGD dampening": "optim.SGD($P, .05, momentum=.8, dampening=.1, foreach=True)",
    "Adam": "optim.Adam($P, 2e-3)", "Adam amsgrad": "optim.Adam($P, 2e-3, amsgrad=True, foreach=False)",
    "Adam foreach": "optim.Adam($P, 3e-3, betas=(.8, .99), foreach=True)",
    "Adam fused": "optim.Adam($P, 2e-3, fused=True)", "AdamW": "optim.AdamW($P, 2e-3)",
    "AdamW with a rate that is a tensor": "optim.AdamW($P, torch.tensor(2e-3), foreach=False)",
    "Adagrad": "optim.Adagrad($P, .02)", "Adadelta": "optim.Adadelta($P, 1.)", "RMSprop": "optim.RMSprop($P, 1e-3)",
    "RMSprop centered": "optim.RMSprop($P, 1e-3, centered=True, momentum=.5)",
    "Rprop": "optim.Rprop($P, 1e-3, step_sizes=(1e-6, .01))", "ASGD": "optim.ASGD($P, .05, t0=100)",
    "NAdam": "optim.NAdam($P, 2e-3)", "RAdam": "optim.RAdam($P, 3e-3)", "Adamax": "optim.Adamax($P, 3e-3)",
    "Adafactor": "optim.Adafactor($P, .02)", "LBFGS": "optim.LBFGS($P, .1, max_iter=2, history_size=5)",
    "two groups": "optim.AdamW([dict(params=[p for p in $P if p.ndim > 1]), dict(params=[p for p in $P if p.ndim < 2], "
                  "lr=5e-3, weight_decay=0.)], 2e-3)",
    "two optimizers": "optim.Adam([p for p in $P if p.ndim > 1], 2e-3)\n"
                      "other = optim.SGD([p for p in $P if p.ndim < 2], .02, momentum=.9)",
    "Muon": "optim.Muon([p for p in $P if p.ndim == 2], 5e-3)\nother = optim.AdamW([p for p in $P if p.ndim != 2], 2e-3)",
    "SparseAdam": "optim.SparseAdam(net.read.parameters(), 3e-3)\n"
                  "other = optim.Adam([p for n, p in net.named_parameters() if not n.startswith('read')], 2e-3)",
    "by hand": "", "by hand with momentum": "momenta = [torch.zeros_like(p) for p in $P]",
}
SCHEDULES = {
    "none": "", "also none": "", "StepLR": "lr_scheduler.StepLR(opt, $UPDATES // 3, .5)",
    "OneCycle": "lr_scheduler.OneCycleLR(opt, [2 * float(g['lr']) for g in opt.param_groups], $UPDATES + 1, "
                "cycle_momentum=False)",
    "cosine": "lr_scheduler.CosineAnnealingLR(opt, $UPDATES + 1)",
    "warm restarts": "lr_scheduler.CosineAnnealingWarmRestarts(opt, $UPDATES // 4)",
    "plateau": "lr_scheduler.ReduceLROnPlateau(opt, factor=.7, patience=25)",
    "warm-up": "lr_scheduler.LambdaLR(opt, lambda i: min(1., (i + 1) / 40))",
    "warm-up, then a cosine": "lr_scheduler.SequentialLR(opt, [lr_scheduler.LinearLR(opt, .1, total_iters=20), "
                              "lr_scheduler.CosineAnnealingLR(opt, $UPDATES)], [20])",
    "exponential": "lr_scheduler.ExponentialLR(opt, .995)",
}
FORMS = { # of one update
    "plain": "$ZERO\n$LOSS\nloss.backward()\n$CLIP\n$STEP",
    "zeros last": "$LOSS\nloss.backward()\n$CLIP\n$STEP\n$ZERO",
    "zeros in place": "$LOSS\nloss.backward()\n$CLIP\n$STEP\nfor p in $P:\n    if p.grad is not None: p.grad.zero_()",
    "zeros stay": "opt.zero_grad(set_to_none=False)\n$LOSS\nloss.backward()\n$CLIP\n$STEP",
    "accumulated": "$LOSS\n(loss / 3).backward()\nmicro += 1\nif micro % 3 == 0:\n    $CLIP\n    $STEP\n    $ZERO",
    "closure": "def closure():\n    $ZERO\n    $LOSS\n    loss.backward()\n    $CLIP\n    return loss\n"
               "loss = opt.step(closure)\n$CLOCK",
    "autocast": "$ZERO\nwith torch.autocast('cpu', dtype=torch.bfloat16):\n    $LOSS\nloss.backward()\n$CLIP\n$STEP",
    "scaled": "$ZERO\nwith torch.autocast('cpu', dtype=torch.bfloat16):\n    $LOSS\nscaler.scale(loss).backward()\n"
              "scaler.unscale_(opt)\n$CLIP\nscaler.step(opt)\nscaler.update()\n$CLOCK",
    "functional": "def objective(weights):\n    def out_of(x): return functional_call(net, weights, (x,))\n    $FLOSS\n"
                  "    return loss\ngrads, loss = grad_and_value(objective)(dict(net.named_parameters()))\n"
                  "for name, p in net.named_parameters(): p.grad = grads[name]\n$CLIP\n$STEP",
    "by grad": "$LOSS\nfor p, g in zip($P, torch.autograd.grad(loss, list($P))): p.grad = g\n$CLIP\n$STEP",
    "by hand": "$LOSS\nloss.backward()\n$CLIP\nwith torch.no_grad():\n    for p in $P:\n        p -= .05 * p.grad\n"
               "        p.grad = None",
    "by hand with momentum": "$LOSS\nloss.backward()\n$CLIP\nfor p, m in zip($P, momenta):\n"
                             "    m.mul_(.9).add_(p.grad.data)\n    p.data.add_(m, alpha=-.01)\n    p.grad.zero_()",
}
CLIPS = {"none": "", "norm": "nn.utils.clip_grad_norm_($P, 1.)", "value": "nn.utils.clip_grad_value_($P, .5)",
         "logged norm": "norms.append(nn.utils.clip_grad_norm_($P, 5.).item())"}
NOISES = { # added to `x`, which is a picture or a row of a table
    "none": ("", ""), "also none": ("", ""), "torch": ("", "x = x + .05 * torch.randn_like(x)"),
    "numpy": ("draw = np.random.default_rng(seed)",
              "x = x + torch.as_tensor(draw.normal(0, .05, x.shape), dtype=torch.float32)"),
    "numpy's own": ("", "x = x + torch.as_tensor(np.random.normal(0, .05, x.shape), dtype=torch.float32)"),
    "now and then": ("", "if random.random() < .3: x = x * random.uniform(.8, 1.2)"),
    "a generator": ("draw = torch.Generator().manual_seed(seed)",
                    "x = x * (torch.rand(x.shape, generator=draw) > .05)"),
}
FORMATS = { # of a batch: how it is made, how it is read
    "tuple": ("", "(x, y)", "x, y = batch"), "dict": ("", "dict(x=x, y=y)", "x, y = batch['x'], batch['y']"),
    "dataclass": ("@dataclasses.dataclass\nclass Batch:\n    x: torch.Tensor\n    y: torch.Tensor", "Batch(x, y)",
                  "x, y = batch.x, batch.y"),
}
STACKED = "lambda rows: (lambda x, y: $MADE)(*map(torch.stack, zip(*rows)))"
class Source(NamedTuple):
    "Where batches come from."
    setup: str
    feed: str # an expression, for an epoch or without end
    endless: bool = False
SOURCES = {
    "loader": Source(f"loader = DataLoader(TensorDataset(X, Y), $SIZE, shuffle=True, drop_last=True, "
                     f"collate_fn={STACKED})", "loader"),
    "loader with a generator": Source(f"loader = DataLoader(TensorDataset(X, Y), $SIZE, shuffle=True, generator="
                                      f"torch.Generator().manual_seed(seed), collate_fn={STACKED})", "loader"),
    "iterable dataset": Source(
        "class Stream(IterableDataset):\n    def __iter__(self):\n"
        "        for i in torch.randperm(len(X)).tolist(): yield X[i], Y[i]\n"
        f"loader = DataLoader(Stream(), $SIZE, collate_fn={STACKED})", "loader"),
    "permutation": Source("def shuffled():\n    for at in torch.randperm(len(X)).split($SIZE):\n"
                          "        x, y = X[at], Y[at]\n        yield $MADE", "shuffled()"),
    "a list": Source("made = []\nfor k in torch.randperm(len(X)).split($SIZE):\n    x, y = X[k], Y[k]\n"
                     "    made.append($MADE)", "made"),
    "numpy": Source("def drawn():\n    rng = np.random.default_rng(seed)\n    while True:\n"
                    "        k = rng.integers(0, len(X), $SIZE)\n        x, y = X[k], Y[k]\n        yield $MADE", "drawn()",
                    True),
    "random": Source("def drawn():\n    while True:\n        k = random.sample(range(len(X)), $SIZE)\n"
                     "        x, y = X[k], Y[k]\n        yield $MADE", "drawn()", True),
    "cycle": Source(f"loader = DataLoader(TensorDataset(X, Y), $SIZE, shuffle=True, collate_fn={STACKED})",
                    "itertools.cycle(loader)", True),
    "drawn in the step": Source("", "itertools.count()", True),
}


class Extra(NamedTuple):
    "What else is done after an update."
    setup: str
    body: str
    state: tuple[str, ...] = ()
    parts: tuple[str, ...] = () # of these, what is handed to a Governor
    epoch: str = "" # at the start of an epoch
    module: bool = False # `net` has to be one

LOOK = "looks += 1\nif looks % 30 == 0:\n    $EVAL\n    with torch.no_grad(): seen = ($TEST).item()\n    $TRAIN\n"
EXTRAS = {
    "moving average": Extra("ema = swa_utils.AveragedModel(net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(.98))",
                            "ema.update_parameters(net)", ("ema",), ("ema",), module=True),
    "SWA": Extra("swa, updates = swa_utils.AveragedModel(net), 0",
                 "updates += 1\nif updates > 100 and updates % 10 == 0: swa.update_parameters(net)", ("swa", "updates"),
                 ("swa",), module=True),
    "validation": Extra("looks, validated = 0, []", LOOK + "    validated.append(seen)", ("looks", "validated")),
    "best copy": Extra("looks, best, kept = 0, math.inf, None",
                       LOOK + "    if seen < best: best, kept = seen, copy.deepcopy(net)", ("looks", "best", "kept"),
                       module=True),
    "best state": Extra(
        "looks, best, stale, kept = 0, math.inf, 0, {}",
        LOOK + "    if seen < best:\n        best, stale = seen, 0\n"
               "        kept = {k: v.clone() for k, v in net.state_dict().items()}\n    else: stale += 1",
        ("looks", "best", "stale", "kept"), module=True),
    "history": Extra("history, smooth = [], None",
                     "history.append(loss.item())\n"
                     "smooth = history[-1] if smooth is None else .9 * smooth + .1 * history[-1]", ("history", "smooth")),
    "seed of the epoch": Extra("", "", epoch="torch.manual_seed(1000 * seed + epoch)"),
    "look in training mode": Extra(
        "glances, spreads = 0, []",
        "glances += 1\nif glances % 7 == 0:\n    with torch.no_grad(): spreads.append(net(TX[:16]).std().item())",
        ("glances", "spreads")),
    "mean of the epoch": Extra("total, count = 0., 0", "total += loss.item()\ncount += 1", ("total", "count"),
                               epoch="$MINE(total, count) = 0., 0"),
}
SHAPES = ("flat", "while", "step function", "trainer class", "callbacks")


# --- a draw, and what is written of it

class Draw(NamedTuple):
    "The names of its parts, and numbers."
    seed: int
    task: str
    net: str
    optimizer: str
    schedule: str
    form: str
    clip: str
    noise: str
    format: str
    source: str
    extras: tuple[str, ...]
    shape: str
    module: bool # at the top of a script, not in a function
    chance: bool # whether the loss of guessing is told
    forgets: bool # to hand over more than network and optimizer, where a Governor finds the rest itself
    steps: int
    at: int # the step of the fault

    def __str__(self) -> str: return ", ".join(f"{k} {v}" for k, v in self._asdict().items())

def fits(task: str, net: str) -> bool:
    "Whether a network can do a task."
    tags = NETS[net].tags
    if ("text" in tags) != (TASKS[task].data == "text"): return False
    if "tensors" in tags: return task not in ("momentum queue", "GAN", "variational")
    return "tied" not in tags or task == "autoencoder"

def fits_form(optimizer: str, form: str, task: str, net: str) -> bool:
    "Whether an optimizer can be stepped so."
    if TASKS[task].core: return form == "plain" and optimizer not in ("LBFGS", "SparseAdam") and "hand" not in optimizer
    if (optimizer == "LBFGS") > (form == "closure") or ("hand" in optimizer or "hand" in form) > (form == optimizer):
        return False
    if optimizer == "SparseAdam" and (net not in ("GRU", "LSTM") or form not in ("plain", "zeros last")): return False
    if form in ("functional", "closure") and (TASKS[task].more or task == "variational"): return False
    if form == "functional": return "odd" not in NETS[net].tags
    if form in ("closure", "scaled"): return optimizer not in ("two optimizers", "Muon")
    return True

def draw(seed: int) -> Draw:
    "The loop of a seed."
    rng = random.Random(f"loop {seed}")
    task = rng.choice(list(TASKS))
    net = rng.choice([n for n in NETS if fits(task, n)])
    tags = NETS[net].tags
    optimizer = rng.choice([o for o in OPTIMIZERS if any(fits_form(o, f, task, net) for f in FORMS)])
    form = rng.choice([f for f in FORMS if fits_form(optimizer, f, task, net)])
    hand, text = "hand" in optimizer, TASKS[task].data == "text"
    extras = [e for e in rng.sample(list(EXTRAS), rng.randint(0, 3)) if not (EXTRAS[e].module and "tensors" in tags)]
    if sum(EXTRAS[e].body.startswith(LOOK) for e in extras) > 1: extras = extras[:1]
    source = rng.choice(list(SOURCES))
    if task == "GAN": extras = [e for e in extras if e != "look in training mode"] # its network reads noise
    if SOURCES[source].endless: extras = [e for e in extras if not EXTRAS[e].epoch]
    steps = rng.randint(260, 300)
    return Draw(seed, task, net, optimizer, "none" if hand else rng.choice(list(SCHEDULES)), form,
                rng.choice(["none"] if optimizer == "SparseAdam" else list(CLIPS)),
                "none" if text or task == "GAN" else rng.choice(list(NOISES)), rng.choice(list(FORMATS)), source,
                tuple(extras), rng.choice(SHAPES), rng.random() < .3, rng.random() < .5, rng.random() < .5, steps,
                rng.randint(120, 140))


def fill(text: str, **values: str) -> str:
    "Put texts for `$NAMES` in; one that is a line of its own may be several lines."
    lines: list[str] = []
    for line in text.split("\n"):
        alone = re.fullmatch(r"( *)\$([A-Z]+)", line)
        if alone and alone[2] in values:
            lines += [alone[1] + new for new in fill(values[alone[2]], **values).split("\n") if new.strip()]
        else: lines.append(Template(line).safe_substitute(values))
    return "\n".join(lines)

def indent(text: str, by: int = 1) -> str: return textwrap.indent(text, "    " * by)

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
    text = net.text.replace("nn.Embedding(8, 16)", "nn.Embedding(8, 16, sparse=True)") if "Sparse" in d.optimizer else net.text
    optimizer = OPTIMIZERS[d.optimizer]
    setup = [text, task.setup, optimizer if optimizer.startswith("momenta") else f"opt = {optimizer}" if opts else "",
             f"clock = {clock}" if clock else "", "scaler = torch.amp.GradScaler('cpu', init_scale=256.)" * scaled,
             "micro = 0" if d.form == "accumulated" else "", "norms = []" if d.clip == "logged norm" else "",
             NOISES[d.noise][0], *(e.setup for e in extras)]
    parts = ["*weights.values()" if tensors else "net", *opts, *(["clock"] if clock else [])]
    more = [*[],
            *(["scaler"] if scaled else []), *(["*momenta"] if "momenta" in optimizer else []),
            *(n for n in task.state if n not in ("baseline", "at")), *(n for e in extras for n in e.parts)]
    if not d.forgets or way == "watch": parts = [*parts, *more]
    state = [*("weights" if tensors else "net").split(), *opts, *(["clock"] if clock else []), *(m.strip("*") for m in more),
             *(n for e in extras for n in e.state), *(["draw"] if NOISES[d.noise][0] else []),
             *(["micro"] if d.form == "accumulated" else []), *(n for n in ("baseline", "at") if n in task.state)]
    state = list(dict.fromkeys(state))
    before = "k = torch.randint(len(X), ($SIZE,))\nx, y = X[k], Y[k]" if d.source == "drawn in the step" else read
    clean = "clean = x" * ("clean" in task.loss)
    core = [before, clean, NOISES[d.noise][1], (task.core or FORMS[d.form]).strip("\n"), task.more]
    def joined(lines): return "\n".join(s for s in (fill(x, **values) for x in lines) if s.strip())
    ready = f"ready(net=net, params=list({params}), opts=[{', '.join(opts)}], clock={'clock' if clock else None}"
    if d.task == "variational": ready += ", decoder=decoder"
    setup = joined([*setup, ready + ")"])
    return laid_out(d, way, setup, joined(core), [joined([e.body]) for e in extras if e.body],
                    joined([FORMATS[d.format][0], source.setup]), joined([e.epoch for e in extras if e.epoch]), parts,
                    state)

def laid_out(d: Draw, way, setup: str, core: str, after: list[str], data: str, epoch: str, parts, state) -> str:
    "The lines of a script in their order."
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
    found = [(g, k) for o in spoil.found["opts"] for g in o.param_groups for k in ("lr", "initial_lr", "max_lr", "min_lr")
             if k in g]
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
    def __init__(self): super().__init__(logging.WARNING); self.lines = []
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
    return dict(X=x[:TRAIN], Y=y[:TRAIN], TX=x[TRAIN:], TY=y[TRAIN:], NOISE=torch.randn(256, 64, generator=g), RING=RING)

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
    print(f"{d.seed}: {clean['first']:.4f} → {clean['score']:.4f} ± {clean['slack']:.4f} {clean['ended']}  {d}", flush=True)
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
    p, z = n / of, 1.96
    middle, wide = p + z**2 / (2 * of), z * math.sqrt(p * (1 - p) / of + (z / (2 * of))**2) # Wilson
    low, high = [100 * (middle + sign * wide) / (1 + z**2 / of) for sign in (-1, 1)]
    return f"{n} of {of} ({100 * p:.0f} [{low:.0f}, {high:.0f}] %)"

def summary(rows: list[dict]) -> str:
    "What became of all runs."
    rows = [r for r in rows if r["learns"]]
    lines = [f"{len(rows)} loops that learn"]
    for way in dict.fromkeys(w for r in rows for w in r["healthy"]):
        healthy = [r["healthy"][way] for r in rows]
        mine = [x for r in rows for x in r["ruined"] if x["way"] == way]
        harmed = [x for x in mine if x["verdict"] != "harmless"]
        counts, named = Counter(x["verdict"] for x in mine), Counter(x["named"] for x in mine)
        ended = Counter(f"{x['ended'].split(':')[0]} in {x['where']}" for x in mine if x["ended"] and not x["bare_ended"])
        lines.append(
            f"{way:8s} healthy runs as alone {share(sum(not h for h in healthy), len(healthy))}; recovered "
            f"{share(counts['recovered'], len(harmed))}, {dict(counts)}, causes {dict(named)}, ended {dict(ended)}")
    return "\n".join(lines)

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
        if args.json: args.json.write_text(json.dumps(rows), encoding="utf-8")
    if rows: print(summary(rows))


if __name__ == "__main__": main()
