"""Run the listings printed in the paper's appendix under TensorFlow 1 semantics and record their
numbers.

usage: python run_paper_pseudocode.py PAPER.tex OUT_DIR [SEED]

The listings are taken out of the LaTeX at run time. Each weight is set to random values, so that a
reimplementation given the same weights must return the same output and gradients."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow

tf = tensorflow.compat.v1

LISTINGS = ("_get_scaledsin", "rope", "rel_pos_bias", "norm", "GAU", "segment_ids_to_mask", "FLASH")
REPAIRS = (  # what is printed, what runs
    ("$\\rightarrow$", "->"),
    ("\nreturn t\n", "\n    return t\n"),  # a dedent inside the function
    ("dtype=dtype", "dtype=tf.float32"),  # an undefined name
    ("    if n < 512:\n    # Construct", "    if n < 512:\n        # Construct"),
    ("    else:\n    # Construct", "    else:\n        # Construct"),
    ("return scale * x", "return scalar * x"),  # an undefined name
    ("tf.nn.relu((quad_qk / n + bias))", "tf.nn.relu(quad_qk / n + bias))"),  # an unbalanced bracket
    ("seq_len = tf.shape(x)[1]", "seq_len = int(x.shape[1])"),  # Python branches on it
    ("tf.rsqrt", "tf.math.rsqrt"),
    ("bias_initializer='zeros'", "bias_initializer=WEIGHT_INITIALIZER"),
)


def scoped(listing: Callable, name: str) -> Callable:
    def call(*args, **kwargs):
        with tf.variable_scope(name):
            return listing(*args, **kwargs)

    return call


def load(paper: Path) -> dict[str, Any]:
    """The listings as functions."""
    blocks = re.findall(r"\\begin\{lstlisting\}\[[^\]]*\]\n(.*?)\\end\{lstlisting\}", paper.read_text(), re.DOTALL)
    code = "\n".join(
        block for block in blocks
        if any(f"def {name}(" in block for name in LISTINGS) and "gated_attn_unit" not in block
    )
    for printed, repaired in REPAIRS:
        code = code.replace(printed, repaired)
    functions: dict[str, Any] = {"tf": tf}
    exec(compile(code, "paper", "exec"), functions)
    for name in ("norm", "rel_pos_bias"):
        functions[name] = scoped(functions[name], name)
    return functions


def run(build: Callable, feeds: dict, rng: np.random.Generator, inputs: tuple = (), rows: int | None = None) -> dict:
    """Inputs, weights, output and the gradients of sum(output * cotangent) in the weights and the
    named inputs.

    With `rows`, only the first rows of a large output are kept, and the cotangent is zero below
    them."""
    tf.reset_default_graph()
    placeholders = {name: tf.placeholder(value.dtype, value.shape, name=name) for name, value in feeds.items()}
    out = build(placeholders)
    variables = tf.global_variables()
    values = {}
    for variable in variables:
        name = variable.name
        mean = 1.0 if ("norm/gamma" in name or "norm/scalar" in name) else 0.0
        std = 0.5 if name.endswith(("gamma:0", "beta:0")) else (0.2 if "rel_pos" in name else 0.15)
        values[name] = (mean + std * rng.standard_normal(variable.shape.as_list())).astype(np.float32)
    cotangent = rng.standard_normal(out.shape.as_list()).astype(np.float32)
    if rows:
        cotangent[rows:] = 0
    sources = [placeholders[name] for name in inputs] + variables
    gradients = tf.gradients(tf.reduce_sum(out * cotangent), sources)
    with tf.Session() as session:
        for variable in variables:
            variable.load(values[variable.name], session)
        fetched, found = session.run([out, gradients], {placeholders[name]: value for name, value in feeds.items()})
    return {
        **{f"in/{name}": value for name, value in feeds.items()},
        **{f"var/{name}": value for name, value in values.items()},
        "out": fetched[:rows], "cotangent": cotangent[:rows],
        **{f"grad/{source.name}": gradient for source, gradient in zip(sources, found, strict=True)},
    }


def segments(rng: np.random.Generator, b: int, g: int, n: int, docs: int) -> np.ndarray:
    """Document numbers of `b` rows of `g` chunks, cut at random places."""
    ids = np.zeros((b, g * n), np.int32)
    for row in ids:
        cuts = np.sort(rng.choice(np.arange(1, g * n), docs - 1, replace=False))
        row[:] = np.searchsorted(cuts, np.arange(g * n), side="right")
    return ids.reshape(b, g, n)


def main(paper: Path, out_dir: Path, seed: int) -> None:
    tf.disable_eager_execution()
    out_dir.mkdir(parents=True, exist_ok=True)
    listing, rng, index = load(paper), np.random.default_rng(seed), {}
    odd = seed * 7 % 13
    widths = {"d": 32, "e": 64, "s": 128}

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    def save(name: str, result: dict, **settings) -> None:
        np.savez_compressed(out_dir / f"{name}.npz", **result)
        index[name] = {**settings, "out": list(result["out"].shape)}

    def save_flash(name: str, seg: np.ndarray, causal: bool, **settings) -> None:
        b, g, n = seg.shape
        feeds = {"x": normal(b, g, n, widths["d"]), "seg": seg}
        norm_type = settings.get("norm_type", "layer_norm")
        result = run(lambda p: listing["FLASH"](p["x"], causal, p["seg"], norm_type=norm_type), feeds, rng, ("x",))
        save(name, result, g=g, n=n, causal=causal, **settings, **widths)

    for norm_type in ("layer_norm", "scale_norm"):
        result = run(lambda p, norm_type=norm_type: listing["norm"](p["x"], norm_type=norm_type),
                     {"x": normal(2, 5, 24)}, rng, ("x",))
        save(f"norm_{norm_type}", result, norm_type=norm_type)
    # Where the listing ignores an input's values, 0 * input gives it a gradient of zeros.
    result = run(lambda p: listing["_get_scaledsin"](p["x"]) + 0 * p["x"][0],
                 {"x": normal(1, 37 + odd, 24)}, rng, ("x",))
    save("scaledsin", result)
    result = run(lambda p: listing["rope"](p["x"], axis=1), {"x": normal(2, 33 + odd, 3, 16)}, rng, ("x",))
    save("rope_axis1", result, axis=[1])
    result = run(lambda p: listing["rope"](p["x"], axis=[1, 2]), {"x": normal(2, 3, 11, 2, 16)}, rng, ("x",))
    save("rope_axis12", result, axis=[1, 2])
    for n in (24 + odd, 512 + odd):
        result = run(lambda p, n=n: listing["rel_pos_bias"](n) + 0 * p["x"], {"x": normal(1)}, rng, ("x",), rows=8)
        save(f"rel_pos_bias_{n}", result, n=n)
    for n in (40 + odd, 520 + odd):
        for causal in (False, True):
            for norm_type in ("layer_norm", "scale_norm") if n < 500 else ("layer_norm",):
                result = run(lambda p, causal=causal, norm_type=norm_type: listing["GAU"](p["x"], causal, norm_type),
                             {"x": normal(2, n, widths["d"])}, rng, ("x",))
                save(f"gau_n{n}_{'causal' if causal else 'bidir'}_{norm_type}", result,
                     n=n, causal=causal, norm_type=norm_type, **widths)
    for g, n, docs in ((4, 16 + odd, 1), (6, 16, 5), (3, 32, 9)):
        seg = segments(rng, 2, g, n, docs)
        for causal in (False, True):
            name = f"g{g}_n{n}_docs{docs}_{'causal' if causal else 'bidir'}"
            result = run(lambda p, causal=causal: listing["segment_ids_to_mask"](p["seg"], causal=causal)
                         + 0 * tf.get_variable("z", shape=()), {"seg": seg}, rng)
            save(f"segmask_{name}", result, causal=causal)
            save_flash(f"flash_{name}", seg, causal, docs=docs)
    for g, n, causal, norm_type in ((3, 24 + odd, True, "scale_norm"), (3, 24 + odd, False, "scale_norm"),
                                    (2, 512 + odd, True, "layer_norm"), (2, 512 + odd, False, "layer_norm")):
        save_flash(f"flash_g{g}_n{n}_{'causal' if causal else 'bidir'}_{norm_type}", segments(rng, 1, g, n, 2), causal,
                   docs=2, norm_type=norm_type)
    (out_dir / "index.json").write_text(json.dumps(index, indent=1))
    print(f"{len(index)} cases written")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
