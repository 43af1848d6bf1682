"""machine.py on machines that are pretended here: drivers, torch builds and homes of every kind."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from labkit import machine

ROOT = Path(__file__).parents[1]


def fake_torch(cuda="13.0", hip=None, arches=("sm_75", "sm_90", "compute_120"), capability=(9, 0), error=None):
    """Stand in for torch as mode() sees it."""
    def init():
        if error:
            raise error
    gpu = SimpleNamespace(init=init, get_device_name=lambda: "NVIDIA Test", get_device_capability=lambda: capability,
                          get_arch_list=lambda: list(arches))
    return SimpleNamespace(__version__="2.11.0+test", version=SimpleNamespace(cuda=cuda, hip=hip), cuda=gpu)


@pytest.fixture
def pretend(fresh_machine):
    """Return a function that pretends an NVIDIA driver (CUDA version as NVML gives it) and a torch."""
    def pretend(torch, driver_cuda=13000):
        nvml = SimpleNamespace(nvmlSystemGetCudaDriverVersion=lambda: driver_cuda,
                               nvmlSystemGetDriverVersion=lambda: "580.1")
        fresh_machine.setattr(machine, "_nvml", lambda: nvml)
        fresh_machine.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        fresh_machine.delenv("LABKIT_MODE", raising=False)
        fresh_machine.setitem(sys.modules, "torch", torch)
        machine.mode.cache_clear()
        return machine.mode()
    pretend.env = fresh_machine.setenv
    return pretend


def test_a_good_driver_and_torch_are_live(pretend):
    mode = pretend(fake_torch())
    assert mode.live and not mode.broken
    assert mode.reason == "NVIDIA Test, driver 580.1, torch 2.11.0+test"


@pytest.mark.parametrize("torch, driver_cuda, reason, fix, broken", [
    (fake_torch(cuda=None), 13000, "is a CPU build", "pip install --force-reinstall torch", False),
    (fake_torch(cuda=None, hip="6.4"), 13000, "ROCm build", "CUDA build", False),
    (fake_torch(error=RuntimeError("too old")), 12040,
     "supports CUDA 12.4, too old for torch 2.11.0+test (CUDA 13.0)", "Update the NVIDIA driver", True),
    (fake_torch(error=RuntimeError("system not yet initialized\nmore")), 13000,
     "CUDA does not start: system not yet initialized", "nvidia-smi", True),
    (fake_torch(capability=(6, 1)), 13000, "not built for NVIDIA Test (compute capability 6.1)", "sm_75", True),
    (None, 13000, "torch", "pip install", None),
])
def test_what_cannot_work_says_why_and_what_to_do(pretend, torch, driver_cuda, reason, fix, broken):
    mode = pretend(torch, driver_cuda)
    assert not mode.live
    assert reason in mode.reason and fix in mode.fix
    assert broken is None or mode.broken == broken


def test_a_missing_torch_beside_a_driver(pretend, monkeypatch):
    monkeypatch.setattr(machine, "version", lambda package: None)
    assert pretend(None) == machine.Mode(False, "an NVIDIA driver is here, but torch is not installed",
                                         "pip install torch")


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_hidden_gpu_is_named(pretend, hidden):
    pretend(fake_torch())
    pretend.env("CUDA_VISIBLE_DEVICES", hidden)
    machine.mode.cache_clear()
    assert "CUDA_VISIBLE_DEVICES" in machine.mode().reason and "Unset" in machine.mode().fix


def test_recorded_can_be_forced(pretend):
    assert pretend(fake_torch()).live
    pretend.env("LABKIT_MODE", "recorded")
    machine.mode.cache_clear()
    assert not machine.mode().live and "LABKIT_MODE" in machine.mode().reason


@pytest.mark.parametrize("arches, capability, runs", [
    (["sm_80"], (8, 9), True), (["sm_90"], (8, 9), False), (["sm_80"], (9, 0), False),
    (["compute_80"], (12, 0), True), (["sm_90a"], (9, 0), True), (["sm_100"], (10, 3), True), ([], (9, 0), False)])
def test_which_builds_run_on_which_gpus(arches, capability, runs):
    assert machine._built_for(capability, arches) is runs


def test_without_a_driver_nothing_heavy_is_imported():
    code = ("import sys, labkit.machine as m; m._nvml = lambda: None; m.os.path.exists = lambda path: False\n"
            "live = m.mode().live; assert 'torch' not in sys.modules, 'torch'; print(live, m.mode().reason)")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "False no NVIDIA GPU or driver was found", done.stderr


def test_live_work_is_refused_with_reason_and_fix(fresh_machine):
    fresh_machine.setattr(machine, "mode", lambda: machine.Mode(False, "it is a toaster", "Buy a GPU."))
    with pytest.raises(machine.NoGPU, match="^Capturing needs an NVIDIA GPU: it is a toaster. Buy a GPU.$"):
        machine.require_gpu("Capturing")
    with pytest.raises(machine.NoGPU):
        machine.free_bytes()
    assert machine.other_processes() == () and machine.gpu_uuid() is None


def test_the_description_has_versions_and_nothing_private(fresh_machine):
    import getpass
    import socket
    fresh_machine.setattr(machine, "mode", lambda: machine.Mode(False, "pretended"))
    here = machine.describe()
    assert here.gpu is None
    assert here.cores >= 1 and here.python.startswith(f"{sys.version_info[0]}.{sys.version_info[1]}")
    told = json.dumps(vars(here))
    assert socket.gethostname() not in told and str(Path.home()) not in told
    assert getpass.getuser() == "root" or getpass.getuser() not in told


def test_the_slug_is_a_plain_folder_name(fresh_machine):
    fresh_machine.setattr(machine, "mode", lambda: machine.Mode(True, ""))
    fresh_machine.setattr(machine, "_describe_gpu", lambda: {"gpu": "NVIDIA GeForce RTX 4090 (Laptop)"})
    assert machine.slug(machine.describe().gpu) == "nvidia-geforce-rtx-4090-laptop"


def test_only_strangers_count_as_other_processes(fresh_machine):
    orphan = "sleep 30 >/dev/null & echo $!"  # its shell ends at once, so it is no child of this process
    stranger = int(subprocess.run(["sh", "-c", orphan], stdout=subprocess.PIPE).stdout)
    child = subprocess.Popen(["sleep", "30"])
    try:
        nobody = 2**22 + 1  # a process of the host, say, as NVML shows it in a container
        entries = [SimpleNamespace(pid=pid, usedGpuMemory=3 * 2**29)
                   for pid in (os.getpid(), os.getppid(), child.pid, nobody, stranger)]
        fresh_machine.setattr(machine, "mode", lambda: machine.Mode(True, ""))
        fresh_machine.setattr(machine, "_handle", lambda: None)
        fresh_machine.setattr(machine, "_nvml_get", lambda call, *args: entries)
        assert machine.other_processes() == (f"sleep (process {stranger}, 1.5 GiB)",)
        fresh_machine.setattr(machine, "_nvml_get", lambda call, *args: None)  # NVML shows nothing
        assert machine.other_processes() == ()
    finally:
        os.kill(stranger, 9)
        child.kill()
        child.wait()


def check(name):
    return next(check for check in machine.doctor() if check.name == name)


def test_the_doctor_calls_only_what_is_broken_a_problem(pretend):
    pretend(fake_torch(error=RuntimeError("too old")), 12040)
    pretend.env("LABKIT_MODE", "")
    assert check("mode").status == "problem" and "RECORDED" in check("mode").found
    pretend(fake_torch(cuda=None))
    assert check("mode").status == "warning" and check("mode").fix


def test_the_doctor_compares_versions_with_what_the_project_asks_for(fresh_machine):
    have = {need.name: machine.version(need.name) for need in machine.requirements()}
    fresh_machine.setattr(machine, "version", (have | {"transformers": "4.57.0", "torch": None}).get)
    assert check("transformers").status == "problem" and "'transformers<6,>=5.17'" in check("transformers").fix
    assert check("torch").status == "warning" and "recorded labs do without" in check("torch").found
    assert f"pandas {have['pandas']}" in check("packages").found


def test_the_doctor_notices_a_kernel_of_another_python(fresh_machine, tmp_path):
    kernel = tmp_path / "kernels" / "python3"
    kernel.mkdir(parents=True)
    spec = {"argv": ["/elsewhere/bin/python", "-m", "ipykernel_launcher"], "display_name": "x", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    fresh_machine.setenv("JUPYTER_PATH", str(tmp_path))
    fresh_machine.setenv("JUPYTER_DATA_DIR", str(tmp_path))
    assert check("Jupyter kernel").status == "warning" and "/elsewhere/bin/python" in check("Jupyter kernel").found


def test_a_read_only_home_moves_settings_to_a_temporary_folder(fresh_machine, tmp_path):
    fresh_machine.setenv("HOME", str(tmp_path))
    fresh_machine.delenv("IPYTHONDIR", raising=False)
    fresh_machine.setenv("MPLCONFIGDIR", "mine")
    assert machine.writable_environment() == {} and list(tmp_path.iterdir()) == []
    machine.writable_environment.cache_clear()
    fresh_machine.setenv("HOME", "/proc/nowhere")  # not even root can write there
    moved = machine.writable_environment()
    assert Path(moved["IPYTHONDIR"]).parent.is_dir() and "MPLCONFIGDIR" not in moved
    assert check("home folder").status == "warning"


def test_the_smoke_check_tells_the_last_line_of_what_went_wrong(fresh_machine):
    fresh_machine.setattr(machine, "_SMOKE", "raise RuntimeError('no such device')")
    assert machine._check_smoke().status == "problem" and "no such device" in machine._check_smoke().found
    fresh_machine.setattr(machine, "_SMOKE", "import time; time.sleep(20)")
    assert "no answer within 0.5 s" in machine._check_smoke(seconds=0.5).found


@pytest.mark.gpu
def test_the_doctor_finds_this_gpu_healthy():
    checks = {check.name: check for check in machine.doctor()}
    assert checks["capture and replay"].status == "ok", checks["capture and replay"]
    assert machine.describe().gpu in checks["GPU"].found
    here = machine.describe()
    assert here.driver and here.memory_gib > 1 and here.max_sm_clock_mhz >= here.sm_clock_mhz > 0
    assert machine.gpu_uuid().startswith("GPU-") and 0 < machine.free_bytes() <= here.memory_gib * 2**30 * 1.01


@pytest.mark.parametrize("name, value, wrong", [
    ("LABKIT_MODE", "silly", "means nothing"), ("LABKIT_MODE", " Recorded ", ""),
    ("LABKIT_TABLES", "live", "means nothing"), ("LABKIT_TABLES", "Recorded ", ""), ("LABKIT_BUDGET", "silly", "no number above 0"),
    ("LABKIT_BUDGET", "0", "no number above 0"), ("LABKIT_BUDGET", "nan", "no number above 0"),
    ("LABKIT_BUDGET", "inf", "no number above 0"), ("LABKIT_BUDGET", "0.2", "")])
def test_settings_that_mean_nothing_are_named(monkeypatch, capsys, name, value, wrong):
    from labkit import __main__ as cli
    monkeypatch.delenv("LABKIT_MODE", raising=False)
    monkeypatch.setenv(name, value)
    said = machine.wrong_settings()
    assert wrong in said and bool(wrong) == bool(said) and (not said or said.startswith(f"{name}={value}"))
    if said:
        assert cli.main(["run", "00"]) == 1 and said in capsys.readouterr().err


def test_a_share_of_the_gpus_memory_is_read_and_a_wrong_one_named(monkeypatch):
    import torch

    assert machine.share_of_memory() == 1.0
    monkeypatch.setenv("LABKIT_GPU_SHARE", "0.25")
    assert machine.share_of_memory() == 0.25
    monkeypatch.setattr(machine, "require_gpu", lambda what: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (900, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 50)
    assert machine.free_bytes() == 200  # a quarter of it all, less what this process has
    for wrong in ("0", "1.5", "-1", "half", "", "nan"):
        monkeypatch.setenv("LABKIT_GPU_SHARE", wrong)
        with pytest.raises(ValueError, match="LABKIT_GPU_SHARE is .*give a share"):
            machine.share_of_memory()
