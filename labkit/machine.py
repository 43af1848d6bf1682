"""What is here: GPU, driver, versions; whether labs run LIVE or on recordings; and a doctor with fixes."""

import atexit
import contextlib
import functools
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import labkit
from labkit import install
from labkit.install import version


class NoGPU(RuntimeError):
    """Raised where live GPU work is asked for and there is no GPU that this torch can use."""


@dataclass(frozen=True)
class Mode:
    """Whether labs run LIVE or RECORDED here, why, and what would change that."""

    live: bool
    reason: str
    fix: str = ""
    broken: bool = False  # something installed cannot work as it is, as opposed to: there is simply no GPU


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a recording says about where it was made; the first ten are None where labs do not run LIVE.

    Driver, power limit and clocks are what NVML says when it is asked, so the clocks of an idle GPU are low.
    """

    gpu: str | None = None
    sm: str | None = None
    sm_count: int | None = None
    memory_gib: float | None = None
    driver: str | None = None
    cuda: str | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    cpu: str
    cores: int
    os: str
    python: str
    torch: str | None
    transformers: str | None
    labkit: str


def slug(gpu):
    """Return a GPU's name as part of a file's name: "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") or "gpu"


@dataclass(frozen=True)
class Check:
    """One line of the doctor: what was looked at, how it stands, what was found, and the fix."""

    name: str
    status: str  # "ok", "warning" or "problem" (something installed is broken)
    found: str
    fix: str = ""


@functools.cache
def _nvml():
    """Return the started NVML module, or None where no NVIDIA driver answers."""
    with contextlib.suppress(Exception):  # not installed, no library, or a driver and library that do not match
        import pynvml
        pynvml.nvmlInit()
        return pynvml


def _nvml_get(call, *args):
    """Return what one NVML call says, or None where NVML is missing or does not know."""
    with contextlib.suppress(Exception):  # NVML has an error class per cause, and old drivers lack some calls
        return getattr(_nvml(), call)(*args)


_REINSTALL = "Reinstall torch: pip install --force-reinstall torch"


def wrong_settings():
    """Return what is wrong with the environment variables of the labs, in one line, or ""."""
    for name in ("LABKIT_MODE", "LABKIT_TABLES"):
        if (wish := os.environ.get(name, "").strip()).lower() not in ("", "recorded"):
            return f"{name}={wish} means nothing: unset it, or set it to recorded"
    budget = os.environ.get("LABKIT_BUDGET", "").strip()
    try:
        share_of_memory()
    except ValueError as error:
        return str(error)
    if budget and not above_zero(budget, most=1000):
        return f"LABKIT_BUDGET={budget} is no number above 0, such as 0.2 (a fifth of the time): set it so, or unset it"
    return ""


def above_zero(word, most=sys.float_info.max):
    """Return the number that a word is, None where it is none above 0 and up to `most`."""
    with contextlib.suppress(ValueError):
        return float(word) if 0 < float(word) <= most else None


@functools.cache
def mode():
    """Say whether labs run LIVE on this machine's GPU or RECORDED, why, and what would change that."""
    if os.environ.get("LABKIT_MODE", "").strip().lower() == "recorded":
        return Mode(False, "LABKIT_MODE=recorded is set", "Unset LABKIT_MODE to use this machine's GPU.")
    if not _nvml() and not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg"))):
        return Mode(False, "no NVIDIA GPU or driver was found", "Without one, the labs show recordings.")
    try:
        import torch
    except ImportError as error:
        if version("torch"):
            return Mode(False, f"torch does not import: {first_line(error)}", _REINSTALL, broken=True)
        return Mode(False, "an NVIDIA driver is here, but torch is not installed", "pip install torch")
    build, cuda = f"torch {torch.__version__}", torch.version.cuda
    if not cuda:
        kind = "ROCm" if torch.version.hip else "CPU"
        return Mode(False, f"{build} is a {kind} build", f"It takes the CUDA build. {_REINSTALL}")
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return Mode(False, "CUDA_VISIBLE_DEVICES hides every GPU", "Unset CUDA_VISIBLE_DEVICES.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.init()
            name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    except Exception as error:  # CUDA reports each of its troubles with another class
        most = _nvml_get("nvmlSystemGetCudaDriverVersion") or 0  # 12040 means CUDA 12.4
        if 0 < most // 1000 < int(cuda.split(".")[0]):
            return Mode(False, f"driver {_nvml_get('nvmlSystemGetDriverVersion')} supports CUDA {most // 1000}."
                        f"{most % 1000 // 10}, too old for {build} (CUDA {cuda})",
                        f"Update the NVIDIA driver, or install a torch built for CUDA {most // 1000}.", broken=True)
        return Mode(False, f"CUDA does not start: {first_line(error)}",
                    "See that nvidia-smi works; after an update of the driver, restart the machine.", broken=True)
    if not _built_for(capability, known := torch.cuda.get_arch_list()):
        return Mode(False, f"{build} was not built for {name} (compute capability {capability[0]}.{capability[1]})",
                    f"Install a torch that was: this one knows {', '.join(known)}.", broken=True)
    return Mode(True, f"{name}, driver {_nvml_get('nvmlSystemGetDriverVersion')}, {build}")


def first_line(error):
    """Return the first line of what an error says, its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _built_for(capability, arch_list):
    """Tell whether a build with these archs ("sm_90", "compute_120") runs on a (major, minor) capability."""
    archs = [(kind, divmod(int(n), 10)) for kind, n in re.findall(r"(sm|compute)_(\d+)", " ".join(arch_list))]
    return any(arch <= capability and (kind == "compute" or arch[0] == capability[0]) for kind, arch in archs)


def require_gpu(what):
    """Raise NoGPU, with the reason and the fix, unless labs run LIVE."""
    here = mode()
    if not here.live:
        raise NoGPU(f"{what} needs an NVIDIA GPU: {here.reason}. {here.fix}")


def gpu_uuid():
    """Return the GPU's identifier, "GPU-...", or None where labs do not run LIVE."""
    if not mode().live:
        return None
    import torch
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def _handle():
    return _nvml_get("nvmlDeviceGetHandleByUUID", gpu_uuid())


def free_bytes():
    """Return the GPU memory in bytes that is free and that this process may still take; raises NoGPU."""
    require_gpu("Reading the free GPU memory")
    import torch
    free, total = torch.cuda.mem_get_info()
    return max(0, min(free, int(share_of_memory() * total) - torch.cuda.memory_reserved()))


def share_of_memory():
    """Return the share of the GPU's memory that one process may take: LABKIT_GPU_SHARE where several people share a GPU, else 1.0.

    Raises ValueError unless it is above 0 and at most 1.
    """
    said = os.environ.get("LABKIT_GPU_SHARE", "1")
    if share := above_zero(said, most=1):
        return share
    raise ValueError(f"LABKIT_GPU_SHARE is {said!r}: give a share of the GPU's memory, above 0 and at most 1, as in 0.2")


def used_bytes(uuid):
    """Return the memory of a GPU that all processes together use, in bytes, as NVML sees it (0 where it does not)."""
    memory = _nvml_get("nvmlDeviceGetMemoryInfo", _nvml_get("nvmlDeviceGetHandleByUUID", uuid))
    return memory.used if memory else 0


def gpus():
    """Return {UUID: (bytes in use, bytes in all)} of the NVIDIA GPUs here, those that CUDA_VISIBLE_DEVICES admits, in its order."""
    handles = [_nvml_get("nvmlDeviceGetHandleByIndex", i) for i in range(_nvml_get("nvmlDeviceGetCount") or 0)]
    uuids = [uuid for handle in handles if (uuid := _nvml_get("nvmlDeviceGetUUID", handle))]
    if (wish := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        words = [word.strip() for word in wish.split(",")]
        uuids = [uuid for word in words for i, uuid in enumerate(uuids) if word == str(i) or word[:4] == "GPU-" and uuid.startswith(word)]
    memory = {uuid: _nvml_get("nvmlDeviceGetMemoryInfo", _nvml_get("nvmlDeviceGetHandleByUUID", uuid)) for uuid in uuids}
    return {uuid: (seen.used, seen.total) for uuid, seen in memory.items() if seen}


def other_processes():
    """Name who else computes on this GPU; this process, its parents and its children do not count.

    In a container NVML may show nothing, or process numbers of the host: those are left out.
    """
    if not mode().live or not version("psutil"):
        return ()
    import psutil
    me = psutil.Process()
    family = {process.pid for process in (me, *me.parents(), *me.children(recursive=True))}
    entries = _nvml_get("nvmlDeviceGetComputeRunningProcesses", _handle()) or ()
    used = {entry.pid: (entry.usedGpuMemory or 0) / 2**30 for entry in entries if entry.pid not in family}
    return tuple(f"{process.info['name']} (process {process.pid}, {used[process.pid]:.1f} GiB)"
                 for process in psutil.process_iter(["name"]) if process.pid in used)


def describe():
    """Describe this machine as Machine: no host name, no user name, no paths."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Machine(**_describe_gpu() if mode().live else {}, cpu=_cpu(), cores=cores, os=platform.platform(),
                   python=platform.python_version(), torch=version("torch"), transformers=version("transformers"),
                   labkit=labkit.__version__)


def _describe_gpu():
    import torch
    gpu, handle = torch.cuda.get_device_properties(torch.cuda.current_device()), _handle()
    milliwatts = _nvml_get("nvmlDeviceGetPowerManagementLimit", handle)
    return {"gpu": gpu.name, "sm": f"{gpu.major}.{gpu.minor}", "sm_count": gpu.multi_processor_count,
            "memory_gib": round(gpu.total_memory / 2**30, 1), "driver": _nvml_get("nvmlSystemGetDriverVersion"),
            "cuda": torch.version.cuda, "power_limit_w": milliwatts and milliwatts / 1000,
            "sm_clock_mhz": _nvml_get("nvmlDeviceGetClockInfo", handle, 1),  # 1: the SM clock, 2: memory
            "max_sm_clock_mhz": _nvml_get("nvmlDeviceGetMaxClockInfo", handle, 1),
            "memory_clock_mhz": _nvml_get("nvmlDeviceGetClockInfo", handle, 2)}


def _cpu():
    try:
        return re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()).group(1)
    except (OSError, AttributeError):
        return platform.processor() or platform.machine()


def doctor():
    """Check everything the labs lean on -> list of Check, each with what was found and the exact fix."""
    here = mode()
    status = "problem" if here.broken else "ok" if here.live or not _nvml() else "warning"
    checks = [Check("mode", status, f"{'LIVE' if here.live else 'RECORDED'}: {here.reason}", here.fix)]
    if here.live:
        checks += [*_check_gpu(), _check_smoke()]
    files = Path(labkit.__file__).parent.glob("recordings/*/*.json")
    recorded, moved = ", ".join(sorted({file.parent.name for file in files})), writable_environment()
    return checks + [
        *_check_packages(), _check_kernel(),
        _judged("home folder", "settings live in a temporary folder" if moved else "can be written",
                moved and "It cannot be written: set HOME to a folder of your own to keep Jupyter's settings."),
        _judged("recordings", recorded or "none", not recorded and "With a GPU: python -m labkit record"),
        _judged("settings", "fine", wrong_settings()),
        Check("system", "ok", f"{platform.platform()}, Python {platform.python_version()}")]


def _judged(name, found, fix):
    """Make a Check: a warning if there is something to fix, else ok."""
    return Check(name, "warning" if fix else "ok", found, fix or "")


def _check_gpu():
    here, free, others = describe(), free_bytes() / 2**30, ", ".join(other_processes())
    yield Check("GPU", "ok", f"{here.gpu}, compute capability {here.sm}, {here.sm_count} SMs")
    yield Check("driver", "ok", f"{here.driver or 'unknown'}; torch {here.torch} is built for CUDA {here.cuda}")
    yield _judged("free memory", f"{free:.1f} of {here.memory_gib} GiB",
                  free < 2 and "The labs want 2 GiB: close what else uses this GPU.")
    yield _judged("other processes", others or "none seen",
                  others and "Measure when they are done: they share the GPU's time.")
    default = (_nvml_get("nvmlDeviceGetPowerManagementDefaultLimit", _handle()) or 0) / 1000
    limited = (here.power_limit_w or default) < default
    yield _judged("clocks and power", f"SM {here.sm_clock_mhz} of up to {here.max_sm_clock_mhz} MHz, memory "
                  f"{here.memory_clock_mhz} MHz, limit {here.power_limit_w} W",
                  limited and f"Below this GPU's usual limit: sudo nvidia-smi -pl {default:.0f}")


_SMOKE = """
import torch
x, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
x.add_(1)
with torch.cuda.graph(graph):
    x.add_(1)
graph.replay(), graph.replay()
assert x.tolist() == [3] * 8, x.tolist()
"""


def _check_smoke(seconds=60):
    """Capture and replay a graph in a fresh process, which cannot hurt this one."""
    try:
        run = subprocess.run([sys.executable, "-c", _SMOKE], capture_output=True, text=True, timeout=seconds)
        wrong = run.returncode and (run.stderr.strip() or f"exit status {run.returncode}").splitlines()[-1]
    except subprocess.TimeoutExpired:
        wrong = f"no answer within {seconds} s"
    if wrong:
        return Check("capture and replay", "problem", wrong, "Nothing live will work until this does. Restart the "
                     "machine, or reinstall the driver or torch.")
    return Check("capture and replay", "ok", "a captured graph replays and gives the right numbers")


def requirements():
    """Return what labkit needs as packaging Requirements: from pyproject.toml in a clone, else as installed."""
    from packaging.requirements import Requirement
    in_clone = (install.ROOT / "pyproject.toml").exists()
    needs = map(Requirement, install.needs() if in_clone else importlib.metadata.requires("labkit"))
    return [need for need in needs if not need.marker or need.marker.evaluate({"extra": ""})]


def _check_packages():
    """Give one line for all that is here, and one for each package that is missing or does not fit."""
    if not version("packaging"):
        return [Check("packages", "warning", "little is installed", "make lab, with a network")]
    have, checks = {need: version(need.name) for need in requirements()}, []
    for need, found in have.items():
        if found and need.specifier.contains(found, prereleases=True):
            continue
        what = f"{found} does not fit {need.specifier}" if found else "not installed"
        what += "; recorded labs do without" if not found and need.name == "torch" else ""
        checks.append(Check(need.name, "problem" if found else "warning", what,
                            f"{sys.executable} -m pip install '{need.name}{need.specifier}'"))
    here = ", ".join(f"{need.name} {found}" for need, found in have.items() if found)
    return [*checks, Check("packages", "ok", here)]


def _check_kernel():
    """See that notebooks' "python3" kernel is this very Python."""
    try:
        from jupyter_client.kernelspec import KernelSpecManager
        program = KernelSpecManager().get_kernel_spec("python3").argv[0]
    except Exception as error:  # not installed, no such kernel, or an unreadable kernel.json
        return Check("Jupyter kernel", "warning", first_line(error), f"{sys.executable} -m pip install ipykernel")
    elsewhere = os.path.isabs(program) and Path(program).parent != Path(sys.executable).parent
    return _judged("Jupyter kernel", f"notebooks run in {program if elsewhere else sys.executable}",
                   elsewhere and f"That is not {sys.executable}: jupyter kernelspec remove python3")


@functools.cache
def writable_environment():
    """Return environment variables, {name: value}, that move what Jupyter and matplotlib write out of a read-only home, else {}."""
    if os.access(os.path.expanduser("~"), os.W_OK):
        return {}
    folder = tempfile.mkdtemp(prefix="labkit-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    names = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "MPLCONFIGDIR")
    return {name: str(Path(folder, name.lower())) for name in names if name not in os.environ}
