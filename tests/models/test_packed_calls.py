"""Packed documents as transformers' collators say them, to a model with its head and without."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

from decoder_models import decoder
from families_of_transformers import FAMILIES, ids, make
from transformers import DataCollatorWithFlattening

from stars_fast.models.looped_decoder import LoopedDecoderForCausalLM

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
DOCUMENTS = [ids(length=n, seed=n) for n in (4, 2, 7)]
BOUNDS = torch.tensor([0, 4, 6, 13], dtype=torch.int32)
POSITIONS = torch.cat([torch.arange(document.shape[1]) for document in DOCUMENTS])[None]
ATTENTION = {
    "cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS, "max_length_q": 7, "max_length_k": 7,
}  # fmt: skip
WAYS = {
    "positions": {"position_ids": POSITIONS},
    "positions and bounds": {"position_ids": POSITIONS, **ATTENTION},
    "bounds": ATTENTION,
    "bounds of queries": {"cu_seq_lens_q": BOUNDS},
    "own name": {"cu_seqlens": BOUNDS},
    "with numbers": {
        "position_ids": POSITIONS, **ATTENTION,
        "seq_idx": torch.repeat_interleave(torch.arange(3), BOUNDS.diff())[None],
    },
}  # fmt: skip


def entries(model):
    """The ways to the states that the head reads."""
    if model.base_model is model:  # Huginn has no model without a head
        return {"with head": model}
    return {"with head": model, "without": model.base_model}


def states(entry, tokens, **options):
    out = entry(input_ids=tokens, **options)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("training", [False, True])
def test_packed_documents_are_documents_alone_by_either_entry(name, way, training):
    model = make(name).train(training)
    for entry in entries(model).values():
        packed = states(entry, torch.cat(DOCUMENTS, 1), **WAYS[way])
        alone = torch.cat([states(entry, each) for each in DOCUMENTS], 1)
        torch.testing.assert_close(packed, alone, **CLOSE)
        whole = states(entry, torch.cat(DOCUMENTS, 1))
        assert (whole - alone).abs().max() > 1e-3  # or nothing was tested


def loss_alone(model, documents):
    """Mean over the targets of documents that run one by one."""
    losses = [
        F.cross_entropy(model(each).logits[0, :-1], each[0, 1:], reduction="sum")
        for each in documents
    ]
    return sum(losses) / sum(each.shape[1] - 1 for each in documents)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [{}, {"return_flash_attn_kwargs": True, "return_seq_idx": True}],
    ids=["positions", "bounds"],
)
def test_the_flattening_collators_batch_has_the_loss_of_its_documents(name, options):
    model = make(name)
    rows = [{"input_ids": each[0].tolist()} for each in DOCUMENTS]
    batch = DataCollatorWithFlattening(**options)(rows)
    expected = loss_alone(model, DOCUMENTS)
    torch.testing.assert_close(model(**batch).loss, expected, **CLOSE)
    expected.backward()
    alone = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.train()
    model(**batch).loss.backward()
    for name, p in model.named_parameters():
        if name in alone:
            torch.testing.assert_close(p.grad, alone[name], **CLOSE)


OTHER = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
MISTAKES = [
    ({"cu_seq_lens_k": BOUNDS}, "cu_seq_lens_k: expected cu_seq_lens_q beside it"),
    ({"max_length_q": 7}, "max_length_q: expected cu_seq_lens_q beside it"),
    ({"seq_idx": torch.zeros(1, 13)}, "seq_idx: expected cu_seq_lens_q or position_ids beside"),
    ({**ATTENTION, "cu_seqlens": BOUNDS}, "cu_seq_lens_q: expected None when cu_seqlens is given"),
    ({**ATTENTION, "cu_seq_lens_k": OTHER}, "cu_seq_lens_k: expected the bounds of cu_seq_lens_q"),
    ({**ATTENTION, "cu_seq_lens_k": BOUNDS[1:]}, "cu_seq_lens_k: expected the bounds"),
    (
        {**ATTENTION, "position_ids": torch.arange(13)[None]},
        "position_ids: expected positions that count each document of cu_seq_lens_q from 0",
    ),
    ({**ATTENTION, "attention_mask": torch.ones(1, 13)}, "attention_mask: expected None when"),
    ({"cu_seq_lens_q": BOUNDS[:-1]}, "cu_seqlens: expected bounds that rise from 0 to total = 13"),
    ({**ATTENTION, "use_cache": True}, "use_cache: expected False for packed documents"),
]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("options", "message"), MISTAKES, ids=[each[1] for each in MISTAKES])
def test_contradictions_are_refused_by_either_entry(name, options, message):
    for entry in entries(make(name)).values():
        with pytest.raises(ValueError, match=message):
            entry(input_ids=torch.cat(DOCUMENTS, 1), **options)


def test_bounds_of_the_wrong_type_are_refused():
    with pytest.raises(TypeError, match="cu_seqlens: expected a tensor, got list"):
        make("ouro")(torch.cat(DOCUMENTS, 1), cu_seq_lens_q=[0, 13])
    with pytest.raises(ValueError, match=r"expected shape \[1, total, D\] with cu_seqlens"):
        make("ouro")(ids(rows=2), cu_seq_lens_q=torch.tensor([0, 7]))


@pytest.mark.parametrize("architecture", ["gemma2", "granite", "cohere"])
def test_a_reader_of_the_configuration_finds_what_the_head_does_to_logits(architecture):
    """As TRL reads it, to compute the loss from the states and the weight of the head."""
    model = LoopedDecoderForCausalLM.from_decoder(decoder(architecture), turns=2)
    text = model.config.get_text_config()
    names = ("final_logit_softcapping", "logits_scaling", "logit_scale")
    assert any(getattr(text, name, None) is not None for name in names)
    assert all(
        getattr(text, name, None) == getattr(model.config.decoder, name, None) for name in names
    )
