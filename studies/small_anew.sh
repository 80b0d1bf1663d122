#!/usr/bin/env bash
# Trains the model that ships with the package anew: a flash+ on books, some with planted facts, then exported with its card.
# usage: studies/small_anew.sh BOOKS OUT     BOOKS: a folder with train, validation and test books, as .txt or parquet
# A day of one core. Stopped and started again, it goes on.
set -euo pipefail
books=$(realpath "$1") out=$(realpath -m "$2")
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
# A tenth of what is read are passages with facts; the tokenizer is that of the books alone.
lineartime prepare "$books" --task pg19 --vocab-size 8192 --out "$out/books"
[ -e "$out/planted/train.jsonl" ] || python -m studies.plant "$out/books" 0.1 "$out/planted/train.jsonl"
lineartime prepare "$books" "$out/planted" --task pg19 --tokenizer "$out/books" --out "$out/data"
lineartime train studies/small_anew.toml --data "$out/data" --out "$out/run"
# The numbers of the card: bits per byte are in it; those of the section "Memory" are written by hand, from these.
[ -e "$out/small" ] || lineartime export "$out/run" --out "$out/small" --about studies/small_anew.md
lineartime evaluate "$out/small" --data "$out/data" --split test --precision bfloat16 --document-tokens 81920 \
  --contexts 512,1024,2048,4096,8192,16384,32768,65536 --out "$out/contexts.json"
python -m benchmarks recall "$out/small" --task text --data "$out/data" --json "$out/recall.jsonl"
