"""A run is resumed with the model that it has, also one that an earlier version saved."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from starpod.trainer.checkpoints.resume import check_model
from starpod.trainer.configuration.loading import load_config
from starpod.trainer.configuration.resolve import check_changes
from starpod.trainer.configuration.section import ConfigError


@pytest.mark.parametrize("word", ["seed=7", "seeds.train={start: 10001, stop: 20000}"])
def test_other_training_seeds_are_refused_before_anything_starts(word: str) -> None:
    with pytest.raises(ConfigError, match="takes its start states from"):
        check_changes(load_config("tiny"), load_config("tiny", [word]), allowed=["stages"])


def test_keys_that_an_earlier_version_lacked_have_their_defaults_at_any_depth() -> None:
    def saved(**changes: Any) -> Any:
        model = load_config("frozen_lake").to_dict()["model"] | changes
        del model["chat_template"], model["tiny"]["phrases"]
        return cast(Any, SimpleNamespace(state={"config": {"model": model}}, tensors={"policy": {}}))

    config = load_config("frozen_lake")
    check_model(config, saved())
    with pytest.raises(ConfigError, match=r"model\.critic is .*, but"):
        check_model(config, saved(critic="separate"))
