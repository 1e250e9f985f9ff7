"A walk over the findings page: every finding is there once, answered, with links that lead and checks that can fail."
import ast
import json
import re
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
from scripts.notebooks import NBS, NOT_RUN, ROOT

PAGE = NBS/"explanations/findings.ipynb"
GROUPS = json.loads((NBS/"explanations/findings.json").read_text(encoding="utf-8"))
ROWS = [r for g in GROUPS for r in g["rows"]]
CHECKS = sorted({c for r in ROWS for c in r["checks"]})
AWAY = ("cuda", "on_the_device_see")      # named so: they need a GPU

def numbered(name, last): return [f"{name}{i}" for i in range(1, last + 1)]

FINDINGS = [*numbered("S0-", 16), "S0-P", *numbered("T1-E-", 2), *numbered("T1-G-", 8), "T1-I-1",
            *(f"S1-{c}" for c in "abcdefghP"), *numbered("S2-", 13), "S2-P",
            "CRIT-1", *numbered("HIGH-", 3), *numbered("MED-", 5), *numbered("LOW-",
                    7), "S3-N1", "S3-M1", "OBS-1…5", "S3-P",
            *numbered("C", 3), *numbered("H", 5), *numbered("M", 6), *numbered("L", 4), "P1…P6", *numbered("App-",
                    3), *numbered("D", 15)]


@cache
def functions(file):
    "Test functions of a file by name, with the lists that mark the whole file."
    tree = ast.parse((ROOT/file).read_text(encoding="utf-8"))
    marks = [ast.unparse(n.value) for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id",
            "") == "pytestmark"]
    return {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}, marks

@cache
def cells(notebook): return json.loads((ROOT/notebook).read_text(encoding="utf-8"))["cells"]

def text(part): return "".join(part)

def asserts(tree):
    "Whether something in a tree can fail on purpose."
    known = re.compile(r"assert|raises|warns|test_(eq|ne|close|fail|is|in)|expect_fail|check_env|same$|equal$")
    nodes = list(ast.walk(tree))
    calls = [ast.unparse(n.func) for n in nodes if isinstance(n, ast.Call)]
    return any(isinstance(n, ast.Assert) for n in nodes) or any(known.search(c) for c in calls)

def shown(notebook):
    "Markdown that a page shows: its prose and its stored output."
    for c in cells(notebook):
        if c["cell_type"] == "markdown": yield text(c["source"])
        else: yield from (text(o["data"]["text/markdown"]) for o in c["outputs"] if "text/markdown" in o.get("data",
                {}))


def test_every_finding_is_there_once():
    assert len(FINDINGS) == 93 + 15 and [r["id"] for r in ROWS] == FINDINGS

def test_no_row_is_open():
    for r in ROWS:
        assert set(r) == {"id", "risk", "answer", "void", "where", "checks"}, r["id"]
        assert all(len(r[k].split()) >= n for k, n in (("risk", 5), ("answer", 3))), r["id"]
        assert r["where"] and r["checks"] and len(set(r["checks"])) == len(r["checks"]), r["id"]
        assert r["void"] == r["answer"].startswith("Void: "), r["id"]
        assert not re.search(r"todo|tbd|not yet|\?\?", json.dumps(r).lower()), r["id"]

@pytest.mark.parametrize("page", sorted({p for r in ROWS for p in r["where"]}))
def test_pages_of_answers_exist(page): assert (NBS/f"{page}.ipynb").exists()

@pytest.mark.parametrize("check", [c for c in CHECKS if "::" in c], ids=lambda c: c.rsplit("::")[-1])
def test_named_tests_run_and_can_fail(check):
    file, name = check.split("::")
    assert Path(file).parent.name == "tests" and Path(file).name.startswith("test_"), "pytest collects tests/test_*.py"
    found, marks = functions(file)
    assert name in found, f"{file} has no {name} at its top level"
    decorators = [ast.unparse(d) for d in found[name].decorator_list]
    assert not any(re.search(r"skip|xfail", m) for m in decorators + marks), f"{check} may be left out"
    first = found[name].body[:2]
    assert not any(re.search(r"pytest\.(skip|xfail)\(", ast.unparse(s)) and isinstance(s, ast.Expr) for s in first), \
        f"{check} leaves itself out"
    helpers = [found[c.func.id] for c in ast.walk(found[name]) if isinstance(c, ast.Call) and isinstance(c.func,
            ast.Name) and c.func.id in found]
    assert any(map(asserts, [found[name], *helpers])), f"{check} asserts nothing"
    assert ("pytest.mark.cuda" in decorators) == any(w in name for w in AWAY), \
        "a test that needs a GPU says so in its name"

@pytest.mark.parametrize("check", [c for c in CHECKS if "::" not in c])
def test_named_cells_run_and_can_fail(check):
    notebook, at = check.split("#")
    found = [c for c in cells(notebook) if c["id"] == at]
    assert len(found) == 1 and found[0]["cell_type"] == "code", \
        f"{notebook} has no code cell {at}: find the check again and give its present id"
    source = text(found[0]["source"])
    assert not NOT_RUN.search(source), f"{check} is not run"
    assert asserts(ast.parse(re.sub(r"^\s*[%!].*$", "", source, flags=re.M))), f"{check} asserts nothing"

@pytest.mark.parametrize("row", ROWS, ids=lambda r: r["id"])
def test_every_row_has_a_check_that_runs_without_a_gpu(row):
    assert any(not any(w in c for w in AWAY) for c in row["checks"])

def test_the_page_shows_what_the_rows_say():
    page = "\n".join(shown("nbs/explanations/findings.ipynb"))
    for r in ROWS:
        line = next((l for l in page.splitlines() if l.startswith(f"| {r['id']} |")), None)
        assert line, f"{r['id']} is not on the page: make refresh NB=nbs/explanations/findings.ipynb"
        assert r["risk"] in line and r["answer"] in line and line.count("](") == len(r["where"]) + len(r["checks"]), \
            f"{r['id']} is shown as it was: make refresh NB=nbs/explanations/findings.ipynb"
        for c in r["checks"]:
            if "::" in c:
                file, name = c.split("::test_")
                assert f"[{name.replace('_', ' ')}](https://github.com/esper-nb/esper_nb/blob/main/{file})" in line, c
            else: assert f"](../{c.split('#')[0].removeprefix('nbs/')}#" in line, c
    assert "| 0 |" in page and len(list(chain(*(g["rows"] for g in GROUPS)))) == len(ROWS)

def test_pytest_collects_where_the_checks_are():
    options = (ROOT/"pyproject.toml").read_text(encoding="utf-8")
    make = (ROOT/"Makefile").read_text(encoding="utf-8")
    assert re.search(r"^\t@\$\(BIN\)/pytest tests -n 2 --dist loadfile$", make, re.M), "make test runs all of tests/"
    assert "deselect" not in options and "ignore=" not in options and "-m " not in options
