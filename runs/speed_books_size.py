"""Speed of the models of runs/books_2048.sh, side by side: python runs/speed_books_size.py ROWS.jsonl"""

import sys
from pathlib import Path

from lineartime.benchmark.decode import benchmark_decode, print_decode
from lineartime.benchmark.measure import append_rows
from lineartime.benchmark.step import benchmark_train, print_train
from lineartime.config import model_config
from lineartime.model import LanguageModel

SIZES = {"d_model": 256, "vocab_size": 8192, "context": 2048}
CONFIGS = {
    "flash": model_config("flash", n_layers=8, query_key_dim=64, **SIZES),
    "flash-quad": model_config("flash-quad", n_layers=8, query_key_dim=64, **SIZES),
    "transformer++": model_config("transformer++", n_layers=4, n_heads=4, **SIZES),
}

if __name__ == "__main__":
    rows = benchmark_decode({name: LanguageModel(config) for name, config in CONFIGS.items()},
                                      (1024, 2048, 4096, 8192), repeats=10)
    print_decode(rows)
    steps = benchmark_train(CONFIGS, (2048,), repeats=3, precision="bfloat16")
    print_train(steps)
    append_rows(Path(sys.argv[1]), rows + steps)
