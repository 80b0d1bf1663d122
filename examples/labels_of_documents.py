"""Labels of documents by transformers' own Trainer: is a text from a book or from a program?

    pip install accelerate
    python examples/labels_of_documents.py [STEPS]

The model that ships is fine-tuned whole. A linear layer reads the label from the mean over a
document's tokens, so a document may have any length.
"""

import argparse
import os
import random
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is on the network

from importlib import resources

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

import lineartime
import lineartime.hf  # transformers now knows the classes

OUT, LABELS = Path("out/examples/labels"), ["book", "program"]


def labelled_texts(n: int, n_characters: int = 600) -> list[tuple[str, int]]:
    """n texts of each kind: passages of Jane Eyre, and of a module of Python's own library."""
    book = resources.files("lineartime").joinpath("text", "jane_eyre.txt").read_text(encoding="utf-8")
    program = Path(argparse.__file__).read_text(encoding="utf-8")
    passages = [(text[i * n_characters : (i + 1) * n_characters], label)
                for label, text in enumerate((book, program)) for i in range(n)]
    random.Random(0).shuffle(passages)
    return passages


def main(steps: int = 20, out: Path = OUT, n_held_out: int = 32) -> float:
    """The share of right labels among texts that are held out."""
    folder = str(lineartime.model_folder("small"))
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2,
                                                               id2label=dict(enumerate(LABELS)))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [{**tokenizer(text), "labels": label} for text, label in labelled_texts(80)]
    trainer = Trainer(
        model,
        TrainingArguments(str(out), max_steps=steps, per_device_train_batch_size=4, learning_rate=3e-3,
                          lr_scheduler_type="linear", logging_steps=10, save_strategy="no", report_to=[],
                          disable_tqdm=True),
        train_dataset=rows[n_held_out:],
        eval_dataset=rows[:n_held_out],
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda found: {"right": float((found.predictions.argmax(-1) == found.label_ids).mean())})
    trainer.train()
    right = trainer.evaluate()["eval_right"]
    trainer.save_model(str(out))
    again = AutoModelForSequenceClassification.from_pretrained(str(out))
    text = "She shut the door, and said that the rain had stopped."
    label = again.config.id2label[int(again(**tokenizer(text, return_tensors="pt")).logits.argmax())]
    print(f"{right:.2f} of the held-out labels are right; from a {label}: {text}")
    return right


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
