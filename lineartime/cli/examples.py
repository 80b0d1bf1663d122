"""Examples of each verb, which its --help ends with."""

import typer

EXAMPLES = {
    "prepare": ["prepare books/ --out data --held-out 0.05 --vocab-size 8192",
                "cat notes.txt | lineartime prepare - --out data --held-out 0.05",
                "prepare --sample --out data --held-out 0.1 --vocab-size 1024"],
    "train": ["train flash --data data --out run",
              "train flash --data data --out run --size small --set seed=1",
              "train flash --size paper --task pg19 --data data --out run"],
    "evaluate": ["evaluate run --data data",
                 "evaluate run --data data --contexts 512,1024,2048"],
    "finetune": ["finetune mlm --questions train.json --validation dev.json --out qa --context 512",
                 "finetune small --task classify --documents train.csv --validation dev.csv --out labels",
                 "finetune small --task embed --documents texts/ --validation held-out/ --out vectors"],
    "answer": ['answer qa --question "Who wrote it?" --document book.txt'],
    "embed": ["embed small books/ --out vectors.npy", "cat book.txt | lineartime embed run -"],
    "classify": ["classify labels reviews.csv --out found.jsonl", "cat book.txt | lineartime classify labels -"],
    "generate": ['generate run "Once upon a time" --temperature 0.8',
                 'generate small "It was a dark and stormy night, and"',
                 'echo "Reader, I" | lineartime generate run -'],
    "export": ["export run --out folder"],
    "info": ["info flash --set context=8192", "info flash --plan 4", "info data --verify"],
    "plot": ["plot run", "plot A=run1 B=run2 --out curves.png"],
    "models": ["models"],
    "config": ["config", "config transformer++ --size tiny", "config flash --task c4"],
}
"""By verb; a line that begins with another program names ours itself."""


def add_examples(app: typer.Typer, program: str = "lineartime", examples: dict[str, list[str]] = EXAMPLES) -> None:
    """Put the examples below the help of every verb of a program."""
    for command in app.registered_commands:
        assert command.callback is not None
        lines = examples[command.name or command.callback.__name__]
        whole = (line if f"{program} " in line else f"{program} {line}" for line in lines)
        command.epilog = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in whole)
