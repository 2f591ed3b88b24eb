"""Claims of a thought against the state: by hand, and against a served environment in all of its formats."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.boards.claims import read_claims
from starpod.boards.reasoning import judge, reasoning
from starpod.boards.scene import CannotRead, Scene, legend_of, read_scene
from starpod.client import EndReason, SyncFleet, Transition
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.rewards.view import TurnView
from tests.support import ROOT, start_server

# . 0123          . 012345
# 0 G___          0 ######
# 1 O__P          1 #S_X_#
# 2 ____          2 #√___#
# 3 ___O          3 #____#
LAKE = "G___\nO__P\n____\n___O"
ROOM = "######\n#S_X_#\n#√___#\n#____#\n######"
COORDINATES = "Board size: 5 rows x 6 cols (zero-indexed).\nTargets: (1, 1)\nBoxes: (1, 3)\nPlayer: (2, 2)"
PUSH = {
    "environment": "sokoban-v1",
    "observation": "######\n#_PX_#\n#O___#\n######",
    "after": "######\n#__PX#\n#O___#\n######",
}


def arrive(text: str) -> Transition:
    return Transition(text, 0.0, 7, 0.0, b"", EndReason.NONE, None, None)


def score(
    thought: str | None,
    observation: str = LAKE,
    environment: str = "frozen_lake-v1",
    after: str = "",
    instructions: str = "",
    **changes: Any,
) -> float:
    turn = Turn(observation=observation, fresh=True, thought=thought, actions=["Up"], **changes)
    episode = Episode(0, 0, environment, instructions=instructions, turns=[turn])
    return reasoning(turn, arrive(after) if after else None, TurnView.of(turn, episode))


def verdicts(thought: str, observation: str = LAKE, environment: str = "frozen_lake-v1") -> list[bool | None]:
    """Return the verdict of each claim, in order."""
    scene = read_scene(environment, "", observation)
    family = environment.partition("-v")[0]
    return [judge(claim, scene, None) for claim in read_claims(thought, family, legend_of(family, ""))]


CLAIMS: dict[tuple[str, str], list[tuple[str, list[bool | None]]]] = {
    ("frozen_lake-v1", LAKE): [
        ("Up Left", [True, True]),
        ("Down Left", [False, True]),
        ("- Left", [False, True]),
        ("P 1 3 G 0 0 Up Left _ _ # _", [True, True, True, True]),
        ("P 1 2 G 0 0", [False, True]),
        ("Up", []),  # a plan
        ("Left Up", []),  # not the order of the pair
        ("The player is at (1, 3) and the goal is at (0,0).", [True, True]),
        ("I'm at row 1, column 3", [True]),
        ("my position is (1, 2), goal's position: (0, 0)", [False, True]),
        ("the goal is up and left", [True, True]),
        ("The goal lies to the right of me.", [False]),
        ("goal is up-left, so I go up", [True, True]),
        ("I am below the goal", [True]),
        ("the target is above", [True]),
        ("goal is in the same row", [False]),
        ("holes at (1, 0), (3, 3) and (2, 2)", [True, True, False]),
        ("P at (1, 3), G at (0, 1)", [True, False]),
        ("Right is a wall", [True]),
        ("Right: #, Down: O", [True, False]),
        ("Left is ice. Down is free; up is blocked!", [True, True, False]),
        ("left and down are safe", [True, True]),
        ("the goal is up and left is a hole", [True, False]),
        ("there is a hole below me", [False]),
        ("a wall on the right", [True]),
        ("I cannot go right", [True]),
        ("I can't move left", [False]),
        # Nothing is claimed by what is denied, planned or left open.
        ("Down is not a hole, there is no wall on the left, the goal isn't up", []),
        ("move left to the goal, all right, then up", []),
        ("I step down towards (2, 3) because down is where I want to go", []),
        ("I will be at (0, 3)", [None]),
    ],
    ("sokoban-v1", ROOM): [
        ("- Right", [True, True]),
        ("- Right - Left", [True, True, True, True]),
        ("- Right Down Left", [True, True, False, True]),
        ("S 1 1 X 1 3 √ 2 1", [True, True, True, True, True]),
        ("the box is to the right", [True]),
        ("the box is right of me and the target is left of the box", [True, True]),
        ("the box is in the same row", [True]),
        ("Up is a wall, left is a wall, down is a box", [True, True, True]),
        ("down is blocked", [False]),  # the box below can be pushed
        ("box at (1, 3), box at (2, 1), box at (3, 3)", [True, True, False]),
        ("the goal is at (2, 1)", [True]),
        ("wall at (0, 0)", [True]),
    ],
    # What an observation does not tell is not judged.
    ("sokoban-v1", COORDINATES): [
        ("up is a wall, up is blocked, the box is up", [None, None, True]),
    ],
}


@pytest.mark.parametrize(
    ("environment", "observation", "thought", "expected"),
    [(*of, *case) for of, cases in CLAIMS.items() for case in cases],
)
def test_what_a_thought_claims(environment: str, observation: str, thought: str, expected: list[bool | None]) -> None:
    assert verdicts(thought, observation, environment) == expected


HOLES = " ".join(f"hole at ({row}, {column})." for row in range(4) for column in range(4))
MOVED = "G__P\nO___\n____\n___O"


@pytest.mark.parametrize(
    ("expected", "thought", "given"),
    [
        # The same action under wrong claims earns less, and under none nothing.
        (1.0, "Up Left", {}),
        (0.0, "Down Left", {}),
        (-1.0, "Down Right", {}),
        *((0.0, text, {}) for text in (None, "", "Up", "Hmm, let me think. The goal matters.", "((((row 1 ,")),
        (0.0, "Up Left", {"well_formed": False}),
        (0.0, "walls at (0, 4), (1, 4), (2, 4) and (3, 4)", {}),
        (-0.5, "walls at (0, 4) and (1, 1)", {}),
        # Saying it again, in other words or with more claims than are wanted, earns nothing more.
        (0.5, "the goal is up", {}),
        (0.5, "the goal is up. " * 50, {}),
        (0.5, "the goal is up. the goal is above me. I am below the goal", {}),
        (1.0, "goal is up and left, I am at (1, 3), the goal is at (0, 0), right is a wall", {}),
        # Saying everything about a topic is false.
        (-1.0, "the goal is up. the goal is down. the goal is left. the goal is right", {}),
        ((2 - 14) / 16, HOLES, {}),
        # The next state is compared with what came.
        (0.5, "I will be at (0, 3)", {"after": MOVED}),
        (-0.5, "I will be at (0, 3)", {"after": LAKE}),
        (0.5, "I stay", {"after": LAKE}),
        (-0.5, "I will move", {"after": LAKE}),
        (0.5, "I'll move", {"after": MOVED}),
        (0.0, "the player will be at (0, 3)", {"after": ""}),  # nothing was sent: nothing came of it
        (0.5, "the box will be at (1, 4)", PUSH),
        (-0.5, "the box will be at (1, 3)", PUSH),
    ],
)
def test_what_a_thought_earns(expected: float, thought: str | None, given: dict[str, Any]) -> None:
    assert score(thought, **given) == expected


WORDS = st.sampled_from(
    "I player goal box hole the is at will move up left right down and of me same row column (1,2) 1 3 - P G X # "
    "_ not . , : cannot go position free blocked".split()
)


@given(st.one_of(st.text(max_size=200), st.lists(WORDS, max_size=60).map(" ".join)))
def test_free_text_is_always_scored_within_bounds(thought: str) -> None:
    for observation, environment in ((LAKE, "frozen_lake-v1"), (ROOM, "sokoban-v1")):
        value = score(thought, observation, environment, after=observation)
        assert -1 <= value <= 1
        # Repeating a claim in a second sentence is worth the same. A longer compact thought would be another thought.
        sentence = f"Well. {thought}. "
        once = score(sentence, observation, environment, after=observation)
        assert score(sentence * 2, observation, environment, after=observation) == once


@pytest.mark.parametrize("piece", ["position ", "goal the ", "up and ", "row 1 , ", "( ", "not a ", "i'll will "])
def test_long_thoughts_take_linear_time(piece: str) -> None:
    # A quadratic reader would need minutes for these: the suite's time limit is the assertion.
    assert -1 <= score(piece * 30_000) <= 1


@pytest.mark.parametrize(
    ("environment", "observation", "words"),
    [
        ("bandit-v1", "Arms: A, B", "not for bandit-v1"),
        ("sokoban-v1", "", "not one of them"),
        ("frozen_lake-v1", "G_?P", "not one of them: 'G_\\?P'"),
    ],
)
def test_what_cannot_be_read_is_refused(environment: str, observation: str, words: str) -> None:
    with pytest.raises(CannotRead, match=words):
        score("Up Left", observation, environment)


def test_every_example_of_the_documentation_is_a_claim() -> None:
    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    table = page.partition("| Form | Examples |")[2].partition("The subjects are")[0]
    examples = re.findall(r"`([^`]+)`", table)
    assert len(examples) > 20
    for example in examples:
        families = ("frozen_lake", "sokoban")
        assert any(read_claims(example, family, legend_of(family, "")) for family in families), example


@pytest.fixture(scope="module")
def fleet() -> Iterator[SyncFleet]:
    with start_server("frozen_lake-v1", "sokoban-v1") as server, SyncFleet(server.address) as fleet:
        yield fleet


LAKE_LETTERS = dict(zip("player ice hole goal edge".split(), "A.HEW", strict=True))


@pytest.mark.parametrize(
    ("environment", "options", "ways"),
    [
        ("frozen_lake-v1", {"frozen_probability": 0.75}, (6, 7)),
        ("frozen_lake-v1", {"frozen_probability": 0.75, "symbols": LAKE_LETTERS}, (6, 7)),
        ("sokoban-v1", {"boxes": 1, "search_depth": 30}, (3, 4, 12, 13)),
        ("sokoban-v1", {"boxes": 2, "search_depth": 30, "symbols": "letters"}, (3, 4)),
    ],
)
def test_all_formats_of_a_served_environment_tell_the_same(
    fleet: SyncFleet, environment: str, options: dict[str, Any], ways: tuple[int, ...]
) -> None:
    """ways: places of the words that are ways to things, in an observation of the format `local`."""
    for seed in range(8):
        scenes: dict[str, Scene] = {}
        for mode in ("grid", "coord", "grid_coord", "local"):
            (session,) = fleet.open(environment, seed=seed, options=options | {"observation": mode})
            start = session.observation.text
            for action in ("Left", "Up", "Left"):
                if not session.done:
                    session.step(action)
            scenes[mode] = read_scene(environment, session.instructions, session.observation.text)
            session.close()
        scene = read_scene(environment, session.instructions, start)
        told = read_claims(" ".join(start.split()[place] for place in ways), environment.partition("-v")[0], {})
        assert told and all(judge(claim, scene, None) for claim in told), start
        whole = scenes["grid"]
        assert scenes["grid_coord"] == whole
        for mode in ("coord", "local"):
            part = scenes[mode]
            assert (part.player, part.towards) == (whole.player, whole.towards)
            assert all(whole.places[kind] == cells for kind, cells in part.places.items())
            assert all(part.blocked(way) in (whole.blocked(way), None) for way in ("Up", "Down", "Left", "Right"))
        if environment == "frozen_lake-v1":
            assert scenes["coord"] == whole
