"""Checks of a resumed run: its model cannot change, its task and its estimator only where that is said twice."""

from __future__ import annotations

from collections.abc import Collection

from starpod.trainer.checkpoints.checkpoint import Loaded
from starpod.trainer.config import Config
from starpod.trainer.models.config import RUN_TIME
from starpod.trainer.section import ConfigError

GUARDED = ("environment.id", "environment.version", "environment.options", "algorithm.advantage")
"""Keys that make another experiment of a run: a slip there would train a policy on what it was not made for."""


def check_changes(then: Config, now: Config, *, allowed: Collection[str] = ()) -> None:
    """Raises ConfigError where a guarded key differs from the run's own configuration and is not in `allowed`.

    A section that is allowed, such as `environment`, allows its keys.
    """
    unknown = [key for key in allowed if not any(f"{guarded}.".startswith(f"{key}.") for guarded in GUARDED)]
    if unknown:
        raise ConfigError(f"--change {unknown[0]}: only {', '.join(GUARDED)} are guarded; give other keys as KEY=VALUE")
    for guarded in GUARDED:
        section, _, key = guarded.partition(".")
        was, new = (getattr(getattr(config, section), key) for config in (then, now))
        if was != new and not any(f"{guarded}.".startswith(f"{key}.") for key in allowed):
            raise ConfigError(
                f"{guarded} is {new!r}, but the run that is resumed has {was!r}: leave CONFIG and that key out to go "
                f"on as it was, begin another run with another --run-dir, or say it twice: --change {guarded}"
            )


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
