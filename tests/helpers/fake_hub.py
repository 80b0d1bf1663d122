"""Stands for the package `datasets` where a test reads the hub; nothing is downloaded in a test."""

import types
from typing import Any


class Hub(types.ModuleType):
    """Stands for `datasets`: what is asked of it, and the records it has by name and split."""

    def __init__(self, data: dict[str, dict[str, Any]]):
        super().__init__("datasets")
        self.data, self.asked, self.bars = data, [], True  # type: ignore[var-annotated]

    def load_dataset(self, name: str, config: str | None, *, split: str, streaming: bool) -> Any:
        assert streaming and not self.bars
        self.asked.append((name, config))
        if name not in self.data:
            raise ConnectionError(f"Couldn't reach '{name}' on the Hub\n(no network)")
        if split not in self.data[name]:
            raise ValueError(f"Bad split: {split}. Available splits: {list(self.data[name])}")
        return iter(self.data[name][split])

    def are_progress_bars_disabled(self) -> bool:
        return not self.bars

    def disable_progress_bars(self) -> None:
        self.bars = False

    def enable_progress_bars(self) -> None:
        self.bars = True
