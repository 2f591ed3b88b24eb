"""Warm start: demonstrations over the wire, and imitation of them, so that a new policy knows the response grammar."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import Field, model_validator

from starpod.client import Fleet, Limits, Observation, StarpodError
from starpod.trainer.agents.base import Agent, Move, Stop, Task
from starpod.trainer.agents.scripted import REFERENCES, choose_randomly
from starpod.trainer.data.batch import Batch
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.data.files import BadEpisodes, read_episodes
from starpod.trainer.models.config import TINY, ModelConfig
from starpod.trainer.models.policy import Policy
from starpod.trainer.parallel import Parallel
from starpod.trainer.prompts.conversation import Conversation, Template
from starpod.trainer.prompts.grammar import SEPARATOR, Further
from starpod.trainer.prompts.prompt import PromptConfig, Prompter
from starpod.trainer.rollout.play import play
from starpod.trainer.section import ConfigError, Section


class WarmStartConfig(Section):
    """Imitation before reinforcement. Off with 0 steps."""

    steps: int = Field(default=0, ge=0, description="Optimiser steps.")
    episodes: int = Field(
        default=1000, ge=0, description="Demonstrations to play; a fresh tokenizer is trained on them."
    )
    demonstrations: str = Field(
        default="", description="File or folder of episodes to imitate as well, as the live site saves them."
    )
    batch_size: int = Field(default=64, ge=1, description="Episodes of a step.")
    lr: float | None = Field(
        default=None,
        gt=0,
        description="Learning rate; falls to a tenth along a cosine. null: 1e-3 from scratch, 2e-5 for a pretrained "
        "model, 1e-4 for its adapters.",
    )
    actions: Literal["expert", "random"] = Field(
        default="expert",
        description="Imitates the expert, or any valid action, for the format alone.",
    )
    noise: float = Field(
        default=0.2,
        ge=0,
        lt=1,
        description="Share of moves played at random.",
    )
    imitate_noise: bool = Field(
        default=False,
        description="Imitates these moves too.",
    )
    thought: str = Field(
        default="{action}",
        description="Thought of a demonstration: a format string with `action` and `words` (of the observation).",
    )
    blocks: dict[Further, str] = Field(
        default={},
        description="What prompt.blocks hold, likewise; switch, if not given: SWITCH where the subgoal is another one.",
    )

    @model_validator(mode="after")
    def _has_demonstrations(self) -> WarmStartConfig:
        if not (self.episodes or self.demonstrations):
            raise ValueError(
                "warm_start.episodes 0 leaves nothing to imitate: name a file in warm_start.demonstrations"
            )
        if self.demonstrations and not self.steps:
            raise ValueError("warm_start.demonstrations are imitated in warm_start.steps, and these are 0: give some")
        return self

    def rate(self, model: ModelConfig) -> float:
        """Learning rate for a model: one from scratch has all to learn, a pretrained one much to lose."""
        if self.lr is not None:
            return self.lr
        if model.name == TINY:
            return 1e-3
        return 1e-4 if model.lora.rank else 2e-5


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One episode of a demonstrator, an action a turn. limits: those of its session. imitate: for each turn."""

    episode: Episode
    limits: Limits
    imitate: list[bool]


class Demonstrator(Agent):
    """Plays as a reference policy does, with some moves at random. imitate: whether to imitate each turn so far."""

    def __init__(self, config: WarmStartConfig, task: Task, seed: int) -> None:
        self.imitate: list[bool] = []
        self._config = config
        self._task = task
        self._choose, _ = REFERENCES[config.actions]
        self._rng = random.Random(f"demonstration/{seed}")

    async def act(self, observation: Observation, episode: Episode) -> Move | Stop:
        action = self._choose(observation, self._task.actions, self._rng)
        if action is None:
            if not episode.turns:
                raise ConfigError(
                    f"{self._task.environment} shows no {self._config.actions} action to imitate; "
                    "set warm_start.actions to random, or warm_start.steps to 0"
                )
            return Stop()
        noisy = self._rng.random() < self._config.noise
        if noisy:
            action = choose_randomly(observation, self._task.actions, self._rng) or action
        self.imitate.append(self._config.imitate_noise or not noisy)
        return Move(action, [action])


async def collect_demonstrations(
    fleet: Fleet,
    config: WarmStartConfig,
    task: Task,
    seeds: Sequence[int],
) -> list[Demonstration]:
    """Plays one episode per seed.

    Raises ConfigError if the environment has no expert and one is asked for, StarpodError where an episode fails.
    """
    _, want = REFERENCES[config.actions]
    if config.noise and not task.actions:  # then what can be played at random is for the environment to list
        want = replace(want, valid_actions=True)

    async def demonstrate(seed: int) -> Demonstration:
        (session,) = await task.open(fleet, seed, 1, want)
        demonstrator = Demonstrator(config, task, seed)
        try:
            episode = await play(demonstrator, session)
        finally:
            await session.close()
        if episode.failed:
            raise StarpodError(f"a demonstration from seed {seed} failed: {episode.error}")
        return Demonstration(episode, session.limits, demonstrator.imitate)

    return list(await asyncio.gather(*(demonstrate(seed) for seed in seeds)))


def read_demonstrations(path: str, environment: str, limits: Limits) -> list[Demonstration]:
    """The episodes of an environment in a file or folder. Turns with a move that was invalid are not imitated.

    limits: of a session of the environment. Raises ConfigError for a file without one.
    """
    try:
        found = [episode for episode in read_episodes(path) if episode.environment == environment and episode.turns]
    except BadEpisodes as error:
        raise ConfigError(f"warm_start.demonstrations: {error}") from error
    for episode in found:
        episode.turns = [turn for turn in episode.turns if turn.actions]
    if not any(episode.turns for episode in found):
        raise ConfigError(f"warm_start.demonstrations {path} holds no episode of {environment} with an action")
    return [
        Demonstration(episode, limits, [turn.valid == len(turn.actions) for turn in episode.turns])
        for episode in found
        if episode.turns
    ]


class DemonstrationWriter:
    """Writes demonstrations as the policy would have said them: as texts, and as episodes with tokens."""

    def __init__(self, config: WarmStartConfig, prompt: PromptConfig, actions: Sequence[str]) -> None:
        self.config = config
        self.prompt = prompt
        self.actions = tuple(actions)
        self.grammar = prompt.grammar(self.actions)

    def reply(self, turn: Turn, before: Turn | None = None) -> str:
        """The whole reply, with what a prompt may prefill. before: the turn before.

        Raises ConfigError for a thought or a block that does not fit the observation.
        """
        blocks = {name: self._fill(f"blocks.{name}", text, turn) for name, text in self.config.blocks.items()}
        if "switch" not in blocks and (subgoal := self.config.blocks.get("subgoal")) is not None:
            kept = before is not None and self._fill("blocks.subgoal", subgoal, before) == blocks["subgoal"]
            blocks["switch"] = "KEEP" if kept else "SWITCH"
        if missing := [name for name in self.grammar.blocks if name not in blocks]:
            raise ConfigError(
                f"prompt.blocks asks for {missing[0]}, and no demonstration has it: give warm_start.blocks.{missing[0]}"
            )
        thought = turn.thought or self._fill("thought", self.config.thought, turn)
        return self.grammar.compose(thought, turn.actions, blocks)

    def _fill(self, key: str, template: str, turn: Turn) -> str:
        action = f" {SEPARATOR} ".join(turn.actions)
        try:
            return template.format(action=action, words=turn.observation.split())
        except (LookupError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"warm_start.{key} {template!r} cannot be filled in for the observation {turn.observation[:60]!r} "
                f"({type(error).__name__}: {error}): it may use {{action}}, and {{words[0]}} and so on, as many as the "
                "observation has"
            ) from error

    def texts(self, demonstrations: Iterable[Demonstration]) -> Iterable[str]:
        """All that a policy will read or write, for a tokenizer to be trained on."""
        for demonstration in demonstrations:
            prompter = self._prompter(demonstration)
            yield prompter.system()
            for user, text, _ in self._turns(prompter, demonstration):
                yield user
                yield text
            # Demonstrations make no mistakes, so what a policy is told after one would be missing.
            yield prompter.user(2, "", warning=True)

    def episode(self, demonstration: Demonstration, template: Template, group: int) -> Episode:
        """The token record. A turn's reward is its weight in the loss: 1 to imitate, else 0."""
        prompter = self._prompter(demonstration)
        conversation = Conversation.of(template, self.prompt)
        conversation.system(prompter.system())
        episode = replace(demonstration.episode, group=group, turns=[])
        for (user, text, turn), imitate in zip(
            self._turns(prompter, demonstration), demonstration.imitate, strict=True
        ):
            prompt = conversation.ask(user)
            ids = template.encode_reply(text)
            conversation.answer(ids, "stop", text)
            episode.turns.append(
                replace(
                    turn,
                    prompt=prompt.appended,
                    fresh=prompt.fresh,
                    reply=ids,
                    logprobs=[0.0] * len(ids),
                    versions=[0] * len(ids),
                    text=text,
                    reward=float(imitate),
                )
            )
        return episode

    def _prompter(self, demonstration: Demonstration) -> Prompter:
        instructions = demonstration.episode.instructions
        return Prompter(self.prompt, instructions, self.actions, demonstration.limits)

    def _turns(self, prompter: Prompter, demonstration: Demonstration) -> Iterable[tuple[str, str, Turn]]:
        """The user's message before each turn, the reply, and the turn."""
        past = replace(demonstration.episode, turns=[])
        for turn in demonstration.episode.turns:
            text = self.reply(turn, past.turns[-1] if past.turns else None)
            yield prompter.following(past, turn.observation), text, turn
            past.turns.append(replace(turn, executed=1, valid=1))  # a demonstration makes no mistakes


def imitate(
    policy: Policy,
    episodes: Sequence[Episode],
    config: WarmStartConfig,
    parallel: Parallel,
    *,
    lr: float,
    micro_batch_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> float:
    """Trains the policy on the turns whose reward is 1. Returns the last loss, in nats per token.

    The critic is left as it is: returns of a demonstrator are not the policy's.
    """
    usable = [episode for episode in episodes if episode.sampled_tokens and any(turn.reward for turn in episode.turns)]
    if not usable:
        raise ValueError("no demonstration has a turn to imitate; lower warm_start.noise")
    trained = list(policy.trained_parameters())
    optimizer = torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.steps, eta_min=lr / 10)
    rng = random.Random(seed)
    mean = float("nan")
    for step in range(config.steps):
        batch = Batch(rng.sample(usable, min(config.batch_size, len(usable))), parallel.device)
        weights_BT = batch.per_turn([[turn.reward for turn in episode.turns] for episode in batch.episodes], 0.0)
        weights_BT /= weights_BT.sum()
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=parallel.device)
        blocks = batch.micro_batches(range(len(batch)), micro_batch_tokens, policy.tokens_read)
        for block, mine in parallel.share(blocks):
            scores = policy.score(*batch.pack(block), temperature=temperature)
            unpacked = batch.unpack(block)
            loss = -(unpacked.place(scores.logprobs_N) * weights_BT[unpacked.rows]).sum() * float(mine)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        parallel.clip_grad_norm(trained, 1.0)
        optimizer.step()
        schedule.step()
        parallel.sum(total)
        mean = total.item()
        progress(step + 1, mean)
    return mean
