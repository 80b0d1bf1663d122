#!/usr/bin/env bash
# A small FLASH that answers questions: pretrained on Wikipedia text, fine-tuned on TriviaQA. With SQuAD beside it:
# benchmarks/tables/results.md, "Questions from Wikipedia text". About 25 minutes on two idle cores. Stopped and started again, it goes on.
# usage: studies/questions_mini.sh WIKI TRIVIAQA OUT
#   WIKI: a folder of Wiki-40B parquet files     TRIVIAQA: a folder with qa/wikipedia-{train,dev}.json and evidence/
set -euo pipefail
wiki=$1 triviaqa=$2 out=$3
lineartime prepare "$wiki" --task wiki40b --mlm --vocab-size 8192 --out "$out/data"
lineartime train flash --size paper --task wiki40b --data "$out/data" --out "$out/mlm" --context 512 --tokens-per-step 8192 --steps 1100 \
  --set causal=false --set n_layers=6 --set d_model=256 --set query_key_dim=64 --set chunk_size=128 --set precision=bfloat16 \
  --set micro_batch_tokens=8192 --set learning_rate=4e-3 --set clip=1.0 --set warmup_steps=100 \
  --set eval_every=275 --set eval_tokens=50000 --set save_every=275
lineartime finetune "$out/mlm" --questions "$triviaqa/qa/wikipedia-train.json" \
  --validation "$triviaqa/qa/wikipedia-dev.json" --out "$out/questions" --learning-rates 1e-3,5e-4 --context 512 --epochs 2 \
  --negatives 0.1 --set tokens_per_step=8192 --set micro_batch_tokens=8192 --set eval_tokens=30000 --set precision=bfloat16
lineartime evaluate "$out/questions" --questions "$triviaqa/qa/wikipedia-dev.json" --precision bfloat16
