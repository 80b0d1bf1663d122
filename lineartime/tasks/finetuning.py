"""Fine-tuning: a pretrained model learns to find answers, once per learning rate, and the best run is kept.

`DIR/lr-1e-04`, ... are ordinary runs. `DIR/result.json` names the best of them, `DIR/best` is a link to it."""

import json
import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lineartime.base.files import write_json
from lineartime.base.ranks import ALONE, TIMEOUT_S, Ranks, connected, gather_json
from lineartime.base.settings import require
from lineartime.config import ModelConfig, TrainConfig, stored_config, to_dict
from lineartime.folders import RESULT_FILE, RUN_FILE, read_fine_tuning
from lineartime.model.language_model import LanguageModel
from lineartime.tasks.finetune_config import FineTuning, name_of
from lineartime.tasks.qa.finetune import PREDICTIONS_FILE, QuestionTask
from lineartime.training.loop import Callbacks, Setup, fit_once
from lineartime.training.run import Run, different
from lineartime.training.run_config import RunConfig
from lineartime.training.runtime import pick_device
from lineartime.training.stop import Progress, StopSignal
from lineartime.weights import checkpoint
from lineartime.weights.load import load_model
from lineartime.weights.transfer import is_flash

logger = logging.getLogger(__name__)


def finetune(plan: FineTuning, *, device: torch.device | str | None = None, stop: StopSignal | None = None,
             on_step: Callable[[dict[str, Any]], None] | None = None, progress: Progress | None = None,
             rank_timeout: float = TIMEOUT_S) -> dict[str, Any]:
    """Fine-tune once per learning rate, or resume. Returns the content of `DIR/result.json`: "best" (the best run's
    folder in `plan.out`), scores by learning rate, what the task adds, and the settings; with "already" if the folder
    was complete before.

    device: by default cuda if available. stop: requests a save and an end, see `StopSignal.listening`. on_step is
    called with each line of the metrics and the number of "steps". progress counts questions, documents and tokens.
    rank_timeout: see `train`. Raises UsageError for a wrong pretrained model, wrong settings or a folder with another
    fine-tuning, DataError for wrong data, Stopped after saving, and as `load_model` and `fit_once` do."""
    stop, out = stop or StopSignal(), plan.out
    require(bool(plan.data and plan.validation), "files are missing", "finetune", "give data and validation")
    require(out.is_dir() or not out.exists(), "not a folder", str(out), "give another --out")
    require(not (out / RUN_FILE).exists(), "another run is here", str(out), "give another --out")
    picked = pick_device(device)
    loaded = load_model(plan.run)

    def watch(what: str, total: int | None = None, ranks: Ranks = ALONE) -> Callable[[int], None]:
        saved = "what is trained is saved" if out.exists() else "nothing is trained yet"
        return stop.watch(f"{saved}; the same command goes on", progress, what, total, ranks)

    task = QuestionTask(plan, loaded, watch)
    runs_of(plan, task.config, 1 << 40)  # wrong settings are refused before the data are read
    runs = runs_of(plan, task.config, task.read())
    settings = {**task.facts, "model": to_dict(task.config),
                "train": {name: to_dict(run.train) for name, run in runs.items()}}
    # One process at a time has the folder. A complete one is only compared; else its runs begin, or go on, in order.
    with (connected(picked.type, rank_timeout, between=partial(stop.check, "before the ranks met")) as ranks,
          checkpoint.lock(out) if ranks.is_first else nullcontext()):
        found = read_fine_tuning(out) if ranks.is_first and (out / RESULT_FILE).exists() else None
        complete = gather_json(found, ranks)[0]
        if complete is not None:
            check_settings(complete["fine_tuning"], settings, out)
            if ranks.is_first:
                point_to_best(out, complete)
            return {**complete, "already": True}
        rates = {}
        for name, run in runs.items():
            logger.info(f"learning rate {name}")
            rates[name] = train_rate(task, run, picked, Callbacks(stop, on_step))
            logger.info(f"  EM {rates[name]['exact_match']:6.2f}  F1 {rates[name]['f1']:6.2f}, held out")
        best = max(rates, key=lambda name: (rates[name]["f1"], rates[name]["exact_match"]))
        result = {"best": f"lr-{best}", "learning_rates": rates, "train_questions": task.train.counts,
                  "fine_tuning": settings}
        if ranks.is_first:
            point_to_best(out, result)
            write_json(out / RESULT_FILE, result)
    return result


def runs_of(plan: FineTuning, config: ModelConfig, n_rows: int) -> dict[str, RunConfig]:
    """The runs by the names of their learning rates, to train on `n_rows` rows. FLASH is not clipped, as in the paper's
    fine-tuning (Section 4.3)."""
    clip = None if is_flash(config) else TrainConfig().clip
    data = ", ".join(map(str, plan.data))
    return {name_of(rate): RunConfig(config, plan.train_config(rate, config.context, n_rows, clip),
                                     "fine-tuned", "questions", data, str(plan.out / f"lr-{name_of(rate)}"))
            for rate in plan.learning_rates}


def train_rate(task: QuestionTask, config: RunConfig, device: torch.device, callbacks: Callbacks) -> dict[str, Any]:
    """Train at one learning rate, or resume; returns the scores of its last step."""
    def begin(ranks: Ranks) -> Setup:
        return Setup(task.new_model(config.train.seed), task.objective(config, ranks), task.files(), score_last=False)

    def score(run: Run, model: LanguageModel, ranks: Ranks) -> dict[str, Any]:
        return {"steps": config.train.steps, **task.score(config, model, ranks)}

    result, _ = fit_once(config, task.facts, device, begin, score, callbacks)
    return {name: value for name, value in result.items() if name != "run"}


def point_to_best(out: Path, result: dict[str, Any]) -> None:
    """Point the link `best` in `out` at the best weights and, for questions, `predictions.json` at the best answers."""
    best = result["best"]
    checkpoint.point(out / "best", Path(best) / "latest")
    if (out / best / PREDICTIONS_FILE).exists():
        checkpoint.point(out / PREDICTIONS_FILE, Path(best) / PREDICTIONS_FILE)


def check_settings(stored: dict[str, Any], settings: dict[str, Any], out: Path) -> None:
    """Raise UsageError if the completed fine-tuning in `out` had other settings."""
    trained = {name: to_dict(stored_config(TrainConfig(), each)) for name, each in stored["train"].items()}
    changed = different(stored | {"train": trained}, json.loads(json.dumps(settings)))  # older ones have fewer fields
    require(not changed, "another fine-tuning is here", str(out),
            f"{'; '.join(changed)}. Give another --out, or the same settings")
