"Loops as tutorials have them, of kinds that no benchmark has: tiny, each with what went wrong there."
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

from esper_nb.guard import Governor, GovernorConfig

pytestmark = pytest.mark.usefixtures("one_thread")
OFTEN = GovernorConfig(snapshot_every=10, probation=10)

def descend(opt, loss):
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()


def prune_by_hand(m):
    m.register_buffer("kept", (m.weight.abs() > m.weight.abs().median()).float())
    m.weight.data *= m.kept

@pytest.mark.parametrize("change, says", [
    (lambda m: prune.l1_unstructured(m, "weight", amount=.5), "before the pruning, whose masks stay in force"),
    (prune_by_hand, "had zeros that the good state does not have"),
    (weight_norm, "the structure of model changed, and that is undone"),
    (nn.utils.weight_norm, "the structure of model changed, and that is undone")])
@pytest.mark.parametrize("way", ["watch", "run"])
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_layer_changed_since_the_good_state_keeps_its_mask_or_is_whole_again(change, says, way):
    "Where its weight is made of other parameters, these are gone with those of now; a mask may stay; and it is said."
    torch.manual_seed(0)
    net = nn.Linear(4, 8)
    opt = torch.optim.SGD(net.parameters(), lr=.01)
    governor = Governor(net, opt, chance_loss=None, config=OFTEN)
    kind, x = type(net), torch.randn(8, 4)
    def step(x):
        loss = descend(opt, net(x).square().mean())
        if hasattr(net, "kept"): net.weight.data *= net.kept
        return loss
    for i in range(40):
        if i == 29: change(net)
        if i == 30: next(iter(net.parameters())).data.view(-1)[0] = torch.nan
        if way == "run": governor.run(step, x)
        else: governor.watch(step(x))
    report, = governor.reports
    assert report.action == "rollback" and report.restored_batch <= 20 and says in report.undone
    assert type(net) is kind and net.weight.isfinite().all()
    if prune.is_pruned(net): assert (net.weight == 0).sum() == 16 == (net.weight_mask == 0).sum()
    else: assert net.weight is dict(net.named_parameters())["weight"] and hasattr(net, "kept") == ("zeros" in says)


def test_a_step_that_fails_with_older_weights_leaves_them_uncompared():
    "As a Cholesky factor of older weights may: it was an error of the Governor, in a healthy run."
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    opt = torch.optim.SGD(net.parameters(), lr=.004)
    governor = Governor(net, opt, chance_loss=None, config=OFTEN)
    least = -9.
    def step(batch):
        nonlocal least
        x, y = batch
        if (now := net.weight.item()) < least: raise ValueError("older weights than before")
        least = now - .01
        return descend(opt, F.mse_loss(net(x), y))
    g = torch.Generator().manual_seed(0)
    for i in range(300):
        x = torch.randn(32, 1, generator=g)
        governor.run(step, (x, (5 if i < 150 else 8) * x + .5 * torch.randn(32, 1, generator=g)))
    assert not governor.reports and [n.action for n in governor.notes] == ["wait", "accepted"]


class Noam:
    "The schedule of the annotated transformer: an optimizer around one of torch's."
    def __init__(self, inner): self.optimizer, self.at = inner, 0
    def zero_grad(self): self.optimizer.zero_grad()
    def step(self):
        self.at += 1
        for g in self.optimizer.param_groups: g["lr"] = .2 * min(self.at**-.5, self.at * 20**-1.5)
        self.optimizer.step()

class Saved(Noam):
    "The same with a state."
    def state_dict(self): return dict(at=self.at, inner=self.optimizer.state_dict())
    def load_state_dict(self, state):
        self.at = state["at"]
        self.optimizer.load_state_dict(state["inner"])

class Several:
    "Two optimizers as one, as for a sparse table beside dense layers."
    def __init__(self, *inner): self.optimizers = inner
    def zero_grad(self): [o.zero_grad() for o in self.optimizers]
    def step(self): [o.step() for o in self.optimizers]

@pytest.mark.parametrize("wrap, found", [(Noam, {"optimizer"}), (Saved, {"saved", "optimizer"})])
def test_what_an_optimizer_of_ones_own_steps_with_is_a_part(wrap, found):
    "Else its rate is not recorded: a rate that the loop had raised was blamed on the hardware."
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    opt = wrap(torch.optim.SGD(net.parameters(), lr=0.))
    governor = Governor(net, opt, chance_loss=None)
    assert found == {k for k in governor.snapshot.parts if k in ("saved", "noam", "optimizer")}
    assert governor.gate is not None
    def step(x): return descend(opt, net(x).square().mean())
    for _ in range(3): governor.run(step, torch.ones(8, 4))
    assert dict(governor.recorder.steps[-1].after[0])["lr"] == opt.optimizer.param_groups[0]["lr"] > 0


def test_several_optimizers_as_one_are_parts_each():
    nets = nn.Linear(2, 2), nn.Linear(2, 2)
    several = Several(*[torch.optim.Adam(n.parameters()) for n in nets])
    governor = Governor(*nets, several, chance_loss=None)
    assert {"model", "model2", "optimizer", "optimizer2"} <= set(governor.snapshot.parts)
    assert [governor.snapshot.objects[k] for k in ("optimizer", "optimizer2")] == list(several.optimizers)


AIM = torch.tensor([[1.], [-2.], [3.], [.5]])

def batches(n, seed=0):
    "Batches of a linear task with a little noise."
    g = torch.Generator().manual_seed(seed)
    for i in range(n):
        x = torch.randn(32, 4, generator=g)
        yield i, (x, x @ AIM + .3 * torch.randn(32, 1, generator=g))

@pytest.mark.parametrize("way", ["watch", "run"])
@pytest.mark.parametrize("of", [list, lambda pair: dict(zip("wb", pair))])
def test_weights_without_a_module_are_restored_where_they_are(way, of, caplog):
    "As of torch.func, or written by hand: copies that asked for no gradient ended the run after a rollback."
    w, b = torch.zeros(4, 1, requires_grad=True), torch.zeros(1, requires_grad=True)
    weights, opt = of([w, b]), torch.optim.Adam([w, b], .1)
    governor = Governor(weights, opt, chance_loss=None, config=OFTEN)
    def step(batch): return descend(opt, F.mse_loss(batch[0] @ w + b, batch[1]))
    for i, batch in batches(120):
        if i == 80: w.data[0] = torch.nan
        if way == "run": governor.run(step, batch)
        else: governor.watch(step(batch))
    report, = governor.reports
    assert w is next(iter(weights.values() if isinstance(weights, dict) else weights)) and w.requires_grad
    assert (w - AIM).abs().max() < .3 and "no weights will be restored" not in caplog.text
    if way == "run": assert report.cause == "external" and "wrote into the state" in report.why and not report.lost


@pytest.mark.parametrize("raised", [False, True])
def test_a_module_over_the_memory_of_other_tensors_is_what_is_trained(raised):
    "A ParameterDict of tensors has parameters of its own: they were taken for a target that stays."
    torch.manual_seed(0)
    w = torch.zeros(4, 1, requires_grad=True)
    module, opt = nn.ParameterDict(dict(w=w)), torch.optim.SGD([w], .02)
    governor = Governor(module, opt, chance_loss=None)
    def step(batch): return descend(opt, F.mse_loss(batch[0] @ w, batch[1]))
    assert module["w"] is not w
    for i, batch in batches(290):
        if i == 180 and raised: opt.param_groups[0]["lr"] *= 53
        elif i == 180: w.data += 1.
        governor.run(step, batch)
    assert [r.cause for r in governor.reports] == ["rate" if raised else "external"]
    assert (w - AIM).abs().max() < .3


def test_an_optimizer_that_was_replaced_is_no_witness(caplog):
    "Of a new one nothing is seen, so nothing speaks for the weights; and it is said."
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    opt = torch.optim.SGD(net.parameters(), .05)
    governor = Governor(net, opt, chance_loss=None)
    for i, (x, y) in batches(340):
        if i == 60: opt = torch.optim.SGD(net.parameters(), 1e-3)
        if i == 250: net.weight.data += torch.tensor([3., 3., -3., 3.])
        governor.watch(descend(opt, F.mse_loss(net(x), y)))
    assert "no optimizer among the parts has stepped since batch 59" in caplog.text
    assert [r.action for r in governor.reports] == ["rollback"]
    assert (net.weight - AIM.T).abs().max() < .3


@pytest.mark.parametrize("way", ["schedule", "load"])
def test_a_rate_that_was_the_cause_is_taken_back(way):
    "From a schedule that multiplies it, and where a step has loaded the optimizer's state since."
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    opt, i = torch.optim.SGD(net.parameters(), .02), 0
    schedule = torch.optim.lr_scheduler.StepLR(opt, 100, .9)
    governor = Governor(net, opt, *[schedule] * (way == "schedule"), chance_loss=None)
    def step(batch):
        nonlocal i
        i += 1
        if way == "load" and i == 160: opt.load_state_dict(opt.state_dict())
        loss = descend(opt, F.mse_loss(net(batch[0]), batch[1]))
        if way == "schedule": schedule.step()
        return loss
    for k, batch in batches(400):
        if k == 180: opt.param_groups[0]["lr"] *= 53
        governor.run(step, batch)
    report, = governor.reports
    assert report.cause == "rate" and report.redone and opt.param_groups[0]["lr"] <= .02
    assert (net.weight - AIM.T).abs().max() < .3


@pytest.mark.parametrize("beside", [False, True])
def test_a_rate_raised_for_good_is_told_with_the_batch_of_that(beside):
    "Old weights are compared at rates of then, and another optimizer keeps its own: neither takes the raise back."
    torch.manual_seed(0)
    net, other = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(m.parameters(), .02) for m in (net, other)[:1 + beside]]
    governor = Governor(net, other, *optimizers, chance_loss=None)
    g = torch.Generator().manual_seed(1)
    for i, (x, y) in batches(450):
        if i == 150: optimizers[0].param_groups[0]["lr"] *= 9
        if i >= 150: y = y + 3 * torch.randn(32, 1, generator=g)
        loss = F.mse_loss(net(x), y) + F.mse_loss(other(x), y)
        for opt in optimizers: opt.zero_grad()
        loss.backward()
        for opt in optimizers: opt.step()
        governor.watch(loss.item())
    assert [n.action for n in governor.notes].count("accepted") == 1
    assert governor.log.remarks["rate"] == "the learning rate is 0.18 from batch 150 on, and was at most 0.02 before"
    compared = [n.batch for n in governor.notes if n.action == "compare"]
    assert len(set(compared)) == len(compared) # one that goes on later is another one


def test_an_optimizer_that_steps_seldom_is_still_the_one_that_trains(caplog):
    "After many small batches: it was taken for one that had been replaced."
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    opt = torch.optim.SGD(net.parameters(), .05)
    governor = Governor(net, opt, chance_loss=None)
    for i, (x, y) in batches(700):
        loss = F.mse_loss(net(x), y)
        (loss / 128).backward()
        if i % 128 == 127:
            opt.step()
            opt.zero_grad()
        governor.watch(loss.item())
    assert not governor.log.remarks and not governor.reports


class OwnNorm(nn.Module):
    "A norm whose statistics are other tensors after each batch."
    def __init__(self):
        super().__init__()
        self.register_buffer("size", torch.ones(4))
    def forward(self, x):
        self.size = .9 * self.size + .1 * x.std(0).detach()
        return x / x.std(0)


def test_buffers_that_are_exchanged_at_every_batch_are_looked_at():
    torch.manual_seed(0)
    net = nn.Sequential(OwnNorm(), nn.Linear(4, 1))
    opt = torch.optim.SGD(net.parameters(), .05)
    governor = Governor(net, opt, chance_loss=None, config=OFTEN)
    for i, (x, y) in batches(200):
        governor.watch(descend(opt, F.mse_loss(net(x * (1e4 if i == 150 else 1)), y)))
    assert [r.restored for r in governor.reports] == [("model.0.size",)] and net[0].size.max() < 10
