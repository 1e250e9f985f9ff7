"""What it costs to compute every lane alone, `exact=True`, beside groups of lanes:

    python -m research.exact            # writes nbs/explanations/bench_exact.json; three minutes

Three environments play the same actions in turns, in one process: as usual, with `exact`, and with `exact` in a shard,
where each lane is an environment of its own. A figure is the least CPU time of a step in which all lanes only train.
Mixed: seeds of different kinds in the lanes; alike: the same in all.
"""
import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.measure import machine
from esper_nb.control import EnvConfig, GrowVecEnv
from esper_nb.run import SplitVecEnv

RESULT = Path(__file__).resolve().parents[1]/"nbs/explanations/bench_exact.json"
CASES = {"digits_impaired": dict(num_envs=16), "cifar_impaired": dict(num_envs=4, synthetic=True, limit=512)}
GROWS, STEPS = 3, 8 # steps in which something grows, and steps in all


def legal(env, lane, rng):
    "Return a random legal action of a lane that is no wait, if there is one."
    sizes = env.single_action_space.nvec
    for _ in range(500):
        actions = torch.zeros(env.num_envs, len(sizes), dtype=torch.int64)
        actions[lane] = torch.from_numpy(rng.integers(0, sizes))
        if actions[lane, 0] and env.actions.allowed(env.mask, actions)[lane]: return actions[lane].numpy()
    return np.zeros(len(sizes), np.int64)

def price(task, mixed, **settings):
    "Return CPU seconds of a step, for each way."
    config = EnvConfig(task, horizon=50, workers=1, **settings)
    exact = config.replace(exact=True)
    envs = {"usual": GrowVecEnv(config), "exact": GrowVecEnv(exact), "exact, sharded": SplitVecEnv(exact, 1)}
    for env in envs.values(): env.reset(seed=1)
    seconds = {name: [] for name in envs}
    for t in range(STEPS):
        usual, wait = envs["usual"], np.zeros(len(envs["usual"].single_action_space.nvec), np.int64)
        rngs = [np.random.default_rng((5, i if mixed else 0, t)) for i in range(usual.num_envs)]
        acts = np.stack([legal(usual, i, r) if t < GROWS else wait for i, r in enumerate(rngs)])
        for name, env in envs.items():
            begun = time.process_time()
            env.step(acts)
            seconds[name].append(time.process_time() - begun)
    for env in envs.values(): env.close()
    return {name: min(s[GROWS:]) for name, s in seconds.items()}

def main():
    "Measure every case, print it, and write the file."
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT)
    args, found = parser.parse_args(), []
    torch.set_num_threads(1)
    for task, settings in CASES.items():
        for mixed in (False, True):
            seconds = price(task, mixed, **settings)
            ratios = {name: s / seconds["usual"] for name, s in seconds.items()}
            found.append(dict(task=task, lanes=settings["num_envs"], mixed=mixed, seconds=seconds, ratios=ratios))
            print(task, "mixed" if mixed else "alike", {k: round(r, 2) for k, r in ratios.items()}, flush=True)
    args.out.write_text(json.dumps(dict(machine=machine(), cases=found), indent=1) + "\n", encoding="utf-8")

if __name__ == "__main__": main()
