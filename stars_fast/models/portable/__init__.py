"""Models as single files that lie beside weights, so that a folder opens without this package.

Such a file imports PyTorch and transformers alone, and nothing of this package but itself.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

OURO = "ouro"
"""The `model_type` in config.json."""

_CLASSES = {
    "AutoConfig": "{}Config",
    "AutoModel": "{}Model",
    "AutoModelForCausalLM": "{}ForCausalLM",
}


def add_code(folder: Path, module: str) -> None:
    """Write a model's code into the folder of a checkpoint, and `auto_map`, which leads
    transformers to it, into its config.json.

    Args:
        module: one of this folder, such as `modeling_two_words_portable`, whose classes are
            `TwoWordsConfig`, `TwoWordsForCausalLM` and, where there is a model without its head,
            `TwoWordsModel`.
    """
    name = "".join(word.capitalize() for word in module.split("_")[1:-1])
    code = _code(module)
    (folder / f"{module}.py").write_bytes(code)
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    classes = {auto: kind.format(name) for auto, kind in _CLASSES.items()}
    config["auto_map"] = {
        auto: f"{module}.{kind}"
        for auto, kind in classes.items()
        if f"\nclass {kind}(".encode() in code
    }
    text = json.dumps(config, indent=2, sort_keys=True)
    file.write_text(text + "\n", encoding="utf-8")


def holds_code(folder: str | Path, module: str) -> bool:
    """Whether a folder's code is that of this package, to the byte: then it may be run, whoever
    gave the folder."""
    file = Path(folder).expanduser() / f"{module}.py"
    return file.is_file() and file.read_bytes() == _code(module)


def register_config() -> None:
    """Make Ouro's configuration known to transformers' `AutoConfig`, where no other is.

    vLLM calls this in each of its processes (entry point `vllm.general_plugins`): its own Ouro,
    which it had up to 0.26, brings no configuration. The class keeps `auto_map`, by which later
    versions find the code of a folder. Where transformers can't give what it needs nothing happens:
    other models have no part in this.
    """
    try:
        from transformers import CONFIG_MAPPING, AutoConfig

        if OURO in CONFIG_MAPPING:
            return
        from stars_fast.models.portable.modeling_ouro_portable import OuroConfig
    except ImportError as error:
        warnings.warn(f"stars_fast: Ouro is not known to transformers: {error}", stacklevel=2)
        return
    AutoConfig.register(OURO, OuroConfig)


def _code(module: str) -> bytes:
    return (Path(__file__).parent / f"{module}.py").read_bytes()
