"The newcomer's way: a folder of pictures, a controller, a report, and a file in ONNX for others."
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from esper_nb.run import export_run, main

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = ("env.num_envs=2", "env.horizon=4", "ppo.num_steps=4", "ppo.num_minibatches=1", "ppo.update_epochs=1",
            "env.workers=1", 'env.blueprints=["conv_light"]')
SMALL = [word for setting in SETTINGS for word in ("--set", setting)]
ELSEWHERE = """
import json, sys
import numpy as np, onnxruntime
from PIL import Image
facts = json.load(open("network.json"))["input"]
pixels = np.stack([np.asarray(Image.open(p), np.float32) for p in sys.argv[1:]])
x = pixels.transpose(0, 3, 1, 2) / 255 # as anybody would
session = onnxruntime.InferenceSession("network.onnx", providers=["CPUExecutionProvider"])
said, = session.run(["logits"], {"input": np.ascontiguousarray(x)})
assert not {"torch", "esper_nb"} & set(sys.modules)
print(json.dumps(dict(logits=said.tolist(), classes=[facts["classes"][k] for k in said.argmax(1)])))
"""


def write_pictures(place, n=30, size=8):
    g = np.random.default_rng(0)
    for k, name in enumerate(("blue", "red")):
        (place/name).mkdir(parents=True)
        for i in range(n):
            pixels = g.integers(0, 60, (size, size, 3)).astype(np.uint8)
            pixels[2:6, 2:6, 2 - 2 * k] += 150
            Image.fromarray(pixels).save(place/name/f"{i:02}.png")
    return place


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("newcomer")
    place = write_pictures(root/"pics")
    asked = ["train", "--data", str(place), "--size", "8", "--updates", "1", *SMALL, "--quiet"]
    assert main([*asked, "--out", str(root/"runs")]) == 0
    return root/"runs"/"pics"


@pytest.mark.slow
def test_pictures_become_a_file_that_knows_nothing_of_us(run, capsys):
    for needed in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(needed, reason="ONNX needs the extra: pip install 'esper_nb[export]'")
    assert main(["report", str(run)]) == 0 and (run/"report.html").stat().st_size > 10_000
    assert main(["export", str(run)]) == 0 and "test accuracy" in capsys.readouterr().out
    pictures = sorted((run.parents[1]/"pics").glob("*/*.png"))[::7]
    asked = [sys.executable, "-c", ELSEWHERE, *map(str, pictures)]
    done = subprocess.run(asked, cwd=run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    left = export_run(run, run/"again.pt2") # the same play, the same network
    facts = json.loads((run/"network.json").read_text())
    assert facts == json.loads((run/"again.json").read_text()) and left.lane == facts["lane"]
    pixels = torch.tensor(np.stack([np.asarray(Image.open(p)) for p in pictures]), dtype=torch.float32)
    with torch.no_grad(): want = left.net(pixels.permute(0, 3, 1, 2) / 255)
    torch.testing.assert_close(torch.tensor(output["logits"]), want, rtol=1e-4, atol=1e-4)
    assert output["classes"] == [facts["input"]["classes"][k] for k in want.argmax(1)]


def test_the_exported_lane_is_the_one_that_was_reported(run):
    mine = json.loads((run/"comparison.json").read_text())["plays"][0]
    for lane in (0, 1):
        left = export_run(run, run/"one.pt2", lane=lane)
        assert left.accuracy_pp == mine["test_accuracy_pp"][lane]
        assert sum(p.numel() for p in left.net.parameters()) >= mine["parameters"][0] * .5
        program = torch.export.load(left.path).module()
        with torch.no_grad(): assert torch.equal(program(left.example), left.net(left.example))
    assert not any(type(m).__module__.startswith("esper_nb") for m in left.net.net.modules())


@pytest.mark.parametrize("given, words", [(["--lane", "2"], "a lane below 2"), (["--out", "net.zip"], "ends in .onnx"),
                                          (["--lane", "-1"], "a lane below 2")])
def test_what_cannot_be_exported_is_said_in_one_line(run, given, words, capsys):
    assert main(["export", str(run), *given]) == 2
    output = capsys.readouterr().err
    assert words in output and output.count("\n") == 1


def test_a_missing_exporter_is_said_before_anything_is_played(run, monkeypatch, capsys):
    from esper_nb.run import exports
    monkeypatch.setattr(exports.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(exports, "regrow", lambda path: pytest.fail("it was played"))
    assert main(["export", str(run)]) == 2 and "pip install 'esper_nb[export]'" in capsys.readouterr().err


PLUGIN = """
from torch import nn
def mlp(hidden=12): return nn.Sequential(nn.Flatten(), nn.Linear(192, hidden), nn.ReLU(), nn.Linear(hidden, 2))
"""


def test_a_network_and_pictures_of_ones_own_go_the_same_way(run, tmp_path, monkeypatch):
    from esper_nb import FitConfig, ModuleHostConfig, task_from_folder
    from esper_nb.run.fits import fit_run
    (tmp_path/"newcomers_net.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    host = ModuleHostConfig("newcomers_net:mlp", {"1": "BD"})
    task = task_from_folder(run.parents[1]/"pics", size=8, host=host, name="ours")
    pop, folder = fit_run(task, FitConfig(lanes=2, epochs=2), out=tmp_path, progress=False)
    left = export_run(folder.path, tmp_path/"ours.pt2", lane=1, trust=True)
    x, _ = next(iter(pop.data.evaluate("test", 32)))
    with torch.no_grad():
        torch.testing.assert_close(left.net(left.example), pop.model.lane(1).eval()(x), rtol=1e-4, atol=1e-5)
