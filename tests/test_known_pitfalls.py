"What has gone wrong in many reinforcement learning loops, each in a few lines, with the right value."
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tiny import update

from esper_nb.control import GrowVecEnv
from esper_nb.core.layers import LaneBatchNorm2d, LaneConv2d
from esper_nb.grow import attach_slots, export_model
from esper_nb.guard import Governor
from esper_nb.learn import (
    ActorCritic, EnvStream, Heads, Learner, MaskedHeads, PolicyConfig, PPOConfig, Rollout, gae, next_values, play,
    standardize, train_ppo)
from esper_nb.learn.rollouts import flat_observations
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


class Limited(Three):
    "Ends at its third step, by itself and by its limit at once."
    def step(self, action):
        obs, reward, over, _, info = super().step(action)
        return obs, reward, over, over, info


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_an_end_that_is_also_a_time_limit_is_an_end(mode):
    "Nothing comes after it, so nothing may be added to its last reward (reported as DexForce/EmbodiChain#612)."
    stream = EnvStream(SyncVectorEnv([Limited] * 2, autoreset_mode=mode))
    stream.reset(0)
    for _ in range(3): out = stream.step(torch.zeros(2, 1, dtype=torch.int64))
    assert out.terminated.all() and not out.truncated.any()
    nothing = torch.full((1, 2), 9.)
    assert not next_values(nothing, nothing[0], out.terminated[None], out.truncated[None], nothing).any()


def test_of_one_step_errors_each_is_a_reward_and_the_next_value():
    "The reward of the last step counts with λ = 0 as well, and so does the value behind a time limit (ray#59958)."
    T, n, gamma = 6, 3, .9
    r, v, last, final = (torch.randn(*s, generator=torch.Generator().manual_seed(k)).double()
                         for k, s in enumerate([(T, n), (T, n), (n,), (T, n)]))
    terminated, truncated = torch.zeros(2, T, n, dtype=torch.bool)
    terminated[2, 0] = terminated[-1, 2] = truncated[3, 1] = truncated[-1, 1] = True
    after = next_values(v, last, terminated, truncated, final)
    target = gae(r, v, after, terminated | truncated, gamma, 0.) + v
    for t in range(T):
        for i in range(n):
            following = final[t, i] if truncated[t, i] else last[i] if t == T - 1 else v[t + 1, i]
            torch.testing.assert_close(target[t, i], r[t, i] + (0 if terminated[t, i] else gamma * following))


def test_rewards_with_an_axis_of_one_are_refused():
    "Of shape (n, 1) they would be broadcast against n values, to n * n errors (near Gymnasium#1445)."
    class Column(gym.vector.VectorWrapper):
        def step(self, actions):
            obs, reward, *out = self.env.step(actions)
            return obs, reward[:, None], *out
    stream = EnvStream(Column(SyncVectorEnv([Recall] * 2)))
    stream.reset(0)
    action = torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"shape of the rewards=\(2, 1\)"): stream.step(action)


def tied():
    "A language model whose last layer has the weights of its first one."
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Embedding(12, 8), torch.nn.Linear(8, 8), torch.nn.ReLU(),
                              torch.nn.Linear(8, 12, bias=False))
    net[3].weight = net[0].weight
    return net, torch.randint(0, 12, (4, 6))


def test_an_attach_that_fails_halfway_leaves_the_network_as_it_was():
    "What was changed before the error would stay in use, unseen (reported as peft#3689)."
    net, x = tied()
    before, hooks = net(x), [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()] # noqa: SLF001
    with pytest.raises(ValueError, match="no_such_layer"): attach_slots(net, ["2", "no_such_layer"], x)
    assert torch.equal(net(x), before)
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()] # noqa: SLF001
    assert torch.equal(attach_slots(net, ["2"], x)(x), before)


def test_weights_that_are_tied_stay_tied_in_training_and_in_what_is_exported(tmp_path):
    "Where a copy of one of them is written, the other one trains on alone (reported as peft#2018)."
    net, x = tied()
    model = attach_slots(net, ["2"], x)
    model.germinate("2", "norm")
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    governor = Governor(model, opt, chance_loss=None)
    for k in range(30):
        loss = update(opt, torch.nn.functional.cross_entropy(model(x).flatten(0, 1), x.roll(1).flatten()))
        if k == 20: net[0].weight.data[0, 0] = float("nan")
        governor.watch(loss.detach())
    governor.rollback()
    assert governor.reports and net[3].weight is net[0].weight and net[0].weight.isfinite().all()
    exported = export_model(model)
    assert torch.equal(exported(x), model.eval()(x))
    assert len({id(p) for p in exported.parameters() if p.shape == (12, 8)}) == 1
    assert sum(getattr(m, "weight", torch.ones(1)).shape == (12, 8) for m in exported.modules()) == 2


def test_a_group_without_parameters_is_saved_and_restored():
    "An empty group has settings and no state; it was lost on the way (reported as pytorch#143828)."
    def made():
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 2)
        return net, torch.optim.AdamW([dict(params=[], lr=.5), dict(params=net.parameters(), lr=.01)])
    net, opt = made()
    governor = Governor(net, opt, chance_loss=None)
    for k in range(130):
        loss = update(opt, net(torch.ones(4, 3)).square().mean())
        if k == 125: net.weight.data[0, 0] = float("nan")
        governor.watch(loss.detach())
    assert governor.reports and net.weight.isfinite().all()
    other, fresh = made()
    other.load_state_dict(net.state_dict())
    fresh.load_state_dict(opt.state_dict())
    resumed = Governor(other, fresh, chance_loss=None)
    resumed.load_state_dict(governor.state_dict())
    assert [g["lr"] for g in fresh.param_groups] == [.5, .01]
    assert resumed.check_resume().right
    for g in (governor, resumed): g.rollback()
    assert torch.equal(net.weight, other.weight)


@pytest.mark.parametrize("make", [lambda: LaneBatchNorm2d(4, n=2), lambda: LaneConv2d(8, 8, 3, groups=2)])
def test_gradients_do_not_depend_on_the_order_of_the_memory(make):
    "A norm whose weight's gradient was wrong for channels_last went unnoticed for long (reported as pytorch#140913)."
    def gradients(order):
        torch.manual_seed(0)
        layer, x = make().double(), torch.randn(5, 8, 6, 6).double()
        x = x.contiguous(memory_format=order).requires_grad_()
        layer(x).pow(3).sum().backward()
        return [x.grad, *(p.grad for p in layer.parameters())]
    both = map(gradients, (torch.contiguous_format, torch.channels_last))
    for a, b in zip(*both): torch.testing.assert_close(a, b)


def test_the_last_step_of_a_rollout_has_an_advantage_of_its_own():
    "It was 0 for every lane, so one step in a rollout taught nothing but entropy (reported as PufferLib#363)."
    rollout = Rollout(3, 2, 1, Heads((2,)))
    step = dict(reward=torch.tensor([1., 2.]), value=torch.tensor([.5, .25]), valid=torch.tensor([True, True]))
    for _ in range(3): rollout.add(**step)
    rollout.finish(torch.tensor([3., 4.]), gamma=.5, gae_lambda=.9)
    assert rollout.advantage[-1].tolist() == [1 + .5 * 3 - .5, 2 + .5 * 4 - .25]


def test_lanes_of_a_minibatch_keep_their_memories_apart():
    "Sequences of several lanes laid end to end handed their memory on (reported as stable-baselines3-contrib#284)."
    policy = ActorCritic(Heads((2,)), 1, PolicyConfig(hidden=8, features=(8,)))
    rollout, g = Rollout(5, 4, 1, policy.heads), torch.Generator().manual_seed(0)
    rollout.clear(torch.randn(policy.states, 4, 8, generator=g))
    for t in range(5): rollout.add(obs=torch.randn(4, 1, generator=g), start=torch.rand(4, generator=g) < .3)
    def values(lanes):
        b = rollout.batch(torch.tensor(lanes))
        return policy(b.obs, b.state, b.start)[1]
    alone = torch.cat([values([i]) for i in range(4)], 1)
    torch.testing.assert_close(values([2, 0, 3]), alone[:, [2, 0, 3]])
    rollout.obs[:, 0] += 9 # another lane's observations
    torch.testing.assert_close(values([0, 1, 2, 3])[:, 1:], alone[:, 1:])


def test_what_follows_a_time_limit_is_valued_with_the_memory_of_its_episode():
    "The memory begins anew with the first observation, not with the end (reported as Mava#1006)."
    policy = ActorCritic(Heads((2,)), 1, PolicyConfig(hidden=8, features=(8,)))
    obs, nobody = torch.randn(4, 1, 1, generator=torch.Generator().manual_seed(0)), torch.zeros(4, 1) > 0
    first = nobody.clone()
    first[3] = True # after a step that ended
    state = policy.initial_state(1)
    whole, fresh = policy(obs, state, nobody)[1], policy(obs, state, first)[1]
    assert torch.equal(whole[:3], fresh[:3]) and not torch.equal(whole[3], fresh[3])
    torch.testing.assert_close(fresh[3:], policy(obs[3:], policy.initial_state(1), nobody[3:])[1])


def test_a_sweep_of_minibatches_has_everything_once():
    "Each lane, or each step, comes once in a sweep, also where the parts are uneven (reported as ReaLHF#66)."
    for heads, hidden, total in ((Heads((2,)), 8, 5), (Heads((2,)), 0, 35)):
        rollout = Rollout(7, 5, 1, heads)
        if hidden: rollout.clear(torch.zeros(2, 5, hidden))
        rollout.value.copy_(torch.arange(35.).view(7, 5))
        parts = list(rollout.minibatches(3, torch.Generator().manual_seed(1)))
        assert sorted(v for b in parts for v in b.value.flatten().tolist()) == list(range(35))
        assert len(parts) == 3 and max(b.value.shape[1] for b in parts) <= -(-total // 3)


# ---- what is read of environments, and who else uses them

class Numbered(Three):
    "Its observation is one number of a space, the same in each step."
    def __init__(self, space, number): self.observation_space, self.number = space, number
    def reset(self, **kw): return self.number, super().reset(**kw)[1]
    def step(self, action): return self.number, *super().step(action)[1:]

FIVE, PAIR = gym.spaces.Discrete(4, start=1), gym.spaces.MultiDiscrete([3, 3], start=[0, 2])
@pytest.mark.parametrize("space, number", [
    (FIVE, 0), (FIVE, 5), (PAIR, np.array([-1, 2])), (PAIR, np.array([0, 5])), (PAIR, np.array([0, 1]))])
def test_a_number_outside_its_space_is_named_with_its_lanes(space, number):
    "One below the first was read as the last one (near stable-baselines3#1797)."
    inside = [lambda: Numbered(space, space.sample())] * 2
    stream = EnvStream(SyncVectorEnv([*inside, lambda: Numbered(space, number), *inside]))
    with pytest.raises(ValueError, match=r"observations of lanes=\[2\], expected numbers of "): stream.reset(0)
    nested = gym.spaces.Dict(a=space)
    with pytest.raises(ValueError, match=r"lanes=\[1\]"):
        flat_observations(dict(a=np.stack([space.sample(), number])), nested)


class Ruined(Three):
    "Its third observation, the last one, is not a number in one lane."
    def __init__(self, lane): self.lane = lane
    def step(self, action):
        obs, reward, over, _, info = super().step(action)
        return obs * (np.nan if over and self.lane == 3 else 1), reward, False, over, info

def test_a_last_observation_that_is_no_number_is_named_with_its_lane():
    envs = SyncVectorEnv([lambda i=i: Ruined(i) for i in range(5)], autoreset_mode=AutoresetMode.SAME_STEP)
    stream, action = EnvStream(envs), torch.zeros(5, 1, dtype=torch.int64)
    stream.reset(0)
    for _ in range(2): stream.step(action)
    with pytest.raises(ValueError, match=r"observations of lanes=\[3\], expected finite numbers"): stream.step(action)


class Garbage(gym.vector.VectorWrapper):
    "The reward of a step that only resets is whatever was in memory."
    def reset(self, **kw):
        self.over = np.zeros(self.num_envs, bool)
        return self.env.reset(**kw)
    def step(self, actions):
        obs, reward, over, cut, info = self.env.step(actions)
        reward, self.over = np.where(self.over, np.nan, reward), over | cut
        return obs, reward, over, cut, info

def test_the_reward_of_a_step_that_only_resets_is_not_read():
    "It counts neither for learning nor in the statistics of rewards (near Gymnasium#1668)."
    def trained(wrap, mode=AutoresetMode.NEXT_STEP):
        learner = Learner(wrap(SyncVectorEnv([Three] * 2, autoreset_mode=mode)),
                          PPOConfig(num_steps=12, num_minibatches=1, num_updates=3), PolicyConfig(core="none"))
        return list(train_ppo(learner)), learner
    (plain, first), (garbage, second) = trained(lambda envs: envs), trained(Garbage)
    assert plain == garbage and all(u.stopped == "" for u in plain)
    assert all(torch.equal(a, b) for a, b in zip(first.policy.parameters(), second.policy.parameters()))
    for mode in AutoresetMode: # each fourth step only resets, in one of them
        count = 54 if mode == AutoresetMode.NEXT_STEP else 72
        assert trained(lambda envs: envs, mode)[1].reward_norm.moments.count == count


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("steps", [3, 8, 11])
def test_playing_on_the_environments_of_training_does_not_mix_two_episodes(mode, steps):
    "Training went on from an observation of an episode that was gone (near stable-baselines3#1731)."
    config = PPOConfig(num_steps=8, num_minibatches=1, num_updates=4, norm_obs=False)
    envs = SyncVectorEnv([Recall] * 2, autoreset_mode=mode)
    learner = Learner(envs, config, PolicyConfig(hidden=8, features=(8,)))
    for _ in range(steps): learner.step()
    t = learner.rollout.t
    play(learner, envs, 3)
    with pytest.raises(RuntimeError, match="another stream has reset"):
        learner.stream.step(torch.zeros(2, 1, dtype=torch.int64))
    with pytest.warns(UserWarning, match="were reset by another stream"): learner.step_envs()
    now = learner.rollout
    assert now.start[t].all() and (now.obs[t] != 0).all() # cues
    if t: assert (now.done | ~now.valid)[t - 1].all()
    with warnings.catch_warnings(action="error"):
        for u in train_ppo(learner):
            assert u.first_gap < 1e-6 and max(u.lengths, default=0) <= 4
    other = Learner(SyncVectorEnv([Recall] * 2, autoreset_mode=mode), config, PolicyConfig(hidden=8, features=(8,)))
    with warnings.catch_warnings(action="error"): # on environments of their own nothing happens
        for u in train_ppo(other): play(other, SyncVectorEnv([Recall] * 2), 3)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("core", ["none", "lstm"])
def test_a_learner_learns_whatever_its_caller_uses(context, core):
    "A loop under `inference_mode` broke in its first gradient, or in its second update (near pytorch/rl#530)."
    def trained(step):
        learner = Learner(SyncVectorEnv([Recall] * 2), PPOConfig(num_steps=8, num_minibatches=1, num_updates=4),
                          PolicyConfig(core=core, hidden=8, features=(8,)))
        return [u for _ in range(32) if (u := step(learner)) is not None], learner.policy.state_dict()
    def inside(learner):
        with context(): return learner.step()
    (plain, weights), (found, same) = trained(Learner.step), trained(inside)
    assert plain == found and len(plain) == 4 and all(torch.equal(same[k], v) for k, v in weights.items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("core", ["none", "lstm"])
def test_the_default_dtype_of_torch_changes_nothing(dtype, core):
    "Weights of one precision met observations of another (near stable-baselines3#675)."
    def trained():
        made = [lambda: Numbered(FIVE, 2)] * 2 if core == "none" else [Recall] * 2
        learner = Learner(SyncVectorEnv(made, autoreset_mode="SameStep"),
                          PPOConfig(num_steps=8, num_minibatches=1, num_updates=3),
                          PolicyConfig(core=core, hidden=8, features=(8,), layer_norm=True))
        return list(train_ppo(learner)), play(learner, SyncVectorEnv(made), 3), learner.policy.state_dict()
    plain = trained()
    torch.set_default_dtype(dtype)
    try: found = trained()
    finally: torch.set_default_dtype(torch.float32)
    assert plain[:2] == found[:2] and all(torch.equal(found[2][k], v) for k, v in plain[2].items())
