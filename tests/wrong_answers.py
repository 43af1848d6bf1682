"""What learners write into the exercises: wrong answers with what they must hear of each, and other right ways.

Each is Python, in a notebook that ran up to the exercise: a value, a lambda, or a whole def.
"""

QUEUE = """def eager_us(launches, kernels, gap, calls=10):
    cpu = gpu = 0.0
    for _ in range(calls):
        for launch, work in zip(launches, kernels, strict=True):
            launched = {launched}
            start = {start}
            cpu, gpu = launched, start + work
    return gpu / calls"""


def queue(launched="cpu + launch", start="max(launched, gpu + gap)"):
    return QUEUE.format(launched=launched, start=start)


SHARE_RULE = """def share_rule(shares, low=0.2, high=0.4):
    inside = sum({inside} for share in shares) / len(shares)
    return claims.HOLDS if inside {enough} else claims.LIMITS if inside >= 0.2 else claims.FAILS"""

COUNTED_RULE = """def share_rule(shares, low=0.2, high=0.4):
    inside = sum(low <= share <= high for share in shares)
    return claims.HOLDS if 2 * inside >= len(shares) else claims.LIMITS if 5 * inside >= len(shares) else claims.FAILS"""

STEP_BYTES = """def step_bytes(weights, batch, context, layers, kv_heads, head, size):
    return {}"""


WRONG = {
    # lab 00
    "speedup": [("graph.wall_us / eager.wall_us", "turn it round"), ("eager.enqueue_us / graph.enqueue_us", "the CPU's clock"),
                ("eager.gpu_us / graph.gpu_us", "the GPU's clock"), ("eager.wall_us - graph.wall_us", "too large"), ("'fast'", "should be a number"),
                ("1 - graph.wall_us / eager.wall_us", "the time that is saved")],
    "idle_share": [("lambda wall, gpu: gpu / wall", "the other part is asked for"), ("lambda wall, gpu: 100 * (1 - gpu / wall)", "not in percent"), ("lambda wall, gpu: wall - gpu", "not as a time"),
                   ("lambda wall, gpu: 1 - wall / gpu", "divide by the longer time"), ("lambda wall, gpu: wall / gpu", "divide by the longer time")],
    # lab 10
    "saving_ms": [("lambda kernels, us: kernels * us", "in microseconds, and milliseconds"), ("lambda kernels, us: kernels * us * 1000", "which unit is asked for"),
                  ("lambda kernels, us: kernels + us", "too large"), ("lambda kernels: kernels", "raised TypeError")],
    "crossing": [("products['size'].max()", "the largest such size"), ("products['size'].min()", "Look at that row"),
                 ("products[products.gpu_us > products.enqueue_us].size", "the number of cells"), ("(products.gpu_us > products.enqueue_us).sum()", "how many"),
                 ("1000", "a size from the table"), ("'big'", "a size from the table"),
                 ("products[products.gpu_us > products.enqueue_us]['size'].tolist()", "as one number")],
    "idle": [("eager.gpu_us.sum() / (eager.start_us + eager.gpu_us).max()", "in which it works"),
             ("100 - 100 * eager.gpu_us.sum() / (eager.start_us + eager.gpu_us).max()", "not in percent"), ("eager.gpu_us.sum()", "too large"),
             ("1 - eager.gpu_us.max() / eager.start_us.max()", "too large"), ("round(idle, 2)", "do not round"),
             ("1 - kernels.gpu_us.sum() / (eager.start_us + eager.gpu_us).max()", "the memory fills too")],
    # lab 20
    "break_even": [("lambda s, us: s / us", "mixed up"), ("lambda s, us: s / us / 1e6", "mixed up"), ("lambda s, us: s * us", "divide"),
                   ("lambda s, us: round(s * 1e6 / us)", "do not round"), ("lambda s, us: us / s / 1e6", "turn it round")],
    "abc": [("[21, 21, 21]", "between the copy and a"), ("[11, 11, 21]", "not a clone"), ("[11, 21, 51]", "reads the old address"),
            ("[11, 21]", "3 items"), ("21", "should be a list")],
    "per_node_ns": [("per_node_ns / 1000", "in microseconds"), ("-per_node_ns", "sign is off"), ("(many.enqueue_us - few.enqueue_us) * 1000", "divide by the difference in nodes"),
                    ("many.enqueue_us - few.enqueue_us", "divide by the difference in nodes"),
                    ("(many.gpu_us - few.gpu_us) / (many.nodes - few.nodes) * 1000", "the GPU's time")],
    # lab 30
    "next_size": [("lambda count, sizes: max(sizes)", "smallest that is"), ("lambda count, sizes: min(sizes)", "does not hold them all"),
                  ("lambda count, sizes: count", "not one of the sizes"), ("lambda count, sizes: min(s for s in sizes if s > count)", "smallest that is")],
    "decisions": [("['baked in', 'fails', 'baked in', 'fails', 'fails']", "the fifth"), ("['fails', 'fails', 'baked in', 'fails', 'baked in']", "the first"),
                  ("['baked in', 'fails', 'fails', 'fails', 'baked in']", "the third"), ("['baked in'] * 5", "the second and the fourth"),
                  ("['yes', 'no', 'yes', 'no', 'yes']", "just so")],
    "normalise": [("lambda t: t / t.max()", "item 1 of 2: 1 is too large"), ("lambda t: t", "too large"), ("lambda t: t.abs() / t.abs().max()", "sign is off"),
                  ("lambda t: t / t.abs().max().nope", "raised AttributeError")],
    # lab 31
    "own_pool_mib": [("memory.reserved_bytes.diff().iloc[3]", "in bytes"), ("memory.reserved_bytes.diff().iloc[2] / 2**20", "shares a pool"),
                     ("memory.reserved_bytes.diff().iloc[1] / 2**20", "the first graph"), ("memory.reserved_bytes.iloc[3] / 2**20", "keep together"),
                     ("memory.reserved_bytes.diff().iloc[3] / 1e6", "millions of bytes")],
    "must_split": [("(operations.result == 'fails').sum()", "all that fail"), ("operations.instead.notna().sum()", "have an instead"), ("1", "there are more"),
                   ("operations.instead.fillna('').str.startswith('split')", "should be a number")],
    # lab 35
    "catches": [("['you', 'refused', 'you', 'refused', 'you', 'avoided']", "the first"), ("['avoided', 'refused', 'refused', 'refused', 'you', 'avoided']", "the third"),
                ("['avoided', 'refused', 'you', 'refused', 'avoided', 'avoided']", "the fifth"), ("['avoided', 'you', 'you', 'refused', 'you', 'avoided']", "As expected"),
                ("['avoided', 'refused', 'you', 'refused', 'you', 'refused']", "the sixth"), ("['avoid', 'refuse', 'you', 'refuse', 'you', 'avoid']", "just so"),
                ("'avoided'", "six words")],
    "entries": [("[5, 1]", "a capture runs nothing"), ("[2, 1]", "run on the GPU"), ("[4, 5]", "writes one entry"), ("[4, 0]", "came after the reset")],
    # lab 40
    "halved": [("0", "look again"), ("'8'", "without quotes"), ("3", "no batch of the sweep"), ("1", "more than half is left"), ("512", "a smaller batch")],
    "depth_or_width": [("'both'", 'write "deeper" or "wider"'), ("24", 'write "deeper" or "wider"'), ("'wider' if depth_or_width == 'deeper' else 'deeper'", "look at both")],
    "precision": [("'single'", 'write "float16" or "float32"'), ("16", 'write "float16" or "float32"'),
                  ("'float32' if precision == 'float16' else 'float16'", "look at both")],
    "context": [("'larger'", 'write "grow"'), ("0.5", 'write "grow"'), ("'stay' if context != 'stay' else 'grow'", "look at both"),
                ("'grow' if context != 'grow' else 'shrink'", "look at both")],
    "under_a_tenth": [("0", "look again"), ("'64'", "without quotes"), ("3", "no batch of the sweep"), ("1", "not yet under 10 %"), ("512", "a smaller batch")],
    "floor_us": [("lambda b, f, r, m: (b / r + f / m) * 1e6", "do not add the two"), ("lambda b, f, r, m: min(b / r, f / m) * 1e6", "the slower of the two"),
                 ("lambda b, f, r, m: max(b / r, f / m)", "in seconds"), ("lambda b, f, r, m: max(b / m, f / r) * 1e6", "each has its own ceiling"),
                 ("lambda b, f, r, m: b / r * 1e6", "the slower of the two")],
    # lab 41
    "eager_us": [(queue(launched="gpu + launch"), "neither gpu nor gap"), (queue(start="launched + gpu + gap"), "not the sum"), (queue(start="gpu + gap"), "waits for its launch"),
                 (queue(start="launched"), "the kernel before it"), (queue(start="max(launched, gpu)"), "a small gap"), (queue(launched="launch"), "comes after the one before")],
    "factors": [("[3, 3]", "does eager's?"), ("[1 / factors[0], 1 / factors[1]]", "turn it round"), ("factors[::-1]", "eager comes first"), ("factors[0]", "should be a list"),
                ("launch_model.predict(busy, constants)", "these are times")],
    # lab 50
    "step_bytes": [(STEP_BYTES.format("weights + 2 * batch * context * layers * kv_heads * head"), "numbers, not bytes"),
                   (STEP_BYTES.format("size * (weights + batch * context * layers * kv_heads * head)"), "a key and a value"),
                   (STEP_BYTES.format("size * (weights + 2 * context * layers * kv_heads * head)"), "a cache of its own"),
                   (STEP_BYTES.format("size * batch * (weights + 2 * context * layers * kv_heads * head)"), "shares the weights"),
                   (STEP_BYTES.format("size * (weights + 2 * batch * context * kv_heads * head)"), "in every layer")],
    "rung": [("3", "the name of a rung"), ("'none'", "one of them is fast enough"), ("'eager, growing cache'", "takes too long"), ("'compiled and captured'", "a rung above")],
    # lab 60
    "sizes": [("8", "a list of whole numbers"), ("[0, 8]", "a list of whole numbers"), ("[1, 2, 4, 8, 16, 32]", "at most four sizes"),
              ("sorted(sizes)[:-1]", "no size that holds it"), ("[max(counts)]", "more is padded")],
    "pair": [("'neither'", "a list of two names"), ("['enforce_eager', 'default']", "differ in the compiler"), ("['graphs, not compiled', 'neither']", "the slower one first"),
             ("['eager', 'graphs']", "names as vllm.configuration has them")],
    # lab 70
    "share_rule": [("lambda shares, low=0.2, high=0.4: True", "return one of the words"), ("lambda shares, low=0.2, high=0.4: 'maybe'", "return claims.HOLDS"),
                   ("lambda shares, low=0.2, high=0.4: claims.HOLDS", "count the shares"), ("lambda shares: claims.HOLDS if shares else 0.5", "count the shares"),
                   (SHARE_RULE.format(inside="low < share < high", enough=">= 0.5"), "count the shares"),
                   (SHARE_RULE.format(inside="low <= share <= high", enough="> 0.5"), "count the shares")],
    "slower": [("slower - 1", "is still larger"), ("slower + 1", "a little faster will do"), ("1 / slower", "a whole number"), ("'two'", "a whole number")],
}

RIGHT = {
    "speedup": ["1 / (graph.wall_us / eager.wall_us)"], "idle_share": ["lambda wall, gpu: (wall - gpu) / wall"], "saving_ms": ["lambda kernels, us: us * 1e-3 * kernels"],
    "crossing": ["[size for size, cpu, gpu in zip(products['size'], products.enqueue_us, products.gpu_us) if gpu > cpu][0]",
                 "products[products.gpu_us > products.enqueue_us]['size'].iloc[0]"],
    "idle": ["(lambda end: (end - eager.gpu_us.sum()) / end)((eager.start_us + eager.gpu_us).max())"], "break_even": ["lambda s, us: s / (us * 1e-6)"],
    "abc": ["(11.0, 21, 21)"], "per_node_ns": ["1000 * (replay.enqueue_us.iloc[-1] - replay.enqueue_us.iloc[1]) / (replay.nodes.iloc[-1] - replay.nodes.iloc[1])"],
    "next_size": ["lambda count, sizes: next(s for s in sorted(sizes) if s >= count)"], "decisions": ["('Baked in', ' fails', 'baked in', 'FAILS', 'baked in')"],
    "normalise": ["lambda t: t / torch.linalg.vector_norm(t, float('inf'))", "lambda t: t / torch.maximum(t.max(), -t.min())"],
    "own_pool_mib": ["(memory.reserved_bytes.iloc[3] - memory.reserved_bytes.iloc[2]) / 1024 / 1024"],
    "must_split": ["len([way for way in operations.instead if str(way).startswith('split')])"], "catches": ["[word.upper() for word in catches]"],
    "entries": ["(2 + 2, 1.0)"], "halved": ["float(halved)"], "depth_or_width": ["depth_or_width.title()"], "precision": ["f' {precision} '"],
    "context": ["context.upper()"], "under_a_tenth": ["float(under_a_tenth)"],
    "floor_us": ["lambda bytes, flops, read, multiply: 1e6 * bytes / read if bytes / read > flops / multiply else 1e6 * flops / multiply"],
    "eager_us": [queue(start="launched if launched > gpu + gap else gpu + gap")], "factors": ["numpy.array(factors)", "numpy.divide(launch_model.predict(busy, constants), launch_model.predict(busy, constants, gpu=3))"],
    "step_bytes": ["lambda weights, batch, context, layers, kv_heads, head, size: weights * size + 2 * size * batch * context * layers * kv_heads * head"],
    "rung": ["str(rung)"],
    "sizes": ["tuple(sizes)", "batching.best_sizes(counts, 4)"], "pair": ["list(pair)"],
    "share_rule": [SHARE_RULE.format(inside="not (share < low or share > high)", enough=">= 1 / 2"), COUNTED_RULE], "slower": ["float(slower)"],
}
