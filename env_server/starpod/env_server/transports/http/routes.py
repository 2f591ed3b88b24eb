"""Paths of the contract's methods, by the rules of google.api.http, with custom verbs after a colon.

If a call concerns one session, its path contains the id: `POST /v1/sessions/{session_id}:step`. Other paths do not:
`POST /v1/sessions:open`. The body holds the request's other fields. Describe is `GET /v1/environments` or
`GET /v1/environments/{environment_id}`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from starpod.v1 import environment_pb2 as pb

_SESSIONS = "/v1/sessions"
_ENVIRONMENTS = "/v1/environments"


@dataclass(frozen=True, slots=True)
class Route:
    """One HTTP method and path for a method of the contract."""

    method: MethodDescriptor
    verb: str
    path: str
    """Path. If it contains a field of the request, the field's name is in braces."""
    field: str = ""
    """Name of the field that the path contains; empty if there is none."""

    @property
    def name(self) -> str:
        return str(self.method.name)

    @property
    def request(self) -> type[Message]:
        return message_factory.GetMessageClass(self.method.input_type)


def _routes() -> Iterator[Route]:
    """Yield all routes in the order of the proto."""
    for method in pb.DESCRIPTOR.services_by_name["EnvironmentService"].methods:
        if method.name == "Describe":
            yield Route(method, "GET", _ENVIRONMENTS)
            yield Route(method, "GET", f"{_ENVIRONMENTS}/{{environment_id}}", "environment_id")
        elif "session_id" in method.input_type.fields_by_name:
            yield Route(method, "POST", f"{_SESSIONS}/{{session_id}}:{method.name.lower()}", "session_id")
        else:
            yield Route(method, "POST", f"{_SESSIONS}:{method.name.lower()}")


ROUTES = tuple(_routes())
