"""The text of code: the Python sources of PyTorch and transformers, a document a folder.

    python -m studies.code_text OUT

writes OUT/code, which `lineartime prepare` reads."""

import hashlib
import itertools
import sys
from collections import defaultdict
from pathlib import Path

import pyarrow as pa
import torch
import transformers
from pyarrow import parquet


def code_documents() -> dict[str, str]:
    """Folders of at least 40,000 characters."""
    found: dict[str, str] = {}
    for package in (torch, transformers):
        root = Path(package.__file__).parent
        files = sorted(root.rglob("*.py"), key=lambda path: (path.parent, path))
        for folder, own in itertools.groupby(files, lambda path: path.parent):
            text = "\n\n".join(f"# {path.name}\n{path.read_text(encoding='utf-8', errors='ignore')}" for path in own)
            if len(text) >= 40_000:
                found[f"{package.__name__}/{folder.relative_to(root).as_posix()}"] = text
    return found


def main(out: Path) -> None:
    """One folder in 32 each is for validation and test, by a hash of the name."""
    texts = defaultdict(list)
    for name, text in code_documents().items():
        number = hashlib.sha256(name.encode()).digest()[0] // 8
        texts[{0: "validation", 1: "test"}.get(number, "train")].append(text)
    (out / "code").mkdir(parents=True, exist_ok=True)
    for split, own in texts.items():
        parquet.write_table(pa.table({"text": own}), out / "code" / f"{split}.parquet")
        print(f"{split}: {len(own)} folders, {sum(map(len, own)) / 1e6:.1f} M characters", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
