"""Tasks in Harbor's format, each an environment whose sessions are containers: `harbor:FOLDER`."""

from __future__ import annotations

import dataclasses
import math
import random
import re
import shlex
import time
from pathlib import Path
from typing import Any, ClassVar, Self

from starpod.env_server.authoring.environment import (
    INVALID,
    Concurrency,
    Environment,
    EnvironmentSpec,
    Limits,
    Outcome,
    Tool,
    Unavailable,
    digest,
)
from starpod.env_server.hosting.harbor_task import LOGS, SOLUTION, Section, TaskError, TaskFolder
from starpod.env_server.hosting.harbor_verifier import Verifier
from starpod.env_server.hosting.hosted import read_call, starpod_id
from starpod.env_server.hosting.request import HostingError, HostingRequest, fitting, import_named
from starpod.env_server.machines.engine import MachinePlan
from starpod.env_server.machines.machine import Machine
from starpod.env_server.machines.pool import machine_pool
from starpod.v1.values import Action

SETTINGS = (
    "user warm max_turns command_seconds output boot_seconds lifetime copies build_network reach engine namespace "
    "registry"
).split()
NOBODY = "1000:1000"
"""User of the agent's commands where neither the task nor its image names one."""
MAX_LENGTH = 100_000
"""Maximum number of characters of an agent's command. The reference solution may be longer."""
_SNAPSHOT_SECONDS, _FORK_SECONDS = 86_400.0, 120.0
"""Seconds for which the image of a snapshot and of a fork is kept."""
_FENCE = re.compile(r"```(?:bash|sh|shell|console)?[^\S\n]*\n(.*?)```", re.DOTALL)
_DONE = "done"


def _tool(name: str, description: str, **properties: str) -> Tool:
    schema = {key: {"type": "string", "description": text} for key, text in properties.items()}
    return Tool(name, description, {"type": "object", "properties": schema, "required": list(schema)})


TOOLS = (
    _tool("bash", "Runs a command in the shell.", command="The command; it may have several lines."),
    _tool("write_file", "Writes a file, in place of one of that name.", path="Its path.", text="Its whole content."),
    _tool(_DONE, "Says that the task is done, which ends the episode."),
)
_INSTRUCTIONS = (
    "You work in a Linux shell. Each of your replies is one command, plain or in a block of ```bash, or a call of a "
    "tool; you are shown its output. Working folder and variables stay. Commands cannot ask you anything. When the "
    "task is done, reply done. Your work is then checked."
)


class HarborTask(Environment):
    """A task in a container. Turns are commands, and the task's own verifier gives the reward at the end."""

    task: TaskFolder
    plan: MachinePlan
    verifier: Verifier
    command_seconds: ClassVar[float]
    output: ClassVar[int]
    solution: str | None
    """The reference solution as a command."""
    success_at: ClassVar[float]
    user: ClassVar[str]
    """The operator's choice of the agent's user; may be empty."""
    build_network: ClassVar[str]
    engine: ClassVar[tuple[str, str]]
    """Name of the engine, docker or pods, and namespace of pods."""
    reach: ClassVar[tuple[str, int] | None]
    """Host and port outside that programs in the container can reach at 127.0.0.1 and the same port."""

    told: str
    """The observation."""
    spent: float
    """Seconds that the agent's commands have run."""
    is_solving: bool
    """Whether the reference solution was run."""
    _cached_machine: Machine | None = None

    # --- before the first session ------------------------------------------------------------------------------------

    @classmethod
    def prepare(cls) -> None:
        """Build or pull the image, and read its user and working folder where the engine can."""
        configuration = cls.task.configuration
        needs = configuration.environment
        folder = None if needs.docker_image else cls.task.path / "environment"
        engine = machine_pool(*cls.engine).engine
        image_user, image_folder = engine.prepare(cls.plan, folder, needs.build_timeout_sec, cls.build_network)
        cls.verifier = Verifier.prepare(cls.task, cls.plan, image_user, engine, cls.build_network)
        named = cls.user or str(configuration.agent.user or "") or image_user
        user, workdir = named or NOBODY, needs.workdir or image_folder
        quoted = shlex.quote(workdir) if workdir else '"$PWD"'
        shared = f"{LOGS}/agent {LOGS}/artifacts {SOLUTION}"
        setup = [
            f"mkdir -p {quoted} {shared} {LOGS}/verifier",
            f"chown {shlex.quote(user)} {shared}",
            f"chown {shlex.quote(cls.verifier.user)} {LOGS}/verifier\nchmod 700 {LOGS}/verifier",
        ]
        if not named:
            if Path(workdir or "/").is_relative_to("/root"):
                raise Unavailable(
                    f"{cls.task.path} works in {workdir}, where root's programs read settings: choose the agent's user "
                    "in [agent], or with #user=root, another workdir in [environment], or a USER of the image"
                )
            # An image that names no user expects root, whose folder this user could not write to.
            setup.append(f"case {quoted} in /|~root|~root/*) ;; *) chown -R {NOBODY} {quoted} ;; esac")
        cls.plan = dataclasses.replace(
            cls.plan,
            user=user,
            folder=workdir,
            home="" if named else "/tmp",
            setup="\n".join(setup),
            variables=tuple(cls.task.variables("environment").items()),
        )

    # --- the episode -------------------------------------------------------------------------------------------------

    def reset(self, rng: random.Random) -> None:
        self._cached_machine = machine_pool(*self.engine).take(self.plan)
        self.told = self.task.instruction
        self.spent = 0.0
        self.is_solving = False

    @property
    def machine(self) -> Machine:
        assert self._cached_machine is not None, "the episode is over"
        return self._cached_machine

    def step(self, action: Action) -> Outcome:
        is_solution = isinstance(action, str) and action == self.solution
        command = str(action) if is_solution else _read_command(action)
        if command is None or "\0" in command or (len(command) > MAX_LENGTH and not is_solution):
            self.told = f"[not executed: write a command of at most {MAX_LENGTH:,} characters]"
            return INVALID
        if command == _DONE:
            self.told = ""
            return self._verify()
        agent_seconds = self.task.configuration.agent.timeout_sec or math.inf
        self.is_solving |= is_solution
        self.machine.connect(self.reach)
        start = time.monotonic()
        seconds = min(self.command_seconds, agent_seconds - self.spent)
        result = self.machine.run(command, seconds, limit=self.output)
        self.spent += time.monotonic() - start
        end = f"[exit status {result.status}]"
        if result.problem:
            end = f"[the command {result.problem}; a new shell starts in {result.folder}, without the variables]"
        self.told = f"{result.text.rstrip()}\n{end}".lstrip("\n")
        if self.spent >= agent_seconds:
            return self._verify()._replace(terminated=False, truncated=True)
        return Outcome(info={"exit_status": result.status, "container": self.machine.name})

    def cut_short(self) -> Outcome | None:
        """Run the verifier if a limit on turns or actions ends the episode."""
        return self._verify()

    def _verify(self) -> Outcome:
        """Run the task's verifier and return the last outcome. Raises RuntimeError if it gives no reward."""
        self.machine.connect(None)
        rewards = self.verifier.verify(self.machine)
        # Parts add up to the reward. If the file names the reward, its other values are only reported.
        parts = {name: value / len(rewards) for name, value in rewards.items()}
        parts = {"reward": rewards["reward"]} if "reward" in rewards else parts
        reward, info = sum(parts.values()), {"rewards": rewards}
        self.told = f"{self.told}\n[the task is over: reward {reward:g}]".lstrip()
        self.close()
        success = reward >= self.success_at
        return Outcome(reward, terminated=True, success=success, reward_parts=parts, info=info)

    def observe(self) -> str:
        return self.told

    def state_key(self) -> bytes:
        return digest(self.told)

    def render(self, mode: str = "text") -> str:
        return self.told

    def close(self) -> None:
        machine, self._cached_machine = self._cached_machine, None
        if machine is not None:
            machine.close()

    # --- copies ------------------------------------------------------------------------------------------------------

    def copy(self) -> Self:
        """Return a copy with a container of the same files. Processes, memory and variables are not copied."""
        clone = type(self)()
        clone.options, clone.seed = self.options, self.seed
        clone.set_state(self._state(_FORK_SECONDS))
        return clone

    def get_state(self) -> dict[str, Any]:
        return self._state(_SNAPSHOT_SECONDS)

    def set_state(self, state: dict[str, Any]) -> None:
        image, folder = str(state["image"]), str(state["folder"])
        self.dynamics_seed = state["dynamics_seed"]
        self.told, self.spent, self.is_solving = str(state["told"]), float(state["spent"]), bool(state["is_solving"])
        if image:
            pool = machine_pool(*self.engine)
            if not pool.engine.find_snapshot(image, self.spec.id):
                raise ValueError("its engine does not have the snapshot, which is kept for a day")
            self._cached_machine = Machine.boot(pool.engine, self.plan, image, folder)

    def _state(self, seconds: float) -> dict[str, Any]:
        machine = self._cached_machine
        return {
            "image": machine.commit(seconds) if machine else "",
            "folder": machine.folder if machine else "",
            "told": self.told,
            "spent": self.spent,
            "is_solving": self.is_solving,
            "dynamics_seed": self.dynamics_seed,
        }


class SolvedHarborTask(HarborTask):
    """A task with a reference solution, so that there is an expert."""

    def expert_action(self) -> str | None:
        """Return the reference solution as one command, and then `done`."""
        return _DONE if self.is_solving else self.solution


def _read_command(action: Action) -> str | None:
    """Return an action as a command, or None if it makes no sense."""
    call = read_call(action)
    if call is None:
        if not isinstance(action, str) or not action.strip():
            return None
        blocks = _FENCE.findall(action)
        text = (blocks[-1] if blocks else action).strip()
        return _DONE if text.lower().rstrip(".!") == _DONE else text
    tool = next((tool for tool in TOOLS if tool.name == call.name), None)
    names = tool.parameters["properties"] if tool else ()
    if tool is None or call.arguments.keys() != dict.fromkeys(names).keys():
        return None
    values = [call.arguments[name] for name in names]
    if not all(isinstance(value, str) for value in values):
        return None
    match call.name:
        case "bash":
            return str(values[0]).strip() or None
        case "write_file":
            path, text = map(shlex.quote, values)
            return f'mkdir -p -- "$(dirname -- {path})" && printf %s {text} > {path}'
    return _DONE


# --- the family ------------------------------------------------------------------------------------------------------


def host(text: str) -> type[HarborTask]:
    """Return the environment of one task folder, `FOLDER#setting=value&...`. Raises HostingError."""
    request = HostingRequest.parse(text, SETTINGS)
    try:
        task = TaskFolder.read(Path(request.name).resolve())
        sections: list[Section] = ["environment", "verifier", "solution"]
        sections += ["verifier.environment"] * (task.configuration.verifier.environment is not None)
        for section in sections:
            task.variables(section)
    except TaskError as error:
        raise HostingError(str(error)) from error
    if request.arguments:
        raise request.fail("a task takes no arguments; settings follow a #, as in harbor:tasks#max_turns=20")
    request.choice("concurrency", "container")
    copies = request.choice("copies", "no", "fork", "yes")
    engine, image = _choose_engine(request, task, copies)
    turns = int(request.number("max_turns", 50, 1))
    spec = EnvironmentSpec(
        id=starpod_id(request, "harbor", task.path.name, 1),
        version=task.version,
        title=f"Harbor's task {task.path.name}",
        instructions=_INSTRUCTIONS,
        grammar="a shell command, plain or in a block of ```bash; done at the end",
        tools=TOOLS,
        limits=Limits(max_turns=turns, max_actions_per_turn=1, max_actions=turns),
        concurrency=Concurrency.CONTAINER,
        deterministic=request.choice("deterministic", "no", "yes") == "yes",
        fork=copies != "no",
        snapshot=copies == "yes",
    )
    needs = task.configuration.environment
    plan = MachinePlan(
        environment=spec.id,
        image=image,
        user="",
        folder="/",
        network=task.configuration.network_mode == "public",
        boot_seconds=request.number("boot_seconds", 60.0, 0.1),
        lifetime_seconds=request.number("lifetime", 21_600.0, 0.1),
        warm=int(request.number("warm", 1, 0)),
        **needs.sizes,
    )
    solution = task.solution()
    base = HarborTask if solution is None else SolvedHarborTask
    members = {
        "spec": spec,
        "task": task,
        "plan": plan,
        "solution": solution,
        "user": request.settings.get("user", ""),
        "command_seconds": request.number("command_seconds", 120.0, 0.1),
        "output": int(request.number("output", 16_384, 0)),
        "success_at": request.number("success_at", 1.0),
        "build_network": request.settings.get("build_network", "default"),
        "engine": (engine, request.settings.get("namespace", "")),
        "reach": _read_address(request),
        "reference": (__name__, "host", text),
        "__module__": base.__module__,
    }
    return type(base.__name__, (base,), members)


def _choose_engine(request: HostingRequest, task: TaskFolder, copies: str) -> tuple[str, str]:
    """Return the names of the engine and of the image. Raises HostingError if they cannot run the task."""
    engine, registry = request.choice("engine", "docker", "pods"), request.settings.get("registry", "").rstrip("/")
    import_named(request, "docker" if engine == "docker" else "kubernetes")
    if engine == "docker":
        if wrong := {"namespace", "registry"} & request.settings.keys():
            raise request.fail(f"{min(wrong)} is a setting of engine=pods")
        return engine, task.image
    if copies != "no":
        raise request.fail(f"copies={copies} needs engine=docker: Kubernetes cannot save a pod as an image")
    if task.configuration.verifier.is_apart and task.verifier_image[1]:
        raise request.fail("pods cannot build its verifier's image: set docker_image in [verifier.environment]")
    if task.configuration.environment.docker_image:
        return engine, task.image
    if not registry:
        raise request.fail(
            f"pods cannot build its image, and task.toml names no docker_image: push {task.image} to a registry "
            "and set registry=PREFIX, or set docker_image"
        )
    return engine, f"{registry}/{task.image}"


def _read_address(request: HostingRequest) -> tuple[str, int] | None:
    """Return the setting `reach`. Raises HostingError if it is not HOST:PORT."""
    text = request.settings.get("reach", "")
    host, _, port = text.rpartition(":")
    if text and not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise request.fail(f"reach is {text!r}; write HOST:PORT, as in reach=127.0.0.1:8100")
    return (host.strip("[]"), int(port)) if text else None


def installed(pattern: str) -> list[str]:
    """Return the task folders that match a pattern, or all of those in a folder."""
    parent, name = (pattern, "*") if "*" not in pattern else (str(Path(pattern).parent), Path(pattern).name)
    folders = [file.parent for file in Path(parent).glob("*/task.toml")]
    return [str(Path(parent) / name) for name in fitting(name, [folder.name for folder in folders])]


def is_plural(name: str) -> bool:
    """Return whether a name without `*` stands for several environments: it is a folder of tasks."""
    return Path(name).is_dir() and not (Path(name) / "task.toml").exists()
