"""Other libraries with the model that ships: what docs/ecosystem.md says of them (make ecosystem)."""

import os
import subprocess
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported; nothing here may reach for the network

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

import lineartime
import lineartime.hf  # registers the classes
from lineartime.errors import UsageError
from lineartime.model import token_losses

pytestmark = pytest.mark.ecosystem
SMALL = str(lineartime.model_folder("small"))
TEXTS = ["It was a dark and stormy night, and the rain fell upon the town.", "Reader, I married him.",
         "There was no possibility of taking a walk that day."] * 4


def opened():
    return AutoModelForCausalLM.from_pretrained(SMALL), AutoTokenizer.from_pretrained(SMALL)


def arguments(kind, out, **more):
    return kind(output_dir=str(out), max_steps=4, per_device_train_batch_size=2, learning_rate=1e-3, report_to=[],
                logging_steps=1, use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True, **more)


def losses(trainer):
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_accelerate_places_the_model_on_one_device_only(tmp_path):
    model, tokenizer = opened()
    batch = tokenizer(TEXTS[:2], padding=True, return_tensors="pt")
    placed = AutoModelForCausalLM.from_pretrained(SMALL, device_map="auto")
    assert torch.equal(placed(**batch).logits.cpu(), model(**batch).logits) or torch.cuda.is_available()
    with pytest.raises(UsageError, match="stay on one device"):
        AutoModelForCausalLM.from_pretrained(SMALL, device_map={"": "disk"}, offload_folder=str(tmp_path))


def test_accelerate_and_trainer_smooth_labels(tmp_path):
    """Labels are shifted: with nearly no smoothing the losses are nearly those without."""
    tokenizer = opened()[1]
    rows = [{"input_ids": tokenizer(text).input_ids} for text in TEXTS]
    found = [losses(Trainer(opened()[0], arguments(TrainingArguments, tmp_path, label_smoothing_factor=factor),
                            train_dataset=rows, data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False)))
             for factor in (0.0, 1e-6)]
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_peft_trains_adapters_saves_and_merges_them(tmp_path):
    from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model

    model, tokenizer = opened()
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules=["in_proj", "out_proj"], task_type="CAUSAL_LM"))
    ids = tokenizer(TEXTS[0], return_tensors="pt").input_ids
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], 1e-3)
    found = []
    for _ in range(10):
        loss = adapted.train()(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert found[-1] < found[0] - 0.3
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


def test_torchao_quantises_weights_to_int8():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model, tokenizer = opened()
    ids = tokenizer(TEXTS[0], return_tensors="pt").input_ids
    before = model(ids, labels=ids).loss.item()
    quantize_(model, Int8WeightOnlyConfig())
    assert model(ids, labels=ids).loss.item() == pytest.approx(before, abs=0.01)
    assert model.generate(ids, max_new_tokens=5, do_sample=False).shape[1] <= ids.shape[1] + 5


@pytest.mark.parametrize("how", [{}, {"packing": True}, {"padding_free": True, "max_length": None}, {"lora": True}],
                         ids=["plain", "packing", "padding free", "lora"])
def test_trl_fine_tunes(how, tmp_path):
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    model, tokenizer = opened()
    how = dict(how)
    lora = LoraConfig(r=4, target_modules=["in_proj", "out_proj"]) if how.pop("lora", False) else None
    found = losses(SFTTrainer(model, arguments(SFTConfig, tmp_path, **{"max_length": 64, **how}), peft_config=lora,
                              train_dataset=Dataset.from_dict({"text": TEXTS}), processing_class=tokenizer))
    assert 4.4 < found[0] < 4.9 and (lora is not None or found[-1] < found[0] - 1)


def test_trl_prefers(tmp_path):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    model, tokenizer = opened()
    pairs = {"prompt": ["Reader, I"] * 8, "chosen": [" married him."] * 8, "rejected": [" ate a hat."] * 8}
    found = losses(DPOTrainer(model, opened()[0], arguments(DPOConfig, tmp_path, max_length=64),
                              train_dataset=Dataset.from_dict(pairs), processing_class=tokenizer))
    assert found[0] == pytest.approx(0.6931, abs=1e-3) and found[-1] < 0.1


def test_lm_eval_rolls_the_likelihood_of_a_text():
    """With add_bos_token=False; otherwise it scores the beginning too."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model, tokenizer, _ = lineartime.load_model(SMALL)
    ids = [tokenizer.end_of_document, *tokenizer.encode(TEXTS[0])]
    expected = -token_losses(model, torch.tensor([ids])).sum().item()
    asked = [Instance("loglikelihood_rolling", {}, (TEXTS[0],), 0)]
    found = [HFLM(pretrained=SMALL, device="cpu", dtype="float32", **how).loglikelihood_rolling(asked)[0]
             for how in ({"add_bos_token": False}, {})]
    assert found[0] == pytest.approx(expected, rel=1e-5) and found[1] < expected - 5


def test_onnx_decodes_the_same_text(tmp_path):
    """The example, as its first lines say."""
    done = subprocess.run([sys.executable, Path(__file__).parents[2] / "examples" / "onnx_decode.py"], cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("the same 600 tokens\n")
