"""Layers of a configuration: what is kept of those below, and where each value comes from."""

from pathlib import Path

import pytest
import yaml

from starpod.trainer.commands.keys import annotate
from starpod.trainer.configuration.loading import load_config, read_config
from starpod.trainer.rollout.config import BestOfConfig


def test_the_order_of_words_does_not_matter() -> None:
    words = ["collect.search.width=3", "collect.search.strategy=best_of", "collect.search.naive=0.5"]
    for given in (words, words[::-1]):
        assert load_config("frozen_lake", given).collect.search == BestOfConfig(width=3, naive=0.5)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("filter={drop_identical: true}", None),
        ("filter={strategy: top_fraction, value: null}", None),
        ("filter.drop_identical=true", 0.5),
        ("filter.strategy=top_p", 0.9),
    ],
)
def test_a_mapping_replaces_a_section_and_another_kind_its_keys(word: str, value: float | None) -> None:
    assert load_config("frozen_lake").algorithm.filter.value == 0.5
    config = load_config("frozen_lake", [f"algorithm.{word}"])
    assert config.algorithm.filter.value == (0.25 if value is None else value)


def test_a_dry_run_says_where_values_come_from(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("base: sokoban\nalgorithm: {loss: {clip_high: 0.3}, epochs: 2}\n")
    words = ["algorithm=starpo-grpo", "algorithm.loss.dual_clip=4", "prompt.system='a\n\nb'"]
    config, origins = read_config(str(tmp_path / "mine.yaml"), words[1:])
    assert origins["algorithm.loss.clip_high"] == origins["algorithm.epochs"] == str(tmp_path / "mine.yaml")
    assert (origins["algorithm.filter.strategy"], origins["algorithm.filter.value"]) == (
        "preset starpo-s",
        "base sokoban",
    )
    assert (origins["algorithm.loss.dual_clip"], origins["model.name"]) == ("command line", "base tiny")
    config, origins = read_config(str(tmp_path / "mine.yaml"), words)
    assert origins["algorithm.loss.clip_high"] == "preset starpo-grpo" and "algorithm.epochs" not in origins
    lines = [*annotate(config.to_dict(), origins)]
    assert yaml.safe_load("\n".join(lines)) == config.to_dict()
    assert "    dual_clip: 4.0  # command line" in lines
