"The page of `esper-nb watch RUN --web` in real browsers: live, on a phone, after its terminal was closed."
import sys

import pytest

from conftest import ROOT, open_browser
sys.path.insert(0, str(ROOT/"tests"))
from test_web import begin, epoch, incident, run, served, write  # noqa: F401  # `run` is a fixture


@pytest.mark.parametrize("scheme, width", [("dark", 390), ("light", 1280)])
def test_a_run_is_drawn_while_it_goes_on(run, tmp_path, scheme, width):  # noqa: F811
    for number in range(1, 6): write(run, epoch(number))
    with open_browser(tmp_path, (width, 800)) as browser, served(run) as address:
        page = browser.page
        page.emulate_media(color_scheme=scheme)
        page.goto(address)
        page.locator(".esper-pill", has_text="running").wait_for()
        write(run, incident(6), epoch(6), epoch(7))
        page.locator(".esper-log", has_text="lane 1: non-finite").wait_for()
        page.get_by_role("combobox", name="selected lane").select_option("lane 1")
        page.get_by_role("img", name="lane 1").wait_for()
        page.locator(".esper-log [data-go]").first.click()
        page.locator(".esper-story", has_text="Lane 1, batch 12: non-finite").wait_for()
        wide = page.evaluate("""[...document.querySelectorAll("body *")].filter(
          e => e.getBoundingClientRect().right > innerWidth).map(e => e.className || e.tagName)""")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), wide
        assert browser.errors == []
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(17, 17, 17)" if scheme == "dark" else "rgb(255, 255, 255)")
        browser.shot(f"web-{scheme}-{width}")

def test_two_runs_lie_over_each_other(run, tmp_path):  # noqa: F811
    other = begin(tmp_path/"other")
    for number in range(1, 7):
        for folder in (run, other): write(folder, epoch(number)) # the picture ends where the slower run is
    write(other, incident(6))
    with open_browser(tmp_path, (390, 800)) as browser, served(run, beside=[other]) as address:
        page = browser.page
        page.goto(address)
        page.locator(".esper-log", has_text="other, lane 1: non-finite").wait_for()
        page.get_by_role("combobox", name="selected lane").select_option("other")
        page.get_by_role("img", name="other").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth") and browser.errors == []
        browser.shot("web-two-runs")

def test_a_page_says_when_its_terminal_is_closed(run, tmp_path):  # noqa: F811
    with open_browser(tmp_path, (390, 800)) as browser:
        with served(run) as address:
            browser.page.goto(address)
            browser.page.locator(".esper-pill").wait_for()
            assert browser.page.locator(".esper-gone").count() == 0
        browser.page.locator(".esper-gone").wait_for(timeout=20_000)
        assert "is the terminal closed?" in browser.page.locator(".esper-gone").inner_text()
