"""Values of turns (AgentPRM, arXiv 2502.10325): a model learns the expected outcome of a reply in a state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from starpod.trainer.algorithms.turns import TurnTable, turn_table
from starpod.trainer.data.batch import Batch
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.group import Group, episodes_of
from starpod.trainer.data.sample import Block
from starpod.trainer.models.critic import SharedCritic
from starpod.trainer.models.policy import Policy
from starpod.trainer.scorers.base import TurnScorer, outcome
from starpod.trainer.scorers.config import QConfig


class QScorer(TurnScorer):
    """The `q` scorer. A turn's score is Q, the expected discounted outcome after its reply, between 0 and 1.

    A value head reads the hidden state before the reply's last token. That token only ends the reply, so the hidden
    state already reflects the whole reply.
    """

    config: QConfig

    def __init__(
        self, config: QConfig, model: Policy, *, lr: float, micro_batch_tokens: int, temperature: float = 1.0
    ) -> None:
        model.critic, model.critic_kind = SharedCritic(model.width, detach=False).to(model.device), "shared"
        super().__init__(config, model, lr=lr, micro_batch_tokens=micro_batch_tokens, temperature=temperature)

    @torch.no_grad()
    def score(self, episodes: Sequence[Episode]) -> list[list[float]]:
        batch = self._batch(episodes)
        table = turn_table(batch.mask_BT, batch.turns_BT())
        logits_BK = torch.zeros(table.mask_BK.shape, device=batch.device)
        for block in self._blocks(batch):
            rows, block_logits_BK, _ = self._read(batch, table, block)
            logits_BK[rows] += block_logits_BK
        values_BK = torch.where(table.mask_BK, logits_BK.sigmoid(), 0.0)
        return self._by_turn(values_BK, episodes)

    def fit(self, groups: Sequence[Group]) -> dict[str, float]:
        # Branches from a search after play count as additional visits of the turns before them.
        branches = [branch for group in groups for branch in group.branches if branch.sampled_tokens]
        episodes = [*episodes_of(groups), *branches]
        return self.fit_to(episodes, turn_targets(episodes, self.config.gamma))

    def fit_to(self, episodes: Sequence[Episode], targets: Sequence[Sequence[float]]) -> dict[str, float]:
        """Take one step of cross-entropy with soft labels, averaged over turns. targets: values in [0, 1]."""
        batch = self._batch(episodes)
        table = turn_table(batch.mask_BT, batch.turns_BT())
        width = table.mask_BK.shape[1]
        targets_BK = torch.tensor([[*row, *[0.0] * width][:width] for row in targets], device=batch.device)
        count = int(table.mask_BK.sum())
        loss, squared_error = 0.0, 0.0
        self.optimizer.zero_grad(set_to_none=True)
        for block in self._blocks(batch):
            rows, logits_RK, mask_RK = self._read(batch, table, block)
            logits, labels = logits_RK[mask_RK], targets_BK[rows][mask_RK]
            block_loss = binary_cross_entropy_with_logits(logits, labels, reduction="sum") / count
            block_loss.backward()  # type: ignore[no-untyped-call]
            loss += block_loss.item()
            squared_error += (logits.detach().sigmoid() - labels).square().sum().item() / count
        return {"scorer/loss": loss, "scorer/target_error": squared_error, "scorer/grad_norm": self._step()}

    def _read(self, batch: Batch, table: TurnTable, block: Block) -> tuple[list[int], Tensor, Tensor]:
        """Return a block's rows, their turns' logits [R, K], and whether each turn is in the block."""
        scores = self.model.score(*block.inputs, temperature=self.temperature, values=True)
        assert scores.values_N is not None
        rows = block.rows
        last_RT = table.last_BT[rows] & block.inside_RT
        index_RT = table.index_BT[rows]
        logits_RT = torch.where(last_RT, block.in_rows(scores.values_N), 0.0)
        shape = (len(rows), table.mask_BK.shape[1])
        logits_RK = logits_RT.new_zeros(shape).scatter_add(1, index_RT, logits_RT)
        counts_RK = torch.zeros(shape, dtype=torch.int64, device=batch.device).scatter_add(1, index_RT, last_RT.long())
        return rows, logits_RK, counts_RK > 0


def turn_targets(episodes: Sequence[Episode], gamma: float) -> list[list[float]]:
    """Return Monte-Carlo estimates of Q: the attempt's outcome in [0, 1], discounted back from its end to the turn.

    Turns of a speaker with the same actions in the same state (by state key, if there is one) share the mean over all
    visits.
    """
    visits: defaultdict[tuple[object, ...], list[float]] = defaultdict(list)
    keys: list[list[tuple[object, ...]]] = []
    for episode_index, episode in enumerate(episodes):
        episode_keys: list[tuple[object, ...]] = []
        attempts = [turn.attempt for turn in episode.turns]
        for index, turn in enumerate(episode.turns):
            state = turn.state_key or (episode_index, index)
            episode_keys.append((episode.kind, turn.agent_id, state, *turn.actions))
            turns_left = attempts[index + 1 :].count(turn.attempt)
            value = gamma**turns_left * min(max(outcome(episode, turn.attempt), 0.0), 1.0)
            visits[episode_keys[-1]].append(value)
        keys.append(episode_keys)
    return [[sum(visits[key]) / len(visits[key]) for key in episode_keys] for episode_keys in keys]
