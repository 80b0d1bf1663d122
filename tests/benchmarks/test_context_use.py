"""The same tokens at several contexts: what each is given, what is compared, what is refused."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import text_files
from benchmarks.context_use import losses_and_gains, measure_context_use
from lineartime.base.errors import DataError, NumericsError, UsageError
from lineartime.config import ModelConfig
from lineartime.data.prepare import prepare
from lineartime.data.tokens import TokenStream, open_split
from lineartime.model.language_model import LanguageModel
from marks import rest
from tiny_models import drawn, tiny_flash

LENGTHS = [150, 40, 9, 70, 41]  # bytes of the documents


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> TokenStream:
    root = tmp_path_factory.mktemp("context_use")
    letters = "".join(map(chr, np.random.default_rng(0).integers(ord("a"), ord("z") + 1, sum(LENGTHS))))
    text_files.make(root / "text", {f"{split}/{i}.txt": (split[0] + letters[sum(LENGTHS[:i]) :])[:length]
                                    for split in ("train", "validation") for i, length in enumerate(LENGTHS)})
    prepare([root / "text"], root / "data", tokenizer="bytes")
    return open_split(root / "data", "validation")


def tiny(stream: TokenStream, **fields: object) -> LanguageModel:
    model = LanguageModel(replace(tiny_flash(stream).config, **fields))
    return drawn(model.double(), of_layers=0.3, of_others=0.3)


@pytest.mark.parametrize(("contexts", "whole"), [([16, 32, 64], False), *rest(([5, 7, 33], True), ([2, 3], False))])
def test_every_token_is_scored_with_as_much_of_its_document_as_the_context_gives(stream: TokenStream, whole: bool,
                                                                                 contexts: list[int]) -> None:
    """Against a loop over documents, contexts and rows that batches nothing."""
    model, longest = tiny(stream, n_layers=1), contexts[-1]
    after = longest - longest // 2
    n_most = max(LENGTHS) + 1 if whole else longest
    use = measure_context_use(model, stream, contexts, document_tokens=None if whole else longest)
    assert use["contexts"] == contexts and use["after"] == after
    assert [each["document"] for each in use["documents"]] == [
        i for i, length in enumerate(LENGTHS) if length + 1 > after]
    starts = stream.document_positions.astype(int)
    for each in use["documents"]:
        begin, end = starts[each["document"] :][:2]  # its two end-of-document tokens
        ids = torch.from_numpy(stream.read(begin, end + 1))[: n_most + 1]
        assert each["n_tokens"] == min(LENGTHS[each["document"]] + 1, n_most) - after
        for context, loss in zip(contexts, each["losses"], strict=True):
            half = context // 2
            expected = np.zeros(len(ids) - 1)
            for target in range(after, len(expected)):
                start = after + ((target - after) // half + 1) * half - context
                assert context - half < target - start + 1 <= context
                log_p = model(ids[None, start : target + 1])[0, -1].log_softmax(-1)
                expected[target] = -log_p[ids[target + 1]].item()
            assert loss == pytest.approx(expected[after:].mean(), rel=1e-10)


def test_losses_gains_and_their_errors() -> None:
    use = losses_and_gains([0, 2], np.array([10, 30]), np.array([[20.0, 10.0], [90.0, 72.0]]))
    assert use["losses"] == [110 / 40, 82 / 40] and use["gains"] == pytest.approx([0, 28 / 40])
    rest = [10 - 0.7 * 10, 18 - 0.7 * 30]
    assert use["gain_errors"] == pytest.approx([0, math.sqrt(2 * sum(x * x for x in rest)) / 40])
    assert use["documents"][1] == {"document": 2, "n_tokens": 30, "losses": [3.0, 2.4]}
    assert losses_and_gains([0], np.array([10]), np.array([[20.0, 10.0]]))["gain_errors"] == [None, None]


def test_what_is_refused(stream: TokenStream) -> None:
    model, learned, damaged = tiny(stream), tiny(stream, abs_pos="learned"), tiny(stream)
    bidirectional = LanguageModel(ModelConfig(causal=False, vocab_size=300, d_model=12))
    with torch.no_grad():
        damaged.head_bias[0] = math.nan
    for read, contexts, kind, words in (
            *((model, contexts, UsageError, "wrong contexts") for contexts in ([], [16], [16, 16], [32, 16], [1, 16])),
            (model, [16, 302], DataError, r"half of the longest context.*contexts up to 300 work"),
            (bidirectional, [16, 32], UsageError, "causal"), (learned, [16, 64], UsageError, "position table"),
            (damaged, [16, 64], NumericsError, "document 0, context 16")):
        with pytest.raises(kind, match=words) as raised:
            measure_context_use(read, stream, contexts)
        assert "\n" not in str(raised.value)
    with pytest.raises(UsageError, match="document_tokens is below the longest context"):
        measure_context_use(model, stream, [16, 64], document_tokens=63)
    use = measure_context_use(model, stream, [16, 300])
    assert json.loads(json.dumps(use))["n_tokens"] == 1
