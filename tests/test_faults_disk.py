"Disks that are read-only or full, for real: mounted where the machine allows it, or seen by a user without rights."
import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from esper_nb.core import parse_settings
from esper_nb.run import RunConfig, begin_run, get_recipe, main

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread"),
              pytest.mark.skipif(os.name == "nt", reason="needs mount")]
ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ("env.num_envs=2", "env.horizon=4", "env.limit=128", "ppo.num_steps=4", "ppo.num_minibatches=2",
            "ppo.update_epochs=2", "save_every=1", "env.workers=1", 'env.blueprints=["conv_light"]')
SMALL = [word for setting in SETTINGS for word in ("--set", setting)]

@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    "A run of one update of three."
    recipe = get_recipe("digits_impaired", parse_settings(SETTINGS, RunConfig) | {"ppo.num_updates": 3})
    recipe = recipe.replace(plugins=()) # a run remembers them, and other tests have files that not all may read
    run = begin_run(recipe, tmp_path_factory.mktemp("runs"))
    for _ in run.updates(): break
    return run.folder.path

@pytest.fixture
def disk(tmp_path):
    "`disk(size)`: a file system of its own, and a function that makes it read-only."
    place, mounted = tmp_path/"disk", []
    place.mkdir()
    def mount(*options):
        done = subprocess.run(["mount", *options, str(place)], capture_output=True, text=True)
        if done.returncode: pytest.skip(f"cannot mount here: {done.stderr.strip()}")
        mounted.append(place)
    def make(size):
        if shutil.which("mount") is None: pytest.skip("there is no mount")
        mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs")
        return place, lambda: mount("-o", "remount,ro")
    yield make
    if mounted: subprocess.run(["umount", "-l", str(place)], check=True)

def commands(place):
    "All that writes, and where: new things in a folder, and into a run that is there."
    yield "train", "digits_impaired", "--updates", "1", *SMALL, "--out", str(place)
    yield "fit", "digits", "--set", "lanes=2", "--set", "epochs=1", "--out", str(place)
    yield "compare", "digits", "--out", str(place/"x.json")
    yield "resume", str(place/"run")
    yield "report", str(place/"run")

def test_a_read_only_disk_is_one_line(disk, run_folder, capsys):
    place, protect = disk("64m")
    shutil.copytree(run_folder, place/"run")
    protect()
    with pytest.raises(OSError) as e: (place/"probe").touch()
    assert e.value.errno == errno.EROFS
    before = {p: p.read_bytes() for p in place.rglob("*") if p.is_file()}
    for argv in commands(place):
        assert main(list(argv)) == 1, argv
        said = capsys.readouterr().err
        assert "Traceback" not in said and "esper-nb: " in said, (argv, said)
        assert "read-only" in said and "Errno" not in said, (argv, said) # in words, and not of a hidden file
    assert {p: p.read_bytes() for p in place.rglob("*") if p.is_file()} == before

def test_a_full_disk_is_one_line(disk, run_folder, capsys):
    place, _ = disk("16m")
    shutil.copytree(run_folder, place/"run")
    with open(place/"ballast", "wb", buffering=0) as f:
        try:
            while True: f.write(b"x" * 4096)
        except OSError as e: assert e.errno == errno.ENOSPC
    for argv in commands(place):
        if argv[0] == "compare": continue # their result is kept on the screen, after hours
        assert main(list(argv)) == 1, argv
        said = capsys.readouterr().err
        assert "Traceback" not in said and "esper-nb: " in said and "No space left" in said, (argv, said)
    (place/"ballast").unlink()
    assert main(["resume", str(place/"run")]) == 0, "what was there is whole"

def test_a_user_without_rights_is_told_in_one_line(tmp_path, run_folder):
    if os.getuid() == 0 and shutil.which("setpriv") is None: pytest.skip("root may write everywhere, and no setpriv")
    place = tmp_path/"place"
    shutil.copytree(run_folder, place/"run")
    for p in (place, *place.rglob("*")): p.chmod(0o555 if p.is_dir() else 0o444)
    for p in tmp_path.parents:
        if p.stat().st_uid == os.getuid() and p != Path("/") and "pytest" in str(p): p.chmod(0o755)
    tmp_path.chmod(0o755)
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.getuid() == 0 else []
    python = [*nobody, sys.executable]
    env = os.environ | dict(PYTHONPATH=str(ROOT), PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1",
                            HOME=str(tmp_path), MPLCONFIGDIR=str(tmp_path/"mpl"))
    probe = subprocess.run([*python, "-c", "import esper_nb, torch"], env=env, capture_output=True, text=True)
    if probe.returncode: pytest.skip(f"no other user can import torch here: {probe.stderr.strip()[-200:]}")
    loop = """
import sys
from esper_nb.run.cli import main
for argv in eval(sys.argv[1]):
    print("#", argv[0], main(list(argv)), file=sys.stderr, flush=True)
"""
    done = subprocess.run([*python, "-c", loop, repr(list(commands(place)))], env=env, capture_output=True, text=True,
                          timeout=600)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    ends = [line for line in done.stderr.splitlines() if line.startswith("# ")]
    assert ends == [f"# {argv[0]} 1" for argv in commands(place)], done.stderr
    assert done.stderr.count("esper-nb: ") >= len(ends)
