"""`starpod export-episodes`: Harbor's own models and Inspect's own reader read what it writes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from starpod.trainer.commands.export_episodes import export_episodes
from starpod.trainer.data.chat import parse_chat
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.data.files import write_episodes


def turn(observation: str, prompt: list[int], reply: list[int], *, fresh: bool = False, **more: Any) -> Turn:
    sampled = {"logprobs": [-0.5] * len(reply), "versions": [3] * len(reply)}
    return Turn(observation=observation, prompt=prompt, reply=reply, fresh=fresh, **sampled, **more)


FIRST = {
    "text": "<answer>Left || Right</answer>",
    "thought": "there",
    "actions": ["Left", "Right"],
    "parts": {"environment": 0.5},
    "criteria": {"moved": True},
}
SOLVED = Episode(
    4,
    1,
    "frozen_lake-v1",
    "1.0.0",
    seed=12,
    instructions="Cross the ice.",
    turns=[
        turn("P_G", [1, 2, 3], [4, 5], fresh=True, **FIRST),
        turn("_PG", [6], [7], text="hm", well_formed=False, parts={"format": -0.1}),
        turn(
            "_PG", [8], [9], fresh=True, text="Right", actions=["Right"], parts={"environment": 1.0}, agent_id="north"
        ),
    ],
    end="terminal",
    success=True,
    final_observation="__√",
)
SCRIPTED = Episode(5, 0, "bandit-v1", turns=[turn("two arms", [], [], text="left", actions=["left"])], end="max_turns")
LOST = Episode(6, 0, "bandit-v1", turns=[turn("two arms", [1], [2], text="left")], end="failed", error="SessionLost")
NEVER_BEGUN = Episode(7, 0, "bandit-v1", end="failed")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run."""
    write_episodes(tmp_path / "run" / "episodes" / "train-000001.jsonl.gz", [SOLVED, SCRIPTED])
    write_episodes(tmp_path / "run" / "episodes" / "final-000001.jsonl", [LOST, NEVER_BEGUN])
    return tmp_path / "run"


def export(run: Path, *arguments: str) -> Result:
    return CliRunner().invoke(export_episodes, [str(run), str(run / "out"), *arguments])


def read(run: Path) -> dict[str, Any]:
    return {file.name: json.loads(file.read_text()) for file in sorted((run / "out").iterdir())}


def test_what_was_seen_said_done_and_earned(run: Path) -> None:
    result = export(run, "--model", "tiny")
    assert (result.exit_code, result.output) == (0, f"{run / 'out'}: 3 episodes; 1 left out\n")
    files = read(run)
    assert list(files) == [
        f"{name}.atif.json" for name in ("final-000001-00001", "train-000001-00001", "train-000001-00002")
    ]
    solved = files["train-000001-00001.atif.json"]
    assert solved["agent"]["model_name"] == "tiny"
    assert [step["source"] for step in solved["steps"]] == ["system", "user", "agent", "agent", "agent"]
    assert [step["message"] for step in solved["steps"]][:3] == ["Cross the ice.", "P_G", SOLVED.turns[0].text]
    first, second, third = solved["steps"][2:]
    assert first["reasoning_content"] == "there"
    assert [call["arguments"] for call in first["tool_calls"]] == [{"action": "Left"}, {"action": "Right"}]
    assert first["observation"]["results"] == [{"content": "_PG", "source_call_id": "turn-0.1"}]
    assert first["extra"]["criteria"] == {"moved": True} and third["extra"]["agent_id"] == "north"
    assert "tool_calls" not in second and second["observation"]["results"] == [{"content": "_PG"}]
    assert third["observation"]["results"][0]["content"] == "__√"
    assert [step["metrics"]["prompt_tokens"] for step in (first, second, third)] == [3, 6, 1]
    assert solved["final_metrics"]["extra"] == {"reward": 1.4, "success": True, "end": "terminal"}
    assert solved["extra"]["seed"] == 12 and files["final-000001-00001.atif.json"]["extra"]["error"] == "SessionLost"


def test_tokens_are_those_that_were_sampled(run: Path) -> None:
    assert export(run, "--tokens", "--solved").exit_code == 0
    (trajectory,) = read(run).values()
    metrics = [step["metrics"] for step in trajectory["steps"][2:]]
    assert [each["prompt_token_ids"] for each in metrics] == [[1, 2, 3], [1, 2, 3, 4, 5, 6], [8]]
    assert [each["completion_token_ids"] for each in metrics] == [[4, 5], [7], [9]]
    assert metrics[0]["logprobs"] == [-0.5, -0.5] and metrics[0]["extra"] == {"policy_versions": [3, 3]}
    assert trajectory["final_metrics"]["total_prompt_tokens"] == 10
    assert trajectory["final_metrics"]["total_completion_tokens"] == 4


@pytest.mark.parametrize("tokens", [False, True])
def test_harbor_reads_it(run: Path, tokens: bool) -> None:
    models = pytest.importorskip("harbor.models.trajectories", reason="Harbor is not installed: make test-agents")
    export(run, *["--tokens"] * tokens)
    files = read(run)
    assert len(files) == 3
    for trajectory in files.values():
        models.Trajectory.model_validate(trajectory)


def test_inspect_gets_a_log_of_each_environment_with_scores_and_errors(run: Path) -> None:
    result = export(run, "--as", "inspect", "--model", "tiny")
    assert (result.exit_code, result.output) == (0, f"{run / 'out'}: 3 episodes; 1 left out\n")
    files = read(run)
    logs = {name.partition("_")[2]: log for name, log in files.items()}
    assert list(logs) == [
        "bandit-v1_final-000001-1.json",
        "bandit-v1_train-000001-2.json",
        "frozen-lake-v1_train-000001-1.json",
    ]
    lake, lost = logs["frozen-lake-v1_train-000001-1.json"], logs["bandit-v1_final-000001-1.json"]
    (sample,) = lake["samples"]
    assert [message["role"] for message in sample["messages"]] == ["system", *["user", "assistant"] * 3, "user"]
    assert sample["messages"][2]["metadata"]["actions"] == ["Left", "Right"]
    assert sample["scores"]["success"] == {"value": "C"} and sample["scores"]["reward"]["value"] == 1.4
    assert lake["results"]["scores"][0]["metrics"]["accuracy"]["value"] == 1.0
    (failed,) = lost["samples"]
    assert failed["error"]["message"] == "SessionLost" and "scores" not in failed
    assert lost["results"] == {"total_samples": 1, "completed_samples": 0, "scores": []}


def test_a_retried_episode_of_an_evaluation_is_exported_once(tmp_path: Path) -> None:
    retried = [replace(LOST, model="m"), replace(SCRIPTED, seed=LOST.seed, member=LOST.member, model="m")]
    write_episodes(tmp_path / "episodes" / "m-1.jsonl", retried)
    export(tmp_path)
    assert list(read(tmp_path)) == ["m-1-00002.atif.json"]
    shutil.rmtree(tmp_path / "out")
    export(tmp_path, "--as", "inspect")
    (log,) = read(tmp_path).values()
    assert log["eval"]["model"] == "m" and [sample["metadata"]["end"] for sample in log["samples"]] == ["max_turns"]


def test_inspect_reads_it(tmp_path: Path) -> None:
    inspect_log = pytest.importorskip("inspect_ai.log", reason="Inspect is not installed: make test-agents")
    seen = replace(SOLVED, success=False, final_image=b"\x89PNG")
    write_episodes(tmp_path / "final-000001.jsonl", [SOLVED, seen, LOST])
    export(tmp_path, "--as", "inspect", "--model", "tiny")
    infos = {info.task: info for info in inspect_log.list_eval_logs(str(tmp_path / "out"))}
    assert set(infos) == {"bandit-v1", "frozen-lake-v1"}
    for info in infos.values():
        assert inspect_log.read_eval_log(info, header_only=True).eval.model == "tiny"  # as the viewer lists logs
    log = inspect_log.read_eval_log(infos["frozen-lake-v1"])
    assert [(sample.id, sample.epoch, sample.scores["success"].value) for sample in log.samples] == [
        ("12", 1, "C"),
        ("12", 2, "I"),
    ]
    assert [message.text for message in log.samples[0].messages][:3] == ["Cross the ice.", "P_G", FIRST["text"]]
    assert log.samples[0].output.completion == "Right"
    assert (log.stats.model_usage["tiny"].input_tokens, log.stats.model_usage["tiny"].output_tokens) == (20, 8)
    assert inspect_log.read_eval_log(infos["bandit-v1"]).samples[0].error.message == "SessionLost"


def test_what_cannot_be_exported_is_said(run: Path, tmp_path: Path) -> None:
    assert "does not exist" in export(tmp_path / "none").output
    write_episodes(tmp_path / "empty.jsonl", [NEVER_BEGUN])
    result = CliRunner().invoke(export_episodes, [str(tmp_path / "empty.jsonl"), str(tmp_path / "out")])
    assert result.exit_code == 1 and "holds no such episode" in result.output


def test_conversations_for_fine_tuning_are_lines_of_one_file(run: Path) -> None:
    write_episodes(run / "episodes" / "train-000002.jsonl.gz", [LOST])
    arguments = [str(run), str(run / "chats.jsonl"), "--as", "sft"]
    assert "2 episodes; 1 left out" in CliRunner().invoke(export_episodes, arguments).output  # the failed one
    result = CliRunner().invoke(export_episodes, [*arguments, "--solved"])
    assert (result.exit_code, result.output) == (0, f"{run / 'chats.jsonl'}: 1 episodes; 2 left out\n")
    (line,) = map(json.loads, (run / "chats.jsonl").read_text().splitlines())
    roles = ["system", *["user", "assistant"] * 3]
    assert [message["role"] for message in line["messages"]] == roles
    assert [message["content"] for message in line["messages"]][:3] == ["Cross the ice.", "P_G", SOLVED.turns[0].text]
    assert (line["reward"], line["success"], line["seed"]) == (1.4, True, 12)
    assert parse_chat(line).weights == [0, *[0, 1] * 3]


def test_tokens_without_a_place_are_refused(run: Path) -> None:
    assert "--as sft has no place for token ids" in export(run, "--as", "sft", "--tokens").output
    assert not (run / "out").exists()
