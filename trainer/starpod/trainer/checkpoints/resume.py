"""Check of the model of a run that is resumed. A resumed run keeps its model."""

from __future__ import annotations

from textwrap import shorten
from typing import TYPE_CHECKING, Any

from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.models.config import RUN_TIME, ModelConfig

if TYPE_CHECKING:
    from starpod.trainer.checkpoints.checkpoint import Loaded


def check_model(config: Config, loaded: Loaded) -> None:
    """Raise ConfigError if the configuration describes a different model than the checkpoint's."""
    # Validation adds the keys that a run of an earlier version lacks, at any depth.
    new, old = config.model.to_dict(), ModelConfig.model_validate(loaded.state["config"]["model"]).to_dict()
    changed_keys = [key for key in new if key not in RUN_TIME and new[key] != old[key]]
    if changed_keys:
        key = changed_keys[0]
        raise ConfigError(
            f"model.{key} is {_short(new[key])}, but the run that is resumed has {_short(old[key])}: its weights fit "
            "no other model; give the same value, or begin another run with another --run-dir"
        )
    new_names, old_names = list(config.script.policies), loaded.state["config"].get("script", {}).get("policies", [])
    if new_names != old_names:
        raise ConfigError(
            f"script.policies is {new_names}, but the run that is resumed has {old_names}: give the same value, or "
            "begin another run with another --run-dir"
        )
    bias = next((each for name, each in loaded.tensors["policy"].items() if name.endswith("critic.head.bias")), None)
    heads, needed = 0 if bias is None else len(bias), config.algorithm.value_heads * config.algorithm.needs_critic
    if heads != needed:
        raise ConfigError(
            f"algorithm.advantage {config.algorithm.advantage.kind} has {_critic(needed)}, but the run that is resumed "
            f"has {_critic(heads)}: give the same value, or begin another run with another --run-dir"
        )


def _short(value: Any) -> str:
    return shorten(str(value), 80, placeholder=" ...")


def _critic(heads: int) -> str:
    return f"a critic of {heads} value{'s' * (heads > 1)}" if heads else "no critic"
