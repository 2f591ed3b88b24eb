"""Adapter for verl: an agent loop that plays whole episodes.

    - name: lake
      _target_: starpod.client.adapters.verl.StarpodAgentLoop
      setting: {_target_: starpod.client.adapters.text.Setting, addresses: ..., environment_id: frozen_lake-v1}

The conversation is tokenised by verl, so that exactly the sampled tokens are trained on.
An infrastructure error is raised: verl's TransferQueue trainer marks the group as failed, and its older trainer stops.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.utils.profiler import simple_timer

from starpod.client.adapters.text import Setting, TextEpisode, break_tokens, converse


class StarpodAgentLoop(AgentLoopBase):  # type: ignore[misc] # untyped where verl is not installed
    """An agent loop that plays one trajectory. The row's `extra_info` needs a `seed`; see also Setting.opening."""

    def __init__(self, *args: Any, setting: Setting, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.setting = setting

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Play one episode until it ends or the response is full."""
        episode = await self.setting.open(row.get("extra_info") or {})
        try:
            return await self._play(episode, sampling_params, list(row["raw_prompt"]))
        finally:
            await self.setting.close(episode)

    async def _play(
        self, episode: TextEpisode, sampling_params: dict[str, Any], prompt: list[dict[str, Any]]
    ) -> AgentLoopOutput:
        max_length = self.rollout_config.response_length
        max_turns = self.rollout_config.multi_turn.max_assistant_turns
        request_id = uuid4().hex  # the same for all turns, so that they use the same prefix cache
        timing: dict[str, Any] = {}
        fields: dict[str, Any] = {}
        mask: list[int] = []
        logprobs: list[float] | None = None
        messages = converse(prompt, break_tokens(episode.first, self.tokenizer))
        ids = await self.ct_build_initial_tokens(messages)
        while True:
            with simple_timer("generate_sequences", timing):
                output = await self.server_manager.generate(
                    request_id=request_id, prompt_ids=ids, sampling_params=sampling_params
                )
            fields = fields or dict(output.extra_fields)
            if "max_global_steps" in output.extra_fields:
                fields["max_global_steps"] = output.extra_fields["max_global_steps"]
            room = max_length - len(mask)  # only these tokens are trained on, so only their actions are played
            reply_ids, reply_logprobs = output.token_ids[:room], (output.log_probs or [])[:room]
            if reply_logprobs and logprobs is None:
                logprobs = []
            merged, mask, logprobs = await self.ct_merge_assistant_token(
                ids, reply_ids, mask, logprobs, assistant_logprobs=reply_logprobs or None
            )
            ids = merged.token_ids
            reply = self.tokenizer.decode(reply_ids, skip_special_tokens=True)
            with simple_timer("tool_calls", timing):
                observation = break_tokens(await self.setting.play(episode, reply), self.tokenizer)
            history = [*messages, {"role": "assistant", "content": reply}]
            messages = [*history, {"role": "user", "content": observation}]
            if episode.done or len(mask) >= max_length or len(episode.rewards) == max_turns:
                break
            merged, next_mask, next_logprobs = await self.ct_merge_context_msg(history, messages, ids, mask, logprobs)
            if len(next_mask) >= max_length:
                break
            ids, mask, logprobs = merged.token_ids, next_mask, next_logprobs
        # verl makes a column of each key in reward_extra_info, so all episodes must have the same keys.
        metrics = {"success": float("nan"), **episode.metrics()}
        names = ("success", "turns", "misread_turns", "truncated")
        fields["reward_extra_info"] = {name: metrics[name] for name in names}
        fields |= {"turn_scores": episode.rewards, "tool_rewards": []}
        prompt_length = len(ids) - len(mask)
        return AgentLoopOutput(
            prompt_ids=ids[:prompt_length],
            response_ids=ids[prompt_length:][:max_length],
            response_mask=mask[:max_length],
            response_logprobs=None if logprobs is None else logprobs[:max_length],
            reward_score=episode.reward,
            num_turns=2 * len(episode.rewards),
            metrics=timing,
            extra_fields=fields,
        )
