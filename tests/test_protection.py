"A Governor never seems to protect what it does not: what is passed wrongly is unpacked, refused or named at once."
import logging
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from tiny import fed, take, update

from esper_nb.guard import Governor, GovernorConfig, GovernorStop


def parts():
    net = nn.Linear(2, 2)
    return net, torch.optim.Adam(net.parameters())


@pytest.mark.parametrize("pack", [list, tuple, lambda p: dict(zip(("net", "adam"), p))])
def test_parts_in_a_list_or_dictionary_are_guarded_one_by_one(pack):
    net, opt = parts()
    governor = Governor(pack((net, opt)), chance_loss=None)
    good = net.weight.clone()
    net.weight.data.fill_(math.nan)
    report, = governor.watch(math.nan)
    assert report.rolled_back and torch.equal(net.weight, good)
    assert sum(isinstance(o, (nn.Module, torch.optim.Optimizer)) for o in governor.snapshot.objects.values()) == 2


class InArrays:
    "A network without torch."
    def __init__(self): self.w = np.ones(2)
    def state_dict(self): return dict(w=self.w)
    def load_state_dict(self, state): self.w[:] = state["w"]

@pytest.mark.parametrize("make, says", [
    (lambda n, o: Governor(o, chance_loss=None), "no model among the parts (optimizer), so only the weights that"),
    (lambda n, o: Governor(chance_loss=2.3), "no model among the parts (there are none)"),
    (lambda n, o: Governor(nn.Linear(2, 2), o, chance_loss=None), "`optimizer` trains no weight of what was passed"),
    (lambda n, o: Governor(n, chance_loss=None), "no optimizer among the parts; if one trains these"),
    (lambda n, o: Governor(weights=dict(n.state_dict()), chance_loss=None), "no optimizer among the parts"),
    (lambda n, o: Governor(InArrays(), chance_loss=None), "no optimizer among the parts")])
def test_what_is_missing_is_a_warning_at_once(make, says, caplog):
    make(*parts())
    assert [r.levelname for r in caplog.records] == ["WARNING"] and says in caplog.text


def test_inputs_and_labels_go_into_run_as_one_batch():
    x, y = torch.ones(4, 2), torch.ones(4)
    with pytest.raises(ValueError, match=r"fetch='a Tensor', expected a function .* tuple: run\(step, \(x, y\)\)"):
        Governor(*parts(), chance_loss=None).run(lambda x, y: torch.ones(()), x, y)


def test_a_loss_that_is_never_a_number_is_told_with_every_act(caplog):
    governor = Governor(*parts(), chance_loss=None)
    with pytest.raises(GovernorStop, match="give nan, too: look at batch, loss and code"):
        for _ in range(400): governor.watch(math.nan)
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 7 and "harmless" in warnings[0].message and "nan, too" in warnings[2].message
    assert [r.action for r in governor.reports] == ["rollback"] * 4 + ["stop"] # and not one at every batch


def test_a_run_that_cannot_be_saved_for_long_says_so(caplog):
    governor = Governor(*parts(), chance_loss=None, config=GovernorConfig(snapshot_every=10, probation=0))
    for t in range(300): governor.watch(1.02**max(0, t - 60) if t < 250 else 1.02**190)
    assert not governor.stopped[0]
    governor = Governor(*parts(), chance_loss=None, config=GovernorConfig(snapshot_every=10, probation=0, patience=400))
    for t in range(300): governor.watch(2. if t < 20 else 1. if t < 60 else 3.)
    assert "no snapshot for 100 losses" in caplog.text


@pytest.mark.parametrize("together", [3, 8, 16])
def test_losses_that_are_judged_together_have_good_states_like_others(together):
    governor = Governor(*parts(), chance_loss=None, config=GovernorConfig(sync_every=together))
    for _ in range(200): governor.watch(.5)
    assert 200 - governor.good.at().batch < 2 * (50 + together), "at the twentieth loss nothing could be taken"


def test_an_unrest_at_the_twentieth_loss_puts_the_first_good_state_off_and_no_more():
    governor = Governor(*parts(), chance_loss=None)
    for t in range(80): governor.watch(30. if 18 <= t < 24 else .5)
    assert governor.good.at().batch > 24 and not governor.reports


@pytest.mark.parametrize("way", ["run", "batches"])
@pytest.mark.parametrize("accumulate", [3, 16])
def test_a_run_that_accumulates_has_good_states_at_the_ends_of_its_steps(accumulate, way):
    net, opt = parts()
    governor, data = Governor(net, opt, chance_loss=None), [*enumerate(torch.randn(240, 8, 2).unbind())]
    def step(batch):
        k, x = batch
        loss = net(x).square().mean()
        (loss / accumulate).backward()
        if (k + 1) % accumulate == 0:
            opt.step()
            opt.zero_grad()
        return loss.detach()
    for batch in fed(governor, data, way): take(governor, step, batch, way)
    at = governor.good.at().batch
    assert at % accumulate == 0 and 240 - at < 2 * (50 + accumulate)


class ByHand(nn.Linear):
    "It keeps a mean for its evaluations, of a kind that no snapshot has."
    def __init__(self, kind):
        super().__init__(2, 2)
        self.kind, self.mean, self.kept = kind, kind(0.), None
    def forward(self, x):
        if self.training: self.mean, self.kept = self.kind(.9 * self.mean + .1 * x.mean().item()), x
        return super().forward(x)

@pytest.mark.parametrize("kind", [float, np.float64, np.asarray, torch.as_tensor])
@pytest.mark.parametrize("bad", [math.nan, 1.])
def test_statistics_kept_by_hand_that_turn_nan_are_told_of(kind, bad, caplog):
    net = ByHand(kind)
    opt = torch.optim.SGD(net.parameters(), .01)
    governor = Governor(net, opt, chance_loss=None)
    for k in range(300):
        x = torch.randn(8, 2)
        if k == 120: x[0, 0] = bad
        governor.watch(update(opt, net(x).square().mean()))
    said = [r.getMessage() for r in caplog.records if "model.mean has NaN in it" in r.getMessage()]
    assert len(said) == (bad != 1.) and not governor.reports


def test_a_state_without_banks_is_small_and_remembers_what_was_done():
    net = nn.Linear(256, 256)
    opt = torch.optim.Adam(net.parameters())
    governor = Governor(net, opt, chance_loss=None)
    for _ in range(30): governor.watch(.5)
    governor.watch(math.nan)
    small, whole = governor.state_dict(banks=False), governor.state_dict()
    def size(x):
        if isinstance(x, torch.Tensor): return x.nbytes
        return sum(map(size, x.values() if isinstance(x, dict) else x)) if isinstance(x, (dict, list, tuple)) else 0
    assert size(small) < 40_000 < size(whole)
    other = Governor(net, opt, chance_loss=None)
    other.load_state_dict(small)
    assert other.reports == governor.reports and other.summary().lost == governor.summary().lost
    net.weight.data.fill_(math.nan)
    report, = other.watch(math.inf)
    assert report.rolled_back and net.weight.isfinite().all()


def test_losses_of_lanes_may_come_as_a_list():
    governor = Governor(nn.Linear(1, 2), chance_loss=None, lanes=2)
    for _ in range(3): assert governor.watch([.5, .6]) == ()
    assert governor.stats.judged.tolist() == [3, 3]


@pytest.mark.parametrize("config", [GovernorConfig(), GovernorConfig(copies=1, probation=0)])
def test_every_good_state_goes_to_the_folder_and_none_is_overwritten_while_it_is_written(config, tmp_path):
    net, opt = parts()
    governor = Governor(net, opt, chance_loss=None, folder=tmp_path, config=config)
    for k in range(5):
        net.weight.data.fill_(float(k))
        for _ in range(3): governor.watch(.5)
        governor.accept()
    net.weight.data.fill_(99.)
    governor.files.wait()
    again, adam = parts()
    assert Governor.recover(tmp_path, again, adam) == 15 and (again.weight == 4).all()
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


@pytest.mark.parametrize("every, ends", [(1, True), (5, True), (60, False)])
def test_incidents_that_follow_at_once_use_up_the_budget_although_each_is_proved(every, ends):
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    opt = torch.optim.SGD(net.parameters(), lr=.05)
    config = GovernorConfig(rollbacks=1, snapshot_every=10, probation=5, cooldown=40)
    governor = Governor(net, opt, chance_loss=None, config=config)
    def step(x): return update(opt, (net(x) - 1).square().mean())
    batches = torch.randn(400, 16, 4, generator=torch.Generator().manual_seed(1))
    def train():
        for k, x in enumerate(batches):
            if k >= 100 and k % every == 0: net.weight.data.fill_(math.nan) # by something outside of the step
            governor.run(step, x)
    if ends:
        with pytest.raises(GovernorStop): train()
        assert governor.watched < 100 + 3 * 48 # within the patience all of it is one incident
    else:
        train()
        assert {r.cause for r in governor.reports} == {"external"} and governor.budget.ever[0] == 0
    assert net.weight.isfinite().all()


class Distilled:
    "A student, and what its step reads beside it."
    def __init__(self, size=2):
        torch.manual_seed(0)
        self.net, self.teacher, self.idle = nn.Linear(2, size), nn.Linear(2, size), nn.Linear(2, 2)
        self.opt = torch.optim.Adam(self.net.parameters())
        self.queue, self.total = torch.zeros(3), torch.zeros(())
        self.governor = Governor(self.net, self.opt, chance_loss=None)

    def step(self, x):
        loss = update(self.opt, (self.net(x) - self.teacher(x).detach() - self.queue.sum()).square().mean())
        self.total += loss.detach()
        self.idle.weight.data += 0
        return loss

    def train(self, way, n):
        for x in torch.randn(n, 4, 2):
            take(self.governor, self.step, x, way)

@pytest.mark.parametrize("way, ruined, size, rollbacks", [
    ("watch", "teacher", 2, 0), ("watch", "queue", 2, 1),
    pytest.param("run", "teacher", 2**18, 0, marks=pytest.mark.slow)])
def test_what_no_rollback_puts_back_is_named_and_costs_none(way, ruined, size, rollbacks, caplog):
    "Neither the sum of losses nor a network that the step does not call is the cause."
    loop = Distilled(size)
    loop.train(way, 30)
    loop.idle.weight.data.fill_(math.nan)
    bad = loop.queue if ruined == "queue" else loop.teacher.weight.data
    bad[0] = math.nan
    loop.train(way, 60)
    named = [text for text in caplog.messages if "no rollback puts it back" in text]
    assert len(named) == 1 and f"self.{ruined}" in named[0] and "total" not in named[0] and "idle" not in named[0]
    assert [r.action for r in loop.governor.reports] == ["rollback"] * rollbacks
    with pytest.raises(GovernorStop, match="no rollback puts it back"): loop.train(way, 190)
    assert loop.net.weight.isfinite().all()


def test_nan_beside_the_run_that_is_not_its_cause_stops_no_rollback():
    "A good state is put back first, and that helps: the weights were ruined, not what the loss does not read."
    loop = Distilled()
    loop.train("watch", 60)
    loop.idle.weight.data.fill_(math.nan)
    loop.net.weight.data.fill_(3e38)
    loop.train("watch", 120)
    assert [r.action for r in loop.governor.reports] == ["rollback"] and loop.governor.losses.recent[-1] < 10


@pytest.mark.parametrize("way", ["watch", "run"])
@pytest.mark.parametrize("hand", [lambda q: dict(queue=q), lambda q: dict(memory=dict(negatives=q, size=3))])
def test_a_queue_that_the_step_writes_into_goes_back_where_the_loop_has_it(way, hand):
    torch.manual_seed(0)
    net, opt = parts()
    queue = torch.randn(2, 16)
    often = GovernorConfig(snapshot_every=10, probation=5)
    governor = Governor(net, opt, chance_loss=None, config=often, **hand(queue))
    def step(batch):
        i, x = batch
        key = net(x)
        loss = update(opt, (key @ queue).square().mean())
        queue[:, i % 16] = key[0].detach()
        return loss
    for batch in enumerate(torch.randn(60, 4, 2)):
        take(governor, step, batch, way)
        if batch[0] == 50: queue[0, 0] = net.weight.data[0, 0] = math.nan
    assert [r.action for r in governor.reports] == ["rollback"]
    assert queue.isfinite().all() and net.weight.isfinite().all() and governor.losses.recent[-1] < 10


KINDS = [partial(torch.optim.SGD, lr=.1, momentum=.9, weight_decay=.1), torch.optim.AdamW, torch.optim.RMSprop]
USES = {
    "scales": lambda p: p.grad.mul_(.25), "measures": lambda p: p.grad.norm().item(), "adds": lambda p: p.grad.add_(0),
    "clips": lambda p: nn.utils.clip_grad_norm_([p], 1., foreach=False), "copies": lambda p: p.grad.clone()}

@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use", USES)
def test_a_loop_may_use_its_gradients_after_a_rollback_and_its_next_update_without_new_ones_does_nothing(use, kind):
    net = nn.Linear(2, 2)
    opt = kind(net.parameters())
    governor = Governor(net, opt, chance_loss=None)
    for _ in range(30): governor.watch(update(opt, net(torch.randn(8, 2)).square().mean()))
    net(torch.ones(4, 2)).sum().backward() # half of an accumulation
    governor.rollback()
    for p in net.parameters(): USES[use](p)
    def moved(): return [k for k in governor.snapshot.difference() if not k.startswith("streams")]
    assert not moved()
    opt.step()
    assert not moved(), "neither momentum nor weight decay"
    opt.step()
    assert moved(), "zeros of the loop's own are gradients like others"

@pytest.mark.parametrize("fault", [1e4, math.nan])
@pytest.mark.parametrize("way", ["watch", "run"])
def test_a_loop_that_scales_what_it_accumulates_is_guarded_to_its_end(way, fault):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    opt = torch.optim.Adam(net.parameters(), .01)
    governor, xs = Governor(net, opt, chance_loss=None), torch.randn(480, 16, 4)
    def step(x):
        loss = F.mse_loss(net(x), x.sum(1, keepdim=True))
        loss.backward()
        return loss.detach()
    for k, x in enumerate(xs):
        if k == 302: net[0].weight.data[0] *= fault
        take(governor, step, x, way)
        if k % 4 < 3: continue
        for p in net.parameters(): p.grad.mul_(.25)
        opt.step()
        for p in net.parameters(): p.grad.zero_()
    assert governor.losses.recent[-1] < .1 and governor.reports
