"Weights of no sensible size: one flipped bit of an exponent is 1e38, which is finite, and which no loss has to show."
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from esper_nb.guard import Governor

pytestmark = pytest.mark.usefixtures("one_thread")


def flip(t, counted=True):
    "Flip the highest bit of the exponent of one number; `counted`: so that torch knows of the write."
    words = t.detach().numpy().reshape(-1).view(np.int32)
    words[len(words) // 2 + 5] ^= 1 << 30
    if counted: t.detach().add_(0)


class Pairs:
    "Features of unit length: a loss that is bounded, whatever the weights are."
    def __init__(self, width=64, governed=True):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                                 nn.Linear(width, 8))
        self.opt = torch.optim.Adam(self.net.parameters(), 1e-3)
        self.kinds = torch.randn(6, 16)
        self.governor = Governor(self.net, self.opt) if governed else None
        self.steps, self.weights = 0, {}

    def train(self, steps, before=None, every=None):
        for k in range(self.steps, self.steps + steps):
            self.weights[k] = [p.detach().clone() for p in self.net.parameters()]
            a, b = torch.randint(6, (32,)), torch.randint(6, (32,))
            u, v = (F.normalize(self.net(self.kinds[i] + 2 * torch.randn(32, 16)), dim=1) for i in (a, b))
            loss = F.mse_loss((u * v).sum(1), (a == b).float())
            self.opt.zero_grad()
            loss.backward()
            if before and k == self.steps: before(self)
            if every: every(self)
            self.opt.step()
            if self.governor is not None: self.governor.watch(loss)
        self.steps += steps
        return [] if self.governor is None else list(self.governor.reports)

    def is_at(self, batch): return all(map(torch.equal, self.net.parameters(), self.weights[batch]))


def moment(run): return run.opt.state[run.net[2].weight]["exp_avg"]


@pytest.mark.parametrize("tensor", [lambda run: run.net[2].weight, lambda run: run.net[2].bias, moment],
                         ids=["weight", "bias", "moment"])
def test_a_flipped_bit_is_undone_within_eight_losses_whatever_the_loss_says(tensor):
    run = Pairs()
    run.train(120)
    report, = run.train(8, before=lambda run: flip(tensor(run)))
    assert (report.action, report.reason, report.restored_batch) == ("rollback", "state", 100)
    assert "times those of the good state" in report.bad_state[0]
    assert len(run.train(60)) == 1 and max(p.abs().max() for p in run.net.parameters()) < 10


def test_the_state_of_the_newest_snapshot_comes_back_to_the_bit():
    run = Pairs()
    run.train(124)
    run.train(1, before=lambda run: flip(run.net[2].bias))
    while not (reports := run.governor.reports) and run.steps < 140: run.train(1)
    assert len(reports) == 1 and run.is_at(100)


def test_a_bit_that_nobody_has_seen_flip_never_becomes_a_good_state():
    run = Pairs(width=512) # more than is looked at after every step
    run.train(121)
    reports = run.train(80, before=lambda run: flip(run.net[2].weight, counted=False))
    assert [r.reason for r in reports] == ["state"] and reports[0].restored_batch == 100


def new_head(run): run.net[4].weight.data.normal_(0, 100.)
def other_network(run): run.net.load_state_dict({k: 50 * v for k, v in run.net.state_dict().items()})
def pruned(run): run.net[2].weight.data[::2] = 0


@pytest.mark.parametrize("write", [new_head, other_network, pruned])
def test_what_is_written_on_purpose_is_not_taken_for_one(write):
    run = Pairs()
    run.train(120)
    assert not any(r.reason == "state" for r in run.train(120, before=write))


def test_weights_that_are_zero_until_they_are_written_are_not_taken_for_one():
    run, alone = Pairs(governed=False), Pairs(governed=False)
    for one in (run, alone):
        for p in one.net.parameters(): p.data.zero_()
    run.governor = Governor(run.net, run.opt)
    def fill(one):
        for p in one.net.parameters(): p.data.normal_(0, .3)
    for one in (run, alone):
        torch.manual_seed(1)
        one.train(60)
        one.train(120, before=fill)
    assert not run.governor.reports and all(map(torch.equal, run.net.parameters(), alone.net.parameters()))


def test_a_habit_of_writing_is_no_sign_and_parameters_may_be_large():
    "A fit in units of its own: steps lead from 0 to 1e9, and the loop clips its weights after every step."
    rates = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([rates], lr=.5)
    model = nn.ParameterList([rates])
    governor = Governor(model, optimizer)
    goal = torch.tensor([1e9, -3e8])
    for _ in range(120):
        optimizer.zero_grad()
        loss = ((rates - goal) ** 2).sum() / 2
        loss.backward()
        optimizer.step()
        with torch.no_grad(): rates.clamp_(-1e9, 1e9)
        governor.watch(loss)
    assert not governor.reports and torch.allclose(rates, goal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_that_is_nan_because_of_a_huge_weight_is_no_harmless_one(dtype):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)).to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), .05)
    governor, data = Governor(net, optimizer), torch.randn(256, 8, dtype=dtype)
    labels = data[:, :3].argmax(1)
    for k in range(100):
        if k == 70: net[0].bias.data[3], net[2].weight.data[:, 3] = 3e38, torch.tensor([3e38, -3e38, 0])
        i = torch.randint(256, (32,))
        optimizer.zero_grad()
        loss = F.cross_entropy(net(data[i]), labels[i])
        loss.backward()
        optimizer.step()
        governor.watch(loss)
    report, = governor.reports
    assert (report.reason, report.batch, report.restored_batch) == ("state", 70, 50)
