"""Test episodes of an environment, from which its configuration is sized. Those of a file are cached."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import click

from starpod.client import Limits
from starpod.client.programs import start_server
from starpod.remote.catalog import find_environment
from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.preflight import played_environments
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.data.episode import Episode
from starpod.trainer.output.files import write_atomic
from starpod.trainer.rollout.config import EnvironmentConfig
from starpod.trainer.rollout.environment import connect, make_task
from starpod.trainer.warm_start.config import WarmStartConfig
from starpod.trainer.warm_start.demonstrations import Demonstration, collect_demonstrations
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_word import EnvironmentWord

_EPISODES = 64
"""Number of test episodes that are played to choose the policy's context and token limits."""
MOST_TURNS = 32
"""Maximum number of turns of an episode, unless the expert needs more."""
_MOST_EXPERT_TURNS = 128
"""Maximum number of turns that the expert may take in a test episode."""
_REPORT_SECONDS = 10.0
"""Seconds between reports on the progress of the test episodes."""
_MOST_CACHED = 20
"""Number of explored environments that are cached. The oldest are removed first."""


@dataclass(frozen=True, slots=True)
class Explored:
    """An environment and its test episodes."""

    spec: pb.EnvironmentSpec
    demonstrations: list[Demonstration]
    seconds: float
    """Duration of the test episodes."""

    def to_json(self) -> dict[str, Any]:
        """Return JSON values. `from_json` is the inverse."""
        spec = base64.b64encode(self.spec.SerializeToString()).decode()
        demos = [[demo.episode.to_json(), asdict(demo.limits), demo.imitate] for demo in self.demonstrations]
        return {"spec": spec, "seconds": self.seconds, "demonstrations": demos}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Explored:
        """Raises LookupError, TypeError and ValueError for other values."""
        spec = pb.EnvironmentSpec.FromString(base64.b64decode(values["spec"]))
        demos = [
            Demonstration(Episode.from_json(episode), Limits(**limits), imitate)
            for episode, limits, imitate in values["demonstrations"]
        ]
        return cls(spec, demos, values["seconds"])


def _find(word: EnvironmentWord, version: str, specs: Sequence[pb.EnvironmentSpec]) -> pb.EnvironmentSpec:
    """Return the newest spec, in the range of versions, of the environment that a word names. Raises ConfigError."""
    ids = sorted({spec.id for spec in specs})
    if not word.id and len(ids) > 1:
        example = f"{word.source}{'/' if word.addresses else ':'}{ids[0]}"
        advice = "name one" if word.family else f"say which, as in {example}"
        raise ConfigError(f"{word.source} holds {' and '.join(ids)}: {advice}")
    try:
        return find_environment(specs, word.id, version)
    except click.BadParameter as error:
        raise ConfigError(f"{word.source}: {error.message}") from None


@contextmanager
def serve(word: EnvironmentWord, config: EnvironmentConfig) -> Iterator[EnvironmentConfig]:
    """Serve what is not served yet inside the context, and yield the section `environment` with its address."""
    if word.addresses:
        yield config
        return
    with start_server(*filter(None, [word.id]), *config.serve) as address:
        yield config.model_copy(update={"addresses": (address,), "serve": ()})


async def explore(
    word: EnvironmentWord,
    environment: EnvironmentConfig,
    check: Callable[[pb.EnvironmentSpec], Config],
    report: Callable[[str], None],
) -> Explored:
    """Play test episodes with each set of options that the run will use.

    Args:
        environment: The section `environment` with the address of its server.
        check: Returns the user's configuration for a spec. Raises ConfigError if it cannot be used.
        report: Called with a sentence on the progress, at the start and every 10 seconds.

    Raises:
        ConfigError: The server has no such environment, or `check` refused it.
    """
    async with connect(environment) as fleet:
        spec = _find(word, environment.version, await fleet.describe())
        draft = check(spec)
        expert, own_limit = spec.capabilities.expert_action, spec.limits.max_turns
        most_turns = _MOST_EXPERT_TURNS if expert else MOST_TURNS
        turns = draft.environment.max_turns or min(own_limit or most_turns, most_turns)
        config = WarmStartConfig(actions="expert" if expert else "random", noise=0.0)
        tasks = [
            replace(make_task(each, spec.action_space.names), limits=Limits(turns, 1), expert_moves_left=None)
            for each in _settings(draft)
        ]
        count, start_time = _EPISODES * len(tasks), perf_counter()
        demonstrations: list[Demonstration] = []
        player = "by its expert" if expert else "at random"
        report(f"{spec.id}: playing {count} episodes {player}")

        async def tell() -> None:
            while True:
                await asyncio.sleep(_REPORT_SECONDS)
                seconds = perf_counter() - start_time
                report(f"{spec.id}: {len(demonstrations)} of {count} episodes played after {seconds:.0f} s")

        telling = asyncio.create_task(tell())
        try:
            for task in tasks:
                await collect_demonstrations(fleet, config, task, range(_EPISODES), watch=demonstrations.append)
        finally:
            telling.cancel()
        demonstrations.sort(key=lambda demo: demo.episode.seed)
        return Explored(spec, demonstrations, perf_counter() - start_time)


def _settings(draft: Config) -> list[EnvironmentConfig]:
    """Return the environment with each set of options that the run uses, once each."""
    (task,) = draft.tasks
    settings: list[EnvironmentConfig] = []
    for environment in played_environments(draft, task):
        if all(environment.options != other.options for other in settings):
            settings.append(environment)
    return settings


def cache_file(word: EnvironmentWord, draft: Config) -> Path | None:
    """Return the place of a file's test episodes; None for another environment, which may change at any time.

    Its name is a digest of all that the episodes depend on: the file with its neighbours, which it may import, and the
    options and limits.
    """
    if word.path is None:
        return None
    digest = hashlib.sha256(f"{importlib.metadata.version('starpod')}\n{word.path}\n{word.name}\n".encode())
    for file in sorted((word.path if word.path.is_dir() else word.path.parent).glob("*.py")):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    settings = [[each.version, each.options, each.max_turns, *each.serve] for each in _settings(draft)]
    digest.update(json.dumps(settings, sort_keys=True).encode())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "starpod" / "explored"
    return folder / f"{digest.hexdigest()}.json"


def read_cache(file: Path | None) -> Explored | None:
    try:
        return None if file is None else Explored.from_json(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, LookupError, TypeError, ValueError):  # there is none, or another version wrote it
        return None


def write_cache(file: Path | None, explored: Explored) -> None:
    if file is None:
        return
    with suppress(OSError):  # without a cache, the episodes are played again
        write_atomic(file, json.dumps(explored.to_json()))
        for old in sorted(file.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-_MOST_CACHED]:
            old.unlink(missing_ok=True)
