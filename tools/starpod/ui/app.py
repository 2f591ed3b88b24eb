"""The application: routes, access control, error pages, and the event stream that makes open pages reload."""

from __future__ import annotations

import asyncio
import hmac
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from urllib.parse import urlencode

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from starpod.client import BadArgument, StarpodError, Unreachable
from starpod.remote.catalog import no_answer
from starpod.remote.game import Impossible
from starpod.report.pages import asset, plotly
from starpod.report.site import headers
from starpod.serving.sockets import parse_whole, refusal
from starpod.ui.compare import compare_file, compare_page
from starpod.ui.continuing import Continuing
from starpod.ui.episodes import episode_page, episodes_page, with_pictures
from starpod.ui.fleet import (
    back_to_game,
    environment_page,
    fleet_page,
    fork_episode,
    game_action,
    game_page,
    picture,
    sessions_page,
    start_game,
    watch_action,
    watch_page,
)
from starpod.ui.groups import group_page
from starpod.ui.index import RunIndex
from starpod.ui.indexer import Indexer
from starpod.ui.jobs import TurnJobs
from starpod.ui.notes import save_notes
from starpod.ui.page import OWN, LiveSite, render
from starpod.ui.reading import BadFile
from starpod.ui.runs import run_page, runs_page
from starpod.ui.turns import (
    continuation_action,
    continuation_page,
    continuation_picture,
    job_action,
    job_page,
    jobs_page,
    start_job,
)

HEADERS = headers(scripts="'self'", styles="'self' 'unsafe-inline'", images="'self' data:")
_HEARTBEAT = 15
"""Seconds without news after which an event stream sends a comment, which keeps the connection open."""


_ROUTES: list[tuple[str, str, Callable[[LiveSite, Request], Response | Awaitable[Response]]]] = [
    ("GET", "/", runs_page),
    ("GET", "/runs/{path:path}", run_page),
    ("GET", "/compare", compare_page),
    ("GET", "/comparison.html", compare_file),
    ("GET", "/episodes", episodes_page),
    ("GET", "/episode", with_pictures(episode_page)),
    ("GET", "/group", with_pictures(group_page)),
    ("POST", "/notes", save_notes),
    ("GET", "/fleet", fleet_page),
    ("GET", "/play/session/{game}", game_page),
    ("POST", "/play/session/{game}/{what}", game_action),
    ("GET", "/play/session/{game}/{what}", back_to_game),
    ("GET", "/play/{environment}", environment_page),
    ("POST", "/play/{environment}", start_game),
    ("GET", "/picture", picture),
    ("POST", "/fork", fork_episode),
    ("GET", "/turns", jobs_page),
    ("POST", "/turns", start_job),
    ("GET", "/turns/{job}", job_page),
    ("POST", "/turns/{job}/{what}", job_action),
    ("GET", "/continuations/{tree}/{number}", continuation_page),
    ("GET", "/continuations/{tree}/{number}/picture", continuation_picture),
    ("POST", "/continuations/{tree}/{number}/{what}", continuation_action),
    ("GET", "/sessions", sessions_page),
    ("GET", "/watch", watch_page),
    ("POST", "/watch/{what}", watch_action),
]
"""Method, path and function of each page. Functions that are not coroutines run in threads, and block no event loop."""


def create_app(
    index: RunIndex, *, continuing: Continuing | None = None, hosts: Collection[str] = (), token: str = ""
) -> FastAPI:
    """Return the site's application. It keeps the index up to date while it runs, and closes it at the end.

    Args:
        continuing: live sessions and the policies that play in them; None if no server was named.
        token: secret that a visitor's first request must carry; empty: the site is open to everyone.
    """
    indexer = Indexer(index)
    jobs = TurnJobs(continuing) if continuing is not None else None
    site = LiveSite(index, indexer, continuing, jobs)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        indexer.start()
        yield
        await asyncio.to_thread(indexer.stop)
        if continuing is not None and jobs is not None:
            await jobs.close()
            await continuing.close()
        index.database.close()

    async def guarded(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        if problem := refusal(request.method, request.headers, hosts):
            response = _problem(request, *problem)
        elif token and (answer := _admission(request, token)):
            response = answer
        else:
            response = await call(request)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    app = FastAPI(
        title="Starpod",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        routes=[
            *(Route(path, partial(page, site), methods=[method]) for method, path, page in _ROUTES),
            Route("/events", _events(site)),
            Route("/assets/{name}", _asset),
        ],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=guarded)],
        lifespan=lifespan,
    )
    app.add_exception_handler(HTTPException, _http_error)
    for kind, (status, sentence) in _EXPECTED.items():
        app.add_exception_handler(kind, partial(_explained, status, sentence))
    app.add_exception_handler(StarpodError, _server_failed(continuing))
    app.add_exception_handler(Exception, _failed)
    return app


def _admission(request: Request, token: str) -> Response | None:
    """Return None if the visitor's cookie holds the token, and otherwise the answer to the request.

    A token in the address is moved into the cookie by a redirect to the same address without it.
    """
    # Browsers send a host's cookies to all its ports, so each port of the address has its own.
    cookie = f"starpod-ui-{parse_whole(request.headers.get('host', '').rpartition(':')[2], 65535)}"
    query_token = request.query_params.get("token", "")
    if hmac.compare_digest(query_token.encode(), token.encode()):
        parameters = [(name, value) for name, value in request.query_params.multi_items() if name != "token"]
        response = RedirectResponse(str(request.url.replace(query=urlencode(parameters))), 303)
        response.set_cookie(cookie, token, httponly=True, samesite="strict")
        return response
    if hmac.compare_digest(request.cookies.get(cookie, "").encode(), token.encode()):
        return None
    return _problem(request, 401, "Open the link that `starpod ui` printed: it holds the token.")


def _events(site: LiveSite) -> Callable[[Request], Awaitable[Response]]:
    """Return the route of server-sent events.

    It sends a new number after each change of the run that the request names, or of any run if it names none.
    """

    async def events(request: Request) -> Response:
        run = request.query_params.get("run", "")

        async def changes() -> AsyncIterator[str]:
            state, silence = site.indexer.changes_of(run), 0
            yield f"retry: 2000\ndata: {state}\n\n"
            while True:
                await asyncio.sleep(1.0)
                silence += 1
                if (new_state := site.indexer.changes_of(run)) != state:
                    state, silence = new_state, 0
                    yield f"data: {state}\n\n"
                elif silence >= _HEARTBEAT:
                    silence = 0
                    yield ": nothing new\n\n"

        return StreamingResponse(changes(), media_type="text/event-stream")

    return events


_ASSETS: Mapping[str, Callable[[], str]] = {
    "site.css": lambda: asset("page.css") + (OWN / "site.css").read_text(encoding="utf-8"),
    "theme.js": lambda: asset("theme.js"),
    # site.js goes first: it records the page as it was served, before charts are drawn in it.
    "site.js": lambda: (OWN / "site.js").read_text(encoding="utf-8") + asset("charts.js"),
}


def _asset(request: Request) -> Response:
    name = request.path_params["name"]
    if name == "plotly.js":
        headers = {"Content-Encoding": "gzip", "Cache-Control": "private, max-age=86400"}
        return Response(plotly(), media_type="text/javascript", headers=headers)
    if name not in _ASSETS:
        raise HTTPException(404)
    return PlainTextResponse(_ASSETS[name](), media_type="text/css" if name.endswith(".css") else "text/javascript")


# --- errors -----------------------------------------------------------------------------------------------------------

_TITLES = {400: "Not understood", 404: "Not found", 410: "Not there any more", 503: "Not available now"}


def _problem(request: Request, status: int, sentence: str) -> Response:
    return render("error.html", status=status, title=_TITLES.get(status, "Not possible"), sentence=sentence)


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = error.detail if error.detail != HTTPStatus(error.status_code).phrase else "There is no such page."
    return _problem(request, error.status_code, message)


_EXPECTED: dict[type[Exception], tuple[int, str]] = {
    BadFile: (410, "This can no longer be read: {}."),
    sqlite3.Error: (503, "The index cannot be read ({}). Start `starpod ui` again; it is rebuilt."),
    Impossible: (409, "{}"),
}
"""Status and sentence of the page for each kind of error."""


def _explained(status: int, sentence: str, request: Request, error: Exception) -> Response:
    return _problem(request, status, sentence.format(error))


def _failed(request: Request, error: Exception) -> Response:
    """Return an error page. FastAPI then raises the error again, so its trace appears in the terminal."""
    kind = type(error).__name__
    text = (
        f"This page cannot be made ({kind}: {error}): a file has other contents than a run writes, or "
        "the site has a bug."
    )
    response = _problem(request, 500, f"{text} Its terminal shows where.")
    response.headers.update(HEADERS)  # this answer does not pass through the middleware that adds them
    return response


def _server_failed(continuing: Continuing | None) -> Callable[[Request, Exception], Response]:
    def answer(request: Request, error: Exception) -> Response:
        status, message = 400 if isinstance(error, BadArgument) else 503, f"The server of environments says: {error}"
        if continuing and isinstance(error, Unreachable) and "failed to connect" in message:
            message = f"Not reached: {no_answer(continuing.games.address, message)}."
        return _problem(request, status, message)

    return answer
