"A forecast where somebody who grows by hand looks: in the status, the rows, the panel and the report."
import numpy as np
import pytest

from esper_nb import Dashboard, FitConfig, SeedForecast, Session, fit, new_population, play_seeds, write_report

pytestmark = pytest.mark.usefixtures("one_thread")
SEEDS = (("r0c0", "conv_heavy"), ("r0c0", "norm"))
CONFIG = FitConfig(lanes=2, epochs=3, workers=1)


def known(worth=(11., 2.), spread=4.): # says the same of every network of the task
    looks = np.random.default_rng(0).normal(size=(40, 14))
    errors = spread * np.tile([1., -1.], 20)
    return SeedForecast.fit(looks, np.array(worth) + errors[:, None], SEEDS)


def test_a_forecast_stands_in_status_rows_panel_and_report(tmp_path):
    pytest.importorskip("anywidget")
    pop = new_population("digits_impaired", CONFIG)
    pop.forecaster = known()
    assert not pop.status().forecasts
    session = Session(pop, root=str(tmp_path))
    session.step(1).wait()
    assert session.wait() == "paused", session.error
    best = pop.would_help(1)[0]
    assert (best.slot, best.blueprint, round(best.within_pp)) == ("r0c0", "conv_heavy", 4)
    before = pop.model.parameter_counts().total[1]
    assert f"lane 1: {best.text}" in repr(pop.status()) and best.text in pop.status()._repr_markdown_()
    assert pop.status(0).forecasts == [f"lane 0: {pop.would_help(0)[0].text}"]

    rows = [r for r in session.history.recorder.rows if r["kind"] == "forecast"]
    assert len(rows) == 2 * len(SEEDS) and {r["epoch"] for r in rows} == {0}
    mine = next(r for r in rows if r["lane"] == 1 and r["forecast.blueprint"] == "conv_heavy")
    assert mine["forecast.worth_pp"] == best.worth_pp and mine["slot"] == "r0c0"

    board = Dashboard(session, lane=1)
    board.widget()
    board.panel.seeds.refresh()
    assert "Where would it help?" in board.panel.seeds.says.value and best.text in board.panel.seeds.says.value
    session.seed("germinate", lane=1, slot="r0c0", blueprint="conv_heavy").wait()
    board.panel.seeds.refresh()
    assert "help?" not in board.panel.seeds.says.value # it is there already
    assert pop.model.parameter_counts().total[1] - before == best.parameters

    session.step(1).wait()
    session.wait()
    session.save().wait()
    page = write_report(session.folder.path).read_text(encoding="utf-8")
    section = page.partition("Where a seed would help")[2].partition("<h2>")[0]
    assert f"{best.worth_pp:.0f} ± {best.within_pp:.0f}" in section
    assert section.count(">yes<") == section.count(">no<") == 1 # lane 1 has grown it, lane 0 has not
    board.close()
    session.close()


def test_a_forecaster_speaks_once_of_lanes_where_nothing_grows():
    pop = new_population("digits_impaired", CONFIG)
    pop.forecaster = known()
    pop.model.germinate("r0c2", "norm", 0)
    assert [{w.lane for w in r.forecast} for r in fit(pop)] == [{1}, set(), set()]


@pytest.mark.slow
def test_what_seeds_are_worth_is_played_to_the_end():
    looks, worth = play_seeds("digits_impaired", SEEDS, CONFIG.replace(epochs=5, lanes=4), plays=1)
    assert looks.shape == (4, 2 + 4 * 3) and worth.shape == (4, 2) # loss, accuracy, four signals of three slots
    assert np.isfinite(looks).all()
    assert worth[:, 0].mean() > worth[:, 1].mean() + 5 # windows are what this host lacks
    with pytest.raises(ValueError, match="look=5, expected below 5"): play_seeds("digits_impaired", SEEDS,
                                                                                CONFIG.replace(epochs=5), look=5)
