"""What could be won in a family wider than `digits_family`: the best constant, one look, and oracles.

    python -m research.wider_family      # half an hour on one core

Any of the three blocks may be blind, alone or with others; the data ask easy or hard questions, with wrong labels or
few examples; and a network may take a seed in every slot. An arm is a set of slots and the blueprint that they all get
in successive epochs after the first one, or waiting. Every network plays every arm. Practice networks give the best
constant, the best arm of each kind of instance (the oracle), and a ridge regression of each arm on what the first epoch
shows; judged networks, drawn from what is never practised on, say what these are worth in accuracy on the test split,
less the price of the room. The clairvoyant takes each network's own best arm, luck included.

Writes nbs/explanations/wider_family.json; nbs/explanations/fleets.ipynb shows it.
"""
import argparse
import itertools
import json
from pathlib import Path

import numpy as np
import torch

from benchmarks.measure import machine
from esper_nb.control import Fixed
from esper_nb.control.forecast import fit_ridge
from esper_nb.core.files import new_file
from esper_nb.run.growth_rules import kinds_of, net_of_room, play_arms, timetable
from esper_nb.run.recipes import RunConfig, fair_env, get_recipe
from esper_nb.train.families import TASK_FAMILIES, Instance

STORED = Path(__file__).resolve().parents[1]/"nbs/explanations/wider_family.json"
PRACTICE, JUDGED = 5000, 9000 # first seeds
SLOTS = ("r0c0", "r0c1", "r0c2")
BLIND = [set_ for k in range(4) for set_ in itertools.combinations(range(3), k)]
KINDS = tuple(Instance(blind, **asks) for blind in BLIND
              for asks in ({}, dict(groups=2), dict(noise=.3), dict(share=.2)))


def wider_recipe() -> RunConfig:
    "The recipe of `digits_family`, with these kinds, room for three seeds, and time to place them."
    TASK_FAMILIES["wider"] = KINDS
    recipe = get_recipe("digits_family")
    env = recipe.env.replace(family="wider", max_seeds=3)
    return recipe.replace(env=env.replace(repertoire=env.repertoire.replace(latest=4)))


def list_arms() -> dict[str, Fixed]: # name -> timetable
    "Waiting, and every set of slots with either blueprint."
    sets = [set_ for k in (1, 2, 3) for set_ in itertools.combinations(SLOTS, k)]
    return {"wait": Fixed({})} | {f"{b} in {', '.join(set_)}": timetable(dict.fromkeys(set_, b), 1, True)
                                  for b in ("conv_light", "conv_heavy") for set_ in sets}


def play_all(recipe: RunConfig, seeds: range, judged: bool) -> dict[str, np.ndarray]:
    "Play the networks of all seeds with every arm; return looks, kinds, and what each arm is worth."
    env, arms = fair_env(recipe, judged=judged), list(list_arms().values())
    rows: dict[str, list] = dict(look=[], kind=[], paid=[])
    for seed in seeds:
        seen, plays = play_arms(env, arms, seed * 1000)
        paid = np.stack([net_of_room(env, played.test_accuracy_pp, played.parameters) for played in plays], 1)
        rows["look"] += [seen[i] for i in sorted(seen)]
        rows["kind"] += [kinds_of(env)[i] for i in sorted(seen)]
        rows["paid"] += paid[sorted(seen)].tolist()
        print(f"{'judged' if judged else 'practice'} {seed}: best constant so far "
              f"{np.mean(rows['paid'], 0).max():.1f} pp", flush=True)
    env.close()
    return {k: np.array(v) for k, v in rows.items()}


def screen(practice: dict[str, np.ndarray], judged: dict[str, np.ndarray]) -> dict:
    "What constant, ridge and oracles get in the judged networks, network by network."
    paid, each = judged["paid"], np.arange(len(judged["kind"]))
    x = np.nan_to_num(practice["look"])
    weights = [fit_ridge(x, y)[0] for y in practice["paid"].T]
    expected = np.stack([np.nan_to_num(judged["look"]) @ w[:-1] + w[-1] for w in weights], 1)
    by_kind = {k: practice["paid"][practice["kind"] == k].mean(0).argmax() for k in set(practice["kind"].tolist())}
    constant = int(practice["paid"].mean(0).argmax())
    chosen = dict(constant=np.full(len(each), constant), ridge=expected.argmax(1),
                  oracle=np.array([by_kind.get(k, constant) for k in judged["kind"].tolist()]),
                  clairvoyant=paid.argmax(1))
    return {k: paid[each, arm].round(3).tolist() for k, arm in chosen.items()} | dict(
        best=list(list_arms())[constant], arms={k: np.bincount(v, minlength=paid.shape[1]).tolist()
                                                for k, v in chosen.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plays", type=int, default=8, help="of all lanes, to practise on with every arm")
    parser.add_argument("--judged", type=int, default=5, help="of all lanes, to be judged on")
    parser.add_argument("--out", type=Path, default=STORED)
    args = parser.parse_args()
    torch.set_num_threads(1)
    recipe = wider_recipe()
    practice = play_all(recipe, range(PRACTICE, PRACTICE + args.plays), judged=False)
    judged = play_all(recipe, range(JUDGED, JUDGED + args.judged), judged=True)
    found = screen(practice, judged) | dict(practised=len(practice["kind"]), machine=machine())
    with new_file(args.out) as part: part.write_text(json.dumps(found) + "\n")
    for k in ("constant", "ridge", "oracle", "clairvoyant"): print(f"{k}: {np.mean(found[k]):.1f} pp")


if __name__ == "__main__": main()
