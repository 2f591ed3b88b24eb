"""The base of wrong servers: each breaks the reference server in one way and names the requirements that it breaks."""

from typing import ClassVar

from tests.tools.check.reference_server import ReferenceService


class Faulty(ReferenceService):
    """reported: requirements that the check must find broken. perhaps: others that timing may break as well."""

    reported: ClassVar[tuple[str, ...]]
    perhaps: ClassVar[tuple[str, ...]] = ()
