"The front door: it offers what users need, loads it when it is asked for, and makes an environment known to Gymnasium."
import ast
import importlib
import inspect
import json
import subprocess
import sys

import pytest
from scripts.notebooks import LAYERS, LIB, ROOT, door_text, exported_names, offered_names

import esper_nb

TEXT = (LIB/"__init__.py").read_text(encoding="utf-8")
NAMES = offered_names(TEXT)


def run_python(code, **kw): return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **kw)


def test_it_offers_some_seventy_names_and_says_so():
    assert 40 <= len(NAMES) <= 90 and sorted(NAMES) == esper_nb.__all__
    assert set(NAMES) <= set(dir(esper_nb))
    assert not [name for name in dir(esper_nb) if name not in NAMES and not name.startswith("__")]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_what_its_module_defines(name):
    where = exported_names()
    assert name in where, f"no module makes {name} any more: python scripts/notebooks.py door no:{name}"
    module = importlib.import_module(f"esper_nb.{where[name]}")
    assert getattr(esper_nb, name) is getattr(module, name)
    made_in = getattr(getattr(esper_nb, name), "__module__", module.__name__)
    assert made_in == module.__name__ or not made_in.startswith("esper_nb."), "not the module that defines it"


def test_its_table_is_in_step_with_the_modules():
    assert door_text(NAMES, exported_names()) in TEXT, "names have moved: python scripts/notebooks.py door"


def test_type_checkers_see_the_names_that_are_loaded():
    block = next(n for n in ast.parse(TEXT).body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    seen = {a.asname: f"{n.module}" for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert seen == {name: f"esper_nb.{module}" for name, module in exported_names().items() if name in NAMES}


def test_every_name_of_a_tutorial_is_at_the_door():
    used = set()
    for path in [ROOT/"nbs/index.ipynb", *sorted((ROOT/"nbs/tutorials").glob("*.ipynb"))]:
        cells = [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
        nodes = [n for c in cells for n in ast.walk(ast.parse("".join(c["source"]))) if isinstance(n, ast.ImportFrom)]
        modules = {n.module for n in nodes if n.module.split(".")[0] == "esper_nb"}
        assert modules <= {"esper_nb"}, f"{path.name} goes through a side door: from esper_nb import …"
        used |= {a.name for n in nodes if n.module == "esper_nb" for a in n.names}
    assert used <= set(NAMES), f"python scripts/notebooks.py door {' '.join(sorted(used - set(NAMES)))}"


def test_importing_it_loads_no_torch_and_no_module_of_its_own():
    code = """
import sys, esper_nb
dir(esper_nb), esper_nb.__all__, esper_nb.__version__
print(sorted(m for m in sys.modules if m == "torch" or m.startswith("esper_nb.")), len(sys.modules) < 600)
import gymnasium
print("torch" in sys.modules)
"""
    assert run_python(code, cwd=ROOT).stdout.split("\n")[:2] == ["[] True", "False"]


def test_a_name_loads_what_it_needs_and_no_more():
    code = """
import sys
from esper_nb import Governor
print(sorted({m.split(".")[1] for m in sys.modules if m.startswith("esper_nb.")}))
"""
    assert run_python(code, cwd=ROOT).stdout.strip() == "['core', 'guard']"


def test_a_wrong_name_is_refused_with_the_right_one():
    with pytest.raises(AttributeError, match="offers no 'Governer'; did you mean 'Governor'"): esper_nb.Governer
    with pytest.raises(AttributeError, match="dir\\(esper_nb\\) lists"): esper_nb.qqqq
    with pytest.raises(ImportError): exec("from esper_nb import Sesion")


def test_names_keep_their_help():
    governor = importlib.import_module("esper_nb.guard.governor").Governor
    assert inspect.signature(esper_nb.Governor) == inspect.signature(governor)
    assert "front door" in esper_nb.__doc__
    assert set(LAYERS) == {p.name for p in LIB.iterdir() if p.is_dir() and p.name[0] != "_"}


@pytest.mark.parametrize("make", [
    'gymnasium.make("esper_nb:esper_nb/Grow-v0", task="digits", limit=64, horizon=2)',
    'gymnasium.make_vec("esper_nb:esper_nb/Grow-v0", num_envs=2, task="digits", limit=64, horizon=2)'])
def test_gymnasium_makes_the_environment_without_an_import_of_ours(make):
    code = f"""
import warnings
warnings.simplefilter("error", UserWarning)      # Gymnasium warns of a name that is registered twice
import gymnasium, sys
assert "torch" not in sys.modules
env = {make}
obs, info = env.reset(seed=0)
print(type(env.unwrapped).__name__, obs.shape[-1] > 1)
"""
    done = run_python(code, cwd=ROOT)
    assert done.stdout.split() in (["GrowEnv", "True"], ["GrowVecEnv", "True"]), done.stderr


@pytest.mark.parametrize("imports", ["import gymnasium, esper_nb", "import esper_nb, gymnasium",
                                     "import esper_nb.control.envs, gymnasium"])
def test_the_environment_is_registered_once_in_every_order(imports):
    code = f"""
import warnings
warnings.simplefilter("error", UserWarning)
{imports}
spec = gymnasium.spec("esper_nb/Grow-v0")
print([k for k in gymnasium.registry if k.startswith("esper_nb")], spec.entry_point, spec.vector_entry_point)
"""
    done, package = run_python(code, cwd=ROOT), "esper_nb.control"
    entries = [f"{package}.gym:GrowEnv", f"{package}.envs:GrowVecEnv"]
    assert done.stdout.split() == ["['esper_nb/Grow-v0']", *entries], done.stderr
