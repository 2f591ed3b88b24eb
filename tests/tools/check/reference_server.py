"""A whole server of the contract in plain Python, for one toy environment: what docs/protocol.md asks for and no more.

It shares no code with starpod.env_server, so that the check and the server cannot agree on a common mistake.
"""

import asyncio
import contextlib
import copy
import hashlib
import json
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import struct_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from starpod.v1 import environment_pb2 as pb
from starpod.v1 import environment_pb2_grpc as pb_grpc
from tests.tools.check.refused import Refused
from tests.tools.check.walk import NAMES, SCHEMA, SPEC, Walk, mix

LIMITS = pb.ServerLimits(
    max_sessions=80,
    max_message_bytes=1 << 20,
    max_snapshot_bytes=1 << 16,
    max_group=16,
    max_step_actions=64,
    default_lease_seconds=60,
    max_lease_seconds=600,
)


IN_A_ROW = {"observation", "parts", "state_key", "reward", "outcomes"}
IN_A_ROW |= {"end_reason", "terminated", "truncated", "success"}
"""The fields of a transition that columns can say."""


@dataclass
class Seat:
    """A session. `last` is the latest Step with its reply, `last_reset` the latest Reset with its."""

    id: str
    walk: Walk
    options: dict[str, Any]
    limits: pb.Limits
    want: pb.Want
    lease: float
    seed: int
    dynamics_seed: int
    member: int = 0
    epoch: int = 1
    index: int = 0
    actions: int = 0
    over: bool = False
    solved: bool = False
    last: tuple[pb.StepRequest, pb.StepResponse] | None = None
    last_reset: tuple[pb.ResetRequest, pb.ResetResponse] | None = None
    touched: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


async def put_back(
    first: pb.StreamRequest, requests: AsyncIterator[pb.StreamRequest]
) -> AsyncIterator[pb.StreamRequest]:
    """All messages of a stream of which the first one was read already."""
    yield first
    async for request in requests:
        yield request


class ReferenceService(pb_grpc.EnvironmentServiceServicer):
    """Every rule is a method of its own, so that tests can break one at a time."""

    spec = SPEC
    limits = LIMITS
    world: Callable[..., Any] = Walk
    health = reflection = True
    channel_options: Sequence[tuple[str, int]] = (("grpc.http2.min_ping_interval_without_data_ms", 5),)

    def __init__(self) -> None:
        self.instance_id = secrets.token_hex(8)
        self.seats: dict[str, Seat] = {}
        self.keys: dict[str, tuple[bytes, asyncio.Future[Any]]] = {}

    # --- the wire --------------------------------------------------------------------------------------------------

    async def call(self, kind: str, request: Any) -> Any:
        """The reply to a call, however it came."""
        return await getattr(self, kind)(request)

    async def unary(self, kind: str, request: Any, context: Any) -> Any:
        return await self._unary(context, self.call(kind, request))

    async def _unary(self, context: Any, work: Awaitable[Any]) -> Any:
        try:
            return await asyncio.shield(asyncio.ensure_future(work))  # finished even if the caller goes
        except Refused as error:
            self.explain(error)
            context.set_trailing_metadata((("grpc-status-details-bin", error.status.SerializeToString()),))
            await context.abort(error.code, error.status.message)

    def explain(self, error: Refused) -> None:
        """Changes nothing of what is sent about a refused call."""

    def incoming(self, requests: AsyncIterator[pb.StreamRequest]) -> AsyncIterator[pb.StreamRequest]:
        """The messages of a stream."""
        return requests

    async def Stream(self, requests: AsyncIterator[pb.StreamRequest], context: Any) -> AsyncIterator[pb.StreamResponse]:  # noqa: N802 - gRPC's name
        replies: asyncio.Queue[pb.StreamResponse | None] = asyncio.Queue()
        running: set[asyncio.Task[None]] = set()

        async def answer(call: pb.Call, columns: bool) -> None:
            replies.put_nowait(self.pack(await self.reply(call), columns))

        async def read() -> None:
            async for message in self.incoming(requests):
                calls = [(call, False) for call in message.calls]
                calls += [(call, True) for call in (*self.reset_rows(message.resets), *self.rows(message.steps))]
                for call, columns in calls:
                    task = asyncio.create_task(answer(call, columns))
                    running.add(task)
                    task.add_done_callback(running.discard)
                if message.acknowledge:
                    replies.put_nowait(pb.StreamResponse(acknowledged=1))
            while running:
                await asyncio.wait(running)
            replies.put_nowait(None)

        reader = asyncio.create_task(read())
        try:
            while (reply := await replies.get()) is not None:
                yield reply
        finally:
            reader.cancel()

    async def reply(self, call: pb.Call) -> pb.Reply:
        """The reply to one call on a stream."""
        kind = call.WhichOneof("request") or ""
        reply = pb.Reply(call_id=call.call_id)
        try:
            if not kind:
                raise Refused("BAD_ARGUMENT", "the call has no request", "request")
            work = asyncio.shield(asyncio.ensure_future(self.call(kind, getattr(call, kind))))
            limit = call.timeout_ms / 1000 if call.timeout_ms else None
            getattr(reply, kind).CopyFrom(await asyncio.wait_for(work, limit))
        except Refused as error:
            reply.error.CopyFrom(error.status)
        except TimeoutError:
            reply.error.CopyFrom(Refused("DEADLINE", "too late").status)
        return reply

    def rows(self, steps: pb.StepColumns) -> list[pb.Call]:
        """The calls that columns stand for; none and an error reply to each id where their lengths disagree."""
        counts = list(steps.action_counts) or [1] * len(steps.call_ids)
        lengths = {len(steps.call_ids), len(steps.session_ids), len(steps.epochs), len(steps.step_indices), len(counts)}
        if len(lengths) > 1 or sum(counts) != len(steps.actions):
            return [pb.Call(call_id=call_id) for call_id in steps.call_ids]
        texts = iter(steps.actions)
        calls = []
        for row, call_id in enumerate(steps.call_ids):
            step = pb.StepRequest(
                session_id=steps.session_ids[row], epoch=steps.epochs[row], step_index=steps.step_indices[row]
            )
            step.actions.extend(pb.Action(text=next(texts)) for _ in range(counts[row]))
            calls.append(pb.Call(call_id=call_id, step=step))
        return calls

    def reset_rows(self, resets: pb.ResetColumns) -> list[pb.Call]:
        """The calls that columns stand for, as `rows` has them."""
        count = len(resets.call_ids)
        columns = (resets.session_ids, resets.epochs, resets.seeds or [None] * count)
        if {count} != {*map(len, columns), len(resets.dynamics_seeds or resets.call_ids)}:
            return [pb.Call(call_id=call_id) for call_id in resets.call_ids]
        dynamics_seeds = resets.dynamics_seeds or [None] * count
        return [
            pb.Call(
                call_id=call_id,
                reset=pb.ResetRequest(session_id=session_id, epoch=epoch, seed=seed, dynamics_seed=dynamics_seed),
            )
            for call_id, session_id, epoch, seed, dynamics_seed in zip(
                resets.call_ids, *columns, dynamics_seeds, strict=True
            )
        ]

    def pack_start(self, call_id: int, response: pb.ResetResponse) -> pb.StreamResponse:
        """A row of columns for a new episode."""
        session = response.session
        row = pb.StartColumns(
            call_ids=[call_id],
            texts=[session.observation.parts[0].text],
            seeds=[session.seed],
            dynamics_seeds=[session.dynamics_seed],
            instructions=[response.instructions],
        )
        row.state_keys.extend([session.observation.state_key] if session.observation.state_key else [])
        return pb.StreamResponse(starts=row)

    def pack(self, reply: pb.Reply, columns: bool) -> pb.StreamResponse:
        """A row of columns for what fits into one, else a Reply."""
        first = reply.reset.session.observation
        is_text = [part.WhichOneof("kind") for part in first.parts] == ["text"]
        if columns and is_text and not {field.name for field, _ in first.ListFields()} - IN_A_ROW:
            return self.pack_start(reply.call_id, reply.reset)
        transition = reply.step.transition
        observation = transition.observation
        fields = {field.name for each in (transition, observation) for field, _ in each.ListFields()}
        if not columns or fields - IN_A_ROW or [part.WhichOneof("kind") for part in observation.parts] != ["text"]:
            return pb.StreamResponse(replies=[reply])
        row = pb.TransitionColumns(
            call_ids=[reply.call_id], texts=[observation.parts[0].text], rewards=[transition.reward]
        )
        row.state_keys.extend([observation.state_key] if observation.state_key else [])
        row.outcome_counts.append(len(transition.outcomes))
        row.outcome_flags.extend(o.executed + 2 * o.valid + 4 * o.effective for o in transition.outcomes)
        row.outcome_rewards.extend(o.reward for o in transition.outcomes)
        if transition.end_reason:
            success = 1 + transition.success if transition.HasField("success") else 0
            row.ended_rows.append(0)
            row.end_reasons.append(transition.end_reason)
            row.end_successes.append(success)
        return pb.StreamResponse(transitions=row)

    # --- the rules -------------------------------------------------------------------------------------------------

    async def describe(self, request: pb.DescribeRequest) -> pb.DescribeResponse:
        if request.environment_id not in ("", self.spec.id):
            raise Refused("UNKNOWN_ENVIRONMENT", "not hosted", nearest=self.spec.id)
        return pb.DescribeResponse(
            protocol_version="1.0",
            server_name="reference",
            server_version="1.0.0",
            instance_id=self.instance_id,
            capabilities=pb.ServerCapabilities(
                stream=True, step_columns=True, reset_columns=True, acknowledgements=True
            ),
            limits=self.limits,
            environments=[self.spec],
            live_sessions=len(self.seats),
        )

    async def once(self, request: Any, create: Callable[[], Awaitable[Any]]) -> Any:
        """Return the same reply for the same key."""
        if not request.key:
            return await create()
        if len(request.key.encode()) > 128:
            raise Refused("BAD_ARGUMENT", "at most 128 bytes", "key")
        print_ = type(request).__name__.encode() + request.SerializeToString(deterministic=True)
        if request.key not in self.keys:
            self.keys[request.key] = (print_, asyncio.ensure_future(create()))
        known, reply = self.keys[request.key]
        if known != print_:
            raise Refused("KEY_REUSED", "the key was used for another request", key=request.key)
        try:
            return await asyncio.shield(reply)
        except Refused:
            self.keys.pop(request.key, None)
            raise

    def read_options(self, struct: struct_pb2.Struct) -> dict[str, Any]:
        options: dict[str, Any] = {"length": 9, "slip": 0.3}
        for name, value in dict(struct).items():
            if name not in options:
                raise Refused("BAD_ARGUMENT", f"there are {list(options)}", f"options.{name}")
            rule: Any = SCHEMA["properties"][name]  # type: ignore[index]
            if not isinstance(value, float) or not rule["minimum"] <= value <= rule["maximum"]:
                raise Refused("BAD_ARGUMENT", f"must be as {rule}", f"options.{name}")
            if rule["type"] == "integer" and not value.is_integer():
                raise Refused("BAD_ARGUMENT", "must be a whole number", f"options.{name}")
            options[name] = int(value) if rule["type"] == "integer" else value
        return options

    def pick_version(self, text: str) -> None:
        def numbers(version: str) -> tuple[int, ...]:
            try:
                return tuple(int(number) for number in version.split("."))
            except ValueError:
                raise Refused("BAD_ARGUMENT", f"cannot be read: {version!r}", "version") from None

        mine = numbers(self.spec.version)
        for part in filter(None, text.split(",")):
            sign = next((sign for sign in ("==", "!=", ">=", "<=", ">", "<") if part.startswith(sign)), "")
            other = numbers(part.removeprefix(sign))
            fits = {"": mine == other, "==": mine == other, "!=": mine != other, ">=": mine >= other,
                    "<=": mine <= other, ">": mine > other, "<": mine < other}  # fmt: skip
            if not fits[sign]:
                raise Refused("UNKNOWN_VERSION", f"no version fits {text!r}", available=self.spec.version)

    def admit(self, count: int) -> int:
        now = time.monotonic()
        self.seats = {key: seat for key, seat in self.seats.items() if now - seat.touched <= seat.lease}
        if count > self.limits.max_group:
            raise Refused("BAD_ARGUMENT", f"at most {self.limits.max_group}", "count")
        if len(self.seats) + max(1, count) > self.limits.max_sessions:
            raise Refused("OVERLOADED", "too many sessions", limit="max_sessions")
        return max(1, count)

    def members(self, request: Any) -> range:
        members = range(request.first_member, request.first_member + self.admit(request.count))
        if members[-1] >= 2**32:
            raise Refused("BAD_ARGUMENT", "members have 32 bits", "first_member")
        return members

    def grant_lease(self, asked: float) -> float:
        if math.isnan(asked) or asked < 0:
            raise Refused("BAD_ARGUMENT", "must be positive", "lease_seconds")
        return min(asked or self.limits.default_lease_seconds, self.limits.max_lease_seconds)

    def find_environment(self, name: str) -> None:
        if name != self.spec.id:
            raise Refused("UNKNOWN_ENVIRONMENT", f"no {name!r}", nearest=self.spec.id)

    def begin(self, options: dict[str, Any], seed: int, dynamics_seed: int) -> Walk:
        return Walk(options["length"], options["slip"], mix("start", seed) % (options["length"] // 3), dynamics_seed)

    def derive(self, seed: int, member: int) -> int:
        return mix("member", seed, member)

    async def open(self, request: pb.OpenRequest) -> pb.OpenResponse:
        return await self.once(request, lambda: self.open_anew(request))

    async def open_anew(self, request: pb.OpenRequest) -> pb.OpenResponse:
        self.find_environment(request.environment_id)
        self.pick_version(request.version)
        options = self.read_options(request.options)
        limits = self.override(self.spec.limits, request.limits)
        lease = self.grant_lease(request.lease_seconds)
        seed = request.seed if request.HasField("seed") else secrets.randbits(64)
        seats = []
        for member in self.members(request):
            luck = request.dynamics_seed if request.HasField("dynamics_seed") else self.derive(seed, member)
            walk = self.begin(options, seed, luck)
            seats.append(Seat(self.new_id(), walk, options, limits, request.want, lease, seed, luck, member))
        return pb.OpenResponse(
            sessions=[self.seat(seat) for seat in seats], limits=limits, lease_seconds=lease, **self.told()
        )

    def told(self) -> dict[str, str]:
        return {
            "environment_version": self.spec.version,
            "instructions": "Walk to the right end.",
            "instance_id": self.instance_id,
        }

    def new_id(self) -> str:
        return secrets.token_urlsafe(16)

    def seat(self, seat: Seat) -> pb.Session:
        told = self.tell(seat)
        self.seats[seat.id] = seat
        return told

    def tell(self, seat: Seat) -> pb.Session:
        return pb.Session(
            session_id=seat.id,
            epoch=seat.epoch,
            step_index=seat.index,
            seed=seat.seed,
            dynamics_seed=seat.dynamics_seed,
            member=seat.member,
            observation=self.observe(seat, seat.want),
        )

    def override(self, limits: pb.Limits, overrides: pb.LimitOverrides) -> pb.Limits:
        result = pb.Limits()
        result.CopyFrom(limits)
        for name in ("max_turns", "max_actions_per_turn", "max_actions"):
            if overrides.HasField(name):  # type: ignore[arg-type]
                setattr(result, name, getattr(overrides, name))
        return result

    def find(self, session_id: str) -> Seat:
        seat = self.seats.get(session_id)
        if seat is None or time.monotonic() - seat.touched > seat.lease:
            self.seats.pop(session_id, None)
            raise Refused("UNKNOWN_SESSION", "unknown, closed or expired")
        self.touch(seat)
        return seat

    def touch(self, seat: Seat) -> None:
        seat.touched = time.monotonic()

    def observe(self, seat: Seat, want: pb.Want) -> pb.Observation:
        if want.image:
            raise Refused("UNSUPPORTED", "draws no png", capability="image")
        observation = pb.Observation(parts=[pb.Part(text=seat.walk.picture())])
        if want.valid_actions and not seat.over:
            observation.valid_actions.extend(pb.Action(text=name) for name in NAMES)
        if want.state_key:
            observation.state_key = self.state_key(seat)
        if want.expert_action and not seat.over:
            observation.expert_action.text = "right"
        if want.score:
            observation.score = self.score(seat)
        return observation

    def state_key(self, seat: Seat) -> bytes:
        return mix("key", seat.walk.length, seat.walk.position).to_bytes(8, "big")

    def score(self, seat: Seat) -> float:
        return seat.walk.position / (seat.walk.length - 1)

    def out_of_order(self, seat: Seat, reason: str = "OUT_OF_ORDER") -> Refused:
        return Refused(
            reason, "not the call that comes next", expected_epoch=seat.epoch, expected_step_index=seat.index
        )

    async def step(self, request: pb.StepRequest) -> pb.StepResponse:
        seat = self.find(request.session_id)
        self.check_actions(request.actions)
        async with seat.lock:
            if (known := self.cached(seat, request)) is not None:
                return known
            self.check_place(seat, request)
            if seat.over:
                raise self.out_of_order(seat, "EPISODE_OVER")
            transition = self.play(seat, request)
            seat.index += 1
            reply = pb.StepResponse(transition=transition, next_step_index=seat.index)
            seat.last = (request, reply)
            return reply

    def check_actions(self, actions: Sequence[pb.Action]) -> None:
        if len(actions) > self.limits.max_step_actions:
            raise Refused("BAD_ARGUMENT", f"at most {self.limits.max_step_actions}", "actions")
        for place, action in enumerate(actions):
            if action.WhichOneof("kind") is None:
                raise Refused("BAD_ARGUMENT", "no kind is set", f"actions[{place}]")

    def cached(self, seat: Seat, request: pb.StepRequest) -> pb.StepResponse | None:
        if seat.last is None or (request.epoch, request.step_index) != (seat.epoch, seat.index - 1):
            return None
        return seat.last[1] if list(request.actions) == list(seat.last[0].actions) else None

    def check_place(self, seat: Seat, request: Any) -> None:
        if (request.epoch, request.step_index) != (seat.epoch, seat.index):
            raise self.out_of_order(seat)

    def play(self, seat: Seat, request: pb.StepRequest) -> pb.Transition:
        want = request.want if request.HasField("want") else seat.want
        transition = pb.Transition()
        per_turn, total = seat.limits.max_actions_per_turn or math.inf, seat.limits.max_actions or math.inf
        executed = 0
        for action in request.actions:
            name = action.text.strip().lower()
            cut = seat.over or executed >= per_turn or seat.actions >= total
            if cut or name not in NAMES:
                transition.outcomes.add(valid=cut)
                continue
            reward, effective, seat.over = seat.walk.step(name)
            executed += 1
            seat.actions += 1
            transition.outcomes.add(executed=True, valid=True, effective=effective, reward=reward)
        transition.reward = sum(outcome.reward for outcome in transition.outcomes)
        self.end(seat, transition)
        transition.observation.CopyFrom(self.observe(seat, want))
        return transition

    def end(self, seat: Seat, transition: pb.Transition) -> None:
        if seat.over:
            transition.terminated = transition.success = seat.solved = True
            transition.end_reason = pb.END_REASON_TERMINAL
        elif 0 < seat.limits.max_actions <= seat.actions:
            transition.end_reason = pb.END_REASON_MAX_ACTIONS
        elif 0 < seat.limits.max_turns <= seat.index + 1:
            transition.end_reason = pb.END_REASON_MAX_TURNS
        if transition.end_reason > pb.END_REASON_TERMINAL:
            transition.truncated = seat.over = True
            transition.success = False

    async def reset(self, request: pb.ResetRequest) -> pb.ResetResponse:
        seat = self.find(request.session_id)
        async with seat.lock:
            if request.epoch != seat.epoch:
                if (
                    seat.last_reset
                    and seat.last_reset[0] == request
                    and (seat.epoch, seat.index) == (request.epoch + 1, 0)
                ):
                    return seat.last_reset[1]
                raise self.out_of_order(seat)
            options = self.read_options(request.options) if request.HasField("options") else seat.options
            seat.options = options
            seat.seed = request.seed if request.HasField("seed") else secrets.randbits(64)
            given = request.HasField("dynamics_seed")
            seat.dynamics_seed = request.dynamics_seed if given else self.derive(seat.seed, seat.member)
            seat.walk = self.begin(options, seat.seed, seat.dynamics_seed)
            if request.HasField("want"):
                seat.want = request.want
            seat.limits = self.override(seat.limits, request.limits)
            seat.epoch += 1
            seat.index = seat.actions = 0
            seat.over, seat.last = False, None
            instructions = self.told()["instructions"]
            reply = pb.ResetResponse(session=self.tell(seat), limits=seat.limits, instructions=instructions)
            seat.last_reset = (request, reply)
            return reply

    async def render(self, request: pb.RenderRequest) -> pb.RenderResponse:
        seat = self.find(request.session_id)
        if request.mode not in ("", *self.spec.render_modes):
            raise Refused("BAD_ARGUMENT", f"there are {list(self.spec.render_modes)}", "mode")
        picture = seat.walk.picture()
        if request.mode == "html":
            return pb.RenderResponse(mime="text/html; charset=utf-8", data=f"<pre>{picture}</pre>".encode())
        return pb.RenderResponse(mime="text/plain; charset=utf-8", data=picture.encode())

    async def fork(self, request: pb.ForkRequest) -> pb.ForkResponse:
        return await self.once(request, lambda: self.fork_anew(request))

    async def fork_anew(self, request: pb.ForkRequest) -> pb.ForkResponse:
        seat = self.find(request.session_id)
        async with seat.lock:
            self.check_place(seat, request)
            count = self.admit(request.count)
            seeds = list(request.dynamics_seeds)
            if seeds and len(seeds) != count:
                raise Refused("BAD_ARGUMENT", f"{len(seeds)} for {count} copies", "dynamics_seeds")
            reseeded = request.randomness == pb.FORK_RANDOMNESS_RESEED
            if seeds and not reseeded:
                raise Refused("BAD_ARGUMENT", "only with RESEED", "dynamics_seeds")
            twins = [self.twin(seat, seat.walk, member) for member in self.members(request)]
            if reseeded:
                for number, twin in enumerate(twins):
                    self.reseed(
                        twin, seeds[number] if seeds else mix("fork", seat.dynamics_seed, seat.index, twin.member)
                    )
            return pb.ForkResponse(sessions=[self.seat(twin) for twin in twins])

    def twin(self, seat: Seat, walk: Walk, member: int) -> Seat:
        return Seat(
            self.new_id(), copy.copy(walk), seat.options, seat.limits, seat.want, seat.lease, seat.seed,
            seat.dynamics_seed, member, 1, seat.index, seat.actions, seat.over,
        )  # fmt: skip

    def reseed(self, twin: Seat, dynamics_seed: int) -> None:
        twin.dynamics_seed = twin.walk.luck = dynamics_seed
        twin.walk.draws = 0

    async def snapshot(self, request: pb.SnapshotRequest) -> pb.SnapshotResponse:
        seat = self.find(request.session_id)
        async with seat.lock:
            limits = [seat.limits.max_turns, seat.limits.max_actions_per_turn, seat.limits.max_actions]
            own = [seat.seed, seat.dynamics_seed, seat.index, seat.actions, seat.over]
            state = json.dumps([vars(seat.walk), seat.options, limits, own]).encode()
            snapshot = pb.SessionSnapshot(
                environment_id=self.spec.id, environment_version=self.spec.version, state=state
            )
            snapshot.digest = self.digest(snapshot)
            return pb.SnapshotResponse(snapshot=snapshot, epoch=seat.epoch, step_index=seat.index)

    def digest(self, snapshot: pb.SessionSnapshot) -> bytes:
        named = f"{snapshot.environment_id}\0{snapshot.environment_version}\0".encode()
        return hashlib.sha256(named + snapshot.state).digest()

    async def restore(self, request: pb.RestoreRequest) -> pb.RestoreResponse:
        return await self.once(request, lambda: self.restore_anew(request))

    async def restore_anew(self, request: pb.RestoreRequest) -> pb.RestoreResponse:
        snapshot = request.snapshot
        self.check_digest(snapshot)
        self.find_environment(snapshot.environment_id)
        if snapshot.environment_version != self.spec.version:
            version, mine = snapshot.environment_version, self.spec.version
            raise Refused("INCOMPATIBLE_SNAPSHOT", f"no {version}", snapshot_version=version, available=mine)
        try:
            walk, options, limits, (seed, luck, index, actions, over) = json.loads(snapshot.state)
            names = ("max_turns", "max_actions_per_turn", "max_actions")
            kept = pb.Limits(**dict(zip(names, limits, strict=True)))
            lease = self.grant_lease(request.lease_seconds)
            source = Seat(
                "", self.world(**walk), options, kept, request.want, lease, seed, luck, 0, 1, index, actions, over
            )
        except (ValueError, TypeError) as error:
            raise Refused("BAD_ARGUMENT", f"no state: {error}", "snapshot.state") from error
        twins = [self.twin(source, source.walk, member) for member in self.members(request)]
        return pb.RestoreResponse(
            sessions=[self.seat(twin) for twin in twins],
            limits=source.limits,
            lease_seconds=source.lease,
            **self.told(),
        )

    def check_digest(self, snapshot: pb.SessionSnapshot) -> None:
        if snapshot.digest != self.digest(snapshot):
            raise Refused("BAD_ARGUMENT", "does not fit", "snapshot.digest")

    async def renew(self, request: pb.RenewRequest) -> pb.RenewResponse:
        missing = []
        for session_id in request.session_ids:
            try:
                self.find(session_id)
            except Refused:
                missing.append(session_id)
        return pb.RenewResponse(missing=missing)

    async def close(self, request: pb.CloseRequest) -> pb.CloseResponse:
        for session_id in request.session_ids:
            self.seats.pop(session_id, None)
        return pb.CloseResponse()


def _unary(name: str) -> Any:
    async def call(self: ReferenceService, request: Any, context: Any) -> Any:
        return await self.unary(name.lower(), request, context)

    return call


for _name in ("Describe", "Open", "Reset", "Step", "Render", "Fork", "Snapshot", "Restore", "Renew", "Close"):
    setattr(ReferenceService, _name, _unary(_name))


@contextlib.asynccontextmanager
async def serve(service: ReferenceService) -> AsyncIterator[str]:
    """Serves it on a free port of the loopback; gives the address."""
    options = [("grpc.max_receive_message_length", service.limits.max_message_bytes), *service.channel_options]
    server = grpc.aio.server(options=options)
    pb_grpc.add_EnvironmentServiceServicer_to_server(service, server)
    if service.health:
        checks = health.aio.HealthServicer()
        for name in ("", service.spec.id):
            await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    if service.reflection:
        reflection.enable_server_reflection(["starpod.v1.EnvironmentService"], server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
