"""Ouro: ByteDance's checkpoints, what is trained from them, and tiny models of random weights."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stars_fast.base.checks import check_integer
from stars_fast.base.files import naming
from stars_fast.base.optional import need
from stars_fast.base.run_folder import RunFolder
from stars_fast.base.seeds import derive
from stars_fast.data.batches import MicroBatch
from stars_fast.data.tiny_tokenizer import TINY_VOCABULARY
from stars_fast.models.families import Family, checkpoint_config, require_sizes
from stars_fast.models.folders import check_exists, has_tokenizer
from stars_fast.models.loop import Loop, Turn, head_loss, matrix_weights
from stars_fast.models.reading import read_tokenizer, reading
from stars_fast.models.shape import DECODER_SIZES, Shape, shape_of_config
from stars_fast.tokens import Tokens

TINY_MODEL = "tiny"
"""The path that stands for a model which the package makes, with random weights."""


_PUBLISHED = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "vocab_size": 49152,
}
SIZES = {
    f"ByteDance/Ouro-{name}{kind}": _PUBLISHED | {"num_hidden_layers": layers}
    for name, layers in (("1.4B", 24), ("2.6B", 48))
    for kind in ("", "-Thinking")
}
"""Sizes in the `config.json` of the published checkpoints, which need not be at hand."""


@dataclass
class OuroSection:
    """The Ouro to start from.

    family: ouro.
    path: hub id or folder of an Ouro checkpoint, or tiny for one that the package makes.
    attention: of plain turns: sdpa, eager, flex_attention, or an installed kernel library by its
        name in transformers, such as flash_attention_2. Turns with a tangent have their own.
    gate: the exit gate: frozen, or ignored.
    width: hidden size of a tiny model.
    layers: layers of a tiny model.
    """

    family: Literal["ouro"] = "ouro"
    path: str = "ByteDance/Ouro-1.4B"
    attention: str = "sdpa"
    gate: str = "frozen"
    width: int = 64
    layers: int = 2

    def __post_init__(self) -> None:
        if self.gate not in ("frozen", "ignored"):
            raise ValueError(
                f"gate: expected frozen or ignored (training it is not part of STARS), got "
                f"{self.gate!r}"
            )
        for name in ("width", "layers"):
            check_integer(name, getattr(self, name), 1)
        if self.width % 16:
            raise ValueError(f"width: expected a multiple of 16, got {self.width}")


class OuroLoop(Loop):
    """An `OuroForCausalLM` in parts. Pads stand on the right, where causality hides them without a
    mask."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model: Any = model

    def prelude(self, tokens: Tensor) -> Tensor:
        return self.model.model.embed_tokens(tokens)

    def turn(self, h: Tensor, samples: Tokens, inputs: Tensor | None = None) -> Turn:
        model = self.model.model
        context = model.prepare(h, tokens=samples if samples.packed else None)
        return lambda x: model.turn(x, context)

    def logits(self, h: Tensor) -> Tensor:
        return self.model.lm_head(h)

    def token_loss(self, h: Tensor, batch: MicroBatch, count: int) -> Tensor:
        return head_loss(self.model.lm_head, h, batch, count)

    @property
    def vocabulary(self) -> int:
        return self.model.config.vocab_size

    @property
    def layers(self) -> list[nn.Module]:
        return list(self.model.model.layers)

    def outside_block(self, supervised: float) -> float:
        config = self.model.config
        head = supervised * config.vocab_size * config.hidden_size
        return head / matrix_weights(*self.layers)

    def turn_flops(self, lengths: list[int]) -> float:
        config = self.model.config
        width = config.num_attention_heads * config.head_dim
        attention = 2 * config.num_hidden_layers * width * sum(n * n for n in lengths)
        return 2 * matrix_weights(*self.layers) * sum(lengths) + attention


class OuroFamily(Family):
    title = "Ouro"
    model_type = "ouro"
    section = OuroSection
    packs = True
    causal_lm = True
    code = "modeling_ouro_portable"

    def describe(self, section: OuroSection) -> str:
        return f"Ouro ({section.path})"

    def turns_of(self, config: Mapping[str, Any]) -> int | None:
        return int(config.get("total_ut_steps", 4))

    def unread(self, section: OuroSection) -> dict[str, str]:
        given = section.path != TINY_MODEL
        return (
            dict.fromkeys(("width", "layers"), f"model.path is not {TINY_MODEL}") if given else {}
        )

    def shape(self, section: OuroSection) -> Shape:
        config = self._sizes(section)
        return shape_of_config(config, layers=config["num_hidden_layers"], outside=0)

    def skeleton(self, section: OuroSection) -> nn.Module:
        need("transformers", "Ouro models")
        from stars_fast.models.ouro import OuroConfig, OuroForCausalLM

        with torch.device("meta"):
            return OuroForCausalLM(OuroConfig(**self._sizes(section)))

    def _sizes(self, section: OuroSection) -> Mapping[str, Any]:
        """The fields of a `config.json` that sizes follow from, perhaps all of them."""
        config: Mapping[str, Any] = SIZES.get(section.path, {})
        if section.path == TINY_MODEL:
            config = {
                "hidden_size": section.width,
                "intermediate_size": 2 * section.width,
                "num_hidden_layers": section.layers,
                "num_attention_heads": 4,
                "vocab_size": TINY_VOCABULARY,
            }
        config = config or checkpoint_config(section.path)
        require_sizes(section.path, config, DECODER_SIZES)
        return config

    def base(self, section: OuroSection) -> str | None:
        return None if section.path == TINY_MODEL else section.path

    def start(self, section: OuroSection, dtype: torch.dtype, seed: int) -> tuple[nn.Module, Any]:
        need("transformers", "Ouro models")
        if section.path != TINY_MODEL:
            return _start(section, section.path, dtype)
        from stars_fast.models.ouro.tiny import write_tiny_ouro

        with tempfile.TemporaryDirectory() as folder, naming(folder):
            write_tiny_ouro(
                folder,
                seed=derive(seed, "init") % 2**32,
                hidden_size=section.width,
                intermediate_size=2 * section.width,
                num_hidden_layers=section.layers,
                remote_code=False,
            )
            return _start(section, folder, dtype)

    def outline(self, run: RunFolder) -> nn.Module:
        need("transformers", "Ouro models")
        from stars_fast.models.ouro import OuroConfig, OuroForCausalLM

        with torch.device("meta"):
            model: Any = OuroForCausalLM(OuroConfig.from_pretrained(run.model))
        model.to_empty(device="cpu")
        model.tie_weights()  # the copy from the meta device has parted them
        return model

    def load(self, path: str, dtype: torch.dtype | None) -> nn.Module:
        need("transformers", "Ouro models")
        from stars_fast.models.ouro import OuroForCausalLM

        return OuroForCausalLM.from_pretrained(path, dtype="auto" if dtype is None else dtype)

    def loop(self, model: Any) -> OuroLoop:
        return OuroLoop(model)

    def export(
        self,
        model: Any,
        folder: Path,
        *,
        beside: str,
        dtype: torch.dtype | None,
        turns: int | None,
        shard: str,
    ) -> None:
        from transformers import GenerationConfig

        from stars_fast.data.chat import end_ids
        from stars_fast.models.ouro.generation import adopt_depth
        from stars_fast.models.ouro.loading import set_stop

        if (Path(beside) / "generation_config.json").exists():
            model.generation_config = GenerationConfig.from_pretrained(beside)
        adopt_depth(model, turns)
        # Where training ends a message and evaluation a generation, other readers stop too.
        set_stop(model, end_ids(self.tokenizer(beside)) if has_tokenizer(beside) else ())
        model.to(dtype or model.config.dtype or torch.float32)
        model.save_pretrained(folder, max_shard_size=shard)

    def generate(self, model: Any, tokens: Tensor, turns: int, max_new_tokens: int) -> Tensor:
        return model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            turns=turns,
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )


def _start(section: OuroSection, path: str, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    from stars_fast.models.ouro import OuroForCausalLM

    with reading(path, f"model.path {path}, model.attention {section.attention}"):
        check_exists(path)
        model = OuroForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=section.attention, gate=section.gate
        )
        return model, read_tokenizer(path)


FAMILY = OuroFamily()
