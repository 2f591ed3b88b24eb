"""Stores: complete ones open, others are refused with advice, and a server finds the configured ones."""

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from starpod.environments.webshop.shop.starts import open_stores
from starpod.environments.webshop.store import served
from starpod.environments.webshop.store import store as stores_on_disk
from starpod.environments.webshop.store.build import Synthetic, build, code_digest
from starpod.environments.webshop.store.nountable import MappedTagger, nouns_columns
from starpod.environments.webshop.store.sections import StoreError, read_json, write_json
from starpod.environments.webshop.store.served import STORES_VARIABLE, given_stores, stores
from starpod.environments.webshop.store.store import MANIFEST, VERSION, Store, verify
from tests.environments.webshop.conftest import COUNT


def sections_of(store: Path) -> list[Path]:
    return sorted(store.glob("data-*/*.bin"))


def everything(store: Store) -> Any:
    """All that a shop takes from a store."""
    goals = [goal for kind in ("human", "synthetic") for goal in store.goals(kind)]
    titles = [store.catalogue[position].title for position in range(len(store.catalogue))]
    return (
        [store.catalogue[position] for position in range(len(store.catalogue))],
        goals,
        store.prices.tolist(),
        [store.tagger.nouns(title) for title in titles],
        [store.index.ranked(title) for title in titles],
    )


def test_a_store_holds_what_was_put_into_it(built: Path) -> None:
    store = Store.open(built, "mine")
    assert (store.name, len(store.catalogue), store.price_seed) == ("mine", COUNT, 0)
    assert Store.open(built).name == "store"
    for position in range(COUNT):
        product = store.catalogue[position]
        assert store.catalogue.position(product.asin) == position
        low, high = min(product.pricing), max(product.pricing)
        assert low <= store.prices[position] <= high
        assert position in store.index.search(product.title)
    assert store.tagger.name == "textblob"
    for kind in ("human", "synthetic"):
        goals = store.goals(kind)
        assert len(goals) > 0 and goals is store.goals(kind)
        assert all(goal.name == store.catalogue[goal.position].title for goal in goals)
    with pytest.raises(ValueError):
        store.prices[0] = 1.0  # mapped read-only
    assert everything(store) == everything(Store.open(built))


def test_the_digest_distinguishes_stores(built: Path, tmp_path: Path) -> None:
    digests = {Store.open(built).digest}
    for number, change in enumerate(({"price_seed": 1}, {"nouns": ""}, {"source": Synthetic(COUNT, seed=1)})):
        arguments: Any = {"source": Synthetic(COUNT), "nouns": "textblob", **change}
        digests.add(build(tmp_path / str(number), **arguments).digest)
    assert len(digests) == 4


def damaged(data: bytes, draws: random.Random) -> bytes:
    place = draws.randrange(len(data))
    return data[:place] + bytes([data[place] ^ draws.randrange(1, 256)]) + data[place + 1 :]


def test_a_file_that_is_cut_or_gone_or_changed_is_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = random.Random(1)
    for path in (*sections_of(copy), copy / MANIFEST):
        data = path.read_bytes()
        changed = [damaged(data, draws) for _ in range(2 if data else 0)]
        for size, contents in (
            (2**20, changed),
            (0, [data + b"\0", *([data[: len(data) // 2], data[:-1]] if data else [])]),
        ):
            # Only sizes of these sections are checked, so that no byte of a large store is read before it is needed.
            monkeypatch.setattr(stores_on_disk, "CHECKED_BYTES", size)
            for content in contents:
                path.write_bytes(content)
                with pytest.raises(StoreError, match=r"build (it|the store) again|makes one"):
                    Store.open(copy)
                if content in changed:
                    with pytest.raises(StoreError, match="build"):
                        verify(copy)
        path.unlink()
        with pytest.raises(StoreError, match="build"):
            Store.open(copy)
        path.write_bytes(data)
    done: list[int] = []
    assert verify(copy, done.append).bytes == done[-1]


def test_a_large_store_with_changed_bytes_gives_its_products_or_an_error(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [Store.open(copy).catalogue[position] for position in range(COUNT)]
    monkeypatch.setattr(stores_on_disk, "CHECKED_BYTES", 0)
    draws = random.Random(3)
    noticed = 0
    for path in sorted(copy.glob("data-*/products.*.bin")):
        data = path.read_bytes()
        for _ in range(min(20, len(data))):
            path.write_bytes(damaged(data, draws))
            try:
                store = Store.open(copy)
            except StoreError:
                noticed += 1
                continue
            for position, product in enumerate(wanted):
                try:
                    assert store.catalogue[position] == product
                except StoreError:
                    noticed += 1
        path.write_bytes(data)
    assert noticed > 50


def test_what_is_no_store_is_refused_with_what_to_do(tmp_path: Path) -> None:
    for name in ("empty", "foreign", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "foreign" / MANIFEST).write_text('{"name": "a web app", "start_url": "/"}')
    write_json(tmp_path / "other" / MANIFEST, {"format": "another"})
    for name, message in (
        ("none", "there is no store at .*starpod webshop build"),
        ("empty", "is not a store; `starpod webshop build` makes one"),
        ("foreign", "is damaged, or another program's"),
        ("other", "is not a store of this shop"),
    ):
        with pytest.raises(StoreError, match=message):
            Store.open(tmp_path / name)
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match=r"cannot read|is a file; a store is a folder"):
        Store.open(tmp_path / "file")


def test_a_manifest_that_does_not_fit_is_refused_with_what_to_do(copy: Path) -> None:
    manifest = read_json(copy / MANIFEST)
    sections = manifest["sections"]
    lacking = {name: section for name, section in sections.items() if name != "prices"}
    strange = {**sections, "prices": {**sections["prices"], "shape": [COUNT + 1]}}
    newer = {"version": VERSION + 1, "sections": "in another way"}
    changes: list[tuple[dict[str, Any], str]] = [
        (newer, f"has format {VERSION + 1}, this program reads {VERSION}; build it again"),
        ({"sections": lacking}, "do not fit together.*prices.*build it again"),
        ({"sections": strange}, "is damaged"),
        ({"products": COUNT + 1}, "do not fit|cannot read"),
        ({"documents": COUNT - 1}, "do not fit|cannot read"),
        ({"data": "data-9"}, "do not fit|cannot read"),
    ]
    for changed, message in changes:
        write_json(copy / MANIFEST, {**manifest, **changed})
        with pytest.raises(StoreError, match=message):
            Store.open(copy)
    (copy / MANIFEST).unlink()
    with pytest.raises(StoreError, match=r"is not finished: .*`starpod webshop build`"):
        Store.open(copy)


def test_a_store_of_which_nothing_may_be_written_is_opened(copy: Path) -> None:
    for path in (*sections_of(copy), copy / MANIFEST):
        path.chmod(0o444)
    copy.chmod(0o555)
    try:
        assert len(Store.open(copy).catalogue) == COUNT
    finally:
        copy.chmod(0o755)


def test_the_table_of_nouns_answers_for_its_titles_alone() -> None:
    table = {f"title {number}": tuple(f"noun {each}" for each in range(number % 4)) for number in range(300)}
    found = [*table.items(), ("title 7", ("title 7 again",))]
    tagger = MappedTagger("somebody", nouns_columns(found))
    assert {title: tagger.nouns(title) for title in table} == table
    with pytest.raises(KeyError, match="somebody has no title 'title 300'"):
        tagger.nouns("title 300")
    with pytest.raises(KeyError):
        MappedTagger("nobody", nouns_columns([])).nouns("")


# --- which stores a server has -----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(STORES_VARIABLE, raising=False)
    served._stores_of.cache_clear()
    yield
    served._stores_of.cache_clear()


def test_stores_are_those_given_then_the_synthetic_one(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STARPOD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(served.BUNDLED, "synthetic", {"count": 50})  # type: ignore[misc]
    monkeypatch.setenv(STORES_VARIABLE, os.pathsep.join((f"mine={built}", f"gone={tmp_path / 'gone'}")))
    assert list(stores()) == ["mine", "gone", "synthetic", "plain"]
    assert stores()["mine"] is stores()["mine"] and stores()["mine"].name == "mine"
    assert not (tmp_path / "cache").exists()
    with pytest.raises(StoreError, match="there is no store at"):
        stores()["gone"]
    with pytest.raises(KeyError):
        stores()["other"]
    synthetic = stores()["synthetic"]
    wanted = synthetic.prices.copy()
    assert (synthetic.name, len(synthetic.catalogue), synthetic.tagger.name) == ("synthetic", 50, "textblob")
    (kept,) = (tmp_path / "cache").iterdir()
    served._stores_of.cache_clear()
    before = (kept / MANIFEST).stat().st_mtime_ns
    assert stores()["synthetic"].digest == synthetic.digest and (kept / MANIFEST).stat().st_mtime_ns == before
    prices = next(kept.glob("data-*/prices.bin"))
    prices.write_bytes(b"x" * prices.stat().st_size)
    served._stores_of.cache_clear()
    assert np.array_equal(stores()["synthetic"].prices, wanted)  # found damaged, and built again


def test_a_server_opens_all_stores_before_its_first_session(
    built: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened = []

    def open_bundled(name: str) -> Store:
        opened.append(name)
        if name == "plain":
            raise StoreError("the disk is full")
        return Store.open(built, name)

    monkeypatch.setattr(served, "_open_bundled", open_bundled)
    open_stores()
    assert opened == ["synthetic", "plain"] and "the catalogue plain is missing: the disk is full" in caplog.text
    monkeypatch.setenv(STORES_VARIABLE, f"mine={built.parent / 'gone'}")
    with pytest.raises(StoreError, match="there is no store at"):
        open_stores()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("store", "'store' is not NAME=PATH"),
        ("=path", "is not NAME=PATH"),
        ("name=", "is not NAME=PATH"),
        ("a/b=path", "names have letters"),
        ("a=1:a=2", "the name 'a' is taken"),
        ("synthetic=path", "the name 'synthetic' is taken"),
    ],
)
def test_names_of_stores_are_checked(text: str, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        given_stores(text)
    assert given_stores("a=/x=y:b.c-d=z:") == {"a": Path("/x=y"), "b.c-d": Path("z")}


OPEN_BUNDLED = """
from starpod.environments.webshop.shop.starts import open_stores
from starpod.environments.webshop.store import served
served.BUNDLED["plain"]["count"] = 60
store = served.stores()["plain"]
print(store.digest, len(store.catalogue))
"""


def test_without_a_cache_folder_processes_build_a_bundled_store_once_in_a_shared_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    cache = tmp_path / "file" / "below"
    environment = {**os.environ, "STARPOD_CACHE": str(cache), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", OPEN_BUNDLED]
    processes = [subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True) for _ in range(2)]
    (one, errors), other = (process.communicate() for process in processes)
    assert other == (one, errors) and one.endswith(" 60\n") and errors == ""
    (shared,) = tmp_path.glob("starpod-*")
    assert shared.stat().st_mode & 0o777 == 0o700
    assert [path.parent.name for path in shared.glob("*/data-*")] == [f"webshop-plain-{code_digest()[:16]}"]

    shutil.rmtree(shared)
    shared.symlink_to(tmp_path)  # somebody else's trap
    monkeypatch.setenv("STARPOD_CACHE", str(cache))
    monkeypatch.setattr(served.tempfile, "tempdir", str(tmp_path))
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(served.atexit, "register", at_exit.append)
    first, own = served._cache_folders()
    assert first == cache and own.parent == tmp_path and own.is_dir() and not own.is_symlink()
    at_exit[0]()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", shared.name]
