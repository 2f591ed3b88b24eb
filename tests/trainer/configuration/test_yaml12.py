"""Configurations are YAML 1.2, read strictly: what another reader would silently change is refused with its line."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.loading import load_config
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.configuration.yaml12 import YamlError, dump_yaml, load_yaml

BOMB = "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 64))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[No, yes, off, 1:30, 2001-01-01, <<]", ["No", "yes", "off", "1:30", "2001-01-01", "<<"]),
        ("[010, 0o17, 0x1F, 1e3, 1e-3, -.5, ~]", [10, 15, 31, 1000.0, 0.001, -0.5, None]),
        ("{a: &x [1], b: *x}", {"a": [1], "b": [1]}),
        ("\ufeffseed: 3\r\n", {"seed": 3}),
        ("", None),
    ],
)
def test_what_it_reads(text: str, value: Any) -> None:
    assert load_yaml(text) == value


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: 2\na: 3", "line 3: the key 'a' is given twice"),
        ("a: {b: 1, b: 1}", "line 1: the key 'b' is given twice"),
        ("a: &x [*x]", "line 1: an alias that contains itself"),
        ("[" * 100_000, "line 1: nested more than 64 deep"),
        (BOMB, "more than 100,000 values"),
        ("a:\n\tb: 1", "line 2: .*cannot start any token"),
        ("a: 1\n---\nb: 2", "line 2: expected a single document"),
        ("a: " + "9" * 5000, "Exceeds the limit"),
        ("a: \0", "unacceptable character #x0000"),
        ("a: !!python/name:os.system", "line 1: could not determine a constructor"),
    ],
)
def test_what_it_refuses(text: str, problem: str) -> None:
    with pytest.raises(YamlError, match=problem):
        load_yaml(text)


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10))
def test_what_is_written_is_read_again(value: Any) -> None:
    assert load_yaml(dump_yaml(value)) == value


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["seed=1", "seed=2"], "seed is given twice: seed=1 and seed=2"),
        (["environment.options={size: 5, size: 6}"], "the key 'size' is given twice"),
        (["stop.minutes=1:30"], "stop.minutes: .*'1:30'"),
        (["seed=true"], "seed: true is not a value of this key"),
        (["optimizer.lr=true"], "optimizer.lr: true is not a value"),
        (["optimizer.lr=.inf"], "optimizer.lr: Input should be a finite number, not inf"),
        (["algorithm.entropy_coefficient=.nan"], "algorithm.entropy_coefficient: Input should be a finite number"),
    ],
)
def test_words_that_mean_two_things_are_refused(words: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config("frozen_lake", words)


def test_a_section_goes_before_its_parts_at_any_depth() -> None:
    words = ["algorithm.filter.value=0.5", "algorithm.filter={strategy: top_fraction}", "prompt.thinking=off"]
    config = load_config("frozen_lake", words)
    assert (config.algorithm.filter.value, config.prompt.thinking) == (0.5, False)


def test_a_base_is_in_the_folder_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "common.yaml").write_text("base: frozen_lake\nseed: 99\n")
    (tmp_path / "sub" / "common.yaml").write_text("base: frozen_lake\nseed: 7\n")
    (tmp_path / "sub" / "mine.yaml").write_text("base: common.yaml\n")
    monkeypatch.chdir(tmp_path)
    assert load_config("sub/mine.yaml").seed == 7


def test_a_configuration_survives_its_file(tmp_path: Path) -> None:
    config = load_config("frozen_lake", ["title='1e3'", "monitor.screen=off"])
    (tmp_path / "config.yaml").write_text(dump_yaml(config.to_dict()))
    assert load_config(str(tmp_path / "config.yaml")) == config
    assert isinstance(config, Config)
