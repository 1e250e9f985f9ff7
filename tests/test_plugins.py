"Plugins: a file by --import, an installed package by its entry point, a fresh process, and broken ones."
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import warm

from esper_nb.record import read_rows
from esper_nb.run import load_plugin, main, plugins, seek_in_plugins

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ("env.num_envs=2", "env.horizon=4", "ppo.num_steps=4", "ppo.num_minibatches=1", "ppo.update_epochs=1",
            "save_every=1", "env.workers=1", "env.limit=64")
SMALL = [word for setting in SETTINGS for word in ("--set", setting)]
PLUGIN = """
import torch
from esper_nb import EnvConfig, get_task, register_task
from esper_nb.core.layers import conv2d
from esper_nb.grow.blueprints import blueprint
from esper_nb.run.recipes import get_recipe, register_recipe

register_task(get_task("digits_impaired").replace(name="{name}_task", lr=.02))

@blueprint("{name}_seed", "cnn", 128)
def seed(channels, lanes): return conv2d(channels, channels, 3, lanes, padding=1, bias=False)

@register_recipe
def {name}_recipe():
    config = get_recipe("{name}_task")
    return config.replace(name="{name}_recipe", env=config.env.replace(blueprints=("norm", "{name}_seed")))
"""


def command(*argv, path=()):
    "The command in a process that knows no plugin yet, with some folders on Python's path."
    return warm.run(warm.command, argv, path)


def saved_plugins(run): return json.loads((run/"config.json").read_text())["run"]["plugins"]


def updates(run): return [r["update"] for r in read_rows(run/"rows.jsonl") if r["kind"] == "update"]


@pytest.mark.slow
def test_a_file_is_remembered_by_its_run_and_may_move(tmp_path):
    plugin, run = tmp_path/"mine.py", tmp_path/"runs"/"mine_recipe"
    plugin.write_text(PLUGIN.format(name="mine"))
    done = command("train", "mine_recipe", "--import", plugin, "--updates", 1, *SMALL, "--out", tmp_path/"runs")
    assert done.returncode == 0, done.stderr
    assert saved_plugins(run) == [str(plugin)]
    done = command("resume", run, "--trust", "--updates", 2)
    assert done.returncode == 0 and updates(run) == [1, 2], done.stderr
    assert command("report", run).returncode == 0
    moved = tmp_path/"elsewhere.py"
    plugin.rename(moved)
    lost = command("resume", run, "--trust", "--updates", 3)
    assert lost.returncode == 2 and "Traceback" not in lost.stderr
    assert f"plugin {plugin} cannot be loaded" in lost.stderr and "with --import" in lost.stderr
    done = command("resume", run, "--trust", "--updates", 3, "--import", moved)
    assert done.returncode == 0 and updates(run) == [1, 2, 3], done.stderr
    assert saved_plugins(run) == [str(moved)]


@pytest.mark.slow
def test_the_processes_of_a_comparison_know_it(tmp_path):
    plugin = tmp_path/"mine.py"
    plugin.write_text(PLUGIN.format(name="mine"))
    code = "import sys; from esper_nb.run.cli import main; sys.exit(main(sys.argv[1:]))"
    words = ["compare", "mine_recipe", "--import", plugin, "--updates", 1, *SMALL, "--seeds", 2, "--jobs", 2,
             "--set", "env.blueprints=mine_seed", "--out", tmp_path/"c.json"]
    env = os.environ | dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert {p["seed"] for p in json.loads((tmp_path/"c.json").read_text())["plays"]} == {0, 1}


PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "garden-of-seeds"
version = "1.0"
[project.entry-points."esper_nb.plugins"]
garden = "garden_of_seeds"
{more}
[tool.setuptools]
py-modules = ["garden_of_seeds"]
"""


def install(folder, more):
    "A real distribution, built and installed into a folder of its own."
    source, target = folder/"source", folder/"site"
    source.mkdir()
    (source/"pyproject.toml").write_text(PROJECT.format(more=more))
    (source/"garden_of_seeds.py").write_text(PLUGIN.format(name="garden"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
           "--disable-pip-version-check", "--target", str(target), str(source)]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.slow
def test_an_installed_package_is_found_by_the_names_it_brings(tmp_path):
    site, run = install(tmp_path, 'withered = "garden_of_weeds"'), tmp_path/"runs"/"garden_recipe"
    plain = command("train", "digits_impaired", "--updates", 1, *SMALL, "--out", tmp_path/"runs", path=[site])
    assert plain.returncode == 0 and "plugin" not in plain.stderr # nobody asked for it: nothing is loaded
    assert saved_plugins(tmp_path/"runs"/"digits_impaired") == []
    done = command("train", "garden_recipe", "--updates", 1, *SMALL, "--out", tmp_path/"runs", path=[site])
    assert done.returncode == 0, done.stderr
    assert saved_plugins(run) == ["esper_nb.plugins:garden"]
    done = command("resume", run, "--trust", "--updates", 2, path=[site])
    assert done.returncode == 0 and updates(run) == [1, 2], done.stderr
    listed = command("tasks", path=[site])
    assert listed.returncode == 0 and "garden_task" in listed.stdout
    assert "plugin esper_nb.plugins:withered cannot be loaded: ModuleNotFoundError" in listed.stderr
    shutil.rmtree(site)
    lost = command("resume", run, "--trust", "--updates", 3)
    assert lost.returncode == 2 and "no installed package offers it" in lost.stderr and "Traceback" not in lost.stderr


@pytest.mark.parametrize("plugin", ["", ".", "..", "/tmp", "my_folder/", "my-tasks", "tasks.", "esper_nb.plugins:"])
def test_what_is_no_plugin_is_refused_with_what_is_one(plugin, capsys):
    with pytest.raises(ValueError, match=f"plugin='{plugin}', expected a file such as my_task.py"): load_plugin(plugin)
    assert main(["tasks", "--import", plugin]) == 2
    assert f"plugin='{plugin}', expected a file" in capsys.readouterr().err


def test_a_broken_package_breaks_no_command(tmp_path, monkeypatch, capsys):
    info = tmp_path/"site"/"garden_of_seeds-1.0.dist-info" # what pip leaves of an installed package
    info.mkdir(parents=True)
    (info/"METADATA").write_text("Metadata-Version: 2.1\nName: garden-of-seeds\nVersion: 1.0\n")
    (info/"entry_points.txt").write_text("[esper_nb.plugins]\ngarden = garden_of_seeds\n")
    (tmp_path/"site"/"garden_of_seeds.py").write_text("raise SystemExit('not for you')\n")
    monkeypatch.syspath_prepend(tmp_path/"site")
    assert main(["fit", "digits", "--set", "lanes=1", "--set", "epochs=1", "--out", str(tmp_path/"runs")]) == 0
    assert "garden" not in capsys.readouterr().err
    assert main(["train", "digit", "--out", str(tmp_path/"runs")]) == 2
    said = capsys.readouterr().err
    assert "'digits' perhaps" in said and "Traceback" not in said and "garden_of_seeds.py, line 1" in said
    assert "plugin esper_nb.plugins:garden cannot be loaded: SystemExit: not for you" in said


def test_a_plugin_is_imported_once_whatever_it_is_called(tmp_path, monkeypatch):
    (tmp_path/"counts.py").write_text("import builtins\nbuiltins.counted = getattr(builtins, 'counted', 0) + 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plugins, "_loaded", {})
    import builtins
    try:
        names = {load_plugin(p) for p in ("counts.py", tmp_path/"counts.py", str(tmp_path/"." /"counts.py"))}
        assert names == {str(tmp_path/"counts.py")} and builtins.counted == 1
    finally: del builtins.counted


def test_the_plugin_of_that_name_is_asked_first(monkeypatch):
    found, asked = [], []
    monkeypatch.setattr(plugins, "_loaded", {})
    offered = dict.fromkeys(["esper_nb.plugins:a", "esper_nb.plugins:b"])
    monkeypatch.setattr(plugins, "installed_plugins", lambda: offered)
    monkeypatch.setattr(plugins, "load_plugin", lambda p: (asked.append(p), found.append("b")))
    assert seek_in_plugins("b", lambda name: name in found) and asked == ["esper_nb.plugins:b"]
