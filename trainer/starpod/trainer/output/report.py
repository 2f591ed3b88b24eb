"""The report of a run: report.html, one self-contained page."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from starpod.report import page as shared
from starpod.report.figures import signed
from starpod.report.page import tagged
from starpod.report.tree import Continuation, draw_tree
from starpod.trainer.data.episode import Episode, Group, Turn, siblings_of
from starpod.trainer.data.files import BadEpisodes, branching_groups, read_episodes
from starpod.trainer.output.files import write_atomic
from starpod.trainer.output.pictures import Shown, files_between, in_order, read_pictures, shown_files
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.output.sections import (
    agents,
    configuration,
    echo_trap,
    environments,
    evaluation,
    headline,
    information,
    learning,
    provenance,
    section,
    time_spent,
)

STYLE = (files(__package__) / "assets" / "report.css").read_text(encoding="utf-8")
SCRIPT = (files(__package__) / "assets" / "report.js").read_text(encoding="utf-8")


BETWEEN = 8 * 2**20
"""Maximum size in bytes of the episode files that are shown for evaluations between the first and the last."""
_SIZE = 132
"""Maximum side of a picture in pixels."""
_TREES = 3
"""Maximum number of groups whose branches are drawn."""


def page(title: str, body: str, *, script: str = "") -> str:
    """Return a whole HTML document in the style of the trainer's pages."""
    return shared.page(title, body, style=STYLE, script=script)


def write_report(run_dir: Path | str) -> Path:
    """Write the run's report.html and return its path. The run may be unfinished.

    Raises FileNotFoundError for a folder without metrics or evaluations.
    """
    folder = RunFolder(Path(run_dir))
    lines, evaluations, final_summary = folder.read_metrics(), folder.read_evaluations(), folder.read_final()
    if not lines and not evaluations:
        raise FileNotFoundError(f"{folder.path} has neither metrics nor evaluations: there is nothing to report")
    facts = folder.read_facts()
    title = facts.get("title") or folder.path.resolve().name
    sections = [
        headline(title, facts, lines, evaluations, final_summary, folder.best_step, _header(folder, facts)),
        evaluation(evaluations, lines),
        environments(lines, evaluations, final_summary),
        learning(lines),
        agents(lines),
        echo_trap(lines),
        information(lines),
        time_spent(lines),
        _branches(folder),
        _episodes(folder),
        configuration(facts),
        provenance(facts, lines),
    ]
    write_atomic(
        folder.report, page(f"{title} · Starpod", "\n".join(section for section in sections if section), script=SCRIPT)
    )
    return folder.report


def _header(folder: RunFolder, facts: Mapping[str, Any]) -> str:
    """Return the run's environment, model, algorithm, date and machine, one line each."""
    config, machine = folder.read_config(), facts.get("platform") or {}
    tasks = config.get("environments") or {"": config.get("environment") or {}}
    gpus = ", ".join(machine.get("gpus") or []) or "no GPU"
    start_time = facts.get("time")
    rows = {
        "Environment": ", ".join(str(environment.get("id", name)) for name, environment in tasks.items()),
        "Model": facts.get("model", ""),
        "Algorithm": (config.get("algorithm") or {}).get("preset", ""),
        "Date": time.strftime("%d %B %Y, %H:%M", time.localtime(start_time)) if start_time else "",
        "Machine": f"{machine['cores']} cores, {gpus}, {machine.get('system', '')}" if machine.get("cores") else "",
    }
    cells = "".join(f"<div><dt>{name}</dt><dd>{escape(str(text))}</dd></div>" for name, text in rows.items() if text)
    return f'<dl class="header">{cells}</dl>'


# --- episodes ---------------------------------------------------------------------------------------------------------


def _episodes(folder: RunFolder) -> str:
    """Return the kept episodes of evaluations, with a filter and some pictures.

    The first, last and final evaluations are shown in full, and others up to a size limit.
    """
    other_files, left_out = files_between(folder, BETWEEN)
    files = {path.name: label for label, path in (shown_files(folder) | other_files).items()}
    episodes = [*in_order(folder), *_episodes_of(other_files.values())]
    if not episodes:
        return ""
    pictures = _Pictures(read_pictures(folder.pictures))
    before = {
        (episode.kind, episode.seed): _id(place) for place, episode in episodes if files[place[0]] == "before training"
    }
    parts = []
    for number, (place, episode) in enumerate(episodes):
        label = files[place[0]]
        same_start = before.get((episode.kind, episode.seed)) if label == "after training" else None
        parts.append(_episode(place, episode, label, same_start, pictures.of(place), opened=number == 0))
    instructions = episodes[0][1].instructions
    if instructions:
        parts.append(
            '<details class="whole"><summary class="muted">What the policy was told</summary>'
            f'<pre class="mono whole">{tagged(instructions)}</pre></details>'
        )
    note = "All that were kept of the first, the last and the final evaluation"
    note += f", and of {len(other_files)} between" if other_files else ""
    note += f"; {left_out} more evaluations would make the page too large, and are in episodes/." if left_out else "."
    kinds = list(dict.fromkeys(episode.kind for _, episode in episodes))
    return section(
        "Episodes", note, pictures.shared() + _filter(list(dict.fromkeys(files.values())), kinds) + "".join(parts)
    )


def _episodes_of(files: Iterable[Path]) -> Iterator[tuple[Shown, Episode]]:
    """Yield the episodes of each file in turn. A damaged file is skipped."""
    for path in files:
        with suppress(BadEpisodes):
            for episode in read_episodes(path):
                yield (path.name, episode.group, episode.member), episode


def _branches(folder: RunFolder) -> str:
    """Return trees of some branched groups of the last collection. Groups with mixed outcomes come first."""
    files = folder.episode_files("train")
    if not files or folder.read_config().get("collect", {}).get("search", {}).get("strategy", "none") == "none":
        return ""
    try:
        groups = branching_groups(files[-1])
    except BadEpisodes:
        return ""
    groups.sort(key=lambda group: -len({episode.success is True for episode in group.members}))
    note = (
        f"Groups of episodes/{files[-1].name}. Turns that members share are drawn as one path; each path "
        "ends with its member's number."
    )
    return section("Branches", note, "".join(_tree(group, opened=group is groups[0]) for group in groups[:_TREES]))


def _tree(group: Group, *, opened: bool) -> str:
    members = [episode for episode in group.members if not episode.failed]
    label = f"group {group.id}, seed {members[0].seed}" if members else f"group {group.id}"
    continuations = [
        Continuation([" ".join(turn.actions) for turn in each.turns], each.total_reward, each.success, str(each.member))
        for each in members
    ]
    solved_count = sum(member.success is True for member in members)
    branches = "".join(
        f"<li>before turn {turn + 1} of member {parent}: {', '.join(str(member.member) for member in siblings)}</li>"
        for (parent, turn), siblings in siblings_of(members).items()
    )
    return (
        f'<details class="group"{" open" if opened else ""}><summary>{label} <span class="muted">· {solved_count} of '
        f'{len(members)} solved</span></summary><div class="scroll" tabindex="0" role="region" '
        f'aria-label="Tree of {label}">{draw_tree(continuations, label.capitalize())}</div>'
        f'<div class="muted">Branches</div><ul class="muted">{branches}</ul></details>'
    )


class _Pictures:
    """Frames of episodes. A picture that occurs several times is embedded in the page once."""

    def __init__(self, frames: Mapping[Shown, Sequence[bytes]]) -> None:
        self._frames = frames
        self._ids: dict[bytes, str] = {}
        for picture_frames in frames.values():
            for frame in picture_frames:
                self._ids.setdefault(frame, f"frame-{len(self._ids)}")

    def shared(self) -> str:
        """Return the SVG definitions of all pictures. `of` returns their ids."""
        definitions = "".join(
            f'<image id="{name}" width="{_SIZE}" height="{_SIZE}" '
            f'href="data:image/png;base64,{base64.b64encode(frame).decode()}"/>'
            for frame, name in self._ids.items()
        )
        return (
            f'<svg width="0" height="0" style="position: absolute" aria-hidden="true"><defs>{definitions}</defs></svg>'
            if definitions
            else ""
        )

    def of(self, place: Shown) -> list[str]:
        """Return the ids of an episode's pictures."""
        return [self._ids[frame] for frame in self._frames.get(place, ())]


def _filter(times: Sequence[str], kinds: Sequence[str]) -> str:
    """Return the form that filters episodes. It is hidden until the script shows it."""

    def choice(name: str, label: str, values: Sequence[str]) -> str:
        options = "".join(f"<option>{escape(value)}</option>" for value in values)
        any_option = f'<option value="">any {label.lower()}</option>'
        return f'<select name="{name}" aria-label="{label}">{any_option}{options}</select>'

    parts = [choice("when", "Time", times)] if len(times) > 1 else []
    parts += [choice("environment", "Environment", kinds)] if len(kinds) > 1 else []
    parts.append(choice("outcome", "Outcome", ["solved", "not solved", "failed", "over"]))
    words = '<input type="search" name="words" placeholder="words" aria-label="Words"> <output role="status"></output>'
    return f'<form class="filter" id="choose" hidden aria-label="Episodes">{"".join(parts)}{words}</form>'


def _id(place: Shown) -> str:
    return f"{place[0].partition('.')[0]}-{place[1]}-{place[2]}"


def _outcome(episode: Episode) -> tuple[str, str]:
    """Return the outcome as one word, and its tone."""
    if episode.failed:
        return "failed", "minus"
    return {True: ("solved", "plus"), False: ("not solved", "minus"), None: ("over", "muted")}[episode.success]


def _episode(
    place: Shown, episode: Episode, when: str, same: str | None, frames: Sequence[str], *, opened: bool
) -> str:
    """Return one episode as HTML.

    Args:
        place: Key of the episode.
        episode: The episode.
        when: When it was played.
        same: Id of the episode from the same start before training.
        frames: Ids of the pictures before each turn and after the last.
        opened: Whether its details are open.
    """
    outcome, tone = _outcome(episode)
    facts = [
        when,
        f"{len(episode.turns)} turn" + ("" if len(episode.turns) == 1 else "s"),
        f"return {signed(episode.total_reward)}",
    ]
    facts += [f"ended by {episode.end.replace('_', ' ')}"] if episode.end not in ("", "terminal") else []
    turns = "".join(_turn(number, turn) for number, turn in enumerate(episode.turns, start=1))
    if episode.final_observation:
        turns += (
            f'<div class="turn"><pre class="mono">{escape(episode.final_observation)}</pre>'
            '<div class="muted">at the end</div></div>'
        )
    body = _strip(episode, frames) if frames else turns
    if frames:
        body += f'<details class="letters"><summary class="muted">Turn by turn</summary>{turns}</details>'
    link = f'<p class="same"><a href="#{same}">the same start before training</a></p>' if same else ""
    return (
        f'<details class="episode" id="{_id(place)}" data-when="{when}" data-outcome="{outcome}" '
        f'data-environment="{escape(episode.kind)}"{" open" if opened else ""}>'
        f'<summary><span class="badge {tone}">{outcome}</span>{escape(episode.environment)}, '
        f'seed {episode.seed} <span class="muted">· {escape(" · ".join(facts))}</span></summary>{link}{body}</details>'
    )


def _strip(episode: Episode, frames: Sequence[str]) -> str:
    """Return the pictures in a row, each with the action taken there."""
    cells = []
    for number, frame in enumerate(frames, 1):
        turn = episode.turns[number - 1] if number <= len(episode.turns) else None
        label = f"Before turn {number}" if turn else "At the end"
        caption = _outcome(episode)[0] if turn is None else " ".join(turn.actions) or "no action"
        reward = f' <span class="{_tone(turn.reward)}">{signed(turn.reward)}</span>' if turn and turn.reward else ""
        cells.append(
            f'<figure><svg role="img" aria-label="{label}" viewBox="0 0 {_SIZE} {_SIZE}"><use href="#{frame}"/></svg>'
            f"<figcaption>{number if turn else 'end'} · <b>{escape(caption)}</b>{reward}</figcaption></figure>"
        )
    return f'<div class="frames">{"".join(cells)}</div>'


def _tone(value: float) -> str:
    return "plus" if value > 0 else "minus" if value < 0 else "muted"


def _turn(number: int, turn: Turn) -> str:
    actions = "".join(f'<span class="action">{escape(action)}</span>' for action in turn.actions)
    if not actions:
        actions = '<span class="muted">none understood</span>'
    tone = _tone(turn.reward)
    parts = (
        ", ".join(f"{name} {signed(value)}" for name, value in turn.parts.items() if value)
        if len(turn.parts) > 1
        else ""
    )
    thought = escape(turn.thought) if turn.thought else '<span class="muted">none</span>'
    return (
        f'<div class="turn"><pre class="mono">{escape(turn.observation)}</pre>'
        f'<div class="thought"><span class="label">{number} · reasoning</span>{thought}</div>'
        f'<div><span class="label">action</span>{actions}</div>'
        f'<div><span class="label">reward</span><span class="{tone}">{signed(turn.reward)}</span> '
        f'<span class="muted">{escape(parts)}</span></div>'
        '<details class="raw"><summary>reply, from what the prompt prefilled on</summary>'
        f"<pre>{tagged(turn.text)}</pre></details></div>"
    )
