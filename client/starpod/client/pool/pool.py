"""The pool of a fleet's servers: membership and placement of sessions."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from starpod.client.connection import StepReceiver
from starpod.client.errors import BadArgument, StarpodError, Unreachable
from starpod.client.nearest import unknown_environment, unknown_version
from starpod.client.pool.placement import Host, least_loaded
from starpod.client.pool.replica import Replica
from starpod.client.pool.upkeep import ServerUpkeep, ignore_errors
from starpod.client.snapshot import Snapshot
from starpod.client.transport import Backoff, join_endpoint, split_address
from starpod.client.versions import latest_name, parse_version, satisfies
from starpod.client.wire import Connector
from starpod.v1 import environment_pb2 as pb


class ServerPool:
    """The servers of a fleet. They have the given addresses and names, or are siblings that such a server lists.

    The arguments are the same as for `Fleet`.
    """

    def __init__(
        self,
        addresses: list[str],
        transport: Connector,
        *,
        timeout: float,
        patience: float,
        grace: float,
        batches_in_flight: int,
        discover: bool,
        health_seconds: float,
    ) -> None:
        self.replicas: list[Replica] = []
        self._by_address: dict[str, Replica] = {}
        # The ready servers, by id of their process.
        self.by_instance: dict[str, Replica] = {}
        # Cache: request -> servers that host it. Cleared when a server comes, goes or changes.
        self._hosts: dict[tuple[str, ...], list[Host]] = {}
        self._addresses = addresses
        self.transport = transport
        self._settings: dict[str, Any] = {
            "timeout": timeout,
            "patience": patience,
            "grace": grace,
            "messages_in_flight": batches_in_flight,
        }
        self._discover = discover
        self.upkeep = ServerUpkeep(self, timeout=timeout, health_seconds=health_seconds)
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._describing: asyncio.Task[None] | None = None
        self._change: asyncio.Event

    async def start(self, receiver: StepReceiver) -> None:
        """Connect to all servers. If none can be used, raise the error that all of them have, or Unreachable."""
        self._settings["receiver"] = receiver
        self._change = asyncio.Event()
        resolve_error = await self.resolve()
        if not self.replicas and resolve_error is not None:
            raise resolve_error
        while not self._closed and not all(replica.tried for replica in self.replicas):
            await self._change.wait()
        if not any(replica.ready for replica in self.replicas):
            raise self._unusable()
        self.spawn(self.upkeep.run())

    async def close(self) -> None:
        """Close the connections. Calls in flight fail, and so do callers that wait for a server."""
        self._closed = True
        self._change.set()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(replica.close() for replica in self.replicas))

    async def describe(self) -> list[pb.EnvironmentSpec]:
        """Return the spec of every hosted environment version, sorted by id, newest version first."""
        await self._describe()
        return self._specs()

    async def _describe(self) -> None:
        await asyncio.gather(*(ignore_errors(replica.describe()) for replica in self.replicas if replica.ready))

    async def _describe_together(self) -> None:
        """Ask all servers for their descriptions. Sessions that wait at the same time share one call per server."""
        if self._describing is None or self._describing.done():
            self._describing = self.spawn(self._describe())
        await asyncio.wait([self._describing])

    def _specs(self) -> list[pb.EnvironmentSpec]:
        specs = {(spec.id, spec.version): spec for replica in self.replicas if replica.ready for spec in replica.specs}
        newest_first = sorted(specs.values(), key=lambda spec: parse_version(spec.version), reverse=True)
        return sorted(newest_first, key=lambda spec: spec.id)

    # --- placement -------------------------------------------------------------------------------------------------

    async def choose(self, environment_id: str, version: str, until: float) -> tuple[Replica, pb.EnvironmentSpec]:
        """Return a lightly loaded server with the newest version in the range, and the spec of that version.

        Args:
            environment_id: an id; `sokoban` means the highest `sokoban-vN`.
            version: a range such as ">=1,<2"; "" means any version.
            until: the event loop's time until which to wait for a server.

        Raises:
            UnknownEnvironment, UnknownVersion: no server hosts it.
            BadArgument: the range is malformed.
            Overloaded, Unreachable: all servers that host it are full, or cannot be reached.
        """

        def fits(spec: pb.EnvironmentSpec) -> bool:
            return spec.id == full_name and satisfies(spec.version, version)

        cache_key = environment_id, version
        if cached_hosts := self._hosts.get(cache_key):
            full_name = cached_hosts[0][1].id
        else:
            full_name = latest_name(environment_id, (spec.id for replica in self.replicas for spec in replica.specs))
            try:
                satisfies("0", version)
            except ValueError as error:
                raise BadArgument(str(error), violations=[("version", str(error))]) from None
        host = await self._least_loaded(cache_key, fits, until)
        if host is not None:
            return host
        versions = [spec.version for spec in self._specs() if spec.id == full_name]
        if versions:
            raise unknown_version(full_name, version, versions)
        raise unknown_environment(environment_id, [spec.id for replica in self.replicas for spec in replica.specs])

    async def choose_for(self, snapshot: Snapshot, until: float) -> tuple[Replica, pb.EnvironmentSpec]:
        """Return a lightly loaded server that can restore the snapshot.

        If no server can, return one that hosts the environment, because its error says why it cannot.
        """

        def fits(spec: pb.EnvironmentSpec) -> bool:
            return spec.id == snapshot.environment_id and (
                spec.version == snapshot.environment_version
                or bool(spec.restores_versions and satisfies(snapshot.environment_version, spec.restores_versions))
            )

        cache_key = snapshot.environment_id, snapshot.environment_version, "snapshot"
        host = await self._least_loaded(cache_key, fits, until)
        return host or await self.choose(snapshot.environment_id, "", until)

    async def _least_loaded(
        self, wanted: tuple[str, ...], fits: Callable[[pb.EnvironmentSpec], bool], until: float
    ) -> tuple[Replica, pb.EnvironmentSpec] | None:
        """Return a lightly loaded server for which `fits` holds, waiting while all of them are unreachable or full.

        Returns None if `fits` holds for no server, not even an unreachable one. `wanted` is the cache key of `fits`.
        """
        described = False
        while True:
            if self._closed:
                raise Unreachable("The fleet is closed.")
            change = self._change
            if host := least_loaded(self._hosts.get(wanted, ())):
                return host
            candidates = [(r, spec) for r in self.replicas for spec in r.specs if fits(spec)]
            ready = [(r, spec) for r, spec in candidates if r.ready and not r.draining]
            if ready:
                newest = max(parse_version(spec.version) for _, spec in ready)
                hosts = self._hosts[wanted] = [item for item in ready if parse_version(item[1].version) == newest]
                if host := least_loaded([item for item in hosts if item[0].accepts(item[1].id)]):
                    return host
                await self._wait_for_room(hosts, change, until)
                continue
            if not described:
                described = True
                await self._describe_together()
                continue
            if not candidates and any(replica.ready for replica in self.replicas):
                return None
            seconds_left = until - _now()
            if seconds_left <= 0:
                raise self._unusable()
            try:
                async with asyncio.timeout(min(seconds_left, 1.0)):
                    await change.wait()
            except TimeoutError:
                described = False

    async def _wait_for_room(self, full: list[Host], change: asyncio.Event, until: float) -> None:
        """Wait until a full server may be asked again, or the pool changes.

        Raises Overloaded if no server may be asked before `until`.
        """
        pause = min((replica.pause(spec.id) for replica, spec in full), key=lambda pause: pause.end)
        now = _now()
        # With jitter, because many callers may wait for the same server.
        wait = Backoff().wait(pause.end - now)
        if pause.error is not None and now + wait > until:
            raise pause.error
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await change.wait()

    def _unusable(self) -> StarpodError:
        reasons = "; ".join(
            f"{r.address}: {r.error or ('draining' if r.draining else 'not ready')}" for r in self.replicas
        )
        kinds = {type(replica.error) for replica in self.replicas}
        message = f"No server can be used ({reasons})."
        error_class = kinds.pop() if len(kinds) == 1 else Unreachable
        return error_class(message) if issubclass(error_class, StarpodError) else Unreachable(message)

    # --- members ---------------------------------------------------------------------------------------------------

    @property
    def has_names(self) -> bool:
        """Whether some addresses are names that are resolved."""
        return any(address.startswith("dns:///") for address in self._addresses)

    async def resolve(self) -> Unreachable | None:
        """Resolve the names again: add new addresses, and remove lost servers whose address is gone.

        The servers of a name that cannot be resolved stay. Returns the error of the last such name.
        """
        resolve_error = None
        for address in self._addresses:
            target = address.removeprefix("dns:///")
            if target == address:
                self._add(address)
                continue
            host, port = split_address(target)
            try:
                infos = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
            except OSError as error:
                resolve_error = Unreachable(f"{host} cannot be resolved: {error}")
                continue
            hosts = {f"[{info[4][0]}]" if info[0] == socket.AF_INET6 else str(info[4][0]) for info in infos}
            for member in sorted(hosts):
                self._add(f"{member}:{port}", server_name=host)
            for replica in list(self.replicas):
                if replica.server_name == host and replica.lost and split_address(replica.address)[0] not in hosts:
                    self._remove(replica)
        return resolve_error

    def _remove(self, replica: Replica) -> None:
        """Remove a server. If it still has sessions, their next calls fail, and they are recovered elsewhere."""
        self.replicas.remove(replica)
        del self._by_address[replica.address]
        if self.by_instance.get(replica.instance_id) is replica:
            del self.by_instance[replica.instance_id]
        self._hosts.clear()
        self.spawn(replica.close())

    def _add(self, address: str, server_name: str = "") -> None:
        if address in self._by_address or self._closed:
            return
        replica = self._by_address[address] = Replica(
            address,
            self.transport,
            server_name=server_name,
            **self._settings,
            on_change=lambda: self.changed(address),
        )
        self.replicas.append(replica)
        replica.start()

    def changed(self, address: str) -> None:
        """Handle a server that came, went or changed: add its siblings and wake callers that wait for a server."""
        replica = self._by_address.get(address)
        if replica is None:
            pass
        elif not replica.ready or replica.description is None:
            if self.by_instance.get(replica.instance_id) is replica:
                del self.by_instance[replica.instance_id]
        elif self.by_instance.setdefault(replica.instance_id, replica) is not replica and not replica.sessions:
            # Two addresses of the same server process: keep the first.
            self._remove(replica)
        elif self._discover:
            host, _ = split_address(address)
            for endpoint in replica.description.endpoints:
                self._add(join_endpoint(endpoint, host), replica.server_name)
        self._hosts.clear()
        self._change.set()
        self._change = asyncio.Event()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine until the pool is closed."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _now() -> float:
    return asyncio.get_running_loop().time()
