"""Two programs, two processes, turn by turn: how a speed-up is measured so that it can be believed.

The other benchmarks import this; nbs/explanations/benchmarks.ipynb says why it is measured like this.
"""

import argparse, contextlib, json, platform, subprocess, sys, tempfile, time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO

import torch

from esper_nb.core.config import Config, check
from esper_nb.core.devices import keep_freed_memory
from esper_nb.core.workers import default_workers
from esper_nb.train.data import ImageData, TextData
from esper_nb.train.datasets import synthetic_cifar10
from esper_nb.train.tasks import Task, get_task

ROOT = Path(__file__).resolve().parents[1]
STORED = ROOT/"nbs/explanations" # where pages find the figures

def multiply(
    size: int = 256, # rows and columns
    times: int = 10, # products in an epoch
) -> Callable[[int], object]: # runs epoch e
    "Matrix products: a side whose work can be counted."
    a = torch.ones(size, size)
    def epoch(e: int):
        for _ in range(times): a @ a
    return epoch

def find_maker(import_path: str) -> Callable[..., Callable[[int], object]]: # import_path: "module:function"
    "Return the function behind an import path, by which one process tells another what to run."
    module, _, name = import_path.partition(":")
    return getattr(import_module(module), name)

def serve(
    make: str, # import path of a maker
    settings: dict, # its arguments
    threads: int, # inside an operation
    keep: bool, # keep freed memory
):
    "Run an epoch in the process of a `Side` for each line that comes in, and print its seconds."
    if keep: keep_freed_memory()
    torch.set_num_threads(threads)
    epoch = find_maker(make)(**settings)
    for e, _ in enumerate(sys.stdin):
        start = time.perf_counter()
        epoch(e)
        print(time.perf_counter() - start, flush=True)

@dataclass
class Side:
    "One side of a comparison: `with side:` starts its process, `side.epoch()` runs one more epoch in it."
    make: str # import path of a maker, "module:function"
    settings: dict # arguments of the maker, plain values only
    threads: int = 1 # inside an operation
    keep: bool = True # keep freed memory
    process: subprocess.Popen | None = None
    said: IO[str] | None = None # what the process complained of

    def __enter__(self):
        wanted = json.dumps(dict(make=self.make, settings=self.settings, threads=self.threads, keep=self.keep))
        command = [sys.executable, "-m", "benchmarks.measure", wanted]
        self.said, pipe = tempfile.TemporaryFile("w+"), subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self.said, text=True, cwd=ROOT)
        return self

    def epoch(self) -> float: # seconds
        "Run one more epoch."
        assert self.process and self.process.stdin and self.process.stdout, "inside `with side:` only"
        with contextlib.suppress(BrokenPipeError):      # a child that is gone answers nothing, see below
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        check(answer != "", "benchmark process", self._complaint(), "a time")
        return float(answer)

    def _complaint(self) -> str:
        "The last line that the process wrote as an error."
        assert self.said is not None # as above
        self.said.seek(0)
        return (self.said.read().splitlines() or ["nothing"])[-1]

    def __exit__(self, *error):
        if self.process: self.process.communicate()
        if self.said: self.said.close()
        self.process = self.said = None

def fastest_epoch(
    side: Side, # its process is running
    rounds: int = 3, # timed epochs at least
    least: float = 1., # seconds to warm up, and seconds of timed epochs at least
) -> float: # seconds
    "The fastest of some epochs, after as many as warm the process up."
    begun = time.perf_counter()
    side.epoch()
    while time.perf_counter() - begun < least: side.epoch()
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < rounds or time.perf_counter() - begun < least: times.append(side.epoch())
    return min(times)

def take_turns(
    sides: Mapping[str, Side],
    rounds: int, # timed epochs of each, after one that warms up
    note: Callable[[str], object] = lambda name: None, # called after each epoch
) -> dict[str, list[float]]: # name -> seconds of every round
    "One epoch of each side, again and again."
    out: dict[str, list[float]] = {name: [] for name in sides}
    with contextlib.ExitStack() as stack:
        for side in sides.values(): stack.enter_context(side)
        for r in range(rounds + 1):
            for name, side in sides.items():
                seconds = side.epoch()
                note(name)
                if r: out[name].append(seconds)
    return out

@dataclass(frozen=True)
class Case(Config):
    "One thing to measure: an epoch of `lanes` networks."
    task: str = "digits"
    batch_size: int = 64
    lanes: int = 16
    precision: str = "fp32"
    base: int | None = None # first block's channels, in place of the task's
    images: int = 1024 # made-up training images, where the task has no bundled data
    quick: bool = False # part of the quick table

    @property
    def name(self) -> str:
        "Return what tables call it."
        wide = f" base {self.base}" if self.base else ""
        return f"{self.task}{wide}, batch {self.batch_size}, {self.precision}"

    def load(self) -> tuple[Task, ImageData | TextData]:
        "Return the task and its data."
        task = get_task(self.task)
        if self.base: task = task.replace(host=task.host.replace(base=self.base))
        return task, synthetic_cifar10(self.images) if task.data == "cifar10" else task.load()

def machine() -> dict[str, str | int]:
    "Return what figures were measured on: processor, cores this process may use, widest instructions, versions, date."
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return dict(cpu=names[0] if names else platform.processor(), cores=default_workers(),
                capability=torch.backends.cpu.get_cpu_capability(), torch=torch.__version__,
                python=platform.python_version(), date=time.strftime("%Y-%m-%d"))

def machine_text(about: Mapping) -> str:
    "Return the same as one line under a table."
    return ", ".join(f"{name} {value}" for name, value in about.items())

def setting_text(threads: int, keep: bool) -> str:
    "Say how a process was set up."
    return f"{threads} threads, memory {'kept' if keep else 'returned'}"

def run_from_command(
    measure: Callable[..., dict], # takes `quick`, `out` and the options that were added
    doc: str, # what --help says
    name: str, # of the file with the figures
    **options: str, # more options of the command, with their help
) -> None:
    "Run a benchmark with the options of the command line."
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--quick", action="store_true", help="fewer rounds and the small task only")
    p.add_argument("--out", type=Path, default=STORED/name, help="where the figures go (default: %(default)s)")
    for option, help in options.items(): p.add_argument(f"--{option}", default="", help=help)
    given = p.parse_args()
    if given.quick and given.out == STORED/name: p.error("--quick wants an --out of its own: its figures mean little")
    measure(**vars(given))

if __name__ == "__main__" and len(sys.argv) == 2 and sys.argv[1].startswith("{"): serve(**json.loads(sys.argv[1]))
