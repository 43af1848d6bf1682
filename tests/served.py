"""Made-up tables of serving, as the experiments of lab 60 give them. Nothing here was measured, and their label says so."""

from labkit import batching

ROWS = 32
COUNTS = {4: {1: 40, 2: 60, 3: 50, 4: 30, 5: 10, 6: 10}, 12: {3: 20, 5: 60, 7: 80, 9: 50, 12: 40, 14: 10}, 32: {9: 30, 14: 60, 17: 70, 20: 50, 23: 40, 27: 10}}
LISTS = {"eager": [], "powers of two": batching.powers_of_two(ROWS), "vLLM's list": batching.vllm_sizes(ROWS), "chosen sizes": [4, 7, 12, 17, 21, 27],
         "every size": batching.every_size(ROWS)}


def ways():
    """Return rows of serving_ways."""
    rows = []
    for rate, counts in COUNTS.items():
        for way, sizes in LISTS.items():
            for number in (0, 1):
                slow, steps = 4.0 if way == "eager" else 1.0, sum(counts.values())
                rows.append({"way": way, "rate": rate, "round": number, "sizes": sizes, "graphs": len(sizes), "pool_mib": 90.0 + len(sizes) if sizes else 0.0,
                             "capture_s": 0.2 * len(sizes), "requests": rate * 5, "tokens": rate * 360, "tokens_per_s": rate * 70 / (slow / 3 if rate > 12 else 1),
                             "ttft_ms_p50": 20 * slow + number, "ttft_ms_p99": 80 * slow, "itl_ms_p50": 4 * slow, "itl_ms_p99": 20 * slow, "steps": steps,
                             "replayed_share": float(bool(sizes)), "padding_share": batching.wasted_share(sizes, counts),
                             "batches": [list(pair) for pair in counts.items()]})
    return rows


def steps():
    """Return rows of serving_step_cost."""
    points = [("eager", batch, 16000.0) for batch in (1, 2, 4, 8, 16, 32, 64, 128)]
    points += [("graph", batch, 2500.0 + 30 * batch) for batch in (*range(1, 33), 48, 64, 96, 128)]
    return [{"way": way, "batch": batch, "wall_us": us, "wall_us_low": us * 0.98, "wall_us_high": us * 1.02, "rounds": 9,
             "capture_s": 0.2 if way == "graph" else None} for way, batch, us in points]


def pools():
    """Return rows of serving_pools."""
    sizes, rows = batching.vllm_sizes(128), []
    for how, order, each in (("one pool, largest first", sizes[::-1], 2), ("one pool, smallest first", sizes, 20), ("a pool for each", sizes[::-1], None), ("one pool, outputs kept", sizes[::-1], 40)):
        kept = 0
        for number, size in enumerate(order, 1):
            kept += (2 + size) * 2**20 if each is None else (130 if number == 1 and each == 2 else each) * 2**20
            rows.append({"how": how, "size": size, "graphs": number, "capture_s": 0.2, "pool_bytes": kept, "taken_bytes": kept + number * 2**20})
    return rows


def prefill():
    """Return rows of serving_prefill."""
    return [{"tokens": tokens, "prompts": prompts, "way": way, "wall_us": us, "wall_us_low": us * 0.98, "wall_us_high": us * 1.02, "graphs": graphs,
             "pool_bytes": graphs * 2**22, "difference": 0.004, "rounds": 9}
            for tokens in (100, 400, 1000, 3000) for prompts in (1, 4)
            for way, us, graphs in (("eager", max(14000.0, 4.5 * tokens), 0), ("whole", prompts * 1500 + 5.0 * tokens, 4), ("pieces", 2500 + 4.5 * tokens, 68))]
