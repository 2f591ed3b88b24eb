"""Machines that are booted ahead, so that a session need not wait for a boot."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import threading
from collections import Counter, defaultdict, deque

from starpod.env_server.authoring.environment import Busy
from starpod.env_server.machines.engine import MachineEngine, MachinePlan
from starpod.env_server.machines.machine import Machine
from starpod.env_server.machines.metrics import DEAD_WARM

logger = logging.getLogger(__name__)

_SWEEP_SECONDS = 30.0


class MachinePool:
    """The machines of a process. The first use of a plan boots one; later uses find one that was booted ahead."""

    def __init__(self, engine: MachineEngine) -> None:
        self.engine = engine
        self._lock = threading.Lock()
        self._warm: defaultdict[MachinePlan, deque[Machine]] = defaultdict(deque)
        self._booting: Counter[MachinePlan] = Counter()
        self._closed = threading.Event()

    def take(self, plan: MachinePlan) -> Machine:
        """Return a machine that was just seen alive. Raises Busy."""
        machine = self._take_warm(plan)
        while machine is not None and (machine.is_old or not machine.answers()):
            DEAD_WARM.labels(plan.environment).inc(not machine.is_old)
            machine.close()
            machine = self._take_warm(plan)
        machine = machine or Machine.boot(self.engine, plan)
        self._refill(plan)
        return machine

    def _take_warm(self, plan: MachinePlan) -> Machine | None:
        with self._lock:
            return self._warm[plan].popleft() if self._warm[plan] else None

    def _refill(self, plan: MachinePlan) -> None:
        with self._lock:
            missing = plan.warm - len(self._warm[plan]) - self._booting[plan]
            if missing <= 0 or self._closed.is_set():
                return
            self._booting[plan] += 1
        threading.Thread(target=self._boot, args=(plan,), name="starpod boots a machine", daemon=True).start()

    def _boot(self, plan: MachinePlan) -> None:
        machine = None
        with contextlib.suppress(Busy):
            machine = Machine.boot(self.engine, plan)
        with self._lock:
            self._booting[plan] -= 1
            is_late = self._closed.is_set()
            if machine and not is_late:
                self._warm[plan].append(machine)
        if machine and is_late:
            machine.close()
        elif machine:
            self._refill(plan)

    def keep_up(self) -> None:
        """Remove containers that were left behind or whose lease is over, until the pool closes."""
        while not self._closed.wait(_SWEEP_SECONDS):
            try:
                self.engine.sweep()
            except self.engine.errors as error:
                logger.warning("containers that were left behind cannot be looked for: %s", error)

    def close(self) -> None:
        """Remove the warm machines. Those in use end with the process."""
        self._closed.set()
        with self._lock:
            machines = [machine for machines in self._warm.values() for machine in machines]
            self._warm.clear()
        for machine in machines:
            machine.close()


@functools.cache
def machine_pool(engine: str = "docker", namespace: str = "") -> MachinePool:
    """Return the pool of this process for an engine. Raises Unavailable if it does not answer.

    Args:
        engine: docker or pods.
        namespace: namespace of pods; empty for the default.
    """
    if engine == "pods":
        from starpod.env_server.machines.pods import connect_cluster

        pool = MachinePool(connect_cluster(namespace))
    else:
        from starpod.env_server.machines.docker_engine import connect

        pool = MachinePool(connect())
    atexit.register(pool.close)
    threading.Thread(target=pool.keep_up, name="starpod sweeps machines", daemon=True).start()
    return pool
