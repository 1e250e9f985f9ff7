"A fit that is stopped, by a signal or a kill, goes on with the numbers of one that was never stopped."
import os
import random
import signal
import time
from functools import cache, partial

import pytest
import torch
import warm
from safetensors.torch import load_file
from tiny import timeless

from esper_nb.grow import Decision
from esper_nb.record import RunFolder, read_checkpoint
from esper_nb.run import Comparison, begin_fit, fit_run, main, open_fit
from esper_nb.show import plot_run
from esper_nb.train import Fault, FitConfig, get_task, lane_span, new_population

pytestmark = pytest.mark.usefixtures("one_thread", "no_pictures")
SMALL = FitConfig(lanes=2, epochs=5, workers=1)
# the second fault's rollback goes back to a state that was taken before the stop
FAULTS = (Fault("nan", lane=0, epoch=1, batch=1), Fault("nan", lane=1, epoch=3))


class Gardener:
    "Germinate at one epoch, advance when the gate opens, and count the calls: a controller with a state."
    def __init__(self, number=0): self.calls, self.number = 0, number # of a signal that comes in the second epoch
    def state_dict(self): return dict(calls=self.calls)
    def load_state_dict(self, state): self.calls = state["calls"]
    def __call__(self, pop, last):
        self.calls += 1
        if self.calls == 2 and self.number: signal.raise_signal(self.number)
        assert (last is None) == (self.calls == 1), "the latest result is there, after a stop, too"
        if self.calls == 2: return [Decision("germinate", pop.model.names[0], "conv_light")] * pop.lanes
        return [Decision("advance", pop.model.names[0])] * pop.lanes if self.calls > 2 else [None] * pop.lanes


def small(**changes): return new_population("digits", SMALL.replace(**changes), data=few())

@cache
def few(): return get_task("digits").load("cpu", None, 256)

def begun(path, number=0): return begin_fit(small(), path, FAULTS, Gardener(number))

def same(a, b):
    x, y = (run.population.model.state_dict() for run in (a, b))
    return timeless(a.folder.rows()) == timeless(b.folder.rows()) and all(torch.equal(x[k], y[k]) for k in x)

def again(run): return open_fit(run.folder.path, small(), Gardener())

@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "A fit that nothing happened to."
    run = begun(tmp_path_factory.mktemp("whole"))
    reports = [report for result in run.epochs() for report in result.reports]
    assert sum(report.rolled_back for report in reports) >= 2
    return run


slow = partial(pytest.param, marks=pytest.mark.slow)

@pytest.mark.parametrize("edge", [2, slow(1), slow(3), slow(4)])
def test_a_fit_that_is_left_goes_on_exactly(whole, tmp_path, edge):
    "Between any two epochs: before a germination and after, before a fault and after the rollback."
    run = begun(tmp_path)
    for result in run.epochs():
        if result.epoch + 1 == edge: break
    resumed = again(run)
    assert len([*resumed.epochs()]) == SMALL.epochs - edge
    assert same(resumed, whole) and resumed.finished

@pytest.mark.parametrize("number", [signal.SIGTERM, slow(signal.SIGINT)])
def test_a_signal_waits_for_the_end_of_the_epoch(whole, tmp_path, number, plain_signals):
    run, status = begun(tmp_path, number), None
    try: done = len([*run.epochs()])
    except SystemExit as e: status, done = e.code, len(run.rates)
    assert (status, done) == (128 + number if number == signal.SIGTERM else None, 2)
    resumed = again(run)
    assert len([*resumed.epochs()]) == 3 and same(resumed, whole)

def test_an_epoch_that_was_cut_off_is_trained_anew(whole, tmp_path):
    "A second Ctrl-C, or an error: the checkpoint before the epoch stands."
    run = begun(tmp_path)
    record = run.record
    def cut(rows):
        record(rows)
        if len(run.rates) == 2: raise KeyboardInterrupt
    run.record = cut
    with pytest.raises(KeyboardInterrupt): list(run.epochs())
    resumed = again(run)
    list(resumed.epochs())
    assert same(resumed, whole)

def test_only_the_folder_of_a_fit_and_its_own_population_are_opened(whole, tmp_path):
    folder = whole.folder.path
    with pytest.raises(ValueError, match="made in Python"): open_fit(folder)
    other = small(seed=1)
    with pytest.raises(ValueError, match="fit.seed: saved 0, here 1"): open_fit(folder, other, Gardener())
    assert read_checkpoint(folder/"checkpoint.safetensors")[0]["progress"]["finished"]

def test_the_command_goes_on_and_says_what_it_cannot_change(tmp_path, capsys):
    settings = SMALL.replace(epochs=2, lanes=1)
    pop, folder = fit_run("digits", settings, out=tmp_path/"a", progress=False)
    capsys.readouterr()
    assert main(["resume", str(folder.path), "--quiet"]) == 0
    assert "all 2 epochs are trained" in capsys.readouterr().out
    assert main(["resume", str(folder.path), "--updates", "9"]) == 2
    assert "this run is a fit, which ends with the epochs that it began with" in capsys.readouterr().err
    run = begin_fit(new_population("digits", settings), tmp_path/"b", made={})
    for _ in run.epochs(): break
    assert main(["resume", str(run.folder.path), "--quiet"]) == 0
    assert "1, each" in capsys.readouterr().out
    (ours, weights), (rows, expected) = map(end_of, (run.folder.path, folder.path))
    assert ours == rows and all(torch.equal(weights[k], v) for k, v in expected.items())


# --- real kills

SIZES = [word for s in ("env.num_envs=4", "env.horizon=4", "env.limit=128", "ppo.num_steps=4", "ppo.num_minibatches=1",
                        "env.blueprints=[\"conv_light\"]") for word in ("--set", s)]
RESUME = ["resume", "{}", "--quiet"]
COMMANDS = { # what is killed, what goes on with it, and the file that grows while it works
    "fit": (["fit", "digits", "--set", "lanes=3", "--set", "epochs=8", "--set", "workers=1", "--inject", "nan:0:2",
             "--inject", "lobotomy:1:4", "--inject", "explode:2:6", "--quiet"], RESUME, "rows.jsonl"),
    "train": (["train", "digits_family", *SIZES, "--set", "save_every=1", "--updates", "8", "--inject", "nan:1:5",
               "--comparison", "0", "--quiet"], RESUME, "rows.jsonl"),
    "compare": (["compare", "digits_impaired", *SIZES, "--updates", "1", "--rules", "wait,random", "--seeds", "6"],
                None, "x.seeds")}

def started(words, folder):
    "Start the command in a process of its own."
    out = {"compare": folder/"x.json", "resume": None}.get(words[0], folder.parent)
    words = [word.format(folder) for word in words] + ([] if out is None else ["--out", str(out)])
    return warm.begin(warm.command, words)

def end_of(folder):
    "Return rows without the clock and weights, or plays without it."
    if (folder/"x.json").exists():
        plays = Comparison.load(folder/"x.json").plays
        return [p._replace(seconds=0, practice_seconds=0, practice_cpu_s=0) for p in plays], {}
    weights = next(folder.glob("weights.safetensors"), folder/"controller.safetensors")
    return timeless(RunFolder(folder).rows()), load_file(weights)

def written(path):
    "Count the bytes of a file, or the files of a folder."
    if path.is_dir(): return len([*path.glob("*.json")])
    return path.stat().st_size if path.exists() else 0

@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("what", COMMANDS)
def test_kills_at_any_moment_change_nothing(tmp_path, what):
    "Four kills, or ESPER_NB_KILLS in the environment; ESPER_NB_SEED draws other moments."
    kills, chance = int(os.environ.get("ESPER_NB_KILLS", 4)), random.Random(int(os.environ.get("ESPER_NB_SEED", 0)))
    begin, go_on, growing = COMMANDS[what]
    def folder(run):
        path = tmp_path/str(run)/begin[1]
        (path if what == "compare" else path.parent).mkdir(parents=True)
        return path
    process, whole = started(begin, at := folder("whole")), at
    process.join()
    assert process.exitcode == 0
    expected, done, runs, seen = end_of(whole), 0, 0, []
    while done < kills:
        at, runs = folder(runs), runs + 1
        process, grown = started(begin, at), at/growing
        while done < kills:
            before, early = written(grown), chance.random() < .2 # now and then before it has begun to train
            while process.is_alive() and not grown.exists(): time.sleep(.02)
            while process.is_alive() and written(grown) in (0, before) and not early: time.sleep(.02)
            time.sleep(chance.uniform(0, 1.5))
            if not process.is_alive(): break
            process.kill() # -9, at any moment: in an epoch, in a checkpoint, in the rows
            process.join()
            done += 1
            seen.append(written(grown))
            process = started(go_on or begin, at)
        process.join()
        assert process.exitcode == 0
        ours, weights = end_of(at)
        assert ours == expected[0] and all(torch.equal(weights[k], t) for k, t in expected[1].items())
    print(f"{done} kills of {what} in {runs} runs, when {seen} bytes or files were written: all ends equal")

def test_metrics_of_ones_own_are_rows_that_a_report_draws(tmp_path):
    run = begin_fit(new_population("digits", SMALL.replace(epochs=2)), tmp_path)
    with pytest.raises(RuntimeError, match="in a loop over"): run.log(gap=1.)
    for result in run.epochs():
        run.log(gap=result.heldout.loss, lr=.5)
        with pytest.raises(ValueError, match="one of each of the 2 lanes"): run.log(gap=[1., 2., 3.])
    rows = [r for r in run.folder.rows() if r["kind"] == "metric"]
    assert [(r["step"], r["lane"]) for r in rows] == [(20, None), (20, 0), (20, 1), (40, None), (40, 0), (40, 1)]
    heldout = {(r["epoch"], r["lane"]): r["heldout.loss"] for r in run.folder.rows() if "heldout.loss" in r}
    assert all(r["own.gap"] == pytest.approx(heldout[r["epoch"], r["lane"]]) for r in rows if r["lane"] is not None)
    names = [ax.get_ylabel() for ax in plot_run(run.folder.rows()).axes]
    assert names[3:] == ["own lr", "own gap"]


def test_the_command_of_a_fit_says_all_of_it_or_is_not_given(tmp_path):
    def words(made=None, **given): return begin_fit(small(), tmp_path, made=made, **given).folder.config()["command"]
    plain, ruin = words(made={}), [Fault("drift", lane=0, epoch=2), Fault("nan", lane=1, epoch=3)]
    def more(**given): return [word for word in words(**given) if word not in plain] # which has plugins of the process
    assert plain[:3] == ["esper-nb", "fit", "digits"]
    assert more(made={}, faults=ruin) == ["--inject", "drift:0:2", "--inject", "nan:1:3"]
    assert more(made=dict(synthetic=True)) == ["--synthetic"]
    assert [words(made={}, faults=FAULTS), words(made={}, controller=Gardener()), words()] == [None] * 3


def test_the_median_of_an_even_number_of_networks_lies_between_the_two_in_the_middle(tmp_path, capsys):
    pop, folder = fit_run("digits", FitConfig(lanes=2, epochs=1, workers=1), out=tmp_path, progress=False)
    pair = [r["test.accuracy_pp"] for r in folder.rows() if "test.accuracy_pp" in r]
    assert pair[0] != pair[1] and f"median {sum(pair) / 2:.1f}, min {min(pair):.1f}" in capsys.readouterr().out
    assert "median 3.5, 1.0 to 6.0" in lane_span(torch.arange(1., 7.))
