"""TextWorld's games as services."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("textworld", reason="TextWorld is not installed: make test-hosting")

from starpod.client import SyncFleet, Want
from starpod.env_server.hosting.textworld import host, installed
from tests.env_server.hosting.checks import (
    EXPERT,
    SCORE,
    check_contract,
    check_copies,
    check_recovery,
    check_refusal,
)
from tests.support import ServerProcess


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("house")
    for seed in (1, 2):
        make = Path(sys.executable).with_name("tw-make")
        size = ("--world-size", "2", "--nb-objects", "4", "--quest-length", "3")
        game = ("--seed", str(seed), "--output", str(folder / f"game{seed}.z8"))
        subprocess.run([make, "custom", *size, *game], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def words(games: Path) -> tuple[str, ...]:
    return (f"textworld:{games}#id=house-v1",)


def test_the_expert_wins(fleet: SyncFleet) -> None:
    wanted = Want(expert_action=True, score=True, valid_actions=True)
    (session,) = fleet.open("house-v1", seed=0, want=wanted)
    observation, total, done = session.observation, 0.0, None
    for _ in range(20):
        assert observation.expert_action in observation.valid_actions
        assert observation.score < 1
        done = session.step(observation.expert_action)
        observation = done.observation
        total += done.reward
        if done.terminated:
            break
    assert done is not None
    assert (done.terminated, done.success, total) == (True, True, 1.0)


def test_the_seed_picks_the_game(fleet: SyncFleet) -> None:
    texts = [fleet.open("house-v1", seed=seed)[0].observation.text for seed in range(4)]
    assert texts[0] == texts[2] != texts[1] == texts[3]


def test_a_command_that_is_not_understood_is_answered(fleet: SyncFleet) -> None:
    (session,) = fleet.open("house-v1", seed=0)
    transition = session.step("dance wildly")
    assert transition.observation.text
    assert (transition.reward, transition.terminated) == (0.0, False)
    assert not session.step("look\ntake all").outcomes[0].valid


def test_copies_are_games_played_again(fleet: SyncFleet) -> None:
    check_copies(fleet, "house-v1", "look", "inventory")


def test_it_keeps_the_contract(server: ServerProcess) -> None:
    check_contract(server, "house-v1", shown={EXPERT, SCORE})


async def test_episodes_survive_a_killed_server(server: ServerProcess) -> None:
    await check_recovery(server, "house-v1")


def test_what_cannot_be_hosted_says_why(tmp_path: Path, games: Path) -> None:
    check_refusal(host, str(tmp_path), "is not a game and contains none; make one: tw-make")
    (tmp_path / "lone.z8").write_bytes((games / "game1.z8").read_bytes())
    check_refusal(host, str(tmp_path), r"lone.z8 has no lone.json next to it")
    (tmp_path / "lone.json").write_text("{}")
    check_refusal(host, str(tmp_path), r"lone.z8: ")
    check_refusal(host, f"{games}?size=3", "takes no arguments")


def test_games_of_the_folder_are_found(games: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "house").symlink_to(games)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    assert installed("*") == ["house"]
    monkeypatch.chdir(games)
    assert installed("game*") == ["game1.z8", "game2.z8"]
