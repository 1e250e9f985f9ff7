"Folders that came from elsewhere: code that is not run, values that are refused or shown as text, digits that changed."
import errno
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from functools import lru_cache
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from safetensors.torch import load_file

from esper_nb.record import (
    CheckpointError, FolderLock, RunFolder, check_contract, checkpoint_digest, encode_row, read_rows)
from esper_nb.record import files as files_module
from esper_nb.run import plugins
from esper_nb.run import (
    RepeatStore, begin_fit, begin_run, check_trust, export_run, get_recipe, main, open_fit, open_run, report_html,
    simple_controllers, watch_text)
from esper_nb.show import log_html, status_html, watch
from esper_nb.train import FitConfig, get_task, new_population

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = {"env.num_envs": 2, "env.horizon": 2, "env.limit": 64, "env.slots": ["r0c0"], "env.blueprints": ["conv_light"],
        "ppo.num_steps": 2, "ppo.num_updates": 1, "ppo.num_minibatches": 1, "save_every": 1, "comparison": 1.}
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"
VALUES = ["code", EVIL, 1e308, 2**62, 10**30, -1, [], {}, {"a": {"b": [EVIL]}}, [[EVIL]], True, None, "x" * 5000,
          "../../etc", "$\\frac{$", "\x1b[2J\x1b]0;evil\x07"]
STORED = Path(__file__).parents[1]/"nbs/explanations/bench_strangers.json" # for the page of numbers
MARK = Path(tempfile.gettempdir(), f"mark-{os.getpid()}") # there, if a value was run


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    run = begin_run(get_recipe("digits_impaired", TINY).replace(plugins=()), tmp_path_factory.mktemp("runs"))
    for _ in run.updates(): pass
    run.finish()
    return run.folder.path

@pytest.fixture
def gift(made, tmp_path):
    "A copy of the run that anybody may have changed."
    return shutil.copytree(made, tmp_path/"gift")

def rewrite(path, change):
    "Change the settings of a folder."
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


# ---- code

def name_factory(config, factory, mark):
    "Let a run train a network that a function makes; `mark` is its argument."
    host = dict(factory=factory, kwargs=dict(path=str(mark)), shape=[1, 8, 8], classes=10, slots={"0": "BCHW"})
    config["run"]["env"].update(slots=None, task=dict(
        name="x", data="digits", host=host, slots=["0"], batch_size=32, epochs=1))

@pytest.mark.parametrize("named", ["plugin", "factory", "module"])
def test_code_that_a_folder_names_is_not_run(gift, tmp_path, capsys, named):
    mark, evil = tmp_path/"mark", tmp_path/"evil.py"
    evil.write_text(f"open({str(mark)!r}, 'w').close()")
    def change(config):
        if named == "factory": name_factory(config, "os:mkdir", mark)
        else: config["run"]["plugins"] = [str(evil) if named == "plugin" else "antigravity"]
    rewrite(gift/"config.json", change)
    for argv in (["resume", gift], ["export", gift, "--out", tmp_path/"n.pt2"]):
        assert main(list(map(str, argv))) == 2
        assert "names code that would run here" in capsys.readouterr().err
    assert main(["report", str(gift)]) == 0 and not mark.exists() and "antigravity" not in sys.modules
    if named != "plugin": return
    with pytest.warns(UserWarning, match="is trusted"): open_run(gift, trust=True)
    assert mark.exists()
    check_trust(RunFolder(gift).config(), gift) # this process knows it now


@pytest.mark.parametrize("factory, ours", [("helper:os.mkdir", False), ("helper:mkdir", False), ("helper:make", True)])
def test_a_plugin_that_one_names_lends_a_folder_only_what_it_defines(gift, tmp_path, monkeypatch, factory, ours):
    "And not what it has imported, with arguments of the folder's choice."
    mark = tmp_path/"mark"
    (tmp_path/"helper.py").write_text("import os\nfrom os import mkdir\ndef make(path): os.mkdir(path)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    monkeypatch.setattr(plugins, "_loaded", {}) # other tests start processes that would look for it in vain
    rewrite(gift/"config.json", lambda config: name_factory(config, factory, mark))
    with pytest.raises(ValueError, match="makes|names code that would run here: 'helper"):
        open_run(gift, dict(plugins=("helper",)))
    assert mark.exists() == ours


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
    for name, parts in trees(folder):
        for line, tree in parts:
            found = list(places(tree)) if line != "tree" else chance.sample(list(places(tree)), 100)
            for path in found:
                yield from ((name, line, path, value, key) for value in VALUES for key in (False, True))

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
        texts["sha256"] = checkpoint_digest([texts["tree"], texts["contract"]], checkpoint_tensors(folder))
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        return (folder/name).write_bytes(len(text).to_bytes(8, "little") + text + data)
    found = json.loads((folder/name).read_text())
    put(found, path, value, as_key)
    if name == "comparison.json":
        found.pop("digest", None)
        files_module.write_json(folder/name, found)
    else: (folder/name).write_text(json.dumps(found))

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

COMMANDS = dict(report=lambda folder: report_html(RunFolder(folder)), watch=followed, panel=watched, resume=opened,
                export=lambda folder: export_run(folder, folder.parent/"n.safetensors"))

def outcome(folder, command):
    "What a command makes of a folder: refused in a line, or shown as text."
    try: page = command(folder)
    except (ValueError, RuntimeError, OSError) as e:
        assert len(str(e)) < 20_000 and not isinstance(e, TimeoutError), e # a panel that hangs
        return "refused"
    if not isinstance(page, str): return "opened"
    assert command is followed or "<script" not in page and "<img src=x" not in page, "injected"
    assert command is not COMMANDS["report"] or "default-src 'none'" in page
    assert command is not followed or "\x1b" not in page, "injected: a terminal's command"
    return "escaped"

def fuzz(folder, chosen, everything=lambda case: False):
    """Forge one value after the other in a folder, and open it; count what came of it, and list what is wrong.

    Pages are made of every value. A checkpoint is loaded by a run that is open; where `everything` says so, a new run
    opens the folder, and is exported.
    """
    kept, count, wrong, run = {p: p.read_bytes() for p in folder.iterdir()}, Counter(), [], opened(folder)
    def load(folder):
        check_contract(run.checkpoint, run.contract(), run.may_change) # as `open_run` does, before it reads any tensor
        run.load()
    def see(case, command):
        try: found = outcome(folder, command)
        except Exception as e: wrong.append((command, *case, found := f"{type(e).__name__}: {e}"[:300]))
        else: count[found] += 1
        return found
    with warnings.catch_warnings(action="ignore"):
        for case in chosen:
            forge(folder, *case)
            stored = case[0] == "checkpoint.safetensors"
            found = [see(case, command) for command in ([load] if stored else [COMMANDS["report"], followed, watched])]
            if everything(case) and see(case, opened) == "opened": see(case, COMMANDS["export"])
            count["values"] += 1
            if count["values"] % 1000 == 0: print(dict(count), f"{len(wrong)} wrong", flush=True)
            for path, content in kept.items():
                if path.read_bytes() != content: path.write_bytes(content)
            if stored and found != ["refused"]: run.load() # what it was
    count["wrong"], count["executed"] = len(wrong), int(MARK.exists())
    count["injected"] = sum("injected" in w[-1] for w in wrong)
    return count, wrong

@pytest.fixture
def without_pictures(monkeypatch):
    monkeypatch.setattr("esper_nb.run.report.picture_html", lambda draw, alt: "")

@pytest.fixture
def code(tmp_path):
    "A value that names code, which leaves a mark where it runs."
    MARK.unlink(missing_ok=True)
    (tmp_path/"evil.py").write_text(f"open({str(MARK)!r}, 'w').close()")
    VALUES[0] = str(tmp_path/"evil.py")
    yield
    MARK.unlink(missing_ok=True)

def test_some_forged_values_are_refused_or_text(made, tmp_path, without_pictures, code):
    chance = random.Random(0)
    folder = shutil.copytree(made, tmp_path/"gift")
    chosen = [c for c in cases(folder, chance) if not c[0].endswith(".safetensors")]
    count, wrong = fuzz(folder, chance.sample(chosen, 100))
    assert not wrong and not count["executed"]

@pytest.mark.slow
@pytest.mark.parametrize("kind", ["run", "fit"])
def test_every_forged_value_is_refused_or_text(made, tmp_path, without_pictures, code, kind):
    """Every value in every place, and three in a hundred by `resume` and `export`.

    ESPER_NB_FUZZ in the environment is the share of the values; what came of that share is stored.
    """
    if kind == "run": folder = shutil.copytree(made, tmp_path/"gift")
    else:
        task = get_task("digits").replace(slots=("r0c0",))
        pop = new_population(task, FitConfig(lanes=2, epochs=1, workers=1), data=task.load("cpu", None, 64))
        run = begin_fit(pop, tmp_path, made={})
        for _ in run.epochs(): pass
        folder = run.folder.path
    chance, share = random.Random(0), float(os.environ.get("ESPER_NB_FUZZ", .03))
    chosen = [c for c in cases(folder, chance) if chance.random() < share]
    count, wrong = fuzz(folder, chosen, lambda case: chance.random() < .03)
    print(kind, dict(count), *wrong, sep="\n")
    if "ESPER_NB_FUZZ" in os.environ:
        found = json.loads(STORED.read_text()) if STORED.exists() else {}
        STORED.write_text(json.dumps(found | {kind: count | {"share": share}}, indent=1) + "\n")
    assert not wrong and not count["executed"]

def test_a_row_of_a_far_epoch_ends_the_panel_in_a_line(gift):
    "And not in as many empty steps."
    row = next(i for i, row in enumerate(read_rows(gift/"rows.jsonl")) if row["kind"] == "epoch")
    forge(gift, "rows.jsonl", row, ("epoch",), 2**62, False)
    assert "one that follows on epoch" in watched(gift)
    rewrite(gift/"config.json", lambda config: config["run"]["env"].update(num_envs=10**9))
    with pytest.raises(ValueError, match="as many as a panel can show"): watched(gift)

def test_a_checkpoint_that_counts_rows_without_end_is_told_of_at_once(gift):
    forge(gift, "checkpoint.safetensors", "tree", ("rows", "written"), 2**62, False)
    with pytest.warns(UserWarning, match=f"of the {2**62} rows"): run = opened(gift)
    assert run.written == len(read_rows(gift/"rows.jsonl"))

def test_settings_that_no_run_writes_are_a_line_or_passed_over(gift):
    rewrite(gift/"config.json", lambda config: config["run"].update(minutes=1e308))
    assert followed(gift)
    rewrite(gift/"config.json", lambda config: config["run"]["ppo"].pop("num_steps"))
    with pytest.raises(ValueError, match="not as a run writes it .KeyError: 'num_steps'"): watched(gift)
    rewrite(gift/"config.json", lambda config: config["run"]["ppo"].update(num_steps=2, num_updates=EVIL))
    with pytest.raises(ValueError, match="num_updates"): watched(gift)

def test_a_setting_that_is_gone_is_a_line_and_its_rows_are_shown(gift, tmp_path, capsys, without_pictures):
    rewrite(gift/"config.json", lambda config: config["run"]["ppo"].update(compile=""))
    for argv in (["resume", gift], ["export", gift, "--out", tmp_path/"n.pt2"]):
        assert main(list(map(str, argv))) == 2
        said = capsys.readouterr().err
        assert "PPOConfig has no setting 'compile'. Known: seed, " in said and len(said.splitlines()) == 1
    for command in ("report", "watch"): assert main([command, str(gift)]) == 0

def test_settings_that_are_not_the_checkpoints_build_nothing(gift):
    rewrite(gift/"config.json", lambda config: config["run"]["env"].update(num_envs=10**12))
    with pytest.raises(CheckpointError, match="run.env.num_envs: saved 2, here 1000000000000"): open_run(gift)

def values_of(text): return [json.loads(line) for line in text.splitlines()] if "\n{" in text else json.loads(text)

@pytest.mark.parametrize("name", ["rows.jsonl", "final.jsonl", "comparison.json"])
def test_a_changed_digit_is_noticed(gift, name, without_pictures):
    text = (gift/name).read_text()
    at = [m.start() for m in re.finditer(r"(?<=[\d.])\d", text)]
    for i in random.Random(0).sample(at, 10):
        changed = text[:i] + str((int(text[i]) + 1) % 10) + text[i + 1:]
        if values_of(changed) == values_of(text): continue # a digit behind what a float holds
        (gift/name).write_text(changed)
        with pytest.raises(ValueError, match=f"{name}.*digest"): report_html(RunFolder(gift))


# ---- folders

def test_a_folder_that_holds_runs_lists_them(made, tmp_path, capsys):
    run = shutil.copytree(made, tmp_path/"runs"/made.name)
    for command in ("report", "watch", "resume"):
        for above in (run.parent, tmp_path):
            assert main([command, str(above)]) == 2
            assert f"the runs in it: {run.relative_to(above).as_posix()}" in capsys.readouterr().err

def test_a_comparison_deletes_only_what_it_wrote_and_locks(tmp_path):
    config, mine = get_recipe("digits_impaired", TINY), tmp_path/"x.seeds"
    mine.mkdir()
    (mine/"thesis.txt").write_text("precious")
    with RepeatStore(mine, config) as store:
        store.write("seed-0", [1])
        with pytest.raises(RuntimeError, match="in use"), RepeatStore(mine, config): pass
        store.clear()
    assert [p.name for p in mine.iterdir()] == ["thesis.txt"]
    with RepeatStore(tmp_path/"y.seeds", config) as store: store.clear()
    assert not (tmp_path/"y.seeds").exists()

def test_a_disk_without_locks_has_leases(tmp_path, monkeypatch):
    def missing(*args): raise OSError(errno.ENOSYS, "Function not implemented")
    monkeypatch.setattr(files_module.fcntl, "flock", missing)
    with pytest.warns(UserWarning, match="a disk without locks"), FolderLock(tmp_path) as lock:
        assert lock.held
        with pytest.raises(RuntimeError, match="in use by process"): FolderLock(tmp_path).__enter__()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    owner = (tmp_path/"lease")
    owner.write_text(f"process {gone.pid} on {files_module.socket.gethostname()}, 7") # killed here: no need to wait
    with pytest.warns(UserWarning), FolderLock(tmp_path): pass
    assert not owner.exists()

def test_a_disk_that_is_full_from_the_start_ends_the_run(tmp_path, monkeypatch):
    run = begin_run(get_recipe("digits_impaired", TINY | {"ppo.num_updates": 9}), tmp_path)
    def full(*args, **kwargs): raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("esper_nb.record.checkpoints.save_checkpoint", full)
    with warnings.catch_warnings(action="ignore"), pytest.raises(OSError, match="none of its 3 checkpoints.*No space"):
        for _ in run.updates(): pass
    assert run.learner.update == 3


# ---- budget, and quick commands

def test_the_comparison_keeps_to_its_budget(tmp_path, monkeypatch):
    monkeypatch.setattr("esper_nb.run.runs.plot_learning", lambda rows: plt.figure())
    for share, names in ((0, ["PPO"]), (.5, ["PPO", "wait-only"]), (9, ["PPO", *simple_controllers()])):
        run = begin_run(get_recipe("digits_impaired", TINY | {"comparison": float(share)}), tmp_path)
        for _ in run.updates(): pass
        c = run.finish()
        assert c.names == names and bool(c.verdict()) == (share > 0)

@pytest.mark.slow
def test_report_and_watch_need_no_torch(made, tmp_path):
    code = """
import sys
from esper_nb.run.cli import main
assert main(["report", sys.argv[1], "--out", sys.argv[2]]) == main(["watch", sys.argv[1]]) == 0
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(made), str(tmp_path/"r.html")], check=True)

@pytest.mark.parametrize("argv", [["train", "digits", "--seed", "-1"], ["train", "digits", "--minutes", "1e308"],
                                  ["train", "digits", "--updates", "9" * 20], ["train", "digits", "--out", ""],
                                  ["train", "digits", "--data", "/none"], ["fit", "digits", "--data", "/none"]])
def test_a_mistake_is_a_line(argv, capsys):
    assert main(argv) == 2 and len(capsys.readouterr().err.splitlines()) == 1
