#!/usr/bin/env bash
# FLASH, FLASH-Quad, Transformer++ and FLASH without its linear part on books at context 2048: benchmarks/tables/results.md, "Books at context 2,048".
# usage: studies/books_2048.sh BOOKS OUT     BOOKS: a folder with train/, validation/ and test/, one .txt per book
# Two runs at a time, one thread each; about an hour and a half on two idle cores. Stopped and started again, it goes on.
set -euo pipefail
books=$1 out=$2
export OMP_NUM_THREADS=1
lineartime prepare "$books" --out "$out/data" --vocab-size 8192

run() { # MODEL LEARNING_RATE STEPS
  local name=$1 model=$1 fields="--set n_layers=8 --set query_key_dim=64"
  case $name in
    flash) fields+=" --set chunk_size=256" ;;
    flash-local) model=flash fields+=" --set chunk_size=256 --set chunk_parts=local" ;;
    transformer++) fields="--set n_layers=4 --set n_heads=4" ;;
  esac
  # shellcheck disable=SC2086  # the fields are words
  lineartime train "$model" --size paper --data "$out/data" --out "$out/$name-$2-$3" --context 2048 --tokens-per-step 8192 --steps "$3" \
    --set d_model=256 $fields --set micro_batch_tokens=2048 --set learning_rate="$2" --set warmup_steps=$(($3 / 10)) \
    --set precision=bfloat16 --set eval_every=100 --set eval_tokens=65536 --set save_every=100
}
export -f run
export out

search() { printf '%s 100\n' "flash "{2e-3,4e-3,8e-3} "transformer++ "{1e-3,2e-3,4e-3,8e-3} "flash-quad "{2e-3,4e-3}; }
final() { printf '%s 400\n' "flash-quad 4e-3" "flash 8e-3" "transformer++ 8e-3" "transformer++ 2e-3" "flash-local 8e-3"; }
for part in search final; do
  $part | xargs -P 2 -I{} bash -euc 'run {}'
done
lineartime plot FLASH="$out/flash-8e-3-400" FLASH-Quad="$out/flash-quad-4e-3-400" \
  Transformer++="$out/transformer++-2e-3-400" "FLASH without its linear part"="$out/flash-local-8e-3-400" --out "$out/books_2048.png"
