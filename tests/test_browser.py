"""The labs and the app in a real browser: cells run, widgets answer, nothing fails, nothing is asked of other hosts."""

import re
import shutil

import browser
import nbformat
import pytest

from labkit import __main__ as cli
from labkit import build, claims

LABS = {number: path.stem for number in (10, 31, 40, 41, 70) for path in build.NOTEBOOKS.glob(f"{number}_*.ipynb")}


def shorten(path, words):
    """Leave in a lab only the cells that its widget needs: whole labs run in test_notebooks, and lab 40 here, too."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if any(word in cell.source for word in words)]
    assert len(notebook.cells) >= 3
    nbformat.write(notebook, path)


@pytest.fixture(scope="module")
def context():
    """One browser for all tests here."""
    browser.need()
    with browser.browser() as context:
        yield context


@pytest.fixture(scope="module")
def tabs(context, tmp_path_factory):
    """JupyterLab over a copy of the labs, and Voila with the app: two tabs, opened at once, in recorded mode."""
    labs, app = tmp_path_factory.mktemp("labs"), tmp_path_factory.mktemp("app")
    shutil.copytree(build.NOTEBOOKS, labs / "notebooks", ignore=shutil.ignore_patterns("solutions"))
    for number, words in ((10, ("banner()", "sweep = ", "explore(")), (31, ("banner()", "operations = ", "search(")),
                          (41, ("banner()", "guess = ", "swept = ", "launch_constants()", "middle = ", "def launches_us", "constants = ", "whatif(")),
                          (70, ("banner()", "tables = {", "guesses = {}", "scorecard_view.", "decide_view.", "board_view."))):
        shorten(labs / "notebooks" / f"{LABS[number]}.ipynb", words)
    with browser.served(labs, "--LabApp.expose_app_in_browser=True") as jupyterlab, browser.served(app, "--app") as voila:
        empty = re.sub("/lab/tree/[^?]+", "/lab", jupyterlab())  # the address without the first lab, which is not tested here
        yield {"labs": browser.Tab(context, empty), "app": browser.Tab(context, voila()), "folder": labs / "notebooks"}


def test_without_a_browser_tests_are_skipped_unless_they_are_required(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("LABKIT_BROWSER", raising=False)
    with pytest.raises(pytest.skip.Exception, match="browser tests were skipped: there is no chromium here"):
        browser.need()
    monkeypatch.setenv("LABKIT_BROWSER", "required")
    with pytest.raises(pytest.fail.Exception, match="LABKIT_BROWSER=required, but there is no chromium here"):
        browser.need()


def test_slides_can_be_read_from_the_back_row_and_go_by_arrow_keys(context, tmp_path):
    notebook = nbformat.read(build.solutions()[0], 4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("## Learn the four moves", "### Learn the four moves")  # an exercise can stand so low
    notebook.cells.insert(1, nbformat.v4.new_code_cell("first = 1  # a line that no screen is wide enough for" * 9))
    (tmp_path / "slides.html").write_text(cli.slides(notebook.cells), "utf-8")
    page, asked = context.new_page(), []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"file://{tmp_path}/slides.html")
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    for width, height in ((1920, 1080), (1280, 720)):
        page.set_viewport_size({"width": width, "height": height})
        assert page.locator("p, li, pre, img").count() > 50 and browser.unreadable(page) == []
    headings = page.locator("h1, h2, h3")
    assert "Ask the doctor" in headings.nth(1).inner_text() and headings.count() > 10
    assert page.get_by_text("For the teacher").count() == 0
    seen = []
    for key in ("ArrowRight", "PageDown", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
        seen.append(page.evaluate("""[...document.querySelectorAll("h1, h2, h3")].findIndex(h => h.getBoundingClientRect().top >= -5)"""))
    assert seen == [1, 2, 3, 2] and page.locator(":focus").inner_text().startswith(headings.nth(2).inner_text())
    page.screenshot(path=browser.SCREENSHOTS / "slides.png")
    for _ in range(headings.count()):
        page.keyboard.press("ArrowRight")
    last = browser.tab_through(page)  # on from the section that is shown, and not from the first
    assert 0 < len(last) < len(browser.tab_through(page))


@pytest.mark.parametrize("path", build.solutions(), ids=lambda path: path.stem[:2])
def test_each_labs_slides_fit_on_a_small_projector(context, tmp_path, path):
    (tmp_path / "slides.html").write_text(cli.slides(nbformat.read(path, 4).cells), "utf-8")
    page = context.new_page()
    page.set_viewport_size({"width": 1280, "height": 720})
    page.goto(f"file://{tmp_path}/slides.html")
    assert page.locator("p, li, pre, img").count() > 50 and browser.unreadable(page) == []
    page.close()


def change(locator, move):
    """Make a move, and wait until what stands there is another text."""
    from playwright.sync_api import expect
    before = locator.inner_text()
    move()
    expect(locator).not_to_have_text(before, use_inner_text=True)


def moves_by_keyboard_and_mouse(lab):
    """Move the sliders of the idle explorer, and wait each time for what it says."""
    said = lab.locator(".labkit-idle p")
    change(said, lambda: browser.press(lab, "labkit-batch", "ArrowRight"))
    change(said, lambda: browser.press(lab, "labkit-layers", "ArrowLeft"))
    change(said, lambda: browser.drag(lab, "labkit-width", to=1.0))
    change(said, lambda: browser.drag(lab, "labkit-batch", to=0.0))


def test_the_idle_explorer_of_lab_10_follows_keyboard_and_mouse(tabs):
    with tabs["labs"].lab(LABS[10]) as lab:
        moves_by_keyboard_and_mouse(lab)
        lab.locator(".labkit-layers .noUi-handle").focus()
        assert browser.tab_through(lab.page, ".labkit-batch .noUi-handle") == [["slider", "width"]]


def test_the_sliders_of_lab_41_go_by_keys(tabs):
    with tabs["labs"].lab(LABS[41]) as lab:
        said = lab.locator(".labkit-whatif p")
        said.wait_for()
        for name in ("batch", "cpu", "gpu-speed", "more-layers"):
            change(said, lambda name=name: browser.press(lab, f"labkit-{'whatif-' * (name == 'batch')}{name}", "ArrowRight"))
        lab.locator(".labkit-whatif-curve select").focus()
        assert browser.tab_through(lab.page, ".labkit-more-layers .noUi-handle") == [["slider", "batch"], ["slider", "CPU speed ×"], ["slider", "GPU speed ×"]]


def test_the_search_of_lab_31_follows_what_is_typed(tabs):
    from playwright.sync_api import expect
    with tabs["labs"].lab(LABS[31]) as lab:
        rows, field = lab.locator(".labkit-found tbody tr"), lab.locator(".labkit-search input")
        rows.first.wait_for()  # cells can have run before their widgets are drawn
        everything = rows.count()
        field.press_sequentially("linalg fails")
        for word in ("linalg", "fails"):  # each letter is an answer of its own: wait for the last
            expect(rows.filter(has_not_text=word)).to_have_count(0)
        assert 0 < rows.count() < everything


def test_lab_70_takes_guesses_by_keyboard_and_its_board_follows_a_folder(tabs):
    from playwright.sync_api import expect
    with tabs["labs"].lab(LABS[70]) as lab:
        cells, keys = lab.locator(".jp-Cell").count(), lab.page.keyboard
        lab.locator(".labkit-guess-share select").focus()
        for key in ("d", "d", "ArrowUp", "ArrowUp"):  # in a notebook, these would delete a cell and go to the one above
            keys.press(key)
        assert lab.locator(".jp-Cell").count() == cells
        keys.press("Tab")
        expect(lab.locator(".labkit-guesses")).to_contain_text("guesses = {'share': 'holds'}")
        expect(lab.locator(".labkit-guess-arithmetic select")).to_be_focused()
        row = lab.locator(".labkit-score-table tr", has_text="share, lab 10")
        expect(row.locator("td").first).to_have_text("holds")
        expect(row.locator("a")).to_have_attribute("href", f"{LABS[10]}.ipynb")
        lab.locator(".labkit-guess-limit-4 select").focus()
        after = list(claims.CLAIMS)[list(claims.CLAIMS).index("limit-4") + 1:]
        assert browser.tab_through(lab.page, ".labkit-score-table *") == [["combobox", name] for name in after]
        board = lab.locator(".labkit-board-status")
        expect(board).to_contain_text(f"labkit export --out {tabs['folder'] / 'class_results' / 'NAME.json'}")
        (tabs["folder"] / "class_results").mkdir()
        (tabs["folder"] / "class_results" / "<img src=x onerror=alert(1)>.json").write_text("{")
        expect(board).to_have_text("0 in class_results, 1 left out.", timeout=5_000)
        expect(lab.locator(".labkit-board-table li")).to_contain_text("_img src_x onerror_alert_1__.json is left out: it cannot be read")
        lab.locator(".labkit-decide-model input").focus()
        fields = browser.tab_through(lab.page, ".labkit-decide-decide")
        assert fields == [["textbox", "its inputs"], ["listbox", "batches"], ["spinbutton", "target, in ms"]]
        keys.press("Space")
        expect(lab.locator(".labkit-decide-status")).to_contain_text("Done")
        assert [name for _, name in browser.tab_through(lab.page, ".labkit-board-watch")] == ["Stop", "The rules"]
        keys.press("Tab")
        keys.press("Enter")
        expect(lab.locator("button.labkit-board-watch")).to_have_class(re.compile("mod-primary"))


def explores_batches(page):
    """Use the batch explorer in recorded mode: keys, the mouse, menus, Measure, Stop and a double press."""
    from playwright.sync_api import expect
    measure, stop, status, summary = (page.locator(f".labkit-{name}") for name in ("measure", "stop", "status", "summary"))
    chart = page.locator(".labkit-chart img")
    chart.wait_for()
    change(summary, lambda: browser.press(page, "labkit-batch", "ArrowRight"))
    expect(page.locator(".labkit-batch .noUi-handle")).to_have_attribute("aria-label", "batch")
    expect(page.locator(".labkit-batch .noUi-handle")).to_have_attribute("aria-valuetext", "2")
    change(summary, lambda: browser.drag(page, "labkit-batch", to=1.0))
    change(summary, lambda: page.locator(".labkit-model select").select_option("MLP"))
    change(summary, lambda: browser.drag(page, "labkit-width", to=1.0))
    page.locator(".labkit-view select").select_option("roofline")
    expect(chart).to_have_attribute("alt", re.compile("the floor is"))
    before = chart.get_attribute("src")
    change(status, measure.click)
    expect(status).to_contain_text(re.compile(r"[1-9] of \d+ points"))
    stop.press("Enter")  # by keyboard
    expect(status).to_contain_text("Stopped after")
    expect(chart).not_to_have_attribute("src", before)
    measure.dblclick()
    expect(status).to_contain_text("played back.")
    expect(status).not_to_contain_text("Stopped")
    stop.click()  # one Stop ends it all: the second press began nothing
    expect(status).to_contain_text("Stopped after")
    ended = status.inner_text()
    page.page.wait_for_timeout(1000)
    assert status.inner_text() == ended


def test_the_explorer_of_lab_40_measures_and_stops(tabs):
    with tabs["labs"].lab(LABS[40]) as lab:
        explores_batches(lab)


def test_the_app_explores_batches(tabs):
    with tabs["app"].watched("app") as app:
        app.locator(".labkit-chart img").wait_for()
        assert app.page.title() == "CUDA Graphs Lab" and "experiments." not in app.inner_text()
        for width, height in ((1920, 1080), (1280, 720)):
            app.page.set_viewport_size({"width": width, "height": height})
            assert browser.unreadable(app.page) == []
            assert app.locator(".labkit-chart img").evaluate("img => img.getBoundingClientRect().bottom < innerHeight")
        asked = browser.tab_through(app.page)
        assert asked == [["combobox", "model"], ["combobox", "precision"], ["combobox", "view"], ["slider", "length"], ["slider", "batches from"],
                         ["slider", "batches to"], ["slider", "batch"], ["button", "Measure"], ["button", "Stop"]]
        assert browser.tab_through(app.page, key="Shift+Tab") == asked[::-1]
        explores_batches(app)
