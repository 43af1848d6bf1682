"""Set up .venv for the labs: `python3 -m labkit.install [--extra test|hub]`, with nothing but Python itself.

A python3 whose torch sees a GPU keeps that torch: .venv then reads that Python's packages after its own.
Where pip cannot install (no network), .venv reads what that Python has, and what is missing is named.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "labkit-install.json"


def say(text):
    """Print a line of our own among pip's."""
    print(f"labkit: {text}", flush=True)


def ask(python, code):
    """Return what a Python program prints, read as JSON, or None where it fails or needs over two minutes."""
    try:
        run = subprocess.run([python, "-c", "import json\n" + code], capture_output=True, text=True, timeout=120)
        return json.loads(run.stdout) if run.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def version(package):
    """Return a package's installed version without importing it, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def needs(*extras):
    """Return what pyproject.toml asks for, as lines."""
    import tomllib  # new in Python 3.11, and main() answers older ones
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return sum((project["optional-dependencies"][extra] for extra in extras), project["dependencies"])


def torch_to_keep():
    """Return the version of this Python's torch if it sees a GPU and is new enough, else None."""
    found = version("torch")
    if not found or not ask(sys.executable, "import torch; print(json.dumps(torch.cuda.is_available()))"):
        return None
    if [int(part) for part in re.findall(r"\d+", found)[:2]] < [2, 8]:
        return say(f"torch {found} of {sys.executable} sees a GPU but is older than 2.8: installing a newer one.")
    say(f"keeping torch {found} of {sys.executable}: it sees a GPU.")
    return found


def make_venv():
    """Make .venv unless it works with this very Python already; what could not be made whole is taken away, and SystemExit says why."""
    if ask(PYTHON, "import sys, pip; print(json.dumps(sys.version))") == sys.version:
        return
    if VENV.exists() and not (VENV / "pyvenv.cfg").exists():
        sys.exit(f"labkit: {VENV} is not a Python environment: move it away, then run this again.")
    say(f"making .venv with Python {sys.version.split()[0]} ...")
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True, text=True,
                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except (subprocess.CalledProcessError, KeyboardInterrupt) as error:
        shutil.rmtree(VENV, ignore_errors=True)
        if isinstance(error, KeyboardInterrupt):
            raise
        why = "apt install python3-venv" if "ensurepip" in error.stdout else error.stdout.strip().splitlines()[-1]
        sys.exit(f"labkit: .venv could not be made: {why}")


def packages():
    """Return the folders that this Python reads packages from, in its order."""
    return [folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")]


def link(*folders, site=None):
    """Let .venv's Python, or the one whose packages lie in site, read packages in these folders after its own; none: only its own."""
    site = site or ask(PYTHON, "import sysconfig; print(json.dumps(sysconfig.get_path('purelib')))")
    lines = [f"import site; site.addsitedir({str(folder)!r})\n" for folder in folders]
    Path(site, "labkit-base.pth").write_text("".join(lines))


def constraints(kept):
    """Write the pins to install by and return their file; beside a kept torch, what that torch asks for is left to it."""
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    if kept:
        asked = [re.match(r"[\w.-]+", need).group() for need in importlib.metadata.requires("torch") or ()]
        free = {"torch", *(name.lower().replace("_", "-") for name in asked)}
        pins = [pin for pin in pins if pin.split("==")[0] not in free] + [f"torch=={kept}"]
    (VENV / "labkit-constraints.txt").write_text("\n".join(pins) + "\n")
    return VENV / "labkit-constraints.txt"


def install(extras):
    """Install into .venv, or fall back to what is there; return whether everything was installed."""
    kept = torch_to_keep()
    make_venv()
    base = packages()
    link(*base if kept else ())
    say("installing what the labs need; the first time takes minutes" + ("." if kept else ", and 1.5 GB or more."))
    target = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    # Some GPU containers pin their own versions in PIP_CONSTRAINT: those are not for .venv.
    env = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"} | {"PIP_RETRIES": "2"}
    pip = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "-c", constraints(kept)]
    # The pip that comes with some Pythons is too old to find its way through the pins: renew it first.
    steps = (["-q", "pip", "setuptools>=77"], ["--no-build-isolation", "-e", target])
    if all(subprocess.run(pip + step, env=env).returncode == 0 for step in steps):
        return True
    link(ROOT, *base)
    have = ask(PYTHON, "from importlib.metadata import distributions\n"
                       "print(json.dumps([d.name.lower().replace('_', '-') for d in distributions()]))")
    names = [re.match(r"[\w.-]+", need).group() for need in needs(*extras) if f"!= '{sys.platform}'" not in need]
    lacking = ", ".join(name for name in names if name not in have) or "nothing"
    say("pip could not install everything (its ERROR above says why; most often there is no network): going on with "
        f"what is there. Missing: {lacking}. With a network, run this again.")
    return False


def main():
    """Bring .venv up to date; a Python that is too old, or bad luck, gets one line and a non-zero exit."""
    if sys.version_info < (3, 11):
        sys.exit(f"labkit: Python 3.11 or newer is needed, and {sys.executable} is {sys.version.split()[0]}. "
                 "Try: make lab PYTHON=path/to/a/newer/python3")
    parser = argparse.ArgumentParser(prog="python3 -m labkit.install", description=__doc__.splitlines()[0])
    parser.add_argument("--extra", action="append", default=[], choices=["test", "hub"])
    extras = set(parser.parse_args().extra)
    stamp = json.loads(STAMP.read_text()) if STAMP.exists() and PYTHON.exists() else {}
    base = stamp.get("base", sys.executable)
    if base != sys.executable and Path(base).exists():  # .venv stays with the Python that it was made with
        os.execv(base, [base, "-m", "labkit.install", *sys.argv[1:]])
    files = b"".join((ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))
    key = hashlib.sha256(files + f"{ROOT} {sys.version} {version('torch')}".encode()).hexdigest()
    wanted = {"key": key, "base": sys.executable, "extras": sorted(extras | set(stamp.get("extras", ())))}
    if stamp == wanted:
        say(f".venv is up to date (made with {base}; remove .venv to start over).")
    elif install(wanted["extras"]):
        STAMP.write_text(json.dumps(wanted))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        say("interrupted. Run it again: it goes on from here.")
        sys.exit(130)
    except OSError as error:
        sys.exit(f"labkit: {error}. Is this folder yours to write, and is there room on the disk?")
