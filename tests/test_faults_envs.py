"Environment, controllers, PPO: faults that were found by trying them, each with what was wrong."
import copy
import math

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from test_vector_conformance import TASK, tiny_data

from esper_nb.control import QUICK, QUICK_RULES, EnvConfig, GrowEnv, GrowVecEnv, Heuristic, as_controller, draw_actions
from esper_nb.core import generator
from esper_nb.learn import Learner, PPOConfig
from esper_nb.run import RulePlayer
from esper_nb.train import FitConfig, fit, new_population

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = dict(task=TASK, blueprints=("norm", "conv_small"), workers=1, horizon=3)


def vector(n=2, **kw): return GrowVecEnv(data=tiny_data(), num_envs=n, **(SMALL | kw))
def single(**kw): return GrowEnv(data=tiny_data(), **(SMALL | kw))
def draw(env, t): return draw_actions(env.actions, env.mask, generator(0, "draw", t)).numpy()


# --- other people's makers

def test_stable_baselines_own_maker():
    sb3 = pytest.importorskip("stable_baselines3.common.env_util")
    envs = sb3.make_vec_env("esper_nb/Grow-v0", 2, env_kwargs=dict(data=tiny_data(), **SMALL), seed=0)
    assert envs.reset().shape == (2, *envs.observation_space.shape)
    seen = envs.step(np.zeros((2, 8), int))
    assert seen[1].shape == (2,) and envs.env_method("action_masks")[0].dtype == bool
    envs.close()


@pytest.mark.parametrize("mode", [None, "rgb_array"])
def test_a_render_mode_is_no_setting(mode):
    env = gym.make("esper_nb/Grow-v0", render_mode=mode, data=tiny_data(), **SMALL)
    assert env.render_mode == mode and env.unwrapped.vector.config.horizon == 3
    envs = gym.make_vec("esper_nb/Grow-v0", num_envs=2, render_mode=mode, data=tiny_data(), **SMALL)
    assert isinstance(envs, GrowVecEnv) and envs.render_mode == mode
    with pytest.raises(ValueError, match="render_mode='human', expected 'rgb_array'"): GrowEnv(render_mode="human")


# --- seeds, copies, masks, actions

def test_a_list_of_seeds_is_a_seed_for_each_lane():
    both, ones = vector(2), [vector(2) for _ in range(2)]
    obs, _ = both.reset(seed=[5, 9])
    for env, seed in zip(ones, (5, 9)): env.reset(seed=seed)
    for t in range(4):
        a = draw(both, t)
        here, there = both.step(a), [env.step(a) for env in ones]
        for i in range(2):
            assert np.array_equal(here[0][i], there[i][0][i]) and here[1][i] == there[i][1][i]


def test_a_lane_without_a_seed_goes_on():
    a, b = vector(2), vector(2)
    for env in (a, b): env.reset(seed=3)
    a.reset(seed=[None, 7])
    b.reset()
    assert a.lanes.episode.tolist() == [1, 0] and a.seeds == [3, 7]
    for x, y in zip(a.parts[0][1].model.state_dict().values(), b.parts[0][1].model.state_dict().values()):
        assert x.shape == y.shape
    first = [env.step(np.zeros((2, 8), int))[0][0] for env in (a, b)]
    assert np.array_equal(*first) # lane 0 is in its second episode in both


@pytest.mark.parametrize("bad", [[1], [1, -2], [1, 2.5], [1, 2, 3]])
def test_wrong_lists_of_seeds_are_refused(bad):
    with pytest.raises(ValueError, match="seed=.*expected"): vector(2).reset(seed=bad)


@pytest.mark.parametrize("make", [vector, single], ids=["vector", "single"])
def test_a_shallow_copy_goes_on_alike_and_alone(make):
    env = make()
    env.reset(seed=0)
    def step(e): return e.step(draw(getattr(e, "vector", e), 1) if make is vector else draw(e.vector, 1)[0])
    step(env)
    twin, third = copy.copy(env), copy.copy(env)
    a, b = step(env), step(twin)
    assert np.array_equal(a[0], b[0]) and np.array_equal(a[1], b[1])
    assert np.array_equal(step(third)[0], a[0]) # what the others did does not reach it
    assert twin.actions is getattr(twin, "vector", twin).actions


def test_what_needs_a_reset_says_so():
    for env in (vector(render_mode="rgb_array"), single(render_mode="rgb_array")):
        for what in (env.action_masks, env.render):
            with pytest.raises(RuntimeError, match="before reset: call reset"): what()
        with pytest.raises(RuntimeError, match="step before reset"): env.step(env.action_space.sample())


@pytest.mark.parametrize("value", [.9, -.5, math.nan, math.inf])
def test_actions_with_a_fraction_are_refused(value):
    env = vector(2)
    env.reset(seed=0)
    begun = env.lanes
    with pytest.raises(ValueError, match="actions=.*expected whole numbers"): env.step(np.full((2, 8), value))
    assert env.lanes is begun # every step makes another record
    env.step(np.zeros((2, 8))) # whole ones are numbers like any other


# --- controllers

class Sighted(Heuristic):
    "Keeps what it decided."
    def __init__(self):
        super().__init__(QUICK)
        self.said = []

    def act(self, v):
        d = super().act(v)
        self.said.append((v.lane, d.verb, d.slot, d.blueprint))
        return d


def test_a_second_training_meets_a_controller_like_a_new_one():
    said = []
    rule = Sighted()
    controller = as_controller(rule)
    for _ in range(2):
        rule.said.clear()
        pop = new_population(TASK, FitConfig(lanes=2, epochs=6, workers=1), data=tiny_data(), rules=QUICK_RULES,
                             blueprints=("norm", "conv_small"))
        for _ in fit(pop, controller=controller): pass
        said.append(list(rule.said))
    assert said[0] == said[1] and any(verb == "germinate" for _, verb, *_ in said[0])


def test_a_second_play_meets_a_player_like_a_new_one():
    env, rule = vector(2, horizon=6, rules=QUICK_RULES), Sighted()
    player, said = RulePlayer(rule), []
    for _ in range(2):
        rule.said.clear()
        env.reset(seed=0, options=dict(fresh=True))
        player.begin(env)
        for _ in range(6): env.step(player.act(env).numpy())
        said.append(list(rule.said))
    assert said[0] == said[1]


# --- settings: whatever is out of range is refused by name


@pytest.mark.parametrize("make, words", [
    (lambda: EnvConfig(task="digit"), "'digits'"), (lambda: EnvConfig(seed=-1), "seed=-1"),
    (lambda: PPOConfig(precision="fp16"), "precision='fp16'"), (lambda: PPOConfig(seed=-1), "seed=-1"),
    (lambda: FitConfig(seed=-1), "seed=-1"), (lambda: FitConfig(seed=2**70), "seed=")])
def test_what_would_be_refused_later_is_refused_when_it_is_set(make, words):
    with pytest.raises(ValueError, match=words): make()


# --- learning

class Broken(gym.Env):
    "An environment whose observation is no number from some step on."
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)
    def __init__(self, at): self.at, self.t = at, 0
    def _see(self): return np.full(2, np.nan if self.t >= self.at else 0., np.float32)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._see(), {}
    def step(self, action):
        self.t += 1
        return self._see(), 0., False, False, {}


@pytest.mark.parametrize("norm_obs", [True, False])
@pytest.mark.parametrize("at", [0, 2])
def test_an_observation_that_is_no_number_is_the_environments_fault(norm_obs, at):
    envs = SyncVectorEnv([lambda: Broken(at)] * 2)
    with pytest.raises(ValueError, match="observations of lanes.*environment"):
        learner = Learner(envs, PPOConfig(num_steps=4, num_minibatches=1, norm_obs=norm_obs))
        for _ in range(4): learner.step()


def test_spaces_that_are_not_served_say_what_is():
    class Continuous(Broken): action_space = gym.spaces.Box(-1, 1, (1,))
    class Named(Broken): observation_space = gym.spaces.Text(3)
    with pytest.raises(ValueError, match="expected Discrete, MultiDiscrete or MultiBinary"):
        Learner(SyncVectorEnv([lambda: Continuous(9)]), PPOConfig(num_minibatches=1))
    with pytest.raises(ValueError, match="TransformObservation"):
        Learner(SyncVectorEnv([lambda: Named(9)]), PPOConfig(num_minibatches=1))
