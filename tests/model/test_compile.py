"""Compiled layers against the reference: the same loss and the same gradient of every parameter.
For a CPU PyTorch's compiler writes C++, which `make test-all` needs a compiler for."""

import copy
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch._inductor.config as inductor

from lineartime import GatedAttentionUnit, MultiHeadAttention
from lineartime.config import model_config
from lineartime.model.language_model import token_losses
from lineartime.model.layers import sequence_info
from marks import rest
from tiny_models import CONFIGS, LONG_MEMORY, random_ids, random_model, with_end

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
SMALL = {"d_model": 64, "n_layers": 2, "vocab_size": 97, "context": 512}
MODELS = {
    "flash": model_config("flash", chunk_size=256, **SMALL),
    "flash, documents": model_config("flash", query_key_dim=32, chunk_size=32, end_of_document=0, **SMALL),
    "transformer++": model_config("transformer++", n_heads=4, **SMALL),
    "long memory": model_config("flash", query_key_dim=32, chunk_size=32, end_of_document=0, **LONG_MEMORY, **SMALL),
}


def gradients(model, rows_BT, dtype):
    """The loss and the gradients of all parameters by name, the products in `dtype`. What is free
    is full of NaN: compiled code that reads what nobody wrote has been seen."""
    model.zero_grad(set_to_none=True)
    freed = [torch.full((2**n,), math.nan) for n in range(12, 21) for _ in range(4)]
    del freed
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = token_losses(model, rows_BT).mean()
    loss.backward()
    return loss.item(), {name: p.grad.double() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("cpu", "tuning", "bits"), [("AVX512", "generic", 256), ("AVX512", "znver3", None),
                                                     ("AVX2", "generic", None)])
def test_512_bits_are_for_a_processor_that_gcc_knows(cpu, tuning, bits, monkeypatch):
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: cpu)
    monkeypatch.setattr("subprocess.getoutput", lambda command: f"  -march=    \t\tnative\n  -mtune=    \t\t{tuning}\n")
    with inductor.patch({"cpp.simdlen": None}):
        random_model(MODELS["flash"]).compile_layers()
        assert inductor.cpp.simdlen == bits


@pytest.mark.parametrize(("name", "length", "dtype", "checkpointing", "backend"), [
    ("flash, documents", 203, torch.float32, False, "aot_eager"),
    *rest(("flash, documents", 203, torch.float32, False, "inductor"), ("flash", 512, torch.bfloat16, True, "inductor"),
          ("transformer++", 203, torch.float32, False, "inductor"),
          ("long memory", 203, torch.float32, False, "inductor"))])
def test_compiled_layers_are_the_reference(name, length, dtype, checkpointing, backend, monkeypatch):
    """At most twice as far from float64 as eager layers in the same type, or the rounding of a few
    operations in that type. 203 tokens end inside a chunk. `make test` traces the layers; writing
    C++ takes half a minute."""
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch.manual_seed(0)
    rows_BT = torch.randint(97, (2, length + 1))
    model = random_model(MODELS[name])
    wanted_loss, wanted = gradients(model, rows_BT, torch.float64)
    model = model.float()
    loss, eager = gradients(model, rows_BT, dtype)
    model.activation_checkpointing = checkpointing
    model.train()
    model.compile_layers()
    rounding, of_loss = (2e-2, 1e-4) if dtype == torch.bfloat16 else (1e-5, 1e-7)
    for _ in range(2):
        compiled_loss, compiled = gradients(model, rows_BT, dtype)
        assert compiled_loss == pytest.approx(wanted_loss, abs=2 * abs(loss - wanted_loss) + of_loss * wanted_loss)
        for parameter, gradient in wanted.items():
            limit = 2 * (eager[parameter] - gradient).norm() + rounding * gradient.norm()
            assert (compiled[parameter] - gradient).norm() <= limit, parameter  # false for a NaN too


def test_a_copy_of_a_compiled_model_runs_on_its_own_weights():
    """Nothing is compiled here: it is asked which layers a copy's layers would call."""
    model = random_model(MODELS["transformer++"])
    model.compile_layers()
    made = copy.deepcopy(model)
    assert all("add" in vars(layer) for layer in model.layers)
    assert all("add" not in vars(layer) and layer.add.__self__ is layer for layer in made.layers)


@pytest.mark.parametrize(("name", "causal"), [("transformer++", True), *rest(
    ("transformer++", False), ("transformer++ gate", True))])
def test_packed_transformers_compile_to_one_graph(name, causal):
    model, ids_BT = random_model(replace(with_end(CONFIGS[name]), causal=causal)), random_ids(2, 23)
    valid_BT = torch.arange(23) < torch.tensor([[23], [15]])
    torch._dynamo.reset()  # other models have compiled the same code
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for more in ({}, {"token_mask_BT": valid_BT}):
        difference = (compiled(ids_BT, **more) - model(ids_BT, **more))[valid_BT]
        assert (ids_BT[:, 1:] == 0).any() and difference.abs().max() < 1e-12
    with torch.no_grad():  # a layer on its own splits the rows too
        x_BTD, segment_ids_BT, layer = model.embed(ids_BT), (ids_BT == 0).cumsum(1), model.layers[0]
        info = sequence_info(model.config, torch.arange(23)[None], torch.float64, segment_ids_BT)
        assert info.cu_seqlens is not None
        assert torch.equal(layer(x_BTD, segment_ids_BT), sum(layer.add(x_BTD, None, info)))


@pytest.mark.parametrize(("name", "causal"), [("flash", True), *rest(
    ("flash", False), ("flash-quad", True), ("flash-quad rotated bias", False))])
def test_exported_with_any_length(name, causal):
    """One program for rows of 2 to 400 tokens in several documents, to the bit of the reference."""
    model = random_model(replace(with_end(CONFIGS[name]), causal=causal, context=400,
                                 **({"chunk_size": 16} if name == "flash" else {})))
    model.set_impl("reference")
    lengths = {1: torch.export.Dim("T", min=2, max=400)}
    program = torch.export.export(model, (random_ids(2, 37),), dynamic_shapes=(lengths,))
    for length in (2, 15, 16, 17, 33, 400):
        ids_BT = random_ids(2, length, seed=length)
        with torch.no_grad():
            assert torch.equal(program.module()(ids_BT), model(ids_BT))


@pytest.mark.rest
def test_a_combiner_is_exported_with_one_length() -> None:
    model, ids_BT = random_model(CONFIGS["combiner"]), random_ids(2, 37)
    with torch.no_grad():
        assert torch.equal(torch.export.export(model, (ids_BT,)).module()(ids_BT), model(ids_BT))


@pytest.mark.parametrize("made", [
    partial(GatedAttentionUnit, chunk_size=8, query_key_dim=8), *rest(partial(MultiHeadAttention, n_heads=2))])
def test_a_layer_alone_is_one_graph(made):
    """With documents and padding too, and exported for any batch and length."""
    torch.manual_seed(0)
    layer, x_BTD = made(d_model=16).double(), torch.randn(2, 23, 16, dtype=torch.float64)
    ids_BT = torch.tensor([[0] * 9 + [1] * 14, [0] * 23])
    valid_BT = (torch.arange(23) % 5 > 0).expand(2, 23)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for how in ({}, {"segment_ids": ids_BT}, {"token_mask": valid_BT}):
        assert torch.allclose(compiled(x_BTD, **how), layer(x_BTD, **how), rtol=0, atol=1e-12)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = layer.float()
        assert torch.compile(narrow, backend="aot_eager", fullgraph=True)(x_BTD.bfloat16()).dtype == torch.bfloat16
    layer = layer.double()
    dims = {0: torch.export.Dim("B", max=64), 1: torch.export.Dim("T", min=2, max=400)}
    program = torch.export.export(layer, (x_BTD,), dynamic_shapes=(dims,))
    for shape in ((1, 2), (3, 17), (2, 400)):
        x_BTD = torch.randn(*shape, 16, dtype=torch.float64)
        with torch.no_grad():
            assert torch.allclose(program.module()(x_BTD), layer(x_BTD), rtol=0, atol=1e-12)
