"""Generated replies in every format, whole and broken, with the calls that they contain."""

import json
import random
from dataclasses import dataclass
from typing import Any

from starpod.trainer.prompts.formats.base import CallFormat, ReplyCall


def tool(name: str, /, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [
    tool(
        "move",
        to={"type": "string"},
        steps={"type": "integer"},
        speed={"type": "number"},
        loud={"type": "boolean"},
        items={"type": "array"},
        data={"type": "object"},
        note={"type": ["string", "null"]},
    ),
    tool("go"),
    tool("write_file", name={"type": "string"}, text={"type": "string"}),
]
_WORDS = (
    "Up",
    "a b",
    "",
    "12",
    "true",
    "é\u4e2d\U0001f600",
    'say "hi"',
    "it's",
    "a\\b",
    "{",
    "}]",
    "x\n\ny",
    "C:\\n",
    "<b>",
)
_NUMBERS = (0, -3, 10**20, 7)
_FLOATS = (0.5, -1.25e-7, 3.0, 1e22)
KINDS = ("text", "one", "two", "thought", "between", "marks", "broken", "around")


@dataclass(frozen=True)
class Sample:
    """One reply. `calls` is None if it is broken; then `original` is the whole one."""

    kind: str
    text: str
    calls: list[tuple[str, dict[str, Any]]] | None
    thought: str | None = None
    content: str = ""
    original: "Sample | None" = None


def _value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(5 if depth < 2 else 3)
    if kind == 0:
        return rng.choice(_WORDS)
    if kind == 1:
        return rng.choice((*_NUMBERS, *_FLOATS))
    if kind == 2:
        return rng.choice((True, False, None))
    if kind == 3:
        return [_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {rng.choice(("k", "k 2", "é")): _value(rng, depth + 1) for _ in range(rng.randrange(3))}


def _call(rng: random.Random, marks: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    def text() -> str:
        return "".join(rng.choice((*_WORDS, *marks)) for _ in range(rng.randrange(1, 4)))

    name = rng.choice(("move", "go", "write_file"))
    if name == "go":
        return name, {}
    if name == "write_file":
        return name, {"name": text(), "text": text()}
    values = {
        "to": text(),
        "steps": rng.choice(_NUMBERS),
        "speed": rng.choice((*_NUMBERS, *_FLOATS)),
        "loud": rng.random() < 0.5,
        "items": [_value(rng) for _ in range(rng.randrange(3))],
        "data": {"k": _value(rng), "m": rng.choice((*_WORDS, *marks))},
        "note": rng.choice((None, "some text")),
    }
    return name, {key: values[key] for key in rng.sample(list(values), rng.randrange(1, 5))}


def reply(form: CallFormat, seed: int) -> Sample:
    """Return the reply of this seed."""
    rng = random.Random(f"{form.name}/{seed}")
    kind = KINDS[seed % len(KINDS)]
    marks = tuple(mark for mark in form.all_marks if mark) if kind == "marks" else ()
    calls = [_call(rng, marks) for _ in range({"text": 0, "one": 1}.get(kind, 2))]
    written = [ReplyCall(name, json.dumps(values)) for name, values in calls]
    thought = "I think.\nSo it is." if kind in ("thought", "between") else None
    content = rng.choice(("I do it.", "Well:\n- é \U0001f600")) if kind in ("text", "around") and not form.bare else ""
    text = form.write(thought, content if kind == "around" or not calls else "", written)
    if kind == "text":
        content = content or "Nothing {to} call."
        text = form.write(None, content, [])
    elif kind == "between":
        joint = "<|call|><|start|>assistant" if form.name == "harmony" else "\n"
        text = form.write(thought, "", written[:1]) + joint + form.write("Then this.", "", written[1:])
        thought = f"{thought}\nThen this."
    elif kind == "broken":
        whole = Sample(kind, text, calls, thought, content)
        start = rng.randrange(len(text))
        cut = text[start : start + rng.choice((1, 2, 5, 20))]
        text = rng.choice((text[:start], text.replace(cut, "", 1), text[:start] + cut + text[start:]))
        return Sample(kind, text, None, original=whole)
    return Sample(kind, text, calls, thought, content)
