"""Scripts over the wire: who speaks, what each one sees, what is sent, and whose turn earns it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from starpod.client import Fleet
from starpod.trainer.agents.script import ScriptConfig, engine_agents
from starpod.trainer.algorithms.advantages import compute_advantages, penalised_rewards
from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.losses import kl_coefficients
from starpod.trainer.config import ConfigError, parse_config
from starpod.trainer.data.batch import Batch, RolloutBatch, samples_of
from starpod.trainer.data.episode import Episode, Group, Turn
from starpod.trainer.diagnostics.metrics import episode_metrics
from starpod.trainer.engines.base import Request
from starpod.trainer.models.tiny import train_tokenizer
from starpod.trainer.prompts.conversation import Template
from starpod.trainer.prompts.prompt import PromptConfig
from starpod.trainer.rewards.reward import RewardConfig, Rewards
from starpod.trainer.rollout.collect import Collector, Start
from starpod.trainer.rollout.environment import EnvironmentConfig
from tests.support import ServerProcess, start_server
from tests.trainer.rollout.test_collect import ACTIONS, LAKE, SAMPLING, reply, server, template
from tests.trainer.scripted_engine import ScriptedEngine
from tests.trainer.tiny_learner import make_learner
from tests.trainer.turns import a_turn

__all__ = ["server", "template"]

WAY = ["Down", "Down", "Right", "Right"]


async def collect(
    server: ServerProcess,
    template: Template,
    script: dict[str, Any],
    say: Callable[[Request, str], str],
    rewards: RewardConfig | None = None,
    environment: EnvironmentConfig = LAKE,
    begun: dict[int, Episode] | None = None,
    style: str = "compact",
    actions: tuple[str, ...] = ACTIONS,
) -> tuple[list[Episode], ScriptedEngine]:
    engine = ScriptedEngine(template, say)
    agents = engine_agents(
        ScriptConfig.model_validate(script),
        engine=engine,
        template=template,
        prompt=PromptConfig(style=style),  # type: ignore[arg-type]
        sampling=SAMPLING,
    )
    async with Fleet(server.address) as fleet:
        players = Collector(
            fleet=fleet, agents=agents, task=environment.task(actions), rewards=Rewards(rewards or RewardConfig())
        )
        group = await players.play_group(Start(3, 1), 2, begun)
    assert not group.failed, group.failed[0].error
    return group.episodes, engine


def verdicts(*given: str) -> Callable[[Request, str], str]:
    """The solver goes the way, and the verifier says these in turn, of each episode."""
    said: dict[str, int] = {}

    def say(request: Request, context: str) -> str:
        if "Proposed:" in context:
            said[request.conversation] = said.get(request.conversation, -1) + 1
            return reply(given[said[request.conversation] % len(given)])
        return reply("Down" if int(context.rpartition("P ")[2].split()[0]) < 2 else "Right")

    return say


# --- solver and verifier ----------------------------------------------------------------------------------------------


async def test_accepted_proposals_are_sent_and_what_they_earn_is_the_solvers(
    server: ServerProcess, template: Template
) -> None:
    paid = RewardConfig(verdict=0.3)
    (episode, _), engine = await collect(server, template, {"name": "solver_verifier"}, verdicts("Accept"), paid)
    assert episode.success and [turn.agent_id for turn in episode.turns] == ["solver", "verifier"] * 4
    assert [turn.actions for turn in episode.turns] == [part for way in WAY for part in ([way], [])]
    assert [turn.executed for turn in episode.turns] == [1, 0] * 4
    assert [turn.parts["environment"] for turn in episode.turns] == [0, 0, 0, 0, 0, 0, 1, 0]
    assert [turn.parts.get("verdict", 0) for turn in episode.turns] == [0, -0.3, 0, -0.3, 0, -0.3, 0, 0.3]
    assert all(turn.parts["format"] == 0 and turn.reward == sum(turn.parts.values()) for turn in episode.turns)
    assert episode.own_return == 1
    assert [request.agent for request in engine.requests if request.conversation.endswith("/0")] == [
        turn.agent_id for turn in episode.turns
    ]
    # Both see the state, and the verifier alone the proposal.
    seen = [request.prompt for request in engine.requests if request.conversation.endswith("/0")]
    shown = [template.tokenizer.decode(ids).rpartition("user")[2] for ids in seen]
    assert ["Proposed: Down" in text for text in shown[:4]] == [False, True, False, True]
    assert all("P 0 0" in text for text in shown[:2])
    # Each context is told from its beginning, and each reply is trained on once.
    assert all(turn.fresh for turn in episode.turns)
    assert [sum(sample.sampled) for sample in samples_of(episode)] == [len(turn.reply) for turn in episode.turns]
    assert not any("Proposed" in template.tokenizer.decode(turn.prompt) for turn in episode.turns[::2])


async def test_a_rejection_is_proposed_anew_and_the_last_proposal_is_not_judged(
    server: ServerProcess, template: Template
) -> None:
    (episode, _), engine = await collect(
        server, template, {"name": "solver_verifier", "proposals": 3}, verdicts("Reject", "Accept", "Reject", "Reject")
    )
    speakers = [turn.agent_id[0] for turn in episode.turns]
    assert "".join(speakers) == "svsv" + "svsvs" + "svsv" + "svsvs"
    assert [index for index, turn in enumerate(episode.turns) if turn.actions] == [2, 8, 11, 17]
    assert episode.success
    again = template.tokenizer.decode(engine.requests[4].prompt).rpartition("user")[2]
    assert "Reject.\nP 0 0" in again
    # No sampled stream is used twice.
    assert len({request.seed for request in engine.requests}) == len(engine.requests)


async def test_what_cannot_be_read_is_neither_judged_nor_sent(server: ServerProcess, template: Template) -> None:
    def say(request: Request, context: str) -> str:
        return "<think>no"

    lake = LAKE.model_copy(update={"max_turns": 2})
    (episode, _), _ = await collect(server, template, {"name": "solver_verifier"}, say, environment=lake)
    assert {turn.agent_id for turn in episode.turns} == {"solver"} and episode.end == "max_turns"
    assert [turn.parts["format"] for turn in episode.turns] == [-0.1] * 6
    # A verdict that cannot be read is none: the solver speaks again, and then it is sent.
    broken = verdicts("Perhaps")
    (episode, _), _ = await collect(server, template, {"name": "solver_verifier"}, broken)
    assert [turn.agent_id for turn in episode.turns[:3]] == ["solver", "verifier", "solver"]
    assert episode.turns[1].parts["format"] == -0.1 and episode.turns[2].actions == ["Down"]


async def test_each_role_has_its_own_instructions_where_there_is_a_system_message(
    server: ServerProcess, template: Template
) -> None:
    def say(request: Request, context: str) -> str:
        return reply("Accept" if "Proposed" in context.rpartition("user")[2] else "Down")

    script = {"name": "solver_verifier", "solver": "Propose wisely.", "verifier": "Judge harshly."}
    _, engine = await collect(server, template, script, say, style="full")
    first, second = (template.tokenizer.decode(engine.requests[index].prompt) for index in (0, 2))
    assert "Propose wisely." in first and "Judge harshly." not in first and "Left, Down" in first
    assert "Judge harshly." in second and "Accept, Reject" in second


@pytest.mark.parametrize("name", ["solver_verifier", "attempts"])
async def test_an_episode_goes_on_from_what_a_checkpoint_holds(
    server: ServerProcess, template: Template, name: str
) -> None:
    say = verdicts("Reject", "Accept")
    whole, _ = await collect(server, template, {"name": name}, say)
    cut = Episode.from_json(whole[0].to_json())
    del cut.turns[3:]
    cut.end, cut.success = "", None
    resumed, engine = await collect(server, template, {"name": name}, verdicts("Accept"), begun={0: cut})
    assert [turn.text for turn in resumed[0].turns[:3]] == [turn.text for turn in whole[0].turns[:3]]
    assert len([request for request in engine.requests if request.conversation.endswith("/0")]) == (
        len(resumed[0].turns) - 3
    )


# --- attempts ---------------------------------------------------------------------------------------------------------


def first_then(first: list[str], second: list[str]) -> Callable[[Request, str], str]:
    """Actions of the first attempt, and of the second."""

    def say(request: Request, context: str) -> str:
        before, again, after = context.partition("Again.")
        moves, part = (second, after) if again else (first, before)
        return reply(moves[part.count("assistant") - 1])

    return say


async def test_attempts_are_of_one_start_state_and_the_last_one_counts(
    server: ServerProcess, template: Template
) -> None:
    say = first_then(["Left"] * 6, WAY)
    (episode, _), engine = await collect(server, template, {"name": "attempts"}, say, RewardConfig(improvement=10))
    assert [turn.agent_id for turn in episode.turns] == ["attempt1"] * 6 + ["attempt2"] * 4
    assert (episode.success, episode.end, episode.own_return) == (True, "terminal", 1)
    assert episode.turns[5].info["success"] is not True
    assert [turn.observation for turn in (episode.turns[0], episode.turns[6])] == [episode.turns[0].observation] * 2
    assert episode.turns[-1].parts["improvement"] == 10 and episode.total_reward == 11
    # The first attempt is in view, and nothing is said of it.
    second = template.tokenizer.decode(engine.requests[-1].prompt)
    assert second.count("Left</answer>") == 6
    assert len(samples_of(episode)) == 1
    assert [turn.parts["attempt"] for turn in episode.turns[:6]] == [0] * 6


@pytest.mark.parametrize(
    ("first", "second", "earned", "total"),
    [("Left", "Left", 0, 0), ("Left", "way", 11, 11), ("way", "Left", -10, -9), ("way", "way", 1, 2)],
)
async def test_the_second_attempt_earns_what_it_gained(
    server: ServerProcess, template: Template, first: str, second: str, earned: float, total: float
) -> None:
    """SCoRe with alpha 10: (r1, r2) to the reward of attempt 2, and to the sum."""
    say = first_then(*([*WAY] if each == "way" else ["Left"] * 6 for each in (first, second)))
    (episode, _), _ = await collect(server, template, {"name": "attempts"}, say, RewardConfig(improvement=10))
    own = [turn for turn in episode.turns if turn.agent_id == "attempt2"]
    assert sum(turn.reward for turn in own) == earned
    assert episode.total_reward == total
    assert episode.success is (True if second == "way" else episode.success)
    found = episode_metrics([Group(0, [episode])])
    right = [each == "way" for each in (first, second)]
    assert [found[f"collect/{name}_attempt_success"] for name in ("first", "last")] == right
    told = [found[f"collect/attempts_{name}"] for name in ("mended", "spoilt", "identical")]
    assert told == [right == [False, True], right == [True, False], first == second]


# --- SCoRe's first stage ----------------------------------------------------------------------------------------------


def two_attempts(estimator: str, agents: dict[str, float]) -> tuple[AlgorithmConfig, RolloutBatch]:
    """Two tokens in the first attempt and one in the second, which alone is rewarded."""
    turns = [
        a_turn([1, 2], agent_id="attempt1", parts={"environment": 0.0, "attempt": 1.0}),
        a_turn([3], agent_id="attempt2", fresh=False, reward=1.0, parts={"environment": 1.0}),
    ]
    batch = Batch([Episode(0, 0, "lake", turns=turns)])
    config = AlgorithmConfig(
        preset="score",
        kl={"where": "reward", "estimator": estimator, "coefficient": 1e-9, "agents": agents},  # type: ignore[arg-type]
    )
    reference = torch.zeros(1, 3) - torch.tensor([[0.2, -0.1, 0.4]])
    rollout = RolloutBatch(
        mask_BT=batch.mask_BT,
        turns_BT=batch.turns_BT(),
        rewards_BT=batch.rewards_BT(),
        groups_B=torch.zeros(1, dtype=torch.int64),
        old_logprobs_BT=torch.zeros(1, 3),
        sampler_logprobs_BT=torch.zeros(1, 3),
        ref_logprobs_BT=reference,
        bootstrap_B=torch.zeros(1),
        agents=[["attempt1", "attempt2"]],
        parts=[[turn.parts for turn in turns]],
    )
    return config, rollout


@pytest.mark.parametrize(("estimator", "left"), [("k1", 0.99), ("k3", 0.997610)])
def test_the_first_attempt_alone_is_held_to_the_first_policy(estimator: str, left: float) -> None:
    config, rollout = two_attempts(estimator, {"attempt1": 0.1})
    rewards_BT = penalised_rewards(config, rollout)
    assert rewards_BT.sum().item() == pytest.approx(left, abs=1e-6)
    assert rewards_BT[0, 2].item() == pytest.approx(1, abs=1e-6)


@settings(max_examples=30)
@given(st.dictionaries(st.sampled_from(["attempt1", "attempt2", "other"]), st.floats(0, 1), max_size=3))
def test_coefficients_by_agent_are_on_their_tokens(agents: dict[str, float]) -> None:
    config, rollout = two_attempts("k1", agents)
    found = kl_coefficients(config.kl, rollout)
    if not agents:
        assert found == config.kl.coefficient
        return
    assert isinstance(found, torch.Tensor)
    one, two = (agents.get(f"attempt{number}", config.kl.coefficient) for number in (1, 2))
    assert found[0].tolist() == pytest.approx([one, one, two])


def test_each_attempt_is_compared_with_its_own_kind() -> None:
    """Rewards of attempts (0, 1), (1, 1), (0, 0): each centred by itself, whatever the other earned."""

    def episode(member: int, *rewards: float) -> Episode:
        turns: list[Turn] = [
            a_turn([1], agent_id=f"attempt{number}", fresh=number == 1, reward=reward)
            for number, reward in enumerate(rewards, 1)
        ]
        return Episode(0, member, "lake", turns=turns)

    learner = make_learner(AlgorithmConfig(preset="score", kl={"where": "off"}))  # type: ignore[arg-type]
    batch = Batch([episode(0, 0, 11), episode(1, 1, 1), episode(2, 0, 0)])
    found = compute_advantages(learner.algorithm, learner._unscored(batch)).advantages_BT
    assert found[:, 0].tolist() == pytest.approx([-1 / 3, 2 / 3, -1 / 3])
    assert found[:, 1].tolist() == pytest.approx([7, -3, -4])


# --- self-play --------------------------------------------------------------------------------------------------------

GAME = EnvironmentConfig(
    id="tic_tac_toe-v1", options={"opponent": "none", "observation": "line"}, max_turns=9, max_actions_per_turn=1
)


@pytest.fixture(scope="module")
def game() -> Iterator[ServerProcess]:
    with start_server("--environment-module", "environments/starpod/environments/tic_tac_toe") as process:
        yield process


@pytest.fixture(scope="module")
def board() -> Template:
    texts = ["X O . . . . X . O 1 2 3 4 5 6 7 8 9", "<think> go </think><answer> 1 </answer>"]
    return Template(train_tokenizer(texts, size=400), prefill="<think>")


async def play_itself(game: ServerProcess, board: Template, moves: str) -> tuple[list[Episode], ScriptedEngine]:
    """Both episodes are these moves, in turn."""
    made: dict[str, int] = {}

    def say(request: Request, context: str) -> str:
        made[request.conversation] = made.get(request.conversation, -1) + 1
        return reply(moves[made[request.conversation]])

    paid = RewardConfig(zero_sum=True)
    return await collect(game, board, {"name": "self_play"}, say, paid, GAME, actions=tuple("123456789"))


async def test_one_policy_plays_both_sides_and_what_one_wins_the_other_has_lost(
    game: ServerProcess, board: Template
) -> None:
    (episode, _), engine = await play_itself(game, board, "14253")
    assert [turn.agent_id for turn in episode.turns] == ["X", "O", "X", "O", "X"]
    assert {request.agent for request in engine.requests} == {"X", "O"}
    assert episode.terminated and [turn.reward for turn in episode.turns] == [0, 0, 0, -1, 1]
    assert episode.total_reward == 0 and episode.own_return == 1
    # Each sees its own turns alone, told from the beginning.
    seen = [board.tokenizer.decode(turn.prompt) for turn in episode.turns]
    assert all(turn.fresh for turn in episode.turns)
    assert "X X . . O . . . . ." in seen[2] and "O X . ." not in seen[2]
    assert "O X X . O . . . . ." in seen[3] and "X . . . . . . . . ." not in seen[3]


async def test_a_taken_cell_is_played_again_by_the_same_agent(game: ServerProcess, board: Template) -> None:
    (episode, _), _ = await play_itself(game, board, "114283")
    assert [turn.agent_id for turn in episode.turns][:4] == ["X", "O", "O", "X"]
    won = [turn for turn in episode.turns if turn.parts["environment"]]
    lost = [turn for turn in episode.turns if turn.parts["opponents"]]
    assert [turn.agent_id for turn in (*won, *lost)] == ["X", "O"] and lost[0].actions == ["8"]


# --- refused ----------------------------------------------------------------------------------------------------------


OWN = {"name": "solver_verifier", "policies": ["solver", "verifier"]}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"script": "duo"}, "solver_verifier"),
        ({"rewards": {"zero_sum": True}}, "rewards.zero_sum belongs to self_play"),
        ({"script": {"name": "attempts", "proposals": 3}}, "script.proposals belongs to solver_verifier"),
        ({"rewards": {"verdict": 1}}, "rewards.verdict belongs to solver_verifier"),
        ({"script": "solver_verifier", "rewards": {"improvement": 1}}, "rewards.improvement belongs to attempts"),
        ({"script": "attempts", "environment": {"expert_moves_left": 2}}, "drop environment.expert_moves_left"),
        ({"script": "attempts", "collect": {"search": {"strategy": "best_of"}}}, "the episodes of one agent"),
        ({"script": "attempts", "collect": {"agent": {"command": ["play"]}}}, "a program plays by itself"),
        ({"algorithm": {"kl": {"agents": {"attempt1": 0.1}}}}, "algorithm.kl.agents is given"),
        ({"script": {"policies": ["a", "b"]}}, "set script.name to solver_verifier or self_play"),
        ({"script": {"name": "attempts", "policies": ["a", "b"]}}, "in script attempts there is one context"),
        ({"script": {"name": "solver_verifier", "policies": ["solver"]}}, r"solver_verifier are \[solver, verifier\]"),
        ({"script": {"name": "self_play", "policies": ["X", "X"]}}, "name at least two agents, each once"),
        ({"script": {"name": "self_play", "policies": ["X", "a.b"]}}, "'a.b', which cannot stand in metrics"),
        ({"script": OWN}, "algorithm.advantage gae needs a critic"),
        ({"script": OWN, "algorithm": "dapo", "engine": "vllm"}, "engine.name vllm is for one policy: set it to torch"),
        ({"script": OWN, "algorithm": "seeupo"}, "algorithm.order reverse_turns is for one policy"),
        ({"script": OWN, "algorithm": "dapo", "scorer": "q"}, "scorer.kind q is for one policy: set it to off"),
        (
            {"script": OWN, "algorithm": "dapo", "monitor": {"information": {"every": 5}}},
            "monitor.information.every 5 is for one policy: set it to 0",
        ),
        ({"algorithm": {"kl": {"where": "loss", "agents": {"attempt1": -1}}}}, "give 0 or more"),
    ],
)
def test_what_makes_no_sense_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config(values)
