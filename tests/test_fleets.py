"What a fleet could win, and a leaderboard to which a rule is added."
import itertools

import numpy as np
import pytest

from benchmarks import fleets
from benchmarks.leaderboard import STORED, keep_others
from esper_nb.run.comparison import Comparison

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
