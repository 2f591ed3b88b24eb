"""Pages of groups: where members diverge, how each branch continues, and which members a search added."""

import re
from itertools import count
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from starpod.ui.groups import Member, part_ways
from tests.tools.ui.conftest import a_group, make_run, site_over
from tests.trainer.diagnostics.synthetic import turn

PLAYED = st.lists(st.lists(st.tuples(st.sampled_from("LR"), st.sampled_from("xy")), max_size=4), max_size=6)
"""Of each member, turn by turn, what it did and what it was shown then."""


def members_of(played: list[list[tuple[str, str]]]) -> list[Member]:
    found = []
    for number, ways in zip(count(), played, strict=False):
        shown = ["s", *(after for _, after in ways)]
        turns = [{"observation": before, "actions": [act]} for before, (act, _) in zip(shown, ways, strict=False)]
        row = {"member": number, "outcome": "solved" if number % 2 else "unsolved", "reward": float(number)}
        found.append(Member(row, {"turns": turns, "final_observation": shown[-1]}))
    return found


def test_members_part_by_actions_and_by_states() -> None:
    members = members_of([[("L", "x"), ("L", "x")], [("L", "x"), ("R", "x")], [("L", "y"), ("L", "x")], [("R", "x")]])
    partings = part_ways(members)
    assert [member.actions for member in members] == [["L (1)", "L"], ["L (1)", "R"], ["L (2)", "L"], ["R"]]
    assert [
        (
            parting.turn,
            [(branch.actions, branch.solved, len(branch.members), branch.mean) for branch in parting.branches],
        )
        for parting in partings
    ] == [
        (0, [("L (1)", 1, 2, 0.5), ("L (2)", 0, 1, 2.0), ("R", 1, 1, 3.0)]),
        (1, [("L", 0, 1, 0.0), ("R", 1, 1, 1.0)]),
    ]
    assert members[0].marks == {
        0: ["another action than member 3, continues with members 1, 2"],
        1: ["another state than member 2, continues with member 1", "another action than member 1, continues alone"],
    }
    assert members[3].marks == {0: ["another action than members 0, 1, 2, continues alone"]}


@given(PLAYED)
def test_paths_are_shared_up_to_the_first_difference(played: list[list[tuple[str, str]]]) -> None:
    """Each member is in one branch after a divergence."""
    members = members_of(played)
    partings = part_ways(members)
    for one, mine in zip(members, played, strict=True):
        for other, theirs in zip(members, played, strict=True):
            alike = next((place for place, both in enumerate(zip(mine, theirs, strict=False)) if both[0] != both[1]), 9)
            alike = min(alike, len(mine), len(theirs))
            assert one.actions[:alike] == other.actions[:alike]
            assert alike == min(len(mine), len(theirs)) or one.actions[alike] != other.actions[alike]
    for parting in partings:
        there = [member.number for branch in parting.branches for member in branch.members]
        assert len(parting.branches) > 1 and len(there) == len(set(there))


def test_a_searched_group_shows_its_branches(tmp_path: Path) -> None:
    """Turns that a branch shares with its parent are marked only in the parent. A group of one has no branches."""
    members = a_group(4, [0.0, 0.0, 1.0])
    members[1].turns[0].actions = ["Left"]
    branch = members[2]
    branch.parent, branch.turns[0] = (1, 1), members[1].turns[0]
    branch.turns[1].actions = ["Up"]
    lone = a_group(5, [1.0])
    lone[0].turns[0] = turn("", actions=[])
    make_run(tmp_path / "tree").episodes.write_rollouts(151, [*members, *lone], max_bytes=2**20)
    group = "run=tree&file=train-000151.jsonl.gz&group"
    with site_over(tmp_path, page="/episodes?run=tree&step=151", shown="4 episodes") as http:
        text, own, alone = (
            http.get(page).text for page in (f"/group?{group}=4", f"/episode?{group}=4&member=2", f"/group?{group}=5")
        )
    assert re.search(r"Actions of the members: 1 of 3 solved\. Left: 1 of 2; Down: 0 of 1", text)
    cards = [re.sub("<[^>]*>| +", " ", card) for card in re.findall("<h3>.*?</ul>", text, re.DOTALL)]
    assert [" ".join(card.split()) for card in cards] == [
        "Before turn 1 P _ _ O _ O _ _ _ _ _ O O _ _ G Down 0 of 1 solved, return 0 member 0 "
        "Left 1 of 2 solved, return +0.5 members 1 , 2",
        "Before turn 2 _ O _ _ _ _ _ O O _ _ G P _ _ O Down Right 0 of 1 solved, return 0 member 1 "
        "Up 1 of 1 solved, return +1 member 2 ; 1 added here by the search",
    ]
    assert "branched off by the search at turn 2 of member 1" in text and text.count('<li class="shared">') == 1
    assert text.count('<li class="parts">') == 4  # none in the turn that is shared
    assert re.search(r"The search branched it off at <a href=\"[^\"]*member=1#t2\">turn 2 of member 1</a>", own)
    assert "1 member from one start" in alone and "Where the members diverge" not in alone and "no action" in alone
