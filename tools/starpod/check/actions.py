"""Actions that tests play, and what sessions must observe so that good ones can be chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from starpod.check.expectations import NotShown
from starpod.check.handle import Turn
from starpod.v1 import environment_pb2 as pb

NONSENSE = "\u2620 no such action \u2620"


class ActionTarget(Protocol):
    """The part of Target that actions depend on."""

    server: pb.DescribeResponse
    spec: pb.EnvironmentSpec
    text_action: pb.Action

    @property
    def want(self) -> pb.Want: ...


class ActionChooser:
    """Chooses actions for an environment."""

    def __init__(self, target: ActionTarget) -> None:
        self._target = target

    def want(self) -> pb.Want:
        """Return a Want for the observation fields that `choices` needs to return good actions."""
        want = self._target.want
        want.expert_action = self._target.spec.capabilities.expert_action and not want.valid_actions
        return want

    def choices(self, observation: pb.Observation) -> Sequence[pb.Action]:
        """Return actions to try: the valid ones if observed, else the expert's, else those in the action space."""
        space = self._target.spec.action_space
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
        return [self._target.text_action]

    def nonsense(self) -> list[pb.Action]:
        """Return well-formed but nonsensical actions, one per kind of action. Raise NotShown if none is known."""
        space = self._target.spec.action_space
        actions = [pb.Action(text=NONSENSE)] if space.names else []
        if space.tools:
            actions.append(pb.Action(tool_call=pb.ToolCall(name="no_such_tool", arguments_json="{}")))
        if not actions and space.HasField("tensor"):
            raise NotShown("it is not known which tensors are invalid actions")
        if not actions and self._target.text_action.HasField("json"):
            return [pb.Action(json='{"no": ["such", "action"]}')]
        return actions or [pb.Action(text=NONSENSE)]

    def turn(self, *actions: pb.Action) -> Turn:
        """Return the actions as one turn, cut to the server's max_step_actions."""
        return actions[: self._target.server.limits.max_step_actions or None]

    def guided_want(self, **more: bool) -> pb.Want:
        """Return a Want for the observation fields that `guide` needs, including the expert's action if available."""
        want = self.want()
        want.MergeFrom(pb.Want(expert_action=self._target.spec.capabilities.expert_action, **more))
        return want

    def guide(self, observation: pb.Observation) -> pb.Action:
        """Return the most promising action: the expert's, or else the first of the choices."""
        return observation.expert_action if observation.HasField("expert_action") else self.choices(observation)[0]


def zeros(spec: pb.TensorSpec) -> pb.Tensor:
    """Return a tensor of zeros in the shape of the spec. Dimensions of any length get length 1."""
    shape = [max(1, length) if length < 0 else length for length in spec.shape]
    size = 1 if spec.dtype == "bool" else int("".join(filter(str.isdigit, spec.dtype))) // 8
    for length in shape:
        size *= length
    return pb.Tensor(dtype=spec.dtype, shape=shape, data=bytes(size))
