"""A state that was saved goes on as if it had never been."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lineartime
from command_line import Call, assert_refused
from lineartime.base.errors import DataError, UsageError
from lineartime.data.tokenizer import byte_tokenizer, train_tokenizer
from lineartime.model.decoding.state import DecodingState
from lineartime.weights.generation.generate import generate, prefill
from tiny_checkpoints import write_model
from tiny_models import CONFIGS, random_ids, random_model, with_end

TEXT = "It was the 3rd, of May;\n\n  and naïve 世界 Reader's  x=1; " * 20


@pytest.mark.parametrize("n_before", [10, 12])
@pytest.mark.parametrize("name", ["flash", "flash+", "flash-quad", "transformer++", "combiner", "performer"])
def test_prompts_go_on_from_a_saved_state_as_from_the_whole(name: str, n_before: int, tmp_path: Path) -> None:
    """From one row for three prompts; the state stays as it is, and so does a copy."""
    model = random_model(with_end(CONFIGS[name]))
    before, prompts = random_ids(n_before).tolist(), [[3, 4, 5, 6, 7], [8], [9, 0, 2]]
    whole, _ = prefill(model, [before + prompt for prompt in prompts])
    expected = generate(model, [before + prompt for prompt in prompts], max_new_tokens=7)
    _, made = prefill(model, [before])
    copy.deepcopy(made).save(tmp_path / "state")
    for room in range(6):  # which is no part of it
        made.reserve(4 * room * (name != "combiner"))
        made.save(tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == (tmp_path / "state").read_bytes()
    with pytest.raises(UsageError, match="does not know its model"):
        replace(made, model=None).save(tmp_path / "other")
    state = DecodingState.load(tmp_path / "state", model)
    kept = {key: tensor.clone() for key, tensor in state.tensors().items()}
    assert not any(tensor.data_ptr() % 64 for tensor in state.tensors().values())  # else matmuls round otherwise
    for _ in range(2):
        logits_BV, _ = prefill(model, prompts, state=state.repeated(3))
        torch.testing.assert_close(logits_BV, whole, rtol=0, atol=1e-12)
        assert generate(model, prompts, max_new_tokens=7, state=state) == expected
    assert all(torch.equal(tensor, kept[key]) for key, tensor in state.tensors().items())
    for call in (lambda state: generate(model, prompts[:2], max_new_tokens=1, state=state),
                 lambda state: prefill(model, prompts[:2], state=state)):
        with pytest.raises(UsageError, match="another number of rows: 3 rows for 2 prompts"):
            call(state.repeated(3))
    with pytest.raises(UsageError, match="the state of another model"):
        generate(random_model(with_end(CONFIGS[name]), seed=1), prompts, max_new_tokens=1, state=state)


def test_the_state_of_a_text_is_that_of_the_whole_text_with_what_follows() -> None:
    """A word may go on behind it. The state has one size."""
    for tokenizer in (byte_tokenizer(), train_tokenizer([TEXT], 300)):
        model = random_model(replace(CONFIGS["flash"], vocab_size=tokenizer.vocab_size,
                                     end_of_document=tokenizer.end_of_document))
        for text in (TEXT * 80, TEXT + "Rea", "I", " \n "):
            told: list[tuple[int, ...]] = []
            state = lineartime.read(model, tokenizer, [text[:7], text[7:]],
                                    progress=lambda *now, told=told: told.append(now))
            whole = [[tokenizer.end_of_document, *tokenizer.encode(text + more)] for more in ("der", " and", "", "\n")]
            ids = [tokenizer.encode(state.text + more) for more in ("der", " and", "", "\n")]
            assert [int(state.seq_lens_B) + len(row) for row in ids] == [len(row) for row in whole]
            torch.testing.assert_close(prefill(model, ids, state=state.repeated(4))[0], prefill(model, whole)[0],
                                       rtol=0, atol=1e-10)
            assert told[-1] == (len(text.encode()) - len(state.text.encode()), int(state.seq_lens_B))
            assert state.n_bytes == model.decoding_state(1).n_bytes and len(state.text) < 20
        with pytest.raises(UsageError, match="goes on with texts and its own tokenizer"):
            generate(model, [[1]], max_new_tokens=1, state=state)
        with pytest.raises(DataError, match="no text"):
            lineartime.read(model, tokenizer, [])


def test_generate_goes_on_from_what_read_has_read(call: Call, tmp_path: Path) -> None:
    write_model(model := tmp_path / "model")
    (book := tmp_path / "book.txt").write_text(TEXT)
    how = ["--temperature", "0", "--max-new-tokens", "12"]
    code, _, err = call("read", book, "--model", model, "--out", state := tmp_path / "state")
    assert code == 0 and "written" in err
    code, out, _ = call("generate", model, "--state", state, "Who", " is", *how)
    assert code == 0
    for number, (prompt, found) in enumerate(zip(("Who", " is"), out.split("== ")[1:], strict=True), 1):
        whole = call("generate", model, TEXT + prompt, *how)[1]
        assert f"{number}\n{whole.removeprefix(TEXT)}" == found
    assert call("read", "-", "--model", model, "--out", piped := tmp_path / "piped", stdin=TEXT)[0] == 0
    assert piped.read_bytes() == state.read_bytes()
    code, out, err = call("generate", write_model(tmp_path / "t", abs_pos="learned"), "I", "--max-new-tokens", 9999)
    assert (code, out[0], out[-1]) == (2, "I", "\n") and "position table" in err  # the error has a line of its own


def test_what_is_no_state_of_this_model_is_refused_in_one_line(call: Call, tmp_path: Path) -> None:
    write_model(model := tmp_path / "model")
    write_model(other := tmp_path / "other", attn_scale_len=99)
    (book := tmp_path / "book.txt").write_text(TEXT)
    (rows := tmp_path / "rows.csv").write_text("text\na\n")
    state, scored = tmp_path / "state", tmp_path / "scored"
    assert call("read", book, "--model", model, "--out", state)[0] == 0
    assert call("score", model, book, "--state", scored)[0] == 0
    content = state.read_bytes()
    for name, bad in (("cut", content[:-100]), ("bit", content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]),
                      ("none", b""), ("name", content.replace(b"0.kv_BSE", b"0.kv_BSX"))):
        (tmp_path / name).write_bytes(bad)
        assert_refused(*call("generate", model, "I", "--state", tmp_path / name)[::2], 4, "damaged", tmp_path / name)
    for arguments, code, words in (
            (["generate", other, "--state", state], 4, "another model"),
            (["generate", model, "--state", state, "--precision", "bfloat16"], 4, "model or precision"),
            (["generate", model, "--state", scored], 4, "another command"),
            (["score", model, book, "--state", state], 4, "another command"),
            (["score", other, book, "--state", scored], 4, "another model"),
            (["generate", model, "--state", tmp_path / "missing"], 4, "No such file"),
            (["read", rows, "--model", model, "--out", tmp_path / "new"], 2, "many documents"),
            (["read", book, "--model", model, "--out", book], 2, "exists already"),
            (["read", rows / "none", "--model", model, "--out", rows / "new"], 2, "no such folder"),
            (["read", "-", "--model", model, "--out", tmp_path / "new"], 3, "no text")):
        found, _, err = call(*arguments)
        assert_refused(found, err[err.find("error: "):], code, words)
    assert not (tmp_path / "new").exists() and book.read_text() == TEXT
