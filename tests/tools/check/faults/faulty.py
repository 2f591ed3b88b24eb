"""The base of wrong servers: each breaks the reference server in one way and names the requirements that it breaks."""

from typing import ClassVar

from tests.tools.check.reference_server import ReferenceService


class Faulty(ReferenceService):
    """reported: requirements that the check must find broken. perhaps: others that timing may break as well."""

    reported: ClassVar[set[str]]
    perhaps: ClassVar[set[str]]

    def __init_subclass__(cls, reported: str, perhaps: str = "") -> None:
        cls.reported, cls.perhaps = set(reported.split()), set(perhaps.split())
