"""report.html: the page of a run as one file, with its kept episodes."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from markupsafe import Markup

from starpod.report.pages import render_file
from starpod.report.tree import Continuation, draw_tree
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.files import BadEpisodes, branching_groups, read_episodes
from starpod.trainer.data.group import Group, siblings_of
from starpod.trainer.output.files import write_atomic
from starpod.trainer.output.pictures import Shown, files_between, in_order, read_pictures, shown_files
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.output.run_page import run_values

BETWEEN = 8 * 2**20
"""Maximum size in bytes of the episode files that are shown for evaluations between the first and the last."""
_TREES = 3
"""Maximum number of groups whose branches are drawn."""


def write_report(run_dir: Path | str, commands: Mapping[str, str] | None = None) -> Path:
    """Write the run's report.html and return its path. The run may be unfinished.

    Raises FileNotFoundError for a folder without metrics or evaluations.

    Args:
        commands: command lines to type next, by purpose.
    """
    folder = RunFolder(Path(run_dir))
    lines, evaluations = folder.read_metrics(), folder.read_evaluations()
    if not lines and not evaluations:
        raise FileNotFoundError(f"{folder.path} has neither metrics nor evaluations: there is nothing to report")
    facts = folder.read_facts()
    title = facts.get("title") or folder.path.resolve().name
    values = run_values(title, facts, lines, evaluations, folder.read_final(), folder.best_step)
    page = render_file(
        "run.html", **values, header=_header(folder, facts), commands=commands or {}, trees=_trees(folder),
        kept=_kept(folder),
    )  # fmt: skip
    write_atomic(folder.report, page)
    return folder.report


def _header(folder: RunFolder, facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the run's environment, model, algorithm, date and machine."""
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
    return {name: text for name, text in rows.items() if text}


def _kept(folder: RunFolder) -> dict[str, Any] | None:
    """Return the kept episodes of evaluations, with pictures of some; None if there are none.

    The first, last and final evaluations are shown in full, and others up to a size limit.
    """
    other_files, left_out = files_between(folder, BETWEEN)
    files = {path.name: label for label, path in (shown_files(folder) | other_files).items()}
    episodes = [*in_order(folder), *_episodes_of(other_files.values())]
    if not episodes:
        return None
    frames = read_pictures(folder.pictures)
    ids: dict[bytes, str] = {}  # a picture that occurs several times is embedded once
    for frame in (frame for frames_of_one in frames.values() for frame in frames_of_one):
        ids.setdefault(frame, f"frame-{len(ids)}")
    before = {
        (episode.kind, episode.seed): _id(place) for place, episode in episodes if files[place[0]] == "before training"
    }
    rows = [
        {
            "id": _id(place),
            "when": (when := files[place[0]]),
            "same": before.get((episode.kind, episode.seed), "") if when == "after training" else "",
            "frames": [ids[frame] for frame in frames.get(place, ())],
            "outcome": _outcome(episode),
            "episode": episode,
        }
        for place, episode in episodes
    ]
    note = "All that were kept of the first, the last and the final evaluation"
    note += f", and of {len(other_files)} between" if other_files else ""
    note += f"; {left_out} more evaluations would make the page too large, and are in episodes/." if left_out else "."
    return {
        "note": note,
        "rows": rows,
        "pictures": {name: base64.b64encode(frame).decode() for frame, name in ids.items()},
        "times": list(dict.fromkeys(files.values())),
        "kinds": list(dict.fromkeys(episode.kind for _, episode in episodes)),
        "instructions": episodes[0][1].instructions,
    }


def _episodes_of(files: Iterable[Path]) -> Iterator[tuple[Shown, Episode]]:
    """Yield the episodes of each file in turn. A damaged file is skipped."""
    for path in files:
        with suppress(BadEpisodes):
            for episode in read_episodes(path):
                yield (path.name, episode.group, episode.member), episode


def _id(place: Shown) -> str:
    return f"{place[0].partition('.')[0]}-{place[1]}-{place[2]}"


def _outcome(episode: Episode) -> str:
    if episode.failed:
        return "failed"
    return {True: "solved", False: "not solved", None: "over"}[episode.success]


def _trees(folder: RunFolder) -> dict[str, Any] | None:
    """Return trees of some branched groups of the last collection. Groups with mixed outcomes come first."""
    files = folder.episodes.files("train")
    if not files or folder.read_config().get("collect", {}).get("search", {}).get("strategy", "none") == "none":
        return None
    try:
        groups = branching_groups(files[-1])
    except BadEpisodes:
        return None
    groups.sort(key=lambda group: -len({episode.success is True for episode in group.members}))
    return {"file": files[-1].name, "groups": [_tree(group) for group in groups[:_TREES]]} if groups else None


def _tree(group: Group) -> dict[str, Any]:
    members: Sequence[Episode] = [episode for episode in group.members if not episode.failed]
    label = f"group {group.id}, seed {members[0].seed}" if members else f"group {group.id}"
    continuations = [
        Continuation([" ".join(turn.actions) for turn in each.turns], each.total_reward, each.success, str(each.member))
        for each in members
    ]
    return {
        "label": label,
        "solved": sum(member.success is True for member in members),
        "count": len(members),
        "drawing": Markup(draw_tree(continuations, label.capitalize())),
        "branches": [
            f"before turn {turn + 1} of member {parent}: {', '.join(str(member.member) for member in siblings)}"
            for (parent, turn), siblings in siblings_of(members).items()
        ],
    }
