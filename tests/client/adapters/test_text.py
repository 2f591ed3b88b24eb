"""Code that all adapters share: reading replies, rows of a data set, fleets, and the score of an episode."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from starpod.client.adapters.text import MOST_ACTIONS, Reader, Setting, TextEpisode, break_tokens, converse
from starpod.client.errors import EnvironmentBug, StarpodError
from tests.client.adapters.sessions import live_sessions
from tests.client.fake_server import FakeServer
from tests.client.test_fleet import give_patience
from tests.support import ROOT, ServerProcess


@pytest.mark.parametrize(
    ("reader", "reply", "actions"),
    [
        (Reader(), "<answer>Up</answer>", ["Up"]),
        (Reader(), "I write <answer>x</answer>. <answer> Up ||  || Left </answer> Done.", ["Up", "Left"]),
        (Reader(), '<answer>say {"a": "x || y"} || Up</answer>', ['say {"a": "x || y"}', "Up"]),
        (Reader(), "Up", []),
        (Reader(), "<answer>Up", []),
        (Reader(), "</answer>Up<answer>", []),
        (Reader(), "<answer> || </answer>", []),
        (Reader(tag="move", separator=None), "<move>Up || Left</move>", ["Up || Left"]),
        (Reader(tag=None), " Up || Left\n", ["Up", "Left"]),
        (Reader(tag=None, separator=None), " 1 + 2 ", ["1 + 2"]),
        (Reader(tag=None), "\ud800", ["?"]),
    ],
)
def test_read(reader: Reader, reply: str, actions: list[str]) -> None:
    assert reader.read(reply) == actions


@given(reply=st.text() | st.lists(st.sampled_from(["<answer>", "</answer>", "||", "a", " "])).map("".join))
def test_any_reply_can_be_read(reply: str) -> None:
    actions = Reader().read(reply)
    assert len(actions) <= MOST_ACTIONS
    for action in actions:
        assert isinstance(action, str) and action == action.strip() != ""
        action.encode()
    assert bool(actions) <= ("<answer>" in reply)


def test_a_reply_without_end_is_cut() -> None:
    assert len(Reader(tag=None).read("Up||" * 10_000)) == MOST_ACTIONS


@pytest.mark.parametrize("reader", [Reader(), Reader(tag="move", separator=";"), Reader(separator=None)])
@pytest.mark.parametrize("most", [0, 1, 5])
def test_what_is_asked_for_is_what_is_read(reader: Reader, most: int) -> None:
    form = reader.ask(most).partition("in this form: ")[2]
    several = reader.separator is not None and most != 1
    assert reader.read(form) == ["action"] * (2 if several else 1)


def test_rows() -> None:
    setting = Setting("a:1", "walk-v1", options={"start": 1, "kept": True})
    opening = setting.opening({"seed": 7, "options": {"start": 2, "kept": None}, "prompt": "ignored"})
    assert opening["seed"] == 7 and "dynamics_seed" not in opening
    assert opening["options"] == {"start": 2, "kept": True}
    assert setting.opening({"seed": "8", "dynamics_seed": 0, "options": '{"start": 3}'})["options"]["start"] == 3
    assert setting.opening({"seed": 0, "dynamics_seed": 0})["dynamics_seed"] == 0
    with pytest.raises(ValueError, match="every row of the data set a `seed`"):
        setting.opening({"prompt": "x"})


def test_special_tokens_in_a_text_are_broken() -> None:
    tokens = {0: AddedToken("<s>", special=True), 1: AddedToken("<s>>", special=True), 2: AddedToken("<b>")}
    tokenizer = SimpleNamespace(added_tokens_decoder=tokens)
    for holder in (tokenizer, SimpleNamespace(tokenizer=tokenizer)):
        assert break_tokens("a<s>b <s>><s><b>", holder) == "a<\u2060s>b <\u2060s>><\u2060s><b>"
    assert break_tokens("a<s>", SimpleNamespace(added_tokens_decoder={})) == "a<s>"


def test_converse() -> None:
    user = {"role": "user", "content": "Play."}
    assert converse([user], "Now.") == [{"role": "user", "content": "Play.\n\nNow."}]
    assert converse([{**user, "content": ""}], "Now.") == [{"role": "user", "content": "Now."}]
    blocks = [{"type": "text", "text": "Play."}]
    assert converse([{**user, "content": blocks}], "Now.")[0]["content"] == [*blocks, {"type": "text", "text": "Now."}]
    system = {"role": "system", "content": "Be brief."}
    assert converse([system], "Now.") == [system, {"role": "user", "content": "Now."}]
    assert user["content"] == "Play.", "the data set's own message is left as it is"


async def play(setting: Setting, row: dict[str, Any], *replies: str) -> tuple[TextEpisode, list[str]]:
    episode = await setting.open(row)
    shown = [await setting.play(episode, reply) for reply in replies]
    await setting.close(episode)
    return episode, shown


async def test_an_episode_keeps_its_score(walk: Setting) -> None:
    report = "<answer>report || report</answer>"
    episode, shown = await play(
        walk, {"seed": 1}, report, "what?", "<answer>nonsense</answer>", "<answer>stop</answer>"
    )
    assert episode.rewards == [1.0, 0.0, 0.0, 1.0] and episode.reward == 2.0 and episode.done
    assert [text.startswith("Your reply held no valid action.") for text in shown] == [False, True, True, False]
    assert episode.metrics() == {
        "turns": 4.0,
        "misread_turns": 2.0,
        "truncated": 0.0,
        "success": 1.0,
        "reward/a": 0.5,
        "reward/b": 0.5,
    }
    assert "at " in episode.first and Reader().ask(0) in episode.first


async def test_a_group_shares_its_start_and_not_its_random_state(walk: Setting) -> None:
    moves = ["<answer>Right</answer>"] * 3
    played = await asyncio.gather(*(play(walk, {"seed": 5}, *moves) for _ in range(4)))
    assert len({episode.first for episode, _ in played}) == 1
    assert len({tuple(shown) for _, shown in played}) == 4
    fixed = await asyncio.gather(*(play(walk, {"seed": 5, "dynamics_seed": 9}, *moves) for _ in range(4)))
    assert len({tuple(shown) for _, shown in fixed}) == 1
    other, _ = await play(walk, {"seed": 6})
    assert other.first != played[0][0].first


async def test_a_failure_is_an_error_and_a_bad_action_is_not(walk: Setting) -> None:
    episode, _ = await play(walk, {"seed": 1}, "<answer>no such action</answer>")
    assert episode.reward == 0.0
    with pytest.raises(EnvironmentBug):
        await play(walk, {"seed": 1}, "<answer>bug</answer>")


async def test_a_server_that_is_gone_is_a_failure(fake: FakeServer) -> None:
    setting = Setting(fake.address, "walk-v1", fleet={"timeout": 1.0})
    shared = await asyncio.to_thread(setting.shared_fleet)  # which waits for the server in this thread
    episode = await setting.open({"seed": 1})
    give_patience(shared.fleet, 1.0)
    await fake.stop()
    with pytest.raises(StarpodError):
        await setting.play(episode, "<answer>any</answer>")
    assert episode.rewards == [] and not episode.done
    await setting.close(episode)
    with pytest.raises(StarpodError):
        await setting.open({"seed": 1})


def test_one_fleet_for_a_process_and_its_servers(walk: Setting, troubled: ServerProcess) -> None:
    same = Setting(troubled.address, "another-v1")
    assert same.shared_fleet() is walk.shared_fleet()
    assert Setting([troubled.address], "walk-v1", fleet={"patience": 5.0}).shared_fleet() is not walk.shared_fleet()


LEAVES = """
import sys
import starpod.client.fleet
from starpod.client.adapters.text import Setting
starpod.client.fleet.CLOSE_SECONDS = 60.0  # however slow this machine is
setting = Setting(sys.argv[1], "walk-v1")
episode = setting.shared_fleet().run(setting.open({"seed": 1}))
print(episode.session.address, flush=True)
"""


def test_a_process_that_ends_closes_what_it_left_open(walk: Setting, troubled: ServerProcess) -> None:
    before = live_sessions(walk)
    command = [sys.executable, "-c", LEAVES, troubled.address]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=True)
    assert ended.stdout.strip() == troubled.address and not ended.stderr
    assert live_sessions(walk) == before
