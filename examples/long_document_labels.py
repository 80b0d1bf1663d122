"""Labels of long documents: the model that ships learns to tell text from the same text with its sentences reversed.

    pip install 'PATH[documents]'
    python examples/long_document_labels.py [EPOCHS]

A document is read whole, in windows whose state is carried on, so its length does not matter. Each learning rate is a
run; the best is kept, and the same command goes on where it stopped.
"""

import csv
import random
import sys
from importlib import resources
from pathlib import Path

import lineartime

OUT = Path("out/examples/labels")


def write_documents(folder: Path, n_words: int) -> tuple[Path, Path]:
    """Passages of the book that ships, half of them with each line's words in reverse; to train on and held out."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = resources.files("lineartime").joinpath("text", "jane_eyre.txt").read_text(encoding="utf-8").splitlines()
    draw, documents, start = random.Random(0), [], 200
    while len(documents) < 36:
        passage: list[str] = []
        while len(" ".join(passage).split()) < n_words:
            passage.append(lines[start])
            start += 1
        label = draw.choice(["forward", "backward"])
        shown = passage if label == "forward" else [" ".join(reversed(line.split())) for line in passage]
        documents.append(("\n".join(shown), label))
    files = folder / "train.csv", folder / "held-out.csv"
    for file, rows in zip(files, (documents[:24], documents[24:]), strict=True):
        with file.open("w", newline="", encoding="utf-8") as out:
            csv.writer(out).writerows([("text", "label"), *rows])
    return files


def main(epochs: float = 2, out: Path = OUT, n_words: int = 250) -> float:
    """The share of held-out documents whose label is right."""
    train, held_out = write_documents(out, n_words)
    lineartime.finetune(lineartime.FineTuning(
        run="small", data=(train,), validation=(held_out,), out=out / "runs", task="classify", learning_rates=(1e-3,),
        epochs=epochs, context=2048, settings={"tokens_per_step": 2048}))
    model, tokenizer, _ = lineartime.load_classifier(out / "runs")
    with held_out.open(encoding="utf-8", newline="") as file:
        documents = list(csv.DictReader(file))
    found = lineartime.classify(model, tokenizer, [document["text"] for document in documents])
    right = sum(each.label == document["label"] for each, document in zip(found, documents, strict=True))
    print(f"{right} of {len(documents)} held-out documents are right; the first is {found[0].label} "
          f"with probability {max(found[0].scores.values()):.2f}")
    return right / len(documents)


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
