"Contributions of seeds: the table against separate evaluations, an unmoved model, exact values, nothing invented."
import itertools
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from esper_nb.core import lane_state, take_lanes, unfold
from esper_nb.grow import COOLING, Blend, CNNConfig, GPTConfig, Stage, evaluating
from esper_nb.train import (
    Ablation, FitConfig, contributions, correct_counts, create_model, evaluate, get_task, heard_slots, measure_ablation,
    new_population, pair_interactions, run_epoch, shapley)

CNN = CNNConfig(classes=4, in_channels=1, size=8, base=4, blocks=3, pools=2)
TASKS = dict(cnn=get_task("digits").replace(host=CNN),
             gpt=get_task("prose").replace(host=GPTConfig(vocab=16, d=16, heads=2, layers=3, block=8)))
NAMES = dict(cnn=("r0c0", "r1c0", "r0c2"), gpt=("r0c0", "r0c1", "r0c2"))
LIVES = ("blending", "holding", "fossil", "training", "germinated", "cooling", "empty")
DIGITS = get_task("digits").replace(host=CNN.replace(classes=10, kernel=3))
DATA = DIGITS.load(limit=2 * DIGITS.batch_size)

pytestmark = pytest.mark.usefixtures("one_thread")


def put_in(model, slot, lane, blueprint, life, blend=Blend.ADD, goal=.6):
    if life == "empty": return
    model.germinate(slot, blueprint, lane, blend=blend, tempo=0, goal=1. if life in ("holding", "fossil") else goal)
    if life == "cooling": model.prune(slot, lane)
    for _ in range(dict(training=1, blending=2, holding=3, fossil=3).get(life, 0)):
        model.advance(slot, lane, force=True)
    if life == "fossil": model.fossilize(slot, lane, force=True)

def shake(model):
    "Move every weight a little, in running statistics too, so that no seed is an identity and no batch norm is fresh."
    g = torch.Generator().manual_seed(3)
    for k, t in lane_state(model).items():
        if k.endswith(".running_var"): t.data.mul_(1 + .3 * torch.rand(t.shape, generator=g))
        elif t.is_floating_point() and not k.endswith((".table", ".stream")):
            t.data.add_(.15 * torch.randn(t.shape, generator=g))
    for name in model.names:  # an empty row stays empty
        for i, s in enumerate(model.slot(name).states()):
            if s.blueprint is None or s.stage in COOLING: model.slot(name).clear([i], 0)
    return model

def grown(kind, live, blend=Blend.ADD, lanes=7):
    "Lane i lives life i in the first slot, life i + 1 in the second ...; kinds differ from lane to lane."
    model = create_model(TASKS[kind], NAMES[kind], num_lanes=lanes)
    for j, slot in enumerate(NAMES[kind][:live]):
        for i in range(lanes):
            put_in(model, slot, i, model.slot(slot).blueprints[(i + 2 * j) % 7], LIVES[(i + j) % 7], blend, .3 + .1 * i)
    return shake(model)

def batches(kind, lanes, sizes=(24, 9)):
    g = torch.Generator().manual_seed(5)
    def tokens(b): return torch.randint(16, (b, 8, lanes), generator=g)
    def images(b): return torch.randn(b, lanes, 8, 8, generator=g).contiguous(memory_format=torch.channels_last)
    if kind == "cnn": return [(images(b), torch.randint(4, (b, lanes), generator=g)) for b in sizes]
    return [(tokens(b), tokens(b)) for b in sizes]

def combinations_of(names): return [tuple(k for j, k in enumerate(names) if c >> j & 1) for c in range(2**len(names))]

def separate(model, task, data, on):
    "Loss and accuracy with some seeds on, by one pass of their own."
    loss = right = seen = 0
    with model.disable_seeds([k for k in model.names if k not in on]), evaluating(model):
        for x, y in data:
            z = model(x)
            loss = loss + task.loss(z, y, model.lanes).double() * len(y)
            right = right + correct_counts(z, y, model.lanes).double()
            seen += y[..., 0].numel()
    return (loss / sum(len(y) for _, y in data)).float(), (100 * right / seen).float()


# --- the table is what separate evaluations give

@pytest.mark.parametrize("kind", list(TASKS))
@pytest.mark.parametrize("blend", list(Blend))
@pytest.mark.parametrize("live", [1, 2, 3])
def test_the_table_holds_separate_evaluations_bit_for_bit(kind, blend, live):
    model, data = grown(kind, live, blend), batches(kind, 7)
    table = measure_ablation(model, TASKS[kind], data)
    assert table.slots == NAMES[kind][:live] == heard_slots(model)
    for c, on in enumerate(combinations_of(table.slots)):
        loss, accuracy = separate(model, TASKS[kind], data, on)
        assert torch.equal(table.loss[c], loss) and torch.equal(table.accuracy_pp[c], accuracy), on
        assert torch.equal(table.value(on), accuracy)
    assert table.loss[0].ne(table.loss[-1]).any(), "the seeds make a difference"


@pytest.mark.parametrize("kind", list(TASKS))
@pytest.mark.parametrize("blend", list(Blend))
@pytest.mark.parametrize("groups", [[(i,) for i in range(7)], [(0, 3, 6), (5, 1), (2, 4)]], ids=["alone", "groups"])
def test_other_groupings_agree_to_rounding(kind, blend, groups):
    "Bits of a table belong to slots that the whole population hears; a group may hear fewer, and its kernels differ."
    model, data = grown(kind, 3, blend), batches(kind, 7)
    whole = measure_ablation(model, TASKS[kind], data)
    for g in groups:
        part, lanes = take_lanes(model, g), list(g)
        own = [(unfold(x, 7)[:, lanes].flatten(1, 2) if kind == "cnn" else x[..., lanes], y[..., lanes]) for x,
               y in data]
        few = measure_ablation(part, TASKS[kind], own)
        every = measure_ablation(part, TASKS[kind], own, whole.slots)
        torch.testing.assert_close(every.loss, whole.loss[:, lanes], rtol=1e-5, atol=1e-5)
        assert torch.equal(every.heard, whole.heard[:, lanes]) and torch.equal(every.fossil, whole.fossil[:, lanes])
        for c, on in enumerate(combinations_of(few.slots)):
            want = whole.loss[sum(1 << whole.slots.index(k) for k in on), lanes]
            torch.testing.assert_close(few.loss[c], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", list(TASKS))
def test_one_stacked_batch_agrees_to_rounding(kind):
    model, (x, _) = grown(kind, 3, Blend.GATE), batches(kind, 7)[0]
    torch.testing.assert_close(model.factorial(x, stacked=True)[0], model.factorial(x)[0], rtol=1e-5, atol=1e-5)


# --- nobody notices

@pytest.mark.parametrize("kind", list(TASKS))
@pytest.mark.parametrize("blend", list(Blend))
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_does_not_notice(kind, blend, stacked, fails, monkeypatch):
    model, data = grown(kind, 3, blend), batches(kind, 7)
    # modes that no single call would bring back
    model.train(); model.host.eval(); model.slot(NAMES[kind][1]).banks.eval()
    for p in model.parameters(): p.grad = torch.full_like(p, .5)
    if stacked:
        plain = type(model).factorial
        monkeypatch.setattr(type(model), "factorial", lambda self, x, names: plain(self, x, names, True))
    before, modes = {k: t.clone() for k, t in model.state_dict().items()}, [m.training for m in model.modules()]
    slots = [model.slot(k) for k in model.names]
    streams = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    if fails:
        with pytest.raises(IndexError), monkeypatch.context() as broken:
            broken.setattr(slots[-1].banks[slots[-1].roles()[0].blueprint], "forward", lambda x: [][1])
            measure_ablation(model, TASKS[kind], data)
    else: measure_ablation(model, TASKS[kind], data)
    assert any(k.endswith("running_mean") for k in before) == (kind == "cnn")
    assert any(k.endswith(".table") for k in before)
    assert all(torch.equal(t, before[k]) for k, t in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes and all(s.enabled and not s.branch for s in slots)
    assert torch.equal(torch.get_rng_state(), streams[0]) and np.random.get_state()[1].tolist() == streams[1]
    assert random.getstate() == streams[2]
    assert all((p.grad == .5).all() and p.requires_grad for p in model.parameters()) and torch.is_grad_enabled()


# --- in training

def population(slots=("r0c0", "r0c1", "r0c2"), **kw):
    "Four lanes that hear different seeds; their alphas hold, so that an epoch's end changes none."
    pop = new_population(DIGITS, FitConfig(lanes=4, epochs=9, governor=None, **kw), slots, DATA,
                         blueprints=["norm", "depthwise", "conv_light"])
    for i, lives in enumerate([(), ("blending",), ("training", "blending", "holding"),
                               ("fossil", "blending", "blending")]):
        for j, life in enumerate(lives):
            blueprint, blend = ("conv_light", "norm", "depthwise")[(i + j) % 3], Blend((i + j) % 3)
            put_in(pop.model, slots[j], i, blueprint, life, blend, .5)
    return pop

@pytest.mark.parametrize("kw", [dict(workers=1), dict(workers=2), dict(workers=1, width=1), dict(workers=2, width=2)],
                         ids=str)
def test_the_record_of_an_epoch_holds_separate_evaluations(kw):
    pop = population(**kw)
    r = run_epoch(pop)
    assert r.ablation.slots == ("r0c0", "r0c1", "r0c2")
    assert torch.equal(r.ablation.accuracy_pp[-1], r.heldout.accuracy_pp)
    assert torch.equal(r.ablation.loss[-1], r.heldout.loss)
    for c, on in enumerate(combinations_of(r.ablation.slots)):
        with pop.model.disable_seeds([k for k in pop.model.names if k not in on]):
            alone = evaluate(pop.model, DIGITS, DATA)
        torch.testing.assert_close(r.ablation.loss[c], alone.loss, rtol=1e-5, atol=1e-5)
        # one image on the edge of two classes
        torch.testing.assert_close(r.ablation.accuracy_pp[c], alone.accuracy_pp, rtol=0, atol=.4)
    for j, k in enumerate(r.ablation.slots):
        for i, s in enumerate(pop.model.slot(k).states()):
            want = float(r.ablation.contribution[j, i])
            assert s.contribution == (None if math.isnan(want) else pytest.approx(want, abs=1e-4))


def test_with_five_slots_only_what_was_measured_is_reported():
    slots = ("r0c0", "r1c0", "r0c1", "r1c1", "r0c2")
    pop = population(slots, workers=1)
    for k in slots: put_in(pop.model, k, 0, "norm", "blending", goal=.5)
    r = run_epoch(pop)
    assert r.ablation is None
    full = evaluate(pop.model, DIGITS, DATA).accuracy_pp
    for k in slots:
        with pop.model.disable_seeds(k): off = evaluate(pop.model, DIGITS, DATA).accuracy_pp
        for i, s in enumerate(pop.model.slot(k).states()):
            heard = s.stage in (Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)
            assert (s.contribution is not None) == heard and s.interaction is None
            if heard: assert s.contribution == pytest.approx(float(full[i] - off[i]), abs=.4)


# --- look-ups

@st.composite
def tables(draw):
    k, n = draw(st.integers(0, 4)), draw(st.integers(1, 3))
    g = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    f, heard = 100 * torch.rand(2**k, n, generator=g), torch.rand(k, n, generator=g) < .7
    for j in range(k):  # a seed that a lane does not have makes no difference to it
        for c in range(2**k):
            if c >> j & 1: f[c] = torch.where(heard[j], f[c], f[c ^ 1 << j])
    return Ablation(tuple(f"s{j}" for j in range(k)), f, f / 10, heard, heard & (torch.rand(k, n, generator=g) < .4))

@settings(deadline=None, max_examples=50)
@given(tables())
def test_every_reading_is_a_look_up(w):
    k, n = len(w.slots), w.accuracy_pp.shape[1]
    at = {frozenset(s): w.accuracy_pp[c] for c, s in enumerate(combinations_of(w.slots))}
    everything = frozenset(w.slots)
    torch.testing.assert_close(w.total, at[everything] - at[frozenset()])
    assert w.contribution.shape == w.shapley.shape == (k, n) and w.interactions.shape == (k, k, n)
    for i in range(n):
        assert w.committed[i] == at[frozenset(s for j, s in enumerate(w.slots) if w.fossil[j, i])][i]
        for j, s in enumerate(w.slots):
            assert w.contribution[j, i].isnan() == w.shapley[j, i].isnan() == (not w.heard[j, i])
            assert w.interactions[j, j, i].isnan()
            if w.heard[j, i]: assert w.contribution[j, i] == (at[everything] - at[everything - {s}])[i]
        for (a, s), (b, t) in itertools.combinations(enumerate(w.slots), 2):
            both = bool(w.heard[a, i] and w.heard[b, i])
            assert w.interactions[a, b, i].isnan() != both
            assert (not both or w.interactions[a, b, i] == w.interactions[b, a, i])
            want = at[frozenset({s, t})] - at[frozenset({s})] - at[frozenset({t})] + at[frozenset()]
            if both: torch.testing.assert_close(w.interactions[a, b, i], want[i], rtol=0, atol=1e-4)
    torch.testing.assert_close(w.shapley.nansum(0), w.total, rtol=0, atol=1e-3)
    for s in combinations_of(w.slots):
        mask = torch.tensor([x in s for x in w.slots], dtype=torch.bool).view(-1, 1).expand(k, n)
        assert torch.equal(w.value(s), at[frozenset(s)]) and torch.equal(w.value(mask), at[frozenset(s)])
    with pytest.raises(ValueError, match="measured slots"): w.value(["elsewhere"])


def test_what_was_not_measured_is_nan():
    model, data = grown("cnn", 3), batches("cnn", 7)
    w = measure_ablation(model, TASKS["cnn"], data)
    for j, slot in enumerate(w.slots):
        for i in range(7):
            life = LIVES[(i + j) % 7]
            assert w.heard[j, i] == (life in ("blending", "holding", "fossil")), (slot, i)
            assert w.fossil[j, i] == (life == "fossil"), (slot, i)
    for reading in (w.contribution, w.shapley): assert torch.equal(reading.isnan(), ~w.heard)
    pairs = w.heard[:, None] & w.heard[None] & ~torch.eye(3, dtype=torch.bool)[..., None]
    assert torch.equal(w.interactions.isnan(), ~pairs)
    one = measure_ablation(model, TASKS["cnn"], data, ["r1c0"])
    assert one.slots == ("r1c0",) and one.interactions.isnan().all()
    with pytest.raises(ValueError, match="measured slots: r1c0"): one.value(["r0c0"])
    empty = measure_ablation(create_model(TASKS["cnn"], NAMES["cnn"], num_lanes=7), TASKS["cnn"], data)
    assert empty.slots == () and empty.accuracy_pp.shape == (1, 7)
    assert empty.contribution.shape == empty.shapley.shape == (0, 7) and (empty.total == 0).all()
    assert torch.equal(empty.committed, empty.accuracy_pp[0])
    with pytest.raises(ValueError, match="at least one example"): measure_ablation(model, TASKS["cnn"], [])
    with pytest.raises(ValueError, match="r9c9"): measure_ablation(model, TASKS["cnn"], data, ["r9c9"])


def test_a_slot_that_is_switched_off_is_not_measured():
    model, data = grown("cnn", 3), batches("cnn", 7)
    whole = measure_ablation(model, TASKS["cnn"], data)
    with model.disable_seeds("r1c0"):
        w = measure_ablation(model, TASKS["cnn"], data)
        assert w.slots == ("r0c0", "r0c2") and not model.slot("r1c0").enabled
    assert torch.equal(w.loss, whole.loss[[0, 1, 4, 5]])


# --- Shapley values

def by_orders(f, k):
    "The definition: the mean contribution at arrival over all orders."
    out, orders = torch.zeros(k, *f.shape[1:], dtype=torch.float64), list(itertools.permutations(range(k)))
    for order in orders:
        c = 0
        for j in order: out[j] += f[c | 1 << j] - f[c]; c |= 1 << j
    return out / len(orders)

@settings(deadline=None, max_examples=40)
@given(st.integers(0, 5), st.integers(0, 10_000))
def test_exact_values_are_the_mean_over_all_orders(k, seed):
    f = torch.randn(2**k, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    v = shapley(f)
    torch.testing.assert_close(v, by_orders(f, k), rtol=0, atol=1e-12)
    torch.testing.assert_close(v.sum(0), f[-1] - f[0], rtol=0, atol=1e-12)

@pytest.mark.parametrize("reading", [contributions, pair_interactions, shapley])
def test_an_incomplete_table_is_refused_by_name(reading):
    for size in (0, 3, 5, 7):
        with pytest.raises(ValueError, match=rf"subsets={size}.*one per subset"): reading(torch.zeros(size, 2))
    assert reading(torch.zeros(8, 2)).shape[0] == 3 and reading(torch.zeros(1, 2)).shape[0] == 0
