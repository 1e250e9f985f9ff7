"Other people's agents on our environment: Stable-Baselines3 on lanes, a loop of one file, TorchRL."
import importlib.util
import json
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

from esper_nb.control.envs import GrowVecEnv, sb3_env

pytestmark = pytest.mark.usefixtures("one_thread")
WORLD = dict(task="digits_impaired", limit=128, horizon=4, workers=1, blueprints=("norm", "conv_small"), gamma=.99)
PAGE = Path(__file__).resolve().parents[1]/"nbs"/"tutorials"/"train_sb3.ipynb"


def lanes(n=3, mode="SameStep", **kw): return GrowVecEnv(num_envs=n, autoreset_mode=mode, **WORLD | kw)


def test_other_modes_are_refused_and_two_runs_are_one():
    sb3 = pytest.importorskip("stable_baselines3", reason="the adapter needs: pip install 'esper_nb[bench]'")
    with pytest.raises(ValueError, match="autoreset_mode='NextStep'.*'SameStep'"): lanes(mode="NextStep").for_sb3()
    with pytest.raises(ValueError, match="autoreset_mode"): sb3_env(gym.make_vec("CartPole-v1", 2))
    def weights():
        agent = sb3.PPO("MlpPolicy", lanes().for_sb3(), n_steps=4, batch_size=12, n_epochs=1, seed=0).learn(24)
        assert [e["l"] for e in agent.ep_info_buffer] == [4] * 6
        return torch.cat([p.detach().flatten() for p in agent.policy.parameters()])
    assert torch.equal(weights(), weights())


def test_without_the_package_it_says_what_to_install(monkeypatch):
    import sys
    for k in [k for k in sys.modules if k.split(".")[0] == "stable_baselines3"]: monkeypatch.delitem(sys.modules, k)
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    with pytest.raises(ImportError, match="pip install stable-baselines3"): lanes(1).for_sb3()


def one_file(*more):
    "The loop of the tutorial, and other names of it."
    space = dict(torch=torch, np=np, gym=gym, world=WORLD, importlib=importlib, warnings=warnings, four=lanes(4))
    for cell in json.loads(PAGE.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if source.startswith(("class Agent", "def one_file_ppo", *more)): exec(source, space)
    return space


def test_a_loop_of_one_file_learns_where_there_is_something_to_learn():
    class Doors(gym.vector.VectorEnv):
        "One of four doors is paid for, which the observation names; a door is closed."
        num_envs, metadata = 8, {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}
        single_observation_space, single_action_space = gym.spaces.Box(0, 1, (4,)), gym.spaces.MultiDiscrete([4])

        def _see(self):
            self.paid = self.rng.integers(0, 4, 8)
            shut = (self.paid + 1) % 4
            mask = np.ones((8, 4), bool)
            mask[range(8), shut] = False
            self.mask = mask
            return np.eye(4, dtype=np.float32)[self.paid], dict(action_mask=mask)

        def reset(self, *, seed=None, options=None):
            self.rng, self.over = np.random.default_rng(seed), np.zeros(8, bool)
            return self._see()

        def step(self, action):
            assert self.mask[range(8), action[:, 0]].all(), "a door that is shut was chosen"
            reward = np.where(self.over, 0., action[:, 0] == self.paid)
            self.over = ~self.over
            obs, info = self._see()
            return obs, reward, self.over.copy(), np.zeros(8, bool), info

    _, paid = one_file()["one_file_ppo"](Doors(), updates=30, steps=32, lr=.02)
    assert paid[0] < .6 and np.mean(paid[-3:]) > .9


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_torchrl_takes_what_gymnasium_makes():
    pytest.importorskip("torchrl", reason="TorchRL is not installed: pip install torchrl")
    from torchrl.envs import GymWrapper
    from torchrl.envs.utils import check_env_specs
    env = GymWrapper(gym.make("esper_nb/Grow-v0", **WORLD), categorical_action_encoding=True)
    env.set_seed(0)
    check_env_specs(env)
    played = env.rollout(4)
    assert played["next", "done"].flatten().tolist() == [False, False, False, True]
    assert played["next", "observation"].isfinite().all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_loop_of_torchrl_is_the_same_twice():
    pytest.importorskip("torchrl", reason="TorchRL is not installed: pip install torchrl")
    space = one_file("# NBVAL_IGNORE_OUTPUT\nhas_torchrl", "# NBVAL_IGNORE_OUTPUT\ndef torchrl_loop")
    (one, losses), (two, again) = (space["torchrl_loop"](frames=8) for _ in range(2))
    assert losses == again and len(losses) == 2 and all(np.isfinite(losses))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))
