"""Class `container`: an episode that has a container, which is removed when the session or its episode ends."""

from __future__ import annotations

import logging
import threading
from typing import Any

from starpod.env_server.authoring.environment import Environment
from starpod.env_server.episodes.live_episode import LiveEpisode, Want
from starpod.env_server.processes.hosts import LocalHost

logger = logging.getLogger(__name__)


class ContainerHost(LocalHost):
    """Host of an environment that owns a container. It counts as alive from its creation, before the container boots.

    `alive` is the number of hosts that are not closed.
    """

    __slots__ = ("_closed",)

    alive = 0

    def __init__(self, *arguments: Any) -> None:
        self._closed = False
        super().__init__(*arguments)
        ContainerHost.alive += 1

    def close(self) -> None:
        self._take(None, self._want)
        if not self._closed:
            self._closed = True
            ContainerHost.alive -= 1

    def _take(self, episode: LiveEpisode | None, want: Want) -> None:
        previous = self._episode
        super()._take(episode, want)
        if previous is not None:
            # The interpreter waits for this thread at exit, unless it hangs. Removing a container takes 0.2 s.
            threading.Thread(target=_close, args=(previous.environment,), name="starpod closing").start()


def _close(environment: Environment) -> None:
    try:
        environment.close()
    except Exception:
        logger.exception("%s: the container could not be removed; a sweep will remove it", environment.spec.id)
