"Masks and actions of a small environment; test_suite_gymnasium.py holds it to what Gymnasium's own of many does."
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

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


pytestmark = pytest.mark.usefixtures("one_thread")


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
    assert (envs.lanes.trained == 0).all()


def test_reset_masks_of_another_kind_are_errors():
    envs = grow("Disabled")
    envs.reset(seed=0)
    for bad in ([True] * 3, np.ones(4, bool), np.ones(3, int), np.zeros(3, bool)):
        with pytest.raises((TypeError, ValueError)): envs.reset(options={"reset_mask": bad})


def test_options_that_are_no_dictionary_are_refused():
    one = GrowEnv(data=tiny_data(), **SMALL)
    for env in (one, grow("Disabled")):
        for wrong in (3, [], "fresh", True, {"fresh"}):
            with pytest.raises(ValueError, match="options=.*expected a dictionary, such as {'fresh'"):
                env.reset(options=wrong)
    with pytest.raises(RuntimeError, match="reset"): one.step([0] * 8) # nothing has begun
    one.reset(seed=0, options={})
