"""The walk of nbs/tutorials/first_rollback.ipynb, made for real: takes its screenshots again and times it.

    python tests/browser/walk.py

Starts JupyterLab on a copy of the notebooks, opens the dashboard as `make lab` does, and clicks what the page says.
"""
import json, shutil, sys, tempfile, time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from conftest import ROOT, open_browser, server  # noqa: E402
from test_dashboard_browser import READY, Panel  # noqa: E402

IMAGES = ROOT/"nbs/tutorials/images"
LIMIT = 80_000      # bytes a picture


def small(path, limit=LIMIT):
    "The screenshot with as many colours as fit."
    from PIL import Image
    full = Image.open(path).convert("RGB")
    for colours in (256, 128, 64, 32):
        full.quantize(colours, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(path, optimize=True)
        if path.stat().st_size <= limit: return
    raise RuntimeError(f"{path} has {path.stat().st_size} bytes, more than {limit}")


def walk(browser, address):
    "Yields (name of the picture, what was done) after each step."
    page, panel = browser.page, Panel(browser)
    page.goto(address("dashboard.ipynb"))
    page.wait_for_selector(".jp-Notebook .jp-Cell")
    page.evaluate(READY)
    page.evaluate("() => { window.jupyterapp.commands.execute('application:toggle-left-area') }")
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem").filter(has_text="Run All Cells").first.hover()
    time.sleep(.5)
    yield "walk-1-run-all", "the notebook is open, Run → Run All Cells"
    page.get_by_role("menuitem").filter(has_text="Run All Cells").first.click()
    panel.expect(page.locator(".jp-Notebook .jp-CodeCell").last.locator(".jp-OutputArea-output").last).to_contain_text("every cell ran", timeout=180_000)
    panel.show(); time.sleep(.5)
    yield "walk-2-panel", "every cell has run, the panel is there"
    panel.press("▶ Start"); panel.state("running"); panel.epoch_beyond(12)
    panel.show(); time.sleep(.5)
    yield "walk-3-running", "Start, and a dozen epochs"
    panel.press("nan"); panel.sees("lane 3: non-finite (loss nan"); panel.sees("lane 3: recovered"); panel.epoch_beyond(panel.epoch() + 3)
    panel.press("❙❙ Pause"); panel.state("paused")
    panel.show(); time.sleep(.5)
    yield "walk-4-rollback", "nan: verdict, rollback, recovery"


def main():
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as tmp:
        tmp = Path(tmp)
        shutil.copytree(ROOT/"nbs/tutorials", tmp/"nbs", ignore=shutil.ignore_patterns("images", ".ipynb_checkpoints"))
        begun, times = time.time(), []
        with server("lab", tmp/"nbs", tmp) as address, open_browser(tmp) as browser:
            for name, done in walk(browser, address):
                times.append((done, round(time.time() - begun)))
                browser.page.screenshot(path=IMAGES/f"{name}.png"); small(IMAGES/f"{name}.png")
                print(f"{times[-1][1]:4d} s  {done}  ({(IMAGES/f'{name}.png').stat().st_size // 1000} kB)")
            assert browser.errors == [], browser.errors
    (IMAGES/"walk.json").write_text(json.dumps(times, indent=0, ensure_ascii=False) + "\n")


if __name__ == "__main__": main()
