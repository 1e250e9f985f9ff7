"Runs, command line, rows: what used to break them, from slips in an option to disks, signals and second processes."
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gymnasium.vector import AutoresetMode
from tiny import timeless

import esper_nb.run
from esper_nb.control import EnvConfig, Heuristic, Signals, View
from esper_nb.core import parse_settings
from esper_nb.grow import SeedState, Stage
from esper_nb.record import JSONLWriter, checkpoints, new_run, read_checkpoint, save_checkpoint
from esper_nb.run import FitRun, Run, RunConfig, begin_run, get_recipe, main, open_run
from esper_nb.train import Fault

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = ("env.num_envs=2", "env.horizon=4", "env.limit=128", "ppo.num_steps=4", "ppo.num_minibatches=2",
            "ppo.update_epochs=2", "save_every=1", "env.workers=1", 'env.blueprints=["conv_light"]')
SMALL = [word for setting in SETTINGS for word in ("--set", setting)]
RECIPE = get_recipe("digits_impaired", parse_settings(SETTINGS, RunConfig) | {"ppo.num_updates": 3})


def weights(run): return {k: t.clone() for k, t in run.learner.policy.state_dict().items()}

def same(a, b):
    return timeless(a.folder.rows()) == timeless(b.folder.rows()) and \
        all(torch.equal(x, y) for x, y in zip(weights(a).values(), weights(b).values(), strict=True))

@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "A run that nothing happened to."
    run = begin_run(RECIPE, tmp_path_factory.mktemp("whole"))
    for _ in run.updates(): pass
    return run

@pytest.fixture
def short(tmp_path, no_pictures):
    "A run of one update of three."
    run = begin_run(RECIPE, tmp_path/"runs")
    for _ in run.updates(): break
    return run


# --- going on

@pytest.mark.costly
@pytest.mark.parametrize("edge", [6, 7, 8, 14])
def test_an_interrupt_inside_an_update_is_gone_on_with_exactly(whole, tmp_path, no_plays, stop_at, edge):
    "Four steps in the environments, four minibatches, and so on: these edges lie among the minibatches."
    run = begin_run(RECIPE, tmp_path)
    stop_at(run.learner, edge)
    assert run.drive(progress=False) is None
    resumed = open_run(run.folder.path)
    assert resumed.learner.progress.gradient_step > 0 or edge % 8 == 0
    resumed.drive(progress=False)
    assert same(resumed, whole)

@pytest.mark.costly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_process_that_is_told_to_end_saves_first(whole, tmp_path, number, plain_signals):
    run, calls = begin_run(RECIPE, tmp_path), 0
    step = run.learner.step_envs
    def other():
        nonlocal calls
        calls += 1
        if calls == 7: signal.raise_signal(number)
        return step()
    run.learner.step_envs = other
    with pytest.raises(SystemExit) as left: list(run.updates())
    assert left.value.code == 128 + number
    resumed = open_run(run.folder.path)
    assert resumed.steps == 7, "the step that was begun is finished, and saved"
    list(resumed.updates())
    assert same(resumed, whole)

def test_a_signal_that_is_ignored_stays_ignored(short):
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN) # as nohup does
    try:
        resumed = open_run(short.folder.path)
        for u in resumed.updates():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            signal.raise_signal(signal.SIGHUP)
    finally: signal.signal(signal.SIGHUP, old)
    assert u.update == 3


# --- one process in a folder

HOLDER = """
import sys, time
from esper_nb.core.files import FolderLock
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
    with pytest.raises(RuntimeError, match=f"process {holder.pid}"): next(short.updates())
    with pytest.raises(RuntimeError, match=f"process {holder.pid}"): short.finish()
    after = {p.name: p.read_bytes() for p in short.folder.path.iterdir() if p.name != "lock"}
    assert after == before, "nothing was touched"

def test_a_lock_ends_with_its_process(short, holder):
    holder.kill() # -9: it cannot tidy up
    holder.wait()
    assert (short.folder.path/"lock").exists()
    assert [u.update for u in open_run(short.folder.path).updates()] == [2, 3]
    assert not (short.folder.path/"lock").exists()

def test_a_folder_that_another_process_has_gone_on_with_is_opened_anew(short):
    list(open_run(short.folder.path).updates())
    with pytest.raises(ValueError, match="open it again"): next(short.updates())


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

@pytest.mark.costly
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_rows_that_are_gone_before_a_resume_are_told_of(whole, short, damage, capsys):
    path = short.folder.rows_path
    count, lines = len(short.folder.rows()), path.read_bytes().splitlines(keepends=True)
    if damage == "missing": path.unlink()
    else: path.write_bytes(b"".join(lines[:5]))
    kept = 0 if damage == "missing" else 5
    with pytest.warns(UserWarning, match=f"holds {kept} of the {count} rows"): resumed = open_run(short.folder.path)
    list(resumed.updates())
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
        for u in run.updates():
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
    assert len(list(resumed.updates())) == 2

def test_a_checkpoint_that_finds_no_room_is_tried_again(whole, tmp_path, monkeypatch):
    run, full = begin_run(RECIPE, tmp_path), True
    saved = checkpoints.save_file
    def save_file(*args):
        if full: raise checkpoints.SafetensorError("Error while serializing: I/O error: No space left on device")
        return saved(*args)
    monkeypatch.setattr(checkpoints, "save_file", save_file)
    with pytest.warns(UserWarning, match="update 1 has no checkpoint .*No space left on device"):
        for u in run.updates(): full = u.update < 2
    assert same(open_run(run.folder.path), whole)
    names = ["checkpoint.safetensors", "checkpoint.safetensors.previous", "config.json", "rows.jsonl"]
    assert sorted(p.name for p in run.folder.path.iterdir()) == names

@pytest.mark.parametrize("what", ["renamed", "deleted", "replaced"])
def test_a_folder_that_goes_away_is_not_made_again(tmp_path, what):
    run = begin_run(RECIPE, tmp_path/"runs")
    path, moved = run.folder.path, tmp_path/"moved"
    with pytest.raises(OSError, match="was moved or deleted while the run went on"):
        for _ in run.updates():
            path.rename(moved)
            if what == "replaced": new_run(tmp_path/"runs", path.name)
            if what == "deleted":
                for p in moved.iterdir(): p.unlink()
                moved.rmdir()
    if what == "renamed":
        assert not path.exists()
        assert [u.update for u in open_run(moved).updates()] == [2, 3], "what was saved went with it"
    if what == "deleted": assert not path.exists() and not moved.exists()
    if what == "replaced": assert [p.name for p in path.iterdir()] == ["config.json"]

def test_a_file_of_rows_that_is_deleted_while_it_is_written_is_noticed(tmp_path):
    run = begin_run(RECIPE, tmp_path)
    with pytest.warns(), pytest.raises(OSError, match="rows could not be written.*rows.jsonl"):
        for _ in run.updates(): run.folder.rows_path.unlink(missing_ok=True)

LIMITED = """ulimit -f {}
exec {} -c 'import sys; from esper_nb.run.cli import main; sys.exit(main(sys.argv[1:]))' "$@" """

@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs ulimit")
@pytest.mark.parametrize("argv", [("train", "digits_impaired", "--updates", "1", *SMALL),
                                  ("fit", "digits", "--set", "lanes=2", "--set", "epochs=1")], ids=["train", "fit"])
def test_a_limit_of_file_sizes_is_one_line(tmp_path, argv):
    command = ["bash", "-c", LIMITED.format(8, sys.executable), "x", *argv, "--out", str(tmp_path)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr and "esper-nb: " in done.stderr
    assert "File too large" in done.stderr

def test_places_that_cannot_be_written_are_found_before_any_work(tmp_path, monkeypatch, capsys):
    (tmp_path/"file").touch()
    (tmp_path/"gone").symlink_to(tmp_path/"nowhere")
    for place in ("file", "file/deeper", "gone", "gone/deeper"):
        for argv in (("train", "digits", *SMALL), ("fit", "digits", "--set", "lanes=2")):
            assert main([*argv, "--out", str(tmp_path/place)]) == 1
            said = capsys.readouterr().err
            assert "is no folder" in said or "cannot be made (" in said
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    for argv, name in ((("train", "digits", *SMALL), "x"), (("compare", "digits"), "x.json")):
        assert main([*argv, "--out", str(tmp_path/name)]) == 1
        assert "read-only" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "gone"]

def test_no_folder_is_left_where_its_settings_found_no_room(tmp_path, monkeypatch):
    def full(self, *args, **kwargs): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"): new_run(tmp_path/"runs", "digits", {"a": 1})
    assert list((tmp_path/"runs").iterdir()) == []

def test_a_result_that_finds_no_room_leaves_the_old_one(short, monkeypatch):
    list(open_run(short.folder.path).updates())
    run = open_run(short.folder.path)
    run.finish()
    before = {p.name: p.read_bytes() for p in run.folder.path.iterdir()}
    def full(*args): raise checkpoints.SafetensorError("No space left on device")
    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(OSError, match="controller.safetensors could not be written: No space left"): run.finish()
    after = {p.name: p.read_bytes() for p in run.folder.path.iterdir()}
    assert after.keys() == before.keys() and after["controller.safetensors"] == before["controller.safetensors"]


# --- links in a folder that came from elsewhere

REPLACED = ("final.jsonl", "comparison.json", "controller.safetensors", "run.png", "report.html", "config.json",
            "checkpoint.safetensors", "checkpoint.safetensors.previous")
BEFORE = (".config.json.writing", ".checkpoint.safetensors.writing", ".report.html.writing", ".run.png.writing")

@pytest.mark.parametrize("names", [["rows.jsonl"], ["lock"], BEFORE, REPLACED], ids=" ".join)
def test_nothing_is_written_through_a_link(short, tmp_path, names):
    outside = tmp_path/"outside"
    outside.mkdir()
    for name in names:
        path, target = short.folder.path/name, outside/name
        if name in BEFORE:
            target.mkdir()
            (target/"precious").write_text("mine")
        elif path.exists(): path.replace(target)
        else: target.write_text("mine")
        path.symlink_to(target)
    def content(): return {p: p.read_bytes() for p in outside.rglob("*") if p.is_file()}
    before = content()
    refused = main(["resume", str(short.folder.path), "--updates", "2", "--quiet"])
    main(["report", str(short.folder.path)])
    assert content() == before and len(before) == len(names)
    in_place = names in (["rows.jsonl"], ["lock"])
    assert refused == (1 if in_place else 0), "only what is opened where it is has to be refused"


# --- small ones

@pytest.mark.slow
def test_all_files_have_the_mode_that_the_mask_says(short):
    old = os.umask(0o027)
    try:
        assert main(["resume", str(short.folder.path), "--updates", "2", "--quiet"]) == 0
        assert main(["report", str(short.folder.path)]) == 0
    finally: os.umask(old)
    modes = {p.name: oct(p.stat().st_mode & 0o777) for p in short.folder.path.iterdir()}
    made_before = {"rows.jsonl": "0o644", "checkpoint.safetensors.previous": modes["checkpoint.safetensors.previous"]}
    assert modes == dict.fromkeys(modes, "0o640") | made_before

def test_a_mode_is_alike_for_a_checkpoint_and_a_plain_file(tmp_path):
    save_checkpoint(tmp_path/"c", a=[1])
    (tmp_path/"plain").touch()
    assert (tmp_path/"c").stat().st_mode == (tmp_path/"plain").stat().st_mode
    assert read_checkpoint(tmp_path/"c")[0] == {"a": {"value": [1]}} or read_checkpoint(tmp_path/"c")

forged = {
    "config.json": ["", "{", "[1]", "3", '{"run": 3}', '{"run": [1]}', '{"task": "x"}', '{"run": null}', "\x00"],
    "comparison.json": ["", "{", "[]", '{"plays": 3}', '{"plays": [{}]}',
                        '{"task": 1, "lanes": 2, "horizon": 3, "plays": []}',
                        '{"task": "x", "lanes": 1, "horizon": 1, "plays": [], "more": 1}'],
    "rows.jsonl": ["{\n", "[1]\n", "{}\n", '{"kind": 3}\n', '{"kind": "update"}\n',
                   '{"kind": "update", "lane": null}\n',
                   '{"kind": "alarm", "lane": 0}\n', '{"kind": "step", "lane": "x"}\n', '{"kind": "test", "lane": 0}\n',
                   '{"kind": "epoch", "lane": 0}\n', '{"kind": "update", "lane": 0, "nonfinite": 3}\n',
                   '{"kind": "update", "lane": null, "update": "x", "update.return_mean": "y"}\n'],
    "final.jsonl": ["{\n", "[1]\n", "{}\n", '{"kind": "slot"}\n', '{"kind": "slot", "lane": 0}\n',
                    '{"kind": "step", "lane": 0}\n', '{"kind": "epoch", "lane": 0, "epoch": "x"}\n']}

@pytest.mark.parametrize("name, text", [(k, text) for k, texts in forged.items() for text in texts])
def test_a_forged_file_is_one_line_that_names_it(tmp_path, monkeypatch, capsys, name, text):
    monkeypatch.setattr(Run, "drive", lambda run, progress, more: run)
    folder = tmp_path/"digits"
    folder.mkdir()
    (folder/"config.json").write_text(json.dumps(dict(run=get_recipe("digits").to_dict())))
    (folder/name).write_text(text)
    for command in ("report", "resume")[:1 + (name == "config.json")]:
        status, said = main([command, str(folder)]), capsys.readouterr().err
        assert status in (0, 1, 2) and "Traceback" not in said and said.count("\n") <= 1
        if status and command == "report": assert name in said, said
    assert not (folder/"report.html").exists() or "<html" in (folder/"report.html").read_text()

@pytest.mark.slow
def test_another_torch_is_told_of(short, capsys):
    config = json.loads(short.folder.config_path.read_text())
    short.folder.config_path.write_text(json.dumps(config | dict(torch="1.0")))
    assert main(["resume", str(short.folder.path), "--updates", "2", "--quiet"]) == 0
    said = capsys.readouterr().err
    assert f"was trained with torch 1.0, here is {torch.__version__}" in said and "warnings.warn" not in said
    with pytest.warns(UserWarning, match="torch 1.0"): open_run(short.folder.path)

def test_a_fault_that_can_never_come_is_refused(tmp_path, capsys):
    argv = ["train", "digits_impaired", "--updates", "1", *SMALL, "--inject", "nan:0:4", "--out", str(tmp_path)]
    assert main(argv) == 2
    assert "an epoch below 4" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_enumerations_and_lists_are_taken_for_what_they_stand_for():
    settings = dict(autoreset_mode=AutoresetMode.SAME_STEP, faults=[Fault("nan"), dict(kind="nan", lane=1)], lr=1)
    c = EnvConfig.from_dict(settings)
    assert c.autoreset_mode == "SameStep" and c.faults == (Fault("nan"), Fault("nan", 1)) and c.lr == 1


# --- what a target has to be

targets = [("compare", "{}/x.png", "a name that ends in .json"), ("compare", "{}/x", "a name that ends in .json"),
           ("compare", "{}", "not a folder"), ("compare", "{}/none/x.json", "is no folder"),
           ("compare", "{}/file/x.json", "is no folder"),
           ("report", "{}/x.png", "a name that ends in .html"), ("report", "{}", "not a folder"),
           ("report", "{}/none/x.html", "is no folder"), ("report", "{}/x.json", "a name that ends in .html"),
           ("compare", "{}/taken.json", "not a folder")]

@pytest.mark.parametrize("command, out, says", targets)
def test_a_target_is_looked_at_before_the_work(tmp_path, monkeypatch, capsys, command, out, says):
    (tmp_path/"file").touch()
    (tmp_path/"taken.png").mkdir()
    run = new_run(tmp_path, "digits", get_recipe("digits").to_dict() and {"run": get_recipe("digits").to_dict()})
    def work(*args, **kwargs): raise AssertionError("the work has begun")
    monkeypatch.setattr(esper_nb.run, "compare_recipe", work)
    monkeypatch.setattr("esper_nb.run.report.report_html", work)
    what = dict(compare=["digits"], report=[str(run.path)])[command]
    argv = [command, *what, "--out", out.format(tmp_path)]
    assert main(argv) in (1, 2)
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1

def test_a_comparison_is_shown_even_if_it_cannot_be_kept(tmp_path, monkeypatch, capsys):
    from esper_nb.run.comparison import Comparison, PlayResult
    play = PlayResult("PPO", 0, (50.,), (50.,), (1.,), (4,), (0,), (0,), (9,), {}, 0, 1.)
    monkeypatch.setattr(esper_nb.run, "compare_recipe", lambda *args, **kwargs: Comparison("digits", 1, 4, (play,)))
    def full(self, *args, **kwargs): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
    monkeypatch.setattr(Path, "write_text", full)
    assert main(["compare", "digits", "--out", str(tmp_path/"c.json")]) == 1
    said = capsys.readouterr()
    assert "50.0" in said.out and "No space left on device" in said.err and "Traceback" not in said.err


# --- two hundred slips

def each(names, values): return [f"{k}={v}" for k in names.split() for v in values]
def of(part, texts): return [f"{part}.{text}" for text in texts.split()]

NUMBERS = ["abc", "", "none", "nan", "[1]", "{}", "true", "1,2", "-", "0x10", "1e", "½"]
wrong_settings = [
    *each("env.num_envs ppo.num_steps policy.hidden save_every seed", [*NUMBERS, "2.5", "1e3"]),
    *each("ppo.clip_coef ppo.learning_rate ppo.max_grad_norm", [*NUMBERS, "-1", "0"]),
    *each("sampled ppo.norm_obs env.synthetic", ["maybe", "1", "0", "yes", "", "none", "[]"]),
    *of("ppo", """gamma=1.5 gamma=inf gae_lambda=-1 ent_coef=nan ent_coef=inf vf_coef=-1 seed=3 norm_adv=all ratio=both
        target_kl=0 target_kl=-1 update_epochs=0 num_minibatches=0 num_minibatches=9999 ent_floor=2 ent_floor=[1,x]
        learning_rate=inf lr_final=-1 threads=0 precision=fp8 obs_keep=x num_updates=-1 gama=1 gamma.x=1 .gamma=1"""),
    *of("policy", """features=0 features=(0,) features=[0] features=64, core=rnn activation=gelu floor=1 floor=-1
        layers=0 actor=-1 critic=[0] embed_columns=-1"""),
    *of("env", """task=none task=digit reward=much horizon=0 limit=0 devices= devices=cuda0 slots=r9c9 blueprints=conv
        governor=3 governor.patience=x rules=3 repertoire=x schedule=linear precision=int8 lr=-1 lr=0 workers=0 width=0
        family=cats penalty=-1 autoreset_mode=never faults=3 faults=[3] faults=[{"kind":"nen"}] max_seeds=x price=x
        faults=[{"kind":"nan","lane":99}] batch_size=0 eval_batch=0 gamma=.5 judged=x rules.gates.training_epochs=x"""),
    *"minutes=0 minutes=-1 minutes=nan name= save_every=0 =3 ppo ppo=3 ppo= policy=[] lr=.1 ppo.=3 ppo=3=4".split(),
    *"env.root seed env=none".split(), ""]
wrong_options = """--updates 0, --updates -1, --updates x, --updates 1.5, --minutes 0, --minutes -1, --minutes nan,
    extra, --minutes inf, --minutes x, --seed x, --seed 1.5, --device cuda0, --device tpu, --inject nen,
    --inject nan:x, --set,
    --inject nan:99, --inject nan:0:99999, --inject nan:-1, --inject nan:0:0:0, --inject nan:0:, --nonsense, --out"""
wrong_lines = """tran, train, train digit, resume, resume nowhere, resume /dev/null, resume ., report, report nowhere,
    report ., report /dev/null, resume . --updates x, resume . --minutes inf, compare, compare digit,
    compare digits --seeds 0,
    compare digits --seeds x, compare digits --seeds -3, compare digits --set ppo.seed=1, fit, fit digit, bench,
    compare digits --set sampled=maybe, fit digits --set lanes=0, fit digits --set lanes=x, fit digits --set lr=fast,
    fit digits --set lr=inf, fit digits --set restart=no, fit digits --set lanse=3, fit digits --set governor=yes,
    fit digits --set governor.patience=x, fit digits --set precision=fp8, fit digits --set epochs=1.5, tasks x, lab x,
    fit digits --inject nan:99, fit digits --inject nan:0:9999, fit digits --device cuda0,
    fit digits --set schedule=no"""
def lines(text): return [tuple(line.split()) for line in text.split(",")]

slips = [("train", "digits", "--set", s) for s in wrong_settings]
slips += [("train", "digits", *option) for option in lines(wrong_options)]
slips += lines(wrong_lines) + [("train", ""), ("train", "x" * 500)]
slips += [("train", "digits", "--device", d) for d in ("", "cpu,")] + [("train", "digits", "--inject", "")]

@pytest.mark.parametrize("argv", slips, ids=" ".join)
def test_a_slip_is_one_clear_line(argv, tmp_path, monkeypatch, capsys):
    def work(*args, **kwargs): raise AssertionError("accepted")
    monkeypatch.setattr(esper_nb.run, "compare_recipe", work)
    monkeypatch.setattr(Run, "drive", work)
    monkeypatch.setattr(FitRun, "drive", work)
    monkeypatch.chdir(tmp_path)
    try: status = main(list(argv))
    except SystemExit as e: status = e.code # of the parser
    said = capsys.readouterr().err.strip()
    assert status in (1, 2) and "Traceback" not in said
    last = said.splitlines()[-1]
    assert last.startswith("esper-nb") and len(last) > 25
    assert said.startswith("usage: ") or "\n" not in said
    assert not list(tmp_path.iterdir()), "nothing was made"

taken = {"env.num_envs=1_000": 1000, "ppo.learning_rate=.9": .9, "ppo.gamma=1.": 1., "sampled=False": False,
         "sampled=TRUE": True, "env.root=2024": "2024", "env.lr=None": None, "policy.features=[]": (),
         "policy.features=32,16": (32, 16),
         "ppo.max_grad_norm=inf": float("inf"), "ppo.target_kl=1e-2": .01, "env.restart=false": False}

@pytest.mark.parametrize("text", taken)
def test_values_are_what_their_settings_ask_for(text):
    (name, value), = parse_settings([text], RunConfig).items()
    assert value == taken[text] and type(value) is type(taken[text])
    get_recipe("digits", {name: value} | ({"env.gamma": 1.} if name == "ppo.gamma" else {}))


# --- controllers

def seen(stage, epoch, **kw):
    "A lane with one slot."
    seed = SeedState(stage, 0 if stage != Stage.DORMANT else None, **kw)
    return View(0, {"r0c0": seed}, {"r0c0": ("norm", "conv_light")}, Signals(epoch=epoch, plateau=4, latched=True))

def test_asking_a_heuristic_again_changes_nothing():
    once, thrice = Heuristic(), Heuristic()
    for v in (seen(Stage.HOLDING, 9, contribution=0.), seen(Stage.DORMANT, 10), seen(Stage.DORMANT, 15)):
        assert [thrice.act(v) for _ in range(3)] == [once.act(v)] * 3
        assert once.memory == thrice.memory
