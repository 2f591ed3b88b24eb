"""Signals: the first one is remembered, the second one ends it, and the exit status says which."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from starpod.trainer.run.interrupts import Interrupted, Interrupts

PROGRAM = """
    import asyncio, sys
    from starpod.trainer.run.interrupts import Interrupts

    async def main(interrupts):
        step = 0
        while not interrupts.requested:
            step += 1
            if step == 1:
                print("ready", flush=True)
            for _ in range(20):  # one step
                await asyncio.sleep(0.01)
        print("saved", flush=True)

    async def play():
        try:
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0.3)  # a session that is slow to close

    with Interrupts(lambda text: print(text, flush=True)) as interrupts:
        try:
            {body}
        finally:
            print("services stopped", flush=True)
    sys.exit(interrupts.status)
"""


def start(body: str) -> subprocess.Popen[str]:
    program = textwrap.dedent(PROGRAM).format(body=body)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_first_signal_ends_after_the_step(number, status):
    process = start("interrupts.run(main(interrupts))")
    process.send_signal(number)
    output, errors = process.communicate()
    assert (process.returncode, errors) == (status, "")
    assert output.splitlines() == [
        f"{number.name}: saving and stopping; a second signal stops at once, without saving",
        "saved",
        "services stopped",
    ]


@pytest.mark.parametrize(
    ("number", "body"),
    [
        (signal.SIGTERM, "print('ready', flush=True); interrupts.run(asyncio.sleep(600))"),
        (signal.SIGINT, "import time; print('ready', flush=True); time.sleep(600)"),
        (
            signal.SIGTERM,
            "from starpod.trainer.parallel.ranks import Parallel; import time\n"
            "        work = lambda: (print('ready', flush=True), time.sleep(600))\n"
            "        interrupts.run(Parallel().in_thread(work))",
        ),
        (signal.SIGINT, "print('ready', flush=True); interrupts.run(interrupts.unless_requested(play()))"),
    ],
    ids=["waits", "works", "works in a thread", "plays"],
)
def test_the_second_signal_ends_at_once_and_stops_what_was_started(number, body):
    process = start(body)
    assert process.stdout is not None
    process.send_signal(number)
    assert "a second signal stops at once" in process.stdout.readline()
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "StoppedAtOnce" in errors and "Interrupted" not in errors
    assert output.splitlines() == [f"{number.name} again: stopping without saving", "services stopped"]


def test_a_signal_that_another_thread_takes_wakes_the_loop():
    """As does one that arrives just before the loop waits."""
    process = start(
        "import signal, threading, time\n"
        "        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "        print('ready', flush=True)\n"
        "        interrupts.run(asyncio.sleep(600))"
    )
    time.sleep(0.5)  # until the loop waits
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None and "a second signal stops at once" in process.stdout.readline()
    process.kill()
    process.communicate()


def test_the_third_signal_kills():
    sleep = "import time; time.sleep(600)"
    process = start(f"print('ready', flush=True)\n        try: {sleep}\n        except KeyboardInterrupt: {sleep}")
    assert process.stdout is not None
    for _ in range(3):
        process.send_signal(signal.SIGTERM)
        process.stdout.readline()
    process.wait()
    assert process.returncode == -signal.SIGTERM


async def test_a_running_loop_sees_it_and_the_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        assert (interrupts.requested, interrupts.status) == (False, 0)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0)
        assert (interrupts.requested, interrupts.status) == (True, 143)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


async def test_it_ends_what_need_not_be_finished():
    ended = []

    async def play() -> str:
        try:
            await asyncio.sleep(600)
        finally:
            ended.append(True)
        return "played"

    with Interrupts() as interrupts:
        assert await interrupts.unless_requested(asyncio.sleep(0, "done")) == "done"
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()  # while the loop sleeps
        with pytest.raises(Interrupted):
            await interrupts.unless_requested(play())
        with pytest.raises(Interrupted):
            await interrupts.unless_requested(play())
    assert ended == [True, True]


async def test_what_is_cancelled_without_a_signal_is_cancelled():
    with Interrupts() as interrupts:
        task = asyncio.ensure_future(interrupts.unless_requested(asyncio.sleep(600)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def test_other_threads_go_without():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work() -> None:
        with Interrupts() as interrupts:
            seen.append(interrupts.status)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [0]
    assert signal.getsignal(signal.SIGTERM) is before
