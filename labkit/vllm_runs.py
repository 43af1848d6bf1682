"""Run vLLM itself, each configuration in a process of its own: time per step, start-up, captured sizes, memory, its log lines.

vLLM is an extra (labkit[vllm]) and is imported in the child only. The child tells what it finds as lines of JSON; its log goes
to a file, of which a failure shows the end. Nothing is left running.
"""

import ctypes
import functools
import http.client
import importlib.util
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import redirect_stderr, suppress
from pathlib import Path

from labkit import machine

CONFIGURATIONS = {  # what is handed to vllm.LLM
    "default": {},
    "enforce_eager": {"enforce_eager": True},
    "graphs, not compiled": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "neither": {"compilation_config": {"mode": 0, "cudagraph_mode": "NONE"}},
    "default, at most 16 sequences": {"max_num_seqs": 16},
    "default, V1 model runner": {},
}
# In vLLM 0.26 only the older of its two model runners (v1/worker/gpu_model_runner.py) counts for --cudagraph-metrics, and dense models
# get the newer one (v1/worker/gpu/model_runner.py), which does not; see VllmConfig.use_v2_model_runner.
EXTRA_ENVIRONMENT = {"default, V1 model runner": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}
ALWAYS_GIVEN = {"seed": 0, "max_model_len": 2048, "max_num_seqs": 256, "gpu_memory_utilization": 0.5, "disable_log_stats": False,
                "cudagraph_metrics": True, "skip_tokenizer_init": True}
SHAPE = {  # the shape of Llama 3.2 1B, as a config.json; its weights are dummies
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "torch_dtype": "bfloat16",
    "bos_token_id": 128000, "eos_token_id": 128001, "tie_word_embeddings": True}
VLLM_BATCHES, FEW_BATCHES = (1, 4, 16, 64, 128), (1, 3)  # the few: where only the table of graph use is wanted, and some padding in it
PROMPT_TOKENS, SHORT_TEXT, LONG_TEXT = 60, 8, 32  # tokens: the step is what the longer text takes more, for each token more
SHORT_PROMPT, LONG_PROMPT = 24, 1000  # tokens of a prefill that the captured sizes hold, and of one that is larger than all of them
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
               "TOKENIZERS_PARALLELISM": "false"}
LOGGED = {  # the numbers that are read off vLLM's log
    "captured_in_s": r"Graph capturing finished in ([\d.]+) secs", "graphs_gib": r"secs, took (-?[\d.]+) GiB",
    "weights_gib": r"Model loading took ([\d.]+) GiB", "engine_s": r"init engine \(.*?\) took ([\d.]+) s",
    "compiled_in_s": r"torch\.compile took ([\d.]+) s in total"}
FOR_EACH_SIZE, STARTED = "CUDAGraph captured for batch size", "labkit: vLLM has started"  # the article's line; and ours
GRAPH_USE = re.compile(r"\|\s*(\d+)\s*\|\s*(\d+)\s*\|\s*(\d+)\s*\|\s*(\w+)\s*\|\s*(\d+)\s*\|")  # of the table of graph metrics
SHOWN = 15  # last lines of the log in an error
LARGEST_LOG = 32 * 2**20  # bytes; of a longer log, its first and its last half of that are read


class VllmFailed(RuntimeError):
    """A configuration that did not run to its end: how it ended, and the last lines of vLLM's log."""


def installed():
    """Say whether vLLM can be imported here."""
    return importlib.util.find_spec("vllm") is not None


def run_vllm(options, model=None, batches=VLLM_BATCHES, timeout_s=300, progress=None, environment=None):
    """Run one configuration of vLLM in a process of its own; returns what it told, with what its log says, as one dict.

    options: keywords of vllm.LLM. model: the name or folder of a model; left out, the shape of a 1B Llama with dummy weights.
    progress: called with each thing told, a dict: first what it is, then each step. environment: variables, {name: value}.
    Raises ModuleNotFoundError without vLLM, VllmFailed with its last lines, also after timeout_s seconds.
    """
    if not installed():
        raise ModuleNotFoundError("vLLM is not installed: pip install 'labkit[vllm]'", name="vllm")
    with tempfile.TemporaryDirectory(prefix="labkit-vllm-") as name:
        folder, dummy = Path(name), model is None
        (folder / "config.json").write_text(json.dumps(SHAPE))
        given = {**ALWAYS_GIVEN, **options, "model": str(folder) if dummy else model, **({"load_format": "dummy"} if dummy else {})}
        if not dummy:
            given.pop("skip_tokenizer_init")
        log, told = folder / "log", folder / "told"
        told.touch()
        asked = {"options": given, "batches": list(batches), "told": str(told), "uuid": machine.gpu_uuid()}
        ended = _vllm_child(asked, log, told, timeout_s, progress, environment or {})
        text = _whole_or_ends(log)
        heard = [] if ended else [json.loads(line) for line in told.read_text().splitlines()]
        if len(heard) < 2:
            last = "\n  ".join(line[:300] for line in text.strip().splitlines()[-SHOWN:])
            raise VllmFailed(f"vLLM {ended or 'ended, and no step was timed'}. The last lines of its log:\n  {last or '(none)'}")
        return heard[0] | {"steps": [step["step"] for step in heard[1:]], **read_log(text)}


def _whole_or_ends(log):
    """Return a log as text; of a very long one, how it begins and how it ends."""
    with open(log, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        parts = [file.read(LARGEST_LOG // 2)]
        file.seek(max(LARGEST_LOG // 2, size - LARGEST_LOG // 2))
        return b"".join([*parts, b"\n" * (size > LARGEST_LOG), file.read()]).decode("utf-8", "replace")


def _vllm_child(given, log, told, timeout_s, progress, more):
    """Run _in_vllm in a process group of its own and wait; returns "" or how it ended otherwise."""
    code = "import json, sys; from labkit import vllm_runs; vllm_runs._in_vllm(**json.loads(sys.argv[1]))"
    environment = {**os.environ, **ENVIRONMENT, **more, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if Path(given["options"]["model"]).exists():
        environment["HF_HUB_OFFLINE"] = "1"
    with open(log, "wb") as file:
        child = subprocess.Popen([sys.executable, "-c", code, json.dumps({**given, "parent": os.getpid()})], stdin=subprocess.DEVNULL,
                                 stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    began, seen, running = time.monotonic(), 0, True
    try:
        while running:
            if time.monotonic() - began > timeout_s:
                return f"did not end within {timeout_s:g} s"
            time.sleep(0.05)
            running = child.poll() is None  # looked at first, so that what it told last is heard, too
            whole = told.read_text().rpartition("\n")[0].splitlines()
            for line in whole[seen:] if progress else ():
                progress(json.loads(line))
            seen = len(whole)
        if child.returncode:
            names = {number.value: number.name for number in signal.Signals}
            return f"ended with code {child.returncode}" if child.returncode > 0 else f"crashed: {names.get(-child.returncode, -child.returncode)}"
        return ""
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # whatever it has started, too
        child.wait()


def read_log(text):
    """Return what vLLM's log says, as a dict: numbers (None where no line has them), the lines, and the table of graph use.

    graph_use: {mode: steps}; padding_share: of all tokens that were run, those that were padding. lines: those of the log
    that the numbers stand in. lines_for_sizes: how many tell of the capture of one size; captured_at_start: whether the
    capture ended before the first request (None where no line tells of one).
    """
    found, lines = {}, []
    for name, pattern in LOGGED.items():
        match = re.search(pattern, text)
        found[name] = float(match[1]) if match else None
        if match:
            start, end = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.end())
            lines.append(text[start:end if end >= 0 else None].strip()[:300])
    found |= {"lines_for_sizes": text.count(FOR_EACH_SIZE), "captured_at_start": None}
    if found["captured_in_s"] is not None:
        found["captured_at_start"] = bool(re.search(LOGGED["captured_in_s"], text.partition(STARTED)[0]))
    use, real, run = {}, 0, 0
    for unpadded, padded, _, mode, count in GRAPH_USE.findall(text):
        use[mode] = use.get(mode, 0) + int(count)
        real, run = real + int(unpadded) * int(count), run + int(padded) * int(count)
    return found | {"lines": list(dict.fromkeys(lines)), "graph_use": use, "padding_share": 1 - real / run if run else None}


def flags(*words):
    """Return what vLLM's own parser of `vllm serve` makes of some words: {"enforce_eager": ..., "model": ...} or {"error": ...}.

    Raises ModuleNotFoundError without vLLM.
    """
    return flags_of([words])[0]


def flags_of(lines, timeout_s=180):
    """Return the same for several lists of words, from one child process: loading the parser takes most of the time.

    Raises ModuleNotFoundError without vLLM.
    """
    if not installed():
        raise ModuleNotFoundError("vLLM is not installed: pip install 'labkit[vllm]'", name="vllm")
    code = f"from labkit import vllm_runs; vllm_runs._parse_flags({[list(words) for words in lines]!r})"
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run([sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace",
                              timeout=timeout_s, env=environment)
    except subprocess.TimeoutExpired:
        return [{"error": f"the parser was not loaded within {timeout_s:g} s"}] * len(lines)
    answers = [line for line in done.stdout.splitlines() if line.startswith('{"labkit"')]
    if answers:
        return json.loads(answers[-1])["labkit"]
    return [{"error": _last_line(done.stderr)}] * len(lines)


def _last_line(text):
    return next((line for line in reversed(text.strip().splitlines()) if line.strip()), "nothing was said")[:300]


def look(url, timeout_s=10):
    """Return what a running vLLM server tells of itself: {"version", "metrics": names with values, "graphs": those about graphs}.

    Raises ConnectionError, with what to check, where nobody answers, each answer within timeout_s seconds, or the answer is not vLLM's.
    """
    base = str(url).strip().rstrip("/").removesuffix("/v1")  # which is where clients ask for texts
    if not base.startswith(("http://", "https://")):
        raise ConnectionError(f"a server's address begins with http:// or https://, unlike {url!r}")
    try:
        version = json.loads(_fetched(f"{base}/version", timeout_s))["version"]
        text = _fetched(f"{base}/metrics", timeout_s)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, http.client.HTTPException) as error:
        raise ConnectionError(f"{base} does not answer as vLLM does ({str(error)[:200] or type(error).__name__}): is it the address "
                              "that `vllm serve` printed, and does it answer from here?") from None
    metrics = {}
    for name, value in re.findall(r"^(vllm:\w+)(?:\{.*\})? (\S+)(?: \d+)?$", text, re.M):
        with suppress(ValueError):
            metrics[name] = metrics.get(name, 0.0) + float(value)
    return {"version": str(version)[:80], "metrics": metrics, "graphs": [name for name in metrics if "graph" in name]}


def _fetched(url, timeout_s):
    """Return the first 10 MiB of an answer as text; TimeoutError where it does not come whole in time, however it drips."""
    until, got = time.monotonic() + timeout_s, b""
    with urllib.request.urlopen(url, timeout=timeout_s) as answer:
        while len(got) < 10 * 2**20 and (part := answer.read1(2**16)):
            got += part
            if time.monotonic() > until:
                raise TimeoutError(f"no whole answer within {timeout_s:g} s")
    return got.decode("utf-8", "replace").replace("\r\n", "\n")


# ---- in the child

def _parse_flags(lines):
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    found = []
    for words in lines:
        said = io.StringIO()
        try:
            with redirect_stderr(said):
                given = make_arg_parser(FlexibleArgumentParser(prog="vllm serve")).parse_args(words)
            found.append({"enforce_eager": given.enforce_eager, "model": given.model_tag or given.model})
        except SystemExit:  # how a parser refuses
            found.append({"error": _last_line(said.getvalue())})
    print(json.dumps({"labkit": found}))


def _in_vllm(options, batches, told, uuid=None, parent=None):
    """Start vLLM, then time texts of two lengths at each batch size, by labkit's clock; tell what is found line by line."""
    _end_with(parent)
    began, before = time.perf_counter(), machine.used_bytes(uuid) if uuid else 0
    import vllm

    def tell(**found):
        with open(told, "a") as file:
            file.write(json.dumps(found) + "\n")

    llm = vllm.LLM(**options)
    took = time.perf_counter() - began
    print(STARTED, flush=True)
    import torch

    from labkit import timing

    config = llm.llm_engine.vllm_config.compilation_config
    tell(vllm=vllm.__version__, start_s=took, captured_sizes=list(config.cudagraph_capture_sizes or ()),
         cudagraph_mode=str(config.cudagraph_mode).rpartition(".")[2], compiles=bool(config.mode),
         reserved_gib=torch.cuda.memory_reserved() / 2**30, **_memory_taken(uuid, before, options["gpu_memory_utilization"]),
         metrics=sorted({metric.name for metric in llm.get_metrics()}), replays=_count_replays(llm))
    for batch in batches:
        if batch > options["max_num_seqs"]:
            continue
        calls = {tokens: functools.partial(_write_texts, llm, batch, tokens) for tokens in (SHORT_TEXT, LONG_TEXT)}
        both = timing.compare(calls, budget_s=3, target=0, without_gpu=set(calls))
        short, long = (both[tokens].wall_us for tokens in (SHORT_TEXT, LONG_TEXT))
        more = LONG_TEXT - SHORT_TEXT
        tell(step={"batch": batch, "wall_us": (long.median - short.median) / more, "wall_us_low": (long.low - short.high) / more,
                   "wall_us_high": (long.high - short.low) / more, "rounds": both[SHORT_TEXT].rounds,
                   "samples": {str(tokens): both[tokens].wall_us.samples for tokens in calls}})
    llm.llm_engine.do_log_stats()


def _end_with(parent):
    """Have this process killed when the one that started it ends, however that ends; on Linux."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if parent and os.getppid() != parent:  # it has ended already
        sys.exit("whoever started this is gone")


def _memory_taken(uuid, before, share):
    """Return how much GPU memory came into use since `before` (bytes), and the share that vLLM was given, in GiB; None without NVML."""
    if not uuid or not (now := machine.used_bytes(uuid)):
        return {"taken_gib": None, "budget_gib": None}
    import torch
    return {"taken_gib": (now - before) / 2**30, "budget_gib": share * torch.cuda.mem_get_info()[1] / 2**30}


def _count_replays(llm):
    """Return how many graphs are replayed by a prefill of few tokens, one of many, and one step of decoding: torch's replays, counted."""
    import torch

    graph, counted = torch.cuda.CUDAGraph, []
    replay = graph.replay

    def counts(prompt_tokens, tokens):
        counted.clear()
        _write_texts(llm, 1, tokens, prompt_tokens)
        return len(counted)

    graph.replay = lambda self: (counted.append(1), replay(self))[1]
    try:
        short = counts(SHORT_PROMPT, 1)
        return {"prefill": short, "long prefill": counts(LONG_PROMPT, 1), "decode step": (counts(SHORT_PROMPT, 9) - short) / 8}
    finally:
        graph.replay = replay


def _write_texts(llm, batch, tokens, prompt_tokens=PROMPT_TOKENS):
    """Let vLLM write so many tokens after `batch` prompts, each another one, so that no prefix is found again."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [number // 1000 % 1000 + 3, number % 1000 + 3, *range(3, prompt_tokens + 1)]}
               for number in itertools.islice(_prompts_so_far, batch)]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False), use_tqdm=False)


_prompts_so_far = itertools.count()
