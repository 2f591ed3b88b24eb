"""`starpod hub` on all installed environments, and on environments with planted bugs.

    make .venv-hosting/.ready && .venv-hosting/bin/python -m benchmarks.serving.hub [--minutes 30] [WHAT TO SERVE ...]

The first part runs the command as a user would, with a game for TextWorld. The second part reports how many planted
bugs are found, and whether anything is found in environments without a known bug: all built-in ones, and some hosted
ones.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.results import write_result
from tests.support import ROOT
from tests.tools.check.planted import look_for_all

GOOD = {
    "gymnasium": ("FrozenLake-v1", "Taxi-v4", "CliffWalking-v1", "CartPole-v1"),
    "minigrid": ("minigrid:MiniGrid-Empty-5x5-v0", "minigrid:BabyAI-GoToRedBall-v0"),
    "reasoning_gym": ("leg_counting", "basic_arithmetic", "isomorphic_strings"),
    "textarena": ("Mastermind-v0", "TowerOfHanoi-v0"),
}
"""Hosted environments without a known bug, by the module that they need."""
FAMILIES = {"minigrid": "gymnasium"}
KEPT = ("id", "version", "passed", "problem", "seconds", "steps_per_second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="in which checks begin")
    parser.add_argument("--planted", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path, default=ROOT / "docs/benchmarks/hub.json")
    arguments, words = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        result = check_all(Path(folder), arguments.minutes, words)
        print(f"{sum(entry['passed'] for entry in result['environments'])} of {len(result['environments'])} pass")
        planted = asdict(look_for_all(Path(folder), good())) if arguments.planted else None
    if planted:
        print(planted)
    write_result(arguments.json, {**result, "planted": planted})


def good() -> list[str]:
    """Return the arguments of `starpod serve` for environments without a known bug."""
    words = ["*"]
    for module, names in GOOD.items():
        family = FAMILIES.get(module, module)
        words += [f"{family}:{name}" for name in names if find_spec(module)]
    return words


def check_all(folder: Path, minutes: float, words: list[str]) -> dict[str, Any]:
    """Run `starpod hub`. Returns its result for each environment, and the minutes that it took."""
    make = Path(sys.executable).with_name("tw-make")
    if make.exists():
        game = ("tw-simple", "--rewards", "dense", "--goal", "detailed", "--seed", "1", "--output", "games/simple.z8")
        subprocess.run([make, *game], cwd=folder, check=True, capture_output=True)
    command = [sys.executable, "-m", "starpod.cli.main", "hub", "--minutes", str(minutes), *words]
    start = perf_counter()
    process = subprocess.run(command, cwd=folder, check=False)
    if process.returncode not in (0, 1):
        raise SystemExit(process.returncode)
    entries = json.loads((folder / "hub" / "hub.json").read_text())
    return {
        "minutes": round((perf_counter() - start) / 60, 1),
        "environments": [{name: entry[name] for name in KEPT} for entry in entries],
    }


if __name__ == "__main__":
    main()
