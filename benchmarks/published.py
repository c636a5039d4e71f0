"""A training step of Ouro the published way, in plain PyTorch, on the weights of our model.

What the published trainer and modelling code do, each of it a fact that costs time or memory:

- one document a micro-batch, padded on the right where there are more; the loss is averaged over
  each micro-batch, and the micro-batches over the step;
- separate projections, norms in plain operations, rotary by turned halves, SDPA, the closing norm
  each turn; every layer of every turn is computed again in the backward;
- logits at all positions, in fp32;
- the penalty is ||v^T J||^2 at the state h^(t), cut off from the graph, v of unit norm over the
  whole micro-batch, by reverse mode and a second backward through attention of plain products;
- (1 - lambda) L + lambda R; the norm of all gradients; AdamW.

Here the documents and depths are handed in and the optimiser is ours, so that all that differs is
how the loss and its gradient come about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from benchmarks.blocks import rms_norm
from stars_fast.data import IGNORE
from stars_fast.training.step.precision import autocast

Turn = Callable[[Tensor], Tensor]


class MicroBatch(NamedTuple):
    """tokens and targets [B, S] int64, targets `IGNORE` where there is no loss, and the turns."""

    tokens: Tensor
    targets: Tensor
    turns: int


class Published:
    """An `OuroForCausalLM` as the published code runs it; the weights are those of `model`, in the
    parameters' dtype of `precision`."""

    def __init__(self, model: Any, precision: str, checkpointed: bool = True) -> None:
        self.model = model
        self.precision = precision
        self.checkpointed = checkpointed

    def start(self, tokens: Tensor) -> Tensor:
        """h^(0) [B, S, D] of tokens [B, S], in the dtype that the turns compute in."""
        h = self.model.model.embed_tokens(tokens)
        return h.to(torch.bfloat16) if self.precision == "mixed" else h

    def states(self, tokens: Tensor, turns: int) -> Tensor:
        """h^(turns) [B, S, D] of tokens [B, S]."""
        h = self.start(tokens)
        turn = self.turn(h)
        for _ in range(turns):
            h = turn(h)
        return h

    def turn(self, like: Tensor, products: bool = False) -> Turn:
        """The turn for states of the shape, dtype and device of `like` [B, S, D]; attention by
        plain `products`, which can be differentiated twice, or by any kernel."""
        config = self.model.config
        cos, sin = angles(like, config.head_dim, config.rope_theta)

        def run(h: Tensor) -> Tensor:
            for module in self.model.model.layers:
                if self.checkpointed:
                    h = checkpoint(layer, module, h, cos, sin, products, use_reentrant=False)
                else:
                    h = layer(module, h, cos, sin, products)
            return rms_norm(self.model.model.norm, h)

        return run

    def token_loss(self, h: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Cross entropy of h [B, S, D] over the targets [B, S], in nats."""
        logits = self.model.lm_head(h)
        logits = logits.to(_wide(logits)).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction=reduction)

    def penalty(self, h: Tensor, v: Tensor | None = None) -> Tensor:
        """||v^T J||^2 at h [B, S, D], in fp32 at least; `v` is noise if none is given."""
        h = h.detach().requires_grad_()
        v = torch.randn_like(h) if v is None else v
        v = v / torch.linalg.vector_norm(v)
        (j,) = torch.autograd.grad(self.turn(h, products=True)(h), h, v, create_graph=True)
        return j.to(_wide(j)).square().sum()

    def loss(self, batch: MicroBatch, weight: float) -> Tensor:
        """The loss of a micro-batch for lambda = `weight`, which is 0 for no penalty."""
        h = self.states(batch.tokens, batch.turns)
        loss = self.token_loss(h, batch.targets)
        return (1 - weight) * loss + weight * self.penalty(h) if weight else loss


def published_step(
    published: Published,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[MicroBatch],
    weight: float,
    clip: float,
) -> Tensor:
    """One optimiser step; the mean loss of its micro-batches, a scalar on the device."""
    device = batches[0].tokens.device
    total = torch.zeros((), device=device)
    optimizer.zero_grad(set_to_none=True)
    for batch in batches:
        with autocast(published.precision, device, sharded=False):
            loss = published.loss(batch, weight) / len(batches)
        loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(published.model.parameters(), clip)
    optimizer.step()
    return total


def layer(module: Any, h: Tensor, cos: Tensor, sin: Tensor, products: bool) -> Tensor:
    """One decoder layer, h [B, S, D] -> [B, S, D]."""
    branch = attention(module.self_attn, rms_norm(module.input_layernorm, h), cos, sin, products)
    h = h + rms_norm(module.input_layernorm_2, branch)
    branch = mlp(module.mlp, rms_norm(module.post_attention_layernorm, h))
    return h + rms_norm(module.post_attention_layernorm_2, branch)


def attention(module: Any, x: Tensor, cos: Tensor, sin: Tensor, products: bool) -> Tensor:
    q, k, v = (
        project(x).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    with sdpa_kernel(SDPBackend.MATH) if products else nullcontext():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return module.o_proj(out.transpose(1, 2).flatten(2))


def mlp(module: Any, x: Tensor) -> Tensor:
    return module.down_proj(F.silu(module.gate_proj(x)) * module.up_proj(x))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def angles(like: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [S, width] of the positions of `like` [B, S, D], in its dtype."""
    wide = _wide(like)
    steps = torch.arange(0, width, 2, device=like.device, dtype=wide)
    places = torch.arange(like.shape[1], device=like.device, dtype=wide)
    angle = torch.outer(places, theta ** (-steps / width)).repeat(1, 2)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
