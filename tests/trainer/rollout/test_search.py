"""Search over real sockets: what is kept, what it cost, whose luck it saw, what a lost server changes."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter

from starpod.client import Fleet, Observation, Session, Want
from starpod.client.errors import StarpodError, TooLarge, Unsupported
from starpod.trainer.agents.base import Agent, Agents, Move, Stop, Task
from starpod.trainer.configuration.loading import parse_config
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.configuration.seeds import derive
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.data.group import Group
from starpod.trainer.rollout.branches import Brancher
from starpod.trainer.rollout.collect import Collector, Start
from starpod.trainer.rollout.config import AnySearch, PivotsConfig
from starpod.trainer.rollout.search import Search
from starpod.trainer.rollout.selection import weight
from tests.support import ROOT, ServerProcess, start_server

MODULE = str(ROOT / "tests" / "environments" / "branching.py")
Choose = Callable[[str, Episode], str]
"""The action for an observation, of an episode."""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with start_server(MODULE) as process:
        yield process


class Player(Agent):
    """An agent that says what the factory's function says, and repeats itself on request."""

    def __init__(self, agents: "Players") -> None:
        self.agents = agents
        self.recalled = 0

    async def act(self, observation: Observation, episode: Episode) -> Move | Stop:
        self.agents.asked += 1
        action = self.agents.choose(observation.text, episode)
        return Move(action, [action])

    def repeat(self, observation: Observation, episode: Episode, turn: Turn) -> Move | None:
        return Move(turn.text, turn.actions)

    def recall(self, episode: Episode) -> None:
        self.recalled = len(episode.turns)

    def close(self) -> None:
        self.agents.closed += 1


class Players(Agents):
    want = Want(score=True)
    at_once = None

    def __init__(self, choose: Choose) -> None:
        self.choose = choose
        self.asked = self.made = self.closed = 0

    def agent(self, session: Session, task: Task, group: int) -> Agent:
        self.made += 1
        return Player(self)


def in_turn() -> Choose:
    """`a` and `b` in turn, in each state."""
    asked: Counter[str] = Counter()

    def choose(observation: str, episode: Episode) -> str:
        asked[observation] += 1
        return "ab"[(asked[observation] - 1) % 2]

    return choose


def at_random(observation: str, episode: Episode) -> str:
    """Return a reply from the episode's own random stream, as an engine does."""
    return "ab"[derive(0, "choice", episode.member, len(episode.turns)) % 2]


async def search_groups(
    server: ServerProcess, environment: str, agents: Players, size: int, groups: int, **config: Any
) -> list[Group]:
    async with Fleet(server.address) as fleet:
        found = Search(TypeAdapter(AnySearch).validate_python(config)) if config else None
        collector = Collector(fleet=fleet, agents=agents, task=Task(environment), search=found)
        collected = await collector.collect([Start(number, number) for number in range(groups)], size)
        left = sum(len(replica.sessions) for replica in fleet.replicas)
    assert (left, collected.failed, agents.closed) == (0, 0, agents.made)
    return collected.groups


async def search(server: ServerProcess, environment: str, play: Choose, size: int = 1, **config: Any) -> Group:
    """The group that a search of one start state keeps."""
    (group,) = await search_groups(server, environment, Players(play), size, 1, **config)
    return group


def spent(group: Group) -> tuple[int, int]:
    """Forks and steps."""
    assert group.spent is not None
    return group.spent.forks, group.spent.steps


def unless(wrong: Callable[[Episode], object]) -> Choose:
    """`a`, which is right in each state of a chain, but `b` where it is wrong."""
    return lambda observation, episode: "b" if wrong(episode) else "a"


def untimed(episode: Episode, **changes: Any) -> tuple[Episode, list[Turn]]:
    """All of it but the clock, so that two plays can be compared."""
    turns = [replace(turn, generating=0.0, stepping=0.0, **changes) for turn in episode.turns]
    return replace(episode, turns=[]), turns


def paths(group: Group) -> list[str]:
    return ["".join(action for turn in episode.turns for action in turn.actions)[:2] for episode in group.episodes]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"strategy": "beam", "keep": 1}, ["ab"]),
        ({"strategy": "beam", "keep": 2}, ["ba", "bb"]),
        ({"strategy": "lookahead", "keep": 1, "depth": 1}, ["ba"]),
        ({"strategy": "lookahead", "keep": 1, "depth": 0}, ["ab"]),
    ],
)
async def test_beams_keep_the_best_prefixes(server: ServerProcess, config: dict[str, Any], expected: list[str]) -> None:
    group = await search(server, "tree-v1", in_turn(), len(expected), width=2, naive=0.0, **config)
    assert paths(group) == expected


async def test_of_equal_replies_a_beam_keeps_those_that_differ(server: ServerProcess) -> None:
    asked = iter("aaab")
    config = {"strategy": "beam", "keep": 2, "width": 4, "naive": 0.0}
    group = await search(server, "coin-v1", lambda observation, episode: next(asked, "a"), 2, **config)
    assert [episode.turns[0].actions for episode in group.episodes] == [["a"], ["b"]]


async def test_what_a_beam_shares_is_of_its_first_episode(server: ServerProcess) -> None:
    first, second = (
        await search(server, "tree-v1", in_turn(), 2, strategy="beam", keep=2, width=2, naive=0.0)
    ).episodes
    assert (first.member, first.parent, second.member, second.parent) == (0, None, 1, (0, 1))
    assert first.turns[0] is second.turns[0]
    assert second.own_turns[0].actions == ["b"]


@pytest.mark.parametrize("naive", [0.0, 0.5])
async def test_a_search_that_has_no_choice_is_plain_play(server: ServerProcess, naive: float) -> None:
    plain = await search(server, "chain-v1", at_random, 4)
    searched = await search(server, "chain-v1", at_random, 4, strategy="beam", naive=naive, width=1, keep=1)
    assert list(map(untimed, plain.episodes)) == list(map(untimed, searched.episodes))
    assert spent(searched) == (0, 24)


async def test_what_a_beam_costs_is_counted(server: ServerProcess) -> None:
    agents = Players(at_random)
    config = {"strategy": "beam", "width": 3, "keep": 1, "naive": 0.25}
    (group,) = await search_groups(server, "chain-v1", agents, 4, 1, **config)
    # Of four episodes of six turns three try three replies at each turn, and then play one of them.
    assert (*spent(group), agents.asked) == (3 * 6 * 3, 6 + 3 * 6 * (3 + 1), 6 + 3 * 6 * 3)
    assert [episode.member for episode in group.unchosen] == [0]
    assert [episode.success for episode in group.episodes[1:]] != [False] * 3


async def test_chosen_replies_are_weighed_where_asked_for(server: ServerProcess) -> None:
    """The weight follows from the number of tries that were equally good. The played replies are the same."""
    config = {"strategy": "beam", "width": 4, "keep": 1, "naive": 0.25}
    plain, weighed = [
        (await search(server, "chain-v1", at_random, 4, correction=correction, **config)).episodes
        for correction in ("off", "weight")
    ]
    assert {turn.weight for episode in plain for turn in episode.turns} == {1.0}
    assert [untimed(episode, weight=1.0) for episode in weighed] == list(map(untimed, plain))
    assert {turn.weight for turn in weighed[0].turns} == {1.0}  # nobody chose
    weights = {turn.weight for episode in weighed[1:] for turn in episode.turns}
    assert weights <= {weight(count / 4, 1 - count / 4, 4) for count in (1, 2, 3, 4)}
    assert len(weights) > 1


async def test_no_search_sees_future_randomness(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"strategy": "beam", "width": 2, "keep": 1, "naive": 0.0, "score": "reward"}

    async def first_turns_won() -> float:
        groups = await search_groups(server, "coin-v1", Players(in_turn()), 4, 20, **config)
        return sum(episode.turns[0].reward for group in groups for episode in group.episodes) / 80

    # Two replies that cover both falls of the coin: whoever saw it would always be right. Chance within 4 deviations.
    assert 0.28 < await first_turns_won() < 0.72
    fork = Session.fork

    async def keep(session: Session, count: int = 1, **_: Any) -> list[Session]:
        return await fork(session, count)

    monkeypatch.setattr(Session, "fork", keep)
    assert await first_turns_won() == 1.0


async def test_best_of_keeps_the_highest_returns_beside_naive_members(server: ServerProcess) -> None:
    """Returns of 0, 1, 0, 0.5 keep members 1 and 3; a naive one stays whatever it earned."""
    play = unless(lambda episode: episode.member in (0, 1, 3))
    group = await search(server, "chain-v1", play, 3, strategy="best_of", width=2, naive=0.34)
    assert [(episode.member, episode.total_reward) for episode in group.episodes] == [(0, 0.0), (2, 1.0), (4, 1.0)]
    assert (spent(group), [episode.member for episode in group.unchosen]) == ((0, 5 * 6), [0])


async def test_pivots_branch_the_failed_episodes_alone(server: ServerProcess) -> None:
    play = unless(
        lambda episode: (
            (episode.member == 1 and len(episode.turns) == 4) or (episode.member >= 2 and episode.member % 2)
        )
    )
    group = await search(server, "chain-v1", play, 2, strategy="pivots", width=4, gamma=50.0)
    assert [episode.success for episode in group.episodes] == [True, False]
    # The depth counts so much that the pivot is the last turn, which comes after the mistake.
    assert [
        (branch.member, branch.parent, len(branch.own_turns), branch.success, branch.seed) for branch in group.branches
    ] == [(member, (1, 5), 1, False, 0) for member in (6, 7, 8, 9)]
    for branch in group.branches:
        assert branch.apart
        assert all(one is other for one, other in zip(branch.turns[:5], group.episodes[1].turns, strict=False))
    assert spent(group) == (4, 12 + 4)
    group = await search(server, "chain-v1", unless(lambda episode: False), 2, strategy="pivots")
    assert (group.branches, [episode.success for episode in group.episodes]) == ([], [True, True])


async def test_values_are_means_of_what_continuations_earn(server: ServerProcess) -> None:
    """Six steps of a chain whose third one is wrong in every other continuation."""

    def wrong(episode: Episode) -> bool:
        return len(episode.turns) == 2 and episode.member % 2 == 1

    group = await search(server, "chain-v1", unless(wrong), 2, strategy="values", width=32)
    won, lost = group.episodes
    assert [(episode.total_reward, episode.parent) for episode in group.episodes] == [(1.0, None), (0.0, None)]
    # The start is worth what the other member came to.
    assert (won.turns[0].value, lost.turns[0].value) == (0.0, 1.0)
    found = [turn.value for turn in won.turns[1:]]
    assert all(0 < value < 1 for value in found[:2])  # type: ignore[operator]
    assert found[2:] == [1.0] * 3
    assert [turn.value for turn in lost.turns[3:]] == [0.0] * 3
    assert group.branches == []
    assert spent(group) == (2 * 5 * 32, 2 * 6 + 2 * 32 * (5 + 4 + 3 + 2 + 1))


async def test_trees_grow_by_turns_to_the_size_of_the_group(server: ServerProcess) -> None:
    group = await search(server, "chain-v1", at_random, 7, strategy="tree", width=2)
    assert [episode.member for episode in group.episodes] == list(range(7))
    assert [episode.parent is None for episode in group.episodes] == [True] * 2 + [False] * 5
    for episode in group.episodes[2:]:
        assert episode.parent is not None
        member, turn = episode.parent
        parent = group.episodes[member]
        # Trees grow alternately, and no state has two names.
        assert member % 2 == episode.member % 2
        assert parent.shared < turn < len(parent.turns)
        assert all(one is other for one, other in zip(episode.turns[:turn], parent.turns, strict=False))
    assert spent(group)[1] == sum(len(episode.own_turns) for episode in group.episodes)


def brancher(fleet: Fleet, environment: str = "coin-v1", choose: Choose = at_random) -> Brancher:
    return Brancher(fleet=fleet, agents=Players(choose), task=Task(environment), group=3, seed=7)


@pytest.mark.parametrize("way", ["fork", "restore", "replay", "a fork's replay", "a fork's replay, forked twice"])
async def test_every_way_of_branching_gives_the_same_branches(server: ServerProcess, way: str) -> None:
    """Branches have the same state and their own random state."""
    falls = []
    for chosen in ("fork", way):
        async with Fleet(server.address) as fleet:
            lines = brancher(fleet)
            (line,) = await lines.open(1)
            if way.startswith("a fork's replay"):
                await lines.play(line, 1)
                for member in range(5, 6 + way.endswith("twice")):
                    (line,) = await lines.grow(line, 1, [member])
            if way == "restore":
                lines.keep_snapshots(line)
            await lines.play(line, 2 - len(line.episode.turns))
            if chosen != "fork":
                await lines.play(line)
            branches = await lines.grow(line, 2, [10, 11, 12])
            for branch in branches:
                assert branch.episode.parent == (line.episode.member, 2)
                assert branch.agent.recalled == 2  # type: ignore[attr-defined]
                await lines.play(branch)
            falls.append([branch.episode.final_observation for branch in branches])
            await lines.close()
    assert falls[0] == falls[1]
    assert len({fall[:7] for fall in falls[0]}) == 1 < len(set(falls[0]))


@pytest.mark.parametrize("problem", [Unsupported, TooLarge])
async def test_a_branch_without_forks_and_snapshots_is_played_again(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, problem: type[StarpodError]
) -> None:
    async def unable(*_: Any, **__: Any) -> Any:
        raise Unsupported("cannot")

    async def fail(*_: Any, **__: Any) -> Any:
        raise problem("cannot")

    monkeypatch.setattr(Session, "fork", unable)
    monkeypatch.setattr(Session, "snapshot", fail)
    play = unless(lambda episode: episode.member == 0 and len(episode.turns) == 4)
    group = await search(server, "chain-v1", play, strategy="pivots", width=2, gamma=0.0)
    assert len(group.branches) == 2
    turn = group.branches[0].shared
    assert spent(group) == (0, 6 + 2 * 6)
    assert {branch.success for branch in group.branches} == {turn < 5}


async def test_branches_survive_their_server() -> None:
    """One of two servers dies while branches are played: they go on where they stood, on the other one."""
    with start_server(MODULE) as one, start_server(MODULE) as other:
        async with Fleet([one.address, other.address], grace=0.05) as fleet:
            lines = brancher(fleet, "chain-v1", lambda observation, episode: "a")
            (line,) = await lines.open(1)
            lines.keep_snapshots(line)
            await lines.play(line, 3)
            branches = await lines.grow(line, 3, [10, 11])
            lost = one if branches[0].session.address == one.address else other
            lost.kill()
            await asyncio.gather(*(lines.play(branch) for branch in branches))
            assert [branch.episode.success for branch in branches] == [True, True]
            # What stood there is gone too; the state is restored, and where its snapshot is spoilt, played again.
            line.over = True
            for spoilt in (False, True):
                if spoilt:
                    line.snapshots = {turn: replace(each, state=b"") for turn, each in line.snapshots.items()}
                (again,) = await lines.grow(line, 2, [20 + spoilt])
                assert (await lines.play(again)).episode.success is True
            await lines.close()
            assert fleet.recoveries


async def test_a_state_that_cannot_be_reached_fails_its_branches(server: ServerProcess) -> None:
    async with Fleet(server.address) as fleet:
        lines = brancher(fleet, "chain-v1")
        (line,) = await lines.open(1)
        await lines.play(line)
        line.episode.turns[0].observation = "something else"
        branches = await lines.grow(line, 3, [10, 11])
        assert [branch.episode.failed for branch in branches] == [True, True]
        assert "another observation" in branches[0].episode.error
        assert all([(await lines.play(branch)).over for branch in branches])
        await lines.close()


@pytest.mark.parametrize(
    ("values", "staleness", "sentence"),
    [
        (
            {"strategy": "beam", "gamma": 2.0},
            0,
            "collect.search.gamma belongs to pivots, and collect.search is beam",
        ),
        ({"width": 2}, 0, "width belongs to best_of, beam"),
        ({"strategy": "pivots", "most_branches": 2}, 0, "has no room for the 8 continuations"),
        ({"strategy": "values"}, 0, "only vineppo and terms with score gain"),
        ({"strategy": "beam", "correction": "weight"}, 0, "set keep to 1"),
        ({"strategy": "pivots", "correction": "off"}, 0, "correction belongs to beam, lookahead"),
        ({"strategy": "best_of"}, 1, r"set collect\.max_staleness to 0"),
    ],
)
def test_keys_that_mean_nothing_are_refused(values: dict[str, Any], staleness: int, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_config({"collect": {"search": values, "max_staleness": staleness}})


def test_what_a_run_notes_can_be_read_again() -> None:
    config = parse_config({"collect": {"search": {"strategy": "pivots", "width": 4}}})
    assert parse_config(config.to_dict()) == config
    assert config.collect.search == PivotsConfig(width=4)
