"""How requests are read: bytes that are no message are answered as a bad argument, as everything else that is wrong.

gRPC by itself would answer UNKNOWN with the name of an exception, and log a traceback that anybody can cause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.message import DecodeError, Message

from starpod.env_server.errors import CallError, bad_argument
from starpod.v1 import environment_pb2 as pb


class Malformed:
    """Stands for a request that cannot be read."""

    __slots__ = ("_type",)

    def __init__(self, type: str) -> None:
        self._type = type

    def error(self) -> CallError:
        return bad_argument("request", f"is no {self._type}: its bytes cannot be read")


def handlers(service: Any) -> grpc.GenericRpcHandler:
    """The calls of the contract, as the service answers them; `service.refuse` answers those that cannot be read."""
    contract = pb.DESCRIPTOR.services_by_name["EnvironmentService"]
    by_name: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in contract.methods:
        behaviour, read = getattr(service, method.name), reader(message_factory.GetMessageClass(method.input_type))
        write = message_factory.GetMessageClass(method.output_type).SerializeToString
        if method.client_streaming:
            by_name[method.name] = grpc.stream_stream_rpc_method_handler(behaviour, read, write)
        else:
            answer = _answer(method.name, behaviour, service.refuse)
            by_name[method.name] = grpc.unary_unary_rpc_method_handler(answer, read, write)
    return grpc.method_handlers_generic_handler(contract.full_name, by_name)


def reader(kind: type[Message]) -> Callable[[bytes], Message | Malformed]:
    """Reads messages of a kind; Malformed stands for what is none."""
    parse, malformed = kind.FromString, Malformed(kind.DESCRIPTOR.full_name)

    def read(data: bytes) -> Message | Malformed:
        try:
            return parse(data)
        except DecodeError:
            return malformed

    return read


def _answer(name: str, behaviour: Any, refuse: Any) -> Any:
    async def answer(request: Any, context: Any) -> Any:
        if type(request) is Malformed:
            return await refuse(context, name, request)
        return await behaviour(request, context)

    return answer
