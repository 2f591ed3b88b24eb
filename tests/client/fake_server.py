"""A small server in this process that keeps the contract, and can be told to misbehave on the way.

Its environment, `walk-v1`, folds every action and a random stream into one number: any turn that is lost, doubled or
swapped shows in every later observation.
"""

import asyncio
import contextlib
import hashlib
import json
import random
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from starpod.v1 import environment_pb2 as pb
from starpod.v1 import environment_pb2_grpc as pb_grpc
from tests.tools.check.refused import Refused

every_way = pytest.mark.parametrize("fake", ["columns", "messages", "unary"], indirect=True)
"""The three ways in which turns travel."""
OPTIONS = {
    "type": "object",
    "properties": {"length": {"type": "integer", "default": 8}, "title": {"type": "string", "default": "walk"}},
    "additionalProperties": False,
}


def overloaded(retry: float = 0.01) -> Refused:
    return Refused("OVERLOADED", "too many calls", retry=retry, limit="calls")


def session_lost() -> Refused:
    return Refused("SESSION_LOST", "the process crashed", cause="crash")


@dataclass
class Walk:
    """One session."""

    seed: int
    dynamics_seed: int
    member: int
    options: dict[str, Any]
    want_key: bool
    limits: pb.Limits
    epoch: int = 1
    step_index: int = 0
    value: int = 0
    luck: random.Random = field(default_factory=random.Random)
    over: bool = False
    last: tuple[list[str], pb.StepResponse] | None = None

    def begin(self) -> None:
        self.luck = random.Random(self.dynamics_seed)
        self.value, self.step_index, self.over, self.last = self.seed % 1_000_003, 0, False, None

    @property
    def length(self) -> int:
        return self.limits.max_turns or int(self.options.get("length", 8))

    def key(self) -> bytes:
        return hashlib.blake2b(b"%d" % self.value, digest_size=16).digest() if self.want_key else b""

    def observation(self) -> pb.Observation:
        return pb.Observation(parts=[pb.Part(text=f"at {self.value}")], state_key=self.key())

    def turn(self, actions: list[str], noise: int) -> pb.StepResponse:
        for action in actions:
            self.value = (self.value * 31 + sum(action.encode()) + self.luck.randrange(1000) + noise) % 1_000_003
        self.step_index += 1
        self.over = self.step_index >= self.length
        reward = self.value / 7
        transition = pb.Transition(observation=self.observation(), reward=reward)
        for action in actions:
            transition.outcomes.add(executed=True, valid=action != "bad", effective=True, reward=reward / len(actions))
        if self.over:
            transition.terminated, transition.end_reason, transition.success = True, pb.END_REASON_TERMINAL, True
        return pb.StepResponse(transition=transition, next_step_index=self.step_index)

    def save(self) -> bytes:
        state = [
            self.seed,
            self.dynamics_seed,
            self.options,
            self.step_index,
            self.value,
            self.luck.getstate(),
            self.over,
        ]
        return json.dumps(state).encode()

    @classmethod
    def load(cls, data: bytes, limits: pb.Limits, want_key: bool) -> "Walk":
        seed, dynamics_seed, options, step_index, value, luck, over = json.loads(data)
        walk = cls(seed, dynamics_seed, 0, options, want_key, limits)
        walk.step_index, walk.value, walk.over = step_index, value, over
        walk.luck.setstate((luck[0], tuple(luck[1]), luck[2]))
        return walk


class FakeServer(pb_grpc.EnvironmentServiceServicer):
    """The service, its sessions, and how it misbehaves.

    before: called with (kind, request) before each call; may raise Refused.
    delay: called with the kind; seconds before the reply is sent (the work is done at once).
    lose: called with the kind; True: the reply is never sent.
    noise: added at every action: not 0 makes it another environment than it says.
    alter: called with each new transition; may change it. instructions: what it tells agents.
    """

    def __init__(
        self, *, stream: bool = True, columns: bool = True, deterministic: bool = True, version: str = "1.2.0"
    ) -> None:
        self.capabilities = pb.ServerCapabilities(stream=stream, step_columns=columns)
        self.deterministic = deterministic
        self.version = version
        self.limits = pb.ServerLimits(default_lease_seconds=60.0)
        self.before: Callable[[str, Any], None] = lambda kind, request: None
        self.delay: Callable[[str], float] = lambda kind: 0.0
        self.lose: Callable[[str], bool] = lambda kind: False
        self.noise = 0
        self.alter: Callable[[pb.Transition], object] = lambda transition: None
        self.instructions = "Walk."
        self.draining = False
        self.state_keys = True
        self.token = ""
        self.endpoints: list[str] = []
        self.calls: dict[str, int] = {}
        self.turns_played = 0
        self.streams: set[Any] = set()
        # Steps that came as calls of their own are answered in a row all the same.
        self.answers_in_columns = False
        self.address = ""
        self.credentials: grpc.ServerCredentials | None = None
        self._server: grpc.aio.Server | None = None
        self._forget()

    def _forget(self) -> None:
        self.instance_id = uuid.uuid4().hex
        self.sessions: dict[str, Walk] = {}
        self.keys: dict[str, tuple[bytes, Any]] = {}

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
        """Goes away at once: calls in flight are cut off. Sessions stay in memory until `forget`."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def restart(self, *, forget: bool = True) -> None:
        """Another process on the same port (`forget`), or just a cut in the network."""
        await self.stop()
        if forget:
            self._forget()
        await self.start(int(self.address.rpartition(":")[2]))

    async def __aenter__(self) -> "FakeServer":
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # --- the service -----------------------------------------------------------------------------------------------

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:  # noqa: N802 - gRPC's name
        if self.token and dict(context.invocation_metadata()).get("authorization") != f"Bearer {self.token}":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a bearer token is wanted")
        return pb.DescribeResponse(
            protocol_version="1.0",
            server_name="fake",
            instance_id=self.instance_id,
            capabilities=self.capabilities,
            limits=self.limits,
            endpoints=self.endpoints,
            live_sessions=len(self.sessions),
            draining=self.draining,
            environments=[
                pb.EnvironmentSpec(
                    id="walk-v1",
                    version=self.version,
                    title="A walk",
                    options_schema_json=json.dumps(OPTIONS),
                    action_space=pb.ActionSpace(names=["left", "right", "bad"]),
                    capabilities=pb.EnvironmentCapabilities(
                        fork=True, snapshot=True, deterministic=self.deterministic, state_key=self.state_keys
                    ),
                )
            ],
        )

    def handle(self, kind: str, request: Any) -> Any:
        self.calls[kind] = self.calls.get(kind, 0) + 1
        self.before(kind, request)
        key = getattr(request, "key", "")
        if key:
            if key in self.keys:
                digest, response = self.keys[key]
                if digest != request.SerializeToString(deterministic=True):
                    raise Refused("KEY_REUSED", "key reused")
                return response
            response = getattr(self, f"_{kind}")(request)
            self.keys[key] = (request.SerializeToString(deterministic=True), response)
            return response
        return getattr(self, f"_{kind}")(request)

    def _message(self, session_id: str, walk: Walk) -> pb.Session:
        return pb.Session(
            session_id=session_id,
            epoch=walk.epoch,
            step_index=walk.step_index,
            seed=walk.seed,
            dynamics_seed=walk.dynamics_seed,
            member=walk.member,
            observation=walk.observation(),
        )

    def _add(self, walk: Walk) -> pb.Session:
        session_id = uuid.uuid4().hex
        self.sessions[session_id] = walk
        return self._message(session_id, walk)

    def _find(self, session_id: str) -> Walk:
        if session_id not in self.sessions:
            raise Refused("UNKNOWN_SESSION", f"no session {session_id}")
        return self.sessions[session_id]

    def _admit(self) -> None:
        if self.draining:
            raise Refused("DRAINING", "going away")

    def _options(self, options: Any) -> dict[str, Any]:
        given = dict(options)
        if given.keys() - OPTIONS["properties"].keys():  # type: ignore[attr-defined]
            raise Refused("BAD_ARGUMENT", "unknown", "options")
        return given

    def _open(self, request: pb.OpenRequest) -> pb.OpenResponse:
        self._admit()
        options = self._options(request.options)
        seed = request.seed if request.HasField("seed") else random.getrandbits(64)
        limits = pb.Limits(max_turns=request.limits.max_turns)
        response = pb.OpenResponse(
            environment_version=self.version, instructions=self.instructions, limits=limits, lease_seconds=60.0
        )
        for member in range(request.first_member, request.first_member + (request.count or 1)):
            luck = request.dynamics_seed if request.HasField("dynamics_seed") else derive(seed, member)
            walk = Walk(seed, luck, member, options, request.want.state_key, limits)
            walk.begin()
            response.sessions.append(self._add(walk))
        return response

    def _reset(self, request: pb.ResetRequest) -> pb.ResetResponse:
        walk = self._find(request.session_id)
        if request.epoch == walk.epoch:
            if request.HasField("options"):
                walk.options = self._options(request.options)
            if request.HasField("want"):
                walk.want_key = request.want.state_key
            if request.limits.HasField("max_turns"):
                walk.limits = pb.Limits(max_turns=request.limits.max_turns)
            walk.seed = request.seed if request.HasField("seed") else random.getrandbits(64)
            given = request.HasField("dynamics_seed")
            walk.dynamics_seed = request.dynamics_seed if given else derive(walk.seed, walk.member)
            walk.epoch += 1
            walk.begin()
        elif request.epoch != walk.epoch - 1 or walk.step_index:
            raise self._out_of_order(walk)
        return pb.ResetResponse(
            session=self._message(request.session_id, walk), instructions=self.instructions, limits=walk.limits
        )

    def _out_of_order(self, walk: Walk) -> Refused:
        return Refused("OUT_OF_ORDER", "out of order", expected_epoch=walk.epoch, expected_step_index=walk.step_index)

    def _step(self, request: pb.StepRequest) -> pb.StepResponse:
        return self.turn(
            request.session_id, request.epoch, request.step_index, [action.text for action in request.actions]
        )

    def turn(self, session_id: str, epoch: int, step_index: int, actions: list[str]) -> pb.StepResponse:
        walk = self._find(session_id)
        if epoch == walk.epoch and step_index == walk.step_index - 1 and walk.last and walk.last[0] == actions:
            return walk.last[1]
        if epoch != walk.epoch or step_index != walk.step_index:
            raise self._out_of_order(walk)
        if walk.over:
            raise Refused("EPISODE_OVER", "the episode is over")
        self.turns_played += 1
        response = walk.turn(actions, self.noise or (0 if self.deterministic else random.randrange(1000)))
        self.alter(response.transition)
        walk.last = (actions, response)
        return response

    def _render(self, request: pb.RenderRequest) -> pb.RenderResponse:
        walk = self._find(request.session_id)
        if request.mode == "png":
            return pb.RenderResponse(mime="image/png", data=b"png")
        return pb.RenderResponse(mime="text/plain; charset=utf-8", data=f"at {walk.value}".encode())

    def _fork(self, request: pb.ForkRequest) -> pb.ForkResponse:
        walk = self._find(request.session_id)
        if (request.epoch, request.step_index) != (walk.epoch, walk.step_index):
            raise self._out_of_order(walk)
        response = pb.ForkResponse()
        for number in range(request.count or 1):
            copy = Walk.load(walk.save(), walk.limits, walk.want_key)
            if request.randomness == pb.FORK_RANDOMNESS_RESEED:
                given = request.dynamics_seeds
                copy.dynamics_seed = given[number] if given else derive(walk.dynamics_seed, walk.step_index, number)
                copy.luck = random.Random(copy.dynamics_seed)
            response.sessions.append(self._add(copy))
        return response

    def _snapshot(self, request: pb.SnapshotRequest) -> pb.SnapshotResponse:
        walk = self._find(request.session_id)
        state = walk.save()
        digest = hashlib.sha256(f"walk-v1\0{self.version}\0".encode() + state).digest()
        return pb.SnapshotResponse(
            snapshot=pb.SessionSnapshot(
                environment_id="walk-v1", environment_version=self.version, state=state, digest=digest
            ),
            epoch=walk.epoch,
            step_index=walk.step_index,
        )

    def _restore(self, request: pb.RestoreRequest) -> pb.RestoreResponse:
        self._admit()
        walk = Walk.load(request.snapshot.state, pb.Limits(), request.want.state_key)
        return pb.RestoreResponse(
            sessions=[self._add(walk)],
            environment_version=self.version,
            instructions=self.instructions,
            lease_seconds=60.0,
        )

    def _renew(self, request: pb.RenewRequest) -> pb.RenewResponse:
        return pb.RenewResponse(missing=[key for key in request.session_ids if key not in self.sessions])

    def _close(self, request: pb.CloseRequest) -> pb.CloseResponse:
        for session_id in request.session_ids:
            self.sessions.pop(session_id, None)
        return pb.CloseResponse()

    # --- the stream ------------------------------------------------------------------------------------------------

    async def Stream(self, requests: AsyncIterator[pb.StreamRequest], context: Any) -> AsyncIterator[pb.StreamResponse]:  # noqa: N802
        if not self.capabilities.stream:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no Stream here")
        replies: asyncio.Queue[pb.StreamResponse | None] = asyncio.Queue()
        tasks: set[asyncio.Task[None]] = set()

        def send_later(seconds: float, response: pb.StreamResponse) -> None:
            async def send() -> None:
                await asyncio.sleep(seconds)
                replies.put_nowait(response)

            task = asyncio.get_running_loop().create_task(send())
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        async def work() -> None:
            async for request in requests:
                for response, seconds in self._replies(request):
                    if seconds:
                        send_later(seconds, response)
                    else:
                        replies.put_nowait(response)
            if tasks:
                await asyncio.wait(tasks)
            replies.put_nowait(None)

        worker = asyncio.get_running_loop().create_task(work())
        self.streams.add(context)
        try:
            while (response := await replies.get()) is not None:
                yield response
        finally:
            self.streams.discard(context)
            worker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await worker

    def _replies(self, request: pb.StreamRequest) -> list[tuple[pb.StreamResponse, float]]:
        out: list[tuple[pb.StreamResponse, float]] = []
        batch = pb.StreamResponse()
        columns = batch.transitions
        steps = request.steps
        starts, counts = 0, list(steps.action_counts) or [1] * len(steps.call_ids)
        texts = list(steps.actions)
        for call_id, session_id, epoch, index, count in zip(
            steps.call_ids, steps.session_ids, steps.epochs, steps.step_indices, counts, strict=True
        ):
            actions = texts[starts : starts + count]
            starts += count
            self.calls["step"] = self.calls.get("step", 0) + 1
            try:
                self.before("step", None)
                transition = self.turn(session_id, epoch, index, actions).transition
            except Refused as refusal:
                batch.replies.add(call_id=call_id, error=refusal.status)
                continue
            if self.lose("step"):
                continue
            seconds = self.delay("step")
            target = columns
            if seconds:
                late = pb.StreamResponse()
                target = late.transitions
                out.append((late, seconds))
            _add_row(target, call_id, transition)
        for call in request.calls:
            kind = call.WhichOneof("request") or ""
            reply = pb.Reply(call_id=call.call_id)
            try:
                getattr(reply, kind).CopyFrom(self.handle(kind, getattr(call, kind)))
            except Refused as refusal:
                reply.error.CopyFrom(refusal.status)
            if self.lose(kind):
                continue
            seconds = self.delay(kind)
            if seconds:
                out.append((pb.StreamResponse(replies=[reply]), seconds))
            elif self.answers_in_columns and reply.WhichOneof("response") == "step":
                _add_row(columns, call.call_id, reply.step.transition)
            else:
                batch.replies.append(reply)
        if not columns.call_ids:
            batch.ClearField("transitions")
        out.append((batch, 0.0))
        return out


def _add_row(columns: pb.TransitionColumns, call_id: int, transition: pb.Transition) -> None:
    row = len(columns.call_ids)
    columns.call_ids.append(call_id)
    columns.texts.append(transition.observation.parts[0].text)
    columns.rewards.append(transition.reward)
    columns.state_keys.append(transition.observation.state_key)
    columns.outcome_counts.append(len(transition.outcomes))
    for outcome in transition.outcomes:
        columns.outcome_flags.append(outcome.executed + 2 * outcome.valid + 4 * outcome.effective)
        columns.outcome_rewards.append(outcome.reward)
    if transition.end_reason:
        columns.ended_rows.append(row)
        columns.end_reasons.append(transition.end_reason)
        columns.end_successes.append(2 if transition.success else 1)


def derive(*numbers: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "little")


def _unary(kind: str) -> Any:
    async def method(self: FakeServer, request: Any, context: Any) -> Any:
        try:
            response = self.handle(kind, request)
        except Refused as refusal:
            context.set_trailing_metadata((("grpc-status-details-bin", refusal.status.SerializeToString()),))
            await context.abort(refusal.code, str(refusal))
        await asyncio.sleep(3600 if self.lose(kind) else self.delay(kind))
        return response

    return method


for _name in ("Open", "Reset", "Step", "Render", "Fork", "Snapshot", "Restore", "Renew", "Close"):
    setattr(FakeServer, _name, _unary(_name.lower()))
