"""A peer of `tables.toml` learns a text as `lineartime train` teaches our models: `reproduce` calls this for it.

    python -m benchmarks.paper.peer NAME SETTINGS.toml DEVICE"""

import sys
import tomllib
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks import Row
from benchmarks.paper.tables import PEERS
from benchmarks.peers import build_peer, state_size
from lineartime.cli.exits import exit_code
from lineartime.cli.terminal import Terminal, say_stopping
from lineartime.data.tokens import open_data, read_manifests, sha256_of
from lineartime.distributed.ranks import Ranks
from lineartime.evaluation import evaluate_data
from lineartime.model import LanguageModel
from lineartime.objectives import NextToken
from lineartime.release.provenance import installed_version
from lineartime.run import Run
from lineartime.run_config import config_for_data
from lineartime.runtime import peak_bytes
from lineartime.training import Callbacks, Setup, StopSignal, fit_once


def train(name: str, settings: Row, device: str, callbacks: Callbacks) -> None:
    """Train a peer, or go on, and write the result file that `lineartime train` writes. Raises as `config_for_data`,
    `build_peer` and `fit_once` do."""
    config, fields = config_for_data(settings), PEERS[name]
    held_out, manifests = open_data(config.data, "validation"), read_manifests(config.data)
    package = {"package": "transformers", "version": installed_version("transformers")}
    facts = {"data_sha256": sha256_of(config.data, manifests), "tokenizer_sha256": manifests[0].tokenizer["sha256"],
             "peer": {**package, **fields}}

    def begin(ranks: Ranks) -> Setup:
        torch.manual_seed(config.train.seed)
        objective = NextToken(config, open_data(config.data, "train"), held_out, ranks)
        return Setup(cast(Any, build_peer(name, config.model, fields)), objective, {})

    def score(run: Run, model: LanguageModel, ranks: Ranks) -> Row:
        peak_mib = peak_bytes(torch.device(device)) / 2**20
        found, _ = evaluate_data(model, held_out, max_tokens=config.train.last_eval_tokens, ranks=ranks,
                                 context=config.model.context, precision=config.train.precision,
                                 batch_rows=config.micro_batch_rows)
        return {"steps": config.train.steps, "held_out": found.to_dict(), "peak_mib": peak_mib, "peer": facts["peer"],
                "n_parameters": sum(p.numel() for p in model.parameters()), "state_size": state_size(model)}

    fit_once(config, facts, device, begin, score, callbacks)


def main(name: str, path: str, device: str) -> None:
    with StopSignal().listening(say_stopping) as stop, Terminal() as terminal:
        train(name, tomllib.loads(Path(path).read_text(encoding="utf-8")), device, Callbacks(stop, terminal.step))


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(*sys.argv[1:])))
