"Snapshots: exact, never aliased, never lost, for every kind of state and every mixture of lanes."
import copy, math, random, signal, threading, time, tracemalloc
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn
from tiny import update

from esper_nb.core import by_lane, LaneLinear, pack_tree, unpack_tree
from esper_nb.guard import Governor, LiveState, Snapshot, StateBanks, snapshots as page
from esper_nb.guard.recorder import at_share
from esper_nb.guard.replay import share_of_rate
from esper_nb.guard.snapshots import BackgroundCopy, forget_state
from esper_nb.train import LaneOptimizer, LaneScaler, Stepper


pytestmark = pytest.mark.usefixtures("one_thread")


# --- the next 50 steps after a rollback are those of a run that never failed

class Run:
    "A small run with everything that can have state: dropout, augmentation from three libraries, batch norm, a cursor."
    def __init__(self, kind, device="cpu"):
        torch.manual_seed(0); random.seed(0); np.random.seed(0)
        self.device, self.kind = device, kind
        self.net = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2),
                                 nn.Flatten(), nn.Linear(6 * 36, 3)).to(device, memory_format=torch.channels_last)
        heads, body = list(self.net[5].parameters()), list(self.net[0].parameters()) + list(self.net[1].parameters())
        make = dict(
            sgd=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
            adam=lambda p: torch.optim.Adam(p, lr=2e-3),
            amsgrad=lambda p: torch.optim.Adam(p, lr=2e-3, amsgrad=True),
            nesterov=lambda p: torch.optim.SGD(p, lr=torch.tensor(0.05), momentum=0.9, nesterov=True),
            rmsprop=lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
            adamw=lambda p: torch.optim.AdamW(p, lr=2e-3),
            lbfgs=lambda p: torch.optim.LBFGS(p, lr=0.05, max_iter=2, history_size=4),
        )
        name = "adamw" if kind in ("scheduled", "onecycle", "plateau") else "sgd" if kind in ("fp16", "two") else kind
        self.opts = [make[name](body), make["adam"](heads)] if kind == "two" else [make[name](body + heads)]
        self.scaler = torch.amp.GradScaler(device, init_scale=2.**14, growth_interval=5) if kind == "fp16" else None
        sched = torch.optim.lr_scheduler
        self.sched = dict(
            scheduled=lambda o: sched.SequentialLR(
                o, [sched.LinearLR(o, 0.1, total_iters=5), sched.CosineAnnealingLR(o, 60)], [5]
            ),
            onecycle=lambda o: sched.OneCycleLR(o, 0.01, total_steps=200),
            plateau=lambda o: sched.ReduceLROnPlateau(o, patience=2),
        ).get(kind, lambda o: None)(self.opts[0])
        self.cursor, self.generator = dict(t=0), torch.Generator().manual_seed(4)
        self.x, self.y = torch.randn(64, 1, 6, 6), torch.randint(0, 3, (64,))

    def snapshot(self, **kw):
        parts = [self.net, *self.opts, *([self.scaler] if self.scaler else []), *([self.sched] if self.sched else [])]
        return Snapshot(*parts, cursor=self.cursor, order=self.generator, **kw)

    def step(self, corrupt=1.):
        i = torch.randint(0, 64, (16,), generator=self.generator)
        x = self.x[i].roll(random.randint(-1, 1), 3) + float(np.random.normal(0, .05)) + .1 * torch.randn(16, 1, 6, 6)
        x, y = x.to(self.device), self.y[i].to(self.device)
        self.cursor["t"] += 1
        def closure():
            for o in self.opts: o.zero_grad()
            with torch.autocast(self.device, torch.float16, enabled=self.scaler is not None):
                loss = F.cross_entropy(self.net(x).float(), y)
            loss = loss * corrupt
            (self.scaler.scale(loss) if self.scaler else loss).backward()
            return loss
        if self.kind == "lbfgs": loss = self.opts[0].step(closure)
        else:
            loss = closure()
            for o in self.opts: self.scaler.step(o) if self.scaler else o.step()
            if self.scaler: self.scaler.update()
        if self.sched: self.sched.step(*([loss.item()] if self.kind == "plateau" else []))
        return loss.item()

KINDS = ["sgd", "nesterov", "adam", "amsgrad", "adamw", "rmsprop", "lbfgs", "scheduled", "onecycle", "plateau",
         "fp16", "two"]

def whole_state(run):
    "Everything as comparable plain data."
    tensors = {}
    for name, part in run.snapshot().parts.items():
        part.read(tensors_of := {})
        tensors |= {f"{name}.{k}": v.clone() for k, v in tensors_of.items()}
    return tensors

def assert_same_state(a, b):
    assert a.keys() == b.keys()
    for k in a: assert torch.equal(a[k], b[k]), k

@pytest.mark.parametrize("kind, warm", [*((kind, 7) for kind in KINDS), *(
    (kind, 0) for kind in ("adam", "lbfgs", "onecycle", "fp16", "two"))]) # steps before the snapshot
def test_fifty_steps_after_a_rollback_are_bit_equal(kind, warm):
    clean, run = Run(kind), Run(kind)
    for _ in range(warm): clean.step()
    expected = [clean.step() for _ in range(50)]
    run = Run(kind)                                                      # the same seeds from the start
    for _ in range(warm): run.step()
    snap, ids = run.snapshot(), [id(p) for p in run.net.parameters()]
    snap.take(step=warm)
    before = whole_state(run)
    for _ in range(5): run.step(corrupt=1e4)
    if kind != "lbfgs": run.net[0].weight.data.fill_(float("nan"))
    snap.restore()
    assert snap.difference() == {}
    assert_same_state(whole_state(run), before)
    assert [id(p) for p in run.net.parameters()] == ids
    assert [run.step() for _ in range(50)] == expected
    snap.restore()                                                       # the snapshot did not move with the run
    assert_same_state(whole_state(run), before)
    assert [run.step() for _ in range(50)] == expected

def test_a_scaler_interrupted_in_the_middle_of_a_step_can_step_again():
    run = Run("fp16")
    for _ in range(3): run.step()
    snap = run.snapshot(); snap.take()
    run.scaler.scale(run.net(run.x[:16]).sum()).backward()
    run.scaler.unscale_(run.opts[0])
    snap.restore()
    run.step()

def test_gradients_are_dropped_or_kept():
    for keep in (False, True):
        run = Run("sgd")
        run.net(run.x).sum().backward()
        grads = [p.grad.clone() for p in run.net.parameters()]
        snap = run.snapshot(grads=keep); snap.take()
        run.net(run.x).sum().backward()
        snap.restore()
        if keep: assert all(torch.equal(p.grad, g) for p, g in zip(run.net.parameters(), grads))
        else: assert not any(p.grad.any() for p in run.net.parameters()) # a loop may go on to scale them


# --- structure

def test_growth_pruning_and_replaced_tensors_are_undone():
    net, opt = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), None
    opt = torch.optim.Adam(net.parameters())
    def step(): opt.zero_grad(); net(torch.ones(3, 4)).square().sum().backward(); opt.step()
    step()
    snap = Snapshot(net, opt); snap.take()
    last, names = net[2], list(dict(net.named_parameters()))
    net.add_module("seed", nn.Linear(2, 2)); opt.add_param_group(dict(params=net.seed.parameters(), lr=.3)); step()
    net[0].register_buffer("scratch", torch.ones(2)); net[0].weight.data = torch.ones(5, 4)
    net[2] = nn.Identity(); net[0].bias.requires_grad_(False); net.eval()
    snap.restore()
    assert (net[2] is last and list(dict(net.named_parameters())) == names and len(opt.param_groups) == 1
            and len(opt.state) == 4)
    assert (net[0].weight.shape == (4, 4) and net.training and all(p.requires_grad for p in net.parameters())
            and "scratch" not in dict(net[0].named_buffers()))
    assert snap.difference() == {}
    step()

def test_a_module_that_grew_before_the_snapshot_is_kept():
    net = nn.Sequential(nn.Linear(4, 4))
    opt = torch.optim.SGD(net.parameters(), lr=.1, momentum=.9)
    snap = Snapshot(net, opt); snap.take(step=0)
    net.add_module("seed", nn.Linear(4, 2)); opt.add_param_group(dict(params=net.seed.parameters()))
    def step(): opt.zero_grad(); net(torch.ones(3, 4)).square().sum().backward(); opt.step()
    step()
    snap.take(step=1)
    kept = [p.detach().clone() for p in net.parameters()]
    step()
    assert snap.restore().steps == (1,) and len(net) == 2
    assert all(torch.equal(a, b) for a, b in zip(kept, net.parameters()))

def test_parts_that_came_later():
    net = nn.Linear(2, 2)
    snap = Snapshot(net); snap.take(step=0)
    late = dict(a=1)
    snap.add(late=late)
    assert "late" in snap.restore().left
    snap.take(step=1); late["a"] = 2; snap.restore()
    assert late == {"a": 1}
    with pytest.raises(ValueError, match="late"): snap.add(late={})

class Odd(nn.Module):
    "Non-persistent buffers, extra state, a mask of infinities, tied weights, a parameterless child."
    def __init__(self):
        super().__init__()
        self.a, self.b, self.act = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.ReLU()
        self.b.weight = self.a.weight
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))
        self.table = {"stage": [1, 2], "alpha": torch.zeros(2)}
    def get_extra_state(self): return self.table
    def set_extra_state(self, state): self.table = state

def test_odd_modules():
    net = Odd()
    snap = Snapshot(net); snap.take()
    net.seen += 1
    net.seen = net.seen + 1
    net.table["stage"][0] = 5
    net.table["alpha"] += 1
    net.a.weight.data.zero_()
    assert len(snap.difference()) >= 3
    snap.restore()
    assert (net.seen == 0 and net.table["stage"] == [1, 2] and net.table["alpha"].tolist() == [0, 0]
            and net.b.weight is net.a.weight)
    assert snap.take().published, "a mask of infinities is not a ruin"
    net.mask[0, 0] = float("nan")
    assert snap.take().bad == ("model.mask",)

@pytest.mark.parametrize("part", [nn.Flatten(), torch.Generator(), np.random.default_rng(0), random.Random(0),
                                  {"a": [1, torch.ones(2)]}, [1, 2]], ids=lambda p: type(p).__name__)
def test_all_kinds_of_parts(part):
    draw = {torch.Generator: lambda g: torch.rand(3, generator=g).tolist(), np.random.Generator: lambda g: g.normal(),
            random.Random: lambda r: r.gauss(0, 1), dict: lambda d: (d.update(b=3), d["a"][1].add_(1).tolist())[1],
            list: lambda x: x.append(3) or len(x), nn.Flatten: lambda m: 0}[type(part)]
    snap = Snapshot(thing=part, streams=False); snap.take()
    first = [draw(part) for _ in range(3)]
    snap.restore()
    assert [draw(part) for _ in range(3)] == first

def test_a_pair_of_functions_is_a_part():
    box = [3]
    snap = Snapshot(box=(lambda: box[0], lambda v: box.__setitem__(0, v))); snap.take()
    box[0] = 9; snap.restore()
    assert box == [3]

def test_errors_name_the_fix():
    with pytest.raises(ValueError, match="state_dict"): Snapshot(3)
    with pytest.raises(RuntimeError, match="take"): Snapshot(nn.Linear(1, 1)).restore()
    bad = nn.Linear(2, 2); bad.weight.data[0] = float("inf")
    with pytest.raises(RuntimeError, match="model.weight"): Snapshot(bad).take()
    snap = Snapshot(nn.Linear(2, 2)); snap.take()
    with pytest.raises(ValueError, match="model"): snap.restore(skip=["modle"])
    with pytest.raises(ValueError, match="lanes"): snap.take(lanes=[1])

@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("size", [1, 9, 2**15], ids=str)
def test_a_state_is_good_if_every_number_is_finite(dtype, size):
    "A sum that overflows says nothing, and infinities of both signs do not cancel."
    state = {name: torch.ones(size, dtype=dtype) for name in ("large", "nan", "both")} | dict(count=torch.tensor(3))
    snapshot = Snapshot(state=state)
    snapshot.take() # from the second one on the copies are looked at while they are made
    state["large"].fill_(torch.finfo(dtype).max / 2)
    assert snapshot.take().published
    state["nan"][-1] = math.nan
    state["both"][0], state["both"][-1] = -math.inf, math.inf
    found = snapshot.take()
    assert (found.published, found.bad) == (False, ("state.nan", "state.both"))
    snapshot.restore()
    assert all(torch.equal(state[k], torch.full_like(state[k], x)) for k, x in dict(
        large=torch.finfo(dtype).max / 2, nan=1, both=1, count=3).items())

def test_norms_of_weights_are_those_of_networks_and_no_other_part_is_read():
    class Read:
        times = 0
        def state_dict(self):
            self.times += 1
            return dict(weight=torch.full((4,), 100.))
        def load_state_dict(self, state): pass
    net, other = nn.Linear(3, 2), Read()
    snapshot = Snapshot(net, other=other)
    snapshot.take()
    then, before = torch.cat([p.detach().flatten() for p in net.parameters()]).norm().item(), other.times
    with torch.no_grad():
        for p in net.parameters(): p.mul_(2.)
    assert snapshot.weight_norms() == pytest.approx((2 * then, then)) and other.times == before

def test_skip_leaves_streams_and_cursor_alone():
    run = Run("sgd"); snap = run.snapshot(); snap.take()
    run.step(); run.step()
    stream = torch.get_rng_state()
    done = snap.restore(skip=("streams", "cursor"))
    assert (
        run.cursor["t"] == 2 and torch.equal(torch.get_rng_state(), stream) and set(done.left) == {"streams", "cursor"}
    )


# --- never without a good state

class Bomb:
    "Explodes at the n-th reading."
    def __init__(self): self.fuse = -1
    def state_dict(self):
        self.fuse -= 1
        if self.fuse == 0: raise KeyboardInterrupt
        return dict(t=torch.ones(3))
    def load_state_dict(self, state): pass

@pytest.mark.parametrize("where", ["read", "allocate", "copy"])
def test_a_snapshot_that_fails_half_way_leaves_the_previous_one(where, monkeypatch):
    run, bomb = Run("adam"), Bomb()
    run.step()
    snap = Snapshot(run.net, *run.opts, bomb=bomb); snap.take(step=1); snap.take(step=1)
    good = whole_state(run)
    run.step()
    if where == "read": bomb.fuse = 1
    if where == "allocate":
        run.net.add_module("grown", nn.Linear(3, 3))
        monkeypatch.setattr(torch, "empty_like", lambda *a, **k: (_ for _ in ()).throw(MemoryError("no room")))
    if where == "copy":
        def half(pairs):
            for to, t in pairs[:3]: to.copy_(t)
            raise KeyboardInterrupt
        monkeypatch.setattr(page, "_copy_and_check", half)
    with pytest.raises((KeyboardInterrupt, MemoryError)): snap.take(step=2)
    monkeypatch.undo()
    assert snap.restore().steps == (1,)
    now = whole_state(run)
    assert all(torch.equal(good[k], now[k]) for k in good if not k.startswith(("streams", "order", "cursor")))

class Button:
    "A part during whose restoration somebody presses stop."
    presses = 0
    def state_dict(self): return dict(t=torch.ones(3))
    def load_state_dict(self, state):
        for _ in range(self.presses): signal.raise_signal(signal.SIGINT)

def test_an_interrupt_leaves_no_half_of_a_good_state(plain_signals):
    run, button = Run("adam"), Button()
    run.step()
    snap = Snapshot(button, run.net, *run.opts); snap.take(step=1)
    good = whole_state(run)
    run.step()
    aside = snap.set_aside()
    later = whole_state(run)
    button.presses = 1
    with pytest.raises(KeyboardInterrupt): snap.restore()
    now = whole_state(run)
    assert all(torch.equal(good[k], now[k]) for k in good if not k.startswith(("streams", "order", "cursor")))
    with pytest.raises(KeyboardInterrupt): snap.bring_back(aside)
    now = whole_state(run)
    assert all(torch.equal(later[k], now[k]) for k in later if not k.startswith(("streams", "order", "cursor")))
    button.presses = 2 # who presses twice does not wait
    with pytest.raises(KeyboardInterrupt): snap.restore()
    assert any(not torch.equal(good[k], t) for k, t in whole_state(run).items() if not k.startswith("streams"))

def test_a_hundred_snapshots_add_no_memory():
    run = Run("adam"); run.step(); snap = run.snapshot()
    for _ in range(3): run.step(); snap.take()
    def held(): return {id(t) for bank in snap.banks.memory for t in bank.values()}
    before, ids = snap.nbytes, held()
    tracemalloc.start(); base = tracemalloc.get_traced_memory()[0]
    for _ in range(100): snap.take()
    grown = tracemalloc.get_traced_memory()[0] - base; tracemalloc.stop()
    assert snap.nbytes == before and held() == ids and grown < 300_000
    size = sum(t.nbytes for t in whole_state(run).values())
    assert snap.nbytes == 2 * size

def test_buffers_of_state_that_is_gone_are_freed():
    net = nn.Sequential(nn.Linear(2, 2)); snap = Snapshot(net); snap.take(); snap.take(); small = snap.nbytes
    net.add_module("big", nn.Linear(100, 100)); snap.take(); snap.take(); assert snap.nbytes > small
    del net.big; snap.take(); snap.take(); assert snap.nbytes == small

TENSORS = st.lists(st.integers(-5, 5), max_size=4).map(torch.tensor)
LEAVES = st.none() | st.integers() | st.floats(allow_nan=False) | st.text() | TENSORS
KEYS = st.text(max_size=4) | st.integers()

@settings(deadline=None, max_examples=25)
@given(st.recursive(LEAVES, lambda s: st.lists(s, max_size=4) | st.dictionaries(KEYS, s, max_size=4) | st.tuples(s, s),
                    max_leaves=12))
def test_trees_come_back_as_they_were(tree):
    found = {}
    packed = pack_tree(tree, found)
    back = unpack_tree(packed, lambda leaf: found[leaf.path])
    def same(a, b):
        if isinstance(a, torch.Tensor): return torch.equal(a, b)
        if isinstance(a, dict): return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
        if isinstance(a, (list, tuple)): return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
        return a == b
    assert same(tree, back) or len(found) < str(tree).count(
        "tensor("
    )  # two keys may print alike: then a path is shared


# --- lanes

N = 4

class LaneRun:
    def __init__(self, kind="sgd", n=N):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.net = nn.Sequential(LaneLinear(5, 8, n=n), nn.Tanh(), LaneLinear(8, 3, n=n))
        options = dict(momentum=.9) if kind == "sgd" else {}
        self.stepper = Stepper({"host": LaneOptimizer(self.net.named_parameters(), n, kind, 0.05, **options)},
                               LaneScaler(n))
        self.n, self.t = n, 0

    def snapshot(self): return Snapshot(self.net, self.stepper, lanes=self.n)

    def step(self):
        g = torch.Generator().manual_seed(self.t); self.t += 1
        x, y = torch.randn(8, 5, generator=g).repeat(1, self.n), torch.randn(8, 1, 3, generator=g)
        self.stepper.backward((self.net(x).unflatten(1, (self.n, 3)) - y).square().mean((0, 2)))
        self.stepper.step()

    def lane(self, i):
        return [
            by_lane(t.detach(), self.n)[i].clone()
            for t in [*self.net.parameters(), *(t if t.ndim else t.view(1) for t in self.stepper.state_dict().values())]
        ]

def equal(a, b): return all(torch.equal(x, y) for x, y in zip(a, b))

@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("lanes", [[2], [0, 3], [0, 1, 2, 3]])
def test_rows_go_back_and_the_others_go_on(kind, lanes):
    run, free, never = LaneRun(kind), LaneRun(kind), LaneRun(kind)
    snap = run.snapshot()
    snap.take(step=0)  # Adam's moments exist from the start in a LaneOptimizer
    for _ in range(6): run.step(); free.step(); never.step()
    snap.take(step=6)
    saved = [run.lane(i) for i in range(N)]
    for _ in range(5):
        for i in lanes: by_lane(run.net[0].weight.data, N)[i] *= 5
        run.step(); free.step()
    snap.restore(lanes=lanes)
    for i in range(N): assert equal(run.lane(i), saved[i] if i in lanes else free.lane(i))
    run.t = 6
    for _ in range(50): run.step(); never.step()
    for i in lanes: assert equal(run.lane(i), never.lane(i)), "50 steps after the rollback"

def test_what_a_lane_cannot_get_back_alone_is_named():
    net = torch.nn.Linear(3, N)
    net.register_buffer("seen", torch.zeros(N))
    snap = Snapshot(lanes=N, model=net)
    snap.take()
    del net.seen
    assert snap.restore(lanes=[1]).kept == ("model: seen",)
    assert snap.restore().kept == () and net.seen.shape == (N,)

def test_a_bad_lane_is_refused_alone():
    run = LaneRun(); snap = run.snapshot(); snap.take(step=0)
    run.step(); by_lane(run.net[2].bias.data, N)[1] = float("nan")
    taken = snap.take(step=1)
    assert taken.refused == (1,) and taken.lanes == (0, 2, 3) and taken.bad == ("model.2.bias",)
    assert snap.restore().steps == (1, 0, 1, 1) and all(p.isfinite().all() for p in run.net.parameters())

def test_a_lane_that_alone_gets_another_shape_is_refused_and_the_fix_is_named():
    run = LaneRun(); snap = run.snapshot(); snap.take(step=0); snap.take(step=1)
    weight = run.net[2].weight
    weight.data = torch.cat([weight.data, weight.data], -1)
    with pytest.raises(ValueError, match=r"shape of model\.2\.weight.*take all lanes twice first"): snap.take(lanes=[1])

def test_new_state_of_a_restored_lane_starts_at_zero():
    net = LaneLinear(3, 2, n=N); opt = torch.optim.SGD(net.parameters(), lr=.1, momentum=.9)
    snap = Snapshot(net, opt, lanes=N); snap.take()
    net(torch.ones(2, 3 * N)).sum().backward(); opt.step()
    snap.restore(lanes=[1])
    m = by_lane(opt.state[net.weight]["momentum_buffer"], N)
    assert (m[1] == 0).all() and (m[0] != 0).all()

def test_lists_with_one_entry_per_lane_are_rows():
    class Table:
        lanes = N
        def __init__(self): self.stage, self.all = ["empty"] * N, 0
        def state_dict(self): return dict(stage=self.stage, all=self.all)
        def load_state_dict(self, s): self.stage, self.all = s["stage"], s["all"]
    t = Table(); snap = Snapshot(table=t, lanes=N); snap.take()
    t.stage, t.all = ["training"] * N, 5
    snap.restore(lanes=[2]); assert t.stage == ["training", "training", "empty", "training"] and t.all == 5
    snap.restore(); assert t.stage == ["empty"] * N and t.all == 0


# --- on a GPU

@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw", "scheduled", "fp16", "two"])
def test_cuda_rollback_is_exact(kind):
    torch.use_deterministic_algorithms(False); torch.backends.cudnn.deterministic = True
    run = Run(kind, "cuda")
    for _ in range(5): run.step()
    snap = run.snapshot(); snap.take()
    assert all(t.is_pinned() for k, t in snap.banks.memory[snap.banks.front[0]].items() if k[0] == "model")
    before = whole_state(run)
    expected = [run.step() for _ in range(20)]
    for _ in range(2):
        snap.restore()
        assert snap.difference() == {}
        assert_same_state(whole_state(run), before)
        assert [run.step() for _ in range(20)] == expected

@pytest.mark.cuda
def test_cuda_buffers_share_pinned_blocks(monkeypatch):
    monkeypatch.setattr(page, "PINNED", 4096)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
            self.narrow = nn.Parameter(torch.randn(7, dtype=torch.bfloat16))
            self.large = nn.Parameter(torch.randn(3000))
            self.register_buffer("scalar", torch.tensor(2., dtype=torch.float64))
            self.register_buffer("empty", torch.empty(0, 3))
            self.register_buffer("flags", torch.tensor([True, False]))
            self.register_buffer("turned", torch.randn(6, 4).t())
            self.register_buffer("window", torch.randn(9, 9)[1:4, ::2])
    net = Net().cuda()
    opt = torch.optim.SGD(net.parameters(), lr=.1, momentum=.9)
    snap = Snapshot(net, opt)
    snap.take()
    for _ in range(3):
        for p in net.parameters(): p.grad = torch.randn_like(p)
        opt.step()
        snap.take()
    then = [t.detach().clone() for t in net.state_dict().values()]
    bank = snap.banks.memory[snap.banks.front[0]]
    blocks = {t.untyped_storage().data_ptr() for k, t in bank.items() if k[0] == "model" and t.numel()}
    assert len(blocks) == 3 # the small ones before the large one, that one, and those after it
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in bank.values() if t.numel() and t.is_contiguous())
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:]))
    with torch.no_grad():
        for t in net.state_dict().values(): t.zero_()
    snap.restore()
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(net.state_dict().values(), then))
    aside, saved = snap.set_aside(), dict(bank)
    snap.load_state_dict(snap.state_dict()) # as a run that goes on does
    for other in (aside.bank, snap.banks.memory[snap.banks.front[0]]):
        mine = {k: t for k, t in other.items() if k[0] == "model" and t.numel()}
        assert all(torch.equal(t, saved[k]) and t.is_pinned() for k, t in mine.items())
        assert len({t.untyped_storage().data_ptr() for t in mine.values()} - blocks) == 3

@pytest.mark.cuda
def test_cuda_rollback_with_work_in_flight_on_two_streams(machine):
    width, times = (64, 5) if machine else (1024, 50)   # enough to be still at work
    net = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)]).cuda()
    snap = Snapshot(net); snap.take()
    before = [p.detach().clone() for p in net.parameters()]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for s in streams: s.wait_stream(torch.cuda.current_stream())
    for s, layers in zip(streams, (net[:2], net[2:])):
        with torch.cuda.stream(s):
            for _ in range(times):
                for p in layers.parameters():
                    p.data.add_(
                        torch.randn(width, width, device="cuda")
                        .mm(torch.randn(width, width, device="cuda"))[: p.shape[0]]
                        .reshape(-1)[: p.numel()]
                        .view_as(p)
                    )
    snap.restore()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters()))
    after = [torch.cuda.Stream() for _ in range(2)]
    with torch.cuda.stream(after[0]): snap.take()
    with torch.cuda.stream(after[1]): snap.restore()
    assert snap.difference() == {}


# --- one copy, and copies in the background

def small_run(seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3))
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    def step():
        opt.zero_grad()
        net(torch.randn(32, 16)).square().mean().backward()
        opt.step()
    step()
    return net, opt, step

def everything(net, opt):
    return copy.deepcopy([net.state_dict(), opt.state_dict()["state"]])

def same(a, b): return str(a) == str(b) and all(
    torch.equal(x, y) for x, y in zip(*[[t for t in pack_tree_tensors(v)] for v in (a, b)]))

def pack_tree_tensors(tree):
    out = {}
    pack_tree(tree, out)
    return [out[k] for k in sorted(out)]

def test_one_copy_takes_half_the_memory_and_restores_exactly():
    net, opt, step = small_run()
    two, one = Snapshot(net, opt, streams=False), Snapshot(net, opt, streams=False, copies=1)
    for snap in (two, one):
        for _ in range(3): snap.take()
    assert one.nbytes * 2 == two.nbytes
    for t in range(5):
        step()
        one.take(step=t)
        before = everything(net, opt)
        for _ in range(3): step()
        one.restore()
        assert same(everything(net, opt), before) and one.steps == [t]

def test_one_copy_has_no_room_for_probation():
    net, opt, _ = small_run()
    one = Snapshot(net, opt, copies=1)
    one.take()
    with pytest.raises(ValueError, match="probation"): one.take(hold=True)
    with pytest.raises(ValueError, match="copies"): Snapshot(net, copies=3)

def test_one_copy_that_is_interrupted_restores_nothing(monkeypatch):
    net, opt, step = small_run()
    one = Snapshot(net, opt, copies=1)
    one.take()
    with monkeypatch.context() as m:
        m.setattr(page, "_copy_all", lambda pairs: pairs[0][0].zero_() / 0 + (1 / 0))
        with pytest.raises(ZeroDivisionError): one.take()
    with pytest.raises(RuntimeError, match="nothing to restore"): one.restore()
    one.take()
    before = everything(net, opt)
    step()
    one.restore()
    assert same(everything(net, opt), before)

@pytest.mark.parametrize("first,then", [(1, 1), (1, 2), (2, 1)])
def test_a_state_goes_between_one_copy_and_two(first, then):
    net, opt, step = small_run()
    a = Snapshot(net, opt, streams=False, copies=first)
    a.take(step=1); step(); a.take(step=2)
    before = everything(net, opt)
    b = Snapshot(net, opt, streams=False, copies=then)
    b.load_state_dict(a.state_dict())
    for _ in range(3): step()
    b.restore()
    assert same(everything(net, opt), before) and b.steps == [2]
    b.take(step=3); step(); b.restore()
    assert b.steps == [3]

def in_background(net, opt, **kw):
    snap = Snapshot(net, opt, streams=False, **kw)
    snap.take(step=0)
    snap.background = BackgroundCopy(snap.objects.values(), least=0)
    snap.background.hold_step() # a step comes by
    return snap

def test_steps_that_do_not_come_by_are_not_copied_beside():
    "A CUDA graph that holds its optimizer calls no hook when it is replayed, and counts no change."
    net, opt, step = small_run()
    snap = in_background(net, opt)
    snap.take(step=1, hold=True)
    snap.find_late(wait=True)
    snap.confirm()
    before = everything(net, opt)
    snap.take(step=2, hold=True)
    assert snap.background.job is None, "nothing came by: it is copied at once"
    for p in net.parameters(): p.data.add_(1.) # what a replay does
    assert snap.find_late(wait=True) == ()
    snap.confirm()
    snap.restore()
    assert same(everything(net, opt), before)
    step()
    snap.take(step=3, hold=True)
    assert snap.background.job is not None, "and beside the next step again"
    snap.find_late(wait=True)

@pytest.mark.parametrize("seed", range(2))
def test_a_snapshot_in_the_background_is_the_state_at_its_beginning(seed):
    net, opt, step = small_run(seed)
    snap = in_background(net, opt)
    for t in range(1, 8):
        snap.take(step=t, hold=True)
        before = everything(net, opt)
        for _ in range(4): step()
        assert snap.find_late(wait=True) == () and snap.background is not None
        snap.confirm()
        snap.restore()
        assert same(everything(net, opt), before) and snap.steps == [t]

def test_a_step_waits_for_a_copy_that_is_not_whole(monkeypatch):
    net, opt, step = small_run()
    snap, gate, inner = in_background(net, opt), threading.Event(), BackgroundCopy._copy # noqa: SLF001
    def slow(*args):
        gate.wait(10)
        return inner(*args)
    monkeypatch.setattr(BackgroundCopy, "_copy", slow)
    snap.take(step=1, hold=True)
    before = everything(net, opt)
    threading.Timer(.3, gate.set).start()
    step()
    assert snap.background.waited > .1
    assert snap.find_late(wait=True) == ()
    snap.confirm(); snap.restore()
    assert same(everything(net, opt), before)

def test_a_small_state_is_copied_at_once():
    net, opt, step = small_run()
    snap = in_background(net, opt)
    snap.background.least = 10**9
    snap.take(step=1, hold=True)
    assert snap.background.job is None and snap.background.copied.is_set()
    with torch.no_grad(): net[0].weight[1, 2] = torch.nan
    assert snap.take(hold=True).bad == ("model.0.weight",), "and looked at"

def test_a_nan_is_found_in_the_background():
    net, opt, _ = small_run()
    snap = in_background(net, opt)
    with torch.no_grad(): net[0].weight[1, 2] = torch.nan
    assert snap.take(hold=True).refused == ()
    assert snap.find_late(wait=True) == ("model.0.weight",) and snap.find_late(wait=True) == ()
    snap.drop(); snap.restore()
    net[1].running_mean[0] = torch.nan # no optimizer owns it, so it is looked at right away
    assert snap.take(hold=True).bad == ("model.1.running_mean",)

def test_a_torn_copy_is_dropped_and_later_ones_are_made_at_once():
    net, opt, step = small_run()
    snap = in_background(net, opt)
    snap.take(step=1, hold=True)
    with torch.no_grad(): net[0].weight.mul_(2)
    step()
    assert snap.find_late(wait=True) == () and snap.background is None and snap.confirm() == () and snap.steps == [0]
    snap.take(step=2, hold=True)
    assert snap.confirm() == (0,)

@pytest.mark.cuda
def test_cuda_background_is_the_state_at_its_beginning(machine, monkeypatch):
    "Adam's counts of steps, too, which lie in host memory and are copied as late as the thread gets there."
    inner = BackgroundCopy._copy # noqa: SLF001
    monkeypatch.setattr(BackgroundCopy, "_copy", lambda *args: (time.sleep(.02), inner(*args))[1])
    torch.manual_seed(0)
    width = 64 if machine else 2048 # enough to be still copied when the next step begins
    net = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(width, width), nn.ReLU())]).cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    def step():
        opt.zero_grad()
        net(torch.randn(32, width, device="cuda")).square().mean().backward()
        opt.step()
    step()
    snap = in_background(net, opt)
    for t in range(1, 5):
        snap.take(step=t, hold=True)
        before = everything(net, opt)
        for _ in range(4): step()
        assert snap.find_late(wait=True) == () and snap.background is not None
        snap.confirm(); snap.restore()
        assert same(everything(net, opt), before) and snap.steps == [t]


@pytest.mark.parametrize("dtype, where", [(torch.float32, 0), (torch.float32, -1), (torch.bfloat16, -1),
                                          (torch.complex64, 0)])
def test_a_large_tensor_is_checked_piece_by_piece(dtype, where):
    "A NaN in the first or the last piece is refused and harms no good state; numbers whose sum overflows are not."
    large = dict(x=torch.ones(2_500_000, dtype=dtype), few=torch.ones(3), count=torch.tensor(1))
    snap = Snapshot(large, streams=False)
    for k in range(3): assert snap.take(k).published
    large["x"][where] = torch.nan
    result = snap.take(3)
    assert result.refused == (0,) and not result.published and len(result.bad) == 1
    snap.restore()
    assert (large["x"] == 1).all() and snap.steps == [2]
    large["x"].fill_(torch.finfo(dtype).max)
    assert snap.take(4).published

def test_sparse_gradients_that_were_added_to_come_back():
    "The next micro-batch adds to a sparse gradient in place; a state that holds gradients holds those before it."
    words = nn.Embedding(5, 2, sparse=True)
    words(torch.tensor([1, 1, 3])).sum().backward()
    snap = Snapshot(words, streams=False, grads=True)
    snap.take()
    before = words.weight.grad.to_dense()
    words(torch.tensor([0, 3])).sum().backward()
    assert snap.difference().keys() == {"model.weight<grad>"}
    snap.restore()
    assert snap.difference() == {} and torch.equal(words.weight.grad.to_dense(), before)
    words(torch.tensor([0])).sum().backward() # what was put back is no alias of what is kept
    snap.restore()
    assert torch.equal(words.weight.grad.to_dense(), before)


# --- the banks beside a plain model of them: what is published is never lost, whatever happens in which lane

KEY = "model", "weights"

def live_state(weights): return LiveState({KEY: weights}, {KEY} if len(weights) > 1 else set(), {}, {}, {})


@given(n=st.sampled_from([1, 3]), events=st.lists(st.tuples(
    st.sampled_from(["write", "interrupt", "confirm", "drop", "file"]), st.sets(st.integers(0, 2), min_size=1)),
    max_size=25))
@settings(max_examples=60, deadline=None)
def test_banks_publish_what_was_confirmed_and_lose_nothing(n, events):
    weights, banks = torch.zeros(n, 2), StateBanks(n)
    banks.write(live_state(weights), range(n), step=0)
    banks.confirm()
    published, held = [0.] * n, [None] * n
    for t, (event, lanes) in enumerate(events, 1):
        mine = sorted({i % n for i in lanes})
        weights.fill_(t)
        if event == "write":
            banks.write(live_state(weights), mine, whole=len(mine) == n, step=t)
            for i in mine: held[i] = float(t)
        elif event == "interrupt":
            def half(pairs):
                for to, _ in pairs[:1]: to.fill_(-1)
                raise KeyboardInterrupt
            with pytest.raises(KeyboardInterrupt):
                banks.write(live_state(weights), mine, whole=len(mine) == n, copy=half)
            for i in mine: held[i] = None
        elif event == "confirm":
            assert banks.confirm(mine) == tuple(i for i in mine if held[i] is not None)
            for i in mine: published[i], held[i] = (published[i] if held[i] is None else held[i]), None
        elif event == "drop":
            banks.drop(mine)
            for i in mine: held[i] = None
        else:
            saved, banks = banks.state_dict(), StateBanks(n)
            numbers = {v[0] for v in (*saved["published"], *saved["held"]) if v is not None}
            banks.load_state_dict(saved, dict.fromkeys(numbers, {}), live_state(weights))
        found = [banks.good_state(i).bank[KEY][i].tolist() for i in range(n)]
        assert found == [[x, x] for x in published], (t, event)
        assert [v and v.step for v in banks.held[:n]] == held
        assert {v.step for v in banks.published[:n]} == set(published)

class SlowWeights(torch.optim.Optimizer):
    "Goes half way from slow weights to those of another optimizer, every five steps: it remembers the slow ones."
    def __init__(self, optimizer):
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, {})
        for p in (p for g in self.param_groups for p in g["params"]): self.state[p]["slow"] = p.detach().clone()
    @torch.no_grad()
    def step(self, closure=None):
        self.optimizer.step()
        for group in self.param_groups:
            group["taken"] = group.get("taken", 0) + 1
            for p in group["params"] if group["taken"] % 5 == 0 else ():
                p.copy_(self.state[p]["slow"].lerp_(p, .5))

SlowWeights.__module__ = torch.optim.SGD.__module__ # as of a library

@pytest.mark.parametrize("guarded", ["run", "batches"])
def test_an_optimizer_around_another_keeps_what_it_remembers_itself(guarded):
    "Weights are compared while nothing is wrong: whatever a step writes has to be put back."
    def trained(guarded=""):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        opt = SlowWeights(torch.optim.Adam(net.parameters(), 1e-2))
        governor = Governor(net, opt, chance_loss=None)
        def step(x):
            return update(opt, (net(x) - x.sin().sum(1, keepdim=True)).square().mean())
        data = [torch.randn(8, 4) for _ in range(170)]
        if guarded == "batches":
            for x in governor.batches(data): governor.watch(step(x))
        else:
            for x in data: governor.run(step, x) if guarded else step(x)
        assert not governor.reports
        return [*net.parameters(), *(own["slow"] for own in opt.state.values())]
    assert all(map(torch.equal, trained(guarded), trained()))

def test_a_cut_of_the_rate_counts_once_where_optimizers_share_their_groups():
    net = nn.Linear(1, 1)
    outer = SlowWeights(torch.optim.SGD(net.parameters(), .1))
    governor = Governor(net, outer, chance_loss=None)
    assert len(governor.snapshot.objects) > 3 and outer.param_groups[0] is outer.optimizer.param_groups[0]
    assert governor.judge.response.rates.scale(.5) and outer.param_groups[0]["lr"] == .05
    seen = []
    outer.optimizer.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["lr"]))
    lowered = set()
    with at_share(outer, .5, lowered), at_share(outer.optimizer, .5, lowered): outer.step()
    lower, back = share_of_rate(lambda: .5)
    for o in (outer, outer.optimizer): lower(o)
    seen.append(outer.param_groups[0]["lr"])
    for o in (outer.optimizer, outer): back(o)
    assert seen == [.025, .025] and outer.param_groups[0]["lr"] == .05

@pytest.mark.parametrize("copies", [1, 2])
def test_a_state_that_is_not_finite_replaces_none(copies):
    net, opt, step = small_run()
    snap = Snapshot(net, opt, copies=copies)
    assert not snap.mend(["model.0.weight"]), "there is nothing yet to mend it from"
    step()
    snap.take(step=1)
    before = everything(net, opt)
    with torch.no_grad(): next(net.parameters()).view(-1)[0] = float("nan")
    assert snap.replace_by_live(step=2) is None
    snap.restore()
    assert snap.steps == [1] and same(everything(net, opt), before)
    old = snap.replace_by_live(step=3)
    assert old.version.step == 1 and snap.steps == [3]

def test_lazy_modules_are_named():
    with pytest.raises(ValueError, match=r"0\.weight.*not made yet.*run a batch"):
        Snapshot(nn.Sequential(nn.LazyLinear(3)))


class Wrapper(torch.optim.Optimizer):
    "Steps another optimizer, and does not call `super().__init__`, as several wrappers do not."
    def __init__(self, inner): self.inner, self.param_groups, self.state = inner, inner.param_groups, {}
    def step(self, closure=None): return self.inner.step(closure)
    def state_dict(self): return dict(inner=self.inner.state_dict(), own=super().state_dict())

def test_of_a_wrapper_without_a_state_it_is_said_what_to_hand_over():
    net = nn.Linear(2, 2)
    with pytest.raises(AttributeError) as caught: Snapshot(net, Wrapper(torch.optim.SGD(net.parameters(), .1))).take(0)
    assert "a Wrapper whose state_dict() fails" in caught.value.__notes__[0]


# --- optimizers that begin anew

@pytest.mark.parametrize("kind", [
    "Adagrad", "Adam", "Adamax", "Adadelta", "Adafactor", "ASGD", "LBFGS", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"])
def test_an_optimizer_that_forgets_steps_as_a_new_one(kind):
    def trained(net, opt, steps):
        def closure():
            opt.zero_grad()
            loss = net(torch.ones(2, 3)).square().sum()
            loss.backward()
            return loss
        for _ in range(steps): opt.step(closure)
    torch.manual_seed(0)
    net = nn.Linear(3, 3)
    make = partial(getattr(torch.optim, kind), lr=.05, **(dict(momentum=.9) if kind == "SGD" else {}))
    opt = make(net.parameters())
    trained(net, opt, 3)
    twin = copy.deepcopy(net)
    forget_state(opt, net.parameters())
    trained(net, opt, 2)
    trained(twin, make(twin.parameters()), 2)
    assert all(map(torch.equal, net.parameters(), twin.parameters()))


class Sums(torch.optim.Optimizer):
    "Adagrad as older versions of torch have it: the sums are made once, and missed where they are not."
    def __init__(self, params, lr=.01):
        super().__init__(params, dict(lr=lr))
        for p in self.param_groups[0]["params"]: self.state[p]["sum"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            held = self.state[p]["sum"].add_(p.grad.square())
            p.sub_(self.param_groups[0]["lr"] * p.grad / (held.sqrt() + 1e-8))


def test_another_optimizer_that_begins_with_sums_steps_on_behind_a_rollback():
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    opt = torch.optim.SGD(net.parameters(), .01)
    governor = Governor(net, opt, chance_loss=None)
    for i in range(200):
        if i == 50: opt = Sums(net.parameters()) # as where layers are unfrozen
        if i == 150: opt.state[net.weight]["sum"].fill_(torch.nan)
        governor.watch(update(opt, (net(torch.randn(16, 3)) - 1).square().mean()))
    assert governor.reports and net.weight.isfinite().all() and opt.state[net.weight]["sum"].isfinite().all()


def test_statistics_of_a_batch_norm_with_nan_are_refused_before_the_first_step():
    "Memory that nothing has written yet may hold it, but a layer of torch's fills its own."
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    net[1].running_var[1] = torch.nan
    with pytest.raises(RuntimeError, match="model.1.running_var"): Snapshot(net).take()


@pytest.mark.parametrize("dtype", (torch.float8_e4m3fn, torch.float8_e5m2))
@pytest.mark.parametrize("way", ("watch", "run"))
def test_a_buffer_in_eight_bits_is_judged_and_restored(dtype, way, tmp_path):
    "Torch adds up no such numbers and promotes them to nothing, so a Governor could not even be made."
    net = nn.Linear(4, 4)
    net.register_buffer("scales", torch.full((8,), 2.).to(dtype))
    opt = torch.optim.SGD(net.parameters(), .01)
    governor = Governor(net, opt, chance_loss=None, folder=tmp_path)
    def step(x): return update(opt, (net(x) * net.scales.float().mean()).square().mean()).detach()
    for k in range(120):
        if k == 110: net.scales.copy_(torch.full((8,), math.nan).to(dtype))
        x = torch.ones(2, 4)
        governor.run(step, x) if way == "run" else governor.watch(step(x))
    assert [r.action for r in governor.reports].count("rollback") == 1
    assert torch.equal(net.scales.float(), torch.full((8,), 2.)) and net.scales.dtype == dtype
    governor.close()
    other = nn.Linear(4, 4)
    other.register_buffer("scales", torch.zeros(8).to(dtype))
    Governor.recover(tmp_path, other, torch.optim.SGD(other.parameters(), .01))
    assert torch.equal(other.scales.float(), net.scales.float())
