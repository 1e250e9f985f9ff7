"""Wrong values in a folder that came from elsewhere: refused in a line, shown as text, or does one get through?

    python -m benchmarks.strangers_bench          # writes nbs/explanations/bench_strangers.json; some 20 minutes
    python -m benchmarks.strangers_bench --seed 1 # another order, and other places of a checkpoint's state

Every value stands once in every field and once for every name of every file of a run and of a fit; of a checkpoint's
state, that is in a hundred places drawn at random. Whoever stops it and begins again goes on where it was.
"""
import argparse
import json
import logging
import random
import tempfile
import warnings
from functools import lru_cache
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from tqdm.auto import tqdm

from esper_nb.record import RunFolder, check_contract, encode_row, read_rows
from esper_nb.core import content_digest, write_json
from esper_nb.run import begin_fit, begin_run, export_run, get_recipe, open_fit, open_run, report_html, watch_text
from esper_nb.show import log_html, status_html, watch
from esper_nb.train import FitConfig, get_task, new_population

STORED = Path(__file__).resolve().parents[1]/"nbs/explanations/bench_strangers.json"
TINY = {"env.num_envs": 2, "env.horizon": 2, "env.limit": 64, "env.slots": ["r0c0"], "env.blueprints": ["conv_light"],
        "ppo.num_steps": 2, "ppo.num_updates": 1, "ppo.num_minibatches": 1, "save_every": 1, "comparison": 1.}
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"
VALUES = [EVIL, 1e308, 2**62, 10**30, -1, [], {}, {"a": {"b": [EVIL]}}, [[EVIL]], True, None, "x" * 5000,
          "../../etc", "$\\frac{$", "\x1b[2J\x1b]0;evil\x07"] # and the path of a plugin
RIGHT = "refused", "escaped", "opened" # what may come of a value


# ---- folders

def make_run(where):
    "Return the folder of a tiny run that has ended."
    run = begin_run(get_recipe("digits_impaired", TINY).replace(plugins=()), where)
    for _ in run.updates(): pass
    run.finish()
    return run.folder.path

def make_fit(where):
    "Return the folder of a tiny fit that has ended."
    task = get_task("digits").replace(slots=("r0c0",))
    pop = new_population(task, FitConfig(lanes=2, epochs=1, workers=1), data=task.load("cpu", None, 64))
    run = begin_fit(pop, where, made={})
    for _ in run.epochs(): pass
    return run.folder.path

MADE = dict(run=make_run, fit=make_fit)

def mark_of(folder): return folder.parent/"mark" # there, if a value was run

def plugin_of(folder):
    "Return the path of a plugin that leaves a mark where it runs."
    path = folder.parent/"evil.py"
    path.write_text(f"open({str(mark_of(folder))!r}, 'w').close()")
    return str(path)


# ---- values

def places(tree, path=()):
    "Every path into a tree of dictionaries and lists."
    for k, v in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield (*path, k)
        yield from places(v, (*path, k))

def put(tree, path, value, as_key):
    "Put a value in a place of a tree, or in the place of its name."
    for k in path[:-1]: tree = tree[k]
    if as_key and isinstance(tree, dict): tree[str(value)] = tree.pop(path[-1])
    else: tree[path[-1]] = value

def trees(folder):
    "Every file of a folder as a tree of JSON, and which rows of it are of a kind that no earlier row is of."
    for name in ("config.json", "comparison.json", "rows.jsonl", "final.jsonl"):
        path = folder/name
        if not path.exists(): continue
        if name.endswith(".json"): yield name, [(0, json.loads(path.read_text()))]
        else: yield name, list({row["kind"]: (i, row) for i, row in [*enumerate(read_rows(path))][::-1]}.values())
    texts = checkpoint_texts(folder)[0]["__metadata__"]
    yield "checkpoint.safetensors", [(name, json.loads(texts[name])) for name in ("contract", "tree")]

def cases(folder, chance):
    "Every field and name of every file, with every value: (file, line, path, value, whether it is the name)."
    values = [plugin_of(folder), *VALUES]
    for name, parts in trees(folder):
        for line, tree in parts:
            found = list(places(tree)) if line != "tree" else chance.sample(list(places(tree)), 100)
            for path in found:
                yield from ((name, line, path, value, key) for value in values for key in (False, True))

def checkpoint_texts(folder):
    "The header of a checkpoint, and the bytes behind it."
    raw = (folder/"checkpoint.safetensors").read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:end]), raw[end:]

@lru_cache
def checkpoint_tensors(folder): return load_file(folder/"checkpoint.safetensors")

def forge(folder, name, line, path, value, as_key):
    "Write the change, with a digest that fits."
    if name.endswith(".jsonl"):
        rows = read_rows(folder/name)
        put(rows[line], path, value, as_key)
        return (folder/name).write_text("".join(encode_row(row) + "\n" for row in rows))
    if name.endswith(".safetensors"):
        header, data = checkpoint_texts(folder)
        tree = json.loads((texts := header["__metadata__"])[line])
        put(tree, path, value, as_key)
        texts[line] = json.dumps(tree)
        texts["sha256"] = content_digest([texts["tree"], texts["contract"]], checkpoint_tensors(folder))
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        return (folder/name).write_bytes(len(text).to_bytes(8, "little") + text + data)
    found = json.loads((folder/name).read_text())
    put(found, path, value, as_key)
    if name == "comparison.json":
        found.pop("digest", None)
        write_json(folder/name, found)
    else: (folder/name).write_text(json.dumps(found))


# ---- commands

def reported(folder): return report_html(RunFolder(folder))

def watched(folder):
    "What the panel shows of a folder."
    session = watch(folder, image=True).session
    session.source.every = .01
    try:
        session.wait(120)
        return status_html(session) + log_html(session)
    finally: session.close()

def followed(folder):
    "What a terminal shows of a folder."
    lines = []
    watch_text(folder, say=lines.append)
    return "\n".join(lines)

def opened(folder): return open_fit(folder) if "fit" in RunFolder(folder).config() else open_run(folder)

def exported(folder): return export_run(folder, folder.parent/"n.safetensors")

def outcome(folder, command):
    "What a command makes of a folder: one of RIGHT; an error that is not a line, and markup that got through, raise."
    try: page = command(folder)
    except (ValueError, RuntimeError, OSError) as e:
        assert len(str(e)) < 20_000 and not isinstance(e, TimeoutError), e # a panel that hangs
        return "refused"
    if not isinstance(page, str): return "opened"
    assert command is followed or "<script" not in page and "<img src=x" not in page, "injected"
    assert command is not reported or "default-src 'none'" in page
    assert command is not followed or "\x1b" not in page, "injected: a terminal's command"
    return "escaped"

def fuzz(folder, chosen, every=0):
    """Forge one value after the other in a folder, open it, and yield the case with what came of it.

    Pages are made of every value. A checkpoint is loaded by a run that is open; at one of so many values, `every`, a
    new run opens the folder, and is exported. What is not one of RIGHT is the name of a command and its error.
    """
    kept, run = {p: p.read_bytes() for p in folder.iterdir()}, opened(folder)
    def loaded(folder):
        check_contract(run.checkpoint, run.contract(), run.may_change) # as `open_run` does, before it reads any tensor
        run.load()
    def see(command):
        try: return outcome(folder, command)
        except Exception as e: return f"{command.__name__}: {type(e).__name__}: {e}"[:300]
    with warnings.catch_warnings(action="ignore"), patch("esper_nb.run.report.picture_html", lambda draw, alt: ""):
        for number, case in enumerate(chosen, 1):
            forge(folder, *case)
            stored = case[0] == "checkpoint.safetensors"
            found = [see(command) for command in ([loaded] if stored else [reported, followed, watched])]
            again = stored and found != ["refused"]
            if every and number % every == 0:
                found.append(see(opened))
                if found[-1] == "opened": found.append(see(exported))
            yield case, found
            for path, content in kept.items():
                if path.read_bytes() != content: path.write_bytes(content)
            if again: run.load() # what it was

def stored():
    "What came of the values of each kind of folder, as far as it is known."
    return json.loads(STORED.read_text()) if STORED.exists() else {}

def store(kind, count): STORED.write_text(json.dumps(stored() | {kind: count}, indent=1) + "\n")

def count_values(kind, seed):
    "Forge all values in a folder of a kind, and store how often each came of them, now and then and at the end."
    with tempfile.TemporaryDirectory() as where:
        folder, chance = MADE[kind](Path(where)/kind), random.Random(seed)
        chosen = list(cases(folder, chance))
        chance.shuffle(chosen)
        count = dict(seed=seed, of=len(chosen))
        before = stored().get(kind, {})
        if count.items() <= before.items() and before["values"] < len(chosen): count = before
        else: count |= dict.fromkeys(("values", *RIGHT, "wrong", "injected", "executed"), 0)
        done = count["values"]
        with tqdm(total=len(chosen), initial=done, desc=kind, unit="value") as bar:
            for case, found in fuzz(folder, chosen[done:], every=33):
                wrong = [what for what in found if what not in RIGHT]
                for what in RIGHT: count[what] += found.count(what)
                count["values"] += 1
                count["wrong"] += len(wrong)
                count["injected"] += sum("injected" in what for what in wrong)
                count["executed"] += (mark := mark_of(folder)).exists()
                mark.unlink(missing_ok=True)
                if wrong: tqdm.write(f"{case}: {wrong}")
                bar.update()
                if count["values"] % 1000 == 0: store(kind, count)
    store(kind, count)
    print(kind, count)

def main():
    "All values in the folders of both kinds."
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("esper_nb").setLevel(logging.CRITICAL)
    for kind in MADE: count_values(kind, asked.seed)


if __name__ == "__main__": main()
