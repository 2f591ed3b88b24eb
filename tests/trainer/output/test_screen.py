"""The log, and the progress bar below it on a terminal."""

import io
import logging
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from starpod.report.figures import duration, show
from starpod.trainer.data.metric_names import metric
from starpod.trainer.output.live import LiveScreen, make_screen
from starpod.trainer.output.screen import PlainScreen, Screen, client_events, evaluation_line, step_line
from starpod.trainer.output.words import final_line, standing_warnings, trend, withdrawal
from tests.trainer.diagnostics.synthetic import LADDER, metrics_at

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


# --- the log -------------------------------------------------------------------------------------------------------


def log(tell: Callable[[PlainScreen, Clock], None]) -> list[str]:
    """Return the lines of a plain screen's log after `tell`."""
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


def test_an_evaluation_is_shown_next_to_the_ladder_and_the_final_figure_names_its_policy() -> None:
    line = evaluation_line(50, EVALUATION)
    told = "evaluation at step 50 on selection seeds: success 72 % (66 to 77 %) of 256 episodes; beside random"
    assert line.startswith(told) and "avoid holes 86 %" in line
    assert evaluation_line(0, {"success": 0.5}) == "evaluation at step 0 on selection seeds: success 50 %"
    line = final_line({**EVALUATION, "step": 80, "greedy": {"success": 0.75}})
    assert line == "success 72 % (66 to 77 %) of 256 episodes, by the checkpoint of step 80; greedy 75 %"
    assert step_line(3, None, {}) == "step 3"


def test_the_return_is_shown_next_to_success_if_purchases_are_graded() -> None:
    graded = {"success": 0.02, "return_mean": 0.61, "return_low": 0.58, "return_high": 0.642}
    line = evaluation_line(9, {**graded, "reference": {"random": {"success": 0.0, "return_mean": 0.1}}})
    assert line.endswith(": success 2.0 %, return 0.61 (0.58 to 0.642); beside random 0 % (0.1)")
    told = "success 2.0 % of 9 episodes, return 0.61 (0.58 to 0.642), by the checkpoint of step 9; greedy 2.0 % (0.61)"
    assert final_line({**graded, "greedy": graded, "step": 9, "episodes": 9}) == told
    nothing_yet = {"success": 0.0, "return_mean": 0.0, "reference": {"rule": {"success": 0.0, "return_mean": 0.6}}}
    assert evaluation_line(0, nothing_yet).endswith("success 0 %, return 0; beside rule 0 % (0.6)")
    paid_for_success = {"success": 0.5, "return_mean": 0.5, "return_low": 0.4, "return_high": 0.6}
    assert "return" not in evaluation_line(9, paid_for_success)


# --- the progress bar ----------------------------------------------------------------------------------------------


def test_a_terminal_shows_the_log_above_a_bar_that_is_erased() -> None:
    console, clock = terminal(), Clock()
    address = f"http://127.0.0.1:40213/{'a' * 150}"
    with LiveScreen(console, clock=clock) as screen:
        screen.start("FrozenLake with StarPO-S", {"live": address, "model": "tiny", "budget_seconds": 240})
        clock.now += 100
        screen.progress("playing random: 3 of 64")
        screen.step(3, 30, metrics_at(3))
        screen.warn("[bold]the policy is echoing\x1b[2J")
    shown = text_of(console)
    logged = log(lambda screen, _: screen.start("FrozenLake with StarPO-S", {"live": address}))
    assert shown.replace("\x1b[2K", "").replace("\r", "").startswith("\n".join(logged))  # no line is broken
    assert "[1:40] warning: [bold]the policy is echoing␛[2J" in shown
    assert "playing random: 3 of 64" in shown and "step 3/30  1:40 of 4:00" in shown
    assert shown.endswith("\x1b[1A\x1b[2K") and "\x1b[?25h" in shown  # the bar is erased, and the cursor is back
    screen.close()


def test_the_terminal_is_given_back_after_an_error() -> None:
    console = terminal()

    def train() -> None:
        with LiveScreen(console) as screen:
            screen.start("a lake", {})
            raise RuntimeError("training failed")

    with pytest.raises(RuntimeError, match="training failed"):
        train()
    assert text_of(console).count("\x1b[?25l") == text_of(console).count("\x1b[?25h") == 1


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


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=80))
def test_trends_take_any_values(values: list[float]) -> None:
    assert trend(values) in "↗↘→ "


def test_a_warning_is_shown_until_it_is_withdrawn() -> None:
    why = "it is over"
    told = ["entropy has fallen", "Echo Trap: 2 of 4 signals", withdrawal("an Echo Trap", why), "entropy rose"]
    assert standing_warnings(enumerate(told)) == [(0, told[0]), (3, told[3])]
    assert standing_warnings(enumerate([*told, withdrawal("entropy", why)])) == [(0, told[0])]
    assert standing_warnings([(9, withdrawal("entropy", why))]) == []


def test_trends() -> None:
    assert trend([0.1 * i for i in range(30)]) == "↗"
    assert trend([-0.1 * i for i in range(30)]) == "↘"
    assert trend([0.5, 0.6] * 15) == "→"


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
