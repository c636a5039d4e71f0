"""LoopedLM, the small GPT of the paper's addition study: prelude, shared block, coda, tied head."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stars_fast.base.errors import ConfigError
from stars_fast.base.files import naming
from stars_fast.base.optional import need
from stars_fast.base.run_folder import RunFolder
from stars_fast.base.seeds import derive
from stars_fast.data.batches import MicroBatch
from stars_fast.data.samples import seeded_noise
from stars_fast.data.tiny_tokenizer import TINY_VOCABULARY, train_tokenizer, write_tokenizer
from stars_fast.models.families import Family, checkpoint_config, section_of
from stars_fast.models.loop import Loop, Start, Turn, matrix_weights, token_loss
from stars_fast.models.looped import LoopedLM
from stars_fast.models.looped_config import LoopedConfig
from stars_fast.models.reading import read_tokenizer
from stars_fast.models.shape import Shape
from stars_fast.tokens import Tokens

TINY_TOKENIZER = "tiny"
"""The tokenizer that the package makes."""


@dataclass
class LoopedSection(LoopedConfig):
    """A `LoopedLM`, from initial weights.

    family: looped_lm.
    tokenizer: of text: hub id or folder, or tiny for one that the package makes, the default for
        data that need one; none for data that bring their own tokens.
    """

    family: Literal["looped_lm"] = "looped_lm"
    tokenizer: str | None = None


class LoopedLoop(Loop):
    """A `LoopedLM` in parts. Pads stand on the right, where causality hides them."""

    def __init__(self, model: LoopedLM) -> None:
        super().__init__()
        self.model: LoopedLM = model

    def prelude(self, tokens: Tensor) -> Tensor:
        return self.model.prelude(tokens)

    def begin(self, tokens: Tensor, samples: Tokens, seeds: Sequence[int] | None = None) -> Start:
        e = self.model.prelude(tokens)
        if seeds is not None and self.model.training and self.model.config.state == "noise":
            h = seeded_noise(e, samples, seeds)
        else:
            h = self.model.first_state(e)
        return Start(h, e if self.model.injects else None)

    def turn(self, h: Tensor, samples: Tokens, inputs: Tensor | None = None) -> Turn:
        return self.model.turn(inputs)

    def logits(self, h: Tensor) -> Tensor:
        return self.model.head(self.model.coda(h))

    def token_loss(self, h: Tensor, batch: MicroBatch, count: int) -> Tensor:
        out = self.model.coda(h)
        return token_loss(self.model.head, out, batch.positions, batch.labels) / count

    @property
    def vocabulary(self) -> int:
        return self.model.config.vocab_size

    @property
    def layers(self) -> list[nn.Module]:
        return list(self.model.block)

    @property
    def turn_modules(self) -> list[nn.Module]:
        adapter = self.model.adapter
        return self.layers if adapter is None else [*self.layers, adapter]

    def outside_block(self, supervised: float) -> float:
        layers = matrix_weights(self.model.prelude_layers, self.model.coda_layers)
        head = supervised * self.model.config.vocab_size * self.model.config.d_model
        return (layers + head) / self._turn_weights

    def turn_flops(self, lengths: list[int]) -> float:
        config = self.model.config
        attention = 2 * config.n_layers * config.d_model * sum(n * n for n in lengths)
        return 2 * self._turn_weights * sum(lengths) + attention

    @property
    def _turn_weights(self) -> int:
        adapter = self.model.adapter
        return matrix_weights(self.model.block, *([] if adapter is None else [adapter]))


class LoopedFamily(Family):
    title = "LoopedLM"
    model_type = "looped_lm"
    section = LoopedSection
    from_data = ("vocab_size", "max_length")
    precision = "float32"
    shards = False

    def injects(self, section: LoopedSection) -> bool:
        return section.injection != "none"

    def turns_of(self, config: Mapping[str, Any]) -> int | None:
        return config.get("turns")

    def fitted(self, section: dict[str, Any], tokens: int | None, length: int) -> dict[str, Any]:
        if tokens is None:
            section = {"tokenizer": TINY_TOKENIZER} | section
            known = section["tokenizer"]
            if known is None or known == "none":
                raise ConfigError("model.tokenizer: expected a hub id, a folder or tiny for text")
            if "vocab_size" not in section:
                size = TINY_VOCABULARY if known == TINY_TOKENIZER else len(_tokenizer(known))
                section = {"vocab_size": size} | section
            tokens = 1
        needed = {"vocab_size": tokens, "max_length": length}
        section = needed | section
        for name, low in needed.items():
            given = str(section[name])
            if given.isdecimal() and int(given) < low:
                raise ConfigError(
                    f"model.{name}: expected at least {low} for the data, got {given}"
                )
        return section

    def shape(self, section: LoopedSection) -> Shape:
        d = section.d_model
        return Shape(
            width=d,
            queries=d,
            keys=d,
            heads=section.n_heads,
            inner=section.d_ff,
            gated=False,
            layers=section.n_layers,
            outside=section.n_prelude + section.n_coda,
            vocabulary=section.vocab_size,
            tied=True,
            native=False,
            injection=2 * d**2 if section.injection == "adapter" else 0,
        )

    def skeleton(self, section: LoopedSection) -> LoopedLM:
        with torch.device("meta"):
            return LoopedLM(section)

    def start(self, section: LoopedSection, dtype: torch.dtype, seed: int) -> tuple[LoopedLM, Any]:
        tokenizer = None if section.tokenizer is None else _tokenizer(section.tokenizer)
        if tokenizer is not None and len(tokenizer) > section.vocab_size:
            raise ConfigError(
                f"model.vocab_size: expected at least the {len(tokenizer)} tokens of "
                f"model.tokenizer {section.tokenizer}, got {section.vocab_size}"
            )
        torch.manual_seed(derive(seed, "init"))
        return _made(section, dtype), tokenizer

    def keep(self, model: LoopedLM, tokenizer: Any, folder: Path) -> None:
        """The configuration of the run says all of the model."""
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    def outline(self, run: RunFolder) -> LoopedLM:
        """In the dtype that the run keeps its weights in."""
        bf16 = run.settings().get("precision") == "bfloat16"
        return _made(section_of(run), torch.bfloat16 if bf16 else torch.float32)

    def load(self, path: str, dtype: torch.dtype | None) -> LoopedLM:
        files = need("safetensors.torch", "checkpoints")
        config = checkpoint_config(path)
        known = {field.name for field in fields(LoopedConfig)}
        weights = files.load_file(Path(path).expanduser() / "model.safetensors")
        with torch.device("meta"):
            model = LoopedLM(LoopedConfig(**{k: v for k, v in config.items() if k in known}))
        model.to_empty(device="cpu")
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            raise ValueError(f"{path}: the checkpoint does not fit the model: {error}") from error
        return model.to(dtype or getattr(torch, config["dtype"]))

    def loop(self, model: LoopedLM) -> LoopedLoop:
        return LoopedLoop(model)

    def export(
        self,
        model: LoopedLM,
        folder: Path,
        *,
        beside: str,
        dtype: torch.dtype | None,
        turns: int | None,
        shard: str,
    ) -> None:
        """Write `config.json` and `model.safetensors`, whole whatever `shard` says."""
        files = need("safetensors.torch", "checkpoints")
        dtype = dtype or next(model.parameters()).dtype
        folder.mkdir(parents=True, exist_ok=True)
        known = [field.name for field in fields(LoopedConfig)]
        values = asdict(model.config)
        config = {"model_type": self.model_type, "dtype": str(dtype).removeprefix("torch.")}
        config |= {"turns": turns} | {name: values[name] for name in known}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        files.save_file(model.to(dtype).state_dict(), folder / "model.safetensors")

    def generate(self, model: LoopedLM, tokens: Tensor, turns: int, max_new_tokens: int) -> Tensor:
        return model.generate(tokens, turns, max_new_tokens)


def _made(config: LoopedConfig, dtype: torch.dtype) -> LoopedLM:
    model = LoopedLM(config)
    # Full precision is torch's default dtype.
    return model if dtype == torch.float32 else model.to(dtype)


def _tokenizer(path: str) -> Any:
    """The tokenizer of transformers of a folder or of the hub, or the package's own."""
    need("transformers", "tokenizers of text")
    try:
        if path != TINY_TOKENIZER:
            return read_tokenizer(path)
        with tempfile.TemporaryDirectory() as folder, naming(folder):
            write_tokenizer(Path(folder), train_tokenizer(TINY_VOCABULARY), 1_000_000)
            return read_tokenizer(folder)
    except ValueError as error:
        raise ConfigError(f"model.tokenizer {path}: {error}") from error


FAMILY = LoopedFamily()
