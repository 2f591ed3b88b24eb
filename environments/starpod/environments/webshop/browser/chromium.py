"""A headless Chromium and its driver, which are killed together with all their child processes."""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from selenium.common.exceptions import WebDriverException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chromium.remote_connection import ChromiumRemoteConnection
from selenium.webdriver.remote.client_config import ClientConfig
from selenium.webdriver.remote.webdriver import WebDriver
from urllib3.exceptions import HTTPError

from .config import BrowserConfig

logger = logging.getLogger(__name__)

BROKEN = (WebDriverException, HTTPError, OSError)
"""Exceptions that an operation raises if the browser or its driver crashed, hangs or was killed."""

# A separate process that starts the driver in a new process group and waits until its standard input closes, which also
# happens if this process is killed. Then it kills the group, including the browser, and removes the folder.
_KEEPER = """
import os, shutil, signal, subprocess, sys
folder, *command = sys.argv[1:]
with open(os.path.join(folder, "driver.log"), "wb") as log:
    driver = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
os.read(0, 1)
try:
    os.killpg(driver.pid, signal.SIGKILL)
except ProcessLookupError:
    pass
driver.wait()
for _ in range(5):  # dying processes may still write files
    shutil.rmtree(folder, ignore_errors=True)
    if not os.path.exists(folder):
        break
"""

_KILL_SECONDS = 10.0

_FLAGS = (
    "--headless=new",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-breakpad",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--mute-audio",
    "--font-render-hinting=none",
    "--force-color-profile=srgb",
    # Nothing beyond this machine can be reached: all other addresses go to a proxy that does not exist.
    "--proxy-server=http://127.0.0.1:9",
)

# Cursors and animations would make equal pages look different.
_STILL = "*{caret-color:transparent!important;animation:none!important;transition:none!important}"
_ADD_STYLE = """
const style = document.createElement("style"); style.textContent = arguments[0]; document.head.append(style);
"""


class Browser:
    """A browser with one tab. It is not thread-safe, but `kill` may be called from any thread."""

    def __init__(self, config: BrowserConfig) -> None:
        self.config = config
        self.uses = 0
        self._driver: WebDriver | None = None
        self._killing = threading.Lock()
        self._folder = Path(tempfile.mkdtemp(prefix="starpod-browser-"))
        # The driver could choose a port itself, but does not report it on machines without IPv6. If another program
        # takes this port first, the driver does not start, and the operation is tried again.
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        driver = [config.chromedriver, f"--port={self._port}"]
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _KEEPER, str(self._folder), *driver],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            # A killed browser leaves temporary files, so put them into the folder that the keeper removes.
            env={**os.environ, "TMPDIR": str(self._folder)},
        )

    def start(self) -> None:
        """Start the browser. Raises one of the exceptions listed in `BROKEN` if that fails."""
        options = Options()
        options.binary_location = self.config.chromium
        root = ("--no-sandbox",) if hasattr(os, "geteuid") and os.geteuid() == 0 else ()
        profile = f"--user-data-dir={self._folder / 'profile'}"
        for flag in (*_FLAGS, *root, profile, *self.config.flags):
            options.add_argument(flag)
        self._await_driver()
        client = ClientConfig(
            remote_server_addr=f"http://127.0.0.1:{self._port}", timeout=int(self.config.deadline) + 1
        )
        connection = ChromiumRemoteConnection(
            remote_server_addr=client.remote_server_addr, vendor_prefix="goog", browser_name="chrome",
            client_config=client, ignore_proxy=True,
        )  # fmt: skip
        self._driver = WebDriver(command_executor=connection, options=options)
        self.command("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "light"}, {"name": "prefers-reduced-motion", "value": "reduce"},
        ])  # fmt: skip
        self.resize(self.config.width, self.config.height)

    def _await_driver(self) -> None:
        """Wait until the driver's log says that it listens. Raises OSError if it does not start in time."""
        log, limit = self._folder / "driver.log", time.monotonic() + self.config.deadline
        while time.monotonic() < limit:
            with contextlib.suppress(FileNotFoundError):
                if "was started successfully" in log.read_text(errors="replace"):
                    return
            if self._keeper.poll() is not None:
                break
            time.sleep(0.02)
        raise OSError(f"{self.config.chromedriver} did not start")

    @property
    def driver(self) -> WebDriver:
        assert self._driver is not None, "start comes first"
        return self._driver

    @contextlib.contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Kill the browser if the context lasts longer. The operation in it then raises an exception of `BROKEN`."""
        timer = threading.Timer(max(seconds, 0.0), self.kill)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def kill(self) -> None:
        """Kill driver, browser and all their child processes, and remove their folder. Further calls do nothing."""
        with self._killing:
            assert self._keeper.stdin is not None
            with contextlib.suppress(OSError):
                self._keeper.stdin.close()
            try:
                self._keeper.wait(_KILL_SECONDS)
            except subprocess.TimeoutExpired:
                logger.error("a browser could not be ended", extra={"keeper": self._keeper.pid})
                self._keeper.kill()

    # --- operations ----------------------------------------------------------------------------------------------

    def command(self, name: str, **parameters: Any) -> Any:
        """Execute a command of the DevTools protocol."""
        return self.driver.execute("executeCdpCommand", {"cmd": name, "params": parameters})["value"]

    def resize(self, width: int, height: int, *, mobile: bool = False) -> None:
        """Set the size of the window, in CSS pixels.

        Args:
            mobile: whether pages are laid out as on a phone.
        """
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile
        )

    def draw(self, html: str) -> bytes:
        """Draw the part of a page that is visible without scrolling, as PNG."""
        self.resize(self.config.width, self.config.height)
        self.show(html)
        return self.screenshot()

    def show(self, html: str) -> None:
        """Show a page. Its scripts do not run."""
        self.driver.get("about:blank")
        frame = self.command("Page.getFrameTree")["frameTree"]["frame"]["id"]
        self.command("Emulation.setScriptExecutionDisabled", value=True)
        try:
            self.command("Page.setDocumentContent", frameId=frame, html=html)
        finally:
            self.command("Emulation.setScriptExecutionDisabled", value=False)

    def screenshot(self) -> bytes:
        """Return the visible part of the tab as PNG, without cursor and animations."""
        self.driver.execute_script(_ADD_STYLE, _STILL)
        return base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"])
