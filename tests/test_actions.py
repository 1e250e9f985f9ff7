"The action space against the model: what the masks offer is done, what they do not offer is refused for a reason."
import dataclasses

import pytest
import torch
from hypothesis import given, settings, strategies as st

from esper_nb.control.actions import (HEADS, MIN_PRUNE_AGE, OPERATIONS, OPS, Choice, GrowthActions, SlotView, choice_of,
                                      draw_actions, in_stage, read_slots)
from esper_nb.grow.hosts import CNNConfig, CNNHost
from esper_nb.grow.models import GrowingModel
from esper_nb.grow.lifecycle import (
    COOLING, LIVE, Gates, Rules, SeedState, Stage, check_gate, decode_seed, encode_seed, next_stage)
from esper_nb.learn.distributions import MaskedHeads, choose

SHORT = Rules(gates=Gates(training_epochs=2), embargo=1)
STRICT = Rules(auto=("G1", "G3"), gates=Gates(strict=True, training_epochs=1, blending_epochs=2))


def world(lanes=6, rules=SHORT, **kw):
    host = CNNHost(CNNConfig(in_channels=1, size=8, base=4, blocks=2), lanes=lanes)
    model = GrowingModel(host, {"r0c0": ["norm", "conv_small"], "r0c1": ["norm", "depthwise"]}, rules=rules)
    return model, GrowthActions(model, **kw)


def epoch(model, g):
    model.tick()
    model.record_accuracy(100 * torch.rand(model.lanes, generator=g))
    for k in model.names:
        model.record_contribution(k, torch.randn(model.lanes, generator=g))
        norm, health, ratio = (torch.rand(model.lanes, generator=g) for _ in range(3))
        model.record_gradients(k, norm, .5 + health / 2, ratio=ratio)


@pytest.mark.parametrize("rules,bound", [(SHORT, 0), (STRICT, 1)])
def test_no_masked_draw_is_refused(rules, bound):
    model, space = world(rules=rules, max_seeds=bound)
    g, done = torch.Generator().manual_seed(0), torch.zeros(len(OPS), dtype=torch.long)
    for t in range(100):
        if t % 50 == 0: model.reset(range(model.lanes), t)
        mask = space.mask(model)
        acts = draw_actions(space, mask, g)
        for i, a in enumerate(acts):
            result = space.apply(model, i, a, mask[i])
            assert result.ok, result
            done[choice_of(a, "op")] += 1
        epoch(model, g)
        table = read_slots(model)
        assert (in_stage(table, Stage.GERMINATED, Stage.TRAINING).sum(-1) <= 1).all()
        if bound: assert (in_stage(table, *LIVE, Stage.FOSSILIZED).sum(-1) <= bound).all()
        assert not model.status().problems
    assert (done[[0, 1, 3]] > 0).all()


@pytest.mark.slow
def test_a_quarter_of_a_million_draws_are_legal_by_every_account():
    model, space = world(lanes=16)
    g = torch.Generator().manual_seed(1)
    for t in range(40):
        mask = space.mask(model)
        many = mask.expand(400, *mask.shape)
        acts = draw_actions(space, many, g)
        assert space.legal(many, acts).gather(-1, acts[..., None]).all() # 256,000 draws
        used = space.relevant(acts)
        assert (space.available(many).gather(-1, acts[..., None]).squeeze(-1) | ~used).all()
        ops = space.facts(many)[0]
        assert ops[torch.arange(400)[:, None], torch.arange(16), choice_of(acts, "op"), choice_of(acts, "slot")].all()
        assert (torch.where(space.relevant(acts), acts, space.placeholder) == acts).all() # a legal draw is canonical
        for i, a in enumerate(acts[0]): assert space.apply(model, i, a, mask[i]).ok
        epoch(model, g)


def test_draws_without_masks_are_refused_with_a_reason_and_change_nothing():
    model, space = world()
    g, refused = torch.Generator().manual_seed(2), 0
    for t in range(30):
        acts = torch.stack([torch.randint(s, (6 * model.lanes,), generator=g) for s in space.sizes], -1)
        for j, a in enumerate(acts): # 1,080 in all
            i, before, mask = j % model.lanes, read_slots(model), space.mask(model)
            result = space.apply(model, i, a, mask[i])
            chosen = space.legal(mask[i], a).gather(-1, a[:, None]).squeeze(-1)
            legal = bool(chosen[space.relevant(a)].all())
            assert result.ok == legal
            if not result.ok:
                refused += 1
                assert result.message and torch.equal(read_slots(model), before)
        epoch(model, g)
    assert refused > 500


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.booleans())
def test_gates_for_all_lanes_equal_the_gate_of_one(seed, strict):
    g = torch.Generator().manual_seed(seed)
    def pick(*v): return v[int(torch.randint(len(v), (), generator=g))]
    stage = pick(Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING)
    s = SeedState(stage=stage, blueprint=0, germinations=1, epochs=pick(0, 1, 9, 10, 11),
                  health=pick(None, .69, .7, .75, 1.), exploding=pick(None, 0., .1),
                  accuracy=pick(None, 50.5, 50.), accuracy_stage=pick(None, 50., 49.9),
                  gradient_ratio=pick(None, .1, .05, .2), target=pick(.5, 1.), alpha=pick(.5, 1.),
                  contribution=pick(None, -1., .99, 1., 2.))
    table, rules = torch.tensor([[encode_seed(s)]]).double(), Rules(gates=Gates(strict=strict))
    s = decode_seed(torch.tensor(encode_seed(s)).tolist()) # as the table holds it
    to, op = (Stage.FOSSILIZED, "fossilize") if stage == Stage.HOLDING else (next_stage(stage), "advance")
    assert bool(OPERATIONS[op].legal(SlotView(table, [rules]))[0, 0]) == check_gate(s, to, rules.gates).passed


def test_rules_beyond_the_slots():
    model, space = world(lanes=1)
    assert space.apply(model, 0, space.encode(Choice("germinate", "r0c0", "norm"))).ok
    second = space.apply(model, 0, space.encode(Choice("germinate", "r0c1", "norm")))
    assert not second.ok and "one immature seed" in second.message
    for age in range(MIN_PRUNE_AGE):
        young = space.apply(model, 0, space.encode(Choice("prune", "r0c0", speed=0)))
        assert not young.ok and f"{age} epochs old" in young.message
        model.tick()
    assert space.apply(model, 0, space.encode(Choice("prune", "r0c0", speed=0))).ok
    assert model.slot("r0c0").state(0).stage in COOLING
    cool = space.apply(model, 0, space.encode(Choice("germinate", "r0c1", "norm")))
    assert not cool.ok and "r0c0 is PRUNED" in cool.message
    wrong = space.encode(Choice("germinate", "r0c1", "norm"))
    wrong[HEADS.index("blueprint")] = space.blueprints.index("conv_small") # not offered in r0c1
    assert not space.apply(model, 0, wrong).ok


def test_bound_on_seeds_counts_fossils():
    model, space = world(lanes=1, max_seeds=1)
    slot = model.slot("r0c0")
    slot.table[0] = torch.tensor(encode_seed(SeedState(stage=Stage.FOSSILIZED, blueprint=0, germinations=1, alpha=1.)))
    done = space.apply(model, 0, space.encode(Choice("germinate", "r0c1", "norm")))
    assert not done.ok and "1 seeds is the bound" in done.message
    unbound = GrowthActions(model)
    assert unbound.facts(unbound.mask(model))[0][0, OPS.index("germinate"), 1]


def test_unused_heads_cost_nothing_and_masks_are_never_empty():
    model, space = world()
    g, mask = torch.Generator().manual_seed(3), space.mask(model)
    logits = torch.randn(model.lanes, space.count, space.widest, generator=g)
    noise = torch.empty(logits.shape).exponential_(generator=g)
    action, logp = choose(space, logits, mask, noise)
    used = space.relevant(action)
    assert (logp[~used] == 0).all() and logp.isfinite().all()
    every = torch.stack(torch.meshgrid(*(torch.arange(s) for s in (len(OPS), 2)), indexing="ij"), -1).flatten(0, 1)
    for op, at in every.tolist():
        a = space.placeholder.clone()
        a[HEADS.index("op")], a[HEADS.index("slot")] = op, at
        assert space.legal(mask, a.expand(model.lanes, -1)).any(-1).all()
    flat = torch.split(mask[:, :space.flat], space.sizes, -1)
    assert all(f.any(-1).all() for f in flat)
    MaskedHeads(logits, space.legal(mask, action)) # validates


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_codes_round_trip(data):
    model, space = world(lanes=1)
    a = torch.tensor([data.draw(st.integers(0, s - 1)) for s in space.sizes])
    assert torch.equal(space.encode(space.decode(a)), torch.where(space.relevant(a), a, space.placeholder))
    OPERATIONS[space.decode(a).op].decide(space.decode(a))
    assert space.count == len(HEADS) and dataclasses.is_dataclass(Rules)


def test_lanes_do_not_see_each_other():
    model, space = world()
    model.germinate("r0c0", "norm", lanes=[2])
    mask = space.mask(model)
    alone = model.lane(2)
    assert torch.equal(GrowthActions(alone).mask(alone)[0], mask[2]) and not torch.equal(mask[2], mask[0])
