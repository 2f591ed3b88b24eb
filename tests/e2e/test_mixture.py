"""`starpod train` with several environments at once, from the outside."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from starpod.trainer.commands.eval import evaluate
from starpod.trainer.commands.watch import watch
from starpod.trainer.data.files import read_episodes
from starpod.trainer.evaluation.compare import compare_evaluations, read_evaluation
from tests.support import ServerProcess
from tests.training import learnt, lines, rewound, train

CONFIG = {
    "base": "tiny",
    "environments": {
        "arms": {
            "id": "bandit-v1",
            "curriculum": {"kind": "tasks", "tasks": 5, "half_life": 0.4},
            "warm_start": {"actions": "random", "noise": 0.0, "thought": "{words[1]} {words[2]}"},
            "evaluation": {"episodes": 6},
        },
        "lake": {
            "id": "frozen_lake-v1",
            "weight": 2,
            "options": {"observation": "local", "success_rate": 1.0},
            # Left as soon as anybody succeeds in two iterations.
            "curriculum": {"levels": [{"size": 2}, {"size": 3}, {}], "success": 0.02, "window": 2},
            "max_turns": 6,
            "max_actions_per_turn": 1,
            "evaluation": {"options": {"frozen_probability": 0.9}, "reference": ["random", "walk"]},
        },
    },
    "sampling": {"max_episode_tokens": 320},
    "warm_start": {"steps": 30, "lr": 0.005, "noise": 0.5, "episodes": 40, "batch_size": 16},
    "collect": {"groups": 5, "group_size": 4},
    "evaluation": {"episodes": 4, "every": 2, "greedy": True, "reference": ["random"]},
    "checkpoint": {"every": 1, "keep": 9},
    "algorithm": {"mini_batch_size": 4},
    "monitor": {"sinks": {"tensorboard": False}, "screen": "plain"},
    "stop": {"iterations": 4},
}


def said(file: Path) -> dict[tuple[str, int], list[tuple[str, str]]]:
    """Return the observations and replies of each episode, by environment and seed."""
    return {
        (episode["environment"], episode["seed"]): [(turn["observation"], turn["reply"]) for turn in episode["turns"]]
        for episode in lines(file)
    }


@pytest.fixture(scope="module")
def mixed(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four iterations in one go."""
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "mixed.yaml").write_text(yaml.safe_dump(CONFIG))
    addresses = [f"environments.{name}.addresses=[{server.address}]" for name in ("arms", "lake")]
    train(str(folder / "mixed.yaml"), *addresses, run_dir=folder / "run", base=())
    return folder / "run"


def test_each_environment_is_described(mixed: Path) -> None:
    groups = {"arms": 0.0, "lake": 0.0}
    for record in lines(mixed / "metrics.jsonl"):
        values = record["metrics"]
        for name in groups:
            groups[name] += values[f"environments/{name}/groups"]
            assert 0 <= values[f"environments/{name}/kept_fraction"] <= 1
            assert {f"environments/{name}/{key}" for key in ("success", "return_mean", "turns_mean")} <= set(values)
    assert groups == {"arms": 7, "lake": 13}
    first, *_, last = lines(mixed / "evaluations.jsonl")
    for line in (first, last):
        each = line["environments"]
        assert (each["arms"]["episodes"], each["lake"]["episodes"]) == (6, 4)
        assert line["success"] == pytest.approx((each["arms"]["success"] + each["lake"]["success"]) / 2)
    assert set(first["reference"]) == {"random"} and set(first["environments"]["lake"]["reference"]) == {
        "random",
        "walk",
    }
    (final,) = lines(mixed / "final.json")
    lake, arms = final["environments"]["lake"], final["environments"]["arms"]
    assert (lake["environment"], lake["seeds"], arms["seeds"]) == ("frozen_lake-v1", [0, 4], [0, 6])
    assert lake["options"] == {"observation": "local", "success_rate": 1.0, "frozen_probability": 0.9}
    assert len(lake["results"]["success"]) == 4 and 0 <= final["greedy"]["success"] <= 1
    episodes = list(read_episodes(mixed / "episodes" / "train-000001.jsonl.gz"))
    assert {(episode.task, episode.environment) for episode in episodes} == {
        ("arms", "bandit-v1"),
        ("lake", "frozen_lake-v1"),
    }
    assert all(10_000 <= episode.seed < (10_005 if episode.task == "arms" else 2**40) for episode in episodes)
    evaluated = list(read_episodes(mixed / "episodes" / "eval-000004.jsonl"))
    assert len({episode.group for episode in evaluated}) == len(evaluated) == 10
    # The best checkpoint is the one whose mean is highest.
    best = max(lines(mixed / "evaluations.jsonl"), key=lambda line: line["success"])
    assert final["step"] == best["step"] or best["success"] == next(
        line["success"] for line in lines(mixed / "evaluations.jsonl") if line["step"] == final["step"]
    )


def test_curricula_follow_success_and_continue_from_a_checkpoint_bit_for_bit(mixed: Path, tmp_path: Path) -> None:
    metrics = [record["metrics"] for record in lines(mixed / "metrics.jsonl")]
    levels = [values["environments/lake/level"] for values in metrics]
    first, *others = [values["environments/arms/tasks_effective"] for values in metrics]
    assert first == 0 and all(1 <= each <= 5 for each in others)
    assert levels[0] == 0 and levels == sorted(levels) and levels[-1] > 0
    # Cut within the window of a level.
    cut = rewound(mixed, levels.index(max(levels)) + 1, tmp_path / "run")
    train(run_dir=cut, resume=True, base=())
    assert learnt(cut) == learnt(mixed)
    words = ("environments.lake.options.size=5",)
    assert "environments is" in train(*words, run_dir=cut, resume=True, status=2, base=())


def test_an_evaluation_plays_every_environment_as_the_run_did(
    mixed: Path, server: ServerProcess, tmp_path: Path
) -> None:
    (final,) = lines(mixed / "final.json")

    def played(*words: str) -> dict[str, dict[str, object]]:
        file = tmp_path / "report.json"
        result = CliRunner().invoke(evaluate, [str(mixed), *words, "--json", str(file)])
        assert result.exit_code == 0, result.output
        return dict(json.loads(file.read_text())["models"][str(mixed)]["environments"])

    found = played("-e", server.address, "--episodes", "4", "--to", str(tmp_path / "again"))
    (episodes,) = (tmp_path / "again" / "episodes").iterdir()
    again, trained = said(episodes), said(mixed / f"episodes/final-{final['step']:06}.jsonl")
    assert len(again) == 8 and all(turns == trained[key] for key, turns in again.items())
    assert list(found) == ["arms", "lake"]
    assert found["lake"]["results"] == final["environments"]["lake"]["results"]
    assert found["arms"]["results"] == {
        name: values[:4] for name, values in final["environments"]["arms"]["results"].items()
    }
    assert found["lake"]["options"] == final["environments"]["lake"]["options"]
    # By the name in the run, or by that of the environment; options for one of them.
    assert list(played("--episodes", "1", "-e", f"{server.address}/lake")) == ["lake"]
    both = ("-e", f"{server.address}/frozen_lake", "-e", f"{server.address}/bandit")
    by_id = played("--episodes", "1", *both, "--option", "frozen_lake:size=2")
    assert {name: figures["environment"] for name, figures in by_id.items()} == {
        "lake": "frozen_lake-v1",
        "arms": "bandit-v1",
    }
    assert by_id["lake"]["options"] == {**final["environments"]["lake"]["options"], "size": 2}
    # Two final evaluations of the same run pair episode by episode, environment by environment.
    each = compare_evaluations(read_evaluation(mixed), read_evaluation(mixed))
    assert {name: figures["pairs"] for name, figures in each.items()} == {"arms": 6, "lake": 4}


def test_pages_and_screens_name_each_environment(mixed: Path) -> None:
    page = (mixed / "report.html").read_text()
    assert ">Environments</h2>" in page and "arms" in page and "lake: success" in page
    result = CliRunner().invoke(watch, [str(mixed), "-e", "arms"])
    assert result.exit_code == 0 and "arms bandit-v1" in result.output and "frozen_lake" not in result.output
    result = CliRunner().invoke(watch, [str(mixed), "-e", "lakes"])
    assert result.exit_code == 2 and "no episode of lakes; did you mean lake" in result.output
