"""The reference policy of a model with adapters: its first adapters, in the place of a second model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from starpod.trainer.data.images import Images
from starpod.trainer.models.policy import Policy, Scores
from starpod.trainer.parallel import Parallel, reshard


class FirstAdapters:
    """Adapters as they were when this was made, and the policy's own weights under them.

    Without a warm start they add nothing yet, so the reference is the model that training began from.
    """

    def __init__(self, policy: Policy, parallel: Parallel) -> None:
        self._policy = policy
        self._parallel = parallel
        trained = {id(parameter) for parameter in policy.trained_parameters()}
        self._present = {name: each for name, each in policy.named_parameters() if id(each) in trained}
        self._first = {name: parameter.detach().clone() for name, parameter in self._present.items()}

    def score(
        self,
        tokens_BL: Tensor,
        lengths_B: Tensor,
        sampled_BL: Tensor,
        images: Images | None = None,
        *,
        temperature: float,
    ) -> Scores:
        """As `Policy.score`, of the reference. Not inside a graph that is to be run backwards."""
        with self._exchanged():
            return self._policy.score(tokens_BL, lengths_B, sampled_BL, images, temperature=temperature)

    def state_dict(self) -> dict[str, Tensor]:
        """The adapters by name, whole. Collective."""
        return self._parallel.gather(self._first)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes what `state_dict` gave."""
        self._parallel.load(self._first, state)

    @contextmanager
    def _exchanged(self) -> Iterator[None]:
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        # In place, so that whoever shares the weights' memory keeps it.
        reshard(self._policy)
        for name, present in self._present.items():
            first = self._first[name]
            held = present.detach().clone()
            present.detach().copy_(first)
            first.copy_(held)
