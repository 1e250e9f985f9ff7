"What a newcomer tries first works, or the error names the next step."
import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
MY_NETS = """
import torch
from torch import nn
from esper_nb import ModuleHostConfig, register_task, task_from_arrays

def net(): return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
host = ModuleHostConfig("my_nets:net", slots=["1"], reads="BC")
register_task(task_from_arrays(x, x[:, 0] > 0, name="mine", epochs=1, host=host))
"""


def command(folder, *words):
    "Run the command as its script does: with the script's folder on the path, not the one that it is started from."
    script = folder/"bin"/"esper-nb"
    script.parent.mkdir(exist_ok=True)
    script.write_text("import sys\nfrom esper_nb.run.cli import main\nsys.exit(main())\n")
    asked = [sys.executable, str(script), *words]
    return subprocess.run(asked, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("plugin", ["my_nets.py", "my_nets"])
def test_a_plugin_names_its_own_function(tmp_path, plugin):
    (tmp_path/"my_nets.py").write_text(MY_NETS)
    done = command(tmp_path, "tasks", "--import", plugin)
    assert done.returncode == 0 and "mine" in done.stdout, done.stderr


def test_a_plugin_that_is_named_again_needs_no_more_trust(tmp_path):
    (tmp_path/"my_nets.py").write_text(MY_NETS)
    asked = ["fit", "mine", "--import", "my_nets.py", "--lanes", "2", "--quiet"]
    done = command(tmp_path, *asked)
    assert done.returncode == 0, done.stderr
    assert "--trust" in command(tmp_path, "resume", "runs/mine").stderr
    done = command(tmp_path, "resume", "runs/mine", "--import", "my_nets.py")
    assert done.returncode == 0, done.stderr


def test_the_package_is_the_command():
    done = subprocess.run([sys.executable, "-m", "esper_nb", "--version"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
