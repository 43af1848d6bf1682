"""The article's benchmark of a decode step, without a GPU: what it compares, and in which order rows come."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from labkit import architectures, graphs, models, timing  # noqa: E402
from labkit.experiments import decoding_steps  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


class Eager:
    """Instead of a graph: runs the callable each time."""

    def __init__(self, fn, args):
        self.fn, self.args = fn, args

    def __call__(self, *args):
        return self.fn(*args)

    def replay(self):
        return self.fn(self.args)


@pytest.fixture
def gpu(monkeypatch):
    """Pretend a GPU: tiny models on the CPU, graphs that are eager, a clock that gives each call its turn."""
    def compare(calls, **_):
        for call in calls.values():
            call()
        return timing.Comparison({name: timing.Measurement(name, *(timing.spread([10.0 * us, 10.0 * us + 1]) for _ in range(3)), 2, "budget")
                                  for us, name in enumerate(calls, 1)})

    monkeypatch.setattr(timing, "compare", compare)
    monkeypatch.setattr(timing, "one_loop_us", lambda call, calls: call() is None or 7.0)
    monkeypatch.setattr(graphs, "GraphedCallable", Eager)
    monkeypatch.setattr(models, "require_room", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(models, "language_model", lambda kind, layers, width, dtype: architectures.tiny_model(
        kind, max_position_embeddings=2048))


def test_the_articles_way_stands_beside_ours(gpu):
    rows = decoding_steps.article_benchmark.measure()
    assert [(row["size"], row["batch"], row["way"]) for row in rows] == [
        (size, batch, way) for size, batch in (("small", 1), ("large", 1), ("large", 32)) for way in ("one loop each", "in rounds")]
    assert rows[0]["eager_us"] == 7.0 and rows[0]["speedup"] == 1 and rows[1]["speedup"] != 1
