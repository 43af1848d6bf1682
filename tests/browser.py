"""Drive an installed chromium over pages served by labkit itself, on copies, with settings of their own."""

import importlib.util
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

import pytest

ROOT = Path(__file__).parents[1]
SCREENSHOTS = ROOT / "screenshots"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SETTINGS = {"notebook-extension/tracker": {"windowingMode": "none", "autoStartDefaultKernel": True},
            "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False}}
SPARED = {"ServerApp": {"jpserver_extensions": {"jupyter_lsp": False, "jupyter_server_terminals": False}}}  # for speed
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking",
           "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]  # whatever asks another host does not reach it
# JupyterLab shows its idle badge before there is a session: wait for that, too.
RUN_ALL = """async path => {
    const until = async ready => { while (!ready()) await new Promise(go => setTimeout(go, 50)) }
    const ready = lab => lab?.sessionContext?.isReady && lab.sessionContext.session?.kernel
    await until(() => window.jupyterapp)
    await jupyterapp.restored
    window.lab = await jupyterapp.commands.execute("docmanager:open", {path})
    await until(() => ready(lab) && jupyterapp.shell.currentWidget == lab)
    await jupyterapp.commands.execute("notebook:run-all-cells")
    window.ran = path
}"""
# What cannot be read from the back row: text, also of 9 points in pictures, under a 45th of the screen's height; what is cut off.
UNREADABLE = """() => {
    const found = [], least = innerHeight / 45, texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
    const seen = e => e.checkVisibility() && !e.closest("style, script, details:not([open]) > :not(summary)")
    while (texts.nextNode()) {
        const {data, parentElement: e} = texts.currentNode
        if (data.trim() && seen(e) && parseFloat(getComputedStyle(e).fontSize) < least) found.push(["small", data])
    }
    for (const img of document.images)
        if (seen(img) && img.width / (parseFloat(img.style.width || 770) / 110) * 9 / 72 < least) found.push(["small", img.alt])
    for (const e of document.querySelectorAll("html, .jp-Cell *"))
        if (e.scrollWidth > e.clientWidth + 1 && e.clientWidth && seen(e) && getComputedStyle(e).overflowX != "visible"
            || e.tagName == "HTML" && e.scrollWidth > innerWidth) found.push(["wide", e.className, e.innerText])
    return found
}"""
FOCUSED = """([first, until]) => {
    const e = document.activeElement, {outlineStyle, outlineWidth} = getComputedStyle(e)
    if (first) window.firstStop = e
    return e == document.body || e.matches(until) || e == firstStop && !first ? null : outlineStyle == "solid" && parseFloat(outlineWidth) >= 2
}"""
CELLS = "[...lab.content.model.cells].map(cell => cell.toJSON())"


def need():
    """Skip the test that asks, and say why, where there is no browser to drive; with LABKIT_BROWSER=required, fail it."""
    if not any(map(shutil.which, NAMES)):
        why = f"there is no chromium here (`apt install chromium` or the like gets one; looked for {', '.join(NAMES)})"
    elif not importlib.util.find_spec("playwright"):
        why = "playwright is not installed (`make test` with a network installs it)"
    else:
        return
    if os.environ.get("LABKIT_BROWSER") == "required":
        pytest.fail(f"LABKIT_BROWSER=required, but {why}", pytrace=False)
    pytest.skip(f"browser tests were skipped: {why}")


@contextmanager
def browser():
    """Start the installed chromium and give a context for pages."""
    from playwright.sync_api import expect, sync_playwright
    expect.set_options(timeout=30_000)
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
    (folder / "jupyter_config_dir").mkdir()
    (folder / "jupyter_config_dir/jupyter_server_config.json").write_text(json.dumps(SPARED))
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


class Tab:
    """A tab of the browser, with all that it asks for and all errors that nobody caught."""

    def __init__(self, context, url):
        self.page, self.errors, self.requests, self.sockets = context.new_page(), [], [], []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request))
        self.page.on("websocket", lambda socket: self.sockets.append(socket.url))
        self.page.goto(url, wait_until="commit")

    def outside(self):
        """Return what was asked of other hosts; what the page's own policy forbade never left the browser."""
        urls = self.sockets + [request.url for request in self.requests if request.failure != "csp"]
        return [url for url in urls if urlsplit(url).scheme not in ("data", "blob") and urlsplit(url).hostname != "127.0.0.1"]

    @contextmanager
    def watched(self, name):
        """Keep a screenshot of what is done here; complain of errors on the page and of requests to other hosts."""
        SCREENSHOTS.mkdir(exist_ok=True)
        try:
            yield self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden), body[data-voila]")  # the lab in front, or the app
        finally:
            self.page.screenshot(path=SCREENSHOTS / f"{name}.png")
        assert self.requests and not self.outside(), f"{name} asked other hosts: {self.outside()}"
        assert not self.errors, f"errors on the page of {name}: {self.errors}"

    @contextmanager
    def lab(self, name):
        """Open a lab in JupyterLab, wait until its last cell has run, and give it; none of them may fail."""
        path = f"notebooks/{name}.ipynb"
        with self.watched(name) as lab:
            self.page.evaluate(f"path => void ({RUN_ALL})(path)", path)
            self.page.wait_for_function("path => window.ran == path", arg=path)
            cells = [cell for cell in self.page.evaluate(CELLS) if cell["cell_type"] == "code" and cell["source"]]
            unrun = [cell["id"] for cell in cells if not cell["execution_count"]]
            failed = [output["evalue"] for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]
            assert cells and not unrun and not failed, f"{name}: cells {unrun} did not run; errors: {failed}"
            yield lab


def press(lab, slider, key):
    """Move a slider (a CSS class) by a key."""
    lab.locator(f".{slider} .noUi-handle").press(key)


def unreadable(page, patience_s=5):
    """Return what cannot be read on a page, once its layout has come to rest."""
    until = time.monotonic() + patience_s
    while (found := page.evaluate(UNREADABLE)) and time.monotonic() < until:
        page.wait_for_timeout(100)
    return found


def tab_through(page, until="nothing", key="Tab", most=200):
    """Press Tab until the focus leaves the page or reaches a selector; return [role, name] of each stop: all must have a name and a ring."""
    ask, stops = page.context.new_cdp_session(page), []
    for _ in range(most):
        page.keyboard.press(key)
        ringed = page.evaluate(FOCUSED, [not stops, until])
        if ringed is None:
            return stops
        node = ask.send("Runtime.evaluate", {"expression": "document.activeElement"})["result"]["objectId"]
        told = ask.send("Accessibility.getPartialAXTree", {"objectId": node, "fetchRelatives": False})["nodes"][0]
        stops.append([told["role"]["value"], told.get("name", {}).get("value", "")])
        assert ringed and stops[-1][1], f"{stops[-1]} has no name, or no focus to be seen, after {stops[:-1]}"
    raise AssertionError(f"no way out by {key}: {stops}")


def drag(lab, slider, to):
    """Drag the handle of a slider (a CSS class) to a place between 0, its left end, and 1."""
    handle, track = (lab.locator(f".{slider} .noUi-{part}") for part in ("handle", "base"))
    mouse = lab.page.mouse
    handle.scroll_into_view_if_needed()
    start, whole = handle.bounding_box(), track.bounding_box()
    x, y = start["x"] + start["width"] / 2, start["y"] + start["height"] / 2
    mouse.move(x, y)
    mouse.down()
    mouse.move(whole["x"] + to * whole["width"], y, steps=5)
    mouse.up()
