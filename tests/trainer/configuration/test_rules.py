"""The table of rules that connect sections. Each rule is tested with the code that it protects."""

import pytest

from starpod.trainer.commands.keys import sections
from starpod.trainer.configuration.case import Case
from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.rules import RULES
from starpod.trainer.configuration.section import Contradiction

KEYS = {
    key.strip(".")
    for prefix, section in sections(Config())
    for key in (prefix, *(f"{prefix}.{name}" for name, _ in section))
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(rule.keys))
def test_a_rule_names_keys_that_exist(rule: Contradiction[Case]) -> None:
    case = Case(Config(), Config().tasks[0])
    assert set(rule.keys) <= KEYS
    assert "{" not in rule.sentence.format(c=case, found=("one", "two")).replace("[{unit", "")
    assert not rule.breaks(case)
