"""Files that were crafted to do harm, opened by every command: a clear line each time.

    file              crafted as
    checkpoint        a zip bomb, a pickle, a header of 2 GB and more, tensors beyond the file, names with `..`, a pipe
    settings, rows    no end of lists, a number of 5000 digits, a device, a pipe, a link
    weights, network  another shape, a name with `..`, a link
    good states       a zip bomb, a pickle that asks for 10 TB, other names
    --data            a picture of 2.5 billion pixels, a device, a pipe, a table that is none
"""
import json
import os
import resource
import shutil
import struct
import zipfile
import zlib

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.strangers_bench import TINY
from esper_nb.core import content_digest
from esper_nb.record import RunFolder
from esper_nb.run import begin_fit, begin_run, export_run, get_recipe, main, open_fit, open_run, report_html, watch_text
from esper_nb.train import FitConfig, get_task, new_population, task_from_path

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.skipif(os.name == "nt", reason="has no pipes")]
ROOM = 300 * 2**20 # bytes that a refusal may take


class Large:
    def __reduce__(self): return bytearray, (10**13,)

def bomb(path, size=500 * 2**20):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as z, z.open("a/data.pkl", "w") as part:
        for _ in range(size // 2**20): part.write(bytes(2**20))

def header(path, length, text=b"{"): path.write_bytes(struct.pack("<Q", length) + text)

def tensors(path, shape, end, body=b""):
    text = json.dumps(dict(x=dict(dtype="U8", shape=shape, data_offsets=[0, end]))).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)

def forged(path, tree, **found):
    "Write a checkpoint whose digest fits."
    texts = [tree, "{}"]
    about = dict(format="esper_nb checkpoint 1", tree=tree, contract="{}", sha256=content_digest(texts, found))
    save_file(found, path, about)

def linked(path, to="/dev/zero"):
    path.unlink(missing_ok=True)
    path.symlink_to(to)

def piped(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)

def picture(path, side=50_000):
    "Write a PNG that says it has 2.5 billion pixels."
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
                     + chunk(b"IDAT", zlib.compress(bytes(2**20))) + chunk(b"IEND", b""))

ENDLESS, AWAY = "[" * 100_000, "/../../outside/x"
CHECKPOINTS = {
    "zip bomb": lambda p: bomb(p, 2**20), "pickle": lambda p: torch.save(Large(), p),
    "2 GB header": lambda p: header(p, 2 << 30),
    "endless header": lambda p: header(p, 2**64 - 1),
    "nested header": lambda p: header(p, len(ENDLESS), ENDLESS.encode()),
    "beyond the file": lambda p: tensors(p, [2**40], 2**40), "overflow": lambda p: tensors(p, [2**32, 2**32], 0),
    "nested tree": lambda p: forged(p, ENDLESS), "unknown parts": lambda p: forged(p, '{"$call": "os.system"}'),
    "names with ..": lambda p: forged(p, f'{{"a": {{"$tensor": "{AWAY}"}}}}', **{AWAY: torch.ones(2)}),
    "device": linked, "pipe": piped}
TEXTS = {"nested": lambda p: p.write_text(ENDLESS + "\n"),
         "number": lambda p: p.write_text('{"kind": ' + "9" * 5000 + "}\n"),
         "device": linked, "pipe": piped}
WEIGHTS = {"2 GB header": lambda p: header(p, 2 << 30), "shape": lambda p: save_file(dict(x=torch.ones(3)), p),
           "names with ..": lambda p: save_file({AWAY: torch.ones(3)}, p), "pickle": CHECKPOINTS["pickle"]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    "A run and a fit, each stopped in its midst."
    root, data = tmp_path_factory.mktemp("runs"), get_task("digits").load("cpu", None, 64)
    run = begin_run(get_recipe("digits_impaired", TINY | {"ppo.num_updates": 2}), root/"run", data=None)
    for _ in run.updates(): break
    one = begin_fit(new_population("digits", FitConfig(lanes=1, epochs=2, workers=1), data=data), root/"fit", made={})
    for _ in one.epochs(): break
    return dict(run=run.folder.path, fit=one.folder.path)

@pytest.fixture
def gift(runs, tmp_path):
    "Copies of both, and a folder beside them that nothing may touch."
    outside = tmp_path/"outside"
    outside.mkdir()
    (outside/"precious").write_text("mine")
    yield {k: shutil.copytree(folder, tmp_path/k) for k, folder in runs.items()}
    assert {p.name: p.read_text() for p in outside.iterdir()} == {"precious": "mine"}

def refused(act, *words):
    "The line that a command ends with, and no more memory than it needs."
    def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    before = peak()
    with pytest.raises((ValueError, RuntimeError, OSError)) as e: act()
    line = str(e.value)
    assert line and len(line) < 2000 and "memory" not in line and peak() - before < ROOM, line
    for word in words: assert word in line

def check_all(folder, name, opens, file):
    commands = dict(report=lambda: report_html(RunFolder(folder)), resume=lambda: opens(folder),
                    watch=lambda: watch_text(folder, say=lambda text: None),
                    export=lambda: export_run(folder, folder/"n.pt2"))
    for command in name.split(): refused(commands[command], file)


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["run", "fit"])
def test_a_crafted_checkpoint_is_a_line(gift, kind):
    for craft in CHECKPOINTS.values():
        file = gift[kind]/"checkpoint.safetensors"
        file.with_name(f"{file.name}.previous").unlink(missing_ok=True)
        file.unlink(missing_ok=True)
        craft(file)
        check_all(gift[kind], "resume export", open_run if kind == "run" else open_fit, "checkpoint.safetensors")

@pytest.mark.parametrize("name", ["config.json", "rows.jsonl"])
def test_crafted_texts_are_a_line(gift, name):
    for craft in TEXTS.values():
        craft(gift["run"]/name)
        commands = "report watch resume export" if name == "config.json" else "report watch"
        check_all(gift["run"], commands, open_run, name)

def test_crafted_results_are_a_line(gift):
    for name in ("comparison.json", "final.jsonl"):
        for craft in TEXTS.values():
            craft(gift["run"]/name)
            refused(lambda: report_html(RunFolder(gift["run"])), name)
        (gift["run"]/name).unlink()

def test_crafted_weights_are_a_line(gift):
    for craft in WEIGHTS.values():
        craft(gift["fit"]/"weights.safetensors")
        refused(lambda: export_run(gift["fit"], gift["fit"]/"n.pt2"), "weights.safetensors")

def test_an_export_replaces_links_and_reads_no_network(gift, tmp_path):
    for name in ("network.pt2", "network.json"): linked(gift["fit"]/name, tmp_path/"outside"/"precious")
    export_run(gift["fit"], gift["fit"]/"network.pt2")
    assert not (gift["fit"]/"network.json").is_symlink()

def test_a_tracker_follows_no_link(gift, tmp_path, capsys):
    (gift["fit"]/"tensorboard").symlink_to(tmp_path/"outside")
    pytest.importorskip("tensorboard")
    assert main(["resume", str(gift["fit"]), "--log", "tensorboard", "--quiet"]) == 1
    assert "tensorboard is a link" in capsys.readouterr().err

def test_crafted_data_are_a_line(tmp_path):
    for name, craft in (("large.png", picture), ("device.png", linked), ("pipe.png", piped)):
        folder = tmp_path/name.partition(".")[0]
        for c in "ab": picture(folder/c/"x.png", side=8)
        craft(folder/"a"/name)
        refused(lambda: task_from_path(folder), name)
    for name in ("t.csv", "t.parquet", "t.txt"):
        for craft in (linked, piped): craft(tmp_path/name); refused(lambda: task_from_path(tmp_path/name), name)
    bomb(tmp_path/"z.parquet", 2**20)
    refused(lambda: task_from_path(tmp_path/"z.parquet"), "z.parquet")
    (tmp_path/"n.csv").write_bytes(b"a,b\n1,\0\n")
    refused(lambda: task_from_path(tmp_path/"n.csv"))
