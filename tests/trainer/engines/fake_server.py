"""A stand-in for `vllm serve`, on a real socket: strict about paths, methods, queries and bodies."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.trainer.engines.fake_core import FakeCore, Paused, Sampled, check_sampling
from tests.trainer.engines.vllm_facts import (
    BODIES,
    GENERATE_REQUEST,
    NCCL_INIT,
    NCCL_UPDATE,
    NO_SCALE_OUT,
    QUERIES,
)

STREAMED = object()
"""The content of a response that was sent as a stream."""


class FakeServer:
    """dev: whether the development endpoints are on. scale_out: whether those are that take token ids.

    faults: status codes (or 0: a connection cut) that the next requests to `faulty` get.
    hung: whether it answers nothing any more; core_hung: whether its engine core does not. checks: answered health
    checks of that.
    sessions: the X-Session-ID of each generation.
    lie: changes a generation before it is sent, or makes another one.
    """

    def __init__(
        self,
        core: FakeCore,
        *,
        dev: bool = True,
        scale_out: bool = True,
        logprobs_mode: str = "processed_logprobs",
        max_model_len: int = 4096,
        instance: str = "first",
    ) -> None:
        self.core = core
        self.dev = dev
        self.scale_out = scale_out
        self.logprobs_mode = logprobs_mode
        self.max_model_len = max_model_len
        self.instance = instance
        self.faults: list[int] = []
        self.faulty = "/inference/v1/generate"
        self.sessions: list[str] = []
        self.lie: Callable[[Any], Any] = lambda reply: reply
        self.asked = 0
        self.hung = self.core_hung = False
        self.checks = 0
        self.inits: list[dict[str, Any]] = []
        self.updates: list[dict[str, Any]] = []
        self._connections: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def serve(self, port: int = 0) -> AsyncIterator[str]:
        """Serves, and gives its address."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for connection in list(self._connections):
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        me = asyncio.current_task()
        assert me is not None
        self._connections.add(me)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(me)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        line = await reader.readline()
        if not line:
            return False
        method, target, _ = line.decode().split()
        headers = {}
        while (line := await reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            headers[name.strip().lower()] = value.strip()
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        url = urlsplit(target)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        body = json.loads(raw) if raw else None
        # Like the real one it stops working on what nobody waits for any more.
        work = asyncio.ensure_future(self._answer(method, url.path, query, body, headers, writer))
        gone = asyncio.ensure_future(reader.read(1))
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            return False
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        status, content = work.result()
        if not status or content is STREAMED:
            return bool(status)
        # A healthy server says so with nothing.
        answer = content if isinstance(content, bytes) else b"" if content is None else json.dumps(content).encode()
        kind = "content-type: application/json\r\n" if answer else ""
        writer.write(
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{kind}content-length: {len(answer)}\r\n\r\n".encode()
            + answer
        )
        await writer.drain()
        return True

    async def _answer(
        self,
        method: str,
        path: str,
        query: dict[str, str],
        body: Any,
        headers: dict[str, str],
        writer: asyncio.StreamWriter,
    ) -> tuple[int, Any]:
        if self.hung:
            await asyncio.Event().wait()
        assert set(query) <= QUERIES.get(path, set()), f"{path} takes no {query}"
        if (method, path) == ("GET", "/health"):
            return 200, None
        if self.core_hung:
            await asyncio.Event().wait()
        if path != "/inference/v1/generate":
            assert set(body or ()) <= BODIES.get(path, set()), f"{path} takes no {body}"
            if not self.dev:
                return 404, {"detail": "Not Found"}
        if path == "/inference/v1/generate" and not self.scale_out:
            return 403, NO_SCALE_OUT
        if path == "/inference/v1/generate" and not body:
            return 400, {"error": {"message": "Field required: token_ids", "type": "Bad Request", "code": 400}}
        self.asked += path == self.faulty
        if path == self.faulty and self.faults:
            status = self.faults.pop(0)
            return status, {"error": {"message": "on purpose", "type": "Fault", "code": status}}
        match method, path:
            case "POST", "/inference/v1/generate":
                return await self._generate(body, headers, writer)
            case "GET", "/server_info":
                assert query == {"config_format": "json"}, "as text it cannot be read"
                model = {"logprobs_mode": self.logprobs_mode, "max_model_len": self.max_model_len}
                config = {"model_config": model, "instance_id": self.instance}
                return 200, {"vllm_config": config, "vllm_env": {}, "system_env": {}}
            case "GET", "/is_sleeping":
                self.checks += 1
                return 200, {"is_sleeping": False}
            case "POST", "/pause":
                self.core.pause(query.get("mode", "abort"))
                return 200, {"status": "paused"}
            case "POST", "/resume":
                self.core.resume()
                return 200, {"status": "resumed"}
            case "POST", "/collective_rpc":
                assert body["method"] == "reload_weights"
                try:
                    self.core.reload(Path(body["kwargs"]["weights_path"]))
                except FileNotFoundError as error:
                    return 500, {"error": {"message": str(error), "type": "InternalServerError", "code": 500}}
                return 200, {"results": [None]}
            case "GET", "/get_world_size":
                return 200, {"world_size": 2}
            case "POST", "/init_weight_transfer_engine":
                assert set(body["init_info"]) == NCCL_INIT
                self.core.log.append("init")
                self.inits.append(body["init_info"])
                return 200, {"message": "Weight transfer initialized"}
            case "POST", "/update_weights":
                assert set(body["update_info"]) == NCCL_UPDATE
                self.core.log.append("update")
                self.updates.append(body["update_info"])
                return 200, {"message": "Weights updated"}
            case "POST", "/start_weight_update" | "/finish_weight_update":
                self.core.log.append(path.removeprefix("/").removesuffix("_weight_update"))
                return 200, {"message": ""}
        return 404, {"detail": "Not Found"}

    async def _generate(
        self, body: dict[str, Any], headers: dict[str, str], writer: asyncio.StreamWriter
    ) -> tuple[int, Any]:
        assert set(body) <= GENERATE_REQUEST, f"unknown keys: {set(body) - GENERATE_REQUEST}"
        values = body["sampling_params"]
        check_sampling(values)
        assert all(isinstance(token, int) and token >= 0 for token in body["token_ids"]) and body["token_ids"]
        self.sessions.append(headers.get("x-session-id", ""))
        arguments = (body["request_id"], body["token_ids"], body.get("cache_salt"), values)
        try:
            if body.get("stream"):
                await self._stream(body, self.core.parts(*arguments), writer)
                return 200, STREAMED
            return 200, self.lie(self._reply(body, await self.core.sample(*arguments)))
        except Paused as error:
            return 503, {"error": {"message": str(error), "type": "ServiceUnavailable", "code": 503}}

    async def _stream(self, body: dict[str, Any], parts: AsyncIterator[Sampled], writer: asyncio.StreamWriter) -> None:
        """Send the parts as events, after the head of the response."""

        async def send(data: str) -> None:
            writer.write(f"{len(data):x}\r\n{data}\r\n".encode())
            await writer.drain()

        first = await anext(parts)  # what is refused has another head
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        await send(f"data: {json.dumps(self.lie(self._reply(body, first)))}\n\n")
        async for part in parts:
            await send(f"data: {json.dumps(self.lie(self._reply(body, part)))}\n\n")
        await send("data: [DONE]\n\n")
        await send("")

    @staticmethod
    def _reply(body: dict[str, Any], sampled: Sampled) -> dict[str, Any]:
        places = [
            {"token": f"token_id:{token}", "logprob": max(value, -9999.0), "bytes": None, "top_logprobs": []}
            for token, value in zip(sampled.tokens, sampled.logprobs, strict=True)
        ]
        choice = {
            "index": 0,
            "logprobs": {"content": places},
            "finish_reason": sampled.finish,
            "token_ids": sampled.tokens,
            "routed_experts": None,
        }
        usage = {"prompt_tokens": len(body["token_ids"]), "completion_tokens": len(sampled.tokens)}
        return {"request_id": body["request_id"], "model": "m", "created": 0, "choices": [choice], "usage": usage}
