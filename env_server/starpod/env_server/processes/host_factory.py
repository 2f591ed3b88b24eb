"""Factory of the hosts on which episodes run, with the threads, the sandbox and the journal that they share."""

from __future__ import annotations

from starpod.env_server.authoring.environment import Concurrency, Environment
from starpod.env_server.episodes.effects import Journal
from starpod.env_server.episodes.errors import overloaded
from starpod.env_server.episodes.live_episode import Want
from starpod.env_server.operation.config import ServerLimits
from starpod.env_server.processes.child_process import ChildProcess
from starpod.env_server.processes.hosts import EpisodeHost, LocalHost, Pools
from starpod.env_server.processes.process_host import ProcessHost
from starpod.env_server.sandbox.sandbox import UNTRUSTING, Sandbox

_RETRY_SECONDS = 0.5


class HostFactory:
    """Factory of episodes' hosts, by the concurrency class of their environments."""

    def __init__(
        self,
        limits: ServerLimits,
        threads: int,
        thread_seconds: float = 600.0,
        sandbox: Sandbox = UNTRUSTING,
        journal: Journal | None = None,
    ) -> None:
        self.pools = Pools.of(threads, thread_seconds, limits.max_containers)
        self.sandbox = sandbox
        self.journal = journal or Journal()
        self._max_processes, self._max_containers = limits.max_processes, limits.max_containers

    def new(self, environment: type[Environment], want: Want) -> EpisodeHost:
        """Return a host without an episode. Raises OVERLOADED if it would be a process or container too many."""
        self.make_room(environment)
        if environment.spec.concurrency is Concurrency.PROCESS:
            return ProcessHost(environment, self.sandbox)
        return LocalHost(environment, self.pools, self.journal, want)

    def make_room(self, environment: type[Environment]) -> None:
        """Raise OVERLOADED if the environment needs a process or container and all of them are in use."""
        if environment.spec.concurrency is Concurrency.CONTAINER and LocalHost.containers >= self._max_containers:
            problem = f"all {self._max_containers} containers are in use"
            raise overloaded("max_containers", problem, _RETRY_SECONDS)
        if environment.spec.concurrency is Concurrency.PROCESS and ChildProcess.alive >= self._max_processes:
            problem = f"all {self._max_processes} environment processes are in use"
            raise overloaded("max_processes", problem, _RETRY_SECONDS)
