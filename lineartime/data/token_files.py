"""Token files that other programs wrote, so that who has tokens need not tokenise again.

    datatrove    FILE.ds: ids as uint16 or uint32. FILE.ds.index: where each document ends, uint64.
                 FILE.ds.metadata: its first line ends with the bytes of an id
    Megatron-LM  FILE.bin: ids. FILE.idx: a header with their type; the length of each document, int32"""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from lineartime.data.files import Name, exists, opened, reading
from lineartime.errors import DataError

MEGATRON = b"MMIDIDX\x00\x00"
MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def read_token_file(name: Name, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
    """The ids of each document that begins in bytes [start, stop) of a token file and has any. Raises DataError for a
    file without its index, or one that is shorter than that says."""
    dtype, ends_D = _described(name)
    width, begins_D = dtype.itemsize, np.concatenate([[0], ends_D[:-1]]) * dtype.itemsize
    with reading(name), opened(name) as file:
        for i in np.flatnonzero((begins_D >= start) & (begins_D < (np.inf if stop is None else stop))):
            file.seek(begins_D[i])
            content = file.read(ends_D[i] * width - begins_D[i])
            if len(content) < ends_D[i] * width - begins_D[i]:
                raise DataError("the tokens end before a document does", f"{name}, document {i}", "copy the file again")
            if content:
                yield np.frombuffer(content, dtype)


def _described(name: Name) -> tuple[Any, np.ndarray]:
    """The type of a file's ids, and the place behind each document in ids, int64."""
    if str(name).endswith(".ds"):
        metadata = _content(f"{name}.metadata") if exists(f"{name}.metadata") else b""
        wide = re.match(rb"[^\n]*\|4\s*$", metadata, re.MULTILINE)
        return np.dtype("<u4" if wide else "<u2"), np.frombuffer(_content(f"{name}.index"), "<u8").astype(np.int64)
    index = _content(f"{str(name).removesuffix('.bin')}.idx")
    if not index.startswith(MEGATRON) or index[17] not in MEGATRON_DTYPES:
        raise DataError("not an index of Megatron-LM", f"{str(name).removesuffix('.bin')}.idx")
    n_sequences = int.from_bytes(index[18:26], "little")
    lengths_D = np.frombuffer(index, "<i4", n_sequences, 34)
    return np.dtype(MEGATRON_DTYPES[index[17]]), np.cumsum(lengths_D, dtype=np.int64)


def _content(name: str) -> bytes:
    with reading(name), opened(name) as file:
        return file.read()
