import pytest
import torch
from torch import nn

from stars_fast.training import checkpoint
from stars_fast.training.checkpoint import (
    checkpoints,
    latest,
    load_state,
    load_weights,
    save_checkpoint,
)
from stars_fast.training.tree import ConfigError


def test_round_trip(tmp_path):
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    state = {"step": 7, "sums": torch.arange(3.0), "nested": {"a": [1, None]}}
    path = save_checkpoint(tmp_path, 7, model, state)
    assert path.name == "step-000007"
    load_weights(path, other)
    assert torch.equal(model.weight, other.weight)
    loaded = load_state(path)
    assert torch.equal(loaded.pop("sums"), state.pop("sums"))
    assert loaded == state


def test_the_newest_are_kept(tmp_path):
    for step in (2, 4, 1000000, 6):
        save_checkpoint(tmp_path, step, nn.Linear(1, 1), {}, keep=2)
    assert sorted(checkpoints(tmp_path)) == [6, 1000000]
    assert latest(tmp_path).name == "step-1000000"


@pytest.mark.parametrize("fails", ["save_model", "save", "sync"])
def test_a_save_that_dies_leaves_no_checkpoint(tmp_path, monkeypatch, fails):
    save_checkpoint(tmp_path, 1, nn.Linear(1, 1), {})

    def die(*_):
        raise KeyboardInterrupt

    owner = {"save_model": "safetensors.torch", "save": "torch"}.get(fails, checkpoint.__name__)
    with monkeypatch.context() as patch:
        patch.setattr(f"{owner}.{fails}", die)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, 2, nn.Linear(1, 1), {})
    assert latest(tmp_path).name == "step-000001"
    save_checkpoint(tmp_path, 2, nn.Linear(1, 1), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]


def test_a_directory_without_its_files_is_not_a_checkpoint(tmp_path):
    path = save_checkpoint(tmp_path, 3, nn.Linear(1, 1), {})
    (path / "state.pt").unlink()
    (tmp_path / "step-new").mkdir()
    assert latest(tmp_path) is None


def test_weights_that_do_not_fit(tmp_path):
    path = save_checkpoint(tmp_path, 1, nn.Linear(3, 2), {})
    with pytest.raises(ConfigError, match="does not fit the model"):
        load_weights(path, nn.Linear(4, 2))


def test_what_is_left_of_a_removed_checkpoint_is_written_again(tmp_path):
    model = torch.nn.Linear(2, 2)
    path = save_checkpoint(tmp_path, 1, model, {"step": 1})
    (path / "state.pt").unlink()
    assert latest(tmp_path) is None
    save_checkpoint(tmp_path, 1, model, {"step": 1})
    assert latest(tmp_path) == path
