"""What cannot be true, whatever the loss says: weights of no sensible size, moments that no gradients can have made.

One flipped bit of an exponent is 1e38, which is finite, and which no loss has to show.
"""
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tiny import take

from esper_nb.guard import Governor, beyond_gradients, beyond_squares, length_of_moments

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


@pytest.mark.parametrize("tensor", [lambda run: run.net[2].weight, lambda run: run.net[2].bias], ids=["weight", "bias"])
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


class Slow(torch.optim.Optimizer):
    "Every fifth step of another optimizer is followed by one back, half of the way: a write after its step."
    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner, self.steps = inner, 0
        self.slow = [p.detach().clone() for group in inner.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self):
        self.inner.step()
        self.steps += 1
        if self.steps % 5: return
        for p, slow in zip(self.inner.param_groups[0]["params"], self.slow): slow.copy_(p.lerp_(slow, .5))

@pytest.mark.parametrize("kind", ["plain", "inside another", "by hand"])
@pytest.mark.parametrize("way", ["watch", "run"])
def test_weights_that_are_far_too_sure_of_themselves_are_undone_at_the_first_enormous_loss(way, kind):
    "A network that had solved its task is right with them, too, nearly always, so the loss is zero until it is not."
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.SGD(net.parameters(), .2)
    if kind == "inside another": optimizer = Slow(optimizer)
    governor, centres = Governor(net, *[] if kind == "by hand" else [optimizer]), torch.randn(5, 16)
    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        if kind != "by hand": optimizer.step()
        else:
            for p in net.parameters(): p.data -= .2 * p.grad
        return loss
    for k in range(200):
        if k == 130: net[0].weight.data *= 1e4
        y = torch.randint(5, (32,))
        take(governor, step, (centres[y] + .8 * torch.randn(32, 16), y), way)
    report, = governor.reports
    assert (report.action, report.cause) == ("rollback", "external" if way == "run" else None)
    assert max(p.abs().max() for p in net.parameters()) < 10


OPTIMIZERS = dict(
    sgd=lambda p: torch.optim.SGD(p, .02, momentum=.9), nesterov=lambda p: torch.optim.SGD(
        p, .02, momentum=.9, nesterov=True, weight_decay=1e-2), adam=lambda p: torch.optim.Adam(p, 1e-3),
    adamw=lambda p: torch.optim.AdamW(p, 1e-3), nadam=lambda p: torch.optim.NAdam(p, 1e-3),
    radam=lambda p: torch.optim.RAdam(p, 1e-3), adamax=lambda p: torch.optim.Adamax(p, 1e-3),
    rmsprop=lambda p: torch.optim.RMSprop(p, 1e-3), adadelta=lambda p: torch.optim.Adadelta(p, 1.),
    adagrad=lambda p: torch.optim.Adagrad(p, .01, initial_accumulator_value=.1))
BOUNDED = {"momentum_buffer", "exp_avg", "exp_avg_sq", "square_avg", "sum"}


def garbage(t): t.copy_(torch.randn(t.shape).abs() * (60 * t.square().mean().sqrt() + 1e-3))
def times_1e4(t): t.mul_(1e4)


class Classes:
    def __init__(self, kind, way="watch"):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 6))
        self.opt = OPTIMIZERS[kind](self.net.parameters())
        self.kinds = torch.randn(6, 16)
        self.governor, self.way = Governor(self.net, self.opt), way

    def step(self, batch):
        x, y = batch
        self.opt.zero_grad()
        loss = F.cross_entropy(self.net(x), y)
        loss.backward()
        self.opt.step()
        return loss

    def train(self, steps):
        for _ in range(steps):
            y = torch.randint(6, (32,))
            batch = self.kinds[y] + 2.5 * torch.randn(32, 16), y
            if self.way == "run": self.governor.run(self.step, batch)
            else: self.governor.watch(self.step(batch))
        return list(self.governor.reports)

    @torch.no_grad()
    def change(self, how, names=BOUNDED):
        for s in self.opt.state.values():
            for name in names & s.keys(): how(s[name])


@pytest.mark.parametrize("kind", [k if k in ("sgd", "adam", "rmsprop") else pytest.param(k, marks=pytest.mark.slow)
                                  for k in OPTIMIZERS])
@pytest.mark.parametrize("how,way", [(garbage, "watch"), pytest.param(times_1e4, "watch", marks=pytest.mark.slow),
                                     pytest.param(times_1e4, "run", marks=pytest.mark.slow), (garbage, "run")])
def test_moments_that_no_gradients_can_have_made_are_undone(kind, how, way):
    run = Classes(kind, way)
    run.train(120)
    run.change(how)
    report, = run.train(30)
    assert (report.action, report.reason) == ("rollback", "state") and "can have made" in report.bad_state[0]
    if way == "run": assert (report.restored_batch, report.cause) == (100, "external")
    else: assert report.lost is None and "moments alone" in report.why # no update has used them


def test_a_write_into_moments_is_blamed_where_nothing_else_differs_from_a_replay():
    "The step that uses them has its loss before, so that all losses are equal: the replay said nothing about it."
    run = Classes("adam", "run")
    run.train(123)
    run.change(times_1e4)
    report, = run.train(1)
    assert (report.cause, report.batch, report.redone) == ("external", 123, 24)
    assert "changed between batch 122 and batch 123" in report.why


def test_a_run_whose_moments_were_put_back_ends_like_a_clean_one():
    ends = []
    for how in (None, times_1e4):
        run = Classes("adam")
        run.train(120)
        if how: run.change(how)
        run.train(120)
        ends.append(torch.cat([p.detach().flatten() for p in run.net.parameters()]))
    assert (ends[0] - ends[1]).norm() < .1 * ends[0].norm()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_moments_are_never_longer_than_gradients_can_have_made_them(kind):
    "Also where all gradients point the same way, are as long as the longest, or were long once."
    for sizes in ([1.] * 300, [100.] * 9 + [1.] * 300, [1., 30.] * 150):
        p = nn.Parameter(torch.full((50,), 3.))
        optimizer, towards, longest = OPTIMIZERS[kind]([p]), F.normalize(torch.randn(50), dim=0), 0.
        for size in sizes:
            p.grad = size * towards
            longest = max(longest, float(p.grad.norm()))
            optimizer.step()
            assert beyond_gradients(optimizer, longest) <= 1 + 1e-5
        assert length_of_moments(optimizer) > .2 * sizes[-1]


@pytest.mark.parametrize("kind", ["nesterov", "adam", "rmsprop"])
@pytest.mark.parametrize("how", [torch.zero_, lambda t: t.mul_(1.5)], ids=["zero", "grown"])
def test_moments_that_are_set_back_or_corrected_on_purpose_stay(kind, how):
    run = Classes(kind)
    run.train(120)
    run.change(how)
    assert not run.train(60)


@pytest.mark.parametrize("kind", ["nesterov", "adam", "rmsprop"])
def test_moments_from_before_the_governor_are_no_proof(kind):
    "They may be of gradients that were a hundred times as long; a write afterwards is not to blame."
    run = Classes(kind)
    for _ in range(9):
        for p in run.net.parameters(): p.grad = 3 * torch.randn_like(p)
        run.opt.step()
    for p in run.net.parameters(): nn.init.normal_(p, 0, .1)
    run.governor = Governor(run.net, run.opt)
    run.train(3)
    with torch.no_grad(): run.net[0].weight.clamp_(-.2, .2)
    assert not any(r.reason == "state" for r in run.train(40))


def test_a_momentum_that_a_schedule_moves_is_no_proof():
    p = nn.Parameter(torch.zeros(50))
    optimizer = torch.optim.SGD([p], .1, momentum=.95)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, .1, total_steps=200)
    for _ in range(199):
        p.grad = torch.ones(50)
        optimizer.step()
        schedule.step()
        assert beyond_gradients(optimizer, 50 ** .5) <= 1 + 1e-5


def test_optimizers_of_other_kinds_say_nothing():
    p = nn.Parameter(torch.ones(3))
    for optimizer in (torch.optim.Rprop([p]), torch.optim.SGD([p], .1, momentum=1.), torch.optim.SGD([p], .1)):
        p.grad = torch.ones(3)
        optimizer.step()
        assert length_of_moments(optimizer) == beyond_gradients(optimizer, 1e-9) == 0


@pytest.mark.parametrize("kind", ["adam", "adamw", "nadam", "radam"])
@pytest.mark.parametrize("betas", [(.9, .999), (.5, .9), (.9, .95), (0., .99)])
def test_a_mean_of_gradients_is_bounded_by_the_mean_of_their_squares(kind, betas):
    "Steady gradients, rare ones, a single spike, all signs; the bound is nearly reached by gradients that grow."
    torch.manual_seed(0)
    ratio = betas[0] / betas[1]
    growing = torch.logspace(-200, 0, 200, base=1 / max(ratio, .5)).flip(0)[:, None]
    rows = dict(steady=torch.ones(200, 1), rare=(torch.rand(200, 1) < .05).float(), noise=torch.randn(200, 1),
                spike=torch.eye(200)[:, 5:6], grows=growing, small=1e-25 * torch.ones(200, 1))
    grads, largest = torch.cat(list(rows.values()), 1), 0.
    p = nn.Parameter(torch.zeros(len(rows)))
    optimizer = OPTIMIZERS[kind]([p])
    for group in optimizer.param_groups: group["betas"] = betas
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
        largest = max(largest, beyond_squares(optimizer))
        assert largest <= 1 + 1e-4
    assert largest > .3


@pytest.mark.parametrize("kind", ["adam", "adamw", "nadam", "radam"])
def test_squares_that_were_lost_are_undone_before_many_updates_divide_by_them(kind):
    run = Classes(kind)
    run.train(120)
    run.change(lambda t: t.mul_(1e-6), {"exp_avg_sq"})
    report, = run.train(30)
    assert report.reason == "state" and report.lost is None


OTHERS = dict(
    adafactor=lambda p: torch.optim.Adafactor(p), muon=lambda p: torch.optim.Muon([q for q in p if q.ndim == 2]))

SLOWER = ("adadelta", "adagrad", *OTHERS)

@pytest.mark.parametrize("kind", ["adam", "sgd", *(pytest.param(k, marks=pytest.mark.slow) for k in SLOWER)])
def test_moments_that_are_not_finite_are_put_back_before_an_update_spreads_them(kind, monkeypatch):
    monkeypatch.setattr("test_impossible_states.OPTIMIZERS", OPTIMIZERS | OTHERS)
    run = Classes(kind)
    run.train(120)
    with torch.no_grad():
        for t in [t for s in run.opt.state.values() for t in s.values() if isinstance(t, torch.Tensor) and t.dim()]:
            t.view(-1)[0] = torch.nan
    report, = run.train(60)
    assert report.reason == "state" and report.lost is None
    assert all(p.isfinite().all() for p in run.net.parameters())


@pytest.mark.costly
@pytest.mark.parametrize("make", [lambda p: torch.optim.Adam(p, 1e-3, fused=True),
                                  lambda p: torch.optim.SGD(p, .02, momentum=.9, fused=True)], ids=["adam", "sgd"])
def test_updates_of_fused_kernels_are_seen_and_no_state_lies_amid_gradients_that_add_up(make):
    "Torch counts no writes of theirs: `zero_grad()` was called missing, and a replay could not be exact."
    ends = []
    for ruined in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 6))
        opt, kinds = make(net.parameters()), torch.randn(6, 16)
        counts = dict(micro=0)

        def step(batch, net=net, opt=opt, counts=counts):
            x, y = batch
            loss = F.cross_entropy(net(x), y)
            (loss / 3).backward()
            counts["micro"] += 1
            if counts["micro"] % 3 == 0:
                opt.step()
                opt.zero_grad()
            return loss

        governor = Governor(net, opt)
        for k in range(200):
            y = torch.randint(6, (32,))
            if ruined and k == 140:
                with torch.no_grad(): net[2].weight.mul_(300.)
            governor.run(step, (kinds[y] + 2.5 * torch.randn(32, 16), y))
        ends.append([p.detach().clone() for p in net.parameters()])
    report, = governor.reports
    assert report.cause == "external" and all(map(torch.equal, *ends))
