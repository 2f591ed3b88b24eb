"""Training through everything at once ends with the metrics of a run that nobody disturbed."""

import os
import random
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.episodes import TALLY, Count
from tests.faults.proxy import Proxy
from tests.support import ServerProcess, start_server
from tests.training import DISTURBED, ITERATIONS, learnt, lines, train

SEED = int(os.environ.get("STARPOD_FAULT_SEED", "1"))
EVERY = 0.25
"""Seconds between faults, and about as long as most of them last."""
DISTANCE = 0.1
"""Seconds that bytes take in each direction all the time: turns that are done at once leave nothing to disturb."""


class Storm(threading.Thread):
    """Run one fault after another, in an order that the seed determines. `fired` counts them."""

    def __init__(self, servers: list[ServerProcess], proxies: list[Proxy], seed: int) -> None:
        super().__init__(daemon=True)
        self.servers = servers
        self.proxies = proxies
        self.fired: dict[str, int] = {}
        self.error: BaseException | None = None
        self._random = random.Random(seed)
        for proxy in proxies:
            self.mend(proxy)
        self._over = threading.Event()

    def stop(self) -> None:
        """Ends it, and mends what it broke."""
        self._over.set()
        self.join()
        for proxy in self.proxies:
            self.mend(proxy)
        if self.error is not None:
            raise self.error

    def run(self) -> None:
        faults = [self.kill, self.pause, self.drain, self.swallow, self.cut, self.refuse, self.slow, self.overtake]
        try:
            while not self._over.is_set():
                self._random.shuffle(faults)
                for fault in faults:
                    if self._over.wait(EVERY):
                        return
                    number = self._random.randrange(len(self.servers))
                    self.fired[fault.__name__] = self.fired.get(fault.__name__, 0) + 1
                    fault(self.servers[number], self.proxies[number])
        except BaseException as error:
            self.error = error

    def mend(self, proxy: Proxy) -> None:
        proxy.heal()
        proxy.to_server.delay = proxy.to_client.delay = DISTANCE

    def kill(self, server: ServerProcess, _: Proxy) -> None:
        server.restart()

    def pause(self, server: ServerProcess, _: Proxy) -> None:
        os.killpg(server.pid, signal.SIGSTOP)
        time.sleep(3 * EVERY)
        os.killpg(server.pid, signal.SIGCONT)

    def drain(self, server: ServerProcess, _: Proxy) -> None:
        server.terminate()
        server.restart()

    def swallow(self, _: ServerProcess, proxy: Proxy) -> None:
        proxy.black_hole(to_server=self._random.random() < 0.7)
        time.sleep(3 * EVERY)
        self.mend(proxy)

    def cut(self, _: ServerProcess, proxy: Proxy) -> None:
        proxy.resets = self._random.random() < 0.5
        proxy.cut_after = self._random.randrange(1, 200)

    def refuse(self, _: ServerProcess, proxy: Proxy) -> None:
        proxy.refuse()
        time.sleep(EVERY)
        proxy.accept()

    def slow(self, _: ServerProcess, proxy: Proxy) -> None:
        for way in (proxy.to_server, proxy.to_client):
            way.jitter, way.bytes_per_second = 0.1, 50_000.0
        time.sleep(EVERY)
        self.mend(proxy)

    def overtake(self, _: ServerProcess, proxy: Proxy) -> None:
        proxy.to_server.open = False
        time.sleep(EVERY / 4)
        proxy.detain()
        proxy.to_server.open = True
        time.sleep(EVERY)
        proxy.release()


@pytest.mark.minutes
@pytest.mark.timeout(90 + 60 * ITERATIONS)
def test_training_through_a_storm_learns_the_same(undisturbed_run: Path, tmp_path: Path) -> None:
    """Three servers behind proxies, and eight kinds of fault from a seeded schedule.

    STARPOD_FAULT_ITERATIONS makes it longer (3 by default), STARPOD_FAULT_SEED makes it another storm.
    """
    with ExitStack() as stack:
        servers = [stack.enter_context(start_server("frozen_lake-v1", "--drain", "0.3")) for _ in range(3)]
        proxies = [stack.enter_context(Proxy(server.address, seed=SEED)) for server in servers]
        storm = Storm(servers, proxies, SEED)
        storm.start()
        try:
            addresses = f"environment.addresses=[{','.join(proxy.address for proxy in proxies)}]"
            train(addresses, "environment.timeout=1", run_dir=tmp_path / "disturbed", base=DISTURBED)
        finally:
            storm.stop()
    print(f"{sum(storm.fired.values())} faults: {storm.fired}")
    metrics = lines(tmp_path / "disturbed" / "metrics.jsonl")
    count = TALLY.setdefault("training through all of it", Count())
    for values in (record["metrics"] for record in metrics):
        count.episodes += int(values["collect/episodes"])
        count.turns += round(values["collect/episodes"] * values["collect/turns_mean"])
    count.recoveries += int(metrics[-1]["metrics"]["collect/recoveries"])
    assert learnt(tmp_path / "disturbed") == learnt(undisturbed_run)
    assert all(record["metrics"]["collect/failed"] == 0 for record in metrics)
    # It was a storm: every kind of fault came, and connections had to be made again and again.
    assert len(storm.fired) == 8
    assert sum(proxy.counts["accepted"] for proxy in proxies) >= len(proxies) + 8
