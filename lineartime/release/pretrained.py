"""The models that ship with the package: folders that `lineartime.load_model` and `transformers` open."""

from pathlib import Path

from lineartime.settings import require_name

MODELS = Path(__file__).parents[1] / "models"


def model_folder(name: str) -> Path:
    """The folder of a model that ships with the package. Raises UsageError for an unknown name."""
    require_name("shipped model", name, sorted(path.parent.name for path in MODELS.glob("*/config.json")))
    return MODELS / name
