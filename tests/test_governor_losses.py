"Healthy losses of every kind are left alone, and ruin is seen on each of them, at any scale and sign."
import math
from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tiny import update

from benchmarks.healthy_loops import LOOPS, run as run_loop
from benchmarks.healthy_losses import CHANCE, HEALTHY
from esper_nb.guard import DetectorConfig, Governor, GovernorConfig, GovernorStop, LossStats, judge, loss_limits

pytestmark = pytest.mark.usefixtures("one_thread")
def governed(losses, chance, **watch):
    gov = Governor(nn.Linear(1, 1), chance_loss=chance, config=GovernorConfig(proof=False, lost_confirm=1))
    for loss in losses: gov.watch(float(loss), **watch)
    return gov

QUICK = list(HEALTHY)[::5] # of the kinds; the others are slow

@pytest.mark.parametrize("kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in HEALTHY])
def test_healthy_losses_are_left_alone(kind):
    chance, make = HEALTHY[kind]
    for seed, before_step in enumerate((False, True, False)): # ten fresh seeds of each kind are in the benchmark
        gov = governed(make(np.random.default_rng(910_000 + seed)), chance, before_step=before_step)
        assert not gov.reports, (kind, seed, str(gov.summary()))
        assert gov.lr_factor == 1.

@pytest.mark.parametrize("scale", [1e-6, 1., 1e6])
def test_a_signed_ruin_is_seen_in_both_directions(scale):
    rng = np.random.default_rng(5)
    for bad in (-1e12, 1e12, 300.):
        s = LossStats()
        for x in rng.normal(-5., 1., 200): s, v = judge(s, scale * x)
        assert v.scale() == "linear" and v.reason() == "healthy"
        answers = []
        for _ in range(3):
            s, v = judge(s, scale * bad)
            answers.append(v.reason())
        assert "explosion" in answers

def test_the_scale_follows_the_losses_or_the_setting():
    rng = np.random.default_rng(0)
    def scale(x, **c):
        s = LossStats()
        s.add(np.zeros(len(x), int), x, DetectorConfig(**c))
        return s.scale(0)
    positive = np.exp(rng.standard_normal(200))
    assert [scale(positive), scale(positive - 1), scale(np.maximum(0, positive - 1))] == ["log", "linear", "linear"]
    assert [scale(positive - 1, scale="log"), scale(positive, scale="linear")] == ["log", "linear"]
    gov = governed([*positive, math.nan], None)
    assert gov.reports[-1].scale == "log" and gov.summary().scale == "log"
    with pytest.raises(ValueError, match="expected 'auto', 'log' or 'linear'"): DetectorConfig(scale="cubic")

def test_the_scale_changes_when_a_loss_crosses_zero_and_the_smoothed_loss_with_it():
    s = LossStats()
    for k in range(400): s, v = judge(s, 2. - .01 * k)
    assert v.scale() == "linear" and abs(s.smooth[0] - (-1.97)) < .2

def test_losses_on_two_scales_are_judged_side_by_side_as_if_alone():
    rng = np.random.default_rng(3)
    x = np.stack([np.exp(.3 * rng.standard_normal(300)), rng.standard_normal(300)], 1); x[250:] += 40.
    both, alone = LossStats(2), [LossStats(), LossStats()]
    for row in x:
        both, v = judge(both, row)
        for i in range(2):
            alone[i], w = judge(alone[i], row[i])
            assert v.code[i] == w.code[0] and np.isclose(v.limit[i], w.limit[0])

def test_limits_name_the_loss_at_which_a_rise_begins():
    s = LossStats(2)
    s.add(np.tile([0, 1], 100), np.random.default_rng(0).normal([.9, -3.], .05, (100, 2)).ravel(), DetectorConfig())
    by = loss_limits(s, DetectorConfig(), None)
    assert s.linear.tolist() == [0, 1] and 1.1 < by.rise[0] < 1.25 and -2.95 < by.rise[1] < -2.7


# --- trials

def test_a_rise_is_looked_at_and_its_end_is_noted():
    rng = np.random.default_rng(0)
    calm = .5 + .02 * rng.standard_normal(300)
    gov = governed([*calm[:200], *([1.4] * 20), *calm[200:]], CHANCE)
    assert [r.action for r in gov.notes] == ["wait", "passed"] and not gov.reports and gov.observed.monitor is None

def test_no_snapshot_is_published_during_a_trial():
    gov = Governor(nn.Linear(1, 1), chance_loss=CHANCE,
                   config=GovernorConfig(snapshot_every=5, probation=5, patience=100, proof=False))
    for k in range(100): gov.watch(.5 + .01 * (k % 3))
    step = gov.snapshot.steps[0]
    for _ in range(63): gov.watch(2.2)
    assert gov.observed.monitor is not None and gov.snapshot.steps[0] <= step + 5

def test_a_trial_goes_into_a_state_and_comes_back():
    a, b = [Governor(nn.Linear(1, 1), chance_loss=CHANCE) for _ in range(2)]
    for k in range(100): a.watch(.5 + .01 * (k % 3))
    for _ in range(15): a.watch(2.2)
    b.load_state_dict(a.state_dict())
    trails = [[[r.action for r in g.watch(2.2)] for _ in range(60)] for g in (a, b)]
    assert trails[0] == trails[1] and ["compare"] in trails[0] and ["accepted"] in trails[0]
    assert a.notes[-1].lost == b.notes[-1].lost

def test_nan_is_never_waited_for():
    gov = governed([.5] * 100 + [2.2] * 8 + [math.nan], CHANCE)
    assert [r.reason for r in gov.reports] == ["non-finite"] and gov.observed.monitor is None


# --- changes that are meant, bursts

def test_accept_ends_a_trial():
    gov = governed([.1] * 100 + [2.3] * 10, CHANCE)
    assert gov.observed.monitor is not None
    gov.accept()
    for _ in range(100): gov.watch(2.3)
    assert not gov.reports

def test_a_snapshot_can_be_taken_at_once():
    net = nn.Linear(1, 1)
    gov = Governor(net, chance_loss=None)
    for _ in range(7): gov.watch(1.)
    net.weight.data.fill_(3.)
    gov.take_snapshot()
    net.weight.data.fill_(9.)
    report, = gov.rollback()
    assert net.weight.item() == 3. and report.restored_step == 7 and report.rollbacks_left == 4

@pytest.mark.parametrize("bad", [20, 60])
def test_a_burst_does_not_use_up_the_budget(bad):
    "Batches with inputs that are not numbers: each would ruin the weights, and all of them are one failure or two."
    torch.manual_seed(0)
    net = nn.Linear(4, 3); opt = torch.optim.SGD(net.parameters(), lr=.1)
    gov = Governor(net, opt, chance_loss=math.log(3))
    for k in range(400):
        x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
        if 200 <= k < 200 + bad: x = x * math.nan
        gov.watch(update(opt, F.cross_entropy(net(x), y)))
    assert len(gov.reports) == bad // 48 # the gate has dropped all of these updates
    assert gov.budget.ever[0] <= 1 + bad // 48 and net.weight.isfinite().all()
    assert not gov.stopped[0]

def test_a_burst_of_bad_batches_is_left_out_batch_by_batch():
    net = nn.Linear(1, 1)
    gov = Governor(net, chance_loss=CHANCE)
    for k in range(160):
        with gov.step(): gov.watch(math.nan if 100 <= k < 130 else .5)
    assert [r.action for r in gov.reports] == ["skip"] * 30 and gov.budget.skips[0] == 1
    assert gov.summary().lost == tuple((k, k) for k in range(100, 130))

def test_wrong_labels_for_a_while_do_not_stop_a_run():
    torch.manual_seed(0)
    centers = torch.randn(10, 16)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10)); opt = torch.optim.Adam(net.parameters(), 2e-3)
    gov = Governor(net, opt, chance_loss=CHANCE)
    for k in range(500):
        y = torch.randint(0, 10, (64,)); x = centers[y] + .5 * torch.randn(64, 16)
        if 300 <= k < 360: y = y[torch.randperm(64)]
        loss = update(opt, F.cross_entropy(net(x), y))
        gov.watch(loss)
    assert not gov.stopped[0] and loss.item() < .5, str(gov.summary())

def test_failures_without_end_still_end():
    gov = Governor(nn.Linear(1, 1), chance_loss=CHANCE)
    for k in range(60): gov.watch(.5)
    with pytest.raises(GovernorStop):
        for k in range(10_000): gov.watch(math.nan)
    assert k < 4 * 56 + 10

# --- healthy loops: the whole is `python benchmarks/healthy_loops.py`, here a seed of its own each, shortened

@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_a_healthy_loop_is_the_loop_alone_to_the_bit(name):
    guarded, alone = run_loop(name, 77, steps=300), run_loop(name, 77, guarded=False, steps=300)
    for key, mine in guarded.items():
        assert mine["acts"] == [], (key, mine["acts"])
        same = mine["untouched"] # a comparison loads old weights for a few losses; up to there nothing may differ
        assert mine["losses"][:same] == alone[key]["losses"][:same]
        if same >= len(mine["losses"]): assert torch.equal(mine["weights"], alone[key]["weights"])

def test_accept_of_one_lane_leaves_the_others_alone():
    net = nn.Linear(1, 2) # a weight for each of two lanes
    gov = Governor(net, chance_loss=None, lanes=2)
    for k in range(100): gov.watch(torch.tensor([.1 + .005 * (k % 3)] * 2))
    gov.accept([0])
    reports = [r for k in range(20) for r in gov.watch(torch.tensor([3. + .1 * (k % 3)] * 2))]
    assert reports and {r.lane for r in reports} == {1}
    assert all(n.lane == 1 for n in gov.notes if hasattr(n, "lane"))


def test_losses_that_waited_behind_a_failure_are_void():
    "They are those of weights that are gone by then: one failure, one answer."
    config = GovernorConfig(sync_every=4, lost_confirm=1)
    net = torch.nn.Linear(1, 1)
    governor = Governor(net, chance_loss=None, config=config)
    for _ in range(40): governor.watch(.5)
    net.weight.data.fill_(math.nan)
    said = [governor.watch(loss) for loss in (.5, math.nan, math.nan, 9e9)]
    assert [len(reports) for reports in said] == [0, 0, 0, 1] and len(governor.reports) == 1
    assert net.weight.isfinite().all()

@pytest.mark.parametrize("made", [
    lambda loss: SimpleNamespace(logits=torch.ones(3), loss=loss), namedtuple("Out", "logits loss", defaults=[None])],
    ids=["object", "named tuple"])
def test_a_step_may_return_an_object_with_its_loss(made):
    governor = Governor(nn.Linear(1, 1), chance_loss=None)
    def step(x): return made(loss=torch.tensor(x)) if made.__name__ == "<lambda>" else made(torch.ones(3), x)
    for k in range(30): governor.run(step, .5)
    assert governor.recorder.steps[-1].loss == .5
    with pytest.raises(ValueError, match="of type object"): governor.run(lambda x: object(), .5)

@pytest.mark.parametrize("loss, said", [
    (None, "loss=None, expected a number"), ((torch.tensor(1.), 2), "loss=a tuple, expected a number"),
    (dict(loss=1.), "loss=a dict, expected a number"), ("0.5", "loss=a str, expected a number"),
    (["a"], "of type list"), ([1., 2.], "expected one number, such as loss.mean"),
    (torch.tensor(1j), "complex, expected real"), (torch.ones((), device="meta"), "on the meta device")], ids=str)
def test_what_is_no_loss_is_named_and_counts_as_none(loss, said):
    governor = Governor(nn.Linear(1, 1), chance_loss=None)
    with pytest.raises(ValueError, match=said): governor.watch(loss)
    assert governor.watched == 0

@pytest.mark.parametrize("returned, said", [((), r"returned \(\), expected a loss"), (
    dict(logits=1., total=2.), r"returned \['logits', 'total'\], expected a loss")], ids=["nothing", "no loss"])
def test_a_step_without_a_loss_says_what_it_returned(returned, said):
    governor = Governor(nn.Linear(1, 1), chance_loss=None)
    with pytest.raises(ValueError, match=said): governor.run(lambda x: returned)


@pytest.mark.parametrize("where, does", [(1, ["rollback"]), (0, ["stop"])])
def test_of_a_model_that_is_not_handed_over_what_is_trained_is_restored_and_the_rest_is_named(where, does):
    net = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 1))
    opt = torch.optim.SGD(net[1].parameters(), lr=.1)
    gov = Governor(opt, chance_loss=None, config=GovernorConfig(stop_raises=False))
    for i in range(450):
        if i == 100: net[where].weight.data.fill_(math.nan)
        gov.watch(update(opt, net(torch.randn(8, 4)).square().mean()))
    assert [r.action for r in gov.reports] == does
    assert net[1].weight.isfinite().all() # no update of a loss that is NaN has happened
    if where == 0: assert "net.0.weight has NaN in it" in gov.reports[0].why


@pytest.mark.parametrize("swings", [False, True])
def test_a_healthy_run_whose_loss_changes_or_says_nothing_logs_no_warning(swings, caplog):
    "As where two networks play against each other: a rise that is accepted, a loss that does not fall."
    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    opt = torch.optim.SGD(net.parameters(), lr=1e-3)
    gov = Governor(net, opt, chance_loss=None)
    rng = np.random.default_rng(0)
    for i in range(400):
        opt.zero_grad()
        net(torch.randn(8, 2)).square().mean().backward()
        opt.step()
        level = 1 + i / 200 if swings else (2 * math.exp(-i / 50) + 1) * (1 + (i > 250))
        gov.watch(level * math.exp(.05 * rng.standard_normal()))
    assert "yardstick" in gov.log.remarks if swings else "accepted" in [n.action for n in gov.notes]
    assert not gov.reports and not [r for r in caplog.records if r.levelname == "WARNING"]

@pytest.mark.costly
@pytest.mark.parametrize("optimizer,size,seed", [("SGD", 2.5, 2), ("Adam", 1.5, 6)])
def test_a_solved_task_whose_network_is_ruined_is_restored_although_most_losses_are_zero(optimizer, size, seed):
    "A last layer × 1000 leaves a network right about most batches, with losses of zero; the others cost hundreds."
    g = torch.Generator().manual_seed(seed)
    centers = size * torch.randn(6, 12, generator=g)
    y = torch.randint(0, 6, (3000,), generator=g)
    x = centers[y] + torch.randn(3000, 12, generator=g)
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 6))
    sgd = optimizer == "SGD"
    opt = torch.optim.SGD(net.parameters(), .05, momentum=.9) if sgd else torch.optim.Adam(net.parameters(), 2e-3)
    governor = Governor(net, opt)
    for step in range(700):
        if step == 300:
            with torch.no_grad(): net[4].weight.mul_(1000)
        i = torch.randint(0, 2000, (16,))
        governor.watch(update(opt, F.cross_entropy(net(x[i]), y[i])))
    with torch.no_grad(): after = F.cross_entropy(net(x[2000:]), y[2000:]).item()
    assert after < .1 and [r.rolled_back for r in governor.reports] == [True]
