"""The environments that this process hosts, by id and version. Several versions of an id may be hosted at once."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import logging
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from importlib.machinery import SourceFileLoader
from importlib.metadata import entry_points
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from starpod.env_server.authoring.environment import Concurrency, Environment, Unavailable
from starpod.env_server.episodes import convert
from starpod.env_server.episodes.errors import CallError, EnvironmentRaised, bad_argument, place_of
from starpod.serving.user_code import is_ctrl_c

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "starpod.environments"
_ID = re.compile(r"[a-z][a-z0-9_]*(-[a-z0-9_]+)*-v[0-9]+")
_VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
_LONGEST_RANGE = 256
_LONGEST_NAME = 128
_COMPARATOR = re.compile(r"(==|!=|>=|<=|>|<)?\s*(\d+(\.\d+){0,2})")


_LOADED_PREFIX = "starpod_environment_"
"""Prefix of the names of modules that were loaded by path."""


class RegistryError(ValueError):
    """An environment class or name that cannot be hosted. The message says why and how to fix it."""


def _means(name: str, id: str) -> bool:
    """Return whether a user's name, perhaps without its version, refers to an id."""
    return name in (id, id.rpartition("-v")[0])


class _UncachedLoader(SourceFileLoader):
    """Loader that compiles a user's file each time it is loaded.

    Python's cache compares a file's size and its time in whole seconds, so it misses an edit within a second that
    leaves the size unchanged.
    """

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _load_module(source: str) -> ModuleType:
    """Load a module by dotted name, or a Python file or package by path. Raises RegistryError if there is none."""
    path = Path(source)
    if path.joinpath("__init__.py").is_file():
        path /= "__init__.py"
    elif path.suffix != ".py":
        try:
            return importlib.import_module(source)
        except ModuleNotFoundError as error:
            raise RegistryError(f"cannot import {source!r}: {error}; the path of a file ends in .py") from error
    name = _LOADED_PREFIX + (path.parent.resolve().name if path.name == "__init__.py" else path.stem)
    # Files of equal names in different folders are different modules.
    while (other := sys.modules.get(name)) is not None and Path(str(other.__file__)).resolve() != path.resolve():
        name += "_"
    spec = importlib.util.spec_from_file_location(name, path, loader=_UncachedLoader(name, str(path)))
    if spec is None or spec.loader is None or not path.is_file():
        raise RegistryError(f"no such file: {source}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        problem = str(error.msg if isinstance(error, SyntaxError) else error)
        raise RegistryError(f"{place_of(error) or source}: {type(error).__name__}: {problem}") from error
    return module


def _place_of_class(environment: type[Environment]) -> str:
    """Return file and line of a class, such as `vault.py, line 9`, or its module's name if it has no source."""
    try:
        return f"{Path(inspect.getsourcefile(environment) or '').name}, line {inspect.getsourcelines(environment)[1]}"
    except (OSError, TypeError):
        return environment.__module__


Reference = tuple[str, ...]
"""Location of a class, for another process: its module or file, and its qualified name. If further items follow, the
name is that of a function, which returns the class when called with them."""


def reference_to(environment: type[Environment]) -> Reference:
    """Return a class's Reference. It is the class's own `reference` if a function created the class."""
    if reference := environment.__dict__.get("reference"):
        return tuple(reference)
    module = environment.__module__
    if module.startswith(_LOADED_PREFIX):
        file = Path(str(sys.modules[module.partition(".")[0]].__file__))
        module = str(file.parent if file.name == "__init__.py" else file)
    return module, environment.__qualname__


def load_class(reference: Reference) -> type[Environment]:
    """Return the class of a Reference."""
    source, name, *arguments = reference
    value: Any = _load_module(source)
    for part in name.split("."):
        value = getattr(value, part)
    if arguments:
        value = value(*arguments)
    assert isinstance(value, type) and issubclass(value, Environment)
    return value


@functools.lru_cache(maxsize=256)
def parse_version_range(text: str) -> SpecifierSet:
    """Parse comma-separated comparators, the format of OpenRequest.version. Raises ValueError."""
    if len(text) > _LONGEST_RANGE:
        raise ValueError(f"is longer than {_LONGEST_RANGE} characters")
    parts = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        match = _COMPARATOR.fullmatch(part)
        if not match:
            raise ValueError(f"{part!r} is not a comparator; write e.g. >=1.2.0,<2.0.0")
        parts.append(f"{match[1] or '=='}{match[2]}")
    try:
        return SpecifierSet(",".join(parts))
    except InvalidSpecifier as error:
        raise ValueError(str(error)) from error


class Registry:
    """Environment classes by id, newest version first."""

    def __init__(self, environments: Iterable[type[Environment]] = ()) -> None:
        self._versions: dict[str, list[type[Environment]]] = {}
        self._missing: dict[str, str] = {}
        for environment in environments:
            self.add(environment)

    def add(self, environment: type[Environment]) -> None:
        """Add a class. Raises RegistryError if its spec is not valid, or its id and version are taken."""
        spec = getattr(environment, "spec", None)
        if spec is None:
            raise RegistryError(f"{environment.__qualname__} has no spec: give it a class attribute `spec`")
        if not _ID.fullmatch(spec.id):
            raise RegistryError(f"environment id {spec.id!r} is not of the form name-vN (a-z, 0-9, _, -), e.g. maze-v1")
        if not _VERSION.fullmatch(spec.version):
            raise RegistryError(f"version {spec.version!r} of {spec.id} is not MAJOR.MINOR.PATCH, e.g. 1.0.0")
        if spec.restores:
            try:
                parse_version_range(spec.restores)
            except ValueError as error:
                raise RegistryError(f"restores of {spec.id}: {error}") from error
        if spec.effects and spec.concurrency is not Concurrency.THREAD:
            raise RegistryError(f"{spec.id} has effects, which wait: set concurrency=Concurrency.THREAD in its spec")
        if inspect.isabstract(environment):
            names = ", ".join(sorted(environment.__abstractmethods__))
            raise RegistryError(f"{environment.__qualname__} does not define {names}")
        versions = self._versions.setdefault(spec.id, [])
        if any(other.spec.version == spec.version for other in versions):
            raise RegistryError(f"{spec.id} {spec.version} is registered twice: raise the version of one of them")
        versions.append(environment)
        versions.sort(key=lambda other: Version(other.spec.version), reverse=True)

    @classmethod
    def installed(cls, names: Collection[str] = ()) -> Registry:
        """Return the environments that installed packages register in the entry-point group `starpod.environments`.

        `names` are as for `select`. If entry points have these names, only those entry points are imported.
        """
        entries = sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: entry.name)
        if names and all(any(_means(name, entry.name) for entry in entries) for name in names):
            entries = [entry for entry in entries if any(_means(name, entry.name) for name in names)]
        registry = cls()
        for entry in entries:
            try:
                registry.add(entry.load())
            except BaseException as error:
                if is_ctrl_c(error):
                    raise
                package = (getattr(error, "name", None) or "").partition(".")[0]
                if isinstance(error, ModuleNotFoundError) and entry.extras and package not in ("", "starpod"):
                    # Its extra is not installed, which matters only if the environment is requested.
                    distribution = entry.dist.name if entry.dist else "starpod"
                    extras = ",".join(entry.extras)
                    hint = f"pip install '{distribution}[{extras}]'"
                    if distribution == "starpod":  # starpod is on no package index
                        hint = f"from a clone of the repository: pip install '.[{extras}]'"
                    registry._missing[entry.name] = f"{entry.name} needs the package {package}; {hint}"
                    continue
                # A broken environment of one package must not prevent others from being served.
                logger.error("cannot load environment %s (%s): %r", entry.name, entry.value, error)
        return registry

    def use_stores(self, stores: Sequence[str]) -> None:
        """Pass the values of `--store` to the classes that use stores. Raises RegistryError if none does."""
        try:
            users = [environment for environment in self if environment.use_stores(stores)]
        except Unavailable as error:
            raise RegistryError(f"--store: {error}") from error
        if not users:
            hints = "".join(f"; {hint}" for hint in self._missing.values())
            raise RegistryError(f"--store: none of {', '.join(self.ids)} uses stores{hints}")

    def prepare(self, names: Collection[str] = ()) -> Registry:
        """Let every class load what it needs and describe itself. Return a registry of the classes that can be hosted.

        Raises:
            RegistryError: a class whose id is in `names` cannot be hosted. Others are skipped.
        """
        classes: list[type[Environment]] = []
        for environment in self:
            try:
                environment.prepare()
                convert.spec_to(environment)
            except BaseException as error:
                if is_ctrl_c(error):
                    raise
                reason = f"{environment.spec.id} cannot be served here: {error}"
                if not isinstance(error, Unavailable):
                    bug = EnvironmentRaised.from_exception(environment, error, intact=True)
                    reason = f"{environment.spec.id} cannot be served: {' '.join(str(bug).split())}"
                if environment.spec.id in names:
                    raise RegistryError(reason) from error
                logger.warning("%s", reason)
            else:
                classes.append(environment)
        return Registry(classes)

    def add_module(self, source: str, name: str = "") -> list[str]:
        """Add the Environment classes of a Python file or a package's folder, and return their ids.

        A package's classes are the ones that its `__init__.py` imports or defines.

        Args:
            source: path of the file or folder.
            name: the only class to add, or its id; "" for all.
        """
        module = _load_module(source)
        classes = [
            value
            for value in vars(module).values()
            if inspect.isclass(value)
            and issubclass(value, Environment)
            and f"{value.__module__}.".startswith(f"{module.__name__}.")
        ]
        if not classes:
            raise RegistryError(f"{source} defines no Environment with spec, reset, step and render")
        classes = [cls for cls in classes if not inspect.isabstract(cls)] or classes[:1]
        if name:
            known = {cls.__name__: cls.spec.id for cls in classes if getattr(cls, "spec", None)}
            classes = [cls for cls in classes if name == cls.__name__ or _means(name, known.get(cls.__name__, ""))]
            if not classes:
                nearest = difflib.get_close_matches(name, [*known, *known.values()])
                advice = f"did you mean {' or '.join(nearest)}?" if nearest else f"it has {', '.join(known)}"
                raise RegistryError(f"{Path(source).name} defines no environment {name!r}; {advice}")
        for environment in classes:
            try:
                self.add(environment)
            except RegistryError as error:
                raise RegistryError(f"{_place_of_class(environment)}: {error}") from error
        return [environment.spec.id for environment in classes]

    def select(self, names: Sequence[str]) -> Registry:
        """Return a registry of the named ids only. `sokoban` selects all its versions `sokoban-vN`."""
        classes: list[type[Environment]] = []
        for name in names:
            ids = [id for id in self._versions if _means(name, id)]
            if not ids:
                for id, hint in self._missing.items():
                    if _means(name, id):
                        raise RegistryError(hint)
                raise RegistryError(f"unknown environment {name!r}{self._suggest(name)}")
            classes += [environment for id in ids for environment in self._versions[id] if environment not in classes]
        return Registry(classes)

    @property
    def ids(self) -> list[str]:
        return sorted(self._versions)

    def __iter__(self) -> Iterator[type[Environment]]:
        for id in self.ids:
            yield from self._versions[id]

    def versions(self, id: str) -> list[type[Environment]]:
        """Return all versions of an id, newest first. Raises UNKNOWN_ENVIRONMENT with the nearest ids."""
        try:
            return self._versions[id]
        except KeyError:
            nearest = self._nearest(id)
            raise CallError(
                "UNKNOWN_ENVIRONMENT",
                f"this server hosts no environment {id[:_LONGEST_NAME]!r}{self._suggest(id)}",
                {"nearest": ",".join(nearest), "available": ",".join(self.ids)},
            ) from None

    def find(self, id: str, version_range: str = "") -> type[Environment]:
        """Return the newest version of an id within a range. Raises UNKNOWN_ENVIRONMENT or UNKNOWN_VERSION."""
        versions = self.versions(id)
        if not version_range:
            return versions[0]
        try:
            specifier = parse_version_range(version_range)
        except ValueError as error:
            raise bad_argument("version", str(error)) from error
        for environment in versions:
            if specifier.contains(environment.spec.version):
                return environment
        available = ",".join(environment.spec.version for environment in versions)
        raise CallError(
            "UNKNOWN_VERSION",
            f"no hosted version of {id} is {version_range}; available: {available}",
            {"available": available},
        )

    def find_restorer(self, id: str, version: str) -> type[Environment]:
        """Return the class that restores a snapshot of this version. Raises INCOMPATIBLE_SNAPSHOT."""
        versions = self.versions(id)
        if len(version) <= _LONGEST_RANGE and _VERSION.fullmatch(version):
            for environment in versions:
                if environment.spec.version == version:
                    return environment
            for environment in versions:
                if environment.spec.restores and parse_version_range(environment.spec.restores).contains(version):
                    return environment
        available = ",".join(environment.spec.version for environment in versions)
        raise CallError(
            "INCOMPATIBLE_SNAPSHOT",
            f"no hosted version of {id} ({available}) restores snapshots of version {version[:_LONGEST_NAME]!r}",
            {"snapshot_version": version[:_LONGEST_NAME], "available": available},
        )

    def _nearest(self, name: str) -> list[str]:
        return difflib.get_close_matches(name[:_LONGEST_NAME].lower(), self.ids, n=3, cutoff=0.5)

    def _suggest(self, name: str) -> str:
        nearest = self._nearest(name)
        if nearest:
            return f"; did you mean {' or '.join(nearest)}?"
        return f"; it has {', '.join(self.ids) or 'none'}"
