"""Folders of runs and models: their files, and which folder a name means. Imports no torch."""

import hashlib
import json
import logging
import math
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from lineartime.base.errors import CheckpointError, UsageError, found_in
from lineartime.base.files import damaged, json_sha256, read_json, read_json_lines, write_json
from lineartime.base.settings import require, require_name
from lineartime.base.stores import Name, cached, is_address, is_as_written, reading, store_of
from lineartime.config import MODEL_FIELDS, REMOVED, REMOVED_AT_START, ModelConfig, TrainConfig, stored_config, to_dict

RUN_FILE, METRICS_FILE, RESULT_FILE = "run.json", "metrics.jsonl", "result.json"
"""What a run is, the numbers of its steps, and its scores at the end."""
CONFIG_FILE = "config.json"
WEIGHTS, WEIGHTS_FILE = "model", "model.safetensors"
OPTIMIZER = "optimizer"  # name of the moments: one process has `optimizer.safetensors`, several have a file each
QUESTION_ANSWERING = "LineartimeForQuestionAnswering"
STEP = re.compile("step-([0-9]{8}|[1-9][0-9]{8,})")  # see `step_name`
MODELS = Path(__file__).parent / "models"

logger = logging.getLogger(__name__)


def require_run(out: Path) -> None:
    """Raise UsageError unless this is the folder of a run."""
    require(not (out / "adapter_config.json").exists(), "an adapter of PEFT, without the model", str(out),
            "open it with peft.PeftModel, then merge_and_unload and save_pretrained write a folder for lineartime")
    require((out / RUN_FILE).exists(), "not a run", str(out), "give the --out folder of `lineartime train`")


def read_run(out: Path) -> dict[str, Any]:
    """A run's description, in which a field that is newer than the run has its default. Raises
    UsageError if it is missing, CheckpointError if it is damaged."""
    require_run(out)
    run = read_json(out / RUN_FILE)
    with damaged(out / RUN_FILE):
        if not all(isinstance(run[name], str) for name in ("id", "preset", "task", "data")):
            raise ValueError("its id, preset, task or data is no text")
        models = ("model", "from_model") if "from" in run else ("model",)
        return run | {name: to_dict(stored_config(ModelConfig(), run[name])) for name in models} | {
            "train": to_dict(stored_config(TrainConfig(), run["train"]))}


def saved_run(out: Path) -> dict[str, Any]:
    """The description of the run that a folder holds; empty if it has saved nothing yet, or is
    damaged, which `Run` reports."""
    if (out / RESULT_FILE).exists() or saved_steps(out):
        with suppress(CheckpointError, UsageError):
            return read_run(out)
    return {}


def step_name(step: int) -> str:
    """The name of a checkpoint's folder, which `STEP` matches."""
    return f"step-{step:08d}"


def saved_steps(out: Path) -> list[int]:
    """Steps of the entries of a folder that are named like checkpoints, highest first."""
    return sorted((int(found[1]) for path in out.glob("step-*") if (found := STEP.fullmatch(path.name))), reverse=True)


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """The metrics of a run, if there are any, without a last line that was cut off. Raises
    DataError for any other line that is damaged."""
    def parse(record: Any) -> dict[str, Any]:
        losses = [record["held_out"]["loss"]] if "held_out" in record else [record["loss"], record["learning_rate"]]
        require_numbers(record["step"], record["clock"]["time"], *losses)
        return record

    path = out / METRICS_FILE
    return read_json_lines(path, parse, "a line of metrics") if path.exists() else []


def write_result(out: Path, result: dict[str, Any]) -> None:
    """Write a result file, which ends with the SHA-256 of the rest. Raises ResourceError."""
    write_json(out / RESULT_FILE, result | {"sha256": json_sha256(result)})


def read_result(out: Path) -> dict[str, Any]:
    """A completed run's result. Raises CheckpointError if it is missing, wrong or another run's."""
    run, result = read_run(out), read_whole_result(out)
    with damaged(out / RESULT_FILE):
        require_numbers(result.get("held_out", result)["loss"])
        if result["run"] != run["id"] or result["steps"] != run["train"]["steps"]:
            raise ValueError(f"it is the result of another run than that of {RUN_FILE}")
    return result


def read_fine_tuning(out: Path) -> dict[str, Any]:
    """The result of a completed folder of `lineartime finetune`. Raises CheckpointError."""
    result = read_whole_result(out)
    with damaged(out / RESULT_FILE):
        if result["best"] not in [f"lr-{each}" for each in result["learning_rates"]]:
            raise ValueError("it names no best run")
    return result


def read_whole_result(out: Path) -> dict[str, Any]:
    """What `write_result` or an older version, without the hash, wrote. Raises CheckpointError."""
    result = read_json(out / RESULT_FILE)
    with damaged(out / RESULT_FILE):
        if result.pop("sha256", None) not in (None, json_sha256(result)):
            raise ValueError("a field was lost or changed; delete the file, and the same command scores anew")
    return result


def best_run(out: Path) -> Path:
    """The best run in a completed folder of `lineartime finetune`; any other folder as it is.
    Raises CheckpointError for a damaged folder."""
    if (out / RUN_FILE).exists() or not (out / RESULT_FILE).exists():
        return out
    best = out / read_fine_tuning(out)["best"]
    require((best / RUN_FILE).exists(), "damaged", out / RESULT_FILE, "the best run is not there", CheckpointError)
    return best


def require_numbers(*values: Any) -> None:
    """Raise ValueError or ArithmeticError unless all values of a JSON file are finite numbers."""
    for value in values:
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ValueError(f"{value!a:.40} is no number")


def model_config_json(config: ModelConfig, kind: str | None = None, **more: Any) -> str:
    """The text of a model's `config.json`. kind: the class that `transformers` loads, by default
    the language model's. more: further fields."""
    special = {"bos_token_id": config.end_of_document, "eos_token_id": config.end_of_document,
               "pad_token_id": config.vocab_size if config.causal else config.end_of_document}
    kind = kind or ("LineartimeForCausalLM" if config.causal else "LineartimeForMaskedLM")
    return json.dumps({"model_type": "lineartime", "architectures": [kind], "dtype": "float32",
                       "tie_word_embeddings": True, **special, **to_dict(config), **more}, indent=1) + "\n"


def read_config(folder: Path) -> tuple[ModelConfig, str]:
    """The model of a folder of weights, and the class that `transformers` loads, or "". Raises
    CheckpointError as `read_json` does, UsageError for another library's model, and as
    `stored_config` does. All name the file."""
    path = folder / CONFIG_FILE
    fields = read_json(path)
    require(fields.get("model_type") == "lineartime", "not a lineartime model", str(path))
    with found_in(path):
        kinds = fields.get("architectures")
        return model_config_of(fields), str(kinds[0]) if isinstance(kinds, list) and kinds else ""


def model_config_of(fields: dict[str, Any]) -> ModelConfig:
    """The model that the fields of a `config.json` describe. Raises as `stored_config` does."""
    kept = {*MODEL_FIELDS, *REMOVED} - {*REMOVED_AT_START}
    return stored_config(ModelConfig(), {name: value for name, value in fields.items() if name in kept})


def shipped_models() -> list[str]:
    """The names of the models that ship with the package."""
    return sorted(path.parent.name for path in MODELS.glob("*/config.json"))


def model_folder(name: str) -> Path:
    """The folder of a model that ships with the package. Raises UsageError for an unknown name."""
    require_name("shipped model", name, shipped_models())
    return MODELS / name


def named_folder(name: Name) -> Path:
    """The folder of a shipped model by its name, a str; any other folder by its path; or a copy, in
    the cache, of an exported folder in a store by its address. A shipped model comes before a
    folder of its name, with a warning. Raises UsageError if there is none."""
    if is_address(name):
        return copied(str(name), (".json", ".safetensors"))
    if name in shipped_models():
        if Path(name).is_dir():
            logger.warning(f"{name} is the model that ships with the package; write ./{name} for the folder")
        return MODELS / name
    folder = Path(name)
    require(folder.is_dir(), "no weights here", name,
            f"give a run, a checkpoint, an exported folder, or a shipped model: {', '.join(shipped_models())}")
    return folder


def weights_folder(name: str) -> Path:
    """The folder with the configuration and the tokenizer of `named_folder`: itself, or a run's
    newest checkpoint whose JSON files are as they were written. Weights at an address stay there.
    Raises UsageError, or CheckpointError where all are damaged."""
    folder = copied(name, (".json",)) if is_address(name) else best_run(named_folder(name))
    if (folder / CONFIG_FILE).is_file():
        return folder
    saved = [folder / step_name(step) for step in saved_steps(folder)]
    for each in saved:
        with suppress(CheckpointError, LookupError, AttributeError):
            files = read_json(each / "MANIFEST.json")["files"]
            if all(is_as_written(each / own, entry) for own, entry in files.items() if own.endswith(".json")):
                return each
    require(not saved, "damaged checkpoint", saved[0] if saved else name, "restore one from a copy", CheckpointError)
    raise UsageError("no weights here", name, "give a run that has saved a checkpoint, or another folder of weights")


def copied(address: str, endings: tuple[str, ...], needed: str = CONFIG_FILE) -> Path:
    """A copy, in the cache, of the files of a folder in a store that have these endings. Raises
    UsageError unless the file `needed` is there."""
    with reading(address):
        store, path = store_of(address)
        store.invalidate_cache()
        found = {each["name"].rpartition("/")[2]: each for each in store.ls(path, detail=True)}
    require(needed in found, f"no {needed} here", address, "give the address of an exported folder")
    state = json.dumps([address, found], default=str, sort_keys=True)  # sizes, times, hashes: what the store says
    sizes = {name: each["size"] for name, each in found.items() if name.endswith(endings)}
    return cached(address, sizes, hashlib.sha256(state.encode()).hexdigest())
