"""Decode without PyTorch: the decode step of a model as ONNX, run by onnxruntime, with the text
that PyTorch gives.

    pip install '.[onnx]'
    python examples/onnx_decode.py [MODEL [PROMPT]]

onnxruntime 1.32 also runs ONNX's own operator, LinearAttention of opset 27. This graph does not use
it: the operator adds each token to its state, and FLASH adds a whole chunk."""

import sys
from pathlib import Path

import numpy as np
import onnxruntime
import torch

import lineartime

FILE = Path("out/decode_step.onnx")


def export(model: lineartime.LanguageModel, file: Path) -> None:
    """Write the step of one row of a model with a constant state: ids and state to logits and new
    state."""
    step = lineartime.DecodeStep(model)
    with torch.no_grad():
        program = torch.export.export(step, (torch.zeros(1, dtype=torch.long), step.empty_state(1)))
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.onnx.export(program, dynamo=True, verbose=False).save(file)


def decode(file: Path, prompt: list[int], n_new: int, end: int) -> list[int]:
    """The n_new likeliest tokens after a prompt, or fewer to the end of the document. Needs numpy
    and onnxruntime."""
    session = onnxruntime.InferenceSession(file)
    token, *state = session.get_inputs()
    now = [np.zeros(each.shape, {"tensor(int64)": np.int64, "tensor(float)": np.float32}[each.type]) for each in state]
    ids = list(prompt)
    for place in range(len(prompt) + n_new - 1):
        logits_BV, *now = session.run(None, {token.name: np.array(ids[place:place + 1])}
                                      | {each.name: value for each, value in zip(state, now, strict=True)})
        if place >= len(prompt) - 1:
            likeliest = int(logits_BV[0].argmax())
            if likeliest == end:
                break
            ids.append(likeliest)
    return ids[len(prompt):]


def main(folder: str = "small", text: str = "It was a bright cold day, and the clock") -> None:
    model, tokenizer, _ = lineartime.load_model(folder)
    prompt = [tokenizer.end_of_document, *tokenizer.encode(text)]
    export(model, FILE)
    there = decode(FILE, prompt, 600, tokenizer.end_of_document)
    here = lineartime.generate(model, [prompt], max_new_tokens=600)[0]
    print(tokenizer.decode(there))
    print(f"\nthe same {len(here)} tokens" if there == here else f"\nPyTorch: {tokenizer.decode(here)}")
    sys.exit(there != here)


if __name__ == "__main__":
    main(*sys.argv[1:])
