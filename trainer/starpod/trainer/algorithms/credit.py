"""Advantages without a critic: the sum of an estimator's credit terms.

Groups, turns, states and agents are identified by their ids, never by position or content.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from starpod.trainer.algorithms.gae import gae
from starpod.trainer.algorithms.terms import CreditTerm
from starpod.trainer.algorithms.turns import Units, on_tokens, turn_table
from starpod.trainer.data.batch import RolloutBatch
from starpod.trainer.data.episode import Episode, paid_turns, part_sums, payees_of
from starpod.trainer.prompts.grammar import BLOCKS, Block

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""

ROUNDING = 1e-12
"""A standard deviation up to this share of the group's largest absolute value (at least 1) counts as 0. Summing equal
rewards in another order changes them by about 1e-16."""


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """Statistics of each item's group, for n items, in float64."""

    mean_n: Tensor
    """Mean of the group."""
    std_n: Tensor
    """Standard deviation with ddof=1; 0 in a group of one."""
    count_n: Tensor
    """Number of items in the group, as a float."""
    deviation_n: Tensor
    """Value minus mean; exactly 0 if std_n is."""


def group_statistics(values_n: Tensor, groups_n: Tensor) -> GroupStatistics:
    """Return the statistics of each item's group. groups_n: integer group id of each item, in any order."""
    values_n = values_n.double()
    _, index_n = torch.unique(groups_n, return_inverse=True)
    size = int(index_n.max()) + 1 if index_n.numel() else 0

    def total(items_n: Tensor) -> Tensor:
        return items_n.new_zeros(size).index_add(0, index_n, items_n)

    count_g = total(torch.ones_like(values_n))
    mean_g = total(values_n) / count_g
    deviation_n = values_n - mean_g[index_n]
    std_g = (total(deviation_n.square()) / (count_g - 1).clamp(min=1)).sqrt()
    largest_g = torch.ones_like(mean_g).scatter_reduce(0, index_n, values_n.abs(), "amax")
    # Clear deviations that are only rounding errors, because dividing by them would turn them into advantages.
    differ_g = std_g > ROUNDING * largest_g
    std_g = torch.where(differ_g, std_g, 0.0)
    deviation_n = torch.where(differ_g[index_n], deviation_n, 0.0)
    return GroupStatistics(mean_g[index_n], std_g[index_n], count_g[index_n], deviation_n)


def credit(terms: Sequence[CreditTerm], rollout: RolloutBatch, rewards_BT: Tensor) -> Tensor:
    """Return the sum of the terms' advantages [B, T], 0 where the mask is False.

    Args:
        terms: Credit terms, at least one.
        rollout: B episodes of one environment.
        rewards_BT: The rollout's rewards, with penalties subtracted if there are any.

    Raises:
        ValueError: A term compares states, and a state key is missing.
    """
    first, *others = (term.weight * _advantages(term, rollout, rewards_BT) for term in terms)
    return sum(others, start=first)


def _advantages(term: CreditTerm, rollout: RolloutBatch, rewards_BT: Tensor) -> Tensor:
    """Return one term's advantages [B, T], without its weight."""
    if term.unit == "criterion":
        return _of_criteria(term, rollout)
    penalties_BT = rewards_BT - rollout.rewards_BT
    if term.parts:
        rewards_BT = _rewards_of(term.parts, rollout)
    elif term.without:
        rewards_BT = rewards_BT - _rewards_of(term.without, rollout)
    units = _units(term, rollout)
    if term.score == "gain":
        scores_BK = units.total(rewards_BT) + _rises(rollout, units)
    else:
        scores_BK = _scores(term, rollout, units, rewards_BT, penalties_BT)
    if term.block is not None:
        # A block has its turn's score, which is compared with the scores of turns that have this block. Only the
        # block's own tokens get the credit.
        units = units.within(_in_block(term.block, rollout))
    advantages_BK = torch.zeros_like(scores_BK)
    advantages_BK[units.mask_BK] = compare_with_peers(term, scores_BK[units.mask_BK], _peers(term, rollout, units))
    return units.spread(advantages_BK)


def compare_with_peers(term: CreditTerm, scores_n: Tensor, peers_n: Tensor) -> Tensor:
    """Return the scores of n units relative to the scores of their peers.

    The result is 0 for a unit with too few peers, or whose peers all have equal scores. With baseline `none`, the
    scores are returned unchanged.

    Args:
        term: Its `baseline`, `scale`, `smallest` and `min_peers` are used.
        scores_n: Score of each unit.
        peers_n: Integer id of each unit's set of peers, in any order. Units with the same id are peers.
    """
    if term.baseline == "none":
        return scores_n
    statistics = group_statistics(scores_n, peers_n)
    items_n, count_n = statistics.deviation_n, statistics.count_n
    if term.baseline == "others":
        items_n = items_n * count_n / (count_n - 1).clamp(min=1)
    if term.scale == "std":
        items_n = items_n / (statistics.std_n + EPSILON)
    elif term.scale == "mean":
        positive_n = statistics.mean_n > EPSILON
        items_n = torch.where(positive_n, items_n / torch.where(positive_n, statistics.mean_n, 1.0), 0.0)
    return torch.where((items_n.abs() < term.smallest) | (count_n < term.min_peers), 0.0, items_n)


# --- units, scores, peers ---------------------------------------------------------------------------------------------


def _units(term: CreditTerm, rollout: RolloutBatch) -> Units:
    mask_BT, turns_BT = rollout.mask_BT, rollout.turns_BT
    match term.unit:
        case "turn" | "block":
            return turn_table(mask_BT, turns_BT)
        case "token":
            return Units.of(mask_BT, torch.arange(mask_BT.shape[1], device=mask_BT.device).expand_as(turns_BT))
        case "agent":
            return agent_units(rollout)[0]
        case _:
            return Units.of(mask_BT, torch.zeros_like(turns_BT))


def agent_units(rollout: RolloutBatch) -> tuple[Units, list[str]]:
    """Return a unit per agent of an episode, with all of the agent's tokens, and the agents' names in this order."""
    names: dict[str, int] = {}
    agents = [[names.setdefault(turn.agent_id, len(names)) for turn in episode.turns] for episode in rollout.episodes]
    return Units.of(rollout.mask_BT, on_tokens(agents, rollout.mask_BT, rollout.turns_BT).long()), list(names)


def _scores(term: CreditTerm, rollout: RolloutBatch, units: Units, rewards_BT: Tensor, penalties_BT: Tensor) -> Tensor:
    """Return the scores [B, K] of K units. penalties_BT: what was subtracted from the rollout's rewards, negative."""
    match term.score:
        case "return":
            returns_B = torch.where(units.mask_BT, rewards_BT, 0.0).sum(1)
            returns_B = returns_B + rollout.inherited_B(term.parts, term.without)  # of turns shared with the parent
            if not term.parts:
                returns_B = returns_B + rollout.ancestors_B(penalties_BT)
            return returns_B.unsqueeze(1).expand(units.mask_BK.shape)
        case "to_go":
            rewards_BK = units.total(rewards_BT)
            return gae(rewards_BK, torch.zeros_like(rewards_BK), units.mask_BK, gamma=term.gamma)
        case _:
            return units.total(rewards_BT)


def _peers(term: CreditTerm, rollout: RolloutBatch, units: Units) -> Tensor:
    """Return an id for each unit. Units with the same id are compared."""
    row_n, _ = units.mask_BK.nonzero(as_tuple=True)
    groups_n = rollout.groups_B[row_n]
    if not (term.key or term.strata):
        return groups_n
    turn_n = units.least(rollout.turns_BT)[units.mask_BK]
    places = [_places(episode) for episode in rollout.episodes] if "turn" in term.key else []
    trees = _trees(rollout.episodes) if "tree" in term.key else []
    parts = _received_parts(rollout.episodes) if term.strata else []
    ids: dict[tuple[object, ...], int] = {}
    peers = []
    for group, row, turn in zip(groups_n.tolist(), row_n.tolist(), turn_n.tolist(), strict=True):
        labels: dict[str, object] = {}
        if "turn" in term.key:
            labels["turn"] = places[row][turn]
        if "agent" in term.key:
            labels["agent"] = rollout.episodes[row].turns[turn].agent_id
        if "state" in term.key:
            labels["state"] = _state(rollout, row, turn)
        if "tree" in term.key:
            labels["tree"] = trees[row]
        values = [parts[row][turn].get(name, 0.0) for name in term.strata]
        label = (group, *(labels[name] for name in term.key), *((value > 0) - (value < 0) for value in values))
        peers.append(ids.setdefault(label, len(ids)))
    return torch.tensor(peers, device=groups_n.device)


def _places(episode: Episode) -> list[tuple[int, str, int]]:
    """Return each turn's line (its attempt and speaker), and the turn's number within that line."""
    counts = Counter[tuple[int, str]]()
    places = []
    for turn in episode.turns:
        places.append((*turn.line, counts[turn.line]))
        counts[turn.line] += 1
    return places


def _trees(episodes: Sequence[Episode]) -> list[int]:
    """Return the root member of each episode's chain of parents; the earliest known member if the root is missing."""
    parents = {(episode.group, episode.member): episode.parent[0] for episode in episodes if episode.parent is not None}
    roots = []
    for episode in episodes:
        member = episode.member
        while (episode.group, member) in parents:
            member = parents[episode.group, member]
        roots.append(member)
    return roots


def _received_parts(episodes: Sequence[Episode]) -> list[list[dict[str, float]]]:
    """Return the reward parts that each turn of each episode receives."""
    return [[part_sums(turns) for turns in paid_turns(episode)] for episode in episodes]


def _in_block(name: Block, rollout: RolloutBatch) -> Tensor:
    """Return a mask [B, T] that is True on the tokens of a block, and on all tokens of an ill-formed reply."""
    return (rollout.known_blocks_BT == BLOCKS.index(name)) | (rollout.known_blocks_BT < 0)


def _rises(rollout: RolloutBatch, turns: Units) -> Tensor:
    """Return the increase of the state's value in each turn [B, K]. The value after the last turn is 0."""
    rises_BK = torch.zeros(turns.mask_BK.shape, dtype=torch.float64)
    for row, episode in enumerate(rollout.episodes):
        values = [turn.value for turn in episode.turns]
        for payee, before, after in zip(payees_of(episode), values, [*values[1:], 0.0], strict=True):
            if before is None or after is None:
                raise ValueError(
                    "score gain needs the value of every state, but episodes of another run or search do not have "
                    "it: set collect.search.strategy to values"
                )
            rises_BK[row, payee] += after - before
    return rises_BK.to(turns.mask_BK.device)


def _state(rollout: RolloutBatch, row: int, turn: int) -> bytes:
    key = rollout.episodes[row].turns[turn].state_key
    if not key:
        raise ValueError(
            f"algorithm.advantage compares states, but turn {turn} of episode {row} has no state_key; the "
            "environment must report it, and sessions must be opened with state_key wanted"
        )
    return key


def _rewards_of(parts: Sequence[str], rollout: RolloutBatch) -> Tensor:
    """Return for each turn the sum of these reward parts, at the turn's last sampled token: [B, T], float64."""
    table = turn_table(rollout.mask_BT, rollout.turns_BT)
    episode_parts = _received_parts(rollout.episodes)
    sums = [[sum(turn_parts.get(name, 0.0) for name in parts) for turn_parts in turns] for turns in episode_parts]
    return torch.where(table.last_BT, on_tokens(sums, rollout.mask_BT, rollout.turns_BT), 0.0)


# --- checklists -------------------------------------------------------------------------------------------------------


def _of_criteria(term: CreditTerm, rollout: RolloutBatch) -> Tensor:
    """Return the advantages of CM2, which gives separate credit for each criterion of a checklist: [B, T].

    In an attempt, a criterion is open from the turn that first reports it until it is met, or until the attempt ends.
    The criterion's score is compared with its scores in the other episodes of the group, attempt by attempt. The
    difference, times the criterion's weight, is credited to every turn of the agents that report the criterion, as long
    as it is open.
    """
    table = turn_table(rollout.mask_BT, rollout.turns_BT)
    peers: defaultdict[tuple[int, int, str], int] = defaultdict(lambda: len(peers))
    spans, scores, ids = [], [], []
    weights_by_task = rollout.criteria_weights
    for row, (group, episode) in enumerate(zip(rollout.groups_B.tolist(), rollout.episodes, strict=True)):
        lines, reports = [turn.line for turn in episode.turns], [turn.criteria for turn in episode.turns]
        payees, weights = payees_of(episode), weights_by_task.get(episode.task, weights_by_task.get("", {}))
        reporters: defaultdict[tuple[int, str], set[tuple[int, str]]] = defaultdict(set)
        for line, report in zip(lines, reports, strict=True):
            for name in report:
                reporters[line[0], name].add(line)
        for attempt, name in sorted(reporters):
            turns = [turn for turn, line in enumerate(lines) if line in reporters[attempt, name]]
            first_index = next(index for index, turn in enumerate(turns) if name in reports[turn])
            met_index = next((index for index, turn in enumerate(turns) if reports[turn].get(name)), None)
            open_turns = turns[first_index : None if met_index is None else met_index + 1]
            spans.append((row, {payees[turn] for turn in open_turns}, weights.get(name, 1.0)))
            scores.append(0.0 if met_index is None else term.gamma ** (met_index - first_index))
            ids.append(peers[group, attempt, name])
    advantages_BK = torch.zeros(table.mask_BK.shape, dtype=torch.float64)
    if scores:
        results = compare_with_peers(term, torch.tensor(scores, dtype=torch.float64), torch.tensor(ids)).tolist()
        for (row, credited_turns, weight), result in zip(spans, results, strict=True):
            advantages_BK[row, sorted(credited_turns)] += weight * result
    return table.spread(advantages_BK.to(table.mask_BK.device))
