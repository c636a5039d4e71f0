"""The penalty in transformers' Trainer and in TRL's SFTTrainer."""

from functools import partial

import pytest
import torch
from oracle import KeepDouble, relative_error
from ouro_models import checkpoint, model
from penalised import (
    NETS,
    Gradients,
    StarsTrainer,
    arguments,
    by_hand,
    documents,
    first_layer,
    llama,
    padded,
    recording,
    run_two_processes,
    turns_of,
)
from torch import nn
from transformers import Trainer
from two_processes import train as two_steps

from stars_fast.integrations.transformers import JacobianPenalty
from stars_fast.models.depth import DepthLaw
from stars_fast.training.step.penalty import PenaltyConfig

LAW = DepthLaw(high=5)
LENGTHS = (6, 9, 7, 8)


@pytest.fixture
def trained(tmp_path):
    """trained(net, data, collate, ...) -> trainer after training, gradients of its steps."""

    def run(net, data, collate, micro=2, accumulation=1, kind=StarsTrainer, options=None, **given):
        kept = Gradients()
        trainer = kind(
            net,
            arguments(tmp_path, micro, accumulation, **options or {}),
            train_dataset=data,
            data_collator=collate,
            callbacks=[kept],
            **given,
        )
        trainer.train()
        return trainer, kept.steps

    return run


def assert_same(mine, expected, tolerance):
    assert mine.keys() == expected.keys()
    for name, grad in expected.items():
        assert relative_error(mine[name], grad) <= tolerance, name


def logged(trainer):
    return [row for row in trainer.state.log_history if "loss" in row]


# -- the gradient


LOOPED = [name for name in NETS if name != "llama"]


@pytest.mark.parametrize(
    ("kind", "side"),
    [("ouro", "left"), ("ouro", "right"), ("huginn", "left"), ("looped", "right")],
)
def test_the_gradient_of_a_step_is_that_by_hand(trained, kind, side):
    make, micros = NETS[kind], []
    with KeepDouble():
        trainer, steps = trained(
            make(), documents(LENGTHS), recording(padded(side), micros),
            accumulation=2, penalty_weight=0.3, turns=LAW,
        )  # fmt: skip
        turns = turns_of(LAW, 2, seed=5)
        expected = by_hand(make(), micros, turns, 0.3, seed=5)
        without = by_hand(make(), micros, turns, 0.0, seed=5)
    assert_same(steps[0], expected, 1e-8)
    row = logged(trainer)[0]
    assert row["depth"] == sum(turns) / 2
    assert row["loss"] == pytest.approx(0.7 * row["token_loss"] + 0.3 * row["penalty"], rel=1e-5)
    weight = first_layer(trainer.model)
    some = next(n for n, p in trainer.model.named_parameters() if p is weight)
    assert relative_error(expected[some], without[some]) > 1e-2  # the penalty weighs something


@pytest.mark.parametrize("per_item", [True, False])
def test_how_a_batch_is_split_does_not_matter(trained, per_item):
    data, found = documents([8] * 4), []
    for micro, accumulation in ((4, 1), (2, 2), (1, 4)):
        net = model()
        net.accepts_loss_kwargs = per_item
        trainer, steps = trained(net, data, padded("right"), micro, accumulation, turns=3)
        assert trainer.model_accepts_loss_kwargs == per_item
        found.append((steps[0], logged(trainer)[0]))
    for steps, row in found[1:]:
        assert_same(steps, found[0][0], 1e-11)
        for name in ("loss", "token_loss", "penalty", "depth"):
            assert row[name] == pytest.approx(found[0][1][name], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("bounds", [True, False])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("kind", LOOPED)
def test_packed_documents_have_the_gradient_of_padded_ones(trained, kind, bounds, fraction):
    from transformers import DataCollatorWithFlattening

    make, data = NETS[kind], documents(LENGTHS)
    law = {"penalty": PenaltyConfig(0.3, fraction=fraction), "turns": 2}
    flat = DataCollatorWithFlattening(return_flash_attn_kwargs=bounds)
    lists = [{name: x.tolist() for name, x in row.items()} for row in data]
    _, packed = trained(make(), lists, flat, 4, **law)
    _, rows = trained(make(), data, padded("right"), 4, **law)
    assert_same(packed[0], rows[0], 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_what_fills_a_packed_row_changes_nothing(trained, kind, fraction):
    sft = pytest.importorskip("trl.trainer.sft_trainer")
    data = [
        {name: x.tolist() for name, x in row.items()} for row in documents((6, 1, 7, 8), prompt=1)
    ]
    law = {"penalty": PenaltyConfig(0.5, fraction=fraction)} | (
        {} if kind == "llama" else {"turns": 2}
    )
    found = []
    for multiple in (None, 32):
        collate = sft.DataCollatorForLanguageModeling(
            pad_token_id=0, padding_free=True, pad_to_multiple_of=multiple
        )
        trainer, steps = trained(NETS[kind](), data, collate, 4, **law)
        found.append((steps[0], logged(trainer)[0]["penalty"]))
    assert_same(found[1][0], found[0][0], 1e-10)
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-6)


def test_a_row_of_pads_alone_changes_nothing(trained):
    data = documents(LENGTHS)

    def with_empty_rows(rows):
        batch = padded("left")(rows)
        return {
            name: torch.cat([x, torch.full_like(x[:1], -100 if name == "labels" else 0)])
            for name, x in batch.items()
        }

    found = []
    for collate in (padded("left"), with_empty_rows):
        trainer, steps = trained(model(), data, collate, 2, 2, penalty_weight=0.3, turns=2)
        found.append((steps[0], logged(trainer)[0]["penalty"]))
    assert_same(found[1][0], found[0][0], 1e-10)
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOOPED)
def test_two_processes_have_the_gradients_of_one(kind, tmp_path):
    run_two_processes("two_processes.py", kind, tmp_path, 2)
    both, history = torch.load(tmp_path / "steps.pt", weights_only=False)
    alone, expected = two_steps(kind, tmp_path, 4, ddp_backend=None)
    assert len(both) == len(alone) == 2
    for mine, other in zip(both, alone, strict=True):
        assert_same(mine, other, 1e-9)
    for name in ("loss", "token_loss", "penalty", "depth"):
        assert history[0][name] == pytest.approx(expected[0][name], rel=1e-5)


@pytest.mark.parametrize("kind", NETS)
def test_recomputation_changes_no_gradient(trained, kind):
    data, found = documents(LENGTHS), []
    for recompute, reentrant in ((False, False), (True, False), (True, True)):
        net, turns = NETS[kind](), None if kind == "llama" else 2
        options = {
            "gradient_checkpointing": recompute,
            "gradient_checkpointing_kwargs": {"use_reentrant": reentrant},
        }
        found.append(trained(net, data, padded("left"), turns=turns, options=options)[1][0])
        assert net.is_gradient_checkpointing == recompute
    assert_same(found[1], found[0], 1e-12)
    assert_same(found[2], found[0], 1e-12)


# -- runs


def test_a_resumed_run_is_the_run(trained, tmp_path):
    data, net, again = documents([7] * 12), model(torch.float32), model(torch.float32)
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    given = {"turns": LAW, "penalty": PenaltyConfig(0.2, start_step=1, ramp_steps=2)}
    run = partial(trained, data=data, collate=padded("right"), options=options, **given)
    trainer, _ = run(net)
    rows = logged(trainer)
    assert ["penalty" in row for row in rows] == [False, True, True, True]
    kind = partial(ResumedTrainer, tmp_path / "checkpoint-2")
    run(again, kind=kind)
    for (name, mine), other in zip(again.named_parameters(), net.parameters(), strict=True):
        assert torch.equal(mine, other), name


class ResumedTrainer(StarsTrainer):
    def __init__(self, start, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.start = start

    def train(self):
        return super().train(resume_from_checkpoint=str(self.start))


@pytest.mark.parametrize("kind", LOOPED)
def test_evaluation_is_the_plain_loss_at_the_models_own_turns(trained, kind):
    net, data = NETS[kind](), documents(LENGTHS)
    trainer, _ = trained(net, data, padded("right"), turns=2, options={"max_steps": 2})
    found = trainer.evaluate(data)
    with torch.no_grad():
        expected = net(**padded("right")(data)).loss
    assert found["eval_loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert not {"eval_penalty", "penalty", "depth"} & set(found)
    assert trainer.predict(data).predictions.shape == (4, max(LENGTHS), 320)


def test_under_autocast_the_penalty_is_nearly_that_of_fp32(trained):
    data, rows = documents([9] * 8), []
    for bf16 in (True, False):
        options = {"bf16": bf16}
        trainer, steps = trained(
            model(torch.float32), data, padded("right"), 8, turns=2, options=options
        )
        assert all(grad.dtype == torch.float32 for grad in steps[0].values())
        rows.append(logged(trainer)[0])
    assert rows[0]["penalty"] == pytest.approx(rows[1]["penalty"], rel=0.02)
    assert rows[0]["penalty"] != rows[1]["penalty"]


class Referenced(Trainer):
    """Runs the model again for a reference, as TRL's DPO does with adapters."""

    def compute_loss(self, model, inputs, *args, **options):
        found = super().compute_loss(model, inputs, *args, **options)
        with torch.no_grad():
            model(input_ids=inputs["input_ids"].flip(0), turns=1)
        return found


class ReferencedStars(JacobianPenalty, Referenced):
    pass


@pytest.mark.parametrize("kind", ["ouro", "looped"])
def test_a_run_without_a_gradient_is_not_penalised(trained, kind):
    data, given = documents([7, 7]), {"penalty_weight": 0.5, "turns": 3}
    _, (expected,) = trained(NETS[kind](), data, padded("right"), **given)
    _, (found,) = trained(NETS[kind](), data, padded("right"), kind=ReferencedStars, **given)
    assert_same(found, expected, 0.0)


# -- models


def test_of_a_decoder_stack_the_layers_are_the_block(trained):
    micros, data = [], documents([7] * 2)
    with KeepDouble():
        trainer, steps = trained(
            llama(), data, recording(padded("right"), micros), penalty_weight=0.5
        )

    def turn(net, h, out=None):
        places = torch.arange(h.shape[1])[None]
        tables = net.model.rotary_emb(h, places)
        for layer in net.model.layers:
            h = layer(h, position_embeddings=tables, attention_mask=None, position_ids=places)
        return h

    net = llama()
    with KeepDouble():
        expected = by_hand(
            net, micros, [None], 0.5, seed=5, turn=turn,
            state=lambda net, ids: turn(net, net.model.embed_tokens(ids)),
        )  # fmt: skip
    assert_same(steps[0], expected, 1e-7)
    assert "depth" not in logged(trainer)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "targets"), [("huginn", "core_block.*Wqkv"), ("looped", "block.*q_proj")]
)
def test_adapters_have_the_gradient_of_their_product(trained, kind, targets):
    """The prelude's output is found through PEFT's models too: with B = 0 the gradient of B is the
    weight's times A."""
    peft = pytest.importorskip("peft")
    data, given = documents(LENGTHS), {"penalty_weight": 0.3, "turns": 2}
    _, (plain,) = trained(NETS[kind](), data, padded("left"), 4, **given)
    torch.manual_seed(3)
    config = peft.LoraConfig(r=2, lora_alpha=2, target_modules=f".*{targets}")
    net = peft.get_peft_model(NETS[kind](), config, autocast_adapter_dtype=False)
    maps = {name: p.clone() for name, p in net.named_parameters() if "lora_A" in name}
    _, (adapted,) = trained(net, data, padded("left"), 4, **given)
    found = {name: grad for name, grad in adapted.items() if "lora_B" in name}
    assert found
    for name, grad in found.items():
        place = name.removeprefix("base_model.model.").replace("lora_B.default.", "")
        a = maps[name.replace("lora_B", "lora_A")].double()
        assert relative_error(grad, plain[place] @ a.T) <= 1e-9, name


def test_what_it_can_not_train_is_refused(tmp_path):
    data, args = documents(LENGTHS), arguments(tmp_path)
    make = partial(StarsTrainer, train_dataset=data, data_collator=padded("right"))
    with pytest.raises(ValueError, match="turns: expected None for LlamaForCausalLM"):
        make(llama(), args, turns=4)
    with pytest.raises(ValueError, match="penalty_weight"):
        make(model(), args, penalty_weight=0.1, penalty=PenaltyConfig())
    for name, got, expected in (
        ("at", "last", "at='next' here, got 'last'"),
        ("draw", "micro-batches", "draw='samples' here, got 'micro-batches'"),
        ("direction", "step", "direction='random' here, got 'step'"),
    ):
        with pytest.raises(ValueError, match=f"penalty: expected {expected}"):
            make(model(), args, penalty=PenaltyConfig(detach=False, **{name: got}))
    with pytest.raises(TypeError, match="decoder stack"):
        make(nn.Linear(4, 4), args)
    with pytest.raises(ValueError, match="turns: expected a DepthLaw, a positive integer or None"):
        make(model(), args, turns=0)
    trainer = make(model(), args)
    with pytest.raises(RuntimeError, match="training loop"):
        trainer.compute_loss(trainer.model.train(), padded("right")(data))
    args._n_gpu = 2
    with pytest.raises(ValueError, match="torchrun"):
        make(model(), args)
    args._n_gpu, args.torch_compile = 1, True
    with pytest.raises(ValueError, match="torch_compile"):
        make(model(), args)


NAN = float("nan")


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        *(({"turns": value}, TypeError, "turns: expected a DepthLaw, a positive integer or None, ")
          for value in ("4", 4.0, True, NAN, [4], {"law": "fixed"})),
        ({"turns": -1}, ValueError, "turns: expected a DepthLaw, a positive integer or None"),
        *(({"penalty_weight": value}, TypeError, "penalty_weight: expected a number, got ")
          for value in ("0.1", True, [0.1], torch.tensor(0.1))),
        ({"penalty_weight": NAN}, ValueError, "penalty_weight: expected a finite number, got nan"),
        ({"penalty_weight": float("inf")}, ValueError, "penalty_weight: expected a finite number"),
        ({"penalty_weight": -0.1}, ValueError, r"penalty_weight: expected a number in \[0, 1\]"),
        ({"penalty_weight": 1.5}, ValueError, r"penalty_weight: expected a number in \[0, 1\]"),
        *(({"penalty": value}, TypeError, "penalty: expected a PenaltyConfig or None, got ")
          for value in ("x", {"weight": 0.1}, 0.1, True, PenaltyConfig)),
        ({"penalty_wieght": 0.1}, TypeError, "penalty_wieght: expected an option .*penalty_weight"),
        ({"model": lambda x: x}, TypeError, "model: expected a module, got function"),
        ({"model": "gpt2"}, TypeError, "model: expected a module, got str"),
        ({"model": nn.Linear(3, 3)}, TypeError, "model: expected Ouro, Huginn or a looped"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(tmp_path, given, kind, message):
    options = {"model": model(), "train_dataset": documents(LENGTHS)} | given
    with pytest.raises(kind, match=message):
        StarsTrainer(args=arguments(tmp_path), data_collator=padded("left"), **options)


def test_the_penalty_stands_before_the_trainer(tmp_path):
    from transformers import Trainer

    with pytest.raises(TypeError, match="Wrong: expected JacobianPenalty before Trainer among"):
        type("Wrong", (Trainer, JacobianPenalty), {})
    with pytest.raises(TypeError, match="JacobianPenalty: expected a Trainer after it among the"):
        JacobianPenalty(model(), arguments(tmp_path), penalty_weight=0.1)

    class Further(StarsTrainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    assert Further.__mro__.index(JacobianPenalty) < Further.__mro__.index(Trainer)


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"weight": "0.1"}, TypeError, "weight: expected a number, got '0.1'"),
        ({"weight": True}, TypeError, "weight: expected a number, got True"),
        ({"weight": NAN}, ValueError, "weight: expected a finite number, got nan"),
        ({"start_step": "3"}, TypeError, "start_step: expected an integer, got '3'"),
        ({"ramp_steps": 1.5}, TypeError, "ramp_steps: expected an integer, got 1.5"),
        ({"power_steps": True}, TypeError, "power_steps: expected an integer, got True"),
        ({"detach": "no"}, TypeError, "detach: expected true or false, got 'no'"),
        ({"fraction": "0.5"}, TypeError, "fraction: expected a number, got '0.5'"),
    ],
)
def test_wrong_settings_of_the_penalty_are_named(settings, kind, message):
    with pytest.raises(kind, match=message):
        PenaltyConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mu": "1"}, "mu: expected a number, got '1'"),
        ({"high": 4.0}, "high: expected an integer, got 4.0"),
        ({"stratified": 1}, "stratified: expected true or false, got 1"),
        ({"law": 3}, "law: expected text, got 3"),
    ],
)
def test_wrong_settings_of_the_depth_are_named(settings, message):
    with pytest.raises(TypeError, match=message):
        DepthLaw(**settings)


def test_batches_without_bounds_are_refused(trained):
    def square(rows):
        batch = padded("right")(rows)
        mask = torch.ones(len(rows), 1, 7, 7)
        return batch | {"attention_mask": mask}

    with pytest.raises(ValueError, match="attention_mask: expected"):
        trained(model(), documents([7] * 4), square, turns=2)


# -- TRL


@pytest.mark.parametrize(
    ("kind", "padding_free"),
    [
        ("ouro", False),
        ("ouro", True),
        pytest.param("huginn", True, marks=pytest.mark.slow),
        pytest.param("looped", False, marks=pytest.mark.slow),
    ],
)
def test_trls_trainer_has_the_gradient_by_hand(trained, kind, padding_free):
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoTokenizer

    class StarsSFTTrainer(StarsTrainer.__mro__[1], trl.SFTTrainer):
        pass

    chats = [
        {"messages": [{"role": "user", "content": f"What is {a} plus {b}?"},
                      {"role": "assistant", "content": f"The sum is {a + b}."}]}
        for a, b in ((1, 2), (31, 45), (7, 9), (120, 3))
    ]  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(checkpoint())
    make, micros = NETS[kind], []
    options = {
        "kind": trl.SFTConfig, "padding_free": padding_free, "max_length": None, "bf16": False,
        "gradient_checkpointing": False,
    }  # fmt: skip
    data = Dataset.from_list(chats)

    class Recorded(StarsSFTTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.data_collator = recording(self.data_collator, micros)

    with KeepDouble():
        trainer, steps = trained(
            make(), data, None, accumulation=2, kind=Recorded, options=options,
            processing_class=tokenizer, penalty_weight=0.3, turns=LAW,
        )  # fmt: skip
        docs = [[dict.fromkeys(("input_ids", "labels"), d["input_ids"]) for d in m] for m in micros]
        expected = by_hand(make(), docs, turns_of(LAW, 2, seed=5), 0.3, seed=5)
    # TRL's own head computes the token loss in fp32.
    assert_same(steps[0], expected, 1e-6)
    assert {"penalty", "token_loss", "depth", "mean_token_accuracy"} <= set(logged(trainer)[0])
