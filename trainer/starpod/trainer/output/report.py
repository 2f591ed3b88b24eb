"""report.html: a run on one self-contained page."""

from __future__ import annotations

from collections import Counter
from html import escape
from importlib.resources import files
from pathlib import Path

from starpod.report import page as shared
from starpod.report.figures import signed
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.data.files import read_episodes
from starpod.trainer.output.files import write_atomic
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.output.sections import (
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


def page(title: str, body: str) -> str:
    """A whole HTML document in the style of the trainer's pages."""
    return shared.page(title, body, style=STYLE)


EPISODES = 4
"""Sample episodes of the last evaluation: as many solved as not, where there are."""


def write_report(run_dir: Path | str) -> Path:
    """Writes the run's report.html and returns its path. Works on a run that goes on or was cut off.

    Raises FileNotFoundError for a folder without metrics or evaluations.
    """
    folder = RunFolder(Path(run_dir))
    lines, evaluations, final = folder.read_metrics(), folder.read_evaluations(), folder.read_final()
    if not lines and not evaluations:
        raise FileNotFoundError(f"{folder.path} has neither metrics nor evaluations: there is nothing to report")
    facts = folder.read_facts()
    title = facts.get("title") or folder.path.resolve().name
    sections = [
        headline(title, facts, lines, evaluations, final, folder.best_step),
        evaluation(evaluations, lines),
        environments(lines, evaluations, final),
        learning(lines),
        echo_trap(lines),
        information(lines),
        time_spent(lines),
        _episodes(folder),
        configuration(facts),
        provenance(facts, lines),
    ]
    write_atomic(folder.report, page(f"{title} · Starpod", "\n".join(section for section in sections if section)))
    return folder.report


# --- episodes ---------------------------------------------------------------------------------------------------------


def _episodes(folder: RunFolder) -> str:
    files = folder.episode_files()
    if not files:
        return ""
    # Those of the final evaluation began elsewhere: the same start before and after is only in these.
    last = list(read_episodes(files[-1]))
    solved = _in_turn([episode for episode in last if episode.success])
    others = _in_turn([episode for episode in last if not episode.success and not episode.failed])
    half = EPISODES // 2
    chosen = solved[: max(half, EPISODES - len(others))] + others[: max(half, EPISODES - len(solved))]
    parts = []
    for number, episode in enumerate(chosen[:EPISODES]):
        before = None
        if number == 0 and len(files) > 1:
            before = next(
                (e for e in read_episodes(files[0]) if (e.kind, e.seed) == (episode.kind, episode.seed)),
                None,
            )
        parts.append(_episode(episode, "after training" if before else "", opened=number == 0))
        if before is not None:
            parts.append(_episode(before, "the same start before training", opened=False))
    step = int(files[-1].stem.rpartition("-")[2])
    told = chosen[0].instructions if chosen else ""
    if told:
        parts.append(
            '<details class="episode"><summary><span class="muted">What the policy was told</span></summary>'
            f'<div class="turn"><pre class="mono whole">{escape(told)}</pre></div></details>'
        )
    said = f"From the evaluation on selection seeds at step {step:,}; episodes/ has all of them."
    return section("Episodes", said, "".join(parts))


def _in_turn(episodes: list[Episode]) -> list[Episode]:
    """The first of each environment, then the second of each, and so on."""
    counts: Counter[str] = Counter()
    places = []
    for episode in episodes:
        places.append(counts[episode.kind])
        counts[episode.kind] += 1
    return [episode for _, episode in sorted(zip(places, episodes, strict=True), key=lambda pair: pair[0])]


def _episode(episode: Episode, remark: str, *, opened: bool) -> str:
    match episode.success:
        case True:
            badge = '<span class="badge plus">solved</span>'
        case False:
            badge = '<span class="badge minus">not solved</span>'
        case None:
            badge = f'<span class="badge muted">{escape(episode.end or "open")}</span>'
    told = [
        f"{len(episode.turns)} turn" + ("" if len(episode.turns) == 1 else "s"),
        f"return {episode.total_reward:+.3g}",
    ]
    told += [f"ended by {episode.end.replace('_', ' ')}"] if episode.end not in ("", "terminal") else []
    told += [remark] if remark else []
    turns = "".join(_turn(number, turn) for number, turn in enumerate(episode.turns, start=1))
    final = (
        f'<div class="turn"><pre class="mono">{escape(episode.final_observation)}</pre>'
        '<div class="muted">at the end</div></div>'
        if episode.final_observation
        else ""
    )
    return (
        f'<details class="episode"{" open" if opened else ""}><summary>{badge}{escape(episode.environment)}, '
        f'seed {episode.seed} <span class="muted">· {escape(" · ".join(told))}</span></summary>{turns}{final}</details>'
    )


def _turn(number: int, turn: Turn) -> str:
    actions = "".join(f'<span class="action">{escape(action)}</span>' for action in turn.actions)
    if not actions:
        actions = '<span class="muted">none understood</span>'
    kind = "plus" if turn.reward > 0 else "minus" if turn.reward < 0 else "muted"
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
        f'<div><span class="label">reward</span><span class="{kind}">{signed(turn.reward)}</span> '
        f'<span class="muted">{escape(parts)}</span></div>'
        f'<details class="raw"><summary>reply as sampled</summary><pre>{escape(turn.text)}</pre></details></div>'
    )
