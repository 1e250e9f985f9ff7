"Networks that normalise, rectify and pool in one pass: the same to rounding, and what is exact stays exact."
import importlib.util
import sys

import pytest
import torch

from esper_nb import FitConfig, fit, new_population
from esper_nb.grow import CNNConfig, new_host
from esper_nb.train import load_digits_data, run_epoch, synthetic_cifar10

pytestmark = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs Numba: the extra 'fused'")

DATA = load_digits_data(limit=256)
SMALL = FitConfig(lanes=3, epochs=2, workers=1, lr=.002, schedule="constant")


def grown(config: FitConfig, kinds=("norm", "conv_light")):
    "A population with a seed in the first lane's last slot and in the second lane's first one, trained for two epochs."
    pop = new_population("digits", config, data=DATA)
    for lane, (slot, kind) in enumerate(zip(("r0c2", "r0c0"), kinds)): pop.model.germinate(slot, kind, lane, tempo=1)
    results = list(fit(pop))
    return pop, [r.train.losses for r in results], [r.ablation for r in results]


@pytest.fixture(scope="module")
def fused_lanes(): return grown(SMALL.replace(fused=True))


def test_a_fused_population_learns_what_an_ordinary_one_does(fused_lanes):
    (plain, losses, seen), (fused, others, also) = grown(SMALL), fused_lanes
    assert fused.model.host.config.fused and not plain.model.host.config.fused
    for a, b in zip(losses, others): torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert not torch.equal(losses[-1], others[-1]) # other sums: were they equal, nothing would have been fused
    for a, b in zip(plain.model.state_dict().items(), fused.model.state_dict().items()):
        torch.testing.assert_close(a[1], b[1], rtol=1e-2, atol=2e-3, msg=lambda m, name=a[0]: f"{name}: {m}")
    assert [a is None for a in seen] == [a is None for a in also]


def test_two_runs_are_equal_to_the_bit(fused_lanes):
    _, losses, _ = fused_lanes
    _, again, _ = grown(SMALL.replace(fused=True))
    assert all(map(torch.equal, losses, again))


def test_exact_lanes_do_not_depend_on_what_others_grow():
    config = SMALL.replace(fused=True, exact=True)
    (one, losses, _), (other, again, _) = grown(config), grown(config, ("attention", "conv_light"))
    assert one.model.slot("r0c2").state(0).blueprint != other.model.slot("r0c2").state(0).blueprint
    assert all(torch.equal(a[:, 1:], b[:, 1:]) for a, b in zip(losses, again))


def test_what_is_not_a_number_stays_in_its_lane():
    def losses(ruin: bool):
        pop = new_population("digits", SMALL.replace(fused=True, governor=None), data=DATA)
        if ruin:
            with torch.no_grad(): pop.model.host.blocks[0][0].weight[:8].fill_(torch.nan) # of the first lane
        return run_epoch(pop).train.losses
    healthy, ruined = losses(False), losses(True)
    assert ruined[:, 0].isnan().all()
    assert torch.equal(healthy[:, 1:], ruined[:, 1:])


def test_branches_and_single_evaluations_agree(fused_lanes):
    pop, *_ = fused_lanes
    x = torch.randn(7, 3, 8, 8)
    logits, combinations = pop.model.factorial(x, ["r0c0", "r0c2"])
    pop.model.eval()
    for z, on in zip(logits, combinations):
        with torch.no_grad(), pop.model.disable_seeds([k for k in pop.model.names if k not in on]):
            torch.testing.assert_close(z, pop.model(x), rtol=1e-4, atol=1e-5)


def test_features_that_somebody_looks_at_are_there(fused_lanes):
    pop, *_ = fused_lanes
    slot, x = pop.model.slot("r0c1"), torch.randn(7, 3, 8, 8)
    assert slot.idle
    slot.trace = []
    pop.model(x).sum().backward()
    (features, out), = slot.trace
    assert features.shape == (7, 48, 4, 4) and out.grad is not None and not slot.idle


def test_a_host_with_checkpointed_blocks_and_one_of_odd_pictures():
    for config in (CNNConfig(size=9, base=4, blocks=2), CNNConfig(size=8, base=4, blocks=2, checkpoint=True)):
        x, out = torch.randn(4, 6, config.size, config.size), []
        for fused in (False, True):
            host = new_host(config.replace(fused=fused), lanes=2)
            host(x).square().sum().backward()
            out.append([p.grad for p in host.parameters()])
        torch.testing.assert_close(*out, rtol=1e-3, atol=1e-4)


def test_lanes_of_cifar_size():
    data = synthetic_cifar10(256)
    config = FitConfig(lanes=2, epochs=1, batch_size=64, governor=None, lr=.002)
    plain, fused = (run_epoch(new_population("cifar_baseline", config.replace(fused=f), data=data)).train.losses
                    for f in (False, True))
    torch.testing.assert_close(plain, fused, rtol=1e-3, atol=1e-4)


def test_where_there_is_nothing_to_fuse_it_says_so(monkeypatch):
    config = FitConfig(lanes=1, fused=True)
    with pytest.raises(ValueError, match="fused=True, expected False: the host of .* is no built-in convolutional one"):
        new_population("prose", config)
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"fused=True, expected False, or Numba: pip install 'esper_nb\[fused\]'"):
        new_population("digits", config, data=DATA)


@pytest.mark.cuda
def test_a_gpu_has_no_use_for_it(machine):
    with pytest.raises(ValueError, match="fused=True, expected False on cuda"):
        new_population("digits", FitConfig(lanes=1, fused=True), device="cuda")
