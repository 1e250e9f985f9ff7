"""Growth rules against each other on networks of `digits_family` that nothing was chosen with.

    python -m research.leaderboard --seeds 10                 # two minutes a seed on one quiet core
    python -m research.leaderboard --seeds 2 --rules PPO      # six minutes a seed; what else is stored stays
    python -m research.leaderboard --first 62 --seeds 1       # a seed more

Writes nbs/explanations/leaderboard.json; nbs/explanations/leaderboard.ipynb shows it. Practice is not done again: the
constant is that of the stored comparison (digits_family.json), and the networks of that comparison, looked at once by
research/contests.py, are those that the rules which look once have practised on: each was played to the end without
growing and with the constant. `esper-nb compare digits_family --rules ...` practises anew, in an hour.
"""
import argparse
import json
from pathlib import Path

import numpy as np
import torch

from esper_nb.run.comparison import Comparison, comparison_text
from esper_nb.run.growth_rules import search_seeds
from esper_nb.run.recipes import get_recipe
from esper_nb.run.repeats import RepeatStore, compare_recipe

STORED = Path(__file__).resolve().parents[1]/"nbs/explanations"
FRESH = 60 # first of the judged seeds
RULES = ("wait-only,random-legal,plateau,gradient-norm,natural-expansion,constant,threshold,ridge,forecast,lookahead")


def stored_practice() -> dict:
    "Return what `Practice.found` holds, from the stored comparison and the looks at its networks."
    plays, contest = Comparison.load(STORED/"digits_family.json"), json.loads((STORED/"contests.json").read_text())
    price, best = get_recipe("digits_family").env.price, plays.notes["fixed schedule"]
    mine = {k: [p for p in plays.plays if p.controller == k] for k in ("wait-only", "fixed schedule")}
    host = min(min(p.parameters) for p in mine["wait-only"])
    def net(p) -> np.ndarray: return np.array(p.heldout_accuracy_pp) - price * (np.array(p.parameters) / host - 1)
    scores = np.stack([np.concatenate([net(p) for p in mine[k]]) for k in ("wait-only", "fixed schedule")], 1)
    looks = [x for p in mine["wait-only"] for x in contest[f"family/look/{p.seed}"]["seen"]]
    columns = [k.replace("loss_0", "loss").replace("accuracy_0", "accuracy") for k in contest["family/rules"]["names"]]
    search = mine["fixed schedule"][0].practice_epochs
    return dict(search_constant=dict(name=best, epochs=search), search_arms=dict(names=[best], epochs=search),
                try_arms=dict(columns=columns, looks=looks, scores=scores.tolist(), epochs=scores.size * plays.horizon))


def keep_others(before: Comparison, found: Comparison) -> Comparison:
    "Return what was found, and the stored plays of other rules or seeds."
    now = {(p.controller, p.seed) for p in found.plays}
    plays = [*found.plays, *(p for p in before.plays if (p.controller, p.seed) not in now)]
    learned = [*found.learned, *(u for u in before.learned if ("PPO", u.seed) not in now)]
    return found._replace(plays=tuple(sorted(plays, key=lambda p: p.seed)), notes=before.notes | found.notes,
                          learned=tuple(sorted(learned, key=lambda u: u.seed)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=FRESH)
    parser.add_argument("--rules", default=RULES)
    parser.add_argument("--out", type=Path, default=STORED/"leaderboard.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = get_recipe("digits_family")
    search = search_seeds(config.ppo.num_updates)
    with RepeatStore(args.out.with_suffix(".seeds"), config) as store:
        store.write("search", dict(seeds=search, found=stored_practice()))
        seeds = range(args.first, args.first + args.seeds)
        found = compare_recipe(config, seeds, search, print, rules=args.rules.split(","), store=store)
        if args.out.exists(): found = keep_others(Comparison.load(args.out), found)
        found.save(args.out)
        store.clear()
    print(comparison_text(found))


if __name__ == "__main__": main()
