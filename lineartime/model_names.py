"""Models by the name that a person gives: one that ships with the package, or a folder."""

import hashlib
import json
import logging
from pathlib import Path

from lineartime.base.errors import UsageError
from lineartime.base.settings import require, require_name
from lineartime.base.stores import cached, is_address, reading, store_of
from lineartime.run_files import best_run

MODELS = Path(__file__).parent / "models"

logger = logging.getLogger(__name__)


def shipped_models() -> list[str]:
    """The names of the models that ship with the package."""
    return sorted(path.parent.name for path in MODELS.glob("*/config.json"))


def model_folder(name: str) -> Path:
    """The folder of a model that ships with the package. Raises UsageError for an unknown name."""
    require_name("shipped model", name, shipped_models())
    return MODELS / name


def named_folder(name: str | Path) -> Path:
    """The folder of a shipped model by its name, a str; any other folder by its path; or a copy, in the cache, of an
    exported folder in a store by its address. A shipped model comes before a folder of its name, with a warning. Raises
    UsageError if there is none."""
    if is_address(name):
        return copied(str(name), (".json", ".safetensors"))
    is_shipped = name in shipped_models()
    folder = MODELS / name if is_shipped else Path(name)
    if is_shipped and Path(name).is_dir():
        logger.warning(f"{name} is the model that ships with the package; write ./{name} for the folder")
    require(folder.is_dir(), "no weights here", str(name),
            f"give a run, a checkpoint, an exported folder, or a shipped model: {', '.join(shipped_models())}")
    return folder


def weights_folder(name: str) -> Path:
    """The folder with the configuration, the tokenizer and the weights of `named_folder`: itself, or of a run the
    newest checkpoint that has a configuration. Of an address all but the weights are there. Raises UsageError if there
    is none."""
    folder = copied(name, (".json",)) if is_address(name) else best_run(named_folder(name))
    saved = sorted(folder.glob("step-*"), key=lambda path: (len(path.name), path.name), reverse=True)
    for each in (folder, *saved):
        if (each / "config.json").is_file():
            return each
    raise UsageError("no weights here", name, "give a run that has saved a checkpoint, or another folder of weights")


def copied(address: str, endings: tuple[str, ...], needed: str = "config.json") -> Path:
    """A copy, in the cache, of the files of a folder in a store that have these endings. Raises UsageError unless the
    file `needed` is there."""
    store, path = store_of(address)
    store.invalidate_cache()
    with reading(address):
        found = {each["name"].rpartition("/")[2]: each for each in store.ls(path, detail=True)}
    require(needed in found, f"no {needed} here", address, "give the address of an exported folder")
    state = json.dumps([address, found], default=str, sort_keys=True)  # sizes, times, hashes: what the store says
    sizes = {name: each["size"] for name, each in found.items() if name.endswith(endings)}
    return cached(address, sizes, hashlib.sha256(state.encode()).hexdigest())
