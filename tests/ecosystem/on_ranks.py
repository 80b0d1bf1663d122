"""OUT ROWS_EACH: four steps of Trainer on the model that ships, by all processes that run this; OUT/losses.json."""

import json
import sys
from pathlib import Path

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


def main(out: Path, n_rows_each: int) -> None:
    folder = lineartime.model_folder("small")
    # Padding on the right, where each row has the same number of labels with any other rows in its batch.
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right")
    book = (Path(lineartime.__file__).parent / "text/jane_eyre.txt").read_text()
    rows = [{"input_ids": tokenizer(book[5000 + 200 * i :][: 60 + 7 * i]).input_ids} for i in range(40)]
    arguments = TrainingArguments(str(out), max_steps=4, per_device_train_batch_size=n_rows_each, learning_rate=1e-3,
                                  report_to=[], logging_steps=1, use_cpu=True, save_strategy="no", disable_tqdm=True)
    trainer = Trainer(model, arguments, train_dataset=rows,
                      data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False))
    trainer.train()
    if trainer.is_world_process_zero():
        found = {"losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
                 "processes": arguments.world_size,
                 "backend": torch.distributed.get_backend() if torch.distributed.is_initialized() else None}
        (out / "losses.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
