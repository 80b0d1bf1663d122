"""Windows over documents, what training aims at, and spans found again in the text."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Tokenizers
from tokenizers.normalizers import Replace
from transformers import AutoModelForQuestionAnswering

import lineartime.hf
from lineartime.base.errors import CheckpointError, UsageError
from lineartime.config import ModelConfig, model_config
from lineartime.data.tokenizer import Tokenizer, byte_tokenizer, train_tokenizer
from lineartime.folders import QUESTION_ANSWERING
from lineartime.model.language_model import LanguageModel, SpanModel
from lineartime.tasks.qa import spans
from lineartime.tasks.qa.finetune import span_config, span_model
from lineartime.tasks.qa.questions import Document, Question
from lineartime.tasks.qa.spans import CANDIDATE, END, START, TOKEN, WindowConfig
from tiny_checkpoints import write_checkpoint
from tiny_models import drawn

WORDS = "Ada wrote the first program in 1843. Émile likes naïve cafés, 東京 and 😀 faces; the end. "
BPE = train_tokenizer([WORDS * 20], 330, mlm=True)
BYTES = byte_tokenizer(mlm=True)
TOKENIZERS = pytest.mark.parametrize("tokenizer", [BPE, BYTES], ids=["bpe", "bytes"])
TEXTS = st.lists(st.sampled_from([*WORDS.split(), " ", "\n", "  ", "é", "😀", "\u0130", "ß", "e\u0301", "<|endoftext|>",
                                  "[SEP]", "\t", "\u2028", "x" * 9]), max_size=40).map( lambda parts: " ".join(parts))


def asked(text="Who wrote it?", *documents, answers=(), id="q"):
    return Question(id, text, tuple(Document(str(i), each) for i, each in enumerate(documents)), tuple(answers),
                    tuple(answers))


@TOKENIZERS
@settings(max_examples=80)
@given(text=TEXTS)
def test_offsets_give_back_the_text(tokenizer, text):
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids.tolist() == tokenizer.encode(text)
    if not text:
        assert offsets.shape == (0, 2)
        return
    assert offsets[0, 0] == 0 and offsets[-1, 1] == len(text)
    assert (np.diff(offsets, axis=0) >= 0).all() and (offsets[:, 0] < offsets[:, 1]).all()
    assert (offsets[1:, 0] <= offsets[:-1, 1]).all()  # no character is left out
    for token, (start, stop) in zip(ids, offsets, strict=True):  # of a token with part of a character only the rest
        spelled = tokenizer.decode([token])
        assert spelled == text[start:stop] or ("\ufffd" in spelled and spelled.strip("\ufffd") in text[start:stop])


@settings(max_examples=150)
@given(context=st.integers(16, 90), question=st.integers(0, 40), n=st.integers(0, 500),
       stride=st.none() | st.integers(1, 200), longest=st.integers(1, 40))
def test_every_token_is_in_a_window_and_every_answer_is_whole_in_one(context, question, n, stride, longest):
    windows = WindowConfig(context, stride, longest)
    question = min(question, context // 4)
    parts, room = windows.cut(question, n), context - question - 3
    assert all(0 <= first < stop <= n and stop - first <= room for first, stop in parts)
    assert {token for first, stop in parts for token in range(first, stop)} == set(range(n))
    assert [first for first, _ in parts] == sorted({first for first, _ in parts})
    answer = min(longest, room // 2)
    for start in range(max(n - answer + 1, 0)):
        assert any(first <= start and start + answer <= stop for first, stop in parts)
    if stride is not None and stride <= room - answer:
        assert all(b[0] - a[0] == stride for a, b in itertools.pairwise(parts))


@TOKENIZERS
@settings(max_examples=100)
@given(text=TEXTS, other=TEXTS, question=TEXTS, context=st.integers(16, 60))
def test_windows_are_cls_question_sep_document_sep(tokenizer, text, other, question, context):
    windows = WindowConfig(context, max_answer_tokens=5)
    seen = {0: set(), 1: set()}
    for window in spans.question_windows(tokenizer, asked(question, text, other), windows):
        passage = window.passage
        ids, n = window.ids.tolist(), len(window.ids)
        head = [tokenizer.end_of_document, *tokenizer.encode(question)[: context // 4], tokenizer.separator]
        part = passage.ids[window.first : window.stop].tolist()
        assert ids == [*head, *part, tokenizer.separator] and n <= context
        assert passage.text == (text, other)[window.document]
        candidates = np.flatnonzero(window.roles & CANDIDATE)
        assert candidates.tolist() == [0, *range(len(head), n - 1)]
        assert (window.roles & TOKEN).all() and not window.answered
        assert np.flatnonzero(window.roles & START).tolist() == np.flatnonzero(window.roles & END).tolist() == [0]
        seen[window.document] |= set(range(window.first, window.stop))
    assert seen == {i: set(range(len(tokenizer.encode(each)))) for i, each in enumerate((text, other))}


def target_texts(question, tokenizer):
    found = []
    for window in spans.question_windows(tokenizer, question, WindowConfig(400)):
        starts, ends = (np.flatnonzero(window.roles & role) - window.offset + window.first for role in (START, END))
        places = [window.passage.characters(a, b) for a, b in zip(starts, ends, strict=True)]
        found.append([window.passage.text[a:b] for a, b in places] if window.answered else None)
    return found


@TOKENIZERS
def test_every_occurrence_of_an_alias_is_a_target(tokenizer):
    text = "The café of Émile-Noël. EMILE no; émile  noël! Nothing; (Tokyo) 東京 and Tokyo's"
    question = asked("?", text, "no answer here", answers=["Émile Noël", "東京", "Tokyo"])
    expected = ["Émile-Noël", "émile  noël", "Tokyo", "東京", "Tokyo"]
    assert target_texts(question, tokenizer) == [expected, None]
    inner = Tokenizers.from_str(tokenizer.json)
    inner.normalizer = Replace("1843", "")  # then the answer has no token
    assert target_texts(asked("?", "it was 1843 then", answers=["1843"]), Tokenizer(inner.to_str(), mlm=True)) == [None]


def test_training_takes_all_windows_with_an_answer_and_a_share_of_the_others():
    questions = [asked("?", "x " * 300, "x " * 150 + "Ada " + "x " * 150, answers=["Ada"], id=str(i))
                 for i in range(30)]
    questions += [asked("?", "x", id="unlabelled"), asked("?", answers=["x"], id="no document"),
                  asked("?", " ", answers=["x"], id="blank"), asked("?", "y", answers=["x"], id="not found")]

    def rows(share, seed=0, order=1):
        return spans.training_windows(BPE, questions[::order], WindowConfig(64), negatives=share, seed=seed)

    none, some, every = (rows(share).counts for share in (0, 0.3, 1))
    for each in (none, some, every):
        assert list(each.values())[:4] == [34, 1, 1, 2]
    assert none["windows"] == none["windows_with_answer"] == every["windows_with_answer"] >= 30
    without = every["windows"] - none["windows"]
    assert 0.2 * without < some["windows"] - none["windows"] < 0.4 * without
    assert rows(0.3).sha256() == rows(0.3).sha256() != rows(0.3, seed=1).sha256()
    # which windows depends on no other question
    forwards, backwards = (sorted(ids.tobytes() for ids in rows(0.3, order=order).ids) for order in (1, -1))
    assert forwards == backwards


SIZES = {"n_layers": 2, "d_model": 16, "vocab_size": BPE.vocab_size, "context": 64, "causal": False,
         "end_of_document": BPE.end_of_document}
CONFIGS: dict[str, ModelConfig] = {
    "flash": model_config("flash", **SIZES, query_key_dim=8, chunk_size=8, cls_softmax=True),
    "flash-quad": model_config("flash-quad", **SIZES, query_key_dim=8),
    "transformer": model_config("transformer", **SIZES, n_heads=2),
    "mc-tfm++": model_config("mc-tfm++", **SIZES, n_heads=2, chunk_size=8),
}


def random_spans(config, seed=0):
    return drawn(SpanModel(config).double(), seed, of_layers=0.4, of_others=0.3)


def test_losses_are_minus_the_log_of_the_sum_over_targets():
    roles = torch.tensor([[TOKEN | CANDIDATE, TOKEN, TOKEN | CANDIDATE | START, TOKEN | CANDIDATE | START | END,
                           TOKEN | CANDIDATE | END, TOKEN, 0],
                          [TOKEN | CANDIDATE | START | END, TOKEN, TOKEN | CANDIDATE, TOKEN, 0, 0, 0]],
                         dtype=torch.uint8)
    scores = torch.randn(2, 6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    p = scores.detach().exp()

    def model(ids, token_mask_BT):
        assert ids.shape == (2, 6) and token_mask_BT.sum(1).tolist() == [6, 4]
        return scores

    logits = spans.span_logits(model, torch.zeros(2, 7, dtype=torch.long), roles)
    losses = spans.span_losses(logits, roles)
    z = p[0, [0, 2, 3, 4]].sum(0)
    expected = [[-(p[0, [2, 3], 0].sum() / z[0]).log(), -(p[0, [3, 4], 1].sum() / z[1]).log()],
                [-(p[1, 0, k] / p[1, [0, 2], k].sum()).log() for k in (0, 1)]]
    assert torch.allclose(losses, torch.tensor(expected, dtype=torch.float64))
    losses.sum().backward()
    assert scores.grad.isfinite().all() and (scores.grad[0, [1, 5]] == 0).all()


QUESTIONS = [asked("Who wrote it?", WORDS * 3, " ", "Émile", id="1", answers=["Ada"]), asked("x", id="2"),
             asked("", "", " \n ", id="3"), asked("why " * 40, "😀" * 30, id="4"), asked("?", WORDS, id="5")]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_predictions_do_not_depend_on_the_batch(config):
    model = random_spans(config)
    windows = WindowConfig(40, max_answer_tokens=7)
    one, many, all_at_once = (list(spans.predict(model, BPE, QUESTIONS, windows, batch_rows=n)) for n in (1, 3, 1000))
    for a, *others in zip(one, many, all_at_once, strict=True):
        for b in others:
            assert a.question is b.question and a.answer == b.answer and a.n_windows == b.n_windows
            assert a.loss == pytest.approx(b.loss)
            if a.span is not None:
                assert a.span[1:] == b.span[1:] and a.span.score == pytest.approx(b.span.score)
    assert [prediction.span is None for prediction in one] == [False, True, True, False, False]
    assert [prediction.n_windows for prediction in one][1:3] == [0, 1]
    n_answered: list[int] = []
    scores, answers = spans.evaluate_questions(model, BPE, QUESTIONS, context=40, max_answer_tokens=7,
                                               progress=n_answered.append)
    assert n_answered[-1] == len(QUESTIONS) and n_answered == sorted(n_answered)
    with pytest.raises(UsageError, match="wrong value: batch_rows = 0"):
        spans.evaluate_questions(model, BPE, QUESTIONS, batch_rows=0)
    assert answers == {each.question.id: each.answer for each in one}
    assert scores["loss"] == pytest.approx(one[0].loss / one[0].n_windows)  # of the labelled question
    assert scores["windows"] == sum(each.n_windows for each in one) and scores["questions_without_document"] == 1


@TOKENIZERS
@settings(max_examples=60)
@given(text=TEXTS, question=TEXTS, seed=st.integers(0, 1000), longest=st.integers(1, 9), coarse=st.booleans())
def test_the_best_span_is_the_best_of_all(tokenizer, text, question, seed, longest, coarse):
    """Against every span of every window tried one by one; ties go to the earliest, shortest."""
    generator, logits_of = np.random.default_rng(seed), {}

    class Model(torch.nn.Linear):
        def forward(self, ids_BT, token_mask_BT):
            shape = (ids_BT.shape[1], 2)
            drawn = generator.integers(0, 3, shape) if coarse else generator.normal(size=shape)
            logits_of[len(logits_of)] = drawn.astype(np.float64)
            return torch.from_numpy(logits_of[len(logits_of) - 1])[None]

    windows, one = WindowConfig(24, max_answer_tokens=longest), asked(question, text)
    (found,) = spans.predict(Model(1, 1), tokenizer, [one], windows, batch_rows=1)
    best = None
    for number, window in enumerate(spans.question_windows(tokenizer, one, windows)):
        logits = logits_of[number]
        for i in range(window.first, window.stop):
            for j in range(i, min(i + longest, window.stop)):
                (a, b), (c, d) = window.passage.offsets[i], window.passage.offsets[j]
                if not text[a:b].strip() or not text[c:d].strip():
                    continue
                value = (logits[i - window.first + window.offset, 0] + logits[j - window.first + window.offset, 1]
                         - logits[0].sum())
                if best is None or value > best[0] + 1e-9:
                    best = value, a, d
    if best is None:
        assert found.span is None and found.answer == "" and not text.strip()
    else:
        assert found.span.score == pytest.approx(best[0])
        assert found.answer == text[best[1] : best[2]].strip() == text[found.span.start : found.span.stop] != ""


def pretrained(preset="flash", **changes):
    return drawn(LanguageModel(replace(CONFIGS[preset], cls_softmax=False, **changes)))


def test_the_papers_settings_are_the_defaults():
    long = LanguageModel(model_config("flash", n_layers=1, d_model=8, vocab_size=11, causal=False, chunk_size=256))
    assert span_config(long, 4096, {}) == replace(long.config, context=4096, chunk_size=128, cls_softmax=True)
    quad = LanguageModel(model_config("flash-quad", n_layers=1, d_model=8, vocab_size=11, causal=False))
    assert span_config(quad, 4096, {}) == replace(quad.config, context=4096, attn_scale_len=512)
    plus = LanguageModel(model_config("flash+", "c4", n_layers=1, d_model=32, query_key_dim=16, chunk_size=8,
                                      vocab_size=20, end_of_document=0, document_grid="own"))
    found = span_config(plus, 24, {})  # a window is one document
    assert found.cls_softmax and found.document_grid == "row"
    other = LanguageModel(model_config("mc-tfm++", n_layers=1, d_model=24, vocab_size=11, causal=False))
    assert span_config(other, 4096, {}) == replace(other.config, context=4096)  # Section 4.3 changes FLASH alone


def test_what_fine_tuning_cannot_change_is_refused():
    with pytest.raises(UsageError, match="sees both ways"):
        span_config(pretrained(causal=True), 64, {})
    with pytest.raises(UsageError, match="row longer than the position table"):
        span_config(LanguageModel(CONFIGS["transformer"]), 65, {})
    with pytest.raises(CheckpointError, match=r"do not fit: .*layers\.0\..*in_proj"):
        span_model(pretrained(), replace(CONFIGS["flash"], query_key_dim=4), 0)
    with pytest.raises(CheckpointError, match=r"rel_pos_bias\.a is missing"):
        span_model(pretrained(), replace(CONFIGS["flash"], chunk_size=512), 0)


def test_unchanged_settings_keep_the_trunk_as_it_is():
    before = pretrained()
    after = span_model(before, before.config, 5)
    ids = torch.randint(0, BPE.vocab_size, (2, 40))
    assert torch.equal(before.hidden(ids), after.hidden(ids))
    again, other = (span_model(before, before.config, seed).span_head.weight for seed in (5, 6))
    assert torch.equal(after.span_head.weight, again) and not torch.equal(after.span_head.weight, other)
    assert torch.equal(span_model(after, before.config, 6).span_head.weight, after.span_head.weight)


@pytest.mark.parametrize(("old", "new"), [(8, 4), (4, 8), (512, 8), (512, 600)])
def test_another_chunk_size_keeps_what_two_tokens_of_a_chunk_are_to_each_other(old, new):
    """relu(q k / n + b)^2 in a row of one short chunk, the linear part left out."""
    before = pretrained(chunk_size=old, chunk_parts="local")
    after = span_model(before, replace(before.config, chunk_size=new), 0)
    ids = torch.randint(5, BPE.vocab_size - 5, (2, min(old, new)))
    assert torch.allclose(before.hidden(ids), after.hidden(ids), atol=1e-5)
    bias = after.layers[0].rel_pos_bias
    if new > old:
        reach = old - 1 if old < 512 else new - 1
        assert torch.allclose(bias.at(torch.tensor([new - 1, 1 - new])),
                              before.layers[0].rel_pos_bias.at(torch.tensor([reach, -reach])))


@pytest.mark.parametrize(("preset", "old", "new"), [
    ("mc-tfm++", {"attn_kernel": "relu2"}, {"chunk_size": 4}),
    ("mc-tfm++", {"attn_kernel": "relu2", "key_conv": 3, "local_key_conv": True}, {"chunk_size": 16}),
    ("transformer", {"attn_kernel": "relu2"}, {"attn_scale_len": 40}),
    ("flash", {"chunk_pooling": "attention", "end_of_document": None}, {"context": 24})], ids=str)
def test_another_n_keeps_the_function(preset, old, new):
    """In a row of one chunk, whose linear half reads the whole row with any chunk size. With
    learned chunk weights n is the number of chunks, and the row has several."""
    before = pretrained(preset, **old)
    after = span_model(before, replace(before.config, **new), 0)
    ids = torch.randint(5, BPE.vocab_size - 5, (2, 24 if "context" in new else 4))
    assert torch.allclose(before.hidden(ids), after.hidden(ids), atol=1e-5)
    config = before.config
    assert (after.config.scale_len, after.config.n_chunks) != (config.scale_len, config.n_chunks)


def test_first_to_all_adds_heads_and_a_shorter_context_cuts_the_table():
    before = pretrained()
    after = span_model(before, replace(before.config, first_to_all=True), 0)
    gamma = after.layers[0].scale_offset.gamma
    assert torch.equal(gamma[:4], before.layers[0].scale_offset.gamma) and len(gamma) == 6
    words = LanguageModel(CONFIGS["transformer"])
    short = span_model(words, replace(words.config, context=20), 0)
    assert torch.equal(short.abs_pos.weight, words.abs_pos.weight[:20])


def transformers_model(model, folder, *more):
    """The model in `transformers`, and what was missing in its weights."""
    write_checkpoint(folder, model, BPE, *more)
    theirs, info = AutoModelForQuestionAnswering.from_pretrained(folder, output_loading_info=True)
    assert not info["unexpected_keys"]
    return theirs, {name.removeprefix("model.") for name in info["missing_keys"]}


def test_auto_model_for_question_answering(tmp_path):
    ours = random_spans(CONFIGS["flash"]).float()
    theirs, missing = transformers_model(ours, tmp_path, QUESTION_ANSWERING)
    assert isinstance(theirs, lineartime.hf.LineartimeForQuestionAnswering) and not missing
    ids = torch.randint(0, BPE.vocab_size, (2, 20))
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0

    with torch.no_grad():
        logits, out = ours(ids, token_mask_BT=mask.bool()), theirs(ids, attention_mask=mask)
    assert torch.allclose(out.start_logits[0], logits[0, :, 0], atol=1e-6)
    assert torch.allclose(out.end_logits[1, :12], logits[1, :12, 1], atol=1e-6)
    assert (out.end_logits[1, 12:] < -1e30).all()
    start = -logits[0, :, 0].log_softmax(0)[3]
    end = -(logits[0, :, 1].log_softmax(0)[5] + logits[1, :12, 1].log_softmax(0)[7]) / 2
    # The second start lies outside its row, and does not count.
    at = {"start_positions": torch.tensor([3, 40]), "end_positions": torch.tensor([5, 7])}
    assert theirs(ids, mask, **at).loss.item() == pytest.approx((start + end).item() / 2, rel=1e-5)
    theirs.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["architectures"] == [QUESTION_ANSWERING]


def test_transformers_starts_a_span_head_on_a_masked_model(tmp_path):
    ours = pretrained()
    theirs, missing = transformers_model(ours, tmp_path)
    assert missing == {"span_head.weight", "span_head.bias"}
    weight = theirs.model.span_head.weight
    assert 0.005 < weight.std() < 0.05 and (theirs.model.span_head.bias == 0).all()
    assert torch.equal(theirs.model.embed.weight, ours.embed.weight)
    with pytest.raises(UsageError, match="sees both ways"):
        SpanModel(replace(ours.config, causal=True))
