"""Episodes of verifiers with inverted control: requests to the model become observations.

verifiers runs an episode itself, and calls a model over HTTP. Here that model is an endpoint of this process. It passes
each request to the session's thread and replies with the session's action. All episodes share one event loop on a
thread.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from queue import SimpleQueue
from typing import Any

import httpx
import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

Message = Mapping[str, Any]

HARNESS = "starpod-chat"
"""Id of the harness. verifiers finds a harness by the name of a top-level module."""
_SESSION = "X-Session-ID"
"""Header in which verifiers' client sends the id of the calling trace."""
_FORGOTTEN = "the session is over"


class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc] # untyped where verifiers is not installed
    """Plain chat with the task's tools, in this process. It needs no installation, and gives the model no shell."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        system, prompt = self.resolve_prompt(data)
        start = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or [])
        messages: list[Any] = [*([{"role": "system", "content": system}] if system else []), *start]
        headers = {"Authorization": f"Bearer {secret}"}
        async with AsyncExitStack() as stack, httpx.AsyncClient(headers=headers, timeout=None) as client:
            servers = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
            tools, dispatch, connections = await connect_mcp(servers, stack)
            while True:
                body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                answer = await client.post(f"{endpoint}/chat/completions", json=body)
                if answer.is_error:  # verifiers also ends a rollout by an error, and notes that in its trace
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=answer.text)
                reply = answer.json()["choices"][0]["message"]
                messages.append(reply)
                if not (calls := reply.get("tool_calls")):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in calls:
                    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
                    content = await call_mcp(connections, dispatch, name, arguments)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


class VerifiersEpisode:
    """One episode. Call its methods on one thread at a time, and never on the event loop's thread.

    Attributes:
        messages: messages of the model's latest request.
        tools: tools of the model's latest request.
        new: messages since the model's latest reply.
        ended: the finished episode, or None if it has not finished.
    """

    def __init__(self, player: EpisodePlayer, task: Any) -> None:
        self._player = player
        self._news: SimpleQueue[tuple[Any, Future[Any]] | None] = SimpleQueue()
        self._reply: Future[Any] | None = None
        self._traces: list[str] = []
        self.messages: Sequence[Message] = ()
        self.tools: Sequence[Mapping[str, Any]] = ()
        self.new: Sequence[Message] = ()
        self.ended: Any = None
        self._run = player.submit(self._play(task))
        self._run.add_done_callback(lambda _: self._news.put(None))
        self._wait()

    def say(self, reply: Message) -> None:
        """Send the model's reply and wait for the next question or the end. Raises the episode's error if it failed."""
        assert self._reply is not None, _FORGOTTEN
        question, self._reply = self._reply, None
        question.set_result(dict(reply))
        self._wait()

    def close(self) -> None:
        self._run.cancel()
        if self._reply is not None:
            self._reply.cancel()

    def _wait(self) -> None:
        request = self._news.get()
        if request is not None:
            body, self._reply = request
            known_count = len(self.messages) + 1 if self.messages else 0  # the model's reply comes between them
            self.messages, self.tools = body["messages"], body.get("tools") or ()
            self.new = self.messages[known_count:]
            return
        self.new = ()
        self.ended = self._run.result()
        if not self.ended.ok:
            errors = [*self.ended.errors, *(error for trace in self.ended.traces for error in trace.errors)]
            raise RuntimeError(f"the episode broke: {errors[-1].type}: {errors[-1].message}" if errors else "it broke")

    # --- on the loop -------------------------------------------------------------------------------------------------

    async def ask(self, body: Mapping[str, Any]) -> Message:
        """Return the reply of the session's caller to a request for a chat completion."""
        reply: Future[Any] = Future()
        self._news.put((body, reply))
        return dict(await asyncio.wrap_future(reply))

    async def _play(self, task: Any) -> Any:
        try:
            return await self._player.env.run_episode(task, self._player.context, on_trace=self._begin)
        finally:
            for trace in self._traces:
                self._player.live.pop(trace, None)

    def _begin(self, trace: Any) -> None:
        self._traces.append(trace.id)
        self._player.live[trace.id] = self


class EpisodePlayer:
    """Runner of one verifiers environment's episodes. `live` holds the running ones by trace id."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.live: dict[str, VerifiersEpisode] = {}
        self.context = self.submit(self._serve()).result()

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, _loop())

    async def _serve(self) -> Any:
        """Serve the endpoint and the resources that episodes share, until the process ends."""
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._serving = self.env.serving()
        await self._serving.__aenter__()
        client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{runner.addresses[0][1]}/v1", api_key_var="NO_KEY")
        return vf.ModelContext(model="starpod", client=client)

    async def _complete(self, request: web.Request) -> web.Response:
        episode = self.live.get(request.headers.get(_SESSION, ""))
        if episode is None:
            return web.json_response({"error": {"message": _FORGOTTEN}}, status=404)
        message = await episode.ask(await request.json())
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "finish_reason": reason, "message": {"role": "assistant", **message}}
        completion = {"id": "1", "object": "chat.completion", "created": 0, "model": "starpod", "choices": [choice]}
        return web.json_response(completion)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all episodes of this process, which runs on a separate thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return loop


__all__ = ["ChatHarness"]
sys.modules[HARNESS.replace("-", "_")] = sys.modules[__name__]
