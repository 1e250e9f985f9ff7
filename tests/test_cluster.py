"A cluster by the tutorial's own commands: nodes that die and join change nothing, and nodes get the code they lack."
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from test_workers import HAS_RAY, descendants, needs_ray
from test_workers_runs import SMALL, assert_same_run

from esper_nb.run import main

pytestmark = [pytest.mark.slow, needs_ray, pytest.mark.usefixtures("one_thread"),
              pytest.mark.flaky(reruns=1)] # Ray gives its own processes seconds to start, busy machine or not
KILLS = int(os.environ.get("ESPER_NB_KILLS", 1)) # nodes that die in one run
TRAIN = ("train", "digits_impaired", "--updates", 4 + 12 * KILLS, *SMALL, "--quiet", "--shards", 2,
         "--no-exact")
WORDS = "was lost (", "waiting for a core: 1 of 2 workers"


def eventually(found, seconds=240):
    "Wait for something, and return it."
    limit = time.time() + seconds
    while not (value := found()):
        assert time.time() < limit, "it did not happen"
        time.sleep(.2)
    return value


class Cluster:
    "Nodes of one core each on this machine, where a local run of Ray has left its token."
    def __init__(self, folder):
        self.folder, self.nodes = folder, []
        self.ray = Path(tempfile.mkdtemp(prefix="ray-")) # a short path, for sockets
        self.told, self.head = self.ray/"session_latest/node_ip_address.json", "" # the newest Ray has no such file
        with socket.socket() as free:
            free.bind(("", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        (folder/".ray").mkdir()
        (folder/".ray/auth_token").write_text("0" * 64)
        self.env = os.environ | dict(
            HOME=str(folder), RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="correct-horse-battery-staple",
            RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="1", RAY_USAGE_STATS_ENABLED="0", RAY_agent_register_timeout_ms="120000")
        self.env.pop("RAY_ADDRESS", None)
        paths = [k for k in self.env.get("PYTHONPATH", "").split(os.pathsep) if not (Path(k)/"esper_nb").exists()]
        self.bare = self.env | dict(PYTHONPATH=os.pathsep.join(paths)) # of nodes

    def join(self):
        """Start the head, or another node, each at an address of its own.

        All share the head's folder here, where Ray looks up which node serves a driver: it has to stay the head.
        """
        number, port = len(self.nodes), self.address.split(":")[1]
        head = "--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={self.ray}"
        where = f"--node-ip-address=127.0.0.{number + 1}", *((f"--address={self.address}",) if number else head)
        log = self.folder/f"node-{number}.log"
        words = [sys.executable, "-m", "ray.scripts.scripts", "start", *where]
        small = "--num-cpus=1", "--object-store-memory=80000000", "--block"
        for _ in range(3): # a busy machine may need longer than the 30 seconds that Ray gives a node
            with open(log, "w") as out:
                begun = subprocess.Popen([*words, *small], env=self.bare, cwd=self.folder, stdout=out, stderr=out)
            self.nodes[number:] = [begun]
            eventually(lambda begun=begun: "Ray runtime started" in log.read_text() or begun.poll() is not None)
            if begun.poll() is not None: continue
            if self.told.exists(): self.head = self.head or self.told.read_text()
            if self.head: self.told.write_text(self.head)
            return
        raise AssertionError(log.read_text()[-2000:])

    def lose(self, number):
        "Kill all processes of a node at once."
        for pid in (*descendants(self.nodes[number].pid), self.nodes[number].pid):
            try: os.kill(pid, 9)
            except ProcessLookupError: pass
        self.nodes[number].wait()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        cluster.join()
        cluster.join()
        yield cluster
    finally:
        for k in range(len(cluster.nodes)): cluster.lose(k)
        shutil.rmtree(cluster.ray, ignore_errors=True)


LOOK = """
import sys
from pathlib import Path
from esper_nb.run import load_plugin, new_worker, start_ray
class Look:
    def __init__(self, tell): pass
    def package(self):
        import esper_nb
        return esper_nb.__file__
    def blueprints(self):
        from esper_nb.grow import list_blueprints
        return list_blueprints("pointwise")
    def close(self): pass
def lacking(tell): return open("/data/mine.csv")
print(start_ray())
plugin = Path(sys.argv[1])
load_plugin(plugin)
workers = [new_worker("ray", make, 2) for make in (Look, lacking)]
plugin.unlink()
for method in ("package", "blueprints"):
    workers[0].start(method)
    print(workers[0].finish(200))
workers[1].start("package")
try: workers[1].finish(200)
except RuntimeError as e: print(e)
"""


def test_nodes_get_the_code_that_they_lack_and_name_what_is_missing(nodes, tmp_path):
    plugin = tmp_path/"mine.py"
    plugin.write_text("from esper_nb.grow import blueprint\nfrom esper_nb.core import conv2d\n"
                      "@blueprint('pointwise', 'cnn', 64)\n"
                      "def pointwise(channels, lanes): return conv2d(channels, channels, 1, lanes, bias=False)\n")
    env = nodes.env | dict(RAY_ADDRESS=nodes.address, PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run([sys.executable, "-c", LOOK, plugin], env=env, cwd=tmp_path, capture_output=True, text=True,
                          timeout=500)
    assert done.returncode == 0, done.stderr
    cores, package, blueprints, refused = done.stdout.splitlines()
    assert cores == "2" and "runtime_resources" in package and "pointwise" in blueprints
    assert refused.startswith("on machine ") and "/data/mine.csv" in refused


@pytest.mark.skipif(HAS_RAY and tuple(map(int, version("ray").split(".")[:2])) < (2, 52),
                    reason="this version of Ray knows no tokens")
def test_a_shell_without_the_token_is_told_why_it_cannot_join(nodes):
    env = {k: v for k, v in nodes.env.items() if not k.startswith("RAY_AUTH")} | dict(RAY_ADDRESS=nodes.address)
    program = "from esper_nb.run import start_ray\ntry: start_ray()\nexcept RuntimeError as e: print(e)"
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith("Ray does not start here: "), done.stderr
    assert "token is missing" in done.stdout and "RAY_AUTH_TOKEN" in done.stdout and len(done.stdout.splitlines()) == 1


def test_nodes_that_die_and_join_change_nothing(nodes, tmp_path):
    "There is no core to spare: what was lost waits, says so within ten seconds, and goes on when a node joins."
    assert main([*map(str, TRAIN), "--out", str(tmp_path/"here")]) == 0
    log, rows = tmp_path/"log", tmp_path/"there/digits_impaired/rows.jsonl"
    command = "import sys; from esper_nb.run import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", command, *map(str, TRAIN), "--engine", "ray", "--out", tmp_path/"there"]
    env = nodes.env | dict(RAY_ADDRESS=nodes.address, OMP_NUM_THREADS="1")
    with open(log, "w") as out: begun = subprocess.Popen(words, env=env, stderr=out)
    def updates(): return rows.read_text().count('"update.loss') if rows.exists() else 0
    def said(text): return log.read_text().count(text)
    try:
        for _ in range(KILLS):
            seen = updates()
            eventually(lambda seen=seen: updates() > seen or begun.poll() is not None)
            assert begun.poll() is None, log.read_text()
            losses, waits = map(said, WORDS) # Ray may send a shard to a machine whose end it does not know: lost again
            nodes.lose(len(nodes.nodes) - 1)
            eventually(lambda losses=losses: said(WORDS[0]) > losses)
            lost = time.time()
            eventually(lambda waits=waits: said(WORDS[1]) > waits)
            assert time.time() - lost < 10
            nodes.join()
        assert begun.wait(500) == 0, log.read_text()
    finally: begun.kill()
    assert_same_run(tmp_path/"there/digits_impaired", tmp_path/"here/digits_impaired")
