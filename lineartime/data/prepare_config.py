"""The settings of `prepare`, for Python and for the shell. Nothing heavy is imported."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from lineartime.base.settings import check_fields, require, require_name
from lineartime.config import LARGEST, TASKS, check_bounds

DEFAULT_VOCAB_SIZE = 32_000
SAMPLE = Path(__file__).parents[1] / "text" / "jane_eyre.txt"  # the book that ships with the package


@dataclass(frozen=True)
class PrepareSettings:
    """What text is prepared, and how. Raises UsageError for wrong values, alone or together."""

    inputs: Annotated[tuple[str, ...], "Text to read: .txt, .md, .csv, .tsv, .jsonl, .json (each also packed as .gz, "
                      ".bz2, .xz or .zst) or .parquet; a file of another name, if it is text; folders of them; "
                      "addresses such as s3://BUCKET/FOLDER; hub:NAME/SPLIT, hub:NAME:CONFIGURATION/SPLIT[:RECORDS]; "
                      "or `-` for one document on stdin.", "INPUTS"]
    out: Annotated[str, "Folder for the prepared tokens, or its address in a store."]
    sample: Annotated[bool, "Read the book that ships with the package instead."] = False
    tokenizer: Annotated[str, "train (make one from this text), bytes, a tokenizer.json, a folder that has one "
                         "or that transformers opens, a run, an exported folder or `small`; or the address of a folder."
                         ] = "train"
    vocab_size: Annotated[int | None, "Tokens of the tokenizer that is trained; by default 32000."] = None
    held_out: Annotated[float | None, "Share of the text to keep for validation, such as 0.05: whole documents at "
                        "equal distances, or the end of a single one."] = None
    validation: Annotated[tuple[str, ...], "Text for validation; may be given again."] = ()
    test: Annotated[tuple[str, ...], "Text for a test split; may be given again."] = ()
    field: Annotated[str, "Field or column that holds the text.", "--text-field"] = "text"
    task: Annotated[str | None, "Read the text as the paper's data set c4, wiki40b or pg19."] = None
    mlm: Annotated[bool, "For masked language modelling: add the tokens [MASK] and [SEP]. Always so with --task c4."
                   ] = False
    jobs: Annotated[int | None, "Processes that tokenise; by default one for each core."] = None
    # What follows has no option on the command line.
    train_characters: int = 1 << 28  # most characters that the tokenizer is trained on, from pieces at equal distances
    shard_tokens: int = 1 << 27
    unit_bytes: int = 1 << 21  # How much text a process takes at once, about. The result does not depend on it.

    def __post_init__(self) -> None:
        check_fields(self)
        require(self.held_out is None or 0 < self.held_out < 1, "wrong value", f"held_out = {self.held_out}",
                "it lies between 0 and 1")
        check_bounds(self)
        if self.task is not None:
            require_name("task", self.task, TASKS)
        there = f"{len(self.inputs)} and the sample" if self.sample else "there are none"
        require(self.sample != bool(self.inputs), "wrong inputs", there, "name files or folders, or ask for the sample")
        require(sum(self.names.values(), ()).count("-") <= 1, "stdin is read once", "-", "name it once")
        if self.vocab_size is not None:
            require(self.tokenizer == "train", "this tokenizer has its own vocabulary",
                    f"--tokenizer {self.tokenizer} --vocab-size {self.vocab_size}", "leave out --vocab-size")
            smallest = 259 if self.is_masked else 257  # bytes and special tokens
            require(smallest <= self.vocab_size <= LARGEST["vocab_size"], "wrong value",
                    f"vocab_size = {self.vocab_size}", f"it takes {smallest} to {LARGEST['vocab_size']:,}")

    @property
    def is_masked(self) -> bool:
        """Whether the tokenizer has [MASK] and [SEP]."""
        return self.mlm or self.task == "c4"

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """The text of each split."""
        return {"train": self.inputs, "validation": self.validation, "test": self.test}

    @property
    def from_hub(self) -> list[str]:
        """The text that is on the hub, as the command line has it."""
        return [name if split == "train" else f"--{split} {name}"
                for split, names in self.names.items() for name in names if name.startswith("hub:")]

    @property
    def for_manifest(self) -> dict[str, Any]:
        """The settings that decide what is written. A tokenizer that is there puts in its hash."""
        settings: dict[str, Any] = {"held_out": self.held_out, "field": self.field, "shard_tokens": self.shard_tokens}
        rarer = {"mlm": self.is_masked, "task": self.task, "hub": " ".join(self.from_hub)}
        settings |= {name: value for name, value in rarer.items() if value} | {"tokenizer": self.tokenizer}
        if self.tokenizer == "train":
            settings |= {"vocab_size": self.vocab_size or DEFAULT_VOCAB_SIZE, "train_characters": self.train_characters}
        return settings
