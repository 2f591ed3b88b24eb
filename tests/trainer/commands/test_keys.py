"""`starpod train --keys` explains whatever can be set."""

import re

import pytest
from click.testing import CliRunner, Result

from starpod.trainer.commands.keys import explain, own_keys, own_value, sections
from starpod.trainer.commands.train import train
from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.section import Section

KEYS = [
    f"{prefix}.{name}".lstrip(".")
    for prefix, section in sections(Config())
    for name in own_keys(section)
    if not isinstance(own_value(section, name), Section)
]


def run(*words: str) -> Result:
    return CliRunner().invoke(train, list(words))


def shown(text: str) -> list[str]:
    """The keys that are explained, in order."""
    return re.findall(r"^  (\w[\w.\[\]]*)(?=  |$)", text, re.MULTILINE)


def test_every_key_and_section_has_a_description() -> None:
    for prefix, section in sections(Config()):
        assert type(section).__doc__ not in (None, Section.__doc__), prefix
        assert {*type(section).model_fields} - {*own_keys(section)} <= {
            "kind",
            "where",
            "strategy",
            "mode",
            "teacher",
        }, prefix


def test_all_keys_are_printed_with_their_defaults() -> None:
    done = run("--keys")
    assert done.exit_code == 0
    assert shown(done.output) == KEYS
    assert done.output.count("[default:") + done.output.count("[required]") == len(KEYS)
    assert "environments.NAME.weight" in KEYS and "environment.version" in KEYS


@pytest.mark.parametrize("wanted", ["algorithm", "algorithm.filter", "algorithm.advantage.terms[]", "seed"])
def test_a_section_or_a_key_is_printed_alone(wanted: str) -> None:
    done = run("--keys", wanted)
    assert shown(done.output) == [key for key in KEYS if key == wanted or key.startswith(f"{wanted}.")]


def test_defaults_of_presets_and_choices_are_reported() -> None:
    told = " ".join(explain("algorithm").split())
    assert "[default: 0.28 in starpo-s; or list of numbers]" in told
    assert "[default: token; or trajectory]" in told
    assert "[default: null; or number]" in " ".join(explain("stop.minutes").split())


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("algoritm.filter", "did you mean algorithm.filter"),
        ("foo", "there are title, seed, threads, "),
        ("group_size", "did you mean collect.group_size? `starpod"),
    ],
)
def test_an_unknown_section_is_refused(key: str, advice: str) -> None:
    done = run("--keys", key)
    assert done.exit_code == 2
    text = " ".join(done.output.split())
    assert f"no key {key!r}; {advice}" in text and len(text) < 600
