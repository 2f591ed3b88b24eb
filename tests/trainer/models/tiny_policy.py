"""A small policy that knows some words, for tests."""

from typing import Any

from starpod.trainer.models.config import ModelConfig
from starpod.trainer.models.policy import CriticKind, Policy, build_policy

TEXTS = (
    "P 3 2 G 0 1 Up Left _ _ O #",
    "#PX_\n_OO√",
    "<think>Down Right</think><answer>Down || Up</answer>",
)


def tiny_policy(
    critic: CriticKind = "none", seed: int = 1, *, tiny: dict[str, Any] | None = None, **more: Any
) -> Policy:
    config = ModelConfig.model_validate(
        {"tiny": {"hidden": 32, "heads": 2, "intermediate": 64, **(tiny or {})}, **more}
    )
    return build_policy(config, texts=TEXTS, critic=critic, seed=seed)
