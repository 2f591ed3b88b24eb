"""Turn scorers: published numbers worked out by hand, what a fit changes, and runs that go on bit for bit."""

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.credit import credit
from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.loading import parse_config
from starpod.trainer.configuration.preflight import check
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.group import Group, episodes_of
from starpod.trainer.parallel.ranks import Parallel
from starpod.trainer.run.setup import make_scorer
from starpod.trainer.scorers.base import TurnScorer, pay, rank_correlation, score_and_fit
from starpod.trainer.scorers.config import ScorerConfig
from starpod.trainer.scorers.implicit import ImplicitScorer, pair_loss, pairs_of
from starpod.trainer.scorers.q import QScorer, turn_targets
from tests.trainer.algorithms.builders import a_rollout
from tests.trainer.run.scripted_run import make_run, save
from tests.trainer.tiny_learner import built, group_of
from tests.trainer.turns import a_turn


def make(kind: str, *, lr: float = 3e-3, budget: int = 8192, **options: Any) -> TurnScorer:
    config = TypeAdapter(ScorerConfig).validate_python({"kind": kind} | options)
    scorer = ImplicitScorer if kind == "implicit" else QScorer
    return scorer(config, copy.deepcopy(built("none")), lr=lr, micro_batch_tokens=budget)


def groups() -> list[Group]:
    """Two start states with a success and two failures each, and one of failures alone."""
    made = [group_of(built("none"), number, own) for number, own in enumerate([(1, 0, 0), (0, 1, 0), (0, 0, 0)])]
    for episode in episodes_of(made):
        episode.success = episode.total_reward > 0
        for turn in episode.turns:
            turn.actions = [f"action {episode.member}"]
    return made


def weights(scorer: TurnScorer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in scorer.model.parameters()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(one, other, strict=True)]


def shifted(scorer: TurnScorer, episodes: list[Episode], ratios: list[list[float]]) -> None:
    """Rewrites what the sampler said, so that the sum of each turn's log-ratios is the one given."""
    assert isinstance(scorer, ImplicitScorer)
    for episode, own in zip(episodes, ratios, strict=True):
        for turn in episode.turns:
            turn.logprobs = [0.0] * len(turn.reply)  # so that ratios are the scorer's own log-probabilities
        sums = scorer._ratios(scorer._batch([episode])).sums_BK[0].tolist()
        for turn, wanted, found in zip(episode.turns, own, sums, strict=True):
            turn.logprobs = [(found - wanted) / len(turn.reply)] * len(turn.reply)


# --- implicit step rewards --------------------------------------------------------------------------------------------


def test_a_turn_is_scored_by_its_log_ratios() -> None:
    scorer = make("implicit", normalise=False)
    (episode,) = group_of(built("none"), 0, (1.0,), turns=1).episodes
    # A scorer that was not fitted is the policy itself. Until 10 fits a mere disagreement is held down.
    for fits, ratio, expected in ((0, 0.4, 0.0), (1, 0.4, 0.02), (1, -50.0, -1.0), (10, -50.0, -2.5)):
        scorer.fits = fits
        shifted(scorer, [episode], [[ratio]])
        assert scorer.score([episode]) == [[pytest.approx(expected, abs=1e-6 if ratio > 0 else 1e-4)]]
    scorer = make("implicit")  # which divides by the largest score
    scorer.fits = 1
    episodes = group_of(built("none"), 0, (1.0, 0.0)).episodes
    shifted(scorer, episodes, [[0.4, 0.8], [-0.2, 0.0]])
    expected = [[0.499988, 0.999975], [-0.249994, 0.0]]
    assert scorer.score(episodes) == [pytest.approx(row, abs=1e-5) for row in expected]


def test_the_loss_is_of_pairs_by_means_over_turns() -> None:
    for margin, loss in ((0.03 - -0.01, 0.673347), (0.06 - -0.01, 0.658760), (0.0, 0.693147)):
        assert pair_loss(torch.tensor([margin])).item() == pytest.approx(loss, abs=1e-6)
    scorer = make("implicit")
    winner = group_of(built("none"), 0, (1.0,)).episodes[0]
    loser = group_of(built("none"), 0, (0.0,), turns=1).episodes[0]
    shifted(scorer, [winner, loser], [[0.4, 0.8], [-0.2]])
    metrics = scorer.fit([Group(0, [winner, loser])])
    assert metrics["scorer/loss"] == pytest.approx(0.673347, abs=1e-6)
    assert (metrics["scorer/pairs"], metrics["scorer/accuracy"]) == (1, 1)


def test_pairs_are_of_one_start_state_and_of_different_outcomes() -> None:
    scorer, made = make("implicit", lr=1e-2), groups()
    better, worse = pairs_of(episodes_of(made))
    assert list(zip(better, worse, strict=True)) == [(0, 1), (0, 2), (4, 3), (4, 5)]
    before = weights(scorer)
    assert scorer.fit(made[2:]) == {"scorer/pairs": 0.0, "scorer/groups_without_pairs": 1.0}
    assert all(equal(before, weights(scorer)))
    first = scorer.fit(made)
    assert (first["scorer/pairs"], first["scorer/groups_without_pairs"]) == (4, pytest.approx(1 / 3))
    # The published code takes its loss on detached log-ratios: no gradient reaches its model.
    assert first["scorer/grad_norm"] > 0 and not any(equal(before, weights(scorer)))
    for _ in range(15):
        last = scorer.fit(made)
    assert last["scorer/loss"] < first["scorer/loss"] and last["scorer/accuracy"] == 1.0


def test_the_gradient_is_that_of_the_loss() -> None:
    """Finite differences along the step: the loss falls by about the squared norm of the gradient."""
    scorer = make("implicit", beta=1.0)
    scorer.optimizer = torch.optim.SGD(scorer.model.parameters(), lr=1e-4)  # type: ignore[assignment]
    first, second = scorer.fit(groups()), scorer.fit(groups())
    clipped = min(first["scorer/grad_norm"], 10.0) * first["scorer/grad_norm"]
    assert (first["scorer/loss"] - second["scorer/loss"]) / 1e-4 == pytest.approx(clipped, rel=0.05)


def test_step_rewards_are_compared_within_the_group_beside_the_returns() -> None:
    """iStar's golden group: two turns scored .02 and .04 against one of -.01, and returns 1 and 0."""
    parts = [[{"environment": 0.0, "process": 0.02}, {"environment": 1.0, "process": 0.04}], [{"process": -0.01}]]
    layout: dict[str, Any] = {"mask": [[1, 1], [1, 0]], "turns": [[0, 1], [0, -1]]}
    rollout = a_rollout([[0.02, 1.04], [-0.01, 0.0]], groups=[0, 0], parts=parts, **layout)
    rewards = rollout.rewards_BT
    terms = AlgorithmConfig(preset="dapo", advantage="istar").credit_terms
    found = credit(terms, rollout, rewards)
    expected = torch.tensor([[1.005, 1.035], [-1.04, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
    (step,) = (term for term in terms if term.parts)
    for baseline, alone in (("others", [0.005, 0.035, -0.04]), ("mean", [0.003333, 0.023333, -0.026667])):
        own = credit([step.model_copy(update={"baseline": baseline})], rollout, rewards)
        assert own[rollout.mask_BT].tolist() == pytest.approx(alone, abs=1e-6)


# --- values of turns --------------------------------------------------------------------------------------------------


def visit(state: bytes, action: str, *, fresh: bool = True) -> Any:
    return a_turn([5], state_key=state, actions=[action], fresh=fresh)


def test_targets_are_means_over_visits_discounted_from_the_turn() -> None:
    episodes = [
        Episode(0, 0, "lake", turns=[visit(b"0", "a"), visit(b"1", "x", fresh=False)], success=True),
        Episode(0, 1, "lake", turns=[visit(b"0", "a"), visit(b"1", "y", fresh=False)], success=False),
        Episode(0, 2, "lake", turns=[visit(b"0", "b")], success=True),
    ]
    assert turn_targets(episodes, 0.95) == [[0.475, 1.0], [0.475, 0.0], [1.0]]
    for episode in episodes:
        for turn in episode.turns:
            turn.state_key = b""
    assert turn_targets(episodes, 0.95) == [[0.95, 1.0], [0.0, 0.0], [1.0]]


@given(st.lists(st.lists(st.sampled_from([b"", b"1", b"2"]), min_size=1, max_size=4), min_size=1, max_size=6))
def test_targets_keep_their_mean_undiscounted(states: list[list[bytes]]) -> None:
    episodes = [
        Episode(0, member, "lake", turns=[visit(state, "a") for state in own], success=member % 2 == 0)
        for member, own in enumerate(states)
    ]
    targets = turn_targets(episodes, 1.0)
    assert all(0 <= value <= 1 for row in targets for value in row)
    assert sum(map(sum, targets)) == pytest.approx(sum(len(own) for own in states[::2]))


def test_branches_are_further_visits_of_the_turns_before_them() -> None:
    parent = Episode(0, 0, "lake", turns=[visit(b"0", "a"), visit(b"1", "x", fresh=False)], success=False)
    branches = [
        Episode(0, 1 + n, "lake", turns=[parent.turns[0], visit(b"1", "y", fresh=False)], success=n < 3, parent=(0, 1))
        for n in range(4)
    ]
    targets = turn_targets([parent, *branches], 0.95)
    assert targets[0] == [pytest.approx(0.95 * 3 / 5), 0.0] and targets[1][1] == 0.75
    scorer = make("q")
    alone = scorer.score([parent])
    scorer.fit([Group(0, [parent], branches=branches)])
    assert scorer.score([parent])[0][0] > alone[0][0]


def test_soft_labels_have_a_floor_that_the_head_reaches() -> None:
    scorer = make("q", lr=1e-2)
    assert isinstance(scorer, QScorer)
    (episode,) = group_of(built("none"), 0, (1.0,), turns=1).episodes
    losses = [scorer.fit_to([episode], [[0.75]])["scorer/loss"] for _ in range(60)]
    assert losses[0] == pytest.approx(0.693147, abs=1e-6) and losses[-1] == pytest.approx(0.562335, abs=1e-3)
    assert scorer.score([episode]) == [[pytest.approx(0.75, abs=0.02)]]


def test_a_fit_to_q_distinguishes_turns_and_moves_the_trunk() -> None:
    scorer, made = make("q", lr=1e-2), groups()
    before = weights(scorer)
    for _ in range(25):
        metrics = scorer.fit(made)
    names = [name for name, _ in scorer.model.named_parameters()]
    moved = [name for name, same in zip(names, equal(before, weights(scorer)), strict=True) if not same]
    assert any("layers" in name for name in moved) and "critic.head.weight" in moved
    assert metrics["scorer/target_error"] < 0.05
    last = [row[-1] for row in scorer.score(episodes_of(made))]
    assert min(last[0], last[4]) > max(value for place, value in enumerate(last) if place not in (0, 4))


# --- both -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["implicit", "q"])
def test_packing_changes_neither_scores_nor_fits(kind: str) -> None:
    whole, cut = make(kind), make(kind, budget=12)
    made = groups()
    for scorer in (whole, cut):
        scorer.fit(made)
    for one, other in zip(whole.score(episodes_of(made)), cut.score(episodes_of(made)), strict=True):
        assert one == pytest.approx(other, rel=1e-2, abs=1e-3)
    assert whole.fit(made) == pytest.approx(cut.fit(made), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("kind", ["implicit", "q"])
def test_a_scorer_continues_bit_for_bit(kind: str) -> None:
    straight, halves, again = make(kind), make(kind), make(kind)
    made = groups()
    for scorer in (straight, straight, halves):
        scorer.fit(made)
    tensors, values = halves.state()
    again.load_state({name: tensor.clone() for name, tensor in tensors.items()}, values)
    again.fit(made)
    assert all(equal(weights(straight), weights(again)))
    assert straight.score(episodes_of(made)) == again.score(episodes_of(made))


@pytest.mark.parametrize("kind", ["implicit", "q"])
def test_scores_become_a_part_of_the_reward_and_shared_turns_are_paid_in_the_parent(kind: str) -> None:
    scorer = make(kind)
    scorer.fit(groups())
    parent, branch = groups()[0].episodes[:2]
    branch.turns[0], branch.parent = parent.turns[0], (0, 1)
    scores = scorer.score([parent, branch])
    assert scores[1][0] == 0.0 and scores[0][0] != 0.0
    for paid in ([[0.5] * 2] * 2, scores):  # the second replaces the first
        pay([parent, branch], paid)
    assert parent.turns[0].parts["process"] == scores[0][0] and branch.turns[1].parts["process"] == scores[1][1]
    assert parent.turns[1].reward == sum(parent.turns[1].parts.values())


def test_turns_are_scored_before_the_scorer_learns_from_them() -> None:
    scorer, twin = make("implicit"), make("implicit")
    for each in (scorer, twin):
        each.fit(groups())
    made = groups()
    expected = twin.score(episodes_of(made))
    for episode in episodes_of(made):
        for place, turn in enumerate(episode.turns):
            turn.progress = float(place)
    metrics = score_and_fit(scorer, made)
    assert [[turn.parts["process"] for turn in each.turns] for each in episodes_of(made)] == expected
    assert {"reward/process", "scorer/loss", "scorer/score_correlation"} <= metrics.keys()


@pytest.mark.parametrize("kind", ["implicit", "q"])
def test_a_filter_that_leaves_only_branches_leaves_a_scorer_no_turns_to_score(kind: str) -> None:
    branches = [replace(episode, parent=(0, 1)) for episode in groups()[0].episodes]
    metrics = score_and_fit(make(kind), [Group(0, [], branches=branches)])
    assert "reward/process" not in metrics and ("scorer/loss" in metrics) == (kind == "q")


def test_rank_correlation_is_spearmans() -> None:
    assert rank_correlation([(1, 10), (2, 20), (3, 400)]) == pytest.approx(1)
    assert rank_correlation([(1, 3), (2, 2), (3, 1)]) == pytest.approx(-1)
    # Ranks (0.5, 0.5, 2) and (0, 1, 2).
    assert rank_correlation([(1, 1), (1, 2), (2, 3)]) == pytest.approx(math.sqrt(3) / 2)
    assert rank_correlation([(1, 1), (1, 2)]) is None and rank_correlation([]) is None


async def test_a_run_keeps_its_scorer_in_its_checkpoints(tmp_path: Path) -> None:
    values: dict[str, Any] = {"algorithm": {"preset": "dapo", "advantage": "istar"}, "scorer": "implicit"}
    run = make_run(tmp_path, turn_scorer=make("implicit"), **values)
    before = weights(run.updating.scorer)
    run.begin_step()
    await run.learn(run.filter(groups()))
    assert run.report.metrics["scorer/pairs"] == 4
    assert not all(equal(before, weights(run.updating.scorer)))
    await save(run)
    loaded = run.output.checkpoints.latest()
    assert loaded is not None
    again = make_run(tmp_path, turn_scorer=make("implicit"), **values)
    again.restore(loaded)
    assert all(equal(weights(again.updating.scorer), weights(run.updating.scorer))) and again.updating.scorer.fits == 1
    values |= {"algorithm": {"preset": "dapo", "advantage": "agent_prm"}, "scorer": "q"}
    other = make_run(tmp_path, turn_scorer=make("q"), **values)
    with pytest.raises(ConfigError, match=r"scorer\.kind is q"):
        other.restore(loaded)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"algorithm": {"preset": "dapo", "advantage": "istar"}}, r"set scorer\.kind to implicit or q"),
        ({"scorer": {"kind": "q", "beta": 0.1}}, "beta belongs to implicit, and scorer is q"),
        ({"scorer": {"lr": 0.1}}, "lr belongs to implicit, q"),
    ],
)
def test_settings_without_a_meaning_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config(values)


def test_scorers_are_refused_where_they_cannot_be_trained() -> None:
    with pytest.raises(ConfigError, match="trains a whole copy"):
        parse_config({"scorer": "q", "model": {"name": "smollm2", "lora": {"rank": 4}}})
    with pytest.raises(ConfigError, match="run without torchrun"):
        check(parse_config({"scorer": "q"}), world=2)
    assert make_scorer(Config(), lambda: built("none"), Parallel()) is None
    scorer = make_scorer(parse_config({"scorer": "q"}), lambda: copy.deepcopy(built("none")), Parallel())
    assert isinstance(scorer, QScorer) and scorer.model.critic_kind == "shared"
