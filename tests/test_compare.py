"Scores and their intervals, plays on equal terms, schedules that keep time."
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.stats import trim_mean

from esper_nb.control import QUICK, Choice, Fixed, GrowVecEnv, Heuristic, WaitOnly
from esper_nb.core import bootstrap_interval, interquartile_mean
from esper_nb.learn import Learner, PPOConfig, play, train_ppo
from esper_nb.run import (
    PolicyPlayer, RandomPlayer, RulePlayer, best_schedule, compare_controllers, comparison_text, list_schedules,
    play_lanes, growth_rules, simple_controllers, timetable)
from esper_nb.train import Fault

pytestmark = pytest.mark.usefixtures("one_thread")
numbers = st.floats(-1e6, 1e6)


@settings(deadline=None, max_examples=60)
@given(st.lists(numbers, min_size=1, max_size=30), st.randoms())
def test_interquartile_mean(xs, rng):
    m = float(interquartile_mean(xs))
    assert min(xs) - 1e-6 <= m <= max(xs) + 1e-6
    mixed = list(xs); rng.shuffle(mixed)
    assert float(interquartile_mean(mixed)) == pytest.approx(m, abs=1e-6)
    assert float(interquartile_mean([2 * x + 3 for x in xs])) == pytest.approx(2 * m + 3, abs=1e-5)
    if len(xs) % 4 == 0: assert m == pytest.approx(trim_mean(xs, .25), abs=1e-6)


def test_outliers_do_not_move_it():
    assert float(interquartile_mean([1, 2, 3, 4])) == float(interquartile_mean([-1e9, 2, 3, 1e9])) == 2.5
    with pytest.raises(ValueError, match="at least one"): interquartile_mean([])


def test_the_bootstrap_is_stratified():
    "Runs that agree within every task leave nothing uncertain, however much tasks differ; drawing across tasks would."
    scores = np.tile(np.arange(6.), (5, 1))
    i = bootstrap_interval(scores)
    assert i.low == i.mean == i.high == pytest.approx(2.5)
    g = np.random.default_rng(0)
    i = bootstrap_interval(g.normal(size=(6, 4)))
    assert i.low < i.mean < i.high and i == bootstrap_interval(np.random.default_rng(0).normal(size=(6, 4)))
    assert bootstrap_interval([4., 4., 4.]) == (4, 4, 4) and math.isnan(bootstrap_interval([4.]).high)


def test_more_runs_narrow_it():
    g = np.random.default_rng(3)
    found = [bootstrap_interval(g.normal(size=n)) for n in (8, 80, 800)]
    width = [i.high - i.low for i in found]
    assert width[0] > width[1] > width[2]


def make(**kw): return GrowVecEnv(**(dict(task="digits_impaired", num_envs=4, horizon=6, limit=256, workers=1,
                                        blueprints=("conv_light", "conv_heavy")) | kw))

@pytest.fixture(scope="module")
def env():
    env = make()
    yield env
    env.close()

def fields(p): return p._replace(seconds=0)


class Spy:
    "Waits, and remembers what it was given."
    def begin(self, env):
        self.weights = {k: v.clone() for k, v in env.parts[0][1].model.state_dict().items()}

    def act(self, env): return torch.stack([env.actions.encode(Choice())] * env.num_envs)


def test_all_controllers_get_the_same_networks_whatever_came_before(env):
    first, second = Spy(), Spy()
    alone = play_lanes(env, first, 7)
    play_lanes(env, RandomPlayer(3), 8)
    play_lanes(env, RulePlayer(Heuristic(QUICK)), 7)
    again = play_lanes(env, second, 7)
    assert all(torch.equal(first.weights[k], second.weights[k]) for k in first.weights)
    assert fields(alone) == fields(again) and alone.ops == dict(wait=24)
    other = Spy()
    play_lanes(env, other, 9)
    assert any(not torch.equal(first.weights[k], other.weights[k]) for k in first.weights)


@pytest.mark.slow
def test_order_does_not_matter(env):
    c = simple_controllers()
    a, b = compare_controllers(env, c, [0, 1]), compare_controllers(env, dict(reversed(c.items())), [1, 0])
    def find(r):
        return {(p.controller, p.seed): p._replace(seconds=0, practice_seconds=0, practice_cpu_s=0) for p in r.plays}
    assert find(a) == find(b)
    assert "heuristic" in comparison_text(a) and len(a.plays) == 6
    back, forth = a.difference("wait-only", "heuristic"), a.difference("heuristic", "wait-only")
    assert back.mean == pytest.approx(-forth.mean)


def test_a_rollback_costs_its_penalty_and_one_epoch():
    env = make(faults=(Fault("nan", lane=1, epoch=2),), penalty=7.)
    p, q = play_lanes(env, RulePlayer(WaitOnly()), 5), play_lanes(make(), RulePlayer(WaitOnly()), 5)
    assert p.rollbacks == (0, 1, 0, 0) and p.epochs == (6, 5, 6, 6)
    scores = ("total", "test_accuracy_pp", "heldout_accuracy_pp")
    assert p.total[1] < -5 and all(getattr(p, k)[i] == getattr(q, k)[i] for k in scores for i in (0, 2, 3))
    heuristic = play_lanes(env, RulePlayer(Heuristic(QUICK)), 5)
    assert heuristic.rollbacks == (0, 1, 0, 0)


def test_a_policy_plays_as_it_acts_in_training():
    env = make()
    config = PPOConfig(num_steps=7, num_updates=1, num_minibatches=2, gamma=.99, norm_obs=True)
    learner = Learner(env, config, heads=env.actions)
    for _ in train_ppo(learner): pass
    weights = {k: v.clone() for k, v in learner.policy.state_dict().items()}
    played = play_lanes(env, PolicyPlayer(learner, sampled=False), 1)
    assert all(torch.equal(v, learner.policy.state_dict()[k]) for k, v in weights.items())
    returns = play(learner.policy, make(), episodes=4, seed=1, view=learner.view)
    total, expected = torch.tensor(played.total), torch.tensor(returns, dtype=torch.float64).float()
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)
    one, two = (fields(play_lanes(env, PolicyPlayer(learner, seed=s), 1)) for s in (0, 0))
    assert one == two and one.refused == 0
    with pytest.raises(ValueError, match="slots of the policy"):
        play_lanes(make(slots=("r0c0",)), PolicyPlayer(learner), 1)


def test_the_best_schedule_is_the_one_with_the_best_return(env):
    bad = Fixed({})
    trial = make(num_envs=6, horizon=19, limit=512, reward="outcome")
    found = best_schedule(trial, [1], {"wait": bad, "grow": timetable({"r0c0": "conv_heavy"})})
    assert found.name == "grow" and found.scores["grow"] > found.scores["wait"]
    assert found.epochs == 6 * 19 and found.schedule is not bad
    assert all(set(f.table) <= set(range(40)) for f in list_schedules(trial).values())
    with pytest.raises(ValueError, match="one for each lane"): play_lanes(env, RulePlayer(bad, bad), 0)


def test_a_search_spends_all_its_plays_and_its_finalists_meet_the_same_networks(monkeypatch):
    worth, met = {f"s{k}": Fixed({k: []}) for k in range(57)}, []
    def play(env, player, seed):
        lanes = np.random.default_rng(seed).normal(size=16)     # what is easy in a network is easy for all
        names = [next(k for k, f in worth.items() if f is player.rule(i)) for i in range(16)]
        met.append((seed, names))
        return SimpleNamespace(total=[int(k[1:]) / 10 + x for k, x in zip(names, lanes)], epochs=[1] * 16)
    monkeypatch.setattr(growth_rules, "play_lanes", play)
    monkeypatch.setattr(growth_rules, "kinds_of", lambda env: [0] * 16)
    found = best_schedule(SimpleNamespace(num_envs=16), range(20), worth)
    assert found.name == "s56" and found.epochs == 20 * 16 and len(found.scores) == 57
    assert [len({k for _, names in met[a:b] for k in names}) for a, b in ((0, 6), (6, 13), (13, 20))] == [57, 15, 4]
    square = met[13:17]
    assert len({seed for seed, _ in square}) == 1 and all(len(set(lane)) == 4 for lane in zip(*(n for _, n in square)))
    whole = best_schedule(SimpleNamespace(num_envs=16), range(20), worth, halve=False)
    assert whole.epochs == found.epochs and len({k for _, names in met[20:] for k in names}) == 57
    few = dict(list(worth.items())[:8]) # one play is one rung, though its lanes would do for two
    assert best_schedule(SimpleNamespace(num_envs=16), [1], few).name in few
