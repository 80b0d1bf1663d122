"""What happens inside models of recall: the numbers behind the reasons that docs/memory.md gives.

    python studies/inside.py start                  scores and chunk weights of new models; seconds
    python studies/inside.py reach                  trains on pairs, asks far, closes gates: what ends the reach
    python studies/inside.py company                trains on needles, by the numbers of facts that training begins with
    python studies/inside.py --into docs/memory.md  writes the tables

What has a row is left out; a run that was stopped begins anew. Models, sizes and training are those of `lineartime
recall`. Gates and heads are read, and gates closed, where the ops make them."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import lineartime.ablations  # noqa: E402
import lineartime.attention.mixed_chunk  # noqa: E402
import lineartime.ops  # noqa: E402
import lineartime.ops.memory  # noqa: E402
from benchmarks.markdown import markdown  # noqa: E402
from benchmarks.measure import add_missing  # noqa: E402
from benchmarks.pages import fill_place  # noqa: E402
from benchmarks.recall.measure import OnStep, Recall, Row, asked, learn, n_test_rows, passed  # noqa: E402
from benchmarks.recall.study import config_of, training  # noqa: E402
from benchmarks.recall.tasks import FIRST_NOISE, FIRST_VALUE, SEPARATOR, TASKS, Rows  # noqa: E402
from lineartime.atomic_io import read_json_lines  # noqa: E402
from lineartime.cli.exits import exit_code  # noqa: E402
from lineartime.cli.terminal import Terminal, say_stopping  # noqa: E402
from lineartime.model import LanguageModel  # noqa: E402
from lineartime.settings import require_name  # noqa: E402
from lineartime.training import StopSignal  # noqa: E402

ROWS = ROOT / "benchmarks" / "rows" / "inside.jsonl"
PAIRS, NEEDLE = TASKS["pairs"], TASKS["needle"]
SEEDS = (0, 1, 2)
N_ROWS, N_FACTS = 16, 8
"""Rows in which heads and gates are read, and facts in each."""

STARTING = ("mc-tfm++, all", "mc-tfm++, all, k = q", "flash, all", "flash+")
N_NEW = 40
"""New models whose chunk weights are looked at."""

FARTHER = (8, 16, 32, 64)
"""Lengths at which is asked, as multiples of the trained one."""
REACHING = (("flash+", (6e-3, 3e-3, 1.5e-3), SEEDS), ("flash, all", (6e-3, 3e-3, 1.5e-3), SEEDS[:1]))

ORDERS = ((1, 2, 4, 8), (8, 4, 2, 1), (4, 8, 16, 32))
"""Numbers of facts in rows of training, in the order in which they are added."""
COMPANY_STEPS, COMPANY_RATE = 1600, 3e-3

Heads = tuple[Tensor, Tensor, Tensor]
"""Of a layer's linear half q_BTS, k_BTS with its gates, and v_BTE."""


@contextlib.contextmanager
def noted_heads() -> Iterator[list[Heads]]:
    """Yields a list that gets the heads of every layer that is called: of GAUs, and of the first attention head of
    MC-TFM++."""
    noted: list[Heads] = []
    gau, pair = lineartime.ops.gated_head_attention, lineartime.attention.mixed_chunk.attend_in_chunks

    def of_gau(uv_BTF: Tensor, heads: Sequence[Tensor], *rest: Any, **named: Any) -> Tensor:
        noted.append((heads[2], heads[3], torch.nn.functional.silu(uv_BTF.chunk(2, dim=-1)[1])))
        return gau(uv_BTF, heads, *rest, **named)

    def of_pair(config: Any, q_quad: Tensor, k_quad: Tensor, q_BGCS: Tensor, k_BGCS: Tensor, v_BGCE: Tensor,
                *rest: Any) -> Tensor:
        q_BTS, k_BTS, v_BTE = (x[:: config.n_heads].flatten(1, 2) for x in (q_BGCS, k_BGCS, v_BGCE))
        noted.append((q_BTS, k_BTS, v_BTE))
        return pair(config, q_quad, k_quad, q_BGCS, k_BGCS, v_BGCE, *rest)

    with mock.patch.object(lineartime.ops, "gated_head_attention", of_gau), \
            mock.patch.object(lineartime.attention.mixed_chunk, "attend_in_chunks", of_pair):
        yield noted


@contextlib.contextmanager
def changed_gates(change: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    """Lets `change` replace the gates, gate_BTH, of every call of a gate; its number comes first, from 0."""
    made, number = lineartime.ops.memory.write_gate, 0

    def gates(*arguments: Any) -> Tensor:
        nonlocal number
        number += 1
        return change(number - 1, made(*arguments))

    with mock.patch.object(lineartime.ops.memory, "write_gate", gates):
        yield


@contextlib.contextmanager
def noted_gates() -> Iterator[list[Tensor]]:
    """Yields a list that gets the gates of every layer that is called, gate_BT of the first attention head."""
    noted: list[Tensor] = []

    def note(_: int, gate_BTH: Tensor) -> Tensor:
        noted.append(gate_BTH[..., 0])
        return gate_BTH

    with changed_gates(note):
        yield noted


@contextlib.contextmanager
def closed_gates(model: LanguageModel, layer: int | None) -> Iterator[None]:
    """Makes a layer's gates of noise 0, of whatever rows the model reads. None: no layer's."""
    read: list[Tensor] = []

    def close(number: int, gate_BTH: Tensor) -> Tensor:
        if number % model.config.n_layers != layer:
            return gate_BTH
        return gate_BTH.masked_fill(is_noise(read[-1])[..., None], 0.0)

    handle = model.embed.register_forward_pre_hook(lambda _, arguments: read.append(arguments[0]))
    try:
        with changed_gates(close):
            yield
    finally:
        handle.remove()


def question_scores(q_BTS: Tensor, k_BTS: Tensor, asked_BQ: Tensor) -> Tensor:
    """q k of each question with every token: `[B, Q, T]`."""
    return q_BTS.gather(1, asked_BQ[..., None].expand(-1, -1, q_BTS.shape[-1])) @ k_BTS.mT


def is_noise(ids_BT: Tensor) -> Tensor:
    return (ids_BT >= FIRST_NOISE) & (ids_BT < SEPARATOR)


def is_value(ids_BT: Tensor) -> Tensor:
    return (ids_BT >= FIRST_VALUE) & (ids_BT < FIRST_NOISE)


def some_rows(n_facts: int, length: int, n_rows: int = N_ROWS) -> Rows:
    return PAIRS.draw(n_rows, n_facts, length, torch.Generator().manual_seed(1))


@torch.inference_mode()
def match_at_start(name: str, seed: int) -> Row:
    """How well a question's query matches its own token's key in layer 1 of a new model: the mean of q k with that key
    less the mean with noise, over the standard deviation with noise; and that deviation."""
    torch.manual_seed(seed)
    model, rows = LanguageModel(config_of(name, PAIRS, {})).eval(), some_rows(N_FACTS, PAIRS.length)
    with noted_heads() as noted:
        model.hidden(rows.ids_BT)
    q_BTS, k_BTS, _ = noted[0]
    score_BQT = question_scores(q_BTS, k_BTS, rows.asked_BQ)
    own_BQ = score_BQT.gather(2, rows.fact_BQ[..., None] - 1)[..., 0]  # a key stands before its value
    noise_N = score_BQT.masked_select(is_noise(rows.ids_BT)[:, None])
    return {"noise_std": noise_N.std().item(),
            "match": ((own_BQ.mean() - noise_N.mean()) / noise_N.std()).item()}


@torch.inference_mode()
def weights_at_start() -> Row:
    """Of new models with learned chunk weights, how many have no layer whose weights have a gradient, and how many have
    one layer without; and the largest weight of all."""
    made, layers = lineartime.ablations.learned_chunk_weights, []

    def weights(*arguments: Any, **named: Any) -> Tensor:
        a_BPL = made(*arguments, **named)
        earlier_PL = torch.ones(a_BPL.shape[1:], dtype=torch.bool).tril(-1)
        layers.append(a_BPL.masked_select(earlier_PL).max().item())
        return a_BPL

    with mock.patch.object(lineartime.ablations, "learned_chunk_weights", weights):
        for seed in range(N_NEW):
            torch.manual_seed(seed)
            LanguageModel(config_of("flash, weights", PAIRS, {})).eval().hidden(some_rows(N_FACTS, PAIRS.length).ids_BT)
    n_layers = len(layers) // N_NEW
    n_alive = [sum(each > 0 for each in layers[i : i + n_layers]) for i in range(0, len(layers), n_layers)]
    return {"n_layers": n_layers, "none_alive": n_alive.count(0),
            "some_alive": sum(0 < n < n_layers for n in n_alive), "largest": max(layers)}


def far(model: LanguageModel, closed: int | None, check: Callable[[], None]) -> list[float]:
    """The accuracy on pairs at `FARTHER`, all numbers of facts. closed: the layer whose gates of noise are 0."""
    told = []
    with closed_gates(model, closed):
        for times in FARTHER:
            right = [asked(model, PAIRS, n, times * PAIRS.length, n_test_rows(times), progress=lambda _: check())[0]
                     .double().mean().item() for n in PAIRS.n_facts]
            told.append(round(sum(right) / len(right), 4))
    return told


@torch.inference_mode()
def read_from(model: LanguageModel) -> Row:
    """Of layer 1, at the longest rows: the root mean square of what questions read of noise over that of what they read
    of facts; and the mean gates of values, keys and noise."""
    rows = some_rows(N_FACTS, FARTHER[-1] * PAIRS.length, n_rows=2)
    with noted_heads() as noted, noted_gates() as gates:
        model.hidden(rows.ids_BT)
    q_BTS, k_BTS, v_BTE = noted[0]
    score_BQT = question_scores(q_BTS, k_BTS, rows.asked_BQ)
    is_fact_T = torch.arange(rows.ids_BT.shape[1]) < 2 * N_FACTS
    of_noise, of_facts = ((score_BQT * part @ v_BTE).square().mean().sqrt().item()
                          for part in (is_noise(rows.ids_BT)[:, None], is_fact_T))
    value_BT = is_value(rows.ids_BT) & is_fact_T
    parts = {"value": value_BT, "key": is_fact_T & ~value_BT, "noise": is_noise(rows.ids_BT)}
    return {"noise_over_facts": of_noise / of_facts,
            "gates": {name: gates[0][part_BT].mean().item() for name, part_BT in parts.items()}}


def reach(name: str, rate: float, seed: int, on_step: OnStep, check: Callable[[], None]) -> Row:
    """A model that has learned pairs, asked far: as trained, and with the gates of noise closed in a layer."""
    train = training("pairs", PAIRS, {"learning_rate": rate, "seed": seed})
    learned = list(learn(config_of(name, PAIRS, {}), Recall(PAIRS, PAIRS.length, PAIRS.n_facts, train), on_step))
    model = learned[-1][-1].eval()
    closed = {str(layer): far(model, layer, check) for layer in range(model.config.n_layers)}
    return {"steps": train.steps, "lengths": [times * PAIRS.length for times in FARTHER],
            "as_trained": far(model, None, check), "closed": closed, **read_from(model)}


@torch.inference_mode()
def gates_of(model: LanguageModel) -> list[float]:
    """The mean gates of layer 1 on noise and on values, in rows of needles."""
    rows = NEEDLE.draw(N_ROWS, N_FACTS, NEEDLE.length, torch.Generator().manual_seed(1))
    with noted_gates() as gates:
        model.hidden(rows.ids_BT)
    return [round(gates[0][part_BT].mean().item(), 4) for part_BT in (is_noise(rows.ids_BT), is_value(rows.ids_BT))]


def company(name: str, order: tuple[int, ...], seed: int, on_step: OnStep) -> Row:
    """How soon a model learns needles, and its gates on the way, by the numbers of facts that training begins with."""
    train = training("needle", NEEDLE, {"learning_rate": COMPANY_RATE, "seed": seed, "steps": COMPANY_STEPS})
    curve, gates, model = [], [], None
    needles = Recall(NEEDLE, NEEDLE.length, order, train)
    for step, loss, right, model in learn(config_of(name, NEEDLE, {}), needles, on_step):
        curve.append([step, round(loss, 4), round(right, 4)])
        gates.append([step, *gates_of(model)])
    assert model is not None
    told = {str(n): round(asked(model.eval(), NEEDLE, n, NEEDLE.length, n_test_rows(1))[0].double().mean().item(), 4)
            for n in sorted({*order})}
    return {"learning_rate": COMPANY_RATE, "steps": COMPANY_STEPS, "curve": curve, "passed": passed(curve),
            "gates": gates, "accuracy": told}


def measure(parts: Sequence[str], rows: Path, stop: StopSignal) -> None:
    """What has no row yet."""
    def check() -> None:
        stop.check("what is measured is in the rows; the same command goes on")

    def add(part: str, key: Row, made: Callable[[], Row]) -> None:
        add_missing(rows, key, f"python studies/inside.py {part}", made)

    with Terminal() as terminal:
        def on_step(record: Row) -> None:
            check()
            terminal.step(record)

        if "start" in parts:
            for name in STARTING:
                for seed in SEEDS:
                    add("start", {"kind": "start", "model": name, "seed": seed},
                        partial(match_at_start, name, seed))
            add("start", {"kind": "weights", "n_models": N_NEW}, weights_at_start)
        if "reach" in parts:
            for name, rates, seeds in REACHING:
                for seed in seeds:
                    for rate in rates:
                        add("reach", {"kind": "reach", "model": name, "learning_rate": rate, "seed": seed},
                            partial(reach, name, rate, seed, on_step, check))
        if "company" in parts:
            for seed in SEEDS:
                for order in ORDERS:
                    add("company", {"kind": "company", "model": "flash+", "order": list(order), "seed": seed},
                        partial(company, "flash+", order, seed, on_step))


def short(value: float) -> str:
    """Two digits, without the 0 before the point."""
    return f"{value:.2f}".removeprefix("0") if value < 0.995 else "1"


def by_seed(row: Row) -> int:
    return int(row["seed"])


def table_of_start(rows: Sequence[Row]) -> str:
    lines = []
    for name in STARTING:
        own = sorted((row for row in rows if row["kind"] == "start" and row["model"] == name), key=by_seed)
        lines.append([name, *(f"{row['match']:.2f}" for row in own)])
    return markdown(["model", *(f"seed {seed}" for seed in SEEDS)], lines, 1)


def table_of_reach(rows: Sequence[Row]) -> str:
    lines = []
    found = [row for row in rows if row["kind"] == "reach"]
    for row in sorted(found, key=lambda row: (row["model"] != "flash+", -row["learning_rate"], row["seed"])):
        answers = [" ".join(map(short, each)) for each in (row["as_trained"], *row["closed"].values())]
        gates = row["gates"]
        lines.append([row["model"], f"{row['learning_rate']:g}", str(row["seed"]), *answers,
                      f"{row['noise_over_facts']:.2g}", f"{gates['value']:.2f}", f"{gates['key']:.3f}",
                      f"{gates['noise']:.5f}"])
    return markdown(["model", "rate", "seed", "as trained", "gates closed in layer 1", "in layer 2", "noise/facts",
                     "gate on values", "on keys", "on noise"], lines, 3)


def table_of_company(rows: Sequence[Row]) -> str:
    lines = []
    for order in map(list, ORDERS):
        own = sorted((row for row in rows if row["kind"] == "company" and row["order"] == order), key=by_seed)
        steps = ", ".join("never" if row["passed"] is None else f"{row['passed']:,}" for row in own)
        told = "; ".join(" ".join(map(short, row["accuracy"].values())) for row in own)
        gates = "; ".join(f"{row['gates'][-1][1]:.3f} / {row['gates'][-1][2]:.2f}" for row in own)
        lines.append([", ".join(map(str, order)), steps, told, gates])
    return markdown(["facts in training rows, in this order", "learned from step, by seed",
                     "accuracy at these numbers, the fewest first", "gates at the end, noise / values"], lines, 4)


PARTS = {"start": table_of_start, "reach": table_of_reach, "company": table_of_company}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", help=f"what is measured: {', '.join(PARTS)}")
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--into", type=Path, help="write the tables into this page")
    given = parser.parse_args()
    for part in given.parts:
        require_name("part", part, PARTS)
    if given.parts:
        with StopSignal().listening(say_stopping) as stop:
            measure(given.parts, given.rows, stop)
    if given.into:
        rows = read_json_lines(given.rows, dict, "a row")
        for name, table in PARTS.items():
            fill_place(given.into, f"inside {name}", table(rows))


if __name__ == "__main__":
    sys.exit(exit_code(main))
