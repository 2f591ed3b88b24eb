"""The pages of the site. Each form that changes a session names the step of the session for which it was made."""

from __future__ import annotations

import json
import re
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI
from jinja2 import Environment
from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from starpod.client import (
    BadArgument,
    DeadlineExceeded,
    Draining,
    EpisodeOver,
    OutOfOrder,
    Overloaded,
    SessionLost,
    StarpodError,
    Unauthenticated,
    UnknownSession,
    Unreachable,
    Unsupported,
)
from starpod.environments.webshop.shop import actions
from starpod.environments.webshop.shop.markup import (
    logo,
    script_hash,
    stylesheet,
    templates_in,
    with_cents,
    with_fields,
    with_pictures,
)
from starpod.report import form as options
from starpod.report.site import Guard, headers
from starpod.serving.http import refuse_encoding
from starpod.serving.sockets import parse_whole, refusal

from .service import Service, SessionPage, SessionTurn
from .trail import Trail

_FIRST = ("catalogue", "goals")
"""Options that are always visible; the others are in a collapsed section."""
_HIDDEN = ("observation", "presentation", "num_prev_obs", "num_prev_actions")
"""Options about the text for agents, which people do not see."""

_HERE = Path(__file__).parent
_LEASE_SECONDS = 3600.0
_OWN_SESSIONS = 10_000
_MAX_SEED = 2**64 - 1
_MAX_INDEX = 2**32 - 1
_NOTICES = {
    "moved": "The session had changed, through an agent or in another tab, so your action was not taken. "
    "This is the current page.",
    "over": "This episode is over. Nothing more can be done in it.",
    "limit": "A limit of the session ended this episode.",
    "invalid": "That did not work on this page.",
}
_CLOSED = (503, "The shop is closed", "The server does not answer, or is shutting down. Try again in a moment.")
_FAILURES: dict[type[StarpodError], tuple[int, str, str]] = {
    UnknownSession: (
        404,
        "No session of that id",
        "It has ended, or there never was one: the id may have a typing mistake.",
    ),
    SessionLost: (410, "This session is lost", "Its environment stopped. Start a new one."),
    Overloaded: (503, "The shop is full", "The server has reached its limits. Try again in a moment."),
    Draining: _CLOSED,
    Unreachable: _CLOSED,
    DeadlineExceeded: (504, "That took too long", "Try again: your action is taken only once, even if you repeat it."),
    Unauthenticated: (502, "The shop's server refuses this site", "Start the site with a valid token."),
    Unsupported: (502, "The shop's server lacks something", "It must draw html pages and take snapshots."),
    BadArgument: (400, "That was not understood", "Go back and try something else."),
}
"""HTTP status, title and advice for each kind of failed call."""
_OTHER_FAILURE = (502, "Something went wrong in the shop", "Try again, or start a new session.")
_ENDED = (410, "This session has ended", "It was closed, or nothing was done in it for too long. Start a new one.")


class ShopSite:
    """A site for one server.

    Args:
        pictures: show the products' pictures, which browsers load over the network, instead of drawn ones.
    """

    def __init__(self, service: Service, environment: str, pictures: bool) -> None:
        self.service = service
        self.environment = environment
        self.pictures = pictures
        self.guard = Guard()
        self.trail = Trail()
        self._own: OrderedDict[str, None] = OrderedDict()  # sessions opened on this site; only these can be reset on it

    # --- the index -----------------------------------------------------------------------------------------------

    async def home(self, request: Request, problem: str = "", status: int = 200) -> Response:
        spec = await self.service.environment(self.environment)
        if spec is None:
            raise HTTPException(503, f"The server does not host {self.environment}.")
        fields = options.fields(spec.options_schema_json, first=_FIRST, hidden=_HIDDEN)
        return _render(
            request, "home.html", status, problem=problem, spec=spec, key=secrets.token_urlsafe(16),
            first=[field for field in fields if field.name in _FIRST],
            more=[field for field in fields if field.name not in _FIRST], token=self.guard.token("start"),
        )  # fmt: skip

    async def start(self, request: Request) -> Response:
        form = await self._form(request, "start")
        spec = await self.service.environment(self.environment)
        try:
            values = options.changed_options(
                options.fields(spec.options_schema_json if spec else "", hidden=_HIDDEN), form
            )
            seed = _seed(form.get("seed", ""))
        except ValueError as error:
            return await self.home(request, str(error), 400)
        try:
            session = await self.service.open(self.environment, values, seed, form.get("key", ""), _LEASE_SECONDS)
        except BadArgument as error:
            return await self.home(request, error.message, 400)
        self._own[session] = None
        while len(self._own) > _OWN_SESSIONS:
            self._own.popitem(last=False)
        return _redirect(_path(session))

    async def find(self, request: Request) -> Response:
        """Redirect to the session whose id was typed in. Ids are only in paths, never in queries."""
        form = await self._form(request, "start")
        session = form.get("session", "").strip()
        if not re.fullmatch(r"[!-~]{1,64}", session):
            return await self.home(request, "That is not the id of a session.", 400)
        await self.service.current_place(session)
        return _redirect(_path(session) + ("" if form.get("how") == "take" else "watch"))

    # --- a session -----------------------------------------------------------------------------------------------

    async def shop(self, request: Request, session: str) -> Response:
        page = await self._fetch_page(session)
        place = page.place
        banner = _templates().get_template("bar.html").render(
            session=session, place=_encode_place(place),
            notice=_NOTICES.get(request.query_params.get("notice", ""), ""), token=self.guard.token(session),
            own=session in self._own, epoch=place.epoch, nonce=request.state.nonce,
        )  # fmt: skip
        fields = {"csrf": self.guard.token(session), "epoch": str(place.epoch), "step_index": str(place.index)}
        return HTMLResponse(with_fields(page.html, fields, banner))

    async def act(self, request: Request, session: str) -> Response:
        form = await self._form(request, session)
        place = _place(form)
        action = form.get("action") or actions.search(form.get("search_query", "")) or "search[]"
        try:
            transition = await self.service.act(session, place, action)
        except OutOfOrder as error:
            return _redirect(_path(session) + f"?notice={'over' if isinstance(error, EpisodeOver) else 'moved'}")
        except (Overloaded, Unreachable, DeadlineExceeded) as error:
            # The server executes a step only once, so the page can offer to send the same form again.
            return self._failed(request, error, form=form)
        self.trail.act(session, place, action)
        if transition.truncated:
            return _redirect(_path(session) + "?notice=limit")
        is_invalid = any(not outcome.valid for outcome in transition.outcomes)
        return _redirect(_path(session) + ("?notice=invalid" if is_invalid else ""))

    async def again(self, request: Request, session: str) -> Response:
        """Start the next goal in a session that was opened on this site."""
        form = await self._form(request, session)
        if session not in self._own:
            raise HTTPException(403, "Only sessions that were started on this site get a new goal from it.")
        try:
            await self.service.again(session, _place(form).epoch)
        except OutOfOrder:
            return _redirect(_path(session) + "?notice=moved")
        return _redirect(_path(session))

    async def watch(self, request: Request, session: str) -> Response:
        page = await self._fetch_page(session)
        return _render(
            request, "watch.html", session=session, place=_encode_place(page.place), trail=self.trail.of(session)
        )  # fmt: skip

    async def frame(self, request: Request, session: str) -> Response:
        """Show the session's page without working forms."""
        page = await self._fetch_page(session)
        request.state.framed = True
        return HTMLResponse(re.sub(r"<body\b", "<body inert", page.html, count=1))

    async def state(self, request: Request, session: str) -> Response:
        """Return the session's current step and history, for pages that refresh themselves."""
        place = await self.service.current_place(session)
        if self.trail.last(session) != place:
            place = (await self._fetch_page(session)).place
        return JSONResponse({"place": _encode_place(place), "trail": self.trail.of(session)})

    # --- shared helpers ------------------------------------------------------------------------------------------

    async def _fetch_page(self, session: str) -> SessionPage:
        page = await self.service.page(session)
        html = with_cents(page.html)
        page = SessionPage(page.place, with_pictures(html) if self.pictures else html)
        self.trail.see(session, page)
        return page

    async def _form(self, request: Request, purpose: str) -> dict[str, str]:
        """Return the fields of a form. Raises HTTPException if it is not plain UTF-8 from our own pages."""
        if problem := refuse_encoding(request.scope["headers"]):
            raise HTTPException(415, f"This form cannot be read: {problem}.")
        form = {name: value for name, value in (await request.form()).items() if isinstance(value, str)}
        if not self.guard.admits(purpose, form.get("csrf", ""), request.headers):
            raise HTTPException(403, "This form is too old, or it did not come from this site. Open the page again.")
        return form

    def _failed(self, request: Request, error: StarpodError, form: Mapping[str, str] | None = None) -> Response:
        status, title, advice = self._explain(request, error)
        response = _render(
            request, "error.html", status, title=title, advice=advice, detail=error.message, again=form or {},
            action=request.url.path,
        )  # fmt: skip
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            response.headers["Retry-After"] = str(max(1, round(error.retry_after or 5)))
        return response

    def _explain(self, request: Request, error: StarpodError) -> tuple[int, str, str]:
        """Return HTTP status, title and advice for a failed call."""
        session = request.path_params.get("session", "")
        if isinstance(error, UnknownSession) and (session in self._own or self.trail.last(session)):
            return _ENDED
        return next((page for kind, page in _FAILURES.items() if isinstance(error, kind)), _OTHER_FAILURE)

    def refused(self, request: Request, error: Exception) -> Response:
        """Show a failed call to the server as a page."""
        assert isinstance(error, StarpodError)
        if request.url.path.endswith("/state"):
            status, title, _ = self._explain(request, error)
            return JSONResponse({"error": title}, status)
        return self._failed(request, error)


def create_app(
    service: Service, *, environment: str = "webshop-v1", pictures: bool = False, hosts: Collection[str] = ()
) -> FastAPI:
    """Make the site as an ASGI application, which closes the service when it ends.

    Args:
        pictures: show the products' pictures, which browsers load over the network.
        hosts: accepted names in the Host header.
    """
    site = ShopSite(service, environment, pictures)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await service.close()

    routes = (
        ("GET", "/", site.home),
        ("POST", "/start", site.start),
        ("POST", "/find", site.find),
        ("GET", "/s/{session}/", site.shop),
        ("POST", "/s/{session}/act", site.act),
        ("POST", "/s/{session}/again", site.again),
        ("GET", "/s/{session}/watch", site.watch),
        ("GET", "/s/{session}/frame", site.frame),
        ("GET", "/s/{session}/state", site.state),
    )

    async def guarded(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        request.state.nonce = secrets.token_urlsafe(16)
        request.state.framed = False
        if problem := refusal(request.method, request.headers, hosts):
            response = _http_error(request, HTTPException(*problem))
        else:
            response = await call(request)
        scripts = f"{script_hash()} 'nonce-{request.state.nonce}'"
        images = "data: https:" if pictures else "data:"
        for name, value in headers(scripts=scripts, images=images, framed=request.state.framed).items():
            response.headers[name] = value
        return response

    app = FastAPI(
        title="WebShop",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        routes=[Route(path, _with_path_parameters(endpoint), methods=[method]) for method, path, endpoint in routes],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=guarded)],
        lifespan=lifespan,
    )
    app.add_exception_handler(StarpodError, site.refused)
    app.add_exception_handler(HTTPException, _http_error)
    return app


def _render(request: Request, name: str, status: int = 200, **fields: Any) -> Response:
    return HTMLResponse(_templates().get_template(name).render(nonce=request.state.nonce, **fields), status)


def _http_error(request: Request, error: Exception) -> Response:
    """Show an error other than a failed call as a page."""
    assert isinstance(error, HTTPException)
    title = HTTPStatus(error.status_code).phrase
    detail = "" if error.detail == title else error.detail
    return _render(
        request, "error.html", error.status_code, title=title, advice=detail, detail="", again={}, action=""
    )  # fmt: skip


def _with_path_parameters(endpoint: Callable[..., Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def call(request: Request) -> Response:
        return await endpoint(request, **request.path_params)

    return call


def _path(session: str) -> str:
    return f"/s/{quote(session, safe='')}/"


def _redirect(path: str) -> Response:
    return RedirectResponse(path, 303)


def _encode_place(place: SessionTurn) -> str:
    return f"{place.epoch}.{place.index}"


def _place(form: Mapping[str, str]) -> SessionTurn:
    """Return the step for which the form was made. Raises HTTPException 400 if it is missing."""
    epoch, index = parse_whole(form.get("epoch", ""), _MAX_INDEX), parse_whole(form.get("step_index", "0"), _MAX_INDEX)
    if epoch is None or index is None:
        raise HTTPException(400, "The form does not say for which step it was meant. Open the page again.")
    return SessionTurn(epoch, index)


def _seed(text: str) -> int | None:
    """Parse a seed; an empty field gives None. Raises ValueError."""
    text = text.strip()
    if not text:
        return None
    if (seed := parse_whole(text, _MAX_SEED)) is None:
        raise ValueError("The seed is a whole number from 0 to 2^64 - 1.")
    return seed


@cache
def _templates() -> Environment:
    environment = templates_in(_HERE / "templates")
    css = (_HERE / "templates" / "site.css").read_text(encoding="utf-8")
    environment.globals.update(style=stylesheet() + Markup(css), own_style=Markup(css), logo=logo())
    environment.globals["marked"] = lambda text: Markup(options.marked(text))
    environment.filters["json"] = json.dumps
    return environment
