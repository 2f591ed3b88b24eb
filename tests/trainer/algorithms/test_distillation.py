"""A teacher's log-probabilities become an advantage of each sampled token, and nothing of any other."""

import math
from typing import Any

import pytest
from pydantic import ValidationError

from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.data.batch import Advantages
from tests.trainer.algorithms.builders import a_rollout, doubles

TEACHER = {"teacher": "model", "model": "somewhere"}


@pytest.mark.parametrize("reward", [True, False])
def test_an_advantage_is_the_gap_between_the_teacher_and_the_policy_times_gate_and_coefficient(reward: bool) -> None:
    algorithm = AlgorithmConfig(
        preset="dr-grpo",
        distillation={**TEACHER, "coefficient": 2, "gate": 5, "reward": reward},  # type: ignore[arg-type]
    )
    table = a_rollout([[0, 1, 0]], groups=[0], mask=[[1, 1, 0]], old=[[-1.0, -0.5, -9.0]])
    table.teacher_logprobs_BT = doubles([-0.8, -0.7, -1.0])
    taught = algorithm.distillation.add_to(Advantages(doubles([3, 3, 0]), None, table.mask_BT), table)
    gates = [1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))]
    expected = [3 * reward + 2 * gates[0] * 0.2, 3 * reward - 2 * gates[1] * 0.2, 0]
    assert taught.advantages_BT[0].tolist() == pytest.approx(expected)
    metrics = algorithm.distillation.measure(table, table.mask_BT)
    assert metrics["distillation/reverse_kl"] == pytest.approx(0, abs=1e-6)  # one token more likely, one less
    assert metrics["distillation/gate_share"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"preset": "dr-grpo", "filter": "top_p"}, "set algorithm.filter to none"),
        ({"preset": "dapo"}, "algorithm.dynamic_sampling.enabled"),
        ({"preset": "starpo-ppo"}, "without a critic, such as dr_grpo"),
        ({"preset": "seeupo", "kl": "off"}, "a teacher gives each token one"),
    ],
)
def test_what_chooses_or_criticises_by_rewards_is_refused_beside_a_teacher_alone(
    values: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        AlgorithmConfig(**values, distillation={**TEACHER, "reward": False})
