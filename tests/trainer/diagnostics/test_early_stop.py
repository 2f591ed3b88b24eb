"""Rules that end a run."""

import json

from starpod.trainer.diagnostics.config import EarlyStopConfig, MonitorConfig
from starpod.trainer.diagnostics.early_stop import EarlyStop

STD = "collect/own_std_in_group"


def run(stop: EarlyStop, values: list[float], name: str = STD, **others: float) -> tuple[int, str] | None:
    for step, value in enumerate(values, start=1):
        reason = stop.update(step, {name: value, **{key.replace("__", "/"): v for key, v in others.items()}})
        if reason:
            return step, reason
    return None


def test_ten_steps_below_a_tenth_of_the_start_stop() -> None:
    stopped = run(EarlyStop(MonitorConfig()), [0.4] * 10 + [0.039] * 20)
    assert stopped is not None and stopped[0] == 20
    assert "below 10 % of its start (0.4) in 10 steps in a row" in stopped[1] and "collapsed" in stopped[1]


def test_one_better_step_begins_the_count_anew() -> None:
    assert run(EarlyStop(MonitorConfig()), [0.4] * 10 + ([0.01] * 9 + [0.05]) * 5) is None


def test_a_task_that_is_learnt_is_called_so() -> None:
    stopped = run(EarlyStop(MonitorConfig()), [0.4] * 10 + [0.0] * 10, collect__success=0.97)
    assert stopped is not None and "the task is learnt (97 % success)" in stopped[1]


def course(success: list[float], std: list[float]) -> str:
    stop = EarlyStop(MonitorConfig())
    for step, (one, other) in enumerate(zip(success, std, strict=True), start=1):
        if reason := stop.update(step, {STD: other, "collect/success": one}):
            return f"{step}: {reason}"
    return ""


def test_a_policy_that_never_learnt_has_not_collapsed() -> None:
    told = course([0.005, 0.0, 0.01] * 10, [0.02] * 10 + [0.001] * 20)
    assert "20: " in told and "the policy never learnt (success was never above 0.5 %)" in told
    assert "collapsed" not in told
    fallen = course([0.3] * 10 + [0.02] * 20, [0.4] * 10 + [0.01] * 20)
    assert "the policy has collapsed (success was 30 % and is 2.0 %)" in fallen


def test_while_success_rises_nothing_stops_and_afterwards_there_is_nothing_left_to_learn() -> None:
    """Rewards of a group may be equal while the policy learns one start state after the other."""
    rising = [0.1] * 10 + [0.1 + 0.02 * n for n in range(1, 21)] + [0.5] * 30
    told = course(rising, [0.4] * 10 + [0.01] * 50)
    step = int(told.partition(":")[0])
    assert 40 < step < 50 and "success rose from 10 % to 50 %, and these start states teach nothing more" in told


def test_five_evaluations_without_success_stop() -> None:
    stop = EarlyStop(MonitorConfig())
    successes = [0, 0, 0, 0, 0.01, 0, 0, 0.009, 0, 0]
    reasons = [stop.evaluated(step, success, -1.0) for step, success in enumerate(successes)]
    assert [reason is not None for reason in reasons] == [False] * 9 + [True]
    assert "5 evaluations in a row" in str(reasons[-1])


def test_without_success_a_return_above_all_before_it_goes_on() -> None:
    stop = EarlyStop(MonitorConfig())
    returns = [0.1, 0.2, 0.2, 0.3, 0.1, 0.3, 0.2, 0.3, 0.29]
    assert [step for step, value in enumerate(returns) if stop.evaluated(step, 0.0, value)] == [8]


def test_five_empty_filters_in_a_row_stop() -> None:
    kept = "collect/kept_fraction"
    assert run(EarlyStop(MonitorConfig()), [0, 0, 0, 0, 0.5] * 3, kept) is None
    stopped = run(EarlyStop(MonitorConfig()), [0.5, 0, 0, 0, 0, 0], kept)
    assert stopped is not None and stopped[0] == 6 and "the filter kept no group" in stopped[1]


def test_rules_that_are_off_stop_nothing() -> None:
    off = MonitorConfig(early_stop=EarlyStopConfig(reward_std=False, low_success=False, empty_filter=False))
    stop = EarlyStop(off)
    assert run(stop, [0.4] * 10 + [0.0] * 30, collect__kept_fraction=0.0) is None
    assert all(stop.evaluated(step, 0.0, 0.0) is None for step in range(20))


def test_counts_survive_a_restart() -> None:
    first = EarlyStop(MonitorConfig())
    assert run(first, [0.4] * 10 + [0.0] * 9, collect__kept_fraction=0.5) is None
    second = EarlyStop(MonitorConfig())
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.update(20, {STD: 0.0}) is not None
