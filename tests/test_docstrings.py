"What the help of the front door says: its form as numpydoc wants it, and examples that run as they stand."
import doctest
import importlib
import inspect
import pkgutil
import sys
from functools import cached_property

import pytest
from numpydoc.validate import validate

import esper_nb

pytestmark = pytest.mark.usefixtures("one_thread")
# Parameters and what is returned stand beside the arguments, as docments: PR, RT and YD are not asked for.
CODES = {"GL03", "GL05", "GL06", "GL07", "GL08", "GL09", "SS01", "SS02", "SS03", "SS04", "SS06", "EX01"}
FUNCTIONS = {name: f for name in esper_nb.__all__ if callable(f := getattr(esper_nb, name))}


def test_every_name_has_a_summary_and_an_example_in_sections_that_tools_read():
    wrong = [f"{name}: {code}: {said}" for name in FUNCTIONS for code, said in validate(f"esper_nb.{name}")["errors"]
             if code in CODES]
    assert len(FUNCTIONS) > 80 and not wrong, "\n".join(["", *wrong])


def test_every_public_class_function_and_method_says_what_it_is():
    seen, silent = 0, []
    for info in pkgutil.walk_packages(esper_nb.__path__, "esper_nb."):
        module = importlib.import_module(info.name)
        for name, f in vars(module).items():
            if name[0] == "_" or getattr(f, "__module__", "") != info.name or not callable(f): continue
            own = {k: getattr(f, k) for k, v in vars(f).items() if k[0] != "_" and (
                inspect.isroutine(v) or isinstance(v, (property, cached_property)))} if inspect.isclass(f) else {}
            seen += 1 + len(own)
            fields = getattr(f, "__dataclass_fields__", ())
            silent += [f"{info.name}.{name}.{k}" for k, v in {"": f, **own}.items()
                       if k not in ("forward", *fields) and not inspect.getdoc(v)]
    assert seen > 1500 and not silent, silent


def test_every_example_gives_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner, said = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE), []
    for name, f in FUNCTIONS.items():
        names = dict(vars(sys.modules[f.__module__]))
        test = doctest.DocTestParser().get_doctest(f.__doc__, names, name, None, 0)
        runner.run(test, out=said.append)
    assert runner.tries > 200 and not runner.failures, "".join(said)
