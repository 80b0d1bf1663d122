"""llama.cpp beside ours: its library, called by ctypes, and a Llama with random weights that has as
many parameters as a model of ours, in a file that the package gguf writes. Nothing here downloads
anything: `GET` says how the library is had, in out/llama or the folder `LLAMA_CPP`."""

import ctypes
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import ROOT, Row
from benchmarks.measure import release_memory
from benchmarks.provenance import installed_version
from lineartime.base.settings import require
from lineartime.config import ModelConfig
from lineartime.model.language_model import number_of_parameters

NAME, QUANTIZED = "llama.cpp", "q8_0"
TYPES = {"float32": "F32", "bfloat16": "BF16", QUANTIZED: "Q8_0"}
"""Types of matrices, and their names in gguf. In q8_0 32 integers of 8 bits share a factor."""
GET = "npm install --ignore-scripts --prefix out/llama @node-llama-cpp/linux-x64@3.22.1 (or LLAMA_CPP=FOLDER)"
READ_AT_ONCE = 256  # tokens of the state that a filled one repeats
N_CTX, N_BATCH, N_SEQ_MAX = 0, 1, 3  # places among the first numbers of llama_context_params
DEFAULTS = {N_CTX: 512, N_BATCH: 2048, 2: 512, N_SEQ_MAX: 1, 7: 4, 8: 4, 10: -1, 11: -1, 12: -1, 13: -1}
"""What the version that this file knows has in these places."""
AT, INT, SIZE = ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t
SILENT = ctypes.CFUNCTYPE(None, INT, ctypes.c_char_p, AT)(lambda *_: None)  # what llama.cpp logs is no result


class Params(ctypes.Structure):
    """llama_context_params or llama_model_params, and room behind."""

    _fields_ = (("numbers", ctypes.c_int32 * 64),)


class Batch(ctypes.Structure):
    """llama_batch: pointers to a number for each token, the fifth to a list of its rows."""

    _fields_ = (("n_tokens", ctypes.c_int32), ("token", AT), ("embd", AT), ("pos", AT), ("n_seq_id", AT),
                ("seq_id", AT), ("logits", AT))


FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "context_default_params": (Params,), "model_default_params": (Params,), "version": (ctypes.c_char_p,),
    "model_load_from_file": (AT, ctypes.c_char_p, Params), "init_from_model": (AT, AT, Params),
    "set_n_threads": (None, AT, INT, INT), "batch_get_one": (Batch, AT, INT), "decode": (INT, AT, Batch),
    "get_logits": (AT, AT), "get_memory": (AT, AT), "memory_clear": (None, AT, ctypes.c_bool),
    "state_seq_get_size": (SIZE, AT, INT), "state_seq_get_data": (SIZE, AT, AT, SIZE, INT),
    "state_seq_set_data": (SIZE, AT, AT, SIZE, INT)}
"""What a function gives, and what it takes."""


@cache
def library() -> Any:
    """llama.cpp with its kernels for this processor. Raises UsageError."""
    folder = Path(os.environ.get("LLAMA_CPP") or ROOT / "out" / "llama")
    paths = [*folder.glob("**/libllama.*so*"), *folder.glob("**/libggml.*so*")]
    require(len(paths) == 2, "llama.cpp is not there, or there twice", folder, GET)
    require(installed_version("gguf") is not None, "the package gguf is not there", NAME, "pip install 'gguf>=0.19'")
    llama, ggml = (ctypes.CDLL(str(path)) for path in paths)
    llama.llama_log_set(SILENT, None)
    ggml.ggml_backend_load_all_from_path(str(paths[1].parent).encode())
    for name, (result, *arguments) in FUNCTIONS.items():
        function = getattr(llama, f"llama_{name}")
        function.restype, function.argtypes = result, arguments
    numbers = llama.llama_context_default_params().numbers
    require({place: numbers[place] for place in DEFAULTS} == DEFAULTS, "another version of llama.cpp", folder, GET)
    return llama


def sizes_of(config: ModelConfig) -> dict[str, int]:
    """Sizes of the Llama, whose hidden layers are as wide as its number of parameters asks for."""
    d, n_layers = config.d_model, config.n_layers
    left = number_of_parameters(config) - config.vocab_size * d - d - n_layers * (4 * d * d + 2 * d)
    return {"vocab_size": config.vocab_size, "embedding_length": d, "block_count": n_layers,
            "feed_forward_length": 32 * max(round(left / (96 * d * n_layers)), 1), "attention.head_count": d // 64,
            "attention.head_count_kv": d // 64, "rope.dimension_count": 64, "context_length": 2**20}


def shapes_of(sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama. Its head is its embedding."""
    d, f = sizes["embedding_length"], sizes["feed_forward_length"]
    layer = {"attn_norm": (d,), **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (d, d)),
             "ffn_norm": (d,), "ffn_gate": (f, d), "ffn_up": (f, d), "ffn_down": (d, f)}
    return {"token_embd.weight": (sizes["vocab_size"], d), "output_norm.weight": (d,)} | {
        f"blk.{i}.{name}.weight": shape for i in range(sizes["block_count"]) for name, shape in layer.items()}


def write_model(path: str, sizes: dict[str, int], dtype: str) -> None:
    """A Llama with random weights as a file of llama.cpp."""
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    file, generator = GGUFWriter(path, "llama"), np.random.default_rng(0)
    file.add_tokenizer_model("none")
    file.add_layer_norm_rms_eps(1e-5)
    for name, number in sizes.items():
        file.add_uint32(f"llama.{name}", number)
    for name, shape in shapes_of(sizes).items():
        is_matrix = len(shape) == 2
        kind = GGMLQuantizationType[TYPES[dtype if is_matrix else "float32"]]
        x = generator.normal(0, 0.05, shape).astype(np.float32) if is_matrix else np.ones(shape, np.float32)
        file.add_tensor(name, quants.quantize(x, kind), raw_dtype=kind)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def loaded(config: ModelConfig, dtype: str, room: int, n_rows: int = 1) -> tuple[int, Row]:
    """A context of llama.cpp with room for so many tokens in each row, in its own default settings,
    with PyTorch's number of threads; and what its row says."""
    llama, sizes = library(), sizes_of(config)
    with tempfile.NamedTemporaryFile(prefix="lineartime-") as file:
        write_model(file.name, sizes, dtype)
        release_memory(torch.device("cpu"))  # what Python had to write it is no memory of llama.cpp
        model = llama.llama_model_load_from_file(file.name.encode(), llama.llama_model_default_params())
    params = llama.llama_context_default_params()
    params.numbers[N_CTX], params.numbers[N_SEQ_MAX] = room * n_rows, n_rows
    context = llama.llama_init_from_model(model, params)
    require(bool(context), "llama.cpp gives no context", f"{room:,} tokens in {n_rows} rows")
    llama.llama_set_n_threads(context, *[torch.get_num_threads()] * 2)
    return context, {"n_parameters": sum(int(np.prod(shape)) for shape in shapes_of(sizes).values()),
                     "peer": {"package": NAME, "version": llama.llama_version().decode(), "cache": "float16", **sizes}}


def read(context: int, n_tokens: int) -> None:
    """Read random tokens in the first row, which is forgotten before, to the logits of the last."""
    llama, ids_T = library(), np.random.default_rng(0).integers(3, 256, n_tokens).astype(np.int32)
    llama.llama_memory_clear(llama.llama_get_memory(context), False)
    for part in np.split(ids_T, range(DEFAULTS[N_BATCH], n_tokens, DEFAULTS[N_BATCH])):
        failed = llama.llama_decode(context, llama.llama_batch_get_one(part.ctypes.data, len(part)))
        require(not failed, "llama.cpp does not read", f"{n_tokens:,} tokens")
    llama.llama_get_logits(context)  # waits for them


def fill(context: int, n_tokens: int, n_rows: int) -> int:
    """Let every row have read `n_tokens` tokens, which would take minutes: the keys and values of a
    few that are read are repeated. Returns the bytes of the state."""
    llama, m = library(), min(READ_AT_ONCE, n_tokens)
    read(context, m)
    state = np.empty(llama.llama_state_seq_get_size(context, 0), np.uint8)
    llama.llama_state_seq_get_data(context, state.ctypes.data, state.size, 0)
    # 16 bytes, of which the last four are the number of tokens; 12 for each token, which begin with
    # its position; 8; of each layer's keys and values 12 bytes and a row for each token; at the end
    # 4 for each other row.
    head, cells, between, rest, end = np.split(state, [16, 16 + 12 * m, 24 + 12 * m, state.size - 4 * (n_rows - 1)])
    head.view(np.int32)[3], cells = n_tokens, np.resize(cells, 12 * n_tokens)
    cells.view(np.int32)[::3] = np.arange(n_tokens)
    layers = rest.reshape(2 * between.view(np.int32)[1], -1)
    long = np.concatenate([head, cells, between, *(part for layer in layers for part in (
        layer[:12], np.resize(layer[12:], (layer.size - 12) // m * n_tokens))), end])
    llama.llama_memory_clear(llama.llama_get_memory(context), True)
    for row in range(n_rows):
        taken = llama.llama_state_seq_set_data(context, long.ctypes.data, long.size, row)
        require(taken == long.size, "llama.cpp does not take the state", f"{n_tokens:,} tokens in row {row}", GET)
    return long.size * n_rows


def steps(config: ModelConfig, dtype: str, n_tokens: int, n_rows: int,
          n_new: int) -> tuple[Callable[[Tensor], Tensor], Row]:
    """The step after so many tokens, with room for `n_new`, and what its row says."""
    context, facts = loaded(config, dtype, n_tokens + n_new, n_rows)
    # A row takes one token of its own, whose logits are wanted: the numbers that a batch points to.
    llama, numbers = library(), np.empty((4, n_rows), np.int32)
    numbers[0], numbers[1], numbers[2], numbers[3] = 0, n_tokens, 1, np.arange(n_rows)
    token, pos, one, row = (each.ctypes.data for each in numbers)
    rows, wanted = row + 4 * np.arange(n_rows, dtype=np.uint64), np.ones(n_rows, np.int8)
    batch = Batch(n_rows, token, None, pos, one, rows.ctypes.data, wanted.ctypes.data)

    def step(ids_B: Tensor, kept: object = (rows, wanted)) -> Tensor:
        numbers[0] = ids_B
        require(not llama.llama_decode(context, batch), "llama.cpp does not decode", f"position {numbers[1, 0]:,}")
        numbers[1] += 1
        logits = ctypes.cast(llama.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
        return torch.from_numpy(np.ctypeslib.as_array(logits, (n_rows, config.vocab_size)))

    return step, facts | {"state_bytes": fill(context, n_tokens, n_rows)}
