"Advantages against the definition and another library; streams in every reset mode."
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings, strategies as st

from esper_nb.learn import ActorCritic, EnvStream, Heads, PolicyConfig, Rollout


def random_rollout(T, n, seed, share=0.15):
    "A rollout filled with random numbers; truncations have their final value in the next step or of their own."
    g = torch.Generator().manual_seed(seed)
    roll = Rollout(T, n, 1, Heads((2,)))
    roll.clear(torch.zeros(0, n, 1))
    def r(): return torch.randn(n, generator=g)
    for t in range(T):
        u = torch.rand(n, generator=g)
        trunc = (u > share / 2) & (u < share)
        final = torch.where(trunc & (torch.rand(n, generator=g) < 0.5), r(), torch.nan)
        roll.add(value=r(), reward=r(), terminated=u < share / 2, truncated=trunc,
                 valid=torch.rand(n, generator=g) < 0.9, final_value=final)
    return roll, r()


def reference(roll, last, gamma, lam):
    "The definition, in float64 and without recursion."
    T, n = roll.value.shape
    out = torch.zeros(T, n, dtype=torch.float64)
    v = roll.value.double()
    def after(t, i):
        if roll.terminated[t, i]: return 0.
        if roll.truncated[t, i] and not roll.final_value[t, i].isnan(): return roll.final_value[t, i].double()
        return v[t + 1, i] if t + 1 < T else last[i].double()
    for i in range(n):
        for t in range(T):
            for s in range(t, T):
                out[t, i] += (gamma * lam) ** (s - t) * (roll.reward[s, i].double() + gamma * after(s, i) - v[s, i])
                if roll.done[s, i]: break
    return torch.where(roll.valid, out, 0.)


@settings(deadline=None, max_examples=12)
@given(st.integers(1, 24), st.integers(1, 4), st.floats(0, 1), st.floats(0.5, 1), st.floats(0, 1),
       st.integers(0, 10**6))
def test_gae_equals_the_definition(T, n, share, gamma, lam, seed):
    roll, last = random_rollout(T, n, seed, share)
    ref = reference(roll, last, gamma, lam)
    roll.finish(last, gamma, lam)
    assert (roll.advantage - ref).abs().max() <= 1e-6 * max(1., ref.abs().max().item())


COUNT, LENGTH = 2, 3 # columns of an observation of `Clock`

class Clock(gym.Env):
    "Counts up to a random length; observation (lane, episode, count, length); a mask that moves with the count."
    observation_space, action_space = gym.spaces.Box(-1e6, 1e6, (4,)), gym.spaces.MultiDiscrete([3, 2])
    def __init__(self, lane): self.lane, self.episode = lane, -1
    def _out(self):
        mask = np.zeros(5, np.int8); mask[self.x % 3] = mask[3 + self.x % 2] = 1
        return np.array([self.lane, self.episode, self.x, self.length], np.float32), {"action_mask": mask}
    def reset(self, seed=None, options=None):
        self.episode, self.x = self.episode + 1, 0
        self.length = 1 + (self.lane * 7 + self.episode * 5) % 6
        return self._out()
    def step(self, action):
        assert action.tolist() == [self.x % 3, self.x % 2], "the only legal action"
        self.x += 1
        end, turn = self.x >= self.length, self.episode % 3
        obs, info = self._out()
        hit = end and turn == 2
        if hit: info["rolled_back"] = True
        return obs, -5. if hit else 1., end and turn != 1, end and turn == 1, info


class Quiet(Clock):
    "As `Clock`, but a rollback does not end the episode for the environment: it goes on from its rolled-back state."
    def step(self, action):
        obs, reward, term, trunc, info = super().step(action)
        if "rolled_back" in info:
            obs, info = self.reset()
            term, info["rolled_back"] = False, True
        return obs, reward, term, trunc, info


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("kind", [Clock, Quiet])
def test_every_mode_gives_whole_episodes(mode, kind):
    n, heads = 4, Heads((3, 2))
    stream = EnvStream(SyncVectorEnv([lambda i=i: kind(i) for i in range(n)], autoreset_mode=mode))
    stream.reset(0)
    policy = ActorCritic(heads, 4, PolicyConfig(hidden=8, features=(8,)))
    state, seen = policy.initial_state(n), [[] for _ in range(n)]
    for t in range(60):
        a = policy.act(stream.obs, stream.mask, state, stream.start)
        obs, start, valid = stream.obs, stream.start, stream.valid
        out = stream.step(a.action)
        state = a.state
        assert not (out.terminated & out.truncated).any()
        if mode is AutoresetMode.NEXT_STEP: assert out.final_obs is None
        elif out.has_final.any():
            last = out.final_obs[out.has_final]
            assert (last[:, COUNT] == last[:, LENGTH]).all()
        ends = torch.stack([out.terminated, out.truncated, out.rolled_back], 1)
        for i in valid.nonzero().flatten().tolist():
            seen[i].append((obs[i].tolist(), start[i].item(), out.reward[i].item(), ends[i].tolist()))
    for i, steps in enumerate(seen):
        for (_, episode, x, length), start, reward, ended in steps:
            last, turn = x == length - 1, int(episode) % 3
            assert start == (x == 0) and ended == [last and turn != 1, last and turn == 1, last and turn == 2]
            assert reward == (-5. if last and turn == 2 else 1.)
        episodes = int(steps[-1][0][1]) + 1
        expected = [x for e in range(episodes) for x in range(1 + (i * 7 + e * 5) % 6)]
        assert [obs[COUNT] for obs, *_ in steps] == expected[:len(steps)], "no step is lost or doubled"


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_a_rollback_of_one_lane_is_not_one_of_the_others(mode):
    stream = EnvStream(SyncVectorEnv([lambda: Clock(0), lambda: Clock(1)], autoreset_mode=mode))
    stream.reset(0)
    found = set()
    for t in range(60):
        x = stream.obs[:, COUNT].long()
        out = stream.step(torch.stack([x % 3, x % 2], 1))
        assert torch.equal(out.rolled_back, out.reward == -5.)
        found.add(tuple(out.rolled_back.tolist()))
    assert {(True, False), (False, True)} <= found


def test_a_rollback_begins_an_episode_at_once():
    stream = EnvStream(SyncVectorEnv([lambda: Quiet(2)], autoreset_mode=AutoresetMode.DISABLED))
    stream.reset(0)
    starts = []
    for t in range(40):
        x = int(stream.obs[0, COUNT])
        out = stream.step(torch.tensor([[x % 3, x % 2]]))
        if out.rolled_back[0]: starts.append((stream.start[0].item(), out.terminated[0].item()))
    assert starts and all(a and b for a, b in starts)


class Cut(Clock):
    "A rollback in the very step that a time limit cuts off."
    def step(self, action):
        obs, reward, term, trunc, info = super().step(action)
        info.pop("rolled_back", None)
        if term or trunc: reward, info["rolled_back"] = -5., True
        return obs, reward, False, term or trunc, info


@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_rollback_turns_a_truncation_into_a_termination(mode):
    stream = EnvStream(SyncVectorEnv([lambda: Cut(2)], autoreset_mode=mode))
    stream.reset(0)
    found = 0
    for t in range(40):
        x = int(stream.obs[0, COUNT])
        out = stream.step(torch.tensor([[x % 3, x % 2]]))
        if not out.rolled_back[0]: continue
        found += 1
        assert out.terminated[0] and not out.truncated[0] and out.final_obs is None and out.reward[0] == -5.
    assert found > 3


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 8), st.integers(1, 9), st.integers(1, 8), st.booleans(), st.integers(0, 1000))
def test_minibatches_cover_everything_once(T, n, count, memory, seed):
    roll, _ = random_rollout(T, n, seed)
    roll.value = torch.arange(T * n).float().view(T, n)
    roll.state = torch.zeros(2 if memory else 0, n, 4)
    total = n if memory else T * n
    if count > total: return
    parts = list(roll.minibatches(count, torch.Generator().manual_seed(seed)))
    assert len(parts) == count
    assert sorted(torch.cat([b.value.flatten() for b in parts]).tolist()) == list(range(T * n))
    if memory: assert all((b.value[1:] - b.value[:-1] == n).all() for b in parts), "lanes stay whole and in order"
