"What has gone wrong in many reinforcement learning loops, each in a few lines, with the right value."
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from esper_nb.control import GrowVecEnv
from esper_nb.grow import attach_slots
from esper_nb.learn import (
    ActorCritic, EnvStream, Heads, Learner, MaskedHeads, PolicyConfig, PPOConfig, play, standardize, train_ppo)
from tests.test_vector_conformance import SMALL, tiny_data

pytestmark = pytest.mark.usefixtures("one_thread")


class Recall(gym.Env):
    "The first observation is a cue, the others are 0; the reward is the cue if action 1 is taken."
    observation_space, action_space = gym.spaces.Box(-9, 9, (1,)), gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.cue = 0, float(self.np_random.normal())
        return np.array([self.cue], np.float32), {}
    def step(self, action):
        self.t += 1
        return np.zeros(1, np.float32), self.cue * float(action), self.t == 4, False, {}


def test_a_minibatch_of_one_step_is_learned_from():
    config = PPOConfig(num_steps=1, num_minibatches=1, num_updates=3)
    learner = Learner(SyncVectorEnv([Recall]), config, PolicyConfig(core="none"))
    for u in train_ppo(learner): assert np.isfinite(u.loss) and u.stopped == "" and u.gradient_steps == 4
    assert all(p.isfinite().all() for p in learner.policy.parameters())
    learner = Learner(SyncVectorEnv([Recall]), PPOConfig(num_steps=5, num_minibatches=5, num_updates=2),
                      PolicyConfig(core="none"))
    assert all(np.isfinite(u.loss) for u in train_ppo(learner))


def test_a_reset_between_an_end_and_its_next_step_leaves_no_step_out():
    envs = GrowVecEnv(data=tiny_data(), num_envs=2, horizon=2, autoreset_mode="NextStep", **SMALL)
    envs.reset(seed=0)
    wait = np.zeros((2, 8), int)
    for _ in range(2): over = envs.step(wait)[2]
    assert over.all()
    envs.reset(seed=1)
    info = envs.step(wait)[4]
    assert envs.last_result.active.all() and info["_ok"].all() # both have trained
    stream = EnvStream(SyncVectorEnv([Recall] * 2, autoreset_mode=AutoresetMode.NEXT_STEP))
    stream.reset(0)
    for _ in range(4): stream.step(torch.zeros(2, 1, dtype=torch.int64))
    assert not stream.valid.any()
    stream.reset(1)
    assert stream.valid.all() and stream.start.all()
    assert (stream.step(torch.ones(2, 1, dtype=torch.int64)).reward != 0).all()


def test_an_end_without_its_last_observation_is_named():
    class Forgets(gym.vector.VectorWrapper):
        def step(self, actions):
            *out, info = self.env.step(actions)
            return *out, {k: v for k, v in info.items() if "final_obs" not in k}
    cut = SyncVectorEnv([lambda: gym.wrappers.TimeLimit(Recall(), 2)] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    stream = EnvStream(Forgets(cut))
    stream.reset(0)
    action = torch.zeros(2, 1, dtype=torch.int64)
    stream.step(action)
    with pytest.raises(ValueError, match="a key 'final_obs'"): stream.step(action)


def episodes(policy, forget):
    "Returns of six episodes, each with a new memory or with that of the one before."
    stream = EnvStream(SyncVectorEnv([Recall]))
    stream.reset(0)
    state, no = policy.initial_state(1), torch.zeros(1, dtype=torch.bool)
    for _ in range(6):
        if forget: state = policy.initial_state(1)
        total, over = 0., False
        while not over:
            with torch.no_grad(): a = policy.act(stream.obs, None, state, no)
            state, out = a.state, stream.step(a.action)
            total, over = total + out.reward.item(), out.terminated.any()
        yield total
        stream.step(a.action) # which is ignored

def test_evaluation_forgets_between_episodes():
    policy = ActorCritic(Heads((2,)), 1, PolicyConfig(hidden=8, features=(8,)))
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in policy.parameters(): p.normal_(generator=g) # so that what it remembers decides
        policy.logits_bias.zero_()
    whole = play(policy, SyncVectorEnv([Recall]), 6, seed=0)
    assert whole == pytest.approx(list(episodes(policy, True)), abs=1e-6)
    assert whole != pytest.approx(list(episodes(policy, False)), abs=1e-3)


class Forbidding(Recall):
    "With masks of floats; now and then nothing is allowed."
    empty = False
    def _mask(self): return dict(action_mask=np.zeros(2) if self.empty and self.t == 2 else np.array([0., 1.]))
    def reset(self, **kw): return super().reset(**kw)[0], self._mask()
    def step(self, action):
        assert action == 1
        return *super().step(action)[:4], self._mask()

def test_masks_of_floats_are_read_and_an_empty_one_is_named_with_its_lane():
    config = PPOConfig(num_steps=8, num_updates=1, num_minibatches=1)
    assert list(train_ppo(Learner(SyncVectorEnv([Forbidding] * 2), config)))[0].first_gap < 1e-6
    class Empty(Forbidding): empty = True
    with pytest.raises(ValueError, match=r"mask is empty at \[1, 0\]"):
        list(train_ppo(Learner(SyncVectorEnv([Forbidding, Empty]), config)))


def test_memory_that_a_rollout_begins_with_is_that_of_acting():
    learner = Learner(SyncVectorEnv([Recall] * 3), PPOConfig(num_steps=6, num_updates=6, num_minibatches=3),
                      PolicyConfig(hidden=8, features=(8,)))
    assert max(u.first_gap for u in train_ppo(learner)) < 1e-6


def test_what_does_not_count_does_not_shift_the_advantages():
    g = torch.Generator().manual_seed(0)
    advantage, valid = torch.randn(6, 4, generator=g), torch.rand(6, 4, generator=g) < .7
    rubbish = torch.where(valid, advantage, 1e6)
    a, b = standardize(advantage, valid), standardize(rubbish, valid)
    assert torch.equal(a[valid], b[valid])
    torch.testing.assert_close(a[valid].mean(), torch.tensor(0.), atol=1e-6, rtol=0)
    torch.testing.assert_close(a[valid].std(), torch.tensor(1.), atol=1e-3, rtol=0)


class Three(gym.Env):
    "Three steps of reward 1."
    observation_space, action_space = gym.spaces.Box(-9, 9, (1,)), gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}
    def step(self, action):
        self.t += 1
        return np.full(1, self.t, np.float32), 1., self.t == 3, False, {}

@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_later_episodes_are_as_long_as_the_first_in_every_mode(mode):
    "Statistics that assume another mode of resetting count the later episodes one step short."
    config = PPOConfig(num_steps=25, num_minibatches=1, num_updates=3)
    envs = SyncVectorEnv([Three] * 2, autoreset_mode=mode)
    updates = list(train_ppo(Learner(envs, config, PolicyConfig(core="none"))))
    assert {r for u in updates for r in u.returns} == {3.} and {n for u in updates for n in u.lengths} == {3}
    waits = mode == AutoresetMode.NEXT_STEP # a reset takes a step then, which counts for nothing
    assert updates[-1].env_steps == (114 if waits else 150)

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_choices_that_cannot_be_have_no_part_in_the_entropy_or_its_gradient(dtype):
    "0 times the logarithm of 0 is taken for 0, and its gradient, too: repaired afterwards it would still be NaN."
    largest = torch.finfo(dtype).max
    for row in ([0., 0., 0.], [largest, -largest, 0.], [0., 0., largest], [-largest] * 3):
        logits = torch.tensor([[row]], dtype=dtype, requires_grad=True)
        heads = MaskedHeads(logits, torch.tensor([[[True, False, True]]]))
        total = heads.entropy().sum() + heads.log_prob(torch.tensor([[0]])).clamp(min=-50).sum()
        gradient, = torch.autograd.grad(total, logits)
        assert 0 <= heads.entropy() <= .6932 and gradient.isfinite().all() and gradient[0, 0, 1] == 0

@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_attached_is_as_the_network_is(dtype):
    "In evaluation or in training, in its precision; what was frozen stays frozen, and no statistics move."
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
                              torch.nn.Flatten(), torch.nn.Linear(8 * 64, 4)).to(dtype)
    net[0].requires_grad_(False)
    x = torch.randn(2, 3, 8, 8, dtype=dtype)
    net.eval()
    before, state = net(x), {k: t.clone() for k, t in net.state_dict().items()}
    model = attach_slots(net, ["2"], x, blueprints=["norm", "conv_light", "attention"])
    for kind in ("conv_light", "norm", "attention"):
        model.germinate("2", kind)
        model.advance("2", force=True)
        assert torch.equal(model(x), before) and not any(m.training for m in model.modules())
        model.prune("2")
        model.slot("2").clear([0], seed=0)
    assert all(torch.equal(t, state[k]) for k, t in net.state_dict().items())
    assert not any(p.requires_grad for p in net[0].parameters())
    assert {p.dtype for p in model.parameters()} == {dtype}
    model.germinate("2", "conv_light")
    model.train()
    model(x).sum().backward()
    assert all(m.training for m in model.modules())
