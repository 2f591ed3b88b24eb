"""Pages of `starpod hub`: a table of all environments, and a page about each."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from starpod.check.runner import EnvironmentReport, Result, Status
from starpod.report.pages import PageTable, render_file
from starpod.v1 import environment_pb2 as pb

_STATUSES: tuple[Status, ...] = ("passed", "failed", "error", "skipped")
_CAPABILITIES = {
    "deterministic": "deterministic", "fork": "fork", "snapshot": "snapshot", "expert": "expert_action",
}  # fmt: skip
"""Columns of the table, and the fields of a spec's capabilities that they show."""
_CONCURRENCY = {
    pb.CONCURRENCY_CLASS_INLINE: "in the server's event loop",
    pb.CONCURRENCY_CLASS_THREAD: "on a thread",
    pb.CONCURRENCY_CLASS_PROCESS: "in its own process",
    pb.CONCURRENCY_CLASS_CONTAINER: "in its own container",
}


@dataclass(slots=True)
class CheckedEnvironment:
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


def write_pages(entries: Sequence[CheckedEnvironment], folder: Path) -> None:
    """Write index.html, and ID.html for each environment. Raise OSError if that fails."""
    for entry in (None, *entries):
        options = json.loads(entry.spec.options_schema_json or "{}").get("properties", {}) if entry else {}
        rows = [
            (name, json.dumps(option.get("default")), option.get("description", "")) for name, option in options.items()
        ]
        page = render_file(
            "hub.html", entry=entry, entries=entries, options=PageTable(("name", "default", "meaning"), rows),
            where=_CONCURRENCY.get(entry.spec.concurrency, "where the server chooses") if entry else "",
            capabilities=_CAPABILITIES, count=_count_statuses, rate=_format_rate,
        )  # fmt: skip
        (folder / f"{entry.spec.id if entry else 'index'}.html").write_text(page, encoding="utf-8")


def _count_statuses(report: EnvironmentReport) -> str:
    counts = Counter(result.status for result in report.results)
    return ", ".join(f"{counts[status]} {status}" for status in _STATUSES if counts[status]) or "not checked"


def _format_rate(entry: CheckedEnvironment) -> str:
    return "-" if entry.rate is None else f"{entry.rate:,.0f}"
