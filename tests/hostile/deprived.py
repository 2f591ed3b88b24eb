"""Villains on systems that lack something: what an author's code does when it is loaded, no sandbox can see."""

from __future__ import annotations

import dataclasses

from starpod.env_server.sandbox import landlock, namespaces, sandbox
from tests.hostile.villain import Villain


class WithoutLandlock(Villain):
    """Finds itself on a system without Landlock."""

    spec = dataclasses.replace(Villain.spec, id="without_landlock-v1")

    @classmethod
    def prepare(cls) -> None:
        landlock.confine = lambda *_: ([], "Landlock: Function not implemented")  # type: ignore[assignment]


class WithoutNamespaces(Villain):
    """A server without namespaces and separate users, as in most containers without root."""

    spec = dataclasses.replace(Villain.spec, id="without_namespaces-v1")

    @classmethod
    def prepare(cls) -> None:
        refused = "Operation not permitted"
        namespaces.own_user_namespace = lambda: refused  # type: ignore[assignment]
        namespaces.own_root = lambda paths: refused  # type: ignore[assignment]
        sandbox._problem_of_reading = lambda user: refused  # type: ignore[assignment]


class OwnUser(Villain):
    """Finds itself where every user can read Python."""

    spec = dataclasses.replace(Villain.spec, id="own_user-v1")

    @classmethod
    def prepare(cls) -> None:
        sandbox._problem_of_reading = lambda user: ""  # type: ignore[assignment]
