"""Structures of replies (models/masks.py): JSON of a schema, and tool calls that must be made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starpod.trainer.data.structure import MISSING, join
from starpod.trainer.prompts.grammar import Grammar
from starpod.trainer.prompts.template import Template

_MARK, _THOUGHT = "starpod-answer", "starpod-thought"
_BLANKS = {"type": "regex", "pattern": r"[ \n]{0,2}"}
"""Blanks between a thought and an answer. An unlimited number would let a small model write nothing else."""

Tag = dict[str, Any]


def structure_of(
    template: Template,
    *,
    schema: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    name: str = "",
    one_call: bool = False,
) -> str:
    """Return the structure of a reply that is JSON of a schema, or calls tools; with both, the policy chooses.

    Args:
        template: The chat template, which has the format of thoughts and calls and the ids that end a reply.
        schema: JSON schema of the text; None: there must be a call.
        tools: OpenAI's definitions of the tools that may be called.
        name: Name of the tool that must be called; "" for any.
        one_call: Whether there may be only one call.

    Raises:
        ValueError: xgrammar is missing, has no grammar for the format of calls, or refuses the schema.
    """
    answers = [] if schema is None else [_json(template, schema)]
    if tools:
        form = template.layout.calls
        if not form.xgrammar:
            raise ValueError(
                f"a call cannot be required in the format {form.name}, for which xgrammar has no grammar: use "
                "tool_choice auto"
            )
        definitions: list[Any] = [dict(tool) for tool in tools]
        calls = _package().get_model_structural_tag(
            form.xgrammar,
            tools=definitions,
            tool_choice={"type": "function", "function": {"name": name}} if name else "required",
            reasoning="enabled" if _is_opened(template) else "auto" if _thinks(template) else "disabled",
            parallel_tool_calls=not one_call,
            max_whitespace_cnt=2,
        )
        answers.append(calls.model_dump()["format"])
    return _checked(_any_of(answers), template.stop)


def answer_structure(template: Template, grammar: Grammar, schema: Mapping[str, Any]) -> str:
    """Return the structure of replies whose answer is JSON of a schema, in a grammar of prompts.

    Raises ValueError if xgrammar is missing or refuses the schema, or if the grammar does not write its only action as
    it is.
    """
    text = grammar.compose(_THOUGHT, [_MARK]).removeprefix(template.opening.rstrip())
    if _MARK not in text:
        raise ValueError("prompt.grammar does not write an answer as it is, so it cannot have a schema")
    begin, has_thought, rest = text.rpartition(_THOUGHT)
    between, _, after = rest.partition(_MARK)
    first = _thought(begin, between) if has_thought else _constant(between)
    return _checked(_sequence(first, _schema(schema), _constant(after)), template.stop)


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise ValueError if xgrammar is missing or refuses the schema."""
    _checked(_schema(schema), ())


def _checked(content: Tag, stop: Iterable[int]) -> str:
    tag: Tag = {"type": "structural_tag", "format": content}
    try:
        _package().Grammar.from_structural_tag(tag)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"the schema cannot be enforced: {str(error).splitlines()[-1]}") from None
    return join(tag, stop)


def _package() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise ValueError(f"{MISSING} ({error})") from None
    return xgrammar


def _schema(schema: Mapping[str, Any]) -> Tag:
    return {"type": "json_schema", "json_schema": dict(schema), "max_whitespace_cnt": 2}


def _json(template: Template, schema: Mapping[str, Any]) -> Tag:
    """Return the tag of a text with this schema, after a thought if the policy writes thoughts."""
    form, answer = template.layout.calls, _schema(schema)
    before = form.write(None, _MARK, ()).partition(_MARK)[0]
    begin, _, rest = form.write(_THOUGHT, _MARK, ()).partition(_THOUGHT)
    between = rest.partition(_MARK)[0].removeprefix(form.thought[1])
    thought = _thought("" if _is_opened(template) else begin, form.thought[1])
    direct, thoughtful = _sequence(_constant(before), answer), _sequence(thought, _constant(between) or _BLANKS, answer)
    if _is_opened(template):
        return thoughtful
    return _any_of([thoughtful, direct]) if _thinks(template) else direct


def _thought(begin: str, end: str) -> Tag:
    return {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": end}


def _is_opened(template: Template) -> bool:
    """Return whether the prompt ends with the beginning of a thought."""
    return template.opening.startswith(template.layout.calls.thought[0])


def _thinks(template: Template) -> bool:
    return template.layout.calls.thought[0] in str(template.tokenizer.chat_template)


def _constant(text: str) -> Tag | None:
    return {"type": "const_string", "value": text} if text else None


def _sequence(*tags: Tag | None) -> Tag:
    return {"type": "sequence", "elements": [tag for tag in tags if tag]}


def _any_of(tags: Sequence[Tag]) -> Tag:
    return tags[0] if len(tags) == 1 else {"type": "or", "elements": list(tags)}
