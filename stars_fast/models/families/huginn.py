"""Huginn: depth-recurrent checkpoints, decoders retrofitted with recurrence, what is trained from
them, and tiny models of random weights."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
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
from stars_fast.models.loop import Loop, Start, Turn, head_loss, matrix_weights
from stars_fast.models.reading import read_tokenizer, reading
from stars_fast.models.shape import Shape
from stars_fast.tokens import Tokens

TINY_MODEL = "tiny"
"""The path that stands for a model which the package makes, with random weights."""

SIZES: dict[str, dict[str, Any]] = {
    "tomg-group-umd/huginn-0125": {
        "n_embd": 5280,
        "intermediate_size": 17920,
        "n_heads": 55,
        "n_layers_in_recurrent_block": 4,
        "n_layers_in_prelude": 2,
        "n_layers_in_coda": 2,
        "vocab_size": 65536,
    }
}
"""Sizes in the `config.json` of the published checkpoint, which need not be at hand."""

_SHAPES = ("huginn", "llama", "tinyllama", "olmo2")


@dataclass
class HuginnSection:
    """The Huginn to start from, or the decoder retrofitted with its recurrence.

    family: huginn.
    path: hub id or folder of a checkpoint in Huginn's layout, or tiny for one that the package
        makes.
    attention: of plain turns: sdpa, eager, flex_attention, or an installed kernel library by its
        name in transformers, such as flash_attention_2. Turns with a tangent have their own.
    shape: of a tiny model: huginn, or that of a retrofitted llama, tinyllama or olmo2.
    width: hidden size of a tiny model.
    layers: layers of a turn of a tiny model; its prelude and coda have one each.
    """

    family: Literal["huginn"] = "huginn"
    path: str = "tomg-group-umd/huginn-0125"
    attention: str = "sdpa"
    shape: str = "huginn"
    width: int = 64
    layers: int = 2

    def __post_init__(self) -> None:
        if self.shape not in _SHAPES:
            raise ValueError(f"shape: expected one of {', '.join(_SHAPES)}, got {self.shape!r}")
        for name in ("width", "layers"):
            check_integer(name, getattr(self, name), 1)
        if self.width % 16:
            raise ValueError(f"width: expected a multiple of 16, got {self.width}")


class HuginnLoop(Loop):
    """A `HuginnForCausalLM` in parts. Pads stand on the right, where causality hides them without a
    mask."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model: Any = model

    def prelude(self, tokens: Tensor) -> Tensor:
        x = self.model.embed(tokens)
        return self.model.prelude(x, self.model.prepare(x))

    def begin(self, tokens: Tensor, samples: Tokens, seeds: Sequence[int] | None = None) -> Start:
        """The initial state, which is noise, and the prelude's output, which all turns take in."""
        x = self.model.embed(tokens)
        context = self.model.prepare(x, cu_seqlens=samples.cu_seqlens)
        inputs = self.model.prelude(x, context)
        seed = None
        if seeds is not None and self.model.training:
            seed = torch.tensor(seeds)
            if samples.packed:
                seed = seed.repeat_interleave(torch.tensor(samples.lengths))
                seed = F.pad(seed, (0, samples.length - len(seed))).unsqueeze(0)
            else:
                seed = seed.unsqueeze(1)
            seed = seed.to(inputs.device, non_blocking=True)
        return Start(self.model.first_state(inputs, context, seed), inputs)

    def turn(self, h: Tensor, samples: Tokens, inputs: Tensor | None = None) -> Turn:
        if inputs is None:
            raise ValueError("inputs: expected those of begin, [B, S, D], got None")
        model = self.model
        context = model.prepare(h, tokens=samples if samples.packed else None)
        return lambda x: model.turn(x, inputs, context)

    def logits(self, h: Tensor) -> Tensor:
        return self.model.read(h, self.model.prepare(h))

    def token_loss(self, h: Tensor, batch: MicroBatch, count: int) -> Tensor:
        out = self.model.coda(h, self.model.prepare(h, cu_seqlens=batch.samples.cu_seqlens))
        return head_loss(self.model.lm_head, out, batch, count)

    @property
    def vocabulary(self) -> int:
        return self.model.config.padded_vocab_size

    @property
    def layers(self) -> list[nn.Module]:
        return self.model.core_layers

    @property
    def turn_modules(self) -> list[nn.Module]:
        return [*self.layers, self.model.part("adapter")]

    def outside_block(self, supervised: float) -> float:
        config = self.model.config
        layers = matrix_weights(self.model.part("prelude"), self.model.part("coda"))
        head = supervised * config.padded_vocab_size * config.n_embd
        return (layers + head) / self._turn_weights()

    def turn_flops(self, lengths: list[int]) -> float:
        config = self.model.config
        width = config.n_heads * config.head_dim
        attention = 2 * len(self.layers) * width * sum(n * n for n in lengths)
        return 2 * self._turn_weights() * sum(lengths) + attention

    def _turn_weights(self) -> int:
        return matrix_weights(self.model.part("adapter"), *self.layers)


_SIZES = (
    "n_embd",
    "n_heads",
    "intermediate_size",
    "n_layers_in_recurrent_block",
    "n_layers_in_prelude",
    "n_layers_in_coda",
    "vocab_size",
)


class HuginnFamily(Family):
    title = "Huginn"
    model_type = "huginn_raven"
    section = HuginnSection
    packs = True
    causal_lm = True
    code = "modeling_huginn_portable"

    def describe(self, section: HuginnSection) -> str:
        return f"Huginn ({section.path})"

    def injects(self, section: Any) -> bool:
        return True

    def turns_of(self, config: Mapping[str, Any]) -> int | None:
        return int(config.get("mean_recurrence", 32))

    def unread(self, section: HuginnSection) -> dict[str, str]:
        given = section.path != TINY_MODEL
        return (
            dict.fromkeys(("shape", "width", "layers"), f"model.path is not {TINY_MODEL}")
            if given
            else {}
        )

    def skeleton(self, section: HuginnSection) -> nn.Module:
        need("transformers", "Huginn models")
        from stars_fast.models.huginn import HuginnConfig, HuginnForCausalLM

        with torch.device("meta"):
            return HuginnForCausalLM(HuginnConfig(**self._sizes(section)))

    def _sizes(self, section: HuginnSection) -> Mapping[str, Any]:
        """The fields of a `config.json` that sizes follow from, perhaps all of them."""
        config: Mapping[str, Any] = SIZES.get(section.path, {})
        if section.path == TINY_MODEL:
            config = {
                "n_embd": section.width,
                "intermediate_size": 2 * section.width,
                "n_heads": 4,
                "n_layers_in_recurrent_block": section.layers,
                "n_layers_in_prelude": 1,
                "n_layers_in_coda": 1,
                "vocab_size": TINY_VOCABULARY,
            }
        config = config or checkpoint_config(section.path)
        require_sizes(section.path, config, _SIZES)
        return config

    def shape(self, section: HuginnSection) -> Shape:
        config = self._sizes(section)
        width, heads = config["n_embd"], config["n_heads"]
        head = config.get("head_dim") or width // heads
        return Shape(
            width=width,
            queries=heads * head,
            keys=(config.get("num_key_value_heads") or heads) * head,
            heads=heads,
            inner=config["intermediate_size"],
            gated=True,
            layers=config["n_layers_in_recurrent_block"],
            outside=config["n_layers_in_prelude"] + config["n_layers_in_coda"],
            vocabulary=config.get("padded_vocab_size") or config["vocab_size"],
            tied=config.get("tie_embeddings", True),
            injection=2 * width**2,
        )

    def base(self, section: HuginnSection) -> str | None:
        return None if section.path == TINY_MODEL else section.path

    def start(self, section: HuginnSection, dtype: torch.dtype, seed: int) -> tuple[nn.Module, Any]:
        need("transformers", "Huginn models")
        if section.path != TINY_MODEL:
            return _start(section, section.path, dtype)
        from stars_fast.models.huginn.tiny import write_tiny_huginn

        with tempfile.TemporaryDirectory() as folder, naming(folder):
            write_tiny_huginn(
                folder,
                shape=section.shape,
                seed=derive(seed, "init") % 2**32,
                n_embd=section.width,
                intermediate_size=2 * section.width,
                n_layers_in_recurrent_block=section.layers,
            )
            return _start(section, folder, dtype)

    def outline(self, run: RunFolder) -> nn.Module:
        need("transformers", "Huginn models")
        from stars_fast.models.huginn import HuginnConfig, HuginnForCausalLM

        with torch.device("meta"):
            model: Any = HuginnForCausalLM(HuginnConfig.from_pretrained(run.model))
        model.to_empty(device="cpu")
        model.tie_weights()  # the copy from the meta device has parted them
        return model

    def load(self, path: str, dtype: torch.dtype | None) -> nn.Module:
        need("transformers", "Huginn models")
        from stars_fast.models.huginn import HuginnForCausalLM

        return HuginnForCausalLM.from_pretrained(path, dtype="auto" if dtype is None else dtype)

    def loop(self, model: Any) -> HuginnLoop:
        return HuginnLoop(model)

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
        from stars_fast.models.ouro.loading import stop_ids, unite_stops

        if (Path(beside) / "generation_config.json").exists():
            model.generation_config = GenerationConfig.from_pretrained(beside)
        adopt_depth(model, turns)
        if has_tokenizer(beside):  # where training ends a message, other readers stop too
            settings = model.generation_config
            unite_stops(settings, [*stop_ids(settings), *end_ids(self.tokenizer(beside))])
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


def _start(section: HuginnSection, path: str, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    from stars_fast.models.huginn import HuginnForCausalLM

    with reading(path, f"model.path {path}, model.attention {section.attention}"):
        check_exists(path)
        model = HuginnForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=section.attention
        )
        return model, read_tokenizer(path)


FAMILY = HuginnFamily()
