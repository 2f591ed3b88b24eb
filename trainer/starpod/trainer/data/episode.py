"""Records of turns, episodes and groups, from the environment's reply to the loss."""

from __future__ import annotations

import base64
import html
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, cast

if TYPE_CHECKING:
    from starpod.client import Session, Transition

Finish = Literal["stop", "length"]
"""Why a reply ended: the policy sampled an end token, or a limit on tokens cut it."""

EXTERNAL = "external"
"""The environment of episodes that were played elsewhere: their seeds say nothing of start states."""

End = Literal["", "terminal", "max_turns", "max_actions", "environment_limit", "context", "failed"]
"""Why an episode ended: the environment's own end reasons in lower case; `context`: too few tokens were left for
another reply; `failed`: the infrastructure did, and nothing may be learnt from it. Empty while it goes on."""


@dataclass(slots=True, kw_only=True)
class Turn:
    """One reply of the policy and what came of it.

    observation: what the environment showed, as text. image: the same as an image, as the policy was shown it; b""
        where it was shown none. state_key: the state's digest before the turn; b"" unless asked for.
    prompt: ids fed before the reply. Where `fresh`, the whole context, and a new training sample begins; else what was
        appended since the last id of the previous turn's reply.
    reply: the sampled ids, the sampled end token included. Nothing else is ever trained on.
    logprobs: the sampler's log-probability of each id of `reply`, in nats, at the sampling temperature.
    versions: the policy version that sampled each id of `reply`.
    finish: why the reply ended.
    spans: the blocks that `reply` is cut into: name and end of each, in order; one without a name where it could not be
        read. Noted where an estimator looks at blocks, else empty.
    text: the reply as text, with what the prompt prefilled. thought: its reasoning; None if there is none.
    blocks: what further blocks of the grammar hold, by name.
    actions: what was parsed from it and sent, in order. well_formed: whether it followed the response grammar.
    parts: named rewards, whose sum is the turn's reward: "environment", "format", shaping functions.
    valid, effective, executed: how many of the actions the environment called so. ran: whether it executed each one.
    criteria: the checklist that the environment reported: what held after the turn, by name.
    progress: change of the environment's score over the turn; None where it was not asked for or is not known.
    info: the environment's side data.
    agent_id: the speaker. attempt: from 0; an attempt is one passage from the episode's start to an end, and all but
        scripts of several have one.
    value: of the state before the turn, where a search has estimated it: what is earned from there on.
    weight: of its reply in the policy's loss: below 1 where a search chose it and that is corrected, 0 where a
        demonstration is not imitated.
    generating, stepping: seconds spent waiting for the engine and for the environment.
    """

    observation: str = ""
    image: bytes = b""
    prompt: list[int] = field(default_factory=list)
    fresh: bool
    reply: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: Finish = "stop"
    spans: list[tuple[str, int]] = field(default_factory=list)
    text: str = ""
    thought: str | None = None
    blocks: dict[str, str] = field(default_factory=dict)
    actions: list[str] = field(default_factory=list)
    well_formed: bool = True
    state_key: bytes = b""
    parts: dict[str, float] = field(default_factory=dict)
    executed: int = 0
    ran: list[bool] = field(default_factory=list)
    valid: int = 0
    effective: int = 0
    criteria: dict[str, bool] = field(default_factory=dict)
    progress: float | None = None
    info: dict[str, Any] = field(default_factory=dict)
    agent_id: str = ""
    attempt: int = 0
    value: float | None = None
    weight: float = 1.0
    generating: float = 0.0
    stepping: float = 0.0

    @property
    def switches(self) -> bool:
        """Whether the reply says that another subgoal begins (block switch); without the block it goes on."""
        return self.blocks.get("switch", "").upper() == "SWITCH"

    @property
    def line(self) -> tuple[int, str]:
        """Attempt and speaker. The turns of an episode that have it in common are one line: each of them follows the
        one before it there, whatever others say in between."""
        return self.attempt, self.agent_id

    @property
    def reward(self) -> float:
        """The sum of the parts."""
        return sum(self.parts.values())

    @property
    def own_reward(self) -> float:
        """The environment's own reward, without penalties and shaping; all of it where no part is the environment's."""
        return self.parts.get("environment", self.reward)

    def pay(self, parts: Mapping[str, float]) -> None:
        """Sets parts of the reward."""
        self.parts.update(parts)

    def take(self, transition: Transition) -> None:
        """Notes what the environment made of the actions."""
        for outcome in transition.outcomes:
            self.ran.append(outcome.executed)
            self.executed += outcome.executed
            self.valid += outcome.valid
            self.effective += outcome.effective
        self.criteria = transition.criteria
        self.info = transition.info
        if parts := transition.reward_parts:
            self.info["reward_parts"] = parts

    def to_json(self) -> dict[str, Any]:
        """JSON values, with the reward for readers; `from_json` is the inverse."""
        values = {item.name: getattr(self, item.name) for item in fields(self)} | {"reward": self.reward}
        return values | {name: base64.b64encode(getattr(self, name)).decode() for name in ("state_key", "image")}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Turn:
        """Raises TypeError for an unknown key. A reward without parts is the environment's."""
        reward = values.get("reward", 0.0)
        parts = values.get("parts") or ({"environment": reward} if reward else {})
        values = {name: value for name, value in values.items() if name != "reward"} | {"parts": parts}
        spans = [(name, end) for name, end in values.get("spans", ())]
        binary = {name: base64.b64decode(values.get(name, "")) for name in ("state_key", "image")}
        return cls(**{**values, "spans": spans, **binary})


@dataclass(slots=True)
class Episode:
    """One trajectory.

    group: the id of the start state's group, unique in a run; member: place in it. Neither is ever inferred.
    seed, dynamics_seed: opening `environment` `version` with them and replaying the actions gives the same.
    instructions: what the policy was told once, before the first turn.
    end: why it ended. success: None where the environment cannot say.
    error: what failed, where `end` is "failed".
    task: its name among the run's `environments`; empty where the run has one. begun_at: turns that led to
        where it begins.
    parent: the member of the group, and the index of a turn: its turns before that one are that member's, and were
        played and are trained there. None: all turns are its own.
    final_observation: what the environment showed after the last turn. tail: the ids that would have preceded another
        reply, where the episode was cut short by a limit: what a critic bootstraps from. tail_fresh: as `Turn.fresh`.
        final_image: the image that they name last.
    """

    group: int
    member: int
    environment: str
    version: str = ""
    seed: int = 0
    dynamics_seed: int = 0
    instructions: str = ""
    turns: list[Turn] = field(default_factory=list)
    end: End = ""
    success: bool | None = None
    error: str = ""
    final_observation: str = ""
    final_image: bytes = b""
    tail: list[int] = field(default_factory=list)
    tail_fresh: bool = False
    task: str = ""
    begun_at: int = 0
    parent: tuple[int, int] | None = None

    @classmethod
    def begin(cls, session: Session, group: int, task: str = "") -> Episode:
        """The record of the episode that a session is about to play."""
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
        """Notes how it ended, if this was the end."""
        if transition.done:
            self.end = cast(End, transition.end_reason.name.lower())
            self.success = transition.success

    @property
    def kind(self) -> str:
        """Name of the task, or of the environment where the task has none: statistics of a batch are of the episodes of
        one kind."""
        return self.task or self.environment

    @property
    def failed(self) -> bool:
        """Whether the infrastructure failed it: excluded from the loss and from its group's statistics, and counted."""
        return self.end == "failed"

    @property
    def terminated(self) -> bool:
        """Whether the task itself ended: nothing is left to bootstrap from."""
        return self.end == "terminal"

    @property
    def total_reward(self) -> float:
        """The return: the undiscounted sum of the turns' rewards, all parts."""
        return sum(turn.reward for turn in self.turns)

    @property
    def own_return(self) -> float:
        """The sum of the environment's own rewards, without penalties and shaping: by it policies compare."""
        return sum(turn.own_reward for turn in self.turns)

    @property
    def shared(self) -> int:
        """Turns at the beginning that are its parent's."""
        return self.parent[1] if self.parent else 0

    @property
    def own_turns(self) -> list[Turn]:
        """The turns that were played for it."""
        return self.turns[self.shared :]

    @property
    def sampled_tokens(self) -> int:
        """Of its own turns."""
        return sum(len(turn.reply) for turn in self.own_turns)

    def _repr_html_(self) -> str:
        """What was seen, said and earned, turn by turn, for notebooks."""
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
        """JSON values; `from_json` is the inverse."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values["turns"] = [turn.to_json() for turn in self.turns]
        values["final_image"] = base64.b64encode(self.final_image).decode()
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Episode:
        parent = values.get("parent")
        turns = [Turn.from_json(turn) for turn in values["turns"]]
        image = base64.b64decode(values.get("final_image", ""))
        return cls(**{**values, "turns": turns, "parent": tuple(parent) if parent else None, "final_image": image})


@dataclass(slots=True)
class Spent:
    """What a search cost, with what it threw away: turns that an environment stepped, sampled tokens, forks."""

    steps: int = 0
    tokens: int = 0
    forks: int = 0

    def add(self, turns: Sequence[Turn], *, sampled: int) -> None:
        """Counts turns that were played; the last `sampled` of them were sampled, the others repeated."""
        self.steps += sum(bool(turn.actions) for turn in turns)
        self.tokens += sum(len(turn.reply) for turn in turns[len(turns) - sampled :])


@dataclass(slots=True)
class Group:
    """The episodes of one start state.

    id: as in its episodes. episodes: those that may be trained on, by member. failed: those that may not.
    branches: episodes with a parent among `episodes` that are compared with their siblings alone, and trained beside.
    spent: by a search; None where there was none.
    """

    id: int
    episodes: list[Episode]
    failed: list[Episode] = field(default_factory=list)
    branches: list[Episode] = field(default_factory=list)
    spent: Spent | None = None

    @property
    def members(self) -> list[Episode]:
        """All episodes, failed ones and branches too, by member."""
        return sorted([*self.episodes, *self.branches, *self.failed], key=lambda episode: episode.member)

    @property
    def kind(self) -> str:
        """Kind of its episodes; empty where it has none."""
        return next((episode.kind for episode in (*self.episodes, *self.failed)), "")

    @property
    def returns(self) -> list[float]:
        return [episode.total_reward for episode in self.episodes]

    @property
    def reward_std(self) -> float:
        """Standard deviation of the raw returns with ddof=1; 0 for fewer than two episodes."""
        return statistics.stdev(self.returns) if len(self.episodes) > 1 else 0.0

    @property
    def own_std(self) -> float:
        """The same of the environment's own returns, without penalties and shaping."""
        return statistics.stdev(episode.own_return for episode in self.episodes) if len(self.episodes) > 1 else 0.0

    @property
    def identical(self) -> bool:
        """Whether all members gave the same replies, so that whatever else differs in their returns is luck."""
        replies = [[turn.reply or turn.text for turn in episode.turns] for episode in self.episodes]
        return len(replies) > 1 and all(each == replies[0] for each in replies)

    def to_json(self) -> dict[str, Any]:
        """JSON values; `from_json` is the inverse."""
        parts = {"episodes": self.episodes, "failed": self.failed, "branches": self.branches}
        return {"id": self.id} | {name: [episode.to_json() for episode in part] for name, part in parts.items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Group:
        parts = ("episodes", "failed", "branches")
        episodes, failed, branches = ([Episode.from_json(each) for each in values.get(part, ())] for part in parts)
        return cls(values["id"], episodes, failed, branches)


def by_kind(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """The groups of each kind, in their order. Statistics of a batch are of one kind at a time."""
    kinds: dict[str, list[Group]] = {}
    for group in groups:
        kinds.setdefault(group.kind, []).append(group)
    return kinds


def part_sums(turns: Sequence[Turn]) -> dict[str, float]:
    """The sum of each reward part over turns."""
    sums: Counter[str] = Counter()
    for turn in turns:
        sums.update(turn.parts)
    return dict(sums)


def lines_of(turns: Sequence[Turn]) -> list[list[Turn]]:
    """The turns of each speaker in each attempt (`Turn.line`), in their order."""
    lines: dict[tuple[int, str], list[Turn]] = {}
    for turn in turns:
        lines.setdefault(turn.line, []).append(turn)
    return list(lines.values())


def payees_of(episode: Episode) -> list[int]:
    """The index of the turn on whose tokens the reward and the parts of each turn are.

    A turn that was sampled has its own. One without tokens, such as a program's second step after a reply, is paid to
    the reply before it in its line, or else to the first one after it there. A line without a reply is paid to the
    reply before it in the episode, or else to the first one. What an episode shares with its parent stays there.
    """
    turns, own = episode.turns, range(episode.shared, len(episode.turns))
    payees = list(range(len(turns)))
    replies = [index for index in own if turns[index].reply]
    for index in own:
        if replies and not turns[index].reply:
            near = [other for other in replies if turns[other].line == turns[index].line] or replies
            payees[index] = max((other for other in near if other < index), default=near[0])
    return payees


def turns_of(episode: Episode, agent: str) -> Episode:
    """The turns of one agent as an episode; of the agent "" all."""
    return episode if not agent else replace(episode, turns=[turn for turn in episode.turns if turn.agent_id == agent])


def episodes_of(groups: Sequence[Group]) -> list[Episode]:
    """All episodes that may be trained on, in the order of the groups.

    Those without a sampled token are left out: their first prompt was too long, and there is nothing to train.
    """
    return [episode for group in groups for episode in group.episodes if episode.sampled_tokens]


def branches_of(groups: Sequence[Group]) -> list[Episode]:
    """The branches that may be trained on: those of a state whose returns differ. Others have nothing to teach."""
    kept = []
    for group in groups:
        states = siblings_of(group.branches).values()
        kept += [each for own in states if Group(group.id, own).reward_std > 1e-8 for each in own]
    return [branch for branch in kept if branch.sampled_tokens]


def siblings_of(episodes: Sequence[Episode]) -> dict[tuple[int, int], list[Episode]]:
    """Those with a parent by the state that they begin in, in their order."""
    states: dict[tuple[int, int], list[Episode]] = {}
    for episode in episodes:
        if episode.parent is not None:
            states.setdefault(episode.parent, []).append(episode)
    return states
