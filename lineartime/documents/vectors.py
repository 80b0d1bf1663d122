"""Fine-tuning for vectors: the two texts of a pair become neighbours, and the other rows of a micro-batch do not.

A pair is two documents, or without a second field the two halves of one. The vector of each is the mean of its last
hidden states, as in `embed`. The loss is the cross-entropy of finding a text's partner among those of the micro-batch,
both ways, by cosine similarities divided by TEMPERATURE."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.documents.pooling import Reading
from lineartime.documents.texts import TokenizedTexts, as_bytes, read_vectors
from lineartime.model import LanguageModel
from lineartime.ops.dtypes import at_least_float32, autocast_off

TEMPERATURE = 0.05
HOW = "The partner of each text is looked for among as many others."
BLOCK = 1024
"""Texts that are compared with all others at once."""


def same_texts(texts: TokenizedTexts) -> np.ndarray:
    """A number for each text of the pairs, equal for texts that are equal: int64 `[N, 2]`."""
    number: dict[bytes, int] = {}
    return np.array([[number.setdefault(as_bytes(ids), len(number)) for ids in pair]
                     for pair in zip(texts.ids, texts.second_ids, strict=True)], np.int64)


def contrastive_losses(first_BD: Tensor, second_BD: Tensor, same_B2: Tensor) -> Tensor:
    """-ln p of finding each text's partner among all, `[B, 2]`: the second texts for a first one, and the reverse
    (multiple negatives ranking loss). same_B2: of `same_texts`; equal texts are not counted as wrong."""
    first_BD, second_BD = (F.normalize(at_least_float32(x_BD), dim=-1) for x_BD in (first_BD, second_BD))
    partner_B = torch.arange(len(first_BD), device=first_BD.device)
    with autocast_off(first_BD):  # which would round cosines to 1/256
        logits_BB = first_BD @ second_BD.T / TEMPERATURE
    logits_BB = logits_BB.masked_fill(no_negatives(same_B2, partner_B), -torch.inf)
    return torch.stack([F.cross_entropy(each, partner_B, reduction="none") for each in (logits_BB, logits_BB.T)], -1)


def no_negatives(same_N2: Tensor, rows_R: Tensor, side: int = 0) -> Tensor:
    """Which texts of the other side do not count as wrong for the texts `rows_R` of this side, without their partners:
    bool `[R, N]`. They are copies of the text and of its partner, on whichever side, and the partners of its copies.

    same_N2: of `same_texts`. side: 0 for the first texts of pairs, 1 for the second."""
    same_R2 = same_N2[rows_R]
    found_RN = (same_R2[:, None] == same_N2).any(-1) | (same_R2[:, None, side] == same_N2[:, 1 - side])
    return found_RN.scatter(1, rows_R[:, None], False)


def score_texts(model: LanguageModel, texts: TokenizedTexts, reading: Reading,
                progress: Callable[[int], None] | None = None) -> dict[str, Any]:
    """`score_pairs` of pairs that are read whole. progress is called with the number of tokens read."""
    vectors = torch.from_numpy(read_vectors(model, [*texts.ids, *texts.second_ids], reading, progress))
    first_ND, second_ND = vectors.chunk(2)
    return score_pairs(first_ND, second_ND, same_texts(texts))


def score_pairs(first_ND: Tensor, second_ND: Tensor, same_N2: np.ndarray) -> dict[str, Any]:
    """The scores of finding the second text of each first one among all N by cosine similarity; its rank is counted
    from 1, and texts that are equal do not count against each other.

    "score" and "mrr": the mean of 1 / rank. "recall_at_1", "recall_at_10": the share of ranks up to 1 and 10. "loss":
    nats per text of a pair, among N instead of a micro-batch's rows."""
    first_ND, second_ND = F.normalize(first_ND, dim=-1), F.normalize(second_ND, dim=-1)
    same, n, loss = torch.from_numpy(same_N2), len(first_ND), 0.0
    ranks: list[int] = []
    for side, (a_ND, b_ND) in enumerate(((first_ND, second_ND), (second_ND, first_ND))):
        for rows in torch.arange(n).split(BLOCK):
            # Blocks of rows against all: N x N cosines at once would not fit into memory.
            cosine_RN = a_ND[rows] @ b_ND.T
            own_R1 = cosine_RN.gather(1, rows[:, None])
            cosine_RN = cosine_RN.masked_fill(no_negatives(same, rows, side), -torch.inf)
            loss += F.cross_entropy(cosine_RN / TEMPERATURE, rows, reduction="sum").item()
            if side == 0:  # a tie, to rounding, counts against it: vectors that are all equal find nothing
                ranks += (cosine_RN >= own_R1 - 1e-9).sum(1).tolist()
    ranks_N = np.array(ranks)
    mrr = float((1 / ranks_N).mean())
    return {"loss": loss / (2 * n), "score": mrr, "mrr": mrr, "recall_at_1": float((ranks_N == 1).mean()),
            "recall_at_10": float((ranks_N <= 10).mean()), "n_documents": n}
