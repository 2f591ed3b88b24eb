"""Rollouts, groups and random batches that the tests of the algorithms share."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.losses import PolicyLoss
from starpod.trainer.data.batch import RolloutBatch
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.group import Group
from tests.trainer.turns import a_turn


def doubles(*rows: Sequence[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def a_rollout(
    rewards: Sequence[Sequence[float]],
    *,
    groups: Sequence[int],
    mask: Sequence[Sequence[int]] | None = None,
    turns: Sequence[Sequence[int]] | None = None,
    values: Sequence[Sequence[float]] | None = None,
    old: Sequence[Sequence[float]] | None = None,
    reference: Sequence[Sequence[float]] | None = None,
    bootstrap: Sequence[float] | None = None,
    **of_turns: Sequence[Sequence[Any]],
) -> RolloutBatch:
    """Everything in double precision; what is not given is 0, all tokens are sampled, and each is a turn.

    of_turns: fields of `Turn`, by episode and turn.
    """
    rewards_BT = doubles(*rewards)
    zeros = torch.zeros_like(rewards_BT)
    mask_BT = torch.tensor(mask, dtype=torch.bool) if mask is not None else torch.ones_like(rewards_BT).bool()
    columns_BT = torch.arange(rewards_BT.shape[1]).expand(rewards_BT.shape)
    old_BT = doubles(*old) if old is not None else zeros
    turns_BT = torch.tensor(turns) if turns is not None else columns_BT
    episodes = []
    for row, group in enumerate(groups):
        given = {name: values[row] for name, values in of_turns.items() if len(values)}
        count = max(map(len, given.values())) if given else int(turns_BT[row].max()) + 1
        own = [a_turn(**{name: values[turn] for name, values in given.items()}) for turn in range(count)]
        episodes.append(Episode(group, row, "lake", turns=own))
    return RolloutBatch(
        mask_BT=mask_BT,
        turns_BT=turns_BT,
        rewards_BT=rewards_BT,
        groups_B=torch.tensor(groups),
        old_logprobs_BT=old_BT,
        sampler_logprobs_BT=old_BT,
        bootstrap_B=doubles(bootstrap)[0] if bootstrap is not None else zeros[:, 0],
        values_BT=doubles(*values) if values is not None else None,
        ref_logprobs_BT=doubles(*reference) if reference is not None else None,
        episodes=episodes,
    )


def a_group(returns: Sequence[float], *, id: int = 0, logprobs: Sequence[Sequence[float]] | None = None) -> Group:
    """One episode of one turn per return; `logprobs` of its tokens, or one token of log-probability 0."""
    tokens = logprobs if logprobs is not None else [[0.0]] * len(returns)
    turns = [
        a_turn([0] * len(own), prompt=[], logprobs=list(own), reward=reward)
        for reward, own in zip(returns, tokens, strict=True)
    ]
    return Group(id, [Episode(id, member, "frozen_lake-v1", turns=[turn]) for member, turn in enumerate(turns)])


def random_layout(seed: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """mask_BT with holes, no row empty, and turns_BT: ascending, at times with a turn left out; -1 outside the mask."""
    generator = torch.Generator().manual_seed(seed)
    mask_BT = torch.rand(rows, columns, generator=generator) < 0.7
    mask_BT[:, 0] |= ~mask_BT.any(1)
    begins_BT = torch.rand(rows, columns, generator=generator) < 0.4
    steps_BT = torch.where(begins_BT, torch.randint(1, 3, (rows, columns), generator=generator), 0)
    return mask_BT, torch.where(mask_BT, steps_BT.cumsum(1), -1)


def random_doubles(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def loss_of(
    config: AlgorithmConfig,
    logprobs: Tensor,
    old: Tensor | float,
    advantages: Sequence[float],
    *,
    mask: Sequence[int] | None = None,
    turns: Sequence[int] | None = None,
) -> PolicyLoss:
    """The loss of one episode, of which all tokens are sampled and in one turn unless other ones are given."""
    return config.policy_loss(
        logprobs,
        torch.zeros_like(logprobs) + old,
        doubles(advantages),
        mask_BT=torch.ones_like(logprobs).bool() if mask is None else torch.tensor([mask]).bool(),
        turns_BT=torch.tensor([turns or [0] * logprobs.shape[1]]),
    )


def assert_close(actual: Tensor, *expected: float) -> None:
    """Up to the digits of golden numbers."""
    torch.testing.assert_close(actual.flatten(), torch.tensor(expected, dtype=actual.dtype), atol=5e-7, rtol=0)
