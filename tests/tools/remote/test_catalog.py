"""Options that command lines give to environments, and files for their reports."""

import os
from pathlib import Path

import click
import pytest

from starpod.remote.catalog import expect_writable, parse_options
from starpod.v1 import environment_pb2 as pb

SCHEMA = '{"properties": {"fault": {"type": "string"}, "size": {"type": "integer"}, "list": {"type": "array"}}}'


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ('fault="int"', "int"),
        ("fault=int", "int"),
        ("fault=7", "7"),
        ('fault=["a"]', '["a"]'),
        ('fault="unclosed', '"unclosed'),
        ("size=7", 7),
        ("list=[1]", [1]),
    ],
)
def test_options_are_json_and_strings_may_omit_their_quotes(assignment: str, value: object) -> None:
    spec = pb.EnvironmentSpec(id="trap-v1", options_schema_json=SCHEMA)
    assert list(parse_options(spec, [assignment]).values()) == [value]


def test_a_file_without_permission_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.touch()
    expect_writable("", None, old, str(new))
    asked: list[str] = []
    monkeypatch.setattr(os, "access", lambda place, mode: asked.append(str(place)))  # root may write everywhere
    expect_writable("-")
    for file in (old, new):
        with pytest.raises(click.UsageError, match="no permission"):
            expect_writable(file)
    assert asked == [str(old), str(tmp_path)]
