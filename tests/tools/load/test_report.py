"""Reports of runs with problems, and the page that shows a report."""

import re
from collections import Counter
from typing import Any

import pytest

from starpod.client.transport import Transport
from starpod.load.measurements import Histogram, Interval, Log, ServerTime, StageResult, Summary
from starpod.load.page import render_page
from starpod.load.plan import LoadPlan, ServerAddress, Stage
from starpod.load.report import describe_paths, describe_servers, document, judge, stage_report
from starpod.load.requirements import parse_requirement
from tests.support import charts_of

PLAN = LoadPlan((ServerAddress("a:1"), ServerAddress("b:2")), Transport(), "stream", "lake-v1", "1.0.0")


def a_stage(name: str = "8 sessions", *, late: float = 0.0, thread: float = 0.1, **summary: Any) -> dict[str, Any]:
    """Twenty intervals of 50 ms; the second server answers a third as much as the first, and fails."""
    result = StageResult(Stage(name, 8, 1.0, 0.1), 0.0)
    for place in range(20):
        log = Log(due_from=0.0, counting=True, interval=Interval(late=[late] * 3))
        for call in range(40):
            log.answered(0 if call % 4 else 1, "step", 10.0, 10.0, 10.001 + call / 1e4)
        if place == 7:
            log.failed(1, "step", "overload", "busy <now>")
        result.add(log.take(place))
    server = ServerTime(calls=800, environment=0.8, total=1.6)
    values = {
        "sessions": 8,
        "unserved": 0,
        "unanswered": 0,
        "ended": "",
        "paths": Counter(columns=600, messages=200),
        **summary,
    }
    result.summaries = [Summary(1.0, thread, thread, server=server, **values)]
    result.ended = result.summaries[0].ended
    return stage_report(result, PLAN)


def a_document(*stages: dict[str, Any]) -> dict[str, Any]:
    server = {"name": "starpod", "version": "1", "replicas": ["a:1", "b:2"]}
    report = document(PLAN, server, stages, command="starpod load a:1 --option 'x=<y>'", start_time=0.0)
    report["requirements"] = judge([parse_requirement("errors=0"), parse_requirement("step.p99<1s")], stages)
    return report


def test_figures_of_all_servers_and_intervals() -> None:
    stage = a_stage()
    assert stage["steps"] == stage["steps_per_second"] == 800
    assert stage["calls"]["step"]["count"] == 800
    assert [replica["steps"] for replica in stage["replicas"]] == [600, 200]
    assert [replica["errors"] for replica in stage["replicas"]] == [0, 1]
    assert stage["errors"]["classes"]["overload"] == {"count": 1, "calls": {"step": 1}, "example": "busy <now>"}
    assert stage["errors"]["share"] == pytest.approx(1 / 801)
    told = stage["server_time"]
    assert (told["environment_ms"], told["total_ms"]) == (1.0, 2.0)
    assert told["overhead_ms"] == pytest.approx(told["latency_ms"] - 1.0)
    low, high = stage["uncertainty"]["step.p50_ms"]
    assert low <= stage["calls"]["step"]["p50_ms"] <= high
    parts = [Histogram.decode(interval["calls"]["step"]["hdr"]) for interval in stage["intervals"]]
    whole = Histogram.decode(stage["calls"]["step"]["hdr"])
    assert list(Histogram.sum(parts).counts) == list(whole.counts)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"thread": 0.9}, "a generator's event loop was 90 % busy: the generator, not the server, is the limit"),
        ({"late": 0.02}, "timers fired up to 20 ms late"),
        ({"unserved": 7}, "7 steps were due and never sent"),
        ({"unanswered": 2}, "2 calls had no reply by the end"),
        ({"sessions": 5}, "only 5 of 8 sessions could be opened"),
        ({"ended": "no server answers"}, "ended early: no server answers"),
    ],
)
def test_warnings_are_printed(given: dict[str, Any], told: str) -> None:
    assert a_stage()["warnings"] == []
    (warning,) = a_stage(**given)["warnings"]
    assert warning.startswith(told)


def test_how_many_servers_sessions_need_is_reported() -> None:
    """Two servers sustained 800 steps/s; each is planned for two thirds of its half."""
    report = a_document(a_stage())
    assert re.match(
        r"servers for sessions at one turn a second: 5 for 1,000, 20 for 5,000, 76 for 20,000 \(.*: N x R / 267,",
        describe_servers(report),
    )
    assert "R / 0.333," in describe_servers({**report, "search": {"rate": 1.0}})
    for changes in ({"loop": "open"}, {"steps_per_second": 0.0}):
        assert not describe_servers({**report, "stages": [{**a_stage(), **changes}]})
    assert not describe_servers({**report, "plan": {**report["plan"], "think": "lognormal:50ms,0.8"}})
    assert not describe_servers({**report, "search": {"rate": None}})


@pytest.mark.parametrize(
    ("paths", "resets", "told"),
    [
        ({"columns": 1.0}, 50, "steps travelled in columns, one message for many, 4.0 for each reset"),
        ({"unary": 1.0}, 0, "steps travelled in unary calls"),
        ({}, 0, "no step was answered"),
    ],
)
def test_the_path_is_described_in_words(paths: dict[str, float], resets: int, told: str) -> None:
    calls = {"step": {"count": 200}, **({"reset": {"count": resets}} if resets else {})}
    assert describe_paths({"paths": paths, "calls": calls}) == told


def test_every_stage_is_judged() -> None:
    report = a_document(a_stage("one"), a_stage("two"))
    assert [(v["stage"], v["requirement"], v["met"]) for v in report["requirements"]] == [
        ("one", "errors=0", False),
        ("one", "step.p99<1s", True),
        ("two", "errors=0", False),
        ("two", "step.p99<1s", True),
    ]


def test_the_page_shows_it_all_and_fetches_nothing() -> None:
    report = a_document(a_stage("one"), a_stage("two", unserved=3))
    probe = {"rate": 40.0, "held": False, "why": "p99 <high>", "measured": {"step.p99": "9 ms"}, "confirming": False}
    report["search"] = {"targets": ["step.p99<5ms"], "rate": None, "probes": [probe]}
    text = render_page(report)
    for words in (
        "Load on lake-v1",
        "steps travelled in columns, one message for many (75%) and on a Stream, one message for each (25%)",
        "not met",
        "3 steps were due and never sent",
        "No rate held it.",
        "no: p99 &lt;high&gt;",
        "busy &lt;now&gt;",
        "--option &#39;x=&lt;y&gt;&#39;",
        "in the environment",
        "b:2",
    ):
        assert words in text, words
    drawn = charts_of(text)
    assert len(drawn) == 2 + 2 * 3
    percentiles = drawn[2]
    assert percentiles["log"] and [name for _, name in percentiles["ticks"]][:2] == ["50 %", "75 %"]
    assert text.count("<details") == text.count("</details>") == 3
    assert not re.search(
        r"(src|href)=(?!\"#)|https?://(?!www\.w3\.org)|@import", text.partition("<body")[2].partition("<script")[0]
    )
