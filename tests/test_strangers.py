"Folders that came from elsewhere: code that is not run, values that are refused or shown as text, digits that changed."
import errno
import json
import os
import random
import re
import shutil
import subprocess
import sys
import warnings

import matplotlib.pyplot as plt
import pytest

from benchmarks.strangers_bench import (
    EVIL, MADE, RIGHT, TINY, cases, followed, forge, fuzz, make_run, mark_of, opened, watched)
from esper_nb.core import FolderLock
from esper_nb.record import CheckpointError, RunFolder, read_rows
from esper_nb.core import files as files_module
from esper_nb.run import plugins
from esper_nb.run import (
    RepeatStore, begin_run, check_trust, get_recipe, main, open_run, report_html, simple_controllers)

pytestmark = pytest.mark.usefixtures("one_thread", "no_pictures")


@pytest.fixture(scope="module")
def made(tmp_path_factory): return make_run(tmp_path_factory.mktemp("runs"))

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

def spread(found, chance, values):
    "Draw values of as many different fields as there are; places of a list are one field."
    def field(case): return *case[:2], *(("*" if isinstance(k, int) else k) for k in case[2])
    chance.shuffle(found)
    return [*{field(case): case for case in found}.values()][:values]

@pytest.mark.parametrize("kind, values", [("run", 60), pytest.param("run", 600, marks=pytest.mark.slow),
                                          pytest.param("fit", 300, marks=pytest.mark.slow)])
def test_some_forged_values_are_refused_or_text(tmp_path, kind, values):
    "`python -m benchmarks.strangers_bench` forges all."
    folder, chance = MADE[kind](tmp_path), random.Random(0)
    chosen = spread(list(cases(folder, chance)), chance, values)
    assert len(chosen) == values
    wrong = [found for found in fuzz(folder, chosen, every=33) if not set(RIGHT).issuperset(found[1])]
    assert not wrong and not mark_of(folder).exists()

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

def test_a_setting_that_is_gone_is_a_line_and_its_rows_are_shown(gift, tmp_path, capsys):
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
def test_a_changed_digit_is_noticed(gift, name):
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
    for name in ("thesis.txt", "seed-0.json"): (mine/name).write_text("precious")
    RepeatStore(mine, config.replace(sampled=True)).write("seed-0", [2]) # another comparison, which was interrupted
    theirs = {p.name: p.read_text() for p in mine.iterdir()}
    with RepeatStore(mine, config) as store:
        store.write("seed-0", [1])
        with pytest.raises(RuntimeError, match="in use"), RepeatStore(mine, config): pass
        store.clear()
    assert {p.name: p.read_text() for p in mine.iterdir()} == theirs and len(theirs) == 3
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

@pytest.mark.parametrize("name", ["lock", "lease"])
def test_a_file_that_only_has_the_name_of_a_lock_stays_as_it_is(name, tmp_path, monkeypatch):
    def missing(*args): raise OSError(errno.ENOSYS, "Function not implemented")
    if name == "lease": monkeypatch.setattr(files_module.fcntl, "flock", missing)
    mine = tmp_path/name
    mine.write_bytes(b"precious \xff")
    os.utime(mine, (0, 0)) # old enough for a lease that has ended
    with pytest.raises(RuntimeError, match=f"{name} is no lock of a run.*move it"), FolderLock(tmp_path): pass
    assert mine.read_bytes() == b"precious \xff"

def test_a_disk_that_is_full_from_the_start_ends_the_run(tmp_path, monkeypatch):
    run = begin_run(get_recipe("digits_impaired", TINY | {"ppo.num_updates": 9}), tmp_path)
    def full(*args, **kwargs): raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("esper_nb.record.checkpoints.save_checkpoint", full)
    with warnings.catch_warnings(action="ignore"), pytest.raises(OSError, match="none of its 3 checkpoints.*No space"):
        for _ in run.updates(): pass
    assert run.learner.update == 3


# ---- budget, and quick commands

def test_the_comparison_keeps_to_its_budget(tmp_path, monkeypatch):
    monkeypatch.setattr("esper_nb.run.runs.plot_controller", lambda *given: plt.figure())
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
