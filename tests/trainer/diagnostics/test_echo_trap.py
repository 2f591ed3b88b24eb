"""The four collapse signals on scripted curves."""

import json
import math
import random
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.diagnostics.config import EchoTrapConfig, MonitorConfig
from starpod.trainer.diagnostics.echo_trap import EchoWarning, SettingsInUse
from starpod.trainer.diagnostics.monitor import Monitor

Curve = Callable[[int], float]

STD, ENTROPY = "collect/own_std_in_group", "policy/entropy"
DIVERSITY, GRAD = "collect/response_diversity", "update/grad_norm"


def play(trap: Monitor, steps: Iterable[int], **curves: Curve) -> list[EchoWarning]:
    names = {"std": STD, "entropy": ENTROPY, "diversity": DIVERSITY, "grad": GRAD, "success": "collect/success"}
    names["identical"] = "collect/identical_fraction"
    return [w for step in steps for w in trap.update(step, {names[key]: curve(step) for key, curve in curves.items()})]


def fall(start: float, end: float, at: int, width: float = 3.0) -> Curve:
    return lambda step: end + (start - end) / (1 + math.exp((step - at) / width))


def then(first: float, *later: tuple[int, float]) -> Curve:
    """A value, and others from these steps on."""
    return lambda step: [first, *(value for begin, value in later if step >= begin)][-1]


def noisy(curve: Curve, spread: float) -> Curve:
    noise = random.Random(0).gauss
    return lambda step: curve(step) + noise(0, spread)


def joined(one: Curve, at: int, other: Curve) -> Curve:
    return lambda step: (one if step < at else other)(step)


EQUAL = {"std": fall(0.4, 0.0, 30), "entropy": fall(0.5, 0.0, 30), "diversity": fall(0.8, 0.1, 30)}
SETTLED = {"std": fall(0.02, 0.0, 30), "entropy": fall(0.5, 0.02, 30)}
HEALTHY = {
    "std": noisy(lambda step: 0.4 - 0.001 * step, 0.05),
    "entropy": noisy(lambda step: 0.6 - 0.002 * step, 0.03),
    "diversity": noisy(lambda step: 0.8 - 0.001 * step, 0.02),
    "grad": noisy(then(1.0), 0.2),
    "success": lambda step: min(0.1 + step / 250, 0.85),
}
COLLAPSE = {"std": fall(0.4, 0.02, 40), "entropy": fall(0.5, 0.02, 60), "diversity": fall(0.8, 0.1, 80)}
SURE = {
    "std": joined(fall(0.4, 0.05, 40), 120, then(0.4)),
    "entropy": joined(fall(0.5, 0.02, 40), 120, then(0.5)),
    "success": joined(fall(0.5, 0.85, 30), 80, fall(0.85, 0.1, 90)),
}
HIGH = joined(lambda step: (0.83, 0.86, 0.84)[step % 3], 80, then(0.7))
LATE = {"std": fall(0.4, 0.02, 60), "entropy": fall(0.5, 0.02, 60), "success": then(0.1, (12, 0.67), (80, 0.45))}
RISES = joined(lambda step: min(0.5 + 0.01 * step, 0.85), 50, then(0.3))
UP_TO_40 = joined(lambda step: min(0.2 + 0.01 * step, 0.6), 40, then(0.4))
STD_FELL, ENTROPY_FELL = "reward deviation within groups has fallen to", "entropy has fallen to"
UNLEARNT = "of its start, and success was never above 1.0 %: the policy settles before it has learnt."
LUCK = "groups of identical replies: in 90 % of those with reward deviation all members gave the same replies"
NAN = "grad_norm!: gradient norm is NaN or infinite, so updates are skipped: updates have become unstable."


@pytest.mark.parametrize(
    ("curves", "expected"),
    [
        (HEALTHY, []),
        # The signals of a collapse are reported in order, and then the collapse by its name.
        (
            COLLAPSE | {"grad": then(1.0, (95, 9.0))},
            [
                f"45 reward_std!: {STD_FELL} 31 % of its start: the policy is echoing",
                f"67 entropy!: {ENTROPY_FELL} 19 % of its start",
                "67 echo_trap!: Echo Trap: 2 of 4 signals at once",
                "83 diversity!: response diversity has fallen to 49 % of its start",
                "97 grad_norm!: gradient norm has risen to 9.0 times its start: updates have become unstable.",
            ],
        ),
        # Equal rewards of a solved task are no trap.
        (EQUAL | {"success": fall(0.1, 0.98, 20)}, []),
        # A policy that becomes sure of what works loses entropy and deviation too, which is a trap where success falls.
        (
            SURE,
            [
                f"87 reward_std!: {STD_FELL} 13 % of its start: the policy is echoing",
                f"87 entropy!: {ENTROPY_FELL} 4 % of its start: the policy hardly explores",
                "87 echo_trap!: Echo Trap",
                *(f"122 {signal}: Withdrawn" for signal in ("reward_std", "entropy", "echo_trap")),
            ],
        ),
        # High success need not rise to contradict a signal.
        (
            {"std": fall(0.4, 0.1, 40), "entropy": fall(0.5, 0.05, 40), "success": HIGH},
            [
                f"82 reward_std!: {STD_FELL} 25 % of its start",
                f"82 entropy!: {ENTROPY_FELL} 10 % of its start",
                "82 echo_trap!: Echo Trap",
            ],
        ),
        # Half solved and no longer rising, it may be one.
        (EQUAL | {"success": noisy(fall(0.1, 0.5, 20), 0.02)}, ["41 reward_std: ", "41 entropy: ", "41 diversity: "]),
        # A fall from the best is a trap before it reaches the start.
        (LATE, ["65 reward_std: ", "67 entropy: ", "82 echo_trap!: Echo Trap"]),
        # What was never learnt is not lost; where the environment does not say what success is, nothing is excused.
        (
            SETTLED | {"success": lambda step: 0.01 * (step % 2)},
            [f"35 reward_std!: {STD_FELL} 27 % {UNLEARNT}", f"37 entropy!: {ENTROPY_FELL} 19 % {UNLEARNT}"],
        ),
        (SETTLED, ["35 reward_std!", "37 entropy!", "37 echo_trap!"]),
        # Success around its bound does not warn again and again.
        (
            {
                "entropy": fall(0.5, 0.0, 30),
                "diversity": fall(0.8, 0.1, 30),
                "success": joined(noisy(fall(0.1, 0.9, 15), 0.05), 150, then(0.3)),
            },
            ["152 entropy!", "152 diversity!", "152 echo_trap!"],
        ),
        # Groups of identical replies: told of unless the policy is well, and withdrawn.
        ({"identical": then(0.1, (10, 0.9), (30, 0.2))}, [f"12 identical!: {LUCK}", "32 identical: Withdrawn"]),
        ({"identical": then(0.1, (12, 0.9)), "success": RISES}, [f"52 identical!: {LUCK}"]),
        ({"identical": then(0.1, (12, 0.9)), "success": then(0.92, (50, 0.3))}, [f"52 identical!: {LUCK}"]),
        ({"identical": then(0.9), "success": then(0.3, (20, 0.95))}, [f"5 identical!: {LUCK}", "22 identical: With"]),
        # A steep gradient warns only where success does not hold, and one that is no number anywhere.
        ({"grad": then(1.0, (15, 6.0)), "success": UP_TO_40}, ["42 grad_norm!: gradient norm has risen to 6.0 times"]),
        ({"grad": then(1.0, (15, math.nan)), "success": lambda step: 0.02 * step}, [f"17 {NAN}"]),
        ({"grad": then(1.0, (15, math.inf))}, [f"17 {NAN}"]),
        # From the first update on, where no start is known to compare with.
        ({"grad": then(math.nan)}, [f"1 {NAN}"]),
        ({"grad": then(1.0, (3, math.nan), (5, 1.0))}, [f"3 {NAN}", "17 grad_norm: Withdrawn"]),
        # A run without any deviation gets one warning. If learning begins late, its start is the reference.
        ({"std": then(0.0)}, ["10 reward_std!: "]),
        (
            {"std": then(0.0, (21, 0.4), (51, 0.01))},
            ["10 reward_std!: ", "35 reward_std: Withdrawn", "53 reward_std!: "],
        ),
    ],
)
def test_curves_give_the_expected_warnings(curves: dict[str, Curve], expected: list[str]) -> None:
    """expected: how each warning begins: its step, its signal, "!" where it says what to do, and its text."""
    told = [
        f"{w.step} {w.signal}{'!' * ('To do: ' in w.text)}: {w.text}"
        for w in play(Monitor(MonitorConfig()), range(1, 200), **curves)
    ]
    assert len(told) == len(expected) and all(map(str.startswith, told, expected)), told


def test_metrics_are_the_ratios_to_the_start() -> None:
    trap = Monitor(MonitorConfig())
    play(trap, range(1, 60), std=fall(0.4, 0.02, 20), grad=then(1.0, (30, 9.0)))
    ratios = {"reward_std_ratio": 0.05, "grad_norm_ratio": 9, "signals": 2}
    assert trap.echo_trap.metrics == pytest.approx(
        {f"echo_trap/{name}": value for name, value in ratios.items()}, abs=0.01
    )


@pytest.mark.parametrize("spike", range(7))
def test_single_steps_never_warn(spike: int) -> None:
    # One value in seven is as bad as can be: more than a plateau with outliers, less than a change.

    def spiky(good: float, bad: float) -> Curve:
        return lambda step: bad if step > 10 and step % 7 == spike else good

    curves = {"std": spiky(0.4, 0.0), "entropy": spiky(0.5, 0.0), "diversity": spiky(0.8, 0.0), "grad": spiky(1, 90)}
    assert play(Monitor(MonitorConfig()), range(1, 80), **curves) == []


def test_a_signal_at_its_bound_warns_once_and_after_a_recovery_again() -> None:
    trap = Monitor(MonitorConfig(echo_trap=EchoTrapConfig(window=1)))
    around = play(trap, range(1, 60), std=lambda step: 1.0 if step <= 10 else 0.33 + 0.01 * (-1) ** step)
    assert [w.signal for w in around] == ["reward_std"]
    back = play(trap, range(60, 62), std=lambda step: 0.9)
    assert [w.text for w in back] == [
        "Withdrawn: the warning about reward deviation within groups; it is at 90 % of its start again."
    ]
    assert [w.signal for w in play(trap, range(62, 70), std=lambda step: 0.1)] == ["reward_std"]


USES_ALL = SettingsInUse(
    lr=5e-4,
    algorithm=AlgorithmConfig.model_validate(
        {"preset": "starpo-s", "filter": {"drop_identical": True}, "filter_loss_scaling": "linear"}
    ),
)
USES_NONE = SettingsInUse(lr=0.002, algorithm=AlgorithmConfig.model_validate({"preset": "starpo-grpo"}))


@pytest.mark.parametrize(
    ("use", "told", "untold"),
    [
        (
            USES_ALL,
            ("optimizer.lr is 0.0005", "filter.value is 0.25"),
            ("starpo-s", "top_fraction", "=linear", "where"),
        ),
        (USES_NONE, ("optimizer.lr is 0.002", "what starpo-s adds: a filter", "kl.where=off", "clip_high=0.28"), ()),
    ],
)
def test_advice_names_the_rate_in_use_and_nothing_that_is_on(
    use: SettingsInUse, told: tuple[str, ...], untold: tuple[str, ...]
) -> None:
    trap = Monitor(MonitorConfig())
    curves = {STD: fall(0.4, 0.01, 20), "policy/entropy": fall(0.5, 0.01, 20), "collect/success": then(0.5, (25, 0.0))}
    steps = range(1, 80)
    text = " ".join(
        w.text for n in steps for w in trap.update(n, {key: curve(n) for key, curve in curves.items()}, use)
    )
    assert "Echo Trap: 2 of 4" in text
    assert all(words in text for words in told) and not any(words in text for words in untold)


def test_nobody_is_told_to_drop_groups_that_are_dropped() -> None:
    trap, dropping = Monitor(MonitorConfig()), Monitor(MonitorConfig())
    metrics = {"collect/identical_fraction": 0.9}
    (plain,) = [w for step in range(9) for w in trap.update(step, metrics)]
    (known,) = [w for step in range(9) for w in dropping.update(step, metrics, USES_ALL)]
    assert "drop_identical" in plain.text
    assert "drop_identical" not in known.text and "To do: sample at a higher temperature" in known.text


def test_steps_without_a_metric_change_nothing() -> None:
    trap, same = Monitor(MonitorConfig()), Monitor(MonitorConfig())
    for step in range(1, 40):
        values = {STD: fall(0.4, 0.01, 20)(step)}
        assert trap.update(step, values) == same.update(step, values)
        assert same.update(step, {}) == []
    assert trap.echo_trap.metrics == same.echo_trap.metrics


@settings(max_examples=15)
@given(st.integers(1, 99))
def test_a_resumed_watch_says_what_an_undisturbed_one_says(cut: int) -> None:
    curves: dict[str, Curve] = {
        "std": fall(0.4, 0.02, 40),
        "entropy": fall(0.5, 0.02, 60),
        "grad": then(1.0, (71, math.nan)),
        "identical": lambda step: 0.9 if 30 < step < 60 else 0.1,
        "success": lambda step: 0.95 if 50 < step < 80 else 0.75,
    }
    whole = Monitor(MonitorConfig())
    expected = play(whole, range(1, 101), **curves)
    first, second = Monitor(MonitorConfig()), Monitor(MonitorConfig())
    warnings = play(first, range(1, cut + 1), **curves)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert warnings + play(second, range(cut + 1, 101), **curves) == expected
    assert second.echo_trap.metrics == whole.echo_trap.metrics
