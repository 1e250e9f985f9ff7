"Rises that begin when something is done to the run: how far back, how soon, and which writes are left alone."
import math

import pytest
import torch
from torch import nn

from esper_nb.guard import Governor

pytestmark = pytest.mark.usefixtures("one_thread")


class Loop:
    "Ten noisy classes that are learnt in some hundred steps; the weights before every step are kept."
    def __init__(self, rate=3e-4, guarded=True, micro=1):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
        self.opt = torch.optim.Adam(self.net.parameters(), rate)
        centers = .55 * torch.randn(10, 64)
        self.y = torch.randint(10, (1800,))
        self.x = centers[self.y] + torch.randn(1800, 64)
        self.generator, self.micro = torch.Generator().manual_seed(1), micro
        self.governor = Governor(self.net, self.opt, chance_loss=math.log(10)) if guarded else None
        self.before, self.acts = [], {}

    def weights(self): return [p.detach().clone() for p in self.net.parameters()]

    def train(self, batches):
        for _ in range(batches):
            self.before.append(self.weights())
            if act := self.acts.get(len(self.before) - 1): act(self)
            k = torch.randint(1800, (64,), generator=self.generator)
            loss = nn.functional.cross_entropy(self.net(self.x[k]), self.y[k])
            loss.backward()
            if len(self.before) % self.micro == 0:
                self.opt.step()
                self.opt.zero_grad()
            if self.governor: self.governor.watch(loss)
        return list(self.governor.reports) if self.governor else []

    def is_at(self, batch): return all(map(torch.equal, self.weights(), self.before[batch]))


def until_rollback(loop):
    "Train until something was done."
    while not loop.train(1) and len(loop.before) < 270: pass
    return loop.governor.reports[-1]


def turned(loop): loop.net[2].weight.data.neg_()
def noisy(loop): loop.net[4].weight.data.normal_(std=10)
def sharp(loop): loop.net[2].weight.data.mul_(1000) # some losses are zero, others enormous
def fast(loop): loop.opt.param_groups[0]["lr"] *= 300


@pytest.mark.parametrize("act,within", [(turned, 64), (noisy, 24), (sharp, 130), (fast, 80)])
def test_the_state_from_just_before_it_comes_back(act, within):
    "It is on probation then; all its losses up to the fault were healthy."
    loop = Loop()
    loop.acts = {130: act}
    report = until_rollback(loop)
    assert report.restored_batch == 100 and loop.is_at(100) and report.batch < 130 + within
    assert loop.opt.param_groups[0]["lr"] == 3e-4 # of the good state
    assert loop.train(150) == [report] and loop.governor.losses.recent[-1] < .5


@pytest.mark.parametrize("micro,at", [(1, 99), (3, 98)])
def test_a_state_from_after_it_is_not_trusted(micro, at):
    "Where gradients are accumulated a write is seen at the next update, two batches later at most."
    loop = Loop(micro=micro)
    loop.acts = {at: noisy}
    report = next(r for r in loop.train(200) if r.action == "rollback")
    assert report.restored_batch == 50


def test_a_second_failure_goes_to_the_state_before():
    loop = Loop()
    loop.acts = {130: noisy}
    until_rollback(loop)
    loop.net[0].weight.data[0, 0] = math.nan
    assert loop.train(1)[-1].restored_batch == 50 and loop.is_at(50)


def test_a_comparison_goes_back_to_the_state_that_it_has_tried():
    "Also where that one was once published before its time."
    loop = Loop()
    loop.acts = {120: lambda loop: loop.net[0].weight.data.fill_(math.nan), 135: fast}
    reports = loop.train(240)
    assert [(r.reason, r.restored_batch) for r in reports] == [("non-finite", 100), ("explosion", 100)]


@torch.no_grad()
def new_head(loop): loop.net[4].reset_parameters()

@torch.no_grad()
def shrink_and_perturb(loop):
    for p in loop.net.parameters(): p.mul_(.5).add_(.02 * torch.randn_like(p))

def pruned(loop):
    for p in (loop.net[0].weight, loop.net[2].weight):
        mask = (p.detach().abs() > p.detach().abs().flatten().quantile(.8)).float()
        p.data.mul_(mask)
        p.register_hook(lambda g, mask=mask: g * mask)

@torch.no_grad()
def new_neurons(loop):
    nn.init.normal_(loop.net[0].weight[:40], std=.1)
    loop.net[2].weight[:, :40] = 0

@pytest.mark.parametrize("act,rate", [(new_head, 1e-3), *(pytest.param(*both, marks=pytest.mark.slow) for both in (
    (new_head, 3e-5), (shrink_and_perturb, 1e-3), (pruned, 3e-5), (pruned, 1e-3), (new_neurons, 3e-5)))])
def test_a_write_that_is_meant_stays(act, rate):
    "It lifts the loss, which comes back; nothing is compared, and the weights are those of a run alone, to the bit."
    loops = [Loop(rate, guarded) for guarded in (False, True)]
    for loop in loops:
        loop.acts = {300: act}
        loop.train(300)
        torch.manual_seed(5)
        loop.train(250)
    alone, guarded = loops
    assert not guarded.governor.reports and all(map(torch.equal, alone.weights(), guarded.weights()))
