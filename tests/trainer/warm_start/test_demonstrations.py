"""Demonstrations written down as replies."""

import random
from dataclasses import replace
from typing import Any, cast

import pytest

from starpod.client import Fleet, Limits
from starpod.trainer.agents.config import SamplingConfig, ScriptConfig
from starpod.trainer.configuration.loading import parse_config
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.data.episode import DONE, ActionOutcome, Episode, Turn
from starpod.trainer.parallel.ranks import Parallel
from starpod.trainer.prompts.prompt import PromptConfig
from starpod.trainer.prompts.template import Template
from starpod.trainer.rollout.config import EnvironmentConfig
from starpod.trainer.rollout.environment import make_task
from starpod.trainer.warm_start.config import WarmStartConfig
from starpod.trainer.warm_start.demonstrations import (
    Demonstration,
    choose_best,
    collect_demonstrations,
    drop_failures,
    join_turns,
)
from starpod.trainer.warm_start.imitation import Imitation
from starpod.trainer.warm_start.teacher import DemonstrationWriter
from tests.support import ServerProcess
from tests.trainer.chat_templates import tokenizer

TURN = Turn(observation="P 0 1 G 2 2", fresh=True, actions=["Left"])


def say(thought: str) -> str:
    return DemonstrationWriter(WarmStartConfig(thought=thought), PromptConfig(), ("Left",)).reply(TURN)


def test_a_thought_is_made_of_the_action_and_the_words_of_the_observation() -> None:
    assert "<think>2 2 so Left</think>" in say("{words[4]} {words[5]} so {action}")


@pytest.mark.parametrize("thought", ["{words[6]}", "{move}", "{words.first}", "{action", "{}"])
def test_a_thought_that_does_not_fit_the_observation_is_reported(thought: str) -> None:
    with pytest.raises(ConfigError, match=r"warm_start\.thought .*'P 0 1 G 2 2'") as told:
        say(thought)
    assert "it may use {action}, {relations}, {next_relations}, {intended_relations}, and {words[0]}" in str(told.value)


def test_a_thought_that_is_not_asked_for_may_fit_or_not() -> None:
    writer = DemonstrationWriter(WarmStartConfig(thought="{words[6]}"), PromptConfig(thinking=False), ("Left",))
    assert writer.reply(TURN) == "<answer>Left</answer>"


@pytest.mark.parametrize(
    ("model", "rate"),
    [({"name": "tiny"}, 1e-3), ({"name": "smollm2"}, 2e-5), ({"name": "smollm2", "lora": {"rank": 8}}, 1e-4)],
)
def test_the_rate_of_imitation_fits_the_model(model: dict[str, object], rate: float) -> None:
    config = parse_config({"model": model})
    assert config.warm_start.rate(config.model) == rate
    assert parse_config({"model": model, "warm_start": {"lr": 0.5}}).warm_start.rate(config.model) == 0.5


def test_moves_are_joined_to_turns_of_one_to_so_many() -> None:
    turns = [
        Turn(
            observation=f"state {number}", fresh=True, actions=[str(number)], outcomes=[DONE], parts={"environment": 1}
        )
        for number in range(60)
    ]
    given = Demonstration(Episode(0, 0, "lake-v1", turns=turns), Limits(), [number != 30 for number in range(60)])
    joined = join_turns(given, 3, random.Random(1))
    found = joined.episode.turns
    assert [action for turn in found for action in turn.actions] == [str(number) for number in range(60)]
    assert {len(turn.actions) for turn in found} == {1, 2, 3}
    assert all(turn.observation == f"state {turn.actions[0]}" for turn in found)
    assert joined.episode.own_return == 60 and all(turn.effective == len(turn.actions) for turn in found)
    assert joined.imitate == ["30" not in turn.actions for turn in found]
    assert join_turns(given, 1, random.Random(1)) == given


def test_the_best_are_imitated_and_of_them_only_moves_with_an_effect() -> None:
    def played(*effects: int) -> Demonstration:
        turns = [
            Turn(observation="", fresh=True, outcomes=[ActionOutcome(True, True, bool(effect))]) for effect in effects
        ]
        turns[-1].parts = {"environment": float(sum(effects))}
        return Demonstration(Episode(0, 0, "lake-v1", turns=turns), Limits(), [True] * len(turns))

    given = [played(1, 0), played(0), played(1, 0, 1), played(0, 0)]
    assert choose_best(given, 1.0) == given
    assert [each.imitate for each in choose_best(given, 0.5)] == [[True, False], [True, False, True]]
    joined = [join_turns(each, 2, random.Random(0)) for each in given]
    assert [each.imitate for each in choose_best(joined, 0.5)] == [[False], [False, True]]


def test_failures_are_left_out_but_for_a_share() -> None:
    given = [
        Demonstration(Episode(number, 0, "lake-v1", success=success), Limits(), [])
        for number, success in enumerate([True, False, None, False, False])
    ]
    assert drop_failures(given, 1.0) == given
    assert [each.episode.group for each in drop_failures(given, 0.5)] == [0, 1, 2, 3]
    assert [each.episode.group for each in drop_failures(given, 0.0)] == [0, 2]
    with pytest.raises(ConfigError, match="none of 2 played episodes succeeded"):
        drop_failures(given[3:], 0.0)


async def test_a_demonstration_reads_as_what_is_played_does() -> None:
    """The prompt has the previous turn's reward and the number of remaining actions. A verifier has its own actions."""
    turns = [Turn(observation=name, fresh=True, actions=["Left", "Left"]) for name in "ab"]
    turns[0].parts = {"shaping": 0.5}
    demonstration = Demonstration(Episode(0, 0, "lake-v1", turns=turns), Limits(max_actions=8), [True, True])
    texts = await DemonstrationWriter(WarmStartConfig(), PromptConfig(), ("Left",)).texts([demonstration])
    assert "Reward: 0.5\n" in texts[3] and "You have 6 actions left." in texts[3]
    script = ScriptConfig(name="solver_verifier")
    writer = DemonstrationWriter(WarmStartConfig(), PromptConfig(), ("Left",), script)
    told = {speaker: writer._prompter(demonstration, speaker).system() for speaker in ("solver", "verifier")}
    assert "Actions: Left." in told["solver"] and "Actions: Accept, Reject." in told["verifier"]


async def test_a_demonstration_ends_where_no_reply_fits_into_a_context_of_the_run() -> None:
    turns = [Turn(observation=f"state {number}", fresh=True, actions=["Left"]) for number in range(6)]
    demonstration = Demonstration(Episode(0, 0, "lake-v1", turns=turns), Limits(), [True] * 6)
    template = Template(tokenizer("chatml"))
    writer = DemonstrationWriter(WarmStartConfig(), PromptConfig(), ("Left",))
    whole = await writer.episode(demonstration, template, 0)
    assert len(whole.turns) == 6 and not writer.cut_count
    most = sum(len(turn.prompt) + len(turn.reply) for turn in whole.turns[:3])
    for tokens, count in ((most, 3), (most - 1, 2)):
        writer.sampling = SamplingConfig(min_reply_tokens=1, max_episode_tokens=tokens)
        cut = await writer.episode(demonstration, template, 0)
        assert [turn.reply for turn in cut.turns] == [turn.reply for turn in whole.turns[:count]]
    assert writer.cut_count == 2


async def test_more_moves_than_a_turn_may_have_are_refused(server: ServerProcess) -> None:
    async with Fleet(server.address) as fleet:
        task = make_task(EnvironmentConfig(id="frozen_lake-v1", max_actions_per_turn=2), ("Left",))
        with pytest.raises(ConfigError, match=r"actions_per_turn is 3, .* have 2"):
            await collect_demonstrations(fleet, WarmStartConfig(steps=1, actions_per_turn=3), task, [1])


async def test_demonstrations_report_how_many_are_finished(server: ServerProcess) -> None:
    finished = []
    async with Fleet(server.address) as fleet:
        task = make_task(EnvironmentConfig(id="bandit-v1"), ())
        played = await collect_demonstrations(fleet, WarmStartConfig(steps=1), task, range(5), watch=finished.append)
    assert sorted(each.episode.seed for each in finished) == [each.episode.seed for each in played] == [0, 1, 2, 3, 4]


async def test_each_agent_of_a_demonstration_has_its_own_turns_in_view() -> None:
    turns = [Turn(observation=f"board {number}", fresh=True, actions=[str(number)]) for number in range(4)]
    for turn, agent in zip(turns, "XOOX", strict=True):
        turn.agent_id = agent
    episode = Episode(0, 0, "tic_tac_toe-v1", turns=turns)
    demonstration = Demonstration(episode, Limits(), [True, False, True, True])
    script = ScriptConfig(name="self_play")
    writer = DemonstrationWriter(WarmStartConfig(), PromptConfig(), tuple("0123"), script)
    played, replies = await writer._play(demonstration, None)
    assert [turn.agent_id for turn in played] == list("XOOX")
    assert [turn.observation for turn in played] == [turn.observation for turn in turns]
    assert [reply.weight for reply in replies] == [1.0, 0.0, 1.0, 1.0]
    assert [reply.message.splitlines()[0] for reply in replies] == ["Turn 1", "Turn 1", "Reward: 0", "Reward: 0"]
    assert ["Turn 2" in reply.message for reply in replies] == [False, False, True, True]


async def test_a_retry_is_written_after_the_attempts_before_it() -> None:
    """Demonstrations from a file have no previous attempt."""
    first, second = (
        Demonstration(
            Episode(0, 0, "lake-v1", turns=[Turn(observation=name, fresh=True, actions=["Left"])]), Limits(), [True]
        )
        for name in ("one", "two")
    )
    writer = DemonstrationWriter(WarmStartConfig(), PromptConfig(), ("Left",), ScriptConfig(name="attempts"))
    for given, shown in ((second, ["two"]), (replace(second, earlier_attempts=(first,)), ["one", "two"])):
        played, replies = await writer._play(given, None)
        assert [turn.observation for turn in played] == shown
        assert ["try once more" in reply.message for reply in replies] == [False, True][: len(shown)]


def test_demonstrations_without_a_turn_to_imitate_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"lower warm_start\.noise"):
        Imitation(cast(Any, None), [], WarmStartConfig(steps=1), Parallel(), lr=1.0, micro_batch_tokens=1)
