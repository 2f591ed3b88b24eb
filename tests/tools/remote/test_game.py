"""A game as the terminal and the live site play it: typed turns, hints, and turns that are taken back."""

import re
from typing import Any

import pytest

from starpod.client import SyncFleet, ToolCall
from starpod.remote.game import Impossible, PlayedGame, parse_turn
from starpod.v1 import environment_pb2 as pb
from tests.support import ServerProcess

NAMES = pb.ActionSpace(names=["Up", "Down"])
BOTH = pb.ActionSpace(names=["Up"], grammar="go to PLACE", tools=[pb.Tool(name="look")])
TOOLS = pb.ActionSpace(tools=[pb.Tool(name="look")])


@pytest.mark.parametrize(
    ("line", "space", "actions"),
    [
        ("up || DOWN", NAMES, ["Up", "Down"]),
        ("go to Bed||up", BOTH, ["go to Bed", "Up"]),
        ('look {"at": 1}||look', BOTH, [ToolCall("look", {"at": 1}), ToolCall("look")]),
        ("anything", pb.ActionSpace(), ["anything"]),
    ],
)
def test_a_typed_turn_is_parsed(line: str, space: pb.ActionSpace, actions: list[Any]) -> None:
    assert parse_turn(line, pb.EnvironmentSpec(action_space=space)) == actions


@pytest.mark.parametrize(
    ("line", "space", "said"),
    [
        ("up||dwn", NAMES, "no action 'dwn'; did you mean Down?"),
        ("lok at it", TOOLS, "no action 'lok at it'; did you mean look?"),
        ("look {", TOOLS, "arguments of look are not JSON"),
        ("look 3", TOOLS, "not a JSON object"),
        ("\udcff", TOOLS, "not UTF-8"),
    ],
)
def test_what_cannot_be_meant_is_not_played(line: str, space: pb.ActionSpace, said: str) -> None:
    with pytest.raises(Impossible, match=re.escape(said)):
        parse_turn(line, pb.EnvironmentSpec(action_space=space))


@pytest.mark.parametrize("environment", ["coding", "desk", "frozen_lake", "search_qa", "sudoku"])
def test_a_game_is_solved_by_its_hints_and_each_turn_can_be_taken_back(server: ServerProcess, environment: str) -> None:
    """Named actions, tools, texts, and programs of several lines."""
    with SyncFleet(server.address) as fleet:
        spec = next(spec for spec in fleet.describe() if spec.id == f"{environment}-v1")
        game = fleet.run(PlayedGame.open(fleet.fleet, spec, seed=1))
        while not game.session.done:
            hint, seen = game.hint, game.session.observation.text
            transition = fleet.run(game.step(parse_turn(hint, spec)))
            assert fleet.run(game.picture("png", "text")) and len(game.events) <= 100
            fleet.run(game.undo(fleet.fleet))
            assert (game.hint, game.session.observation.text) == (hint, seen)
            fleet.run(game.step(parse_turn(hint, spec)))
        assert transition.success is not None
        with pytest.raises(Impossible, match="over"):
            fleet.run(game.step(["Up"]))
