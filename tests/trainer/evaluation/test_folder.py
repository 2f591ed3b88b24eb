"""The folder of an evaluation: torn lines, retried episodes, extension of the plan, and the lock."""

import fcntl
import os
from dataclasses import replace
from pathlib import Path
from threading import Timer

import pytest

from starpod.trainer.agents.base import Sampling, Task
from starpod.trainer.data import untrusted
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.data.files import BadEpisodes, read_episodes
from starpod.trainer.evaluation.figures import summarise
from starpod.trainer.evaluation.folder import EvaluationFolder
from starpod.trainer.evaluation.plan import MOST_STARTS, EvaluationPlan, PlanDiffers, PlannedEnvironment
from starpod.trainer.evaluation.table import evaluation_report
from starpod.trainer.output.files import FolderLocked

LAKE = PlannedEnvironment(Task("lake-v1", options={"size": 3}, actions=("Left",)), "lake")
ARMS = PlannedEnvironment(Task("bandit-v1", name="arms"), "bandit")
PLAN = EvaluationPlan(
    seed=10, episodes=4, attempts=2, models={"runs/a b": {"step": 5}}, environments={"lake-v1": LAKE, "arms": ARMS}
)


def episode(seed: int, member: int = 0, *, end: str = "terminal", task: str = "") -> Episode:
    turns = [Turn(observation="over there", fresh=True, actions=["Left"], parts={"environment": 1.0})]
    environment = "bandit-v1" if task else "lake-v1"
    return Episode(7, member, environment, seed=seed, turns=turns, end=end, task=task)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> EvaluationFolder:
    folder = EvaluationFolder(tmp_path / "evaluation")
    with folder.writing():
        folder.write_plan(PLAN)
    return folder


def add(folder: EvaluationFolder, *episodes: Episode) -> None:
    with folder.writing():
        for each in episodes:
            folder.append(PLAN, "runs/a b", each)


def test_a_plan_and_episodes_are_read_as_they_were_written(folder: EvaluationFolder) -> None:
    add(folder, episode(11), episode(10, 1, task="arms"))
    plan = folder.read_plan()
    assert plan == PLAN
    lake, arms = folder.read(plan, "runs/a b").values()
    assert (lake.group, lake.member, lake.model) == (1, 0, "runs/a b")
    assert (arms.group, arms.member, arms.model) == (MOST_STARTS, 1, "runs/a b")
    # Other readers of episodes find them, too, and find them whole.
    whole = replace(episode(11), group=1, model="runs/a b")
    assert list(read_episodes(folder.path)) == [whole, replace(arms, turns=whole.turns, usage={})]


def test_the_folder_that_a_call_plays_in_may_be_of_any_size_and_its_tokens_are_not_kept(
    folder: EvaluationFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = [replace(episode(seed), usage={"prompt_tokens": 9, "completion_tokens": 7}) for seed in range(10, 14)]
    for each in long[:3]:
        (turn,) = each.turns
        turn.prompt, turn.reply, turn.logprobs, turn.versions = [5] * 99, [6] * 50, [-1.0] * 50, [3] * 50
        turn.image, each.final_image = b"png", b"png"
    add(folder, *long)
    expected = summarise([replace(each, group=each.seed - 10) for each in long])
    monkeypatch.setattr(untrusted, "MAX_TEXT", 1000)
    with pytest.raises(BadEpisodes, match="longer than"):
        evaluation_report(folder, PLAN)
    with folder.writing():
        report = evaluation_report(folder, PLAN)
        (turn,) = next(iter(folder.read(PLAN, "runs/a b").values())).turns
    figures = report["models"]["runs/a b"]["environments"]["lake-v1"]
    assert {name: figures[name] for name in expected} == expected and expected["tokens_mean"] == 157 / 4
    assert (turn.prompt, turn.reply, turn.logprobs, turn.observation, turn.image) == ([], [], [], "", b"")


def test_a_line_cut_off_anywhere_is_played_again_and_nothing_else(folder: EvaluationFolder) -> None:
    add(folder, episode(10), episode(11))
    (file,) = (folder.path / "episodes").iterdir()
    whole = file.read_bytes()
    first = whole.index(b"\n") + 1
    for length in (*range(0, first, 97), first - 1, first, first + 1, len(whole) - 1, len(whole)):
        file.write_bytes(whole[:length])
        known = whole[:length].count(b"\n")
        assert [seed for _, seed, _ in folder.read(PLAN, "runs/a b")] == [10, 11][:known]
        add(folder, episode(12))
        assert [seed for _, seed, _ in folder.read(PLAN, "runs/a b")] == [*[10, 11][:known], 12]
    file.write_bytes(b"{}\n" + whole)
    with pytest.raises(BadEpisodes, match=rf"{file}:1: not an episode"):
        folder.read(PLAN, "runs/a b")


def test_a_retried_episode_replaces_the_failed_one(folder: EvaluationFolder) -> None:
    add(folder, episode(10, end="failed"), episode(11), episode(10))
    assert [(each.seed, each.end) for each in folder.read(PLAN, "runs/a b").values()] == [
        (10, "terminal"), (11, "terminal"),
    ]  # fmt: skip


def test_only_one_process_writes(folder: EvaluationFolder) -> None:
    with folder.writing(), pytest.raises(FolderLocked, match=r"process \d+ on"), folder.writing():
        pass
    add(folder, episode(10))


def test_a_lock_that_a_killed_process_left_to_a_starting_program_is_waited_for(folder: EvaluationFolder) -> None:
    with folder.writing():
        lock = os.open(folder.path / ".lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    release = Timer(0.2, os.close, [lock])
    release.start()
    add(folder, episode(10))
    release.join()


def test_a_plan_grows_but_does_not_change() -> None:
    more = replace(PLAN, episodes=9, models={"random": {}}, environments={"lake-v1": LAKE})
    grown = PLAN.extended(more)
    assert (grown.episodes, [*grown.models], [*grown.environments]) == (9, ["runs/a b", "random"], ["lake-v1", "arms"])
    for other, words in (
        (replace(PLAN, seed=11), "seed: 10 in the folder, 11 now"),
        (replace(PLAN, episodes=3), "episodes: 4 in the folder, 3 now"),
        (replace(PLAN, sampling=Sampling(temperature=0)), "temperature: null in the folder, 0 now"),
        (replace(PLAN, models={"runs/a b": {"step": 6}}), "step of runs/a b: 5 in the folder, 6 now"),
        (
            replace(PLAN, environments={"lake-v1": PlannedEnvironment(Task("lake-v1"), "lake")}),
            'options of lake-v1: {"size": 3} in the folder, {} now',
        ),
    ):
        with pytest.raises(PlanDiffers) as refusal:
            PLAN.extended(other)
        assert str(refusal.value) == words


def test_a_call_that_was_killed_before_it_wrote_its_plan_is_continued(tmp_path: Path) -> None:
    (tmp_path / "episodes").mkdir()
    for name in (".lock", ".4711.evaluation.json"):
        (tmp_path / name).touch()
    with EvaluationFolder(tmp_path).writing():
        pass
    (tmp_path / "episodes" / "run.jsonl").touch()
    with pytest.raises(BadEpisodes, match="other files"), EvaluationFolder(tmp_path).writing():
        pass


def test_a_folder_without_an_evaluation_and_a_damaged_plan(tmp_path: Path, folder: EvaluationFolder) -> None:
    with pytest.raises(BadEpisodes, match=r"evaluation\.json cannot be read"):
        EvaluationFolder(tmp_path).read_plan()
    for text in ("", "[]", '{"format": 2}', '{"format": 1, "environments": 5}'):
        folder.plan_file.write_text(text)
        with pytest.raises(BadEpisodes, match=r"evaluation\.json cannot be read"):
            folder.read_plan()
