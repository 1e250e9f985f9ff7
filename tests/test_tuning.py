"The study of the Optuna page: pruned by what runs record, and the same every time."
import json
from pathlib import Path

import pytest

optuna = pytest.importorskip("optuna", reason="the page needs the extra: pip install 'esper_nb[optuna]'")
PAGE = Path(__file__).resolve().parents[1]/"nbs"/"tutorials"/"tune_with_optuna.ipynb"
pytestmark = pytest.mark.usefixtures("one_thread")


def definitions():
    "What the page defines; no study is run."
    space = {"__name__": "__main__"} # where Ray takes a function along
    for cell in json.loads(PAGE.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and not source.startswith("#"): exec(source, space)
    return space


def trials_of(study): return [(t.state.name, t.params, list(t.intermediate_values.values())) for t in study.trials]


@pytest.mark.slow
def test_two_studies_are_one():
    page = definitions()
    page["EPOCHS"] = 5
    one, two = (page["new_study"](4) for _ in range(2))
    assert trials_of(one) == trials_of(two)
    assert {name for name, *_ in trials_of(one)} <= {"COMPLETE", "PRUNED"}
    done = [values for name, _, values in trials_of(one) if name == "COMPLETE"]
    assert all(len(values) == 5 for values in done) and one.best_value == max(values[-1] for values in done)


def test_a_trial_that_falls_behind_is_ended_with_what_it_had():
    page = definitions()
    page["EPOCHS"] = 5
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.ThresholdPruner(lower=101))
    study.optimize(page["objective"], n_trials=1)
    trial, = study.trials
    assert trial.state == optuna.trial.TrialState.PRUNED and len(trial.intermediate_values) == 1


@pytest.mark.slow
def test_a_study_in_a_file_is_spread_over_workers_and_goes_on_after_an_interruption(tmp_path):
    ray = pytest.importorskip("ray", reason="workers need the extra: pip install 'esper_nb[ray]'")
    page, journal = definitions(), tmp_path/"grown.journal"
    page["EPOCHS"] = 5
    page["Worker"]().work(journal, 2, 0)
    before = page["ended_in"](page["open_study"](journal))
    assert len(before) == 2
    try: study = page["spread"](journal, 4)
    finally: ray.shutdown()
    ended = page["ended_in"](study)
    assert 4 <= len(ended) <= 5 # the other worker was in the midst of one
    assert [t.params for t in ended[:2]] == [t.params for t in before]
    assert all(t.intermediate_values for t in ended)
    done = next(t for t in ended if t.state.name == "COMPLETE")
    assert page["grown"](**done.params)[1] == done.value # as it would have been here
