"""A peer of `tables.toml` learns a text as `lineartime train` teaches our models, for `reproduce`.

    python -m benchmarks.paper.peer NAME SETTINGS.toml DEVICE [--contexts N,N,...]"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks import Row
from benchmarks.context_use import measure_context_use, with_contexts
from benchmarks.paper.tables import PEERS
from benchmarks.peers import build_peer, state_size
from benchmarks.provenance import installed_version
from lineartime.base.files import read_toml, write_json
from lineartime.base.ranks import TIMEOUT_S, Ranks
from lineartime.cli.terminal import Terminal, exit_code, say_stopping
from lineartime.data.tokens import open_data, open_split, read_manifests, sha256_of
from lineartime.model.language_model import LanguageModel
from lineartime.training.evaluation import evaluate_data
from lineartime.training.loop import Callbacks, Setup, fit_once
from lineartime.training.objectives import NextToken
from lineartime.training.run import Run
from lineartime.training.run_config import config_for_data
from lineartime.training.runtime import StopSignal, peak_bytes


def train(name: str, settings: Row, device: str, callbacks: Callbacks, contexts: Sequence[int] = (),
          document_tokens: int | None = None) -> None:
    """Train a peer, or go on, and write the result file that `lineartime train` writes; with
    `contexts` also `context_use.json` beside the run, as `benchmarks.context_use` does."""
    config, fields = config_for_data(settings), PEERS[name]
    held_out, manifests = open_split(config.data, "validation"), read_manifests(config.data)
    facts = {"data_sha256": sha256_of(config.data, manifests), "tokenizer_sha256": manifests[0].tokenizer["sha256"],
             "peer": {"package": "transformers", "version": installed_version("transformers"), **fields}}

    def begin(ranks: Ranks) -> Setup:
        torch.manual_seed(config.train.seed)
        objective = NextToken(config, open_data(config.data, "train"), held_out, ranks)
        return Setup(cast(Any, build_peer(name, config.model, fields)), objective, {})

    def score(run: Run, model: LanguageModel, ranks: Ranks) -> Row:
        peak_mib = peak_bytes(torch.device(device)) / 2**20
        found, _ = evaluate_data(model, held_out, max_tokens=config.train.last_eval_tokens, spread=True, ranks=ranks,
                                 context=config.model.context, precision=config.train.precision,
                                 batch_rows=config.micro_batch_rows)
        if contexts:
            use = measure_context_use(model, held_out, contexts, document_tokens=document_tokens)
            write_json(Path(config.out).with_name("context_use.json"), use)
        return {"steps": config.train.steps, "held_out": found.to_dict(), "peak_mib": peak_mib, "peer": facts["peer"],
                "n_parameters": sum(p.numel() for p in model.parameters()), "state_size": state_size(model)}

    fit_once(config, facts, device, begin, score, callbacks, TIMEOUT_S)


def main() -> None:
    parser = with_contexts(argparse.ArgumentParser())
    parser.add_argument("name", choices=PEERS)
    parser.add_argument("settings", type=Path)
    parser.add_argument("device")
    given = parser.parse_args()
    with StopSignal().listening(say_stopping) as stop, Terminal() as terminal:
        train(given.name, read_toml(given.settings), given.device, Callbacks(stop, terminal.step), given.contexts,
              given.document_tokens)


if __name__ == "__main__":
    sys.exit(exit_code(main))
