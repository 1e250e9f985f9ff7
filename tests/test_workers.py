"Lanes in shards, in processes and on Ray: the bits of one process, whatever dies."
import importlib.util
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import warm

from esper_nb.control import EnvConfig, draw_actions
from esper_nb.core import generator
from esper_nb.record import encode_row
from esper_nb.run import engines
from esper_nb.run import FaultTolerance, LocalWorker, SplitVecEnv, WorkerLost, new_worker, start_ray
from esper_nb.train import Fault

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0") # as `start_ray` has it, before anybody imports Ray
os.environ.setdefault("RAY_worker_niceness", "0") # with 15, its own, other programs keep workers from importing torch
HAS_RAY = importlib.util.find_spec("ray") is not None # to import it takes seconds, in every process that runs tests
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="needs Ray: pip install 'esper_nb[ray]'")
CONFIG = EnvConfig(task="digits", num_envs=8, horizon=4, limit=128, workers=1, faults=(Fault("nan", lane=5, epoch=2),),
                   blueprints=("norm", "conv_light"))


class Adder:
    "What a worker can be asked."
    def __init__(self, notify): self.n, self.notify = 0, notify
    def add(self, more):
        self.n += more
        self.notify("added", more)
        return self.n
    def pid(self): return os.getpid()
    def wrong(self): raise ValueError("three is not four")
    def sleep(self, seconds): time.sleep(seconds)
    def close(self): pass


def descendants(pid):
    "Numbers of all living processes that descend from one."
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try: text = stat.read_text()
        except OSError: continue
        number, rest = int(text.split()[0]), text.rsplit(")", 1)[1].split()
        if rest[0] != "Z": parents.setdefault(int(rest[1]), []).append(number)
    found, todo = [], [pid]
    while todo: todo += (new := parents.get(todo.pop(), [])); found += new
    return found


def still_there(pids, seconds=90):
    "Those of some processes that have not ended after a while."
    def alive(pid):
        try: return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError: return False
    limit = time.time() + seconds
    while any(map(alive, pids)) and time.time() < limit: time.sleep(.2)
    return [pid for pid in pids if alive(pid)]


@pytest.fixture(scope="module")
def cluster():
    import ray
    start_ray(cores=2)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__]) # other processes cannot import a test
    yield ray
    ray.shutdown()


def play(env, steps=10, kill=None):
    "Everything a run sees of an environment, and its state at the end; `kill(env, t)` before every answer."
    env.reset(seed=3)
    seen, rows = [], []
    for t in range(steps):
        if kill is not None: kill(env, t)
        a = draw_actions(env.actions, env.mask, generator(7, t)).numpy()
        obs, reward, ended, _, info = env.step(a)
        seen += [obs.copy(), reward, ended, info["action_mask"]]
        rows += [encode_row({k: v for k, v in row.items() if k != "governor.seconds"}) # a clock's
                 for row in env.rows(epoch=t, step=t + 1)]
    state = [p["parts"] for p in env.state_dict()["shards"]]
    return seen, rows, state, env.test_accuracy()


def assert_same(one, other):
    for a, b in zip(one[0], other[0], strict=True): np.testing.assert_array_equal(a, b)
    assert one[1] == other[1]
    def leaves(x):
        if isinstance(x, dict): # streams of the process, of which nothing is drawn, are its own
            return [leaf for k in sorted(x, key=str) if not str(k).startswith("streams") for leaf in leaves(x[k])]
        if isinstance(x, list | tuple): return [leaf for v in x for leaf in leaves(v)]
        return [x]
    for a, b in zip(leaves(one[2]), leaves(other[2]), strict=True):
        if isinstance(a, torch.Tensor): torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(one[3], other[3])


@pytest.fixture(scope="module")
def here(one_thread):
    "The same lanes in two and four shards of this process."
    found = {}
    for shards in (2, 4):
        env = SplitVecEnv(CONFIG, shards=shards)
        found[shards] = play(env)
        env.close()
    return found


def test_a_fault_stays_with_its_lane(here):
    for shards in (2, 4):
        governed = [row for row in here[shards][1] if '"kind": "governor"' in row or '"kind":"governor"' in row]
        assert governed and all('"lane": 5' in row or '"lane":5' in row for row in governed)


@pytest.mark.long("4")
@pytest.mark.long("5")
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(k, marks=pytest.mark.slow) for k in range(2, 6))])
def test_workers_that_fail_at_random_change_nothing(here, seed, caplog):
    luck = random.Random(seed)
    class Fragile(LocalWorker):
        def finish(self, timeout=None):
            if luck.random() < .08: raise WorkerLost("on purpose")
            return super().finish(timeout)
    env = SplitVecEnv(CONFIG, shards=4, engine=Fragile, tolerance=FaultTolerance(every=3, attempts=20))
    assert_same(play(env), here[4])
    assert env.losses > 0
    assert "restored in a new worker" in caplog.text
    env.close()


def test_a_shard_that_never_comes_back_ends_the_run():
    class Gone(LocalWorker):
        made = 0
        def __init__(self, *args):
            super().__init__(*args)
            Gone.made += 1
        def finish(self, timeout=None):
            if Gone.made > 2: raise WorkerLost("out of memory")
            return super().finish(timeout)
    env = SplitVecEnv(CONFIG, shards=2, engine=Gone, tolerance=FaultTolerance(attempts=3))
    Gone.made = 3
    said = r"shard 0 \(lanes 0 to 3\) was lost 3 times while it was restored: out of memory"
    with pytest.raises(WorkerLost, match=said): env.reset(seed=0)


def test_ray_is_started_again_where_a_busy_machine_was_too_slow(monkeypatch, caplog):
    tries, why = [], "The current node timed out during startup."
    def init(**how):
        tries.append(how)
        if len(tries) < 3: raise OSError(why)
    busy = SimpleNamespace(init=init, is_initialized=lambda: False, shutdown=lambda: None,
                           cluster_resources=lambda: dict(CPU=2))
    monkeypatch.setitem(sys.modules, "ray", busy)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert start_ray() == 2 and len(tries) == 3 and caplog.text.count("is started again") == 2
    tries, why = [], "no such address"
    with pytest.raises(RuntimeError, match="Ray does not start here: no such address"): start_ray()
    assert len(tries) == 1
    with pytest.raises(RuntimeError, match="nobody answers at 127.0.0.1:1"): start_ray("127.0.0.1:1")
    assert len(tries) == 1


# ---- real processes

ELSEWHERE = ["process", pytest.param("ray", marks=[needs_ray, pytest.mark.slow])]


@pytest.fixture(params=ELSEWHERE)
def engine(request, monkeypatch):
    "Processes are forks of a server, which begin sooner; where nobody asks for this fixture they are the engine's own."
    if request.param == "ray": request.getfixturevalue("cluster")
    monkeypatch.setattr(engines, "get_context", warm.context)
    return request.param


def test_a_call_elsewhere_is_answered_and_an_error_there_is_an_error_here(engine):
    messages = []
    worker = new_worker(engine, Adder, notify=lambda *message: messages.append(message))
    worker.start("wrong")
    with pytest.raises(ValueError, match="three is not four"): worker.finish()
    worker.start("add", 2)
    assert worker.finish() == 2 and messages == [("added", 2)]
    worker.start("sleep", 60)
    assert not worker.ready(.2)
    with pytest.raises(WorkerLost, match="no answer within 0.2 s"): worker.finish(.2)
    worker.close()


def test_a_process_that_ends_is_a_lost_worker(monkeypatch):
    monkeypatch.setattr(engines, "get_context", warm.context)
    worker = new_worker("process", Adder)
    worker.start("pid")
    os.kill(worker.finish(), signal.SIGKILL)
    worker.start("pid")
    with pytest.raises(WorkerLost, match="its process has ended"): worker.finish()
    worker.close()


def pid_of(env, number):
    "The process of a shard."
    worker = env.shards[number].worker
    if hasattr(worker, "process"): return worker.process.pid
    import ray
    return ray.get(worker.actor.__ray_call__.remote(lambda self: os.getpid()))


@pytest.mark.slow
@pytest.mark.long("ray")
def test_a_frozen_process_is_named_and_replaced(engine, here, caplog):
    tolerance = FaultTolerance(every=3, patience=1., timeout=40. if engine == "ray" else 20.)
    env = SplitVecEnv(CONFIG, shards=2, engine=engine, tolerance=tolerance)
    def freeze(env, t):
        if t == 4: os.kill(pid_of(env, 1), signal.SIGSTOP)
    assert_same(play(env, kill=freeze), here[2])
    assert "shard 1 (lanes 4 to 7) has not answered for 1 s" in caplog.text
    assert env.shards[1].losses == 1
    env.close()


PROGRAM = """
    import signal, sys, time
    signal.signal(signal.SIGINT, signal.default_int_handler) # whoever started the tests in the background ignores it
    from esper_nb.control.envs import EnvConfig
    from esper_nb.run.split import SplitVecEnv
    import numpy as np
    env = SplitVecEnv(EnvConfig(task="digits", num_envs=4, horizon=4, limit=256, workers=1), engine=sys.argv[1])
    env.reset(seed=0)
    print("ready", flush=True)
    while True: env.step(np.zeros((4, len(env.actions.sizes)), int))
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ELSEWHERE) # not the fixture
def test_no_process_is_left_behind(engine):
    "By Ctrl-C; tests/test_workers_runs.py has the other ends."
    begun = subprocess.Popen([sys.executable, "-c", textwrap.dedent(PROGRAM), engine], text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        assert begun.stdout.readline() == "ready\n"
        family = descendants(begun.pid)
        assert len(family) >= (4 if engine == "ray" else 2) # two workers, and Ray's own
        begun.send_signal(signal.SIGINT)
        begun.wait(30)
        assert not still_there(family, 180) # Ray's agents notice after a minute that a killed driver is gone
    finally: begun.kill()


@pytest.mark.slow
@needs_ray
def test_nothing_listens_on_an_outside_address(cluster):
    mine = set(descendants(os.getpid())) | {os.getpid()}
    sockets = set()
    for pid in mine:
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            try: target = os.readlink(fd)
            except OSError: continue
            if target.startswith("socket:["): sockets.add(target[8:-1])
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            field = line.split()
            if field[3] != "0A" or field[9] not in sockets: continue # 0A: listening
            address = bytes.fromhex(field[1].split(":")[0])
            assert address[-4:][::-1] == bytes([127, 0, 0, 1]) or set(address[:-1]) == {0} and address[-1] == 1, line
