"""Conversations as token ids: what is fed, what was sampled, and that neither is ever changed."""

import copy
import functools
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers
from transformers import AutoTokenizer

from starpod.trainer.data.images import MARK, ImageConfig, image_ids
from starpod.trainer.models.bundled import source_of
from starpod.trainer.models.tiny import train_tokenizer
from starpod.trainer.prompts.conversation import Conversation, part_start
from starpod.trainer.prompts.grammar import TAGS, Grammar
from starpod.trainer.prompts.prompt import Context
from starpod.trainer.prompts.template import Template
from tests.trainer.chat_templates import PUBLISHED, TEMPLATES, tokenizer

EXTENDING = ("chatml", "llama3", "gemma", "reasoner", "parts", "sentencepiece", "tiny")


@functools.cache
def template(name: str, prefill: str = "") -> Template:
    return Template(tokenizer(name), prefill=prefill)


# --- what a template does ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prefill", ["", "<think>"])
def test_finds_out_whether_the_past_is_kept(name: str, prefill: str) -> None:
    assert template(name, prefill).extends == (name in EXTENDING)
    assert template("qwen3", "<answer>").extends, "it drops reasoning alone"


@pytest.mark.parametrize(
    ("name", "end"),
    [("chatml", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("gemma", "<end_of_turn>"), ("wandering", "</s>")],
)
def test_finds_the_token_that_ends_a_reply(name: str, end: str) -> None:
    made = template(name)
    assert made.end == tokenizer(name).convert_tokens_to_ids(end)
    assert made.stop == {made.end, tokenizer(name).eos_token_id}


def test_a_reply_of_gpt_oss_ends_with_its_last_message() -> None:
    """<|end|> closes a thought, too, and is written instead of <|return|> in earlier replies alone."""
    made = template("gpt-oss")
    end, last = (tokenizer("gpt-oss").convert_tokens_to_ids(token) for token in ("<|end|>", "<|return|>"))
    assert made.end == end and made.stop == {last, tokenizer("gpt-oss").eos_token_id}
    reply = made.encode_reply(f"{made.opening}<|channel|>final<|message|>hi")
    assert reply[-1] == last and end not in made.next_ids("more", reply)[:1] and made.next_ids("more", [5])[0] == end


def test_system_text_goes_where_the_template_takes_it() -> None:
    assert text_of("chatml", template("chatml").first_prompt("be good", "hi")) == (
        "<|im_start|>system\nbe good<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not template("gemma").layout.takes_system
    assert text_of("gemma", template("gemma").first_prompt("be good", "hi")) == (
        "<s><start_of_turn>user\nbe good\n\nhi<end_of_turn>\n<start_of_turn>model\n"
    )
    assert "system" not in text_of("chatml", template("chatml").first_prompt("", "hi"))


def test_a_prefill_is_fed_and_reported_but_not_sampled() -> None:
    made = template("chatml", "<think>")
    assert text_of("chatml", made.first_prompt("", "hi")).endswith("<|im_start|>assistant\n<think>")
    assert text_of("chatml", made.next_ids("hi", [made.end])).endswith("<|im_start|>assistant\n<think>")
    ids = made.encode_reply("<think>a</think><answer>Up</answer>")
    assert ids[-1] == made.end
    assert text_of("chatml", ids) == "a</think><answer>Up</answer><|im_end|>"
    assert made.decode(ids) == "<think>a</think><answer>Up</answer>"
    with pytest.raises(ValueError, match="begins with '<think>'"):
        made.encode_reply("a</think>")


@pytest.mark.parametrize("prefill", ["", "<think>"])
def test_a_template_that_opens_the_reasoning_itself_needs_no_prefill(prefill: str) -> None:
    made = template("reasoner", prefill)
    assert text_of("reasoner", made.first_prompt("", "hi")).endswith("assistant\n<think>\n")
    assert made.decode(made.encode_reply("<think>\na</think>")) == "<think>\na</think>"
    assert made.decode(made.encode_reply("<think>a</think>")) == "<think>\na</think>"


@pytest.mark.parametrize(
    ("chat_template", "words"),
    [
        (None, "has no chat template"),
        ("{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}", "not with a special token"),
        ("{{ messages[0].content }}", "does not show an assistant's reply"),
    ],
)
def test_says_what_is_wrong_with_a_tokenizer(chat_template: str | None, words: str) -> None:
    bare = copy.deepcopy(tokenizer("chatml"))
    bare.chat_template = chat_template
    with pytest.raises(ValueError, match=words):
        Template(bare)


HOSTILE = ["<", "|", "[", "/", ">", " ", "\n", "\ufdd0", "im_end|>", "a", "\uff1c", MARK]


@given(st.sampled_from([*TEMPLATES, *PUBLISHED]), st.data())
@settings(max_examples=100, deadline=None)
def test_control_tokens_in_a_text_are_read_as_text(name: str, data: st.DataObject) -> None:
    """The layout has the same number of each added token, whatever the texts spell."""
    made = template(name)
    added = {index: str(token) for index, token in tokenizer(name).added_tokens_decoder.items()}
    control = {index: token for index, token in added.items() if token not in TAGS}
    assert made.stop <= {*control} and {*control.values()} <= {*made.layout.control}
    pieces = data.draw(st.lists(st.sampled_from([*control.values(), *control.values(), *HOSTILE]), max_size=8))
    hostile, harmless = written(made, f"a{''.join(pieces)}b"), written(made, "hi")
    for number, (with_it, without) in enumerate(zip(hostile, harmless, strict=True)):
        marks = made.layout.calls.all_marks if number >= 4 else ()  # policies write those
        tokens = [index for index, token in control.items() if token not in {*marks} - {made.layout.end_text}]
        assert [with_it.count(index) for index in tokens] == [without.count(index) for index in tokens]
    shown = str(tokenizer(name).decode(made.first_prompt("", f"a{''.join(pieces)}b")))
    assert f"a{''.join(pieces)}b".replace(" ", "").replace("\ufdd0", "") in shown.replace(" ", "")


def written(made: Template, text: str) -> list[list[int]]:
    """All that is encoded, with this text in each place: first without past replies, then with them."""
    tool = {"name": text, "description": text, "parameters": {"type": "object", "properties": {text: {"enum": [text]}}}}
    chat = [{"role": role, "content": text} for role in ("user", "assistant", "user")]
    prompt = made.text(chat[:1], [{"type": "function", "function": tool}])
    return [
        *(made.first_prompt(text, text), made.next_ids(text, []), made.following_messages(chat[:1], [])),
        *(made.encode(prompt), made.encode_conversation("", [(text, text)], text), made.encode(made.text(chat))),
        *(made.encode_reply(made.opening + text), made.encode_beginning(text)),
    ]


@pytest.mark.smollm
def test_control_tokens_of_a_pretrained_tokenizer_are_read_as_text() -> None:
    tokens = AutoTokenizer.from_pretrained(source_of("smollm2"))
    made, names = Template(tokens), {str(token): index for index, token in tokens.added_tokens_decoder.items()}
    hostile, harmless = written(made, f"a{'b'.join(names)}c"), written(made, "hi")
    assert {"<|im_end|>", "<|endoftext|>"} <= {*names} <= {*made.layout.control}
    for with_it, without in zip(hostile, harmless, strict=True):
        assert [with_it.count(index) for index in names.values()] == [without.count(index) for index in names.values()]


def test_a_token_that_only_shows_after_normalization_is_read_as_text() -> None:
    tokens = copy.deepcopy(tokenizer("chatml"))
    tokens.backend_tokenizer.normalizer = normalizers.NFKC()
    tokens.add_tokens([AddedToken("<|stop|>", normalized=True)])
    made, stop = Template(tokens), tokens.convert_tokens_to_ids("<|stop|>")
    hidden = "\uff1c|stop|\uff1e"
    assert tokens.encode(hidden) == [stop], "without our help"
    assert stop not in made.next_ids(hidden, [])
    assert "\uff42" in made.layout.defuse("\uff42", "user"), "other texts stay as they are"


def test_tokens_of_the_layout_of_tools_are_control_tokens_but_calls_are_written_by_policies() -> None:
    tokens = copy.deepcopy(tokenizer("chatml"))
    tokens.add_tokens(["<tool_response>", "\n\n"])
    tokens.add_special_tokens({"additional_special_tokens": ["<tool_call>"]})
    tokens.chat_template = TEMPLATES["chatml"].replace(
        "m.content", "('<tool_response>' if m.role == 'tool' else '\n\n') + m.content"
    )
    made = Template(tokens)
    assert {"<tool_response>", "<tool_call>"} < {*made.layout.control}
    assert "\n\n" not in made.layout.control, "Gemma has tokens of several blanks"
    call = tokens.convert_tokens_to_ids("<tool_call>")
    assert call in made.encode_reply("<tool_call>") and call not in made.next_ids("<tool_call>", [])


def test_a_blank_that_a_tokenizer_puts_before_a_text_is_not_put_after_a_special_token() -> None:
    made = template("sentencepiece")
    pieces = made.tokenizer.convert_ids_to_tokens
    assert made.tokenizer.tokenize("Up") == ["▁Up"]
    assert pieces(made.encode_reply("Up")) == ["U", "p", "</s>"]
    assert pieces(made.encode_beginning("Up")) == ["U", "p"]
    assert pieces(made.following_text("a", "a</s>Up", []) or []) == ["</s>", "U", "p"]


# --- how conversations go ---------------------------------------------------------------------------------------------


def test_a_reply_that_was_cut_is_closed_outside_of_what_is_trained() -> None:
    made = template("chatml")
    conversation = Conversation(made)
    conversation.ask("one")
    cut = ids_of("chatml", "thi")
    conversation.answer(cut, "length", "thi")
    prompt = conversation.ask("two")
    assert not prompt.fresh
    assert text_of("chatml", prompt.appended) == (
        "<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.context == made.first_prompt("", "one") + cut + prompt.appended
    # One that ends with the end of text is closed alike.
    made, eos = template("llama3"), tokenizer("llama3").eos_token_id
    assert made.next_ids("two", [7, eos]) == made.next_ids("two", [7])
    assert made.decode([*ids_of("llama3", "Up"), eos]) == "Up"


def test_only_ids_of_short_messages_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Template(tokenizer("chatml"))
    encoded = []
    encode = made.encode
    monkeypatch.setattr(made, "encode", lambda text: encoded.append(len(text)) or encode(text))
    for user in ("short", "long" * 1000):
        for _ in range(3):
            assert made.next_ids(user, [made.end]) and made.first_prompt("", user)
    assert [sum(length > 3000 for length in encoded), len(encoded)] == [6, 8]


def test_questions_and_answers_alternate_and_a_missing_end_token_is_noticed() -> None:
    conversation = Conversation(template("chatml"))
    with pytest.raises(ValueError, match="no question"):
        conversation.answer([template("chatml").end], "stop", "")
    conversation.ask("one")
    assert conversation.ask("two") == Conversation(template("chatml")).ask("two"), "asking again replaces the question"
    with pytest.raises(ValueError, match="the engine must return it"):
        conversation.answer([5], "stop", "?")


def test_a_template_that_rewrites_the_past_begins_afresh_each_turn() -> None:
    conversation = Conversation(template("qwen3", "<think>"))
    conversation.system("s")
    play(conversation, "<think>a</think><answer>Up</answer>")
    prompt = conversation.ask("two")
    assert prompt.fresh and prompt.appended == prompt.context
    assert text_of("qwen3", prompt.context) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
        "<answer>Up</answer><|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n<think>"
    )


@pytest.mark.parametrize(("window", "shown"), [(1, []), (2, ["two"]), (None, ["one", "two"])])
def test_a_single_turn_tells_the_last_turns_in_one_message(window: int | None, shown: list[str]) -> None:
    conversation = Conversation(template("chatml"), context="single_turn", window=window)
    for user in ("one", "two"):
        play(conversation, f"r-{user}", user)
    text = text_of("chatml", conversation.ask("three").context)
    assert text.count("<|im_start|>") == 2
    assert [user for user in ("one", "two") if f"{user}\nYour reply: r-{user}" in text] == shown
    assert "three<|im_end|>" in text


@pytest.mark.parametrize("context", ["window", "single_turn"])
def test_a_window_shows_fewer_turns_where_there_is_little_room(context: Context) -> None:
    conversation, plain = (Conversation(template("chatml"), context=context, window=3) for _ in range(2))
    for user in ("one", "two", "three"):
        for each in (conversation, plain):
            play(each, f"r-{user}", user)
    whole = plain.ask("four").context
    assert conversation.ask("four", most_tokens=len(whole)).context == whole
    less = conversation.ask("four", most_tokens=len(whole) - 1)
    text = text_of("chatml", less.context)
    assert less.fresh and len(less.context) < len(whole)
    assert "two" not in text and "r-three" in text and text.count("four") == 1
    # The present turn is shown in any case: whether it fits is for the caller to see.
    least = text_of("chatml", conversation.ask("four", most_tokens=1).context)
    assert "three" not in least and "four" in least


def test_a_whole_conversation_is_never_shortened() -> None:
    conversation = Conversation(template("chatml"))
    play(conversation, "r-one", "one")
    assert conversation.ask("two", most_tokens=1).context == conversation.ask("two").context


# --- any conversation ------------------------------------------------------------------------------------------------

PIECES = ["<think>", "</think>", "<answer>", "</answer>", "\n", "\n\n", " ", "||", "Up", "thi", "é", "√", "ans", "x"]
texts = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
words = texts.map(str.strip)
replies = st.tuples(st.lists(st.integers(0, 263), max_size=8), st.booleans())
talks = st.lists(st.tuples(texts, replies), min_size=1, max_size=5)
contexts = st.sampled_from(["full", "window", "single_turn"])
windows = st.one_of(st.none(), st.integers(1, 4))


@given(st.sampled_from(list(TEMPLATES)), st.sampled_from(["", "<think>", "<answer>"]), texts, talks, contexts, windows)
def test_what_is_trained_is_what_was_fed_and_sampled(
    name: str,
    prefill: str,
    system: str,
    talk: list[tuple[str, tuple[list[int], bool]]],
    context: Context,
    window: int | None,
) -> None:
    """The ids of consecutive turns are the ids that the engine got and sampled, in order."""
    made = template(name, prefill)
    conversation = Conversation(made, context=context, window=window)
    conversation.system(system)
    samples: list[tuple[list[int], list[int]]] = []
    for number, (user, (ids, stopped)) in enumerate(talk):
        prompt = conversation.ask(user)
        assert prompt.fresh == (number == 0 or context != "full" or not made.extends)
        if prompt.fresh:
            samples.append(([], []))
        stream, sampled = samples[-1]
        stream += prompt.appended
        assert stream == prompt.context
        reply = [*ids, made.end] if stopped or not ids else list(ids)
        sampled += range(len(stream), len(stream) + len(reply))
        stream += reply
        conversation.answer(reply, "stop" if reply[-1] == made.end else "length", made.decode(reply))
        # What was given out and taken in is the caller's: what becomes of it there does not matter here.
        for given_out in (prompt.context, prompt.appended, reply):
            given_out.append(-1)
    assert -1 not in conversation.ask("last").context
    trained = [[stream[place] for place in sampled] for stream, sampled in samples]
    expected = [[*ids, made.end] if stopped or not ids else ids for _, (ids, stopped) in talk]
    assert [token for part in trained for token in part] == [token for part in expected for token in part]
    assert len(samples) == (1 if context == "full" and made.extends else len(talk))


@given(st.integers(0, 3), st.integers(1, 5), st.integers(0, 4), st.integers(1, 14))
@example(2, 4, 1, 10)
@example(2, 3, 0, 10)
@example(0, 12, 3, 10)
def test_every_turn_of_a_split_conversation_is_sampled_once_in_the_first_part_that_holds_it(
    pinned: int, window: int, overlap: int, turns: int
) -> None:
    """A part has the pinned turns and a window of others, of which the first ones overlap with the part before."""
    made = template("chatml")
    overlap = min(overlap, window - 1)
    parts = [range(first, first + window) for first in range(pinned, turns + pinned, window - overlap)]
    conversation = Conversation(made, context="split", window=window, pinned=pinned, overlap=overlap)
    stream: list[int] = []
    start = 0
    for turn in range(turns):
        prompt = conversation.ask(f"q{turn}")
        before, start = start, next(part.start for part in parts if turn < part.stop)
        assert part_start(turn, window=window, pinned=pinned, overlap=overlap) == start
        assert prompt.fresh == (turn == 0 or (turn > pinned and start > before))
        stream = [*([] if prompt.fresh else stream), *prompt.appended]
        assert stream == prompt.context
        shown = [*range(min(pinned, turn + 1)), *range(start, turn + 1)]
        assert re.findall(r"q(\d+)", text_of("chatml", prompt.context)) == [str(number) for number in shown]
        reply = [*ids_of("chatml", "r"), made.end]
        conversation.answer(reply, "stop", "r")
        stream += reply


@given(st.sampled_from(EXTENDING), st.lists(st.tuples(words, words), min_size=1, max_size=4))
def test_a_grown_conversation_reads_like_one_rendered_whole(name: str, talk: list[tuple[str, str]]) -> None:
    """Both texts are equal if replies are written as the tokenizer writes them."""
    made = template(name)
    conversation = Conversation(made)
    past = []
    for user, reply in talk:
        conversation.ask(user)
        text = made.opening + reply
        conversation.answer(made.encode_reply(text), "stop", text)
        past.append((user, text))
    grown = conversation.ask("last").context
    assert text_of(name, grown) == text_of(name, made.encode_conversation("", past, "last"))


@given(st.sampled_from(EXTENDING), talks, st.integers(1, 4))
def test_a_window_keeps_the_sampled_ids(name: str, talk: list[tuple[str, tuple[list[int], bool]]], window: int) -> None:
    """A window is the conversation that would have begun with its first turn."""
    made = template(name)
    shown, later = Conversation(made, context="window", window=window), Conversation(made)
    for conversation in (shown, later):
        conversation.system("s")
    start = max(len(talk) - window + 1, 0)
    for number, (user, (ids, _)) in enumerate(talk):
        reply = [*ids, made.end]
        for conversation in (shown, later) if number >= start else (shown,):
            conversation.ask(user)
            conversation.answer(reply, "stop", made.decode(reply))
    assert shown.ask("last").context == later.ask("last").context


def play(conversation: Conversation, text: str, user: str = "one") -> None:
    conversation.ask(user)
    conversation.answer(conversation.template.encode_reply(text), "stop", text)


def text_of(name: str, ids: list[int]) -> str:
    return str(tokenizer(name).decode(ids, clean_up_tokenization_spaces=False))


def ids_of(name: str, text: str) -> list[int]:
    return list(tokenizer(name).encode(text, add_special_tokens=False))


# --- blocks -----------------------------------------------------------------------------------------------------------


@given(
    st.sampled_from(["tiny", "sentencepiece", "chatml"]),
    st.lists(
        st.sampled_from(["go", " Up", "</think>", " ", "<answer>", "Up", "</answer>", "é", "□", "😀" * 8]), max_size=14
    ),
    st.sampled_from(["", "</think><answer>Up</answer>", "</think> <answer>Up"]),
)
@settings(max_examples=100, deadline=None)
def test_sampled_ids_are_cut_where_the_text_is(name: str, pieces: list[str], answer: str) -> None:
    """Whatever is sampled: the ids of the blocks are the reply's, in order, and say what the blocks say."""
    made, grammar = template(name, "<think>"), Grammar(actions=("Up",))
    reply = [*tokenizer(name).encode("".join([*pieces, answer]), add_special_tokens=False), made.end]
    blocks = grammar.cut(made.decode(reply))
    spans = made.spans(reply, blocks)
    assert spans[-1] == (blocks[-1][0], len(reply))
    places = dict(blocks)
    assert all(len(made.decode(reply[:end])) == places[name] for name, end in spans)


# --- images -----------------------------------------------------------------------------------------------------------

VIEW = ImageConfig(rows=2, columns=2)
SEEING = Template(train_tokenizer([f"{MARK} a b c Up Down"], size=400), view=VIEW)
PLACEHOLDER = SEEING.tokenizer.convert_tokens_to_ids(SEEING.view.mark)
PICTURES = (b"one", b"two", b"three")


def shown(prompt: list[int]) -> list[int]:
    """The images of a prompt, by their place in PICTURES."""
    starts = {image_ids(picture, VIEW.tokens)[0]: place for place, picture in enumerate(PICTURES)}
    return [starts[each] for each in prompt if each in starts]


@pytest.mark.parametrize(("context", "seen"), [("full", [0, 1, 2]), ("window", [1, 2])])
def test_images_stand_where_they_were_shown(context: Context, seen: list[int]) -> None:
    talk = Conversation(SEEING, context=context, window=None if context == "full" else 2)
    stream: list[int] = []
    talk.system(f"what stands for an image means nothing here: {MARK}")
    for picture in PICTURES:
        prompt = talk.ask(f"a\n{MARK}\nb", picture)
        assert prompt.fresh == (not stream) or context == "window"
        stream = [*([] if prompt.fresh else stream), *prompt.appended]
        assert prompt.context == stream
        # A reply may say whatever it likes: it is never read as an image.
        reply = [*SEEING.encode(f"{MARK} {MARK}"), SEEING.end]
        talk.answer(reply, "stop", SEEING.decode(reply))
        stream += reply
    assert shown(prompt.context) == seen
    ids = image_ids(PICTURES[-1], VIEW.tokens)
    place = prompt.appended.index(ids[0])
    assert prompt.appended[place : place + len(ids)] == ids
    told = SEEING.next_ids(f"a\n{MARK}\nb", [SEEING.end])
    rest = [*prompt.appended[:place], PLACEHOLDER, *prompt.appended[place + len(ids) :]]
    assert rest[-len(told) :] == told
    assert sorted(talk.images.values()) == sorted(PICTURES)


def test_a_text_without_an_image_has_no_place_for_one() -> None:
    assert PLACEHOLDER not in Conversation(SEEING).ask(f"a {MARK} b").context


def test_a_template_that_rewrites_the_past_shows_no_images() -> None:
    with pytest.raises(ValueError, match=r"changes the thoughts of earlier replies.*lose their place"):
        Template(tokenizer("qwen3"), view=VIEW)
