"""recordings.py and record.py: what is kept, what is refused and with which words, and the recordings in this repository."""

import json
import statistics
import re
import shutil
import subprocess
from pathlib import Path

import nbformat
import pytest

from labkit import build, experiments, machine, record, recordings, timing
from labkit.recordings import RecordingError

HERE = machine.Machine(gpu="NVIDIA Test", cpu="a CPU", cores=2, os="Linux", python="3", torch="2", transformers="5", labkit="0")
ROWS = [{"size": 1, "wall_us": 2.0, "samples": {"wall_us": [1.9, 2.1]}}, {"size": 2, "wall_us": 4.0}]
SOURCE = "def tiny(): return measure(1)"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of recordings, on a machine without a GPU."""
    monkeypatch.setattr(recordings, "FOLDER", tmp_path / "recordings")
    monkeypatch.setattr(machine, "mode", lambda: machine.Mode(False, "no GPU"))
    monkeypatch.delenv("LABKIT_RECORDING", raising=False)
    return tmp_path / "recordings"


@pytest.fixture
def gpu(folder, monkeypatch, tmp_path):
    """A machine that passes for one with a GPU, a clean copy, no experiments and no labs."""
    monkeypatch.setattr(machine, "mode", lambda: machine.Mode(True, "NVIDIA Test"))
    monkeypatch.setattr(machine, "describe", lambda: HERE)
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(experiments, "EXPERIMENTS", {})
    monkeypatch.setattr(build, "NOTEBOOKS", tmp_path / "notebooks")
    return folder


def document(**changed):
    kept = {"schema": recordings.SCHEMA, "kind": "experiment", "name": "tiny", "command": "python -m labkit record",
            "commit": "abc", "code_hash": recordings.code_hash(SOURCE), "recorded_at": "2026-11-29", "params": {"n": 3},
            "machine": {"gpu": "NVIDIA Test"}, "method": {"unit": "us"}, "rows": ROWS} | changed
    return {k: v for k, v in kept.items() if v is not None}


def write(folder, name="tiny", text=None, slug="nvidia-test", **changed):
    path = folder / slug / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document(**{"name": name} | changed)) if text is None else text)
    return path


def table(params=None, source=SOURCE):
    return recordings.live_or_recorded("tiny", {"n": 3} if params is None else params, lambda: ROWS, source)


def experiment(measure, source=SOURCE):
    def fn(n=3):
        return None
    fn.measure, fn.source = measure, source
    return fn


# ---- reading

def test_a_recording_comes_back_as_a_labelled_table(folder):
    write(folder)
    got = table()
    assert got.to_dict("records") == [{"size": 1, "wall_us": 2.0}, {"size": 2, "wall_us": 4.0}]
    assert got[got["size"] > 1].attrs["provenance"] == {
        "live": False, "gpu": "NVIDIA Test", "date": "2026-11-29", "experiment": "tiny", "stale": False,
        "label": "RECORDED on NVIDIA Test, 2026-11-29: not measured here"}
    assert recordings.load("tiny")["rows"] == ROWS  # with the raw samples


def test_live_gives_the_same_table_measured_now(folder, monkeypatch):
    write(folder)
    recorded = table()
    monkeypatch.setattr(machine, "mode", lambda: machine.Mode(True, "here"))
    monkeypatch.setattr(machine, "describe", lambda: HERE)
    live = table({"n": 4})
    assert live.equals(recorded)
    assert live.attrs["provenance"]["label"] == "LIVE on NVIDIA Test" and live.attrs["provenance"]["live"]


def test_changed_code_is_shown_as_an_earlier_version(folder):
    write(folder)
    told = table(source="def tiny(): return measure(2)").attrs["provenance"]
    assert told["stale"] and told["label"].endswith("not measured here (measured by an earlier version)")


def test_other_parameters_than_the_recorded_ones_are_refused(folder):
    write(folder, params={"n": 3, "sizes": [1, 2]})
    assert len(table({"n": 3, "sizes": (1, 2)})) == 2
    with pytest.raises(RecordingError, match=r"recorded with {'n': 3, 'sizes': \[1, 2\]}, not with {'n': 4, .* need an NVIDIA GPU"):
        table({"n": 4, "sizes": (1, 2)})


@pytest.mark.parametrize("field", [*recordings.FIELDS, "rows"])
def test_each_missing_field_and_wrong_type_is_named(folder, field):
    for wrong in (None, 1.5):
        write(folder, text=json.dumps(document(**{field: wrong})))
        recordings._read.cache_clear()
        with pytest.raises(RecordingError, match=rf"nvidia-test/tiny\.json has .*{field}.*python -m labkit record tiny"):
            table()


@pytest.mark.parametrize("changed, words", [
    ({"schema": recordings.SCHEMA + 1}, "newer than this labkit's .*update labkit"),
    ({"schema": 0}, "schema 0, .*labkit record tiny"),
    ({"machine": {}}, "which GPU"),
    ({"rows": [1]}, "rows"),
    ({"kind": "cells", "cells": {"a": {"outputs": []}}}, "a cell without"),
    ({"text": "{\"schema\": 1, "}, "cannot be read .*labkit record tiny"),
    ({"text": ""}, "cannot be read"),
    ({"text": "[]"}, "is not a recording"),
])
def test_damage_is_told_in_one_line_with_what_to_run(folder, changed, words):
    write(folder, **changed)
    with pytest.raises(RecordingError, match=words) as refused:
        table()
    assert "\n" not in str(refused.value)


def test_bytes_that_are_no_text_are_refused_too(folder):
    write(folder).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecordingError, match="cannot be read"):
        table()


def test_missing_recordings_and_unknown_gpus_are_named(folder, monkeypatch):
    with pytest.raises(RecordingError, match="no recordings here.*labkit record"):
        table()
    write(folder)
    with pytest.raises(RecordingError, match="no recording of other.*labkit record other"):
        recordings.load("other")
    write(folder, slug="nvidia-a")
    assert recordings.available() == ["nvidia-a", "nvidia-test"] and recordings.chosen() == "nvidia-a"
    write(folder, slug=recordings.WRITTEN_ON)
    assert recordings.available()[0] == "nvidia-a" and recordings.chosen() == recordings.WRITTEN_ON  # what the labs' prose is about
    shutil.rmtree(folder / recordings.WRITTEN_ON)
    monkeypatch.setenv("LABKIT_RECORDING", "nvidia-test")
    assert recordings.chosen() == "nvidia-test"
    monkeypatch.setenv("LABKIT_RECORDING", "nvidia-z")
    with pytest.raises(RecordingError, match="'nvidia-z'.*nvidia-a, nvidia-test"):
        table()


def test_a_cell_is_found_by_its_text_also_beside_a_damaged_lab(folder):
    source = "%%gpu\nprint(1)"
    outputs = [{"output_type": "stream", "name": "stdout", "text": "1\n"}]
    cells = {recordings.cell_key(source): {"code_hash": recordings.code_hash(source), "outputs": outputs}}
    write(folder, "lab-10_a", text="{")
    with pytest.raises(RecordingError, match="lab-10_a.json cannot be read.*labkit record 10_a"):
        recordings.cell_outputs(source)
    write(folder, "lab-20_b", kind="cells", cells=cells, rows=None)
    told, found = recordings.cell_outputs("\n%%gpu  \nprint(1)\n\n")
    assert found == outputs and not told["stale"] and told["experiment"] == "20_b"
    write(folder, "lab-10_a", kind="cells", cells={}, rows=None)
    assert recordings.cell_outputs("%%gpu\nprint(2)") is None


# ---- the hash of the measuring code

@pytest.fixture
def rooms(tmp_path, monkeypatch):
    """Return a function that writes a measuring room and gives the hash of code that calls `measure`."""
    monkeypatch.setattr(recordings, "__file__", str(tmp_path / "recordings.py"))

    def write_room(text, room="timing", source="import labkit\nlabkit.timing.measure(f)"):
        (tmp_path / f"{room}.py").write_text(text)
        return recordings.code_hash(source)
    return write_room


BASE = 'ROUNDS = 3\ndef measure(fn):\n    """Doc."""\n    return spread(fn, ROUNDS)\ndef other(): return 1\n'


def test_only_behaviour_that_is_reached_changes_the_hash(rooms):
    base = rooms(BASE)
    assert rooms(BASE.replace("Doc.", "Other words.").replace("def other", "# why\n\n\ndef other")) == base
    assert rooms(BASE.replace('    """Doc."""\n', "")) == base
    assert rooms(BASE.replace("return 1", "return 2")) == base
    assert rooms(BASE.replace("ROUNDS = 3", "ROUNDS = 4")) != base
    assert rooms(BASE.replace("spread(fn, ROUNDS)", "spread(fn, ROUNDS + 1)")) != base


def test_the_hash_follows_names_through_rooms_classes_branches_and_strings(rooms):
    rooms(BASE)
    first = rooms("class Spread:\n    def f(self): return 1\ndef spread(fn, n): return Spread()\n", "graphs")
    assert rooms("class Spread:\n    def f(self): return 2\ndef spread(fn, n): return Spread()\n", "graphs") != first
    branches = "try:\n    import x\n    def spread(fn, n): return 1\nexcept ImportError:\n    spread = None\n"
    first = rooms(branches, "graphs")
    assert rooms(branches.replace("return 1", "return 2"), "graphs") != first
    by_string = "from labkit.timing import other as o"
    first = rooms(BASE, source=by_string)
    assert rooms(BASE.replace("return 1", "return 2"), source=by_string) != first
    first = rooms(BASE, source="build('other')")
    assert rooms(BASE.replace("return 1", "return 2"), source="build('other')") != first


def test_the_hash_reads_cells_with_magics_and_await_and_the_cells_beside(rooms):
    assert recordings.code_hash("%%gpu\nawait f()") == recordings.code_hash("%%isolated --timeout 3\nawait f()  # why")
    lab = ["n = 3", "unused = 1", "%%gpu\nprint(n)"]
    assert recordings.lab_hash(lab) == recordings.lab_hash(["n = 3", "unused = 2", "%%gpu\n\nprint(n)"])
    assert recordings.lab_hash(lab) != recordings.lab_hash(["n = 4", *lab[1:]])


# ---- making recordings

def test_no_gpu_no_recording(folder):
    with pytest.raises(machine.NoGPU, match="recording needs an NVIDIA GPU"):
        record.record()


def test_experiments_are_recorded_and_read_back(gpu, monkeypatch, capsys):
    odd = [{"x": float("nan"), "why": f"at {Path.home()}/a/b.py", "after": (1, 2), "samples": {"wall_us": [1.5, 2.5]}}]
    experiments.EXPERIMENTS |= {"tiny": experiment(lambda: odd)}
    path, = record.record(commit="abc1234")
    assert path == gpu / "nvidia-test" / "tiny.json" and "recorded tiny in" in capsys.readouterr().out
    kept = json.loads(path.read_text())
    assert list(kept["rows"][0]) == ["x", "why", "after", "samples"]
    assert kept["rows"] == [{"x": None, "why": "at .../b.py", "after": [1, 2], "samples": {"wall_us": [1.5, 2.5]}}]
    assert (kept["commit"], kept["params"], kept["machine"]["gpu"]) == ("abc1234", {"n": 3}, "NVIDIA Test")
    assert '"wall_us": [ 1.5, 2.5 ]' in path.read_text()
    monkeypatch.setattr(machine, "mode", lambda: machine.Mode(False, ""))
    assert table().attrs["provenance"]["stale"] is False


def test_a_failure_costs_only_itself_and_is_named(gpu, tmp_path):
    def broken():
        raise ValueError("too\nlong")
    experiments.EXPERIMENTS |= {"broken": experiment(broken), "tiny": experiment(lambda: ROWS)}
    with pytest.raises(RecordingError, match=r"1 of 2 could not be recorded.*broken \(too\)$"):
        record.record(commit="abc1234", out=tmp_path / "out")
    assert [p.name for p in tmp_path.glob("out/nvidia-test/*")] == ["tiny.json"]
    assert not gpu.exists()


@pytest.mark.parametrize("rows, wrong", [([], "has no rows"), (None, "wrong field 'rows'"), ([1], "are no dicts")])
def test_what_could_not_be_read_back_is_not_recorded(gpu, rows, wrong):
    write(gpu)
    before = (gpu / "nvidia-test" / "tiny.json").read_bytes()
    experiments.EXPERIMENTS |= {"tiny": experiment(lambda: rows)}
    with pytest.raises(RecordingError, match=f"tiny .what it gave .*{wrong}"):
        record.record(commit="abc1234")
    assert (gpu / "nvidia-test" / "tiny.json").read_bytes() == before


def test_names_choose_what_is_recorded_and_unknown_ones_are_refused(gpu):
    experiments.EXPERIMENTS |= {"tiny": experiment(lambda: ROWS), "other": experiment(lambda: ROWS)}
    with pytest.raises(RecordingError, match="nothing here is called tinny; there are: tiny, other"):
        record.record(["tinny"], commit="abc1234")
    assert [path.stem for path in record.record(["other"], commit="abc1234")] == ["other"]


def test_an_interrupted_write_leaves_the_old_recording(gpu, monkeypatch):
    path = write(gpu)
    before = path.read_text()
    monkeypatch.setattr("os.replace", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        record.save(path, document(rows=[]))
    assert path.read_text() == before and [p.name for p in path.parent.iterdir()] == ["tiny.json"]


def test_a_dirty_tree_is_refused_and_recordings_do_not_make_it_dirty(gpu, tmp_path):
    def git(*args):
        command = ["git", "-C", tmp_path, "-c", "user.name=t", "-c", "user.email=t@t", *args]
        subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(RecordingError, match="not under git.*--commit"):
        record._commit(None)
    assert record._commit("0a1b2c3") == "0a1b2c3"
    with pytest.raises(RecordingError, match="--commit takes the hash of a commit.*not '10_measure_launch_overhead'"):
        record._commit("10_measure_launch_overhead")  # what an empty $COMMIT in front of it makes of a shell's line
    (tmp_path / "labkit" / "recordings").mkdir(parents=True)
    (tmp_path / "labkit" / "recordings.py").write_text("x = 1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    (tmp_path / "labkit" / "recordings" / "new.json").write_text("{}")
    assert re.fullmatch("[0-9a-f]{40}", record._commit("ignored"))
    (tmp_path / "labkit" / "recordings.py").write_text("x = 2")
    with pytest.raises(RecordingError, match=r"commit first.*1 file\(s\).*recordings\.py"):
        record._commit("abc1234")


LIVE = ("from labkit import machine\nmachine.mode = lambda: machine.Mode(True, 'NVIDIA Test')\n"
        "machine.gpu_uuid = lambda: None\nimport labkit; labkit.banner()")


def write_lab(tmp_path, sources):
    path = tmp_path / "notebooks" / "solutions" / "10_tiny.ipynb"
    path.parent.mkdir(parents=True)
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources]), path)


def test_a_lab_that_raises_or_repeats_a_cell_is_not_recorded(gpu, tmp_path):
    write_lab(tmp_path, [LIVE, "%%gpu\n1", "%%gpu\n1"])
    with pytest.raises(RecordingError, match="10_tiny .two .* same text"):
        record.record(["10_tiny"], commit="abc1234")
    shutil.rmtree(tmp_path / "notebooks")
    write_lab(tmp_path, ["1 / 0", "%%gpu\n1"])
    with pytest.raises(RecordingError, match="10_tiny .10_tiny.*ZeroDivisionError: division by zero"):
        record.record(["10_tiny"], commit="abc1234")
    assert not gpu.exists()


def test_a_labs_gpu_cells_are_recorded_live(gpu, tmp_path, monkeypatch):
    sources = [LIVE, "n = 3", "%%gpu\nimport sys, os\nprint(n, os.getcwd())\nprint('b', end='\\r')\nprint('c')\nn * 2",
               "%%isolated --expect boom\nraise ValueError('boom')", "print('not recorded')"]
    write_lab(tmp_path, sources)
    kept = json.loads(record.record(["10_tiny"], commit="abc1234")[0].read_text())
    assert kept["code_hash"] == recordings.lab_hash(sources)
    assert list(kept["cells"]) == list(map(recordings.cell_key, sources[2:4]))
    outputs = kept["cells"][recordings.cell_key(sources[2])]["outputs"]
    assert outputs[0]["text"] == "3 .../solutions\nc\n" and outputs[1]["data"] == {"text/plain": "6"}
    monkeypatch.setattr(machine, "mode", lambda: machine.Mode(False, ""))
    told, outputs = recordings.cell_outputs(sources[3])
    assert not told["stale"] and "ValueError: boom" in outputs[0]["text"] and "untouched" in outputs[0]["text"]


def test_a_lab_is_recorded_on_the_tables_that_are_there_and_measures_the_others(gpu, tmp_path, monkeypatch):
    write(gpu)
    asked = {}
    monkeypatch.setattr(build, "execute", lambda path, **given: asked.update(given) or nbformat.v4.new_notebook())
    write_lab(tmp_path, ["%%gpu\n1"])
    record.record(["10_tiny"], commit="abc1234")
    assert asked == {"LABKIT_TABLES": "recorded", "LABKIT_RECORDING": "nvidia-test"}
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    new = [{"size": 7}]
    assert list(recordings.live_or_recorded("tiny", {"n": 3}, lambda: new, SOURCE)["size"]) == [1, 2]
    assert list(recordings.live_or_recorded("other", {"n": 3}, lambda: new, SOURCE)["size"]) == [7]


# ---- the recordings in this repository

EVERY = sorted(recordings.FOLDER.glob("*/*.json"))


@pytest.mark.parametrize("path", EVERY, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_recordings_here_are_valid_current_and_private(path, monkeypatch):
    monkeypatch.setenv("LABKIT_RECORDING", path.parent.name)
    kept = recordings.load(path.stem)
    assert kept["name"] == path.stem
    if kept["kind"] == "cells":
        sources = build.code_cells(build.NOTEBOOKS / "solutions" / f"{path.stem.removeprefix('lab-')}.ipynb")
        assert kept["code_hash"] == recordings.lab_hash(sources), "a cell or what it uses has changed: record this lab again"
        found = {recordings.cell_key(s): recordings.code_hash(s) for s in sources if recordings.is_recorded(s)}
        assert found == {key: cell["code_hash"] for key, cell in kept["cells"].items()}
    else:
        source = experiments.EXPERIMENTS[path.stem].source
        assert kept["code_hash"] == recordings.code_hash(source), "measured by an earlier version: record it again"
    assert build.scrub(kept) == kept, "a host name or a path is in it"


def test_every_experiment_and_lab_is_recorded():
    assert recordings.available(), "no recordings: run python -m labkit record on a GPU"
    labs = [path for path in build.solutions() if any(map(recordings.is_recorded, build.code_cells(path)))]
    wanted = {*experiments.EXPERIMENTS, *(f"lab-{path.stem}" for path in labs)}
    for slug in recordings.available():
        kept = {path.stem for path in EVERY if path.parent.name == slug}
        missing, stray = (" ".join(sorted(name.removeprefix("lab-") for name in names)) for names in (wanted - kept, kept - wanted))
        assert not missing, f"not recorded on {slug}: python -m labkit record {missing}"
        assert not stray, f"recorded on {slug}, and nothing here is called so: {stray}"


@pytest.mark.parametrize("path", EVERY, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_numbers_follow_from_their_samples(path):
    """A number changed by hand no longer is the median of the samples beside it, nor is its interval theirs."""
    other = {"eager": "eager_wall_us", "graph": "graph_wall_us", "eager gpu_us": "gpu_us", "enqueue_us": "cost_us"}
    for row in json.loads(path.read_text("utf-8")).get("rows", ()):
        if "speedup" in row and {"eager", "graph"} <= row.get("samples", {}).keys():
            eager, graph = (statistics.median(row["samples"][how]) for how in ("eager", "graph"))
            assert row["speedup"] == pytest.approx(eager / graph, rel=1e-4) and row["speedup_low"] < row["speedup"] < row["speedup_high"]
        for key, samples in row.get("samples", {}).items():
            column = key if key in row else other.get(key)
            if column in row:
                assert row[column] == pytest.approx(statistics.median(samples), abs=1e-3), (row, column)
                spread = timing.spread(samples)  # the same samples give the same interval
                ends = [row.get(f"{column}{end}", wanted) for end, wanted in (("_low", spread.low), ("_high", spread.high))]
                assert ends == pytest.approx([spread.low, spread.high], abs=1e-3, rel=1e-6), (row, column)


@pytest.mark.parametrize("change, wrong", [
    (lambda d: d.update(rows=[]), "has no rows"), (lambda d: d.update(recorded_at="yesterday"), "a date that is none"),
    (lambda d: d.update(schema=True), "wrong field 'schema'"),
    (lambda d: d["rows"].append({"wall_us": float("nan")}), "NaN is no number")])
def test_what_no_recording_holds_is_refused(tmp_path, monkeypatch, change, wrong):
    document = json.loads(next(p for p in EVERY if p.stem == "first_win").read_text("utf-8"))
    change(document)
    (tmp_path / "some-gpu").mkdir()
    (tmp_path / "some-gpu" / "first_win.json").write_text(json.dumps(document))
    monkeypatch.setattr(recordings, "FOLDER", tmp_path)
    monkeypatch.delenv("LABKIT_RECORDING", raising=False)
    with pytest.raises(recordings.RecordingError, match=wrong):
        recordings.load("first_win")


@pytest.mark.parametrize("output", [
    "text", {}, {"output_type": "stream", "name": "exit", "text": ""}, {"output_type": "stream", "name": "stdout"},
    {"output_type": "display_data", "data": 3, "metadata": {}}, {"output_type": "display_data", "data": {"text/plain": ""}},
    {"output_type": "display_data", "data": {"application/javascript": "alert()"}, "metadata": {}},
    {"output_type": "display_data", "data": {"text/html": "<SCRIPT>alert()</SCRIPT>"}, "metadata": {}}])
def test_outputs_of_other_kinds_are_refused(output):
    assert not recordings._is_output(output)


def test_outputs_of_the_kinds_that_cells_put_out_are_taken():
    kept = [o for p in EVERY for c in json.loads(p.read_text("utf-8")).get("cells", {}).values() for o in c["outputs"]]
    assert kept and all(map(recordings._is_output, kept))


def test_a_recorded_table_of_another_gpu_comes_also_where_labs_run_live(gpu):
    write(gpu, slug="nvidia-a"), write(gpu, slug="nvidia-b", machine={"gpu": "NVIDIA B"}), write(gpu, name="other", slug="nvidia-c")
    assert recordings.available("tiny") == ["nvidia-a", "nvidia-b"] and len(recordings.available()) == 3
    found = recordings.recorded("tiny", SOURCE, "nvidia-b")
    assert list(found["wall_us"]) == [2.0, 4.0] and found.attrs["provenance"]["label"].startswith("RECORDED on NVIDIA B")
    with pytest.raises(RecordingError, match="nvidia-c has no recording of tiny"):
        recordings.recorded("tiny", SOURCE, "nvidia-c")


def test_live_a_table_that_the_gpu_in_use_has_no_recording_of_is_that_of_the_labs(gpu, monkeypatch):
    write(gpu, slug="nvidia-mine"), write(gpu, name="other", slug=recordings.WRITTEN_ON, machine={"gpu": "NVIDIA Labs"})
    monkeypatch.setenv("LABKIT_RECORDING", "nvidia-mine")
    assert recordings.recorded("other", SOURCE).attrs["provenance"]["label"].startswith("RECORDED on NVIDIA Labs")
    monkeypatch.setattr(machine, "mode", lambda: machine.Mode(False, "no GPU"))
    with pytest.raises(RecordingError, match="nvidia-mine has no recording of other"):
        recordings.recorded("other", SOURCE)


@pytest.mark.parametrize(("wish", "live"), [("recorded", False), (" Recorded ", False), ("", True), ("silly", True)])
def test_tables_are_live_unless_they_are_asked_for_as_recorded(gpu, monkeypatch, wish, live):
    monkeypatch.setenv("LABKIT_TABLES", wish)
    assert recordings.tables_are_live() == live
