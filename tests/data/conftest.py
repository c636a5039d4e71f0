import pytest


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """No hub, and nothing of `datasets` outside the test's folder. Set where it is read: the
    variables of the environment count only before the first import."""
    import datasets
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
