"A policy is played as it was trained; the best one is kept; old observations may fade."
import copy

import gymnasium as gym
import numpy as np
import pytest
import torch

from esper_nb.learn import BestPolicy, Learner, ObsNormalizer, PolicyConfig, PPOConfig, play, train_ppo

pytestmark = pytest.mark.usefixtures("one_thread")


class Far(gym.Env):
    "Two observations far from 0 and close together; the action must tell which of them it is."
    observation_space, action_space = gym.spaces.Box(-1e4, 1e4, (1,)), gym.spaces.Discrete(2)
    def _see(self):
        self.which = int(self.np_random.integers(2))
        return np.array([1000. + self.which], np.float32)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._see(), {}
    def step(self, action):
        reward, self.t = float(action == self.which), self.t + 1
        return self._see(), reward, False, self.t == 20, {}


def far(n=4): return gym.vector.SyncVectorEnv([Far] * n)

def trained(updates=15, **kw):
    config = PPOConfig(num_steps=64, num_updates=30, learning_rate=5e-3, **kw)
    learner = Learner(far(), config, PolicyConfig(core="none"))
    list(train_ppo(learner, updates))
    return learner


def test_statistics_of_observations_come_with_the_policy():
    learner = trained()
    expected = play(learner.policy, far(), 8, view=learner.view)
    assert np.mean(expected) > 18
    for policy in (learner, learner.policy, copy.deepcopy(learner.policy)): assert play(policy, far(), 8) == expected
    raw = play(learner.policy, far(), 8, view=lambda obs: obs)
    assert np.mean(raw) < 16 # what was said before without a word
    other = Learner(far(), learner.config, PolicyConfig(core="none"))
    other.load_state_dict(learner.state_dict())
    assert play(other.policy, far(), 8) == expected
    plain = trained(1, norm_obs=False)
    assert plain.policy.view is None and play(plain, far(), 8) == play(plain.policy, far(), 8, view=plain.view)


def test_the_best_policy_is_kept_and_training_does_not_notice():
    def run(best):
        learner = Learner(far(), PPOConfig(num_steps=32, num_updates=8, learning_rate=5e-3), PolicyConfig(core="none"))
        return learner, list(train_ppo(learner, best=best))
    best = BestPolicy(far(2), every=2, episodes=6)
    (one, ups), (two, again) = run(best), run(None)
    assert ups == again and all(map(torch.equal, one.policy.parameters(), two.policy.parameters()))
    assert list(best.returns) == [2, 4, 6, 8] and best.returns[best.update] == max(best.returns.values())
    for p in one.policy.parameters(): p.data.fill_(.3) # ruined since
    kept = BestPolicy(far(2), every=2, episodes=6)
    kept.load_state_dict(best.state_dict())
    kept.load_into(one)
    assert np.mean(play(one, far(2), 6, best.seed)) == best.returns[best.update]
    worse = dict(best.state_dict())
    for p in one.policy.parameters(): p.data.fill_(.3)
    one.update = 10
    best.look(one)
    assert 10 in best.returns and best.update == worse["update"] # a worse one changes nothing
    with pytest.raises(RuntimeError, match="no policy has been kept"): BestPolicy(far(1)).load_into(one)
    with pytest.raises(ValueError, match="every"): BestPolicy(far(1), every=0)


def test_old_observations_fade_if_asked():
    every, recent = ObsNormalizer(1), ObsNormalizer(1, window=200)
    for norm in (every, recent):
        for k in range(20):
            norm.observe(torch.full((50, 1), 0. if k < 10 else 10.) + torch.randn(50, 1))
            norm.commit()
    assert abs(every.moments.mean.item() - 5) < .5 and recent.moments.mean.item() > 9 and recent.moments.count == 200
    assert every.moments.count == 1000
    learner = trained(2, obs_window=100)
    assert learner.obs_norm.moments.count <= 256 and trained(2).obs_norm.moments.count == 512
    assert max(u.first_gap for u in train_ppo(learner, 2)) < 1e-6
    with pytest.raises(ValueError, match="obs_window"): PPOConfig(obs_window=0)
