"""The runner of vLLM, on a vLLM made up here: what is asked, told, read off its log, and what becomes of failures."""

import contextlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest
import vllm_cases

from labkit import vllm_runs
from labkit.vllm_runs import VllmFailed

LOG = """INFO 11-30 10:00:00 [model_runner.py:306] Model loading took 2.32 GiB and 1.234567 seconds
INFO 11-30 10:00:09 [monitor.py:30] torch.compile took 7.51 s in total
INFO 11-30 10:00:20 [model_runner.py:748] Graph capturing finished in 4 secs, took 0.45 GiB
INFO 11-30 10:00:21 [core.py:331] init engine (profile, create kv cache, warmup model) took 15.20 s (compilation: 7.51 s)
INFO 11-30 10:01:00 [cuda_graph.py:97] **CUDAGraph Config Settings:**
INFO 11-30 10:01:00 [cuda_graph.py:97] | Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |
INFO 11-30 10:01:00 [cuda_graph.py:97] |-----------------|---------------|--------------|--------------|-------|
INFO 11-30 10:01:00 [cuda_graph.py:97] | 3               | 4             | 1            | FULL         | 10    |
INFO 11-30 10:01:00 [cuda_graph.py:97] | 600             | 600           | 0            | NONE         | 1     |
"""
MADE_UP = f'''
import json, os, sys, types
__version__ = "0.26.made-up"


class SamplingParams:
    def __init__(self, **given):
        self.given = given


class LLM:
    def __init__(self, **options):
        print({LOG!r})
        ill = options.get("compilation_config", {{}}).get("ill")
        if ill == "port":
            import socket
            with socket.socket() as taken, socket.socket() as late:
                taken.bind(("127.0.0.1", 0))
                taken.listen()
                late.bind(taken.getsockname())
        if ill == "bytes":
            sys.stdout.flush()
            os.write(1, b"\\xff\\xfe caf\\xe9 \\x1b[31m\\x00\\n" * 3)
            sys.exit(3)
        if ill == "long":
            for _ in range(300):
                print("x" * 100_000)
            print("the end of a long log")
        if ill == "killed":
            os.kill(os.getpid(), 9)
        if ill == "quiet":
            os._exit(0)
        if ill == "environment":
            print("V2 is", os.environ.get("VLLM_USE_V2_MODEL_RUNNER"), file=sys.stderr, flush=True)
            os._exit(5)
        if "broken" in options.get("compilation_config", {{}}):
            raise RuntimeError("CUDA out of memory, made up")
        if options.get("enforce_eager"):  # takes for ever, and starts somebody who does, too
            import subprocess, time
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            print("started", child.pid, flush=True)
            time.sleep(600)
        with open(os.path.join(options["model"], "config.json")) as file:
            assert json.load(file)["num_hidden_layers"] == 16 and options["load_format"] == "dummy"
        config = types.SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4], cudagraph_mode="CUDAGraphMode.FULL_AND_PIECEWISE",
                                       mode=3)
        self.llm_engine = types.SimpleNamespace(vllm_config=types.SimpleNamespace(compilation_config=config), do_log_stats=lambda: None)
        self.written = []
        self.get_metrics = lambda: [types.SimpleNamespace(name=name) for name in ("vllm:b", "vllm:a", "vllm:b")]
        from labkit import timing
        import torch
        torch.cuda.CUDAGraph = Graph
        timing.compare = compare

    def generate(self, prompts, params, use_tqdm):
        assert params.given["ignore_eos"] and not use_tqdm
        self.written += [str(p["prompt_token_ids"]) for p in prompts]
        assert len(set(self.written)) == len(self.written), "a prompt came twice"
        from labkit import vllm_runs
        for _ in range(3 if len(prompts[0]["prompt_token_ids"]) == vllm_runs.SHORT_PROMPT else 0):
            Graph().replay()  # a prefill in three pieces
        for _ in range(params.given["max_tokens"] - 1):
            Graph().replay()


class Graph:
    def replay(self):
        pass


def compare(calls, *, budget_s, target, without_gpu):
    made = {{}}
    for tokens, call in calls.items():
        call(), call()
        us = 1000.0 * tokens + 5000
        made[tokens] = types.SimpleNamespace(rounds=7, wall_us=types.SimpleNamespace(median=us, low=us - 24, high=us + 24, samples=[us]))
    return made
'''
PARSER = '''
import argparse


class FlexibleArgumentParser(argparse.ArgumentParser):
    pass


def make_arg_parser(parser):
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--model", default="their/default")
    parser.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction, default=False)
    return parser
'''


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    for name, text in (("vllm", MADE_UP), ("vllm/entrypoints", ""), ("vllm/entrypoints/openai", ""), ("vllm/utils", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    (tmp_path / "vllm/entrypoints/openai/cli_args.py").write_text(PARSER)
    (tmp_path / "vllm/utils/argparse_utils.py").write_text(PARSER)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_configuration_tells_steps_sizes_and_what_its_log_says(vllm):
    heard = []
    found = vllm_runs.run_vllm({"max_num_seqs": 4}, batches=(1, 2, 4, 8), progress=heard.append)
    assert found["vllm"] == "0.26.made-up" and found["captured_sizes"] == [1, 2, 4] and found["cudagraph_mode"] == "FULL_AND_PIECEWISE"
    assert [step["batch"] for step in found["steps"]] == [1, 2, 4]  # 8 is more than max_num_seqs
    assert found["steps"][0] | {"samples": 0} == {"batch": 1, "wall_us": 1000.0, "wall_us_low": 998.0, "wall_us_high": 1002.0,
                                                  "rounds": 7, "samples": 0}
    assert found["graphs_gib"] == 0.45 and found["start_s"] > 0 and found["compiles"] is True
    assert found["replays"] == {"prefill": 3, "long prefill": 0, "decode step": 1} and found["metrics"] == ["vllm:a", "vllm:b"]
    assert found["captured_at_start"] is True and found["lines_for_sizes"] == 0 and found["taken_gib"] is None  # no GPU here
    named = {f"replays_{what.replace(' ', '_')}" for what in found["replays"]} | {"configuration", "graphs"}
    assert set(vllm_cases.vllm().columns) - named <= found.keys() | found["steps"][0].keys()  # what tests make up, a run gives
    assert heard[0]["vllm"] == found["vllm"] and [said["step"] for said in heard[1:]] == found["steps"]


def test_no_prompt_comes_twice_and_all_are_of_one_length(vllm, monkeypatch):
    import vllm as made_up
    llm = made_up.LLM.__new__(made_up.LLM)
    llm.written = []
    for _ in range(20):
        vllm_runs._write_texts(llm, 128, 16)  # the made-up generate looks at the prompts
    assert len(set(llm.written)) == 20 * 128
    assert {len(json.loads(ids)) for ids in llm.written} == {vllm_runs.PROMPT_TOKENS}
    monkeypatch.delitem(sys.modules, "vllm")


def test_what_the_log_says_is_read_with_its_lines():
    found = vllm_runs.read_log(LOG)
    assert {name: found[name] for name in vllm_runs.LOGGED} == {
        "captured_in_s": 4.0, "graphs_gib": 0.45, "weights_gib": 2.32, "engine_s": 15.2, "compiled_in_s": 7.51}
    assert len(found["lines"]) == 4 and found["lines"][0].endswith("Graph capturing finished in 4 secs, took 0.45 GiB")
    assert found["graph_use"] == {"FULL": 10, "NONE": 1} and found["padding_share"] == pytest.approx(10 / 640)
    late = vllm_runs.read_log(f"{vllm_runs.STARTED}\n{LOG}INFO CUDAGraph captured for batch size 8\n")
    assert found["captured_at_start"] is True and found["lines_for_sizes"] == 0
    assert late["captured_at_start"] is False and late["lines_for_sizes"] == 1
    silent = vllm_runs.read_log("INFO nothing\n")
    assert silent["captured_at_start"] is None
    assert silent["graphs_gib"] is None and silent["lines"] == [] and silent["graph_use"] == {} and silent["padding_share"] is None


def test_a_failed_start_shows_the_last_lines(vllm):
    with pytest.raises(VllmFailed, match=r"(?s)ended with code 1\. The last lines of its log:\n.*CUDA out of memory, made up$"):
        vllm_runs.run_vllm({"compilation_config": {"broken": 1}})


def test_one_that_takes_too_long_is_stopped_with_all_it_started(vllm):
    began = time.monotonic()
    with pytest.raises(VllmFailed, match=r"(?s)did not end within 2 s.*started (\d+)") as caught:
        vllm_runs.run_vllm({"enforce_eager": True}, timeout_s=2)
    assert time.monotonic() - began < 30
    pid = int(str(caught.value).rpartition("started ")[2].split()[0])
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.05)
    else:
        pytest.fail("what vLLM had started still runs")


@pytest.mark.parametrize("ill, why", [("port", r"ended with code 1.*Address already in use"), ("bytes", "ended with code 3.*\ufffd\ufffd caf\ufffd"),
                                      ("killed", "crashed: SIGKILL"), ("quiet", r"ended, and no step was timed.*init engine"),
                                      ("environment", "ended with code 5.*V2 is 0")])
def test_each_way_to_end_badly_is_told_with_the_last_lines(vllm, ill, why):
    with pytest.raises(VllmFailed, match=f"(?s)vLLM {why}"):
        vllm_runs.run_vllm({"compilation_config": {"ill": ill}}, environment={"VLLM_USE_V2_MODEL_RUNNER": "0"})


def test_of_a_very_long_log_both_ends_are_read(vllm, monkeypatch):
    monkeypatch.setattr(vllm_runs, "LARGEST_LOG", 2**20)
    found = vllm_runs.run_vllm({"compilation_config": {"ill": "long"}}, batches=(1,))
    assert found["graphs_gib"] == 0.45 and found["captured_at_start"] is True
    log = vllm / "log"
    log.write_bytes(b"a" * 2**20)
    assert vllm_runs._whole_or_ends(log) == "a" * 2**20
    log.write_bytes(b"first" + b"b" * 3 * 2**20 + b"last")
    text = vllm_runs._whole_or_ends(log)
    assert text.startswith("firstb") and text.endswith("blast") and len(text) == 2**20 + 1
    log.write_bytes(b"")
    assert vllm_runs._whole_or_ends(log) == ""


def test_no_batch_that_fits_is_an_error(vllm):
    with pytest.raises(VllmFailed, match="ended, and no step was timed"):
        vllm_runs.run_vllm({"max_num_seqs": 4}, batches=(8,))


@pytest.mark.skipif(sys.platform != "linux", reason="how a process ends with another one is Linux's own")
def test_vllm_ends_with_whoever_started_it_however_that_ends(vllm):
    code = ("from labkit import vllm_runs; "
            "vllm_runs.run_vllm({'enforce_eager': True}, timeout_s=60, progress=print)")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    starter = subprocess.Popen([sys.executable, "-c", code], env=environment)
    children = []
    for _ in range(600):
        children = psutil.Process(starter.pid).children(recursive=True)
        if len(children) >= 2:  # vLLM, and what it has started
            break
        time.sleep(0.05)
    vllm_itself = next(child for child in children if child.ppid() == starter.pid)
    starter.kill()
    starter.wait()
    gone, _ = psutil.wait_procs([vllm_itself], timeout=10)
    for child in children:
        if child.is_running():
            child.kill()
    assert gone == [vllm_itself]


def test_flags_are_read_by_the_parser_itself(vllm):
    assert vllm_runs.flags("some/model", "--enforce-eager") == {"enforce_eager": True, "model": "some/model"}
    assert vllm_runs.flags("--enforce-eager", "false") == {"enforce_eager": True, "model": "false"}
    assert vllm_runs.flags("--no-enforce-eager") == {"enforce_eager": False, "model": "their/default"}
    assert "unrecognized arguments: --moon" in vllm_runs.flags("--moon")["error"]
    refused, taken = vllm_runs.flags_of([["--moon"], ["--enforce-eager"]])  # one that is refused does not cost the others
    assert "unrecognized arguments: --moon" in refused["error"] and taken["enforce_eager"] is True


def test_a_parser_that_cannot_be_loaded_says_why_for_each(vllm):
    (vllm / "vllm/utils/argparse_utils.py").write_text("raise ImportError('no such parser')")
    assert [found["error"] for found in vllm_runs.flags_of([["a"], ["b"]])] == ["ImportError: no such parser"] * 2


def test_a_parser_that_hangs_or_prints_what_is_no_text_says_so_for_each(vllm):
    parser = vllm / "vllm/utils/argparse_utils.py"
    parser.write_text("import time; time.sleep(60)")
    assert vllm_runs.flags_of([["a"], ["b"]], timeout_s=1) == [{"error": "the parser was not loaded within 1 s"}] * 2
    parser.write_text("import os; os.write(1, b'\\xff\\n'); os.write(2, b'bad \\xff byte\\n'); os._exit(1)")
    assert vllm_runs.flags_of([["a"]]) == [{"error": "bad \ufffd byte"}]


def test_the_memory_taken_is_what_came_into_use_since(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(vllm_runs.machine, "used_bytes", lambda uuid: 5 * 2**30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 10 * 2**30))
    assert vllm_runs._memory_taken("GPU-1", 2**30, 0.5) == {"taken_gib": 4.0, "budget_gib": 5.0}
    monkeypatch.setattr(vllm_runs.machine, "used_bytes", lambda uuid: 0)  # NVML does not say
    assert vllm_runs._memory_taken("GPU-1", 0, 0.5) == vllm_runs._memory_taken(None, 0, 0.5) == {"taken_gib": None, "budget_gib": None}


def test_without_vllm_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(vllm_runs, "installed", lambda: False)
    for call in (lambda: vllm_runs.run_vllm({}), lambda: vllm_runs.flags("x")):
        with pytest.raises(ModuleNotFoundError, match=r"labkit\[vllm\]"):
            call()


# ---- a running server

METRICS = """# HELP vllm:num_requests_running Number of requests.
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:generation_tokens_total{engine="0"} 10.0
vllm:generation_tokens_total{engine="1"} 5.0
python_gc_objects_collected_total{generation="0"} 9.0
"""


@pytest.fixture
def server():
    answers = {"/version": '{"version": "0.26.0"}', "/metrics": METRICS}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            text = answers.get(self.path)
            self.send_response(200 if text else 404)
            self.end_headers()
            self.wfile.write((text or "").encode())

        def log_message(self, *args):
            pass

    serving = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{serving.server_port}", answers
    serving.shutdown()
    serving.server_close()


def test_a_server_tells_its_version_and_metrics(server):
    url, answers = server
    assert vllm_runs.look(url + "/") == {"version": "0.26.0", "graphs": [], "metrics": {
        "vllm:num_requests_running": 3.0, "vllm:generation_tokens_total": 15.0}}
    answers["/metrics"] = answers["/metrics"].replace("\n", "\r\n") + "vllm:cudagraph_replays_total 7 1700000000000\nvllm:none oops\n"
    assert vllm_runs.look(url)["graphs"] == ["vllm:cudagraph_replays_total"]


@pytest.mark.parametrize("version", [None, "hello", "[]", json.dumps({"build": 1})])
def test_what_is_no_vllm_server_is_named(server, version):
    url, answers = server
    answers["/version"] = version
    with pytest.raises(ConnectionError, match=f"{url} does not answer as vLLM does"):
        vllm_runs.look(url)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "localhost:8000", "http://", "", None, 8000])
def test_an_address_that_is_none_is_named(url):
    with pytest.raises(ConnectionError, match="begins with http"):
        vllm_runs.look(url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://127.0.0.1:99999", "http://127.0.0.1:many", "http://[", "http://a b/",
                                 "http://127.0.0.1:1/\u00fc", "http://" + "a" * 300])
def test_an_address_that_nobody_is_at_is_named(url):
    with pytest.raises(ConnectionError, match="does not answer"):
        vllm_runs.look(url, timeout_s=2)


def test_the_address_that_clients_are_given_will_do(server):
    url, _ = server
    assert vllm_runs.look(f" {url}/v1/ ")["version"] == "0.26.0"


@pytest.mark.parametrize("raw", [b"", b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nshort", b"HTTP/1.1 9\r\n\r\n",
                                 b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000, b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n",
                                 b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", b"HTTP/1.1 200 " + b"x" * 70_000])
def test_whatever_answers_there_the_error_is_one(raw):
    with answering(lambda connection: connection.sendall(raw)) as url, pytest.raises(ConnectionError, match="does not answer as vLLM does"):
        vllm_runs.look(url, timeout_s=2)


def test_an_answer_that_drips_for_ever_is_given_up():
    def drip(connection):
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(200):
            connection.sendall(b" ")
            time.sleep(0.05)

    began = time.monotonic()
    with answering(drip) as url, pytest.raises(ConnectionError, match="no whole answer within 1 s"):
        vllm_runs.look(url, timeout_s=1)
    assert time.monotonic() - began < 8


@contextlib.contextmanager
def answering(answer):
    """Give the address of a server that answers each who calls in its own way."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.recv(2**16)
                        answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
