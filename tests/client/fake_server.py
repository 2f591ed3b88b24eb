"""The reference server with another environment, and with switches for faults.

Its environment, `walk-v1`, folds every action and a random stream into one number: any turn that is lost, doubled or
swapped shows in every later observation.
"""

import asyncio
import hashlib
import json
import random
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from starpod.v1 import environment_pb2 as pb
from starpod.v1 import environment_pb2_grpc as pb_grpc
from tests.tools.check.reference_server import ReferenceService, Seat
from tests.tools.check.refused import Refused
from tests.tools.check.walk import mix

every_way = pytest.mark.parametrize("fake", ["columns", "messages", "unary"], indirect=True)
"""The three ways in which turns travel."""
OPTIONS = {
    "type": "object",
    "properties": {"length": {"type": "integer", "default": 8}, "title": {"type": "string", "default": "walk"}},
    "additionalProperties": False,
}
ROOM = 2**31 - 1


def overloaded(retry: float = 0.01, limit: str = "calls") -> Refused:
    return Refused("OVERLOADED", "too many calls", retry=retry, limit=limit)


def session_lost() -> Refused:
    return Refused("SESSION_LOST", "the process crashed", cause="crash")


@dataclass
class Fold:
    """An episode as a number that depends on all turns. `luck` seeds the random numbers, `draws` counts them."""

    length: int
    value: int
    luck: int
    draws: int = 0

    def step(self, action: str, noise: int) -> None:
        self.draws += 1
        drawn = mix("fold", self.luck, self.draws) % 1000
        self.value = (self.value * 31 + sum(action.encode()) + drawn + noise) % 1_000_003


class FakeServer(ReferenceService):
    """The service, its sessions, and how it misbehaves.

    before: called with (kind, request) before each call; may raise Refused.
    delay: called with the kind; seconds before the reply is sent (the work is done at once).
    lose: called with the kind; True: the reply is never sent.
    noise: added at every action: not 0 makes it another environment than it says.
    alter: called with each new transition; may change it. instructions: what it tells agents.
    answers_in_columns: steps that came as calls of their own are answered in a row all the same.
    """

    world = Fold

    def __init__(
        self, *, stream: bool = True, columns: bool = True, deterministic: bool = True, version: str = "1.2.0"
    ) -> None:
        super().__init__()
        self.capabilities = pb.ServerCapabilities(
            stream=stream, step_columns=columns, reset_columns=columns, acknowledgements=columns
        )
        self.deterministic = deterministic
        self.limits = pb.ServerLimits(
            default_lease_seconds=60, max_lease_seconds=600, max_group=ROOM, max_sessions=ROOM, max_step_actions=ROOM
        )
        self.spec = pb.EnvironmentSpec(
            id="walk-v1",
            version=version,
            title="A walk",
            options_schema_json=json.dumps(OPTIONS),
            action_space=pb.ActionSpace(names=["left", "right", "bad"]),
        )
        self.before: Callable[[str, Any], None] = lambda kind, request: None
        self.delay: Callable[[str], float] = lambda kind: 0.0
        self.lose: Callable[[str], bool] = lambda kind: False
        self.noise = 0
        self.alter: Callable[[pb.Transition], object] = lambda transition: None
        self.instructions = "Walk."
        self.draining = self.answers_in_columns = False
        self.state_keys = True
        self.token = ""
        self.endpoints: list[str] = []
        self.calls: Counter[str] = Counter()
        self.turns_played = 0
        self.address = ""
        self.credentials: grpc.ServerCredentials | None = None
        self._server: grpc.aio.Server | None = None

    @property
    def sessions(self) -> dict[str, Seat]:
        return self.seats

    # --- life ------------------------------------------------------------------------------------------------------

    async def start(self, port: int = 0) -> "FakeServer":
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_EnvironmentServiceServicer_to_server(self, self._server)
        if self.credentials is None:
            port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        else:
            port = self._server.add_secure_port(f"127.0.0.1:{port}", self.credentials)
        await self._server.start()
        self.address = f"127.0.0.1:{port}"
        return self

    async def stop(self) -> None:
        """Goes away at once: calls in flight are cut off. Sessions stay in memory."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def restart(self, *, forget: bool = True) -> None:
        """Another process on the same port (`forget`), or just a cut in the network."""
        await self.stop()
        if forget:
            self.instance_id, self.seats, self.keys = secrets.token_hex(8), {}, {}
        await self.start(int(self.address.rpartition(":")[2]))

    async def __aenter__(self) -> "FakeServer":
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # --- the wire --------------------------------------------------------------------------------------------------

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:  # noqa: N802 - gRPC's name
        if self.token and dict(context.invocation_metadata()).get("authorization") != f"Bearer {self.token}":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a bearer token is wanted")
        reply = await self.describe(request)
        reply.capabilities.CopyFrom(self.capabilities)
        reply.endpoints.extend(self.endpoints)
        reply.draining = self.draining
        able = pb.EnvironmentCapabilities(
            fork=True, snapshot=True, deterministic=self.deterministic, state_key=self.state_keys
        )
        reply.environments[0].capabilities.CopyFrom(able)
        return reply

    async def Stream(self, requests: AsyncIterator[pb.StreamRequest], context: Any) -> AsyncIterator[pb.StreamResponse]:  # noqa: N802
        if not self.capabilities.stream:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no Stream here")
        async for response in super().Stream(requests, context):
            yield response

    async def call(self, kind: str, request: Any) -> Any:
        self.calls[kind] += 1
        self.before(kind, request)
        if self.draining and kind in ("open", "restore"):
            raise Refused("DRAINING", "going away")
        return await super().call(kind, request)

    async def unary(self, kind: str, request: Any, context: Any) -> Any:
        reply = await super().unary(kind, request, context)
        await self._hold(kind)
        return reply

    async def reply(self, call: pb.Call) -> pb.Reply:
        reply = await super().reply(call)
        await self._hold(call.WhichOneof("request") or "")
        return reply

    async def _hold(self, kind: str) -> None:
        if seconds := 3600 if self.lose(kind) else self.delay(kind):
            await asyncio.sleep(seconds)

    def pack(self, reply: pb.Reply, columns: bool) -> pb.StreamResponse:
        return super().pack(reply, columns or (self.answers_in_columns and reply.HasField("step")))

    # --- the environment -------------------------------------------------------------------------------------------

    def read_options(self, struct: Any) -> dict[str, Any]:
        if unknown := set(struct) - set(OPTIONS["properties"]):
            raise Refused("BAD_ARGUMENT", f"unknown: {unknown}", "options")
        return dict(struct)

    def begin(self, options: dict[str, Any], seed: int, dynamics_seed: int) -> Fold:
        return Fold(int(options.get("length", 8)), seed % 1_000_003, dynamics_seed)

    def told(self) -> dict[str, str]:
        return {**super().told(), "instructions": self.instructions}

    def observe(self, seat: Seat, want: pb.Want) -> pb.Observation:
        key = self.state_key(seat) if want.state_key else b""
        return pb.Observation(parts=[pb.Part(text=f"at {seat.walk.value}")], state_key=key)

    def state_key(self, seat: Seat) -> bytes:
        return hashlib.blake2b(b"%d" % seat.walk.value, digest_size=16).digest()

    def play(self, seat: Seat, request: pb.StepRequest) -> pb.Transition:
        self.turns_played += 1
        noise = self.noise or (0 if self.deterministic else random.randrange(1000))
        for action in request.actions:
            seat.walk.step(action.text, noise)
        transition = pb.Transition(reward=seat.walk.value / 7)
        for action in request.actions:
            share = transition.reward / len(request.actions)
            transition.outcomes.add(executed=True, valid=action.text != "bad", effective=True, reward=share)
        seat.over = seat.index + 1 >= (seat.limits.max_turns or seat.walk.length)
        self.end(seat, transition)
        transition.observation.CopyFrom(self.observe(seat, seat.want))
        self.alter(transition)
        return transition

    async def render(self, request: pb.RenderRequest) -> pb.RenderResponse:
        if request.mode == "png":
            return pb.RenderResponse(mime="image/png", data=b"png")
        text = f"at {self.find(request.session_id).walk.value}"
        return pb.RenderResponse(mime="text/plain; charset=utf-8", data=text.encode())
