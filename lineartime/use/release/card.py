"""A model card in Markdown. Its numbers come from the run, from its data, or from measurements at the export."""

import shlex
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub import ModelCardData

from lineartime.base.settings import field_text, replace_fields
from lineartime.base.words import code_block, in_markdown, markdown, mib
from lineartime.config import ModelConfig, TrainConfig, to_dict
from lineartime.data.tokens import Manifest
from lineartime.folders import shipped_models
from lineartime.model.language_model import number_of_parameters
from lineartime.training.evaluation import Evaluation
from lineartime.training.run_config import nearest_preset, run_config
from lineartime.use.info import describe
from lineartime.use.release.provenance import machine

SAMPLE_TOKENS, SAMPLE_TEMPERATURE = 120, 0.8


@dataclass(frozen=True)
class Card:
    """The content of a card."""

    description: dict[str, Any]
    """The run's `run.json`."""
    config: ModelConfig
    tokenizer_sha256: str
    text: list[tuple[Manifest, int]]
    """The manifest of each prepared text that the run was trained on, and its share of the rows."""
    metrics: list[dict[str, Any]]
    """The run's metrics up to `step`."""
    step: int
    provenance: dict[str, Any]
    """Commit, hardware and versions of the export."""
    n_bytes: int = 0
    """Size of the file of weights."""
    scores: dict[str, Evaluation] = field(default_factory=dict)
    """By split."""
    sample: str | None = None
    """How a causal model begins a document: the first `SAMPLE_TOKENS` tokens."""


def model_card(card: Card, about: str) -> str:
    """The card's Markdown. `about` replaces the heading, and the front matter too if it begins with its own."""
    does = "text-generation" if card.config.causal else "fill-mask"
    about = about.strip() or f"# {card.description['preset']}, {number_of_parameters(card.config):,} parameters"
    about = about if about.startswith("---") else front_matter(card.config, does) + about
    sections = [about, "## Model", model_table(card), "## Training", training_table(card),
                code_block(train_command(card)), "## Held-out scores", scores_text(card)]
    if card.sample is not None:
        sections += ["## Sample", f"The first {SAMPLE_TOKENS} tokens from the beginning of a document at temperature "
                     f"{SAMPLE_TEMPERATURE} with seed 0, not chosen:", code_block(card.sample, "text")]
    return "\n\n".join([*sections, made_by(card.provenance)]) + "\n"


def front_matter(config: ModelConfig, does: str) -> str:
    """The YAML that model hubs read at the beginning of a card, without licence and language. does: the hub's word."""
    tags = [nearest_preset(config), *(["gated-attention-unit"] if config.ffn == "gau" else []),
            *(["linear-attention"] if config.attn_type in ("mixed_chunk", "linear") else [])]
    fields = ModelCardData(library_name="lineartime", pipeline_tag=does, tags=tags).to_yaml()
    return f"---\n# license and language: not known to lineartime; name them here\n{fields}\n---\n\n"


def model_table(card: Card) -> str:
    """The architecture as the paper's tables name it, and its size."""
    config, described = card.config, describe(card.config)
    lines = [("preset", f"`{card.description['preset']}`"), *described.specification[:-1],
             ("Context", f"{config.context:,}"), ("Vocabulary", f"{config.vocab_size:,}"),
             ("Parameters", f"{described.n_parameters:,}"),
             ("Weights", f"bfloat16, {card.n_bytes / 1e6:.1f} MB")]
    if config.ffn == "gau":
        lines.insert(-4, ("Query and key width s", f"{config.query_key_dim}"))
    if config.decodes and not described.decoding.per_token:
        lines.append(("Decoding state", f"{mib(described.decoding.constant)} in float32, at any length"))
    return markdown(["", ""], lines)


def training_table(card: Card) -> str:
    """The training text, steps, data hashes and time."""
    train, n_tokens = card.description["train"], card.step * card.description["train"]["tokens_per_step"]
    total, lines, times = sum(weight for _, weight in card.text), [], []
    if "from" in card.description:
        lines.append(("Began with", f"{source_of(card)}, sha256 {in_markdown(card.description['from_sha256'])}"))
    for manifest, weight in card.text:
        split, of = manifest.splits["train"], f"{100 * weight / total:.3g} % of the rows: " * (len(card.text) > 1)
        lines.append(("Text", f"{of}{split.documents:,} documents, {split.words:,} words, {split.bytes:,} bytes, "
                              f"{split.tokens:,} tokens"))
        times.append(f"{n_tokens * weight / total / split.tokens:.2f}")
    lines += [
        ("Steps", f"{card.step:,} of {train['steps']:,}, of {train['tokens_per_step']:,} tokens"),
        ("Tokens", f"{n_tokens:,}: {' and '.join(times)} times the text"),
        ("Type", "float32" if train["precision"] == "float32" else f"{train['precision']} with float32 parameters"),
        ("Data", f"sha256 {card.description['data_sha256']}"),
        ("Tokenizer", f"sha256 {card.tokenizer_sha256}"),
    ]
    clocks = [line["clock"] for line in card.metrics if "loss" in line]
    if clocks:
        speeds = [clock["tokens_per_s"] for clock in clocks]
        hours = sum(train["tokens_per_step"] / speed for speed in speeds) / 3600
        lines.append(("Time", f"{hours:.2f} hours in steps, {statistics.median(speeds):,.0f} tokens a second (median), "
                              f"from {minute(clocks[0]['time'])} to {minute(clocks[-1]['time'])} UTC"))
    return markdown(["", ""], lines)


def minute(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))


def train_command(card: Card) -> str:
    """The command that trains such a model: the paper's size, and every setting that differs from it."""
    run, shares = card.description, ",".join(f"DATA{i}:{weight}" for i, (_, weight) in enumerate(card.text, 1))
    settings = {"size": "paper", "data": "DATA" if len(card.text) == 1 else shares, "out": "RUN"}
    wanted, usual = to_dict(card.config) | run["train"], {"steps": TrainConfig.steps}
    first, source = {"model": run["preset"], "task": run["task"]}, None
    if "from" in run:
        first, source = {"from": source_of(card)}, replace_fields(ModelConfig(), run["from_model"])
        usual |= {name: getattr(TrainConfig, name) for name in ("tokens_per_step", "micro_batch_tokens")}
        usual["context"] = source.context
    # The steps decide the warm-up, and rows of given weights must fit into a micro-batch.
    paper = run_config(first | settings | {name: wanted[name] for name in usual}, source)
    usual = to_dict(paper.model) | to_dict(paper.train) | usual
    words = ["lineartime", "train"]
    for name, value in (first | settings).items():
        words += [value] if name == "model" else [f"--{name}", value]
    for name, value in wanted.items():
        if value != usual[name] and name not in ("vocab_size", "end_of_document"):
            words += ["--set", f"{name}={field_text(value)}"]
    return shlex.join(words)


def source_of(card: Card) -> str:
    """What the run began with: the name of a shipped model, else "WEIGHTS": a folder's name is of one machine."""
    return card.description["from"] if card.description["from"] in shipped_models() else "WEIGHTS"


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


def scores_text(card: Card) -> str:
    """The scores of all splits side by side."""
    kinds = CAUSAL_SCORES if card.config.causal else MASKED_SCORES
    lines = [["documents", *(f"{sum(manifest.splits[split].documents for manifest, _ in card.text):,}"
                             for split in card.scores)]]
    lines += [[name, *(text(score) for score in card.scores.values())] for name, text in kinds]
    return "\n\n".join([
        f"Of the weights in this folder, in float32 arithmetic, every token once, in rows of {card.config.context:,}.",
        markdown(["", *card.scores], lines, n_words=1)])


def made_by(made: dict[str, Any]) -> str:
    """The provenance of the export and its scores."""
    commit = made["commit"] or "unknown"  # 40 digits, and perhaps "+changes"
    return (f"<sub>Made by `lineartime export` on {made['time'][:10]}: {machine(made)}; load {made['load_average']:.1f}"
            f"; commit {commit[:10]}{commit[40:]}; torch {made['torch']}; lineartime {made['lineartime']}.</sub>")
