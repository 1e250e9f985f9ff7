"Round trips, kills, damage, and resuming in a new process."
import json
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import warm
from hypothesis import given, settings, strategies as st

from esper_nb.learn import Learner, PPOConfig, PolicyConfig, train_ppo
from esper_nb.core import content_digest, decode_tree, encode_tree
from esper_nb.record import (
    CheckpointError, EnvState, load_checkpoint, read_checkpoint, save_checkpoint, write_checkpoint)

keys = st.one_of(st.text(max_size=5), st.integers(-5, 5))
large = st.integers(min_value=2**100, max_value=2**130)
leaf = st.one_of(st.integers(), large, st.floats(allow_nan=False), st.booleans(), st.none(), st.text(max_size=8))


def branches(x): return st.one_of(st.lists(x, max_size=4), st.tuples(x, x), st.dictionaries(keys, x, max_size=4))

trees = st.recursive(leaf, branches, max_leaves=20)


def same(a, b):
    if type(a) is not type(b): return False
    if isinstance(a, dict): return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)): return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor): return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return a == b and (not isinstance(a, float) or np.float64(a).tobytes() == np.float64(b).tobytes())


def tensors_of(tree):
    "The tensors of a tree, by path."
    tensors = {}
    encode_tree(tree, tensors)
    return tensors


@settings(deadline=None, max_examples=50)
@given(trees)
def test_any_tree_survives_json(tree):
    tensors = {}
    assert same(tree, decode_tree(json.loads(json.dumps(encode_tree(tree, tensors), allow_nan=False)), tensors))


FLOATS = torch.float64, torch.float32, torch.float16, torch.bfloat16
WHOLE = torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool

@pytest.mark.parametrize("dtype", [*FLOATS, *WHOLE])
def test_every_dtype_and_shape(dtype, tmp_path):
    tree = [torch.zeros(s).to(dtype) for s in ((), (0,), (3,), (2, 0, 4), (2, 3, 4, 5))]
    tree.append(torch.arange(24).view(4, 6)[:, ::2].to(dtype))
    tree.append(tree[4])  # the same tensor twice
    write_checkpoint(tmp_path / "x", tree)
    assert same(tree, read_checkpoint(tmp_path / "x")[0])


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"])
def test_arrays_and_scalars(dtype, tmp_path):
    six = np.arange(6).astype(dtype)
    tree = dict(a=six.reshape(2, 3), s=six[1], strided=six[::2])
    write_checkpoint(tmp_path / "x", tree)
    back = read_checkpoint(tmp_path / "x")[0]
    for k, v in tree.items():
        assert type(back[k]) is type(v) and back[k].dtype == v.dtype and np.array_equal(back[k], v)


def test_layout_and_values_that_are_not_finite(tmp_path):
    t = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    t[0, 0, 0, 0] = float("nan")
    write_checkpoint(tmp_path / "x", dict(t=t, f=float("nan"), g=-0.0))
    back = read_checkpoint(tmp_path / "x")[0]
    assert back["t"].stride() == t.stride() and torch.equal(back["t"].isnan(), t.isnan())
    assert math.isnan(back["f"]) and str(back["g"]) == "-0.0"


@pytest.mark.parametrize("value", [print, object(), {1, 2}, b"raw", 1j, np.array(["a"]), torch.nn.Linear(1, 1)])
def test_what_is_not_data_is_refused_with_its_place(value):
    with pytest.raises(ValueError, match="/a/0"): encode_tree(dict(a=[value]), {})


def test_a_failed_save_leaves_the_old_one_alone(tmp_path):
    path = tmp_path / "x.safetensors"
    write_checkpoint(path, dict(a=1))
    with pytest.raises(CheckpointError): write_checkpoint(path, dict(a=print))
    assert read_checkpoint(path)[0] == dict(a=1) and [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


KILLER = """
import os, random, signal, sys, time, torch
from esper_nb.record.checkpoints import previous_checkpoint, read_checkpoint, write_checkpoint
torch.set_num_threads(1)
path, times, k, bad = sys.argv[1], int(sys.argv[2]), 0, []
rng = random.Random(0)
tree = lambda k: dict(k=k, t=[torch.full((300_000,), float(k)) for _ in range(5)])
write_checkpoint(path, tree(0))
for i in range(times):
    before = os.stat(path).st_ino
    child = os.fork()
    if not child:
        while True: k += 1; write_checkpoint(path, tree(k))
    while os.stat(path).st_ino == before: time.sleep(.001)      # it has saved once: kill it in one of the next saves
    time.sleep(rng.random() * 0.15)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    try:
        found, _ = read_checkpoint(path)
        if not all((t == found["k"]).all() for t in found["t"]): bad.append((i, "a mixture"))
        if found["k"] < k: bad.append((i, "an older state", found["k"], k))
        k = found["k"]
        if k: read_checkpoint(previous_checkpoint(path))
    except Exception as e: bad.append((i, repr(e)))
print(k, bad)
"""


def kill_while_saving(path, times):
    "Kill -9 a process that saves in a loop, again and again: how many saves were made, and what went wrong."
    argv = [sys.executable, "-c", KILLER, str(path), str(times)]
    done = subprocess.run(argv, stdout=subprocess.PIPE, check=True, env=os.environ | dict(OMP_NUM_THREADS="1"))
    saves, bad = done.stdout.decode().split(maxsplit=1)
    return int(saves), bad.strip()


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_kill_9_while_saving(tmp_path):
    saves, bad = kill_while_saving(tmp_path / "x.safetensors", 25)
    assert bad == "[]" and saves >= 25
    write_checkpoint(tmp_path / "x.safetensors", dict(k=0))
    assert len(list(tmp_path.iterdir())) == 2, "temporary files of killed processes are cleared"


class Evil:
    def __init__(self, place): self.place = str(place)
    def __reduce__(self): return (os.mkdir, (self.place,))


def damaged(path, evil):
    good = path.read_bytes()
    head = int.from_bytes(good[:8], "little")
    torch.save(dict(a=evil), path.with_name("zip"))
    np.save(path.with_name("npy.npy"), np.array([evil]), allow_pickle=True)
    yield "pickle", pickle.dumps(evil)
    yield "torch zip", path.with_name("zip").read_bytes()
    yield "numpy object array", path.with_name("npy.npy").read_bytes()
    yield "pickle behind a good header length", good[:8] + pickle.dumps(evil).ljust(head, b" ") + good[8 + head:]
    yield "half", good[:len(good) // 2]
    yield "header only", good[:8 + head]
    yield "empty", b""
    yield "header length 2^60", (2**60).to_bytes(8, "little") + good[8:]
    yield "too long", good + b"x"
    yield "no metadata", (2).to_bytes(8, "little") + b"{}"
    yield "other version", good.replace(b"checkpoint 1", b"checkpoint 2")
    yield "edited number", good.replace(b"12345", b"54321")
    yield "deep nesting", rewrite(good, lambda m: m | dict(tree="[" * 100_000 + "]" * 100_000))
    yield "unknown tag", rewrite(good, lambda m: m | dict(tree='{"$call": ["os.mkdir", "x"]}'), sign=True)
    yield "missing tensor", rewrite(good, lambda m: m | dict(tree='{"$tensor": "/nowhere"}'), sign=True)
    yield "another tensor type", good.replace(b'"F32"', b'"I32"')


def rewrite(good, change, sign=False):
    from safetensors.torch import load
    head = int.from_bytes(good[:8], "little")
    header = json.loads(good[8:8 + head])
    meta = change(header["__metadata__"])
    if sign: meta["sha256"] = content_digest([meta["tree"], meta["contract"]], load(good))
    text = json.dumps(header | {"__metadata__": meta}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + good[8 + head:]


def test_damaged_and_malicious_files_are_refused(tmp_path):
    path = tmp_path / "x"
    write_checkpoint(path, dict(number=12345, t=torch.ones(50)))
    cases = dict(damaged(path, Evil(tmp_path / "executed")))
    for name, data in cases.items():
        (tmp_path / "bad").write_bytes(data)
        with pytest.raises(CheckpointError): read_checkpoint(tmp_path / "bad"); pytest.fail(name)
    assert len(cases) == 16 and not (tmp_path / "executed").exists()


def test_every_flipped_byte_is_noticed(tmp_path):
    path = tmp_path / "x"
    write_checkpoint(path, dict(a=1, t=torch.arange(4.)))
    good = path.read_bytes()
    state = read_checkpoint(path)[0]
    for i in range(len(good)):
        (tmp_path / "bad").write_bytes(good[:i] + bytes([good[i] ^ 1]) + good[i + 1:])
        try: back = read_checkpoint(tmp_path / "bad")[0]
        except CheckpointError: continue
        assert same(back, state), i # padding


ENVS = ["CartPole-v1", "MountainCar-v0", "Acrobot-v1", "Taxi-v4", "FrozenLake-v1", "Blackjack-v1"]


@pytest.mark.parametrize("name", ENVS)
def test_environments_go_on_exactly(name):
    def make():
        wrappers = [gym.wrappers.RecordEpisodeStatistics]
        return gym.make_vec(name, num_envs=2, vectorization_mode="sync", wrappers=wrappers)
    try: one, two = make(), make()
    except Exception as e: pytest.skip(f"{name}: {e}")
    one.reset(seed=1); two.reset(seed=2)
    rng = np.random.default_rng(0)
    actions = rng.integers(0, one.single_action_space.n, (300, 2))
    for a in actions[:150]: one.step(a)
    tensors = {}
    state = encode_tree(EnvState(one).state_dict(), tensors)
    EnvState(two).load_state_dict(decode_tree(state, tensors))
    for a in actions[150:]:
        for x, y in zip(one.step(a)[:4], two.step(a)[:4]):
            assert np.array_equal(np.asarray(x), np.asarray(y))


def test_environments_with_a_state_of_their_own():
    class Own(gym.vector.VectorEnv):
        def __init__(self): self.x = 0
        def state_dict(self): return dict(x=self.x)
        def load_state_dict(self, s): self.x = s["x"]
    a, b = Own(), Own(); a.x = 5
    EnvState(b).load_state_dict(EnvState(a).state_dict())
    assert b.x == 5


RUN = """
import json, sys, dataclasses
import gymnasium as gym, torch
from esper_nb.record.checkpoints import EnvState, load_checkpoint, save_checkpoint
from esper_nb.learn.policies import PolicyConfig
from esper_nb import Learner, PPOConfig, train_ppo
torch.set_num_threads(1)
path, updates, resume, more, core, mode = sys.argv[1:]
envs = gym.make_vec("CartPole-v1", num_envs=4, vectorization_mode=mode)
config = PPOConfig(num_steps=32, num_updates=8, norm_obs=True, norm_reward=True, norm_value=True)
learner = Learner(envs, config, PolicyConfig(core=core, hidden=16, features=(16,)))
parts = dict(learner=learner, envs=EnvState(envs))
if resume == "1": load_checkpoint(path, learner.contract(), **parts)
rows = [dataclasses.asdict(u) | dict(seconds=0.) for u in train_ppo(learner, int(updates))]
for _ in range(int(more)): learner.step_envs()
save_checkpoint(path, learner.contract(), **parts)
json.dump(rows, open(path + ".json", "w"))
"""


@pytest.mark.parametrize("core, mode, more", [
    ("lstm", "sync", 13), pytest.param("none", "vector_entry_point", 0, marks=pytest.mark.slow)])
def test_resume_in_a_new_process_is_exact(core, mode, more, tmp_path, monkeypatch):
    def run(path, updates, resume=0, more=0, new_process=False):
        argv = [str(path), str(updates), str(resume), str(more), core, mode]
        monkeypatch.setattr(sys, "argv", ["run", *argv]) # which a new process gets, too
        threads = torch.get_num_threads()
        if new_process: assert warm.run(exec, RUN, {}).returncode == 0
        else: exec(RUN, {})
        torch.set_num_threads(threads)
        return json.loads(Path(f"{path}.json").read_text())
    whole = run(tmp_path / "whole", 4)
    parts = run(tmp_path / "parts", 2, more=more) + run(tmp_path / "parts", 2, resume=1, new_process=True)
    assert whole == parts
    a, b = (tensors_of(read_checkpoint(tmp_path / name)[0]) for name in ("whole", "parts"))
    assert a.keys() == b.keys() and len(a) > 40
    assert all(torch.equal(a[k].nan_to_num(), b[k].nan_to_num()) for k in a)


@pytest.mark.parametrize("edge", [1, 6, 7, 8, 10, 11, 17, 18])
def test_saved_at_any_step_edge(edge, tmp_path, one_thread, stop_at):
    "Stopped in the middle of a rollout or of an update, saved, and continued by objects built anew."
    def make():
        envs = gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
        norms = dict(norm_obs=True, norm_reward=True, norm_value=True)
        config = PPOConfig(num_steps=6, num_updates=3, num_minibatches=2, update_epochs=2, **norms)
        return Learner(envs, config, PolicyConfig(hidden=8, features=(8,))), EnvState(envs)
    whole, _ = make()
    expected = list(train_ppo(whole))
    first, envs = make()
    count = stop_at(first, edge)
    got = list(train_ppo(first))
    save_checkpoint(tmp_path / "x", first.contract(), learner=first, envs=envs)
    assert count() == edge
    second, envs = make()
    load_checkpoint(tmp_path / "x", second.contract(), learner=second, envs=envs)
    got += list(train_ppo(second))
    assert got == expected
    a, b = (tensors_of(learner.state_dict()) for learner in (whole, second))
    assert a.keys() == b.keys() and all(torch.equal(a[k].nan_to_num(), b[k].nan_to_num()) for k in a)
