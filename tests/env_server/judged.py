"""An environment that asks a simulated user and a judge, and the model that answers both and counts what it is asked.

STARPOD_JUDGE_URL: where the model is. STARPOD_TEST_LINGER: seconds that a step rests after its last reply.
"""

import json
import os
import random
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar, Self

from starpod.env_server import ChatModel, Concurrency, Environment, EnvironmentSpec, Limits, Outcome


class Judged(Environment):
    """An environment that shows the agent's words to a user, who answers, and to a judge, whose mark is the reward."""

    spec = EnvironmentSpec(
        id="judged-v1",
        version="1.0.0",
        title="Say something",
        grammar="a sentence; `bye` ends it, and `swallow` hides what goes wrong",
        limits=Limits(max_turns=20),
        concurrency=Concurrency.THREAD,
        effects=True,
    )
    model: ClassVar[ChatModel]

    @classmethod
    def prepare(cls) -> None:
        cls.model = ChatModel.from_variables("STARPOD_JUDGE")

    def reset(self, rng: random.Random) -> None:
        self.lines = [self.model.ask(self, [{"role": "user", "content": f"open {self.seed}"}])]
        self.steps = 0

    def step(self, action: str) -> Outcome:
        self.steps += 1  # before anything is asked: a turn that fails must not leave it so
        self.lines += [action, self.model.ask(self, [{"role": "user", "content": f"user {self.lines} {action}"}])]
        try:
            question = [{"role": "user", "content": f"judge {self.lines} {action}"}]
            mark = self.model.ask(self, question, read=float, temperature=1.0)
        except Exception:
            if action != "swallow":
                raise
            mark = 0.0
        time.sleep(float(os.environ.get("STARPOD_TEST_LINGER", "0")))
        return Outcome(reward=mark, terminated=action == "bye")

    def render(self, mode: str = "text") -> str:
        return f"{self.steps}: {' | '.join(self.lines)}"


class Model(ThreadingHTTPServer):
    """A model that never says the same twice, so that whoever asks again is found out.

    asked: how often it replied to what. failing: statuses with which it refuses what comes next; 0: it does not answer.
    nonsense: how often it judges by what is no mark. refused: how often it refused.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: Counter[str] = Counter()
        self.failing: list[int] = []
        self.refused = 0
        self.nonsense = 0
        self.lock = threading.Lock()
        self.released = threading.Event()

    def asked_once(self, count: int) -> None:
        """Check that the model has given `count` replies, and never two to the same request."""
        assert sum(self.asked.values()) == count and set(self.asked.values()) == {1}, self.asked

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    @property
    def variables(self) -> dict[str, str]:
        return {"STARPOD_JUDGE_URL": self.url}

    def reply(self, question: str) -> str:
        if self.nonsense and question.startswith("judge"):
            self.nonsense -= 1
            return "well, hm"
        return f"0.{sum(self.asked.values()):03d}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Model

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        model = self.server
        with model.lock:
            status = model.failing.pop(0) if model.failing else 200
            if status == 200:
                question = request["messages"][-1]["content"]
                model.asked[question] += 1
                text = model.reply(question)
            else:
                model.refused += 1
        if not status:
            model.released.wait(60)
            return
        body = b"{}"
        if status == 200:
            body = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...
