"The benchmark of strangers: what is kept for last is apart, verdicts are right, its rivals follow their papers."
import functools
import math

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import foreign_faults
from benchmarks.foreign_bench import cause_of, digest, healthy_run, verdict
from benchmarks.foreign_faults import STORIES
from benchmarks.foreign_loops import HEALTHY, HELD_OUT, HELD_OUT_SEEDS
from benchmarks.foreign_rivals import ARMS, GUARDS, Clip, put_in_place

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


def test_loops_and_seeds_are_held_out():
    assert not {*HELD_OUT, *foreign_faults.HELD_OUT} & {*HEALTHY, *foreign_faults.LOOPS, *STORIES}
    assert len(HELD_OUT_SEEDS) == 10 and not set(HELD_OUT_SEEDS) & set(range(100))


def test_a_digest_sees_one_bit_and_nothing_else():
    net = nn.Linear(3, 2)
    opt = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    opt.step()
    def whole(): return digest((net, opt, dict(a=[1, 2.], b=np.arange(3)), None))
    before = whole()
    assert whole() == before
    opt.state[net.bias]["exp_avg_sq"].view(torch.int32)[0] ^= 1
    assert whole() != before
    opt.state[net.bias]["exp_avg_sq"].view(torch.int32)[0] ^= 1
    assert whole() == before


@pytest.mark.parametrize("clean,alone,guarded,found", [
    (1., 1.1, 1.1, "harmless"), (1., 1.19, 1.25, "harmless"), (1., 1.1, 1.4, "worse"), (1., 3., 1.1, "recovered"),
    (1., 3., 1.9, "in part"), (1., 3., 2.5, "harmful"), (1., 3., 3.2, "worse"), (1., math.nan, 1.1, "recovered"),
    (1., math.nan, 9., "in part"), (1., math.nan, math.nan, "harmful"), (1., 3., math.nan, "worse"),
    (1., 1.1, math.inf, "worse")])
def test_a_verdict_holds_a_run_against_clean_and_alone(clean, alone, guarded, found):
    assert verdict(clean, .2, alone, guarded) == found


@pytest.mark.parametrize("causes,explained,named", [
    ([], None, ""), (["data"], None, "true"), (["unknown"], None, "unknown"), (["data", "order"], None, "false"),
    ([], "healthy", "false"), ([], "RuntimeError: none", ""), (["unknown", "data"], None, "true")])
def test_a_cause_is_true_only_where_no_other_was_said(causes, explained, named):
    row = dict(loop="table", fault="one batch × 1e4", causes=causes, explained=explained)
    assert cause_of(row, harmed=True) == named


def test_zclip_lets_usual_norms_pass_and_cuts_a_spike():
    weight = nn.Parameter(torch.zeros(4))
    opt = torch.optim.SGD([weight], 0.)
    acts = []
    clip = Clip(acts)
    def seen(norm):
        weight.grad = torch.tensor([norm, 0., 0., 0.])
        clip(opt, (), {})
        return weight.grad.norm().item()
    usual = [1 + .1 * (-1)**i for i in range(60)]
    assert [seen(x) for x in usual] == pytest.approx(usual) and not acts
    cut = seen(100.)
    assert .9 < cut < 1.2 and len(acts) == 1 # 2.5² / z spreads above the mean, for a z of about a thousand
    assert seen(1.1) == pytest.approx(1.1)


def test_a_rival_takes_the_place_of_an_optimizer():
    def closed(opt): return lambda: opt
    class Holder:
        def __init__(self, opt): self.opt = opt
        def step(self): return self.opt
        def __call__(self, _): return self.opt
    for made_of in (closed, lambda o: Holder(o).step, lambda o: functools.partial(Holder(o), 0)):
        old, new = object(), object()
        step = made_of(old)
        put_in_place(step, old, new)
        assert step() is new


@pytest.mark.parametrize("arm", [a for a in ARMS if a not in ("none", "zclip")])
def test_every_guard_leaves_a_plain_run_alone(arm):
    row, clean = healthy_run("loss-and-accuracy" if arm != "run" else "carried-state", arm, 0), GUARDS[arm]
    assert clean.__doc__ or clean.train.__doc__ or arm == "run"
    assert row["batches"] >= 400 and not row["acts"]
