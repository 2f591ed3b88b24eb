"""Probes: each test's access to a server and an environment, with sessions that are closed after the test."""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import grpc
from google.protobuf import struct_pb2
from google.protobuf.message import Message

from starpod.check.actions import ActionChooser
from starpod.check.connection import CheckConnection
from starpod.check.expectations import NotShown, Unmet, expect, expect_played, expect_same, needs
from starpod.check.handle import Handle, Script, Turn
from starpod.check.refusal import Refusal, from_error
from starpod.v1 import environment_pb2 as pb

SEED, DYNAMICS_SEED = 20_011, 40_033
UNLIMITED = pb.LimitOverrides(max_turns=0, max_actions_per_turn=0, max_actions=0)
EMPTY_TURNS, ACTING_TURNS = 2, 5
MIDDLE = 3
"""Number of the script's turns that are played before a fork or a snapshot: two empty ones and one with an action."""
ATTEMPTS = 3
"""Maximum number of attempts to find a script whose turns do not end the episode early."""
PLAYS = 3
"""Number of times that the script must give the same result before the environment counts as deterministic."""
RECORDING = 20
"""Time limit for recording the script, as a multiple of the time limit of a call."""
SAME = "use only random streams that the seeds start; never time, addresses or hash order"

T = TypeVar("T")


class Target:
    """A server and one of its environments, which all tests of a run share.

    Attributes:
        options: environment options of every session.
        play_error: why no episode can be played; None if an episode can be played.
        difference: how the episode differed when it was played again; None if it did not.
    """

    def __init__(
        self,
        connection: CheckConnection,
        server: pb.DescribeResponse,
        spec: pb.EnvironmentSpec,
        also: str = "",
        seconds: float = 30.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.connection = connection
        self.server = server
        self.spec = spec
        self.also = also
        self.seconds = seconds
        self.options = dict(options or {})
        self.text_action = pb.Action(text="x")
        self.play_error: Unmet | None = None
        self.difference: Unmet | None = None
        self._script: Script | None = None
        self._shared: dict[str, Any] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def get_shared(self, name: str, make: Callable[[], Awaitable[T]]) -> T:
        """Return a value that several tests share. The first test that needs it makes it."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            if name not in self._shared:
                self._shared[name] = await make()
        value: T = self._shared[name]
        return value

    @property
    def want(self) -> pb.Want:
        """Default Want of sessions: all cheap fields that distinguish states."""
        can = self.spec.capabilities
        return pb.Want(valid_actions=can.valid_actions, state_key=can.state_key, score=can.score)

    @property
    def lease(self) -> float:
        """Lease of sessions in seconds, longer than a test may be busy with other sessions."""
        return 30.0 + self.seconds

    @property
    def repeats(self) -> bool:
        """Whether there is a script, because the episode gave the same result each time."""
        return self._script is not None

    def options_message(self, **more: Any) -> struct_pb2.Struct:
        """Return the options of every session, with `more` added."""
        options = struct_pb2.Struct()
        options.update({**self.options, **more})
        return options

    def beyond_max_group(self) -> int:
        """Return a group size one above the server's limit. Raise NotShown if groups have no limit."""
        needs(self.server.limits.max_group, "the server limits no group")
        return self.server.limits.max_group + 1

    def script(self) -> Script:
        """Return the script. Raise NotShown if the episode cannot be played or does not repeat."""
        if self.play_error is not None:
            raise NotShown("no episode can be played, as C-30 reports")
        if self.difference is not None:
            raise NotShown("the same episode comes out differently when it is played again, as C-79 reports")
        if self._script is None:
            raise NotShown("the environment does not declare itself deterministic")
        return self._script

    async def record(self) -> None:
        """Record the script before anything is tested. Raises grpc.aio.AioRpcError if the server is draining."""
        probe = Probe(self)
        try:
            async with asyncio.timeout(RECORDING * self.connection.seconds):
                turns = await self._choose_turns(probe)
                await probe.clean_up()
                if self.spec.capabilities.deterministic:
                    self._script = await self._play_script(probe, turns)
        except Unmet as error:
            self.play_error = error
        except grpc.aio.AioRpcError as error:
            refusal = from_error(error)
            if refusal.reason == "DRAINING":
                raise
            self.play_error = Unmet("an episode of some turns to be played", str(refusal))
        except TimeoutError:
            limit = f"{RECORDING * self.connection.seconds:g} s"
            self.play_error = Unmet(f"an episode of some turns to be played within {limit}", "no end of it")
        finally:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await probe.clean_up()

    async def begin(self, probe: Probe) -> Handle:
        """Open a session with the script's seeds, and find out whether the environment accepts text actions."""
        handle = await probe.seeded(want=probe.actions.want())
        if list(probe.actions.choices(handle.session.observation)) == [self.text_action]:
            refusal = await self.connection.refusal(handle.request([self.text_action]))
            if refusal and refusal.code == "INVALID_ARGUMENT":  # it does not take text
                self.text_action = pb.Action(json="{}")
            await probe.clean_up()
            handle = await probe.seeded(want=probe.actions.want())
        return handle

    async def _choose_turns(self, probe: Probe) -> list[Turn]:
        """Return the turns of the script: empty ones, then random actions that the observations offer.

        If an action ends the episode early, play again without that action.
        """
        rng = random.Random(SEED)
        handle = await self.begin(probe)
        ends: list[pb.Action] = []
        best_turns: list[Turn] = []
        for _ in range(ATTEMPTS):
            turns, has_ended = await self._play_once(probe, handle, rng, ends)
            best_turns = max(best_turns, turns, key=len)
            if not has_ended or turns[-1] == ():
                break
            ends += turns[-1]
            await probe.clean_up()
            handle = await probe.seeded(want=probe.actions.want())
        return best_turns

    async def _play_once(
        self, probe: Probe, handle: Handle, rng: random.Random, ends: Sequence[pb.Action]
    ) -> tuple[list[Turn], bool]:
        """Play random actions and return the turns, and whether they ended the episode. Avoid the actions in `ends`."""
        observation = handle.session.observation
        turns: list[Turn] = []
        for number in range(EMPTY_TURNS + ACTING_TURNS):
            turn: Turn = ()
            if number >= EMPTY_TURNS:
                choices = probe.actions.choices(observation)
                turn = (rng.choice([choice for choice in choices if choice not in ends] or choices),)
            transition = await handle.step(turn)
            observation = transition.observation
            turns.append(turn)
            if transition.end_reason:
                return turns, True
        last_action = next((action for action in ends if action in probe.actions.choices(observation)), None)
        return [*turns, (last_action,) if last_action is not None else ()], False

    async def _play_script(self, probe: Probe, turns: Sequence[Turn]) -> Script | None:
        """Play the turns PLAYS times and return the script. If results differ, return None and set `difference`."""
        script = None
        for _ in range(PLAYS):
            handle = await probe.seeded()
            transitions = await handle.play(turns)
            await probe.clean_up()
            if script is None:
                script = Script(handle.session, tuple(turns), tuple(transitions))
                continue
            try:
                expect_same(script.start.observation, handle.session.observation, "the same start again", SAME)
                expect_played(script.transitions, transitions, "the same episode again", SAME)
            except Unmet as error:
                self.difference = error
                return None
        return script


def new_key() -> str:
    """Return a key that no call has used yet."""
    return f"check-{uuid.uuid4().hex}"


class Probe:
    """One test's sessions and connections on the target."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.connection = target.connection
        self.server = target.server
        self.spec = target.spec
        self.actions = ActionChooser(target)
        self._sessions: set[str] = set()
        self._connections: list[CheckConnection] = []

    async def clean_up(self) -> None:
        """Close sessions and connections. The probe may be used again."""
        # In portions: a server may refuse more ids than its max_sessions, and some of these are closed already.
        ids, portion = sorted(self._sessions), self.server.limits.max_sessions or len(self._sessions) or 1
        with contextlib.suppress(grpc.aio.AioRpcError):
            for start in range(0, len(ids), portion):
                await self.target.connection.call(pb.CloseRequest(session_ids=ids[start : start + portion]))
        for connection in self._connections:
            await connection.close()
        self._sessions.clear()
        self._connections.clear()

    # --- connections -----------------------------------------------------------------------------------------------

    def second_connection(self, address: str = "", options: Sequence[tuple[str, int]] = ()) -> CheckConnection:
        """Open a new connection to `address`; empty: the same address. options: gRPC channel options."""
        connection = self.connection.new_connection(address, options)
        self._connections.append(connection)
        return connection

    async def other_process(self) -> CheckConnection:
        """Connect to another process that hosts the same environment version. Raise NotShown if there is none."""
        siblings = [self.connection.sibling(endpoint) for endpoint in self.server.endpoints]
        for address in filter(None, (self.target.also, *siblings)):
            connection = self.second_connection(address)
            server: pb.DescribeResponse = await connection.call(pb.DescribeRequest())
            hosts_environment = any((e.id, e.version) == (self.spec.id, self.spec.version) for e in server.environments)
            if hosts_environment and server.instance_id != self.server.instance_id:
                return connection
        raise NotShown("there is one server process; name another one with --also HOST:PORT")

    # --- sessions --------------------------------------------------------------------------------------------------

    def open_request(self, **fields: Any) -> pb.OpenRequest:
        """Return an Open of the environment under test, with the lease of `Target.lease` and without episode limits."""
        defaults: dict[str, Any] = {
            "options": self.target.options_message() if self.target.options else None,
            "environment_id": self.spec.id,
            "version": f"=={self.spec.version}",
            "limits": UNLIMITED,
            "want": self.target.want,
            "lease_seconds": self.target.lease,
        }
        return pb.OpenRequest(**{**defaults, **fields})

    async def create(self, request: Message, connection: CheckConnection | None = None) -> Any:
        """Call Open, Fork or Restore, and return the reply. Its sessions are closed after the test.

        Raises:
            NotShown: The server allows no group of that size, or too few sessions.
        """
        limits, count = self.server.limits, getattr(request, "count", 0)
        needs(not 0 < limits.max_group < count, f"the server's max_group is {limits.max_group}")
        has_room = not 0 < limits.max_sessions < len(self._sessions) + max(1, count)
        needs(has_room, f"the server's max_sessions is {limits.max_sessions}")
        reply = await (connection or self.connection).call(request)
        self.adopt(reply.sessions)
        return reply

    def adopt(self, sessions: Iterable[pb.Session]) -> None:
        """Register sessions to be closed after the test."""
        self._sessions.update(session.session_id for session in sessions)

    async def open(self, connection: CheckConnection | None = None, /, **fields: Any) -> pb.OpenResponse:
        reply: pb.OpenResponse = await self.create(self.open_request(**fields), connection)
        count, count_received = max(1, fields.get("count", 1)), len(reply.sessions)
        fix = "answer Open with one Session per member; count 0 means 1"
        expect(count_received == count, f"{count} sessions from Open", count_received, fix)
        return reply

    async def session(self, connection: CheckConnection | None = None, /, **fields: Any) -> Handle:
        reply = await self.open(connection, **fields)
        return Handle(connection or self.connection, reply.sessions[0])

    async def open_many(self, count: int, **fields: Any) -> list[Handle]:
        """Open this many sessions, in groups as large as the server allows."""
        limit = self.server.limits.max_group or count
        handles: list[Handle] = []
        while len(handles) < count:
            reply = await self.open(count=min(limit, count - len(handles)), **fields)
            handles += [Handle(self.connection, session) for session in reply.sessions]
        return handles

    async def seeded(self, connection: CheckConnection | None = None, /, **fields: Any) -> Handle:
        """Open a session with the script's seeds."""
        return await self.session(connection, **{"seed": SEED, "dynamics_seed": DYNAMICS_SEED, **fields})

    async def fork(self, handle: Handle, **fields: Any) -> list[Handle]:
        reply: pb.ForkResponse = await self.create(handle.fork_request(**fields))
        return [Handle(handle.connection, session) for session in reply.sessions]

    async def play_first_turns(self, turns: int | None = None, **fields: Any) -> tuple[Handle, Script]:
        """Open a session and play the script's first turns in it. None: up to its middle, so that one remains."""
        script = self.target.script()
        handle = await self.seeded(**fields)
        await handle.play(script.turns[: min(MIDDLE, len(script.turns) - 1) if turns is None else turns])
        return handle, script

    # --- expectations ----------------------------------------------------------------------------------------------

    async def expect_script(
        self, handle: Handle, what: str, fix: str = "", before: Callable[[Turn], Awaitable[object]] | None = None
    ) -> None:
        """Play the rest of the script. Raise Unmet unless the transitions equal those of the undisturbed episode.

        Args:
            handle: session in a state of the script; its next step index says which.
            what: name of the played episode in the error.
            before: awaited with each turn before the turn is played; it may disturb the session.
        """
        script, index = self.target.script(), handle.index
        transitions = []
        for turn in script.turns[index:]:
            if before is not None:
                await before(turn)
            transitions.append(await handle.step(turn))
            if transitions[-1].end_reason:
                break
        expect_played(script.transitions[index:], transitions, what, fix)

    async def expect_refusal(self, what: str, request: Message, *codes: str, fix: str = "") -> Refusal:
        """Make a call and return its error. Raise Unmet if it succeeds or fails with a code not in `codes`.

        Args:
            what: name of the call in the error, such as "a Step of a closed session".
            codes: names of the allowed status codes, such as "NOT_FOUND".
        """
        refusal = await self.connection.refusal(request)
        expected = " or ".join(codes)
        expect(refusal is not None, f"{what} to be refused with {expected}", "OK", fix)
        assert refusal is not None
        expect(refusal.code in codes, f"{what} to be refused with {expected}", refusal, fix)
        return refusal
