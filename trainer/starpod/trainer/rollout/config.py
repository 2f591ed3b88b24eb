"""Configuration of rollouts: the environment, its curriculum, collection and search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from starpod.client.transport import as_addresses
from starpod.client.versions import satisfies
from starpod.trainer.agents.config import ProgramConfig
from starpod.trainer.configuration.kinds import KindBy
from starpod.trainer.configuration.section import CommandWords, FilePath, Section


class LevelsConfig(Section):
    """Levels of environment options; success advances training to the next level."""

    kind: Literal["levels"] = "levels"
    levels: tuple[dict[str, Any], ...] = Field(
        default=(),
        description="Options of each level, merged over the environment's; the easiest first; empty: no levels.",
    )
    success: float = Field(default=0.8, gt=0, le=1, description="Mean success at which the next level begins.")
    window: int = Field(default=5, ge=1, description="Iterations at a level over which success is averaged.")


class TaskPoolConfig(Section):
    """A finite pool of tasks, which are played by their difficulty: most often if the policy solves them sometimes."""

    kind: Literal["tasks"] = "tasks"
    tasks: int = Field(
        ge=2,
        le=100_000,
        description="Number of tasks, the first seeds of seeds.train; for a file of tasks, its rows for training.",
    )
    half_life: float = Field(
        default=1.0,
        gt=0,
        description="Passes over the pool, each of as many groups as tasks, in which the weight of an episode in "
        "the estimate of its task halves.",
    )


CurriculumConfig = Annotated[LevelsConfig | TaskPoolConfig, KindBy("kind")]
"""Start states of training that follow the policy's success. Warm starts and evaluations do not use it."""


CONNECTION = ("addresses", "token_file", "ca", "certificate", "key", "timeout", "patience")
"""Keys of an environment that say how to reach its servers."""


class EnvironmentConfig(Section):
    """The environment and its servers."""

    SHORTHAND: ClassVar[str] = "id"

    id: str = Field(default="frozen_lake-v1", description="Name, as `starpod list` shows it.")
    version: str = Field(default="", description="Version, or range ('>=1,<2') of which the newest is used.")
    options: dict[str, Any] = Field(default={}, description="The environment's options; `starpod describe` lists them.")
    max_turns: int | None = Field(
        default=None, ge=1, description="Maximum turns of an episode; null: the environment's limit."
    )
    max_actions_per_turn: int | None = Field(
        default=None, ge=1, description="Maximum actions of a turn; null: the environment's limit."
    )
    max_actions: int | None = Field(
        default=None, ge=0, description="Maximum actions of an episode; null: the environment's limit, 0: no limit."
    )
    expert_moves_left: int | None = Field(
        default=None,
        ge=1,
        description="Begins episodes this many moves of the environment's expert before success; null: at the start.",
    )
    starts: FilePath = Field(
        default="", description="File of start states saved by the live site. Groups begin in them in turn."
    )
    starts_share: float = Field(
        default=0.5, gt=0, le=1, description="Share of groups that begin in a saved start state."
    )
    addresses: tuple[str, ...] = Field(
        default=(), description="Running servers (host:port, dns:///name:port); empty: the run starts its own."
    )
    workers: int = Field(default=1, ge=1, description="Number of server processes that the run starts.")
    serve: CommandWords = Field(
        default=(),
        description="Further arguments of `starpod serve` for the servers that the run starts, such as [--threads, "
        "'8'].",
    )
    token_file: FilePath = Field(default="", description="File with the servers' bearer token.")
    ca: FilePath = Field(default="", description="PEM file of the servers' certificate authority; turns TLS on.")
    certificate: FilePath = Field(default="", description="PEM file of the client's certificate (mTLS).")
    key: FilePath = Field(default="", description="PEM file of the client's key (mTLS).")
    curriculum: CurriculumConfig = Field(
        default=LevelsConfig(),
        description="Start states that follow success. levels: options become harder; tasks: of a finite pool, tasks "
        "that are solved sometimes are played most.",
    )
    timeout: float = Field(
        default=30.0,
        gt=0,
        description="Seconds after which a call is retried, and a silent server is given up.",
    )
    patience: float = Field(
        default=300.0, gt=0, description="Maximum seconds of a call, including retries and recovery."
    )

    @field_validator("version")
    @classmethod
    def _is_range(cls, value: str) -> str:
        satisfies("0", value)
        return value

    @field_validator("addresses", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Split a string of comma-separated addresses, as commands do."""
        return as_addresses(value) if isinstance(value, str) and value else value

    @field_validator("addresses")
    @classmethod
    def _are_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(as_addresses(value)) if value else value

    @model_validator(mode="after")
    def _fits_together(self) -> EnvironmentConfig:
        if (self.certificate or self.key) and not (self.ca and self.certificate and self.key):
            raise ValueError(
                "environment.certificate and environment.key are given together, and with environment.ca: without "
                "it, the connection would not be encrypted"
            )
        if self.starts and self.curriculum.kind == "tasks":
            raise ValueError(
                "environment.curriculum tasks estimates how often start states of seeds are solved, but "
                "environment.starts begins groups in other states: drop one of them"
            )
        if self.addresses and (self.workers > 1 or self.serve):
            raise ValueError(
                "environment.workers and environment.serve are for servers that the run starts, but "
                "environment.addresses names running servers: drop them, or the addresses"
            )
        return self

    def with_options(self, options: Mapping[str, Any]) -> EnvironmentConfig:
        """Return a copy with these options merged over the existing ones."""
        return self.model_copy(update={"options": {**self.options, **options}})


class SearchConfig(Section):
    """Search strategy that finds the episodes of a group."""

    strategy: str

    @property
    def needs_score(self) -> bool:
        """Whether observations must carry the environment's score."""
        return False

    @property
    def needs_fork(self) -> bool:
        """Whether the environment must support forks with a new dynamics seed.

        Without a new seed, a search would see the transitions that the real episode is about to get.
        """
        return False


class NoSearch(SearchConfig):
    """Episodes are played without a search."""

    strategy: Literal["none"] = "none"


class BestOfConfig(SearchConfig):
    """Play more episodes than needed, and keep those with the highest returns."""

    strategy: Literal["best_of"] = "best_of"
    width: int = Field(default=2, ge=1, description="Episodes played for each one kept.")
    naive: float = Field(
        default=0.25, ge=0, le=1, description="Share of a group that is played without search, for contrast."
    )


class BeamConfig(SearchConfig):
    """Try several replies in each state, and continue with those of the highest score."""

    strategy: Literal["beam"] = "beam"
    width: int = Field(default=4, ge=1, description="Replies to try in each state.")
    keep: int = Field(default=2, ge=1, description="Episodes that a beam keeps after each turn.")
    draws: int = Field(default=1, ge=1, description="Dynamics seeds over which the score of a reply is averaged.")
    score: Literal["score", "reward"] = Field(
        default="score", description="Value of a state: the environment's score, or the rewards so far."
    )
    naive: float = Field(
        default=0.25, ge=0, le=1, description="Share of a group that is played without search, for contrast."
    )
    correction: Literal["off", "weight"] = Field(
        default="off",
        description="weight: a chosen reply's loss is multiplied by its probability under the policy over that "
        "under the search; needs keep 1.",
    )

    @model_validator(mode="after")
    def _weighs_the_best_alone(self) -> BeamConfig:
        if self.correction == "weight" and self.keep != 1:
            raise ValueError(
                f"collect.search.correction weight is for one best reply of a state, but keep {self.keep} keeps "
                "several: set keep to 1, or correction to off"
            )
        return self

    @property
    def needs_score(self) -> bool:
        return self.score == "score"

    @property
    def needs_fork(self) -> bool:
        return True


class LookaheadConfig(BeamConfig):
    """Try several replies in each state, and score each by the best score that later turns reach."""

    strategy: Literal["lookahead"] = "lookahead"  # type: ignore[assignment]
    depth: int = Field(default=1, ge=0, description="Turns to play after a reply to score it.")


class PivotsConfig(SearchConfig):
    """Continue failed episodes from one of their states, the pivot (DEEP-GRPO)."""

    strategy: Literal["pivots"] = "pivots"
    width: int = Field(default=8, ge=1, description="Continuations of a state.")
    gamma: float = Field(
        default=2.0,
        ge=0,
        description="Preference for late pivots: a state is drawn with a weight proportional to its relative depth to "
        "this power; 0: no preference.",
    )
    scale: Literal["none", "std"] = Field(
        default="none", description="std: advantages of branches are divided by their siblings' standard deviation."
    )
    weight: float = Field(default=1.0, gt=0, description="Factor of the branches' loss.")
    most_branches: int = Field(default=64, ge=1, description="Maximum branches of a group.")

    @model_validator(mode="after")
    def _grows_whole_sets(self) -> PivotsConfig:
        if self.most_branches < self.width:
            raise ValueError(
                f"collect.search.most_branches {self.most_branches} has no room for the {self.width} continuations of "
                "a single state: raise it, or lower width"
            )
        return self


class ValuesConfig(SearchConfig):
    """Continue from each state several times, to estimate its value."""

    strategy: Literal["values"] = "values"
    width: int = Field(default=4, ge=1, description="Continuations of each state.")


class TreeConfig(SearchConfig):
    """Grow the episodes of a group as trees."""

    strategy: Literal["tree"] = "tree"
    width: int = Field(default=4, ge=1, description="Trees per group.")


AnySearch = Annotated[
    NoSearch | BestOfConfig | BeamConfig | LookaheadConfig | PivotsConfig | ValuesConfig | TreeConfig,
    KindBy("strategy"),
]


class CollectConfig(Section):
    """Collection of P groups of N episodes; the members of a group share a start state."""

    groups: int = Field(default=8, ge=1, description="Start states per collection (P).")
    group_size: int = Field(default=16, ge=1, description="Episodes per start state (N).")
    min_group_size: int = Field(
        default=2,
        ge=1,
        description="Minimum episodes of a group; with fewer, it is replaced.",
    )
    keep_mib: float = Field(
        default=64.0,
        ge=0,
        description="Maximum MiB of collected episodes in the run's folder. The oldest are deleted; 0: none are kept.",
    )
    max_rounds: int = Field(default=4, ge=1, description="Maximum rounds of replacement in a collection.")
    max_staleness: int = Field(
        default=0,
        ge=0,
        description="Maximum number of updates between the sampling of a token and training on it. 0: collection "
        "and update alternate; above 0: sampling continues during updates, so that the run is faster.",
    )
    deadline: float = Field(
        default=3600.0, gt=0, description="Maximum seconds of an episode. A longer one counts as failed."
    )
    search: AnySearch = Field(
        default=NoSearch(),
        description="Search for the episodes of a group. none: plain play; best_of: keeps the best of several "
        "episodes; beam, lookahead: try several replies in a state; pivots, values, tree: continue "
        "several times from a state.",
    )
    agent: ProgramConfig = ProgramConfig()

    @model_validator(mode="after")
    def _sizes(self) -> CollectConfig:
        if self.min_group_size > self.group_size:
            raise ValueError(
                f"collect.min_group_size {self.min_group_size} is more than group_size {self.group_size}: "
                "every group would be dropped"
            )
        return self

    @model_validator(mode="after")
    def _searches_with_the_trainers_prompts(self) -> CollectConfig:
        if self.agent.command and self.search.strategy != "none":
            raise ValueError(
                f"collect.search.strategy {self.search.strategy} continues from copies of a state, but a program "
                "(collect.agent.command) cannot: drop one of them"
            )
        return self

    @model_validator(mode="after")
    def _searches_in_lock_step(self) -> CollectConfig:
        if self.max_staleness and self.search.strategy != "none":
            raise ValueError(
                f"collect.search.strategy {self.search.strategy} cannot be resumed in the middle of a group: set "
                "collect.max_staleness to 0"
            )
        return self


@dataclass(frozen=True, slots=True)
class Facts:
    """The part of the environment's spec that a run needs: action names and capabilities."""

    actions: tuple[str, ...]
    state_key: bool
    fork: bool = True
    expert: bool = True
    score: bool = True
    image: bool = True


ALL_SUPPORTED = Facts((), state_key=True)
"""Facts about an environment that has no action names and supports everything."""
