"""What a graph watches: found in modules, closures, globals, attributes and containers (no GPU: found, not compared)."""

import functools

import pytest
import torch

from labkit import models, watch

SCALE = torch.ones(3)


def labels(fn):
    return {label for _, _, label, _ in watch.slots(fn, "", 4, {})}


class Server:
    def __init__(self):
        self.model, self.bias, self._private = torch.nn.Linear(3, 3), torch.zeros(3), torch.zeros(3)

    def step(self, x):
        return self.model(x) * SCALE + self.bias


def test_modules_are_followed_wholly():
    found = labels(models.mlp(layers=2, width=4))
    assert {"0", "0.weight", "0.bias", "1", "2.weight", "3"} <= found
    assert "running_mean" in labels(torch.nn.BatchNorm1d(3))


def test_bound_methods_partials_and_closures():
    server = Server()
    expected = {"self.model", "self.model.weight", "self.bias", "function.SCALE"}
    assert expected <= labels(server.step)
    assert {f"function.{name}" for name in expected} <= labels(functools.partial(server.step, scale=2))
    weights = {"deep": [torch.ones(2)]}

    def call(x):
        return (lambda y: y * weights["deep"][0] * SCALE)(x)

    assert {"weights.deep.0", "SCALE"} <= labels(call)


class Callable:
    def __init__(self):
        self._hidden = [torch.zeros(1)]

    def __call__(self, x, *, extra=torch.ones(1)):
        return x + self._hidden[0] + SCALE + extra


class Scaled(torch.nn.Module):
    def forward(self, x):
        return x * SCALE


def test_what_calls_and_forwards_read_is_found():
    assert {"_hidden.0", "__call__.SCALE", "__call__.defaults.extra"} <= labels(Callable())
    assert "forward.SCALE" in labels(Scaled()) and "0.forward.SCALE" in labels(torch.nn.Sequential(Scaled()))


def test_names_that_are_only_attributes_are_not_taken_for_globals():
    def call(x):
        return x.SCALE
    assert labels(call) == set()


def test_circles_and_missing_parts_do_no_harm():
    a = torch.nn.Module()
    a.itself, a.nothing = [a], None
    a.register_parameter("bias", None)
    assert "itself.0" in labels(a)


@pytest.mark.parametrize("sizes", [{"layers": 0}, {"width": -1}, {"batch": 0}, {"tokens": 0}])
def test_models_of_no_size_are_refused(sizes):
    with pytest.raises(ValueError, match="must be 1 or more"):
        models.build("mlp", **sizes)


def test_unknown_models_are_refused():
    with pytest.raises(ValueError, match="mlp, transformer"):
        models.build("gpt9")


def test_a_model_too_large_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(models.machine, "require_gpu", lambda what: None)
    monkeypatch.setattr(models.machine, "free_bytes", lambda: 2**30)
    with pytest.raises(models.TooLarge, match=r"needs about \d+\.\d GiB; 1\.0 GiB of this GPU are free"):
        models.build("transformer", layers=48, width=4096)


def test_needed_bytes_counts_weights_and_activations():
    assert models.needed_bytes("mlp", 2, 10, (1, 10), torch.float16) == 2 * 110 * 2 + 16 * 10 * 2


def test_models_keep_the_shape_they_are_given():
    x = torch.randn(2, 5, 128)
    assert models.transformer(layers=1, width=128)(x).shape == x.shape
    assert models.transformer(layers=1, width=200)(torch.randn(1, 2, 200)).shape == (1, 2, 200)
    assert models.mlp(layers=3, width=8)(torch.randn(2, 8)).shape == (2, 8)


def test_a_module_with_a_layout_of_its_own_is_watched_like_any_other():
    class Image(torch.nn.Module):
        layout = "NCHW"

        def forward(self, x):
            return x

    box = [Image()]
    watched = watch.Watched(lambda x: box[0](x), [])
    watched.check()
    box[0] = Image()
    with pytest.raises(watch.ReplayError, match="exchanged"):
        watched.check()
