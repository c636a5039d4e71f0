"""The penalty in transformers' Trainer: a tiny Ouro, random depth, chats in packed rows.

With a name, `python examples/trainer.py ByteDance/Ouro-1.4B`, the same on a checkpoint.

Needs `pip install --no-build-isolation -e ".[ouro]"`, in a clone.
"""

import sys
import tempfile

from datasets import Dataset
from transformers import AutoTokenizer, DataCollatorWithFlattening, Trainer, TrainingArguments

from stars_fast.data.tiny_chat import tiny_chats
from stars_fast.integrations.transformers import DepthLaw, JacobianPenalty
from stars_fast.models.ouro import OuroForCausalLM
from stars_fast.models.ouro.tiny import write_tiny_ouro


class StarsTrainer(JacobianPenalty, Trainer):
    """A Trainer whose loss has the penalty."""


def main(steps: int = 60, name: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        name = name or str(write_tiny_ouro(folder, remote_code=False))
        model = OuroForCausalLM.from_pretrained(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
        texts = [f"{chat['problem']} {chat['solution']}" for chat in tiny_chats(400, seed=0)]
        rows = Dataset.from_dict({"input_ids": tokenizer(texts)["input_ids"]})
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            logging_steps=max(1, steps // 4),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = StarsTrainer(
            model,
            arguments,
            train_dataset=rows,
            data_collator=DataCollatorWithFlattening(),  # documents in one row, no pads
            penalty_weight=0.1,
            turns=DepthLaw(law="lognormal", mu=1.2, sigma=0.4, low=1, high=8),
        )
        trainer.train()  # its log has token_loss, penalty and depth beside the loss


if __name__ == "__main__":
    main(name=sys.argv[1] if len(sys.argv) > 1 else None)
