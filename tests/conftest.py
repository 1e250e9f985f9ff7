"Markers, a visible reason where a test cannot run, and fixtures that several files share."
import gc
import importlib
import logging
import os
import signal
import sys
import warnings
from collections import defaultdict

import pytest
from scripts.notebooks import changed_first


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs a CUDA device; runs on a pretended one, too, and where there is no "
                            "other, the real run is skipped with the reason")
    config.addinivalue_line("markers", "real(why): even a marked test cannot run on a pretended device, and why")
    browser = "browser: drives a headless Chromium; skipped with the reason where there is none"
    config.addinivalue_line("markers", browser)
    config.addinivalue_line("markers", "long(case): a case with this in its name takes minutes for what others show; "
                            "it runs only with ESPER_NB_LONG in the environment")
    config.addinivalue_line("markers", "flaky(reruns): runs again where it failed; without pytest-rerunfailures, once")
    config.addinivalue_line("markers", "costly: a matrix whose cases take a second each; the short run keeps the first")
    config.addinivalue_line("markers", "slow: a matrix, or more than a few seconds; left to `make test-all`")


def pytest_generate_tests(metafunc):
    "Every marked test is two: one for a real device, one for a pretended one."
    if not metafunc.definition.get_closest_marker("cuda"): return
    metafunc.parametrize("machine", ["real", "pretended"], indirect=True)


def thin_matrices(items):
    "Mark cases of a matrix slow, but for the first and the last (of costly ones the first): those are the short run's."
    matrices = defaultdict(list)
    for item in items:
        if not hasattr(item, "callspec"): continue
        matrices[item.path, item.cls, item.originalname, item.callspec.params.get("machine")].append(item)
    for cases in matrices.values():
        last = None if cases[0].get_closest_marker("costly") else -1
        for case in cases[1:last]: case.add_marker(pytest.mark.slow)


def leave_out_long(items):
    "Skip the cases that `long` names."
    skip = pytest.mark.skip(reason="minutes for what other cases show, too: ESPER_NB_LONG=1")
    for item in items:
        if any(mark.args[0] in item.callspec.id for mark in item.iter_markers("long")): item.add_marker(skip)


# Those that take longest: begun last, one of them would run alone at the end. Some of them wait, the next ones compute.
LONGEST = ["test_cluster", "test_exact", "test_workers_runs", "test_strangers", "test_dashboard_browser", "test_fits",
           "test_workers", "test_plugins", "test_snippets", "test_causes", "test_other_loops", "test_pretended",
           "test_proofs", "test_faults_runs", "test_trainer", "test_cli", "test_report", "test_envs"]


def longest_first(paths):
    "Return paths in their order, but those that take longest first."
    return sorted(paths, key=lambda path: LONGEST.index(path.stem) if path.stem in LONGEST else len(LONGEST))


@pytest.hookimpl(tryfirst=True)      # before `-m` looks at the marks
def pytest_collection_modifyitems(config, items):
    thin_matrices(items)
    if "ESPER_NB_LONG" not in os.environ: leave_out_long(items)
    files = longest_first(dict.fromkeys(item.path for item in items))
    if "not slow" in config.getoption("markexpr"): files = changed_first(files)
    items.sort(key=lambda item: files.index(item.path))
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked: return
    import torch
    there = torch.cuda.is_available()
    for item in marked:
        kind = item.callspec.params["machine"] if hasattr(item, "callspec") else "real"
        alone = item.get_closest_marker("real")
        if kind == "real" and there: continue
        if kind == "real": reason = f"needs a CUDA device; torch {torch.__version__} sees none"
        elif there: reason = "pretended: not where there is a real device"
        elif alone: reason = f"cannot be pretended: {alone.args[0]}"
        else: continue
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def machine(request):
    "The devices of a marked test: the real ones, or two that are pretended."
    if getattr(request, "param", "real") == "real":
        yield None
        return
    from pretend import PretendedCuda
    with PretendedCuda(devices=2) as gpu: yield gpu


def pytest_terminal_summary(terminalreporter):
    "Tests of a GPU, apart: what ran for real, what was only pretended, and what that cannot know."
    def count(kind, how):
        names = {getattr(r, "nodeid", "") for r in terminalreporter.stats.get(how, [])}
        found = [n for n in names if f"[{kind}" in n or kind == "pretended" and "/test_pretended.py" in n]
        return f"{len(found)} {how}" if found else ""
    counts = {kind: ", ".join(filter(None, (count(kind, how) for how in ("passed", "failed", "error", "skipped"))))
            for kind in ("pretended", "real")}
    if not any(counts.values()): return
    terminalreporter.section("CUDA")
    for kind, text in counts.items(): terminalreporter.write_line(f"{kind}: {text or 'none'}")
    if counts["pretended"]:
        from pretend import limits
        terminalreporter.write_line(f"A pretended device has {limits}.")


# Imports and tests make many objects that live on: cycles among them are looked for less often, as in a training loop.
gc.set_threshold(50_000, 20, 50)

@pytest.fixture(scope="module", autouse=True)
def only_what_is_new():
    "What a file finds, torch above all, is not looked through again whenever its tests collect garbage."
    if "torch" in sys.modules: importlib.import_module("torch._dynamo") # or the first optimizer does
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    "Libraries in C++ count what is left at the end of the process, and complain of it."
    gc.unfreeze()

@pytest.fixture(scope="module")
def one_thread():
    "One thread inside operations while a file's tests run: `pytestmark = pytest.mark.usefixtures(\"one_thread\")`."
    import torch
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def own_log_level():
    "What one test, or a benchmark that it calls, keeps quiet is said again in the next one."
    yield
    logging.getLogger("esper_nb").setLevel(logging.NOTSET)


@pytest.fixture
def few_words():
    "A Governor and the frameworks around it say nothing: the same with `\"few_words\"`."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("esper_nb").setLevel(logging.CRITICAL)
        yield


@pytest.fixture
def no_plays(monkeypatch):
    "Runs end when they are trained: nothing is played against other controllers."
    from esper_nb.run import runs
    monkeypatch.setattr(runs.Run, "finish", lambda run, **more: run)
    monkeypatch.setattr(runs, "comparison_text", lambda result: "")
    monkeypatch.setattr(runs.Run, "summary_text", lambda run, result: "")


@pytest.fixture
def no_pictures(monkeypatch):
    "Pictures are empty files, and a report has none: to draw them takes longer than all that a small run trains."
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path, **how: path.write_bytes(b""))
    monkeypatch.setattr("esper_nb.run.report.picture_html", lambda draw, alt: "")


@pytest.fixture
def plain_signals():
    "Signals as a process in the foreground has them; one started by nohup, or in the background, ignores some."
    plain = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in plain.items()}
    yield
    for number, handler in before.items(): signal.signal(number, handler)


@pytest.fixture
def stop_at():
    "`count = stop_at(learner, edge)`: a SIGINT before the learner's step number `edge`; `count()`: how many it began."
    def stop(learner, edge):
        calls = 0
        def hit(f):
            def g(*a):
                nonlocal calls
                calls += 1
                if calls == edge: signal.raise_signal(signal.SIGINT)
                return f(*a)
            return g
        learner.step_envs, learner.learn = hit(learner.step_envs), hit(learner.learn)
        return lambda: calls
    return stop
