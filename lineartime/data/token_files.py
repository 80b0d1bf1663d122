"""Token files that other programs wrote, so that nobody who has tokens must tokenise again.

    datatrove    FILE.ds: ids as uint16 or uint32. FILE.ds.index: where each document ends, uint64.
                 FILE.ds.metadata: its first line ends with "|" and the bytes per id, 2 or 4
    Megatron-LM  FILE.bin: ids. FILE.idx: their type; the length of each document, int32"""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from lineartime.base.errors import DataError
from lineartime.base.stores import Name, exists, opened, read_all, reading, size_of

MEGATRON = b"MMIDIDX\x00\x00"
MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def read_token_file(name: Name) -> Iterator[np.ndarray]:
    """The ids of each document of a token file that has any. Raises DataError for a file without
    its index, or with one that does not fit it."""
    dtype, lengths_D = _described(str(name))
    with reading(name), opened(name) as file:
        for n_ids in lengths_D[lengths_D > 0].tolist():
            yield np.frombuffer(file.read(n_ids * dtype.itemsize), dtype)


def _described(name: str) -> tuple[Any, np.ndarray]:
    """The type of a file's ids, and the length of each document in ids, int64."""
    index_name = f"{name.removesuffix('.bin')}.idx" if name.endswith(".bin") else f"{name}.index"
    index = read_all(index_name)
    try:
        if name.endswith(".bin"):
            dtype = np.dtype(MEGATRON_DTYPES[index[17] if index.startswith(MEGATRON) else 0])  # 0 is no type
            lengths_D = np.frombuffer(index, "<i4", int.from_bytes(index[18:26], "little"), 34).astype(np.int64)
        else:
            metadata = read_all(f"{name}.metadata") if exists(f"{name}.metadata") else b""
            dtype = np.dtype("<u4" if re.match(rb"[^\n]*\|4\s*$", metadata, re.MULTILINE) else "<u2")
            ends_D = np.frombuffer(index, "<u8").astype(np.int64)
            lengths_D = ends_D - np.concatenate([[0], ends_D[:-1]])
        n_ids = size_of(name) / dtype.itemsize
        fits = ((lengths_D >= 0) & (lengths_D <= n_ids)).all() and lengths_D.sum() == n_ids
    except (IndexError, KeyError, OverflowError, ValueError):
        fits = False
    if not fits:
        raise DataError("not an index of these tokens", index_name, "copy both files again")
    return dtype, lengths_D
