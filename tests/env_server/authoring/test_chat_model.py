"""A simulated user says what its model says: no reasoning, and nothing where the model said nothing."""

import json
from typing import Any

import pytest

from starpod.env_server.authoring.chat_model import ChatModel


class Scripted(ChatModel):
    """A model with these messages (or whole replies) as its replies, the last one again and again."""

    messages: list[dict[str, Any]]

    def _complete(self, request: Any) -> bytes:
        message = self.messages[min(int(request["seed"]), len(self.messages) - 1)]
        return json.dumps(message if "choices" in message else {"choices": [{"message": message}]}).encode()


class Stage:
    """An environment that records nothing."""

    def effect(self, request: Any, call: Any) -> Any:
        return call()


def ask(*messages: dict[str, Any]) -> Any:
    model = Scripted("http://127.0.0.1:9/v1")
    object.__setattr__(model, "messages", list(messages))
    return model.ask(Stage(), [{"role": "user", "content": "Is it big?"}])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("It is small.", "It is small."),
        ("<think>secret: the cat</think> It is small.", "It is small."),
        ([{"type": "text", "text": "It is "}, {"type": "text", "text": "small."}], "It is small."),
    ],
)
def test_what_is_said(content: Any, said: str) -> None:
    assert ask({"content": content}) == said


@pytest.mark.parametrize("content", [None, "", " \n", "<think>secret: it is the", "<think>only thought</think>", []])
def test_a_reply_that_says_nothing_is_sampled_again_and_then_an_error(content: Any) -> None:
    silent = {"content": content, "reasoning_content": "thinking"}
    assert ask(silent, {"content": "It is small."}) == "It is small."
    with pytest.raises(ValueError, match=r"has no text \(after 3 replies"):
        ask(silent)


SMALL = {"content": "It is small."}


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ({"choices": [{"message": SMALL, "finish_reason": "length"}]}, "ended with 'length', so it is not whole"),
        ({"choices": [{"message": SMALL, "finish_reason": "content_filter"}]}, "'content_filter'"),
        ({"choices": [{"message": SMALL, "finish_reason": 7}]}, "finish reason 7"),
        ({"choices": []}, "has no message"),
        ({"choices": None}, "has no message"),
        ({"choices": [{"message": "It is small."}]}, "has no message"),
        ({"content": [{"type": "text", "text": 5}]}, "has no text"),
    ],
)
def test_a_malformed_or_cut_reply_is_sampled_again_and_then_an_error(reply: Any, said: str) -> None:
    assert ask(reply, SMALL) == "It is small."
    with pytest.raises(ValueError, match=rf"http://127\.0\.0\.1:9/v1: .*{said}.*after 3 replies"):
        ask(reply)
