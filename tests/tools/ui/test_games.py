"""Live sessions of the site, on a real server: played, taken back, forked from an episode, continued by others."""

import asyncio
import html
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from click.testing import CliRunner

from starpod.cli.main import starpod
from starpod.cli.new import fill
from starpod.client import Limits, OutOfOrder, SyncFleet, SyncSession, Want
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.files import read_episodes
from starpod.trainer.output.in_play import telling
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.output.screen import Screen
from starpod.trainer.rollout.saved_starts import read_starts
from starpod.trainer.warm_start.config import WarmStartConfig
from starpod.trainer.warm_start.demonstrations import of_episodes
from starpod.trainer.warm_start.files import read_contents
from tests.fake_openai import fake_openai
from tests.support import ServerProcess, start_server
from tests.tools.ui.conftest import site_over, wait_until
from tests.trainer.configuration.test_environment_file import VALUES
from tests.trainer.turns import a_turn

FATAL = 2
"""The turn of the recorded episode that falls into a hole, counted from 0."""


@dataclass
class Visitor:
    """A browser without a script."""

    http: httpx.Client
    text: str = ""
    path: str = ""

    def take(self, reply: httpx.Response) -> int:
        self.text, self.path = reply.text, reply.url.path
        return reply.status_code

    def get(self, path: str) -> int:
        return self.take(self.http.get(path))

    def hidden(self, action: str) -> dict[str, str]:
        forms = re.findall(r"<form\b([^>]*)>(.*?)</form>", self.text, re.DOTALL)
        body = next(body for tag, body in forms if action in tag)
        return dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)">', body))

    def await_job(self) -> None:
        """Loads the page again until its job is over."""
        wait_until(lambda: self.get(self.path) == 200 and "data-poll" not in self.text)

    def send(self, what: str, /, fields: dict[str, str] | None = None, **given: str) -> int:
        path = self.path if what == "start" else what if what.startswith("/") else f"{self.path}/{what}"
        held = self.hidden(f'class="{what}"' if what == "start" else what) if fields is None else fields
        return self.take(self.http.post(path, data={**held, **given}))


def write_lake(folder: Path, **config: Any) -> RunFolder:
    """The folder of a run on ice that is not slippery, which has no episodes yet."""
    run = RunFolder.create(folder)
    environment = {"id": "frozen_lake-v1", "options": {"success_rate": 1.0}}
    run.config.write_text(yaml.safe_dump({"environment": environment, **config}))
    run.metrics.write_text('{"step": 1, "time": 1.0, "metrics": {"collect/success": 0.0}}\n')
    return run


@pytest.fixture(scope="module")
def lost(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Episode]:
    """A folder with a run, `lake`, and its one episode, which the expert would have solved, but for its last action."""
    folder = tmp_path_factory.mktemp("live")
    with SyncFleet(server.address) as fleet:  # what evaluations hold out cannot be saved
        episode = next(lost for seed in range(10_000, 10_100) if (lost := _lose(fleet, seed, {"success_rate": 1.0})))
    solved = replace(episode, group=1, success=True)
    write_lake(folder / "lake").episodes.write_rollouts(1, [episode, solved], max_bytes=2**20)
    return folder, episode


def _lose(fleet: SyncFleet, seed: int, options: dict[str, Any]) -> Episode | None:
    """FATAL turns by the expert and one into a hole, where there is one; None otherwise."""
    want = Want(expert_action=True)
    (session,) = fleet.open("frozen_lake-v1", seed=seed, options=options, want=want)
    episode = Episode.begin(session.session, 0)
    for _ in range(FATAL):
        if session.done or session.observation.expert_action is None:
            return None
        action = str(session.observation.expert_action)
        episode.turns.append(a_turn(observation=session.observation.text, actions=[action], text=action))
        episode.turns[-1].take(session.step(action))
    if session.done:
        return None
    for action in ("Left", "Down", "Right", "Up"):
        (copy,) = session.fork()
        transition = copy.step(action)
        if transition.terminated and not transition.success:
            episode.turns.append(a_turn(observation=session.observation.text, actions=[action], text=action))
            episode.turns[-1].take(transition)
            episode.take(transition)
            episode.final_observation = transition.observation.text
            return episode
    return None


@contextmanager
def visiting(runs: Path, *words: str, page: str, shown: str) -> Iterator[Visitor]:
    """A visitor of `starpod ui` over `runs`, called with these words, once the page shows the text."""
    with site_over(runs, *words, page=page, shown=shown) as http:
        yield Visitor(http)


@pytest.fixture(scope="module")
def live(server: ServerProcess, lost: tuple[Path, Episode]) -> Iterator[httpx.Client]:
    """A client of a site over the lost episode, with a server."""
    words = ("--address", server.address)
    with site_over(lost[0], *words, page="/episodes?run=lake", shown="2 episodes<") as http:
        yield http


@pytest.fixture
def visitor(live: httpx.Client) -> Visitor:
    return Visitor(live)


EPISODE = "/episode?run=lake&file=train-000001.jsonl.gz&group=0&member=0"


def start(visitor: Visitor, environment: str, *, seed: str = "3", **options: str) -> None:
    assert visitor.get(f"/play/{environment}") == 200
    fields = dict(re.findall(r'<input name="(option-[^"]+)" value="([^"]*)"', visitor.text))
    fields |= {f"option-{name}": value for name, value in options.items()}
    assert visitor.send("start", seed=seed, **fields) == 200
    assert "/play/session/" in visitor.path


def hint(visitor: Visitor) -> str | None:
    """Return the expert's action, or None if it has none."""
    visitor.get(f"{visitor.path}?hint=1")
    return next(iter(re.findall(r"The expert would play <b>(\w+)</b>", visitor.text)), None)


def solve_by_hints(visitor: Visitor) -> None:
    while action := hint(visitor):
        visitor.send("act", action=action)
    assert "Solved." in visitor.text


def test_servers_and_environments(visitor: Visitor, server: ServerProcess) -> None:
    assert visitor.get("/fleet") == 200
    assert server.address in visitor.text and "ready" in visitor.text and 'href="/play/sokoban-v1"' in visitor.text
    assert re.search(r'data-label="Lease">10:00', visitor.text)
    assert re.search(r'data-label="Round trip">[\d.]+ m?s<', visitor.text)
    start(visitor, "sokoban-v1")
    visitor.send("act", action="Up")
    visitor.get("/fleet")
    assert re.search(r'data-label="Steps of this site">[\d.]+ m?s<span class="sub">99 of 100 within', visitor.text)
    assert 'data-poll="5000"' in visitor.text and "recovered after a loss: 0 of this site." in visitor.text


def test_sessions_of_a_run_are_watched_while_it_trains(
    visitor: Visitor, lost: tuple[Path, Episode], others: SyncSession
) -> None:
    """This test plays the role of the run: it holds the lock, and reports open sessions."""
    folder = RunFolder.create(lost[0] / "trains")
    folder.config.write_text(yaml.safe_dump({"environment": {"id": "sokoban-v1"}}))
    folder.metrics.write_text('{"step": 1, "time": 1.0, "metrics": {"collect/recoveries": 3.0}}\n')
    page, screen = "/sessions?run=trains", Screen()
    screen.phase("imitation 20/80")
    with folder.lock():
        wait_until(lambda: visitor.get(page) == 200 and "has not reported its servers yet" in visitor.text)
        assert folder.watch_mark.exists()

        async def tell() -> None:
            async with telling(folder, [others.fleet.fleet], screen):
                await asyncio.to_thread(wait_until, lambda: visitor.get(page) == 200 and "/watch?" in visitor.text)
                assert '<td class="n" data-label="Seed">3</td>' in visitor.text
                link = html.unescape(re.findall(r'href="(/watch[^"]+)"', visitor.text)[0])
                assert visitor.get(link) == 200 and "turn <b>0</b>" in visitor.text and page in visitor.text
                assert visitor.get("/runs/trains") == 200 and "<span>imitation 20/80</span>" in visitor.text
                visitor.get("/fleet")
                assert '3 of the run <a href="/runs/trains">' in visitor.text and f'href="{page}"' in visitor.text

        async def update() -> None:
            async with telling(folder, [others.fleet.fleet], screen):
                why = "No session is open: an update is running."
                await asyncio.to_thread(wait_until, lambda: visitor.get(page) == 200 and why in visitor.text)

        others.fleet.run(tell())
        others.close()
        screen.phase("updating")
        others.fleet.run(update())
    wait_until(lambda: visitor.get(page) == 200 and "is not training" in visitor.text)


@pytest.fixture
def others(server: ServerProcess) -> Iterator[SyncSession]:
    """A session of somebody else."""
    with SyncFleet(server.address) as fleet:
        (session,) = fleet.open("sokoban-v1", seed=3, options={"boxes": 1})
        yield session


def test_a_session_of_somebody_else_is_watched_and_copied(visitor: Visitor, others: SyncSession) -> None:
    others.step("Up")
    assert visitor.get(f"/watch?session={others.id}") == 200
    assert "sokoban-v1" in visitor.text and "turn <b>1</b>" in visitor.text and "base64," in visitor.text
    assert others.observation.text.splitlines()[-1] in visitor.text
    assert visitor.send("/watch/copy") == 200 and "/play/session/" in visitor.path
    visitor.send("act", action="Down")
    assert "turn <b>1</b>" in visitor.text and 'value="starts"' not in visitor.text
    assert 'id="python"' not in visitor.text  # what was played before is not known
    others.step("Up")  # its owner sees nothing of the copy
    assert visitor.get("/watch?session=none") == 409 and "None of the servers has this session" in visitor.text


def test_a_session_of_somebody_else_is_taken_over(visitor: Visitor, others: SyncSession) -> None:
    visitor.get(f"/watch?session={others.id}")
    page = visitor.path, visitor.text
    assert visitor.send("/watch/act", action="Down") == 200 and "turn <b>1</b>" in visitor.text
    visitor.path, visitor.text = page
    assert visitor.send("/watch/act", action="Left") == 200 and "had changed" in visitor.text
    assert "turn <b>1</b>" in visitor.text
    with pytest.raises(OutOfOrder):
        others.step("Up")
    (over,) = others.fleet.open("sokoban-v1", seed=3, options={"boxes": 1}, limits=Limits(max_turns=1))
    over.step("Up")
    visitor.get(f"/watch?session={over.id}")
    assert visitor.send("/watch/act", action="Up") == 200 and "The episode is over." in visitor.text


def test_a_game_is_played_and_taken_back(visitor: Visitor) -> None:
    start(visitor, "frozen_lake-v1", success_rate="1.0")
    assert "data:image/png;base64," in visitor.text and 'data-key="ArrowUp"' in visitor.text
    first = re.findall(r"base64,([^\"]+)", visitor.text)[0]
    expert = hint(visitor)
    assert expert and visitor.send("act", action=expert) == 200
    assert "turn <b>1</b>" in visitor.text and re.findall(r"base64,([^\"]+)", visitor.text)[0] != first
    assert f"[&#39;{expert}&#39;]" in visitor.text  # as Python
    assert visitor.send("undo") == 200
    assert "turn <b>0</b>" in visitor.text and re.findall(r"base64,([^\"]+)", visitor.text)[0] == first


def test_a_turns_problem_is_shown_next_to_the_moves_and_a_finished_game_leads_to_another(
    visitor: Visitor,
) -> None:
    start(visitor, "bandit-v1")
    visitor.send("act", action="Fly")
    assert '<p class="warned">Fly: invalid</p>' in visitor.text
    start(visitor, "frozen_lake-v1", seed="10000", success_rate="1.0")
    assert visitor.send("act", action="Fly") == 409 and "There is no action" in visitor.text
    assert "New episode" not in visitor.text
    visitor.get(visitor.path)
    solve_by_hints(visitor)
    first = visitor.path
    assert visitor.send("again") == 200 and visitor.path != first
    assert "turn <b>0</b>" in visitor.text and "&#39;success_rate&#39;: 1.0" in visitor.text  # with the same options


def program_of(visitor: Visitor) -> str:
    return html.unescape(re.findall(r'id="python">(.*?)</pre>', visitor.text, re.DOTALL)[0])


def seen_by(visitor: Visitor) -> str:
    return html.unescape(re.findall(r'aria-label="What the agent sees"[^>]*>(.*?)</pre>', visitor.text, re.DOTALL)[0])


def run_program(program: str) -> list[tuple[str, float]]:
    """Return what the program prints after each turn."""
    printed: list[Any] = []
    exec(program, {"print": lambda *values: printed.append(values)})
    return printed[1:]


def test_the_program_plays_the_same(visitor: Visitor) -> None:
    """Beyond the environment's own limit of turns, too; calls of tools as calls."""
    start(visitor, "frozen_lake-v1", success_rate="1.0")
    for _ in range(7):
        visitor.send("act", action="Up")
    program = program_of(visitor)
    assert "limits=Limits(0, " in program and "version='==" in program
    printed = run_program(program)
    assert len(printed) == 7 and printed[-1][0].strip() == seen_by(visitor).strip()
    start(visitor, "desk-v1")
    visitor.send("act", tool="list_files")
    assert "ToolCall(name='list_files'" in program_of(visitor)
    assert run_program(program_of(visitor))[-1][0].strip() == seen_by(visitor).strip()


def test_a_game_is_forked(visitor: Visitor) -> None:
    """Both continue independently with the same random state, and earlier turns can be undone in the copy."""
    start(visitor, "frozen_lake-v1", success_rate="0.5")
    visitor.send("act", action="Up")
    original = visitor.path
    assert visitor.send("fork") == 200 and visitor.path != original and "turn <b>1</b>" in visitor.text
    visitor.send("act", action="Down")
    seen, program = seen_by(visitor), program_of(visitor)
    assert run_program(program)[-1][0].strip() == seen.strip()
    visitor.send("undo")
    visitor.send("undo")
    assert "turn <b>0</b>" in visitor.text
    visitor.get(original)
    assert "turn <b>1</b>" in visitor.text
    visitor.send("act", action="Down")
    assert seen_by(visitor) == seen


def test_a_form_of_another_turn_does_nothing(visitor: Visitor) -> None:
    start(visitor, "sokoban-v1")
    form = visitor.hidden("/act")
    visitor.send("act", action="Up")
    visitor.send("act", form, action="Up")
    assert "turn <b>1</b>" in visitor.text and "had changed" in visitor.text


def test_forms_of_other_sites_are_refused(visitor: Visitor) -> None:
    start(visitor, "sokoban-v1")
    form = visitor.hidden("/act")
    assert visitor.http.post(f"{visitor.path}/act", data={**form, "csrf": "0" * 64, "action": "Up"}).status_code == 403
    evil = {"origin": "http://evil.example"}
    assert visitor.http.post(f"{visitor.path}/act", data={**form, "action": "Up"}, headers=evil).status_code == 403
    visitor.get(visitor.path)
    assert "turn <b>0</b>" in visitor.text


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"seed": "x", "option-boxes": "2"}, "The seed is a whole number"),
        ({"option-boxes": "many"}, "boxes"),
        ({"option-boxes": "1000"}, "less than or equal to 8"),
    ],
)
def test_a_form_that_is_wrong_is_reported_and_keeps_what_was_typed(
    visitor: Visitor, fields: dict[str, str], told: str
) -> None:
    visitor.get("/play/sokoban-v1")
    assert visitor.send("start", **fields) == 400 and told in visitor.text
    assert all(f'name="{name}" value="{value}"' in visitor.text for name, value in fields.items())


def test_a_tool_is_called_by_a_form_of_its_arguments(visitor: Visitor) -> None:
    start(visitor, "desk-v1")
    assert visitor.send("act", tool="read_file", **{"option-name": "x||y"}) == 200
    assert "turn <b>1</b>" in visitor.text and "read_file {&#34;name&#34;: &#34;x||y&#34;}" in visitor.text
    assert visitor.send("act", tool="delete_event", **{"option-id": "one"}) == 409
    assert "not a whole number" in visitor.text and "turn <b>1</b>" in visitor.text
    assert visitor.get(visitor.path) == 200 and not visitor.path.endswith("/act")  # loaded again
    assert visitor.send("act", tool="no_tool") == 409 and "no tool" in visitor.text


def test_an_action_of_several_lines(visitor: Visitor) -> None:
    """A form's field sends lines that end as on Windows."""
    start(visitor, "coding-v1")
    visitor.send("act", action="def chunks(items):\r\n    return items")
    assert '<span class="action">def chunks(items):\n    return items</span>' in visitor.text


def test_a_site_starts_the_server_that_its_pages_need(lost: tuple[Path, Episode], tmp_path: Path) -> None:
    (tmp_path / "vault.py").write_text(fill("environment", VALUES, options=False, expert=False))
    words = ("--serve", "frozen_lake", "--serve", str(tmp_path / "vault.py"))
    with visiting(lost[0], *words, page="/episodes?run=lake", shown="2 episodes<") as visitor:
        assert visitor.get("/fleet") == 200 and 'href="/play/vault-v1"' in visitor.text
        visitor.get(EPISODE)
        assert visitor.send("/fork", turn="1") == 200 and "forked from this episode" in visitor.text


def test_play_in_the_browser_from_the_terminal(server: ServerProcess) -> None:
    """`starpod play --web` fills in the form, and ends with Ctrl-C."""
    words = ["play", server.address, "frozen_lake", "--web", "--seed", "3"]
    words += ["--option", "success_rate=0.5", "--option", "observation=local"]
    command = [sys.executable, "-m", "starpod.cli.main", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        page = process.stdout.readline().split()[-1]
        shown = httpx.get(page, timeout=60.0).text
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
    assert "/play/frozen_lake-v1?" in page and 'name="seed" value="3"' in shown
    assert 'name="option-success_rate" value="0.5"' in shown and '<option value="local" selected>' in shown
    done = CliRunner().invoke(starpod, [*words, "--option", 'map=["SG"]'])
    assert done.exit_code == 2 and "no field for map" in done.output


def test_an_ended_session_is_a_sentence(visitor: Visitor) -> None:
    start(visitor, "sokoban-v1")
    path = visitor.path
    assert visitor.send("close") == 200 and visitor.path == "/fleet"
    assert visitor.get(path) == 409 and "has ended" in visitor.text
    assert visitor.get("/play/nothing-v1") == 409 and "does not host nothing-v1" in visitor.text


def test_continuations_of_a_game(visitor: Visitor) -> None:
    start(visitor, "frozen_lake-v1", success_rate="1.0")
    assert visitor.send("branch", policy="expert", count="4") == 200
    assert "<b>100 %</b> solved" in visitor.text and "4 of 4" in visitor.text and "turn <b>0</b>" in visitor.text
    assert visitor.send("branch", policy="random", count="32") == 200
    played = re.findall(r'data-label="Actions">([^<]*)<', visitor.text)
    assert len(set(played)) > 8  # each has its own random state
    assert visitor.send("branch", policy="nobody", count="4") == 400


def test_a_policy_continues_in_the_session_itself(visitor: Visitor) -> None:
    start(visitor, "frozen_lake-v1", success_rate="1.0")
    assert visitor.send("branch", policy="expert", count="1") == 200 and "Solved." in visitor.text
    played = visitor.text.count("<td>the environment&#39;s expert</td>")
    assert played > 1 and f"turn <b>{played}</b>" in visitor.text
    assert visitor.send("undo") == 200 and f"turn <b>{played - 1}</b>" in visitor.text
    assert visitor.send("branch", policy="expert", count="1") == 200 and "Solved." in visitor.text


def test_fork_here(visitor: Visitor, lost: tuple[Path, Episode]) -> None:
    episode = lost[1]
    assert visitor.get(EPISODE) == 200
    assert visitor.send("/fork", turn=str(FATAL)) == 200
    assert f"turn <b>{FATAL}</b>" in visitor.text and "forked from this episode" in visitor.text
    assert episode.turns[FATAL].observation.splitlines()[0] in visitor.text
    assert hint(visitor) not in (None, episode.turns[FATAL].actions[0])
    solve_by_hints(visitor)


def test_which_turn_lost_it(visitor: Visitor) -> None:
    visitor.get(EPISODE)
    assert visitor.send("/turns", policy="expert", count="8") == 200 and "/turns/" in visitor.path
    visitor.await_job()
    shares = re.findall(r'aria-label="Success before turn \d+">([\d.]+)<', visitor.text)
    assert shares == ["1.0"] * (FATAL + 1)
    assert f"Success falls most at turn {FATAL + 1}" in visitor.text and "do not overlap" in visitor.text
    visitor.get(EPISODE.replace("group=0", "group=1"))
    assert "Fork here" in visitor.text and "Which turn lost it?" not in visitor.text, "it was solved"


def test_an_episode_that_the_server_does_not_repeat(visitor: Visitor, lost: tuple[Path, Episode]) -> None:
    folder, episode = RunFolder(lost[0] / "lake"), Episode.from_json(lost[1].to_json())
    episode.turns[1].observation = "another lake"
    folder.episodes.write_rollouts(2, [episode], max_bytes=2**20)
    path = EPISODE.replace("000001", "000002")
    wait_until(lambda: visitor.get(path) == 200)
    assert visitor.send("/fork", turn="2") == 409 and "at step 1: another observation" in visitor.text


def test_a_server_that_is_away_is_a_sentence(lost: tuple[Path, Episode]) -> None:
    with visiting(lost[0], "--address", "127.0.0.1:1", page="/", shown="lake") as visitor:
        assert visitor.get("/fleet") == 503 and "Traceback" not in visitor.text
        assert "no server answers at 127.0.0.1:1: connection refused" in visitor.text
        assert visitor.get("/") == 200


def test_a_server_that_goes_away_is_a_sentence(lost: tuple[Path, Episode]) -> None:
    page = "/play/bandit-v1"
    with (
        start_server("bandit") as server,
        visiting(lost[0], "--address", server.address, page=page, shown="bandit-v1") as visitor,
    ):
        server.kill()
        wait_until(lambda: visitor.get(page) == 503)
        assert f"No server at {server.address}" in visitor.text
        refused = f"no server answers at {server.address}: connection refused"
        wait_until(lambda: visitor.get("/fleet") and refused in visitor.text)


def test_what_was_found_is_saved_for_runs(visitor: Visitor, lost: tuple[Path, Episode]) -> None:
    """The game is saved as a demonstration, and as a start state that a run can reach again."""
    visitor.get(EPISODE)
    visitor.send("/fork", turn="1")
    assert visitor.send("save", kind="starts") == 200 and "environment.starts=" in visitor.text
    (start,) = read_starts(str(lost[0] / "starts" / "frozen_lake-v1.jsonl"), "frozen_lake-v1")
    assert list(start.actions) == lost[1].turns[0].actions and start.observation == lost[1].turns[1].observation
    assert start.seed == lost[1].seed and start.options == {"success_rate": 1.0}
    solve_by_hints(visitor)
    assert 'value="starts"' not in visitor.text  # the episode is over
    form = visitor.hidden("/save")
    assert visitor.send("save", form, kind="starts") == 409 and "A start state needs" in visitor.text
    visitor.get(visitor.path.removesuffix("/save"))
    for count in (1, 2):
        assert visitor.send("save", kind="demonstrations") == 200 and f"Saved: {count} in" in visitor.text
    found = list(read_episodes(lost[0] / "demonstrations"))
    assert [each.success for each in found] == [True, True] and [each.group for each in found] == [0, 1]
    assert found[0].turns[0].actions == lost[1].turns[0].actions and len(found[0].turns) > 1
    config = WarmStartConfig(steps=1, demonstrations=str(lost[0] / "demonstrations"))
    demonstrations = of_episodes(read_contents(config, "frozen_lake-v1").episodes, Limits())
    assert all(all(each.imitate) for each in demonstrations)


def test_a_folder_that_cannot_be_written_is_a_sentence(visitor: Visitor, lost: tuple[Path, Episode]) -> None:
    start(visitor, "bandit-v1", seed="10000")
    visitor.send("act", action=re.findall(r'name="action" value="(\w+)"', visitor.text)[0])
    (lost[0] / "demonstrations" / "bandit-v1.jsonl").mkdir(parents=True)
    assert visitor.send("save", kind="demonstrations") == 409 and "cannot be written" in visitor.text


def test_an_endpoint_plays_on_and_is_told_the_turns_before(server: ServerProcess, lost: tuple[Path, Episode]) -> None:
    def answer(body: dict[str, Any]) -> str:
        return "<think>down</think><answer>Down</answer>" if len(body["messages"]) % 4 else "I pass"

    with fake_openai(answer) as endpoint:
        words = ("--address", server.address, "--base-url", endpoint.base_url, "--model", "tester")
        page, shown = "/episodes?run=lake", 'class="cards"'
        with visiting(lost[0], *words, "--index", ":memory:", page=page, shown=shown) as visitor:
            visitor.get(EPISODE)
            visitor.send("/fork", turn=str(FATAL))
            assert visitor.send("branch", policy="endpoint-0", count="4") == 200, visitor.text
            assert f"solved by tester at the endpoint after turn {FATAL}" in visitor.text
            assert visitor.send("branch", policy="endpoint-0", count="1") == 200, visitor.text
            assert "<td>tester at the endpoint</td>" in visitor.text
    first = next(body["messages"] for body in endpoint.requests if len(body["messages"]) == 2 + 2 * FATAL)
    assert [each["role"] for each in first] == ["system", *["user", "assistant"] * FATAL, "user"]
    told = [each["content"] for each in first if each["role"] == "assistant"]
    assert len(told) == FATAL
    assert all(f"<answer>{turn.actions[0]}</answer>" in text for turn, text in zip(lost[1].turns, told, strict=False))


def checkpoint(page: str, words: str = "the run&#39;s best") -> str:
    """Return the policy of the page's form that has this label."""
    return next(name for name, told in re.findall(r'<option value="([^"]+)"[^>]*>([^<]+)<', page) if words in told)


@pytest.mark.minutes
def test_the_checkpoint_of_the_run_continues(server: ServerProcess, tmp_path: Path) -> None:
    """The checkpoint plays on copies, in the session itself, and after a person's turn. Jobs: e2e/test_live.py."""
    words = ["frozen_lake", "--run-dir", str(tmp_path / "lake"), "warm_start.steps=60", "stop.iterations=1"]
    words += ["collect.groups=8", "evaluation.episodes=2", "evaluation.reference=[]", "warm_start.episodes=60"]
    done = CliRunner().invoke(starpod, ["train", *words])
    assert done.exit_code == 0, done.output
    made = read_episodes(tmp_path / "lake" / "episodes" / "train-000001.jsonl.gz")
    long = next(each for each in made if len(each.turns) > 3 and all(turn.actions for turn in each.turns[:3]))
    shown = f"/episode?run=lake&file=train-000001.jsonl.gz&group={long.group}&member={long.member}"
    words = ("--address", server.address)
    with visiting(tmp_path, *words, page=shown, shown='action="/fork"') as visitor:
        visitor.get(shown)
        assert visitor.send("/fork", turn="1") == 200
        for after in (1, 2):
            assert visitor.send("branch", policy=checkpoint(visitor.text), count="4") == 200, visitor.text
            assert re.search(rf"solved by the run&#39;s best[^<]* after turn {after}", visitor.text)
            visitor.send("act", action=long.turns[after].actions[0])  # one that the episode outlived
        assert visitor.send("branch", policy=checkpoint(visitor.text), count="1") == 200, visitor.text
        assert "<td>the run&#39;s best" in visitor.text
        assert visitor.send("save", kind="demonstrations") == 200, visitor.text
    (found,) = read_episodes(tmp_path / "demonstrations")
    assert found.turns[0].reply and not found.turns[1].reply  # the model's and the person's
