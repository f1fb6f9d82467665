"""The page in a real browser: headless Chromium.

Without Chromium these tests are skipped, except where CI or SIGMERGE_REQUIRE_BROWSER is set.
SIGMERGE_SCREENSHOTS names a folder that keeps the pictures.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from sigmerge.lab.analysis.experiment import Analysis
from sigmerge.lab.analysis.experiment import page as experiment_page
from sigmerge.lab.analysis.results import Results
from sigmerge.pages.page import write_page
from sigmerge.pages.tuning import write_tuning_page
from tests.lab.analysis import samples

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
REQUIRED = bool(os.environ.get("CI") or os.environ.get("SIGMERGE_REQUIRE_BROWSER"))


def absent(what: str) -> None:
    message = f"{what} is not installed; the page is not tested in a browser"
    if REQUIRED:
        pytest.fail(message)
    pytest.skip(message)


class Browser:
    """A Chromium with one page open."""

    def __init__(self, chromium: str, driver: str, profile: Path) -> None:
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        service = webdriver.ChromeService(executable_path=driver)
        self.driver = webdriver.Chrome(options=options, service=service)

    def open(
        self, page: Path, *, width: int = 1200, scheme: str = "light", media: str = ""
    ) -> None:
        self.emulate(scheme, media)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get("about:blank")
        self.log("browser"), self.log("performance")
        self.driver.get(page.as_uri())
        self.js("localStorage.clear(); delete document.documentElement.dataset.theme")

    def emulate(self, scheme: str, media: str = "") -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        emulated = {"media": media, "features": features}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", emulated)

    def js(self, script: str):
        return self.driver.execute_script(script)

    def wait(self, script: str) -> None:
        """Until the script returns what is true; layout and scrolling take a moment."""
        from selenium.webdriver.support.wait import WebDriverWait

        WebDriverWait(self.driver, 20).until(lambda _: self.js(script))

    def log(self, kind: str) -> list[dict]:
        return self.driver.get_log(kind)

    def screenshot(self, path: Path) -> bytes:
        box = self.js("const r = document.documentElement; return [r.scrollWidth, r.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": box[0], "height": box[1], "scale": 1}
        whole = {"captureBeyondViewport": True, "clip": clip}
        picture = self.driver.execute_cdp_cmd("Page.captureScreenshot", whole)["data"]
        path.write_bytes(base64.b64decode(picture))
        return path.read_bytes()

    def tabs(self) -> Iterator[str]:
        """Opens one run after the other."""
        for tab in self.driver.find_elements("css selector", "[role=tab]"):
            tab.click()
            yield tab.text

    def hover(self, mark) -> str:
        """What the pointer reads on a mark."""
        from selenium.webdriver import ActionChains

        # The first move scrolls, which hides the tip; the second one reads.
        actions = ActionChains(self.driver, duration=0).move_to_element(mark)
        actions.pause(0.1).move_by_offset(1, 0).perform()
        return self.driver.find_element("id", "tip").text


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not chromium or not driver:
        absent("Chromium" if not chromium else "chromedriver")
    try:
        import selenium  # noqa: F401
    except ImportError:
        absent("selenium")
    browser = Browser(chromium, driver, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.driver.quit()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven anchors, six layers."""
    path = tmp_path_factory.mktemp("pages") / "demo.html"
    write_page(path, samples.demo())
    return path


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One anchor, 32 layers."""
    path = tmp_path_factory.mktemp("pages") / "deep.html"
    write_page(path, [samples.run("TIES", layers=32)])
    return path


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tuning of twelve calls."""
    path = tmp_path_factory.mktemp("pages") / "tuned.html"
    write_tuning_page(path, samples.tuned())
    return path


@pytest.fixture(scope="module")
def analysed(
    tmp_path_factory: pytest.TempPathFactory, results: Results, analysis: Analysis
) -> Path:
    """The page of an experiment."""
    path = tmp_path_factory.mktemp("pages") / "experiment.html"
    path.write_text(experiment_page(results, analysis, "Two pools"), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("SIGMERGE_SCREENSHOTS")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("pictures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_nothing_is_complained_about_and_nothing_is_loaded(browser: Browser, demo: Path):
    browser.open(demo)
    list(browser.tabs())
    assert browser.log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.log("performance")]
    asked = [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]
    assert {url for url in asked if not url.startswith("data:")} == {demo.as_uri()}
    assert browser.js("return performance.getEntriesByType('resource').length") == 0


def test_the_policy_stops_requests(browser: Browser, demo: Path):
    browser.open(demo)
    blocked = browser.driver.execute_async_script(
        "fetch('http://localhost:9/').catch(() => 0).finally(() => 0);"
        "document.addEventListener('securitypolicyviolation',"
        " event => arguments[0](event.effectiveDirective))"
    )
    assert blocked == "connect-src"


@pytest.mark.parametrize("width", [400, 1200])
def test_every_plot_is_drawn(browser: Browser, demo: Path, deep: Path, width: int):
    # A plot is drawn when it is wide, holds marks with an extent, and no label leaves its card.
    script = """
      return [...document.querySelectorAll('svg.plot')].filter(p => p.checkVisibility()).map(p => {
        const card = p.closest('figure').getBoundingClientRect();
        const extent = [...p.querySelectorAll('[data-tip]')].map(m => m.getBoundingClientRect());
        const outside = [...p.querySelectorAll('text')].filter(t => {
          const box = t.getBoundingClientRect();
          return box.left < card.left || box.right > card.right || box.bottom > card.bottom;
        });
        return {name: p.getAttribute('aria-label'), width: p.getBoundingClientRect().width,
                marks: extent.filter(b => b.width > 0 && b.height > 0).length,
                all: extent.length, outside: outside.map(t => t.textContent)};
      })"""
    for page, plots in ((demo, 12), (deep, 11)):
        browser.open(page, width=width)
        for _ in browser.tabs() if page is demo else [""]:
            drawn = browser.js(script)
            assert len(drawn) == plots
            for plot in drawn:
                assert plot["width"] > 280, plot
                assert plot["marks"] == plot["all"] > 0, plot
                assert plot["outside"] == [], plot


def test_hover_shows_the_exact_value(browser: Browser, demo: Path):
    browser.open(demo)
    plots = browser.driver.find_elements("css selector", "#run-1 svg.plot, .overview svg.plot")
    assert len(plots) == 12
    for plot in plots:
        mark = plot.find_elements("css selector", "[data-tip]")[-1]
        told = mark.get_attribute("data-tip").replace("\t", "\n").split("\n")
        read = browser.hover(mark)
        assert read and all(word in read for word in told), (told, read)


def test_tip_stays_inside_a_narrow_window(browser: Browser, demo: Path):
    browser.open(demo, width=400)
    for mark in browser.driver.find_elements("css selector", "#run-1 .tile:last-child")[:2]:
        assert browser.hover(mark)
        left, right = browser.js(
            "const b = document.getElementById('tip').getBoundingClientRect();"
            "return [b.left, b.right]"
        )
        assert left >= 0 and right <= 400


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_dark_and_light(browser: Browser, demo: Path, deep: Path, pictures: Path, scheme: str):
    for page in (demo, deep):
        browser.open(page, scheme=scheme)
        assert len(browser.screenshot(pictures / f"{page.stem}-{scheme}.png")) > 50_000
    assert_readable(browser, scheme)
    browser.driver.find_element("id", "theme").click()
    assert_readable(browser, "dark" if scheme == "light" else "light")


def assert_readable(browser: Browser, scheme: str) -> None:
    def luminance(property: str) -> float:
        colour = browser.js(f"return getComputedStyle(document.body).{property}")
        channels = [int(c) / 255 for c in colour.strip("rgb()").split(",")]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    paper, ink = luminance("backgroundColor"), luminance("color")
    assert (paper > ink) == (scheme == "light")
    assert (max(paper, ink) + 0.05) / (min(paper, ink) + 0.05) > 10


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_does_not_scroll_sideways(
    browser: Browser, demo: Path, deep: Path, pictures: Path, scheme: str
):
    for page in (demo, deep):
        browser.open(page, width=400, scheme=scheme)
        browser.screenshot(pictures / f"{page.stem}-narrow-{scheme}.png")
        browser.js("document.querySelectorAll('details').forEach(d => { d.open = true })")
        for _ in browser.tabs() if page is demo else [""]:
            assert browser.js("return document.documentElement.scrollWidth <= innerWidth")
            assert browser.js("return innerWidth") == 400


@pytest.mark.parametrize("width", [400, 1280])
def test_an_experiments_page_shows_what_matters(
    browser: Browser, analysed: Path, pictures: Path, width: int
):
    """No column of the first table is cut off, the page stays in the window, figures have a size
    at which they can be read."""
    browser.open(analysed, width=width)
    browser.screenshot(pictures / f"experiment-{width}.png")
    assert browser.js("return document.documentElement.scrollWidth <= innerWidth")
    assert browser.js(
        "const box = document.querySelector('.whole'); return box.scrollWidth <= box.clientWidth"
    )
    sizes = browser.js(
        "return [...document.querySelectorAll('.plots img')].map(i => i.clientWidth)"
    )
    assert len(sizes) == 11 and min(sizes) > 700


OVERFLOW = """
  const bad = [];
  for (const e of document.querySelectorAll('body *')) {
    if (!e.checkVisibility() || e.closest('svg')) continue;
    const how = getComputedStyle(e);
    if (how.clipPath !== 'none' || e.closest('caption, #tip')) continue;
    const clips = /auto|scroll|hidden/.test(how.overflowX + how.overflowY);
    const name = `${e.tagName}.${e.className} ${e.textContent.trim().slice(0, 40)}`;
    if (clips && (e.scrollWidth > e.clientWidth || e.scrollHeight > e.clientHeight)) {
      bad.push(`scrolls: ${name}`);
    }
    const box = e.getBoundingClientRect();
    if (box.right > innerWidth + 1 || box.left < -1) bad.push(`leaves the window: ${name}`);
    const cell = e.closest('.table');
    if (cell && !e.closest('thead') && box.right > cell.getBoundingClientRect().right + 1) {
      bad.push(`leaves its table: ${name}`);
    }
  }
  if (document.documentElement.scrollWidth > innerWidth) bad.push('the page scrolls sideways');
  const body = parseFloat(getComputedStyle(document.body).fontSize);
  for (const plot of document.querySelectorAll('svg.plot')) {
    if (!plot.checkVisibility()) continue;
    const scale = plot.getBoundingClientRect().width / plot.viewBox.baseVal.width;
    if (12 * scale > body) bad.push(`large text: ${plot.getAttribute('aria-label')}`);
  }
  return bad;"""


@pytest.mark.parametrize("width", [360, 390, 768, 900, 1400, 1600])
def test_nothing_scrolls_inside_the_page(
    browser: Browser, demo: Path, deep: Path, tuned: Path, pictures: Path, width: int
):
    """Not a table, a row of tabs or a recipe; and a chart's text is no larger than the page's."""
    for page in (demo, deep, tuned):
        browser.open(page, width=width)
        browser.screenshot(pictures / f"{page.stem}-{width}.png")
        browser.js("document.querySelectorAll('details').forEach(d => { d.open = true })")
        assert browser.js("return innerWidth") == width
        assert browser.js(OVERFLOW) == [], page
    browser.open(demo, width=width)
    for _ in browser.tabs():
        assert browser.js(OVERFLOW) == []


def test_a_finger_reads_the_exact_value(browser: Browser, demo: Path):
    browser.open(demo, width=390)
    browser.js(
        "document.querySelector('.run:not([hidden]) .band').scrollIntoView({block: 'center'})"
    )
    browser.wait("return scrollY > 0")
    at = browser.js(
        "const r = document.querySelector('.run:not([hidden]) .band').getBoundingClientRect();"
        "return {x: r.x + r.width / 2, y: r.y + r.height / 2}"
    )
    for kind, points in (("touchStart", [at]), ("touchEnd", [])):
        event = {"type": kind, "touchPoints": points}
        browser.driver.execute_cdp_cmd("Input.dispatchTouchEvent", event)
    browser.wait("return !document.getElementById('tip').hidden")
    assert "anchor" in browser.driver.find_element("id", "tip").text


def test_tabs_show_one_run_at_a_time(browser: Browser, demo: Path, pictures: Path):
    from selenium.webdriver.common.keys import Keys

    browser.open(demo)
    shown = "return [...document.querySelectorAll('.run')].filter(r => !r.hidden).map(r => r.id)"
    for number, name in enumerate(browser.tabs(), start=1):
        assert browser.js(shown) == [f"run-{number}"]
        assert name.startswith(samples.ANCHORS[number - 1])
    browser.driver.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert browser.js(shown) == ["run-1"]
    browser.driver.find_element("id", "tab-5").click()
    loud = browser.driver.find_element("css selector", "#run-5 .notice.loud")
    assert loud.is_displayed() and "hurt" in loud.text
    browser.screenshot(pictures / "demo-hurt.png")


def test_print(browser: Browser, demo: Path, pictures: Path):
    browser.open(demo, scheme="dark", media="print")
    hidden = browser.js(
        "return ['.tabs', '#theme', '.copy'].every("
        "s => getComputedStyle(document.querySelector(s)).display === 'none')"
    )
    assert hidden
    assert_readable(browser, "light")
    closed = "return document.querySelectorAll('details:not([open])').length"
    before = browser.js(closed)
    browser.js("dispatchEvent(new Event('beforeprint'))")
    assert browser.js(closed) == 0
    browser.js("dispatchEvent(new Event('afterprint'))")
    assert browser.js(closed) == before > 0
    browser.emulate("light")
    pdf = browser.driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"]
    (pictures / "demo.pdf").write_bytes(base64.b64decode(pdf))
    assert (pictures / "demo.pdf").read_bytes().startswith(b"%PDF")


def test_no_button_lies_on_the_recipe_of_a_phone(browser: Browser, deep: Path):
    browser.open(deep, width=390)
    button, code = (
        browser.js(
            f"return document.querySelector('.recipe {part}').getBoundingClientRect().toJSON()"
        )
        for part in ("button", "code")
    )
    assert button["bottom"] <= code["top"]


def test_recipe_can_be_copied(browser: Browser, deep: Path):
    browser.open(deep)
    button = browser.driver.find_element("css selector", ".copy")
    button.click()
    done = browser.driver.execute_async_script(
        "setTimeout(() => arguments[1](arguments[0].textContent), 300)", button
    )
    assert done in ("Copied", "Selected")
