"""The made-up catalogue: in the original's schema, the same everywhere, of any size, like a real one in its numbers."""

import hashlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from starpod.environments.webshop.catalogue.product import Product
from starpod.environments.webshop.catalogue.records import MalformedRecord, read_products
from starpod.environments.webshop.catalogue.synthetic import FILES, generate, write_files
from starpod.environments.webshop.catalogue.synthetic.maker import Maker
from starpod.environments.webshop.catalogue.synthetic.names import asin
from starpod.environments.webshop.catalogue.synthetic.vocabulary import DEPARTMENTS, DRAWN, ORDERED
from starpod.environments.webshop.catalogue.synthetic.wording import spoken

DROPPED_BY_THE_ORIGINAL = (
    "product_information brand brand_url list_price availability_quantity availability_status total_reviews "
    "total_answered_questions seller_id seller_name fulfilled_by_amazon fast_track_message aplus_present "
    "small_description_old"
).split()
STOP_WORDS = set(
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with".split()
)
USED = (
    "asin name full_description pricing images product_category small_description customization_options category query "
    "average_rating page"
).split()


def refuse(malformed: MalformedRecord) -> None:
    raise AssertionError(str(malformed))


def load(folder: Path, count: int, seed: int = 0, *, plain: bool = False) -> list[Product]:
    write_files(folder, count, seed, plain=plain)
    products, attributes, human = (folder / name for name in FILES)
    return list(read_products(products, attributes, human, on_malformed=refuse))


@pytest.fixture(scope="module")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> list[Product]:
    return load(tmp_path_factory.mktemp("thousand"), 1000)


def test_a_seed_means_the_same_products_in_every_process() -> None:
    code = (
        "import json; from starpod.environments.webshop.catalogue.synthetic import generate; "
        "print(json.dumps([list(generate(60, 7, plain=plain)) for plain in (False, True)]))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    here = [list(generate(60, 7, plain=plain)) for plain in (False, True)]
    assert run.stdout.strip() == json.dumps(here)
    assert list(generate(60, 8)) != here[0]
    assert [list(generate(20, 7, plain=plain)) for plain in (False, True)] == [
        made[:20] for made in here
    ]  # a smaller catalogue is the head of a larger one
    assert list(generate(0, 7, plain=True)) == []


@pytest.mark.parametrize(("plain", "expected"), [(False, "6b985725b228b9e9"), (True, "0be8ecbf745259df")])
def test_a_seed_means_the_same_products_in_every_version(plain: bool, expected: str) -> None:
    """Changes to the generator change this on purpose; another version of Python or of a library must not."""
    made = json.dumps(list(generate(200, 0, plain=plain)))
    assert hashlib.sha256(made.encode()).hexdigest()[:16] == expected


def test_records_have_the_fields_of_the_original() -> None:
    for plain in (False, True):
        for record, _, _ in generate(100, plain=plain):
            assert set(record) - {"model"} == {*USED, *DROPPED_BY_THE_ORIGINAL}


def test_files_hold_what_is_generated(tmp_path: Path) -> None:
    told: list[int] = []
    write_files(tmp_path, 1020, 5, progress=told.append)
    assert told == [1000, 1020]
    records = list(generate(1020, 5))
    products, attributes, human = (json.loads((tmp_path / name).read_text(encoding="utf-8")) for name in FILES)
    assert products == [record for record, _, _ in records]
    assert attributes == {record["asin"]: entry for record, entry, _ in records}
    assert human == {record["asin"]: instructions for record, _, instructions in records if instructions}


def test_asins_never_meet() -> None:
    for seed in (0, -3, 2**40):
        numbers = [*range(5_000), *range(1_195_000, 1_200_000)]
        asins = {asin(number, seed) for number in numbers}
        assert len(asins) == len(numbers)
        assert all(re.fullmatch("B0[789][0-9A-Z]{7}", each) for each in asins)


def test_numbers_are_near_those_of_the_real_thousand(thousand: list[Product]) -> None:
    instructed = [product for product in thousand if product.instruction is not None]
    words = [
        [word for word in re.findall(r"[\w.]+", product.index_text()) if word not in STOP_WORDS] for product in thousand
    ]
    documents = Counter(word for document in words for word in set(document))
    # Behind each: the figure of the original's first thousand products.
    facts: dict[str, tuple[float, float, float]] = {
        "instructed": (len(instructed), 350, 480),  # 415
        "goals": (sum(math.prod(map(len, product.options.values())) for product in instructed), 1500, 9000),  # 6,910
        "with human instructions": (sum(bool(product.human) for product in thousand), 400, 500),
        "without options": (sum(not product.options for product in thousand), 350, 580),  # 523
        "ranges": (sum(len(product.pricing) == 2 for product in thousand), 60, 130),  # 93
        "without price": (sum(product.price_tag == "$100.0" for product in thousand), 60, 130),  # 89
        "without description": (sum(not product.description for product in thousand), 250, 350),  # 301
        "beauty": (sum(product.category == "beauty" for product in thousand), 200, 280),  # 238
        "grocery": (sum(product.category == "grocery" for product in thousand), 85, 150),  # 117
        "attributes": (len({each for product in thousand for each in product.attributes}), 400, 700),  # 598
        "words of a document": (sum(map(len, words)) / 1000, 80, 130),  # 107.7
        "different words of a document": (sum(len(set(document)) for document in words) / 1000, 60, 85),  # 72.6
        "words": (len(documents), 8000, 18000),  # 16,416
        "share of the most common word": (documents.most_common(1)[0][1] / 1000, 0.35, 0.6),  # 0.42
    }
    for name, (value, low, high) in facts.items():
        assert low <= value <= high, (name, value)


def test_attributes_are_in_the_texts(thousand: list[Product]) -> None:
    """A reader must be able to find each attribute on the product's pages."""
    for product in thousand:
        page = " ".join((product.title, *product.bullets, product.description)).lower()
        for attribute in product.attributes:
            assert spoken(attribute) in page or attribute in page, (product.asin, attribute)
        assert set(product.instruction_attributes) <= set(product.attributes)


def test_people_ask_for_what_the_product_has(thousand: list[Product]) -> None:
    asked = 0
    for product in thousand:
        values = {value for group in product.options.values() for value in group}
        for human in product.human:
            assert human.attributes
            assert set(human.attributes) <= set(product.attributes)
            assert set(human.options) <= values
            assert all(option in human.instruction for option in human.options)
            asked += 1
    texts = {human.instruction for product in thousand for human in product.human}
    assert len(texts) > 0.95 * asked > 400


def test_neighbours_have_what_is_asked_for_as_rarely_as_real_ones(thousand: list[Product]) -> None:
    """Attributes tell products apart: texts and attributes of others under the query hold a fifth of a goal's."""
    queries = Counter(product.query for product in thousand)
    assert sum(queries[product.query] > 10 for product in thousand) > 800
    same = Counter((product.query, product.title.split()[0], frozenset(product.attributes)) for product in thousand)
    assert sum(count for count in same.values() if count > 1) < 300
    assert len({product.title for product in thousand}) > 990
    pages = [" ".join((product.title, *product.bullets, product.description)).lower() for product in thousand]
    met = asked = 0
    for product in thousand:
        for other, page in zip(thousand, pages, strict=True):
            if other is not product and other.query == product.query:
                wanted = product.instruction_attributes
                met += sum(attribute in other.attributes or attribute in page for attribute in wanted)
                asked += len(wanted)
    assert 0.15 < met / asked < 0.25


def test_new_words_keep_coming(thousand: list[Product]) -> None:
    words = [
        {word for product in products for word in product.title.split()} for products in (thousand[:250], thousand)
    ]
    assert len(words[1]) > 1.8 * len(words[0])


def test_kinds_are_sound() -> None:
    queries = Counter(kind.query for kinds in DEPARTMENTS for kind in kinds)
    assert set(queries.values()) == {1}
    for kind in itertools.chain.from_iterable(DEPARTMENTS):
        texts = [attribute.text for attribute in kind.attributes]
        assert len(set(texts)) == len(texts) >= 10, kind.query
        assert all(generator in ORDERED or generator in DRAWN for generator, _ in kind.options), kind.query
        assert min(len(kind.nouns), len(kind.made), len(kind.parts), len(kind.does)) >= 3, kind.query
        assert all(entry == entry.strip() != "" for entry in (*kind.nouns, *texts, *kind.made, *kind.does)), kind.query


def test_the_plain_catalogue_is_small_enough_to_learn(tmp_path: Path) -> None:
    products = load(tmp_path, 40, plain=True)
    words: set[str] = set()
    for product in products:
        human = [each.instruction for each in product.human]
        words.update(re.findall(r"\w+", " ".join((product.index_text(), product.query, *human)).lower()))
        words.update(re.findall(r"\w+", " ".join((*product.bullets, product.instruction or "")).lower()))
    assert len(words) < 150
    assert len({product.title for product in products}) == 40
    for product in products:
        assert product.instruction_attributes == product.attributes
        assert 1 <= len(product.options) <= 2
        assert len(product.human) == 1
        assert len(product.title.split()) <= 6
        assert set(product.human[0].options) <= {value for group in product.options.values() for value in group}
    assert len({human.instruction for product in products for human in product.human}) == 40


def test_what_the_generator_keeps_does_not_grow_with_what_it_made() -> None:
    maker = Maker(0)
    for _ in maker.products(2_000):
        pass
    state: dict[str, Any] = vars(maker)
    assert sum(len(kept) for kept in (*state["_lines"].values(), *state["_brands"].values())) <= 48 * 60 + 512 * 5
