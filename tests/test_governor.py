"The Governor: any loop, exact replays, a budget that ends, reports without NaN."
import json, math, re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn
from tiny import update

from esper_nb.core import by_lane, LaneLinear
from esper_nb.guard import GOVERNOR_PRESETS, Governor, GovernorConfig, GovernorStop, scale_lr
from esper_nb.train import LaneOptimizer, LaneScaler, Stepper

CHANCE = math.log(10)
QUICK = GovernorConfig(snapshot_every=10, probation=10, patience=0) # what is wrong is acted on at once

pytestmark = pytest.mark.usefixtures("one_thread")

def settled(steps=60, config=QUICK, net=None, **options):
    "A Governor that has seen healthy losses around 0.9."
    gov = Governor(net or nn.Linear(2, 2), chance_loss=CHANCE, config=config, **options)
    for x in .9 * np.exp(.05 * np.random.default_rng(0).standard_normal(steps)): assert gov.watch(float(x)) == ()
    return gov

def no_nan(x):
    if isinstance(x, dict): return all(map(no_nan, x.values()))
    if isinstance(x, (list, tuple)): return all(map(no_nan, x))
    return not isinstance(x, float) or math.isfinite(x)


# --- any loop

CENTERS = torch.randn(10, 16, generator=torch.Generator().manual_seed(0)) * .7

def batch(g, size=32):
    y = torch.randint(0, 10, (size,), generator=g)
    return CENTERS[y] + torch.randn(size, 16, generator=g), y

class Loop:
    "An ordinary loop with dropout, gradient accumulation, two optimizers, a scheduler and a cursor."
    def __init__(self, config=QUICK.replace(replay=True, skips=0), accumulate=2):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(.1), nn.Linear(32, 10))
        self.opts = [
            torch.optim.AdamW(self.net[0].parameters(), lr=2e-3),
            torch.optim.SGD([*self.net[1].parameters(), *self.net[4].parameters()], lr=0.05, momentum=0.9),
        ]
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opts[0], 300)
        self.data, self.accumulate = torch.Generator().manual_seed(1), accumulate
        self.cursor = dict(t=0)
        self.gov = Governor(self.net, *self.opts, self.sched, chance_loss=CHANCE, config=config, cursor=self.cursor,
                            data=self.data)
        self.losses = {}

    def run(self, steps, fault=None):
        while self.cursor["t"] < steps:
            with self.gov.step():
                t = self.cursor["t"]; self.cursor["t"] += 1
                if fault and t == fault[0]: fault[1](self); fault = None
                for o in self.opts: o.zero_grad()
                total = 0
                for _ in range(self.accumulate):
                    x, y = batch(self.data)
                    loss = F.cross_entropy(self.net(x), y) / self.accumulate
                    loss.backward(); total = total + loss.detach()
                self.gov.watch(total)
                for o in self.opts: o.step()
                self.sched.step()
                self.losses[t] = total.item()
        return self

def poison(loop): loop.net[0].weight.data[3, 3] = float("nan")
def blow_up(loop):
    for o in loop.opts:
        for s in o.state.values():
            for k, v in s.items():
                if k in ("exp_avg", "momentum_buffer"): v.mul_(-1e4)
def forget(loop):
    loop.net[4].weight.data.zero_()
    loop.net[4].bias.data.zero_()
    loop.opts[1].state.clear()
    loop.opts[1].param_groups[0]["lr"] = 1e-7
    loop.net[4].requires_grad_(False)

@pytest.mark.parametrize("fault,reason", [(poison, "non-finite"), (blow_up, "state"), (forget, "collapse")])
@pytest.mark.parametrize("at", [95, *(pytest.param(t, marks=pytest.mark.slow) for t in (100, 101, 117))])
def test_a_replayed_run_equals_one_that_never_failed(fault, reason, at):
    clean, saved = Loop().run(180), Loop().run(180, (at, fault))
    assert {r.reason for r in saved.gov.reports} == {reason}
    assert all((", limit " in str(r)) == (reason == "explosion") for r in saved.gov.reports)
    assert "replay" in {r.action for r in saved.gov.reports} and not clean.gov.reports
    assert saved.losses == clean.losses
    for a, b in zip(saved.net.state_dict().values(), clean.net.state_dict().values()): assert torch.equal(a, b)
    for a, b in zip(saved.opts, clean.opts): assert str(a.state_dict()) == str(b.state_dict())
    for k, v in clean.gov.stats.arrays.items(): assert np.array_equal(v, saved.gov.stats.arrays[k]), k

def test_going_on_past_the_batches_keeps_cursor_and_streams():
    loop = Loop(QUICK).run(180, (100, poison))
    assert sorted(loop.losses) == [*range(180)] or len(loop.losses) >= 175
    last = loop.gov.reports[-1]
    assert last.action == "rollback" and set(last.left) == {"streams", "cursor", "scheduler", "data"}
    assert all(p.isfinite().all() for p in loop.net.parameters())

def test_a_bad_batch_is_left_out_before_the_step():
    torch.manual_seed(0)
    net = nn.Linear(16, 10); opt = torch.optim.SGD(net.parameters(), lr=.1); g = torch.Generator().manual_seed(0)
    gov = Governor(net, opt, chance_loss=CHANCE, config=QUICK)
    for t in range(100):
        with gov.step():
            x, y = batch(g)
            if t == 70: x = x * 1e6
            if t == 80: x = x * float("nan")
            loss = F.cross_entropy(net(x), y)
            before = [p.clone() for p in net.parameters()]
            gov.watch(loss)
            assert t not in (70, 80)
            opt.zero_grad(); loss.backward(); opt.step()
        if t in (70, 80): assert all(torch.equal(a, b) for a, b in zip(before, net.parameters()))
    assert [(r.reason, r.action) for r in gov.reports] == [("explosion", "skip"), ("non-finite", "skip")]

@pytest.mark.parametrize("level, loss, action", [
    (.5, 1e3, "wait"), (.5, 1e9, "skip"), (-.5, 30., "wait"), (-.5, 1e9, "skip")])
def test_where_rises_are_observed_only_a_loss_out_of_all_proportion_is_skipped(level, loss, action):
    gov = Governor(nn.Linear(1, 1), chance_loss=None)
    for x in level + .01 * np.random.default_rng(0).standard_normal(150):
        with gov.step(): gov.watch(float(x))
    trained = []
    with gov.step():
        gov.watch(loss)
        trained.append(loss)
    said, = (*gov.reports, *gov.notes)
    assert said.action == action and len(trained) == (action != "skip"), str(said)

def normalized(at, watch):
    "Train a network with a BatchNorm, whose inputs are far away in some batches: its weights do not care."
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    opt = torch.optim.SGD(net.parameters(), lr=.01)
    def step(x): return update(opt, net(x).square().mean())
    gov = Governor(net, opt, chance_loss=None) if watch else None
    for k in range(240):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(k)) + 1e4 * (k in at)
        if watch == "run": gov.run(step, x)
        else:
            loss = step(x)
            if watch: gov.watch(loss)
    return net, gov

@pytest.mark.parametrize("at, watch, times", [([100], "watch", 1), (range(100, 240), "watch", 4),
                                              (range(100, 240), "run", 0)], ids=["once", "from now on", "known"])
def test_buffers_that_jump_are_restored_alone_until_that_is_their_level(caplog, at, watch, times):
    alone, (net, gov) = normalized(at, "")[0], normalized(at, watch)
    assert all(map(torch.equal, net.parameters(), alone.parameters())), "weights stay where they are"
    assert [r.restored for r in gov.reports] == [("model.1.running_mean", "model.1.running_var")] * times
    assert all("times its largest norm so far" in r.wrong and r.lost is None for r in gov.reports)
    stays = len(at) > 1
    assert (float(net[1].running_mean.abs().max()) > 1e3) == stays == ("new level of the data" in caplog.text)

def test_a_loss_without_a_bound_is_said():
    gov = Governor(nn.Linear(1, 1), chance_loss=None)
    for k in range(300): gov.watch(-1.08**k)
    assert not gov.reports and "the loss falls without end" in str(gov.summary())

def test_two_governors_are_independent():
    a, b = settled(), settled()
    a.watch(math.nan)
    assert len(a.reports) == 1 and not b.reports and b.watch(.9) == ()
    state = b.state_dict()
    a.adjust(sigma=3.); assert b.config.sigma == 6 and GOVERNOR_PRESETS["batch"].sigma == 6
    for k, v in state["stats"].items(): assert torch.equal(v, b.state_dict()["stats"][k])

@pytest.mark.parametrize("every", [1, 3, 8])
def test_gathering_losses_changes_only_the_delay(every):
    x = .9 * np.exp(.3 * np.random.default_rng(1).standard_normal(400)); x[200] = np.nan; x[300:] *= 9
    gov = Governor(
        nn.Linear(2, 2),
        chance_loss=CHANCE,
        config=QUICK.replace(sync_every=every, snapshot_every=10**6, rollbacks=100, max_rollbacks=100, lost_confirm=1),
    )
    seen = [(t, r.reason, r.count) for t, v in enumerate(x[:303]) for r in gov.watch(torch.tensor(v))]
    assert seen[0][:2] == (200 + (every - 1 - 200 % every) % every, "non-finite") and len(seen) >= 1

@pytest.mark.parametrize("preset", GOVERNOR_PRESETS)
def test_presets_round_trip(preset):
    c = GOVERNOR_PRESETS[preset]
    assert GovernorConfig.from_dict(json.loads(json.dumps(c.to_dict(), allow_nan=False))) == c
    Governor(nn.Linear(1, 1), chance_loss=1., config=preset).watch(1.)

def test_arguments(): # a message has the value, what was expected, and the fix
    for wrong in (math.nan, [.5, -.5]):
        with pytest.raises(ValueError, match="untrained network, in nats and above 0"):
            Governor(nn.Linear(1, 1), chance_loss=wrong, lanes=2 if isinstance(wrong, list) else None)
    with pytest.raises(ValueError, match="config=GovernorConfig.patience=3"):
        Governor(nn.Linear(1, 1), chance_loss=None, patience=3)
    with pytest.raises(ValueError, match="no setting 'patence', did you mean 'patience'"): GovernorConfig(patence=3)
    with pytest.raises(ValueError, match="a function that trains"):
        Governor(nn.Linear(1, 1), chance_loss=None).run(torch.tensor(.5), 0)
    alone = Governor(nn.Linear(1, 1), chance_loss=None)
    with pytest.raises(ValueError, match="did you mean 'sigma'"): alone.adjust(sigmo=3)
    lanes = Governor(nn.Linear(1, 2), chance_loss=None, lanes=2)
    with pytest.raises(ValueError, match="lanes=2, expected None"): lanes.batches([])
    with pytest.raises(ValueError, match="folder='x', expected None: lanes have"):
        Governor(nn.Linear(1, 2), chance_loss=None, lanes=2, folder="x")
    assert lanes.left_keys == set()


# --- reports

def test_reports_hold_no_nan_and_the_values_of_the_failure():
    gov = settled()
    for x in (7., 7.5, 8.): out = gov.watch(x)
    r = out[0]
    assert (r.reason, r.count, r.loss, r.step) == ("explosion", 3, 8., 63)
    assert r.limit == max(r.absolute, r.by_sigma, r.by_multiple)
    assert (r.recent == pytest.approx([0.9] * 16, rel=0.2) and [x for _, x in r.anomalies] == [7.0, 7.5, 8.0]
            and r.samples == 60 and r.seconds > 0)
    gov.adjust(lost_confirm=1)
    out = gov.watch(float("nan"))[0]
    assert out.loss is None and out.shown == "nan" and gov.stats.count[0] == 0
    asked = gov.rollback()[0]
    assert (asked.reason, asked.loss, asked.limit, asked.shown) == ("by hand", None, None, "none")
    assert str(asked).startswith("batch 63: by hand -> rollback, back at batch ")
    for r in gov.reports: assert no_nan(r.to_dict()); json.dumps(r.to_dict(), allow_nan=False); str(r)
    fresh = Governor(nn.Linear(1, 1), chance_loss=None).rollback()[0]
    assert no_nan(fresh.to_dict()) and fresh.mean is None and fresh.chance_loss is None


# --- the budget

def lr_of(gov): return gov.snapshot.parts["optimizer"].obj.param_groups[0]["lr"]

def test_without_patience_a_rise_rolls_back_and_from_the_second_time_cuts_the_rate():
    net = nn.Linear(2, 2); opt = torch.optim.SGD(net.parameters(), lr=1.)
    gov = Governor(net, opt, chance_loss=CHANCE, config=QUICK)
    rng, x, actions = np.random.default_rng(0), .9, []
    for t in range(400):
        if t > 150: x *= 1.01
        out = gov.watch(float(x * np.exp(.05 * rng.standard_normal())))
        actions += [(r.reason, r.action, r.lr_factor) for r in out]
        if len(actions) == 2: break
    assert actions == [("rise", "rollback", None), ("rise", "rollback", .5)]
    assert lr_of(gov) == gov.lr_factor == .5, "a cut outlives a rollback"

@settings(deadline=None, max_examples=20)
@given(st.lists(st.sampled_from([0.9, 0.9, 0.9, 8.0, 60.0, math.nan, math.inf, CHANCE]), min_size=1, max_size=200),
       st.integers(0, 3), st.integers(0, 3), st.integers(0, 6), st.integers(0, 30))
def test_no_chain_of_failures_is_endless(losses, skips, rollbacks, total, cooldown):
    config = QUICK.replace(skips=skips, rollbacks=rollbacks, max_rollbacks=total, cooldown=cooldown, stop_raises=False)
    gov = settled(40, config)
    for x in losses: gov.watch(x, before_step=True)
    actions = [r.action for r in gov.reports]
    assert (actions.count("rollback") <= total and actions.count("stop") <= 1
            and (actions.count("stop") == 1) == bool(gov.stopped[0]))
    if gov.stopped[0]: assert actions[-1] == "stop" and gov.watch(math.nan) == ()
    for r in gov.reports: assert no_nan(r.to_dict())

def test_a_deterministic_fault_under_replay_ends_too():
    loop = Loop(QUICK.replace(replay=True, rollbacks=3, cooldown=0, max_rollbacks=7, skips=0))
    def bug(t): return t == 60
    with pytest.raises(GovernorStop):
        while True:
            with loop.gov.step():
                t = loop.cursor["t"]; loop.cursor["t"] += 1
                loop.gov.watch(math.nan if bug(t) or t > 60 else .9)
            assert len(loop.gov.reports) < 20

def test_budget_refills_only_past_the_failure():
    gov = settled(60, QUICK.replace(cooldown=20, lost_confirm=1))
    gov.watch(math.nan)
    def used(): return gov.budget.skips[0], gov.budget.lowers[0], gov.budget.rollbacks[0], gov.budget.ever[0]
    assert used() == (0, 0, 1, 1)
    for _ in range(15): gov.watch(.9)
    assert gov.budget.rollbacks[0] == 1
    for _ in range(40): gov.watch(.9)
    assert used() == (0, 0, 0, 1)

def test_snapshots_wait_while_there_is_suspicion():
    gov = settled(69, QUICK.replace(rise=None))
    steps = gov.snapshot.steps[0]
    for _ in range(30):
        gov.watch(7.0)
        gov.stats.count[:], gov.stats.late[:] = 1, 0 # suspicious all the time, never a failure
    assert gov.snapshot.steps[0] == steps

def test_a_snapshot_of_the_first_ruined_step_is_never_published():
    for ruin in range(95, 116):
        net = nn.Linear(1, 1, bias=False); net.weight.data.fill_(1.)
        gov = Governor(net, chance_loss=CHANCE, config=QUICK)
        for t in range(300):
            if t >= ruin:
                net.weight.data.fill_(666.0)  # the loss of this step is still fine
            reports = gov.watch(.9 if t <= ruin else 9.)
            if reports: break
        assert net.weight.item() == 1. and reports[0].restored_step <= ruin

def test_state_round_trip_in_mid_failure():
    for cut in range(1, 4):
        a, b = settled(), Governor(nn.Linear(2, 2), chance_loss=CHANCE, config=QUICK)
        trail = [7., 8., 7.5, .9, .9]
        for x in trail[:cut]: a.watch(x)
        b.load_state_dict(torch.load(_saved(a.state_dict()), weights_only=True))
        for x in trail[cut:]:
            assert [(r.reason, r.action, r.count) for r in a.watch(x)] == [
                (r.reason, r.action, r.count) for r in b.watch(x)
            ]

def _saved(state):
    import io
    f = io.BytesIO(); torch.save(state, f); f.seek(0)
    return f

def test_a_state_holds_the_snapshots_and_brings_a_ruined_model_back():
    net = nn.Linear(2, 2)
    gov = settled(net=net)
    good, state = net.weight.detach().clone(), gov.state_dict()
    other = nn.Linear(2, 2)
    again = Governor(other, chance_loss=None)
    again.load_state_dict(torch.load(_saved(state), weights_only=True))
    other.weight.data.fill_(math.nan)
    report, = again.rollback()
    assert torch.equal(other.weight, good) and report.restored_step == gov.snapshot.steps[0] and report.rolled_back

def test_a_state_in_probation_goes_on_as_the_run_it_was_taken_from():
    nets = [nn.Linear(2, 2), nn.Linear(2, 2)]
    a = settled(75, net=nets[0])                                   # a snapshot is held since step 70
    b = Governor(nets[1], chance_loss=CHANCE, config=QUICK)
    b.load_state_dict(a.state_dict())
    nets[1].load_state_dict(nets[0].state_dict())
    for loss in [.9] * 12 + [math.nan] * 3: reports = [gov.watch(loss) for gov in (a, b)]
    assert [r.restored_step for r, in reports] == [70, 70]

def test_settings_change_while_it_runs():
    gov = settled(config=QUICK.replace(rise=None))
    gov.adjust(confirm=1); assert gov.watch(7.)[0].reason == "explosion"
    gov.adjust(absolute=100.); assert gov.watch(7.) == ()
    gov.adjust(window=20, refresh=1)
    for _ in range(30): gov.watch(.5)
    assert gov.stats.mean[0] == pytest.approx(.5)


# --- learning rates

def test_rates_of_single_lanes():
    net = LaneLinear(2, 2, n=3)
    opt = LaneOptimizer(net.named_parameters(), 3, "sgd", .4); stepper = Stepper({"host": opt})
    assert scale_lr(stepper, .5, [1]) and opt.lr.tolist() == [.4, .2, .4]
    assert scale_lr(opt, .5) and opt.lr.tolist() == [.2, .1, .2]
    assert not scale_lr(torch.optim.SGD(net.parameters(), lr=1.), .5, [1]) and not scale_lr(net, .5)


# --- lanes

class LaneLoop:
    def __init__(self, n=4, **changes):
        with torch.random.fork_rng():
            torch.manual_seed(3); self.net = nn.Sequential(LaneLinear(16, 24, n=n), nn.Tanh(), LaneLinear(24, 10, n=n))
        self.stepper = Stepper({"host": LaneOptimizer(self.net.named_parameters(), n, "adam", 5e-3)}, LaneScaler(n))
        self.gov = Governor(self.net, self.stepper, chance_loss=CHANCE, lanes=n, config=QUICK.replace(**changes))
        self.n, self.t = n, 0

    def step(self, hurt=lambda loop: None):
        g = torch.Generator().manual_seed(self.t); self.t += 1
        y = torch.randint(0, 10, (32, self.n), generator=g); x = CENTERS[y] + torch.randn(32, self.n, 16, generator=g)
        loss = F.cross_entropy(self.net(x.flatten(1)).unflatten(1, (self.n, 10)).transpose(1, 2), y,
                               reduction="none").mean(0)
        self.stepper.backward(loss); info = self.stepper.step()
        hurt(self)
        return self.gov.watch(loss, info.norms["host"])

def everything(loop, i):
    return [
        by_lane(t.detach() if t.ndim else t.view(1), loop.n)[i]
        for t in [*loop.net.parameters(), *loop.stepper.state_dict().values()]
    ]

def test_a_rise_of_one_lane_cuts_its_rate_first_and_is_rolled_back_next():
    net = LaneLinear(2, 2, n=2)
    opt = LaneOptimizer(net.named_parameters(), 2, "sgd", .4)
    gov = Governor(net, Stepper({"host": opt}), chance_loss=None, lanes=2)
    noise, done = .01 * np.random.default_rng(0).standard_normal((300, 2)), []
    for k, losses in enumerate(.5 + noise):
        losses[0] *= 1 + .02 * max(0, k - 150)
        done += [(r.lane, r.reason, r.action, r.lr_factor, opt.lr.tolist()) for r in gov.watch(torch.tensor(losses))]
    rates = [pytest.approx([.2, .4]), pytest.approx([.4, .4])] # a rollback also puts the rate of then in place
    assert done[:2] == [(0, "rise", "lower", .5, rates[0]), (0, done[1][1], "rollback", None, rates[1])], done

def test_other_lanes_are_bit_equal_to_an_untouched_run():
    hurt, free = LaneLoop(), LaneLoop()
    def nan(loop): by_lane(loop.net[0].weight.data, 4)[2] = math.nan
    def explode(loop): by_lane(loop.net[2].weight.data, 4)[0] *= -40
    for t in range(160):
        hurt.step({90: nan, 120: explode}.get(t, lambda loop: None)); free.step()
    assert {(r.lane, r.reason) for r in hurt.gov.reports} == {(2, "non-finite"), (0, "explosion")}
    assert not free.gov.reports
    for i in (1, 3): assert all(torch.equal(a, b) for a, b in zip(everything(hurt, i), everything(free, i)))
    assert all(p.isfinite().all() for p in hurt.net.parameters())

def test_lanes_stop_one_by_one():
    loop = LaneLoop(rollbacks=1, cooldown=10**6)
    def nan(loop): by_lane(loop.net[0].weight.data, 4)[:2] = math.nan
    for t in range(40): loop.step()
    for _ in range(6): loop.step(nan)
    assert (
        loop.gov.stopped.tolist() == [True, True, False, False]
        and [r.action for r in loop.gov.reports] == ["rollback"] * 2 + ["stop"] * 2
    )
    with pytest.raises(GovernorStop):
        for _ in range(6): loop.step(lambda lp: lp.net[0].weight.data.fill_(math.nan))
    assert loop.gov.stopped.all()

def test_a_lane_whose_state_is_bad_is_found_before_its_loss_is():
    loop = LaneLoop()
    for t in range(35): loop.step()
    opt = loop.stepper.owners["host"]
    key = next(k for k in opt.state_dict() if "exp_avg." in k or k.startswith("exp_avg"))
    by_lane(opt.state_dict()[key], 4)[3] = math.inf
    loop.gov.adjust(snapshot_every=1, probation=0)                  # the next step takes a snapshot
    loop.step()
    assert [(r.lane, r.reason) for r in loop.gov.reports] == [(3, "state")]
    assert all(t.isfinite().all() for t in opt.state_dict().values())


# --- on a GPU

@pytest.mark.cuda
def test_cuda_healthy_losses_wait_for_the_device_once_in_eight_steps():
    net = nn.Linear(4, 4).cuda(); gov = Governor(net, chance_loss=CHANCE)
    losses = torch.full((80,), .9, device="cuda")
    torch.cuda.synchronize()
    for t in range(80):
        torch.cuda.set_sync_debug_mode("error" if t % 8 != 7 else "default")
        try: assert gov.watch(losses[t]) == ()
        finally: torch.cuda.set_sync_debug_mode("default")

@pytest.mark.cuda
def test_cuda_rollback_with_two_streams_at_work():
    runs = []
    for i in range(2):
        net = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
        runs.append((torch.cuda.Stream(), net, torch.optim.SGD(net.parameters(), lr=.01, momentum=.9)))
    governors = [Governor(net, opt, chance_loss=CHANCE, config=QUICK.replace(sync_every=4)) for _, net, opt in runs]
    for s, *_ in runs: s.wait_stream(torch.cuda.current_stream())
    for t in range(80):
        for i, (s, net, opt) in enumerate(runs):
            with torch.cuda.stream(s):
                loss = F.cross_entropy(
                    net(torch.randn(64, 512, device="cuda")), torch.randint(0, 10, (64,), device="cuda")
                )
                opt.zero_grad(); loss.backward(); opt.step()
                if t == 60 and i == 0: net[0].weight.data.fill_(math.nan)
                governors[i].watch(loss)
    torch.cuda.synchronize()
    assert {r.reason for r in governors[0].reports} == {"non-finite"} and not governors[1].reports
    assert all(p.isfinite().all() for _, net, _ in runs for p in net.parameters())


@pytest.mark.cuda
def test_cuda_a_weight_that_was_overwritten_is_one_incident_although_losses_wait():
    "What waits on the device belongs to the steps that are redone: judged afterwards, it would be a second incident."
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).cuda()
    centers, kinds = torch.randn(10, 64), torch.randint(10, (90, 64))
    data = [(x.cuda(), y.cuda()) for x, y in zip(centers[kinds] + torch.randn(90, 64, 64), kinds)]
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    governor = Governor(net, opt, chance_loss=CHANCE, config=GovernorConfig(snapshot_every=20, probation=20))
    def step(batch): return update(opt, F.cross_entropy(net(batch[0]), batch[1]))
    for t, batch in enumerate(data):
        if t == 64: # the batch before was judged with seven others, and the next seven wait
            with torch.no_grad(): net[2].weight[0, 0] = math.nan
        governor.run(step, batch)
    governor.close()
    assert [(r.batch, r.cause) for r in governor.reports] == [(64, "external")]
    assert all(p.isfinite().all() for p in net.parameters())

def test_restored_step_is_the_lane_s_own():
    net = LaneLinear(2, 2, n=2)
    config = GovernorConfig(snapshot_every=4, probation=0, sync_every=1)
    governor = Governor(net, lanes=2, chance_loss=2.3, config=config)
    governor.stats.judged[1] = 100   # a lane that has begun at another time
    for _ in range(5): governor.watch(torch.tensor([1., 1.]))
    reports = [r for _ in range(3) for r in governor.watch(torch.tensor([1., math.nan]))]
    back = [r for r in reports if r.restored]
    assert back and all(r.lane == 1 and r.restored_step > 100 for r in back)


# --- one copy of the state, and copies in the background

def corrupted_run(config, corrupt=(180,), kind="huge", steps=260):
    "A loop that is ruined at some steps: its weights, what was done, and its Governor."
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    opt, g = torch.optim.AdamW(net.parameters(), lr=2e-3), torch.Generator().manual_seed(1)
    gov = Governor(net, opt, chance_loss=CHANCE, config=config)
    if gov.snapshot.background: gov.snapshot.background.least = 0
    for t in range(steps):
        x, y = batch(g)
        loss = update(opt, F.cross_entropy(net(x), y))
        if t in corrupt:
            with torch.no_grad(): net[2].weight[0, 0] = math.nan if kind == "nan" else 1e4
        gov.watch(loss)
    return torch.cat([p.detach().flatten() for p in net.parameters()]), [
        (r.batch, r.reason, r.action, r.restored_step) for r in gov.reports], gov

@pytest.mark.parametrize("kind", ["huge", "nan"])
def test_a_run_with_snapshots_in_the_background_is_the_same_run(kind):
    weights, acts, gov = corrupted_run(QUICK, kind=kind)
    other, same, late = corrupted_run(QUICK.replace(background=True), kind=kind)
    assert late.snapshot.background is not None and acts and same == acts and torch.equal(weights, other)
    assert late.snapshot.banks.taken == gov.snapshot.banks.taken

def test_a_state_found_bad_in_the_background_is_rolled_back():
    "The weight that becomes NaN is never used, so no loss shows it."
    torch.manual_seed(0)
    net, idle = nn.Linear(4, 4), nn.Linear(4, 4)
    both = nn.ModuleList([net, idle])
    opt = torch.optim.SGD(both.parameters(), lr=.1)
    gov = Governor(both, opt, chance_loss=None, config=QUICK.replace(background=True))
    gov.snapshot.background.least = 0
    for t in range(60):
        opt.step()
        if t == 33: idle.weight.data[0, 0] = math.nan
        gov.watch(1.)
    report, = gov.reports
    assert report.reason == "state" and report.bad_state == ("model.1.weight",) and idle.weight.isfinite().all()
    assert report.batch - 33 <= 2 * QUICK.snapshot_every

def test_one_copy_brings_a_run_back():
    config = QUICK.replace(copies=1, probation=0)
    weights, acts, gov = corrupted_run(config)
    assert acts and acts[0][2] == "rollback" and weights.isfinite().all()
    assert gov.snapshot.nbytes * 2 == corrupted_run(QUICK)[2].snapshot.nbytes

def test_how_snapshots_are_kept_belongs_to_the_governor_not_to_the_state():
    one, two = QUICK.replace(copies=1, probation=0), QUICK
    for a, b in ((one, two), (two, one), (two.replace(background=True), one), (one, two.replace(background=True))):
        state = corrupted_run(a, steps=150)[2].state_dict()
        gov = Governor(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10)), chance_loss=CHANCE, config=b)
        state["snapshot"] = gov.snapshot.state_dict() # its parts are others
        gov.load_state_dict(state)
        assert (gov.config.copies, gov.config.background, gov.config.probation) == (b.copies, b.background, b.probation)
        for _ in range(50): gov.watch(.9)

@pytest.mark.parametrize("wrong,says", [
    (dict(copies=3), "copies=3, expected a whole number from 1 to 2"),
    (dict(background=True, copies=1), "probation=50, expected above 0")])
def test_settings_of_snapshots_that_do_not_fit(wrong, says):
    with pytest.raises(ValueError, match=says): GovernorConfig(**wrong)

def test_corrupted_moments_are_restored_and_no_batch_is_lost():
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    gov = Governor(net, opt, chance_loss=None, config=GovernorConfig(snapshot_every=10, probation=10))
    for t in range(60):
        if t == 35: opt.state[net.weight]["exp_avg_sq"][0, 0] = math.inf
        loss = update(opt, net(torch.randn(16, 4)).square().mean() + 1)
        before = net.bias.detach().clone()
        gov.watch(loss)
        assert torch.equal(net.bias, before), "weights stay where they are"
    report, = gov.reports
    moments = tuple(f"optimizer.state{i}.{k}" for i in range(2) for k in ("exp_avg", "exp_avg_sq"))
    assert (report.reason, report.lost, report.restored) == ("state", None, moments)
    assert opt.state[net.weight]["exp_avg_sq"].isfinite().all() and gov.snapshot.steps[0] >= 40

@pytest.mark.parametrize("loops, fix", [(False, "let the step return it"), (True, "governor.watch.loss.")])
def test_a_run_without_losses_is_told_so_once(loops, fix, caplog):
    gov = Governor(net := nn.Linear(1, 1), torch.optim.SGD(net.parameters(), lr=.1), chance_loss=None)
    data = [torch.ones(4, 1)] * 40
    with caplog.at_level("WARNING", "esper_nb.governor"):
        if loops:
            for x in gov.batches(data): net(x)
        else:
            for x in data: gov.run(lambda x: None, x)
    told = [r.getMessage() for r in caplog.records if "no loss in" in r.getMessage()]
    assert len(told) == 1 and re.search(fix, told[0]), told
    assert gov.watched == 0
