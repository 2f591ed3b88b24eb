"""The decoders under coverage-guided fuzzing, for a short while; for longer by hand: tests/hostile/fuzz_decoders.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT


@pytest.mark.minutes
def test_decoders_refuse_what_they_cannot_read(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="atheris has no wheel for this system: pip install atheris")
    result = subprocess.run(
        [sys.executable, "-m", "tests.hostile.fuzz_decoders", "-runs=30000", "-max_total_time=25"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert "Done " in result.stderr
