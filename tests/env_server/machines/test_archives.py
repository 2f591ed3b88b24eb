"""Archives of artifacts, which an agent that is root may have written itself."""

import io
import tarfile
from pathlib import PurePosixPath

import pytest

from starpod.env_server.machines.machine import _without_links

SPARSE = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(2**40)}


def archive(*, pax: dict[str, str] | None = None, size: int = 512) -> bytes:
    """Return an archive with a file of 512 bytes, whose header may say something else."""
    entry, content = tarfile.TarInfo("out/a.txt"), b"0\n" + bytes(510)
    entry.size, entry.pax_headers = 512, pax or {}
    data = entry.tobuf(tarfile.PAX_FORMAT)
    if size != 512:
        entry.size = size
        data = entry.tobuf(tarfile.GNU_FORMAT)
    return data + content + bytes(2 * tarfile.BLOCKSIZE)


def names(data: bytes) -> list[str]:
    safe = _without_links(data, [PurePosixPath("out")])
    with tarfile.open(fileobj=io.BytesIO(safe)) as found:
        return found.getnames()


def test_a_size_that_the_archive_cannot_have_is_an_error() -> None:
    assert names(archive()) == ["out/a.txt"]
    # Unpacked, it would fill the server's memory, or be read for ever.
    for data in (archive(pax=SPARSE), archive(size=2**40), archive(size=-512)):
        with pytest.raises(tarfile.ReadError, match="impossible size"):
            names(data)
