"Leaving with what has grown: the plain module of a lane, to the bit; files, other runtimes, and what is refused."
import copy
import importlib.util
import pickle
import subprocess
import sys

import pytest
import torch
import torchvision
from torch import nn
from torch.nn.utils import prune

from esper_nb.core import conv2d, per_lane, unfold
from esper_nb.grow import (
    Blend, CNNConfig, GPTConfig, GrowingModel, Host, Site, attach_slots, blueprint, export_model, forget_blueprint,
    list_blueprints, new_host)

torch.set_num_threads(1)
CONFIGS = dict(cnn=CNNConfig(in_channels=1, size=8, base=8, blocks=2, classes=4),
               gpt=GPTConfig(vocab=16, d=16, heads=2, layers=2, block=8, segments=2, dropout=.1))
SITES = dict(cnn=["r0c1", "r1c0"], gpt=["r0c0", "r0c1"])
FAMILY = dict(cnn="cnn", gpt="transformer")
ONNX = all(importlib.util.find_spec(k) for k in ("onnx", "onnxscript", "onnxruntime"))

def shake(model, size=.2):
    g = torch.Generator().manual_seed(1)
    for p in model.parameters(): p.data += size * torch.randn(p.shape, generator=g)

def make_fossil(model, slot, name, lane=0, blend=Blend.ADD, goal=1.):
    model.germinate(slot, name, lane, blend=blend, tempo=0, goal=goal)
    for _ in range(3): model.advance(slot, lane, force=True)
    model.fossilize(slot, lane, safe=False, force=True)

def batch(kind, lanes=1, size=5):
    g = torch.Generator().manual_seed(2)
    if kind == "gpt": return torch.randint(16, (size, 8, lanes), generator=g)
    return torch.randn(size, lanes, 8, 8, generator=g).contiguous(memory_format=torch.channels_last)

def grown(kind, names, blend=Blend.ADD, goal=1., lanes=1):
    model = GrowingModel(new_host(CONFIGS[kind], lanes), SITES[kind], names)
    for i in range(lanes):
        for j, slot in enumerate(model.names): make_fossil(model, slot, names[(i + j) % len(names)], i, blend, goal)
    shake(model)
    return model.eval()

def same(a, b): assert torch.equal(a, b), (a - b).abs().max()
def hooks(net): return [h for m in net.modules() for k in ("_forward_hooks", "_forward_pre_hooks") for h in vars(m)[k]]
def run(net, *x):
    with torch.no_grad(): return net(*x)


# ---- the bits

@pytest.mark.parametrize("blend, goal", [(Blend.ADD, 1.), (Blend.ADD, .3), (Blend.MULTIPLY, .7), (Blend.GATE, .6)])
@pytest.mark.parametrize("kind", ["cnn", "gpt"])
def test_every_blueprint_and_blend_has_the_bits_of_the_lane(kind, blend, goal):
    for name in list_blueprints(family=FAMILY[kind]):
        model, x = grown(kind, [name], blend, goal), batch(kind)
        net = export_model(model, 0, x if kind == "cnn" else x[..., 0])
        same(run(net, x if kind == "cnn" else x[..., 0]), run(model, x))
        assert not any(type(m).__module__.startswith("esper_nb") for m in net.modules()), name
        assert not hooks(net)

@pytest.mark.parametrize("kind", ["cnn", "gpt"])
def test_a_lane_of_several_has_its_own_bits_and_those_of_the_wide_model_to_rounding(kind):
    names = [k for k in list_blueprints(family=FAMILY[kind]) if k != "noop"]
    model, x = grown(kind, names, lanes=5), batch(kind, 5)
    before = {k: t.clone() for k, t in model.state_dict().items()}
    wide = run(model, x).unflatten(-1, (5, -1))
    for i in range(5):
        mine = unfold(x, 5)[:, i] if kind == "cnn" else x[..., i]
        z = run(export_model(model, i, mine), mine)
        same(z, run(model.lane(i).eval(), mine))
        torch.testing.assert_close(z, wide[..., i, :], rtol=1e-5, atol=1e-5)
    for k, t in model.state_dict().items(): same(t, before[k])

def test_export_leaves_the_mode_of_the_model_and_evaluates():
    model = grown("cnn", ["conv_light"]).train()
    net = export_model(model)
    assert model.training and model.slot("r0c1").training and not any(m.training for m in net.modules())
    x = batch("cnn")
    same(run(net, x), run(model.eval(), x))

def test_an_exported_network_can_be_trained_on():
    net, x = export_model(grown("gpt", ["mlp_small"])), batch("gpt")[..., 0]
    net.train()
    net(x).square().mean().backward()
    assert all(p.grad is not None for p in net.parameters())
    assert any(isinstance(m, nn.Dropout) and m.p == .1 for m in net.modules())

def test_a_model_without_seeds_is_its_host():
    for kind in CONFIGS:
        model, x = GrowingModel(new_host(CONFIGS[kind]), SITES[kind]).eval(), batch(kind)
        net = export_model(model)
        assert not any("grown" in k for k in net.state_dict())
        same(run(net, x if kind == "cnn" else x[..., 0]), run(model.host.eval(), x))

def test_masks_and_modules_repeated_by_lane():
    config = CNNConfig(in_channels=1, size=8, base=8, blocks=2, classes=4, masked=True)
    host = new_host(config, 3)
    host.blind(1, [0])
    @blueprint("plain_conv", "cnn", 10)
    def plain_conv(channels, lanes):
        def one(): return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels))
        return per_lane(one, lanes)
    try:
        model = GrowingModel(host, ["r0c0"], ["plain_conv"])
        make_fossil(model, "r0c0", "plain_conv", 1)
        shake(model)
        x = batch("cnn")
        same(run(export_model(model, 1, x), x), run(model.lane(1).eval(), x))
    finally: forget_blueprint("plain_conv", "cnn")

class Chain(Host):
    "A host of somebody else's."
    def __init__(self):
        super().__init__()
        self.lanes, self.sites = 1, (Site("r0c0", 8, .5, "block end"),)
        self.first, self.last = conv2d(1, 8, 3, padding=1), conv2d(8, 4, 3)

    def piece(self, i, h): return self.first(h).relu() if i == 0 else self.last(h).flatten(2).mean(2)

def test_a_host_of_your_own():
    model, x = GrowingModel(Chain(), ["r0c0"], ["conv_light"]), batch("cnn")
    make_fossil(model, "r0c0", "conv_light")
    shake(model)
    same(run(export_model(model, 0, x), x), run(model.eval(), x))


# ---- a network with slots attached

class Residual(nn.Module):
    "Two paths, a shared layer, and features that are read from an attribute."
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.path = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        h = self.stem(x)
        h = h + self.path(h)
        return self.head(h.mean((2, 3)))

@pytest.mark.parametrize("make, slots", [
    pytest.param(lambda: torchvision.models.resnet18(num_classes=4),
                 {"layer2": "conv_light", "layer1": "norm", "layer2.0": "attention"}, marks=pytest.mark.slow),
    (lambda: torchvision.models.mobilenet_v3_small(num_classes=4), {"features.3": "depthwise"}),
    (Residual, {"path": "conv_heavy", "path.0": "bottleneck"})])
def test_a_network_of_your_own_keeps_what_has_grown(make, slots):
    torch.manual_seed(0)
    host, x = make(), torch.randn(2, 3, 32, 32)
    model = attach_slots(host, {k: [v] for k, v in slots.items()}, x)
    for i, (k, v) in enumerate(slots.items()):
        make_fossil(model, k, v, blend=list(Blend)[i], goal=.6 if i else 1.)
    for s in model.slots.values(): shake(s, .1)
    model.eval()
    net = export_model(model, 0, x)
    same(run(net, x), run(model, x))
    assert not any(type(m).__module__.startswith("esper_nb") for m in net.modules())
    assert not hooks(net)
    assert hooks(model.host)     # of which it is a copy
    same(run(pickle.loads(pickle.dumps(net)), x), run(model, x))
    same(run(copy.deepcopy(net), x), run(model, x))
    same(run(torch.export.export(net, (x,)).module(), x), run(model, x))

def test_detaching_what_nobody_hears_needs_no_word():
    host, x = Residual().eval(), torch.randn(2, 3, 8, 8)
    model = attach_slots(host, ["path"], x, blueprints=["conv_light"])
    model.germinate("path", "conv_light"); model.advance("path")
    assert model.detach_slots() is host and not hooks(host)


# ---- what is refused

def test_a_seed_on_its_way_is_refused_or_baked():
    model, x = GrowingModel(new_host(CONFIGS["cnn"]), ["r0c1"], ["conv_light"]), batch("cnn")
    model.germinate("r0c1", "conv_light", tempo=4)
    model.advance("r0c1"); same(run(export_model(model), x), run(model.eval(), x))     # in training: not heard
    model.advance("r0c1", force=True); model.tick()
    model.within = .5
    with pytest.raises(RuntimeError, match=r"r0c1: its conv_light is BLENDING at alpha 0.375 .* fossilize or prune"):
        export_model(model)
    same(run(export_model(model, bake=True), x), run(model.eval(), x))
    with model.disable_seeds(): same(run(export_model(model), x), run(model.host.eval(), x))

@pytest.mark.parametrize("where", ["host", "seed", "buffer"])
def test_numbers_that_are_not_finite_are_refused_by_name(where):
    model = grown("cnn", ["conv_light"])
    if where == "host": model.host.head.bias.data[1] = torch.inf; name = "host.head.bias"
    if where == "seed":
        model.slot("r0c1").banks["conv_light"].body[0].weight.data[0] = torch.nan
        name = "grown.r0c1.seed.body.0.weight"
    if where == "buffer": model.host.blocks[0][1].running_var[0] = torch.nan; name = "host.blocks.0.1.running_var"
    with pytest.raises(RuntimeError) as said: export_model(model)
    assert name in str(said.value) or "off by nan" in str(said.value)


# ---- where it goes

@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cnn", "gpt"])
def test_it_lives_without_this_package(kind, tmp_path):
    "Pickled whole, and as a program of `torch.export`: read by a process that cannot import us."
    names = ["conv_heavy", "attention"] if kind == "cnn" else ["mlp_small", "attention"]
    model, x = grown(kind, names, Blend.GATE, .5), batch(kind)
    x = x if kind == "cnn" else x[..., 0]
    net = export_model(model, 0, x)
    torch.save(dict(net=net, x=x, y=run(net, x)), tmp_path/"net.pt")
    batches = torch.export.Dim("batch")
    torch.export.save(torch.export.export(net, (x,), dynamic_shapes=({0: batches},)), tmp_path/"net.pt2")
    code = """
import sys, torch
torch.set_num_threads(1)
sys.modules["esper_nb"] = None
d = torch.load(sys.argv[1] + "/net.pt", weights_only=False)
other = torch.export.load(sys.argv[1] + "/net.pt2").module()
with torch.no_grad():
    assert torch.equal(d["net"](d["x"]), d["y"]) and torch.equal(other(d["x"]), d["y"])
    assert torch.equal(other(d["x"][:2]), d["net"](d["x"][:2]))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

@pytest.mark.parametrize("kind", ["cnn", pytest.param("gpt", marks=pytest.mark.slow)])
def test_it_compiles(kind):
    net, x = export_model(grown(kind, ["norm", "attention"], Blend.GATE, .5)), batch(kind)
    x = x if kind == "cnn" else x[..., 0]
    torch.compiler.reset()
    torch.testing.assert_close(run(torch.compile(net, backend="aot_eager", fullgraph=True), x), run(net, x))

@pytest.mark.skipif(not ONNX, reason="onnx, onnxscript and onnxruntime are not installed: pip install esper_nb[export]")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("blend", list(Blend))
@pytest.mark.parametrize("kind", ["cnn", "gpt", pytest.param("attached", marks=pytest.mark.slow)])
def test_onnx_says_the_same(kind, blend, tmp_path):
    import onnxruntime
    if kind == "attached":
        x = torch.randn(2, 3, 16, 16)
        model = attach_slots(Residual(), {"path": ["conv_light"]}, x)
        make_fossil(model, "path", "conv_light", blend=blend, goal=.6)
        shake(model)
    else:
        names = ["conv_light", "attention"] if kind == "cnn" else ["mlp_small", "norm"]
        model, x = grown(kind, names, blend, .6), batch(kind)
        x = x if kind == "cnn" else x[..., 0]
    net = export_model(model, 0, x)
    batches = ({0: torch.export.Dim("batch")},)
    torch.onnx.export(net, (x,), tmp_path/"net.onnx", dynamo=True, dynamic_shapes=batches, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path/"net.onnx", providers=["CPUExecutionProvider"])
    said, = session.run(None, {session.get_inputs()[0].name: x[:2].numpy()})
    torch.testing.assert_close(torch.from_numpy(said), run(net, x[:2]), rtol=1e-4, atol=1e-4)


# ---- with its slots alive

@pytest.mark.parametrize("kind, lanes", [("cnn", 3), ("cnn", 1), ("gpt", 1),
                                         pytest.param("gpt", 3, marks=pytest.mark.slow)])
def test_a_model_with_live_slots_is_traced_and_copied(kind, lanes):
    names = ["norm", "attention"]
    model, x = GrowingModel(new_host(CONFIGS[kind], lanes), SITES[kind], names), batch(kind, lanes)
    for i in range(lanes):
        model.germinate(model.names[0], names[i % 2], i, blend=Blend.GATE, tempo=4)
        model.advance(model.names[0], i); model.advance(model.names[0], i, force=True)
    model.tick()
    shake(model)
    model.eval()
    traced = torch.export.export(copy.deepcopy(model), (x,)).module()     # nothing has run yet: no route is known
    y = run(model, x)
    torch.testing.assert_close(run(traced, x), y)
    same(run(copy.deepcopy(model), x), y)
    assert model.train()(x).sum().requires_grad     # no stand-in of the tracer is left
    model(x).sum().backward()

def test_a_network_with_attached_slots_is_traced_and_copied():
    x = torch.randn(2, 3, 8, 8)
    model = attach_slots(Residual(), ["path"], x, blueprints=["conv_light"])
    model.germinate("path", "conv_light", tempo=2)
    model.advance("path"); model.advance("path", force=True); model.tick()
    model.eval()
    traced = torch.export.export(model, (x,)).module()
    same(run(traced, x), run(model, x))
    same(run(copy.deepcopy(model), x), run(model, x))

def test_what_is_switched_off_is_not_dropped_either():
    model = attach_slots(Residual(), ["path"], torch.randn(2, 3, 8, 8), blueprints=["conv_light"])
    make_fossil(model, "path", "conv_light")
    with model.disable_seeds(), pytest.raises(RuntimeError, match="would be lost"): model.detach_slots()


# ---- networks and seeds that others have worked on

def attached(net, x):
    model = attach_slots(net, ["1"], x, blueprints=["mlp_small"], layouts={"1": "BD"})
    make_fossil(model, "1", "mlp_small")
    shake(model.slots)
    return model.eval()

@pytest.mark.filterwarnings("ignore")
def test_a_quantised_network_is_exported():
    x = torch.randn(4, 8)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    model = attached(torch.ao.quantization.quantize_dynamic(net, {nn.Linear}), x)
    same(run(export_model(model, 0, x), x), run(model, x))

def test_a_pruned_seed_is_copied_and_exported():
    x = torch.randn(4, 8)
    model = attached(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)), x)
    layer = model.slot("1").banks["mlp_small"].body.up
    prune.l1_unstructured(layer, "weight", .5)
    model(x).sum().backward() # the weight of the layer is no leaf now
    expected = run(model, x)
    for one in (copy.deepcopy(model), model.lane(0)): same(run(one.eval(), x), expected)
    plain = export_model(model, 0, x)
    same(run(plain, x), expected)
    assert not hooks(plain) and max(float((p == 0).float().mean()) for p in plain.parameters()) == .5
