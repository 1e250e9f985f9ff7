"Tasks: losses against plain references, presets, and every kind of bad input."
import json

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional as F

from esper_nb.grow import CNNConfig, count_parameters
from esper_nb.train import (
    Task, accuracy_pp, class_counts, correct_counts, create_model, get_task, lane_cross_entropy, list_tasks, tasks)
from esper_nb.train.tasks import check_slots, host_sites

shapes = st.tuples(st.integers(1, 9), st.sampled_from([(), (1,), (4,)]), st.integers(1, 5), st.integers(2, 7),
                   st.integers(0, 99))


def problem(b, length, n, k, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(b, *length, n * k, generator=g) * 3, torch.randint(0, k, (b, *length, n), generator=g)


@settings(deadline=None, max_examples=25)
@given(shapes)
def test_loss_and_counts_equal_a_loop_over_lanes(s):
    (logits, y), n, k = problem(*s), s[2], s[3]
    leaf = logits.clone().requires_grad_()
    loss, pp = lane_cross_entropy(leaf, y, n), accuracy_pp(logits, y, n)
    each, total = class_counts(logits, y, n), correct_counts(logits, y, n)
    assert loss.shape == total.shape == pp.shape == (n,) and each.shape == (n, k)
    assert each.dtype == total.dtype == torch.int64
    loss.sum().backward()
    for i in range(n):
        own = logits.unflatten(-1, (n, k))[..., i, :].flatten(0, -2).clone().requires_grad_()
        target = y[..., i].flatten()
        plain = F.cross_entropy(own, target)
        plain.backward()
        torch.testing.assert_close(loss[i], plain, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(leaf.grad.unflatten(-1, (n, k))[..., i, :].flatten(0, -2), own.grad, atol=1e-6,
                                   rtol=1e-5)
        right = own.argmax(1) == target
        assert total[i] == right.sum() and torch.equal(each[i], torch.bincount(target[right], minlength=k))
        torch.testing.assert_close(pp[i], 100 * right.float().mean())


@settings(deadline=None, max_examples=15)
@given(shapes)
def test_shared_labels_are_the_same_labels_for_all(s):
    (logits, y), n = problem(*s), s[2]
    wide = y[..., :1].expand(*y.shape[:-1], n)
    for f in (lane_cross_entropy, class_counts, correct_counts, accuracy_pp):
        assert torch.equal(f(logits, y[..., 0], n), f(logits, wide, n))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loss_is_fp32_under_autocast(dtype):
    logits, y = problem(8, (), 4, 5, 0)
    with torch.autocast("cpu", dtype): low = lane_cross_entropy(logits.to(dtype), y, 4)
    assert low.dtype == torch.float32 and torch.equal(low, lane_cross_entropy(logits.to(dtype).float(), y, 4))


# presets

@pytest.mark.parametrize("name", list_tasks())
def test_preset_is_whole(name):
    task = get_task(name)
    assert task.name == name and Task.from_dict(json.loads(json.dumps(task.to_dict()))) == task
    assert task.replace(epochs=3).epochs == 3
    sites = host_sites(task.host)
    assert set(task.slots) <= set(sites)
    if name == "tinystories": return  # large; its host is the same class as that of prose
    model = create_model(name, sites, num_lanes=2)
    h = task.host
    if isinstance(h, CNNConfig): x = torch.randn(2, 2 * h.in_channels, h.size, h.size)
    else: x = torch.randint(0, h.vocab, (2, h.block, 2))
    out = model.eval()(x)
    assert out.shape[-1] == 2 * task.classes and out.isfinite().all()
    opt = dict(sgd=torch.optim.SGD, adam=torch.optim.Adam, adamw=torch.optim.AdamW)[task.optimizer]
    opt(model.parameters(), **task.optimizer_options)


@pytest.mark.parametrize("name, sites, parameters", [
    ("cifar_baseline", 6, 6_000), ("cifar_scale", 10, 100_000), ("cifar_impaired", 6, 77), ("cifar_minimal", 3, 164),
    ("cifar_deep_multichannel", 10, 100_000), ("cifar_deep_impaired", 10, 1_100)])
def test_cifar_family_has_the_sizes_it_claims(name, sites, parameters):
    task = get_task(name)
    assert len(host_sites(task.host)) == sites and task.batch_size == 128
    assert abs(count_parameters(create_model(name, task.slots).host) / parameters - 1) < .1


def test_data_and_host_fit():
    for name in ("digits", "digits_impaired", "prose"):
        task = get_task(name)
        data = task.load(limit=100)
        x, y = data.epoch(0, range(2), 0, task.batch_size)[0]
        out = create_model(task, task.slots, num_lanes=2)(x)
        assert task.loss(out, y, 2).shape == task.metric(out, y, 2).shape == (2,)
    made_up = get_task("cifar_impaired").load(limit=200, synthetic=True)
    assert made_up.num_train == 200 and made_up.shape == (3, 32, 32)


# the factory


def test_model_is_ready_to_use():
    model = create_model(get_task("digits"), ["r1c0", "r0c2", "r0c1"], torch.device("cpu"), 3)
    assert model.names == ("r1c0", "r0c1", "r0c2") and model.lanes == 3  # in the order of depth
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in model.parameters() if p.dim() == 4)


def test_the_device_is_refused_before_anything_is_built(monkeypatch):
    monkeypatch.setattr(tasks, "new_host", lambda *a: pytest.fail("built a host"))
    monkeypatch.setattr(tasks, "host_sites", lambda *a: pytest.fail("looked at a host"))
    for device in ("cuda0", "meta", 3, "cuda:77"):
        with pytest.raises((ValueError, RuntimeError)): create_model("digits", ["r0c0"], device)
    with pytest.raises(ValueError): get_task("digits").load("cuda0")


ok = dict(task="digits", slots=["r0c0"])
host_dict = CNNConfig(in_channels=1, size=8, base=2, blocks=2, pools=1).to_dict()
task_dict = get_task("digits").to_dict()

bad = {
    "malformed slot": (
        lambda: create_model("digits", ["mid"]),
        ValueError, ["slot='mid'", "expected r<row>c<column>", "such as 'r0c1'"]),
    "cuda:77": (
        lambda: create_model(**ok, device="cuda:77"),
        RuntimeError, ["'cuda:77'", "available" if not torch.cuda.is_available() else "out of range", "use"]),
    "missing stories": (
        lambda: get_task("tinystories").load(root="/nowhere"),
        FileNotFoundError, ["/nowhere/tinystories.txt", "expected a UTF-8 text", "save TinyStories"]),
    "unknown key in the host": (
        lambda: Task.from_dict(task_dict | dict(host=host_dict | dict(blok=1))),
        ValueError, ["'blok'", "did you mean 'blocks'"]),
    "slots of another host": (
        lambda: get_task("digits").replace(slots=("r0c8",)),
        ValueError, ["slots=['r0c8']", "expected sites of this host", "r0c0"]),
    "logits that lanes cannot share": (
        lambda: lane_cross_entropy(torch.zeros(4, 7), torch.zeros(4, dtype=torch.int64), 2),
        ValueError, ["logits.shape=(4, 7)", "expected a last axis", "2 lanes"]),
}

@pytest.mark.parametrize("case", bad)
def test_bad_input_names_value_expectation_and_fix(case):
    call, kind, words = bad[case]
    with pytest.raises(kind) as e: call()
    for w in words: assert w in str(e.value), str(e.value)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=8, unique=True))
def test_slots_come_back_row_major(places):
    names = [f"r{r}c{c}" for r, c in places]
    assert check_slots(names) == tuple(f"r{r}c{c}" for r, c in sorted(places))


# learning

def train(name, lanes, epochs):
    task = get_task(name); data = task.load(); model = create_model(task, task.slots, num_lanes=lanes)
    opt = torch.optim.SGD(model.parameters(), **task.optimizer_options | dict(lr=.02)) # no schedule, no clipping
    for e in range(epochs):
        for x, y in data.epoch(0, range(lanes), e, task.batch_size):
            opt.zero_grad(); task.loss(model(x), y, lanes).sum().backward(); opt.step()
    model.eval()
    with torch.no_grad():
        right = sum(correct_counts(model(x.repeat(1, lanes, 1, 1)), y, lanes) for x, y in data.evaluate("test", 261))
    return 100 * right / len(data.y["test"])


@pytest.mark.slow
def test_digits_can_be_learned_and_the_impaired_host_cannot():
    good, poor = (train(name, 4, get_task(name).epochs) for name in ("digits", "digits_impaired"))
    print(good, poor)
    assert good.mean() > 96 and good.min() > 94 and poor.max() < 45
