"""Tests and pages as other machines would run them: anywhere.py [SETTING ...] [--only unit|pages|rest] [PATH ...]

Without names all settings are tried, and all tests and pages but the slow ones; a line says what passed, what failed
follows it. A PATH is of a page or of a file of tests: only those named run.
"""
import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

try: from scripts.notebooks import ROOT, find_notebooks, runs
except ImportError: from notebooks import ROOT, find_notebooks, runs

HERE = Path(__file__).resolve().parent
SETTINGS = dict(
    plain={},
    aten_default=dict(ATEN_CPU_CAPABILITY="default"),
    aten_avx2=dict(ATEN_CPU_CAPABILITY="avx2"),
    onednn_sse41=dict(ONEDNN_MAX_CPU_ISA="SSE41"),
    onednn_off=dict(ELSEWHERE="onednn=off"),
    oldest=dict(ATEN_CPU_CAPABILITY="default", ONEDNN_MAX_CPU_ISA="SSE41", MKL_CBWR="COMPATIBLE"),
    other_vendor={},      # see `as_other_vendor`
    one_thread=dict(OMP_NUM_THREADS="1"),
    two_threads=dict(OMP_NUM_THREADS="2"),
    rounding=dict(ELSEWHERE="rounding=1"),
    rounding_2=dict(ELSEWHERE="rounding=2"),
    seeds=dict(ELSEWHERE="seeds=1"),
)
QUICK = ("-n", "2", "--dist", "loadfile", "-m", "not slow and not browser")
SLOW = ("-n", "2", "--dist", "loadfile", "-m", "slow and not browser")


def as_other_vendor(folder):
    """Return the environment in which MKL, which has kernels for Intel's processors and for others, takes the others.

    Its function that says whose processor this is says the opposite. It is None where that cannot be had.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if platform.machine() != "x86_64" or platform.system() != "Linux" or compiler is None: return None
    intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    source, library = folder/"vendor.c", folder/"vendor.so"
    source.write_text(f"int mkl_serv_intel_cpu_true(void) {{ return {int(not intel)}; }}\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return dict(LD_PRELOAD=str(library))


def environment(setting, folder):
    "Return the environment of a setting, or None where this machine cannot have it."
    added = as_other_vendor(folder) if setting == "other_vendor" else SETTINGS[setting]
    if added is None: return None
    path = [str(HERE/"elsewhere"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | added | dict(PYTHONPATH=os.pathsep.join(path))


def command(stage, setting, paths):
    "Return the command of a stage, or None where a setting leaves it out: a page's text is not that of other seeds."
    pages = [p for p in paths if p.endswith(".ipynb")]
    files = [p for p in paths if p.endswith(".py")]
    if stage == "pages":
        if paths and not pages: return None
        if setting == "seeds": pages = pages or [str(p) for p in find_notebooks() if runs(p)]
        return [sys.executable, HERE/"notebooks.py", "quick" if setting == "seeds" else "run", *pages]
    if setting == "seeds" or paths and not files: return None
    return [sys.executable, "-m", "pytest", "-q", "-rfE", *(SLOW if stage == "rest" else QUICK), *(files or ["tests"])]


def counted(text):
    "Return what an output says of how many passed, and its lines about what did not."
    failed = [line.strip() for line in text.splitlines() if re.match(r"FAILED|ERROR|(ok|FAILED) .*hangs", line)]
    said = re.findall(r"^=* ?(\d+ (?:passed|failed).*?)(?: in [\d.]+s.*)?$", text, re.M)
    pages = re.findall(r"^(ok|FAILED) +[\d.]+ s, of a core", text, re.M)
    if pages: said = [f"{pages.count('ok')} passed" + f", {pages.count('FAILED')} failed" * ("FAILED" in pages)]
    return (said or ["nothing ran"])[-1], failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help=f"settings, of {' '.join(SETTINGS)}, and paths")
    parser.add_argument("--only", action="append", choices=("unit", "pages", "rest"), help="a stage (can be repeated)")
    parser.add_argument("--logs", type=Path, help="a folder for all that was said")
    args = parser.parse_intermixed_args()
    paths = [w for w in args.what if w.endswith((".ipynb", ".py"))]
    names = [w for w in args.what if w not in paths] or list(SETTINGS)
    if unknown := [n for n in names if n not in SETTINGS]:
        parser.error(f"{' '.join(unknown)}: settings are {' '.join(SETTINGS)}")
    if args.logs is not None: args.logs.mkdir(parents=True, exist_ok=True)
    wrong = False
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            env = environment(name, Path(folder))
            for stage in args.only or ("unit", "pages"):
                words = command(stage, name, paths)
                if words is None: continue
                if env is None:
                    print(f"{name:13} {stage:6} left out: needs a C compiler, Linux and an x86 processor", flush=True)
                    continue
                begun, log = time.time(), (args.logs or Path(folder))/f"{name}_{stage}.log"
                with open(log, "w", encoding="utf-8") as f:
                    done = subprocess.run(words, cwd=ROOT, env=env, stdout=f, stderr=subprocess.STDOUT)
                text = log.read_text(encoding="utf-8")
                said, failed = counted(text)
                print(f"{name:13} {stage:6} {said}, {(time.time() - begun) / 60:.1f} min", flush=True)
                if done.returncode: print("\n".join(failed or text.splitlines()[-30:]), flush=True)
                wrong |= done.returncode != 0
    sys.exit(wrong)


if __name__ == "__main__": main()
