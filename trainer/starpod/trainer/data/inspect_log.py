"""Conversion of episodes to logs of Inspect, the evaluation framework of the UK AI Security Institute.

Its viewer opens them. See https://inspect.aisi.org.uk/eval-logs.html. Data without a field of its own is in `metadata`.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from statistics import fmean
from typing import Any

from starpod.trainer.data.atif import installed_version
from starpod.trainer.data.episode import Episode, Turn, part_sums, prompt_lengths

VERSION = 2
"""Version of Inspect's log format."""
UNNAMED = "starpod"
"""Name of a model whose name is unknown: a log must name one."""


def to_inspect(episodes: Sequence[Episode], name: str, created: datetime, *, model: str = "") -> dict[str, Any]:
    """Convert episodes of one environment to a log, as JSON values. Each episode is a sample.

    A sample's id is the seed of its start state, and its epoch numbers the episodes of that seed from 1. Its scores are
    `success`, if the environment can say, and `reward`. An episode that failed has an error and no scores.

    Args:
        episodes: The episodes, at least one.
        name: Unique name of the log.
    """
    model, epochs = model or UNNAMED, Counter[int]()
    samples = []
    for episode in episodes:
        epochs[episode.seed] += 1
        samples.append(_sample(episode, epochs[episode.seed], model))
    first, time = episodes[0], created.isoformat()
    played_episodes = [episode for episode in episodes if not episode.failed]
    outcomes = [episode.success for episode in played_episodes if episode.success is not None]
    scores = [_score("success", "accuracy", outcomes)] if outcomes else []
    scores += [_score("reward", "mean", [episode.own_return for episode in played_episodes])] if played_episodes else []
    return {
        "version": VERSION,
        "status": "success",
        "eval": {
            "eval_id": name,
            "run_id": name,
            "task_id": name,
            "created": time,
            "task": first.kind,
            "task_version": first.version or 0,
            "dataset": {
                "name": first.environment,
                "samples": len(epochs),
                "sample_ids": [str(seed) for seed in epochs],
            },
            "model": model,
            "config": {"epochs": max(epochs.values())},
            "packages": {"starpod": installed_version()},
        },
        "plan": {"name": "plan", "steps": [], "config": {}},
        "results": {"total_samples": len(samples), "completed_samples": len(played_episodes), "scores": scores},
        "stats": {"started_at": time, "completed_at": time, "model_usage": {model: _usage(episodes)}},
        "samples": samples,
    }


def _score(name: str, metric: str, values: Sequence[float]) -> dict[str, Any]:
    return {"name": name, "scorer": name, "metrics": {metric: {"name": metric, "value": fmean(values)}}}


def _usage(episodes: Sequence[Episode]) -> dict[str, int]:
    tokens_in = tokens_out = 0
    for episode in episodes:
        tokens_in += episode.usage.get("prompt_tokens", sum(prompt_lengths(episode.turns)))
        tokens_out += episode.usage.get("completion_tokens", sum(len(turn.reply) for turn in episode.turns))
    return {"input_tokens": tokens_in, "output_tokens": tokens_out, "total_tokens": tokens_in + tokens_out}


def _sample(episode: Episode, epoch: int, model: str) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if episode.instructions:
        messages.append({"role": "system", "content": episode.instructions})
    for turn in episode.turns:
        messages += [{"role": "user", "content": _content(turn.observation, turn.image)}, _reply(turn, model)]
    last_turn = episode.turns[-1]
    choice = {"message": messages[-1], "stop_reason": "max_tokens" if last_turn.finish == "length" else "stop"}
    if episode.final_observation:
        messages.append({"role": "user", "content": _content(episode.final_observation, episode.final_image)})
    facts = ("environment", "version", "seed", "dynamics_seed", "group", "member", "task", "end")
    sample: dict[str, Any] = {
        "id": str(episode.seed),
        "epoch": epoch,
        "input": episode.turns[0].observation,
        "target": "",
        "messages": [{"id": str(number), **message} for number, message in enumerate(messages)],
        "output": {"model": model, "choices": [choice]},
        "metadata": {fact: getattr(episode, fact) for fact in facts} | {"reward_parts": part_sums(episode.turns)},
        "model_usage": {model: _usage([episode])},
        "total_time": sum(turn.generating + turn.stepping for turn in episode.turns),
    }
    if episode.failed:
        return sample | {"error": {"message": episode.error, "traceback": episode.error, "traceback_ansi": ""}}
    verdicts = {} if episode.success is None else {"success": {"value": "C" if episode.success else "I"}}
    return sample | {"scores": {**verdicts, "reward": {"value": episode.own_return, "answer": last_turn.text}}}


def _content(text: str, image: bytes) -> str | list[dict[str, str]]:
    if not image:
        return text
    url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    return [{"type": "text", "text": text}, {"type": "image", "image": url}]


def _reply(turn: Turn, model: str) -> dict[str, Any]:
    facts = {"actions": turn.actions, "reward_parts": turn.parts, "criteria": turn.criteria, "agent_id": turn.agent_id}
    metadata = {name: value for name, value in facts.items() if value}
    return {"role": "assistant", "source": "generate", "content": turn.text, "model": model, "metadata": metadata}
