"The learner as a whole: exactness, guards, every option, worlds that need a feature."
import dataclasses
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from esper_nb.core import use_threads
from esper_nb.learn import (
    ActorCritic, Batch, ChoiceMasks, Coefficients, Heads, Learner, MaskedHeads, PPOConfig, PolicyConfig,
    collect_returns, explained_variance, play, ppo_loss, standardize, train_ppo)


pytestmark = pytest.mark.usefixtures("one_thread")


def cartpole(n=4, mode="vector_entry_point"): return gym.make_vec("CartPole-v1", num_envs=n, vectorization_mode=mode)

small = PolicyConfig(hidden=16, features=(16,))


def weights(learner): return torch.cat([p.detach().flatten() for p in learner.policy.parameters()])


@pytest.mark.parametrize("core", ["lstm", "gru", "none"])
def test_two_runs_are_equal_to_the_bit(core):
    runs = []
    for _ in range(2):
        config = PPOConfig(num_steps=16, norm_obs=True, norm_reward=True, norm_value=True)
        learner = Learner(cartpole(), config, small.replace(core=core))
        runs.append((list(train_ppo(learner, 3)), weights(learner)))
    assert runs[0][0] == runs[1][0] and torch.equal(runs[0][1], runs[1][1])


@pytest.mark.parametrize("mode", ["sync", "async", "vector_entry_point"])
def test_any_kind_of_vector_environment(mode):
    envs = cartpole(2, mode)
    try:
        doubled = gym.wrappers.vector.TransformReward(envs, lambda r: 2 * r)
        wrapped = gym.wrappers.vector.RecordEpisodeStatistics(doubled)
        u = next(train_ppo(Learner(wrapped, PPOConfig(num_steps=40, num_minibatches=2), small), 1))
        assert u.first_gap < 1e-5 and u.gradient_steps == 8 and u.reward == 2. and u.returns
    finally: envs.close()


@pytest.mark.parametrize("name", ["Taxi-v4", "FrozenLake-v1"])
def test_environments_that_come_with_gymnasium(name):
    if name not in gym.registry: pytest.skip(f"{name} is not in this gymnasium")
    envs = gym.make_vec(name, num_envs=3, vectorization_mode="sync")
    u = next(train_ppo(Learner(envs, PPOConfig(num_steps=30, num_minibatches=3), small), 1))
    assert u.first_gap < 1e-5 and u.gradient_steps == 12


options = [dict(norm_adv="rollout"), dict(norm_adv="none"), dict(clip_vloss=True), dict(ratio="joint"),
           dict(ent_floor=(0.5, 0.3), ent_floor_coef=1.), dict(target_kl=0.01),
           dict(norm_value=True, norm_reward=True, norm_obs=True, obs_keep=(1,)),
           dict(update_epochs=1, num_minibatches=1), dict(precision="bf16"), dict(gamma=1., gae_lambda=1.)]


class Masked(gym.Env):
    "Random masks over two heads, random ends of all three kinds."
    observation_space, action_space = gym.spaces.Box(-9, 9, (4,)), gym.spaces.MultiDiscrete([3, 4])
    def _out(self):
        mask = (self.np_random.random(7) < 0.6).astype(np.int8); mask[[0, 3]] = 1
        self.mask = mask
        return self.np_random.normal(size=4).astype(np.float32), {"action_mask": mask}
    def reset(self, seed=None, options=None): super().reset(seed=seed); return self._out()
    def step(self, action):
        assert self.mask[action[0]] and self.mask[3 + action[1]], "an illegal action was taken"
        obs, info = self._out()
        u = self.np_random.random()
        if u < 0.03: info["rolled_back"] = True
        return obs, -10. if u < 0.03 else float(action[0]), u < 0.03 or 0.1 < u < 0.14, 0.2 < u < 0.24, info


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("option", options, ids=str)
def test_every_option_in_every_mode_begins_at_ratio_one(option, mode):
    envs = SyncVectorEnv([Masked] * 4, autoreset_mode=mode)
    learner = Learner(envs, PPOConfig(**dict(num_steps=40, num_minibatches=2) | option), small)
    ups = list(train_ppo(learner, 3))
    limit = 0.15 if option.get("precision") == "bf16" else 1e-5
    assert max(u.first_gap for u in ups) < limit
    assert all(u.gradient_steps > 0 and math.isfinite(u.loss) for u in ups) and sum(u.rollbacks for u in ups) > 0
    assert torch.isfinite(weights(learner)).all()


@pytest.mark.parametrize("ratio", ["heads", "joint"])
@pytest.mark.parametrize("prob_floor", [0., .02])
def test_gradients_are_those_that_autograd_finds(ratio, prob_floor):
    g, heads, c = torch.Generator().manual_seed(0), Heads((3, 4)), PPOConfig(vf_coef=0., ent_coef=.1, ratio=ratio)
    def draw(*shape): return torch.randn(5, 7, *shape, generator=g)
    then, legal, adv, valid = draw(2, 4), (draw(2, 4) < .3) & heads.real, draw(), draw() < 1
    legal[..., 0] = True
    relevant = draw(2) < .5
    action = MaskedHeads(then, legal).mode()
    batch = Batch(draw(1), None, action, MaskedHeads(then, legal, prob_floor).log_prob(action), draw(), adv, draw(),
                  valid, valid, torch.zeros(0, 7, 1))
    now = then + draw(2, 4)
    now[0, 0] += 60. * (torch.arange(4) == action[0, 0, :, None]) # beyond what a ratio is limited to
    x, y = (now.clone().requires_grad_() for _ in range(2))
    masks, coefs = ChoiceMasks(legal, relevant, legal), Coefficients(torch.tensor(.2), torch.tensor(.1), torch.zeros(2))
    stats = ppo_loss(x, batch.value, batch, masks, adv, coefs, c, prob_floor)
    stats.loss.backward()
    dist, used = MaskedHeads(y, legal, prob_floor), (relevant & valid[..., None]).float()
    torch.testing.assert_close(stats.entropy, (dist.normalized_entropy() * used).sum(-1)[valid].mean())
    change = torch.where(used > 0, dist.log_prob(action) - batch.logp, 0.)
    change = ((change * used).sum(-1, keepdim=True) if ratio == "joint" else change).clamp(-20, 20)
    gain = torch.minimum(change.exp() * adv[..., None], change.exp().clamp(.8, 1.2) * adv[..., None])
    if ratio == "heads": gain = gain * used
    steps = (gain.sum(-1) + .1 * (dist.normalized_entropy() * used).sum(-1))[valid]
    (-steps.mean()).backward()
    assert y.grad.abs().max() > 0
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-7)


class Garden(Heads):
    "Head 1 depends on head 0 (0 wait, 1 plant, 2 prune): 3 places, of which the last three facts say if they are full."
    def __init__(self): super().__init__((3, 3), stages=((0,), (1,)))
    def legal(self, mask, action):
        legal, full, op = super().legal(mask, action).clone(), mask[..., 6:9], action[..., :1]
        legal[..., 1, :] = torch.where(op == 1, ~full, torch.where(op == 2, full, torch.tensor([True, False, False])))
        return legal
    def relevant(self, action): return torch.stack([torch.ones_like(action[..., 0]), action[..., 0] > 0], -1).bool()
    def available(self, mask, action):
        legal = Heads.legal(self, mask, action).clone()
        legal[..., 1, :] = mask[..., 6:9] & mask[..., 2:3] | ~mask[..., 6:9] & mask[..., 1:2]
        return legal


class GardenEnv(gym.Env):
    "Full places must be pruned, empty ones planted; waiting pays nothing, and only the marked place pays."
    observation_space, action_space = gym.spaces.Box(0, 1, (6,)), gym.spaces.MultiDiscrete([3, 3])
    def _out(self):
        self.full, self.target = self.np_random.random(3) < 0.5, self.np_random.integers(3)
        mask = np.concatenate([[1, not self.full.all(), self.full.any()], np.ones(3), self.full]).astype(np.int8)
        return np.concatenate([self.full, np.eye(3)[self.target]]).astype(np.float32), {"action_mask": mask}
    def reset(self, seed=None, options=None): super().reset(seed=seed); self.t = 0; return self._out()
    def step(self, action):
        op, place = action
        if op: assert self.full[place] == (op == 2), "illegal place"
        reward = float(op > 0 and place == self.target)
        self.t += 1
        obs, info = self._out()
        return obs, reward, False, self.t >= 20, info


@pytest.mark.slow
def test_dependent_heads_learn():
    config = PPOConfig(num_steps=20, num_updates=80, learning_rate=0.01, gamma=0.1, num_minibatches=2,
                       ent_floor=0.1, ent_floor_coef=0.1)
    policy = PolicyConfig(core="none", features=(64,))
    learner = Learner(SyncVectorEnv([GardenEnv] * 8), config, policy, heads=Garden())
    ups = list(train_ppo(learner))
    assert max(u.first_gap for u in ups) < 1e-5
    assert ups[-1].reward > 0.8 > 0.5 > ups[0].reward


class Cue(gym.Env):
    "A cue at the first step, a wait, then the cue must be chosen; of 12 choices four are legal, others end it."
    observation_space, action_space = gym.spaces.Box(0, 1, (6,)), gym.spaces.Discrete(12)
    def __init__(self, masked=True): self.masked = masked
    def _out(self):
        legal = np.zeros(12, np.int8); legal[(self.offset + np.arange(4)) % 12] = 1
        self.legal = legal
        obs = np.zeros(6, np.float32)
        obs[4], obs[5] = self.t == 0, self.t == 5
        if self.t == 0: obs[self.cue] = 1
        return obs, {"action_mask": legal} if self.masked else {}
    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.cue, self.offset = 0, self.np_random.integers(4), 0
        return self._out()
    def step(self, action):
        if not self.legal[action]:
            legal = {"action_mask": self.legal} if self.masked else {}
            return self._out()[0], -1., True, False, legal
        last, right = self.t == 5, action == self.cue
        self.t += 1
        obs, info = self._out()
        return obs, float(last and right), bool(last), False, info


def cue_return(core, masked):
    envs = SyncVectorEnv([lambda: Cue(masked)] * 16)
    config = PPOConfig(num_steps=24, num_updates=50, learning_rate=5e-3, num_minibatches=4, ent_coef=0.01, seed=1)
    learner = Learner(envs, config, PolicyConfig(core=core, features=(16,), hidden=32))
    for u in train_ppo(learner): pass
    return np.mean(play(learner.policy, SyncVectorEnv([lambda: Cue(masked)] * 16), 160, view=learner.view))


@pytest.mark.slow
def test_a_masked_memory_task_needs_both():
    assert cue_return("lstm", True) > 0.9
    assert cue_return("none", True) < 0.6


class TwoTargets(gym.Env):
    "The mask dictates one of two operations; each has a place of its own among three, and only that one pays."
    observation_space, action_space = gym.spaces.Box(0, 1, (6,)), gym.spaces.MultiDiscrete([2, 3])
    def _out(self):
        self.targets, op = self.np_random.integers(3, size=2), self.np_random.integers(2)
        mask = np.concatenate([np.eye(2)[op], np.ones(3)]).astype(np.int8)
        return np.eye(3)[self.targets].ravel().astype(np.float32), {"action_mask": mask}
    def reset(self, seed=None, options=None): super().reset(seed=seed); return self._out()
    def step(self, action):
        op, place = action
        reward = float(place == self.targets[op])
        obs, info = self._out()
        return obs, reward, True, False, info


def two_targets(autoregressive, updates=40):
    "Share of right places at the end of a short run, and the largest first gap."
    config = PPOConfig(seed=1, num_steps=32, num_updates=updates, learning_rate=5e-3, num_minibatches=2)
    policy = PolicyConfig(core="none", features=(32,), autoregressive=autoregressive)
    heads = Heads((2, 3), stages=((0,), (1,)))
    ups = list(train_ppo(Learner(SyncVectorEnv([TwoTargets] * 8), config, policy, heads)))
    return np.mean([u.reward for u in ups[-5:]]), max(u.first_gap for u in ups)


@pytest.mark.slow
def test_a_head_that_knows_the_operation_finds_its_place():
    (blind, gap_blind), (seeing, gap_seeing) = (two_targets(flag) for flag in (False, True))
    assert blind < 0.75 and seeing > 0.95
    assert max(gap_blind, gap_seeing) < 1e-5


class Punished(gym.vector.VectorWrapper):
    "CartPole in which lane 2 is rolled back in one step, if at all."
    def __init__(self, at=None):
        super().__init__(cartpole(3))
        self.at, self.count = at, 0

    def step(self, actions):
        obs, reward, term, trunc, info = self.env.step(actions)
        self.count += 1
        if self.count == self.at:
            rolled, reward = np.array([False, False, True]), np.array(reward, np.float32)
            reward[rolled] = -10.
            info = info | dict(rolled_back=rolled, _rolled_back=rolled.copy())
        return obs, reward, term, trunc, info


@pytest.mark.parametrize("scaled", [False, True])
def test_the_penalty_is_not_scaled_and_reaches_one_transition(scaled):
    "The same run with and without a penalty, in the last step of the third rollout."
    runs = []
    for at in (None, 36):
        config = PPOConfig(num_steps=12, num_minibatches=1, norm_reward=scaled, learning_rate=1e-9)
        learner = Learner(Punished(at), config, small)
        for _ in train_ppo(learner, 2): pass
        for _ in range(12): learner.step_envs()
        learner.compute_targets()
        runs.append(learner.rollout)
    plain, hit = runs
    assert hit.rolled_back.nonzero().tolist() == [[11, 2]] and hit.reward[11, 2] == -10
    assert (plain.reward != hit.reward).nonzero().tolist() == [[11, 2]] and hit.terminated[11, 2]
    assert abs(hit.advantage[11, 2].item() - (-10 - hit.value[11, 2].item())) < 1e-4, "in full"
    if scaled: return # the statistics miss one ordinary reward
    assert torch.equal(plain.advantage[:, :2], hit.advantage[:, :2])
    begin = hit.start[:, 2].nonzero().flatten().tolist()[-1] if hit.start[:, 2].any() else 0
    change = hit.advantage[:, 2] - plain.advantage[:, 2]
    assert (change[:begin] == 0).all()
    expected = change[11] * (0.99 * 0.95) ** torch.arange(11 - begin, -1, -1)
    assert torch.allclose(change[begin:], expected, atol=1e-4), "earlier steps learn of it through the advantages only"


def test_a_rollback_is_an_end_in_the_statistics():
    learner = Learner(Punished(5), PPOConfig(num_steps=12, num_minibatches=1), small)
    u = next(train_ppo(learner, 1))
    assert u.rollbacks == 1 and u.first_gap < 1e-5 and (4 - 10., 5) in zip(u.returns, u.lengths)


def test_a_step_acts_once_and_learns_when_the_rollout_is_full():
    config = PPOConfig(num_steps=6, num_minibatches=2, update_epochs=2)
    learner, straight = (Learner(cartpole(2), config, small) for _ in range(2))
    found = [learner.step() for _ in range(12)]
    assert [i for i, u in enumerate(found) if u is not None] == [5, 11]
    assert [u for u in found if u is not None] == list(train_ppo(straight, 2))


@pytest.mark.parametrize("threads, used", [(1, 1), (2, 2), (None, 3)])
def test_learning_uses_as_many_cores_as_it_is_told_and_acting_one(threads, used, monkeypatch):
    seen = dict(act=set(), learn=set())
    def look(cls, name, key):
        really = getattr(cls, name)
        def counted(self, *a):
            seen[key].add(torch.get_num_threads())
            return really(self, *a)
        monkeypatch.setattr(cls, name, counted)
    look(Learner, "learn", "learn")
    look(ActorCritic, "forward", "act")
    config = PPOConfig(num_steps=4, num_updates=1, num_minibatches=2, update_epochs=1, threads=threads)
    learner = Learner(cartpole(), config, PolicyConfig(hidden=8, features=(8,)))
    with use_threads(3):
        list(train_ppo(learner))
        assert torch.get_num_threads() == 3
    assert seen == dict(learn={used}, act={1, used})  # the policy acts, and is evaluated again to learn


@pytest.mark.slow
def test_the_stop_button_of_jupyter():
    "An interrupted training cell ends without a traceback, and the next one goes on exactly."
    manager = pytest.importorskip("jupyter_client.manager")
    km, kc = manager.start_new_kernel(kernel_name="python3")
    def run(code, interrupt=False):
        "Reply and printed text of one cell."
        text, sent = "", kc.execute(code)
        while True:
            m = kc.get_iopub_msg(timeout=60)
            if m["parent_header"].get("msg_id") != sent: continue
            if m["msg_type"] == "stream":
                text += m["content"]["text"]
                if interrupt and "running" in text: km.interrupt_kernel(); interrupt = False
            if m["msg_type"] == "status" and m["content"]["execution_state"] == "idle": break
        return kc.get_shell_msg(timeout=60)["content"]["status"], text
    try:
        status, text = run("""
import gymnasium as gym, time, torch
from esper_nb.learn.learner import Learner
from esper_nb.learn.loss import PPOConfig
from esper_nb.learn.policies import PolicyConfig
from esper_nb.learn.learner import train_ppo
torch.set_num_threads(1)
class Slow(gym.Wrapper):
    wait, steps = 0.05, 0
    def step(self, action):
        Slow.steps += 1
        if Slow.steps == 3: print("running", flush=True)
        time.sleep(Slow.wait)
        return self.env.step(action)
def make():
    envs = gym.vector.SyncVectorEnv([lambda: Slow(gym.make("CartPole-v1"))] * 2)
    config = PPOConfig(num_steps=20, num_updates=2, num_minibatches=2)
    return Learner(envs, config, PolicyConfig(hidden=8, features=(8,)))
learner = make()""")
        assert status == "ok", text
        status, text = run("ups = list(train_ppo(learner)); print(len(ups), learner.rollout.t)", interrupt=True)
        assert status == "ok" and "Traceback" not in text
        done, t = map(int, text.split()[-2:])
        assert done == 0 and 0 < t < 20, "stopped in the middle of a rollout"
        status, text = run("Slow.wait = 0; ups += list(train_ppo(learner)); print(ups == list(train_ppo(make())))")
        assert status == "ok" and text.strip() == "True"
    finally: kc.stop_channels(); km.shutdown_kernel(now=True)


def test_a_ruined_policy_is_an_error_when_acting():
    learner = Learner(cartpole(2), PPOConfig(num_steps=8, num_minibatches=2), small)
    torch.nn.init.constant_(learner.policy.logits_bias, math.nan)
    with pytest.raises(ValueError, match="logits are not finite"): next(train_ppo(learner, 1))


def test_records_of_a_run_hold_no_unmeasured_zeros():
    envs = SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2)
    learner = Learner(envs, PPOConfig(num_steps=4, num_minibatches=1), small)
    u = next(train_ppo(learner, 1))
    assert u.returns == () and u.head_entropy[0] is not None
    assert dataclasses.asdict(u)["stopped"] == ""


@pytest.mark.cuda
def test_a_run_on_cuda(machine):
    config = PPOConfig(num_steps=12 if machine else 40, num_minibatches=2, norm_obs=True, norm_reward=True,
                       norm_value=True, ent_floor=0.2, ent_floor_coef=0.1)
    learner = Learner(SyncVectorEnv([Masked] * 4), config, small, device="cuda")
    ups = list(train_ppo(learner, 3))
    assert max(u.first_gap for u in ups) < 1e-3 and all(u.gradient_steps == 8 for u in ups)


# --- settings, schedules and refusals

def test_settings_at_the_edge_are_taken():
    PPOConfig(max_grad_norm=math.inf, clip_final=0., lr_final=1, ent_coef=0, vf_coef=0, ent_floor=(0, 1), clip_coef=1)


def corrupt(learner, at):
    "From now on, the gradients of minibatches with these numbers are not finite; the first is 0."
    count = -1
    def bad(grad):
        nonlocal count
        count += 1
        return grad * math.nan if at is None or count in at else grad
    return learner.policy.value_out.weight.register_hook(bad)


def everything_learned(learner):
    "Weights and moments, copied."
    moments = [v.clone() for s in learner.optimizer.state.values() for v in s.values()]
    return [p.detach().clone() for p in learner.policy.parameters()] + moments


@pytest.mark.parametrize("bad", [0, 1, 3, 15])
def test_a_refused_update_leaves_no_trace_whichever_minibatch_was_bad(bad):
    config = PPOConfig(num_steps=8, num_minibatches=4)
    learner = Learner(cartpole(4), config, small)
    next(train_ppo(learner, 1))
    before, hook = everything_learned(learner), corrupt(learner, {bad})
    u = next(train_ppo(learner, 1))
    assert u.stopped == "nonfinite" and u.gradient_steps == 0 and u.loss is None and u.first_gap < 1e-5
    assert all(torch.equal(a, b) for a, b in zip(before, everything_learned(learner)))
    hook.remove()
    assert next(train_ppo(learner, 1)).gradient_steps == 16 and learner.failed == 0


def test_three_refused_updates_in_a_row_stop_wherever_they_break():
    learner = Learner(cartpole(4), PPOConfig(num_steps=8, num_minibatches=4), small)
    corrupt(learner, {5, 8, 10}) # the first of 6 steps is refused, then 3, then 2
    got = []
    with pytest.raises(RuntimeError, match="three updates in a row"): got += [u for u in train_ppo(learner, 4)]
    assert learner.failed == 3 and learner.update == 2


def test_a_refusal_after_stop_save_and_load_goes_back_just_as_far():
    config = PPOConfig(num_steps=8, num_minibatches=4)
    one, two = (Learner(cartpole(4), config, small) for _ in range(2))
    before = everything_learned(one)
    class Now: requested = True
    for _ in range(8 + 3): assert one.step(Now) is None # the rollout is full; three gradient steps
    assert one.progress.gradient_step == 3
    two.load_state_dict(one.state_dict())
    corrupt(two, {2})
    u = two.step()
    assert u.stopped == "nonfinite" and u.gradient_steps == 0
    after = everything_learned(two)
    assert all(torch.equal(a, b) for a, b in zip(before, after)) and two.optimizer.state_dict()["state"] == {}


def test_equal_advantages_stay_equal():
    for value in (0.3, -7e4, 1e-3, 0.):
        for n in (3, 7, 1000):
            z = standardize(torch.full((n, 3), value), torch.ones(n, 3).bool())
            assert z.abs().max() == 0, (value, n)
    x = 5 + 1e-3 * torch.randn(500, 2) # a small spread is one, if fp32 can hold it
    assert abs(standardize(x, torch.ones(500, 2).bool()).std() - 1) < 1e-2


# --- a critic whose log can be believed

def monte_carlo(reward, done, terminated, final, gamma):
    "For every step whose episode ended: what was collected, and the discounted value of the rest; by definition."
    T, n = reward.shape
    found = {}
    for i in range(n):
        for t in range(T):
            ends = [s for s in range(t, T) if done[s, i]]
            if not ends: continue
            end = ends[0]
            total = sum(gamma ** (s - t) * reward[s, i].double() for s in range(t, end + 1))
            found[t, i] = total, 0. if terminated[end, i] else gamma ** (end + 1 - t) * final[end, i].double()
    return found


@pytest.mark.parametrize("seed", range(3))
def test_what_was_collected_equals_the_definition(seed):
    g, T, n, gamma = torch.Generator().manual_seed(seed), 30, 3, 0.9
    reward, following = torch.randn(T, n, generator=g), torch.randn(T, n, generator=g)
    u = torch.rand(T, n, generator=g)
    terminated, done = u < 0.05, u < 0.15
    following = torch.where(terminated, 0., following)
    found = collect_returns(reward, done, following, gamma)
    ref = monte_carlo(reward, done, terminated, following, gamma)
    assert {tuple(x) for x in found.known.nonzero().tolist()} == ref.keys()
    for (t, i), (total, rest) in ref.items():
        assert abs(found.rewards[t, i] - total) < 1e-5 and abs(found.rest[t, i] - rest) < 1e-5


class Coin(gym.Env):
    "Rewards that nobody can foresee, episodes of `length` steps; nothing is seen but the number of the lane."
    observation_space, action_space = gym.spaces.Box(-99, 99, (1,)), gym.spaces.Discrete(2)
    def __init__(self, lane, cut, length=20): self.lane, self.cut, self.length = lane, cut, length
    def _obs(self): return np.full(1, self.lane, np.float32)
    def reset(self, seed=None, options=None): super().reset(seed=seed); self.t = 0; return self._obs(), {}
    def step(self, action):
        self.t += 1
        end = self.t == self.length
        return self._obs(), float(self.np_random.normal()), end and not self.cut, end and self.cut, {}


@pytest.mark.parametrize("cut", [False, True])
def test_a_critic_that_makes_up_its_numbers_explains_nothing(cut):
    "Its own targets lean on it, so against them it would seem to know a lot."
    envs = SyncVectorEnv([lambda i=i: Coin(i, cut) for i in range(4)], autoreset_mode="SameStep")
    config = PPOConfig(num_steps=64, num_minibatches=1, gae_lambda=0.5, norm_obs=False, norm_reward=False)
    learner = Learner(envs, config, PolicyConfig(core="none", features=()))
    torch.nn.init.constant_(learner.policy.value_out.weight, 30.) # 0, 30, 60 and 90 by the number of the lane
    while learner.acts: learner.step_envs()
    learner.compute_targets()
    r = learner.rollout
    assert explained_variance(r.value, r.returns, r.valid) > 0.5
    assert learner.progress.variance < 0.


def test_a_critic_that_foresees_is_credited():
    class Sure(Coin):
        def step(self, action): obs, _, *rest = super().step(action); return obs, float(self.lane), *rest
    envs = SyncVectorEnv([lambda i=i: Sure(i, False, 6) for i in range(4)], autoreset_mode="SameStep")
    config = PPOConfig(num_steps=26, num_minibatches=1, norm_obs=False, norm_reward=False, gamma=1.)
    learner = Learner(envs, config, PolicyConfig(core="none", features=()))
    torch.nn.init.constant_(learner.policy.value_out.weight, 3.5) # times the lane: the mean of 6, 5, ... 1
    while learner.acts: learner.step_envs()
    learner.compute_targets()
    assert 0.5 < learner.progress.variance < 1.


def test_no_episode_ended_nothing_is_claimed():
    learner = Learner(cartpole(2), PPOConfig(num_steps=4, num_minibatches=1), small)
    assert next(train_ppo(learner, 1)).explained_variance is None


def test_embedded_columns_are_left_alone_by_normalisation():
    policy = PolicyConfig(hidden=8, features=(8,), embed_columns=(0,), embed_size=16)
    class Named(gym.Env):
        observation_space, action_space = gym.spaces.Box(0, 20, (2,)), gym.spaces.Discrete(2)
        def _obs(self): return np.array([self.np_random.integers(16), self.np_random.normal()], np.float32)
        def reset(self, seed=None, options=None): super().reset(seed=seed); return self._obs(), {}
        def step(self, action): return self._obs(), 0., False, False, {}
    learner = Learner(SyncVectorEnv([Named] * 2), PPOConfig(num_steps=8, num_minibatches=2), policy)
    for u in train_ppo(learner, 2): assert u.first_gap < 1e-5
    seen = learner.view(torch.tensor([[13., 0.5]]))
    assert seen[0, 0] == 13 and seen[0, 1] != 0.5
