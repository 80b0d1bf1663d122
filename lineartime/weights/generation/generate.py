"""Generation: read the prompts piece by piece, then append one token at a time."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from lineartime.base.errors import DataError, NumericsError, UsageError
from lineartime.base.settings import require
from lineartime.data.read_text import LAST_WORD, cut_pieces
from lineartime.data.tokenizer import Tokenizer
from lineartime.model.decoding.state import DecodingState
from lineartime.model.language_model import LanguageModel

PIECE_TOKENS = 2048  # of a row's prompt read at once, in whole chunks; bounds the memory of a long prompt

Prompt = TypeVar("Prompt", str, list[int])  # Text, or the ids of tokens: `generate` returns what it was given


@torch.no_grad()  # not `inference_mode`: `LanguageModel.extend` may go on with the state
def prefill(model: LanguageModel, prompts: Sequence[Sequence[int]], progress: Callable[[int], None] | None = None,
            state: DecodingState | None = None) -> tuple[Tensor, DecodingState]:
    """Read prompts of any lengths, piece by piece. Returns the logits after each prompt's last
    token, `[B, V]`, and the state.

    progress is called with the number of tokens read of the longest prompt. state: its rows go on
    with the prompts; it is updated. Raises UsageError for an empty prompt, a token outside the
    vocabulary, another model's state or number of rows, and past the end of a position table."""
    require(all(len(prompt) for prompt in prompts), "empty prompt", "generate", "begin with the end-of-document token")
    device, dtype = model.embed.weight.device, model.embed.weight.dtype
    chunk_size = model.config.chunk_size or 1
    piece = max(PIECE_TOKENS // chunk_size, 1) * chunk_size
    state = model.decoding_state(len(prompts)) if state is None else state
    last_BD = torch.zeros(len(prompts), model.config.d_model, device=device, dtype=dtype)
    for start in range(0, max(map(len, prompts), default=0), piece):
        parts = [list(prompt[start : start + piece]) for prompt in prompts]
        width = max(map(len, parts))
        ids_BN = torch.tensor([part + [0] * (width - len(part)) for part in parts], device=device)
        require(bool(((ids_BN >= 0) & (ids_BN < model.config.vocab_size)).all()), "token outside the vocabulary",
                f"{model.config.vocab_size} tokens", "use the model's own tokenizer")
        x_BND = model.extend(ids_BN, torch.tensor([*map(len, parts)], device=device), state)[0]
        for row, part in enumerate(parts):
            if part:
                last_BD[row] = x_BND[row, len(part) - 1]
        if progress is not None:
            progress(start + width)
    return model.logits(last_BD), state


def read(model: LanguageModel, tokenizer: Tokenizer, blocks: Iterable[str], *,
         progress: Callable[[int, int], None] | None = None) -> DecodingState:
    """The state of one row that has read a text, in blocks of any length, as the beginning of a
    document. Memory holds the state and a part of the text.

    The last word waits in `DecodingState.text`, for the tokens at the end depend on what follows:
    `generate` goes on as from the whole text, if the tokenizer is byte-level
    (`Tokenizer.reads_pieces`); another one tokenises what follows on its own. progress is called
    with the bytes and the tokens that are read. Raises DataError for a text without a character,
    and UsageError as `prefill` does."""
    state, ids, pieces = model.decoding_state(1), [tokenizer.end_of_document], cut_pieces(blocks)
    state.tokenizer_sha256, n_bytes = tokenizer.sha256, 0
    for text, last in tokenizer.parts_of(pieces):
        found = LAST_WORD.match(text) if last else None
        end = len(text) if not last else found.end() if found else 0
        ids, state.text = ids + tokenizer.encode(text[:end]), text[end:]
        if ids:
            prefill(model, [ids], state=state)
        ids, n_bytes = [], n_bytes + len(text[:end].encode())
        if progress is not None:
            progress(n_bytes, int(state.seq_lens_B))
    require(state.text != "", "no text", "read", "give some", DataError)
    return state


@torch.inference_mode()
def decode_step(model: LanguageModel, ids_B: Tensor, state: DecodingState) -> Tensor:
    """Append one token to every row; returns the logits of the next, `[B, V]`. Constant time and
    memory for FLASH. Raises UsageError past the end of a position table."""
    return model.logits(model.extend(ids_B[:, None], torch.ones_like(ids_B), state)[0][:, 0])


def sample(logits_BV: Tensor, *, temperature: float, top_k: int | None, top_p: float | None,
           generators: Sequence[torch.Generator]) -> Tensor:
    """One token per row, `[B]`, each from its row's generator. temperature 0 takes the likeliest
    token. top_k keeps the k likeliest tokens and all that are as likely as the last of these, top_p
    the likeliest that together reach probability p. Raises NumericsError for NaN and infinity."""
    if not (logits_BV.amax(-1) < math.inf).all():  # NaN is its own largest
        raise NumericsError("the logits are not numbers", f"generate, {logits_BV.dtype}",
                            "the weights are damaged, or too large for float16: take float32 or bfloat16")
    if temperature == 0:
        return logits_BV.argmax(-1)
    logits_BV = logits_BV.float() / temperature
    if top_k is not None and top_k < logits_BV.shape[-1]:
        kth_B1 = logits_BV.topk(top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth_B1, -math.inf)
    if top_p is not None:
        sorted_BV, order_BV = logits_BV.sort(descending=True)
        p_BV = sorted_BV.softmax(-1)
        beyond_BV = p_BV.cumsum(-1) - p_BV >= top_p  # the likelier tokens alone reach top_p
        logits_BV = logits_BV.masked_fill(torch.zeros_like(beyond_BV).scatter(1, order_BV, beyond_BV), -math.inf)
    p_BV = logits_BV.softmax(-1).cpu()
    drawn = [torch.multinomial(p_V, 1, generator=generator) for p_V, generator in zip(p_BV, generators, strict=True)]
    return torch.cat(drawn).to(logits_BV.device)


LEAST_TEMPERATURE = 1e-6  # a far smaller one would divide logits to infinity


def check_sampling(max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise UsageError for a sampling setting outside its range."""
    require(max_new_tokens >= 0, "max_new_tokens must not be negative", f"{max_new_tokens}")
    require(temperature == 0 or LEAST_TEMPERATURE <= temperature < math.inf,
            f"temperature must be 0 or at least {LEAST_TEMPERATURE}", f"{temperature}", "0 takes the likeliest token")
    require(top_k is None or top_k >= 1, "top_k must be at least 1", f"{top_k}")
    require(top_p is None or 0 < top_p <= 1, "top_p must lie in (0, 1]", f"{top_p}")


@torch.inference_mode()
def generate(model: LanguageModel, prompts: Sequence[Prompt], *, max_new_tokens: int,
             tokenizer: Tokenizer | None = None, temperature: float = 0.0, top_k: int | None = None,
             top_p: float | None = None, seed: int = 0, stop: Callable[[int, list[int]], bool] | None = None,
             on_prompt: Callable[[int], None] | None = None, state: DecodingState | None = None) -> list[Prompt]:
    """Continue each prompt by at most `max_new_tokens` tokens. Lists of token ids give the new ids
    of each row. Texts, each the beginning of a document, give new texts by the model's tokenizer.

    A row ends at one of the model's `end_tokens` (which is not returned), or when `stop(row,
    new_ids)`, which is called after each token, is true. Row r draws from a generator seeded with
    (seed, r). on_prompt: `prefill`'s progress. state: what every prompt goes on from, such as the
    text that `read` has read, or a state of as many rows as there are prompts; it stays as it is.
    Raises UsageError for wrong settings and prompts, NumericsError as `sample` does."""
    check_sampling(max_new_tokens, temperature, top_k, top_p)
    if len(prompts) == 0:
        return []
    rows_of_ids = ids_of_prompts(prompts, tokenizer, state)
    generators = [torch.Generator().manual_seed((seed * 1_000_003 + row) % 2**63) for row in range(len(prompts))]
    new: list[list[int]] = [[] for _ in prompts]

    def ends(row: int, token: int) -> bool:
        """Append a token to a row; returns whether the row is over."""
        if token in model.end_tokens:
            return True
        new[row].append(token)
        return stop is not None and stop(row, new[row])

    rows, open_rows = list(range(len(prompts))), set(range(len(prompts)))  # those of the state, and those that go on
    logits_BV, now = prefill(model, rows_of_ids, on_prompt, state and state.repeated(len(prompts)))
    for n_done in range(1, max_new_tokens + 1):
        ids_B = sample(logits_BV, temperature=temperature, top_k=top_k, top_p=top_p,
                       generators=[generators[row] for row in rows])
        for row, token in zip(rows, ids_B.tolist(), strict=True):
            if row in open_rows and ends(row, token):
                open_rows.remove(row)
        if not open_rows or n_done == max_new_tokens:
            break
        if len(open_rows) < len(rows) and model.config.max_len is not None:
            kept = [i for i, row in enumerate(rows) if row in open_rows]  # the others would reach the table's end
            now.select(torch.tensor(kept))
            ids_B, rows = ids_B[kept], [rows[i] for i in kept]
        logits_BV = decode_step(model, ids_B, now)
    made: list[Any] = new if tokenizer is None or not isinstance(prompts[0], str) else list(map(tokenizer.decode, new))
    return made


def ids_of_prompts(prompts: Sequence[str | list[int]], tokenizer: Tokenizer | None,
                   state: DecodingState | None = None) -> list[list[int]]:
    """The ids of texts, each behind the token that begins a document, or behind the text of a
    state; ids as they are. Raises UsageError for texts without a tokenizer, for one prompt, for
    texts and ids together, and for a state's text with ids or another tokenizer."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    ids = [prompt for prompt in prompts if not isinstance(prompt, str)]
    no_rows = any(isinstance(row, int | bytes) or getattr(row, "ndim", 1) != 1 for row in ids)
    if isinstance(prompts, str) or (texts and ids) or no_rows:
        raise UsageError("prompts are a list of texts, or a list of lists of token ids", "generate", 'such as ["Hi"]')
    require(not texts or tokenizer is not None, "texts need the model's tokenizer", "generate",
            "model, tokenizer, _ = load_model(...), then generate(model, texts, tokenizer=tokenizer, ...)")
    if state is not None and state.text:
        is_its_own = tokenizer is not None and state.tokenizer_sha256 == tokenizer.sha256
        require(is_its_own and not ids, "the state of a text goes on with texts and its own tokenizer", "generate",
                "give generate both")
    if tokenizer is None:
        return ids
    before, held = ([tokenizer.end_of_document], "") if state is None else ([], state.text)
    return ids + [before + tokenizer.encode(held + text) for text in texts]
