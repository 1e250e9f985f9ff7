"Kinds of your own data x what they must do on the command line: train, go on in a fresh process, refuse what is bad."
import csv
import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import redirect_stdout

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import timeless

from esper_nb.record import read_rows
from esper_nb.run import export_run, get_recipe, main, plugins, write_report
from esper_nb.train import (
    Fault, FitConfig, Task, evaluate, judge_lanes, new_population, read_table_file, run_epoch, task_from_arrays,
    task_from_path)

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = ("env.num_envs=2", "env.horizon=3", "ppo.num_steps=3", "ppo.num_minibatches=1", "ppo.update_epochs=1",
            "save_every=1", "env.workers=1", "env.limit=32", 'env.blueprints=["norm"]')
SMALL = [word for setting in SETTINGS for word in ("--set", setting)]


def write_pictures(place, n=12, classes=("dark", "light")):
    for k, name in enumerate(classes):
        (place/name).mkdir(parents=True)
        for i in range(n): Image.fromarray(np.full((8, 8, 3), 200 * k + i, np.uint8)).save(place/name/f"{i:02}.png")
    return place


def table_lines(n=40): return [["a", "b", "kind"]] + [[i % 7, (i * 13) % 5, "xy"[i % 2]] for i in range(n)]


def write_table(place):
    with open(place, "w", newline="") as file: csv.writer(file).writerows(table_lines())
    return place


def write_parquet(place):
    pandas = pytest.importorskip("pandas", reason="Parquet tables need the extra: pip install 'esper_nb[tables]'")
    pytest.importorskip("pyarrow", reason="Parquet tables need the extra: pip install 'esper_nb[tables]'")
    head, *rows = table_lines()
    pandas.DataFrame(rows, columns=head).to_parquet(place)
    return place


def write_targets(place, n=40):
    "A table with a number that follows from two others, and two labels that do."
    r = np.random.default_rng(0)
    rows = [[a, b, 3e6 + 1e3 * a - 500 * b, int(a > 0), int(a > b)] for a, b in r.normal(size=(n, 2)).round(3).tolist()]
    with open(place, "w", newline="") as file: csv.writer(file).writerows([["a", "b", "price", "big", "more"], *rows])
    return place


def write_text(place):
    place.write_text("the quick brown fox jumps over the lazy dog. " * 120, encoding="utf-8")
    return place


ARRAYS = """
import numpy as np
from esper_nb import register_task, {maker}
r = np.random.default_rng(0)
x, y = r.normal(size=(40, 5)).astype("float32"), np.arange(40) % 2
task = register_task({call})
"""
MAKERS = dict(arrays=("task_from_arrays", 'task_from_arrays(x, y, "own_arrays")'),
              dataset=("task_from_dataset", 'task_from_dataset([(x[i], int(y[i])) for i in range(40)], "own_dataset")'))


def options(kind, folder):
    "What the command is told, and what the run is called."
    folder.mkdir(exist_ok=True)
    if kind in MAKERS:
        maker, call = MAKERS[kind]
        (folder/f"{kind}.py").write_text(ARRAYS.format(maker=maker, call=call))
        return [f"own_{kind}", "--import", folder/f"{kind}.py"], f"own_{kind}"
    write = dict(folder=(write_pictures, "pics"), csv=(write_table, "rows.csv"),
                 parquet=(write_parquet, "rows.parquet"), text=(write_text, "words.txt"),
                 values=(write_targets, "prices.csv"), labels=(write_targets, "traits.csv"))
    make, name = write[kind]
    place = make(folder/name)
    more = dict(folder=["--size", "8"], csv=["--label", "kind"], values=["--target", "values", "--label", "price"],
                labels=["--target", "labels", "--label", "big,more"]).get(kind, [])
    return ["--data", place, *more], place.stem


KINDS = ("folder", "csv", "parquet", "values", "labels", "text", "arrays", "dataset")


def train(kind, tmp, *more):
    asked, name = options(kind, tmp/"data")
    return main([str(word) for word in ("train", *asked, "--updates", 1, *SMALL, "--out", tmp/"runs", *more)]), name


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    "`trained(kind)`: the folder of a run of one update on such data, and what the command printed; made once."
    made, root = {}, tmp_path_factory.mktemp("own")
    def once(kind):
        if kind not in made:
            said = io.StringIO()
            with redirect_stdout(said): status, name = train(kind, root, "--quiet")
            assert status == 0
            made[kind] = root/"runs"/name, said.getvalue()
        return made[kind]
    return once


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_and_goes_on_in_a_fresh_process_exactly(kind, trained, tmp_path):
    run, said = trained(kind)
    assert [r["update"] for r in read_rows(run/"rows.jsonl") if r["kind"] == "update"] == [1]
    assert (run/"controller.safetensors").exists() and "The controller grew networks to" in said
    assert ("R²" in said, "accuracy" in said, " pp" in said) == ((kind == "values",) + (kind != "values",) * 2)
    task = json.loads((run/"config.json").read_text())["run"]["env"]["task"]
    if kind in MAKERS: assert task == f"own_{kind}"
    else: assert "digest=" in task["data"] and (kind not in ("values", "labels") or f"target={kind}" in task["data"])

    here, there = (shutil.copytree(run, tmp_path/name/run.name) for name in ("here", "there"))
    code = "import sys; from esper_nb.run.cli import main; sys.exit(main(sys.argv[1:]))"
    resume = ["resume", "--updates", "2", "--quiet"]
    env = os.environ | dict(OMP_NUM_THREADS="1")
    trust = ["--trust"] * (kind in MAKERS) # such a folder names the file that makes its data
    argv = [sys.executable, "-c", code, *resume, *trust, str(there)]
    done = subprocess.run(argv, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert main([*resume, str(here)]) == 0
    assert timeless(read_rows(here/"rows.jsonl")) == timeless(read_rows(there/"rows.jsonl"))


@pytest.mark.slow
def test_a_report_of_numbers_speaks_of_r2_alone(trained, tmp_path):
    prices, traits = (trained(kind)[0] for kind in ("values", "labels"))
    page = write_report(prices).read_text(encoding="utf-8")
    first = page[page.index('class="lead"'):page.index("<h2>Failures")]
    assert "grew networks to R² " in first and "test R², %" in first and "lowest lane" in first
    assert "accuracy" not in first and "held-out R², %" in page and "held-out accuracy" not in page
    both = write_report([prices, traits], tmp_path/"both.html").read_text(encoding="utf-8")
    assert "test R², median lane, %" in both and "test accuracy, median lane, pp" in both
    assert "scored by R² and accuracy: no order can be said" in both


def cut_parquet(path): path.write_bytes(path.read_bytes()[:200])

bad = dict(folder=(lambda p: (p/"light"/"03.png").write_bytes(b"no picture"), "03.png"),
           csv=(lambda p: p.write_text(p.read_text() + "1,2,x,9\n"), "Expected 3 fields in line 42, saw 4"),
           parquet=(cut_parquet, "rows.parquet"),
           values=(lambda p: p.write_text(p.read_text() + "1,2,dear,0,1\n"), "row 41, column price='dear'"),
           labels=(lambda p: p.write_text(p.read_text() + "1,2,3,0,2\n"), "target more"),
           text=(lambda p: p.write_bytes(b"\xff" * 5000), "no text in UTF-8"))


@pytest.mark.parametrize("kind", bad)
def test_bad_data_are_refused_in_one_line(kind, tmp_path, capsys):
    asked, _ = options(kind, tmp_path/"data")
    corrupt, words = bad[kind]
    corrupt(asked[1])
    assert main([str(word) for word in ("train", *asked, *SMALL, "--out", tmp_path/"runs")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and str(asked[1].name) in error and words in error and not (tmp_path/"runs").exists()


def spoil_plugin(path): path.write_text(path.read_text().replace("np.arange(40) % 2", "np.zeros(40)"))

@pytest.mark.parametrize("kind", MAKERS)
def test_bad_arrays_are_refused_with_the_line_that_made_them(kind, tmp_path, capsys):
    asked, _ = options(kind, tmp_path/"data")
    spoil_plugin(asked[-1])
    assert main([str(word) for word in ("train", *asked, *SMALL, "--out", tmp_path/"runs")]) == 2
    error = capsys.readouterr().err
    assert f"plugin {asked[-1]} cannot be loaded" in error and "at least two" in error and "line " in error


def test_data_that_changed_or_went_away_are_an_error(no_plays, tmp_path, capsys):
    status, name = train("folder", tmp_path, "--quiet")
    assert status == 0
    run, picture = tmp_path/"runs"/name, tmp_path/"data"/"pics"/"light"/"00.png"
    whole = picture.read_bytes()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(picture)
    task_from_path(tmp_path/"data"/"pics", size=8) # forget what was read
    assert main(["resume", str(run), "--updates", "2"]) == 2
    assert "the data have changed since the task was made" in capsys.readouterr().err
    picture.write_bytes(whole)
    task_from_path(tmp_path/"data"/"pics", size=8)
    assert main(["resume", str(run), "--updates", "2", "--quiet"]) == 0
    capsys.readouterr()
    shutil.rmtree(tmp_path/"data"/"pics")
    task_from_path(write_pictures(tmp_path/"others"), size=8) # what was read is kept no longer
    assert main(["resume", str(run), "--updates", "3"]) == 2
    error = capsys.readouterr().err
    assert "is not there, which holds the data of the run" in error and "Traceback" not in error


def test_what_is_asked_for_must_fit_the_data(tmp_path, capsys):
    write_pictures(tmp_path/"pics"), write_text(tmp_path/"words.txt")
    mistakes = [(["train"], "or --data"), (["train", "--data", "nowhere"], "no such folder or file"),
                (["train", "--data", tmp_path/"words.txt", "--size", 8], "--size=8"),
                (["train", "--data", tmp_path/"pics", "--label", "x"], "--label='x'"),
                (["fit"], "or --data"), (["compare"], "or --data")]
    for argv, words in mistakes:
        assert main([*map(str, argv)]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("words, line, found", [
    ("--target values --label prize", "", "'price' perhaps"),
    ("--target labels --label price,big", "", "expected 0 or 1 only; for other numbers say target='values'"),
    ("--target labels --label big,more", "1,2,3,x,1", "row 41, column big='x'"),
    ("--label big,more", "", "column of"),
    ("--label price", "", "say target='values'"),
])
def test_bad_targets_are_refused_by_name(words, line, found, tmp_path, capsys):
    place = write_targets(tmp_path/"prices.csv")
    place.write_text(place.read_text() + line)
    asked = ["train", "--data", place, *words.split(), *SMALL, "--out", tmp_path/"runs"]
    assert main([*map(str, asked)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "prices.csv" in error and found in error and not (tmp_path/"runs").exists()


def test_a_table_may_say_true_and_false(tmp_path):
    place = write_targets(tmp_path/"traits.csv")
    head, *lines = place.read_text().splitlines()
    def words(line):
        *front, big, more = line.split(",")
        return ",".join([*front, *("True" if v == "1" else "false" for v in (big, more))])
    worded = tmp_path/"words.csv"
    worded.write_text("\n".join([head, *map(words, lines)]))
    plain, same = (read_table_file(path, ["big", "more"], target="labels") for path in (place, worded))
    assert torch.equal(plain.y, same.y) and torch.equal(plain.x, same.x)


def test_targets_of_another_kind_are_refused_by_name(tmp_path):
    place = tmp_path/"flat.csv"
    place.write_text("a,b,rain\n" + "1,7,0\n2,7,1\n" * 10)
    with pytest.raises(ValueError, match="columns of classes=2, expected one"):
        task_from_path(place, label=["b", "rain"])
    x = np.arange(40.)[:, None]
    with pytest.raises(ValueError, match="shape of the targets of arrays"):
        task_from_arrays(x, x[:, :, None], target="values")
    with pytest.raises(ValueError, match="say target='values'"): task_from_arrays(x, x[:, 0])


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["values", "labels"])
def test_a_population_with_targets_trains_is_exported_and_says_its_units(kind, tmp_path, capsys):
    words, name = options(kind, tmp_path/"data")
    assert main([*map(str, ["fit", *words, "--set", "lanes=2", "--set", "epochs=3", "--out", tmp_path])]) == 0
    shown = capsys.readouterr().out
    assert ("test R²" in shown and "variances" in shown) if kind == "values" else "test accuracy" in shown
    run = next(p for p in tmp_path.iterdir() if p.name.startswith(name))
    made = export_run(run, tmp_path/"net.pt2")
    said = json.loads((tmp_path/"net.json").read_text())
    assert said["input"]["classes"] == words[-1].split(",") and said["input"]["target"] == kind
    data = Task.from_dict(json.loads((run/"config.json").read_text())["task"]).load()
    y, z = data.y["test"], made.net(made.example).detach() # of raw rows, and values in their own unit
    if kind == "values": z = (z - data.center[0]) / data.unit[0]
    share = (1 - ((z - y)**2).mean() / y.var(correction=0)).clamp(0) if kind == "values" else (
        (z > 0) == y).float().mean()
    assert abs(100 * share - made.accuracy_pp) < 1e-3 and abs(said["test_accuracy_pp"] - made.accuracy_pp) < 1e-6
    if kind == "values": assert 2.9e6 < float(made.net(made.example).detach().mean()) < 3.1e6


TARGET_TASKS = dict(values=lambda r, x: np.stack([x @ r.normal(size=4), 100 * x[:, 0]**2], 1),
                    labels=lambda r, x: np.stack([x[:, 0] > 0, x.sum(1) > 1, x[:, 1] > x[:, 2]], 1))

def target_task(kind):
    r = np.random.default_rng(1)
    x = r.normal(size=(200, 4))
    return task_from_arrays(x, TARGET_TASKS[kind](r, x), f"own_{kind}", target=kind, batch_size=20)


@pytest.mark.parametrize("kind", TARGET_TASKS)
def test_every_lane_learns_targets_as_it_would_alone_and_twice_the_same(kind):
    task = target_task(kind)
    pops = [new_population(task, FitConfig(lanes=n)) for n in (3, 3, 1)]
    for pop in pops:
        for _ in range(4): run_epoch(pop)
    many, again, one = [evaluate(p.model, task, p.data, "test") for p in pops]
    assert all(torch.equal(a, b) for a, b in zip(many, again))
    # other kernels: an answer on the edge of yes and no may be another one
    edge = 1e-2 if kind == "values" else 100 / len(pops[0].data.y["test"]) + 1e-2
    assert torch.allclose(many.loss[:1], one.loss, rtol=1e-3, atol=1e-2)
    assert all(torch.allclose(a[:1], b, rtol=1e-3, atol=edge) for a, b in zip(many[1:], one[1:]))
    last = pops[0].last
    assert last is not None and last.heldout is not None and (last.heldout.loss < pops[0].data.chance_loss).all()
    small = evaluate(pops[0].model, task, pops[0].data, "test", batch_size=7)
    assert torch.allclose(many.loss, small.loss, rtol=1e-5, atol=1e-4)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=edge) for a, b in zip(many[1:], small[1:]))


@pytest.mark.parametrize("kind", TARGET_TASKS)
def test_the_worth_of_a_seed_is_told_in_the_measure_of_the_targets(kind):
    task = target_task(kind)
    pop = new_population(task, FitConfig(lanes=2))
    pop.model.germinate("r0c0", "conv_light", [1], tempo=1)
    pop.model.advance("r0c0", [1])
    run_epoch(pop)
    pop.model.advance("r0c0", [1], force=True)
    for _ in range(2): run_epoch(pop)
    result, worth, gain = judge_lanes(pop.model, task, pop.data)
    assert worth is not None and torch.allclose(worth.accuracy_pp[-1], result.accuracy_pp, atol=1e-4)
    assert gain["r0c0"].isnan().tolist() == [True, False]
    every = evaluate(pop.model, task, pop.data, "heldout")
    assert torch.equal(result.accuracy_pp, every.accuracy_pp) and torch.equal(result.loss, every.loss)
    assert torch.allclose(result.class_pp.mean(1), result.accuracy_pp, atol=1e-3) or (result.class_pp == 0).any()


@pytest.mark.costly
@pytest.mark.parametrize("kind", TARGET_TASKS)
def test_a_ruined_lane_is_rolled_back_and_its_measure_stays_within_bounds(kind):
    task = target_task(kind)
    pop = new_population(task, FitConfig(lanes=2))
    for epoch in range(6): done = run_epoch(pop, disturb=Fault("explode", 1, 4).at(epoch))
    assert done.heldout is not None and all(0 <= a <= 100 for a in done.heldout.accuracy_pp.tolist())
    with torch.no_grad(): next(pop.model.host.parameters()).fill_(torch.nan)
    seen = evaluate(pop.model, task, pop.data)
    assert seen.loss.isnan().all() and all(0 <= a <= 100 for a in seen.accuracy_pp.tolist())
    corrupted = new_population(task, FitConfig(lanes=3))
    done = run_epoch(corrupted, disturb=Fault("corrupt-batch", 2, 0).at(0))
    calm = run_epoch(new_population(task, FitConfig(lanes=3)))
    assert torch.equal(done.train.losses[:, :2], calm.train.losses[:, :2])
    assert not torch.equal(done.train.losses[:, 2], calm.train.losses[:, 2])


def test_a_task_is_a_recipe(tmp_path):
    config = get_recipe(task_from_path(write_pictures(tmp_path/"pics"), size=8), {"env.num_envs": 3})
    assert (config.name, config.env.num_envs, config.ppo.num_steps) == ("pics", 3, 12)
    assert config.plugins == plugins.loaded_plugins()
