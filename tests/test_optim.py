"The lane-wise step: PyTorch's for one lane, lanes and owners apart, skips that move nothing, state that travels."
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from esper_nb.core import by_lane
from esper_nb.train import LaneOptimizer, LaneScaler, Stepper, check_owners

# odd sizes: every lane has a tail
SHAPES = dict(conv=(3, 3, 3, 3), bias=(5,), weight=(7, 3), scale=(1,), wide=(10, 17))
KINDS = {
    "sgd": ("sgd", {}),
    "sgd-maximize": ("sgd", dict(maximize=True)),
    "momentum": ("sgd", dict(momentum=.9, weight_decay=5e-4)),
    "nesterov": ("sgd", dict(momentum=.9, nesterov=True, weight_decay=5e-4)),
    "adam": ("adam", {}),
    "adam-wd": ("adam", dict(weight_decay=1e-2)),
    "amsgrad": ("adam", dict(amsgrad=True)),
    "adamw": ("adamw", {}),
    "adam-loop": ("adam", dict(foreach=False)),
    "rmsprop": (torch.optim.RMSprop, dict(momentum=.5)),
    "adagrad": (torch.optim.Adagrad, {}),
    "radam": (torch.optim.RAdam, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adamax": (torch.optim.Adamax, {}),
}
FEW = ["sgd", "momentum", "adam", "adamw"]
kinds = pytest.mark.parametrize("kind", KINDS)
few = pytest.mark.parametrize("kind", FEW)


pytestmark = pytest.mark.usefixtures("one_thread")


def params_of(lanes, seed=0, device="cpu"):
    g = torch.Generator().manual_seed(seed)
    out = {k: torch.randn(lanes * s[0], *s[1:], generator=g).to(device) for k, s in SHAPES.items()}
    out["conv"] = out["conv"].contiguous(memory_format=torch.channels_last)
    return {k: nn.Parameter(t) for k, t in out.items()}


def give_grads(params, t, scale=1.):
    g = torch.Generator().manual_seed(1000 + t)
    for p in params.values(): p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=g) * scale)


def optimizer(kind, params, lanes, lr=.05): return LaneOptimizer(params, lanes, KINDS[kind][0], lr, **KINDS[kind][1])
def everything(params, opt): return {k: p.detach() for k, p in params.items()} | opt.state_dict()
def copied(state): return {k: t.clone() for k, t in state.items()}


def assert_lanes_equal(a, b, lanes, which):
    for k in a:
        for i in which: assert torch.equal(by_lane(a[k], lanes)[i], by_lane(b[k], lanes)[i]), (k, i)


@kinds
def test_wide_and_narrow_give_equal_bits(kind):
    n, (a, b) = 5, (params_of(5), params_of(5))
    wide, narrow = optimizer(kind, a, n), optimizer(kind, b, n)
    narrow.set_lr([.05, .05, .07, .05, .05])
    for t in range(10):
        give_grads(a, t); give_grads(b, t)
        wide.step(); narrow.step()
    assert narrow.narrow and not wide.narrow
    x, y = everything(a, wide), everything(b, narrow)
    assert_lanes_equal({k: x[k] for k in x}, y, n, [0, 1, 3, 4])
    assert not torch.equal(by_lane(a["wide"], n)[2], by_lane(b["wide"], n)[2])


@kinds
def test_one_lane_is_torch(kind):
    a, b = params_of(1), params_of(1)
    ours = optimizer(kind, a, 1)
    theirs = ours.cls(list(b.values()), lr=.05, **ours.options)
    for t in range(10):
        give_grads(a, t); give_grads(b, t)
        if t % 3 == 1: a["bias"].grad = b["bias"].grad = None    # torch counts steps per parameter
        ours.step(); theirs.step()
    for (k, p), q in zip(a.items(), b.values()):
        assert torch.equal(p, q), k
        for name, value in theirs.state[q].items():
            if name == "step": assert int(value) == ours.steps[0, list(a).index(k)]
            elif value is not None: assert torch.equal(ours.state_dict()[f"{name}.{k}"], value)


@settings(deadline=None, max_examples=12)
@given(kind=st.sampled_from(FEW + ["nesterov", "amsgrad"]), n=st.integers(1, 5),
       masks=st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=5))
def test_a_skip_moves_nothing_and_nobody_notices(kind, n, masks):
    params = params_of(n); opt = optimizer(kind, params, n)
    def copy_of(t, i): return by_lane(t.detach(), n)[i].clone(memory_format=torch.preserve_format)
    lone = [{k: nn.Parameter(copy_of(p, i)) for k, p in params.items()} for i in range(n)]
    opts = [optimizer(kind, q, 1) for q in lone]
    for t, mask in enumerate(masks):
        before = copied(everything(params, opt))
        give_grads(params, t)
        for i in range(n):
            for k, p in params.items(): lone[i][k].grad = copy_of(p.grad, i)
            if mask[i]: opts[i].step()
            else:
                for p in params.values(): by_lane(p.grad, n)[i].fill_(math.nan)
        opt.step(mask[:n])
        assert_lanes_equal(before, everything(params, opt), n, [i for i in range(n) if not mask[i]])
    for i in range(n):   # every lane went through exactly its own steps, in equal bits
        alone = everything(lone[i], opts[i])
        for k, t in everything(params, opt).items():
            assert torch.equal(by_lane(t, n)[i], by_lane(alone[k], 1)[0]), (k, i)


@settings(deadline=None, max_examples=12)
@given(kind=st.sampled_from(FEW), n=st.integers(1, 5), data=st.data())
def test_lanes_travel(kind, n, data):
    lanes = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True))
    others = [i for i in range(n) if i not in lanes]
    params = params_of(n); opt = optimizer(kind, params, n, lr=torch.linspace(.01, .05, n))
    for t in range(3): give_grads(params, t); opt.step([i != 0 or t > 0 for i in range(n)])
    before = copied(opt.state_dict())
    part = params_of(len(lanes)); out = opt.take_lanes(lanes, part)
    for j, i in enumerate(lanes):
        for k, t in out.state_dict().items(): assert torch.equal(by_lane(t, len(lanes))[j], by_lane(before[k], n)[i])
    opt.put_lanes(lanes, out)
    assert_lanes_equal(before, opt.state_dict(), n, range(n))          # out and back changes nothing
    give_grads(part, 9); out.step()
    assert_lanes_equal(before, opt.state_dict(), n, range(n))          # a copy, not a view
    opt.put_lanes(lanes, out)
    assert_lanes_equal(before, opt.state_dict(), n, others)
    for j, i in enumerate(lanes):
        for k, t in out.state_dict().items():
            assert torch.equal(by_lane(t, len(lanes))[j], by_lane(opt.state_dict()[k], n)[i])
    middle = copied(opt.state_dict())
    opt.reset_lanes(lanes)
    assert_lanes_equal(middle, opt.state_dict(), n, others)
    fresh = optimizer(kind, params_of(n), n)
    for k in middle:
        if k != "lr": assert_lanes_equal({k: fresh.state_dict()[k]}, opt.state_dict(), n, lanes)
    assert torch.equal(opt.lr, middle["lr"])


@few
def test_loading_copies_and_continues_exactly(kind):
    params = params_of(3); opt = optimizer(kind, params, 3)
    def go(t0, t1):
        for t in range(t0, t1): give_grads(params, t); opt.step([True, t % 2 == 0, True])
    go(0, 4)
    weights, saved = {k: p.detach().clone() for k, p in params.items()}, copied(opt.state_dict())
    kept = copied(saved)
    go(4, 8)
    want = copied(everything(params, opt))
    with torch.no_grad():
        for k, p in params.items(): p.copy_(weights[k])
    opt.load_state_dict(saved)
    own = {t.data_ptr() for t in opt.state_dict().values()}
    assert not own & {t.data_ptr() for t in saved.values()}
    go(4, 8)
    for k in saved: assert torch.equal(saved[k], kept[k])
    for k, t in everything(params, opt).items(): assert torch.equal(t, want[k]), k


@few
def test_a_restored_weight_with_cleared_state_stays(kind):
    "Loading weights alone leaves the momentum that ruined them; cleared lanes do not move a weight on a zero gradient."
    params, (name, options) = params_of(2), KINDS[kind]
    opt = LaneOptimizer(params, 2, name, .05, **options | dict(weight_decay=0.))
    for t in range(3): give_grads(params, t); opt.step()
    opt.reset_lanes([1])
    before = {k: p.detach().clone() for k, p in params.items()}
    for p in params.values(): p.grad = torch.zeros_like(p)
    opt.step()
    for k, p in params.items():
        assert torch.equal(by_lane(p, 2)[1], by_lane(before[k], 2)[1])
        if kind != "sgd": assert not torch.equal(by_lane(p, 2)[0], by_lane(before[k], 2)[0])


def test_views_follow_a_swapped_storage():
    a, b = params_of(3), params_of(3)
    x, y = optimizer("adam", a, 3), optimizer("adam", b, 3)
    for t in range(4):
        give_grads(a, t); give_grads(b, t)
        x.step([True, False, True]); y.step([True, False, True])
        for p in a.values(): p.data = p.data.clone(memory_format=torch.preserve_format)
    for k in a: assert torch.equal(a[k], b[k])


def test_many_ways_of_cutting_do_not_pile_up():
    n = 12; params = params_of(n); opt = optimizer("adam", params, n)
    g = torch.Generator().manual_seed(0)
    for t in range(60): give_grads(params, t); opt.step((torch.rand(n, generator=g) < .7).tolist())
    assert len(opt.narrow.views) <= 5 * n


def test_owners_without_parameters_and_scalars():
    empty = LaneOptimizer({}, 3); empty.step(); empty.reset_lanes([0])
    params = params_of(3)
    stepper = Stepper(dict(host=LaneOptimizer(params, 3), seed=empty))
    give_grads(params, 0)
    info = stepper.step()
    assert info.norms["seed"].isnan().all() and not info.skipped["seed"].any()
    stepper.take_lanes([2, 0], dict(host=params_of(2), seed={}))
    one = LaneOptimizer({"s": nn.Parameter(torch.tensor(1.))}, 1, "adam")
    one.params["s"].grad = torch.tensor(1.); one.step()
    out = one.take_lanes([0], {"s": nn.Parameter(torch.tensor(1.))})
    one.reset_lanes([0]); one.put_lanes([0], out)
    assert one.steps.tolist() == [[1]]


# ---------------------------------------------------------------- the scale

@settings(deadline=None, max_examples=15)
@given(overflows=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=25),
       interval=st.integers(1, 4), growth=st.sampled_from([2., 4.]),
       start=st.sampled_from([1., 2.**16, 2.**126]))
def test_scale_follows_grad_scaler(overflows, interval, growth, start):
    options = dict(init_scale=start, growth_factor=growth, backoff_factor=.5, growth_interval=interval)
    ours = LaneScaler(3, **options)
    theirs = [torch.amp.GradScaler("cpu", **options) for _ in range(3)]
    ps = [nn.Parameter(torch.zeros(1)) for _ in range(3)]; opts = [torch.optim.SGD([p], lr=.1) for p in ps]
    for bad in overflows:
        ours.update(torch.tensor(bad))
        for i, s in enumerate(theirs):
            s.scale(torch.zeros(())); ps[i].grad = torch.tensor([math.inf if bad[i] else 0.])
            s.step(opts[i]); s.update()
            assert ours.scale[i] == s.get_scale() and ours.growth[i] == s.state_dict()["_growth_tracker"]


# ---------------------------------------------------------------- the step

def conv_net():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
                        nn.Conv2d(8, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.ReLU(),
                        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    return net.to(memory_format=torch.channels_last)


def same(a, b):
    both_odd = a.numel() == 1 and not a.isfinite() and not b.isfinite()
    return both_odd or torch.equal(a.reshape(-1), b.reshape(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", ["sgd", "momentum", "nesterov", "adam", "adamw"])
@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "plain"])
def test_one_lane_is_torch_amp(kind, dtype, scaled):
    "50 steps with overflows: weights, optimizer state, buffers, norms and scale, all equal in every bit."
    x, y = torch.randn(16, 3, 9, 9, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 5
    a, b = conv_net(), conv_net()
    ours = LaneOptimizer(a.named_parameters(), 1, KINDS[kind][0], .03, **KINDS[kind][1])
    # a scale this high also overflows by itself in fp16, so real overflows are met besides the injected ones
    stepper = Stepper(dict(host=ours), LaneScaler(1, init_scale=2.**24, growth_interval=6, enabled=scaled), max_norm=.3)
    theirs = ours.cls(b.parameters(), lr=.03, **KINDS[kind][1])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.**24, growth_interval=6, enabled=scaled)
    skips = 0
    for t in range(50):
        for net, backward in ((a, stepper.backward), (b, lambda loss: scaler.scale(loss).backward())):
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                loss = nn.functional.cross_entropy(net(x), y)
            backward(loss)
            if scaled and t in (5, 6, 31): net[3].weight.grad[1, 0, 0, 0] = (math.inf, math.nan)[t % 2]
        info = stepper.step()
        scaler.unscale_(theirs)
        norm = nn.utils.clip_grad_norm_(b.parameters(), .3)
        scaler.step(theirs); scaler.update(); theirs.zero_grad()
        skips += int(info.skipped["host"])
        assert same(info.norms["host"], norm) and stepper.scaler.scale.item() == scaler.get_scale(), t
        for (k, p), q in zip(a.state_dict().items(), b.state_dict().values()): assert torch.equal(p, q), (k, t)
        for k, p in a.named_parameters():
            q = dict(b.named_parameters())[k]
            for name, value in theirs.state[q].items():
                if name == "step": assert int(value) == ours.steps[0, 0]
                elif value is not None: assert torch.equal(ours.state_dict()[f"{name}.{k}"], value)
    assert skips > 3 if scaled and dtype == torch.float16 else skips == (3 if scaled else 0)


@few
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("poison", [math.inf, math.nan])
def test_a_poisoned_lane_leaves_the_others_bit_equal(kind, scaled, poison):
    n, results = 4, []
    for bad in (False, True):
        params = params_of(n); opt = optimizer(kind, params, n)
        stepper = Stepper(dict(host=opt), LaneScaler(n, init_scale=16., growth_interval=3, enabled=scaled), max_norm=1.)
        for t in range(12):
            give_grads(params, t)
            if bad and t in (3, 4, 9): by_lane(params["weight"].grad, n)[2].view(-1)[-1] = poison
            before = copied(everything(params, opt))
            info = stepper.step()
            if bad and t == 4:
                assert info.skipped["host"].tolist() == [False, False, True, False]
                assert info.norms["host"][2] == math.inf
                assert_lanes_equal(before, everything(params, opt), n, [2])
        results.append(copied({k: p.detach() for k, p in params.items()} | stepper.state_dict()))
    assert_lanes_equal(*results, n, [0, 1, 3])
    assert all(t.isfinite().all() for t in results[1].values())


@settings(deadline=None, max_examples=12)
@given(data=st.data(), n=st.integers(1, 4), limit=st.sampled_from([None, .5, 3.]))
def test_each_owner_has_its_own_fate(data, n, limit):
    def bits(): return data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    a, b = params_of(n, 1), params_of(n, 2)
    stepper = Stepper(dict(a=optimizer("momentum", a, n), b=optimizer("adam", b, n)), LaneScaler(n, init_scale=4.),
                      max_norm=dict(a=1., b=limit))
    check_owners(nn.ParameterDict({f"a{k}": p for k, p in a.items()} | {f"b{k}": p for k, p in b.items()}),
                 stepper.owners)
    bad_a, bad_b, use = bits(), bits(), bits()
    give_grads(a, 0, 4.); give_grads(b, 1, 4.)
    for params, bad in ((a, bad_a), (b, bad_b)):
        for i in range(n):
            if bad[i]: by_lane(params["wide"].grad, n)[i].view(-1)[3] = math.nan
    def now():
        weights = {f"{who}/{k}": t.detach() for who, params in (("a", a), ("b", b)) for k, t in params.items()}
        return weights | stepper.state_dict()
    before = copied(now())
    info = stepper.step(active=dict(b=use))
    after = now()
    assert info.skipped["a"].tolist() == bad_a and info.skipped["b"].tolist() == [x and u for x, u in zip(bad_b, use)]
    assert info.norms["b"].isnan().tolist() == [not u for u in use]
    for who, moved in (("a", [not v for v in bad_a]), ("b", [u and not v for u, v in zip(use, bad_b)])):
        for k in SHAPES:
            old, new = by_lane(before[f"{who}/{k}"], n), by_lane(after[f"{who}/{k}"], n)
            for i in range(n): assert torch.equal(old[i], new[i]) != moved[i]
    hurt = [x or (y and u) for x, y, u in zip(bad_a, bad_b, use)]
    assert stepper.scaler.scale.tolist() == [2. if h else 4. for h in hurt]
    assert stepper.scaler.growth.tolist() == [0 if h else 1 for h in hurt]
    assert all(p.grad is None for p in (*a.values(), *b.values()))


@pytest.mark.parametrize("limit", [.5, 1e9, None])
def test_clipping_is_torchs_for_every_lane(limit):
    n, params = 3, params_of(3)
    give_grads(params, 0)
    lone = [[nn.Parameter(by_lane(p.grad, n)[i].clone()) for p in params.values()] for i in range(n)]
    for p in params.values(): p.grad *= 64
    stepper = Stepper(dict(host=LaneOptimizer(params, n)), LaneScaler(n, init_scale=64.), max_norm=limit)
    norms = stepper.step(zero_grad=False).norms["host"]
    for i, grads in enumerate(lone):
        for p in grads: p.grad = p.detach().clone()
        norm = nn.utils.clip_grad_norm_(grads, limit or math.inf)
        assert torch.allclose(norm, norms[i], rtol=1e-6)
        for p, q in zip(params.values(), grads): assert torch.allclose(by_lane(p.grad, n)[i], q.grad, rtol=1e-6, atol=0)


def test_stepper_lanes_and_state():
    owners = dict(a=optimizer("adam", params_of(4, 1), 4), b=optimizer("momentum", params_of(4, 2), 4))
    stepper = Stepper(owners, LaneScaler(4, init_scale=8.), max_norm=dict(a=1., b=None))
    for t in range(3):
        for opt in stepper.owners.values(): give_grads(opt.params, t)
        stepper.step()
    before = copied(stepper.state_dict())
    out = stepper.take_lanes([3, 1], dict(a=params_of(2), b=params_of(2)))
    assert out.max_norm == stepper.max_norm and out.lanes == 2
    for opt in out.owners.values(): give_grads(opt.params, 9)
    by_lane(out.owners["b"].params["bias"].grad, 2)[0] = math.inf
    out.step()
    stepper.put_lanes([3, 1], out)
    assert_lanes_equal(before, stepper.state_dict(), 4, [0, 2])
    assert stepper.scaler.scale.tolist() == [8, 8, 8, 4] and stepper.owners["b"].steps[:, 0].tolist() == [3, 4, 3, 3]
    stepper.load_state_dict(before)
    assert_lanes_equal(before, stepper.state_dict(), 4, range(4))
    with pytest.raises(ValueError, match="missing scaler.scale"):
        stepper.load_state_dict({k: t for k, t in before.items() if k != "scaler.scale"})


def test_loss_stays_visible_and_accumulates():
    w = nn.Parameter(torch.ones(3)); stepper = Stepper(dict(w=LaneOptimizer({"w": w}, 3, lr=.1)))
    for k in (1., 2.): stepper.backward(w * torch.tensor([k, math.nan, k]))
    info = stepper.step()
    assert info.loss[[0, 2]].tolist() == [3, 3] and info.loss[1].isnan()
    assert info.skipped["w"].tolist() == [False, True, False] and torch.allclose(w, torch.tensor([.9, 1., .9]))
    stepper.backward(w * 1.); stepper.zero_grad()
    with pytest.raises(RuntimeError, match="call backward"): stepper.step()
    stepper.backward(w.square()); info = stepper.step()
    assert info.loss.isfinite().all() and info.scale.tolist() == [1, 1, 1]


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["momentum", "adam", "adamw"])
def test_on_cuda(kind):
    n, (a, b) = 4, (params_of(4, device="cuda"), params_of(4, device="cuda"))
    x, y = (Stepper(dict(host=optimizer(kind, p, n)), LaneScaler(n, init_scale=16.), max_norm=1.) for p in (a, b))
    for t in range(8):
        for p in (a, b):
            g = torch.Generator().manual_seed(t)
            for q in p.values(): q.grad = torch.empty_like(q).copy_(torch.randn(q.shape, generator=g))
        if t == 3: by_lane(b["wide"].grad, n)[1].view(-1)[0] = math.inf
        x.step(); info = y.step()
        assert info.skipped["host"].tolist() == [False, t == 3, False, False] and info.loss.device.type == "cpu"
    for k in a:
        for i in (0, 2, 3): assert torch.equal(by_lane(a[k], n)[i], by_lane(b[k], n)[i]), (k, i)
    assert y.scaler.scale.tolist() == [16, 8, 16, 16]
