"Loops as tutorials have them, of kinds that no benchmark has: tiny, each with what went wrong there."
import copy
import functools
import itertools
import multiprocessing
import os
import resource
import threading
from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from tiny import fed, take, update

from esper_nb.guard import Governor, GovernorConfig, footprint
from esper_nb.guard.recorder import StepRecorder, is_data, own_copy
from esper_nb.guard.rehearsal import in_a_fork
from esper_nb.guard.snapshots import trained_by
from esper_nb.guard.writes import untrained_in

pytestmark = pytest.mark.usefixtures("one_thread")
OFTEN = GovernorConfig(snapshot_every=10, probation=10)

def descend(opt, loss): return update(opt, loss).item()

def guarded_layer(kind, outputs=1, config=OFTEN, guarded=True, **settings):
    "A layer of four inputs with the weights of seed 0, its optimizer of a kind, and their Governor, or none."
    torch.manual_seed(0)
    net = nn.Linear(4, outputs)
    opt = kind(net.parameters(), **settings)
    return net, opt, Governor(net, opt, chance_loss=None, config=config) if guarded else None


def prune_by_hand(m):
    m.register_buffer("kept", (m.weight.abs() > m.weight.abs().median()).float())
    m.weight.data *= m.kept

@pytest.mark.parametrize("change, says", [
    (lambda m: prune.l1_unstructured(m, "weight", amount=.5), "before the pruning, whose masks stay in force"),
    (prune_by_hand, "had zeros that the good state does not have"),
    (weight_norm, "the structure of model changed, and that is undone"),
    (nn.utils.weight_norm, "the structure of model changed, and that is undone")])
@pytest.mark.parametrize("way", ["watch", "run"])
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_layer_changed_since_the_good_state_keeps_its_mask_or_is_whole_again(change, says, way):
    "Where its weight is made of other parameters, these are gone with those of now; a mask may stay; and it is said."
    net, opt, governor = guarded_layer(torch.optim.SGD, lr=.01, outputs=8)
    kind, x = type(net), torch.randn(8, 4)
    def step(x):
        loss = descend(opt, net(x).square().mean())
        if hasattr(net, "kept"): net.weight.data *= net.kept
        return loss
    for i in range(40):
        if i == 32: change(net)
        if i == 33: next(iter(net.parameters())).data.view(-1)[0] = torch.nan
        take(governor, step, x, way)
    report, = governor.reports
    assert report.action == "rollback" and report.restored_batch <= 30 and says in report.undone
    assert type(net) is kind and net.weight.isfinite().all()
    if prune.is_pruned(net): assert (net.weight == 0).sum() == 16 == (net.weight_mask == 0).sum()
    else: assert net.weight is dict(net.named_parameters())["weight"] and hasattr(net, "kept") == ("zeros" in says)

class Ranged(nn.Linear):
    "Keeps the range of its inputs, as an observer of quantisation does: each pass puts a new tensor in the buffer."
    def __init__(self):
        super().__init__(4, 8)
        self.register_buffer("most", torch.zeros(()))
        self.register_buffer("latest", None)

    def forward(self, x):
        if self.training: self.most, self.latest = torch.maximum(self.most, x.abs().max()), x[:len(x) // 2].detach()
        return super().forward(x)

@pytest.mark.parametrize("way", ["watch", "run"])
def test_buffers_that_each_pass_assigns_are_no_change_of_structure(way):
    "They are restored by value, and nothing is said of a structure: there is nothing to change again."
    torch.manual_seed(0)
    net = Ranged()
    opt = torch.optim.SGD(net.parameters(), lr=.01)
    governor = Governor(net, opt, chance_loss=None, config=OFTEN)
    def step(x): return descend(opt, net(x).square().mean())
    for i in range(40):
        if i == 33: net.weight.data[0, 0] = net.most = torch.tensor(torch.nan)
        take(governor, step, torch.randn(8 + 2 * i, 4), way)
    report, = governor.reports
    assert report.action == "rollback" and not report.undone
    assert net.weight.isfinite().all() and net.most.isfinite()

def test_a_weight_that_makes_only_the_gradient_nan_is_found_soon():
    "A spike, a clamp or a maximum hides NaN from the loss, and the dropped updates were all that was seen of it."
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    opt = torch.optim.SGD(net.parameters(), lr=.01)
    governor = Governor(net, opt, chance_loss=None)
    for i in range(160):
        if i == 102: net[0].weight.data[0, 0] = torch.nan
        y = net(torch.randn(8, 4))
        descend(opt, torch.where(y.isnan(), 0., y).square().mean())
        governor.watch(.5)
    report, = governor.reports
    assert report.reason == "state" and report.batch < 102 + 16 and net[0].weight.isfinite().all()

@pytest.mark.parametrize("way", ["watch", "run"])
def test_a_layer_that_is_pruned_once_more_keeps_its_latest_mask(way):
    "As iterative pruning has it: the second mask takes the place of the first one."
    net, opt, governor = guarded_layer(torch.optim.SGD, lr=.01, outputs=8)
    x = torch.randn(8, 4)
    def step(x): return descend(opt, net(x).square().mean())
    for i in range(40):
        if i in (12, 32): prune.l1_unstructured(net, "weight", amount=.5)
        if i == 33: net.bias.data[0] = torch.nan
        take(governor, step, x, way)
    report, = governor.reports
    assert report.action == "rollback" and 12 < report.restored_batch <= 30
    assert "before the pruning, whose masks stay in force" in report.undone
    assert (net.weight_mask == 0).sum() == 24 == (net.weight == 0).sum() and net.weight.isfinite().all()


def test_a_step_that_fails_with_older_weights_leaves_them_uncompared():
    "As a Cholesky factor of older weights may: it was an error of the Governor, in a healthy run."
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    opt = torch.optim.SGD(net.parameters(), lr=.004)
    governor = Governor(net, opt, chance_loss=None, config=OFTEN)
    least = -9.
    def step(batch):
        nonlocal least
        x, y = batch
        if (now := net.weight.item()) < least: raise ValueError("older weights than before")
        least = now - .01
        return descend(opt, F.mse_loss(net(x), y))
    g = torch.Generator().manual_seed(0)
    for i in range(300):
        x = torch.randn(32, 1, generator=g)
        governor.run(step, (x, (5 if i < 150 else 8) * x + .5 * torch.randn(32, 1, generator=g)))
    assert not governor.reports and [n.action for n in governor.notes] == ["wait", "accepted"]


class Noam:
    "The schedule of the annotated transformer: an optimizer around one of torch's."
    def __init__(self, inner): self.optimizer, self.at = inner, 0
    def zero_grad(self): self.optimizer.zero_grad()
    def step(self):
        self.at += 1
        for g in self.optimizer.param_groups: g["lr"] = .2 * min(self.at**-.5, self.at * 20**-1.5)
        self.optimizer.step()

class Saved(Noam):
    "The same with a state."
    def state_dict(self): return dict(at=self.at, inner=self.optimizer.state_dict())
    def load_state_dict(self, state):
        self.at = state["at"]
        self.optimizer.load_state_dict(state["inner"])

class Several:
    "Two optimizers as one, as for a sparse table beside dense layers."
    def __init__(self, *inner): self.optimizers = inner
    def zero_grad(self): [o.zero_grad() for o in self.optimizers]
    def step(self): [o.step() for o in self.optimizers]

@pytest.mark.parametrize("wrap, found", [(Noam, {"optimizer"}), (Saved, {"saved", "optimizer"})])
def test_what_an_optimizer_of_ones_own_steps_with_is_a_part(wrap, found):
    "Else its rate is not recorded: a rate that the loop had raised was blamed on the hardware."
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    opt = wrap(torch.optim.SGD(net.parameters(), lr=0.))
    governor = Governor(net, opt, chance_loss=None)
    assert found == {k for k in governor.snapshot.parts if k in ("saved", "noam", "optimizer")}
    assert governor.gate is not None
    def step(x): return descend(opt, net(x).square().mean())
    for _ in range(3): governor.run(step, torch.ones(8, 4))
    assert dict(governor.recorder.steps[-1].after[0])["lr"] == opt.optimizer.param_groups[0]["lr"] > 0


def test_several_optimizers_as_one_are_parts_each():
    nets = nn.Linear(2, 2), nn.Linear(2, 2)
    several = Several(*[torch.optim.Adam(n.parameters()) for n in nets])
    governor = Governor(*nets, several, chance_loss=None)
    assert {"model", "model2", "optimizer", "optimizer2"} <= set(governor.snapshot.parts)
    assert [governor.snapshot.objects[k] for k in ("optimizer", "optimizer2")] == list(several.optimizers)


class LateOptim:
    "Makes an optimizer for a parameter when it meets it, as Pyro's do; it has no state of its own, and is called."
    def __init__(self, make): self.make, self.optim_objs = make, {}
    def __call__(self, params):
        for p in params:
            made = self.optim_objs.setdefault(p, None) or self.make([p])
            self.optim_objs[p] = made
            getattr(made, "optimizer", made).step()
            p.grad = None

def scheduled(params): return torch.optim.lr_scheduler.ExponentialLR(torch.optim.Adam(params, .01), 1.)

@pytest.mark.parametrize("make", [torch.optim.Adam, scheduled])
def test_optimizers_that_are_made_in_the_first_step_are_parts_after_it(make):
    "A Governor of such an optimizer was an error that named no way out, and without it a raised rate had no cause."
    torch.manual_seed(0)
    net, optim = nn.Linear(4, 1), LateOptim(make)
    with pytest.raises(ValueError, match="hand it over after that step"): Governor(net, optim, chance_loss=None)
    def step(x):
        loss = net(x).square().mean()
        loss.backward()
        optim(list(net.parameters()))
        return loss.item()
    step(torch.ones(8, 4))
    governor = Governor(net, optim, chance_loss=None, config=OFTEN)
    mine = [getattr(o, "optimizer", o) for o in optim.optim_objs.values()]
    assert [governor.snapshot.objects[k] for k in ("optimizer", "optimizer2")] == mine
    for k, x in enumerate(torch.randn(60, 8, 4)):
        if k == 40: net.weight.data[0, 0] = torch.nan
        governor.run(step, x)
    report, = governor.reports
    assert report.cause == "external" and report.redone > 0
    assert all(t.isfinite().all() for o in mine for held in o.state.values() for t in held.values())
    with pytest.raises(ValueError, match="expected an object with state_dict"): # of which the network is the rest
        Governor(SimpleNamespace(net=net, opt=mine[0]), chance_loss=None)


AIM = torch.tensor([[1.], [-2.], [3.], [.5]])

def batches(n, seed=0):
    "Batches of a linear task with a little noise."
    g = torch.Generator().manual_seed(seed)
    for i in range(n):
        x = torch.randn(32, 4, generator=g)
        yield i, (x, x @ AIM + .3 * torch.randn(32, 1, generator=g))

@pytest.mark.parametrize("way", ["watch", "run"])
@pytest.mark.parametrize("of", [list, lambda pair: dict(zip("wb", pair))])
def test_weights_without_a_module_are_restored_where_they_are(way, of, caplog):
    "As of torch.func, or written by hand: copies that asked for no gradient ended the run after a rollback."
    w, b = torch.zeros(4, 1, requires_grad=True), torch.zeros(1, requires_grad=True)
    weights, opt = of([w, b]), torch.optim.Adam([w, b], .1)
    governor = Governor(weights, opt, chance_loss=None, config=OFTEN)
    def step(batch): return descend(opt, F.mse_loss(batch[0] @ w + b, batch[1]))
    for i, batch in batches(120):
        if i == 80: w.data[0] = torch.nan
        take(governor, step, batch, way)
    report, = governor.reports
    assert w is next(iter(weights.values() if isinstance(weights, dict) else weights)) and w.requires_grad
    assert (w - AIM).abs().max() < .3 and "no weights will be restored" not in caplog.text
    if way == "run": assert report.cause == "external" and "wrote into the state" in report.why and not report.lost


def as_arrays(w, m): return [w, m]
def as_list(w, m): return [[w, m]]
def as_nested(w, m): return [dict(layer=dict(w=w), moments=(m,))]
def as_functions(w, m): # as of a library that offers no `state_dict`
    def write(state): w[:], m[:] = state["w"], state["m"]
    return [(lambda: dict(w=w.copy(), m=m.copy()), write)]

@pytest.mark.parametrize("way", ["watch", "run"])
@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
@pytest.mark.parametrize("of", [as_arrays, as_list, as_nested])
def test_a_network_in_arrays_goes_back_where_it_is_and_is_not_called_finite(of, make, way, caplog):
    "Arrays in a dict were replaced, so the loop kept its NaN; it was told that all weights are finite, and of none."
    w, m = make(4), make(4)
    governor = Governor(*of(w, m), chance_loss=None, config=OFTEN)
    def step(batch):
        x, y = (t if make is torch.zeros else t.numpy() for t in batch)
        error = x @ w - y[:, 0]
        m[:] = .9 * m + x.T @ error / len(y)
        w[:] = w - .02 * m
        return float((error**2).mean())
    for i, batch in batches(120):
        if i == 80: w[0] = np.nan
        take(governor, step, batch, way)
    report, = governor.reports
    assert report.batch == 80 and not governor.notes
    assert abs(torch.as_tensor(w).float() - AIM[:, 0]).max() < .3 and "no weights will be restored" not in caplog.text
    if way == "run": assert report.cause == "external" and not report.lost


def test_the_arrays_that_two_functions_read_are_looked_at(caplog):
    w, m = np.ones(4), np.zeros(4)
    governor = Governor(*as_functions(w, m), chance_loss=None, config=OFTEN)
    for _ in range(60): governor.watch(.5)
    w[0] = np.nan # and no loss shows it
    for _ in range(30): governor.watch(.5)
    assert [r.reason for r in governor.reports] == ["state"] and w.tolist() == [1] * 4
    assert "no weights will be restored" not in caplog.text


def test_an_array_with_gaps_from_the_start_is_a_log():
    net = nn.Linear(4, 1)
    opt = torch.optim.SGD(net.parameters(), .01)
    log = np.full(200, np.nan)
    governor = Governor(net, opt, log=log, chance_loss=None, config=OFTEN)
    for i, (x, y) in batches(100):
        log[i] = descend(opt, F.mse_loss(net(x), y))
        governor.watch(log[i])
    assert not governor.reports and governor.snapshot.steps[0] > 50


@pytest.mark.parametrize("raised", [False, True])
def test_a_module_over_the_memory_of_other_tensors_is_what_is_trained(raised):
    "A ParameterDict of tensors has parameters of its own: they were taken for a target that stays."
    torch.manual_seed(0)
    w = torch.zeros(4, 1, requires_grad=True)
    module, opt = nn.ParameterDict(dict(w=w)), torch.optim.SGD([w], .02)
    governor = Governor(module, opt, chance_loss=None)
    def step(batch): return descend(opt, F.mse_loss(batch[0] @ w, batch[1]))
    assert module["w"] is not w
    for i, batch in batches(290):
        if i == 180 and raised: opt.param_groups[0]["lr"] *= 53
        elif i == 180: w.data += 1.
        governor.run(step, batch)
    assert [r.cause for r in governor.reports] == ["rate" if raised else "external"]
    assert (w - AIM).abs().max() < .3


def replacing(kind, steps):
    "Number, network and Governor before each step of a loop that makes another optimizer at step 60."
    net, opt, governor = guarded_layer(kind, lr=.05, config="batch")
    for i, (x, y) in batches(steps):
        if i == 60: opt = kind(net.parameters(), 1e-3)
        yield i, net, governor
        governor.watch(descend(opt, F.mse_loss(net(x), y)))

def test_an_optimizer_that_was_replaced_is_no_witness(caplog):
    "Of a new one nothing is seen, so nothing speaks for the weights; and it is said."
    for i, net, governor in replacing(torch.optim.SGD, 340):
        if i == 250: net.weight.data += torch.tensor([3., 3., -3., 3.])
    assert "no optimizer among the parts has stepped since batch 59" in caplog.text
    assert [r.action for r in governor.reports] == ["rollback"]
    assert (net.weight - AIM.T).abs().max() < .3


def test_moments_of_an_optimizer_that_was_made_on_the_way_do_not_ruin_what_was_put_back(caplog):
    "Each rollback was in vain: a step with NaN in the moments came next, again and again, to the end of the run."
    for i, net, governor in replacing(torch.optim.Adam, 240):
        if i == 106: assert "there is another one for the same weights (Adam)" in caplog.text
        if i == 180: net.weight.data.fill_(torch.nan)
    assert [r.action for r in governor.reports] == ["rollback"] and net.weight.isfinite().all()
    assert "its moments were not finite" in caplog.text


@pytest.mark.parametrize("way", ["schedule", "load"])
def test_a_rate_that_was_the_cause_is_taken_back(way):
    "From a schedule that multiplies it, and where a step has loaded the optimizer's state since."
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    opt, i = torch.optim.SGD(net.parameters(), .02), 0
    schedule = torch.optim.lr_scheduler.StepLR(opt, 100, .9)
    governor = Governor(net, opt, *[schedule] * (way == "schedule"), chance_loss=None)
    def step(batch):
        nonlocal i
        i += 1
        if way == "load" and i == 160: opt.load_state_dict(opt.state_dict())
        loss = descend(opt, F.mse_loss(net(batch[0]), batch[1]))
        if way == "schedule": schedule.step()
        return loss
    for k, batch in batches(400):
        if k == 180: opt.param_groups[0]["lr"] *= 53
        governor.run(step, batch)
    report, = governor.reports
    assert report.cause == "rate" and report.redone and opt.param_groups[0]["lr"] <= .02
    assert (net.weight - AIM.T).abs().max() < .3


@pytest.mark.parametrize("bad", [-.2, -.02, torch.nan, torch.inf])
@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("way", ["watch", "run"])
def test_a_rate_that_is_none_does_not_outlast_a_rollback(bad, scheduled, way):
    "Below zero, each update climbs, however small it is; what multiplies the rate never makes it one again."
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    opt = torch.optim.SGD(net.parameters(), .02)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 100, .9)
    governor = Governor(net, opt, *[schedule] * scheduled, chance_loss=None)
    def step(batch):
        loss = descend(opt, F.mse_loss(net(batch[0]), batch[1]))
        if scheduled: schedule.step()
        return loss
    for k, batch in batches(400):
        if k == 180: opt.param_groups[0]["lr"] = bad
        take(governor, step, batch, way)
    report, = governor.reports
    assert report.action == "rollback" and 0 < opt.param_groups[0]["lr"] <= .02
    assert (net.weight - AIM.T).abs().max() < .3
    if way == "run": assert report.cause == "rate" and f"to {bad:g}, most of all at batch 180" in report.why


def test_weights_whose_data_are_exchanged_between_steps_speak_against_a_rise():
    "Torch counts no write there, and clipped gradients are no larger: nothing spoke against the weights."
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    net.weight.data.copy_(AIM.T)
    opt = torch.optim.SGD(net.parameters(), 1e-3)
    governor = Governor(net, opt, chance_loss=None)
    for k, (x, y) in batches(260):
        if k == 150: net.weight.data = net.weight.data + .5
        loss = F.mse_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), .01)
        opt.step()
        governor.watch(loss.item())
    report, = governor.reports
    assert report.action == "rollback" and (net.weight - AIM.T).abs().max() < .05


@pytest.mark.parametrize("bad", [pytest.param(dict(weight_decay=20.), marks=pytest.mark.slow), dict(momentum=1.2)])
def test_a_setting_that_is_proved_to_be_the_cause_is_put_back(bad):
    "It had been named, and stayed: what a loop sets between two steps outlasts a rollback otherwise."
    def trained(bad):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
        opt = torch.optim.SGD(net.parameters(), .05, momentum=.5)
        governor = Governor(net, opt, chance_loss=None)
        def step(batch): return descend(opt, F.mse_loss(net(batch[0]), batch[1]))
        for k, batch in batches(300):
            if k == 180: opt.param_groups[0].update(bad)
            governor.run(step, batch)
        return net, opt.param_groups[0], governor
    (net, group, governor), (healthy, usual, _) = trained(bad), trained({})
    report, = governor.reports
    assert report.cause == "settings" and report.redone and all(group[k] == usual[k] for k in bad)
    assert all(map(torch.equal, net.parameters(), healthy.parameters()))


@pytest.mark.parametrize("beside", [False, True])
def test_a_rate_raised_for_good_is_told_with_the_batch_of_that(beside):
    "Old weights are compared at rates of then, and another optimizer keeps its own: neither takes the raise back."
    torch.manual_seed(0)
    net, other = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(m.parameters(), .02) for m in (net, other)[:1 + beside]]
    governor = Governor(net, other, *optimizers, chance_loss=None)
    g = torch.Generator().manual_seed(1)
    for i, (x, y) in batches(450):
        if i == 150: optimizers[0].param_groups[0]["lr"] *= 9
        if i >= 150: y = y + 3 * torch.randn(32, 1, generator=g)
        loss = F.mse_loss(net(x), y) + F.mse_loss(other(x), y)
        for opt in optimizers: opt.zero_grad()
        loss.backward()
        for opt in optimizers: opt.step()
        governor.watch(loss.item())
    assert [n.action for n in governor.notes].count("accepted") == 1
    assert governor.log.remarks["rate"] == "the learning rate is 0.18 from batch 150 on, and was at most 0.02 before"
    compared = [n.batch for n in governor.notes if n.action == "compare"]
    assert len(set(compared)) == len(compared) # one that goes on later is another one


def test_an_optimizer_that_steps_seldom_is_still_the_one_that_trains(caplog):
    "After many small batches: it was taken for one that had been replaced."
    net, opt, governor = guarded_layer(torch.optim.SGD, lr=.05, config="batch")
    for i, (x, y) in batches(700):
        loss = F.mse_loss(net(x), y)
        (loss / 128).backward()
        if i % 128 == 127:
            opt.step()
            opt.zero_grad()
        governor.watch(loss.item())
    assert not governor.log.remarks and not governor.reports


class OwnNorm(nn.Module):
    "A norm whose statistics are other tensors after each batch."
    def __init__(self):
        super().__init__()
        self.register_buffer("size", torch.ones(4))
    def forward(self, x):
        self.size = .9 * self.size + .1 * x.std(0).detach()
        return x / x.std(0)


def test_buffers_that_are_exchanged_at_every_batch_are_looked_at():
    torch.manual_seed(0)
    net = nn.Sequential(OwnNorm(), nn.Linear(4, 1))
    opt = torch.optim.SGD(net.parameters(), .05)
    governor = Governor(net, opt, chance_loss=None, config=OFTEN)
    for i, (x, y) in batches(200):
        governor.watch(descend(opt, F.mse_loss(net(x * (1e4 if i == 150 else 1)), y)))
    assert [r.restored for r in governor.reports] == [("model.0.size",)] and net[0].size.max() < 10


class Largest(torch.optim.SGD):
    "Divides by the largest rate so far, which it keeps in its group, as schedule-free optimizers and Prodigy do."
    def step(self, closure=None):
        for g in self.param_groups:
            g["count"], g["largest"] = g.get("count", 0) + 1, max(g.get("largest", 0.), g["lr"])
            rate, g["lr"] = g["lr"], g["lr"] * .05 / g["largest"]**.5
            super().step(closure)
            g["lr"] = rate

def test_what_an_optimizer_keeps_in_its_groups_goes_back_with_the_weights():
    "It stayed as the ruined steps had left it: a rate that was put back had left a mark for good."
    def train(guarded):
        net, opt, governor = guarded_layer(Largest, lr=1.)
        def step(batch): return descend(opt, F.mse_loss(net(batch[0]), batch[1]))
        for i, batch in batches(110):
            if guarded and i in (80, 83): opt.param_groups[0]["lr"] = 1e4 if i == 80 else 1.
            if guarded: governor.run(step, batch)
            else: step(batch)
        return governor, net.weight, opt.param_groups[0]
    (_, clean, then), (governor, weight, group) = train(False), train(True)
    assert governor.reports[0].cause == "rate"
    assert (group["largest"], group["count"]) == (then["largest"], then["count"]) == (1, 110)
    assert torch.equal(weight, clean)


class Needy(torch.optim.SGD):
    "Counts in its group and needs every gradient, as Muon does."
    def step(self, closure=None):
        for g in self.param_groups:
            g["count"] = g.get("count", 0) + 1
            for p in g["params"]: self.state[p]["sum"] = self.state[p].get("sum", 0.) + p.grad.abs()
        super().step(closure)

Needy.__module__ = "muon"

class Nesting(Needy):
    "Looks ahead: it steps with an optimizer of torch's."
    def __init__(self, params, **kwargs):
        super().__init__(params, **kwargs)
        self.inner = torch.optim.SGD(params, lr=.1, momentum=.9)

    def step(self, closure=None):
        super().step(closure)
        self.inner.step()

@pytest.mark.parametrize("kind", [Needy, Nesting])
def test_a_dropped_update_leaves_no_trace_in_an_optimizer_of_others(kind):
    "Muon died of gradients that were taken away, and a count in a group went on."
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    opt = kind(list(net.parameters()), lr=.01, momentum=.9)
    governor = Governor(net, opt, chance_loss=None, config=OFTEN)
    def read(): return copy.deepcopy([p.tolist() for p in net.parameters()] + [o.state_dict() for o in (
        opt, *([opt.inner] if kind is Nesting else []))])
    for i, (x, y) in batches(40):
        before = read()
        governor.watch(descend(opt, F.mse_loss(net(x * (torch.nan if i == 30 else 1)), y)))
        if i == 30: assert str(read()) == str(before) and net.weight.grad.isnan().all()
    assert governor.gate.counts["dropped"] == 1


class Buffer:
    "A replay buffer of a library that cannot read its state once it has loaded one."
    def __init__(self, most): # rows with which it can
        self.cursor, self.rows = multiprocessing.Value("i", 0), torch.zeros(64, 5)
        self.most, self.spoilt = most, False
    def __len__(self): return self.cursor.value
    def extend(self, x, y):
        at = torch.arange(self.cursor.value, self.cursor.value + len(x)) % 64
        self.rows[at] = torch.cat([x, y], 1)
        self.cursor.value += len(x)
    def state_dict(self):
        if self.spoilt and self.cursor.value > self.most: raise KeyError("the keys collide")
        return dict(rows=self.rows.clone(), cursor=self.cursor.value)
    def load_state_dict(self, state):
        self.rows.copy_(state["rows"])
        self.cursor.value, self.spoilt = state["cursor"], state["cursor"] > 0

Buffer.__module__ = "torch.buffers"

@pytest.mark.parametrize("most", [0, 64])
def test_what_can_be_put_back_no_more_is_not_run_twice(most):
    "Else the buffer of a healthy run is filled by steps that nobody has made. The dry replay sees the first kind."
    def train(guarded):
        torch.manual_seed(0)
        net, buffer = nn.Linear(4, 1), Buffer(most)
        opt = torch.optim.SGD(net.parameters(), lr=.01)
        governor = Governor(net, opt, chance_loss=None, config=OFTEN)
        def step(batch):
            buffer.extend(*batch)
            rows = buffer.rows[torch.randint(0, min(len(buffer), 64), (16,))]
            return descend(opt, F.mse_loss(net(rows[:, :4]), rows[:, 4:]))
        for _, batch in batches(90):
            if guarded: governor.run(step, batch)
            else: step(batch)
        return net.weight, len(buffer), buffer.spoilt
    weight, seen, spoilt = train(True)
    assert most or not spoilt
    assert seen == 90 * 32 and torch.equal(weight, train(False)[0])


class NoRate(torch.optim.SGD):
    "Finds its own rate, as Adafactor with `lr=None`."
    def step(self, closure=None):
        for g in self.param_groups: g["lr"] = .01
        super().step(closure)
        for g in self.param_groups: g["lr"] = None

class Clipping(torch.optim.Optimizer):
    "An optimizer around another one that never calls `Optimizer.__init__`, as that of Opacus."
    def __init__(self, inner): self.inner = inner
    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)
    def zero_grad(self, set_to_none=True): self.inner.zero_grad(set_to_none)
    def step(self, closure=None): self.inner.step(closure)
    def state_dict(self): return self.inner.state_dict()
    def load_state_dict(self, state_dict): self.inner.load_state_dict(state_dict)

def without_rate(params):
    opt = NoRate(params, lr=.01)
    opt.param_groups[0]["lr"] = None
    return opt

@pytest.mark.parametrize("make", [without_rate, lambda params: Clipping(torch.optim.SGD(params, lr=.01))])
@pytest.mark.parametrize("way", ["watch", "run"])
def test_an_optimizer_without_a_rate_or_without_hooks_is_guarded(make, way):
    "Both were errors of the Governor before the first step."
    net, opt, governor = guarded_layer(make)
    def step(batch): return descend(opt, F.mse_loss(net(batch[0]), batch[1]))
    for i, batch in batches(120):
        if i == 80: net.weight.data[0] = torch.nan
        take(governor, step, batch, way)
    governor.close()
    assert [r.action for r in governor.reports] == ["rollback"] and net.weight.abs().max() < 10

def test_an_optimizer_without_hooks_is_compared_with_its_old_weights():
    "The comparison asks optimizers to tell when their state is read: one that lacks torch's hooks ended the run."
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    opt = Clipping(torch.optim.SGD(net.parameters(), lr=.01))
    governor = Governor(net, opt, chance_loss=None, config=OFTEN)
    for i, (x, y) in batches(300):
        if i == 120: net.requires_grad_(False).weight.fill_(30.) # a head that was frozen by mistake
        loss = F.mse_loss(net(x), y)
        if i < 120: descend(opt, loss)
        governor.watch(loss.detach())
    governor.close()
    assert "compare" in [n.action for n in governor.notes]

@pytest.mark.parametrize("way", ["watch", "run"])
def test_a_group_may_be_empty(way):
    "As the one without weight decay is when adapters are trained, which have no biases."
    torch.manual_seed(0)
    net = nn.Linear(4, 1, bias=False)
    opt = torch.optim.SGD([dict(params=list(net.parameters())), dict(params=[])], lr=.01)
    governor = Governor(net, opt, chance_loss=None, config=OFTEN)
    def step(batch): return descend(opt, F.mse_loss(net(batch[0]), batch[1]))
    for i, batch in batches(60):
        if i == 40: net.weight.data[0] = torch.nan
        take(governor, step, batch, way)
    assert [r.action for r in governor.reports] == ["rollback"] and net.weight.isfinite().all()


def scripted(net): return torch.jit.script(net)

def traced(net): return torch.jit.trace(net, torch.randn(8, 4))

@pytest.mark.parametrize("make", [scripted, traced, lambda net: nn.Sequential(scripted(net), nn.Linear(1, 1))])
@pytest.mark.parametrize("way", ["watch", "run"])
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore::torch.jit.TracerWarning")
def test_a_network_of_torchscript_is_guarded(make, way):
    "Its tables lie in C++: they are read under other names, are no dicts, and stay as they are."
    def trained(way=None, ruined=False):
        torch.manual_seed(0)
        net = make(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)))
        other = traced(nn.Linear(4, 1)) # which nobody hands over
        opt = torch.optim.SGD(net.parameters(), .05)
        governor = Governor(net, opt, chance_loss=None, config=OFTEN) if way else None
        def step(batch): return descend(opt, F.mse_loss(net(batch[0]), batch[1] + other(batch[0]).detach()))
        for k, batch in batches(90):
            if k == 70 and ruined: next(net.parameters()).data.fill_(torch.nan)
            if way == "run": governor.run(step, batch)
            elif way == "watch": governor.watch(step(batch))
            else: step(batch)
        return net.state_dict(), governor
    trained() # the first run of its code is compiled on the way, and is another one, to the bit
    alone, _ = trained()
    healthy, governor = trained(way)
    assert all(torch.equal(alone[k], healthy[k]) for k in alone) and not governor.reports and not governor.log.remarks
    ruined, governor = trained(way, True)
    report, = governor.reports
    assert report.rolled_back and all(t.isfinite().all() for t in ruined.values())
    if way == "run": assert report.cause == "external" and report.redone


class OfKeras:
    "An optimizer of Keras on torch: no state_dict, variables around parameters."
    def __init__(self, moment): self.variables, self.built = [type("Variable", (), dict(value=moment))()], True
    def apply_gradients(self): pass

@pytest.mark.parametrize("of", [lambda moment: [moment], OfKeras])
def test_parameters_without_a_gradient_are_restored_where_they_are(of, caplog):
    "As the moments of a Keras optimizer: a copy in the list was restored, and the moments stayed NaN."
    moment = nn.Parameter(torch.ones(2), requires_grad=False)
    moments, net = of(moment), nn.Linear(4, 1)
    governor = Governor(net, moments=moments, chance_loss=None)
    assert ("no optimizer" in caplog.text) == isinstance(moments, list)
    moment.data.fill_(torch.nan)
    governor.rollback()
    assert moment.tolist() == [1, 1]
    if isinstance(moments, list): return
    moments.built = False
    with pytest.raises(ValueError, match="call `optimizer.build"): Governor(net, moments, chance_loss=None)


def test_a_write_that_shows_some_steps_later_is_named():
    "As into a row of an embedding that no batch reads for a while: nothing was said to have written."
    torch.manual_seed(0)
    table = nn.Embedding(8, 1)
    opt = torch.optim.SGD(table.parameters(), lr=.1)
    governor = Governor(table, opt, chance_loss=None, config=OFTEN)
    def step(x): return descend(opt, (table(x) - 1).square().mean())
    for i in range(60):
        if i == 40:
            with torch.no_grad(): table.weight[7] = torch.nan
        governor.run(step, torch.tensor([7 if i % 10 == 6 else i % 5] * 4))
    report, = governor.reports
    assert report.cause == "external" and "model.weight changed between batch 39 and batch 40" in report.why


def train_on_a_buffer(way, moves, fault=None, steps=60):
    "A loop that fills a buffer again and again, and whose step reads a slice of it, in an order that it shuffles."
    torch.manual_seed(0)
    net, made = nn.Linear(4, 1), torch.Generator().manual_seed(1)
    opt = torch.optim.SGD(net.parameters(), lr=.05)
    governor = None if way is None else Governor(net, opt, chance_loss=None, config=OFTEN)
    buffer, told = torch.zeros(64, 4), []
    def step(_): return descend(opt, F.mse_loss(net(x[order]), x[order] @ AIM))
    def read(loss):
        if way == "batches": governor.watch(loss)
    for i in range(steps // 4):
        start = i * 8 % 64 if moves else 0
        x, order = buffer[start:start + 8], torch.arange(8)
        x.copy_(torch.randn(8, 4, generator=made))
        def indices(i=i, order=order):
            for k in range(4):
                order.copy_(order[torch.randperm(8, generator=made)])
                if 4 * i + k == fault: net.weight.data[0] = torch.nan
                yield k
        told.append(buffer.clone())
        if way == "batches":
            for k in governor.batches(indices()): read(step(k))
        else:
            for k in indices(): step(k) if way is None else governor.run(step, k)
        if not torch.equal(told[-1], buffer): raise AssertionError(f"the buffer was written into, round {i}")
    if way == "run": governor.explain()
    return net.weight.detach().clone(), buffer, governor

@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("way", ["run", "batches"])
def test_what_the_loop_has_written_over_is_read_as_it_was_and_not_written_back(moves, way):
    "Old values in the buffer's memory made a replay another one: a write by hardware was blamed, the buffer ruined."
    alone, full, _ = train_on_a_buffer(None, moves)
    weight, buffer, governor = train_on_a_buffer(way, moves)
    assert torch.equal(weight, alone) and torch.equal(buffer, full) and not governor.reports
    weight, buffer, governor = train_on_a_buffer(way, moves, fault=49)
    assert torch.equal(buffer, full) and weight.isfinite().all()
    report, = governor.reports
    assert report.cause == "external" and "model.weight changed between batch 48 and batch 49" in report.why

def test_what_is_too_large_to_be_kept_twice_and_was_written_over_is_named():
    "The cause of such a run is unknown: its steps are not those of the run, if they are run again."
    net, opt, governor = guarded_layer(torch.optim.SGD, lr=.05)
    buffer = torch.zeros(2**17, 4)
    def step(_): return descend(opt, F.mse_loss(net(x[:8]), x[:8] @ AIM))
    for k in range(40):
        x = buffer[:]
        x[:8] = torch.randn(8, 4)
        if k == 35: net.weight.data[0] = torch.nan
        governor.run(step, k)
    report, = governor.reports
    assert (report.action, report.cause) == ("rollback", "unknown") and "`x` of batch" in report.why

def test_hardware_is_not_blamed_where_a_tensor_too_large_to_be_given_again_was_written(monkeypatch):
    "A replay reads what is there now; until then nothing was written, so that the steps were known to repeat."
    monkeypatch.setattr(footprint, "GIVEN", 100)
    net, opt, governor = guarded_layer(torch.optim.SGD, lr=.05)
    buffer = torch.randn(32, 4)
    def step(i): return descend(opt, F.mse_loss(net(buffer[i:i + 8]), buffer[i:i + 8] @ AIM))
    for k in range(90):
        if k > 20: buffer.copy_(torch.randn(32, 4))
        if k == 35: opt.param_groups[0]["lr"] = 1e3
        governor.run(step, k % 24)
    report = governor.reports[0]
    assert report.cause == "unknown" and "`buffer`" in report.why


def factor_of_300(k, governor, weight):
    "A write that batch norm hides from the loss; only the buffers were put back, four times, and then taken for good."
    if k == 160: weight.data.mul_(300)

def ten_times_twice(k, governor, weight):
    "As by a rate far too high: weights and variances grow together, each fits the other, and nobody has written."
    if 160 <= k < 170:
        with governor.live_weights(), torch.no_grad(): weight.mul_(2)

@pytest.mark.parametrize("harm, times", [(factor_of_300, 1), (ten_times_twice, 2)])
def test_a_weight_that_makes_buffers_jump_is_put_back_with_them(harm, times):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    opt = torch.optim.SGD(net.parameters(), .05, momentum=.9)
    governor = Governor(net, opt, chance_loss=.69)
    for k in range(220):
        x = torch.randn(64, 4) + 1
        loss = descend(opt, F.cross_entropy(net(x), (x.sum(1) > 4).long()))
        harm(k, governor, net[0].weight)
        governor.watch(loss)
    assert len(governor.reports) == times and net[0].weight.norm() < 10
    for report in governor.reports:
        assert report.reason == "state" and "model" in report.restored and "alone" not in str(report), str(report)


def test_weights_of_a_class_of_their_own_count_as_trained():
    "Those of sharded and quantized networks lie nowhere that could be compared: a write into them was a target's."
    class Wrapped(torch.Tensor): pass
    net = nn.Linear(2, 2)
    net.weight = nn.Parameter(torch.ones(2, 2).as_subclass(Wrapped))
    opt = torch.optim.SGD([net.weight], .1)
    assert untrained_in(dict(model=net, target=nn.Linear(2, 2)), trained_by([opt])) == ["target"]

@pytest.mark.costly
@pytest.mark.parametrize("share", [.5, .1])
def test_a_target_that_follows_now_and_then_between_steps_is_not_taken_back(share):
    "It moves a part of the way, by code of the loop that a replay does not have; the loss rises for a while."
    def train(guarded):
        torch.manual_seed(0)
        net, target = nn.Linear(4, 1), nn.Linear(4, 1)
        opt = torch.optim.SGD(net.parameters(), lr=.05)
        governor = Governor(net, target, opt, chance_loss=None) if guarded else None
        def step(x):
            with torch.no_grad(): aim = x @ AIM + .9 * target(x)
            return descend(opt, F.mse_loss(net(x), aim))
        for k in range(300):
            x = torch.randn(32, 4)
            if governor is None: step(x)
            else: governor.run(step, x)
            if k % 25 == 24:
                for p, q in zip(target.parameters(), net.parameters()):
                    p.data.copy_(share * q.data + (1 - share) * p.data)
        return net, governor
    alone, (guarded, governor) = train(False)[0], train(True)
    assert not governor.reports and torch.equal(alone.weight, guarded.weight)

@pytest.mark.parametrize("outside", ["target", "weights"])
def test_what_a_loop_does_to_its_target_is_no_sign_against_the_weights(outside):
    "A target is copied between steps, and the loss rises since the data are noisier: old weights would lose batches."
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    target = copy.deepcopy(net)
    opt = torch.optim.SGD(net.parameters(), lr=.02)
    governor = Governor(net, target, opt, chance_loss=None)
    g = torch.Generator().manual_seed(1)
    with open(os.devnull, "w") as log: # a step that writes into a file is not run twice
        def step(batch):
            x, y = batch
            loss = update(opt, (net(x) - y - 0 * target(x).detach()).square().mean())
            log.write(f"{loss.item()}\n")
            return loss
        for k in range(120):
            x = torch.randn(16, 4, generator=g)
            governor.run(step, (x, x.sum(1, keepdim=True) + (.5 if k < 52 else 4) * torch.randn(16, 1, generator=g)))
            if k % 25 == 24: (target if outside == "target" else net).load_state_dict(net.state_dict())
    actions = [n.action for n in governor.notes]
    assert "wait" in actions and ("compare" in actions) == (outside == "weights")


def bootstrapped(fault, guarded, copied):
    "Return a value network, trained towards a target that is copied every 25 steps between them, and its Governor."
    torch.manual_seed(0)
    nets = nn.ModuleDict(dict(now=nn.Linear(4, 1), old=nn.Linear(4, 1)))
    net, target = nets["now"], nets["old"]
    opt = torch.optim.SGD(net.parameters(), lr=.05)
    parts = (nets, opt) if copied == "inside" else (net, target, opt)
    governor = Governor(*parts, chance_loss=None) if guarded else None
    g = torch.Generator().manual_seed(1)
    def step(x): return descend(opt, (net(x) - x.sum(1, keepdim=True) - .9 * target(x).detach()).square().mean())
    for k in range(150):
        x = torch.randn(16, 4, generator=g)
        if fault and k == 110: net.weight.data[0, 0] = torch.nan
        if governor is None: step(x)
        else: governor.run(step, x)
        if k % 25 != 24: continue
        if copied == "loaded": target.load_state_dict(net.state_dict())
        else:
            for old, now in zip(target.parameters(), net.parameters()): old.data.copy_(now.data)
    return nets.state_dict(), governor

@pytest.mark.parametrize("copied", ["loaded", "past torch", "inside"])
@pytest.mark.parametrize("fault", [False, True])
def test_what_a_loop_copies_into_a_target_between_steps_is_no_disturbance_and_is_copied_in_a_replay(copied, fault):
    "Each copy raises the loss; the run was brought back to before it as often as it came."
    clean, _ = bootstrapped(False, False, copied)
    state, governor = bootstrapped(fault, True, copied)
    assert all(torch.equal(t, state[k]) for k, t in clean.items())
    assert [(r.reason, r.cause, r.lost) for r in governor.reports] == [("non-finite", "external", None)] * fault


class Quantized(nn.Linear):
    "Rounds its weights coarsely, once that is switched on."
    def __init__(self, *sizes, levels): # in a unit
        super().__init__(*sizes)
        self.levels = levels
        self.register_buffer("on", torch.zeros(1, dtype=torch.uint8))

    def forward(self, x):
        rounded = self.weight + ((self.weight * self.levels).round() / self.levels - self.weight).detach()
        return F.linear(x, torch.where(self.on.bool(), rounded, self.weight), self.bias)

def quantized(fault, guarded, way):
    torch.manual_seed(0)
    levels = 16 if fault else 2
    net = nn.Sequential(Quantized(8, 16, levels=levels), nn.ReLU(), Quantized(16, 1, levels=levels))
    opt = torch.optim.SGD(net.parameters(), lr=.02)
    governor = Governor(net, opt, chance_loss=None) if guarded else None
    def step(x): return descend(opt, F.mse_loss(net(x), x @ torch.linspace(-1, 1, 8)[:, None]))
    for k, x in fed(governor, list(enumerate(torch.randn(300, 32, 8))), way):
        if k == 130:
            for m in net.children():
                if isinstance(m, Quantized): m.on.fill_(1)
        if fault and guarded and k == 135 and not governor.replaying: net[2].weight.data[0, 3] = torch.nan
        take(governor, step, x, way)
    return net.state_dict(), governor

@pytest.mark.parametrize("way", ["run", "batches"])
@pytest.mark.parametrize("fault", [False, True])
def test_what_a_loop_switches_by_a_flag_in_a_buffer_is_meant_and_is_switched_in_a_replay(fault, way):
    "Quantisation that begins late raises the loss: it was called a disturbance, and the run was redone without it."
    clean, _ = quantized(fault, False, way)
    state, governor = quantized(fault, True, way)
    assert [(r.reason, r.cause, r.lost) for r in governor.reports] == [("non-finite", "external", None)] * fault
    assert all(torch.equal(t, state[k]) for k, t in clean.items()) and clean["0.on"] == 1



def test_a_tensor_of_its_own_with_an_optimizer_of_its_own_belongs_to_no_network_that_was_forgotten(caplog):
    "As the temperature of a soft actor-critic: it is restored with the others."
    net, log_alpha = nn.Linear(4, 2), torch.zeros(1, requires_grad=True)
    Governor(net, torch.optim.SGD(net.parameters(), lr=.1), torch.optim.SGD([log_alpha], lr=.1), chance_loss=None)
    assert not caplog.text
    other = torch.optim.SGD(nn.Linear(4, 2).parameters(), lr=.1)
    Governor(net, torch.optim.SGD(net.parameters(), lr=.1), other, chance_loss=None)
    assert "trains no weight of what was passed" in caplog.text


@pytest.mark.parametrize("way", ["watch", "run"])
def test_averaged_weights_take_over_the_statistics_of_a_batch_norm_late(way):
    "Those of the average are as at the beginning until then: a mean of zero, a variance of one."
    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    averaged = torch.optim.swa_utils.AveragedModel(net)
    opt = torch.optim.SGD(net.parameters(), lr=.01)
    governor = Governor(net, opt, averaged, chance_loss=.69)
    def step(x): return descend(opt, F.cross_entropy(net(x), (x.sum(1) > 160).long()))
    for k in range(200):
        x = 40 + 30 * torch.randn(32, 4)
        take(governor, step, x, way)
        if k % 50 == 49 and k > 100: averaged.update_parameters(net)
    assert not governor.reports and torch.equal(averaged.module[0].running_var, net[0].running_var)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_a_loop_drops_between_two_epochs_are_not_there_in_a_replay(to_none):
    "They were: a loop that accumulates over three batches of seven was said to be disturbed by hardware."
    def train(fault):
        net, opt, governor = guarded_layer(torch.optim.SGD, lr=.05, momentum=.9)
        made = torch.Generator().manual_seed(1)
        for epoch in range(9):
            opt.zero_grad(set_to_none=to_none)
            rows = [torch.randn(8, 4, generator=made) for _ in range(7)]
            for k, x in governor.batches(list(enumerate(rows))):
                if fault and epoch == 7 and k == 1 and not governor.replaying:
                    with torch.no_grad(): net.weight[0, 0] = torch.nan
                loss = F.mse_loss(net(x), x @ AIM)
                loss.backward()
                if k % 3 == 2:
                    opt.step()
                    opt.zero_grad()
                governor.watch(loss)
        return net.weight.detach(), governor
    weight, governor = train(True)
    report, = governor.reports
    assert report.cause == "external" and "the loop wrote into model.weight" in report.why, str(report)
    assert torch.equal(weight, train(False)[0])


@pytest.mark.parametrize("way", ["run", "batches"])
def test_a_step_may_write_into_a_view_without_a_graph(way):
    "Torch refuses to tell what made such a view: it ended the loop when the cause of a NaN was looked for."
    net, opt, governor = guarded_layer(torch.optim.SGD, lr=.01)
    def step(batch):
        with torch.no_grad():
            if batch[0].max() > 50: net.weight.view(-1)[0] = torch.nan
            net.bias.view(-1).clamp_(-9, 9)
        return descend(opt, F.mse_loss(net(batch[0]), batch[1]))
    feed = ((100 * x if i == 40 else x, y) for i, (x, y) in batches(60))
    for batch in fed(governor, feed, way): take(governor, step, batch, way)
    report, = governor.reports
    assert (report.action, report.cause) == ("rollback", "data") and net.weight.isfinite().all(), report


@pytest.mark.parametrize("around", [enumerate, lambda b: zip(b, range(999)), lambda b: enumerate(x for x in b)])
def test_what_counts_around_the_batches_is_named_and_counts_every_batch_once(around, caplog):
    "The count ran ahead by each step that was run again, and a loop that ends at a number ended early."
    net, opt, governor = guarded_layer(torch.optim.SGD, lr=.01)
    for pair in around(governor.batches([batch for _, batch in batches(60)])):
        k, (x, y) = sorted(pair, key=lambda part: not isinstance(part, int))
        governor.watch(descend(opt, F.mse_loss(net(x), y)))
    assert k == 59 and governor.recorder.runs == 60
    assert f"`governor.batches({type(around([])).__name__}(loader))`" in caplog.text


@dataclass(slots=True)
class Slotted:
    "A batch without a table of attributes, as libraries make them."
    x: torch.Tensor
    y: torch.Tensor | None = None
    of: tuple = ()
    def __getitem__(self, k): return getattr(self, k)

@pytest.mark.parametrize("kind", [dict, Slotted, SimpleNamespace])
@pytest.mark.parametrize("way", ["run", "batches"])
def test_recorded_batches_of_workers_hold_no_file_descriptors(way, kind):
    "Each tensor of a worker holds one: recorded steps came to the limit of 1,024, and that ended a healthy loop."
    net, opt, governor = guarded_layer(torch.optim.SGD, lr=.01, config="batch")
    def step(batch):
        x, of = (batch.x, batch.of) if kind is SimpleNamespace else (batch["x"], batch["of"])
        return descend(opt, F.mse_loss(net(x), of[0]))
    given = (kind(x=x.share_memory_(), of=(y.share_memory_(), "labels")) for _, (x, y) in batches(40))
    before = len(os.listdir("/proc/self/fd"))
    for batch in fed(governor, given, way): take(governor, step, batch, way)
    assert len(os.listdir("/proc/self/fd")) < before + 20
    assert governor.repairs.dry.exact, governor.repairs.dry

def test_a_fork_answers_however_many_files_are_open():
    "`select` bears no file descriptor beyond 1023: the rehearsal ended the loop."
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096) if hard != resource.RLIM_INFINITY else 4096, hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1030)]
    try: assert in_a_fork(lambda: "well") == "well"
    finally:
        for number in opened: os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def loads_of(kind, net, opt, k, kept): # what a loop does before a batch
    "Go back to a checkpoint now and then, begin anew with the first weights, or share them with a server."
    if kind == "trials" and k % 60 == 0:
        net.load_state_dict(kept["first"])
        opt.state.clear()
    if kind == "checkpoint" and k % 40 == 25: kept["best"] = copy.deepcopy((net.state_dict(), opt.state_dict()))
    if kind == "checkpoint" and k % 40 == 0 < k:
        net.load_state_dict(kept["best"][0])
        opt.load_state_dict(kept["best"][1])
    if kind == "part" and k % 60 == 0: net[0].load_state_dict({n: kept["first"][f"0.{n}"] for n in ("weight", "bias")})
    if kind == "clients" and k % 10 == 0: # of two, in turn
        kept[k // 10 % 2] = copy.deepcopy(net.state_dict())
        net.load_state_dict(kept.get(1 - k // 10 % 2, kept["first"]))

@pytest.mark.parametrize("kind", ["trials", "checkpoint", "part", "clients"])
@pytest.mark.parametrize("way", ["watch", "run", "batches"])
def test_a_state_that_the_loop_loads_is_meant(kind, way):
    "It was taken for a fault, as if something had written into the weights, and every load was undone."
    def train(guarded, ruined=None):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
        opt = torch.optim.SGD(net.parameters(), .05, momentum=.9)
        governor = Governor(net, opt, chance_loss=None) if guarded else None
        kept = dict(first=copy.deepcopy(net.state_dict()))
        def step(batch): return descend(opt, F.mse_loss(net(batch[0]), batch[1]))
        def drawn():
            for k, batch in batches(240):
                loads_of(kind, net, opt, k, kept)
                if k == ruined: net[0].weight.data[0, 0] = torch.nan
                yield batch
        for batch in fed(governor, drawn(), way): take(governor, step, batch, way)
        return [*net.state_dict().values(), *[v["momentum_buffer"] for v in opt.state.values()]], governor
    plain, (state, governor) = train(False)[0], train(True)
    assert not governor.reports and all(torch.equal(a, b) for a, b in zip(plain, state, strict=True))
    assert "another state was loaded into the network before batch" in str(governor.summary())
    _, governor = train(True, ruined=184)
    report, = governor.reports
    latest = 160 if kind == "checkpoint" else 180 # load
    assert report.action == "rollback" and report.restored_batch > latest


def test_a_rise_is_over_once_another_state_is_loaded():
    "Old and new weights were compared in turns all the same: that took batches from the next trial."
    g = torch.Generator().manual_seed(1)
    x = torch.randn(1280, 16, generator=g)
    y = (x @ torch.randn(16, 5, generator=g)).argmax(1)
    def train(guarded):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 5))
        opt = torch.optim.SGD(net.parameters(), .01, momentum=.9)
        governor = Governor(net, opt, chance_loss=1.6) if guarded else None
        first = copy.deepcopy(net.state_dict())
        for trial, lr in enumerate((.003, .01, .03)):
            net.load_state_dict(first)
            opt.state.clear()
            opt.param_groups[0]["lr"] = lr
            for k in range(80):
                if (trial, k) == (1, 70): [p.data.mul_(100) for p in net.parameters() if p.ndim == 2]
                loss = descend(opt, F.cross_entropy(net(x[16 * k:16 * k + 16]), y[16 * k:16 * k + 16]))
                if governor: governor.watch(loss)
        return list(net.parameters()), governor
    plain, (state, governor) = train(False)[0], train(True)
    assert [n for n in governor.notes if n.action == "wait"] and not governor.reports
    assert all(torch.equal(a, b) for a, b in zip(plain, state, strict=True))


@pytest.mark.parametrize("way", ["watch", "run"])
def test_a_state_that_each_step_loads_is_part_of_it(way):
    "As in Reptile, or where a loop validates with averaged weights and puts its own back: no level is taken for good."
    net, opt, governor = guarded_layer(torch.optim.SGD, lr=.02, config="batch")
    def step(batch):
        before = copy.deepcopy(net.state_dict())
        loss = descend(opt, F.mse_loss(net(batch[0]), batch[1]))
        net.load_state_dict({k: torch.lerp(before[k], v, .5) for k, v in net.state_dict().items()})
        return loss
    taken = set()
    for _, batch in batches(120):
        take(governor, step, batch, way)
        taken.add(int(governor.snapshot.steps[0]))
    assert len(taken) <= 4 and not governor.reports


@pytest.mark.parametrize("listed", [False, True]) # layers in a list that registers none; else a head beside the network
@pytest.mark.parametrize("way", ["watch", "run", "batches"])
def test_what_an_optimizer_trains_is_guarded_even_if_its_network_was_not_handed_over(listed, way):
    "Its weights were not restored by `watch`, and a replay trained them once more."
    def train(guarded, spoilt=None):
        torch.manual_seed(0)
        layers = [nn.Linear(4, 16), nn.Linear(16, 1)]
        given = nn.Module() if listed else layers[0]
        given.layers = layers if listed else []
        opt = torch.optim.Adam([p for layer in layers for p in layer.parameters()], .01)
        governor = Governor(given, opt, chance_loss=None, config=OFTEN) if guarded else None
        def step(batch): return descend(opt, F.mse_loss(layers[1](layers[0](batch[0]).relu()), batch[1]))
        def drawn():
            for k, batch in batches(160):
                if k == spoilt: layers[1].weight.data[0, 0] = torch.nan
                yield batch
        for batch in fed(governor, drawn(), way): take(governor, step, batch, way)
        return [p for layer in layers for p in layer.parameters()], governor
    plain, (state, governor) = train(False)[0], train(True)
    assert not governor.reports and all(torch.equal(a, b) for a, b in zip(plain, state, strict=True))
    state, governor = train(True, spoilt=100)
    report, = governor.reports
    assert report.action == "rollback" and report.batch <= 100 and all(p.isfinite().all() for p in state)
    if way != "watch":
        assert report.cause == "external" and "other_weights." in report.why
        assert all(torch.equal(a, b) for a, b in zip(plain, state, strict=True))


def test_a_log_of_warnings_says_how_many_updates_did_not_happen(caplog):
    "It told of the first one alone, and the summary counted one in a row of 1, 2, 4, 8: \"dropped × 7\" of 90."
    net, opt, governor = guarded_layer(torch.optim.SGD, lr=.01, config="batch")
    for k in range(180):
        x = torch.randn(16, 4)
        aim = (x @ AIM).masked_fill(torch.arange(16)[:, None] == (0 if k % 2 else 16), torch.nan)
        governor.watch(descend(opt, (net(x) - aim).square()[~aim.isnan()].mean())) # its gradient is 0 × NaN
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert sum("32 of 64 updates so far did not happen" in text for text in said) == 1
    assert governor.summary().actions["dropped"] == 90 and "dropped × 90" in str(governor.summary())


@pytest.mark.parametrize("way", ["watch", "run"])
def test_a_buffer_that_the_step_ruins_again_and_again_costs_a_run_no_more_than_a_while(way):
    "All of the state was put back each time, at half the rate, and the run was stopped: the loss had not even risen."
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    net.register_buffer("sizes", torch.ones(3))
    opt = torch.optim.SGD(net.parameters(), .02)
    governor = Governor(net, opt, chance_loss=None, config=GovernorConfig(explain_steps=0))
    def step(x):
        net.sizes[x[0, 0].item() > 2.6] = torch.nan # in one batch of about two hundred
        net.sizes.mul_(1.)
        return descend(opt, F.mse_loss(net(x), x @ AIM))
    for k in range(500):
        x = torch.randn(16, 4).clamp(-2, 2)
        if k % 70 == 69: x[0, 0] = 3.
        governor.run(step, x) if way == "run" else governor.watch(step(x))
    assert not governor.stopped[0] and governor.lr_factor == 1. and F.mse_loss(net.weight, AIM.T) < 1e-4
    assert sum("buffers alone were put back" in r.why for r in governor.reports) > 0


def test_where_nan_lies_in_no_part_the_advice_can_be_followed():
    "It said to hand over an object that no Governor takes."
    class Carried:
        def __init__(self): self.h = torch.zeros(16, 1)
    torch.manual_seed(0)
    carried, net = Carried(), nn.Linear(5, 1)
    opt = torch.optim.SGD(net.parameters(), .01)
    governor = Governor(net, opt, chance_loss=None, config=GovernorConfig(stop_raises=False))
    for k in range(160):
        x = torch.randn(16, 4)
        if k == 60: x[3, 2] = torch.nan
        carried.h = .5 * carried.h + net(torch.cat([x, carried.h], 1)).detach()
        governor.watch(descend(opt, F.mse_loss(net(torch.cat([x, carried.h], 1)), x @ AIM)))
    said = [r.why for r in (*governor.reports, *governor.notes) if "carried.h" in r.why]
    assert said and all("train with `governor.run`" in text and "Governor(" not in text for text in said)


@pytest.mark.parametrize("searched", [False, True]) # the old one steps in a replay, which is no step of the run
def test_another_optimizer_is_told_of_while_the_loss_is_high_too(searched, caplog):
    "That was said of a calm run alone; and steps of a search counted, so that the place was wrong."
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    opt = old = torch.optim.SGD(net.parameters(), .01)
    governor = Governor(net, opt, chance_loss=None, config=GovernorConfig(stop_raises=False))
    def step(x): return descend(opt, F.mse_loss(net(x), x @ AIM))
    for k in range(350):
        if k == 150: opt = torch.optim.SGD(net.parameters(), .9)
        x = torch.randn(16, 4)
        if searched and k == 230:
            with governor.judge.updates.unseen(): old.step()
        governor.watch(step(x))
    assert any("no optimizer among the parts has stepped since batch 149" in r.getMessage() for r in caplog.records)


def test_statistics_that_make_a_step_fail_are_put_back_as_weights_are(caplog):
    "The exception ended the run, although the same NaN is put back where the step does not look at it."
    torch.manual_seed(0)
    net, seen = nn.Linear(4, 2), dict(mean=torch.zeros(4))
    opt = torch.optim.SGD(net.parameters(), .01)
    governor = Governor(net, opt, chance_loss=None)
    def step(x):
        seen["mean"] = .9 * seen["mean"] + .1 * x.mean(0)
        chosen = torch.distributions.Categorical(logits=net(x - seen["mean"]), validate_args=True)
        return descend(opt, -chosen.log_prob((x.sum(1) > 0).long()).mean())
    for k in range(160):
        x = torch.randn(16, 4)
        if k == 130: x[2, 1] = torch.nan
        governor.run(step, x)
    report, = governor.reports
    assert report.rolled_back and "the step has failed" in caplog.text and seen["mean"].isfinite().all()
    def wrong(x): raise KeyError("a mistake")
    with pytest.raises(KeyError, match="a mistake"): governor.run(wrong, x)


def mix_in_place(batch): batch["x"].mul_(.7).add_(batch["x"].flip(0), alpha=.3)
def pop_labels(batch): batch.pop("y")
def note_errors(batch): batch["error"] = batch["x"].square().mean(1)

class WithInfo(dict):
    "A batch of a replay buffer, with a record of what the environments told, which is empty."
    def __init__(self, **columns): super().__init__(columns, info=SimpleNamespace())

@pytest.mark.parametrize("kind, write", [(Slotted, mix_in_place), *itertools.product(
    (dict, UserDict, WithInfo), (mix_in_place, pop_labels, note_errors))])
@pytest.mark.parametrize("way", ["run", "batches"])
def test_a_step_that_writes_into_its_batch_is_replayed_on_a_copy(write, kind, way):
    def train(guarded):
        net, opt, governor = guarded_layer(torch.optim.Adam, lr=.01)
        def step(batch):
            x, y = batch["x"], batch["y"]
            write(batch)
            return descend(opt, (net(x)[:, 0] - y).square().mean())
        def data():
            for i in range(40):
                if i == 29 and guarded: net.weight.data[0, 0] = torch.nan
                yield kind(x=torch.randn(8, 4), y=torch.randn(8))
        if way == "run" or not guarded:
            for batch in data(): governor.run(step, batch) if guarded else step(batch)
        else:
            for batch in governor.batches(data()): governor.watch(step(batch))
        return governor.reports, net.weight
    (report,), weight = train(True)
    assert report.cause == "external" and report.redone > 0
    assert torch.equal(weight, train(False)[1])

class Labels:
    "The columns of a table: a library's, which remembers where they are once it was asked."
    __module__ = "numpy"
    def __init__(self, *names): self.names, self.version, self._cache = names, object(), {}
    def find(self, name): return self._cache.setdefault("places", {k: i for i, k in enumerate(self.names)})[name]

class Rows(SimpleNamespace):
    @functools.cached_property
    def total(self): return self.x.sum(1)

@pytest.mark.parametrize("way", ["run", "batches"])
def test_a_batch_that_remembers_what_was_looked_up_was_not_written_into(way):
    net, opt, governor = guarded_layer(torch.optim.Adam, lr=.01)
    def step(batch): return descend(opt, (net(batch.x)[:, batch.labels.find("a")] - batch.total).square().mean())
    given = [Rows(x=torch.randn(8, 4), labels=Labels("a", "b")) for _ in range(40)]
    for batch in fed(governor, given, way): take(governor, step, batch, way)
    assert governor.repairs.dry.exact, governor.repairs.dry

def test_only_batches_that_are_written_into_are_copied():
    net = nn.Linear(4, 1)
    opt = torch.optim.SGD(net.parameters(), .1)
    for write, copied in ((lambda x: None, False), (lambda x: x.mul_(2), True)):
        governor = Governor(net, opt, chance_loss=None, config=OFTEN)
        def step(x):
            loss = net(x).square().mean()
            write(x)
            return descend(opt, loss.detach() + net(x).square().mean())
        for x in torch.randn(6, 8, 4).unbind(): governor.run(step, x)
        assert governor.recorder.steps[-1].owned == copied

class Graph(SimpleNamespace):
    "Copies itself, as the batches of graphs do."
    def clone(self): return Graph(x=self.x.clone(), layout=self.layout)

def test_a_memory_is_no_batch_to_copy():
    for batch in ([torch.zeros(1)] * 600, nn.Linear(2, 2), SimpleNamespace(net=nn.Linear(2, 2)), iter(range(3))):
        assert not is_data(batch)
    recorder = StepRecorder(nbytes=80)
    for k, x in enumerate((torch.zeros(9), torch.zeros(2))): recorder.run(lambda x: x.sum(), x, number=k)
    assert recorder.steps[-1].owned and recorder.steps[-1].batch is not x # the first is too large
    for batch in (Slotted(x=torch.zeros(9)), SimpleNamespace(x=torch.zeros(9))): # in whatever it lies, it is too large
        recorder = StepRecorder(nbytes=80)
        recorder.run(lambda b: b.x.sum(), batch, number=0)
        assert recorder.steps[-1].batch is batch
    graph = Graph(x=torch.zeros(2), layout=object())
    own = own_copy(graph)
    graph.x += 1
    assert is_data(graph) and own.x.equal(torch.zeros(2)) and own.layout is graph.layout


class Summing(torch.optim.SGD):
    "As opacus does it: sums lie beside the gradients, and its loader says which batch ends a step."
    def __init__(self, params):
        super().__init__(params, lr=.05, momentum=.9)
        self.waits = []
        for p in self.param_groups[0]["params"]: p.summed = None

    def step(self):
        for p in self.param_groups[0]["params"]: p.summed = p.grad.clone() if p.summed is None else p.summed + p.grad
        if self.waits.pop(0): return
        for p in self.param_groups[0]["params"]: p.grad, p.summed = p.summed, None
        super().step()

@pytest.mark.parametrize("way", ["run", "batches"])
@pytest.mark.parametrize("at", [120, 121, 122])
def test_sums_that_an_optimizer_keeps_at_its_parameters_go_back_with_it(way, at):
    "Two replays differed, so no batch was redone, and the flags of the loader were those of other batches."
    def train(fault):
        net, opt, governor = guarded_layer(Summing)
        made = torch.Generator().manual_seed(1)
        def feed():
            for k in range(160):
                opt.waits.append(k % 3 < 2)
                yield k, torch.randn(8, 4, generator=made)
        def step(x): return descend(opt, F.mse_loss(net(x), x @ AIM))
        for k, x in governor.batches(feed()) if way == "batches" else feed():
            if fault and k == at and not governor.replaying:
                with torch.no_grad(): net.weight[0, 0] = torch.nan
            take(governor, step, x, way)
        return net.weight.detach(), governor
    weight, governor = train(True)
    report, = governor.reports
    assert report.cause == "external" and torch.equal(weight, train(False)[0]), str(report)


@pytest.mark.slow
def test_searches_in_vain_do_not_spare_the_one_after_an_explosion_with_a_sign():
    "A rate three hundredfold for five steps was accepted: earlier rises of this game had cost their searches."
    made, centers = torch.Generator().manual_seed(1), 2 * torch.randn(4, 8, generator=torch.Generator().manual_seed(5))
    feed = []
    for k in range(320):
        y = torch.randint(0, 4, (16,), generator=made)
        feed.append((k, centers[y] + 1.5 * torch.randn(16, 8, generator=made)))
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 8))
    judge = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(.2), nn.Linear(32, 1))
    opts = [torch.optim.Adam(m.parameters(), 1e-3, betas=(.5, .9)) for m in (maker, judge)]
    governor = Governor(maker, judge, *opts, chance_loss=None)
    for k, x in governor.batches(feed):
        for o in opts if k in (230, 235) and not governor.replaying else ():
            o.param_groups[0]["lr"] *= 300 if k == 230 else 1 / 300
        fake = maker(torch.randn(16, 4))
        against = F.softplus(-judge(x)).mean() + F.softplus(judge(fake.detach())).mean()
        descend(opts[1], against)
        governor.watch(against.item() + descend(opts[0], F.softplus(-judge(fake)).mean()))
    report, = governor.reports
    assert (report.reason, report.cause) == ("explosion", "rate") and report.redone


@pytest.mark.parametrize("way", ["run", "batches"])
def test_a_step_that_fails_when_it_is_run_again_ends_no_healthy_loop(way, caplog):
    "The rehearsal of a loop's body in a copy of the process died of the error, and was made again in the loop itself."
    torch.manual_seed(0)
    net, hidden = nn.Linear(4, 1), threading.local()
    opt, hidden.trained = torch.optim.Adam(net.parameters(), .01), []
    governor = Governor(net, opt, chance_loss=None, config=OFTEN)
    def step(given):
        k, x = given
        if k in hidden.trained: raise KeyError("this batch again")
        hidden.trained.append(k)
        return descend(opt, net(x).square().mean())
    given = list(enumerate(torch.randn(40, 8, 4)))
    for batch in fed(governor, given, way): take(governor, step, batch, way)
    assert governor.watched == 40 and not governor.reports
    assert "your step fails when it is run again" in caplog.text

class BuiltLate(nn.Module):
    "A library's, that makes its layer in the first step."
    __module__ = "numpy"
    def __init__(self):
        super().__init__()
        self.inputs = None
    def forward(self, x):
        if self.inputs is None: self.inputs, self.layer = x.shape[1], nn.Linear(x.shape[1], 1)
        return self.layer(x)

class Engine:
    "A library's, that trains a network, in which nobody can look."
    __module__ = "numpy"
    __slots__ = ("net", "make", "opt")
    def __init__(self, net, make): self.net, self.make, self.opt = net, make, None
    def train(self, x):
        loss = self.net(x).square().mean()
        if self.opt is None: self.opt = self.make(self.net.parameters())
        return descend(self.opt, loss)

@pytest.mark.parametrize("way", ["run", "batches"])
def test_a_network_is_recorded_although_only_the_object_of_a_library_runs_it(way):
    "Its layer was taken out for the rehearsal, and not that it had been made."
    torch.manual_seed(0)
    engine = Engine(BuiltLate(), functools.partial(torch.optim.SGD, lr=.01))
    governor = Governor(engine.net, chance_loss=None, config=OFTEN)
    given = torch.randn(40, 8, 4)
    for x in fed(governor, given, way): take(governor, engine.train, x, way)
    assert governor.repairs.dry.again, governor.repairs.dry


def test_a_loop_goes_on_behind_a_batch_that_makes_its_step_raise():
    "NaN in it is to blame, so that `run` hands on no error: the rest is as behind an error that the loop has caught."
    def train(guarded, ruined=False):
        net, opt, governor = guarded_layer(torch.optim.Adam, lr=.01, outputs=3)
        def step(x):
            chosen = torch.distributions.Categorical(logits=net(x), validate_args=True)
            return descend(opt, -chosen.log_prob((x.sum(1) > 0).long()).mean())
        raised = 0
        for k in range(40):
            x = torch.randn(16, 4)
            if k == 24: x[0] = torch.nan
            if k == 30 and ruined: net.weight.data[0, 0] = torch.nan
            try: governor.run(step, x) if guarded else step(x)
            except ValueError: raised += 1
        assert raised == (not guarded)
        return net.weight, governor.reports
    assert torch.equal(train(False)[0], train(True)[0])
    weight, (report,) = train(True, ruined=True)
    assert report.cause == "external" and report.redone > 0 and weight.isfinite().all()


@pytest.mark.parametrize("cause", ["rate", "external"])
def test_what_ruined_weights_that_make_a_step_raise_is_named(cause):
    "Distributions take no parameters that are not finite: the step raised in the replay as well, which ended that."
    net, opt, governor = guarded_layer(torch.optim.SGD, lr=.02, config="batch")
    def step(batch): return descend(opt, -torch.distributions.Normal(net(batch[0]), 1.).log_prob(batch[1]).mean())
    for k, batch in batches(200):
        if k == 150 and cause == "rate": opt.param_groups[0]["lr"] = torch.inf
        if k == 150 and cause == "external": net.weight.data.fill_(torch.nan)
        governor.run(step, batch)
    report, = governor.reports
    assert report.cause == cause and report.redone and (net.weight - AIM.T).abs().max() < .3


@pytest.mark.parametrize("begin", [.002, .1])
def test_a_rate_that_a_loop_sets_before_its_first_step_was_not_raised(begin):
    "As a warm-up does: a loss that is small in its first batches, as of a detector that finds nothing, was compared."
    first = [1.3, 17., .8, 24., .7]
    def train(guarded):
        net, opt, governor = guarded_layer(torch.optim.SGD, lr=begin, config="batch", guarded=guarded)
        for i, (x, y) in batches(200):
            opt.param_groups[0]["lr"] = .1 * .99**i
            loss = descend(opt, F.mse_loss(net(x), y))
            if governor is not None: governor.watch(first[i] if i < len(first) else 20 + loss)
        return net, governor
    net, governor = train(True)
    assert [n.action for n in governor.notes] == ["wait", "accepted"] and governor.snapshot.steps[0] > 50
    assert torch.equal(net.weight, train(False)[0].weight)


class Coded(torch.Tensor):
    "Numbers in half precision, as a library's optimizer keeps its moments: it knows hardly any operation."
    @staticmethod
    def __new__(cls, codes): return torch.Tensor._make_wrapper_subclass(cls, codes.shape) # noqa: SLF001
    def __init__(self, codes): self.codes = codes
    def __tensor_flatten__(self): return ["codes"], None
    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride): return Coded(inner["codes"])
    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func is torch.ops.aten.detach.default: return cls(args[0].codes)
        if func is torch.ops.aten.clone.default: return cls(args[0].codes.clone())
        raise NotImplementedError(func)

class InCodes(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            held = self.state[p]
            if not held: held["m"] = Coded(torch.zeros_like(p, dtype=torch.half))
            held["m"].codes.mul_(.9).add_(p.grad.half())
            p.sub_(.01 * held["m"].codes)

@pytest.mark.parametrize("way", ["watch", "run"])
def test_moments_in_a_class_of_their_own_are_state_as_others_are(way):
    "The first good state that had any ended a healthy run: that class had no such operation."
    def train(fault, guarded=True):
        net, opt, governor = guarded_layer(InCodes, lr=.01, guarded=guarded)
        def step(batch): return descend(opt, F.mse_loss(net(batch[0]), batch[1]))
        for i, batch in batches(120):
            if fault and i == 80: net.weight.data[0, 0] = torch.nan
            take(governor, step, batch, way)
        return [net.weight.detach(), opt.state[net.weight]["m"].codes], governor
    alone, (clean, healthy), (mended, governor) = train(False, guarded=False)[0], train(False), train(True)
    assert all(map(torch.equal, clean, alone)) and not healthy.reports and healthy.snapshot.steps[0] > 50
    report, = governor.reports
    assert report.action == "rollback" and (mended[0] - clean[0]).abs().max() < .1
    if way == "run": assert all(map(torch.equal, mended, clean)) and report.cause == "external"


@pytest.mark.parametrize("wreck", ["weight", "place", "batch"])
@pytest.mark.parametrize("way", ["watch", "run", "batches"])
def test_weights_that_each_step_makes_anew_in_a_dict_that_is_a_part_are_put_back(way, wreck):
    "As in a functional loop: a rollback left the ruined weights in place, as if the loop had set them."
    def train(guarded):
        run = dict(weights=dict(w=torch.zeros(4)), moments=(torch.zeros(4),), rate=.02)
        g = torch.Generator().manual_seed(0)
        def step(batch):
            x, y = batch
            w = run["weights"]["w"].detach().requires_grad_()
            loss = (x @ w - y).square().mean()
            moment = .9 * run["moments"][0] + torch.autograd.grad(loss, w)[0]
            run.update(weights=dict(w=w.detach() - run["rate"] * moment), moments=(moment,))
            return loss.detach()
        def data():
            for i in range(60):
                x = torch.randn(16, 4, generator=g)
                if guarded and i == 41:
                    if wreck == "weight": run["weights"]["w"][0] = torch.nan
                    if wreck == "place": run["weights"] = dict(w=torch.full((4,), torch.nan))
                    if wreck == "batch": x = x * torch.nan
                yield x, x.sum(1)
        governor = Governor(run, chance_loss=None, config=OFTEN) if guarded else None
        if not guarded:
            for batch in data(): step(batch)
        elif way == "batches":
            for batch in governor.batches(data()): governor.watch(step(batch))
        else:
            for batch in data(): governor.run(step, batch) if way == "run" else governor.watch(step(batch))
        return governor, run
    (governor, run), clean = train(True), train(False)[1]
    report, = governor.reports
    assert report.rolled_back and run["weights"]["w"].isfinite().all() and (run["weights"]["w"] - 1).abs().max() < .3
    if way == "watch": return
    assert report.redone and report.cause in (("data",) if wreck == "batch" else ("external", "inputs"))
    if wreck != "batch": assert torch.equal(run["weights"]["w"], clean["weights"]["w"])


@pytest.mark.parametrize("kind", [dict, tuple, list])
def test_weights_that_each_step_makes_anew_are_put_back_again_and_again(kind):
    "Found in the code of the step: what that had made in a replay counted as written by the loop, and stayed so."
    moments = kind(dict(m=torch.zeros(4)) if kind is dict else [torch.zeros(4)])
    run = dict(weights=dict(w=torch.zeros(4)), moments=moments)
    def step(x):
        w, moments = run["weights"]["w"].detach().requires_grad_(), run["moments"]
        loss = (x @ w - x.sum(1)).square().mean()
        moment = .9 * moments["m" if kind is dict else 0] + torch.autograd.grad(loss, w)[0]
        run.update(weights=dict(w=w.detach() - .02 * moment))
        run["moments"] = dict(m=moment) if kind is dict else kind([moment])
        return loss.detach()
    governor = Governor(nn.Linear(1, 1), chance_loss=None, config=OFTEN)
    g = torch.Generator().manual_seed(0)
    for i in range(120):
        if i in (41, 71): run["weights"]["w"][0] = torch.nan
        governor.run(step, torch.randn(16, 4, generator=g))
    assert [r.cause for r in governor.reports] == ["external", "external"] and all(r.redone for r in governor.reports)
    assert (run["weights"]["w"] - 1).abs().max() < .1


def train_layer_by_layer(way, fault, guarded=True):
    "Weights of two layers that are trained one after the other by one step; those of the second become NaN at 66."
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.Linear(8, 4)
    opts = [torch.optim.SGD(m.parameters(), .05) for m in layers]
    governor = Governor(*layers, *opts, chance_loss=None, config=OFTEN) if guarded else None
    h, k = torch.randn(256, 4), 0
    for layer, opt in zip(layers, opts):
        def step(x): return descend(opt, (layer(x).tanh().square().mean(1) - .3).square().mean())
        def source():
            nonlocal k
            for _ in range(60):
                if fault and k == 66: layer.weight.data[0, 0] = torch.nan
                k += 1
                yield h[torch.randint(0, 256, (32,))]
        if way == "batches" and governor is not None:
            for x in governor.batches(source()): governor.watch(step(x))
        else:
            for x in source(): take(governor, step, x, way)
        with torch.no_grad(): h = layer(h)
    return [m.weight.detach() for m in layers], governor

@pytest.mark.parametrize("way", ["run", "batches"])
def test_a_step_is_replayed_with_the_network_that_its_closure_named_then(way):
    "A variable of a closure that names a network was not noted: the next layer's batches went through the one before."
    clean, _ = train_layer_by_layer(way, fault=False, guarded=False)
    weights, governor = train_layer_by_layer(way, fault=True)
    report, = governor.reports
    assert report.cause == "external" and report.restored_batch < 60 and report.redone > 0
    assert all(map(torch.equal, weights, clean))


@pytest.mark.parametrize("anew, says", [("optimizer", "another one for these weights (Adam)"),
                                        ("both", "nothing happens to their weights")])
@pytest.mark.parametrize("way", ["watch", "run"])
def test_a_governor_of_what_is_never_trained_says_so(anew, says, way, caplog):
    "A loop that makes its network anew after the Governor was told that there was nothing to do."
    net, opt, governor = guarded_layer(torch.optim.Adam, config="batch")
    if anew == "both": net = nn.Linear(4, 1)
    opt = torch.optim.Adam(net.parameters())
    def step(x): return descend(opt, net(x).square().mean())
    for x in torch.randn(160, 8, 4): take(governor, step, x, way)
    assert "no optimizer among the parts has stepped" in caplog.text and says in caplog.text


def without_hooks(params): return Clipping(torch.optim.SGD(params, .01))

@pytest.mark.parametrize("make, every", [(lambda params: torch.optim.SGD(params, .01), 150), (without_hooks, 1)])
def test_gradients_that_add_up_for_long_and_steps_without_hooks_are_no_idle_optimizer(make, every, caplog):
    net, opt, governor = guarded_layer(make, config="batch")
    for k, x in enumerate(torch.randn(300, 8, 4)):
        loss = net(x).square().mean()
        loss.backward()
        if k % every == every - 1:
            opt.step()
            opt.zero_grad()
        governor.watch(loss)
    assert "has stepped" not in caplog.text


def test_a_rate_that_no_optimizer_has_is_not_said_to_be_cut():
    "A loop that steps by hand was told that its rate is cut, which nobody can do but the loop."
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    governor = Governor(net, chance_loss=None)
    for k in range(420):
        x = torch.randn(64, 4)
        if k >= 150: net.weight.data += 60 * torch.randn(3, 4) # as steps of a rate that is far too high
        net.zero_grad()
        loss = F.cross_entropy(net(x), (x @ AIM > 1).long()[:, 0] + (x @ AIM > -1).long()[:, 0])
        loss.backward()
        net.weight.data -= .5 * net.weight.grad
        governor.watch(loss)
    told = [r.why for r in governor.reports if "nothing is lost by going back" in r.why]
    assert told and all("of your loop" in why and "should be cut" in why for why in told) and governor.lr_factor == 1.


class Kept:
    "A hidden state as an attribute."
    def __init__(self): self.h = torch.zeros(8, 6)
    def get(self): return self.h
    def set(self, h): self.h = h

class KeptInADict:
    "The same as an entry."
    def __init__(self): self.table = dict(h=torch.zeros(8, 6))
    def get(self): return self.table["h"]
    def set(self, h): self.table["h"] = h

@pytest.mark.costly
@pytest.mark.parametrize("make", [Kept, KeptInADict])
def test_a_hidden_state_that_the_loop_begins_anew_is_otherwise_the_steps(make):
    "As in truncated back-propagation: one with NaN stayed behind the rollback, since the loop had once written it."
    def trained(harm):
        torch.manual_seed(0)
        net = nn.ModuleDict(dict(cell=nn.GRUCell(4, 6), head=nn.Linear(6, 4)))
        opt = torch.optim.SGD(net.parameters(), lr=.1)
        governor, kept, losses = Governor(net, opt, chance_loss=None, config=OFTEN), make(), []
        def step(x):
            kept.set(net["cell"](x, kept.get().detach()))
            return descend(opt, F.mse_loss(net["head"](kept.get()), x))
        for k, x in enumerate(torch.randn(80, 8, 4)):
            if k % 20 == 0: kept.set(torch.zeros(8, 6))
            if harm and k == 46:
                with torch.no_grad(): net["cell"].weight_ih[0, 0] = torch.nan
            losses.append(governor.run(step, x))
        return losses[47:], [r.cause for r in governor.reports]
    assert trained(True) == (trained(False)[0], ["external"])


@pytest.mark.parametrize("way", ["run", "batches"])
@pytest.mark.parametrize("every", [5, 7])
def test_gradients_that_one_of_two_optimizers_adds_up_end_with_its_step(every, way):
    "A replay from a state in the middle of them was another run, and a missing zero_grad was blamed for any incident."
    def trained(harm):
        torch.manual_seed(0)
        body, head = nn.Linear(4, 8), nn.Linear(8, 2)
        seldom, often = torch.optim.Adam(body.parameters(), .01), torch.optim.SGD(head.parameters(), .05)
        governor = Governor(body, head, seldom, often, chance_loss=None, config=OFTEN)
        taken = 0
        def step(x):
            nonlocal taken
            loss = descend(often, F.mse_loss(head(body(x).relu()), x[:, :2]))
            taken += 1
            if taken % every == 0:
                seldom.step()
                seldom.zero_grad()
            return loss
        def batches():
            for k, x in enumerate(torch.randn(80, 8, 4)):
                if k == 53 and harm:
                    with torch.no_grad(): body.weight[0, 0] = torch.nan
                yield x
        for x in fed(governor, batches(), way): take(governor, step, x, way)
        return [*body.parameters(), *head.parameters()], governor
    (weights, governor), (clean, healthy) = trained(True), trained(False)
    assert [r.cause for r in governor.reports] == ["external"] and not healthy.reports
    assert all(map(torch.equal, weights, clean))


def test_moments_of_ones_own_that_ruin_every_good_state_are_named():
    "By `watch`: after each rollback one loss was fine, and the next was NaN again, without a word of why."
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    moments = [torch.zeros_like(p) for p in net.parameters()]
    governor = Governor(net, chance_loss=None, config=OFTEN)
    for k, x in enumerate(torch.randn(60, 8, 4)):
        if k == 46:
            with torch.no_grad(): net.weight[0, 0] = torch.nan
        loss = F.mse_loss(net(x), x[:, :2])
        net.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p, m in zip(net.parameters(), moments):
                m.mul_(.9).add_(p.grad)
                p.sub_(.01 * m)
        governor.watch(loss)
    first, *more = governor.reports
    assert not first.why and more and all("moments[0] and 1 more has NaN in it" in r.why for r in more)


class Noisy(nn.Module):
    "Its noise lies in memory that is allocated once and drawn anew in each step, as in Bayesian layers."
    def __init__(self, memory, draws):
        super().__init__()
        self.layer, self.draws = nn.Linear(4, 4), draws
        self.register_buffer("noise", memory)
    def forward(self, x):
        if self.draws: self.noise.data.normal_()
        return self.layer(x) + .1 * self.noise.nan_to_num(0.)

@pytest.mark.parametrize("way", ["watch", "run"])
@pytest.mark.parametrize("draws", [True, False])
@pytest.mark.parametrize("harmed", [5, 46])
def test_memory_that_no_step_has_written_yet_may_hold_nan(draws, harmed, way, caplog):
    "It may hold anything: now and then a healthy script was refused before its first step."
    torch.manual_seed(0)
    net = Noisy(torch.full((8, 4), torch.nan), draws)
    opt = torch.optim.SGD(net.parameters(), lr=.01)
    governor = Governor(net, opt, chance_loss=None, config=OFTEN)
    def step(x): return descend(opt, F.mse_loss(net(x), x))
    for k, x in enumerate(torch.randn(80, 8, 4)):
        if k == harmed:
            with torch.no_grad(): net.layer.weight[0, 0] = torch.nan
        take(governor, step, x, way)
    assert [r.batch for r in governor.reports] == [harmed] and net.layer.weight.isfinite().all()
    assert net.noise.isfinite().all() == draws and ("since before the first step" in caplog.text) != draws
    if draws:
        net.noise.fill_(torch.nan) # like any other buffer by now
        assert governor.snapshot.find_bad() == ("model.noise",)


def test_weights_with_nan_are_refused_before_the_first_step():
    net = nn.Linear(4, 4)
    nn.init.constant_(net.weight, torch.nan)
    with pytest.raises(RuntimeError, match="not finite: model.weight"): Governor(net)


def test_a_list_of_losses_is_not_what_no_rollback_puts_back(caplog):
    "Where a batch of infinite loss came right after a rollback, the log of the losses was to be given good values."
    net, opt, governor = guarded_layer(torch.optim.SGD, lr=.01, outputs=2)
    losses = []
    for k, x in enumerate(torch.randn(80, 8, 4)):
        if k == 46:
            with torch.no_grad(): net.weight[0, 0] = torch.nan
        loss = F.mse_loss(net(x), x[:, :2]) * (torch.inf if k in (47, 48, 49) else 1.)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.detach())
        governor.watch(loss)
    assert [r.batch for r in governor.reports] == [46] and net.weight.isfinite().all()
    assert len(losses) == 80 and "the restored weights give nan, too" in caplog.text
    assert "has NaN in it" not in caplog.text


@pytest.mark.parametrize("fault, cause", [("nan", "external"), ("rate", "rate")])
@pytest.mark.parametrize("how", ["groups", "flags"])
@pytest.mark.parametrize("place", ["outside", "body", "guarded"])
def test_a_layer_that_thaws_after_the_good_state_thaws_in_a_replay(place, how, fault, cause):
    "It stayed frozen there, or at its rate of later, and a healthy loop was said to be disturbed by hardware."
    data = [torch.randn(8, 4, generator=torch.Generator().manual_seed(i)) for i in range(80)]
    def train(ruined):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        net[0].requires_grad_(False)
        opt = torch.optim.Adam(net.parameters() if how == "flags" else net[2].parameters(), lr=.01)
        governor = Governor(net, opt, chance_loss=None, config=OFTEN) if ruined else None
        def thaw(i):
            if i != 44: return
            net[0].requires_grad_(True)
            if how == "groups": opt.add_param_group(dict(params=net[0].parameters(), lr=.005))
        def disturb(i):
            if fault == "nan" and i == 48: net[2].weight.data[0, 0] = torch.nan
            if fault == "rate" and i in (48, 56):
                for g in opt.param_groups: g["lr"] = 3. if i == 48 else .01
        def batches():
            for i, x in enumerate(data):
                if place == "outside": thaw(i)
                if ruined: disturb(i)
                yield i, x
        for i, x in fed(governor, batches(), "batches"):
            if place == "body" or place == "guarded" and not (governor and governor.replaying): thaw(i)
            loss = update(opt, F.mse_loss(net(x), x))
            if governor: governor.watch(loss)
        return net, governor
    alone, guarded = train(False)[0], train(True)
    report, *more = guarded[1].reports
    assert not more and (report.action, report.cause) == ("rollback", cause) and report.redone, str(report)
    assert report.restored_batch < 44
    ours, theirs = (F.mse_loss(net(torch.cat(data)), torch.cat(data)).item() for net in (guarded[0], alone))
    assert ours == theirs if fault == "nan" else ours < 1.1 * theirs
