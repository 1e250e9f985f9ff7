"Markers, a visible reason where a test cannot run, and fixtures that several files share."
import signal

import pytest


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs a CUDA device; skipped with the reason where there is none")
    browser = "browser: drives a headless Chromium; skipped with the reason where there is none"
    config.addinivalue_line("markers", browser)
    config.addinivalue_line("markers", "slow: takes more than a few seconds; leave out with -m 'not slow'")


def pytest_collection_modifyitems(config, items):
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked: return
    import torch
    if torch.cuda.is_available(): return
    skip = pytest.mark.skip(reason=f"needs a CUDA device; torch {torch.__version__} sees none")
    for item in marked: item.add_marker(skip)


@pytest.fixture(scope="module")
def one_thread():
    "One thread inside operations while a file's tests run: `pytestmark = pytest.mark.usefixtures(\"one_thread\")`."
    import torch
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
