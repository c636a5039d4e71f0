"""Training Ouro: the loss without all logits, the exit gate, recomputation, autocast, adapters,
transformers' Trainer, DDP and FSDP2."""

from pathlib import Path

import fresh
import pytest
import torch
import torch.nn.functional as F
from oracle import relative_error
from ouro_models import checkpoint, model, tokens
from torch import nn

from stars_fast import Dual, explain, fused_jsrr
from stars_fast.models.looped_block import looped_block
from stars_fast.models.ouro import OuroForCausalLM

IGNORED = -100


def labelled(batch=3, length=9):
    ids = tokens(batch, length)
    labels = ids.clone()
    labels[0, :4] = IGNORED
    labels[1, 6:] = IGNORED
    return ids, labels


def plain_loss(logits, labels, reduction="mean"):
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction=reduction
    )


def gradients(net):
    return {n: p.grad for n, p in net.named_parameters() if p.grad is not None}


def assert_same_gradients(mine, expected, tolerance=1e-10):
    assert mine.keys() == expected.keys()
    for name, grad in expected.items():
        assert relative_error(mine[name], grad) <= tolerance, name


# -- the loss


@pytest.mark.parametrize("turns", [1, 3])
def test_the_loss_is_that_of_all_logits(turns):
    ids, labels = labelled()
    net, other = model().train(), model().train()
    expected = plain_loss(other(ids, turns=turns).logits, labels)
    expected.backward()
    out = net(ids, labels=labels, turns=turns)
    assert out.logits is None
    out.loss.backward()
    torch.testing.assert_close(out.loss, expected, rtol=1e-12, atol=0)
    assert_same_gradients(gradients(net), gradients(other))


def test_logits_beside_the_loss_where_they_are_wanted():
    ids, labels = labelled()
    net = model()
    out = net(ids, labels=labels)
    torch.testing.assert_close(out.loss, plain_loss(out.logits, labels), rtol=1e-12, atol=0)
    assert net(ids, labels=labels, skip_logits=True).logits is None
    kept = net(ids, logits_to_keep=2).logits
    torch.testing.assert_close(kept, out.logits[:, -2:], rtol=1e-12, atol=1e-12)
    places = torch.tensor([1, 5])
    kept = net(ids, logits_to_keep=places).logits
    torch.testing.assert_close(kept, out.logits[:, places], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", [7, torch.tensor(7.0)])
def test_the_sum_over_a_window_of_batches_is_divided_by_its_targets(count):
    ids, labels = labelled()
    net = model()
    loss = net(ids, labels=labels, num_items_in_batch=count, skip_logits=True).loss
    expected = plain_loss(net(ids).logits, labels, "sum") / 7
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


def test_the_first_token_of_a_packed_document_is_no_target():
    lengths, net = [4, 1, 5], model()
    documents = [tokens(1, n, seed=n) for n in lengths]
    ids, bounds = torch.cat(documents, 1), torch.tensor([0, 4, 5, 10])
    bounds = torch.tensor([0, *bounds.tolist()])  # the first document is empty
    packed = net(ids, labels=ids, cu_seqlens=bounds, num_items_in_batch=1).loss
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    restarting = net(ids, labels=ids, position_ids=positions, num_items_in_batch=1).loss
    torch.testing.assert_close(restarting, packed, rtol=1e-11, atol=0)
    alone = sum(net(d, labels=d, num_items_in_batch=1).loss for d in documents)
    torch.testing.assert_close(packed, alone, rtol=1e-11, atol=0)


def test_pads_change_neither_loss_nor_gradients():
    ids, labels = labelled(2, 6)
    net, other = model().train(), model().train()
    net(ids, labels=labels).loss.backward()
    wide = F.pad(ids, (3, 2))
    other(
        wide, labels=F.pad(labels, (3, 2), value=IGNORED), attention_mask=(wide != 0).long()
    ).loss.backward()
    assert_same_gradients(gradients(other), gradients(net))


# -- the gate


@pytest.mark.parametrize("gate", ["frozen", "ignored"])
@pytest.mark.parametrize("turns", [1, 3])
def test_every_parameter_that_wants_a_gradient_gets_one(gate, turns):
    net = model(gate=gate).train()
    ids, labels = labelled()
    net(ids, labels=labels, turns=turns).loss.backward()
    for name, p in net.named_parameters():
        assert (p.grad is not None) == p.requires_grad, name
        assert p.requires_grad == ("early_exit_gate" not in name)


def test_gates_that_there_are_not():
    with pytest.raises(ValueError, match="gate: expected 'frozen' or 'ignored', got 'x'"):
        model().model.set_gate("x")


# -- recomputation, autocast, adapters


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_have_the_same_gradients(reentrant):
    ids, labels = labelled()
    net, other = model().train(), model().train()
    other(ids, labels=labels).loss.backward()
    net.gradient_checkpointing_enable({"use_reentrant": reentrant})
    calls = []
    net.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    net(ids, labels=labels).loss.backward()
    assert len(calls) == 2 * 4
    assert_same_gradients(gradients(net), gradients(other))


def test_recomputed_layers_in_the_dual_turn():
    h, v = (torch.randn(2, 9, 32, dtype=torch.float64) for _ in range(2))
    net, other = model().train(), model().train()
    fused_jsrr(looped_block(other), h, v=v).backward()
    net.gradient_checkpointing_enable({"use_reentrant": False})
    fused_jsrr(looped_block(net), h, v=v).backward()
    assert_same_gradients(gradients(net), gradients(other))


def test_autocast_is_as_accurate_as_rounding_allows():
    ids, labels = labelled()
    exact, net, narrow = (
        model().train(),
        model(torch.float32).train(),
        model(torch.bfloat16).train(),
    )
    exact(ids, labels=labels).loss.backward()
    with torch.autocast("cpu", torch.bfloat16):
        loss = net(ids, labels=labels).loss
    loss.backward()
    narrow(ids, labels=labels).loss.backward()
    for name, grad in gradients(exact).items():
        mine, pure = (relative_error(gradients(m)[name].double(), grad) for m in (net, narrow))
        assert mine <= max(1.5 * pure, 0.02), name


class Adapted(nn.Module):
    """A linear map with a bias and a low-rank adapter."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        generator = torch.Generator().manual_seed(0)

        def draw(*shape):
            noise = torch.randn(shape, generator=generator, dtype=torch.float64)
            return nn.Parameter(noise / 8)

        self.down, self.up = draw(3, base.in_features), draw(base.out_features, 3)
        self.bias = draw(base.out_features)

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.down), self.up, self.bias)


def test_an_adapted_head_is_called():
    ids, labels = labelled()
    net = model().train()
    net.lm_head = Adapted(net.lm_head)
    loss = net(ids, labels=labels).loss
    loss.backward()
    torch.testing.assert_close(loss, plain_loss(net(ids).logits, labels), rtol=1e-12, atol=0)
    assert net.lm_head.up.grad.norm() > 0
    hooked, calls = model().train(), []
    hooked.lm_head.register_forward_hook(lambda *_: calls.append(1))
    again = hooked(ids, labels=labels).loss
    assert calls
    torch.testing.assert_close(again, model()(ids, labels=labels).loss, rtol=1e-12, atol=0)


def test_recomputation_takes_no_cache():
    net = model().train()
    net.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(ValueError, match="use_cache: expected no cache with gradient checkpoint"):
        net(tokens(1, 4), use_cache=True)


def test_adapters_and_biases_in_the_dual_turn():
    net = model()
    layer = net.model.layers[1]
    layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
    layer.mlp.down_proj = Adapted(layer.mlp.down_proj)
    h, v = (torch.randn(2, 5, 32, dtype=torch.float64) for _ in range(2))
    block = looped_block(net)
    eps = 1e-6
    with torch.no_grad():
        difference = (block(h + eps * v) - block(h - eps * v)) / (2 * eps)
    context = net.model.prepare(h)
    dual = net.model.turn(Dual(torch.stack((h, v))), context)
    assert relative_error(dual.primal, block(h)) <= 1e-12
    assert relative_error(dual.tangent, difference) <= 1e-7
    assert explain(block, h).fallbacks == []


def test_hooks_on_a_linear_map_meet_the_state_and_not_the_stacked_pair():
    net, h = model(), torch.randn(2, 5, 32, dtype=torch.float64)
    seen = []
    hook = net.model.layers[0].mlp.up_proj.register_forward_hook(
        lambda module, args, out: seen.append((tuple(args[0].shape), tuple(out.shape)))
    )
    hooked = fused_jsrr(looped_block(net), h, v=h)
    hook.remove()
    assert seen == [((2, 5, 32), (2, 5, 64))]
    # In double precision: the hooked map meets a Dual, whose products are those of the stack.
    torch.testing.assert_close(hooked, fused_jsrr(looped_block(net), h, v=h), rtol=1e-12, atol=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
def test_attention_implementations_agree(attention):
    net, other = model(torch.float32, num_key_value_heads=2), model(num_key_value_heads=2)
    net.set_attn_implementation(attention)
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for options in ({}, {"attention_mask": mask}, {"position_ids": torch.arange(9)[None] % 4}):
        # On the CPU FlexAttention has no backward, and its compiled form does not build here.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            mine, expected = (m(ids, **options).logits for m in (net, other))
        kept = mask.bool() if "attention_mask" in options else torch.ones_like(mask).bool()
        assert relative_error(mine[kept].double(), expected[kept]) <= 1e-5


# -- with the tools of users


def test_transformers_trainer_trains_it(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    net = model(torch.float32)
    ids = tokens(8, 9)
    data = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=12, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=3e-3, logging_steps=1, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True, seed=0,
    )  # fmt: skip
    trainer = Trainer(net, arguments, train_dataset=data)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < 0.8 * losses[0]
    assert trainer.predict(data).predictions.shape == (8, 9, 320)
    trainer.save_model(tmp_path / "saved")
    again = OuroForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(again.lm_head.weight, net.lm_head.weight)


@pytest.mark.slow
def test_two_processes_have_the_gradients_of_one():
    script = Path(__file__).parent / "scripts" / "ouro_parallel.py"
    said = fresh.two_ranks(script, checkpoint(), TRITON_INTERPRET="0")
    assert said == ["equal\n", "equal\n"]
