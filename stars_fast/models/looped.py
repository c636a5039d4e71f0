"""The looped language model: prelude, a shared block applied for any number of turns, coda, head.

    logits = head(coda(turn^turns(prelude(tokens))))

A turn is the block, or with an injection (`models.injection`) the block on the state and the
prelude's output.

Shapes: B batch, S tokens, D model width, V vocabulary.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stars_fast.base.checks import check_integer
from stars_fast.models.adaptive import Per, turns_until_rest
from stars_fast.models.first_state import placed_noise
from stars_fast.models.gpt import GPTBlock, make_norm
from stars_fast.models.injection import Adapter, Injected
from stars_fast.models.looped_config import LoopedConfig


class LoopedLM(nn.Module):
    """A looped decoder-only language model with a tied head.

    `block` is the shared map of one turn, h [B, S, D] -> [B, S, D], causal inside; hand it to
    `stars_fast.fused_jsrr` as it is, or with an injection `turn(inputs)`. The head is a closing
    norm and the tied projection.
    """

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.max_length, config.d_model) if learned else None
        self.dropout = nn.Dropout(config.dropout)
        self.prelude_layers = _layers(config, config.n_prelude)
        self.block = _layers(config, config.n_layers)
        self.coda_layers = _layers(config, config.n_coda)
        self.norm = make_norm(config.norm, config.d_model)
        self._init_weights()
        self.adapter = self._new_adapter()

    def _init_weights(self) -> None:
        """GPT-2's normal weights (std 0.02 at width 768), scaled to the fan-in; zero biases.

        The scale matters for small models: at width 64 a std of 0.02 leaves attention uniform for
        hundreds of steps. Embeddings, which the head shares, keep 0.02.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02 * math.sqrt(768 / module.in_features))
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    @torch.no_grad()
    def _new_adapter(self) -> Adapter | None:
        if self.config.injection != "adapter":
            return None
        adapter = Adapter(self.config.d_model, self.config.adapter_keeps_state)
        adapter.linear.weight.copy_(adapter.start())
        return adapter

    @property
    def injects(self) -> bool:
        """Whether a turn takes in the prelude's output."""
        return self.config.injection != "none"

    def turn(self, inputs: Tensor | None = None) -> nn.Sequential:
        """The map of one turn, h [B, S, D] -> [B, S, D], of the model's own layers.

        Args:
            inputs: [B, S, D], the prelude's output, with an injection.

        Raises:
            ValueError: inputs without an injection, or none with one.
        """
        if self.injects != (inputs is not None):
            expected = "the prelude's output [B, S, D]" if self.injects else "None"
            got = "None" if inputs is None else list(inputs.shape)
            raise ValueError(
                f"inputs: expected {expected} with injection {self.config.injection}, got {got}"
            )
        if inputs is None:
            return self.block
        return nn.Sequential(Injected(self.adapter, inputs), *self.block)

    def first_state(self, inputs: Tensor) -> Tensor:
        """h^(0) [B, S, D] from the prelude's output; noise is drawn anew in training, else it is a
        function of the token's place."""
        if self.config.state == "prelude":
            return inputs
        if self.training:
            return torch.randn_like(inputs)
        positions = torch.arange(inputs.shape[1])[None]
        noise = placed_noise(positions, inputs.shape[-1])
        return noise.to(inputs.device, inputs.dtype).expand(inputs.shape)

    def prelude(self, tokens: Tensor) -> Tensor:
        """Token ids [B, S] int64 -> [B, S, D]: h^(0), and what an injection takes in.

        Raises:
            ValueError: `tokens` is not a two-dimensional int64 tensor or is longer than
                `config.max_length`.
        """
        _check_tokens(tokens, self.config.max_length)
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return self.prelude_layers(self.dropout(x))

    def coda(self, h: Tensor) -> Tensor:
        """h after the last turn [B, S, D] -> [B, S, D]; the identity without coda layers."""
        return self.coda_layers(h)

    def head(self, h: Tensor) -> Tensor:
        """h [B, S, D] -> logits [B, S, V], with the token embedding as its weight."""
        return F.linear(self.norm(h), self.tokens.weight)

    def forward(
        self,
        tokens: Tensor,
        turns: int,
        *,
        tol: float | None = None,
        tol_per: Per = "sequence",
        real: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, S, V] of token ids [B, S] int64 after `turns` >= 1 turns of the block.

        With `tol` a sequence, or a token, that a turn changes by no more takes no further one
        (`models.adaptive`); pads, where real [B, S] is False, hold nobody up.

        Raises:
            ValueError: as `prelude`, if `turns` is not a positive integer, and for a `tol` or
                `tol_per` out of range.
        """
        e = self.prelude(tokens)

        def turn_of(rows: Tensor | None) -> nn.Sequential:
            return self.turn((e if rows is None else e[rows]) if self.injects else None)

        h, _ = turns_until_rest(turn_of, self.first_state(e), turns, tol, tol_per, real)
        return self.head(self.coda(h))

    def states(self, tokens: Tensor, turns: int) -> list[Tensor]:
        """[h^(0), ..., h^(turns)], each [B, S, D]: the first state, then each turn's.

        Raises:
            ValueError: as `forward`.
        """
        check_integer("turns", turns, 1)
        e = self.prelude(tokens)
        turn = self.turn(e if self.injects else None)
        states = [self.first_state(e)]
        for _ in range(turns):
            states.append(turn(states[-1]))
        return states

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        turns: int,
        max_new_tokens: int,
        stop: int | None = None,
        *,
        lengths: Tensor | None = None,
        pad: int = 0,
        tol: float | None = None,
        tol_per: Per = "sequence",
    ) -> Tensor:
        """Greedy continuation of a batch of prompts, `turns` turns for every new token.

        tokens: prompts [B, S] int64, right-padded where their lengths differ.
        lengths: [B] int64, each prompt's real length in 1..S (default: all S). The model is
            causal, so what stands right of a prompt cannot reach it.
        stop: generation of a row ends with this token, and altogether once every row has one.
        tol, tol_per: as `forward`.

        Returns [B, S + N] int64, N <= `max_new_tokens`: each row is its prompt, directly after it
        the new tokens, then `pad`. Dropout is off, whatever mode the model is in.

        Raises:
            ValueError: as `forward`, if `max_new_tokens` is not positive, if `lengths` does not fit
                `tokens`, or if the longest row would need more than `max_length` positions.
        """
        check_integer("turns", turns, 1)
        check_integer("max_new_tokens", max_new_tokens, 1)
        _check_tokens(tokens, self.config.max_length)
        B, S = tokens.shape
        if lengths is None:
            lengths = torch.full((B,), S, device=tokens.device)
        if lengths.shape != (B,) or lengths.dtype != torch.int64:
            raise ValueError(
                f"lengths: expected [{B}] int64, got {list(lengths.shape)} {lengths.dtype}"
            )
        if int(lengths.min()) < 1 or int(lengths.max()) > S:
            raise ValueError(f"lengths: expected a value in 1..{S}, got {lengths.tolist()}")
        longest = int(lengths.max())
        if longest + max_new_tokens - 1 > self.config.max_length:
            raise ValueError(
                f"max_new_tokens: expected at most {self.config.max_length + 1 - longest} after a "
                f"prompt of {longest} with max_length={self.config.max_length}, "
                f"got {max_new_tokens}"
            )
        was_training = self.training
        self.eval()
        rows = torch.arange(B, device=tokens.device)
        columns = torch.arange(S + max_new_tokens, device=tokens.device)
        out = F.pad(tokens, (0, max_new_tokens), value=pad)
        out = out.masked_fill(columns >= lengths[:, None], pad)
        done = torch.zeros(B, dtype=torch.bool, device=tokens.device)
        made = 0
        while made < max_new_tokens and not done.all():
            ends = lengths + made
            seen = columns[: longest + made] < ends[:, None]
            logits = self(out[:, : longest + made], turns, tol=tol, tol_per=tol_per, real=seen)
            logits = logits[rows, ends - 1]
            new = torch.where(done, pad, logits.argmax(-1))
            out[rows, ends] = new
            made += 1
            if stop is not None:
                done |= new == stop
        self.train(was_training)
        return out[:, : S + made]


def _layers(config: LoopedConfig, count: int) -> nn.Sequential:
    return nn.Sequential(*(GPTBlock(config) for _ in range(count)))


def _check_tokens(tokens: Tensor, max_length: int) -> None:
    if tokens.dim() != 2 or tokens.dtype != torch.int64:
        raise ValueError(f"tokens: expected [B, S] int64, got {list(tokens.shape)} {tokens.dtype}")
    if tokens.shape[1] > max_length:
        raise ValueError(
            f"tokens: expected at most max_length={max_length} long, got {tokens.shape[1]}"
        )
