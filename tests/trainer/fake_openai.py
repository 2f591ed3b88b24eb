"""An OpenAI-compatible endpoint on a real socket, whose answers are a function of the conversation."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

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
