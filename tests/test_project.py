"The rules of the project that no single page can check, each over all files at once: what fails is listed together."
import ast
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections import defaultdict
from configparser import ConfigParser
from email.parser import Parser
from functools import cache

import pytest
from scripts.mirror import tree_of, tricks
from scripts.notebooks import GENERATED, LAYERS, LIB, ROOT
from scripts.notebooks import cells, exported_names, find_modules, find_notebooks, mask

CFG = ConfigParser(delimiters=["="])
CFG.read(ROOT/"settings.ini", encoding="utf-8")
CFG = CFG["DEFAULT"]

NOTEBOOKS = find_notebooks()
PAGES = [p for p in NOTEBOOKS if p.parent.name in LAYERS]
ALONE = ("guard", "learn")      # these need nothing but core
EXPORTED = re.compile(r"^#\|\s*(export|exports|exporti)\b", re.M)
DISTRIBUTION = {"PIL": "pillow", "sklearn": "scikit-learn"}      # import name -> name on PyPI, where they differ
# called by a library, or by a table of rules, that passes more than they need
HANDED_OVER = {"keep_later", "find_nonfinite", "calm_rise"}


@cache # not at import: every worker imports this file, and one of them runs it
def trees():
    "{'package.module': its syntax tree}."
    return {m.relative_to(LIB).with_suffix("").as_posix().replace("/", "."): ast.parse(m.read_text(encoding="utf-8"))
            for m in find_modules()}

@cache
def where(): return exported_names()

def name_of(path): return path.relative_to(ROOT).as_posix()

def module_of(page): return f"{page.parent.name}.{page.stem.partition('_')[2]}"

def number_of(page): return page.stem.partition("_")[0]

def place_of(page):
    "Where a page stands among all: packages in their order, and the pages of each by their numbers."
    return LAYERS.index(page.parent.name), number_of(page)

def imports(tree):
    "Yield the dotted names that a tree imports; relative ones are the package's own."
    for node in ast.walk(tree):
        if isinstance(node, ast.Import): yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, ["esper_nb" if node.level else "", node.module]))
            package = base.removeprefix("esper_nb.")
            if package in LAYERS: yield from (f"esper_nb.{where().get(a.name, package)}" for a in node.names)
            else: yield from ([f"{base}.{a.name}" for a in node.names] if base == "esper_nb" else [base])

def imported_modules(source):
    "Return the modules of the library that a cell imports from, without the library's name."
    if "import" not in source: return set()
    names = imports(tree_of(source))
    return {n.removeprefix("esper_nb.") for n in names if n.startswith("esper_nb.") and n.count(".") > 1}

def requirement_name(text): return re.match(r"[\w.-]+", text)[0].lower().replace("_", "-")

def said(failures): return "\n".join(["", *failures])


# --- pages

def faults_of_a_page(page, places):
    "Yield what is wrong with a page of the library: its name, its imports."
    here, package = place_of(page), page.parent.name
    targets = re.findall(r"^#\|\s*default_exp\s+(\S+)", "\n".join(cells(page)), re.M)
    if targets != [module_of(page)]: yield f"exports to {targets}, not to {module_of(page)}"
    if re.search(r"^#\|[ \t]*exports?[ \t]+\w", "\n".join(cells(page)), re.M): yield "exports into another module"
    for source in cells(page):
        for name in imported_modules(source) - {module_of(page)}:
            if name not in places: yield f"imports {name}, which no page defines"
            elif places[name] >= here: yield f"imports {name}, page {places[name][1]}: imports point down only"
            there = name.split(".")[0]
            if not EXPORTED.search(source) or there == package: continue
            if LAYERS.index(there) > LAYERS.index(package): yield f"imports {name} from a package above its own"
            if package in ALONE and there != "core": yield f"imports {name}, but {package} needs core alone"

def faults_of_a_notebook(path):
    "Yield what is wrong with what any notebook shows."
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    if not re.match(r"# \S.*\n\s*\n?> \S", "".join(found[0]["source"])): yield "wants '# title' and '> one line'"
    outputs = [o for c in found for o in c.get("outputs", ())]
    if path in PAGES and not outputs: yield "shows no result"
    for o in outputs:
        if o["output_type"] == "error": yield f"stores {o['ename']}: {o['evalue']}"
        if str(ROOT) in json.dumps(o): yield "stores a path of this machine"

def test_pages_are_named_numbered_and_import_downwards():
    places = {module_of(p): place_of(p) for p in PAGES}
    wrong = [f"{name_of(p)}: {fault}" for p in PAGES for fault in faults_of_a_page(p, places)]
    wrong += [f"{name_of(p)}: {fault}" for p in NOTEBOOKS for fault in faults_of_a_notebook(p)]
    pages = defaultdict(list)
    for p in PAGES: pages[place_of(p)].append(p.name)
    wrong += [f"number {n}: {names}" for (_, n), names in pages.items()
              if len(names) > 1 or not re.fullmatch(r"\d\d", n)]
    wrong += [f"no page makes esper_nb.{m}" for m in trees().keys() - places.keys()]
    wrong += [line for p in PAGES for line in tricks(p)]
    owners = defaultdict(list)
    for m, tree in trees().items():
        for n in tree.body:
            if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "__all__":
                for name in ast.literal_eval(n.value): owners[name].append(m)
    wrong += [f"{name} is made by {where}" for name, where in owners.items() if len(where) > 1]
    assert PAGES and not wrong, said(wrong)


# --- sources

def faults_of_a_function(f):
    "Yield parameters of a public function that it does not use."
    used = {n.id for n in ast.walk(f) if isinstance(n, ast.Name)} | {"self"}
    args = (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)
    yield from (f"{f.name} does nothing with {a.arg}" for a in args if a.arg not in used and f.name not in HANDED_OVER)

MODES = "torch.utils._python_dispatch.TorchDispatchMode" # torch's own pages on extending it know no other name

def faults_of_a_module(tree, text):
    "Yield errors that are swallowed, parameters without use, missing words, private parts of torch."
    if not ast.get_docstring(tree): yield "has no docstring"
    for n in ast.walk(tree):
        if isinstance(n, ast.ExceptHandler):
            broad = n.type is None or {"Exception", "BaseException"} & {x.id for x in ast.walk(n.type)
                                                                       if isinstance(x, ast.Name)}
            if broad and (n.type is None or all(isinstance(s, (ast.Pass, ast.Continue)) for s in n.body)):
                yield f"line {n.lineno}: any error at all is dropped"
        if isinstance(n, ast.ImportFrom): # ruff's SLF001 looks at attributes only
            yield from (f"imports {name}" for a in n.names
                        if re.match(r"torch\b.*\._[a-z]", name := f"{n.module}.{a.name}") and name != MODES)
        if isinstance(n, ast.Attribute):
            name = ast.unparse(n)
            if re.fullmatch(r"torch\._[a-z]\w*", name): yield f"uses {name}"
            if n.attr in ("empty_cache", "record_stream"): yield f"line {n.lineno}: {n.attr} takes a lifetime for order"
    for f in (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name[0] != "_"):
        yield from faults_of_a_function(f)
    for line in re.findall(r"# type: ignore.*", text):
        if not re.match(r"# type: ignore\[[\w, -]+\]  # \w", line): yield f"{line}: which error, and why?"

def test_sources_hide_no_errors_and_say_what_they_are():
    wrong = []
    for path, (name, tree) in zip(find_modules(), trees().items()):
        text = path.read_text(encoding="utf-8")
        wrong += [f"{name}: {fault}" for fault in faults_of_a_module(tree, text)]
        if GENERATED[0] not in text: wrong.append(f"{name}: is not what a notebook exports")
    mypy = tomllib.loads((ROOT/"pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    switched_off = {"ignore_errors", "exclude"} & mypy.keys()
    switched_off |= set(mypy["disable_error_code"]) - {"annotation-unchecked"} # a note, no error
    wrong += [f"pyproject.toml: {key} hides type errors" for key in switched_off]
    assert [o["module"] for o in mypy["overrides"]] == [["torch.*", "torchvision.*"]]
    assert not wrong, said(wrong)


# --- what a user installs

def requirements(*keys): return {requirement_name(r) for k in keys for r in CFG[k].split()}

EXTRAS = [k for k in CFG if k.endswith("_requirements")]

def third_party(names):
    "Return the distributions behind import names."
    tops = {n.split(".")[0] for n in names} - set(sys.stdlib_module_names) - {"esper_nb"}
    return {DISTRIBUTION.get(t, t).lower().replace("_", "-") for t in tops}

def test_imports_are_covered_by_requirements():
    needed, optional = requirements("requirements"), requirements(*(k for k in EXTRAS if k != "dev_requirements"))
    wrong = []
    for name, tree in trees().items():
        top = ast.Module([n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))], [])
        wrong += [f"{name}: {d} wants a line in requirements" for d in third_party(imports(top)) - needed]
        wrong += [f"{name}: {d} wants an extra" for d in third_party(imports(tree)) - needed - optional]
    assert not wrong, said(wrong)
    assert not needed & {"fastcore", "nbdev", "ipython", "ipywidgets", "jupyterlab", "pytest", "nbval", "hypothesis",
                         "tensorboard"}

def test_package_imports_without_notebook_and_test_tools():
    absent = ["IPython", "ipywidgets", "jupyterlab", "ipykernel", "anywidget", "traitlets", "fastcore", "nbdev",
              "execnb", "pytest", "hypothesis", "tensorboard", "mypy"]
    code = f"""
import sys, importlib
for name in {absent}: sys.modules[name] = None      # importing it now raises
import esper_nb
for name in esper_nb.__all__: getattr(esper_nb, name)
for name in {sorted(trees())}: importlib.import_module("esper_nb." + name)
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "fine", done.stderr

DASHBOARD = "nbs/tutorials/dashboard.ipynb"     # `esper-nb lab` opens it, so the wheel carries it

def copy_of_the_tree(target):
    "Copy what git knows, and what is new beside it."
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        source = ROOT/name
        if not source.is_file() or name.startswith(("nbs/", "tests/")) and name != DASHBOARD: continue
        (target/name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target/name)
    for name in ("nbs", "tests"):      # in the way, to see that they stay out
        (target/name).mkdir(exist_ok=True)
        (target/name/"__init__.py").touch()
    return target

def run_python(*words, cwd):
    done = subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

@pytest.mark.slow
def test_wheel_and_sdist_hold_the_package_and_what_settings_say(tmp_path):
    tree, out = copy_of_the_tree(tmp_path/"tree"), tmp_path/"out"
    run_python("-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation",
               "-w", str(out), str(tree), cwd=tree)
    run_python("-c", "import setuptools.build_meta as b, sys; b.build_sdist(sys.argv[1])", str(out), cwd=tree)
    package = {name_of(p) for p in LIB.rglob("*") if p.is_file() and "__pycache__" not in p.parts}

    wheel = zipfile.ZipFile(next(out.glob("*.whl")))
    names = wheel.namelist()
    held = package | {"esper_nb/pages/dashboard.ipynb"}
    assert {n for n in names if ".dist-info/" not in n} == held, "a data file wants a line in setup.py"
    assert any(n.endswith("LICENSE") for n in names)
    info = next(n for n in names if n.endswith(".dist-info/METADATA"))
    meta = Parser().parsestr(wheel.read(info).decode("utf-8"))
    assert meta["Version"] == CFG["version"] and meta["Requires-Python"] == f">={CFG['min_python']}"
    assert set(meta.get_all("Provides-Extra")) == {k.removesuffix("_requirements") for k in EXTRAS}
    plain = {requirement_name(r) for r in meta.get_all("Requires-Dist") if "extra ==" not in r}
    assert plain == requirements("requirements")
    scripts = wheel.read(info.replace("METADATA", "entry_points.txt")).decode("utf-8").replace(" ", "")
    assert all(script in scripts for script in CFG["console_scripts"].split())

    with tarfile.open(next(out.glob("*.tar.gz"))) as archive:
        sdist = {name.partition("/")[2] for name in archive.getnames()}
    assert package | {"settings.ini", "setup.py", "pyproject.toml", "README.md", "LICENSE"} <= sdist
    assert DASHBOARD in sdist and "nbs/__init__.py" not in sdist
    assert not [n for n in sdist if n.startswith(("tests", "scripts", "benchmarks", "research", "conftest"))]

def test_version_is_the_one_in_settings():
    import esper_nb
    assert esper_nb.__version__ == CFG["version"]
    assert importlib.metadata.version("esper_nb") == CFG["version"], "settings.ini has changed: make install"


# --- the chores

def notebook_of(path, source, shown="", *tags):
    "Write a notebook with one cell and what it is said to have printed."
    printed = dict(output_type="stream", name="stdout", text=shown)
    meta = dict(tags=tags) if tags else {}
    cell = dict(cell_type="code", id="a", metadata=meta, execution_count=1, source=source, outputs=[printed])
    kernel = dict(display_name="python3", language="python", name="python3")
    path.write_text(json.dumps(dict(cells=[cell], metadata=dict(kernelspec=kernel), nbformat=4, nbformat_minor=5)))
    return path

@pytest.mark.parametrize("shown, again, alike", [
    ("loss 156.1, 98.4 pp", "loss 1,060.50, 9e-05 pp", True), ("[-0.5, .25, nan]", "[12., 1e+03, 7]", True),
    ("<Figure size 700x240>", "<Figure size 700x205>", True), ("▁▃█ ▅", "▂▂▂", True),
    ("lane  conv  9.4\n----  ----  ---", "lane  conv  10.25\n----  ----  -----", True),
    ("tensor([ 9.5, 10.0,\n        3.])", "tensor([1., 2., 3.])", True),
    ("rise (loss 4)", "collapse (loss 4)", False), ("[1, 2]", "[1, 2, 3]", False), ("r0c1: 3", "r0c2: 3", False),
    ("one\ntwo", "one two", False), ("", "0", False)])
def test_figures_are_masked_and_words_are_not(shown, again, alike):
    assert (mask(shown) == mask(again)) == alike

RUN_PAGES = { # name: source, what is stored, tags
    "true": ("print(1 + 1)", "2\n"), "old": ("print(1 + 1)", "3\n"),
    "figure": ("print('lane 1: 98.4 pp')", "lane 1: 100 pp\n", "trained"),
    "word": ("print('lane 1: rise')", "lane 1: collapse\n", "trained"), "wrong": ("assert 1 == 2, 'not so'", ""),
    "long": ("import time; time.sleep(999)", ""),
    "child": ("import subprocess; p = subprocess.Popen(['sleep', '99'])\nprint(p.returncode)", "None\n")}

@pytest.mark.slow
def test_a_page_that_is_old_fails_or_hangs_is_found(tmp_path):
    "By the run that compares, in kernels, and by the quick one, which does not look at outputs."
    code = f"""
from pathlib import Path
from scripts.notebooks import compare, execute, in_forks
for how in (compare, execute):
    for name, limit in {dict.fromkeys(RUN_PAGES, 3.) | dict(long=.05)}.items():
        [(path, *_, why)] = in_forks(how, [Path({str(tmp_path)!r})/f"{{name}}.ipynb"], limit)
        print("outcome", how.__name__, name, repr(why[-1500:]))
"""
    shutil.copy(ROOT/"conftest.py", tmp_path)
    for name, page in RUN_PAGES.items(): notebook_of(tmp_path/f"{name}.ipynb", *page)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    output = {tuple(w[1:3]): w[3] for line in done.stdout.splitlines() if (w := line.split(" ", 3))[0] == "outcome"}
    for how in ("compare", "execute"):
        assert output[how, "true"] == output[how, "child"] == output[how, "figure"] == "''", done
        assert "not so" in output[how, "wrong"] and "it hangs" in output[how, "long"], done
    for name in ("old", "word"):
        assert "Cell outputs differ" in output["compare", name] and output["execute", name] == "''", done
