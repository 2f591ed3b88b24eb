"""The live site in a real Chromium: on wide and small screens, light and dark, by keyboard, and during a run."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest

from starpod.client import SyncSession
from starpod.report.tree import MAX_CHARACTERS, Continuation, draw_tree
from starpod.trainer.output.report import write_report
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.output.sinks import JsonlSink
from tests.support import ROOT, start_server
from tests.tools.ui.conftest import a_group, address_of, make_run, serve_site, wait_until
from tests.tools.ui.test_games import EPISODE, FATAL, live, lost, others
from tests.tools.ui.test_site import GROUP, PAGES
from tests.trainer.diagnostics.synthetic import metrics_at

selenium = pytest.importorskip("selenium.webdriver")
__all__ = ["live", "lost", "others"]  # fixtures
AXE = Path(__file__).parent / "axe" / "node_modules" / "axe-core" / "axe.min.js"
CHROMIUM = os.environ.get("STARPOD_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = os.environ.get("STARPOD_CHROMEDRIVER") or shutil.which("chromedriver")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="there is no chromium with its driver here"),
]

CONTRAST = """
const luminance = colour => { const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(Number).map(each => {
  each /= 255; return each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4; });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const style = getComputedStyle(document.body);
const [a, b] = [luminance(style.color), luminance(style.backgroundColor)].sort((x, y) => y - x);
return (a + 0.05) / (b + 0.05);
"""


AXE_RUN = """
const done = arguments[arguments.length - 1];
document.querySelectorAll('details').forEach(each => { each.open = true; });
axe.run(document).then(found => done(found.violations.map(each => [each.id, each.nodes.map(node => node.html)])));
"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = selenium.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    environment = {**os.environ, "TMPDIR": str(tmp_path_factory.mktemp("chromium"))}  # it leaves folders there
    driver = selenium.Chrome(options=options, service=selenium.ChromeService(DRIVER, env=environment))
    yield driver
    driver.quit()


def emulate(driver: Any, width: int, scheme: str) -> Any:
    """The browser with a screen of that width, dark or light."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    show_in(driver, scheme)
    driver.width, driver.scheme = width, scheme
    return driver


@pytest.fixture(params=[(1280, "light"), (390, "dark")], ids=["wide-light", "phone-dark"])
def browser(request: pytest.FixtureRequest, chromium: Any) -> Any:
    return emulate(chromium, *request.param)


@pytest.fixture
def phone(chromium: Any) -> Any:
    """A browser with a phone's width, for tests that do not depend on the width."""
    return emulate(chromium, 390, "dark")


@pytest.fixture
def site(pages: httpx.Client) -> str:
    return address_of(pages)


@pytest.fixture
def address(live: httpx.Client) -> str:
    return address_of(live)


def show_in(driver: Any, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def barriers(browser: Any) -> list[Any]:
    """Return the violations of axe-core's accessibility rules on the page, light and dark."""
    if not AXE.exists():
        pytest.skip(f"axe-core is not here: npm ci --prefix {AXE.parents[2].relative_to(ROOT)}")
    browser.execute_script(AXE.read_text(encoding="utf-8"))
    found = []
    for scheme in ("light", "dark"):
        show_in(browser, scheme)
        found += [(scheme, *each) for each in browser.execute_async_script(AXE_RUN)]
    show_in(browser, browser.scheme)
    return found


def find(browser: Any, css: str) -> list[Any]:
    return list(browser.find_elements("css selector", css))


def press(browser: Any, css: str, keys: str = "\n", words: str = "") -> None:
    """Types into the first element that begins with the words."""
    next(each for each in find(browser, css) if each.text.startswith(words)).send_keys(keys)


def await_text(browser: Any, text: str) -> None:
    wait_until(lambda: text in browser.page_source)


def fits(browser: Any) -> bool:
    return bool(browser.execute_script("return document.documentElement.scrollWidth") <= browser.width)


def start_game(browser: Any, address: str, environment: str, seed: str = "3") -> None:
    browser.get(f"{address}/play/{environment}")
    press(browser, "input[name=seed]", f"{seed}\n")
    wait_until(lambda: "/play/session/" in browser.current_url)


def open_episode(browser: Any, address: str) -> None:
    """Opens its page, which there is once the site has read the run."""

    def shown() -> bool:
        browser.get(address + EPISODE)
        return bool(find(browser, f"#t{FATAL + 1} form button"))

    wait_until(shown)


def check_page(browser: Any, url: str) -> None:
    """Check that the page fits the screen, is readable and accessible, and logs no error in the browser's console."""
    browser.get("about:blank")
    browser.get_log("browser")  # what pages before complained of
    browser.get(url)
    assert fits(browser)
    assert browser.execute_script(CONTRAST) > 7
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    unnamed = browser.execute_script(
        "return [...document.querySelectorAll('a, button, input:not([type=hidden]), select, [role=img]')]"
        ".filter(each => !(each.getAttribute('aria-label') || each.textContent.trim() || each.labels?.length))"
        ".map(each => each.outerHTML)"
    )
    assert unnamed == []


OF_A_SITE = [("site", path) for path in PAGES]
OF_A_SERVER = [("address", path) for path in ("/fleet", "/play/sokoban-v1", "/turns", EPISODE)]
ODD = [("site", path) for path in ("/nowhere", "/episodes?run=calm&text=zebra", f"/group?{GROUP[:-1]}3")]
ODD += [("address", path) for path in ("/sessions?run=lake", EPISODE.replace("/episode", "/group"))]


@pytest.mark.parametrize(("where", "path"), [*OF_A_SITE, *OF_A_SERVER])
def test_a_page_fits_and_complains_of_nothing(
    browser: Any, request: pytest.FixtureRequest, where: str, path: str
) -> None:
    check_page(browser, request.getfixturevalue(where) + path)


@pytest.mark.parametrize(("where", "path"), [*OF_A_SITE, *OF_A_SERVER, *ODD])
def test_nothing_keeps_people_out_of_a_page(
    browser: Any, request: pytest.FixtureRequest, where: str, path: str
) -> None:
    browser.get(request.getfixturevalue(where) + path)
    assert barriers(browser) == []


def test_an_episode_is_forked_where_it_was_lost(browser: Any, address: str) -> None:
    """The game, its continuations, and the job that finds the losing turn are accessible, too."""
    open_episode(browser, address)
    wait_until(lambda: all(each.get_property("naturalWidth") for each in find(browser, ".strip img")))
    assert len(find(browser, ".strip img")) == len(find(browser, ".seen img")) == FATAL + 2
    wide = find(browser, "#t1 .seen img")[0].size
    assert 200 < wide["width"] <= 260 and wide["height"] <= 260
    press(browser, f"#t{FATAL + 1} form button")
    await_text(browser, "forked from this episode")
    assert f"turn <b>{FATAL}</b>" in browser.page_source
    press(browser, "form[aria-label=Continuations] button")
    await_text(browser, "<h2>Continuations</h2>")
    assert barriers(browser) == []
    open_episode(browser, address)
    press(browser, "form[aria-label=Continuations] button")
    wait_until(lambda: "Which turn lost it?" in browser.title)
    assert barriers(browser) == []


def test_a_session_of_somebody_else_is_followed(browser: Any, address: str, others: SyncSession) -> None:
    check_page(browser, f"{address}/watch?{urlencode({'session': others.id})}")
    assert "turn <b>0</b>" in browser.page_source
    press(browser, "summary")  # Take it over
    others.step("Up")
    await_text(browser, "turn <b>1</b>")
    assert find(browser, "#seen details")[0].get_attribute("open")
    assert find(browser, "#seen details button")[0].is_displayed()
    assert barriers(browser) == []


def test_arrow_keys_go_from_turn_to_turn(phone: Any, site: str) -> None:
    phone.get(f"{site}/episode?{GROUP}&member=0#t2")
    assert find(phone, ".turnbox.here")[0].get_attribute("id") == "t2"
    body = find(phone, "body")[0]
    body.send_keys("\ue012")  # left
    assert phone.current_url.endswith("#t1") and find(phone, ".turnbox.here")[0].get_attribute("id") == "t1"
    assert phone.execute_script("return document.activeElement.id") == "t1"
    body.send_keys("\ue014\ue014\ue014")  # right, past the end
    assert find(phone, "[aria-current=step]")[0].get_attribute("href").endswith("#end")


def test_runs_are_marked_and_compared(phone: Any, site: str) -> None:
    phone.get(site)
    for box in find(phone, "input[name=run]"):
        box.send_keys(" ")
    press(phone, "button", words="Compare")
    wait_until(lambda: "/compare?run=" in phone.current_url)
    assert "McNemar" in phone.page_source


def shown_of(browser: Any, value: str) -> list[Any]:
    """A value of each chart in sight, the second one in the middle."""
    charts = "[...document.querySelectorAll('.chart')]"
    browser.execute_script(f"{charts}[1].scrollIntoView({{block: 'center'}})")
    in_sight = "({top, bottom}) => bottom > 0 && top < innerHeight"
    drawn = f"{charts}.filter(each => each.dataset.drawn && ({in_sight})(each.getBoundingClientRect()))"
    return list(browser.execute_script(f"return {drawn}.map(each => {value})"))


def shows(browser: Any, low: float, high: float) -> bool:
    found = shown_of(browser, "each.layout.xaxis.range")
    return len(found) > 1 and all(abs(a - low) < 2 and abs(b - high) < 2 for a, b in found)


def act(browser: Any, do: Callable[[Any, Any], Any]) -> None:
    """Does something with the mouse on the second chart."""
    wait_until(lambda: len(shown_of(browser, "1")) > 1)
    do(selenium.ActionChains(browser, duration=20), find(browser, ".chart")[1]).perform()


@pytest.mark.parametrize("path", ["/compare?run=calm&run=sweep/trapped", "/runs/calm"])
def test_curves_are_zoomed_together(chromium: Any, site: str, path: str) -> None:
    """Drag, double click, and use the form. The address keeps the range, and axes and drawing areas are aligned."""
    browser = emulate(chromium, 1280, "light")
    browser.get(site + path)
    wait_until(lambda: shows(browser, 0, 150))
    assert len(set(map(tuple, shown_of(browser, "[each.layout.margin.l, each.layout.margin.r]")))) == 1
    act(browser, lambda chain, chart: chain.move_to_element_with_offset(chart, -40, 0).click_and_hold()
        .move_by_offset(90, 0).release())  # fmt: skip
    wait_until(lambda: not shows(browser, 0, 150))
    (low, high), *others = shown_of(browser, "each.layout.xaxis.range")
    assert 0 < low < high < 150 and all(each == pytest.approx([low, high]) for each in others)
    assert f"from={low:g}" in browser.current_url
    browser.refresh()
    wait_until(lambda: shows(browser, low, high))
    assert float(find(browser, "[name=from]")[0].get_property("value")) == pytest.approx(low, abs=0.1)
    act(browser, lambda chain, chart: chain.double_click(chart))
    wait_until(lambda: shows(browser, 0, 150))
    press(browser, "#view [name=to]", "75\n")
    wait_until(lambda: shows(browser, 0, 75))
    press(browser, "[data-reset]")
    wait_until(lambda: shows(browser, 0, 150))


def test_curves_are_smoothed_hidden_and_drawn_on_a_logarithmic_axis(chromium: Any, site: str) -> None:
    browser = emulate(chromium, 1280, "light")
    browser.get(f"{site}/compare?run=calm&run=sweep/trapped&metric=collect/success")
    act(browser, lambda chain, chart: chain.move_to_element(chart))
    lines = "return document.querySelectorAll('.chart')[1].data.filter(each => each.name).map(each => each.y)"

    def roughness() -> float:
        return max(sum(abs(a - b) for a, b in pairwise(values)) for values in browser.execute_script(lines))

    found = {}
    for choice in ("none", "light", "medium", "strong"):
        find(browser, f"[name=smooth] option[value={choice}]")[0].click()
        wait_until(lambda choice=choice: choice == "light" or f"smooth={choice}" in browser.current_url)
        wait_until(lambda: roughness() not in found.values())
        found[choice] = roughness()
    assert found["none"] > 2 * found["light"] and found["light"] > 1.2 * found["medium"] > found["strong"]
    find(browser, "[name=log][value=y]")[0].click()
    wait_until(lambda: set(shown_of(browser, "each.layout.yaxis.type")) == {"log"})
    find(browser, ".legendtoggle")[1].click()
    wait_until(lambda: "hide=B" in browser.current_url)
    wait_until(lambda: all("legendonly" in each for each in shown_of(browser, "each.data.map(one => one.visible)")))


def test_light_or_dark_is_chosen_and_kept(chromium: Any, site: str) -> None:
    browser = emulate(chromium, 1280, "light")
    browser.get(f"{site}/runs/calm")
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = browser.execute_script(ground)
    press(browser, "#theme")
    assert browser.execute_script(ground) != light and browser.execute_script(CONTRAST) > 7
    browser.get(site)
    assert browser.execute_script(ground) != light
    press(browser, "#theme")
    assert browser.execute_script(ground) == light
    browser.execute_script("localStorage.clear()")


def test_curves_are_saved_as_numbers(chromium: Any, site: str, tmp_path: Path) -> None:
    browser = emulate(chromium, 1280, "light")
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    browser.get(f"{site}/runs/calm")
    press(browser, "[data-save=csv]")
    press(browser, "[data-save=json]")
    wait_until(lambda: {path.name for path in tmp_path.iterdir()} == {"curves.csv", "curves.json"})
    head, first, *_ = (tmp_path / "curves.csv").read_text().splitlines()
    assert head == "chart,line,x,at,value" and first.startswith('"Success on selection seeds","sampled","step",0,0.0')
    rows = json.loads((tmp_path / "curves.json").read_text())
    assert len([row for row in rows if row["chart"] == "Entropy (nats)"]) == 150


def test_a_comparison_that_was_sent_can_be_read(browser: Any, pages: httpx.Client, tmp_path: Path) -> None:
    file = tmp_path / "comparison.html"
    file.write_text(pages.get("/comparison.html?run=calm&run=sweep/trapped&seeds=together&to=75").text)
    check_page(browser, file.as_uri())
    tell_by_keyboard(browser)
    assert shows(browser, 0, 75)
    assert barriers(browser) == []


def tell_by_keyboard(browser: Any) -> None:
    chart = find(browser, ".chart")[0]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
    wait_until(lambda: browser.execute_script("return !!arguments[0].dataset.drawn", chart))
    chart.send_keys("\ue012")
    wait_until(lambda: find(chart, ".hoverlayer .legendtext"))


def test_a_run_is_tagged_by_keyboard(phone: Any, tmp_path: Path, calm: Path) -> None:
    shutil.copytree(calm, tmp_path / "calm")
    for site in serve_site(tmp_path, page="/episodes?run=calm&kind=final", shown="20 episodes"):
        phone.get(f"{site}/runs/calm")
        press(phone, "summary", words="Tags and note")
        press(phone, "[name=note]", "two\nlines")
        press(phone, "[name=tags]", ", baseline\n")
        wait_until(lambda: "two\nlines" in text_of(phone, "#now .note"))
        assert [chip.text for chip in find(phone, ".chip")] == ["made up", "baseline"] and fits(phone)


def test_a_list_of_a_live_run_announces_newer_episodes(phone: Any, tmp_path: Path) -> None:
    """The list itself does not change while it is read."""
    folder = make_run(tmp_path / "live")
    folder.facts.write_text("{}", encoding="utf-8")
    with folder.lock():
        for site in serve_site(tmp_path, page="/episodes?run=live&kind=train", shown="5 episodes"):
            phone.get(f"{site}/episodes?run=live&kind=train")
            news = find(phone, "#news a")[0]
            before = find(phone, "#episodes")[0].text
            assert not news.is_displayed()
            folder.episodes.write_rollouts(151, a_group(9, [1.0, 0.0]), max_bytes=2**20)
            wait_until(news.is_displayed)
            assert find(phone, "#episodes")[0].text == before
            news.send_keys("\n")
            await_text(phone, "7 episodes")
            assert "step 151" in find(phone, "#episodes")[0].text


def test_sections_of_a_run_stay_in_reach(browser: Any, site: str) -> None:
    browser.get(f"{site}/runs/sweep/trapped")
    press(browser, ".contents a", words="Next steps")
    places = "return ['.contents', '#next-steps'].map(each => document.querySelector(each).getBoundingClientRect())"
    wait_until(lambda: browser.execute_script(places)[1]["top"] < 900)
    nav, heading = browser.execute_script(places)
    assert nav["top"] == 0 and heading["top"] >= nav["bottom"]


def test_an_episode_of_the_list_takes_little_room(browser: Any, site: str) -> None:
    browser.get(f"{site}/episodes?run=calm&kind=final")
    assert max(row.size["height"] for row in find(browser, "#episodes tbody tr")) < 90


def test_the_link_of_a_comparison_is_copied(phone: Any, site: str) -> None:
    phone.execute_cdp_cmd(
        "Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    )
    phone.get(f"{site}/compare?run=calm&run=sweep/trapped")
    button = next(each for each in find(phone, "[data-copy]") if each.is_displayed())
    button.send_keys("\n")
    wait_until(lambda: button.text == "Copied")
    copied = phone.execute_async_script("navigator.clipboard.readText().then(arguments[arguments.length - 1])")
    assert copied == phone.current_url


def test_a_chart_tells_values_by_keyboard(browser: Any, site: str) -> None:
    browser.get(f"{site}/runs/calm")
    tell_by_keyboard(browser)


def test_a_page_follows_its_run_without_losing_what_was_opened(phone: Any, site: str, runs: Path, calm: Path) -> None:
    path = runs / "live"
    shutil.copytree(calm, path)
    try:
        wait_until(lambda: phone.get(f"{site}/runs/{path.name}") or "Checkpoints" in phone.page_source)
        phone.execute_script("document.querySelector('#metrics details').open = true")
        sink = JsonlSink(RunFolder(path).metrics)
        sink.write(151, metrics_at(151), ["it echoes now"])
        sink.close()
        wait_until(lambda: "it echoes now" in find(phone, "#now")[0].text)
        assert phone.execute_script("return document.querySelector('#metrics details').open")
    finally:
        shutil.rmtree(path)


def test_a_report_can_be_read_and_filtered(browser: Any, tmp_path: Path) -> None:
    report = write_report(make_run(tmp_path / "calm").path)
    browser.get(report.as_uri())
    assert fits(browser)
    tell_by_keyboard(browser)
    sizes = browser.execute_script(
        "return [...document.querySelectorAll('.chart text')].map(each => parseFloat(getComputedStyle(each).fontSize))"
    )
    assert len(sizes) > 20 and min(sizes) > 9.5  # pixels of a letter
    shown = "return [...document.querySelectorAll('details.episode')].filter(each => each.checkVisibility()).length"
    every = browser.execute_script(shown)
    press(browser, "#choose [name=words]", "17")
    assert 0 < browser.execute_script(shown) < every


def test_a_game_is_played_by_keyboard(browser: Any, address: str) -> None:
    start_game(browser, address, "sokoban-v1")
    for turn in range(1, 3):
        press(browser, "body", "\ue013")  # up
        await_text(browser, f"turn <b>{turn}</b>")
    assert find(browser, ".scene img")[0].size["width"] > 100 and fits(browser)
    press(browser, "body", "u")
    await_text(browser, "turn <b>1</b>")
    press(browser, "body", "h")
    await_text(browser, "The expert would play")


def text_of(browser: Any, css: str) -> str:
    """Return the text of an existing element at once, since the page may replace the element at any time."""
    return str(browser.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", css))


def focused(browser: Any) -> str:
    return str(browser.execute_script("return document.activeElement.outerHTML"))


def test_what_is_polled_keeps_the_place_of_focus(phone: Any, address: str, others: SyncSession) -> None:
    """Polling replaces only the elements that have changed."""
    phone.get(f"{address}/watch?session={others.id}")
    poll = "const done = arguments[0]; update().then(() => done())"
    phone.execute_script("document.querySelector('#seen summary').focus(); document.activeElement.kept = true")
    phone.execute_async_script(poll)
    assert phone.execute_script("return document.activeElement.kept")
    phone.execute_script("document.querySelector('#seen button[value=Left]').closest('details').open = true")
    phone.execute_script("document.querySelector('#seen button[value=Left]').focus()")
    others.step("Up")
    wait_until(lambda: phone.execute_async_script(poll) or "turn 1" in text_of(phone, "#seen"))
    assert 'value="Left"' in focused(phone) and find(phone, "#seen details")[0].get_attribute("open")


def test_playing_keeps_the_focus_and_announces_the_state(phone: Any, address: str) -> None:
    start_game(phone, address, "frozen_lake-v1?option-success_rate=1.0", "10000")
    phone.execute_script("window.kept = true")
    press(phone, "select[name=count]", "in 4")
    press(phone, "button[value=Up]")
    wait_until(lambda: "turn 1" in text_of(phone, "#state[role=status]"))
    assert 'value="Up"' in focused(phone) and phone.execute_script("return window.kept")
    assert find(phone, "select[name=count]")[0].get_attribute("value") == "4"
    press(phone, "button", words="Undo")
    wait_until(lambda: "turn 0" in text_of(phone, "#state[role=status]"))
    assert phone.execute_script("return document.activeElement.id") == "game"  # Undo can no longer be pressed
    press(phone, "form[aria-label=Continuations] button")
    wait_until(lambda: find(phone, ".tree a"))
    assert ">Try<" in focused(phone)
    press(phone, "form[aria-label=Continuations] button")
    wait_until(lambda: len(find(phone, ".tree")) == 2)
    regions = [each.get_attribute("aria-label") for each in find(phone, "[role=region]")]
    assert len(set(regions)) == len(regions) == 2


def test_a_server_that_goes_away_is_reported_next_to_the_game(phone: Any, tmp_path: Path) -> None:
    with start_server("bandit") as server:
        for site in serve_site(tmp_path, "--address", server.address, page="/fleet", shown="bandit-v1"):
            start_game(phone, site, "bandit-v1")
            server.kill()
            press(phone, ".choices button")
            wait_until(lambda: "no server answers" in text_of(phone, "#problem"), 60)
            assert find(phone, ".choices button")
            phone.get(f"{site}/fleet")
            assert "no server answers" in text_of(phone, "#servers") and fits(phone)


CROSSED = """
const boxes = [...document.querySelectorAll('svg text, svg circle')].map(each => [each, each.getBBox()]);
const apart = (a, b) => a.x + a.width <= b.x || b.x + b.width <= a.x || a.y + a.height <= b.y || b.y + b.height <= a.y;
const found = [];
for (const [one, a] of boxes) {
  if (one.tagName !== 'text') continue;
  for (const [other, b] of boxes)
    if (one !== other && !apart(a, b)) found.push(one.textContent + ' / ' + other.textContent);
  for (const path of document.querySelectorAll('svg path'))
    for (let at = 0, all = path.getTotalLength(); at < all; at += 2) {
      const {x, y} = path.getPointAtLength(at);
      if (!apart(a, {x, y, width: 0, height: 0})) { found.push(one.textContent + ' / branch'); break; }
    }
}
const svg = document.querySelector('svg').getBBox(), view = document.querySelector('svg').viewBox.baseVal;
if (svg.x < 0 || svg.x + svg.width > view.width) found.push('beyond the picture');
return found;
"""


def test_texts_of_a_tree_are_crossed_by_nothing(browser: Any, address: str, tmp_path: Path) -> None:
    long = "search[wide waterproof hiking boots]"
    ways = [[long, "Up"], [long, "Down", "Left"], ["Up"], ["Up", "Up"], ["Down", long], ["Down", "Left", "Up"]] * 3
    lines = [
        Continuation(way, 0.0, place % 3 == 0, link=f"/{place}")
        for place, way in enumerate([*ways, [], ["W" * MAX_CHARACTERS]])
    ]
    browser.get(f"{address}/assets/site.css")
    style = find(browser, "body")[0].text
    (tmp_path / "tree.html").write_text(f"<style>{style}</style>{draw_tree(lines, 'Tree')}")
    browser.get((tmp_path / "tree.html").as_uri())
    assert len(find(browser, "svg text")) > 20
    assert browser.execute_script(CROSSED) == []


def test_a_continuation_is_opened_by_keyboard(browser: Any, address: str) -> None:
    open_episode(browser, address)
    press(browser, "form[action='/turns'] button")
    wait_until(lambda: "Success falls most" in text_of(browser, "#verdict"))
    assert not find(browser, "progress") and len(find(browser, "#values meter")) == FATAL + 1
    assert fits(browser) and barriers(browser) == []
    press(browser, "#values details[open] .tree a")
    wait_until(lambda: "/continuations/" in browser.current_url)
    assert fits(browser) and barriers(browser) == []
    wait_until(lambda: all(each.get_property("naturalWidth") for each in find(browser, ".strip img")))
    assert len(find(browser, ".strip img")) > 1
    press(browser, "#end button")
    wait_until(lambda: "Solved." in text_of(browser, "#state"))


def test_a_tool_is_called_and_text_is_sent_by_keyboard(browser: Any, address: str) -> None:
    start_game(browser, address, "desk-v1")
    press(browser, ".tool summary", words="list_events")
    press(browser, ".tool[open] button")
    await_text(browser, "turn <b>1</b>")
    assert fits(browser)
    press(browser, "textarea[name=action]", "list_files\n")
    await_text(browser, "turn <b>2</b>")
