"""Other libraries with the model that ships: see docs/ecosystem.md (make ecosystem)."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported; nothing here may reach for the network

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import lineartime
import lineartime.hf  # registers the classes
from lineartime.base.errors import UsageError
from lineartime.data.tokenizer import byte_tokenizer
from lineartime.folders import model_config_json
from lineartime.model.language_model import token_losses
from lineartime.weights import checkpoint, from_flash_pytorch

pytestmark = pytest.mark.ecosystem
SMALL = str(lineartime.model_folder("small"))
TEXTS = ["It was a dark and stormy night, and the rain fell upon the town.", "Reader, I married him.",
         "There was no possibility of taking a walk that day."] * 4


def opened():
    return AutoModelForCausalLM.from_pretrained(SMALL), AutoTokenizer.from_pretrained(SMALL)


def arguments(kind, out, **more):
    ours = dict(output_dir=str(out), max_steps=4, per_device_train_batch_size=2, learning_rate=1e-3, report_to=[],
                logging_steps=1, use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True)
    return kind(**{**ours, **more})


def trainer_of(out, rows=None, side="left", **more):
    """Trainer on the model that ships; rows: a data set, by default that of TEXTS."""
    model, tokenizer = opened()
    tokenizer.padding_side = side
    return Trainer(model, arguments(TrainingArguments, out, **more),
                   train_dataset=rows or [{"input_ids": tokenizer(text).input_ids} for text in TEXTS],
                   data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False))


def losses(trainer, checkpoint=None):
    trainer.train(resume_from_checkpoint=checkpoint)
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_accelerate_places_a_model_on_one_device():
    outer = dict.fromkeys(["model.embed", "model.abs_pos", "model.norm", "model.head_bias"], "cpu")
    layers = {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(opened()[0].config.n_layers)}
    AutoModelForCausalLM.from_pretrained(SMALL, device_map="auto")
    with pytest.raises(UsageError, match="whole on one device: device_map has cpu, disk; name a device"):
        AutoModelForCausalLM.from_pretrained(SMALL, device_map=outer | layers)


def test_accelerate_and_trainer_smooth_labels(tmp_path):
    """Labels are shifted: with nearly no smoothing the losses are nearly those without, if padding
    goes right."""
    found = [losses(trainer_of(tmp_path, side="right", label_smoothing_factor=factor)) for factor in (0.0, 1e-6)]
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_accelerate_and_trainer_train_in_bfloat16(tmp_path):
    """The weights stay in float32, and the losses are near those of float32: 8 bits of a loss of 4
    are 0.02."""
    exact, trainer = losses(trainer_of(tmp_path)), trainer_of(tmp_path, bf16=True)
    found = losses(trainer)
    assert exact[-1] < exact[0] - 0.4 and found == pytest.approx(exact, abs=0.05) and found != exact
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_accelerate_and_trainer_resume_with_the_same_bits(tmp_path):
    whole = trainer_of(tmp_path / "whole", save_strategy="steps", save_steps=2)
    expected = losses(whole)
    again = trainer_of(tmp_path / "again")
    torch.nn.init.zeros_(again.model.model.embed.weight)  # the checkpoint's weights count, not these
    assert losses(again, str(tmp_path / "whole/checkpoint-2")) == expected
    for (name, own), resumed in zip(whole.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(own, resumed), name


def test_accelerate_and_trainer_learn_labels(tmp_path):
    """Classes, with micro-batches that share a step, whose losses are those of the step."""
    found = []
    for more in ({}, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}):
        torch.manual_seed(0)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(SMALL, num_labels=3)
        tokenizer = opened()[1]
        rows = [{"input_ids": tokenizer(text).input_ids, "labels": i % 3} for i, text in enumerate(TEXTS)]
        found.append(losses(Trainer(model, arguments(TrainingArguments, tmp_path, max_steps=12, **more),
                                    train_dataset=rows, data_collator=transformers.DataCollatorWithPadding(tokenizer))))
    assert found[0][-1] < found[0][0] - 0.5 and found[1] == pytest.approx(found[0], rel=1e-3)


def main(out, n_rows_each):
    """Four steps by all processes that run this; OUT/losses.json. Padding is on the right, where
    each row has the same number of labels with any other rows in its batch."""
    book = (Path(lineartime.__file__).parent / "text/jane_eyre.txt").read_text()
    rows = [{"input_ids": opened()[1](book[5000 + 200 * i :][: 60 + 7 * i]).input_ids} for i in range(40)]
    trainer = trainer_of(out, rows, side="right", per_device_train_batch_size=int(n_rows_each))
    found = losses(trainer)
    if trainer.is_world_process_zero():
        (Path(out) / "losses.json").write_text(json.dumps([found, trainer.args.world_size]))


def test_accelerate_launches_two_processes(tmp_path):
    """They give the losses of one process with twice the rows. (`--cpu` would start one
    process.)"""
    (tmp_path / "two").mkdir()
    done = subprocess.run([sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
                           "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
                           "--main_process_port", "0", __file__, tmp_path / "two", "2"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    main(tmp_path, 4)
    (two, n), (one, _) = (json.loads((out / "losses.json").read_text()) for out in (tmp_path / "two", tmp_path))
    assert n == 2 and two == pytest.approx(one, rel=1e-5)


def test_datasets_stream_rows_to_trainer(tmp_path):
    from datasets import load_dataset

    tokenizer, file = opened()[1], tmp_path / "rows.txt"
    file.write_text("\n".join(TEXTS))
    rows = load_dataset("text", data_files=str(file), split="train", streaming=True).map(
        lambda batch: {"input_ids": tokenizer(batch["text"]).input_ids}, batched=True, remove_columns=["text"])
    found = losses(trainer_of(tmp_path, rows))
    assert found == losses(trainer_of(tmp_path, train_sampling_strategy="sequential"))


def learned(model, ids, rate):
    """How much lower the loss is after ten steps."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], rate)
    found = []
    for _ in range(10):
        loss = model.train()(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found[0] - found[-1]


def test_peft_trains_adapters_saves_and_merges_them(tmp_path):
    from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model

    model, tokenizer = opened()
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules=["in_proj", "out_proj"], task_type="CAUSAL_LM"))
    ids = tokenizer(TEXTS[0], return_tensors="pt").input_ids
    assert learned(adapted, ids, rate=1e-3) > 0.2
    with torch.no_grad():
        expected = adapted.eval()(input_ids=ids).logits
        adapted.save_pretrained(tmp_path)
        again = AutoPeftModelForCausalLM.from_pretrained(tmp_path).eval()
        assert torch.equal(again(input_ids=ids).logits, expected)
        merged = adapted.merge_and_unload()
        assert torch.allclose(merged(input_ids=ids).logits, expected, atol=1e-4)
        merged.save_pretrained(tmp_path / "merged")
    tokenizer.save_pretrained(tmp_path / "merged")
    ours, _, _ = lineartime.load_model(tmp_path / "merged")
    assert torch.allclose(ours(ids), expected, atol=1e-4)


def test_peft_tunes_a_prompt(tmp_path):
    from peft import AutoPeftModelForCausalLM, PromptTuningConfig, get_peft_model

    model, tokenizer = opened()
    how = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8, num_attention_heads=1)
    tuned, ids = get_peft_model(model, how), tokenizer(TEXTS[0], return_tensors="pt").input_ids
    assert learned(tuned, ids, rate=0.1) > 0.3
    tuned.eval().save_pretrained(tmp_path)
    again = AutoPeftModelForCausalLM.from_pretrained(tmp_path).eval()
    texts = [each.generate(input_ids=ids, max_new_tokens=8, do_sample=False, use_cache=use_cache).tolist()
             for each in (tuned, again) for use_cache in (True, False)]
    assert all(text == texts[0] for text in texts)
    assert texts[0] != model.generate(ids, max_new_tokens=8, do_sample=False).tolist()


def test_torchao_quantises_weights_to_int8():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model, tokenizer = opened()
    ids = tokenizer(TEXTS[0], return_tensors="pt").input_ids
    before = model(ids, labels=ids).loss.item()
    quantize_(model, Int8WeightOnlyConfig())
    assert model(ids, labels=ids).loss.item() == pytest.approx(before, abs=0.01)
    model.generate(ids, max_new_tokens=5, do_sample=False)


@pytest.mark.parametrize("how", [{}, {"packing": True}, {"padding_free": True, "max_length": None}, "lora"], ids=str)
def test_trl_fine_tunes(how, tmp_path):
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    model, tokenizer = opened()
    how, lora = ({}, LoraConfig(r=4, target_modules=["in_proj", "out_proj"])) if how == "lora" else (how, None)
    trainer = SFTTrainer(model, arguments(SFTConfig, tmp_path, **{"max_length": 64, **how}), peft_config=lora,
                         train_dataset=Dataset.from_dict({"text": TEXTS}), processing_class=tokenizer)
    assert next(iter(trainer.train_dataset))["input_ids"][-1] == tokenizer.eos_token_id  # which it writes as text
    found = losses(trainer)
    own = [token_losses(opened()[0].model, torch.tensor([[*tokenizer(text).input_ids, tokenizer.eos_token_id]])).mean()
           for text in TEXTS[:3]]
    assert min(own) < found[0] < max(own) and (lora is not None or found[-1] < found[0] - 1)


def test_trl_prefers(tmp_path):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    model, tokenizer = opened()
    pairs = {"prompt": ["Reader, I"] * 8, "chosen": [" married him."] * 8, "rejected": [" ate a hat."] * 8}
    found = losses(DPOTrainer(model, opened()[0], arguments(DPOConfig, tmp_path, max_length=64),
                              train_dataset=Dataset.from_dict(pairs), processing_class=tokenizer))
    assert found[0] == pytest.approx(0.6931, abs=1e-3) and found[-1] < 0.1733  # a quarter


def test_lm_eval_rolls_the_likelihood_of_a_text():
    """With add_bos_token=False; otherwise it scores the beginning too. A text longer than a
    training row is whole."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model, tokenizer, _ = lineartime.load_model(SMALL)
    text = " ".join(TEXTS * 120)
    ids = [tokenizer.end_of_document, *tokenizer.encode(text)]
    assert len(ids) > model.config.context + 1
    expected = -token_losses(model, torch.tensor([ids])).sum().item()
    asked = [Instance("loglikelihood_rolling", {}, (text,), 0)]
    found = [HFLM(pretrained=SMALL, device="cpu", dtype="float32", **how).loglikelihood_rolling(asked)[0]
             for how in ({"add_bos_token": False}, {})]
    assert found[0] == pytest.approx(expected, rel=1e-5) and found[1] < expected - 5


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_onnx_by_transformers_decodes_from_a_cache():
    """The program of any number of tokens, in pieces, gives the logits of the whole row."""
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    config = lineartime.hf.LineartimeConfig.from_pretrained(SMALL, n_layers=2, document_grid="row", init_std=0.02)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids_BT = torch.randint(1, 8000, (2, 300), generator=torch.manual_seed(0))
    cache, stop = lineartime.hf.LineartimeCache(), 250
    exported = OnnxExporter().export_for_generation(model, {"input_ids": ids_BT[:, :20]}, OnnxConfig(dynamic=True),
                                                    multi_token_decode=True)
    with torch.no_grad():
        wanted_BTV = model(ids_BT).logits
        model(ids_BT[:, :stop], past_key_values=cache)
        for width in (10, 3, 37):
            at, stop = slice(stop, stop + width), stop + width
            out = exported.runners["decode"](input_ids=ids_BT[:, at], past_key_values=cache,
                                             position_ids=torch.arange(300)[at].repeat(2, 1))
            cache = out.past_key_values
            assert (out.logits - wanted_BTV[:, at]).abs().max() < 1e-5


def of_flash_pytorch(kind, norm, dropout=0.0, rotary=None, **arguments):
    """A module of FLASH-pytorch in float64 whose weights have moved, so that every part counts. Its
    frequencies are made again, as theirs are rounded to float32."""
    from flash_pytorch import flash_pytorch as package

    if kind == "FLASHTransformer":
        arguments |= {"norm_type": norm, "attn_dropout": dropout}
    else:
        norms = {"layernorm": torch.nn.LayerNorm, "scalenorm": package.ScaleNorm}
        arguments |= {"norm_klass": norms[norm], "dropout": dropout}
    if rotary:
        arguments["rotary_pos_emb"] = package.RotaryEmbedding(dim=rotary)
    module = getattr(package, kind)(**arguments).eval().double()
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name.endswith((".freqs", ".inv_freq")):
            tensor.data = 10_000.0 ** -(torch.arange(len(tensor)).double() / len(tensor))
        elif tensor.requires_grad:
            tensor.data += torch.randn_like(tensor) * (0.5 if "offset" in name else 0.05)
    return module


def farthest(found, wanted):
    """The largest difference, as a share of the largest number that is wanted."""
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


yes_or_no, LENGTH = st.booleans(), 70
OF_LAYER = {"dim": st.sampled_from([16, 24]), "query_key_dim": st.sampled_from([8, 32, 48]), "causal": yes_or_no,
            "expansion_factor": st.sampled_from([1.0, 1.5, 2.0]), "norm": st.sampled_from(["layernorm", "scalenorm"]),
            "dropout": st.sampled_from([0.0, 0.1])}
OF_GROUPS = {**OF_LAYER, "group_size": st.sampled_from([1, 16, 33, 80]), "shift_tokens": yes_or_no}
FLASH_PYTORCH = {
    "GAU": st.fixed_dictionaries({**OF_LAYER, "add_residual": yes_or_no}),
    "FLASH": st.fixed_dictionaries({**OF_GROUPS, "rotary": st.sampled_from([None, 4, 8])}),
    "FLASHTransformer": st.fixed_dictionaries({**OF_GROUPS, "depth": st.integers(1, 3), "num_tokens": st.just(259)})}


@pytest.mark.parametrize("kind", FLASH_PYTORCH)
@settings(max_examples=200, deadline=None)
@given(data=st.data(), seed=st.integers(0, 99))
@torch.no_grad()
def test_flash_pytorch_weights_give_its_outputs(kind, data, seed):
    """In float64 within 1e-12 of the largest. From these, in float32, ours are at most thrice as
    far as theirs, which round the angles of far positions, or 3e-6."""
    torch.manual_seed(seed)
    arguments = data.draw(FLASH_PYTORCH[kind])
    theirs, is_model = of_flash_pytorch(kind, **arguments), kind == "FLASHTransformer"
    rows = torch.randint(259, (2, LENGTH)) if is_model else torch.randn(2, LENGTH, arguments["dim"])
    module, wide = copy.deepcopy(theirs).float(), rows if is_model else rows.double()
    assert farthest(from_flash_pytorch(theirs, LENGTH)(wide), exact := theirs(wide)) < 1e-12
    ours = from_flash_pytorch(module, LENGTH)
    assert {p.dtype for p in ours.parameters()} == {torch.float32} and not ours.training
    assert farthest(ours(rows), exact) < 3 * max(farthest(module(rows), exact), 1e-6)


@pytest.mark.parametrize("kind", FLASH_PYTORCH)
@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_flash_pytorch_weights_decode_and_take_padding(kind, causal, tmp_path):
    """What theirs have not: the next tokens from a state, and padding that changes nothing. And a
    model is saved and opened."""
    more = {"GAU": {}, "FLASH": {"group_size": 16, "rotary": 8, "shift_tokens": True},
            "FLASHTransformer": {"group_size": 16, "depth": 2, "num_tokens": 259}}[kind]
    torch.manual_seed(0)
    theirs = of_flash_pytorch(kind, "scalenorm", dim=16, query_key_dim=32, causal=causal, **more)
    is_model, ours = kind == "FLASHTransformer", from_flash_pytorch(theirs, LENGTH)
    rows = torch.randint(259, (2, LENGTH)) if is_model else torch.randn(2, LENGTH, 16).double()
    mask_BT = torch.arange(LENGTH) < torch.tensor([[LENGTH], [41]])
    padded, row = ours(rows, None, mask_BT)[1:, :41], rows[1:, :41]
    assert farthest(padded, ours(row)) < 1e-12
    print("theirs are away from the row alone by", farthest(theirs(rows, mask=mask_BT)[1:, :41], theirs(row)))
    if causal:
        cache, steps = ours.decoding_state(2), []
        for new in rows.split([1] * 40 + [LENGTH - 40], dim=1):
            step, cache = ours.extend(new, cache=cache) if is_model else ours(new, cache=cache)
            steps.append(ours.logits(step) if is_model else step)
        assert farthest(torch.cat(steps, 1), theirs(rows)) < 1e-12
    if is_model:
        ours, config = ours.float(), model_config_json(ours.config)
        folder = checkpoint.save(tmp_path, 1, run="theirs", tensors={"model": dict(ours.named_parameters())}, keep=1,
                                 files={"config.json": config, "tokenizer.json": byte_tokenizer(mlm=True).json})
        assert torch.equal(lineartime.load_model(folder)[0](rows), ours(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
