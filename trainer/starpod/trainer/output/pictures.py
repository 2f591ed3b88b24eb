"""Pictures of kept episodes: a zip file of the run, for its report and for pages without a server."""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from starpod.trainer.data.episode import Episode
from starpod.trainer.data.files import BadEpisodes, read_episodes
from starpod.trainer.data.untrusted import MAX_LINE, open_regular, read_json
from starpod.trainer.output.files import CannotWrite
from starpod.trainer.output.run_folder import RunFolder, step_of

INDEX = "frames.json"

Shown = tuple[str, int, int]
"""An episode: the name of its file, its group, its member."""


def shown_files(folder: RunFolder) -> dict[str, Path]:
    """The files of episodes that the report shows, by when they were played: before, after and at the end."""
    evaluations = folder.episode_files()
    files = {"before training": evaluations[0], "after training": evaluations[-1]} if len(evaluations) > 1 else {}
    files |= {"evaluation": evaluations[0]} if len(evaluations) == 1 else {}
    if final := folder.episode_files("final"):
        files["final evaluation"] = final[-1]
    return files


def files_between(folder: RunFolder, most: int) -> tuple[dict[str, Path], int]:
    """Files of the evaluations between the first and the last, by when they were played: all, or as many, evenly
    spread, as have `most` bytes together. And how many were left out."""
    files = folder.episode_files()[1:-1]
    for stride in range(1, len(files) + 1):
        chosen = files[stride // 2 :: stride]
        if sum(path.stat().st_size for path in chosen) <= most:
            return {f"step {step_of(path):,}": path for path in chosen}, len(files) - len(chosen)
    return {}, len(files)


def in_order(folder: RunFolder) -> Iterator[tuple[Shown, Episode]]:
    """The episodes that the report shows, those first that are worth most to be looked at.

    Of each file in turn the next of each environment, solved and not solved ones by turns: so whatever number of them
    is drawn, there are some of each kind.
    """
    places = []
    for when, path in shown_files(folder).items():
        counts: Counter[tuple[str, bool | None]] = Counter()
        try:
            for episode in read_episodes(path):
                kind = (episode.kind, episode.success)
                places.append(((counts[kind], when), (path.name, episode.group, episode.member), episode))
                counts[kind] += 1
        except BadEpisodes:
            continue
    for _, shown, episode in sorted(places, key=lambda place: place[0]):
        yield shown, episode


def write_pictures(path: Path, drawn: Mapping[Shown, Sequence[bytes]]) -> None:
    """Writes the frames of episodes, each picture once. Raises CannotWrite."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    index = []
    try:
        # Pictures are compressed already.
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as file:
            for shown, frames in drawn.items():
                names = [f"{sha256(frame).hexdigest()[:16]}.png" for frame in frames]
                index.append([*shown, names])
                for name, frame in zip(names, frames, strict=True):
                    if name not in file.NameToInfo:
                        file.writestr(name, frame)
            file.writestr(INDEX, json.dumps(index))
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CannotWrite(path, error) from error


def read_pictures(path: Path, wanted: Iterable[Shown] | None = None) -> dict[Shown, list[bytes]]:
    """The frames of each episode, or of those that are wanted. Empty without a file, or where it is damaged."""
    chosen = None if wanted is None else set(wanted)
    try:
        with open_regular(path) as data, zipfile.ZipFile(data) as file:
            if max(each.file_size for each in file.infolist()) > MAX_LINE:
                return {}
            known = {(name, group, member): names for name, group, member, names in read_json(file.read(INDEX))}
            return {
                shown: [file.read(name) for name in names]
                for shown, names in known.items()
                if chosen is None or shown in chosen
            }
    except (OSError, KeyError, TypeError, ValueError, zlib.error, NotImplementedError, zipfile.BadZipFile):
        return {}
