"""Several policies: each learns from its own agent's turns alone, by advantages of whole episodes."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.checkpoints.state import join_parts
from starpod.trainer.data.episode import Episode, turns_of
from starpod.trainer.data.group import Group
from starpod.trainer.data.updates import token_records
from starpod.trainer.learner import Learner
from starpod.trainer.models.policies import Policies
from starpod.trainer.update import PolicyTrainer
from tests.trainer.tiny_learner import VERSION, built, group_of, learner_of, make_trainer, say, weights

AGENTS = ("solver", "verifier")
DR_MAS = AlgorithmConfig.model_validate({"preset": "dapo", "advantage": "dr_mas"})
SLOTS = ("step", "exp_avg", "exp_avg_sq")
REWARDS = (1.0, 0.0, 0.25, 0.5)


def make_several(algorithm: AlgorithmConfig = DR_MAS, **options: float) -> Learner:
    """Two policies that are equal, for now."""
    policies = Policies.of(AGENTS, copy.deepcopy(built("none"))).by_agent
    return Learner({agent: make_trainer(algorithm, policy=policy, **options) for agent, policy in policies.items()})


def make_one(algorithm: AlgorithmConfig = DR_MAS, **options: float) -> Learner:
    return learner_of(make_trainer(algorithm, **options))


def team_of(number: int = 1, rewards: tuple[float, ...] = REWARDS) -> Group:
    """Solver, verifier and solver speak in turn, each in a context of its own; the last one is paid. The verifier earns
    something at each of its turns."""
    group = group_of(built("none"), 2 * number + 1, rewards, turns=3)
    for member, episode in enumerate(group.episodes):
        for turn, agent in zip(episode.turns, ("solver", "verifier", "solver"), strict=True):
            turn.agent_id = agent
        episode.turns[1].parts = {"environment": 0.1 * member}
    return group


def plain_descent(learner: PolicyTrainer) -> None:
    """Steps of the gradient itself."""
    learner.optimizer = torch.optim.SGD([{"params": list(learner.policy.parameters()), "lr": 0.1, "rate": 0.1}])


def moved(learner: Learner, groups: list[Group]) -> dict[str, list[Tensor]]:
    """Return the change of each policy's weights by an update."""
    before = {agent: weights(own.policy) for agent, own in learner.by_agent.items()}
    learner.learn(groups, version=VERSION)
    after = {agent: weights(own.policy) for agent, own in learner.by_agent.items()}
    return {agent: [new - old for new, old in zip(after[agent], before[agent], strict=True)] for agent in before}


def test_each_policy_learns_from_its_own_agents_tokens_alone() -> None:
    one, other = make_several(), make_several()
    groups, others = [team_of(0), team_of(1)], [team_of(0), team_of(1)]
    for group in others:
        for episode in group.episodes:
            # The verifier says something else in as many words; its rewards, and all that the solver says, stay.
            episode.turns[1].reply = [(token + 7) % 200 for token in episode.turns[1].reply]
            say(built("none"), episode)
    found, otherwise = moved(one, groups), moved(other, others)
    assert all(any(bool(each.any()) for each in found[agent]) for agent in AGENTS)
    assert not all(map(torch.equal, found["solver"], found["verifier"]))
    assert all(map(torch.equal, found["solver"], otherwise["solver"]))
    assert not all(map(torch.equal, found["verifier"], otherwise["verifier"]))


def test_an_agent_that_says_nothing_learns_nothing() -> None:
    learners = make_several()
    group = team_of()
    for episode in group.episodes:
        del episode.turns[1]
    metrics: dict[str, float] = {}
    before = weights(learners.by_agent["verifier"].policy)
    metrics = learners.learn([group], version=VERSION)
    assert all(map(torch.equal, before, weights(learners.by_agent["verifier"].policy)))
    assert "agents/solver/update/grad_norm" in metrics and "agents/verifier/update/grad_norm" not in metrics
    # An agent may also be silent in some episodes only.
    mixed = Group(9, [*team_of().episodes[:2], *group.episodes[2:]])
    assert "agents/verifier/update/grad_norm" in learners.learn([mixed], version=-1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"advantage": "reinforce_plus_plus_baseline", "whiten": True},
        {"kl": {"where": "reward", "coefficient": 0.5}},
        {"kl": {"where": "loss", "coefficient": 0.5, "agents": {"verifier": 0.1}}},
        {"loss": {"clip_decay": 0.9}},
        {"correction": {"mode": "tis", "cap": 2.0, "level": "token"}},
    ],
    ids=str,
)
def test_equal_policies_move_together_as_one_does(changes: Mapping[str, Any]) -> None:
    """A mean over all tokens is the agents' means weighed by their shares of the tokens: so are the updates."""
    algorithm = AlgorithmConfig.model_validate({"preset": "dapo", "advantage": "dr_mas", **changes})
    shared, several = make_one(algorithm), make_several(algorithm)
    generator = torch.Generator().manual_seed(1)
    first = {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in built("none").state_dict().items()
    }
    if algorithm.needs_reference:
        shared.freeze_reference(first)
        several.freeze_reference(join_parts(dict.fromkeys(AGENTS, first)))
    for learner in (*shared.by_agent.values(), *several.by_agent.values()):
        plain_descent(learner)
        learner.config = learner.config.model_copy(update={"max_grad_norm": 1e9})
    groups = [team_of(0), team_of(1)]
    (together,), each = moved(shared, groups).values(), moved(several, groups)
    tokens = {
        agent: sum(turns_of(episode, agent).sampled_tokens for group in groups for episode in group.episodes)
        for agent in AGENTS
    }
    for one, solver, verifier in zip(together, each["solver"], each["verifier"], strict=True):
        expected = (tokens["solver"] * solver + tokens["verifier"] * verifier) / sum(tokens.values())
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-7)


def test_metrics_are_each_agents_and_their_mean() -> None:
    found = make_several().learn([team_of()], version=VERSION)
    for name in ("update/grad_norm", "policy/entropy"):
        assert found[name] == pytest.approx(sum(found[f"agents/{agent}/{name}"] for agent in AGENTS) / 2)
        assert found[f"agents/solver/{name}"] != found[f"agents/verifier/{name}"]
    largest = [found[f"agents/{agent}/policy/logprob_gap_max"] for agent in AGENTS]
    assert found["policy/logprob_gap_max"] == max(largest) < 1e-5


def test_the_record_of_an_update_is_of_whole_episodes() -> None:
    records = []
    for learner in (make_one(DR_MAS), make_several()):
        learner.learn([team_of(), team_of(1)], version=VERSION)
        assert learner.table is not None
        records.append(list(token_records(learner.table)))
    for (episode, one), (same, other) in zip(*records, strict=True):
        assert (episode.group, episode.member) == (same.group, same.member)
        assert one.advantages.tolist() == other.advantages.tolist() and any(one.advantages)
        assert one.marks.tolist() == other.marks.tolist() == [1] * episode.sampled_tokens
        assert one.ratios.tolist() == other.ratios.tolist()


def test_gradients_by_agent_are_of_their_own_weights() -> None:
    shared, several = make_one(DR_MAS), make_several()
    groups = [team_of(number, (1.0, 1.0, 0.0, 0.0) if number == 1 else REWARDS) for number in range(8)]
    one, other = (each.gradients(groups, version=VERSION, buckets=2) for each in (shared, several))
    said = {agent: sum(turns_of(each, agent).sampled_tokens for g in groups for each in g.episodes) for agent in AGENTS}
    for agent in AGENTS:
        share = said[agent] / sum(said.values())
        name = f"gradients/agents/{agent}"
        assert one[f"{name}/task"] == pytest.approx(share * other[f"{name}/task"], rel=1e-4)
        for factor in ("pooled_factor", "measured_factor"):
            assert one[f"{name}/{factor}"] == pytest.approx(other[f"{name}/{factor}"], rel=1e-4)
        # Gradients of tiny models have something in common, so that what is measured is only near what is predicted.
        assert one[f"{name}/measured_factor"] == pytest.approx(one[f"{name}/pooled_factor"], rel=0.3)
    assert one.keys() == other.keys() and other["gradients/1/task"] > 0
    assert all(parameter.grad is None for parameter in several.policies.parameters())


@pytest.mark.parametrize(("make", "agents"), [(make_one, ("",)), (make_several, AGENTS)], ids=["one", "several"])
def test_resumed_learners_equal_uninterrupted_ones_but_take_new_rates(
    make: Callable[..., Learner], agents: Sequence[str]
) -> None:
    algorithm = AlgorithmConfig.model_validate({"preset": "dapo", "advantage": "dr_mas", "kl": {"where": "loss"}})
    one, other, faster = make(algorithm), make(algorithm), make(algorithm, lr=0.5)
    groups = [team_of(0), team_of(1)]
    one.freeze_reference(None)
    one.learn(groups, version=VERSION)
    # The names in checkpoints: those of earlier versions can still be resumed.
    prefixes = [f"{agent}." if agent else "" for agent in agents]
    state, (tensors, values) = one.policy_state(), one.state()
    assert state.keys() == {prefix + name for prefix in prefixes for name in built("none").state_dict()}
    slots = [f"{index}.{slot}" for index in range(len(state) // len(agents)) for slot in SLOTS]
    assert tensors.keys() == {prefix + slot for prefix in prefixes for slot in slots}
    assert all((values[agent] if agent else values).keys() == {"generator", "optimizer"} for agent in agents)
    for learner in (other, faster):
        learner.load_policy(copy.deepcopy(state))
        learner.freeze_reference(copy.deepcopy(one.reference_state()))
        learner.load_state(*copy.deepcopy((tensors, values)))
    assert faster.learn(groups, version=-1)["update/learning_rate"] == 0.5
    assert one.learn(groups, version=-1) == other.learn(groups, version=-1)
    assert all(map(torch.equal, weights(one.policies), weights(other.policies)))


def test_the_turns_of_one_agent() -> None:
    episode = team_of().episodes[0]
    assert [turn.agent_id for turn in turns_of(episode, "solver").turns] == ["solver", "solver"]
    assert turns_of(episode, "") is episode and isinstance(episode, Episode)
