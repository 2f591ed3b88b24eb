"""Certificates, addresses, versions and waits."""

import asyncio
import random
from pathlib import Path

import grpc
import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from starpod.client import TLS, Fleet, Unreachable
from starpod.client.transport import Backoff, Transport, as_addresses, join_endpoint
from starpod.client.versions import parse_version, satisfies
from starpod.v1 import environment_pb2 as pb
from tests.client.fake_server import FakeServer


@pytest.fixture
def certificates(tmp_path: Path) -> dict[str, Path]:
    """An authority, a server's and a client's certificate and their keys, as files."""
    authority = trustme.CA()
    files = {"roots": tmp_path / "roots.pem"}
    authority.cert_pem.write_to_path(str(files["roots"]))
    for name, identity in (("server", "server.test"), ("client", "client.test")):
        leaf = authority.issue_cert(identity)
        files[name], files[f"{name}_key"] = tmp_path / f"{name}.pem", tmp_path / f"{name}.key"
        leaf.cert_chain_pems[0].write_to_path(str(files[name]))
        leaf.private_key_pem.write_to_path(str(files[f"{name}_key"]))
    return files


async def test_tls(certificates: dict[str, Path]) -> None:
    server = FakeServer()
    pair = (certificates["server_key"].read_bytes(), certificates["server"].read_bytes())
    server.credentials = grpc.ssl_server_credentials([pair])
    async with server:
        tls = TLS(roots=certificates["roots"], server_name="server.test")
        async with Fleet(server.address, tls=tls) as fleet:
            await fleet.open("walk-v1", seed=1)
        with pytest.raises(Unreachable):
            await Fleet(server.address, tls=TLS(roots=certificates["roots"], server_name="other.test")).start()
        with pytest.raises(Unreachable):
            await Fleet(server.address).start()


async def test_mutual_tls(certificates: dict[str, Path]) -> None:
    server = FakeServer()
    pair = (certificates["server_key"].read_bytes(), certificates["server"].read_bytes())
    server.credentials = grpc.ssl_server_credentials([pair], certificates["roots"].read_bytes(), True)
    async with server:
        roots = certificates["roots"]
        tls = TLS(roots, certificates["client"], certificates["client_key"], "server.test")
        async with Fleet(server.address, tls=tls) as fleet:
            await fleet.open("walk-v1", seed=1)
        with pytest.raises(Unreachable):
            await Fleet(server.address, tls=TLS(roots, server_name="server.test")).start()


def test_a_certificate_without_its_key_is_refused() -> None:
    with pytest.raises(ValueError, match="both or neither"):
        TLS(certificate="client.pem")


async def test_files_that_are_not_there_are_named() -> None:
    with pytest.raises(Unreachable, match=r"nowhere\.pem"):
        await Fleet("127.0.0.1:1", tls=TLS(roots="nowhere.pem")).start()
    with pytest.raises(Unreachable, match="no_token"):
        await Fleet("127.0.0.1:1", token=Path("no_token")).start()


async def test_files_that_cannot_be_used_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"neither PEM nor UTF-8: \xff")
    with pytest.raises(Unreachable, match="TLS files cannot be used"):
        await Fleet("127.0.0.1:1", tls=TLS(roots=file)).start()
    with pytest.raises(Unreachable, match=r"token .* cannot be read"):
        await Fleet("127.0.0.1:1", token=file).start()
    assert not caplog.records


def test_addresses() -> None:
    assert as_addresses("a:1, b:2") == ["a:1", "b:2"]
    assert as_addresses(["[::1]:3", "dns:///c:4"]) == ["[::1]:3", "dns:///c:4"]
    for wrong in ("", "host", "host:", "::1:50051", "host:port"):
        with pytest.raises(ValueError, match="address"):
            as_addresses(wrong)
    assert join_endpoint("0.0.0.0:5", "here") == "here:5"
    assert join_endpoint("[::]:5", "here") == "here:5"
    assert join_endpoint("there:5", "here") == "there:5"


VERSIONS = st.tuples(*[st.integers(0, 20)] * 3)


@given(version=VERSIONS, bound=VERSIONS)
def test_comparators_order_versions_by_number(version: tuple[int, ...], bound: tuple[int, ...]) -> None:
    written, other = (".".join(map(str, numbers)) for numbers in (version, bound))
    assert parse_version(written) == version
    assert satisfies(written, f">={other}") == (version >= bound)
    assert satisfies(written, f"<{other}") == (version < bound)
    assert satisfies(written, f">{other}") == (version > bound)
    assert satisfies(written, f"<={other}") == (version <= bound)
    assert satisfies(written, f"!={other}") == (version != bound)
    assert satisfies(written, other) == satisfies(written, f"== {other}") == (version == bound)
    assert satisfies(written, f">={other},<{other}") is False
    assert satisfies(written, "")


def test_short_and_wrong_versions() -> None:
    assert satisfies("1.10.0", ">=1, <2")
    assert not satisfies("2.0.0", ">=1,<2")
    for wrong in ("newest", "~1.2", ">=1.2.3.4", ">=", "1,,2"):
        with pytest.raises(ValueError, match="version"):
            satisfies("1.0.0", wrong)


@given(first=st.floats(0.001, 1), longest=st.floats(1, 10), count=st.integers(1, 30))
def test_waits_grow_and_stay_bounded(first: float, longest: float, count: int) -> None:
    backoff = Backoff(first, longest)
    for attempt in range(count):
        span = min(first * 2**attempt, longest)
        assert span / 2 <= backoff.wait() <= span
    backoff.reset()
    assert backoff.wait() <= first
    assert 20.0 <= backoff.wait(retry_after=20.0) <= 30.0


def test_waits_leave_the_programs_random_stream_alone() -> None:
    before = random.getstate()
    Backoff().wait(retry_after=1.0)
    assert random.getstate() == before


async def test_a_call_whose_connection_is_closed_is_unreachable_and_not_cancelled() -> None:
    silent = await asyncio.start_server(lambda reader, writer: reader.read(), "127.0.0.1", 0)
    host, port = silent.sockets[0].getsockname()
    wire = Transport().connect(f"{host}:{port}")
    call = asyncio.create_task(wire.unary("Describe", pb.DescribeRequest(), 30))
    await asyncio.sleep(0.05)
    await wire.close()
    with pytest.raises(Unreachable, match="closed during a call"):
        await call
    silent.close()
