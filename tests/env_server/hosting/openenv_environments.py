"""OpenEnv environments: one with a model of its actions, one of MCP tools, one that says nothing of its actions."""

from __future__ import annotations

from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.types import Action, Observation, State


class Count(Action):
    """An action that advances the counter."""

    by: int


class Counted(Observation):
    count: int
    seed: int | None
    truncated: bool | None = None


class CounterEnvironment(Environment[Count, Counted, State]):
    """Counts to ten."""

    def __init__(self, start: int = 0, limit: int = 0, log: str = "") -> None:
        super().__init__()
        if start < 0:
            raise ValueError(f"start is {start}; use 0 or more")
        self.start, self.limit = start, limit
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Counted:
        self.count, self.seed = self.start, seed
        self._state = State(episode_id=episode_id)
        return Counted(count=self.count, seed=seed)

    def step(self, action: Count, timeout_s: float | None = None, **_: Any) -> Counted:
        self.count += action.by
        self._state.step_count += 1
        cut = 0 < self.limit <= self._state.step_count or None
        return Counted(count=self.count, seed=self.seed, reward=1.0, done=self.count >= 10, truncated=cut)

    @property
    def state(self) -> State:
        return self._state


class UntypedEnvironment(Environment):  # type: ignore[type-arg]
    """Takes some action."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        return Observation()

    def step(self, action, timeout_s=None, **_):  # type: ignore[no-untyped-def]
        return Observation(done=action.by > 1)

    @property
    def state(self) -> State:
        return State()


class ToolEnvironment(MCPEnvironment):
    """Offers two tools."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server: FastMCP[Any] = FastMCP("tools")

        @server.tool
        def add(a: int, b: int) -> int:
            """Return the sum of two numbers."""
            return a + b

        @server.tool
        def shout(word: str) -> str:
            """Says it louder."""
            return word.upper()

        super().__init__(server)
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        return Observation()

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        return Observation()

    @property
    def state(self) -> State:
        return self._state
