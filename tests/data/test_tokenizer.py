"""Text comes back exactly as it went in, and nothing in it is read as a special token."""

import json
import os
import random
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

import lineartime.data.tokenizer
from lineartime.base.errors import DataError, UsageError
from lineartime.data.tokenizer import (
    END_OF_DOCUMENT,
    Tokenizer,
    byte_tokenizer,
    load_tokenizer,
    named_tokenizer,
    train_tokenizer,
)
from lineartime.folders import model_folder
from lineartime.tasks.pooling import document_ids

TEXT = "It was the best of times, it was the worst of times; naïve café, 東京 — “quoted”.\r\n\tIt's 1859.\n" * 4
TRAINED = train_tokenizer([TEXT], 400)
BYTES = byte_tokenizer()
MASKED = (train_tokenizer([TEXT], 400, mlm=True), byte_tokenizer(mlm=True))
PACKERS = [(tokenizer, tokenizer.pack) for tokenizer in (TRAINED, BYTES, MASKED[0])]
ANY_TEXT = st.text(st.characters(codec="utf-8"))


def foreign_tokenizer() -> tokenizers.Tokenizer:
    """With all that must not happen to a text: lower case, truncation, padding."""
    words = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "it", "was", "best", "##s"]
    inner = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    inner.enable_truncation(4)
    inner.enable_padding(length=4, pad_id=1, pad_token="[PAD]")
    return inner


def characters_and_bytes() -> tokenizers.Tokenizer:
    """As SentencePiece has it: spaces are "▁", one before a text; other characters are bytes."""
    vocabulary = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz", "▁t"]
    inner = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, [("▁", "t")],
                                            unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                       decoders.Strip(" ", 1, 0)])
    return inner


def metaspace() -> tokenizers.Tokenizer:
    """A Unigram tokenizer that puts "▁" before a text, and has no token for most characters."""
    inner = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -1.0), ("▁was", -2.0), ("▁the", -2.0),
                                                 *((letter, -3.0) for letter in "aehistw")], unk_id=0))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    inner.add_special_tokens(["<s>"])
    return inner


KINDS = {"bpe": TRAINED, "bytes": BYTES, "characters and bytes": Tokenizer(characters_and_bytes().to_str()),
         "metaspace": Tokenizer(metaspace().to_str()), "wordpiece": Tokenizer(foreign_tokenizer().to_str())}


@pytest.mark.parametrize("name", KINDS)
def test_a_long_text_has_the_ids_of_the_whole(name, monkeypatch):
    """Also where it is encoded in pieces. What a tokenizer says it keeps comes back."""
    tokenizer, text = KINDS[name], TEXT * 3
    whole = tokenizer._inner.encode(text, add_special_tokens=False).ids
    monkeypatch.setattr("lineartime.data.read_text.PIECE", 50)
    monkeypatch.setattr("lineartime.data.read_text.cut_pieces.__defaults__", (50,))
    assert (len([*tokenizer.parts(text)]) > 10) == tokenizer.reads_pieces == (name in ("bpe", "bytes"))
    ids, places = tokenizer.encode_with_offsets(text)
    assert tokenizer.encode(text) == ids.tolist() == whole and places[-1, 1] >= len(text) - 1
    assert document_ids(tokenizer, text).tolist() == [tokenizer.end_of_document, *whole]
    assert not tokenizer.is_lossless or tokenizer.decode(whole) == text
    monkeypatch.setattr("lineartime.data.tokenizer.LONGEST_WHOLE", 200)
    assert len([*tokenizer.parts(text)]) > 4 and "".join(tokenizer.parts(text)) == text


def test_a_continuation_keeps_the_space_before_it():
    tokenizer = KINDS["characters and bytes"]
    for before, after in (("one", " two"), ("", "two"), ("é" * 99, " é")):
        ids = tokenizer.encode(before + after)[len(tokenizer.encode(before)):]
        step = tokenizer.stream(before)
        assert "".join(step(i) for i in ids) == after


ODD = ["the", " it", "a", "1", "23", " ", "  ", "\n", "\r\n", "\t", "\x0b", "\x1c", "\x1f", "\x85", "\xa0", "\u3000",
       "\u2028", "\u200b", "\u0301", "'", "'s", "'S", "'ll", ".", ",", "!", "_", "\0", "\x7f", "é", "東", "½", "٣",
       "ª", "—", "“", "\U0001f600", END_OF_DOCUMENT]


@given(st.lists(st.sampled_from(ODD) | st.characters(codec="utf-8"), max_size=14).map("".join))
@settings(max_examples=600)
def test_remembered_words_have_the_ids_of_the_text(text):
    for tokenizer, pack in PACKERS:
        ids = np.frombuffer(pack(text), "<u2").tolist()
        assert ids == tokenizer.encode(text) and ids == np.frombuffer(pack(text), "<u2").tolist()


def test_a_tokenizer_that_reads_across_words_gets_whole_texts(monkeypatch):
    """One that does not forgets its words when there are many."""
    monkeypatch.setattr("lineartime.data.tokenizer.CACHED_WORDS", 3)
    prefixed, joined, stripped, plain = (tokenizers.Tokenizer.from_str(TRAINED.json) for _ in range(4))
    prefixed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    joined.add_tokens(["was the"])
    stripped.normalizer = normalizers.Strip()
    for made in (prefixed, joined, stripped, foreign_tokenizer(), plain):
        tokenizer = Tokenizer(made.to_str())
        assert np.frombuffer(tokenizer.pack(TEXT), "<u2").tolist() == tokenizer.encode(TEXT)


@given(ANY_TEXT, ANY_TEXT)
def test_special_tokens_spelled_in_text_are_text(before, after):
    text = f"{before}[MASK]{after} [SEP]{END_OF_DOCUMENT}"
    for tokenizer in (TRAINED, BYTES, *MASKED, KINDS["characters and bytes"]):
        ids = tokenizer.encode(text)
        assert not {*tokenizer.special} & {*ids} and all(0 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, tokenizer.end_of_document]) == text + END_OF_DOCUMENT


def test_foreign_tokenizer_gets_an_end_of_document_and_does_only_what_a_text_needs():
    tokenizer = KINDS["wordpiece"]
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (9, 8)
    assert tokenizer.encode("It was bests it was") == [4, 5, 6, 7, 4, 5]
    assert tokenizer.encode("It") == [4]


def test_mask_and_separator_are_there_only_where_asked_for():
    """In a learnt vocabulary the mask takes the space before it, for other programs."""
    masked = (train_tokenizer([TEXT], 300, mlm=True), byte_tokenizer(mlm=True), Tokenizer(TRAINED.json, mlm=True))
    assert [(t.mask, t.separator, t.special) for t in (TRAINED, BYTES)] == [(None, None, [0]), (None, None, [256])]
    n = TRAINED.vocab_size
    assert [(t.end_of_document, t.mask, t.separator, t.vocab_size) for t in masked] == \
        [(0, 1, 2, 300), (256, 257, 258, 259), (0, n, n + 1, n + 2)]
    for tokenizer in masked:
        assert tokenizer.special == sorted([tokenizer.end_of_document, tokenizer.mask, tokenizer.separator])
        for again in (Tokenizer(tokenizer.json), Tokenizer(tokenizer.json, mlm=True)):
            assert (again.sha256, again.special) == (tokenizer.sha256, tokenizer.special)
    for tokenizer, before in zip(MASKED, ("it", "it "), strict=True):
        ids = tokenizers.Tokenizer.from_str(tokenizer.json).encode("it [MASK] was").ids
        assert tokenizer.decode(ids[: ids.index(tokenizer.mask)]) == before


def test_ids_that_a_vocabulary_leaves_out_are_special():
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 7, END_OF_DOCUMENT: 3, "[MASK]": 4, "[SEP]": 6},
                                                  unk_token="a"))
    tokenizer = Tokenizer(inner.to_str(), mlm=True)
    assert (tokenizer.vocab_size, tokenizer.end_of_document, tokenizer.mask, tokenizer.separator) == (8, 3, 4, 6)
    assert tokenizer.special == [1, 2, 3, 4, 5, 6]


def test_a_vocabulary_without_room_is_refused():
    for vocabulary, mlm, token in (({"a": 0, "b": 2}, False, END_OF_DOCUMENT),
                                   ({"a": 0, "b": 3, END_OF_DOCUMENT: 1}, True, "[MASK]")):
        inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
        with pytest.raises(DataError, match=f"its vocabulary has no room for {re.escape(token)}: tokenizer"):
            Tokenizer(inner.to_str(), mlm=mlm)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe", b'{"model": {"type": "BPE"}}', b"[" * 100_000])
def test_what_is_no_tokenizer_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"^not a tokenizer\.json: {path}.*$"):
        named_tokenizer(str(path))


@pytest.mark.parametrize("tokenizer", [MASKED[1], TRAINED], ids=["bytes", "bpe"])
def test_a_beginning_for_other_programs_is_not_heeded_here(tokenizer):
    """The ids, their places, the hash and what prepared data says of it stay."""
    text = "abba a\n b"
    begun = Tokenizer(tokenizer.json_with_beginning())
    assert begun.json != tokenizer.json and begun.sha256 == tokenizer.sha256
    assert begun.encode(text) == tokenizer.encode(text) and begun.pack(text) == tokenizer.pack(text)
    for a, b in zip(begun.encode_with_offsets(text), tokenizer.encode_with_offsets(text), strict=True):
        assert (a == b).all()
    assert begun.json_with_beginning() == begun.json
    others = tokenizers.Tokenizer.from_str(begun.json)
    assert others.encode("a", "b").ids == [tokenizer.end_of_document, *tokenizer.encode("a"), *tokenizer.encode("b")]


def test_of_text_without_spaces_a_part_is_learned():
    """Learning takes 25 times as long from words of 64 K characters."""
    draw = random.Random(0)
    text = "".join(draw.choices("ACGT", k=60_000))
    read = lineartime.data.tokenizer._short_words(f"some words {text} {text[:1024]}\n")
    assert max(len(word) for part in read for word in part.split()) <= 1024 and 14_000 < len("".join(read)) < 18_000
    tokenizer = train_tokenizer([text], 400)
    assert len(tokenizer.encode(text)) < 20_000


def test_dropout_of_training_is_off():
    inner = tokenizers.Tokenizer.from_str(train_tokenizer(["some words and some more words"] * 9, 300).json)
    inner.model.dropout = 0.9
    found = Tokenizer(inner.to_str())
    assert {tuple(found.encode("some words")) for _ in range(20)} == {tuple(found.encode("some words"))}
    assert json.loads(found.json)["model"]["dropout"] is None


OTHER_BPE = train_tokenizer(["the quick brown fox and the lazy dog " * 9], 300).json
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "fox", "hello", ","]
WORDPIECE = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(PIECES)}, unk_token="[UNK]"))
WORDPIECE.normalizer, WORDPIECE.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
QUOKKA = {"300": {"content": "quokka", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False,
                  "special": False}}
MERGES = "\n".join(" ".join(pair) for pair in json.loads(OTHER_BPE)["model"]["merges"])


def opened(folder, **files):
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content if isinstance(content, str) else json.dumps(content))
    return named_tokenizer(str(folder))


@pytest.mark.parametrize("files", [
    {"tokenizer__json": OTHER_BPE,
     "tokenizer_config__json": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}},
    {"tokenizer__json": OTHER_BPE, "tokenizer_config__json": {"tokenizer_class": "PreTrainedTokenizerFast",
                                                        "added_tokens_decoder": QUOKKA}},
    {"tokenizer__json": WORDPIECE.to_str(), "tokenizer_config__json": {"tokenizer_class": "BertTokenizer",
                                                                       "do_lower_case": False}},
    {"vocab__txt": "\n".join(PIECES), "tokenizer_config__json": {"tokenizer_class": "BertTokenizer"}},
    {"vocab__json": json.loads(OTHER_BPE)["model"]["vocab"], "merges__txt": "#version: 0.2\n" + MERGES,
     "tokenizer_config__json": {"tokenizer_class": "GPT2Tokenizer"}},
], ids=["prefix", "added", "cased", "vocab.txt", "vocab.json"])
def test_the_ids_are_those_of_transformers(tmp_path, files):
    """With what the settings change, and for text that spells special tokens."""
    tokenizer, theirs = opened(tmp_path, **files), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("the quokka and THE Fox, hello", "a [MASK] [SEP]", f"a{END_OF_DOCUMENT} b"):
        assert tokenizer.encode(text) == theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def test_a_file_that_transformers_does_not_change_is_taken_as_it_is(tmp_path):
    written = json.dumps(json.loads(OTHER_BPE), indent=2)
    tokenizer = opened(tmp_path, tokenizer__json=written, tokenizer_config__json={
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_DOCUMENT})
    assert tokenizer.json == written


@pytest.mark.parametrize(("settings", "words"), [
    ({"tokenizer_class": "ByT5Tokenizer"}, "this tokenizer cannot be a tokenizer.json: .*: ByT5Tokenizer; take"),
    ({"tokenizer_class": "X", "auto_map": {"AutoTokenizer": ["x.X", None]}}, "transformers cannot open this token")])
def test_what_no_tokenizer_json_says_is_refused(tmp_path, settings, words):
    with pytest.raises(UsageError, match=words) as caught:
        opened(tmp_path, tokenizer_config__json=settings)
    assert "\n" not in str(caught.value)


def test_threads_that_open_tokenizers_leave_stderr_as_it_was() -> None:
    path, before = model_folder("small") / "tokenizer.json", os.fstat(2)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(load_tokenizer, [path] * 40))
    assert os.path.samestat(os.fstat(2), before)
