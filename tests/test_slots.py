"Slots in every mixture of lanes, stages, blueprints and operators; the table; the verbs."
import copy
import io
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from esper_nb.core import by_lane, lane_state, take_lanes, unfold
from esper_nb.grow import (
    COLUMNS, Blend, Curve, Cut, Gates, Ramp, RampMode, Reason, Rules, SeedState, Slot, Stage, decode_seed, encode_seed,
    list_blueprints, progress)

torch.set_num_threads(1)
STATES = [None, "germinated", "training", (Blend.ADD, .4), (Blend.ADD, 1.), (Blend.MULTIPLY, .4), (Blend.GATE, .4),
          "fossil", "cooling"]
FAMILY = st.sampled_from(["cnn", "transformer"])

def features(family, n, c=8, seed=0):
    shape = (6, n * c, 4, 4) if family == "cnn" else (6, 5, n * c)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.contiguous(memory_format=torch.channels_last) if family == "cnn" else x

def part(x, n, lanes): return unfold(x, n, 1 if x.ndim == 4 else -1).movedim(1 if x.ndim == 4 else -2, 0)[lanes]

def put_in(slot, lane, blueprint, state):
    "Bring one lane's seed to a state, by verbs only."
    if state is None: return
    blend, goal = state if isinstance(state, tuple) else (Blend.ADD, 1.)
    slot.germinate(blueprint, lane, blend, tempo=0, goal=goal)
    if state == "germinated": return
    if state == "cooling": slot.prune(lane); return
    slot.advance(lane)
    if state == "training": return
    slot.advance(lane, force=True)
    if state == "fossil": slot.advance(lane); slot.fossilize(lane, force=True)

def made(family, plan, seed=0, c=8, noise=.2, **kw):
    "A slot whose lanes follow `plan`, a list of (blueprint, state); all weights are perturbed: nothing is an identity."
    names = [k for k in list_blueprints(family=family) if k != "noop"]
    slot = Slot("r0c0", family, c, len(plan), names, seed=seed, **kw)
    for i, (b, state) in enumerate(plan): put_in(slot, i, names[b % len(names)], state)
    for i in range(len(plan)):
        g = torch.Generator().manual_seed(100 + i)
        for p in slot.parameters():
            row = by_lane(p.data, len(plan))[i]
            row += noise * torch.randn(row.shape, generator=g)
    return slot

def run(slot, x, training=True):
    slot.train(training).zero_grad()
    h = x.clone().requires_grad_()
    y = slot(h)
    y.backward(torch.cos(x))
    return y.detach(), h.grad, {k: None if p.grad is None else p.grad.clone() for k, p in slot.named_parameters()}


mixtures = st.lists(st.tuples(st.integers(0, 6), st.sampled_from(STATES)), min_size=1, max_size=6)

@given(FAMILY, mixtures, st.booleans())
@settings(deadline=None, max_examples=25)
def test_a_mixture_is_its_lanes_one_by_one(family, plan, training):
    n, slot = len(plan), made(family, plan)
    x = features(family, n)
    y, gx, gw = run(slot, x, training)
    for i in range(n):
        one = take_lanes(slot, [i])
        yi, gxi, gwi = run(one, part(x, n, i), training)
        torch.testing.assert_close(part(y, n, i), yi, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(part(gx, n, i), gxi, rtol=1e-4, atol=1e-5)
        for k, g in gw.items():
            shape = by_lane(dict(slot.named_parameters())[k], n)[i].shape
            mine = torch.zeros(shape) if g is None else by_lane(g, n)[i]
            ref = torch.zeros(shape) if gwi[k] is None else gwi[k].view(shape)
            torch.testing.assert_close(mine, ref, rtol=1e-3, atol=1e-4)


@given(FAMILY, mixtures, st.booleans())
@settings(deadline=None, max_examples=20)
def test_lanes_that_only_pass_are_untouched(family, plan, training):
    n, slot = len(plan), made(family, plan)
    x = features(family, n)
    y, gx, _ = run(slot, x, training)
    quiet = [i for i, (_, s) in enumerate(plan) if s in (None, "germinated", "training", "cooling")]
    assert torch.equal(part(y, n, quiet), part(x, n, quiet))
    assert torch.equal(part(gx, n, quiet), part(torch.cos(x), n, quiet))
    if len(quiet) == n and (not training or all(s != "training" for _, s in plan)): assert slot(x) is x


@given(FAMILY, mixtures, st.integers(0, 6))
@settings(deadline=None, max_examples=20)
def test_alpha_zero_is_the_host_exactly(family, plan, b):
    "Blended by any operator, at alpha 0, in training: output and the host's gradient are what they are without a slot."
    n = len(plan)
    slot = made(family, [(k, s if isinstance(s, tuple) else (Blend.ADD, .5)) for k, s in plan])
    for i in range(n): slot.change(i, lambda s: s._replace(alpha=0.))
    x = features(family, n)
    y, gx, _ = run(slot, x)
    assert torch.equal(y, x)
    if all(not isinstance(s, tuple) or s[0] != Blend.GATE for _, s in plan): assert torch.equal(gx, torch.cos(x))
    slot.eval(); assert slot(x) is x and slot.roles() == ()


@given(st.permutations(range(6)), st.lists(st.integers(1, 5), max_size=3), st.booleans())
@settings(deadline=None)
def test_cut_is_a_permutation(order, at, image):
    cuts = sorted({0, 6, *at})
    groups = [tuple(order[a:b]) for a, b in zip(cuts, cuts[1:])]
    cut, x = Cut(groups), (torch.randn(2, 12, 3, 3) if image else torch.randn(2, 3, 12)).requires_grad_()
    pieces = cut.split(x)
    for g, p in zip(groups, pieces): assert torch.equal(part(p, len(g), list(range(len(g)))), part(x, 6, list(g)))
    y = cut.join(pieces)
    assert torch.equal(y, x)
    y.backward(torch.sin(x.detach())); assert torch.equal(x.grad, torch.sin(x.detach()))


def test_a_bank_nobody_uses_is_not_called():
    slot = made("cnn", [(0, "training"), (0, None)])
    used = slot.blueprints[0]
    for k, b in slot.banks.items():
        if k != used: b.register_forward_pre_hook(lambda *a: pytest.fail("called"))
    _, _, gw = run(slot, features("cnn", 2))
    assert {k.split(".")[1] for k, g in gw.items() if g is not None} == {used}
    assert all(g is None or not by_lane(g, 2)[1].any() for g in gw.values())


def test_autocast_is_exact_at_alpha_zero_and_keeps_the_type():
    slot = made("cnn", [(5, "training"), (5, (Blend.ADD, .4)), (3, (Blend.GATE, .4)), (2, (Blend.MULTIPLY, .4))])
    x = features("cnn", 4)
    for h in (x, x.bfloat16()):
        with torch.autocast("cpu", torch.bfloat16): y = slot(h)
        assert y.dtype == h.dtype and torch.equal(part(y, 4, 0), part(h, 4, 0))


def test_isolated_seeds_send_no_gradient_through_their_input():
    slot, x = made("cnn", [(5, (Blend.ADD, .4))], rules=Rules(isolate_blending=True)), features("cnn", 1)
    assert slot.roles()[0].mode == "isolated"
    _, gx, gw = run(slot, x)
    torch.testing.assert_close(gx, .6 * torch.cos(x))
    assert any(g is not None and g.any() for g in gw.values())


# ---- table, state dict, copies


def test_moving_and_casting_leave_the_table():
    slot = made("cnn", [(5, "fossil"), (5, (Blend.ADD, .4))])
    table = slot.table.clone()
    slot.to(torch.bfloat16)
    assert slot.table.dtype == torch.float32 and torch.equal(slot.table, table)
    assert slot.blend_gate.fc1.weight.dtype == torch.bfloat16
    assert slot(features("cnn", 2).bfloat16()).dtype == torch.bfloat16
    meta = Slot("r0c0", "cnn", 8, 2).to("meta"); assert meta.table.device.type == "cpu"


def test_copies_do_not_share_caches_or_rows():
    slot, x = made("cnn", [(5, "fossil"), (3, (Blend.ADD, .4)), (5, None)]), features("cnn", 3)
    y = slot(x)
    buffer = io.BytesIO(); torch.save(slot, buffer); buffer.seek(0)
    for other in (copy.deepcopy(slot), pickle.loads(pickle.dumps(slot)), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(x), y)
        for p in other.parameters(): p.data.zero_()
        other.prune(1)
    assert torch.equal(slot(x), y)


def test_germination_belongs_to_the_lane_not_to_its_company():
    a, b = Slot("r0c0", "cnn", 8, 4, seed=3), Slot("r0c0", "cnn", 8, 2, ["conv_light", "norm"], seed=3)
    state = torch.get_rng_state()
    a.germinate("conv_light", [1, 3], Blend.GATE); b.germinate("conv_light", 1, Blend.GATE)
    c = take_lanes(Slot("r0c0", "cnn", 8, 4, seed=3), [3]); c.germinate("conv_light", blend=Blend.GATE)
    assert torch.equal(torch.get_rng_state(), state)
    for bank in ("banks.conv_light.body.0.weight", "blend_gate.fc1.weight"):
        def row(s, i): return by_lane(lane_state(s)[bank], s.lanes)[i]
        assert torch.equal(row(a, 1), row(b, 1)) and torch.equal(row(a, 3), row(c, 0))
        assert not torch.equal(row(a, 1), row(a, 3))
    a.prune(1)
    for _ in range(7): a.tick()
    first = by_lane(a.banks["conv_light"].body[0].weight, 4)[1].clone()
    a.germinate("conv_light", 1)
    second = by_lane(a.banks["conv_light"].body[0].weight, 4)[1]
    assert not torch.equal(second, first), "a second seed is another one"


# ---- verbs

def test_verbs_change_all_lanes_or_none():
    slot = made("cnn", [(5, None), (5, "training"), (5, "fossil")])
    before = slot.state_dict()
    before = {k: v.clone() for k, v in before.items()}
    refused = [lambda: slot.germinate("norm"), lambda: slot.prune([1, 2]), lambda: slot.advance([1, 0]),
               lambda: slot.set_alpha(.5), lambda: slot.fossilize([1]), lambda: slot.schedule_prune(3, 2),
               lambda: slot.germinate("norm", 0, goal=0.), lambda: slot.germinate("norm", 0, steepness=0.),
               lambda: slot.advance([1, 1]), lambda: slot.prune(-1)]
    for call in refused:
        with pytest.raises((RuntimeError, ValueError)): call()
    for k, v in slot.state_dict().items(): assert torch.equal(v, before[k]), k


def test_a_scheduled_prune_freezes_fades_and_prunes_for_the_reason_given():
    slot = made("cnn", [(5, (Blend.ADD, 1.)), (5, (Blend.ADD, 1.))])
    slot.advance(0)
    slot.schedule_prune(3, 0, Curve.COSINE, reason=Reason.POLICY)
    assert slot.state(0).stage == Stage.BLENDING and slot.in_use(slot.blueprints[5]).tolist() == [False, True]
    _, gx, _ = run(slot, features("cnn", 2))
    assert part(gx, 2, 0).any(), "the host still hears through the fading seed"
    alphas = [slot.state(0).alpha]
    for _ in range(3): slot.tick(); alphas.append(slot.state(0).alpha)
    assert alphas == sorted(alphas, reverse=True) and alphas[-1] == 0
    assert slot.state(0).stage == Stage.PRUNED and slot.state(0).reason == Reason.POLICY
    names = []
    for _ in range(8): names.append(slot.state(0).stage); slot.tick()
    assert names == [Stage.PRUNED] + [Stage.EMBARGOED] * 5 + [Stage.RESETTING, Stage.DORMANT]


def test_operator_can_change_and_a_new_gate_is_fresh():
    slot = made("cnn", [(5, (Blend.ADD, .5)), (5, (Blend.ADD, .5))]); slot.take_fresh()
    before = by_lane(slot.blend_gate.fc1.weight, 2).clone()
    slot.set_alpha(.7, 1, steps=4, blend=Blend.GATE)
    after = by_lane(slot.blend_gate.fc1.weight, 2)
    assert slot.take_fresh() == {"gate": [1]}
    assert torch.equal(after[0], before[0]) and not torch.equal(after[1], before[1])
    with pytest.raises(RuntimeError, match="wait until it holds"): slot.set_alpha(.9, 1)


def test_automatic_gates():
    slot = Slot("r0c0", "cnn", 8, 2, ["norm"], rules=Rules(Gates(training_epochs=2), auto=("G1", "G2", "G3")))
    slot.germinate("norm", tempo=2)
    assert slot.state(1).stage == Stage.TRAINING, "an open gate is passed at once"
    slot.change(1, lambda s: s._replace(health=.9, exploding=0.))
    seen = [[e.after.name for i, e in slot.tick() if i == 1] for _ in range(7)]
    assert sum(seen, []) == ["BLENDING", "HOLDING"]
    assert slot.state(0).stage == Stage.TRAINING, "unmeasured gradients never pass"
    assert slot.state(1).stage == Stage.HOLDING, "nobody fossilizes by itself"


def test_fossilizing_safely():
    slot = made("cnn", [(5, (Blend.ADD, 1.)), (5, (Blend.GATE, 1.)), (5, (Blend.MULTIPLY, 1.))])
    slot.advance(force=True)
    x = features("cnn", 3); slot.eval(); y = slot(x)
    by_lane(slot.banks[slot.blueprints[5]].body[0].weight.data, 3)[1, 0] = math.nan
    sick = "lane 1: body.0.weight of the seed is not finite"
    with pytest.raises(RuntimeError, match=sick): slot.fossilize(force=True)
    assert [s.stage for s in slot.states()] == [Stage.HOLDING] * 3
    results = slot.fossilize([0, 2])
    assert not results[0].passed and slot.state(0).stage == Stage.HOLDING and "contribution" in results[0].message
    slot.fossilize([0, 2], force=True)
    now = slot(x); assert torch.equal(part(now, 3, [0, 2]), part(y, 3, [0, 2]))
    slot.change(1, lambda s: s._replace(alpha=.5)); slot.fossilize(1, safe=False, force=True)
    assert slot.state(1).stage == Stage.FOSSILIZED


# ---- ramps and records

@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 12), st.sampled_from(list(Curve)), st.floats(.1, 1e4))
@settings(deadline=None)
def test_ramps_arrive_and_never_turn_back(start, target, steps, curve, steepness):
    r = Ramp(start, target=start).retarget(target, steps, curve, steepness)
    seen = [r.alpha]
    for _ in range(steps + 2): r = r.step(); seen.append(r.alpha)
    assert seen[-1] == target and r.mode == RampMode.HOLD
    assert seen in (sorted(seen), sorted(seen, reverse=True)) and all(0 <= a <= 1 for a in seen)


@given(st.sampled_from(list(Curve)), st.floats(.1, 1e5), st.floats(0, 1), st.floats(0, 1))
def test_progress_is_monotone_from_zero_to_one(curve, k, a, b):
    a, b = sorted((a, b))
    assert progress(0, curve, k) == 0 and progress(1, curve, k) == 1
    assert 0 <= progress(a, curve, k) <= progress(b, curve, k) + 1e-12 <= 1 + 2e-12


FIELDS = dict(
    stage=st.sampled_from(list(Stage)), blueprint=st.none() | st.integers(0, 7), blend=st.sampled_from(list(Blend)),
    alpha=st.floats(0, 1, width=32), germinations=st.integers(0, 1000),
    reason=st.none() | st.sampled_from(list(Reason)),
    accuracy=st.none() | st.floats(0, 100, width=32), gradient_norm=st.none() | st.just(math.inf))

@given(st.fixed_dictionaries(FIELDS).map(lambda d: SeedState(**d)))
def test_records_are_rows(s):
    row = torch.tensor(encode_seed(s))
    assert len(row) == len(COLUMNS) and decode_seed(row.tolist()) == s


@pytest.mark.parametrize("wrong", [True, [True, False], np.array([True, False]), "1", [.6], 1.5, -1, 2, [0, 0],
                                   torch.tensor([True, False]), torch.tensor(2), torch.tensor([.4])], ids=repr)
def test_lanes_that_are_no_lane_numbers_change_nothing(wrong):
    slot = Slot("here", "cnn", 4, 2)
    with pytest.raises(ValueError, match="lanes=.*expected different lane numbers from 0 to 1, or None for all"):
        slot.germinate("norm", wrong)
    assert {s.stage for s in slot.states()} == {Stage.DORMANT}
    for right in (np.int64(1), torch.tensor([0])): slot.germinate("norm", right)
    assert {s.stage for s in slot.states()} == {Stage.GERMINATED}
