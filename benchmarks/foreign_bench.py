"""A benchmark of strangers: loops that no Governor was built on, guarded as a newcomer would guard them.

    python -m benchmarks.foreign_bench healthy                                 # every loop, seeds 0–4, three arms
    python -m benchmarks.foreign_bench healthy --loops reinforce,ring-gan --seeds 0-1 --arms none,run
    python -m benchmarks.foreign_bench healthy --held-out                      # two loops, ten seeds kept for last

In a healthy run nothing may happen: no act, no cause, and every bit as it is without a guard. Counted beside that are
notes, comparisons, calls of the step that the author did not make (in steps), and what these have left behind in what
the author did not hand over.
"""
import argparse
import hashlib
import json
import logging
import math
import pickle
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path: sys.path.insert(0, str(ROOT))

from benchmarks.foreign_loops import HEALTHY, HELD_OUT, HELD_OUT_SEEDS, begin

from esper_nb.guard.governor import Governor
from esper_nb.guard.reports import GovernorStop

ARMS = ("none", "watch", "run")
NO_CAUSE = (None, "", "unknown", "healthy") # what may be said of a healthy run
TRUE_OF_HEALTHY = {"ignored-labels": ("data",), "scaler-skips-batches": ("data",)} # these batches are odd, if harmless


# --- what a run ends with, to the bit

def fold(found, into) -> None:
    "Add everything that a value holds to a hash."
    if found is None or isinstance(found, bool | int | float | str | bytes): into.update(repr(found).encode())
    elif isinstance(found, Tensor):
        into.update(str((found.dtype, tuple(found.shape))).encode())
        into.update(found.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(found, np.ndarray): into.update(found.tobytes())
    elif isinstance(found, dict):
        for k, v in found.items():
            fold(k if isinstance(k, str | int) else str(k), into)
            fold(v, into)
    elif hasattr(found, "state_dict"): fold(found.state_dict(), into)
    elif isinstance(found, list | tuple) or hasattr(found, "__iter__"):
        for v in found: fold(v, into)
    else: into.update(pickle.dumps(found))

def digest(found) -> str:
    "A hash of everything that a value holds."
    made = hashlib.blake2b(digest_size=12)
    fold(found, made)
    return made.hexdigest()


class ForwardCount:
    "How often modules are called inside the block, whoever calls them."
    def __init__(self): self.n = 0
    def add(self, module, inputs): self.n += 1
    def __enter__(self):
        self.hook = nn.modules.module.register_module_forward_pre_hook(self.add)
        return self
    def __exit__(self, *_): self.hook.remove()


# --- healthy runs

def of_tuple(said):
    "The loss of what a step returns; None if it has skipped."
    return said[0] if isinstance(said, tuple) else said

def healthy_run(name: str, arm: str, seed: int) -> dict:
    "One healthy run under one arm."
    run, governor, said, start = begin({**HEALTHY, **HELD_OUT}[name], seed), None, "", time.process_time()
    at = -1
    with ForwardCount() as calls:
        if arm != "none": governor = Governor(*run.parts, chance_loss=run.chance)
        try:
            for at, batch in enumerate(run.batches):
                if arm == "run": governor.run(run.step, batch)
                else:
                    loss = of_tuple(run.step(batch))
                    if governor is not None and loss is not None: governor.watch(loss)
        except GovernorStop: said = f"stopped at batch {at}"
        except Exception as e: said = f"{type(e).__name__} at batch {at}: {str(e)[:90]}"
        if governor is not None: governor.close()
    row = dict(loop=name, arm=arm, seed=seed, ended=said, batches=at + 1, calls=calls.n, score=run.score(),
               parts=digest(run.parts), forgotten=digest(run.forgotten()), seconds=time.process_time() - start)
    if governor is None: return row
    filed = [*governor.reports, *governor.notes]
    causes, broke = [r.cause for r in filed], ""
    if arm == "run":
        try: causes.append(governor.explain().cause)
        except Exception as e: broke = f"explain: {type(e).__name__}: {str(e)[:90]}"
    fine = (*NO_CAUSE, *TRUE_OF_HEALTHY.get(name, ()))
    return row | dict(
        acts=[str(r) for r in governor.reports], actions=dict(Counter(r.action for r in governor.reports)),
        notes=dict(Counter(r.action for r in governor.notes)),
        false_causes=[c for c in causes if c not in fine], explained=broke or causes[-1] if arm == "run" else None)

def against_alone(row: dict, alone: dict) -> dict:
    "A guarded run beside the same run alone."
    if row is alone: return row
    one = alone["calls"] / alone["batches"] # calls of modules in a step
    return row | dict(equal=all(row[k] == alone[k] for k in ("parts", "score", "batches")),
                      traceless=row["forgotten"] == alone["forgotten"], alone=alone["score"],
                      replayed=round((row["calls"] - alone["calls"]) / one))

def healthy_line(row: dict) -> str:
    "A guarded healthy run as a line of text."
    bad = [k for k, off in (("NOT EQUAL", not row["equal"]), ("traces", not row["traceless"]),
                            ("ACTED", row["acts"]), ("FALSE CAUSE", row["false_causes"]), ("ENDED", row["ended"])) if off]
    seen = f"{row['loop']:23s} {row['arm']:6s} {row['seed']:5d}  {row['alone']:8.4f} → {row['score']:8.4f}"
    said = " ".join(f"{k}={v}" for k, v in (("acts", row["actions"]), ("notes", row["notes"]),
                    ("replayed", row["replayed"]), ("false", row["false_causes"]), ("ended", row["ended"]), ("explained", str(row["explained"])[:60])) if v not in ("None", "healthy") and v)
    return f"{seen}  {'ok' if not bad else ', '.join(bad)}  {said}".rstrip()

def healthy_table(loops: list[str], seeds: list[int], arms: list[str]) -> list[dict]:
    "Every loop, seed and arm, one line each as it is done."
    rows = []
    for name in loops:
        for seed in seeds:
            alone = healthy_run(name, "none", seed)
            rows.append(alone)
            for arm in arms:
                if arm == "none": continue
                rows.append(against_alone(healthy_run(name, arm, seed), alone))
                print(healthy_line(rows[-1]), flush=True)
    return rows

def healthy_summary(rows: list[dict]) -> str:
    "What became of all healthy runs, a line an arm."
    lines = []
    for arm in dict.fromkeys(r["arm"] for r in rows if r["arm"] != "none"):
        mine = [r for r in rows if r["arm"] == arm]
        def count(f, mine=mine): return sum(bool(f(r)) for r in mine)
        lines.append(
            f"{arm:6s} {len(mine)} healthy runs: acted on {count(lambda r: r['acts'])}, bit-equal "
            f"{count(lambda r: r['equal'])}, without traces elsewhere {count(lambda r: r['traceless'])}, false causes "
            f"{count(lambda r: r['false_causes'])}, ended early {count(lambda r: r['ended'])}, with a comparison "
            f"{count(lambda r: r['notes'].get('compare'))}, notes {sum(sum(r['notes'].values()) for r in mine)}, "
            f"steps replayed {sum(r['replayed'] for r in mine)}")
    return "\n".join(lines)


# --- command line

def numbers(text: str) -> list[int]:
    "0-4 or 0,3,7 as numbers."
    out: list[int] = []
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        out += range(int(first), int(last or first) + 1)
    return out

def main():
    "Read the command line, and print what was asked for."
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("what", choices=("healthy",))
    ask.add_argument("--loops", help="names, with commas")
    ask.add_argument("--seeds", type=numbers, default=[0, 1, 2, 3, 4], help="0-4, or 0,3")
    ask.add_argument("--arms", default=",".join(ARMS), help="none, watch, run")
    ask.add_argument("--held-out", action="store_true", help="the loops and seeds that nothing was developed on")
    ask.add_argument("--json", type=Path, help="where the figures go")
    args = ask.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("esper_nb").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    start = time.process_time()
    known = HELD_OUT if args.held_out else HEALTHY
    loops = args.loops.split(",") if args.loops else list(known)
    unknown = [n for n in loops if n not in known]
    if unknown: ask.error(f"--loops {','.join(unknown)}: expected some of {', '.join(known)}")
    seeds = list(HELD_OUT_SEEDS) if args.held_out else args.seeds
    rows = healthy_table(loops, seeds, args.arms.split(","))
    print(healthy_summary(rows))
    print(f"{time.process_time() - start:.0f} s of one core")
    if args.json: args.json.write_text(json.dumps(rows, separators=(",", ":"), ensure_ascii=False) + "\n")


if __name__ == "__main__": main()
