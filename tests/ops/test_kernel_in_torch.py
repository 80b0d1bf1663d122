"""What PyTorch asks of every kernel's op: compiled, checkpointed, in any layout, one derivative."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from kernel_law import S, documents, flat, make_inputs, random
from lineartime.ops import decode_step, mixed_chunk, quadratic
from marks import rest


def of_chunks(n_tokens: int, dtype: torch.dtype):
    op = flat(mixed_chunk.gated_chunk_attention)
    return (partial(op, chunk_size=128, causal=True, segment_ids_BT=documents(2, n_tokens)),
            make_inputs(2, n_tokens, dtype))


def of_rows(n_tokens: int, dtype: torch.dtype):
    ids_BT = documents(2, n_tokens).t().contiguous().t()
    op = partial(flat(quadratic.gated_quadratic_attention), scale_len=n_tokens, causal=True, segment_ids_BT=ids_BT)
    return op, make_inputs(2, n_tokens, dtype, chunk=None)


EVERY_OP = pytest.mark.parametrize("made", [of_chunks, of_rows])


def run(op, inputs: dict[str, Tensor]) -> list[Tensor]:
    """The output and the gradients of all inputs but angles, of which kernels have none."""
    inputs = {name: x.detach() for name, x in inputs.items()}
    leaves = [x.requires_grad_() for name, x in inputs.items() if name not in ("sin", "cos")]
    out = op(*inputs.values())
    given = random(*out.shape, seed=6).to(out.dtype).transpose(0, 1).contiguous().transpose(0, 1)
    return [out.detach(), *torch.autograd.grad(out, leaves, given)]


@EVERY_OP
def test_compiled_checkpointed_and_in_any_layout(made) -> None:
    """To the bit: in one graph, with what is kept for backward made again, and with rows and tokens
    interleaved, angles expanded and every second column, as with contiguous inputs."""
    op, inputs = made(133 if made is of_chunks else 67, torch.bfloat16)
    strided = {name: x.repeat_interleave(2, -1)[..., ::2] for name, x in inputs.items()}
    first = next(iter(inputs))
    strided[first] = inputs[first].transpose(0, 1).contiguous().transpose(0, 1)
    assert not any(x.is_contiguous() for x in strided.values())
    kept = run(op, inputs)
    for other in (run(torch.compile(op, backend="aot_eager", fullgraph=True), inputs),
                  run(partial(checkpoint, op, use_reentrant=False), inputs), run(op, strided)):
        assert all(torch.equal(a, b) for a, b in zip(other, kept, strict=True))


@pytest.mark.parametrize(("made", "document", "dtype", "causal"), [
    (of_rows, 50, torch.float32, True), (of_rows, 50, torch.bfloat16, False), (of_chunks, 100, torch.bfloat16, True),
    *rest((of_chunks, 100, torch.bfloat16, False))])
def test_nothing_crosses(made, document: int, dtype: torch.dtype, causal: bool) -> None:
    """Between documents, from the future, from padding: no bit of output, gradients of 0."""
    n_tokens = 3 * document - 17
    op, inputs = made(n_tokens, dtype)
    ids_T = torch.arange(n_tokens) // document
    ids_T[-13:] = -1
    op = partial(op, causal=causal, segment_ids_BT=ids_T.expand(2, -1))
    uvz, *others = inputs.values()
    out = op(uvz.requires_grad_(), *others)
    assert (out[:, -13:] == 0).all() and (out[:, :-13] != 0).any(-1).all()
    asked = torch.arange(document + document // 5, document + document // 2)  # of these a gradient is given
    duvz, = torch.autograd.grad(out, uvz, torch.zeros_like(out).index_fill(1, asked, 1.0))
    seen_T = (ids_T == 1) & ((torch.arange(n_tokens) <= asked[-1]) | (not causal))
    assert (duvz[:, ~seen_T] == 0).all() and (duvz[:, seen_T] != 0).any(-1).all()
    changed = torch.where(seen_T[:, None], uvz.detach(), random(*uvz.shape, seed=7).to(dtype))
    assert torch.equal(op(changed, *others)[:, asked], out.detach()[:, asked])


@EVERY_OP
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch itself calls it for forward mode
def test_derivatives_that_are_not_there(made) -> None:
    """Angles have no gradient. A second derivative, one carried forward, and those of torch.func
    are errors, not zeros; also where the output's gradient is constant."""
    op, inputs = made(5, torch.bfloat16)
    first, *others = inputs.values()
    leaves = [x.requires_grad_() for x in (first, *others)]
    for reduce in (Tensor.mean, lambda out: out.square().sum()):
        gradient, = torch.autograd.grad(reduce(op(*leaves)), first, create_graph=True)
        with pytest.raises(RuntimeError, match=r"gated_\w+_attention_backward"):
            gradient.square().sum().backward()
    op(*leaves).sum().backward()
    assert [name for name, x in inputs.items() if x.grad is None] == [name for name in inputs if name in ("sin", "cos")]
    first, *others = (x.detach() for x in leaves)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        op(forward_ad.make_dual(first, first), *others)
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda x: op(x, *others).sum())(first)


def test_an_op_returns_what_it_says() -> None:
    """As `torch.compile` sees it: with a past or not, heads made or given, values alone."""
    def check(op, *args, more=()) -> None:
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor", *more))

    inputs, ids_BT = make_inputs(2, 5, torch.bfloat16), documents(2, 5)
    tables = mixed_chunk.make_document_tables(ids_BT, 2, 5, 128, True, "mean", torch.device("cpu"))
    *made_by, w = inputs.values()
    uv, heads = inputs["uvz"][..., :128].contiguous(), random(4, 2, 5, S, seed=2).bfloat16()
    nothing, v = [None] * 4, uv[..., :64].contiguous()
    for given in ((*made_by, None), (uv, *nothing, heads), (v, *nothing, heads)):
        for past, carries in ((random(1, 2, S, 64, seed=1), True), (None, False)):
            args = (*given, w, past, *tables, 128, True, carries, given[0] is not v)
            check(mixed_chunk.flash_op, *args)
            _, left, made, *kept = out = mixed_chunk.flash_op(*args)
            check(mixed_chunk.flash_backward_op, out[0], left if carries else None,
                  made if given[-1] is None else heads, *kept, *args)
    _, inputs = of_rows(5, torch.float32)
    check(quadratic.quad_op, *(x.requires_grad_() for x in inputs.values()), documents(2, 5).int(), 5, True,
          more=("test_autograd_registration",))
    sums, place = random(3, S, 16, seed=3), torch.tensor([5, 0, 7])
    buffers = [random(3, 128, width, seed=width).bfloat16() for width in (S, S, 16)]
    rest = (random(128, seed=4), *buffers, sums, place, torch.zeros_like(place), torch.ones(3))
    uvz, scale, angle = (random(*shape, seed=5).bfloat16() for shape in ((3, 32 + S), (4, S), (3, S // 2)))
    check(decode_step.decode_op, uvz, None, scale, scale, angle, angle, *rest)
    check(decode_step.decode_op, uvz[:, :32].contiguous(), heads[:, 0, :3].contiguous(), None, None, None, None, *rest)
