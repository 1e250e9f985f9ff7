"What the help of the front door says: its form as numpydoc wants it, and examples that run as they stand."
import doctest
import importlib
import inspect
import json
import pkgutil
import re
import sys
from functools import cached_property

import pytest
from numpydoc.validate import validate
from scripts.notebooks import find_notebooks

import esper_nb

pytestmark = pytest.mark.usefixtures("one_thread")
# Parameters and what is returned stand beside the arguments, as docments: PR, RT and YD are not asked for.
CODES = {"GL03", "GL05", "GL06", "GL07", "GL08", "GL09", "SS01", "SS02", "SS03", "SS04", "SS06", "EX01"}
FUNCTIONS = {name: f for name in esper_nb.__all__ if callable(f := getattr(esper_nb, name))}
CALLED_FOR_YOU = { # public methods of the front door's classes that no page shows at work: who calls them
    "EnvConfig.named": "GrowVecEnv, as it begins",
    "GrowVecEnv.carry_out": "GrowVecEnv.step",
    "GrowVecEnv.close_extras": "Gymnasium's close",
    "GrowVecEnv.look_at": "GrowVecEnv.render",
    "Growing.add_slots": "attach_slots and GrowingModel",
    "GrowingModel.forward": "model(x)",
    "LaneOptimizer.alike": "Stepper",
    "LaneOptimizer.write_ages": "Stepper",
    "Memoryless.signals": "as_controller, for every lane",
    "ModuleHostConfig.block": "tasks of tokens",
    "ModuleHostConfig.layouts": "explore_host",
    "ModuleHostConfig.maker": "explore_host",
    "Population.judged_together": "Population.evaluate",
    "Population.note_measurements": "run_epoch",
    "Population.retry_germinations": "fit, before every epoch",
    "Population.slot_tables": "run_epoch",
    "Dashboard.picture": "a cell that shows the dashboard",
    "Dashboard.give_way": "the next Dashboard that the same cell shows",
    "Fault.text": "messages",
    "FitRun.contract": "save and load",
    "FitRun.stateful": "save and load",
    "FitRun.where": "messages",
    "Learner.update_policy": "Learner.step",
    "Recorder.reports": "Recorder.close",
    "ResumableRun.try_save": "Run.updates and FitRun.epochs",
    "Run.contract": "save and load",
    "Run.record": "Run.updates",
    "Run.stateful": "save and load",
    "Run.where": "messages",
    "Source.would_help": "the panel",
    "SplitVecEnv.close_extras": "Gymnasium's close",
    "SplitVecEnv.save_shards": "SplitVecEnv.step"}


def methods():
    "Return {Class.name: (class that defines it, name, what it is, classes that have it)} of the front door."
    found = {}
    for cls in (f for f in FUNCTIONS.values() if inspect.isclass(f)):
        for k in dir(cls):
            owner = next(c for c in cls.__mro__ if k in vars(c))
            value = vars(owner)[k]
            wanted = inspect.isroutine(value) or isinstance(value, (property, cached_property))
            if k[0] == "_" or not owner.__module__.startswith("esper_nb.") or not wanted: continue
            if k in getattr(owner, "_fields", ()): continue
            found.setdefault(f"{owner.__name__}.{k}", (owner, k, value, []))[-1].append(cls)
    return found

def examples(text): return "\n".join(line for line in (text or "").splitlines() if re.match(r" *(>>>|\.\.\.)", line))

def shown_code():
    "Return {module: code that its page shows}, and the code of all pages."
    by_module, every = {}, []
    for path in find_notebooks():
        cells = ["".join(c["source"]) for c in json.loads(path.read_text(encoding="utf-8"))["cells"]
                 if c["cell_type"] == "code"]
        shown = "\n".join(c for c in cells if not re.search(r"^#\|\s*(hide|export)\b", c, re.M))
        every.append(shown)
        if name := re.search(r"^#\|\s*default_exp\s+(\S+)", "\n".join(cells), re.M): by_module[name[1]] = shown
    return by_module, "\n".join(every)


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


def test_every_public_method_is_seen_at_work_in_an_example_or_on_a_page():
    "In an example of its class, in a cell that its page shows, or on any page if no other class has its name."
    by_module, every = shown_code()
    found, missing = methods(), set()
    names = [k for _, k, *_ in found.values()]
    for name, (owner, k, value, classes) in found.items():
        code = [examples(f.__doc__) for c in {owner, *classes} for f in (c, *vars(c).values())]
        code += [by_module.get(c.__module__.removeprefix("esper_nb."), "") for c in {owner, *classes}]
        if names.count(k) == 1: code.append(every)
        called = rf"\.{k}\b" if isinstance(value, (property, cached_property)) else rf"\.{k}\("
        if not re.search(called, "\n".join(code)): missing.add(name)
    assert len(found) > 150 and missing == set(CALLED_FOR_YOU), missing ^ set(CALLED_FOR_YOU)


@pytest.mark.slow
def test_every_example_gives_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner, said = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE), []
    shown = {name: (f.__module__, f.__doc__) for name, f in FUNCTIONS.items()}
    shown |= {name: (owner.__module__, value.__doc__) for name, (owner, _, value, _) in methods().items()}
    for name, (module, text) in shown.items():
        test = doctest.DocTestParser().get_doctest(text or "", dict(vars(sys.modules[module])), name, None, 0)
        runner.run(test, out=said.append)
    assert runner.tries > 300 and not runner.failures, "".join(said)
