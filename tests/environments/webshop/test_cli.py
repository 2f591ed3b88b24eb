"""`starpod webshop` and `starpod serve --store`, as they are typed."""

import json
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner, Result

from starpod.environments.webshop import cli
from starpod.environments.webshop.catalogue.synthetic import write_files
from starpod.environments.webshop.store.build import Synthetic, build
from starpod.environments.webshop.store.sections import StoreError
from starpod.environments.webshop.store.served import give_stores
from starpod.environments.webshop.store.store import MANIFEST, Store
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
from tests.support import start_server

COUNT = 30


def webshop(*arguments: object) -> Result:
    return CliRunner().invoke(cli.webshop, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("raw")
    write_files(folder, COUNT, 3)
    return folder


def files(raw: Path) -> list[object]:
    return [
        *("--products", raw / "items_shuffle.json", "--attributes", raw / "items_ins_v2.json"),
        *("--human", raw / "items_human_ins.json"),
    ]


def test_a_store_is_built_from_files_and_can_be_looked_into(raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "store"
    done = webshop("build", *files(raw), "--out", out, "--num-products", 20, "--price-seed", 7, "--nouns", "textblob")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"{out}: 20 products, ")
    for stage in ("products", "index", "goals.human.original", "nouns"):
        assert stage in done.stderr
    facts = json.loads(webshop("info", out, "--json").stdout)
    assert (facts["source"], facts["products"], facts["documents"]) == ("items_shuffle.json, the first 20", 20, 20)
    assert (facts["price_seed"], facts["tagger"], facts["skipped"]) == (7, "textblob", 0)
    assert facts["digest"] == Store.open(out).digest and "prices" in facts["sections"]
    shown = webshop("info", out).stdout
    assert facts["digest"] in shown and "textblob" in shown and f"{facts['goals']['synthetic']:,}" in shown
    assert "all as they were built" in webshop("verify", out).stdout
    title = Store.open(out).catalogue[4].title
    found = webshop("search", out, title.upper(), "-k", 3)
    assert found.exit_code == 0 and len(found.stdout.splitlines()) == 3
    product = Store.open(out).catalogue[4]
    best = found.stdout.splitlines()[0].split()
    assert best[:2] == ["1", product.asin] and product.price_tag in found.stdout
    nothing = webshop("search", out, "zzzz")
    assert (nothing.exit_code, nothing.stdout, nothing.stderr) == (0, "", "0 found\n")


def test_built_again_it_says_the_same_and_other_data_needs_force(tmp_path: Path) -> None:
    out = tmp_path / "store"
    first = webshop("build", "--synthetic", COUNT, "--out", out)
    assert first.exit_code == 0
    assert webshop("build", "--synthetic", COUNT, "--out", out).stdout == first.stdout
    digest = Store.open(out).digest
    other = webshop("build", "--synthetic", COUNT, "--seed", 1, "--out", out)
    assert other.exit_code == 1 and "--force replaces it" in other.stderr
    assert webshop("build", "--synthetic", COUNT, "--seed", 1, "--out", out, "--force").exit_code == 0
    assert Store.open(out).digest != digest
    assert webshop("build", "--synthetic", COUNT, "--plain", "--out", out, "--force").exit_code == 0
    assert Store.open(out).manifest.source == f"plain synthetic, {COUNT} products, seed 0"


def test_malformed_records_are_refused_or_listed(raw: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    records = json.loads((raw / "items_shuffle.json").read_text())
    for record in records[:25]:
        record["images"] = []
    broken.write_text(json.dumps(records))
    call = ["build", "--products", broken, "--attributes", raw / "items_ins_v2.json", "--out", tmp_path / "store"]
    refused = webshop(*call)
    assert refused.exit_code == 1 and "broken.json, record 1, line 1: no images; correct it" in refused.stderr
    skipped = webshop(*call, "--on-malformed", "skip")
    assert skipped.exit_code == 0
    assert (
        skipped.stderr.count("skipped: broken.json, record") == 20 and "more, which are only counted" in skipped.stderr
    )
    assert f"{COUNT - 25} products" in skipped.stdout and "25 malformed records left out" in skipped.stdout


BUILD = ["build", "--out", "x"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (BUILD, "give --products and --attributes, or --synthetic N"),
        ([*BUILD, "--synthetic", "5", "--num-products", "3"], "--synthetic takes no files"),
        ([*BUILD, "--synthetic", "0"], "not in the range"),
        ([*BUILD, "--synthetic", "5", "--nouns", "nonesuch"], "--nouns: no spaCy model 'nonesuch'"),
        ([*BUILD, "--products", "nonesuch"], "does not exist"),
        (["build", "--synthetic", "5"], "--out"),
        ([*BUILD, "--products", __file__, "--attributes", __file__, "--seed", "1"], "--price-seed"),
        (["search", "x"], "QUERY"),
    ],
)
def test_wrong_calls_exit_with_2(arguments: list[str], message: str) -> None:
    done = webshop(*arguments)
    assert done.exit_code == 2 and message in done.stderr


@pytest.mark.parametrize("arguments", [["info"], ["verify"], ["search", "lamp"]])
def test_what_is_no_store_exits_with_1_and_what_to_do(arguments: list[str], copy: Path, tmp_path: Path) -> None:
    command, *rest = arguments
    absent = webshop(command, tmp_path / "none", *rest)
    assert absent.exit_code == 1 and "`starpod webshop build` makes one" in absent.stderr
    prices = next(copy.glob("data-*/prices.bin"))
    prices.write_bytes(prices.read_bytes()[:-8] + b"\1" * 8)
    done = webshop(command, copy, *rest)
    assert done.exit_code == 1 and "prices.bin was changed since it was built; build the store again" in done.stderr


def test_too_long_a_query_is_a_wrong_call(built: Path) -> None:
    done = webshop("search", built, " ".join(f"word{number}" for number in range(1025)))
    assert done.exit_code == 2 and "1025" in done.stderr


def test_a_server_sells_from_the_stores_it_was_given(built: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    build(other, Synthetic(20, seed=5), nouns="textblob")
    arguments = ["webshop", "--store", f"mine={built}", "--store", f"other={other}", "--workers", "2"]

    def first_page(endpoint: str, name: str) -> str:
        request = pb.OpenRequest(environment_id="webshop-v1", seed=3)
        request.options.update({"catalogue": name} if name else {})
        with grpc.insecure_channel(endpoint) as channel:
            opened = EnvironmentServiceStub(channel).Open(request, wait_for_ready=True, timeout=60)
        return str(opened.sessions[0].observation.parts[0].text)

    with start_server(*arguments) as server, grpc.insecure_channel(server.address) as channel:
        described = EnvironmentServiceStub(channel).Describe(pb.DescribeRequest(), wait_for_ready=True, timeout=60)
        assert [spec.id for spec in described.environments] == ["webshop-v1"]
        default, mine, others = (
            {first_page(endpoint, name) for endpoint in described.endpoints} for name in ("", "mine", "other")
        )
        assert default == mine != others and len(mine) == len(others) == 1
        with pytest.raises(grpc.RpcError, match="it has mine, other") as caught:
            first_page(server.address, "../other")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_store_that_cannot_be_used_is_said_before_serving(copy: Path, tmp_path: Path) -> None:
    (copy / MANIFEST).unlink()
    with pytest.raises(StoreError, match=r"is not finished: .*`starpod webshop build`"):
        give_stores([f"mine={copy}"])
    command = [sys.executable, "-m", "starpod.cli.main", "serve", "webshop", "--port", "0", "--workers", "2"]
    done = subprocess.run([*command, "--store", f"mine={tmp_path / 'none'}"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "there is no store at" in done.stderr
