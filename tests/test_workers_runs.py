"The command with lanes in shards: the same run in one process and elsewhere, whatever dies, and nothing left."
import json
import os
import random
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import warm
from test_workers import cluster, descendants, needs_ray, still_there # noqa: F401 (a fixture)
from tiny import timeless

from esper_nb.record import read_checkpoint, read_rows
from esper_nb.run import (
    Comparison, LocalWorker, RepeatStore, RunConfig, SplitVecEnv, WorkerLost, begin_run, command_words, compare_recipe,
    get_recipe, growth_rules, main, open_run, work_off)
from esper_nb.show import EnvSource, watch

pytestmark = pytest.mark.usefixtures("one_thread", "no_pictures")
KILLS, SEED = (int(os.environ.get(f"ESPER_NB_{name}", n)) for name, n in (("KILLS", 2), ("SEED", 0)))
SETTINGS = ("env.num_envs=4", "env.horizon=4", "env.limit=128", "ppo.num_steps=4", "ppo.num_minibatches=2",
            "ppo.update_epochs=1", "save_every=1", "env.blueprints=[\"conv_light\"]")
SMALL = [word for setting in SETTINGS for word in ("--set", setting)]
TRAIN = ("train", "digits_impaired", "--updates", KILLS + 2, "--inject", "nan:3:2", *SMALL, "--quiet", "--shards", 2,
         "--no-exact")
TINY = {"env.num_envs": 2, "env.horizon": 4, "env.limit": 64, "ppo.num_steps": 4, "ppo.num_minibatches": 2,
        "ppo.num_updates": 1, "ppo.update_epochs": 1, "env.blueprints": ["conv_light"]}

def struck(argv, what, at, family):
    "Run the command in a session of its own; at its steps number `at` something dies, a worker a moment later."
    os.setsid()
    luck, killed, timers, step, count = random.Random(str(at)), set(), [], SplitVecEnv.step, 0
    def counted(self, actions):
        nonlocal count
        count += 1
        for timer in timers: timer.join()
        pid = 0 if count == 1 else luck.choice(self.latest).pid
        if at and at[0] <= count and pid not in killed: # or it has just been killed, which is noticed in this step
            at.pop(0)
            family.write_text(json.dumps(descendants(os.getpid())))
            if what == "worker":
                killed.add(pid)
                timers[:] = [threading.Timer(luck.random() * .1, os.kill, (pid, signal.SIGKILL))]
                timers[0].start()
            if what == "driver": os.kill(os.getpid(), signal.SIGKILL)
            if what == "ctrl-c": os.killpg(0, signal.SIGINT)
            if what == "terminate": os.kill(os.getpid(), signal.SIGTERM)
        return step(self, actions)
    SplitVecEnv.step = counted
    return main([*map(str, argv)])


def child(tmp_path, *argv, what="", at=()):
    return warm.run(struck, argv, what, list(at), tmp_path/"family.json", timeout=300 + 150 * KILLS)


def leaves(tree, path=""):
    "Every value of a checkpoint with its place, but for clocks and the random streams of a process, which nobody uses."
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list | tuple) else None
    if pairs is None: return {path: tree}
    def counts(k): return not str(k).startswith("streams") and k not in ("seconds", "cpu_s")
    return {p: x for k, v in pairs if counts(k) for p, x in leaves(v, f"{path}/{k}").items()}


def assert_same_run(one, other):
    for name in ("rows.jsonl", "final.jsonl"): assert timeless(read_rows(one/name)) == timeless(read_rows(other/name))
    a, b = (leaves(read_checkpoint(run/"checkpoint.safetensors")[0]) for run in (one, other))
    assert a.keys() == b.keys() and len(a) > 100
    for k, v in a.items():
        if isinstance(v, torch.Tensor): torch.testing.assert_close(v, b[k], rtol=0, atol=0, equal_nan=True, msg=k)
        else: assert v == b[k] or v != v, k
    assert plays(one/"comparison.json") == plays(other/"comparison.json")


def plays(c):
    c = c if isinstance(c, Comparison) else Comparison.load(c)
    return [p._replace(seconds=0, practice_seconds=0, practice_cpu_s=0) for p in c.plays], c.learned


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    "A run in two shards of one process."
    folder = tmp_path_factory.mktemp("here")
    assert main([*map(str, TRAIN), "--out", str(folder)]) == 0
    return folder/"digits_impaired"


def test_a_run_in_shards_is_stopped_and_goes_on(here, tmp_path):
    run = begin_run(RunConfig.from_dict(json.loads((here/"config.json").read_text())["run"]), tmp_path)
    for update in run.updates():
        if update.update == 2: break
    again = open_run(run.folder.path)
    for update in again.updates(): pass
    assert timeless(again.folder.rows()) == timeless(read_rows(here/"rows.jsonl"))
    assert again.env.batches == again.batches and again.env.away_s == 0
    again.env.close()


def test_the_panel_follows_a_run_in_shards(here):
    session = watch(here).session
    assert session.wait() == "done", session.error
    assert (session.source.lanes, session.steps) == (4, 4 * (KILLS + 2)) # updates of four steps
    assert [(i.lane, i.reason, i.action) for i in session.incidents][:1] == [(3, "non-finite", "rollback")]
    session.close()
    with pytest.raises(ValueError, match="watch"): EnvSource(SimpleNamespace(stream=SimpleNamespace(envs=split_env())))


def split_env():
    env = SplitVecEnv(get_recipe("digits_impaired", TINY).env, shards=2)
    return SimpleNamespace(unwrapped=env, num_envs=env.num_envs)


def test_a_run_in_shards_says_so(here, tmp_path, capsys):
    words = " ".join(command_words(json.loads((here/"config.json").read_text())))
    assert words.endswith("--shards 2 --inject nan:3:2 --no-exact")
    assert main(["report", str(here), "--out", str(tmp_path/"r.html")]) == 0
    assert main(["resume", str(here), "--engine", "rai"]) == 2
    assert "engine='rai', expected one of local, process, ray" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "compare"])
def test_without_ray_the_command_says_what_to_install(command, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main([command, "digits", "--engine", "ray", "--out", str(tmp_path/"x.json")]) == 2
    assert "pip install 'esper_nb[ray]'" in capsys.readouterr().err and not list(tmp_path.iterdir())


# ---- a comparison, seed by seed

@pytest.fixture(scope="module")
def compared(): return compare_recipe(get_recipe("digits_impaired", TINY), (0, 1), (101,))


def interrupted(config, monkeypatch, folder, **kw):
    "A comparison that is interrupted when its first seed is kept, and then begun again: what the second one told."
    class Stopped(RepeatStore):
        def write(self, name, value):
            super().write(name, value)
            if name.startswith("seed"): raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): compare_recipe(config, (0, 1), (101,), store=Stopped(folder, config), **kw)
    assert len(list(folder.glob("seed-*.json"))) == 1
    messages = []
    monkeypatch.setattr(growth_rules, "best_schedule", None) # the search is not repeated either
    result = compare_recipe(config, (0, 1), (101,), say=messages.append, store=RepeatStore(folder, config), **kw)
    return result, messages


@pytest.mark.slow # test_cli stops a comparison, too
@pytest.mark.parametrize("jobs", [None, 2])
def test_a_seed_that_was_played_is_not_played_again(compared, tmp_path, monkeypatch, jobs):
    result, messages = interrupted(get_recipe("digits_impaired", TINY), monkeypatch, tmp_path, jobs=jobs)
    assert plays(result) == plays(compared)
    assert sum("kept from before" in text for text in messages) == 1
    assert len({text.split(",")[0] for text in messages if "test accuracy" in text}) == 1 # one seed was played


def test_what_was_kept_for_other_settings_is_not_used(tmp_path):
    config = get_recipe("digits_impaired", TINY)
    RepeatStore(tmp_path, config).write("seed-0", 1)
    assert RepeatStore(tmp_path, config.replace(seed=4, engine="ray", log=("tensorboard",))).read("seed-0") == 1
    assert RepeatStore(tmp_path, config.replace(shards=2)).read("seed-0") is None
    next(tmp_path.glob("seed-0-*.json")).write_text("{")
    assert RepeatStore(tmp_path, config).read("seed-0") is None


def test_more_losses_than_are_borne_end_a_comparison():
    class Gone(LocalWorker):
        def finish(self, timeout=None): raise WorkerLost("gone")
    def idle(tell): return SimpleNamespace(play=lambda task: None, close=lambda: None)
    with pytest.raises(WorkerLost, match="gone"):
        list(work_off([1], lambda: Gone(idle), "play", 1, losses=1))


# ---- real processes

@pytest.mark.slow
@pytest.mark.parametrize("engine", ["process", pytest.param("ray", marks=needs_ray)])
def test_a_comparison_whose_workers_are_killed_is_the_same(compared, engine, request):
    "At random moments, until ESPER_NB_KILLS have died; one comparison stands five losses."
    if engine == "ray": request.getfixturevalue("cluster")
    luck, killed = random.Random(SEED), set()
    def works(pid):
        try: words = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError: return False
        return words.startswith("ray::_Actor") or "spawn_main" in words
    def kill(over, most):
        while len(killed) < most and not over.wait(luck.uniform(2, 8)):
            there = [pid for pid in descendants(os.getpid()) if works(pid) and pid not in killed]
            if not there: continue
            killed.add(pid := luck.choice(there))
            os.kill(pid, signal.SIGKILL)
    while len(killed) < KILLS:
        over = threading.Event()
        killer = threading.Thread(target=kill, args=(over, min(KILLS, len(killed) + 5)))
        killer.start()
        try: result = compare_recipe(get_recipe("digits_impaired", TINY).replace(engine=engine), (0, 1), (101,), jobs=2)
        finally:
            over.set()
            killer.join()
        assert plays(result) == plays(compared)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["process", pytest.param("ray", marks=needs_ray)])
def test_killed_workers_change_nothing(here, tmp_path, engine):
    """In all updates but two a worker dies at a random moment: ESPER_NB_KILLS in one run.

    Rows, weights, the learner's state and the comparison at the end are those of the run in one process.
    """
    luck = random.Random(SEED)
    at = [4 * update + luck.randrange(4) for update in range(1, KILLS + 1)] # of its steps; 4 in an update
    done = child(tmp_path, *TRAIN, "--engine", engine, "--out", tmp_path, what="worker", at=at)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("was lost (") == KILLS and "Traceback" not in done.stderr, done.stderr
    assert_same_run(tmp_path/"digits_impaired", here)
    assert not still_there(json.loads((tmp_path/"family.json").read_text()))


@pytest.mark.slow
@pytest.mark.long("ctrl-c-130-ray")
@pytest.mark.long("terminate-143-ray")
@pytest.mark.parametrize("what, status, engine", [
    ("driver", -9, "process"), ("ctrl-c", 130, "process"),
    *(pytest.param(*case, "ray", marks=needs_ray)
      for case in (("driver", -9), ("ctrl-c", 130), ("terminate", 143)))])
def test_a_driver_that_ends_leaves_nothing_and_is_resumed(here, tmp_path, what, status, engine):
    run = tmp_path/"digits_impaired"
    done = child(tmp_path, *TRAIN, "--engine", engine, "--out", tmp_path, what=what, at=[10])
    assert done.returncode == status and "Traceback" not in done.stderr, done.stderr
    family = json.loads((tmp_path/"family.json").read_text())
    assert len(family) >= (4 if engine == "ray" else 2) # workers, and Ray's own
    if what != "driver": assert f"esper-nb resume {run}" in done.stderr
    again = child(tmp_path, "resume", run, "--engine", "local", "--quiet")
    assert again.returncode == 0, again.stderr
    assert_same_run(run, here)
    assert not still_there(family, 180) # Ray's agents notice after a minute that a killed driver is gone
