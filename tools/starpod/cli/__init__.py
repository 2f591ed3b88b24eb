"""The `starpod` command, and its subcommands that list, describe and play environments."""

import os
import signal

if os.getpid() == 1:
    # The kernel drops a SIGTERM to process 1 of a container unless there is a handler. A command sets its own handler
    # only after its imports, which take seconds, and a pod that is deleted meanwhile would run on until SIGKILL.
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
