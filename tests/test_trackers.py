"A run in the trackers people have, the real packages where they are installed, offline."
import importlib
import json
import sys

import pytest

from esper_nb.record import MLflowWriter, TrackioWriter, WandbWriter, make_rows, metrics_by_step
from esper_nb.run import main, open_run

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = [w for s in ("env.num_envs=2", "env.horizon=3", "ppo.num_steps=3", "ppo.num_minibatches=1", "env.limit=64",
                     "env.workers=1", "save_every=1", 'env.blueprints=["norm"]') for w in ("--set", s)]
ROWS = [row for t in range(3) for row in make_rows("epoch", {"train.loss": [1. / (t + 1), .5], "lr": .1}, epoch=t)]


def need(name):
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install 'esper_nb[{name}]'")


def test_one_message_a_step():
    steps = metrics_by_step(ROWS)
    assert list(steps) == [0, 1, 2] and steps[1].numbers == {"train.loss/lane0": .5, "train.loss/lane1": .5, "lr": .1}


def test_mlflow_holds_what_was_logged_and_goes_on(tmp_path, monkeypatch):
    mlflow = need("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for rows in (ROWS[:4], ROWS[4:]): # two processes, one run
        writer = MLflowWriter(tmp_path)
        writer.write(rows)
        writer.close()
    client = mlflow.tracking.MlflowClient(f"sqlite:///{tmp_path/'mlflow.db'}")
    run, = client.search_runs([client.get_experiment_by_name("esper_nb").experiment_id])
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "train.loss/lane0")] == [
        (0, 1.), (1, .5), (2, pytest.approx(1 / 3))]
    assert run.info.status == "FINISHED" and mlflow.active_run() is None


def test_wandb_writes_offline_and_goes_on_under_its_number(tmp_path, monkeypatch):
    need("wandb")
    for name in ("WANDB_MODE", "WANDB_PROJECT"): monkeypatch.delenv(name, raising=False)
    ids = []
    for rows in (ROWS[:4], ROWS[4:]):
        writer = WandbWriter(tmp_path)
        ids.append(writer.run.id)
        writer.write(rows)
        writer.close()
    assert ids[0] == ids[1] == (tmp_path/"wandb.id").read_text()
    files = list((tmp_path/"wandb").glob("offline-run-*/*.wandb"))
    assert files and b"train.loss/lane1" in b"".join(f.read_bytes() for f in files)


def test_trackio_holds_what_was_logged(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path/"store"))
    trackio = need("trackio")
    writer = TrackioWriter(tmp_path)
    writer.write(ROWS)
    writer.close()
    run, = trackio.Api().runs("esper_nb")
    assert run.name == (tmp_path/"trackio.id").read_text()


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_run_tells_its_tracker_and_still_does_when_it_goes_on(name, no_plays, tmp_path, monkeypatch, capsys):
    need(name)
    for k in ("MLFLOW_TRACKING_URI", "WANDB_MODE"): monkeypatch.delenv(k, raising=False)
    asked = ["train", "digits_impaired", "--updates", "1", *SMALL, "--log", name, "--quiet", "--out", str(tmp_path)]
    assert main(asked) == 0, capsys.readouterr().err
    run = tmp_path/"digits_impaired"
    assert json.loads((run/"config.json").read_text())["run"]["log"] == [name]
    def size(): return sum(p.stat().st_size for p in run.rglob("*") if p.is_file() and name in str(p.relative_to(run)))
    before = size()
    assert before > 0 and main(["resume", str(run), "--updates", "2", "--quiet"]) == 0
    assert size() > before and open_run(run).config.log == (name,)


def test_a_tracker_that_fails_costs_its_rows_and_no_training(no_plays, tmp_path, monkeypatch, recwarn):
    from esper_nb.record import writers
    class Dead(writers.Tracker):
        def __init__(self, folder): pass
        def log(self, step, steps): raise OSError("the network is gone")
    monkeypatch.setattr(writers, "TRACKERS", {"tensorboard": Dead})
    need("tensorboard")
    asked = ["train", "digits_impaired", "--updates", "1", *SMALL, "--log", "tensorboard", "--quiet"]
    assert main([*asked, "--out", str(tmp_path)]) == 0
    assert (tmp_path/"digits_impaired"/"checkpoint.safetensors").exists()


@pytest.mark.parametrize("command", ["train", "fit"])
def test_a_missing_package_is_told_before_the_run_has_a_folder(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main([command, "digits", "--log", "wandb", "--out", str(tmp_path/"runs")]) == 2
    assert "pip install 'esper_nb[wandb]'" in capsys.readouterr().err and not (tmp_path/"runs").exists()
    assert importlib.import_module("esper_nb.record.writers").TRACKERS.keys() == {
        "tensorboard", "wandb", "mlflow", "trackio"}


def test_a_fit_tells_its_tracker_too(tmp_path, capsys):
    event_files = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="no tensorboard")
    asked = ["fit", "digits", "--set", "lanes=2", "--set", "epochs=2", "--log", "tensorboard", "--out", str(tmp_path)]
    assert main(asked) == 0, capsys.readouterr().err
    folder = next((tmp_path/"digits").rglob("*tfevents*")).parent
    events = event_files.EventAccumulator(str(folder))
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("heldout.accuracy_pp")]
    assert tags and all(len(events.Scalars(tag)) == 2 for tag in tags)
