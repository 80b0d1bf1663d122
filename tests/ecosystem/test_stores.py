"""Text and tokens in a store (a local S3 server), and datatrove as docs/guides/many-machines.md has
it (make ecosystem)."""

import gzip
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import pytest

import lineartime
from lineartime.base.errors import DataError
from lineartime.data.prepare_config import SAMPLE
from lineartime.data.tokens import open_split

pytestmark = pytest.mark.ecosystem
GUIDE = Path(__file__).parents[2] / "docs/guides/many-machines.md"
HOW = {"vocab_size": 400, "held_out": 0.1}


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    """A bucket with a book in two files, one of them packed; and the same files on this machine."""
    folder = tmp_path_factory.mktemp("books")
    os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1",
                   "AWS_ENDPOINT_URL": "http://127.0.0.1:5056", "XDG_CACHE_HOME": str(folder / "cache")}
    import s3fs

    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", "5056"], stderr=subprocess.DEVNULL)
    try:
        for _ in range(100):
            try:
                urlopen("http://127.0.0.1:5056/moto-api/data.json")
                break
            except OSError:
                time.sleep(0.2)
        store, text = s3fs.S3FileSystem(), SAMPLE.read_bytes()
        store.mkdir("bucket")
        for name, content in (("books/a.txt", text[:400_000]), ("books/b.txt.gz", gzip.compress(text[400_000:]))):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
            store.put(str(folder / name), f"bucket/{name}")
        yield folder
    finally:
        server.kill()
        server.wait()


def test_stores_give_the_same_bytes(bucket, tmp_path):
    """s3fs: read from a store and written to it, by two processes; found complete again; mapped
    from a copy."""
    own = lineartime.prepare([bucket / "books"], tmp_path / "own", **HOW)
    there = lineartime.prepare(["s3://bucket/books"], "s3://bucket/out", **HOW, jobs=2, unit_bytes=100_000)
    assert there.sha256 == own.sha256
    assert lineartime.prepare(["s3://bucket/books"], "s3://bucket/out", **HOW).already_prepared
    stream, expected = open_split("s3://bucket/out", "train"), open_split(tmp_path / "own", "train")
    assert (stream.read(0, len(stream)) == expected.read(0, len(expected))).all()
    with pytest.raises(DataError, match=r"cannot read: s3://bucket/none\.txt; no such file"):
        lineartime.prepare(["s3://bucket/none.txt"], tmp_path / "none")


def test_datatrove_tokenizes_what_is_prepared(tmp_path):
    """The program of the guide: its files give what their text gives."""
    paragraphs = SAMPLE.read_text(encoding="utf-8")[:200_000].split("\n\n")
    (tmp_path / "books").mkdir()
    for number in range(3):
        lines = (json.dumps({"text": text}) + "\n" for text in paragraphs[number::3] if text.strip())
        (tmp_path / f"books/{number}.jsonl").write_text("".join(lines))
    lineartime.prepare([tmp_path / "books/0.jsonl"], tmp_path / "part-data", vocab_size=400)
    program = re.search(r"```py\n(.*?)```", GUIDE.read_text(), re.DOTALL)[1].replace("tasks=64", "tasks=3")
    (tmp_path / "run.py").write_text(program)
    subprocess.run([sys.executable, "run.py"], check=True, cwd=tmp_path)
    for name in ("books", "tokens"):
        lineartime.prepare([tmp_path / name], tmp_path / f"{name}-data", tokenizer=tmp_path / "part-data", held_out=0.1)
    for path in (tmp_path / "books-data").glob("*.bin"):
        assert path.read_bytes() == (tmp_path / "tokens-data" / path.name).read_bytes()
