"""Starpod's environments in verl: an agent loop that plays whole episodes.

    - name: lake
      _target_: starpod.client.adapters.verl.StarpodAgentLoop
      setting: {_target_: starpod.client.adapters.text.Setting, addresses: ..., environment_id: frozen_lake-v1}

verl's own tokeniser of a growing conversation is used: what was sampled is what is trained.
An error of the infrastructure is raised: verl's TransferQueue trainer marks the group as failed, its older one stops.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.utils.profiler import simple_timer

from starpod.client.adapters.text import Episode, Setting, converse


class StarpodAgentLoop(AgentLoopBase):  # type: ignore[misc] # untyped where verl is not installed
    """One trajectory. `extra_info` of the row has a `seed`; see Setting.opening for more. The group has the row."""

    def __init__(self, *args: Any, setting: Setting, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.setting = setting

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Plays one episode, until its end or as long as the response has room."""
        episode = await self.setting.open(row.get("extra_info") or {})
        try:
            return await self._play(episode, sampling_params, list(row["raw_prompt"]))
        finally:
            await self.setting.close(episode)

    async def _play(
        self, episode: Episode, sampling_params: dict[str, Any], prompt: list[dict[str, Any]]
    ) -> AgentLoopOutput:
        most = self.rollout_config.response_length
        most_turns = self.rollout_config.multi_turn.max_assistant_turns
        request_id = uuid4().hex  # the same for all turns, so that they meet the same cache
        timing: dict[str, Any] = {}
        fields: dict[str, Any] = {}
        mask: list[int] = []
        logprobs: list[float] | None = None
        messages = converse(prompt, episode.first)
        ids = await self.ct_build_initial_tokens(messages)
        while True:
            with simple_timer("generate_sequences", timing):
                output = await self.server_manager.generate(
                    request_id=request_id, prompt_ids=ids, sampling_params=sampling_params
                )
            fields = fields or dict(output.extra_fields)
            if "max_global_steps" in output.extra_fields:
                fields["max_global_steps"] = output.extra_fields["max_global_steps"]
            if output.log_probs and logprobs is None:
                logprobs = []
            merged, mask, logprobs = await self.ct_merge_assistant_token(
                ids, output.token_ids, mask, logprobs, assistant_logprobs=output.log_probs or None
            )
            ids = merged.token_ids
            reply = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
            with simple_timer("tool_calls", timing):
                shown = await self.setting.play(episode, reply)
            said = [*messages, {"role": "assistant", "content": reply}]
            messages = [*said, {"role": "user", "content": shown}]
            if episode.done or len(mask) >= most or len(episode.rewards) == most_turns:
                break
            merged, next_mask, next_logprobs = await self.ct_merge_context_msg(said, messages, ids, mask, logprobs)
            if len(next_mask) >= most:
                break
            ids, mask, logprobs = merged.token_ids, next_mask, next_logprobs
        # verl makes a column of each name in reward_extra_info: every episode has the same ones.
        known = {"success": float("nan"), **episode.metrics()}
        fields["reward_extra_info"] = {name: known[name] for name in ("success", "turns", "misread_turns", "truncated")}
        fields |= {"turn_scores": episode.rewards, "tool_rewards": []}
        start = len(ids) - len(mask)
        return AgentLoopOutput(
            prompt_ids=ids[:start],
            response_ids=ids[start:][:most],
            response_mask=mask[:most],
            response_logprobs=None if logprobs is None else logprobs[:most],
            reward_score=episode.reward,
            num_turns=2 * len(episode.rewards),
            metrics=timing,
            extra_fields=fields,
        )
