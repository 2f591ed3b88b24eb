"""Countdown against recorded episodes of the original."""

from __future__ import annotations

from typing import Any

import pytest

from starpod.env_server.episode import Episode, EpisodeOver, Limits, Want
from starpod.environments.countdown import Countdown
from starpod.environments.countdown.expression import Malformed, parse
from starpod.environments.countdown.puzzles import solvable_by_signs
from tests.environments.recorded_turns import begin, records_of, replay_turns
from tests.golden import Parity, golden

CHOSEN = {
    "listing-earns-nothing": "the original pays 0.1 for the right digits in any text; ours only for an expression",
    "no-comments": "the original runs the answer as code, so a comment passes; ours knows arithmetic only",
    "right-hand-side": "the original counts the digits after = among the numbers; ours allows = and the target",
    "malformed-is-invalid": "the original says every answer is valid; ours says which could not be read",
    "over-is-over": "the original takes answer after answer; ours refuses until the next reset",
}
FILTER_CHOSEN = {"all-numbers-count": "the original's filter looks at the first four numbers only; ours at all"}


def _deviation(action: Any) -> str:
    """The chosen deviation that may change what this answer earns; none for most."""
    if not isinstance(action, str):
        return ""
    try:
        return "right-hand-side" if parse(action).claim is not None else ""
    except Malformed:
        return "no-comments" if "#" in action else "listing-earns-nothing"


def test_golden_episodes(capsys: pytest.CaptureFixture[str]) -> None:
    parity = Parity(CHOSEN)
    for record in golden("episodes_Countdown"):
        parity.episodes += 1
        start, config = record["reset"], record["config"]
        environment = Countdown()
        environment.options = Countdown.Options(
            numbers=start["nums"],
            target=start["target"],
            reward_correct=config["score"],
            reward_numbers=config["format_score"],
        )
        episode = Episode(environment, Limits())
        episode.reset(0, 0)
        parity.equal(record["id"], environment.observe(), start["obs"])
        for number, step in enumerate(record["steps"]):
            parity.steps += 1
            what = f"{record['id']} step {number}: {step['action']!r}"
            try:
                transition = episode.turn([step["action"]], Want())
            except EpisodeOver:
                parity.deviate("over-is-over")
                continue
            outcome = transition.outcomes[0]
            assert outcome is not None
            name = _deviation(step["action"])
            parity.equal(what, transition.reward, step["reward"], name)
            parity.equal(what, transition.observation.parts, step["obs"], name)
            parity.equal(what, transition.terminated, step["done"])
            parity.equal(what, transition.success, step["info"]["success"], name)
            parity.equal(what, outcome.effective, step["info"]["action_is_effective"], name)
            malformed = name in ("no-comments", "listing-earns-nothing") or not isinstance(step["action"], str)
            assert outcome.valid is not malformed, what
            parity.equal(what, outcome.valid, step["info"]["action_is_valid"], "malformed-is-invalid")
    parity.report("countdown-v1", capsys)


def test_golden_filter(capsys: pytest.CaptureFixture[str]) -> None:
    parity = Parity(FILTER_CHOSEN)
    for record in golden("countdown_filter"):
        parity.episodes += 1
        parity.steps += 1
        numbers, target = record["nums"], record["target"]
        assert solvable_by_signs(numbers[:4], target) is record["kept"], record
        name = "all-numbers-count" if len(numbers) > 4 else ""
        parity.equal(record["id"], solvable_by_signs(numbers, target), record["kept"], name)
    parity.report("countdown-v1's filter (puzzles as steps)", capsys)


def test_golden_turns(capsys: pytest.CaptureFixture[str]) -> None:
    parity = Parity({})
    for record in records_of("Countdown"):
        environment = Countdown()
        layout = record["layout"]
        environment.options = Countdown.Options(numbers=layout["nums"], target=layout["target"])
        replay_turns(record, begin(environment, record), parity)
    parity.report("countdown-v1 in turns", capsys)
