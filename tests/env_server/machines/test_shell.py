"""Output of commands: its head and tail are kept, and the mark at its end is found wherever it lies."""

import re

import pytest

from starpod.env_server.machines.shell import BoundedOutput

MARK = re.compile(rb"\nTOKEN (\d+) (.*) TOKEN\n", re.DOTALL)


@pytest.mark.parametrize(
    ("size", "chunk"),
    [(0, 1), (3, 1), (3, 7), (10, 1), (10, 7), (10, 65_536), (100_000, 997), (100_000, 65_536)],
)
def test_mark_is_removed(size: int, chunk: int) -> None:
    output = BoundedOutput(20)
    data = b"x" * size + b"\nTOKEN 3 /a b TOKEN\n"
    match = None
    for start in range(0, len(data), chunk):
        assert match is None
        output.add(data[start : start + chunk])
        match = output.find(MARK)
    assert match is not None
    assert match.groups() == (b"3", b"/a b")
    assert output.total == size
    assert output.text.count("x") == min(size, 20)
    assert ("[99,980 bytes left out]" in output.text) == (size == 100_000)


def test_text_has_head_and_tail() -> None:
    output = BoundedOutput(8)
    output.add(b"\xffabc" + b"." * 1000 + b"wxyz")
    assert output.text == "�abc\n[1,000 bytes left out]\nwxyz"
