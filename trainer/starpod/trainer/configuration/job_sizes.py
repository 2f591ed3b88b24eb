"""Sizes of the job for an environment: the policy, its context and its steps, from the lengths of test episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from starpod.remote.catalog import options_schema
from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.exploration import Explored
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.models.config import PACKAGED, TinyConfig
from starpod.trainer.warm_start.demonstrations import Demonstration
from starpod.trainer.warm_start.teacher import DemonstrationWriter
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_word import EnvironmentWord

_MOST_TOKENS = 768
"""If a whole episode fits into this number of tokens, replies see all of it even if one observation is enough."""
_MOST_CONTEXT = 4096
"""If a whole episode fits into this number of tokens, replies see all of it. Otherwise they see a window of the last
turns."""
_NOISE = 0.3
_SLOW = 1.0
"""Limit in seconds for the test episodes of an environment without an expert. If they take longer, the warm start plays
500 random episodes and imitates the best half. Otherwise it plays 3000 and imitates the best tenth."""
_IMITATED, _IMITATED_IN_ALL, _COLLECTED = 2048, 655_360, 24_576
"""Numbers of tokens of a warm-start step, of the whole warm start, and of an iteration. Small steps imitate better: for
the same total number of tokens, the loss was 0.38 nats per token with 8 episodes per step, and 0.43 with 32. On an
idle core the warm start takes half a minute, and an iteration two seconds."""
_EVALUATED = 128
"""Number of episodes of an evaluation of a policy from scratch."""
_SPEED = 14_000
"""Number of tokens per second that an iteration processes on an idle core."""


def _servers(word: EnvironmentWord) -> dict[str, Any]:
    """Return the keys of the section `environment` that say where the environment is served."""
    if word.addresses:
        return {"addresses": word.addresses.split(",")}
    return {} if word.id else {"serve": [word.serve]}


def _splits(spec: pb.EnvironmentSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return values of `environment` and of `evaluation`, if the environment has the splits train and test.

    A split with fewer rows than an evaluation has episodes is evaluated once: its rows played again are no evidence.
    """
    schema = options_schema(spec).get("split", {})
    if not {"train", "test"} <= set(schema.get("enum", ())):
        return {}, {}
    rows = schema.get("rows", {}).get("test", _EVALUATED)
    episodes = {"episodes": rows} if rows < _EVALUATED else {}
    return {"options": {"split": "train"}}, {"options": {"split": "test"}, **episodes}


def fixed_values(word: EnvironmentWord, spec: pb.EnvironmentSpec, *, tiny: bool, single_turn: bool) -> dict[str, Any]:
    """Return the values of a job that do not depend on test episodes.

    Args:
        tiny: Whether the policy is a tiny model from scratch instead of a pretrained one.
        single_turn: Whether episodes have one turn, which leaves no later states to compare.
    """
    expert, listed = spec.capabilities.expert_action, bool(spec.action_space.names or spec.capabilities.valid_actions)
    trained, held_out = _splits(spec)
    values: dict[str, Any] = {
        "title": f"{'A tiny policy' if tiny else 'A pretrained model'} learns {spec.title or spec.id}",
        "environment": {"id": spec.id, "max_actions_per_turn": 1, **_servers(word), **trained},
        "prompt": {},
        "algorithm": {
            "preset": "starpo-s",
            "advantage": "grpo" if single_turn else "gigpo",
            # A pretrained model has 64 episodes per collection, which are mostly noise: none of them is dropped.
            "filter": {"value": 0.5 if tiny else 1.0},
            "filter_loss_scaling": "linear",
            "mini_batch_size": 8 if tiny else 16,
            "entropy_coefficient": 0.0,
        },
        "evaluation": {"every": 5, "reference": ["random"] * listed + ["expert"] * expert, **held_out},
    }
    if not tiny:
        return {**values, "model": {"dtype": "auto"}, "stop": {"iterations": 100}}
    # Once most groups have equal rewards, the few others would take full steps, and one run fell from 98 % to 44 %.
    # With an entropy bonus of 0.005, that bonus then outweighed the task: replies exceeded their limit, and a run
    # fell from 98 % to 47 %. A critic's head on a policy that has seen no rewards explains nothing for as long as
    # these runs last, so turns are compared with others from the same state instead.
    return {
        **values,
        "model": {"tiny": {"phrases": True}},
        "prompt": {"thinking": False},
        # Without slower first iterations, the share of well-formed replies fell from 99.7 % to 95 % at this rate.
        "optimizer": {"lr": 0.001, "warmup_iterations": 5},
        "warm_start": _imitation(spec, 0.0),
        "evaluation": {"episodes": _EVALUATED, **values["evaluation"]},
        "stop": {"iterations": 100, "minutes": 3, "success": 0.99},
    }


def _imitation(spec: pb.EnvironmentSpec, seconds: float) -> dict[str, Any]:
    """Return the values of `warm_start` for a policy from scratch. seconds: duration of the test episodes."""
    values: dict[str, Any] = {"steps": 320, "lr": 0.003}
    if not spec.capabilities.expert_action:
        episodes, best = (500, 0.5) if seconds > _SLOW else (3000, 0.1)
        return {**values, "episodes": episodes, "best": best, "actions": "random", "noise": 0.0}
    # Random moves need a list of actions.
    noise = _NOISE if spec.action_space.names or spec.capabilities.valid_actions else 0.0
    return {**values, "episodes": 1000, "best": 0.5 if noise else 1.0, "noise": noise, "imitate_noise": True}


def size_tiny(draft: Config, explored: Explored, turns: int) -> tuple[dict[str, Any], float | None]:
    """Return values for a policy from scratch, and its estimated seconds per episode.

    Args:
        draft: The user's configuration without sizes. `model_fields_set` of its sections has the keys that were given.
        turns: Maximum number of turns of an episode.
    """
    spec, demonstrations = explored.spec, explored.demonstrations
    warm_start = _imitation(spec, explored.seconds)
    reply, turn, mean_turn = _tokens(draft, spec, demonstrations)
    episode = turns * mean_turn  # an untrained policy uses all turns
    prompt, tokens = _chosen_prompt(draft, spec, turn, _rounded(1.25 * turns * turn))
    size = draft.collect.group_size if "group_size" in draft.collect.model_fields_set else 8
    groups = min(max(int(_COLLECTED / (size * episode)), 8), 32)
    batch = min(max(int(_IMITATED / episode), 4), 64)
    steps = min(max(int(_IMITATED_IN_ALL / (batch * episode)), 80), warm_start["steps"])
    values = {
        "base": "tiny",
        "prompt": prompt,
        "sampling": {"max_reply_tokens": reply, "max_episode_tokens": tokens},
        "collect": {"groups": groups, "group_size": size},
        # Use one slot per episode. With fewer, half of all prompts were read again, and collecting took ten times as
        # long.
        "engine": {"slots": max(groups * size, EngineConfig.model_fields["slots"].default)},
        "warm_start": {**warm_start, "batch_size": batch, "steps": steps},
    }
    played_turns = sum(len(demo.episode.turns) for demo in demonstrations)
    return values, episode / _SPEED + explored.seconds / played_turns * turns


def size_pretrained(draft: Config, explored: Explored, turns: int) -> tuple[dict[str, Any], None]:
    """Return values as `size_tiny` does, for a pretrained model, whose replies may reason. The seconds are None."""
    from starpod.trainer.models.hf import load_tokenizer
    from starpod.trainer.prompts.template import Template

    spec, given = explored.spec, draft.sampling.model_fields_set
    template = Template(load_tokenizer(draft.model), prefill=draft.prompt.opening, calls=draft.prompt.calls)
    writer = DemonstrationWriter(draft.warm_start, draft.prompt, tuple(spec.action_space.names), draft.script)
    played = [turn for demo in explored.demonstrations for turn in asyncio.run(writer.episode(demo, template, 0)).turns]
    longest = max(len(turn.reply) for turn in played)
    reply = draft.sampling.max_reply_tokens
    if "max_reply_tokens" not in given and not draft.prompt.thinking:
        reply = max(32, 2 * longest)
    first = max((len(turn.prompt) for turn in played if turn.fresh), default=0)
    turn = max((len(turn.prompt) for turn in played if not turn.fresh), default=first) + reply
    prompt, tokens = _chosen_prompt(draft, spec, turn, _rounded(first + 1.25 * turns * turn))
    small = draft.model.name in PACKAGED
    rate = 1e-5 if small else 1e-5 if draft.model.lora.rank else 1e-6
    values: dict[str, Any] = {
        "prompt": prompt,
        "sampling": {"max_reply_tokens": reply, "max_episode_tokens": max(tokens, first + turn)},
        "collect": {"groups": 8, "group_size": 8},
        "optimizer": {"lr": rate},
    }
    if small:  # a model of this size does not keep to the format unasked
        actions = "expert" if spec.capabilities.expert_action else "random"
        values["warm_start"] = {"steps": 40, "lr": 3e-5, "episodes": 640, "batch_size": 16, "actions": actions}
    return values, None


def _chosen_prompt(draft: Config, spec: pb.EnvironmentSpec, turn: int, whole: int) -> tuple[dict[str, Any], int]:
    """Return the keys of `prompt` that choose the context of a reply, and that context's number of tokens.

    Args:
        draft: The user's configuration, whose context is kept.
        turn: Tokens of the longest turn.
        whole: Tokens of the longest episode.
    """
    if "context" in draft.prompt.model_fields_set:
        return {}, whole
    if spec.capabilities.fully_observed and whole > _MOST_TOKENS:
        return {"context": {"kind": "single_turn", "window": 1}}, _rounded(1.5 * turn)
    if whole <= _MOST_CONTEXT:
        return {}, whole
    turns = max(2, _MOST_CONTEXT // turn)
    return {"context": {"kind": "split", "window": turns, "overlap": turns // 2}}, _rounded(1.25 * turns * turn)


def _tokens(draft: Config, spec: pb.EnvironmentSpec, demonstrations: Sequence[Demonstration]) -> tuple[int, int, float]:
    """Return numbers of tokens: a reply's limit, the longest turn with its reply, and the mean turn with its reply."""
    writer = DemonstrationWriter(draft.warm_start, draft.prompt, tuple(spec.action_space.names), draft.script)
    from starpod.trainer.models.tiny import train_tokenizer  # imports torch

    texts, size = asyncio.run(writer.texts(demonstrations)), TinyConfig().vocabulary
    # Limits are for text without phrases, because new texts may have none.
    words, phrases = train_tokenizer(texts, size=size), train_tokenizer(texts, size=size, phrases=True)
    turns = [turn for demo in demonstrations for turn in demo.episode.turns]
    replies = [writer.reply(turn) for turn in turns]
    reply = max(16, round(1.5 * max(len(words.encode(text)) for text in replies)))
    if "max_reply_tokens" in draft.sampling.model_fields_set:
        reply = draft.sampling.max_reply_tokens
    # In style full, a message also repeats the task and the limits.
    messages = [turn.observation for turn in turns] if draft.prompt.style == "compact" else texts
    longest = max(len(words.encode(text)) for text in messages) + reply + 8
    total = sum(len(phrases.encode(text)) for text in (*replies, *messages))
    return reply, longest, total / len(turns) + 3


def _rounded(tokens: float) -> int:
    """Round up to a multiple of 64."""
    return -int(-tokens // 64) * 64
