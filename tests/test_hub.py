"""A class on one server: what is refused, who gets which GPU, and eight learners who sign in for real."""

import importlib.util
import json
import os
import runpy
import shutil
import subprocess
import sys
import types
import zipfile
from importlib import metadata
from pathlib import Path

import jsonschema
import learners
import psutil
import pytest
import yaml

from labkit import __main__ as cli
from labkit import build, hub, machine, notebook

hub_needed = pytest.mark.skipif(not importlib.util.find_spec("jupyterhub"), reason="jupyterhub is not installed: make hub installs it")
NVML = '''"""Two GPUs that are not there, the second one in use."""
from types import SimpleNamespace

GPUS = {"GPU-one": (0, 80 << 30), "GPU-two": (9 << 30, 80 << 30)}

def nvmlInit(): ...
def nvmlDeviceGetCount(): return len(GPUS)
def nvmlDeviceGetHandleByIndex(i): return list(GPUS)[i]
def nvmlDeviceGetHandleByUUID(uuid): return uuid
def nvmlDeviceGetUUID(handle): return handle
def nvmlDeviceGetMemoryInfo(handle): return SimpleNamespace(used=GPUS[handle][0], total=GPUS[handle][1])
'''


@pytest.fixture
def two_gpus(fresh_machine):
    module = types.ModuleType("pynvml")
    exec(NVML, module.__dict__)
    fresh_machine.setitem(sys.modules, "pynvml", module)
    fresh_machine.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fresh_machine


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """A function that prepares a class of two with some options, on ports that are free, as a user who is not root."""
    (tmp_path / "names.txt").write_text("ada  # the first\n\nbob\n")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(hub, "_proxy", lambda tls: f"proxy, TLS {tls}")
    return lambda **options: hub.prepare(build.NOTEBOOKS, tmp_path / "names.txt", tmp_path / "class", **{"port": learners.free_ports(), **options})


def test_a_class_lies_in_a_folder_that_others_cannot_enter(plan, tmp_path):
    settings = plan()
    assert settings["names"] == ["ada", "bob"] and settings["ip"] == "127.0.0.1" and not settings["ssl"]
    assert json.loads((tmp_path / "class/hub.json").read_text()) == settings
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("class", "class/password.txt")] == [0o700, 0o600]
    before = hub.password(tmp_path / "class")
    plan()
    assert hub.password(tmp_path / "class") == before and len(before) == 12 and before not in json.dumps(settings)
    (tmp_path / "class/password.txt").unlink()
    (tmp_path / "class/password.txt").write_bytes("\ufeffof the class\r\n".encode())
    assert hub.password(tmp_path / "class") == "of the class" and (tmp_path / "class/password.txt").stat().st_mode & 0o777 == 0o600
    for refused in (b"short\n", "für die Klasse".encode(), "für die Klasse".encode("latin-1")):
        (tmp_path / "class/password.txt").write_bytes(refused)
        with pytest.raises(hub.HubError, match="shorter than 8 characters, or has letters beyond ASCII"):
            plan()


@pytest.mark.parametrize("ip, more, refused", [
    ("0.0.0.0", {}, "passwords would cross the network in plain text"), ("::", {}, "in plain text"), ("10.1.2.3", {}, "in plain text"),
    ("0.0.0.0", {"ssl_key": __file__}, "go together"), ("127.0.0.1", {"ssl_cert": __file__}, "go together"),
    ("0.0.0.0", {"ssl_key": "/no/key", "ssl_cert": __file__}, "/no/key cannot be read"),
    ("my.host", {"behind_proxy": True}, "wants an address of this machine")])
def test_no_password_leaves_this_machine_in_plain_text(plan, ip, more, refused):
    with pytest.raises(hub.HubError, match=refused):
        plan(ip=ip, **more)


def test_beyond_this_machine_with_tls_or_behind_a_proxy(plan):
    assert plan(ip="0.0.0.0", behind_proxy=True)["ip"] == "0.0.0.0"
    served = plan(ip="0.0.0.0", ssl_key=__file__, ssl_cert=__file__)
    assert served["ssl"] == [__file__] * 2 and served["proxy"] == "proxy, TLS True"


def test_root_and_a_missing_jupyterhub_and_a_busy_port_are_refused(plan, monkeypatch):
    with learners.socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(hub.HubError, match="port .* cannot be used"):
            plan(port=taken.getsockname()[1] - 1)  # the one after it is used, too
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(hub.HubError, match="as root, what learners type runs as root"):
        plan()
    assert plan(allow_root=True)["root"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(hub.HubError, match="JupyterHub is not installed: .* -m pip install jupyterhub"):
        plan()


@pytest.mark.parametrize("text, refused", [
    ("", "holds no names"), ("# nobody", "holds no names"), ("ada\nbob\nada", "names ada twice"), ("../../etc", "is no name to sign in with"),
    ("Ada", "small letters"), ("a b", "is no name"), (None, "cannot be read")])
def test_names_are_fit_for_folders_and_addresses(tmp_path, text, refused):
    path = tmp_path / "names.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises(hub.HubError, match=refused):
        hub.read_names(path)


def test_a_list_of_names_may_come_from_any_editor(tmp_path):
    names = [f"learner-{i}" for i in range(200)]
    (tmp_path / "names.txt").write_bytes(("\ufeff" + "\r\n".join(names)).encode())
    assert hub.read_names(tmp_path / "names.txt") == names
    with pytest.raises(hub.HubError, match="cannot be read"):
        hub.read_names(tmp_path)


def test_one_hub_for_a_folder_and_learners_get_this_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setenv("PYTHONPATH", "mine")
    held = []
    monkeypatch.setattr(os, "set_inheritable", lambda file, on: held.append(file))
    assert hub.command(tmp_path)[:2] == ["-m", "jupyterhub"]
    assert os.environ["PATH"] == f"{Path(sys.executable).parent}:/usr/bin" and os.environ["PYTHONPATH"] == f"{learners.ROOT}:mine"
    with pytest.raises(hub.HubError, match="a hub is running in .*: stop it first, or name another --folder"):
        hub.command(tmp_path)
    os.close(held[0])  # as when the hub ends
    hub.command(tmp_path)


@pytest.fixture
def configured(plan, tmp_path, monkeypatch):
    """A function that reads JupyterHub's configuration of a class that is prepared with some options."""
    from traitlets.config import Config

    def configure(**options):
        plan(**options)
        config = Config()
        monkeypatch.chdir(tmp_path / "class")
        runpy.run_path(str(hub.CONFIG), {"get_config": lambda: config})
        return config
    return configure


@hub_needed
@pytest.mark.parametrize("minutes", [60, 0.5])
def test_kernels_and_servers_that_nobody_uses_are_stopped(configured, minutes):
    args = dict(arg.lstrip("-").split("=", 1) for arg in configured(idle=minutes).Spawner.args if "=" in arg)
    assert args["MappingKernelManager.cull_idle_timeout"] == args["ServerApp.shutdown_no_activity_timeout"] == str(int(60 * minutes))
    assert args["MappingKernelManager.cull_interval"] == "60" and args["MappingKernelManager.cull_connected"] == "True"


@hub_needed
def test_learners_find_packages_where_whoever_starts_the_class_does(configured, monkeypatch):
    for name in ("PIP_INDEX_URL", "https_proxy", "PIP_TARGET", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "there")
    kept = configured().Spawner.env_keep
    assert {"PIP_INDEX_URL", "https_proxy", "LABKIT_TABLES"} <= set(kept) and not {"PIP_TARGET", "AWS_SECRET_ACCESS_KEY"} & set(kept)


@hub_needed
def test_who_is_no_longer_in_the_class_cannot_sign_in(configured):
    from jupyterhub.authenticators.shared import SharedPasswordAuthenticator
    before, config = configured(), configured()
    assert len(config.JupyterHub.cookie_secret) == 32 and config.JupyterHub.cookie_secret != before.JupyterHub.cookie_secret
    door = SharedPasswordAuthenticator(config=config)
    door.add_user(types.SimpleNamespace(name="left-last-year"))  # as JupyterHub does for all in its database
    assert door.allowed_users == {"ada", "bob"} and config.JupyterHub.upgrade_db


def test_the_refusal_is_one_line(tmp_path, capsys):
    assert cli.main(["hub", str(tmp_path / "none.txt"), "--allow-root", f"--folder={tmp_path / 'class'}"]) == 1
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "class").exists()


def test_tls_wants_the_proxy_of_node_which_is_taken_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "py" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "node"))
    with pytest.raises(hub.HubError, match="needs its proxy: npm install -g configurable-http-proxy, or .* -m pip install"):
        hub._proxy(False)
    for folder, first in (("py", "#!/home/node/bin/python"), ("node", "#!/usr/bin/env node")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / hub.PROXY).write_text(first + "\n")
        (tmp_path / folder / hub.PROXY).chmod(0o755)
        if folder == "py":
            assert hub._proxy(False) == str(tmp_path / "py" / hub.PROXY)
            with pytest.raises(hub.HubError, match="TLS needs the proxy of node"):
                hub._proxy(True)
    assert hub._proxy(False) == hub._proxy(True) == str(tmp_path / "node" / hub.PROXY)


def test_the_next_learner_gets_the_least_loaded_gpu(two_gpus):
    assert hub.least_loaded([]) == "GPU-one" == hub.least_loaded(["GPU-two"]) == hub.least_loaded(["GPU-one", "GPU-two", None])
    assert hub.least_loaded(["GPU-one"]) == "GPU-two"
    two_gpus.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert list(machine.gpus()) == ["GPU-two"] and hub.least_loaded(["GPU-two"] * 3) == "GPU-two"
    two_gpus.setenv("CUDA_VISIBLE_DEVICES", "GPU-tw, 0")
    assert list(machine.gpus()) == ["GPU-two", "GPU-one"]
    two_gpus.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.gpus() == {} and hub.least_loaded([]) is None


@pytest.mark.parametrize("learners_here, gpus, wanted", [(1, 1, 1.0), (2, 2, 1.0), (8, 1, 0.056), (8, 2, 0.112), (9, 2, 0.09), (30, 0, 0.015)])
def test_the_shares_of_all_learners_fit_on_a_gpu(learners_here, gpus, wanted):
    assert hub.share(learners_here, gpus) == wanted
    assert wanted == 1.0 or 2 * wanted * -(-learners_here // max(gpus, 1)) <= 0.9


def test_what_learners_will_see_and_a_share_that_is_too_small_are_said_beforehand(two_gpus):
    two_gpus.setattr(machine, "mode", lambda: machine.Mode(True, "a GPU"))
    assert hub.budget(8) == "8 learners on 2 GPUs: up to 9.0 GiB for each process."
    assert "up to 0.9 GiB for each process. The labs want 2: name fewer learners" in hub.budget(80)
    two_gpus.setattr(machine, "mode", lambda: machine.Mode(False, "LABKIT_MODE=recorded is set", "Unset it."))
    assert hub.budget(8) == "The labs run RECORDED: LABKIT_MODE=recorded is set. Unset it."


def test_copies_of_labs_never_overwrite_what_a_learner_wrote(tmp_path):
    hub.copy_labs(build.NOTEBOOKS, tmp_path / "ada")
    names = sorted(path.name for path in build.NOTEBOOKS.glob("*.ipynb"))
    assert sorted(os.listdir(tmp_path / "ada/notebooks")) == names and "solutions" not in names
    mine = tmp_path / "ada/notebooks" / names[0]
    mine.write_text("mine")
    (tmp_path / "ada/notebooks" / names[1]).unlink()
    hub.copy_labs(build.NOTEBOOKS, tmp_path / "ada")
    assert mine.read_text() == "mine" and (tmp_path / "ada/notebooks" / names[1]).exists()


@pytest.mark.parametrize("share, limits", [("0.25", [0.25]), ("1", []), (None, []), ("a quarter", [])])
def test_a_live_lab_keeps_to_its_share_of_the_memory(share, limits, monkeypatch):
    import torch
    monkeypatch.delenv("LABKIT_GPU_SHARE", raising=False)
    if share:
        monkeypatch.setenv("LABKIT_GPU_SHARE", share)
    monkeypatch.setattr(machine, "mode", lambda: machine.Mode(True, "pretended"))
    kept = []
    monkeypatch.setattr(torch.cuda, "_lazy_call", lambda call: call())  # as where CUDA has started
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", kept.append)
    notebook.banner()
    assert kept == limits
    assert ("give a share" in machine.wrong_settings()) == (share == "a quarter")


@pytest.fixture(scope="module")
def the_class(tmp_path_factory):
    """Eight learners who have signed in and run lab 10 at once: (the class's folder, address, hub's process, what came of each)."""
    folder = tmp_path_factory.mktemp("hub")
    (folder / "fake").mkdir()
    (folder / "fake" / "pynvml.py").write_text(NVML)
    (folder / "class/learners/learner-1").mkdir(parents=True)
    (folder / "class/learners/learner-1/json.py").write_text("raise SystemExit('a file of a learner')")
    names = [f"learner-{i + 1}" for i in range(8)]
    with learners.served(folder, names, paths=[folder / "fake"]) as (address, process):
        ran = learners.run_at_once(address, names, (folder / "class/password.txt").read_text().strip())
        yield folder / "class", address, process, ran
        family = process.children(recursive=True)
    assert not [member for member in family if member.is_running() and member.status() != psutil.STATUS_ZOMBIE]


@hub_needed
def test_eight_learners_sign_in_and_run_lab_10_at_once_each_in_a_place_of_their_own(the_class):
    folder, _, _, ran = the_class
    assert not learners.errors(ran)
    for _, cells in ran:
        said = json.dumps(cells)
        assert "RECORDED on NVIDIA" in said and "not attempted: saving_ms" in said and "image/png" in said
    places = [json.loads(cells[-1][0][1]["text"]) for _, cells in ran]
    homes = [folder / "learners" / learner.name for learner, _ in ran]
    assert len(set(homes)) == 8 and [Path(place["home"]) for place in places] == homes
    assert [Path(place["python"]) for place in places] == [home / "env/bin/python" for home in homes]
    assert sorted(place["gpu"] for place in places) == ["GPU-one"] * 4 + ["GPU-two"] * 4
    assert {place["share"] for place in places} == {"0.112"}  # four learners on each GPU, two processes for each


@hub_needed
def test_learners_keep_to_themselves_and_strangers_stay_outside(the_class):
    folder, address, process, [(one, _), (two, _), *_] = the_class
    assert not learners.Learner(address, "learner-1", "not the password").signed_in
    assert not learners.Learner(address, "a-stranger", (folder / "password.txt").read_text().strip()).signed_in
    family = process.children(recursive=True)
    everywhere = [one.laddr.ip for member in (process, *family) for one in member.net_connections("inet") if one.status == "LISTEN"]
    assert len(everywhere) > 5 and set(everywhere) == {"127.0.0.1"}
    assert one.api("GET", "contents/notebooks").ok
    one.name, mine = two.name, one.name  # with the cookies of one, ask for what is the other's
    try:
        assert one.api("GET", "contents/notebooks").status_code == 403
    finally:
        one.name = mine
    assert learners.requests.get(f"{address}/user/{mine}/api/contents").status_code == 403


def wheel(folder, name, version):
    """Write a wheel of a package that is one file, with its version in it, and return its path."""
    path, about = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    files = {f"{name}.py": f"__version__ = {version!r}\n", f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
             f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    with zipfile.ZipFile(path, "w") as made:
        for file, text in (files | {f"{about}/RECORD": "".join(f"{file},,\n" for file in files)}).items():
            made.writestr(file, text)
    return path


@hub_needed
def test_what_a_learner_installs_is_theirs_alone(the_class, tmp_path):
    _, _, _, [(one, _), (two, _), *_] = the_class
    shared = Path(learners.requests.__file__).parents[1]  # the install of all
    before = sorted(os.listdir(shared))
    mine, newer = wheel(tmp_path, "of_one_learner", "1.0"), wheel(tmp_path, "jsonpointer", "999.0")  # the second is in the install of all
    has = "import jsonpointer, labkit; print(jsonpointer.__version__, labkit.__file__)"
    installed = one.run([f"%pip install --no-index {mine}", f"!pip install --no-index {newer}", "import of_one_learner", has,
                         "!pip uninstall --yes jsonpointer attrs"])[1]
    assert not learners.errors([(one, installed[2:4])]), installed
    assert installed[3][0][1]["text"].split() == ["999.0", notebook.__file__.replace("notebook", "__init__")]
    assert "outside environment" in json.dumps(installed[4])  # attrs stays: it is everybody's
    other, after = (learner.run(["import of_one_learner", f'!python -c "{has}"'])[1] for learner in (two, one))
    assert learners.errors([(two, other)]) == ["ModuleNotFoundError: No module named 'of_one_learner'"]
    assert other[1] == after[1] and other[1][0][1]["text"].split()[0] == metadata.version("jsonpointer")
    assert sorted(os.listdir(shared)) == before


def own_python(home, code, **env):
    """Run code in the Python that a learner gets, and return what it prints."""
    hub.own_python(home)
    done = subprocess.run([home / "env/bin/python", "-c", code], env={**os.environ, **env}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def test_a_learners_python_is_made_anew_and_keeps_what_they_installed(tmp_path):
    hub.own_python(tmp_path)
    (tmp_path / "env/bin/python").unlink()
    (tmp_path / "env/bin/python").symlink_to("/the/python/of/last/year")
    Path(next(tmp_path.glob("env/lib/*/site-packages")), "mine.py").touch()
    assert own_python(tmp_path, "import labkit, mine; print(labkit.__file__)").split() == [notebook.__file__.replace("notebook", "__init__")]


def test_a_learners_pip_works_whatever_the_folder_is_called_and_what_it_puts_there_stays(tmp_path):
    home = tmp_path / "a $HOME's \"q\" `x`"
    hub.own_python(home)
    (tool := home / "env/bin/python-tool").touch()
    hub.own_python(home)
    said = subprocess.run([home / "env/bin/pip", "--version"], capture_output=True, text=True)
    assert said.stdout.startswith("pip ") and tool.exists()


@pytest.mark.parametrize("place, make", [("env", Path.touch), ("env", lambda path: path.symlink_to("nowhere")), ("env/bin/python", Path.mkdir),
                                         ("env/share", Path.touch), ("env/bin", Path.touch)])
def test_what_lies_where_a_learners_python_is_wanted_gets_another_name(tmp_path, place, make):
    (path := tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    make(path)
    assert own_python(tmp_path, "print(1)") == "1\n"
    [kept] = tmp_path.glob("env-*")
    assert os.path.lexists(kept / Path(place).relative_to("env"))


def test_a_learners_own_torch_is_imported_as_it_is(tmp_path):
    (tmp_path / "torch.py").write_text("mine = 1")
    assert own_python(tmp_path / "ada", "import torch; print(torch.mine)", LABKIT_GPU_SHARE="0.25", PYTHONPATH=str(tmp_path)) == "1\n"


@pytest.mark.parametrize("share, limits", [("0.25", "[0.25]"), ("1", "[]"), ("a quarter", "[]")])
def test_torch_keeps_to_the_share_without_a_banner_too(tmp_path, share, limits):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("from torch import cuda")
    (tmp_path / "torch/cuda.py").write_text(
        "limits, started = [], []\n_lazy_call, set_per_process_memory_fraction = started.append, limits.append\n"
        "def init():\n    for call in started: call()")
    code = ("import importlib.util, sys; importlib.util.find_spec('torch'); assert 'torch' not in sys.modules\n"
            "import torch; assert not torch.cuda.limits; torch.cuda.init(); print(torch.cuda.limits)")
    assert own_python(tmp_path / "ada", code, LABKIT_GPU_SHARE=share, PYTHONPATH=str(tmp_path)).strip() == limits


def tls_lacks():
    """Return what is missing here to serve over TLS, or None."""
    try:
        hub._proxy(tls=True)
    except hub.HubError as error:
        return str(error)
    return None if shutil.which("openssl") else "openssl, which makes the certificate, is not installed"


@hub_needed
@pytest.mark.skipif(bool(tls_lacks()), reason=str(tls_lacks()))
def test_over_tls_a_learner_signs_in_and_nothing_goes_in_plain_text(tmp_path, monkeypatch):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=class", "-addext",
                    "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate], check=True, capture_output=True)
    with learners.served(tmp_path, ["ada"], "--ssl-key", str(key), "--ssl-cert", str(certificate)) as (address, _):
        with pytest.raises(learners.requests.exceptions.SSLError):
            learners.requests.get(address)  # signed by nobody that it knows
        for name in ("REQUESTS_CA_BUNDLE", "WEBSOCKET_CLIENT_CA_BUNDLE"):
            monkeypatch.setenv(name, str(certificate))
        ada = learners.Learner(address, "ada", (tmp_path / "class/password.txt").read_text().strip())
        assert ada.signed_in and {cookie.secure for cookie in ada.session.cookies if cookie.name.startswith("jupyterhub-")} == {True}
        assert ada.start().run(["print(6 * 7)"])[1][0][0][1]["text"] == "42\n"
        with pytest.raises(learners.requests.exceptions.ConnectionError):
            learners.requests.get(address.replace("https", "http") + "/hub/login")


NUMBER, TEXT, SWITCH, LIST = {"type": "number"}, {"type": "string"}, {"type": "boolean"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}
GPU = {"type": "object", "patternProperties": {r"^nvidia\.com/": {"const": "1"}}, "additionalProperties": False, "minProperties": 1}


def closed(**properties):
    """Return a schema of an object that has all of these properties, and no others."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


# What the chart's values.schema.yaml says of the values that we set, and what we want of them; helm checks the whole.
VALUES = closed(
    hub=closed(config=closed(JupyterHub=closed(authenticator_class={"const": "shared-password"}), Authenticator=closed(allowed_users=LIST, allow_existing_users={"const": False}))),
    proxy=closed(https=closed(enabled={"const": True}, hosts=LIST, letsencrypt=closed(contactEmail=TEXT))),
    singleuser=closed(image=closed(name=TEXT, tag=TEXT), defaultUrl=TEXT, lifecycleHooks=closed(postStart={"type": "object"}),
                      extraResource=closed(guarantees=GPU, limits=GPU), cpu=closed(guarantee=NUMBER, limit=NUMBER),
                      memory=closed(guarantee=TEXT, limit=TEXT), storage=closed(capacity=TEXT), startTimeout={"type": "integer"}),
    cull=closed(enabled={"const": True}, timeout={"type": "integer"}, every={"type": "integer"}), prePuller=closed(hook=closed(enabled=SWITCH)))


def test_the_values_for_a_cluster_are_the_charts_and_ask_for_a_gpu_tls_and_sign_in(tmp_path):
    values = yaml.safe_load(Path(hub.__file__).with_name("hub_values.yaml").read_text("utf-8"))
    jsonschema.validate(values, VALUES)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values | {"singleUser": {}}, VALUES)
    assert (build.NOTEBOOKS / Path(values["singleuser"]["defaultUrl"]).name).exists()
    python, _, code = values["singleuser"]["lifecycleHooks"]["postStart"]["exec"]["command"]
    there = code.replace("/srv/labs/notebooks", str(build.NOTEBOOKS))
    subprocess.run([sys.executable, "-c", there], check=True, env={**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(learners.ROOT)})
    assert python == "python" and len(list((tmp_path / "notebooks").glob("*.ipynb"))) == len(build.solutions())
