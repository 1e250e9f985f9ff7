"Several processes: every rank does the same thing at the same step, and a rank that is gone is named."
import copy, math, os, time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import fork_ranks
from torch import nn
from tiny import update

from benchmarks.faults import PlainState, PlainStepper
from esper_nb.guard import Governor, GovernorConfig, GovernorStop
from esper_nb.guard.ranks import Ranks
from esper_nb.train import Fault, list_faults

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
CENTERS = torch.randn(10, 16, generator=torch.Generator().manual_seed(0)) * .7
CONFIG = GovernorConfig(snapshot_every=10, probation=10, patience=8, gate=False, lost_confirm=1)

def batch(step, rank):
    g = torch.Generator().manual_seed(1000 * step + rank)
    y = torch.randint(0, 10, (16,), generator=g)
    return CENTERS[y] + torch.randn(16, 16, generator=g), y

def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))

def ruin(fault, net, opt, x):
    "One rank's mishap, before the step."
    if fault == "nan batch": return x * math.nan
    if fault == "huge batch": return x * 1e8
    with torch.no_grad():
        weight = next(net.parameters())
        weight = weight.to_local() if hasattr(weight, "to_local") else weight
        if fault == "nan weight": weight.view(-1)[0] = math.nan
        if fault == "weights × 300": weight.mul_(300)
        if fault == "forgotten": weight.zero_()
    return x

def train(rank, world, tell, fault, bad_rank, form, kind, steps=120):
    net = network()
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard
        for layer in (net[0], net[2]): fully_shard(layer)
        fully_shard(net)
    model = nn.parallel.DistributedDataParallel(net) if kind == "ddp" else net
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    gov = Governor(model, opt, chance_loss=math.log(10), config=CONFIG)
    try:
        for step in range(steps):
            x, y = batch(step, rank)
            if step == 80 and rank == bad_rank: x = ruin(fault, net, opt, x)
            if form == "step":
                with gov.step():
                    loss = F.cross_entropy(model(x), y)
                    opt.zero_grad(); loss.backward()
                    gov.watch(loss)
                    opt.step()
                continue
            gov.watch(update(opt, F.cross_entropy(model(x), y)))
    except GovernorStop: pass
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    tell(dict(reports=[(r.batch, r.reason, r.action, r.rank) for r in gov.reports],
              weights=torch.cat([p.detach().flatten() for p in whole]), exchanges=gov.ranks.exchanges,
              watched=gov.watched))

FAULTS = ("nan batch", "huge batch", "nan weight", "weights × 300", "forgotten")

@pytest.mark.parametrize("world,fault,bad_rank,form", [
    *[(2, f, 1, "watch") for f in FAULTS], (2, "nan batch", 0, "step"), (2, "huge batch", 1, "step"),
    (4, "nan batch", 2, "watch"), (4, "nan weight", 3, "step"),
    pytest.param(4, "weights × 300", 0, "watch", marks=pytest.mark.slow)])
def test_ddp_ranks_do_the_same_and_end_equal_to_the_bit(tmp_path, world, fault, bad_rank, form):
    done = fork_ranks(train, world, tmp_path, fault, bad_rank, form, "ddp")
    assert len(done) == world
    assert all(d["reports"] == done[0]["reports"] for d in done), [d["reports"] for d in done]
    assert all(torch.equal(d["weights"], done[0]["weights"]) for d in done)
    assert done[0]["weights"].isfinite().all()
    if fault.startswith("nan"): assert done[0]["reports"] and done[0]["reports"][0][0] in (79, 80)
    if (fault, form) == ("nan batch", "watch"): assert done[0]["reports"][0][3] == bad_rank, "the report names the rank"

class Headed(nn.Module):
    "A network in which the faults find what they look for."
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(16, 32), nn.Linear(32, 10)
    def forward(self, x): return self.head(self.body(x).relu())

def started():
    "A network on all ranks, its optimizer, and what watches them."
    net = Headed()
    model = nn.parallel.DistributedDataParallel(net)
    opt = torch.optim.SGD(net.parameters(), lr=.05, momentum=.9)
    return net, model, opt, Governor(model, opt, chance_loss=math.log(10), config=CONFIG.replace(patience=48))

def trained(rank, run, steps, disturb=lambda step, x, y: (x, y)):
    net, model, opt, gov = run
    try:
        for step in steps:
            x, y = disturb(step, *batch(step, rank))
            gov.watch(update(opt, F.cross_entropy(model(x), y.view(-1))))
    except GovernorStop: pass
    return run

def ruined_run(rank, fault, bad_rank, healthy, begin=50, last=70, steps=150):
    "A healthy run goes on with one fault of the page of faults on one rank: its losses go on after it has ended."
    net, model, opt, gov = run = started()
    for part, state in zip((net, opt, gov), healthy): part.load_state_dict(state)
    stepper = PlainStepper(dict(host=PlainState(opt, net)))
    strike = Fault(fault, lane=0, epoch=0, batch=begin, seed=bad_rank).at(0)
    def disturb(step, x, y):
        return strike(net, stepper, [0], step, x, y[:, None]) if rank == bad_rank and step < last else (x, y)
    trained(rank, run, range(begin, steps), disturb)
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    momentum = torch.cat([s["momentum_buffer"].flatten() for s in opt.state.values()])
    x, y = batch(10**6, 0)
    return dict(reports=[(r.batch, r.reason, r.action) for r in gov.reports], weights=weights, momentum=momentum,
                loss=F.cross_entropy(net(x), y).item(), watched=gov.watched)

def every_fault(rank, world, tell):
    net, _, opt, gov = trained(rank, started(), range(50))
    healthy = copy.deepcopy([part.state_dict() for part in (net, opt, gov)])
    tell({(fault, bad): ruined_run(rank, fault, bad, healthy) for fault in list_faults() for bad in range(world)})

@pytest.mark.slow
@pytest.mark.long("4")
@pytest.mark.parametrize("world", [2, 4])
def test_every_fault_on_every_rank_leaves_equal_ranks(tmp_path, world):
    done = fork_ranks(every_fault, world, tmp_path, seconds=600)
    assert len(done) == world and len(done[0]) == 6 * world
    for case, first in done[0].items():
        for other in done[1:]:
            assert other[case]["reports"] == first["reports"], case
            assert torch.equal(other[case]["weights"], first["weights"]), case
            assert torch.equal(other[case]["momentum"], first["momentum"]), case
            assert other[case]["watched"] == first["watched"]
        assert first["weights"].isfinite().all() and first["loss"] < 1., (case, first["loss"], first["reports"])
        print(*case, first["watched"], f"{first['loss']:.3f}", first["reports"])

@pytest.mark.parametrize("fault,bad_rank,form", [("nan batch", 1, "watch"), ("nan weight", 0, "watch"),
                                                 pytest.param("nan batch", 0, "step", marks=pytest.mark.slow)])
def test_shards_are_kept_and_put_back(tmp_path, fault, bad_rank, form):
    done = fork_ranks(train, 2, tmp_path, fault, bad_rank, form, "fsdp")
    assert len(done) == 2 and done[0]["reports"] == done[1]["reports"] and done[0]["reports"]
    assert torch.equal(done[0]["weights"], done[1]["weights"]) and done[0]["weights"].isfinite().all()

def test_a_healthy_run_on_two_ranks_is_the_run_alone_to_the_bit(tmp_path):
    for form in ("watch", "step"):
        (tmp_path/form).mkdir()
        done = fork_ranks(train, 2, tmp_path/form, None, -1, form, "ddp", 60)
        assert [d["reports"] for d in done] == [[], []] and done[0]["exchanges"] <= done[0]["watched"] + 60 // 10 + 2

def stays_away(rank, world, tell):
    gov = Governor(network(), chance_loss=math.log(10), config=CONFIG, timeout=20.)
    start = time.monotonic()
    try:
        for step in range(50):
            if rank == world - 1 and step == 20: os._exit(0) # it dies without a word
            gov.watch(.9)
    except RuntimeError as e: tell((str(e), time.monotonic() - start))
    os._exit(0)

@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rank_that_is_gone_is_named_and_nobody_hangs(tmp_path, world):
    said = fork_ranks(stays_away, world, tmp_path)
    assert len(said) == world - 1
    for text, seconds in said:
        assert f"rank {world - 1} of {world} is gone" in text and seconds < 40, (text, seconds)

def fails_inside_a_step(rank, world, tell, how, form):
    net = network()
    model = nn.parallel.DistributedDataParallel(net)
    opt = torch.optim.SGD(net.parameters(), lr=.1)
    gov = Governor(model, opt, chance_loss=math.log(10), config=CONFIG, timeout=20.)
    def step(xy):
        if rank == 1 and gov.watched == 5:
            if how == "dies": os._exit(1)
            raise ValueError("shard 7 cannot be read")
        loss = F.cross_entropy(model(xy[0]), xy[1])
        opt.zero_grad(); loss.backward()
        if form == "step": gov.watch(loss)
        opt.step()
        return loss
    try:
        for k in range(10):
            if form == "run": gov.run(step, batch(k, rank))
            else:
                with gov.step(): step(batch(k, rank))
    except Exception as e: tell(f"{type(e).__name__}: {e}")
    os._exit(0)

@pytest.mark.parametrize("how,form", [
    ("dies", "run"), ("raises", "run"), pytest.param("dies", "step", marks=pytest.mark.slow)])
def test_a_rank_that_fails_inside_a_step_is_named(tmp_path, how, form):
    said = fork_ranks(fails_inside_a_step, 2, tmp_path, how, form)
    wanted = "rank 1 of 2 is gone: rank 0 cannot end step 5" if how == "dies" else \
        "rank 1 of 2 raised ValueError: shard 7 cannot be read: rank 0 cannot end step 5"
    assert wanted in said[0], said[0]
    if how == "raises": assert said[1] == "ValueError: shard 7 cannot be read" # its own error stays as it is

def all_see_nan(rank, world, tell):
    gov = Governor(network(), chance_loss=math.log(10), config=CONFIG)
    for k in range(30): gov.watch(math.nan if k == 20 else .9)
    tell([(r.reason, r.rank) for r in gov.reports])

def test_where_all_ranks_see_nan_none_is_blamed(tmp_path):
    assert fork_ranks(all_see_nan, 2, tmp_path) == [[("non-finite", None)]] * 2

def sleeps(rank, world, tell):
    gov = Governor(network(), chance_loss=math.log(10), config=CONFIG, timeout=2.)
    try:
        for step in range(10):
            if rank == 1 and step == 5: time.sleep(15)
            gov.watch(.9)
    except RuntimeError as e: tell(str(e))
    os._exit(0)

@pytest.mark.slow
def test_a_rank_that_hangs_is_given_up(tmp_path):
    said = fork_ranks(sleeps, 2, tmp_path)
    assert said and "rank 1 of 2 is gone" in said[0]

def test_one_process_stays_off_the_network():
    gov = Governor(network(), chance_loss=math.log(10))
    for _ in range(100): gov.watch(.9)
    assert not gov.ranks and gov.ranks.exchanges == 0

class OnGPU(nn.Module):
    "A network whose parameters are on the second GPU of a machine without one."
    def parameters(self, recurse=True):
        yield from (SimpleNamespace(is_cuda=k != "cpu", device=torch.device(k)) for k in ("cpu", "cuda:1"))

def test_numbers_are_exchanged_where_the_parameters_are(monkeypatch):
    stands = dict(is_initialized=lambda: True, get_world_size=lambda group: 2, get_rank=lambda group: 1,
                  get_backend=lambda group: backend)
    for name, stand in stands.items(): monkeypatch.setattr(dist, name, stand)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    backend, bound = "nccl", SimpleNamespace(bound_device_id=torch.device("cuda:3"))
    opt = torch.optim.SGD([nn.Parameter(torch.zeros(1))], .1)
    assert Ranks(parts=[opt, OnGPU()]).device == torch.device("cuda:1")
    assert Ranks(bound, parts=[opt, nn.Linear(1, 1)]).device == torch.device("cuda:3")
    assert Ranks().device == torch.device("cuda:0")
    backend = "gloo"
    assert Ranks(parts=[OnGPU()]).device == torch.device("cpu")
