"""Requests for JSON and for calls that must be made, with the torch engine and a policy that knows nothing."""

import json
from typing import Any

import pytest

from starpod.gateway.dialects.base import Dialect
from starpod.gateway.dialects.chat import ChatCompletions
from starpod.gateway.dialects.messages import Messages
from starpod.gateway.dialects.responses import Responses
from starpod.gateway.lineage import ChatLayout
from starpod.gateway.requests import Ask, Choice, Message, Rejected
from starpod.gateway.session import Replied, RolloutSession, Sampler
from starpod.trainer.agents.config import SamplingConfig
from starpod.trainer.data.batch import Batch
from starpod.trainer.data.episode import Episode
from starpod.trainer.engines.torch_engine import TorchEngine
from starpod.trainer.prompts.formats.table import FORMATS
from starpod.trainer.prompts.template import Template
from tests.tools.gateway.test_fields import BODIES, FORMAT
from tests.trainer.models.tiny_policy import tiny_policy

POLICY = tiny_policy()
ARGUMENTS = {
    "type": "object",
    "properties": {"to": {"enum": ["Up", "Down"]}},
    "required": ["to"],
    "additionalProperties": False,
}
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": ARGUMENTS}} for name in ("move", "look", "stay")
)


async def replied(ask: Ask, calls: str = "") -> Replied:
    took: list[Replied] = []
    engine = TorchEngine(POLICY, slots=2, max_context=4000)
    layout = ChatLayout(Template(POLICY.tokenizer, calls=calls))
    sampling = SamplingConfig(max_reply_tokens=400, max_episode_tokens=4000)
    try:
        await RolloutSession("one", Sampler(engine=engine, layout=layout, sampling=sampling), took.append).complete(ask)
    finally:
        await engine.close()
    return took[0]


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (ChatCompletions, {"response_format": {"type": "json_schema", "json_schema": FORMAT}}),
        (Responses, {"text": {"format": FORMAT}}),
        (Messages, {"output_config": {"format": FORMAT}}),
    ],
)
async def test_a_reply_has_the_schema_in_every_dialect(dialect: type[Dialect], body: dict[str, Any]) -> None:
    asked = {name: value for name, value in BODIES[dialect].items() if name not in ("tools", "max_tokens")}
    one = await replied(dialect().read({**asked, **body}))
    assert one.answer.finish == "stop" and json.loads(one.answer.text)["to"] in ("Up", "Down")
    # What is recorded is what the trainer needs to score the reply under the same masks.
    batch = Batch([Episode(0, 0, "a", turns=[one.turn])])
    scores = POLICY.score(*batch.block([0]).inputs)
    assert scores.logprobs_N.tolist() == pytest.approx(one.turn.logprobs, abs=1e-4)


@pytest.mark.parametrize("calls", [form.name for form in FORMATS.values() if form.xgrammar])
async def test_a_call_that_is_required_is_made(calls: str) -> None:
    for name in ("", "look"):
        one = await replied(Ask((Message("user", "go"),), TOOLS, Choice("required", name), one_call=True), calls)
        (call,) = one.answer.calls
        assert call.name in ([name] if name else ["move", "look", "stay"])
        # Formats with tags allow blanks around a value.
        assert json.loads(call.arguments)["to"].strip() in ("Up", "Down") and one.answer.finish == "stop"


async def test_what_cannot_be_enforced_is_refused_before_sampling() -> None:
    user = (Message("user", "go"),)
    with pytest.raises(Rejected, match="format mistral, for which xgrammar has no grammar") as refused:
        await replied(Ask(user, TOOLS, Choice("required")), "mistral")
    assert refused.value.status == 400
    with pytest.raises(Rejected, match="the schema cannot be enforced"):
        await replied(Ask(user, schema={"type": "nothing"}))
