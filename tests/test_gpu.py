"""On a CUDA device: what a processor computes in float64, for every model; training in bfloat16; decoding; compiling.

Left out unless asked for: `python -m pytest -m gpu`, or `make gpu STAGE=tests`."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny_models import BIDIRECTIONAL, CHUNK, CONFIGS, UNPACKED, random_ids, random_model, with_end
from torch import Tensor

from lineartime.config import PRESETS, ModelConfig, TrainConfig, model_config
from lineartime.generate import generate
from lineartime.machine import choose_settings
from lineartime.model import LanguageModel, token_losses
from lineartime.ops.cross_entropy import linear_cross_entropy
from lineartime.train import compute_gradient, make_optimizer

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
    """Norm of the difference over the norm, or over `least` where that is less; not a number where one is not."""
    assert ours.shape == theirs.shape
    ours, theirs = ours.detach().cpu().double(), theirs.detach().cpu().double()
    return float((ours - theirs).norm() / theirs.norm().clamp(min=least))


def rows_with_documents(config: ModelConfig, length: int = 3 * CHUNK + 2) -> Tensor:
    """Documents that begin and end inside chunks, at their ends and not at all; none where rows are one document."""
    ids_BT = random_ids(4, length) % 12 + 1
    if config.end_of_document is not None:
        ids_BT[1, [3, 4, 9]] = END
        ids_BT[2, [0, 4, 5, 8, 12]] = END
    return ids_BT


def output_and_gradients(model: LanguageModel, ids_BT: Tensor) -> dict[str, Tensor]:
    """The logits, and the gradient of a sum of them that weighs each differently."""
    logits_BTV = model(ids_BT)
    weights = torch.randn(logits_BTV.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (logits_BTV * weights.to(logits_BTV.device, torch.promote_types(logits_BTV.dtype, torch.float32))).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits_BTV, **gradients}


@pytest.mark.parametrize("dtype", LIMITS, ids=["float64", "float32"])
@pytest.mark.parametrize("name", MODELS)
def test_forward_and_backward_are_those_of_a_processor_in_float64(name: str, dtype: torch.dtype) -> None:
    config = with_end(MODELS[name], END)
    ids_BT = rows_with_documents(config)
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


class Rows:
    """Language modelling of the same rows at every step."""

    def __init__(self, rows_BT: Tensor):
        self.rows_BT = rows_BT

    def n_targets(self, rows_BT: Tensor) -> int:
        return rows_BT[:, 1:].numel()

    def losses(self, model: LanguageModel, rows_BT: Tensor) -> Tensor:
        return token_losses(model, rows_BT)


@pytest.mark.parametrize("preset", PRESETS)
def test_bfloat16_trains(preset: str) -> None:
    """Its first loss and gradient are near float32's, and it learns rows by heart."""
    model = LanguageModel(middle_sized(preset)).to(DEVICE).train()
    rows_BT = random_ids(2, 201, vocab_size=512).to(DEVICE)
    task, train = Rows(rows_BT), TrainConfig(precision="bfloat16", learning_rate=3e-3, clip=1.0)
    wanted, wanted_norm = compute_gradient(model, task, [rows_BT], 2, replace(train, precision="float32", clip=None))
    first, norm = compute_gradient(model, task, [rows_BT], 2, replace(train, clip=None))
    assert abs(first - wanted) < 0.01 * wanted and abs(norm - wanted_norm) < 0.1 * wanted_norm
    optimizer = make_optimizer(model, train)
    for _ in range(20):
        loss, _ = compute_gradient(model, task, [rows_BT], 1, train)
        optimizer.step()
    assert loss < 0.9 * first


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_decoding_is_the_forward_pass(name: str) -> None:
    config = with_end(CONFIGS[name], END)
    model = random_model(config).to(DEVICE)
    ids_BT = rows_with_documents(config).to(DEVICE)
    x_BTD = model.hidden(ids_BT)
    state = model.decoding_state(len(ids_BT))
    pieces = [model.extend(piece, torch.full((len(ids_BT),), piece.shape[1], device=DEVICE), state)
              for piece in ids_BT.split([6, 1, 1, 1, 4, 1], dim=1)]
    assert error(torch.cat(pieces, dim=1), x_BTD) <= LIMITS[torch.float64]


@pytest.mark.parametrize("preset", ["flash", "flash-quad", "transformer++", "mc-tfm++"])
def test_greedy_text_is_that_of_a_processor(preset: str) -> None:
    model = LanguageModel(middle_sized(preset)).double().eval()
    prompts = [random_ids(n, seed=n, vocab_size=512).tolist() for n in (3, 70, 200)]
    expected = generate(model, prompts, max_new_tokens=80, temperature=0)
    assert generate(model.to(DEVICE), prompts, max_new_tokens=80, temperature=0) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("preset", ["transformer++", "flash-quad", "flash", "mc-tfm++"])
def test_packed_documents_do_not_see_each_other(preset: str, dtype: torch.dtype) -> None:
    """Attention of variable length in bfloat16: near float64 on a processor, and nothing of another document."""
    config = middle_sized(preset, end_of_document=END)
    model = LanguageModel(config).train()
    ids_1T = random_ids(1, 512, vocab_size=511) + 1
    ids_1T[0, [0, 130, 131]] = END

    expected = output_and_gradients(model.double(), ids_1T)
    model.zero_grad(set_to_none=True)
    model = model.to(DEVICE, torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16):
        made = output_and_gradients(model, ids_1T.to(DEVICE))
        other_1T = ids_1T.clone()
        other_1T[0, 131:400] = other_1T[0, 131:400].flip(0)
        other_1T[0, 131], other_1T[0, 399] = END, 1
        others = model(other_1T.to(DEVICE))
    limit = LIMITS[torch.float32] if dtype == torch.float32 else 5e-2
    least = 0.01 * max(float(t.norm()) for t in expected.values())
    # A gradient that is one number is a sum in which most of it cancels: bfloat16 leaves little of it.
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
        loss, _ = compute_gradient(model, Rows(rows_BT), [rows_BT], 2, TrainConfig(precision=precision, clip=None))
        return loss, [p.grad.clone() for p in model.parameters() if p.grad is not None]

    loss, gradients = run()
    model.compile_layers()
    compiled_loss, compiled_gradients = run()
    limit = 1e-4 if precision == "float32" else 5e-2
    assert abs(compiled_loss - loss) <= limit * loss
    for made, expected in zip(compiled_gradients, gradients, strict=True):
        assert (made - expected).norm() <= limit * max(expected.norm(), 1e-2 * max(g.norm() for g in gradients))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_linear_cross_entropy_is_the_plain_one(dtype: torch.dtype) -> None:
    """At a length that is no multiple of its chunks."""
    x, weight, bias = (torch.randn(*shape, dtype=torch.float64) for shape in ((3000, 64), (32000, 64), (32000,)))
    targets = random_ids(3000, vocab_size=32000)
    results = []
    for device, kind, chunk in (("cpu", torch.float64, None), (DEVICE, dtype, 700)):
        inputs = [t.to(device, kind, copy=True).requires_grad_() for t in (x, 0.1 * weight, bias)]
        losses = (linear_cross_entropy(*inputs, targets.to(device), chunk_tokens=chunk) if chunk else
                  F.cross_entropy(F.linear(*inputs), targets, reduction="none"))
        losses.sum().backward()
        results.append([losses, *(t.grad for t in inputs)])
    limit = 1e-11 if dtype == torch.float64 else 1e-5
    assert [e for a, b in zip(*results, strict=True) if not (e := error(b, a)) <= limit] == []


def test_linear_cross_entropy_does_not_hold_the_logits() -> None:
    n_tokens, vocab_size, width = 2**16, 32000, 256
    x_ND = torch.randn(n_tokens, width, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    weight_VD = (0.02 * torch.randn(vocab_size, width, device=DEVICE)).requires_grad_()
    bias_V = torch.zeros(vocab_size, device=DEVICE, requires_grad=True)
    targets_N = torch.randint(vocab_size, (n_tokens,), device=DEVICE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast(DEVICE, torch.bfloat16):
        linear_cross_entropy(x_ND, weight_VD, bias_V, targets_N).mean().backward()
    assert torch.cuda.max_memory_allocated() - before < 4 * n_tokens * vocab_size / 4
