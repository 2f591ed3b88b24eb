"""Episodes from environments: one coroutine each, so that a slow one never holds up the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, ClassVar

from pydantic import Field, model_validator

from starpod.client import Fleet, Limits, Session, StarpodError, Transition, Want
from starpod.trainer.data.episode import End, Episode, Group, Turn
from starpod.trainer.engines.base import Engine, Request
from starpod.trainer.prompts.conversation import Conversation, Template
from starpod.trainer.prompts.grammar import Grammar
from starpod.trainer.prompts.prompt import PromptConfig, Prompter
from starpod.trainer.rewards.reward import Rewards
from starpod.trainer.section import Section
from starpod.trainer.seeds import derive


class EnvironmentConfig(Section):
    """What is played, and where it is served."""

    SHORTHAND: ClassVar[str] = "id"

    id: str = Field(default="frozen_lake-v1", description="Environment, as `starpod list` shows it.")
    version: str = Field(default="", description="Range such as '>=1,<2'; the newest hosted version that fits is used.")
    options: dict[str, Any] = Field(default={}, description="The environment's own options.")
    max_turns: int | None = Field(default=None, ge=1, description="Turns of an episode; null: the environment's limit.")
    max_actions_per_turn: int | None = Field(default=None, ge=1, description="Actions of a turn; null: likewise.")
    max_actions: int | None = Field(
        default=None, ge=0, description="Actions of an episode; null: likewise, 0: no limit."
    )
    addresses: tuple[str, ...] = Field(
        default=(), description="Servers (host:port, or dns:///name:port). Empty: started on this machine."
    )
    workers: int = Field(default=1, ge=1, description="Server processes to start, where `addresses` is empty.")
    serve: tuple[str, ...] = Field(default=(), description="More arguments for `starpod serve`, likewise.")
    token_file: str = Field(default="", description="File with the bearer token that the servers want.")
    ca: str = Field(default="", description="PEM file of the authority that signed the servers' certificate: TLS on.")
    certificate: str = Field(default="", description="PEM file of the client's certificate, for mTLS.")
    key: str = Field(default="", description="PEM file of the client's key, for mTLS.")
    timeout: float = Field(
        default=30.0,
        gt=0,
        description="Seconds after which a call without a reply is asked again, and a silent server is given up.",
    )
    patience: float = Field(
        default=300.0, gt=0, description="Seconds that one call may take with all that befalls its servers."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> EnvironmentConfig:
        if (self.certificate or self.key) and not (self.ca and self.certificate and self.key):
            raise ValueError(
                "environment.certificate and environment.key go together, and with environment.ca: without it the "
                "connection would not be encrypted"
            )
        if self.addresses and (self.workers > 1 or self.serve):
            raise ValueError(
                "environment.workers and environment.serve are for services that the run starts, and "
                "environment.addresses names servers that run already: drop them, or the addresses"
            )
        return self

    @property
    def limits(self) -> Limits:
        return Limits(self.max_turns, self.max_actions_per_turn, self.max_actions)

    def with_options(self, options: Mapping[str, Any]) -> EnvironmentConfig:
        """The same, with these options over its own."""
        return self.model_copy(update={"options": {**self.options, **options}})


class SamplingConfig(Section):
    """How replies are sampled, and how long they and their context may be."""

    temperature: float = Field(default=1.0, gt=0, description="Divides the logits, in sampling and in training alike.")
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Below 1 the sampled distribution is not the trained one: refused in training.",
    )
    max_reply_tokens: int = Field(default=400, ge=1, description="Tokens of one reply, its end token included.")
    max_episode_tokens: int = Field(default=3600, ge=2, description="Tokens of a whole context, replies included.")

    @model_validator(mode="after")
    def _whole_distribution(self) -> SamplingConfig:
        if self.top_p < 1:
            raise ValueError(
                "sampling.top_p below 1 samples from another distribution than the one that is trained; leave it at 1"
            )
        return self


class CollectConfig(Section):
    """P groups of N episodes; the members of a group share a start state."""

    groups: int = Field(default=8, ge=1, description="Start states of one collection (P).")
    group_size: int = Field(default=16, ge=1, description="Episodes from each of them (N).")
    min_group_size: int = Field(
        default=2,
        ge=1,
        description="A group with fewer episodes that did not fail is dropped and another is asked for.",
    )
    max_rounds: int = Field(
        default=4, ge=1, description="How often dropped groups are asked for again, in one collection."
    )

    @model_validator(mode="after")
    def _sizes(self) -> CollectConfig:
        if self.min_group_size > self.group_size:
            raise ValueError(
                f"collect.min_group_size {self.min_group_size} is more than group_size {self.group_size}: "
                "every group would be dropped"
            )
        return self


@dataclass(frozen=True, slots=True)
class Start:
    """A group to be played: its id, unique in the run, and the seed of its start state."""

    id: int
    seed: int


class CollectionFailed(Exception):
    """The infrastructure failed so many episodes that no group was left. The message holds the first error."""


@dataclass(slots=True)
class Collected:
    """Groups in the order in which they were asked for, and what became of the rest.

    failed: episodes that the infrastructure failed. error: what failed the first of them; empty where none did.
    dropped: groups that ended up too small.
    latencies: seconds of each call of an environment. seconds: the whole collection, by the wall clock.
    """

    groups: list[Group] = field(default_factory=list)
    failed: int = 0
    error: str = ""
    dropped: int = 0
    latencies: list[float] = field(default_factory=list)
    seconds: float = 0.0


class Player:
    """Plays episodes with a policy: what is fixed for all of them.

    purpose: part of every random stream's seed, so that training and evaluation never share one.
    watch: called with each episode that is over.
    """

    def __init__(
        self,
        fleet: Fleet,
        engine: Engine,
        template: Template,
        *,
        environment: EnvironmentConfig,
        prompt: PromptConfig,
        sampling: SamplingConfig,
        rewards: Rewards,
        seed: int = 0,
        want: Want | None = None,
        actions: Sequence[str] = (),
        watch: Callable[[Episode], None] | None = None,
    ) -> None:
        self.fleet = fleet
        self.engine = engine
        self.template = template
        self.environment = environment
        self.prompt = prompt
        self.sampling = sampling
        self.rewards = rewards
        self.seed = seed
        self.want = want or Want()
        self.actions = tuple(actions)
        self.watch = watch
        self.grammar = Grammar(thinking=prompt.thinking, actions=self.actions)

    # --- groups ------------------------------------------------------------------------------------------------------

    async def collect(
        self,
        starts: Sequence[Start],
        size: int,
        *,
        purpose: str = "train",
        temperature: float | None = None,
        min_size: int = 1,
        environment: EnvironmentConfig | None = None,
    ) -> Collected:
        """Plays `size` episodes from each start, all at once. Groups come back in the order of `starts`.

        environment: instead of the player's own: the same environment with other options.
        Raises what opening raises (the configuration is wrong, or no server is left); an episode that fails later is
        counted and left out.
        """
        began = perf_counter()
        collected = Collected()
        where = environment or self.environment
        tasks = [asyncio.ensure_future(self._play_group(where, start, size, purpose, temperature)) for start in starts]
        try:
            groups = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        for group in groups:
            collected.failed += len(group.failed)
            if group.failed and not collected.error:
                collected.error = group.failed[0].error
            for episode in (*group.episodes, *group.failed):
                collected.latencies.extend(turn.stepping for turn in episode.turns if turn.actions)
            if len(group.episodes) < min_size:
                collected.dropped += 1
            else:
                collected.groups.append(group)
        collected.seconds = perf_counter() - began
        return collected

    async def _play_group(
        self, environment: EnvironmentConfig, start: Start, size: int, purpose: str, temperature: float | None
    ) -> Group:
        sessions = await self.fleet.open(
            environment.id,
            seed=start.seed,
            count=size,
            options=environment.options or None,
            want=self.want,
            limits=environment.limits,
            version=environment.version,
        )
        try:
            episodes = await asyncio.gather(
                *(self.play(session, start.id, purpose=purpose, temperature=temperature) for session in sessions)
            )
        finally:
            await self.fleet.close_sessions(sessions)
        return Group(
            start.id,
            [episode for episode in episodes if not episode.failed],
            [episode for episode in episodes if episode.failed],
        )

    # --- one episode -------------------------------------------------------------------------------------------------

    async def play(
        self, session: Session, group: int = 0, *, purpose: str = "train", temperature: float | None = None
    ) -> Episode:
        """One episode from the session's present state to its end. A failure of the infrastructure is an `end`."""
        episode = Episode.begin(session, group)
        name = f"{purpose}/{group}/{session.member}"
        try:
            await self._play_turns(session, episode, name, purpose, temperature)
        except StarpodError as error:
            episode.end, episode.error = "failed", f"{type(error).__name__}: {error}"
        finally:
            self.engine.forget(name)
        if self.watch is not None:
            self.watch(episode)
        return episode

    async def _play_turns(
        self, session: Session, episode: Episode, name: str, purpose: str, temperature: float | None
    ) -> None:
        limits = session.limits
        prompter = Prompter(self.prompt, session.instructions, self.actions, self.grammar, limits)
        conversation = Conversation(self.template, context=self.prompt.context, window=self.prompt.window)
        conversation.system(prompter.system())
        observation = session.observation
        text, key, agent = observation.text, observation.state_key, observation.agent_id
        reward: float | None = None
        warning = False
        actions_used = 0
        while True:
            number = len(episode.turns) + 1
            actions_left = max(limits.max_actions - actions_used, 0) if limits.max_actions else None
            user = prompter.user(number, text, reward=reward, actions_left=actions_left, warning=warning)
            late = bool(limits.max_turns) and number > (limits.max_turns or 0)
            over: End = episode.end or ("max_turns" if late else "")
            prompt = conversation.ask(user)
            room = self.sampling.max_episode_tokens - len(prompt.context)
            if over or room < 1:
                episode.end = over or "context"
                if episode.end != "terminal":
                    episode.tail, episode.tail_fresh = prompt.appended, prompt.fresh
                episode.final_observation = text
                return
            began = perf_counter()
            reply = await self.engine.generate(
                Request(
                    prompt.context,
                    min(room, self.sampling.max_reply_tokens),
                    self.template.stop,
                    self.sampling.temperature if temperature is None else temperature,
                    1.0,
                    derive(self.seed, "reply", purpose, episode.group, episode.member, number),
                    name,
                )
            )
            generated = perf_counter()
            reply_text = self.template.decode(reply.tokens)
            parsed = self.grammar.parse(reply_text, limits.max_actions_per_turn or None)
            conversation.answer(reply.tokens, reply.finish, reply_text)
            turn = Turn(
                text,
                prompt.appended,
                prompt.fresh,
                reply.tokens,
                reply.logprobs,
                reply.versions,
                reply.finish,
                reply_text,
                parsed.thought,
                list(parsed.actions),
                parsed.well_formed,
                key,
                agent_id=agent,
                generating=generated - began,
            )
            episode.turns.append(turn)
            transition: Transition | None = None
            if parsed.actions:
                transition = await session.step(parsed.actions)
                turn.stepping = perf_counter() - generated
                turn.take(transition)
                if parts := transition.reward_parts:
                    turn.info["reward_parts"] = parts
                actions_used += turn.executed
                observation = transition.observation
                text, key, agent = observation.text, observation.state_key, observation.agent_id
                episode.take(transition)
            turn.parts = self.rewards.score(turn, transition, episode)
            turn.reward = sum(turn.parts.values())
            # What it is told is the environment's own reward: penalties and shaping are for the loss.
            reward = turn.parts["environment"]
            warning = not turn.valid
