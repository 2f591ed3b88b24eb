"""Adapter for SkyRL: a `BaseTextEnv` to register under any name.

    skyrl_gym.register("lake", "starpod.client.adapters.skyrl:StarpodEnv", kwargs={"setting": setting})

SkyRL cannot leave out one trajectory, so an infrastructure error is raised and ends the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType

from starpod.client.adapters.text import Setting, TextEpisode, converse


class StarpodEnv(BaseTextEnv):  # type: ignore[misc] # untyped where SkyRL is not installed
    """An environment for one trajectory.

    Args:
        env_config: not used.
        extras: the row of the data set, with a `seed`; see Setting.opening for more keys. Its `max_turns` limits the
            episode, in addition to the environment's limits.
    """

    def __init__(self, setting: Setting, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.setting = setting
        self.extras = extras or {}
        self.max_turns = int(self.extras.get("max_turns", 0))
        self.episode: TextEpisode | None = None

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Open the episode. Returns the prompt, with instructions and first observation added, and the seeds."""
        self.episode = self.setting.shared_fleet().run(self.setting.open(self.extras))
        session = self.episode.session
        return converse(prompt, self.episode.first), {"seed": session.seed, "dynamics_seed": session.dynamics_seed}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Play a reply of the model. Infrastructure errors are raised."""
        assert self.episode is not None, "SkyRL calls init first"
        self.turns += 1
        try:
            observation = self.setting.shared_fleet().run(self.setting.play(self.episode, action))
        except BaseException:
            self.close()  # SkyRL does not close an environment after an error
            raise
        done = self.episode.done or self.turns == self.max_turns
        return BaseTextEnvStepOutput(
            observations=[] if done else [{"role": "user", "content": observation}],
            reward=self.episode.rewards[-1],
            done=done,
            metadata=self.get_metrics(),
        )

    def close(self) -> None:
        if self.episode is not None:
            self.setting.shared_fleet().run(self.setting.close(self.episode))

    def get_metrics(self) -> dict[str, Any]:
        return {} if self.episode is None else self.episode.metrics()
