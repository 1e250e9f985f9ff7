"""A benchmark of strangers: loops that no Governor was built on, guarded as a newcomer would guard them.

    python -m benchmarks.foreign_bench healthy                                 # every loop, seeds 0–4, three arms
    python -m benchmarks.foreign_bench healthy --loops reinforce,ring-gan --seeds 0-1 --arms none,run
    python -m benchmarks.foreign_bench ruined --seeds 0 --arms none,watch,run,zclip   # loops × faults, then stories
    python -m benchmarks.foreign_bench ruined --loops table,vae --faults "NaN weight,bit flip"
    python -m benchmarks.foreign_bench all --held-out                   # four loops and ten seeds kept for last

In a healthy run nothing may happen: no act, no cause, and every bit as it is without a guard. Counted beside that are
notes, comparisons, calls of the step that the author did not make (in steps), and what these have left behind in what
the author did not hand over.
"""
import argparse
import functools
import hashlib
import json
import logging
import os
import pickle
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path: sys.path.insert(0, str(ROOT))

from benchmarks import foreign_faults
from benchmarks.foreign_faults import FAULT_AT, FAULTS, STORIES, TRUE, faults_of
from benchmarks.foreign_loops import HEALTHY, HELD_OUT, HELD_OUT_SEEDS, begin
from benchmarks.foreign_rivals import ARMS, GUARDS, OURS, Ended, Watch
from benchmarks.loops import split_names, stream
from esper_nb.guard.reports import SUSPECT

NO_CAUSE = (None, "", "unknown", "healthy") # what may be said of a healthy run
TRUE_OF_HEALTHY = dict.fromkeys( # some of their batches are odd, if harmless
    ("ignored-labels", "nothing-selected", "skips-and-returns-nan", "scaler-skips-batches", "skips-and-returns-none",
     "rare-hard-batches"), ("data",))


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


class ForwardCount:
    "How often modules are called inside the block, whoever calls them."
    def __init__(self): self.n = 0
    def add(self, module, inputs): self.n += 1
    def __enter__(self):
        self.hook = nn.modules.module.register_module_forward_pre_hook(self.add)
        return self
    def __exit__(self, *_): self.hook.remove()


# --- healthy runs

def said_of(guard, arm: str) -> dict:
    "What a Governor has filed: acts, notes, causes; of another guard only its acts."
    if arm not in OURS:
        return dict(acts=[str(a)[:120] for a in guard.acts], actions={}, notes={}, remarks=[], causes=[])
    filed = [*guard.governor.reports, *guard.governor.notes]
    return dict(acts=[str(r) for r in guard.governor.reports],
                actions=dict(Counter(r.action for r in guard.governor.reports)),
                notes=dict(Counter(r.action for r in guard.governor.notes)),
                remarks=[k for k in guard.governor.log.remarks if k in SUSPECT],
                causes=[r.cause for r in filed if r.cause is not None])

def failure(e: Exception) -> str: return f"{type(e).__name__}: {str(e)[:90]}"

def closed(guard) -> str: # what went wrong
    "Training is over."
    try: guard.close()
    except Exception as e: return f" at the end: {failure(e)}"
    return ""

def explained(guard, **options) -> str: # a cause, or the error
    "What `explain` answers at the end."
    try: return guard.governor.explain(**options).cause
    except Exception as e: return failure(e)

def healthy_run(name: str, arm: str, seed: int) -> dict:
    "One healthy run under one arm."
    run, said, start, at = begin({**HEALTHY, **HELD_OUT}[name], seed), "", time.process_time(), -1
    with ForwardCount() as calls:
        guard = GUARDS[arm](run.parts, run.step, run.chance)
        try:
            for at, batch in enumerate(run.batches): guard.train(batch)
        except Ended as e: said = f"batch {at}: {e}"
        except Exception as e: said = f"batch {at}: {failure(e)}"
        said += closed(guard)
    row = dict(loop=name, arm=arm, seed=seed, ended=said, batches=at + 1, calls=calls.n, score=run.score(),
               parts=digest(run.parts), forgotten=digest(run.forgotten()), seconds=time.process_time() - start)
    row |= said_of(guard, arm)
    row["explained"] = explained(guard) if arm == "run" else None
    fine = (*NO_CAUSE, *TRUE_OF_HEALTHY.get(name, ()))
    asked = [row["explained"]] if row["explained"] and ":" not in row["explained"] else []
    return row | dict(false_causes=[c for c in (*row["causes"], *asked) if c not in fine])

def against_alone(row: dict, alone: dict) -> dict:
    "A guarded run beside the same run alone."
    one = alone["calls"] / alone["batches"] # calls of modules in a step
    return row | dict(equal=all(row[k] == alone[k] for k in ("parts", "score", "batches")),
                      traceless=row["forgotten"] == alone["forgotten"], alone=alone["score"],
                      replayed=round((row["calls"] - alone["calls"]) / one))

def told(**said) -> str:
    "What there is to say, as text."
    return " ".join(f"{k}={v}" for k, v in said.items() if v and v not in ("healthy", "''"))

def healthy_line(row: dict) -> str:
    "A guarded healthy run as a line of text."
    bad = dict(ACTED=row["acts"], ENDED=row["ended"], traces=not row["traceless"]) | {
        "NOT EQUAL": not row["equal"], "FALSE CAUSE": row["false_causes"]}
    found = ", ".join(k for k, there in bad.items() if there) or "ok"
    seen = f"{row['loop']:23s} {row['arm']:14s} {row['seed']:5d}  {row['alone']:8.4f} → {row['score']:8.4f}"
    return f"{seen}  {found:10s}  " + told(
        acts=row["actions"] or len(row["acts"]), notes=row["notes"], replayed=row["replayed"],
        false=row["false_causes"], ended=row["ended"], explained=row["explained"])

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


# --- ruined runs

@functools.cache
def clean_scores(name: str) -> tuple[tuple[float, ...], float]: # of five seeds, and before training
    "How clean runs of a loop or a story end."
    def one(seed):
        loop, steps = made(name, seed, ill=False)
        first = float(loop.score())
        for i in range(steps):
            if name in STORIES: loop.between(i)
            loop.step(loop.batch(i))
        return float(loop.score()), first
    found = [one(seed) for seed in range(5)]
    return tuple(x for x, _ in found), found[0][1]

def slack_of(name: str) -> float:
    "How far from a clean run a score may be and still be as good."
    scores, first = clean_scores(name)
    return max(.02 * abs(first - float(np.mean(scores))), 3 * float(np.std(scores)))

def verdict(clean: float, slack: float, alone: float, guarded: float) -> str:
    "How a guarded run ended, beside a clean one and the same run alone; half a slack more is not worse."
    def bad(x): return not np.isfinite(x) or x > clean + slack
    worse = bad(guarded) and (not np.isfinite(guarded) or guarded > alone + slack / 2)
    if not bad(alone): return "worse" if worse else "harmless"
    if not bad(guarded): return "recovered"
    if not np.isfinite(alone): return "in part" if np.isfinite(guarded) else "harmful"
    if worse: return "worse"
    return "in part" if guarded - clean < (alone - clean) / 2 else "harmful"

def made(name: str, seed: int, ill: bool = True): # the loop, and its steps
    "A loop or a story."
    if name in STORIES: return STORIES[name](seed, ill), STORIES[name].steps
    return {**foreign_faults.LOOPS, **foreign_faults.HELD_OUT}[name](seed), foreign_faults.STEPS

def train(loop, guard, first: int, last: int, fault: str | None = None, at: int = 0) -> str: # why it ended early
    "Train some steps; a fault begins at step `at`."
    for i in range(first, last):
        batch = loop.batch(i)
        if fault in FAULTS: batch = FAULTS[fault](loop, i - at, batch, stream(loop.seed, 3, i))
        if isinstance(loop, foreign_faults.Story): loop.between(i)
        try: guard.train(batch)
        except Ended as e: return f"batch {i}: {e}"
        except Exception as e: return f"batch {i}: {failure(e)}"
    return ""

def ending(loop, guard, arm: str, ended: str) -> dict:
    "How a ruined or a clean run ends."
    ended += closed(guard)
    row = dict(score=float(loop.score()), ended=ended, parts=digest(loop.parts())) | said_of(guard, arm)
    row["explained"] = explained(guard, budget=300) if arm == "run" and not row["causes"] else None
    row["after"] = guard.governor.reports[0].batch if arm in OURS and guard.governor.reports else None
    return row

def ruined_runs(name: str, arm: str, seed: int, faults: list[str | None], at: int = FAULT_AT) -> dict:
    "{fault: how it ends}; what comes before the faults is run once. None is a fault, too: nothing happens."
    loop, steps = made(name, seed)
    guard = GUARDS[arm](loop.parts(), loop.step, loop.chance)
    ended = train(loop, guard, 0, at)
    def go_on(fault):
        try: return ending(loop, guard, arm, ended or train(loop, guard, at, steps, fault, at))
        except Exception: # which a copy can't hand on
            traceback.print_exc()
            raise
    return {fault: in_a_copy(lambda: go_on(fault)) for fault in faults}

def story_run(name: str, arm: str, seed: int, ill: bool) -> dict:
    "One story, as it was reported or mended."
    loop, steps = made(name, seed, ill)
    guard = GUARDS[arm](loop.parts(), loop.step, loop.chance)
    return ending(loop, guard, arm, train(loop, guard, 0, steps))

def cause_of(row: dict, harmed: bool) -> str: # "true", "false", "unknown" or "" for nothing said
    "Whether what was said of a fault is true; one false cause among several is one too many."
    true = TRUE.get(row["fault"]) or STORIES[row["loop"]].true
    said = [c for c in row["causes"] if c] or [c for c in [row["explained"]] if c and ":" not in c]
    if not said: return ""
    if any(c not in (*true, "unknown", "healthy", "earlier") for c in said): return "false"
    if any(c in true for c in said): return "true"
    return "false" if harmed and "healthy" in said else "unknown"

def judged(row: dict, clean: dict, alone: dict, at: int) -> dict:
    "A guarded ruined run beside a clean one and one alone."
    slack, fault = slack_of(row["loop"]), row["fault"]
    row = row | dict(clean=clean["score"], alone=alone["score"], slack=slack,
                     verdict=verdict(clean["score"], slack, alone["score"], row["score"]))
    harmed = row["verdict"] not in ("harmless", "recovered") # in the end: a gate may have let nothing happen
    row["beyond"] = row["loop"] in STORIES and not STORIES[row["loop"]].mendable # neither a gate nor a rollback can
    row["seen"] = bool(row["acts"] or row["notes"] or row["remarks"] or row["ended"])
    if row["after"] is not None and fault in FAULTS: row["after"] -= at
    if fault is None: row |= dict(equal=row["parts"] == clean["parts"], false_causes=[
        c for c in (*row["causes"], row["explained"]) if c and ":" not in c and c not in NO_CAUSE])
    else: row["named"] = cause_of(row, harmed) if row["arm"] in OURS else ""
    return row

def ruined_line(row: dict) -> str:
    "A ruined run as a line of text."
    seen = (f"{row['loop']:18s} {row['fault'] or 'clean':24s} {row['arm']:14s} {row['seed']:5d}  {row['clean']:9.4f}"
            f" {row['alone']:9.4f} → {row['score']:9.4f}")
    if row["fault"] is None: found = "bit-equal" if row["equal"] and not row["acts"] else "NOT EQUAL or ACTED"
    else: found = row["verdict"]
    return f"{seen}  {found:9s}  " + told(
        acts=row["actions"] or len(row["acts"]), notes=row["notes"], causes=row["causes"], named=row.get("named"),
        explained=repr(row["explained"] or ""), ended=row["ended"], after=row["after"])

def ruined_table(loops: list[str], seeds: list[int], arms: list[str], faults: list[str] | None,
                 at: int) -> list[dict]:
    "Every loop, fault or story, seed and arm; one line each as it is done."
    rows: list[dict] = []
    for name in loops:
        for seed in seeds:
            mine: list[str | None] = [None, "its own"] if name in STORIES else [None, *(
                f for f in faults_of(name) if faults is None or f in faults)]
            def found(arm, name=name, seed=seed, mine=mine):
                if name in STORIES: return {f: story_run(name, arm, seed, f is not None) for f in mine}
                return ruined_runs(name, arm, seed, mine, at)
            alone = found("none")
            for arm in arms:
                for fault, row in (alone if arm == "none" else found(arm)).items():
                    row = dict(loop=name, fault=fault, arm=arm, seed=seed) | row
                    rows.append(judged(row, alone[None], alone[fault], at))
                    if arm != "none": print(ruined_line(rows[-1]), flush=True)
    return rows

VERDICTS = ("recovered", "in part", "harmful", "worse", "harmless")

def ruined_summary(rows: list[dict]) -> str:
    "How all ruined runs ended: a line an arm, then a line a fault or a story."
    lines = []
    arms = list(dict.fromkeys(r["arm"] for r in rows))
    def counts(mine): return " ".join(f"{sum(r['verdict'] == v for r in mine):4d} {v}" for v in VERDICTS)
    def share(mine):
        harmful = [r for r in mine if not r["alone"] <= r["clean"] + r["slack"]]
        return f"{sum(r['verdict'] == 'recovered' for r in harmful)} of {len(harmful)} harmful ones end as clean"
    for arm in arms:
        mine = [r for r in rows if r["arm"] == arm and r["fault"]]
        clean = [r for r in rows if r["arm"] == arm and not r["fault"]]
        unseen = sum(r["verdict"] not in ("harmless", "recovered") and not r["seen"] for r in mine)
        beyond = [r for r in mine if r["beyond"]]
        mine = [r for r in mine if r not in beyond]
        named = Counter(r["named"] for r in mine if r["named"])
        worse = sum(r["verdict"] == "worse" and r["alone"] <= r["clean"] + r["slack"] for r in mine)
        def count(key, mine=clean): return sum(bool(r[key]) for r in mine)
        lines.append(
            f"{arm:14s} {share(mine)}: {counts(mine)} ({worse} worse where it was harmless alone)\n{'':14s} harmed "
            f"without a word {unseen}; beyond mending {len(beyond)}, seen {count('seen', beyond)}; ended early "
            f"{count('ended', mine)}\n{'':14s} causes true {named['true']}, false {named['false']}, unknown "
            f"{named['unknown']}; clean runs {len(clean)}: acted on {count('acts')}, bit-equal {count('equal')}, false "
            f"causes {count('false_causes')}")
    def kind(r): return r["loop"] if r["fault"] == "its own" else r["fault"]
    for fault in dict.fromkeys(kind(r) for r in rows if r["fault"]):
        cells = []
        for arm in arms:
            mine = [r for r in rows if r["arm"] == arm and r["fault"] and kind(r) == fault]
            harmful = [r for r in mine if r["verdict"] != "harmless"]
            good = sum(r["verdict"] == "recovered" for r in harmful)
            named = Counter(r["named"] for r in mine if r["named"])
            worse = sum(r["verdict"] == "worse" for r in mine)
            cells.append(f"{arm} {good}/{len(harmful)}" + f" worse {worse}" * bool(worse) + "".join(
                f" {k} {named[k]}" for k in ("true", "false") if named[k]))
        lines.append(f"  {fault:26s} {len(mine)} runs: " + " | ".join(cells))
    return "\n".join(lines)


# --- what is stored

KEPT = ("loop", "fault", "arm", "seed", "score", "clean", "alone", "slack", "verdict", "named", "seen", "beyond",
        "notes", "remarks", "causes", "explained", "false_causes", "equal", "traceless", "replayed", "after", "ended")

def brief(row: dict) -> dict:
    "A row without hashes and texts; of what a guard did, how often."
    def empty(v): return v is None or v is False or v in ("", [], {})
    return {k: row[k] for k in KEPT if k in row and not empty(row[k])} | dict(acts=len(row["acts"]))

def store(path: Path, rows: dict[str, list[dict]]):
    "Put tables into a file, beside others that are there."
    there = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    there |= {name: [brief(r) for r in table] for name, table in rows.items()}
    path.write_text(json.dumps(there, separators=(",", ":"), ensure_ascii=False) + "\n", encoding="utf-8")


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
    ask.add_argument("what", choices=("healthy", "ruined", "all"))
    ask.add_argument("--loops", help="names, with commas; stories are loops, too")
    ask.add_argument("--faults", help="names, with commas")
    ask.add_argument("--at", type=int, default=FAULT_AT, help="step at which faults begin; stories have their own")
    ask.add_argument("--seeds", type=numbers, default=[0, 1, 2, 3, 4], help="0-4, or 0,3")
    ask.add_argument("--arms", default="none,watch,run", help=f"some of {', '.join(ARMS)}; or all")
    ask.add_argument("--held-out", action="store_true", help="the loops and seeds that nothing was developed on")
    ask.add_argument("--no-chance", action="store_true", help="the Governor is not told the loss of guessing")
    ask.add_argument("--json", type=Path, help="a file to which the figures are added")
    args = ask.parse_args()
    Watch.knows_chance = not args.no_chance
    torch.set_num_threads(1)
    logging.getLogger("esper_nb").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    start, rows = time.process_time(), {}
    healthy = list(HELD_OUT if args.held_out else HEALTHY)
    ruined = list(foreign_faults.HELD_OUT if args.held_out else [*foreign_faults.LOOPS, *STORIES])
    known = [*(healthy if args.what != "ruined" else []), *(ruined if args.what != "healthy" else [])]
    loops = args.loops.split(",") if args.loops else known
    arms = list(ARMS) if args.arms == "all" else args.arms.split(",")
    faults = split_names(args.faults, FAULTS) if args.faults else None
    for name, said, may in (("--loops", loops, known), ("--arms", arms, ARMS),
                            ("--faults", faults or [], list(FAULTS))):
        if odd := [x for x in said if x not in may]: ask.error(f"{name} {', '.join(odd)}: expected some of {may}")
    seeds = list(HELD_OUT_SEEDS) if args.held_out else args.seeds
    if args.what != "ruined":
        rows["healthy"] = healthy_table([n for n in loops if n in healthy], seeds, arms)
        print(healthy_summary(rows["healthy"]))
    if args.what != "healthy":
        rows["ruined"] = ruined_table([n for n in loops if n in ruined], seeds, arms, faults, args.at)
        print(ruined_summary(rows["ruined"]))
    print(f"{time.process_time() - start:.0f} s of one core")
    if args.json: store(args.json, {f"{k}, held out" if args.held_out else k: v for k, v in rows.items()})


if __name__ == "__main__": main()
