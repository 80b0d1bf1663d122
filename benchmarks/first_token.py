"""Time to the first token of a long prompt, from its text and from its state: `python -m benchmarks.first_token`.

The prompt is the sample book again and again. Each time includes opening the model, as a command does."""

import json
import sys
import tempfile
import time
from pathlib import Path

import lineartime
from benchmarks import Row
from lineartime.data.prepare_config import SAMPLE
from lineartime.decoding.state import DecodingState
from lineartime.release.provenance import provenance


def measure(name: str, n_tokens: int, path: Path) -> Row:
    """A row: both times, and the size of the state, which becomes the file `path`."""
    model, tokenizer, _ = lineartime.load_model(name)
    ids = tokenizer.encode(SAMPLE.read_text(encoding="utf-8"))
    text = tokenizer.decode((ids * (n_tokens // len(ids) + 1))[: n_tokens - 1])
    lineartime.read(model, tokenizer, [text]).save(path)

    def seconds(from_state: bool) -> float:
        begun = time.perf_counter()
        model, tokenizer, _ = lineartime.load_model(name)
        state = DecodingState.load(path, model) if from_state else lineartime.read(model, tokenizer, [text])
        lineartime.generate(model, [" Who"], tokenizer=tokenizer, max_new_tokens=1, state=state)
        return round(time.perf_counter() - begun, 3)

    return {"benchmark": "first_token", "model": name, "tokens": n_tokens, "state_bytes": path.stat().st_size,
            "text_s": seconds(False), "state_s": seconds(True), **provenance(),
            "command": f"python -m benchmarks.first_token {name} {n_tokens}"}


if __name__ == "__main__":
    name, n_tokens = sys.argv[1:] or ("small", "500000")
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(name, int(n_tokens), Path(folder) / "state")))
