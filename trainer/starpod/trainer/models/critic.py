"""Critics, which estimate the value of every context that precedes a sampled token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from starpod.trainer.models.folding import Layout


class ValueHead(nn.Module):
    """Linear layer from hidden states to float32 values, initially 0: [N], or [N, heads] for several heads."""

    def __init__(self, hidden: int, heads: int = 1) -> None:
        super().__init__()
        shape = (hidden,) if heads == 1 else (hidden, heads)
        self.weight = nn.Parameter(torch.zeros(shape, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(heads, dtype=torch.float32))  # a vector, because FSDP cannot shard scalars

    def forward(self, hidden_NH: Tensor) -> Tensor:
        with torch.autocast(hidden_NH.device.type, enabled=False):
            return hidden_NH.float() @ self.weight + self.bias


class SharedCritic(nn.Module):
    """A value head on the policy's hidden states. With `detach`, its loss does not train the trunk."""

    def __init__(self, hidden: int, detach: bool, heads: int = 1) -> None:
        super().__init__()
        self.head = ValueHead(hidden, heads)
        self.detach = detach

    def forward(self, hidden_NH: Tensor) -> Tensor:
        values: Tensor = self.head(hidden_NH.detach() if self.detach else hidden_NH)
        return values


class SeparateCritic(nn.Module):
    """A critic with its own decoder trunk and a value head."""

    def __init__(self, trunk: nn.Module, hidden: int, heads: int = 1) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = ValueHead(hidden, heads)

    def forward(self, layout: Layout, places_N: Tensor) -> Tensor:
        """Return the values at flat indices into the layout's states."""
        values: Tensor = self.head(layout.read(self.trunk).index_select(0, places_N))
        return values
