"What any Gymnasium vector environment owes its users, in every autoreset mode; Gymnasium's own is held to the same."
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from esper_nb.control import GrowEnv, GrowVecEnv
from esper_nb.grow import CNNConfig
from esper_nb.train import ImageData, Task

HOST = CNNConfig(classes=4, in_channels=1, size=4, blocks=2, base=2, kernel=1, pools=1)
TASK = Task("tiny", "digits", HOST, ("r0c0", "r0c1"), batch_size=16, epochs=3, lr=.02)
SMALL = dict(task=TASK, blueprints=("norm", "conv_small"), workers=1)


def tiny_data():
    g = torch.Generator().manual_seed(0)
    def split(n): return torch.randint(0, 256, (n, 4, 4, 1), generator=g, dtype=torch.uint8), torch.arange(n) % 4
    return ImageData(*split(32), *split(16), *split(16), classes=4)


def grow(mode, n=3): return GrowVecEnv(data=tiny_data(), num_envs=n, autoreset_mode=mode, **SMALL)
def grow_sync(mode, n=3): return SyncVectorEnv([lambda: GrowEnv(data=tiny_data(), **SMALL)] * n, autoreset_mode=mode)


def cartpole_sync(mode, n=3):
    return SyncVectorEnv([lambda: gym.make("CartPole-v1", max_episode_steps=12)] * n, autoreset_mode=mode)


pytestmark = pytest.mark.usefixtures("one_thread")


def same(a, b):
    "Deep equality of what environments return."
    if isinstance(a, dict): return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, np.ndarray) and a.dtype == object: return all(same(x, y) for x, y in zip(a, b))
    return np.array_equal(a, b, equal_nan=isinstance(a, np.ndarray) and a.dtype.kind == "f")


def check_flags(info, n):
    "Every entry says for which lanes it holds."
    for k, v in info.items():
        if k.startswith("_"): assert v.shape == (n,) and v.dtype == np.bool_; continue
        assert f"_{k}" in info, k
        if isinstance(v, dict): check_flags(v, n)
        else: assert len(v) == n, k


def check_step(envs, result):
    obs, reward, term, trunc, info = result
    n = envs.num_envs
    assert obs in envs.observation_space and obs.dtype == envs.single_observation_space.dtype
    assert reward.shape == term.shape == trunc.shape == (n,) and np.isfinite(reward).all()
    assert reward.dtype == np.float64 and term.dtype == trunc.dtype == np.bool_
    check_flags(info, n)
    return obs, reward, term, trunc, info


def check_spaces(envs):
    n, mode = envs.num_envs, envs.metadata["autoreset_mode"]
    assert isinstance(mode, AutoresetMode) and isinstance(envs, gym.vector.VectorEnv) and envs.unwrapped is envs
    assert envs.observation_space == gym.vector.utils.batch_space(envs.single_observation_space, n)
    assert envs.action_space == gym.vector.utils.batch_space(envs.single_action_space, n)


def check_seeds(envs, steps=6):
    def run(seed):
        envs.action_space.seed(1)
        obs, info = envs.reset(seed=seed)
        out = [obs.copy(), info]
        for _ in range(steps):
            obs, reward, term, trunc, info = check_step(envs, envs.step(envs.action_space.sample()))
            out += [obs.copy(), reward.copy(), term.copy(), trunc.copy()]
            out.append({k: v for k, v in info.items() if k != "episode"})
            done = term | trunc
            if envs.metadata["autoreset_mode"] == AutoresetMode.DISABLED and done.any():
                envs.reset(options={"reset_mask": done})
        return out
    first, again, other = run(5), run(5), run(6)
    assert all(same(a, b) for a, b in zip(first, again))
    assert any(not same(a, b) for a, b in zip(first, other))


def check_ends(envs, steps=60):
    "Lanes end, and the next episode is shown where the mode says."
    mode, n, seen = envs.metadata["autoreset_mode"], envs.num_envs, 0
    envs.action_space.seed(0)
    obs, _ = envs.reset(seed=0)
    pending = np.zeros(n, bool)
    for _ in range(steps):
        obs, reward, term, trunc, info = check_step(envs, envs.step(envs.action_space.sample()))
        done = term | trunc
        assert not (term & trunc).any() or isinstance(envs, SyncVectorEnv)
        if mode == AutoresetMode.NEXT_STEP:
            assert not done[pending].any() and (reward[pending] == 0).all() # the step after an end resets
            assert "final_obs" not in info
            pending = done
        if mode == AutoresetMode.SAME_STEP:
            assert ("final_obs" in info) == ("final_info" in info) == bool(done.any())
            if done.any():
                assert np.array_equal(info["_final_obs"], done) and np.array_equal(info["_final_info"], done)
                for i in range(n):
                    final = info["final_obs"][i]
                    assert (final in envs.single_observation_space) if done[i] else final is None
                    if done[i]: assert not np.array_equal(final, obs[i])
        if mode == AutoresetMode.DISABLED and done.any():
            with pytest.raises((AssertionError, RuntimeError)): envs.step(envs.action_space.sample())
            before = obs.copy()
            obs, info = envs.reset(options={"reset_mask": done.copy()})
            assert obs in envs.observation_space and np.array_equal(obs[~done], before[~done])
        seen += int(done.sum())
    assert seen >= n


def check_reset_masks(envs):
    if envs.metadata["autoreset_mode"] != AutoresetMode.DISABLED: return
    envs.reset(seed=0)
    n = envs.num_envs
    for bad in ([True] * n, np.ones(n + 1, bool), np.ones(n, int), np.zeros(n, bool)):
        with pytest.raises((TypeError, ValueError)): envs.reset(options={"reset_mask": bad})
    first, _ = envs.reset(seed=3)
    first = first.copy()
    envs.action_space.seed(0)
    after = envs.step(envs.action_space.sample())[0].copy()
    mask = np.arange(envs.num_envs) == 1
    obs, _ = envs.reset(seed=3, options={"reset_mask": mask})
    assert np.array_equal(obs[~mask], after[~mask])


def check_data_is_the_callers(envs):
    "Arrays that were handed out do not change later, and writing into them changes nothing."
    envs.action_space.seed(0)
    envs.reset(seed=0)
    action = envs.action_space.sample()
    obs, reward, term, trunc, info = envs.step(action)
    kept = obs.copy(), reward.copy(), term.copy(), trunc.copy()
    if not (term | trunc).any(): envs.step(action)
    assert all(np.array_equal(a, b) for a, b in zip((obs, reward, term, trunc), kept))


SOME_MODES = [AutoresetMode.SAME_STEP, *(
    pytest.param(mode, marks=pytest.mark.slow) for mode in AutoresetMode if mode != AutoresetMode.SAME_STEP)]


@pytest.mark.parametrize("mode", SOME_MODES)
@pytest.mark.parametrize("make", [grow, pytest.param(grow_sync, marks=pytest.mark.slow), cartpole_sync])
def test_vector_environment(make, mode):
    envs = make(mode)
    for check in (check_spaces, check_seeds, check_ends, check_reset_masks, check_data_is_the_callers): check(envs)
    envs.close(); envs.close()


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_masks_come_with_every_observation_and_are_the_callers(mode):
    envs = grow(mode)
    with pytest.raises(RuntimeError, match="reset"): envs.step(envs.action_space.sample())
    _, info = envs.reset(seed=0)
    for _ in range(7):
        assert info["action_mask"].shape == (3, envs.actions.width) and info["_action_mask"].all()
        assert np.array_equal(info["action_mask"][:, :envs.actions.flat], envs.action_masks())
        info["action_mask"][:] = False # scribbled over
        envs.action_masks()[:] = False
        heads = np.split(envs.action_masks(), np.cumsum(envs.actions.sizes)[:-1], axis=1)
        assert envs.mask.any(1).all() and all(h.any(1).all() for h in heads)
        obs, _, term, trunc, info = envs.step(np.zeros((3, 8), int))
        obs[:] = np.nan
        done = term | trunc
        if mode == AutoresetMode.DISABLED and done.any(): _, info = envs.reset(options={"reset_mask": done})


def test_actions_outside_the_space_are_errors():
    envs = grow("Disabled")
    envs.reset(seed=0)
    for bad in (np.zeros((2, 8), int), np.full((3, 8), 99), np.full((3, 8), -1)):
        with pytest.raises(ValueError, match="actions"): envs.step(bad)
    assert envs.steps == 0 and (envs.lanes.trained == 0).all()
