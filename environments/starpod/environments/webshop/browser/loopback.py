"""A small HTTP server on 127.0.0.1 that serves the shop's pages to the browser, each at a secret address."""

from __future__ import annotations

import contextlib
import functools
import secrets
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Protocol
from urllib.parse import parse_qs

from starpod.environments.webshop.shop import actions

from .pool import once_per_process

MAX_BODY_BYTES = 64 * 1024


class Shown(Protocol):
    """A page that a `Loopback` can serve."""

    def page(self) -> str:
        """Return the page as HTML."""

    def act(self, action: str) -> None:
        """Execute the action of a form that was sent."""


class Loopback:
    """An HTTP server of pages whose addresses cannot be guessed."""

    def __init__(self) -> None:
        self._shown: dict[str, Shown] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, self._shown))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="webshop-loopback", daemon=True).start()

    @contextlib.contextmanager
    def showing(self, shown: Shown) -> Iterator[str]:
        """Serve a page while the context lasts, and yield its address."""
        token = secrets.token_urlsafe(24)
        self._shown[token] = shown
        try:
            yield f"http://127.0.0.1:{self._server.server_port}/{token}/"
        finally:
            del self._shown[token]


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, shown: dict[str, Shown], *arguments: object) -> None:
        self._shown = shown
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        page = self._find("")
        if page is None:
            return
        data = page.page().encode("utf-8", "replace")
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        page = self._find("act")
        length = self.headers.get("Content-Length", "")
        if page is None:
            return
        if not (length.isdecimal() and int(length) <= MAX_BODY_BYTES):
            self.send_error(413)
            return
        body = self.rfile.read(int(length)).decode("utf-8", "replace")
        form = parse_qs(body, keep_blank_values=True, max_num_fields=20)
        query = form.get("search_query", [""])[0]
        page.act(form["action"][0] if "action" in form else actions.search(query) or "search[]")
        self.send_response(303)
        self.send_header("Location", "./")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _find(self, leaf: str) -> Shown | None:
        _, _, suffix = self.path.partition("/")
        token, _, tail = suffix.partition("/")
        page = self._shown.get(token)
        if page is None or tail != leaf:
            self.send_error(404)
            return None
        return page

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing, because addresses are secret."""


@once_per_process
def shared_loopback(process: int) -> Loopback:
    """Return the server of this process."""
    return Loopback()
