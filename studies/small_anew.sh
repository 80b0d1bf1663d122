#!/usr/bin/env bash
# Trains the model that ships with the package anew: a flash+ that first learns to recall names, then reads books.
# usage: studies/small_anew.sh BOOKS OUT     BOOKS: a folder with train, validation and test books, as .txt or parquet
# A day of one core. Stopped and started again, it goes on.
set -euo pipefail
books=$(realpath "$1") out=$(realpath -m "$2")
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
# Passages of these books in which every second word is a name with its digit; and books, a tenth of them passages with fewer names.
lineartime prepare "$books" --task pg19 --vocab-size 8192 --out "$out/books"
mkdir -p "$out/lists" "$out/planted"
[ -e "$out/lists/train.jsonl" ] || python -m studies.plant "$out/books" 3000000 1.2 3 "$out/lists/train.jsonl"
[ -e "$out/planted/train.jsonl" ] || python -m studies.plant "$out/books" 4000000 2 64 "$out/planted/train.jsonl"
lineartime prepare "$out/lists" --task pg19 --tokenizer "$out/books" --held-out 0.01 --out "$out/lists-data"
lineartime prepare "$books" "$out/planted" --task pg19 --tokenizer "$out/books" --out "$out/data"
# From sparse names alone a small model learned no recall in 5.5 M tokens; from dense ones in 2.7 M, and books did not take it away.
lineartime train studies/small_anew.toml --data "$out/lists-data" --out "$out/first"
lineartime train --from "$out/first" --data "$out/data" --out "$out/run" --size paper --context 8192 --tokens-per-step 16384 --steps 7500 \
  --set micro_batch_tokens=8192 --set document_grid=own --set warmup_steps=200 --set optimizer=muon --set muon_learning_rate=1e-2 \
  --set learning_rate=4e-3 --set schedule=wsd --set precision=bfloat16 --set compile=true --set eval_every=200 --set eval_tokens=65536 --set save_every=40
# The numbers of the card: bits per byte are in it; those of the section "Memory" are written by hand, from these.
[ -e "$out/small" ] || lineartime export "$out/run" --out "$out/small" --about studies/small_anew.md
lineartime evaluate "$out/small" --data "$out/data" --split test --precision bfloat16 --document-tokens 81920 \
  --contexts 512,1024,2048,4096,8192,16384,32768,65536 --out "$out/contexts.json"
python -m benchmarks recall "$out/small" --task text --data "$out/data" --json "$out/recall.jsonl"
