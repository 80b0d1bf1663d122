"""A folder of `lineartime export --to onnx` in runtimes that know no PyTorch (make ecosystem)."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import lineartime
from lineartime.base.errors import UsageError
from lineartime.config import FLASH
from lineartime.model.language_model import token_losses

pytestmark = pytest.mark.ecosystem
PLUS = {"key_conv": 3, "linear_gate": True, "chunk_pooling": "written", "document_grid": "own"}
KINDS = [{}, {"chunk_pooling": "sum", "norm": "scale_norm", "abs_pos": "learned", "document_grid": "own"},
         PLUS | {"linear_rope": False, "local_key_conv": True},
         PLUS | {"document_grid": "row", "key_conv": 12, "rotary_dim": 6, "tied_head": False},
         {"linear_gate": True, "bias": False, "position_bias": False, "end_of_document": None}]
WEB = """import * as ort from 'onnxruntime-web'; import fs from 'fs'; ort.env.wasm.numThreads = 1;
const graph = await ort.InferenceSession.create(new Uint8Array(fs.readFileSync('small-onnx/model.onnx')));
const state = {}, got = []; let next = PROMPT;
for (const { name, shape: [_, ...dims] } of graph.inputMetadata.slice(1))
  state[name] = new ort.Tensor('float32', new Float32Array(dims.reduce((a, b) => a * b)), [1, ...dims]);
for (; got.length < 150; got.push(...next)) {
  const ids = new ort.Tensor('int64', BigInt64Array.from(next.map(BigInt)), [1, next.length]);
  const out = await graph.run({ input_ids: ids, ...state }), last = out.logits.data.subarray(-8192);
  for (const name in state) state[name] = out[name.replace('past', 'present')];
  next = [last.indexOf(last.reduce((a, b) => Math.max(a, b)))]; }
console.log(JSON.stringify(got));"""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The folder; prompts of unequal lengths, one of two documents; PyTorch's tokens."""
    folder = tmp_path_factory.mktemp("onnx") / "small-onnx"
    subprocess.run([sys.executable, "-m", "lineartime", "export", "small", "--out", folder, "--to", "onnx"], check=True)
    model, tokenizer, _ = lineartime.load_model("small")
    ids = tokenizer.encode((Path(lineartime.__file__).parent / "text" / "jane_eyre.txt").read_text()[20_000:60_000])
    prompts = [[0, *ids[:299]], [0, *ids[400:405], 0, *ids[500:540]], [0, *tokenizer.encode("It was")]]
    return folder, prompts, lineartime.generate(model, prompts, max_new_tokens=700), model, tokenizer, ids


def test_genai_writes_the_same_tokens_over_edges_of_chunks_in_unequal_rows(small):
    import onnxruntime_genai as genai

    folder, prompts, wanted, *_ = small
    options = genai.GeneratorParams(model := genai.Model(str(folder)))
    options.set_search_options(max_length=1000, do_sample=False, batch_size=3)
    writer = genai.Generator(model, options)
    writer.append_tokens(np.array([row + [8192] * (300 - len(row)) for row in prompts], np.int32))
    while not writer.is_done():
        writer.generate_next_token()
    assert [writer.get_sequence(n)[300:][: len(row)].tolist() for n, row in enumerate(wanted)] == wanted


@pytest.mark.parametrize("runtime", ["python", "js", "web"])
def test_the_lines_of_the_readme_run_and_so_does_the_runtime_of_browsers(small, runtime):
    """GenAI, transformers.js, and onnxruntime-web, whose WebAssembly node runs."""
    folder, prompts, wanted, _, tokenizer, _ = small
    readme, node = (folder / "README.md").read_text(), Path(__file__).parents[2] / "out" / "ecosystem" / "node"
    lines = {"web": WEB.replace("PROMPT", f"{prompts[0]}")} | dict(re.findall(r"```(\w+)\n(.*?)```", readme, re.DOTALL))
    script = folder / "readme.py" if runtime == "python" else node / "readme.mjs"
    script.write_text(lines[runtime])
    done = subprocess.run([sys.executable if runtime == "python" else "node", script], cwd=folder.parent,
                          capture_output=True, text=True)
    text = tokenizer.decode(prompts[2][1:] + wanted[2][:150])
    assert (f"{wanted[0][:150]}".replace(" ", "") if runtime == "web" else text) in done.stdout, done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_any_cut_and_any_padding_give_the_logits_of_whole_rows(kind, monkeypatch):
    """Rows have several documents. Counters take two digits, calls several parts."""
    import onnxruntime

    from lineartime.weights.onnx_graph import make_graph

    monkeypatch.setattr("lineartime.weights.onnx_graph.DIGIT", 16)
    monkeypatch.setattr("lineartime.weights.onnx_graph.TOGETHER", 7)
    draw, lengths, read = np.random.default_rng(1), [150, 97, 40], [0, 0, 0]
    fields = {"n_layers": 2, "d_model": 32, "query_key_dim": 16, "chunk_size": 8, "vocab_size": 64, "context": 200}
    model, _ = lineartime.LanguageModel(replace(FLASH, **fields | {"end_of_document": 0} | kind)), torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.3 * torch.randn_like(weight)
        rows = [draw.integers(0, 64, n) * (draw.random(n) < 0.95) for n in lengths]
        wanted = [model(torch.tensor(row)[None])[0].numpy() for row in rows]
    graph = onnxruntime.InferenceSession(make_graph(model).SerializeToString())
    state = {each.name: np.zeros([3, *each.shape[1:]], np.float32) for each in graph.get_inputs()[1:]}
    while read != lengths:
        n_new = int(draw.choice([1, 1, 1, 2, 5, 30]))
        ids_BN, places = np.full((3, n_new), draw.choice([-1, 64, 999])), []
        for n, row in enumerate(rows):  # the tokens anywhere in the call, padding between them
            places.append(np.sort(draw.permutation(n_new)[: min(draw.integers(0, n_new + 1), lengths[n] - read[n])]))
            ids_BN[n, places[n]] = row[read[n] : read[n] + len(places[n])]
        *now, logits_BNV = graph.run(None, {"input_ids": ids_BN, **state})
        state = dict(zip(state, now, strict=True))
        for n, place in enumerate(places):
            np.testing.assert_allclose(logits_BNV[n, place], wanted[n][read[n] : read[n] + len(place)], atol=5e-5)
            read[n] += len(place)


def test_a_field_is_exact_or_refused():
    """Each field of a model by itself: none is left out without a word."""
    from lineartime.use.onnx_folder import loss_of, make_graph

    refused = {"activation": "gelu", "gate": False, "document_mask": "paper", "overlap": True, "chunk_parts": "local",
               "attn_kernel": "softmax", "causal": False, "n_heads": 2, "token_shift": True, "attn_type": "quadratic",
               "layers": ("gau", "gau_quadratic")}
    exact = {"expansion_factor": 1.5, "chunk_size": 600, "rope_base": 500.0, "linear_rope": False, "rel_pos": None,
             "norm_eps": 0.01, "head_norm": "scale_norm", "query_key_dim": 4, "d_model": 30, "key_conv": 2}
    for name, value in (refused | exact).items():
        fields = {"n_layers": 2, "d_model": 32, "query_key_dim": 16, "chunk_size": 8, "vocab_size": 64, name: value}
        fields |= {"chunk_size": None} if name == "attn_type" else {}
        model, ids_1T = lineartime.LanguageModel(replace(FLASH, **fields)), torch.randint(64, (1, 700))
        torch.nn.init.normal_(model.embed.weight)
        if name in refused:
            with pytest.raises(UsageError, match=r"only a causal FLASH goes to ONNX: .*, gau; GAUs in chunks"):
                make_graph(model)
        else:
            loss = token_losses(model.eval(), ids_1T).mean().item()
            assert loss_of(make_graph(model), ids_1T) == pytest.approx(loss, abs=1e-5), name


def test_8_bits_keep_the_loss(small):
    from lineartime.use.onnx_folder import loss_of, make_graph

    *_, model, _, ids = small
    ids_1T, graph = torch.tensor([ids[:2048]]), make_graph(model, int8=True)
    loss = token_losses(model, ids_1T).mean().item()
    assert loss_of(graph, ids_1T) == pytest.approx(loss, abs=0.01) and graph.ByteSize() < 1.25 * 7.3e6
