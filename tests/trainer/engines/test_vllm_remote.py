"""vLLM over HTTP: against a strict stand-in on a real socket."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from starpod.trainer.engines.base import EngineError
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.engines.factory import build_engine
from starpod.trainer.engines.vllm_remote import RemoteVllm
from starpod.trainer.models.policy import Policy
from tests.trainer.engines.conformance import MAX_CONTEXT, EngineConformance, ask, changed, make_policy
from tests.trainer.engines.fake_core import FakeCore
from tests.trainer.engines.fake_server import FakeServer
from tests.trainer.engines.ranks import check_two_ranks
from tests.waiting import eventually


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starpod.trainer.engines.vllm_remote.FIRST_WAIT", 0.001)


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starpod.trainer.engines.vllm_remote.LOOK_SECONDS", 0.01)


def copy_of(policy: Policy) -> Any:
    """A model of the server's own, with the same weights."""
    import copy

    return copy.deepcopy(policy.model)


def connect(*urls: str, **values: Any) -> RemoteVllm:
    engine = build_engine(EngineConfig(name="vllm_remote", urls=urls, **values), make_policy(), max_context=MAX_CONTEXT)
    assert isinstance(engine, RemoteVllm)
    return engine


class TestRemoteVllm(EngineConformance):
    @pytest.fixture(params=[False, True], ids=["keeps", "refuses"])
    def refuses(self, request: pytest.FixtureRequest) -> bool:
        """What becomes of requests between pause and resume: older and newer versions."""
        return bool(request.param)

    @pytest.fixture
    async def engine(self, policy: Policy, refuses: bool) -> AsyncIterator[RemoteVllm]:
        core = FakeCore(model=copy_of(policy), refuses=refuses)
        async with FakeServer(core).serve() as url:
            engine = connect(url)
            yield engine
            await engine.close()


@pytest.fixture
def policy() -> Policy:
    return make_policy()


async def test_the_order_of_a_hand_over(policy: Policy, tmp_path: Path) -> None:
    servers = [FakeServer(FakeCore(model=copy_of(policy))) for _ in range(2)]
    async with servers[0].serve() as one, servers[1].serve() as two:
        engine = connect(one, two, handover_folder=str(tmp_path))
        for version in (1, 2):
            await engine.pause()
            await engine.load(version, changed(policy))
            # The present ones stay, for a server that is started anew.
            assert [path.parent.name for path in tmp_path.rglob("*.safetensors")] == [f"weights-{version}"]
            await engine.resume()
        await engine.close()
    assert not list(tmp_path.iterdir())
    assert [server.core.log for server in servers] == [["pause", "reload", "resume"] * 2] * 2


@pytest.mark.slow
@pytest.mark.minutes
async def test_of_two_ranks_the_first_one_drives_the_server_and_both_sample(tmp_path: Path) -> None:
    server = FakeServer(FakeCore(model=copy_of(make_policy(head=32))))
    async with server.serve() as url:
        await check_two_ranks(url, tmp_path)
    assert server.core.log == ["pause", "reload", "resume"] * 2


async def test_a_conversation_stays_on_one_server(policy: Policy) -> None:
    servers = [FakeServer(FakeCore(model=copy_of(policy))) for _ in range(2)]
    async with servers[0].serve() as one, servers[1].serve() as two:
        engine = connect(one, two)
        for turn in range(3):
            await asyncio.gather(
                *(
                    engine.generate(replace(ask([1, 2], tokens=1, seed=turn), conversation=f"talk {index}"))
                    for index in range(12)
                )
            )
        await engine.close()
    first, second = (set(server.sessions) for server in servers)
    assert first and second and not first & second
    assert len(first | second) == 12


@pytest.mark.parametrize("fault", [500, 503, 0], ids=["error", "overloaded", "cut"])
async def test_failed_calls_are_made_again(policy: Policy, fault: int) -> None:
    server = FakeServer(FakeCore(model=copy_of(policy)))
    async with server.serve() as url:
        engine = connect(url)
        undisturbed = await engine.generate(ask([1, 2, 3]))
        server.asked = 0
        server.faults = [fault, fault]
        reply = await engine.generate(ask([1, 2, 3]))
        await engine.close()
    assert server.asked == 3
    assert reply.tokens == undisturbed.tokens


@pytest.mark.parametrize("restarts", [0, 1])
async def test_a_server_that_was_started_anew_gets_the_weights_again(policy: Policy, restarts: int) -> None:
    """Else it would go on to sample from those that it was started with, as if nothing had happened."""
    server = FakeServer(FakeCore(model=copy_of(policy)))
    async with server.serve() as url:
        engine = connect(url, restarts=restarts)
        await engine.pause()
        await engine.load(5, changed(policy))
        await engine.resume()
        requests = [ask([1, 2, index]) for index in range(6)]
        expected = [await engine.generate(request) for request in requests]
        server.faults = [0, 0]
        server.core, server.instance = FakeCore(model=copy_of(policy)), "second"
        replies = await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)
        if not restarts:
            assert all(isinstance(reply, EngineError) and "started anew" in str(reply) for reply in replies)
        else:
            assert replies == expected
        assert engine.stats().restarts == restarts
        await engine.close()


async def test_a_server_that_was_started_anew_goes_on_where_none_got_weights(policy: Policy) -> None:
    """As behind a gateway: it has those that it was started with, however often that happens."""
    server = FakeServer(FakeCore(model=copy_of(policy)))
    async with server.serve() as url:
        engine = connect(url, restarts=0)
        expected = await engine.generate(ask([1, 2, 3]))
        for instance in ("second", "third"):
            server.faults = [0]
            server.core, server.instance = FakeCore(model=copy_of(policy)), instance
            assert await engine.generate(ask([1, 2, 3])) == expected
        await engine.close()


async def test_a_server_that_keeps_failing_is_an_error(policy: Policy) -> None:
    server = FakeServer(FakeCore(model=copy_of(policy)))
    server.faults = [500] * 10
    async with server.serve() as url:
        engine = connect(url, retries=2)
        with pytest.raises(EngineError, match="refused /inference/v1/generate"):
            await engine.generate(ask([1, 2, 3]))
        await engine.close()
    assert server.asked == 3


async def test_a_server_that_is_gone_is_an_error(policy: Policy) -> None:
    async with FakeServer(FakeCore(model=copy_of(policy))).serve() as url:
        engine = connect(url, retries=1)
        await engine.generate(ask([1, 2]))
    with pytest.raises(EngineError, match=f"{url} is gone"):
        await engine.generate(ask([1, 2]))
    with pytest.raises(EngineError, match=f"{url} is gone"):
        await engine.pause()
    await engine.close()


@pytest.mark.parametrize("what", ["hung", "core_hung"])
async def test_a_server_that_hangs_is_given_up_and_not_asked_again(
    policy: Policy, quick_looks: None, what: str
) -> None:
    core = FakeCore(model=copy_of(policy))
    core.tick = lambda: asyncio.sleep(3600)
    server = FakeServer(core)
    async with server.serve() as url:
        engine = connect(url, health_timeout=0.2)
        calls = [asyncio.ensure_future(engine.generate(ask([1, index]))) for index in range(3)]
        await eventually(lambda: len(core.running) == 3)
        setattr(server, what, True)
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, EngineError)
            assert str(result) == (
                f"the vLLM server at {url} hangs: it has answered no health check for 0.2 s (engine.health_timeout)"
            )
        assert server.asked == 3
        with pytest.raises(EngineError, match="hangs"):
            await engine.pause()
        await engine.close()


async def test_a_slow_server_is_waited_for(policy: Policy, quick_looks: None) -> None:
    """As long as it answers health checks, however long a reply takes."""
    core, released = FakeCore(model=copy_of(policy)), asyncio.Event()
    core.tick = released.wait
    server = FakeServer(core)
    async with server.serve() as url:
        engine = connect(url, health_timeout=0.2)
        call = asyncio.ensure_future(engine.generate(ask([1, 2])))
        await eventually(lambda: server.checks > 40)
        assert not call.done() and server.asked == 1
        released.set()
        assert len((await call).tokens) == 8
        await engine.close()


async def test_a_server_that_ends_no_reply_is_an_error(policy: Policy, quick_looks: None) -> None:
    """A reply may be lost on its way; asking again would cost the same time once more."""
    core = FakeCore(model=copy_of(policy))
    core.tick = lambda: asyncio.sleep(3600)
    server = FakeServer(core)
    async with server.serve() as url:
        engine = connect(url, timeout=0.2)
        with pytest.raises(EngineError, match=r"lives, but brought no call to its end in 0\.2 s \(engine\.timeout\)"):
            await engine.generate(ask([1, 2]))
        await engine.close()
    assert server.asked == 1


async def test_a_cancelled_call_stops_the_server(policy: Policy) -> None:
    core = FakeCore(model=copy_of(policy))
    core.tick = lambda: asyncio.sleep(3600)
    async with FakeServer(core).serve() as url:
        engine = connect(url)
        call = asyncio.ensure_future(engine.generate(ask([1, 2])))
        await eventually(lambda: core.running)
        call.cancel()
        await eventually(lambda: not core.running)
        await engine.close()


@pytest.mark.parametrize(
    ("server", "call", "said"),
    [
        ({"dev": False}, "generate", "VLLM_SERVER_DEV_MODE=1"),
        ({"dev": False}, "pause", "VLLM_SERVER_DEV_MODE=1"),
        ({"scale_out": False}, "pause", r"samples no token ids: start it as: .*--enable-scale-out"),
        ({"logprobs_mode": "raw_logprobs"}, "generate", "raw_logprobs"),
        ({"max_model_len": MAX_CONTEXT - 1}, "generate", f"--max-model-len {MAX_CONTEXT}"),
    ],
)
async def test_a_server_that_was_started_otherwise_is_refused(
    policy: Policy, server: dict[str, Any], call: str, said: str
) -> None:
    async with FakeServer(FakeCore(model=copy_of(policy)), **server).serve() as url:
        engine = connect(url)
        with pytest.raises(EngineError, match=said):
            await (engine.pause() if call == "pause" else engine.generate(ask([1, 2])))
        await engine.close()


async def test_a_folder_that_the_server_cannot_see_is_explained(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = FakeCore(model=copy_of(policy))
    reload = core.reload
    monkeypatch.setattr(core, "reload", lambda folder: reload(Path("/elsewhere") / folder.name))
    async with FakeServer(core).serve() as url:
        engine = connect(url, retries=0)
        await engine.pause()
        with pytest.raises(EngineError, match=r"engine\.handover_folder"):
            await engine.load(1, policy.model)
        await engine.close()


# --- from GPU to GPU --------------------------------------------------------------------------------------------------


class Group:
    """What the trainer does with its communicator."""

    made: list[dict[str, Any]] = []  # noqa: RUF012 - the test looks at it
    sent: list[torch.Tensor] = []  # noqa: RUF012

    @staticmethod
    def create(host: str, port: int, rank: int, world_size: int) -> str:
        Group.made.append({"host": host, "port": port, "rank": rank, "world_size": world_size})
        return "group"

    def __init__(self, group: Any, device: Any) -> None:
        assert group == "group"

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        assert src == 0 and tensor.is_contiguous()
        assert stream == "the stream of cuda:1", "the weights are made on another one"
        Group.sent.append(tensor.clone())


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for vllm's communicator and torch's GPU."""
    contents = {
        "vllm": {},
        "vllm.distributed": {},
        "vllm.distributed.device_communicators": {},
        "vllm.distributed.device_communicators.pynccl": {"PyNcclCommunicator": Group},
        "vllm.distributed.utils": {"StatelessProcessGroup": Group},
    }
    for name, values in contents.items():
        module = ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)
    devices = ["cuda:0"]  # a thread begins on the first GPU

    @contextlib.contextmanager
    def on(device: torch.device) -> Iterator[None]:
        devices.append(str(device))
        yield
        devices.pop()

    monkeypatch.setattr("torch.cuda.device", on)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: f"the stream of {devices[-1]}")
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr(Group, "made", [])
    monkeypatch.setattr(Group, "sent", [])
    monkeypatch.setattr("starpod.trainer.engines.vllm_remote.device_of", lambda model: torch.device("cuda:1"))


@pytest.mark.parametrize("new_updates", [True, False], ids=["start and finish", "update alone"])
async def test_weights_are_broadcast_in_the_announced_order(policy: Policy, nccl: None, new_updates: bool) -> None:
    servers = [FakeServer(FakeCore(model=copy_of(policy)), new_updates=new_updates) for _ in range(2)]
    async with servers[0].serve() as one, servers[1].serve() as two:
        engine = connect(one, two, handover="nccl", nccl_address="10.0.0.1:29500")
        model = policy.model
        await engine.pause()
        await engine.load(1, model)
        await engine.resume()
        await engine.pause()
        await engine.load(2, model)
        await engine.resume()
        await engine.close()
    update = ["start", "update", "finish"] if new_updates else ["update"]
    assert servers[0].core.log == ["pause", "init", *update, "resume", "pause", *update, "resume"]
    # Two workers on each server, after the trainer.
    assert [server.inits[0]["rank_offset"] for server in servers] == [1, 3]
    assert Group.made == [{"host": "10.0.0.1", "port": 29500, "rank": 0, "world_size": 5}]
    announced = servers[1].updates[0]
    parameters = dict(model.named_parameters())
    assert announced["names"] == list(parameters)
    assert announced["shapes"] == [list(parameter.shape) for parameter in parameters.values()]
    assert set(announced["dtype_names"]) == {"float32"}
    assert len(Group.sent) == 2 * len(parameters)
    for sent, parameter in zip(Group.sent, parameters.values(), strict=False):
        assert torch.equal(sent, parameter)


async def test_a_failed_broadcast_is_not_tried_again(policy: Policy, nccl: None) -> None:
    """The others that take part in it would be left waiting."""
    server = FakeServer(FakeCore(model=copy_of(policy)))
    server.faulty, server.faults = "/update_weights", [500]
    async with server.serve() as url:
        engine = connect(url, handover="nccl", nccl_address="127.0.0.1:29500")
        await engine.pause()
        with pytest.raises(EngineError, match="refused /update_weights"):
            await engine.load(1, policy.model)
        await engine.close()
    assert server.asked == 1


async def test_nccl_needs_a_gpu(policy: Policy) -> None:
    async with FakeServer(FakeCore(model=copy_of(policy))).serve() as url:
        engine = connect(url, handover="nccl", nccl_address="127.0.0.1:29500")
        await engine.pause()
        with pytest.raises(EngineError, match="on the CPU"):
            await engine.load(1, policy.model)
        await engine.close()


async def test_two_engines_of_one_server_do_not_meet(policy: Policy) -> None:
    """Ids of requests and salts of caches are each engine's own: a second run, or a run that was started again."""
    core = FakeCore(model=copy_of(policy))
    async with FakeServer(core).serve() as url:
        engines = [connect(url), connect(url)]
        for engine in engines:
            await engine.pause()
            await engine.load(1, changed(policy, seed=len(core.log)))
            await engine.resume()
            await engine.generate(ask([1, 2, 3]))
        await asyncio.gather(*(engine.generate(ask([1, 2, 3])) for engine in engines[1:] * 2))
        for engine in engines:
            await engine.close()


def test_a_key_that_cannot_be_read_is_explained(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="api_key_file"):
        connect("http://127.0.0.1:1", api_key_file=str(tmp_path / "none"))
