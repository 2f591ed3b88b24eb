"""Files to imitate: what is read of them, what is chosen, and the tokens of conversations."""

import copy
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starpod.trainer.configuration.loading import load_config
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.data.atif import to_atif
from starpod.trainer.data.chat import parse_chat, to_chat
from starpod.trainer.data.episode import DONE, Episode, Turn
from starpod.trainer.data.files import write_episodes
from starpod.trainer.prompts.conversation import Conversation
from starpod.trainer.prompts.template import Template
from starpod.trainer.warm_start.chats import encode_chats
from starpod.trainer.warm_start.config import WarmStartConfig, imitation_words
from starpod.trainer.warm_start.files import FileContents, read_contents
from tests.trainer.chat_templates import CHATML, tokenizer

TWO_TURNS = ("be good", [("hi", "<think>a</think>Up"), ("and now?", "<think>b</think>Down")])
TOOLS = CHATML.replace("m.content", "m.content + (m.tool_calls[0].function | tojson if m.tool_calls else '')").replace(
    "{% for m in messages %}", "{{ tools | tojson if tools else '' }}{% for m in messages %}"
)


def chat(system: str, exchanges: Iterable[tuple[str, str]], **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}] if system else []
    for user, reply in exchanges:
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]
    return {"messages": messages, **more}


def encoded(
    template: Template, *chats: Mapping[str, Any], most_tokens: int = 1000
) -> tuple[list[Episode], FileContents]:
    contents = FileContents("chats.jsonl", chats=[parse_chat(each) for each in chats])
    return encode_chats(contents, template, most_tokens=most_tokens, group=0), contents


@pytest.mark.parametrize(
    "name", ["chatml", "llama3", "gemma", "reasoner", "parts", "sentencepiece", "qwen3", "wandering"]
)
@pytest.mark.parametrize("prefill", ["", "<think>"])
def test_a_conversation_has_the_tokens_of_a_rollout_with_the_same_messages(name: str, prefill: str) -> None:
    template = Template(tokenizer(name), prefill=prefill)
    system, exchanges = TWO_TURNS
    (episode,), _ = encoded(template, chat(system, exchanges))
    conversation = Conversation(template)
    conversation.system(system)
    for turn, (user, reply) in zip(episode.turns, exchanges, strict=True):
        prompt = conversation.ask(user)
        assert (turn.prompt, turn.fresh) == (prompt.appended, prompt.fresh)
        ids = template.encode_reply(reply)
        assert (turn.reply, turn.text, turn.weight) == (ids, template.decode(ids), 1.0)
        conversation.answer(ids, "stop", reply)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=12) | st.sampled_from(["<|im_end|>", "a<|im_start|>user\nb", "</think>"]), min_size=2))
def test_no_text_begins_or_ends_a_message(texts: list[str]) -> None:
    template = Template(tokenizer("chatml"))
    exchanges = list(zip(texts[::2], texts[1::2], strict=False))
    (episode,), _ = encoded(template, chat("", exchanges), most_tokens=10_000)
    ids = [id for turn in episode.turns for id in (*turn.prompt, *turn.reply)]
    assert ids.count(template.end) == 2 * len(exchanges)
    assert [turn.text for turn in episode.turns] == [reply for _, reply in exchanges]


def test_calls_of_tools_are_written_by_the_template_or_the_conversation_is_left_out() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": [1, "<|im_end|>"]}'}}
    messages = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "weight": 0},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "assistant", "content": [{"type": "text", "text": "3"}]},
    ]
    tokens = copy.deepcopy(tokenizer("chatml"))
    tokens.chat_template = TOOLS
    (episode,), _ = encoded(Template(tokens), {"messages": messages, "tools": tools})
    assert [turn.text for turn in episode.turns] == ['{"name": "add", "arguments": {"a": [1, "<|im_end|>"]}}', "3"]
    assert [turn.weight for turn in episode.turns] == [0, 1]
    assert "<|im_start|>tool\n3" in tokens.decode(episode.turns[1].prompt)
    episodes, contents = encoded(
        Template(tokenizer("chatml")), {"messages": messages}, {"messages": messages[:1] + messages[3:]}
    )
    assert len(episodes) == len(contents.chats) == 1
    assert "the template drops 'add'" in contents.sentence()


def test_reasoning_is_written_by_the_template_or_the_conversation_is_left_out() -> None:
    reply = {"role": "assistant", "content": "3", "reasoning_content": "add\nthem"}
    thinking = {"messages": [{"role": "user", "content": "1 + 2?"}, reply]}
    tokens = copy.deepcopy(tokenizer("chatml"))
    thought = "('<think>' + m.reasoning_content + '</think>' if m.reasoning_content else '')"
    tokens.chat_template = CHATML.replace("m.content", f"{thought} + m.content")
    (episode,), _ = encoded(Template(tokens), thinking)
    assert episode.turns[0].text == "<think>add\nthem</think>3"
    episodes, contents = encoded(Template(tokenizer("chatml")), thinking)
    assert not episodes and "the template drops 'add" in contents.sentence()


def test_what_does_not_fit_or_is_not_reproduced_is_counted_and_never_cut() -> None:
    long, strange = chat("", [("hi", "x" * 50)]), chat("", [("hi", "a\N{LOWER ONE EIGHTH BLOCK}b")])
    alternating = {"messages": [{"role": "user", "content": "a"}] * 2 + [{"role": "assistant", "content": "b"}]}
    episodes, contents = encoded(Template(tokenizer("sentencepiece")), strange)
    assert not episodes and "does not reproduce" in contents.sentence()
    episodes, contents = encoded(
        Template(tokenizer("gemma")), long, alternating, chat("", [("hi", "y")]), most_tokens=50
    )
    assert [episode.turns[0].text for episode in episodes] == ["y"]
    assert [count for count, _ in contents.left_out.values()] == [
        1,
        1,
    ] and "Roles must alternate" in contents.sentence()
    (episode,), _ = encoded(Template(tokenizer("chatml"), prefill="<think>"), chat(*TWO_TURNS), long)
    assert len(episode.turns) == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"messages": [', "not JSON"),
        ("[1]", "neither an episode"),
        ('{"messages": {}}', "messages: Input should be a valid list"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no message of the role assistant"),
        ('{"messages": [{"role": "bot", "content": "a"}]}', "messages.0.role: Input should be 'system', 'user'"),
        ('{"messages": [{"role": "assistant"}]}', "messages.0.content: Input should be a valid string"),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "Input should be 'text'"),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]}',
            "messages.0.tool_calls.0.function.arguments: Expecting property name",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "a", "weight": 2}]}',
            "messages.0.weight: Input should be 0 or 1",
        ),
        ('{"messages": [], "reward": "1"}', "reward: Input should be a valid number"),
        ('{"steps": [{}]}', "not a trajectory of ATIF"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(chat(*TWO_TURNS)) + "\n\n" + line + "\n")
    with pytest.raises(ConfigError, match=f"{path}:3: ") as error:
        read_contents(WarmStartConfig(steps=1, demonstrations=str(path)), "lake-v1")
    assert words in str(error.value)


def played(seed: int, *, reward: float = 1.0, environment: str = "lake-v1") -> Episode:
    turn = Turn(fresh=True, observation="P_G", text="Right", thought="there", actions=["Right"], outcomes=[DONE])
    turn.parts = {"environment": reward, "format": -0.1}
    facts = {"instructions": "Cross.", "final_observation": "__P", "end": "terminal", "success": reward > 0.5}
    return Episode(0, 0, environment, "1.0.0", seed=seed, turns=[turn, copy.deepcopy(turn)], **facts)  # type: ignore[arg-type]


def test_episodes_conversations_and_trajectories_are_chosen_by_reward_and_success(tmp_path: Path) -> None:
    episodes = [played(seed, reward=reward) for seed, reward in ((1, 0.0), (2, 0.4), (3, 1.0))]
    write_episodes(
        tmp_path / "run" / "episodes" / "train-000001.jsonl.gz", [*episodes, played(4, environment="other-v1")]
    )
    write_episodes(tmp_path / "run" / "episodes" / "final-000001.jsonl.gz", [played(5)])
    (tmp_path / "atif").mkdir()
    for episode in [*episodes, replace(played(6), end="failed", error="lost")]:
        (tmp_path / "atif" / f"{episode.seed}.atif.json").write_text(json.dumps(to_atif(episode, "name"), indent=1))
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(to_chat(each)) + "\n" for each in episodes))

    def read(name: str, **keys: Any) -> FileContents:
        return read_contents(WarmStartConfig(steps=None, demonstrations=str(tmp_path / name), **keys), "lake-v1")

    assert [each.seed for each in read("run").episodes] == [1, 2, 3]
    assert [each.seed for each in read("run", min_reward=0.5).episodes] == [2, 3]
    assert [each.seed for each in read("run", failures=0).episodes] == [3]
    assert [each.seed for each in read("chats.jsonl", failures=0.5).chats] == [3, 1]
    for ours, conversation in zip(read("atif").chats, read("chats.jsonl").chats, strict=True):
        last = {"role": "user", "content": "__P"}
        assert replace(ours, place="") == replace(
            conversation, place="", messages=[*conversation.messages, last], weights=[*conversation.weights, 0.0]
        )
    sentence = read("run", min_reward=0.5).sentence()
    assert sentence.startswith(f"using 2 of 4 in {tmp_path / 'run'}; left out: 1 with a reward below 0.5 (the first: ")
    with pytest.raises(ConfigError, match="nothing to imitate"):
        read("atif", min_reward=3)
    (tmp_path / "run" / "episodes" / "train-000001.jsonl.gz").unlink()
    with pytest.raises(ConfigError, match="evaluations"):
        read("run")


def test_a_trajectory_of_another_agent_is_a_conversation(tmp_path: Path) -> None:
    steps = [
        {"source": "user", "message": "1 + 2?"},
        {
            "source": "agent",
            "message": "",
            "tool_calls": [{"tool_call_id": "1", "function_name": "add", "arguments": {"a": 1}}],
            "observation": {"results": [{"source_call_id": "1", "content": "3"}]},
        },
        {"source": "agent", "message": "3", "reasoning_content": "so"},
    ]
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"schema_version": "ATIF-v1.4", "agent": {"name": "other"}, "steps": steps}, indent=1))
    (chat,) = read_contents(WarmStartConfig(steps=None, demonstrations=str(path)), "lake-v1").chats
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "tool", "assistant"]
    assert chat.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    with pytest.raises(ConfigError, match=r"one.json:1 has no reward"):
        read_contents(WarmStartConfig(steps=None, demonstrations=str(path), min_reward=0.5), "lake-v1")


def test_steps_are_three_passes_unless_they_are_given() -> None:
    words = ["warm_start.batch_size=16", *imitation_words("a.jsonl", ["warm_start.batch_size=16"])]
    assert words[1:] == ["warm_start.demonstrations=a.jsonl", "warm_start.episodes=0", "warm_start.steps=null"]
    assert imitation_words("a.jsonl", ["warm_start.steps=5", "warm_start.episodes=9"]) == words[1:2]
    section = ["warm_start={steps: 100}"]
    imitated = load_config("tiny", [*section, *imitation_words("data/run #2/a.jsonl", section)]).warm_start
    assert (imitated.steps, imitated.episodes) == (100, 0) and imitated.demonstrations.endswith("/data/run #2/a.jsonl")
    config = WarmStartConfig(steps=None, batch_size=16, demonstrations="a.jsonl")
    assert config.imitates and config.steps_over(100) == 19 and WarmStartConfig(steps=5).steps_over(100) == 5
