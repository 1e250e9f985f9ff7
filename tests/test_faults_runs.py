"Runs, command line, rows: what used to break them, from slips in an option to disks, signals and second processes."
import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from esper_nb.bench import fault_bench
from esper_nb.control.rules import HeuristicConfig
from esper_nb.core.config import parse_settings
from esper_nb.learn.loss import PPOConfig
from esper_nb.learn.policies import PolicyConfig
from esper_nb.record import files
from esper_nb.record.checkpoints import read_checkpoint, save_checkpoint
from esper_nb.record.files import FolderLock, new_file
from esper_nb.record.folders import RunFolder, new_run
from esper_nb.record.rows import encode_row
from esper_nb.record.writers import JSONLWriter, read_rows
from esper_nb.run import cli, runs
from esper_nb.run.cli import main
from esper_nb.run.recipes import RunConfig, get_recipe
from esper_nb.run.runs import begin_run, drive_run, finish_run, open_run, run_updates

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = ("env.num_envs=2", "env.horizon=4", "env.limit=128", "ppo.num_steps=4", "ppo.num_minibatches=2",
            "ppo.update_epochs=2", "save_every=1", "env.workers=1")
SMALL = [word for setting in SETTINGS for word in ("--set", setting)]
RECIPE = get_recipe("digits_impaired", parse_settings(SETTINGS, RunConfig) | {"ppo.num_updates": 3})


def timeless(rows):
    "Rows without the clock, as text: there NaN is equal to itself."
    return [encode_row({k: v for k, v in r.items() if not k.endswith("seconds")}) for r in rows]

def weights(run): return {k: t.clone() for k, t in run.learner.policy.state_dict().items()}

def same(a, b):
    return timeless(a.folder.rows()) == timeless(b.folder.rows()) and \
        all(torch.equal(x, y) for x, y in zip(weights(a).values(), weights(b).values(), strict=True))

@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "A run that nothing happened to."
    run = begin_run(RECIPE, tmp_path_factory.mktemp("whole"))
    for _ in run_updates(run): pass
    return run

@pytest.fixture
def short(tmp_path):
    "A run of one update of three."
    run = begin_run(RECIPE, tmp_path/"runs")
    for _ in run_updates(run): break
    return run


# --- going on

@pytest.mark.parametrize("edge", [6, 7, 8, 14])
def test_an_interrupt_inside_an_update_is_gone_on_with_exactly(whole, tmp_path, monkeypatch, stop_at, edge):
    "Four steps in the environments, four minibatches, and so on: these edges lie among the minibatches."
    run = begin_run(RECIPE, tmp_path)
    stop_at(run.learner, edge)
    assert drive_run(run, progress=False) is None
    resumed = open_run(run.folder.path)
    assert resumed.learner.gradient_step > 0 or edge % 8 == 0
    monkeypatch.setattr(runs, "finish_run", lambda run: None)
    monkeypatch.setattr(runs, "comparison_text", lambda result: "")
    monkeypatch.setattr(runs, "summary_text", lambda run, result: "")
    drive_run(resumed, progress=False)
    assert same(resumed, whole)

@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_process_that_is_told_to_end_saves_first(whole, tmp_path, number):
    run, calls = begin_run(RECIPE, tmp_path), 0
    step = run.learner.step_envs
    def told():
        nonlocal calls
        calls += 1
        if calls == 7: signal.raise_signal(number)
        return step()
    run.learner.step_envs = told
    with pytest.raises(SystemExit) as left: list(run_updates(run))
    assert left.value.code == 128 + number
    resumed = open_run(run.folder.path)
    assert resumed.steps == 7, "the step that was begun is finished, and saved"
    list(run_updates(resumed))
    assert same(resumed, whole)

def test_a_signal_that_is_ignored_stays_ignored(short):
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN) # as nohup does
    try:
        resumed = open_run(short.folder.path)
        for u in run_updates(resumed):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            signal.raise_signal(signal.SIGHUP)
    finally: signal.signal(signal.SIGHUP, old)
    assert u.update == 3


# --- one process in a folder

HOLDER = """
import sys, time
from esper_nb.record.files import FolderLock
with FolderLock(sys.argv[1]): print("mine", flush=True); time.sleep(60)
"""

@pytest.fixture
def holder(short):
    "Another process that holds the run's folder."
    command = [sys.executable, "-c", HOLDER, str(short.folder.path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "mine\n"
    yield process
    process.kill()
    process.wait()

def test_a_second_process_is_refused_and_told_who_is_there(short, holder, capsys):
    before = {p.name: p.read_bytes() for p in short.folder.path.iterdir() if p.name != "lock"}
    assert main(["resume", str(short.folder.path)]) == 2
    assert f"is in use by process {holder.pid} on " in capsys.readouterr().err
    with pytest.raises(RuntimeError, match=f"process {holder.pid}"): next(run_updates(short))
    with pytest.raises(RuntimeError, match=f"process {holder.pid}"): finish_run(short)
    after = {p.name: p.read_bytes() for p in short.folder.path.iterdir() if p.name != "lock"}
    assert after == before, "nothing was touched"

def test_a_lock_ends_with_its_process(short, holder):
    holder.kill() # -9: it cannot tidy up
    holder.wait()
    assert (short.folder.path/"lock").exists()
    assert [u.update for u in run_updates(open_run(short.folder.path))] == [2, 3]
    assert not (short.folder.path/"lock").exists()

def test_a_folder_that_another_process_has_gone_on_with_is_opened_anew(short):
    list(run_updates(open_run(short.folder.path)))
    with pytest.raises(ValueError, match="open it again"): next(run_updates(short))

def test_one_of_many_gets_the_lock(tmp_path):
    taken = []
    for _ in range(20):
        with FolderLock(tmp_path):
            for _ in range(3):
                with pytest.raises(RuntimeError): FolderLock(tmp_path).__enter__()
            taken.append(1)
    assert len(taken) == 20 and not list(tmp_path.iterdir())


# --- rows and disks

class SmallDisk:
    "A file on a disk that has room for so many bytes; then it is full."
    def __init__(self, file, room): self.file, self.room = file, room
    def __getattr__(self, name): return getattr(self.file, name)
    def write(self, data):
        if not self.room: raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = self.file.write(bytes(data[:self.room]))
        self.room -= part
        return part

@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_rows_that_are_gone_before_a_resume_are_told_of(whole, short, damage, capsys):
    path = short.folder.rows_path
    count, lines = len(short.folder.rows()), path.read_bytes().splitlines(keepends=True)
    if damage == "missing": path.unlink()
    else: path.write_bytes(b"".join(lines[:5]))
    kept = 0 if damage == "missing" else 5
    with pytest.warns(UserWarning, match=f"holds {kept} of the {count} rows"): resumed = open_run(short.folder.path)
    list(run_updates(resumed))
    assert all(torch.equal(a, b) for a, b in zip(weights(resumed).values(), weights(whole).values()))
    rows = resumed.folder.rows()
    assert resumed.written == len(rows) == len(open_run(resumed.folder.path).folder.rows())
    def later(rows): return timeless(r for r in rows if r.get("update", 0) > 1 and r["kind"] != "alarm")
    assert later(rows) == later(whole.folder.rows()), "all but alarms, which look back"

def test_a_disk_that_is_full_for_a_while_leaves_no_gap(whole, tmp_path, monkeypatch):
    disk, opened = [], JSONLWriter.__init__
    def small(self, path):
        opened(self, path)
        self.file = SmallDisk(self.file, 3000)
        disk.append(self.file)
    monkeypatch.setattr(JSONLWriter, "__init__", small)
    run = begin_run(RECIPE, tmp_path)
    with pytest.warns() as warned:
        for u in run_updates(run):
            if u.update == 1: assert not run.checkpoint.exists(), "it would know of rows that are not there"
            if u.update == 2: disk[0].room = 10**9
    texts = " ".join(str(w.message) for w in warned)
    assert "No space left on device" in texts and "update 1 has no checkpoint" in texts and str(tmp_path) in texts
    assert same(run, whole) and same(open_run(run.folder.path), whole)

def test_a_disk_that_stays_full_ends_in_one_line_and_damages_nothing(tmp_path, monkeypatch, capsys):
    opened = JSONLWriter.__init__
    def small(self, path):
        opened(self, path)
        self.file = SmallDisk(self.file, 3000)
    with monkeypatch.context() as m:
        m.setattr(JSONLWriter, "__init__", small)
        argv = ["train", "digits_impaired", "--updates", "2", *SMALL, "--out", str(tmp_path), "--quiet"]
        assert main(argv) == 1
    said = capsys.readouterr().err
    assert "rows could not be written" in said and "Traceback" not in said and "No space left on device" in said
    resumed = open_run(tmp_path/"digits_impaired") # there is no checkpoint: from the beginning
    assert len(list(run_updates(resumed))) == 2

def test_a_checkpoint_that_finds_no_room_is_tried_again(whole, tmp_path, monkeypatch):
    run, full = begin_run(RECIPE, tmp_path), True
    saved = files.save_file
    def save_file(*args):
        if full: raise files.SafetensorError("Error while serializing: I/O error: No space left on device")
        return saved(*args)
    monkeypatch.setattr(files, "save_file", save_file)
    with pytest.warns(UserWarning, match="update 1 has no checkpoint .*No space left on device"):
        for u in run_updates(run): full = u.update < 2
    assert same(open_run(run.folder.path), whole)
    names = ["checkpoint.safetensors", "checkpoint.safetensors.previous", "config.json", "rows.jsonl"]
    assert sorted(p.name for p in run.folder.path.iterdir()) == names

@pytest.mark.parametrize("what", ["renamed", "deleted", "replaced"])
def test_a_folder_that_goes_away_is_not_made_again(tmp_path, what):
    run = begin_run(RECIPE, tmp_path/"runs")
    path, moved = run.folder.path, tmp_path/"moved"
    with pytest.raises(OSError, match="was moved or deleted while the run went on"):
        for _ in run_updates(run):
            path.rename(moved)
            if what == "replaced": new_run(tmp_path/"runs", path.name)
            if what == "deleted":
                for p in moved.iterdir(): p.unlink()
                moved.rmdir()
    if what == "renamed":
        assert not path.exists()
        assert [u.update for u in run_updates(open_run(moved))] == [2, 3], "what was saved went with it"
    if what == "deleted": assert not path.exists() and not moved.exists()
    if what == "replaced": assert [p.name for p in path.iterdir()] == ["config.json"]

def test_a_file_of_rows_that_is_deleted_while_it_is_written_is_noticed(tmp_path):
    run = begin_run(RECIPE, tmp_path)
    with pytest.warns(), pytest.raises(OSError, match="rows could not be written.*rows.jsonl"):
        for _ in run_updates(run): run.folder.rows_path.unlink(missing_ok=True)

LIMITED = "ulimit -f {}; exec {} -c 'import sys; from esper_nb.run.cli import main; sys.exit(main(sys.argv[1:]))' \"$@\""

@pytest.mark.skipif(os.name == "nt", reason="needs ulimit")
@pytest.mark.parametrize("argv", [("train", "digits_impaired", "--updates", "1", *SMALL),
                                  ("fit", "digits", "--set", "lanes=2", "--set", "epochs=1")], ids=["train", "fit"])
def test_a_limit_of_file_sizes_is_one_line(tmp_path, argv):
    command = ["bash", "-c", LIMITED.format(8, sys.executable), "x", *argv, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr and "esper-nb: " in done.stderr
    assert "File too large" in done.stderr

def test_places_that_cannot_be_written_are_found_before_any_work(tmp_path, monkeypatch, capsys):
    (tmp_path/"file").touch()
    (tmp_path/"gone").symlink_to(tmp_path/"nowhere")
    for place in ("file", "file/deeper", "gone", "gone/deeper"):
        for argv in (("train", "digits", *SMALL), ("fit", "digits", "--set", "lanes=2")):
            assert main([*argv, "--out", str(tmp_path/place)]) == 1
            assert "is no folder" in capsys.readouterr().err
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    for argv in (("train", "digits", *SMALL, "--out", str(tmp_path/"x")), ("compare", "digits", "--out", f"{tmp_path}/x.json"),
                 ("bench", "--out", f"{tmp_path}/x.json")):
        assert main([*argv]) == 1
        assert "read-only" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "gone"]

def test_no_folder_is_left_where_its_settings_found_no_room(tmp_path, monkeypatch):
    def full(self, *args, **kwargs): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"): new_run(tmp_path/"runs", "digits", {"a": 1})
    assert list((tmp_path/"runs").iterdir()) == []

def test_a_result_that_finds_no_room_leaves_the_old_one(short, monkeypatch):
    list(run_updates(open_run(short.folder.path)))
    run = open_run(short.folder.path)
    finish_run(run)
    before = {p.name: p.read_bytes() for p in run.folder.path.iterdir()}
    def full(*args): raise files.SafetensorError("No space left on device")
    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(OSError, match="controller.safetensors could not be written: No space left"): finish_run(run)
    after = {p.name: p.read_bytes() for p in run.folder.path.iterdir()}
    assert after.keys() == before.keys() and after["controller.safetensors"] == before["controller.safetensors"]
