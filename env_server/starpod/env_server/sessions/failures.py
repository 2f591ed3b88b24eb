"""Errors that callers get for what an environment raises, and the loss of the sessions that it broke."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import TypeVar

from starpod.env_server.authoring.environment import (
    BadResult,
    Busy,
    Concurrency,
    MachineLost,
    OptionsError,
    Unavailable,
)
from starpod.env_server.episodes.errors import CallError, EnvironmentRaised, bad_argument, overloaded, unsupported
from starpod.env_server.episodes.live_episode import EpisodeEnded
from starpod.env_server.episodes.state import StateError
from starpod.env_server.operation.metrics import Metrics
from starpod.env_server.processes.hosts import HostDied, StateTooLarge
from starpod.env_server.sessions.session import ServedSession

logger = logging.getLogger(__name__)

R = TypeVar("R")


class SessionFailures:
    """Conversion of exceptions to the contract's errors. It logs and counts them, and marks sessions as lost."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def guard(self, session: ServedSession, work: Awaitable[R], verb: str) -> R:
        """Await an environment's work and convert its exceptions with `convert`."""
        try:
            return await work
        except Exception as error:
            failure = self.convert(session, error, verb)
            if failure is error:
                raise
            raise failure from error

    def convert(self, session: ServedSession, error: Exception, verb: str) -> Exception:
        """Return the contract's error for an exception of an environment's work. Other exceptions are returned.

        Args:
            session: the session whose environment raised. It is lost if its state may be corrupt.
            verb: the method of the contract, such as "Step", for the log.
        """
        match error:
            case EpisodeEnded():
                return session.out_of_order(session.epoch, session.next_index)
            case OptionsError():
                return bad_argument("options", str(error))
            case Busy():
                return overloaded("environment", error.message, error.retry_after)
            case Unavailable():
                return unsupported(session.environment, "render", f"cannot draw here: {error}")
            case StateError():
                return unsupported(session.environment, "snapshot", str(error))
            case StateTooLarge():
                return CallError("TOO_LARGE", f"the state has {error}", {"limit": "max_snapshot_bytes"})
            case HostDied():
                return self._loss(session, error, verb)
            case EnvironmentRaised():
                return self._bug(session, error, verb)
        return error

    def break_off(self, session: ServedSession, error: BaseException, verb: str = "Step") -> CallError:
        """Return ENVIRONMENT_BUG for a Step that failed or whose transition cannot be sent. The session is lost.

        A MachineLost is no bug: it becomes SESSION_LOST.
        """
        if isinstance(error, MachineLost):
            return self._loss(session, error, verb)
        bug = EnvironmentRaised.from_exception(session.environment, error, intact=False)
        bug.__cause__ = error
        return self._bug(session, bug, verb)

    def break_off_large(self, session: ServedSession, size: int, limit: int, verb: str) -> CallError:
        """Return ENVIRONMENT_BUG for a Step or Reset that was executed, but whose reply has too many bytes to be sent.

        The session is lost, because its caller cannot know its state.
        """
        problem = f"what makes a reply of {size} bytes; this server sends at most {limit}, see --max-message-bytes"
        return self.break_off(session, BadResult("observe", problem), verb)

    def _loss(self, session: ServedSession, cause: Exception, verb: str) -> CallError:
        """Lose the session, log it, and return SESSION_LOST. The text of `cause` is the end of a sentence."""
        concurrency = session.environment.spec.concurrency
        host_kind = "thread" if concurrency is Concurrency.INLINE else concurrency.value
        session.lose(f"its environment {host_kind} {cause}")
        self._metrics.count_lost(session.environment.spec.id)
        logger.warning("session lost", extra={"session": session.id, "verb": verb, "cause": session.lost})
        return session.loss()

    def _bug(self, session: ServedSession, bug: EnvironmentRaised, verb: str) -> CallError:
        """Log a bug of an environment and return ENVIRONMENT_BUG. The session is lost if its state may be corrupt."""
        logger.error("environment bug: %s", bug, extra={"session": session.id, "verb": verb}, exc_info=bug.__cause__)
        if not bug.intact and not session.lost:
            session.lose(f"{bug} in {verb}")
            self._metrics.count_lost(session.environment.spec.id)
        return CallError(
            "ENVIRONMENT_BUG",
            f"{session.environment.spec.id}: {verb} raised {bug}" + ("" if bug.intact else "; the session is lost"),
            {"session": "intact" if bug.intact else "lost", "exception": bug.exception},
        )

    def as_call_error(self, error: Exception) -> CallError:
        """Return the contract's error for an exception. An unexpected exception is logged and becomes SERVER_BUG."""
        if isinstance(error, CallError):
            return error
        logger.error("server bug: %r", error, exc_info=error)
        return CallError("SERVER_BUG", f"the server has a bug: {type(error).__name__}; see its log")
