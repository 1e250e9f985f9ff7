"""The walk of nbs/tutorials/first_rollback.ipynb, made for real: takes its screenshots again and times it.

    python tests/browser/walk.py

Clones the repository into a new folder, types `make lab` there, opens the address that it prints in a headless Chromium
with settings of its own, and then only clicks what the page says, at the pace of a hand. Two things stand in for a
newcomer's: the environment in .venv is a link to this one (so `make install` is left out), and changes that are not
committed yet are copied over.
"""
import json, os, re, shutil, signal, subprocess, sys, tempfile, time
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from conftest import ROOT, open_browser
from test_dashboard_browser import Panel

IMAGES = ROOT/"nbs/tutorials/images"
LIMIT = 80_000      # bytes a picture
LONG = 300          # seconds that a busy machine may take for a step
HAND = 2.           # seconds that a person needs to find and press a button


def small(path, limit=LIMIT):
    "The screenshot with as many colours as fit."
    from PIL import Image
    full = Image.open(path).convert("RGB")
    for colours in (256, 128, 64, 32):
        full.quantize(colours, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(path, optimize=True)
        if path.stat().st_size <= limit: return
    raise RuntimeError(f"{path} has {path.stat().st_size} bytes, more than {limit}")


def fresh_clone(folder):
    "A clone with the files as they are now, and a link to this environment."
    def git(*a): return subprocess.run(["git", *a], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    git("clone", "--quiet", str(ROOT), str(folder))
    for name in filter(None, git("ls-files", "-z", "--modified", "--others", "--exclude-standard").split("\0")):
        if not (ROOT/name).exists(): (folder/name).unlink(missing_ok=True)
        elif (ROOT/name).is_file():
            (folder/name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT/name, folder/name)
    (folder/".venv").symlink_to(ROOT/".venv")

@contextmanager
def make_lab(folder, tmp):
    "`make lab` in a folder; yields the address that it prints."
    names = dict(JUPYTER_CONFIG_DIR="cfg", JUPYTER_DATA_DIR="data", JUPYTER_RUNTIME_DIR="run", IPYTHONDIR="ipy",
                 JUPYTERLAB_SETTINGS_DIR="set", JUPYTERLAB_WORKSPACES_DIR="ws")
    env = {k: v for k, v in os.environ.items() if k != "MPLBACKEND"}
    env |= {k: str(tmp/v) for k, v in names.items()}
    env |= dict(PYTHONPATH=str(folder), BROWSER="true", OMP_NUM_THREADS="1")
    (tmp/"cfg").mkdir()
    # for containers
    (tmp/"cfg/jupyter_server_config.json").write_text(json.dumps({"ServerApp": {"allow_root": True}}))
    log = tmp/"make.log"
    with open(log, "w") as out:
        process = subprocess.Popen(["make", "-o", ".venv/.installed", "lab"], cwd=folder, env=env, stdout=out,
                                   stderr=out, start_new_session=True)
    try:
        end = time.time() + 120
        while not (found := re.search(r"http://(?:127\.0\.0\.1|localhost):\d+/lab\S*token=\w+", log.read_text())):
            if process.poll() is not None or time.time() > end: raise RuntimeError(log.read_text())
            time.sleep(.2)
        yield found[0]
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try: process.wait(15)
        except subprocess.TimeoutExpired: os.killpg(process.pid, signal.SIGKILL)


hands = []          # seconds of every gesture

def walk(browser, address, folder):
    "Yields (name of the picture, what was done) after each step."
    page, panel = browser.page, Panel(browser)
    page.goto(address)
    files = page.locator(".jp-DirListing-item")
    if files.filter(has_text="tutorials").count() == 0: files.first.wait_for()
    def hand():
        hands.append(HAND)
        time.sleep(HAND)
    news = page.get_by_role("button", name="No", exact=True)
    try: news.click(timeout=4000)                           # JupyterLab asks once whether it may tell news
    except Exception: pass
    if page.locator(".jp-NotebookPanel").count() == 0:      # the list of files
        hand(); files.filter(has_text="tutorials").dblclick()
        files.filter(has_text="dashboard.ipynb").wait_for(); hand(); files.filter(has_text="dashboard.ipynb").dblclick()
    page.wait_for_selector(".jp-Notebook .jp-Cell")
    page.locator(".jp-Notebook-ExecutionIndicator[data-status='idle']").wait_for()
    hand()
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem").filter(has_text="Run All Cells").first.hover()
    hand()
    yield "walk-1-run-all", "the notebook is open, Run → Run All Cells"
    page.get_by_role("menuitem").filter(has_text="Run All Cells").first.click()
    panel.root.wait_for(timeout=180_000)
    hand()
    panel.show(); time.sleep(.5)
    yield "walk-2-panel", "the panel is there"
    panel.press("▶ Start"); panel.state("running"); panel.epoch_beyond(12, LONG)
    panel.show(); hand()
    yield "walk-3-running", "▶ Start, and a dozen epochs"
    panel.press("nan")
    panel.sees("lane 3: non-finite (loss nan", LONG)
    panel.sees("lane 3: recovered", LONG)
    panel.epoch_beyond(panel.epoch() + 3, LONG)
    panel.press("❙❙ Pause"); panel.state("paused")
    panel.show(); time.sleep(1.)
    yield "walk-4-rollback", "nan: verdict, rollback, recovery"
    hand(); panel.fold("grow")
    grow(panel, hand)
    panel.show(); time.sleep(1.)
    yield "walk-5-grown", "❀ Grow ▸, germinate, advance as soon as the button lets you"
    hand(); panel.press("⤓ Save"); panel.sees("checkpoint.safetensors", LONG)
    hand(); page.keyboard.press("Control+s"); time.sleep(2.)
    epoch = panel.epoch()
    page.reload()
    page.wait_for_selector(".jp-Notebook .jp-Cell")
    panel = Panel(browser)
    panel.root.wait_for(timeout=120_000); panel.state("paused"); panel.epoch_beyond(epoch - 1)
    panel.show(); time.sleep(2.)
    assert panel.drawn() > 50
    yield "walk-6-reloaded", "⤓ Save, Ctrl+S, the page is loaded anew: the panel is there again"
    hand()
    command = [folder/".venv/bin/python", "-c", "from esper_nb.run.cli import main; main()", "report",
               folder/"nbs/tutorials/runs/run"]
    said = subprocess.run(command, cwd=folder, env=os.environ | dict(PYTHONPATH=str(folder)), check=True,
                          capture_output=True, text=True).stdout
    page.goto(f"file://{said.strip()}")
    page.locator(".lead").wait_for()
    yield "walk-7-report", "esper-nb report nbs/tutorials/runs/run"

def grow(panel, hand, within=LONG):
    "Plant a seed in the lane in focus and lead it as far as its gates let it, as a person would: a look, a click."
    box = panel.root.locator(".esper-grow")
    def stage(): return box.locator(".esper-next b").inner_text()
    hand(); panel.press("Germinate"); hand(); panel.press("▶ Continue")
    end = time.time() + within
    advance = panel.root.get_by_role("button", name="Advance", exact=True)
    while stage() not in ("HOLDING", "FOSSILIZED") and time.time() < end:
        if advance.is_enabled(): hand()
        if advance.is_enabled(): advance.click()
        time.sleep(.5)
    fossilize = panel.root.get_by_role("button", name="Fossilize", exact=True)
    if stage() == "HOLDING" and fossilize.is_enabled(): hand(); fossilize.click(); time.sleep(1.)
    print("the seed came to", stage(), flush=True)
    hand(); panel.press("❙❙ Pause"); panel.state("paused")


def main():
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as tmp:
        tmp = Path(tmp)
        fresh_clone(tmp/"esper_nb")
        begun, times = time.time(), []
        with make_lab(tmp/"esper_nb", tmp) as address, open_browser(tmp) as browser:
            times.append(("make lab has printed its address", round(time.time() - begun)))
            print(f"{times[-1][1]:4d} s  {times[-1][0]}")
            for name, done in walk(browser, address, tmp/"esper_nb"):
                times.append((done, round(time.time() - begun)))
                if name == "walk-4-rollback":
                    browser.page.locator(".esper-canvas").screenshot(path=IMAGES/"canvas.png")
                    small(IMAGES/"canvas.png")
                browser.page.screenshot(path=IMAGES/f"{name}.png"); small(IMAGES/f"{name}.png")
                print(f"{times[-1][1]:4d} s  {done}  ({(IMAGES/f'{name}.png').stat().st_size // 1000} kB)", flush=True)
            assert browser.errors == [], browser.errors
    times.append((f"of which the hand took {sum(hands):.0f} s, for {len(hands)} gestures", round(time.time() - begun)))
    (IMAGES/"walk.json").write_text(json.dumps(times, indent=0, ensure_ascii=False) + "\n")


if __name__ == "__main__": main()
