"Processes that begin with the imports done and nothing else: forks of a server, seconds sooner than a new interpreter."
import os
import signal
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

# Lazy packages are named by their modules, or every fork would import torch itself.
NEEDED = ["pytest", "torch._dynamo", "matplotlib.pyplot", "sklearn.datasets", "sklearn.linear_model", "gymnasium",
          "esper_nb.run.cli", "esper_nb.run.compare", "esper_nb.run.fits", "esper_nb.run.runs", "esper_nb.run.repeats",
          "esper_nb.run.report", "esper_nb.run.split"]


def context(method="forkserver"):
    "The server's forks, whatever start method is asked for: for `multiprocessing.get_context`."
    # a fork of this process would have threads of torch that are not there; Windows has no forks at all
    found = get_context("spawn" if os.name == "nt" else "forkserver")
    found.set_forkserver_preload(NEEDED)
    return found


def begin(work, *args, said=None):
    "Begin `work`, which lies in a module, in a process of its own; its two streams go to files in `said`, or nowhere."
    process = context().Process(target=_be, args=(work, args, said))
    process.start()
    return process


def run(work, *args, timeout=600):
    "Do `work` in a process of its own: its status, what it has written, and what it has complained of."
    with tempfile.TemporaryDirectory() as said:
        process = begin(work, *args, said=said)
        process.join(timeout)
        late = process.exitcode is None
        process.kill()
        process.join()
        out, err = (Path(said, name).read_text(encoding="utf-8") for name in ("out", "err"))
        assert not late, f"not done in {timeout} seconds: {out}{err}"
        return SimpleNamespace(returncode=process.exitcode, stdout=out, stderr=err)


def _be(work, args, said):
    import torch
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler) # whoever began the tests in the background ignores both
    if hasattr(signal, "SIGHUP"): signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for stream, name in ((1, "out"), (2, "err")):
        path = Path(said, name) if said else os.devnull
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), stream)
    sys.stdout.reconfigure(line_buffering=True)
    sys.exit(work(*args))


def command(argv, path=()):
    "Run the command with some folders on Python's path: its status."
    sys.path[:0] = map(str, path)
    from esper_nb.run.cli import main
    return main([*map(str, argv)])
