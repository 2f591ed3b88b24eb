"""`make train-llm`, in small: a pretrained model is warm-started, trained, evaluated and reported."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from starpod.trainer.commands.train import train

pytestmark = pytest.mark.smollm


@pytest.mark.timeout(1200)
def test_the_pretrained_model_is_trained_and_named_beside_its_figures(tmp_path: Path) -> None:
    small = ("warm_start.steps=1", "warm_start.episodes=4", "warm_start.batch_size=4", "evaluation.episodes=4")
    short = ("collect.groups=2", "collect.group_size=4", "stop.iterations=1", "threads=1")
    told = CliRunner().invoke(train, ["bandit_llm", *small, *short, "--run-dir", str(tmp_path / "run")])
    assert told.exit_code == 0, told.output
    assert "SmolLM2-135M-Instruct, dequantised from Q4_1" in told.output
    assert "SmolLM2-135M-Instruct, dequantised from Q4_1" in (tmp_path / "run" / "report.html").read_text()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    assert json.loads((tmp_path / "run" / "final.json").read_text())["episodes"] == 4
