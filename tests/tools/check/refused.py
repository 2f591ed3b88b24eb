"""Refused calls of toy servers: the part of docs/protocol.md's error table that they need."""

from typing import Any

import grpc
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2

TABLE = {
    "BAD_ARGUMENT": ("INVALID_ARGUMENT", "give_up"),
    "UNKNOWN_ENVIRONMENT": ("NOT_FOUND", "give_up"),
    "UNKNOWN_VERSION": ("NOT_FOUND", "give_up"),
    "UNKNOWN_SESSION": ("NOT_FOUND", "reopen"),
    "OUT_OF_ORDER": ("FAILED_PRECONDITION", "give_up"),
    "EPISODE_OVER": ("FAILED_PRECONDITION", "give_up"),
    "KEY_REUSED": ("FAILED_PRECONDITION", "give_up"),
    "INCOMPATIBLE_SNAPSHOT": ("FAILED_PRECONDITION", "give_up"),
    "UNSUPPORTED": ("UNIMPLEMENTED", "give_up"),
    "OVERLOADED": ("RESOURCE_EXHAUSTED", "retry"),
    "TOO_LARGE": ("RESOURCE_EXHAUSTED", "give_up"),
    "DEADLINE": ("DEADLINE_EXCEEDED", "retry"),
    "DRAINING": ("UNAVAILABLE", "reopen"),
    "SESSION_LOST": ("DATA_LOSS", "reopen"),
    "ENVIRONMENT_BUG": ("INTERNAL", "give_up"),
    "UNAUTHENTICATED": ("UNAUTHENTICATED", "give_up"),
}


class Refused(Exception):
    """A call that fails with a reason of the table. `field` names what is wrong with a BAD_ARGUMENT; `retry`: seconds
    that an OVERLOADED asks for."""

    def __init__(self, reason: str, message: str, field: str = "", *, retry: float = 0.05, **metadata: object) -> None:
        super().__init__(message)
        code, advice = TABLE[reason]
        info = error_details_pb2.ErrorInfo(reason=reason, domain="starpod.v1", metadata={"advice": advice})
        info.metadata.update({key: str(value) for key, value in metadata.items()})
        details: list[Any] = [info]
        if reason == "BAD_ARGUMENT":
            details.append(error_details_pb2.BadRequest(field_violations=[{"field": field, "description": message}]))
        if reason == "OVERLOADED":
            delay = duration_pb2.Duration()
            delay.FromNanoseconds(int(retry * 1e9))
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        self.code = grpc.StatusCode[code]
        self.status = status_pb2.Status(code=self.code.value[0], message=message)
        for detail in details:
            self.status.details.add().Pack(detail)
