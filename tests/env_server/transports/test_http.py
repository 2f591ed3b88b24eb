"""The contract as JSON over HTTP: what gRPC answers, HTTP answers, about the same sessions."""

import asyncio
import base64
import contextlib
import json
import re
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import trustme

from starpod.env_server.operation.config import HTTP, ServerLimits, ServerTLS
from starpod.env_server.server.listening import ServerError
from starpod.env_server.transports.encoding import write_json
from starpod.v1 import environment_pb2 as pb
from tests.env_server.conftest import Client, Serve, entered, step_request
from tests.env_server.troublesome import Waiting


class Http:
    """An HTTP client and a gRPC client of the same server."""

    def __init__(self, client: Client, caller: httpx.AsyncClient) -> None:
        self.client = client
        self.caller = caller

    async def call(self, path: str, status: int = 200, **body: Any) -> Any:
        response = await self.caller.post(path, json=body)
        assert response.status_code == status, response.text
        return response.json()

    async def get(self, path: str, status: int = 200) -> Any:
        response = await self.caller.get(path)
        assert response.status_code == status, response.text
        return response.json()

    async def refused(self, path: str, status: int, **body: Any) -> str:
        """The reason of an error."""
        return str((await self.call(path, status, **body))["details"][0]["reason"])

    async def open(self, environment: str, **fields: Any) -> str:
        reply = await self.call("/v1/sessions:open", environment_id=environment, seed=1, **fields)
        return str(reply["sessions"][0]["session_id"])

    async def step(self, session: str, index: int, *actions: str, status: int = 200) -> Any:
        given = [{"text": action} for action in actions]
        return await self.call(f"/v1/sessions/{session}:step", status, epoch=1, step_index=index, actions=given)


ServeHttp = Callable[..., Awaitable[Http]]


@pytest.fixture
async def serve_http(serve: Serve) -> AsyncIterator[ServeHttp]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(*, verify: Any = True, headers: Any = None, hosts: tuple[str, ...] = (), **config: Any) -> Http:
            client = await serve(http=HTTP(0, hosts=hosts), **config)
            caller = httpx.AsyncClient(
                base_url=client.server.http_address, verify=verify, headers=headers, timeout=30, trust_env=False
            )
            return Http(client, await stack.enter_async_context(caller))

        yield start


@pytest.fixture
async def http(serve_http: ServeHttp) -> Http:
    return await serve_http()


async def test_an_episode_over_http_is_that_of_grpc(http: Http) -> None:
    """A session can be used over both transports."""
    session, other = await http.open("walk-v1"), await http.client.open("walk-v1")
    for index, action in enumerate(("Right", "Left", "Right")):
        over_http = await http.step(session, index, action)
        over_grpc = await http.client.stub.Step(step_request(other, index, action))
        observed = over_http["transition"]["observation"]["parts"]
        assert [part["text"] for part in observed] == [part.text for part in over_grpc.transition.observation.parts]
        assert over_http["transition"]["reward"] == over_grpc.transition.reward
        assert over_http["next_step_index"] == over_grpc.next_step_index == index + 1
    assert (await http.step(other.session_id, 3, "Right"))["next_step_index"] == 4
    await http.call("/v1/sessions:close", session_ids=[other.session_id])
    assert (await http.client.fails(http.client.step(other, 4, "Right"))).reason == "UNKNOWN_SESSION"


async def test_a_caller_who_leaves_finds_its_step_played_once(http: Http) -> None:
    session = await http.open("waiting-v1")
    leaver = asyncio.create_task(http.step(session, 0, "gate"))
    await entered()
    leaver.cancel()
    Waiting.opened.set()
    assert (await http.step(session, 0, "gate"))["next_step_index"] == 1
    assert (await http.step(session, 1, "0"))["next_step_index"] == 2


async def test_the_other_calls(http: Http) -> None:
    session = await http.open("walk-v1")
    reset = await http.call(f"/v1/sessions/{session}:reset", epoch=1, seed="7")
    assert (reset["session"]["epoch"], reset["session"]["seed"]) == (2, "7")
    picture = await http.call(f"/v1/sessions/{session}:render", mode="text")
    assert picture["mime"].startswith("text/plain") and base64.b64decode(picture["data"])
    assert (await http.call("/v1/sessions:renew", session_ids=[session, "gone"]))["missing"] == ["gone"]
    everything = await http.get("/v1/environments")
    assert len(everything["environments"]) > 3
    assert not everything["capabilities"]["stream"]
    one = await http.get("/v1/environments/walk-v1")
    assert [each["id"] for each in one["environments"]] == ["walk-v1"] * 2
    await http.get("/v1/environments/wlk-v1", 404)
    fork = {"epoch": 2, "randomness": "RESEED"}
    mistyped = await http.call(f"/v1/sessions/{session}:fork", 400, **fork)
    assert "FORK_RANDOMNESS_KEEP or FORK_RANDOMNESS_RESEED" in mistyped["message"]


async def test_camel_case_unknown_fields_and_numbers_as_text_are_taken(http: Http) -> None:
    reply = await http.call("/v1/sessions:open", environmentId="walk-v1", seed="5", of_the_future={"a": [1]})
    assert reply["sessions"][0]["seed"] == "5"


async def test_errors_have_the_status_of_their_code_and_say_when_to_retry(serve_http: ServeHttp) -> None:
    http = await serve_http(limits=ServerLimits(max_sessions=1))
    session = await http.open("walk-v1")
    response = await http.caller.post("/v1/sessions:open", json={"environment_id": "walk-v1"})
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    details = {each["@type"].rpartition(".")[2]: each for each in response.json()["details"]}
    assert details["ErrorInfo"]["metadata"]["limit"] == "max_sessions"
    assert details["RetryInfo"]["retry_delay"].endswith("s")
    bad = await http.call("/v1/sessions:open", 400, environment_id="walk-v1", options={"nonsense": 1})
    assert "nonsense" in bad["details"][1]["field_violations"][0]["field"]
    assert await http.refused("/v1/sessions:open", 404, environment_id="none-v1") == "UNKNOWN_ENVIRONMENT"
    errors = next(each for each in http.client.server.metrics.collect() if each.name == "starpod_errors")
    assert {"method": "Open", "reason": "UNKNOWN_ENVIRONMENT"} in [sample.labels for sample in errors.samples]
    error = await http.step(session, 1, "Left", status=400)
    assert (error["code"], error["details"][0]["reason"]) == (9, "OUT_OF_ORDER")
    expected = {"expected_epoch": "1", "expected_step_index": "0", "advice": "give_up"}
    assert error["details"][0]["metadata"] == expected
    response = await http.caller.post(f"/v1/sessions/{session}:step", json={"epoch": 1})
    assert "environment;dur=" in response.headers["server-timing"]


async def test_a_batch_is_answered_by_events_as_its_calls_finish(http: Http) -> None:
    slow, quick = await http.open("waiting-v1"), await http.open("walk-v1")
    steps = [(1, slow, "gate"), (2, quick, "Right"), (3, "gone", "Right")]
    body = {
        "calls": [
            {"call_id": number, "step": {"session_id": session, "epoch": 1, "actions": [{"text": action}]}}
            for number, session, action in steps
        ]
    }
    seen: list[str] = []
    async with http.caller.stream("POST", "/v1/sessions:stream", json=body) as response:
        assert response.headers["content-type"] == "text/event-stream"
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                seen += [reply["call_id"] for reply in json.loads(line.removeprefix("data: "))["replies"]]
            if "2" in seen and "3" in seen:
                Waiting.opened.set()
    assert sorted(seen) == ["1", "2", "3"] and seen[-1] == "1"


async def test_health_and_draining(serve_http: ServeHttp) -> None:
    http = await serve_http(drain_seconds=0)
    assert await http.get("/v1/health") == {"status": "SERVING"}
    await http.get("/v1/health?service=walk-v1")
    await http.get("/v1/health?service=none-v1", 404)
    await http.client.server.drain()
    assert await http.get("/v1/health", 503) == {"status": "NOT_SERVING"}
    assert await http.refused("/v1/sessions:open", 503, environment_id="walk-v1") == "DRAINING"


async def test_tokens_and_their_limits(serve_http: ServeHttp, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("secret-one sessions=1\nsecret-two\n")
    http = await serve_http(token_file=tokens, headers={"authorization": "Bearer secret-one"})
    session = await http.open("walk-v1")
    full = await http.call("/v1/sessions:open", 429, environment_id="walk-v1")
    assert full["details"][0]["metadata"]["limit"] == "token_sessions"
    for authorization in ("", "Bearer wrong", "secret-one"):
        http.caller.headers["authorization"] = authorization
        for path in ("/v1/sessions:open", f"/v1/sessions/{session}:step", "/v1/sessions:stream"):
            response = await http.caller.post(path, json={})
            assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
            assert response.json()["details"][0]["reason"] == "UNAUTHENTICATED"
    http.caller.headers["authorization"] = "Bearer secret-two"
    assert await http.refused(f"/v1/sessions/{session}:step", 404, epoch=1) == "UNKNOWN_SESSION"


async def test_client_certificates(serve_http: ServeHttp, tmp_path: Path) -> None:
    ca = trustme.CA()
    ca.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "both"))
    ca.cert_pem.write_to_path(str(tmp_path / "ca"))
    trusting = ssl.create_default_context(cafile=tmp_path / "ca")
    mtls = await serve_http(tls=ServerTLS(tmp_path / "both", tmp_path / "both", tmp_path / "ca"), verify=trusting)
    assert mtls.client.server.http_address.startswith("https://")
    with pytest.raises(httpx.TransportError):
        await mtls.caller.get("/v1/health")


async def test_a_missing_package_is_named(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("httptools", "starpod.env_server.transports.http.server"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ServerError, match=r"--http needs its extra; .* '\.\[http\]'"):
        await serve(http=HTTP(0))


def test_numbers_that_json_does_not_have_are_spelt() -> None:
    transition = pb.Transition(reward=float("inf"))
    transition.info.update({"a": float("nan"), "b": [float("-inf"), 1.0, {"c": float("inf")}]})
    assert json.loads(write_json(transition))["info"] == {"a": "NaN", "b": ["-Infinity", 1.0, {"c": "Infinity"}]}
    assert json.loads(write_json(transition))["reward"] == "Infinity"


async def test_the_openapi_description_fits_what_is_sent(http: Http) -> None:
    document = (await http.caller.get("/openapi.json")).json()
    replies: dict[str, Any] = {}

    async def call(path: str, status: int = 200, **body: Any) -> Any:
        replies[path, status] = reply = await http.call(path.replace("SESSION", session), status, **body)
        return reply

    session = ""
    everything = {"valid_actions": True, "state_key": True}
    opened = await call("/v1/sessions:open", environment_id="walk-v1", seed=1, want=everything)
    session = opened["sessions"][0]["session_id"]
    step = {"epoch": 1, "step_index": 0, "actions": [{"text": "Right"}, {"text": "nonsense"}]}
    await call("/v1/sessions/SESSION:step", **step)
    await call("/v1/sessions/SESSION:step", 400, epoch=9)
    await call("/v1/sessions/SESSION:render")
    await call("/v1/sessions/SESSION:fork", epoch=1, step_index=1)
    snapshot = (await call("/v1/sessions/SESSION:snapshot"))["snapshot"]
    await call("/v1/sessions:restore", snapshot=snapshot)
    await call("/v1/sessions/SESSION:reset", epoch=1)
    await call("/v1/sessions:renew", session_ids=[session, "gone"])
    await call("/v1/sessions:close", session_ids=[session])
    replies["/v1/environments", 200] = (await http.caller.get("/v1/environments")).json()
    for (path, status), reply in replies.items():
        operations = document["paths"][path.replace("SESSION", "{session_id}")]
        (operation,) = operations.values()
        answer = operation["responses"]["200" if status == 200 else "default"]
        schema = {**answer["content"]["application/json"]["schema"], "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(reply)
        assert _undescribed(reply, schema, document["components"]["schemas"]) == []


async def test_a_page_for_people_shows_what_there_is(http: Http) -> None:
    response = await http.caller.get("/docs")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    text = response.text
    paths = (await http.caller.get("/openapi.json")).json()["paths"]
    ids = [each["id"] for each in (await http.caller.get("/v1/environments")).json()["environments"]]
    assert all(path in text for path in paths)
    assert all(f'href="/v1/environments/{id}"' in text for id in ids)
    assert f"curl {http.caller.base_url}".rstrip("/") in text
    anchors = re.findall(r'href="#(\w+)"', text)
    assert set(anchors) <= set(re.findall(r'id="(\w+)"', text))
    assert "StepResponse" in anchors
    assert "<script" not in text and not re.findall(r'(?:src|href)="(?!/|#)', text)  # nothing of elsewhere


def _undescribed(value: Any, schema: Any, schemas: Any) -> list[str]:
    """Fields of a reply that its schema does not name."""
    schema = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if isinstance(value, list):
        return [name for each in value for name in _undescribed(each, schema["items"], schemas)]
    if not isinstance(value, dict) or "properties" not in schema or "@type" in value:
        return []
    known = schema["properties"]
    inside = [name for key in value.keys() & known.keys() for name in _undescribed(value[key], known[key], schemas)]
    return [*sorted(value.keys() - known.keys()), *inside]
