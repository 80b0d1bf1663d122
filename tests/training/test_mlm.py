"""Masked language modelling from the command line: trained, resumed, scored; and what may not change the numbers."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from command_line import assert_refused
from lineartime.base.errors import UsageError
from lineartime.config import TrainConfig, model_config
from lineartime.data.tokens import open_split
from lineartime.folders import read_metrics
from lineartime.model.language_model import LanguageModel, masked_token_losses
from lineartime.training.evaluation import Evaluation, evaluate
from lineartime.training.gradient import compute_gradient
from lineartime.training.masking import NO_TARGET, mask_tokens
from lineartime.training.objectives import MaskedTokens
from lineartime.training.run_config import run_config
from lineartime.weights.load import load_model
from tiny_models import CONFIGS, random_ids, random_model
from tiny_runs import EVAL_EVERY, SETTINGS, STEPS, command, prepare_text

BIDIRECTIONAL = {name: replace(CONFIGS[name], causal=False) for name in ("flash", "flash-quad", "transformer++")}
IDS = random_ids(6, 20)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare_text(tmp_path_factory.mktemp("data"), tokenizer="train", vocab_size=300, mlm=True)


@pytest.fixture(scope="module")
def stream(data):
    return open_split(data, "validation")


@pytest.fixture(scope="module")
def whole(processes, data, tmp_path_factory):
    """A run from the command line, and what it printed."""
    folder = tmp_path_factory.mktemp("whole")
    code = processes.run(command(data, folder / "run", task="c4"), folder / "printed")
    printed = (folder / "printed").read_text()
    assert code == 0, printed
    return folder / "run", printed


def tiny(stream, context=40):
    torch.manual_seed(0)
    config = model_config("flash", "c4", n_layers=2, d_model=16, query_key_dim=8, chunk_size=8, context=context,
                          vocab_size=stream.vocab_size, end_of_document=stream.end_of_document)
    return LanguageModel(config).double()


def asked_of(*counts):
    """Targets for rows of 20 tokens, so many in each row."""
    targets = torch.full((len(counts), 20), NO_TARGET)
    for row, count in enumerate(counts):
        targets[row, torch.randperm(20, generator=torch.Generator().manual_seed(row))[:count]] = 5
    return targets


# The loss


@pytest.mark.parametrize("name", BIDIRECTIONAL)
def test_the_loss_is_that_of_the_whole_head_where_it_is_asked(name):
    model, targets = random_model(BIDIRECTIONAL[name]), asked_of(3, 0, 20, 1)
    log_p = model(IDS[:4]).log_softmax(-1)
    expected = torch.stack([-log_p[row, place, 5] for row, place in (targets != NO_TARGET).nonzero()])
    found = masked_token_losses(model, IDS[:4], targets)
    assert found.dtype == torch.float64 and (found - expected).abs().max() < 1e-12
    assert masked_token_losses(model.float(), IDS[:4], targets).dtype == torch.float32


class Given:
    """The task with targets of our own."""

    n_targets, losses = MaskedTokens.n_targets, MaskedTokens.losses


def gradient_of(model, targets, n_rows, **changes):
    config = TrainConfig(**{"clip_scope": "global", "clip": 0.5, **changes})
    loss, norm = compute_gradient(model, Given(), [IDS[: len(targets)], targets], n_rows, config)
    return loss, norm, [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("counts", [(1, 2, 3, 4, 5, 6), (0, 0, 7, 1, 0, 20), (20, 0, 0, 0, 0, 0)])
def test_micro_batches_with_different_numbers_of_targets_add_up_to_the_batch(counts):
    model, targets = random_model(BIDIRECTIONAL["flash"]), asked_of(*counts)
    model.zero_grad()
    expected = masked_token_losses(model, IDS[:6], targets).mean()
    expected.backward()
    norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    for n_rows in (1, 2, 3, 6):
        plain = gradient_of(model, targets, n_rows, clip=None)
        assert plain[0] == pytest.approx(expected.item(), rel=1e-12) and plain[1] == pytest.approx(norm.item())
        clipped = gradient_of(model, targets, n_rows)
        for g, c in zip(plain[2], clipped[2], strict=True):
            assert (g * min(1, 0.5 / norm) - c).abs().max() < 1e-13
        if n_rows == 6:
            continue
        whole = gradient_of(model, targets, 6, clip=None)
        assert all((a - b).abs().max() < 1e-12 * norm for a, b in zip(plain[2], whole[2], strict=True))


@pytest.mark.parametrize("scope", ["local", "global"])
def test_nothing_asked_is_a_loss_of_zero_and_no_gradient(scope):
    model = random_model(BIDIRECTIONAL["flash"])
    loss, norm, gradient = gradient_of(model, asked_of(0, 0, 0, 0), 2, clip_scope=scope)
    assert (loss, norm) == (0, 0) and all((g == 0).all() for g in gradient)


# A run


def test_a_run_leaves_what_masked_language_modelling_has(whole, data, stream):
    out, printed = whole
    result = json.loads((out / "result.json").read_text())
    assert set(result) == {"run", "steps", "held_out", "peak_mib"}
    held_out = result["held_out"]
    assert set(held_out) == {"masked", "loss", "perplexity", "n_tokens", "n_read", "loss_by_position"}
    assert held_out["masked"] is True and held_out["n_read"] == len(stream)
    assert held_out["perplexity"] == pytest.approx(math.exp(held_out["loss"]))
    assert f"perplexity {held_out['perplexity']:.1f} ({held_out['n_tokens']:,} of {len(stream):,} tokens" in printed
    assert "held-out masked" in printed and "lineartime evaluate" in printed
    for word in ("generate", "per byte", "per word", "xz", "nan", "warning"):
        assert word not in printed
    lines = read_metrics(out)
    assert [line["step"] for line in lines if "held_out" in line] == list(range(EVAL_EVERY, STEPS + 1, EVAL_EVERY))
    assert all(set(line["held_out"]) == {"loss"} for line in lines if "held_out" in line)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[0] == pytest.approx(math.log(300), rel=0.02) and np.mean(losses[-4:]) < np.mean(losses[:4])
    model, tokenizer, _ = load_model(out)
    assert not model.config.causal and model.config.norm == "scale_norm" and tokenizer.mask == stream.mask
    assert not (out / "sample.txt").exists()  # it writes no text
    assert imread(out / "loss.png").size


def test_another_task_is_masked_when_it_is_not_causal(data, tmp_path, call):
    """As TriviaQA's pretraining is: the specification of Wiki-40B, not causal."""
    code, out, err = call(*command(data, tmp_path / "run", task="wiki40b", causal="false", steps=3))
    assert code == 0 and "held-out masked" in out, err
    assert load_model(tmp_path / "run")[0].config.norm == "layer_norm"


# The held-out score


def test_evaluate_from_the_command_line_is_the_same_for_any_batch_rows(whole, data, call):
    out, _ = whole
    stored = json.loads((out / "result.json").read_text())["held_out"]
    code, printed, _ = call("evaluate", out, "--data", data)
    assert code == 0 and "validation masked" in printed and "position" in printed and "byte" not in printed
    code, printed, _ = call("evaluate", out, "--data", data, "--json", "--batch-rows", 5)
    found = json.loads(printed)
    assert code == 0 and found["masked"] is True
    assert (found["n_tokens"], found["n_read"]) == (stored["n_tokens"], stored["n_read"])
    assert found["perplexity"] == pytest.approx(stored["perplexity"], rel=1e-6)


def test_the_score_is_that_of_the_masked_tokens_each_weighing_the_same(stream):
    """Against readers who share the rows out between them and know nothing of batches."""
    model, n_rows = tiny(stream, 32), -(-len(stream) // 32)
    nll, count, of_rows = 0.0, 0, []
    for reader in range(3):
        for row in range(reader, n_rows, 3):
            ids = stream.read(row * 32, min((row + 1) * 32, len(stream)))
            inputs, targets = mask_tokens(ids, stream, seed=0, epoch=0, row=row)
            log_p = model(torch.from_numpy(inputs)[None])[0].log_softmax(-1).detach().numpy()
            costs = [-log_p[place, targets[place]] for place in np.flatnonzero(targets != NO_TARGET)]
            nll, count = nll + sum(costs), count + len(costs)
            of_rows += [np.mean(costs)] if costs else []
    result = evaluate(model, stream, context=32)
    assert result.n_tokens == count and result.nll == pytest.approx(nll, rel=1e-12)
    assert result.perplexity == pytest.approx(math.exp(nll / count))
    assert abs(np.mean(of_rows) - result.loss) > 1e-6


def test_the_score_in_training_reads_as_many_tokens_as_asked(data, stream, tmp_path):
    config = run_config({"model": "flash", "task": "c4", "data": str(data), "out": str(tmp_path), **SETTINGS,
                         "vocab_size": stream.vocab_size, "end_of_document": stream.end_of_document})
    model, read = LanguageModel(config.model), []
    task = MaskedTokens(config, open_split(data, "train"), stream)
    assert task.evaluate(model, read.append) == {"loss": evaluate(model, stream, context=32, max_tokens=200).loss}
    assert read == [64, 128, 192, 256]
    assert model.training


def test_where_no_token_is_masked_the_loss_is_zero():
    assert (Evaluation(0, 0.0, 0, 0, [], n_read=5).loss, Evaluation(0, 0.0, 0, 0, [], n_read=5).perplexity) == (0, 1)


def test_bad_input_is_one_line_and_leaves_nothing(whole, data, tmp_path, call):
    plain = prepare_text(tmp_path)
    for code, words, arguments in [
        (2, ["the tokenizer has no [MASK]", str(plain), "prepare with --mlm"],
         command(plain, tmp_path / "run", task="c4")),
        (2, ["only a causal language model"], ["generate", whole[0], "Reader, I"]),
        (2, ["vocab_size = 258"],
         ["prepare", tmp_path / "text.txt", "--mlm", "--vocab-size", 258, "--out", tmp_path / "x"]),
        (2, ["mlm None -> True"], ["prepare", tmp_path / "text.txt", "--mlm", "--held-out", 0.2, "--tokenizer", "bytes",
                                   "--out", plain]),
        (2, ["different tokenizers"], ["evaluate", whole[0], "--data", plain]),
    ]:
        got, printed, err = call(*arguments)
        assert_refused(got, err, code, *words)
        assert printed == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prepared", "text.txt"]
    with pytest.raises(UsageError, match=r"no \[MASK\]"):
        evaluate(tiny(open_split(plain, "validation")), open_split(plain, "validation"), context=32)
