"""The labs and the app in a real browser: cells run, widgets answer, nothing fails, nothing is asked of other hosts."""

import os
import shutil

import browser
import pytest

from labkit import build

LACKING = browser.missing()
if LACKING and os.environ.get("LABKIT_BROWSER") != "required":
    pytest.skip(f"browser tests were skipped: {LACKING}", allow_module_level=True)
LABS = {number: list(build.NOTEBOOKS.glob(f"{number}_*.ipynb")) for number in (10, 31, 40)}


@pytest.fixture(scope="module")
def visits(tmp_path_factory):
    """The app in Voila, and labs (copies) in JupyterLab: all are opened at once, in recorded mode."""
    assert not LACKING, LACKING
    labs, app = tmp_path_factory.mktemp("labs"), tmp_path_factory.mktemp("app")
    shutil.copytree(build.NOTEBOOKS, labs / "notebooks", ignore=shutil.ignore_patterns("solutions"))
    with (browser.served(labs, "--LabApp.expose_app_in_browser=True") as jupyterlab, browser.served(app, "--app") as voila,
          browser.browser() as context):
        opened = {"app": browser.Visit(context, voila(), "app")}
        yield opened | {number: browser.LabVisit(context, jupyterlab(), *path) for number, path in LABS.items() if path}


def change(locator, move):
    """Make a move, and wait until what stands there is another text."""
    from playwright.sync_api import expect
    before = locator.inner_text()
    move()
    expect(locator).not_to_have_text(before, use_inner_text=True)


def moves_by_keyboard_and_mouse(tab):
    """Move the sliders of the idle explorer, and wait each time for what it says."""
    said = tab.locator(".labkit-idle p")
    change(said, lambda: browser.press(tab, "labkit-batch", "ArrowRight"))
    change(said, lambda: browser.press(tab, "labkit-layers", "ArrowLeft"))
    change(said, lambda: browser.drag(tab, "labkit-width", to=1.0))
    change(said, lambda: browser.drag(tab, "labkit-batch", to=0.0))


def test_the_idle_explorer_of_lab_10_follows_keyboard_and_mouse(visits):
    with visits[10] as tab:
        moves_by_keyboard_and_mouse(tab)


def test_the_search_of_lab_31_follows_what_is_typed(visits):
    with visits[31] as tab:
        rows, field = tab.locator(".labkit-found tbody tr"), tab.locator(".labkit-search input")
        everything = rows.count()
        field.press_sequentially("linalg fails")
        change(tab.locator(".labkit-found p"), lambda: field.press("Enter"))
        assert 0 < rows.count() < everything and "linalg" in rows.first.inner_text()


@pytest.mark.skipif(not LABS[40], reason="there is no notebooks/40_*.ipynb yet")
def test_the_explorer_of_lab_40_measures_and_stops(visits):
    from playwright.sync_api import expect
    with visits[40] as tab:
        measure, stop, status = (tab.locator(f".labkit-{name}") for name in ("measure", "stop", "status"))
        change(tab.locator(".labkit-summary"), lambda: browser.press(tab, "labkit-batch", "ArrowRight"))
        before = browser.picture(tab, "labkit-chart")
        change(status, measure.click)
        change(status, stop.click)
        assert browser.picture(tab, "labkit-chart") != before
        measure.dblclick()
        change(status, stop.click)
        expect(measure).to_be_enabled()  # one Stop ends it all: the second press began nothing
        ended = status.inner_text()
        tab.wait_for_timeout(1000)
        assert status.inner_text() == ended


def test_the_app_follows_keyboard_and_mouse(visits):
    with visits["app"] as tab:
        tab.locator(".labkit-idle p").wait_for()
        assert tab.title() == "CUDA Graphs Lab" and "experiments." not in tab.locator("body").inner_text()
        moves_by_keyboard_and_mouse(tab)
