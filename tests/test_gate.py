"The gate before an update: what is dropped has left no bit behind, and what is healthy is not touched."
import copy
import gc
import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import fork_ranks
from torch import nn
from torch.nn import functional as F
from tiny import same, update

from esper_nb.guard import Governor, GovernorConfig
from esper_nb.guard.gate import GateConfig, NormHistory, UpdateGate, measure_norm, name_largest, name_nonfinite

pytestmark = pytest.mark.usefixtures("one_thread")

O = torch.optim
OPTIMIZERS = {
    "SGD": lambda p: O.SGD(p, .05), "SGD momentum": lambda p: O.SGD(p, .05, momentum=.9, weight_decay=.1),
    "SGD nesterov foreach": lambda p: O.SGD(p, .05, momentum=.9, nesterov=True, foreach=True),
    "SGD fused": lambda p: O.SGD(p, .05, momentum=.9, fused=True),
    "Adam": lambda p: O.Adam(p, .01), "Adam foreach": lambda p: O.Adam(p, .01, foreach=True, amsgrad=True),
    "Adam fused": lambda p: O.Adam(p, .01, fused=True), "Adam L2": lambda p: O.Adam(p, .01, weight_decay=.1),
    "AdamW": lambda p: O.AdamW(p, .01, weight_decay=.1), "AdamW fused": lambda p: O.AdamW(p, .01, fused=True),
    "AdamW foreach": lambda p: O.AdamW(p, .01, foreach=True),
    "AdamW maximize": lambda p: O.AdamW(p, 1e-3, maximize=True),
    "NAdam": lambda p: O.NAdam(p, .01), "RAdam": lambda p: O.RAdam(p, .01), "Adamax": lambda p: O.Adamax(p, .01),
    "Adadelta": lambda p: O.Adadelta(p), "Adagrad": lambda p: O.Adagrad(p, .05),
    "Adagrad fused": lambda p: O.Adagrad(p, .05, fused=True), "RMSprop": lambda p: O.RMSprop(p, .01, momentum=.9),
    "Rprop": lambda p: O.Rprop(p, .01), "ASGD": lambda p: O.ASGD(p, .05), "Adafactor": lambda p: O.Adafactor(p, .01),
    "Muon": lambda p: O.Muon([q for q in p if q.ndim == 2], .01),
}


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

def batch(i, rows=32):
    g = torch.Generator().manual_seed(i)
    return torch.randn(rows, 6, generator=g), torch.randint(3, (rows,), generator=g)

def backward(net, opt, i, factor=1.):
    "Fresh gradients of a batch; its loss."
    opt.zero_grad()
    x, y = batch(i)
    loss = F.cross_entropy(net(x), y)
    (factor * loss).backward()
    return loss.item()

def spoil(net, value=math.nan): net[0].weight.grad[3, 2] = value

def state_of(net, opt):
    "Weights and everything the optimizer keeps, by name; a copy."
    return copy.deepcopy(dict(net=net.state_dict(), opt=opt.state_dict()))


# --- dropped

@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_dropped_update_has_never_been(name, bad):
    def run(spoilt):
        net = network()
        opt = OPTIMIZERS[name](list(net.parameters()))
        gate, passed = UpdateGate(opt, names=net.named_parameters()), []
        for i in range(8):
            if i in (0, 4) and not spoilt: continue
            backward(net, opt, i)
            before, grads = state_of(net, opt), [p.grad for p in net.parameters()]
            if i in (0, 4): spoil(net, bad)
            seen = [g.clone() for g in grads]
            opt.step()
            passed.append(not same(before, state_of(net, opt)))
            if passed[-1]: continue                                         # some optimizers write into their gradients
            assert all(p.grad is g and same(g, h) for p, g, h in zip(net.parameters(), grads, seen, strict=True))
        return net, opt, gate, passed
    net, opt, gate, passed = run(True)
    clean_net, clean, _, _ = run(False)
    assert passed == [i not in (0, 4) for i in range(8)]
    assert same(state_of(net, opt), state_of(clean_net, clean))
    assert gate.counts == dict(updates=8, dropped=2, scaled=0)
    first, second = gate.take_events()
    assert (first.update, second.update, first.kind, first.parameter) == (0, 4, "dropped", "0.weight")
    assert first.norm is None and "0.weight not finite -> dropped" in str(first)

@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n not in ("Rprop", "ASGD")])
def test_a_healthy_run_keeps_its_bits(name):
    def run(gated):
        net = network()
        opt = OPTIMIZERS[name](list(net.parameters()))
        gate = UpdateGate(opt) if gated else None
        losses = []
        for i in range(60):
            losses.append(backward(net, opt, i))
            opt.step()
        return losses, state_of(net, opt), gate
    (losses, state, gate), (alone, theirs, _) = run(True), run(False)
    assert losses == alone and same(state, theirs)
    assert gate.counts == dict(updates=60, dropped=0, scaled=0) and not gate.take_events()

def test_a_closure_is_looked_at_behind_its_evaluation():
    for positional in (True, False):
        net = network()
        opt = O.AdamW(net.parameters(), .01)
        gate, calls = UpdateGate(opt), []
        for i in range(4):
            def closure(i=i):
                loss = backward(net, opt, i)
                if i == 2: spoil(net)
                calls.append(i)
                return loss
            before = state_of(net, opt)
            loss = opt.step(closure) if positional else opt.step(closure=closure)
            assert loss > 0 and same(before, state_of(net, opt)) == (i == 2)
        assert calls == [0, 1, 2, 3] and gate.counts == dict(updates=4, dropped=1, scaled=0)

@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("bad_call", [0, 2])
def test_a_search_that_ends_in_nothing_finite_is_undone(search, bad_call):
    net = network()
    opt = O.LBFGS(net.parameters(), lr=.1, max_iter=6, line_search_fn=search)
    gate, calls = UpdateGate(opt), 0
    def step(i, bad=False):
        nonlocal calls
        calls = 0
        def closure():
            nonlocal calls
            loss = backward(net, opt, i)
            if bad and calls >= bad_call: spoil(net)
            calls += 1
            return torch.tensor(loss)
        opt.step(closure)
    for i in range(3): step(i)
    before = state_of(net, opt)
    step(3, bad=True)
    assert calls > bad_call
    undone = same(before, state_of(net, opt))
    assert gate.counts["dropped"] == undone
    assert undone or (search and bad_call), "a search may come back from a bad point by itself, to a good one"
    before = state_of(net, opt)
    step(4)
    assert not same(before, state_of(net, opt)) and all(p.isfinite().all() for p in net.parameters())

@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_a_healthy_search_keeps_its_bits(search):
    def run(gated):
        net = network()
        opt = O.LBFGS(net.parameters(), max_iter=6, line_search_fn=search)
        if gated: UpdateGate(opt)
        def closure():
            loss = F.cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            return loss
        losses = []
        for i in range(8):
            x, y = batch(i % 2)
            losses.append(opt.step(closure).item())
        return losses, state_of(net, opt)
    assert same(run(True), run(False))

def test_loops_of_every_kind_find_their_gradients_as_they_were():
    net = network()
    opt = O.Adam(net.parameters(), .01)
    gate = UpdateGate(opt)
    backward(net, opt, 0)
    spoil(net)
    opt.step()
    own = [p.grad for p in net.parameters()]
    opt.zero_grad(set_to_none=False)                                        # zeroes in place, NaN too
    assert all(p.grad is g and not g.any() for p, g in zip(net.parameters(), own, strict=True))
    for i in range(3):                                                      # three micro-batches, one of them spoilt
        x, y = batch(i)
        F.cross_entropy(net(x), y).backward()
        if i == 1: spoil(net)
    before = state_of(net, opt)
    opt.step()
    assert same(before, state_of(net, opt))
    for i in range(3):                                                      # nobody clears: it stays, and is counted
        x, y = batch(i)
        F.cross_entropy(net(x), y).backward()
        opt.step()
    assert [e.row for e in gate.take_events()] == [1, 2, 3, 4, 5] and same(before, state_of(net, opt))

def test_schedules_go_on_without_a_warning():
    net = network()
    opt = O.SGD(net.parameters(), .1)
    clock = O.lr_scheduler.StepLR(opt, 1, .5)
    UpdateGate(opt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(net, opt, 0)
        spoil(net)
        opt.step()
        clock.step()
    assert opt.param_groups[0]["lr"] == .05

def test_every_optimizer_and_every_group_for_itself():
    net = network()
    first = O.SGD([dict(params=[net[0].weight], lr=.1), dict(params=[net[0].bias], lr=.2)], momentum=.9)
    second = O.Adam(net[2].named_parameters(), .1)
    gate = UpdateGate(first, second)
    backward(net, first, 0)
    second.zero_grad()
    x, y = batch(0)
    F.cross_entropy(net(x), y).backward()
    before = copy.deepcopy(net.state_dict())
    net[0].bias.grad[0] = math.nan
    first.step()
    second.step()
    assert [not torch.equal(before[k], v) for k, v in net.state_dict().items()] == [False, False, True, True]
    net[2].bias.grad[1] = math.inf
    second.step()
    assert [(e.optimizer, e.parameter) for e in gate.take_events()] == [(0, "parameter 0 of group 1"), (1, "bias")]

def test_sparse_complex_and_half_gradients():
    table = nn.Embedding(10, 4, sparse=True)
    opt = O.SparseAdam(table.parameters(), .1)
    gate = UpdateGate(opt)
    def step(bad):
        opt.zero_grad()
        (table(torch.tensor([1, 1, 3])) * (math.nan if bad else 1.)).sum().backward()
        before = dict(w=table.weight.detach().clone(), s=copy.deepcopy(opt.state_dict()))
        opt.step()
        return same(before, dict(w=table.weight.detach(), s=opt.state_dict()))
    assert [step(bad) for bad in (False, True, False)] == [False, True, False]
    assert gate.counts["dropped"] == 1
    z = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    z.grad = torch.tensor([3 + 4j, 0, 0])
    assert measure_norm([z.grad]) == 5
    w = nn.Parameter(torch.ones(1))
    w.grad = torch.tensor([4.])
    assert name_largest(O.SGD([w, z], .1), {}) == "parameter 1 of group 0" # by its imaginary part, too
    z.grad[1] = complex(0, math.nan)
    assert name_nonfinite(O.SGD([z], .1), {}) == "parameter 0 of group 0"
    for dtype, size in ((torch.float16, 6e4), (torch.bfloat16, 1e18)):
        assert math.isfinite(measure_norm([torch.full((100,), size, dtype=dtype)]))
        assert not math.isfinite(measure_norm([torch.tensor([1., math.inf], dtype=dtype)]))

def test_a_compiled_step_is_gated_too():
    net = network()
    opt = O.Adam(net.parameters(), .01)
    gate, step = UpdateGate(opt), torch.compile(opt.step, backend="eager")
    for i in range(3):
        backward(net, opt, i)
        if i == 1: spoil(net)
        before = state_of(net, opt)
        step()
        assert same(before, state_of(net, opt)) == (i == 1)
    assert gate.counts == dict(updates=3, dropped=1, scaled=0)


# --- scaled

def train(net, opt, steps, huge=(), factor=1e6):
    for i in steps:
        backward(net, opt, i, factor if i in huge else 1.)
        opt.step()

@pytest.mark.parametrize("name", ["SGD momentum", "AdamW fused", "Adam foreach", "Muon"])
def test_a_huge_gradient_is_halved_until_it_is_usual(name):
    net = network()
    opt = OPTIMIZERS[name](list(net.parameters()))
    gate = UpdateGate(opt)
    train(net, opt, range(50))
    usual = next(iter(gate.sides.values())).history.usual
    twin, other = copy.deepcopy(net), None
    other = OPTIMIZERS[name](list(twin.parameters()))
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    backward(net, opt, 50, 1e6)
    own = [p.grad for group in opt.param_groups for p in group["params"]]
    norm = measure_norm(own)
    opt.step()
    event, = gate.take_events()
    assert event.kind == "scaled" and event.norm == norm and event.limit == 32 * usual
    assert math.frexp(event.factor)[0] == .5 and usual / 2 < norm * event.factor <= usual
    backward(twin, other, 50, 1e6)
    for p in twin.parameters(): p.grad.mul_(event.factor)
    other.step()
    assert same(state_of(net, opt), state_of(twin, other))

def test_nothing_is_scaled_in_the_warm_up_or_where_it_is_not_wanted():
    for config, start in ((GateConfig(), 3), (GateConfig(limit=None), 50)):
        net = network()
        opt = O.SGD(net.parameters(), 1e-9)
        gate = UpdateGate(opt, config=config)
        train(net, opt, range(start + 1), huge=[start])
        assert gate.counts == dict(updates=start + 1, dropped=0, scaled=0)
    net = network()
    opt = O.SGD(net.parameters(), .1)
    gate = UpdateGate(opt, config=GateConfig(drop=False))
    backward(net, opt, 0)
    spoil(net)
    opt.step()
    assert net[0].weight.isnan().any() and not gate.take_events()
    assert gate.counts == dict(updates=1, dropped=0, scaled=0)

@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-30, 1e30), min_size=1, max_size=300), st.sampled_from([16, 48]))
def test_what_is_scaled_is_usual_then_and_what_is_not_was_below_the_limit(norms, warmup):
    history = NormHistory(GateConfig(warmup=warmup))
    for t, norm in enumerate(norms):
        usual, limit = history.usual, history.limit
        halvings = history.judge(norm)
        assert (usual is None) == (t < warmup) and (halvings > 0) == (norm > limit)
        if halvings: assert usual / 2.001 < norm * 2.**-halvings <= usual * 1.001
        if halvings: assert history.limit <= 2 * 2 * usual, "an alarm: twice the usual, which may have doubled"

def test_one_huge_norm_leaves_no_trace_and_a_new_level_is_learnt():
    history = NormHistory(GateConfig())
    for _ in range(64): history.judge(1.)
    assert history.judge(1e9) == 30 and history.limit == 2
    for _ in range(400): assert history.judge(1.) == 0
    assert history.usual == 1 and history.limit == 10, "five times 2, the least unevenness"
    scaled = [history.judge(1000.) for _ in range(300)]
    assert scaled[0] == 10 and scaled[-1] == 0 and sum(map(bool, scaled)) < 16 * 11
    assert [history.judge(0.), history.judge(1000.)] == [0, 0]

def test_an_uneven_run_keeps_a_wide_limit_and_a_calm_one_does_not():
    def limit_of(norms):
        history = NormHistory(GateConfig())
        assert not any(history.judge(norm) for norm in norms)
        return history.limit / history.usual
    assert limit_of([1.] * 255) == 32 and limit_of([1.] * 256) == 10
    assert limit_of([1.] * 40 + [7.] + [1.] * 400) == 32, "5 × 7 is above"
    assert limit_of([1.] * 40 + [3.] + [1.] * 400) == 15, "the record of the run, even when it is long ago"
    assert limit_of([1. + 3. * (i < 32) for i in range(256)]) == 20, "blocks from 4 to 1"

def test_zero_gradients_say_nothing():
    history = NormHistory(GateConfig())
    for i in range(200): history.judge(float(i % 3 == 0))
    assert history.usual == 1 and history.seen == 67


# --- scalers

def scaler_run(gated, fused, spoilt=(), steps=12):
    net = network()
    opt = O.Adam(net.parameters(), .01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.**10, growth_interval=4)
    gate = UpdateGate(opt) if gated else None
    for i in range(steps):
        opt.zero_grad()
        x, y = batch(i)
        scaler.scale(F.cross_entropy(net(x), y)).backward()
        if i in spoilt: spoil(net, math.inf)
        scaler.step(opt)
        scaler.update()
    return dict(state_of(net, opt), scale=scaler.get_scale()), gate

@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_skips_by_itself_and_nothing_is_counted(fused):
    spoilt, gate = scaler_run(True, fused, spoilt=[3, 7])
    alone, _ = scaler_run(False, fused, spoilt=[3, 7])
    assert same(spoilt, alone)
    assert gate.counts == dict(updates=10, dropped=0, scaled=0) and not gate.take_events()
    assert next(iter(gate.sides.values())).history.peak < 10, "the scale is not part of the norm"

def test_a_scaler_that_grows_is_no_change_of_the_norm():
    def peaks(fused):
        _, gate = scaler_run(True, fused, steps=40)
        return next(iter(gate.sides.values())).history.peaks
    assert peaks(True) == pytest.approx(peaks(False), rel=1e-4)


# --- a norm that is known already

def test_an_offered_norm_is_taken_once():
    net = network()
    opt = O.Adam(net.parameters(), .01)
    gate = UpdateGate(opt)
    history = next(iter(gate.sides.values())).history
    for i in range(40):
        backward(net, opt, i)
        gate.offer(nn.utils.clip_grad_norm_(net.parameters(), .01), clipped=True)
        opt.step()
    assert history.usual > .1, "the norm from before the clip"
    for clipped in (True, False):
        backward(net, opt, 41)
        gate.offer(1e5, clipped)
        opt.step()
        assert gate.counts["scaled"] == (not clipped)
    backward(net, opt, 42)
    spoil(net)
    opt.step()
    assert gate.counts["dropped"] == 1, "an offer holds for one update"
    backward(net, opt, 43)
    gate.offer(torch.tensor(math.inf))
    opt.step()
    assert gate.counts["dropped"] == 1, "a norm that is not finite is measured again"


# --- state

def test_the_state_goes_through_a_file(tmp_path):
    net = network()
    opt = O.SGD(net.parameters(), .1)
    gate = UpdateGate(opt)
    train(net, opt, range(50), huge=[40])
    torch.save(gate.state_dict(), tmp_path/"gate.pt")
    other = UpdateGate(opt)
    other.load_state_dict(torch.load(tmp_path/"gate.pt", weights_only=True))
    assert other.state_dict() == gate.state_dict() and other.counts == gate.counts
    with pytest.raises(ValueError, match="optimizers=1, expected 2"):
        UpdateGate(opt, O.SGD(net.parameters())).load_state_dict(gate.state_dict())

def test_it_can_be_off_and_it_can_be_closed():
    net = network()
    opt = O.SGD(net.parameters(), .1)
    with UpdateGate(opt) as gate:
        with gate.off(), gate.off(): train(net, opt, range(3))
        assert gate.counts["updates"] == 0
        train(net, opt, range(3))
        assert gate.counts["updates"] == 3
    backward(net, opt, 3)
    spoil(net)
    opt.step()
    assert net[0].weight.isnan().any() and gate.counts["updates"] == 3

def test_events_are_bounded_and_counts_are_not():
    net = network()
    opt = O.SGD(net.parameters(), .1)
    gate = UpdateGate(opt, config=GateConfig(keep=5))
    for i in range(9):
        backward(net, opt, i)
        spoil(net)
        opt.step()
    assert [e.update for e in gate.take_events()] == [4, 5, 6, 7, 8] and gate.take_events() == []
    assert gate.counts["dropped"] == 9

def test_a_step_that_raises_leaves_nothing_for_the_next_one():
    class Broken(O.SGD):
        broken = False
        @torch.no_grad()
        def step(self, closure=None):
            if self.broken: raise RuntimeError("broken")
            return super().step(closure)
    net = network()
    opt = Broken(net.parameters(), .1)
    gate = UpdateGate(opt)
    backward(net, opt, 0)
    spoil(net)
    opt.broken = True
    with pytest.raises(RuntimeError, match="broken"): opt.step()
    opt.broken = False
    backward(net, opt, 1)
    fresh = [p.grad for p in net.parameters()]
    opt.step()
    assert all(p.grad is g for p, g in zip(net.parameters(), fresh, strict=True)) and gate.counts["dropped"] == 1


# --- ranks

def rank_of(rank, world, tell, kind):
    net = network()
    if kind == "ddp":
        model, group = nn.parallel.DistributedDataParallel(net), None
    elif kind == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        model, group = fully_shard(net, mesh=init_device_mesh("cpu", (2,))), None
    else: model, group = net, torch.distributed.group.WORLD # each rank for itself, decisions as one
    opt = O.AdamW(model.parameters(), .01)
    gate, moved = UpdateGate(opt, names=net.named_parameters(), group=group), []
    def weights():
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
        return [p.detach().clone() for p in whole]
    for i in range(60):
        x, y = batch(2 * i + rank)
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y) * (1e6 if i == 55 else 1.)
        if i == 50 and rank == 1: loss = loss * math.nan
        loss.backward()
        before = weights()
        opt.step()
        moved.append(not same(before, weights()))
    tell(([w.tolist() for w in weights()], [tuple(e) for e in gate.take_events()], moved))

@pytest.mark.parametrize("kind", ["ddp", "fsdp", "alone"])
def test_ranks_decide_alike(kind, tmp_path):
    (weights, events, moved), (theirs, others, _) = fork_ranks(rank_of, 2, tmp_path, kind)
    if kind != "alone": assert weights == theirs
    assert [(e[1], e[2], e[5]) for e in events] == [(e[1], e[2], e[5]) for e in others]
    assert [(e[1], e[2]) for e in events] == [(50, "dropped"), (55, "scaled")]
    assert [i for i, m in enumerate(moved) if not m] == [50]


# --- devices

@pytest.mark.cuda
def test_on_a_device(machine):
    net = network().cuda()
    opt = O.Adam(net.parameters(), .01)
    gate = UpdateGate(opt, names=net.named_parameters())
    for i in range(40):
        x, y = batch(i)
        opt.zero_grad()
        loss = F.cross_entropy(net(x.cuda()), y.cuda()) * (1e6 if i == 38 else 1.)
        loss.backward()
        if i == 10: spoil(net)
        opt.step()
    first, second = gate.take_events()
    assert (first.update, first.parameter) == (10, "0.weight") and (second.update, second.kind) == (38, "scaled")
    assert all(p.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("settings, said", [
    (dict(limit=1.), "limit=1.0, expected a multiple of at least strict=2.0"), (dict(strict=.5), "strict=0.5"),
    (dict(warmup=0), "warmup=0, expected a whole number of at least 1"), (dict(block=0), "block=0")])
def test_settings_are_checked(settings, said):
    with pytest.raises(ValueError, match=said): GateConfig(**settings)
    with pytest.raises(ValueError, match="at least one"): UpdateGate()


def test_a_huge_gradient_among_the_first_updates_is_scaled_and_named():
    "From the fifth update on the largest so far is the usual one."
    net = network()
    opt = O.SGD(net.parameters(), 1e-9)
    gate = UpdateGate(opt, names=net.named_parameters())
    train(net, opt, range(5), huge=[4])
    event, = gate.take_events()
    assert event.kind == "scaled" and event.update == 4 and event.parameter in dict(net.named_parameters())
    with torch.no_grad():
        sizes = {name: p.grad.norm().item() for name, p in net.named_parameters()}
    assert event.parameter == max(sizes, key=sizes.get)

def test_a_governor_that_is_collected_during_a_step_does_not_end_it():
    "As in a notebook whose cell was run again: the collector ends the old Governor whenever it likes."
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    opt = torch.optim.SGD(net.parameters(), lr=.1)
    def steps(governor, count):
        for _ in range(count):
            governor.watch(update(opt, net(torch.randn(8, 4)).square().mean()))
    config = GovernorConfig(background=True)
    def given_up(): steps(Governor(net, opt, chance_loss=None, config=config), 3)
    def collect(*_): gc.collect()
    governor = Governor(net, opt, chance_loss=None)
    handles = [register(f) for register in (opt.register_step_pre_hook, opt.register_step_post_hook)
               for f in (collect, lambda *_: None)]
    before = [len(h.hooks_dict_ref()) for h in handles]
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            given_up()
            steps(governor, 2)
    finally: gc.enable()
    Governor(net, opt, chance_loss=None)
    gc.collect()
    after = [len(h.hooks_dict_ref()) for h in handles]
    assert all(b <= a + 4 for a, b in zip(before, after)) # of the latest one at most


# --- second order

class Curved(torch.optim.Optimizer):
    "Differentiates the gradients once more, as AdaHessian does."
    def __init__(self, params): super().__init__(params, dict(lr=.05))
    def step(self, closure=None):
        params = [p for g in self.param_groups for p in g["params"]]
        if not all(p.grad.grad_fn for p in params): raise RuntimeError("create_graph=True is missing")
        curves = torch.autograd.grad([p.grad.sum() for p in params], params)
        for p, h in zip(params, curves, strict=True):
            self.state[p]["curve"] = h.abs() + self.state[p].get("curve", 0.)
            p.data -= .05 * p.grad.detach() / (1 + self.state[p]["curve"])

@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_an_update_of_second_order_is_dropped_without_an_error():
    net = network()
    opt = Curved(net.parameters())
    gate = UpdateGate(opt)
    for i, bad in enumerate([False, True, False]):
        x, y = batch(i)
        opt.zero_grad()
        F.cross_entropy(net(x * math.nan if bad else x), y).backward(create_graph=True)
        before = state_of(net, opt)
        opt.step()
        assert same(state_of(net, opt), before) == bad
    assert gate.counts == dict(updates=3, dropped=1, scaled=0)
