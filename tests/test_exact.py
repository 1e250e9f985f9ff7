"""What may change, and what stays equal to the bit: with `exact` a lane's numbers are its own.

    what may change                        observation  reward  losses  reports  weights
    neighbours act and are ruined otherwise     =          =       =       =        =
    1, 2, 3, 5 (and 16) lanes                   =          =       =       =        =
    1, 2, 4 parts                               =          =       =       =        =
    1, 2 workers                                =          =       =       =        =
    resumed on another number of parts          =          =       =       =        =
"""
import numpy as np
import pytest
import torch

from esper_nb.control import EnvConfig, GrowVecEnv
from esper_nb.record import encode_row
from esper_nb.run import SplitVecEnv, begin_run, get_recipe, open_run
from esper_nb.train import Fault, FitConfig, fit, get_task, new_population

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS, SEEDS = 8, (11, 12) # of what lane 0 does, and of what the others do
# lane 0 is ruined, too: what its Governor does is part of its numbers
OWN = Fault("nan", lane=0, epoch=3), Fault("explode", lane=0, epoch=6)
OTHERS = Fault("nan", lane=1, epoch=2, batch=1), Fault("lobotomy", lane=1, epoch=5)
CONFIG = EnvConfig("digits", num_envs=3, horizon=STEPS, limit=192, workers=1, exact=True, faults=OWN,
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

def weights(env): return env.parts[0].population.model.lane(0).state_dict()

def equal(a, b): return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)

def shown(config, others=None):
    "Return what lane 0 shows in an episode, what its Governor says, and its weights at the end."
    env = begun(GrowVecEnv(config))
    seen, reports = [], []
    for k in range(STEPS):
        seen += go_on(env, range(k, k + 1), others if others is None else others + k)
        reports += [str(r) for r in env.reports if r.lane == 0]
    env.close()
    return seen, reports, weights(env)

@pytest.fixture(scope="module")
def alone():
    "Lane 0 among three, the others wait."
    out = shown(CONFIG)
    assert any("rollback" in r for r in out[1]) and "germinate" in out[0]
    return out

def same(found, alone):
    seen, reports, w = found
    return repr(seen) == repr(alone[0]) and reports == alone[1] and equal(w, alone[2])

def test_neighbours_that_act_and_are_ruined_otherwise_change_nothing(alone):
    assert same(shown(CONFIG.replace(faults=(*OWN, *OTHERS)), others=SEEDS[1]), alone)

@pytest.mark.parametrize("lanes", [1, 2, pytest.param(16, marks=pytest.mark.slow), 5])
def test_the_number_of_lanes_changes_nothing(alone, lanes):
    faults = (*OWN, *OTHERS) if lanes > 1 else OWN
    assert same(shown(CONFIG.replace(num_envs=lanes, faults=faults), others=SEEDS[1] + lanes), alone)

def test_the_number_of_workers_changes_nothing(alone):
    assert same(shown(CONFIG.replace(workers=2, faults=(*OWN, *OTHERS)), others=SEEDS[1]), alone)


# --- shards, which hold their lanes one by one

PARTS = CONFIG.replace(num_envs=4, faults=(*OWN, *OTHERS))

def lane_of(env): return [s["parts"][0]["model"] for s in env.state_dict()["shards"]][0]

def shown_in(shards, resumed=None, at=5):
    "Return what lane 0 shows in shards, and its weights; from a step on in another number of them."
    env, seen = begun(SplitVecEnv(PARTS, shards)), []
    for k in range(STEPS):
        if k == at and resumed is not None:
            state = env.state_dict()
            env.close()
            env = begun(SplitVecEnv(PARTS, resumed), seed=99)
            env.load_state_dict(state)
        seen += go_on(env, range(k, k + 1), SEEDS[1] + k)
    env.close()
    return seen, lane_of(env)

@pytest.mark.parametrize("shards, resumed", [(1, None), (2, 4), (4, None), (2, None), (4, 1), (1, 4)])
def test_shards_and_a_resume_in_others_change_nothing(alone, shards, resumed):
    seen, w = shown_in(shards, resumed)
    assert repr(seen) == repr(alone[0]) and equal(w, alone[2])

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
        assert rows == whole[0] and all(map(equal, states, whole[1]))

# --- fits

@pytest.mark.parametrize("lanes", [1, 5])
def test_a_fit_of_any_number_of_lanes_and_workers_is_the_same(lanes):
    def trained(lanes, workers):
        pop = new_population("digits", FitConfig(lanes=lanes, epochs=2, workers=workers, exact=True),
                             data=get_task("digits").load("cpu", None, 256))
        losses = [r.train.losses[:, 0] for r in fit(pop)]
        return dict(enumerate(losses)) | pop.model.lane(0).state_dict() | dict(test=pop.evaluate("test").loss[:1])
    assert equal(trained(lanes, 2), trained(3, 1))
