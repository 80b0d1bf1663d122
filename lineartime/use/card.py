"""A model card in Markdown: what hubs read, the model, what it was trained on, and its held-out
scores."""

import time
from collections.abc import Callable
from typing import Any

import torch
from huggingface_hub import ModelCardData

import lineartime
from lineartime.base.settings import field_text
from lineartime.base.words import code_block, in_markdown, markdown, mib
from lineartime.config import ModelConfig, TrainConfig
from lineartime.data.tokens import Manifest
from lineartime.folders import shipped_models
from lineartime.training.evaluation import Evaluation
from lineartime.training.run_config import nearest_preset
from lineartime.use.info import describe

SAMPLE_TOKENS, SAMPLE_TEMPERATURE = 120, 0.8


def card_head(about: str, run: dict[str, Any], config: ModelConfig) -> str:
    """The front matter, the heading and the table of the model. `about` replaces the heading, and
    the front matter too if it begins with its own. run: the run's `run.json`."""
    described = describe(config)
    about = about.strip() or f"# {run['preset']}, {described.n_parameters:,} parameters"
    lines = [("preset", f"`{run['preset']}`"), *described.specification[:-1],
             *([("Query and key width s", f"{config.query_key_dim}")] if config.ffn == "gau" else []),
             ("Context", f"{config.context:,}"), ("Vocabulary", f"{config.vocab_size:,}"),
             ("Parameters", f"{described.n_parameters:,}"),
             ("Weights", f"bfloat16, {2 * described.n_parameters / 1e6:.1f} MB")]
    if config.decodes and not described.decoding.per_token:
        lines.append(("Decoding state", f"{mib(described.decoding.constant)} in float32, at any length"))
    return "\n\n".join([about if about.startswith("---") else front_matter(config) + about,
                        "## Model", markdown(["", ""], lines)])


def front_matter(config: ModelConfig) -> str:
    """The YAML that model hubs read at the beginning of a card, without licence and language."""
    tags = [nearest_preset(config), *(["gated-attention-unit"] if config.ffn == "gau" else []),
            *(["linear-attention"] if config.attn_type in ("mixed_chunk", "linear") else [])]
    fields = ModelCardData(library_name="lineartime", tags=tags,
                           pipeline_tag="text-generation" if config.causal else "fill-mask").to_yaml()
    return f"---\n# license and language: not known to lineartime; name them here\n{fields}\n---\n\n"


def card_training(run: dict[str, Any], step: int, tokenizer_sha256: str, text: list[tuple[Manifest, int]]) -> str:
    """The text, the steps, the settings that are not the paper's, and the hashes of data and
    tokenizer.

    text: the manifest of each prepared text that the run was trained on, and its share of the
    rows."""
    train, n_tokens, total = run["train"], step * run["train"]["tokens_per_step"], sum(weight for _, weight in text)
    lines, times = [], []
    if "from" in run:  # a folder's name is of one machine
        source = run["from"] if run["from"] in shipped_models() else "WEIGHTS"
        lines.append(("Began with", f"{source}, sha256 {in_markdown(run['from_sha256'])}"))
    for manifest, weight in text:
        split, share = manifest.splits["train"], f"{100 * weight / total:.3g} % of the rows: " * (len(text) > 1)
        lines.append(("Text", f"{share}{split.documents:,} documents, {split.words:,} words, {split.bytes:,} bytes, "
                              f"{split.tokens:,} tokens"))
        times.append(f"{n_tokens * weight / total / split.tokens:.2f}")
    changed = [f"`{name}={field_text(value)}`" for name, value in train.items() if value != getattr(TrainConfig, name)]
    lines += [
        ("Steps", f"{step:,} of {train['steps']:,}, of {train['tokens_per_step']:,} tokens"),
        ("Tokens", f"{n_tokens:,}: {' and '.join(times)} times the text"),
        ("Settings", f"{', '.join(changed)}; the others are the defaults of `TrainConfig`"),
        ("Data", f"sha256 {run['data_sha256']}"),
        ("Tokenizer", f"sha256 {tokenizer_sha256}"),
    ]
    return f"## Training\n\n{markdown(['', ''], lines)}"


CAUSAL_SCORES: list[tuple[str, Callable[[Evaluation], str]]] = [
    ("bits per byte", lambda score: f"{score.bits_per_byte:.3f}"),
    ("nats per token", lambda score: f"{score.loss:.4f}"),
    ("perplexity per token", lambda score: f"{score.perplexity:.2f}"),
    ("perplexity per word", lambda score: f"{score.word_perplexity:.1f}"),
    ("tokens", lambda score: f"{score.n_tokens:,}"),
    ("words", lambda score: f"{score.n_words:,} ({score.word_count})"),
    ("bytes", lambda score: f"{score.n_bytes:,}")]
MASKED_SCORES: list[tuple[str, Callable[[Evaluation], str]]] = [
    ("nats per masked token", lambda score: f"{score.loss:.4f}"),
    ("perplexity per masked token", lambda score: f"{score.perplexity:.2f}"),
    ("masked tokens", lambda score: f"{score.n_tokens:,}")]


def card_scores(config: ModelConfig, n_documents: dict[str, int], scores: dict[str, Evaluation]) -> str:
    """The scores of all splits side by side. Both dictionaries are by split."""
    kinds = CAUSAL_SCORES if config.causal else MASKED_SCORES
    lines = [["documents", *(f"{n_documents[split]:,}" for split in scores)],
             *([name, *(text(score) for score in scores.values())] for name, text in kinds)]
    return ("## Held-out scores\n\nOf the weights in this folder, in float32 arithmetic, every token once, in rows of "
            f"{config.context:,}.\n\n{markdown(['', *scores], lines, n_words=1)}")


def card_end(sample: str | None) -> str:
    """How a model that decodes begins a document, and the versions that made the card."""
    made = (f"<sub>Made by `lineartime export` on {time.strftime('%Y-%m-%d', time.gmtime())}: "
            f"torch {torch.__version__}; lineartime {lineartime.__version__}.</sub>\n")
    if sample is None:
        return made
    return (f"## Sample\n\nThe first {SAMPLE_TOKENS} tokens from the beginning of a document at temperature "
            f"{SAMPLE_TEMPERATURE} with seed 0, not chosen:\n\n{code_block(sample, 'text')}\n\n{made}")
