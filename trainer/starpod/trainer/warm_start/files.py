"""Episodes and conversations of a file to imitate: reading, choosing and counting them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.data.atif import from_atif
from starpod.trainer.data.chat import Chat, parse_chat
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.files import BadEpisodes, parse_json, read_records, to_episode, training_files
from starpod.trainer.warm_start.config import WarmStartConfig

KEY = "warm_start.demonstrations"


@dataclass(slots=True)
class FileContents:
    """Episodes and conversations of `warm_start.demonstrations`, and why others are left out."""

    path: str
    episodes: list[Episode] = field(default_factory=list)
    chats: list[Chat] = field(default_factory=list)
    left_out: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Number of rows that are left out, and file, line and details of the first one, by reason."""

    def leave_out(self, reason: str, place: str, count: int = 1) -> None:
        """Count rows that are left out for a reason, of which the first is at a place."""
        earlier, first = self.left_out.get(reason, (0, place))
        self.left_out[reason] = earlier + count, first

    def sentence(self) -> str:
        """Return what is imitated and what is left out, for the screen."""
        used = len(self.episodes) + len(self.chats)
        text = f"using {used} of {used + sum(count for count, _ in self.left_out.values())} in {self.path}"
        reasons = [f"{count} {reason} (the first: {first})" for reason, (count, first) in self.left_out.items()]
        return f"{text}; left out: {', '.join(reasons)}" if reasons else text


def read_contents(config: WarmStartConfig, environment: str) -> FileContents:
    """Read the episodes of an environment, and all conversations, that `config` chooses from its file.

    Raises ConfigError if a file cannot be read, or nothing in it can be imitated.
    """
    path = Path(config.demonstrations)
    if path.is_relative_to(Path.cwd()):  # as a user types it
        path = path.relative_to(Path.cwd())
    contents = FileContents(str(path))
    failed: list[tuple[str, Episode | Chat]] = []
    try:
        for file in _files(path):
            for number, record in read_records(file, _parse):
                place = f"{file}:{number}"
                chosen = _choose(contents, record, place, environment, config.min_reward)
                if chosen and config.failures is not None and record.success is False:
                    failed.append((place, record))
                elif chosen:
                    _add(contents, record, place)
    except BadEpisodes as error:
        raise ConfigError(f"{KEY}: {error}") from error
    kept = math.ceil((config.failures or 0.0) * len(failed))
    for place, record in failed[:kept]:
        _add(contents, record, place)
    if len(failed) > kept:
        contents.leave_out("without success", failed[kept][0], len(failed) - kept)
    if not (contents.episodes or contents.chats):
        raise ConfigError(f"{KEY} {path} has nothing to imitate: {contents.sentence()}")
    return contents


def _choose(
    contents: FileContents, record: Episode | Chat, place: str, environment: str, min_reward: float | None
) -> bool:
    """Return whether a record may be imitated, and count it if not. Raises ConfigError if it needs a reward."""
    reward = record.reward if isinstance(record, Chat) else record.own_return
    if record.environment not in ("", environment):
        contents.leave_out("of other environments", f"{place}, of {record.environment}")
    elif record.failed:
        contents.leave_out("that failed", place)
    elif isinstance(record, Episode) and not any(turn.actions for turn in record.turns):
        contents.leave_out("without an action", place)
    elif min_reward is None or (reward is not None and reward >= min_reward):
        return True
    elif reward is None:
        raise ConfigError(f"{place} has no reward: give each line `reward`, or leave out warm_start.min_reward")
    else:
        contents.leave_out(f"with a reward below {min_reward:g}", f"{place}, {reward:g}")
    return False


def _add(contents: FileContents, record: Episode | Chat, place: str) -> None:
    if isinstance(record, Chat):
        contents.chats.append(replace(record, place=place))
    else:
        contents.episodes.append(replace(record, turns=[turn for turn in record.turns if turn.actions]))


def _files(path: Path) -> list[Path]:
    """Return the files at a path: trajectories of ATIF, or those of `training_files`."""
    trajectories = sorted(path.glob("*.json")) if path.is_dir() and not (path / "episodes").is_dir() else []
    return trajectories if trajectories and not any(path.glob("*.jsonl*")) else training_files(path)


def _parse(line: str) -> Episode | Chat:
    """Return the episode, conversation or trajectory in a line. Raises ValueError."""
    values = parse_json(line)
    if isinstance(values, Mapping) and "steps" in values and "messages" not in values:
        return parse_chat(from_atif(values))
    if isinstance(values, Mapping) and "messages" in values:
        return parse_chat(values)
    if isinstance(values, Mapping) and "turns" in values:
        return to_episode(values)
    raise ValueError(
        "neither an episode of ours (an object with `turns`), nor a conversation (`messages`), nor a trajectory of "
        "ATIF (`steps`)"
    )
