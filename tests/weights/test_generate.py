"""Sampling and the loop around it: settings, and independent rows and seeds; and a decode step as
a function: it is `decode_step`, it is one graph, and the state that goes in is left as it is."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from lineartime.base.errors import NumericsError, UsageError
from lineartime.config import model_config
from lineartime.data.tokenizer import TOKENIZER_FILE, load_tokenizer
from lineartime.folders import MODELS
from lineartime.model.language_model import LanguageModel
from lineartime.weights.generation.generate import decode_step, generate, prefill, sample
from lineartime.weights.generation.step import DecodeStep
from marks import rest
from tiny_models import BIDIRECTIONAL, BOTH_GRIDS, CONTEXT, FLASH, UNPACKED, case_of, random_ids, random_model, with_end

END = 0


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    torch.manual_seed(0)
    made = LanguageModel(model_config("flash", n_layers=2, d_model=16, query_key_dim=8, chunk_size=8, context=32,
                                      vocab_size=23, end_of_document=END)).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    with torch.no_grad():
        made.head_bias[END] = -100.0
    return made.eval()


P = [0.5, 0.3, 0.15, 0.05]


@pytest.mark.parametrize(("how", "expected"), [
    ({"temperature": 0.0}, [1, 0, 0, 0]), ({}, P), ({"temperature": 2.0}, [0.379, 0.293, 0.208, 0.120]),
    ({"top_k": 2}, [0.625, 0.375, 0, 0]), ({"top_k": 99}, P),
    ({"top_p": 0.5}, [1, 0, 0, 0]), ({"top_p": 0.6}, [0.625, 0.375, 0, 0]), ({"top_p": 1.0}, P)])
def test_how_often_each_token_is_drawn(how: dict[str, float], expected: list[float]) -> None:
    """Top-p keeps the smallest set whose probabilities add up to p, wherever its tokens stand."""
    for turn in (1, -1):
        generators = [torch.Generator().manual_seed(i) for i in range(4000)]
        ids = sample(torch.tensor(P[::turn]).log().expand(4000, -1), generators=generators,
                     **{"temperature": 1.0, "top_k": None, "top_p": None, **how})
        assert (torch.bincount(ids, minlength=4) / 4000).tolist() == pytest.approx(expected[::turn], abs=0.03)


def test_a_row_that_has_ended_does_not_end_the_others() -> None:
    """The first prompt stops at the end of the position table, and the second goes on to it."""
    seen: list[tuple[int, int]] = []

    def stop(row: int, ids: list[int]) -> bool:
        seen.append((row, ids[-1]))
        return row == 0 and len(ids) == 3

    torch.manual_seed(1)
    model = LanguageModel(model_config("transformer", n_layers=2, d_model=16, n_heads=2, context=32, vocab_size=23,
                                       end_of_document=END)).double().eval()
    with torch.no_grad():
        model.head_bias[END] = -100.0
    prompts = [[1 + i % 20 for i in range(29)], [3, 4]]
    (alone,) = generate(model, prompts[1:], max_new_tokens=20, temperature=0.0)
    first, second = generate(model, prompts, max_new_tokens=20, stop=stop)
    assert len(first) == 3 and second == alone and len(alone) == 20
    assert [token for row, token in seen if row == 1] == second


def test_a_seed_gives_the_same_text_and_rows_do_not_touch_each_other(model: LanguageModel) -> None:
    prompts = [[1, 2, 3], [4] * 20, [5]]
    together = generate(model, prompts, max_new_tokens=25, temperature=0.9, seed=3)
    assert together == generate(model, prompts, max_new_tokens=25, temperature=0.9, seed=3)
    assert together != generate(model, prompts, max_new_tokens=25, temperature=0.9, seed=4)
    first = generate(model, torch.tensor([[1, 2, 3]]), max_new_tokens=25, temperature=0.9, seed=3)  # type: ignore
    assert together[:1] == first
    same = generate(model, [[1, 2, 3]] * 2, max_new_tokens=25, temperature=0.9, seed=3)
    assert same[0] == first[0] != same[1]  # each row draws from its own generator


def test_a_row_ends_at_the_end_of_its_document_and_the_others_go_on(model: LanguageModel,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    free, original, calls = generate(model, [[1], [2]], max_new_tokens=12), model.logits, []

    def end_row_0_at_the_fifth_token(x_BD: torch.Tensor) -> torch.Tensor:
        calls.append(logits_BV := original(x_BD))
        if len(calls) == 5:
            logits_BV[0, END] = 1e9
        return logits_BV

    monkeypatch.setattr(model, "logits", end_row_0_at_the_fifth_token)
    first, second = generate(model, [[1], [2]], max_new_tokens=12)
    assert first == free[0][:4] and second == free[1]


def test_a_long_prompt_is_read_in_pieces_with_progress(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = torch.randint(1, 23, (101,)).tolist()
    whole, _ = prefill(model, [prompt])
    monkeypatch.setattr("lineartime.weights.generation.generate.PIECE_TOKENS", 16)
    read: list[int] = []
    pieces, state = prefill(model, [prompt, prompt[:40]], read.append)
    assert torch.allclose(whole[0], pieces[0], atol=1e-12) and read == [16, 32, 48, 64, 80, 96, 101]
    assert state.seq_lens_B.tolist() == [101, 40]
    with torch.no_grad():  # outside of inference mode
        after = model.logits(model.extend(torch.tensor([[7], [7]]), torch.tensor([1, 1]), state)[0][:, 0])
    assert torch.allclose(after[1], model(torch.tensor([[*prompt[:40], 7]]))[0, -1], atol=1e-12)


def test_what_means_nothing_is_refused(model: LanguageModel) -> None:
    for wrong in ({"temperature": -1.0}, {"temperature": math.nan}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5},
                  {"max_new_tokens": -1}, {"prompts": [[1], []]}, {"prompts": [[23]]}, {"prompts": [[-1]]}):
        with pytest.raises(UsageError):
            generate(model, **{"prompts": [[1]], "max_new_tokens": 3, **wrong})  # type: ignore[arg-type]
    broken = copy.deepcopy(model)
    for bad, temperature in ((math.nan, 0.0), (math.inf, 1.0)):
        torch.nn.init.constant_(broken.head_bias, bad)
        with pytest.raises(NumericsError, match="the logits are not numbers"):
            generate(broken, [[1]], max_new_tokens=3, temperature=temperature)


def test_texts_give_texts_and_ids_give_ids() -> None:
    """A text begins a document, as on the command line, and new text is returned."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer(MODELS / "small" / TOKENIZER_FILE)
    model = LanguageModel(model_config("flash", n_layers=1, d_model=16, query_key_dim=8, chunk_size=8, context=32,
                                       vocab_size=tokenizer.vocab_size, end_of_document=tokenizer.end_of_document))
    texts, how = ["It was", "a dark and", ""], {"max_new_tokens": 6, "temperature": 1.0, "top_p": 0.9}
    ids = generate(model, [[tokenizer.end_of_document, *tokenizer.encode(text)] for text in texts], **how)
    assert generate(model, texts, tokenizer=tokenizer, **how) == [tokenizer.decode(row) for row in ids]
    assert generate(model, [], tokenizer=tokenizer, max_new_tokens=4) == []
    assert generate(model, [[1]], max_new_tokens=0) == [[]]
    for wrong in (texts, "It was", ["It was", [1, 2]], [1, 2], torch.tensor([1, 2]), [b"It was"]):
        message = "texts need the model's tokenizer" if wrong is texts else "prompts are a list of texts, or"
        with pytest.raises(UsageError, match=message):
            generate(model, wrong, tokenizer=None if wrong is texts else tokenizer, max_new_tokens=1)


PROMPTS = [[5], [1, 2, 3, 4, 5, 6], [7, 0, 8]]  # at different places of their chunks; one has begun a second document
NO_GRAPH = [name for name in BOTH_GRIDS if name.startswith("combiner")]
GROWING = [name for name in BOTH_GRIDS if name.startswith(("transformer", "flash-quad", "hybrid"))]


def begun(name):
    """A step, and the state after the prompts."""
    model = random_model(with_end(BOTH_GRIDS[name]))
    return DecodeStep(model, CONTEXT if name in GROWING else None), prefill(model, PROMPTS)[1]


def assert_same_tokens(run, step, state):
    """Three chunks of tokens, some of which begin documents, give what `decode_step` gives; the
    state that goes in is the one that comes out."""
    tensors = step.to_tensors(state)
    ids_NB = random_ids(14, len(PROMPTS))
    assert (ids_NB == 0).any()
    for ids_B in ids_NB:
        expected = decode_step(step.model, ids_B, state)
        logits_BV, after = run(ids_B, tensors)
        assert (logits_BV - expected).abs().max() < 1e-13
        assert all(after[name].data_ptr() == tensor.data_ptr() for name, tensor in tensors.items())
    assert all(torch.equal(tensors[name], getattr(state, name)) for name in ("seq_lens_B", "start_B"))


@pytest.mark.parametrize("name", [case_of(name) for name in BOTH_GRIDS if name not in NO_GRAPH])
@torch.no_grad()
def test_it_is_the_step_of_decoding(name):
    step, state = begun(name)
    assert_same_tokens(step, step, state)
    state, ids_BT = step.empty_state(2), random_ids(2, 21)
    wanted_BTV = step.model(ids_BT)
    for t, ids_B in enumerate(ids_BT.T):  # and from no token on
        logits_BV, state = step(ids_B, state)
        assert (logits_BV - wanted_BTV[:, t]).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["flash", "transformer++", *rest("flash heads", "flash long memory",
                                                                  "performer", "flash-quad", "flash, own grid")])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@torch.no_grad()
def test_it_is_one_graph(name):
    """torch.export takes it whole, the closing of chunks included; where there is one head, for any
    number of rows."""
    step, state = begun(name)
    if step.model.config.n_heads > 1:
        program = torch.export.export(step, (torch.tensor([1, 2, 3]), step.to_tensors(state)))
    else:
        rows = {0: torch.export.Dim.DYNAMIC}
        example = step.empty_state(2)
        program = torch.export.export(step, (torch.tensor([1, 2]), example),
                                      dynamic_shapes=(rows, dict.fromkeys(example, rows)))
    assert_same_tokens(program.module(), step, state)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["flash", "flash-quad"])
@torch.no_grad()
def test_it_compiles_without_a_break(name):
    step, state = begun(name)
    assert_same_tokens(torch.compile(step, fullgraph=True, backend="aot_eager"), step, state)


def test_what_it_refuses():
    for config, window, words in (
            (BOTH_GRIDS["transformer++"], None, "a window is missing"), (FLASH, 24, "a window is not needed"),
            (BOTH_GRIDS["combiner"], None, "not one graph"),
            (UNPACKED["flash learned weights"], None, "does not decode"),
            (BIDIRECTIONAL["flash cls"], None, "only a causal model decodes"),
            (BOTH_GRIDS["flash-quad"], 0, "window = 0"),
            (BOTH_GRIDS["flash-quad"], CONTEXT + 1, "longer than the position table"),
            (replace(FLASH, document_mask="paper", end_of_document=0), None, "keeps documents apart")):
        with pytest.raises(UsageError, match=words):
            DecodeStep(random_model(config), window)
    model = random_model(BOTH_GRIDS["transformer++"])
    with pytest.raises(UsageError, match=r"the rows fill the window: 6 tokens, window = 6"):
        DecodeStep(model, 6).to_tensors(prefill(model, PROMPTS)[1])
    own = random_model(with_end(BOTH_GRIDS["transformer++, own grid"]))  # whose caches hold one document
    step = DecodeStep(own, 6)
    made = step.to_tensors(prefill(own, [[0, *[3] * 30, 0, 1, 2]])[1])  # which has had room for a longer one
    assert {name: x.shape for name, x in made.items()} == {name: x.shape for name, x in step.empty_state(1).items()}
