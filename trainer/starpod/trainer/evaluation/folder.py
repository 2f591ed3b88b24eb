"""The folder of an evaluation. It only grows: each episode becomes a line of a file when it is over."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.data.files import BadEpisodes, append_line, cut_incomplete_line, parse_episode
from starpod.trainer.data.untrusted import MAX_LINE, open_text, read_bytes, read_lines
from starpod.trainer.evaluation.figures import reply_tokens
from starpod.trainer.evaluation.plan import EvaluationPlan
from starpod.trainer.output.files import hold_lock, to_json_line, write_atomic
from starpod.trainer.rollout.collect import Start

PLAN = "evaluation.json"
_PLAN = TypeAdapter(EvaluationPlan)
Key = tuple[str, int, int]
"""Environment's name, seed and attempt of an episode. A model plays each once."""
Missing = dict[tuple[str, str], list[Start]]
"""Starts to play, with their members, by model and environment. Only pairs that lack an episode are in it."""


class EvaluationFolder:
    """Paths and files of one evaluation.

    path/evaluation.json          the plan: what is to be played
    path/episodes/NAME-1.jsonl    episodes of the first model, one per line as `Episode.to_json` returns them. `model`,
        `task` or `environment`, `seed` and `member` (the attempt) identify an episode; `end` is "failed" and `error`
        the reason if it failed. A later line with the same key replaces an earlier one.
    path/.lock                    held by the process that plays
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plan_file = path / PLAN
        self._is_own = False  # whether this process writes in the folder

    @property
    def exists(self) -> bool:
        """Whether there is an evaluation in the folder."""
        return self.plan_file.is_file()

    def read_plan(self) -> EvaluationPlan:
        """Return the plan. Raises BadEpisodes."""
        try:
            return _PLAN.validate_json(read_bytes(self.plan_file, MAX_LINE))
        except ValidationError:
            raise BadEpisodes(f"{self.plan_file} cannot be read: it is no plan of this version") from None
        except (OSError, ValueError) as error:
            raise BadEpisodes(f"{self.plan_file} cannot be read: {error}") from error

    def write_plan(self, plan: EvaluationPlan) -> None:
        """Write the plan. Raises CannotWrite."""
        write_atomic(self.plan_file, to_json_line(_PLAN.dump_python(plan, mode="json")))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Lock the folder, and remove lines that a killed process left incomplete.

        The folder is created, and removed again if no plan was written.

        Raises:
            BadEpisodes: The folder holds something else.
            FolderLocked: Another process writes in it.
        """
        if self.path.is_dir() and not self.exists and not all(map(_is_leftover, self.path.iterdir())):
            raise BadEpisodes(f"{self.path} holds no evaluation, but other files: choose another folder")
        is_new = not self.path.exists()
        (self.path / "episodes").mkdir(parents=True, exist_ok=True)
        with hold_lock(self.path):
            for file in (self.path / "episodes").glob("*.jsonl"):
                cut_incomplete_line(file)
            self._is_own = True
            try:
                yield
            finally:
                self._is_own = False
                if is_new and not self.exists:
                    shutil.rmtree(self.path)

    def file(self, plan: EvaluationPlan, model: str) -> Path:
        """Return the file of a model's episodes. It may not exist yet."""
        return self.path / "episodes" / plan.file_name(model)

    def append(self, plan: EvaluationPlan, model: str, episode: Episode) -> None:
        """Add an episode that is over to the model's file. Call this only while `writing`. Raises OSError."""
        group = plan.group(episode.kind, episode.seed)
        line = to_json_line(replace(episode, model=model, group=group).to_json())
        append_line(self.file(plan, model), line)

    def read(self, plan: EvaluationPlan, model: str) -> dict[Key, Episode]:
        """Return the episodes of a model as `_abridged` ones. The last one of each key counts.

        Raises BadEpisodes for a damaged line. Files that this process does not write must not be larger than MAX_TEXT.
        """
        file, number = self.file(plan, model), 0
        episodes: dict[Key, Episode] = {}
        try:
            with open_text(file) as lines:
                for line in lines if self._is_own else read_lines(lines):
                    number += 1
                    if line.endswith(b"\n"):  # the last line is incomplete while it is being written
                        episode = _abridged(parse_episode(line))
                        episodes[episode.kind, episode.seed, episode.member] = episode
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise BadEpisodes(f"{file}:{number}: {error}") from error
        return episodes

    def missing(self, plan: EvaluationPlan, *, retry_failed: bool) -> Missing:
        """Return what is still to be played, which includes failed episodes if `retry_failed`. Raises BadEpisodes."""
        missing: Missing = {}
        for model in plan.models:
            episodes = self.read(plan, model)
            done = {key for key, episode in episodes.items() if not (retry_failed and episode.failed)}
            for name in plan.environments:
                # A start has the same number in every call, because its number decides how replies are sampled.
                starts = [
                    Start(seed - plan.seed, seed, members=members)
                    for seed in plan.seeds
                    if (members := [each for each in range(plan.attempts) if (name, seed, each) not in done])
                ]
                if starts:
                    missing[model, name] = starts
        return missing


def _abridged(episode: Episode) -> Episode:
    """Return the episode without texts, images and tokens: no metric reads them, and all may not fit in memory."""
    turns = [
        Turn(
            fresh=turn.fresh,
            parts=turn.parts,
            outcomes=turn.outcomes,
            well_formed=turn.well_formed,
            generating=turn.generating,
            stepping=turn.stepping,
        )
        for turn in episode.turns
    ]
    usage = {"completion_tokens": reply_tokens(episode)}
    return replace(
        episode, turns=turns, usage=usage, instructions="", final_observation="", final_image=b"", tail=[], parent=None
    )


def _is_leftover(path: Path) -> bool:
    """Return whether a process that was killed before it wrote its plan may have left this."""
    is_empty_folder = path.name == "episodes" and path.is_dir() and not any(path.iterdir())
    return is_empty_folder or re.fullmatch(rf"\.lock|\.\d+\.{re.escape(PLAN)}", path.name) is not None
