"What a newcomer tries first works, or the error names the next step."
import copy
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from esper_nb import (
    FitConfig, Governor, GrowEnv, GrowVecEnv, Heuristic, Learner, LoopSource, PolicyPlayer, PPOConfig, Session,
    as_controller, begin_fit, begin_run, compare_controllers, evaluate, explore_host, export_model, fit, new_population,
    read_rows, run_epoch, task_from_arrays, task_from_dataset, task_from_folder)
from esper_nb.core import Range
from esper_nb.run import main

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
        (lambda: as_controller(Heuristic), "such as Heuristic()"),
        (lambda: pop.model.germinate("r0c0", "norm", blend="multiply"), "expected one of Blend.ADD, Blend.MULTIPLY"),
        (lambda: task_from_arrays(x, np.zeros((9, 16, 16))), "at every pixel, attach_slots grows a network in a loop"),
        (lambda: task_from_arrays(x[:, :, :4], y), "host=ModuleHostConfig(Net, slots=..., reads='BCL')"),
        (lambda: task_from_dataset([{"x": 1., "y": 2}]), "dictionary of x, y, expected a pair"),
        (lambda: task_from_dataset(DataLoader(list(zip(x, y)))), "of a DataLoader take its .dataset"))
    for attempt, said in wrong:
        with pytest.raises(ValueError, match=re.escape(said)): attempt()
    assert list(tmp_path.iterdir()) == []


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
    env = GrowVecEnv(task="digits", num_envs=2, horizon=2, limit=64)
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


def test_rows_are_read_from_the_folder_of_a_run(tmp_path):
    run = begin_fit(new_population("digits", FitConfig(lanes=2, epochs=1, workers=1)), tmp_path)
    assert len(list(run.epochs())) == 1
    assert read_rows(tmp_path/"digits") == read_rows(tmp_path/"digits"/"rows.jsonl") != []


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
