"Averaged weights that a loop keeps and nobody handed over: found by what the loop does, put back with the weights."
import copy
import gc
import math
import weakref

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tiny import update

from esper_nb.core import seeded
from esper_nb.guard.governor import Governor
from esper_nb.guard.shadows import Shadows

X = torch.randn(512, 12, generator=torch.Generator().manual_seed(1))
Y = (X @ torch.randn(12, 4, generator=torch.Generator().manual_seed(2))).argmax(1)


def network():
    with seeded(0): return nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))

def batches(n):
    g = torch.Generator().manual_seed(3)
    for _ in range(n): yield torch.randint(len(X), (64,), generator=g)

def train(net, opt, at): return update(opt, nn.functional.cross_entropy(net(X[at]), Y[at])).detach()

# --- averages, as people keep them: what is kept, and how it is updated

class Torchs:
    "Torch's own, with its count of updates."
    def __init__(self, net): self.kept = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(.95), use_buffers=True)
    def update(self, net): self.kept.update_parameters(net)

class Late(Torchs):
    "The same, from step 60 on."
    steps = 0
    def update(self, net):
        self.steps += 1
        if self.steps > 60: super().update(net)

class Epochs(Torchs):
    "The same, once in forty steps."
    steps = 0
    def update(self, net):
        self.steps += 1
        if self.steps % 40 == 0: super().update(net)

class Copied:
    "A copy of the network, averaged in place."
    def __init__(self, net): self.kept = copy.deepcopy(net)
    @torch.no_grad()
    def update(self, net):
        for a, p in zip(self.kept.parameters(), net.parameters()): a.lerp_(p, .05)

class Unseen(Copied):
    "The same, written by `.data`, which no version counts."
    def update(self, net):
        for a, p in zip(self.kept.parameters(), net.parameters()): a.data.mul_(.95).add_(p.data, alpha=.05)

class Table:
    "A table whose entries are exchanged."
    def __init__(self, net): self.kept = {k: p.detach().clone() for k, p in net.named_parameters()}
    def update(self, net):
        for k, p in net.named_parameters(): self.kept[k] = .95 * self.kept[k] + .05 * p.detach()

class StateTable:
    "A table of all state, buffers too, averaged in place."
    def __init__(self, net): self.kept = {k: v.clone() for k, v in net.state_dict().items()}
    def update(self, net):
        for k, v in net.state_dict().items():
            if v.is_floating_point(): self.kept[k].lerp_(v, .05)

class Listed:
    "A list of tensors, all averaged in one call, every eighth step."
    steps = 0
    def __init__(self, net): self.kept = [p.detach().clone() for p in net.parameters()]
    def update(self, net):
        self.steps += 1
        if self.steps % 8 == 0: torch._foreach_lerp_(self.kept, [p.detach() for p in net.parameters()], .3)

KINDS = (Torchs, Late, Epochs, Copied, Unseen, Table, StateTable, Listed)

def values(kept):
    state = kept.state_dict() if isinstance(kept, nn.Module) else kept
    return [v.clone() for v in (state.values() if isinstance(state, dict) else state)]

def run(kind, ruin, hand_over=(), steps=170, at=160):
    "Train, and ruin the weights before step `at`; return what is kept then, the Governor and the network."
    net = network()
    average, opt = kind(net), torch.optim.AdamW(net.parameters(), 3e-3)
    governor = Governor(net, opt, *(getattr(average, k) for k in hand_over), chance_loss=math.log(4))
    for k, rows in enumerate(batches(steps)):
        if k == at: ruin(net)
        loss = train(net, opt, rows)
        average.update(net)
        governor.watch(loss)
    return values(average.kept), governor, net

@torch.no_grad()
def nan(net): net[3].weight[0, 0] = math.nan

@torch.no_grad()
def huge(net): net[3].weight[0, 0] = 1e30

@torch.no_grad()
def swollen(net):
    for p in net.parameters(): p.mul_(300)

def nothing(net): "All is well."


@pytest.mark.parametrize("ruin", (nan, huge), ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", KINDS, ids=lambda c: c.__name__)
def test_an_average_goes_back_with_its_weights(kind, ruin):
    kept, governor, net = run(kind, ruin)
    handed, other, _ = run(kind, ruin, hand_over=("kept",))
    assert len(governor.reports) == len(other.reports) > 0
    assert all(v.isfinite().all() and v.abs().max() < 1e3 for v in kept)
    for a, b in zip(kept, handed): assert torch.equal(a, b) # as if it had been handed over


@pytest.mark.parametrize("kind", KINDS, ids=lambda c: c.__name__)
def test_an_average_that_is_updated_outside_of_the_step_goes_back_with_what_run_trains(kind):
    "The step and all that it refers to were restored, and what the loop itself keeps beside it stayed ruined."
    def by_run(ruin):
        net = network()
        average, opt = kind(net), torch.optim.AdamW(net.parameters(), 3e-3)
        governor = Governor(net, opt, chance_loss=math.log(4))
        for k, rows in enumerate(batches(200)):
            if k == 160: ruin(net)
            governor.run(lambda rows: train(net, opt, rows), rows)
            average.update(net)
        return torch.cat([v.flatten() for v in values(average.kept) if v.dim()]), governor, net
    (healthy, calm, alone), (kept, governor, net) = by_run(nothing), by_run(swollen)
    assert not calm.reports and calm.repairs.reliable and len(governor.reports) == 1
    assert all(map(torch.equal, net.state_dict().values(), alone.state_dict().values()))
    assert (kept - healthy).norm() < .2 * healthy.norm() # its updates are not redone


@pytest.mark.parametrize("kind", KINDS, ids=lambda c: c.__name__)
def test_a_healthy_run_stays_as_it_is(kind):
    kept, governor, net = run(kind, nothing)
    alone = network()
    average, opt = kind(alone), torch.optim.AdamW(alone.parameters(), 3e-3)
    for rows in batches(170):
        train(alone, opt, rows)
        average.update(alone)
    assert not governor.reports and not governor.notes
    for a, b in zip(kept + list(net.state_dict().values()), values(average.kept) + list(alone.state_dict().values())):
        assert torch.equal(a, b)


def test_running_statistics_of_an_average_are_mended_with_those_of_the_network():
    "A batch a thousand times too large moves them alone: only buffers go back, those of the average, too."
    def large(scale):
        net = network()
        average, opt = Torchs(net), torch.optim.AdamW(net.parameters(), 3e-3)
        governor = Governor(net, opt, chance_loss=math.log(4))
        for k, rows in enumerate(batches(170)):
            before = X[rows].clone()
            if k == 160: X[rows] = before * scale
            loss = train(net, opt, rows)
            X[rows] = before
            average.update(net)
            governor.watch(loss)
        return average.kept.module[1].running_var, governor
    healthy, _ = large(1.)
    variance, governor = large(1e4)
    assert governor.reports
    assert .5 < (variance / healthy).mean() < 2


class Holder:
    "A class of averages as a library has it: the list is an attribute that the loop never names."
    def __init__(self, net): self.kept = [p.detach().clone() for p in net.parameters()]
    def update(self, net): vars(Holder)["average"](self, net)
    def average(self, net):
        with torch.no_grad():
            for a, p in zip(vars(self)["kept"], net.parameters()): a.lerp_(p, .05)

def test_two_averages_of_one_class_are_told_apart():
    net = network()
    averages, opt = [Holder(net), Holder(net)], torch.optim.AdamW(net.parameters(), 3e-3)
    governor = Governor(net, opt, chance_loss=math.log(4))
    first, second = averages
    for k, rows in enumerate(batches(170)):
        if k == 160: nan(net)
        loss = train(net, opt, rows)
        first.update(net)
        second.update(net)
        governor.watch(loss)
    assert all(v.isfinite().all() for one in averages for v in one.kept)


def test_a_teacher_that_is_ruined_by_itself_is_put_back():
    "Averaged weights that the network learns to agree with: NaN in them alone makes every loss NaN."
    net = network()
    teacher, opt = Copied(net), torch.optim.AdamW(net.parameters(), 3e-3)
    governor = Governor(net, opt, chance_loss=math.log(4))
    for k, rows in enumerate(batches(200)):
        if k == 160: nan(teacher.kept)
        guess = net(X[rows])
        with torch.no_grad(): aim = teacher.kept(X[rows]).softmax(1)
        loss = nn.functional.cross_entropy(guess, Y[rows]) + (guess.softmax(1) - aim).square().sum(1).mean()
        update(opt, loss)
        teacher.update(net)
        governor.watch(loss.detach())
    assert [r.action for r in governor.reports if r.action == "rollback"] == ["rollback"]
    assert not any("handed over" in r.why for r in governor.reports)
    assert all(v.isfinite().all() for v in values(teacher.kept)) and math.isfinite(loss.item())


# --- what is no average

class Best:
    "A copy of the best weights so far."
    def __init__(self, net): self.kept, self.steps = copy.deepcopy(net), 0
    def update(self, net):
        self.steps += 1
        if self.steps % 40: return
        self.kept.load_state_dict(net.state_dict())

class Frozen:
    "A network that nobody writes."
    def __init__(self, net): self.kept = copy.deepcopy(net)
    def update(self, net): pass

@pytest.mark.parametrize("kind", (Best, Frozen), ids=lambda c: c.__name__)
def test_what_does_not_follow_is_left_alone(kind):
    net = network()
    average, opt = kind(net), torch.optim.AdamW(net.parameters(), 3e-3)
    governor = Governor(net, opt, chance_loss=math.log(4))
    for k, rows in enumerate(batches(170)):
        if k == 140: nan(net)
        loss = train(net, opt, rows)
        if k < 140: average.update(net)
        governor.watch(loss)
        if k == 139: before = values(average.kept)
    assert governor.reports[0].action == "rollback"
    for a, b in zip(before, values(average.kept)): assert torch.equal(a, b)


@pytest.mark.parametrize("guarded", (True, False))
def test_a_second_network_is_not_moved(guarded):
    "Two networks of one shape are trained beside each other: a rollback of the first leaves the second as it is."
    first, second = network(), network()
    optimizers = [torch.optim.SGD(n.parameters(), .05) for n in (first, second)]
    governors = [Governor(first, optimizers[0], chance_loss=math.log(4))]
    if guarded: governors.append(Governor(second, optimizers[1], chance_loss=math.log(4)))
    for k, rows in enumerate(batches(220)):
        if k == 200: nan(first)
        losses = [train(n, o, rows) for n, o in zip((first, second), optimizers)]
        kept = values(second)
        for governor, loss in zip(governors, losses): governor.watch(loss)
        for a, b in zip(kept, values(second)): assert torch.equal(a, b)
    assert governors[0].reports[0].action == "rollback"
    assert all(v.isfinite().all() for v in first.state_dict().values())


# --- files, checkpoints, memory

def test_files_and_checkpoints_know_nothing_of_it(tmp_path):
    "What was found means nothing to another process: its states load there, and are as small as without."
    def begin(**options):
        net = network()
        opt = torch.optim.AdamW(net.parameters(), 3e-3)
        return net, opt, Governor(net, opt, chance_loss=math.log(4), **options)
    net, opt, governor = begin(folder=tmp_path)
    average = Torchs(net)
    for rows in batches(220):
        loss = train(net, opt, rows)
        average.update(net)
        governor.watch(loss)
    assert any(isinstance(o, Shadows) for o in governor.snapshot.objects.values())
    state = governor.state_dict()
    assert not [k for bank in state["snapshot"]["banks"] for k in bank if k.startswith("shadows")]
    governor.close()
    other, opt2, again = begin()
    again.load_state_dict(state)
    nan(other)
    again.watch(math.nan)
    again.watch(math.nan)
    assert all(v.isfinite().all() for v in other.state_dict().values())
    fresh = network()
    step = Governor.recover(tmp_path, fresh, torch.optim.AdamW(fresh.parameters(), 3e-3))
    assert step >= 100 and not torch.equal(fresh[0].weight, network()[0].weight)


def test_nothing_of_a_loop_outlives_its_governor():
    def cell():
        net = network()
        average, opt = Torchs(net), torch.optim.AdamW(net.parameters(), 3e-3)
        governor = Governor(net, opt, chance_loss=math.log(4))
        for rows in batches(120):
            loss = train(net, opt, rows)
            average.update(net)
            governor.watch(loss)
        return weakref.ref(average.kept)
    kept = cell()
    gc.collect()
    assert kept() is None
