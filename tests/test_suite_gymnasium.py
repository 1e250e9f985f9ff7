"Gymnasium's own checks, makers and wrappers over ours; its `SyncVectorEnv` of single environments is the oracle."
import copy
import pickle
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import wrappers as one_w
from gymnasium.utils import env_checker, passive_env_checker as passive
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import vector as many_w

from esper_nb.control import GrowEnv, GrowVecEnv
from tests.test_sb3_lanes import same
from tests.test_vector_conformance import SMALL, tiny_data

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:overflow encountered"),
              pytest.mark.filterwarnings("ignore:.*Vector environment's autoreset mode is same-step")]
N, ID, WORLD = 3, "esper_nb/Grow-v0", dict(task="digits_impaired", limit=64, horizon=3, workers=1)
SLOW, MODES = pytest.mark.slow, list(AutoresetMode)


def single(lane=0, render_mode=None):
    return GrowEnv(data=tiny_data(), first_lane=lane, render_mode=render_mode, **SMALL)
def made(render_mode=None): return gym.make(ID, data=tiny_data(), render_mode=render_mode, **SMALL)
def makers(render_mode=None): return [lambda i=i: single(i, render_mode) for i in range(N)]
def theirs(mode=AutoresetMode.SAME_STEP, render_mode=None):
    return SyncVectorEnv(makers(render_mode), autoreset_mode=mode)
def ours(mode=AutoresetMode.SAME_STEP, render_mode=None):
    return GrowVecEnv(data=tiny_data(), num_envs=N, autoreset_mode=mode, width=1, render_mode=render_mode, **SMALL)


def without_times(info):
    "Without the seconds that an episode took."
    if isinstance(info, list | tuple): return [without_times(i) for i in info]
    if not isinstance(info, dict): return info
    return {k: without_times(v) for k, v in info.items() if k not in ("t", "_t")}

def played(envs, steps=8, seed=5):
    "All that is returned from a reset and some steps; lanes that ended are reset where the mode leaves it to us."
    envs.action_space.seed(1)
    out = [envs.reset(seed=seed)]
    for _ in range(steps):
        out.append(envs.step(envs.action_space.sample()))
        done = np.asarray(out[-1][2]) | np.asarray(out[-1][3])
        if not isinstance(envs, gym.vector.VectorEnv | gym.vector.VectorWrapper):
            if done and not has(envs, one_w.Autoreset): out.append(envs.reset())
        elif envs.metadata["autoreset_mode"] == AutoresetMode.DISABLED and done.any():
            out.append(envs.reset(options=dict(reset_mask=done)))
    return [without_times(copy.deepcopy(x)) for x in out]

def alike(a, b): return all(same(list(x), list(y)) for x, y in zip(a, b, strict=True))
def has(env, wrapper): return isinstance(env, wrapper) or isinstance(env, gym.Wrapper) and has(env.env, wrapper)


# ---- checks

CHECKS = dict(
    all=lambda e: env_checker.check_env(made(e.render_mode).unwrapped, skip_render_check=e.render_mode is None),
    seeds=env_checker.check_reset_seed_determinism, options=env_checker.check_reset_options,
    returned=env_checker.check_reset_return_type, steps=env_checker.check_step_determinism,
    reused=env_checker.check_returned_data_not_reused, old_info=env_checker.check_reset_return_info_deprecation,
    old_seed=env_checker.check_seed_deprecation,
    observed=lambda e: env_checker.check_space_limit(e.observation_space, "observation"),
    acted=lambda e: env_checker.check_space_limit(e.action_space, "action"),
    space_observed=lambda e: passive.check_space(e.observation_space, "observation", passive.check_observation_space),
    space_acted=lambda e: passive.check_space(e.action_space, "action", passive.check_action_space),
    passive_reset=lambda e: passive.env_reset_passive_checker(e, seed=1, options={}),
    passive_step=lambda e: (e.reset(seed=0), passive.env_step_passive_checker(e, e.action_space.sample())),
    passive_render=lambda e: (e.reset(seed=0), passive.env_render_passive_checker(e)) if e.render_mode else None,
    passive_episodes=lambda e: played(one_w.PassiveEnvChecker(one_w.OrderEnforcing(e))))

@pytest.mark.parametrize("check, render_mode", [*((check, None) for check in CHECKS), *(
    (check, "rgb_array") for check in ("all", "passive_render", "passive_episodes"))])
def test_checks_find_nothing(check, render_mode):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CHECKS[check](single(render_mode=render_mode))


# ---- many at once

@SLOW
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shared", [True, False])
def test_processes_say_what_lanes_say(mode, shared):
    far, near = AsyncVectorEnv(makers(), shared_memory=shared, autoreset_mode=mode), ours(mode)
    try:
        assert far.single_observation_space == near.single_observation_space and far.action_space == near.action_space
        assert alike(*([x[:4] if len(x) == 5 else x[:1] for x in played(e, seed=s)]
                       for e, s in ((far, 5), (near, [5, 6, 7]))))
    finally: far.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lanes", [[0], [1, 2], [0, 1, 2]])
@pytest.mark.parametrize("seed", [None, 9])
def test_some_lanes_begin_anew(mode, lanes, seed):
    def told(envs, first, again):
        envs.action_space.seed(0)
        out, mask = [envs.reset(seed=first)], np.isin(np.arange(N), lanes)
        out += [envs.step(envs.action_space.sample())[:4] for _ in range(2)]
        out += [envs.reset(seed=again, options=dict(reset_mask=mask))[0]]
        return out + [envs.step(envs.action_space.sample())[:4]]
    again = None if seed is None else [seed + i if i in lanes else None for i in range(N)]
    assert alike(told(ours(mode), [5, 6, 7], again), told(theirs(mode), 5, seed))


@pytest.mark.parametrize("how", ["sync", pytest.param("async", marks=SLOW), "vector_entry_point"])
@pytest.mark.parametrize("mode", MODES)
def test_made_by_name(how, mode):
    options = dict(autoreset_mode=mode)
    where = dict(WORLD, **options) if how == "vector_entry_point" else WORLD
    more = {} if how == "vector_entry_point" else dict(vector_kwargs=options)
    envs = gym.make_vec(ID, num_envs=2, vectorization_mode=how, **more, **where)
    try:
        assert envs.spec.id == ID and envs.num_envs == 2 and envs.metadata["autoreset_mode"] == mode
        assert alike(played(envs, 4), played(envs, 4)) and envs.closed is False
        assert gym.spec(ID).vector_entry_point == "esper_nb.control.envs:GrowVecEnv"
    finally: envs.close()


# ---- wrappers of one environment: what each makes of the plain one's observations o, rewards r and infos

def scaled(o, space): return (o - space.low) / (space.high - space.low)
def picture(e): return one_w.AddRenderObservation(e, render_only=True)
SPACE = single().observation_space
DOUBLE = gym.spaces.Box(2 * SPACE.low, 2 * SPACE.high)
SINGLE = dict(
    order=(one_w.OrderEnforcing, lambda o: o),
    passive=(one_w.PassiveEnvChecker, lambda o: o),
    statistics=(one_w.RecordEpisodeStatistics, lambda o: o),
    flat=(one_w.FlattenObservation, lambda o: o),
    stack=(lambda e: one_w.FrameStackObservation(e, 2), lambda o: np.stack([np.concatenate([o[:1], o[:-1]]), o], 1)),
    dtype=(lambda e: one_w.DtypeObservation(e, np.float64), lambda o: o.astype(float)),
    rescale=(lambda e: one_w.RescaleObservation(e, 0, 1), lambda o: scaled(o, SPACE)),
    reshape=(lambda e: one_w.ReshapeObservation(e, (1, *SPACE.shape)), lambda o: o[:, None]),
    transform=(lambda e: one_w.TransformObservation(e, lambda o: 2 * o, DOUBLE), lambda o: 2 * o),
    time=(lambda e: one_w.TimeAwareObservation(one_w.TimeLimit(e, 9), normalize_time=False),
          lambda o: np.concatenate([o, np.arange(len(o))[:, None]], 1)),
    delay=(lambda e: one_w.DelayObservation(e, 1), lambda o: np.concatenate([0 * o[:1], o[:-1]])),
    normal=(one_w.NormalizeObservation, None),
    frames=(one_w.RenderCollection, lambda o: o),
    gray=(lambda e: one_w.GrayscaleObservation(picture(e)), None), drawn=(picture, None),
    twice=(lambda e: one_w.RepeatAction(e, 2), lambda o: o[[0, 2, 3]]),
    sticky=(lambda e: one_w.StickyAction(e, .5), None), skip=(lambda e: one_w.MaxAndSkipObservation(e, 2), None),
    action=(lambda e: one_w.TransformAction(e, lambda a: a, e.action_space), lambda o: o),
    reward=(lambda e: one_w.TransformReward(e, lambda r: 2 * r), lambda o: o),
    clip=(lambda e: one_w.ClipReward(e, -.1, .1), lambda o: o), normal_reward=(one_w.NormalizeReward, lambda o: o),
    limit=(lambda e: one_w.TimeLimit(e, 3), lambda o: o), again=(one_w.Autoreset, lambda o: o))
REWARDS = dict(reward=lambda r: 2 * r, clip=lambda r: np.clip(r, -.1, .1))

def episode(env, action):
    "Observations and rewards of an episode of one action."
    out, ends = [env.reset(seed=3)], False
    while not ends:
        out.append(env.step(action))
        ends = out[-1][2] or out[-1][3]
    assert all(x[0] in env.observation_space for x in out)
    return np.stack([x[0] for x in out]), np.array([x[1] for x in out[1:]]), out

@pytest.mark.parametrize("name", SINGLE)
def test_wrappers_of_one(name):
    wrap, expected = SINGLE[name]
    plain_env = single(render_mode="rgb_array")
    plain_env.action_space.seed(2)
    action = plain_env.action_space.sample()
    plain, rewards, _ = episode(plain_env, action)
    env = wrap(single(render_mode="rgb_array"))
    observed, paid, out = episode(env, action)
    again = episode(env, action) # nothing of the first episode is left, but in statistics
    if name not in ("normal", "normal_reward"): assert np.array_equal(observed, again[0])
    assert isinstance(env.unwrapped, GrowEnv) and env.get_wrapper_attr("action_masks")().any()
    assert len(plain) == 4 and out[-1][2]
    if expected is not None: np.testing.assert_allclose(observed, expected(plain), atol=1e-6)
    if len(paid) == len(rewards) and name not in ("normal_reward", "sticky"):
        np.testing.assert_allclose(paid, REWARDS.get(name, lambda r: r)(rewards), atol=1e-9)
    elif name in ("twice", "skip"): assert paid.sum() == pytest.approx(rewards.sum())
    if name == "statistics": assert out[-1][4]["episode"]["r"] == pytest.approx(rewards.sum(), abs=1e-5)
    if name == "limit": assert out[-1][3]
    if name == "again":
        obs, reward, over, cut, _ = env.step(action)
        assert reward == 0 and not over and not cut and np.array_equal(obs[:5], observed[0][:5])
    if name == "frames": assert len(env.render()) == 4
    if name == "order":
        with pytest.raises(gym.error.ResetNeeded): wrap(single()).step(action)
    env.close()


# ---- wrappers of many: the same around ours and around Gymnasium's

MANY = dict(
    statistics=many_w.RecordEpisodeStatistics, infos=many_w.DictInfoToList, normal=many_w.NormalizeObservation,
    normal_reward=many_w.NormalizeReward, flat=many_w.FlattenObservation,
    transform=lambda e: many_w.TransformObservation(e, lambda o: 2 * o, single_observation_space=DOUBLE),
    each=lambda e: many_w.VectorizeTransformObservation(e, one_w.TransformObservation, func=lambda o: 2 * o,
                                                        observation_space=DOUBLE),
    dtype=lambda e: many_w.DtypeObservation(e, np.float64), rescale=lambda e: many_w.RescaleObservation(e, 0, 1),
    reshape=lambda e: many_w.ReshapeObservation(e, (1, *SPACE.shape)),
    action=lambda e: many_w.TransformAction(e, lambda a: a[:, ::-1][:, ::-1]),
    reward=lambda e: many_w.TransformReward(e, lambda r: 2 * r), clip=lambda e: many_w.ClipReward(e, -.1, .1),
    each_reward=lambda e: many_w.VectorizeTransformReward(e, one_w.TransformReward, func=lambda r: 2 * r))

OF_EPISODES = ("statistics", "infos", "normal", "normal_reward") # the others have nothing to do with ends

@pytest.mark.parametrize("name, mode", [
    (name, mode) for name in MANY for mode in MODES if mode == MODES[0] or name in OF_EPISODES])
def test_wrappers_of_many(name, mode):
    try: b = played(MANY[name](theirs(mode)))
    except ValueError as e: # not in this mode, says the wrapper; and it says so of ours
        with pytest.raises(ValueError) as refused: played(MANY[name](ours(mode)))
        assert "autoreset_mode" in str(e) and str(refused.value) == str(e)
        return
    a = played(MANY[name](ours(mode)), seed=[5, 6, 7])
    for x, y in zip(a, b, strict=True):
        assert same(list(x[:-1]), list(y[:-1]))
        if name == "infos": assert [sorted(i) for i in x[-1]] == [sorted(i) for i in y[-1]] and same(x[-1], y[-1])
    if name == "statistics": assert all(same(x[-1].get("episode", {}), y[-1].get("episode", {})) for x, y in zip(a, b))


@pytest.mark.parametrize("mode", MODES)
def test_arrays_of_torch(mode):
    pytest.importorskip("array_api_compat", reason="Gymnasium's conversion needs: pip install array-api-compat")
    env = one_w.NumpyToTorch(single())
    obs, info = env.reset(seed=0)
    assert isinstance(obs, torch.Tensor) and isinstance(info["action_mask"], torch.Tensor)
    assert isinstance(env.step(torch.zeros(8, dtype=torch.int64))[0], torch.Tensor)
    for envs in (ours(mode), theirs(mode)):
        envs = many_w.NumpyToTorch(envs)
        assert isinstance(envs.reset(seed=0)[0], torch.Tensor)
        for _ in range(2): out = envs.step(torch.zeros(N, 8, dtype=torch.int64))
        assert all(isinstance(x, torch.Tensor) for x in out[:4])


@pytest.mark.parametrize("kind", ["one", "ours", "theirs"])
def test_videos(kind, tmp_path):
    pytest.importorskip("moviepy", reason="videos need: pip install 'esper_nb[video]'")
    if kind == "one":
        envs = one_w.RecordVideo(single(render_mode="rgb_array"), str(tmp_path/"new"), episode_trigger=lambda k: True)
    else:
        plain = (ours if kind == "ours" else theirs)(render_mode="rgb_array")
        envs = many_w.RecordVideo(plain, str(tmp_path/"new"), video_length=3, step_trigger=lambda k: k == 0)
    played(envs, 7)
    envs.close()
    found = list(tmp_path.glob("new/*.mp4"))
    assert found and all(f.stat().st_size > 500 for f in found)


# ---- specs, copies, tools

@pytest.mark.parametrize("extra", [
    (), (one_w.FlattenObservation,), (one_w.RecordEpisodeStatistics, one_w.NormalizeReward)])
def test_a_spec_goes_through_json(extra):
    env = gym.make(ID, max_episode_steps=9, **WORLD)
    for wrap in extra: env = wrap(env)
    text = env.spec.to_json()
    spec = type(env.spec).from_json(text)
    assert spec == env.spec and spec.kwargs == WORLD and spec.to_json() == text
    assert "Grow" in spec.pprint(disable_print=True)
    twin = gym.make(spec)
    assert [type(w) for w in chain(twin)] == [type(w) for w in chain(env)]
    assert alike(played(env, 4), played(twin, 4))

def chain(env): return [env, *(chain(env.env) if isinstance(env, gym.Wrapper) else [])]


def test_a_spec_of_many_goes_through_json():
    envs = gym.make_vec(ID, num_envs=2, **WORLD)
    spec = type(envs.spec).from_json(envs.spec.to_json())
    assert spec == envs.spec and alike(played(envs, 4), played(gym.make_vec(spec, num_envs=2), 4))


PLAIN = dict(one=single, wrapped=lambda: one_w.TimeLimit(one_w.OrderEnforcing(single()), 2),
             statistics=lambda: one_w.RecordEpisodeStatistics(single()), ours=ours,
             ours_wrapped=lambda: many_w.RecordEpisodeStatistics(ours()))

@pytest.mark.parametrize("copier", [copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("kind", PLAIN)
def test_copies_go_on_alike(kind, copier):
    env = PLAIN[kind]()
    env.reset(seed=4)
    env.action_space.seed(1)
    env.step(env.action_space.sample())
    twin = copier(env)
    for _ in range(1 if kind == "wrapped" else 2):
        action = env.action_space.sample()
        assert np.array_equal(action, twin.action_space.sample())
        a, b = env.step(action), twin.step(action)
        assert same([without_times(x) for x in a], [without_times(x) for x in b])
