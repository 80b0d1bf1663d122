"""A text has the same ids wherever it is read: in prepare, embed and transformers."""

import itertools
import random

import pytest
from test_tokenizer import KINDS

from lineartime.data.prepare import prepare
from lineartime.data.tokenizer import END_OF_DOCUMENT
from lineartime.data.tokens import open_split
from lineartime.hf import LineartimeTokenizer
from lineartime.tasks.pooling import document_ids
from lineartime.weights.transformers_files import PAD, tokenizer_files
from marks import rest
from text_files import make

SCRIPTS = ["abcdefghijklmnopqrstuvwxyzWST0123456789.,'#<|>", "éàüßñçøåœ", "абвгдежзийклмнёъ", "αβγδεζηθλμ",
           "東京日本語漢字雨", "ひらがなカタカナ", "한국어문자열", "אבגדהוזחט", "ابتثجحخد", "हिन्दीकखगािी",
           "กขคงจฉชเแ", "\U0001f600\U0001f469\u200d\u0301\ufe0f"]
SPACES = [" ", " ", " ", "  ", "\n", "\r\n", "\t", "\x0b", "\u00a0", "\u2028", "\u3000", ""]
SPELLED = [END_OF_DOCUMENT, PAD, "[MASK]", "[SEP]", "[UNK]", "<unk>", "<s>", "<0x41>", "▁", "Ġ", "##s", "it was"]


def texts_of_scripts(n):
    """Short texts of words of one script or more, white space, and special tokens."""
    draw = random.Random(0)

    def word():
        if draw.random() < 0.1:
            return draw.choice(SPELLED)
        return "".join(draw.choices(draw.choice(SCRIPTS), k=draw.randint(1, 6)))

    made = ["".join(draw.choice(SPACES) + word() for _ in range(draw.randint(1, 8))) for _ in range(n)]
    return [text + "." * text.endswith(END_OF_DOCUMENT) for text in made]


@pytest.mark.parametrize(("name", "n"), [*((name, 200) for name in KINDS), *rest(*((name, 10_000) for name in KINDS))])
def test_a_text_has_the_same_ids_everywhere(tmp_path, name, n):
    tokenizer, texts = KINDS[name], texts_of_scripts(n)
    make(tmp_path, {"a.jsonl": texts, "t.json": tokenizer.json, **tokenizer_files(tokenizer)})
    prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer=str(tmp_path / "t.json"), jobs=1)
    stream = open_split(tmp_path / "out", "train")
    prepared = [stream.read(a, b).tolist() for a, b in itertools.pairwise(stream.document_positions.tolist())]
    of_transformers = LineartimeTokenizer.from_pretrained(tmp_path)(texts)["input_ids"]
    assert len(prepared) == len(of_transformers) == n
    for text, ids, theirs in zip(texts, prepared, of_transformers, strict=True):
        assert ids == document_ids(tokenizer, text).tolist() == theirs, repr(text)
        assert not tokenizer.is_lossless or tokenizer.decode(ids[1:]) == text
