"""Reading of a task folder in Harbor's format: `instruction.md`, `task.toml`, `environment`, `tests` and `solution`.

The format is that of schema 1.4, as harbor 0.26 reads it. Keys that are unknown here are ignored, as Harbor does.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

TESTS, SOLUTION, LOGS = "/tests", "/solution", "/logs"
"""Folders in the container."""
Section = Literal["environment", "verifier", "solution", "verifier.environment"]
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_SIZE = re.compile(r"([\d.]+)([GMK])")
_IN_MB = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
_NEEDS_FILE = re.compile(r"\$0|\$\{0|BASH_SOURCE|/solution")
_ENDS_SHELL = re.compile(r"^\s*(exit|set|exec|trap|return)\b|\|\|\s*exit|&&\s*exit|;\s*exit", re.MULTILINE)


class TaskError(ValueError):
    """A folder that is no task, or a task that needs something that is not supported. The message says which."""


class _Section(BaseModel):
    env: dict[str, str] = Field(default_factory=dict)


class _Agent(_Section):
    timeout_sec: float | None = Field(default=None, gt=0)
    user: str | int | None = None
    network_mode: str | None = None


class _EnvironmentSection(_Section):
    build_timeout_sec: float = Field(default=600.0, gt=0)
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, ge=16)
    storage_mb: int | None = Field(default=None, ge=1)
    gpus: int | None = None
    tpu: dict[str, Any] | None = None
    mcp_servers: list[Any] = Field(default_factory=list)
    healthcheck: dict[str, Any] | None = None
    workdir: str | None = None
    network_mode: Literal["no-network", "public", "allowlist"] | None = None
    allow_internet: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_old_sizes(cls, data: Any) -> Any:
        """Read `memory = "2G"` and `storage`, which older tasks have, as `memory_mb` and `storage_mb`."""
        for name in ("memory", "storage"):
            if isinstance(data, dict) and isinstance(size := data.get(name), str):
                if not (match := _SIZE.fullmatch(size.upper())):
                    raise ValueError(f"{name} is {size!r}; write it as 2G or 512M")
                data = {f"{name}_mb": round(float(match[1]) * _IN_MB[match[2]]), **data}
        return data

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes that the task sets, by the names of MachinePlan's fields."""
        sizes = {"cpus": self.cpus, "memory_mb": self.memory_mb, "storage_mb": self.storage_mb}
        return {name: size for name, size in sizes.items() if size}


class _Verifier(_Section):
    timeout_sec: float = Field(default=600.0, gt=0)
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: _EnvironmentSection | None = None
    network_mode: str | None = None
    collect: list[Any] = Field(default_factory=list)

    @property
    def is_apart(self) -> bool:
        """Whether the verifier has a container of its own, which gets the task's artifacts."""
        return (self.environment_mode or ("separate" if self.environment else "shared")) == "separate"


class _Configuration(BaseModel):
    verifier: _Verifier = Field(default_factory=_Verifier)
    agent: _Agent = Field(default_factory=_Agent)
    environment: _EnvironmentSection = Field(default_factory=_EnvironmentSection)
    solution: _Section = Field(default_factory=_Section)
    steps: list[Any] | None = None
    artifacts: list[str] = Field(default_factory=list, validate_default=True)
    """Absolute paths of the files and folders that a verifier in a container of its own gets."""

    @field_validator("artifacts", mode="before")
    @classmethod
    def _read_artifacts(cls, entries: list[Any]) -> list[Any]:
        """Return the paths of artifacts, which may also be tables, and the folder that always counts as one."""
        tables = [entry if isinstance(entry, dict) else {"source": entry} for entry in entries]
        for table in tables:
            path = str(table.get("source"))
            if not path.startswith("/") or ".." in path.split("/"):
                raise ValueError(f"{path} is no absolute path")
            if table.get("exclude") or table.get("service", "main") != "main":
                raise ValueError(f"{path}: exclude and service are not supported")
        return [*(table["source"] for table in tables), f"{LOGS}/artifacts"]

    def unsupported(self) -> str:
        """Return what the task needs and is not supported, or an empty text."""
        verifier = self.verifier
        environments = [self.environment, *filter(None, [verifier.environment])]
        networks = {self.agent.network_mode, *(environment.network_mode for environment in environments)}
        needs = {
            "several steps": self.steps,
            "Windows": any(environment.os.lower() != "linux" for environment in environments),
            "GPUs": any(environment.gpus for environment in environments),
            "TPUs": any(environment.tpu for environment in environments),
            "MCP servers": any(environment.mcp_servers for environment in environments),
            "a health check": any(environment.healthcheck for environment in environments),
            "a list of allowed hosts": "allowlist" in networks,
            "a network for one phase only": {self.agent.network_mode, verifier.network_mode}
            - {None, self.network_mode},
            "commands that collect artifacts": verifier.collect,
        }
        return ", ".join(name for name, is_needed in needs.items() if is_needed)

    @property
    def network_mode(self) -> str:
        """Network of the whole task. Harbor's default is public; here a task has to ask for it."""
        old = "public" if self.environment.allow_internet else "no-network"
        return self.environment.network_mode or old


@dataclass(frozen=True, slots=True)
class TaskFolder:
    """A folder that holds a task in Harbor's format, and what was read from it."""

    path: Path
    instruction: str
    configuration: _Configuration
    version: str
    """Semantic version whose last number is a digest of all files: servers of different tasks have different ones."""

    @classmethod
    def read(cls, path: Path) -> TaskFolder:
        """Read a task. Raises TaskError."""
        try:
            instruction = (path / "instruction.md").read_text(encoding="utf-8").strip()
            text = (path / "task.toml").read_text(encoding="utf-8")
            configuration = _Configuration.model_validate(tomllib.loads(text))
        except OSError as error:
            raise TaskError(f"{path} is no task of Harbor: {error.filename}: {error.strerror}") from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise TaskError(f"{path / 'task.toml'}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        except (ValueError, RecursionError) as error:
            raise TaskError(f"{path}: {error}") from error
        if needs := configuration.unsupported():
            raise TaskError(f"{path} needs {needs}, which is not supported yet")
        environment = path / "environment"
        if any(environment.glob("*compose.y*ml")):
            raise TaskError(f"{path} has several containers, which are not supported yet")
        if not (configuration.environment.docker_image or (environment / "Dockerfile").is_file()):
            raise TaskError(f"{path} has no environment/Dockerfile, and its task.toml names no docker_image")
        if not (path / "tests" / "test.sh").is_file():
            raise TaskError(f"{path} has no tests/test.sh")
        return cls(path, instruction, configuration, version_of(digest_files(path)))

    @property
    def image(self) -> str:
        """Name of the image: the task's, or that of one to build, which tasks with equal files share."""
        content = digest_files(self.path / "environment").hex()[:24]
        return self.configuration.environment.docker_image or f"starpod-harbor:{content}"

    @property
    def verifier_image(self) -> tuple[str, Path | None]:
        """Name of the image of the verifier's own container, or empty for the agent's, and the folder of its build."""
        needs, folder = self.configuration.verifier.environment, self.path / "tests"
        if needs and needs.docker_image:
            return needs.docker_image, None
        if (folder / "Dockerfile").is_file():
            return f"starpod-harbor:{digest_files(folder).hex()[:24]}", folder
        return "", None

    @property
    def has_bundled_tests(self) -> bool:
        """Whether the image of the verifier's own container has the tests already."""
        return self.configuration.verifier.is_apart and bool(self.verifier_image[0])

    def solution(self) -> str | None:
        """Return the reference solution as one command, or None if there is none.

        The script itself is the command, as an agent would write it, if it needs neither its own path nor other files.
        Otherwise the command first writes the files to /solution.
        """
        folder = self.path / "solution"
        if not (folder / "solve.sh").is_file():
            return None
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        script = (folder / "solve.sh").read_text(encoding="utf-8")
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self.variables("solution").items()]
        if len(files) == 1 and not _NEEDS_FILE.search(script):
            lines = [line for line in script.splitlines() if not line.startswith("#!")]
            text = "\n".join([*exports, *lines]).strip()
            return f"(\n{text}\n)" if _ENDS_SHELL.search(text) else text
        lines = ["(", *exports]
        for file in files:
            target = Path(SOLUTION) / file.relative_to(folder)
            data = file.read_bytes()
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = "\0"
            content = f"printf %s {shlex.quote(text)}"
            if "\0" in text:  # which no command can contain
                content = f"printf %s {base64.b64encode(data).decode()} | base64 -d"
            lines += [f"mkdir -p {shlex.quote(str(target.parent))}", f"{content} > {shlex.quote(str(target))}"]
        return "\n".join([*lines, f"chmod +x {SOLUTION}/solve.sh", f"{SOLUTION}/solve.sh", ")"])

    def variables(self, section: Section) -> dict[str, str]:
        """Return the environment variables of a section. `${NAME}` is read from the server's environment.

        Raises:
            TaskError: the server's environment lacks a variable.
        """
        values: Mapping[str, str] = attrgetter(f"{section}.env")(self.configuration)

        def resolve(match: re.Match[str]) -> str:
            value = os.environ.get(match[1], match[2])
            if value is None:
                raise TaskError(f"{self.path}: [{section}.env] needs the variable {match[1]}: set it for the server")
            return value

        return {name: _VARIABLE.sub(resolve, value) for name, value in values.items()}


def version_of(content: bytes) -> str:
    """Return the semantic version of tasks whose files have this digest."""
    return f"1.0.{int.from_bytes(content[:4], 'big')}"


def digest_files(folder: Path) -> bytes:
    """Return a digest of the names, modes and contents of all files below a folder."""
    hasher = hashlib.blake2b(digest_size=16)
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            content = file.read_bytes()
            executable = os.access(file, os.X_OK)
            hasher.update(f"{file.relative_to(folder).as_posix()}\0{executable:d}{len(content)}\0".encode())
            hasher.update(content)
    return hasher.digest()
