"Step form against sequence form over sizes, memories and episode patterns."
import pytest
import torch
from hypothesis import given, settings, strategies as st

from esper_nb.learn.distributions import Heads
from esper_nb.learn.policies import ActorCritic, PolicyConfig


def scan(policy, obs, state, start):
    logits, values = [], []
    for t in range(len(obs)):
        state = torch.where(start[t][:, None], torch.zeros(()), state)
        l, v, state = policy(obs[t:t + 1], state, torch.zeros(1, obs.shape[1]).bool())
        logits.append(l); values.append(v)
    return torch.cat(logits), torch.cat(values), state


@settings(deadline=None, max_examples=40)
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


def test_nothing_crosses_an_episode_start():
    policy = ActorCritic(Heads((3,)), 5, PolicyConfig(hidden=16))
    obs = torch.randn(20, 2, 5)
    start = torch.zeros(20, 2).bool(); start[11, 0] = True
    before = policy(obs, policy.initial_state(2), start)
    obs2 = obs.clone(); obs2[:11] += 1
    after = policy(obs2, policy.initial_state(2), start)
    assert torch.equal(before[0][11:, 0], after[0][11:, 0]) and not torch.equal(before[0][11:, 1], after[0][11:, 1])


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
