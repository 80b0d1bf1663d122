"""The one reader of texts that are held whole: prompts, questions and their documents, tokens to add. Each is a file or
its address, which may be packed, or `-` for stdin."""

from lineartime.atomic_io import MAX_BYTES
from lineartime.data.files import Name, file_blocks, stdin_blocks
from lineartime.data.read_text import BYTE_ORDER_MARK
from lineartime.errors import DataError


def read_small(name: Name, most: int = MAX_BYTES) -> str:
    """A text of UTF-8 without its byte order mark. Raises DataError for other text, and as `small_bytes` does."""
    try:
        return small_bytes(name, most).decode().removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as e:
        where = f"{'stdin' if name == '-' else name}, byte {e.start}"
        raise DataError("not valid UTF-8", where, "save it as UTF-8") from None


def small_bytes(name: Name, most: int) -> bytes:
    """The bytes of a file, unpacked, or of stdin. Raises DataError for more than `most`, and for a file that cannot be
    read."""
    content = bytearray()
    for block in stdin_blocks() if name == "-" else file_blocks(name):
        content += block
        if len(content) > most and name == "-":
            raise DataError("too much on stdin", f"more than {most:,} bytes", "put it into a file")
        if len(content) > most:
            raise DataError("the file is too large", name, f"at most {most:,} bytes are read")
    return bytes(content)
