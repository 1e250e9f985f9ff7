"Good states on a disk: crashes, full disks, damage, links, strangers, a second process. Nothing is half there."
import json
import logging
import os
import pickle
import random
import resource
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import warm
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from esper_nb.core import content_digest, encode_tree, files, new_file, read_saved, read_tree, trees
from esper_nb.guard import Governor, GovernorConfig
from esper_nb.guard.probation import GOOD_STATE, GoodFiles

pytestmark = pytest.mark.usefixtures("one_thread")
OFTEN = GovernorConfig(snapshot_every=5, probation=5)
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def parts(size=7, kind=torch.optim.Adam, dtype=None):
    net = nn.Linear(size, 3).to(dtype)
    return net, kind(net.parameters(), lr=.01)


def newest(folder): return GoodFiles(Path(folder))._paths()[-1] # noqa: SLF001


# --- crashes

class Marked:
    "A run in which every tensor of a state holds the number of losses before it: a mixture is seen at once."
    def __init__(self, size):
        self.net, self.cursor = nn.Linear(size, 2), dict(at=0)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0., momentum=1.)
        self.net(torch.zeros(1, size)).sum().backward()
        self.opt.step() # there is a momentum to mark

    def tensors(self): return [*self.net.parameters(), *(s["momentum_buffer"] for s in self.opt.state.values())]

    def mark(self, at):
        for t in self.tensors(): t.data.fill_(float(at))
        self.cursor["at"] = at

    def read(self):
        found = {float(x) for t in self.tensors() for x in t.unique()} | {float(self.cursor["at"])}
        assert len(found) == 1, f"a mixed state: {found}"
        return int(found.pop())

    def recover(self, folder):
        at = Governor.recover(folder, self.net, self.opt, cursor=self.cursor)
        assert self.read() == at
        return at


def live(folder, size, seed, first, said):
    "One life: come back, go on, and be killed: between two losses, in the middle of a write, or of a renaming."
    random.seed(seed)
    run, at = Marked(size), 0
    if not first: at = run.recover(folder)
    os.write(said, b"began %d\n" % at)
    how, moment = random.choice(["loss", "write", "rename", "time"]), random.randint(1, 6)
    full = random.random() < .3 # a disk that is full now and then
    counts, real, publish = dict(write=0, rename=0), trees.save_file, os.replace
    def kill(kind):
        counts[kind] += 1
        if how == kind and counts[kind] == moment: os.kill(os.getpid(), signal.SIGKILL)
    def save(tensors, part, meta):
        if full and random.random() < .4: raise trees.SafetensorError("I/O error: no space left on device")
        if how == "write" and counts["write"] == moment - 1: Path(part).write_bytes(b"half of it")
        kill("write")
        real(tensors, part, meta)
    def replace(a, b):
        kill("rename")
        publish(a, b)
        if Path(b).suffix == ".safetensors": os.write(said, b"there %s\n" % Path(b).name.encode())
    trees.save_file, files.os.replace = save, replace
    if how == "time": signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    if how == "time": signal.setitimer(signal.ITIMER_REAL, random.uniform(.001, .2))
    run.mark(at)
    governor = Governor(run.net, run.opt, cursor=run.cursor, chance_loss=None, folder=folder, config=OFTEN)
    for k in range(1, 400):
        run.mark(at + k)
        governor.watch(.5)
        governor.files.wait() # a busy machine writes late, and what is lost is counted in losses
        os.write(said, b"at %d\n" % (at + k))
        if how == "loss" and k == 20 * moment: os.kill(os.getpid(), signal.SIGKILL)
        if how == "time": time.sleep(.001)
    os.kill(os.getpid(), signal.SIGKILL)


def in_a_fork(f, *args):
    "What a forked process has said before its end, and how it ended."
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        logging.disable(logging.CRITICAL)
        try: f(*args, write)
        except BaseException as e: os.write(write, f"failed {type(e).__name__}: {e}\n".encode()[:500])
        finally: os._exit(1)
    os.close(write)
    with os.fdopen(read) as pipe: said = pipe.read().split("\n")[:-1]
    return [line.partition(" ")[::2] for line in said], os.waitpid(child, 0)[1]


@forks
@pytest.mark.parametrize("chain", [pytest.param(k, marks=pytest.mark.slow if k > 2 else ()) for k in range(8)])
def test_crashes_in_chains_of_five_lose_no_more_than_what_was_under_way(chain, tmp_path):
    size, reached, marks = random.Random(chain).choice([1, 100, 20_000]), 0, dict[str, int]()
    for life_ in range(5):
        said, status = in_a_fork(live, tmp_path, size, 100 * chain + life_, not marks)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, said[-1]
        assert not [text for kind, text in said if kind == "failed"]
        names = [text for kind, text in said if kind == "there"]
        began = [int(text) for kind, text in said if kind == "began"][0]
        if marks: assert began == reached # exactly what was on the disk when the life before was killed
        for path in tmp_path.glob("good_0_*.safetensors"): # every file that is there is whole, and of one moment
            marks[path.name] = int(read_tree(path, GOOD_STATE)["step"])
        assert all(name in marks or name in names[:-2] for name in names)
        if marks:
            run = Marked(size)
            reached = run.recover(tmp_path)
            assert reached == max(marks.values()) # the order of the folder is that of the run
        got = [int(text) for kind, text in said if kind == "at"] or [began]
        assert reached <= got[-1]
        lost = 3 * (OFTEN.snapshot_every + OFTEN.probation) # on probation, being written, waiting for a core
        failed = len(names) < max(1, (got[-1] - began) // OFTEN.snapshot_every - 3) # a full disk
        assert failed or got[-1] - reached <= lost, (got[-1], reached)
    left = [p.name for p in tmp_path.iterdir() if p.name.endswith(".writing")]
    assert len(left) <= 1 # of the last life alone
    if marks:
        governor = Governor(*parts(), chance_loss=None, folder=tmp_path)
        governor.close()
        assert not list(tmp_path.glob(".*")) and len(list(tmp_path.glob("good_0_*"))) <= 2


def test_the_first_good_states_are_there_before_and_soon_after_the_first_step(tmp_path):
    net, opt = parts()
    governor = Governor(net, opt, chance_loss=None, folder=tmp_path)
    governor.files.wait()
    assert Governor.recover(tmp_path, *parts()) == 0
    for k in range(40): governor.watch(.5)
    governor.close()
    governor = Governor(net, opt, chance_loss=None, folder=tmp_path/"again")
    for k in range(40): governor.watch(.5)
    governor.close()
    assert Governor.recover(tmp_path/"again", *parts()) == 20


# --- two at once

def use_twice(folder, asked):
    "Recover, and guard in the same folder, twice: what comes back, and why it is refused."
    net, opt = parts()
    for _ in range(2):
        recovered, refused = Governor.recover(folder, net, opt), ""
        try: Governor(net, opt, chance_loss=None, folder=folder).close()
        except RuntimeError as e: refused = str(e)
        asked.send((recovered, refused))
        asked.recv()

def test_a_second_process_is_refused_and_may_read(tmp_path):
    net, opt = parts()
    governor = Governor(net, opt, chance_loss=None, folder=tmp_path)
    governor.files.wait()
    here, there = warm.context().Pipe()
    other = warm.begin(use_twice, tmp_path, there)
    there.close() # or a process that fails would be waited for
    recovered, refused = here.recv()
    assert recovered == 0 and f"is in use by process {os.getpid()}" in refused
    assert len(GoodFiles(tmp_path)._paths()) == 1 # noqa: SLF001
    governor.close()
    here.send("again")
    assert here.recv() == (0, "")
    here.send("end")
    other.join()
    assert other.exitcode == 0


def test_a_newer_governor_of_the_same_process_takes_over_and_the_older_says_so(tmp_path, caplog):
    old = Governor(*parts(), chance_loss=None, folder=tmp_path, config=OFTEN)
    new = Governor(*parts(), chance_loss=None, folder=tmp_path, config=OFTEN)
    assert "from now on a newer one writes" in caplog.text
    for _ in range(20): old.watch(.5)
    for governor in (old, new): governor.files.wait()
    assert [p.name for p in GoodFiles(tmp_path)._paths()] == ["good_0_0.safetensors", "good_0_1.safetensors"] # noqa: SLF001
    new.close()


@forks
def test_a_worker_that_outlives_its_killed_parent_does_not_hold_the_folder(tmp_path):
    def run(said):
        governor = Governor(*parts(), chance_loss=None, folder=tmp_path)
        governor.files.wait()
        worker = os.fork() # as a loader of data has them
        if not worker:
            os.close(said)
            time.sleep(20)
            os._exit(0)
        os.write(said, b"worker %d\n" % worker)
        os.kill(os.getpid(), signal.SIGKILL)
    said, _ = in_a_fork(run)
    try: Governor(*parts(), chance_loss=None, folder=tmp_path).close()
    finally: os.kill(int(said[0][1]), signal.SIGKILL)


# --- damage

def two_states(folder):
    "A folder with the states of steps 10 and 15, and the weights of both."
    net, opt = parts()
    governor = Governor(net, opt, chance_loss=None, folder=folder, config=GovernorConfig(snapshot_every=5, probation=0))
    for k in range(1, 16):
        net.weight.data.fill_(float(k))
        governor.watch(.5)
    governor.close()
    return {10: 10., 15: 15.}


def test_sixty_flipped_bits_are_refused_and_stepped_over(tmp_path):
    weights, draw = two_states(tmp_path), random.Random(0)
    path = newest(tmp_path)
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    places = [draw.randrange(header) for _ in range(30)] + [draw.randrange(header, len(content)) for _ in range(30)]
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        net, opt = parts()
        step = Governor.recover(tmp_path, net, opt)
        assert step == 10 and (net.weight == weights[10]).all(), place
    path.write_bytes(content)
    net, opt = parts()
    assert Governor.recover(tmp_path, net, opt) == 15 and (net.weight == weights[15]).all()


@pytest.mark.parametrize("share", [0, .1, .5, .99, 1.5])
def test_files_that_were_cut_or_lengthened_are_stepped_over(share, tmp_path):
    two_states(tmp_path)
    path = newest(tmp_path)
    content = path.read_bytes()
    path.write_bytes((content * 2)[:int(share * len(content))])
    assert Governor.recover(tmp_path, *parts()) == 10


def test_a_full_disk_warns_and_loses_nothing_that_was_there(tmp_path, caplog, monkeypatch):
    net, opt = parts()
    governor = Governor(net, opt, chance_loss=None, folder=tmp_path, config=OFTEN)
    governor.files.wait()
    def full(*args): raise trees.SafetensorError("I/O error: No space left on device (os error 28)")
    monkeypatch.setattr(trees, "save_file", full)
    for _ in range(30): governor.watch(.5)
    governor.files.wait()
    assert "No space left" in caplog.text and "the run goes on" in caplog.text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["good_0_0.safetensors", "lock_0"]
    monkeypatch.undo()
    for _ in range(10): governor.watch(.5)
    governor.close()
    assert Governor.recover(tmp_path, *parts()) >= 25


# --- links

@pytest.mark.parametrize("name", ["good_0_1.safetensors", ".good_0_1.safetensors.writing", "good_0_7.safetensors"])
@pytest.mark.parametrize("kind", ["file", "folder", "nowhere"])
def test_nothing_is_written_through_a_link(name, kind, tmp_path):
    folder, outside = tmp_path/"states", tmp_path/"outside"
    folder.mkdir()
    if kind == "file": outside.write_text("precious")
    if kind == "folder": outside.mkdir(); (outside/"x").write_text("precious")
    (folder/name).symlink_to(outside)
    governor = Governor(*parts(), chance_loss=None, folder=folder, config=OFTEN)
    for _ in range(30): governor.watch(.5)
    governor.close()
    assert not outside.exists() if kind == "nowhere" else True
    text = outside if kind == "file" else outside/"x"
    if kind != "nowhere": assert text.read_text() == "precious" and len(list(tmp_path.iterdir())) == 2
    assert Governor.recover(folder, *parts()) >= 20
    assert not [p for p in folder.iterdir() if p.name.endswith(".writing") and not p.is_symlink()]


def test_a_lock_that_is_a_link_is_refused(tmp_path):
    (tmp_path/"victim").write_text("precious")
    (tmp_path/"states").mkdir()
    (tmp_path/"states/lock_0").symlink_to(tmp_path/"victim")
    governor = Governor(*parts(), chance_loss=None, folder=tmp_path/"states") # the run goes on, without files
    governor.close()
    assert (tmp_path/"victim").read_text() == "precious" and not list((tmp_path/"states").glob("good*"))


# --- other parts

def altered(f):
    net, opt = parts()
    f(net, opt)
    return net, opt


OTHERS = dict(
    wider=lambda: parts(8), narrower=lambda: parts(6), double=lambda: parts(dtype=torch.float64),
    half=lambda: parts(dtype=torch.bfloat16), sgd=lambda: parts(kind=torch.optim.SGD),
    momentum=lambda: parts(kind=lambda p, lr: torch.optim.SGD(p, lr, momentum=.9)),
    layer=lambda: (n := nn.Sequential(*parts()[:1], nn.Linear(3, 3)), torch.optim.Adam(n.parameters())),
    no_bias=lambda: (n := nn.Linear(7, 3, bias=False), torch.optim.Adam(n.parameters())),
    buffer=lambda: altered(lambda net, opt: net.register_buffer("more", torch.ones(2))),
    groups=lambda: (n := nn.Linear(7, 3), torch.optim.Adam([dict(params=[n.weight]), dict(params=[n.bias])])),
    fewer=lambda: (n := nn.Linear(7, 3), torch.optim.Adam([n.weight])), no_optimizer=lambda: parts()[:1],
    scheduler=lambda: (p := parts(), (*p, torch.optim.lr_scheduler.StepLR(p[1], 3)))[1])

@pytest.mark.parametrize("name", OTHERS)
def test_a_state_of_other_parts_is_refused_before_a_bit_is_changed(name, tmp_path):
    two_states(tmp_path)
    given = OTHERS[name]()
    before = pickle.dumps([p.state_dict() for p in given])
    with pytest.raises(ValueError, match="not a state of these parts, so nothing was changed"):
        Governor.recover(tmp_path, *given)
    assert pickle.dumps([p.state_dict() for p in given]) == before


def test_a_part_that_refuses_its_state_leaves_nothing_half_loaded(tmp_path):
    class Picky:
        broken, x = False, torch.zeros(2)
        def state_dict(self): return dict(x=self.x)
        def load_state_dict(self, state):
            if self.broken and state["x"].sum() > 0: raise KeyError("x")
            self.x = state["x"]
    picky, (net, opt) = Picky(), parts()
    picky.x = torch.ones(2)
    Governor(net, opt, zz=picky, chance_loss=None, folder=tmp_path).close()
    other, (net, opt) = Picky(), parts()
    other.broken, before = True, net.weight.clone()
    with pytest.raises(ValueError, match="nothing was changed: KeyError"):
        Governor.recover(tmp_path, net, opt, zz=other)
    assert torch.equal(net.weight, before) and not opt.state and other.x.sum() == 0


# --- folders of strangers

class Evil:
    def __init__(self, do): self.do = do
    def __reduce__(self): return os.system, (self.do,)


def forged(path, change=lambda tree: tree, kind=GOOD_STATE, tensors=None, meta=None):
    "A file with a right digest whose content is a stranger's."
    tree = change(read_tree(path, GOOD_STATE))
    found: dict = {}
    text = tree if isinstance(tree, str) else json.dumps(encode_tree(tree, found))
    found = {k: t.clone() for k, t in found.items()} | (tensors or {})
    save_file(found, path, dict(format=kind, tree=text, sha256=content_digest([kind, text], found)) | (meta or {}))


def with_(**entries): return lambda tree: tree | entries
def in_rest(name, value): return lambda tree: tree | dict(rest=tree["rest"] | {name: value})
def in_bank(name, value): return lambda tree: tree | dict(bank=tree["bank"] | {name: value})


def deep(tree, n=200_000): return "[" * n + "]" * n


def again_and_again(path):
    "Thirty kilobytes that ask for twelve gigabytes: one tensor a thousand times."
    one = dict(a=torch.zeros(7_000))
    many = {f"model|x{i}": {"$tensor": "a"} for i in range(100_000)}
    text = json.dumps(dict(number=1, step=1, kinds={}, rest={}, sparse={}, bank=many))
    save_file(one, path, dict(format=GOOD_STATE, tree=text, sha256=content_digest([GOOD_STATE, text], one)))


HOSTILE = {
    "empty": lambda p, d: p.write_bytes(b""), "zeros": lambda p, d: p.write_bytes(bytes(1000)),
    "text": lambda p, d: p.write_text("hello"), "pickle": lambda p, d: p.write_bytes(pickle.dumps(Evil(d))),
    "torch": lambda p, d: torch.save(Evil(d), p), "torch_legacy": lambda p, d: torch.save(
        Evil(d), p, _use_new_zipfile_serialization=False),
    "long_header": lambda p, d: p.write_bytes((2**62).to_bytes(8, "little") + b"{}"),
    "no_metadata": lambda p, d: save_file(dict(a=torch.ones(2)), p),
    "other_format": lambda p, d: forged(p, kind="esper_nb checkpoint 1"),
    "wrong_digest": lambda p, d: forged(p, meta=dict(sha256="0" * 64)),
    "no_digest": lambda p, d: save_file(dict(a=torch.ones(2)), p, dict(format=GOOD_STATE, tree="{}")),
    "no_json": lambda p, d: forged(p, lambda t: "{"), "deep": lambda p, d: forged(p, deep),
    "list": lambda p, d: forged(p, lambda t: []), "number": lambda p, d: forged(p, lambda t: "7"),
    "null": lambda p, d: forged(p, lambda t: "null"),
    "unknown_tag": lambda p, d: forged(p, lambda t: '{"$call": "os"}'),
    "lost_tensor": lambda p, d: forged(p, lambda t: '{"$tensor": "none"}'),
    "again_and_again": lambda p, d: again_and_again(p),
    "no_bank": lambda p, d: forged(p, with_(bank=3)), "no_rest": lambda p, d: forged(p, with_(rest=[])),
    "text_step": lambda p, d: forged(p, with_(step="x")), "negative_step": lambda p, d: forged(p, with_(step=-5)),
    "float_step": lambda p, d: forged(p, with_(step=1.5)), "no_step": lambda p, d: forged(p, with_(step=None)),
    "bank_of_numbers": lambda p, d: forged(p, in_bank("model|weight", 3)),
    "odd_key": lambda p, d: forged(p, in_bank("weight", torch.ones(1))),
    "number_key": lambda p, d: forged(p, in_bank(3, torch.ones(1))),
    "part_more": lambda p, d: forged(p, in_rest("spy", dict(x=1))), "part_less": lambda p, d: forged(p, with_(rest={})),
    "rest_none": lambda p, d: forged(p, in_rest("model", None)),
    "rest_text": lambda p, d: forged(p, in_rest("model", "x")),
    "optimizer_none": lambda p, d: forged(p, in_rest("optimizer", {})),
    "optimizer_far": lambda p, d: forged(p, lambda t: in_rest("optimizer", t["rest"]["optimizer"] | dict(
        state=[(10**9, ("dict", []))]))(t)),
    "optimizer_leaf": lambda p, d: forged(p, lambda t: in_rest("optimizer", t["rest"]["optimizer"] | dict(
        groups=[("leaf", "nowhere", "cpu")]))(t)),
    "shape": lambda p, d: forged(p, in_bank("model|weight", torch.zeros(10**6))),
    "dtype": lambda p, d: forged(p, in_bank("model|weight", torch.zeros(3, 7, dtype=torch.float64))),
    "streams": lambda p, d: forged(p, in_rest("streams", ("items", True, [1, 2]))),
    "streams_short": lambda p, d: forged(p, in_rest("streams", ("dict", []))),
    "kinds": lambda p, d: forged(p, with_(kinds={})),
    "zero_link": lambda p, d: (p.unlink(), p.symlink_to("/dev/zero")), "pipe": lambda p, d: (p.unlink(), os.mkfifo(p)),
    "directory": lambda p, d: (p.unlink(), p.mkdir()), "loop": lambda p, d: (p.unlink(), p.symlink_to(p)),
    "long_number": lambda p, d: p.rename(p.with_name(f"good_0_{'9' * 200}.safetensors")),
    "odd_number": lambda p, d: p.rename(p.with_name("good_0_x.safetensors"))}

@pytest.mark.skipif(os.name == "nt", reason="links and pipes")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_folder_of_a_stranger_is_one_clear_error_and_runs_nothing(name, tmp_path):
    folder, mark = tmp_path/"states", tmp_path/"executed"
    Governor(*parts(), chance_loss=None, folder=folder).close()
    HOSTILE[name](newest(folder), f"touch {mark}")
    net, opt = parts()
    before, memory = pickle.dumps(net.state_dict()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    harmless = name == "streams_short" # a file that holds no random streams
    if harmless: Governor.recover(folder, net, opt)
    else:
        with pytest.raises((ValueError, FileNotFoundError), match=str(folder)) as e: Governor.recover(folder, net, opt)
        assert len(str(e.value)) < 800
        assert pickle.dumps(net.state_dict()) == before and not opt.state
        assert torch.equal(streams[0], torch.get_rng_state()) and streams[1] == random.getstate()
        assert streams[2] == np.random.get_state()[1].tolist()
    assert not mark.exists()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 300_000 # kilobytes


def test_what_torch_saved_cannot_fill_the_memory_with_strides(tmp_path):
    tensors = [torch.zeros(1).as_strided((60_000, 25_000), (0, 0)), torch.zeros(100).expand(10**6, 100)]
    same = torch.zeros(3000)
    for n, tree in enumerate([dict(a=tensors[0]), [tensors[1]], [same] * 100_000, dict(a=(dict(b=tensors[0]),))]):
        torch.save(tree, tmp_path/f"{n}.pt")
        with pytest.raises(ValueError, match="bytes of its tensors"): read_saved(tmp_path/f"{n}.pt")


# --- the layer below

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool,
                                   torch.uint16, torch.int64, torch.complex128])
def test_tensors_of_any_kind_are_the_same_bits_again(dtype, tmp_path):
    torch.manual_seed(0)
    whole = dtype in (torch.bool, torch.uint16, torch.int64)
    t = (torch.randint(0, 2, (4, 3, 2, 2)) if whole else torch.randn(4, 3, 2, 2)).to(dtype)
    tree = dict(t=t, last=t.to(memory_format=torch.channels_last), part=t[1:3], turned=t.transpose(0, 1), none=t[:0])
    new_tree = tmp_path/"x.safetensors"
    trees.write_tree(new_tree, tree, "x")
    back = read_tree(new_tree, "x")
    for k in tree: assert back[k].dtype == dtype and back[k].tolist() == tree[k].tolist()
    with safe_open(new_tree, framework="pt") as f: assert f.metadata()["format"] == "x"


def test_a_new_file_replaces_whatever_lies_in_its_way(tmp_path):
    (tmp_path/".a.writing").write_text("left")
    with new_file(tmp_path/"a", durable=True) as part: part.write_text("new")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
