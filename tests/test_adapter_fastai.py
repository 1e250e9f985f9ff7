"fastai's own optimizers: what is found with them is what is found with those of torch that fastai wraps."
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from ten_classes import CHANCE, examples, same
from torch import nn
from torch.utils.data import TensorDataset

from esper_nb.guard import GovernorConfig, fastai_governor
from esper_nb.guard.adapters import _FastaiOptimizer

BATCHES, AT = 160, 100
QUICK = GovernorConfig(stop_raises=False, snapshot_every=20, probation=20)

pytestmark = pytest.mark.usefixtures("one_thread", "few_words")

@pytest.fixture
def fastai():
    for name in ("progress", "schedule"): pytest.importorskip(f"fastai.callback.{name}", exc_type=ImportError)
    return pytest.importorskip("fastai.basics", reason="needs fastai", exc_type=ImportError)

OPTIMIZERS = {
    "SGD": lambda f: partial(f.SGD, mom=.9),
    "Adam": lambda f: f.Adam,
    "SGD of torch": lambda f: partial(f.OptimWrapper, opt=partial(torch.optim.SGD, momentum=.9))}

def fit(fastai, name, guarded, fault, rate=None):
    "Train a small network; something ruins it before a step, and not in its replays."
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    rate = rate or (.02 if "SGD" in name else 3e-3)
    class Ruin(fastai.Callback):
        seen = -1
        def before_batch(self):
            if not self.training or guarded and guard.governor and guard.governor.replaying: return
            self.seen += 1
            if fault == "rate" and self.seen == AT: self.learn.opt.set_hyper("lr", 300 * rate)
            if fault == "weights" and self.seen == AT: self.learn.model[0].weight.data.mul_(-30)
            if fault == "nan" and self.seen == AT: self.learn.model[0].weight.data[0, 0] = math.nan
    guard = fastai_governor(CHANCE, QUICK) if guarded else None
    data = fastai.DataLoaders(fastai.DataLoader(TensorDataset(*examples(32 * BATCHES)), bs=32), fastai.DataLoader(
        TensorDataset(*[t[:64] for t in examples(32 * BATCHES)]), bs=32))
    learn = fastai.Learner(data, net, loss_func=F.cross_entropy, cbs=[Ruin(), *([guard] if guard else [])],
                           opt_func=OPTIMIZERS[name](fastai))
    torch.manual_seed(1)
    with learn.no_bar(), learn.no_logging(): learn.fit(1, rate)
    return learn, guard and guard.governor

@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rate_that_rose_is_found(fastai, name):
    governor = fit(fastai, name, True, "rate")[1]
    assert [(r.action, r.cause) for r in governor.reports][:1] == [("rollback", "rate")], [*map(str, governor.reports)]
    assert {r.cause for r in governor.reports} == {"rate"}

@pytest.mark.parametrize("fault", [None, "weights", "nan"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_comes_from_outside_is_undone_to_the_bit(fastai, name, fault):
    (alone, _), (guarded, governor) = [fit(fastai, name, g, fault if g else None) for g in (False, True)]
    assert governor.repairs.dry.exact, governor.repairs.dry.why
    assert [r.cause for r in governor.reports] == ["external"] * bool(fault), [*map(str, governor.reports)]
    assert same(alone.model, guarded.model) and alone.opt.hypers[0]["lr"] == guarded.opt.hypers[0]["lr"]
    assert float(guarded.recorder.smooth_loss.value) == pytest.approx(float(alone.recorder.smooth_loss.value), rel=1e-4)
    if "torch" in name: return # its moments were compared where it is used without fastai
    for a, b in zip(alone.opt.state_dict()["state"], guarded.opt.state_dict()["state"]):
        assert a.keys() == b.keys() and all(torch.equal(v, b[k]) if isinstance(v, torch.Tensor) else v == b[k]
                                            for k, v in a.items())

def test_a_learner_leaves_its_optimizer_as_it_was(fastai, tmp_path):
    learn, governor = fit(fastai, "Adam", True, None)
    assert "step" not in vars(learn.opt) and governor.explain().cause == "healthy" and "step" not in vars(learn.opt)
    learn.path = tmp_path
    learn.save("whole")
    learn.load("whole")
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 3e-3) # from a loaded state, which is another dict
    assert not learn.guard.governor.reports and learn.guard.governor.repairs.dry.exact

def test_experiments_change_fastais_own_settings(fastai):
    net = nn.Linear(2, 2)
    opt = fastai.Adam(list(net.parameters()), lr=.1)
    ours = _FastaiOptimizer(opt)
    ours.param_groups[0]["lr"] = .05
    assert opt.hypers[0]["lr"] == .05 and ours.param_groups[0]["params"] == list(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    seen = []
    ours.register_step_pre_hook(lambda *_: seen.append("before"))
    with ours.in_place(): opt.step()
    opt.step()
    assert seen == ["before"] and ours.state[net.weight]["step"] == 2
    ours.state.clear()
    assert set(ours.state[net.weight]) <= {"do_wd", "force_train"}
