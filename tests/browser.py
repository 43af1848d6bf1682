"""Drive an installed chromium over pages served by labkit itself, on copies, with settings of their own."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[1]
SCREENSHOTS = ROOT / "screenshots"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SETTINGS = {"notebook-extension/tracker": {"windowingMode": "none", "autoStartDefaultKernel": True},
            "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False}}
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking",
           "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]  # whatever asks another host does not reach it
# JupyterLab shows its idle badge before there is a session: wait for that, too.
RUN_ALL = """(async () => {
    const kernel = () => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel
    while (!kernel() || !jupyterapp.shell.currentWidget.sessionContext.isReady) await new Promise(go => setTimeout(go, 100))
    await jupyterapp.commands.execute("notebook:run-all-cells")
    window.labkitRan = true
})()"""
CELLS = "[...jupyterapp.shell.currentWidget.content.model.cells].map(cell => cell.toJSON())"


def missing():
    """Return what browser tests lack here and how to get it, or ""."""
    if not any(map(shutil.which, NAMES)):
        return f"no browser is here: install chromium, say by `apt install chromium` (none of {', '.join(NAMES)} was found)"
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed: `make test` with a network installs it"
    return ""


@contextmanager
def browser():
    """Start the installed chromium and give a context for pages."""
    from playwright.sync_api import sync_playwright
    with sync_playwright() as playwright:
        path = next(filter(None, map(shutil.which, NAMES)))
        chromium = playwright.chromium.launch(executable_path=path, args=OPTIONS)
        context = chromium.new_context(viewport={"width": 1280, "height": 1000})
        context.set_default_timeout(60_000)
        yield context
        chromium.close()


@contextmanager
def served(folder, *options):
    """Run `labkit lab` with options in a folder, in recorded mode, and give a function that waits for its address."""
    for name, settings in SETTINGS.items():
        file = folder / f"settings/@jupyterlab/{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings))
    own = {name: str(folder / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR",
                                                         "JUPYTERLAB_WORKSPACES_DIR", "IPYTHONDIR")}
    env = {**os.environ, **own, "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"), "LABKIT_MODE": "recorded",
           "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-m", "labkit", "lab", "--no-browser", f"--port={free_port()}", *options]
    log = folder / "server.log"
    with log.open("w") as out:
        server = subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield lambda: address(server, log)
    finally:
        server.terminate()
        server.wait(20)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def address(server, log, patience_s=40):
    """Return the address with its token that a server printed into its log; says what it printed instead."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until and server.poll() is None:
        if found := re.search(r"http://127\.0\.0\.1:\S+token=\w+", log.read_text()):
            return found[0]
        time.sleep(0.1)
    raise AssertionError(f"the server gave no address:\n{log.read_text()}")


class Visit:
    """A page being opened, with all that it asks for and all errors that nobody caught."""

    def __init__(self, context, url, name, script=""):
        self.name, self.errors, self.requests, self.sockets = name, [], [], []
        self.tab = context.new_page()
        self.tab.on("pageerror", lambda error: self.errors.append(str(error)))
        self.tab.on("request", lambda request: self.requests.append(request))
        self.tab.on("websocket", lambda socket: self.sockets.append(socket.url))
        self.tab.add_init_script(script)
        self.tab.goto(url, wait_until="commit")

    def outside(self):
        """Return what was asked of other hosts; what the page's own policy forbade never left the browser."""
        urls = self.sockets + [request.url for request in self.requests if request.failure != "csp"]
        return [url for url in urls if urlsplit(url).scheme not in ("data", "blob") and urlsplit(url).hostname != "127.0.0.1"]

    def __enter__(self):
        return self.tab

    def __exit__(self, *error):
        """Keep a screenshot, close the page, and complain of errors and of requests to other hosts."""
        SCREENSHOTS.mkdir(exist_ok=True)
        self.tab.screenshot(path=SCREENSHOTS / f"{self.name}.png")
        self.tab.close()
        assert self.requests and not self.outside(), f"{self.name} asked other hosts: {self.outside()}"
        assert not self.errors, f"errors on the page of {self.name}: {self.errors}"


class LabVisit(Visit):
    """A lab in JupyterLab, whose cells all run as soon as its kernel is there."""

    def __init__(self, context, url, path):
        place = url.split("/lab/")[0] + f"/lab/workspaces/{path.stem}/tree/notebooks/{path.name}?{urlsplit(url).query}"
        super().__init__(context, place, path.stem, RUN_ALL)

    def __enter__(self):
        """Wait for the last cell; all must have run, and none may have failed."""
        self.tab.wait_for_function("window.labkitRan")
        cells = [cell for cell in self.tab.evaluate(CELLS) if cell["cell_type"] == "code" and cell["source"]]
        unrun = [cell["id"] for cell in cells if not cell["execution_count"]]
        failed = [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]
        assert cells and not unrun and not failed, f"{self.name}: cells {unrun} did not run; errors: {failed}"
        return self.tab


def press(tab, slider, key):
    """Move a slider (a CSS class) by a key."""
    tab.locator(f".{slider} .noUi-handle").press(key)


def drag(tab, slider, to):
    """Drag the handle of a slider (a CSS class) to a place between 0, its left end, and 1."""
    handle, track = (tab.locator(f".{slider} .noUi-{part}") for part in ("handle", "base"))
    handle.scroll_into_view_if_needed()
    start, whole = handle.bounding_box(), track.bounding_box()
    x, y = start["x"] + start["width"] / 2, start["y"] + start["height"] / 2
    tab.mouse.move(x, y)
    tab.mouse.down()
    tab.mouse.move(whole["x"] + to * whole["width"], y, steps=5)
    tab.mouse.up()


def picture(tab, chart):
    """Return the picture that a chart (a CSS class) shows, as its address."""
    return tab.locator(f".{chart} img, img.{chart}").first.get_attribute("src")
