"What a newcomer tries first works, or the error names the next step."
import copy
import inspect
import math
import pickle
import re
import shlex
import subprocess
import sys
import tempfile
from functools import partial
from types import MappingProxyType

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from esper_nb import (
    Dashboard, EnvConfig, EnvSource, FitConfig, GerminationRule, Governor, GrowEnv, GrowVecEnv, Heuristic,
    LaneOptimizer, Learner, LoopSource, ModuleHostConfig, PPOConfig, PolicyPlayer, Recorder, Session, SplitVecEnv,
    Stepper, as_controller, attach_slots, begin_fit, begin_run, compare_controllers, comparison_text, create_model,
    evaluate, explore_host, export_model, find_alarms, find_metric, fit, fit_run, get_recipe, list_blueprints,
    new_population, open_fit, pick_rows, plain_blueprint, plot_compare, plot_incidents, plot_learning, plot_slots,
    read_rows, register_rule, run_epoch, seed_lives, serve_optimizer, session_text, task_from_arrays, task_from_dataset,
    task_from_folder, task_from_table, update_rows, watch, write_report)
from esper_nb.core import Range
from esper_nb.grow import Rules
from esper_nb.record import RunFolder
from esper_nb.run import RandomPlayer, growth_rule, main, run_status

pytestmark = pytest.mark.usefixtures("one_thread")
MY_NETS = """
import torch
from torch import nn
from esper_nb import ModuleHostConfig, register_task, task_from_arrays

def net(): return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
host = ModuleHostConfig("my_nets:net", slots=["1"], reads="BC")
register_task(task_from_arrays(x, x[:, 0] > 0, name="mine", epochs=1, host=host))
"""


def command(folder, *words):
    "Run the command as its script does: with the script's folder on the path, not the one that it is started from."
    script = folder/"bin"/"esper-nb"
    script.parent.mkdir(exist_ok=True)
    script.write_text("import sys\nfrom esper_nb.run.cli import main\nsys.exit(main())\n")
    asked = [sys.executable, str(script), *words]
    return subprocess.run(asked, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("plugin", ["my_nets.py", "my_nets"])
def test_a_plugin_names_its_own_function(tmp_path, plugin):
    (tmp_path/"my_nets.py").write_text(MY_NETS)
    done = command(tmp_path, "tasks", "--import", plugin)
    assert done.returncode == 0 and "mine" in done.stdout, done.stderr


@pytest.mark.slow
def test_a_plugin_that_is_named_again_needs_no_more_trust(tmp_path):
    (tmp_path/"my_nets.py").write_text(MY_NETS)
    asked = ["fit", "mine", "--import", "my_nets.py", "--lanes", "2", "--quiet"]
    done = command(tmp_path, *asked)
    assert done.returncode == 0, done.stderr
    assert "--trust" in command(tmp_path, "resume", "runs/mine").stderr
    done = command(tmp_path, "resume", "runs/mine", "--import", "my_nets.py")
    assert done.returncode == 0, done.stderr


def test_the_package_is_the_command():
    done = subprocess.run([sys.executable, "-m", "esper_nb", "--version"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


class Net(torch.nn.Module):
    "A class, where a task or settings are wanted."


def test_a_wrong_object_is_told_what_belongs_there(tmp_path):
    pop = new_population("digits", FitConfig(lanes=2, epochs=1, workers=1))
    x, y = np.random.default_rng(0).normal(size=(9, 3, 16, 16)), np.arange(9) % 2
    learner = "lambda seed: PolicyPlayer(learner, seed=seed)"
    wrong = (
        (lambda: new_population(Net), "expected the name of a task, or a Task: task_from_arrays"),
        (lambda: list(fit(np.zeros((300, 5)), y)), "expected a population, such as new_population('digits')"),
        (lambda: run_epoch("digits"), "pop='digits', expected a population"),
        (lambda: begin_fit("digits", tmp_path), "pop='digits', expected a population"),
        (lambda: begin_run("digits", tmp_path), "expected settings, such as get_recipe('digits_impaired')"),
        (lambda: list(fit(pop, 2.5)), "epochs=2.5, expected a whole number"),
        (lambda: export_model(pop), "model='Population', expected a growing model"),
        (lambda: evaluate(pop.model, "digits", pop.data), "expected a Task, such as pop.task"),
        (lambda: explore_host(Net), "expected settings, such as ModuleHostConfig"),
        (lambda: GrowEnv("digits"), "config='digits', expected settings, such as EnvConfig(task='digits')"),
        (lambda: compare_controllers("digits", {"PPO": 3}), f"such as {{'PPO': {learner}}}"),
        (lambda: compare_controllers("digits", {}, seeds=3), "seeds=3, expected several, such as range(3)"),
        (lambda: compare_controllers("digits", {"A": RandomPlayer}, seeds=[]), "seeds=[], expected whole numbers"),
        (lambda: compare_controllers("digits", {"A": RandomPlayer}, ["a"]), "seeds=['a'], expected whole numbers"),
        (lambda: compare_controllers("digits", {"A": lambda seed: None}, [0]), "A makes='NoneType', expected a player"),
        (lambda: list(fit(pop, controller=lambda pop, last: [3] * pop.lanes)), "lane 0=3, expected a Decision"),
        (lambda: as_controller(Heuristic), "such as Heuristic()"),
        (lambda: pop.model.germinate("r0c0", "norm", blend="multiply"), "expected one of Blend.ADD, Blend.MULTIPLY"),
        (lambda: task_from_arrays(x, np.zeros((9, 16, 16))), "at every pixel, attach_slots grows a network in a loop"),
        (lambda: task_from_arrays(x[:, :, :4], y), "host=ModuleHostConfig(Net, slots=..., reads='BCL')"),
        (lambda: task_from_arrays(x, None), "labels of arrays=None, expected one for each example"),
        (lambda: task_from_arrays(x, y, host=Net), "for one of your own ModuleHostConfig(Net, slots=[...])"),
        (lambda: task_from_table(pd.DataFrame(dict(a=y, kind=y)), "kind"), "frame.drop(columns='kind'), frame['kind']"),
        (lambda: task_from_dataset((x, y)), "of examples and labels task_from_arrays(x, y)"),
        (lambda: fit_run("digits", 4), "config=4, expected settings, such as FitConfig(lanes=4)"),
        (lambda: fit_run(x, y), "expected the name of a task, or a Task: task_from_arrays"),
        (lambda: task_from_dataset([{"x": 1., "y": 2}]), "dictionary of x, y, expected a pair"),
        (lambda: task_from_dataset(DataLoader(list(zip(x, y)))), "of a DataLoader take its .dataset"))
    for attempt, said in wrong:
        with pytest.raises(ValueError, match=re.escape(said)): attempt()
    assert list(tmp_path.iterdir()) == []


def test_one_column_of_a_table_is_enough():
    frame = pd.DataFrame(dict(a=np.arange(30.), kind=["yes", "no"] * 15))
    assert task_from_arrays(frame["a"], frame["kind"]).load().shape == (1, 1, 1)


def test_a_loop_in_a_wrong_place_is_refused_before_it_begins():
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=.1)
    governor = Governor(net, optimizer, chance_loss=None)
    def loop(disturb): yield torch.zeros(())
    with pytest.raises(ValueError, match="loop='Linear', expected a function"): LoopSource(net, governor, net)
    with pytest.raises(ValueError, match="loop='Governor'"): LoopSource(governor, loop, net)
    with pytest.raises(ValueError, match="governor='SGD', expected a Governor"): LoopSource(loop, optimizer, net)
    with pytest.raises(ValueError, match="model='SGD', expected the network"): LoopSource(loop, governor, optimizer)
    assert LoopSource(loop, governor, net).governor is governor


def test_a_loop_that_cannot_be_one_is_refused_with_what_it_lacks():
    net = torch.nn.Linear(2, 1)
    governor = Governor(net, torch.optim.SGD(net.parameters(), lr=.1), chance_loss=None)
    def without_argument(): yield torch.zeros(())
    def without_yield(disturb): pass
    for loop, said in ((without_argument, "one argument, disturb"), (without_yield, "yield the loss of every batch")):
        with pytest.raises(ValueError, match=said): LoopSource(loop, governor, net)
    for source in (governor, "runs/digits"):
        with pytest.raises(ValueError, match=r"LoopSource\(loop, governor, net, optimizer\); .* watch\(folder\)"):
            Dashboard(source)
    session = Session(new_population("digits", FitConfig(lanes=2, epochs=1, workers=1)))
    session.log({"acc, %": 97.}, gap=1)
    assert session.history.numbers == {"acc, %": 97., "gap": 1.}
    assert "seconds='fast', expected a number" in session.set_pace("fast").wait().message
    session.close()


def test_a_long_value_does_not_hide_what_is_expected():
    with pytest.raises(ValueError, match="expected a population") as e: Session(torch.nn.Sequential(*[Net()] * 99))
    assert len(str(e.value)) < 600 and "(Sequential, " in str(e.value)


def test_a_population_is_not_copied_by_accident():
    pop = new_population("digits", FitConfig(lanes=2, epochs=1, workers=1))
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"begin_fit\(pop, folder\) saves it"): attempt(pop)


def test_what_a_cell_shows_fits_in_a_line(tmp_path):
    pop = new_population("digits", FitConfig(lanes=2, epochs=3, workers=1))
    assert repr(pop).startswith("Population(2 lanes on digits, 0 of 3 epochs, slots r0c0, r0c1, r0c2; ImageData(")
    assert repr(begin_fit(pop, tmp_path)) == f"FitRun({str(tmp_path/'digits')!r}, epoch 0)"
    assert repr(run_status(tmp_path/"digits")) == "RunStatus(epoch 0, 0 rollbacks)"
    env = GrowVecEnv(task="digits", num_envs=2, horizon=2, limit=64)
    played = repr(compare_controllers(env, {"A": lambda seed: RandomPlayer(seed)}, [0]))
    assert re.fullmatch(r"Comparison\(digits: A \d+\.\d pp; 2 lanes, 2 epochs, 1 seed\)", played), played
    learner = Learner(env, PPOConfig(num_steps=2, num_minibatches=1, num_updates=3), heads=env.actions)
    assert repr(PolicyPlayer(learner)) == "PolicyPlayer(Learner(0 of 3 updates, 0 steps in 2 lanes), sampled=True)"
    assert repr(Range(1)) == "Range(low=1)" and repr(Range(0, 1, above=True)) == "Range(low=0, high=1, above=True)"
    session = Session(pop)
    try: assert repr(session.provoke("nam", lane=1).wait()).startswith("Request(provoke refused: fault='nam'")
    finally: session.close()


def test_a_folder_of_splits_is_told_from_one_of_classes(tmp_path):
    for place in ("train/cats", "train/dogs", "val/cats", "val/dogs"): (tmp_path/place).mkdir(parents=True)
    with pytest.raises(ValueError, match=re.escape(f"if {tmp_path/'train'} holds the classes, name that one")):
        task_from_folder(tmp_path)


def test_data_in_place_of_a_name_are_told_their_option(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path/"rows.csv").write_text("a,b\n1,2\n")
    assert main(["fit", "rows.csv"]) == 2
    assert "data of your own are --data rows.csv" in capsys.readouterr().err


def test_two_threads_do_not_train_one_population():
    pop = new_population("digits", FitConfig(lanes=2, epochs=3, workers=1))
    seen = []
    def look(*batch):
        if not seen:
            with pytest.raises(RuntimeError, match="another thread is training this population") as e: run_epoch(pop)
            seen.append(e)
            session = Session(pop)
            session.step(1).wait()
            session.wait()
            seen.extend([session.state, session.error])
            session.close()
        return batch[-2:]
    run_epoch(pop, disturb=look)
    assert seen[1] == "failed" and "pause or stop it first" in seen[2]
    assert pop.epoch.tolist() == [1, 1] and [r.epoch for r in fit(pop)] == [1, 2] # and goes on afterwards


def test_rows_are_read_from_the_folder_of_a_run(tmp_path, no_pictures):
    run = begin_fit(new_population("digits", FitConfig(lanes=2, epochs=1, workers=1)), tmp_path, made={})
    assert len([run.log({"acc, %": 97.}, gap=1) for _ in run.epochs()]) == 1
    assert read_rows(tmp_path/"digits") == read_rows(tmp_path/"digits"/"rows.jsonl") != []
    for given in (run, run.folder): # in place of its path
        assert read_rows(given) == read_rows(tmp_path/"digits") and run_status(given).done == 1
        assert write_report(given) == tmp_path/"digits"/"report.html"
        assert repr(open_fit(given)) == repr(run)
        watched = watch(given).session
        assert watched.wait(30) == "done" and set(watched.history.metrics) >= {"acc, %", "gap"}
        watched.close()
    with pytest.raises(ValueError, match="what this process trains is shown by Dashboard"): watch(run.population)


@pytest.mark.parametrize("given, near", [("digit", "'digits'"), ("Digits", "'digits'"), ("cifar", "'cifar_baseline'")])
def test_a_near_name_is_suggested(given, near):
    for ask in (new_population, get_recipe):
        with pytest.raises(ValueError, match=f"expected {near} perhaps, or another of cifar_baseline"): ask(given)


@pytest.mark.parametrize("ask", [new_population, get_recipe, growth_rule])
def test_a_name_unlike_all_others_has_no_suggestion(ask):
    with pytest.raises(ValueError, match="'mine2', expected one of "): ask("mine2")


def test_a_column_unlike_all_others_has_no_suggestion(tmp_path):
    (tmp_path/"rows.csv").write_text("width,kind" + "".join(f"\n{i},{'ab'[i % 2]}" for i in range(20)))
    with pytest.raises(ValueError, match="'target', expected one of width, kind"):
        task_from_table(tmp_path/"rows.csv", label="target")


def pictures(folder, count=24, side=16):
    "Write pictures of two classes."
    for i in range(count):
        (folder/"ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((side, side), 5 * i, "uint8")).save(folder/"ab"[i % 2]/f"{i}.png")
    return folder


def test_what_does_not_fit_into_memory_is_refused_before_it_is_allocated(tmp_path, capsys, monkeypatch):
    folder = str(pictures(tmp_path/"pics"))
    said = r"24 pictures of 1,000,000 × 1,000,000 pixels need at least 864 TB, and .* are free on cpu; take a smaller"
    assert main(["train", "--data", folder, "--size", "1000000", "--out", str(tmp_path)]) == 2
    assert re.search(said, capsys.readouterr().err)
    for words in (["fit", "digits", "--lanes", "1000000000"], ["train", "digits", "--num-envs", "1000000000"]):
        assert main([*words, "--out", str(tmp_path)]) == 2
        assert "lanes=1000000000, expected what fits into memory: networks of" in capsys.readouterr().err
    with pytest.raises(ValueError, match="need at least .* TB"): create_model("digits", ["r0c0"], num_lanes=10**9)
    assert [p.name for p in tmp_path.iterdir()] == ["pics"]
    monkeypatch.setattr("esper_nb.core.devices._host_bytes", lambda: 50_000) # 24 · 16² · 36 bytes are more
    with pytest.raises(ValueError, match="side of the first picture=16, .* 221 kB, and 50 kB are free"):
        task_from_folder(folder)
    with pytest.raises(ValueError, match="examples=24, .* 67.6 kB, and 50 kB are free"):
        task_from_arrays(np.zeros((24, 16, 16), "uint8"), np.arange(24) % 2)
    with pytest.raises(ValueError, match="batch_size=64, .* activations of one lane need at least"):
        new_population("digits", FitConfig(lanes=2, epochs=1, workers=1))


def test_lanes_that_fit_shard_by_shard_but_not_all_together_are_refused(monkeypatch):
    config = EnvConfig("digits_impaired", num_envs=80, horizon=2, limit=64)
    monkeypatch.setattr("esper_nb.core.devices._host_bytes", lambda: 4_000_000) # 63 kB a lane
    with pytest.raises(ValueError, match="lanes=80, .* need at least 5.03 MB, and 4 MB are free"):
        SplitVecEnv(config, shards=2)
    SplitVecEnv(config.replace(num_envs=40), shards=2).close()


class Classifier(torch.nn.Module):
    "Words, the mean of their features, three classes."
    def __init__(self):
        super().__init__()
        self.words, self.body, self.out = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)

    def forward(self, tokens): return self.out(self.body(self.words(tokens)).mean(1))


def test_a_classifier_of_tokens_is_told_where_it_can_grow():
    tokens, labels = torch.randint(0, 50, (60, 12), generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
    for reads in ("BL", "BC", "BCHW"):
        host = ModuleHostConfig(Classifier, slots=["body"], reads=reads)
        with pytest.raises(ValueError, match=r"grows in a loop of yours.* attach_slots\(net, \[...\], tokens\)"):
            new_population(task_from_arrays(tokens, labels, host=host), FitConfig(lanes=2, epochs=1, workers=1))
    grown = attach_slots(Classifier(), ["body"], tokens[:4]) # which is true
    grown.germinate("body", "norm")
    assert grown(tokens).shape == (60, 3)
    assert "see attach_slots" in task_from_arrays(tokens, labels).notes_text() # in place of silence
    assert "attach_slots" not in task_from_arrays(tokens.float(), labels).notes_text()
    assert "attach_slots" not in task_from_arrays(tokens % 4, labels).notes_text()


def test_a_wrong_setting_is_named_as_it_was_given():
    for make in (EnvConfig, GrowEnv, GrowVecEnv):
        with pytest.raises(ValueError, match="reward='profit', expected one of outcome"): make(reward="profit")
    x = np.arange(60.).reshape(20, 3)
    for name in ("learning_rate", "lanes", "limit"):
        with pytest.raises(ValueError, match=f"setting='{name}', expected one of name, host, .* such as lanes or seed"):
            task_from_arrays(x, np.arange(20) % 2, **{name: 3})
        with pytest.raises(ValueError, match=f"setting='{name}'"): task_from_folder("nowhere", **{name: 3})


def test_help_names_what_is_given_by_name():
    import esper_nb
    for name in esper_nb.__all__:
        made = getattr(esper_nb, name)
        try: parameters = inspect.signature(made).parameters.values()
        except (TypeError, ValueError): continue
        for p in parameters:
            if p.kind == p.VAR_KEYWORD: assert f"`{p.name}`" in (inspect.getdoc(made) or ""), f"{name}: {p.name}"


@pytest.mark.slow
def test_data_that_were_moved_are_found_again(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pictures(tmp_path/"pics")
    small = ["--size", "8", "--quiet", "--out", "runs"]
    learns = ["--num-envs", "2", "--horizon", "2", "--num-steps", "2", "--num-minibatches", "1", "--updates", "1"]
    assert main(["fit", "--data", "pics", "--lanes", "2", "--epochs", "1", *small]) == 0
    assert main(["train", "--data", "pics", "--comparison", "0", *learns, *small]) == 0
    fitted, learnt = "runs/pics", "runs/pics-2"
    (tmp_path/"pics").rename(tmp_path/"my pictures")
    pictures(tmp_path/"others", 26)
    exported = ["--out", "net.safetensors"]
    for words in (["resume", fitted], ["resume", learnt, "--updates", "2"], ["export", fitted], ["export", learnt]):
        assert main(words) == 2
        assert "say where they are now: --data PLACE (in Python: data=PLACE)" in capsys.readouterr().err
        assert main([*words, "--data", "others"]) == 2
        assert "the data have changed" in capsys.readouterr().err
    assert main(["export", fitted, "--data", "my pictures", *exported]) == 0
    assert main(["resume", fitted, "--data", "my pictures"]) == 0
    assert main(["resume", learnt, "--data", "my pictures", "--updates", "2", "--quiet"]) == 0
    for words in (["resume", fitted], ["export", learnt, *exported]): assert main(words) == 0 # the folder knows it now
    assert "/my pictures?" in RunFolder(tmp_path/learnt).config()["run"]["env"]["task"]["data"]
    assert main(["fit", "digits", "--lanes", "2", "--epochs", "1", *small[2:]]) == 0
    assert main(["resume", "runs/digits", "--data", "others"]) == 2
    assert "none: digits brings its own data" in capsys.readouterr().err


def test_printed_commands_can_be_pasted_whatever_the_folder_is_called(tmp_path, capsys):
    out = tmp_path/"my runs"
    words = ["fit", "digits", "--lanes", "2", "--epochs", "1", "--quiet", "--out", str(out)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    command = next(line for line in printed.splitlines() if line.strip().startswith("report"))
    assert shlex.split(command)[1:] == ["esper-nb", "report", str(out/"digits")]
    assert main(shlex.split(command)[2:]) == 0 and (out/"digits/report.html").exists()


def test_a_file_of_a_run_is_told_from_its_folder(tmp_path):
    run = begin_fit(new_population("digits", FitConfig(lanes=2, epochs=1, workers=1)), tmp_path)
    for ask in (run_status, open_fit, write_report):
        with pytest.raises(FileNotFoundError, match="config.json is a file, expected the folder of a run: .*digits"):
            ask(run.folder.config_path)


@pytest.mark.parametrize("name, said", [
    ("a.npy", "task_from_arrays"), ("a.PT", "task_from_arrays"), ("a.zip", "unpack it"), ("a.xlsx", "sheet as CSV"),
    ("a.json", "a column for each key"), ("a.png", "a folder of pictures for each class")])
def test_files_of_other_kinds_are_told_where_they_belong(tmp_path, capsys, name, said):
    (tmp_path/name).write_bytes(b"\x00" * 99)
    assert main(["fit", "--data", str(tmp_path/name), "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_the_home_folder_is_meant_by_its_sign(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    pictures(tmp_path/"pics")
    assert task_from_folder("~/pics").load().num_train == 16
    words = ["--size", "8", "--epochs", "1", "--lanes", "2", "--quiet"]
    assert main(["fit", "--data=~/pics", "--out=~/my runs", *words]) == 0 # a shell leaves both signs as they are
    assert sorted(p.name for p in tmp_path.iterdir()) == ["my runs", "pics"]


def test_a_governor_needs_no_more_than_what_it_guards():
    net = torch.nn.Linear(4, 2)
    governor = Governor(net, torch.optim.SGD(net.parameters(), lr=.1))
    assert governor.chance_loss is None
    assert governor.watch(net(torch.ones(1, 4)).square().mean()) == ()


WRONG_PARTS = {
    "a loss": (lambda net, opt: (net, opt, 2.3), "chance_loss=2.3"),
    "parameters": (lambda net, opt: (net.parameters(),), "hand over the model, not model.parameters()"),
    "classes": (lambda net, opt: (type(net), type(opt)), "this is a class: hand over an object of it"),
    "a loader": (lambda net, opt: (net, opt, DataLoader([1, 2])), "leave out what stays as it is")}


@pytest.mark.parametrize("give, said", WRONG_PARTS.values(), ids=WRONG_PARTS)
def test_what_is_no_part_of_a_run_is_refused_with_what_to_hand_over(give, said):
    net = torch.nn.Linear(4, 2)
    parts = give(net, torch.optim.SGD(net.parameters(), lr=.1))
    with pytest.raises(ValueError, match=re.escape(said)): Governor(*parts)


def test_a_governor_says_what_it_takes_batches_from_and_that_no_step_has_returned_a_loss():
    net = torch.nn.Linear(4, 2)
    governor = Governor(net, torch.optim.SGD(net.parameters(), lr=.1))
    for wrong in (None, 10):
        with pytest.raises(ValueError, match=f"loader={wrong}, expected what yields batches"): governor.batches(wrong)
    for _ in range(3): governor.run(lambda x: None, torch.ones(1, 4))
    assert "each has returned no loss" in governor.explain().why


ODD = {"-1": -1, "None": None, "nan": math.nan, "text": "wrong", "list": list(range(99)), "tensor": torch.ones(3),
       "module": torch.nn.Linear(2, 2), "dict": dict(a=1), "object": object()}
ROWS, ANSWERS = np.random.default_rng(0).normal(size=(60, 4)), np.arange(60) % 2

def small_model():
    model = create_model("digits", ["r0c0", "r0c1"], num_lanes=2)
    model.germinate("r0c1", "norm", tempo=1)
    return model

def set_within(share): small_model().within = share
def attached(module=None, slots=("0",), layouts=MappingProxyType({}), blueprints=None, rules=Rules()):
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU()) if module is None else module
    return attach_slots(net, slots, torch.rand(2, 1, 8, 8), layouts=layouts, blueprints=blueprints, rules=rules)
def grows(slot="r0c0", **settings): return small_model().germinate(slot, "norm", **settings)
def made(**settings): return GrowVecEnv(task="digits_impaired", num_envs=2, limit=64, **settings)
def table(path, **settings):
    (path/"a table ü.csv").write_text("width,kind" + "".join(f"\n{i},{'ab'[i % 2]}" for i in range(20)))
    return task_from_table(path/"a table ü.csv", **settings)
def folder(path, **settings):
    for i in range(12):
        (path/"ab"[i % 2]).mkdir(exist_ok=True)
        Image.fromarray(np.full((8, 8), 20 * i, "uint8")).save(path/"ab"[i % 2]/f"{i}.png")
    return task_from_folder(path, **settings)
def trained(**given): return list(fit(new_population("digits", FitConfig(lanes=2, epochs=1, workers=1)), **given))
def epoch(**given): return run_epoch(new_population("digits", FitConfig(lanes=2, epochs=1, workers=1)), **given)
def rates(lr): return LaneOptimizer(small_model().owners()["host"], 2, lr=lr)
def optimized(params): return LaneOptimizer(params, 2)
def stepped(owners): return Stepper(owners)
def served(**given): return serve_optimizer(**dict(model=small_model(), optimizer=None) | given)
def loaded(state): return GrowEnv(task="digits_impaired", limit=64).load_state_dict(state)
def measured(accuracy): return small_model().record_accuracy(accuracy)
def learner(**given): return Learner(made(), **given)
def switched(slots):
    with small_model().disable_seeds(slots): pass

@pytest.mark.parametrize("what, name, right", [
    (attached, "module", {"module", "None"}), (attached, "slots", {"list"}), (attached, "layouts", set()),
    (attached, "blueprints", {"None"}), (attached, "rules", set()), (grows, "goal", set()), (grows, "steepness", set()),
    (grows, "lanes", {"None"}), (set_within, "share", {"module"}), (measured, "accuracy", {"-1", "None", "nan"}),
    (switched, "slots", {"None"}), (served, "model", set()), (served, "optimizer", set()), (made, "data", {"None"}),
    (made, "disturb", {"None"}), (trained, "disturb", {"None"}), (trained, "epochs", {"None"}),
    (epoch, "active", {"None"}), (rates, "lr", set()), (optimized, "params", set()), (stepped, "owners", set()),
    (loaded, "state", set()), (learner, "config", set()), (learner, "policy", set()), (learner, "heads", {"None"}),
    (epoch, "clock", {"module"}), (partial(plain_blueprint, "mine"), "layout", set()),
    (list_blueprints, "family", {"None"}),
    (Heuristic, "config", set()), (GerminationRule, "choose", {"module"}),
    (table, "columns", {"None"}), (table, "groups", {"None"}), (table, "name", {"text"}), (folder, "pad", set()),
    (folder, "flip", set()), (folder, "size", {"None"}),
    (partial(task_from_arrays, ROWS), "y", set()), (partial(task_from_arrays, ROWS, ANSWERS), "name", {"text"})],
    ids=lambda v: getattr(v, "__name__", None) or (v if isinstance(v, str) else ""))
def test_a_value_of_another_kind_is_named_with_what_is_expected(what, name, right, tmp_path):
    files = (tmp_path,) if what in (table, folder) else ()
    for k, odd in ODD.items():
        if k in right: continue
        with pytest.raises(ValueError, match=r"(?s).*expected"): what(*files, **{name: odd})


def test_a_network_that_takes_the_softmax_itself_is_refused_and_one_of_values_is_not():
    class Shares(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)
        def forward(self, x): return self.head(self.body(x).relu()).softmax(-1)
    class Scores(Shares):
        def forward(self, x): return self.head(self.body(x).relu()).log_softmax(-1)
    def host(net): return ModuleHostConfig(net, ["body"], reads="BC")
    with pytest.raises(ValueError, match="'shares of 1', expected scores of any size: the loss takes their softmax"):
        new_population(task_from_arrays(ROWS, ANSWERS, name="shares", host=host(Shares)), FitConfig(lanes=1))
    for net, y, target in ((Scores, ANSWERS, "classes"), (Shares, np.abs(ROWS[:, :2]), "values")):
        task = task_from_arrays(ROWS, y, name="scores", target=target, host=host(net))
        new_population(task, FitConfig(lanes=1))
    with pytest.raises(ValueError, match="rows of numbers are reads='BC'"):
        task_from_arrays(ROWS, ANSWERS, name="rows", host=ModuleHostConfig(Scores, ["body"]))


def test_batches_of_one_example_are_refused_before_a_batch_norm():
    class Normed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.norm = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)
            self.head = torch.nn.Linear(8, 2)
        def forward(self, x): return self.head(self.norm(self.body(x)))
    class Plain(Normed):
        def forward(self, x): return self.head(self.body(x))
    for net, fits in ((None, False), (Normed, False), (Plain, True)):
        given = {} if net is None else dict(host=ModuleHostConfig(net, ["body"], reads="BC"))
        task, stream = task_from_arrays(ROWS, ANSWERS, name="ones", **given), torch.get_rng_state()
        for at in (dict(task=task.replace(batch_size=1)), dict(task=task, config=FitConfig(batch_size=1, lanes=2))):
            if fits: new_population(**at)
            else:
                with pytest.raises(ValueError, match="batch_size=1, expected at least 2: a batch norm"):
                    new_population(**at)
        assert torch.equal(torch.get_rng_state(), stream)


class Keeps:
    "Is all that a recorder needs of a writer."
    def write(self, rows): pass
    def close(self): pass

def opened(plugins):
    begun(out=(out := tempfile.mkdtemp()), made={})
    return open_fit(f"{out}/digits", plugins=plugins)
def in_session(columns): return Session(new_population("digits", FitConfig(lanes=2, workers=1)), columns=columns)
def recorded(**given): return Recorder(**given).close()
def reported(path): return write_report(path)
def followed(path): return watch(path)
def begun(**given):
    pop = new_population("digits", FitConfig(lanes=2, epochs=1, workers=1))
    return begin_fit(**dict(pop=pop, out=tempfile.mkdtemp()) | given)
def recipe(settings): return get_recipe("digits", settings)
def split(config): return SplitVecEnv(config, 2)

@pytest.mark.parametrize("what, name, right", [
    (find_alarms, "rows", set()), (plot_learning, "rows", set()), (seed_lives, "rows", set()),
    (partial(plot_incidents, []), "ax", {"None"}), (partial(plot_slots, []), "ax", {"None"}),
    (partial(plot_slots, [dict(kind="epoch", lane=i, epoch=0) for i in range(2)]), "lanes", {"None"}),
    (update_rows, "u", set()), (in_session, "columns", {"dict"}), (opened, "plugins", {"None"}),
    (get_recipe, "name", set()), (find_metric, "name", {"text"}),
    (recorded, "writers", set()), (recorded, "keep", {"None"}), (recorded, "queue_size", set()),
    (recorded, "metrics", {"dict"}), (recorded, "clock", {"None", "module"}), (reported, "path", {"text"}),
    (followed, "path", {"text"}), (begun, "pop", set()), (begun, "faults", set()), (begun, "log", set()),
    (begun, "controller", {"None"}), (recipe, "settings", {"None", "dict"}), (split, "config", set()),
    (comparison_text, "c", set()), (plot_compare, "scores", {"dict"}), (register_rule, "row", set()),
    (PolicyPlayer, "learner", set()), (EnvSource, "learner", set()), (session_text, "session", set())],
    ids=lambda v: getattr(v, "__name__", None) or (v if isinstance(v, str) else ""))
def test_what_is_recorded_shown_or_run_is_named_where_it_is_of_another_kind(what, name, right, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for k, odd in ODD.items():
        if k in right: continue
        with pytest.raises(ValueError, match=r"(?s).*expected"): what(**{name: odd})
    assert not any(tmp_path.iterdir())


def test_rows_of_a_folder_that_is_named_and_of_an_iterator_are_told_apart(tmp_path):
    rows = [dict(kind="epoch", lane=i, epoch=0) for i in range(2)]
    assert pick_rows(iter(rows), "epoch", lane=1) == rows[1:] and pick_rows([], "epoch") == []
    with pytest.raises(ValueError, match="rows='runs/digits', expected rows of a run, such as read_rows"):
        pick_rows("runs/digits", "epoch")
    with pytest.raises(ValueError, match="out='', expected a folder"): begun(out="")
    recorded(writers=[Keeps()], keep=np.int64(3), queue_size=0)
