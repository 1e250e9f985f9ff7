"""What may change, and what stays equal to the bit: with `exact` a lane's numbers are its own.

    what may change                             observation  reward  losses  reports  weights
    neighbours act and are ruined otherwise          =          =       =       =        =
    1, 2, 16 lanes                                   =          =       =       =        =
    1, 2 workers                                     =          =       =       =        =
    1, 2, 4 shards, and resumed in more              =          =       =       =        =
    1, 2 processes, and resumed in more              =          =       =       =        =
    1, 3 actors of Ray, and resumed in more          =          =       =       =        =
    1, 2 workers in each of 2 shards                 =          =       =       =        =

They hold for a network with masks and for a GPT, too, and in bf16. The quick run has a cell of each kind in this
process; all others are slow.
"""
from functools import partial

import numpy as np
import pytest
import torch
import warm
from test_workers import cluster, needs_ray # noqa: F401 (a fixture)
from tiny import same

from esper_nb.control import EnvConfig, GrowVecEnv
from esper_nb.record import EnvRows, encode_row
from esper_nb.run import engines
from esper_nb.run import SplitVecEnv, begin_run, get_recipe, open_run
from esper_nb.train import Fault, FitConfig, fit, get_task, new_population

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS, SEEDS = 6, (11, 12) # of what lane 0 does, and of what the others do
# lane 0 is ruined, too: what its Governor does is part of its numbers
OWN = Fault("nan", lane=0, epoch=2), Fault("explode", lane=0, epoch=4)
OTHERS = Fault("nan", lane=1, epoch=1, batch=1), Fault("lobotomy", lane=1, epoch=3)
CONFIG = EnvConfig("digits", num_envs=2, horizon=STEPS, limit=128, workers=1, exact=True, faults=OWN,
                   blueprints=("conv_light", "norm"))


def choice(env, lane, rng):
    "Return a random legal action of a lane, which is a wait now and then."
    sizes = env.single_action_space.nvec
    for _ in range(300):
        actions = torch.zeros(env.num_envs, len(sizes), dtype=torch.int64)
        actions[lane] = torch.from_numpy(rng.integers(0, sizes))
        if actions[lane, 0] and env.actions.allowed(env.mask, actions)[lane]: return actions[lane].numpy()
    return np.zeros(len(sizes), np.int64)

def begun(env, seed=3):
    env.reset(seed=seed)
    return env

def go_on(env, steps, others=None):
    "Return what lane 0 shows in some steps; the others wait, or act with seeds of their own."
    rngs = [np.random.default_rng((SEEDS[0], steps.start))]
    rngs += [None if others is None else np.random.default_rng((others, i)) for i in range(1, env.num_envs)]
    seen = []
    for _ in steps:
        acts = [np.zeros(len(env.single_action_space.nvec), np.int64) if r is None else choice(env, i, r)
                for i, r in enumerate(rngs)]
        obs, reward, *_ = env.step(np.stack(acts))
        s = env.last_result
        seen += [obs[0].tobytes(), float(reward[0]), float(s.loss[0]), float(s.train_loss[0]), s.op[0],
                 bool(s.rolled_back[0])]
    return seen

def weights(env):
    "Return the weights of lane 0."
    if not isinstance(env, SplitVecEnv): return env.parts[0].population.model.lane(0).state_dict()
    return env.state_dict()["shards"][0]["parts"][0]["model"] # each lane has a population of its own


def reports(env, tell, k):
    "Return what the Governor of lane 0 says of a step."
    rows = env.rows(epoch=k) if isinstance(env, SplitVecEnv) else tell(env, epoch=k)
    said = [row | {"governor.seconds": 0.} for row in rows if row["kind"] == "governor" and row["lane"] == 0]
    return list(map(encode_row, said))

def shown(env, others=None, at=None, resumed=None):
    "Return what lane 0 shows in an episode, what its Governor says, and its weights; from step `at` on in another one."
    begun(env)
    seen, said, tell = [], [], EnvRows(growth=False)
    for k in range(STEPS):
        if k == at:
            state = env.state_dict()
            env.close()
            env = begun(resumed(), seed=99)
            env.load_state_dict(state)
        seen += go_on(env, range(k, k + 1), others if others is None else others + k)
        said += reports(env, tell, k)
    w = weights(env)
    env.close()
    return repr(seen), said, w

@pytest.fixture(scope="module")
def alone():
    "Lane 0 of two, the other one waits."
    out = shown(GrowVecEnv(CONFIG))
    assert any("rollback" in r for r in out[1]) and "germinate" in out[0]
    return out

slow = partial(pytest.param, marks=pytest.mark.slow)

def test_neighbours_that_act_and_are_ruined_otherwise_change_nothing(alone):
    assert same(shown(GrowVecEnv(CONFIG.replace(faults=(*OWN, *OTHERS))), SEEDS[1]), alone)

@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 16])
def test_the_number_of_lanes_changes_nothing(alone, lanes):
    faults = (*OWN, *OTHERS) if lanes > 1 else OWN
    assert same(shown(GrowVecEnv(CONFIG.replace(num_envs=lanes, faults=faults)), SEEDS[1] + lanes), alone)

@pytest.mark.slow
def test_the_number_of_workers_changes_nothing(alone):
    assert same(shown(GrowVecEnv(CONFIG.replace(workers=2, faults=(*OWN, *OTHERS))), SEEDS[1]), alone)


@pytest.mark.slow
@pytest.mark.parametrize("other", [dict(task="digits_masked", blueprints=None), dict(precision="bf16"),
                                   dict(task="prose", blueprints=None, limit=16, batch_size=8)])
def test_other_networks_and_numbers_of_another_precision_have_no_neighbours_either(other):
    config = CONFIG.replace(**other)
    others = config.replace(num_envs=3, faults=(*OWN, *OTHERS))
    lone = shown(GrowVecEnv(config))
    assert same(shown(GrowVecEnv(others), SEEDS[1]), lone) and same(shown(SplitVecEnv(others, 2), SEEDS[1]), lone)


# --- shards, which hold their lanes one by one, here and in other processes

PARTS = CONFIG.replace(num_envs=4, faults=(*OWN, *OTHERS))

@pytest.mark.parametrize("engine, shards, resumed", [
    ("local", 1, 2), slow("local", 2, 4), slow("process", 1, 2),
    pytest.param("ray", 1, 3, marks=[needs_ray, pytest.mark.slow])])
def test_shards_and_a_resume_in_others_change_nothing(alone, engine, shards, resumed, request, monkeypatch):
    monkeypatch.setattr(engines, "get_context", warm.context)
    if engine == "ray": request.getfixturevalue("cluster")
    def made(n): return SplitVecEnv(PARTS, n, engine) # one after the other: there may be two cores
    assert same(shown(made(shards), SEEDS[1], resumed and STEPS // 2, partial(made, resumed)), alone)

@pytest.mark.slow
def test_shards_of_two_workers_change_nothing(alone):
    assert same(shown(SplitVecEnv(PARTS.replace(workers=2)), SEEDS[1]), alone)

@pytest.mark.slow
def test_a_run_goes_on_in_other_shards_with_the_same_numbers(tmp_path):
    "Rows, the learner's weights and those of all lanes."
    recipe = get_recipe("digits_impaired", {
        "env.num_envs": 4, "env.horizon": 4, "env.limit": 128, "env.exact": True, "ppo.num_steps": 4,
        "ppo.num_minibatches": 1, "ppo.num_updates": 3})
    def end(run):
        for _ in run.updates(): pass
        rows = [encode_row({k: v for k, v in r.items() if not k.endswith("seconds")}) for r in run.folder.rows()]
        states = [s["parts"][0]["model"] for s in run.env.state_dict()["shards"]]
        return rows, [run.learner.policy.state_dict(), *states]
    whole = end(begin_run(recipe, tmp_path))
    for first, then in ((1, 2), (4, 1)):
        run = begin_run(recipe.replace(shards=first), tmp_path)
        for _ in run.updates(): break
        rows, states = end(open_run(run.folder.path, {"shards": then}))
        assert rows == whole[0] and all(map(same, states, whole[1]))

# --- fits

@pytest.mark.parametrize("lanes", [2, slow(16)])
def test_a_fit_of_any_number_of_lanes_and_workers_is_the_same(lanes):
    few = get_task("digits").load("cpu", None, 128)
    def trained(lanes, workers):
        pop = new_population("digits", FitConfig(lanes=lanes, epochs=2, workers=workers, exact=True), data=few)
        losses = [r.train.losses[:, 0] for r in fit(pop)]
        return dict(enumerate(losses)) | pop.model.lane(0).state_dict() | dict(test=pop.evaluate("test").loss[:1])
    assert same(trained(lanes, 2), trained(3, 1))
