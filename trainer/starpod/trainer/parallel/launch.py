"""torchrun, except for its exit status: `python -m starpod.trainer.parallel.launch` takes the arguments of torchrun.

torchrun exits with 1 if a process fails. This program exits with 2 if a process exited with 2, so that a cluster can
distinguish a wrong configuration, which it must not retry.
"""

from __future__ import annotations

import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main() -> None:
    """Run torchrun with the arguments of the command line."""
    try:
        run.main()
    except ChildFailedError as error:
        if all(failure.exitcode != 2 for failure in error.failures.values()):
            raise
        sys.exit(2)


if __name__ == "__main__":
    main()
