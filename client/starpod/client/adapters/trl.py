"""Starpod's environments in TRL's GRPOTrainer: as tools (`environment_factory`), or as a conversation (`rollout_func`).

    trainer = GRPOTrainer(model, environment_factory=EnvironmentFactory(setting), reward_funcs=[log_episodes], ...)
    trainer = GRPOTrainer(model, rollout_func=Rollouts(setting), reward_funcs=[episode_reward], ...)

An episode that failed has no reward (None), which TRL leaves out of its group and gives no advantage.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starpod.client.adapters.text import Episode, Reader, Setting, converse
from starpod.client.errors import StarpodError

# --- environment_factory: the model calls a tool -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolReader(Reader):
    """Reads the argument of the tool `act`: its text, cut at the separator."""

    tag: str | None = None

    def ask(self, most: int) -> str:
        form = Reader.ask(self, most).removeprefix("Reply with ").removesuffix(", and nothing else.")
        return f"Call the tool act with {form}."


class StarpodEnvironment:
    """What `environment_factory` makes: one for each rollout of a batch, used again after `reset`.

    episode: the one that is played; None before the first reset. failure: the error that ended it, if one did.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self.episode: Episode | None = None
        self.failure: Exception | None = None
        # TRL runs the calls of one message side by side, and the first may end the episode.
        self._turn = asyncio.Lock()

    def reset(self, **row: Any) -> str:
        """Opens the episode of a row of the data set: instructions and first observation, for the end of its prompt."""
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
                # What a model writes as an argument need not be of the type that was asked for.
                shown = await self._setting.play(self.episode, action if isinstance(action, str) else str(action))
            except Exception as error:
                # TRL shows it to the model as the tool's result and goes on: get_reward remembers it.
                self.failure = error
                raise
            return f"{shown}\nThe episode is over." if self.episode.done else shown

    def get_reward(self) -> float | None:
        """The rewards of all turns together; None if the episode failed."""
        assert self.episode is not None, "TRL resets an environment before it asks for the reward"
        return None if self.failure is not None else self.episode.reward


@dataclass(frozen=True)
class EnvironmentFactory:
    """For GRPOTrainer's `environment_factory`. The data set has a column `seed`; see Setting.opening for more."""

    setting: Setting

    def __call__(self) -> StarpodEnvironment:
        reader = self.setting.reader
        if type(reader) is Reader:
            reader = ToolReader(separator=reader.separator)
        return StarpodEnvironment(replace(self.setting, reader=reader))


def log_episodes(
    environments: Sequence[Any], log_metric: Callable[[str, float], None] | None = None, **_: Any
) -> list[None]:
    """A reward function that rewards nothing and logs the mean numbers of the episodes, and how many failed."""
    ours = [environment for environment in environments if isinstance(environment, StarpodEnvironment)]
    _log([None if each.failure or each.episode is None else each.episode.metrics() for each in ours], log_metric)
    return [None] * len(environments)


# --- rollout_func: the model speaks, the environment answers -------------------------------------------------------


class Rollouts:
    """For GRPOTrainer's `rollout_func`: whole episodes, all of a batch side by side, without tools.

    TRL hands over prompts alone, so what Setting.opening reads from a row stands in the last message of each prompt:
    `{"role": "user", "content": "", "seed": 7}`. Prompts with equal ones are opened as one group.
    What was sampled is what is trained: replies are never encoded again.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def __call__(self, prompts: list[list[dict[str, Any]]], trainer: Any) -> dict[str, Any]:
        fleet = self.setting.shared_fleet()
        episodes = fleet.run(self._open(prompts))
        try:
            return self._play(prompts, trainer, episodes)
        finally:
            fleet.run(fleet.fleet.close_sessions([episode.session for episode in episodes]))

    async def _open(self, prompts: list[list[dict[str, Any]]]) -> list[Episode]:
        groups: dict[str, tuple[dict[str, Any], list[int]]] = {}
        for slot, prompt in enumerate(prompts):
            arguments = self.setting.opening(prompt[-1])
            groups.setdefault(repr(arguments), (arguments, []))[1].append(slot)
        fleet = self.setting.shared_fleet().fleet
        opened = await asyncio.gather(
            *(fleet.open(**arguments, count=len(slots)) for arguments, slots in groups.values())
        )
        by_slot = {
            slot: session
            for sessions, (_, slots) in zip(opened, groups.values(), strict=True)
            for slot, session in zip(slots, sessions, strict=True)
        }
        return [Episode(by_slot[slot], self.setting.reader) for slot in range(len(prompts))]

    def _play(self, prompts: list[list[dict[str, Any]]], trainer: Any, episodes: list[Episode]) -> dict[str, Any]:
        fleet = self.setting.shared_fleet()
        streams = []
        for prompt, episode in zip(prompts, episodes, strict=True):
            said = [{"role": message["role"], "content": message["content"]} for message in prompt]
            streams.append(_Stream(trainer, converse(said, episode.first)))
        failures: dict[int, BaseException] = {}
        live = list(range(len(prompts)))
        while live:
            replies = _generate(trainer, [streams[slot] for slot in live])
            sessions = [episodes[slot].session for slot in live]
            turns = [self.setting.reader.read(reply) for reply in replies]
            results = fleet.run(fleet.fleet.step_many(sessions, turns, return_exceptions=True))
            still = []
            for slot, result in zip(live, results, strict=True):
                if isinstance(result, StarpodError):
                    failures[slot] = result
                elif isinstance(result, BaseException):
                    raise result
                else:
                    shown = episodes[slot].take(result)
                    if not episodes[slot].done and streams[slot].show(shown):
                        still.append(slot)
            live = still
        if len(failures) == len(prompts):
            raise next(iter(failures.values()))
        for slot in failures:
            streams[slot].mask = [0] * len(streams[slot].mask)
        sampled = all(stream.logprobs is not None for stream in streams)
        return {
            "prompt_ids": [stream.prompt for stream in streams],
            "completion_ids": [stream.ids for stream in streams],
            "logprobs": [stream.logprobs for stream in streams] if sampled else None,
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
    """The reward function that goes with Rollouts: what the environment gave, None where an episode failed."""
    _log(episode_metrics, log_metric)
    return episode_rewards


class _Stream:
    """The tokens of one conversation, append-only: the prompt, then replies (mask 1) and what was shown (mask 0)."""

    def __init__(self, trainer: Any, messages: list[dict[str, Any]]) -> None:
        self._trainer = trainer
        self._most: int = trainer.max_completion_length
        self.prompt = self._encode(messages, add_generation_prompt=True)
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] | None = []

    def reply(self, ids: list[int], logprobs: list[float] | None) -> None:
        """Takes over what was sampled, as far as there is room."""
        ids = ids[: self._most - len(self.ids)]
        self.ids += ids
        self.mask += [1] * len(ids)
        if logprobs is None or self.logprobs is None:
            self.logprobs = None
        else:
            self.logprobs += logprobs[: len(ids)]

    def show(self, text: str) -> bool:
        """Adds what the model sees next. False, and nothing is added, if no room is left for a reply."""
        before = [{"role": "user", "content": "."}, {"role": "assistant", "content": "."}]
        past = self._encode(before, add_generation_prompt=False)
        both = self._encode([*before, {"role": "user", "content": text}], add_generation_prompt=True)
        ends = [place for place, token in enumerate(past) if token in self._trainer.eos_token_ids]
        if not ends or both[: ends[-1] + 1] != past[: ends[-1] + 1]:
            raise ValueError(
                "The chat template does not close a reply with an end token, or renders a reply differently once more"
                " follows: a conversation cannot grow by appending. Use another template, or EnvironmentFactory."
            )
        # The template's end token is left out where the model sampled it.
        ended = bool(self.ids) and self.ids[-1] in self._trainer.eos_token_ids
        added = both[ends[-1] + 1 if ended else ends[-1] :]
        if len(self.ids) + len(added) >= self._most:
            return False
        self.ids += added
        self.mask += [0] * len(added)
        if self.logprobs is not None:
            self.logprobs += [0.0] * len(added)
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
    """The next reply of each, sampled by the trainer's own engine. Private to TRL, as is all that could do it."""
    ids, logprobs = trainer._generate_single_turn(
        [stream.prompt + stream.ids for stream in streams], None, {}, num_generations=1
    )
    for slot, stream in enumerate(streams):
        stream.reply(ids[slot], None if logprobs is None else logprobs[slot])
    texts: list[str] = trainer.processing_class.batch_decode(ids, skip_special_tokens=True)
    return texts


def _log(metrics: Sequence[dict[str, float] | None], log_metric: Callable[[str, float], None] | None) -> None:
    if log_metric is None or not metrics:
        return
    good = [each for each in metrics if each is not None]
    log_metric("starpod/failed", 1 - len(good) / len(metrics))
    for name in sorted({name for each in good for name in each}):
        values = [each[name] for each in good if name in each]
        log_metric(f"starpod/{name}", sum(values) / len(values))
