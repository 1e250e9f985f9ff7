"Action and observation spaces: which the learner takes as they are, and what it says of others."
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from esper_nb.learn import EnvStream, Learner, PolicyConfig, PPOConfig, heads_of, play, to_env, train_ppo
from esper_nb.learn.rollouts import flat_observations, one_observation

pytestmark = pytest.mark.usefixtures("one_thread")


class Echo(gym.Env):
    "Samples observations; takes any action of its space; both kinds of ends."
    def __init__(self, observed, acted): self.observation_space, self.action_space = observed, acted
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None: self.observation_space.seed(seed)
        self.t = 0
        return self.observation_space.sample(), {}
    def step(self, action):
        assert action in self.action_space, f"{action!r} is not in {self.action_space}"
        self.t += 1
        return self.observation_space.sample(), 1., self.t == 5, self.t == 3 and self.np_random.random() < .5, {}


OBSERVED = dict(
    box=spaces.Box(-1, 1, (2, 3)), pixels=spaces.Box(0, 255, (2, 2, 3), np.uint8),
    discrete=spaces.Discrete(4, start=-2),
    multi=spaces.MultiDiscrete([2, 5, 3], start=[1, 0, -1]), square=spaces.MultiDiscrete([[2, 3], [4, 2]]),
    binary=spaces.MultiBinary(3), grid=spaces.MultiBinary([2, 3]),
    nested=spaces.Dict(a=spaces.Discrete(3), b=spaces.Dict(c=spaces.Box(-1, 1, (2,)), d=spaces.MultiBinary(2))),
    both=spaces.Tuple((spaces.MultiDiscrete([2, 2]), spaces.Box(-1, 1, (1,)), spaces.Dict(x=spaces.Discrete(2)))))

@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("name", OBSERVED)
def test_observations_are_those_that_gymnasium_flattens(name, mode):
    space = OBSERVED[name]
    envs = SyncVectorEnv([lambda: Echo(space, spaces.Discrete(2))] * 3, autoreset_mode=mode)
    stream = EnvStream(envs)
    stream.reset(0)
    seen = []
    assert stream.width == spaces.flatdim(space)
    for t in range(12):
        flat = [spaces.flatten(space, o) for o in vars(envs)["_env_obs"]]
        assert torch.equal(stream.obs, torch.tensor(np.stack(flat)).float())
        out = stream.step(torch.zeros(3, 1, dtype=torch.int64))
        seen.append(out.final_obs)
    if mode != AutoresetMode.NEXT_STEP:
        assert any(x is not None and x.shape == (3, stream.width) and x.abs().sum() > 0 for x in seen)
    one = space.sample()
    found = flat_observations(one_observation(one, space), space)[0]
    assert torch.equal(found, torch.tensor(spaces.flatten(space, one)).float())


ACTED = dict(
    discrete=spaces.Discrete(3), started=spaces.Discrete(3, start=-5), int32=spaces.Discrete(3, dtype=np.int32),
    int8=spaces.Discrete(3, dtype=np.int8), multi=spaces.MultiDiscrete([2, 4]),
    short=spaces.MultiDiscrete([2, 4], dtype=np.int16, start=[3, -3]), square=spaces.MultiDiscrete([[2, 3], [4, 2]]),
    binary=spaces.MultiBinary(4), grid=spaces.MultiBinary([2, 2]))

@pytest.mark.parametrize("kind", ["sync", pytest.param("async", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ACTED)
def test_actions_are_in_their_space(name, kind):
    made = [lambda: Echo(spaces.Box(-1, 1, (2,)), ACTED[name])] * 2
    envs = SyncVectorEnv(made) if kind == "sync" else AsyncVectorEnv(made)
    learner = Learner(envs, PPOConfig(num_steps=16, num_updates=2, num_minibatches=1), PolicyConfig(core="none"))
    updates = list(train_ppo(learner))
    assert updates[-1].first_gap < 1e-6 and updates[-1].gradient_steps == 4
    assert len(play(learner.policy, envs, 4, deterministic=False)) == 4
    heads = heads_of(ACTED[name])
    assert heads.count == max(1, int(np.prod(ACTED[name].shape)))
    for index in range(max(heads.sizes)): # every choice is an action
        action = torch.tensor([[min(index, size - 1) for size in heads.sizes]])
        assert to_env(action, ACTED[name])[0] in ACTED[name]
    envs.close()


class Identity(gym.Env):
    "Pays for each bit of the action that equals the observation's."
    observation_space, action_space = spaces.MultiBinary(3), spaces.MultiBinary(3)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.now = 0, self.np_random.integers(0, 2, 3, dtype=np.int8)
        return self.now, {}
    def step(self, action):
        reward = float((action == self.now).mean())
        self.t, self.now = self.t + 1, self.np_random.integers(0, 2, 3, dtype=np.int8)
        return self.now, reward, False, self.t == 20, {}

@pytest.mark.slow
def test_bits_are_learned():
    learner = Learner(SyncVectorEnv([Identity] * 4), PPOConfig(num_steps=64, num_updates=20, learning_rate=5e-3),
                      PolicyConfig(core="none"))
    list(train_ppo(learner))
    assert np.mean(play(learner.policy, SyncVectorEnv([Identity] * 4), 8, view=learner.view)) > 19.


class ForbiddenBits(Identity):
    "The last bit must be off; masks have off and on of each bit."
    def _mask(self): return dict(action_mask=np.array([1, 1, 1, 1, 1, 0], np.int8))
    def reset(self, **kw): return super().reset(**kw)[0], self._mask()
    def step(self, action):
        assert action[2] == 0, "a forbidden bit"
        return *super().step(action)[:4], self._mask()

def test_masks_of_bits():
    learner = Learner(SyncVectorEnv([ForbiddenBits] * 2), PPOConfig(num_steps=16, num_updates=2, num_minibatches=1))
    assert list(train_ppo(learner))[-1].first_gap < 1e-6


@pytest.mark.parametrize("acted", [spaces.Box(-1, 1, (2,)), spaces.Dict(a=spaces.Discrete(2)), spaces.Text(3)])
def test_other_actions_are_refused_in_a_line(acted):
    said = "has no heads, expected Discrete, MultiDiscrete or MultiBinary.*Stable-Baselines3"
    with pytest.raises(ValueError, match=said):
        heads_of(acted)

def test_other_observations_are_refused_in_a_line():
    for space in (spaces.Text(3), spaces.Dict(a=spaces.Sequence(spaces.Discrete(2)))):
        envs = gym.vector.VectorEnv()
        envs.metadata, envs.num_envs = dict(autoreset_mode=AutoresetMode.SAME_STEP), 1
        envs.single_observation_space, envs.single_action_space = space, spaces.Discrete(2)
        with pytest.raises(ValueError, match="observation space=.*a Dict or Tuple of these"): EnvStream(envs)


class Masked(Echo):
    "Gives the mask `said` with every step."
    def __init__(self, acted, said): super().__init__(spaces.Box(-1, 1, (2,)), acted); self.said = said
    def reset(self, **options): return super().reset(**options)[0], dict(action_mask=self.said)
    def step(self, action): return *super().step(action)[:4], dict(action_mask=self.said)

def trained(make):
    settings = PPOConfig(num_steps=8, num_updates=1, num_minibatches=1)
    return list(train_ppo(Learner(SyncVectorEnv([make] * 2), settings, PolicyConfig(core="none"))))

def test_a_mask_is_one_array_for_each_head_as_gymnasium_samples():
    acted, said = spaces.MultiDiscrete([2, 3]), (np.array([0, 1], np.int8), np.array([1, 0, 0], np.int8))
    acted.sample(mask=said)
    stream = EnvStream(SyncVectorEnv([lambda: Masked(acted, said)] * 2))
    stream.reset(0)
    assert stream.mask.tolist() == [[False, True, True, False, False]] * 2
    assert trained(lambda: Masked(acted, said))

@pytest.mark.parametrize("said, words", [
    (np.ones(4, np.int8), "action_mask=4, expected 3 entries per lane"),
    (np.ones(2, np.int8), "action_mask=2, expected 3 entries per lane"),
    (np.array([0., 0., -np.inf]), r"below 0 or NaN in lanes=\[0, 1\].*no mask"),
    (np.array([1., 1., np.nan]), "below 0 or NaN")])
def test_masks_of_another_kind_are_refused_in_a_line(said, words):
    with pytest.raises(ValueError, match=words): trained(lambda: Masked(spaces.Discrete(3), said))

def test_what_is_no_vector_environment_or_shows_nothing_is_refused_in_a_line():
    for envs in (Echo(spaces.Box(-1, 1, (2,)), spaces.Discrete(2)), "CartPole-v1"):
        with pytest.raises(ValueError, match=r"expected a vector environment, such as gymnasium.make_vec"):
            Learner(envs)
    for nothing in (spaces.Box(-1, 1, (0,)), spaces.Dict({})):
        with pytest.raises(ValueError, match="at least one number; where there is nothing to see"):
            Learner(SyncVectorEnv([lambda space=nothing: Echo(space, spaces.Discrete(2))] * 2))


def test_a_foreign_vector_environment_and_infos_in_a_list_are_named():
    class Foreign: # as Stable-Baselines3's VecEnv
        num_envs, observation_space, action_space, metadata = 2, spaces.Box(-1, 1), spaces.Discrete(2), {}
    with pytest.raises(ValueError, match="envs='Foreign', expected a vector environment, such as gymnasium.make_vec"):
        EnvStream(Foreign())
    envs = SyncVectorEnv([lambda: Echo(spaces.Box(-1, 1), spaces.Discrete(2))] * 2)
    stream = EnvStream(gym.wrappers.vector.DictInfoToList(envs))
    with pytest.raises(ValueError, match="type of the info='list', expected a dictionary.*leave out DictInfoToList"):
        stream.reset(0)
