"""Prompts of policies: they contain the parts of the original's prompts, in the same order."""

import json
import re
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from starpod.client import Limits
from starpod.trainer.prompts.conversation import Conversation
from starpod.trainer.prompts.grammar import Grammar
from starpod.trainer.prompts.prompt import LatestTurns, PromptConfig, Prompter, fold, format_reward
from starpod.trainer.prompts.template import Template
from tests.golden import ROOT, Parity, golden
from tests.trainer.chat_templates import tokenizer

# Where our prompts differ from the original's in more than their words.
CHOSEN = {
    "limits-told-apart": "the original states the episode's limit as if it held for a turn; here each has a sentence",
    "short-rewards": "the original prints binary fractions in full (10.700000000000001); here 10.7",
    "window-keeps-messages": "a message in a window is unchanged; the original leaves out the reward that "
    "came before the window",
    "format-before": "in a single turn the format is in the system message, not after the present state",
    "warning-is-trained": "the warning that a policy sees is in its training context; the original leaves it out there",
}

ORIGINAL = re.compile(
    r"(?:Reward:\n(?P<reward>[^\n]*)\n)?\n?(?:Current Turn )?\(?Turn (?P<turn>\d+)\)?:\nState:\n(?P<state>.*?)\n"
    r"(?P<warning>No valid action [^\n]*\n)?You have (?P<left>\d+) actions left\. Always output: (?P<format>.*) with "
    r"no extra text\. Strictly follow this format\. Max response length: (?P<words>\d+) words \(tokens\)\.\n",
    re.DOTALL,
)
OURS = re.compile(
    r"(?:Reward: (?P<reward>[^\n]*)\n)?Turn (?P<turn>\d+) of 7\nState:\n(?P<state>.*?)\n"
    r"(?P<warning>Your last reply [^\n]*\n)?You have (?P<left>\d+) actions? left\."
    r"(?:\n(?P<format>Reply with .*) Use at most (?P<words>\d+) words\.)?",
    re.DOTALL,
)


def prompter(
    config: PromptConfig | None = None, actions: tuple[str, ...] = ("Up", "Down"), limits: Limits | None = None
) -> Prompter:
    config = config or PromptConfig()
    return Prompter(config, "Walk to G.", actions, limits or Limits(5, 5, 10))


# --- rules ------------------------------------------------------------------------------------------------------------


def test_the_system_message_contains_the_task_and_the_limits_in_force() -> None:
    told = prompter().system()
    assert told.splitlines()[1:] == [
        "Walk to G.",
        "Actions: Up, Down.",
        "Limits: an episode ends after 5 turns and 10 actions; a turn takes at most 5 actions.",
    ]
    assert "Limits: an episode ends after 1 turn." in prompter(limits=Limits(1, 0, 0)).system()
    free = prompter(PromptConfig(system="Hello."), actions=(), limits=Limits()).system()
    assert free == "Hello.\nWalk to G."
    bare = prompter(PromptConfig(show_reward=False, show_actions_left=False, words=None))
    told = bare.user(2, "P_G", reward=1.0, actions_left=3)
    assert not any(word in told for word in ("Reward", "left", "words"))


def test_a_turn_in_words() -> None:
    told = prompter(limits=Limits(5, 1, 10)).user(2, "P_G", reward=-0.1, actions_left=1, warning=True)
    assert told.splitlines() == [
        "Reward: -0.1",
        "Turn 2 of 5",
        "State:",
        "P_G",
        "Your last reply held no valid action. Try again.",
        "You have 1 action left.",
        "Reply with your reasoning, then one action, in exactly this form and with nothing around it: "
        "<think> your reasoning </think> <answer> your action </answer> Use at most 100 words.",
    ]


def test_the_compact_style_is_the_observation_alone() -> None:
    config = PromptConfig(style="compact")
    assert prompter(config).system() == ""
    assert prompter(config).user(2, "P_G", reward=1.0, actions_left=3) == "P_G"
    assert prompter(config).user(2, "P_G", warning=True) == "Invalid.\nP_G"
    more = PromptConfig(style="compact", show_reward=True, show_actions_left=True, system="Go.")
    assert prompter(more).system() == "Go."
    assert prompter(more).user(2, "P_G", reward=1.0, actions_left=3) == "Reward: 1\n3 actions left.\nP_G"


@pytest.mark.parametrize("style", ["full", "compact"])
def test_a_long_observation_is_cut_and_the_policy_is_told(style: Literal["full", "compact"]) -> None:
    writer = prompter(PromptConfig(style=style, max_observation=6))
    assert "abcdef" in writer.user(1, "abcdef")
    assert "not shown" not in writer.user(1, "abcdef")
    assert "abcdef\n[The other 4 characters are not shown.]" in writer.user(1, "abcdefghij")
    everything = prompter(PromptConfig(style=style, max_observation=None))
    assert "y" * 100_000 in everything.user(1, "y" * 100_000)
    assert "[The other 80000 characters are not shown.]" in prompter(PromptConfig(style=style)).user(1, "y" * 100_000)


def test_a_single_turn_tells_the_format_once() -> None:
    config = PromptConfig(context=LatestTurns(kind="single_turn"))
    assert prompter(config).system().endswith(prompter().reminder)
    assert "<answer>" not in prompter(config).user(1, "P_G", actions_left=3)


def test_a_configuration_says_what_is_fed_and_a_window_that_nobody_looks_at_is_refused() -> None:
    opened = [PromptConfig(**values).opening for values in ({}, {"thinking": False}, {"prefill": False})]
    assert opened == ["<think>", "<answer>", ""]
    with pytest.raises(ValidationError, match="Extra inputs"):
        PromptConfig.model_validate({"context": {"window": 3}})
    assert PromptConfig.model_validate({"context": {"kind": "window", "window": 3}}).context.window == 3


@pytest.mark.parametrize(
    ("value", "text"), [(10.700000000000001, "10.7"), (-0.0, "0"), (0, "0"), (-0.1 * 3, "-0.3"), (1.0, "1")]
)
def test_rewards_are_short(value: float, text: str) -> None:
    assert format_reward(value) == text


@given(st.integers(-(10**6), 10**6), st.integers(0, 3))
def test_rewards_are_exact(units: int, decimals: int) -> None:
    assert float(format_reward(units / 10**decimals)) == units / 10**decimals


# --- parity with the original ----------------------------------------------------------------------------------------


def test_recorded_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    records = golden("prompts")
    variants = json.loads((ROOT / "ragen_golden" / "variants.json").read_text("utf-8"))["variants"]
    parity = Parity({name: why for name, why in CHOSEN.items() if name != "warning-is-trained"})
    for record in records:
        parity.episodes += 1
        replay(record, variants[record["variant"]], parity)
    parity.report("prompts", capsys)


def replay(record: Any, variant: Any, parity: Parity) -> None:
    """Render the recorded facts with our policy, and compare the two contexts."""
    mode = {"limited_multi_turn": "window"}.get(record["context_window_mode"], record["context_window_mode"])
    window = record["max_context_window"] if record["max_context_window"] >= 0 else None
    values = {
        "context": {"kind": mode} | ({} if mode == "full" else {"window": window}),
        "thinking": record["enable_think"],
        "words": variant["max_tokens"],
    }
    config = PromptConfig.model_validate(values)
    system = record["turns"][0]["messages"][0]["content"]
    listed = re.search(r"available actions are:\n(.*)\n", system)
    actions = tuple(listed[1].split(", ")) if listed else ()
    limits = Limits(7, record["max_actions_per_turn"], variant["max_actions_per_traj"])
    ours = Prompter(config, "", actions, limits)
    compare_system(record["id"], ours.system(), system, actions, limits, parity)
    template = Template(tokenizer("chatml"), prefill=config.opening)
    conversation = Conversation.of(template, config)
    conversation.system(ours.system())
    arms = record["layout"].get("action_lookup", {}).values() if "Bandit" in record["variant"] else ()
    grammar = Grammar(config.thinking, actions=actions or arms)
    reward: float | None = None
    warning = False
    for number, turn in enumerate(record["turns"], 1):
        parity.steps += 1
        where = f"{record['id']} turn {number}"
        roles = [message["role"] for message in turn["messages"]]
        users = [message["content"] for message in turn["messages"] if message["role"] == "user"]
        told = ORIGINAL.fullmatch(users[-1]) if mode != "single_turn" else ORIGINAL.search(users[-1])
        assert told, where
        assert turn["chatml_text"].endswith(f"<|im_start|>assistant\n{config.opening}")
        assert warning == bool(told["warning"]), where
        user = ours.user(number, told["state"], reward=reward, actions_left=int(told["left"]), warning=warning)
        compare_user(where, user, told, reward, warning, config, parity)
        context = str(tokenizer("chatml").decode(conversation.ask(user).context))
        assert context.endswith(f"<|im_start|>assistant\n{config.opening}")
        assert re.findall(r"<\|im_start\|>(\w+)", context)[:-1] == roles, where
        if mode == "single_turn":
            compare_memory(where, context, users[-1], parity)
        else:
            shown = re.findall(r"^Turn (\d+):$", "\n".join(users), re.MULTILINE)
            assert re.findall(r"^Turn (\d+) of 7$", context, re.MULTILINE) == shown, where
            originals = sum(message.startswith("Reward:") for message in users)
            parity.equal(f"{where} rewards", context.count("Reward: "), originals, "window-keeps-messages")
        if "generated_text" in turn:
            reply = config.opening + turn["generated_text"]
            conversation.answer(template.encode_reply(reply), "stop", reply)
            parsed = grammar.parse(reply, limits.max_actions_per_turn)
            warning = set(parsed.actions) == set(parsed.unknown)
            reward = turn["reward"]


def compare_system(
    where: str, ours: str, original: str, actions: tuple[str, ...], limits: Limits, parity: Parity
) -> None:
    cap = re.search(r"You can make up to (\d+) actions", original)
    assert bool(cap) == bool(actions), where
    assert not actions or f"Actions: {', '.join(actions)}." in ours.splitlines(), where
    assert f" and {limits.max_actions} action" in ours, where
    if cap:
        told = re.search(r"a turn takes at most (\d+) action", ours)
        assert told
        assert int(told[1]) == limits.max_actions_per_turn
        parity.equal(f"{where} limit", told[1], cap[1], "limits-told-apart")


def compare_user(
    where: str,
    user: str,
    told: re.Match[str],
    reward: float | None,
    warning: bool,
    config: PromptConfig,
    parity: Parity,
) -> None:
    """Check that both messages have the same parts and facts, in the same order."""
    mine = OURS.fullmatch(user)
    assert mine, where
    for part in ("turn", "state", "left"):
        assert mine[part] == told[part], where
    assert bool(mine["warning"]) == warning, where
    if config.context.kind == "single_turn":
        assert mine["format"] is None
        parity.deviate("format-before")
    else:
        assert re.findall(r"</?\w+>", mine["format"]) == re.findall(r"</?\w+>", told["format"]), where
        assert mine["words"] == told["words"], where
        assert bool(mine["reward"]) == (reward is not None), where
    if told["reward"] is not None:
        assert float(mine["reward"]) == pytest.approx(float(told["reward"])), where
        parity.equal(f"{where} reward", mine["reward"], told["reward"], "short-rewards")


def compare_memory(where: str, context: str, original: str, parity: Parity) -> None:
    """Compare the turns that one message contains."""
    done = re.search(r"Summary: (\d+) step", original)
    mine = re.search(r"Turns so far: (\d+)\.", context)
    assert (mine and mine[1]) == (done and done[1]), where
    past = re.findall(r"^Turn (\d+) Action: ", original, re.MULTILINE)
    assert re.findall(r"^Turn (\d+) of 7$", context, re.MULTILINE)[:-1] == past, where
    assert context.count("Your reply: ") == len(past), where
    rewards = re.findall(r"^Turn \d+ Reward: (.*)$", original, re.MULTILINE)
    shown = re.findall(r"^Reward: (.*)$", context, re.MULTILINE)
    expected = [format_reward(float(value)) for value in rewards]
    parity.equal(f"{where} rewards", shown, expected, "window-keeps-messages")


def test_recorded_training_texts(capsys: pytest.CaptureFixture[str]) -> None:
    """The original's policies were not trained on what they saw. Here both are one list of ids."""
    parity = Parity({"warning-is-trained": CHOSEN["warning-is-trained"]})
    chatml = tokenizer("chatml")
    template = Template(chatml)
    for record in golden("manager_trajectories"):
        parity.episodes += 1
        trained = [message["content"] for message in record["final"]["train_messages"] if message["role"] == "user"]
        ours = prompter(limits=Limits(len(record["turns"]), record["max_actions_per_turn"], 0))
        conversation = Conversation(template)
        state, reward, warning = str(record["first_state"].get("state")), None, False
        for number, (turn, original) in enumerate(zip(record["turns"], trained, strict=True), 1):
            parity.steps += 1
            prompt = conversation.ask(ours.user(number, state, reward=reward, warning=warning))
            told = "Your last reply held no valid action" in chatml.decode(prompt.appended)
            parity.equal(f"{record['id']} turn {number}", told, "No valid action" in original, "warning-is-trained")
            conversation.answer(template.encode_reply(turn["llm_raw_response"]), "stop", turn["llm_raw_response"])
            state, reward, warning = str(turn["next_state"]), turn["turn_reward"], turn["next_manager_invalid_action"]
    parity.report("training texts", capsys)


def test_folding_keeps_observations_and_replies() -> None:
    assert fold([], 0, "now") == "now"
    told = fold([("one", "<think>a</think>"), ("two", "b")], 5, "now")
    assert told.splitlines()[0] == "Turns so far: 5. Shown: 2."
    assert told.endswith("Now:\nnow")
    assert "one\nYour reply: <think>a</think>" in told
