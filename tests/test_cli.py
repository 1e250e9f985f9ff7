"The command in processes of its own: stop, kill, resume, report, compare, mistakes."
import io
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch
import warm
from safetensors.torch import load_file
from tiny import timeless

from esper_nb.control import GrowVecEnv
from esper_nb.core import parse_settings
from esper_nb.record import read_rows
from esper_nb.run import (
    Comparison, cli, command_words, get_recipe, lab_command, list_recipes, main, open_run, register_recipe)
from esper_nb.train import FitConfig

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = ("env.num_envs=4", "env.horizon=8", "env.limit=256", "ppo.num_steps=8", "ppo.num_minibatches=2",
            "save_every=1", "env.workers=1", 'env.blueprints=["conv_light"]')
SMALL = [word for setting in SETTINGS for word in ("--set", setting)]

def signalled(argv, at, number):
    "Run the command; in front of its step number `at` it sends itself a signal."
    count, step = 0, GrowVecEnv.step
    def counted(self, actions):
        nonlocal count
        count += 1
        if count == at: os.kill(os.getpid(), number)
        return step(self, actions)
    GrowVecEnv.step = counted
    return main([*map(str, argv)])

def child(*argv, at=-1, number=2): return warm.run(signalled, argv, at, number)

@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "A run that nobody stopped."
    folder, said, bar = tmp_path_factory.mktemp("whole"), io.StringIO(), io.StringIO()
    with redirect_stdout(said), redirect_stderr(bar):
        asked = ["train", "digits_impaired", "--updates", "3", "--inject", "nan:1:4", *SMALL, "--out", str(folder)]
        assert main(asked) == 0
    assert "wait-only" in said.getvalue() and "median" in said.getvalue() # the table
    assert "return" in bar.getvalue() and "rollback" in bar.getvalue()
    return folder/"digits_impaired"

@pytest.mark.slow
@pytest.mark.parametrize("number, at", [(2, 13), (9, 20)], ids=["interrupt", "kill"])
def test_resume_in_a_new_process_is_exact(whole, tmp_path, number, at):
    run = tmp_path/"digits_impaired"
    options = ("--updates", 3, "--inject", "nan:1:4", *SMALL, "--out", tmp_path)
    first = child("train", "digits_impaired", *options, at=at, number=number)
    assert "Traceback" not in first.stderr and not (run/"comparison.json").exists()
    if number == 9: assert first.returncode == -9
    else: assert first.returncode == 128 + number and f"esper-nb resume {run}" in first.stderr
    second = child("resume", run)
    assert second.returncode == 0, second.stderr
    for name in ("rows.jsonl", "final.jsonl"): assert timeless(read_rows(run/name)) == timeless(read_rows(whole/name))
    a, b = load_file(run/"controller.safetensors"), load_file(whole/"controller.safetensors")
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    ended, other = open_run(run), open_run(whole)
    def kept(r): return tensors([r.env.parts[0][1].model.state_dict(), r.learner.optimizer.state_dict()])
    assert all(torch.equal(x, y) for x, y in zip(kept(ended), kept(other), strict=True))
    test = [[p.test_accuracy_pp for p in Comparison.load(f/"comparison.json").plays] for f in (run, whole)]
    assert test[0] == test[1]

def tensors(tree):
    if isinstance(tree, torch.Tensor): yield tree
    elif isinstance(tree, dict): yield from (t for v in tree.values() for t in tensors(v))
    elif isinstance(tree, (list, tuple)): yield from (t for v in tree for t in tensors(v))

def test_a_run_holds_everything(whole):
    assert {p.name for p in whole.iterdir()} == {
        "checkpoint.safetensors", "checkpoint.safetensors.previous", "comparison.json", "config.json",
        "controller.safetensors", "final.jsonl", "rows.jsonl", "run.png"}
    rows = read_rows(whole/"rows.jsonl")
    assert [r["update"] for r in rows if r["kind"] == "update"] == [1, 2, 3]
    assert [r["lane"] for r in rows if r["kind"] == "governor"] == [1]
    assert sum(r["kind"] == "step" and r["reward.rollback"] < 0 for r in rows) == 1
    assert json.loads((whole/"config.json").read_text())["run"]["ppo"]["num_updates"] == 3

def test_report(whole, capsys):
    out = whole.parent/"r.html"
    assert main(["report", str(whole), "--out", str(out)]) == 0 and capsys.readouterr().out.strip() == str(out)
    page = out.read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in page and "1 rollback" in page
    assert page.count("<img") >= 6 and page.count("https:") == page.count("https://esper-nb.github.io/esper_nb/")

def test_resume_refuses_what_does_not_fit(whole, tmp_path, capsys):
    assert main(["resume", str(tmp_path)]) == 2 and "no config.json" in capsys.readouterr().err
    other = tmp_path/"other"
    other.mkdir()
    config = json.loads((whole/"config.json").read_text())
    config["run"]["ppo"]["clip_coef"] = .3
    (other/"config.json").write_text(json.dumps(config))
    (other/"checkpoint.safetensors").write_bytes((whole/"checkpoint.safetensors").read_bytes())
    assert main(["resume", str(other)]) == 2 and "run.ppo.clip_coef: saved 0.2, here 0.3" in capsys.readouterr().err
    for name in ("checkpoint.safetensors", "checkpoint.safetensors.previous"):
        (other/name).write_bytes(b"\x00" * 100)
        with warnings.catch_warnings(action="ignore"): assert main(["resume", str(other)]) == 2
        said = capsys.readouterr().err
        assert f"{name} cannot be read as a checkpoint" in said and "previous.previous" not in said

def test_an_interrupt_in_front_of_the_first_step(tmp_path, monkeypatch, capsys, plain_signals):
    step = GrowVecEnv.step
    def interrupted(env, actions):
        signal.raise_signal(signal.SIGINT)
        return step(env, actions)
    monkeypatch.setattr(GrowVecEnv, "step", interrupted)
    assert main(["train", "digits_impaired", "--updates", "1", *SMALL, "--out", str(tmp_path)]) == 130
    assert "Traceback" not in capsys.readouterr().err
    assert open_run(tmp_path/"digits_impaired").steps == 1      # the step that was begun is finished first

@pytest.mark.slow
def test_minutes_end_a_run(tmp_path, capsys):
    assert main(["train", "digits_impaired", "--minutes", "0.0001", *SMALL, "--out", str(tmp_path)]) == 0
    assert "1 update," in capsys.readouterr().out
    assert open_run(tmp_path/"digits_impaired").over

@pytest.mark.slow
def test_compare(tmp_path, capsys):
    out = tmp_path/"c.json"
    small = [*SMALL, "--set", 'env.blueprints=["conv_light"]']
    assert main(["compare", "digits_impaired", "--updates", "1", "--seeds", "2", "--out", str(out), *small]) == 0
    c, text = Comparison.load(out), capsys.readouterr().out
    assert c.names == ["PPO", "heuristic", "random-legal", "wait-only", "constant"]
    assert {p.seed for p in c.plays} == {0, 1}
    assert all(k in text for k in c.names) and (tmp_path/"c.png").stat().st_size > 5000
    assert {(u.seed, u.update) for u in c.learned} == {(0, 1), (1, 1)}
    assert all(p.practice_cpu_s > 0 for p in c.plays if p.controller == "PPO")
    again = ["compare", "digits_impaired", "--updates", "1", "--seeds", "2", "--jobs", "2", "--out", str(out), *small]
    assert main(again) == 0
    apart = Comparison.load(out) # in processes of their own: the same numbers
    def timeless(c): return [p._replace(seconds=0, practice_seconds=0, practice_cpu_s=0) for p in c.plays]
    assert timeless(apart) == timeless(c) and apart.learned == c.learned
    with pytest.raises(SystemExit): main(["compare", "digits_impaired", "--jobs", "0", "--out", str(out)])
    assert "jobs" in capsys.readouterr().err

@pytest.mark.parametrize("number, status", [
    pytest.param(signal.SIGINT, 130, id="interrupt"),
    pytest.param(signal.SIGTERM, 143, id="end", marks=pytest.mark.slow)])
def test_a_comparison_that_is_stopped_says_what_it_keeps_and_goes_on_from_there(tmp_path, capsys, plain_signals, number,
                                                                                status):
    words = ["compare", "digits_impaired", "--rules", "wait-only", "--seeds", "3", *SMALL]
    words += ["--out", str(tmp_path/"c.json")]
    def stopped(at):
        with pytest.MonkeyPatch.context() as patch: # what counts the steps is put in `GrowVecEnv`
            patch.setattr(GrowVecEnv, "step", GrowVecEnv.step)
            try: return signalled(words, at, number)
            except SystemExit as e: return e.code
    for at, kept in ((3, "before a seed was finished: nothing is kept"),
                     (8 + 3, f"1 of 3 seeds are kept in {tmp_path/'c.seeds'}; the same command goes on from there"),
                     (8 + 3, "2 of 3 seeds are kept in")): # a play has 8 steps, and what is kept none
        assert stopped(at) == status
        assert f"esper-nb: stopped{' ' if at == 3 else ': '}{kept}" in capsys.readouterr().err
    assert main(words) == 0
    assert "seed 1: kept from before" in capsys.readouterr().err and not (tmp_path/"c.seeds").exists()
    assert {p.seed for p in Comparison.load(tmp_path/"c.json").plays} == {0, 1, 2}

SMALLEST = ("env.num_envs=2", "env.horizon=2", "env.limit=64", "env.workers=1", "ppo.num_steps=2",
            "ppo.num_minibatches=1", "ppo.num_updates=1")

def recipe_marks(name): return () if name == "digits_family" else pytest.mark.slow # the one with data of its own kind

@pytest.mark.parametrize("name", [pytest.param(name, marks=recipe_marks(name)) for name in list_recipes()])
def test_every_recipe_runs_to_its_closing_table(name, tmp_path, capsys):
    few = ["env.synthetic=true", "env.batch_size=16", "env.slots=r0c0"] if name.startswith("cifar") else []
    family = name == "digits_family"       # the search for a threshold takes six plays and more
    settings = [*SMALLEST, *few, *["ppo.num_updates=6"] * family]
    words = [word for setting in settings for word in ("--set", setting)]
    assert main(["train", name, *words, "--comparison", "60", "--out", str(tmp_path), "--seed", "0"]) == 0
    said = capsys.readouterr().out
    for player in ("PPO", "heuristic", "random-legal", "wait-only", "constant", *["threshold"] * family):
        assert f"\n{player}" in said, said
    assert (tmp_path/name/"comparison.json").exists()

def test_lab(monkeypatch, capsys):
    called = []
    monkeypatch.setattr(cli.subprocess, "call", lambda command: called.append(command) or 0)
    if cli.importlib.util.find_spec("jupyterlab") is None: pytest.skip("JupyterLab is not installed")
    assert main(["lab"]) == 0 and called[0][-1].endswith("dashboard.ipynb")
    assert main(["lab", "--allow-root", "--port", "8899"]) == 0 # as root, JupyterLab wants to be told
    assert called[1] == [*called[0], "--allow-root", "--port", "8899"]
    with pytest.raises(FileNotFoundError, match="repository"): lab_command("tutorials/none.ipynb")

@pytest.mark.parametrize("words, exact", [
    ([], False), (["--exact"], True), (["--shards", "2"], True), (["--shards", "1"], False),
    (["--set", "shards=2"], True),
    (["--shards", "2", "--no-exact"], False), (["--shards", "2", "--set", "env.exact=false"], False)])
def test_in_shards_numbers_do_not_depend_on_their_number_unless_it_is_told(words, exact):
    "And the command that repeats a run says so, too."
    def chosen(words):
        return cli._chosen_recipe(cli._parser("train").parse_args(["train", "digits", *words])) # noqa: SLF001
    config = chosen(words)
    assert config.env.exact == exact
    again = command_words(dict(run=config.to_dict()))
    assert chosen(again[3:]).to_dict() == config.to_dict(), again

def test_mistakes(tmp_path, capsys):
    assert main(["train"]) == 2
    assert main(["export", str(tmp_path/"none")]) == 2 and "no folder of a run" in capsys.readouterr().err
    refused = {"train digits --set minutes=1 seed=2": ("unknown: seed=2;", "a --set of its own"),
               "compare digits --seeds 0": ("--seeds: 0", "at least 1"),
               "train digits --comparison nan": ("--comparison: nan", "from 0 to 100"),
               "fit digits --epoch 3": ("unknown: --epoch 3", "(--epochs perhaps)"),
               "fit digits --epochs": ("--epochs: expected a value",),
               "train digits --gamma .9": ("env.gamma or ppo.gamma", "--set env.gamma=.9"),
               "tasks digits": ("unknown: digits;",), "--verison": ("--version perhaps",), "-x fit": ("unknown: -x",)}
    for line, words in refused.items():
        with pytest.raises(SystemExit) as told: main(line.split())
        said = capsys.readouterr().err
        assert told.value.code == 2 and all(word in said for word in words), said
    with pytest.raises(ValueError, match="new name"): register_recipe(named("digits"))
    assert {"digits", "digits_impaired", "cifar_baseline"} <= set(list_recipes())
    pairs = ["lr=.9", "epochs=none", "schedule=constant", "restart=False"]
    assert parse_settings(pairs, FitConfig) == dict(lr=.9, epochs=None, schedule="constant", restart=False)
    assert get_recipe("digits", {"env.faults": [dict(kind="nan", lane=2, epoch=1)]}).env.faults[0].lane == 2

@pytest.mark.parametrize("line, settings", [
    ("fit digits --epochs 3 --batch-size=32 --governor none", ["epochs=3", "batch_size=32", "governor=none"]),
    ("fit digits --lr .1 --set lanes=4", ["lr=.1", "lanes=4"]),
    ("fit --data rows.csv --lanes 2", ["lanes=2"]), ("fit --epochs 3 --lr -1 digits", ["epochs=3", "lr=-1"]),
    ("train --data rows.csv --updates 6 --lanes 4 --horizon=3", ["env.num_envs=4", "env.horizon=3"]),
    ("train digits --lanes 4 --epochs 6 --learning-rate 1e-3",
     ["env.num_envs=4", "env.horizon=6", "ppo.learning_rate=1e-3"])])
def test_a_setting_is_an_option_where_its_name_tells_which(line, settings):
    words = cli._with_settings(line.split()) # noqa: SLF001
    args, unknown = cli._parser(words[0]).parse_known_args(words) # noqa: SLF001
    assert args.set == settings and not unknown
    name = args.recipe if args.command == "train" else args.task
    assert name == ("digits" if "digits" in line else None) and args.data == (None if name else "rows.csv")

def test_a_command_alone_says_what_there_is(capsys):
    assert main([]) == 2
    assert "train a population of networks without a controller" in " ".join(capsys.readouterr().err.split())

@pytest.mark.parametrize("option", ["--label x", "--size 0", "--size 64", "--columns a,b", "--groups g",
                                    "--target values"])
@pytest.mark.parametrize("command", ["fit", "train"])
def test_options_of_own_data_beside_a_named_task_are_refused(command, option, tmp_path, capsys):
    assert main([command, "digits", *option.split(), "--out", str(tmp_path/"runs")]) == 2
    flag, value = option.split()
    said = capsys.readouterr().err
    assert f"{flag}={value if value.isdigit() else repr(value)}, expected none: digits brings its own data" in said
    assert not (tmp_path/"runs").exists()

QUICK = ["--help", *(f"{c} --help" for c in ("train", "fit", "resume", "compare", "watch", "status", "report", "export",
                                            "lab", "tasks", "completion")),
         "train digit", "fit dgits", "fit digits --inject nen", "fit digits --label x", "fit --data /nowhere", "train",
         "train digits --device cuda0", "train digits --set ppo.clip_cof=1", "fit digits --set lanse=4",
         "resume /nowhere", "export /nowhere", "report /nowhere", "watch /nowhere", "status /nowhere",
         "train digits --engine rya", "compare digits --rules nosuch", "compare digits --out x.png",
         "fit digits --out /dev/null/x", "train digits --updates two",
         "fit digits --lr -1", "fit digits --schedule sine", "train digits --set ppo.gamma=2", "train digits --lanes 0",
         "train digits --updates 0", "train digits --device tpu", "fit digits --epoch 3"]

def test_help_and_refusals_do_not_import_torch():
    code = "\n".join([
        "import contextlib, io, sys", "from esper_nb.run.cli import main", f"for words in {QUICK}:",
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):",
        "        try: status = main(words.split())", "        except SystemExit as e: status = e.code",
        "    assert (status == 0) == words.endswith('--help'), (words, status)",
        "    assert 'torch' not in sys.modules, words"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

def test_a_script_reads_status_report_and_comparison_as_json(whole, tmp_path, capsys, no_pictures):
    assert main(["status", str(whole), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["unit"], facts["done"], facts["total"], facts["ended"]) == ("update", 3, 3, True)
    assert main(["status", str(whole)]) == 0 and capsys.readouterr().out.startswith("update 3 of 3, return ")
    assert main(["report", str(whole), "--out", str(tmp_path/"r.html"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == dict(report=str(tmp_path/"r.html"), runs={str(whole): facts})
    one = ["compare", "digits_impaired", "--rules", "wait-only", "--seeds", "1", *SMALL, "--json"]
    assert main([*one, "--out", str(tmp_path/"c.json")]) == 0
    assert Comparison.from_dict(json.loads(capsys.readouterr().out)).names == ["wait-only"]

@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_a_shell_completes_commands_options_and_choices(shell, capsys):
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in ("compare", "comparison", "keep-default-allocator"))

def test_a_fit_ends_with_its_incidents_and_can_be_reported(tmp_path, capsys, no_pictures):
    options = ["--set", "lanes=3", "--set", "epochs=3", "--inject", "nan:1:1", "--inject", "corrupt-batch:2:2"]
    assert main(["fit", "digits", *options, "--out", str(tmp_path)]) == 0
    said, rows = capsys.readouterr().out, read_rows(tmp_path/"digits/rows.jsonl")
    assert "test accuracy" in said
    assert [r["governor.reason"] for r in rows if r["kind"] == "governor" and r["lane"] == 1] == ["non-finite"]
    assert main(["resume", str(tmp_path/"digits")]) == 0 and "is finished" in capsys.readouterr().out
    assert main(["report", str(tmp_path/"digits")]) == 0
    incidents = said[said.index("incidents"):]
    assert re.search(r"incidents  \d\n +lane 1, epoch 1: non-finite → rollback, back at step \d+; ends at [\d.]+ pp, "
                     r"the other lanes at [\d.]+ to [\d.]+\n", incidents), said
    assert "lane 2, epoch 2: " in incidents and f"esper-nb report {tmp_path/'digits'}" in incidents
    assert main(["fit", "digits", "--inject", "nan:99", "--quiet", "--out", str(tmp_path)]) == 2
    assert "inject='nan:99:5', expected KIND:LANE:EPOCH with a lane below 16" in capsys.readouterr().err

def named(name):
    def f(): pass
    f.__name__ = name
    return f


def test_a_listing_ends_quietly_where_nobody_reads_on():
    code = "import sys; from esper_nb.run.cli import main; sys.exit(main(['tasks']))"
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert writer.stdout is not None and writer.stderr is not None
    writer.stdout.close()
    said = writer.stderr.read().decode()
    assert writer.wait() == 141 and not said


def test_tasks_are_told_in_words(capsys):
    assert main(["tasks"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "160 parameters" in rows["digits_impaired"] and "scikit-learn" in rows["digits"]
    assert "GPT" in rows["prose"] and "Config" not in "".join(rows.values())


def test_signs_that_a_terminal_lacks_are_question_marks(monkeypatch, capsys):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii", write_through=True))
    assert main(["tasks"]) == 0
    assert "8 ? 8 digits" in shown.getvalue().decode("ascii") and not capsys.readouterr().err


def test_a_run_without_a_terminal_goes_on_to_its_end(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        for name in ("stdout", "stderr"): patch.setattr(sys, name, None)
        status = main(["fit", "digits", "--lanes", "1", "--epochs", "1", "--set", "workers=1", "--out", str(tmp_path)])
        sys.stdout.close(), sys.stderr.close()
    assert status == 0 and (tmp_path/"digits"/"weights.safetensors").exists()


@pytest.mark.slow
def test_docstrings_may_be_stripped(tmp_path):
    code = f"""
from esper_nb.run.cli import main
from esper_nb import GrowVecEnv, train_ppo, compare_controllers, Dashboard, fit_run
raise SystemExit(main(["status", {str(tmp_path)!r}]))
"""
    done = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
