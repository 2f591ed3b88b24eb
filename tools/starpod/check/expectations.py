"""Comparisons for tests, and the exceptions for requirements that are not met or cannot be tested."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import Message
from google.protobuf.text_format import MessageToString

from starpod.check.refusal import Refusal
from starpod.v1 import environment_pb2 as pb
from starpod.v1.statuses import DOMAIN

ADVICE = {
    "BAD_ARGUMENT": "give_up",
    "UNKNOWN_ENVIRONMENT": "give_up",
    "UNKNOWN_VERSION": "give_up",
    "UNKNOWN_SESSION": "reopen",
    "OUT_OF_ORDER": "give_up",
    "EPISODE_OVER": "give_up",
    "KEY_REUSED": "give_up",
    "UNSUPPORTED": "give_up",
    "OVERLOADED": "retry",
    "INCOMPATIBLE_SNAPSHOT": "give_up",
    "UNAUTHENTICATED": "give_up",
}


class Unmet(Exception):
    """The server does not meet the requirement."""

    def __init__(self, expected: str, actual: str, fix: str = "") -> None:
        super().__init__(f"expected {expected}; got {actual}" + (f". To fix it: {fix}" if fix else ""))


class BrokenCall(Unmet):
    """A call failed because of a bug inside the environment or the server."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__("the call to be answered", str(refusal))


class NotShown(Exception):
    """The requirement cannot be tested on this server or environment, for lack of something the test needs."""


class TooBusy(NotShown):
    """This machine was too slow for a test with a time limit, so the test says nothing about the server."""

    def __init__(self) -> None:
        super().__init__("this machine is too busy to call in time")


def needs(available: object, reason: str) -> None:
    """Raise NotShown with this reason if something that a test needs is not available."""
    if not available:
        raise NotShown(reason)


def expect(condition: bool, expected: str, actual: object, fix: str = "") -> None:
    """Raise Unmet unless a condition is true.

    Args:
        expected: what was expected, as a noun phrase.
        actual: what was received.
        fix: what the server's author should do, in the imperative; empty: no advice.
    """
    if not condition:
        raise Unmet(expected, str(actual), fix)


def expect_same(expected: Message, actual: Message, what: str, fix: str = "") -> None:
    """Raise Unmet with the first lines that differ, unless the messages are equal.

    Args:
        what: name of the expected message in the error, such as "the same start".
        fix: as in `expect`.
    """
    if expected == actual:
        return
    left, right = (MessageToString(message).splitlines() for message in (expected, actual))
    length = max(len(left), len(right))
    for a, b in zip([*left, *[""] * (length - len(left))], [*right, *[""] * (length - len(right))], strict=True):
        if a != b:
            raise Unmet(f"{what} with `{a.strip()[:200] or 'nothing more'}`", f"`{b.strip()[:200] or 'nothing'}`", fix)
    raise Unmet(what, "another message", fix)


def expect_played(expected: Sequence[pb.Transition], actual: Sequence[pb.Transition], what: str, fix: str = "") -> None:
    """Raise Unmet with the first turn that differs, unless the transitions equal those of the undisturbed episode.

    `info` is not compared, because a server may report in it how long a turn took.

    Args:
        what: name of the played episode in the error, such as "the same episode again".
    """
    expect(len(expected) == len(actual), f"{len(expected)} turns in {what}", f"{len(actual)}", fix)
    for turn, (left, right) in enumerate(zip(expected, actual, strict=True)):
        expect_same(_without_info(left), _without_info(right), f"turn {turn} of {what}", fix)


def _without_info(transition: pb.Transition) -> pb.Transition:
    copy = pb.Transition()
    copy.CopyFrom(transition)
    copy.ClearField("info")
    return copy


def expect_informed(refusal: Refusal, reason: str, expected: str) -> None:
    """Raise Unmet unless the error has an ErrorInfo with this reason and the reason's advice in `ADVICE`.

    Args:
        reason: key of `ADVICE`, such as "OVERLOADED".
        expected: name of the refusal in the error.
    """
    if refusal.info is None:
        raise Unmet(f"{expected} with an ErrorInfo", f"{refusal} without one", "send it in grpc-status-details-bin")
    info = refusal.info
    expect(info.domain == DOMAIN, f"domain {DOMAIN!r}", repr(info.domain))
    expect(info.reason == reason, f"reason {reason!r}", repr(info.reason))
    advice = info.metadata.get("advice", "absent")
    expect(advice == ADVICE[reason], f"advice {ADVICE[reason]!r} with {reason}", repr(advice))
