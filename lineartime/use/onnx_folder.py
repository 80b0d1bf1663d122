"""A folder that runtimes without PyTorch open: onnxruntime-genai, transformers.js and
onnxruntime-web."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
import torch.nn.functional as F
from onnx import ModelProto

from lineartime.base.files import new_folder, system_errors
from lineartime.base.stores import Name, check_new_folder, is_address, uploaded
from lineartime.data.tokenizer import PAD, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, Tokenizer
from lineartime.folders import CONFIG_FILE
from lineartime.model.language_model import LanguageModel, token_losses
from lineartime.training.evaluation import split_of_tokenizer
from lineartime.weights.checkpoint import write_file
from lineartime.weights.load import load_model
from lineartime.weights.onnx_graph import make_graph
from lineartime.weights.transformers_files import LONGEST, tokenizer_files

GRAPH_FILE = "model.onnx"
README = Path(__file__).with_name("onnx_readme.md")
N_SCORED = 8192  # tokens of which the loss is compared
MOST = 8192  # tokens to which onnxruntime-genai writes unless it is told otherwise


def export_onnx(run: Path, out: Name, *, data: Name | None, int8: bool) -> tuple[int, str]:
    """Write a run's model, or any that `load_model` opens, to the new folder `out`, which may be in
    a store. Returns the bytes of the graph, and its loss in words.

    data: prepared text; the README then has the loss on its validation split, of the graph and of
    the float32 weights. Raises UsageError if `out` exists, and as `make_graph` and `load_model`."""
    check_new_folder(out)
    model, tokenizer, facts = load_model(run)
    stream, words = None if data is None else split_of_tokenizer(data, "validation", tokenizer, facts), ""
    graph = make_graph(model, int8)
    if stream is not None:
        n_scored = min(len(stream) - 1, model.config.max_len or N_SCORED, N_SCORED)
        ids_1T = torch.from_numpy(stream.read(0, n_scored + 1))[None]
        with torch.no_grad():
            whole = token_losses(model, ids_1T).mean()
        words = (f"Loss on {ids_1T.shape[1] - 1:,} held-out tokens: {loss_of(graph, ids_1T):.4f} nats per token; "
                 f"{whole:.4f} in PyTorch with float32.")
    return write_onnx_folder(out, model, tokenizer, graph, words), words


def loss_of(graph: ModelProto, ids_1T: torch.Tensor) -> float:
    """The mean of -ln p of all tokens but the first, by onnxruntime."""
    session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    state = {each.name: np.zeros([1, *each.shape[1:]], np.float32) for each in session.get_inputs()[1:]}
    logits_1NV, = session.run(["logits"], {"input_ids": ids_1T[:, :-1].numpy(), **state})
    return F.cross_entropy(torch.from_numpy(logits_1NV[0]), ids_1T[0, 1:]).item()


def write_onnx_folder(out: Name, model: LanguageModel, tokenizer: Tokenizer, graph: ModelProto, words: str) -> int:
    """Write the graph of a model, and beside it what each runtime reads. words: for the README.
    `out` is there when all of it is. Returns the bytes of the graph."""
    config, kinds = model.config, ("conv", "recurrent")
    sizes = {"hidden_size": config.d_model, "num_hidden_layers": config.n_layers}
    ids: dict[str, Any] = {"bos_token_id": tokenizer.end_of_document, "pad_token_id": config.vocab_size,
           "eos_token_id": sorted(model.end_tokens) or [config.vocab_size], "vocab_size": config.vocab_size}
    decoder = {"filename": GRAPH_FILE, "head_size": config.query_key_dim, "num_attention_heads": 1,
               "num_key_value_heads": 1, **sizes,
               "inputs": {"input_ids": "input_ids", **{f"past_{kind}_names": f"past_{kind}.%d" for kind in kinds}},
               "outputs": {"logits": "logits", **{f"present_{kind}_names": f"present_{kind}.%d" for kind in kinds}}}
    of_genai = {"model": {"type": "decoder", "context_length": config.max_len or LONGEST, "decoder": decoder, **ids},
                "search": {"max_length": min(config.max_len or MOST, MOST)}}
    # transformers.js opens the types that it knows: this one's layers have states of these names.
    of_js = {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], **sizes, **ids,
             "layer_types": ["linear_attention"] * config.n_layers}
    texts = tokenizer_files(tokenizer)
    settings: dict[str, Any] = json.loads(texts[TOKENIZER_CONFIG_FILE]) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    if settings.setdefault("pad_token", PAD) != settings["eos_token"]:  # is in no tokenizer.json of ours
        content = json.loads(texts[TOKENIZER_FILE])
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        pad = {"id": config.vocab_size, "content": settings["pad_token"], "special": True}
        content["added_tokens"].append(pad | flags)
        texts[TOKENIZER_FILE] = json.dumps(content, ensure_ascii=False)
    readme = README.read_text(encoding="utf-8")
    for word, value in {"NAME": Path(str(out)).name, "BEGIN": ids["bos_token_id"], "PAD": config.vocab_size,
                        "WORDS": words}.items():
        readme = readme.replace(f"{{{word}}}", f"{value}")
    texts |= {TOKENIZER_CONFIG_FILE: json.dumps(settings, indent=1), CONFIG_FILE: json.dumps(of_js, indent=1),
              "genai_config.json": json.dumps(of_genai, indent=1), "README.md": readme}
    with system_errors(out), (uploaded(out) if is_address(out) else new_folder(Path(out))) as aside:
        for name, text in texts.items():
            write_file(aside / name, text.encode())
        return int(write_file(aside / GRAPH_FILE, graph.SerializeToString())["bytes"])
