#!/usr/bin/env bash
# The model that ships with the package, lineartime/models/small: a flash+ that learns to recall names, and then reads books.
# usage: studies/small.sh BOOKS OUT     BOOKS: a folder with train, validation and test books, as .txt or parquet
# Two hours of two cores. Stopped and started again, it goes on.
set -euo pipefail
books=$(realpath "$1") out=$(realpath -m "$2")
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
lineartime prepare "$books" --task pg19 --vocab-size 8192 --out "$out/books"
# Passages of the training books with names and digits: one to every 1.2 to 3 words, to 2 to 64, or to 64 to 512.
plant() {
  mkdir -p "$out/$1"
  [ -e "$out/$1/train.jsonl" ] || python -m studies.plant "$out/books" "$2" "$3" "$4" "$out/$1/train.jsonl"
}
plant dense 3000000 1.2 3
plant near 4000000 2 64
plant far 4000000 64 512
lineartime prepare "$out/dense" --task pg19 --tokenizer "$out/books" --held-out 0.01 --out "$out/dense-data"
lineartime prepare "$books" "$out/near" --task pg19 --tokenizer "$out/books" --out "$out/data"
lineartime prepare "$out/far" --task pg19 --tokenizer "$out/books" --held-out 0.01 --out "$out/far-data"
# From sparse names alone a small model learned no recall in 5.5 M tokens; from dense ones in 2.7 M, and books did not take it away.
lineartime train studies/small_names.toml --data "$out/dense-data" --out "$out/first"
two() { torchrun --standalone --nproc-per-node 2 -m lineartime train studies/small.toml "$@"; }
two --from "$out/first" --data "$out/data" --out "$out/second" --steps 935 --set warmup_steps=100 --set schedule=constant
two --from "$out/second" --data "$out/data:0.85,$out/far-data:0.15" --out "$out/third"
# The card has bits per byte; the numbers of its section "Memory" are written by hand, from these.
[ -e "$out/small" ] || lineartime export "$out/third" --out "$out/small" --about studies/small.md
lineartime evaluate "$out/small" --data "$out/data" --split test --precision bfloat16 --document-tokens 81920 \
  --contexts 512,1024,2048,4096,8192,16384,32768,65536 --out "$out/contexts.json"
python -m benchmarks recall "$out/small" --task text --data "$out/data" --json "$out/recall.jsonl"
