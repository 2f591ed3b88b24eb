"""Adapter for TRL's GRPOTrainer: environments as tools (`environment_factory`) or conversations (`rollout_func`).

    trainer = GRPOTrainer(model, environment_factory=EnvironmentFactory(setting), reward_funcs=[log_episodes], ...)
    trainer = GRPOTrainer(model, rollout_func=Rollouts(setting), reward_funcs=[episode_reward], ...)

A failed episode has the reward None, so TRL excludes the episode from its group and gives it no advantage.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starpod.client.adapters.text import Reader, Setting, TextEpisode, break_tokens, converse
from starpod.client.errors import StarpodError

# --- environment_factory: the model calls a tool -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolReader(Reader):
    """Parser of the argument of the tool `act`: it splits the whole text at the separator."""

    tag: str | None = None

    def ask(self, most: int) -> str:
        form = Reader.ask(self, most).removeprefix("Reply with ").removesuffix(", and nothing else.")
        return f"Call the tool act with {form}."


class StarpodEnvironment:
    """The environment of one rollout. TRL reuses it after `reset`.

    Attributes:
        episode: the current episode; None before the first reset.
        failure: the error that ended the episode, if any.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self.episode: TextEpisode | None = None
        self.failure: Exception | None = None
        # TRL runs the tool calls of one message concurrently, and the first of them may end the episode.
        self._turn = asyncio.Lock()

    def reset(self, **row: Any) -> str:
        """Open the episode of a row. Returns instructions and first observation, to append to the row's prompt."""
        fleet = self._setting.shared_fleet()
        if self.episode is not None:
            fleet.run(self._setting.close(self.episode))
        self.failure = None
        self.episode = fleet.run(self._setting.open(row))
        content = row["prompt"][-1]["content"] if row.get("prompt") else ""
        return f"\n\n{self.episode.first}" if content else self.episode.first

    async def act(self, action: str) -> str:
        """Plays one turn in the environment.

        Args:
            action: What to do.

        Returns:
            What you see after it.
        """
        assert self.episode is not None, "TRL resets an environment before it calls a tool"
        async with self._turn:
            if self.failure is not None:
                raise self.failure
            if self.episode.done:
                return "The episode is over."
            try:
                # The model may pass an argument of another type than str.
                observation = await self._setting.play(self.episode, action if isinstance(action, str) else str(action))
            except Exception as error:
                # TRL shows the error to the model as the tool's result and continues, so keep it for get_reward.
                self.failure = error
                raise
            return f"{observation}\nThe episode is over." if self.episode.done else observation

    def get_reward(self) -> float | None:
        """Return the sum of the rewards of all turns, or None if the episode failed."""
        assert self.episode is not None, "TRL resets an environment before it asks for the reward"
        return None if self.failure is not None else self.episode.reward


@dataclass(frozen=True)
class EnvironmentFactory:
    """An `environment_factory` for GRPOTrainer. The data set needs a column `seed`; see also Setting.opening."""

    setting: Setting

    def __call__(self) -> StarpodEnvironment:
        reader = self.setting.reader
        if type(reader) is Reader:
            reader = ToolReader(separator=reader.separator)
        return StarpodEnvironment(replace(self.setting, reader=reader))


def log_episodes(
    environments: Sequence[Any], log_metric: Callable[[str, float], None] | None = None, **_: Any
) -> list[None]:
    """Log the mean metrics of the episodes and the share of failed episodes. This reward function gives no reward."""
    instances = [environment for environment in environments if isinstance(environment, StarpodEnvironment)]
    _log([None if env.failure or env.episode is None else env.episode.metrics() for env in instances], log_metric)
    return [None] * len(environments)


# --- rollout_func: model and environment take turns in a conversation ----------------------------------------------


class Rollouts:
    """A `rollout_func` for GRPOTrainer. It plays the episodes of a batch concurrently, as conversations without tools.

    TRL passes only prompts, so the last message of a prompt must hold the keys that Setting.opening reads from a row:
    `{"role": "user", "content": "", "seed": 7}`. Replies are never tokenised again, so that exactly the sampled tokens
    are trained on.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def __call__(self, prompts: list[list[dict[str, Any]]], trainer: Any) -> dict[str, Any]:
        fleet = self.setting.shared_fleet()
        episodes = fleet.run(self.open(prompts))
        try:
            return self._play(prompts, trainer, episodes)
        finally:
            fleet.run(fleet.fleet.close_sessions([episode.session for episode in episodes]))

    async def open(self, prompts: list[list[dict[str, Any]]]) -> list[TextEpisode]:
        """Open the episode of each prompt. Dynamics seeds are drawn anew, unless the prompt has one."""
        for prompt in prompts:
            self.setting.opening(prompt[-1])  # a bad row is refused before any session is open
        return await asyncio.gather(*(self.setting.open(prompt[-1]) for prompt in prompts))

    def _play(self, prompts: list[list[dict[str, Any]]], trainer: Any, episodes: list[TextEpisode]) -> dict[str, Any]:
        fleet = self.setting.shared_fleet()
        streams = []
        for prompt, episode in zip(prompts, episodes, strict=True):
            messages = [{"role": message["role"], "content": message["content"]} for message in prompt]
            first = break_tokens(episode.first, trainer.processing_class)
            streams.append(_Stream(trainer, converse(messages, first)))
        failures: dict[int, BaseException] = {}
        slots = list(range(len(prompts)))
        while slots:
            replies = _generate(trainer, [streams[slot] for slot in slots])
            sessions = [episodes[slot].session for slot in slots]
            turns = [self.setting.reader.read(reply) for reply in replies]
            results = fleet.run(fleet.fleet.step_many(sessions, turns, return_exceptions=True))
            running_slots = []
            for slot, result in zip(slots, results, strict=True):
                if isinstance(result, StarpodError):
                    failures[slot] = result
                elif isinstance(result, BaseException):
                    raise result
                else:
                    observation = episodes[slot].take(result)
                    if not episodes[slot].done and streams[slot].show(observation):
                        running_slots.append(slot)
            slots = running_slots
        if len(failures) == len(prompts):
            raise next(iter(failures.values()))
        for slot in failures:
            streams[slot].mask = [0] * len(streams[slot].mask)
        has_logprobs = all(stream.logprobs is not None for stream in streams)
        return {
            "prompt_ids": [stream.prompt for stream in streams],
            "completion_ids": [stream.ids for stream in streams],
            "logprobs": [stream.logprobs for stream in streams] if has_logprobs else None,
            "env_mask": [stream.mask for stream in streams],
            "episode_rewards": [None if slot in failures else episode.reward for slot, episode in enumerate(episodes)],
            "episode_metrics": [
                None if slot in failures else episode.metrics() for slot, episode in enumerate(episodes)
            ],
        }


def episode_reward(
    episode_rewards: list[float | None],
    episode_metrics: list[dict[str, float] | None],
    log_metric: Callable[[str, float], None] | None = None,
    **_: Any,
) -> list[float | None]:
    """Return the environment's reward of each episode, None for failed ones. Use this function with Rollouts.

    Args:
        episode_rewards: sum of the rewards of each episode, from Rollouts.
        episode_metrics: metrics of each episode, from Rollouts; None for failed ones.
        log_metric: TRL's function that logs a value under a name; by default nothing is logged.
    """
    _log(episode_metrics, log_metric)
    return episode_rewards


class _Stream:
    """The tokens of one conversation, append-only: the prompt, then replies (mask 1) and observations (mask 0)."""

    def __init__(self, trainer: Any, messages: list[dict[str, Any]]) -> None:
        self._trainer = trainer
        self._max_length: int = trainer.max_completion_length
        self.prompt = self._encode(messages, add_generation_prompt=True)
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] | None = []

    def reply(self, ids: list[int], logprobs: list[float] | None) -> list[int]:
        """Append a sampled reply, cut to the remaining room, and return the ids that were kept."""
        ids = ids[: self._max_length - len(self.ids)]
        self.ids += ids
        self.mask += [1] * len(ids)
        if logprobs is None or self.logprobs is None:
            self.logprobs = None
        else:
            self.logprobs += logprobs[: len(ids)]
        return ids

    def show(self, text: str) -> bool:
        """Append the text that the model sees next and return True, or return False if no reply would fit after it."""
        text = break_tokens(text, self._trainer.processing_class)
        messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": "."}]
        prefix_ids = self._encode(messages, add_generation_prompt=False)
        full_ids = self._encode([*messages, {"role": "user", "content": text}], add_generation_prompt=True)
        end_indices = [index for index, token in enumerate(prefix_ids) if token in self._trainer.eos_token_ids]
        if not end_indices or full_ids[: end_indices[-1] + 1] != prefix_ids[: end_indices[-1] + 1]:
            raise ValueError(
                "The chat template does not close a reply with an end token, or renders a reply differently once more"
                " follows: a conversation cannot grow by appending. Use another template, or EnvironmentFactory."
            )
        # Skip the template's end token if the model sampled it.
        has_end_token = bool(self.ids) and self.ids[-1] in self._trainer.eos_token_ids
        added_ids = full_ids[end_indices[-1] + 1 if has_end_token else end_indices[-1] :]
        if len(self.ids) + len(added_ids) >= self._max_length:
            return False
        self.ids += added_ids
        self.mask += [0] * len(added_ids)
        if self.logprobs is not None:
            self.logprobs += [0.0] * len(added_ids)
        return True

    def _encode(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> list[int]:
        ids: list[int] = self._trainer.processing_class.apply_chat_template(
            messages,
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            return_dict=False,
            **self._trainer.chat_template_kwargs,
        )
        return ids


def _generate(trainer: Any, streams: list[_Stream]) -> list[str]:
    """Sample the next reply of each conversation with the trainer's engine. TRL has no public method for that."""
    ids, logprobs = trainer._generate_single_turn(
        [stream.prompt + stream.ids for stream in streams], None, {}, num_generations=1
    )
    kept_ids = [  # only these are trained on, so only their actions are played
        stream.reply(ids[slot], None if logprobs is None else logprobs[slot]) for slot, stream in enumerate(streams)
    ]
    texts: list[str] = trainer.processing_class.batch_decode(kept_ids, skip_special_tokens=True)
    return texts


def _log(metrics: Sequence[dict[str, float] | None], log_metric: Callable[[str, float], None] | None) -> None:
    if log_metric is None or not metrics:
        return
    episode_metrics = [episode for episode in metrics if episode is not None]
    log_metric("starpod/failed", 1 - len(episode_metrics) / len(metrics))
    for name in sorted({name for episode in episode_metrics for name in episode}):
        values = [episode[name] for episode in episode_metrics if name in episode]
        log_metric(f"starpod/{name}", sum(values) / len(values))
