"A panel that is closed, replaced or forgotten leaves no widget, no thread and no population behind."
import gc
import threading
import time
import weakref

import pytest

from esper_nb import Dashboard, FitConfig, GrowVecEnv, Learner, PolicyConfig, PPOConfig, Session, new_population
from esper_nb.core import Workers
from esper_nb.show import EnvSource, dashboard as module
from tests.test_vector_conformance import SMALL, TASK, tiny_data

widgets = pytest.importorskip("ipywidgets.widgets.widget")
pytestmark = pytest.mark.usefixtures("one_thread")


def population(workers=2): return new_population(TASK, FitConfig(lanes=2, epochs=40, workers=workers, width=1),
                                                  data=tiny_data())

def controller():
    envs = GrowVecEnv(data=tiny_data(), num_envs=2, **SMALL)
    config = PPOConfig(num_steps=2, num_updates=9, gamma=envs.config.gamma, num_minibatches=1)
    return EnvSource(Learner(envs, config, PolicyConfig(hidden=8), heads=envs.actions))

def left_over():
    "Widgets in the registry, and threads, once what is unreachable has been freed."
    for _ in range(3): gc.collect()
    return len(vars(widgets)["_instances"]), threading.active_count()

def wait_until(true, seconds=20):
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        gc.collect()
        time.sleep(.05)
    return true()

def opened(what=population, show=True, image=False):
    thing = what()
    session = Session(thing)
    board = Dashboard(session, image=image)
    if show: board.widget()
    session.step(1).wait()
    assert session.wait() == "paused"
    return thing, session, board


OPENED = [pytest.param(population, True, True), *(pytest.param(what, show, image, marks=pytest.mark.slow)
    for what, show, image in ((population, False, False), (population, True, False), (controller, False, False),
                              (controller, True, False), (controller, True, True)))]

@pytest.mark.parametrize("what, show, image", OPENED)
def test_a_closed_panel_and_session_are_freed(what, show, image):
    opened(what, show, image)[2].close() # first use: what stays for good
    before = left_over()
    thing, session, board = opened(what, show, image)
    if show:
        assert left_over()[0] > before[0] and left_over()[1] > before[1]
        if board.panel.thresholds is not None: board.panel.thresholds.more.value = True # more widgets
        board.select(1)
    board.close()
    assert left_over()[0] == before[0] and board.panel is None
    board.close() # again: nothing to do
    session.close()
    refs = [weakref.ref(x) for x in (thing, session, board)]
    del thing, session, board
    assert wait_until(lambda: not any(r() for r in refs)), [r() for r in refs]
    assert wait_until(lambda: left_over()[1] <= before[1])


@pytest.mark.slow
def test_fifty_openings_leave_nothing():
    opened()[2].close()
    before = left_over()
    refs = []
    for _ in range(50):
        board = Dashboard(Session(population(workers=1)))
        board.widget()
        refs += [weakref.ref(x) for x in (board, board.session, board.session.source.pop, board.panel)]
        board.close()
        board.session.close()
        del board
    assert wait_until(lambda: not any(r() for r in refs))
    assert wait_until(lambda: left_over()[1] <= before[1]) and left_over()[0] <= before[0]


def test_a_panel_can_be_opened_again():
    _, session, board = opened()
    first = board.widget()
    board.close()
    again = board.widget()
    assert again is not first and again.comm is not None and board.panel.feed.thread.is_alive()
    board.panel.bar.buttons["step"].click()
    assert session.wait() == "paused" and session.steps == 2
    board.close()
    session.close()


def test_a_run_goes_on_after_its_threads_were_freed():
    pop, session, board = opened()
    threads = threading.active_count()
    session.stop().wait()
    assert wait_until(lambda: threading.active_count() < threads) # that of the session, and the workers
    session.step(1).wait()
    assert session.wait() == "paused" and session.steps == 2
    board.close()
    session.close()
    assert pop.workers.map(lambda i: i + 1, [1, 2]) == [2, 3] # and for its owner, too
    pop.workers.close()


def test_a_session_that_never_ran_frees_the_threads_of_its_population():
    pop = population()
    threads = threading.active_count()
    Session(pop).close()
    assert wait_until(lambda: threading.active_count() < threads, 5)


def test_a_forgotten_session_is_freed():
    before = left_over()
    thing, session, board = opened(show=False)
    refs = [weakref.ref(x) for x in (thing, session)]
    del thing, session, board
    assert wait_until(lambda: not any(r() for r in refs))
    assert wait_until(lambda: left_over()[1] <= before[1])


def test_a_forgotten_session_that_runs_goes_on_to_its_end():
    pop = population()
    Session(pop).start()
    gc.collect()
    end = time.monotonic() + 60
    while pop.epoch.min() < 40 and time.monotonic() < end: time.sleep(.1)
    assert pop.epoch.tolist() == [40, 40]


def test_the_panel_of_a_cell_that_runs_again_is_freed(monkeypatch):
    monkeypatch.setattr(module, "running_cell", lambda: "cell")
    monkeypatch.setattr(module.NotebookOutput, "publish", lambda self, lane: None)
    def run_cell():
        board = Dashboard(population(), view="widgets")
        board._repr_mimebundle_()
        board.session.start()
        return board
    outputs = [run_cell()] # as the notebook's `Out`, which holds them for ever
    one = outputs[0]
    refs = [weakref.ref(x) for x in (one.session, one.session.source.pop, one.panel)]
    size = left_over()[0]
    outputs.append(run_cell())
    assert wait_until(lambda: not any(r() for r in refs)), [r() for r in refs]
    assert left_over()[0] <= size
    assert repr(one) == "replaced by a later one" and one._repr_mimebundle_() == {"text/plain": repr(one)}
    with pytest.raises(RuntimeError, match="a later panel has replaced this one"): one.session
    outputs[1].close()
    outputs[1].session.close()
    assert "cell" not in module.DASHBOARDS


def test_workers_start_again_after_they_were_closed():
    workers = Workers(2)
    assert workers.map(abs, [-1, -2]) == [1, 2]
    for _ in range(2):
        workers.close()
        workers.close()
        assert workers.map(abs, [-1, -2, -3]) == [1, 2, 3]
    workers.close()
