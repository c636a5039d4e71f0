"""A step of the penalised GRPOTrainer, and as a script of two processes:
two_processes_grpo.py CHECKPOINT OUT."""

import sys
from pathlib import Path

import torch
import trl
from datasets import Dataset
from penalised import Gradients, arguments
from transformers import AutoTokenizer

from stars_fast.integrations.transformers import JacobianPenalty
from stars_fast.models.ouro import OuroForCausalLM
from stars_fast.training.scale.distributed import settle


def recorded(kind):
    """The penalised trainer of that kind, which keeps what each micro-batch was trained on."""

    class Recorded(JacobianPenalty, getattr(trl, f"{kind}Trainer")):
        def compute_loss(self, model, inputs, *args, **kwargs):
            self.seen = [*getattr(self, "seen", []), dict(inputs)]
            return super().compute_loss(model, inputs, *args, **kwargs)

    return Recorded


def reward(prompts, completions, completion_ids, **kwargs):
    """By the tokens, so that the completions of a prompt differ in it."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def train(net, tokenizer, folder, weight, accumulation=2, launch=None, kind="GRPO", **options):
    """The trainer after a step, and the gradients of that."""
    settings = {"num_generations": 2, "max_completion_length": 6, "bf16": False, "beta": 0.0}
    settings["gradient_checkpointing"] = False  # by default TRL recomputes
    args = arguments(
        folder, 2, accumulation, getattr(trl, f"{kind}Config"), **settings, **launch or {}
    )
    data = Dataset.from_dict({"prompt": ["1 + 2", "a much longer question", "7 * 8", "9 - 1"]})
    gradients = Gradients()
    trainer = recorded(kind)(
        net, reward, args=args, train_dataset=data, processing_class=tokenizer,
        callbacks=[gradients], penalty_weight=weight, **options,
    )  # fmt: skip
    trainer.train()
    return trainer, gradients.steps[0]


if __name__ == "__main__":
    checkpoint, out = sys.argv[1:]
    net = OuroForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    trainer, gradients = train(
        net, AutoTokenizer.from_pretrained(checkpoint), out, 1.0, launch={"ddp_backend": "gloo"}
    )
    rank = torch.distributed.get_rank()
    torch.save((trainer.seen, gradients), Path(out) / f"{rank}.pt")
    torch.distributed.barrier()
    settle()
    torch.distributed.destroy_process_group()
