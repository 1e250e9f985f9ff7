"Lanes for Stable-Baselines3, held to what its own `DummyVecEnv` of the same environments does."
import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import ClipReward, TimeLimit

from esper_nb.control import GrowEnv, GrowVecEnv, sb3_env
from tests.test_vector_conformance import SMALL, tiny_data

pytest.importorskip("stable_baselines3", reason="the adapter needs: pip install 'esper_nb[bench]'")
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::UserWarning")]
N = 3


class Counter(gym.Env):
    "Counts; two kinds of ends; says what it did in `info`, some of it only sometimes."
    observation_space, action_space = gym.spaces.Box(-99, 99, (2,)), gym.spaces.Discrete(2)
    def __init__(self, lane, render_mode=None): self.lane, self.episode, self.render_mode = lane, -1, render_mode
    def _obs(self): return np.array([self.lane, self.x], np.float32)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.episode = 0, self.episode + 1
        return self._obs(), dict(episode_number=self.episode, options=str(options))
    def step(self, action):
        self.x += 1
        info = dict(x=self.x, mark=np.arange(3) + self.x) | (dict(odd="odd") if self.x % 2 else {})
        over, cut = self.x == 4 + self.lane, self.x == 3 and self.lane == 1
        return self._obs(), float(action), over, cut, info | (dict(inner=dict(a=self.x, b="b")) if over else {})
    def render(self): return np.full((4, 4, 3), self.lane, np.uint8)
    def twice(self, x, plus=0): return 2 * x + plus + self.lane


def own_grow(render_mode=None):
    return GrowVecEnv(data=tiny_data(), num_envs=N, autoreset_mode="SameStep", width=1, seed=7, render_mode=render_mode,
                      **SMALL).for_sb3(monitor=False)

def dummy_grow(render_mode=None):
    return DummyVecEnv([lambda i=i: GrowEnv(data=tiny_data(), first_lane=i, seed=7, render_mode=render_mode, **SMALL)
                        for i in range(N)])

def counters(render_mode=None): return [lambda i=i: Counter(i, render_mode) for i in range(N)]
def own_counter(render_mode=None):
    return sb3_env(SyncVectorEnv(counters(render_mode), autoreset_mode=AutoresetMode.SAME_STEP), monitor=False)
def dummy_counter(render_mode=None): return DummyVecEnv(counters(render_mode))

PAIRS = pytest.mark.parametrize("own, dummy", [(own_grow, dummy_grow), (own_counter, dummy_counter)])


def same(a, b):
    "Equality of what was told, numbers by value; a single environment calls its lane 0."
    if isinstance(a, dict): return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a if k != "lane")
    if isinstance(a, list | tuple): return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, str | bool) or a is None: return a == b
    if isinstance(a, np.ndarray) and a.dtype == object: return same(a.tolist(), b.tolist())
    return np.array_equal(a, b, equal_nan=np.asarray(a).dtype.kind == "f")


@PAIRS
def test_steps_and_infos_are_those_of_the_library(own, dummy):
    ours, theirs, ends = own(), dummy(), 0
    rng = np.random.default_rng(0)
    assert same(ours.reset(), theirs.reset()) and same(ours.reset_infos, theirs.reset_infos)
    for t in range(12):
        high = getattr(ours.action_space, "nvec", getattr(ours.action_space, "n", None))
        action = rng.integers(0, high, (N, *ours.action_space.shape))
        a, b = ours.step(action), theirs.step(action)
        assert a[1].dtype == b[1].dtype and a[2].dtype == b[2].dtype and a[0].dtype == b[0].dtype
        assert all(same(x, y) for x, y in zip(a, b)), t
        assert same(ours.reset_infos, theirs.reset_infos)
        ends += int(b[2].sum())
        for info in a[3]: info.clear() # the caller's own
        a[0][:] = 9
    assert ends >= 4


@PAIRS
def test_attributes_are_those_of_the_lanes(own, dummy):
    told = []
    for envs in (own(), dummy()):
        envs.set_attr("note", 1)
        said = [envs.get_attr("note"), envs.has_attr("note"), envs.has_attr("nothing")]
        envs.set_attr("note", 2, indices=[0])
        envs.set_attr("note", 3, indices=2)
        said += [envs.get_attr("note"), envs.get_attr("note", indices=[2, 0]), envs.get_attr("note", indices=1)]
        said += [envs.get_attr("note", indices=np.array([1, 2])), envs.get_attr("note", indices=[-1])]
        with pytest.raises(AttributeError): envs.get_attr("nothing")
        with pytest.raises(AttributeError): envs.env_method("nothing")
        envs.set_attr("note", 4)
        said += [envs.get_attr("note"), envs.env_is_wrapped(Monitor), envs.env_is_wrapped(Monitor, indices=[0])]
        told.append(said)
    assert told[0] == told[1]


def test_a_setting_that_lanes_share_is_set_for_all_or_not_at_all():
    ours = own_grow()
    ours.set_attr("disturb", None)
    with pytest.raises(ValueError, match="'horizon'.*all 3: they share it"): ours.set_attr("horizon", 9, indices=[1])
    assert ours.get_attr("horizon") == [3] * 3


def test_methods_answer_for_each_lane():
    ours, theirs = own_grow(), dummy_grow()
    ours.reset(), theirs.reset()
    for indices in (None, [2], [2, 0], 1):
        for name in ("action_masks", "test_accuracy"):
            assert same(ours.env_method(name, indices=indices), theirs.env_method(name, indices=indices))
    assert isinstance(ours.env_method("test_accuracy")[0], float)
    whole = ours.envs.test()
    for i, part in enumerate(ours.env_method("test")):
        assert type(part) is type(whole) and part.loss == whole.loss[i].item()
    a, b = own_counter(), dummy_counter()
    assert a.env_method("twice", 3, plus=1, indices=[0, 2]) == [7, 9]
    assert b.env_method("twice", 3, plus=1, indices=[0, 2]) == [7, 9]


@PAIRS
def test_lanes_that_are_none_are_named(own, dummy):
    ours, theirs = own(), dummy()
    for last in (-1, np.int64(2), [np.int64(-1)]): assert ours.env_is_wrapped(Monitor, last) == [False]
    for envs in (ours, theirs): envs.set_attr("note", 5, indices=[-1])
    assert ours.get_attr("note", indices=[2]) == theirs.get_attr("note", indices=[2]) == [5]
    for wrong in ([5], -4, "0", 1.5, [True], [None], np.array([.5])):
        for ask in (ours.get_attr, ours.env_method, lambda name, indices: ours.set_attr("note", 6, indices=indices)):
            with pytest.raises(ValueError, match="indices=.*expected numbers from 0 to 2"): ask("none", indices=wrong)
    assert ours.get_attr("note", indices=[2]) == [5]

@PAIRS
def test_pictures(own, dummy):
    ours, theirs = own("rgb_array"), dummy("rgb_array")
    ours.reset(), theirs.reset()
    assert ours.render_mode == theirs.render_mode == "rgb_array"
    frames = list(ours.get_images()), list(theirs.get_images())
    assert [f.shape for f in frames[0]] == [f.shape for f in frames[1]]
    assert ours.render().shape == theirs.render().shape
    assert own is own_grow or same(*frames) # ours are numbered, and a single environment's lane is 0
    blind = own()
    blind.reset()
    assert blind.get_images() == [None] * N and blind.render() is None


def test_options_reach_the_next_reset_once():
    ours, theirs = own_counter(), dummy_counter()
    for envs in (ours, theirs):
        envs.set_options(dict(a=1))
        envs.reset()
    assert same(ours.reset_infos, theirs.reset_infos) and "'a'" in ours.reset_infos[0]["options"]
    for envs in (ours, theirs): envs.reset()
    assert same(ours.reset_infos, theirs.reset_infos) and ours.reset_infos[0]["options"] == "None"
    ours.set_options([dict(a=1), {}, {}])
    with pytest.raises(ValueError, match="the same for every lane"): ours.reset()


def test_seeds_reach_the_lanes():
    ours, theirs = own_counter(), dummy_counter()
    for envs in (ours, theirs): envs.seed(5), envs.reset()
    draws = [[e.unwrapped.np_random.random() for e in lanes] for lanes in (ours.envs.envs, theirs.envs)]
    assert draws[0] == draws[1]


def test_a_callback_sees_rollbacks_and_summaries():
    from stable_baselines3 import A2C
    seen = []
    class Watch(BaseCallback):
        def _on_step(self):
            seen.extend(k for info in self.locals["infos"] for k in info)
            return True
    envs = GrowVecEnv(data=tiny_data(), num_envs=N, autoreset_mode="SameStep", **SMALL).for_sb3()
    agent = A2C("MlpPolicy", envs, n_steps=4, seed=0).learn(24, callback=Watch())
    assert {"rolled_back", "ok", "accuracy_pp", "summary", "episode", "terminal_observation"} <= set(seen)
    assert np.isfinite(evaluate_policy(agent, envs, n_eval_episodes=3)[0])


# ---- copies, and Gymnasium's own

@pytest.mark.costly
@pytest.mark.parametrize("mode", AutoresetMode)
def test_each_lane_is_told_what_gymnasium_tells_it(mode):
    from esper_nb.control.envs import one_lane_info
    ours = GrowVecEnv(data=tiny_data(), num_envs=N, autoreset_mode=mode, width=1, **SMALL)
    theirs = SyncVectorEnv([lambda i=i: GrowEnv(data=tiny_data(), first_lane=i, **SMALL) for i in range(N)],
                           autoreset_mode=mode)
    everything = dict(reset_mask=np.ones(N, bool)) # of all lanes, as the first reset
    a, b = ours.reset(seed=[5, 6, 7], options=dict(everything)), theirs.reset(seed=5, options=dict(everything))
    assert same(a, b)
    rng = np.random.default_rng(0)
    for t in range(9):
        action = rng.integers(0, ours.single_action_space.nvec, (N, len(ours.single_action_space.nvec)))
        a, b = ours.step(action), theirs.step(action)
        assert all(same(x, y) for x, y in zip(a[:4], b[:4]))
        for i in range(N): assert same(one_lane_info(a[4], i, N), one_lane_info(b[4], i, N)), (t, i)
        if mode == AutoresetMode.SAME_STEP:
            assert a[4].keys() == b[4].keys()
            assert ("final_info" in a[4]) == bool(a[2].any())
            if a[2].any(): assert {"action_mask", "_action_mask", "ok", "_ok"} <= a[4]["final_info"].keys()
        done = a[2] | a[3]
        if mode == AutoresetMode.DISABLED and done.any():
            assert same(ours.reset(options=dict(reset_mask=done))[0], theirs.reset(options=dict(reset_mask=done))[0])


def test_some_lanes_before_all_are_refused():
    ours = GrowVecEnv(data=tiny_data(), num_envs=N, **SMALL)
    with pytest.raises(ValueError, match="a reset of all lanes before one of some"):
        ours.reset(options=dict(reset_mask=np.array([True, False, True])))


@pytest.mark.parametrize("copied", ["deepcopy", "pickle"])
@pytest.mark.parametrize("begun", [False, True])
def test_a_copy_keeps_spec_and_random_streams(copied, begun):
    import copy
    import pickle
    copier = copy.deepcopy if copied == "deepcopy" else lambda e: pickle.loads(pickle.dumps(e))
    own = SMALL | dict(data=tiny_data())
    one, two = gym.make("esper_nb/Grow-v0", **own).unwrapped, gym.make_vec("esper_nb/Grow-v0", num_envs=2, **own)
    for made in (one, two):
        made.action_space.seed(3)
        made.observation_space.seed(4)
        if begun: made.reset(seed=0)
        twin = copier(made)
        assert twin.spec.id == made.spec.id == "esper_nb/Grow-v0" and twin.spec.entry_point == made.spec.entry_point
        for _ in range(3):
            assert np.array_equal(made.action_space.sample(), twin.action_space.sample())
            assert np.array_equal(made.observation_space.sample(), twin.observation_space.sample())
        assert made.np_random.random() == twin.np_random.random() or not begun
        if begun: assert same(made.step(made.action_space.sample())[:4], twin.step(twin.action_space.sample())[:4])


def test_lanes_in_processes_are_asked_there():
    "What an environment in another process has, its adapter said that it has not; a wrong name ends no process."
    from gymnasium.vector import AsyncVectorEnv
    far = sb3_env(AsyncVectorEnv(counters("rgb_array"), autoreset_mode="SameStep"), monitor=False)
    near = dummy_counter()
    wrapped = sb3_env(AsyncVectorEnv([lambda: TimeLimit(Monitor(counters()[0]()), 9), *counters()[1:]],
                                     autoreset_mode="SameStep"), monitor=False)
    try:
        assert same(far.reset(), near.reset()) and same(far.reset_infos, near.reset_infos)
        assert far.render_mode == "rgb_array" and len(list(far.get_images())) == N
        assert far.get_attr("lane") == near.get_attr("lane") and far.get_attr("lane", indices=[2, 0]) == [2, 0]
        assert far.env_method("twice", 3, plus=1) == near.env_method("twice", 3, plus=1)
        assert far.has_attr("twice") and not far.has_attr("nothing")
        with pytest.raises(ValueError, match=r"lanes in which to call 'twice'=\[1\], expected all 3"):
            far.env_method("twice", 3, indices=[1])
        for ask in (far.get_attr, far.env_method):
            with pytest.raises(AttributeError, match="nothing"): ask("nothing")
        for envs in (far, near):
            envs.set_attr("episode", 7, indices=[0])
            envs.set_attr("note", 1)
            envs.set_attr("note", 2, indices=1)
        assert far.get_attr("episode") == near.get_attr("episode") == [7, 0, 0]
        assert far.get_attr("note") == near.get_attr("note") == [1, 2, 1]
        assert all(same(x, y) for x, y in zip(far.step(np.ones(N, int)), near.step(np.ones(N, int))))
        assert far.env_is_wrapped(Monitor) == near.env_is_wrapped(Monitor)
        for kind in (Monitor, TimeLimit, gym.Wrapper): assert wrapped.env_is_wrapped(kind)[0]
        assert not wrapped.env_is_wrapped(ClipReward)[0] and not wrapped.env_is_wrapped(TimeLimit, 1)[0]
    finally: far.close(), wrapped.close()
