"""vLLM in process: against a stand-in whose signatures are those of the real package."""

import asyncio
import dataclasses
import inspect
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from benchmarks.training import gpu_check
from starpod.trainer.engines import vllm_core, vllm_local, vllm_worker
from starpod.trainer.engines.base import EngineError, UpdateLock
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.engines.factory import build_engine
from starpod.trainer.engines.vllm_local import LocalVllm
from starpod.trainer.engines.vllm_worker import WeightReceiver
from starpod.trainer.engines.weights import weights_of
from starpod.trainer.models.config import ModelConfig
from starpod.trainer.models.policy import Policy, build_policy
from starpod.trainer.parallel.ranks import Parallel
from tests.support import gone
from tests.trainer.engines import fake_vllm, vllm_facts
from tests.trainer.engines.conformance import (
    MAX_CONTEXT,
    TINY,
    EngineConformance,
    ask,
    changed,
    hand_over,
    logprobs_under,
    make_policy,
)
from tests.trainer.engines.fake_vllm import AsyncLLM
from tests.waiting import eventually


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch)


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_core, "LOOK_SECONDS", 0.01)


def build(policy: Policy | None = None, **settings: Any) -> Any:
    return build_engine(EngineConfig(name="vllm", **settings), policy or make_policy(), max_context=MAX_CONTEXT)


@asynccontextmanager
async def an_engine(policy: Policy | None = None, **settings: Any) -> AsyncIterator[tuple[Any, Any]]:
    """An engine, and the stand-in that it started."""
    engine = build(policy, **settings)
    try:
        yield engine, AsyncLLM.made[-1]
    finally:
        await engine.close()


async def never(*_: Any, **__: Any) -> Any:
    await asyncio.Event().wait()


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("out of memory")


def dying(llm: Any) -> Any:
    """A call in which the core dies."""

    async def die(*_: Any, **__: Any) -> Any:
        llm.errored = True
        raise RuntimeError("EngineDeadError")

    return die


class TestLocalVllm(EngineConformance):
    @pytest.fixture
    async def engine(self, patched: None, policy: Policy) -> AsyncIterator[LocalVllm]:
        async with an_engine(policy) as (engine, _):
            yield engine


async def test_it_is_started_for_training(patched: None, tmp_path: Path) -> None:
    """Weights arrive through the folder and are deleted from it."""
    settings = {"slots": 7, "dtype": "bfloat16", "gpu_memory_fraction": 0.3, "handover_folder": str(tmp_path)}
    async with an_engine(**settings) as (engine, llm):
        arguments = llm.arguments
        assert arguments.logprobs_mode == "processed_logprobs"
        assert (arguments.max_model_len, arguments.max_num_seqs) == (MAX_CONTEXT, 7)
        assert (arguments.dtype, arguments.gpu_memory_utilization) == ("bfloat16", 0.3)
        # A forked core cannot use a GPU that the trainer has asked for.
        assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
        assert llm.program is vllm_worker.run_core
        # Its sockets are in a folder of their own, which is deleted with it. Programs that start later use another one.
        sockets = Path(llm.sockets)
        assert "VLLM_RPC_BASE_PATH" not in os.environ
        assert sockets.is_dir() and sockets.parent == Path(tempfile.gettempdir())
        assert fake_vllm.EngineCoreProc.run_engine_core is not vllm_worker.run_core
        for version in (1, 2):
            await hand_over(engine, version, changed(make_policy(), version))
        assert llm.core.log == ["pause", "reload", "resume"] * 2
        assert not list(tmp_path.rglob("*.safetensors"))
        # What reads replies ends before the core: it would report an engine that died.
        llm.output_handler = reading = asyncio.create_task(never())
        cancelled = []
        llm.shutdown = lambda timeout=None: cancelled.append(reading.cancelling())
    assert cancelled == [1]
    assert tmp_path.exists() and not list(tmp_path.iterdir()) and not sockets.exists()


@pytest.mark.parametrize(("asked", "got"), [("auto", "float32"), ("bfloat16", "bfloat16")])
async def test_the_weights_that_it_is_given_are_in_its_own_dtype(patched: None, asked: str, got: str) -> None:
    written = set()

    def reload(folder: Path) -> None:
        with safe_open(folder / "model-00000.safetensors", "pt") as file:
            written.update(str(file.get_tensor(name).dtype) for name in file.keys())  # noqa: SIM118 - it is no mapping

    async with an_engine(dtype=asked) as (engine, llm):
        assert llm.arguments.dtype == got  # vLLM's own `auto` takes bfloat16 for a model in float32
        llm.core.reload = reload
        await hand_over(engine, 1, make_policy().model)
    assert written == {f"torch.{got}"}


async def test_a_failed_hand_over_says_so(patched: None) -> None:
    async with an_engine() as (engine, llm):
        llm.core.reload = fail
        with pytest.raises(EngineError, match=r"version 4 .*out of memory"):
            await hand_over(engine, 4, make_policy().model)


async def test_a_core_that_dies_unheard_or_hangs_is_an_engine_error(patched: None, quick_looks: None) -> None:
    """Calls of a dead core may wait for ever: the engine looks by itself, and bounds control calls."""
    async with an_engine(timeout=0.05, restarts=0) as (engine, llm):
        llm.core.sample = never
        call = asyncio.ensure_future(engine.generate(ask([1, 2])))
        await eventually(lambda: llm.checks > 3)
        assert not call.done()
        llm.errored = True
        with pytest.raises(EngineError, match="engine core died"):
            await call
        llm.errored = False
        llm.core.sample = dying(llm)
        with pytest.raises(EngineError, match="EngineDeadError"):
            await engine.generate(ask([1, 2]))
        llm.errored = False
        llm.pause_generation = never
        with pytest.raises(EngineError, match=r"pause within 0.05 s \(engine.timeout\)"):
            await engine.pause()


async def test_a_dead_core_is_started_again_with_the_weights_that_it_had(patched: None, quick_looks: None) -> None:
    """Replies go on from the tokens they have, as after a pause."""
    policy = make_policy()
    async with an_engine(policy, restarts=1) as (engine, first):
        await hand_over(engine, 3, changed(policy, 3))
        requests = [ask([1, index]) for index in range(4)]
        expected = [await engine.generate(request) for request in requests]
        first.core.sample = never
        calls = [asyncio.ensure_future(engine.generate(request)) for request in requests]
        await eventually(lambda: first.checks)
        first.errored = True
        assert await asyncio.gather(*calls) == expected
        assert first.shut_down and len(AsyncLLM.made) == 2 and engine.stats().restarts == 1
        AsyncLLM.made[1].errored = True
        AsyncLLM.made[1].core.sample = never  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="engine core died"):
            await engine.generate(ask([1, 2]))


async def test_a_core_that_dies_during_an_update_is_started_with_all_of_it(patched: None, quick_looks: None) -> None:
    policy, updates = make_policy(), UpdateLock()
    config = EngineConfig(name="vllm", restarts=1)
    engine = build_engine(config, policy, max_context=MAX_CONTEXT, updates=updates)
    first = AsyncLLM.made[-1]
    await hand_over(engine, 3, policy.model)
    first.core.sample = never  # type: ignore[method-assign]
    call = asyncio.ensure_future(engine.generate(ask([1, 2])))
    await eventually(lambda: first.checks)
    async with updates:
        first.errored = True
        await eventually(lambda: first.shut_down)
        policy.model.load_state_dict(changed(policy).state_dict())
        updates.version = 4
    reply = await call
    assert reply.versions == [4] * len(reply.tokens)
    assert reply.logprobs == pytest.approx(logprobs_under(policy.model, [1, 2], reply.tokens, 1.0), abs=1e-3)
    await engine.close()


async def test_a_core_that_hangs_is_lost_and_a_slow_one_is_waited_for(
    patched: None, quick_looks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A core answers between two steps. During a long step, it computes and does not answer."""
    looks, working, released = 0, True, asyncio.Event()

    def is_working(_: vllm_core.VllmCore) -> bool:
        nonlocal looks
        looks += 1
        return working

    monkeypatch.setattr(vllm_core.VllmCore, "is_working", is_working)
    async with an_engine(health_timeout=0.1, restarts=0) as (engine, llm):
        llm.core.tick = released.wait
        call = asyncio.ensure_future(engine.generate(ask([1, 2])))
        await eventually(lambda: llm.checks > 20)
        llm.hung = True
        await eventually(lambda: looks > 20)
        assert not call.done()
        working = False
        with pytest.raises(EngineError, match=r"core hangs: .* 0.1 s \(engine.health_t"):
            await call
        llm.hung = False
        released.set()
        assert len((await engine.generate(ask([1, 2]))).tokens) == 8


def spin() -> None:
    while True:
        pass


async def test_a_core_works_where_it_computes_and_none_of_its_processes_is_stopped(
    patched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_core, "LOOK_SECONDS", 0.0)
    cores = [multiprocessing.Process(target=work, name=f"EngineCore_{work.__name__}") for work in (signal.pause, spin)]
    async with an_engine() as (engine, _):

        async def worked() -> bool:
            looks = []
            for _ in range(12):
                await asyncio.sleep(0.01)
                looks.append(engine._core.is_working())
            return any(looks)

        assert not await worked()
        for core in cores:
            core.start()
        idle, busy = cores
        try:
            await eventually(engine._core.is_working)
            assert idle.pid is not None
            os.kill(idle.pid, signal.SIGSTOP)
            assert not await worked()
            os.kill(idle.pid, signal.SIGCONT)
            await eventually(engine._core.is_working)
            busy.kill()
            busy.join()
            engine._core.is_working()
            assert not await worked()
        finally:
            for core in cores:
                core.kill()
                core.join()


@pytest.mark.parametrize("verb", ["pause_generation", "collective_rpc", "resume_generation", "wake_up"])
async def test_a_core_that_dies_in_a_hand_over_gets_the_new_weights(
    verb: str, patched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    policy = make_policy()
    async with an_engine(policy, sleep=verb == "wake_up", handover="disk") as (engine, first):
        monkeypatch.setattr(first, verb, dying(first))
        await hand_over(engine, 1, other := changed(policy, 1))
        reply = await engine.generate(ask([1, 2]))
        assert reply.logprobs == pytest.approx(logprobs_under(other, [1, 2], reply.tokens, 1.0), abs=1e-3)
        _, second = AsyncLLM.made
        # A core that is lost at the end starts with the new weights.
        assert ("reload" in second.core.log) == (verb != "resume_generation")
        assert ("sleep" in second.core.log) == (verb == "wake_up")


async def test_calls_that_reach_a_paused_engine_are_made_again(patched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that crosses the pause on its way would wait for a resume that waits for it."""
    monkeypatch.setattr("starpod.trainer.engines.served.GRACE_SECONDS", 0.01)
    async with an_engine() as (engine, llm):
        for llm.core.refuses in (False, True):
            call = asyncio.ensure_future(engine.generate(ask([1, 2])))
            llm.core.pause("abort")  # before the call has begun
            await asyncio.sleep(0)
            await engine.pause()
            await engine.resume()
            assert len((await call).tokens) == 8


async def test_more_calls_than_slots_are_counted_as_waiting(patched: None) -> None:
    async with an_engine(slots=2) as (engine, _):
        calls = [asyncio.ensure_future(engine.generate(ask([1, index]))) for index in range(5)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        stats = engine.stats()
        assert (stats.slots, stats.running, stats.waiting) == (2, 2, 3)
        await asyncio.gather(*calls)


# --- what it is refused with ------------------------------------------------------------------------------------------


def test_without_vllm_one_sentence_says_what_to_install() -> None:
    if installed():
        pytest.skip("vllm is installed")
    with pytest.raises(EngineError, match=r"pip install '\.\[vllm\]'") as raised:
        build()
    assert "\n" not in str(raised.value)


def test_what_cannot_run_is_refused_at_once(patched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig.model_validate({"tiny": TINY | {"image": {"rows": 2, "columns": 2}}})
    eyes = build_policy(config, texts=["Up"], critic="none", seed=1)
    with pytest.raises(EngineError, match=r"engine.name to torch"):
        build(eyes)
    with pytest.raises(EngineError, match="on the CPU"):
        build(handover="ipc")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(EngineError, match="GPU"):
        build()


# --- by CUDA IPC, without a GPU: everything but the memory is real ---------------------------------------------------


def rebuild(weight: torch.Tensor, *arguments: int) -> torch.Tensor:
    """The sixth one was the trainer's number of the GPU."""
    assert arguments == (1, 2, 3, 4, 5, 3, 7, 8)
    return weight


class Worker(WeightReceiver):
    """A worker on GPU 3, which keeps what it gets."""

    device = torch.device("cuda:3")
    weights: dict[str, Any]

    def reload_weights(self, weights_iterator: Any = None, weights_path: Any = None) -> None:
        self.weights = dict(weights_iterator)


@pytest.fixture
def gpus(patched: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The UUIDs of GPUs that torch believes in; the policy is on the second one. Handles are the tensors themselves."""
    uuids = {"cuda:1": "GPU-a", "cuda:3": "GPU-a"}

    def pack(weights: Any) -> bytes:
        return pickle.dumps([(name, (rebuild, (weight, *range(1, 9)))) for name, weight in weights])

    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("torch.cuda.ipc_collect", lambda: None)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid=uuids[str(device)]))
    monkeypatch.setattr(vllm_local, "device_of", lambda model: torch.device("cuda:1"))
    monkeypatch.setattr(vllm_worker, "pack_handles", pack)
    return uuids


async def load_on_a_gpu(model: torch.nn.Module, **settings: Any) -> Any:
    """The stand-in, after one hand-over."""
    async with an_engine(**settings) as (engine, llm):
        llm.worker = Worker()
        await hand_over(engine, 1, model)
    return llm


async def test_weights_on_one_gpu_come_in_buckets(gpus: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights made for a bucket, such as merged adapters, are freed before the next bucket is made."""
    alive = most = 0

    def made(model: torch.nn.Module, dtype: torch.dtype) -> Any:
        nonlocal alive, most

        def gone(size: int) -> None:
            nonlocal alive
            alive -= size

        for name, weight in weights_of(model, dtype):
            copy = weight.clone()
            weakref.finalize(copy, gone, copy.nbytes)
            alive += copy.nbytes
            most = max(most, alive)
            yield name, copy
            del copy

    monkeypatch.setattr(vllm_local, "weights_of", made)
    monkeypatch.setattr(vllm_worker, "BUCKET_BYTES", 4_000)
    model = changed(make_policy(), 3)
    wanted = dict(weights_of(model))
    llm = await load_on_a_gpu(model)
    assert list(llm.worker.weights) == list(wanted)
    assert all(torch.equal(llm.worker.weights[name], weight) for name, weight in wanted.items())
    largest = max(weight.nbytes for weight in wanted.values())
    assert most <= 4_000 + largest < sum(weight.nbytes for weight in wanted.values())
    assert llm.core.log == ["pause", "resume"], "not through the disk"


async def test_a_core_that_sleeps_wakes_for_the_hand_over(
    gpus: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[int] = []
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: emptied.append(len(AsyncLLM.made[-1].core.log)))
    llm = await load_on_a_gpu(make_policy().model, sleep=True)
    assert llm.core.log == ["pause", "sleep", "wake", "resume"]
    assert emptied == [2], "what the update left is freed before the engine takes it"
    assert not (await load_on_a_gpu(make_policy().model)).arguments.enable_sleep_mode


@pytest.mark.parametrize("handover", ["auto", "ipc"])
async def test_weights_of_another_gpu_go_through_the_disk_or_are_refused(gpus: dict[str, str], handover: str) -> None:
    gpus["cuda:3"] = "GPU-b"
    model = changed(make_policy(), 3)
    if handover == "auto":
        assert (await load_on_a_gpu(model)).core.log == ["pause", "reload", "resume"]
    else:
        with pytest.raises(EngineError, match=r"on GPU-a, .* on GPU-b"):
            await load_on_a_gpu(model, handover="ipc")


@pytest.mark.parametrize("side", ["trainer", "worker"])
async def test_a_hand_over_that_fails_on_one_side_ends_on_both(
    gpus: dict[str, str], monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    monkeypatch.setattr(*((vllm_worker, "pack_handles", fail) if side == "trainer" else (Worker, "_opened", fail)))
    with pytest.raises(EngineError, match=r"version 1 .*out of memory"):
        await load_on_a_gpu(make_policy().model, health_timeout=1e9)


async def test_weights_that_other_ranks_gather_too_are_gathered_to_the_end_if_the_worker_is_lost() -> None:
    weights = iter([("a", torch.ones(1)), ("b", torch.ones(1))])
    async with vllm_worker.sent_by_handles(weights, Parallel(rank=0, world=2)):
        pass
    assert next(weights, None) is None


def test_the_core_of_a_rank_sees_the_gpus_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    for seen, count, expected in (("4,7,2,3", 1, "7"), (None, 1, "1"), ("4,7,2,3", 2, "7,2"), (None, 3, "1,2,3")):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if seen:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
        with vllm_worker.only_gpus(torch.device("cuda:1"), count):
            assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == seen


def test_the_gpu_number_is_the_argument_that_is_replaced() -> None:
    assert list(inspect.signature(rebuild_cuda_tensor).parameters)[6] == "storage_device"


# --- the engine core's process ----------------------------------------------------------------------------------------


CORE = """
import os, signal, subprocess
class EngineCoreProc:
    @staticmethod
    def run_engine_core(name, *, dp_rank):
        worker = subprocess.Popen(["sleep", "600"])
        print(name, dp_rank, os.getpid(), worker.pid, flush=True)
        signal.sigwait([signal.SIGUSR1])
"""
TRAINER = """
import multiprocessing, time
from starpod.trainer.engines.vllm_worker import own_session
from vllm.v1.engine.core import EngineCoreProc
if __name__ == "__main__":
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        with own_session():
            context.Process(target=EngineCoreProc.run_engine_core, args=(method,), kwargs={"dp_rank": 3}).start()
    time.sleep(600)
"""


def test_cores_are_in_sessions_of_their_own_and_end_with_their_trainer(tmp_path: Path) -> None:
    """Signals for the trainer's group do not reach them, those for them do; its SIGKILL leaves none of them behind."""
    core = tmp_path / "vllm" / "v1" / "engine" / "core.py"
    core.parent.mkdir(parents=True)
    core.write_text(CORE)
    (tmp_path / "trainer.py").write_text(TRAINER)
    trainer = subprocess.Popen(
        [sys.executable, str(tmp_path / "trainer.py")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    left = []
    try:
        assert trainer.stdout is not None
        for line in (trainer.stdout.readline(), trainer.stdout.readline()):
            method, rank, *pids = line.split()
            pid, worker = map(int, pids)
            left += [pid, worker]
            assert method in ("fork", "spawn") and rank == "3"
            assert os.getsid(pid) == os.getsid(worker) == pid != os.getsid(trainer.pid)
            assert signal.SIGTERM not in blocked(pid) and signal.SIGINT not in blocked(pid)
    finally:
        trainer.kill()
        trainer.wait()
    assert all(map(gone, left)) and len(left) == 4


def blocked(pid: int) -> set[int]:
    """Signals that a process keeps waiting."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigBlk"))
    mask = int(line.split()[1], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


# --- signatures -------------------------------------------------------------------------------------------------------


def installed() -> bool:
    try:
        import vllm  # noqa: F401
    except ImportError:
        return False
    return True


def test_the_stand_in_takes_what_the_package_takes() -> None:
    for name, recorded in vllm_facts.SIGNATURES.items():
        if name.startswith("AsyncLLM."):
            positional, _, keywords = recorded.removeprefix("self ").partition("|")
            parameters = inspect.signature(getattr(AsyncLLM, name.removeprefix("AsyncLLM."))).parameters
            mine = [each for each in parameters if each != "self"]
            order = [each for each in mine if each in positional.split()]
            assert order == positional.split()[: len(order)], name
            assert set(mine) <= {*positional.split(), *keywords.split()}, name


@pytest.mark.vllm
def test_the_installed_package_has_the_recorded_signatures() -> None:
    from vllm import SamplingParams
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM as RealLLM
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    owners = {
        "AsyncLLM": RealLLM,
        "EngineCoreProc": EngineCoreProc,
        # The worker's own hands its arguments on to it.
        "Worker": GPUModelRunner,
        "StatelessProcessGroup": StatelessProcessGroup,
        "PyNcclCommunicator": PyNcclCommunicator,
    }
    for name, recorded in vllm_facts.SIGNATURES.items():
        owner, _, method = name.partition(".")
        vllm_facts.check_signature(getattr(owners[owner], method), recorded)
    arguments = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert arguments >= vllm_facts.ENGINE_ARGUMENTS
    assert set(SamplingParams.__struct_fields__) >= vllm_facts.SAMPLING_PARAMETERS


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_core_that_sleeps_leaves_its_memory_to_the_policy() -> None:
    pytest.importorskip("vllm")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    policy = make_policy(head=32)
    policy.model.to("cuda")
    settings = {"name": "vllm", "slots": 8, "dtype": "float32", "gpu_memory_fraction": 0.3, "sleep": True}
    engine = build_engine(EngineConfig.model_validate(settings), policy, max_context=MAX_CONTEXT)
    try:
        free, total = torch.cuda.mem_get_info()
        await engine.pause()
        assert torch.cuda.mem_get_info()[0] - free > 0.2 * total
        await engine.load(1, other := changed(policy, 1))
        await engine.resume()
        assert torch.cuda.mem_get_info()[0] - free < 0.1 * total
        reply = await engine.generate(ask([5, 9]))
        assert reply.logprobs == pytest.approx(logprobs_under(other, [5, 9], reply.tokens, 1.0), abs=0.25)
    finally:
        await engine.close()


@pytest.mark.parametrize(("layer", "told"), [("LlamaRotaryEmbedding", 0), ("ParallelLMHead", 0), ("RMSNorm", 1)])
def test_layers_that_got_no_weights_are_news_where_they_have_some(
    caplog: pytest.LogCaptureFixture, layer: str, told: int
) -> None:
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").warning("%s: Failed to load weights", layer)
    assert len(caplog.records) == told


def test_without_a_gpu_the_check_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    with pytest.raises(SystemExit) as raised:
        gpu_check.main()
    assert raised.value.code == 2
    assert tuple(capsys.readouterr()) == ("", "gpu-check needs a GPU, and torch sees none on this machine\n")
