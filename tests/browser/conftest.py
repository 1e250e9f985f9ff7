"A JupyterLab or Voila server of its own, and a headless Chromium on it; all tests skip where there is no Chromium."
import json, os, secrets, shutil, socket, subprocess, sys, time, urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHOTS = Path(__file__).parent/"artefacts"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]
SETTINGS = {"notebook-extension/tracker": {"windowingMode": "none"},
            "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
            "docmanager-extension/plugin": {"autosave": False}}


def find_chromium():
    "Path of a Chromium or Chrome, or None."
    names = [os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome", "google-chrome-stable",
             "chrome"]
    found = next((path for n in names if n and (path := shutil.which(n))), None)
    if found: return found
    try:
        from playwright.sync_api import sync_playwright
        with sync_playwright() as p: own = p.chromium.executable_path
        return own if Path(own).exists() else None
    except Exception: return None

def pytest_collection_modifyitems(config, items):
    here = [i for i in items if Path(__file__).parent in i.path.parents]
    for item in here: item.add_marker(pytest.mark.browser)
    if not here or "not browser" in config.getoption("markexpr"): return # to look for one takes seconds
    why = None
    for name in ("playwright", "jupyterlab", "anywidget", "voila"):
        try: __import__(name)
        except ImportError: why = why or f"needs {name}: pip install -e '.[dev]'"
    if why is None and find_chromium() is None:
        why = "needs a Chromium: apt install chromium, or playwright install chromium, or set CHROMIUM to its path"
    for item in here:
        item.add_marker(pytest.mark.flaky(reruns=1)) # a busy machine can be too slow; the summary counts it
        if why: item.add_marker(pytest.mark.skip(reason=why))


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]

def environment(tmp, threads="1"):
    "Folders of its own, so that nothing of the user's Jupyter is read or written."
    env = {k: v for k, v in os.environ.items() if k != "MPLBACKEND"}
    names = dict(JUPYTER_CONFIG_DIR="cfg", JUPYTER_DATA_DIR="data", JUPYTER_RUNTIME_DIR="run", IPYTHONDIR="ipy",
                 JUPYTERLAB_SETTINGS_DIR="set", JUPYTERLAB_WORKSPACES_DIR="ws")
    for name, value in SETTINGS.items():
        path = tmp/"set/@jupyterlab"/f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))
    if threads is None: env.pop("OMP_NUM_THREADS", None)      # as many as torch likes
    else: env["OMP_NUM_THREADS"] = threads
    return env | {k: str(tmp/v) for k, v in names.items()} | dict(PYTHONPATH=str(ROOT))

@contextmanager
def server(kind, folder, tmp, theme="JupyterLab Light", threads="1"):
    "A running server; yields the function that makes the address of a notebook."
    port, token, python = free_port(), secrets.token_hex(8), sys.executable
    env = environment(tmp, threads)
    themes = tmp/"set/@jupyterlab/apputils-extension/themes.jupyterlab-settings"
    themes.write_text(json.dumps({"theme": theme}))
    if kind == "lab":
        command = [python, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}",
                   "--ServerApp.port_retries=0", "--allow-root",
                   f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}",
                   "--LabApp.expose_app_in_browser=True"]
        def address(name): return f"http://127.0.0.1:{port}/lab/tree/{name}?token={token}&reset"
        up = f"http://127.0.0.1:{port}/api/status?token={token}"
        def stop_kernels():
            "End what notebooks have begun: their runs have no end, and would slow down whatever comes next."
            def ask(path, method):
                url, headers = f"http://127.0.0.1:{port}/api/kernels{path}", dict(Authorization=f"token {token}")
                with urllib.request.urlopen(urllib.request.Request(url, method=method, headers=headers)) as answer:
                    return answer.read()
            for kernel in json.loads(ask("", "GET")): ask(f"/{kernel['id']}", "DELETE")
        address.stop_kernels = stop_kernels
    else:
        command = [python, "-m", "voila", str(folder), "--no-browser", "--Voila.ip=127.0.0.1", f"--port={port}"]
        def address(name): return f"http://127.0.0.1:{port}/voila/render/{name}"
        up = f"http://127.0.0.1:{port}/voila/static/"
    with open(tmp/"server.log", "w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=folder)
    try:
        for _ in range(240):
            if process.poll() is not None: raise RuntimeError((tmp/"server.log").read_text())
            try:
                urllib.request.urlopen(up, timeout=2)
                break
            except urllib.error.HTTPError: break
            except OSError: time.sleep(.25)
        yield address
    finally:
        process.terminate()
        try: process.wait(15)
        except subprocess.TimeoutExpired: process.kill()


class Page:
    "A browser page that remembers its console errors."
    def __init__(self, page):
        self.page, self.errors = page, []
        page.set_default_timeout(60_000)
        page.on("console", lambda m: self.errors.append(f"{m.text} {m.location.get('url', '')}") if m.type == "error"
                else None)
        page.on("pageerror", lambda e: self.errors.append(e.stack or str(e)))

    def shot(self, name):
        SHOTS.mkdir(exist_ok=True)
        self.page.screenshot(path=SHOTS/f"{name}.png")

    def own_errors(self):
        "Without what Voila asks a content network for (Font Awesome) when there is no network."
        return [e for e in self.errors if "jsdelivr" not in e]

@contextmanager
def open_browser(tmp, size=(1280, 800)):
    from playwright.sync_api import sync_playwright
    with sync_playwright() as p:
        context = p.chromium.launch_persistent_context(str(tmp/"chrome"), executable_path=find_chromium(),
                                                       headless=True, args=FLAGS, viewport=dict(width=size[0],
                                                                                                height=size[1]))
        try: yield Page(context.pages[0])
        finally: context.close()
