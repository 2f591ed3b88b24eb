"""Conversion between episodes and ATIF, the Agent Trajectory Interchange Format of Harbor.

See https://harborframework.com/docs/trajectory-format (RFC 0001). Data for which ATIF has no field is in `extra`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from starpod.trainer.data.episode import Episode, Turn, prompt_lengths

VERSION = "ATIF-v1.7"
"""ATIF version. No feature of a later version is used, and readers accept older ones."""
TOOL = "act"
"""Name of the tool that represents the environment. Each action is a call to it."""


def to_atif(episode: Episode, name: str, *, model: str = "", tokens: bool = False) -> dict[str, Any]:
    """Convert an episode to an ATIF trajectory, as JSON values. The episode must have at least one turn.

    Args:
        name: Unique name among all exported episodes.
        tokens: Include the ids of every prompt and reply, the sampler's log-probabilities and policy versions.
    """
    steps: list[dict[str, Any]] = []
    if episode.instructions:
        steps.append({"source": "system", "message": episode.instructions})
    steps.append({"source": "user", "message": episode.turns[0].observation})
    observations = [*(turn.observation for turn in episode.turns[1:]), episode.final_observation]
    context: list[int] = []
    lengths = prompt_lengths(episode.turns)
    for number, (turn, observation) in enumerate(zip(episode.turns, observations, strict=True)):
        context = turn.prompt.copy() if turn.fresh else context + turn.prompt
        steps.append(_step(turn, f"turn-{number}", observation, context if tokens else None, lengths[number]))
        context += turn.reply
    token_count = sum(len(turn.reply) for turn in episode.turns)
    facts = ("environment", "version", "seed", "dynamics_seed", "group", "member", "task", "parent")
    trajectory: dict[str, Any] = {
        "schema_version": VERSION,
        "session_id": name,
        "trajectory_id": name,
        "agent": {"name": "starpod", "version": installed_version(), **({"model_name": model} if model else {})},
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, 1)],
        "final_metrics": {
            **({"total_prompt_tokens": sum(lengths), "total_completion_tokens": token_count} if token_count else {}),
            "total_steps": len(steps),
            "extra": {"reward": episode.total_reward, "success": episode.success, "end": episode.end},
        },
        "extra": {fact: getattr(episode, fact) for fact in facts},
    }
    if episode.error:
        trajectory["extra"]["error"] = episode.error
    return trajectory


def _step(turn: Turn, name: str, observation: str, context: list[int] | None, prompt_tokens: int) -> dict[str, Any]:
    calls = [
        {"tool_call_id": f"{name}.{index}", "function_name": TOOL, "arguments": {"action": action}}
        for index, action in enumerate(turn.actions)
    ]
    step: dict[str, Any] = {"source": "agent", "message": turn.text}
    if turn.thought is not None:
        step["reasoning_content"] = turn.thought
    result: dict[str, Any] = {"content": observation}
    if calls:
        step["tool_calls"] = calls
        result["source_call_id"] = calls[-1]["tool_call_id"]  # the actions of a turn have one common result
    step["observation"] = {"results": [result]}
    if turn.reply:
        metrics: dict[str, Any] = {"prompt_tokens": prompt_tokens, "completion_tokens": len(turn.reply)}
        if context is not None:
            metrics |= {
                "prompt_token_ids": context.copy(),
                "completion_token_ids": turn.reply,
                "logprobs": turn.logprobs,
                "extra": {"policy_versions": turn.versions},
            }
        step["metrics"], step["llm_call_count"] = metrics, 1
    extras = {"well_formed": turn.well_formed, "criteria": turn.criteria, "agent_id": turn.agent_id, "info": turn.info}
    step["extra"] = {"reward": turn.reward, "reward_parts": turn.parts} | {k: extras[k] for k in extras if extras[k]}
    return step


def from_atif(trajectory: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trajectory as the values of a conversation, for `parse_chat`. Raises ValueError if it is none."""
    try:
        is_ours = trajectory["agent"]["name"] == "starpod"
        messages = [message for step in trajectory["steps"] for message in _messages(step, is_ours)]
        metrics = (trajectory.get("final_metrics") or {}).get("extra") or {}
        facts: dict[str, Any] = {}
        if is_ours:
            facts = {name: trajectory["extra"][name] for name in ("environment", "seed")}
            # The reward in `metrics` has penalties and shaping.
            extras = [step["extra"] for step in trajectory["steps"] if step["source"] == "agent"]
            facts["reward"] = sum(extra["reward_parts"].get("environment", extra["reward"]) for extra in extras)
            facts["failed"] = metrics.get("end") == "failed"
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"not a trajectory of ATIF: {type(error).__name__}: {error}") from None
    return {"messages": messages, "reward": metrics.get("reward"), "success": metrics.get("success"), **facts}


def _messages(step: Mapping[str, Any], is_ours: bool) -> list[dict[str, Any]]:
    """Return a step as messages in OpenAI's format, its observation included.

    The texts of our replies contain the thought and the actions, so these are left out.
    """
    if step["source"] != "agent":
        return [{"role": step["source"], "content": step["message"]}]
    messages: list[dict[str, Any]] = [{"role": "assistant", "content": step.get("message") or ""}]
    if (thought := step.get("reasoning_content")) and not is_ours:
        messages[0]["reasoning_content"] = thought
    if (calls := step.get("tool_calls")) and not is_ours:
        messages[0]["tool_calls"] = [
            {
                "id": call["tool_call_id"],
                "type": "function",
                "function": {"name": call["function_name"], "arguments": call["arguments"]},
            }
            for call in calls
        ]
    for result in (step.get("observation") or {}).get("results", ()):
        source = None if is_ours else result.get("source_call_id")
        origin = {"role": "tool", "tool_call_id": source} if source else {"role": "user"}
        messages.append({**origin, "content": result.get("content") or ""})
    return messages


def installed_version() -> str:
    """Return the version of Starpod, "unknown" for a source tree that is not installed."""
    try:
        return version("starpod")
    except PackageNotFoundError:
        return "unknown"
