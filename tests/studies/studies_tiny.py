"""A study of four runs of a few steps."""

TINY = {
    "title": "Two placements",
    "asks": "Which one?",
    "panels": "placement",
    "findings": ["finding 1"],
    "runs": [
        {
            "placement": {
                "pre": {"model": {"placement": "pre"}},
                "post": {"model": {"placement": "post"}},
            },
            "norm": {"LayerNorm": {}, "RMSNorm": {"model": {"norm": "rmsnorm"}}},
        }
    ],
    "scales": {
        "quick": {
            "base": "addition-quick-sft",
            "settings": {
                "model": {"d_model": 16, "n_heads": 2, "d_ff": 32},
                "data": {"digits": 1, "train_samples": 60, "test_samples": 21},
                "depth": {"value": 2},
                "train": {"steps": 6, "batch_size": 16, "save_every": 2, "report_to": []},
                "eval": {"turns": [1, 2]},
            },
        }
    },
}
