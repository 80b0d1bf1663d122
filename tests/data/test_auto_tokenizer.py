"""A folder of another model's tokenizer gives the ids that transformers gives, or is refused in one
line."""

import json

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from lineartime.base.errors import UsageError
from lineartime.data.tokenizer import END_OF_DOCUMENT, PROBES, named_tokenizer, train_tokenizer

BPE = train_tokenizer(["the quick brown fox and the lazy dog " * 9], 300).json
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "fox", "hello", ","]
WORDPIECE = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
WORDPIECE.normalizer, WORDPIECE.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
QUOKKA = {"300": {"content": "quokka", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False,
                  "special": False}}
MERGES = "\n".join(" ".join(pair) for pair in json.loads(BPE)["model"]["merges"])


def opened(folder, **files):
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content if isinstance(content, str) else json.dumps(content))
    return named_tokenizer(str(folder))


@pytest.mark.parametrize("files", [
    {"tokenizer__json": BPE,
     "tokenizer_config__json": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}},
    {"tokenizer__json": BPE, "tokenizer_config__json": {"tokenizer_class": "PreTrainedTokenizerFast",
                                                        "added_tokens_decoder": QUOKKA}},
    {"tokenizer__json": WORDPIECE.to_str(), "tokenizer_config__json": {"tokenizer_class": "BertTokenizer",
                                                                       "do_lower_case": False}},
    {"vocab__txt": "\n".join(WORDS), "tokenizer_config__json": {"tokenizer_class": "BertTokenizer"}},
    {"vocab__json": json.loads(BPE)["model"]["vocab"], "merges__txt": "#version: 0.2\n" + MERGES,
     "tokenizer_config__json": {"tokenizer_class": "GPT2Tokenizer"}},
], ids=["prefix", "added", "cased", "vocab.txt", "vocab.json"])
def test_the_ids_are_those_of_transformers(tmp_path, files):
    """With what the settings change, and for text that spells special tokens."""
    tokenizer, theirs = opened(tmp_path, **files), AutoTokenizer.from_pretrained(tmp_path)
    for text in (*PROBES, "the quokka and THE Fox, hello", "a [MASK] [SEP]", f"a{END_OF_DOCUMENT} b"):
        assert tokenizer.encode(text) == theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def test_a_file_that_transformers_does_not_change_is_taken_as_it_is(tmp_path):
    written = json.dumps(json.loads(BPE), indent=2)
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
