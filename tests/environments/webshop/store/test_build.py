"""Building a store: what comes out, and that no kill, full disk or bad record can spoil it."""

import gzip
import hashlib
import itertools
import json
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from starpod.environments.webshop.catalogue.records import MalformedRecord
from starpod.environments.webshop.catalogue.synthetic import write_files
from starpod.environments.webshop.store import build as building
from starpod.environments.webshop.store import stages
from starpod.environments.webshop.store.build import BuildError, Files, Synthetic, build
from starpod.environments.webshop.store.sections import SectionWriter, StoreError
from starpod.environments.webshop.store.store import MANIFEST, Store
from tests.environments.webshop.conftest import COUNT
from tests.forks import run_forks
from tests.golden import ROOT, golden

NOUNS = "textblob"


def contents(store: Path) -> dict[str, str]:
    """The digest of every file of a store but those of the builder's own: its lock and its folder's key."""
    return {
        str(path.relative_to(store)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(store.rglob("*"))
        if path.is_file() and path.name not in (".lock", "build.json")
    }


def build_and_die(out: Path, at: int) -> None:
    """Builds, and is killed in the n-th of all writes, renamings and removals: in the middle, where it has one."""
    left = at

    def countdown() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    def write_bytes(path: Path, data: Any, write: Any = Path.write_bytes) -> None:
        if countdown():
            write(path, bytes(data)[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, data)

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            if countdown():
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **named)

        return counted

    Path.write_bytes = write_bytes  # type: ignore[assignment, method-assign]
    Path.replace = dying(Path.replace)  # type: ignore[method-assign]
    Path.mkdir = dying(Path.mkdir)  # type: ignore[method-assign]
    building.shutil.rmtree = dying(building.shutil.rmtree)  # type: ignore[assignment]
    SectionWriter.write = dying(SectionWriter.write)  # type: ignore[method-assign]
    build(out, Synthetic(COUNT), nouns=NOUNS)


def test_a_build_killed_in_any_write_continues_to_the_same_store(built: Path, tmp_path: Path) -> None:
    wanted = contents(built)
    deaths = 0
    for at in itertools.count(1, 11):  # one of eleven: each takes a quarter of a second
        out = tmp_path / str(at)
        if run_forks(1, build_and_die, out, at) == [0]:
            break
        deaths += 1
        if not (out / MANIFEST).exists():
            with pytest.raises(StoreError, match=r"not finished|is not a store|there is no store"):
                Store.open(out)
        build(out, Synthetic(COUNT), nouns=NOUNS)
        assert contents(out) == wanted, at
    assert deaths > 9
    again = tmp_path / "again and again"
    for at in itertools.count(20, 20):
        if run_forks(1, build_and_die, again, at) == [0]:
            break
    assert at > 20 and contents(again) == wanted


def interrupted(at: str) -> Callable[[str, int, int | None], None]:
    """Interrupts a build in this stage."""

    def stop(stage: str, done: int, total: int | None) -> None:
        if stage.startswith(at):
            raise KeyboardInterrupt

    return stop


def test_finished_stages_are_not_done_again(tmp_path: Path) -> None:
    out = tmp_path / "store"
    told: list[str] = []

    with pytest.raises(KeyboardInterrupt):
        build(out, Synthetic(COUNT), progress=interrupted("goals"))
    build(out, Synthetic(COUNT), progress=lambda stage, done, total: told.append(stage))
    assert {stage.partition(".")[0] for stage in told} == {"goals"}
    told.clear()
    build(out, Synthetic(COUNT), progress=lambda stage, done, total: told.append(stage))
    assert told == []


def test_products_that_were_lost_with_the_power_are_made_again(built: Path, tmp_path: Path) -> None:
    out = tmp_path / "store"
    with pytest.raises(KeyboardInterrupt):
        build(out, Synthetic(COUNT), nouns=NOUNS, progress=interrupted("index"))
    (products,) = out.glob("data-*/products.data.bin")
    products.write_bytes(bytes(products.stat().st_size))
    build(out, Synthetic(COUNT), nouns=NOUNS)
    assert contents(out) == contents(built)


def test_other_data_goes_into_a_store_only_by_force_and_the_old_one_serves_until_then(
    built: Path, tmp_path: Path
) -> None:
    out = tmp_path / "store"
    first = build(out, Synthetic(COUNT), nouns=NOUNS)
    opened = Store.open(out)
    for change in ({"price_seed": 1}, {"nouns": ""}):
        with pytest.raises(BuildError, match=f"complete store of other data .synthetic, {COUNT} products.*--force"):
            build(out, Synthetic(COUNT), **{"nouns": NOUNS, **change})  # type: ignore[arg-type]

    with pytest.raises(KeyboardInterrupt):
        build(out, Synthetic(2 * COUNT), force=True, progress=interrupted(""))
    assert Store.open(out).digest == first.digest
    second = build(out, Synthetic(2 * COUNT), force=True)
    assert (Store.open(out).digest, second.products) == (second.digest, 2 * COUNT)
    assert opened.catalogue[COUNT - 1] == Store.open(built).catalogue[COUNT - 1]  # whoever has the old one keeps it
    assert [path.name for path in out.glob("data-*")] == [second.data]
    assert build(out, Synthetic(COUNT), nouns=NOUNS, force=True).digest == first.digest


def test_a_damaged_store_is_built_again_by_force(tmp_path: Path) -> None:
    out = tmp_path / "store"
    wanted = build(out, Synthetic(COUNT)).digest
    (out / MANIFEST).write_text("{")
    assert build(out, Synthetic(COUNT)).digest == wanted  # the sections were all there
    prices = out / Store.open(out).manifest.data / "prices.bin"
    prices.write_bytes(prices.read_bytes()[:-1])
    with pytest.raises(StoreError, match="cut short"):
        Store.open(out)
    assert build(out, Synthetic(COUNT), force=True).digest == wanted
    assert Store.open(out).digest == wanted


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(BuildError, match=r"other files \(thesis.tex\)"):
        build(tmp_path, Synthetic(COUNT), force=True)
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == ["thesis.tex"]
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / MANIFEST).write_text("{}")
    with pytest.raises(BuildError, match=r"holds other files \(manifest.json\)"):
        build(tmp_path / "app", Synthetic(COUNT), force=True)
    file = tmp_path / "thesis.tex"
    with pytest.raises(BuildError, match="cannot write"):
        build(file, Synthetic(COUNT))
    assert file.read_text() == "years of work"


def build_patiently(out: Path) -> None:
    build(out, Synthetic(COUNT), wait=True)


def test_two_builds_at_once_are_one(tmp_path: Path) -> None:
    out = tmp_path / "store"
    assert run_forks(2, build_patiently, out) == [0, 0]
    assert Store.open(out).manifest.products == COUNT

    def refused(stage: str, done: int, total: int | None) -> None:
        if refusals:
            return
        with pytest.raises(BuildError, match="another process is building") as error:
            build(tmp_path / "other", Synthetic(COUNT))
        refusals.append(error)

    refusals: list[Any] = []
    build(tmp_path / "other", Synthetic(COUNT), progress=refused)
    assert refusals


def starved(out: Path, size: int) -> None:
    """Builds where no file may be larger; exits with 7 if the error says so."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    try:
        build(out, Synthetic(COUNT), nouns=NOUNS)
    except BuildError as error:
        os._exit(7 if "make room and run the same build again" in str(error) else 1)


def test_a_full_disk_is_reported_and_with_room_the_run_continues(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = sorted({path.stat().st_size for path in built.rglob("*.bin")})
    for number, size in enumerate((1, sizes[-1] - 1)):
        out = tmp_path / str(number)
        assert run_forks(1, starved, out, size) == [7]
        with pytest.raises(StoreError):
            Store.open(out)
        build(out, Synthetic(COUNT), nouns=NOUNS)
        assert contents(out) == contents(built)

    def full(*arguments: Any, **named: Any) -> Any:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(stages, "read_products", full)  # whose temporary folder is full
    with pytest.raises(BuildError, match="disk is full; make room"):
        build(tmp_path / "store", Synthetic(COUNT))


def files(folder: Path, count: int = COUNT) -> Files:
    folder.mkdir(exist_ok=True)
    write_files(folder, count, 0)
    return Files(folder / "items_shuffle.json", folder / "items_ins_v2.json", folder / "items_human_ins.json")


def test_files_and_the_generator_give_the_same_store(built: Path, tmp_path: Path) -> None:
    source = files(tmp_path / "raw")
    out = tmp_path / "store"
    manifest = build(out, source, nouns=NOUNS)
    assert (manifest.digest, manifest.source) == (Store.open(built).digest, "items_shuffle.json")
    without = build(tmp_path / "no human", Files(source.products, source.attributes), nouns=NOUNS)
    assert len(Store.open(tmp_path / "no human").goals("human")) == 0 < len(Store.open(out).goals("human"))
    assert without.digest != manifest.digest


def test_changed_files_are_not_continued(tmp_path: Path) -> None:
    source = files(tmp_path / "raw")

    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "store", source, progress=interrupted("index"))
    files(tmp_path / "raw", COUNT // 2)
    assert build(tmp_path / "store", source).products == COUNT // 2
    source.products.unlink()
    with pytest.raises(BuildError, match=r"cannot read .*items_shuffle.json: No such file"):
        build(tmp_path / "other", source)
    assert not (tmp_path / "other").exists()


def test_malformed_records_are_refused_or_reported_and_counted(tmp_path: Path) -> None:
    source = files(tmp_path / "raw")
    records = json.loads(source.products.read_text())
    records[3]["images"] = []
    records[7] = 5
    source.products.write_text(json.dumps(records))
    with pytest.raises(BuildError, match=r"items_shuffle.json, record 4, .*no images.*--on-malformed skip"):
        build(tmp_path / "store", source)
    for num_products in (None, COUNT - 1):
        found: list[MalformedRecord] = []
        out = tmp_path / f"skipping {num_products}"
        cut = Files(source.products, source.attributes, source.human, num_products)
        manifest = build(out, cut, on_malformed=found.append)
        assert [each.place.split(",")[1] for each in found] == [" record 4", " record 8"]
        assert (manifest.skipped, manifest.products) == (2, COUNT - 2 - (num_products is not None))
        assert manifest.documents == COUNT - 2
    source.products.write_text("[]")
    with pytest.raises(BuildError, match="has no product that can be read"):
        build(tmp_path / "store", source)


def recorded_files(catalogue: str, num_products: int | None) -> Files:
    folder = ROOT / "webshop_golden" / "catalogue" / catalogue
    return Files(
        *(folder / f"{stem}.json.gz" for stem in ("items_shuffle", "items_ins_v2", "items_human_ins")), num_products
    )


@pytest.mark.parametrize("name", ["c6", "c7"])
def test_a_store_holds_the_recorded_prices_and_goals(name: str, tmp_path: Path) -> None:
    goals = golden(f"goals_{name}", "webshop_golden")
    (config,) = [
        each for each in json.loads((ROOT / "webshop_golden" / "configs.json").read_text()) if each["config"] == name
    ]
    prices = json.loads(gzip.decompress((ROOT / "webshop_golden" / f"prices_{name}.json.gz").read_bytes()))
    source = recorded_files(config["catalogue"], config["num_products"])
    manifest = build(tmp_path, source, price_seed=config["random_seed_before_construction"])
    store = Store.open(tmp_path)
    assert len(store.catalogue) == config["products_loaded"]
    assert {store.catalogue[place].asin: float(price) for place, price in enumerate(store.prices)} == prices
    ours = store.goals("human" if config["human_goals"] else "synthetic")
    keys = ("index", "asin", "instruction_text", "price_upper")
    assert [[getattr(goal, key) for key in keys] for goal in ours] == [[goal[key] for key in keys] for goal in goals]
    assert manifest.documents == min(config["num_products"], 9883 if config["catalogue"] == "10k" else 989)


def test_the_digest_of_the_code_covers_every_module_that_building_imports() -> None:
    code = (
        "import sys, starpod.environments.webshop.store.build, starpod.environments.webshop.search.bm25\n"
        "print(*(name.split('.')[3] for name in sys.modules if name.startswith('starpod.environments.webshop.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == set(building.DECISIVE)


def test_the_digest_of_the_code_covers_the_word_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Path(building.__file__).parent.parent
    for folder in building.DECISIVE:
        shutil.copytree(shop / folder, tmp_path / folder)
    monkeypatch.setattr(building, "__file__", str(tmp_path / "store" / "build.py"))
    digests = {building.code_digest()}
    for words in (*tmp_path.rglob("*.toml"), *tmp_path.rglob("*.txt")):
        words.write_text(f"{words.read_text()}\n# and a word\n")
        digests.add(building.code_digest())
    assert len(digests) == 8
