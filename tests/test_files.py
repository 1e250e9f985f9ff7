"Data of your own: folders, tables, arrays, datasets and texts; what is refused, and how they are cut."
import csv
import importlib.util
import json
import random

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from PIL import Image

from esper_nb.grow import export_model
from esper_nb.train import (
    Examples, FitConfig, Task, create_model, evaluate, example_data, from_arrays, from_dataset, get_task,
    new_population, own_source, read_folder, read_own, read_table_file, register_task, run_epoch, split_examples,
    stratified_split, task_from_arrays, task_from_dataset, task_from_folder, task_from_path, task_from_table,
    task_from_text)

torch.set_num_threads(1)

def pictures(folder, n=12, size=8, mode="RGB"):
    g = np.random.default_rng(0)
    for k, name in enumerate(("dark", "light")):
        (folder/name).mkdir(parents=True)
        for i in range(n):
            shape = (size, size, 3) if mode == "RGB" else (size, size)
            Image.fromarray((g.integers(0, 100, shape) + 150 * (k % 2)).astype("uint8")).save(folder/name/f"{i}.png")
    return folder

def table(path, rows=40, sep=","):
    g = random.Random(0)
    with open(path, "w", newline="") as f:
        w = csv.writer(f, delimiter=sep)
        w.writerow(["a", "b", "kind"])
        for i in range(rows): w.writerow([g.gauss(i % 2, .3), 1000 * g.gauss(0, 1) - 5000, ["no", "yes"][i % 2]])
    return path


# ---- parts

@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(3, 40), min_size=2, max_size=6), st.floats(.05, .3), st.floats(.05, .3), st.integers(0, 9))
def test_parts_are_disjoint_whole_stratified_and_the_same_again(counts, heldout, test, seed):
    y = torch.cat([torch.full((n,), c) for c, n in enumerate(counts)])
    y = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))]
    parts = stratified_split(y, heldout, test)
    assert torch.cat(parts).sort().values.tolist() == list(range(len(y)))
    for c, n in enumerate(counts):
        of = [int((y[p] == c).sum()) for p in parts]
        assert min(of) >= 1 and abs(of[1] - n * heldout) <= 1 and abs(of[2] - n * test) <= 1
    torch.manual_seed(seed)
    for a, b in zip(parts, stratified_split(y, heldout, test)): assert torch.equal(a, b)

@settings(deadline=None, max_examples=12)
@given(st.integers(1, 4), st.floats(-1e5, 1e5), st.floats(1e-3, 1e5), st.integers(0, 5))
def test_columns_are_standardised_by_the_training_part_alone(columns, middle, width, seed):
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(60, columns, generator=g, dtype=torch.float64) * width + middle).float()
    span = float((x.amax(0) - x.amin(0)).min() / x.abs().amax())
    assume(span > 0) # a width below the steps of float32 leaves a constant
    e = from_arrays(x, [i % 3 for i in range(60)])
    d, (parts, _) = example_data(e), split_examples(e)
    got = torch.cat([b for b, _ in d.evaluate("heldout", 7)]).flatten(1)
    seen = x[parts.train].double()
    assume(bool((seen.amax(0) > seen.amin(0)).all())) # a column that is constant there tells nothing, and is left out
    want = (x[parts.heldout].double() - seen.mean(0)) / seen.std(0, correction=0)
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-5 / span + 1e-4)


# ---- sources

def test_pictures_of_a_folder(tmp_path):
    folder = pictures(tmp_path/"pics")
    (folder/".cache").mkdir(); (folder/"dark/.DS_Store").touch()
    e = read_folder(folder)
    assert e.x.shape == (24, 8, 8, 3) and e.classes == ("dark", "light") and e.y.tolist() == [0] * 12 + [1] * 12
    first = np.asarray(Image.open(folder/"dark/0.png"))
    assert np.array_equal(e.x[0], first)
    assert read_folder(folder, 6).x.shape == (24, 6, 6, 3)

def test_grey_pictures_have_one_channel(tmp_path):
    assert read_folder(pictures(tmp_path/"pics", mode="L")).x.shape == (24, 8, 8, 1)

@pytest.mark.parametrize("sep", [",", ";", "\t"])
def test_a_table(tmp_path, sep):
    e = read_table_file(table(tmp_path/"t.csv", sep=sep))
    assert e.x.shape == (40, 1, 1, 2) and e.classes == ("no", "yes") and e.y[:4].tolist() == [0, 1, 0, 1]
    assert read_table_file(tmp_path/"t.csv", columns=["b"]).x.shape == (40, 1, 1, 1)
    assert float(e.x[0, 0, 0, 1]) == pytest.approx(float((tmp_path/"t.csv").read_text().splitlines()[1].split(sep)[1]))

@pytest.mark.skipif(not all(map(importlib.util.find_spec, ("pandas", "pyarrow"))),
                    reason="pandas and pyarrow are not installed: pip install esper_nb[tables]")
def test_a_parquet_table_is_its_csv_table(tmp_path):
    import pandas
    pandas.read_csv(table(tmp_path/"t.csv")).to_parquet(tmp_path/"t.parquet")
    assert torch.equal(read_table_file(tmp_path/"t.parquet").x, read_table_file(tmp_path/"t.csv").x)

@pytest.mark.parametrize("shape, kept", [((30, 5), (30, 1, 1, 5)), ((30, 8, 8), (30, 8, 8, 1)),
                                         ((30, 8, 8, 3), (30, 8, 8, 3)), ((30, 1, 8, 8), (30, 8, 8, 1))])
def test_arrays_tensors_and_datasets_are_the_same_examples(shape, kept):
    x, y = np.random.default_rng(0).normal(size=shape).astype("float32"), np.arange(30) % 3
    e = from_arrays(x, y)
    assert e.x.shape == kept
    assert torch.equal(from_arrays(torch.tensor(x), torch.tensor(y)).x, e.x)
    d = from_dataset(list(zip(torch.tensor(x), y.tolist())))
    assert torch.equal(d.x, e.x) and torch.equal(d.y, e.y)

def test_a_dataset_of_torchvision(tmp_path):
    from torchvision.datasets import ImageFolder
    folder = pictures(tmp_path/"pics")
    e = from_dataset(ImageFolder(folder))
    assert torch.equal(e.x, read_folder(folder).x) and torch.equal(e.y, read_folder(folder).y)


# ---- what is refused

def write(path, text): path.write_text(text); return path

def with_file(p, name, content):
    "Pictures, and one more file."
    pictures(p/"x")
    if isinstance(content, str): (p/"x"/name).write_text(content)
    else: content.save(p/"x"/name)
    return p/"x"

def cells(p, text): return read_table_file(write(p/"t.csv", text))

BAD = {
    "no folder": (lambda p: read_folder(p/"gone"), FileNotFoundError, "gone is not a folder"),
    "other files": (lambda p: read_folder(with_file(p, "dark/a.txt", "hi")), ValueError, "a.txt.*move others away"),
    "no square": (lambda p: read_folder(with_file(p, "dark/!.png", Image.new("RGB", (8, 6)))), ValueError,
                  "size of .*dark/!.png"),
    "rows too long": (lambda p: cells(p, "a,k\n" + "1,x,y\n" * 5), ValueError, "row 2 has 3 cells, the header"),
    "open quote": (lambda p: cells(p, 'a,k\n"1,x\n2,y\n'), ValueError, "EOF inside string"),
    "one label": (lambda p: cells(p, "a,k\n" + "1,x\n" * 9), ValueError, "at least two"),
    "array shape": (lambda p: from_arrays(np.zeros(6), [0, 1] * 3), ValueError, r"shape=\(6,\)"),
    "dataset item": (lambda p: from_dataset([(np.zeros(3), 0), np.zeros(3)]), ValueError, r"set\[1\] cannot be read"),
    "no text": (lambda p: task_from_text(p/"t.txt"), FileNotFoundError, "t.txt is not a file"),
}

@pytest.mark.parametrize("case", BAD)
def test_bad_data_are_refused_with_the_file_and_the_way_out(case, tmp_path):
    do, kind, words = BAD[case]
    with pytest.raises(kind, match=words): do(tmp_path)

def test_files_that_have_changed_are_noticed(tmp_path):
    folder = pictures(tmp_path/"pics")
    task = task_from_folder(folder)
    read_own(own_source("table", table(tmp_path/"t.csv")))          # something else was read since
    Image.new("RGB", (8, 8)).save(folder/"dark/0.png")
    with pytest.raises(ValueError, match="the data have changed since the task was made"): task.load()
    text = write(tmp_path/"t.txt", "to be or not to be " * 200)
    task = task_from_text(text)
    task.load()
    write(text, "to be or not to bee " * 200)
    with pytest.raises(ValueError, match="the data have changed"): task.load()


# ---- tasks

def test_one_call_makes_a_task_that_trains(tmp_path):
    folder, g = pictures(tmp_path/"my pics", n=40), torch.Generator().manual_seed(0)
    y = torch.arange(120) % 3
    x = torch.randn(120, 4, generator=g) + 4 * torch.nn.functional.one_hot(y, 4)
    tasks = [task_from_folder(folder, epochs=2), task_from_table(table(tmp_path/"t.csv", 120), epochs=8, lr=.1),
             task_from_arrays(x, y, "clouds", epochs=8, lr=.1), task_from_dataset(list(zip(x, y)), "items", epochs=8)]
    assert [t.name for t in tasks] == ["my_pics", "t", "clouds", "items"]
    for task in tasks:
        pop = new_population(task, FitConfig(lanes=2, workers=1))
        for _ in range(task.epochs): run_epoch(pop)
        assert evaluate(pop.model, task, pop.data, "test").accuracy_pp.min() > 75, task.name

def test_a_text_trains(tmp_path):
    task = task_from_text(write(tmp_path/"t.txt", "abcdefgh" * 600), block=16, epochs=2)
    pop = new_population(task, FitConfig(lanes=2, workers=1))
    for _ in range(2): run_epoch(pop)
    assert pop.last.heldout.loss.max() < pop.data.chance_loss

def test_a_multilayer_perceptron_grows_and_leaves():
    g = torch.Generator().manual_seed(0)
    task = task_from_arrays(torch.randn(60, 5, generator=g), [i % 2 for i in range(60)])
    model = create_model(task, task.slots, num_lanes=2, blueprints=["conv_small"])
    model.germinate("r0c1", "conv_small", tempo=0)
    for _ in range(3): model.advance("r0c1", force=True)
    x = torch.randn(7, 5, 1, 1)
    net = export_model(model, 1, x, bake=True)
    assert torch.equal(net(x), model.lane(1).eval()(x)) and net(x).shape == (7, 2)

def test_a_task_of_files_goes_through_json_and_has_a_name(tmp_path, monkeypatch):
    from esper_nb.train import tasks
    monkeypatch.setattr(tasks, "_tasks", dict(tasks._tasks))     # noqa: SLF001
    task = register_task(task_from_table(table(tmp_path/"flowers.csv"), columns=["a"], lr=.3))
    assert get_task("flowers") is task and task.lr == .3
    again = Task.from_dict(json.loads(json.dumps(task.to_dict())))
    assert again == task and torch.equal(again.load().x["train"], task.load().x["train"])

def test_the_path_says_what_it_is(tmp_path):
    pictures(tmp_path/"pics", size=40); table(tmp_path/"t.csv"); write(tmp_path/"t.txt", "to be or not to be " * 200)
    assert task_from_path(tmp_path/"pics").host.size == 32
    assert task_from_path(tmp_path/"pics", size=16, lr=.5).host.size == 16
    assert task_from_path(tmp_path/"t.csv").host.in_channels == 2
    assert task_from_path(tmp_path/"t.txt", epochs=3).host.vocab == 256

def test_augmentation_is_said(tmp_path):
    folder = pictures(tmp_path/"pics")
    d = task_from_folder(folder, pad=1, flip=True).load()
    plain = task_from_folder(folder).load()
    assert (d.pad, d.flip, plain.pad, plain.flip) == (1, True, 0, False)

def test_a_limit_keeps_all_classes():
    e = Examples(torch.zeros(90, 4, 4, 1, dtype=torch.uint8), torch.arange(90) // 30, ("a", "b", "c"))
    assert torch.bincount(example_data(e, limit=12).y["train"]).tolist() == [4, 4, 4]
