"""What it costs to have lanes elsewhere: environments in shards, here, in processes and on Ray.

    python -m benchmarks.workers_bench                  # some minutes on a quiet machine
    python -m benchmarks.workers_bench --quick x.json   # only to see that it works

Writes nbs/explanations/bench_workers.json, which many_machines.ipynb beside it draws. Needs: pip install esper_nb[ray]
"""
import json
import pickle
import platform
import statistics
import sys
import time
from pathlib import Path

import torch

from esper_nb.control.actions import draw_actions
from esper_nb.control.envs import EnvConfig
from esper_nb.core.devices import generator
from esper_nb.learn.learner import Learner
from esper_nb.learn.loss import PPOConfig
from esper_nb.run.engines import FaultTolerance, new_worker, start_ray
from esper_nb.run.split import SplitVecEnv

STORED = Path(__file__).resolve().parents[1]/"nbs/explanations/bench_workers.json"
TASKS = { # what a step of them is: one epoch of so many pictures
    "digits": EnvConfig(task="digits_impaired", num_envs=16, horizon=12),
    "cifar_baseline": EnvConfig(task="cifar_baseline", num_envs=4, horizon=8, synthetic=True, limit=500),
}


class Nothing:
    "An object that does nothing, to time a call."
    def call(self) -> None: pass
    def close(self) -> None: pass


def step_times(config: EnvConfig, shards: int, engine: str, steps: int) -> list[float]:
    "Seconds of each step of random legal actions of an episode, after two to warm up."
    env, seconds = SplitVecEnv(config, shards, engine, tolerance=FaultTolerance(every=10**6)), []
    env.reset(seed=0)
    for t in range(steps + 2):
        actions = draw_actions(env.actions, env.mask, generator(0, t)).numpy()
        begun = time.perf_counter()
        env.step(actions)
        seconds.append(time.perf_counter() - begun)
    env.close()
    return seconds[2:]


def sizes_of(config: EnvConfig) -> dict[str, float]:
    "Bytes of a step and of a snapshot for one lane."
    env = SplitVecEnv(config, 1, tolerance=FaultTolerance(every=10**6))
    env.reset(seed=0)
    for t in range(4):
        actions = draw_actions(env.actions, env.mask, generator(0, t)).numpy()
        env.step(actions)
    env.save_shards()
    size = sum(len(s.snapshot or b"") for s in env.shards)
    rows = pickle.dumps(env.rows(step=0))
    told, n = len(pickle.dumps(env.latest[0])) + len(rows), config.num_envs
    env.close()
    return dict(sent=len(pickle.dumps(actions)) / n, told=told / n, snapshot=size / n)


def call_times(workers: int, calls: int = 300) -> list[float]:
    "Seconds of asking all workers to do nothing, and of all answers."
    held, seconds = [new_worker("ray", lambda notify: Nothing(), workers) for _ in range(workers)], []
    for _ in range(calls + 20):
        begun = time.perf_counter()
        for p in held: p.start("call")
        for p in held: p.finish(60)
        seconds.append(time.perf_counter() - begun)
    for p in held: p.close()
    return seconds[20:]


def acting_times(lanes: int, config: EnvConfig, steps: int = 20) -> list[float]:
    "Seconds that the policy takes to choose for so many lanes."
    env = SplitVecEnv(config.replace(num_envs=2, limit=64), 1)
    env.reset(seed=0)
    learner = Learner(env, PPOConfig(num_steps=8, num_minibatches=1), heads=env.actions)
    obs, mask = learner.view(env.obs.float())[:1].repeat(lanes, 1), env.mask[:1].repeat(lanes, 1)
    state, start, seconds = learner.policy.initial_state(lanes), torch.zeros(lanes, dtype=torch.bool), []
    for _ in range(steps + 3):
        begun = time.perf_counter()
        learner.policy.act(obs, mask, state, start, None)
        seconds.append(time.perf_counter() - begun)
    env.close()
    return seconds[3:]


def main(quick: bool = False, stored: Path = STORED) -> None:
    torch.set_num_threads(1)
    cores = start_ray()
    found: dict = dict(machine=platform.processor() or platform.machine(), cores=cores, tasks={})
    begun = time.perf_counter()
    for name, config in TASKS.items():
        if quick: config = config.replace(num_envs=4, limit=64, batch_size=32)
        table, steps = [], 2 if quick else {"digits": 10}.get(name, 6)
        for shards in (1, 2, 4):
            for engine in ("local", "process", "ray"):
                seconds = step_times(config, shards, engine, steps)
                table.append(dict(shards=shards, engine=engine, seconds=seconds))
                print(f"{name}: {shards} shards, {engine}: {statistics.median(seconds):.3f} s a step", flush=True)
        found["tasks"][name] = dict(lanes=config.num_envs, steps=table, bytes=sizes_of(config))
        print({k: round(v, 4) for k, v in found["tasks"][name]["bytes"].items()}, flush=True)
    found["calls"] = {n: call_times(n, 30 if quick else 300) for n in ((1, 2) if quick else (1, 2, 4, 8, 16))}
    lanes = (16, 64) if quick else (16, 64, 256, 1024, 4096, 16384)
    found["acting"] = {n: acting_times(n, TASKS["digits"]) for n in lanes}
    for what in ("calls", "acting"):
        print(what, {n: f"{1000 * statistics.median(s):.2f} ms" for n, s in found[what].items()})
    stored.write_text(json.dumps(found))
    print(f"{time.perf_counter() - begun:.0f} s, written to {stored}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--quick"]: main(True, Path(sys.argv[2]))
    else: main()
