"""Tokens that are added to a tokenizer: words of a field that its vocabulary has in pieces."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from lineartime.atomic_io import read_bytes
from lineartime.data.tokenizer import Tokenizer
from lineartime.errors import UsageError
from lineartime.settings import require


def with_tokens(tokenizer: Tokenizer, path: Path) -> Tokenizer:
    """A tokenizer with further tokens, one from each line of a file of UTF-8, which text is searched for first.

    Raises UsageError, with the line, for a token that is there already, has white space in it, or that the tokenizer
    would not give back; and for a file that cannot be read or names none."""
    try:
        lines = read_bytes(path).decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError("cannot read the tokens", path, getattr(e, "strerror", None) or "it is not UTF-8") from None
    inner, seen = tokenizers.Tokenizer.from_str(tokenizer.json), {*tokenizer._inner.get_vocab()}
    new = {number: line.strip() for number, line in enumerate(lines, 1) if line.strip()}
    require(bool(new), "no tokens", str(path), "write one in each line")
    for number, token in new.items():
        where = f"{path}, line {number}: {token}"
        require(token not in seen, "the vocabulary has this token already", where, "take it out")
        require(len(token.split()) == 1, "a token with white space", where, "take a word of it")
        seen.add(token)
    inner.add_tokens([AddedToken(token, normalized=False) for token in new.values()])
    made = Tokenizer(inner.to_str(), tokenizer.name)
    for number, token in new.items():
        require(made.decode(made.encode(token)) == token, "a token that this tokenizer does not give back",
                f"{path}, line {number}: {token}", "take it out")
    return made


def added_tokens(old: Tokenizer, new: Tokenizer) -> dict[int, str] | None:
    """The tokens that a tokenizer has besides those of an older one, by id; None if they differ in anything else."""
    def rest(tokenizer: Tokenizer) -> dict[str, Any]:  # by the library's writer, for other programs write it otherwise
        content = json.loads(tokenizers.Tokenizer.from_str(tokenizer.json).to_str())
        return {name: value for name, value in content.items() if name not in ("added_tokens", "truncation", "padding")}

    before, after = ({i: repr(token) for i, token in each._inner.get_added_tokens_decoder().items()}
                     for each in (old, new))
    more = {i: token.content for i, token in new._inner.get_added_tokens_decoder().items() if i not in before}
    same = rest(old) == rest(new) and before.items() <= after.items()
    return more if same and all(i >= old.vocab_size for i in more) else None
