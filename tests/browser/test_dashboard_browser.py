"The dashboard as a person meets it: the tutorial in JupyterLab and Voila, driven by clicks, judged by what it shows."
import json, re, shutil, time

import pytest

from conftest import ROOT, open_browser, server
from esper_nb.show.theme import MAIN_THRESHOLDS, THRESHOLDS

FOLDED = len(THRESHOLDS) - len(MAIN_THRESHOLDS) # thresholds that are not shown at first
NOTEBOOK = ROOT/"nbs/tutorials/dashboard.ipynb"
READY = """async () => {
  const w = window.jupyterapp.shell.currentWidget;
  await w.context.ready;
  await w.sessionContext.ready;
  await w.sessionContext.session.kernel.info;
}"""
ERRORS = "[data-mime-type='application/vnd.jupyter.error'], [data-mime-type='application/vnd.jupyter.stderr']"


# In the page itself, from the first moment of a reload: when the notebook's cells are there, and when the panel has
# drawn news from the kernel.
RELOADED = """(() => { const seen = window.reloaded = {}, look = () => {
  const says = document.querySelector('.esper-canvas canvas')?.getAttribute('aria-label');
  const epoch = document.querySelector('.esper-status')?.innerText.match(/(?:epoch|step) (\\d+)/);
  if (!seen.cells && document.querySelector('.jp-Notebook .jp-Cell')) seen.cells = performance.now();
  if (says && epoch) { seen.says = says; seen.epoch = epoch[1]; seen.panel = performance.now(); }
  else setTimeout(look, 10); }; look(); })()"""

PANELS = """() => ['.esper', '.esper-canvas', '.esper-canvas canvas', '.esper-key', '.esper-status'].map(name =>
  [name, [...document.querySelectorAll(name)].map(e => (e.getAttribute('aria-label') ?? e.innerText).slice(0, 200))])"""


def reload_page(browser, within=90):
    "What a page that was loaded again has seen of its panel; where it has seen none, it is loaded once more."
    # with three times as many jobs as cores, 2 of 20 pages showed no panel within two minutes; a person loads again
    for _ in range(2):
        browser.page.reload()
        end = time.time() + within
        while "panel" not in (seen := browser.page.evaluate("() => window.reloaded ?? {}")) and time.time() < end:
            time.sleep(.2)
        if "panel" in seen: break
        print(f"\nno panel within {within} s after a reload:", browser.errors, browser.page.evaluate(PANELS))
    return seen


class Panel:
    "The dashboard on a page, in a person's words."
    def __init__(self, browser):
        from playwright.sync_api import expect
        self.browser, self.page, self.expect = browser, browser.page, expect
        self.root, self.log, self.status = (self.page.locator(s).first
                                            for s in (".esper", ".esper-log", ".esper-status"))

    def press(self, name):
        self.root.get_by_role("button", name=re.compile(rf"^(provoke )?{re.escape(name)}$")).click()
    def sees(self, text, within=60): self.expect(self.log).to_contain_text(text, timeout=1000 * within)
    def state(self, word, within=30):
        self.expect(self.root.locator(".esper-pill")).to_contain_text(word, timeout=1000 * within)
    def epoch(self): return int(re.search(r"(?:epoch|step) (\d+)", self.status.inner_text())[1])
    def canvas_says(self): return self.root.locator(".esper-canvas canvas").get_attribute("aria-label")
    def show(self): self.root.evaluate("e => e.scrollIntoView()")

    def fold(self, name, shown=True):
        "Show a panel beside the picture, or hide it."
        button, panel = self.root.locator(f".esper-fold-{name}"), self.root.locator(f".esper-{name}")
        if panel.is_visible() != shown: button.click()
        if shown: panel.wait_for(state="visible")
        else: panel.wait_for(state="hidden")

    def drawn(self):
        "How many different colours the picture has: an empty canvas has one."
        return self.root.locator(".esper-canvas canvas").evaluate("""c => {
            const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data, seen = new Set();
            for (let i = 0; i < d.length; i += 4) seen.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]);
            return seen.size }""")

    def epoch_beyond(self, old, within=60):
        end = time.time() + within
        while self.epoch() <= old:
            assert time.time() < end, f"still at epoch {old} after {within} s"
            time.sleep(.1)

def use_everything(panel, shot):
    "Start, ruin, see it saved, move a threshold, pause, step, stop, go on, plant a seed."
    panel.press("▶ Start"); panel.state("running"); panel.epoch_beyond(8)
    panel.root.get_by_role("combobox", name="selected lane").select_option("lane 5")
    panel.expect(panel.root).to_contain_text("in lane 5")
    panel.press("nan")
    panel.sees("lane 5: nan injected, begins in 6 batches")
    panel.sees("lane 5: non-finite (loss nan"); panel.sees("rollback, back to batch"); panel.sees("lane 5: recovered")
    panel.expect(panel.status).to_contain_text("1 incident")
    assert "lane 5, 1 incident" in panel.canvas_says() and panel.drawn() > 50
    panel.show(); shot("rollback")

    panel.fold("limits")
    row = panel.root.locator(".esper-multiplier")
    row.locator(".noUi-handle").focus(); panel.page.keyboard.press("ArrowRight")
    panel.expect(row.locator(".widget-readout")).to_have_text("3.10")
    panel.sees("multiplier = 3.1 at batch")

    panel.press("❙❙ Pause"); panel.state("paused"); panel.sees("paused at batch")
    at = panel.epoch()
    time.sleep(1.)
    assert panel.epoch() == at
    panel.press("▸❙ Step"); panel.sees(f"(epoch {at})"); panel.epoch_beyond(at); panel.state("paused")
    assert panel.epoch() == at + 1
    panel.press("■ Stop"); panel.state("stopped"); panel.sees("stopped at batch")
    panel.fold("limits", False); panel.fold("grow")
    panel.press("Germinate"); panel.sees("lane 5, r0c0: germinate norm by hand at batch")
    panel.press("▶ Continue"); panel.state("running"); panel.sees("continued at batch"); panel.epoch_beyond(at + 2)
    panel.press("Advance"); panel.sees("advance by hand")
    panel.expect(panel.root.locator(".esper-next")).to_contain_text("more epochs")
    advance = panel.root.get_by_role("button", name="Advance", exact=True)
    assert advance.is_disabled() and advance.get_attribute("title").startswith("Not now: in ")
    panel.press("◇ Snapshot"); panel.sees("snapshot of 16 lanes")
    panel.press("↶ Roll back lane"); panel.sees("lane 5: by hand"); panel.sees("rolled back lane 5")
    panel.press("explode"); panel.sees("lane 5: explosion")
    panel.epoch_beyond(panel.epoch() + 3)
    panel.show(); shot("everything")


LAST = "print('every cell ran')"
IMAGES = """from esper_nb.show.dashboard import Dashboard
from esper_nb.show.session import Session
from esper_nb.train.population import FitConfig, new_population
session = Session(new_population('digits', FitConfig(lanes=4, epochs=400)), pace=.25)
Dashboard(session, image=True)"""
PPO = """from esper_nb.show.dashboard import Dashboard
from esper_nb.control.envs import GrowVecEnv
from esper_nb.learn.policies import PolicyConfig
from esper_nb import Learner, PPOConfig
from esper_nb.show.session import Session
from esper_nb.show.sources import EnvSource
envs = GrowVecEnv(task='digits_impaired', num_envs=4, horizon=30, gamma=.99, limit=320, workers=1)
config = PPOConfig(num_steps=8, num_updates=40, gamma=.99, num_minibatches=1)
learner = Learner(envs, config, PolicyConfig(hidden=16), heads=envs.actions)
session = Session(EnvSource(learner), pace=.25)
Dashboard(session, lane=1)"""

def write_notebook(path, *sources):
    cells = [dict(cell_type="code", id=f"c{i}", metadata={}, outputs=[], execution_count=None, source=s) for i,
             s in enumerate(sources)]
    path.write_text(json.dumps(dict(cells=cells,
                                    metadata=dict(kernelspec=dict(display_name="Python 3", language="python",
                                                                  name="python3")), nbformat=4, nbformat_minor=5)))

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebooks")
    shutil.copy(NOTEBOOK, folder)
    for name, *sources in (("images", IMAGES, LAST), ("ppo", PPO, LAST)):
        write_notebook(folder/f"{name}.ipynb", *sources)
    return folder

@pytest.fixture(scope="module")
def lab_server(folder, tmp_path_factory):
    with server("lab", folder, tmp_path_factory.mktemp("lab")) as address: yield address

@pytest.fixture
def lab(lab_server):
    yield lab_server
    lab_server.stop_kernels()

def open_lab(browser, address, name, done="every cell ran"):
    "Open a notebook, run all its cells, wait for the last."
    if name == NOTEBOOK.name: done = "▶ Start"
    page = browser.page
    page.goto(address(name))
    page.wait_for_selector(".jp-Notebook .jp-Cell")
    page.evaluate(READY)                     # the toolbar says "idle" before the kernel is there
    page.evaluate("() => { window.jupyterapp.commands.execute('application:toggle-left-area') }")
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells') }")
    panel = Panel(browser)
    last = page.locator(".jp-Notebook .jp-CodeCell").last.locator(".jp-OutputArea-output").last
    panel.expect(last).to_contain_text(done, timeout=180_000)
    assert page.locator(ERRORS).count() == 0
    return panel

def test_everything_in_jupyterlab_and_after_a_reload(lab, tmp_path):
    with open_browser(tmp_path) as browser:
        panel = open_lab(browser, lab, "dashboard.ipynb")
        time.sleep(1.); browser.shot("lab-1-ready")
        assert panel.root.evaluate("e => { const r = e.getBoundingClientRect(); return r.top > 60 && r.top < 200 }")
        use_everything(panel, lambda name: browser.shot(f"lab-2-{name}"))
        box = panel.root.bounding_box()
        assert box["height"] < 720 and box["width"] < 1240, box              # 800 pixels, less the bars of JupyterLab
        panel.press("❙❙ Pause"); panel.state("paused"); time.sleep(1.5)      # nothing new will come
        lane = panel.root.locator(".esper-key span").first             # in the dark the picture has colours of its own
        colours = dict(Light="rgb(0, 114, 178)", Dark="rgb(110, 162, 230)")
        for theme in ("Dark", "Light", "Dark"):
            chosen = f"{{theme: 'JupyterLab {theme}'}}"
            browser.page.evaluate(f"() => window.jupyterapp.commands.execute('apputils:change-theme', {chosen})")
            panel.expect(lane).to_have_css("color", colours[theme], timeout=20_000)
            panel.show(); browser.shot(f"lab-3-{theme}")
            # JupyterLab fails if a theme changes while it still shows the splash of the change before
            browser.page.wait_for_selector("#jupyterlab-splash", state="detached")
        panel.press("▶ Continue"); panel.state("running")

        browser.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
        incidents, epoch = re.search(r"(\d+) incidents", panel.canvas_says())[1], panel.epoch()
        browser.page.add_init_script(RELOADED)
        seen = reload_page(browser)
        browser.shot("lab-4-reloaded")
        assert "panel" in seen, (seen, browser.errors, browser.page.evaluate(PANELS))
        again = Panel(browser)
        took = (seen["panel"] - seen["cells"]) / 1000
        assert seen["says"].endswith(f"lane 5, {incidents} incidents") and int(seen["epoch"]) >= epoch, (seen, epoch)
        again.show(); time.sleep(1.)                                         # the picture may have been out of sight
        assert again.drawn() > 50
        print(f"\nafter a reload the panel shows the present {took:.2f} s after the notebook's cells,",
              f"{seen['panel'] / 1000:.2f} s after the reload")
        assert took < 20      # what it takes is printed; the machine may be busy
        again.show(); browser.shot("lab-4-reloaded")
        again.press("❙❙ Pause"); again.state("paused"); again.press("▸❙ Step"); again.sees("1 epoch at batch")
        assert browser.errors == []

def test_buttons_answer_while_a_cell_is_busy(lab, tmp_path):
    with open_browser(tmp_path) as browser:
        panel = open_lab(browser, lab, "images.ipynb")
        panel.press("▶ Start"); panel.state("running"); panel.epoch_beyond(1)
        kernel = "window.jupyterapp.shell.currentWidget.sessionContext.session.kernel"
        browser.page.evaluate(f"() => {{ {kernel}.requestExecute({{code: 'import time; time.sleep(8)'}}) }}")
        time.sleep(.5)
        begun = time.time()
        panel.press("❙❙ Pause"); panel.state("paused")
        print(f"\npaused {time.time() - begun:.2f} s after the click, while a cell of 8 s was running")
        assert time.time() - begun < 6

def test_images_stand_in_for_the_canvas(lab, tmp_path):
    with open_browser(tmp_path) as browser:
        panel = open_lab(browser, lab, "images.ipynb")
        image = panel.root.locator("img.widget-image")
        panel.press("▶ Start"); panel.epoch_beyond(3)
        before = image.get_attribute("src")
        browser.page.wait_for_function("b => document.querySelector('.esper img.widget-image').src !== b", arg=before)
        panel.press("nan"); panel.sees("lane 0: non-finite")
        time.sleep(3)
        panel.show(); browser.shot("lab-5-images")
        assert browser.errors == []

def test_ppo_over_lanes(lab, tmp_path):
    with open_browser(tmp_path) as browser:
        panel = open_lab(browser, lab, "ppo.ipynb")
        panel.press("▶ Start"); panel.state("running"); panel.epoch_beyond(9)
        for number in ("update 1", "policy loss", "KL divergence (nats)", "explained variance", "reward now"):
            panel.expect(panel.root.locator(".esper-main")).to_contain_text(number)
        panel.press("nan"); panel.sees("lane 1: nan injected, begins in the next step")
        panel.sees("lane 1: non-finite (loss nan"); panel.sees("→ rollback")
        assert "lane 1, 1 incident" in panel.canvas_says() and "step" in panel.canvas_says() and panel.drawn() > 50
        back = panel.root.get_by_role("button", name="↶ Roll back lane")
        assert back.is_disabled() and "provoke a fault" in back.get_attribute("title")
        panel.press("❙❙ Pause"); panel.state("paused")
        at = panel.epoch()
        panel.press("▸❙ Step"); panel.sees(f"1 step at step {at}"); panel.epoch_beyond(at); panel.state("paused")
        panel.press("▶ Continue"); panel.epoch_beyond(at + 8)
        panel.show(); browser.shot("lab-6-ppo")
        box = panel.root.bounding_box()
        assert box["height"] < 790 and box["width"] < 1240, box
        panel.expect(panel.root).to_contain_text(re.compile(r"next in lane 1:.*wait \d+ %"))
        assert browser.errors == []

RETURN = """from esper_nb.show.dashboard import Dashboard
from esper_nb.show.session import Session
from esper_nb.train.population import FitConfig, new_population
session = Session(new_population('digits', FitConfig(lanes=3, epochs=4000)), pace=.25)
dashboard = Dashboard(session)"""

def visible_text(page):
    "What the last cell's outputs show to a person."
    return page.locator(".jp-Notebook .jp-CodeCell").last.locator(".jp-Cell-outputWrapper").inner_text()

def open_again(browser, address, name):
    page = browser.page
    page.goto(address(name))
    page.wait_for_selector(".jp-Notebook .jp-Cell")
    page.evaluate(READY)
    time.sleep(2.)
    return page

def run_last_cell(page):
    page.evaluate("""() => { const {content} = window.jupyterapp.shell.currentWidget;
        content.activeCellIndex = content.widgets.length - 1;
        window.jupyterapp.commands.execute('notebook:run-cell') }""")

def test_coming_back(lab, folder, tmp_path):
    "After a reload without a save, in a copy that is not trusted, and after a restart."
    write_notebook(folder/"back.ipynb", RETURN, "dashboard")
    with open_browser(tmp_path) as browser:
        page = browser.page
        panel = open_lab(browser, lab, "back.ipynb", "▶ Start")
        panel.press("▶ Start"); panel.state("running"); panel.epoch_beyond(3)
        epoch = panel.epoch()

        page = open_again(browser, lab, "back.ipynb")                # nothing was saved: the page shows no panel
        assert page.locator(".esper").count() == 0
        run_last_cell(page)                                          # the gesture of the tutorial
        panel = Panel(browser); panel.state("running"); panel.epoch_beyond(epoch)
        panel.press("❙❙ Pause"); panel.state("paused"); panel.epoch_beyond(epoch)
        time.sleep(1.5)
        at = panel.epoch()
        assert page.locator(".esper-stored").count() == 1 and not page.locator(".esper-stored").is_visible()
        page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
        time.sleep(1.)

        book = json.loads((folder/"back.ipynb").read_text())
        book["cells"][0]["source"] += "\n"                           # another hand: the copy is not trusted
        (folder/"copy.ipynb").write_text(json.dumps(book))
        page = open_again(browser, lab, "copy.ipynb")
        said = visible_text(page)
        assert f"paused: epoch {at} of 4000" in said and "run this cell again" in said and "VBox" not in said, said
        assert page.locator(".esper-stored img").evaluate("e => e.naturalWidth") > 300
        browser.shot("lab-7-untrusted")

        page = open_again(browser, lab, "back.ipynb")
        Panel(browser).state("paused")                               # trusted, with its kernel: the live panel
        page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
        time.sleep(2.)
        page = open_again(browser, lab, "back.ipynb")
        page.locator(".esper-stored").wait_for(state="visible")
        time.sleep(4.)
        said = visible_text(page)
        assert f"paused: epoch {at} of 4000" in said and "not found" not in said, said
        browser.shot("lab-8-restarted")

def test_a_click_is_answered_at_once_while_the_kernel_is_busy(lab, folder, tmp_path):
    write_notebook(folder/"busy.ipynb", RETURN, "dashboard")
    with open_browser(tmp_path) as browser:
        page, panel = browser.page, open_lab(browser, lab, "busy.ipynb", "▶ Start")
        panel.state("ready")
        hold = """import threading, time
session._changed.acquire(); time.sleep(5); session._changed.release()"""      # whoever asks has to wait
        kernel = "window.jupyterapp.shell.currentWidget.sessionContext.session.kernel"
        page.evaluate(f"code => {{ {kernel}.requestExecute({{code}}) }}", hold)
        time.sleep(.7)
        pending, start = panel.root.locator(".esper-pending"), panel.root.locator(".esper-go")
        begun = time.time()
        panel.press("▶ Start")
        panel.expect(start).to_have_class(re.compile("esper-queued"), timeout=1500)
        print(f"\nanswered {time.time() - begun:.2f} s after the click")
        panel.expect(pending).to_contain_text("the kernel is busy", timeout=5000)
        browser.shot("lab-9-pending")
        panel.state("running"); panel.expect(pending).to_be_empty(timeout=10_000)
        panel.expect(start).not_to_have_class(re.compile("esper-queued"))

def test_a_panel_whose_kernel_is_gone_says_so(lab, folder, tmp_path):
    write_notebook(folder/"gone.ipynb", RETURN, "dashboard")
    with open_browser(tmp_path) as browser:
        page, panel = browser.page, open_lab(browser, lab, "gone.ipynb", "▶ Start")
        assert panel.root.locator(".esper-gone").count() == 0
        page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
        panel.expect(panel.root.locator(".esper-gone")).to_contain_text("run this cell again", timeout=30_000)
        browser.shot("lab-12-gone")

CUT = """root => {
  const page = root.getBoundingClientRect(), bad = [];
  const shown = "button, select, .noUi-target, .esper-status span, .esper-log span, canvas, small";
  for (const e of root.querySelectorAll(shown)) {
    const r = e.getBoundingClientRect();
    if (!r.width || getComputedStyle(e).clipPath !== "none") continue;
    if (r.left < page.left - 1 || r.right > page.right + 1) bad.push([e.className || e.tagName, e.innerText, r.right]);
    else if (e.scrollWidth > e.clientWidth + 1 && e.tagName === "BUTTON") bad.push([e.innerText, e.scrollWidth]);
  }
  let box = root.parentElement;
  while (box && box.scrollWidth <= box.clientWidth + 1) box = box.parentElement;
  return {bad, wide: box && getComputedStyle(box).overflowX === "hidden" ? box.className : "", w: page.width};
}"""

def test_nothing_is_cut_on_narrow_pages_or_when_enlarged(lab, folder, tmp_path):
    write_notebook(folder/"narrow.ipynb", RETURN, "dashboard")
    with open_browser(tmp_path) as browser:
        page, panel = browser.page, open_lab(browser, lab, "narrow.ipynb", "▶ Start")
        panel.press("▸❙ Step"); panel.epoch_beyond(0); panel.press("nan")
        panel.press("▸❙ Step"); panel.epoch_beyond(1)
        panel.fold("grow"); panel.fold("limits")
        for width, scale in ((1280, 1), (900, 1), (640, 1), (640, 2)):
            page.set_viewport_size(dict(width=width, height=800 // scale))
            time.sleep(1.)
            panel.show(); time.sleep(.5)
            found = panel.root.evaluate(CUT)
            browser.shot(f"lab-width-{width}-{scale}")
            assert found["bad"] == [] and found["w"] <= width, (width, found)
            for name in ("Germinate", f"▸ {FOLDED} more thresholds", "poison-optimizer", "⤓ Save"):
                button = panel.root.get_by_role("button", name=re.compile(rf"^(provoke )?{re.escape(name)}$"))
                button.scroll_into_view_if_needed()
                seen = button.evaluate("""e => { const r = e.getBoundingClientRect();
                    return e.contains(document.elementFromPoint(r.x + r.width / 2, r.y + r.height / 2)) }""")
                assert seen, (width, name)

def test_every_control_has_a_name_and_works_by_keyboard(lab, folder, tmp_path):
    write_notebook(folder/"keys.ipynb", RETURN, "dashboard")
    with open_browser(tmp_path) as browser:
        page, panel = browser.page, open_lab(browser, lab, "keys.ipynb", "▶ Start")
        limits = panel.root.locator(".esper-fold-limits")
        limits.focus(); page.keyboard.press("Enter")
        more = panel.root.get_by_role("button", name=f"▸ {FOLDED} more thresholds", exact=True)
        more.focus(); page.keyboard.press("Enter")
        panel.expect(panel.root.locator(".esper-row")).to_have_count(len(THRESHOLDS))
        time.sleep(1.5); panel.press("▸❙ Step"); panel.epoch_beyond(0); time.sleep(1.)
        tree = panel.root.aria_snapshot()
        controls = re.findall(r"- (button|combobox|slider|checkbox|textbox)(.*)", tree)
        assert len([c for c in controls if c[0] == "slider"]) == len(THRESHOLDS)
        assert all(re.match(r' "\S', rest) for _, rest in controls), [c for c in controls if '"' not in c[1]]
        confirm = panel.root.get_by_role("slider", name="confirm", exact=True)
        confirm.focus(); page.keyboard.press("ArrowRight"); panel.sees("confirm = 4 at batch")
        lanes = panel.root.get_by_role("combobox", name="selected lane")
        lanes.focus(); page.keyboard.press("ArrowDown")
        panel.expect(panel.root).to_contain_text("in lane 1")
        more.focus() if more.count() else panel.root.get_by_role("button", name=f"▾ {FOLDED} more thresholds").focus()
        page.keyboard.press("Enter")
        panel.expect(panel.root.locator(".esper-scroll")).to_be_hidden()
        browser.shot("lab-10-keys")

WATCH = """from esper_nb.show.dashboard import watch
followed = watch('runs/digits_impaired')
followed"""

def test_a_run_in_a_terminal_is_watched_live(lab, folder, tmp_path):
    "`esper-nb train` in a process of its own; the page only reads its folder."
    import os, subprocess, sys
    code = "from esper_nb.run.cli import main; main()"
    command = [sys.executable, "-c", code, "train", "digits_impaired", "--updates", "12", "--set", "env.num_envs=4",
               "--inject", "nan:1:3", "--quiet", "--out", str(folder/"runs")]
    env = os.environ | dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    train = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        rows, end = folder/"runs/digits_impaired/rows.jsonl", time.time() + 120
        while not rows.exists() or rows.stat().st_size < 20_000:
            assert train.poll() is None and time.time() < end
            time.sleep(.2)
        write_notebook(folder/"watch.ipynb", WATCH)
        with open_browser(tmp_path) as browser:
            panel = open_lab(browser, lab, "watch.ipynb", "of 144")
            assert panel.root.locator("button.widget-button").count() == 0
            panel.sees("lane 1: non-finite"); panel.epoch_beyond(panel.epoch(), 90)
            assert train.poll() is None                              # it trains still
            panel.expect(panel.root).to_contain_text("policy loss", timeout=120_000)
            panel.epoch_beyond(40, 120); panel.show(); time.sleep(1.)
            assert "Training loss of every step" in panel.canvas_says() and panel.drawn() > 50
            browser.shot("lab-11-watch")
            assert browser.errors == []
    finally:
        train.kill(); train.wait()

def test_everything_in_voila(folder, tmp_path):
    with server("voila", folder, tmp_path) as address, open_browser(tmp_path) as browser:
        browser.page.goto(address("dashboard.ipynb"), timeout=180_000)
        panel = Panel(browser)
        panel.expect(panel.root.get_by_role("button", name="▶ Start", exact=True)).to_be_visible(timeout=120_000)
        use_everything(panel, lambda name: browser.shot(f"voila-{name}"))
        assert browser.own_errors() == []
