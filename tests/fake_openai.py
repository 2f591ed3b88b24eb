"""An OpenAI-compatible endpoint on a real socket, whose answers are a function of the conversation."""

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Answer = Callable[[dict[str, Any]], str | int | bytes | dict[str, Any]]
"""A request's body -> the reply's text, an HTTP status to fail with, the whole body, or fields of the choice."""


@dataclass
class Endpoint:
    """base_url: for the client. requests: bodies in the order in which they came. keys: the bearer tokens."""

    base_url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    most_at_once: int = 0


@contextlib.contextmanager
def fake_openai(answer: Answer) -> Iterator[Endpoint]:
    endpoint = Endpoint("")
    lock = threading.Lock()
    active = 0

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            nonlocal active
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                active += 1
                endpoint.most_at_once = max(endpoint.most_at_once, active)
                endpoint.requests.append(body)
                endpoint.keys.add(self.headers["Authorization"])
            known = self.path == "/v1/chat/completions"
            result = answer(body) if known else 404
            with lock:
                active -= 1
            if isinstance(result, int):
                self._send(result, {"error": {"message": f"status {result} of this test", "type": "test"}})
                return
            if isinstance(result, bytes):
                self._send(200, result)
                return
            fields = result if isinstance(result, dict) else {}
            text = result if isinstance(result, str) else "It is wrong."
            message = {"role": "assistant", "content": text}
            finish = "length" if text.endswith("...") else "stop"
            choice = {"index": 0, "message": message, "finish_reason": finish, **fields}
            usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
            values = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"]}
            self._send(200, {**values, "choices": [choice], "usage": usage})

        def _send(self, status: int, values: dict[str, Any] | bytes) -> None:
            data = values if isinstance(values, bytes) else json.dumps(values).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("retry-after-ms", "1")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

    server = Server(("127.0.0.1", 0), Handler)
    endpoint.base_url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Model:
    """A model that never says the same twice, so that whoever asks again is found out.

    asked: how often it replied to what. failing: statuses with which it refuses what comes next; 0: it does not answer.
    nonsense: how often it judges by what is no mark. refused: how often it refused.
    """

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.failing: list[int] = []
        self.refused = 0
        self.nonsense = 0
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._serving = fake_openai(self._answer)

    def asked_once(self, count: int) -> None:
        """Check that the model has given `count` replies, and never two to the same request."""
        assert sum(self.asked.values()) == count and set(self.asked.values()) == {1}, self.asked

    @property
    def variables(self) -> dict[str, str]:
        return {"STARPOD_JUDGE_URL": self.url}

    def reply(self, question: str) -> str:
        if self.nonsense and question.startswith("judge"):
            self.nonsense -= 1
            return "well, hm"
        return f"0.{sum(self.asked.values()):03d}"

    def _answer(self, body: dict[str, Any]) -> str | int:
        with self._lock:
            if not self.failing or self.failing[0] == 200:
                del self.failing[:1]
                question = body["messages"][-1]["content"]
                self.asked[question] += 1
                return self.reply(question)
            self.refused += 1
            status = self.failing.pop(0)
        if not status:
            self._released.wait(60)
        return status or 503

    def __enter__(self) -> Self:
        self.url = self._serving.__enter__().base_url
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        self._serving.__exit__(None, None, None)
