"""The site: people and agents in the same sessions, every action once, nobody else's forms, failures as pages."""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from click.testing import CliRunner

from starpod.client import TLS
from starpod.client.transport import Transport
from starpod.env_server.authoring.environment import Busy, Environment, Outcome
from starpod.env_server.operation.config import ServerConfig, ServerLimits, ServerTLS
from starpod.env_server.registry import Registry
from starpod.env_server.server.server import EnvironmentServer
from starpod.environments.webshop.site.app import create_app
from starpod.environments.webshop.site.cli import site
from starpod.environments.webshop.site.service import Service
from starpod.report import form as options
from starpod.report.site import same_origin
from starpod.serving.sockets import MAX_FORM_BYTES, known_host
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
from tests.environments.webshop.html_text import Reader
from tests.environments.webshop.little import LittleWebShop
from tests.support import ServerProcess, credentials


@dataclass
class Visitor:
    """A browser without JavaScript, and an agent on the gRPC service."""

    http: httpx.AsyncClient
    stub: Any
    server: EnvironmentServer
    url: str = ""
    text: str = ""

    def take(self, reply: httpx.Response) -> httpx.Response:
        self.url, self.text = str(reply.url.path), reply.text
        return reply

    async def get(self, path: str) -> httpx.Response:
        return self.take(await self.http.get(path))

    def form(self, part: str = "") -> dict[str, str]:
        """The hidden fields of the first form whose tag holds `part`."""
        forms = re.findall(r"<form\b([^>]*)>(.*?)</form>", self.text, re.DOTALL)
        body = next(body for tag, body in forms if part in tag)
        return {
            str(attrs["name"]): str(attrs.get("value") or "")
            for tag, attrs in Reader(body).tags
            if tag == "input" and attrs.get("type") == "hidden"
        }

    async def start(self, **fields: str) -> str:
        await self.get("/")
        reply = await self.post("/start", {**self.form("/start"), **fields})
        assert reply.status_code == 200, reply.text
        return self.session

    @property
    def session(self) -> str:
        return self.url.split("/")[2]

    async def post(self, path: str, fields: dict[str, str], **headers: str) -> httpx.Response:
        return self.take(await self.http.post(path, data=fields, headers=headers))

    async def act(self, action: str) -> httpx.Response:
        assert action in Reader(self.text).buttons(), action
        return await self.post(self.url + "act", {**self.form('id="shop"'), "action": action})

    async def search(self, words: str) -> httpx.Response:
        return await self.post(self.url + "act", {**self.form("search"), "search_query": words})

    @property
    def notice(self) -> str:
        found = re.search(r'<p class="notice"[^>]*>(.*?)</p>', self.text)
        return found[1] if found else ""

    async def agent(self, session: str, index: int, action: str) -> pb.StepResponse:
        request = pb.StepRequest(session_id=session, epoch=1, step_index=index, actions=[pb.Action(text=action)])
        reply: pb.StepResponse = await self.stub.Step(request)
        return reply


Visit = Callable[..., Awaitable[Visitor]]


@pytest.fixture
async def visit() -> AsyncIterator[Visit]:
    async with AsyncExitStack() as stack:

        async def open_shop(
            *,
            environment: type[Environment] = LittleWebShop,
            limits: ServerLimits | None = None,
            pictures: bool = False,
            transport: Transport | None = None,
            **config: Any,
        ) -> Visitor:
            server = EnvironmentServer(
                Registry([environment]), ServerConfig(port=0, limits=limits or ServerLimits(), **config)
            )
            await server.start()
            stack.push_async_callback(server.stop, 0)
            service = Service(server.address, transport)
            stack.push_async_callback(service.close)
            web = httpx.ASGITransport(create_app(service, pictures=pictures, hosts=["shop.test"]))
            http = httpx.AsyncClient(transport=web, base_url="http://shop.test", follow_redirects=True)
            await stack.enter_async_context(http)
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.address))
            return Visitor(http, EnvironmentServiceStub(channel), server)

        yield open_shop


@pytest.fixture
async def visitor(visit: Visit) -> Visitor:
    return await visit()


async def test_a_name_that_is_not_its_own_is_not_answered(visitor: Visitor) -> None:
    """DNS rebinding: a page of evil.test whose name has come to mean 127.0.0.1 is not one of ours."""
    for path in ("/", "/s/anything/state"):
        reply = await visitor.http.get(path, headers={"host": "evil.test"})
        assert reply.status_code == 421
        assert "does not answer to that name" in reply.text
    reply = await visitor.http.post(
        "/start", data={}, headers={"host": "evil.test:80", "origin": "http://evil.test:80"}
    )
    assert reply.status_code == 421


def test_requests_of_strangers_are_known() -> None:
    for known in ("127.0.0.1:8080", "[::1]:8080", "LOCALHOST", "192.168.1.7", "shop.test:1"):
        assert known_host(known, ["shop.test"]), known
    for strange in ("shop.test.evil.test", "127.0.0.1.evil.test", "", "[::1"):
        assert not known_host(strange, ["shop.test"]), strange
    assert same_origin({"host": "a:1", "origin": "https://a:1", "sec-fetch-site": "none"}) and same_origin({})
    assert not same_origin({"host": "a:1", "origin": "http://a:2"})


async def test_numbers_beyond_what_they_can_be(visitor: Visitor) -> None:
    """5,000 digits are more than Python converts: they used to be an error of the site's own."""
    await visitor.start(seed="7")
    path, form = visitor.url, visitor.form("search")
    await visitor.get("/")
    start = visitor.form("/start")
    for digits in ("9" * 5000, "4294967296", "\u0663", "\u00b2", "-1", "1e9", "nan"):
        for name in ("epoch", "step_index"):
            reply = await visitor.http.post(path + "act", data={**form, "search_query": "women", name: digits})
            assert reply.status_code == 400, (name, reply.text)
        for name in ("seed", "option-goal") if digits != "4294967296" else ():
            reply = await visitor.http.post("/start", data={**start, name: digits})
            assert reply.status_code == 400, (name, reply.text)
        if digits.isascii():
            reply = await visitor.http.post("/start", content=b"", headers={"content-length": digits})
            assert reply.status_code == 413


async def test_a_person_shops_and_sees_the_score(visitor: Visitor) -> None:
    await visitor.start(seed=str(2**64 - 1), **{"option-show_attrs": "on"})
    assert re.fullmatch(r"/s/[\w-]+/", visitor.url) and "open toe women&#39;s sandals" in visitor.text
    await visitor.search("women")
    assert "Page 1 (Total results: 4)" in visitor.text
    moves = ("b07sandals", "navy blue", "7.5 wide", "features", "< prev", "attributes", "< prev")
    for action in map("click[{}]".format, moves):
        assert (await visitor.act(action)).status_code == 200 and not visitor.notice
    assert len(re.findall('aria-pressed="true"', visitor.text)) == 2
    path = visitor.url
    trail = (await visitor.get(f"{path}state")).json()["trail"]
    assert [seen["step"] for seen in trail] == list(range(9))
    assert [seen["action"] for seen in trail][:3] == ["", "search[women]", "click[b07sandals]"]
    assert "click[b07sandals]" in (await visitor.get(f"{path}watch")).text
    await visitor.get(path)
    await visitor.act("click[buy now]")
    assert re.search(r'id="reward".*?<pre>1\.0</pre>', visitor.text, re.DOTALL)
    await visitor.post(visitor.url + "again", visitor.form("again"))
    assert 'data-page="index"' in visitor.text


async def test_what_cannot_be_opened_is_said_on_the_index(visitor: Visitor) -> None:
    await visitor.get("/")
    form = visitor.form("/start")
    for name, value, said in (
        ("seed", "-1", "whole number"),
        ("seed", str(2**64), "whole number"),
        ("seed", "²", "whole number"),
        ("option-goal", "x", "goal: &#39;x&#39; is not a whole number"),
        ("option-goal", "-4", "goal"),
        ("option-goals", "robots", "goals"),
    ):
        reply = await visitor.post("/start", {**form, name: value})
        assert reply.status_code == 400 and re.search(rf'role="alert">[^\n]*{said}', reply.text), (name, value)
    assert visitor.server.worker.live_sessions == 0


async def test_a_double_click_is_one_session_and_one_turn(visitor: Visitor) -> None:
    await visitor.get("/")
    form = visitor.form("/start")
    first, second = [await visitor.post("/start", form) for _ in range(2)]
    assert first.url == second.url and visitor.server.worker.live_sessions == 1
    fields = {**visitor.form("search"), "search_query": "women"}
    act, state = (f"/s/{visitor.session}/{name}" for name in ("act", "state"))
    replies = await asyncio.gather(*(visitor.http.post(act, data=fields) for _ in range(5)))
    assert {reply.status_code for reply in replies} == {200} and all("results: 4" in reply.text for reply in replies)
    assert (await visitor.get(state)).json()["place"] == "1.1"


async def test_a_stale_page_does_nothing_and_the_present_one_is_shown(visitor: Visitor) -> None:
    session = await visitor.start()
    stale, goal = {**visitor.form("search"), "search_query": "women"}, visitor.form("again")
    await visitor.search("garden")
    await visitor.post(f"/s/{session}/act", stale)
    assert "had changed" in visitor.notice and 'value="garden"' in visitor.text
    await visitor.act("click[b000000010]")
    assert not visitor.notice
    await visitor.post(f"/s/{session}/again", goal)
    await visitor.search("women")
    await visitor.post(f"/s/{session}/again", goal)
    assert "had changed" in visitor.notice and "results: 4" in visitor.text


async def test_an_agent_that_steps_in_between_is_noticed(visitor: Visitor) -> None:
    session = await visitor.start()
    await visitor.agent(session, 0, "search[women]")
    await visitor.search("garden")
    assert "had changed" in visitor.notice and 'value="women"' in visitor.text
    await visitor.act("click[b07sandals]")
    with pytest.raises(grpc.aio.AioRpcError) as refused:  # and the agent notices the person
        await visitor.agent(session, 1, "click[next >]")
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "Price: $34.99 to $41.5" in (await visitor.get(f"/s/{session}/")).text


async def test_a_session_of_an_agent_can_be_taken_over(visitor: Visitor) -> None:
    opened = await visitor.stub.Open(pb.OpenRequest(environment_id="webshop-v1", seed=1))
    session = opened.sessions[0].session_id
    await visitor.agent(session, 0, "search[women]")
    await visitor.get("/")
    reply = await visitor.post("/find", {**visitor.form("/find"), "session": session, "how": "take"})
    assert "results: 4" in reply.text and visitor.url == f"/s/{session}/"
    await visitor.act("click[b07sandals]")
    await visitor.act("click[sand]")  # the agent's limit of three turns is used up
    assert "limit" in visitor.notice
    await visitor.act("click[buy now]")
    assert "over" in visitor.notice and "Buy Now" in visitor.text
    assert "New goal" not in visitor.text, "somebody else's episode is not ended by a click"
    epoch = visitor.form('id="shop"')["epoch"]
    forbidden = await visitor.post(f"/s/{session}/again", {"csrf": visitor.form('id="shop"')["csrf"], "epoch": epoch})
    assert forbidden.status_code == 403


async def test_what_does_not_work_here_is_said(visitor: Visitor) -> None:
    session = await visitor.start()
    await visitor.post(f"/s/{session}/act", {**visitor.form("search"), "action": "click[buy now]"})
    assert "did not work" in visitor.notice
    await visitor.search("[wool] ]x[")
    assert 'value="wool x"' in visitor.text and not visitor.notice
    await visitor.search("[]")
    assert "did not work" in visitor.notice
    assert (await visitor.search("x" * MAX_FORM_BYTES)).status_code == 413


async def test_watching_shows_each_step_and_changes_nothing(visitor: Visitor) -> None:
    opened = await visitor.stub.Open(pb.OpenRequest(environment_id="webshop-v1", seed=1))
    session = opened.sessions[0].session_id
    await visitor.get("/")
    await visitor.post("/find", {**visitor.form("/find"), "session": session, "how": "watch"})
    assert visitor.url == f"/s/{session}/watch" and 'http-equiv="refresh"' in visitor.text
    for index, (action, title) in enumerate((("search[women]", "women: page 1"), ("click[b07sandals]", "Larkfield"))):
        before = await visitor.stub.Snapshot(pb.SnapshotRequest(session_id=session))
        for path in ("state", "frame", "watch", "state"):
            await visitor.get(f"/s/{session}/{path}")
        assert await visitor.stub.Snapshot(pb.SnapshotRequest(session_id=session)) == before
        await visitor.agent(session, index, action)
        state = (await visitor.get(f"/s/{session}/state")).json()
        assert state["place"] == f"1.{index + 1}" and title in state["trail"][-1]["title"]
    frame = await visitor.get(f"/s/{session}/frame")
    assert "<body inert" in frame.text and "form-action 'none'" in frame.headers["content-security-policy"]
    assert "frame-ancestors 'self'" in frame.headers["content-security-policy"]


async def test_forms_of_others_are_refused(visitor: Visitor) -> None:
    session = await visitor.start()
    fields = {**visitor.form("search"), "search_query": "women"}
    for changed, headers in (
        ({**fields, "csrf": ""}, {}),
        ({**fields, "csrf": "é" * 64}, {}),
        ({key: value for key, value in fields.items() if key != "csrf"}, {}),
        (fields, {"Origin": "http://evil.example"}),
        (fields, {"Origin": "null"}),
        (fields, {"Sec-Fetch-Site": "cross-site"}),
        (fields, {"Sec-Fetch-Site": "same-site"}),
    ):
        reply = await visitor.post(f"/s/{session}/act", changed, **headers)
        assert reply.status_code == 403, (changed, headers)
    reply = await visitor.post(f"/s/{session}/act", fields, **{"Content-Encoding": "gzip"})
    assert reply.status_code == 415 and "gzip" in reply.text
    other = await visitor.start()
    reply = await visitor.post(f"/s/{other}/act", fields)  # the token of another session
    assert reply.status_code == 403 and visitor.server.worker.live_sessions == 2
    for one in (session, other):
        assert (await visitor.get(f"/s/{one}/state")).json()["place"] == "1.0"
    good = await visitor.post(
        f"/s/{session}/act", fields, **{"Origin": "http://shop.test", "Sec-Fetch-Site": "same-origin"}
    )
    assert "results: 4" in good.text


async def test_every_reply_has_the_headers_that_protect_it(visitor: Visitor) -> None:
    session = await visitor.start()
    nonces = set()
    for path in ("/", f"/s/{session}/", f"/s/{session}/watch", f"/s/{session}/state", "/nowhere", "/s/unknown/"):
        reply = await visitor.get(path)
        policy = reply.headers["content-security-policy"]
        assert reply.headers["cache-control"] == "no-store" and "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "'unsafe-inline'" not in policy.replace("style-src 'unsafe-inline'", "")
        assert reply.headers["x-content-type-options"] == "nosniff" and "set-cookie" not in reply.headers
        nonces.add(re.search("nonce-([^']+)", policy)[1])  # type: ignore[index]
        for nonce in re.findall('<script nonce="([^"]+)"', reply.text):
            assert f"'nonce-{nonce}'" in policy
    assert len(nonces) == 6


async def test_ids_of_sessions_stand_in_the_path_alone(visitor: Visitor) -> None:
    session = await visitor.start()
    await visitor.get("/")
    reply = await visitor.http.post(
        "/find", data={**visitor.form("/find"), "session": session, "how": "take"}, follow_redirects=False
    )
    assert reply.headers["location"] == f"/s/{session}/"
    for wrong in ("", "two words", "x" * 65, "\x00", "ü"):
        await visitor.get("/")
        assert (await visitor.post("/find", {**visitor.form("/find"), "session": wrong})).status_code == 400, wrong


async def test_pages_are_written_for_people(visitor: Visitor) -> None:
    """Code as code, prices with their cents, and words for nothing."""
    assert options.marked("one of `<a>`") == "one of <code>&lt;a&gt;</code>"
    await visitor.get("/")
    assert "`" not in re.sub(r"<(style|script).*?</\1>", "", visitor.text, flags=re.DOTALL)
    await visitor.start()
    reply = await visitor.search("women")
    assert "https:" not in reply.headers["content-security-policy"] and 'src="https:' not in reply.text
    await visitor.act("click[b07sandals]")
    assert "Price: $34.99 to $41.50" in visitor.text and 'data-price="$34.99 to $41.50"' in visitor.text
    await visitor.act("click[buy now]")
    shown = Reader(visitor.text).texts
    assert "none" in shown and "{}" not in shown
    assert any(text.endswith("%") for text in shown)


async def test_an_unknown_or_ended_session_is_a_page(visitor: Visitor) -> None:
    session = await visitor.start()
    page, form = visitor.text, visitor.form("search")
    await visitor.stub.Close(pb.CloseRequest(session_ids=[session]))
    for path in (f"/s/{session}/", f"/s/{session}/watch"):
        reply = await visitor.get(path)
        assert reply.status_code == 410 and "This session has ended" in reply.text
    assert (await visitor.get(f"/s/{session}/state")).json() == {"error": "This session has ended"}
    assert page and (await visitor.post(f"/s/{session}/act", {**form, "search_query": "x"})).status_code == 410
    reply = await visitor.get("/s/never-was/")
    assert reply.status_code == 404 and "No session of that id" in reply.text


async def test_a_server_that_is_gone_is_a_page(visitor: Visitor) -> None:
    session = await visitor.start()
    form = {**visitor.form("search"), "search_query": "women"}
    await visitor.server.stop(0)
    index, page = await visitor.get("/"), await visitor.get(f"/s/{session}/")
    for reply in (index, page, await visitor.post(f"/s/{session}/act", form)):
        assert reply.status_code == 503 and "The shop is closed" in reply.text
        assert int(reply.headers["retry-after"]) >= 1
    # The same form can be sent again from the page: the turn is played once whatever happened to the first.
    assert visitor.form("/act") == form


class CrowdedShop(LittleWebShop):
    """Busy at the first step."""

    asked = 0

    def step(self, action: Any) -> Outcome:
        type(self).asked += 1
        if type(self).asked == 1:
            raise Busy("all hands are full", 7.0)
        return super().step(action)


async def test_a_full_server_is_a_page_that_can_be_sent_again(visit: Visit) -> None:
    visitor = await visit(environment=CrowdedShop)
    session = await visitor.start()
    reply = await visitor.search("women")
    assert reply.status_code == 503 and reply.headers["retry-after"] == "7" and "Try again" in reply.text
    await visitor.post(f"/s/{session}/act", visitor.form("/act"))
    assert "results: 4" in visitor.text


async def test_pictures_of_products_and_pages_for_no_more_sessions_and_a_lost_path(visit: Visit) -> None:
    visitor = await visit(limits=ServerLimits(max_sessions=1), pictures=True)
    await visitor.start()
    reply = await visitor.search("women")
    assert "https:" in reply.headers["content-security-policy"] and 'src="https://images.example.com/' in reply.text
    await visitor.get("/")
    reply = await visitor.post("/start", visitor.form("/start"))
    assert reply.status_code == 503 and "The shop is full" in reply.text and "retry-after" in reply.headers
    assert "Not Found" in (await visitor.get("/nowhere")).text


async def test_a_server_without_the_shop_is_a_page(visit: Visit) -> None:
    class Other(LittleWebShop):
        spec = LittleWebShop.spec.__class__(id="other-v1", version="1.0.0", title="Other")

    reply = await (await visit(environment=Other)).get("/")
    assert reply.status_code == 503 and "does not host webshop-v1" in reply.text


async def test_token_and_certificate_are_shown_to_the_server(visit: Visit, tmp_path: Path) -> None:
    files = credentials(tmp_path)
    config = {"token_file": files["token"], "tls": ServerTLS(files["certificate"], files["key"])}
    visitor = await visit(transport=Transport(files["token"], TLS(files["ca"])), **config)
    await visitor.start()
    assert "Instruction:" in visitor.text
    stranger = await visit(transport=Transport(tls=TLS(files["ca"])), **config)
    reply = await stranger.get("/")
    assert reply.status_code == 502 and "refuses this site" in reply.text


async def test_sessions_of_every_worker_are_found() -> None:
    servers = [EnvironmentServer(Registry([LittleWebShop]), ServerConfig(port=0)) for _ in range(2)]
    async with AsyncExitStack() as stack:
        for server in servers:
            await server.start()
            stack.push_async_callback(server.stop, 0)
        endpoints = tuple(f"0.0.0.0:{server.port}" for server in servers)
        servers[0]._service._endpoints = endpoints
        service = Service(servers[0].address)
        stack.push_async_callback(service.close)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(servers[1].address))
        opened = await EnvironmentServiceStub(channel).Open(pb.OpenRequest(environment_id="webshop-v1"))  # type: ignore[no-untyped-call]
        assert (await service.current_place(opened.sessions[0].session_id)).index == 0
        for key in ("blue", "white", "red", "green"):
            session = await service.open("webshop-v1", {}, None, key, 60)
            assert await service.open("webshop-v1", {}, None, key, 60) == session, "a form is sent twice"
        assert [server.worker.live_sessions for server in servers] == [2, 3]


def test_fields_are_made_from_the_schema_of_the_shop() -> None:
    properties = {
        "b": {"type": "boolean", "default": True},
        "n": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
        "catalogue": {"type": "string", "default": ""},
        "x": {"type": "array"},
        "f": {"type": "number", "default": 1.0},
        "observation": {"type": "string"},
        "e": {"enum": ["p", "q"], "type": "string", "default": "p"},
        "size": {"enum": [4, 9, 16], "type": "integer", "default": 4},
    }
    known = options.fields(json.dumps({"properties": properties}), first=("catalogue",), hidden=("observation",))
    names, kinds, defaults = zip(*((field.name, field.kind, field.default) for field in known), strict=True)
    assert names == ("catalogue", "b", "n", "f", "e", "size")
    assert kinds == ("text", "check", "number", "number", "choice", "choice")
    assert defaults == ("", "on", "", "1.0", "p", "4")
    assert (
        options.changed_options(known, {"option-b": "on", "option-e": "p", "option-f": "1.0", "option-size": "4"}) == {}
    )
    given = {"option-e": "q", "option-size": "9", "option-n": " 3 ", "option-catalogue": "mine"}
    assert options.changed_options(known, given) == {"catalogue": "mine", "b": False, "n": 3, "e": "q", "size": 9}
    with pytest.raises(ValueError, match=r"n: '1\.5' is not a whole number"):
        options.changed_options(known, {"option-n": "1.5"})


def test_calls_of_the_command_that_make_no_sense_are_refused() -> None:
    for words, said in (
        (["nonsense"], "is not host:port"),
        (["a:1", "--key", __file__], "go together"),
        (["--token-file", __file__], "give its ADDRESS"),
        (["a:1", "--store", "x=y"], "leave out ADDRESS"),
        (["--store", "xy"], "is not NAME=PATH"),
    ):
        result = CliRunner().invoke(site, words)
        assert result.exit_code == 2 and said in result.output


def test_the_command_opens_the_shop_and_ends_when_told() -> None:
    process = ServerProcess([sys.executable, "-m", "starpod.cli.main", "webshop", "site"])
    try:
        reply = httpx.get(process.address, trust_env=False, timeout=60)
        assert reply.status_code == 200 and "Start shopping" in reply.text and "webshop-v1" in reply.text
        assert process.terminate() == 0, process.log
    finally:
        process.close()
