"""Advantages from a teacher that judges each token which the policy sampled: on-policy distillation.

With gap = log p_teacher - log p_policy of the sampled token, its advantage is coefficient * gap, without a gradient.
The policy gradient of this advantage is that of the reverse KL (https://thinkingmachines.ai/blog/on-policy-distillation).
A token's gap does not count for earlier tokens (discount 0). run/teachers.py has the teachers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator

from starpod.trainer.configuration.kinds import KindBy
from starpod.trainer.configuration.section import FilePath, Section
from starpod.trainer.models.config import locate_model

if TYPE_CHECKING:
    from torch import Tensor

    from starpod.trainer.data.batch import Advantages, Batch, RolloutBatch

Score = Callable[..., "Tensor"]
"""Type of `PolicyTrainer.logprobs`."""
_SHARED_KEYS = {"coefficient", "reward", "gate"}
_GATE = (
    "Sharpness of the gate sigmoid(gate * gap), which weakens tokens that the teacher finds less likely than the "
    "policy does (SDAR, arXiv 2605.15155); 0: no gate."
)


class NoTeacher(Section):
    """No teacher: advantages come from rewards alone."""

    reward: ClassVar[bool] = True

    teacher: Literal["off"] = "off"

    def add_to(self, advantages: Advantages, table: RolloutBatch) -> Advantages:
        """Return the advantages unchanged."""
        return advantages

    def measure(self, table: RolloutBatch, mask_BT: Tensor) -> dict[str, float]:
        """Return no metrics."""
        return {}


class Distillation(Section):
    """Keys of all teachers."""

    teacher: str
    coefficient: float = Field(default=1.0, gt=0, description="Weight of the teacher's advantage, per nat.")
    reward: bool = Field(
        default=True, description="Adds the advantage of the rewards. false: the policy learns from the teacher alone."
    )
    gate: float = Field(default=0.0, ge=0, description=_GATE)

    def add_to(self, advantages: Advantages, table: RolloutBatch) -> Advantages:
        """Return the advantages with those of the teacher, or the teacher's alone. Gaps are clamped to 20 nats."""
        from starpod.trainer.algorithms.losses import masked_log_ratio

        assert table.teacher_logprobs_BT is not None
        gap_BT = masked_log_ratio(table.teacher_logprobs_BT, table.old_logprobs_BT, table.mask_BT)
        taught_BT = self.coefficient * self._weights(gap_BT) * gap_BT
        return advantages._replace(advantages_BT=advantages.advantages_BT * self.reward + taught_BT)

    def measure(self, table: RolloutBatch, mask_BT: Tensor) -> dict[str, float]:
        """Return metrics of the teacher's judgement of the tokens in the mask.

        The mean gap estimates the reverse KL without bias if the policy itself sampled the tokens.
        """
        assert table.teacher_logprobs_BT is not None
        gap_N = (table.teacher_logprobs_BT - table.old_logprobs_BT)[mask_BT]
        metrics = {"distillation/reverse_kl": -gap_N.mean().item()}
        return metrics | ({"distillation/gate_share": self._weights(gap_N).mean().item()} if self.gate else {})

    def _weights(self, gap: Tensor) -> Tensor:
        """Return the gate's value at each token, between 0 and 1."""
        return (self.gate * gap).sigmoid() if self.gate else gap.new_ones(gap.shape)


class ModelTeacher(Distillation):
    """A model of ours or of Hugging Face, which runs beside the policy."""

    teacher: Literal["model"] = "model"
    model: Annotated[str, AfterValidator(locate_model)] = Field(
        min_length=1,
        description="Folder of a run (its best checkpoint), of a checkpoint or of a model, or a Hugging Face name.",
    )


class VllmTeacher(Distillation):
    """A model on a vLLM server."""

    teacher: Literal["vllm"] = "vllm"
    url: str = Field(min_length=1, description="Address, such as http://host:8000.")
    api_key_file: FilePath = Field(default="", description="File with the server's API key.")


class SelfTeacher(Distillation):
    """The policy itself, which sees the expert's next move in its prompt."""

    teacher: Literal["self"] = "self"
    gate: float = Field(default=5.0, ge=0, description=_GATE)
    hint: str = Field(
        default="The best next action is {action}.",
        description="Format string that the teacher reads below a turn's message.",
    )

    @field_validator("hint")
    @classmethod
    def _names_the_action(cls, hint: str) -> str:
        try:
            shows_action = hint.format(action="") != hint.format(action="Left")
        except (LookupError, ValueError, AttributeError):
            shows_action = False
        if not shows_action:
            raise ValueError(f"{hint!r} does not show the expert's move: write {{action}} where it stands")
        return hint


Teaching = Annotated[NoTeacher | ModelTeacher | VllmTeacher | SelfTeacher, KindBy("teacher")]


def is_same_teacher(first: Section, second: Section) -> bool:
    """Return whether two stages have the same teacher. Coefficient, gate and rewards may differ."""
    return first.model_dump(exclude=_SHARED_KEYS) == second.model_dump(exclude=_SHARED_KEYS)


class Judge(ABC):
    """A teacher at work."""

    @abstractmethod
    def logprobs(self, score: Score, batch: Batch, table: RolloutBatch, mask_BT: Tensor) -> Tensor:
        """Return the teacher's log-probabilities [B, T] of the tokens in the mask. All ranks take part.

        Args:
            score: Computes log-probabilities under the policy or another model.
            table: Table of the episodes' tokens, which has the policy's log-probabilities.
            mask_BT: Mask of the tokens to judge (bool). Other positions of the result are arbitrary.
        """
