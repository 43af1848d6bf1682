"""Learners who sign in to a hub that is started for real, and run a lab; `python tests/learners.py 8` times a class of eight, and fails if a cell does.

Each goes the way of a browser: the sign-in form, cookies, the kernels' websocket.
"""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import requests
import websocket

from labkit import build

ROOT = Path(__file__).parents[1]
LAB = "10_measure_launch_overhead"
LEARNS_ABOUT_ITSELF = """import json, os, shutil
print(json.dumps({"home": os.environ["HOME"], "python": shutil.which("python"), "gpu": os.environ.get("CUDA_VISIBLE_DEVICES"), "share": os.environ.get("LABKIT_GPU_SHARE")}))"""


@contextmanager
def served(folder, names, *options, paths=(), patience_s=60):
    """Run `labkit hub` for names in a folder, in recorded mode, and give (its address, its process); paths: more to import from."""
    (folder / "names.txt").write_text("\n".join(names))
    port = free_ports()
    env = {**os.environ, "LABKIT_MODE": "recorded", "PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT)))}
    root = ["--allow-root"] if os.geteuid() == 0 else []
    command = [sys.executable, "-m", "labkit", "hub", str(folder / "names.txt"), f"--folder={folder / 'class'}", f"--port={port}"]
    log, scheme = folder / "hub.log", "https" if "--ssl-key" in options else "http"
    with log.open("w") as out:
        hub = subprocess.Popen([*command, *root, *options], cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + patience_s
        while "JupyterHub is now running" not in log.read_text():
            assert hub.poll() is None and time.monotonic() < until, f"no hub:\n{log.read_text()}"
            time.sleep(0.1)
        yield f"{scheme}://127.0.0.1:{port}", psutil.Process(hub.pid)
    except BaseException:
        print(log.read_text()[-10_000:])
        raise
    finally:
        hub.terminate()
        hub.wait(30)


def free_ports():
    """Return a port that is free, and the two after it, too."""
    while True:
        with socket.socket() as one, socket.socket() as two, socket.socket() as three:
            try:
                one.bind(("127.0.0.1", 0))
                port = one.getsockname()[1]
                two.bind(("127.0.0.1", port + 1))
                three.bind(("127.0.0.1", port + 2))
                return port
            except (OSError, OverflowError):
                continue


class Learner:
    """Somebody with a browser's cookies, and what the sign-in page said."""

    def __init__(self, address, name, password):
        self.address, self.name, self.session = address, name, requests.Session()
        form = self.session.get(f"{address}/hub/login", timeout=60)
        xsrf = re.search(r'name="_xsrf" value="([^"]+)"', form.text)[1]
        self.page = self.session.post(f"{address}/hub/login", params={"next": "/hub/"}, timeout=120,
                                      data={"username": name, "password": password, "_xsrf": xsrf})
        self.signed_in = "/hub/login" not in self.page.url and self.page.ok

    def start(self, patience_s=300):
        """Ask for the server and wait until it answers."""
        until = time.monotonic() + patience_s
        while time.monotonic() < until:
            page = self.session.get(f"{self.address}/hub/spawn/{self.name}", timeout=120)
            if page.ok and urlpath(page.url).startswith(f"/user/{self.name}/"):
                return self
            time.sleep(0.5)
        raise AssertionError(f"{self.name} got no server: {page.status_code} {page.url}")

    def api(self, method, path, **more):
        """Call the API of the learner's server, as JupyterLab does, and return the response."""
        xsrf = [cookie.value for cookie in self.session.cookies if cookie.name == "_xsrf" and f"/user/{self.name}/" in cookie.path]
        return self.session.request(method, f"{self.address}/user/{self.name}/api/{path}", timeout=60,
                                    headers={"X-XSRFToken": xsrf[0] if xsrf else ""}, **more)

    def run(self, sources, folder="notebooks"):
        """Run code cells in the kernel of the learner's lab 10, which the first call starts, and return its id and what each cell put out, as [(kind, content), ...]."""
        made = self.api("POST", "sessions", json={"path": f"{folder}/{LAB}.ipynb", "name": "", "type": "notebook",
                                                  "kernel": {"name": "python3"}})
        assert made.status_code == 201, made.text
        kernel = made.json()["kernel"]["id"]
        cookies = "; ".join(f"{cookie.name}={cookie.value}" for cookie in self.session.cookies
                            if f"/user/{self.name}/".startswith(cookie.path))
        channel = websocket.create_connection(f"ws{self.address[4:]}/user/{self.name}/api/kernels/{kernel}/channels", cookie=cookies,
                                              origin=self.address, timeout=300)
        try:
            return kernel, [self._run(channel, source) for source in sources]
        finally:
            channel.close()

    def _run(self, channel, source):
        header = {"msg_id": uuid.uuid4().hex, "msg_type": "execute_request", "username": self.name, "session": "test", "version": "5.3"}
        channel.send(json.dumps({"header": header, "parent_header": {}, "metadata": {}, "channel": "shell", "buffers": [], "content": {
            "code": source, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}}))
        outputs = []
        while True:
            said = channel.recv()
            message = json.loads(said) if isinstance(said, str) else {}  # binary ones are widgets' pictures
            if message.get("parent_header", {}).get("msg_id") != header["msg_id"]:
                continue
            if message["msg_type"] in ("stream", "display_data", "execute_result", "error"):
                outputs.append((message["msg_type"], message["content"]))
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return outputs


def urlpath(url):
    return "/" + url.split("/", 3)[3]


def run_at_once(address, names, password):
    """Let learners sign in and run lab 10, and say where they are, at once -> [(learner, what each cell put out), ...]."""
    sources = [*build.code_cells(build.NOTEBOOKS / f"{LAB}.ipynb"), LEARNS_ABOUT_ITSELF]

    def all_the_way(name):
        learner = Learner(address, name, password).start()
        return learner, learner.run(sources)[1]

    with ThreadPoolExecutor(len(names)) as at_once:
        return list(at_once.map(all_the_way, names))


def errors(ran):
    """Return the messages of all cells that failed, of what run_at_once returns."""
    return [f"{content['ename']}: {content['evalue']}" for _, cells in ran for cell in cells for kind, content in cell if kind == "error"]


def mib(process):
    """Return the memory of the learners' servers and kernels that a hub started, in MiB; what they share counts once."""
    theirs = [child for child in process.children(recursive=True) if {"jupyterhub.singleuser", "ipykernel_launcher"} & set(child.cmdline())]
    return sum(child.memory_full_info().pss for child in theirs) / 2**20


if __name__ == "__main__":
    everybody = [f"learner-{i + 1}" for i in range(int(sys.argv[1]))]
    with tempfile.TemporaryDirectory() as made, served(Path(made), everybody) as (where, started):
        began = time.monotonic()
        ran = run_at_once(where, everybody, Path(made, "class/password.txt").read_text().strip())
        took_s, used = time.monotonic() - began, mib(started) / len(everybody)
    failed = errors(ran)
    print(f"{len(everybody)} learners signed in and ran lab {LAB[:2]} at once: {took_s:.1f} s, {len(failed)} errors, {used:.0f} MiB each")
    sys.exit("\n".join(failed) or 0)
