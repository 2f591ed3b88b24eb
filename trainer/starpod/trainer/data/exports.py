"""Formats of other tools in which recorded episodes are exported."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from starpod.trainer.data.atif import to_atif
from starpod.trainer.data.chat import to_chat
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.files import write_objects
from starpod.trainer.data.inspect_log import to_inspect

WriteEpisodes = Callable[[Iterable[tuple[str, Episode]], Path, str, bool], int]
"""Function that writes named episodes to a file or a folder, and returns their number. Raises OSError.

Its arguments are the episodes, the path, the model's name, and whether to write token ids.
"""


class ExportFormat(NamedTuple):
    """A format of `starpod export-episodes`."""

    title: str
    """Description in the command's help, with what OUT is."""
    write: WriteEpisodes
    takes_tokens: bool = False
    """Whether the format has a place for token ids."""
    for_training: bool = False
    """Whether it is read to train on. Failed episodes are left out, and a run's evaluations, whose start states are
    held out.
    """


def write_trajectories(episodes: Iterable[tuple[str, Episode]], out: Path, model: str, tokens: bool) -> int:
    """Write a file of ATIF per episode into the folder `out`."""
    count = 0
    for name, episode in episodes:
        trajectory = to_atif(episode, name, model=model, tokens=tokens)
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(trajectory, ensure_ascii=False, indent=None if tokens else 1)
        (out / f"{name}.atif.json").write_text(text + "\n", encoding="utf-8")
        count += 1
    return count


def write_chats(episodes: Iterable[tuple[str, Episode]], out: Path, model: str, tokens: bool) -> int:
    """Write a line of OpenAI's chat format per episode into the file `out`, which is kept if there is no episode."""
    chats = [{"id": name, **to_chat(episode)} for name, episode in episodes]
    return write_objects(out, chats) if chats else 0


def write_inspect_logs(episodes: Iterable[tuple[str, Episode]], out: Path, model: str, tokens: bool) -> int:
    """Write a log of Inspect into the folder `out` for each file of episodes, model and environment."""
    count, created = 0, datetime.now(UTC).replace(microsecond=0)
    for file, members in groupby(episodes, lambda named: named[0].rpartition("-")[0]):
        logs: dict[tuple[str, str], list[Episode]] = {}
        for _, episode in members:
            logs.setdefault((episode.model or model, episode.kind), []).append(episode)
        for number, ((player, kind), played) in enumerate(logs.items(), 1):
            # The viewer lists files of this form: a time, the task without underscores, and anything unique.
            name = f"{created:%Y-%m-%dT%H-%M-%S+00-00}_{kind.replace('_', '-')}_{file}-{number}"
            out.mkdir(parents=True, exist_ok=True)
            text = json.dumps(to_inspect(played, name, created, model=player), ensure_ascii=False)
            (out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
            count += len(played)
    return count


FORMATS: dict[str, ExportFormat] = {
    "atif": ExportFormat("trajectories of Harbor; OUT is a folder", write_trajectories, takes_tokens=True),
    "inspect": ExportFormat("logs for Inspect's viewer; OUT is a folder", write_inspect_logs),
    "sft": ExportFormat("conversations in OpenAI's chat format; OUT is a .jsonl file", write_chats, for_training=True),
}
"""The formats by their names for `--as`."""
