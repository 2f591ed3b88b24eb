"""Warnings before a run: each says what to type, and that silences it."""

import re

import pytest
from click.testing import CliRunner

from starpod.trainer.commands.train import train
from starpod.trainer.configuration.advice import ADVICE, advise, half_width
from starpod.trainer.configuration.loading import load_config
from starpod.trainer.configuration.preflight import check_templates
from starpod.trainer.configuration.section import packaged_configs
from tests.trainer.chat_templates import tokenizer
from tests.trainer.configuration.test_rules import KEYS

ONE_STEP, FEW, COLDER = "one optimiser step", "cannot show a gain", "at temperature"


def warned(*words: str) -> list[str]:
    return advise(load_config("tiny", words))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["algorithm.mini_batch_size=128"], ONE_STEP),  # half of 32 groups of 8 are kept
        (["algorithm.mini_batch_size=85"], ""),  # two steps
        (["algorithm.mini_batch_size=128", "algorithm.loss=gspo"], ONE_STEP),
        (["algorithm.mini_batch_size=128", "algorithm.epochs=2"], ""),
        (["algorithm.mini_batch_size=128", "algorithm.filter=none"], ""),
        (
            ["algorithm.mini_batch_size=128", "collect.max_staleness=1"],
            ONE_STEP,
        ),  # scored anew
        (["algorithm.mini_batch_size=128", "collect.max_staleness=1", "algorithm.correction=bypass"], ""),
        (["evaluation.episodes=64"], FEW),
        (["evaluation.episodes=100"], ""),
        (["evaluation.temperature=0.5", "model.name=some/model"], COLDER),
        (["evaluation.temperature=0.5", "model.name=some/model", "sampling.temperature=0.5"], ""),
        (["evaluation.temperature=0.5"], ""),
    ],
)
def test_what_a_warning_says_to_type_silences_it(words: list[str], expected: str) -> None:
    words = ["algorithm.filter.value=0.5"] * ("algorithm.filter=none" not in words) + words
    lines = warned(*words)
    assert [expected in line for line in lines] == [True] * bool(expected), lines
    for line in lines:
        remedies = re.findall(r"[\w.]+=[\d.]*\d", line)
        kept = [word for word in words if word.partition("=")[0] not in {r.partition("=")[0] for r in remedies}]
        assert remedies and warned(*kept, *remedies) == []


def test_intervals_that_a_warning_names() -> None:
    assert half_width(100) == pytest.approx(0.10, abs=0.005) and half_width(400) == pytest.approx(0.05, abs=0.003)


def test_each_environment_and_stage_is_looked_at_and_one_process_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = advise(load_config("mixture", ["model.name=some/model"]))
    assert ": set environments.bandit.evaluation.temperature=1, or" in line
    words = ["tiny", "--dry-run", "evaluation.episodes=32"]
    assert "\nwarning: " not in (told := CliRunner().invoke(train, words)).stdout
    assert told.exit_code == 0 and told.stderr.startswith("warning: evaluation.episodes 32 cannot show a gain")
    monkeypatch.setenv("RANK", "1")
    assert "warning" not in CliRunner().invoke(train, words).stderr
    assert {key for rule in ADVICE for key in rule.keys} <= KEYS


def test_only_jobs_that_follow_a_paper_or_take_one_step_on_purpose_are_warned_of() -> None:
    found = {name: len(lines) for name in packaged_configs() if (lines := advise(load_config(name)))}
    assert found == dict.fromkeys(("bandit_llm", "webshop_gigpo", "webshop_ragen"), 1)


def test_a_template_that_changes_the_past_is_warned_of_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starpod.trainer.models.hf.load_tokenizer", lambda config: tokenizer("Qwen3"))

    def lines(*words: str) -> list[str]:
        return check_templates(load_config("tiny", ["model.name=some/model", "prompt.style=full", *words]))

    (line,) = lines("prompt.thinking=true")
    assert line.startswith("the chat template changes the thoughts of earlier replies as a conversation grows: 'assist")
    assert "so each turn begins a fresh sample" in line and "model.chat_template" in line
    assert lines("prompt.thinking=false") == [], "the prefill leaves no room for thoughts"
    assert lines("prompt.thinking=true", "prompt.context=window") == [], "each turn is a sample anyway"
    program = ["prompt.thinking=false", "collect.agent.command=[python]"]
    assert lines(*program) == [line], "a program writes its own prompts"
    monkeypatch.setattr("starpod.trainer.models.hf.load_tokenizer", lambda config: tokenizer("Qwen2.5"))
    assert lines("prompt.thinking=true") == []
