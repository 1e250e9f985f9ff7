"A test's own file as a script of several ranks under torchrun, and how such a rank ends."
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist


def start_ranks(
    file: str, # the script: usually the test's own `__file__`
    world: int, # how many ranks
    *args: str, # what each is given
    seconds: int = 500, # how long all of them may take
) -> None:
    "Run the script on `world` ranks of one thread each; the last words of a run that fails are the assertion's."
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}", file, *args]
    path = [str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(path))
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr[-3000:]


def leave() -> NoReturn:
    """End a rank when all have come here, without Python's own end: a thread of gloo still lets go of the last
    collective, and `std::terminate` is called when it asks a Python that is ending for its lock."""
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
