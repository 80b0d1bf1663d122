"""Masked language modelling: the masks, the loss, a run from the command line, its scores."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread

from command_line import assert_refused
from lineartime.base.errors import DataError, UsageError
from lineartime.config import TrainConfig
from lineartime.data.prepare import prepare
from lineartime.data.tokens import Mixture, open_split
from lineartime.folders import read_metrics
from lineartime.model.language_model import LanguageModel, masked_token_losses
from lineartime.training.evaluation import evaluate, evaluate_data
from lineartime.training.gradient import compute_gradient
from lineartime.training.masking import NO_TARGET, mask_tokens, masked_batch
from lineartime.training.objectives import MaskedTokens
from lineartime.training.run_config import run_config
from lineartime.weights.load import load_model
from tiny_models import CONFIGS, random_ids, random_model, tiny_flash
from tiny_runs import EVAL_EVERY, SETTINGS, STEPS, command, prepare_text

BIDIRECTIONAL = {name: replace(CONFIGS[name], causal=False) for name in ("flash", "flash-quad", "transformer++")}
IDS = random_ids(6, 20)


@pytest.fixture(scope="module")
def stream(masked_data):
    return open_split(masked_data, "validation")


@pytest.fixture(scope="module")
def whole(processes, masked_data, tmp_path_factory):
    """A run from the command line, and what it printed."""
    folder = tmp_path_factory.mktemp("whole")
    code = processes.run(command(masked_data, folder / "run", task="c4"), folder / "printed")
    printed = (folder / "printed").read_text()
    assert code == 0, printed
    return folder / "run", printed


def asked_of(*counts):
    """Targets for rows of 20 tokens, so many in each row."""
    targets = torch.full((len(counts), 20), NO_TARGET)
    for row, count in enumerate(counts):
        targets[row, torch.randperm(20, generator=torch.Generator().manual_seed(row))[:count]] = 5
    return targets


def a_stream(vocab_size=50, special=(0, 1, 2), mask=1):
    """What `mask_tokens` reads of a stream."""
    ordinary = np.setdiff1d(np.arange(vocab_size), special)
    return SimpleNamespace(mask=mask, special=list(special), ordinary=ordinary)


def assert_binomial(count, n, p):
    """Within five standard deviations; the masks are always the same."""
    assert abs(count - n * p) < 5 * math.sqrt(n * p * (1 - p)), f"{count} of {n}, {n * p:.0f} expected"


def test_shares():
    n = 400_000
    stream = a_stream()
    ids = np.random.default_rng(0).integers(3, 50, n)
    inputs, targets = mask_tokens(ids, stream, seed=0, epoch=0, row=0)
    asked = targets != NO_TARGET
    assert (targets[asked] == ids[asked]).all() and (inputs[~asked] == ids[~asked]).all()
    n_asked = int(asked.sum())
    masked = inputs[asked] == stream.mask
    other = ~masked & (inputs[asked] != ids[asked])
    assert_binomial(n_asked, n, 0.15)
    assert_binomial(masked.sum(), n_asked, 0.8)
    assert_binomial(other.sum(), n_asked, 0.1 * 46 / 47)  # one replacement in 47 is the token itself
    for token in stream.ordinary:
        assert_binomial((inputs[asked][other] == token).sum(), int(other.sum()), 1 / 47)


@settings(max_examples=60)
@given(special=st.sets(st.integers(0, 29), min_size=1, max_size=20), length=st.integers(0, 200),
       seed=st.integers(-(2**63), 2**64), epoch=st.integers(0, 10**6), row=st.integers(0, 10**12))
def test_special_tokens_are_neither_chosen_nor_put_in(special, length, seed, epoch, row):
    stream = a_stream(30, sorted(special), mask=min(special))
    ids = np.random.default_rng(length).integers(0, 30, length)
    before = ids.copy()
    inputs, targets = mask_tokens(ids, stream, seed=seed, epoch=epoch, row=row)
    assert inputs.dtype == targets.dtype == np.int64 and inputs.shape == targets.shape == ids.shape
    is_special = np.isin(ids, stream.special)
    assert (targets[is_special] == NO_TARGET).all() and (inputs[is_special] == ids[is_special]).all()
    assert ((inputs[~is_special] == stream.mask) | ~np.isin(inputs[~is_special], stream.special)).all()
    assert (ids == before).all()


def test_masks_are_a_function_of_seed_epoch_and_row(stream):
    assert (stream.mask, stream.special) == (1, [0, 1, 2])
    assert sorted([*stream.ordinary, *stream.special]) == list(range(stream.vocab_size))
    ids = stream.read(0, 200)
    places = [(seed, epoch, row) for seed in (0, 1) for epoch in (0, 1) for row in (0, 1, 2**40)]
    first = {place: mask_tokens(ids, stream, seed=place[0], epoch=place[1], row=place[2]) for place in places}
    for seed, epoch, row in reversed(places):
        shorter = mask_tokens(ids[:70], stream, seed=seed, epoch=epoch, row=row)
        assert np.array_equal(shorter, np.array(first[seed, epoch, row])[:, :70])
    assert len({targets.tobytes() for _, targets in first.values()}) == len(places)


def test_masks_are_those_on_record():
    """So that a run resumed under another version of numpy goes on with the same masks."""
    inputs, targets = mask_tokens(np.tile(np.arange(3, 50), 3), a_stream(), seed=1, epoch=2, row=3)
    asked = np.flatnonzero(targets != NO_TARGET)
    assert asked.tolist() == [2, 3, 12, 23, 49, 69, 86, 100, 101, 109, 114, 117, 132, 135, 139, 140]
    assert targets[asked].tolist() == [5, 6, 15, 26, 5, 25, 42, 9, 10, 18, 23, 26, 41, 44, 48, 49]
    assert inputs[asked].tolist() == [1, 1, 1, 1, 1, 1, 9, 1, 1, 1, 1, 1, 1, 1, 48, 19]


def test_a_step_is_rows_of_the_stream_under_their_masks(stream):
    context, per_step = 37, 4
    n_rows, seen = len(stream) // context, []
    for step in range(2 * n_rows // per_step + 1):
        batch = masked_batch(stream, seed=5, step=step, rows_per_step=per_step, context=context)
        for i, (inputs, targets) in enumerate(zip(*batch, strict=True)):
            original = np.where(targets == NO_TARGET, inputs, targets)
            row = next(row for row in range(n_rows)
                       if np.array_equal(stream.read(row * context, (row + 1) * context), original))
            epoch = (step * per_step + i) // n_rows
            expected = mask_tokens(original, stream, seed=5, epoch=epoch, row=row)
            assert np.array_equal(inputs, expected[0]) and np.array_equal(targets, expected[1])
            seen.append(row)
    assert sorted(seen[:n_rows]) == sorted(seen[n_rows : 2 * n_rows]) == list(range(n_rows))
    assert seen[:n_rows] != seen[n_rows : 2 * n_rows]


@pytest.mark.parametrize("token", ["[MASK]", "[SEP]"])
def test_a_tokenizer_that_reads_a_mask_out_of_text_is_refused(token, tmp_path):
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, token: 2}, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text(f"a {token} a")
    with pytest.raises(DataError, match=r"reads \[MASK\] or \[SEP\] out of text"):
        prepare([tmp_path / "a.txt"], tmp_path / "data", tokenizer=tmp_path / "tokenizer.json", mlm=True)


@pytest.mark.parametrize("name", BIDIRECTIONAL)
def test_the_loss_is_that_of_the_whole_head_where_it_is_asked(name):
    model, targets = random_model(BIDIRECTIONAL[name]), asked_of(3, 0, 20, 1)
    log_p = model(IDS[:4]).log_softmax(-1)
    expected = torch.stack([-log_p[row, place, 5] for row, place in (targets != NO_TARGET).nonzero()])
    found = masked_token_losses(model, IDS[:4], targets)
    assert found.dtype == torch.float64 and (found - expected).abs().max() < 1e-12
    assert masked_token_losses(model.float(), IDS[:4], targets).dtype == torch.float32


def gradient_of(model, targets, n_rows, **changes):
    config = TrainConfig(**{"clip_scope": "global", "clip": 0.5, **changes})
    loss, norm = compute_gradient(model, MaskedTokens(None, None, None), [IDS[: len(targets)], targets], n_rows, config)
    return loss, norm, [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("counts", [(1, 2, 3, 4, 5, 6), (0, 0, 7, 1, 0, 20), (20, 0, 0, 0, 0, 0)])
def test_micro_batches_with_different_numbers_of_targets_add_up_to_the_batch(counts):
    model, targets = random_model(BIDIRECTIONAL["flash"]), asked_of(*counts)
    model.zero_grad()
    expected = masked_token_losses(model, IDS[:6], targets).mean()
    expected.backward()
    norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    whole = gradient_of(model, targets, 6, clip=None)[2]
    for n_rows in (1, 2, 3, 6):
        loss, plain_norm, plain = gradient_of(model, targets, n_rows, clip=None)
        assert loss == pytest.approx(expected.item(), rel=1e-12) and plain_norm == pytest.approx(norm.item())
        clipped = gradient_of(model, targets, n_rows)[2]
        for g, c, w in zip(plain, clipped, whole, strict=True):
            assert (g * min(1, 0.5 / norm) - c).abs().max() < 1e-13 and (g - w).abs().max() < 1e-12 * norm


@pytest.mark.parametrize("scope", ["local", "global"])
def test_nothing_asked_is_a_loss_of_zero_and_no_gradient(scope):
    model = random_model(BIDIRECTIONAL["flash"])
    loss, norm, gradient = gradient_of(model, asked_of(0, 0, 0, 0), 2, clip_scope=scope)
    assert (loss, norm) == (0, 0) and all((g == 0).all() for g in gradient)


def test_a_run_leaves_what_masked_language_modelling_has(whole, stream):
    out, printed = whole
    result = json.loads((out / "result.json").read_text())
    assert set(result) == {"run", "steps", "held_out", "peak_mib", "sha256"}
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
    assert all(set(line["held_out"]) == {"loss", "n_tokens", "of_tokens"} for line in lines if "held_out" in line)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[0] == pytest.approx(math.log(300), rel=0.02) and np.mean(losses[-4:]) < np.mean(losses[:4])
    model, tokenizer, _ = load_model(out)
    assert not model.config.causal and model.config.norm == "scale_norm" and tokenizer.mask == stream.mask
    again = evaluate(model, stream, batch_rows=5).to_dict()
    assert again["masked"] and (again["n_tokens"], again["n_read"]) == (held_out["n_tokens"], held_out["n_read"])
    assert again["perplexity"] == pytest.approx(held_out["perplexity"], rel=1e-6)
    assert not (out / "sample.txt").exists()  # it writes no text
    assert imread(out / "loss.png").size


def test_the_score_is_that_of_the_masked_tokens_each_weighing_the_same(stream):
    """Against a loop over rows, of which the last is shorter, that knows nothing of batches."""
    model, nll, count = tiny_flash(stream, "c4"), 0.0, 0
    assert len(stream) % 32
    for row, start in enumerate(range(0, len(stream), 32)):
        ids = stream.read(start, min(start + 32, len(stream)))
        inputs, targets = mask_tokens(ids, stream, seed=0, epoch=0, row=row)
        log_p = model(torch.from_numpy(inputs)[None])[0].log_softmax(-1).detach().numpy()
        costs = [-log_p[place, targets[place]] for place in np.flatnonzero(targets != NO_TARGET)]
        nll, count = nll + sum(costs), count + len(costs)
    for batch_rows in (5, 16):
        result = evaluate(model, stream, context=32, batch_rows=batch_rows)
        assert result.n_tokens == count and result.nll == pytest.approx(nll, rel=1e-12)
        assert result.perplexity == pytest.approx(math.exp(nll / count))


def test_the_score_in_training_reads_as_many_tokens_as_asked(masked_data, stream, tmp_path):
    config = run_config({"model": "flash", "task": "c4", "data": str(masked_data), "out": str(tmp_path), **SETTINGS,
                         "vocab_size": stream.vocab_size, "end_of_document": stream.end_of_document,
                         "precision": "bfloat16"})
    model, read = LanguageModel(config.model), []
    task = MaskedTokens(config, open_split(masked_data, "train"), stream)
    part, other = (evaluate(model, stream, context=32, max_tokens=200, spread=True, precision=each)
                   for each in ("bfloat16", "float32"))
    found = task.evaluate(model, read.append)
    assert found == {"loss": part.loss, "n_tokens": 224, "of_tokens": stream.n_tokens} and part.loss != other.loss
    assert (part.n_read, part.n_words, part.n_bytes) == (224, 0, 0)  # masked tokens are no text
    twice = Mixture((stream, stream), (1, 1))
    evaluate_data(model, twice, context=32, batch_rows=1, max_tokens=128, progress=read.append)
    assert read == [64, 128, 192, 224, 32, 64, 96, 128]
    assert model.training


def test_bad_input_is_one_line_and_leaves_nothing(whole, stream, tmp_path, call):
    plain = prepare_text(tmp_path)
    for words, arguments in [
        (["no [MASK]", str(plain), "prepare with --mlm"], command(plain, tmp_path / "run", task="c4")),
        (["only a causal language model"], ["generate", whole[0], "Reader, I"]),
        (["mlm None -> True"], ["prepare", tmp_path / "text.txt", "--mlm", "--held-out", 0.2, "--tokenizer", "bytes",
                                "--out", plain]),
        (["different tokenizers"], ["evaluate", whole[0], "--data", plain])]:
        code, printed, err = call(*arguments)
        assert_refused(code, err, 2, *words)
        assert printed == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prepared", "text.txt"]
    with pytest.raises(UsageError, match=r"no \[MASK\]"):
        evaluate(tiny_flash(stream, "c4"), open_split(plain, "validation"), context=32)
