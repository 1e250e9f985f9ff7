"How the code reads: no tricks to be short, code that belongs together in one place, and the counting itself."
import ast
import json
import subprocess
import sys

import pytest
from scripts import mirror
from scripts.mirror import ROOT, Library, pages, tricks


def test_no_page_saves_lines_with_tricks():
    found = [line for page in pages() for line in tricks(page)]
    assert not found, "\n".join(["", *found])


def page_of(tmp_path, source):
    path = tmp_path/"10_page.ipynb"
    path.write_text(json.dumps(dict(cells=[dict(cell_type="code", id="a", source=[source], outputs=[], metadata={})])))
    return path


def test_every_trick_is_found(tmp_path):
    sources = ["a, b, c, d = 1, 2, 3, 4", "f = lambda x: x", "class A: pass\nA.f = print",
               "x = Thing(1, 2, 3, 4, 5, 6, 7)", "x = a[:, 7]"]
    found = [[line.split(": ")[1] for line in tricks(page_of(tmp_path, f"#| export\n{s}"))] for s in sources]
    assert found == [[what] for what in mirror.TRICKS]
    assert tricks(page_of(tmp_path, "%matplotlib inline\na, b, c = 1, 2, 3\nx = a[:, 1]")) == []


@pytest.fixture
def library(tmp_path):
    "A package with one of everything that is counted."
    (tmp_path/"own/deep").mkdir(parents=True)
    (tmp_path/"own/a.py").write_text("from .b import C, D\nfrom own.deep.e import E\nimport torch\n\n"
                                     "def write(x: C | None): x.n = 1\ndef read(x: C): return x.n\n"
                                     "def fill(x: dict): x.n = 1\nmade = E()\n")
    (tmp_path/"own/b.py").write_text("class C: pass\nclass D(C): pass\n")
    (tmp_path/"own/deep/e.py").write_text("class E: pass\nclass F(E): pass\n")
    (tmp_path/"own/deep/w.py").write_text("""# %% page.ipynb #1
class W:
    def __init__(self): self.a = self.c = 0
    def f(self): self.a = self.b[2] = 1
    def g(self): self.a, self.c = 1, self.d
    def h(self):
        self.a += 1
        self.b[0] = self.c = 1
    def i(self): self.b = {}
# %% page.ipynb #2
made = W()
""")
    (tmp_path/"own/_modidx.py").write_text("class G: pass\nclass H(G): pass\n")
    return Library(tmp_path/"own")


def test_scattered_code_is_counted(library):
    assert library.writers() == ["a.py:write"]
    assert library.lone_bases() == ["C < D"]      # an E is made somewhere
    assert library.shared() == ["W.a", "W.b"]       # what `__init__` writes, and what two methods write, does not count
    n = library.numbers()
    assert (n["lines of the largest exported cell"], n["attributes that three methods write"]) == (8, 2)
    assert (n["modules"], n["own imports of a module, ninth decile"]) == (4, 2)


@pytest.mark.slow
def test_the_tables_are_printed():
    for option in ("core", "--beside"):
        done = subprocess.run([sys.executable, "scripts/mirror.py", option], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    head, *lines = done.stdout.splitlines()
    assert head.split()[:2] == ["esper_nb", "fastcore"] and len(lines) == 15
    assert ast.literal_eval(lines[0].split()[-1]) > 1000
