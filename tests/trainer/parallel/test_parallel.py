"""Several ranks train as one process does."""

import asyncio
import copy
import json
import os
import subprocess
import sys
import threading
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from starpod.trainer.checkpoints.checkpoint import load_checkpoint
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.parallel import launch, sharding
from starpod.trainer.parallel.ranks import Parallel, RankFailed, RankRefused
from starpod.trainer.parallel.threads import MOST_IDLE
from tests.forks import run_forks, run_ranks
from tests.trainer.parallel import worker
from tests.trainer.parallel.worker import adapt, make_policy, team, train


@given(st.lists(st.integers(), max_size=30), st.integers(1, 9), st.integers(1, 3))
def test_shares_are_even_and_in_order_and_go_to_ranks_with_an_engine(items, engines, per_engine):
    ranks = [Parallel(rank, engines * per_engine, per_engine=per_engine) for rank in range(engines * per_engine)]
    shares = [rank.split(items) for rank in ranks]
    assert list(chain.from_iterable(shares)) == items
    sizes = [len(share) for rank, share in zip(ranks, shares, strict=True) if rank.has_engine]
    assert len(sizes) == engines and max(sizes) - min(sizes) <= 1
    for group in items:
        (player,) = (rank for rank in ranks if rank.plays(group))
        assert player.has_engine


@given(st.integers(0, 30), st.integers(1, 9))
def test_all_ranks_make_as_many_passes_and_count_each_block_once(blocks, world):
    passes = [list(Parallel(rank, world).share(range(blocks))) for rank in range(world)]
    assert len({len(each) for each in passes}) == 1
    assert sorted(block for each in passes for block, mine in each if mine) == list(range(blocks))


@pytest.mark.parametrize(("status", "expected"), [(2, 2), (3, 1)])
def test_a_wrong_configuration_is_told_by_the_exit_status_of_all_ranks(status, expected):
    ranks = ["--standalone", "--nproc-per-node=2", "--no-python", "sh", "-c", f"exit {status}"]
    done = subprocess.run([sys.executable, "-m", launch.__name__, *ranks], capture_output=True, text=True)
    assert done.returncode == expected, done.stderr


@pytest.mark.parametrize(("error", "kind"), [(ConfigError("no walk"), RankRefused), (OSError("no walk"), RankFailed)])
def test_an_input_error_of_one_rank_is_one_of_all(monkeypatch, error, kind):
    def fail():
        raise error

    fine = (None, "", False)
    sent = []
    monkeypatch.setattr(Parallel, "gather_objects", lambda self, item: (sent.append(item), [item, fine])[1])
    with pytest.raises(RankFailed, match="rank 0: no walk") as first:
        Parallel(0, 2).do_together(fail)
    monkeypatch.setattr(Parallel, "gather_objects", lambda self, item: [*sent, item])
    with pytest.raises(RankFailed, match="rank 0: no walk") as second:
        Parallel(1, 2).do_together(lambda: "played")
    assert first.type is second.type is kind


def test_alone_there_is_no_process_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    parallel = Parallel.start("cpu")
    assert (parallel.rank, parallel.world, parallel.device, parallel.is_main) == (0, 1, torch.device("cpu"), True)
    assert not torch.distributed.is_initialized()
    model = torch.nn.Linear(2, 2)
    sharding.shard(model, parallel.world, parallel.device)
    assert type(model) is torch.nn.Linear
    assert parallel.gather_objects(3) == [3]
    assert parallel.broadcast_object("x") == "x"
    parallel.barrier()
    parallel.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_device_that_is_not_there_is_refused():
    for device in ("cuda", "cuda:1"):
        with pytest.raises(ValueError, match=r"torch sees: 0.*device=cpu"):
            Parallel.start(device)


def test_saving_an_optimiser_that_has_not_stepped_changes_nothing():
    model = make_policy()
    optimizer = torch.optim.AdamW(model.parameters())
    state = sharding.optimizer_state(model, optimizer)
    assert state["state"] == {}
    assert not optimizer.state
    before = copy.deepcopy(optimizer.state_dict())
    sharding.load_optimizer_state(model, optimizer, state)
    assert optimizer.state_dict() == before


def test_the_state_of_other_parameters_is_refused():
    model = make_policy()
    state = sharding.optimizer_state(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match="does not fit this one's 2 in 1"):
        sharding.load_optimizer_state(model, torch.optim.AdamW(model.critic_parameters()), state)


def assert_close(theirs: dict[str, Any], ours: dict[str, Any], rtol: float, atol: float) -> None:
    """Check that weights are close, by name."""
    assert theirs.keys() == ours.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(torch.tensor(theirs[name]), torch.tensor(weight), rtol=rtol, atol=atol)


@pytest.mark.slow
def test_two_ranks_do_what_one_does(tmp_path):
    alone = train(Parallel(), tmp_path / "one")
    make_policy().save(tmp_path / "base")
    run_ranks(worker.main, tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    # The norm is that of the sum over the ranks: their mean would give half of it.
    expected = [pytest.approx(metrics, rel=1e-3, abs=1e-5) for metrics in alone["metrics"]]
    assert (results["whole"]["metrics"], results["resumed"]["metrics"]) == (expected, expected[2:])
    onward = train(Parallel(), tmp_path / "unused", tmp_path / "two" / "step-00000002")
    for result in (results["whole"], results["resumed"], onward):
        assert_close(result["weights"], alone["weights"], 1e-3, 1e-5)
    for dtype, tolerance in (("float32", 1e-4), ("bfloat16", 0.05)):
        mine, theirs = adapt(Parallel(), tmp_path / "base", dtype), results[dtype]
        assert theirs["norm"] == pytest.approx(mine["norm"], rel=10 * tolerance)
        assert theirs["gradients"] == pytest.approx(mine["gradients"], rel=10 * tolerance)
        assert theirs["moments"] == mine["moments"]
        assert all("lora_" in name or name.startswith("critic.head") for name in theirs["weights"])
        for kind in ("weights", "handed"):
            assert_close(theirs[kind], mine[kind], tolerance, tolerance)
    mine, theirs = team(Parallel()), results["team"]
    assert theirs["metrics"] == pytest.approx(mine["metrics"], rel=1e-3, abs=1e-5)
    assert_close(theirs["weights"], mine["weights"], 1e-3, 1e-5)
    one, two = (load_checkpoint(tmp_path / name / "step-00000002") for name in ("one", "two"))
    assert {(name, key) for name in one.tensors for key in one.tensors[name]} == {
        (name, key) for name in two.tensors for key in two.tensors[name]
    }
    assert one.state == two.state
    assert all("rank 1: no space left; " in told for told in results["full"]), results["full"]
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == ["latest", "step-00000002"]


async def test_a_thread_that_is_through_has_the_next_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh thread for each piece of work made the process grow in each update."""
    waiting: list[object] = []
    monkeypatch.setattr("starpod.trainer.parallel.threads._idle", waiting)
    parallel = Parallel()
    ran_in = {await parallel.in_thread(threading.get_native_id) for _ in range(20)}
    assert len(ran_in) == 1

    def fail():
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        await parallel.in_thread(fail)
    assert await parallel.in_thread(threading.get_native_id) in ran_in
    # None waits for another's work.
    meeting = threading.Barrier(9, timeout=60)
    assert sorted(await asyncio.gather(*(parallel.in_thread(meeting.wait) for _ in range(9)))) == [*range(9)]
    assert MOST_IDLE <= len(waiting) < 9, "the others have ended"


async def test_a_program_ends_without_its_threads_only_while_they_work(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []
    monkeypatch.setattr("os._exit", ended.append)
    monkeypatch.setattr("starpod.trainer.parallel.threads.under_way", set())
    parallel, go_on = Parallel(), threading.Event()
    work = asyncio.create_task(parallel.in_thread(go_on.wait, 60))
    await asyncio.sleep(0)
    parallel.end(3)
    go_on.set()
    assert await work
    parallel.end(4)
    assert ended == [3]


def use_a_thread_then_fork() -> None:
    asyncio.run(Parallel().in_thread(int))
    if os.fork() == 0:
        asyncio.run(Parallel().in_thread(int))
        os._exit(7)
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))


def test_a_forked_process_has_threads_of_its_own():
    assert run_forks(1, use_a_thread_then_fork) == [7]


async def test_threads_compute_on_the_ranks_own_gpu(monkeypatch):
    """Check the calls to torch and the threads that make them, since there is no GPU."""
    told = []

    def set_device(device):
        told.append((torch.cuda._utils._get_device_index(device), threading.get_ident()))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    # torch takes no device without an index.
    assert Parallel.start("auto").device == torch.device("cuda:0")
    parallel = Parallel.start("cuda:1")
    ran_in = await parallel.in_thread(threading.get_ident)
    assert ran_in != threading.get_ident()
    assert told == [(0, threading.get_ident()), (1, threading.get_ident()), (1, ran_in)]
