"""Starpod's environments in SkyRL: a `BaseTextEnv`, registered under a name of your own.

    skyrl_gym.register("lake", "starpod.client.adapters.skyrl:StarpodEnv", kwargs={"setting": setting})

SkyRL has no way to leave out one trajectory: an error of the infrastructure is raised, and ends the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType

from starpod.client.adapters.text import Episode, Setting, converse


class StarpodEnv(BaseTextEnv):  # type: ignore[misc] # untyped where SkyRL is not installed
    """One trajectory. `extras` is the row of the data set, with a `seed`; see Setting.opening for more.

    SkyRL's `max_turns` bounds the episode, beside the environment's own limits.
    """

    def __init__(self, setting: Setting, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.setting = setting
        self.extras = extras or {}
        self.max_turns = int(self.extras.get("max_turns", 0))
        self.episode: Episode | None = None

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """The prompt with instructions and first observation in its last user message."""
        self.episode = self.setting.shared_fleet().run(self.setting.open(self.extras))
        session = self.episode.session
        return converse(prompt, self.episode.first), {"seed": session.seed, "dynamics_seed": session.dynamics_seed}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Plays a reply. A bad one earns what the environment gives for it; a failure is raised."""
        assert self.episode is not None, "SkyRL calls init first"
        self.turns += 1
        try:
            shown = self.setting.shared_fleet().run(self.setting.play(self.episode, action))
        except BaseException:
            self.close()  # SkyRL does not, after an error
            raise
        done = self.episode.done or self.turns == self.max_turns
        return BaseTextEnvStepOutput(
            observations=[] if done else [{"role": "user", "content": shown}],
            reward=self.episode.rewards[-1],
            done=done,
            metadata=self.get_metrics(),
        )

    def close(self) -> None:
        if self.episode is not None:
            self.setting.shared_fleet().run(self.setting.close(self.episode))

    def get_metrics(self) -> dict[str, Any]:
        return {} if self.episode is None else self.episode.metrics()
