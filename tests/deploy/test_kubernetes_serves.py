"""The command line of a rendered pod, run here: with its certificates, its tokens, its probes and its drain."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import trustme
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from starpod.client import TLS, Fleet, Unauthenticated
from starpod.env_server.sessions.seal import SnapshotSeal
from tests.deploy.manifests import containers, find, of_kind, read, words
from tests.support import ServerProcess, held_port

TOKEN = "a-token-of-the-trainer"
KEY = "of the servers alone, 32 characters"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with the files that Secrets mount into the pods of secure.yaml and of trainer-vllm.yaml."""
    manifests = read("secure")
    names = next(c["spec"]["dnsNames"] for c in of_kind(manifests, "Certificate") if "dnsNames" in c["spec"])
    authority = trustme.CA()
    for folder, certificate in (("server", authority.issue_cert(*names)), ("client", authority.issue_cert("run"))):
        tls = tmp_path / folder / "tls"
        tls.mkdir(parents=True)
        certificate.private_key_pem.write_to_path(str(tls / "tls.key"))
        certificate.cert_chain_pems[0].write_to_path(str(tls / "tls.crt"))
        authority.cert_pem.write_to_path(str(tls / "ca.crt"))
        tokens = tmp_path / folder / "tokens"
        tokens.mkdir()
        (tokens / ("tokens" if folder == "server" else "token")).write_text(f"{TOKEN}\n")
    keys = tmp_path / "server" / "snapshots"
    keys.mkdir()
    (keys / "keys").write_text(f"{KEY}\n")
    return tmp_path


@pytest.fixture
def server(files: Path) -> Iterator[ServerProcess]:
    _, container, _ = next(containers(read("secure")))
    given = [word.replace("/etc/starpod", str(files / "server")) for word in words(container)[1:]]
    # Later options count: a free port of this machine each, and an environment that starts at once.
    with held_port() as health, held_port() as metrics:
        ports = [f"--health-port={health}", f"--metrics-port={metrics}", "--host=127.0.0.1"]
        process = ServerProcess([sys.executable, "-m", "starpod.cli.main", *given, "bandit", *ports])
        with contextlib.closing(process):
            yield process


async def test_a_rendered_pod_serves_is_probed_and_drains(
    server: ServerProcess, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = yaml.safe_load(find(read("trainer-vllm"), "ConfigMap")["data"]["config.yaml"])["environment"]
    name = config["addresses"][0].removeprefix("dns:///").partition(":")[0]

    async def resolve(host: str, port: int, **_: object) -> list[object]:
        assert host == name
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    ca, certificate, key, token = (
        Path(config[field].replace("/etc/starpod", str(files / "client")))
        for field in ("ca", "certificate", "key", "token_file")
    )
    address = f"dns:///{name}:{server.port}"
    with pytest.raises(Unauthenticated):
        async with Fleet(address, tls=TLS(ca, certificate, key)):
            pass
    health_port = next(word.partition("=")[2] for word in reversed(server._command) if "--health-port" in word)
    async with (
        Fleet(address, tls=TLS(ca, certificate, key), token=token) as fleet,
        grpc.aio.insecure_channel(f"127.0.0.1:{health_port}") as channel,
    ):
        probe = health_pb2_grpc.HealthStub(channel)
        assert (await probe.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        (session,) = await fleet.open("bandit-v1", seed=1)
        snapshot = await session.snapshot()
        seal = SnapshotSeal(files / "server" / "snapshots" / "keys")
        assert seal.unseal(snapshot.environment_id, snapshot.environment_version, snapshot.state) != snapshot.state
        os.kill(server.pid, signal.SIGTERM)
        async with asyncio.timeout(30):
            while (await probe.Check(health_pb2.HealthCheckRequest())).status == 1:
                await asyncio.sleep(0.02)
        # A draining pod is not ready, but its episode continues. The pod stops after the last episode.
        await session.step("neither arm")
        await session.close()
        status = await asyncio.to_thread(server.process.wait, 30)
    assert status == 0
