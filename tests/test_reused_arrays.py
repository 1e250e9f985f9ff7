"Environments that use their arrays again, and give masks only now and then: nothing foreign survives a step."
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from tiny import same

from esper_nb.control import GrowVecEnv
from esper_nb.learn import EnvStream, Learner, PolicyConfig, PPOConfig, play, train_ppo
from tests.test_vector_conformance import SMALL, tiny_data

pytestmark = pytest.mark.usefixtures("one_thread")


class Sometimes(gym.Env):
    "Forbids an action in some steps only, and refuses it then; ends of both kinds. `rule`: when a mask is given."
    observation_space, action_space = gym.spaces.Box(-99, 99, (3,)), gym.spaces.Discrete(3, start=-1, dtype=np.int32)
    def __init__(self, lane, rule): self.lane, self.rule, self.episode = lane, rule, -1
    def _out(self):
        t = self.x + self.lane
        self.shut = t % 3 if self.rule(self.lane, self.episode, self.x) else None
        mask = np.arange(3) != self.shut
        obs = np.array([self.lane, self.episode, self.x], np.float32)
        return obs, {} if self.shut is None else dict(action_mask=mask.astype(np.int8))
    def reset(self, *, seed=None, options=None):
        self.x, self.episode = 0, self.episode + 1
        return self._out()
    def step(self, action):
        assert action in self.action_space, f"{action!r} of {np.asarray(action).dtype}"
        assert action + 1 != self.shut, "a forbidden action was taken"
        self.x += 1
        end, turn = self.x >= 3 + (self.lane + self.episode) % 4, self.episode % 2
        obs, info = self._out()
        return obs, float(action), bool(end and turn), bool(end and not turn), info


RULES = {
    "always": lambda lane, episode, x: True, "never": lambda lane, episode, x: False,
    "some lanes": lambda lane, episode, x: lane % 2 == 1, "even steps": lambda lane, episode, x: x % 2 == 0,
    "not at reset": lambda lane, episode, x: x > 0, "only at reset": lambda lane, episode, x: x == 0,
    "only in the second episode": lambda lane, episode, x: episode == 1 and x == 1}


class Reusing(gym.vector.VectorWrapper):
    "Hands out the same arrays again and again; before each call they, and the actions of the call before, are ruined."
    def __init__(self, envs): super().__init__(envs); self.own, self.theirs = {}, []
    def _ruin(self):
        for a in [*self.own.values(), *self.theirs]:
            if a.dtype == object: a[:] = "ruined"
            else: a[...] = np.logical_not(a) if a.dtype == bool else 77
        self.theirs.clear()
    def _same(self, name, value):
        if isinstance(value, dict): return {k: self._same(f"{name}.{k}", v) for k, v in value.items()}
        value = np.asarray(value)
        kept = self.own.get(name)
        if kept is None or (kept.shape, kept.dtype) != (value.shape, value.dtype): self.own[name] = kept = value.copy()
        if value.dtype == object: value = [v.copy() if isinstance(v, np.ndarray) else v for v in value]
        kept[:] = value
        return kept
    def reset(self, *, seed=None, options=None):
        if options: options = {k: np.copy(v) for k, v in options.items()}
        obs, info = self.env.reset(seed=seed, options=options)
        self._ruin()
        return self._same("obs", obs), self._same("reset", info)
    def step(self, actions):
        given = actions.copy()
        out = self.env.step(given)
        self._ruin()
        self.theirs.append(actions) # and it is ruined later, in the hands of the caller
        return tuple(self._same(str(i), x) for i, x in enumerate(out))


def make(rule, mode, n=4): return SyncVectorEnv([lambda i=i: Sometimes(i, RULES[rule]) for i in range(n)],
                                                autoreset_mode=mode)

def streamed(envs, steps=40):
    "All that a stream says, kept as it was handed out, and the legal actions it was driven with."
    s, out, g = EnvStream(envs), [], torch.Generator().manual_seed(0)
    s.reset(0)
    for _ in range(steps):
        legal = torch.ones(s.n, 3) if s.mask is None else s.mask.float()
        out.append((s.obs, s.mask, s.start, s.valid))
        action = torch.multinomial(legal, 1, generator=g)
        kept = action.clone()
        out.append(s.step(action))
        assert torch.equal(action, kept)
    return out


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("rule", RULES)
def test_a_stream_is_the_same_whether_arrays_are_used_again_or_not(rule, mode):
    plain = streamed(make(rule, mode))
    assert same(plain, streamed(Reusing(make(rule, mode))))
    for (obs, mask, _, valid), _ in zip(plain[::2], plain[1::2]): # what was forbidden is what the environment says
        for lane in valid.nonzero().flatten().tolist():
            number, episode, x = map(int, obs[lane].tolist())
            shut = (x + number) % 3 if RULES[rule](number, episode, x) else None
            assert (mask is None and shut is None) or mask[lane].tolist() == [k != shut for k in range(3)]


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("rule", ["even steps", "not at reset", "some lanes"])
def test_a_learner_learns_the_same_from_arrays_that_are_used_again(rule, mode):
    def trained(envs):
        config = PPOConfig(num_steps=16, num_minibatches=2, num_updates=4, norm_obs=False)
        learner = Learner(envs, config, PolicyConfig(hidden=8, features=(8,)))
        return list(train_ppo(learner)), learner
    (a, first), (b, second) = trained(make(rule, mode)), trained(Reusing(make(rule, mode)))
    assert a == b and max(u.first_gap for u in a) < 1e-6
    assert same(list(first.policy.parameters()), list(second.policy.parameters()))
    assert play(first.policy, make(rule, mode), 8) == play(first.policy, Reusing(make(rule, mode)), 8)


def test_a_mask_that_comes_late_survives_a_saved_rollout():
    def new():
        config = PPOConfig(num_steps=16, num_minibatches=2, num_updates=4)
        return Learner(make("only in the second episode", AutoresetMode.SAME_STEP), config, PolicyConfig(core="none"))
    one = new()
    masks = []
    while one.acts:
        one.step_envs()
        masks.append(one.rollout.mask is not None)
    assert masks[0] is False and masks[-1] is True
    two = new()
    two.load_state_dict(one.state_dict())
    assert torch.equal(one.rollout.mask, two.rollout.mask)
    assert one.step() == two.step()
    assert same(list(one.policy.parameters()), list(two.policy.parameters()))


@pytest.mark.parametrize("kind", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_gymnasiums_own_environments_that_do_not_copy(kind):
    def trained(copy):
        made = [lambda: gym.make("CartPole-v1")] * 4
        envs = SyncVectorEnv(made, copy=copy) if kind == "sync" else AsyncVectorEnv(made, copy=copy)
        config = PPOConfig(num_steps=16, num_minibatches=2, num_updates=4, norm_obs=False)
        try: return list(train_ppo(Learner(envs, config, PolicyConfig(core="none"))))
        finally: envs.close()
    assert trained(True) == trained(False)


@pytest.mark.parametrize("wrong, said", [
    (lambda out: (out[0], np.ones((4, 1)), *out[2:]), r"shape of the rewards=\(4, 1\)"),
    (lambda out: (*out[:2], np.zeros(3, bool), *out[3:]), r"shape of the terminations=\(3,\)"),
    (lambda out: (*out[:4], dict(action_mask=np.ones((2, 3)))), "masks in info.*=2, expected 4"),
    (lambda out: (*out[:4], dict(action_mask=np.ones((4, 5)))), r"widths of action masks=\[3, 5\]")])
def test_what_does_not_fit_is_named(wrong, said):
    class Wrong(gym.vector.VectorWrapper):
        def step(self, actions): return wrong(self.env.step(actions))
    stream = EnvStream(Wrong(make("always", AutoresetMode.SAME_STEP)))
    stream.reset(0)
    with pytest.raises(ValueError, match=said): stream.step(stream.mask.int().argmax(1, keepdim=True))


@pytest.mark.parametrize("field", ["obs", "mask", "start"])
def test_a_rollout_that_was_written_into_is_not_learned_from(field):
    learner = Learner(make("always", AutoresetMode.SAME_STEP), PPOConfig(num_steps=16, num_minibatches=1),
                      PolicyConfig(hidden=8, features=(8,)))
    while learner.acts: learner.step_envs()
    before = [p.clone() for p in learner.policy.parameters()]
    rows = getattr(learner.rollout, field)
    if field == "mask": rows[:] = True # as a mask that outlived its step, or was lost
    elif field == "start": rows[4] = ~rows[4]
    else: rows[:-1] = rows[1:].clone() # as an observation that the next one has overwritten
    for _ in range(2): # and a second call is no way round
        with pytest.raises(RuntimeError, match="first_gap=.*expected at most 0.0001"): learner.step()
    assert same(before, list(learner.policy.parameters()))


@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_growing_environment_hands_out_nothing_of_its_own(mode):
    def ruin(x):
        if isinstance(x, dict): return [ruin(v) for v in x.values()]
        if isinstance(x, np.ndarray) and x.dtype != object: x[...] = 1 if x.dtype == bool else 9
        if isinstance(x, np.ndarray) and x.dtype == object: [ruin(v) for v in x]
    def played(scribble):
        envs = GrowVecEnv(data=tiny_data(), num_envs=3, autoreset_mode=mode, **SMALL)
        out, (obs, info) = [], envs.reset(seed=0)
        for t in range(9):
            kept = obs.copy(), {k: np.copy(v) for k, v in info.items() if not isinstance(v, dict)}
            out.append(kept)
            masks = np.split(info["action_mask"][:, :envs.actions.flat], np.cumsum(envs.actions.sizes)[:-1], axis=1)
            action = np.stack([m.argmax(1) for m in masks], 1)
            action[:, 0] = masks[0].shape[1] - 1 - masks[0][:, ::-1].argmax(1) # the last operation that is allowed
            if scribble: ruin(info); ruin(obs)
            given = envs.step(action)
            action[:] = 77
            out += [x.copy() for x in given[1:4]]
            obs, done, info = given[0], given[2] | given[3], given[4]
            if scribble: [ruin(x) for x in given[1:4]]
            if mode == AutoresetMode.DISABLED and done.any(): obs, info = envs.reset(options=dict(reset_mask=done))
        return out, envs.state_dict()["lanes"]
    (a, kept), (b, again) = played(False), played(True)
    for x, y in zip(a, b):
        if isinstance(x, np.ndarray): assert np.array_equal(x, y)
        else:
            assert np.array_equal(x[0], y[0]) and x[1].keys() == y[1].keys()
            for k in x[1]:
                if x[1][k].dtype != object: assert np.array_equal(x[1][k], y[1][k], equal_nan=x[1][k].dtype.kind == "f")
    assert all(torch.equal(kept[k], again[k]) for k in kept)
