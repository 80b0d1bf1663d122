"""Tokenizers of other models, as `transformers` opens their folders."""

from pathlib import Path

import tokenizers

from lineartime.base.errors import UsageError
from lineartime.base.settings import require
from lineartime.data.tokenizer import TOKENIZER_FILE, Tokenizer, as_the_library_writes, load_tokenizer, saved_settings

VOCABULARY_FILES = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
"""What `transformers` makes a tokenizer of where there is no tokenizer.json."""
PROBES = ("Hello, World's  3.14!\r\n\t\x0bThe  end ", " Ça va? Größe \ufb01ne e\u0301\u00a0\u2028 ",
          "Съешь ещё булок. Ξένη", "東京は今日も雨だ。한국어 ไทย हिन्दी",
          "שלום مرحبا\u200d\U0001f600 \u0000", "▁a Ġb ##c <0x0A>")
"""Texts of several scripts, with white space and signs that tokenizers treat in ways of their own."""


def is_saved_elsewhere(folder: Path) -> bool:
    """Whether a folder has a tokenizer that `transformers` has saved, of another class than ours, or its vocabulary."""
    if saved := saved_settings(folder):
        return saved.get("tokenizer_class") != "LineartimeTokenizer"
    return not (folder / TOKENIZER_FILE).is_file() and any((folder / name).is_file() for name in VOCABULARY_FILES)


def auto_tokenizer(folder: Path, *, mlm: bool = False) -> Tokenizer:
    """The tokenizer that `transformers.AutoTokenizer` opens from a folder: what tokenizer_config.json says changes the
    tokenizer.json, and a vocabulary without one is converted. The file stays as it is where transformers changes
    nothing. Raises UsageError for a folder that it cannot open, and for a tokenizer that does more than its
    tokenizer.json says."""
    from transformers import AutoTokenizer

    try:
        saved = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as e:  # it raises whatever its many readers raise
        raise UsageError("transformers cannot open this tokenizer", folder, " ".join(str(e).split())[:300]) from None
    inner, where = getattr(saved, "backend_tokenizer", None), f"{folder}: {type(saved).__name__}"
    if not isinstance(inner, tokenizers.Tokenizer):
        raise UsageError("this tokenizer cannot be a tokenizer.json", where, "take another")
    json, file = inner.to_str(), folder / TOKENIZER_FILE
    is_kept = file.is_file() and as_the_library_writes(file.read_text("utf-8")) == as_the_library_writes(json)
    made = load_tokenizer(file, mlm=mlm) if is_kept else Tokenizer(json, str(folder), mlm=mlm)
    for text in (*PROBES, "".join(saved.all_special_tokens)):
        ids = saved(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        require(made.encode(text) == ids, "this tokenizer does more than its tokenizer.json says",
                where, f"it reads {text!r} otherwise; name a tokenizer.json file in place of the folder")
    return made
