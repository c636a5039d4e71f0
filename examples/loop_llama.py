"""Make a Llama loop: its layers become prelude, repeated block and coda, and it trains with STARS.

The layers are transformers' own. With a name, `python examples/loop_llama.py
HuggingFaceTB/SmolLM2-135M`, the same on a checkpoint.

Needs `pip install --no-build-isolation -e ".[ouro]"`, in a clone.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import stars_fast
from stars_fast.models.looped_decoder import LoopedDecoderForCausalLM


def tiny() -> LlamaForCausalLM:
    """A Llama of four layers with random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=4,
            num_attention_heads=4,
            vocab_size=64,
        )
    )


def numbers() -> torch.Tensor:
    """Tokens [16, 12] that count up, each row from its own start in its own stride."""
    start, stride = torch.randint(64, (16, 1)), torch.randint(1, 4, (16, 1))
    return (start + stride * torch.arange(12)) % 64


def main(steps: int = 60, name: str | None = None) -> None:
    torch.manual_seed(0)
    llama = AutoModelForCausalLM.from_pretrained(name) if name else tiny()
    looped = LoopedDecoderForCausalLM.from_decoder(llama, prelude=1, coda=1, injection="adapter")
    tokens = numbers()
    with torch.no_grad():
        difference = (looped(tokens, turns=1).logits - llama(tokens).logits).abs().max()
    print(f"one turn is the Llama itself: logits differ by {difference:.1e}")

    optimizer = torch.optim.AdamW(looped.parameters(), lr=5e-3)
    for step in range(steps):
        turns = int(torch.randint(1, 7, ()))  # drawn anew for each batch
        tokens = numbers()
        out = looped(tokens, labels=tokens, turns=turns, output_hidden_states=True)
        block = stars_fast.looped_block(looped, inputs=out.inputs.detach())
        penalty = stars_fast.fused_jsrr(block, out.hidden_states[-1])
        optimizer.zero_grad()
        (0.9 * out.loss + 0.1 * penalty).backward()
        optimizer.step()
        if step % max(1, steps // 4) == 0:
            print(f"step {step}: {turns} turns, loss {out.loss:.3f}, penalty {penalty:.3f}")

    with torch.no_grad():
        losses = {turns: looped(tokens, labels=tokens, turns=turns).loss for turns in (1, 4, 16)}
    print("loss at turns", ", ".join(f"{turns}: {loss:.3f}" for turns, loss in losses.items()))
    print(looped.generate(tokens[:1, :6], turns=4, max_new_tokens=4)[0].tolist())


if __name__ == "__main__":
    main(name=sys.argv[1] if len(sys.argv) > 1 else None)
