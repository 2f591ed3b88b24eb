"""The soak finds what grows, and only that."""

import json
import math
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.soak.trend import Tolerance, trend
from tests.support import ROOT, children_of, gone

TROUBLED = str(Path(__file__).with_name("troubled.py"))
TOLERANCE = Tolerance(absolute=2.0, relative=0.03)
SECONDS = [float(second) for second in range(0, 1800, 3)]


@given(seed=st.integers(0, 1000), level=st.floats(10, 1000), noise=st.floats(0, 0.02))
def test_noise_and_what_settles_do_not_grow(seed: int, level: float, noise: float) -> None:
    """A heap that finds its size within the warm-up, and fluctuates from then on."""
    luck = random.Random(seed)
    values = [level * (1 - 0.5 * math.exp(-second / 100)) * (1 + noise * luck.uniform(-1, 1)) for second in SECONDS]
    assert not trend(SECONDS, values, TOLERANCE).grows


@given(seed=st.integers(0, 1000), level=st.floats(10, 1000), leak=st.floats(0.06, 3.0), noise=st.floats(0, 0.02))
def test_what_leaks_grows(seed: int, level: float, leak: float, noise: float) -> None:
    """The leak is a share of the level over the whole run. A leak of twice the tolerance must be found."""
    luck = random.Random(seed)
    end = max(leak * level, 4.0 * TOLERANCE.absolute)
    values = [level * (1 + noise * luck.uniform(-1, 1)) + 2 * end * second / SECONDS[-1] for second in SECONDS]
    found = trend(SECONDS, values, TOLERANCE)
    assert found.grows
    assert found.slope == pytest.approx(2 * end * 3600 / SECONDS[-1], rel=0.5)


def test_one_step_up_and_down_again_is_no_growth() -> None:
    values = [100.0 + (50.0 if 900 < second < 1400 else 0.0) for second in SECONDS]
    assert not trend(SECONDS, values, TOLERANCE).grows


def test_too_few_samples_say_nothing() -> None:
    with pytest.raises(ValueError, match="too few"):
        trend([0.0, 1.0, 2.0], [1.0, 2.0, 3.0], TOLERANCE)


@pytest.mark.minutes
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_environment_that_leaks_is_found(tmp_path: Path) -> None:
    """A few seconds of the soak itself, on an environment that keeps 64 KiB of every step."""
    report = tmp_path / "soak.json"
    words = ["--minutes", "0.1", "--peak-seconds", "1", "--players", "8", "--json", str(report)]
    words += ["--environment", "leaky-v1", "--file", TROUBLED]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", *words], cwd=ROOT, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "server memory grows" in done.stderr
    trends = json.loads(report.read_text())["trends"]
    assert trends["server memory"]["grows"]
    assert not trends["client memory"]["grows"]
    assert not trends["server descriptors"]["grows"]


def test_a_benchmark_that_is_ended_ends_its_servers() -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "--peak-seconds", "600"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as benchmark:
        while len(children := children_of(benchmark.pid)) < 2:  # the client starts once the server is ready
            assert benchmark.poll() is None
            time.sleep(0.05)
        benchmark.terminate()
    assert benchmark.returncode == 128 + signal.SIGTERM
    assert all(gone(child) for child in children)
