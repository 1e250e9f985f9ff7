"""Seven real loops × ten faults under a Governor, beside other rules and beside no guard:

    python benchmarks/ruined_loops.py --write          # nbs/explanations/bench_ruined.json; half an hour on two cores
    python benchmarks/ruined_loops.py --first 50010 --arms alone,governor.run --write      # three seeds more
    python benchmarks/ruined_loops.py gpt vae --seeds 1 --arms alone,governor --faults "NaN weight,dead layer"

Two of the guards are a Governor: `governor` watches the losses, `governor.run` is handed the step and its batches.

A rule of another tool only sounds an alarm; here it gets what its users build around it at best: a checkpoint of all
there is, every 50 steps while no alarm sounds, and a return to the latest one, batches going on, as long as it has five
returns left. What counts is the score at the end, on data that are never trained on:

    harmless   alone, the run ends as good as a clean one (within `slack`)
    recovered  alone it does not; guarded it does
    in part    guarded it ends nearer to the clean run than alone, by half of the way
    harmful    it does not get half of the way
    worse      it ends worse than alone
"""
import copy
import json
import logging
import math
import os
import pickle
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path: sys.path.insert(0, str(ROOT))

from benchmarks.detector_bench import SpikeDetection, llm_foundry
from benchmarks.loops import BEYOND, FAULT_AT, FAULTS, LOOPS, STEPS, split_names, stream

from esper_nb.guard.governor import Governor
from esper_nb.guard.reports import GovernorConfig

FIRST, SEEDS = 50_000, 3 # seeds that no threshold was chosen on
ARMS = ("alone", "governor", "governor.run", "Lightning", "llm-foundry")


class KillLossSpike:
    "`detector_bench.llm_foundry`, a loss at a time."
    def __init__(self): self.losses = []

    def __call__(self, loss):
        self.losses.append(loss)
        # it looks back over five losses: asking it every fifth time finds all
        if math.isfinite(loss) and len(self.losses) % 5: return False
        alarm = bool(llm_foundry(np.array(self.losses[-400:])[:, None])[-5:].any())
        if alarm: self.losses = self.losses[:-5]
        return alarm


class AtAlarm:
    "A rule over losses, with checkpoints around it."
    def __init__(self, loop, rule):
        self.loop, self.rule, self.seen, self.left, self.acts = loop, rule, 0, 5, []
        self.saved = self.copy()

    def copy(self): return [copy.deepcopy(p.state_dict()) for p in self.loop.parts()]

    def watch(self, loss):
        self.seen += 1
        alarm = self.rule(float(loss))
        if alarm and self.left:
            self.left -= 1
            self.acts.append(self.seen)
            for part, state in zip(self.loop.parts(), copy.deepcopy(self.saved)): part.load_state_dict(state)
        elif not alarm and self.seen % 50 == 0: self.saved = self.copy()


def guard_of(arm, loop):
    "What watches the losses of a loop."
    if arm == "alone": return None
    if arm.startswith("governor"):
        quiet = GovernorConfig(stop_raises=False)
        return Governor(*loop.parts(), chance_loss=loop.chance, config=quiet, count=loop.count)
    return AtAlarm(loop, dict(zip(ARMS[3:], (SpikeDetection, KillLossSpike)))[arm]())


def in_a_copy(f):
    "What a function returns, computed in a copy of this process, so that nothing of it stays."
    ours, theirs = os.pipe()
    if not (child := os.fork()):
        try:
            with os.fdopen(theirs, "wb") as out: pickle.dump(f(), out)
        finally: os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as said: data = said.read()
    os.waitpid(child, 0)
    return pickle.loads(data)


def runs(name, arm, seed, faults):
    "{fault: (score, acts, notes)}; None is a fault, too: nothing happens. What comes before the faults is run once."
    torch.set_num_threads(1)
    logging.getLogger("esper_nb").setLevel(logging.CRITICAL)
    loop = LOOPS[name](seed)
    guard, batches = guard_of(arm, loop), [loop.batch(i) for i in range(STEPS)]

    def go_on(begin, end, fault=None):
        for i in range(begin, end):
            batch = batches[i]
            if fault: batch = FAULTS[fault](loop, i - FAULT_AT, batch, stream(seed, 3, i))
            if arm == "governor.run": guard.run(loop.step, batch)
            else:
                loss = loop.step(batch)
                if guard is not None: guard.watch(loss)
        if isinstance(guard, Governor): return loop.score(), [str(r) for r in guard.reports], [*map(str, guard.notes)]
        return loop.score(), [] if guard is None else guard.acts, []

    go_on(0, FAULT_AT)
    return {fault: in_a_copy(lambda: go_on(FAULT_AT, STEPS, fault)) for fault in faults}


def untrained(name, seed): return LOOPS[name](seed).score()


def verdict(clean, slack, alone, guarded):
    "How a guarded run ended, beside the same run alone."
    def bad(x): return not math.isfinite(x) or x > clean + slack
    if not bad(alone): return "worse" if bad(guarded) else "harmless"
    if not bad(guarded): return "recovered"
    if not math.isfinite(alone): return "in part" if math.isfinite(guarded) else "harmful"
    if not math.isfinite(guarded) or guarded > alone + slack: return "worse"
    return "in part" if guarded - clean < (alone - clean) / 2 else "harmful"


def main():
    "Every loop, fault, arm and seed."
    args = sys.argv[1:]
    names = [a for a in args if a in LOOPS] or list(LOOPS)
    seeds = int(args[args.index("--seeds") + 1]) if "--seeds" in args else SEEDS
    first = int(args[args.index("--first") + 1]) if "--first" in args else FIRST
    arms = args[args.index("--arms") + 1].split(",") if "--arms" in args else list(ARMS)
    faults = split_names(args[args.index("--faults") + 1], FAULTS) if "--faults" in args else list(FAULTS)
    start, rows = time.time(), []
    with ProcessPoolExecutor(2) as pool:
        jobs = {}
        for name in names:
            for s in range(seeds):
                for arm in arms: jobs[name, arm, s] = pool.submit(runs, name, arm, first + s, (None, *faults))
        done = {(name, fault, arm, s): found for (name, arm, s), job in jobs.items()
                for fault, found in job.result().items()}
    for name in names:
        cleans = [done[name, None, "alone", s][0] for s in range(seeds)]
        start_score = untrained(name, first)
        slack = max(.02 * abs(start_score - np.mean(cleans)), 3 * (np.std(cleans) if seeds > 1 else 0))
        for (n, fault, arm, s), (score, acts, notes) in done.items():
            if n != name or arm == "alone": continue
            clean = cleans[s]
            alone = clean if fault is None else done[name, fault, "alone", s][0]
            rows.append(dict(loop=name, fault=fault, arm=arm, seed=first + s, clean=clean, alone=alone, guarded=score,
                             slack=slack, verdict=verdict(clean, slack, alone, score), acts=acts))
    for arm in arms[1:]:
        mine = [r for r in rows if r["arm"] == arm]
        found = Counter(r["verdict"] for r in mine if r["fault"] and r["fault"] not in BEYOND)
        healthy = [r for r in mine if r["fault"] is None]
        calm = f"healthy runs acted on: {sum(bool(r['acts']) for r in healthy)} of {len(healthy)}"
        print(f"{arm:12s}", dict(found), calm)
        for r in mine:
            if r["verdict"] in ("harmful", "worse", "in part") or r["fault"] is None and r["acts"]:
                scores = " ".join(f"{k} {r[k]:.4g}" for k in ("clean", "alone", "guarded"))
                where = f"    {r['verdict']:8s} {r['loop']:9s} {r['fault']!s:24s}"
                print(where, scores, len(r["acts"]), *r["acts"][:2], sep=" | ")
    print(f"{time.time() - start:.0f} s")
    if "--write" in args:
        path = ROOT/"nbs/explanations/bench_ruined.json"
        new = {(r["loop"], r["arm"], r["seed"]) for r in rows}
        old = [r for r in json.loads(path.read_text(encoding="utf-8")) if (r["loop"], r["arm"], r["seed"]) not in new]
        path.write_text(json.dumps(old + rows, separators=(",", ":"), ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__": main()
