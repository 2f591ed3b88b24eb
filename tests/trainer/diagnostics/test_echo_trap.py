"""The four collapse signals on scripted curves."""

import json
import math
import random
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.trainer.diagnostics.config import EchoTrapConfig, MonitorConfig
from starpod.trainer.diagnostics.echo_trap import EchoTrap, EchoWarning

Curve = Callable[[int], float]

STD, ENTROPY = "collect/own_std_in_group", "policy/entropy"
DIVERSITY, GRAD = "collect/response_diversity", "update/grad_norm"


def play(trap: EchoTrap, steps: Iterable[int], **curves: Curve) -> list[EchoWarning]:
    names = {"std": STD, "entropy": ENTROPY, "diversity": DIVERSITY, "grad": GRAD, "success": "collect/success"}
    names["identical"] = "collect/identical_fraction"
    return [w for step in steps for w in trap.update(step, {names[key]: curve(step) for key, curve in curves.items()})]


def fall(start: float, end: float, at: int, width: float = 3.0) -> Curve:
    return lambda step: end + (start - end) / (1 + math.exp((step - at) / width))


def test_a_healthy_run_is_not_warned_of() -> None:
    noise = random.Random(0).gauss
    warnings = play(
        EchoTrap(MonitorConfig()),
        range(1, 200),
        std=lambda step: 0.4 - 0.001 * step + noise(0, 0.05),
        entropy=lambda step: 0.6 - 0.002 * step + noise(0, 0.03),
        diversity=lambda step: 0.8 - 0.001 * step + noise(0, 0.02),
        grad=lambda step: 1 + noise(0, 0.2),
        success=lambda step: min(0.1 + step / 250, 0.85),
    )
    assert warnings == []


@given(st.integers(0, 10_000))
def test_single_steps_never_warn(seed: int) -> None:
    # One value in seven is as bad as can be: more than a plateau with outliers, less than a change.
    spike = random.Random(seed).randrange(7)

    def noisy(good: float, bad: float) -> Curve:
        return lambda step: bad if step > 10 and step % 7 == spike else good

    curves = {"std": noisy(0.4, 0.0), "entropy": noisy(0.5, 0.0), "diversity": noisy(0.8, 0.0), "grad": noisy(1, 90)}
    assert play(EchoTrap(MonitorConfig()), range(1, 80), **curves) == []


def test_a_collapse_is_told_in_its_order_and_then_called_by_its_name() -> None:
    trap = EchoTrap(MonitorConfig())
    warnings = play(
        trap,
        range(1, 121),
        std=fall(0.4, 0.02, 40),
        entropy=fall(0.5, 0.02, 60),
        diversity=fall(0.8, 0.1, 80),
        grad=lambda step: 1.0 if step < 95 else 9.0,
    )
    assert [w.signal for w in warnings] == ["reward_std", "entropy", "echo_trap", "diversity", "grad_norm"]
    assert [w.step for w in warnings] == sorted(w.step for w in warnings)
    assert 40 <= warnings[0].step <= 50
    assert warnings[0].text.startswith("reward deviation within groups has fallen to ")
    assert "% of its start: the policy is echoing" in warnings[0].text and "To do: " in warnings[0].text
    assert f"{100 * warnings[0].ratio:.0f} %" in warnings[0].text
    assert "2 of 4 signals at once" in warnings[2].text
    assert "has risen to 9.0 times its start" in warnings[4].text
    metrics = trap.metrics
    assert metrics["echo_trap/signals"] == 4
    assert metrics["echo_trap/reward_std_ratio"] == pytest.approx(0.05, abs=0.01)
    assert metrics["echo_trap/grad_norm_ratio"] == pytest.approx(9)


def test_a_signal_at_its_bound_warns_once_and_after_a_recovery_again() -> None:
    trap = EchoTrap(MonitorConfig(echo_trap=EchoTrapConfig(window=1)))
    around = play(trap, range(1, 60), std=lambda step: 1.0 if step <= 10 else 0.33 + 0.01 * (-1) ** step)
    assert [w.signal for w in around] == ["reward_std"]
    back = play(trap, range(60, 62), std=lambda step: 0.9)
    assert [w.text for w in back] == [
        "Withdrawn: the warning about reward deviation within groups; it is at 90 % of its start again."
    ]
    assert [w.signal for w in play(trap, range(62, 70), std=lambda step: 0.1)] == ["reward_std"]


def test_equal_rewards_of_a_solved_task_are_no_trap() -> None:
    curves = {"std": fall(0.4, 0.0, 30), "entropy": fall(0.5, 0.0, 30), "diversity": fall(0.8, 0.1, 30)}
    assert play(EchoTrap(MonitorConfig()), range(1, 80), **curves, success=fall(0.1, 0.98, 20)) == []
    assert play(EchoTrap(MonitorConfig()), range(1, 80), **curves, success=fall(0.1, 0.5, 20)) != []


def test_signals_that_success_contradicts_are_told_as_what_they_are() -> None:
    """A policy that becomes sure of what works loses entropy and deviation too: that is called no trap."""
    curves = {"std": fall(0.4, 0.05, 40), "entropy": fall(0.5, 0.02, 40)}
    trap = EchoTrap(MonitorConfig())
    rising = play(trap, range(1, 80), **curves, success=fall(0.5, 0.85, 30))
    assert [w.signal for w in rising] == ["reward_std", "entropy"]
    for warning in rising:
        assert "while success rose from 50 % to 8" in warning.text and "To do" not in warning.text
    fallen = play(trap, range(80, 120), **curves, success=fall(0.85, 0.1, 90))
    assert [w.text.partition(":")[0] for w in fallen] == ["Echo Trap"]
    over = play(trap, range(120, 140), std=lambda step: 0.4, entropy=lambda step: 0.5)
    assert [w.text.partition(":")[0] for w in over] == ["Withdrawn"] * 3


def test_high_success_need_not_rise_to_contradict_a_signal() -> None:
    curves = {"std": fall(0.4, 0.1, 40), "entropy": fall(0.5, 0.05, 40)}
    trap = EchoTrap(MonitorConfig())
    high = play(trap, range(1, 80), **curves, success=lambda step: (0.83, 0.86, 0.84)[step % 3])
    assert [w.signal for w in high] == ["reward_std", "entropy"]
    for warning in high:
        assert "while success holds at 84 %" in warning.text and "To do" not in warning.text
    fallen = play(trap, range(80, 100), **curves, success=lambda step: 0.7)
    assert [w.text.partition(":")[0] for w in fallen] == ["Echo Trap"]


def test_a_fall_from_the_best_is_a_trap_before_it_reaches_the_start() -> None:
    curves = {"std": fall(0.4, 0.02, 60), "entropy": fall(0.5, 0.02, 60)}
    success = lambda step: 0.1 if step < 12 else 0.67 if step < 80 else 0.45  # noqa: E731
    told = play(EchoTrap(MonitorConfig()), range(1, 100), **curves, success=success)
    assert [(w.signal, w.text.startswith("Echo Trap")) for w in told] == [
        ("reward_std", False),
        ("entropy", False),
        ("echo_trap", True),
    ]
    assert 80 <= told[-1].step <= 84


def test_what_was_never_learnt_is_not_lost() -> None:
    """Half a percent of success from the start: the policy settles, and nothing collapses."""
    curves = {"std": fall(0.02, 0.0, 30), "entropy": fall(0.5, 0.02, 30)}
    told = play(EchoTrap(MonitorConfig()), range(1, 80), **curves, success=lambda step: 0.01 * (step % 2))
    assert [w.signal for w in told] == ["reward_std", "entropy"]
    for warning in told:
        assert "success was never above 1.0 %: the policy settles before it has learnt" in warning.text
        assert "echoing" not in warning.text
    # Where the environment does not say what success is, there is nothing to excuse.
    unknown = play(EchoTrap(MonitorConfig()), range(1, 80), **curves)
    assert [w.signal for w in unknown] == ["reward_std", "entropy", "echo_trap"]


def test_groups_of_identical_replies_are_told_of_and_withdrawn() -> None:
    trap = EchoTrap(MonitorConfig())
    share = lambda step: 0.1 if step < 10 else 0.8 if step < 30 else 0.2  # noqa: E731
    told = play(trap, range(1, 50), identical=share)
    assert [(w.step, w.signal) for w in told] == [(12, "identical"), (32, "identical")]
    assert told[0].text.startswith("in 80 % of the groups with reward deviation all members gave the same")
    assert "algorithm.filter.drop_identical=true" in told[0].text and told[1].text.startswith("Withdrawn")
    assert trap.metrics["echo_trap/signals"] == 0


@pytest.mark.parametrize("success", [lambda step: min(0.5 + 0.01 * step, 0.85), lambda step: 0.92])
def test_identical_replies_of_a_policy_that_is_well_are_not_told_of(success: Curve) -> None:
    share = lambda step: 0.1 if step < 12 else 0.9  # noqa: E731
    trap = EchoTrap(MonitorConfig())
    assert play(trap, range(1, 50), identical=share, success=success) == []
    fallen = play(trap, range(50, 60), identical=share, success=lambda step: 0.3)
    assert [w.signal for w in fallen] == ["identical"]


def test_a_warning_of_identical_replies_is_withdrawn_where_the_task_is_solved() -> None:
    success = lambda step: 0.3 if step < 20 else 0.95  # noqa: E731
    told = play(EchoTrap(MonitorConfig()), range(1, 40), identical=lambda step: 0.9, success=success)
    assert [(w.step, w.text.partition(":")[0] == "Withdrawn") for w in told] == [(5, False), (22, True)]


def test_nobody_is_told_to_drop_groups_that_are_dropped() -> None:
    trap, dropping = EchoTrap(MonitorConfig()), EchoTrap(MonitorConfig())
    metrics = {"collect/identical_fraction": 0.9}
    (plain,) = [w for step in range(9) for w in trap.update(step, metrics)]
    (known,) = [w for step in range(9) for w in dropping.update(step, metrics, drops_identical=True)]
    assert "drop_identical" in plain.text
    assert "drop_identical" not in known.text and "To do: sample at a higher temperature" in known.text


def test_a_steep_gradient_warns_only_where_success_does_not_hold() -> None:
    grad = lambda step: 1.0 if step < 15 else 6.0  # noqa: E731
    trap = EchoTrap(MonitorConfig())
    assert play(trap, range(1, 40), grad=grad, success=lambda step: min(0.2 + 0.01 * step, 0.6)) == []
    assert trap.metrics["echo_trap/grad_norm_ratio"] == pytest.approx(6)
    fallen = play(trap, range(40, 50), grad=grad, success=lambda step: 0.4)
    assert ["updates have become unstable" in w.text for w in fallen] == [True]
    # Steps without a number are not taken, whatever success does.
    lost = EchoTrap(MonitorConfig())
    told = play(lost, range(1, 30), grad=lambda step: 1.0 if step < 15 else math.nan, success=lambda step: 0.02 * step)
    assert ["no finite number" in w.text for w in told] == [True]


def test_success_around_its_bound_does_not_warn_again_and_again() -> None:
    curves = {"diversity": fall(0.8, 0.1, 30), "entropy": fall(0.5, 0.0, 30)}
    noise = random.Random(0).gauss
    warnings = play(
        EchoTrap(MonitorConfig()),
        range(1, 200),
        **curves,
        success=lambda step: fall(0.1, 0.9, 15)(step) + noise(0, 0.05) if step < 150 else 0.3,
    )
    assert [w.signal for w in warnings] == ["entropy", "diversity", "echo_trap"]
    assert 150 <= warnings[0].step <= 155


def test_a_run_without_any_deviation_is_told_so_once() -> None:
    warnings = play(EchoTrap(MonitorConfig()), range(1, 60), std=lambda step: 0.0)
    assert [(w.step, w.signal) for w in warnings] == [(10, "reward_std")]
    assert "nothing to learn from" in warnings[0].text


def test_learning_that_begins_late_has_a_start_of_its_own() -> None:
    trap = EchoTrap(MonitorConfig())
    warnings = play(trap, range(1, 100), std=lambda step: 0.0 if step <= 20 else 0.4 if step <= 50 else 0.01)
    assert [w.step for w in warnings if not w.text.startswith("Withdrawn")] == [10, 53]


def test_a_gradient_that_is_no_number_is_the_worst_spike() -> None:
    trap = EchoTrap(MonitorConfig())
    warnings = play(trap, range(1, 30), grad=lambda step: 1.0 if step <= 15 else math.nan)
    assert [w.text.partition(":")[0] for w in warnings] == ["gradient norm is no finite number any more"]
    EchoTrap(MonitorConfig()).load_state_dict(json.loads(json.dumps(trap.state_dict(), allow_nan=False)))


def test_steps_without_a_metric_change_nothing() -> None:
    trap, same = EchoTrap(MonitorConfig()), EchoTrap(MonitorConfig())
    for step in range(1, 40):
        values = {STD: fall(0.4, 0.01, 20)(step)}
        assert trap.update(step, values) == same.update(step, values)
        assert same.update(step, {}) == []
    assert trap.metrics == same.metrics


@given(st.integers(1, 99))
def test_a_resumed_watch_says_what_an_undisturbed_one_says(cut: int) -> None:
    curves: dict[str, Curve] = {
        "std": fall(0.4, 0.02, 40),
        "entropy": fall(0.5, 0.02, 60),
        "grad": lambda step: 1.0 + (step > 70) * 9,
        "identical": lambda step: 0.9 if 30 < step < 60 else 0.1,
        "success": lambda step: 0.95 if 50 < step < 80 else 0.75,
    }
    whole = EchoTrap(MonitorConfig())
    expected = play(whole, range(1, 101), **curves)
    first, second = EchoTrap(MonitorConfig()), EchoTrap(MonitorConfig())
    warnings = play(first, range(1, cut + 1), **curves)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert warnings + play(second, range(cut + 1, 101), **curves) == expected
    assert second.metrics == whole.metrics
