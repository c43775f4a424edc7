"""Three steps of a Hugging Face Trainer, layer by layer: a small BERT with random weights, nothing to download.

Run it with ``python examples/trainer_callback.py``. It needs the Trainer: ``pip install 'transformers[torch]'``.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from torchprof.integrations.transformers import ProfileCallback

torch.manual_seed(0)
config = BertConfig(vocab_size=1000, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256)
sentences = [{"input_ids": torch.randint(1000, (32,)), "labels": torch.tensor(at % 2)} for at in range(128)]

with TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    callback = ProfileCallback(with_flops=True)
    trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=sentences, callbacks=[callback])
    with callback:  # ends the profile also after an exception, which the Trainer does not pass to callbacks
        trainer.train()

print(f"\n{callback.run.meta.steps} steps of two batches each:\n")
print(callback.run.report("tree", depth=4))
