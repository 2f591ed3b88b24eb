"""Resolution of `starpod train`'s arguments: the configuration of a new run, or of one that is resumed.

The task and the estimator of a resumed run can only be changed with `--change`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.loading import Explore, load_config, read_config
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.rollout.config import CONNECTION

GUARDED = (
    "environment.id",
    "environment.version",
    "environment.options",
    "environments",
    "algorithm.advantage.kind",
    "algorithm.advantage.terms",
    "stages",
)
"""Keys that define the experiment. A change of one must be confirmed with `--change` when a run is resumed."""


USUAL = "frozen_lake"
"""Default configuration of a new run."""


class ResolvedRun(NamedTuple):
    """The configuration to train with."""

    config: Config
    origins: dict[str, str]
    """Where the value of each key that was set comes from."""
    resume: bool
    """Whether an earlier run continues."""


def resolve_run(
    source: str | None,
    words: Sequence[str],
    run_dir: Path | None,
    *,
    resume: bool,
    resume_or_start: bool,
    changes: Sequence[str],
    explore: Explore | None = None,
) -> ResolvedRun:
    """Return the configuration to train with.

    Args:
        source: See `read_config`. None means the run's saved configuration, or USUAL for a new run.
        words: See `read_config`.
        run_dir: Folder of the run.
        resume: Continue the run, which must exist.
        resume_or_start: Continue the run if it exists, or start one.
        changes: See `allowed` in `check_changes`.
        explore: See `read_config`.

    Raises:
        ConfigError: There is no such run, the folder of a new run holds another one, or the configuration is wrong.
    """
    if (resume or resume_or_start) and run_dir is None:
        raise ConfigError("--resume continues a run: name its folder with --run-dir")
    if changes and not (resume or resume_or_start):
        raise ConfigError(f"--change {changes[0]} is for a run that is resumed: add --resume, or leave it out")
    if run_dir is not None:  # at once, before an environment is explored
        RunFolder(run_dir).expect_room(resume=resume or resume_or_start)
    if run_dir is None or not (resume or resume_or_start):
        return ResolvedRun(*read_config(source or USUAL, words, explore=explore), resume=False)
    folder = RunFolder(run_dir)
    if not folder.started:
        if resume_or_start:
            return ResolvedRun(*read_config(source or USUAL, words, explore=explore), resume=False)
        raise ConfigError(
            f"{run_dir} holds no run to resume: name the folder of one with --run-dir, or leave --resume out to start "
            "one there (--resume-or-start does either)"
        )
    if not folder.config.exists():
        if source is None:
            raise ConfigError(f"the run in {run_dir} ended before it saved its configuration: give CONFIG again")
        return ResolvedRun(*read_config(source, words, explore=explore), resume=True)
    saved_config = str(folder.config)
    saved = load_config(saved_config)
    if source is None:  # each saved environment says how to reach its servers
        words = [each for word in words for each in _for_each_environment(word, saved.environments)]
    run = ResolvedRun(*read_config(source or saved_config, words, explore=explore), resume=True)
    check_changes(saved, run.config, allowed=changes)
    return run


def _for_each_environment(word: str, names: Collection[str]) -> list[str]:
    """Return a word about reaching the servers of `environment` as one for each of `names`, and others unchanged."""
    section, _, rest = word.partition(".")
    shared = names and section == "environment" and rest.partition("=")[0] in CONNECTION
    return [f"environments.{name}.{rest}" for name in names] if shared else [word]


def check_changes(old: Config, new: Config, *, allowed: Collection[str] = ()) -> None:
    """Refuse changes of guarded keys when a run is resumed.

    An allowed section, such as `environment`, allows all its keys. Other training seeds are refused in any case.

    Args:
        allowed: Keys or sections of GUARDED that may differ, as dotted keys (`--change`).

    Raises:
        ConfigError: A guarded key differs and is not allowed, or a key in `allowed` is not guarded.
    """
    for key, old_seeds, new_seeds in (("seed", old.seed, new.seed), ("seeds.train", old.seeds.train, new.seeds.train)):
        if old_seeds != new_seeds:
            raise ConfigError(
                f"{key} is {new_seeds}, but the run that is resumed takes its start states from {old_seeds}: give the "
                "same value, or begin another run with another --run-dir"
            )
    unknown = [key for key in allowed if not any(f"{guarded}.".startswith(f"{key}.") for guarded in GUARDED)]
    if unknown:
        raise ConfigError(f"--change {unknown[0]}: only {', '.join(GUARDED)} are guarded; give other keys as KEY=VALUE")
    for guarded in GUARDED:
        old_value, new_value = (_guarded(config, guarded) for config in (old, new))
        if old_value != new_value and not any(f"{guarded}.".startswith(f"{key}.") for key in allowed):
            raise ConfigError(
                f"{guarded} is {new_value!r}, but the run that is resumed has {old_value!r}: leave out CONFIG and "
                "that key to keep it, begin another run with another --run-dir, or confirm the change: --change "
                f"{guarded}"
            )


def _guarded(config: Config, key: str) -> Any:
    if key == "environments":
        return {name: [env.id, env.version, env.options] for name, env in config.environments.items()}
    if key == "stages":
        return config.to_dict().get(key, [])
    # Compare plain values, because a key of an estimator only exists with that estimator.
    value: Any = config.to_dict()
    for part in key.split("."):
        value = value.get(part, {})
    return value
