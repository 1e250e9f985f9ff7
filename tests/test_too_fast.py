"A learning rate that is too high from the first step: the run dies before there is a good state that has learnt."
import math
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tiny import update

from esper_nb.guard import Governor

pytestmark = pytest.mark.usefixtures("one_thread")
CLASSES, DEAD = 6, 50 # per cent right, below which a network has not learnt these points


def points(seed=0, size=2000, width=16):
    "Six clouds that a small network tells apart."
    g = torch.Generator().manual_seed(seed)
    middle, y = 1.2 * torch.randn(CLASSES, width, generator=g), torch.randint(CLASSES, (size,), generator=g)
    return middle[y] + torch.randn(size, width, generator=g), y


@cache # that of nobody is compared with several
def train(way, seed, rate=.3, steps=400):
    "Return per cent right at the end, the Governor, and the rate."
    torch.manual_seed(seed)
    x, y = points()
    net = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, CLASSES))
    opt = torch.optim.SGD(net.parameters(), rate, momentum=.9)
    def step(at): return update(opt, F.cross_entropy(net(x[at]), y[at]))
    governor = None if way == "alone" else Governor(net, opt, chance_loss=math.log(CLASSES))
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        at = torch.randint(len(x), (32,), generator=g)
        if way == "run": governor.run(step, at)
        else:
            loss = step(at)
            if governor is not None: governor.watch(loss.detach())
    with torch.no_grad(): right = 100 * float((net(x).argmax(1) == y).float().mean())
    return right, governor, opt.param_groups[0]["lr"]


@pytest.mark.parametrize("way", ["watch", pytest.param("run", marks=pytest.mark.slow)])
def test_a_run_that_dies_of_its_first_rate_begins_again_more_slowly(way):
    "Chaotic runs differ with the last bit, so three are asked; no two of them may stay dead."
    alone = [train("alone", seed)[0] for seed in range(3)]
    assert sum(right < DEAD for right in alone) >= 2, alone # or this shows nothing
    ended = [train(way, seed) for seed in range(3)]
    assert sum(right > 90 for right, _, _ in ended) >= 2, [e[0] for e in ended]
    for right, governor, rate in ended:
        if not governor.reports or right < 90: continue
        assert rate <= .075 and governor.lr_factor <= .25 # the cut stays, although the loss is low again
        assert {r.cause for r in governor.reports} <= {None, "lr_too_high", "gradient_spike", "moments"}


@pytest.mark.parametrize("way", ["watch", "run"])
def test_a_rate_that_is_right_is_left_alone(way):
    alone, (right, governor, rate) = train("alone", 0, rate=.05), train(way, 0, rate=.05)
    assert right == alone[0] and rate == .05 and not governor.reports


def test_a_network_that_never_learns_is_no_run_that_has_fallen():
    "Labels of no meaning: the loss stays at chance, and nothing is undone."
    torch.manual_seed(0)
    net = nn.Linear(16, CLASSES)
    opt = torch.optim.SGD(net.parameters(), .05)
    governor = Governor(net, opt, chance_loss=math.log(CLASSES))
    for _ in range(300):
        governor.watch(update(opt, F.cross_entropy(net(torch.randn(32, 16)), torch.randint(CLASSES, (32,)))).detach())
    assert not governor.reports
