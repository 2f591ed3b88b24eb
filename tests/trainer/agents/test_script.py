"""Scripts over the wire: who speaks, what each one sees, what is sent, and whose turn earns it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from starpod.client import Fleet, Session
from starpod.trainer.agents.config import ScriptConfig
from starpod.trainer.agents.script import engine_agents
from starpod.trainer.algorithms.advantages import compute_advantages, penalised_rewards
from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.sections import RewardKL
from starpod.trainer.configuration.loading import parse_config
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.data.batch import Batch, RolloutBatch
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.data.group import Group
from starpod.trainer.data.sample import samples_of
from starpod.trainer.diagnostics.metrics import episode_metrics
from starpod.trainer.engines.base import Request
from starpod.trainer.models.tiny import train_tokenizer
from starpod.trainer.prompts.prompt import PromptConfig
from starpod.trainer.prompts.template import Template
from starpod.trainer.rewards.reward import RewardConfig, Rewards
from starpod.trainer.rollout.collect import Collector, Start
from starpod.trainer.rollout.config import EnvironmentConfig
from starpod.trainer.rollout.environment import make_task
from tests.trainer.lake import ACTIONS, LAKE, SAMPLING, TEMPLATE, reply
from tests.trainer.scripted_engine import Say, ScriptedEngine
from tests.trainer.tiny_learner import make_trainer
from tests.trainer.turns import a_turn

WAY = ["Down", "Down", "Right", "Right"]


async def collect(
    fleet: Fleet,
    script: dict[str, Any],
    say: Say | str,
    rewards: RewardConfig | None = None,
    environment: EnvironmentConfig = LAKE,
    begun: dict[int, Episode] | None = None,
    style: str = "compact",
    actions: tuple[str, ...] = ACTIONS,
    template: Template = TEMPLATE,
) -> tuple[Episode, ScriptedEngine]:
    """The first episode of a group of two, and the engine that gave the replies."""
    engine = ScriptedEngine(template, say)
    agents = engine_agents(
        ScriptConfig.model_validate(script),
        engine=engine,
        template=template,
        prompt=PromptConfig(style=style),  # type: ignore[arg-type]
        sampling=SAMPLING,
    )
    paid = Rewards(rewards or RewardConfig())
    players = Collector(fleet=fleet, agents=agents, task=make_task(environment, actions), rewards=paid)
    group = await players.play_group(Start(3, 1), 2, begun)
    assert not group.failed, group.failed[0].error
    return group.episodes[0], engine


def asked_of_first(engine: ScriptedEngine) -> list[Request]:
    """The requests of the first episode."""
    return [request for request in engine.requests if request.conversation.endswith("/0")]


def verdicts(*given: str) -> Say:
    """The solver goes the way, and the verifier says these in turn, of each episode."""
    said: dict[str, int] = {}

    def say(request: Request, context: str) -> str:
        if "Proposed:" in context:
            said[request.conversation] = said.get(request.conversation, -1) + 1
            return reply(given[said[request.conversation] % len(given)])
        return reply("Down" if int(context.rpartition("P ")[2].split()[0]) < 2 else "Right")

    return say


# --- solver and verifier ----------------------------------------------------------------------------------------------


async def test_accepted_proposals_are_sent_and_what_they_earn_is_the_solvers(fleet: Fleet) -> None:
    paid = RewardConfig(verdict=0.3)
    episode, engine = await collect(fleet, {"name": "solver_verifier"}, verdicts("Accept"), paid)
    assert episode.success and episode.own_return == 1
    assert [(turn.agent_id, turn.actions, turn.executed) for turn in episode.turns] == [
        said for way in WAY for said in (("solver", [way], 1), ("verifier", [], 0))
    ]
    assert [turn.parts["environment"] for turn in episode.turns] == [0, 0, 0, 0, 0, 0, 1, 0]
    assert [turn.parts.get("verdict", 0) for turn in episode.turns] == [0, -0.3, 0, -0.3, 0, -0.3, 0, 0.3]
    assert all(turn.parts["format"] == 0 and turn.reward == sum(turn.parts.values()) for turn in episode.turns)
    asked = asked_of_first(engine)
    assert [request.agent for request in asked] == [turn.agent_id for turn in episode.turns]
    # Both see the state, and only the verifier sees the proposal.
    shown = [TEMPLATE.tokenizer.decode(request.prompt).rpartition("user")[2] for request in asked[:4]]
    assert ["Proposed: Down" in text for text in shown] == [False, True, False, True]
    assert all("P 0 0" in text for text in shown[:2])
    # Each prompt contains its whole context, and each reply is trained on once.
    assert all(turn.fresh for turn in episode.turns)
    assert [sum(sample.sampled) for sample in samples_of(episode)] == [len(turn.reply) for turn in episode.turns]
    assert not any("Proposed" in TEMPLATE.tokenizer.decode(turn.prompt) for turn in episode.turns[::2])


async def test_a_rejected_action_is_proposed_again_and_the_last_proposal_is_not_judged(fleet: Fleet) -> None:
    say = verdicts("Reject", "Accept", "Reject", "Reject")
    episode, engine = await collect(fleet, {"name": "solver_verifier", "proposals": 3}, say)
    assert "".join(turn.agent_id[0] for turn in episode.turns) == "svsv" + "svsvs" + "svsv" + "svsvs"
    assert [index for index, turn in enumerate(episode.turns) if turn.actions] == [2, 8, 11, 17]
    assert episode.success
    again = TEMPLATE.tokenizer.decode(engine.requests[4].prompt).rpartition("user")[2]
    assert "Reject.\nP 0 0" in again
    # No sampled stream is used twice.
    assert len({request.seed for request in engine.requests}) == len(engine.requests)


async def test_what_cannot_be_read_is_neither_judged_nor_sent(fleet: Fleet) -> None:
    lake = LAKE.model_copy(update={"max_turns": 2})
    episode, _ = await collect(fleet, {"name": "solver_verifier"}, "<think>no", environment=lake)
    assert episode.end == "max_turns"
    assert [(turn.agent_id, turn.parts["format"]) for turn in episode.turns] == [("solver", -0.1)] * 6
    # A verdict that cannot be read is none: the solver speaks again, and then it is sent.
    episode, _ = await collect(fleet, {"name": "solver_verifier"}, verdicts("Perhaps"))
    assert [turn.agent_id for turn in episode.turns[:3]] == ["solver", "verifier", "solver"]
    assert episode.turns[1].parts["format"] == -0.1 and episode.turns[2].actions == ["Down"]


async def test_each_role_has_its_own_instructions_where_there_is_a_system_message(fleet: Fleet) -> None:
    def say(request: Request, context: str) -> str:
        return reply("Accept" if "Proposed" in context.rpartition("user")[2] else "Down")

    script = {"name": "solver_verifier", "solver": "Propose wisely.", "verifier": "Judge harshly."}
    _, engine = await collect(fleet, script, say, style="full")
    first, second = (TEMPLATE.tokenizer.decode(engine.requests[index].prompt) for index in (0, 2))
    assert "Propose wisely." in first and "Judge harshly." not in first and "Left, Down" in first
    assert "Judge harshly." in second and "Accept, Reject" in second


@pytest.mark.parametrize("name", ["solver_verifier", "attempts"])
async def test_an_episode_continues_from_what_a_checkpoint_holds(fleet: Fleet, name: str) -> None:
    whole, _ = await collect(fleet, {"name": name}, verdicts("Reject", "Accept"))
    cut = Episode.from_json(whole.to_json())
    del cut.turns[3:]
    cut.end, cut.success = "", None
    resumed, engine = await collect(fleet, {"name": name}, verdicts("Accept"), begun={0: cut})
    assert [turn.text for turn in resumed.turns[:3]] == [turn.text for turn in whole.turns[:3]]
    assert len(asked_of_first(engine)) == len(resumed.turns) - 3


# --- attempts ---------------------------------------------------------------------------------------------------------


async def test_no_checkpoint_takes_the_end_of_an_attempt_for_that_of_the_episode(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: dict[int, Episode] = {}
    ends, close = [], Session.close

    async def note(session: Session) -> None:
        ends.append(begun[session.member].end)
        await close(session)

    monkeypatch.setattr(Session, "close", note)  # the loop may save here
    await collect(fleet, {"name": "attempts"}, first_then(WAY, WAY), begun=begun)
    assert ends == ["", ""]


def first_then(first: list[str], second: list[str]) -> Say:
    """Actions of the first attempt, and of the second."""

    def say(request: Request, context: str) -> str:
        before, again, after = context.partition("Again.")
        moves, part = (second, after) if again else (first, before)
        return reply(moves[part.count("assistant") - 1])

    return say


@pytest.mark.parametrize(
    ("first", "second", "earned", "total"),
    [("Left", "Left", 0, 0), ("Left", "way", 11, 11), ("way", "Left", -10, -9), ("way", "way", 1, 2)],
)
async def test_the_second_attempt_earns_what_it_gained(
    fleet: Fleet, first: str, second: str, earned: float, total: float
) -> None:
    """SCoRe with alpha 10: (r1, r2) to the reward of attempt 2, and to the sum. Both begin in one start state."""
    moves = [[*WAY] if each == "way" else ["Left"] * 6 for each in (first, second)]
    episode, engine = await collect(fleet, {"name": "attempts"}, first_then(*moves), RewardConfig(improvement=10))
    own = [turn for turn in episode.turns if turn.agent_id == "attempt2"]
    assert [turn.agent_id for turn in episode.turns] == ["attempt1"] * len(moves[0]) + ["attempt2"] * len(moves[1])
    assert episode.turns[0].observation == own[0].observation
    assert sum(turn.reward for turn in own) == earned
    assert own[-1].parts["improvement"] == earned - (second == "way")
    assert (episode.success, episode.total_reward) == (second == "way" or episode.success, total)
    # The first attempt is in view, and nothing is said of it.
    shown = TEMPLATE.tokenizer.decode(engine.requests[-1].prompt)
    assert shown.count("Left</answer>") >= 6 * (first == "Left")
    assert len(samples_of(episode)) == 1
    assert {turn.parts["attempt"] for turn in episode.turns[: len(moves[0])]} == {float(first == "way"), 0.0}
    found = episode_metrics([Group(0, [episode])])
    right = [each == "way" for each in (first, second)]
    assert [found[f"collect/{name}_attempt_success"] for name in ("first", "last")] == right
    told = [found[f"collect/attempts_{name}"] for name in ("mended", "spoilt", "identical")]
    assert told == [right == [False, True], right == [True, False], first == second]


async def test_each_attempt_has_its_own_random_state(fleet: Fleet) -> None:
    slippery = LAKE.model_copy(update={"max_turns": 4, "options": {**LAKE.options, "success_rate": 0.34}})
    say = reply("Down", "Up")
    episode, _ = await collect(fleet, {"name": "attempts", "attempts": 3}, say, environment=slippery)
    paths = [[turn.observation for turn in episode.turns if turn.attempt == number] for number in range(3)]
    assert len({path[0] for path in paths}) == 1
    assert len(set(map(tuple, paths))) == 3


# --- SCoRe's first stage ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("estimator", "left"), [("k1", 0.99), ("k3", 0.997610)])
def test_the_first_attempt_alone_is_held_to_the_first_policy(estimator: str, left: float) -> None:
    """The first attempt has two tokens. Only the second one, with one token, is rewarded."""
    turns = [
        a_turn([1, 2], agent_id="attempt1", parts={"environment": 0.0, "attempt": 0.0}),
        a_turn([3], agent_id="attempt2", fresh=False, parts={"environment": 1.0}),
    ]
    batch = Batch([Episode(0, 0, "lake", turns=turns)])
    kl = {"where": "reward", "estimator": estimator, "coefficient": 1e-9, "agents": {"attempt1": 0.1}}
    reference_BT = torch.zeros(1, 3) - torch.tensor([[0.2, -0.1, 0.4]])
    rollout = replace(RolloutBatch.of(batch), ref_logprobs_BT=reference_BT)
    rewards_BT = penalised_rewards(RewardKL.model_validate(kl), rollout)
    assert rewards_BT.sum().item() == pytest.approx(left, abs=1e-6)
    assert rewards_BT[0, 2].item() == pytest.approx(1, abs=1e-6)


def test_each_attempt_is_compared_with_its_own_kind() -> None:
    """Rewards of attempts (0, 1), (1, 1), (0, 0): each centred by itself, whatever the other earned."""

    def episode(member: int, *rewards: float) -> Episode:
        turns: list[Turn] = [
            a_turn([1], agent_id=f"attempt{number}", fresh=number == 1, reward=reward)
            for number, reward in enumerate(rewards, 1)
        ]
        return Episode(0, member, "lake", turns=turns)

    trainer = make_trainer(AlgorithmConfig(preset="score", kl={"where": "off"}))  # type: ignore[arg-type]
    batch = Batch([episode(0, 0, 11), episode(1, 1, 1), episode(2, 0, 0)])
    found = compute_advantages(trainer.algorithm, trainer.tabulate(batch)).advantages_BT
    assert found[:, 0].tolist() == pytest.approx([-1 / 3, 2 / 3, -1 / 3])
    assert found[:, 1].tolist() == pytest.approx([7, -3, -4])


# --- self-play --------------------------------------------------------------------------------------------------------

GAME = EnvironmentConfig(
    id="tic_tac_toe-v1", options={"opponent": "none", "observation": "line"}, max_turns=9, max_actions_per_turn=1
)


BOARD = Template(
    train_tokenizer(["X O . . . . X . O 1 2 3 4 5 6 7 8 9", "<think> go </think><answer> 1 </answer>"], size=400),
    prefill="<think>",
)


async def play_itself(fleet: Fleet, moves: str) -> tuple[Episode, ScriptedEngine]:
    """Both episodes are these moves, in turn."""
    made: dict[str, int] = {}

    def say(request: Request, context: str) -> str:
        made[request.conversation] = made.get(request.conversation, -1) + 1
        return reply(moves[made[request.conversation]])

    paid = RewardConfig(zero_sum=True)
    cells = tuple("123456789")
    return await collect(fleet, {"name": "self_play"}, say, paid, GAME, None, "full", cells, BOARD)


async def test_one_policy_plays_both_sides_and_what_one_wins_the_other_has_lost(fleet: Fleet) -> None:
    episode, engine = await play_itself(fleet, "14253")
    assert [(turn.agent_id, turn.reward) for turn in episode.turns] == [
        ("X", 0), ("O", 0), ("X", 0), ("O", -1), ("X", 1)
    ]  # fmt: skip
    assert {request.agent for request in engine.requests} == {"X", "O"}
    assert (episode.terminated, episode.total_reward, episode.own_return) == (True, 0, 1)
    # Each sees only its own turns, from the beginning.
    seen = [BOARD.tokenizer.decode(turn.prompt) for turn in episode.turns]
    assert all(turn.fresh for turn in episode.turns)
    assert all("Turn 1 of 9" in context for context in seen)
    assert "X X . . O . . . . ." in seen[2] and "O X . ." not in seen[2]
    assert "O X X . O . . . . ." in seen[3] and "X . . . . . . . . ." not in seen[3]


async def test_a_taken_cell_is_played_again_by_the_same_agent(fleet: Fleet) -> None:
    episode, _ = await play_itself(fleet, "114283")
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
        *(
            (
                {"rewards": {"zero_sum": True}, "script": {"name": "self_play"}, "algorithm": {"advantage": advantage}},
                f"advantage {advantage} adds up those of all agents",
            )
            for advantage in ("gae", "bilevel_gae", "grpo", "gigpo", "dr_mas", "reinforce_plus_plus")
        ),
        *(
            (
                {
                    "rewards": {"zero_sum": True},
                    "script": {"name": "self_play"},
                    "algorithm": {"preset": "starpo-s", "advantage": "attempts", **choice},
                },
                "choose groups by their penalties alone",
            )
            for choice in ({}, {"filter": "none", "dynamic_sampling": {"enabled": True}})
        ),
        ({"script": {"name": "attempts", "proposals": 3}}, "script.proposals belongs to solver_verifier"),
        ({"rewards": {"verdict": 1}}, "rewards.verdict belongs to solver_verifier"),
        ({"script": "solver_verifier", "rewards": {"improvement": 1}}, "rewards.improvement belongs to attempts"),
        ({"script": "attempts", "environment": {"expert_moves_left": 2}}, "drop environment.expert_moves_left"),
        ({"script": "attempts", "collect": {"search": {"strategy": "best_of"}}}, "is for episodes of one agent"),
        ({"script": "attempts", "collect": {"agent": {"command": ["play"]}}}, "a program plays alone"),
        (
            {"algorithm": {"kl": {"agents": {"attempt1": 0.1}}}},
            "agents belongs to reward, loss, and algorithm.kl is off",
        ),
        ({"script": {"policies": ["a", "b"]}}, "set script.name to solver_verifier or self_play"),
        ({"script": {"name": "attempts", "policies": ["a", "b"]}}, "script attempts has one context"),
        ({"script": {"name": "solver_verifier", "policies": ["solver"]}}, r"solver_verifier are \[solver, verifier\]"),
        ({"script": {"name": "self_play", "policies": ["X", "X"]}}, "name at least two agents, each once"),
        ({"script": {"name": "self_play", "policies": ["X", "a.b"]}}, "'a.b', which cannot be part of a metric's name"),
        ({"script": OWN}, "algorithm.advantage gae needs a critic"),
        ({"script": OWN, "algorithm": "dapo", "engine": "vllm"}, "engine.name vllm is for one policy: set it to torch"),
        ({"script": OWN, "algorithm": "seeupo"}, "algorithm.order reverse_turns is for one policy"),
        ({"script": OWN, "algorithm": "dapo", "scorer": "q"}, "scorer.kind q is for one policy: set it to off"),
        (
            {"script": OWN, "algorithm": "dapo", "monitor": {"information": {"every": 5}}},
            "monitor.information.every 5 is for one policy: set it to 0",
        ),
        ({"algorithm": {"kl": {"where": "loss", "agents": {"attempt1": -1}}}}, "greater than or equal to 0"),
    ],
)
def test_what_makes_no_sense_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config(values)
