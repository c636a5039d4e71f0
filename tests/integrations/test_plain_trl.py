"""TRL's own trainers, without the penalty, on looped models: packed documents are documents."""

import math

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("trl")

import ouro_models
from families_of_transformers import FAMILIES, make
from penalised import Gradients, arguments
from test_packed_calls import DOCUMENTS, loss_alone
from transformers import AutoTokenizer

pytestmark = pytest.mark.slow
WAYS = {
    "packed": {"packing": True, "max_length": 64},
    "padding_free": {"padding_free": True, "max_length": None},
    "filled up": {"padding_free": True, "max_length": None, "pad_to_multiple_of": 8},
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_that_of_the_documents_alone(name, way, tmp_path):
    import trl
    from datasets import Dataset

    model = make(name, torch.float32)
    loss = loss_alone(model, DOCUMENTS)
    loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    seen = Gradients()
    trainer = trl.SFTTrainer(
        model,
        arguments(
            tmp_path, micro=4, kind=trl.SFTConfig, bf16=False, gradient_checkpointing=False,
            **WAYS[way],
        ),
        train_dataset=Dataset.from_dict({"input_ids": [each[0].tolist() for each in DOCUMENTS]}),
        processing_class=AutoTokenizer.from_pretrained(ouro_models.checkpoint()),
        callbacks=[seen],
    )  # fmt: skip
    trainer.train()
    (logged,) = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert logged == pytest.approx(loss.item(), rel=1e-5)
    (found,) = seen.steps
    assert expected.keys() <= found.keys()
    for n, grad in expected.items():  # in fp32, through layers that see other shapes
        torch.testing.assert_close(found[n], grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_models_are_loaded_by_their_folders(name, tmp_path):
    """That to be trained, and the reference that TRL makes of the same folder."""
    import trl
    from datasets import Dataset

    folder = str(tmp_path / "model")
    make(name, torch.float32).save_pretrained(folder)
    words = AutoTokenizer.from_pretrained(ouro_models.checkpoint())
    rows = {"prompt": ["a b", "c"], "chosen": ["good x", "fine"], "rejected": ["bad", "no way"]}
    trainer = trl.DPOTrainer(
        folder,
        args=arguments(tmp_path, kind=trl.DPOConfig, bf16=False, gradient_checkpointing=False),
        train_dataset=Dataset.from_dict(rows),
        processing_class=words,
    )
    trainer.train()
    (logged,) = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert logged == pytest.approx(math.log(2))  # model and reference are still the same
