"""Reports of a check: live on a terminal, and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn

from starpod.check.requirement import Requirement
from starpod.check.runner import CheckReport, EnvironmentReport, Observer, Result, Status

_MARKS: dict[Status, str] = {
    "passed": "[green]✓[/]",
    "failed": "[red]✗[/]",
    "skipped": "[dim]-[/]",
    "error": "[magenta]![/]",
}


class Terminal(Observer):
    """Shows a progress bar for each environment, and below it each requirement that fails."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress = Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]}"),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}
        self._failed: Counter[str] = Counter()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tasks:
            self.progress.stop()

    def began(self, environment: EnvironmentReport, requirements: Sequence[Requirement]) -> None:
        name = f"{environment.id} {environment.version}"
        self.progress.start()
        self._tasks[environment.id] = self.progress.add_task(escape(name), total=len(requirements), failed="")

    def ran(self, environment: EnvironmentReport, result: Result) -> None:
        task = self._tasks[environment.id]
        if result.status in ("failed", "error"):
            self._failed[environment.id] += 1
            self.progress.update(task, failed=f"[red]{self._failed[environment.id]} failed")
            self.progress.console.print(_format_result(result))
        self.progress.advance(task)

    def close(self, report: CheckReport) -> None:
        """Print the skipped requirements with reasons, and the number of results by status."""
        for environment in report.environments:
            ids_by_reason: dict[str, list[str]] = {}
            for result in environment.results:
                if result.status == "skipped":
                    ids_by_reason.setdefault(result.message, []).append(result.requirement.id)
            for reason, ids in ids_by_reason.items():
                self.console.print(f"[dim]- skipped, {escape(reason)}: {', '.join(ids)}[/]", highlight=False)
            counts = Counter(result.status for result in environment.results)
            status_counts = ", ".join(f"{counts[status]} {status}" for status in _MARKS if counts[status])
            warnings = sum(r.status == "failed" and not r.breaks for r in environment.results)
            note = f", [yellow]{warnings} of them a warning[/]" if warnings else ""
            self.console.print(
                f"[bold]{escape(environment.id)} {escape(environment.version)}[/]: {status_counts}{note}"
            )
        verdict = "[bold green]keeps the contract[/]" if report.passed else "[bold red]does not keep the contract[/]"
        self.console.print(
            f"{escape(report.address)} ({escape(report.server_name)} {escape(report.server_version)}) {verdict}"
        )


def _format_result(result: Result) -> str:
    requirement = result.requirement
    mark = _MARKS[result.status] if result.breaks else "[yellow]![/]"
    return (
        f"{mark} [bold]{requirement.id}[/] {requirement.strength} {escape(requirement.title)}\n"
        f"    [dim]{escape(result.message)}[/]"
    )


def describe_requirement(requirement: Requirement) -> dict[str, str]:
    """Return a requirement as JSON values: id, level, strength (MUST or SHOULD), title."""
    return {
        "id": requirement.id,
        "level": requirement.level,
        "strength": requirement.strength,
        "title": requirement.title,
    }


def describe_results(environment: EnvironmentReport) -> list[dict[str, Any]]:
    """Return the results of an environment as JSON values."""
    return [
        {
            **describe_requirement(result.requirement),
            "status": result.status,
            "message": result.message,
            "seconds": round(result.seconds, 4),
        }
        for result in environment.results
    ]


def to_json(report: CheckReport) -> str:
    """Return the report as a JSON document."""
    counts = Counter(result.status for result in report.results)
    document: dict[str, Any] = {
        "address": report.address,
        "server_name": report.server_name,
        "server_version": report.server_version,
        "protocol_version": report.protocol_version,
        "passed": report.passed,
        "unreachable": report.unreachable,
        "counts": {status: counts[status] for status in _MARKS},
        "environments": [
            {
                "id": environment.id,
                "version": environment.version,
                "results": describe_results(environment),
            }
            for environment in report.environments
        ],
    }
    return json.dumps(document, indent=2) + "\n"
