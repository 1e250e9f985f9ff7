"A cause is named where it is proved; what is not is unknown. No Governor here: steps are recorded and explained."
import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from tiny import fed, take, update

from esper_nb.guard import (
    EXPERIMENTS, DryReplay, Findings, LossStats, Replay, Snapshot, StateWatch, StepRecorder, Written, describe_failure,
    find_cause, find_odd, find_operation, is_in_cycles, most_changed, redo, redo_disturbed, tables_of, tensors_of_parts)
from esper_nb.guard import Governor, GovernorConfig

CENTERS = torch.randn(10, 16, generator=torch.Generator().manual_seed(0))
EXACT = DryReplay(exact=True)
INEXACT = DryReplay(exact=False, why="your step draws from a generator that I do not have", again=(1.,))
REPORT = describe_failure(LossStats(), GovernorConfig(), None, None, 0, "rise")

def batch(k, size=32):
    g = torch.Generator().manual_seed(1000 + k)
    y = torch.randint(0, 10, (size,), generator=g)
    return CENTERS[y] + torch.randn(size, 16, generator=g), y

class Run:
    "A classifier; `inside` may change a batch and whatever else within a step, `between` anything before it."
    def __init__(self, net=None, lr=3e-3, inside=None, between=None, optimizer=torch.optim.AdamW, loss=F.cross_entropy):
        torch.manual_seed(1)
        self.net = net or nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
        self.opt = optimizer(self.net.parameters(), lr=lr)
        self.inside, self.between, self.loss = inside, between, loss
        self.k = self.taken = 0 # of the loop, and of the step: no replay knows them
        self.written = []
        self.recorder, self.snapshot = StepRecorder([self.net, self.opt]), Snapshot(self.net, self.opt)

    def step(self, xy):
        self.taken += 1
        if self.inside: xy = self.inside(self, xy) or xy
        return update(self.opt, self.loss(self.net(xy[0]), xy[1]))

    def incident(self, steps=60, before=100, given=lambda k, xy: xy, report=REPORT, **options):
        "The steps from a good state on, after some healthy ones."
        watch = StateWatch(lambda: tensors_of_parts(dict(model=self.net, optimizer=self.opt)), every=1)
        for self.k in range(-before, steps):
            if self.k == 0: self.snapshot.take()
            if self.between: self.between(self)
            if (seen := watch.start_of_step()) is not None: self.written.append(seen)
            self.recorder.run(self.step, given(self.k, batch(self.k)), self.k, **options)
            watch.end_of_step(self.k)
        return self.recorder.incident_from(0, self.snapshot, report)

def halved(run):
    if run.k == 20: run.net[0].weight.data.mul_(.1)


# --- bits before yardstick

def test_outside_is_said_only_of_what_was_seen_to_be_written():
    run = Run(between=halved)
    incident = run.incident()
    assert find_cause(incident).cause == "unknown"
    assert find_cause(incident, written=[]).cause == "unknown" # watched, but whether the step repeats is not known
    found = find_cause(incident, written=run.written)
    assert (found.cause, found.begin) == ("external", 20) and "model.0.weight" in found.why
    assert find_cause(incident, dry=INEXACT, written=run.written).cause == "external" # twenty losses were the same

def test_a_write_is_proof_before_the_first_loss_only_if_steps_are_known_to_repeat():
    run = Run(between=lambda run: run.net[0].weight.data.mul_(.1) if run.k == 0 else None)
    incident = run.incident()
    assert find_cause(incident, written=run.written).cause == "unknown"
    assert find_cause(incident, dry=EXACT, written=run.written).cause == "external"

def test_writes_without_effect_are_not_blamed():
    "Averaged weights that are updated between all steps have nothing to do with a loss that parts at batch 20."
    run = Run(inside=lambda run, xy: (xy[0] * 30, xy[1]) if run.taken == 121 else None)
    incident = run.incident()
    every = [Written(("average.weight",), k, "versions") for k in range(60)]
    assert find_cause(incident, written=every).cause == "unknown"
    assert find_cause(incident, written=[*every[:19], Written(("model.0.weight",), 19, "bits")]).cause == "external"

@pytest.mark.parametrize("factor, cause", [(300., "external"), (1.001, None)])
def test_a_write_is_the_cause_of_nearly_all_of_a_rise_although_the_data_get_harder_too(factor, cause):
    "Else batches were blamed without which the harder data are easier: of a critic whose targets grow, a third."
    def harder(k, xy): return (xy[0], (xy[1] + (torch.arange(len(xy[1])) % 3 == 0).long()) % 10) if k >= 25 else xy
    run = Run(between=lambda run: run.net[0].weight.data.mul_(factor) if run.k == 20 else None)
    found = find_cause(run.incident(given=harder), dry=EXACT, written=run.written)
    assert ("is spared nearly all of it" in found.why) == (found.cause == cause) == (cause == "external"), str(found)

@pytest.mark.parametrize("inside", [
    lambda run, xy: (xy[0] * 300, xy[1].flip(0)) if run.taken == 121 else None, # the step's own augmentation, once
    lambda run, xy: (-xy[0], xy[1]) if run.k >= 20 and run.taken == run.k + 101 else None, # a counter of the loop
    lambda run, xy: (xy[0] + run.noise.uniform(), xy[1])], # an own generator
    ids=["rare", "counter", "generator"])
def test_what_a_step_reads_beside_its_batch_is_not_taken_for_hardware(inside):
    run = Run(inside=inside)
    run.noise = np.random.default_rng(0)
    incident = run.incident()
    for dry in (None, INEXACT):
        for written in (None, run.written):
            found = find_cause(incident, dry=dry, written=written)
            assert found.cause == "unknown", str(found)
    assert found.why == INEXACT.why
    assert redo_disturbed(incident) is None and redo_disturbed(incident, dry=INEXACT, written=[]) is None

def test_hardware_is_what_is_left_when_steps_repeat_and_nothing_was_written():
    once = Run(inside=lambda run, xy: (xy[0] * 300, xy[1].flip(0)) if run.taken == 121 else None).incident()
    found = find_cause(once, dry=EXACT, written=[])
    assert (found.cause, found.begin) == ("external", 20) and "hardware" in found.why
    assert find_cause(once, dry=EXACT).cause == "unknown"
    run = Run(inside=lambda run, xy: (xy[0] + run.noise.uniform(), xy[1]))
    run.noise = np.random.default_rng(0)
    assert "two replays differ" in find_cause(run.incident(), dry=EXACT, written=[]).why

def test_a_replay_that_is_off_from_the_first_step_proves_nothing_of_the_run():
    "Hardware was blamed for targets that the loop had scaled for good, in an object that nobody looks into."
    run = Run(inside=lambda run, xy: (xy[0] * run.scale, xy[1]))
    run.scale = 1.
    incident = run.incident()
    run.scale = 1e4
    found = find_cause(incident, dry=EXACT, written=[])
    assert found.cause == "unknown" and "reads something that is other now than it was" in found.why
    assert redo_disturbed(incident, dry=EXACT, written=[]) is None

def test_a_setting_that_the_step_sets_by_a_counter_is_named():
    def inside(run, xy): run.opt.param_groups[0]["weight_decay"] = 100. if 20 <= run.k < 40 else 0.
    found = find_cause(Run(inside=inside).incident(steps=45))
    assert found.cause == "settings" and "weight_decay was 100 at batches 20–39" in found.why

def test_a_disturbed_run_is_redone_on_proof_only():
    run = Run(between=halved)
    incident = run.incident(steps=30)
    live = run.net[0].weight.clone()
    assert redo_disturbed(incident) is None and torch.equal(run.net[0].weight, live)
    found = redo_disturbed(incident, written=run.written)
    assert (found.cause, found.begin) == ("external", 20)
    clean = Run()
    clean.incident(steps=30)
    assert torch.equal(run.net[0].weight, clean.net[0].weight)

@pytest.mark.parametrize("way", ["filled again", "written into by its step"])
def test_batches_that_are_changed_in_place_are_replayed_as_they_were(way):
    buffer = np.zeros((32, 16), np.float32)
    def given(k, xy):
        buffer[...] = xy[0].numpy()
        return buffer, xy[1]
    run = Run(between=halved)
    own = run.step
    def from_buffer(xy): return own((torch.from_numpy(xy[0].copy()), xy[1]))
    def in_place(xy): return own((xy[0].mul_(.5).add_(xy[0].flip(0)), xy[1]))
    run.step = from_buffer if way == "filled again" else in_place
    incident = run.incident(given=given) if way == "filled again" else run.incident()
    found = find_cause(incident, written=run.written)
    assert (found.cause, found.begin) == ("external", 20), found.why

def test_an_overwritten_batch_without_a_copy_is_said_and_not_replayed():
    run = Run()
    incident = run.incident()
    incident.steps[5].batch[0].add_(1)
    found = find_cause(incident)
    assert found.cause == "unknown" and "changed in place" in found.why and found.steps == 0


# --- numbers that are not finite

def pairs(k, xy):
    x = xy[0].clone()
    if k == 30: x[16] = x[0] # a distance of 0
    return x, None

def pair_loss(z, _):
    distances = (z[:16] - z[16:]).square().sum(1)
    return (distances.sqrt() - 1).square().mean() # the line

LINE = next(i for i, line in enumerate(open(__file__, encoding="utf-8"), 1) if line.endswith("# the line\n"))

def test_a_gradient_that_is_not_finite_names_batch_operation_and_line():
    found = find_cause(Run(loss=pair_loss).incident(given=pairs, steps=40))
    assert (found.cause, found.batches) == ("data", (30,))
    assert "the gradient is not finite there, although the loss is" in found.why
    assert found.operation == f"SqrtBackward0 at test_proofs.py:{LINE}" and found.why.endswith(found.operation)

def test_a_state_that_is_not_finite_is_the_measure_where_it_was_the_alarm():
    report = describe_failure(LossStats(), GovernorConfig(), None, None, 0, "state")
    def given(k, xy):
        x = xy[0].clone()
        if k in (20, 30): x[3] = 1e20
        return x, xy[1]
    net = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    run = Run(net)
    incident = run.incident(given=given, report=report)
    assert not run.net[0].running_var.isfinite().all() and math.isfinite(incident.steps[-1].loss)
    found = find_cause(incident)
    assert (found.cause, found.batches) == ("data", (20, 30))
    assert "model.0.running_var" in found.why and found.operation.startswith("batch_norm at test_proofs.py:")
    losses = redo(incident, found)
    assert [k for k, x in enumerate(losses) if math.isnan(x)] == [20, 30]
    assert run.net[0].running_var.isfinite().all() and run.snapshot.find_bad() == ()

def test_a_state_that_somebody_else_judges_is_judged_by_them():
    report = describe_failure(LossStats(), GovernorConfig(), None, None, 0, "state")
    net = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    incident = Run(net).incident(given=lambda k, xy: (xy[0] * (100 if k == 20 else 1), xy[1]), report=report)
    def is_bad(): return ("model.0.running_var",) if float(net[0].running_var.max()) > 20 else ()
    found = find_cause(incident, is_bad=is_bad)
    assert (found.cause, found.batches) == ("data", (20,)), str(found)
    assert find_cause(incident, is_bad=lambda: ()).cause == "unknown"

@pytest.mark.parametrize("seen,dry,cause", [(True, EXACT, "external"), (False, EXACT, "external"),
                                            (False, None, "unknown")])
def test_a_state_that_the_steps_did_not_ruin_is_not_blamed_on_them_although_their_loss_rises(seen, dry, cause):
    "The loss gets worse by itself, as that of an adversary does, and smaller steps would help: that is another matter."
    report = describe_failure(LossStats(), GovernorConfig(), None, None, 0, "state")
    report = dataclasses.replace(report, bad_state=("model.0.weight",))
    def harder(k, xy): return xy[0], (xy[1] + (k > 30)) % 10
    incident = Run(lr=.03).incident(given=harder, report=report) # after which somebody writes NaN
    written = [Written(("model.0.weight",), incident.steps[-1].number, "versions")] if seen else []
    found = find_cause(incident, written=written, dry=dry)
    assert found.cause == cause and ("hardware" in found.why) == (not seen and cause == "external")

def test_redone_steps_are_not_kept_with_a_bad_state():
    run = Run()
    incident = run.incident(report=None)
    live = run.net[0].weight.clone()
    healthy = SimpleNamespace(cause="healthy", also=(), batches=(), counts=())
    assert redo(incident, healthy, is_bad=lambda: ("model.0.weight",)) is None
    assert torch.equal(run.net[0].weight, live) and redo(incident, healthy) is not None

def test_nan_is_odd():
    usual = [.5, .6, .55, .5, .52]
    assert find_odd({1: .5, 2: math.nan, 3: math.inf, 4: .6}, usual) == {2, 3}
    steps = [SimpleNamespace(number=k, before=(((("lr", x)),),), lr_factor=1., share=1.)
             for k, x in enumerate([.1, .1, math.nan])]
    assert most_changed(Findings(steps, [0.] * 3, 3), "lr")[0] == 2

def test_an_operation_is_found_forward_and_backward():
    x = torch.zeros(3, requires_grad=True)
    def line(f): return f"test_proofs.py:{f.__code__.co_firstlineno}"
    for name, f in {"log": lambda: x.log().sum(), "SqrtBackward0": lambda: x.sqrt().sum().backward(),
                    "div": lambda: (x / x).sum()}.items():
        said = find_operation(f)
        if name == "log": assert said == "" # infinite, but nothing has come of it
        else: assert said == f"{'__truediv__' if name == 'div' else name} at {line(f)}" or said.startswith(name), said
    assert find_operation(lambda: (x.log() * x).sum()).startswith("log ")
    assert find_operation(lambda: (x + 1).sqrt().sum().backward()) == ""

def test_a_line_of_a_notebook_is_one_of_its_cell():
    text, names = "import torch\ndef f():\n    return torch.zeros(2) / torch.zeros(2)\n", {}
    exec(compile(text, "/tmp/ipykernel_7/99.py", "exec"), names)
    assert find_operation(names["f"]).endswith("at cell line 3")


# --- what cures

def turned(k, xy): return (xy[0], (xy[1] + 1) % 10) if 20 <= k < 50 else xy

def test_two_things_at_once_are_both_named():
    def between(run):
        if run.k == 20: run.opt.param_groups[0]["lr"] *= 60
    found = find_cause(Run(between=between).incident(given=turned))
    assert found.cause == "data" and found.also == ("rate",), str(found)
    assert found.batches == tuple(range(20, 50)) and "two things at once" in found.why

@pytest.mark.parametrize("times", [60, 400])
def test_a_rate_that_is_far_too_high_is_said_to_be(times):
    "Raised before the good state, so that the rate of the good state is too high, too."
    run = Run(lr=3e-3)
    def between(run):
        if run.k == 0: run.opt.param_groups[0]["lr"] = 3e-3 * times
    run.between = between
    found = find_cause(run.incident(steps=50))
    assert found.cause == "lr_too_high", str(found)
    if times == 400: assert "a sixteenth" in found.why or "a sixty-fourth" in found.why

def test_what_a_governor_does_to_the_rate_is_no_cause():
    "A Governor that gives its cut back raises the rate fourfold; that is not the run's doing."
    run = Run(lr=3e-3)
    steps = []
    for k in range(8):
        run.opt.param_groups[0]["lr"] = 3e-3 if k >= 4 else 3e-3 / 4
        run.recorder.run(run.step, batch(k), k, lr_factor=1. if k >= 4 else .25)
        steps = list(run.recorder.steps)
    told = Findings(steps, [0.] * 8, 8)
    assert most_changed(told, "lr") is None
    for s in steps: s.lr_factor = 1.
    assert most_changed(told, "lr") is not None

def test_the_rate_of_the_good_state_is_held_but_for_what_a_governor_makes_of_it():
    run, used = Run(lr=1e-3), []
    run.snapshot.take()
    for k in range(6):
        run.opt.param_groups[0]["lr"] = (4e-3 if k >= 2 else 1e-3) / (4 if k >= 4 else 1)
        run.recorder.run(run.step, batch(k), k, lr_factor=.25 if k >= 4 else 1.)
    run.opt.register_step_pre_hook(lambda o, *_: used.append(o.param_groups[0]["lr"]))
    with Replay(run.recorder.incident_from(0, run.snapshot)) as replay:
        replay.begin()
        EXPERIMENTS["the learning rate of the good state"].change(replay, Findings(replay.steps, replay.losses, 6))
        used.clear()
        replay.changes.before_update.append(lambda o: used.append(o.param_groups[0]["lr"]))
        replay.run()
    assert used[1::2] == pytest.approx([1e-3] * 4 + [.25e-3] * 2)

def test_a_warm_up_is_replayed_to_the_bit():
    run = Run()
    for k in range(10): run.recorder.run(run.step, batch(k), k)
    run.snapshot.take()
    run.recorder.rewarm(6)
    for k in range(10, 30): run.recorder.run(run.step, batch(k), k)
    incident = run.recorder.incident_from(10, run.snapshot)
    assert [s.share for s in incident.steps[:7]] == pytest.approx([k / 7 for k in range(1, 8)])
    with Replay(incident) as replay:
        replay.begin()
        assert replay.run() == replay.losses

def sorted_batch(k, xy):
    y = torch.full((32,), k // 4 % 10) if k >= 10 else xy[1]
    return (CENTERS[y] + torch.randn(32, 16, generator=torch.Generator().manual_seed(k)), y) if k >= 10 else xy

def test_order_is_asked_last_of_all_and_of_sorted_batches_only():
    assert list(EXPERIMENTS)[-1] == "examples in another order" and EXPERIMENTS["examples in another order"].confirm
    with Replay(Run().incident()) as replay:
        assert not EXPERIMENTS["examples in another order"].fits(replay, None)
    with Replay(Run().incident(given=sorted_batch)) as replay:
        assert EXPERIMENTS["examples in another order"].fits(replay, None)

def test_exhausted_experiments_are_no_proof():
    found = find_cause(Run().incident(steps=20), is_bad=lambda: ("model.0.weight",))
    assert found.replayed == found.recorded and found.cause == "unknown", str(found)
    assert "no change of data" in found.why and not any(e.cured for e in found.evidence)

def burst(k, xy): return (xy[0] * 50, xy[1]) if 20 <= k < 32 else xy

def test_a_burst_that_the_loss_has_forgotten_is_said_and_what_it_has_cost():
    found = find_cause(Run(lr=1e-3).incident(given=burst, report=None, steps=90, before=200))
    assert found.cause == "data" and len(set(found.batches) & set(range(20, 32))) >= 10, str(found)
    assert set(found.batches) <= set(range(20, 32)) and "without them the weights would be better" in found.why
    healthy = find_cause(Run(lr=1e-3).incident(report=None, steps=90, before=200))
    assert healthy.cause == "healthy" and len(healthy.evidence) == 1


def test_a_number_lost_while_the_task_changes_is_not_blamed_on_the_task():
    "Other classes from batch 150 on, and at batch 170 something outside writes NaN past torch: that, and only that."
    def train(lost):
        torch.manual_seed(0)
        g = torch.Generator().manual_seed(1)
        middle = 1.5 * torch.randn(6, 8, generator=g)
        net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 6))
        opt = torch.optim.Adam(net.parameters(), 5e-3)
        governor = Governor(net, opt, chance_loss=None)
        def step(batch): return update(opt, F.cross_entropy(net(batch[0]), batch[1]))
        for k in range(300):
            y = torch.randint(0, 2 if k < 150 else 6, (32,), generator=g)
            if k == 170 and lost: net[0].weight.data.view(-1)[3] = math.nan
            governor.run(step, (middle[y] + torch.randn(32, 8, generator=g), y))
        return net, governor
    (clean, calm), (net, governor) = train(lost=False), train(lost=True)
    assert not calm.reports and [(r.reason, r.cause) for r in governor.reports] == [("non-finite", "external")]
    assert all(torch.equal(a, b) for a, b in zip(clean.parameters(), net.parameters()))


@pytest.mark.parametrize("through", ["torch", "past torch", "unseen"])
def test_a_step_that_fails_on_a_ruined_state_is_answered(through, caplog):
    "A policy of NaN makes torch's distributions raise before there is a loss."
    def train(lost):
        torch.manual_seed(0)
        width = 512 if through == "unseen" else 16 # too large to be looked at after every step
        net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 3))
        opt = torch.optim.Adam(net.parameters(), 3e-3)
        governor = Governor(net, opt, chance_loss=None)
        g = torch.Generator().manual_seed(1)
        def step(x):
            policy = torch.distributions.Categorical(logits=net(x), validate_args=True) # a compiler ends the default
            action = policy.sample()
            return update(opt, -(policy.log_prob(action) * (action == (x[:, 0] > 0).long()).float()).mean())
        returned = []
        for k in range(160):
            if k == 110 and lost:
                if through == "torch":
                    with torch.no_grad(): net[3].weight[1].fill_(math.nan)
                else: net[3].weight.data.view(-1)[5] = math.nan
            returned.append(governor.run(step, torch.randn(32, 4, generator=g)))
        return net, governor, returned
    (_, calm, _), (net, governor, returned) = train(lost=False), train(lost=True)
    assert not calm.reports and [r.reason for r in governor.reports] == ["state"]
    assert [k for k, loss in enumerate(returned) if loss is None] == [110]
    assert "the step has failed, and the state is not finite: ValueError" in caplog.text
    assert all(p.isfinite().all() for p in net.parameters())
    assert governor.reports[0].cause == "external" and governor.reports[0].redone
    assert ("no other write was seen" in governor.reports[0].why) == (through == "unseen")


def test_a_state_that_is_bad_in_the_run_and_in_no_replay_was_written_from_outside():
    "No loss depends on running statistics, and nobody looks at those of a large network after every step."
    net = nn.Sequential(nn.Linear(16, 2048), nn.BatchNorm1d(2048), nn.ReLU(), nn.Linear(2048, 10))
    opt = torch.optim.SGD(net.parameters(), .01)
    governor = Governor(net, opt, chance_loss=None)
    def step(xy): return update(opt, F.cross_entropy(net(xy[0]), xy[1]))
    for k in range(200):
        governor.run(step, batch(k))
        if k == 120: net[1].running_mean.data[7] = math.nan
    report, = governor.reports
    assert report.reason == "state" and report.cause == "external" and report.redone and not report.lost
    assert "a replay has the losses of the run to the bit" in report.why


def test_a_step_that_fails_on_a_sound_state_fails():
    net = nn.Linear(2, 1)
    governor = Governor(net, chance_loss=None)
    def step(x):
        if x is None: raise KeyError("no such batch")
        return net(x).mean()
    for _ in range(5): governor.run(step, torch.ones(3, 2))
    with pytest.raises(KeyError, match="no such batch"): governor.run(step, None)
    assert governor.watched == 5 and not governor.reports
    governor.run(step, torch.ones(3, 2))

def policy_run(spoiled, steps=160):
    "A policy whose distribution refuses NaN; `spoiled` says what is done to a batch."
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    opt = torch.optim.Adam(net.parameters(), 3e-3)
    governor = Governor(net, opt, chance_loss=None)
    draws, g = dict(steps=0), torch.Generator().manual_seed(1)
    def step(x):
        draws["steps"] += 1
        policy = torch.distributions.Categorical(logits=net(x), validate_args=True)
        action = policy.sample()
        return update(opt, -(policy.log_prob(action) * (action == (x[:, 0] > 0).long()).float()).mean())
    for k in range(steps): governor.run(step, spoiled(k, torch.randn(32, 4, generator=g)))
    return net, governor, draws

@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_batch_with_nan_on_which_the_step_fails_is_left_out(value, caplog):
    "The exception ended the run, although the same batch is let pass where the step does not look at it."
    def spoiled(k, x):
        if k in (110, 112): x[3] = value
        return x
    net, governor, draws = policy_run(spoiled)
    assert [r.action for r in governor.notes] == ["harmless", "harmless"] and not governor.reports
    assert caplog.text.count("the step has failed, and its batch is not finite: ValueError") == 2
    assert governor.watched == 160 and governor.repairs.dry.exact and draws["steps"] >= 160
    assert governor.explain().cause == "healthy" and all(p.isfinite().all() for p in net.parameters())

def test_an_incident_behind_a_batch_on_which_the_step_has_failed_is_replayed_by_it():
    def spoiled(k, x):
        if k == 110: x[3, 1] = math.nan
        if k == 120: run[0][2].weight.data.fill_(math.nan)
        return x
    run = []
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    run.append(net)
    opt = torch.optim.Adam(net.parameters(), 3e-3)
    governor = Governor(net, opt, chance_loss=None)
    def step(x):
        policy = torch.distributions.Categorical(logits=net(x), validate_args=True)
        return update(opt, -policy.log_prob((x[:, 0] > 0).long()).mean())
    for k in range(160): governor.run(step, spoiled(k, torch.randn(32, 4)))
    report, = governor.reports
    assert (report.cause, report.restored_batch, report.redone) == ("external", 50, 70) # 50 to 120, but not 110

@pytest.mark.parametrize("habit", [True, False], ids=["NaN in every batch", "none"])
def test_a_mistake_of_the_step_is_raised_whatever_its_batches_hold(habit):
    "Missing values are a habit of these data; what fails then is the code."
    net = nn.Linear(3, 1)
    opt = torch.optim.SGD(net.parameters(), .01)
    governor = Governor(net, opt, chance_loss=None)
    def step(x):
        if len(x) != 8: raise ValueError("expected 8 rows")
        return update(opt, net(x.nan_to_num()).square().mean())
    def batch(rows): return torch.full((rows, 3), math.nan if habit else 1.)
    for _ in range(20): governor.run(step, batch(8))
    with pytest.raises(ValueError, match="expected 8 rows"): governor.run(step, batch(5))
    governor.run(step, batch(8))
    assert governor.watched == 21 and not governor.reports

# --- what a loop does between its steps

def looped(between, steps=300, rate=.05):
    "A classifier by `run`, whose loop does something of its own after every step; and the same run alone."
    def one(guarded):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
        opt = torch.optim.SGD(net.parameters(), lr=rate, momentum=.9)
        governor = Governor(net, opt, chance_loss=math.log(10))
        def step(xy): return update(opt, F.cross_entropy(net(xy[0]), xy[1]))
        for k in range(steps):
            governor.run(step, batch(k)) if guarded else step(batch(k))
            between(net, opt, k)
        return [t.clone() for t in net.state_dict().values()], governor
    return *one(True), one(False)[0]

def pruned(net, opt, k):
    "By torch's own tool, more and more: modules get other tensors, and hooks."
    if k % 50 == 49:
        for m in (net[0], net[2]): prune.l1_unstructured(m, "weight", amount=.45)

@torch.no_grad()
def masked(net, opt, k):
    "By hand, after every step: ever more of the weights are zero."
    for p in (net[0].weight, net[2].weight):
        p.mul_(p.abs() >= p.abs().flatten().kthvalue(1 + int(p.numel() * max(0., k - 40) / 290)).values)

def frozen(net, opt, k):
    "A layer is frozen and thawed."
    if k % 70 == 69: net[0].requires_grad_(k % 140 > 100)

@pytest.mark.parametrize("between", [pruned, masked, frozen])
def test_what_the_loop_does_between_all_its_steps_is_no_disturbance(between):
    guarded, governor, alone = looped(between)
    assert not governor.reports and all(map(torch.equal, guarded, alone))
    assert governor.explain().cause in ("healthy", "unknown")

def test_a_replay_follows_the_modes_that_the_loop_switches():
    def between(net, opt, k):
        if k == 270: net[0].requires_grad_(False)
    _, governor, _ = looped(between)
    found = governor.explain()
    assert found.recorded == found.replayed and len(found.recorded) > 30

def test_writes_all_the_time_are_said_and_are_no_proof():
    _, governor, _ = looped(masked)
    assert not governor.repairs.reliable
    assert "something writes into model.0.weight" in governor.explain().why

def test_tensors_that_are_exchanged_in_a_module_are_seen_unless_they_are_equal():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    watch = StateWatch(lambda: tensors_of_parts(dict(model=net)), lambda: tables_of(dict(model=net)))
    watch.end_of_step(0)
    net[1].running_mean = net[1].running_mean.clone()
    assert watch.start_of_step() is None
    watch.end_of_step(1)
    net[1].running_mean = net[1].running_mean + 1
    found = watch.start_of_step()
    assert (found.names, found.how) == (("model.1.running_mean",), "exchanged")

def test_what_a_replay_does_is_no_sign_of_the_run():
    "A step that clips its weights writes between two updates; seen only in a replay, that would speak against the run."
    torch.manual_seed(0)
    net = nn.Linear(16, 10)
    opt = torch.optim.SGD(net.parameters(), lr=.1)
    governor = Governor(net, opt, chance_loss=math.log(10))
    def step(xy):
        loss = update(opt, F.cross_entropy(net(xy[0]), xy[1]))
        net.weight.data.clamp_(-.1, .1)
        return loss
    for k in range(60): governor.run(step, batch(k))
    governor.explain(all_of_them=True)
    for k in range(60, 64): governor.run(step, batch(k))
    assert governor.judge.updates.signs.since(0) == []

@pytest.mark.parametrize("rate, blamed", [
    (lambda k: 1.2 - 1.19 * abs(k % 50 - 25) / 25, False), # a cycle: so high again and again, while all was well
    (lambda k: 100. if k >= 120 else 1.2 - 1.19 * abs(k % 50 - 25) / 25, True), # a fault in one
    (lambda k: .01 + 1.19 * math.exp(-max(0, k - 10) / 30) * min(1, k / 10) if k < 120 else 1.2, True), # resumed high
    (lambda k: .01 if k < 120 else 1.2, True)], ids=["cycle", "fault", "peak", "jump"])
def test_a_rate_that_was_as_high_before_again_and_again_is_not_to_blame(rate, blamed):
    net = nn.Linear(1, 1)
    opt = torch.optim.SGD(net.parameters(), lr=.01)
    recorder, snapshot = StepRecorder([net, opt]), Snapshot(net, opt)
    snapshot.take()
    for k in range(150):
        opt.param_groups[0]["lr"] = rate(k)
        recorder.run(lambda x: .5, torch.ones(1), k)
    replay = Replay(recorder.incident_from(100, snapshot))
    assert is_in_cycles(replay) is not blamed
    fit = {e.cause for e in EXPERIMENTS.values() if e.fits(replay, Findings(replay.steps, replay.losses, 0))}
    assert ("rate" in fit, "lr_too_high" in fit) == (blamed, blamed)


@pytest.mark.parametrize("way", ["run", "batches"])
def test_a_layer_before_a_norm_is_put_back_although_no_loss_shows_its_scale(way):
    "Its losses are but for rounding those of the run without the write; the running statistics are what it ruins."
    def train(write):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
        opt = torch.optim.SGD(net.parameters(), .05)
        governor = Governor(net, opt)
        def data():
            for t, x in enumerate(torch.randn(160, 32, 8)):
                if t == 120 and write: net[0].weight.data.mul_(1000)
                yield x
        def step(x): return update(opt, (net(x) - x[:, :1].sin()).square().mean())
        for x in fed(governor, data(), way): take(governor, step, x, way)
        return net.state_dict(), governor.reports
    (after, reports), (clean, none) = train(True), train(False)
    assert [(r.reason, r.cause) for r in reports] == [("state", "external")] and not none
    assert "model.0.weight changed between batch 119 and batch 120" in reports[0].why
    assert all(torch.equal(after[k], clean[k]) for k in clean)


@pytest.mark.parametrize("rises,tried_first", [
    (lambda k: 300. if k >= 60 else 1., "the learning rate from before it leapt"),
    (lambda k: 1.15**max(k - 60, 0), "in float32")], ids=["at once", "slowly"])
def test_a_rate_that_leapt_is_tried_before_what_was_always_so(rises, tried_first):
    "Under autocast float32 may bear a rate that no one meant; where nothing leapt, the few bits are asked first."
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    opt = torch.optim.Adam(net.parameters(), 2e-3)
    governor = Governor(net, opt, chance_loss=None)
    def step(x):
        with torch.autocast("cpu", torch.bfloat16): loss = F.mse_loss(net(x), x)
        opt.zero_grad(), loss.backward(), opt.step()
        return loss
    for k in range(130):
        opt.param_groups[0]["lr"] = 2e-3 * rises(k)
        governor.run(step, torch.randn(32, 16))
        if governor.reports: break
    told = governor.explain()
    assert [e.experiment for e in told.evidence][:2] == ["nothing", tried_first]
    if tried_first != "in float32": assert told.cause == "rate"


def test_a_rate_that_leapt_is_proved_where_holding_it_spares_the_run_nearly_all_of_the_harm():
    "A drift of the step's own begins at the same time: what is left of the harm is small, and far above the noise."
    torch.manual_seed(0)
    net = nn.Linear(8, 1)
    nn.init.ones_(net.weight)
    opt = torch.optim.SGD(net.parameters(), .02)
    governor = Governor(net, opt, chance_loss=None)
    def step(given):
        x, y, drift = given
        loss = F.mse_loss(net(x), y)
        opt.zero_grad(), loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.)
        opt.step()
        net.weight.data.add_(drift)
        return loss
    for k, x in enumerate(torch.randn(200, 32, 8)):
        opt.param_groups[0]["lr"] = 6. if k >= 110 else .02
        governor.run(step, (x, x.sum(1, keepdim=True) + .1 * torch.randn(32, 1), .003 * (k >= 110)))
        if governor.reports: break
    assert [r.cause for r in governor.reports] == ["rate"], [*map(str, governor.reports)]



def test_a_rate_that_nobody_knows_was_not_tried():
    "The weights of a loop whose optimizer is no part: no experiment has changed its rate."
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    recorder, snapshot = StepRecorder([net]), Snapshot(net)
    def step(x):
        loss = net(x).square().mean()
        net.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in net.parameters(): p -= 5 * p.grad
        return loss
    snapshot.take()
    for k in range(40): recorder.run(step, torch.randn(16, 4, generator=torch.Generator().manual_seed(k)), k)
    found = find_cause(recorder.incident_from(0, snapshot, REPORT), is_bad=lambda: ())
    assert found.cause == "unknown" and "no optimizer" in found.why and "gradients" not in found.why, str(found)


# --- losses that are zero but for a few

def clouds(n, noise=1.):
    "Five clouds of points."
    centres = 1.2 * torch.randn(5, 16, generator=torch.Generator().manual_seed(99))
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 5, (n,), generator=g)
    return centres[y] + noise * torch.randn(n, 16, generator=g), y

@pytest.mark.parametrize("seed", [0, 1]) # the first of these losses is no explosion, or is one
def test_a_rate_after_which_most_losses_are_zero_and_a_few_enormous_is_proved(seed):
    "The median over eight batches said that nothing was wrong, and weights stayed that are sure of what is false."
    torch.manual_seed(seed)
    x, y = clouds(2048)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 5))
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    governor = Governor(net, opt)
    def step(at): return update(opt, F.cross_entropy(net(x[at]), y[at]))
    for i in range(320):
        if i == 192: opt.param_groups[0]["lr"] *= 300
        governor.run(step, torch.randint(0, 2048, (32,)))
    report, = governor.reports
    assert report.cause == "rate" and F.cross_entropy(net(x), y) < .1

def test_only_the_batch_that_ruins_a_buffer_is_blamed_for_it():
    "Where losses are near zero, those of some other batches are far above the rest: they were called odd, too."
    torch.manual_seed(0)
    x, y = clouds(2048)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 5))
    opt = torch.optim.AdamW(net.parameters(), 5e-3)
    governor = Governor(net, opt)
    def step(batch): return update(opt, F.cross_entropy(net(batch[0]), batch[1]))
    for i in range(260):
        at = torch.randint(0, 2048, (32,))
        governor.run(step, (x[at] * (1e4 if i == 230 else 1.), y[at]))
    report, = governor.reports
    assert (report.reason, report.cause) == ("state", "data") and governor.repairs.found.batches == (230,)
