"""One wrong line in a central function fails a test: the suite guards what training and exactly-once steps rest on."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import golden
from tests.support import ROOT

ROOTS = ("proto", "env_server", "environments", "client", "trainer", "tools")
ALGORITHMS = "trainer/starpod/trainer/algorithms"
LAKE = "environments/starpod/environments/frozen_lake"
SOKOBAN = "environments/starpod/environments/sokoban"
SHOP = "environments/starpod/environments/webshop/shop"

MUTATIONS = {
    "GRPO: the mean of all groups": (
        f"{ALGORITHMS}/credit.py",
        "deviation_n = values_n - mean_g[index_n]",
        "deviation_n = values_n - values_n.mean()",
        "tests/trainer/algorithms/test_credit.py",
    ),
    "GAE: no discount of what comes later": (
        f"{ALGORITHMS}/gae.py",
        "delta_B + gamma * lam * carried_B",
        "delta_B + lam * carried_B",
        "tests/trainer/algorithms/test_gae.py",
    ),
    "PPO: the same bound below and above": (
        f"{ALGORITHMS}/losses.py",
        "-ratio_BT.clamp(1 - low, 1 + high)",
        "-ratio_BT.clamp(1 - low, 1 + low)",
        "tests/trainer/algorithms/test_losses.py",
    ),
    "loss: a mean over every row, empty ones too": (
        f"{ALGORITHMS}/losses.py",
        "rows = (length_B > 0).sum().clamp(min=1)",
        "rows = torch.tensor(len(length_B))",
        "tests/trainer/algorithms/test_losses.py",
    ),
    "StarPO-S: groups by mean reward": (
        f"{ALGORITHMS}/filters.py",
        "return group.reward_std",
        "return statistics.fmean(group.returns)",
        "tests/trainer/algorithms/test_filters.py",
    ),
    "several environments: one filter for all": (
        f"{ALGORITHMS}/filters.py",
        "for alike in by_kind(groups).values() for group in",
        "for alike in [list(groups)] for group in",
        "tests/trainer/test_mixture.py",
    ),
    "several policies: each learns from the turns of all agents": (
        "trainer/starpod/trainer/data/episode.py",
        "turns=[turn for turn in episode.turns if turn.agent_id == agent]",
        "turns=list(episode.turns)",
        "tests/trainer/test_learners.py",
    ),
    "several environments: one whitening for all": (
        "trainer/starpod/trainer/update.py",
        "rows.setdefault(kind, []).append(row)",
        'rows.setdefault("", []).append(row)',
        "tests/trainer/test_mixture.py",
    ),
    "token mask: prompts are trained on": (
        "trainer/starpod/trainer/data/batch.py",
        "sample.sampled.extend([False] * len(turn.prompt))",
        "sample.sampled.extend([True] * len(turn.prompt))",
        "tests/trainer/data/test_batch.py",
    ),
    "resume: random streams begin anew": (
        "trainer/starpod/trainer/run.py",
        'restore_rng(state["rng"])',
        "restore_rng(capture_rng())",
        "tests/trainer/test_run.py",
    ),
    "exactly once: a repeat with other actions gets the last reply": (
        "env_server/starpod/env_server/rules.py",
        "and digest_actions(actions) == session.last_request",
        "and len(actions) > 0",
        "tests/env_server/test_calls.py",
    ),
    "exactly once: a step of an old epoch is made": (
        "env_server/starpod/env_server/calls.py",
        "if epoch != session.epoch or index != session.next_index:",
        "if index != session.next_index:",
        "tests/env_server/test_calls.py tests/env_server/test_stream.py",
    ),
    "snapshots: the digest is not looked at": (
        "env_server/starpod/env_server/calls.py",
        "snapshot.state) != snapshot.digest:",
        "snapshot.state) == b'':",
        "tests/env_server/test_calls.py",
    ),
    "tokens: any will do": (
        "env_server/starpod/env_server/auth.py",
        "if hmac.compare_digest(known, digest)]",
        "if len(known) == len(digest)]",
        "tests/hostile/test_tokens.py",
    ),
    "replay: another reward is the same episode": (
        "client/starpod/client/history.py",
        "            transition.reward,\n",
        "            0.0,\n",
        "tests/client/test_recovery.py",
    ),
    "pool: the fullest server takes the next session": (
        "client/starpod/client/pool/placement.py",
        "return min(accepting, key",
        "return max(accepting, key",
        "tests/client/test_placement.py",
    ),
    "lake: slips to one side only": (
        f"{LAKE}/environment.py",
        "else ways[2]",
        "else ways[0]",
        "tests/environments/frozen_lake",
    ),
    "Sokoban: a box off its target costs nothing": (
        f"{SOKOBAN}/environment.py",
        "reward += options.box_off_reward",
        "reward += 0",
        "tests/environments/sokoban",
    ),
    "shop: a price at the cap is too high": (
        f"{SHOP}/reward.py",
        "r_price = price <= goal.price_upper",
        "r_price = price < goal.price_upper",
        "tests/environments/webshop/shop/test_reward.py",
    ),
}
"""What would be wrong -> the file, the line in it, the wrong one, and the tests that have to notice."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository's files."""
    copy = tmp_path_factory.mktemp("tree")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    return copy


@pytest.mark.minutes
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("wrong", MUTATIONS)
def test_a_wrong_line_fails_a_test(tree: Path, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    file, line, wrong_line, tests = MUTATIONS[wrong]
    source = (tree / file).read_text()
    assert source.count(line) == 1, f"{file} no longer holds {line!r} once: adapt the table"
    (tree / file).write_text(source.replace(line, wrong_line))
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-p", "no:cacheprovider", *tests.split()],
            cwd=tree,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(str(tree / root) for root in ROOTS),
                "PYTHONDONTWRITEBYTECODE": "1",
                "STARPOD_GOLDEN": str(golden.ROOT),
            },
            capture_output=True,
            text=True,
        )
    finally:
        (tree / file).write_text(source)
    failed = re.findall(r"^FAILED (\S+)", ran.stdout, re.MULTILINE)
    assert ran.returncode == 1 and failed, f"no test fails: {ran.stdout[-2000:]}{ran.stderr[-2000:]}"
    with capsys.disabled():
        print(f"\n{wrong}: {failed[0]}")
