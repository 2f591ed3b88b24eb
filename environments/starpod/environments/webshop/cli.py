"""`starpod webshop`: commands that build and inspect stores."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from .catalogue.records import MalformedRecord
from .search.bm25 import TooManyTerms
from .search.nouns import load_tagger
from .site.cli import site
from .store import build as building
from .store.sections import StoreError
from .store.stages import Progress as Report
from .store.store import Manifest, Store, verify

_SHOWN_MALFORMED = 20
_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_STORE = click.Path(path_type=Path)


@click.group(epilog="Example: starpod webshop build --synthetic 1000 --out stores/small")
def webshop() -> None:
    """Build and inspect stores for webshop-v1, and open the shop as a web site."""


webshop.add_command(site)


@webshop.command("build", epilog="Example: starpod webshop build --synthetic 1000 --out stores/small")
@click.option("--products", type=_FILE, help="The original's items_shuffle*.json or .json.gz: the list of products.")
@click.option("--attributes", type=_FILE, help="The original's items_ins_v2*.json: attributes and instructions.")
@click.option(
    "--human", type=_FILE, help="The original's items_human_ins.json: instructions by people, for human goals."
)
@click.option(
    "--synthetic",
    type=click.IntRange(1, 1_200_000),
    metavar="N",
    help="Number of products to make up, instead of files.",
)
@click.option("--seed", type=click.IntRange(0), show_default="0", help="Seed of made-up products.")
@click.option("--plain", is_flag=True, help="Make up products with short texts, for policies that learn from scratch.")
@click.option("--out", required=True, type=_STORE, help="Folder for the store.")
@click.option("--num-products", type=click.IntRange(1), metavar="N", help="Read only the first N products.")
@click.option("--price-seed", default=0, help="Seed of prices that the files lack, and of the price limits of goals.")
@click.option(
    "--nouns",
    default="",
    show_default=False,
    metavar="TAGGER",
    help="Find the nouns of titles during the build with this program: textblob, or the name of a spaCy "
    "model. By default, rewards find them when they need them.",
)
@click.option(
    "--on-malformed",
    default="refuse",
    type=click.Choice(["refuse", "skip"]),
    help="refuse: stop at the first record that cannot be read. skip: report it and continue.",
)
@click.option("--force", is_flag=True, help="Replace a store that is already in --out.")
def build_store(
    products: Path | None,
    attributes: Path | None,
    human: Path | None,
    synthetic: int | None,
    seed: int | None,
    plain: bool,
    out: Path,
    num_products: int | None,
    price_seed: int,
    nouns: str,
    on_malformed: str,
    force: bool,
) -> None:
    """Build a store from the files of the original WebShop, or from made-up products.

    If the command is interrupted, run it again: it continues after the last finished stage.
    """
    source: building.Files | building.Synthetic
    if synthetic is not None:
        if products or attributes or human or num_products:
            raise click.UsageError("--synthetic takes no files and no --num-products")
        source = building.Synthetic(synthetic, seed or 0, plain)
    elif products is None or attributes is None:
        raise click.UsageError("give --products and --attributes, or --synthetic N")
    elif seed is not None or plain:
        raise click.UsageError("--seed and --plain go with --synthetic; drawn prices have --price-seed")
    else:
        source = building.Files(products, attributes, human, num_products)
    if nouns:
        try:
            load_tagger(nouns)
        except ValueError as error:
            raise click.UsageError(f"--nouns: {error}") from error
    console = Console(stderr=True)
    skipped_count = 0

    def skip(record: MalformedRecord) -> None:
        nonlocal skipped_count
        skipped_count += 1
        if skipped_count <= _SHOWN_MALFORMED:
            console.print(f"skipped: {escape(str(record))}", highlight=False)
        elif skipped_count == _SHOWN_MALFORMED + 1:
            console.print("skipped: more, which are only counted")

    with _errors(), _bars(console) as progress:
        manifest = building.build(
            out,
            source,
            price_seed=price_seed,
            nouns=nouns,
            on_malformed=skip if on_malformed == "skip" else None,
            force=force,
            progress=progress,
        )
    skip_note = f", {manifest.skipped:,} malformed records left out" if manifest.skipped else ""
    print(f"{out}: {manifest.products:,} products, {_size(manifest.bytes)}{skip_note}")


@webshop.command(epilog="Example: starpod webshop info stores/small")
@click.argument("store", type=_STORE)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def info(store: Path, as_json: bool) -> None:
    """Show the contents of a store."""
    with _errors():
        opened = Store.open(store)
        manifest = opened.manifest
        goals = {kind: len(opened.goals(kind)) for kind in ("human", "synthetic")}
    fields = ("source", "products", "documents", "goals", "price_seed", "tagger", "skipped", "bytes", "digest")
    facts = {name: goals if name == "goals" else getattr(manifest, name) for name in fields}
    if as_json:
        sections = {name: section.as_json() for name, section in manifest.sections.items()}
        print(json.dumps({**facts, "sections": sections}, indent=2))
        return
    for name, value in (
        ("source", manifest.source),
        ("products", f"{manifest.products:,}"),
        ("documents of the index", f"{manifest.documents:,}"),
        ("human goals", f"{goals['human']:,}"),
        ("synthetic goals", f"{goals['synthetic']:,}"),
        ("price seed", str(manifest.price_seed)),
        ("nouns by", manifest.tagger or "the tagger of the server"),
        ("malformed records left out", f"{manifest.skipped:,}"),
        ("size", _size(manifest.bytes)),
        ("digest", manifest.digest),
    ):
        print(f"{name:28}{value}")


@webshop.command("verify", epilog="Example: starpod webshop verify stores/small")
@click.argument("store", type=_STORE)
def verify_store(store: Path) -> None:
    """Read a whole store and compare all checksums. The exit status is 1 if it is damaged."""
    with _errors(), _bars(Console(stderr=True)) as progress:
        total = Manifest.read(store).bytes
        manifest = verify(store, lambda done: progress("bytes", done, total))
        Store.open(store)
    print(f"{store}: {len(manifest.sections)} sections, {_size(manifest.bytes)}, all as they were built")


@webshop.command(epilog="Example: starpod webshop search stores/small 'red shoes' --count 5")
@click.argument("store", type=_STORE)
@click.argument("query")
@click.option("-k", "--count", default=10, type=click.IntRange(1, 50), help="Number of products to show.")
def search(store: Path, query: str, count: int) -> None:
    """Search a store and show the results with their scores, best first."""
    with _errors():
        opened = Store.open(store)
        try:
            ranking = opened.index.ranked(query.lower(), 50)
        except TooManyTerms as error:
            raise click.UsageError(str(error)) from error
    hits = [(opened.catalogue[position], score) for position, score in ranking if position < len(opened.catalogue)]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for rank, (product, score) in enumerate(hits[:count], 1):
        print(f"{rank:2}  {product.asin:10}  {score:8.4f}  {product.price_tag:>18}  {product.title}"[:width])
    print(f"{len(hits)} found", file=sys.stderr)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        raise click.ClickException(str(error)) from error


@contextmanager
def _bars(console: Console) -> Iterator[Report]:
    """Show a progress bar per stage. If the output is not a terminal, only the final bars are printed."""
    columns = (TextColumn("{task.description:26}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield report


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
