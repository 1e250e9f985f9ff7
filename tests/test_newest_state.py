"Which good state a NaN goes back to: the newest where nothing has spoken against it, the one before where that fails."
import math

import pytest
import torch
from tiny import take, update
from torch import nn

from esper_nb.guard import Governor, GovernorConfig

pytestmark = pytest.mark.usefixtures("one_thread")
NAN = math.nan


class Loop:
    "A small classifier whose weights of every step are kept, so that a restored state is known to the bit."
    def __init__(self, config="batch", way="watch", **settings):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        self.opt = torch.optim.Adam(self.net.parameters(), 1e-3)
        self.x, self.generator = torch.randn(256, 8), torch.Generator().manual_seed(1)
        self.y = self.x[:, :3].argmax(1)
        self.governor = Governor(self.net, self.opt, chance_loss=None, config=config, **settings)
        self.way, self.before, self.ruins, self.plus = way, [], {}, {}

    def weights(self): return [p.detach().clone() for p in self.net.parameters()]

    def step(self, k):
        loss = update(self.opt, nn.functional.cross_entropy(self.net(self.x[k]), self.y[k]))
        return loss + self.plus.get(len(self.before) - 1, 0.)

    def train(self, steps):
        for _ in range(steps):
            self.before.append(self.weights())
            if ruin := self.ruins.get(len(self.before) - 1): ruin(self)
            k = torch.randint(256, (32,), generator=self.generator)
            take(self.governor, self.step, k, self.way)
        return self.governor.reports

    def is_at(self, batch): return all(map(torch.equal, self.weights(), self.before[batch]))


def weight(loop): loop.net[0].weight.data[0, 0] = NAN


@pytest.mark.parametrize("at", [45, 75, 139])
def test_nan_goes_back_to_the_newest_state(at):
    loop = Loop()
    loop.ruins = {at: weight}
    report, = loop.train(at + 1)
    newest = {45: 20, 75: 50, 139: 100}[at]
    assert (report.action, report.restored_batch) == ("rollback", newest) and loop.is_at(newest)
    reports = loop.train(60)
    assert len(reports) == 1 and all(p.isfinite().all() for p in loop.net.parameters())


@pytest.mark.parametrize("again", [1, 30])
def test_a_second_failure_goes_to_the_state_before(again, tmp_path):
    loop = Loop(folder=tmp_path)
    loop.ruins = {139: weight, 139 + again: weight}
    loop.train(140 + again)
    assert [r.restored_batch for r in loop.governor.reports] == [100, 50] and loop.is_at(50)
    loop.governor.close()
    Governor.recover(tmp_path, loop.net, loop.opt)
    assert loop.is_at(50) # and so does the disk


def huge(loop): loop.net[0].weight.data.fill_(3e38)

def test_a_state_that_gave_no_healthy_loss_is_not_trusted():
    "It was taken among losses that were not finite, or right before the first of them."
    loop = Loop()
    loop.ruins = {60: huge}
    loop.train(130)
    assert [r.restored_batch for r in loop.governor.reports] == [50] and loop.governor.losses.recent[-1] < 5
    loop = Loop()
    loop.ruins = {100: weight}
    report, = loop.train(101)
    assert report.restored_batch == 50 and loop.is_at(50)


def test_a_failure_long_after_goes_to_the_newest_again():
    loop = Loop()
    loop.ruins = {139: weight, 200: weight}
    loop.train(201)
    assert [r.restored_batch for r in loop.governor.reports] == [100, 190] and loop.is_at(190)


def test_an_anomaly_since_speaks_against_the_newest_state():
    loop = Loop()
    loop.ruins, loop.plus = {139: weight}, {120: 3.}
    loop.train(130)
    assert [k for k, _ in loop.governor.stats.anomalies(0)] == [120]
    report, = loop.train(10)
    assert report.restored_batch == 50 and loop.is_at(50)


def test_a_newest_state_that_was_copied_in_the_background_counts_as_well():
    loop = Loop(GovernorConfig(background=True))
    loop.ruins = {139: weight}
    report, = loop.train(140)
    assert report.restored_batch == 100 and loop.is_at(100)


def test_with_one_copy_there_is_nothing_before_the_good_state():
    loop = Loop(GovernorConfig(copies=1, probation=0))
    loop.ruins = {139: weight, 141: weight}
    loop.train(142)
    assert [r.restored_batch for r in loop.governor.reports] == [100, 100] and loop.is_at(100)
    assert not loop.governor.snapshot.step_back()


def test_steps_that_are_trained_on_again_lose_nothing_from_the_older_state():
    loop, alone = Loop(way="run"), Loop(way="run")
    loop.ruins = {139: weight}
    report, = loop.train(160)
    alone.train(160)
    assert report.restored_batch == 50 and all(map(torch.equal, loop.weights(), alone.weights()))


def test_by_hand_the_published_state_comes_back():
    loop = Loop()
    loop.train(139)
    report, = loop.governor.rollback()
    assert report.restored_batch == 50 and loop.is_at(50)
