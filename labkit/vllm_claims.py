"""What the article says of vLLM, each judged by a rule on what vLLM itself did and said; see claims.py for what a rule returns."""

MB = 2**30 / 1e6  # of a GiB
FEW, MANY = 50, 200  # MB a captured size takes, by the article


def _of(table, name):
    """Return the first row of a configuration of vLLM."""
    rows = table[table["configuration"] == name]
    if rows.empty:
        raise KeyError(f"rows of vLLM's configuration {name!r}")
    return rows.iloc[0]


def _times_as_fast(table, slow, fast):
    """Return how many times as fast a configuration's step is, at the smallest batch that all have: (value, low, high).

    low and high: at the ends of both intervals, as processes of vLLM cannot be timed in turns.
    """
    common = set.intersection(*(set(part["batch"]) for _, part in table.groupby("configuration")))
    rows = [table[(table["configuration"] == name) & (table["batch"] == min(common, default=0))] for name in (slow, fast)]
    for name, found in zip((slow, fast), rows):
        if found.empty:
            raise KeyError(f"rows of vLLM's configuration {name!r} at a batch that all have")
    a, b = (found.iloc[0] for found in rows)
    return a["wall_us"] / b["wall_us"], a["wall_us_low"] / b["wall_us_high"], a["wall_us_high"] / b["wall_us_low"]


def _flag(table):
    typed = table[table["whose"] == "article"]
    if typed.empty:
        raise KeyError("row of what the article types")
    good, right = typed["as_meant"].astype(bool), table[table["whose"] != "article"]
    said = next((error for error in typed["error"] if error), "")
    return (good.all(), good.any(), (int(good.sum()),) * 3, f"of {len(typed)} command lines mean what is meant",
            f"vLLM {typed['vllm'].iloc[0]}: of {len(typed)} command lines with a value behind the flag, {good.sum()} are read as "
            f"meant{f' ({said})' if said else ''}; of {len(right)} without one, {int(right['as_meant'].sum())}.")


def _eager(table):
    default, eager = _of(table, "default"), _of(table, "enforce_eager")
    graphs, compiled = (bool(before and not after) for before, after in (
        (default["graphs"], eager["graphs"]), (default["compiles"], eager["compiles"])))
    both = _times_as_fast(table, "enforce_eager", "default")
    try:
        alone = "{:.2f} ({:.2f} to {:.2f}) times as fast as with neither".format(*_times_as_fast(table, "neither", "graphs, not compiled"))
    except KeyError:
        alone = "not measured"
    return (graphs and compiled, graphs or compiled, both, "times as fast with both",
            f"vLLM {default['vllm']}: the flag turns graphs {'off' if graphs else 'not off'} and the compiler {'off' if compiled else 'not off'}. "
            "Without the flag a step is {:.2f} ({:.2f} to {:.2f}) times as fast; ".format(*both) + f"with graphs alone, {alone}.")


def _sizes(table):
    default = _of(table, "default")
    sizes = list(default["captured_sizes"])
    if not sizes:
        raise KeyError("captured size of the default")
    powers = [size for size in sizes if not size & (size - 1)]
    return (sizes == [2**k for k in range(max(sizes).bit_length())], len(powers) >= len(sizes) / 2, (len(powers),) * 3, f"of {len(sizes)} sizes are powers of two",
            f"vLLM {default['vllm']} captures {len(sizes)} sizes, {', '.join(map(str, sizes[:7]))}{', ...' * (len(sizes) > 7)} up to {max(sizes)}; "
            f"{len(powers)} of them are powers of two.")


def _prefill(table):
    default, others = _of(table, "default"), table[table["configuration"] != "default"]
    replays, long = int(default["replays_prefill"]), int(default["replays_long_prefill"])
    return (not replays and not others["replays_prefill"].any(), not replays, (replays,) * 3, "graphs replayed by a short prefill",
            f"vLLM {default['vllm']}: by default a short prefill replays {replays} graphs, one longer than all captured sizes {long}, and "
            f"a step of decoding {default['replays_decode_step']:.3g}.")


def _log(table):
    default = _of(table, "default")
    lines, start = int(default["lines_for_sizes"]), bool(default["captured_at_start"])
    found = [line for line in default["lines"] if "capturing finished" in line]
    return (lines > 0 and not start, lines > 0, (lines,) * 3, "lines that name a captured size",
            f"vLLM {default['vllm']} has {lines} such lines; it captures {'before' if start else 'after'} the first request"
            + (f', and says "{found[0][found[0].index("Graph capturing"):]}".' if found and "Graph capturing" in found[0] else "."))


def _memory(table):
    rows = table.drop_duplicates("configuration")
    rows = rows[(rows["graphs"] > 0) & rows["graphs_gib"].notna()]
    if rows.empty:
        raise KeyError("configuration whose graphs take memory")
    each = rows["graphs_gib"] * MB / rows["graphs"]
    inside = each.between(FEW, MANY)
    number = each[rows["configuration"] == "default"].max() if (rows["configuration"] == "default").any() else each.median()
    return (inside.all(), inside.any(), (number, each.min(), each.max()), "MB a size",
            f"vLLM {rows['vllm'].iloc[0]}: in {len(rows)} configurations that capture, a size takes {each.min():.1f} to {each.max():.1f} MB; "
            f"{inside.sum()} of them lie between {FEW} and {MANY} MB.")


def _budget(table, above=1.02, beside=0.5):
    rows = table.drop_duplicates("configuration").dropna(subset=["taken_gib", "budget_gib"])
    if rows.empty:
        raise KeyError("memory that vLLM has taken")
    full = rows["taken_gib"] / rows["budget_gib"]
    on, off = _of(rows, "graphs, not compiled"), _of(rows, "neither")
    more, graphs = on["taken_gib"] - off["taken_gib"], on["graphs_gib"]
    if not graphs > 0:
        raise KeyError("memory that graphs take")
    said = (f"vLLM {on['vllm']} takes {full.min():.1%} to {full.max():.1%} of the memory it was given. "
            f"Graphs alone take {graphs:.2f} GiB, and {more:+.2f} are in use with them")
    if {"default", "enforce_eager"} <= {*rows["configuration"]}:
        on, off = _of(rows, "default"), _of(rows, "enforce_eager")
        said += (f"; graphs and the compiler together {on['taken_gib'] - off['taken_gib']:+.2f}, where the graphs take {on['graphs_gib']:.2f}")
    fits = full.max() <= above
    return fits and more <= beside * graphs, fits, (full.median(), full.min(), full.max()), "share", said + "."


def _metrics(table):
    default = _of(table, "default")
    names = list(default["metrics"])
    exact, near = ([name for name in names if word in name] for word in ("cuda_graph", "graph"))
    tables = {row["configuration"]: sum(row["graph_use"].values()) for _, row in table.drop_duplicates("configuration").iterrows()}
    steps, others = tables.pop("default"), [f"{steps:,} steps in the configuration {name!r}" for name, steps in tables.items() if steps]
    its = f"a table of {steps:,} steps" if steps else f"no table of graph use by default{f', but one of {others[0]}' if others else ' either'}"
    return (bool(exact), bool(near), (len(exact),) * 3, f"of {len(names)} metrics name cuda_graph",
            f"vLLM {default['vllm']}: of the {len(names)} metrics that it keeps for /metrics, {len(exact)} have cuda_graph in their names"
            + (f", and {len(near)} have graph ({', '.join(near[:3])})" if near else "")
            + f". With --cudagraph-metrics, its log has {its}.")


CLAIMS = (  # as claims.Claim has it; the last word is what those are that were true of an earlier vLLM
    ("vllm-flag", "vLLM takes --enforce-eager false and --enforce-eager true.", "60", ("vllm_flags",),
     "holds when every such line means what is meant, with limits when one does.",
     "It is a flag: give --enforce-eager alone, or leave it out, or --no-enforce-eager.", _flag),
    ("vllm-eager", "--enforce-eager turns off both torch.compile and CUDA graphs.", "60", ("vllm_table",),
     "holds when both are on by default and off with it, with limits when one is.",
     "So it does not tell what graphs alone are worth: compare with and without them at compilation mode 0.", _eager),
    ("vllm-sizes", "vLLM captures batch sizes 1, 2, 4, 8, 16 and so on.", "60", ("vllm_table",),
     "holds when the sizes are the powers of two, with limits when half of them are, else outdated.",
     "Look at the sizes that your version prints; they count tokens.", _sizes, "outdated"),
    ("vllm-prefill", "Prefill uses no CUDA graphs.", "60", ("vllm_table",),
     "holds when no prefill replays a graph, with limits when a configuration other than the default does, else outdated.",
     "Short prompts gain from graphs too; above the largest size nothing is replayed.", _prefill, "outdated"),
    ("vllm-log", "At the first requests the log says: CUDAGraph captured for batch size X.", "60", ("vllm_table",),
     "holds when such lines come after the first request, with limits when they come before it.",
     "Look for \"Graph capturing finished\" before the first request.", _log),
    ("vllm-memory", "Each captured size takes 50 to 200 MB.", "60", ("vllm_table",),
     "holds when all configurations that capture lie in that range, with limits when one does.",
     "Sizes share one pool: read what your log says they took.", _memory),
    ("vllm-budget", "vLLM keeps its graphs within --gpu-memory-utilization.", "60", ("vllm_table",),
     "holds when it takes at most 2 % more than it was given, and graphs alone add at most half of their memory, with limits when only the former.",
     "Leave some memory free when you set it close to 1.", _budget),
    ("vllm-metrics", "/metrics has cuda_graph.", "60", ("vllm_table",),
     "holds when a metric has cuda_graph in its name, with limits when one has graph.",
     "What graphs do is not among the metrics: look at the log, or time a step.", _metrics),
)
