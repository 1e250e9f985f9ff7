"Rewards on random lives of seeds: bounded, adding up, telescoping, and no cheat pays."
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from esper_nb.control.actions import OPS, GrowthActions, apply_action, draw_actions, in_stage, read_slots
from esper_nb.grow.hosts import CNNConfig, CNNHost
from esper_nb.grow.models import GrowingModel
from esper_nb.control.rewards import (PRESETS, TERMS, Facts, Ledger, RewardConfig, compute_reward, explain_reward, new_ledger, occupied_size,
                              restart, seed_sizes)
from esper_nb.grow.seeds import Gates, Rules, SeedState, encode_seed
from esper_nb.grow.stages import Stage

OP = {k: i for i, k in enumerate(OPS)}
D = torch.float64
GAMMA = .995


def rows(*states): return torch.tensor([[encode_seed(s) for s in states]]).double()


def facts(before, after, op="wait", slot=0, accuracy=50., loss=1., gain=math.nan, epoch=20., last=False, terminated=False, size=100.):
    before, after = rows(*before), rows(*after)
    one = lambda v: torch.tensor([v], dtype=D)
    there = in_stage(after, Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)
    return Facts(torch.tensor([OP[op]]), torch.tensor([slot]), before, after, size * there.double(), one(1000.), one(accuracy), one(loss), one(gain), one(epoch),
                 torch.tensor([last]), torch.tensor([terminated]))


def seed(stage, c=None, p=None, epochs=1, age=8, **kw):
    alpha = 1. if stage in (Stage.HOLDING, Stage.FOSSILIZED) else .5 if stage == Stage.BLENDING else 0.
    return SeedState(stage=stage, blueprint=0, births=1, alpha=alpha, epochs=epochs, age=age, contribution=c, accuracy=None if p is None else 50. + p, accuracy_born=None if p is None else 50., **kw)


def play(preset, steps, **kw): # steps: (states after, op, further facts)
    config, ledger, before, out = RewardConfig(preset, **kw), new_ledger(1, len(steps[0][0])), [SeedState()] * len(steps[0][0]), []
    for states, op, more in steps:
        out.append(compute_reward(config, facts(before, states, op, **more), ledger))
        ledger, before = out[-1].ledger, states
    return out


def summed(rewards, without=(), gamma=1.): return sum(gamma**t * sum(float(v) for k, v in r.terms.items() if k not in without) for t, r in enumerate(rewards))


worth = st.one_of(st.none(), st.floats(-100, 100))
stages = st.sampled_from([Stage.DORMANT, Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED, Stage.PRUNED, Stage.EMBARGOED])


@st.composite
def a_seed(draw):
    stage = draw(stages)
    if stage == Stage.DORMANT: return SeedState()
    return seed(stage, draw(worth), draw(st.one_of(st.none(), st.floats(-50, 50))), draw(st.integers(0, 150)), draw(st.integers(0, 150)), interaction=draw(worth))


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(sorted(PRESETS)), st.lists(a_seed(), min_size=3, max_size=3), st.lists(a_seed(), min_size=3, max_size=3), st.sampled_from(OPS), st.integers(0, 2),
       st.floats(0, 100), st.one_of(st.floats(0, 1e30), st.sampled_from([math.inf, math.nan])), st.one_of(st.just(math.nan), st.floats(-100, 100)), st.integers(1, 150), st.booleans(),
       st.floats(0, 100), st.floats(0, 150), st.floats(0, 24), st.floats(0, 1e9))
def test_finite_bounded_and_the_sum_of_its_terms(preset, before, after, op, slot, accuracy, loss, gain, epoch, last, credit, held, phi, size):
    f = facts(before, after, op, slot, accuracy, loss, gain, float(epoch), last, size=size)
    full = lambda v: torch.full((1, 3), v, dtype=D)
    ledger = Ledger(torch.tensor([phi], dtype=D), full(credit), full(held), full(.5), torch.tensor([loss], dtype=D), full(math.nan))
    r = compute_reward(RewardConfig(preset, gamma=GAMMA), f, ledger)
    assert r.total.isfinite().all() and abs(float(r.total)) < 3 * 210 + 100
    assert abs(sum(float(v) for v in r.terms.values()) - float(r.total)) < 1e-9
    assert all(x.isfinite().all() for x in (r.ledger.potential, r.ledger.credit, r.ledger.held, r.ledger.alpha)) and (r.ledger.credit >= 0).all()
    assert abs(explain_reward(r).total - sum(v for _, v, _ in explain_reward(r).lines)) < 1e-9
    if not any("loss" in t for t in PRESETS[preset]): assert compute_reward(RewardConfig(preset), f._replace(loss=f.loss + 1), ledger).total == compute_reward(RewardConfig(preset), f, ledger).total


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(a_seed(), min_size=2, max_size=2), min_size=1, max_size=12), st.floats(.5, 1.), st.booleans())
def test_shaping_telescopes_over_all_slots(lives, gamma, terminated):
    steps = [(states, "wait", dict(terminated=terminated and t == len(lives) - 1)) for t, states in enumerate(lives)]
    out = play("simple", steps, gamma=gamma)
    got = sum(gamma**t * float(r.terms["shaping"]) for t, r in enumerate(out))
    from esper_nb.control.rewards import potential
    end = 0. if terminated else float(potential(rows(*lives[-1])))
    assert abs(got - .3 * gamma**len(lives) * end) < 1e-9


@st.composite
def a_circle(draw):
    "A seed from an empty slot back to an empty slot, with whatever worth on the way."
    step = lambda: (draw(worth), draw(st.one_of(st.none(), st.floats(-50, 50))))
    more = lambda: dict(gain=draw(st.one_of(st.just(math.nan), st.floats(-100, 100))), epoch=float(draw(st.integers(0, 100))))
    out = [([seed(Stage.GERMINATED)], "germinate", more()), ([seed(Stage.TRAINING)], "advance", more())]
    for _ in range(draw(st.integers(0, 6))): out.append(([seed(draw(st.sampled_from([Stage.BLENDING, Stage.HOLDING])), *step(), interaction=draw(worth))], draw(st.sampled_from(["wait", "set_alpha", "advance"])), more()))
    last = out[-1][0][0]
    by = draw(st.sampled_from(["prune", "wait"])) # "wait": taken away
    return [*out, ([last._replace(stage=Stage.PRUNED, alpha=0., epochs=0)], by, more()), ([SeedState()], "wait", more())]


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(["shaped", "escrow", "simple"]), st.lists(a_circle(), min_size=1, max_size=3))
def test_growing_and_pruning_in_a_circle_never_pays(preset, circles):
    out = play(preset, [s for c in circles for s in c], gamma=GAMMA)
    assert summed(out) < 0 and summed(out, gamma=GAMMA) < 0
    trial = [r.terms.get("attribution", 0.) + r.terms.get("refund", 0.) for r in out]
    assert sum(trial) <= 1e-9 and sum(GAMMA**t * x for t, x in enumerate(trial)) <= 1e-9 # the interest
    assert float(out[-1].ledger.credit.sum()) == 0 and float(out[-1].ledger.potential) == 0


def test_a_faded_seed_and_one_the_governor_took_pay_back_too():
    good = [([seed(Stage.HOLDING, 5., 5.)], "wait", dict(gain=5.))] * 4
    for frozen in (False, True):
        out = play("shaped", [*good[:-1], ([good[0][0][0]._replace(frozen=frozen)], "wait", dict(gain=5.)), ([seed(Stage.PRUNED, 5., 5.)._replace(alpha=0.)], "wait", {})])
        assert float(out[-1].terms["refund"]) < -19 and float(out[-1].terms["lost"]) == pytest.approx(0 if frozen else -.2)


def test_ransom_is_not_paid():
    for p in (-5., 0.):
        out = play("shaped", [([seed(Stage.HOLDING, 20., p)], "wait", dict(gain=20.))] * 6 + [([seed(Stage.FOSSILIZED, 20., p)], "fossilize", dict(gain=20.))])
        assert all(float(r.terms["attribution"]) == 0 for r in out) and float(out[-1].terms["fossil"]) < 0
        out = play("escrow", [([seed(Stage.HOLDING, 20., p)], "wait", dict(gain=20.))] * 6)
        assert all(float(r.terms["attribution"]) == 0 for r in out)
    leaning = play("shaped", [([seed(Stage.HOLDING, 20., 5.)], "wait", dict(gain=.5))] * 2)
    assert float(leaning[1].terms["dependence"]) < 0


def test_turning_alpha_down_and_up_does_not_stop_the_clock():
    hold, blend = seed(Stage.HOLDING, 2., 2.), seed(Stage.BLENDING, 2., 2., epochs=0)
    stay = play("shaped", [([hold], "wait", dict(gain=2.))] * 12)
    turn = play("shaped", [([hold if t % 2 == 0 else blend], "set_alpha", dict(gain=2.)) for t in range(12)])
    assert sum(float(r.terms["waiting"]) for r in turn) == pytest.approx(sum(float(r.terms["waiting"]) for r in stay))
    assert summed(turn, without=("rent",)) < summed(stay, without=("rent",))


def test_the_hosts_own_progress_is_nobodys():
    for c in (None, 0., .1):
        out = play("shaped", [([seed(Stage.BLENDING, c, float(p))], "wait", dict(gain=0. if c is None else c, accuracy=50. + p)) for p in range(1, 20)])
        assert all(float(r.terms["attribution"]) <= (c or 0.) + 1e-6 for r in out)


@settings(deadline=None, max_examples=100)
@given(worth, st.one_of(st.none(), st.floats(-50, 50)), st.one_of(st.just(math.nan), st.floats(-100, 100)), st.integers(0, 8))
def test_a_fossil_without_worth_costs(c, p, gain, held):
    out = play("shaped", [([seed(Stage.HOLDING, c, p)], "wait", dict(gain=gain))] * held + [([seed(Stage.FOSSILIZED, c, p)], "fossilize", dict(gain=gain))])
    paid = float(out[-1].terms["fossil"])
    if held and c is not None and c >= 1 and (p or 0) >= 1e-3 and gain >= 0: assert paid > 0
    elif not 0 < (p or 0) < 1e-3: assert paid <= 0
    refused = compute_reward(RewardConfig(), facts([seed(Stage.TRAINING)], [seed(Stage.TRAINING)], "wait"), new_ledger(1, 1))
    assert float(refused.terms["fossil"]) == 0 and float(refused.terms["verbs"]) == 0 # a refused fossilize is a wait


def test_parking_a_seed_is_bounded_and_escrow_takes_it_back():
    park = [([seed(Stage.HOLDING, 30., 30.)], "wait", dict(gain=30., last=t == 99)) for t in range(100)]
    assert sum(float(r.terms["attribution"]) for r in play("shaped", park)) <= 50 + 1e-6
    out = play("escrow", park)
    assert sum(float(r.terms["attribution"] + r.terms["charge_back"]) for r in out) <= 1e-6


@settings(deadline=None, max_examples=100)
@given(st.lists(st.one_of(st.floats(0, 20), st.just(math.nan), st.just(math.inf)), min_size=2, max_size=10), st.floats(0, 4), st.floats(.01, 1))
def test_a_lower_loss_pays_and_circles_do_not(losses, start, less):
    empty = [SeedState()]
    pay = lambda *ls: [float(r.terms["loss_fall"]) for r in play("loss", [(empty, "wait", dict(loss=x, last=i == len(ls) - 1)) for i, x in enumerate(ls)])]
    assert abs(sum(pay(losses[0], *losses, losses[0]))) < 1e-9
    total = lambda x: float(play("loss", [(empty, "wait", dict(loss=start)), (empty, "wait", dict(loss=x, last=True))])[-1].total)
    assert total(max(0., start - less)) > total(start + less) if start - less < 2 * 2.302585 and start > .02 else True
    assert total(math.nan) <= total(1e9) and pay(2., 1.)[1] > 0 > pay(1., 2.)[1]


def test_real_lives_of_many_lanes_as_of_one():
    def world(lanes):
        host = CNNHost(CNNConfig(in_channels=1, size=8, base=4, blocks=2), lanes=lanes)
        return GrowingModel(host, ["r0c0", "r0c1"], blueprints=["norm", "conv_small"], rules=Rules(gates=Gates(training_epochs=2), embargo=1))
    model = world(4)
    space, g = GrowthActions(model), torch.Generator().manual_seed(0)
    sizes, seen = seed_sizes(model, space), []
    ledgers = {k: new_ledger(4, 2) for k in PRESETS}
    discounted = torch.zeros(4, dtype=D)
    for t in range(80):
        before, mask = read_slots(model), space.mask(model)
        acts = draw_actions(space, mask, g)
        for i, a in enumerate(acts): assert apply_action(space, model, i, a, mask[i]).ok
        accuracy, c = 100 * torch.rand(4, generator=g), torch.randn(2, 4, generator=g)
        model.record_accuracy(accuracy)
        for k, v in zip(model.names, c):
            model.record_contribution(k, v)
            model.record_gradients(k, [1.] * 4, [1.] * 4)
        model.tick()
        after = read_slots(model)
        f = Facts(acts[:, 7], acts[:, 0], before, after, occupied_size(after, sizes), torch.full((4,), 500., dtype=D), accuracy.double(), torch.rand(4, generator=g).double(),
                  c.sum(0).double(), torch.full((4,), t + 1., dtype=D), torch.full((4,), t == 79), torch.zeros(4, dtype=torch.bool))
        for k in PRESETS:
            r = compute_reward(RewardConfig(k), f, ledgers[k])
            for i in range(4):
                alone = compute_reward(RewardConfig(k), Facts(*(x[i:i + 1] for x in f)), Ledger(*(x[i:i + 1] for x in ledgers[k])))
                assert abs(float(alone.total) - float(r.total[i])) < 1e-12
            if k == "shaped": discounted += .995**t * r.terms["shaping"]
            ledgers[k] = r.ledger
        seen.append(acts[:, 7])
    torch.testing.assert_close(discounted, .3 * .995**80 * ledgers["shaped"].potential, atol=1e-9, rtol=0)
    counts = model.parameter_counts()
    torch.testing.assert_close(occupied_size(read_slots(model), sizes).sum(-1), (counts.seed + counts.fossil).double())
    assert len(torch.stack(seen).unique()) == len(OPS)
    fresh = restart(ledgers["shaped"], torch.tensor([True, False, False, False]))
    assert float(fresh.potential[0]) == 0 and torch.equal(fresh.credit[1:], ledgers["shaped"].credit[1:])


def test_presets_name_terms_and_bad_settings_are_refused():
    assert {t for p in PRESETS.values() for t in p} == set(TERMS) and all(f.__doc__ for f in TERMS.values())
    with pytest.raises(ValueError, match="preset='shape', expected one of"): RewardConfig("shape")
    with pytest.raises(ValueError, match="gamma"): RewardConfig(gamma=0)
