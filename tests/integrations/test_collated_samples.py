"""Which samples a collated batch holds."""

import inspect

import pytest
import torch

from stars_fast.integrations.batches import samples_of

IDS = torch.ones(2, 5, dtype=torch.long)


def test_rows_less_their_pads():
    assert (samples_of({"input_ids": IDS}).count, samples_of({"input_ids": IDS}).real) == (2, None)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    found = samples_of({"input_ids": IDS, "attention_mask": mask})
    assert found.count == 2
    assert torch.equal(found.real, mask.bool())
    assert samples_of({"input_ids": IDS, "attention_mask": torch.ones_like(mask)}).real is None


@pytest.mark.parametrize(
    ("positions", "bounds"),
    [
        ([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]], [0, 3, 5, 6, 10]),
        ([[0, 1, 2, 3, 4]], [0, 5, 10]),
        ([[7, 8, 9, 3, 4], [5, 6, 7, 8, 9]], [0, 3, 5, 10]),  # a row that rises from the one before
    ],
)
def test_positions_that_do_not_rise_begin_a_document(positions, bounds):
    found = samples_of({"input_ids": IDS, "position_ids": torch.tensor(positions)})
    assert found.cu_seqlens.tolist() == bounds
    assert found.count == len(bounds) - 1


def test_bounds_come_first_and_empty_documents_do_not_count():
    batch = {
        "input_ids": IDS[:1],
        "position_ids": torch.arange(5)[None],
        "cu_seq_lens_q": torch.tensor([0, 2, 2, 5], dtype=torch.int32),
    }
    found = samples_of(batch)
    assert found.cu_seqlens.tolist() == [0, 2, 5]
    assert found.count == 2


def test_batches_that_are_not_understood_are_refused():
    with pytest.raises(ValueError, match="input_ids: expected"):
        samples_of({"inputs_embeds": IDS})
    with pytest.raises(ValueError, match=r"attention_mask: expected \[2, 5\], got \[2, 1, 5, 5\]"):
        samples_of({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 5, 5)})
    with pytest.raises(ValueError, match="got dict"):
        samples_of({"input_ids": IDS, "attention_mask": {"full_attention": None}})


# -- pads are no samples


DOCUMENTS = ([5, 6, 7], [8], [9, 10, 11, 12])
PAD = 0


def padding_free(documents, multiple, pad=PAD):
    sft = pytest.importorskip("trl.trainer.sft_trainer")
    collate = sft.DataCollatorForLanguageModeling(
        pad_token_id=pad, padding_free=True, pad_to_multiple_of=multiple
    )
    return collate([{"input_ids": list(document)} for document in documents])


@pytest.mark.parametrize("multiple", [None, 8, 9, 16, 64])
@pytest.mark.parametrize("told", ["all", "position_ids", "cu_seq_lens_q"])
@pytest.mark.parametrize("labelled", [True, False])
def test_what_trl_fills_a_packed_row_with_is_no_document(multiple, told, labelled):
    batch = padding_free(DOCUMENTS, multiple)
    if told != "all":
        batch.pop({"position_ids": "cu_seq_lens_q", "cu_seq_lens_q": "position_ids"}[told])
    if not labelled:
        del batch["labels"]
    found = samples_of(batch, pad_id=PAD)
    assert (found.count, found.cu_seqlens.tolist()) == (3, [0, 3, 4, 8])
    assert found.cut(batch["input_ids"]).tolist() == [[t for d in DOCUMENTS for t in d]]


def test_without_a_named_pad_token_two_pads_tell_it():
    for multiple, count in ((None, 3), (10, 3), (64, 3)):
        assert samples_of(padding_free(DOCUMENTS, multiple, pad=2)).count == count


@pytest.mark.parametrize("last", [[0], [7]])
def test_a_document_of_one_token_is_one_where_it_is_not_the_pad(last):
    batch = padding_free([*DOCUMENTS, last], 16)
    assert samples_of(batch, pad_id=PAD).count == (3 if last == [PAD] else 4)


@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_rows_that_trl_packs_before_it_pads(strategy):
    pytest.importorskip("trl")
    from datasets import Dataset
    from trl import pack_dataset

    rows = Dataset.from_dict({"input_ids": [list(d) for d in DOCUMENTS]})
    rows = pack_dataset(rows, seq_length=5, strategy=strategy)
    sft = pytest.importorskip("trl.trainer.sft_trainer")
    free = strategy == "bfd"
    collate = sft.DataCollatorForLanguageModeling(
        pad_token_id=PAD, padding_free=free, pad_to_multiple_of=12
    )
    found = samples_of(collate([dict(row) for row in rows]), pad_id=PAD)
    if free:
        assert sorted(found.lengths) == [1, 3, 4]
    else:
        assert found.lengths == [5, 3]


def test_pads_in_several_packed_rows_and_on_the_left():
    ids = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 0, 0, 0]])
    positions = torch.tensor([[0, 0, 0, 1, 2], [0, 1, 0, 0, 0]])
    labels = torch.where(ids == 0, -100, ids)
    found = samples_of({"input_ids": ids, "position_ids": positions, "labels": labels}, 0)
    assert found.cu_seqlens.tolist() == [0, 3, 5]
    assert found.cut(ids).tolist() == [[5, 6, 7, 8, 9]]
    states = torch.randn(2, 5, 4)
    assert torch.equal(found.cut(states), states[ids > 0][None])


def test_a_pad_token_that_is_a_target_is_a_document():
    batch = {
        "input_ids": torch.tensor([[5, 6, 0, 0]]),
        "position_ids": torch.tensor([[0, 1, 0, 1]]),
        "labels": torch.tensor([[-100, 6, -100, 0]]),
    }
    assert samples_of(batch, 0).count == 2


@pytest.mark.parametrize(
    ("bounds", "mask", "expected"),
    [
        ([0, 3, 5], None, [0, 3, 5]),  # what is behind the last bound is of no document
        ([0, 3, 5, 8], [1, 1, 1, 1, 1, 0, 0, 0], [0, 3, 5]),
        ([0, 4, 8], [1, 1, 1, 0, 1, 1, 0, 0], [0, 3, 5]),
    ],
)
def test_bounds_with_pads_behind_and_masked(bounds, mask, expected):
    batch = {"input_ids": torch.arange(1, 9)[None], "cu_seq_lens_q": torch.tensor(bounds)}
    if mask is not None:
        batch["attention_mask"] = torch.tensor([mask])
    assert samples_of(batch).cu_seqlens.tolist() == expected


def test_flattened_documents_are_all_there():
    from transformers import DataCollatorWithFlattening

    options = {"return_seq_idx": True}
    if "position_ids_start" in inspect.signature(DataCollatorWithFlattening).parameters:
        options["position_ids_start"] = 2  # not in the oldest transformers
    for bounds in (True, False):
        flat = DataCollatorWithFlattening(return_flash_attn_kwargs=bounds, **options)
        batch = flat([{"input_ids": list(document)} for document in (*DOCUMENTS, [3])])
        assert samples_of(batch).cu_seqlens.tolist() == [0, 3, 4, 8, 9]


def test_rows_of_pads_alone_are_no_samples():
    mask = torch.tensor([[0, 0, 0], [0, 1, 1], [0, 0, 0]])
    found = samples_of({"input_ids": torch.ones(3, 3, dtype=torch.long), "attention_mask": mask})
    assert found.count == 1
    assert found.places.tolist() == [1]
    assert torch.equal(found.real, mask[1:2].bool())
    nothing = samples_of({"input_ids": mask, "attention_mask": torch.zeros_like(mask)})
    assert nothing.count == 0


def test_bounds_and_masks_that_are_not_understood_are_refused():
    ids = torch.ones(1, 5, dtype=torch.long)
    for bounds in ([0, 3, 6], [1, 5], [0, 4, 3, 5], [0]):
        with pytest.raises(ValueError, match="cu_seq_lens_q: expected bounds that rise from 0"):
            samples_of({"input_ids": ids, "cu_seq_lens_q": torch.tensor(bounds)})
    with pytest.raises(ValueError, match="attention_mask: expected the real tokens of a row to"):
        samples_of({"input_ids": ids, "attention_mask": torch.tensor([[1, 0, 1, 1, 0]])})
