"Folders that came from elsewhere: code that is not run, values that are refused or shown as text, digits that changed."
import errno
import json
import random
import re
import shutil
import subprocess
import sys
import warnings

import matplotlib.pyplot as plt
import pytest

from esper_nb.record import CheckpointError, FolderLock, RunFolder, encode_row, read_rows
from esper_nb.record import files as files_module
from esper_nb.run import (
    RepeatStore, begin_run, check_trust, export_run, get_recipe, main, open_run, report_html, simple_controllers,
    watch_text)

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = {"env.num_envs": 2, "env.horizon": 2, "env.limit": 64, "env.slots": ["r0c0"], "ppo.num_steps": 2,
        "ppo.num_updates": 1, "ppo.num_minibatches": 1, "save_every": 1, "comparison": 1.}
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"
VALUES = (EVIL, 1e308, 10**30, -1, [], {}, {"a": {"b": [EVIL]}}, [[EVIL]], True, None, "x" * 5000, "../../etc",
          "$\\frac{$")


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

@pytest.mark.parametrize("named", ["plugin", "factory", "module"])
def test_code_that_a_folder_names_is_not_run(gift, tmp_path, capsys, named):
    mark, evil = tmp_path/"mark", tmp_path/"evil.py"
    evil.write_text(f"open({str(mark)!r}, 'w').close()")
    host = dict(factory="os:mkdir", kwargs=dict(path=str(mark)), shape=[1, 8, 8], classes=10)
    def change(config):
        if named == "factory": config["run"]["env"]["task"] = dict(name="x", data="digits", host=host)
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

def cases(folder):
    "Every change of a field or a name of every file: (file, line, path, value, whether it is the name)."
    for name in ("config.json", "comparison.json"):
        for path in places(json.loads((folder/name).read_text())):
            yield from ((name, 0, path, value, key) for value in VALUES for key in (False, True))
    for name in ("rows.jsonl", "final.jsonl"):
        kinds = {}
        for i, row in enumerate(read_rows(folder/name)): kinds.setdefault(row["kind"], (i, row))
        for i, row in kinds.values():
            yield from ((name, i, (k,), value, key) for k in row for value in VALUES for key in (False, True))

def forge(folder, name, line, path, value, as_key):
    "Write the change, with a digest that fits."
    if name.endswith(".jsonl"):
        rows = read_rows(folder/name)
        put(rows[line], path, value, as_key)
        return (folder/name).write_text("".join(encode_row(row) + "\n" for row in rows))
    found = json.loads((folder/name).read_text())
    put(found, path, value, as_key)
    if name == "comparison.json":
        found.pop("digest", None)
        files_module.write_json(folder/name, found)
    else: (folder/name).write_text(json.dumps(found))

def outcome(folder):
    "What report and watch make of a folder: refused, or shown as text."
    kinds = []
    for read in (lambda: report_html(RunFolder(folder)), lambda: watch_text(folder, say=lambda text: None)):
        try: page = read()
        except (ValueError, OSError) as e:
            assert len(str(e)) < 20_000
            kinds.append("refused")
            continue
        kinds.append("escaped")
        if page is None: continue
        assert "<script" not in page and "<img src=x" not in page, "injected"
        assert "default-src 'none'" in page
    return kinds

@pytest.fixture
def without_pictures(monkeypatch): monkeypatch.setattr("esper_nb.run.report.picture_html", lambda draw, alt: "")

def test_some_forged_values_are_refused_or_text(made, tmp_path, without_pictures):
    chosen = random.Random(0).sample(list(cases(made)), 120)
    for i, case in enumerate(chosen):
        folder = shutil.copytree(made, tmp_path/str(i))
        forge(folder, *case)
        outcome(folder)

@pytest.mark.slow
def test_every_forged_value_is_refused_or_text(made, tmp_path, without_pictures):
    count = dict(values=0, refused=0, escaped=0)
    for case in cases(made):
        folder = shutil.copytree(made, tmp_path/"gift")
        forge(folder, *case)
        for kind in outcome(folder): count[kind] += 1
        count["values"] += 1
        shutil.rmtree(folder)
    print(count, "injected 0, executed 0")

@pytest.mark.slow
def test_forged_settings_end_a_resume_and_an_export_in_a_line(made, tmp_path):
    chosen = [c for c in cases(made) if c[0] == "config.json"]
    for i, case in enumerate(random.Random(1).sample(chosen, 200)):
        folder = shutil.copytree(made, tmp_path/str(i))
        forge(folder, *case)
        for act in (lambda: open_run(folder), lambda: export_run(folder, tmp_path/"n.pt2")):
            try: act()
            except (ValueError, RuntimeError, OSError): pass

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

def test_a_folder_that_holds_runs_lists_them(made, capsys):
    for command in ("report", "watch", "resume"):
        assert main([command, str(made.parent)]) == 2 and f"the runs in it: {made.name}" in capsys.readouterr().err

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
    monkeypatch.setattr("esper_nb.record.resumable.save_checkpoint", full)
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
        assert c.names == names and c.verdict().startswith("Growing ") == (share > 0)

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
