"How the code reads, in numbers: the limits that pages keep, and the counting itself."
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import mirror
from scripts.mirror import ROOT, breaches, broken, page_numbers, pages, tree_of

PAGES = pages()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_page_keeps_the_limits(page):
    found = broken(page, page_numbers(page))
    assert not found, "\n".join(found)


def test_the_library_keeps_the_limits():
    found = breaches()
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_ruff_finds_nothing():
    command = [Path(sys.executable).parent/"ruff", "check", "--output-format", "concise", "nbs", "esper_nb", "tests",
               "scripts"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def page_of(tmp_path, *cells):
    "A page with some code cells, and how it counts."
    made = [dict(cell_type="code", id=str(i), source=[s], outputs=[], metadata={}) for i, s in enumerate(cells)]
    path = tmp_path/f"{10 + len(list(tmp_path.iterdir()))}_page.ipynb"      # a page is counted once
    path.write_text(json.dumps(dict(cells=made)))
    return broken(path, page_numbers(path))


LINES = "\n".join(f"x = {i}" for i in range(45))

@pytest.mark.parametrize("source, says", [
    ("#| export\nx = '" + "y" * 120 + "'", "1 lines over 120"),
    (f"#| export\n{LINES}", "1 exported cells over 40 lines"),
    ("#| export\na, b, c, d = 1, 2, 3, 4", "1 tuple assignments"),
    ("#| export\nf = lambda x: x", "1 lambdas"),
    ("#| export\nclass A: pass\nA.f = print", "1 methods given"),
    ("#| export\nx = Thing(1, 2, 3, 4, 5, 6, 7)", "1 records of more than six"),
    ("#| export\nx = a[:, 7]", "1 columns"),
    ("#| export\nx = '" + "y\\\n" * 9000 + "'", "exports 26.4 KB")])
def test_every_limit_can_be_broken(tmp_path, source, says):
    assert any(says in line for line in page_of(tmp_path, source)), page_of(tmp_path, source)


def test_exported_cells_in_a_row_want_a_result(tmp_path):
    four = ["#| export\nx = 1"] * 4
    assert any("4 exported cells in a row" in line for line in page_of(tmp_path, *four))
    assert not any("in a row" in line for line in page_of(tmp_path, *four[:2], "x", *four[2:]))


def test_a_class_may_be_longer_than_a_function(tmp_path):
    def body(n): return "\n".join(f"    x{i} = 1" for i in range(n))
    assert not any("exported cells over" in line for line in page_of(tmp_path, f"#| export\nclass A:\n{body(55)}"))
    assert any("exported cells over" in line for line in page_of(tmp_path, f"#| export\nclass A:\n{body(60)}"))
    assert any("exported cells over" in line for line in page_of(tmp_path, f"#| export\nx = 1\nclass A:\n{body(45)}"))


def test_a_class_is_left_out_of_the_ninth_decile(tmp_path):
    def page(name, *cells):
        made = [dict(cell_type="code", id=str(i), source=[s], outputs=[], metadata={}) for i, s in enumerate(cells)]
        path = tmp_path/name
        path.write_text(json.dumps(dict(cells=made)))
        return path
    long = "\n".join(f"    x{i} = 1" for i in range(30))
    of_classes = page("10_classes.ipynb", *[f"#| export\nclass A:\n{long}"] * 5, "#| export\nx = 1")
    of_functions = page("11_functions.ipynb", *[f"#| export\ndef f():\n{long}"] * 5, "#| export\nx = 1")
    assert [mirror.ninth_decile([p]) for p in (of_classes, of_functions)] == [1, 31]
    assert [page_numbers(p)["p90"] for p in (of_classes, of_functions)] == [1, 31]


def test_what_a_picture_shows_is_no_wide_line(tmp_path):
    assert not any("over 120" in line for line in page_of(tmp_path, f'#| fig-alt: "{"word " * 40}"\nplot()'))


def test_public_names_are_counted_with_or_without_a_list():
    assert mirror.public_names(tree_of("__all__ = ['a', 'b']\ndef c(): pass")) == {"a", "b"}
    assert mirror.public_names(tree_of("def c(): pass\nclass D: pass\ndef _e(): pass")) == {"c", "D"}


def test_the_generated_index_is_not_counted():
    assert not [p for p in mirror.module_files("esper_nb") if p.name in ("_modidx.py", "__init__.py")]


@pytest.mark.slow
def test_the_table_beside_other_libraries_is_printed():
    done = subprocess.run([sys.executable, "scripts/mirror.py", "--beside"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    head, *lines = done.stdout.splitlines()
    assert head.split()[:2] == ["esper_nb", "fastcore"] and len(lines) == 11
    assert all(re.search(r"\d", line) for line in lines)
