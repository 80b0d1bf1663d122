"""What a longer context is worth in a text: a trained model's loss beside that of the same model with an exact memory.

    python -m studies.length --code OUT                                      writes code as `prepare` reads it
    python -m studies.length --texts TEXTS --model books=small [--model code=RUN ...]  reads what has no row
    python -m studies.length --into benchmarks/tables/memory.md              writes the table

The memory holds the model's states of the last N tokens of the document, and after each the token that came next. A
token's state is compared with all of them, and the tokens behind the most similar ones are mixed with the model's own
prediction, as in "Improving Neural Language Models with a Continuous Cache" (Grave et al., 2017). How far the mixture
trusts the memory is learned on half of the documents and asked of the others. What it gains with 4,096 tokens over 512
is what a model of this kind could gain from a longer context, and does not."""

import argparse
import hashlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pyarrow as pa
import torch
import torch.nn.functional as F
import transformers
from pyarrow import parquet
from torch import Tensor

import lineartime
from benchmarks import Row
from benchmarks.append import append_json_lines
from benchmarks.paper.memory import difference_text
from benchmarks.provenance import installed_version, provenance
from lineartime.base.settings import require, require_name
from lineartime.base.words import markdown
from lineartime.folders import named_folder
from lineartime.model.language_model import LanguageModel
from studies import missing, named_models, run

KINDS = ("books", "code")
"""The rows also have articles, by topic and as they come, of a version of this file before."""
N_TOKENS, N_DOCUMENTS = 16_384, 10
REACHES = (512, 1024, 2048, 4096, 8192, 16_384)
"""Tokens that the memory goes back."""
SCORED = 4096
"""The first position that is scored: there most reaches are full."""
SHARPNESS = (10.0, 20.0, 40.0)
"""What cosines are multiplied with before the softmax; the best on the documents that the mixture learns from."""
WINDOW = 1024
"""A model reads its own window of tokens and the one before it."""


class Asked(NamedTuple):
    """What is known of each token of a document: the memory's probability of it, by reach and sharpness, and what the
    mixture trusts it by; the model's own log probability and entropy."""

    memory: dict[tuple[int, float], tuple[Tensor, Tensor]]
    log_p_T: Tensor
    entropy_T: Tensor

    def losses(self, place: tuple[int, float], w_4: Tensor) -> Tensor:
        """Of the mixture, in nats; a share of `sigmoid(w x)` is the memory's."""
        p_T, trust_T2 = self.memory[place]
        x_T4 = torch.cat([trust_T2, self.entropy_T[:, None] / 5, torch.ones_like(p_T)[:, None]], 1)
        share_T = torch.sigmoid(x_T4 @ w_4)
        return -((1 - share_T) * self.log_p_T.exp() + share_T * p_T + 1e-12).log()[SCORED:]


def code_documents() -> dict[str, str]:
    """The sources of PyTorch and transformers, a document a folder, of at least 40,000 characters."""
    found: dict[str, str] = {}
    for package in (torch, transformers):
        root, files = Path(package.__file__).parent, defaultdict(list)
        for path in sorted(root.rglob("*.py")):
            files[path.parent].append(path)
        for folder, own in sorted(files.items()):
            text = "\n\n".join(f"# {path.name}\n{path.read_text(encoding='utf-8', errors='ignore')}" for path in own)
            if len(text) >= 40_000:
                found[f"{package.__name__}/{folder.relative_to(root).as_posix()}"] = text
    return found


def code_split(name: str) -> str:
    """One folder in 32 each for validation and test, by a hash of the name."""
    return {0: "validation", 1: "test"}.get(hashlib.sha256(name.encode()).digest()[0] // 8, "train")


def write_code(folder: Path) -> None:
    """The text of code as `prepare` reads it."""
    documents = code_documents()
    (folder / "code").mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation", "test"):
        own = [text for name, text in documents.items() if code_split(name) == split]
        parquet.write_table(pa.table({"text": own}), folder / "code" / f"{split}.parquet")
        print(f"{split}: {len(own)} folders, {sum(map(len, own)) / 1e6:.1f} M characters", flush=True)


def texts_of(kind: str, texts: Path | None) -> list[str]:
    """Documents of a kind, none of which the model has read. Raises UsageError for another kind, and without texts."""
    require_name("text", kind, KINDS)
    if kind == "code":
        return [text for name, text in code_documents().items() if code_split(name) != "train"]
    require(texts is not None, "no folder of texts is given", "it has pg19_medium", "give --texts")
    return [book for split in ("validation", "test")
            for book in parquet.read_table(texts / "pg19_medium" / f"{split}.parquet")["text"].to_pylist()]


@torch.no_grad()
def ask(model: LanguageModel, ids: Sequence[int]) -> Asked:
    """Read a document of `N_TOKENS` + 1 tokens."""
    inputs_T, targets_T = torch.tensor(ids[:-1]), torch.tensor(ids[1:])
    parts, log_ps, entropies = [], [], []
    for first in range(0, N_TOKENS, WINDOW):
        h_WD = model.hidden(inputs_T[None, max(first - WINDOW, 0) : first + WINDOW])[0, -WINDOW:]
        log_p_WV = F.log_softmax(model.logits(h_WD).float(), -1)
        log_ps.append(log_p_WV.gather(1, targets_T[first : first + WINDOW, None])[:, 0])
        entropies.append(-(log_p_WV.exp() * log_p_WV).sum(-1))
        parts.append(h_WD.float())
    h_TD = torch.cat(parts)
    h_TD = F.normalize(h_TD - h_TD.mean(0), dim=-1)
    memory = defaultdict(list)
    for first in range(0, N_TOKENS, WINDOW):
        at_W, key_M = torch.arange(first, first + WINDOW), torch.arange(first + WINDOW)
        cosine_WM = h_TD[at_W] @ h_TD[key_M].T
        same_WM = targets_T[key_M] == targets_T[at_W, None]
        for reach in REACHES:
            hidden_WM = (key_M >= at_W[:, None]) | (key_M < at_W[:, None] - reach)
            seen_WM = cosine_WM.masked_fill(hidden_WM, -9)
            for sharp in SHARPNESS:
                p_WM = torch.softmax(sharp * seen_WM, -1).masked_fill_(hidden_WM, 0)
                trust_W2 = torch.stack([5 * seen_WM.amax(1), p_WM.square().sum(1).clamp(min=1e-6).log() / 3], 1)
                memory[reach, sharp].append(((p_WM * same_WM).sum(1), trust_W2))
    joined = {place: (torch.cat([p for p, _ in own]), torch.cat([x for _, x in own])) for place, own in memory.items()}
    return Asked(joined, torch.cat(log_ps), torch.cat(entropies))


def mean_loss(documents: Sequence[Asked], place: tuple[int, float], w_4: Tensor) -> Tensor:
    return torch.stack([each.losses(place, w_4).mean() for each in documents]).mean()


def learn(documents: Sequence[Asked], place: tuple[int, float]) -> Tensor:
    """The numbers of the mixture that has the least loss on documents."""
    w_4 = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.LBFGS([w_4], max_iter=60, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        mean = mean_loss(documents, place, w_4)
        mean.backward()
        return mean

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return w_4.detach()


def mixed(documents: Sequence[Asked], reach: int) -> list[float]:
    """The mixture's loss of each document, learned on the half that it is not in."""
    found = [0.0] * len(documents)
    for half in (0, 1):
        learned = {(reach, sharp): learn(documents[half::2], (reach, sharp)) for sharp in SHARPNESS}
        best = min(learned, key=lambda place: float(mean_loss(documents[half::2], place, learned[place])))
        for number in range(1 - half, len(documents), 2):
            found[number] = float(mean_loss(documents[number : number + 1], best, learned[best]))
    return found


def measure(given: argparse.Namespace) -> None:
    """What has no row yet."""
    if given.code:
        write_code(given.code)
    for kind, folder in named_models(given.model).items():
        key = {"text": kind, "model": "small" if folder == "small" else "trained on it"}
        reaches = missing(given.rows, key, REACHES)
        if not reaches:
            continue
        model, tokenizer, _ = lineartime.load_model(named_folder(folder))
        ids = [tokenizer.encode(text[: 12 * N_TOKENS])[: N_TOKENS + 1] for text in texts_of(kind, given.texts)]
        documents = [ask(model.eval(), each) for each in [own for own in ids if len(own) > N_TOKENS][:N_DOCUMENTS]]
        alone = [-float(each.log_p_T[SCORED:].mean()) for each in documents]
        for reach in reaches:
            append_json_lines(given.rows, [key | {
                "tokens": reach, "alone": alone, "losses": mixed(documents, reach), **provenance(),
                "transformers": installed_version("transformers"),
                "command": f"python -m studies.length --texts TEXTS --model '{kind}=...'"}])
            print(f"{kind}, {reach} tokens: done", flush=True)


def table(rows: Sequence[Row]) -> str:
    """The model's loss, what the memory of 512 tokens gains over it, and what longer ones gain over that."""
    lines = []
    for text, model in dict.fromkeys((row["text"], row["model"]) for row in rows):
        own = {row["tokens"]: pd.Series(row["losses"]) for row in rows if (row["text"], row["model"]) == (text, model)}
        alone = pd.Series(next(row["alone"] for row in rows if (row["text"], row["model"]) == (text, model)))
        lines.append([text, model, f"{alone.mean():.3f}", difference_text(alone - own[REACHES[0]]),
                      *(difference_text(own[REACHES[0]] - own[reach]) for reach in REACHES[1:])])
    head = ["text", "model", "its loss", "gain of 512 tokens", *(f"{reach:,} over 512" for reach in REACHES[1:])]
    about = f"Nats per token from position {SCORED:,} on: mean of up to {N_DOCUMENTS} documents, 95 % interval."
    return f"{about}\n\n{markdown(head, lines, 2)}"


if __name__ == "__main__":
    run(__doc__, "length", measure, table, "length", {
        "texts": {"type": Path, "help": "the folder with pg19_medium"},
        "code": {"type": Path, "help": "write the text of code below this folder"},
        "model": {"action": "append", "default": [], "help": f"TEXT=MODEL; a text is {', '.join(KINDS)}; "
                  "may be given again"}})
