"""Records become products as in the original, and what is not a record is said with its place."""

import gzip
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.environments.webshop.catalogue import jsonstream
from starpod.environments.webshop.catalogue.jsonstream import BrokenJson, elements
from starpod.environments.webshop.catalogue.product import Product
from starpod.environments.webshop.catalogue.records import MalformedRecord, read_products
from tests.environments.webshop.catalogues import real, recorded
from tests.golden import golden


def refuse(malformed: MalformedRecord) -> None:
    raise AssertionError(str(malformed))


def record(**changed: Any) -> dict[str, Any]:
    """A sound record of a product, with some fields changed; a field given as ... is left out."""
    sound = {
        "asin": "B000000001",
        "name": "Oak Table",
        "full_description": "A table.",
        "pricing": "$45.00",
        "images": ["https://example.com/1.jpg"],
        "product_category": "Home › Tables",  # noqa: RUF001
        "small_description": ["Sturdy "],
        "customization_options": "",
        "category": "garden",
        "query": " Console Tables ",
    }
    return {key: value for key, value in (sound | changed).items() if value is not ...}


class Files:
    """The three files in a folder, and what is read of them."""

    def __init__(self, folder: Path) -> None:
        self.products, self.attributes, self.human = (folder / f"{name}.json" for name in ("items", "ins", "human"))

    def read(
        self, products: Any, attributes: Any = None, human: Any = None, rows: int | None = None
    ) -> tuple[list[Product], list[str]]:
        """Products, and what was malformed; a text is written as it is, anything else as JSON."""
        for path, content in zip(
            (self.products, self.attributes, self.human), (products, attributes or {}, human or {}), strict=True
        ):
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        said: list[MalformedRecord] = []
        read = list(read_products(self.products, self.attributes, self.human, rows=rows, on_malformed=said.append))
        return read, [str(malformed) for malformed in said]

    def one(self, **changed: Any) -> Product:
        (product,), said = self.read([record(**changed)])
        assert said == []
        return product


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.mark.parametrize(("size", "valid"), [("1k", 989), ("10k", 9883)])
def test_the_recorded_catalogues_load_as_in_the_original(size: str, valid: int) -> None:
    originals = golden(f"loader_{size}", "webshop_golden")
    products = list(recorded(size))
    assert len(products) == len(originals) == valid
    for product, original in zip(products, originals, strict=True):
        text = product.index_text()
        assert original == {
            "asin": product.asin,
            "query": product.query,
            "pricing": list(product.pricing),
            "price_tag": product.price_tag,
            "options": {group: list(values) for group, values in product.options.items()},
            "n_bullets": len(product.bullets),
            "attributes": list(product.attributes),
            "main_image": product.image,
            "n_human_instructions": len(product.human),
            "index_text_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "index_text_chars": len(text),
        }, product.asin
        assert list(original["options"]) == list(product.options)


def test_the_published_thousand_products() -> None:
    products = list(real())
    instructed = [product for product in products if product.instruction is not None]
    assert (len(products), len(instructed), sum(len(product.human) for product in products)) == (1000, 415, 13)
    assert len({attribute for product in products for attribute in product.attributes}) == 598
    assert len({attribute for product in products for attribute in product.instruction_attributes}) == 261
    assert sum(math.prod(map(len, product.options.values())) for product in instructed) == 6910
    assert sum(len(product.pricing) == 2 for product in products) == 93
    assert sum(product.pricing[-1] < product.pricing[0] for product in products) == 3
    assert len({product.category for product in products}) == 5
    assert len({product.query for product in products}) == 246


def test_rows_are_cut_before_anything_is_left_out(files: Files) -> None:
    rows = [record(asin="nan"), record(asin="B0000000012"), record(), record(name="Second"), record(asin="B000000002")]
    products, said = files.read(rows, rows=4)
    assert [product.asin for product in products] == ["B000000001"]
    assert products[0].title == "Oak Table"  # of equal asins the first wins
    assert said == []
    assert files.read(rows, rows=0) == ([], [])
    (product,) = read_products(files.products, files.attributes, None, rows=3, on_malformed=refuse)
    assert product.human == (), "the file of human instructions is optional"
    files.products.unlink()
    with pytest.raises(FileNotFoundError):
        list(read_products(files.products, files.attributes, None, on_malformed=refuse))


@pytest.mark.parametrize(
    ("pricing", "prices", "tag"),
    [
        *((nothing, (100.0,), "$100.0") for nothing in (..., None, "")),
        ("$45.00", (45.0,), "$45.0"),
        ("$1,847.00", (1847.0,), "$1847.0"),
        ("US$ 9.99 each", (9.99,), "$9.99"),
        ("$16.99$26.99", (16.99, 26.99), "$16.99 to $26.99"),
        ("$26.99 - $16.99", (26.99, 16.99), "$26.99 to $16.99"),
        ("$1$2$3", (1.0, 2.0), "$1.0 to $2.0"),
    ],
)
def test_prices(files: Files, pricing: Any, prices: tuple[float, ...], tag: str) -> None:
    product = files.one(pricing=pricing)
    assert (product.pricing, product.price_tag) == (prices, tag)


def test_options_and_bullets(files: Files) -> None:
    colours = [{"value": " W/ Stand ", "image": "1.jpg"}, {"value": "RED"}, {"value": "red", "image": "2.jpg"}]
    product = files.one(customization_options={"Color": colours, "Size": None, "Style": [], "Fit": ""})
    assert product.options == {"color": ("w |  stand", "red", "red"), "style": (), "fit": ()}
    assert product.option_images == {"w |  stand": "1.jpg", "red": "2.jpg"}
    for nothing in ("", None, {}, []):
        assert files.one(customization_options=nothing).options == {}
    for given_bullets, bullets in ((["a ", ""], ("a ", "")), ("a b", ("a b",)), ([], ())):
        assert files.one(small_description=given_bullets).bullets == bullets  # not stripped


def test_attributes_and_instructions(files: Files) -> None:
    human = {"instruction": "i need one", "instruction_attributes": ["x"], "instruction_options": ["red"], "worker": 1}
    rows = [record(asin=f"B00000000{n}") for n in range(4)]
    described = {
        "B000000000": {"attributes": ["x", "y"], "instruction": "Find me x", "instruction_attributes": ["x"]},
        "B000000001": {"attributes": []},
        "B000000002": {},
    }
    products, said = files.read(rows, described, {"B000000001": [human, human]})
    assert said == []
    assert [product.attributes for product in products] == [("x", "y"), (), ("DUMMY_ATTR",), ("DUMMY_ATTR",)]
    assert [product.instruction for product in products] == ["Find me x", None, None, None]
    assert products[0].instruction_attributes == ("x",)
    assert [len(product.human) for product in products] == [0, 2, 0, 0]
    assert products[1].human[0].options == ("red",)


def test_of_a_key_that_comes_twice_the_last_counts(files: Files) -> None:
    said_twice = '{"B000000001": {"attributes": ["old"]}, "B000000001": {"attributes": ["new"]}}'
    (product,), said = files.read([record()], said_twice)
    assert (product.attributes, said) == (("new",), [])


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"asin": ...}, "no asin"),
        ({"asin": None}, "asin is null, not a text"),
        ({"name": ...}, "no name"),
        ({"name": 5}, "name is a number, not a text"),
        ({"full_description": None}, "full_description is null, not a text"),
        ({"full_description": "\ud800"}, "full_description holds half of a surrogate pair"),
        ({"small_description": None}, "small_description is null, not a text"),
        ({"small_description": ["", 5]}, "an entry of small_description is a number, not a text"),
        ({"images": ...}, "no images"),
        ({"images": []}, "no images"),
        ({"images": "1.jpg"}, "images is a text, not a list"),
        ({"pricing": 45}, "pricing is a number, not a text"),
        ({"pricing": "free"}, "no price can be read from 'free'"),
        ({"pricing": "$"}, "no price can be read from '$'"),
        ({"pricing": "$1.2.3"}, "no price can be read from '$1.2.3'"),
        ({"pricing": "$1$2$x"}, "no price can be read from '$1$2$x'"),
        ({"query": True}, "query is true or false, not a text"),
        ({"customization_options": "red"}, "customization_options is a text, not an object"),
        ({"customization_options": {"Color": {"a": 1}}}, "option 'Color' is an object, not a list"),
        ({"customization_options": {"Color": ["red"]}}, "a value of option 'Color' is a text, not an object"),
        ({"customization_options": {"Color": [{}]}}, "no value"),
        ({"customization_options": {"Color": [{"value": "red", "image": 1}]}}, "image is a number, not a text"),
    ],
)
def test_malformed_products_are_said_and_skipped(files: Files, changed: dict[str, Any], reason: str) -> None:
    rows = [record(asin="B000000009"), record(**changed), record()]
    lines = "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]"
    products, said = files.read(lines)
    assert [product.asin for product in products] == ["B000000009", "B000000001"]
    assert said == [f"items.json, record 2, line 3: {reason}"]


def test_a_record_must_be_an_object(files: Files) -> None:
    values = (None, 5, "text", ["list"], True)
    products, said = files.read([*values, record()])
    assert len(products) == 1
    for number, reported in enumerate(said, 1):
        assert f"items.json, record {number}, line 1: the record is " in reported
    assert len(said) == len(values)


INSTRUCTED = {"attributes": ["x"], "instruction": "Find me x"}
NOT_INSTRUCTED = "an instruction, but no instruction_attributes"


def test_malformed_attributes_and_human_instructions(files: Files) -> None:
    attributes: list[tuple[Any, str]] = [
        (5, "the entry is a number, not an object"),
        ({"attributes": None}, "attributes is null, not a list"),
        (INSTRUCTED, "no instruction_attributes"),
        ({**INSTRUCTED, "instruction_attributes": []}, NOT_INSTRUCTED),
    ]
    for entry, reason in attributes:
        (product,), said = files.read([record()], {"B000000001": entry})
        assert product.attributes == ("DUMMY_ATTR",)
        assert said == [f"ins.json, record 1 ('B000000001'), line 1: {reason}"]
    human: list[tuple[Any, str]] = [
        ({}, "the entry is an object, not a list of instructions"),
        (["text"], "an instruction is a text, not an object"),
        ([{"instruction": "i", "instruction_attributes": []}], "no instruction_options"),
    ]
    for entry, reason in human:
        (product,), said = files.read([record()], {}, {"B000000001": entry})
        assert product.human == ()
        assert said == [f"human.json, record 1 ('B000000001'), line 1: {reason}"]


def test_a_caller_can_refuse(files: Files) -> None:
    files.read([])
    files.products.write_text(json.dumps([record(), 5, record()]))
    with pytest.raises(AssertionError, match="record 2"):
        list(read_products(files.products, files.attributes, None, on_malformed=refuse))


LIST = "a JSON list was expected, which begins with [, not with"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", f"after record 0, line 1: {LIST} 'nothing'"),
        ("{}", f"after record 0, line 1: {LIST} '{{'"),
        ("[{},]", "after record 1, line 1: Expecting value"),
        ("[{}", "after record 1, line 1: a comma or ] was expected, not 'the end of the file'"),
        ('[{}, {"a": ', "after record 1, line 1: Expecting value (the file ends here)"),
        ('[{}, {"a": "tex', "after record 1, line 1: Unterminated string starting at (the file ends here)"),
        ("[{} {}]", "after record 1, line 1: a comma or ] was expected, not '{'"),
        ("[{}]\n\n7", "after record 1, line 3: nothing was expected after the list, but '7' follows"),
        ('[{},\n{"a":\n1,}]', "after record 1, line 3: "),
    ],
)
def test_files_that_are_no_list_of_products(files: Files, content: str, said: str) -> None:
    _, reported = files.read(content)
    assert f"items.json, {said}" in reported[-1]
    assert reported[-1].endswith("; nothing more is read of this file")


def test_truncated_anywhere(files: Files, tmp_path: Path) -> None:
    """Whole records before the cut are read, the cut is said, nothing else happens."""
    rows = [record(asin=f"B00000000{n}", name='Caf\u00e9 \U0001f375 \\ "') for n in range(3)]
    whole = json.dumps(rows, ensure_ascii=False).encode()
    packed = tmp_path / "items.json.gz"
    files.read([])
    compressed = gzip.compress(whole)
    for path, content in ((files.products, whole), (packed, compressed)):
        for cut in range(0, len(content), 29):
            path.write_bytes(content[:cut])
            said: list[MalformedRecord] = []
            read = [product.asin for product in read_products(path, files.attributes, None, on_malformed=said.append)]
            assert read == ["B000000000", "B000000001", "B000000002"][: len(read)]
            # The sum at the end of a packed file is all that may be lost without a record being lost.
            assert len(said) == 1, (path.name, cut)
        path.write_bytes(content)
        assert len(list(read_products(path, files.attributes, None, on_malformed=refuse))) == 3


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(values=st.lists(VALUES, max_size=5), keys=st.lists(st.text(), max_size=5), window=st.integers(1, 40))
def test_streams_read_what_json_reads(
    tmp_path_factory: pytest.TempPathFactory, values: list[Any], keys: list[str], window: int
) -> None:
    path = tmp_path_factory.mktemp("stream") / "a.json"
    pairs = dict(zip(keys, values, strict=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonstream, "CHUNK", window)
        for indent in (None, 1):
            path.write_text(json.dumps(values, indent=indent), encoding="utf-8")
            assert [element.value for element in elements(path, "list")] == values
            path.write_text(json.dumps(pairs, indent=indent, ensure_ascii=False), encoding="utf-8", errors="ignore")
            assert {element.key: element.value for element in elements(path, "object")} == json.loads(path.read_bytes())


def test_an_element_that_never_ends_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonstream, "CHUNK", 64)
    monkeypatch.setattr(jsonstream, "MAX_ELEMENT", 1000)
    path = tmp_path / "a.json"
    path.write_text('[1,\n"' + "x" * 100_000 + '"]')
    stream = elements(path, "list")
    assert next(stream).value == 1
    with pytest.raises(BrokenJson, match="line 2: Unterminated string"):
        next(stream)
