"One row in one file: a new observation, operation and blueprint, seen where they should be and nowhere else."
import pytest
import torch
from test_vector_conformance import TASK, tiny_data

from esper_nb import PPOConfig, PolicyConfig, begin_run, get_recipe, open_run
from esper_nb.control import (
    OBSERVATIONS, OPERATIONS, OPS, Choice, GrowVecEnv, Observation, Operation, Repertoire, register_observation,
    register_operation)
from esper_nb.core import conv2d
from esper_nb.grow import Decision, Stage, blueprint, forget_blueprint
from esper_nb.learn import Learner
from esper_nb.record import EnvRows, action_mix, observation_ranges
from esper_nb.run import PolicyPlayer
from esper_nb.show import controller_curves
from esper_nb.run.report import _choices_section

SMALL = dict(task=TASK, workers=1, horizon=3, num_envs=2)


@pytest.fixture
def learning_rate():
    yield register_observation(Observation("lr", "0.1", (0., 2., -1.), "learning rate of the latest epoch",
                                           lambda v: v.history.lr, .1, per="lane", record=True))
    del OBSERVATIONS["lr"]


@pytest.fixture
def drop_young():
    "An operation that the package does not have: take out a seed that has only just germinated."
    yield register_operation(Operation(
        "drop_young", ("slot",), lambda v: v.in_stage(Stage.GERMINATED) & v.free,
        lambda c: Decision("prune", c.slot), "take out a seed that has only just germinated"))
    del OPERATIONS["drop_young"]


def test_an_observation_is_one_row(learning_rate):
    env = GrowVecEnv(data=tiny_data(), **SMALL)
    env.reset(seed=0)
    note, rows, at = EnvRows(growth=False), [], env.observer.index("lr")
    assert (env.obs[:, at] == -1).all() # no epoch yet
    for t in range(2):
        env.step([[0] * 8] * 2)
        rows += note(env, step=t)
    assert torch.allclose(env.obs[:, at].double(), env.last_result.lr / .1)
    words = dict(lr=OBSERVATIONS["lr"].help)
    assert observation_ranges(rows)["lr"][0] == -1
    assert "learning rate of the latest epoch" in _choices_section(rows, words)
    old = GrowVecEnv(data=tiny_data(), **SMALL, observations=tuple(k for k in OBSERVATIONS if k != "lr"))
    assert old.observer.size == env.observer.size - 1 and "lr" not in old.config.observations


def test_an_operation_is_one_row(drop_young):
    assert "drop_young" not in GrowVecEnv(data=tiny_data(), **SMALL).actions.ops # offered where it is named
    env = GrowVecEnv(data=tiny_data(), **SMALL, repertoire=Repertoire((*OPS, "drop_young"), several=True))
    env.reset(seed=0)
    drop = env.actions.encode(Choice("drop_young", "r0c0"))
    assert not env.actions.allowed(env.mask, drop.expand(2, -1)).any()
    begin = env.actions.encode(Choice("germinate", "r0c0", env.actions.blueprints[0]))
    env.carry_out(begin.expand(2, -1))
    env.refresh()
    assert env.actions.allowed(env.mask, drop.expand(2, -1)).all() # mask and execution are of one row
    env.step(torch.stack([drop, env.actions.encode(Choice())]).numpy())
    assert env.last_result.op == ("drop_young", "wait") and env.last_result.ok.all()
    rows = EnvRows(growth=False)(env, step=0)
    assert action_mix(rows)["drop_young"] == (.5, 0.) and "drop young" in _choices_section(rows, {})
    assert "drop_young" in controller_curves() and "op_drop_young" in [f.name for f in env.observer.features]


@pytest.fixture
def later_blueprint():
    "What somebody registers after a policy was trained."
    def register():
        @blueprint("later", "cnn", 4_096)
        def _later(channels, lanes): return conv2d(channels, channels, 1, lanes, bias=False)
    yield register
    forget_blueprint("later", "cnn")


def test_a_blueprint_that_is_registered_later_leaves_an_old_policy_as_it_is(later_blueprint, tmp_path):
    settings = {"env.num_envs": 2, "env.horizon": 2, "env.limit": 64, "env.workers": 1, "ppo.num_steps": 2,
                "ppo.num_minibatches": 1, "ppo.num_updates": 1}
    run = begin_run(get_recipe("digits_impaired", settings), tmp_path)
    for _ in run.updates(): pass
    env = GrowVecEnv(task="digits_impaired", num_envs=2, horizon=2, limit=64, workers=1)
    later_blueprint()
    longer = open_run(run.folder.path, {"ppo.num_updates": 2})
    assert longer.env.actions.names == run.env.actions.names and "later" not in longer.env.actions.blueprints
    assert [u.update for u in longer.updates()] == [2]
    again = GrowVecEnv(env.config) # settings name what they mean
    assert again.actions.names == env.actions.names and again.observer.names == env.observer.names
    wider = GrowVecEnv(task="digits_impaired", num_envs=2, horizon=2, limit=64, workers=1)
    assert "later" in wider.actions.blueprints
    learner = Learner(env, PPOConfig(num_steps=2, num_minibatches=1), PolicyConfig(hidden=8), heads=env.actions)
    with pytest.raises(ValueError, match="blueprints of the policy=.*make it with blueprints="):
        PolicyPlayer(learner).begin(wider)
    env.reset(seed=0)
    with pytest.raises(ValueError, match="settings .*blueprints"): wider.load_state_dict(env.state_dict())
