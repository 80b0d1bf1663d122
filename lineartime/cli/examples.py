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
    "recall": ["recall flash transformer++ --task pairs", "recall run --task text --data data"],
    "reproduce": ["reproduce lm_pg19 --scale cpu --texts TEXTS", "reproduce --plan"],
    "report": ["report lm_pg19", "report speed", "report --into page.md --images images"],
    "benchmark decode": ["benchmark decode flash transformer++ --lengths 2048,8192"],
    "benchmark step": ["benchmark step flash:compile transformer++ --contexts 512,2048,8192"],
    "benchmark memory": ["benchmark memory flash transformer++ --contexts 2048,4096"],
    "benchmark op": ["benchmark op gated_chunk_attention --contexts 2048"],
    "benchmark loss": ["benchmark loss --tokens 4096"],
    "benchmark read": ["benchmark read flash --tokens 100000"],
    "benchmark run": ["benchmark run bench --json out/bench.jsonl"],
}
"""By verb; a line that begins with another program names ours itself."""


def add_examples(app: typer.Typer, before: str = "") -> None:
    """Put the examples below the help of every verb of the program."""
    for command in app.registered_commands:
        assert command.callback is not None
        lines = EXAMPLES[before + (command.name or command.callback.__name__)]
        whole = (line if "lineartime " in line else f"lineartime {line}" for line in lines)
        command.epilog = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in whole)
    for group in app.registered_groups:
        assert group.typer_instance is not None
        add_examples(group.typer_instance, f"{group.name} ")
