"""Servers without a network: a transport whose wires answer from this process, and a name that resolves to them.

They implement the part of the contract that placement needs: Describe, Open, Step, Renew and Close, unary and on the
Stream. Messages are not encoded, so a measurement contains only the fleet's own work.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from typing import Any

from starpod.client.errors import Unreachable
from starpod.v1 import environment_pb2 as pb

ENVIRONMENT = "walk-v1"
VERSION = "1.0.0"
NAME = "environments"
PORT = 50051


class Server:
    """A simulated server with its sessions. `alive` is False after `kill`."""

    def __init__(self, address: str, version: str = VERSION, *, alive: bool = True) -> None:
        self.address = address
        self.version = version
        self.alive = alive
        self.sessions: set[str] = set()
        self.opened = 0
        self.streams: set[Wire] = set()
        self._description = pb.DescribeResponse(
            protocol_version="1.0",
            instance_id=address,
            capabilities=pb.ServerCapabilities(stream=True),
            limits=pb.ServerLimits(default_lease_seconds=600.0),
            environments=[
                pb.EnvironmentSpec(
                    id=ENVIRONMENT, version=version, capabilities=pb.EnvironmentCapabilities(deterministic=True)
                )
            ],
        )

    def describe(self, request: pb.DescribeRequest) -> pb.DescribeResponse:
        self._description.live_sessions = len(self.sessions)
        return self._description

    def answer(self, kind: str, request: Any) -> Any:
        match kind:
            case "open":
                response = pb.OpenResponse(environment_version=self.version, lease_seconds=600.0)
                for member in range(request.first_member, request.first_member + (request.count or 1)):
                    id = f"{self.address}/{self.opened}"
                    session = response.sessions.add(session_id=id, epoch=1, member=member, seed=request.seed)
                    self.opened += 1
                    self.sessions.add(session.session_id)
                return response
            case "step":
                transition = pb.Transition(outcomes=[pb.Outcome(executed=True, valid=True)] * len(request.actions))
                return pb.StepResponse(transition=transition, next_step_index=request.step_index + 1)
            case "close":
                self.sessions.difference_update(request.session_ids)
                return pb.CloseResponse()
            case "renew":
                return pb.RenewResponse()
        raise ValueError(f"a fleet that places sessions makes no {kind} calls")

    def kill(self) -> None:
        """End the server, its sessions and its streams."""
        self.alive = False
        self.sessions.clear()
        for stream in list(self.streams):
            stream.cut()


class Wire:
    """A connection to a server, or to an address without one."""

    def __init__(self, server: Server | None) -> None:
        self._server = server or Server("", alive=False)
        self._replies: asyncio.Queue[pb.StreamResponse | None] = asyncio.Queue()

    async def unary(self, rpc: str, request: Any, timeout: float) -> tuple[Any, str]:
        await asyncio.sleep(0)
        if not self._server.alive:
            raise Unreachable("gone")
        return self._server.describe(request) if rpc == "Describe" else self._server.answer(rpc.lower(), request), ""

    def open(self) -> None:
        self._server.streams.add(self)
        if not self._server.alive:
            self.cut()

    async def read(self) -> pb.StreamResponse:
        reply = await self._replies.get()
        if reply is None:
            raise Unreachable("gone")
        return reply

    async def write(self, message: pb.StreamRequest) -> None:
        response = pb.StreamResponse()
        for call in message.calls:
            kind = call.WhichOneof("request") or ""
            reply = response.replies.add(call_id=call.call_id)
            getattr(reply, kind).CopyFrom(self._server.answer(kind, getattr(call, kind)))
        self._replies.put_nowait(response)

    def cut(self) -> None:
        self._replies.put_nowait(None)

    def cancel(self) -> None:
        self._server.streams.discard(self)

    async def close(self) -> None:
        pass


class Cluster:
    """Servers behind one name, with the transport and the name resolution that a fleet needs.

    `start` adds servers, and `Server.kill` ends one.
    """

    max_message_bytes = 1 << 30

    def __init__(self, count: int = 0) -> None:
        self.servers: dict[str, Server] = {}
        self.start(count)

    def start(self, count: int, version: str = VERSION) -> list[Server]:
        """Add `count` servers and return them."""
        first_number = len(self.servers)
        servers = [
            Server(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}:{PORT}", version)
            for number in range(first_number, first_number + count)
        ]
        self.servers.update({server.address: server for server in servers})
        return servers

    @property
    def living(self) -> list[Server]:
        return [server for server in self.servers.values() if server.alive]

    def connect(self, address: str, server_name: str = "") -> Wire:
        return Wire(self.servers.get(address))

    async def resolve(self, host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        """Resolve the cluster's name, as a replacement of the event loop's getaddrinfo."""
        if host != NAME or not self.living:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        hosts = (server.address.rpartition(":")[0] for server in self.living)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port)) for host in hosts]


def balance(servers: Iterable[Server]) -> float:
    """Return the fullest server's number of sessions divided by the mean."""
    counts = [len(server.sessions) for server in servers]
    return max(counts) * len(counts) / sum(counts)
