"""Ouro: any number of turns, stopping where the states rest, the exit gate, and the penalty.

Without a name it runs on a tiny Ouro with random weights, whose text means nothing:
`python examples/ouro_turns.py ByteDance/Ouro-1.4B` runs on the hub's.

Needs `pip install --no-build-isolation -e ".[ouro]"`, in a clone.
"""

import sys
import tempfile

import torch
from transformers import AutoTokenizer

from stars_fast import fused_jsrr, looped_block
from stars_fast.models.ouro import OuroForCausalLM, count_turns
from stars_fast.models.ouro.tiny import write_tiny_ouro


def main(name: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        name = name or str(write_tiny_ouro(folder, remote_code=False))
        model = OuroForCausalLM.from_pretrained(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
    inputs = tokenizer("What is 3 + 4?", return_tensors="pt")

    settings = {
        "the configuration's turns": {},
        "eight turns": {"turns": 8},
        "sixteen at most, fewer where the states rest": {"turns": 16, "tol": 0.5},
        "each token for itself": {"turns": 16, "tol": 0.5, "tol_per": "token"},
        "the state after turn 2, counted from 0": {"turns": 8, "exit_at_step": 2},
        "where the exit gate says so": {"turns": 8, "exit_threshold": 0.5},
    }
    for meaning, setting in settings.items():
        with count_turns(model) as count:
            out = model.generate(**inputs, **setting, max_new_tokens=8, do_sample=False)
        text = tokenizer.decode(out[0, inputs.input_ids.shape[1] :])
        print(f"{meaning}: {count.per_token:.2f} turns a token, {text!r}")

    out = model(**inputs, labels=inputs.input_ids, turns=6, output_hidden_states=True)
    penalty = fused_jsrr(looped_block(model), out.hidden_states[-1])
    (0.9 * out.loss + 0.1 * penalty).backward()
    norm = torch.nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None)
    print(f"loss {out.loss:.3f}, penalty {penalty:.3f}, norm of the gradient {norm:.3f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
