"""`python -m benchmarks VERB`, from a checkout."""

from collections.abc import Callable
from typing import Annotated

import typer

from benchmarks import verbs
from lineartime.base.ranks import launched
from lineartime.base.settings import require
from lineartime.cli.verbs import add_verb, main

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
                  help="Measure speed, memory, quality and recall; make the paper's tables and figures.")
VERBS: dict[str, tuple[Callable[..., None], list[str]]] = {
    "step": (verbs.benchmark_step, ["step flash:compiled transformer++ --contexts 512,2048,8192",
                                    "step flash transformer++ --contexts 2048,4096,8192 --tokens 1 --together"]),
    "decode": (verbs.benchmark_decode, ["decode flash transformer++ --contexts 2048,8192"]),
    "op": (verbs.benchmark_op, ["op gated_chunk_attention --contexts 2048 --precision bfloat16"]),
    "run": (verbs.benchmark_run, ["run bench --json out/bench.jsonl"]),
    "reproduce": (verbs.reproduce, ["reproduce lm_pg19 --scale cpu --texts TEXTS"]),
    "recall": (verbs.recall, ["recall flash transformer++ --task pairs", "recall run --task text --data data"]),
    "laws": (verbs.measure_laws, ["laws mamba2 --law right-padding", "laws flash llama qwen3_next",
                                  "laws flash --set chunk_size=16", "laws my_layers:SlidingWindow"]),
    "report": (verbs.report, ["report lm_pg19", "report speed", "report --into page.md"]),
}
"""The verbs, with examples for the end of their --help."""
PROGRAM = "python -m benchmarks"
for name, (verb, examples) in VERBS.items():
    add_verb(app, PROGRAM, name, verb, examples, name not in ("run", "reproduce", "report"))


@app.callback()
def options(context: typer.Context,
            debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")] = False) -> None:
    """The options before the verb."""
    require(launched().size == 1, "the benchmarks run in one process", str(context.invoked_subcommand),
            "leave out torchrun")


if __name__ == "__main__":
    main(app, PROGRAM)
