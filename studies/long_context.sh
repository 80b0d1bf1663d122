#!/usr/bin/env bash
# A small FLASH trained on rows of 64K tokens of books, then the same held-out tokens scored with 512 to 262,144 tokens of their
# book before them: does it use its context? docs/guides/long-context.md. About half an hour on one core, 5 GiB.
# usage: studies/long_context.sh BOOKS OUT     BOOKS: a folder with train/, validation/ and test/, one .txt per book
# The two longest books of train/ are held out with those of test/: few books are long enough for the longest context.
# Stopped and started again, it goes on.
set -euo pipefail
books=$1 out=$2
mapfile -t longest < <(find "$books/train" -name '*.txt' -printf '%s %p\n' | sort -k1,1nr -k2 | sed -n '1,2s/^[0-9]* //p')
mapfile -t train < <(find "$books/train" -name '*.txt' | sort | grep -vxF "$(printf '%s\n' "${longest[@]}")")
lineartime prepare "${train[@]}" --validation "$books/validation" --test "$books/test" --test "${longest[0]}" --test "${longest[1]}" \
  --vocab-size 4096 --out "$out/data"
lineartime train flash --size paper --data "$out/data" --out "$out/run" --context 65536 --tokens-per-step 65536 --steps 110 \
  --set d_model=256 --set n_layers=4 --set micro_batch_tokens=65536 --set learning_rate=1e-2 --set warmup_steps=10 \
  --set activation_checkpointing=true --set compile=true --set precision=bfloat16 \
  --set eval_every=55 --set eval_tokens=131072 --set save_every=5
python -m benchmarks.context_use "$out/run" --data "$out/data" --split test --precision bfloat16 \
  --contexts 512,1024,4096,16384,65536,262144 --document-tokens 262144 --out "$out/contexts.json"
