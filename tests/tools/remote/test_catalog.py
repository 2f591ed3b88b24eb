"""Options that command lines give to environments."""

import pytest

from starpod.remote.catalog import parse_options
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
