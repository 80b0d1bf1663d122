"""Named cells of the benchmark and the shapes of their models, read from a TOML file."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lineartime.config import ModelConfig, model_config, parse_setting
from lineartime.errors import UsageError
from lineartime.settings import require, require_name

CELLS = Path(__file__).with_name("cells.toml")


@dataclass(frozen=True)
class CellTable:
    """Labels at contexts in types, by the names of `benchmark step`'s options."""

    name: str | None
    labels: Sequence[str]
    contexts: Sequence[int]
    precision: Sequence[str] = ("float32", "bfloat16")
    shape: str | None = None
    task: str = "wiki40b"
    tokens: int = 8192
    repeats: int = 3
    together: bool = False
    benchmark: str = "step"
    longest: dict[str, int] | None = None
    set: Sequence[str] = ()


@dataclass(frozen=True)
class CellFile:
    """What a file of cells holds."""

    tables: dict[str, CellTable]
    lists: dict[str, list[str]]
    shapes: dict[str, dict[str, Any]]

    def named(self, names: list[str]) -> list[CellTable]:
        """Tables by their names and those of lists. Raises UsageError for an unknown one."""
        for name in names:
            require_name("name of cells", name, [*self.lists, *self.tables])
        wanted = dict.fromkeys(each for name in names for each in self.lists.get(name, [name]))
        for each in wanted:
            require_name("name of cells", each, self.tables)
        return [self.tables[each] for each in wanted]

    def shape(self, name: str | None) -> dict[str, Any]:
        """The fields of a shape; none where no name is given. Raises UsageError for an unknown one."""
        if name is None:
            return {}
        require_name("shape", name, self.shapes)
        return self.shapes[name]


def read_cells(path: Path | None = None) -> CellFile:
    """The file of cells, by default the checkout's. Raises UsageError where it is not there or not one."""
    path = path or CELLS
    require(path.exists(), "no file of cells", str(path), "name one with --cells; the package's is in its repository")
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        tables = {name: CellTable(name, **fields) for name, fields in content.get("tables", {}).items()}
        return CellFile(tables, content.get("lists", {}), content.get("shapes", {}))
    except (OSError, ValueError, TypeError, AttributeError) as e:
        raise UsageError("not a file of cells", path, str(e)) from None


def shaped_config(preset: str, task: str = "wiki40b", shape: dict[str, Any] | None = None,
                  settings: Sequence[str] = ()) -> ModelConfig:
    """A preset in a shape, then with settings (NAME=VALUE).
    A field that only some models have (a chunk size, heads) is given to those."""
    plain, shape = model_config(preset, task), shape or {}
    fields = {name: value for name, value in shape.items() if not isinstance(value, dict)}
    fields |= shape.get("gau" if plain.ffn == "gau" else "pairs", {})
    fields |= dict(parse_setting(text) for text in settings)
    skipped = {"chunk_size", "chunk_parts", "chunk_pooling"} if plain.chunk_size is None else set()
    skipped |= {"n_heads"} if plain.ffn == "gau" else {"query_key_dim"}
    skipped |= {"prefix_sum"} if plain.attn_type != "linear" else set()
    return model_config(preset, task, **{name: value for name, value in fields.items() if name not in skipped})
