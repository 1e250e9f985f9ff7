"The front door: it offers what users need, loads it when it is asked for, and makes an environment known to Gymnasium."
import ast
import importlib
import inspect
import subprocess
import sys
from functools import cache

import pytest
from scripts.notebooks import LAYERS, LIB, NBS, ROOT, cells, exported_names, offered_names, stale_stubs

import esper_nb

NAMES = offered_names((LIB/"__init__.pyi").read_text(encoding="utf-8"))

@cache # not at import: every worker imports this file, and one of them runs it
def where(): return exported_names()


def run_python(code):
    "Return what a new interpreter prints."
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")


def test_every_name_is_what_its_module_defines():
    assert NAMES and sorted(NAMES) == esper_nb.__all__
    wrong = [f"no module makes {name} any more: python scripts/notebooks.py door no:{name}"
             for name in NAMES if name not in where()]
    for name in (n for n in NAMES if n in where()):
        module, found = importlib.import_module(f"esper_nb.{where()[name]}"), getattr(esper_nb, name)
        made_in = getattr(found, "__module__", module.__name__)
        if found is not getattr(module, name) or made_in.startswith("esper_nb.") and made_in != module.__name__:
            wrong.append(f"{name} is not the one that {module.__name__} defines")
    assert not wrong, "\n".join(wrong)


def test_stubs_are_in_step_with_the_modules():
    assert not stale_stubs(), "names have moved: python scripts/notebooks.py door"
    assert set(LAYERS) == {p.name for p in LIB.iterdir() if p.is_dir() and p.name[0] != "_"}


def test_a_package_offers_every_public_name_of_its_modules():
    wrong = []
    for package in LAYERS:
        front = importlib.import_module(f"esper_nb.{package}")
        modules = {n: m for n, m in where().items() if m.startswith(f"{package}.")}
        assert sorted(front.__all__) == sorted(modules)
        wrong += [n for n, m in modules.items()
                  if getattr(front, n) is not getattr(importlib.import_module(f"esper_nb.{m}"), n)]
    assert not wrong, wrong


def test_every_name_of_a_tutorial_is_at_the_door():
    wrong = []
    for path in [NBS/"index.ipynb", *sorted((NBS/"tutorials").glob("*.ipynb"))]:
        nodes = [n for c in cells(path) for n in ast.walk(ast.parse(c)) if isinstance(n, ast.ImportFrom)]
        for n in (n for n in nodes if n.module.split(".")[0] == "esper_nb"):
            if n.module != "esper_nb": wrong.append(f"{path.name} imports from {n.module}, not from esper_nb")
            else: wrong += [f"{path.name} uses {a.name}: door {a.name}" for a in n.names if a.name not in NAMES]
    assert not wrong, "\n".join(wrong)


def test_a_name_loads_what_it_needs_and_no_more():
    loaded, few, packages = run_python("""
import sys, esper_nb
names = set(dir(esper_nb))
assert {n for n in names if not n.startswith("__")} == set(esper_nb.__all__) and esper_nb.__version__
import gymnasium
print([m for m in sys.modules if m == "torch" or m.startswith("esper_nb.")])
print(len(sys.modules) < 700)
from esper_nb import Governor
print(sorted({m.split(".")[1] for m in sys.modules if m.startswith("esper_nb.")}))
""")[:3]
    assert (loaded, few, packages) == ("[]", "True", "['core', 'guard']")


def test_a_wrong_name_is_refused_with_the_right_one():
    with pytest.raises(AttributeError, match="offers no 'Governer'; did you mean 'Governor'"): esper_nb.Governer
    with pytest.raises(AttributeError, match="dir\\(esper_nb\\) lists"): esper_nb.qqqq
    with pytest.raises(ImportError): exec("from esper_nb import Sesion")


def test_names_keep_their_help():
    governor = importlib.import_module(f"esper_nb.{where()['Governor']}").Governor
    assert inspect.signature(esper_nb.Governor) == inspect.signature(governor)
    assert "front door" in esper_nb.__doc__


def test_gymnasium_makes_the_environment_without_an_import_of_ours():
    one, many = run_python("""
import warnings
warnings.simplefilter("error", UserWarning)      # Gymnasium warns of a name that is registered twice
import gymnasium, sys
assert "torch" not in sys.modules
for make, kw in ((gymnasium.make, {}), (gymnasium.make_vec, dict(num_envs=2))):
    env = make("esper_nb:esper_nb/Grow-v0", task="digits", limit=64, horizon=2, **kw)
    obs, info = env.reset(seed=0)
    print(type(env.unwrapped).__name__, obs.shape[-1] > 1)
""")[:2]
    assert (one, many) == ("GrowEnv True", "GrowVecEnv True")


@pytest.mark.parametrize("imports", ["import gymnasium, esper_nb", "import esper_nb, gymnasium",
                                     pytest.param("import esper_nb.control.envs, gymnasium", marks=pytest.mark.slow)])
def test_the_environment_is_registered_once_in_every_order(imports):
    said = run_python(f"""
import warnings
warnings.simplefilter("error", UserWarning)
{imports}
spec = gymnasium.spec("esper_nb/Grow-v0")
print([k for k in gymnasium.registry if k.startswith("esper_nb")], spec.entry_point, spec.vector_entry_point)
""")[0]
    entries = [f"esper_nb.{where()[name]}:{name}" for name in ("GrowEnv", "GrowVecEnv")]
    assert said.split() == ["['esper_nb/Grow-v0']", *entries]
