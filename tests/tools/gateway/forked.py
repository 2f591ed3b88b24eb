"""A program as the child of a process that has imported everything, so that it is soon back when it is killed.

    python -m tests.tools.gateway.forked gateway|serve ARGUMENT ... --port N
    python -m tests.tools.gateway.forked engine MODEL --port N
    python -m tests.tools.gateway.forked train|eval ARGUMENT ...

gateway, serve, train, eval: as commands of starpod. engine: a vLLM server's stand-in with that model. Each child of a
server prints its ready line and listens on the same port; SIGTERM ends both. A run that is over ends both; one that
finds no server, all of which were killed, begins again. An evaluation that ends by itself ends both.
"""

import asyncio
import importlib
import os
import signal
import sys
import uuid
from pathlib import Path

IMPORTED = {
    "gateway": ("starpod.cli.main", "starpod.gateway.serving", "starpod.trainer.engines.vllm_remote"),
    "serve": ("starpod.cli.main", "starpod.env_server.cli"),
    "train": ("starpod.cli.main", "starpod.trainer.run", "starpod.gateway.programs"),
    "eval": (
        "starpod.cli.main",
        "starpod.trainer.commands.eval",
        "starpod.trainer.agents.pretrained",
        "starpod.gateway.programs",
    ),
    "engine": ("tests.trainer.engines.fake_core", "tests.trainer.engines.fake_server"),
}


async def engine(model: str, _: str, port: str) -> None:
    from tests.trainer.engines.fake_core import FakeCore
    from tests.trainer.engines.fake_server import FakeServer

    async with FakeServer(FakeCore(Path(model)), instance=uuid.uuid4().hex).serve(int(port)) as address:
        print(address, flush=True)
        await asyncio.Event().wait()


def work(program: str, *arguments: str) -> None:
    """Run a program in a child process."""
    if program == "engine":
        asyncio.run(engine(*arguments))
    else:
        from starpod.cli.main import main

        main([program, *arguments])


def run(program: str, *arguments: str) -> None:
    child = 0

    def end(*_: object) -> None:
        os.kill(child, signal.SIGKILL)
        os._exit(0)

    for module in IMPORTED[program]:
        importlib.import_module(module)
    while True:
        child = os.fork()
        if not child:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            work(program, *arguments)
            return
        signal.signal(signal.SIGTERM, end)
        _, status = os.waitpid(child, 0)
        if program == "train" and status == 0:
            return
        if program == "eval" and os.WIFEXITED(status):
            sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    run(*sys.argv[1:])
