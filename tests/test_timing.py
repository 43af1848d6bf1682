"""The clock's arithmetic, its lock and its manners, which need no GPU."""

import contextlib
import gc

import numpy as np
import pytest

from labkit import machine, timing, turns


@pytest.fixture
def own_lock(monkeypatch, tmp_path):
    """Pretend a GPU of our own, whose lock lies in a folder of the test's."""
    monkeypatch.setattr(machine, "gpu_uuid", lambda: "GPU-test")
    monkeypatch.setattr(machine, "other_processes", lambda: ())
    monkeypatch.setattr(turns.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / "labkit-locks" / "GPU-test.lock"


def test_a_spread_is_the_median_and_an_interval_around_it():
    samples = list(np.random.default_rng(1).normal(100, 5, 200))
    spread = timing.spread(samples)
    assert spread.median == np.median(samples) and spread.low < spread.median < spread.high
    assert spread == timing.spread(samples) and len(spread.samples) == 200
    assert timing.spread([3.0] * 5).width == 0


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    spreads = [timing.spread(np.random.default_rng(seed).normal(100, 5, 80)) for seed in range(300)]
    assert 0.91 < np.mean([s.low <= 100 <= s.high for s in spreads]) < 0.99
    theory = 2 * 1.96 * 1.2533 * 5 / 80**0.5 / 100  # width of the interval of a normal median
    assert np.mean([s.width for s in spreads]) == pytest.approx(theory, rel=0.15)


def test_a_ratio_is_that_of_medians_resampled_together():
    common = np.random.default_rng(2).uniform(1, 2, 100)  # what hits both alike
    ratio = timing.spread(3 * common, common)
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((3, 3, 3))
    alone = np.random.default_rng(3).permutation(common)
    assert timing.spread(3 * common, alone).width > 0.02
    assert timing.spread(3 * common, common, np.subtract).median == pytest.approx(2 * np.median(common))


def test_drift_within_a_run_widens_the_interval():
    steps = np.repeat([1.0, 1.6], 100) + np.random.default_rng(4).normal(0, 0.01, 200)
    mixed = np.random.default_rng(5).permutation(steps)
    drifting = timing.spread(steps)
    assert drifting.low < 1.05 and drifting.high > 1.55
    assert drifting.width >= timing.spread(mixed).width


def test_rows_carry_each_clock_the_speedup_and_the_samples():
    def measured(name, us):
        return timing.Measurement(name, *(timing.spread([us, us + 1, us + 2]) for _ in range(3)), 3, "budget")

    both = timing.Comparison({"eager": measured("eager", 40.0), "graph": measured("graph", 9.0)})
    eager, graph = both.rows("eager", size=7)
    assert graph["wall_us"] == 10 and graph["wall_us_low"] <= 10 <= graph["wall_us_high"] and graph["size"] == 7
    assert eager["speedup"] == 1 and graph["speedup"] == pytest.approx(4.1)
    assert graph["samples"]["gpu_us"] == (9.0, 10.0, 11.0) and graph["stopped_by"] == "budget"
    assert both.difference("eager", "graph").median == 31


def test_nothing_to_compare_and_no_gpu_are_said_clearly(monkeypatch):
    with pytest.raises(ValueError, match="at least one callable"):
        timing.compare({})
    monkeypatch.setattr(machine, "mode", lambda: machine.Mode(False, "no NVIDIA driver answers", "Use recordings."))
    with pytest.raises(machine.NoGPU, match="Measuring needs an NVIDIA GPU: no NVIDIA driver answers"):
        timing.measure(lambda: None)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_measurement_leaves_things_as_they_were(own_lock, interruption):
    for collecting in (True, False):
        (gc.enable if collecting else gc.disable)()
        with contextlib.suppress(interruption), timing._gpu_to_ourselves():
            assert not gc.isenabled()
            raise interruption
        assert gc.isenabled() == collecting
        with timing._gpu_to_ourselves():  # the lock is free again
            pass
    gc.enable()


def test_what_slows_a_measurement_is_said_each_time(own_lock, monkeypatch, capsys):
    monkeypatch.setattr(machine, "other_processes", lambda: ("python (pid 7)",))
    monkeypatch.setattr(timing, "disturbances", ["the profiler ran in this process"])
    for _ in range(2):
        with timing._gpu_to_ourselves():
            pass
        assert capsys.readouterr().out == ("Times may be too long: the profiler ran in this process.\n"
                                           "Times may be too long: other processes use this GPU: python (pid 7).\n")


def test_without_a_place_for_the_lock_measuring_goes_on(own_lock, monkeypatch):
    own_lock.parent.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="measuring without a lock"), timing._gpu_to_ourselves():
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.fixture
def cores(monkeypatch):
    """Pretend four cores with times of the loop in a dict; returns it and the moves of the thread."""
    moves, loops = [], {3: 100, 5: 105, 8: 150, 9: 100}
    monkeypatch.setattr(timing.os, "sched_getaffinity", lambda _: set(loops), raising=False)
    monkeypatch.setattr(timing.os, "sched_setaffinity", lambda _, cores: moves.append(set(cores)), raising=False)
    monkeypatch.setattr(timing, "_loop_ns", lambda: loops[max(moves[-1])])
    return loops, moves


def test_rounds_go_through_all_quiet_cores_and_leave_the_thread_free(cores):
    _, moves = cores
    with pytest.raises(KeyboardInterrupt), timing._core_after_core() as next_core:
        for _ in range(4):  # until the best is known, a slow core may serve
            next_core()
        rounds = []
        for _ in range(30):
            next_core()
            rounds.append(max(moves[-1]))
        raise KeyboardInterrupt
    assert moves[-1] == {3, 5, 8, 9} and all(len(move) == 1 for move in moves[:-1])
    assert {core: rounds.count(core) for core in (3, 5, 9)} == pytest.approx({3: 10, 5: 10, 9: 10}, abs=1) and 8 not in rounds


def test_where_every_core_got_busy_rounds_go_on(cores):
    loops, moves = cores
    with timing._core_after_core() as next_core:
        next_core()
        loops.update({3: 400, 5: 390, 8: 410, 9: 395})
        before = len(moves)
        next_core()
        tried = [max(move) for move in moves[before:]]
        assert len(tried) == 5 and tried[-1] == min(tried[:4], key=loops.get)  # as many tries as cores, then the quickest serves


def test_a_ratio_allows_for_what_differs_between_processes():
    def always(enqueue_us, wall_us):
        return timing.Measurement("x", *(timing.spread([us] * 20) for us in (enqueue_us, wall_us / 2, wall_us)), 20, "budget")

    both = timing.Comparison({"cpu": always(30.0, 30.0), "slower cpu": always(60.0, 60.0), "gpu": always(2.0, 10.0), "near": always(9.8, 10.0)})
    assert both["cpu"].wall_us.width == 0

    def share(*names, clock="wall_us"):
        r = both.ratio(*names, clock)
        assert r.high - r.median == pytest.approx(r.median - r.low)
        return r.high / r.median - 1

    assert [share("cpu", "gpu"), share("gpu", "cpu")] == pytest.approx([(0.02**2 + 0.1**2) ** 0.5] * 2)  # the CPU decides one of them,
    assert share("slower cpu", "cpu") == pytest.approx(0.02)  # both: a slower CPU leaves their ratio,
    assert share("near", "gpu") == pytest.approx((0.02**2 + 0.078**2) ** 0.5)  # one only when it is slower,
    assert share("cpu", "gpu", clock="gpu_us") == pytest.approx(0.02)  # or none


def test_candidates_without_a_gpu_clock_get_no_gpu_time(monkeypatch):
    probe = object.__new__(timing._Probe)
    probe.fn, probe.with_gpu, probe.burst, probe.loop = (lambda: None), False, 1, 1
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda: None)
    enqueue, gpu, wall = probe.sample()
    assert np.isnan(gpu) and enqueue > 0 and wall > 0 and np.isnan(timing.spread([gpu] * 6).median)


def test_where_threads_cannot_be_moved_they_stay(monkeypatch):
    monkeypatch.delattr(timing.os, "sched_setaffinity", raising=False)
    with timing._core_after_core() as next_core:
        next_core()


@pytest.mark.parametrize("error", [PermissionError(1, "Operation not permitted"), OSError(22, "Invalid argument")])
def test_where_moving_a_thread_is_forbidden_it_stays(cores, monkeypatch, error):
    def refuse(*_):
        raise error

    monkeypatch.setattr(timing.os, "sched_setaffinity", refuse)
    monkeypatch.setattr(timing, "_loop_ns", lambda: 100)
    with timing._core_after_core() as next_core:
        for _ in range(6):
            next_core()
