"""Laws that a decoder must keep for packing, padding, caches and beams to be right, asked of any
class of transformers. A model is tiny and random, with weights so large that its state matters. A
law compares two ways to the same numbers, and returns how far off they are, and how far off they
would be without what it is about (the mask, the cache): if that is nothing, it is not tried."""

import copy
import dataclasses
import inspect
import io
import math
import tomllib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DataCollatorWithFlattening, DynamicCache, logging
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks import Row
from benchmarks.markdown import listed, source_line, unique
from benchmarks.provenance import installed_version, provenance
from lineartime.base.errors import UsageError, raised_as
from lineartime.base.settings import require, require_name
from lineartime.config import PRESETS, model_config
from lineartime.hf import LineartimeConfig

SIZES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("laws.toml").read_text(encoding="utf-8"))
CLASSES: dict[str, dict[str, Any]] = SIZES["classes"]
LIMIT = 1e-3
"""The largest difference of a law that holds, in root mean squares. Parts of some use float32."""
MATTERS = 30 * LIMIT  # what the state or the mask must change at least for a law to say something
HOLDS, BROKEN, REFUSED, UNTRIED = "holds", "broken", "refused", "not tried"
N, PIECE = 45, 19  # tokens of a document and of a piece: several chunks of 8, and never whole ones
Draw = Callable[..., Tensor]  # random tokens `[B, T]`
Law = Callable[[Any, Draw], tuple[float, float]]


class NoAnswerError(Exception):
    """A class lacks what a law is about, or says so before it is asked: a result and why."""


def gap(got: Tensor, right: Tensor) -> float:
    """The largest difference, in root mean squares of what is right."""
    difference = float((got - right).abs().max() / right.square().mean().sqrt())
    if not math.isfinite(difference):
        raise NoAnswerError(BROKEN, "a number that is not finite")
    return difference


def forward(model: Any, ids_BT: Tensor, cache: Any = None, mask: Tensor | None = None, *, keep: bool = False,
            **more: Any) -> tuple[Tensor, Any]:
    """The logits, and the cache if it is kept. A class is called as `generate` calls it: with
    positions if it takes any, and if it takes none with a mask for the prompt alone."""
    taken = inspect.signature(type(model).forward).parameters
    name = next((name for name in ("past_key_values", "cache_params", "state") if name in taken), "")
    if keep and not name:
        raise NoAnswerError(UNTRIED, "its forward takes no cache")
    said = dict(more)
    if mask is not None and "position_ids" in taken:
        said["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids_BT.shape[1] :]
    if mask is not None and (cache is None or "position_ids" in taken):
        said["attention_mask"] = mask
    if cache is not None:
        said[name] = cache
    output = model(input_ids=ids_BT, use_cache=keep, **said)
    if output.logits.shape[:2] != ids_BT.shape:
        raise NoAnswerError(BROKEN, f"logits of {list(output.logits.shape)} for tokens of {list(ids_BT.shape)}")
    kept = getattr(output, name, None) if keep else None
    if keep and kept is None and cache is None:  # recurrent_gemma gives none back: `generate` makes one
        return forward(model, ids_BT, DynamicCache(config=model.config), mask, keep=True, **more)
    return output.logits, cache if kept is None else kept


def read(model: Any, pieces: Sequence[Tensor], cache: Any = None, n_read: int = 0) -> tuple[Tensor, Any]:
    """The logits of a text that is read in pieces, and its cache. n_read: tokens in the cache."""
    logits = []
    for ids_BT in pieces:
        n_read += ids_BT.shape[1]
        out_BTV, cache = forward(model, ids_BT, cache, ids_BT.new_ones(len(ids_BT), n_read), keep=True)
        logits.append(out_BTV)
    return torch.cat(logits, 1), cache


def in_pieces(model: Any, draw: Draw, size: int) -> tuple[float, float]:
    ids_BT = draw(2, N)
    right, _ = forward(model, ids_BT)
    got, _ = read(model, [ids_BT[:, :PIECE], *ids_BT[:, PIECE:].split(size, 1)])
    forgetful, _ = forward(model, ids_BT[:, PIECE:])
    return gap(got, right), gap(forgetful, right[:, PIECE:])


def padded(model: Any, draw: Draw, side: str) -> tuple[float, float]:
    """The shorter of two rows, padded on one side: a prompt, then tokens that are decoded."""
    n, next_BN = 32, draw(2, 4)
    long, short, padding, valid = draw(1, N), draw(1, n), draw(1, N - n), torch.ones(1, n, dtype=torch.long)
    order = 1 if side == "right" else -1
    ids_BT = torch.cat([long, torch.cat([short, padding][::order], 1)])
    mask_BT = torch.cat([torch.ones_like(long), torch.cat([valid, 0 * padding][::order], 1)])
    where = slice(n) if side == "right" else slice(N - n, N)
    right, _ = forward(model, torch.cat([short, next_BN[1:]], 1))

    def got(mask: Tensor) -> Tensor:
        out_BTV, cache = forward(model, ids_BT, None, mask, keep=True)
        logits = [out_BTV[1:, where]]
        for token_B1 in next_BN.split(1, 1):
            mask = torch.cat([mask, mask[:, :1] * 0 + 1], 1)
            out_BTV, cache = forward(model, token_B1, cache, mask, keep=True)
            logits.append(out_BTV[1:])
        return torch.cat(logits, 1)

    return gap(got(mask_BT), right), gap(got(torch.ones_like(mask_BT)), right)


def batch(model: Any, draw: Draw) -> tuple[float, float]:
    ids_BT = draw(4, N)
    right = torch.cat([forward(model, row)[0] for row in ids_BT.split(1)])
    got, _ = forward(model, ids_BT)
    return gap(got, right), gap(got.roll(1, 0), right)


def packed(documents: list[Tensor], **how: bool) -> Row:
    """What transformers' own collator makes of documents."""
    made = DataCollatorWithFlattening(**how)([{"input_ids": ids_1T[0].tolist()} for ids_1T in documents])
    return {name: value for name, value in made.items() if name not in ("input_ids", "labels")}


def isolated(model: Any, draw: Draw, **how: bool) -> tuple[float, float]:
    """What a document's neighbour in the row changes in it."""
    one, other, last = draw(1, N), draw(1, N), draw(1, PIECE)

    def second(first: Tensor, **said: Any) -> Tensor:
        return forward(model, torch.cat([first, last], 1), **said)[0][:, N:]

    said = packed([one, last], **how)
    return gap(second(other, **said), second(one, **said)), gap(second(other), second(one))


def alone(model: Any, draw: Draw) -> tuple[float, float]:
    first, last = draw(1, N), draw(1, PIECE)
    ids_1T, right = torch.cat([first, last], 1), forward(model, last)[0]
    got, _ = forward(model, ids_1T, **packed([first, last]))
    return gap(got[:, N:], right), gap(forward(model, ids_1T)[0][:, N:], right)


def beams(model: Any, draw: Draw) -> tuple[float, float]:
    """The scores of four beams, with the cache and without."""
    def scores(ids_BT: Tensor, use_cache: bool) -> Tensor:
        found = model.generate(ids_BT, attention_mask=torch.ones_like(ids_BT), num_beams=4, num_return_sequences=4,
                               min_new_tokens=12, max_new_tokens=12, do_sample=False, use_cache=use_cache,
                               return_dict_in_generate=True, output_scores=True)
        return found.sequences_scores

    ids_BT = draw(2, PIECE)
    right = scores(ids_BT, False)
    return gap(scores(ids_BT, True), right), gap(scores(ids_BT.flip(1), False), right)


def rollback(model: Any, draw: Draw, by_copy: bool = False) -> tuple[float, float]:
    """Five tokens are read and taken back, by a deep copy or else `crop`; then others are read."""
    prompt, wrong, others = draw(1, N), draw(1, 5), draw(1, PIECE)
    right, _ = read(model, [prompt, others])
    kept, _ = read(model, [prompt, wrong, others])
    _, cache = read(model, [prompt])
    if by_copy:
        cache, other = copy.deepcopy(cache), cache
        read(model, [wrong], other, N)
    elif getattr(cache, "is_croppable", True) is False:
        raise NoAnswerError(REFUSED, "cache.is_croppable is False")
    else:
        if hasattr(cache, "activate_past_recording"):
            cache.activate_past_recording()
        _, cache = read(model, [wrong], cache, N)
        cache.crop(-5)
    got, _ = read(model, [others], cache, N)
    return gap(got, right[:, N:]), gap(kept[:, -PIECE:], right[:, N:])


def saved(model: Any, draw: Draw) -> tuple[float, float]:
    """A deep copy of the cache, and what is read from a file that it was written to."""
    prompt, other, wrong, question = draw(1, N), draw(1, N), draw(1, 5), draw(1, PIECE)
    right, _ = read(model, [prompt, question])
    (_, cache), (_, others), file = read(model, [prompt]), read(model, [other]), io.BytesIO()
    torch.save(cache, file)
    copies = copy.deepcopy(cache), torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    read(model, [wrong], cache, N)  # must not change the copies
    forgetful, _ = read(model, [question], others, N)
    differences = [gap(read(model, [question], each, N)[0], right[:, N:]) for each in copies]
    return max(differences), gap(forgetful, right[:, N:])


def export(model: Any, draw: Draw) -> tuple[float, float]:
    """A graph of a row of 19 tokens is given 45."""
    model = copy.deepcopy(model)
    model.config.use_cache = False
    free = {"input_ids": {1: torch.export.Dim.AUTO}}
    with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):  # where it fails, pages of its graph
        graph = torch.export.export(model, (), {"input_ids": draw(1, PIECE)}, dynamic_shapes=free, strict=False)
    ids_1T = draw(1, N)
    right, _ = forward(model, ids_1T)
    run = graph.module()
    return gap(run(input_ids=ids_1T).logits, right), gap(run(input_ids=ids_1T.flip(1)).logits, right)


def causal(model: Any, draw: Draw) -> tuple[float, float]:
    """What later tokens change in a token."""
    ids_BT = draw(2, N)
    right, _ = forward(model, ids_BT)
    got, _ = forward(model, torch.cat([ids_BT[:, :PIECE], draw(2, N - PIECE)], 1))
    return gap(got[:, :PIECE], right[:, :PIECE]), gap(got[:, PIECE:], right[:, PIECE:])


def splits(model: Any, draw: Draw) -> tuple[float, float]:
    """A row in two pieces, cut at every place, which is longer than many windows."""
    n = 2 * N
    ids_BT = draw(2, n)
    right, _ = forward(model, ids_BT)
    got = torch.stack([read(model, ids_BT.split([first, n - first], 1))[0] for first in range(1, n)])
    forgetful, _ = forward(model, ids_BT[:, PIECE:])
    return gap(got, right), gap(forgetful, right[:, PIECE:])


def in_documents(model: Any, draw: Draw) -> tuple[float, float]:
    """`splits` of rows in which the token 0 begins documents."""
    return splits(model, lambda *shape: draw(*shape).masked_fill(torch.arange(shape[1]) % 70 == 10, 0))


def with_fields(model: Any, draw: Draw, law: Law, **fields: Any) -> tuple[float, float]:
    """A law of a model with the same weights, and with other fields."""
    config = copy.deepcopy(model.config)
    config.update(fields)
    other = type(model)(config).eval().double()
    other.load_state_dict(model.state_dict())
    return law(other, draw)


LAWS: dict[str, Law] = {
    "decode": partial(in_pieces, size=1), "pieces": partial(in_pieces, size=PIECE),
    "left-padding": partial(padded, side="left"), "right-padding": partial(padded, side="right"), "batch": batch,
    "packed": isolated, "packed-lengths": partial(isolated, return_flash_attn_kwargs=True, return_seq_idx=True),
    "packed-alone": alone, "beams": beams, "rollback": rollback, "saved": saved, "export": export}
OF_LAYERS: dict[str, Law] = LAWS | {
    "rollback": partial(rollback, by_copy=True), "export": partial(with_fields, law=export, document_grid="row"),
    "packed-in-row": partial(with_fields, law=isolated, document_grid="row"), "causal": causal, "splits": splits,
    "documents": partial(with_fields, law=in_documents, end_of_document=0)}
"""What a layer MODULE:CLASS is asked, behind a GAU; chunks begin with documents or the row."""


def tiny_model(name: str, settings: dict[str, Any]) -> Any:
    """Raises UsageError for an unknown name or setting."""
    logging.set_verbosity_error()  # no warnings that kernels are not installed
    of_layer = {"preset": "flash", "layers": ["gau", name], "document_grid": "own"} if ":" in name else {}
    fields = of_layer | CLASSES.get(name, {}) | settings
    preset = fields.pop("preset", name)
    torch.manual_seed(0)
    if preset in PRESETS:
        own = {name: size for name, size in SIZES["ours"].items() if getattr(model_config(preset), name) is not None
               and not (name == "n_layers" and fields.get("layers"))}
        config = LineartimeConfig(**dataclasses.asdict(model_config(preset, **own | fields)))
        config.pad_token_id = config.eos_token_id = None
    else:
        require_name("class", name, [*CLASSES, *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES])
        kind = CONFIG_MAPPING[name]
        known = {each.name for each in dataclasses.fields(kind)} | {*kind.attribute_map}
        require(fields.keys() <= known, "not a field of its configuration", ", ".join(sorted(fields.keys() - known)))
        with raised_as(UsageError, "wrong settings", name, Exception):
            config = kind(**{field: size for field, size in SIZES["tiny"].items() if field in known} | fields)
    try:
        model = AutoModelForCausalLM.from_config(config, experts_implementation="batched_mm").eval().double()
    except Exception as e:
        raise UsageError("no tiny model of this class", name, f"{one_line(e)}; give it sizes with --set") from None
    enlarge(model)
    model.generation_config.eos_token_id = None
    return model


@torch.no_grad()
def enlarge(model: Any) -> None:
    """Matrices and convolutions so large that what they give is no smaller than what they get."""
    for weight in model.parameters():
        spread, aim = float(weight.std()) if weight.dim() > 1 else 0.0, 1.5 / weight.shape[-1] ** 0.5
        if 0 < spread < aim:
            weight *= aim / spread


def one_line(e: Exception) -> str:
    return f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"


@torch.no_grad()
def ask(model: Any, law: Law) -> Row:
    draw = partial(torch.randint, 3, SIZES["tiny"]["vocab_size"], generator=torch.Generator().manual_seed(1))
    try:
        difference, without = law(model, lambda *shape: draw(shape))
    except NoAnswerError as e:
        return dict(zip(("result", "words"), e.args, strict=True))
    except Exception as e:  # whatever a class says of what it does not do
        return {"result": REFUSED, "words": one_line(e)}
    if without < MATTERS:
        return {"result": UNTRIED, "words": f"it would not matter: {without:.1g}", "difference": difference}
    return {"result": HOLDS if difference <= LIMIT else BROKEN, "difference": difference, "without": without}


def measure(name: str, laws: tuple[str, ...], settings: dict[str, Any]) -> Row:
    """A row of a class. Raises UsageError as `tiny_model`, and for an unknown law."""
    known = OF_LAYERS if ":" in name else LAWS
    for law in laws:
        require_name("law", law, known)
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = tiny_model(name, settings)
        found = {law: ask(model, known[law]) for law in laws or known}
    return {"benchmark": "laws", "class": name, "architecture": type(model).__name__, "settings": settings,
            "laws": found, "limit": LIMIT, "dtype": "float64", "device": "cpu", "threads": 1,
            "transformers": installed_version("transformers"), **provenance()}


def lines(row: Row) -> Iterator[str]:
    """A line for each law, with the command that repeats one that is broken."""
    for law, found in row["laws"].items():
        said = found.get("words") or f"{found['difference']:.1e} (without {found['without']:.1g})"
        again = f"   python -m benchmarks laws {row['class']} --law {law}" if found["result"] == BROKEN else ""
        yield f"{row['class']:<18} {law:<15} {found['result']:<9} {said}{again}"


def table(rows: Sequence[Row]) -> str:
    """Markdown: of every class and law the newest result, ours first."""
    newest = {(row["class"], law): found for row in rows for law, found in row["laws"].items()}
    measured = unique(row["class"] for row in rows)
    names = [name for name in unique([*CLASSES, *measured]) if name in measured]
    made = ["|class|" + "|".join(LAWS) + "|", "|---|" + "---|" * len(LAWS)]
    made += ["|".join(["", f"`{name}`", *(cell(newest.get((name, law))) for law in LAWS), ""]) for name in names]
    versions = listed(row["transformers"] for row in rows)
    return "\n".join([*made, "", f"<sub>transformers {versions}; {source_line(rows).removeprefix('<sub>')}"])


def cell(found: Row | None) -> str:
    if found is None or found["result"] == UNTRIED:
        return "-"
    if found["result"] == BROKEN:
        return f"**{found['difference']:.2g}**" if "difference" in found else "**shape**"
    return "✓" if found["result"] == HOLDS else found["result"]
