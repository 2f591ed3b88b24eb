"""Trees of continuations: what is drawn, and that its figures add up."""

import re
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from starpod.report.tree import MAX_DEPTH, Continuation, draw_tree

LINES = st.builds(
    Continuation,
    st.lists(st.sampled_from(["Left", "Right", "", "<a href='x'>&"]), max_size=MAX_DEPTH + 3),
    st.just(0.0),
    st.sampled_from([True, False, None]),
)


def texts(svg: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(svg).iter("text")]


def test_equal_play_is_one_branch() -> None:
    lines = [Continuation(["Up", "Left"], 1.0, True), Continuation(["Up", "Right", "Right"], 0.0, False)]
    svg = draw_tree([*lines, Continuation(["Down"], 0.0, False)], "From turn 2")
    assert 'aria-label="From turn 2: 1 of 3 solved. Up: 1 of 2; Down: 0 of 1"' in svg
    assert svg.count('class="branch"') == 4
    assert {"1 of 3", "1 of 2", "solved", "not solved, 1 more turn", "not solved"} <= set(texts(svg))


def test_ends_are_named_and_many_names_are_left_out() -> None:
    lines = [Continuation(["Up"], 0.0, False, str(number)) for number in range(3)]
    assert "0, 1, 2: 0 of 3" in texts(draw_tree(lines, "Group"))
    assert "7: solved" in texts(draw_tree([*lines, Continuation(["Down"], 1.0, True, "7")], "Group"))
    assert "0 of 4" in texts(draw_tree([*lines, lines[0]], "Group"))


def test_ends_lead_to_their_pages_and_a_picture_holds_no_links() -> None:
    lines = [Continuation(["Up"], 0.0, False, "a & b", "/one"), Continuation(["Down"], 1.0, True, link="/two?a&b")]
    root = ElementTree.fromstring(draw_tree(lines, "Group"))
    links = [(each.attrib["href"], each.attrib["aria-label"]) for each in root.iter("a")]
    assert links == [("/two?a&b", "solved: Down"), ("/one", "a & b: not solved: Up")]
    assert root.attrib["role"] == "group"
    alone = ElementTree.fromstring(draw_tree([Continuation(["Up"], 0.0, False, "x")], "Group"))
    assert alone.attrib["role"] == "img" and not list(alone.iter("a"))


@given(st.lists(LINES, max_size=12))
def test_any_continuations_are_drawn_within_the_picture(lines: list[Continuation]) -> None:
    svg = draw_tree(lines, "Tree <b>")
    if not lines:
        assert svg == ""
        return
    root = ElementTree.fromstring(svg)
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    for circle in root.iter("circle"):
        assert 0 < float(circle.attrib["cx"]) < width and 0 < float(circle.attrib["cy"]) < height
    leaves = list(root.iter("circle"))
    places = {(circle.attrib["cx"], circle.attrib["cy"]) for circle in leaves}
    assert len(places) == len(leaves)
    solved = sum(line.success is True for line in lines)
    assert re.search(rf"{solved} of {len(lines)} solved", root.attrib["aria-label"])
