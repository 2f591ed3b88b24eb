"""The report as one page that needs nothing else: figures, curves, and what to make of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from starpod.load.html_stage import milliseconds, stage_section
from starpod.report.charts import Series, line_chart
from starpod.report.figures import show
from starpod.report.page import page

STYLE = """
.split { display: flex; height: 30px; border-radius: 6px; overflow: hidden; margin: 10px 0 6px; }
.split i { display: block; min-width: 2px; }
.key i, td i.bar { display: inline-block; height: 10px; border-radius: 2px; }
.key i { width: 10px; margin: 0 6px 0 0; } .key span { margin-right: 18px; white-space: nowrap; }
td i.bar { background: var(--c0); margin-right: 8px; vertical-align: baseline; }
.verdicts { list-style: none; padding: 0; margin: 14px 0; } .verdicts li { margin: 4px 0; }
.verdicts b { display: inline-block; min-width: 74px; } .met b { color: var(--c2); } .unmet b { color: var(--c4); }
details.stage > summary { cursor: pointer; font-size: 18px; font-weight: 650; margin: 44px 0 4px; }
h3 { font-size: 15px; margin: 30px 0 2px; } .scroll { overflow-x: auto; }
table { min-width: 520px; } td, th { overflow-wrap: normal; }
td:first-child { white-space: nowrap; }
.command { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--panel); border-radius: 8px;
  padding: 12px 14px; }
"""


def write_page(report: Mapping[str, Any], path: Path) -> None:
    """Writes the page. Raises OSError."""
    path.write_text(render_page(report), encoding="utf-8")


def render_page(report: Mapping[str, Any]) -> str:
    """The whole document."""
    stages = report["stages"]
    sections = [_head(report), _verdicts(report), _warnings(report), _search(report)]
    if len(stages) > 1:
        sections.append(_overview(stages))
    for number, stage in enumerate(stages):
        sections.append(stage_section(stage, unfolded=number == len(stages) - 1, alone=len(stages) == 1))
    sections.append(_how(report))
    return page(f"{_title(report)} · Starpod", "\n".join(filter(None, sections)), style=STYLE)


# --- the whole run -------------------------------------------------------------------------------------------------


def _title(report: Mapping[str, Any]) -> str:
    return f"Load on {report['plan']['environment'] or report['server']['name'] or 'an OpenEnv server'}"


def _head(report: Mapping[str, Any]) -> str:
    server, plan = report["server"], report["plan"]
    replicas = server["replicas"]
    told = [
        f"{server['name']} {server['version']}".strip() or server["kind"],
        replicas[0] if len(replicas) == 1 else f"{len(replicas)} replicas",
        {"stream": "one Stream for all sessions", "unary": "unary calls", "openenv": "a WebSocket for each session"}[
            plan["transport"]
        ],
        f"{plan['policy']} actions",
        report["started"].replace("T", " ").replace("Z", " UTC"),
    ]
    stage = report["stages"][-1]
    step = stage["calls"].get("step", {})
    search = report.get("search")
    tiles = []
    if search:
        tiles.append(_tile("none" if search["rate"] is None else show(search["rate"], "rate"), "highest rate, steps/s"))
    tiles += [
        _tile(show(stage["steps_per_second"], "rate"), "steps/s", _interval(stage, "steps_per_second", "rate")),
        _tile(milliseconds(step.get("p50_ms")), "p50 of a step", _interval(stage, "step.p50_ms")),
        _tile(milliseconds(step.get("p99_ms")), "p99 of a step", _interval(stage, "step.p99_ms")),
        _tile(f"{sum(each['errors']['total'] for each in report['stages']):,}", "errors"),
    ]
    of = "" if len(report["stages"]) == 1 else f'<p class="muted">The figures below are of: {escape(stage["name"])}</p>'
    return (
        f"<h1>{escape(_title(report))}</h1>"
        f'<p class="muted">{escape(" · ".join(told))}</p>{of}<div class="hero">{"".join(tiles)}</div>'
    )


def _tile(number: str, label: str, interval: str = "") -> str:
    more = f"<span>{escape(interval)}</span>" if interval else ""
    return f'<div class="tile"><b>{escape(number)}</b><span>{escape(label)}</span>{more}</div>'


def _interval(stage: Mapping[str, Any], name: str, kind: str = "seconds") -> str:
    known = stage["uncertainty"].get(name)
    if not known:
        return ""
    low, high = (show(edge, "rate") if kind == "rate" else milliseconds(edge) for edge in known)
    return f"{low} to {high}"


def _verdicts(report: Mapping[str, Any]) -> str:
    verdicts = report.get("requirements", ())
    rows = "".join(
        f'<li class="{"met" if verdict["met"] else "unmet"}"><b>{"met" if verdict["met"] else "not met"}</b>'
        f"<code>{escape(verdict['requirement'])}</code> "
        f'<span class="muted">{escape(verdict["measured"])}, {escape(verdict["stage"])}</span></li>'
        for verdict in verdicts
    )
    return f'<ul class="verdicts">{rows}</ul>' if rows else ""


def _warnings(report: Mapping[str, Any]) -> str:
    rows = "".join(f"<li>{escape(warning)}</li>" for warning in report["warnings"])
    return f'<ul class="warnings">{rows}</ul>' if rows else ""


def _search(report: Mapping[str, Any]) -> str:
    search = report.get("search")
    if not search:
        return ""
    rows = "".join(
        f'<tr><td class="n">{show(probe["rate"], "rate")}</td>'
        f"<td>{'confirmation' if probe['confirming'] else 'probe'}</td>"
        f"<td>{'held' if probe['held'] else escape('no: ' + probe['why'])}</td>"
        f"<td>{escape(', '.join(f'{name} {value}' for name, value in probe['measured'].items()))}</td></tr>"
        for probe in search["probes"]
    )
    found = (
        "No rate held it." if search["rate"] is None else f"{show(search['rate'], 'rate')} steps/s held it, confirmed."
    )
    return (
        f"<h2>The highest rate that keeps {escape(' and '.join(search['targets']))}</h2><p>{found}</p>"
        f'<div class="scroll"><table><tr><th class="n">Steps/s due</th><th></th><th>Outcome</th><th>Measured</th></tr>'
        f"{rows}</table></div>"
    )


def _overview(stages: Sequence[Mapping[str, Any]]) -> str:
    """What more load did, stage by stage."""
    load = "steps/s due" if all(stage["rate"] for stage in stages[1:]) else "sessions"
    ordered = sorted(stages, key=lambda stage: _load(stage, load))
    latencies = [
        Series(
            name,
            [
                (_load(stage, load), stage["calls"]["step"][f"{name}_ms"] / 1e3)
                for stage in ordered
                if stage["calls"].get("step", {}).get(f"{name}_ms")
            ],
            colour,
            dots=True,
        )
        for colour, name in enumerate(("p50", "p99"))
    ]
    throughput = [
        Series("steps/s", [(_load(stage, load), stage["steps_per_second"]) for stage in ordered], 2, dots=True)
    ]
    size: Any = {"x_label": load, "width": 420, "height": 240}
    charts = line_chart("Latency of a step", latencies, kind="seconds", logarithmic=True, **size)
    charts += line_chart("Steps/s", throughput, kind="rate", **size)
    rows = "".join(
        f'<tr><td>{escape(stage["name"])}</td><td class="n">{stage["sessions"]:,}</td>'
        f'<td class="n">{stage["steps_per_second"]:,.1f}</td>'
        + "".join(
            f'<td class="n">{milliseconds(stage["calls"].get("step", {}).get(f"{name}_ms"))}</td>'
            for name in ("p50", "p99", "p99.9")
        )
        + f'<td class="n">{stage["errors"]["total"]:,}</td></tr>'
        for stage in stages
    )
    return (
        f'<h2>Stages</h2><div class="charts large">{charts}</div><div class="scroll"><table><tr><th>Stage</th>'
        '<th class="n">Sessions</th><th class="n">Steps/s</th><th class="n">p50</th><th class="n">p99</th>'
        f'<th class="n">p99.9</th><th class="n">Errors</th></tr>{rows}</table></div>'
    )


def _load(stage: Mapping[str, Any], kind: str) -> float:
    """What a stage asked for; a closed loop among open ones stands where its throughput is."""
    return float(stage["sessions"] if kind == "sessions" else stage["rate"] or stage["steps_per_second"])


def _how(report: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><td class="key">{escape(key.replace("_", " "))}</td><td>{escape(str(value))}</td></tr>'
        for key, value in report["plan"].items()
        if value not in ({}, None, "")
    )
    return (
        f'<h2>How it was run</h2><pre class="command">{escape(report["command"])}</pre>'
        f'<details><summary class="muted">All settings</summary><table>{rows}</table></details>'
        '<p class="muted">Intervals are those of 99 % by drawing the intervals of the stage anew. '
        f"Replicas: {escape(', '.join(report['server']['replicas']))}</p>"
    )
