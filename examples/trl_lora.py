"""TRL's SFTTrainer with LoRA and the penalty: adapters of a tiny Ouro learn from chats.

With a name, `python examples/trl_lora.py ByteDance/Ouro-1.4B`, the same on a checkpoint.

Needs `pip install --no-build-isolation -e ".[lora]" trl`, in a clone.
"""

import sys
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from stars_fast.data.tiny_chat import tiny_chats
from stars_fast.integrations.transformers import JacobianPenalty
from stars_fast.models.ouro import OuroForCausalLM
from stars_fast.models.ouro.tiny import write_tiny_ouro


class StarsSFTTrainer(JacobianPenalty, SFTTrainer):
    """An SFTTrainer whose loss has the penalty."""


def main(steps: int = 40, name: str | None = None) -> None:
    chats = [
        {
            "prompt": [{"role": "user", "content": chat["problem"]}],
            "completion": [{"role": "assistant", "content": chat["solution"]}],
        }
        for chat in tiny_chats(200, seed=0)
    ]
    with tempfile.TemporaryDirectory() as folder:
        name = name or str(write_tiny_ouro(f"{folder}/model", remote_code=False))
        arguments = SFTConfig(
            output_dir=f"{folder}/run",
            max_steps=steps,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            max_length=256,
            bf16=torch.cuda.is_available(),
            logging_steps=max(1, steps // 4),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = StarsSFTTrainer(
            OuroForCausalLM.from_pretrained(name),
            arguments,
            train_dataset=Dataset.from_list(chats),  # the loss is of the completions
            processing_class=AutoTokenizer.from_pretrained(name),
            peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
            penalty_weight=0.1,
            turns=4,
        )
        trainer.model.print_trainable_parameters()
        trainer.train()
        trainer.save_model(f"{folder}/adapter")  # PEFT's format; stars-fast eval reads it too


if __name__ == "__main__":
    main(name=sys.argv[1] if len(sys.argv) > 1 else None)
