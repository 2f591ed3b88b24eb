"""Building of a store in stages. A build that was killed continues after its last finished stage."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from starpod.environments.webshop.catalogue.records import MalformedRecord

from .sections import StoreError, make_lasting, path_of, read_json, write_json
from .stages import BuildError, BuildStages, Files, Progress, Synthetic
from .store import CHECKED_BYTES, MANIFEST, VERSION, Manifest

__all__ = ["DECISIVE", "BuildError", "Files", "Synthetic", "build", "code_digest"]


def build(
    out: Path,
    source: Files | Synthetic,
    *,
    price_seed: int = 0,
    nouns: str = "",
    on_malformed: Callable[[MalformedRecord], None] | None = None,
    force: bool = False,
    wait: bool = False,
    progress: Progress = lambda stage, done, total: None,
) -> Manifest:
    """Build a store, or continue an unfinished build. A complete store from equal arguments is left unchanged.

    Args:
        source: the products. With `num_products` = n, the shop has the valid products among the first n records, but
            search ranks the first n valid products. The original WebShop also does so: its index was made separately.
        price_seed: seed of drawn prices and caps.
        nouns: tagger (see `load_tagger`) for a table of the nouns of all titles; "" makes no table.
        on_malformed: called for each malformed record, which is skipped; None raises BuildError for the first one.
        force: replace a different store. It stays in use until the new one is complete.
        wait: if another process builds here, wait for it instead of raising BuildError.

    Raises:
        BuildError: the store cannot be built. The message says why.
    """
    key = hashlib.sha256(
        repr([VERSION, code_digest(), source.key(), price_seed, nouns, on_malformed is None]).encode()
    ).hexdigest()
    try:
        out.mkdir(parents=True, exist_ok=True)
        with _locked(out, wait=wait):
            present = _read_present(out)
            if present is not None:
                if _key_of(out / present.data) == key and not force:
                    return present
                if not force:
                    raise BuildError(f"{out} is a complete store of other data ({present.source}); --force replaces it")
            folder = _build_folder(out, present, key)
            work = BuildStages(folder, source, price_seed, nouns, on_malformed, progress)
            manifest = work.run()
            for name in manifest.sections if manifest.bytes > CHECKED_BYTES else ():
                make_lasting(path_of(folder, name))
            write_json(out / MANIFEST, manifest.as_json(), lasting=True)
            for old_folder in out.glob("data-*"):
                if old_folder != folder:
                    shutil.rmtree(old_folder)
            return manifest
    except OSError as error:
        raise BuildError(_explain(out, error)) from error
    except sqlite3.Error as error:  # from the temporary tables of `read_products`
        raise BuildError(f"cannot keep temporary files: {error}; make room and run the same build again") from error


@contextmanager
def _locked(out: Path, *, wait: bool) -> Iterator[None]:
    """Hold the store's lock. The operating system releases it if the process is killed."""
    with (out / ".lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise BuildError(f"another process is building {out}; wait until it is done") from None
        yield


def _read_present(out: Path) -> Manifest | None:
    """Return the manifest of a complete store, or None. Raises BuildError if the folder contains other files."""
    try:
        return Manifest.read(out)
    except StoreError as error:
        names = {path.name for path in out.iterdir()} - {".lock"}
        data_names = {name for name in names if name.startswith("data-")}
        extras = names - data_names - ({MANIFEST, f"{MANIFEST}.new"} if data_names else set())
        if not extras:
            return None
        raise BuildError(f"{out} holds other files ({', '.join(sorted(extras)[:3])}); choose a new folder") from error


def _build_folder(out: Path, present: Manifest | None, key: str) -> Path:
    """Return the folder to build in: the folder of an unfinished build with the same key, or a new one."""
    folder = out / ("data-2" if present is not None and present.data == "data-1" else "data-1")
    if _key_of(folder) != key:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        write_json(folder / "build.json", {"key": key})
    return folder


def _key_of(folder: Path) -> str:
    try:
        return str(read_json(folder / "build.json")["key"])
    except (OSError, ValueError, KeyError):
        return ""


DECISIVE = ("catalogue", "search", "store")
"""Folders of this package whose modules and word lists determine the contents of a store."""


def code_digest() -> str:
    """Return a digest of the files in DECISIVE, because a build must not be continued with different code."""
    digest = hashlib.sha256()
    for folder in DECISIVE:
        for path in sorted((Path(__file__).parent.parent / folder).rglob("*.*")):
            if path.suffix in (".py", ".toml", ".txt"):
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _explain(out: Path, error: OSError) -> str:
    path = error.filename or out
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"no room for {path} ({error.strerror}); make room and run the same build again: it continues"
    return f"cannot write {path}: {error.strerror or error}"
