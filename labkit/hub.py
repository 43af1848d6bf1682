"""A class on one server: JupyterHub over one shared install, with a folder and a share of a GPU for each learner.

Everything of one class lies in one folder: hub.json (the settings), password.txt, the hub's database, and a home for
each learner. All of them run as the user who starts the hub: that keeps friendly people from tripping over each other,
and nobody from reading what the others wrote.
"""

import importlib.util
import ipaddress
import json
import os
import re
import secrets
import shlex
import shutil
import socket
import sys
import sysconfig
import venv
from pathlib import Path

import labkit
from labkit import install, machine

PROXY = "configurable-http-proxy"
CONFIG = Path(__file__).with_name("hub_config.py")
GIB_WANTED = 2  # what the labs want for each process


class HubError(Exception):
    """Why no hub is started, and what to do."""


def prepare(labs, learners, folder="class", *, ip="127.0.0.1", port=8000, ssl_key=None, ssl_cert=None, behind_proxy=False,
            idle=60, allow_root=False):
    """Check everything, write the class's folder and return its settings (as in hub.json); HubError says what is wrong.

    labs: the folder of the labs that learners get copies of. learners: a file with one name a line.
    port: the hub itself uses the next two as well, on this machine only. idle: minutes until a kernel, then its server, stops.
    """
    if not importlib.util.find_spec("jupyterhub"):
        raise HubError(f"JupyterHub is not installed: {sys.executable} -m pip install jupyterhub {PROXY}")
    if os.geteuid() == 0 and not allow_root:
        raise HubError("as root, what learners type runs as root: start the hub as another user "
                       "(or say --allow-root in a container that is thrown away)")
    _judge_address(ip, ssl_key, ssl_cert, behind_proxy)
    settings = {"names": read_names(learners), "labs": str(Path(labs).resolve()), "ip": ip, "port": port, "idle_s": int(60 * idle),
                "proxy": _proxy(bool(ssl_key)), "root": allow_root,
                "ssl": [str(Path(file).resolve()) for file in (ssl_key, ssl_cert) if file]}
    for number, host in ((port, ip), (port + 1, "127.0.0.1"), (port + 2, "127.0.0.1")):
        _judge_port(host, number)
    folder = Path(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    password(folder)
    (folder / "hub.json").write_text(json.dumps(settings, indent=1))
    return settings


def _judge_address(ip, ssl_key, ssl_cert, behind_proxy):
    """Refuse to send passwords over a network in plain text."""
    if bool(ssl_key) != bool(ssl_cert):
        raise HubError("--ssl-key and --ssl-cert go together")
    for file in filter(None, (ssl_key, ssl_cert)):
        if not os.access(file, os.R_OK):
            raise HubError(f"{file} cannot be read")
    try:
        here_only = ipaddress.ip_address(ip).is_loopback
    except ValueError:
        raise HubError(f"--ip wants an address of this machine, like 127.0.0.1 or 0.0.0.0, not {ip!r}") from None
    if not here_only and not ssl_key and not behind_proxy:
        raise HubError(f"on {ip} passwords would cross the network in plain text: give --ssl-key and --ssl-cert, or say "
                       "--behind-proxy if a proxy in front does TLS and this port is closed to everybody else")


def _judge_port(host, port):
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((host, port))
    except (OSError, OverflowError) as error:
        raise HubError(f"port {port} of {host} cannot be used ({error}): --port takes another, with the two after it") from None


def read_names(path):
    """Return the learners' names in a file, one a line; what follows # does not count. HubError for a file or a name that is none."""
    try:
        lines = [line.partition("#")[0].strip() for line in Path(path).read_text("utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise HubError(f"the list of learners cannot be read ({error}): write one name a line") from None
    names = [line for line in lines if line]
    for name in names:  # a name is a folder's name and part of an address
        if not re.fullmatch(r"[a-z][a-z0-9_-]{0,31}", name):
            raise HubError(f"{name!r} in {path} is no name to sign in with: small letters, digits, - and _, a letter first")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise HubError(f"{path} names {', '.join(twice)} twice")
    if not names:
        raise HubError(f"{path} holds no names: write one a line")
    return names


def password(folder):
    """Return the class's password: what password.txt says, which is made where there is none; HubError for one that is too short."""
    file = Path(folder, "password.txt")
    if not file.exists():
        file.touch(0o600)
        file.write_text(secrets.token_hex(6) + "\n")
    file.chmod(0o600)  # an editor may have made it
    said = file.read_text("utf-8-sig", errors="replace").strip()
    if len(said) < 8 or not said.isascii():  # JupyterHub compares no other letters
        raise HubError(f"the password in {file} is shorter than 8 characters, or has letters beyond ASCII: write another, "
                       "or delete the file for a new one")
    return said


def _proxy(tls):
    """Return the path of JupyterHub's proxy: node's if it is there, else the one in Python, which knows no TLS."""
    folders = [*os.environ.get("PATH", "").split(os.pathsep), Path(sys.executable).parent]
    found = [path for folder in folders if os.access(path := Path(folder, PROXY), os.X_OK)]
    nodes = [path for path in found if b"node" in path.open("rb").readline().rpartition(b"/")[2]]
    if not nodes and (tls or not found):
        raise HubError(f"{'TLS needs the proxy of node' if tls else 'JupyterHub needs its proxy'}: npm install -g {PROXY}"
                       + (", or let a proxy in front do TLS" if tls else f", or {sys.executable} -m pip install {PROXY}"))
    return str((nodes or found)[0])


def command(folder):
    """Enter a class's folder and return the arguments of Python that start its hub; HubError where one is running in it."""
    import fcntl  # where there is none, there is no JupyterHub either
    os.chdir(folder)
    lock = os.open("hub.lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise HubError(f"a hub is running in {folder}: stop it first, or name another --folder") from None
    os.set_inheritable(lock, True)  # held until the hub ends, however it does
    for name, first in (("PYTHONPATH", Path(labkit.__file__).parents[1]), ("PATH", Path(sys.executable).parent)):
        os.environ[name] = os.pathsep.join(filter(None, [str(first), os.environ.get(name)]))
    return ["-m", "jupyterhub", "-f", str(CONFIG)]


def copy_labs(labs, home):
    """Put the labs that a learner does not have yet into home/notebooks; what is there stays as it is."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    (home / "notebooks").mkdir(exist_ok=True)
    for lab in sorted(Path(labs).glob("*.ipynb")):
        if not (mine := home / "notebooks" / lab.name).exists():
            shutil.copyfile(lab, mine)


def own_python(home):
    """Give a learner home/env, a Python over this install: what they install stays there. Returns the {name: value} that select it.

    The server itself goes on without it, so nothing that a learner installs keeps it from starting. What is no environment, and
    lies where one is wanted, gets another name.
    """
    env = home / "env"
    try:
        _make_python(env)
    except (ValueError, FileExistsError, IsADirectoryError, NotADirectoryError):
        env.rename(home / f"env-{secrets.token_hex(4)}")
        _make_python(env)
    return {"PATH": os.pathsep.join([f"{env}/bin", os.environ["PATH"]]),
            "JUPYTER_PATH": os.pathsep.join(f"{prefix}/share/jupyter" for prefix in (env, sys.prefix))}


def _make_python(env):
    for old in env.glob("bin/python*"):
        if re.fullmatch(r"python[\d.]*", old.name):  # and none that a learner installed
            old.unlink()  # this hub's Python may be another than the last one's
    venv.create(env, symlinks=True)
    site = sysconfig.get_path("purelib", "venv", {"base": str(env)})
    install.link(Path(labkit.__file__).parents[1], *install.packages(), site=site)
    Path(site, "labkit-share.pth").write_text("import labkit.allowance; labkit.allowance.watch()\n")  # after labkit-base.pth
    for name in ("pip", "pip3"):
        (env / "bin" / name).write_text(f'#!/bin/sh\nexec {shlex.quote(f"{env}/bin/python")} -m pip "$@"\n')
        (env / "bin" / name).chmod(0o755)
    kernel = env / "share/jupyter/kernels/python3"
    kernel.mkdir(parents=True, exist_ok=True)
    (kernel / "kernel.json").write_text(json.dumps({
        "argv": [f"{env}/bin/python", "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "Python 3 (ipykernel)", "language": "python", "metadata": {"debugger": True}}))


def least_loaded(taken):
    """Return the GPU (its UUID) for the next learner: fewest in `taken`, a list of UUIDs, then least memory in use; None without any."""
    gpus = machine.gpus()
    return min(gpus, key=lambda uuid: (taken.count(uuid), gpus[uuid][0]), default=None)


def share(learners, gpus):
    """Return which share (0 to 1) of its GPU's memory each process may take: two a learner, as two labs, or a lab and its child.

    A tenth is left for what no limit of torch counts, the contexts; somebody alone has all.
    """
    each = -(-learners // max(gpus, 1))
    return 1.0 if each <= 1 else int(900 / (2 * each)) / 1000


def budget(learners):
    """Say in a line if labs run LIVE, and then how much of a GPU's memory each process gets."""
    here, gpus = machine.mode(), machine.gpus()
    if not here.live or not gpus:
        return f"The labs run {'LIVE' if here.live else 'RECORDED'}: {here.reason}. {here.fix}".rstrip()
    gib = share(learners, len(gpus)) * min(total for _, total in gpus.values()) / 2**30
    return (f"{learners} learners on {len(gpus)} GPU{'s' * (len(gpus) > 1)}: up to {gib:.1f} GiB for each process."
            + (f" The labs want {GIB_WANTED}: name fewer learners, or use more GPUs." if gib < GIB_WANTED else ""))
