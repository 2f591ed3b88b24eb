"""Records of turns and episodes."""

from __future__ import annotations

import base64
import html
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from starpod.trainer.configuration.section import ConfigError
from starpod.v1.values import MAX_REWARD

if TYPE_CHECKING:
    from starpod.client import Session, Transition

Finish = Literal["stop", "length"]
"""Why a reply ended: the policy sampled an end token, or a token limit cut it off."""

EXTERNAL = "external"
"""Environment name of episodes that were played elsewhere. Their seeds do not identify start states."""

End = Literal["", "terminal", "max_turns", "max_actions", "environment_limit", "context", "failed"]
"""Why an episode ended: the environment's end reasons in lower case; `context`: too few tokens were left for another
reply; `failed`: the infrastructure failed, and the episode must not be trained on. "" until it ends."""


class ActionOutcome(NamedTuple):
    """The environment's report on an action."""

    executed: bool
    valid: bool
    effective: bool


DONE = ActionOutcome(executed=True, valid=True, effective=True)


@dataclass(slots=True, kw_only=True)
class Turn:
    """One reply of the policy and its results."""

    observation: str = ""
    """The environment's observation before the reply, as text."""
    image: bytes = b""
    """The observation as an image file, as the policy saw it; b"" if it saw none."""
    prompt: list[int] = field(default_factory=list)
    """Ids before the reply. If `fresh`, they are the whole context, and a new training sample begins. Otherwise they
    follow the last id of the previous turn's reply."""
    fresh: bool
    """Whether a new training sample begins with this turn; see `prompt`."""
    reply: list[int] = field(default_factory=list)
    """The sampled ids, including the end token. Only these are trained on."""
    logprobs: list[float] = field(default_factory=list)
    """The sampler's log-probability of each id of `reply`, in nats, at the sampling temperature."""
    versions: list[int] = field(default_factory=list)
    """The policy version that sampled each id of `reply`."""
    finish: Finish = "stop"
    """Reason why the reply ended."""
    structure: str = ""
    """Structure under whose masks the reply was sampled and is scored (models/masks.py); "" without one."""
    hinted: list[int] = field(default_factory=list)
    """The whole context as a teacher reads it that is told the expert's move; empty unless there is such a teacher."""
    spans: list[tuple[str, int]] = field(default_factory=list)
    """Blocks of `reply` as (name, end) in order; one span named "" if it is ill-formed. Empty unless an estimator needs
    blocks."""
    text: str = ""
    """The reply as text, including a prefilled part of the prompt."""
    thought: str | None = None
    """Reasoning of the reply; None if there is none."""
    blocks: dict[str, str] = field(default_factory=dict)
    """Contents of the grammar's other blocks, by name."""
    actions: list[str] = field(default_factory=list)
    """Actions parsed from the reply and sent to the environment, in order."""
    well_formed: bool = True
    """Whether the reply followed the response grammar."""
    state_key: bytes = b""
    """Digest of the state before the turn; b"" unless requested."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named rewards ("environment", "format", shaping functions). Their sum is the turn's reward."""
    outcomes: list[ActionOutcome] = field(default_factory=list)
    """Outcome of each action."""
    criteria: dict[str, bool] = field(default_factory=dict)
    """Checklist reported by the environment after the turn: whether each criterion is met."""
    progress: float | None = None
    """Change of the environment's score over the turn; None if unknown or not requested."""
    info: dict[str, Any] = field(default_factory=dict)
    """The environment's side data."""
    agent_id: str = ""
    """Name of the agent that speaks."""
    attempt: int = 0
    """Number of the attempt, from 0. An attempt leads from the episode's start to an end. Only some scripts have
    several."""
    value: float | None = None
    """A search's estimate of the return from the state before the turn."""
    weight: float = 1.0
    """Weight of the reply in the policy's loss: below 1 to correct for a search's choice, 0 for a demonstration that is
    not imitated."""
    generating: float = 0.0
    """Seconds of waiting for the engine."""
    stepping: float = 0.0
    """Seconds of waiting for the environment."""

    @property
    def executed(self) -> int:
        """Number of executed actions."""
        return sum(outcome.executed for outcome in self.outcomes)

    @property
    def valid(self) -> int:
        """Number of actions that the environment called valid."""
        return sum(outcome.valid for outcome in self.outcomes)

    @property
    def effective(self) -> int:
        """Number of actions that the environment called effective."""
        return sum(outcome.effective for outcome in self.outcomes)

    @property
    def switches(self) -> bool:
        """Whether the reply begins another subgoal according to its block `switch`. False without that block."""
        return self.blocks.get("switch", "").upper() == "SWITCH"

    @property
    def line(self) -> tuple[int, str]:
        """Attempt and speaker. The turns of an episode that share them form a line."""
        return self.attempt, self.agent_id

    @property
    def reward(self) -> float:
        """Sum of the reward's `parts`."""
        return sum(self.parts.values())

    @property
    def own_reward(self) -> float:
        """The environment's reward without penalties and shaping; the whole reward if it has no part `environment`."""
        return self.parts.get("environment", self.reward)

    def pay(self, parts: Mapping[str, float]) -> None:
        """Set parts of the reward. Raises ConfigError for a part that is too large, because of a factor of its own."""
        for name, value in parts.items():
            if not abs(value) <= MAX_REWARD:
                raise ConfigError(
                    f"the reward part {name!r} of a turn is {value:g}, but the largest reward is {MAX_REWARD:g}: lower "
                    "its weight or penalty in the section rewards"
                )
        self.parts.update(parts)

    def take(self, transition: Transition) -> None:
        """Record the results of the actions."""
        self.outcomes = [ActionOutcome(each.executed, each.valid, each.effective) for each in transition.outcomes]
        self.criteria = transition.criteria
        self.info = transition.info
        if parts := transition.reward_parts:
            self.info["reward_parts"] = parts

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, including the reward, for people who read them. `from_json` is the inverse."""
        values = {item.name: getattr(self, item.name) for item in fields(self)} | {"reward": self.reward}
        return values | {name: base64.b64encode(getattr(self, name)).decode() for name in ("state_key", "image")}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Turn:
        """Return the turn. Raises TypeError for an unknown key.

        If `parts` is missing, the whole reward counts as the environment's.
        """
        reward, values = values.get("reward", 0.0), dict(values)
        values["parts"] = values.get("parts") or ({"environment": reward} if reward else {})
        values["spans"] = [(name, end) for name, end in values.get("spans", ())]
        values |= {name: base64.b64decode(values.get(name, "")) for name in ("state_key", "image")}
        values["outcomes"] = [ActionOutcome(*outcome) for outcome in values.get("outcomes", ())]
        values.pop("reward", None)
        return cls(**values)


@dataclass(slots=True)
class Episode:
    """The record of one trajectory."""

    group: int
    """Id of the start state's group, unique in a run."""
    member: int
    """Number within the group."""
    environment: str
    """Id of the environment."""
    version: str = ""
    """Version of the environment."""
    seed: int = 0
    """Seed of the start state. An episode is reproduced by opening this version of the environment with `seed` and
    `dynamics_seed`, and replaying the actions."""
    dynamics_seed: int = 0
    """Seed of the random transitions."""
    instructions: str = ""
    """The environment's instructions, which the policy sees once, before the first turn."""
    turns: list[Turn] = field(default_factory=list)
    """Turns of all speakers and attempts, oldest first."""
    end: End = ""
    """Reason why the episode ended; "" while it is being played."""
    success: bool | None = None
    """Whether the task was solved; None if the environment cannot say."""
    error: str = ""
    """Error message, if `end` is "failed"."""
    final_observation: str = ""
    """The environment's observation after the last turn."""
    final_image: bytes = b""
    """The last image that `tail` refers to."""
    tail: list[int] = field(default_factory=list)
    """If a limit cut the episode off: the ids that would have preceded another reply. A critic bootstraps from them."""
    tail_fresh: bool = False
    """Whether `tail` is the whole context, as for `Turn.fresh`, and not a continuation."""
    task: str = ""
    """Key in the run's `environments`; "" if the run has only one."""
    begun_at: int = 0
    """Number of turns played in the environment before this episode's first turn."""
    parent: tuple[int, int] | None = None
    """The member of the group that this episode branches from, and the turn index at which it branches. Earlier turns
    belong to that member and are trained there. None: all turns are the episode's own."""
    model: str = ""
    """Name of the policy in an evaluation of several; "" in a run, whose policy is the only one."""
    usage: dict[str, int] = field(default_factory=dict)
    """Numbers of `prompt_tokens` and `completion_tokens` of an endpoint's replies, as it counts them; empty if no
    endpoint replied."""
    apart: bool = False
    """Whether it is only compared with episodes of the same parent, as one of `Group.branches`."""

    @classmethod
    def begin(cls, session: Session, group: int, task: str = "") -> Episode:
        """Return the record of the episode that a session is about to play.

        Args:
            session: The opened session; it may be in the middle of an episode, as after a fork.
            task: Key in the run's `environments`; "" if the run has only one.
        """
        return cls(
            group,
            session.member,
            session.environment_id,
            session.version,
            session.seed,
            session.dynamics_seed,
            session.instructions,
            task=task,
            begun_at=session.step_index,
        )

    def take(self, transition: Transition) -> None:
        """Record how the episode ended, if this transition ended it."""
        if transition.done:
            self.end = cast(End, transition.end_reason.name.lower())
            self.success = transition.success

    @property
    def kind(self) -> str:
        """Name of the task, or otherwise of the environment. Batch statistics only combine episodes of one kind."""
        return self.task or self.environment

    @property
    def failed(self) -> bool:
        """Whether the infrastructure failed. The loss and the group's statistics exclude such episodes."""
        return self.end == "failed"

    @property
    def terminated(self) -> bool:
        """Whether the task itself ended, so that there is nothing to bootstrap from."""
        return self.end == "terminal"

    @property
    def total_reward(self) -> float:
        """The return: undiscounted sum of the turns' rewards with all parts."""
        return sum(turn.reward for turn in self.turns)

    @property
    def own_return(self) -> float:
        """Sum of the environment's own rewards, without penalties and shaping, by which policies are compared."""
        return sum(turn.own_reward for turn in self.turns)

    @property
    def shared(self) -> int:
        """Number of first turns that this episode shares with its parent."""
        return self.parent[1] if self.parent else 0

    @property
    def own_turns(self) -> list[Turn]:
        """The turns that were played for this episode."""
        return self.turns[self.shared :]

    @property
    def sampled_tokens(self) -> int:
        """Number of sampled tokens in its own turns."""
        return sum(len(turn.reply) for turn in self.own_turns)

    def _repr_html_(self) -> str:
        """Return observations, replies and rewards turn by turn as HTML, for notebooks."""
        title = f"{self.kind}, seed {self.seed}: {self.end or 'open'}, return {self.own_return:.4g}"
        rows = [
            (turn.observation, turn.text or " || ".join(turn.actions), f"{turn.reward:+.4g}") for turn in self.turns
        ]
        rows += [(self.final_observation, "", "")] if self.final_observation else []
        cells = ("".join(f"<td><pre>{html.escape(cell)}</pre></td>" for cell in row) for row in rows)
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        head = "<tr><th>observation</th><th>reply</th><th>reward</th></tr>"
        return f"<b>{html.escape(title)}</b><table>{head}{body}</table>"

    def to_json(self) -> dict[str, Any]:
        """Return JSON values. `from_json` is the inverse."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values["turns"] = [turn.to_json() for turn in self.turns]
        values["final_image"] = base64.b64encode(self.final_image).decode()
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Episode:
        """Return the episode that `to_json` wrote. Raises TypeError for an unknown key."""
        parent = values.get("parent")
        turns = [Turn.from_json(turn) for turn in values["turns"]]
        image = base64.b64decode(values.get("final_image", ""))
        return cls(**{**values, "turns": turns, "parent": tuple(parent) if parent else None, "final_image": image})


def reports_success(episodes: Sequence[Episode]) -> bool:
    """Return whether the environment of these episodes says which of them are solved.

    Servers report all episodes that a limit ended as unsolved. If the environment itself ended any, only these count.
    """
    ended = [episode for episode in episodes if episode.end == "terminal"]
    return any(episode.success is not None for episode in ended or episodes)


def part_sums(turns: Sequence[Turn]) -> dict[str, float]:
    """Return the sum of each reward part over turns."""
    sums: Counter[str] = Counter()
    for turn in turns:
        sums.update(turn.parts)
    return dict(sums)


def prompt_lengths(turns: Sequence[Turn]) -> list[int]:
    """Return the number of tokens that precede each turn's reply; 0 for a turn without a reply."""
    lengths, context = [], 0
    for turn in turns:
        context = len(turn.prompt) + (0 if turn.fresh else context)
        lengths.append(context if turn.reply else 0)
        context += len(turn.reply)
    return lengths


def lines_of(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Return the turns of each speaker in each attempt (`Turn.line`), in order."""
    lines: dict[tuple[int, str], list[Turn]] = {}
    for turn in turns:
        lines.setdefault(turn.line, []).append(turn)
    return list(lines.values())


def payees_of(episode: Episode) -> list[int]:
    """Return for each turn the index of the turn whose tokens get its reward.

    A turn with sampled tokens gets its own reward. The reward of a turn without tokens, such as a program's second step
    after a reply, goes to the previous reply in its line, or to the next one if there is none. If the line has no
    reply, it goes to the previous reply in the episode, or to the first one if there is none. Rewards of turns shared
    with a parent are not reassigned.
    """
    turns, own_indices = episode.turns, range(episode.shared, len(episode.turns))
    payees = list(range(len(turns)))
    replies = [index for index in own_indices if turns[index].reply]
    for index in own_indices:
        if replies and not turns[index].reply:
            candidates = [reply for reply in replies if turns[reply].line == turns[index].line] or replies
            payees[index] = max((reply for reply in candidates if reply < index), default=candidates[0])
    return payees


def paid_turns(episode: Episode) -> list[list[Turn]]:
    """Return for each turn the turns whose rewards it receives, usually only itself (see `payees_of`)."""
    paid: list[list[Turn]] = [[] for _ in episode.turns]
    for turn, payee in zip(episode.turns, payees_of(episode), strict=True):
        paid[payee].append(turn)
    return paid


def turns_of(episode: Episode, agent: str) -> Episode:
    """Return an episode with only the turns of one agent; for the agent "" the whole episode."""
    return episode if not agent else replace(episode, turns=[turn for turn in episode.turns if turn.agent_id == agent])
