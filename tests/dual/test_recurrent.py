"""LSTM, GRU and RNN in fp64: the value against torch, the derivatives against the formulas written
out, sequence by sequence, under torch.func.jvp."""

import pytest
import torch
from oracle import randn, relative_error
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from stars_fast import fused_jsrr, fused_jvp
from stars_fast.dual.dual_pass import dual_pass

WIDTH, HIDDEN, LENGTH, BATCH = 4, 3, 5, 2


def step(module, x, h, c, weights):
    w_ih, w_hh, b_ih, b_hh, w_hr = weights
    gi, gh = w_ih @ x + b_ih, w_hh @ h + b_hh
    if isinstance(module, nn.LSTM):
        i, f, g, o = (gi + gh).chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return (h if w_hr is None else w_hr @ h), c
    if isinstance(module, nn.GRU):
        (ri, zi, ni), (rh, zh, nh) = gi.chunk(3), gh.chunk(3)
        z, n = (zi + zh).sigmoid(), (ni + (ri + rh).sigmoid() * nh).tanh()
        return (1 - z) * n + z * h, c
    return (gi + gh).tanh() if module.nonlinearity == "tanh" else (gi + gh).relu(), c


def one_sequence(module, x, h0):
    """x [T, I], h0 [layers * directions, H] or None -> [T, directions * H]."""
    for layer in range(module.num_layers):
        both = []
        for direction in range(2 if module.bidirectional else 1):
            tail = f"_l{layer}" + ("_reverse" if direction else "")
            names = [f"weight_ih{tail}", f"weight_hh{tail}", f"bias_ih{tail}", f"bias_hh{tail}"]
            own = [getattr(module, name, 0.0) for name in names]
            own.append(getattr(module, f"weight_hr{tail}", None))
            index = layer * (2 if module.bidirectional else 1) + direction
            size = getattr(module, "proj_size", 0) or module.hidden_size
            h = torch.zeros(size, dtype=x.dtype) if h0 is None else h0[index]
            c = torch.zeros(module.hidden_size, dtype=x.dtype)
            outputs = []
            for row in x.flip(0) if direction else x:
                h, c = step(module, row, h, c, own)
                outputs.append(h)
            both.append(torch.stack(outputs).flip(0) if direction else torch.stack(outputs))
        x = torch.cat(both, -1)
    return x


def check(module, lengths=None, h0=None):
    module = module.double()
    h, v = randn(BATCH, LENGTH, WIDTH).requires_grad_(), randn(BATCH, LENGTH, WIDTH, seed=1)
    lengths = [LENGTH] * BATCH if lengths is None else lengths

    def block(x):
        x = x if module.batch_first else x.transpose(0, 1)
        if lengths != [LENGTH] * BATCH:
            x = pack_padded_sequence(
                x, torch.tensor(lengths), module.batch_first, enforce_sorted=False
            )
        start = () if h0 is None else (h0,)
        out = module(x, *start)[0]
        if lengths != [LENGTH] * BATCH:
            out = pad_packed_sequence(out, module.batch_first, total_length=LENGTH)[0]
        return out if module.batch_first else out.transpose(0, 1)

    def written_out(x):
        rows = []
        for i, n in enumerate(lengths):
            row = one_sequence(module, x[i, :n], None if h0 is None else h0[:, i])
            rows.append(torch.cat((row, row.new_zeros(LENGTH - n, row.shape[1]))))
        return torch.stack(rows)

    leaves = [h, *module.parameters()]
    y, y_dot = torch.func.jvp(written_out, (h,), (v,))
    bars = randn(2, *y.shape, seed=2)
    expected = torch.autograd.grad((y * bars[0] + y_dot * bars[1]).sum(), leaves)
    out = dual_pass(block, torch.stack((h, v)), (), {})
    assert relative_error(out[0], block(h)) <= 1e-12
    assert relative_error(out[1], y_dot) <= 1e-12
    got = torch.autograd.grad((out * bars).sum(), leaves)
    for mine, theirs in zip(got, expected, strict=True):
        assert relative_error(mine, theirs) <= 1e-11


LAYERS = {
    "lstm": lambda **options: nn.LSTM(WIDTH, HIDDEN, **options),
    "gru": lambda **options: nn.GRU(WIDTH, HIDDEN, **options),
    "rnn": lambda **options: nn.RNN(WIDTH, HIDDEN, **options),
    "rnn-relu": lambda **options: nn.RNN(WIDTH, HIDDEN, nonlinearity="relu", **options),
}
OPTIONS = {
    "plain": {},
    "batch-first": {"batch_first": True},
    "two-ways": {"bidirectional": True},
    "two-layers": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "no-bias": {"bias": False},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", LAYERS)
def test_layers(kind, options):
    torch.manual_seed(0)
    check(LAYERS[kind](**OPTIONS[options]))


@pytest.mark.parametrize("kind", LAYERS)
def test_packed_sequences(kind):
    torch.manual_seed(0)
    for lengths in ([5, 3], [2, 4]):
        check(LAYERS[kind](num_layers=2, bidirectional=True, batch_first=True), lengths)


def test_a_projected_lstm():
    torch.manual_seed(0)
    check(nn.LSTM(WIDTH, HIDDEN, num_layers=2, proj_size=2, bidirectional=True))


def test_a_given_first_state():
    torch.manual_seed(0)
    check(nn.GRU(WIDTH, HIDDEN, num_layers=2), h0=randn(2, BATCH, HIDDEN, seed=5))


@pytest.mark.parametrize("kind", LAYERS)
def test_dropout_between_layers_draws_what_torch_draws(kind):
    torch.manual_seed(0)
    module = LAYERS[kind](num_layers=3, dropout=0.4, bidirectional=True).double().train()

    def block(x):
        torch.manual_seed(1)
        return module(x)[0]

    h, v = randn(6, 3, WIDTH), randn(6, 3, WIDTH, seed=1)
    out, tangent = fused_jvp(block, h, v)
    numeric = (block(h + 1e-6 * v) - block(h - 1e-6 * v)) / 2e-6
    assert relative_error(out, block(h)) <= 1e-12
    assert relative_error(tangent, numeric) <= 1e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_the_default_dtype_and_16_bits(kind, dtype):
    torch.manual_seed(0)
    module = LAYERS[kind](batch_first=True)
    exact = LAYERS[kind](batch_first=True).double()
    exact.load_state_dict(module.to(dtype).state_dict())
    h, v = randn(2, 5, WIDTH, dtype=dtype), randn(2, 5, WIDTH, seed=1, dtype=dtype)
    out, tangent = fused_jvp(lambda x: module(x)[0], h, v)
    y, y_dot = fused_jvp(lambda x: exact(x)[0], h.double(), v.double())
    assert out.dtype == tangent.dtype == dtype
    assert relative_error(out, y) <= 10 * torch.finfo(dtype).eps
    assert relative_error(tangent, y_dot) <= 10 * torch.finfo(dtype).eps


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(kind):
    torch.manual_seed(0)
    cell = kind(WIDTH, WIDTH).double()

    def block(x):
        state = None
        for _ in range(3):
            state = cell(x, state)
            x = state[0] if isinstance(state, tuple) else state
        return x

    h, v = randn(3, WIDTH).requires_grad_(), randn(3, WIDTH, seed=1)
    out = dual_pass(block, torch.stack((h, v)), (), {})
    numeric = (block(h + 1e-6 * v) - block(h - 1e-6 * v)) / 2e-6
    assert relative_error(out[0], block(h)) <= 1e-12
    assert relative_error(out[1], numeric) <= 1e-7
    loss = fused_jsrr(block, h, v=v)
    (grad,) = torch.autograd.grad(loss, cell.weight_hh)
    direction = randn(*cell.weight_hh.shape, seed=7)
    values = []
    for sign in (1, -1):
        cell.weight_hh.data += sign * 1e-6 * direction
        values.append(fused_jsrr(block, h, v=v).item())
        cell.weight_hh.data -= sign * 1e-6 * direction
    slope = (values[0] - values[1]) / 2e-6
    assert (grad * direction).sum().item() == pytest.approx(slope, rel=1e-6)
