"""Continuations: kept, opened and saved; jobs that value the turns of an episode; the policies that can play."""

import dataclasses
import html
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from starpod.client import Limits
from starpod.remote.game import Impossible
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.files import read_episodes
from starpod.trainer.rollout.saved_starts import read_starts
from starpod.trainer.warm_start.config import WarmStartConfig
from starpod.trainer.warm_start.demonstrations import of_episodes
from starpod.trainer.warm_start.files import read_contents
from starpod.ui.saving import save_demonstration
from tests.fake_openai import fake_openai
from tests.support import ServerProcess, small_files
from tests.tools.ui.conftest import wait_until
from tests.tools.ui.test_games import (
    EPISODE,
    FATAL,
    Visitor,
    live,
    lost,
    program_of,
    run_program,
    seen_by,
    start,
    visiting,
    visitor,
    write_lake,
)

__all__ = ["live", "lost", "visitor"]  # fixtures


def lines_of(visitor: Visitor) -> dict[str, tuple[str, str]]:
    """Outcome and actions of each continuation that a page lists, by its link."""
    row = r'<tr><td class="name[^"]*">([^<]+)<.*?data-label="Actions">([^<]*)</td><td><a href="(/continuations/[^"]+)"'
    return {link: (outcome, actions) for outcome, actions, link in re.findall(row, visitor.text)}


# --- saving -----------------------------------------------------------------------------------------------------------


def test_what_is_held_out_is_not_saved(visitor: Visitor, lost: tuple[Path, Episode]) -> None:
    """A run would refuse the whole file."""
    start(visitor, "sokoban-v1", seed="63")
    visitor.send("act", action="Up")
    assert "cannot be saved for training: seed 63 is held out by seeds.final (0 to 4999)" in visitor.text
    assert 'href="/play/sokoban-v1?seed=10000"' in visitor.text and 'action="save"' not in visitor.text
    form = visitor.hidden("/act")
    for kind in ("demonstrations", "starts"):
        assert visitor.send("save", form, kind=kind) == 409
        assert "Play from another seed, such as 10000" in visitor.text
        visitor.get(visitor.path.removesuffix("/save"))
        assert not (lost[0] / kind / "sokoban-v1.jsonl").exists()


def test_demonstrations_are_whole_and_numbered_whatever_fails_or_comes_at_once(
    lost: tuple[Path, Episode], tmp_path: Path
) -> None:
    episode = dataclasses.replace(lost[1], seed=10_000)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: save_demonstration(tmp_path, episode, None), range(16)))
    (file,) = (tmp_path / "demonstrations").iterdir()
    with small_files(file.stat().st_size + 10), pytest.raises(Impossible, match="cannot be written: File too large"):
        save_demonstration(tmp_path, episode, None)
    save_demonstration(tmp_path, episode, None)
    assert [each.group for each in read_episodes(file)] == list(range(17))


def test_the_seeds_of_the_episodes_own_run_count(
    server: ServerProcess, lost: tuple[Path, Episode], tmp_path: Path
) -> None:
    ranges = {"final": (10_000, 10_100), "selection": (0, 10), "train": (500, 600), "warmstart": (600, 700)}
    seeds = {name: {"start": first, "stop": after} for name, (first, after) in ranges.items()}
    write_lake(tmp_path / "lake", seeds=seeds).episodes.write_rollouts(1, [lost[1]], max_bytes=2**20)
    with visiting(tmp_path, "--address", server.address, page="/episodes?run=lake", shown="1 episode<") as visitor:
        visitor.get(EPISODE)
        visitor.send("/fork", turn="1")
        assert "held out by seeds.final (10000 to 10099)" in visitor.text and "seed=500" in visitor.text


def test_saving_an_unsolved_episode_gives_a_warning(visitor: Visitor) -> None:
    start(visitor, "frozen_lake-v1", seed="10001")
    visitor.send("act", action="Left")
    assert visitor.send("save", kind="demonstrations") == 200
    assert "The task is not solved yet" in visitor.text


def test_calls_of_tools_are_saved_as_the_texts_of_policies(visitor: Visitor, lost: tuple[Path, Episode]) -> None:
    start(visitor, "desk-v1", seed="10000")
    visitor.send("act", tool="list_files")
    assert visitor.send("save", kind="starts") == 200, visitor.text
    assert visitor.send("save", kind="demonstrations") == 200, visitor.text
    (start_state,) = read_starts(str(lost[0] / "starts" / "desk-v1.jsonl"), "desk-v1")
    assert list(start_state.actions) == ["list_files {}"]
    config = WarmStartConfig(steps=1, demonstrations=str(lost[0] / "demonstrations" / "desk-v1.jsonl"))
    (demonstration,) = of_episodes(read_contents(config, "desk-v1").episodes, Limits())
    assert demonstration.imitate == [True] and demonstration.episode.turns[0].actions == ["list_files {}"]


# --- continuations ----------------------------------------------------------------------------------------------------


def test_a_continuation_is_opened_in_its_state(visitor: Visitor) -> None:
    """The session keeps the random state. On slippery ice, the same actions would otherwise lead elsewhere."""
    start(visitor, "frozen_lake-v1", seed="10002", success_rate="0.3", size="6")
    visitor.send("act", action="Right")
    assert visitor.send("branch", policy="random", count="8") == 200
    lines = {link: actions.split() for link, (_, actions) in lines_of(visitor).items()}
    assert len(lines) == 8
    for link, actions in list(lines.items())[:3]:
        assert visitor.get(link) == 200 and f"#t{len(actions) + 1}" in visitor.text
        end = re.findall(r'id="end".*?<pre class="mono">(.*?)</pre>', visitor.text, re.DOTALL)[0]
        assert visitor.send(f"{link}/open", turn=str(len(actions) + 1)) == 200, visitor.text
        assert f"turn <b>{len(actions) + 1}</b>" in visitor.text and "<td>random actions</td>" in visitor.text
        assert seen_by(visitor) == html.unescape(end)
        assert run_program(program_of(visitor))[-1][0] == seen_by(visitor)
        assert visitor.send("undo") == 200 and f"turn <b>{len(actions)}</b>" in visitor.text


def test_a_continuation_is_watched_and_saved(visitor: Visitor, lost: tuple[Path, Episode]) -> None:
    start(visitor, "frozen_lake-v1", seed="10003", success_rate="1.0")
    visitor.send("branch", policy="expert", count="4")
    assert f'<a href="{next(iter(lines_of(visitor)))}" aria-label="' in visitor.text  # an end of the tree
    link = next(link for link, (outcome, _) in lines_of(visitor).items() if outcome == "solved")
    visitor.get(link)
    pictures = re.findall(r'<img src="([^"]+)"', visitor.text)
    frames = [visitor.http.get(html.unescape(each)).content for each in pictures]
    assert len(frames) > 1 and len(set(frames)) == len(frames) and all(each[:4] == b"\x89PNG" for each in frames)
    before = len(list(read_episodes(lost[0] / "demonstrations"))) if (lost[0] / "demonstrations").exists() else 0
    assert visitor.send(f"{link}/save") == 200 and "Saved: " in visitor.text
    found = list(read_episodes(lost[0] / "demonstrations"))
    assert len(found) == before + 1
    (saved,) = [each for each in found if each.seed == 10003]
    assert saved.success and len(saved.turns) == len(frames) - 1
    assert visitor.get("/continuations/none/0") == 409 and "no longer kept" in visitor.text


def test_a_start_state_must_be_reached_by_its_seeds(visitor: Visitor) -> None:
    """A run could not reach a state of a continuation that has its own random state."""
    start(visitor, "frozen_lake-v1", seed="10004", success_rate="0.1", size="8")
    visitor.send("branch", policy="expert", count="8")
    turns, link = max((len(actions.split()), link) for link, (_, actions) in lines_of(visitor).items())
    visitor.get(link)
    assert visitor.send(f"{link}/open", turn=str(turns - 1)) == 200
    assert visitor.send("save", kind="starts") == 409 and "these actions and its seeds" in visitor.text


# --- which turn lost it? ----------------------------------------------------------------------------------------------


def test_a_job_has_an_address_and_is_kept(visitor: Visitor) -> None:
    visitor.get(EPISODE)
    assert visitor.send("/turns", policy="random", count="4") == 200
    job = visitor.path
    assert (
        "turns have been tried." in visitor.text or "No continuation" in visitor.text or "Success falls" in visitor.text
    )
    visitor.await_job()
    assert len(lines_of(visitor)) == 4 * (FATAL + 1)
    visitor.get(EPISODE)
    assert f'<a href="{job}">Tried 4 times by random actions</a>' in visitor.text
    assert visitor.get("/turns") == 200 and f'href="{job}"' in visitor.text and ">done<" in visitor.text
    assert visitor.get("/turns/none") == 409 and "no longer kept" in visitor.text


def test_a_job_fills_turn_by_turn_and_can_be_stopped(server: ServerProcess, lost: tuple[Path, Episode]) -> None:
    def answer(body: dict[str, object]) -> str:
        if len(body["messages"]) > 2:  # type: ignore[arg-type]  # after the first turn of the episode
            asked.set()
            over.wait(60)
        return "<think>down</think><answer>Down</answer>"

    asked, over = threading.Event(), threading.Event()
    with fake_openai(answer) as endpoint:
        words = ("--address", server.address, "--index", ":memory:", "--base-url", endpoint.base_url)
        models = ("--model", "tester", "--model", "other")
        with visiting(lost[0], *words, *models, page="/episodes?run=lake", shown='class="cards"') as visitor:
            visitor.get(EPISODE)
            offered = set(re.findall(r'<option value="endpoint-\d"[^>]*>([^<]+)<', visitor.text))
            assert {"tester at the endpoint", "other at the endpoint"} <= offered
            visitor.send("/turns", policy="endpoint-1", count="4")
            wait_until(asked.is_set)
            visitor.get(visitor.path)
            assert f"of {FATAL + 1} turns have been tried." in visitor.text and "<progress" in visitor.text
            assert visitor.send("stop") == 200
            visitor.await_job()
            assert "It was stopped." in visitor.text and "not tried" in visitor.text
            over.set()
    assert {body["model"] for body in endpoint.requests} == {"other"}


# --- who can play on --------------------------------------------------------------------------------------------------


def test_every_checkpoint_of_the_run_is_offered(visitor: Visitor, lost: tuple[Path, Episode]) -> None:
    folder = lost[0] / "lake" / "checkpoints"
    for step in (25, 50, 75):
        (folder / f"step-{step:08d}").mkdir()
    (folder / "best").write_text("step-00000050")
    (folder / "latest").write_text("step-00000075")
    visitor.get(EPISODE)
    visitor.send("/fork", turn="1")
    offered = dict(re.findall(r'<option value="(checkpoint-[^"]+)"[^>]*>([^<]+)<', visitor.text))
    assert [html.unescape(words) for words in offered.values()] == [
        "the run's best checkpoint, step 50",
        "the run's latest checkpoint, step 75",
        "the run's checkpoint of step 25",
    ]
    (folder / "step-00000025").rmdir()
    assert visitor.send("branch", policy="checkpoint-step-00000025", count="4") == 400
