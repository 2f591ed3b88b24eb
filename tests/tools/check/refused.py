"""Refused calls of the reference server: the error table of docs/protocol.md as far as a toy needs it."""

from typing import Any

from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

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
    "DEADLINE": ("DEADLINE_EXCEEDED", "retry"),
    "UNAUTHENTICATED": ("UNAUTHENTICATED", "give_up"),
}


class Refused(Exception):
    """A call that fails with a reason of the table. `field` names what is wrong with a BAD_ARGUMENT."""

    def __init__(self, reason: str, message: str, field: str = "", **metadata: object) -> None:
        code, advice = TABLE[reason]
        info = error_details_pb2.ErrorInfo(reason=reason, domain="starpod.v1", metadata={"advice": advice})
        info.metadata.update({key: str(value) for key, value in metadata.items()})
        details: list[Any] = [info]
        if reason == "BAD_ARGUMENT":
            details.append(error_details_pb2.BadRequest(field_violations=[{"field": field, "description": message}]))
        if reason == "OVERLOADED":
            details.append(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(nanos=50_000_000)))
        self.status = status_pb2.Status(code=code_pb2.Code.Value(code), message=message)
        for detail in details:
            packed = any_pb2.Any()
            packed.Pack(detail)
            self.status.details.append(packed)
