"""The model that ships, trained further by transformers' own Trainer, saved, and opened again.

    pip install accelerate
    python examples/transformers_trainer.py [STEPS]
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is on the network

from importlib import resources

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

import lineartime
import lineartime.hf  # transformers now knows the classes; without lineartime, a folder brings its own code

OUT, CONTEXT = Path("out/examples/trainer"), 512


def main(steps: int = 8, out: Path = OUT) -> tuple[float, float]:
    """The loss on rows that are held out, before training and after it."""
    folder = str(lineartime.model_folder("small"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "right"
    book = resources.files("lineartime").joinpath("text", "jane_eyre.txt").read_text(encoding="utf-8")
    ids = tokenizer(book[:200_000]).input_ids
    rows = [{"input_ids": ids[start:start + CONTEXT]} for start in range(0, len(ids), CONTEXT)]
    trainer = Trainer(
        model,
        TrainingArguments(str(out), max_steps=steps, per_device_train_batch_size=2, learning_rate=2e-4,
                          lr_scheduler_type="linear", warmup_steps=2, weight_decay=0.01, logging_steps=1,
                          save_strategy="no", report_to=[], disable_tqdm=True),
        train_dataset=rows[8:],
        eval_dataset=rows[:8],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False))  # padding is no label
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(out))
    tokenizer.save_pretrained(str(out))
    again = AutoModelForCausalLM.from_pretrained(str(out))
    prompt = tokenizer("Reader, I", return_tensors="pt")
    text = tokenizer.decode(again.generate(**prompt, max_new_tokens=20, do_sample=False)[0], skip_special_tokens=True)
    print(f"{before:.3f} nats per token before training, {after:.3f} after it\n{text}")
    return before, after


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
