"""The settings of `prepare`, for Python and for the shell. Nothing heavy is imported."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lineartime.config import TASKS
from lineartime.data.read_text import MAX_LINE_BYTES
from lineartime.settings import require, require_name

DEFAULT_VOCAB_SIZE = 32_000
UNIT_CHARACTERS = 1 << 23


@dataclass(frozen=True)
class PrepareSettings:
    """What text is prepared, and how. Raises UsageError for wrong values, and for settings that exclude each other."""

    inputs: Annotated[tuple[Path, ...], "Text to read: .txt, .md, .csv, .tsv, .jsonl, .json (each also packed as .gz, "
                      ".bz2, .xz or .zst) or .parquet; or folders of them.", "INPUTS"]
    out: Annotated[Path, "Folder for the prepared tokens."]
    sample: Annotated[bool, "Read the book that ships with the package instead."] = False
    tokenizer: Annotated[str | Path, "train (make one from this text), bytes, a tokenizer.json, or a run, an exported "
                         "folder or `small`, whose tokenizer is taken."] = "train"
    add_tokens: Annotated[Path | None, "File with tokens to add to a tokenizer that is there, one in each line."] = None
    vocab_size: Annotated[int | None, "Tokens of the tokenizer that is trained; by default 32000."] = None
    held_out: Annotated[float | None, "Share of the text to keep for validation, such as 0.05: whole documents at "
                        "equal distances, or the end of a single one."] = None
    validation: Annotated[tuple[Path, ...], "Text for validation; may be given again."] = ()
    test: Annotated[tuple[Path, ...], "Text for a test split; may be given again."] = ()
    field: Annotated[str, "Field or column that holds the text.", "--text-field"] = "text"
    task: Annotated[str | None, "Read the text as the paper's data set c4, wiki40b or pg19."] = None
    hub: Annotated[bool, "Read the task's data set from the Hugging Face hub, with `datasets`."] = False
    documents: Annotated[int | None, "With --hub: read only so many documents of each split."] = None
    mlm: Annotated[bool, "For masked language modelling: add the tokens [MASK] and [SEP]. Always so with --task c4."
                   ] = False
    jobs: Annotated[int | None, "Processes that tokenise; by default one for each core."] = None
    part: Annotated[str | None, "Prepare part K of N, on one of N machines; needs --tokenizer.", "--part K/N"] = None
    # What follows has no option on the command line.
    train_characters: int = 1 << 28
    """The tokenizer is trained on at most about so many characters, from pieces at equal distances."""
    shard_tokens: int = 1 << 27
    """Tokens in a file."""
    max_line_bytes: int = MAX_LINE_BYTES
    """Longest line of JSON."""
    unit_characters: int = UNIT_CHARACTERS
    """What a process takes at once. It does not change the result."""

    def __post_init__(self) -> None:
        require(self.held_out is None or 0 < self.held_out < 1, "wrong value", f"held_out = {self.held_out}",
                "it lies between 0 and 1")
        for name in ("jobs", "train_characters", "shard_tokens", "unit_characters", "max_line_bytes", "documents"):
            value = getattr(self, name)
            require(value is None or value >= 1, "wrong value", f"{name} = {value}", "it takes 1 or more")
        if self.task is not None:
            require_name("task", self.task, TASKS)
        self._check_inputs()
        self._check_tokenizer()

    def _check_inputs(self) -> None:
        """Raise UsageError unless the text comes from files, or is the sample, or comes from the hub."""
        if self.hub:
            require(self.task is not None, "the hub has several data sets", "none is named",
                    f"give --task, one of {', '.join(TASKS)}")
            others = self.inputs or self.sample or self.validation or self.test or self.held_out
            require(not others, "wrong inputs", "the hub and others", "a data set of the hub comes with its splits")
            require(self.part is None, "the hub is not read in parts", f"--part {self.part}", "leave out --part")
            return
        require(self.documents is None, "only the hub is read in part", f"documents = {self.documents}", "leave it out")
        require(self.sample != bool(self.inputs), "wrong inputs",
                f"{len(self.inputs)} and the sample" if self.sample else "there are none",
                "name files or folders, or ask for the sample")

    def _check_tokenizer(self) -> None:
        """Raise UsageError for what goes with a tokenizer that is there, and not with one that is trained."""
        if self.tokenizer == "train":
            require(self.add_tokens is None, "tokens are added to a tokenizer that is there", str(self.add_tokens),
                    "name it: --tokenizer RUN")
            require(self.share is None, "a part needs a tokenizer that is there", f"--part {self.part}",
                    "make one from some of the text with `lineartime prepare SOME --out DATA`, and name it: "
                    "--tokenizer DATA/tokenizer.json")

    @property
    def share(self) -> tuple[int, int] | None:
        """The numbers of `part`: of 2/8, the second of eight parts. Raises UsageError for another form."""
        if self.part is None:
            return None
        match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", self.part)
        number, of = (int(match[1]), int(match[2])) if match else (0, 0)
        require(1 <= number <= of, "wrong value", f"part = {self.part}", "2/8 is the second of eight parts")
        return number, of

    @property
    def is_masked(self) -> bool:
        """Whether the tokenizer has [MASK] and [SEP]."""
        return self.mlm or self.task == "c4"

    @property
    def n_jobs(self) -> int:
        """Processes: by default one for each core that this process may use."""
        return self.jobs or len(os.sched_getaffinity(0))
