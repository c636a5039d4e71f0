"""What structural recognition may not do: fuse what only looks alike, or touch the user's class."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from test_guards import check, state
from torch import nn

from stars_fast import explain, fused_jvp


class Norm(nn.Module):
    """RMSNorm with settings that change it."""

    def __init__(self, scale=1.0, clamp=None, dropout=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4, dtype=torch.float64))
        self.eps, self.scale, self.clamp, self.dropout = 1e-6, scale, clamp, dropout

    def shape(self, x):
        return x

    def forward(self, hidden_states):
        x = self.shape(hidden_states)
        if self.clamp is not None:
            x = x.clamp(-self.clamp, self.clamp)
        x = F.dropout(x, self.dropout, self.training)
        r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.scale * self.weight * x * r


class SubNorm(Norm):
    def shape(self, x):
        return x + 1


class SuperNorm(Norm):
    def forward(self, x):
        return 2 * super().forward(x)


def is_fused(block):
    return any(
        kind == "fused" and "Norm" in name for name, kind in explain(block, state(2, 3, 4)).ops
    )


def test_each_instance_is_judged_by_its_own_settings():
    assert is_fused(Norm())
    for norm in (Norm(scale=0.5), Norm(clamp=5.0), Norm(clamp=1.0), SubNorm()):
        assert not is_fused(norm)
        check(norm, 2, 3, 4)
    assert is_fused(Norm())
    check(SuperNorm(), 2, 3, 4)


def test_a_changed_setting_is_noticed():
    norm = Norm()
    assert is_fused(norm)
    norm.scale = 3.0
    assert not is_fused(norm)
    check(norm, 2, 3, 4)


def test_dropout_inside_stays():
    norm = Norm(dropout=0.5).eval()
    assert is_fused(norm)
    norm.train()
    out, _ = fused_jvp(norm, state(8, 16, 4), state(8, 16, 4, seed=4))
    assert 0.3 < (out == 0).double().mean() < 0.7


def test_a_class_that_keeps_records_is_left_alone():
    class Recorder(Norm):
        def __init__(self):
            super().__init__()
            self.calls = []

        def forward(self, x):
            self.calls.append(tuple(x.shape))
            return super().forward(x)

    norm = Recorder()
    fused_jvp(norm, state(2, 3, 4), state(2, 3, 4))
    fused_jvp(norm, state(2, 3, 4), state(2, 3, 4))
    assert norm.calls == [(2, 3, 4)] * 2


def test_a_patched_class_still_works_for_everything_else(tmp_path):
    norm = Norm()
    fused_jvp(norm, state(2, 3, 4), state(2, 3, 4))
    h = state(2, 3, 4)
    torch.testing.assert_close(norm(hidden_states=h), norm(h))
    torch.testing.assert_close(copy.deepcopy(norm)(h), norm(h))
    torch.testing.assert_close(pickle.loads(pickle.dumps(norm))(h), norm(h))


class MLP(nn.Module):
    def __init__(self, act, scale=1.0):
        super().__init__()
        self.gate_proj = nn.Linear(4, 6, dtype=torch.float64)
        self.up_proj = nn.Linear(4, 6, dtype=torch.float64)
        self.down_proj = nn.Linear(6, 4, dtype=torch.float64)
        self.act_fn, self.scale = act, scale

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x) * self.scale) * self.up_proj(x))


@pytest.mark.parametrize(
    ("mlp", "fused"),
    [
        (MLP(nn.SiLU()), True),
        (MLP(F.gelu), True),
        (MLP(nn.SiLU(), scale=0.5), False),
        (MLP(nn.ReLU6()), False),
        (MLP(nn.Tanh()), False),
        (MLP(lambda x: F.gelu(x).clamp(max=10)), False),
    ],
    ids=["silu", "gelu", "scaled", "relu6", "tanh", "clipped-gelu"],
)
def test_gated_mlps(mlp, fused):
    found = explain(mlp, state(2, 3, 4)).ops
    assert any("up" in name and kind == "fused" for name, kind in found) == fused
    check(mlp, 2, 3, 4)


class Rotated(nn.Module):
    def forward(self, x):
        cos, sin = torch.full((1, 3, 4), 0.8).to(x), torch.full((1, 3, 4), 0.6).to(x)
        q, k = apply_rotary_pos_emb(x.unsqueeze(1), x.unsqueeze(1), cos, sin)
        return (q + k).squeeze(1)


def apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=1):
    def turn(x):
        a, b = x.chunk(2, -1)
        return x * cos.unsqueeze(unsqueeze_dim) + torch.cat((-b, a), -1) * sin.unsqueeze(
            unsqueeze_dim
        )

    return turn(query), turn(key)


def test_a_rotary_function_is_fused_and_still_takes_its_own_arguments():
    x, table = state(2, 1, 3, 4), torch.ones(1, 3, 4, dtype=torch.float64)
    before = apply_rotary_pos_emb(x, x, table, table)
    assert ("apply_rotary_pos_emb", "fused") in explain(Rotated(), state(2, 3, 4)).ops
    check(Rotated(), 2, 3, 4)
    for after in (
        apply_rotary_pos_emb(x, x, table, table),
        apply_rotary_pos_emb(query=x, key=x, cos=table, sin=table),
        apply_rotary_pos_emb(x, x, table, table, unsqueeze_dim=1),
    ):
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize(
    "function",
    [lambda x: F.relu(x).clamp(max=20000.0), lambda x: F.gelu(x.float()), lambda x: F.silu(x) + 1],
    ids=["clamped", "widening", "shifted"],
)
def test_what_only_looks_like_an_activation_is_left_alone(function):
    class Act(nn.Module):
        def forward(self, x):
            return function(x)

    found = explain(Act(), state(2, 3, 4).bfloat16()).ops
    assert ("Act", "fused") not in found


def test_recognition_leaves_the_random_numbers_alone():
    class Fresh(MLP):
        pass

    torch.manual_seed(0)
    expected = torch.rand(1)
    block = Fresh(nn.SiLU())
    torch.manual_seed(0)
    explain(block, state(2, 3, 4))
    assert torch.equal(torch.rand(1), expected)
