"""A game: one played session with its turns, hints, and a way to take turns back."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from starpod.client.spelling import nearest
from starpod.remote.catalog import ServerConnection
from starpod.v1 import environment_pb2 as pb

SEPARATOR = "||"


class NotPossible(Exception):
    """The player asked for something impossible; the message says why. Nothing has changed."""


class Game:
    """A session with the list of its turns.

    Attributes:
        observation: what the agent sees now.
        transition: the last turn's transition; None after a reset.
        turns: the actions of each turn so far.
        reward: the sum of rewards so far.
    """

    transition: pb.Transition | None
    turns: list[list[pb.Action]]
    reward: float
    _step_index: int

    def __init__(
        self, server: ServerConnection, spec: pb.EnvironmentSpec, options: Mapping[str, Any], seed: int | None
    ) -> None:
        self._server = server
        self.spec = spec
        can = spec.capabilities
        request = pb.OpenRequest(environment_id=spec.id, version=spec.version, seed=seed)
        request.options.update(options)
        request.want.valid_actions = can.valid_actions
        request.want.expert_action = can.expert_action
        request.want.score = can.score
        response = server.call(server.stub.Open, request)
        self.limits = response.limits
        self._start(response.sessions[0], response.instructions)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(*(() if error is None else (grpc.RpcError,))):  # report the first error, not this one
            self._server.call(self._server.stub.Close, pb.CloseRequest(session_ids=[self._session_id]))

    @property
    def over(self) -> bool:
        return self.transition is not None and (self.transition.terminated or self.transition.truncated)

    def parse(self, line: str) -> list[pb.Action]:
        """Parse a typed turn into actions. Raise NotPossible with the nearest names if one is unknown."""
        if any("\ud800" <= character <= "\udfff" for character in line):
            raise NotPossible(f"{line!r} is not UTF-8: type it again")
        return [self._parse_action(part.strip()) for part in line.split(SEPARATOR)]

    def play(self, actions: Sequence[pb.Action]) -> pb.Transition:
        """Play one turn. Raise NotPossible if the episode is over, or if the server refuses an action."""
        if self.over:
            raise NotPossible("the episode is over: again, new, undo or quit")
        request = pb.StepRequest(
            session_id=self._session_id, epoch=self._epoch, step_index=self._step_index, actions=actions
        )
        try:
            response = self._server.call(self._server.stub.Step, request)
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.INVALID_ARGUMENT:
                raise
            raise NotPossible(error.details()) from error
        self._step_index = response.next_step_index
        self.transition = response.transition
        self.observation = response.transition.observation
        self.turns.append(list(actions))
        self.reward += response.transition.reward
        return response.transition

    def hint(self) -> str:
        """Return the expert's next action as text. Raise NotPossible if there is none."""
        if not self.spec.capabilities.expert_action:
            raise NotPossible(f"{self.spec.id} has no expert")
        if not self.observation.HasField("expert_action"):
            raise NotPossible("the expert knows no good action here")
        return action_text(self.observation.expert_action)

    def undo(self) -> None:
        """Take the last turn back by replaying the episode without it. Raise NotPossible if that cannot be done."""
        if not self.spec.capabilities.deterministic:
            raise NotPossible(f"{self.spec.id} is not deterministic: its turns cannot be taken back")
        if not self.turns:
            raise NotPossible("there is no turn to take back")
        turns = self.turns[:-1]
        self.again()
        for actions in turns:
            self.play(actions)

    def again(self) -> None:
        """Start the same episode again."""
        self._reset(self.seed, self._dynamics_seed)

    def new(self) -> None:
        """Start another episode with a seed that the server draws."""
        self._reset(None, None)

    def picture(self) -> str:
        """Return the state as text: rendered if the environment can render text, else as the agent sees it."""
        if "text" not in self.spec.render_modes:
            return "\n".join(map(part_text, self.observation.parts))
        request = pb.RenderRequest(session_id=self._session_id, mode="text")
        response = self._server.call(self._server.stub.Render, request)
        return response.data.decode()

    def _reset(self, seed: int | None, dynamics_seed: int | None) -> None:
        request = pb.ResetRequest(
            session_id=self._session_id, epoch=self._epoch, seed=seed, dynamics_seed=dynamics_seed
        )
        response = self._server.call(self._server.stub.Reset, request)
        self._start(response.session, response.instructions)

    def _start(self, session: pb.Session, instructions: str) -> None:
        self.instructions = instructions
        self._session_id = session.session_id
        self._epoch = session.epoch
        self._step_index = session.step_index
        self.seed = session.seed
        self._dynamics_seed = session.dynamics_seed
        self.observation = session.observation
        self.transition = None
        self.turns = []
        self.reward = 0.0

    def _parse_action(self, text: str) -> pb.Action:
        space = self.spec.action_space
        name, _, remainder = text.partition(" ")
        if any(tool.name == name for tool in space.tools):
            arguments = remainder.strip() or "{}"
            try:
                json.loads(arguments)
            except json.JSONDecodeError as error:
                raise NotPossible(f"the arguments of {name} are not JSON: {error}") from None
            return pb.Action(tool_call=pb.ToolCall(name=name, arguments_json=arguments))
        if space.names:
            names = {name.lower(): name for name in space.names}
            if text.lower() not in names:
                raise NotPossible(f"no action {text!r}{nearest(text, space.names)}")
            text = names[text.lower()]
        elif not space.grammar:
            tool_names = [tool.name for tool in space.tools]
            raise NotPossible(f"no action {text!r}{nearest(name, tool_names)}")
        return pb.Action(text=text)


def action_text(action: pb.Action) -> str:
    """Return an action as the player would type it."""
    match action.WhichOneof("kind"):
        case "tool_call":
            return f"{action.tool_call.name} {action.tool_call.arguments_json or '{}'}"
        case "json":
            return action.json
        case "tensor":
            return f"{action.tensor.dtype} tensor of shape {list(action.tensor.shape)}"
    return action.text


def part_text(part: pb.Part) -> str:
    """Return a part of an observation as text, or a short description of a part that is not text."""
    match part.WhichOneof("kind"):
        case "image":
            return f"[{part.image.mime}, {len(part.image.data):,} bytes]"
        case "json":
            return part.json
        case "tensor":
            return f"[{part.tensor.dtype} tensor of shape {list(part.tensor.shape)}]"
    return part.text
