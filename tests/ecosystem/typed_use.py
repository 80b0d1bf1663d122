"""A program that uses the public names with types. `make wheel` checks it against the installed
package, by mypy --strict and by pyright; it is not run."""

from pathlib import Path

import torch
from torch import Tensor

import lineartime
from lineartime import FineTuning
from lineartime.hf import LineartimeConfig, LineartimeForCausalLM

names: list[str] = [lineartime.__version__, *lineartime.PRESETS]
config: lineartime.ModelConfig = lineartime.model_config("flash", n_layers=2, d_model=64)
model: lineartime.LanguageModel = lineartime.LanguageModel(config)
layer: lineartime.GatedAttentionUnit = lineartime.GatedAttentionUnit(config)
block: tuple[torch.nn.Module, torch.nn.Module] = (lineartime.MultiHeadAttention(), lineartime.FeedForward())
logits_BTV: Tensor = model(torch.zeros(1, 8, dtype=torch.long))


def learn(texts: Path, out: Path) -> lineartime.TrainConfig:
    lineartime.prepare([texts], out / "data", held_out=0.1)
    done = lineartime.train({"model": "flash", "data": str(out / "data"), "out": str(out / "run"), "steps": 10})
    print(done.scores["held_out"]["loss"])
    return done.config.train


def use(run: Path) -> list[list[int]]:
    opened, tokenizer, _ = lineartime.load_model(run)
    ids: list[int] = tokenizer.encode("Once more")
    decode = lineartime.DecodeStep(opened)
    _, state = decode(torch.tensor(ids[:1]), decode.empty_state(1))
    sizes: dict[str, torch.Size] = {name: tensor.shape for name, tensor in state.items()}
    texts: list[str] = lineartime.generate(opened, ["Once more"], tokenizer=tokenizer, max_new_tokens=5)
    print(sizes, texts)
    return lineartime.generate(opened, [ids], max_new_tokens=5, temperature=0.8)


def judge(run: Path, data: Path, questions: Path) -> float:
    plan = FineTuning(run, (questions,), (questions,), data)
    split, opened = lineartime.open_split(data, "validation"), lineartime.load_model(run)[0]
    print(lineartime.load_span_model(run)[1])
    print(lineartime.read_questions([questions]), lineartime.finetune(plan))
    return lineartime.evaluate(opened, split, context=256).loss


def elsewhere() -> None:
    LineartimeForCausalLM(LineartimeConfig()).save_pretrained(lineartime.model_folder("small"))
