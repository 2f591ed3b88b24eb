"""The configuration that falls into the Echo Trap on purpose, and StarPO-S on the same seed."""

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.training import lines, train

QUICK = ("echo_trap", "stop.iterations=30", "stop.minutes=null", "evaluation.every=0", "evaluation.episodes=8")


def trained(*words: str, run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of thirty steps. Rounding differs between processors, so one step's figure may."""
    train("monitor.screen=plain", *words, run_dir=run_dir, base=QUICK)
    return lines(run_dir / "metrics.jsonl")


@pytest.mark.minutes
@pytest.mark.timeout(400)
def test_vanilla_falls_in_and_starpo_s_does_not(tmp_path: Path) -> None:
    vanilla = trained(run_dir=tmp_path / "vanilla")
    told = [text for line in vanilla for text in line.get("warnings", [])]
    assert any(text.startswith("Echo Trap: ") for text in told)
    assert fmean(line["metrics"]["collect/success"] for line in vanilla[:5]) > 0.2
    careful = trained("algorithm=starpo-s", run_dir=tmp_path / "careful")
    assert not any(text.startswith("Echo Trap: ") for line in careful for text in line.get("warnings", []))
    ends = [fmean(line["metrics"]["collect/success"] for line in run[-5:]) for run in (vanilla, careful)]
    assert ends[0] < 0.3 < 0.6 < ends[1]
