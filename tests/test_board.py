"""The board of a class: what a folder holds, what is left out and why, what comes while one looks; nothing of it is markup."""

import asyncio
import copy
import json
import os
import threading

import ipywidgets as widgets
import pytest

from labkit import charts, results
from labkit.claims import HOLDS
from labkit.explorers import board_view
from labkit.explorers.board_model import BoardModel


@pytest.fixture(scope="module")
def own():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_TABLES", "recorded")
        return results.collect(results.gather(["launch_cost", "idle_sweep", "sweep_gpt2"])[0])


@pytest.fixture
def put(tmp_path, own):
    """Return a function that puts results of a GPU into the folder, or a text."""
    def put(name, gpu=None, text=None):
        document = copy.deepcopy(own)
        document["machine"]["gpu"] = gpu
        document["verdicts"]["share"]["verdict"] = HOLDS
        (tmp_path / f"{name}.json").write_text(json.dumps(document) if text is None else text)
    return put


def test_alone_there_are_ones_own_results_and_how_to_add_others(tmp_path, own):
    for folder in (tmp_path, tmp_path / "none"):
        model = BoardModel(folder, own)
        assert list(model.documents) == ["NVIDIA H200, as in this lab"] and not model.left_out and not model.apart
        assert model.status == f"Nothing in {folder.name} yet. To add a GPU: python -m labkit export --out {folder}/NAME.json"
        assert isinstance(model.chart(), charts.Chart)
    assert BoardModel(tmp_path / "a b").status.endswith(f"--out '{tmp_path}/a b/NAME.json'")
    assert BoardModel(tmp_path).chart() == "None of these has that sweep."


def test_a_folder_is_named_so_that_the_command_works_from_anywhere(tmp_path, own, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("", "class"):
        assert (tmp_path / folder).name in (said := BoardModel(folder, own).status) and f"--out {tmp_path / folder}/NAME.json" in said


def test_a_file_that_comes_changes_and_goes_is_seen_and_only_then(tmp_path, own, put):
    model = BoardModel(tmp_path, own)
    assert not model.poll() and model.shown == 1
    put("a", "Made-up A")
    assert model.poll() and not model.poll() and list(model.documents) == ["NVIDIA H200, as in this lab", "Made-up A"]
    assert model.apart == {"share": ["does not hold here", "holds"]} and model.shown == 2
    put("a", "Made-up B and more")
    os.utime(tmp_path / "a.json", ns=(1, 1))
    assert model.poll() and list(model.documents)[1] == "Made-up B and more"
    (tmp_path / "a.json").unlink()
    assert model.poll() and len(model.documents) == 1


def test_a_claim_that_one_has_not_measured_is_no_difference(own):
    other = copy.deepcopy(own)
    other["verdicts"]["micro"]["verdict"], other["verdicts"]["share"]["verdict"] = HOLDS, HOLDS
    assert results.apart({"a": own, "b": other}) == {"share": ["does not hold here", HOLDS]}
    del other["verdicts"]["share"]
    assert results.apart({"a": own, "b": other}) == {}


def test_unchanged_files_are_not_read_again(tmp_path, put, monkeypatch):
    put("a", "Made-up A")
    model, read = BoardModel(tmp_path), []
    monkeypatch.setattr(results, "read", lambda path, real=results.read: read.append(path.name) or real(path))
    put("b", "Made-up B")
    assert model.poll() and read == ["b.json"] and len(model.documents) == 2


def test_whatever_is_no_results_is_named_and_costs_no_other(tmp_path, own, put):
    put("a", "Made-up A"), put("copy", "Made-up A"), put("half", text='{"kind": '), put("html", "<img src=x>"), put("huge", text=" " * 3 * 2**20)
    (tmp_path / "link.json").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder.json").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "own.json").write_text(json.dumps(own))
    model = BoardModel(tmp_path, own)
    assert sorted(model.documents) == ["Made-up A", "NVIDIA H200"]  # one's own, sent in, stands there once
    assert sorted(reason.partition(".json is left out: ")[0] for reason in model.left_out) == [
        "copy", "folder", "half", "html", "huge", "link", "pipe"]
    assert model.status == f"2 in {tmp_path.name}, 7 left out."


def test_nothing_that_a_file_says_is_markup(tmp_path, own, put):
    put("<img src=x onerror=alert(1)>", text="{"), put("b", "Made-up B")
    model = BoardModel(tmp_path, own)
    model.documents = {"<script>": own}
    model.table, model.left_out = {"<b>what": ["<i>text"]}, ("<u>why",)
    html = board_view.table(model)
    assert not any(tag in html for tag in ("<script", "<b>", "<i>", "<u>", "<img")) and "&lt;script&gt;" in html


async def until(what, seconds=3):
    """Wait until something is so; it has to be within seconds."""
    for _ in range(round(seconds / 0.02)):
        if what():
            return
        await asyncio.sleep(0.02)
    assert what()


def test_a_watched_folder_is_drawn_within_seconds_and_stops(tmp_path, own, put):
    async def watched():
        task = asyncio.ensure_future(model.watch(every_s=0.01))
        await asyncio.sleep(0.05)
        put("a", "Made-up A")
        await until(lambda: len(model.documents) == 2)
        assert model.running
        model.stop()
        await asyncio.wait_for(task, 1)
        put("b", "Made-up B")
        assert len(model.documents) == 2 and not model.running
    model = BoardModel(tmp_path, own)
    asyncio.run(watched())


def test_reading_many_files_holds_nothing_else_up(tmp_path, own, put, monkeypatch):
    threads = set()

    def read(path, real=results.read):
        threads.add(threading.current_thread())
        return real(path)

    async def watched():
        task = asyncio.ensure_future(model.watch(every_s=0.01))
        await until(lambda: len(model.documents) == 2)
        model.stop()
        await task
    model = BoardModel(tmp_path, own)
    monkeypatch.setattr(results, "read", read)
    put("a", "Made-up A")
    asyncio.run(watched())
    assert threads and threading.main_thread() not in threads


def test_a_look_that_fails_is_said_and_the_next_one_comes(tmp_path, own, put, monkeypatch):
    async def watched():
        task = asyncio.ensure_future(model.watch(every_s=0.01))
        await until(lambda: "This look at the folder failed: ZeroDivisionError" in model.status)
        monkeypatch.undo()
        await until(lambda: len(model.documents) == 2 and "1 in" in model.status)
        model.stop()
        await task
    model = BoardModel(tmp_path, own)
    put("a", "Made-up A")
    monkeypatch.setattr(results, "read_all", lambda *given: 1 / 0)
    asyncio.run(watched())


def test_the_widgets_follow_the_folder_and_the_menu(tmp_path, own, put):
    model = BoardModel(tmp_path, own)
    top, table, menu, chart = board_view.view(model).children
    watch, stop, status = top.children
    assert isinstance(menu, widgets.Dropdown) and "Nothing in" in status.value and "<img" in chart.value
    put("a", "Made-up A")
    model.poll()
    assert "Made-up A" in table.value and "1 in" in status.value and "✓ holds" in table.value
    menu.value = "sweep_mlp"
    assert "None of these has that sweep." in chart.value
    stop.click()
    assert not model.running
