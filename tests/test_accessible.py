"""What a screen reader needs of every lab: headings in order, words for every picture and table, links that say where they lead."""

import re

import nbformat
import pytest

from labkit import build

LABS = pytest.mark.parametrize("path", build.solutions(), ids=lambda path: path.stem)
VAGUE = {"here", "this", "link", "click here", "read more", "more"}


def cells_of(path, kind):
    return [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == kind]


def prose(path):
    """Return a lab's Markdown without its code blocks."""
    return re.sub(r"```.*?```", "", "\n\n".join(cell.source for cell in cells_of(path, "markdown")), flags=re.S)


def out_of_order(levels):
    """Say whether headings of these levels do not begin with the only 1, or go down by more than one level at a time."""
    return levels[:1] != [1] or 1 in levels[1:] or any(level > before + 1 for before, level in zip(levels, levels[1:]))


@pytest.mark.parametrize("levels, wrong", [([1, 2, 3, 2], False), ([1], False), ([2, 3], True), ([1, 3], True), ([1, 2, 1], True), ([], True)])
def test_the_order_of_headings_is_judged(levels, wrong):
    assert out_of_order(levels) == wrong


@LABS
def test_headings_are_in_order_and_no_two_in_a_lab_are_the_same(path):
    headings = re.findall(r"^(#+) (.+)$", prose(path), re.M)
    assert not out_of_order([len(marks) for marks, _ in headings])
    assert len({words for _, words in headings}) == len(headings)


@LABS
def test_every_picture_has_a_description_in_words(path):
    pictures = [(cell.id, output) for cell in cells_of(path, "code") for output in cell.outputs if "image/png" in output.get("data", {})]
    without = [id for id, output in pictures if len(output.metadata.get("image/png", {}).get("alt", "").split()) < 5
               or output.data.get("text/plain", "").startswith("<")]
    assert not without and (pictures or path.stem.startswith("35"))  # that lab shows numbers only
    assert not re.search(r"!\[\s*\]\(|<img(?![^>]*\balt=)", prose(path))


@LABS
def test_tables_have_a_head_and_details_a_summary(path):
    html = "".join(output.data["text/html"] for cell in cells_of(path, "code") for output in cell.outputs if "text/html" in output.get("data", {}))
    assert html.count("<table") == html.count("<thead") and html.count("<details") == html.count("<summary")
    words = prose(path)
    assert words.count("<details>") == words.count("<details><summary>") == words.count("</details>")


@LABS
def test_links_say_where_they_lead(path):
    words = re.findall(r"(?<!!)\[([^\]]+)\]\(", prose(path))
    assert not [word for word in words if word.strip().lower() in VAGUE or word.startswith("http")]


@LABS
def test_nothing_is_told_by_colour_alone(path):
    """A colour that the prose names comes with a place or a word beside it, as in 'the upper lane' or 'the bars marked driver'."""
    assert not re.findall(r"(?i)\bthe (?:red|green|blue|orange|grey|purple|yellow) (?:ones?|line|bars?|points?|curve)\b(?! [a-z]+ is)", prose(path))
