"""Pictures of kept episodes, in a zip file of the run, for its report and for pages without a server."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from starpod.trainer.data.episode import Episode
from starpod.trainer.data.files import BadEpisodes, read_episodes
from starpod.trainer.data.untrusted import MAX_LINE, open_regular, read_json
from starpod.trainer.output.episode_folder import step_of
from starpod.trainer.output.files import replacing
from starpod.trainer.output.run_folder import RunFolder

INDEX = "frames.json"

Shown = tuple[str, int, int]
"""Key of an episode: the name of its file, its group, its member."""


def shown_files(folder: RunFolder) -> dict[str, Path]:
    """Return the files of episodes that the report shows: before training, after it, and the final evaluation."""
    evaluations = folder.episodes.files()
    files = {"before training": evaluations[0], "after training": evaluations[-1]} if len(evaluations) > 1 else {}
    files |= {"evaluation": evaluations[0]} if len(evaluations) == 1 else {}
    if final_files := folder.episodes.files("final"):
        files["final evaluation"] = final_files[-1]
    return files


def files_between(folder: RunFolder, max_files: int) -> tuple[dict[str, Path], int]:
    """Return files of evaluations between the first and the last, by step, and the number of files left out.

    If all files together exceed `max_files` bytes, an evenly spaced selection is returned.
    """
    files = folder.episodes.files()[1:-1]
    for stride in range(1, len(files) + 1):
        chosen_files = files[stride // 2 :: stride]
        if sum(path.stat().st_size for path in chosen_files) <= max_files:
            return {f"step {step_of(path):,}": path for path in chosen_files}, len(files) - len(chosen_files)
    return {}, len(files)


def in_order(folder: RunFolder) -> Iterator[tuple[Shown, Episode]]:
    """Yield the episodes that the report shows, the most interesting ones first.

    Files, environments and outcomes alternate. A reader that stops early has therefore seen episodes of all kinds.
    """
    entries = []
    for label, path in shown_files(folder).items():
        counts: Counter[tuple[str, bool | None]] = Counter()
        try:
            for episode in read_episodes(path):
                kind = (episode.kind, episode.success)
                entries.append(((counts[kind], label), (path.name, episode.group, episode.member), episode))
                counts[kind] += 1
        except BadEpisodes:
            continue
    for _, key, episode in sorted(entries, key=lambda entry: entry[0]):
        yield key, episode


def write_pictures(path: Path, pictures: Mapping[Shown, Sequence[bytes]]) -> None:
    """Write the frames of episodes, and each distinct picture only once. Raises CannotWrite."""
    index = []
    # Store without compression, because pictures are already compressed.
    with replacing(path) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as file:
        for key, frames in pictures.items():
            names = [f"{sha256(frame).hexdigest()[:16]}.png" for frame in frames]
            index.append([*key, names])
            for name, frame in zip(names, frames, strict=True):
                if name not in file.NameToInfo:
                    file.writestr(name, frame)
        file.writestr(INDEX, json.dumps(index))


def read_pictures(path: Path, episodes: Iterable[Shown] | None = None) -> dict[Shown, list[bytes]]:
    """Return the frames of each wanted episode (None: all). Empty if the file is missing or damaged."""
    keys = None if episodes is None else set(episodes)
    try:
        with open_regular(path) as data, zipfile.ZipFile(data) as file:
            if max(info.file_size for info in file.infolist()) > MAX_LINE:
                return {}
            names_by_key = {(name, group, member): names for name, group, member, names in read_json(file.read(INDEX))}
            return {
                key: [file.read(name) for name in names]
                for key, names in names_by_key.items()
                if keys is None or key in keys
            }
    except (OSError, KeyError, TypeError, ValueError, zlib.error, NotImplementedError, zipfile.BadZipFile):
        return {}
