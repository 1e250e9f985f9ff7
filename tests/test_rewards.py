"Rewards on random lives of seeds: bounded, adding up, telescoping, and no cheat pays."
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from esper_nb.control.actions import OPS, GrowthActions, apply_action, choice_of, draw_actions, in_stage, read_slots
from esper_nb.control.rewards import (
    PRESETS, TERMS, Facts, Ledger, RewardConfig, compute_reward, explain_reward, new_ledger, occupied_size, potential,
    restart, seed_sizes)
from esper_nb.grow.hosts import CNNConfig, CNNHost
from esper_nb.grow.models import GrowingModel
from esper_nb.grow.lifecycle import LIVE, Gates, Rules, SeedState, Stage, encode_seed

D = torch.float64
GAMMA = .995


DEFAULTS = dict(op="wait", slot=0, accuracy=50., loss=1., gain=math.nan, epoch=20., last=False, terminated=False,
                size=100.)


def records_of(*states): return torch.tensor([[encode_seed(s) for s in states]]).double()


def facts(before, after, **told):
    "What one lane's step did, from the states of its slots before and after."
    k = DEFAULTS | told
    before, after = records_of(*before), records_of(*after)
    there = in_stage(after, *LIVE, Stage.FOSSILIZED)
    numbers = {name: torch.tensor([k[name]], dtype=D) for name in ("accuracy", "loss", "gain", "epoch")}
    flags = {name: torch.tensor([k[name]]) for name in ("last", "terminated")}
    return Facts(
        op=torch.tensor([OPS.index(k["op"])]), slot=torch.tensor([k["slot"]]), before=before, after=after,
        size=k["size"] * there.double(), host=torch.tensor([1000.], dtype=D), **numbers, **flags)


def seed(stage, c=None, p=None, epochs=1, age=8, **kw):
    alpha = 1. if stage in (Stage.HOLDING, Stage.FOSSILIZED) else .5 if stage == Stage.BLENDING else 0.
    now, born = (None, None) if p is None else (50. + p, 50.)
    return SeedState(stage=stage, blueprint=0, births=1, alpha=alpha, epochs=epochs, age=age, contribution=c,
                     accuracy=now, accuracy_born=born, **kw)


def play(preset, steps, **kw): # steps: (states after, op, further facts)
    slots, config, out = len(steps[0][0]), RewardConfig(preset, **kw), []
    ledger, before = new_ledger(1, slots), [SeedState()] * slots
    for states, op, more in steps:
        out.append(compute_reward(config, facts(before, states, op=op, **more), ledger))
        ledger, before = out[-1].ledger, states
    return out


def summed(rewards, without=(), gamma=1.):
    each = [sum(float(v) for k, v in r.terms.items() if k not in without) for r in rewards]
    return sum(gamma**t * x for t, x in enumerate(each))


def term(rewards, name): return [float(r.terms[name]) for r in rewards]


worth = st.one_of(st.none(), st.floats(-100, 100))
progress = st.one_of(st.none(), st.floats(-50, 50))
gains = st.one_of(st.just(math.nan), st.floats(-100, 100))
losses = st.one_of(st.floats(0, 1e30), st.sampled_from([math.inf, math.nan]))
stages = st.sampled_from([s for s in Stage if s not in (Stage.UNKNOWN, Stage.RESETTING)])


@st.composite
def a_seed(draw):
    stage = draw(stages)
    if stage == Stage.DORMANT: return SeedState()
    epochs, age = (draw(st.integers(0, 150)) for _ in range(2))
    return seed(stage, draw(worth), draw(progress), epochs, age, interaction=draw(worth))


three = st.lists(a_seed(), min_size=3, max_size=3)


@st.composite
def some_facts(draw):
    "A step of a lane with three slots."
    return facts(
        draw(three), draw(three), op=draw(st.sampled_from(OPS)), slot=draw(st.integers(0, 2)),
        accuracy=draw(st.floats(0, 100)), loss=draw(losses), gain=draw(gains), epoch=float(draw(st.integers(1, 150))),
        last=draw(st.booleans()), size=draw(st.floats(0, 1e9)))


@st.composite
def a_ledger(draw):
    def full(v): return torch.full((1, 3), v, dtype=D)
    return Ledger(
        potential=torch.tensor([draw(st.floats(0, 24))], dtype=D), credit=full(draw(st.floats(0, 100))),
        held=full(draw(st.floats(0, 150))), alpha=full(.5), loss=torch.tensor([draw(losses)], dtype=D),
        room=torch.tensor([draw(st.floats(0, 100))], dtype=D), recent=full(math.nan))


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(sorted(PRESETS)), some_facts(), a_ledger())
def test_finite_bounded_and_the_sum_of_its_terms(preset, f, ledger):
    r = compute_reward(RewardConfig(preset, gamma=GAMMA), f, ledger)
    assert r.total.isfinite().all() and abs(float(r.total)) < 3 * 210 + 100
    assert abs(sum(float(v) for v in r.terms.values()) - float(r.total)) < 1e-9
    kept = (r.ledger.potential, r.ledger.credit, r.ledger.held, r.ledger.alpha)
    assert all(x.isfinite().all() for x in kept) and (r.ledger.credit >= 0).all()
    slip = explain_reward(r)
    assert abs(slip.total - sum(v for _, v, _ in slip.lines)) < 1e-9
    if any("loss" in t for t in PRESETS[preset]): return
    here, there = (compute_reward(RewardConfig(preset), x, ledger) for x in (f, f._replace(loss=f.loss + 1)))
    assert here.total == there.total


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(a_seed(), min_size=2, max_size=2), min_size=1, max_size=12), st.floats(.5, 1.), st.booleans())
def test_shaping_telescopes_over_all_slots(lives, gamma, terminated):
    ends = [terminated and t == len(lives) - 1 for t in range(len(lives))]
    out = play("simple", [(states, "wait", dict(terminated=end)) for states, end in zip(lives, ends)], gamma=gamma)
    got = sum(gamma**t * x for t, x in enumerate(term(out, "shaping")))
    end = 0. if terminated else float(potential(records_of(*lives[-1])))
    assert abs(got - .3 * gamma**len(lives) * end) < 1e-9


@st.composite
def a_circle(draw):
    "A seed from an empty slot back to an empty slot, with whatever worth on the way."
    def more(): return dict(gain=draw(gains), epoch=float(draw(st.integers(0, 100))))
    out = [([seed(Stage.GERMINATED)], "germinate", more()), ([seed(Stage.TRAINING)], "advance", more())]
    for _ in range(draw(st.integers(0, 6))):
        stage = draw(st.sampled_from([Stage.BLENDING, Stage.HOLDING]))
        op = draw(st.sampled_from(["wait", "set_alpha", "advance"]))
        out.append(([seed(stage, draw(worth), draw(progress), interaction=draw(worth))], op, more()))
    last = out[-1][0][0]
    by = draw(st.sampled_from(["prune", "wait"])) # "wait": taken away
    pruned = last._replace(stage=Stage.PRUNED, alpha=0., epochs=0)
    return [*out, ([pruned], by, more()), ([SeedState()], "wait", more())]


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
        there, gone = good[0][0][0]._replace(frozen=frozen), seed(Stage.PRUNED, 5., 5.)._replace(alpha=0.)
        out = play("shaped", [*good[:-1], ([there], "wait", dict(gain=5.)), ([gone], "wait", {})])
        assert float(out[-1].terms["refund"]) < -19
        assert float(out[-1].terms["lost"]) == pytest.approx(0 if frozen else -.2)


def test_ransom_is_not_paid():
    for p in (-5., 0.):
        held = [([seed(Stage.HOLDING, 20., p)], "wait", dict(gain=20.))] * 6
        out = play("shaped", [*held, ([seed(Stage.FOSSILIZED, 20., p)], "fossilize", dict(gain=20.))])
        assert not any(term(out, "attribution")) and float(out[-1].terms["fossil"]) < 0
        assert not any(term(play("escrow", held), "attribution"))
    leaning = play("shaped", [([seed(Stage.HOLDING, 20., 5.)], "wait", dict(gain=.5))] * 2)
    assert float(leaning[1].terms["dependence"]) < 0


def test_turning_alpha_down_and_up_does_not_stop_the_clock():
    hold, blend = seed(Stage.HOLDING, 2., 2.), seed(Stage.BLENDING, 2., 2., epochs=0)
    stay = play("shaped", [([hold], "wait", dict(gain=2.))] * 12)
    turn = play("shaped", [([blend if t % 2 else hold], "set_alpha", dict(gain=2.)) for t in range(12)])
    assert sum(term(turn, "waiting")) == pytest.approx(sum(term(stay, "waiting")))
    assert summed(turn, without=("rent",)) < summed(stay, without=("rent",))


def test_the_hosts_own_progress_is_nobodys():
    for c in (None, 0., .1):
        told = [dict(gain=c or 0., accuracy=50. + p) for p in range(1, 20)]
        out = play("shaped", [([seed(Stage.BLENDING, c, k["accuracy"] - 50.)], "wait", k) for k in told])
        assert all(x <= (c or 0.) + 1e-6 for x in term(out, "attribution"))


@settings(deadline=None, max_examples=100)
@given(worth, progress, gains, st.integers(0, 8))
def test_a_fossil_without_worth_costs(c, p, gain, held):
    steps = [([seed(Stage.HOLDING, c, p)], "wait", dict(gain=gain))] * held
    out = play("shaped", [*steps, ([seed(Stage.FOSSILIZED, c, p)], "fossilize", dict(gain=gain))])
    paid = float(out[-1].terms["fossil"])
    if held and c is not None and c >= 1 and (p or 0) >= 1e-3 and gain >= 0: assert paid > 0
    elif not 0 < (p or 0) < 1e-3: assert paid <= 0
    wait = facts([seed(Stage.TRAINING)], [seed(Stage.TRAINING)], op="wait")
    refused = compute_reward(RewardConfig(), wait, new_ledger(1, 1))
    assert float(refused.terms["fossil"]) == 0 and float(refused.terms["verbs"]) == 0 # a refused fossilize is a wait


def test_parking_a_seed_is_bounded_and_escrow_takes_it_back():
    park = [([seed(Stage.HOLDING, 30., 30.)], "wait", dict(gain=30., last=t == 99)) for t in range(100)]
    assert sum(term(play("shaped", park), "attribution")) <= 50 + 1e-6
    out = play("escrow", park)
    assert sum(term(out, "attribution") + term(out, "charge_back")) <= 1e-6


@settings(deadline=None, max_examples=100)
@given(st.lists(st.one_of(st.floats(0, 20), st.just(math.nan), st.just(math.inf)), min_size=2, max_size=10),
       st.floats(0, 4), st.floats(.01, 1))
def test_a_lower_loss_pays_and_circles_do_not(way, start, less):
    def run(*losses):
        told = [dict(loss=x, last=i == len(losses) - 1) for i, x in enumerate(losses)]
        return play("loss", [([SeedState()], "wait", k) for k in told])
    def pay(*losses): return term(run(*losses), "loss_fall")
    def total(end): return float(run(start, end)[-1].total)
    assert abs(sum(pay(way[0], *way, way[0])) - pay(way[0])[0]) < 1e-9 # but for the first fall, from chance
    if start - less < 2 * 2.302585 and start > .02: assert total(max(0., start - less)) > total(start + less)
    assert total(math.nan) <= total(1e9) and pay(2., 1.)[1] > 0 > pay(1., 2.)[1]


def test_real_lives_of_many_lanes_as_of_one():
    def world(lanes):
        host = CNNHost(CNNConfig(in_channels=1, size=8, base=4, blocks=2), lanes=lanes)
        rules = Rules(gates=Gates(training_epochs=2), embargo=1)
        return GrowingModel(host, ["r0c0", "r0c1"], blueprints=["norm", "conv_small"], rules=rules)
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
        f = Facts(
            op=choice_of(acts, "op"), slot=choice_of(acts, "slot"), before=before, after=after,
            size=occupied_size(after, sizes), host=torch.full((4,), 500., dtype=D), accuracy=accuracy.double(),
            loss=torch.rand(4, generator=g).double(), gain=c.sum(0).double(), epoch=torch.full((4,), t + 1., dtype=D),
            last=torch.full((4,), t == 79), terminated=torch.zeros(4, dtype=torch.bool))
        for k in PRESETS:
            r = compute_reward(RewardConfig(k), f, ledgers[k])
            for i in range(4):
                one, ledger = Facts(*(x[i:i + 1] for x in f)), Ledger(*(x[i:i + 1] for x in ledgers[k]))
                alone = compute_reward(RewardConfig(k), one, ledger)
                assert abs(float(alone.total) - float(r.total[i])) < 1e-12
            if k == "shaped": discounted += .995**t * r.terms["shaping"]
            ledgers[k] = r.ledger
        seen.append(choice_of(acts, "op"))
    torch.testing.assert_close(discounted, .3 * .995**80 * ledgers["shaped"].potential, atol=1e-9, rtol=0)
    counts = model.parameter_counts()
    occupied = occupied_size(read_slots(model), sizes).sum(-1)
    torch.testing.assert_close(occupied, (counts.seed + counts.fossil).double())
    assert len(torch.stack(seen).unique()) == len(OPS)
    fresh = restart(ledgers["shaped"], torch.tensor([True, False, False, False]))
    assert float(fresh.potential[0]) == 0 and torch.equal(fresh.credit[1:], ledgers["shaped"].credit[1:])


def test_presets_name_terms_and_bad_settings_are_refused():
    assert {t for p in PRESETS.values() for t in p} == set(TERMS) and all(f.__doc__ for f in TERMS.values())
    with pytest.raises(ValueError, match="preset='shape', expected one of"): RewardConfig("shape")
    with pytest.raises(ValueError, match="gamma"): RewardConfig(gamma=0)
