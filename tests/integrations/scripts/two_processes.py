"""Two steps of the penalised Trainer: two_processes.py KIND OUT MICRO."""

import sys
from pathlib import Path

import torch
from penalised import NETS, Gradients, StarsTrainer, arguments, documents, padded

from stars_fast.models.depth import DepthLaw
from stars_fast.training.scale.distributed import settle

LENGTHS = (5, 8, 6, 9, 7, 5, 8, 4, 6, 9, 5, 7, 8, 6, 4, 7)


def train(kind, out, micro, **options):
    """Gradients of both steps, of eight documents each in two micro-batches."""
    kept = Gradients()
    options = {"ddp_backend": "gloo", "max_steps": 2, "accumulation": 2} | options
    trainer = StarsTrainer(
        NETS[kind](),
        arguments(out, micro, **options),
        train_dataset=documents(LENGTHS),
        data_collator=padded("right"),
        callbacks=[kept],
        penalty_weight=0.3,
        turns=DepthLaw(high=5),
    )
    trainer.train()
    return kept.steps, trainer.state.log_history


if __name__ == "__main__":
    kind, out, micro = sys.argv[1:]
    steps, history = train(kind, out, int(micro))
    if torch.distributed.get_rank() == 0:
        torch.save((steps, history), Path(out) / "steps.pt")
    torch.distributed.barrier()
    settle()
    torch.distributed.destroy_process_group()
