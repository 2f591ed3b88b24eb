"""Reference policy of a model with adapters: a copy of the initial adapters instead of a second model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from starpod.trainer.data.images import Images
from starpod.trainer.data.sample import StructuredSpan
from starpod.trainer.models.policy import Policy, Scores
from starpod.trainer.parallel import sharding
from starpod.trainer.parallel.sharding import reshard


class FirstAdapters:
    """Reference policy that combines the policy's frozen weights with a copy of its adapters from construction time.

    Without a warm start, these adapters have no effect yet, so the reference is the model before training.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        trained = {id(parameter) for parameter in policy.trained_parameters()}
        self._adapters = {name: parameter for name, parameter in policy.named_parameters() if id(parameter) in trained}
        self._first_values = {name: parameter.detach().clone() for name, parameter in self._adapters.items()}

    def score(
        self,
        tokens_BL: Tensor,
        lengths_B: Tensor,
        sampled_BL: Tensor,
        images: Images | None = None,
        structures: Sequence[Sequence[StructuredSpan]] = (),
        *,
        temperature: float,
    ) -> Scores:
        """Score tokens with the reference, as `Policy.score` does.

        Weights are swapped in place, so do not call this between a forward pass of the policy and its backward pass.
        """
        with self._with_first_values():
            return self._policy.score(tokens_BL, lengths_B, sampled_BL, images, structures, temperature=temperature)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the adapters by name. They may be sharded."""
        return dict(self._first_values)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `state_dict`. All ranks must call it."""
        sharding.load(self._first_values, state)

    @contextmanager
    def _with_first_values(self) -> Iterator[None]:
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        # Swap in place, because an engine may share the weights' memory.
        reshard(self._policy)
        for name, parameter in self._adapters.items():
            first_values = self._first_values[name]
            values = parameter.detach().clone()
            parameter.detach().copy_(first_values)
            first_values.copy_(values)
