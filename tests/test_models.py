"Growing models: lanes against separate models, exactness, checkpoints, factorial evaluation, owners, and random lives."
import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

from esper_nb.core import by_lane, take_lanes, unfold
from esper_nb.grow import (
    COOLING, LIVE, MOVES, Blend, CNNConfig, Curve, GPTConfig, Gates, GrowingModel, RampMode, Rules, Stage, attach_slots,
    export_model, list_blueprints, new_host, serve_optimizer)
from esper_nb.guard import Snapshot
from esper_nb.train import LaneOptimizer, Stepper

torch.set_num_threads(1)
CONFIGS = dict(cnn=CNNConfig(in_channels=1, size=8, base=8, blocks=2, classes=4),
               gpt=GPTConfig(vocab=16, d=16, heads=2, layers=3, block=8, segments=3))
SITES = dict(cnn=["r0c0", "r1c0", "r0c1", "r1c1"], gpt=["r0c0", "r0c1", "r0c2"])

def new(kind, lanes=1, seed=0, **kw):
    return GrowingModel(new_host(CONFIGS[kind], lanes, seed), kw.pop("slots", SITES[kind]), seed=seed, **kw)

def batch(kind, lanes, seed=0, size=12):
    g = torch.Generator().manual_seed(seed)
    if kind == "cnn":
        x = torch.randn(size, lanes, 8, 8, generator=g).contiguous(memory_format=torch.channels_last)
        return x, torch.randint(4, (size, lanes), generator=g)
    return torch.randint(16, (size, 8, lanes), generator=g), torch.randint(16, (size, 8, lanes), generator=g)

def loss_of(model, x, y):
    z, n = model(x), model.lanes
    return F.cross_entropy(z.unflatten(-1, (n, -1)).flatten(0, -2), y.flatten(), reduction="none").view(-1, n).mean(0)

def shake(model, size=.1):
    "Perturb every row in use, each lane alike whatever runs beside it, so that no seed is an identity."
    for name in model.names:
        for i, s in enumerate(model.slot(name).states()):
            if s.blueprint is None or s.stage in COOLING: continue
            g = torch.Generator().manual_seed(7 * s.blueprint + 1)
            slot = model.slot(name)
            parts = [slot.part(slot.blueprints[s.blueprint])] + [slot.part("gate")] * (s.blend == Blend.GATE)
            for p in [p for m in parts for p in m.parameters()]:
                row = by_lane(p.data, model.lanes)[i]
                row += size * torch.randn(row.shape, generator=g)

def put_in(model, name, lane, blueprint, state, blend=Blend.ADD, goal=1.):
    model.germinate(name, blueprint, lane, blend=blend, tempo=0, goal=goal)
    if state == "germinated": return
    if state == "cooling": model.prune(name, lane); return
    model.advance(name, lane)
    if state == "training": return
    model.advance(name, lane, force=True)
    if state in ("holding", "fossil"): model.advance(name, lane, force=True)
    if state == "fossil": model.fossilize(name, lane, force=True)

def mixed(kind, lanes=6, **kw):
    "A population in which no two lanes do the same."
    model = new(kind, lanes, **kw)
    names = [k for k in list_blueprints(family="cnn" if kind == "cnn" else "transformer") if k != "noop"]
    first, second = model.names[:2]
    lives = [("training", Blend.ADD, 1.), ("blending", Blend.ADD, .4), ("blending", Blend.MULTIPLY, .6),
             ("blending", Blend.GATE, .7), ("fossil", Blend.ADD, 1.), ("cooling", Blend.ADD, 1.)]
    for i in range(lanes):
        put_in(model, first, i, names[i % len(names)], *lives[i % 6])
        if i % 2: put_in(model, second, i, names[(i + 3) % len(names)], *lives[(i + 2) % 6])
    shake(model)
    return model


# ---- lanes

@pytest.mark.parametrize("kind", ["cnn", "gpt"])
@pytest.mark.parametrize("groups", [[(0,), (1,), (2,), (3,), (4,), (5,)], [(0, 3), (5, 1, 2), (4,)]])
def test_lanes_are_separate_models_over_training_steps(kind, groups):
    "n lanes at n stages with n blueprints, trained together, are n models trained one by one."
    wide = mixed(kind)
    parts = [take_lanes(wide, g) for g in groups]
    opts = [torch.optim.SGD(m.parameters(), .05, momentum=.9) for m in (wide, *parts)]
    for step in range(5):
        x, y = batch(kind, 6, seed=step)
        for m, opt, g in zip((wide, *parts), opts, [range(6), *groups]):
            m.train(); opt.zero_grad()
            lanes = list(g)
            mine = unfold(x, 6)[:, lanes].flatten(1, 2) if kind == "cnn" else x[..., lanes]
            loss_of(m, mine, y[..., lanes]).sum().backward()
            opt.step()
        if step == 2: [m.tick() for m in (wide, *parts)]
        x, _ = batch(kind, 6, seed=99)
        with torch.no_grad(): z = wide.eval()(x).unflatten(-1, (6, -1))
        for m, g in zip(parts, groups):
            xs = unfold(x, 6)[:, list(g)].flatten(1, 2) if kind == "cnn" else x[..., list(g)]
            with torch.no_grad(): zs = m.eval()(xs).unflatten(-1, (len(g), -1))
            torch.testing.assert_close(zs, z[..., list(g), :], rtol=1e-5, atol=1e-5)
    for m, g in zip(parts, groups):
        for k in m.names: assert torch.equal(m.slot(k).table, wide.slot(k).table[list(g)])


# ---- exactness

@pytest.mark.parametrize("kind", ["cnn", "gpt"])
def test_seeds_that_train_leave_host_output_and_gradient_exactly(kind):
    for blueprint in new(kind).slot("r0c0").blueprints:
        model, plain = new(kind, 3), new_host(CONFIGS[kind], 3)
        for name in model.names[:2]: put_in(model, name, [0, 2], blueprint, "training")
        shake(model, .3)
        x, y = batch(kind, 3)
        for m in (model, plain): m.train(); loss_of(m, x, y).sum().backward()
        for (k, p), q in zip(model.host.named_parameters(), plain.parameters()):
            assert torch.equal(p.grad, q.grad), (blueprint, k)
        assert torch.equal(model(x), plain(x))
        grads = [p.grad for p in model.slot("r0c0").banks[blueprint].parameters()]
        assert all(g is not None and by_lane(g, 3)[[0, 2]].isfinite().all() for g in grads)
        assert not any(by_lane(g, 3)[1].any() for g in grads)
        assert any(by_lane(g, 3)[0].any() and by_lane(g, 3)[2].any() for g in grads)


@pytest.mark.parametrize("kind", ["cnn", "gpt"])
@pytest.mark.parametrize("training", [True, False])
def test_germinate_prune_cool_and_fossilize_change_no_output(kind, training):
    model = mixed(kind).train(training)
    x, _ = batch(kind, 6)
    def look(): return model(x).detach()
    name = model.names[2]
    before = look()
    model.germinate(name, model.slot(name).blueprints[2], [0, 3]); assert torch.equal(look(), before)
    model.advance(name, [0, 3]); assert torch.equal(look(), before)
    model.prune(name, 3); assert torch.equal(look(), before)
    for _ in range(8):
        model.slot(name).tick(3); assert torch.equal(look(), before)
    model.advance(name, 0, force=True); assert torch.equal(look(), before), "blending begins at alpha 0"
    for _ in range(5): model.slot(name).tick(0)
    model.advance(name, 0)
    before = look()
    model.fossilize(name, 0, probe=x, force=True)
    torch.testing.assert_close(look(), before, rtol=1e-6, atol=1e-6); assert torch.equal(look(), before)


@pytest.mark.parametrize("kind", ["cnn", "gpt"])
def test_fossilize_safely_with_a_probe_batch(kind):
    model = mixed(kind); x, _ = batch(kind, 6)
    name = model.names[2]
    put_in(model, name, [0, 1], model.slot(name).blueprints[-1], "holding"); shake(model)
    next(model.slot(name).banks[model.slot(name).blueprints[-1]].parameters()).data[-1] += 0
    model.slot(name).change(1, lambda s: s._replace(alpha=.5))
    modes = [m.training for m in model.modules()]
    with pytest.raises(RuntimeError, match="lane 1 by"): model.fossilize(name, [0, 1], probe=x, force=True)
    assert model.slot(name).state(0).stage == Stage.HOLDING and [m.training for m in model.modules()] == modes
    by_lane(next(model.slot(name).banks[model.slot(name).blueprints[-1]].parameters()).data, 6)[0] = math.inf
    with pytest.raises(RuntimeError, match="is not finite"): model.fossilize(name, 0, probe=x, force=True)


# ---- checkpoints and snapshots

def grown(kind):
    "{fossil, blending with a gate, empty, cooling} in four lanes."
    model = new(kind, 4, seed=5)
    names, b = model.names, model.slot(model.names[0]).blueprints
    put_in(model, names[0], 0, b[-1], "fossil")
    model.germinate(names[0], b[2], 1, blend=Blend.GATE, tempo=8, curve=Curve.SIGMOID)
    for force in (False, True): model.advance(names[0], 1, force=force)
    put_in(model, names[0], 3, b[3], "cooling")
    shake(model)
    for _ in range(3): model.tick()
    return model

def epoch(model, kind, seed):
    x, y = batch(kind, 4, seed)
    model.train().zero_grad(); loss_of(model, x, y).sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None: p -= .1 * p.grad
    model.tick()

@pytest.mark.parametrize("kind", ["cnn", "gpt"])
def test_a_grown_model_loads_strictly_into_a_fresh_one_and_goes_on(kind, tmp_path):
    from safetensors.torch import load_file, save_file
    a = grown(kind)
    save_file({k: v.contiguous() for k, v in a.state_dict().items()}, tmp_path / "m.safetensors")
    b = new(kind, 4, seed=5)
    assert not b.load_state_dict(load_file(tmp_path / "m.safetensors"), strict=True).missing_keys
    x, _ = batch(kind, 4)
    for step in range(7):
        for m in (a, b): m.eval()
        with torch.no_grad(): assert torch.equal(a(x), b(x))
        assert repr(a.status()) == repr(b.status()) and not a.status().problems
        alpha = a.slot(a.names[0]).state(1).alpha
        for m in (a, b): epoch(m, kind, step)
        if step < 4: assert alpha < a.slot(a.names[0]).state(1).alpha == b.slot(a.names[0]).state(1).alpha
        if step == 5:
            for m in (a, b): m.germinate(m.names[0], m.slot(m.names[0]).blueprints[1], [2, 3])
    assert all(torch.equal(p, q) for p, q in zip(a.state_dict().values(), b.state_dict().values()))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("attached", [True, False], ids=["own network", "host"])
def test_seeds_of_other_blueprints_are_refused_before_anything_is_loaded(attached, strict):
    def made(blueprints, seed):
        torch.manual_seed(seed)
        if not attached: return new("cnn", 2, seed, slots=["r0c0", "r0c1"], blueprints=blueprints)
        net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3))
        return attach_slots(net, ["0", "1"], torch.rand(2, 1, 8, 8), blueprints=blueprints)
    one = made(["conv_light", "norm"], 0)
    place = one.names[1]
    one.germinate(place, "conv_light", tempo=0)
    for _ in range(3): one.advance(place, force=True)
    for other in (["conv_light", "depthwise", "norm"], ["conv_light"], ["bottleneck", "depthwise"]):
        two = made(other, 1)
        before = copy.deepcopy(two.state_dict())
        with pytest.raises(RuntimeError, match=f"slot {place}: saved are seeds of the blueprints conv_light, norm"):
            two.load_state_dict(one.state_dict(), strict=strict)
        assert all(torch.equal(t, before[k]) for k, t in two.state_dict().items())
    same = made(["norm", "conv_light"], 1) # in another order
    same.load_state_dict(one.state_dict(), strict=strict)
    assert [s.stage for s in same.slot(place).states()] == [s.stage for s in one.slot(place).states()]
    x = torch.rand(2, 1 if attached else 2, 8, 8)
    assert torch.equal(same.eval()(x), one.eval()(x))


@pytest.mark.parametrize("strict", [True, False])
def test_a_list_with_a_blueprint_without_weights_is_told_from_one_without_it(strict):
    def made(blueprints): return new("cnn", 2, 0, slots=["r0c0"], blueprints=blueprints)
    small, large = (made(names) for names in (["norm", "conv_small"], ["noop", "norm", "conv_small"]))
    large.load_state_dict(small.state_dict(), strict=False), small.load_state_dict(large.state_dict()) # nothing grows
    for one, other in ((small, large), (large, small)):
        one.germinate("r0c0", "norm", tempo=0)
        with pytest.raises(RuntimeError, match="saved are seeds of the blueprints.* expected those of this slot"):
            other.load_state_dict(one.state_dict(), strict=strict)
        same = made([*one.slot("r0c0").blueprints])
        same.load_state_dict(one.state_dict(), strict=strict)
        assert same.slot("r0c0").blueprints[same.slot("r0c0").state(1).blueprint] == "norm"
        states = (m.state_dict().values() for m in (same, one))
        assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
        one.prune("r0c0")


def test_a_lane_without_a_norm_or_a_health_has_no_health_of_gradients():
    model = new("cnn", 3, 0, slots=["r0c0"], blueprints=["norm"])
    model.germinate("r0c0", "norm")
    model.record_gradients("r0c0", [1., math.nan, 2.], [.5, .5, math.nan])
    model.record_gradients("r0c0", None, 1.)
    assert [s.gradient_norm for s in model.slot("r0c0").states()] == [1., None, None]
    for wrong in (dict(norm=-1., health=1.), dict(norm=1., health=2.), dict(norm=1., health=1., exploding=-.5)):
        with pytest.raises(ValueError, match="expected a"): model.record_gradients("r0c0", **wrong)
    model.record_gradients("r0c0", math.inf, 0.)
    assert model.slot("r0c0").state(1).gradient_norm == math.inf


def test_a_snapshot_brings_back_every_seed_by_lane():
    model = grown("cnn"); x, _ = batch("cnn", 4)
    snap = Snapshot(model=model, lanes=4)
    snap.take(); before_rows = {k: by_lane(v, 4).clone() for k, v in model.state_dict().items()}
    before = model.train()(x).detach()
    for name in model.names[1:]: put_in(model, name, 1, "norm", "training")
    for s in range(4): epoch(model, "cnn", s)
    after = {k: by_lane(v, 4).clone() for k, v in model.state_dict().items()}
    snap.restore(lanes=[1])
    now = {k: by_lane(v, 4) for k, v in model.state_dict().items()}
    for k in now:
        assert torch.equal(now[k][1], before_rows[k][1]) and torch.equal(now[k][[0, 2, 3]], after[k][[0, 2, 3]])
    snap.restore(); assert torch.equal(model.train()(x), before)


# ---- factorial evaluation

def test_factorial_refuses_too_many_slots_and_unknown_ones():
    model = new("cnn", slots=["r0c0", "r1c0", "r0c1", "r1c1"])
    host = new_host(CNNConfig(in_channels=1, size=8, base=4, blocks=3), 1)
    big = GrowingModel(host, ["r0c0", "r1c0", "r0c1", "r1c1", "r0c2"], ["norm"])
    for k in big.names: put_in(big, k, 0, "norm", "blending")
    with pytest.raises(ValueError, match="at most 4"): big.factorial(batch("cnn", 1)[0])
    assert big.factorial(batch("cnn", 1)[0], big.names[:4])[0].shape[0] == 16
    assert not any(big.slot(k).branch for k in big.names)
    with pytest.raises(ValueError, match="one of"): model.factorial(batch("cnn", 1)[0], ["r9c9"])
    z, on = model.factorial(batch("cnn", 1)[0]); assert on == [()] and z.shape[:2] == (1, 12)


def test_disable_seeds_nests_and_restores_after_an_error():
    model = mixed("cnn"); x, _ = batch("cnn", 6); model.eval()
    full = model(x)
    with pytest.raises(KeyError):
        with model.disable_seeds(model.names[0]), model.disable_seeds():
            assert torch.equal(model(x), model.host(x)); raise KeyError
    assert torch.equal(model(x), full)


# ---- owners

def stepper(model, **kw):
    owners = {k: LaneOptimizer(ps, model.lanes, "sgd", .05, momentum=.9) for k, ps in model.owners().items()}
    return Stepper(owners, **kw)

def train(model, opt, kind, seed):
    for owner, lanes in model.take_fresh().items(): opt.owners[owner].reset_lanes(lanes)
    x, y = batch(kind, model.lanes, seed)
    opt.backward(loss_of(model.train(), x, y))
    return opt.step(model.active())

def test_a_new_seed_starts_without_the_old_ones_momentum_and_a_fossil_keeps_its_own():
    model = new("cnn", 2, slots=["r0c0"], blueprints=["conv_light"])
    put_in(model, "r0c0", [0, 1], "conv_light", "holding"); opt = stepper(model)
    for s in range(3): train(model, opt, "cnn", s)
    def momentum():
        return [by_lane(t, 2) for k, t in opt.owners["r0c0.conv_light"].state_dict().items() if "momentum" in k]
    kept = [m[0].clone() for m in momentum()]
    assert any(m.any() for m in kept)
    model.fossilize("r0c0", 0, force=True); model.prune("r0c0", 1)
    assert all(torch.equal(a, m[0]) for a, m in zip(kept, momentum()))
    for _ in range(7): model.tick()
    model.germinate("r0c0", "conv_light", 1); model.advance("r0c0", 1)
    assert model.active()["r0c0.conv_light"].tolist() == [True, True]
    assert model.take_fresh() == {"r0c0.conv_light": [1]}
    opt.owners["r0c0.conv_light"].reset_lanes([1])
    assert not any(m[1].any() for m in momentum()) and all(torch.equal(a, m[0]) for a, m in zip(kept, momentum()))


def test_a_host_that_is_frozen_is_an_owner_all_the_same():
    model = new("cnn", 2, slots=["r0c1"])
    for p in model.host.parameters(): p.requires_grad_(False)
    assert model.live_lanes("host").tolist() == model.active()["host"].tolist() == [True, True]
    with pytest.raises(ValueError, match="owner='hosts', expected one of host, r0c1"): model.live_lanes("hosts")

def test_a_fading_seed_is_frozen_while_the_host_still_learns_through_it():
    model = new("cnn", 2, slots=["r0c0"], blueprints=["conv_light"])
    put_in(model, "r0c0", [0, 1], "conv_light", "holding"); opt = stepper(model)
    model.schedule_prune("r0c0", 4, 0); model.tick()
    assert model.active()["r0c0.conv_light"].tolist() == [False, True]
    before = [by_lane(p, 2)[0].clone() for p in model.slot("r0c0").banks.parameters()]
    first = by_lane(model.host.blocks[0][0].weight, 2)[0].clone()
    train(model, opt, "cnn", 0)
    assert all(torch.equal(a, by_lane(p, 2)[0]) for a, p in zip(before, model.slot("r0c0").banks.parameters()))
    assert not torch.equal(first, by_lane(model.host.blocks[0][0].weight, 2)[0])


def test_kinds_group_lanes_that_run_together():
    from esper_nb.core.workers import plan
    model = new("cnn", 6, slots=["r0c0", "r1c0"])
    put_in(model, "r0c0", [0, 2, 4], "conv_light", "training"); put_in(model, "r1c0", [2], "norm", "blending")
    kinds = model.kinds()
    assert kinds[0] == kinds[4] != kinds[2] and kinds[1] == kinds[3] == kinds[5] == (None, None)
    for group in plan(kinds):
        part = take_lanes(model, group)
        assert all(len(r.lanes) == len(group) for k in part.names for r in part.slot(k).roles())


# ---- status and counts

def test_counts_add_up_and_agree_with_status():
    model = mixed("cnn"); c = model.parameter_counts()
    assert c.total.tolist() == (c.host + c.seed + c.fossil).tolist() and c.fossil[4] > 0 and c.seed[5] > 0
    one = model.lane(4).parameter_counts()
    assert one.fossil.tolist() == [int(c.fossil[4])] and one.host.tolist() == [int(c.host[4])]
    assert model.status().problems == [] and "|" in model.status()._repr_markdown_() and len(model.status(4).table) == 1


@pytest.mark.parametrize("damage,words", [
    (dict(alpha=.5), "where it is 0"), (dict(alpha=2.), "outside"), (dict(blueprint=99), "is none of"),
    (dict(stage=5), "retired"), (dict(mode=1), "alpha moves"),
    (dict(done=4), "steps done"), (dict(blueprint=None), "is none of")])
def test_status_says_what_is_wrong(damage, words):
    from esper_nb.grow.lifecycle import COLUMNS, UNMEASURED
    model = new("cnn", 2); put_in(model, "r0c0", 1, "norm", "training")
    for k, v in damage.items(): model.slot("r0c0").table[1, COLUMNS.index(k)] = UNMEASURED if v is None else float(v)
    problems = model.status().problems
    assert len(problems) >= 1 and "slot r0c0, lane 1" in problems[0] and any(words in p for p in problems)


# ---- new lanes

def test_resetting_a_lane_is_a_fresh_lane():
    a, b = mixed("cnn", seed=3), new("cnn", 6, seed=3)
    a.reset([1, 4], 3); b_lane = [take_lanes(b, [i]).state_dict() for i in (1, 4)]
    for i, ref in zip((1, 4), b_lane):
        got = take_lanes(a, [i]).state_dict()
        other = [k for k, v in got.items() if not torch.equal(v, ref[k])]
        assert not other


def test_resetting_rows_like_any_module_empties_the_slots():
    from esper_nb.core.lanes import reset_lanes
    model, plain = mixed("cnn"), new_host(CONFIGS["cnn"], 6, 9)
    before = {k: by_lane(v, 6).clone() for k, v in model.state_dict().items()}
    reset_lanes(model, [2], 9)
    assert all(model.slot(k).state(2).stage == Stage.DORMANT for k in model.names) and not model.status().problems
    for k, v in model.state_dict().items():
        assert torch.equal(by_lane(v, 6)[[0, 1, 3, 4, 5]], before[k][[0, 1, 3, 4, 5]])
    for k, v in plain.state_dict().items():
        assert torch.equal(by_lane(v, 6)[2], by_lane(model.host.state_dict()[k], 6)[2])


# ---- random lives

class Lives(RuleBasedStateMachine):
    "Random verbs, legal and not, on two lanes and two slots; the invariants hold after each of them."
    def __init__(self):
        super().__init__()
        rules = Rules(Gates(training_epochs=1), auto=("G1",))
        self.model = new("cnn", 2, slots=["r0c0", "r1c0"], blueprints=["norm", "conv_small"], rules=rules)
        self.model.eval()
        self.x = batch("cnn", 2, size=2)[0]
        self.before = self.states()

    def states(self): return {(k, i): s for k in self.model.names for i, s in enumerate(self.model.slot(k).states())}

    def attempt(self, verb, slot, lane, *args, **kw):
        before = self.states()
        table = torch.cat([self.model.slot(k).table for k in self.model.names]).clone()
        try: getattr(self.model, verb)(slot, *args, lanes=lane, **kw)
        except (RuntimeError, ValueError):
            now = torch.cat([self.model.slot(k).table for k in self.model.names])
            assert torch.equal(now, table), "a refused verb changed the table"
        for key, s in self.states().items():
            if key != (slot, lane): assert s == before[key], "a verb reached beyond its slot and lane"
        self.legal(before)
        self.before = self.states()
        s, t = before[slot, lane], self.before[slot, lane]
        if verb == "germinate" and s.stage != Stage.DORMANT: assert s == t, "an occupied slot took a seed"
        return s, t

    slots, lanes = st.sampled_from(["r0c0", "r1c0"]), st.integers(0, 1)

    @initialize(blends=st.lists(st.sampled_from([None, *Blend]), min_size=4, max_size=4), tempo=st.integers(0, 3),
                steps=st.integers(0, 3))
    def begin(self, blends, tempo, steps):
        "Most walks begin with seeds: from an empty model, few get far."
        for (slot, lane), blend in zip(self.states(), blends):
            if blend is not None: self.attempt("germinate", slot, lane, "norm", blend=blend, tempo=tempo)
        for _ in range(steps): self.push(1)

    @rule(slot=slots, lane=lanes, blueprint=st.sampled_from(["norm", "conv_small", "norm", "conv_small", "mlp"]),
          blend=st.sampled_from(list(Blend)), tempo=st.integers(-1, 4), goal=st.sampled_from([.5, 1., 1., 0.]),
          curve=st.sampled_from(list(Curve)))
    def germinate(self, slot, lane, blueprint, **settings):
        s, t = self.attempt("germinate", slot, lane, blueprint, **settings)
        assert t.germinations == s.germinations + (s.stage != t.stage)

    @rule(slot=slots, lane=lanes, force=st.booleans())
    def advance(self, slot, lane, force): self.attempt("advance", slot, lane, force=force)

    @rule(times=st.integers(1, 3))
    def push(self, times):
        "Without this, random walks hardly ever get beyond TRAINING."
        for _ in range(times):
            for slot, lane in self.states(): self.attempt("advance", slot, lane, force=True)

    @rule(slot=slots, lane=lanes, to=st.sampled_from([0., .3, 1., 1.5]), steps=st.integers(0, 3),
          blend=st.none() | st.sampled_from(list(Blend)))
    def set_alpha(self, slot, lane, to, **settings): self.attempt("set_alpha", slot, lane, to, **settings)

    @precondition(lambda self: sum(s.stage in LIVE for s in self.states().values()) > 1)
    @rule(slot=slots, lane=lanes)
    def prune(self, slot, lane):
        s, t = self.attempt("prune", slot, lane)
        assert t.stage == (Stage.PRUNED if s.stage in LIVE else s.stage)

    @rule(slot=slots, lane=lanes, steps=st.integers(-1, 3))
    def schedule_prune(self, slot, lane, steps): self.attempt("schedule_prune", slot, lane, steps)

    @rule(lane=lanes)
    def settle(self, lane):
        for slot in self.model.names: self.attempt("fossilize", slot, lane, force=True)

    @rule(slot=slots, lane=lanes, force=st.booleans())
    def fossilize(self, slot, lane, force): self.attempt("fossilize", slot, lane, force=force)

    @rule(lane=st.none() | lanes, worth=st.floats(-5, 5), health=st.floats(0, 1))
    def measure(self, lane, worth, health):
        for k in self.model.names:
            self.model.record_contribution(k, worth, lane); self.model.record_gradients(k, 1., health, lane)
        self.model.record_accuracy([50., math.nan], lane)

    @precondition(lambda self: sum(s.stage in LIVE for s in self.states().values()) > 2)
    @rule(lane=lanes)
    def prune_live(self, lane):
        gone = self.model.prune_live(lane)
        assert all(s.stage not in LIVE for (k, i), s in self.states().items() if i == lane)
        assert all(i == lane for _, i in gone)

    @rule(times=st.integers(1, 3))
    def tick(self, times):
        for _ in range(times):
            before, events = self.states(), self.model.tick()
            self.legal(before)
            for (k, i), s in before.items():
                t = self.states()[k, i]
                mine = [e for a, b, e in events if (a, b) == (k, i)]
                assert [e[:2] for e in mine] == ([] if s.stage == t.stage else [(s.stage, t.stage)])
                if s.stage == Stage.BLENDING and s.mode == RampMode.UP: assert t.alpha >= s.alpha
                if s.frozen: assert t.stage in (Stage.BLENDING, Stage.PRUNED)
                if s.frozen and t.stage == Stage.BLENDING: assert t.frozen and t.alpha <= s.alpha
                if s.stage == t.stage != Stage.DORMANT: assert (t.epochs, t.age) == (s.epochs + 1, s.age + 1)
            self.before = self.states()

    def legal(self, before):
        for key, t in self.states().items():
            s = before[key]
            if s.stage == Stage.FOSSILIZED: assert (t.stage, t.alpha, t.germinations) == (s.stage, 1, s.germinations)
            new = s.stage == Stage.DORMANT and t.stage == Stage.TRAINING # through the gate that opens by itself
            if t.stage != s.stage and not new:
                assert t.stage in MOVES[s.stage], f"{s.stage.name} to {t.stage.name}"

    @invariant()
    def only_listed_moves(self):
        self.legal(self.before)
        self.before = self.states()

    @invariant()
    def consistent(self):
        status = self.model.status()
        assert not status.problems, status
        for (k, i), s in self.states().items():
            assert not s.frozen or s.stage == Stage.BLENDING and s.target == 0
            assert 0 <= s.alpha <= 1 and s.done <= s.total and s.epochs <= s.age
            if s.stage == Stage.DORMANT: assert s == type(s)(germinations=s.germinations)
        c = self.model.parameter_counts()
        fossils = {i for (k, i), s in self.states().items() if s.stage == Stage.FOSSILIZED}
        assert all((c.fossil[i] > 0) == (i in fossils) for i in range(2))

    @invariant()
    def shape_preserved(self):
        with torch.no_grad():
            z = self.model(self.x)
            assert z.shape == (2, 8) and z.isfinite().all()
            for i in range(2):
                silent = all(s.alpha == 0 for (k, j), s in self.states().items() if j == i)
                if silent: assert torch.equal(unfold(z, 2)[:, i], unfold(self.model.host(self.x), 2)[:, i])


Lives.TestCase.settings = settings(deadline=None, max_examples=15, stateful_step_count=30,
                                   suppress_health_check=list(HealthCheck))
test_lives = Lives.TestCase


# ---- a network of your own, as people have it

class Branches(nn.Module):
    "Residual, dense and inception branches, and features that are reshaped to the batch they came in with."
    def __init__(self):
        super().__init__()
        self.stem, self.res = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.left, self.right = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.mix, self.head = nn.Conv2d(24, 8, 1), nn.Linear(8, 4)

    def forward(self, x):
        size = len(x)
        h = self.stem(x)
        h = h + self.res(h).relu()
        h = self.mix(torch.cat([h, self.left(h), self.right(h)], 1))
        return self.head(h.reshape(size, 8, -1).mean(-1))

@pytest.mark.parametrize("slots", [["res"], ["left"], ["mix"], ["res", "right"]])
def test_factorial_inside_branches_runs_by_default(slots):
    torch.manual_seed(0)
    x = torch.randn(3, 3, 8, 8)
    model = attach_slots(Branches(), slots, x, blueprints=["conv_light"])
    for k in slots: put_in(model, k, 0, "conv_light", "fossil")
    shake(model)
    model.eval()
    z, on = model.factorial(x)
    for out, names in zip(z, on):
        off = [k for k in slots if k not in names]
        with model.disable_seeds(off), torch.no_grad(): assert torch.equal(out, model(x))
    with pytest.raises((RuntimeError, ValueError), match="stacked.*False"): model.factorial(x, stacked=True)

def test_an_attached_model_is_copied_and_begins_again():
    torch.manual_seed(0)
    x = torch.randn(3, 3, 8, 8)
    model = attach_slots(Branches(), ["res"], x, blueprints=["conv_light"])
    put_in(model, "res", 0, "conv_light", "fossil"); shake(model)
    model.eval()
    y = model(x)
    twin = model.lane(0)
    assert torch.equal(twin(x), y)
    twin.slot("res").banks["conv_light"].body[0].weight.data.zero_()
    assert torch.equal(model(x), y) and not torch.equal(twin(x), y)
    with pytest.raises(ValueError, match="lanes=1, expected 0, the only lane"): model.lane(1)
    stream = torch.get_rng_state()
    model.reset([0], seed=3)
    first = {k: t.clone() for k, t in model.state_dict().items()}
    twin.reset([0], seed=3)
    for k, t in twin.state_dict().items(): assert torch.equal(t, first[k]), k
    model.reset([0], seed=4)
    assert not torch.equal(model.host.stem.weight, first["host.stem.weight"])
    assert model.slot("res").state(0).stage == Stage.DORMANT and torch.equal(torch.get_rng_state(), stream)

def test_a_part_that_cannot_draw_itself_is_named_and_nothing_changes():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.conv = nn.Parameter(torch.ones(1)), nn.Conv2d(3, 8, 3)

        def forward(self, x): return self.conv(x * self.scale)

    model = attach_slots(Bare(), ["conv"], torch.randn(1, 3, 8, 8), blueprints=["norm"])
    kept = model.host.conv.weight.clone()
    with pytest.raises(ValueError, match="parameters of Bare=.'scale'"): model.reset([0], 0)
    assert torch.equal(model.host.conv.weight, kept)

def test_a_moving_average_of_the_table_is_refused_by_name():
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
    x = torch.randn(2, 3, 8, 8)
    model = attach_slots(Branches(), ["res"], x, blueprints=["conv_light"])
    averages = {k: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(.9), use_buffers=k) for k in (True, False)}
    for a in averages.values(): a.update_parameters(model)
    put_in(model, "res", 0, "conv_light", "fossil"); shake(model)
    for a in averages.values(): a.update_parameters(model)
    with pytest.raises(ValueError, match="in the table of a slot=.*use_buffers=False copies"): averages[True](x)
    averages[False](x)
    assert torch.equal(averages[False].module.slot("res").table, model.slot("res").table)

def test_a_slot_is_named_once():
    with pytest.raises(ValueError, match="each once"): GrowingModel(new_host(CONFIGS["cnn"]), ["r0c0", "r0c0"])
    with pytest.raises(ValueError, match="each once"): attach_slots(Branches(), ["res", "res"], torch.randn(1, 3, 8, 8))

def test_a_host_without_parameters():
    pool, x = nn.Sequential(nn.AvgPool2d(2), nn.AvgPool2d(2)), torch.randn(2, 8, 8, 8)
    model = attach_slots(pool, ["0"], x, blueprints=["norm"])
    model.germinate("0", "norm")
    assert torch.equal(model(x), pool(x)) and model.parameter_counts().host.tolist() == [0]

class Swin(nn.Module):
    "Channels last, then a one-dimensional convolution, then vectors."
    def __init__(self):
        super().__init__()
        self.embed, self.stage = nn.Linear(3, 8), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())
        self.wave, self.act, self.head = nn.Conv1d(8, 12, 3), nn.ReLU(), nn.Linear(12, 4)

    def forward(self, x):                                  # (B, H, W, 3)
        h = self.stage(self.embed(x))                      # (B, H, W, 8)
        h = self.act(self.wave(h.flatten(1, 2).mT))        # (B, 12, L)
        return self.head(h.mean(2))                        # (B, 4)

@pytest.mark.parametrize("place, layout, words", [
    ("stage", "BHWC", "looks like BHWC"), ("act", "BDL", "looks like BDL"), ("head", "BD", "output of head=.3, 4.")])
def test_layouts_are_declared_and_never_guessed(place, layout, words):
    torch.manual_seed(0)
    net, x = Swin().eval(), torch.randn(3, 6, 7, 3)
    with pytest.raises(ValueError, match=words): attach_slots(net, [place], x)
    plain = net(x)
    model = attach_slots(net, [place], x, layouts={place: layout}).eval()
    channels = dict(stage=8, act=12, head=4)[place]
    assert model.slot(place).channels == channels and torch.equal(model(x), plain)
    put_in(model, place, 0, "norm", "fossil"); shake(model)
    seen = []
    net.get_submodule(place).register_forward_hook(lambda m, a, out: seen.append(out), prepend=True)
    y = model(x)
    h = seen[0]
    turned = dict(BHWC=h.movedim(-1, 1), BDL=h.mT, BD=h[:, None])[layout] if h.ndim > 1 else h
    out = model.slot(place)(turned)
    assert not torch.equal(out, turned) and not torch.equal(y, plain)
    assert torch.equal(export_model(model, 0, x)(x), y)

def test_a_layout_must_fit():
    x = torch.randn(3, 6, 7, 3)
    for layouts, words in ((dict(stage="BDL"), "layout of stage='BDL'"), (dict(act="BDL"), "names of slots: stage")):
        with pytest.raises(ValueError, match=words): attach_slots(Swin(), ["stage"], x, layouts=layouts)


# ---- plain optimizers

@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, .1, momentum=.9), lambda p: torch.optim.AdamW(p, .01),
                                  lambda p: torch.optim.RMSprop(p, .01, momentum=.9)])
def test_a_served_optimizer_moves_only_who_trains(make):
    torch.manual_seed(0)
    model, x = new("cnn", 2, slots=["r0c1"], blueprints=["conv_light"]), batch("cnn", 2)[0]
    put_in(model, "r0c1", 0, "conv_light", "holding"); put_in(model, "r0c1", 1, "conv_light", "holding")
    opt = make(model.parameters())
    handle = serve_optimizer(model, opt)
    def step():
        opt.zero_grad(set_to_none=False)
        model(x).square().mean().backward()
        opt.step()
    def rows(): return by_lane(model.slot("r0c1").banks["conv_light"].body[0].weight.detach().clone(), 2)
    for _ in range(3): step()
    model.schedule_prune("r0c1", 3, 0)
    kept, state = rows(), {k: by_lane(t.clone(), 2)[0] for k, t in
                           opt.state[model.slot("r0c1").banks["conv_light"].body[0].weight].items() if t.ndim}
    for _ in range(2): step(); model.tick()
    assert torch.equal(rows()[0], kept[0]) and not torch.equal(rows()[1], kept[1])     # a fade is frozen
    for k, t in opt.state[model.slot("r0c1").banks["conv_light"].body[0].weight].items():
        if t.ndim: assert torch.equal(by_lane(t, 2)[0], state[k])
    model.tick(); step()
    assert not rows()[0].any()                                                         # what is erased stays so
    for _ in range(9): model.tick(0)
    put_in(model, "r0c1", 0, "conv_light", "training")
    first = rows()
    step()
    assert not torch.equal(rows()[0], first[0])
    p = model.slot("r0c1").banks["conv_light"].body[0].weight
    if "momentum_buffer" in opt.state[p] and isinstance(opt, torch.optim.SGD):         # born without a momentum
        torch.testing.assert_close(by_lane(opt.state[p]["momentum_buffer"], 2)[0], by_lane(p.grad, 2)[0])
    handle.remove()
    model.schedule_prune("r0c1", 3, 1)
    before = rows(); step()
    assert not torch.equal(rows()[1], before[1])

@pytest.mark.parametrize("served", [True, False])
def test_an_optimizer_that_does_not_know_of_germinations_is_noticed_once(served, recwarn):
    model, x = new("cnn", 1, slots=["r0c1"], blueprints=["conv_light"]), batch("cnn", 1)[0]
    put_in(model, "r0c1", 0, "conv_light", "training")
    opt = torch.optim.SGD(model.parameters(), .1)
    if served: serve_optimizer(model, opt)
    for _ in range(4):
        model(x).square().mean().backward()
        opt.step()
        model.tick()
    said = [str(w.message) for w in recwarn if "serve_optimizer" in str(w.message)]
    assert len(said) == (not served) and all("slot r0c1" in text for text in said)

@pytest.mark.parametrize("kind", CONFIGS)
def test_a_host_that_runs_again_in_backward_has_the_same_bits_and_keeps_less(kind):
    more = {} if kind == "cnn" else dict(dropout=.2)
    both, (x, y) = [], batch(kind, 3)
    for again in (False, True):
        config, kept = CONFIGS[kind].replace(checkpoint=again, **more), {}
        def pack(t):
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t
        host = new_host(config, 3).train()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            losses = [loss_of(host, x, y) for _ in range(2)]
        sum(losses).sum().backward() # two batches are forwarded before the first one comes back
        both.append((sum(kept.values()), losses + [p.grad for p in host.parameters()] + list(host.buffers())))
    assert both[1][0] < .8 * both[0][0]
    for a, b in zip(both[0][1], both[1][1], strict=True): assert torch.equal(a, b)

def test_acting_in_inference_mode_and_learning_after_it():
    for kind in ("cnn", "gpt"):
        model, x = mixed(kind), batch(kind, 6)[0]
        with torch.inference_mode(): model(x)
        model(x).sum().backward()
