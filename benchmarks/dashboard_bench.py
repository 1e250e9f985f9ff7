"""What an open dashboard costs, and whether anything grows meanwhile.

    python -m benchmarks.dashboard_bench grow 600  # a dashboard for ten minutes: memory of page and kernel
    python -m benchmarks.dashboard_bench cost 6 20 # six rounds of 20 s each way: a run without and with a dashboard

Each starts a JupyterLab and a headless Chromium of its own and writes what it measured into
nbs/tutorials/images/watch.json, from which the pages print it. Processor times come from /proc, so this needs Linux.
"""
import json, sys, tempfile, time
from pathlib import Path
from statistics import median

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]/"tests/browser"))
from conftest import ROOT, open_browser, server
from test_dashboard_browser import LAST, open_lab, write_notebook

RESULT = ROOT/"nbs/tutorials/images/watch.json"

GROW = """import json, os, threading, time
from esper_nb.show.dashboard import Dashboard
from esper_nb.show.session import Session
from esper_nb.train.population import FitConfig, new_population
ROWS = 2000      # few, so that this store is full before the first sample, too
session = Session(new_population('digits', FitConfig(lanes=16, epochs=100_000)), rows=ROWS)
board = Dashboard(session, lane=3)
def kept(history):
    series = {k: getattr(history, k).count for k in ('losses', 'states', 'curves')}
    lists = {k: len(getattr(history, k)) for k in ('notes', 'incidents', '_unrecovered', '_unexplained')}
    places = dict(reports=len(history._places.queue), snapshots=len(history._places.snapshots))
    return series | lists | places | dict(rows=len(history.recorder.rows))
def report():
    board.widget()
    s, f = session, board.panel.feed
    while True:
        time.sleep(1.)
        state = dict(pid=os.getpid(), steps=s.steps, sent=f.pacer.sent, unanswered=f.pacer.unanswered,
                    error=f.error or s.error, full=len(s.history.recorder.rows) >= ROWS, kept=kept(s.history))
        with open('grow.tmp', 'w') as file: json.dump(state, file)
        os.replace('grow.tmp', 'grow.json')
def ruin():
    for k in range(10**6):
        time.sleep(15.)
        session.provoke(('nan', 'explode')[k % 2], k % 16)
for work in (report, ruin): threading.Thread(target=work, daemon=True).start()
board"""

COST = """import json, os, threading, time
import ipywidgets as W, numpy as np, psutil
from esper_nb.show.dashboard import Dashboard
from esper_nb.show.session import Session
from esper_nb.show.sources import Frame, PopulationSource
from esper_nb.train.population import FitConfig, new_population
place, said, noise = W.Box(), W.HTML('measuring'), np.random.default_rng(0)
def source(): return PopulationSource(new_population('digits', FitConfig(lanes=16, epochs=100_000)))
def others():
    seconds = dict.fromkeys(('server', 'browser'), 0.)
    for name, pids in json.load(open('pids.json')).items():
        for pid in pids:
            try: t = psutil.Process(pid).cpu_times()
            except psutil.NoSuchProcess: continue
            seconds[name] += t.user + t.system
    return seconds
def thread_seconds(tids):
    out = 0.
    for tid in tids:
        try: out += int(open(f'/proc/self/task/{tid}/schedstat').read().split()[0]) / 1e9
        except OSError: pass
    return out
def phase(watched, seconds):
    kernel = [t.native_id for t in threading.enumerate() if t is not threading.current_thread()]      # all but the run
    run = source()
    for _ in range(3): run.step()
    marks, steps = [], 0
    def mark(own):
        now = dict(t=time.perf_counter(), own=own + thread_seconds(kernel), all=time.process_time(), steps=steps)
        marks.append(now | others())
    if not watched:
        def work():
            nonlocal steps
            end = time.perf_counter() + seconds
            while time.perf_counter() < end: run.step(); steps += 1
        t = threading.Thread(target=work); mark(0.); t.start(); t.join(); mark(0.)
        updates = 0
    else:
        session = Session(run)
        filing = 0.      # seconds of processor time in the run's own thread
        def timed(frame, add=session.history.add):
            nonlocal filing
            begun = time.thread_time(); add(frame); filing += time.thread_time() - begun
        session.history.add = timed
        for k in range(48):      # the history is as long as it gets
            session.history.add(Frame(2.3 * np.exp(-k / 20) * noise.lognormal(0, .2, (20, 16)), np.full(16, 90.)))
        board = Dashboard(session, lane=3)
        place.children = (board.widget(),)
        session.start(); time.sleep(4.)
        feed = board.panel.feed
        kernel.append(feed.thread.native_id)
        steps, sent = session.steps, feed.pacer.sent
        mark(filing)
        time.sleep(seconds)
        steps = session.steps
        mark(filing)
        updates = feed.pacer.sent - sent
        place.children = ()
        board.close(); session.close()
    a, b = marks
    wall = b['t'] - a['t']
    spent = {k: b[k] - a[k] for k in ('server', 'browser', 'steps', 'all')}
    return dict(watched=watched, wall=wall, updates=updates, kernel=b['own'] - a['own'], **spent)
def measure(rounds, seconds):
    out = []
    try:
        for k in range(rounds):
            for watched in ((False, True), (True, False))[k % 2]:
                out.append(phase(watched, seconds))
                time.sleep(1.)
        json.dump(out, open('cost.json', 'w')); said.value = 'measured'
    except Exception as e: said.value = repr(e)
W.VBox([place, said])"""


def command_of(process):
    "What `process` was started with; empty for one that has ended, whether or not its parent has waited for it."
    try: return " ".join(process.cmdline())
    except psutil.NoSuchProcess: return ""

def pids_of(browser, tmp):
    "Processes of the server without the kernel, and of the browser."
    commands = {p.pid: command_of(p) for p in psutil.Process().children(recursive=True)}
    return dict(server=[pid for pid, c in commands.items() if "jupyterlab" in c and "ipykernel" not in c],
                browser=[pid for pid, c in commands.items() if "chrom" in c])

def slope(values, every):
    "Median of the last minute less that of the first, and both."
    k = max(1, round(60 / every))
    first, last = median(values[:k]), median(values[-k:])
    return dict(first=first, last=last, change=last - first)

def grow(seconds=20, every=15, warm=None, shot=None):
    "Watch a run for some time; samples of everything that might grow."
    samples = []
    with tempfile.TemporaryDirectory() as tmp:
        tmp = Path(tmp)
        (tmp/"nbs").mkdir()
        write_notebook(tmp/"nbs/grow.ipynb", GROW, LAST)
        with server("lab", tmp/"nbs", tmp) as address, open_browser(tmp) as browser:
            panel = open_lab(browser, address, "grow.ipynb")
            panel.show(); panel.press("▶ Start"); panel.state("running"); panel.epoch_beyond(4)
            devtools = browser.page.context.new_cdp_session(browser.page)
            devtools.send("Performance.enable")
            def state(): return json.loads((tmp/"nbs/grow.json").read_text())
            begun = time.time()
            def warming(): return not state()["full"] if warm is None else time.time() - begun < warm
            while warming(): time.sleep(.5)
            print(f"stores of fixed size are full after {time.time() - begun:.0f} s" if warm is None
                  else f"{warm} s to warm up", flush=True)
            begun = time.time()
            while time.time() - begun < seconds:
                time.sleep(max(0, every * (len(samples) + 1) - (time.time() - begun)))
                devtools.send("HeapProfiler.collectGarbage")
                m = {x["name"]: x["value"] for x in devtools.send("Performance.getMetrics")["metrics"]}
                t = state()
                memory = psutil.Process(t["pid"]).memory_info().rss / 2**20
                samples.append(dict(at=round(time.time() - begun, 1), heap_mb=m["JSHeapUsedSize"] / 2**20,
                                    nodes=m["Nodes"], listeners=m["JSEventListeners"], kernel_mb=memory, **t))
                s = samples[-1]
                print(f"{s['at']:6.1f} s  heap {s['heap_mb']:6.2f} MB  nodes {s['nodes']:5.0f}",
                      f"listeners {s['listeners']:4.0f}  kernel {s['kernel_mb']:7.1f} MB",
                      f"unanswered {s['unanswered']}  sent {s['sent']}  epochs {s['steps']}  {s['kept']}", flush=True)
            if shot: browser.shot(shot)
            assert browser.errors == [], browser.errors
    assert not any(s["error"] for s in samples), samples[-1]["error"]
    return samples

def cost(rounds=6, seconds=20):
    "The same run without and with a dashboard, in turns: raw numbers of every phase."
    with tempfile.TemporaryDirectory() as tmp:
        tmp = Path(tmp)
        (tmp/"nbs").mkdir()
        write_notebook(tmp/"nbs/cost.ipynb", COST, LAST)
        with server("lab", tmp/"nbs", tmp, threads=None) as address, open_browser(tmp) as browser:
            open_lab(browser, address, "cost.ipynb")
            (tmp/"nbs/pids.json").write_text(json.dumps(pids_of(browser, tmp)))
            code = f"threading.Thread(target=measure, args=({rounds}, {seconds})).start()"
            kernel = "window.jupyterapp.shell.currentWidget.sessionContext.session.kernel"
            browser.page.evaluate(f"code => {{ {kernel}.requestExecute({{code}}) }}", code)
            output = ".jp-Notebook .jp-CodeCell .jp-OutputArea-output"
            browser.page.evaluate(f"() => document.querySelector('{output}').scrollIntoView()")
            said, end = tmp/"nbs/cost.json", time.time() + 120 + rounds * 2 * (seconds + 20)
            while not said.exists():
                assert time.time() < end, browser.page.locator(".widget-html-content").all_inner_texts()
                time.sleep(.5)
            time.sleep(.5)
            assert browser.errors == [], browser.errors
            return json.loads(said.read_text())

def costs(phases):
    "What the raw numbers say: processor time of everything but the run, and steps per second."
    bare, seen = ([p for p in phases if p["watched"] == w] for w in (False, True))
    def mean(ps, k): return sum(p[k] for p in ps) / sum(p["wall"] for p in ps)
    ms = {k: 1000 * (mean(seen, k) - mean(bare, k)) for k in ("kernel", "server", "browser")}
    speed = [a["steps"] / a["wall"] / (b["steps"] / b["wall"]) for a, b in zip(seen, bare)]
    return dict(ms_per_s={k: round(v, 2) for k, v in ms.items()}, cores=psutil.cpu_count(),
                share_pct=round(sum(ms.values()) / 10 / psutil.cpu_count(), 2),
                speed_watched=round(median(speed), 4), speed_low=round(min(speed), 3), speed_high=round(max(speed), 3),
                updates_per_s=round(mean(seen, "updates"), 2), epochs_per_s=round(mean(bare, "steps"), 2))

def store(**measured):
    "Put results beside those that are there."
    old = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    RESULT.write_text(json.dumps(old | measured, indent=1) + "\n")


if __name__ == "__main__":
    what, *numbers = sys.argv[1:]
    if what == "grow":
        seconds = int(numbers[0]) if numbers else 600
        samples = grow(seconds)
        small = {k: {n: round(v, 2) for n, v in slope([s[k] for s in samples], 15).items()}
                 for k in ("heap_mb", "nodes", "listeners", "kernel_mb")}
        small |= dict(seconds=seconds, epochs=samples[-1]["steps"], sent=samples[-1]["sent"],
                      unanswered_most=max(s["unanswered"] for s in samples), samples=len(samples))
        print(json.dumps(small, indent=1)); store(grow=small)
    elif what == "cost":
        phases = cost(*map(int, numbers))
        for p in phases: print({k: round(v, 3) if isinstance(v, float) else v for k, v in p.items()})
        found = costs(phases)
        print(found); store(cost=found | dict(rounds=len(phases) // 2, seconds=round(sum(p["wall"] for p in phases))))
