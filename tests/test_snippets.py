"What a reader copies: the code of README and tutorials has nothing that type checkers or completion trip over."
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import jedi
import pytest
from scripts.notebooks import NBS, NOT_RUN, ROOT

TOOLS = Path(sys.executable).parent
TUTORIALS = sorted((NBS/"tutorials").glob("*.ipynb"))
LARGE = "torch torchvision lightning transformers stable_baselines3 sb3_contrib sklearn matplotlib IPython".split()
LARGE += ["optuna", "torchrl", "tensordict"]

# What the README leaves to the reader: a model, an optimizer, data, and the reader's own step.
YOURS = """
import torch
from torch import nn
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=.1)
batches = [(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))]
loss = torch.tensor(1.)
def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor: return nn.functional.cross_entropy(model(x), y)
"""

MYPY = """[mypy]
ignore_missing_imports = true
follow_imports = silent
""" + "".join(f"[mypy-{name}.*]\nfollow_imports = skip\n" for name in LARGE)


def tutorial_code(path):
    "The code cells of a notebook as one module, magics left out."
    cells = [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
    sources = ["".join(c["source"]) for c in cells]
    return "\n\n".join(re.sub(r"^\s*[%!].*$", "", s, flags=re.M) for s in sources if not NOT_RUN.search(s)) + "\n"


def readme_code():
    "The Python of the README, with what it leaves to the reader."
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT/"README.md").read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) >= 2
    return YOURS + "\n".join(blocks)


@pytest.fixture(scope="module")
def snippets(tmp_path_factory):
    "A folder with a module for the README and each tutorial."
    folder = tmp_path_factory.mktemp("snippets")
    for path in TUTORIALS: (folder/f"{path.stem}.py").write_text(tutorial_code(path), encoding="utf-8")
    (folder/"readme.py").write_text(readme_code(), encoding="utf-8")
    return folder


def check_types(command, folder):
    "What a checker says, run once over all snippets in their folder."
    env = {**os.environ, "MYPYPATH": str(ROOT), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([str(c) for c in command], cwd=folder, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_mypy_finds_nothing(snippets):
    (snippets/"mypy.ini").write_text(MYPY, encoding="utf-8")
    status, said = check_types([TOOLS/"mypy", "--cache-dir", ROOT/".mypy_cache/snippets", "."], snippets)
    assert status == 0, said


@pytest.mark.slow
def test_basedpyright_finds_nothing(snippets):
    config = dict(typeCheckingMode="basic", extraPaths=[str(ROOT)], reportMissingImports="none",
                  reportMissingModuleSource="none", include=["*.py"])
    (snippets/"pyrightconfig.json").write_text(json.dumps(config), encoding="utf-8")
    command = [TOOLS/"basedpyright", "--level", "error", "--pythonpath", sys.executable]
    status, said = check_types(command, snippets)
    assert status == 0, said


VERBS = {
    "Governor": (["nn.Linear(2, 2)"], ["watch", "step", "rollback"]),
    "Session": (["new_population('digits')"], ["start", "step", "pause", "rollback", "provoke", "save"])}


@pytest.mark.slow
@pytest.mark.parametrize("name", VERBS)
def test_editors_offer_the_verbs(name):
    made_of, verbs = VERBS[name]
    code = textwrap.dedent(f"""
        from torch import nn
        from esper_nb import {name}, new_population
        thing = {name}({', '.join(made_of)})
        thing.""").lstrip()
    script = jedi.Script(code, project=jedi.Project(ROOT, sys_path=[str(ROOT), *sys.path]))
    offered = {c.name for c in script.complete(len(code.splitlines()), len("thing."))}
    assert set(verbs) <= offered, sorted(set(verbs) - offered)


def test_editors_offer_the_front_door():
    code = "import esper_nb\nesper_nb."
    script = jedi.Script(code, project=jedi.Project(ROOT, sys_path=[str(ROOT), *sys.path]))
    offered = {c.name for c in script.complete(2, len("esper_nb."))}
    assert {"Governor", "Session", "GrowVecEnv", "train_ppo"} <= offered
