"""The tiny policies' tokenizer: one token per word, lossless, and independent of neighbouring words."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.trainer.models.tiny import END, PAD, ROLES, TAGS, train_tokenizer
from tests.trainer.models.tiny_policy import TEXTS

TOKENIZER = train_tokenizer(TEXTS, size=512)
SPECIALS = (PAD, END, *ROLES, *TAGS)
# Surrogates are no text: they cannot be written in UTF-8.
ANY = st.text(st.characters(exclude_categories=("Cs",)))
PIECES = st.lists(ANY | st.sampled_from((*SPECIALS, " ", "\n", " Down", "Up", "||", "#_P", "12"))).map("".join)


def tokens(text: str) -> list[str]:
    return TOKENIZER.convert_ids_to_tokens(TOKENIZER.encode(text))


ROOM = "A room.\nYou see: {}\nExits: {}, {}\n#P_"
ROOMS = [ROOM.format(*words) for words in permutations(("north", "south", "key"), 3)]
PHRASES = train_tokenizer([*ROOMS, "<answer>north</answer>", "<answer>go south</answer>"], size=512, phrases=True)


@given(PIECES)
def test_decoding_gives_the_text_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    for room in (text, f"A room.{text}You see: {text}", ROOM.format(text, "north", text)):
        assert PHRASES.decode(PHRASES.encode(room)) == room


def test_words_that_always_stand_together_are_one_token_and_cells_of_a_map_are_not() -> None:
    def split(text: str) -> list[str]:
        return PHRASES.convert_ids_to_tokens(PHRASES.encode(text))

    begin, *rest = split(ROOMS[0])
    assert [begin, *rest] == [" A room.\nYou see:", " north", "\nExits:", " south", ",", " key", "\n", "#", "P", "_"]
    assert split("<answer>north</answer>") == ["<answer>", " north", "</answer>"]
    assert split("<answer>go south</answer>") == ["<answer>", " go south", "</answer>"]
    assert split("You see: You seem") == [*split("You see:"), *split("<answer>You seem")[1:]]


@given(PIECES, st.sampled_from(SPECIALS), PIECES)
def test_text_after_a_special_token_changes_nothing_before_it(left: str, special: str, right: str) -> None:
    whole = TOKENIZER.encode(left + special + right)
    assert whole == TOKENIZER.encode(left) + TOKENIZER.encode(special) + TOKENIZER.encode(right)


def test_a_reply_costs_a_token_per_tag_and_word() -> None:
    told = tokens("<think>Down Right</think><answer>Down || Up</answer>")
    assert told == ["<think>", " Down", " Right", "</think>", "<answer>", " Down", " ||", " Up", "</answer>"]
    assert len(tokens(TEXTS[0])) == len(TEXTS[0].split())  # an observation costs a token per word


def test_every_cell_of_a_map_and_every_digit_is_a_token() -> None:
    assert tokens("#PX_\n_OO√") == [" #", "P", "X", "_", "\n", "_", "O", "O", "√"]
    assert tokens("120 7") == [" 1", "2", "0", " 7"]


def test_role_markers_are_special_and_tags_are_text() -> None:
    ids = TOKENIZER.encode("<|assistant|><think>Up</think><answer>Up</answer><|end|>")
    assert TOKENIZER.decode(ids, skip_special_tokens=True).strip() == "<think>Up</think><answer>Up</answer>"
    assert TOKENIZER.eos_token == END
    assert TOKENIZER.pad_token == PAD


def test_the_same_texts_give_the_same_tokenizer_and_frequent_words_come_first() -> None:
    texts = ["rare common common", "common other other"]
    first, again = train_tokenizer(texts, size=320), train_tokenizer(list(texts), size=320)
    assert first.get_vocab() == again.get_vocab()
    small = train_tokenizer(texts, size=len(train_tokenizer([], size=320)) + 1)
    assert " common" in small.get_vocab()
    assert " other" not in small.get_vocab()


def test_a_vocabulary_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="no room for words"):
        train_tokenizer(TEXTS, size=256)
