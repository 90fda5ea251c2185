"""The HTML report as a browser shows it, where the machine has a Chromium."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from recordings import FAILED, UNAVAILABLE, graph, many, recording, served

from composer.telemetry.html import render
from composer.telemetry.recording import Recording

pytestmark = pytest.mark.thorough

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror='document.title=1'>"
ONE = [recording(graph(UNAVAILABLE, FAILED, served("inductor", 2.0, 1.0), calls=3, run=0.1))]

CONTRASTS = """() => {
  const parsed = (color) => color.match(/[\\d.]+/g).map(Number);
  const linear = (c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const color = parsed(getComputedStyle(e).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const e of document.querySelectorAll("body *")) {
    const texts = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!texts || !e.offsetParent) continue;
    const a = light(parsed(getComputedStyle(e).color)), b = light(behind(e));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push([e.className || e.tagName, e.textContent.slice(0, 30), ratio]);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


class Shown:
    """A report in a page of the browser, with all that the page complained of or asked for."""

    def __init__(self, browser: Any, folder: Path) -> None:
        self.browser = browser
        self.file = folder / "report.html"
        self.said: list[str] = []
        self.asked: list[str] = []

    def open(self, recordings: Sequence[Recording], width: int = 1400, **context: Any) -> Any:
        self.file.write_text(render(recordings), encoding="utf-8")
        page = self.browser.new_page(viewport={"width": width, "height": 900}, **context)
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto(self.file.as_uri())
        return page


@pytest.fixture
def shown(browser: Any, tmp_path: Path) -> Iterator[Shown]:
    shown = Shown(browser, tmp_path)
    yield shown
    for context in browser.contexts:
        context.close()
    assert shown.said == []
    assert shown.asked == [shown.file.as_uri()]


LONG = "x" * 3000
ALL_LONG = replace(FAILED, backend=LONG, message=LONG, error_type=LONG, engine={LONG: LONG})
NAMED_LONG = [recording(graph(ALL_LONG, served(LONG, 1.0), model=LONG, graph_id=LONG, device=LONG))]


@pytest.mark.parametrize("recordings", [ONE, many(300), NAMED_LONG], ids=["1", "300", "long names"])
def test_page_does_not_scroll_sideways(shown: Shown, recordings: list[Recording]) -> None:
    """Neither on a desk nor on a phone, with the first graph opened."""
    page = shown.open(recordings)
    page.click(".opener >> nth=0")
    for width in (1400, 800, 390):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") == width


def test_everything_is_within_the_page_on_a_phone(shown: Shown) -> None:
    """Tables fold rather than stick out, and the measured times stay readable."""
    page = shown.open(many(12), width=390)
    page.click(".opener >> nth=2")
    stick_out = "[...document.querySelectorAll('main table')].filter(each => each.offsetParent"
    stick_out += " && each.getBoundingClientRect().right > 390 - 16 + 0.5).map(e => e.className)"
    assert page.evaluate(stick_out) == []
    assert page.locator(".race >> nth=0").bounding_box()["width"] > 100


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(shown: Shown, scheme: str) -> None:
    """Contrast of 4.5 to 1 or more, as WCAG asks for at level AA."""
    page = shown.open(many(12), color_scheme=scheme)
    for opener in page.query_selector_all(".opener")[:6]:
        opener.click()
    assert page.evaluate(CONTRASTS) == []
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")


def test_click_on_a_graph_shows_its_traceback(shown: Shown) -> None:
    """In place, and another click closes it."""
    page = shown.open(ONE)
    trace = page.locator("#graphs pre")
    page.click(".graphs tr.graph td.model")
    assert trace.is_visible()
    assert "RuntimeError: no kernel for aten.roll" in trace.inner_text()
    page.click(".graphs tr.graph td.model")
    assert not trace.is_visible()


def test_filters_leave_the_graphs_that_fit(shown: Shown) -> None:
    """By engine, by an attempt's outcome, by words; a reason's link fills in the words."""
    page = shown.open(many(60))
    rows = page.locator(".graphs tr.graph:visible")
    page.select_option("#engine", "eager")
    eager = rows.count()
    assert 0 < eager < 60
    assert page.inner_text("#shown") == f"{eager} of 60 graphs"
    page.select_option("#status", "rejected")
    assert rows.count() == 0
    page.click("[data-find=returned_original]")
    assert page.input_value("#find") == "returned_original"
    rejected = rows.count()
    assert 0 < rejected < 60
    page.fill("#find", "returned_original Loss_OF")
    assert 0 < rows.count() < rejected
    page.fill("#find", "no such thing")
    assert page.inner_text("#shown") == "0 of 60 graphs"


def test_headings_sort_the_graphs(shown: Shown) -> None:
    """Numbers the largest first, then the smallest; said to screen readers."""
    page = shown.open(many(12))
    rows = "[...document.querySelectorAll('.graphs tr.graph')]"
    seconds = f"{rows}.map((row) => Number(row.cells[6].dataset.key))"
    heading = page.get_by_role("columnheader", name="Compile s")
    heading.get_by_role("button").click()
    found = page.evaluate(seconds)
    assert found == sorted(found, reverse=True)
    assert heading.get_attribute("aria-sort") == "descending"
    heading.get_by_role("button").click()
    assert page.evaluate(seconds) == sorted(found)


def test_keyboard_does_all_that_a_mouse_does(shown: Shown) -> None:
    """``/`` finds, arrows go from graph to graph, Enter and space open and close."""
    page = shown.open(many(12))
    page.keyboard.press("/")
    page.keyboard.type("tensorrt")
    assert page.input_value("#find") == "tensorrt"
    page.focus(".opener >> nth=0")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    opener = page.locator(".opener >> nth=1")
    assert opener.get_attribute("aria-expanded") == "true"
    assert page.locator("#graph-2 .attempts").is_visible()
    page.keyboard.press(" ")
    assert opener.get_attribute("aria-expanded") == "false"
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.closest('tbody').id") == "graph-12"


def test_row_of_the_timeline_leads_to_its_graph(shown: Shown) -> None:
    """Which is opened, even where a filter hid it."""
    page = shown.open(many(12))
    page.fill("#find", "no such thing")
    page.click(".timeline .row >> nth=4")
    assert page.locator("#graph-5 .attempts").is_visible()
    assert page.inner_text("#shown") == "12 graphs"


def test_timeline_zooms_and_keeps_a_bar_in_view(shown: Shown) -> None:
    """Wider than the window by as much as asked for; rows scrolled to show their bars."""
    page = shown.open(many(100))
    width = "document.querySelector('.chart').scrollWidth"
    before = page.evaluate(width)
    page.fill("#zoom", "5")
    assert page.evaluate(width) > 20 * before
    page.evaluate("document.querySelector('.timeline').scrollTop = 1000")
    page.wait_for_function(
        """() => {
          const view = document.querySelector(".timeline").getBoundingClientRect();
          return [...document.querySelectorAll(".row .bar")].some((bar) => {
            const box = bar.getBoundingClientRect();
            return box.top > view.top && box.bottom < view.bottom
              && box.right > view.left && box.left < view.right;
          });
        }"""
    )
    assert page.locator(".tick:visible").count() > 10


def test_text_of_a_record_runs_nothing(shown: Shown) -> None:
    """Markup in a message, a name, a traceback is text, also where a script puts it."""
    attempt = replace(FAILED, backend=HOSTILE, message=HOSTILE, traceback=HOSTILE)
    page = shown.open([recording(graph(attempt, model=HOSTILE, graph_id=HOSTILE))])
    page.click(".opener")
    assert page.inner_text("#graphs pre") == HOSTILE
    assert page.title() == "composer: 1 graph"
    assert page.locator("img").count() == 0


def test_page_works_without_javascript(shown: Shown) -> None:
    """A graph opens, its traceback is a link away, and no dead controls are shown."""
    page = shown.open(ONE, java_script_enabled=False)
    assert not page.locator("#find").is_visible()
    page.click("#graphs summary")
    assert page.locator("#graphs .attempts").is_visible()
    page.click("a.trace")
    assert re.search(r"#traceback-1$", page.url)
    assert page.locator("#errors summary").is_visible()


def test_page_of_a_thousand_graphs_answers(shown: Shown) -> None:
    """All that a session keeps: opened, filtered and sorted within seconds."""
    page = shown.open(many(1000, processes=4))
    page.set_default_timeout(5000)
    page.fill("#find", "export_failed")
    page.click(".graphs > thead th:nth-child(8) button")
    page.click(".graphs > tbody:not([hidden]) .opener >> nth=0")
    assert page.locator(".graphs > tbody.open").count() == 1
    assert page.locator(".timeline .row").count() == 1000


def test_page_of_nothing_is_a_page(shown: Shown) -> None:
    """Without a script's error."""
    assert "Nothing was compiled" in shown.open([]).inner_text("h1")


def test_tables_and_charts_are_named(shown: Shown) -> None:
    """Each heading of a table has a scope, each graph of the timeline says its pieces."""
    page = shown.open(ONE)
    assert page.locator("th:not([scope])").count() == 0
    told = re.compile("onnxrt failed 400 ms; inductor succeeded 2.00 s")
    assert page.get_by_role("link", name=told).count() == 1
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map(h => +h.tagName[1])")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
