"""Pages of `starpod hub`: a table of all environments, and a page about each."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from starpod.check.runner import EnvironmentReport, Result, Status
from starpod.report.page import page
from starpod.v1 import environment_pb2 as pb

STYLE = """
.scroll { overflow-x: auto; } th, td { overflow-wrap: normal; } .no { color: var(--c4); } .yes { color: var(--c2); }
.whole { white-space: nowrap; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--panel); border-radius: 8px;
  padding: 12px 14px; }
@media (max-width: 640px) {
  .wide { display: none; } td a { overflow-wrap: anywhere; }
  .found tr, .found td { display: block; border: 0; padding: 2px 0; } .found th { display: none; }
  .found tr { padding: 10px 0; border-bottom: 1px solid var(--grid); }
}
"""
_STATUSES: tuple[Status, ...] = ("passed", "failed", "error", "skipped")
_CONCURRENCY = {
    pb.CONCURRENCY_CLASS_INLINE: "in the server's event loop",
    pb.CONCURRENCY_CLASS_THREAD: "on a thread",
    pb.CONCURRENCY_CLASS_PROCESS: "in its own process",
}


@dataclass(slots=True)
class Entry:
    """An environment and the results of its checks."""

    spec: pb.EnvironmentSpec
    address: str
    """Address of the process that was checked."""
    contract: EnvironmentReport
    rewards: EnvironmentReport
    """Results of the audit of rewards, which is not part of the contract."""
    seconds: float = 0.0
    """Duration of the checks."""
    rate: float | None = None
    """Steps per second of one session; None if no episode can be played."""
    problem: str = ""
    """Why the environment could not be checked; empty if it was checked."""

    @property
    def passed(self) -> bool:
        """Whether the environment could be checked and meets every MUST."""
        return not self.first_problem

    @property
    def first_problem(self) -> str:
        """The first reason why the environment fails, in one line; empty if it passes."""
        return self.problem or next(
            (f"{result.requirement.id} {result.message}" for result in self._breaking_results), ""
        )

    @property
    def broken(self) -> list[str]:
        """Ids of the requirements that the environment breaks."""
        return [result.requirement.id for result in self._breaking_results]

    @property
    def _breaking_results(self) -> list[Result]:
        return [result for result in (*self.contract.results, *self.rewards.results) if result.breaks]


def write_pages(entries: Sequence[Entry], folder: Path) -> None:
    """Write index.html, and ID.html for each environment. Raise OSError if that fails."""
    (folder / "index.html").write_text(_render_index(entries), encoding="utf-8")
    for entry in entries:
        (folder / f"{entry.spec.id}.html").write_text(_render_environment(entry), encoding="utf-8")


def _render_index(entries: Sequence[Entry]) -> str:
    passes = sum(entry.passed for entry in entries)
    rows = "".join(_render_row(entry) for entry in sorted(entries, key=lambda entry: entry.passed))
    headings = "".join(
        f'<th class="wide">{name}</th>' for name in ("deterministic", "fork", "snapshot", "expert", "rewards")
    )
    head = f'<th>environment</th><th>verdict</th>{headings}<th class="n">steps/s</th>'
    body = (
        f"<h1>{len(entries)} environments</h1><p>{passes} keep the contract and pass the audit of rewards. Steps per "
        f'second are those of one session.</p><div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'
    )
    return page("Environments · Starpod", body, style=STYLE)


def _render_row(entry: Entry) -> str:
    spec, can = entry.spec, entry.spec.capabilities
    capabilities = [_yes_or_no(value) for value in (can.deterministic, can.fork, can.snapshot, can.expert_action)]
    broken_ids = ", ".join(f'<span class="whole">{id_}</span>' for id_ in entry.broken)
    verdict = _coloured(entry.passed, "passes", f"fails {broken_ids}".strip())
    cells = "".join(f'<td class="wide">{cell}</td>' for cell in (*capabilities, escape(_count_statuses(entry.rewards))))
    link = f'<a href="{escape(spec.id)}.html">{escape(spec.id)}</a>'
    return f'<tr><td>{link}</td><td>{verdict}</td>{cells}<td class="n">{_format_rate(entry)}</td></tr>'


def _render_environment(entry: Entry) -> str:
    spec = entry.spec
    facts = [
        f"version {escape(spec.version)}",
        f"a session runs {_CONCURRENCY.get(spec.concurrency, 'where the server chooses')}",
        f"{_format_rate(entry)} steps per second of one session",
    ]
    parts = [
        f'<p><a href="index.html">All environments</a></p><h1>{escape(spec.title or spec.id)}</h1>',
        f'<p class="muted">{escape(spec.id)}, {", ".join(facts)}</p>',
        f"<p>{_coloured(entry.passed, 'It passes.', 'It fails:')} {escape(entry.first_problem)}</p>",
        f"<h2>Instructions</h2><pre>{escape(spec.instructions)}</pre>" if spec.instructions else "",
        _render_options(spec),
        _render_results("Contract", entry.contract),
        _render_results("Rewards", entry.rewards),
    ]
    return page(f"{spec.id} · Starpod", "\n".join(filter(None, parts)), style=STYLE)


def _render_options(spec: pb.EnvironmentSpec) -> str:
    """Return a table of the options in the JSON Schema of Describe, or an empty text without options."""
    options = json.loads(spec.options_schema_json or "{}").get("properties", {})
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(json.dumps(option.get('default')))}</td>"
        f"<td>{escape(option.get('description', ''))}</td></tr>"
        for name, option in options.items()
    )
    heads = "<tr><th>name</th><th>default</th><th>meaning</th></tr>"
    return f'<h2>Options</h2><div class="scroll"><table>{heads}{rows}</table></div>' if rows else ""


def _render_results(title: str, report: EnvironmentReport) -> str:
    """Return the number of results by status, and a table of the requirements that were not passed."""
    rows = "".join(_render_result(result) for result in report.results if result.status != "passed")
    head = "<tr><th></th><th>requirement</th><th>found</th></tr>"
    table = f'<div class="scroll"><table class="found">{head}{rows}</table></div>'
    return f"<h2>{title}</h2><p>{escape(_count_statuses(report))}</p>{table if rows else ''}"


def _render_result(result: Result) -> str:
    requirement = result.requirement
    status = "warning" if result.status == "failed" and not result.breaks else result.status
    name = f"{requirement.id} {requirement.strength} {escape(requirement.title)}"
    mark = f'<span class="no">{status}</span>' if result.breaks else status
    return f"<tr><td>{mark}</td><td>{name}</td><td>{escape(result.message)}</td></tr>"


def _count_statuses(report: EnvironmentReport) -> str:
    counts = Counter(result.status for result in report.results)
    return ", ".join(f"{counts[status]} {status}" for status in _STATUSES if counts[status]) or "not checked"


def _coloured(value: bool, yes: str, no: str) -> str:
    return f'<span class="{"yes" if value else "no"}">{yes if value else no}</span>'


def _yes_or_no(value: bool) -> str:
    return "yes" if value else '<span class="muted">no</span>'


def _format_rate(entry: Entry) -> str:
    return "-" if entry.rate is None else f"{entry.rate:,.0f}"
