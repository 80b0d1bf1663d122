"""A training loop without our trainer: prepared text, a FLASH, AdamW, and a held-out score before
and after.

    python examples/train_loop.py [STEPS]

Prepared text is memory-mapped, and the rows of a step are a function of (seed, step): a loop that
is stopped can go on at any step without a state of its own for the data."""

import sys
from pathlib import Path

import torch

import lineartime
from lineartime.data.tokens import batch_rows

DATA, CONTEXT, ROWS = Path("out/examples/jane-eyre"), 256, 8


def main(steps: int = 60, data: Path = DATA) -> tuple[float, float]:
    """Train, print the loss as it falls; the held-out bits per byte before and after."""
    if not data.exists():
        lineartime.prepare([], data, sample=True, vocab_size=1024, held_out=0.1)  # the book that ships with the package
    train, validation = lineartime.open_split(data, "train"), lineartime.open_split(data, "validation")
    torch.manual_seed(0)
    config = lineartime.model_config(
        "flash", n_layers=4, d_model=128, query_key_dim=32, chunk_size=64, context=CONTEXT, init_std=0.05,
        vocab_size=train.vocab_size, end_of_document=train.end_of_document)  # documents of a row do not see each other
    model = lineartime.LanguageModel(config)
    before = lineartime.evaluate(model, validation).bits_per_byte
    # As in the paper, matrices and embeddings decay; vectors do not.
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.01},
                                   {"params": vectors, "weight_decay": 0.0}], lr=4e-3, betas=(0.9, 0.95))
    warmup = max(steps // 5, 1)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min((step + 1) / warmup, (steps - step) / max(steps - warmup, 1))
        rows_BL = batch_rows(train, seed=0, step=step, rows_per_step=ROWS, context=CONTEXT)
        ids_BL = torch.from_numpy(rows_BL)
        # With targets the model returns -ln p of each, and never holds the logits of all tokens at
        # once.
        loss = model(ids_BL[:, :-1], targets=ids_BL[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 9:
            print(f"step {step + 1} of {steps}: {loss.item():.3f} nats per token", flush=True)
    after = lineartime.evaluate(model, validation).bits_per_byte
    print(f"held out: {before:.2f} bits per byte before, {after:.2f} after")
    return before, after


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
