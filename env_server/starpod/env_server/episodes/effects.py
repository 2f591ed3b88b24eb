"""External calls of environments, such as judges and simulated users: each is made once, and its reply is recorded.

A call is identified by the episode (environment, version, options, seeds), the turn, the index of the call within the
turn, and the request. A replay, fork or retry that reaches the same call reads the recorded reply and makes no call.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from starpod.env_server.authoring.environment import Busy, Environment
from starpod.env_server.episodes.temporary import own_folder

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""Seconds after which a failed turn may be retried."""


class EffectFailed(Busy):
    """An external call of an environment failed. The turn or reset is undone."""


class UselessReply(Exception):
    """The reply to an external call makes no sense. The turn is undone and fails: a paid service is not asked again."""


_SENSELESS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions of a call that was answered, but not with what the environment can read."""


class Journal:
    """Recorded replies, one file each in a folder.

    Attributes:
        durable: whether the caller gave the folder. Otherwise it is temporary and is removed when this process ends.
        counts: calls by environment and outcome: `asked`, `recorded` (found in the journal) and `failed`.

    Raises:
        OSError: the folder cannot be created.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.durable = folder is not None
        self.counts: Counter[tuple[str, str]] = Counter()
        self._folder = folder
        self._lock = threading.Lock()
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextlib.contextmanager
    def recording(self, environment: Environment, turn: int | None) -> Iterator[None]:
        """Let the environment make calls in a turn, or in a reset if `turn` is None.

        Raises:
            EffectFailed, UselessReply: a call failed, even if the environment caught it, because a failure must not
                become a reward.
        """
        number = 0
        failure: EffectFailed | UselessReply | None = None

        def ask(request: Any, perform: Callable[[], Any]) -> Any:
            nonlocal number, failure
            number += 1
            try:
                return self._once(environment, turn, number, request, perform)
            except (EffectFailed, UselessReply) as error:
                failure = error
                raise

        environment._cached_ask = ask
        try:
            yield
        finally:
            environment._cached_ask = None
            if failure is not None:
                raise failure from None

    def _once(
        self, environment: Environment, turn: int | None, number: int, request: Any, perform: Callable[[], Any]
    ) -> Any:
        spec = environment.spec
        call = {
            "environment": spec.id,
            "version": spec.version,
            "options": environment.options.model_dump(mode="json"),
            "seed": environment.seed,
            # The start depends only on the seed, and the members of a group share it.
            "dynamics_seed": None if turn is None else environment.dynamics_seed,
            "turn": turn,
            "number": number,
            "request": request,
        }
        with self._open(json.dumps(call, sort_keys=True)) as file:
            # A concurrent identical call waits here until the reply is recorded.
            fcntl.flock(file, fcntl.LOCK_EX)
            with contextlib.suppress(ValueError):  # the file is empty, or truncated because its writer was killed
                reply = json.load(file)["reply"]
                self._count(spec.id, "recorded")
                return reply
            try:
                entry = json.dumps({**call, "reply": perform()}, allow_nan=False)
            except Exception as error:
                self._count(spec.id, "failed")
                logger.warning("a call of %s failed: %r", spec.id, error)
                if isinstance(error, _SENSELESS):
                    raise UselessReply(f"a call of {spec.id} got no usable reply: {error or error!r}") from error
                delay = error.retry_after if isinstance(error, Busy) else RETRY_SECONDS
                raise EffectFailed(f"a call of {spec.id} failed: {type(error).__name__}: {error}", delay) from error
            self._count(spec.id, "asked")
            file.seek(0)
            file.truncate()
            file.write(entry)
            file.flush()
            os.fsync(file.fileno())
            # Return what a later reader gets, for example lists instead of tuples.
            return json.loads(entry)["reply"]

    @contextlib.contextmanager
    def _open(self, call: str) -> Iterator[Any]:
        with self._lock:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="effects-", dir=own_folder()))
        name = hashlib.blake2b(call.encode(), digest_size=20).hexdigest()
        path = self._folder / name[:2] / name[2:]
        path.parent.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "r+", encoding="utf-8") as file:
            yield file

    def _count(self, environment: str, outcome: str) -> None:
        with self._lock:
            self.counts[environment, outcome] += 1
