"""Pages of `starpod hub`: a table of all environments, and a page about each."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from starpod.check.runner import EnvironmentReport, Result
from starpod.report.page import page
from starpod.v1 import environment_pb2 as pb

STYLE = """
.scroll { overflow-x: auto; } td { overflow-wrap: normal; } .no { color: var(--c4); } .yes { color: var(--c2); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--panel); border-radius: 8px;
  padding: 12px 14px; }
"""
_CONCURRENCY = {
    pb.CONCURRENCY_CLASS_INLINE: "in the server's event loop",
    pb.CONCURRENCY_CLASS_THREAD: "on a thread",
    pb.CONCURRENCY_CLASS_PROCESS: "in a process of its own",
}


@dataclass(slots=True)
class Entry:
    """An environment and what was found out about it.

    address: of the server that hosts it. contract, rewards: the results against the contract, and of the audit of
    rewards. problem: why it could not be checked. seconds: how long that took. rate: steps per second of one session,
    None where none could be played.
    """

    spec: pb.EnvironmentSpec
    address: str
    contract: EnvironmentReport
    rewards: EnvironmentReport
    seconds: float = 0.0
    rate: float | None = None
    problem: str = ""

    @property
    def passed(self) -> bool:
        """Whether it could be checked and breaks no MUST."""
        return not self.first_problem

    @property
    def first_problem(self) -> str:
        """The first that makes it fail, in a line; empty if nothing does."""
        broken = [each for each in (*self.contract.results, *self.rewards.results) if each.breaks]
        return self.problem or next((f"{each.requirement.id} {each.message}" for each in broken), "")


def write_pages(entries: Sequence[Entry], folder: Path) -> None:
    """Writes index.html and ID.html for each. Raises OSError."""
    (folder / "index.html").write_text(_index(entries), encoding="utf-8")
    for entry in entries:
        (folder / f"{entry.spec.id}.html").write_text(_about(entry), encoding="utf-8")


def _index(entries: Sequence[Entry]) -> str:
    passed = sum(entry.passed for entry in entries)
    rows = "".join(_row(entry) for entry in entries)
    heads = ("environment", "verdict", "deterministic", "fork", "snapshot", "expert", "rewards")
    head = "".join(f"<th>{name}</th>" for name in heads) + '<th class="n">steps/s</th>'
    body = (
        f"<h1>{len(entries)} environments</h1><p>{passed} keep the contract and pass the audit of rewards. Steps per "
        f'second are those of one session.</p><div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'
    )
    return page("Environments · Starpod", body, style=STYLE)


def _row(entry: Entry) -> str:
    spec, capabilities = entry.spec, entry.spec.capabilities
    cells = [
        f'<a href="{escape(spec.id)}.html">{escape(spec.id)}</a>',
        _word(entry.passed, "passes", "fails"),
        *(_word(value) for value in (capabilities.deterministic, capabilities.fork, capabilities.snapshot)),
        _word(capabilities.expert_action),
        escape(_counted(entry.rewards)),
    ]
    return f'<tr>{"".join(f"<td>{cell}</td>" for cell in cells)}<td class="n">{_rate(entry)}</td></tr>'


def _about(entry: Entry) -> str:
    spec = entry.spec
    facts = [
        f"version {escape(spec.version)}",
        f"a session runs {_CONCURRENCY.get(spec.concurrency, 'where the server chooses')}",
        f"{_rate(entry)} steps per second of one session",
    ]
    schema = json.loads(spec.options_schema_json or "{}")
    parts = [
        f'<p><a href="index.html">All environments</a></p><h1>{escape(spec.title or spec.id)}</h1>',
        f'<p class="muted">{escape(spec.id)}, {", ".join(facts)}</p>',
        f"<p>{_word(entry.passed, 'It passes.', 'It fails.')} {escape(entry.problem)}</p>",
        f"<h2>Instructions</h2><pre>{escape(spec.instructions)}</pre>" if spec.instructions else "",
        f"<h2>Options</h2><pre>{escape(json.dumps(schema, indent=2))}</pre>" if schema.get("properties") else "",
        _results("Contract", entry.contract),
        _results("Rewards", entry.rewards),
    ]
    return page(f"{spec.id} · Starpod", "\n".join(filter(None, parts)), style=STYLE)


def _results(title: str, report: EnvironmentReport) -> str:
    """Counts, and what was not passed with the reason."""
    rows = "".join(_result(each) for each in report.results if each.status != "passed")
    table = f'<div class="scroll"><table><tr><th></th><th>requirement</th><th>found</th></tr>{rows}</table></div>'
    return f"<h2>{title}</h2><p>{escape(_counted(report))}</p>{table if rows else ''}"


def _result(result: Result) -> str:
    requirement = result.requirement
    status = "warning" if result.status == "failed" and not result.breaks else result.status
    name = f"{requirement.id} {requirement.strength} {escape(requirement.title)}"
    mark = f'<span class="no">{status}</span>' if result.breaks else status
    return f"<tr><td>{mark}</td><td>{name}</td><td>{escape(result.message)}</td></tr>"


def _counted(report: EnvironmentReport) -> str:
    counts = Counter(result.status for result in report.results)
    return ", ".join(f"{number} {status}" for status, number in counts.items()) or "not checked"


def _word(value: bool, yes: str = "yes", no: str = "no") -> str:
    return f'<span class="{"yes" if value else "no"}">{yes if value else no}</span>'


def _rate(entry: Entry) -> str:
    return "-" if entry.rate is None else f"{entry.rate:,.0f}"
