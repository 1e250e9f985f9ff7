"""A learned controller against rules that had no more practice than it, on the networks that it was judged on.

    python -m research.contests                 # both contests: ten minutes on one core
    python -m research.contests digits_family   # one of them

Writes nbs/explanations/contests.json, play by play: interrupted, it goes on behind the last play that is there.
nbs/explanations/results.ipynb and look_first.ipynb show it. PPO's plays are those that `esper-nb compare` stored.

`digits_impaired`: the best constant, a timetable that is the same for every network, by successive halving with as
many lane-epochs as PPO practised. `digits_family`: rules that look once, after one epoch of training, and then wait or
do what the best constant does: a ridge regression for either arm, and one threshold on one column, fitted to 256
episodes with an arm drawn at random (PPO has 1,280). What a rule gets in a network is what the arm that it chooses got
there in the stored comparison.
"""
import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import machine
from esper_nb.control.forecast import fit_ridge
from esper_nb.control.rules import encode_decision
from esper_nb.control.envs import GrowVecEnv
from esper_nb.core.devices import generator
from esper_nb.grow.models import Decision
from esper_nb.core.files import new_file
from esper_nb.run.compare import RulePlayer, play_lanes
from esper_nb.run.comparison import Comparison
from esper_nb.run.growth_rules import best_schedule, kinds_of, list_schedules, search_seeds
from esper_nb.run.recipes import fair_env, get_recipe

STORED = Path(__file__).resolve().parents[1]/"nbs/explanations"
EPISODES = 256 # of practice for the rules of `digits_family`
PRACTICE = 401 # first seed of it
SEEN = ("demand", "fit", "reach", "host_gradient") # columns of a slot that a rule reads, beside loss and accuracy


class Store:
    "Keep every play in one JSON file as it comes."
    def __init__(self, path: Path):
        self.path = path
        self.kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, key: str, make: Callable[[], Any]) -> Any:
        "Return what is kept by a key; make and keep it, with its CPU seconds, if it is not there."
        if key not in self.kept:
            begun = time.process_time()
            value = make()
            self.kept[key] = dict(value, cpu_s=round(time.process_time() - begun, 1))
            self.kept["machine"] = machine()
            with new_file(self.path) as part: part.write_text(json.dumps(self.kept) + "\n")
            print(f"{key}: {self.kept[key]['cpu_s']:.0f} CPU s", flush=True)
        return self.kept[key]


def play_record(env: GrowVecEnv, player: Any, seed: int) -> dict[str, list]:
    "Play one horizon; return what came out, lane by lane, and what one epoch of training showed."
    seen: list[list[float]] = []
    def note(env: GrowVecEnv, t: int) -> None:
        if t == 0: seen.extend(env.obs[:, columns(env)[1]].double().round(decimals=5).tolist())
    p = play_lanes(env, player, seed, note)
    def whole(values: Sequence[float]) -> list[float]: return [round(float(v), 4) for v in values]
    return dict(test_pp=whole(p.test_accuracy_pp), heldout_pp=whole(p.heldout_accuracy_pp),
                total=whole(p.total), parameters=list(p.parameters), rollbacks=sum(p.rollbacks),
                kinds=kinds_of(env), seen=seen)


# --- one answer for every network

def contest_impaired(store: Store) -> None:
    "The best constant by successive halving, judged on the seeds of the stored comparison."
    recipe, played = get_recipe("digits_impaired"), Comparison.load(STORED/"bench_controllers.json")
    def search() -> dict[str, Any]:
        env = fair_env(recipe, judged=False)
        found = best_schedule(env, search_seeds(recipe.ppo.num_updates))
        env.close()
        return dict(name=found.name, scores=found.scores, epochs=found.epochs)
    found = store.get("impaired/search", search)
    print(f"the best constant after {found['epochs']:,} lane-epochs: {found['name']}", flush=True)
    env = fair_env(recipe)
    table = list_schedules(env)
    seeds = list(dict.fromkeys(p.seed for p in played.plays))
    for name, few in ((found["name"], seeds), (played.notes["fixed schedule"], seeds[:3])): # again: do plays repeat?
        for seed in few:
            store.get(f"impaired/{name}/{seed}", lambda: play_record(env, RulePlayer(table[name]), 1_000_000 + seed))
    env.close()


# --- one decision from one look

def columns(env: GrowVecEnv) -> tuple[list[str], list[int]]: # names, and their places in an observation
    "Return what a rule reads: loss, accuracy, and what a seed would find in each slot."
    names = ["loss_0", "accuracy_0", *(f"{k}.{c}" for k in env.actions.slots for c in SEEN)]
    return names, [env.observer.index(name) for name in names]


class ArmPlayer:
    "Choose an arm for every lane, once, after its first epoch."
    def __init__(self, arms: Sequence[Decision], choose: Callable[[Tensor], Sequence[int]]):
        self.arms, self.choose, self.t = arms, choose, 0

    def begin(self, env: GrowVecEnv) -> None:
        self.t, self.chosen = 0, []

    def act(self, env: GrowVecEnv) -> Tensor: # (n, K) int64
        wait, at = [Decision()] * env.num_envs, self.t
        if at == 1: self.chosen = list(self.choose(env.obs[:, columns(env)[1]].double()))
        self.t += 1
        what = [self.arms[k] for k in self.chosen] if at == 1 else wait
        return torch.stack([encode_decision(env, d)[1] for d in what])


def best_threshold(x: np.ndarray, arm: np.ndarray, paid: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    "Return the column, the cut and the arms below and above it whose episodes were paid best in practice."
    few = sorted(set(arm.tolist()), key=lambda k: -paid[arm == k].mean())[:2] # the two best constants
    best: dict[str, Any] = dict(value=-np.inf)
    for j, name in enumerate(names):
        for cut in np.quantile(x[:, j], np.linspace(.05, .95, 19)):
            for below, above in (few, few[::-1]):
                low = x[:, j] < cut
                parts = [paid[side & (arm == k)] for side, k in ((low, below), (~low, above))]
                if min(map(len, parts)) < 5: continue
                value = low.mean() * parts[0].mean() + (1 - low.mean()) * parts[1].mean()
                if value > best["value"]:
                    best = dict(value=float(value), column=name, cut=float(cut), below=int(below), above=int(above))
    return best


def fit_rules(practice: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    "Fit the ridge regressions and the thresholds to practice episodes."
    x = np.concatenate([p["seen"] for p in practice])
    arm, paid = (np.concatenate([p[k] for p in practice]) for k in ("arm", "total"))
    centre, scale = x.mean(0), x.std(0) + 1e-9
    weights = [fit_ridge((x - centre)[arm == k] / scale, paid[arm == k])[0].tolist() for k in range(arm.max() + 1)]
    gradients = [j for j, n in enumerate(names) if n.endswith("host_gradient")]
    return dict(centre=centre.tolist(), scale=scale.tolist(), weights=weights,
                mean_paid=[float(paid[arm == k].mean()) for k in range(arm.max() + 1)], names=list(names),
                any_column=best_threshold(x, arm, paid, names),
                host_gradient=best_threshold(x[:, gradients], arm, paid, [names[j] for j in gradients]))


def forecast(rules: Mapping[str, Any], x: np.ndarray) -> np.ndarray: # (n, d) -> (n, arms) returns
    "Return what the ridge regressions expect of every arm."
    w, z = np.array(rules["weights"]), (x - rules["centre"]) / rules["scale"]
    return z @ w[:, :-1].T + w[:, -1]


def look_once(env: GrowVecEnv, seed: int) -> dict[str, list]:
    "Train one epoch of a judged play; return what it shows."
    env.reset(seed=1_000_000 + seed, options=dict(fresh=True))
    waits = [encode_decision(env, None)[1]] * env.num_envs
    env.step(torch.stack(waits).numpy())
    return dict(seen=env.obs[:, columns(env)[1]].double().round(decimals=5).tolist(), kinds=kinds_of(env))


def contest_family(store: Store) -> None:
    "Ridge and threshold, fitted to practice episodes and judged on the instances of the stored comparison."
    recipe, played = get_recipe("digits_family"), Comparison.load(STORED/"digits_family.json")
    env, lanes = fair_env(recipe, judged=False), recipe.env.num_envs
    best = played.notes["fixed schedule"]
    arms = [Decision(), next(d for d in list_schedules(env)[best].table.values() if isinstance(d, Decision))]
    names, practice = columns(env)[0], []
    for seed in range(PRACTICE, PRACTICE + EPISODES // lanes):
        drawn = torch.randint(len(arms), (lanes,), generator=generator(seed, "arm")).tolist()
        def play() -> dict[str, list]:
            return play_record(env, ArmPlayer(arms, lambda x: drawn), seed * 1000) | dict(arm=drawn)
        practice.append(store.get(f"family/practice/{seed}", play))
    env.close()
    rules = fit_rules(practice, names)
    store.get("family/rules", lambda: dict(rules, arms=["wait-only", "fixed schedule"], best=best))
    env = fair_env(recipe)
    for seed in dict.fromkeys(p.seed for p in played.plays):
        look = store.get(f"family/look/{seed}", lambda: look_once(env, seed))
        x = np.array(look["seen"])
        store.get(f"family/chosen/{seed}", lambda: dict(ridge=forecast(rules, x).argmax(-1).tolist(), **{
            k: np.where(x[:, names.index(rules[k]["column"])] < rules[k]["cut"],
                        rules[k]["below"], rules[k]["above"]).tolist() for k in ("any_column", "host_gradient")}))
    env.close()


CONTESTS = dict(digits_impaired=contest_impaired, digits_family=contest_family)

def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contests", nargs="*", help=f"some of {', '.join(CONTESTS)}; none: all")
    parser.add_argument("--out", type=Path, default=STORED/"contests.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    store = Store(args.out)
    for name in args.contests or CONTESTS: CONTESTS[name](store)


if __name__ == "__main__": main()
