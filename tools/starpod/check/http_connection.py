"""A connection over HTTP: messages as JSON, and errors as the google.rpc.Status that gRPC sends in a trailer."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc import status_pb2

from starpod.check.connection import CheckConnection, Metadata, method_of, retry_while_overloaded, rpc_error
from starpod.check.expectations import Unmet
from starpod.check.refusal import from_status
from starpod.client.transport import TLS, Transport, join_endpoint
from starpod.v1 import environment_pb2 as pb

if TYPE_CHECKING:
    import httpx

_STATUS = {
    "INVALID_ARGUMENT": (400, 404, 405, 411, 413, 415, 421),
    "FAILED_PRECONDITION": (400,),
    "UNAUTHENTICATED": (401,),
    "NOT_FOUND": (404,),
    "RESOURCE_EXHAUSTED": (429, 413),
    "UNIMPLEMENTED": (501,),
    "UNAVAILABLE": (503,),
    "DEADLINE_EXCEEDED": (504,),
}
"""Allowed HTTP statuses by gRPC code (google/rpc/code.proto, docs/http.md). All other codes require status 500."""
_FUTURE = "of_the_future"


class HTTPConnection(CheckConnection):
    """A pool of connections to a server at http://host:port or https://host:port. Needs httpx."""

    transport = "HTTP"

    def __init__(self, address: str, access: Transport, seconds: float, portion: int = 0) -> None:
        super().__init__(address, access, seconds, portion)
        import httpx

        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        verify = _ssl_context(access.tls) if access.tls else True
        self._client = httpx.AsyncClient(
            base_url=address, verify=verify, limits=limits, timeout=None, trust_env=False, follow_redirects=False
        )

    def new_connection(self, address: str = "", options: Sequence[tuple[str, int]] = ()) -> HTTPConnection:
        return HTTPConnection(address or self.address, self.access, self.seconds, self.portion)

    def sibling(self, endpoint: str) -> str:
        scheme, _, authority = self.address.partition("://")
        return f"{scheme}://{join_endpoint(endpoint, authority.rpartition(':')[0])}"

    async def close(self) -> None:
        await self._client.aclose()

    async def send(self, request: Message, seconds: float, metadata: Metadata) -> tuple[Any, Any]:
        method = method_of(request)
        verb, path, body = _http_request(method, request)
        response = await self._send(verb, path, body, seconds, metadata)
        return read_reply(method, json.loads(response.content)), tuple(response.headers.items())

    async def send_unknown_field(self, request: Message) -> None:
        verb, path, body = _http_request(method_of(request), request)
        body = json.dumps({**json.loads(body), _FUTURE: [{"a": 1}]}).encode() if body else body
        await retry_while_overloaded(lambda: self._send(verb, path, body, self.seconds, self.metadata))

    async def send_garbage(self, method: str) -> None:
        _, path, _ = _http_request("Open", pb.OpenRequest())
        if method == "Step":
            path = path.replace(":open", "/x:step")
        await retry_while_overloaded(
            lambda: self._send("POST", path, b"\xff\xff\xff\xff garbage", self.seconds, self.metadata)
        )

    async def serving(self, service: str) -> bool:
        path = f"/v1/health?service={quote(service)}" if service else "/v1/health"
        response = await self._send("GET", path, b"", self.seconds, ())
        return bool(response.json() == {"status": "SERVING"})

    async def _send(self, verb: str, path: str, body: bytes, seconds: float, metadata: Metadata) -> httpx.Response:
        import httpx

        headers = [*metadata, ("content-type", "application/json")] if body else list(metadata)
        try:
            async with asyncio.timeout(seconds):
                response = await self._client.request(verb, path, content=body or None, headers=headers)
        except TimeoutError:
            raise rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, f"no response within {seconds:g} s") from None
        except httpx.TransportError as error:
            kind = "failed to connect: " if isinstance(error, httpx.ConnectError) else ""
            raise rpc_error(grpc.StatusCode.UNAVAILABLE, f"{kind}{error or type(error).__name__}") from error
        if response.is_success:
            return response
        raise _error_of(response)


def _http_request(method: str, request: Message) -> tuple[str, str, bytes]:
    """Return the HTTP verb, path and body of a call."""
    if isinstance(request, pb.DescribeRequest):
        environment_path = f"/{quote(request.environment_id, safe='')}" if request.environment_id else ""
        return "GET", f"/v1/environments{environment_path}", b""
    fields = json_format.MessageToDict(request, preserving_proto_field_name=True)
    path = f"/v1/sessions:{method.lower()}"
    if "session_id" in request.DESCRIPTOR.fields_by_name:
        path = f"/v1/sessions/{quote(fields.pop('session_id', ''), safe='')}:{method.lower()}"
    return "POST", path, json.dumps(fields, ensure_ascii=False).encode()


def read_reply(method: str, value: Any) -> Any:
    """Parse a method's reply from its ProtoJSON form."""
    return json_format.ParseDict(value, getattr(pb, f"{method}Response")(), ignore_unknown_fields=True)


def rpc_error_of(status: status_pb2.Status, trailer: Metadata) -> grpc.aio.AioRpcError:
    """Return the gRPC error for a google.rpc.Status."""
    code = grpc.StatusCode.__members__.get(from_status(status).code, grpc.StatusCode.UNKNOWN)
    return rpc_error(code, status.message, status, trailer)


def _error_of(response: httpx.Response) -> grpc.aio.AioRpcError:
    """Return the gRPC error for an HTTP response. Raise Unmet if its status code does not fit the error."""
    status = status_pb2.Status()
    try:
        json_format.Parse(response.content, status, ignore_unknown_fields=True)
    except json_format.ParseError as error:
        expected = f"a google.rpc.Status as JSON with HTTP status {response.status_code}"
        raise Unmet(expected, f"{response.text[:200]!r} ({error})", "send the details of the error as JSON") from error
    refusal = from_status(status)
    statuses = _STATUS.get(refusal.code, (500,))
    if response.status_code not in statuses:
        raise Unmet(f"HTTP status {statuses[0]} with {refusal}", str(response.status_code), "map it as code.proto does")
    if refusal.wait is not None and "retry-after" not in response.headers:
        raise Unmet("Retry-After with RetryInfo", f"none with {refusal}", "send RetryInfo's delay as Retry-After, too")
    return rpc_error_of(status, tuple(response.headers.items()))


def _ssl_context(tls: TLS) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tls.roots)
    if tls.certificate is not None:
        context.load_cert_chain(tls.certificate, tls.key)
    return context
