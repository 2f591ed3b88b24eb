"""Rewards of random scripts, attempts, branches and turns without tokens, compared with a slow reimplementation.

The environment writes its events into each turn's `info`, and the agents write attempt and speaker into its text.
The reimplementation uses nothing else of a turn except its blocks and tokens.
"""

import asyncio
import copy
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from starpod.client import Fleet, Limits, Observation, Session, Transition, Want
from starpod.trainer.agents.base import Agent, Agents, Move, Stop, Task, Tokens
from starpod.trainer.algorithms.advantages import advantages_by_kind
from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.terms import TERMS, CreditTerm
from starpod.trainer.configuration.loading import load_config
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.data.batch import Batch
from starpod.trainer.data.episode import DONE, Episode, Turn, paid_turns, part_sums
from starpod.trainer.data.group import Group
from starpod.trainer.rewards.reward import RewardConfig, Rewards
from starpod.trainer.rollout.branches import Brancher
from starpod.trainer.rollout.config import AnySearch
from starpod.trainer.rollout.play import play
from starpod.trainer.rollout.search import Search
from starpod.trainer.scorers.base import pay
from starpod.trainer.scorers.config import QConfig
from starpod.trainer.scorers.q import QScorer, turn_targets
from starpod.v1 import environment_pb2 as pb
from tests.trainer.tiny_learner import make_trainer
from tests.trainer.turns import a_turn

NAMES = ("look", "move", "fly")
WEIGHTS = {"a": 2.0, "c": 0.5}
CONFIG = RewardConfig.model_validate(
    {
        "format_penalty": 0,
        "criteria": {"weight": 3, "weights": WEIGHTS},
        "tools": {"bonus": 0.25, "actions": ["look", "move"]},
        "subgoals": {"keep_penalty": -1, "consistency_penalty": -0.5},
        "verdict": 0.125,
        "improvement": 2,
        "zero_sum": True,
    }
)


@dataclass
class World:
    """A session in this process. All that happens follows from its luck and the number of the step."""

    luck: str
    seed: int = 0
    dynamics_seed: int = 0
    member: int = 0
    step_index: int = 0
    done: bool = False
    limits: Limits = field(default_factory=lambda: Limits(6, 3, 0))
    environment_id: str = "world-v1"
    version: str = "1.0.0"
    instructions: str = ""
    forks: int = 0

    @property
    def observation(self) -> Observation:
        return Observation((f"step {self.step_index}",))

    async def step(self, actions: Sequence[str]) -> Transition:
        rng = random.Random(f"{self.luck}/{self.step_index}")
        self.step_index += 1
        ran = [rng.random() < 0.6 for _ in actions]
        limit = self.step_index == self.limits.max_turns
        self.done = limit or rng.random() < 0.2
        success = rng.random() < 0.6 if self.done else None
        reward = rng.choice((0.0, 1.0, -0.5))
        criteria = {name: rng.random() < 0.5 for name in "abc" if rng.random() < 0.5}
        message = pb.Transition(
            reward=reward,
            criteria=criteria,
            outcomes=[pb.Outcome(executed=each, valid=each) for each in ran],
            terminated=self.done and not limit,
            truncated=limit,
            end_reason=(pb.END_REASON_MAX_TURNS if limit else pb.END_REASON_TERMINAL) if self.done else 0,
        )
        if success is not None:
            message.success = success
        executed = [name for name, each in zip(actions, ran, strict=True) if each]
        message.info.update({"reward": reward, "executed": executed, "criteria": criteria})
        if self.done:
            message.info.update({"won": bool(success)})
        return Transition.from_proto(message)

    async def fork(
        self, count: int = 1, *, reseed: bool = False, dynamics_seeds: Sequence[int] | None = None
    ) -> list["World"]:
        self.forks += 1
        seeds = dynamics_seeds or range(count)
        return [replace(self, luck=f"{self.luck}/{self.forks}/{each}", forks=0) for each in seeds]

    async def snapshot(self) -> "World":
        return replace(self)

    async def close(self) -> None:
        self.done = True


class Worlds:
    """A fake fleet with the methods that searches use."""

    reach, _begin = Fleet.reach, Fleet._begin

    async def open(self, environment_id: str, *, seed: int, count: int = 1, **_: Any) -> list[World]:
        return [World(f"{seed}/{member}", seed, member=member) for member in range(count)]

    async def restore(self, snapshot: World, **_: Any) -> World:
        return replace(snapshot)

    async def close_sessions(self, sessions: Sequence[World]) -> None:
        for session in sessions:
            session.done = True


class Cast(Agents):
    """Agents that speak at random, alone."""

    want = Want()
    at_once = None

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def agent(self, session: Session, task: Task, group: int) -> Agent:
        return Talker("solo", self.seed)


class Talker(Agent):
    """Speaks at random, as a script does: solo, a solver and a verifier, several attempts, or two players of a game."""

    def __init__(self, script: str, seed: int, attempts: int = 1) -> None:
        self.script, self.seed = script, seed
        self.attempts = attempts
        self.replies = 10
        self.number = 0
        self.proposed: list[str] = []

    def begin_attempt(self, number: int) -> None:
        self.number = number

    async def act(self, observation: Observation, episode: Episode) -> Move | Stop:
        rng = random.Random(f"{self.seed}/{episode.member}/{len(episode.turns)}")
        actions: list[str] | None = [rng.choice(NAMES) for _ in range(rng.randint(0, 3))]
        speaker, of = "", 0
        if self.script == "judged":
            speaker = "verifier" if self.proposed else "solver"
            if self.proposed:
                accepted = rng.random() < 0.5
                actions, of, self.proposed = (self.proposed, 1, []) if accepted else (None, 0, [])
            elif actions and rng.random() < 0.8:
                self.proposed, actions = actions, None
        elif self.script == "attempts":
            speaker = f"attempt{self.number + 1}"
        elif self.script == "game":
            speaker = rng.choice("xo")
        if self.script != "judged" and rng.random() < 0.15:
            actions = None
        blocks = {"switch": rng.choice(("KEEP", "SWITCH"))} if rng.random() < 0.8 else {}
        if rng.random() < 0.8:
            blocks["subgoal"] = rng.choice("de")
        reply = [2] * rng.choice((0, 0, 1, 2))
        tokens = Tokens([1], True, reply, [0.0] * len(reply), [0] * len(reply)) if reply else None
        return Move(f"{self.number} {speaker}", actions, tokens=tokens, blocks=blocks, agent_id=speaker, of=of)

    def repeat(self, observation: Observation, episode: Episode, turn: Turn) -> Move | None:
        tokens = Tokens(turn.prompt, turn.fresh, turn.reply, turn.logprobs, turn.versions) if turn.reply else None
        return Move(turn.text, turn.actions or None, tokens=tokens, blocks=turn.blocks)


def played(script: str, seed: int, attempts: int = 1, member: int = 0) -> Episode:
    world = World(f"{seed}/{member}", seed, member=member)
    return asyncio.run(play(Talker(script, seed, attempts), cast(Session, world), rewards=Rewards(CONFIG)))


# --- the second reading -----------------------------------------------------------------------------------------------


def where(turn: Turn) -> tuple[int, str]:
    """Attempt and speaker."""
    number, _, speaker = turn.text.partition(" ")
    return int(number), speaker


def should_earn(episode: Episode) -> list[dict[str, float]]:
    """Return the parts of each turn's reward, without zeros."""
    turns, last = episode.turns, max((where(turn)[0] for turn in episode.turns), default=0)
    paid: list[defaultdict[str, float]] = [defaultdict(float) for _ in turns]
    earned: defaultdict[int, float] = defaultdict(float)
    for i, turn in enumerate(turns):
        attempt, speaker = where(turn)
        before = [j for j in range(i) if where(turns[j])[0] == attempt]
        same = [j for j in range(len(turns)) if where(turns[j]) == (attempt, speaker)]
        reward = turn.info.get("reward", 0.0)
        earned[attempt] += reward
        paid[i]["environment" if attempt == last else "attempt"] += reward
        for name, met in turn.info.get("criteria", {}).items():
            held = [turns[j].info["criteria"][name] for j in before if name in turns[j].info.get("criteria", {})]
            paid[i]["criteria"] += 3 * WEIGHTS.get(name, 1) * (met - (held[-1] if held else False))
        keeps = turn.blocks.get("switch") != "SWITCH"
        if i != same[0] and keeps:
            paid[i]["keep"] = -1 / len(same)
            goal, goal_before = (turns[j].blocks.get("subgoal") for j in (i, same[same.index(i) - 1]))
            if goal and goal_before and goal != goal_before:
                paid[i]["consistency"] = -0.5
        won = any(each.info.get("won") for each in turns if where(each)[0] == attempt)
        if i == same[-1] and won:
            names = [name for j in same for name in turns[j].info.get("executed", [])]
            paid[i]["tools"] = 0.25 * sum(name in ("look", "move") for name in names)
        if speaker == "verifier" and turns[i - 1].info:
            paid[i]["verdict"] = 0.125 if turns[i - 1].info["reward"] > 0 else -0.125
        for j in before:  # what it wins, the others have lost when they spoke last
            later = [k for k in before if k > j and where(turns[k]) == where(turns[j])]
            if where(turns[j]) != (attempt, speaker) and not later:
                paid[j]["opponents"] -= reward
    for attempt in range(1, last + 1):
        of = [[i for i, turn in enumerate(turns) if where(turn)[0] == each] for each in (attempt - 1, attempt)]
        if all(of):
            paid[of[1][-1]]["improvement"] = 2 * (earned[attempt] - earned[attempt - 1])
    return [{name: value for name, value in own.items() if value} for own in paid]


def has_the_pay(episode: Episode, i: int) -> int:
    """The turn on whose tokens the pay of turn i is: one of the episode's own that was sampled."""
    turns = episode.turns
    sampled = [j for j in range(episode.shared, len(turns)) if turns[j].reply]
    own = [j for j in sampled if where(turns[j]) == where(turns[i])]
    for choice in (own, sampled):
        for j in (*reversed([j for j in choice if j <= i]), *choice):
            return j
    raise AssertionError("nothing was sampled")


def is_right(episode: Episode, places: Sequence[int] | None = None) -> None:
    expected = should_earn(episode)
    for i in range(episode.shared, len(episode.turns)) if places is None else places:
        turn = episode.turns[i]
        assert {name: value for name, value in turn.parts.items() if value} == pytest.approx(expected[i]), i
        assert turn.reward == sum(turn.parts.values())


def is_trained(episodes: Sequence[Episode]) -> None:
    """Rewards and parts are at the last token of the turn that they are paid to, and none vanishes."""
    episodes = [episode for episode in episodes if episode.sampled_tokens]
    if not episodes:
        return
    batch = Batch(episodes)
    for episode, row in zip(episodes, batch.rewards_BT().tolist(), strict=True):
        parts = [part_sums(turns) for turns in paid_turns(episode)]
        rewards: defaultdict[int, float] = defaultdict(float)
        named: defaultdict[int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        for i in range(episode.shared, len(episode.turns)):
            j = has_the_pay(episode, i)
            rewards[j] += episode.turns[i].reward
            for name, value in episode.turns[i].parts.items():
                named[j][name] += value
        tokens = [
            rewards[j] if last else 0.0
            for j in range(episode.shared, len(episode.turns))
            for last in [False] * (len(episode.turns[j].reply) - 1) + [True] * bool(episode.turns[j].reply)
        ]
        assert row[: len(tokens)] == pytest.approx(tokens)
        for j in range(episode.shared, len(episode.turns)):
            assert parts[j] == pytest.approx(named[j])


# --- random play ------------------------------------------------------------------------------------------------------


@given(st.sampled_from(["solo", "judged", "attempts", "game"]), st.integers(0, 10**6))
@settings(max_examples=150)
def test_each_turn_earns_what_its_actions_earned(script: str, seed: int) -> None:
    attempts = 2 + seed % 2 if script == "attempts" else 1
    episodes = [played(script, seed, attempts, member) for member in range(3)]
    for episode in episodes:
        assert [turn.line for turn in episode.turns] == [where(turn) for turn in episode.turns]
        is_right(episode)
    is_trained(episodes)
    if all(episode.sampled_tokens for episode in episodes):
        is_credited([replace(episode, group=0, member=member) for member, episode in enumerate(episodes)])


def is_credited(episodes: Sequence[Episode]) -> None:
    """Terms over parts, and by criterion, against loops over turns."""
    checklists = [[sum(part(e, i, "criteria") for i in every(e))] * len(e.turns) for e in episodes]
    assert_credit(episodes, CreditTerm(parts=("criteria",)), checklists, lambda e, j: ())
    without = [[e.total_reward - sum(part(e, i, "keep") for i in every(e))] * len(e.turns) for e in episodes]
    assert_credit(episodes, CreditTerm(without=("keep",)), without, lambda e, j: ())
    by_turn = [
        [sum(part(e, i, "criteria") for i in every(e) if has_the_pay(e, i) == j) for j in every(e)] for e in episodes
    ]
    turn = CreditTerm(unit="turn", score="reward", parts=("criteria",), key=("turn",))
    assert_credit(episodes, turn, by_turn, number_in_line)
    assert_steps(episodes)


def every(episode: Episode) -> range:
    return range(len(episode.turns))


def part(episode: Episode, i: int, name: str) -> float:
    return episode.turns[i].parts.get(name, 0.0)


def number_in_line(episode: Episode, j: int) -> object:
    return where(episode.turns[j]), sum(where(turn) == where(episode.turns[j]) for turn in episode.turns[:j])


def trained(episodes: Sequence[Episode], term: CreditTerm) -> list[dict[int, float]]:
    """The advantage of each turn that was sampled, by a trainer's own way."""
    algorithm = AlgorithmConfig(preset="dapo", advantage={"kind": "terms", "terms": (term,)})
    TRAINER.configure(algorithm, TRAINER.config, {"": WEIGHTS})
    rollout = TRAINER.tabulate(Batch(episodes))
    found_BT = advantages_by_kind(algorithm, rollout).advantages_BT.tolist()
    return [dict(zip(turns, row, strict=False)) for turns, row in zip(rollout.turns_BT.tolist(), found_BT, strict=True)]


TRAINER = make_trainer(AlgorithmConfig(preset="dapo"))


def assert_credit(
    episodes: Sequence[Episode],
    term: CreditTerm,
    scores: Sequence[Sequence[float]],
    key: Callable[[Episode, int], object],
) -> None:
    places = [(row, j) for row, episode in enumerate(episodes) for j in every(episode) if episode.turns[j].reply]
    if term.unit == "episode":
        places = [next((row, j) for row, j in places if row == wanted) for wanted in range(len(episodes))]
    found = trained(episodes, term)
    for row, j in places:
        peers = [scores[r][k] for r, k in places if key(episodes[r], k) == key(episodes[row], j)]
        expected = scores[row][j] - sum(peers) / len(peers) if len(peers) > 1 else 0.0
        assert found[row][j] == pytest.approx(expected, abs=1e-4)


def assert_steps(episodes: Sequence[Episode]) -> None:
    """cm2_step, for two members or more: by attempt, by whoever reports the criterion, times its weight."""
    (term,) = TERMS["cm2_step"]
    found = trained(episodes, term.model_copy(update={"min_peers": 2, "gamma": 0.5}))
    wanted = [dict.fromkeys((j for j in every(episode) if episode.turns[j].reply), 0.0) for episode in episodes]
    for attempt in range(3):
        for name in "abc":
            scores: dict[int, float] = {}
            spans: dict[int, list[int]] = {}
            for row, episode in enumerate(episodes):
                reports = [turn.info.get("criteria", {}) for turn in episode.turns]
                inside = [i for i in every(episode) if where(episode.turns[i])[0] == attempt]
                speakers = {where(episode.turns[i]) for i in inside if name in reports[i]}
                own = [i for i in inside if where(episode.turns[i]) in speakers]
                while own and name not in reports[own[0]]:
                    own.pop(0)
                if not own:
                    continue
                scores[row] = 0.0
                for steps, i in enumerate(own):
                    if reports[i].get(name):
                        scores[row], own = 0.5**steps, own[: steps + 1]
                        break
                spans[row] = own
            mean = sum(scores.values()) / max(len(scores), 1)
            for row, own in spans.items():
                for j in {has_the_pay(episodes[row], i) for i in own}:
                    wanted[row][j] += WEIGHTS.get(name, 1) * (scores[row] - mean) if len(scores) > 1 else 0.0
    for own_found, own_wanted in zip(found, wanted, strict=True):
        for j, value in own_wanted.items():
            assert own_found[j] == pytest.approx(value, abs=1e-4)


SEARCHES: list[dict[str, Any]] = [
    {"strategy": "values", "width": 2},
    {"strategy": "pivots", "width": 3},
    {"strategy": "tree", "width": 2},
    {"strategy": "best_of", "width": 2},
    {"strategy": "beam", "width": 2, "keep": 2, "score": "reward", "naive": 0.25},
    {"strategy": "beam", "width": 3, "keep": 1, "score": "reward", "naive": 0.0},
]


@given(st.sampled_from(SEARCHES), st.integers(0, 10**6))
def test_a_branch_never_changes_what_its_parent_was_paid(config: dict[str, Any], seed: int) -> None:
    rewards = RecordingRewards(CONFIG.model_copy(update={"zero_sum": False}))
    brancher = Brancher(
        fleet=cast(Fleet, Worlds()),
        agents=Cast(seed),
        task=Task("world-v1"),
        group=0,
        seed=seed,
        rewards=rewards,
    )
    group = asyncio.run(Search(TypeAdapter(AnySearch).validate_python(config)).find(brancher, 4))
    assert not group.failed, group.failed[0].error
    if config["strategy"] != "beam":  # whose lines become episodes when all are over
        for turns, parts in rewards.settled:
            assert [turn.parts for turn in turns] == parts
    for episode in (*group.episodes, *group.branches):
        is_right(episode)
    is_trained([*group.episodes, *group.branches])


class RecordingRewards(Rewards):
    """Keeps what each episode's own turns were paid when it was over."""

    def __init__(self, config: RewardConfig) -> None:
        super().__init__(config)
        self.settled: list[tuple[list[Turn], list[dict[str, float]]]] = []

    def settle(self, episode: Episode, attempt: int = 0) -> None:
        super().settle(episode, attempt)
        own = episode.own_turns
        self.settled.append((own, [copy.copy(turn.parts) for turn in own]))


# --- one at a time ----------------------------------------------------------------------------------------------------


def test_an_attempt_that_said_nothing_leaves_the_one_before_as_it_was() -> None:
    turn = Turn(fresh=True, actions=["look"], outcomes=[DONE], parts={"environment": 1.0})
    rewards = Rewards(RewardConfig.model_validate({"tools": {"bonus": 0.5}}))
    episode = Episode(0, 0, "doors-v1", turns=[turn], end="terminal", success=True)
    rewards.settle(episode)
    rewards.set_apart([turn], episode)
    rewards.settle(episode, 1)
    assert (turn.parts, turn.reward) == ({"environment": 0.0, "tools": 0.5, "attempt": 1.0}, 1.5)


def test_a_turn_without_tokens_is_scored_zero_at_any_position() -> None:
    """The table of a batch's turns ends with the last one that was sampled."""
    episode = Episode(0, 0, "doors-v1", turns=[a_turn(), a_turn(()), a_turn(())], end="terminal", success=True)
    scorer = QScorer(QConfig(), TRAINER.policy, lr=1e-3, micro_batch_tokens=64)
    (scores,) = scorer.score([episode])
    assert scores[1:] == [0.0, 0.0] and 0 < scores[0] < 1
    scorer.fit([Group(0, [episode])])
    pay([episode], [scores])
    assert [turn.parts["process"] for turn in episode.turns] == scores


def test_values_of_turns_are_those_of_their_attempt() -> None:
    turns = [a_turn(attempt=number, agent_id=f"attempt{number + 1}") for number in (0, 0, 1)]
    for turn in turns[:2]:
        turn.parts = {"attempt": 0.0}
    turns[1].info = {"success": False}
    episode = Episode(0, 0, "doors-v1", turns=turns, success=True)
    assert turn_targets([episode], 0.5) == [[0.0, 0.0, 1.0]]
    turns[1].info, episode.success = {"success": True}, False
    assert turn_targets([episode], 0.5) == [[0.5, 1.0, 0.0]]


@pytest.mark.parametrize("where_it_sits", [[], ["model.critic=separate", "model.detach_critic=false"]])
def test_a_weight_of_a_critic_that_changes_nothing_is_refused(where_it_sits: list[str]) -> None:
    words = ["algorithm=starpo-s", "algorithm.advantage.value_coefficient=1", *where_it_sits]
    with pytest.raises(ConfigError, match=r"drop it \(optimizer.critic_lr"):
        load_config("bandit", words)
    load_config(
        "bandit", ["algorithm=starpo-s", "algorithm.advantage.value_coefficient=1", "model.detach_critic=false"]
    )


def test_a_criterion_weighs_as_much_as_the_configuration_of_its_task_says() -> None:
    config = load_config("bandit", ["rewards.criteria.weights={a: 3}"])
    assert config.criteria_weights == {"": {"a": 3.0}}
