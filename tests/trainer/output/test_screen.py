"""The live screen and the plain log."""

import io
import logging
import re
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from starpod.report.figures import duration, show
from starpod.trainer.data.metric_names import metric
from starpod.trainer.output.live import SHARE, LiveScreen, View, make_screen
from starpod.trainer.output.screen import PlainScreen, Screen, client_events, evaluation_line, step_line
from starpod.trainer.output.words import final_line, sparkline, standing_warnings, trend, withdrawal
from tests.trainer.diagnostics.synthetic import LADDER, episode, metrics_at

EVALUATION = {"success": 0.72, "success_low": 0.66, "success_high": 0.77, "episodes": 256, "reference": LADDER}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def terminal(width: int = 120, height: int = 40) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_live_on_a_terminal_plain_elsewhere() -> None:
    assert isinstance(make_screen("auto", terminal()), LiveScreen)
    assert isinstance(make_screen("auto", Console(file=io.StringIO())), PlainScreen)
    assert isinstance(make_screen("live", Console(file=io.StringIO())), LiveScreen)
    assert type(make_screen("off", terminal())) is Screen


def tell(screen: Screen, *, steps: int = 30) -> None:
    """A short run."""
    screen.start("FrozenLake with StarPO-S", {"model": "tiny", "budget_seconds": 240})
    screen.phase("evaluating")
    screen.evaluation(0, {**EVALUATION, "success": 0.07, "success_low": 0.04, "success_high": 0.11})
    for step in range(1, steps + 1):
        screen.phase("collecting")
        screen.step(step, steps, metrics_at(step))
    screen.episode(episode(17, solved=True))
    screen.at = steps
    screen.warn("the policy is echoing")
    screen.warn("entropy has fallen to 20 % of its start: it hardly explores any more")
    screen.warn(withdrawal("entropy", "it is at 90 % of its start again"))
    screen.evaluation(steps, EVALUATION)
    screen.done({"report": "runs/a/report.html"})


# --- the log -------------------------------------------------------------------------------------------------------


def log(tell: Callable[[PlainScreen, Clock], None]) -> list[str]:
    """The lines of a log that is told something."""
    out, clock = io.StringIO(), Clock()
    with PlainScreen(out, clock=clock) as screen:
        tell(screen, clock)
    assert "\x1b" not in out.getvalue()
    return out.getvalue().splitlines()


def test_a_line_per_step_and_a_phase_and_a_warning_once() -> None:
    def short(screen: PlainScreen, clock: Clock) -> None:
        screen.start("a lake", {"model": "tiny"})
        for step in range(1, 4):
            clock.now += 2
            for name in ("collecting", "updating"):
                screen.phase(name)
            with client_events(screen):
                logging.getLogger("starpod.client").warning("the server at %s is back", "here:1")
            screen.step(step, 10, {"collect/success": 0.41, "time/step": 2.0, "time/update": 0.5})
            screen.warn("the policy is echoing")

    lines = log(short)
    assert lines[0] == "a lake" and len(lines) == 11
    assert sum(line.endswith("] the server at here:1 is back") for line in lines) == 3
    assert lines[2:4] == ["[0:02] collecting", "[0:02] updating"]
    assert lines[-1] == "[0:06] step 3/10 · success 41 % · 2 s (updating 25 %)"
    assert sum("echoing" in line for line in lines) == 1


def test_fast_steps_do_not_flood_and_the_last_is_never_lost() -> None:
    def fast(screen: PlainScreen, clock: Clock) -> None:
        for step in range(1, 1001):
            clock.now += 0.01
            screen.step(step, None, {"collect/success": 0.5})

    lines = log(fast)
    assert len(lines) <= 12 and "step 1000" in lines[-1]


def test_progress_is_logged_every_20_seconds_even_while_no_episode_ends() -> None:
    def slow(screen: PlainScreen, clock: Clock) -> None:
        screen.phase("collecting 60 demonstrations")
        count = screen.counter("demonstrations", 60)
        for _ in range(54):
            count(None)
        for _ in range(80):
            clock.now += 1
            screen.show_progress()

    assert log(slow) == ["[0:00] collecting 60 demonstrations", "[0:20] demonstrations: 54 of 60"]


def test_an_evaluation_stands_beside_the_ladder_and_the_final_figure_says_whose_it_is() -> None:
    line = evaluation_line(50, EVALUATION)
    told = "evaluation at step 50 on selection seeds: success 72 % (66 to 77 %) of 256 episodes; beside random"
    assert line.startswith(told) and "avoid holes 86 %" in line
    assert evaluation_line(0, {"success": 0.5}) == "evaluation at step 0 on selection seeds: success 50 %"
    line = final_line({**EVALUATION, "step": 80, "greedy": {"success": 0.75}})
    assert line == "success 72 % (66 to 77 %) of 256 episodes, by the checkpoint of step 80; greedy 75 %"
    assert step_line(3, None, {}) == "step 3"


def test_where_purchases_are_graded_the_return_stands_beside_success() -> None:
    graded = {"success": 0.02, "return_mean": 0.61, "return_low": 0.58, "return_high": 0.642}
    line = evaluation_line(9, {**graded, "reference": {"random": {"success": 0.0, "return_mean": 0.1}}})
    assert line.endswith(": success 2.0 %, return 0.61 (0.58 to 0.642); beside random 0 % (0.1)")
    told = "success 2.0 % of 9 episodes, return 0.61 (0.58 to 0.642), by the checkpoint of step 9; greedy 2.0 % (0.61)"
    assert final_line({**graded, "greedy": graded, "step": 9, "episodes": 9}) == told
    nothing_yet = {"success": 0.0, "return_mean": 0.0, "reference": {"rule": {"success": 0.0, "return_mean": 0.6}}}
    assert evaluation_line(0, nothing_yet).endswith("success 0 %, return 0; beside rule 0 % (0.6)")
    paid_for_success = {"success": 0.5, "return_mean": 0.5, "return_low": 0.4, "return_high": 0.6}
    assert "return" not in evaluation_line(9, paid_for_success)
    console = terminal()
    with LiveScreen(console) as screen:
        tell(screen)
        screen.evaluation(31, {**EVALUATION, **graded})
    assert "return 0.61 (0.58 to 0.642)" in text_of(console)


# --- the live screen -----------------------------------------------------------------------------------------------


def test_the_screen_shows_everything_and_leaves_a_summary() -> None:
    console, clock = terminal(), Clock()
    with LiveScreen(console, clock=clock) as screen:
        tell(screen)
        clock.now += 100
        with console.capture() as captured:
            console.print(screen.view)
        shown = captured.get()
        drawn = len(text_of(console))
    for words in ("FrozenLake with StarPO-S", "step 30/30", "of 4:00", "Reward deviation in groups", "avoid holes"):
        assert words in shown
    assert "the policy is echoing" in shown and "frozen_lake-v1 · seed 17 · solved" in shown and "Down" in shown
    left = text_of(console)[drawn:]
    assert "warning at step 30: the policy is echoing" in left and "entropy has fallen" not in left + shown
    assert "success 72 % (66 to 77 %)" in left and "report: runs/a/report.html" in left and "step 30/30" in left
    screen.close()


@pytest.mark.parametrize("width", [80, 130])
def test_the_address_of_the_pages_is_a_line_by_itself(width: int) -> None:
    address = "http://127.0.0.1:40213/"
    plan = {"live": address, "model": "tiny", "episodes": "64 groups x 4 in each of 180 iterations", "folder": "a" * 80}
    console = terminal(width)
    with LiveScreen(console) as screen:
        screen.start("a lake", plan)
        with console.capture() as captured:
            console.print(screen.view)
    for shown in (captured.get(), "\n".join(log(lambda screen, _: screen.start("a lake", plan)))):
        assert re.search(rf"(?m)^(\x1b\[H|  )live: {re.escape(address)} *$", shown)


@settings(max_examples=25)
@given(st.integers(20, 200), st.integers(5, 70))
def test_it_fits_whatever_room_there_is(width: int, height: int) -> None:
    view = View()
    view.title, view.step, view.budget, view.site = "FrozenLake " * 5, 3, 60.0, "http://127.0.0.1:40213/"
    view.metrics = metrics_at(3)
    view.curves = {name: deque([value] * 3) for name, value in view.metrics.items()}
    view.evaluations = [(0, dict(EVALUATION)), (50, dict(EVALUATION))]
    view.reference, view.episode = LADDER, episode(17, solved=False, turns=6)
    view.warnings = [(1, "a long warning " * 30), (2, "another " * 40)]
    console = terminal(width, height)
    lines = console.render_lines(view, console.options.update(height=height), pad=False)
    assert len(lines) <= height
    assert all(sum(segment.cell_length for segment in line) <= width for line in lines)


def test_drawing_rests_in_proportion_to_what_it_cost() -> None:
    clock = Clock()
    drawn: list[float] = []

    class Slow(View):
        def __rich_console__(self, *_: Any) -> Any:
            drawn.append(clock.now)
            clock.now += 0.05
            yield ""

    screen = LiveScreen(terminal(), clock=clock)
    screen.view = Slow()
    screen.start("a", {})
    for step in range(10_000):
        clock.now += 0.01
        screen.step(step, None, {})
    screen.close()
    assert len(drawn) > 10
    assert 0.05 * len(drawn) <= 1.5 * SHARE * clock.now


def test_a_picture_that_fails_does_not_end_the_run_and_the_terminal_is_given_back_after_an_error() -> None:
    class Broken(View):
        def __rich_console__(self, *_: Any) -> Any:
            raise ValueError("no such colour")
            yield ""

    console = terminal()
    with LiveScreen(console) as screen:
        screen.view = Broken()
        tell(screen)
    assert "the screen failed and is off; training continues" in text_of(console)
    console = terminal()

    def train() -> None:
        with LiveScreen(console) as screen:
            screen.start("a lake", {})
            raise RuntimeError("training failed")

    with pytest.raises(RuntimeError, match="training failed"):
        train()
    assert text_of(console).count("\x1b[?1049h") == text_of(console).count("\x1b[?1049l") == 1
    assert "\x1b[?25h" in text_of(console)


# --- words ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (0.873, "share", "87 %"),
        (0.0412, "share", "4.1 %"),
        (1.0, "share", "100 %"),
        (0.0021, "seconds", "2.1 ms"),
        (125.0, "seconds", "2:05"),
        (7812.3, "rate", "7,812"),
        (1.23e-6, "number", "1.2e-6"),
        (float("nan"), "number", "-"),
        (None, "share", "-"),
    ],
)
def test_numbers_read_well(value: float | None, kind: Any, text: str) -> None:
    assert show(value, kind) == text
    assert [duration(seconds) for seconds in (7, 245, 3729)] == ["0:07", "4:05", "1:02:09"]


@settings(max_examples=40)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=80), st.integers(1, 30))
def test_sparklines_take_any_values(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) <= width
    assert trend(values) in "↗↘→ "


def test_a_warning_stands_until_it_is_withdrawn() -> None:
    why = "it is over"
    told = ["entropy has fallen", "Echo Trap: 2 of 4 signals", withdrawal("an Echo Trap", why), "entropy rose"]
    assert standing_warnings(enumerate(told)) == [(0, told[0]), (3, told[3])]
    assert standing_warnings(enumerate([*told, withdrawal("entropy", why)])) == [(0, told[0])]
    assert standing_warnings([(9, withdrawal("entropy", why))]) == []


def test_trends() -> None:
    assert trend([0.1 * i for i in range(30)]) == "↗"
    assert trend([-0.1 * i for i in range(30)]) == "↘"
    assert trend([0.5, 0.6] * 15) == "→"
    assert sparkline([0, 1, 2, 3], 4) == "▁▃▆█"


def test_each_of_several_environments_is_named() -> None:
    metrics = {"collect/success": 0.5, "environments/lake/success": 0.2, "environments/arms/success": 0.8}
    assert step_line(3, 9, metrics) == "step 3/9 · success 50 % (arms 80 %, lake 20 %)"
    summary: dict[str, Any] = {"success": 0.5, "return_mean": 0.5, "episodes": 8}
    summary["environments"] = {"arms": {"success": 0.8}, "lake": {"success": 0.2}}
    told = "success 50 % of 8 episodes; arms 80 %, lake 20 %"
    assert evaluation_line(3, summary) == f"evaluation at step 3 on selection seeds: {told}"
    assert final_line({**summary, "step": 3}) == f"{told}, by the checkpoint of step 3"
    assert metric("environments/lake/success").label == "lake: success"
    assert metric("environments/lake/success").kind == "share"
    assert metric("agents/solver/policy/entropy").label == "solver: entropy (nats)"
    view = View(title="both", step=3, metrics=metrics, evaluations=[(3, summary)])
    view.curves = {name: deque([value]) for name, value in metrics.items()}
    console = terminal()
    console.print(view)
    shown = text_of(console)
    assert "lake: success" in shown and shown.index("arms: success") < shown.index("lake: success")
    assert [line for line in shown.splitlines() if "lake " in line and "20 %" in line]
