"""The OpenAPI 3.1 description of the routes, generated from the proto's descriptors."""

from __future__ import annotations

import functools
import json
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.rpc import error_details_pb2, status_pb2

from starpod.env_server.transports.http.routes import ROUTES, Route
from starpod.env_server.transports.service import PROTOCOL_VERSION
from starpod.v1 import environment_pb2 as pb

Schema = dict[str, Any]

_NUMBERS_IN_TEXT = ["NaN", "Infinity", "-Infinity"]
_LONG: Schema = {"type": ["string", "integer"], "format": "int64"}
_UNSIGNED: Schema = {"type": ["string", "integer"], "format": "uint64"}
_DOUBLE: Schema = {"anyOf": [{"type": "number"}, {"enum": _NUMBERS_IN_TEXT}]}
_SCALARS: dict[int, Schema] = {
    FieldDescriptor.TYPE_STRING: {"type": "string"},
    FieldDescriptor.TYPE_BYTES: {"type": "string", "contentEncoding": "base64"},
    FieldDescriptor.TYPE_BOOL: {"type": "boolean"},
    FieldDescriptor.TYPE_DOUBLE: _DOUBLE,
    FieldDescriptor.TYPE_FLOAT: _DOUBLE,
    FieldDescriptor.TYPE_INT32: {"type": "integer", "format": "int32"},
    FieldDescriptor.TYPE_UINT32: {"type": "integer", "format": "int64", "minimum": 0},
    FieldDescriptor.TYPE_INT64: _LONG,
    FieldDescriptor.TYPE_UINT64: _UNSIGNED,
}
_WELL_KNOWN: dict[str, Schema] = {
    "google.protobuf.Struct": {"type": "object"},
    "google.protobuf.Any": {"type": "object", "required": ["@type"], "properties": {"@type": {"type": "string"}}},
    "google.protobuf.Duration": {"type": "string"},
}
_FIELD_OF_PATH = {
    "session_id": "From Open, Fork or Restore. The body's value is ignored.",
    "environment_id": "`name-vN`.",
}


@functools.cache
def openapi() -> bytes:
    """Return the description as JSON."""
    schemas: dict[str, Schema] = {}
    for message in (status_pb2.Status, error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo):
        _reference(message.DESCRIPTOR, schemas)
    _reference(error_details_pb2.BadRequest.DESCRIPTOR, schemas)
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.verb.lower()] = _operation(route, schemas)
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "starpod.v1",
            "version": PROTOCOL_VERSION,
            "description": "Environments of LLM agents as sessions: docs/protocol.md and docs/http.md tell the rules.",
        },
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"token": []}],
    }
    return json.dumps(document, separators=(",", ":")).encode()


def _operation(route: Route, schemas: dict[str, Schema]) -> Schema:
    method = route.method
    content = "text/event-stream" if method.server_streaming else "application/json"
    reply = _reference(method.output_type, schemas)
    operation: Schema = {
        "operationId": method.name if route.field != "environment_id" else f"{method.name}One",
        "responses": {
            "200": {"description": f"{method.output_type.name}.", "content": {content: {"schema": reply}}},
            "default": {
                "description": "The error, with its details.",
                "content": {"application/json": {"schema": _reference(status_pb2.Status.DESCRIPTOR, schemas)}},
            },
        },
    }
    if route.verb == "POST":
        body = {"application/json": {"schema": _reference(method.input_type, schemas)}}
        operation["requestBody"] = {"required": True, "content": body}
    if route.field:
        operation["parameters"] = [
            {
                "name": route.field,
                "in": "path",
                "required": True,
                "schema": {"type": "string"},
                "description": _FIELD_OF_PATH[route.field],
            }
        ]
    return operation


def _reference(message: Descriptor, schemas: dict[str, Schema]) -> Schema:
    """Return a reference to a message's schema, and add the schema and its dependencies to `schemas`."""
    if schema := _WELL_KNOWN.get(message.full_name):
        return schema
    name = message.full_name.removeprefix(f"{pb.DESCRIPTOR.package}.")
    if name not in schemas:
        schemas[name] = {"type": "object"}  # messages may be recursive
        schemas[name]["properties"] = {field.name: _of_field(field, schemas) for field in message.fields}
    return {"$ref": f"#/components/schemas/{name}"}


def _of_field(field: FieldDescriptor, schemas: dict[str, Schema]) -> Schema:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return {"type": "object", "additionalProperties": _of_field(field.message_type.fields[1], schemas)}
    item_schema: Schema
    if field.message_type is not None:
        item_schema = _reference(field.message_type, schemas)
    elif field.enum_type is not None:
        item_schema = {"type": "string", "enum": [value.name for value in field.enum_type.values]}
    else:
        item_schema = _SCALARS[field.type]
    return {"type": "array", "items": item_schema} if field.is_repeated else item_schema
