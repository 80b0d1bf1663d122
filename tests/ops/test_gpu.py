"""On a CUDA device: what a processor computes in float64, for every model; training in bfloat16;
decoding; compiling; and the kernels at the sizes they are for, where the tests of each kernel are
of small ones in Triton's interpreter.

Left out unless asked for: `python -m pytest -m gpu tests/ops/test_gpu.py`."""

import fcntl
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.op import OPS, gated_inputs
from context_ranks import NEXT_TOKEN
from kernel_law import assert_held, documents, flat, run
from lineartime.config import PRESETS, ModelConfig, TrainConfig, model_config
from lineartime.model.language_model import LanguageModel
from lineartime.ops import mixed_chunk, quadratic, reference
from lineartime.training.gradient import compute_gradient
from lineartime.training.optimizers import make_optimizer
from lineartime.training.ordered import parameter_parts
from lineartime.training.runtime import choose_settings
from lineartime.weights.generation.generate import decode_step
from tiny_models import BIDIRECTIONAL, CHUNK, CONFIGS, LONG_MEMORY, UNPACKED, random_ids, random_model, with_end

DEVICE = "cuda"
END = 0
MODELS = CONFIGS | UNPACKED | BIDIRECTIONAL
LIMITS = {torch.float64: 1e-11, torch.float32: 2e-4}
"""Largest relative error of an output or gradient, as norms, against float64 on a processor."""

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # other versions of torch warn of other things


@pytest.fixture(autouse=True)
def device():
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.fail("these tests need a CUDA device")
    choose_settings(torch.device(DEVICE))
    torch.manual_seed(0)


def error(ours: Tensor, theirs: Tensor, least: float = 1.0) -> float:
    """Norm of the difference over the norm, or over `least` where that is less."""
    assert ours.shape == theirs.shape
    ours, theirs = ours.detach().cpu().double(), theirs.detach().cpu().double()
    return float((ours - theirs).norm() / theirs.norm().clamp(min=least))


def output_and_gradients(model: LanguageModel, ids_BT: Tensor) -> dict[str, Tensor]:
    """The logits, and the gradient of a sum of them that weighs each differently."""
    logits_BTV = model(ids_BT)
    weights = torch.randn(logits_BTV.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (logits_BTV * weights.to(logits_BTV.device, torch.promote_types(logits_BTV.dtype, torch.float32))).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)  # a model that changes its type leaves these as they are
    return {"logits": logits_BTV, **gradients}


@pytest.mark.parametrize("dtype", LIMITS, ids=["float64", "float32"])
@pytest.mark.parametrize("name", MODELS)
def test_forward_and_backward_are_those_of_a_processor_in_float64(name: str, dtype: torch.dtype) -> None:
    config = with_end(MODELS[name], END)
    ids_BT = random_ids(4, 3 * CHUNK + 2) % 12 + 1
    if config.end_of_document is not None:  # documents begin and end inside chunks, at their ends and not at all
        ids_BT[1, [3, 4, 9]] = ids_BT[2, [0, 4, 5, 8]] = END
    expected = output_and_gradients(random_model(config), ids_BT)
    made = output_and_gradients(random_model(config).to(DEVICE, dtype), ids_BT.to(DEVICE))
    assert made.keys() == expected.keys() and made["logits"].device.type == DEVICE
    assert {n: e for n in expected if not (e := error(made[n], expected[n])) <= LIMITS[dtype]} == {}


def middle_sized(preset: str, **fields: object) -> ModelConfig:
    """A model of a few million weights whose products are large enough for the fast kernels."""
    sizes = {"n_layers": 2, "d_model": 256, "vocab_size": 512, "context": 512}
    own = {"query_key_dim": 64} if PRESETS[preset].ffn == "gau" else {"n_heads": 4}
    chunks = {"chunk_size": 64} if PRESETS[preset].chunk_size else {}
    return model_config(preset, **sizes, **own, **chunks, **fields)


@pytest.mark.parametrize("preset", PRESETS)
def test_bfloat16_trains(preset: str) -> None:
    """Its first loss and gradient are near float32's, and it learns rows by heart."""
    model = LanguageModel(middle_sized(preset)).to(DEVICE).train()
    rows_BT = random_ids(2, 201, vocab_size=512).to(DEVICE)
    task, train = NEXT_TOKEN, TrainConfig(precision="bfloat16", learning_rate=3e-3, clip=1.0)
    wanted, wanted_norm = compute_gradient(model, task, [rows_BT], 2, replace(train, precision="float32", clip=None))
    first, norm = compute_gradient(model, task, [rows_BT], 2, replace(train, clip=None))
    assert abs(first - wanted) < 0.01 * wanted and abs(norm - wanted_norm) < 0.1 * wanted_norm
    optimizer = make_optimizer(parameter_parts(model), train)
    for _ in range(20):
        loss, _ = compute_gradient(model, task, [rows_BT], 1, train)
        optimizer.step()
    assert loss < 0.9 * first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("preset", ["transformer++", "flash-quad", "flash", "mc-tfm++"])
def test_packed_documents_do_not_see_each_other(preset: str, dtype: torch.dtype) -> None:
    """Attention of variable length: near float64, and nothing of another document."""
    config = middle_sized(preset, end_of_document=END)
    model = LanguageModel(config).train()
    ids_1T = random_ids(1, 512, vocab_size=511) + 1
    ids_1T[0, [0, 130, 131]] = END

    expected = output_and_gradients(model.double(), ids_1T)
    model = model.to(DEVICE, torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16):
        made = output_and_gradients(model, ids_1T.to(DEVICE))
        other_1T = ids_1T.clone()
        other_1T[0, 131:400] = other_1T[0, 131:400].flip(0)
        other_1T[0, 131], other_1T[0, 399] = END, 1
        others = model(other_1T.to(DEVICE))
    limit = LIMITS[torch.float32] if dtype == torch.float32 else 5e-2
    least = 0.01 * max(float(t.norm()) for t in expected.values())
    # A gradient that is one number is a sum in which most of it cancels: bfloat16 leaves little of
    # it.
    several = [name for name in expected if dtype == torch.float32 or expected[name].numel() > 1]
    assert {n: e for n in several if not (e := error(made[n], expected[n], least)) <= limit} == {}
    assert torch.equal(others[:, :131], made["logits"][:, :131])
    assert not torch.equal(others[:, 131:], made["logits"][:, 131:])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("preset", ["flash", "transformer++"])
def test_compiled_layers_are_the_eager_ones(preset: str, precision: str) -> None:
    model = LanguageModel(middle_sized(preset)).to(DEVICE).train()
    rows_BT = random_ids(2, 513, vocab_size=512).to(DEVICE)

    def run() -> tuple[float, list[Tensor]]:
        loss, _ = compute_gradient(model, NEXT_TOKEN, [rows_BT], 2, TrainConfig(precision=precision, clip=None))
        return loss, [p.grad.clone() for p in model.parameters() if p.grad is not None]

    loss, gradients = run()
    model.compile_layers()
    compiled_loss, compiled_gradients = run()
    limit = 1e-4 if precision == "float32" else 5e-2
    assert abs(compiled_loss - loss) <= limit * loss
    for made, expected in zip(compiled_gradients, gradients, strict=True):
        assert (made - expected).norm() <= limit * max(expected.norm(), 1e-2 * max(g.norm() for g in gradients))


LENGTHS = (2051, 131)  # of rows for kernels: no multiples of anything, the second one shorter than most chunks
ATTENTIONS = [("gated_chunk_attention", chunk) for chunk in (256, 128, 512)] + [("gated_quadratic_attention", None)]


def op_config(name: str, chunk: int | None, causal: bool, n_tokens: int) -> ModelConfig:
    """The paper's sizes: those of 110 M, and with chunks of 512 those of 500 M."""
    fields = {} if chunk is None else {"chunk_size": chunk}
    return model_config(OPS[name], d_model=1024 if chunk == 512 else 768, causal=causal, context=n_tokens, **fields)


def attention(name: str, config: ModelConfig, segment_ids_BT: Tensor | None) -> tuple[Callable[..., Tensor], dict]:
    """A gated attention by its kernel, and its arguments."""
    module, size = (mixed_chunk, "chunk_size") if name == "gated_chunk_attention" else (quadratic, "scale_len")
    return getattr(module, name), {"causal": config.causal, "segment_ids_BT": segment_ids_BT, size: config.scale_len}


def op_inputs(config: ModelConfig, n_rows: int, dtype: torch.dtype) -> dict[str, Tensor]:
    return gated_inputs(config, n_rows, torch.device(DEVICE), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("name", "chunk"), ATTENTIONS)
def test_kernels_are_held_to_float64(name: str, chunk: int | None, causal: bool, dtype: torch.dtype) -> None:
    """With documents and padding, and without. Memory that a kernel is given holds NaN
    (conftest)."""
    for n_tokens in (*LENGTHS, 2048):
        config = op_config(name, chunk, causal, n_tokens)
        kernel, how = attention(name, config, None if n_tokens == 2048 else documents(3, n_tokens).to(DEVICE))
        assert_held(kernel, getattr(reference, name), op_inputs(config, 3, dtype), **how)


@pytest.mark.parametrize(("name", "chunk"), ATTENTIONS)
def test_kernels_give_the_same_bits_each_time(name: str, chunk: int | None) -> None:
    config = op_config(name, chunk, False, LENGTHS[0])
    kernel, how = attention(name, config, documents(2, LENGTHS[0]).to(DEVICE))
    inputs = op_inputs(config, 2, torch.bfloat16)
    assert all(map(torch.equal, run(kernel, inputs, **how), run(kernel, inputs, **how)))


@pytest.mark.parametrize("options", [
    {}, {"query_key_dim": 64}, LONG_MEMORY, {"n_heads": 2, "linear_gate": True, "chunk_pooling": "written"}],
    ids=["paper", "narrow", "options", "heads"])
def test_flash_in_kernels_alone(options: dict[str, object]) -> None:
    """FLASH and its options: gradients, and prompts of different lengths in parts."""
    model = LanguageModel(model_config("flash", n_layers=2, d_model=128, vocab_size=64, context=700, chunk_size=128,
                                       end_of_document=END, **options)).double()
    for layer in model.layers:  # so that the linear half counts
        torch.nn.init.ones_(layer.scale_offset.gamma[2:])
    ids_BT = random_ids(2, 700, vocab_size=63) + 1
    ids_BT[0, [0, 130, 131, 500]] = END
    expected = output_and_gradients(model, ids_BT)
    model, ids_BT = model.to(DEVICE, torch.float32), ids_BT.to(DEVICE)
    model.set_impl("triton")
    made = output_and_gradients(model, ids_BT)
    least = 0.01 * max(float(t.norm()) for t in expected.values())
    assert {n: e for n in expected if not (e := error(made[n], expected[n], least)) <= LIMITS[torch.float32]} == {}
    state, rows, n_read = model.decoding_state(2), [[], []], [0, 0]
    for n_new in ((37, 37), (650, 200), (0, 463), (13, 0)):
        ids_BN = torch.stack([F.pad(ids_T[done : done + n], [0, max(n_new) - n])
                              for ids_T, done, n in zip(ids_BT, n_read, n_new, strict=True)])
        with torch.no_grad():
            x_BND = model.extend(ids_BN, torch.tensor(n_new, device=DEVICE), state)[0]
        for row, (x_ND, n) in enumerate(zip(x_BND, n_new, strict=True)):
            rows[row].append(x_ND[:n])
            n_read[row] += n
    x_BTD = torch.stack([torch.cat(parts) for parts in rows])
    assert error(model.logits(x_BTD), expected["logits"]) <= LIMITS[torch.float32]


@pytest.fixture
def alone(tmp_path_factory):
    """One test at a time of all processes: each takes tens of gigabytes."""
    with (tmp_path_factory.getbasetemp().parent / "large.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("n_rows", "n_tokens"), [(1, 24 * LENGTHS[0]), (12, 5 * LENGTHS[0])])
def test_long_rows(n_rows: int, n_tokens: int) -> None:
    """Chunk states in two levels, which few rows of many chunks get, and in one."""
    config = op_config("gated_chunk_attention", 256, True, n_tokens)
    kernel, how = attention("gated_chunk_attention", config, documents(n_rows, n_tokens).to(DEVICE))
    assert_held(kernel, reference.gated_chunk_attention, op_inputs(config, n_rows, torch.bfloat16), **how)


@pytest.mark.usefixtures("alone")
def test_more_numbers_than_32_bits_count() -> None:
    """The last of several long rows is what it is alone: uvz has 2.5e9 numbers."""
    config = op_config("gated_chunk_attention", 256, True, 2**18)
    kernel, how = attention("gated_chunk_attention", config, None)
    uvz, *others = op_inputs(config, 1, torch.bfloat16).values()

    def found(uvz: Tensor) -> tuple[Tensor, Tensor]:
        out = flat(kernel)(uvz.requires_grad_(), *others, **how)
        return out.detach()[-1], torch.autograd.grad(out.sum(), uvz)[0][-1]

    last = uvz.detach()
    for together, alone in zip(found(torch.cat([torch.zeros_like(last)] * 2 + [last])), found(last), strict=True):
        assert torch.equal(together, alone)


def with_kernels(preset: str) -> ModelConfig:
    """A small model whose heads are of the width that kernels take."""
    chunk = {"chunk_size": 128} if preset != "flash-quad" else {}
    return model_config(preset, n_layers=3, d_model=256, vocab_size=512, context=700, end_of_document=END, **chunk)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("preset", ["flash", "flash-quad"])
def test_a_model_with_kernels_is_the_model_without(preset: str, precision: str) -> None:
    """A step's gradient is at most twice as far from float64 as the reference's."""
    model = random_model(with_kernels(preset)).to(DEVICE, torch.float32).train()
    rows_BT = (random_ids(3, 701, vocab_size=511) + 1).to(DEVICE)
    rows_BT[1, [5, 130, 131, 400]] = END
    rows_BT[2, ::37] = END

    def gradient(impl: str | None, dtype: torch.dtype, precision: str) -> tuple[float, Tensor]:
        model.set_impl(impl)
        model.to(dtype)
        model.zero_grad(set_to_none=True)
        loss, _ = compute_gradient(model, NEXT_TOKEN, [rows_BT], 3, TrainConfig(precision=precision, clip=None))
        return loss, torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])

    loss, exact = gradient("reference", torch.float64, "float32")
    (_, theirs), (our_loss, ours) = (gradient(impl, torch.float32, precision) for impl in ("reference", None))
    assert abs(our_loss - loss) < 0.01 * loss
    floor = 1e-6 * float(exact.norm()) if precision == "float32" else 0.0
    assert float((ours - exact).norm()) <= max(2 * float((theirs - exact).norm()), floor)
    assert not torch.equal(ours, theirs)  # so kernels ran


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("preset", ["flash", "flash+"])
@torch.inference_mode()
def test_decoding_with_kernels_is_the_parallel_form(preset: str, dtype: torch.dtype) -> None:
    """Token by token over two ends of chunks and a document's."""
    model = LanguageModel(with_kernels(preset)).to(DEVICE, dtype).eval()
    ids_BT = (random_ids(5, 300, vocab_size=511) + 1).to(DEVICE)
    ids_BT[2, 200] = END
    model.set_impl("reference")
    expected_BTV = model(ids_BT).float()
    model.set_impl(None)
    state = model.decoding_state(len(ids_BT))
    model.extend(ids_BT[:, :100], torch.full((len(ids_BT),), 100, device=DEVICE), state)
    step = partial(decode_step, model, state=state)
    logits_BTV = torch.stack([step(ids_B) for ids_B in ids_BT[:, 100:].unbind(1)], dim=1)
    assert error(logits_BTV, expected_BTV[:, 100:]) <= (1e-4 if dtype == torch.float32 else 5e-2)
