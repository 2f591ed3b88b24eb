"""The shop in a real Chromium: the pool's pictures and repairs, the environment with real clicks, and the site."""

import asyncio
import contextlib
import io
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvicorn
from PIL import Image
from selenium.common.exceptions import JavascriptException, WebDriverException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.ui import WebDriverWait

from starpod.client import Fleet, Want
from starpod.env_server.authoring.environment import Busy, Unavailable
from starpod.env_server.operation.config import ServerConfig
from starpod.env_server.registry import Registry
from starpod.env_server.server.server import EnvironmentServer
from starpod.environments.webshop import environment as shopping
from starpod.environments.webshop.browser import pool as pool_module
from starpod.environments.webshop.browser.chromium import Browser
from starpod.environments.webshop.browser.config import BrowserConfig
from starpod.environments.webshop.browser.environment import WebShopBrowser
from starpod.environments.webshop.browser.pool import Pool, shared_pool
from starpod.environments.webshop.browser.view import PageView
from starpod.environments.webshop.shop.markup import render_html
from starpod.environments.webshop.site.app import create_app
from starpod.environments.webshop.site.service import Service
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
from tests.environments.webshop.little import SANDAL, LittleWebShop, little_shop

try:
    CONFIG = BrowserConfig.from_environment()
    MISSING = ""
except Unavailable as unavailable:
    MISSING = str(unavailable)

real = [pytest.mark.browser, pytest.mark.skipif(bool(MISSING), reason=MISSING)]


def test_a_missing_browser_and_settings_that_cannot_be_read_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    for variable in ("STARPOD_CHROMIUM", "STARPOD_CHROMEDRIVER"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(Unavailable, match=r"no chromium here; .*STARPOD_CHROMIUM"):
        BrowserConfig.from_environment()
    monkeypatch.setenv("STARPOD_CHROMIUM", sys.executable)
    with pytest.raises(Unavailable, match="no chromedriver here"):
        BrowserConfig.from_environment()
    monkeypatch.setenv("STARPOD_CHROMEDRIVER", sys.executable)
    for name, value in (("SIZE", "12"), ("SIZE", "0x100"), ("DEADLINE", "0"), ("QUEUE", "many")):
        monkeypatch.setenv(f"STARPOD_BROWSER_{name}", value)
        with pytest.raises(Unavailable, match=f"STARPOD_BROWSER_{name} is '{value}'"):
            BrowserConfig.from_environment()
        monkeypatch.delenv(f"STARPOD_BROWSER_{name}")


def test_pictures_are_offered_where_they_can_be_drawn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shopping, "open_stores", lambda: None)
    monkeypatch.setattr(shopping.WebShop, "spec", shopping.WebShop.spec)  # prepare changes it
    for variable in ("STARPOD_CHROMIUM", "STARPOD_CHROMEDRIVER"):
        monkeypatch.setenv(variable, sys.executable)
    shopping.WebShop.prepare()
    assert shopping.WebShop.spec.render_modes == ("text", "html", "png")
    assert not caplog.text
    monkeypatch.setenv("STARPOD_CHROMIUM", "no-such-browser")
    shopping.WebShop.prepare()
    assert shopping.WebShop.spec.render_modes == ("text", "html")
    assert "webshop-v1 draws no png: there is no no-such-browser here; install Chromium" in caplog.text


class NoBrowser:
    """A browser that does nothing, for tests of who gets it."""

    def __init__(self, config: BrowserConfig) -> None:
        self.uses, self.killed = 0, False
        self.limited = contextlib.nullcontext

    def start(self) -> None:
        pass

    def kill(self) -> None:
        self.killed = True


class TestQueue:
    """The queue for browsers, with fake browsers."""

    @pytest.fixture
    def pool(self, monkeypatch: pytest.MonkeyPatch) -> Pool:
        monkeypatch.setattr(pool_module, "Browser", NoBrowser)
        return Pool(BrowserConfig("no chromium", "no driver", browsers=1, queue=1, uses=2))

    def test_a_full_queue_and_a_long_wait_are_busy(self, pool: Pool) -> None:
        taken, let_go = threading.Event(), threading.Event()

        def hold(browser: Browser) -> None:
            taken.set()
            let_go.wait()

        with ThreadPoolExecutor(2) as threads:
            holder = threads.submit(pool.run, hold)
            taken.wait()
            waiter = threads.submit(pool.run, lambda browser: "served")
            eventually(lambda: pool._waiting == 1)
            with pytest.raises(Busy, match="1 callers wait already"):
                pool.run(lambda browser: None)
            let_go.set()
            holder.result()
            assert waiter.result() == "served"
        pool.config = replace(pool.config, deadline=0.1)
        pool._places.get_nowait()  # as if another held it
        with pytest.raises(Busy, match="no browser became free"):
            pool.run(lambda browser: None)

    def test_other_errors_pass_through_and_cost_no_place(self, pool: Pool) -> None:
        def fail(browser: Browser) -> None:
            raise KeyError("a bug")

        for _ in range(3):
            with pytest.raises(KeyError):
                pool.run(fail)
        assert pool.run(lambda browser: browser.uses) == 1

    def test_a_used_up_browser_is_replaced(self, pool: Pool) -> None:
        one, two, three = (pool.run(lambda browser: browser) for _ in range(3))
        assert one is two is not three
        assert (one.killed, three.killed) == (True, False)  # type: ignore[attr-defined]
        pool.close()
        assert three.killed  # type: ignore[attr-defined]
        with pytest.raises(Busy):
            pool.run(lambda browser: None)


@contextlib.contextmanager
def pool_of(**changes: Any) -> Iterator[Pool]:
    pool = Pool(replace(CONFIG, **changes))
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture(scope="module")
def pool() -> Pool:
    """The browser of this process, which the environment uses too."""
    return shared_pool()


def processes() -> dict[int, tuple[int, str]]:
    """Parent and command line of every process."""
    listed = subprocess.run(["ps", "-wweo", "pid=,ppid=,stat=,args="], capture_output=True, text=True, check=True)
    rows = (line.split(None, 3) for line in listed.stdout.splitlines())
    return {int(row[0]): (int(row[1]), row[3]) for row in rows if len(row) == 4 and not row[2].startswith("Z")}


def chromium_of(browser: Browser) -> int:
    """The process of the browser itself: the child of the driver, which is the child of the keeper."""
    there = processes()
    driver = next(pid for pid, (parent, _) in there.items() if parent == browser._keeper.pid)
    return next(pid for pid, (parent, args) in there.items() if parent == driver and "--headless" in args)


def eventually(holds: Callable[[], bool]) -> None:
    for _ in range(3000):
        if holds():
            return
        time.sleep(0.02)
    raise AssertionError("it never came true")


@pytest.fixture(scope="module")
def pages() -> list[str]:
    shop = little_shop()
    found = [render_html(shop)]
    for move in ("all", "b07sandals", "sand"):
        shop.search(move) if move == "all" else shop.click(move)
        found.append(render_html(shop))
    return found


class TestPool:
    pytestmark = real

    def test_the_same_page_gives_the_same_bytes(self, pool: Pool, pages: list[str]) -> None:
        pictures = [pool.run(lambda browser, page=page: browser.draw(page)) for page in pages]
        assert len(set(pictures)) == len(pages)
        for data in pictures:
            assert Image.open(io.BytesIO(data)).size == (1280, 800)
        assert [pool.run(lambda browser, page=page: browser.draw(page)) for page in pages] == pictures

    def test_nothing_of_a_drawn_page_is_run(self, pool: Pool) -> None:
        red = "<body style='margin:0;background:red'><script>document.body.style.background='blue'</script>"
        data = pool.run(lambda browser: browser.draw(red))
        assert Image.open(io.BytesIO(data)).convert("RGB").getpixel((600, 700)) == (255, 0, 0)

    def test_nothing_but_this_machine_is_reached(self, pool: Pool) -> None:
        def fetch(browser: Browser) -> str:
            browser.driver.get("about:blank")
            script = "return fetch(arguments[0], {mode: 'no-cors'}).then(() => 'reached', () => 'refused')"
            return str(browser.driver.execute_script(script, "http://198.51.100.1/"))

        assert pool.run(fetch) == "refused"

    @pytest.mark.parametrize("victim", ["browser", "driver"])
    def test_a_killed_browser_is_replaced(self, pool: Pool, pages: list[str], victim: str) -> None:
        picture = pool.run(lambda browser: browser.draw(pages[0]))
        (browser,) = pool.browsers
        driver = next(pid for pid, (parent, _) in processes().items() if parent == browser._keeper.pid)
        os.kill(driver if victim == "driver" else chromium_of(browser), signal.SIGKILL)
        assert pool.run(lambda browser: browser.draw(pages[0])) == picture
        assert pool.browsers != [browser] and not browser._folder.exists()

    def test_a_browser_that_hangs_is_busy_at_the_deadline_and_then_replaced(self, pages: list[str]) -> None:
        with pool_of() as pool:
            picture = pool.run(lambda browser: browser.draw(pages[0]))
            pool.config = replace(pool.config, deadline=2.0)
            (browser,) = pool.browsers
            os.kill(chromium_of(browser), signal.SIGSTOP)
            undone: list[int] = []
            with pytest.raises(Busy, match="the browser broke"):
                pool.run(lambda browser: browser.draw(pages[0]), undo=lambda: undone.append(1))
            assert undone and not browser._folder.exists()
            pool.config = replace(pool.config, deadline=30.0)
            assert pool.run(lambda browser: browser.draw(pages[0])) == picture
            (browser,) = pool.browsers
        assert not browser._folder.exists()
        eventually(lambda: not any(str(browser._folder) in args for _, args in processes().values()))

    @pytest.mark.parametrize("ends", ["exit", "kill"])
    def test_nothing_is_left_when_the_process_ends(self, ends: str) -> None:
        code = (
            "import sys; from starpod.environments.webshop.browser import shared_pool\n"
            "print(shared_pool().run(lambda browser: browser._folder), flush=True)\n"
            "sys.stdin.read()\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdin is not None and process.stdout is not None
        folder = process.stdout.readline().strip()
        assert Path(folder).is_dir()
        if ends == "kill":
            process.kill()
        process.communicate()
        eventually(lambda: not Path(folder).exists())
        eventually(lambda: not any(folder in args for _, args in processes().values()))


def browse(seed: int = 3, **options: Any) -> WebShopBrowser:
    environment = WebShopBrowser()
    environment.options = WebShopBrowser.Options(**options)
    environment.seed = seed
    environment.reset(random.Random(seed))
    return environment


def test_sessions_whose_options_change_the_page_do_not_share_a_cached_observation() -> None:
    class Unbrowsed(LittleWebShop, WebShopBrowser):
        def reset(self, rng: random.Random) -> None:
            super().reset(rng)
            self._scroll, self._typed = 0, None

        def _visit(self, work: Any, undo: Any = None) -> Any:
            return work(None, PageView(self.html(), (), 0, 800, 800))

    pages = []
    for page_size in (2, 10):
        environment = Unbrowsed()
        environment.options = WebShopBrowser.Options(page_size=page_size)
        environment.reset(random.Random())
        environment.submit("search[all]")
        pages.append(environment.observe())
        assert pages[-1] == environment.html()
    assert pages[0] != pages[1]


class TestEnvironment:
    pytestmark = real

    @pytest.mark.parametrize("window", ["desktop", "phone"])
    def test_the_expert_shops_through_the_browser(self, window: str) -> None:
        environment = browse(window=window)
        reward = 0.0
        for _ in range(12):
            action = environment.expert_action()
            if action is None:
                break
            outcome = environment.step(action)
            assert outcome.valid, action
            reward += outcome.reward
        assert reward == 1.0 and outcome.terminated and outcome.success
        assert "Your score (min 0.0, max 1.0)" in environment.observe()

    def test_each_action_does_what_it_says(self) -> None:
        environment = browse()
        assert "[1: field] Search the shop" in environment.observe() and "Instruction:" in environment.observe()
        senseless = (
            "look",
            "click[]",
            "click[nonsense]",
            "click[#99]",
            "scroll[left]",
            "type[nothing, x]",
            "search[ ]",
        )
        for action in (*senseless, "back", 7, "x" * 20_000):
            before = environment.state_key()
            outcome = environment.step(action)
            assert not outcome.valid and environment.state_key() == before, action
        assert not environment.step("click[search]").effective, "an empty field cannot be sent"
        assert environment.step("type[search the shop, shoes]").effective
        assert not environment.step("type[#1, shoes]").effective
        assert '"shoes"' in environment.observe()
        assert environment.step("click[Search]").effective
        assert "Page 1 (Total results:" in environment.observe() and '"shoes"' in environment.observe()
        top = environment.observe()
        assert environment.step("scroll[down]").effective and environment.observe() != top
        assert environment.step("scroll[up]").effective and environment.observe() == top
        assert not environment.step("scroll[up]").effective
        assert environment.step("click[next >]").effective and "Page 2" in environment.observe()
        assert environment.step("back").effective and environment.observe() == top
        number = next(line for line in top.splitlines() if "Back to Search" in line).partition("]")[0].strip("[")
        assert environment.step(f"click[#{number}]").effective and "WebShop" in environment.observe()

    def test_a_restored_session_opens_the_same_page(self) -> None:
        environment = browse()
        environment.step("search[shoes]")
        environment.step("scroll[down]")
        twin = WebShopBrowser()
        twin.options = environment.options
        twin.set_state(environment.get_state())
        assert twin.observe() == environment.observe() and twin.state_key() == environment.state_key()
        assert twin.render("png") == environment.render("png") and twin.render("html") == environment.render("html")
        twin.step("back")
        assert twin.state_key() != environment.state_key()

    def test_every_valid_action_is_valid(self) -> None:
        environment = browse()
        environment.step("search[shoes]")
        environment.step(next(action for action in environment.valid_actions() if action.startswith("click[b0")))
        state = environment.get_state()
        for action in environment.valid_actions():
            environment.set_state(state)
            assert environment.step(action).valid, action

    def test_a_browser_that_dies_in_a_turn_changes_nothing_or_is_not_noticed(self) -> None:
        environment, calm = browse(), browse()
        environment.observe()
        for browser in shared_pool().browsers:
            os.kill(chromium_of(browser), signal.SIGKILL)
        assert environment.step("search[shoes]") == calm.step("search[shoes]")
        assert environment.state_key() == calm.state_key() and environment.observe() == calm.observe()

        key = environment.state_key()
        shown = WebShopBrowser.submit

        def submit_and_die(self: WebShopBrowser, action: str) -> Any:
            outcome = shown(self, action)
            for browser in shared_pool().browsers:
                browser.kill()
            return outcome

        WebShopBrowser.submit = submit_and_die  # type: ignore[method-assign]
        try:
            with pytest.raises(Busy):
                environment.step("click[next >]")
        finally:
            WebShopBrowser.submit = shown  # type: ignore[method-assign]
        assert environment.state_key() == key
        assert environment.step("click[next >]").effective and "Page 2" in environment.observe()

    async def test_the_contract_is_kept_over_grpc(self) -> None:
        server = EnvironmentServer(Registry([WebShopBrowser]), ServerConfig(port=0))
        await server.start()
        try:
            async with Fleet(server.address) as fleet:
                sessions = await fleet.open("webshop-browser-v1", seed=3, count=2, want=Want(image=True))
                moved = await fleet.step_many(sessions, ["search[shoes]"] * 2)
                one, other = (transition.observation for transition in moved)
                assert one.parts == other.parts and "Page 1" in one.text
                assert one.parts[1].mime == "image/png"
        finally:
            await server.stop(0)


@pytest.fixture(scope="module")
def shop() -> Iterator[tuple[str, str]]:
    """The addresses of a site and of its server, which live on a thread of their own."""
    ready: list[tuple[str, str]] = []
    stop = threading.Event()

    async def run() -> None:
        server = EnvironmentServer(Registry([LittleWebShop]), ServerConfig(port=0))
        await server.start()
        web = uvicorn.Server(uvicorn.Config(create_app(Service(server.address)), port=0, log_level="error"))
        serving = asyncio.create_task(web.serve())
        while not web.started:
            await asyncio.sleep(0.01)
        port = web.servers[0].sockets[0].getsockname()[1]
        ready.append((f"http://127.0.0.1:{port}", server.address))
        while not stop.is_set():
            await asyncio.sleep(0.02)
        web.should_exit = True
        await serving
        await server.stop(0)

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    eventually(lambda: bool(ready))
    yield ready[0]
    stop.set()
    thread.join()


def named(driver: WebDriver, text: str) -> Any:
    """The button or link with this text, which a person could see."""
    return next(
        element for element in driver.find_elements(By.CSS_SELECTOR, "button,a,summary") if element.text.strip() == text
    )


def press(browser: Browser, text: str) -> None:
    """Clicks as a person does: brings it into view, waits for the next page."""
    element = named(browser.driver, text)
    browser.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    turn_page(browser, element.click)


def turn_page(browser: Browser, act: Callable[[], Any]) -> None:
    browser.driver.execute_script("window.old = true")
    act()

    def loaded(driver: WebDriver) -> bool:
        try:
            return bool(driver.execute_script("return !window.old && document.readyState === 'complete'"))
        except JavascriptException:
            return False

    WebDriverWait(browser.driver, 10, 0.02).until(loaded)


def fits(browser: Browser) -> None:
    """Check that nothing overflows the page, and that all touch targets (a product: its card) are large enough."""
    wide, window, small = browser.driver.execute_script("""
        const root = document.documentElement;
        const touched = document.querySelectorAll("button:not(.product-link),select,.btn,input:not([type=hidden])");
        const small = [...touched].filter((one) => {
            const box = one.getBoundingClientRect();
            return box.width && (box.height < 20 || box.width < 20);
        });
        return [root.scrollWidth, root.clientWidth, small.map((one) => one.outerHTML)];
    """)
    assert wide <= window and not small, (wide, window, small)


class TestSite:
    pytestmark = real

    @pytest.mark.parametrize(("width", "height", "scripts"), [(1280, 800, True), (390, 844, True), (390, 844, False)])
    def test_a_person_shops(self, pool: Pool, shop: tuple[str, str], width: int, height: int, scripts: bool) -> None:
        def visit(browser: Browser) -> None:
            driver = browser.driver
            browser.resize(width, height, mobile=width < 500)
            browser.command("Emulation.setScriptExecutionDisabled", value=not scripts)
            driver.get(f"{shop[0]}/")
            fits(browser)
            press(browser, "Start shopping")
            fits(browser)
            driver.find_element(By.ID, "search_input").send_keys("women")
            turn_page(browser, lambda: driver.find_element(By.ID, "search_input").send_keys(Keys.ENTER))
            fits(browser)
            assert "Page 1 (Total results: 4)" in driver.find_element(By.TAG_NAME, "body").text
            assert len(driver.find_elements(By.CSS_SELECTOR, ".product-link")) == 4
            turn_page(browser, driver.find_element(By.CSS_SELECTOR, ".product-link").click)
            fits(browser)
            assert driver.find_element(By.TAG_NAME, "h2").text == SANDAL.title
            for option in ("navy blue", "7.5 wide"):
                press(browser, option)
                assert named(driver, option).get_attribute("aria-pressed") == "true"
                assert named(driver, option).is_displayed()
            buy = named(driver, "Buy Now").rect
            if width < 500:  # visible without scrolling
                shown = driver.execute_script("return scrollY")
                assert shown <= buy["y"] and buy["y"] + buy["height"] <= shown + height
            press(browser, "Features")
            assert "Rubber sole: grips on wet stone." in driver.find_element(By.TAG_NAME, "main").text
            press(browser, "< Prev")
            turn_page(browser, named(driver, "Buy Now").click)
            fits(browser)
            assert driver.find_element(By.CSS_SELECTOR, "#reward pre").text == "1.0"
            press(browser, "New goal")
            assert driver.find_element(By.ID, "search_input").get_attribute("value") == ""

        def visit_and_reset(browser: Browser) -> None:
            try:
                visit(browser)
            finally:
                browser.command("Emulation.setScriptExecutionDisabled", value=False)

        pool.run(visit_and_reset)

    def test_everything_can_be_reached_with_the_keyboard(self, pool: Pool, shop: tuple[str, str]) -> None:
        def visit(browser: Browser) -> None:
            driver = browser.driver
            browser.resize(1280, 800)
            driver.get(f"{shop[0]}/")
            press(browser, "Start shopping")
            assert driver.switch_to.active_element.get_attribute("id") == "search_input"
            turn_page(browser, lambda: driver.switch_to.active_element.send_keys("women", Keys.ENTER))
            turn_page(browser, lambda: driver.find_element(By.CSS_SELECTOR, ".product-link").send_keys(Keys.ENTER))
            reached = []
            for _ in range(40):
                driver.switch_to.active_element.send_keys(Keys.TAB)
                element = driver.switch_to.active_element
                if element.tag_name == "body":
                    break
                reached.append(element.text)
                style = driver.execute_script("return getComputedStyle(arguments[0]).outlineStyle", element)
                assert style != "none" or element.get_attribute("id") == "search_input", element.text
            for text in ("Back to Search", "< Prev", "navy blue", "7.5 wide", "Description", "Buy Now"):
                assert text in reached
            # An agent of the original clicks the radio buttons that a person does not see.
            radio = driver.find_element(By.CSS_SELECTOR, "input[type=radio][value=sand]")
            turn_page(browser, lambda: driver.execute_script("arguments[0].click()", radio))
            assert driver.find_element(By.CSS_SELECTOR, "input[type=radio]:checked").get_attribute("value") == "sand"

        pool.run(visit)

    def test_a_watcher_sees_the_agent_at_work(self, pool: Pool, shop: tuple[str, str]) -> None:
        with grpc.insecure_channel(shop[1]) as channel:
            stub: Any = EnvironmentServiceStub(channel)  # type: ignore[no-untyped-call]

            def shown(driver: WebDriver) -> str:
                driver.switch_to.default_content()
                driver.switch_to.frame("frame")
                text = driver.find_element(By.TAG_NAME, "body").text
                driver.switch_to.default_content()
                return text

            def visit(browser: Browser) -> None:
                driver = browser.driver
                session = stub.Open(pb.OpenRequest(environment_id="webshop-v1", seed=1)).sessions[0].session_id
                browser.resize(1280, 800)
                driver.get(f"{shop[0]}/s/{session}/watch")
                # The frame may change while it is read.
                wait = WebDriverWait(driver, 15, 0.1, ignored_exceptions=[WebDriverException])
                wait.until(lambda driver: "WebShop" in shown(driver))
                stub.Step(pb.StepRequest(session_id=session, epoch=1, actions=[pb.Action(text="search[women]")]))
                wait.until(lambda driver: "Total results: 4" in shown(driver))
                driver.switch_to.default_content()
                assert "women: page 1" in driver.find_element(By.ID, "trail").text
                assert driver.find_element(By.ID, "live").text == "Live"
                turn_page(browser, named(driver, "Take over").click)
                assert "Total results: 4" in driver.find_element(By.TAG_NAME, "body").text
                stub.Step(pb.StepRequest(session_id=session, epoch=1, step_index=1,
                                         actions=[pb.Action(text="click[b07sandals]")]))  # fmt: skip
                WebDriverWait(driver, 15, 0.1).until(lambda driver: driver.title.startswith("Larkfield"))

            pool.run(visit)
