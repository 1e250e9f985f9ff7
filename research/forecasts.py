"""Does a forecast hold for other hosts than convolutional ones: a small GPT, and slots in a network of one's own?

    python -m research.forecasts                # four minutes on one core; what is stored already stays
    python -m research.forecasts --again        # everything anew

Writes nbs/explanations/forecasts.json, what networks showed after an epoch and what a seed came to at the end of each;
nbs/explanations/leaderboard.ipynb fits forecasts to some of them and judges the others, beside those of digits_family.
"""
import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper_nb.control.forecast import play_seeds
from esper_nb.grow.hosts import GPTConfig
from esper_nb.grow.module_hosts import ModuleHostConfig
from esper_nb.train.datasets import load_digits_data, load_prose
from esper_nb.train.population import FitConfig
from esper_nb.train.tasks import Task, get_task

STORED = Path(__file__).resolve().parents[1]/"nbs/explanations/forecasts.json"
FRESH = 7000 # first of the seeds
GROUPS = 8 # of lanes with one seed: a group is judged by forecasts that have not seen it


class Bottleneck(nn.Module):
    "A network of one's own: two features where more are needed."
    def __init__(self, width: int = 2):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(16 * width, 10)

    def forward(self, x: Tensor) -> Tensor: return self.head(self.body(x).flatten(1))


class Host(NamedTuple):
    "Networks that are played without a seed and with one."
    task: Task
    load: Callable
    seed: tuple[str, str] # slot, blueprint
    config: FitConfig


def list_hosts() -> dict[str, Host]:
    "Return what is played."
    gpt = GPTConfig(vocab=96, d=12, heads=2, layers=2, block=32, segments=2)
    own = ModuleHostConfig("research.forecasts:Bottleneck", slots=["body.2"], shape=(1, 8, 8), classes=10)
    text = get_task("prose").replace(host=gpt, slots=("r0c0",), lr=.004)
    pictures = get_task("digits").replace(name="own_digits", host=own, slots=("body.2",))
    few = FitConfig(lanes=8, workers=1)
    return {"GPT on text": Host(text, lambda: load_prose(block=32, limit=480), ("r0c0", "mlp"), few.replace(epochs=5)),
            "network of one's own": Host(pictures, load_digits_data, ("body.2", "conv_light"), few.replace(epochs=8))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--out", type=Path, default=STORED)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads(args.out.read_text()) if args.out.exists() and not args.again else {}
    for name, host in list_hosts().items():
        mine = found.setdefault(name, dict(seed=" in ".join(reversed(host.seed)), looks=[], worth=[]))
        data = host.load()
        for group in range(len(mine["worth"]), GROUPS):
            looks, worth = play_seeds(host.task, [host.seed], host.config.replace(seed=FRESH + group), 1, data=data)
            mine["looks"].append(looks.tolist())
            mine["worth"].append(worth[:, 0].tolist())
            args.out.write_text(json.dumps(found))
            print(f"{name}, group {group}: worth {worth.mean():+.1f} ± {worth.std():.1f} pp", flush=True)


if __name__ == "__main__": main()
