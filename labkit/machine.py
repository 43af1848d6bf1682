"""What is here: GPU, driver, versions; whether labs run LIVE or on recordings; and a doctor with fixes."""

import atexit
import functools
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import warnings
from dataclasses import dataclass
from pathlib import Path

import labkit


class NoGPU(RuntimeError):
    """Raised where live GPU work is asked for and there is no GPU that this torch can use."""


@dataclass(frozen=True)
class Mode:
    live: bool
    reason: str
    fix: str = ""
    broken: bool = False  # something installed cannot work as it is, as opposed to: there is simply no GPU


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a recording says about where it was made; the first ten are None where labs do not run LIVE."""

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

    @property
    def slug(self):
        return re.sub(r"[^a-z0-9]+", "-", self.gpu.lower()).strip("-") if self.gpu else None


@dataclass(frozen=True)
class Check:
    name: str
    status: str  # "ok", "warning" or "problem" (something installed is broken)
    found: str
    fix: str = ""


@functools.cache
def _nvml():
    """Return the started NVML module, or None where no NVIDIA driver answers."""
    try:
        import pynvml
        pynvml.nvmlInit()
        return pynvml
    except Exception:  # not installed, no library, or a driver and library that do not match
        return None


def _nvml_get(call, *args):
    """Return what one NVML call says, or None where NVML is missing or does not know."""
    try:
        return getattr(_nvml(), call)(*args)
    except Exception:  # NVML has an error class per cause, and old drivers lack some calls
        return None


def version(package):
    """Return a package's installed version without importing it, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def mode():
    """Say whether labs run LIVE on this machine's GPU or RECORDED, why, and what would change that."""
    if os.environ.get("LABKIT_MODE") == "recorded":
        return Mode(False, "LABKIT_MODE=recorded is set", "Unset LABKIT_MODE to use this machine's GPU.")
    if not _nvml() and not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg"))):
        return Mode(False, "no NVIDIA GPU or driver was found", "Without one, the labs show recordings.")
    try:
        import torch
    except ImportError as error:
        if version("torch"):
            return Mode(False, f"torch does not import: {_first_line(error)}", "Reinstall it: pip install "
                        "--force-reinstall torch", broken=True)
        return Mode(False, "an NVIDIA driver is here, but torch is not installed", "pip install torch")
    return _torch_mode(torch)


def _torch_mode(torch):
    """Judge an imported torch on a machine that has an NVIDIA driver."""
    build = f"torch {torch.__version__}"
    if torch.version.hip:
        return Mode(False, f"{build} is a ROCm build (for AMD GPUs)", "Install torch's CUDA build.")
    if not torch.version.cuda:
        return Mode(False, f"{build} is a CPU build", "Install the CUDA build: pip install --force-reinstall torch")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return Mode(False, f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU", "Unset CUDA_VISIBLE_DEVICES.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.init()
            name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    except Exception as error:  # CUDA reports each of its troubles with another class
        return _no_start(build, torch.version.cuda, error)
    if not _built_for(capability, torch.cuda.get_arch_list()):
        return Mode(False, f"{build} was not built for {name} (compute capability {capability[0]}.{capability[1]})",
                    f"Install a torch that was: this one knows {', '.join(torch.cuda.get_arch_list())}.", broken=True)
    return Mode(True, f"{name}, driver {_nvml_get('nvmlSystemGetDriverVersion')}, {build}")


def _no_start(build, cuda, error):
    """Tell why CUDA did not start: most often the driver is too old for the build."""
    supported = _nvml_get("nvmlSystemGetCudaDriverVersion") or 0  # 12040 means CUDA 12.4
    if 0 < supported // 1000 < int(cuda.split(".")[0]):
        driver, can = _nvml_get("nvmlSystemGetDriverVersion"), f"{supported // 1000}.{supported % 1000 // 10}"
        return Mode(False, f"driver {driver} supports CUDA {can}, too old for {build} (CUDA {cuda})",
                    f"Update the NVIDIA driver, or install a torch built for CUDA {supported // 1000}.", broken=True)
    return Mode(False, f"CUDA does not start: {_first_line(error)}", "See that nvidia-smi works; a restart of the "
                "machine mends a driver that was just updated.", broken=True)


def _first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _built_for(capability, arch_list):
    """Tell whether a build with these archs ("sm_90", "compute_120") runs on a (major, minor) capability."""
    for kind, digits in re.findall(r"(sm|compute)_(\d+)", " ".join(arch_list)):
        arch = divmod(int(digits), 10)
        if arch <= capability and (kind == "compute" or arch[0] == capability[0]):
            return True
    return False


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
    """Return the GPU's free memory in bytes; raises NoGPU."""
    require_gpu("Reading the free GPU memory")
    import torch
    return torch.cuda.mem_get_info()[0]


def used_bytes(uuid):
    """Return the memory of a GPU that all processes together use, in bytes, as NVML sees it (0 where it does not)."""
    memory = _nvml_get("nvmlDeviceGetMemoryInfo", _nvml_get("nvmlDeviceGetHandleByUUID", uuid))
    return memory.used if memory else 0


def other_processes():
    """Name who else computes on this GPU; this process, its parents and its children do not count.

    In a container NVML may show nothing, or process numbers of the host: those are left out.
    """
    if not mode().live or not version("psutil"):
        return ()
    import psutil
    me, found = psutil.Process(), []
    family = {process.pid for process in (me, *me.parents(), *me.children(recursive=True))}
    for entry in _nvml_get("nvmlDeviceGetComputeRunningProcesses", _handle()) or ():
        try:
            if entry.pid not in family:
                found.append(f"{psutil.Process(entry.pid).name()} (process {entry.pid}, "
                             f"{(entry.usedGpuMemory or 0) / 2**30:.1f} GiB)")
        except psutil.NoSuchProcess:
            pass
    return tuple(found)


def describe():
    """Describe this machine as Machine: no host name, no user name, no paths."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch_version = sys.modules["torch"].__version__ if "torch" in sys.modules else version("torch")
    return Machine(**_describe_gpu() if mode().live else {}, cpu=_cpu(), cores=cores, os=_os(), torch=torch_version,
                   python=platform.python_version(), transformers=version("transformers"), labkit=labkit.__version__)


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


def _os():
    """Return e.g. "Ubuntu 24.04 LTS, Linux 6.8.0", with WSL named."""
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"] + ", "
    except (OSError, KeyError, AttributeError):
        name = ""
    wsl = " (WSL)" if "microsoft" in platform.release().lower() else ""
    return f"{name}{platform.system()} {platform.release()}{wsl}"


def doctor():
    """Check everything the labs lean on -> list of Check, each with what was found and the exact fix."""
    here = mode()
    status = "problem" if here.broken else "ok" if here.live or not _nvml() else "warning"
    checks = [Check("mode", status, f"{'LIVE' if here.live else 'RECORDED'}: {here.reason}", here.fix)]
    if here.live:
        checks += [*_check_gpu(), _check_smoke()]
    return checks + [*_check_packages(), _check_kernel(), _check_home(), _check_recordings(),
                     Check("system", "ok", f"{_os()}, Python {platform.python_version()}")]


def _check_gpu():
    here, gib = describe(), 2**30
    yield Check("GPU", "ok", f"{here.gpu}, compute capability {here.sm}, {here.sm_count} SMs")
    yield Check("driver", "ok", f"{here.driver or 'unknown'}; torch {here.torch} is built for CUDA {here.cuda}")
    free = free_bytes()
    yield Check("free memory", "ok" if free > 2 * gib else "warning", f"{free / gib:.1f} of {here.memory_gib} GiB",
                "" if free > 2 * gib else "The labs want 2 GiB: close what else uses this GPU.")
    others = other_processes()
    yield Check("other processes", "warning" if others else "ok", ", ".join(others) or "none seen",
                "Measure when they are done: they share the GPU's time." if others else "")
    default = (_nvml_get("nvmlDeviceGetPowerManagementDefaultLimit", _handle()) or 0) / 1000
    limited = bool(here.power_limit_w and here.power_limit_w < default)
    yield Check("clocks and power", "warning" if limited else "ok", f"SM {here.sm_clock_mhz} of up to "
                f"{here.max_sm_clock_mhz} MHz, memory {here.memory_clock_mhz} MHz, limit {here.power_limit_w} W",
                f"Below this GPU's usual limit: sudo nvidia-smi -pl {default:.0f}" if limited else "")


_SMOKE = """
import torch
x, stream = torch.zeros(8, device="cuda"), torch.cuda.Stream()
torch.cuda.synchronize()
with torch.cuda.stream(stream):
    x.add_(1)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    x.add_(1)
graph.replay(), graph.replay()
assert x.tolist() == [3] * 8, x.tolist()
"""


def _check_smoke(seconds=60):
    """Capture and replay a graph in a fresh process, which cannot hurt this one."""
    fix = "Nothing live will work until this does. Restart the machine, or reinstall the driver or torch."
    try:
        run = subprocess.run([sys.executable, "-c", _SMOKE], capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return Check("capture and replay", "problem", f"no answer within {seconds} s", fix)
    if run.returncode:
        said = run.stderr.strip().splitlines() or [f"exit status {run.returncode}"]
        return Check("capture and replay", "problem", said[-1], fix)
    return Check("capture and replay", "ok", "a captured graph replays and gives the right numbers")


def requirements():
    """Return what labkit needs as packaging Requirements: from pyproject.toml in a clone, else as installed."""
    from packaging.requirements import Requirement
    pyproject = Path(labkit.__file__).parents[1] / "pyproject.toml"
    if pyproject.exists():
        lines = tomllib.loads(pyproject.read_text())["project"]["dependencies"]
    else:
        lines = importlib.metadata.requires("labkit")
    return [need for need in map(Requirement, lines) if not need.marker or need.marker.evaluate({"extra": ""})]


def _check_packages():
    """Give one line for all that fits, and one for each package that is missing or does not fit."""
    if not version("packaging"):
        return [Check("packages", "warning", "little is installed", "make lab, with a network")]
    fine, checks = [], []
    for need in requirements():
        have, install = version(need.name), f"{sys.executable} -m pip install '{need.name}{need.specifier}'"
        if have is None:
            what = "not installed" + ("; recorded labs do without" if need.name == "torch" else "")
            checks.append(Check(need.name, "warning", what, install))
        elif need.specifier.contains(have, prereleases=True):
            fine.append(f"{need.name} {have}")
        else:
            checks.append(Check(need.name, "problem", f"{have} does not fit {need.specifier}", install))
    return [*checks, Check("packages", "ok", ", ".join(fine))]


def _check_kernel():
    """See that notebooks' "python3" kernel is this very Python."""
    try:
        from jupyter_client.kernelspec import KernelSpecManager
        program = KernelSpecManager().get_kernel_spec("python3").argv[0]
    except Exception as error:  # not installed, no such kernel, or an unreadable kernel.json
        return Check("Jupyter kernel", "warning", _first_line(error), f"{sys.executable} -m pip install ipykernel")
    if os.path.isabs(program) and Path(program).parent != Path(sys.executable).parent:
        return Check("Jupyter kernel", "warning", f"notebooks would run in {program}, not in {sys.executable}",
                     "jupyter kernelspec remove python3")
    return Check("Jupyter kernel", "ok", sys.executable)


@functools.cache
def home_is_writable():
    """Tell whether a file can be made in the home folder."""
    try:
        with tempfile.TemporaryFile(dir=Path.home()):
            return True
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        return False


def _check_home():
    if home_is_writable():
        return Check("home folder", "ok", "can be written")
    return Check("home folder", "warning", "cannot be written: settings live in a temporary folder",
                 "Nothing to do for the labs; set HOME to a folder of your own to keep Jupyter's settings.")


@functools.cache
def writable_environment():
    """Return environment variables that move what Jupyter and matplotlib write out of a read-only home, else {}."""
    if home_is_writable():
        return {}
    folder = tempfile.mkdtemp(prefix="labkit-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    names = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "MPLCONFIGDIR")
    return {name: str(Path(folder, name.lower())) for name in names if name not in os.environ}


def _check_recordings():
    found = sorted({file.parent.name for file in Path(labkit.__file__).parent.glob("recordings/*/*.json")})
    return Check("recordings", "ok" if found else "warning", ", ".join(found) or "none",
                 "" if found else "On a machine with a GPU: python -m labkit record")
