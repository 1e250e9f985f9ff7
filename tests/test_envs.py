"Training runs as an environment: episodes, rollbacks, seed keys, exactness, and agents from elsewhere."

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from test_vector_conformance import TASK, tiny_data
from tiny import same

from esper_nb.control import (
    QUICK, QUICK_RULES, Choice, Fixed, GrowEnv, GrowVecEnv, Heuristic, WaitOnly, column, draw_actions)
from esper_nb.core import by_lane, generator, lane_state
from esper_nb.grow import Decision, Gates, Rules, Stage
from esper_nb.learn import Learner, PPOConfig, PolicyConfig, train_ppo
from esper_nb.record import EnvRows, EnvState, read_checkpoint, write_checkpoint
from esper_nb.run import RulePlayer
from esper_nb.train import Fault

MODES = [m.value for m in AutoresetMode]
QUICKLY = Rules(gates=Gates(training_epochs=1, health=0.), embargo=1)


pytestmark = pytest.mark.usefixtures("one_thread")


SMALL = dict(task=TASK, blueprints=("norm", "conv_small"), workers=1, rules=QUICKLY)


def make(n=3, **kw): return GrowVecEnv(**(dict(SMALL, data=tiny_data(), num_envs=n, horizon=4) | kw))
def wait(n): return np.zeros((n, 8), int)


def act(env, seed, t):
    "Legal random actions; a lane's draw is its own."
    streams = [generator(seed, "draw", i, t) for i in range(env.num_envs)]
    return np.stack([draw_actions(env.actions, m, g).numpy() for m, g in zip(env.mask, streams)])


def roll(env, steps, seed=0, reset=True, actions=None, first=0):
    "Steps as a list; lanes that ended are reset where the mode leaves it to the caller."
    out = [env.reset(seed=seed)] if reset else []
    for t in range(first, first + steps):
        out.append(env.step(act(env, seed, t) if actions is None else actions[t]))
        done = out[-1][2] | out[-1][3]
        if env.mode == AutoresetMode.DISABLED and done.any(): out.append(env.reset(options={"reset_mask": done}))
    return out


def lane_of(results, i):
    "One lane's part of vector results: observations, rewards, ends."
    return [tuple(np.asarray(x[i]) for x in r[:-1]) for r in results]


def weights(env, i):
    model, at = env.model_of(i)
    return {k: by_lane(t, model.lanes)[at].clone() for k, t in lane_state(model).items()}




# --- Gymnasium


@pytest.mark.parametrize("mode", MODES)
def test_episode_statistics_of_gymnasium(mode):
    env = gym.wrappers.vector.RecordEpisodeStatistics(make(autoreset_mode=mode, width=1, faults=(Fault("nan", 1, 1),)))
    env.reset(seed=0)
    seen = []
    for t in range(9):
        *_, term, trunc, info = env.step(act(env.unwrapped, 0, t))
        ending = info.get("episode")
        if ending: seen += [(i, ending["r"][i], ending["l"][i]) for i in np.flatnonzero(info["_episode"])]
        if mode == "Disabled" and (term | trunc).any(): env.reset(options={"reset_mask": term | trunc})
    ours = [(r.lane, r.reward, r.epochs) for r in env.unwrapped.summaries]
    assert [s[0] for s in seen] == [r[0] for r in ours] and len(ours) >= 5
    np.testing.assert_allclose([s[1:] for s in seen], [r[1:] for r in ours], rtol=1e-6, atol=1e-6)


# --- exactness

def test_one_lane_is_the_single_environment_bit_for_bit():
    kw = dict(SMALL, data=tiny_data(), horizon=3, faults=(Fault("nan", 0, 4),))
    one, many = GrowEnv(**kw), GrowVecEnv(num_envs=1, autoreset_mode="Disabled", **kw)
    (o1, i1), (o2, i2) = one.reset(seed=4), many.reset(seed=4)
    assert np.array_equal(o1, o2[0])
    for t in range(8):
        a = act(many, 0, t)
        *here, i1 = one.step(a[0])
        *there, i2 = many.step(a)
        assert all(np.array_equal(x, y[0]) for x, y in zip(here, there))
        assert np.array_equal(i1["action_mask"], i2["action_mask"][0])
        assert i1["rolled_back"] is bool(i2["rolled_back"][0])
        assert np.array_equal(one.action_masks(), many.action_masks()[0])
        if here[2] or here[3]:
            one.reset()
            many.reset()
    assert list(one.vector.summaries) == list(many.summaries)
    assert [r.outcome for r in many.summaries] == ["horizon", "rollback", "horizon"]
    assert one.test_accuracy() == many.test_accuracy().item()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("width", [1, 3])
def test_a_lane_does_not_notice_its_neighbours(mode, width):
    "The neighbour is rolled back, later sleeps for a step, and acts; under a fixed plan not a bit changes."
    actions = None if width == 1 else np.zeros((12, 3, 8), int)
    def steps(env, count): return [r for r in roll(env, count, actions=actions) if len(r) == 5]
    def alike(a, b): return all(np.array_equal(p, q) for x, y in zip(a, b) for p, q in zip(x, y))
    calm = make(autoreset_mode=mode, width=width)
    hit = make(autoreset_mode=mode, width=width, faults=(Fault("explode", 1, 2), Fault("nan", 1, 5)))
    there, here = steps(calm, 11), steps(hit, 11)
    for i in (0, 2):
        assert alike(lane_of(there, i), lane_of(here, i))
        assert same(weights(calm, i), weights(hit, i))
        assert [r for r in calm.summaries if r.lane == i] == [r for r in hit.summaries if r.lane == i]
    assert [r.outcome for r in hit.summaries if r.lane == 1].count("rollback") == 2


@pytest.mark.costly
@pytest.mark.parametrize("mode", MODES)
def test_an_exact_lane_does_not_notice_how_many_there_are(mode):
    one, three = ([r for r in roll(make(n, autoreset_mode=mode, exact=True), 9) if len(r) == 5] for n in (1, 3))
    for x, y in zip(lane_of(one, 0), lane_of(three, 0)): assert all(map(np.array_equal, x, y))


def test_plans_agree_at_first():
    "To the bit where that is asked for; otherwise an epoch of training has made its rounding a few thousandths."
    for exact, steps in ((True, 3), (False, 1)):
        runs = [roll(make(4, width=w, horizon=5, exact=exact), steps, actions=np.zeros((steps, 4, 8), int))
                for w in (1, 2, 4, None)]
        for other in runs[1:]:
            for a, b in zip(runs[0][1:], other[1:]):
                for k in (0, 1): np.testing.assert_allclose(a[k], b[k], rtol=0, atol=0 if exact else 5e-3)


@pytest.mark.costly
@pytest.mark.parametrize("mode", MODES)
def test_parts_on_several_devices(mode):
    kw = dict(exact=True, autoreset_mode=mode, faults=(Fault("nan", 2, 1), Fault("nan", 4, 1)))
    one, two = make(5, **kw), make(5, devices=("cpu", "cpu"), **kw)
    assert [(first, p.lanes) for first, p in two.parts] == [(0, 3), (3, 2)]
    for a, b in zip(roll(one, 7), roll(two, 7)): assert all(same(x, y) for x, y in zip(a, b))
    assert list(one.summaries) == list(two.summaries) and torch.equal(one.test_accuracy(), two.test_accuracy())


def test_without_a_seed_environments_differ_and_with_one_in_the_settings_they_do_not():
    a, b, c, d = make(1), make(1), make(1, seed=7), make(1, seed=7)
    for e in (a, b, c, d): e.reset()
    assert not same(weights(a, 0), weights(b, 0)) and same(weights(c, 0), weights(d, 0))


def test_a_lane_is_its_seed_its_number_and_its_episode():
    "An episode reached by way of others is the one reached by resets alone."
    a, b = (make(n, autoreset_mode="Disabled", exact=True) for n in (3, 2))
    roll(a, 4, seed=9) # a second episode begins at the horizon
    b.reset(seed=9); b.reset()
    assert a.lanes.episode.tolist() == [1, 1, 1]
    assert same(weights(a, 1), weights(b, 1)) and not same(weights(a, 0), weights(a, 1))
    first = a.step(wait(3))[0][:2]
    assert np.array_equal(first, b.step(wait(2))[0])
    b.reset(seed=9)
    assert not np.array_equal(first, b.step(wait(2))[0])


# --- episodes

@pytest.mark.costly
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("at", range(4))
def test_a_failure_at_any_step_is_one_terminal_transition(mode, at):
    env, calm = (make(autoreset_mode=mode, width=1, faults=f) for f in ((Fault("nan", 1, at),), ()))
    env.reset(seed=0); calm.reset(seed=0)
    ends, paid = [], np.zeros(3)
    for t in range(10):
        obs, reward, term, trunc, info = env.step(act(env, 0, t))
        if t < at: paid += reward
        calm_result = calm.step(act(calm, 0, t))
        if term[1] or trunc[1]: ends.append((t, reward[1], term[1], trunc[1]))
        source = info.get("final_info", info) if mode == "SameStep" else info
        assert (source["rolled_back"] & source["_rolled_back"]).tolist() == [False, t == at, False]
        if t == at:
            assert reward[1] == -10 and term[1] and term[[0, 2]].tolist() == [at == env.horizon - 1] * 2
            assert env.last_result.terms["rollback"].tolist() == [0, -10, 0]
            assert env.last_result.rolled_back.tolist() == [False, True, False]
        assert np.array_equal(reward[[0, 2]], calm_result[1][[0, 2]])
        if mode == "Disabled":
            for e, done in ((env, term | trunc), (calm, calm_result[2] | calm_result[3])):
                if done.any(): e.reset(options={"reset_mask": done})
    first = next(r for r in env.summaries if r.lane == 1)
    def ending(r): return r.outcome, r.epochs, r.episode, r.fresh, r.rollbacks
    assert ending(first) == ("rollback", at + 1, 0, True, 1)
    assert first.reward == pytest.approx(paid[1] - 10, abs=1e-9)
    assert ends[0] == (at, -10., True, False) and sum(e[1] == -10 for e in ends) == 1
    assert ending([r for r in env.summaries if r.lane == 1][1]) == ("horizon", 4, 1, False, 1)
    def others(e): return [r for r in e.summaries if r.lane != 1]
    assert others(env) == others(calm) and len(others(env)) >= 2


def test_after_a_rollback_the_restored_state_goes_on_and_after_the_horizon_a_fresh_one():
    env = make(2, autoreset_mode="Disabled", width=1, horizon=8, faults=(Fault("nan", 0, 5),))
    env.reset(seed=0)
    governor, kept = env.parts[0][1].governor, []
    for t in range(6):
        *_, term, trunc, _ = env.step(wait(2))
        kept.append(weights(env, 0))
    assert term.tolist() == [True, False] and governor.reports[-1].lane == 0
    assert any(same(kept[-1], k) for k in kept[2:5]) # an epoch that was fine, not the first state
    env.reset(options={"reset_mask": term})
    assert same(weights(env, 0), kept[-1]) and env.lanes.episode.tolist() == [1, 0] and not env.lanes.fresh[0]
    env.reset(options={"reset_mask": np.array([True, False]), "fresh": True})
    assert not same(weights(env, 0), kept[-1]) and env.lanes.fresh[0] and governor.stats.judged[0] == 0
    assert (env.parts[0][1].stepper.owners["host"].state_dict()["steps"][0] == 0).all()


def test_a_lane_that_cannot_be_saved_begins_afresh():
    "Ruined in every epoch, it uses up the Governor's budget."
    def ruin(net, stepper, lanes, b, x, y): return (x * torch.nan if 0 in lanes else x), y
    env = make(2, width=1, autoreset_mode="SameStep", disturb=ruin)
    roll(env, 8)
    mine = [r for r in env.summaries if r.lane == 0]
    assert [r.outcome for r in mine] == ["rollback"] * 8
    assert [r.fresh for r in mine] == [True] + [False] * 4 + [True] + [False] * 2
    assert [r.rollbacks for r in mine] == [1, 2, 3, 4, 5, 1, 2, 3]
    assert [r.outcome for r in env.summaries if r.lane == 1] == ["horizon"] * 2


def test_the_reward_is_the_sum_of_its_terms_and_telemetry_takes_the_step():
    env = make(4, price=5., faults=(Fault("nan", 1, 2),))
    env.reset(seed=1)
    for t in range(9):
        reward = env.step(act(env, 1, t))[1]
        s = env.last_result
        np.testing.assert_allclose(sum(s.terms.values()).numpy(), s.reward.numpy(), atol=1e-9)
        assert np.array_equal(reward, s.reward.numpy())
        rows = EnvRows(growth=False)(env, step=t)
        assert [row["kind"] for row in rows].count("step") == int(s.active.sum())


def test_a_germination_in_a_step_that_is_undone_is_paid_for():
    env = make(1, width=1, horizon=3, price=1000., faults=(Fault("nan", 0, 1),))
    env.reset(seed=0)
    germination = env.actions.encode(Choice("germinate", "r0c0", "conv_small", style="linear_add", tempo=3, target=1.))
    env.step(env.actions.placeholder[None].numpy())
    before = env.last_result.accuracy_pp.item()
    undone = env.step(germination[None].numpy())
    assert undone[2][0] and env.last_result.rolled_back[0]
    rise = env.last_result.accuracy_pp.item() - before
    size = env.sizes[0][0, env.parts[0][1].model.slot("r0c0").blueprints.index("conv_small")] / env.host_size[0]
    assert 100 * size > 10 and undone[1][0] == pytest.approx(-100 * float(size) + .1 * rise, abs=1e-6)


def test_fossils_are_kept_in_the_episode_after_a_rollback():
    env = make(1, width=1, horizon=30, autoreset_mode="SameStep", faults=(Fault("nan", 0, 12),))
    env.reset(seed=0)
    plan = dict.fromkeys((1, 3, 7), Choice("advance", "r0c0")) | {8: Choice("fossilize", "r0c0")}
    plan[0] = Choice("germinate", "r0c0", "conv_small", style="linear_add", tempo=3, target=1.)
    for t in range(13): result = env.step(env.actions.encode(plan.get(t, Choice()))[None].numpy())
    assert result[2][0] and env.summaries[-1].fossils == 1 and column(env.table, "stage")[0, 0] == Stage.FOSSILIZED
    assert env.lanes.history.epoch.item() == 0 and not env.lanes.fresh[0]


def test_only_heldout_data_are_read():
    env = make(3)
    for _, pop in env.parts:
        for d in (pop.data.x, pop.data.y): del d["test"]
    roll(env, 6)
    with pytest.raises(KeyError): env.test_accuracy()


# --- saved and loaded

@pytest.mark.costly
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [1, 3])
def test_a_loaded_environment_goes_on_bit_for_bit(tmp_path, mode, n):
    kw = dict(autoreset_mode=mode, width=1, faults=(Fault("nan", 0, 2), Fault("explode", n - 1, 6)))
    for split in (2, 3) if n > 1 else (2, 4): # before a rollback and right after it, where a lane may sleep
        a, b = make(n, **kw), make(n, **kw)
        roll(a, split)
        write_checkpoint(tmp_path / "env.safetensors", EnvState(a).state_dict())
        roll(b, 1, seed=5) # somewhere else
        EnvState(b).load_state_dict(read_checkpoint(tmp_path / "env.safetensors")[0])
        there, here = (roll(e, 6, reset=False, first=split) for e in (a, b))
        for x, y in zip(there, here): assert all(same(p, q) for p, q in zip(x, y))
        assert all(same(weights(a, i), weights(b, i)) for i in range(n))
    with pytest.raises(ValueError, match="horizon"): make(n, horizon=9).load_state_dict(a.state_dict())


# --- agents

def test_ppo_blames_the_transition_that_was_rolled_back():
    for mode in MODES:
        env = make(4, autoreset_mode=mode, faults=(Fault("nan", 2, 1), Fault("nan", 3, 6)))
        ppo = PPOConfig(num_steps=5, num_updates=2, num_minibatches=2, update_epochs=1, norm_reward=True)
        learner = Learner(env, ppo, PolicyConfig(hidden=8, features=(8,)), heads=env.actions)
        updates = list(train_ppo(learner))
        assert [u.rollbacks for u in updates] == [1, 1] and all(u.stopped == "" and u.first_gap < 1e-5 for u in updates)
        assert [r for u in updates for r in u.returns] == pytest.approx([r.reward for r in env.summaries], abs=1e-4)
        assert sum(r.refused for r in env.summaries) == 0 # the policy knows what is legal


@pytest.mark.parametrize("odd", [dict(mask=np.array([True, False, False])), dict(fresh=True, seed=3), {1: 2}])
def test_a_misspelt_reset_of_some_lanes_is_no_reset_of_all(odd):
    env = make(3)
    env.reset(seed=0)
    env.step(wait(3))
    with pytest.raises(ValueError, match="options=.*expected no keys but reset_mask.*fresh"): env.reset(options=odd)
    assert env.lanes.episode.tolist() == [0, 0, 0]


def test_rules_play():
    env = make(3, horizon=10, rules=QUICK_RULES, faults=(Fault("nan", 1, 3),))
    for rule in (WaitOnly(), Heuristic(QUICK), Fixed({2: Decision("germinate", "r0c1", "norm")})):
        env.reset(seed=0, options=dict(fresh=True))
        env.summaries.clear()
        player = RulePlayer(rule)
        player.begin(env)
        for _ in range(10): env.step(player.act(env).numpy())
        ends = {r.lane: (r.epochs, r.outcome) for r in env.summaries}
        assert ends == {0: (10, "horizon"), 1: (4, "rollback"), 2: (10, "horizon")}
    assert [r.germinated for r in env.summaries] == [1, 1, 1]


def test_what_cannot_be_is_said_in_a_line():
    for seed in (3., dict(a=1), {1, 2, 3}):
        with pytest.raises(ValueError, match="seed=.*expected a whole number, a list of 3"): make(3).reset(seed=seed)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(ValueError, match="torch's default dtype=torch.float64, expected torch.float32"): make(1)
    finally: torch.set_default_dtype(torch.float32)
