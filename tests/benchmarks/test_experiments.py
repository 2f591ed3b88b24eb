"""The files of benchmarks/training/experiments."""

import re
from pathlib import Path

import pytest

from benchmarks.training import experiment
from benchmarks.training.experiment import EXPERIMENTS, read_configs, read_experiment
from starpod.trainer.configuration.section import ConfigError
from tests.support import ROOT


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_variant_is_a_configuration_of_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    configs = [str(config.to_dict()) for config in read_configs(EXPERIMENTS[name]).values()]
    assert len(set(configs)) == len(configs)


def test_a_run_that_was_stopped_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(experiment, "starpod", lambda *words, **_: commands.append(words) or "settings")
    (tmp_path / "asked.yaml").write_text("settings")
    (tmp_path / "report.html").touch()  # which a stopped run has written too
    (tmp_path / "evaluations.jsonl").write_text("{}\n")
    with pytest.raises(SystemExit, match="has no final evaluation"):
        experiment.run("name", experiment.Variant("frozen_lake", {}), 1, tmp_path, ())
    assert commands[1][-3:] == ("--run-dir", str(tmp_path), "--resume-or-start")


def test_a_dry_run_checks_and_prints_changes_and_takes_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own_file = tmp_path / "own.yaml"
    own_file.write_text(EXPERIMENTS["frozen_lake"].read_text(encoding="utf-8"), encoding="utf-8")

    def call(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["experiment", *words, "--dry-run"])
        experiment.main()
        return capsys.readouterr().out

    assert call(str(own_file), "--set", "collect.groups=3").count(" collect.groups=3") >= 1
    for words, problem in (
        (["frozen_lake", "--set", "collect.grups=3"], "no key 'collect.grups'; did you mean groups"),
        (["frozen_lake", "--seeds", "0"], "0 is not a number of seeds"),
        (["elsewhere/own.yaml"], "no experiment 'elsewhere/own.yaml': give a name of the list, or a YAML file"),
    ):
        with pytest.raises(SystemExit):
            call(*words)
        assert problem in capsys.readouterr().err


def test_pages_show_pictures_with_the_experiments_captions() -> None:
    shown = [
        found
        for page in (ROOT / "docs").glob("*.md")
        for found in re.findall(r"!\[([^\]]*)\]\([^)]*learning_(\w+)\.svg\)", page.read_text(encoding="utf-8"))
    ]
    assert shown and [found for found in shown if found[0] != read_experiment(EXPERIMENTS[found[1]]).caption] == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("question:", "qestion:"), "qestion: no such key; did you mean question"),
        (("machine: two cores", "machine: a cluster"), "machine: Input should be 'two cores' or 'one GPU'"),
        (("base: frozen_lake", "base: frozen_lak"), "no configuration 'frozen_lak'; did you mean frozen_lake"),
        (("{}", "{collect.grups: 1}"), "variant 'StarPO-S with GiGPO': no key 'collect.grups'; did you mean groups"),
        (("seeds: 3", "title: twice"), "line 2: the key 'title' is given twice"),
    ],
)
def test_a_mistake_in_a_file_is_named(change: tuple[str, str], problem: str, tmp_path: Path) -> None:
    text = EXPERIMENTS["frozen_lake"].read_text(encoding="utf-8").replace("question:", "seeds: 3\nquestion:", 1)
    assert change[0] in text
    (tmp_path / "wrong.yaml").write_text(text.replace(*change), encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        read_configs(tmp_path / "wrong.yaml")
    assert "wrong.yaml: " in str(raised.value) and problem in str(raised.value)
