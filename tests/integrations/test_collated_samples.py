"""Which samples a collated batch holds."""

import pytest
import torch

from stars_fast.integrations.batches import samples_of

IDS = torch.ones(2, 5, dtype=torch.long)


def test_rows_less_their_pads():
    assert (samples_of({"input_ids": IDS}).count, samples_of({"input_ids": IDS}).mask) == (2, None)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    found = samples_of({"input_ids": IDS, "attention_mask": mask})
    assert found.count == 2
    assert torch.equal(found.mask, mask.bool())
    assert samples_of({"input_ids": IDS, "attention_mask": torch.ones_like(mask)}).mask is None


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
