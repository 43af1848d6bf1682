"""Made-up tables of vLLM, and what each claim about it must be judged to be on them: at, above and below its bounds."""

from made_up import table

from labkit import batching, vllm_runs
from labkit.claims import FAILS, HOLDS, LIMITS, OUTDATED

ALWAYS = {"vllm": "0.0.made-up", "captured_sizes": [], "graphs": 0, "graphs_gib": None, "compiles": False, "replays_prefill": 0,
          "replays_long_prefill": 0, "replays_decode_step": 0.0, "lines": [], "lines_for_sizes": 0, "captured_at_start": None,
          "metrics": ["vllm:a", "vllm:b"], "graph_use": {}, "padding_share": None, "taken_gib": 10.0, "budget_gib": 10.0, "start_s": 20.0, "weights_gib": 2.5,
          "engine_s": 9.0, "captured_in_s": None, "compiled_in_s": None, "cudagraph_mode": "NONE", "reserved_gib": 9.0}
SIZES = batching.vllm_sizes(512)
CAPTURED = {"captured_sizes": SIZES, "graphs": len(SIZES), "graphs_gib": 0.4, "captured_in_s": 4.0, "captured_at_start": True,
            "replays_decode_step": 1.0, "cudagraph_mode": "FULL", "lines": ["INFO [x.py:1] Graph capturing finished in 4 secs, took 0.40 GiB"]}
OF = {"default": CAPTURED | {"compiles": True, "replays_prefill": 17}, "enforce_eager": {}, "graphs, not compiled": CAPTURED, "neither": {},
      "default, at most 16 sequences": CAPTURED | {"compiles": True, "captured_sizes": [1, 2, 4, 8, 16, 24, 32], "graphs": 7, "graphs_gib": 0.1,
                                                   "replays_prefill": 17}}
for name in ("default", "default, at most 16 sequences"):
    OF[name] = OF[name] | {"compiled_in_s": 7.5}
OF["default, V1 model runner"] = OF["default"] | {"graph_use": {"FULL": 700, "PIECEWISE": 12, "NONE": 8}, "padding_share": 0.2}
US = {"default": 1600.0, "enforce_eager": 8500.0, "graphs, not compiled": 2000.0, "neither": 8400.0, "default, at most 16 sequences": 1650.0,
      "default, V1 model runner": 1700.0}


def vllm(batches=(1, 8, 128), **changed):
    """Return a table as vllm_table gives it; changed: {name of a configuration, blanks as _: what is other in its rows}."""
    rows = [{"configuration": name, "batch": batch, "wall_us": US[name] * (1 + batch / 128), "wall_us_low": US[name] * 0.98,
             "wall_us_high": US[name] * 2.04, **ALWAYS, **of, **changed.get("every", {}), **changed.get(name.replace(" ", "_").replace(",", ""), {})}
            for name, of in OF.items() for batch in batches if batch <= (1 if "V1" in name else 16 if "16" in name else 128)]
    assert set(OF) == set(vllm_runs.CONFIGURATIONS)
    return table(rows)


def flags(*as_meant, right=True):
    return table([{"whose": whose, "words": "--enforce-eager false", "meant": False, "as_meant": good, "error": "" if good else "unrecognized",
                   "vllm": "0.0.made-up"} for whose, good in (*(("article", good) for good in as_meant), ("right", right))])


def sizes(some):
    return vllm(default={"captured_sizes": some, "graphs": len(some)})


def memory(**mb):
    """Let configurations take so many MB a size: {name: MB}."""
    return vllm(**{name: {"graphs_gib": each * 1e6 / 2**30 * len(SIZES), "graphs": len(SIZES)} for name, each in mb.items()})


def taken(graphs, share=1.0, compiled=0.0):
    """Let graphs take so many GiB more, alone and together with the compiler, and all so much of what vLLM was given."""
    return vllm(every={"taken_gib": 10.0 * share}, graphs_not_compiled={"taken_gib": 10.0 * share + graphs},
                default={"taken_gib": 10.0 * share + compiled})


ALL = ("default", "graphs_not_compiled", "default_at_most_16_sequences", "default_V1_model_runner")
CASES = [
    ("vllm-flag", flags(True, True), HOLDS), ("vllm-flag", flags(True, False), LIMITS), ("vllm-flag", flags(False, False), FAILS),
    ("vllm-eager", vllm(), HOLDS), ("vllm-eager", vllm(enforce_eager={"compiles": True}), LIMITS), ("vllm-eager", vllm(enforce_eager={"graphs": 3}), LIMITS),
    ("vllm-eager", vllm(enforce_eager={"graphs": 3, "compiles": True}), FAILS), ("vllm-eager", vllm(default={"compiles": False}), LIMITS),
    ("vllm-sizes", sizes([1, 2, 4, 8, 16]), HOLDS), ("vllm-sizes", sizes([1, 2, 3, 4, 5, 6]), LIMITS), ("vllm-sizes", sizes([1, 2, 3, 5, 6, 7, 8]), OUTDATED),
    ("vllm-sizes", vllm(), OUTDATED), ("vllm-sizes", sizes([1, 2, 8]), LIMITS),
    ("vllm-prefill", vllm(every={"replays_prefill": 0}), HOLDS), ("vllm-prefill", vllm(default={"replays_prefill": 0}), LIMITS),
    ("vllm-prefill", vllm(default={"replays_prefill": 1}), OUTDATED),
    ("vllm-log", vllm(default={"lines_for_sizes": 1, "captured_at_start": False}), HOLDS), ("vllm-log", vllm(default={"lines_for_sizes": 5}), LIMITS),
    ("vllm-log", vllm(), FAILS), ("vllm-log", vllm(default={"captured_at_start": False}), FAILS),
    ("vllm-memory", memory(**dict.fromkeys(ALL, 50.001)), HOLDS), ("vllm-memory", memory(**dict.fromkeys(ALL, 199.999)), HOLDS),
    ("vllm-memory", memory(default=200.1, graphs_not_compiled=49.9, default_at_most_16_sequences=60), LIMITS),
    ("vllm-memory", memory(default=200.1, graphs_not_compiled=49.9, default_at_most_16_sequences=9), FAILS), ("vllm-memory", vllm(), FAILS),
    ("vllm-budget", taken(0.19), HOLDS), ("vllm-budget", taken(0.2, 0.99), HOLDS), ("vllm-budget", taken(0.2001, 0.99), LIMITS),
    ("vllm-budget", taken(0.2, 0.99, 0.3), HOLDS),
    ("vllm-budget", taken(0.0, 1.02), HOLDS), ("vllm-budget", taken(0.0, 1.021), FAILS),
    ("vllm-metrics", vllm(default={"metrics": ["vllm:cuda_graph_replays"]}), HOLDS), ("vllm-metrics", vllm(default={"metrics": ["vllm:cudagraph"]}), LIMITS),
    ("vllm-metrics", vllm(), FAILS), ("vllm-metrics", vllm(default={"graph_use": {"FULL": 900}}), FAILS),
]
