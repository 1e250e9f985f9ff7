"Rewards on random steps: bounded, adding up, lane by lane the same, and no detour pays; and a reward of one's own."
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from esper_nb.control import (
    OPS, PRESETS, TERMS, EnvStep, GrowthActions, RewardConfig, RewardPreset, Transition, choice_of, compute_reward,
    draw_actions, explain_reward, in_stage, occupied_size, read_slots, reward_term, seed_sizes, start_rewards)
from esper_nb.grow import LIVE, CNNConfig, CNNHost, Gates, GrowingModel, Rules, SeedState, Stage, encode_seed

D = torch.float64
DEFAULTS = dict(accuracy=50., loss=1., gain=math.nan, epoch=20., last=False, size=100., active=True, rolled_back=False)


def records_of(*states): return torch.tensor([[encode_seed(s) for s in states]]).double()
def fresh(*states): return records_of(*[SeedState()] * len(states))


def transition(before, after, **changes):
    "What one lane's step did, from the states of its slots before and after."
    k = DEFAULTS | changes
    before, after = records_of(*before), records_of(*after)
    there = in_stage(after, *LIVE, Stage.FOSSILIZED)
    def one(x): return torch.tensor([x], dtype=D)
    step = EnvStep.idle(1, after.shape[1], heads=8)._replace(
        active=torch.tensor([k["active"]]), accuracy_pp=one(k["accuracy"]), loss=one(k["loss"]), gain_pp=one(k["gain"]),
        rolled_back=torch.tensor([k["rolled_back"]]))
    return Transition(step=step, before=before, after=after, size=k["size"] * there.double(), host=one(1000.),
                      epoch=one(k["epoch"]), last=torch.tensor([k["last"]]))


def play(config, steps): # steps: (states after, further facts)
    out, before = [], [SeedState()] * len(steps[0][0])
    state = start_rewards(config, records_of(*before))
    for states, more in steps:
        out.append(compute_reward(config, transition(before, states, **more), state))
        state, before = out[-1].state, states
    return out


def seed(stage, **kw): return SeedState(stage=stage, blueprint=0, germinations=1, alpha=1., **kw)


stages = st.sampled_from([s for s in Stage if s not in (Stage.UNKNOWN, Stage.RESETTING)])
three = st.lists(st.builds(seed, stages), min_size=3, max_size=3)
losses = st.one_of(st.floats(0, 1e30), st.sampled_from([math.inf, math.nan]))
some = st.fixed_dictionaries(dict(
    accuracy=st.one_of(st.floats(0, 100), st.just(math.nan)), loss=losses, epoch=st.floats(1, 150), last=st.booleans(),
    size=st.floats(0, 1e6), active=st.booleans()))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(three, some), min_size=1, max_size=6), st.floats(0, 100))
def test_finite_bounded_and_the_sum_of_its_terms(steps, price):
    config = RewardConfig(price=price)
    for (_, k), r in zip(steps, play(config, steps)):
        assert r.total.isfinite().all() and abs(float(r.total)) <= 10 + .1 * price * 3e6 / 1000
        assert abs(sum(float(v) for v in r.terms.values()) - float(r.total)) < 1e-6
        assert k["active"] or float(r.total) == 0
        breakdown = explain_reward(r)
        assert abs(breakdown.total - sum(v for _, v, _ in breakdown.lines)) < 1e-6
        assert all(x.isfinite().all() for x in r.state.values())


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(three, some), min_size=1, max_size=8), st.floats(0, 50))
def test_growing_and_pruning_in_a_circle_pays_nothing(way, price):
    "Back where the episode began, nothing has been earned on the way."
    back = ([SeedState()] * 3, dict(accuracy=0.))
    steps = [(states, k | dict(active=True)) for states, k in way]
    paid = sum(float(r.total) for r in play(RewardConfig(price=price), [*steps, back]))
    assert abs(paid) < 1e-6 * (1 + price * 1e4)


def test_a_rollback_pays_the_penalty_and_nothing_else():
    steps = [([SeedState()], dict(accuracy=40.)), ([seed(Stage.FOSSILIZED)], dict(accuracy=90., rolled_back=True))]
    r = play(RewardConfig(price=3., penalty=7.), steps)[-1]
    assert float(r.total) == -7 and [k for k, v in r.terms.items() if float(v)] == ["rollback"]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(three, some), min_size=1, max_size=6), st.floats(0, 100), st.floats(0, 20))
def test_a_rollback_is_never_worth_more_than_the_same_step_without_one(steps, price, penalty):
    config, steps = RewardConfig(price=price, penalty=penalty), [(s, k | dict(active=True)) for s, k in steps]
    ordinary, (states, facts) = play(config, steps)[-1], steps[-1]
    undone = play(config, [*steps[:-1], (states, facts | dict(rolled_back=True))])[-1]
    assert float(undone.total) <= min(float(ordinary.total), -penalty) and set(undone.terms) == set(ordinary.terms)


def test_real_lives_of_many_lanes_as_of_one():
    host = CNNHost(CNNConfig(in_channels=1, size=8, base=4, blocks=2), lanes=4)
    rules = Rules(gates=Gates(training_epochs=2), embargo=1)
    model = GrowingModel(host, ["r0c0", "r0c1"], blueprints=["norm", "conv_small"], rules=rules)
    space, g = GrowthActions(model), torch.Generator().manual_seed(0)
    sizes, seen, config = seed_sizes(model, space), [], RewardConfig(price=10.)
    state = start_rewards(config, read_slots(model))
    idle = EnvStep.idle(4, slots=2, heads=8)
    for t in range(60):
        before, mask = read_slots(model), space.mask(model)
        acts = draw_actions(space, mask, g)
        for i, a in enumerate(acts): assert space.apply(model, i, a, mask[i]).ok
        accuracy, c = 100 * torch.rand(4, generator=g), torch.randn(2, 4, generator=g)
        model.record_accuracy(accuracy)
        for k, v in zip(model.names, c):
            model.record_contribution(k, v)
            model.record_gradients(k, [1.] * 4, [1.] * 4)
        model.tick()
        after = read_slots(model)
        step = idle._replace(active=torch.ones(4, dtype=torch.bool), accuracy_pp=accuracy.double(), action=acts)
        f = Transition(step=step, before=before, after=after, size=occupied_size(after, sizes),
                       host=torch.full((4,), 500., dtype=D), epoch=torch.full((4,), t + 1., dtype=D),
                       last=torch.full((4,), t == 59))
        r = compute_reward(config, f, state)
        for i in range(4):
            mine = {k: getattr(step, k)[i:i + 1] for k in ("active", "accuracy_pp", "rolled_back")}
            one = Transition(step._replace(**mine), *(x[i:i + 1] for x in f[1:]))
            alone = compute_reward(config, one, {k: v[i:i + 1] for k, v in state.items()})
            assert abs(float(alone.total) - float(r.total[i])) < 1e-12
        state = r.state
        seen.append(choice_of(acts, "op"))
    counts = model.parameter_counts()
    torch.testing.assert_close(occupied_size(after, sizes).sum(-1), (counts.seed + counts.fossil).double())
    assert len(torch.stack(seen).unique()) == len(OPS)


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="gamma"): RewardConfig(gamma=0)
    with pytest.raises(ValueError, match="penalty"): RewardConfig(penalty=-1.)
    with pytest.raises(ValueError, match="a new name"): reward_term(TERMS["price"])


@pytest.fixture
def own_preset():
    "A reward that pays a falling loss: one term, one row, and a memory of its own."
    def loss_fall(i):
        "how far the held-out loss fell"
        return i.state["loss"] - i.transition.step.loss.clamp(max=5.)
    reward_term(loss_fall)
    PRESETS["loss"] = RewardPreset(dict(loss_fall=2.), lambda table: dict(loss=torch.full((len(table),), 2.3).double()),
                                   lambda i: dict(loss=i.transition.step.loss.clamp(max=5.)))
    yield "loss"
    del PRESETS["loss"], TERMS["loss_fall"]


def test_a_preset_of_ones_own_remembers_what_it_likes(own_preset):
    out = play(RewardConfig(own_preset), [([SeedState()], dict(loss=x)) for x in (2., 1., 1.5)])
    assert [round(float(r.total), 6) for r in out] == [.6, 2., -1.]
    assert explain_reward(out[1]).lines == (("loss_fall", 2., "how far the held-out loss fell"),)


def test_an_environment_pays_by_a_preset_of_ones_own_and_saves_its_memory(own_preset):
    from test_envs import make, roll
    a, b = make(2, reward=own_preset), make(2, reward=own_preset)
    roll(a, 2)
    b.reset(seed=9)
    b.load_state_dict(a.state_dict())
    for x, y in zip(roll(a, 2, reset=False, first=2), roll(b, 2, reset=False, first=2)):
        assert (x[1] == y[1]).all()
    assert set(a.last_result.terms) == {"loss_fall", "rollback"}


@pytest.mark.parametrize("paid, said", [(lambda n: torch.zeros(1, n + 1), r"\(1, 2\)"), (lambda n: 1., "1.0"),
                                        (lambda n: torch.tensor(1.), r"\(\)")])
def test_a_term_of_ones_own_is_told_to_pay_every_lane(paid, said):
    def mine(i):
        "whatever the case says"
        return paid(len(i.transition.host))
    reward_term(mine)
    outcome = PRESETS["outcome"]
    PRESETS["mine"] = outcome._replace(weights=dict(accuracy_rise=1., mine=1.))
    PRESETS["unknown"] = outcome._replace(weights=dict(accuracy_rse=1.))
    try:
        with pytest.raises(ValueError, match=rf"the term mine pays={said}, expected a tensor of shape \(1,\)"):
            play(RewardConfig("mine"), [([SeedState()], dict(loss=2.))])
        with pytest.raises(ValueError, match=r"terms of unknown=\['accuracy_rse'\], expected some of accuracy_rise"):
            RewardConfig("unknown")
    finally: del PRESETS["mine"], PRESETS["unknown"], TERMS["mine"]
