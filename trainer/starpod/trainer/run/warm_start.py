"""The warm start of a run: playing reference policies, and imitating demonstrations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from starpod.trainer.checkpoints.state import join_parts, split_parts
from starpod.trainer.configuration.seeds import derive
from starpod.trainer.data.episode import Episode, turns_of
from starpod.trainer.evaluation.held_out import HeldOut
from starpod.trainer.learner import Learner
from starpod.trainer.run.progress import Shared
from starpod.trainer.run.weights import EngineWeights
from starpod.trainer.warm_start.imitation import Imitation


class WarmStart:
    """Warm start of the policies. A checkpoint can save it between two steps of imitation.

    Attributes:
        demonstrations: Episodes to imitate.
        references: Metrics of the reference policies by task and policy, once they have been played.
        over: Whether training has begun.
    """

    def __init__(
        self,
        shared: Shared,
        learner: Learner,
        demonstrations: Sequence[Episode],
        *,
        held_out: HeldOut,
        weights: EngineWeights,
    ) -> None:
        self.demonstrations = demonstrations
        self.references: dict[str, Any] = {}
        self.over = False
        self._shared = shared
        self._learner = learner
        self._held_out = held_out
        self._weights = weights
        self._imitations: dict[str, Imitation] = {}

    async def run(self) -> bool:
        """Play the reference policies, then imitate the demonstrations, continuing from a checkpoint if there is one.

        Returns:
            Whether anything was imitated.

        Raises:
            Interrupted: A signal came. The policies are in the state between two steps.
        """
        # Play the references first, so that one that cannot play here is reported before minutes of imitation.
        self.references = self.references or await self._held_out.play_references()
        if self._shared.config.warm_start.imitates:
            await self._imitate()
        return self._shared.config.warm_start.imitates

    async def _imitate(self) -> None:
        self._imitations = self._imitations or self._begin()
        steps = max(imitation.steps for imitation in self._imitations.values())
        steps_left = max(imitation.steps - imitation.step for imitation in self._imitations.values())
        self._shared.screen.phase(f"imitating {len(self.demonstrations)} demonstrations for {steps_left} steps")

        def progress(agent: str, step: int, loss: float) -> None:
            self._shared.interrupts.raise_if_requested()
            show = self._shared.screen.phase if step % 10 == 0 or step == steps else self._shared.screen.progress
            show(f"imitation {step}/{steps}, loss {loss:.3f} nats per token {agent}".rstrip())

        await self._weights.leave_gpu()
        for agent, imitation in self._imitations.items():
            await self._shared.parallel.in_thread(imitation.run, partial(progress, agent))
        self._imitations = {}

    def _begin(self) -> dict[str, Imitation]:
        """Return the imitation of each agent's policy, before its first step."""
        config = self._shared.config
        return {
            agent: Imitation(
                trainer.policy,
                [turns_of(demonstration, agent) for demonstration in self.demonstrations],
                config.warm_start,
                self._shared.parallel,
                lr=config.warm_start.rate(config.model),
                micro_batch_tokens=config.optimizer.micro_batch_tokens,
                temperature=config.sampling.temperature,
                seed=derive(config.seed, "imitation"),
            )
            for agent, trainer in self._learner.by_agent.items()
        }

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the optimisers' tensors by name, and JSON values; empty once training began. All ranks take part."""
        if self.over:
            return {}, {}
        states = {agent: imitation.state() for agent, imitation in self._imitations.items()}
        tensors = join_parts({agent: agent_tensors for agent, (agent_tensors, _) in states.items()})
        return tensors, {
            "references": self.references,
            "demonstrations": [episode.to_json() for episode in self.demonstrations],
            "imitations": {agent: values for agent, (_, values) in states.items()},
        }

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore the values from `state`."""
        self.over = not values
        if self.over:
            return
        self.references = values["references"]
        self.demonstrations = [Episode.from_json(item) for item in values["demonstrations"]]
        parts = split_parts(tensors)
        self._imitations = self._begin() if values["imitations"] else {}
        for agent, agent_values in values["imitations"].items():
            self._imitations[agent].load_state(parts[agent], agent_values)
