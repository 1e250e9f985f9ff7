"A seed that the network passes by is named, in whatever way its hook was lost."
import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import fork_ranks
from torch import nn
from torch.nn.utils import parametrizations, prune

from esper_nb.grow import attach_slots, export_model

pytestmark = pytest.mark.usefixtures("one_thread")
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
DID_NOT = "its seed did not run, although the network did"
LOST = "its submodule was replaced, merged or lost its hooks"


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

def grown(net, name="1", alpha=True):
    "With a seed that runs; blended in or in training."
    model = attach_slots(net, [name], X, blueprints=["mlp_small"], layouts={name: "BD"})
    model.germinate(name, "mlp_small", tempo=1)
    for _ in range(1 + alpha): model.advance(name, force=True)
    model.train()
    if alpha:
        model(X)
        model.tick()
        with torch.no_grad():
            for p in model.slot(name).banks.parameters(): p.add_(.1)
    return model


def test_a_compiled_network_is_refused_and_compiling_later_is_right():
    net = network()
    net.compile(backend="eager")
    with pytest.raises(ValueError, match="compiled=.*attach its slots, then compile"): grown(net)
    outer = torch.compile(network(), backend="eager")
    with pytest.raises(ValueError, match="attach its slots, then compile"): grown(outer, "_orig_mod.1")
    inner = network()
    inner[1].compile(backend="eager")
    with pytest.raises(ValueError, match="attach its slots, then compile"): grown(inner)


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="dynamo of torch 2.11 meets named tuples that are not filled")
@pytest.mark.parametrize("inside", [False, True])
def test_compiled_after_the_slots_they_run_and_are_not_compiled_again(inside):
    counts = []
    def backend(graph, example):
        counts[-1] += 1
        return graph
    model = grown(network())
    expected = model(X)
    (model.host if inside else model).compile(backend=backend)
    for _ in range(4):
        counts.append(0)
        assert torch.equal(model(X), expected)
        with warnings.catch_warnings(action="error"):
            assert model.unrun() == {} and model.changes_output("1") and model.status().problems == []
            model.tick()
    assert counts[0] > 0 and counts[1:] == [0] * 3


def test_a_network_that_was_compiled_from_outside_is_named_after_its_training():
    net = network()
    compiled = torch.compile(net, backend="eager")
    net.train()
    compiled(X)
    model = grown(net, alpha=False)
    with warnings.catch_warnings(action="error"): model.tick() # nothing has run
    optimizer = torch.optim.SGD(model.host.parameters(), lr=.1)
    ran = len(ran_of(model))
    compiled(X).square().sum().backward()
    optimizer.step()
    if len(ran_of(model)) > ran: pytest.skip("this version of torch looks at hooks again")
    with pytest.warns(UserWarning, match=DID_NOT): model.tick()
    assert any(DID_NOT in p for p in model.status().problems)
    model(X) # uncompiled: it runs
    assert model.status().problems == []

def ran_of(model): return [k for k, h in model.hooks.items() if h.ran.yes]


def replace(model): model.host[1] = nn.Tanh()
def clear_hooks(model): vars(model.host[1])["_forward_hooks"].clear()
def take_off(model): model.handles[0].remove()
def delete(model): del model.host[1]

@pytest.mark.parametrize("lose", [replace, clear_hooks, take_off, delete])
@pytest.mark.parametrize("run", [False, True])
def test_a_lost_hook_is_named_whether_the_network_has_run_since_or_not(lose, run):
    model = grown(network())
    assert model.changes_output("1") and model.status().problems == [] and model.unrun() == {}
    lose(model)
    if run: model(X)
    assert [p.startswith(f"slot 1: {LOST}") for p in model.status().problems] == [True]
    with pytest.warns(UserWarning, match=LOST): assert not model.changes_output("1")
    with pytest.raises(RuntimeError, match=f"slot 1: {LOST}"): export_model(model, 0, bake=True)
    with warnings.catch_warnings(action="error"): model.tick() # told once
    assert model.status().problems


def test_a_tick_names_it():
    model = grown(network())
    replace(model)
    with pytest.warns(UserWarning, match=LOST): model.tick()


def test_a_submodule_that_is_not_called_any_more_is_named():
    class Skips(nn.Module):
        def __init__(self): super().__init__(); self.a, self.b, self.skip = nn.Linear(8, 8), nn.Linear(8, 3), False
        def forward(self, x): return self.b(x if self.skip else self.a(x))
    model = grown(Skips(), "a")
    model.host.skip = True
    model(X)
    assert any(DID_NOT in p for p in model.status().problems)
    with pytest.warns(UserWarning, match=DID_NOT): model.tick()
    assert model.status().problems and not model.changes_output("a") # also in the epoch after
    model.host.skip = False
    model(X)
    assert model.status().problems == [] and model.changes_output("a")


def test_merged_adapters_are_named():
    peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install peft")
    net = network()
    adapted = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["0"]))
    model = grown(adapted, "base_model.model.0")
    assert model.changes_output("base_model.model.0")
    merged = adapted.merge_and_unload()
    merged(X)
    assert any(LOST in p for p in model.status().problems)


def test_an_adapter_around_a_submodule_with_a_slot_keeps_it_running():
    class Around(nn.Module):
        def __init__(self, inner): super().__init__(); self.inner = inner
        def forward(self, x): return self.inner(x) + 1
    model = grown(network())
    model.host[1] = Around(model.host[1])
    assert model.unrun() == {}
    model(X)
    with warnings.catch_warnings(action="error"): model.tick()
    assert model.changes_output("1")


def test_nothing_is_named_where_nothing_is_wrong():
    with warnings.catch_warnings(action="error"):
        model = grown(network(), alpha=False)
        for _ in range(3): model.tick() # without a pass
        twin = copy.deepcopy(model)
        for m in (model, twin):
            m(X)
            m.tick()
            m.eval()
            assert m.unrun() == {} and m.status().problems == []
        empty = attach_slots(network(), ["1"], X, layouts={"1": "BD"})
        empty.host[1] = nn.Tanh() # no seed: nothing is lost
        empty(X)
        empty.tick()
        assert empty.status().problems == []


def test_a_second_slot_at_one_place_is_refused():
    net = network()
    model = grown(net)
    with pytest.raises(ValueError, match="slot='1', expected a submodule without one.*detach_slots"): grown(net)
    grown(net, "0") # another place is one
    model.take_hooks_off()
    other = grown(net)
    assert other.changes_output("1")
    grown(copy.deepcopy(other).take_hooks_off())


# ---- ranks

needs_gloo = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")

@needs_gloo
def test_ranks_share_the_gradients_of_seeds_or_are_told_to(tmp_path):
    one, other = fork_ranks(_trained_on_a_rank, 2, tmp_path)
    assert torch.equal(one["weights"], other["weights"]) and one["alpha"] == other["alpha"] == 1
    assert one["moved"] and "slot 1: DistributedDataParallel has the network without its slots" in one["told"]

def _trained_on_a_rank(rank, world, tell):
    model = grown(network(), alpha=False)
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=.1)
    seed = model.slot("1").banks["mlp_small"].body.up.weight
    before = seed.detach().clone()
    for step in range(6):
        if step == 3: model.advance("1", force=True)
        optimizer.zero_grad()
        wrapped(X[2 * rank:2 * rank + 2]).square().sum().backward() # each rank has data of its own
        optimizer.step()
        model.tick()
    wrong, told = nn.parallel.DistributedDataParallel(grown(network()).host), ""
    try: wrong(X)
    except RuntimeError as e: told = str(e)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    tell(dict(weights=weights, alpha=model.slot("1").state(0).alpha, moved=bool((seed != before).any()), told=told))

@needs_gloo
@pytest.mark.filterwarnings("ignore")
def test_a_network_in_shards_grows_no_seed_in_silence(tmp_path):
    for told in fork_ranks(_sharded_on_a_rank, 2, tmp_path):
        for k, said in told.items(): assert "fully_shard has" in said and "DistributedDataParallel(model" in said, k

def _sharded_on_a_rank(rank, world, tell):
    from torch.distributed.fsdp import fully_shard
    told = {}
    def attempt(k, do):
        told[k] = ""
        try: do()
        except RuntimeError as e: told[k] = str(e)
    for k, part in dict(network=lambda m: m.host, layer=lambda m: m.host[0], model=lambda m: m).items():
        empty = attach_slots(network(), ["1"], X, blueprints=["mlp_small"], layouts={"1": "BD"})
        fully_shard(part(empty))
        empty(X) # nothing grows: nothing is lost
        attempt(f"{k}, then a seed", lambda: empty.germinate("1", "mlp_small"))
        assert empty.slot("1").state(0).stage.name == "DORMANT"
    planted = grown(network(), alpha=False)
    fully_shard(planted.host)
    attempt("a seed, then shards", lambda: planted.host(X)) # the network itself, which runs its hooks
    tell(told)


# ---- weights that a hook computes

def pruned(layer): prune.l1_unstructured(layer, "weight", .5)
def pruned_twice(layer): prune.l1_unstructured(layer, "weight", .3); prune.random_unstructured(layer, "weight", .3)
def weight_norm(layer): parametrizations.weight_norm(layer)
def orthogonal(layer): parametrizations.orthogonal(layer)
@pytest.mark.filterwarnings("ignore")
def old_weight_norm(layer): nn.utils.weight_norm(layer)
def old_spectral_norm(layer): nn.utils.spectral_norm(layer)

@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("change", [pruned, pruned_twice, weight_norm, orthogonal, old_weight_norm, old_spectral_norm])
@pytest.mark.parametrize("at", [0, 2])
def test_computed_weights_are_copied_and_exported(change, at):
    net = network()
    change(net[at])
    model = grown(net)
    model(X).square().sum().backward()
    held = net[at].weight
    model.eval()
    expected = model(X)
    for one in (copy.deepcopy(model), model.lane(0)): assert torch.equal(one.eval()(X), expected)
    plain = export_model(model, 0, X, bake=True)
    torch.testing.assert_close(plain(X), expected, rtol=1e-6, atol=1e-6)
    assert {k for k, _ in plain[at].named_parameters()} == {"weight", "bias"}
    assert type(plain[at]) is nn.Linear and not vars(plain[at])["_forward_pre_hooks"]
    exported = torch.export.export(plain, (X,)).module()
    torch.testing.assert_close(exported(X), expected, rtol=1e-6, atol=1e-6)
    model.train()(X).square().sum().backward() # the host is as it was
    assert held.shape == net[at].weight.shape


def test_a_hook_of_ones_own_that_computes_a_weight_is_a_line():
    net = network()
    net[0].weight_raw = nn.Parameter(net[0].weight.detach().clone())
    del net[0].weight
    def double(layer, args): layer.weight = layer.weight_raw * 2
    net[0].register_forward_pre_hook(double)
    model = grown(net)
    model.train()(X)
    copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="0: a hook computes weight before every pass"):
        export_model(model, bake=True)
