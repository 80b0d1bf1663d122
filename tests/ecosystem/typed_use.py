"""A program that uses the public names with types. `make wheel` checks it against the installed package, by mypy
--strict and by pyright; it is not run."""

from pathlib import Path

import torch
from torch import Tensor

import lineartime
from lineartime import PRESETS, FineTuning, ModelConfig, TrainConfig
from lineartime.hf import LineartimeConfig, LineartimeForCausalLM

version: str = lineartime.__version__
names: list[str] = list(PRESETS)

config: ModelConfig = lineartime.model_config("flash", n_layers=2, d_model=64)
width: int = config.d_model
model: lineartime.LanguageModel = lineartime.LanguageModel(config)
layer: lineartime.GatedAttentionUnit = lineartime.GatedAttentionUnit(config)
block: tuple[torch.nn.Module, torch.nn.Module] = (lineartime.MultiHeadAttention(), lineartime.FeedForward())
logits_BTV: Tensor = model(torch.zeros(1, 8, dtype=torch.long))


def learn(texts: Path, out: Path) -> None:
    lineartime.prepare([texts], out / "data", held_out=0.1)
    done = lineartime.train({"model": "flash", "data": str(out / "data"), "out": str(out / "run"), "steps": 10})
    settings: TrainConfig = done.config.train
    print(settings.learning_rate, done.scores["held_out"]["loss"])


def use(run: Path) -> list[list[int]]:
    opened, tokenizer, step = lineartime.load_model(run)
    ids: list[int] = tokenizer.encode("Once more")
    decode = lineartime.DecodeStep(opened)
    _, state = decode(torch.tensor(ids[:1]), decode.empty_state(1))
    sizes: dict[str, torch.Size] = {name: tensor.shape for name, tensor in state.items()}
    print(step, sizes)
    texts: list[str] = lineartime.generate(opened, ["Once more"], tokenizer=tokenizer, max_new_tokens=5)
    print(texts)
    return lineartime.generate(opened, [ids], max_new_tokens=5, temperature=0.8)


def judge(run: Path, data: Path) -> float:
    opened, _, _ = lineartime.load_model(run)
    split = lineartime.open_split(data, "validation")
    scores = lineartime.evaluate(opened, split, context=256)
    print(lineartime.measure_context_use(opened, split, [256, 512]))
    print(lineartime.measure_recurrence(opened, split, split))
    return scores.loss


def ask(run: Path, questions: Path, out: Path) -> None:
    plan = FineTuning(run, (questions,), (questions,), out)
    print(lineartime.finetune(plan), lineartime.read_questions([questions]))
    asked, tokenizer, _ = lineartime.load_span_model(run)
    print(asked, tokenizer, lineartime.evaluate_questions)


def elsewhere(folder: Path) -> None:
    theirs = LineartimeForCausalLM(LineartimeConfig())
    theirs.save_pretrained(folder)
    small: Path = lineartime.model_folder("small")
    print(small)
