"""Several learners on one GPU: the queue, in threads and in processes of its own, without a GPU."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from labkit import machine, turns

MEASURES = """
import sys, tempfile, time
from labkit import machine, turns
machine.gpu_uuid, tempfile.tempdir = (lambda: "GPU-test"), sys.argv[1]
with turns.turn():
    print("began", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.fixture(autouse=True)
def own_queue(monkeypatch, tmp_path):
    """Pretend a GPU of our own, whose queue lies in a folder of the test's."""
    monkeypatch.setattr(machine, "gpu_uuid", lambda: "GPU-test")
    monkeypatch.setattr(turns.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / "labkit-locks"


def measure_elsewhere(folder, seconds):
    """Start a process that measures for a while; returns once it has its turn."""
    other = subprocess.Popen([sys.executable, "-c", MEASURES, str(folder), str(seconds)], stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "began\n"
    return other


def test_a_measurement_waits_for_one_in_another_process(own_queue, tmp_path, capsys):
    with turns.turn():
        pass
    assert not capsys.readouterr().out
    other = measure_elsewhere(tmp_path, 1)
    with turns.turn():
        assert other.wait(timeout=5) == 0
    assert capsys.readouterr().out == "Waiting for this GPU: 1 measurement before yours.\n"
    assert own_queue.stat().st_mode & 0o777 == 0o777  # another user may queue, too
    assert not list(own_queue.glob("*.ticket"))


def test_first_come_first_served_each_alone_and_told_the_place(own_queue, capsys):
    order, inside, most = [], [], []

    def learner(number):
        with turns.turn():
            inside.append(number)
            most.append(len(inside))
            order.append(number)
            time.sleep(0.3)
            inside.remove(number)

    threads = []
    for number in range(5):
        threads.append(threading.Thread(target=learner, args=(number,)))
        threads[-1].start()
        while len(list(own_queue.glob("*.ticket"))) <= number and not order:
            time.sleep(0.01)
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4] and set(most) == {1}
    told = capsys.readouterr().out
    assert "4 measurements before yours" in told or "3 measurements before yours" in told
    assert told.count("1 measurement before yours") == 4


def test_who_was_killed_leaves_the_queue(own_queue, tmp_path, capsys):
    other = measure_elsewhere(tmp_path, 60)
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert len(list(own_queue.glob("*.ticket"))) == 1
    with turns.turn():
        assert len(list(own_queue.glob("*.ticket"))) == 1  # ours
    assert not capsys.readouterr().out and not list(own_queue.glob("*.ticket"))


def test_an_interrupted_wait_leaves_the_queue(own_queue, tmp_path, monkeypatch):
    other = measure_elsewhere(tmp_path, 60)

    def stop(seconds):
        raise KeyboardInterrupt

    try:
        with monkeypatch.context() as patch:
            patch.setattr(turns.time, "sleep", stop)
            with pytest.raises(KeyboardInterrupt), turns.turn():
                raise AssertionError("it was another's turn")
        assert len(list(own_queue.glob("*.ticket"))) == 1
    finally:
        other.kill()
        other.wait()


def test_without_a_place_for_the_queue_measuring_goes_on(own_queue):
    own_queue.write_text("a file where the folder should be")
    measured = []
    with pytest.warns(UserWarning, match="measuring without a lock"), turns.turn():
        measured.append(1)
    assert measured


def test_queues_of_two_gpus_do_not_wait_for_each_other(tmp_path, monkeypatch, capsys):
    other = measure_elsewhere(tmp_path, 60)
    monkeypatch.setattr(machine, "gpu_uuid", lambda: "GPU-other")
    try:
        with turns.turn():
            assert other.poll() is None
        assert not capsys.readouterr().out
    finally:
        other.kill()
        other.wait()
