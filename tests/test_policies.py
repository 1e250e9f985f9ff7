"Step form against sequence form over sizes, memories and episode patterns."
import pytest
import torch
from hypothesis import given, settings, strategies as st

from esper_nb.learn import ActorCritic, Heads, MaskedHeads, PolicyConfig, choose


def scan(policy, obs, state, start):
    logits, values = [], []
    for t in range(len(obs)):
        state = torch.where(start[t][:, None], torch.zeros(()), state)
        l, v, state = policy(obs[t:t + 1], state, torch.zeros(1, obs.shape[1]).bool())
        logits.append(l); values.append(v)
    return torch.cat(logits), torch.cat(values), state


@settings(deadline=None, max_examples=20)
@given(st.sampled_from(["lstm", "gru", "none"]), st.integers(1, 3), st.tuples(st.booleans(), st.booleans()),
       st.integers(1, 25), st.integers(1, 5), st.floats(0, 1), st.integers(0, 10**6))
def test_a_sequence_equals_its_steps(core, layers, flags, T, n, share, seed):
    g, (residual, separate) = torch.Generator().manual_seed(seed), flags
    config = PolicyConfig(features=(8,), hidden=8, core=core, layers=layers, residual=residual,
                          separate_critic=separate, critic=(4,))
    policy = ActorCritic(Heads((3, 2)), 5, config, seed)
    obs, start = torch.randn(T, n, 5, generator=g), torch.rand(T, n, generator=g) < share
    state = torch.randn(policy.states, n, 8, generator=g)
    for a, b in zip(policy(obs, state, start), scan(policy, obs, state, start)):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_gradients_of_a_sequence_equal_those_of_its_steps():
    policy = ActorCritic(Heads((3,)), 5, PolicyConfig(hidden=16, features=(16,)))
    obs, start = torch.randn(30, 4, 5), torch.rand(30, 4) < 0.1
    grads = []
    for f in (lambda *a: policy(*a), lambda *a: scan(policy, *a)):
        policy.zero_grad()
        logits, values, _ = f(obs, policy.initial_state(4), start)
        (logits.square().sum() + values.sin().sum()).backward()
        grads.append([p.grad.clone() for p in policy.parameters()])
    for a, b in zip(*grads): torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_lanes_do_not_depend_on_each_other():
    policy = ActorCritic(Heads((3,)), 5, PolicyConfig(hidden=16))
    obs, start = torch.randn(9, 4, 5), torch.zeros(9, 4).bool()
    start[4, 1] = True
    alone = policy(obs[:, :1], policy.initial_state(1), start[:, :1])[0]
    torch.testing.assert_close(policy(obs, policy.initial_state(4), start)[0][:, :1], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("core", ["lstm", "gru", "none"])
def test_bf16_runs_with_fp32_results(core):
    policy = ActorCritic(Heads((3,)), 5, PolicyConfig(core=core), precision="bf16")
    obs = torch.randn(6, 2, 5)
    start = torch.zeros(6, 2).bool(); start[3, 0] = True
    logits, value, state = policy(obs, policy.initial_state(2), start)
    assert logits.dtype == value.dtype == state.dtype == torch.float32
    exact = ActorCritic(Heads((3,)), 5, PolicyConfig(core=core))(obs, policy.initial_state(2), start)
    assert (value - exact[1]).abs().max() < 0.05 * exact[1].abs().max() + 0.01
    (logits.sum() + value.sum()).backward()
    assert all(torch.isfinite(p.grad).all() for p in policy.parameters())


def test_no_cast_of_a_weight_outlives_a_call_without_gradient():
    "A bf16 copy of a weight that was cached under no_grad would leave the update without gradient."
    policy = ActorCritic(Heads((3,)), 5, PolicyConfig(), precision="bf16")
    obs, start = torch.randn(2, 2, 5), torch.zeros(2, 2).bool()
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad(): policy(obs, policy.initial_state(2), start)
        policy(obs, policy.initial_state(2), start)[1].sum().backward()
    assert policy.trunks[0].features[0].weight.grad.abs().sum() > 0


def test_embedded_columns():
    config = PolicyConfig(embed_columns=(0, 3), embed_size=4, embed_dim=2)
    policy = ActorCritic(Heads((3,)), 5, config)
    obs = torch.rand(2, 3, 5)
    obs[..., [0, 3]] = torch.tensor([1., 3.])
    policy(obs, policy.initial_state(3), torch.zeros(2, 3).bool())[1].sum().backward()
    used = policy.embed.weight.grad.abs().sum(-1) > 0
    assert used.tolist() == [False, True, False, True]


# --- heads that see earlier choices

class Plot(Heads):
    "Head 1 depends on head 0, head 2 on head 1: what is legal changes with what was chosen."
    def __init__(self): super().__init__((3, 4, 2), stages=((0,), (1,), (2,)))
    def legal(self, mask, action):
        legal = super().legal(mask, action).clone()
        legal[..., 1, :] &= (torch.arange(4) <= action[..., :1] + 1)
        legal[..., 2, 1] &= action[..., 1] > 0
        return legal


def seeing(heads, **kw):
    "A policy whose later heads have learned to look."
    policy = ActorCritic(heads, 5, PolicyConfig(hidden=16, features=(16,), autoregressive=True, **kw))
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        policy.modulation.normal_(std=3., generator=g)
        policy.logits_weight.normal_(generator=g)
    return policy


def all_actions(heads): return torch.cartesian_prod(*(torch.arange(s) for s in heads.sizes))


@pytest.mark.parametrize("floor, actor", [(0., 0), (0.05, 0), (0., 8)])
def test_probabilities_of_all_legal_actions_sum_to_one(floor, actor):
    heads = Plot()
    policy, every = seeing(heads, floor=floor, actor=actor), all_actions(heads)
    n = len(every)
    obs, start = torch.randn(1, 1, 5).expand(1, n, 5), torch.ones(1, n).bool()
    logits, *_ = policy(obs, policy.initial_state(n), start, every[None])
    dist = MaskedHeads(logits[0], heads.legal(None, every), floor)
    logp = dist.log_prob(every).sum(-1)
    legal = heads.legal(None, every).gather(-1, every[..., None]).all((-1, -2))
    assert 3 < legal.sum() < n and (logp[~legal] == -torch.inf).all()
    assert abs(logp.exp().sum() - 1) < 1e-5
    entropy = -(logp[legal].exp() * logp[legal]).sum() # of the whole action; by the chain rule the heads' add up to it
    assert abs((logp[legal].exp() * dist.entropy()[legal].sum(-1)).sum() - entropy) < 1e-5


def test_what_is_drawn_has_those_probabilities():
    heads = Plot()
    policy, every, n = seeing(heads), all_actions(heads), 40_000
    obs, first = torch.randn(1, 5), torch.ones(1).bool()
    y, *_ = policy.read(obs[None], policy.initial_state(1), first[None])
    noise = torch.empty(n, 3, 4).exponential_(generator=torch.Generator().manual_seed(0))
    action, logp = choose(heads, lambda a: policy.logits(y[0].expand(n, -1), a), None, noise)
    logits = policy.logits(y[0].expand(len(every), -1), every)
    p = MaskedHeads(logits, heads.legal(None, every)).log_prob(every).sum(-1).exp()
    seen = (action[:, None] == every).all(-1).float().mean(0)
    assert (seen - p).abs().max() < 0.01
    again = MaskedHeads(policy.logits(y[0].expand(n, -1), action), heads.legal(None, action)).log_prob(action)
    torch.testing.assert_close(logp, again, atol=1e-6, rtol=0)


def test_looking_begins_as_no_difference_and_is_learned():
    one, two = (ActorCritic(Plot(), 5, PolicyConfig(hidden=16, autoregressive=flag)) for flag in (False, True))
    shared = dict(one.named_parameters())
    assert dict(two.named_parameters()).keys() - shared.keys() == {"modulation"}
    assert all(torch.equal(p, shared[name]) for name, p in two.named_parameters() if name in shared)
    y, action = torch.randn(7, 16), torch.ones(7, 3).long()
    assert torch.equal(one.logits(y, action), two.logits(y, action))
    two.logits(y, action).square().sum().backward()
    assert two.modulation.grad.abs().sum() > 0
    assert ActorCritic(Heads((3, 2)), 5, PolicyConfig()).modulation is None, "with one stage there is nothing to see"


def test_widths_may_come_as_a_list():
    assert PolicyConfig(features=[64, 8]) == PolicyConfig(features=(64, 8))


@pytest.mark.cuda
@pytest.mark.parametrize("core", ["lstm", "gru", "none"])
def test_sequence_equals_steps_on_cuda(core):
    policy = ActorCritic(Heads((3, 2)), 5, PolicyConfig(core=core)).cuda()
    obs, start = torch.randn(20, 3, 5).cuda(), (torch.rand(20, 3) < 0.2).cuda()
    state, values = policy.initial_state(3), []
    for t in range(20):
        a = policy.act(obs[t], None, state, start[t])
        state = a.state; values.append(a.value)
    _, whole, _ = policy(obs, policy.initial_state(3), start)
    torch.testing.assert_close(whole, torch.stack(values), atol=1e-4, rtol=1e-4)
