"""Recurrent layers and cells (LSTM, GRU, RNN), step by step: torch's kernels for whole layers have
no forward derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stars_fast.dual.registry import add_rule
from stars_fast.dual.rule import rule

# A state is a tuple: (h,), or (h, c) of an LSTM.
State = tuple[Any, ...]
# Gates of the input and of h, both with their biases, and the state before -> the state after.
Cell = Callable[[Any, Any, State], State]


def _lstm(x: Any, h: Any, state: State) -> State:
    i, f, g, o = (x + h).chunk(4, -1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru(x: Any, h: Any, state: State) -> State:
    (x_r, x_z, x_n), (h_r, h_z, h_n) = x.chunk(3, -1), h.chunk(3, -1)
    n = torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n)
    return (n + torch.sigmoid(x_z + h_z) * (state[0] - n),)


def _rnn(activation: Callable[[Any], Any]) -> Cell:
    return lambda x, h, state: (activation(x + h),)


_CELLS: dict[str, Cell] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": _rnn(torch.tanh),
    "rnn_relu": _rnn(F.relu),
}


def _run(
    cell: Cell, x: Any, sizes: list[int], start: State, weights: Sequence[Any], reverse: bool
) -> tuple[Any, State]:
    """One layer in one direction.

    Args:
        x: [sum of sizes, I]: the rows of the first step, of the second, ...
        sizes: rows of each step, which do not increase; row i is of sequence i.
        start: states [B, H] before the first step, B = sizes[0].
        weights: w_ih, w_hh, b_ih, b_hh (or None, None), w_hr (or None).
    """
    w_ih, w_hh, b_ih, b_hh, w_hr = weights
    gates = F.linear(x, w_ih, b_ih)
    steps, first = [], 0
    for size in sizes:
        steps.append((first, size))
        first += size
    state = tuple(part[:0] for part in start)
    outputs: list[Any] = []
    ended: list[State] = []  # sequences that are over, the shortest first
    for first, size in reversed(steps) if reverse else steps:
        running = len(state[0])
        if size > running:  # the first step; backwards, also the last of a shorter sequence
            fresh = tuple(part[running:size] for part in start)
            state = tuple(torch.cat(pair) for pair in zip(state, fresh, strict=True))
        elif size < running:
            ended.append(tuple(part[size:] for part in state))
            state = tuple(part[:size] for part in state)
        state = cell(gates[first : first + size], F.linear(state[0], w_hh, b_hh), state)
        if w_hr is not None:
            state = (F.linear(state[0], w_hr), *state[1:])
        outputs.append(state[0])
    last = tuple(torch.cat(parts) for parts in zip(*reversed([*ended, state]), strict=True))
    return torch.cat(outputs[::-1] if reverse else outputs), last


def _in_autocast_dtype(x: Any) -> Any:
    device = x.device.type
    wanted = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(device)) if wanted else x


def _layers(
    name: str,
    x: Any,
    sizes: list[int],
    start: State,
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Any, State]:
    """All layers of a packed input; the states [layers * directions, B, H]."""
    x, start = _in_autocast_dtype(x), tuple(map(_in_autocast_dtype, start))
    directions = 2 if bidirectional else 1
    count = len(params) // (num_layers * directions)
    projected = count > (4 if has_biases else 2)
    ends: list[State] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            own = list(params[index * count : (index + 1) * count])
            biases = own[2:4] if has_biases else [None, None]
            weights = [*own[:2], *biases, own[-1] if projected else None]
            begin = tuple(part[index] for part in start)
            out, end = _run(_CELLS[name], x, sizes, begin, weights, direction == 1)
            outputs.append(out)
            ends.append(end)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout > 0 and train and layer < num_layers - 1:
            x = F.dropout(x, dropout)
    return x, tuple(torch.stack(parts) for parts in zip(*ends, strict=True))


def _register(name: str) -> None:
    has_memory = name == "lstm"

    def states(hx: Any) -> State:
        return tuple(hx) if has_memory else (hx,)

    def padded(
        input: Any,
        hx: Any,
        params: Sequence[Any],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Any, ...]:
        x = input.transpose(0, 1) if batch_first else input
        length, batch = x.shape[:2]
        options = (params, has_biases, num_layers, dropout, train, bidirectional)
        out, end = _layers(name, x.flatten(0, 1), [batch] * length, states(hx), *options)
        out = out.unflatten(0, (length, batch))
        return (out.transpose(0, 1) if batch_first else out, *end)

    def packed(
        data: Any,
        batch_sizes: Tensor,
        hx: Any,
        params: Sequence[Any],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> tuple[Any, ...]:
        options = (params, has_biases, num_layers, dropout, train, bidirectional)
        out, end = _layers(name, data, batch_sizes.tolist(), states(hx), *options)
        return (out, *end)

    def layer(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        is_packed = "batch_sizes" in kwargs or (len(args) > 3 and not isinstance(args[3], bool))
        return (packed if is_packed else padded)(*args, **kwargs)

    def cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
        before = states(hx)
        gates = F.linear(input, w_ih, b_ih), F.linear(before[0], w_hh, b_hh)
        after = _CELLS[name](*gates, before)
        return after if has_memory else after[0]

    add_rule(name, "product", layer, owners=(torch,))
    add_rule(f"{name}_cell", "product", cell, owners=(torch,))


for _name in _CELLS:
    _register(_name)


@rule("_pack_padded_sequence", kind="stacked", owners=(torch,))
def pack_padded_sequence(input: Any, lengths: Tensor, batch_first: bool) -> tuple[Any, Tensor]:
    """The rows of step 0 of all sequences, of step 1 of those that have one, ..."""
    x = input.transpose(0, 1) if batch_first else input
    sizes = (lengths[None] > torch.arange(int(lengths[0]))[:, None]).sum(1)
    rows = [x[step, :size] for step, size in enumerate(sizes.tolist())]
    return torch.cat(rows), sizes
