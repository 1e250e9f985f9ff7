"""The parts that drawn_loops.py puts training loops together of: tables of texts, one row each, and a draw of them.

In a text `$P` are the parameters, `$LOSS` the lines that end with a loss, `$CLIP` what is done to gradients, `$STEP`
and `$ZERO` those of all optimizers, `$CLOCK` the schedule, `$MADE` a batch, `$TEST` the loss on data kept aside.
"""
import math
import random
import re
import textwrap
from string import Template
from typing import NamedTuple

SIZE = 32 # examples a batch

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


# --- one row a part

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
    return f"{MODULE}{indent(made, 2)}\n    def forward(self, x):\n        {forward}\nnet = Net()"

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
    "first layer frozen": Net(
        chain(L64, "nn.ReLU()", L64, "nn.ReLU()", HEAD) + "\nnet[0].requires_grad_(False)", "odd"),
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
    "Muon": "optim.Muon([p for p in $P if p.ndim == 2], 5e-3)\n"
            "other = optim.AdamW([p for p in $P if p.ndim != 2], 2e-3)",
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
                    "        k = rng.integers(0, len(X), $SIZE)\n        x, y = X[k], Y[k]\n        yield $MADE",
                    "drawn()", True),
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
                     "smooth = history[-1] if smooth is None else .9 * smooth + .1 * history[-1]",
                     ("history", "smooth")),
    "seed of the epoch": Extra("", "", epoch="torch.manual_seed(1000 * seed + epoch)"),
    "look in training mode": Extra(
        "glances, spreads = 0, []",
        "glances += 1\nif glances % 7 == 0:\n    with torch.no_grad(): spreads.append(net(TX[:16]).std().item())",
        ("glances", "spreads")),
    "mean of the epoch": Extra("total, count = 0., 0", "total += loss.item()\ncount += 1", ("total", "count"),
                               epoch="$MINE(total, count) = 0., 0"),
}
SHAPES = ("flat", "while", "step function", "trainer class", "callbacks")


# --- a draw

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
