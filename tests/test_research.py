"Finished contests still run: what a fleet could win, a leaderboard, growing against the alternatives."
import itertools

import numpy as np
import pytest
import torch

from esper_nb.control.forecast import Forecast
from esper_nb.run.comparison import Comparison
from research import fleets, frontier
from research.leaderboard import STORED, keep_others

pytestmark = pytest.mark.usefixtures("one_thread")


def test_room_goes_where_it_is_worth_most():
    steps = np.sort(np.random.default_rng(0).random((4, 3)))[:, ::-1] # each step is worth less than the one before
    gain = np.concatenate([np.zeros((4, 1)), steps.cumsum(1)], 1)
    cost = np.tile(np.arange(1, 5), (4, 1))
    for budget in (4, 7, 9, 16, 30):
        at = fleets.share_out(gain, cost, budget)
        ways = [w for w in itertools.product(range(4), repeat=4) if sum(w) + 4 <= budget]
        assert cost[range(4), at].sum() <= budget
        assert gain[range(4), at].sum() == pytest.approx(max(gain[range(4), list(w)].sum() for w in ways))
    assert fleets.share_out(-gain, cost, 30).tolist() == [0] * 4 # what costs more than it brings is not taken


def test_tables_are_judged_by_rules_that_have_not_seen_them(monkeypatch):
    monkeypatch.setattr(fleets, "EPOCHS", 6)
    monkeypatch.setattr(fleets, "STEPS", 2)
    tables = fleets.list_tables(None)
    folds = fleets.fold_of(["a", "b", "b", "c", "d"])
    assert folds[1] == folds[2] and len(set(folds)) == 3
    found = fleets.table_fleets(tables, [fleets.width_curves(t, range(2)) for t in tables])["all tables"]
    whole = {k: rows[-1] for k, rows in found["rules"].items()}
    assert max(whole, key=lambda k: whole[k]["pp"]) == "clairvoyant" and whole["same width"]["room"] == 1
    for k, rows in found["rules"].items():
        assert all(r["room"] <= fleets.BUDGETS[r["budget"]] + 1e-9 for r in rows if r["budget"]), k


def test_plans_of_a_lane_are_one_network_until_they_part():
    s = fleets.play_stream(fleets.DESIGNS["few ask"], 1, 2, 5)
    again = fleets.play_stream(fleets.DESIGNS["few ask"], 2, 2, 5)
    assert (s.changes == again.changes).all() and (s.paid != again.paid).any()
    none, late = (int(np.flatnonzero((fleets.PLANS == p).all(1))[0]) for p in ([0, 0, 0], [0, 0, 3]))
    parted = 3 * fleets.PHASE + 1
    np.testing.assert_allclose(s.loss[:, none, :parted], s.loss[:, late, :parted], rtol=0, atol=1e-6)
    assert (s.loss[:, none, parted:] != s.loss[:, late, parted:]).all()
    assert (fleets.best_plans(s.paid, 0) == none).all()


def test_a_rule_more_leaves_the_leaderboards_others():
    whole = Comparison.load(STORED/"leaderboard.json")
    ridge = whole._replace(plays=tuple(p for p in whole.plays if p.controller == "ridge"), notes=dict(ridge="new"))
    again = keep_others(whole, ridge)
    assert sorted(again.names) == sorted(whole.names) and len(again.plays) == len(whole.plays)
    assert again.notes == whole.notes | dict(ridge="new")
    assert all((again.networks()[k] == pp).all() for k, pp in whole.networks().items())
    more = keep_others(whole, ridge._replace(plays=(ridge.plays[0]._replace(seed=99),)))
    assert len(more.plays) == len(whole.plays) + 1 and more.plays[-1].seed == 99
    assert more.ahead("ridge", "constant") == whole.ahead("ridge", "constant") # paired over what both have played


# --- growing against the alternatives

@pytest.fixture
def few_tables():
    "Two tables to judge and two to practise on, for a short run."
    fields = frontier.table_fields(fleets.list_tables(None), judged=2)
    short = [f._replace(epochs=3, practice=2, sizes=(2, 4), wider=(8,)) for f in fields]
    return [f._replace(others=tuple(o._replace(epochs=3) for o in f.others)) for f in short]


def test_the_largest_tables_are_judged_and_the_others_are_there_to_practise(few_tables):
    assert [f.name for f in few_tables] == ["digits", "breast_cancer"]
    assert all([o.name for o in f.others] == ["wine", "iris"] for f in few_tables)
    rare = fleets.Table("rare", "rare", np.zeros((5000, 2)), np.arange(5000) % 2, rare=True)
    assert len(frontier.table_fields([rare])) == 0
    large = frontier.table_field(rare._replace(x=np.random.default_rng(0).normal(size=(5000, 2)))).load()
    assert sum(map(len, large.y.values())) == frontier.ROWS and .6 < large.num_train / frontier.ROWS < .8
    assert few_tables[1].host(4).base == 4 and few_tables[1].host(4).in_channels == 30


def test_a_forecast_grows_where_it_is_sure_and_only_there(few_tables, monkeypatch):
    field, ways = few_tables[1], frontier.WAYS
    data = field.load()
    def play(way): return frontier.grow.__wrapped__(field, data, 2, ways[way], 2)
    def sure_of(pp): # whatever it sees
        x = np.random.default_rng(0).normal(size=(20, 14))
        forecast = Forecast.fit(x, np.full((20, 1), pp) + 1e-3 * x[:, :1], [""] * 14, [""])
        monkeypatch.setattr(frontier, "practise", lambda field, size: (forecast, {}))
        return play("grown at a third, by forecast")
    def plain(grown): return [{k: v for k, v in n.items() if k != "seconds"} for n in grown.networks]
    assert plain(sure_of(10.)) == plain(play("grown at a third"))
    assert plain(sure_of(-10.)) == plain(play("static"))


def test_a_forecast_practises_on_other_tables(few_tables):
    forecast, spent = frontier.practise(few_tables[0], 2)
    assert spent["networks"] == 2 * 2 * 2 and spent["flops"] > 0 # tables, networks, with seeds and without
    assert len(forecast.errors[0]) == 4 and forecast.arms == ("seeds everywhere",)


def test_a_search_pays_for_all_that_it_trains(few_tables):
    field = few_tables[1]
    data = field.load()
    every = {n: frontier.grow(field, data, n, frontier.WAYS["static"], 2).networks for n in (2, 4, 8)}
    field = field._replace(epochs=4)
    whole = {n: frontier.grow(field, data, n, frontier.WAYS["static"], 2).networks for n in (2, 4, 8)}
    assert frontier.grow(field, data, 4, frontier.WAYS["static, wider"], 2).networks is whole[4] # not again
    searched = frontier.halve(field, data, 2)
    for i, found in enumerate(searched):
        first, own = sum(whole[n][i]["flops"] for n in whole) / 4, whole[found["chosen"]][i]
        assert found["flops"] == pytest.approx(first + own["flops"] * 3 / 4)
        assert {k: found[k] for k in ("test_pp", "parameters")} == {k: own[k] for k in ("test_pp", "parameters")}
    curve = frontier.grow(field, data, 4, frontier.WAYS["static"], 2).curve
    frontier.grow.cache_clear()
    assert frontier.halve(field, data, 2, known=whole) == searched
    part = frontier.grow(field, data, 4, frontier.WAYS["static"], 2, until=1).curve
    assert len(part) == 1 and torch.equal(part, curve[:1])
    both = frontier.averaged([every[2], every[4]])
    assert both[1]["parts_pp"] == [round(every[n][1]["test_pp"], 3) for n in (2, 4)]
    assert both[1]["test_pp"] == pytest.approx(np.mean([every[n][1]["test_pp"] for n in (2, 4)]))
    assert frontier.averaged([every[2]]) is every[2]
