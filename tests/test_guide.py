"""Routes add up, name sections that exist, and fit their time; the guide and the README say what the labs say."""

import io
import re

import nbformat
import numpy as np
import pytest
from PIL import Image

from labkit import __main__ as cli
from labkit import build, guide

LABS = [pytest.param(path, id=path.stem) for path in build.solutions()]
UNTIMED = {"Takeaways", "Further reading"}
GRADED = re.compile(r"^\*(Warm-up|Core|Stretch), (\d+) minutes\.\*", re.M)


def sections_of(path):
    """Return {heading: its text} of a lab: each ## or ### that is not the instructor's, up to the next."""
    cells = [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "markdown"
             and "instructor" not in cell.metadata.get("tags", ())]
    _, *parts = re.split(r"^###? (.+)$", "\n".join(cells), flags=re.M)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("path", LABS)
def test_a_labs_sections_are_all_timed_in_order_and_add_up_to_its_minutes(path):
    lab = guide.lab(path)
    assert [section.title for section in lab.sections] == [title for title in sections_of(path) if title not in UNTIMED]
    assert sum(section.minutes for section in lab.sections) == lab.minutes


@pytest.mark.parametrize("path", LABS)
def test_an_exercise_has_a_grade_its_minutes_hints_and_says_what_unsolved_looks_like(path):
    timed = {section.title: section for section in guide.lab(path).sections}
    exercises = {title: text for title, text in sections_of(path).items() if title.startswith("Exercise ") or "discoveries" in title}
    assert exercises
    for title, text in exercises.items():
        grade, minutes = GRADED.search(text).groups()
        assert timed[title].minutes == int(minutes), title
        assert "<details><summary>Hint" in text and re.search(r"^\*Not solved yet looks like this:\* .*not attempted", text, re.M), title
        assert (grade == "Stretch") <= (timed[title].route == "self-study"), f"{title}: a stretch is for self-study"


@pytest.mark.parametrize("path", LABS)
def test_a_teacher_hears_goal_questions_wrong_answers_and_what_to_do_without_gpus(path):
    told = guide.lab(path).teacher
    for wanted in ("**Goal.**", "**Ask.**", "**Common wrong answers.**", "**If the GPUs fail.**"):
        assert told.count(wanted) == 1, wanted
    assert "|" not in told.replace("| 0 |", "") and "For the teacher" not in told


@pytest.mark.parametrize("route, lasts", list(guide.ROUTES.items()))
def test_routes_fit_their_time_with_room_for_questions(route, lasts):
    taught = guide.taught(route)
    assert lasts is None or 0.75 * lasts <= taught <= 0.93 * lasts
    assert lasts or taught == sum(lab.minutes for lab in guide.labs())


def test_a_longer_route_has_all_of_a_shorter_one():
    seen = set()
    for route in guide.ROUTES:
        now = {(lab.stem, section) for lab, sections, _ in guide.plan(route) for section in sections}
        assert seen < now
        seen = now


def test_the_guide_and_the_readme_are_up_to_date():
    hint = "run python -m labkit guide"
    text = guide.README.read_text("utf-8")
    assert guide.GUIDE.read_text("utf-8") == guide.markdown(), hint
    assert guide.readme(text) == text and guide.table() in text, hint
    assert guide.readme(text.replace("| half a day |", "| half |")) == text


def test_the_guides_clock_runs_from_nought_to_the_minutes_of_each_route():
    for route in guide.ROUTES:
        part = guide.markdown().partition(f"\n### {route[0].upper()}{route[1:]}\n")[2].partition("\n### ")[0].partition("\n## ")[0]
        rows = re.findall(r"^\| (\d+):(\d\d) \| (\d+) \|", part, re.M)
        begins = [60 * int(hours) + int(minutes) for hours, minutes, _ in rows]
        assert begins[0] == 0 and begins[1:] == [at + int(lasts) for at, (*_, lasts) in zip(begins, rows)][:-1]
        assert f"| {guide.clock(guide.taught(route))} | | | the end |" in part


@pytest.mark.parametrize("wrong", ["no table", "no minutes", "a route that is none"])
def test_a_lab_without_what_a_guide_needs_is_named(tmp_path, wrong):
    minutes, route = ("" if wrong == "no minutes" else "**Minutes:** 5"), "a week" if wrong == "a route that is none" else "self-study"
    row = "" if wrong == "no table" else f"| 5 | Begin | {route} |"
    cells = [nbformat.v4.new_markdown_cell(f"# Begin\n{minutes}"),
             nbformat.v4.new_markdown_cell(f"**For the teacher**\n\n{row}", metadata={"tags": ["instructor"]})]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "99_begin.ipynb")
    with pytest.raises(build.BuildError, match="99_begin.ipynb: a guide needs"):
        guide.lab(tmp_path / "99_begin.ipynb")


def test_the_page_to_print_stands_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(guide, "write", list)
    assert cli.main(["guide", "--out", str(tmp_path / "guide.html")]) == 0
    page = (tmp_path / "guide.html").read_text("utf-8")
    assert "Written: nothing" in capsys.readouterr().out and not re.search(r'(src|href)="http', page)
    assert page.count("<table>") >= 1 + len(guide.ROUTES) and 'lang="en"' in page and "{{" not in page
    assert all(lab.title in page for lab in guide.labs()) and page.count("<h2") == 4 - 1 + len(guide.labs())


def test_the_readmes_pictures_show_what_is_recorded():
    for path, chart in guide.pictures().items():
        drawn, kept = (np.asarray(Image.open(source).convert("RGB"), float) for source in (io.BytesIO(chart.png), path))
        assert drawn.shape == kept.shape and np.abs(drawn - kept).mean() < 1, f"{path.name}: run python -m labkit guide"  # of 255
