"""What a resumed run cannot change: the model that its weights belong to."""

from __future__ import annotations

from starpod.trainer.checkpoint import Loaded
from starpod.trainer.config import Config
from starpod.trainer.models.config import RUN_TIME
from starpod.trainer.section import ConfigError


def check_model(config: Config, loaded: Loaded) -> None:
    """Raises ConfigError where the configuration describes another model than the checkpoint's."""
    now, then = config.model.to_dict(), loaded.state["config"]["model"]
    changed = [key for key in now if key not in RUN_TIME and now[key] != then[key]]
    if changed:
        key = changed[0]
        raise ConfigError(
            f"model.{key} is {now[key]}, but the run that is resumed has {then[key]}: its weights fit no other model; "
            "give the same again, or begin another run with another --run-dir"
        )
    critic = any(name.startswith("critic.") for name in loaded.tensors["policy"])
    if critic != config.algorithm.needs_critic:
        raise ConfigError(
            f"algorithm.advantage {config.algorithm.advantage} {'has no' if critic else 'needs a'} critic, but the run "
            f"that is resumed {'has one' if critic else 'has none'}: give the same again, or begin another run with "
            "another --run-dir"
        )
