"A learner that is loaded beside environments that nobody restored begins their episodes anew, and says so."
import warnings

import gymnasium as gym
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from esper_nb.control import GrowVecEnv
from esper_nb.learn import Learner, PolicyConfig, PPOConfig, train_ppo
from esper_nb.record import EnvState

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = PPOConfig(num_steps=24, num_updates=4, num_minibatches=2)


def learner(core, mode):
    envs = SyncVectorEnv([lambda: gym.make("CartPole-v1", max_episode_steps=9)] * 3, autoreset_mode=mode)
    return Learner(envs, SETTINGS, PolicyConfig(core=core, hidden=8, features=(8,)))

def saved_at(core, mode, steps):
    one = learner(core, mode)
    for _ in range(steps): one.step()
    return one


@pytest.mark.parametrize("core", ["lstm", "none"])
@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("steps", [1, 13, 23, 24])
def test_what_was_under_way_is_truncated_and_memory_begins_anew(core, mode, steps):
    one, two = saved_at(core, mode, steps), learner(core, mode)
    two.load_state_dict(one.state_dict())
    t = two.rollout.t
    value = two._values(two.view(two.stream.obs), two.state, two.stream.start) # noqa: SLF001
    open_ = two.rollout.valid[t - 1] & ~two.rollout.done[t - 1] if t else None
    with pytest.warns(UserWarning, match="were not restored with the learner.*EnvState"): two.step_envs()
    if t:
        assert torch.equal(two.rollout.truncated[t - 1] & open_, open_)
        torch.testing.assert_close(two.rollout.final_value[t - 1][open_], value.detach()[open_])
        assert two.rollout.start[t].all()
    else: assert two.rollout.start[0].all() and (two.rollout.state == 0).all()
    with warnings.catch_warnings(action="error"): rest = list(train_ppo(two))
    assert [u.update for u in rest][-1] == 4 and max(u.first_gap for u in rest) < 1e-6
    assert all(sum(u.lengths) <= 24 * 3 + 27 and max(u.lengths, default=0) <= 9 for u in rest)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_restored_environments_go_on_exactly(mode):
    one, two = saved_at("lstm", mode, 13), learner("lstm", mode)
    two.load_state_dict(one.state_dict())
    EnvState(two.stream.envs).load_state_dict(EnvState(one.stream.envs).state_dict())
    with warnings.catch_warnings(action="error"):
        assert list(train_ppo(two)) == list(train_ppo(one))
    again = saved_at("lstm", mode, 0)
    again.load_state_dict(two.state_dict()) # the environments have a mark from before
    state = EnvState(two.stream.envs).state_dict()
    assert not any("restored" in layer["data"] for layer in state["layers"])


def test_the_same_learner_goes_on_without_a_word():
    one = saved_at("none", AutoresetMode.SAME_STEP, 7)
    with warnings.catch_warnings(action="error"):
        one.load_state_dict(one.state_dict())
        one.step()


def grown(): return GrowVecEnv(task="digits_impaired", num_envs=2, horizon=4, limit=64, workers=1)
def plain(): return SyncVectorEnv([lambda: gym.make("CartPole-v1", max_episode_steps=9)] * 3)

@pytest.mark.parametrize("make, keeper", [(grown, lambda envs: envs), (grown, EnvState), (plain, EnvState)],
                         ids=["own state", "EnvState", "plain"])
@pytest.mark.parametrize("envs_first", [True, False])
def test_environments_and_learner_are_restored_in_any_order(make, keeper, envs_first):
    def fresh():
        envs = make()
        heads = getattr(envs, "actions", None)
        settings = PPOConfig(num_steps=6, num_updates=2, num_minibatches=2)
        return Learner(envs, settings, PolicyConfig(hidden=8, features=(8,)), heads=heads)
    one, two, lone = fresh(), fresh(), fresh()
    for _ in range(3): one.step()
    pairs = [(keeper(two.stream.envs), keeper(one.stream.envs).state_dict()), (two, one.state_dict())]
    lone.load_state_dict(one.state_dict())
    for part, state in pairs if envs_first else pairs[::-1]: part.load_state_dict(state)
    with warnings.catch_warnings(action="error"): assert list(train_ppo(two)) == list(train_ppo(one))
    with pytest.warns(UserWarning, match="were not restored with the learner"): list(train_ppo(lone))
    again = Learner(two.stream.envs, one.config, one.policy.config, heads=None if make is plain else one.heads)
    again.load_state_dict(one.state_dict()) # the mark is gone: these environments went on since
    with pytest.warns(UserWarning, match="were not restored with the learner"): again.step()
