"""vLLM over HTTP: against a strict stand-in on a real socket."""

import asyncio
import contextlib
import json
import math
import os
import re
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from starpod.trainer.engines.base import EngineError
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.engines.factory import build_engine
from starpod.trainer.engines.placement import BLOCK
from starpod.trainer.engines.vllm_remote import RemoteVllm
from starpod.trainer.engines.vllm_server import ServerGone
from starpod.trainer.models.policy import Policy
from starpod.trainer.parallel.ranks import Parallel
from tests.support import ROOT
from tests.trainer.engines import ranks_worker
from tests.trainer.engines.conformance import (
    MAX_CONTEXT,
    EngineConformance,
    ask,
    changed,
    hand_over,
    logprobs_under,
    make_policy,
)
from tests.trainer.engines.fake_core import FakeCore
from tests.trainer.engines.fake_server import FakeServer
from tests.trainer.engines.fake_vllm import put_modules
from tests.trainer.engines.ranks_worker import BUCKET, COMMAND, SEEDS
from tests.waiting import eventually


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starpod.trainer.engines.vllm_server.FIRST_WAIT", 0.001)


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starpod.trainer.engines.vllm_server.LOOK_SECONDS", 0.01)


def connect(*urls: str, **values: Any) -> RemoteVllm:
    engine = build_engine(EngineConfig(name="vllm_remote", urls=urls, **values), make_policy(), max_context=MAX_CONTEXT)
    assert isinstance(engine, RemoteVllm)
    return engine


def new_core(**settings: Any) -> FakeCore:
    """Return a core with a separate model that has the policy's weights."""
    return FakeCore(model=make_policy().model, **settings)


@asynccontextmanager
async def serving(*servers: FakeServer, **settings: Any) -> AsyncIterator[RemoteVllm]:
    """An engine over these servers."""
    async with AsyncExitStack() as stack:
        engine = connect(*[await stack.enter_async_context(server.serve()) for server in servers], **settings)
        yield engine
        await engine.close()


@pytest.fixture
def server() -> FakeServer:
    return FakeServer(new_core())


@pytest.fixture
def stuck(server: FakeServer) -> FakeServer:
    """A server that ends no reply."""
    server.core.tick = asyncio.Event().wait
    return server


class TestRemoteVllm(EngineConformance):
    @pytest.fixture(params=[False, True], ids=["keeps", "refuses"])
    def refuses(self, request: pytest.FixtureRequest) -> bool:
        """Whether vLLM refuses requests between pause and resume, as newer versions do, or keeps them."""
        return bool(request.param)

    @pytest.fixture
    async def engine(self, refuses: bool) -> AsyncIterator[RemoteVllm]:
        async with serving(FakeServer(new_core(refuses=refuses))) as engine:
            yield engine


async def test_a_hand_over_and_conversations_on_two_servers(policy: Policy, tmp_path: Path) -> None:
    """All get the weights, and each conversation stays on one of them."""
    servers = [FakeServer(new_core()) for _ in range(2)]
    async with serving(*servers, handover_folder=str(tmp_path)) as engine:
        for version in (1, 2):
            await engine.pause()
            await engine.load(version, changed(policy))
            # The present ones stay, for a server that is started anew.
            assert [path.parent.name for path in tmp_path.rglob("*.safetensors")] == [f"weights-{version}"]
            await engine.resume()
        for turn in range(3):
            texts = [[1 + index] * BLOCK + [1] * turn for index in range(12)]
            talks = [replace(ask(text, tokens=1), conversation=f"{index}") for index, text in enumerate(texts)]
            await asyncio.gather(*map(engine.generate, talks))
    assert not list(tmp_path.iterdir())
    assert [server.core.log for server in servers] == [["pause", "reload", "resume"] * 2] * 2
    first, second = (set(server.sessions) for server in servers)
    assert first and second and not first & second
    assert len(first | second) == 12


@pytest.mark.slow
@pytest.mark.minutes
async def test_of_two_ranks_the_first_one_drives_the_server_and_both_sample(tmp_path: Path) -> None:
    """Each gets replies of the weights that both hold; neither held more of them than was to be."""
    server = FakeServer(FakeCore(model=make_policy(head=32).model))
    shared, out = tmp_path / "shared", tmp_path / "results.json"
    shared.mkdir()
    async with server.serve() as url:
        module = ["-m", ranks_worker.__name__]
        command = [sys.executable, *COMMAND, "--log-dir", str(tmp_path / "logs"), *module, url, str(shared), str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environment)
        assert await asyncio.wait_for(process.wait(), 240) == 0
    assert server.core.log == ["pause", "reload", "resume"] * 2
    assert not list(shared.iterdir())
    ranks = json.loads(out.read_text())
    assert len(ranks) == 2
    models = [changed(make_policy(head=32), seed) for seed in SEEDS]
    for rank, result in enumerate(ranks):
        assert [versions for *_, versions in result["replies"]] == [[1] * 8] * 2 + [[2] * 8] * 2
        for prompt, tokens, logprobs, versions in result["replies"]:
            expected = logprobs_under(models[versions[0] - 1], prompt, tokens, 1.0)
            assert logprobs == pytest.approx(expected, abs=1e-3)
        # The first rank fills a file at a time, and the others keep nothing.
        assert result["most"] <= result["largest"] + (BUCKET if rank == 0 else 0), result
    total = sum(parameter.nbytes for parameter in models[0].parameters())
    assert max(result["most"] for result in ranks) < total / 2
    assert ranks[0]["replies"][1] == ranks[1]["replies"][1]


@pytest.mark.parametrize("fault", [500, 503, 0], ids=["error", "overloaded", "cut"])
async def test_failed_calls_are_made_again(server: FakeServer, fault: int) -> None:
    async with serving(server, retries=2) as engine:
        undisturbed = await engine.generate(ask([1, 2, 3]))
        server.asked, server.faults = 0, [fault] * 2
        assert await engine.generate(ask([1, 2, 3])) == undisturbed
        assert server.asked == 3
        # Not for ever.
        server.asked, server.faults = 0, [fault] * 3
        with pytest.raises(EngineError, match="refused /inference/v1/generate" if fault else "is gone"):
            await engine.generate(ask([1, 2, 3]))
        assert server.asked == 3


def with_choice(**fields: Any) -> Callable[[Any], Any]:
    """A lie about the first choice: a function gets what is true."""

    def lie(reply: Any) -> Any:
        (choice,) = reply["choices"]
        changed_fields = {name: value(choice) if callable(value) else value for name, value in fields.items()}
        return {**reply, "choices": [{**choice, **changed_fields}]}

    return lie


def with_id(token: Any) -> Callable[[Any], Any]:
    return with_choice(token_ids=lambda choice: [*choice["token_ids"][:-1], token])


def with_logprob(value: Any) -> Callable[[Any], Any]:
    return with_choice(logprobs=lambda choice: {"content": [*choice["logprobs"]["content"][:-1], {"logprob": value}]})


def longer(choice: Any) -> list[int]:
    return [*choice["token_ids"], 1]


STOP = 7
LIES: list[tuple[Callable[[Any], Any], str]] = [
    *((with_id(token), f"the token id {token!r}, which is not among") for token in (10**6, -1, 5.5, "5", None, True)),
    *(
        (with_logprob(value), f"the log-probability {value!r:.50}.*, which is not a finite")
        for value in (math.nan, math.inf, -math.inf, 0.5, "-1", None, False, -(10**400))
    ),
    (with_choice(token_ids=longer), "8 log-probabilities for 9 tokens"),
    (with_choice(token_ids=longer, logprobs={"content": [{"logprob": -1}] * 9}), "9 tokens, although .* limit is 8"),
    (with_choice(token_ids=[STOP, *[1] * 7]), "tokens after a stop token"),
    *(
        (with_choice(finish_reason=reason), "the finish reason .* without a stop token")
        for reason in ("stop", "error", None, 7, ["stop"])
    ),
    (with_choice(token_ids=[], logprobs=None), "the finish reason 'length' of 0 tokens"),
    (with_choice(token_ids="5" * 8), "token ids '55555555', which are no list"),
    (with_choice(finish_reason="abort"), "an aborted reply, although nothing was paused"),
    (with_choice(logprobs={"content": 5}), "no reply of tokens"),
    (
        lambda reply: {**reply, "usage": {"prompt_tokens_details": {"cached_tokens": "3"}}},
        "'3' as its number of cached",
    ),
    *((lambda _, reply=reply: reply, "no reply of tokens") for reply in ([], {}, {"choices": []}, 5, {"choices": 5})),
    (lambda reply: b"null", "no reply of tokens"),
    (lambda reply: b"<html>", "'<html>', not with JSON"),
    (lambda reply: b"\xff", "not with JSON"),
    (lambda reply: b"[" * 100_000, "recursion"),
]


async def test_a_reply_that_cannot_be_true_is_asked_for_again_and_then_an_error(server: FakeServer) -> None:
    async with serving(server, retries=2) as engine:
        request = replace(ask([1, 2, 3]), stop=frozenset([STOP]), seed=3)
        true_reply = await engine.generate(request)
        assert true_reply.finish == "length"
        for lie, said in LIES:
            server.asked, server.lie = 0, lie
            with pytest.raises(EngineError, match=rf"^the vLLM server at http://127\.0\.0\.1:\d+ answered .*{said}"):
                await engine.generate(request)
            assert server.asked == 3, said
        lies = iter([lie for lie, _ in LIES[:2]])
        server.lie = lambda reply: next(lies, lambda true: true)(reply)
        assert await engine.generate(request) == true_reply
        assert engine.stats().requests == 2


@pytest.mark.parametrize(
    "info", [None, [], {"vllm_config": 5}, {"vllm_config": {"model_config": {"max_model_len": "9"}}}]
)
async def test_a_configuration_that_cannot_be_read_is_an_error(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, info: Any
) -> None:
    answer = server._answer

    async def lying(method: str, path: str, *rest: Any) -> tuple[int, Any]:
        return (200, json.dumps(info).encode()) if path == "/server_info" else await answer(method, path, *rest)

    monkeypatch.setattr(server, "_answer", lying)
    async with serving(server, retries=0) as engine:
        with pytest.raises(EngineError, match="/server_info with"):
            await engine.generate(ask([1, 2]))


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize("faults", [[0, 0], []], ids=["in calls", "idle"])
async def test_a_restarted_server_gets_the_weights_again(
    policy: Policy, server: FakeServer, faults: list[int], restarts: int
) -> None:
    """The server would otherwise sample from its initial weights without an error."""
    async with serving(server, restarts=restarts) as engine:
        await hand_over(engine, 5, changed(policy))
        requests = [ask([1, 2, index]) for index in range(6)]
        expected = [await engine.generate(request) for request in requests]
        server.faults = faults.copy()
        server.core, server.instance = new_core(), "second"
        replies = await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)
        if not restarts:
            assert all(isinstance(reply, EngineError) and "was restarted" in str(reply) for reply in replies)
        else:
            assert replies == expected
        assert engine.stats().restarts == restarts


async def test_a_server_that_is_replaced_before_a_hand_over_is_not_lost(policy: Policy, server: FakeServer) -> None:
    async with serving(server, restarts=0) as engine:
        for version, instance in ((1, "second"), (2, "third")):
            await hand_over(engine, version, changed(policy))
            expected = await engine.generate(ask([1, 2]))
            server.core, server.instance = new_core(), instance
        await hand_over(engine, 3, changed(policy))
        assert (await engine.generate(ask([1, 2]))).tokens == expected.tokens


async def test_a_restarted_server_continues_if_none_got_weights(server: FakeServer) -> None:
    """A server behind a gateway has its initial weights, however often it is restarted."""
    async with serving(server, restarts=0) as engine:
        expected = await engine.generate(ask([1, 2, 3]))
        for instance in ("second", "third"):
            server.faults = [0]
            server.core, server.instance = new_core(), instance
            assert await engine.generate(ask([1, 2, 3])) == expected


async def test_of_two_servers_one_may_be_lost(policy: Policy) -> None:
    """The other one samples what it was to sample, and gets the next weights."""
    other = FakeServer(new_core())
    async with other.serve() as url:
        async with FakeServer(new_core()).serve() as lost:
            engine = connect(lost, url, retries=0, restarts=1)
            await engine.generate(ask([1, 2]))
        replies = await asyncio.gather(*(engine.generate(ask([1, index])) for index in range(4)))
        assert len(other.sessions) == len(replies)
        await hand_over(engine, 1, changed(policy))
        assert other.core.log == ["pause", "reload", "resume"]
        assert engine.stats().restarts == 1
        await engine.close()


class Rank(Parallel):
    """One of two ranks in this process, which exchange objects in threads."""

    def __init__(self, rank: int, meeting: threading.Barrier, items: dict[int, Any]) -> None:
        super().__init__(rank, 2)
        self._meeting, self._items = meeting, items

    def gather_objects(self, item: Any) -> list[Any]:
        self._items[self.rank] = item
        self._meeting.wait()
        items = [self._items[rank] for rank in range(2)]
        self._meeting.wait()
        return items

    def barrier(self) -> None:
        self._meeting.wait()

    def broadcast_object(self, item: Any) -> Any:
        return item


@pytest.mark.parametrize("others", [0, 1])
async def test_a_server_that_one_rank_has_dropped_is_dropped_by_all(
    policy: Policy, tmp_path: Path, others: int
) -> None:
    """The first rank hands it no weights any more, although the other ones might still reach it."""
    meeting, items = threading.Barrier(2, timeout=60), dict[int, Any]()
    servers = [FakeServer(new_core()) for _ in range(2)]
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(server.serve()) for server in servers]
        config = EngineConfig(name="vllm_remote", urls=tuple(urls), handover_folder=str(tmp_path))
        engines = [
            RemoteVllm(config, max_context=MAX_CONTEXT, vocabulary=policy.vocabulary, parallel=Rank(*rank))
            for rank in ((0, meeting, items), (1, meeting, items))
        ]
        for engine in engines:
            stack.push_async_callback(engine.close)
        await asyncio.gather(*(hand_over(engine, 1, changed(policy)) for engine in engines))
        await engines[0]._drop(engines[0]._servers[0], ServerGone("gone"))
        for _ in range(others):
            await engines[1]._drop(engines[1]._servers[0], ServerGone("gone"))
        calls = [hand_over(engine, 2, changed(policy)) for engine in engines]
        if others:
            for result in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(result, EngineError) and "all ranks reach" in str(result)
            return
        await asyncio.gather(*calls)
        for engine in engines:
            replies = await asyncio.gather(*(engine.generate(ask([1, index])) for index in range(4)))
            assert all(set(reply.versions) == {2} for reply in replies)
    assert not servers[0].sessions and len(servers[1].sessions) == 8
    assert servers[1].core.log.count("reload") == 2


async def test_a_server_that_is_gone_is_an_error(server: FakeServer) -> None:
    async with server.serve() as url:
        engine = connect(url, retries=1)
        await engine.generate(ask([1, 2]))
    for call in (engine.generate(ask([1, 2])), engine.pause()):
        with pytest.raises(EngineError, match=f"{url} is gone"):
            await call
    await engine.close()


@pytest.mark.parametrize("what", ["hung", "core_hung"])
async def test_a_server_that_hangs_is_given_up_and_not_asked_again(
    stuck: FakeServer, quick_looks: None, what: str
) -> None:
    async with serving(stuck, health_timeout=0.2) as engine:
        calls = [asyncio.ensure_future(engine.generate(ask([1, index]))) for index in range(3)]
        await eventually(lambda: len(stuck.core.running) == 3)
        setattr(stuck, what, True)
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, EngineError)
            assert re.fullmatch(
                r"the vLLM server at http://127\.0\.0\.1:\d+ hangs: it has answered no health check for 0\.2 s "
                r"\(engine\.health_timeout\)",
                str(result),
            )
        assert stuck.asked == 3
        with pytest.raises(EngineError, match="hangs"):
            await engine.pause()


async def test_a_slow_server_is_waited_for(server: FakeServer, quick_looks: None) -> None:
    """The engine waits while the server answers health checks, however long a reply takes."""
    released = asyncio.Event()
    server.core.tick = released.wait
    async with serving(server, health_timeout=0.2) as engine:
        call = asyncio.ensure_future(engine.generate(ask([1, 2])))
        await eventually(lambda: server.checks > 40)
        assert not call.done() and server.asked == 1
        released.set()
        assert len((await call).tokens) == 8


async def test_a_server_that_ends_no_reply_is_an_error(stuck: FakeServer, quick_looks: None) -> None:
    """A reply may be lost on its way; asking again would cost the same time once more."""
    async with serving(stuck, timeout=0.2) as engine:
        with pytest.raises(EngineError, match=r"alive, .* 0\.2 s \(engine\.timeout\)"):
            await engine.generate(ask([1, 2]))
        assert stuck.asked == 1


async def test_a_cancelled_call_stops_the_server(stuck: FakeServer) -> None:
    async with serving(stuck) as engine:
        call = asyncio.ensure_future(engine.generate(ask([1, 2])))
        await eventually(lambda: stuck.core.running)
        call.cancel()
        await eventually(lambda: not stuck.core.running)


@pytest.mark.parametrize(
    ("settings", "call", "said"),
    [
        ({"dev": False}, "generate", "VLLM_SERVER_DEV_MODE=1"),
        ({"dev": False}, "pause", "VLLM_SERVER_DEV_MODE=1"),
        ({"scale_out": False}, "pause", r"returns no token ids: start it as: .*--enable-scale-out"),
        ({"logprobs_mode": "raw_logprobs"}, "generate", "raw_logprobs"),
        ({"max_model_len": MAX_CONTEXT - 1}, "generate", f"--max-model-len {MAX_CONTEXT}"),
    ],
)
async def test_a_server_that_was_started_otherwise_is_refused(settings: dict[str, Any], call: str, said: str) -> None:
    async with serving(FakeServer(new_core(), **settings)) as engine:
        with pytest.raises(EngineError, match=said):
            await (engine.pause() if call == "pause" else engine.generate(ask([1, 2])))


async def test_a_folder_that_the_server_cannot_see_is_explained(
    policy: Policy, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    reload = server.core.reload
    monkeypatch.setattr(server.core, "reload", lambda folder: reload(Path("/elsewhere") / folder.name))
    async with serving(server, retries=0) as engine:
        with pytest.raises(EngineError, match=r"engine\.handover_folder"):
            await hand_over(engine, 1, policy.model)


async def test_two_engines_of_one_server_do_not_meet(policy: Policy, server: FakeServer) -> None:
    """Ids of requests and salts of caches are each engine's own: a second run, or a run that was started again."""
    async with server.serve() as url:
        engines = [connect(url), connect(url)]
        for engine in engines:
            await hand_over(engine, 1, changed(policy, seed=len(server.core.log)))
            await engine.generate(ask([1, 2, 3]))
        await asyncio.gather(*(engine.generate(ask([1, 2, 3])) for engine in engines[1:] * 2))
        for engine in engines:
            await engine.close()


def test_a_key_that_cannot_be_read_is_explained(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="api_key_file"):
        connect("http://127.0.0.1:1", api_key_file=str(tmp_path / "none"))


# --- from GPU to GPU --------------------------------------------------------------------------------------------------


class Group:
    """A fake of the trainer's communicator."""

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
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.distributed": {},
        "vllm.distributed.device_communicators": {},
        "vllm.distributed.device_communicators.pynccl": {"PyNcclCommunicator": Group},
        "vllm.distributed.utils": {"StatelessProcessGroup": Group},
    }
    put_modules(monkeypatch, contents)
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
    monkeypatch.setattr("starpod.trainer.engines.vllm_nccl.device_of", lambda model: torch.device("cuda:1"))


NCCL = {"handover": "nccl", "nccl_address": "10.0.0.1:29500"}


async def test_weights_are_broadcast_in_the_announced_order(policy: Policy, nccl: None) -> None:
    servers = [FakeServer(new_core()) for _ in range(2)]
    async with serving(*servers, **NCCL) as engine:
        for version in (1, 2):
            await hand_over(engine, version, policy.model)
    update = ["start", "update", "finish"]
    assert servers[0].core.log == ["pause", "init", *update, "resume", "pause", *update, "resume"]
    # Two workers on each server, after the trainer.
    assert [server.inits[0]["rank_offset"] for server in servers] == [1, 3]
    assert Group.made == [{"host": "10.0.0.1", "port": 29500, "rank": 0, "world_size": 5}]
    parameters = dict(policy.model.named_parameters())
    assert servers[1].updates[0] == {
        "names": list(parameters),
        "shapes": [list(parameter.shape) for parameter in parameters.values()],
        "dtype_names": ["float32"] * len(parameters),
    }
    assert len(Group.sent) == 2 * len(parameters)
    assert all(map(torch.equal, Group.sent, parameters.values()))


async def test_a_failed_broadcast_is_not_tried_again(policy: Policy, server: FakeServer, nccl: None) -> None:
    """The others that take part in it would be left waiting."""
    server.faulty, server.faults = "/update_weights", [500]
    async with serving(server, **NCCL) as engine:
        with pytest.raises(EngineError, match="refused /update_weights"):
            await hand_over(engine, 1, policy.model)
    assert server.asked == 1


async def test_nccl_needs_a_gpu(policy: Policy, server: FakeServer) -> None:
    async with serving(server, **NCCL) as engine:
        with pytest.raises(EngineError, match="on the CPU"):
            await hand_over(engine, 1, policy.model)
