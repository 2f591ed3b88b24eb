"""Texts of environments and models: neither terminals nor browsers execute what is in them."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from starpod.report.console import safe_console, visible
from starpod.trainer.data.episode import ActionOutcome, Episode, Turn
from starpod.trainer.data.files import write_episodes
from starpod.trainer.output.report import write_report
from starpod.trainer.output.screen import PlainScreen
from tests.environments.webshop.site.test_site import Visitor, visit, visitor  # noqa: F401 - fixtures
from tests.hostile.conftest import OBEYED, VILLAIN, Target, starpod
from tests.hostile.villain import HARM
from tests.trainer.diagnostics.synthetic import write_run


@pytest.fixture(scope="module")
def access(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text(VILLAIN)
    return "--token-file", str(file)


def test_what_commands_show_of_an_environment(target: Target, access: tuple[str, ...]) -> None:
    address = target.server.address
    assert "Title" in starpod("describe", address, "shouting", *access)
    as_json = starpod("describe", address, "shouting", "--json", *access)
    assert json.loads(as_json)["title"] == f"Title {HARM}"  # the value is as it was
    typed = f"hint\nhelp\n{HARM}\ntool {{}}\n"
    shown = starpod("play", address, "shouting", "--seed", "1", *access, typed=typed)
    assert "Picture" in shown
    assert "[bold]b[/]" in shown  # markup neither
    assert "raised RuntimeError" in starpod("play", address, "shouting", *access, typed="raise\n", status=1)


@pytest.mark.parametrize("text", [HARM, "\x1b[2J", "a\x9bb", "\u202eevil", "\udc80"])
def test_a_console_obeys_rich_alone(text: str) -> None:
    file = io.StringIO()
    console = safe_console(file=file, force_terminal=True, color_system="standard", width=60)
    table = Table("a")
    table.add_row(Text(text))
    console.print(Panel(Text(text, style="red"), title="t"), table, text, markup=False)
    written = file.getvalue()
    assert "\x1b[31m" in written  # colours are rich's own
    rest = re.sub(r"\x1b\[[0-9;]*m", "", written)
    assert not OBEYED.search(rest)


def test_visible_keeps_what_is_text() -> None:
    text = "naïve 日本 \t\n 🙂 <b> [x]"
    assert visible(text) == text
    assert visible("\x1b\x07\x7f") == "␛␇␡"


def hostile_turn() -> Turn:
    turn = Turn(observation=f"Observation {HARM}", fresh=True, text=f"<raw> {HARM}", actions=[f"act {HARM}"])
    turn.thought = f"Thought {HARM}"
    turn.outcomes = [ActionOutcome(True, True, True)]
    return turn


def test_what_watch_shows_of_an_episode(tmp_path: Path) -> None:
    episode = Episode(0, 0, f"name {HARM}", turns=[hostile_turn()], end="terminal", final_observation=HARM)
    failed = Episode(1, 0, "e-v1", turns=[hostile_turn()], end="failed", error=f"error {HARM}")
    write_episodes(tmp_path / "episodes.jsonl", [episode, failed])
    shown = starpod("watch", str(tmp_path / "episodes.jsonl"))
    assert "Thought" in shown
    assert "[bold]b[/]" in shown


def test_what_a_log_shows_of_a_run() -> None:
    file = io.StringIO()
    screen = PlainScreen(file)
    screen.start(f"title {HARM}", {"environments": HARM})
    screen.warn(f"warning {HARM}")
    screen.done({"best": HARM})
    assert not OBEYED.search(file.getvalue())


class Tags(HTMLParser):
    """Every tag and attribute that a browser would see."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.handlers: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.handlers += [value for _, value in attrs if value and value.strip().lower().startswith("javascript:")]


MARKUP = (
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "</style><svg onload=alert(1)>",
    '"><img src=x onerror=alert(1)>',
    "'><iframe src=javascript:alert(1)>",
    "<!--<script>",
    "]]><a href=javascript:alert(1)>x</a>",
    "{{ 7 * 7 }}${7 * 7}",
    "\u2028</title><base href=//evil>",
)


ACTIVE = ("script", "iframe", "base", "object", "embed", "form", "style", "link", "meta")
"""Tags of which a page has its own number and no more."""


@pytest.mark.minutes
def test_what_a_report_shows_of_a_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path, steps=3)
    file = folder.episodes.files()[-1]
    text = file.read_text()
    assert "the goal" in text
    own = Tags(write_report(folder.path).read_text())
    file.write_text(text.replace("the goal", json.dumps(" ".join(MARKUP))[1:-1]))
    page = Tags(write_report(folder.path).read_text())
    assert (own.tags.count("script"), own.tags.count("form")) == (3, 2)
    assert [page.tags.count(tag) for tag in ACTIVE] == [own.tags.count(tag) for tag in ACTIVE]
    assert not page.handlers


async def test_what_the_shops_site_shows_of_what_was_typed(visitor: Visitor) -> None:  # noqa: F811
    """The active tags of any search, and no handler more, on the page and on the trail of it."""

    async def searched(words: str) -> list[object]:
        await visitor.start(seed="7")
        page = Tags((await visitor.search(words)).text)
        trail = Tags((await visitor.get(f"{visitor.url}watch")).text)
        return [[p.tags.count(tag) for tag in ACTIVE if tag != "form"] + p.handlers for p in (page, trail)]

    plain = await searched("zzzz")
    for markup in MARKUP:
        assert await searched(markup) == plain, markup
