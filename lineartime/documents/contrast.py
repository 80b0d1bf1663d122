"""Fine-tuning for vectors: the two texts of a pair become neighbours, and the other rows of a micro-batch do not.

A pair is two documents, or without a second field the two halves of one. The vector of each is the mean of its last
hidden states, as in `embed`. The loss is the cross-entropy of finding a text's partner among those of the micro-batch,
both ways, by cosine similarities divided by TEMPERATURE. Of a document that is longer than a row each epoch reads one
window; held-out documents are read whole."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineartime.atomic_io import write_atomically
from lineartime.config import ModelConfig
from lineartime.config_json import ENCODER, model_config_json
from lineartime.data.tokenizer import Tokenizer
from lineartime.data.tokens import epoch_order, places_of_step
from lineartime.distributed.ranks import ALONE, Ranks
from lineartime.documents.examples import Example, read_examples
from lineartime.documents.labelled import EXCERPT, noting
from lineartime.documents.pooling import Reading, document_ids, padded, read_means, row_means, windows_of
from lineartime.documents.report import MOST_WRONG, REPORT_FILE, table
from lineartime.documents.tuning import (
    SAVED,
    DocumentTuning,
    drawn_window,
    load_step,
    of_scores,
    read_splits,
    reading_of,
    train_best,
)
from lineartime.errors import DataError, escaped
from lineartime.finetuning import copy_weights, try_rates
from lineartime.markdown import code_span
from lineartime.model import DocumentEncoder, LanguageModel
from lineartime.ops.dtypes import at_least_float32
from lineartime.run import CONFIG_FILE, Run
from lineartime.run_config import RunConfig
from lineartime.settings import require
from lineartime.training import Progress, StopSignal
from lineartime.weights.folder import tokenizer_files

TEMPERATURE = 0.05
LEAST_HALF = 2
"""Tokens that each half of a document has at least, the end-of-document token among them."""
BLOCK = 1024
"""Texts that are compared with all others at once."""

logger = logging.getLogger(__name__)


@dataclass
class Pairs:
    """Tokenised pairs of documents, in order."""

    first: list[np.ndarray] = field(default_factory=list)
    second: list[np.ndarray] = field(default_factory=list)
    """Each begins with the end-of-document token, as those of `first` do."""
    where: list[str] = field(default_factory=list)
    excerpts: list[str] = field(default_factory=list)
    """How the first text begins."""
    n_cut: int = 0

    def __len__(self) -> int:
        return len(self.first)

    @property
    def n_tokens(self) -> int:
        return sum(map(len, (*self.first, *self.second)))

    def keys(self) -> list[bytes]:
        """Equal for pairs of equal tokens."""
        both = [np.concatenate(pair) for pair in zip(self.first, self.second, strict=True)]
        return [hashlib.sha256(ids.astype("<u4").tobytes()).digest() for ids in both]

    def sha256(self) -> str:
        """The hash of all ids."""
        digest = hashlib.sha256()
        for ids in (*self.first, *self.second):
            digest.update(len(ids).to_bytes(8, "little") + ids.astype("<u4").tobytes())
        return digest.hexdigest()

    def same_N2(self) -> np.ndarray:
        """A number for each text, equal for texts that are equal: int64 `[N, 2]`. They are not each other's negatives.
        """
        number: dict[bytes, int] = {}
        return np.array([[number.setdefault(ids.astype("<u4").tobytes(), len(number)) for ids in pair]
                         for pair in zip(self.first, self.second, strict=True)], np.int64)


def read_pairs(tokenizer: Tokenizer, examples: Iterable[Example], max_tokens: int | None = None,
               progress: Callable[[int], None] | None = None) -> Pairs:
    """Tokenise pairs: the two texts of a record, or the halves of a document. max_tokens: cut longer documents; it is
    counted how many. progress is called with the number of pairs read. Raises DataError for a document that is too
    short to be halved, and for fewer than two pairs."""
    pairs, small = Pairs(), np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    where = ""

    def ids_of(text: Iterable[str]) -> np.ndarray:
        windows = list(windows_of(document_ids(tokenizer, text), 1 << 16, max_tokens))
        pairs.n_cut += windows[-1].is_cut
        return np.concatenate([np.array(window.ids, small) for window in windows])

    for example in examples:
        where = example.where
        begun: list[str] = []
        first = ids_of(noting(example.text, begun))
        if example.second is None:
            middle = (len(first) + 1) // 2
            second = np.concatenate([first[:1], first[middle:]])
            first = first[:middle]
            if min(len(first), len(second)) < LEAST_HALF:
                raise DataError("a document that is too short to be halved", where, "take it out, or name a second "
                                "text with --pair-field")
        else:
            second = ids_of([example.second])
        pairs.first.append(first)
        pairs.second.append(second)
        pairs.where.append(where)
        pairs.excerpts.append(" ".join("".join(begun)[: 2 * EXCERPT].split())[:EXCERPT])
        if progress is not None:
            progress(len(pairs))
    if len(pairs) < 2:
        raise DataError("one pair only", where, "a pair is learned from what is no pair")
    return pairs


def contrastive_losses(first_BD: Tensor, second_BD: Tensor, same_B2: Tensor) -> Tensor:
    """-ln p of finding each text's partner among all, `[B, 2]`: the second texts for a first one, and the reverse.
    same_B2: equal for equal texts, which are not counted as wrong."""
    first_BD, second_BD = (F.normalize(at_least_float32(x_BD), dim=-1) for x_BD in (first_BD, second_BD))
    partner_B = torch.arange(len(first_BD), device=first_BD.device)
    with torch.autocast(first_BD.device.type, enabled=False):  # which would round cosines to 1/256
        logits_BB = first_BD @ second_BD.T / TEMPERATURE
    logits_BB = logits_BB.masked_fill(no_negatives(same_B2, partner_B), -torch.inf)
    return torch.stack([F.cross_entropy(each, partner_B, reduction="none") for each in (logits_BB, logits_BB.T)], -1)


def no_negatives(same_N2: Tensor, rows_R: Tensor, side: int = 0) -> Tensor:
    """Which texts of the other side do not count as wrong for the texts `rows_R` of this side, without their partners:
    bool `[R, N]`. They are copies of the text itself, copies of its partner, and the partners of its copies.

    same_N2: `Pairs.same_N2`. side: 0 for the first texts of pairs, 1 for the second."""
    same_R2 = same_N2[rows_R]
    found_RN = (same_R2[:, None] == same_N2).any(-1) | (same_R2[:, None, side] == same_N2[:, 1 - side])
    return found_RN.scatter(1, rows_R[:, None], False)


class PairedDocuments:
    """The objective of `fit` for pairs of documents."""

    def __init__(self, config: RunConfig, train: Pairs, validation: Pairs, ranks: Ranks = ALONE):
        self.config, self.train, self.validation, self.ranks = config, train, validation, ranks
        self.same_N2 = train.same_N2()

    def batch(self, step: int) -> tuple[np.ndarray, ...]:
        """The first and the second texts, ids `[R, T]` with -1 for padding, and `Pairs.same_N2`. Every epoch takes each
        pair once, in an order drawn from (seed, epoch)."""
        config, size, seed = self.config, self.config.model.context, self.config.train.seed
        places = places_of_step(len(self.train), seed=seed, step=step, rows_per_step=config.rows_per_step)
        places = places[self.ranks.share(len(places))]

        def rows(texts: Sequence[np.ndarray], side: int) -> np.ndarray:
            return padded([texts[row][drawn_window(len(texts[row]), size, seed, epoch, 2 * row + side)].tolist()
                           for epoch, row in places], size)

        return rows(self.train.first, 0), rows(self.train.second, 1), self.same_N2[[row for _, row in places]]

    def n_targets(self, *batch: Tensor) -> int:
        return batch[2].numel()

    def losses(self, model: nn.Module, *batch: Tensor, ranks: Ranks = ALONE) -> Tensor:
        first_BT, second_BT, same_B2 = batch
        assert isinstance(model, DocumentEncoder)
        return contrastive_losses(row_means(model, first_BT), row_means(model, second_BT), same_B2)

    def evaluate(self, model: LanguageModel, progress: Callable[[int], None] | None = None) -> dict[str, Any]:
        """The scores of held-out pairs, read whole, in a drawn order up to `eval_tokens` tokens, at least two. Every
        rank reads all of them, for a share would be batched, and rounded, in another way."""
        train, held_out = self.config.train, self.validation
        order = epoch_order(train.seed, 0, len(held_out))
        before = np.cumsum([0, *(len(held_out.first[i]) + len(held_out.second[i]) for i in order)])[:-1]
        chosen = order[: max(int((before < train.eval_tokens).sum()), 2)]
        part = Pairs([held_out.first[i] for i in chosen], [held_out.second[i] for i in chosen])
        return score_pairs(*read_vectors(model, part, reading_of(self.config), progress), part.same_N2())[0]


def read_vectors(model: LanguageModel, pairs: Pairs, reading: Reading,
                 progress: Callable[[int], None] | None = None) -> tuple[Tensor, Tensor]:
    """The vectors of the first and of the second texts, read whole, float64 `[N, D]` each. progress is called with the
    number of tokens read."""
    was_training = model.training
    model.eval()
    texts = ([ids.tolist()] for ids in (*pairs.first, *pairs.second))
    vectors = torch.from_numpy(np.array([mean.vector_D for mean in read_means(model, texts, reading,
                                                                              progress=progress)]))
    model.train(was_training)
    return vectors[: len(pairs)], vectors[len(pairs):]


def score_pairs(first_ND: Tensor, second_ND: Tensor, same_N2: np.ndarray) -> tuple[dict[str, Any], list[int]]:
    """The scores of finding the second text of each first one among all N by cosine similarity, and its rank for each
    pair, from 1; texts that are equal do not count against each other.

    "score" and "mrr": the mean of 1 / rank. "recall_at_1", "recall_at_10": the share of ranks up to 1 and 10. "loss":
    nats per text of a pair, among N instead of a micro-batch's rows."""
    first_ND, second_ND = F.normalize(first_ND, dim=-1), F.normalize(second_ND, dim=-1)
    same = torch.from_numpy(same_N2)
    ranks: list[int] = []
    loss = 0.0
    for side, (a_ND, b_ND) in enumerate(((first_ND, second_ND), (second_ND, first_ND))):
        for start in range(0, len(a_ND), BLOCK):
            rows = torch.arange(start, min(start + BLOCK, len(a_ND)))
            cosine_RN = a_ND[rows] @ b_ND.T
            own_R1 = cosine_RN.gather(1, rows[:, None])
            cosine_RN = cosine_RN.masked_fill(no_negatives(same, rows, side), -torch.inf)
            loss += F.cross_entropy(cosine_RN / TEMPERATURE, rows, reduction="sum").item()
            if side == 0:
                # A tie, to rounding, counts against it: vectors that are all equal find nothing.
                ranks += (cosine_RN >= own_R1 - 1e-9).sum(1).tolist()
    inverse_N = 1 / np.array(ranks)
    return {"loss": loss / (2 * len(ranks)), "score": float(inverse_N.mean()), "mrr": float(inverse_N.mean()),
            "recall_at_1": float(np.mean(np.array(ranks) == 1)),
            "recall_at_10": float(np.mean(np.array(ranks) <= 10)), "n_documents": len(ranks)}, ranks


def words(scores: dict[str, Any]) -> str:
    """The most important scores, in words."""
    return (f"found first {scores['recall_at_1']:.3f}, among ten {scores['recall_at_10']:.3f}, mean 1 / rank "
            f"{scores['mrr']:.3f}")


def finetune_encoder(plan: DocumentTuning, pretrained: LanguageModel, config: ModelConfig, tokenizer: Tokenizer,
                     device: torch.device, stop: StopSignal, on_step: Callable[[dict[str, Any]], None] | None,
                     progress: Progress | None, rank_timeout: float) -> dict[str, Any]:
    """`finetune_documents` for vectors, with the pretrained model. config: that of the new one."""
    texts = read_splits(plan, stop, progress, "pairs", lambda names, counted: read_pairs(
        tokenizer, read_examples(names, plan.fields), plan.max_tokens, counted))
    train, validation, test = texts.train, texts.validation, texts.test
    description = {**texts.facts(pretrained, tokenizer, plan), "temperature": TEMPERATURE}
    configs, trained = plan.runs(config, len(train), validation.n_tokens)
    require(all(each.micro_batch_rows > 1 for each in configs.values()), "a micro-batch has no negatives",
            f"one row of {config.context} tokens", "raise tokens_per_step, or micro_batch_tokens")
    logger.info(f"pairs     {len(train):,} to train on, {train.n_tokens:,} tokens"
                + (", halves of documents" if plan.fields.pair is None else "") + texts.counts)
    if texts.n_cut:
        logger.info(f"cut       {texts.n_cut:,} texts to {plan.max_tokens:,} tokens")
    texts.warn_of_known("pairs")

    def train_one(each: RunConfig, ranks: Ranks) -> dict[str, Any]:
        """Run one learning rate, or resume it; returns its scores on all held-out pairs."""
        files = {**tokenizer_files(tokenizer), CONFIG_FILE: model_config_json(config, "LineartimeModel", **ENCODER)}

        def begin(ranks: Ranks) -> tuple[LanguageModel, PairedDocuments, dict[str, str]]:
            torch.manual_seed(each.train.seed)
            model = DocumentEncoder(config)
            copy_weights(model, pretrained, "score.")
            return model, PairedDocuments(each, train, validation, ranks), files

        def scored(run: Run, model: LanguageModel, ranks: Ranks) -> dict[str, Any]:
            watched = stop.watch(SAVED, progress, "scoring", validation.n_tokens, ranks)
            return score_pairs(*read_vectors(model, validation, reading_of(each), watched), validation.same_N2())[0]

        return train_best(each, description, device, stop, begin, scored, words, on_step, plan.patience)

    def finish(best: str, rates: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
        step, each = rates[best.removeprefix("lr-")]["best_step"], configs[best.removeprefix("lr-")]
        scored = validation if test is None else test
        found: dict[str, Any] = {"task": "embed"}
        same, reading = scored.same_N2(), reading_of(each)

        def scores_of(model: LanguageModel, what: str) -> tuple[dict[str, Any], list[int]]:
            watched = stop.watch(SAVED, progress, what, scored.n_tokens, ranks)
            return score_pairs(*read_vectors(model.to(device), scored, reading, watched), same)

        found["without_training"], _ = scores_of(pretrained, "scoring without training")
        model = DocumentEncoder(config)
        load_step(plan.out / best, step, model)
        scores, places = scores_of(model, "scoring")
        found |= {"pairs": {"train": len(train), "validation": len(validation), "tokens": train.n_tokens,
                            "cut": texts.n_cut, "halves": plan.fields.pair is None}}
        found["known"] = texts.known()
        if test is not None:
            found["test"] = scores
        if ranks.is_first:
            write_report(plan.out, scored, scores, places, {"best": best, "learning_rates": rates, **found})
        return found

    whole = {**description, **texts.test_facts(), **trained}
    return try_rates(plan.out, configs, whole, device, rank_timeout, stop, train_one,
                     lambda scores: (scores["score"], -scores["held_out"]["loss"]), finish)


def write_report(out: Path, pairs: Pairs, scores: dict[str, Any], places: Sequence[int],
                 result: dict[str, Any]) -> None:
    """Write the report into a folder of `lineartime finetune`. places: the rank of each pair's second text."""
    names = ["loss", "mrr", "recall_at_1", "recall_at_10"]
    tested = "test" in result
    row = [f"{scores[name]:.4g}" for name in names]
    lines = ["# Vectors of documents", "",
             f"{words(scores)}, of {len(pairs):,} {'test' if tested else 'validation'} pairs. "
             f"{of_scores(result)}", "",
             "The partner of each text is looked for among as many others.", "",
             *table(["", *(name.replace("_", " ") for name in names)], [
                 ["fine-tuned", *row],
                 ["before", *(f"{result['without_training'][name]:.4g}" for name in names)]]), "",
             "## Learning rates", "", "On the validation pairs, at the best step of each run.", "",
             *table(["learning rate", "step", *(name.replace("_", " ") for name in names)],
                    [[f"{name} (best)" if result["best"] == f"lr-{name}" else name,
                      f"{each['best_step']:,} of {each['steps']:,}",
                      *(f"{each['held_out'][score]:.4g}" for score in names)]
                     for name, each in result["learning_rates"].items()]), "",
             "## Most wrong", "", "The pairs whose second text is found last.", ""]
    for i in np.argsort(-np.array(places), kind="stable")[:MOST_WRONG]:
        lines += [f"- {code_span(pairs.where[i])}: found at place {places[i]:,}", "",
                  f"      {escaped(pairs.excerpts[i])}", ""]
    write_atomically(out / REPORT_FILE, "\n".join(lines) + "\n")
