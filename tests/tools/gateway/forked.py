"""`starpod gateway` as the child of a process that has imported everything, so that it is soon back when it is killed.

    python -m tests.tools.gateway.forked MODEL --port N ...

Each child prints the gateway's ready line. SIGTERM ends both.
"""

import os
import signal
import sys

import starpod.gateway.serving
import starpod.trainer.engines.torch_engine  # noqa: F401 - that no child has to
from starpod.cli.main import main


def run() -> None:
    child = 0

    def end(*_: object) -> None:
        os.kill(child, signal.SIGKILL)
        os._exit(0)

    while True:
        child = os.fork()
        if not child:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            main(["gateway", *sys.argv[1:]])
        signal.signal(signal.SIGTERM, end)
        os.waitpid(child, 0)


if __name__ == "__main__":
    run()
