"""The report and the board: complete, self-contained, safe, and as they look and act in a browser."""

import base64
import copy
import csv
import io
import re
from html.parser import HTMLParser

import browser
import pytest
from made_up import LABEL, table

from labkit import __main__ as cli
from labkit import build, claims, report, results


@pytest.fixture(scope="module")
def tables():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_TABLES", "recorded")
        return results.gather()[0]


@pytest.fixture(scope="module")
def page(tables):
    return report.page(tables, {"moon_sweep": "out of <b>memory</b>"}, build.NOTEBOOKS.parent)


@pytest.fixture(scope="module")
def board(tables):
    one = results.collect(tables)
    two = copy.deepcopy(one)
    two["machine"]["gpu"] = "NVIDIA L4"
    del two["verdicts"]["share"], two["tables"]["sweep_llama"]
    return report.board({"NVIDIA H200": one, "NVIDIA L4": two}, ["x.json is left out: <i>why</i>"], build.NOTEBOOKS.parent)


class Elements(HTMLParser):
    """All start tags of a page, and its text."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def all(self, *names):
        return [attrs for tag, attrs in self.tags if tag in names]


def test_each_claim_stands_with_its_verdict_number_reason_rule_and_lab(page, tables):
    text = " ".join(Elements(page).text.split())
    for verdict in results.judged(tables):
        said = (verdict.claim.statement, verdict.verdict, verdict.why, verdict.claim.bounds, verdict.claim.meaning,
                f"{verdict.claim.id}, lab {verdict.claim.lab}", verdict.provenance["label"],
                "%" if verdict.unit == "share" else verdict.unit)
        assert all(" ".join(word.split()) in text for word in said)


def test_every_picture_is_there_with_its_words_and_where_it_is_from(page):
    pictures = Elements(page).all("img")
    assert len(pictures) == len(report.PICTURES)
    for picture in pictures:
        assert base64.b64decode(picture["src"].removeprefix("data:image/png;base64,")).startswith(b"\x89PNG")
        assert len(picture["alt"]) > 60 and "RECORDED on NVIDIA H200" in picture["alt"]


def test_every_table_can_be_kept_as_csv_with_its_numbers(page, tables):
    links = {link["download"]: link["href"] for link in Elements(page).all("a") if "download" in link}
    assert set(links) == {f"{name}.csv" for name in tables}
    rows = list(csv.DictReader(io.StringIO(base64.b64decode(links["sweep_gpt2.csv"].partition(",")[2]).decode())))
    wanted = tables["sweep_gpt2"]
    assert [float(row["speedup"] or "nan") for row in rows] == pytest.approx(list(wanted["speedup"]), nan_ok=True)
    assert not {"eager_gpu_us", "samples"} & rows[0].keys() and "Without its lists: eager_launch_at_us" in Elements(page).text


@pytest.mark.parametrize("which", ["page", "board"])
def test_a_page_holds_all_it_shows_and_runs_nothing(which, request):
    html = request.getfixturevalue(which)
    elements = Elements(html)
    assert not elements.all("script", "link", "iframe", "object", "form")
    links = [value for _, attrs in elements.tags for name, value in attrs.items() if name in ("src", "href", "srcset")]
    labs = [link for link in links if not link.startswith(("data:", "#"))]
    assert labs and all((build.NOTEBOOKS.parent / link).is_file() for link in labs)  # what nothing is fetched for until it is clicked
    assert not [name for _, attrs in elements.tags for name in attrs if name.startswith("on")]
    assert re.search(r"default-src 'none'", html) and len(html.encode()) < report.LARGEST


def test_a_page_that_lies_elsewhere_links_to_no_lab(tables, tmp_path):
    html = report.page({"launch_cost": tables["launch_cost"]}, folder=tmp_path)
    assert ".ipynb" not in html and "launch-cost, lab 10" in html


def test_a_flag_is_not_broken_at_its_hyphens_and_other_markup_is_only_text():
    said = str(report.TEMPLATES.filters["whole"]("give <b> --enforce-eager alone - or --no-enforce-eager."))
    assert said == ('give &lt;b&gt; <span class="whole">--enforce-eager</span> alone - or <span class="whole">--no-enforce-eager</span>.')


def test_what_is_missing_or_left_out_is_named_and_its_markup_is_only_text(page, board):
    assert "moon_sweep: out of <b>memory</b>" in Elements(page).text
    assert "x.json is left out: <i>why</i>" in Elements(board).text
    assert not Elements(page).all("b") and not Elements(board).all("i")


def test_a_report_on_few_tables_says_which_claims_were_not_measured(tables):
    few = {name: tables[name] for name in ("launch_cost", "capture_cost")}
    text = Elements(report.page(few)).text
    unknown = text[text.index("Not measured: "):].partition("Pictures")[0]
    named = [id for id, claim in claims.CLAIMS.items() if f"{id}" in unknown.split()]
    assert named == [id for id, claim in claims.CLAIMS.items() if not {*claim.experiments} & {*few}] and "It needs idle_sweep." in unknown


def test_a_report_without_verdicts_or_pictures_has_no_empty_headings(tables):
    elements = Elements(report.page({"ceilings": tables["ceilings"]}))
    targets = {attrs["id"] for _, attrs in elements.tags if "id" in attrs}
    assert {link["href"][1:] for link in elements.all("a") if link["href"].startswith("#")} <= targets
    assert "Pictures" not in elements.text and "profiler" not in elements.text.partition("How it was measured")[0] and not elements.all("img") and "ceilings.csv" in elements.text


def test_a_table_without_a_column_costs_only_what_needs_it(tables):
    broken = tables["launch_cost"].drop(columns="layer")
    html = report.page({"launch_cost": broken, "replay_cost": tables["replay_cost"]})
    assert "is judged on launch_cost; the table given has no" in Elements(html).text and len(Elements(html).all("img")) == 1


def test_a_table_without_what_a_picture_shows_costs_only_that_picture(tables, monkeypatch):
    empty = table([{"kernels": 1, "break_even_calls": None, "saving_us": -1.0, "pool_bytes": 2.0**20}])
    monkeypatch.setattr(results, "machine_of", lambda tables: {"gpu": "made up"})
    monkeypatch.setattr(report, "_method", lambda tables: {"unit": "µs"})
    html = report.page({"capture_cost": empty, "launch_cost": tables["launch_cost"]})
    assert len(Elements(html).all("img")) == 1 and LABEL in html and re.search("<li>capture_cost: ", html)


def test_the_board_shows_each_gpu_and_what_it_did_not_measure(board):
    elements = Elements(board)
    text = " ".join(elements.text.split())
    assert len(elements.all("img")) == 4 and "their numbers are not ours" in text and text.count("not judged") == 1
    assert all("NVIDIA L4" in picture["alt"] for picture in elements.all("img")[:3])
    assert "NVIDIA L4" not in elements.all("img")[3]["alt"] and not re.search(r"\b(nan|None)\b", text)


def test_the_board_draws_the_size_that_most_have_and_names_the_others(tables):
    one = results.collect(tables)
    odd = copy.deepcopy(one)
    for row in odd["tables"]["sweep_gpt2"]:
        row["width"] += 1
    elements = Elements(report.board({"Odd": odd} | {f"GPU {number}": one for number in range(9)}))
    alts = [picture["alt"] for picture in elements.all("img")]
    assert "Odd" not in alts[2] and "GPU 0" in alts[2] and "GPU 6" in alts[2] and "GPU 7" not in alts[2]  # seven can be told apart
    assert "Not drawn, as other sizes were measured, or too many: Odd, GPU 7, GPU 8." in elements.text


def test_a_page_that_grows_too_large_is_refused(tables, monkeypatch):
    monkeypatch.setattr(report, "LARGEST", 10_000)
    with pytest.raises(results.ResultsError, match="the page would take .* put less on it"):
        report.page({"launch_cost": tables["launch_cost"]})


def test_the_command_writes_a_new_page_each_time(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LABKIT_TABLES", "recorded")
    assert cli.main(["report", "launch_cost"]) == cli.main(["report", "launch_cost"]) == 0
    assert len(list(tmp_path.glob("report-nvidia-h200-*.html"))) == 2
    assert cli.main(["report", "launch_cost", "--out", "my/page.html"]) == 0 and (tmp_path / "my" / "page.html").exists()
    assert cli.main(["report", "moon"]) == 1 and "no experiment is called moon" in capsys.readouterr().err


# ---- in a browser

@pytest.fixture(scope="module")
def opened(page, board, tmp_path_factory):
    browser.need()
    folder = tmp_path_factory.mktemp("pages")
    with browser.browser() as context:
        tabs = {}
        for name, html in (("page", page), ("board", board)):
            (folder / f"{name}.html").write_text(html, "utf-8")
            tab = tabs[name] = context.new_page()
            tab.trouble = []
            tab.on("request", lambda request, tab=tab: tab.trouble.append(request.url) if not request.url.startswith(
                ("data:", "file:")) else None)
            tab.on("console", lambda message, tab=tab: tab.trouble.append(message.text))
            tab.on("pageerror", lambda error, tab=tab: tab.trouble.append(str(error)))
            tab.goto((folder / f"{name}.html").as_uri())
            tab.screenshot(path=browser.SCREENSHOTS / f"report-{name}.png", full_page=True)
        yield tabs


@pytest.mark.parametrize("which", ["page", "board"])
def test_in_a_browser_it_asks_nobody_and_all_has_names(opened, which):
    tab = opened[which]
    assert tab.trouble == []
    loaded = tab.evaluate("[...document.images].map(i => [i.complete && i.naturalWidth > 0, i.alt.length > 60])")
    assert loaded and all(all(one) for one in loaded)
    levels = tab.evaluate("[...document.querySelectorAll('h1,h2,h3')].map(h => +h.tagName[1])")
    assert levels[0] == 1 and levels.count(1) == 1 and all(b - a <= 1 for a, b in zip(levels, levels[1:]))
    assert tab.evaluate("document.documentElement.lang") == "en" and tab.title().startswith("CUDA Graphs on ")
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("which", ["page", "board"])
def test_tab_reaches_all_that_can_be_used_and_shows_where_it_is(opened, which):
    tab = opened[which]
    stops = browser.tab_through(tab)
    assert len(stops) >= tab.locator("a, summary").count() > 3
    assert len(set(map(tuple, stops))) == len(stops)  # no two are told alike


def test_a_table_is_kept_by_a_click_and_a_rule_opens_by_keyboard(opened):
    tab = opened["page"]
    with tab.expect_download() as started:
        tab.get_by_role("link", name="launch_cost.csv").click()
    assert open(started.value.path()).readline().startswith("what,layer,kernels,cost_us")
    rule = tab.locator("#claim-share details")
    rule.locator("summary").focus()
    tab.keyboard.press("Enter")
    assert rule.get_attribute("open") is not None and rule.get_by_text("holds when half of the transformers").is_visible()


def test_dark_light_narrow_and_printed(opened):
    tab = opened["page"]

    def contrast():
        ink, paper = (tab.evaluate(f"getComputedStyle(document.body).{what}.match(/\\d+/g).map(Number)") for what in (
            "color", "backgroundColor"))
        return sum(ink) - sum(paper)

    for media in ({"color_scheme": "dark"}, {"color_scheme": "light"}, {"media": "print", "color_scheme": "light"}):
        tab.emulate_media(**media)
        assert contrast() > 500 if media["color_scheme"] == "dark" else contrast() < -500
    rule = tab.locator("details", has=tab.locator("summary[aria-label^='The rule']")).first
    printed = rule.bounding_box()["height"]
    tab.emulate_media(media="screen")
    assert printed > 2 * rule.bounding_box()["height"]  # on paper nobody can open it
    tab.emulate_media(media="print")
    assert not tab.get_by_role("link", name="launch_cost.csv").is_visible()  # a link that paper cannot follow
    tab.emulate_media(media="screen")
    tab.set_viewport_size({"width": 400, "height": 800})
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
