"""`lineartime finetune` and `lineartime answer`."""


from lineartime.base.errors import UsageError
from lineartime.base.ranks import TIMEOUT_S
from lineartime.base.stores import require_there
from lineartime.cli.options import Device, RankTimeout
from lineartime.cli.terminal import Terminal, results_are_files, say, say_stopping
from lineartime.folders import named_folder
from lineartime.tasks.finetune_config import FineTuning


def finetune(plan: FineTuning, *, device: Device = None, rank_timeout: RankTimeout = TIMEOUT_S) -> None:
    """Teach a masked model to find answers in documents.
    It is trained once for each learning rate, and the best is kept. To teach a causal model more text, use `lineartime
    train --from RUN`."""
    results_are_files()
    if not plan.validation or not plan.data:
        raise UsageError("options are missing", "finetune", "it takes --questions, --validation and --out")
    named_folder(plan.run)
    require_there([*plan.data, *plan.validation])
    from lineartime.tasks.finetuning import finetune
    from lineartime.training.stop import StopSignal

    with StopSignal().listening(say_stopping) as stop, Terminal() as terminal:
        result = finetune(plan, device=device, stop=stop, on_step=terminal.step, progress=terminal.count,
                          rank_timeout=rank_timeout)
    out = plan.out
    if "already" in result:
        say(f"complete: {out} was fine-tuned with these settings; nothing to do.")
    say("")
    for name, scores in result["learning_rates"].items():
        say(f"lr {name:<9} EM {scores['exact_match']:6.2f}  F1 {scores['f1']:6.2f}"
            + "  <- best" * (result["best"] == f"lr-{name}"))
    say(f"\nweights  {out / 'best'}  (open with lineartime.load_model or transformers)")
    say(f"report   {out / 'predictions.json'}")
