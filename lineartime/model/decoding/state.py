"""The decoding state of a model: its layers' caches, and where each row is. Its file has hashes of
the model and of all that is in it: a state of another model and a damaged file are refused."""

import copy
import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from lineartime.base.errors import CheckpointError, raised_as
from lineartime.base.files import open_regular, replaced
from lineartime.base.settings import require
from lineartime.base.tensor_bytes import tensors_sha256
from lineartime.config import ModelConfig, to_dict
from lineartime.model.decoding.cache import Cache
from lineartime.model.decoding.inputs import DecodeInputs
from lineartime.model.layout import in_order, padding_last

Read = Callable[[Tensor, DecodeInputs], list[Tensor]]
"""What is computed of the next tokens' vectors: `[B, N, ...]` each."""


@dataclasses.dataclass
class DecodingState:
    """A cache for each layer that attends, and `seq_lens_B` and `start_B` of `DecodeInputs`."""

    caches: list[Cache]
    seq_lens_B: Tensor
    start_B: Tensor
    model: Any = dataclasses.field(default=None, repr=False, compare=False)
    """The `LanguageModel` or layer whose state this is, which `deepcopy` shares."""
    text: str = ""  # the last word that `read` has read: it is tokenised together with what follows it
    tokenizer_sha256: str = ""
    seen: Any = dataclasses.field(default=None, repr=False, compare=False)  # what C has made of it
    document_B: Tensor | None = None  # of a layer alone: the segment id of each row's last token, 0 without one

    @classmethod
    def of_rows(cls, n_rows: int, device: torch.device, caches: list[Cache], model: Any) -> "DecodingState":
        """The state of rows that have no token yet."""
        zeros_B = torch.zeros(n_rows, dtype=torch.long, device=device)
        return cls(caches, zeros_B, zeros_B.clone(), model)

    def __deepcopy__(self, memo: dict[int, Any]) -> "DecodingState":
        return self.repeated(len(self.seq_lens_B))

    def save(self, path: Path | str, facts: Mapping[str, Any] | None = None, of_model: str = "") -> str:
        """Replace a file by this state; returns its model's hash. facts: more to save, as JSON.
        of_model: the hash, if known. Raises ResourceError, or UsageError without the model."""
        require(self.model is not None, "the state does not know its model", path, "say state.model = model")
        tensors = self.tensors()
        of_model = of_model or model_sha256(self.model)
        content = json.dumps([of_model, self.text, self.tokenizer_sha256, facts or {}])
        # One entry: safetensors writes several in any order, and the same state has the same bytes.
        metadata = {"state": json.dumps([content_sha256(tensors, content), content])}
        with replaced(Path(path)) as file:
            file.write(safetensors.torch.save(tensors, metadata))
        return of_model

    @classmethod
    def load(cls, path: Path | str, model: Any) -> "DecodingState":
        """The state in a file, on the model's device. Raises as `load_state` does."""
        return load_state(Path(path), model)[0]

    def to(self, device: torch.device | str) -> "DecodingState":
        """The state itself, with all its tensors on a device."""
        for part in (self, *self.caches):
            for name, value in vars(part).items():
                if isinstance(value, Tensor):
                    setattr(part, name, value.to(device))
        return self

    def check(self, reader: nn.Module, n_rows: int) -> None:
        """Raise UsageError unless this is the state of `n_rows` rows of this model or layer."""
        n_own = self.seq_lens_B.shape[0]  # `len` would fix it in a graph
        require(n_own == n_rows, "the state is of another batch", f"{n_own} rows, the input has {n_rows}",
                "its `select` keeps and repeats rows")
        require(self.model in (None, reader), "the state of another model or layer", type(self.model).__name__,
                "give it to the one that made it")

    def begins(self, segment_ids_BN: Tensor) -> Tensor:
        """True for the next tokens that begin a document, by their ids and that of the token before
        them; -1 is for padding behind them. Keeps the last ids."""
        assert self.document_B is not None
        before_BN = torch.cat([self.document_B[:, None], segment_ids_BN[:, :-1]], dim=1)
        last_B = segment_ids_BN.gather(1, ((segment_ids_BN >= 0).sum(1, keepdim=True) - 1).clamp(min=0))[:, 0]
        self.document_B = torch.where(last_B >= 0, last_B, self.document_B)
        return (segment_ids_BN != before_BN) & (segment_ids_BN >= 0)

    def read(self, config: ModelConfig, read: Read, x_BND: Tensor, begins_BN: Tensor, n_new_B: Tensor) -> list[Tensor]:
        """What `read` gives of the rows' next tokens; the positions move on. With `document_grid`
        "own" the new tokens of the rows' first documents, then those of the second, and so on."""
        if config.document_grid == "row" or x_BND.shape[1] == 1:
            return self.read_rows(config, read, x_BND, begins_BN, n_new_B)
        index_N = torch.arange(begins_BN.shape[1], device=begins_BN.device)
        number_BN = torch.where(index_N < n_new_B[:, None], begins_BN.cumsum(1) - begins_BN[:, :1].int(), -1)
        outputs: list[Tensor] = []
        for number in range(max(int(number_BN.max()), 0) + 1):
            here_BN = number_BN == number
            n_B = here_BN.sum(1)
            order_BN = padding_last(here_BN)[:, : max(int(n_B.max()), 1)]  # their tokens at the front of each row
            made = self.read_rows(config, read, in_order(x_BND, order_BN), in_order(begins_BN, order_BN), n_B)
            outputs = outputs or [torch.zeros_like(x_BND, dtype=each.dtype) for each in made]
            for whole_BND, each_BMD in zip(outputs, made, strict=True):
                whole_BND[here_BN] = each_BMD[index_N[: each_BMD.shape[1]] < n_B[:, None]]
        return outputs

    def read_rows(self, config: ModelConfig, read: Read, x_BND: Tensor, begins_BN: Tensor,
                  n_new_B: Tensor) -> list[Tensor]:
        """`read` by tokens that `inputs` takes at once."""
        if self.seq_lens_B.is_inference() and not torch.is_inference_mode_enabled():
            self.select(torch.arange(len(n_new_B)))  # copies: what that mode has made can be written only in it
        # A graph reads no lengths. Elsewhere positions follow from what each row has read.
        window = (self.reserve_in_graph(begins_BN.shape[1]) or 0) if torch.compiler.is_exporting() else None
        inputs = self.inputs(config, n_new_B, begins_BN, window)
        made = read(x_BND, inputs)
        self.seq_lens_B, self.start_B = self.seq_lens_B + n_new_B, self.starts_B(inputs)
        return made

    def in_grid_B(self, config: ModelConfig) -> Tensor:
        """Tokens of each row so far; with `document_grid` "own" of its current document."""
        return self.seq_lens_B - self.start_B if config.document_grid == "own" else self.seq_lens_B

    def inputs(self, config: ModelConfig, n_new_B: Tensor, begins_BN: Tensor,
               window: int | None = None) -> DecodeInputs:
        """With `document_grid` "own" each document counts as a row of its own, so only the first of
        the tokens may begin one."""
        if config.document_grid == "row":
            return DecodeInputs(self.seq_lens_B, self.start_B, n_new_B, begins_BN, window)
        before_B = torch.where(begins_BN[:, 0] & (n_new_B > 0), 0, self.in_grid_B(config))
        return DecodeInputs(before_B, torch.zeros_like(before_B), n_new_B, begins_BN, window)

    def starts_B(self, inputs: DecodeInputs) -> Tensor:
        """`start_B` after the tokens of `inputs`."""
        return inputs.start_BN.amax(1) + self.seq_lens_B - inputs.seq_lens_B

    @property
    def n_bytes(self) -> int:
        """Bytes of the rows' state, with room for more tokens; constant for FLASH."""
        return sum(tensor.nbytes for cache in self.caches for tensor in cache.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """All tensors with state by name, those of cache 3 as "3.kv_BSE"."""
        longest = int(self.seq_lens_B.max()) if len(self.seq_lens_B) else 0  # a cache that grows has room for more
        of_caches = {f"{n}.{name}": (tensor[:, :longest] if name in cache.growing else tensor).contiguous()
                     for n, cache in enumerate(self.caches) for name, tensor in cache.tensors().items()}
        documents = {} if self.document_B is None else {"document_B": self.document_B}
        return {"seq_lens_B": self.seq_lens_B, "start_B": self.start_B, **documents, **of_caches}

    def reserve(self, n_tokens: int) -> None:
        """Allocate room for the keys and values of rows of `n_tokens` tokens."""
        for cache in self.caches:
            cache.reserve(n_tokens)

    def reserve_in_graph(self, n_new: int) -> int | None:
        """Make all key-value caches `n_new` tokens longer. Returns their length, which is to be
        `DecodeInputs.window`, or None without such caches. Nothing is read from the device."""
        lengths = [getattr(cache, name).shape[1] for cache in self.caches for name in cache.growing]
        if not lengths:
            return None
        self.reserve(lengths[0] + n_new)
        return lengths[0] + n_new

    def repeated(self, n_rows: int) -> "DecodingState":
        """A copy with `n_rows` rows, of one row or as many, else UsageError."""
        n_own = len(self.seq_lens_B)
        require(n_own in (1, n_rows), "the state is of another batch", f"{n_own} rows, the input has {n_rows}")
        made = dataclasses.replace(self, caches=[copy.copy(cache) for cache in self.caches], seen=None)
        made.select(torch.arange(n_rows).clamp(max=n_own - 1))
        return made

    def select(self, rows_B: Tensor | Sequence[int]) -> None:
        """Keep the rows rows_B, in this order, in place; a row may occur more than once."""
        rows_B = torch.as_tensor(rows_B, device=self.seq_lens_B.device)
        for cache in self.caches:
            cache.select(rows_B)
        for name in ("seq_lens_B", "start_B", "document_B"):
            of_rows_B = getattr(self, name)
            setattr(self, name, None if of_rows_B is None else of_rows_B.index_select(0, rows_B))


def load_state(path: Path, model: Any, names: Collection[str] = ()) -> tuple[DecodingState, dict[str, Any]]:
    """A state of `model` that was saved, and the facts beside it, of these names or fewer. Raises
    CheckpointError for a damaged file, and for one of another model, command or version."""
    with (raised_as(CheckpointError, "cannot read the state", path, OSError),
          raised_as(CheckpointError, "no decoding state, or damaged", path, ValueError, LookupError, TypeError,
                    safetensors.SafetensorError)):
        open_regular(path).close()
        with safetensors.safe_open(path, "pt") as file:
            sha256, content = json.loads(file.metadata()["state"])
            # Copies: views of the file lie at any byte, and matmuls of them round otherwise.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
        if sha256 != content_sha256(tensors, content):
            raise ValueError("its hash is not that of its content")
        of_model, text, tokenizer_sha256, facts = json.loads(content)
    if not {*facts} <= {*names} or bool(facts) != bool(names):
        raise CheckpointError("the state of another command", path, "generate takes that of read, score its own")
    if of_model != model_sha256(model):
        raise CheckpointError("the state of another model or precision", path, "name the model that has read it")
    state = model.decoding_state(len(tensors["seq_lens_B"]))
    if tensors.keys() != state.tensors().keys():
        raise CheckpointError("the state of another version", path, "read the text again")
    for name, tensor in tensors.items():
        n, _, field = name.rpartition(".")
        setattr(state.caches[int(n)] if n else state, field, tensor.to(state.seq_lens_B.device))
    state.text, state.tokenizer_sha256 = text, tokenizer_sha256
    return state, facts


def model_sha256(model: Any) -> str:
    """The hash of the weights as they are, in their precision, and of the configuration."""
    return tensors_sha256(model.state_dict(), json.dumps(to_dict(model.config)))


def content_sha256(tensors: Mapping[str, Tensor], text: str) -> str:
    """The hash of tensors with their names, types and shapes, and of a text."""
    named = dict(sorted(tensors.items()))
    return tensors_sha256(named, text + str([(name, x.dtype, [*x.shape]) for name, x in named.items()]))
