"""Episodes that a gateway of its own has written are trained on: `replay.offline`."""

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from starpod.trainer.data.files import read_groups
from tests.support import ServerProcess
from tests.tools.gateway.kills import save_model
from tests.tools.gateway.test_process import control, play


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_trains_on_what_a_gateway_wrote(tmp_path: Path) -> None:
    model, folder = save_model(tmp_path / "model"), tmp_path / "gateway"
    command = [sys.executable, "-m", "starpod.cli.main"]
    gateway = ServerProcess([*command, "gateway", str(model), "--folder", str(folder), "--max-tokens", "12"])
    for number in range(8):
        name = f"agent-{number}"
        control(gateway.address, "/sessions", name=name, group=number // 4, member=number % 4)
        said = play(gateway.address, name, turns=2)
        control(gateway.address, f"/sessions/{name}/reward", value=float(len(said[-1]["content"])))
        control(gateway.address, f"/sessions/{name}/end", success=True)
    gateway.close()
    episodes = [episode for group in read_groups(folder / "episodes") for episode in group.episodes]
    words = [
        *("bandit", f"model={model}", f"replay.offline={folder / 'episodes'}", "prompt.prefill=false"),
        *("collect.groups=2", "collect.group_size=4", "algorithm=starpo-grpo"),
        *("evaluation.every=0", "evaluation.episodes=1", "evaluation.reference=[]", "warm_start.steps=0"),
        *("stop.iterations=1", "optimizer.lr=0.001"),
    ]
    run = tmp_path / "run"
    done = subprocess.run(
        [*command, "train", *words, "--run-dir", str(run)], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    metrics = json.loads((run / "metrics.jsonl").read_text())["metrics"]
    assert metrics["collect/episodes"] == len(episodes) == 8
    assert metrics["collect/return_mean"] == pytest.approx(fmean(episode.total_reward for episode in episodes))
    assert metrics["update/grad_norm"] > 0
