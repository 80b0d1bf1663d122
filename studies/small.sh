#!/usr/bin/env bash
# The model that ships with the package, lineartime/models/small: a small FLASH trained on books, then exported with its card.
# usage: studies/small.sh BOOKS OUT     BOOKS: a folder with train, validation and test books, as .txt or parquet
# An hour to an hour and a half of one core. Stopped and started again, it goes on.
set -euo pipefail
books=$1 out=$2 here=$(dirname "$0")
export OMP_NUM_THREADS=1
lineartime prepare "$books" --task pg19 --vocab-size 8192 --out "$out/data"
lineartime train "$here/small.toml" --data "$out/data" --out "$out/run"
lineartime export "$out/run" --out "$out/small" --about "$here/small.md"
