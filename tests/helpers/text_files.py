"""Files of text in every format, and what prepared folders hold."""

import gzip
import itertools
import json

import pyarrow
from pyarrow import parquet

from lineartime.data.tokenizer import load_tokenizer
from lineartime.data.tokens import open_split


def make(folder, files):
    """Write files by name: text, or a list as JSON lines or a parquet column `text`."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list) and name.endswith(".parquet"):
            parquet.write_table(pyarrow.table({"id": range(len(content)), "text": content}), path, row_group_size=2)
            continue
        if isinstance(content, list):
            content = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(content))
        content = content.encode() if isinstance(content, str) else content
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return folder


def documents_of(data, split="train"):
    stream, tokenizer = open_split(data, split), load_tokenizer(data / "tokenizer.json")
    at = stream.document_positions.tolist()
    return [tokenizer.decode(stream.read(a + 1, b).tolist()) for a, b in itertools.pairwise(at)]


def stream_of(data, split="train"):
    stream = open_split(data, split)
    return stream.read(0, len(stream)).tolist()


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}
