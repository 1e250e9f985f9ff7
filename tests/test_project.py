"The rules of the project that no single page can check: order, names, metadata, types, the wheel and the sdist."
import ast
import builtins
import importlib
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
from pathlib import Path

import pytest
from scripts.notebooks import GENERATED, LAYERS, LIB, ROOT
from scripts.notebooks import compare, find_modules, find_notebooks, out_of_step, render_readme

CFG = ConfigParser(delimiters=["="])
CFG.read(ROOT/"settings.ini", encoding="utf-8")
CFG = CFG["DEFAULT"]

NOTEBOOKS = find_notebooks()
PAGES = [p for p in NOTEBOOKS if p.parent.name in LAYERS]
MODULES = find_modules()
NUMBER = {f"{p.parent.name}.{p.stem.partition('_')[2]}": p.stem.partition("_")[0] for p in PAGES}  # "29" < "29a" < "30"
ALONE = ("guard", "learn")      # these need nothing but core
EXPORTED = re.compile(r"^#\|\s*(export|exports|exporti)\b", re.M)
DISTRIBUTION = {"PIL": "pillow", "sklearn": "scikit-learn"}      # import name -> name on PyPI, where they differ


def ids(path): return path.name

def cells(path, kind="code"):
    "Source of every cell of a kind."
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == kind]

def outputs(path):
    "Every stored output."
    nb = json.loads(path.read_text(encoding="utf-8"))
    return [o for c in nb["cells"] if c["cell_type"] == "code" for o in c["outputs"]]

def python(source):
    "Syntax tree of a cell, its magics and shell lines left out."
    return ast.parse(re.sub(r"^\s*[%!].*$", "", source, flags=re.M))

def imports(tree):
    "Absolute dotted names that a tree imports; relative ones are the package's own."
    for node in ast.walk(tree):
        if isinstance(node, ast.Import): yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, ["esper_nb" if node.level else "", node.module]))
            yield from ([f"{base}.{a.name}" for a in node.names] if base == "esper_nb" else [base])

def own_modules(names):
    "Modules of the library among dotted names, without its name in front."
    return {n.removeprefix("esper_nb.") for n in names if n.startswith("esper_nb.") and n.count(".") > 1}

def module_of(page): return f"{page.parent.name}.{page.stem.partition('_')[2]}"

def public_names(module):
    "What a module lists in `__all__`."
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    return []

def requirement_name(text): return re.match(r"[\w.-]+", text)[0].lower().replace("_", "-")


# --- notebooks

def test_there_is_something_to_check():
    assert PAGES and MODULES

@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_page_imports_lower_numbers_only(page):
    here = page.stem.partition("_")[0]
    for source in cells(page):
        for name in own_modules(imports(python(source))) - {module_of(page)}:
            assert name in NUMBER, f"{page.name} imports esper_nb.{name}, which no page defines"
            assert NUMBER[name] < here, \
                f"{page.name} imports esper_nb.{name} from page {NUMBER[name]}: imports point down only"

@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_package_imports_lower_packages_only(page):
    "The library's own imports: a package needs only packages below it, the Governor and PPO nothing but the core."
    order, here = list(LAYERS), page.parent.name
    for source in cells(page):
        if not EXPORTED.search(source): continue
        for there in {name.split(".")[0] for name in own_modules(imports(python(source)))} - {here}:
            assert order.index(there) < order.index(here), \
                f"{page.name}: {here} imports from {there}, which is above it"
            assert here not in ALONE or there == "core", \
                f"{page.name}: {here} imports from {there}, but needs core alone"

@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_page_is_named_like_its_module(page):
    targets = [m[1] for source in cells(page) for m in re.finditer(r"^#\|\s*default_exp\s+(\S+)", source, re.M)]
    assert targets == [module_of(page)]
    elsewhere = [source for source in cells(page) if re.search(r"^#\|[ \t]*exports?[ \t]+\w", source, re.M)]
    assert not elsewhere, f"{page.name} exports into another module"

def bound(tree):
    "Names that a cell makes, wherever in it."
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load): yield node.id
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)): yield node.name
        elif isinstance(node, ast.arg): yield node.arg
        elif isinstance(node, ast.ExceptHandler) and node.name: yield node.name
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            yield from vars(importlib.import_module(node.module))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((a.asname or a.name).split(".")[0] for a in node.names)

@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=ids)
def test_the_site_can_run_the_cells_it_runs(notebook):
    "Building the site runs exported cells and cells with an import, no others: these must not build on one left out."
    known = set(dir(builtins)) | {"__file__", "get_ipython", "display"}
    for source in cells(notebook):
        tree = python(source)
        exported = EXPORTED.search(source)
        importing = any(isinstance(n, (ast.Import, ast.ImportFrom)) for n in ast.walk(tree))
        if "nbdev_export(" in source or not (exported or importing): continue
        known |= set(bound(tree))
        used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        why = f"{notebook.name}: {sorted(used - known)} come from cells that the site does not run"
        assert exported or used <= known, f"{why}; give this import a cell of its own:\n{source}"

def test_page_numbers_are_unique():
    assert len(set(NUMBER.values())) == len(PAGES)

@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=ids)
def test_notebook_opens_with_title_and_subtitle(notebook):
    first = json.loads(notebook.read_text(encoding="utf-8"))["cells"][0]
    assert first["cell_type"] == "markdown"
    assert re.match(r"# \S.*\n\s*\n?> \S", "".join(first["source"])), \
        f"{notebook.name}: wants '# title' and '> one line'"

@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=ids)
def test_notebook_is_small(notebook):
    size = notebook.stat().st_size
    assert size <= 400_000, f"{notebook.name} has {size} bytes: make its figures smaller"

@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=ids)
def test_stored_outputs_are_healthy(notebook):
    for output in outputs(notebook):
        failed = f"{output.get('ename')}: {output.get('evalue')}"
        assert output["output_type"] != "error", f"{notebook.name} stores {failed}"
        assert str(ROOT) not in json.dumps(output), f"{notebook.name} stores a path of this machine"

@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_page_stores_results(page):
    assert outputs(page), f"{page.name} shows no result: make refresh NB=nbs/{page.name}"


# --- modules

def test_the_check_of_the_library_can_fail(tmp_path):
    "A module edited by hand, one whose notebook is gone, a notebook with execution counts: all are found, no others."
    for name in ("nbs", "esper_nb"):
        left_out = shutil.ignore_patterns("__pycache__", "*.ipynb")
        shutil.copytree(ROOT/name, tmp_path/name, symlinks=True, ignore=left_out)
    for name in ("settings.ini", "pyproject.toml", "_quarto.yml"): shutil.copy(ROOT/name, tmp_path)
    some = [p for p in PAGES if p.parent.name == "core"][:2]
    for page in some: shutil.copy(page, tmp_path/"nbs"/page.parent.name)
    kept = {f"esper_nb/{page.parent.name}/{page.stem.partition('_')[2]}.py" for page in some}
    orphans = {m.relative_to(ROOT).as_posix() for m in MODULES} - kept
    assert set(out_of_step(tmp_path)) == orphans | {"esper_nb/_modidx.py"}      # the other pages are not in the copy
    for name in orphans: (tmp_path/name).unlink()
    subprocess.run([Path(sys.executable).parent/"nbdev_export"], cwd=tmp_path, check=True)
    assert out_of_step(tmp_path) == []

    edited = tmp_path/f"esper_nb/core/{some[0].stem.partition('_')[2]}.py"
    edited.write_text(edited.read_text(encoding="utf-8") + "x = 1\n", encoding="utf-8")
    (tmp_path/"esper_nb/orphan.py").write_text(GENERATED[0] + "\n", encoding="utf-8")
    page = tmp_path/"nbs/core"/some[1].name
    nb = json.loads(page.read_text(encoding="utf-8"))
    next(c for c in nb["cells"] if c["cell_type"] == "code")["execution_count"] = 7
    page.write_text(json.dumps(nb), encoding="utf-8")
    assert out_of_step(tmp_path) == sorted([f"esper_nb/core/{edited.name}", "esper_nb/orphan.py",
                                            f"nbs/core/{page.name}"])

def test_every_module_comes_from_a_page():
    assert {m.relative_to(LIB).with_suffix("").as_posix().replace("/", ".") for m in MODULES} == set(NUMBER)
    for m in MODULES: assert GENERATED[0] in m.read_text(encoding="utf-8")

@pytest.mark.parametrize("module", MODULES, ids=ids)
def test_no_function_over_40_lines(module):
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = node.end_lineno - node.lineno + 1
            assert length <= 40, f"{module.name}: {node.name} has {length} lines"

def test_public_names_are_unique():
    owners = defaultdict(list)
    for module in MODULES:
        for name in public_names(module): owners[name].append(module.name)
    assert {name: where for name, where in owners.items() if len(where) > 1} == {}

def test_version_is_the_one_in_settings():
    import esper_nb
    assert esper_nb.__version__ == CFG["version"]
    assert importlib.metadata.version("esper_nb") == CFG["version"], \
        "reinstall: make install after a change of settings.ini"

def test_readme_is_what_the_index_renders_to():
    text, images = render_readme()
    assert (ROOT/"README.md").read_text(encoding="utf-8") == text, "run: make readme"
    for name, data in images.items(): assert (ROOT/name).read_bytes() == data, f"{name}: run make readme"


# --- what a user installs

def runtime_requirements(): return {requirement_name(r) for r in CFG["requirements"].split()}

def extra_requirements():
    "What the extras for users bring; what developers need is not among it."
    keys = [k for k in CFG if k.endswith("_requirements") and k != "dev_requirements"]
    return {requirement_name(r) for k in keys for r in CFG[k].split()}

def third_party(names):
    "Distributions behind import names."
    tops = {n.split(".")[0] for n in names} - set(sys.stdlib_module_names) - {"esper_nb"}
    return {DISTRIBUTION.get(t, t).lower().replace("_", "-") for t in tops}

@pytest.mark.parametrize("module", MODULES, ids=ids)
def test_imports_are_covered_by_requirements(module):
    tree = ast.parse(module.read_text(encoding="utf-8"))
    top = ast.Module([n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))], [])
    assert third_party(imports(top)) <= runtime_requirements(), \
        "an import at the top of a module wants a line in `requirements`"
    assert third_party(imports(tree)) <= runtime_requirements() | extra_requirements(), \
        "an import wants an extra in settings.ini"

def test_package_imports_without_notebook_and_test_tools():
    absent = ["IPython", "ipywidgets", "jupyterlab", "ipykernel", "anywidget", "traitlets", "fastcore", "nbdev",
              "execnb", "pytest", "hypothesis", "tensorboard", "mypy"]
    code = f"""
import sys, importlib
for name in {absent}: sys.modules[name] = None      # importing it now raises
import esper_nb
for name in esper_nb.__all__: getattr(esper_nb, name)
for name in {sorted(NUMBER)}: importlib.import_module("esper_nb." + name)
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "fine", done.stderr

def package_files():
    "What the package is made of: modules, and data beside them."
    return {p.relative_to(ROOT).as_posix() for p in LIB.rglob("*") if p.is_file() and "__pycache__" not in p.parts}

def copy_of_the_tree(target):
    "What git knows, and what is new beside it."
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        source = ROOT/name
        if not source.is_file(): continue
        (target/name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target/name)
    return target

@pytest.fixture(scope="module")
def tree(tmp_path_factory): return copy_of_the_tree(tmp_path_factory.mktemp("tree"))

@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory):
    "The wheel of this tree, built in a copy."
    tmp = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([sys.executable, "-m", "pip", "wheel", *options, "-w", tmp, tree], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    built, = tmp.glob("*.whl")
    return zipfile.ZipFile(built)

@pytest.fixture(scope="module")
def sdist(tree, tmp_path_factory):
    "Names of what is in the source distribution."
    tmp = tmp_path_factory.mktemp("sdist")
    build = "import setuptools.build_meta as b, sys; b.build_sdist(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", build, tmp], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    built, = tmp.glob("*.tar.gz")
    with tarfile.open(built) as archive: return {name.partition("/")[2] for name in archive.getnames()}

def test_wheel_holds_the_package_and_nothing_else(wheel):
    files = {n for n in wheel.namelist() if ".dist-info/" not in n}
    assert files == package_files(), "a data file wants a line in setup.py's package_data"

def test_sdist_holds_the_package_and_what_it_is_built_from(sdist):
    assert package_files() | {"settings.ini", "setup.py", "pyproject.toml", "README.md", "LICENSE"} <= sdist

def test_sdist_carries_no_half_of_the_tests(sdist):
    "Tests need their conftest, the notebooks and the scripts: all of these are in, or none."
    assert not [n for n in sdist if n.startswith(("tests", "nbs", "scripts", "conftest"))]

def test_wheel_metadata_comes_from_settings(wheel):
    name, = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    meta = Parser().parsestr(wheel.read(name).decode("utf-8"))
    assert meta["Version"] == CFG["version"] and meta["Requires-Python"] == f">={CFG['min_python']}"
    extras = {k.removesuffix("_requirements") for k in CFG if k.endswith("_requirements")}
    assert set(meta.get_all("Provides-Extra")) == extras
    plain = {requirement_name(r) for r in meta.get_all("Requires-Dist") if "extra ==" not in r}
    assert plain == runtime_requirements()
    scripts = wheel.read(name.replace("METADATA", "entry_points.txt")).decode("utf-8").replace(" ", "")
    for script in CFG["console_scripts"].split(): assert script in scripts

def test_notebook_and_test_tools_are_no_runtime_requirement():
    assert not runtime_requirements() & {"fastcore", "nbdev", "ipython", "ipywidgets", "jupyterlab", "pytest", "nbval",
                                         "hypothesis", "tensorboard"}

def test_license_travels(wheel):
    assert any(n.endswith("LICENSE") for n in wheel.namelist())


# --- rails

def pyproject(): return tomllib.loads((ROOT/"pyproject.toml").read_text(encoding="utf-8"))

def test_no_kind_of_type_error_is_switched_off():
    mypy = pyproject()["tool"]["mypy"]
    assert not {"disable_error_code", "ignore_errors", "exclude"} & mypy.keys()
    assert [o["module"] for o in mypy["overrides"]] == [["torch.*", "torchvision.*"]]

@pytest.mark.parametrize("path", [*MODULES, *PAGES], ids=ids)
def test_an_error_that_is_ignored_says_which_and_why(path):
    for line in re.findall(r"# type: ignore.*", path.read_text(encoding="utf-8")):
        assert re.match(r"# type: ignore\[[\w, -]+\]  # \w", line), f"{path.name}: {line}"

def test_developers_have_the_tools():
    wanted = {requirement_name(r) for r in CFG["dev_requirements"].split()}
    assert {"ruff", "mypy", "basedpyright", "jedi", "nbval", "pytest"} <= wanted

def notebook_of(path, source, shown):
    "A notebook with one cell and what it is said to have printed."
    printed = dict(output_type="stream", name="stdout", text=shown)
    cell = dict(cell_type="code", id="a", metadata={}, execution_count=1, source=source, outputs=[printed])
    kernel = dict(display_name="python3", language="python", name="python3")
    path.write_text(json.dumps(dict(cells=[cell], metadata=dict(kernelspec=kernel), nbformat=4, nbformat_minor=5)))
    return path

@pytest.mark.slow
def test_a_stored_output_that_is_old_is_found_and_a_page_that_hangs_ends(tmp_path):
    wrong = compare(notebook_of(tmp_path/"old.ipynb", "print(1 + 1)", "3\n"), 5)[2]
    assert "Cell outputs differ" in wrong
    assert compare(notebook_of(tmp_path/"true.ipynb", "print(1 + 1)", "2\n"), 5)[2] == ""
    assert "it hangs" in compare(notebook_of(tmp_path/"long.ipynb", "while True: pass", ""), .2)[2]
