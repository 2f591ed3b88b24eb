"""The Gymnasium adapters, against Gymnasium's own checkers and its own vector environment."""

import subprocess
import sys
import warnings
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import create_shared_memory, read_from_shared_memory, write_to_shared_memory

from starpod.client import Limits, SyncFleet, Want
from starpod.client.gymnasium import AnyText, StarpodEnv, StarpodVectorEnv
from tests.support import ServerProcess

LIMITS = Limits(max_turns=12, max_actions=0)
SEEDS = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def fleet(server: ServerProcess) -> Iterator[SyncFleet]:
    with SyncFleet(server.address) as fleet:
        yield fleet


@pytest.mark.parametrize(
    ("environment_id", "options"),
    [
        ("bandit-v1", {}),
        ("frozen_lake-v1", {}),
        ("sokoban-v1", {}),
        ("sokoban-v1", {"observation": "rgb"}),
        ("countdown-v1", {}),
        ("sudoku-v1", {}),
    ],
)
def test_env_passes_the_checker(server: ServerProcess, environment_id: str, options: dict[str, Any]) -> None:
    env = gymnasium.make(
        "starpod.client.gymnasium:Starpod-v0",
        disable_env_checker=True,
        addresses=server.address,
        environment_id=environment_id,
        options=options,
        limits=LIMITS,  # the checker takes no episode that is cut after one turn
        render_mode="rgb_array",
    ).unwrapped
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env)


def test_render_modes(fleet: SyncFleet) -> None:
    env = StarpodEnv(fleet, "frozen_lake-v1", render_mode="ansi")
    env.reset(seed=1)
    picture_text = env.render()
    assert isinstance(picture_text, str)
    assert "G" in picture_text
    picture = StarpodEnv(fleet, "frozen_lake-v1", render_mode="rgb_array")
    picture.reset(seed=1)
    frame = picture.render()
    assert frame.dtype == np.uint8
    assert frame.ndim == 3
    with pytest.raises(ValueError, match="human"):
        StarpodEnv(fleet, "frozen_lake-v1", render_mode="human")


@pytest.mark.parametrize("action", [-1, 4, np.int64(-4)])
def test_a_number_that_is_no_action_is_refused(fleet: SyncFleet, action: Any) -> None:
    env = StarpodEnv(fleet, "frozen_lake-v1")
    env.reset(seed=1)
    for wrong in (action, 1.5, "Jump"):
        with pytest.raises(ValueError, match=rf"no action .*{wrong}.*0 to 3"):
            env.step(wrong)
    with pytest.raises(ValueError, match=r"'Up': write step\(3\).*3 Up"):
        env.step("Up")
    envs = StarpodVectorEnv(2, fleet, "frozen_lake-v1")
    envs.reset(seed=1)
    with pytest.raises(ValueError, match=rf"no action {action}.*0 to 3"):
        envs.step(np.array([0, action]))


@pytest.mark.parametrize(("environment_id", "action"), [("frozen_lake-v1", 0), ("countdown-v1", "1 + 1")])
def test_a_vector_env_takes_one_action_for_each(fleet: SyncFleet, environment_id: str, action: Any) -> None:
    envs = StarpodVectorEnv(3, fleet, environment_id)
    envs.reset(seed=1)
    for count in (2, 4):
        with pytest.raises(ValueError, match=f"{count} actions for 3 environments: give one for each"):
            envs.step((action,) * count)


def test_actions_of_environments_that_are_reset_are_ignored(fleet: SyncFleet) -> None:
    envs = StarpodVectorEnv(2, fleet, "frozen_lake-v1", limits=Limits(max_turns=1))
    envs.reset(seed=1)
    envs.step(np.zeros(2, dtype=np.int64))
    envs.step(np.array([-1, -1]))


def test_options_of_one_episode_do_not_stay(fleet: SyncFleet) -> None:
    env = StarpodEnv(fleet, "frozen_lake-v1")
    usual, _ = env.reset(seed=1)
    other, _ = env.reset(seed=1, options={"observation": "coord"})
    assert other != usual
    assert env.reset(seed=1)[0] == usual


def test_wanted_extras_are_in_info(fleet: SyncFleet) -> None:
    env = StarpodEnv(fleet, "frozen_lake-v1", want=Want(expert_action=True, valid_actions=True, score=True))
    _, info = env.reset(seed=1)
    assert info["expert_action"] in info["valid_actions"]
    assert 0 <= info["score"] < 1
    assert "instructions" in info


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("environment_id", ["frozen_lake-v1", "sokoban-v1"])
def test_vector_env_equals_gymnasiums_own_over_single_envs(
    fleet: SyncFleet, environment_id: str, mode: AutoresetMode
) -> None:
    count = len(SEEDS)
    reference = SyncVectorEnv(
        [lambda: StarpodEnv(fleet, environment_id, limits=LIMITS) for _ in range(count)], autoreset_mode=mode
    )
    tested = StarpodVectorEnv(count, fleet, environment_id, limits=LIMITS, autoreset_mode=mode)
    assert tested.action_space == reference.action_space
    assert tested.metadata["autoreset_mode"] == mode
    expected, expected_info = reference.reset(seed=SEEDS)
    found, found_info = tested.reset(seed=SEEDS)
    assert found == expected
    assert found_info["instructions"].tolist() == expected_info["instructions"].tolist()
    actions = np.random.default_rng(0).integers(4, size=(40, count))
    ends = 0
    for row in actions:
        expected, *expected_rest = reference.step(row)
        found, *found_rest = tested.step(row)
        assert found == expected
        assert found in tested.observation_space
        for one, other in zip(found_rest[:3], expected_rest[:3], strict=True):
            np.testing.assert_array_equal(one, other)
        _assert_same_info(found_rest[3], expected_rest[3])
        ends += int((found_rest[1] | found_rest[2]).sum())
    assert ends >= count
    reference.close()
    tested.close()


def _assert_same_info(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            _assert_same_info(found[key], value)
        else:
            np.testing.assert_array_equal(found[key], value)


def test_vector_env_without_autoreset(fleet: SyncFleet) -> None:
    envs = StarpodVectorEnv(
        3, fleet, "frozen_lake-v1", limits=Limits(max_turns=2), autoreset_mode=AutoresetMode.DISABLED
    )
    first, _ = envs.reset(seed=7)
    for _ in range(2):
        before, _, terminated, truncated, _ = envs.step(np.zeros(3, dtype=np.int64))
    assert (terminated | truncated).all()
    with pytest.raises(ValueError, match="reset"):
        envs.step(np.zeros(3, dtype=np.int64))
    after, infos = envs.reset(seed=7, options={"reset_mask": np.array([True, False, True])})
    assert (after[0], after[1], after[2]) == (first[0], before[1], first[2])
    assert infos["_instructions"].tolist() == [True, False, True]
    envs.close()


def test_make_vec_and_seeds(server: ServerProcess) -> None:
    def play(seed: int) -> list[Any]:
        envs = gymnasium.make_vec(
            "starpod.client.gymnasium:Starpod-v0",
            num_envs=4,
            addresses=server.address,
            environment_id="sokoban-v1",
            options={"observation": "rgb"},
            render_mode="ansi",
        )
        observations, _ = envs.reset(seed=seed)
        assert observations.shape == (4, *envs.single_observation_space.shape)
        assert observations in envs.observation_space
        seen = [observations]
        for _ in range(8):
            observations, *_ = envs.step(np.array([0, 1, 2, 3]))
            seen.append(observations)
        assert len(envs.render()) == 4
        envs.close()
        return seen

    first, again, other = play(11), play(11), play(12)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_texts_in_the_memory_that_processes_share() -> None:
    """Gymnasium's own text space only accepts letters and digits."""
    space, texts = AnyText(), ("", "_ zwölf \N{SNOWMAN}\n")
    memory = create_shared_memory(space, n=2)
    seen = read_from_shared_memory(space, memory, n=2)
    for text in ("a longer one, which is replaced", texts[1]):
        write_to_shared_memory(space, 1, text, memory)
    assert deepcopy(seen) == texts
    assert (seen[-1], seen[:1], len(seen)) == (texts[1], texts[:1], 2)
    with pytest.raises(ValueError, match="shared_memory=False"):
        write_to_shared_memory(space, 0, "x" * 300_000, memory)


ASYNC = """
import sys
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from starpod.client.gymnasium import StarpodEnv

address = sys.argv[1]
envs = [lambda: StarpodEnv(address, "frozen_lake-v1")] * 2


def play(vector):
    seen = [vector.reset(seed=7)[0]]
    seen += [vector.step(np.array([1, 2]))[0] for _ in range(9)]
    vector.close()
    return seen


if __name__ == "__main__":
    expected = play(SyncVectorEnv(envs))
    assert len(set(expected)) > 4
    assert play(AsyncVectorEnv(envs, context="spawn")) == expected
    for _ in range(4):  # each time right after the last fleet was closed
        assert play(AsyncVectorEnv(envs, context="fork")) == expected
"""


def test_gymnasiums_processes_play_the_same(server: ServerProcess) -> None:
    """Run a new program, since a forked process may not use gRPC if its parent has an open fleet."""
    subprocess.run([sys.executable, "-c", ASYNC, server.address], timeout=250, check=True)
