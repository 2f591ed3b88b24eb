"""`starpod watch`: replay of recorded episodes in the terminal, turn by turn."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from starpod.report.console import safe_console
from starpod.serving.options import Number
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.data.files import EVALUATION, BadEpisodes, branching_groups, episode_files, named_episodes
from starpod.trainer.data.group import Group as EpisodeGroup
from starpod.trainer.data.group import siblings_of
from starpod.trainer.evaluation.folder import PLAN
from starpod.trainer.output.words import remarks
from starpod.v1.spelling import nearest

ENDS = {
    "terminal": "the task ended",
    "max_turns": "no turns left",
    "max_actions": "no actions left",
    "environment_limit": "the environment's limit was met",
    "context": "no room left in the context",
    "failed": "the infrastructure failed",
    "": "the policy had no further move",
}


@click.command(epilog="Example: starpod watch runs/lake --failed --speed 2")
@click.argument("path", metavar="EPISODES.jsonl|RUN_DIR", type=click.Path(path_type=Path))
@click.option(
    "--episode", "number", type=click.IntRange(1), show_default="all", help="Number of the episode to show, from 1."
)
@click.option(
    "--environment",
    "-e",
    metavar="NAME",
    show_default="all",
    help="Environment to show: its id, or its name in `environments` of the run.",
)
@click.option("--failed", "outcome", flag_value="failed", help="Show only episodes without success.")
@click.option("--solved", "outcome", flag_value="solved", help="Show only episodes with success.")
@click.option(
    "--trees",
    is_flag=True,
    help="Show where the episodes of a group branch and which of them succeeded, instead of turns.",
)
@click.option("--speed", type=Number(0), default=1.0, help="Turns per second on a terminal; 0: all at once.")
def watch(
    path: Path, number: int | None, environment: str | None, outcome: str | None, *, trees: bool, speed: float
) -> None:
    """Replay episodes: state, reasoning, action and reward of each turn.

    The episodes are those of a file (.jsonl or .jsonl.gz), of all models in a folder of `starpod eval --to`, or of
    a run. Of a run, those of the final or latest evaluation are shown, or with --trees the latest collected ones.
    Ctrl-C ends the replay.
    """
    try:
        files = episode_files(path)
    except BadEpisodes as error:
        raise click.UsageError(str(error)) from error
    if trees:
        _show_trees([file for file in files if path.is_file() or not file.name.startswith(EVALUATION)] or files)
        return
    try:
        if (path / PLAN).exists():
            source = path
        else:
            files = [file for file in files if file.name.startswith(EVALUATION)][-1:] or files[-1:]
            source = files[0]
        console = safe_console(highlight=False)
        pause = 1 / speed if speed and console.is_terminal else 0.0
        total = shown_count = 0
        mismatch = ""
        names: dict[str, None] = {}
        episodes = ((file, episode) for file in files for _, episode in named_episodes(file))
        for total, (file, episode) in enumerate(episodes, 1):
            names.update(dict.fromkeys(name for name in (episode.task, episode.environment) if name))
            if number not in (None, total):
                continue
            result = "solved" if episode.success else "failed"
            if environment not in (None, episode.task, episode.environment):
                mismatch = f"of {episode.kind}: leave --environment out"
            elif outcome not in (None, result):
                mismatch = f"{result}: leave --{outcome} out"
            else:
                shown_count += 1
                by_model = f" by {episode.model}" if episode.model else ""
                play(console, episode, f"Episode {total}{by_model} of {file.name}", pause)
    except BadEpisodes as error:
        raise click.ClickException(str(error)) from error
    if not total:
        raise click.ClickException(f"{source} holds no episode")
    if environment is not None and environment not in names:
        raise click.BadParameter(
            f"{source} holds no episode of {environment}{nearest(environment, list(names))}", param_hint="--environment"
        )
    if number is not None and number > total:
        raise click.BadParameter(f"{source} holds {total} episodes, not {number}", param_hint="--episode")
    if number is not None and not shown_count:
        raise click.UsageError(f"episode {number} of {source} is {mismatch} to see it")
    if not shown_count:
        criteria = " and of ".join(filter(None, [outcome, environment]))
        raise click.ClickException(f"none of the {total} episodes of {source} is {criteria}")


def _show_trees(files: Sequence[Path]) -> None:
    """Print the trees of the last file."""
    try:
        groups = branching_groups(files[-1])
    except BadEpisodes as error:
        raise click.ClickException(str(error)) from error
    if not groups:
        raise click.ClickException(f"no episode of {files[-1]} branches from another: collect.search finds such groups")
    console = safe_console(highlight=False)
    for group in groups:
        console.print(branches(group))


def branches(group: EpisodeGroup) -> Tree:
    """Return the members of a group as a tree, each below the member that it branches from."""
    members, states = {episode.member: episode for episode in group.members}, siblings_of(group.members)
    solved_count = sum(episode.success is True for episode in members.values())
    tree = Tree(Text(f"group {group.id}: {solved_count} of {len(members)} solved", "bold"))

    def add(below: Tree, episode: Episode) -> None:
        word, style = _outcome(episode)
        count = len(episode.turns)
        text = f"member {episode.member}: {word.lower()}, {count} turn{'s'[: count != 1]}, "
        branch = below.add(Text(f"{text}reward {episode.total_reward:+.4g}", style))
        for (parent, turn), children in states.items():
            if parent == episode.member:
                state = branch.add(Text(f"before turn {turn + 1}", "bright_black"))
                for child in children:
                    add(state, child)

    for episode in members.values():
        if episode.parent is None or episode.parent[0] not in members:
            add(tree, episode)
    return tree


def play(console: Console, episode: Episode, title: str, pause: float = 0.0) -> None:
    """Print an episode, with `pause` seconds between its parts."""
    for part in scenes(episode, title):
        console.print(part)
        if pause:
            time.sleep(pause)


def scenes(episode: Episode, title: str) -> Iterator[RenderableType]:
    """Yield the episode's heading, its turns and its end."""
    name = f"{episode.task} {episode.environment} {episode.version}".strip()
    yield Text.assemble(
        (title, "bold"), f": {name}, seed {episode.seed}, group {episode.group}, member {episode.member}"
    )
    if episode.parent is not None:
        member, shared_turns = episode.parent
        yield Text(f"A branch of member {member}: up to turn {shared_turns} their turns are the same.", "bright_black")
    total = 0.0
    for number, turn in enumerate(episode.turns, 1):
        total += turn.reward
        yield show_turn(turn, number, total)
    yield show_end(episode)


def show_turn(turn: Turn, number: int, total: float) -> RenderableType:
    """Render one turn. total: the sum of rewards up to and including this turn."""
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_column(style="bright_black", no_wrap=True)
    facts.add_column(overflow="fold")
    if turn.thought is not None:
        facts.add_row("thinks", _text(turn.thought, style="italic"))
    if turn.actions:
        facts.add_row("does", _text(" || ".join(turn.actions), style="bold"))
    if not turn.well_formed:
        facts.add_row("says", _text(turn.text or "(nothing)", style="yellow"))
    if problems := remarks(turn):
        facts.add_row("", Text("; ".join(problems), style="yellow"))
    facts.add_row("reward", _reward(turn, total))
    title = f"turn {number}" + f", {turn.agent_id}" * bool(turn.agent_id)
    state = Panel(_text(turn.observation), title=_text(title), title_align="left", padding=(0, 1), expand=False)
    return Group(state, facts)


def show_end(episode: Episode) -> RenderableType:
    word, style = _outcome(episode)
    count = len(episode.turns)
    line = f"{word}: {ENDS.get(episode.end, episode.end)} after {count} turn{'s'[: count != 1]}"
    line += f", total reward {episode.total_reward:+.4g}"
    parts: list[RenderableType] = []
    if episode.final_observation:
        end_text = _text(episode.final_observation)
        parts.append(Panel(end_text, title="at the end", title_align="left", padding=(0, 1), expand=False))
    parts.append(Text(line, style=style))
    if episode.error:
        parts.append(_text(episode.error, style="red"))
    return Group(*parts, Text())


def _outcome(episode: Episode) -> tuple[str, str]:
    """Return the outcome in words, and its style."""
    if episode.failed:
        return "Failed", "red"
    return {True: ("Solved", "green"), False: ("Not solved", "red"), None: ("Over", "bold")}[episode.success]


def _text(text: str, style: str = "") -> Text:
    """Return text of a model or environment without control characters, which could manipulate the terminal."""
    return Text("".join(letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in text), style)


def _reward(turn: Turn, total: float) -> Text:
    text = Text(f"{turn.reward:+.4g}", style="green" if turn.reward > 0 else "red" if turn.reward < 0 else "")
    parts = {name: value for name, value in turn.parts.items() if value}
    if len(parts) > 1 or (parts and "environment" not in parts):
        text.append(f" ({', '.join(f'{name} {value:+.4g}' for name, value in parts.items())})", style="bright_black")
    text.append(f"  total {total:+.4g}", style="bright_black")
    return text
