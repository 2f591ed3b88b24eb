"""The verifier of a task in Harbor's format. It runs in the container of the episode, or in one of its own."""

from __future__ import annotations

import dataclasses
import json
import shlex
from typing import Self

from starpod.env_server.authoring.environment import Busy
from starpod.env_server.hosting.harbor_task import LOGS, TESTS, TaskFolder
from starpod.env_server.machines.engine import MEBIBYTE, ROOT, MachineEngine, MachinePlan
from starpod.env_server.machines.machine import Machine
from starpod.v1.untrusted import read_untrusted_json
from starpod.v1.values import MAX_REWARD

FILES = {name: f"{LOGS}/verifier/reward.{name}" for name in ("json", "txt")}
"""Reward files by their form, in the order in which they are looked for."""
_READ_BYTES = 65_536
"""Maximum size of a reward file."""
_ARTIFACTS_BYTES = 256 * MEBIBYTE
"""Maximum size of the files that a verifier in a container of its own gets."""


@dataclasses.dataclass(frozen=True, slots=True)
class Verifier:
    """The tests of a task: the user that runs them, and the container."""

    task: TaskFolder
    user: str
    plan: MachinePlan | None = None
    """Plan of the verifier's own container; None if it runs in the container of the episode."""

    @classmethod
    def prepare(cls, task: TaskFolder, plan: MachinePlan, image_user: str, engine: MachineEngine, network: str) -> Self:
        """Return a task's verifier, after its image was built or pulled. Raises Unavailable.

        Args:
            plan: plan of the agent's container.
            image_user: user of the agent's image; empty if it names none.
            network: network of builds.
        """
        settings = task.configuration.verifier
        if not settings.is_apart:
            return cls(task, str(settings.user or "") or image_user or ROOT)
        needs = settings.environment or task.configuration.environment
        image, folder = task.verifier_image
        variables = task.variables("verifier.environment" if settings.environment else "environment")
        plan = dataclasses.replace(
            plan,
            image=image or plan.image,
            user=ROOT,
            home="",
            variables=tuple(variables.items()),
            network=plan.network if needs.network_mode is None else needs.network_mode == "public",
            **needs.sizes,
        )
        image_user, workdir = engine.prepare(plan, folder, needs.build_timeout_sec, network)
        user = str(settings.user or "") or image_user or ROOT
        setup = f"mkdir -p {LOGS}/verifier\nchown {shlex.quote(user)} {LOGS}/verifier"
        return cls(task, user, dataclasses.replace(plan, folder=needs.workdir or workdir, setup=setup))

    def verify(self, machine: Machine) -> dict[str, float]:
        """Run the tests after the last turn, and return the rewards by name.

        Raises:
            RuntimeError: the tests give no reward.
        """
        if self.plan is None:
            # An agent that is root may have written a reward, or code that the tests would import.
            machine.clear(TESTS, *FILES.values())
            return self._run_tests(machine)
        artifacts = machine.pack(self.task.configuration.artifacts, _ARTIFACTS_BYTES)
        try:
            own_machine = Machine.boot(machine.engine, self.plan)
        except Busy as error:
            # Not to be retried: the same step may have run a command already.
            raise RuntimeError(f"the verifier has no container: {error}") from error
        try:
            own_machine.unpack(artifacts)
            # Neither do artifacts hold a reward.
            own_machine.clear(*FILES.values(), *([] if self.task.has_bundled_tests else [TESTS]))
            return self._run_tests(own_machine)
        finally:
            own_machine.close()

    def _run_tests(self, machine: Machine) -> dict[str, float]:
        if not self.task.has_bundled_tests:
            machine.put(self.task.path / "tests", TESTS)
        seconds, variables = self.task.configuration.verifier.timeout_sec, self.task.variables("verifier")
        result = machine.run_apart(f"{TESTS}/test.sh", seconds, self.user, variables)
        if result.problem:
            raise RuntimeError(f"the verifier {result.problem}; the end of its output: {result.text[-500:]}")
        for form, file in FILES.items():
            data = machine.read(file, _READ_BYTES)
            if data is not None:
                return _read_rewards(data.decode(errors="replace"), form)
        raise RuntimeError(f"the verifier wrote no reward; the end of its output: {result.text[-500:]}")


def _read_rewards(text: str, form: str) -> dict[str, float]:
    """Return the rewards in a reward file by name. Raises RuntimeError if it holds none."""
    try:
        value = read_untrusted_json(text) if form == "json" else float(text)
    except ValueError as error:
        raise RuntimeError(f"the verifier wrote no number but {text[:80]!r}: {error}") from error
    rewards = value if isinstance(value, dict) else {"reward": value}
    if not rewards or not all(
        type(number) in (int, float, bool) and abs(number) <= MAX_REWARD for number in rewards.values()
    ):
        raise RuntimeError(f"the verifier wrote {json.dumps(value)[:200]}, which holds values that are no rewards")
    return {str(name): float(number) for name, number in rewards.items()}
