"""Token loss on plain text against the number of turns, and of standard models.

Texts are tokenised each by itself and cut into windows that do not overlap. A window is the
begin token and up to `length - 1` tokens of the text, every one of which is predicted once, from
those before it in its window. So all tokens count, the first of a window with little to go by: a
loss is to be compared with others at the same `length`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Embedding

from stars_fast.base.checks import check_integer
from stars_fast.data.batches import MicroBatch
from stars_fast.models.families import loop_of
from stars_fast.models.loop import Loop
from stars_fast.tokens import Tokens

_TABLES = ("wpe", "embed_positions", "position_embeddings", "position_embedding", "positions_embed")
"""Names of an embedding of positions in models of transformers."""


@dataclass(frozen=True)
class TextLoss:
    """nats: {turns: mean loss of a token, in nats}, of a model without turns {None: loss}.
    tokens: predicted. size: of the texts, in bytes of UTF-8."""

    nats: dict[int | None, float]
    tokens: int
    size: int

    @property
    def perplexity(self) -> dict[int | None, float]:
        """exp(loss), a token; infinite where no number is so large."""
        return {turns: _exp(value) for turns, value in self.nats.items()}

    @property
    def bits_per_byte(self) -> dict[int | None, float]:
        """Bits a byte of the text: comparable between tokenizers."""
        bits = self.tokens / self.size / math.log(2)
        return {turns: value * bits for turns, value in self.nats.items()}


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


@torch.no_grad()
def text_loss(
    model: Any,
    tokenizer: Any,
    texts: Iterable[str],
    turns: Sequence[int],
    *,
    length: int = 2048,
    batch_size: int = 8,
) -> TextLoss:
    """Loss of every token of `texts` after each number of `turns`, in one pass over the deepest.

    No [tokens, vocabulary] tensor of logits is held. Adaptive stops and exits of the model's
    configuration do not count here. The model is left in its own mode.

    Args:
        model: a causal language model of any family, on any device.
        tokenizer: its tokenizer, with a begin or end token.
        texts: empty ones are left out.
        turns: numbers of turns, 1 or more; the result has them in this order.
        length: tokens of a window, the begin token included.
        batch_size: windows in a forward pass.

    Raises:
        TypeError, ValueError: an argument out of range, or no text.
    """
    if not turns:
        raise ValueError("turns: expected a number of turns at least, got none")
    for number in turns:
        check_integer("turns", number, 1)
    loop, depths = loop_of(model), sorted(set(turns))

    def losses(windows: Sequence[list[int]], pad: int) -> Tensor:
        return _losses(loop, windows, pad, depths)

    sums, tokens, size = _summed(model, tokenizer, texts, losses, length, batch_size)
    found = dict(zip(depths, (sums / tokens).tolist(), strict=True))
    return TextLoss({number: found[number] for number in turns}, tokens, size)


@torch.no_grad()
def standard_text_loss(
    model: Any, tokenizer: Any, texts: Iterable[str], *, length: int = 2048, batch_size: int = 8
) -> TextLoss:
    """Loss of every token of `texts` by a model without turns, in the same windows as `text_loss`.

    Args:
        model: a causal language model of transformers; it is left in its own mode.
        tokenizer, texts, length, batch_size: as `text_loss`.

    Raises:
        TypeError, ValueError: an argument out of range, or no text.
    """

    def losses(windows: Sequence[list[int]], pad: int) -> Tensor:
        return _standard_losses(model, windows, pad)

    sums, tokens, size = _summed(model, tokenizer, texts, losses, length, batch_size)
    return TextLoss({None: float(sums[0]) / tokens}, tokens, size)


def _summed(
    model: Any,
    tokenizer: Any,
    texts: Iterable[str],
    losses: Callable[[Sequence[list[int]], int], Tensor],
    length: int,
    batch_size: int,
) -> tuple[Tensor, int, int]:
    """The sum of `losses` [n] fp64 over batches of windows, the tokens that they predict, and the
    bytes of the texts."""
    check_integer("length", length, 2)
    check_integer("batch_size", batch_size, 1)
    begin = tokenizer.bos_token_id
    begin = tokenizer.eos_token_id if begin is None else begin
    if begin is None:
        raise ValueError("tokenizer: expected a begin or an end token, got neither")
    windows, size = _windows(tokenizer, texts, begin, length)
    tokens = sum(len(window) - 1 for window in windows)
    if not tokens:
        raise ValueError("texts: expected a token at least, got none")
    known = model.get_input_embeddings().weight.shape[0]
    if (largest := max(map(max, windows))) >= known:
        raise ValueError(
            f"tokenizer: expected tokens below {known}, which the model has embeddings for, got "
            f"{largest}, {tokenizer.convert_ids_to_tokens(largest)!r}"
        )
    positions, read = _positions(model), max(map(len, windows)) - 1
    if positions is not None and read > positions:
        raise ValueError(
            f"length: expected at most {positions + 1}, as the model has {positions} positions, "
            f"got {length}"
        )
    windows.sort(key=len, reverse=True)  # what is too large for the memory shows at once
    was_training = model.training
    model.eval()
    try:
        starts = range(0, len(windows), batch_size)
        found = [losses(windows[start : start + batch_size], begin) for start in starts]
    finally:
        model.train(was_training)
    return torch.stack(found).sum(0), tokens, size


def _positions(model: Any) -> int | None:
    """The rows of the table in which a model looks its positions up, but for those that stand for
    none; None for one without a table."""
    modules = ((name, each) for name, each in model.named_modules() if isinstance(each, Embedding))
    rows = [
        each.num_embeddings - (0 if each.padding_idx is None else each.padding_idx + 1)
        for name, each in modules
        if name.rpartition(".")[2] in _TABLES
    ]
    rows += [len(each) for name, each in model.named_buffers() if name.endswith(".embed_positions")]
    config = getattr(model.config, "decoder", model.config)
    said = getattr(config, "max_position_embeddings", None)
    return min([*rows, said] if said else rows) if rows else None


def _windows(
    tokenizer: Any, texts: Iterable[str], begin: int, length: int
) -> tuple[list[list[int]], int]:
    """Windows of tokens, and the bytes of all texts."""
    windows, size = [], 0
    for text in texts:
        tokens = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        size += len(text.encode())
        step = length - 1
        windows += [[begin, *tokens[i : i + step]] for i in range(0, len(tokens), step)]
    return windows, size


def _losses(loop: Loop, windows: Sequence[list[int]], pad: int, depths: Sequence[int]) -> Tensor:
    """[n] fp64 on the CPU: summed loss of a batch after each of the rising `depths`. Pads stand on
    the right, where causality hides them without a mask."""
    device = next(loop.parameters()).device
    longest = max(map(len, windows))
    rows = torch.tensor([window + [pad] * (longest - len(window)) for window in windows])
    lengths = torch.tensor([len(window) for window in windows]).unsqueeze(1)
    places = (torch.arange(longest - 1) < lengths - 1).flatten().nonzero().squeeze(1)
    batch = MicroBatch(
        tokens=rows[:, :-1].to(device),
        positions=places.to(device),
        labels=rows[:, 1:].flatten()[places].to(device),
        samples=Tokens(len(rows), longest - 1),
        first=0,
        step_samples=len(rows),
        step_micro_batches=1,
        index=0,
        real_tokens=len(places),
    )
    h, inputs = loop.begin(batch.tokens, batch.samples)
    turn = loop.turn(h, batch.samples, inputs)
    sums = []
    for done in range(1, max(depths) + 1):
        h = turn(h)
        if done in depths:
            sums.append(loop.token_loss(h, batch, 1).double())
    return torch.stack(sums).cpu()


def _standard_losses(model: Any, windows: Sequence[list[int]], pad: int) -> Tensor:
    """[1] fp64 on the CPU: summed loss of a batch. Pads stand on the right, where causality hides
    them without a mask."""
    longest = max(map(len, windows))
    rows = torch.tensor([window + [pad] * (longest - len(window)) for window in windows])
    rows = rows.to(model.device)
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    total = torch.zeros(1, dtype=torch.float64)
    for window, row, said in zip(windows, rows, logits, strict=True):
        end = len(window) - 1
        total += F.cross_entropy(said[:end].float(), row[1 : end + 1], reduction="sum").cpu()
    return total
