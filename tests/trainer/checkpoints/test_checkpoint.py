"""Checkpoints: whole or not there, whatever happens in between."""

import contextlib
import copy
import linecache
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest import TestCase

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from starpod.trainer.checkpoints import checkpoint as checkpoint_module
from starpod.trainer.checkpoints import tensors as tensors_module
from starpod.trainer.checkpoints.checkpoint import CheckpointError, Checkpoints, load_checkpoint
from starpod.trainer.checkpoints.config import CheckpointConfig
from starpod.trainer.checkpoints.state import capture_rng, flatten_optimizer, restore_rng, unflatten_optimizer
from tests.forks import run_forks
from tests.support import small_files

LOGGER = checkpoint_module.__name__


def tensors_of(step: int) -> dict[str, dict[str, torch.Tensor]]:
    weight = torch.arange(6.0).reshape(2, 3) * step
    return {
        "model": {"a.weight": weight, "tied": weight},
        "critic": {"w": torch.full((3,), step, dtype=torch.bfloat16)},
    }


def state_of(step: int) -> dict[str, object]:
    return {"cursor": {"taken": step}, "mean": math.pi * step, "rng": [1, None, "x"]}


def save(checkpoints: Checkpoints, step: int, score: float | None = None) -> Path:
    """score: success; the return is twice as high."""
    return checkpoints.save(step, tensors_of(step), state_of(step), score=None if score is None else (score, 2 * score))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and raw(one) == raw(other)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.clone(memory_format=torch.contiguous_format).untyped_storage())


def assert_is(loaded, step: int) -> None:
    assert (loaded.step, loaded.state) == (step, state_of(step))
    expected = tensors_of(step)
    assert {name: [*named] for name, named in loaded.tensors.items()} == {
        name: [*each] for name, each in expected.items()
    }
    assert all(same_bits(loaded.tensors[name][key], each[key]) for name, each in expected.items() for key in each)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- what is saved is what is loaded ---------------------------------------------------------------------------------


def test_the_newest_and_the_best_come_back(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", CheckpointConfig(keep=2))
    assert (checkpoints.latest(), checkpoints.best()) == (None, None)
    for step, score in [(1, 0.5), (2, 0.9), (3, 0.9), (4, None), (5, 0.1), (6, None)]:
        path = save(checkpoints, step, score)
        assert_is(load_checkpoint(path), step)
    assert_is(checkpoints.latest(), 6)
    assert_is(checkpoints.best(), 3)
    assert names(checkpoints.folder) == ["best", "latest", "step-00000003", "step-00000005", "step-00000006"]
    assert (checkpoints.folder / "latest").read_text() == "step-00000006\n"
    assert (checkpoints.folder / "best").read_text() == "step-00000003\n"


def test_the_return_decides_where_success_is_equal_or_unknown(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=9))
    for step, score in [(1, (0.0, -5.0)), (2, (0.0, -1.0)), (3, (0.0, -3.0))]:
        checkpoints.save(step, tensors_of(step), state_of(step), score=score)
    assert_is(checkpoints.best(), 2)


def test_without_the_best_only_the_newest_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=1, keep_best=False))
    for step in (1, 2):
        save(checkpoints, step, score=1 / step)
    assert names(tmp_path) == ["best", "latest", "step-00000002"]
    assert (tmp_path / "best").read_text() == "step-00000002\n"


def test_a_run_that_went_back_forgets_its_future(tmp_path):
    """A step that is saved again replaces the first."""
    checkpoints = Checkpoints(tmp_path)
    for step in (2, 4, 6):
        save(checkpoints, step, score=float(step))
    for score in (None, 0.1, 0.2):
        save(checkpoints, 5, score)
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == ["step-00000004", "step-00000005"]
    assert_is(checkpoints.best(), 4)


@given(
    st.lists(
        nps.arrays(
            st.sampled_from([np.float32, np.float64, np.float16, np.int64, np.uint8, np.bool_]),
            nps.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
        ),
        max_size=4,
    ),
    st.dictionaries(
        st.text(),
        st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists),
        max_size=3,
    ),
)
def test_every_bit_comes_back(tmp_path_factory, arrays, state):
    checkpoints = Checkpoints(tmp_path_factory.mktemp("checkpoints"))
    model = {f"t{index}": torch.from_numpy(array.copy()) for index, array in enumerate(arrays)}
    model["view"] = torch.arange(12.0).reshape(3, 4)[:, 1:3]
    model["tied"] = model["view"]
    loaded = load_checkpoint(checkpoints.save(1, {"model": model}, state))
    assert loaded.state == state
    assert loaded.tensors["model"].keys() == model.keys()
    assert all(same_bits(loaded.tensors["model"][name], tensor) for name, tensor in model.items())


def test_only_what_is_asked_for_is_read(tmp_path):
    path = save(Checkpoints(tmp_path), 1)
    (path / "critic.safetensors").unlink()
    for loaded in (load_checkpoint(path, ["model"]), Checkpoints(tmp_path).latest(["model"])):
        assert loaded is not None
        assert loaded.tensors.keys() == {"model"}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_tensors_are_read_where_they_are_used_and_no_sooner(tmp_path):
    size = 64 * 2**20
    path = Checkpoints(tmp_path).save(1, {"model": {"w": torch.ones(size // 4)}}, {})

    def resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssFile")))

    before = resident()
    tensor = load_checkpoint(path).tensors["model"]["w"]
    assert resident() - before < size / 4
    assert tensor[-1] == 1
    tensor.add_(1)  # the file is nobody's to change
    assert load_checkpoint(path).tensors["model"]["w"][0] == 1


@pytest.mark.parametrize(
    ("tensors", "state", "error"),
    [
        ({}, {"a": {1: 2}}, "keys of a checkpoint's state are text"),
        ({}, {"a": [{"b": {None: 1}}]}, "keys of a checkpoint's state are text"),
        (tensors_of(1), {"set": {1}}, "not JSON serializable"),
        ({"../model": {}}, {}, r"\.\./model"),
    ],
)
def test_what_cannot_be_kept_is_refused_and_leaves_nothing_behind(tmp_path, tensors, state, error):
    with pytest.raises((TypeError, ValueError), match=error):
        Checkpoints(tmp_path).save(1, tensors, state)
    assert names(tmp_path) == []


# --- random states and optimisers ------------------------------------------------------------------------------------


def draw() -> list[object]:
    return [torch.randn(3).tolist(), np.random.normal(size=3).tolist(), random.random(), random.gauss(0, 1)]


@given(st.integers(0, 2**32 - 1), st.integers(0, 700))
def test_random_streams_continue_where_they_were(tmp_path_factory, seed, drawn):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    for _ in range(drawn):
        np.random.normal()
        random.gauss(0, 1)
    torch.rand(drawn)
    path = Checkpoints(tmp_path_factory.mktemp("rng")).save(1, {}, {"rng": capture_rng()})
    expected = draw()
    restore_rng(load_checkpoint(path).state["rng"])
    assert draw() == expected


@given(
    st.integers(0, 2**31),
    st.integers(0, 3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.sampled_from([torch.optim.AdamW, torch.optim.SGD]),
    st.booleans(),
)
def test_an_optimiser_continues_bit_for_bit(tmp_path_factory, seed, steps, dtype, kind, amsgrad):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)).to(dtype)
    model[0].bias.requires_grad_(False)  # a parameter without state
    options = {"betas": (0.9, 0.97), "amsgrad": amsgrad} if kind is torch.optim.AdamW else {"momentum": 0.9}
    optimizer = kind(
        [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.3}], lr=0.1, **options
    )

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 3, dtype=dtype)).pow(2).sum().backward()
        optimizer.step()

    for _ in range(steps):
        step()
    tensors, values = flatten_optimizer(optimizer.state_dict())
    weights = copy.deepcopy(model.state_dict())
    path = Checkpoints(tmp_path_factory.mktemp("optimizer")).save(
        steps, {"model": weights, "optimizer": tensors}, {"optimizer": values}
    )
    step()
    expected = copy.deepcopy(model.state_dict())

    loaded = load_checkpoint(path)
    restored = unflatten_optimizer(loaded.tensors["optimizer"], loaded.state["optimizer"])
    model.load_state_dict(loaded.tensors["model"])
    optimizer.load_state_dict(restored)
    step()
    assert all(same_bits(value, expected[name]) for name, value in model.state_dict().items())


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory) -> Path:
    checkpoints = Checkpoints(tmp_path_factory.mktemp("two"))
    save(checkpoints, 1)
    save(checkpoints, 2)
    return checkpoints.folder


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_is_seen_and_the_one_before_is_used(two_checkpoints, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged") / "checkpoints"
    shutil.copytree(two_checkpoints, folder)
    victim = data.draw(st.sampled_from(sorted((folder / "step-00000002").iterdir())))
    content = bytearray(victim.read_bytes())
    damage = data.draw(st.sampled_from(["flip", "cut", "grow", "remove"]))
    if damage == "flip":
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    elif damage == "cut":
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    elif damage == "grow":
        content += data.draw(st.binary(min_size=1, max_size=3))
    if damage == "remove":
        victim.unlink()
    else:
        victim.write_bytes(content)
    with TestCase().assertLogs(LOGGER) as logs:
        assert_is(Checkpoints(folder).latest(), 1)
    (told,) = (record.getMessage() for record in logs.records)
    assert f"{folder / 'step-00000002'} cannot be used" in told and victim.name in told and "\n" not in told


def test_if_none_can_be_used_it_says_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"it has no manifest\.json"):
        load_checkpoint(tmp_path)
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        (save(checkpoints, step, score=0.5) / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"can be used: .*step-00000002.*step-00000001"):
        checkpoints.latest()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        checkpoints.best()


def test_left_overs_are_removed_and_never_read(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".temporary-step-00000009")
    (tmp_path / ".temporary-latest").write_text("half")
    assert_is(checkpoints.latest(), 1)
    save(checkpoints, 2)
    assert names(tmp_path) == ["latest", "step-00000001", "step-00000002"]


# --- a full disk -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(folder: Path, size: str):
    """A file system of its own, where this process may mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_costs_no_earlier_checkpoint(tmp_path):
    with small_disk(tmp_path / "disk", "256k"):
        checkpoints = Checkpoints(tmp_path / "disk" / "checkpoints")
        save(checkpoints, 1)
        failed = 0
        for pages in range(40):  # free pages: the write fails at another place each time
            filler = tmp_path / "disk" / "filler"
            with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
            os.truncate(filler, max(filler.stat().st_size - 4096 * pages, 0))
            try:
                save(checkpoints, 2)
            except CheckpointError as error:
                failed += 1
                assert re.fullmatch(r".*No space left on device.*MiB are free.*", str(error))
                assert not list(checkpoints.folder.glob(".temporary-step*"))
                assert load_checkpoint(checkpoints.folder / "step-00000001").step == 1
            else:
                break
            finally:
                filler.unlink(missing_ok=True)
        assert failed > 3
        assert_is(checkpoints.latest(), 2)


@pytest.mark.parametrize(
    ("tensors", "state"), [({"model": {"w": torch.zeros(10_000)}}, {}), ({}, {"text": "x" * 20_000})]
)
def test_a_file_that_may_grow_no_further_is_a_clear_error(tmp_path, tensors, state):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    with small_files(10_000), pytest.raises(CheckpointError, match=r"step 2 could not be saved .*: .*File too large"):
        checkpoints.save(2, tensors, state)
    assert names(tmp_path) == ["latest", "step-00000001"]
    assert_is(checkpoints.latest(), 1)


# --- SIGKILL ---------------------------------------------------------------------------------------------------------


# What changes the disk, and the files in which that happens.
TOUCHING = re.compile(r'mkdir|, "wb"|\.p?write\(|truncate|flush|\.unlink|rmdir|\.rename|\.replace')
CHANGING = {module.__file__ for module in (checkpoint_module, tensors_module, shutil)}


def killed_at(line: int, folder: Path) -> bool:
    """Saves step 3 in a forked process that is killed before the line'th of these lines that it comes to."""
    child = os.fork()
    if child == 0:
        left = line

        def trace(frame, event, _):
            nonlocal left
            if frame.f_code.co_filename not in CHANGING:
                return None
            if event == "line" and TOUCHING.search(linecache.getline(frame.f_code.co_filename, frame.f_lineno)):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        save(Checkpoints(folder, CheckpointConfig(keep=1)), 3, score=0.5)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def kill_everywhere(folder: Path) -> None:
    """Kills a save between any two of its writes, and looks at what is left."""
    torch.set_num_threads(1)
    os.fsync = lambda _: None  # the kernel outlives the process; what it holds is there without it
    config = CheckpointConfig(keep=1)
    before = Checkpoints(folder / "before", config)
    save(before, 1, score=0.9)
    save(before, 2, score=0.1)
    shutil.copytree(before.folder / "step-00000001", before.folder / ".temporary-step-00000003")  # left over
    line, seen, killed = 0, [], True
    while killed:
        run = folder / f"killed-{line}"
        shutil.copytree(before.folder, run)
        killed = killed_at(line, run)
        checkpoints = Checkpoints(run, config)
        with TestCase().assertNoLogs(LOGGER):
            latest = checkpoints.latest()
            assert latest is not None
            assert_is(latest, latest.step)
            assert_is(checkpoints.best(), 1)
        save(checkpoints, 4)  # and the next save works
        assert_is(checkpoints.latest(), 4)
        assert names(run) == ["best", "latest", "step-00000001", "step-00000004"]
        seen.append(latest.step)
        line += 1
    assert line > 30
    assert seen == sorted(seen)
    assert set(seen) == {2, 3}


def test_killed_between_any_two_writes(tmp_path):
    # In a process of one thread, so that it may fork.
    assert run_forks(1, kill_everywhere, tmp_path) == [0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_reported_before_they_are_used(tmp_path, value, dtype):
    good = {"policy": {"w": torch.ones(3)}, "optimizer": {"step": torch.tensor(1), "exp_avg": torch.ones(3)}}
    load_checkpoint(Checkpoints(tmp_path).save(1, good, {})).check_finite()
    for name, tensors in good.items():
        wrong = {key: tensor.to(dtype) if tensor.is_floating_point() else tensor for key, tensor in tensors.items()}
        list(wrong.values())[-1][1] = value
        loaded = load_checkpoint(Checkpoints(tmp_path).save(2, {**good, name: wrong}, {}))
        with pytest.raises(CheckpointError, match=rf"step-00000002.* of its {name} holds NaN or infinite"):
            loaded.check_finite()
