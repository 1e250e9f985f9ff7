"A cure names a cause only where changes of the same kind do not cure as well, and what nobody proved is not undone."
import functools
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tiny import update

from benchmarks import foreign_bench
from esper_nb.guard import Governor

pytestmark = pytest.mark.usefixtures("one_thread")
CENTERS = torch.randn(10, 16, generator=torch.Generator().manual_seed(0))

def batch(k):
    g = torch.Generator().manual_seed(k)
    y = torch.randint(0, 10, (64,), generator=g)
    return CENTERS[y] + torch.randn(64, 16, generator=g), y

class Run:
    "A classifier with batch norm; `odd` are the batches whose inputs nobody has scaled."
    def __init__(self, odd=(), recorded=True, steps=300):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.BatchNorm1d(16, momentum=.01), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
        self.opt = torch.optim.SGD(self.net.parameters(), .05, momentum=.9)
        self.governor = Governor(self.net, self.opt, chance_loss=math.log(10))
        for k in range(steps):
            x, y = batch(k)
            if k in odd: x = x * 255
            if recorded: self.governor.run(self.step, (x, y))
            else: self.governor.watch(self.step((x, y)))
        self.governor.close()

    def step(self, xy): return update(self.opt, F.cross_entropy(self.net(xy[0]), xy[1])).detach()

    @property
    def error(self):
        self.net.eval()
        x, y = batch(10**6)
        return F.cross_entropy(self.net(x), y).item()


@functools.cache
def healthy(recorded): return Run(recorded=recorded)

@pytest.mark.parametrize("count", [1, 20, pytest.param(60, marks=pytest.mark.slow)])
def test_a_burst_that_only_buffers_show_is_answered_once_and_named(count):
    "Batch norm hides it from every training loss; a network in evaluation mode would be ruined."
    odd = range(150, 150 + count)
    run, clean = Run(odd), healthy(True)
    report, = run.governor.reports
    assert report.cause == "data" and run.governor.explain().batches == tuple(odd)
    assert report.lost == (odd[0], odd[-1]) and run.error < clean.error + .1
    assert not clean.governor.reports

@pytest.mark.parametrize("count", [1, 20, 60])
def test_a_burst_that_only_buffers_show_costs_a_watched_run_no_batch(count):
    run, clean = Run(range(150, 150 + count), recorded=False), healthy(False)
    assert run.governor.reports and all(r.lost is None for r in run.governor.reports)
    assert run.error < clean.error + .1

def test_buffers_are_not_mended_without_the_weight_that_makes_them_overflow():
    "A flipped exponent: batch norm hides it from the loss, and its own statistics overflow at every step."
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    opt = torch.optim.SGD(net.parameters(), .05)
    governor = Governor(net, opt, chance_loss=math.log(10))
    for k in range(300):
        if k == 150: net[0].weight.data[3, 5] = 1e30
        x, y = batch(k)
        governor.watch(update(opt, F.cross_entropy(net(x), y)).detach())
    report, = governor.reports
    assert report.reason == "state" and "model" in report.restored
    assert net[0].weight.abs().max() < 10 and net[1].running_var.isfinite().all()


@pytest.mark.parametrize("recorded", [False, True])
def test_a_lasting_change_of_the_data_is_a_new_level_in_the_end(recorded):
    run = Run(range(100, 400), recorded, steps=400)
    assert len(run.governor.reports) <= (0 if recorded else 4) and run.net[0].running_var.mean() > 1e3

@pytest.mark.slow
def test_what_a_step_draws_for_itself_is_not_called_data():
    "From some step on nearly all inputs are dropped: the step's own dice, whatever the batch."
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    opt = torch.optim.Adam(net.parameters(), 5e-3)
    governor = Governor(net, opt, chance_loss=math.log(10))
    dice, state = random.Random(3), dict(drop=.1)

    def step(xy):
        if dice.random() < .004: state["drop"] = .9
        return update(opt, F.cross_entropy(net(F.dropout(xy[0], state["drop"])), xy[1]))

    for k in range(400): governor.run(step, batch(k))
    assert state["drop"] == .9, "the dice have fallen"
    said = [governor.explain().cause, *(r.cause for r in (*governor.reports, *governor.notes))]
    assert "data" not in said


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "seed"), [
    ("rolling-buffer", 1), ("rolling-buffer", 3), ("q-learning", 3), ("ring-gan", 4), ("partly-called", 2)])
@pytest.mark.usefixtures("few_words")
def test_a_healthy_loop_whose_loss_has_a_moving_aim_is_left_alone(loop, seed):
    alone = foreign_bench.healthy_run(loop, "none", seed)
    row = foreign_bench.against_alone(foreign_bench.healthy_run(loop, "run", seed), alone)
    assert not row["acts"] and not row["false_causes"] and row["equal"]
