"After a rollback data, counters and schedules go on; cuts of the learning rate last under every scheduler of torch."
import copy, io, logging, math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as S

from esper_nb.guard import Governor, GovernorConfig, scale_lr

pytestmark = pytest.mark.usefixtures("one_thread")
AT_ONCE = GovernorConfig(snapshot_every=10, probation=10, patience=0)

SCHEDULERS = dict(
    LambdaLR=lambda o: S.LambdaLR(o, lambda t: .95**t),
    MultiplicativeLR=lambda o: S.MultiplicativeLR(o, lambda t: .97),
    StepLR=lambda o: S.StepLR(o, 7),
    MultiStepLR=lambda o: S.MultiStepLR(o, [10, 30]),
    ConstantLR=lambda o: S.ConstantLR(o, .5, 20),
    LinearLR=lambda o: S.LinearLR(o, .1, 1., 40),
    ExponentialLR=lambda o: S.ExponentialLR(o, .97),
    PolynomialLR=lambda o: S.PolynomialLR(o, 80, 2.),
    CosineAnnealingLR=lambda o: S.CosineAnnealingLR(o, 60, eta_min=.01),
    CosineAnnealingWarmRestarts=lambda o: S.CosineAnnealingWarmRestarts(o, 15, eta_min=.01),
    CyclicLR=lambda o: S.CyclicLR(o, .1, 1., step_size_up=8),
    OneCycleLR=lambda o: S.OneCycleLR(o, 1., total_steps=61),
    ReduceLROnPlateau=lambda o: S.ReduceLROnPlateau(o, patience=5, min_lr=1e-4),
    SequentialLR=lambda o: S.SequentialLR(o, [S.LinearLR(o, .1, 1., 10), S.CosineAnnealingLR(o, 50)], [10]),
    ChainedScheduler=lambda o: S.ChainedScheduler([S.LinearLR(o, .1, 1., 10), S.ExponentialLR(o, .97)]),
    SWALR=lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=.05, anneal_epochs=30))

def test_every_scheduler_of_torch_is_here():
    known = {k for k, v in vars(S).items() if isinstance(v, type) and issubclass(v, S.LRScheduler)}
    assert known - {"LRScheduler", "_LRScheduler"} <= {*SCHEDULERS, "_enable_get_lr_call"}

def advance(scheduler, t):
    scheduler.step(*([1.] if isinstance(scheduler, S.ReduceLROnPlateau) else []))

def rates(make, nan_at=(), config=AT_ONCE, cut_at=None, steps=60, before=None):
    "The learning rate at every step of a loop, and its Governor."
    torch.manual_seed(0)
    net = nn.Linear(2, 2)
    opt = torch.optim.SGD(net.parameters(), lr=1., momentum=.9)
    sched = make(opt)
    gov, out = Governor(net, opt, sched, chance_loss=2.3, config=config), []
    for t in range(steps):
        if t == cut_at: scale_lr(opt, .5); scale_lr(sched, .5)
        if t in (before or {}): before[t](opt, sched)
        out.append(opt.param_groups[0]["lr"])
        opt.step()
        if t in nan_at: net.weight.data.fill_(math.nan)
        gov.watch(math.nan if t in nan_at else .9)
        advance(sched, t)
    return out, gov

@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_rollback_leaves_the_schedule_where_the_loop_is(make):
    free, hurt = rates(make)[0], rates(make, [35])
    assert [r.action for r in hurt[1].reports] == ["rollback"] and "scheduler" in hurt[1].reports[0].left
    assert hurt[0] == free, "the rate after a rollback is that of the schedule, to the bit"

@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_cut_lasts_under_every_scheduler(make):
    "What a second rollback in a row cuts stays cut at every later step of the schedule."
    free, (cut, gov) = rates(make)[0], rates(make, [35, 36])
    assert [r.lr_factor for r in gov.reports] == [None, .5] and gov.lr_factor == .5
    assert cut[:36] == free[:36]
    assert np.allclose(cut[37:], .5 * np.array(free[37:]), rtol=1e-6), (cut[34:], free[34:])

@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_replay_puts_the_schedule_back(make):
    free, (back, gov) = rates(make)[0], rates(make, [35], AT_ONCE.replace(replay=True), steps=50)
    assert gov.reports[0].action == "replay" and "scheduler" in gov.reports[0].restored
    step = gov.reports[0].restored_step
    assert np.allclose(back[36:50], free[step:step + 14], rtol=1e-6)

def test_a_rate_set_by_hand_goes_on():
    def schedule(t): return .1 * (1 + math.cos(math.pi * t / 100))
    net = nn.Linear(2, 2); opt = torch.optim.SGD(net.parameters(), lr=.1)
    gov, used = Governor(net, opt, chance_loss=2.3, config=AT_ONCE), []
    for t in range(100):
        opt.param_groups[0]["lr"] = schedule(t) * gov.lr_factor
        used.append(opt.param_groups[0]["lr"])
        gov.watch(math.nan if t in (40, 41) else .9)
    assert used[:42] == [schedule(t) for t in range(42)] and used[42:] == [.5 * schedule(t) for t in range(42, 100)]

def test_a_rate_forty_times_too_high_does_not_outlive_a_rollback():
    for make in (None, SCHEDULERS["CosineAnnealingLR"]):
        net = nn.Linear(2, 2); opt = torch.optim.SGD(net.parameters(), lr=.1); sched = make and make(opt)
        gov = Governor(net, opt, *([sched] if make else []), chance_loss=2.3, config=AT_ONCE)
        for _ in range(50): gov.watch(.9)
        opt.param_groups[0]["lr"] *= 40
        gov.watch(math.nan)
        if make: gov.watch(math.nan)
        assert opt.param_groups[0]["lr"] <= .1

READERS = {k: SCHEDULERS[k] for k in ("LambdaLR", "CyclicLR", "OneCycleLR")} | dict(
    SequentialLR=lambda o: S.SequentialLR(o, [S.LambdaLR(o, lambda t: 1.), S.LambdaLR(o, lambda t: .9**t)], [20]))

@pytest.mark.parametrize("make", READERS.values(), ids=READERS)
def test_what_a_schedule_reads_is_put_back_where_somebody_has_raised_it(make):
    "The rates that these compute theirs from, in themselves and in the groups: else a rollback lasts for one step."
    def raise_all(opt, sched):
        for g in opt.param_groups: g.update({k: 40 * g[k] for k in ("initial_lr", "max_lr", "min_lr") if k in g})
        for s in getattr(sched, "_schedulers", [sched]):
            for name in ("base_lrs", "max_lrs"):
                if hasattr(s, name): setattr(s, name, [40 * lr for lr in getattr(s, name)])
        opt.param_groups[0]["lr"] *= 40
    free = rates(make)[0]
    hurt, gov = rates(make, [36], before={35: raise_all})
    assert [r.action for r in gov.reports] == ["rollback"] and hurt[36] > 10 * free[36]
    assert np.allclose(hurt[38:], free[38:], rtol=1e-6) and hurt[37] <= 2 * max(free), (hurt[34:], free[34:])

def test_cuts_are_capped_over_a_run_and_given_back_when_the_loss_is_back():
    net = nn.Linear(2, 2); opt = torch.optim.SGD(net.parameters(), lr=1.)
    gov = Governor(net, opt, chance_loss=2.3, config=AT_ONCE.replace(rollbacks=50, max_rollbacks=50, cooldown=40))
    for _ in range(60): gov.watch(.9)
    for _ in range(12): gov.watch(math.nan)
    assert gov.lr_factor == opt.param_groups[0]["lr"] == .0625
    for _ in range(120): gov.watch(.9)
    assert gov.lr_factor == opt.param_groups[0]["lr"] == 1.
    for _ in range(12): gov.watch(math.nan)                       # it has brought the failure back
    for _ in range(300): gov.watch(.9)
    assert gov.lr_factor == .0625, "the second time the cut stays"

def test_after_two_rollbacks_a_checkpoint_holds_plain_numbers():
    net = nn.Linear(2, 2); opt = torch.optim.AdamW(net.parameters(), lr=.1)
    sched = S.OneCycleLR(opt, .1, total_steps=500)
    gov = Governor(net, opt, sched, chance_loss=2.3, config=AT_ONCE)
    for _ in range(60): gov.watch(.9)
    for _ in range(3): gov.watch(math.nan)
    f = io.BytesIO()
    torch.save(dict(opt=opt.state_dict(), sched=sched.state_dict(), gov=gov.state_dict()), f)
    f.seek(0)
    back = torch.load(f) # weights only, by default
    assert type(back["opt"]["param_groups"][0]["lr"]) is float and gov.lr_factor == .25

def test_what_was_decided_since_the_snapshot_stays_and_is_named():
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(.5), nn.Linear(4, 2))
    for p in net[0].parameters(): p.requires_grad_(False)
    opt = torch.optim.AdamW(net[2].parameters(), lr=1e-3)
    gov = Governor(net, opt, chance_loss=None, config=AT_ONCE)
    good = [p.detach().clone() for p in net.parameters()]
    for p in net[0].parameters(): p.requires_grad_(True)                  # the body is unfrozen
    opt.add_param_group(dict(params=list(net[0].parameters()), lr=1e-4))
    net.eval()
    for p in net.parameters(): p.grad = torch.ones_like(p)
    opt.step()
    gov.watch(math.nan)
    report = gov.reports[0]
    assert all(p.requires_grad for p in net.parameters()) and len(opt.param_groups) == 2 and not net.training
    assert set(report.kept) == {"model: mode", "model: requires_grad", "optimizer: groups"}
    assert all(torch.equal(a, b) for a, b in zip(good, net.parameters())) and not opt.state, "momentum of then: none"
    for p in net.parameters(): p.grad = torch.ones_like(p)
    opt.step()

def fp16_loop(skip_at, zero_at_end, form):
    "Unscale, clip, watch, and leave a batch out where the Governor says so."
    torch.manual_seed(0)
    net = nn.Linear(4, 3); opt = torch.optim.SGD(net.parameters(), lr=.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.)
    gov, done = Governor(net, opt, scaler, chance_loss=math.log(3)), 0
    for t in range(60):
        x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
        if t in skip_at: x = x * math.nan
        if not zero_at_end: opt.zero_grad()
        def train():
            loss = F.cross_entropy(net(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            return loss, nn.utils.clip_grad_norm_(net.parameters(), 1.)
        if form == "step":
            with gov.step():
                gov.watch(*train())
                scaler.step(opt); scaler.update(); done += 1
                if zero_at_end: opt.zero_grad()
            continue
        if gov.watch(*train(), before_step=True): continue
        scaler.step(opt); scaler.update(); done += 1
        if zero_at_end: opt.zero_grad()
    return net, gov, done

@pytest.mark.parametrize("form", ["watch", "step"])
@pytest.mark.parametrize("zero_at_end", [False, True])
def test_fp16_loops_survive_a_skip(zero_at_end, form):
    net, gov, done = fp16_loop((30, 31, 40), zero_at_end, form)
    assert [r.action for r in gov.reports] == ["skip"] * 3 and done == 57
    assert all(p.isfinite().all() for p in net.parameters())

def test_small_things():
    net = nn.Linear(2, 2)
    gov = Governor(net, chance_loss=None, config=AT_ONCE)
    for _ in range(60): gov.watch(np.array([.9], np.float32))               # one number is one number
    for _ in range(6): gov.rollback()
    assert not gov.stopped[0] and gov.budget.ever[0] == 0, "what is asked for costs nothing"
    for x in (80., 80., 80.): gov.watch(x)
    assert gov.verdicts.latest.count[0] == gov.reports[-1].count > 0

def test_nan_in_complex_weights_is_seen():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    net = Net()
    gov = Governor(net, chance_loss=None, config=AT_ONCE.replace(snapshot_every=1, probation=0))
    gov.watch(1.)
    net.w.data[1] = complex(math.nan, 0.)
    gov.watch(1.)
    assert [r.reason for r in gov.reports] == ["state"] and net.w.isfinite().all()

def test_sparse_momentum_is_kept():
    net = nn.Embedding(10, 3, sparse=True); opt = torch.optim.SGD(net.parameters(), lr=.1, momentum=.9)
    gov = Governor(net, opt, chance_loss=None)
    def step(rows):
        opt.zero_grad(); net(torch.tensor(rows)).sum().backward(); opt.step()
    step([1, 2]); gov.take_snapshot()
    buffer = opt.state[net.weight]["momentum_buffer"].to_dense().clone(); weight = net.weight.detach().clone()
    step([5, 6, 7]); gov.rollback()
    assert torch.equal(net.weight, weight) and torch.equal(opt.state[net.weight]["momentum_buffer"].to_dense(), buffer)
    other = Governor(net, opt, chance_loss=None)
    other.load_state_dict(gov.state_dict())
    step([5, 6, 7]); other.rollback()
    assert torch.equal(opt.state[net.weight]["momentum_buffer"].to_dense(), buffer)


# --- it says what it did

def test_every_report_is_a_line_in_the_log(caplog):
    with caplog.at_level(logging.INFO, "esper_nb.governor"):
        gov = Governor(nn.Linear(1, 1), chance_loss=2.3, config=AT_ONCE.replace(rollbacks=1, stop_raises=False))
        for _ in range(60): gov.watch(.5)
        for _ in range(2): gov.watch(math.nan)
    said = [(r.levelname, r.getMessage()) for r in caplog.records if " -> " in r.getMessage()]
    assert [s[0] for s in said] == ["WARNING", "ERROR"]
    assert [s[1] for s in said] == [f"Governor: {r}" for r in gov.reports]

def test_a_summary_names_the_batches_that_left_no_trace():
    gov = Governor(nn.Linear(1, 1), chance_loss=2.3, config=AT_ONCE)
    for t in range(100):
        with gov.step(): gov.watch(math.nan if t == 42 else .5)
    for t in range(100, 160): gov.watch(math.nan if t == 150 else .5)
    s = gov.summary()
    first, last = s.lost[1]
    assert s.lost[0] == (42, 42) and last == 150 and 125 <= first <= 150
    assert s.actions == {"skip": 1, "rollback": 1} and "rollback" in str(s) and "<table>" in s._repr_html_()
    assert copy.copy(s).judged == gov.stats.judged[0]

@pytest.mark.parametrize("way", ["watch", "run", "step"])
def test_a_scaler_that_is_switched_off_is_put_back_like_any_part(way):
    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    opt = torch.optim.SGD(net.parameters(), lr=.01)
    scaler = torch.amp.GradScaler("cpu", enabled=False) # as with `--amp` left out
    governor = Governor(net, opt, scaler, chance_loss=None)
    def step(x):
        loss = (net(x) - 1).square().mean()
        if way == "step": governor.watch(loss)
        opt.zero_grad(); scaler.scale(loss).backward(); scaler.unscale_(opt); scaler.step(opt); scaler.update()
        return loss
    for t in range(40):
        x = torch.randn(8, 2)
        if t == 30 and way == "step": x[0] = math.nan # is skipped
        if t == 30 and way != "step": net.weight.data[0, 0] = math.nan
        if way == "run": governor.run(step, x)
        elif way == "watch": governor.watch(step(x))
        else:
            with governor.step(): step(x)
    assert [r.action for r in governor.reports] == ["skip" if way == "step" else "rollback"]
    assert net.weight.isfinite().all() and governor.watched == 40
