"""What a requirement's test works with: the server, one environment, and sessions that clean up after themselves."""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message
from google.protobuf.text_format import MessageToString

from starpod.client.check.link import Link
from starpod.client.check.refusal import Refusal, from_error
from starpod.client.check.requirement import NotShown, Unmet, expect
from starpod.v1 import environment_pb2 as pb

SEED, DYNAMICS_SEED = 20_011, 40_033
UNLIMITED = pb.LimitOverrides(max_turns=0, max_actions_per_turn=0, max_actions=0)
EMPTY_TURNS, ACTING_TURNS = 2, 5

Turn = tuple[pb.Action, ...]


@dataclass(frozen=True, slots=True)
class Script:
    """An episode that nobody disturbed: what was done and what came of it.

    It begins with turns without an action, so that even where one action ends the episode there are several turns.
    """

    start: pb.Session
    turns: tuple[Turn, ...]
    transitions: tuple[pb.Transition, ...]


class Handle:
    """A session and its place in the episode."""

    def __init__(self, link: Link, session: pb.Session) -> None:
        self.link = link
        self.session = session
        self.id = session.session_id
        self.epoch = session.epoch
        self.index = session.step_index

    def request(self, actions: Iterable[pb.Action] = (), *, ahead: int = 0, epoch: int | None = None) -> pb.StepRequest:
        """The Step that comes next, or `ahead` places after it."""
        return pb.StepRequest(
            session_id=self.id,
            epoch=self.epoch if epoch is None else epoch,
            step_index=max(0, self.index + ahead),
            actions=actions,
        )

    async def step(self, actions: Iterable[pb.Action] = (), want: pb.Want | None = None) -> pb.Transition:
        request = self.request(actions)
        if want is not None:
            request.want.CopyFrom(want)
        reply: pb.StepResponse = await self.link.call("Step", request)
        self.index += 1
        return reply.transition

    async def play(self, turns: Iterable[Turn]) -> list[pb.Transition]:
        """Plays the turns until the episode ends."""
        transitions: list[pb.Transition] = []
        for turn in turns:
            transitions.append(await self.step(turn))
            if transitions[-1].end_reason:
                break
        return transitions

    def on(self, link: Link) -> Handle:
        """The same session over another connection, at the same place."""
        other = Handle(link, self.session)
        other.epoch, other.index = self.epoch, self.index
        return other


class Target:
    """A server and one environment of it, shared by all tests of a run."""

    def __init__(
        self, link: Link, server: pb.DescribeResponse, spec: pb.EnvironmentSpec, also: str = "", seconds: float = 30.0
    ) -> None:
        self.link = link
        self.server = server
        self.spec = spec
        self.also = also
        self.seconds = seconds
        self._script: Script | str | None = None
        self._lock = asyncio.Lock()

    @property
    def want(self) -> pb.Want:
        """What the sessions of tests want unless a test says otherwise: all that tells states apart cheaply."""
        can = self.spec.capabilities
        return pb.Want(valid_actions=can.valid_actions, state_key=can.state_key, score=can.score)

    async def script(self, probe: Probe) -> Script:
        """The undisturbed episode, recorded once. Raises NotShown where it cannot be recorded or does not repeat."""
        async with self._lock:
            if self._script is None:
                try:
                    self._script = await self._record(probe)
                except (grpc.aio.AioRpcError, Unmet) as error:
                    reason = str(from_error(error)) if isinstance(error, grpc.aio.AioRpcError) else str(error)
                    self._script = f"no episode can be played, which other requirements tell ({reason})"
        if isinstance(self._script, str):
            raise NotShown(self._script)
        return self._script

    async def _record(self, probe: Probe) -> Script | str:
        if not self.spec.capabilities.deterministic:
            return "the environment does not declare itself deterministic"
        choose = random.Random(SEED)
        handle = await probe.seeded(want=probe.acting_want())
        observation = handle.session.observation
        turns: list[Turn] = []
        ended = False
        for number in range(EMPTY_TURNS + ACTING_TURNS):
            turn: Turn = () if number < EMPTY_TURNS else (choose.choice(probe.choices(observation)),)
            transition = await handle.step(turn)
            observation = transition.observation
            turns.append(turn)
            if ended := bool(transition.end_reason):
                break
        if not ended:
            turns.append(())
        first, second = await probe.seeded(), await probe.seeded()
        transitions = await first.play(turns)
        if await second.play(turns) != transitions or first.session.observation != second.session.observation:
            return "the same episode comes out differently when it is played again, which other requirements tell"
        return Script(first.session, tuple(turns), tuple(transitions))


class Probe:
    """One test's own sessions and connections on the target."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.link = target.link
        self.server = target.server
        self.spec = target.spec
        self._sessions: list[str] = []
        self._links: list[Link] = []

    async def clean_up(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            if self._sessions:
                await self.target.link.call("Close", pb.CloseRequest(session_ids=self._sessions))
        for link in self._links:
            await link.close()

    # --- connections -----------------------------------------------------------------------------------------------

    def second_link(self, address: str = "") -> Link:
        """Another connection, to the same server or another address."""
        link = self.link.twin(address)
        self._links.append(link)
        return link

    async def other_process(self) -> Link:
        """A connection to another process that hosts the same environment version. Raises NotShown without one."""
        host = self.link.address.rpartition(":")[0]
        addresses = [self.target.also] if self.target.also else []
        for endpoint in self.server.endpoints:
            sibling, _, port = endpoint.rpartition(":")
            addresses.append(f"{host if sibling in ('', '0.0.0.0', '[::]') else sibling}:{port}")
        for address in addresses:
            link = self.second_link(address)
            server: pb.DescribeResponse = await link.call("Describe", pb.DescribeRequest())
            same = any((e.id, e.version) == (self.spec.id, self.spec.version) for e in server.environments)
            if same and server.instance_id != self.server.instance_id:
                return link
        raise NotShown("there is one server process; name another one with --also HOST:PORT")

    # --- sessions --------------------------------------------------------------------------------------------------

    def open_request(self, **fields: Any) -> pb.OpenRequest:
        """An Open of the environment under test, without limits of its own and with a short life."""
        defaults: dict[str, Any] = {
            "environment_id": self.spec.id,
            "version": f"=={self.spec.version}",
            "limits": UNLIMITED,
            "want": self.target.want,
            "lease_seconds": 60.0,
        }
        return pb.OpenRequest(**{**defaults, **fields})

    async def create(self, method: str, request: Message, link: Link | None = None) -> Any:
        """The reply of Open, Fork or Restore; its sessions are closed after the test. Waits while overloaded.

        Raises NotShown if the server allows no group of that size.
        """
        if 0 < self.server.limits.max_group < getattr(request, "count", 0):
            raise NotShown(f"the server's max_group is {self.server.limits.max_group}")
        for _ in range(100):
            try:
                reply = await (link or self.link).call(method, request)
            except grpc.aio.AioRpcError as error:
                refusal = from_error(error)
                if refusal.retry_seconds is None:
                    raise
                await asyncio.sleep(min(0.2, refusal.retry_seconds))
                continue
            self.adopt(reply.sessions)
            return reply
        raise Unmet("a session after waiting as RetryInfo says", "RESOURCE_EXHAUSTED a hundred times")

    def adopt(self, sessions: Iterable[pb.Session]) -> None:
        """Has the sessions closed after the test."""
        self._sessions += [session.session_id for session in sessions]

    async def open(self, link: Link | None = None, /, **fields: Any) -> pb.OpenResponse:
        reply: pb.OpenResponse = await self.create("Open", self.open_request(**fields), link)
        expect(
            len(reply.sessions) == max(1, fields.get("count", 1)),
            f"{max(1, fields.get('count', 1))} sessions from Open",
            len(reply.sessions),
            "answer Open with one Session per member; count 0 means 1",
        )
        return reply

    async def seeded(self, link: Link | None = None, /, **fields: Any) -> Handle:
        """A session of the episode that the script tells."""
        fields = {"seed": SEED, "dynamics_seed": DYNAMICS_SEED, **fields}
        reply = await self.open(link, **fields)
        return Handle(link or self.link, reply.sessions[0])

    async def fork(self, handle: Handle, **fields: Any) -> list[Handle]:
        request = pb.ForkRequest(session_id=handle.id, epoch=handle.epoch, step_index=handle.index, **fields)
        reply: pb.ForkResponse = await self.create("Fork", request)
        return [Handle(handle.link, session) for session in reply.sessions]

    async def script(self) -> Script:
        return await self.target.script(self)

    async def after(self, turns: int, **fields: Any) -> tuple[Handle, Script]:
        """A session of the script that has played its first `turns` turns."""
        script = await self.script()
        handle = await self.seeded(**fields)
        await handle.play(script.turns[:turns])
        return handle, script

    def key(self) -> str:
        """A key that was never used."""
        return f"check-{uuid.uuid4().hex}"

    # --- actions ---------------------------------------------------------------------------------------------------

    def acting_want(self) -> pb.Want:
        """What an observation must carry so that `choices` finds good ones."""
        want = self.target.want
        want.expert_action = self.spec.capabilities.expert_action and not want.valid_actions
        return want

    def choices(self, observation: pb.Observation) -> Sequence[pb.Action]:
        """Actions to try now: the valid ones, else the expert's, else by name, by tool or by shape, else "x"."""
        space = self.spec.action_space
        if observation.valid_actions:
            return list(observation.valid_actions)
        if observation.HasField("expert_action"):
            return [observation.expert_action]
        if space.names:
            return [pb.Action(text=name) for name in space.names]
        if space.tools:
            return [pb.Action(tool_call=pb.ToolCall(name=tool.name, arguments_json="{}")) for tool in space.tools]
        if space.HasField("tensor"):
            return [pb.Action(tensor=zeros(space.tensor))]
        return [pb.Action(text="x")]

    def guided_want(self, **more: bool) -> pb.Want:
        """What an observation must carry so that `guide` finds the expert's action, where there is an expert."""
        want = self.acting_want()
        want.MergeFrom(pb.Want(expert_action=self.spec.capabilities.expert_action, **more))
        return want

    def guide(self, observation: pb.Observation) -> pb.Action:
        """The action that leads furthest: the expert's, or else the first of the choices."""
        return observation.expert_action if observation.HasField("expert_action") else self.choices(observation)[0]

    # --- expectations ----------------------------------------------------------------------------------------------

    async def refused(self, what: str, method: str, request: Message, *codes: str, mend: str = "") -> Refusal:
        """How the server refuses the call. Raises Unmet if it does not, or not with one of `codes`."""
        refusal = await self.link.refusal(method, request)
        wanted = " or ".join(codes)
        expect(refusal is not None, f"{what} to be refused with {wanted}", "OK", mend)
        assert refusal is not None
        expect(refusal.code in codes, f"{what} to be refused with {wanted}", refusal, mend)
        return refusal


def zeros(spec: pb.TensorSpec) -> pb.Tensor:
    """The tensor of zeros in the shape of the spec, with free lengths of 1."""
    shape = [max(1, length) if length < 0 else length for length in spec.shape]
    size = 1 if spec.dtype == "bool" else int("".join(filter(str.isdigit, spec.dtype))) // 8
    for length in shape:
        size *= length
    return pb.Tensor(dtype=spec.dtype, shape=shape, data=bytes(size))


def expect_same(expected: Message, got: Message, what: str, mend: str = "") -> None:
    """Raises Unmet, with the first lines that differ, unless the messages are equal."""
    if expected == got:
        return
    left, right = (MessageToString(message).splitlines() for message in (expected, got))
    length = max(len(left), len(right))
    for a, b in zip([*left, *[""] * (length - len(left))], [*right, *[""] * (length - len(right))], strict=True):
        if a != b:
            raise Unmet(f"{what} with `{a.strip()[:200] or 'nothing more'}`", f"`{b.strip()[:200] or 'nothing'}`", mend)
    raise Unmet(what, "another message", mend)


def expect_played(expected: Sequence[pb.Transition], got: Sequence[pb.Transition], what: str, mend: str = "") -> None:
    """Raises Unmet, naming the turn, unless the transitions are those of the undisturbed episode."""
    expect(len(expected) == len(got), f"{len(expected)} turns in {what}", f"{len(got)}", mend)
    for turn, (left, right) in enumerate(zip(expected, got, strict=True)):
        expect_same(left, right, f"turn {turn} of {what}", mend)
