"""What `transformers` opens a folder of ours by: code that imports the classes, a tokenizer."""

import json
from typing import Any

from lineartime.data import tokenizer as tokens
from lineartime.data.tokenizer import END_OF_DOCUMENT, PAD, TOKENIZER_FILE, Tokenizer
from lineartime.folders import MODELS

MODULE = "modeling_lineartime"
CODE_FILE = f"{MODULE}.py"
CODE = (MODELS / "small" / CODE_FILE).read_text(encoding="utf-8")
CLASSES = {"AutoConfig": "LineartimeConfig", "AutoModel": "LineartimeModel",
           "AutoModelForCausalLM": "LineartimeForCausalLM", "AutoModelForMaskedLM": "LineartimeForMaskedLM",
           "AutoModelForQuestionAnswering": "LineartimeForQuestionAnswering",
           "AutoModelForSequenceClassification": "LineartimeForSequenceClassification"}
AUTO_MAP = {auto: f"{MODULE}.{name}" for auto, name in CLASSES.items()}
"""What names the classes in `CODE_FILE` in a `config.json`."""
LONGEST = 1 << 30  # more tokens than any text has


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, str]:
    """`tokenizer.json` and `tokenizer_config.json`. Any tokenizer class of `transformers` gives
    texts that spell no special token the ids of `LineartimeTokenizer`, which a tokenizer that adds
    something of its own needs, by trust or an import."""
    json_text = tokenizer.json_with_beginning()
    settings: dict[str, Any] = {"tokenizer_class": "LineartimeTokenizer", "padding_side": "left",
                                "bos_token": END_OF_DOCUMENT, "eos_token": END_OF_DOCUMENT,
                                "mask_token": tokens.MASK if tokenizer.mask is not None else None,
                                "sep_token": tokens.SEPARATOR if tokenizer.separator is not None else None,
                                "pad_token": padding_token(tokenizer.mask is not None, tokenizer.has_gaps,
                                                           tokenizer.has_pad)}
    settings = {name: value for name, value in settings.items() if value is not None}
    if tokenizer.mask is None and tokenizer.special != [tokenizer.end_of_document]:
        settings["split_special_tokens"] = True  # `LineartimeTokenizer` would read tokens that are not ours from texts
    if json_text is None:
        settings["auto_map"] = {"AutoTokenizer": [None, f"{MODULE}.LineartimeTokenizer"]}
    return {TOKENIZER_FILE: json_text or tokenizer.json,
            tokens.TOKENIZER_CONFIG_FILE: json.dumps(settings, indent=1) + "\n"}


def padding_token(masked: bool, has_gaps: bool, has_pad: bool) -> str | None:
    """The padding of a tokenizer: `PAD`, or another name if the vocabulary has that. With "[MASK]",
    whose models learn no end of a document, it is the end-of-document token. None for ids with
    gaps, where a new token could get the id of another."""
    return END_OF_DOCUMENT if masked else None if has_gaps else "<|padding|>" if has_pad else PAD
