"""How the main job fares on a busy machine: an epoch and an update of `train digits_impaired` beside busy processes.

    python -m research.company              # some minutes; nothing else may run meanwhile
    python -m research.company --rounds 1   # quickly

Writes nbs/explanations/bench_company.json; nbs/core/06_workers.ipynb shows it. A busy process is one that counts. Turns
go round: alone, beside one, beside two, and again. Where the scheduler is fair, a job of two threads on two cores keeps
two thirds of them beside one busy process and a half beside two: its lost share is a time of 1.5 and of 2.
"""
import argparse
import json
import multiprocessing
import time
from pathlib import Path
from statistics import median

from benchmarks.measure import machine
from esper_nb.control.envs import GrowVecEnv
from esper_nb.core.devices import keep_freed_memory
from esper_nb.learn.learner import Learner
from esper_nb.run.recipes import get_recipe

STORED = Path(__file__).resolve().parents[1]/"nbs/explanations/bench_company.json"
COMPANY = (0, 1, 2) # busy processes


def count() -> None:
    "Keep a core busy."
    n = 0
    while True: n += 1


def turn(learner: Learner, updates: int, busy: int) -> dict[str, float]:
    "Seconds of acting and training, and of learning, beside so many busy processes."
    company = [multiprocessing.Process(target=count, daemon=True) for _ in range(busy)]
    for p in company: p.start()
    acting, learning = 0., 0.
    try:
        for _ in range(updates):
            start = time.perf_counter()
            while learner.acts: learner.step_envs()
            full = time.perf_counter()
            learner.step()
            acting += full - start
            learning += time.perf_counter() - full
    finally:
        for p in company: p.terminate()
        for p in company: p.join()
    return dict(epochs=acting, updates=learning)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=2, help="updates of a turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=STORED)
    args = parser.parse_args()
    keep_freed_memory()
    recipe = get_recipe("digits_impaired")
    env = GrowVecEnv(recipe.env)
    learner = Learner(env, recipe.ppo.replace(num_updates=10_000), recipe.policy, heads=env.actions)
    turn(learner, 1, 0)      # everything is there
    seconds: dict[int, list[dict[str, float]]] = {n: [] for n in COMPANY}
    for _ in range(args.rounds):
        for n in COMPANY: seconds[n].append(turn(learner, args.updates, n))
    rows = []
    for n in COMPANY:
        mine = {k: median(s[k] for s in seconds[n]) for k in ("epochs", "updates")}
        alone = {k: median(s[k] for s in seconds[0]) for k in mine}
        rows.append(dict(busy=n, **mine, slower={k: mine[k] / alone[k] for k in mine}))
        print(rows[-1], flush=True)
    args.out.write_text(json.dumps(dict(machine=machine(), updates=args.updates, rounds=args.rounds, rows=rows)) + "\n")


if __name__ == "__main__": main()
