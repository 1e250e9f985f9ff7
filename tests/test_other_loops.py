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


@pytest.mark.parametrize("change", [
    lambda m: prune.l1_unstructured(m, "weight", amount=.5), weight_norm, nn.utils.weight_norm])
@pytest.mark.parametrize("way", ["watch", "run"])
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_layer_pruned_since_the_good_state_is_whole_again(change, way):
    "Its weight was made of a mask before each call, which is gone with the parameters of now."
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    opt = torch.optim.SGD(net.parameters(), lr=.01)
    governor = Governor(net, opt, chance_loss=None, config=OFTEN)
    kind, x = type(net), torch.randn(8, 4)
    def step(x): return descend(opt, net(x).square().mean())
    for i in range(40):
        if i == 29: change(net)
        if i == 30: next(iter(net.parameters())).data.view(-1)[0] = torch.nan
        if way == "run": governor.run(step, x)
        else: governor.watch(step(x))
    assert [r.action for r in governor.reports] == ["rollback"] and governor.reports[0].restored_batch <= 20
    assert type(net) is kind and set(dict(net.named_parameters())) == {"weight", "bias"}
    assert net.weight is net._parameters["weight"] and net.weight.isfinite().all()


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
