"""A row as a question: its prompt, right answers and checker."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from starpod.env_server import EnvironmentOptions, Image
from starpod.v1.spelling import nearest

from .answers import find_answer
from .checkers.base import AnswerChecker
from .checkers.numbers import read_number
from .checkers.registry import read_checker
from .checkers.text import ChoiceChecker
from .tools import ToolName

MAX_IMAGE_BYTES = 4 * 2**20
_IMAGES = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif", b"RIFF": "image/webp"}


class TasksSettings(EnvironmentOptions):
    """Settings of a whole file: `tasks.jsonl?attempts=3&tools=calculator`. docs/tasks.md describes them."""

    id: str = ""
    prompt: str = "prompt"
    answer: str = "answer"
    reward: str = ""
    attempts: int = Field(default=1, ge=1, le=20)
    tools: tuple[ToolName, ...] = ()
    test: float = Field(default=0.1, ge=0, lt=1)

    @field_validator("tools", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(value.split(",")) if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class Question:
    """A question of a file."""

    prompt: str
    answers: tuple[str, ...]
    """Right answers as the file has them, perhaps at the end of a worked solution. One of them is enough."""
    rights: tuple[str, ...]
    """The right answers alone."""
    checker: AnswerChecker
    image: Image | None
    columns: dict[str, Any]

    @property
    def id(self) -> str:
        return str(self.columns.get("id", ""))

    @property
    def key(self) -> str:
        """Text that identifies the question: its id, or else its prompt."""
        return self.id or self.prompt


def read_question(row: dict[str, Any], settings: TasksSettings, folder: Path) -> Question:
    """Read the columns of a row. Raises ValueError, which says what is wrong. folder: folder of images and FILE.py."""
    prompt = _prompt(_column(row, "prompt", settings.prompt))
    reward = row.get("reward") or settings.reward
    value = row.get(settings.answer) if reward else _column(row, "answer", settings.answer)
    is_json = isinstance(reward, dict) and reward.get("kind") == "schema"
    values = value if isinstance(value, list) and not is_json else [] if value is None else [value]
    answers = tuple(each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in values)
    rights = tuple(find_answer(answer) for answer in answers)
    if not all(rights):
        raise ValueError("the answer is empty")
    are_numbers = all(read_number(right) is not None for right in rights)
    checker = read_checker(reward or ("number" if are_numbers else "exact"), folder)
    checker.expect(rights)
    if isinstance(checker, ChoiceChecker):
        prompt += checker.list_choices()
    image = _image(row["image"], folder) if row.get("image") is not None else None
    return Question(prompt, answers, rights, checker, image, row)


def _column(row: dict[str, Any], setting: str, name: str) -> Any:
    if row.get(name) is not None:
        return row[name]
    problem = f"it has no {name!r}{nearest(name, row)}".rstrip("?")
    raise ValueError(f"{problem}. Rename the column, or serve the file as FILE?{setting}=COLUMN")


def _prompt(value: Any) -> str:
    """Return text, or messages as one text, in which roles are named if there are several messages."""
    if isinstance(value, str) and value.strip():
        return value
    match value:
        case [{"content": str(text)}]:
            return text
        case [_, *_] if all(isinstance(each, dict) and isinstance(each.get("content"), str) for each in value):
            return "\n\n".join(f"[{message.get('role', 'user')}]\n{message['content']}" for message in value)
    raise ValueError('the prompt is neither text nor a list of {"role": ..., "content": text}')


def _image(value: Any, folder: Path) -> Image:
    """Return the image of a column: a path below the folder, or an object with `bytes` or `path`."""
    data, name = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (None, value)
    if data is None:
        path = (folder / str(name)).resolve()
        if not path.is_relative_to(folder.resolve()) or not path.is_file():
            raise ValueError(f"there is no image {name!r} in the folder of the file")
        with path.open("rb") as file:
            data = file.read(MAX_IMAGE_BYTES + 1)
    mime = next((mime for start, mime in _IMAGES.items() if data.startswith(start)), "")
    if not mime or len(data) > MAX_IMAGE_BYTES:
        raise ValueError("the image is not PNG, JPEG, GIF or WebP, or has more than 4 MiB")
    return Image(data, mime)
