"""The page at /docs for people: environments, an episode with curl, paths and messages. It contains no scripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from starpod.env_server.authoring.environment import Environment
from starpod.env_server.transports.http.openapi import openapi

_STYLE = """
:root { color-scheme: light dark; --line: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 24px auto; max-width: 860px; padding: 0 16px; }
code, pre { font: 13px/1.5 ui-monospace, monospace; }
pre { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; padding: 12px; }
summary { cursor: pointer; padding: 6px 0; } details { border-bottom: 1px solid var(--line); }
table { border-collapse: collapse; margin: 4px 0 12px 16px; } td { padding: 2px 16px 2px 0; vertical-align: top; }
"""
_URL = "http://url-of-this-server.invalid"
"""Placeholder in the prepared page for the URL by which a caller reaches the server."""
_EPISODE = """curl {url}/v1/environments/{id}
curl {url}/v1/sessions:open -H 'content-type: application/json' -d '{{"environment_id": "{id}", "seed": 7}}'
curl {url}/v1/sessions/SESSION:step -H 'content-type: application/json' \\
  -d '{{"epoch": 1, "step_index": 0, "actions": [{{"text": "{action}"}}]}}'
curl {url}/v1/sessions:close -H 'content-type: application/json' -d '{{"session_ids": ["SESSION"]}}'"""


class EnvironmentsPage:
    """The /docs page of a server. It is prepared once, because it is public and may be requested often."""

    def __init__(self, environments: Sequence[type[Environment]]) -> None:
        self._pieces = [piece.encode() for piece in _write(environments).split(_URL)]

    def at(self, url: str) -> bytes:
        """Return the page for a caller that reaches the server by this URL."""
        return escape(url).encode().join(self._pieces)


def _write(environments: Sequence[type[Environment]]) -> str:
    document = json.loads(openapi())
    links = " ".join(f'<a href="/v1/environments/{env.spec.id}">{env.spec.id}</a>' for env in environments)
    spec = environments[0].spec
    episode = _EPISODE.format(url=_URL, id=spec.id, action=spec.actions[0] if spec.actions else "...")
    operations = [
        _operation(verb, path, operation)
        for path, verbs in document["paths"].items()
        for verb, operation in verbs.items()
    ]
    messages = [
        f'<details id="{name}"><summary><code>{name}</code></summary>{_fields(schema)}</details>'
        for name, schema in sorted(document["components"]["schemas"].items())
    ]
    parts = [
        f"<h1>{document['info']['title']} over HTTP</h1><p>{escape(document['info']['description'])}</p>",
        '<p>For programs: <a href="/openapi.json">/openapi.json</a>.</p>',
        f"<h2>Environments</h2><p>{links}</p>",
        f"<h2>An episode</h2><pre>{escape(episode)}</pre>",
        f"<h2>Calls</h2>{''.join(operations)}<h2>Messages</h2>{''.join(messages)}",
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
    body = "".join(parts)
    return f'<!doctype html><html lang="en"><head>{head}<title>starpod</title></head><body>{body}</body></html>'


def _operation(verb: str, path: str, operation: dict[str, Any]) -> str:
    body = operation.get("requestBody")
    request_html = f"<p>Takes {_type(_schema(body))}.</p>" if body else ""
    reply, error = (_type(_schema(operation["responses"][status])) for status in ("200", "default"))
    response_html = f"<p>Gives {reply}, or {error}.</p>"
    summary = f"<code>{verb.upper()} {escape(path)}</code> {operation['operationId']}"
    return f"<details><summary>{summary}</summary>{request_html}{response_html}</details>"


def _schema(holder: dict[str, Any]) -> dict[str, Any]:
    (content,) = holder["content"].values()
    schema: dict[str, Any] = content["schema"]
    return schema


def _fields(schema: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><code>{name}</code></td><td>{_type(field)}</td></tr>"
        for name, field in schema.get("properties", {}).items()
    )
    return f"<table>{rows}</table>" if rows else "<p>No fields.</p>"


def _type(schema: dict[str, Any]) -> str:
    """Return a type in words, with a link if it is a message."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f'<a href="#{name}">{name}</a>'
    if "enum" in schema:
        return "one of " + ", ".join(f"<code>{value}</code>" for value in schema["enum"])
    if "items" in schema:
        return f"list of {_type(schema['items'])}"
    if "additionalProperties" in schema:
        return f"map of {_type(schema['additionalProperties'])}"
    if "anyOf" in schema:
        return _type(schema["anyOf"][0])
    types = schema["type"]
    text = types if isinstance(types, str) else " or ".join(types)
    return f"{text} ({schema['contentEncoding']})" if "contentEncoding" in schema else text
