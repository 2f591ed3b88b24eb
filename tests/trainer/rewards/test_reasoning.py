"""Claims of a thought against the state: by hand, and against a served environment in all of its formats."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.client import EndReason, SyncFleet, Transition
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.rewards.claims import read_claims
from starpod.trainer.rewards.reasoning import ReasoningConfig, judge, score_reasoning
from starpod.trainer.rewards.scene import CannotRead, Scene, legend_of, read_scene
from tests.support import ROOT, ServerProcess, start_server

# . 0123          . 012345
# 0 G___          0 ######
# 1 O__P          1 #S_X_#
# 2 ____          2 #√___#
# 3 ___O          3 #____#
LAKE = "G___\nO__P\n____\n___O"
ROOM = "######\n#S_X_#\n#√___#\n#____#\n######"
CONFIG = ReasoningConfig(weight=1.0)


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
    return score_reasoning(CONFIG, turn, arrive(after) if after else None, episode)


def verdicts(thought: str, observation: str = LAKE, environment: str = "frozen_lake-v1") -> list[bool | None]:
    """Of each claim, in order."""
    scene = read_scene(environment, "", observation)
    family = environment.partition("-v")[0]
    return [judge(claim, scene, None) for claim in read_claims(thought, family, legend_of(family, ""))]


# --- frozen lake -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("thought", "expected"),
    [
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
)
def test_what_a_thought_claims_of_a_lake(thought: str, expected: list[bool | None]) -> None:
    assert verdicts(thought) == expected


def test_the_same_action_under_wrong_claims_earns_less() -> None:
    right, mixed, wrong = (score(thought) for thought in ("Up Left", "Down Left", "Down Right"))
    assert (right, mixed, wrong) == (1.0, 0.0, -1.0)


@pytest.mark.parametrize("thought", [None, "", "Up", "Hmm, let me think about it. The goal matters.", "((((row 1 ,"])
def test_no_claim_earns_nothing(thought: str | None) -> None:
    assert score(thought) == 0.0


def test_an_ill_formed_reply_earns_nothing() -> None:
    assert score("Up Left", well_formed=False) == 0.0


def test_saying_it_again_earns_nothing_more() -> None:
    once = score("the goal is up")
    assert once == 0.5
    assert score("the goal is up. " * 50) == once
    assert score("the goal is up. the goal is above me. I am below the goal") == once


def test_more_claims_than_wanted_earn_nothing_more() -> None:
    assert score("goal is up and left, I am at (1, 3), the goal is at (0, 0), right is a wall") == 1.0


def test_saying_everything_about_a_topic_is_false() -> None:
    assert score("the goal is up. the goal is down. the goal is left. the goal is right") == -1.0
    everywhere = " ".join(f"hole at ({row}, {column})." for row in range(4) for column in range(4))
    assert score(everywhere) == (2 - 14) / 16


@pytest.mark.parametrize(
    ("thought", "after", "expected"),
    [
        ("I will be at (0, 3)", "G__P\nO___\n____\n___O", 0.5),
        ("I will be at (0, 3)", LAKE, -0.5),
        ("I stay", LAKE, 0.5),
        ("I will move", LAKE, -0.5),
        ("I'll move", "G__P\nO___\n____\n___O", 0.5),
        ("the player will be at (0, 3)", "", 0.0),  # nothing was sent: nothing came of it
    ],
)
def test_the_next_state_is_compared_with_what_came(thought: str, after: str, expected: float) -> None:
    assert score(thought, after=after) == expected


# --- sokoban -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("thought", "expected"),
    [
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
)
def test_what_a_thought_claims_of_a_room(thought: str, expected: list[bool | None]) -> None:
    assert verdicts(thought, ROOM, "sokoban-v1") == expected


def test_a_pushed_box_is_seen_where_it_went() -> None:
    before, after = "######\n#_PX_#\n#O___#\n######", "######\n#__PX#\n#O___#\n######"
    assert score("the box will be at (1, 4)", before, "sokoban-v1", after) == 0.5
    assert score("the box will be at (1, 3)", before, "sokoban-v1", after) == -0.5


def test_what_an_observation_does_not_tell_is_not_judged() -> None:
    coordinates = "Board size: 5 rows x 6 cols (zero-indexed).\nTargets: (1, 1)\nBoxes: (1, 3)\nPlayer: (2, 2)"
    assert verdicts("up is a wall, up is blocked, the box is up", coordinates, "sokoban-v1") == [None, None, True]


# --- anything ----------------------------------------------------------------------------------------------------

WORDS = st.sampled_from(
    "I player goal box hole the is at will move up left right down and of me same row column (1,2) 1 3 - P G X # "
    "_ not . , : cannot go position free blocked".split()
)


@given(st.one_of(st.text(max_size=200), st.lists(WORDS, max_size=60).map(" ".join)))
def test_free_text_is_always_scored_within_bounds(thought: str) -> None:
    for observation, environment in ((LAKE, "frozen_lake-v1"), (ROOM, "sokoban-v1")):
        value = score(thought, observation, environment, after=observation)
        assert -1 <= value <= 1
        # Said twice, in sentences (a compact thought that goes on is another thought), it is worth the same.
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
        ("sokoban-v1", "", "none of them"),
        ("frozen_lake-v1", "G_?P", "none of them: 'G_\\?P'"),
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


# --- a served environment ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with start_server("frozen_lake-v1", "sokoban-v1") as process:
        yield process


@pytest.fixture(scope="module")
def fleet(server: ServerProcess) -> Iterator[SyncFleet]:
    with SyncFleet(server.address) as fleet:
        yield fleet


LETTERS: dict[str, dict[str, Any]] = {
    "frozen_lake-v1": {"symbols": dict(zip("player ice hole goal edge".split(), "A.HEW", strict=True))},
    "sokoban-v1": {"symbols": "letters"},
}


@pytest.mark.parametrize("symbols", ["default", "letters"])
@pytest.mark.parametrize("environment", ["frozen_lake-v1", "sokoban-v1"])
def test_all_formats_tell_the_same(fleet: SyncFleet, environment: str, symbols: str) -> None:
    options = {"frozen_probability": 0.75} if environment.startswith("frozen") else {"boxes": 2, "search_depth": 30}
    options = options | (LETTERS[environment] if symbols == "letters" else {})
    for seed in range(15):
        scenes: dict[str, Scene] = {}
        for mode in ("grid", "coord", "grid_coord", "local"):
            (session,) = fleet.open(environment, seed=seed, options=options | {"observation": mode})
            for action in ("Left", "Up", "Left"):
                if not session.done:
                    session.step(action)
            scenes[mode] = read_scene(environment, session.instructions, session.observation.text)
            session.close()
        whole = scenes["grid"]
        assert scenes["grid_coord"] == whole
        for mode in ("coord", "local"):
            part = scenes[mode]
            assert (part.player, part.towards) == (whole.player, whole.towards)
            assert all(whole.places[kind] == cells for kind, cells in part.places.items())
            assert all(part.blocked(way) in (whole.blocked(way), None) for way in ("Up", "Down", "Left", "Right"))
        if environment == "frozen_lake-v1":
            assert scenes["coord"] == whole


@pytest.mark.parametrize(
    ("environment", "right"),
    [("frozen_lake-v1", "{words[6]} {words[7]}"), ("sokoban-v1", "{words[3]} {words[4]} {words[12]} {words[13]}")],
)
def test_a_demonstration_that_reads_the_observation_scores_higher(
    fleet: SyncFleet, environment: str, right: str
) -> None:
    """The same action, three thoughts: what the local observation says, nothing, and the opposite."""
    opposite = {"Up": "Down", "Down": "Up", "Left": "Right", "Right": "Left", "-": "Up"}
    for seed in range(20):
        (session,) = fleet.open(environment, seed=seed, options={"observation": "local"})
        seen = session.observation.text
        transition = session.step("Down")
        episode = Episode(0, 0, environment, instructions=session.instructions)
        thought = right.format(words=seen.split())
        wrong = " ".join(opposite[word] for word in thought.split())
        values = []
        for text in (thought, "so I go down", wrong):
            turn = Turn(observation=seen, fresh=True, thought=text, actions=["Down"])
            values.append(score_reasoning(CONFIG, turn, transition, episode))
        assert values[0] == 1.0
        assert values[1] == 0.0
        assert values[2] < 0.0 or "-" in thought
        session.close()


def test_claims_about_the_next_state_hold_without_slips(fleet: SyncFleet) -> None:
    options = {"observation": "coord", "success_rate": 1.0, "map": ["SFF", "FHF", "FFG"]}
    (session,) = fleet.open("frozen_lake-v1", seed=1, options=options)
    episode = Episode(0, 0, "frozen_lake-v1", instructions=session.instructions)
    for action, thought, expected in (
        ("Up", "Up is a wall, I stay", 1.0),
        ("Right", "I will be at (0, 1)", 0.5),
        ("Down", "I will be at (1, 1), down is a hole", 1.0),
    ):
        turn = Turn(observation=session.observation.text, fresh=True, thought=thought, actions=[action])
        assert score_reasoning(CONFIG, turn, session.step(action), episode) == expected
    assert session.done
    session.close()
