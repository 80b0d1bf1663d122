"""Triton's kernels on a processor: its interpreter, with bfloat16 as on a GPU."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter

triton.knobs.runtime.interpret = True
del os.environ["TRITON_INTERPRET"]  # not for the processes that tests start
assert isinstance(tl.zeros, interpreter.InterpretedFunction), "Triton was imported before: import this first"


def as_float32(handle: interpreter.TensorHandle) -> np.ndarray:
    """The numbers behind bit patterns of bfloat16; other types as they are."""
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return handle.data


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Bit patterns of float32 numbers rounded to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def mend() -> None:
    """The interpreter truncates to bfloat16, multiplies matrices of its bit patterns, and counts
    loops in a way that NumPy no longer takes."""
    builder = interpreter.InterpreterBuilder
    cast, convert, dot = builder.cast_impl, builder.create_fp_to_fp, builder.create_dot

    def to_bfloat16_or(other):
        def made(self, source, kind, *rest):
            kinds = source.dtype.scalar, kind.scalar
            if kinds == (tl.float32, tl.bfloat16):
                return interpreter.TensorHandle(to_bfloat16(source.data), tl.bfloat16)
            if kinds == (tl.bfloat16, tl.float32):
                return interpreter.TensorHandle(as_float32(source), tl.float32)
            return other(self, source, kind, *rest)
        return made

    def multiply(self, a, b, acc, *rest):
        if a.dtype.scalar != tl.bfloat16:
            return dot(self, a, b, acc, *rest)
        return interpreter.TensorHandle(np.matmul(as_float32(a), as_float32(b)) + acc.data, acc.dtype.scalar)

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index
    builder.cast_impl, builder.create_dot = to_bfloat16_or(cast), multiply
    builder.create_fp_to_fp = to_bfloat16_or(convert)


def hasten() -> None:
    """The interpreter looks for overflows and then drops what it found, and prepares the language
    again for every call of a function inside a kernel, where the launch can do it once."""
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    prepare = interpreter._patch_lang

    def prepare_all(kernel):
        scope = prepare(kernel)
        scope._changes += prepare(tl.zeros.fn)._changes  # the language as its own functions see it
        return scope

    def call(self, *args, **kwargs):
        return self.rewrite()(*args, **kwargs)

    interpreter._patch_lang, interpreter.InterpretedFunction.__call__ = prepare_all, call


mend()
hasten()
