"Your own network as a host: lanes equal copies, it grows, resumes, exports; and what is refused."
import copy
import json
import subprocess
import sys
import textwrap
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

from esper_nb.control import GrowVecEnv
from esper_nb.core import by_lane, find_form, lane, lane_form, lane_module, per_lane, reset_lanes, run_on_trial, seeded
from esper_nb.grow import (
    FAMILIES, SEED_LAYOUTS, Decision, ModuleHostConfig, Stage, attach_slots, blueprint_size, explore_host, export_model,
    forget_blueprint, get_blueprint, make_blueprint, module_model, plain_blueprint)
from esper_nb.record import load_checkpoint, save_checkpoint
from esper_nb.train import FitConfig, evaluate, fit, get_task, new_population, task_from_arrays
from esper_nb.train.tasks import host_sites

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).resolve().parents[1]


def mlp(width=16):
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))

class Signal(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(8, 12, 3, padding=1), nn.BatchNorm1d(12), nn.ReLU())
        self.pool, self.head = nn.AdaptiveAvgPool1d(1), nn.Linear(12, 10)
    def forward(self, x): return self.head(self.pool(self.body(x)).flatten(1))

class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(128, 10)
    def forward(self, x): return self.head(self.body(x).flatten(1))

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.mid, self.head = nn.GRU(8, 12, batch_first=True), nn.Linear(12, 12), nn.Linear(12, 10)
    def forward(self, x): return self.head(self.mid(self.rnn(x)[0])[:, -1])

class Mixing(nn.Module):
    "Its own `reshape` joins what belongs to several lanes."
    def __init__(self):
        super().__init__()
        self.up, self.mid, self.head = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Linear(8, 10)
    def forward(self, x): return self.head(self.mid(self.up(x).relu()).relu().reshape(len(x), 8, -1).mean(2))

class Noisy(nn.Module):
    "Draws in a forward of its own, and in a layer."
    def __init__(self, own=True):
        super().__init__()
        self.up, self.drop, self.head, self.own = nn.Linear(64, 16), nn.Dropout(.3), nn.Linear(16, 10), own
    def forward(self, x):
        h = self.drop(self.up(x.flatten(1)).relu())
        return self.head(F.dropout(h, .2, self.training) if self.own else h)

class Tied(nn.Module):
    "Tokens to tokens with one table for both."
    def __init__(self):
        super().__init__()
        self.table, self.mid = nn.Embedding(10, 12), nn.Linear(12, 12)
        self.out = nn.Linear(12, 10)
        self.out.weight = self.table.weight
    def forward(self, x): return self.out(self.mid(self.table(x)).relu())


def host(factory, slots, shape, reads="BCHW", **kwargs):
    return ModuleHostConfig(factory, slots, shape=shape, classes=10, reads=reads, kwargs=kwargs)

def resnet(): # a ResNet of one block a stage
    return torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], 10)

def convnext(): # a ConvNeXt of two stages
    block = torchvision.models.convnext.CNBlockConfig
    return torchvision.models.ConvNeXt([block(16, 24, 1), block(24, None, 1)], 0., num_classes=10)

PICTURE, SMALL = (3, 32, 32), dict(num_classes=10)
VIT = dict(image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32)
def vision(factory, *slots, **kwargs):
    return host(factory, slots, PICTURE, **kwargs).replace(side_by_side=True)

# network -> its host, whether it runs lane by lane, and the layers that do
TABLE = {
    "MLP": (lambda: host(mlp, {"1": "BD", "3": "BD"}, (64, 1, 1), "BC"), False, set()),
    "Conv2d": (lambda: host(Pictures, ["body.2", "body"], (1, 8, 8)), False, set()),
    "Conv1d": (lambda: host(Signal, {"body": "BDL"}, (1, 8, 8), "BCL"), False, set()),
    "GRU": (lambda: host(Recurrent, {"mid": "BLD"}, (1, 8, 8), "BLD"), False, {"rnn"}),
    "tied tokens": (lambda: host(Tied, ["mid"], (8,), "BL"), False, set()),
    "own reshape": (lambda: host(Mixing, ["up", "mid"], (1, 8, 8)), True, set()),
    "resnet": (lambda: vision(resnet, "layer1", "layer2.0"), False, set()),
    "mobilenet": (lambda: vision("torchvision.models:mobilenet_v3_small", "features.1", "features.4", dropout=0.,
                                 **SMALL), False, set()),
    "convnext": (lambda: vision(convnext, "features.1"), False, {"features.0.1", "features.2.0"}),
    "vit": (lambda: vision("torchvision.models:VisionTransformer", "encoder.layers.encoder_layer_0", **VIT, **SMALL),
            True, set())}
NAMES = [pytest.param(k, marks=pytest.mark.slow) if k == "mobilenet" else k for k in TABLE]
_models: dict = {}

def made(name):
    "A model of two lanes for one network; one network at a time is kept, since some are large."
    if name not in _models:
        _models.clear()
        config = TABLE[name][0]()
        _models[name] = config, module_model(config, lanes=2, seed=3, blueprints=["norm", "conv_small", "lora"])
    return _models[name]

def batch(config, lanes=2, size=3, dtype=torch.float32):
    g = torch.Generator().manual_seed(5)
    if config.reads == "BL": return torch.randint(config.classes, (size, *config.shape, lanes), generator=g)
    c, *rest = config.shape
    return torch.randn(size, lanes * c, *rest, generator=g, dtype=dtype)

def of_lane(x, i, lanes=2): return x[..., i:i + 1] if x.dtype == torch.int64 else x.chunk(lanes, 1)[i]

def ordinary(config, model, i):
    "What the factory makes for a lane, as the network's user would make it."
    module, path = explore_host(config), config.factory.partition(":")
    assert module.places and path[2]
    with seeded(3, "init", i): return model.host.factory()

def near(a, b, tolerance=1e-5):
    off = float((a - b).detach().abs().max() / b.detach().abs().max().clamp(min=1e-9))
    assert off <= tolerance, off

def grown(model, name):
    first = model.names[0]
    blueprint = next(b for b in ("conv_small", "lora") if b in model.slot(first).blueprints)
    model.germinate(first, blueprint, 1, tempo=0)
    for _ in range(3): model.advance(first, 1, force=True)
    g = torch.Generator().manual_seed(1)
    for p in model.slot(first).banks[blueprint].parameters(): # of lane 1, which is at work
        by_lane(p.data, 2)[1] += .2 * torch.randn(p.shape[0] // 2, *p.shape[1:], generator=g)
    model.fossilize(first, 1, safe=False, force=True)
    return first, blueprint


# ---- the table: network x what a host can do

@pytest.mark.parametrize("name", NAMES)
def test_the_form_is_the_expected_one(name):
    config, model = made(name)
    _, whole, alone = TABLE[name]
    assert model.host.form.whole == whole and bool(model.host.form.why) == whole
    assert alone <= set(model.host.form.alone) and bool(alone) == bool(model.host.form.alone)
    assert tuple(model.names) == host_sites(config) and set(model.names) == set(config.slots)

@pytest.mark.parametrize("name", NAMES)
def test_lanes_equal_copies(name):
    config, model = made(name)
    net, copies = copy.deepcopy(model.host).double(), [ordinary(config, model, i).double() for i in range(2)]
    x = batch(config, dtype=torch.float64)
    def inputs(i): return model.host.read(of_lane(x, i))
    with torch.no_grad():
        near(net.eval()(x), torch.cat([c.eval()(inputs(i)) for i, c in enumerate(copies)], -1))
    g = torch.Generator().manual_seed(2)
    if name == "vit": # its head begins at zero: nothing else would have a gradient
        for c in copies: nn.init.normal_(c.heads.head.weight, std=.1, generator=g)
        by_lane(net.net.template.heads.head.weight.data, 2).copy_(torch.stack([c.heads.head.weight for c in copies]))
    y = net.train()(x)
    each = [c.train()(inputs(i)) for i, c in enumerate(copies)]
    near(y, torch.cat(each, -1))
    w = torch.randn(y.shape, generator=g, dtype=y.dtype)
    (y * w).sum().backward()
    for part, z in zip(w.chunk(2, -1), each): (z * part).sum().backward()
    mine = {k.removeprefix("net.").replace("template.", ""): p.grad for k, p in net.named_parameters()}
    for i, c in enumerate(copies):
        largest = max(float(p.grad.abs().max()) for p in c.parameters() if p.grad is not None)
        for k, p in c.named_parameters():
            if p.grad is None: continue
            off = (by_lane(mine[k], 2)[i].view_as(p) - p.grad).abs().max()
            assert off <= 1e-5 * max(float(p.grad.abs().max()), 1e-4 * largest), (k, float(off))
        state = {k.removeprefix("net.").replace("template.", ""): t for k, t in net.named_buffers()}
        for k, t in c.named_buffers(): near(by_lane(state[k], 2)[i].view_as(t).double(), t.double())

@pytest.mark.parametrize("name", NAMES)
def test_it_grows(name):
    config, model = made(name)
    model.reset([0, 1], 3)
    x = batch(config)
    with torch.no_grad(): before = model.eval()(x)
    first, blueprint = grown(model, name)
    with torch.no_grad(): after = model(x)
    if name != "vit": assert not torch.equal(after.chunk(2, -1)[1], before.chunk(2, -1)[1])
    near(after.chunk(2, -1)[0], before.chunk(2, -1)[0])
    model.train()(x).square().sum().backward()
    for p in model.slot(first).banks[blueprint].parameters():
        assert p.grad is None or not by_lane(p.grad, 2)[0].any()
    assert model.slot(first).state(1).stage.name == "FOSSILIZED"
    model.zero_grad()

@pytest.mark.parametrize("name", NAMES)
def test_it_resumes(name, tmp_path):
    config, model = made(name)
    x = batch(config)
    if not model.slot(model.names[0]).roles(): grown(model, name)
    with torch.no_grad(): said = model.eval()(x)
    save_checkpoint(tmp_path/"model.safetensors", dict(host=config.to_dict()), model=model)
    saved = ModuleHostConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert saved == config and hash(saved) == hash(config)
    other = module_model(saved, lanes=2, seed=9, blueprints=["norm", "conv_small", "lora"])
    load_checkpoint(tmp_path/"model.safetensors", dict(host=saved.to_dict()), model=other)
    with torch.no_grad(): assert torch.equal(other.eval()(x), said)

@pytest.mark.parametrize("name", NAMES)
def test_it_exports(name):
    config, model = made(name)
    if not model.slot(model.names[0]).roles(): grown(model, name)
    x = batch(config)
    for i in range(2):
        mine = of_lane(x, i)
        plain = export_model(model, i, mine)
        assert not any(type(m).__module__.startswith("esper_nb") for m in plain.modules())
        with torch.no_grad(): near(plain(model.host.read(mine)), model.eval()(x).chunk(2, -1)[i])
        with torch.no_grad(): near(plain(model.host.read(mine)), model.lane(i).eval()(mine), 1e-6)


# ---- luck has a seed key

@pytest.mark.parametrize("own", [True, False])
def test_what_a_lane_draws_depends_on_no_neighbour(own):
    config = host(Noisy, ["up"], (1, 8, 8), own=own)
    assert explore_host(config.replace(slots={"up": "BD"})).form.whole == own
    config = config.replace(slots={"up": "BD"})
    model, x = module_model(config, lanes=3, seed=1, blueprints=["norm"]), batch(config, 3)
    one = model.lane(2)
    for _ in range(2):
        together = model.train()(x)
        torch.testing.assert_close(together[:, 20:], one.train()(of_lane(x, 2, 3)))
    assert not torch.equal(model(x), together), "the next batch has luck of its own"
    torch.manual_seed(0)
    state = torch.get_rng_state()
    model(x)
    assert torch.equal(state, torch.get_rng_state()), "nobody else's luck is used up"

# ---- forms

def test_a_form_that_is_not_equal_is_not_used():
    x = torch.rand(2, 1, 8, 8)
    assert find_form(Mixing, x, 1, -1).whole
    assert "does not keep lanes apart" in find_form(Mixing, x, 1, -1).why
    assert "of its own" in find_form(Noisy, x, 1, -1).why
    assert run_on_trial(Noisy(False), x).layers["drop"].draws and not run_on_trial(Noisy(False), x).draws

def test_a_large_network_runs_lane_by_lane_unless_asked():
    config = TABLE["mobilenet"][0]().replace(side_by_side=None)
    assert "more than 1,000,000 parameters" in explore_host(config).form.why
    assert "asked" in explore_host(TABLE["MLP"][0]().replace(side_by_side=False)).form.why

def test_batch_counts_are_each_lanes_own():
    def net(): return nn.Sequential(nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))
    pop = lane_module(net, torch.rand(2, 2, 2, 2), 3, 1, -1)
    reset_lanes(pop, range(3), 0)
    pop.train()(torch.rand(4, 6, 2, 2))
    reset_lanes(pop, [1], 5)
    assert dict(pop.named_buffers())["net.0.num_batches_tracked"].tolist() == [1, 0, 1]
    assert lane(pop, 2).ordinary()[0].num_batches_tracked == 1

def test_hooks_subclasses_and_unusual_settings_have_no_lane_form():
    class Odd(nn.Linear):
        def forward(self, x): return super().forward(x) * 2
    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *a: None)
    odd = [Odd(2, 2), hooked, nn.Embedding(3, 2, padding_idx=0), nn.BatchNorm1d(2, momentum=None), nn.LayerNorm((2, 2))]
    assert [lane_form(m, 2) for m in odd] == [None] * 5
    pop = lane_module(lambda: nn.Sequential(Odd(4, 4), nn.Linear(4, 2)), torch.rand(3, 4), 2)
    assert list(pop.form.alone) == ["0"] and not pop.form.whole

def test_a_frozen_weight_stays_frozen():
    def net():
        m = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        m[0].requires_grad_(False)
        return m
    assert [p.requires_grad for p in lane_module(net, torch.rand(3, 4), 2).parameters()] == [False, False, True, True]


# ---- networks as strangers write them

class Small(nn.Module):
    "One convolution, something in the middle, a head."
    def __init__(self, middle=None):
        super().__init__()
        self.up, self.middle, self.act = nn.Conv2d(1, 6, 3, 2, 1), middle or nn.Identity(), nn.ReLU()
        self.head = nn.Linear(96, 10)
    def forward(self, x): return self.head(self.act(self.middle(self.up(x))).flatten(1))

class Averaging(Small):
    "Assigns its buffer in place of writing into it."
    def __init__(self, grows=False):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.grows = grows
    def forward(self, x):
        h = self.up(x)
        if self.training: self.mean = .5 * self.mean + .5 * h.detach().mean((0, 2, 3))
        h = h - self.mean.view(1, -1, 1, 1)
        if self.grows: self.mean = self.mean.repeat(2)
        return self.head(self.act(h).flatten(1))

class Deciding(Small):
    "Its own forward depends on numbers, which a batch of generated data need not show."
    def forward(self, x): return super().forward(x / x.abs().max() if x.abs().max() > 50 else x)

class ScaledIf(nn.Module):
    def forward(self, x): return x / x.abs().max() if x.abs().max() > 50 else x

class Cast(Small):
    "All in another precision."
    def __init__(self, dtype):
        super().__init__()
        self.to(getattr(torch, dtype))
    def forward(self, x): return super().forward(x.to(self.head.weight.dtype)).float()

class Words(nn.Module):
    "Torch's own encoder, whose layers are called with several arguments."
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0., batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 10)
    def forward(self, x): return self.head(self.encoder(x.squeeze(1)).mean(1))

def frozen_front():
    net = Small()
    net.up.requires_grad_(False)
    return net

def pruned():
    net = Small(nn.Conv2d(6, 6, 1))
    for layer in (net.middle, net.head): prune.random_unstructured(layer, "weight", .3)
    return net

STRANGERS = {
    "pruned": pruned,
    "weight norm": lambda: Small(nn.utils.parametrizations.weight_norm(nn.Conv2d(6, 6, 1))),
    "spectral norm": lambda: Small(nn.utils.parametrizations.spectral_norm(nn.Conv2d(6, 6, 1))),
    "a hook's weight": lambda: Small(nn.utils.spectral_norm(nn.Conv2d(6, 6, 1))),
    "a hook's norm": lambda: Small(nn.utils.weight_norm(nn.Conv2d(6, 6, 1))),
    "lazy": lambda: Small(nn.Sequential(nn.LazyConv2d(6, 1), nn.LazyBatchNorm2d())),
    "frozen front": frozen_front, "bfloat16": lambda: Cast("bfloat16"), "double": lambda: Cast("float64")}

def of_digits(factory, slot="act", **settings):
    host = ModuleHostConfig(factory, [slot], **settings)
    return get_task("digits").replace(name="own", host=host, slots=(slot,), batch_size=256)

def fitted(task, lanes=3):
    "Train four epochs, with a seed in the middle lane that is blended in during the last one."
    pop = new_population(task, FitConfig(lanes=lanes))
    slot = task.slots[0]
    blueprint = next(b for b in pop.model.slot(slot).blueprints if b != "norm")
    def controller(pop, last):
        epoch = int(pop.epoch.max())
        how = {1: Decision("germinate", slot, blueprint), 2: Decision("advance", slot),
               3: Decision("advance", slot, settings=dict(force=True))}.get(epoch)
        return [how if i == 1 else None for i in range(lanes)]
    return pop, list(fit(pop, 4, controller=controller))

@pytest.mark.parametrize("name", STRANGERS)
def test_networks_as_strangers_write_them_train_and_are_exported(name):
    task = of_digits(STRANGERS[name])
    pop, records = fitted(task)
    losses = [float(r.train.loss.mean()) for r in records]
    assert losses[-1] < losses[0] and pop.epoch.tolist() == [4] * 3
    x, _ = next(iter(pop.data.evaluate("test", 20)))
    with torch.no_grad(): told = pop.model.eval()(x.repeat(1, 3, 1, 1)).view(20, 3, -1)
    for i in range(3):
        with torch.no_grad(): torch.testing.assert_close(export_model(pop.model, i, bake=True)(x), told[:, i],
                                                         atol=1e-5, rtol=1e-4)

def test_a_buffer_that_is_assigned_is_kept_lane_by_lane_as_side_by_side():
    ends = []
    for side in (False, None):
        pop, _ = fitted(of_digits(Averaging, side_by_side=side))
        net = pop.model.host
        assert net.form.whole is (side is False)
        found = next(t for k, t in net.named_buffers() if k.endswith("mean")).view(3, 6)
        assert bool((found.abs().sum(1) > .01).all())
        ends.append(found)
    torch.testing.assert_close(*ends, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match=r"shape of mean after a pass=\(12,\), expected \(6,\)"):
        per_lane(lambda: Averaging(grows=True), 2)(torch.rand(2, 2, 8, 8))

def test_a_forward_that_depends_on_numbers_runs_lane_by_lane():
    x, wild = torch.rand(3, 1, 8, 8), torch.rand(3, 1, 8, 8)
    wild[0] = 1000
    both = torch.cat([x, wild], 1)
    for make in (Deciding, lambda: Small(ScaledIf())):
        net = lane_module(make, x, 2)
        apart = torch.cat([net.ordinary(i)(one) for i, one in enumerate((x, wild))], 1)
        torch.testing.assert_close(net(both), apart)
    form = find_form(Deciding, x)
    assert form.whole and "numbers that differ" in form.why
    assert list(find_form(lambda: Small(ScaledIf()), x).alone) == ["middle"]
    assert not find_form(Small, x).whole

@pytest.mark.parametrize("read", [float, int, bool, Tensor.item, Tensor.tolist, Tensor.numpy, np.asarray])
def test_a_number_is_read_in_whatever_way(read):
    class Reading(Small):
        def forward(self, x): return super().forward(x / 2 if read(x.detach().amax()) > 50 else x)
    form = find_form(Reading, torch.rand(3, 1, 8, 8))
    assert form.whole and "numbers that differ" in form.why

def test_a_layer_that_is_called_with_several_arguments_is_exported_with_its_seed():
    task = of_digits(Words, "encoder.layers.1")
    pop, _ = fitted(task)
    x, _ = next(iter(pop.data.evaluate("test", 20)))
    net = export_model(pop.model, 1, bake=True)
    with torch.no_grad(): told = pop.model.eval()(x.repeat(1, 3, 1, 1)).view(20, 3, -1)[:, 1]
    for one in (net, copy.deepcopy(net)):
        with torch.no_grad(): torch.testing.assert_close(one(x), told, atol=1e-5, rtol=1e-4)
    assert not any(type(m).__module__.startswith("esper_nb") for m in net.modules())

@pytest.mark.parametrize("slot, words", [("encoder.layers.0", "reads attributes of its first layer"),
                                         ("encoder.layers.1.norm2", "uses the weights of its parts itself")])
def test_a_slot_that_its_owner_cannot_use_is_refused_before_training(slot, words):
    with pytest.raises(ValueError, match=f"slot='{slot}', expected .*: Transformer.*{words}"):
        new_population(of_digits(Words, slot), FitConfig(lanes=1))
    with pytest.raises(ValueError, match=words): attach_slots(Words(), [slot], torch.rand(2, 1, 8, 8))

def test_what_no_seed_or_task_can_use_is_refused_with_the_way_out():
    net, x = nn.Sequential(nn.Sequential(nn.Embedding(5, 4)), nn.Linear(4, 4)), torch.arange(6).view(2, 3)
    net.first = net[0]
    with pytest.raises(ValueError, match="slot='first', expected the name of a submodule; did you mean '0'"):
        attach_slots(net, ["first"], x)
    with pytest.raises(ValueError, match="output of 0=torch.int64, expected features in floating point"):
        attach_slots(nn.Sequential(nn.Identity(), net), ["0"], x[..., None])
    dense, pair = nn.Conv2d(1, 2, 1), nn.Bilinear(8, 8, 10)
    for one, words in ((dense, "one number for each class"), (pair, "does not take")):
        config = ModuleHostConfig(lambda one=one: nn.Sequential(one), ["0"], (1, 8, 8), 10)
        with pytest.raises(ValueError, match=rf"{words}.*grows in a loop of yours: attach_slots\(net"):
            explore_host(config)

@pytest.mark.parametrize("slots, example, words", [
    ([1], torch.ones(2, 8), r"slots=\[1\], expected a list of submodule names.*named_modules"),
    ([nn.Tanh()], torch.ones(2, 8), r"slots=\[Tanh\(\)\], expected a list of submodule names"),
    ([], torch.ones(2, 8), "expected a list of submodule names"),
    (["0"], torch.ones(2, 9), r"example=torch.float32 \(2, 9\), expected what Sequential takes.*RuntimeError"),
    (["0"], torch.ones(2, 8, dtype=torch.int64), "example=torch.int64 .*expected what Sequential takes"),
    (["0"], torch.ones(2, 8).numpy(), "example=ndarray, expected what Sequential takes.*TypeError")])
def test_slots_and_examples_that_do_not_fit_are_named(slots, example, words):
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    with pytest.raises(ValueError, match=words): attach_slots(net, slots, example, layouts={"0": "BD"})
    assert not vars(net[0])["_forward_hooks"]


class ByName(nn.Module):
    "Takes its inputs by name alone."
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(64, 8), nn.Linear(8, 10)
    def forward(self, *, table, scale=1.): return self.head(self.body(table * scale).relu())

class ByPlace(nn.Module):
    "Does what the refusal of `ByName` says."
    def __init__(self):
        super().__init__()
        self.net = ByName()
    def forward(self, table): return self.net(table=table)

def test_a_network_that_takes_its_inputs_by_name_is_told_how_to_be_used():
    x, words = torch.rand(2, 64), r"takes table by name alone.*forward\(self, table\) returns self.net\(table=table\)"
    with pytest.raises(ValueError, match=words): attach_slots(ByName(), ["body"], x, layouts=dict(body="BD"))
    host = ModuleHostConfig(ByName, ["body"], (64, 1, 1), 10, "BC")
    with pytest.raises(ValueError, match=words): explore_host(host)
    assert attach_slots(ByPlace(), ["net.body"], x, layouts={"net.body": "BD"})(x).shape == (2, 10)
    assert explore_host(host.replace(factory=ByPlace, slots=["net.body"])).places["net.body"].channels == 8

@pytest.mark.parametrize("example", [torch.ones(8), torch.ones(2, 3, 4, 5, 8)], ids=["unbatched", "volumes"])
def test_features_that_no_layout_fits_ask_for_another_layer(example):
    with pytest.raises(ValueError, match="output of 0=.*expected .* or \\(B, D\\).*name a layer with such an output"):
        attach_slots(nn.Sequential(nn.Linear(8, 8)), ["0"], example)

def test_the_only_lane_of_a_network_is_named():
    model = attach_slots(nn.Sequential(nn.Linear(8, 8)), ["0"], torch.ones(2, 8), layouts={"0": "BD"})
    with pytest.raises(ValueError, match="lanes=3, expected 0, the only lane, or None"): export_model(model, 3)

def test_a_scripted_network_is_refused_with_the_way_out():
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)), torch.ones(2, 8)
    with warnings.catch_warnings(action="ignore"): scripted, traced = torch.jit.script(net), torch.jit.trace(net, x)
    for one, slot in ((scripted, "0"), (traced, "0"), (nn.Sequential(scripted), "0.0")):
        with pytest.raises(ValueError, match=f"slot='{slot}', expected a part of an ordinary network.*export_model"):
            attach_slots(one, [slot], x, layouts={slot: "BD"})

def test_a_verb_names_the_curve_and_the_reason_that_are_known():
    model = attach_slots(nn.Sequential(nn.Linear(8, 8)), ["0"], torch.ones(2, 8), layouts={"0": "BD"})
    with pytest.raises(ValueError, match="curve='cosine', expected one of Curve.LINEAR, Curve.COSINE"):
        model.germinate("0", "norm", curve="cosine")
    model.germinate("0", "norm")
    with pytest.raises(ValueError, match="reason='old', expected one of Reason.ASKED"): model.prune("0", reason="old")

@pytest.mark.parametrize("inside", [False, True])
def test_seeds_of_a_network_under_autocast_keep_the_type_of_its_weights(inside):
    class Net(nn.Sequential):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16, enabled=inside or torch.is_autocast_enabled("cpu")):
                return super().forward(x)
    net, x = Net(nn.Linear(8, 8), nn.Linear(8, 3)), torch.ones(2, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        model = attach_slots(net, ["0"], x, layouts={"0": "BD"})
        model.germinate("0", "mlp_small", tempo=0)
        for _ in range(3): model.advance("0", force=True)
        y = model.train()(x)
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.slot("0").banks["mlp_small"].body.down.weight.grad.any()

@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_network_that_is_converted_without_its_slots_is_named_and_with_them_runs(dtype):
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)), torch.ones(2, 8)
    model = attach_slots(net, ["0"], x, layouts={"0": "BD"})
    net.to(dtype)
    model(x.to(dtype)) # nothing has grown
    model.germinate("0", "norm", tempo=0)
    for _ in range(3): model.advance("0", force=True)
    with pytest.raises(RuntimeError, match=f"slot 0: its seeds are torch.float32 .*features {dtype}.*not the network"):
        model(x.to(dtype))
    assert model.to(dtype)(x.to(dtype)).dtype == dtype

def in_a_dictionary():
    class Nested(Small):
        def forward(self, x): return dict(out=dict(scores=super().forward(x)))
    return Nested()

@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("factory, words", [
    (lambda: torch.compile(Small(), backend="eager"), "OptimizedModule.*neither compiled nor scripted"),
    (lambda: torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(64, 10))), "neither compiled nor scripted"),
    (lambda: Small(torch.jit.script(nn.Conv2d(6, 6, 1))), "RecursiveScriptModule.*neither compiled nor scripted"),
    (in_a_dictionary, "expected a tensor, or some in a flat dictionary.*in a loop of yours")])
def test_a_network_that_no_lane_can_be_of_is_refused(factory, words):
    with pytest.raises(ValueError, match=words): explore_host(ModuleHostConfig(factory, ["act"], (1, 8, 8), 10))

class OwnLanes(Small):
    "A network whose authors, too, have something that they call lanes."
    def __init__(self, lanes=4):
        super().__init__()
        self.lanes = lanes
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)

def of_modules(): return OwnLanes(nn.ModuleList([nn.Conv2d(6, 6, 1)]))

@pytest.mark.parametrize("factory", [OwnLanes, of_modules])
def test_a_network_with_lanes_of_its_own_runs_lane_by_lane(factory):
    x = torch.rand(3, 1, 8, 8)
    assert attach_slots(factory(), ["act"], x).lanes == 1
    config = ModuleHostConfig(factory, ["act"], (1, 8, 8), 10)
    assert "a `lanes` of its own" in explore_host(config).form.why
    with pytest.warns(UserWarning, match="calls: a pass changes this Python number, which all lanes share"):
        model = module_model(config, lanes=2)
    model(x.repeat(1, 2, 1, 1)).sum().backward()
    assert model.lanes == 2 and model.lane(1)(x).shape == (3, 10)

class Checkpointed(Small):
    def __init__(self, reentrant=False):
        super().__init__()
        self.reentrant = reentrant
    def forward(self, x): return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=self.reentrant)

@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_is_for_lanes_side_by_side(reentrant):
    x = torch.rand(3, 2, 8, 8).requires_grad_()
    config = ModuleHostConfig(Checkpointed, ["act"], (1, 8, 8), 10, kwargs=dict(reentrant=reentrant))
    module_model(config, lanes=2)(x).sum().backward()
    apart = config.replace(side_by_side=False)
    module_model(apart)(x[:, :1]).sum().backward()
    with pytest.raises(ValueError, match="layers that backward computes again=.*switch off checkpointing"):
        module_model(apart, lanes=2)

def test_factories_without_a_name_of_their_own_are_not_mixed_up():
    def closure(width):
        def net(): return mlp(width)
        return net
    for first, second in ((lambda: mlp(4), lambda: mlp(8)), (partial(mlp, 4), partial(mlp, 8)),
                          (closure(4), closure(8))):
        a, b = (ModuleHostConfig(f, ["1"], (64, 1, 1), 10, reads="BC") for f in (first, second))
        assert [explore_host(h).places["1"].channels for h in (a, b)] == [4, 8] and a != b
        assert ModuleHostConfig(first, ["1"], (64, 1, 1), 10, reads="BC") == a
    with pytest.raises(ValueError, match="factory='Small', expected the class or a function"):
        ModuleHostConfig(Small(), ["act"])
    with pytest.raises(ValueError, match="makes='NoneType', expected a module"):
        explore_host(ModuleHostConfig(lambda: None, ["act"], (1, 8, 8), 10))

def test_a_blueprint_without_weights_and_a_decision_that_is_none_are_refused_in_a_line():
    for name, make in dict(still=lambda c: nn.Conv2d(c, c, 1).requires_grad_(False), bare=lambda c: nn.ReLU()).items():
        with pytest.raises(ValueError, match=f"parameters of {name} that train=0"): plain_blueprint(name, "BCHW")(make)
    pop = new_population("digits", FitConfig(lanes=2))
    for wrong in ("germinate", [("germinate", "r0c0", "norm")]):
        with pytest.raises(ValueError, match="decision of lane 0=.*expected a Decision"):
            list(fit(pop, 1, controller=lambda pop, last, wrong=wrong: [wrong, None]))

def test_a_network_that_is_all_frozen_is_refused_before_anything_is_made():
    with pytest.raises(ValueError, match="that train=0, expected some.*attach_slots"):
        new_population(of_digits(lambda: Small().requires_grad_(False)), FitConfig(lanes=2))


# ---- training, environments, settings

def own_task(name="GRU", **changes):
    config = TABLE[name][0]()
    return get_task("digits").replace(name="own", host=config, slots=tuple(host_sites(config)), **changes)

def germinate(pop, last):
    slot = pop.model.names[0]
    if last is not None: return [None] * pop.lanes
    return [Decision("germinate", slot, pop.model.slot(slot).blueprints[i % 2], settings=dict(tempo=1))
            if i % 2 else None for i in range(pop.lanes)]

@pytest.mark.costly
@pytest.mark.parametrize("name", ["MLP", "GRU", "own reshape"])
def test_fit_does_not_depend_on_groups(name):
    task = own_task(name)
    if name == "MLP": task = None
    if task is None:
        x = torch.randn(300, 64, generator=torch.Generator().manual_seed(0))
        task = task_from_arrays(x, (x[:, :10]).argmax(1), host=TABLE["MLP"][0]().replace(shape=None, classes=None))
        assert task.host.shape == (64, 1, 1) and task.classes == 10
    losses = []
    for width in (1, 4):
        config = FitConfig(lanes=4, seed=1, workers=1, width=width, governor=None)
        pop = new_population(task, config, blueprints=["norm", "mlp_small", "conv_small"])
        losses.append([r.train.loss for r in fit(pop, 2, controller=germinate)])
        assert pop.last is not None and all(v.isfinite().all() for v in pop.last.signals.values())
    for a, b in zip(*losses): torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)

def test_an_environment_takes_it():
    env = GrowVecEnv(task=own_task("GRU"), num_envs=2, horizon=2, limit=128, workers=1)
    env.reset(seed=0)
    for _ in range(2): obs, reward, *_ = env.step(env.action_space.sample() * 0)
    assert torch.as_tensor(reward).isfinite().all() and env.parts[0][1].model.names == ("mid",)
    state = env.state_dict()
    assert json.loads(json.dumps(state["config"]["task"]))["host"]["factory"].endswith(":Recurrent")

class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0., batch_first=True)
        self.head = nn.Linear(8, 10)
    def forward(self, x): return self.head(self.layer(x)[:, -1])

class Translating(Attending):
    "Torch's whole transformer, which calls its parts one by one."
    def __init__(self):
        super().__init__()
        self.layer = nn.Transformer(8, 2, 2, 1, 16, 0., batch_first=True)
    def forward(self, x): return self.head(self.layer(x, x)[:, -1])

class Several(nn.Module):
    "Returns a dictionary, as many networks of other libraries do."
    def __init__(self, order=("logits", "features")):
        super().__init__()
        self.order = order
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        h = self.body(x).flatten(1)
        found = dict(logits=self.head(h), features=h)
        return {k: found[k] for k in self.order} if isinstance(self.order, tuple) else tuple(found.values())

def several_as_tuple(): return Several(order=None)

@pytest.mark.parametrize("side", [True, False], ids=["side by side", "lane by lane"])
@pytest.mark.parametrize("factory, output", [(Several, "logits"), (several_as_tuple, 0)])
def test_a_network_that_returns_several_tensors_trains_on_the_one_that_is_named(factory, output, side):
    host = ModuleHostConfig(factory, slots=["body.2"], shape=(1, 8, 8), classes=10, output=output, side_by_side=side)
    assert ModuleHostConfig.from_dict(host.to_dict()) == host and explore_host(host).form.whole is not side
    task = get_task("digits").replace(name="several", host=host, slots=("body.2",), epochs=2)
    pop = new_population(task, FitConfig(lanes=2, workers=1))
    for _ in fit(pop, 2): pass
    assert evaluate(pop.model, task, pop.data, "test").accuracy_pp.min() > 60
    x = torch.rand(5, 1, 8, 8)
    pop.model.eval()
    mine = export_model(pop.model, 1, x)(x) # compares the two outputs
    scores = pop.model.lane(1)(x)
    torch.testing.assert_close(mine[output], scores)
    assert len(mine) == 2 and not any(type(m).__module__.startswith("esper_nb") for m in
                                      export_model(pop.model, 1).modules())
    with pytest.raises(ValueError, match=f"output={output!r}"): explore_host(host.replace(output=None))
    with pytest.raises(ValueError, match="output='typo', expected"): explore_host(host.replace(output="typo"))

def test_a_controller_may_return_none_for_nothing_now():
    pop = new_population("digits", FitConfig(lanes=2, epochs=2, workers=1))
    def once(pop, last): return [Decision("germinate", pop.model.names[0], "norm"), None] if last is None else None
    assert [len(r.decided) for r in fit(pop, controller=once)] == [1, 0]

def test_a_slot_inside_a_layer_that_runs_alone_makes_the_whole_run_alone():
    found = explore_host(host(Attending, {"layer": "BLD"}, (1, 8, 8), "BLD"))
    assert not found.form.whole and list(found.form.alone) == ["layer"]
    found = explore_host(host(Translating, {"layer.encoder.layers.1": "BLD"}, (1, 8, 8), "BLD"))
    assert found.form.whole and "lies in a layer" in found.form.why


# ---- blueprints from ordinary functions

def small_conv(c): return nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.BatchNorm2d(c), nn.GELU(), nn.Dropout(.1))
def signal(c, reach=2): return nn.Sequential(nn.ConstantPad1d((reach, 0), 0.), nn.Conv1d(c, c, reach + 1))
def vector(c): return nn.Sequential(nn.Linear(c, c), nn.Softmax(-1), nn.Linear(c, c))
def recurrent(c): return Causal(c)

class Causal(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.rnn = nn.GRU(c, c, batch_first=True)
    def forward(self, x): return x + self.rnn(x)[0]

@pytest.fixture
def own_blueprints():
    plain = dict(own_conv=("BCHW", small_conv), own_signal=("BCL", signal), own_vector=("BC", vector),
                 own_steps=("BLD", recurrent))
    for name, (layout, factory) in plain.items(): plain_blueprint(name, layout)(factory)
    yield plain
    for name, (layout, _) in plain.items(): forget_blueprint(name, SEED_LAYOUTS[layout])

@pytest.mark.costly
@pytest.mark.parametrize("name", ["own_conv", "own_signal", "own_vector", "own_steps"])
def test_an_ordinary_function_is_a_blueprint(own_blueprints, name):
    layout, factory = own_blueprints[name]
    family = SEED_LAYOUTS[layout]
    assert get_blueprint(name, family).declared == sum(p.numel() for p in factory(FAMILIES[family]).parameters())
    assert blueprint_size(name, family, 8) == sum(p.numel() for p in factory(8).parameters())
    key = "own reshape" if family == "cnn" else "GRU"
    config = TABLE[key][0]()
    model, x = module_model(config, lanes=2, seed=1, blueprints=[name]), batch(config)
    slot = model.names[0]
    with torch.no_grad(): before = model.eval()(x)
    model.germinate(slot, name, 1, tempo=0)
    for _ in range(3): model.advance(slot, 1, force=True)
    model.fossilize(slot, 1, safe=False, force=True)
    with torch.no_grad():
        after = model(x)
        near(export_model(model, 1, of_lane(x, 1))(model.host.read(of_lane(x, 1))), after[:, 10:], 1e-6)
    assert torch.equal(after[:, :10], before[:, :10]) and not torch.equal(after[:, 10:], before[:, 10:])
    twin = module_model(config, lanes=4, seed=1, blueprints=[name])
    twin.germinate(slot, name, 1, tempo=0)
    for k, p in twin.slot(slot).banks[name].named_parameters():
        mine = model.slot(slot).banks[name].get_parameter(k)
        assert torch.equal(by_lane(p, 4)[1], by_lane(mine, 2)[1]), "a seed is a function of its lane"
    one, other = (next(make_blueprint(name, family, 8).parameters()) for _ in range(2))
    assert not torch.equal(one, other), "drawn from the stream of the moment"

def hasty(inplace=True):
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(inplace), nn.Conv2d(8, 8, 3, padding=1),
                         nn.ReLU(inplace), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))

@pytest.mark.parametrize("lanes", [[0, 1, 2], [1]], ids=["all lanes", "some lanes"])
@pytest.mark.parametrize("side", [True, False], ids=["side by side", "lane by lane"])
def test_a_slot_before_a_layer_that_works_in_place_keeps_what_it_read(side, lanes):
    def trained(inplace):
        config = ModuleHostConfig(hasty, ["0", "2"], (1, 8, 8), 10, kwargs=dict(inplace=inplace), side_by_side=side)
        task = get_task("digits").replace(name="hasty", host=config, slots=("0", "2"))
        config = FitConfig(lanes=3, epochs=3, batch_size=32, width=3, workers=1)
        pop, results = new_population(task, config, data=get_task("digits").load("cpu", limit=128)), []
        for k, name in zip(pop.model.names, ("conv_small", "norm")): pop.model.germinate(k, name, lanes)
        for r in fit(pop, controller=lambda pop, last: [None] * 3): # who decides is told where it may grow
            results += [r.train.loss, *(r.signals[k] for k in pop.model.names)]
            for k in pop.model.names: pop.model.advance(k, lanes, force=True)
        return results
    for one, other in zip(trained(True), trained(False), strict=True): assert torch.equal(one, other)

class Writing(nn.Module):
    "Works in place on features, or does the same with copies."
    def __init__(self, how, inplace):
        super().__init__()
        self.up, self.mid, self.head = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 10)
        self.how, self.copies = how, not inplace
    def forward(self, x):
        h = self.up(x).clone() if self.copies else self.up(x)
        if self.how == "relu": h = F.relu(h, inplace=True)
        elif self.how == "dropout": h = F.dropout(h, .3, self.training, inplace=True) # writes in training alone
        elif self.how == "add": h += x
        elif self.how == "noise":
            if self.training: h += torch.rand_like(h)
        elif self.how == "sometimes":
            if h[0, 0, 0, 0] > 0: h *= 2
        else: h[:, :, 0] = 0
        return self.head(self.mid(h).relu().mean((2, 3)))

@pytest.mark.parametrize("lanes", [[0, 1, 2], [1]], ids=["all lanes", "some lanes"])
@pytest.mark.parametrize("side", [True, False], ids=["side by side", "lane by lane"])
@pytest.mark.parametrize("how", ["relu", "dropout", "add", "index", "noise", "sometimes"])
def test_a_forward_that_works_in_place_changes_no_loss_and_no_signal(how, side, lanes):
    plain_blueprint("ends_in_tanh", "BCHW")(lambda c: nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.Tanh()))
    def trained(inplace):
        config = ModuleHostConfig(Writing, ["up", "mid"], (1, 8, 8), 10, kwargs=dict(how=how, inplace=inplace),
                                  side_by_side=side)
        task = get_task("digits").replace(name="writing", host=config, slots=("up", "mid"))
        config = FitConfig(lanes=3, epochs=4, batch_size=32, width=3, workers=1)
        pop, results = new_population(task, config, data=get_task("digits").load("cpu", limit=64)), []
        pop.model.germinate("up", "ends_in_tanh", lanes, tempo=1)
        for r in fit(pop, controller=lambda pop, last: [None] * 3): # who decides is told where it may grow
            results += [r.train.loss, *(r.signals[k] for k in pop.model.names)]
            if pop.model.slot("up").state(lanes[0]).stage != Stage.HOLDING: pop.model.advance("up", lanes, force=True)
        x = torch.rand(2, 1, 8, 8)
        export_model(pop.model, 1, x, bake=True).train()(x).sum().backward()
        return results
    try:
        for one, other in zip(trained(True), trained(False), strict=True): assert torch.equal(one, other)
    finally: forget_blueprint("ends_in_tanh", "cnn")

@pytest.mark.parametrize("layer", [nn.ReLU(True), nn.Dropout(.3, True), nn.RReLU(inplace=True)], ids=repr)
def test_a_layer_that_works_in_place_trains_behind_any_seed(layer):
    plain_blueprint("ends_in_tanh", "BC")(lambda c: nn.Sequential(nn.Linear(c, c), nn.Tanh()))
    try:
        net, x = nn.Sequential(nn.Linear(6, 8), layer, nn.Linear(8, 2)), torch.randn(4, 6)
        model = attach_slots(net, ["0"], x, blueprints=["ends_in_tanh"], layouts={"0": "BD"}).train()
        model.germinate("0", "ends_in_tanh", tempo=0)
        for _ in range(3):
            model.advance("0", force=True)
            model(x).sum().backward()
        assert model.slot("0").state(0).stage == Stage.HOLDING and net[0].weight.grad.any()
    finally: forget_blueprint("ends_in_tanh", "transformer")

class Viewing(nn.Module):
    "Its `view` asks for contiguous features."
    def __init__(self, layout):
        super().__init__()
        self.layout, self.act, self.head = layout, nn.ReLU(), nn.Linear(128, 10)
        self.up = dict(BCHW=partial(nn.Conv2d, 1, 2, 3, padding=1), BDL=partial(nn.Conv1d, 8, 16, 3, padding=1),
                       BLD=partial(nn.Linear, 8, 16))[layout]()
    def forward(self, x):
        h = self.act(self.up(x))
        return self.head(h.view(h.size(0), -1))

@pytest.mark.parametrize("side", [True, False], ids=["side by side", "lane by lane"])
@pytest.mark.parametrize("lanes", [[0, 1, 2], [0, 2]], ids=["all lanes", "some lanes"])
@pytest.mark.parametrize("layout, reads", [("BCHW", "BCHW"), ("BDL", "BCL"), ("BLD", "BLD")])
def test_a_view_of_the_features_works_with_every_seed_and_after_the_export(own_blueprints, layout, reads, lanes, side):
    config = ModuleHostConfig(Viewing, {"act": layout}, (1, 8, 8), 10, reads, dict(layout=layout), side)
    empty, x = module_model(config, lanes=3), batch(config, 3)
    for name in {"norm", *own_blueprints}.intersection(empty.slot("act").blueprints):
        model = copy.deepcopy(empty)
        model.germinate("act", name, lanes, tempo=0)
        for _ in range(3):
            model.advance("act", lanes, force=True)
            model(x).sum().backward()
        with torch.no_grad():
            told = model.eval()(x).chunk(3, -1)[2]
            near(export_model(model, 2, of_lane(x, 2, 3), bake=True)(model.host.read(of_lane(x, 2, 3))), told)

@pytest.mark.parametrize("lanes", [[0, 1, 2, 3], [0, 1]], ids=["all lanes", "some lanes"])
def test_a_layer_that_works_in_place_leaves_the_hosts_features_alone(lanes):
    def trained(inplace):
        def factory(c): return nn.Sequential(nn.ReLU(inplace), nn.Conv2d(c, c, 3, padding=1))
        plain_blueprint("hasty", "BCHW")(factory)
        try:
            task = get_task("digits")
            config = FitConfig(lanes=4, epochs=2, batch_size=32, width=4, workers=1)
            pop = new_population(task, config, data=task.load("cpu", limit=128))
            slot = pop.model.names[0]
            pop.model.germinate(slot, "hasty", lanes)
            for _ in range(2): pop.model.advance(slot, lanes, force=True)
            return [r.train.loss for r in fit(pop)], pop.model.state_dict()
        finally: forget_blueprint("hasty", "cnn")
    (losses, state), (plain_losses, plain_state) = trained(True), trained(False)
    assert all(map(torch.equal, losses, plain_losses)) and len(losses) == 2
    assert all(torch.equal(v, plain_state[k]) for k, v in state.items())


# ---- in another process

FILE = """
from torch import nn
def make_net(width=12):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
"""
BEGIN = """
    import torch
    import my_nets
    from esper_nb.control.envs import EnvConfig
    from esper_nb.grow.module_hosts import ModuleHostConfig
    from esper_nb.learn.learner import PPOConfig
    from esper_nb.run.recipes import RunConfig
    from esper_nb.run.runs import begin_run
    from esper_nb.train.tasks import get_task
    def make_net(width): return my_nets.make_net(width)
    for factory in (my_nets.make_net, make_net):
        host = ModuleHostConfig(factory, {"2": "BD"}, shape=(1, 8, 8), classes=10, kwargs=dict(width=16))
        task = get_task("digits").replace(name="own", host=host, slots=("2",))
        env = EnvConfig(task=task, num_envs=2, horizon=2, limit=128, workers=1, seed=1)
        run = begin_run(RunConfig("own", env, PPOConfig(num_steps=2, num_updates=2, num_minibatches=1)), "runs")
        run.save()
        print(run.folder.path)
"""
RESUME = """
    import sys
    from esper_nb.run.runs import open_run
    run = open_run(sys.argv[1], trust=True)
    print(run.env.task.host.factory, run.env.parts[0][1].model.names)
    try: open_run(sys.argv[2], trust=True)
    except ValueError as e: print(e)
"""

def python(code, folder, *args):
    env = dict(PYTHONPATH=f"{ROOT}:{folder}", PATH="/usr/bin:/bin", OMP_NUM_THREADS="1", HOME=str(folder))
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), *args], cwd=folder, env=env, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()

@pytest.mark.slow
def test_a_fresh_process_goes_on_and_one_without_the_function_says_so(tmp_path):
    (tmp_path/"my_nets.py").write_text(FILE)
    resumed, refused = python(RESUME, tmp_path, *python(BEGIN, tmp_path))
    assert resumed == "my_nets:make_net ('2',)"
    assert "lives in a notebook or a script; put it in a file" in refused
