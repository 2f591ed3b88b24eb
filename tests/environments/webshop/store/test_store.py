"""Stores: whole ones open, others are refused with what to do, and a server finds those that it was given."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from starpod.environments.webshop.store import served
from starpod.environments.webshop.store import store as stores_on_disk
from starpod.environments.webshop.store.build import Synthetic, build
from starpod.environments.webshop.store.nountable import MappedTagger, nouns_columns
from starpod.environments.webshop.store.sections import StoreError, read_json, write_json
from starpod.environments.webshop.store.served import STORES_VARIABLE, given_stores, stores
from starpod.environments.webshop.store.store import MANIFEST, VERSION, Store, verify

COUNT = 40


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("built") / "store"
    build(out, Synthetic(COUNT), nouns="textblob")
    return out


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "copy"))


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


def test_the_digest_tells_stores_apart(built: Path, tmp_path: Path) -> None:
    digests = {Store.open(built).digest}
    for number, change in enumerate(({"price_seed": 1}, {"nouns": ""}, {"source": Synthetic(COUNT, seed=1)})):
        arguments: Any = {"source": Synthetic(COUNT), "nouns": "textblob", **change}
        digests.add(build(tmp_path / str(number), **arguments).digest)
    assert len(digests) == 4


def test_a_file_cut_at_any_place_or_gone_is_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores_on_disk, "CHECKED_BYTES", 0)  # as a large store, whose checksums are not read
    draws = random.Random(1)
    refused = 0
    for path in (*sections_of(copy), copy / MANIFEST):
        data = path.read_bytes()
        changes = [data + b"\0", *(data[: draws.randrange(len(data))] for _ in range(4) if data)]
        for change in changes:
            path.write_bytes(change)
            with pytest.raises(StoreError, match=r"build (it|the store) again|makes one"):
                Store.open(copy)
            refused += 1
        path.unlink()
        with pytest.raises(StoreError, match="build"):
            Store.open(copy)
        path.write_bytes(data)
    assert refused > 100
    assert Store.open(copy).catalogue[0]


@pytest.mark.minutes
def test_a_changed_byte_is_noticed_when_a_small_store_is_opened_and_by_verify(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = random.Random(2)
    noticed = 0
    for path in (*sections_of(copy), copy / MANIFEST):
        data = path.read_bytes()
        for place in draws.sample(range(len(data)), min(5, len(data))):
            path.write_bytes(data[:place] + bytes([data[place] ^ draws.randrange(1, 256)]) + data[place + 1 :])
            with pytest.raises(StoreError, match="build"):
                Store.open(copy)
            with pytest.raises(StoreError, match="build"):
                verify(copy)
            noticed += 1
        path.write_bytes(data)
    assert noticed > 150
    done: list[int] = []
    assert done == [] and verify(copy, done.append).bytes == done[-1]


def test_a_large_store_with_changed_bytes_gives_its_products_or_an_error(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [Store.open(copy).catalogue[position] for position in range(COUNT)]
    monkeypatch.setattr(stores_on_disk, "CHECKED_BYTES", 0)
    draws = random.Random(3)
    noticed = 0
    for path in sorted(copy.glob("data-*/products.*.bin")):
        data = path.read_bytes()
        for place in draws.sample(range(len(data)), min(60, len(data))):
            path.write_bytes(data[:place] + bytes([data[place] ^ draws.randrange(1, 256)]) + data[place + 1 :])
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
    assert noticed > 100


def changed_manifest(store: Path, **changes: Any) -> None:
    write_json(store / MANIFEST, {**read_json(store / MANIFEST), **changes})


def test_what_is_no_store_is_refused_with_what_to_do(copy: Path, tmp_path: Path) -> None:
    cases: list[tuple[Path, str]] = [(tmp_path / "none", "there is no store at .*starpod webshop build")]
    (tmp_path / "file").write_text("x")
    cases.append((tmp_path / "file", "cannot read|is a file; a store is a folder"))
    (tmp_path / "empty").mkdir()
    cases.append((tmp_path / "empty", "is not a store; `starpod webshop build` makes one"))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / MANIFEST).write_text(json.dumps({"name": "a web app", "start_url": "/"}))
    cases.append((foreign, "is damaged, or another program's"))
    (tmp_path / "other").mkdir()
    write_json(tmp_path / "other" / MANIFEST, {"format": "another"})
    cases.append((tmp_path / "other", "is not a store of this shop"))
    newer = Path(shutil.copytree(copy, tmp_path / "newer"))
    changed_manifest(newer, version=VERSION + 1, sections="in another way")
    cases.append((newer, f"has format {VERSION + 1}, this program reads {VERSION}; build it again"))
    half = Path(shutil.copytree(copy, tmp_path / "half"))
    (half / MANIFEST).unlink()
    cases.append((half, "is not finished: run the same `starpod webshop build` again"))
    lacking = Path(shutil.copytree(copy, tmp_path / "lacking"))
    sections = read_json(lacking / MANIFEST)["sections"]
    changed_manifest(lacking, sections={name: sections[name] for name in sections if name != "prices"})
    cases.append((lacking, "do not fit together.*prices.*build it again"))
    strange = Path(shutil.copytree(copy, tmp_path / "strange"))
    changed_manifest(strange, sections={**sections, "prices": {**sections["prices"], "shape": [COUNT + 1]}})
    cases.append((strange, "is damaged"))
    for number, fields in enumerate(({"products": COUNT + 1}, {"documents": COUNT - 1}, {"data": "data-9"})):
        other = Path(shutil.copytree(copy, tmp_path / f"other {number}"))
        changed_manifest(other, **fields)
        cases.append((other, "do not fit|cannot read"))
    for path, message in cases:
        with pytest.raises(StoreError, match=message):
            Store.open(path)


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
    assert (synthetic.name, len(synthetic.catalogue), synthetic.tagger.name) == ("synthetic", 1000, "textblob")
    (kept,) = (tmp_path / "cache").iterdir()
    served._stores_of.cache_clear()
    before = (kept / MANIFEST).stat().st_mtime_ns
    assert stores()["synthetic"].digest == synthetic.digest and (kept / MANIFEST).stat().st_mtime_ns == before
    prices = next(kept.glob("data-*/prices.bin"))
    prices.write_bytes(b"x" * prices.stat().st_size)
    served._stores_of.cache_clear()
    assert np.array_equal(stores()["synthetic"].prices, wanted)  # found damaged, and built again


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


PLAIN = f" {served.BUNDLED['plain']['count']}\n"
OPEN_BUNDLED = """
from starpod.environments.webshop.store.served import stores
store = stores()["plain"]
print(store.digest, len(store.catalogue))
"""


def start_opening(**environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OPEN_BUNDLED],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_many_processes_at_once_build_a_bundled_store_once(tmp_path: Path) -> None:
    processes = [start_opening(STARPOD_CACHE=str(tmp_path)) for _ in range(4)]
    results = [process.communicate(timeout=100) for process in processes]
    assert {result[1] for result in results} == {""}
    assert len({result[0] for result in results}) == 1 and results[0][0].endswith(PLAIN)
    assert len(list(tmp_path.glob("*/data-*"))) == 1


def test_without_a_cache_folder_bundled_stores_lie_in_a_temporary_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environment = {"STARPOD_CACHE": str(tmp_path / "file" / "below"), "TMPDIR": str(tmp_path)}
    out, errors = start_opening(**environment).communicate(timeout=100)
    assert out.endswith(PLAIN) and errors == ""
    (shared,) = tmp_path.glob("starpod-*")
    assert shared.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(shared)
    shared.symlink_to(tmp_path)  # somebody else's trap
    again, errors = start_opening(**environment).communicate(timeout=100)
    assert again == out and errors == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", shared.name]
