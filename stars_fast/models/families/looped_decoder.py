"""Looped decoders: any decoder of transformers with its middle layers repeated, what is trained
from them, and tiny ones of random weights."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stars_fast.base.checks import check_integer
from stars_fast.base.errors import ConfigError
from stars_fast.base.files import naming
from stars_fast.base.optional import need
from stars_fast.base.run_folder import RunFolder
from stars_fast.base.seeds import derive
from stars_fast.data.batches import MicroBatch
from stars_fast.data.samples import seeded_noise
from stars_fast.data.tiny_tokenizer import TINY_VOCABULARY, train_tokenizer, write_tokenizer
from stars_fast.models.cast import cast
from stars_fast.models.families import Family, checkpoint_config, require_sizes
from stars_fast.models.folders import check_exists, has_tokenizer
from stars_fast.models.injection import check_injection
from stars_fast.models.loop import Loop, Start, Turn, head_loss, matrix_weights
from stars_fast.models.reading import read_tokenizer, reading
from stars_fast.models.shape import DECODER_SIZES, Shape, shape_of_config
from stars_fast.tokens import Tokens, describe_tokens

TINY_MODEL = "tiny"
"""The path that stands for a decoder which the package makes, with random weights."""

_LOOP = (
    "layers", "prelude", "block", "coda", "injection", "state", "adapter_start", "norm_between",
)  # fmt: skip
"""Fields that say how a decoder is looped."""


@dataclass
class LoopedDecoderSection:
    """The decoder to loop, or a looped one to go on from.

    family: looped_decoder.
    path: hub id or folder of a decoder of transformers or of a looped decoder, or tiny for a Llama
        that the package makes.
    prelude: layers before the loop. A looped decoder has its own loop: fields of it are left out.
    block: layers that are repeated; none for all between prelude and coda.
    coda: layers after the loop.
    layers: the layers that are used, by their place in the decoder; none for all.
    injection: what a turn takes from the prelude besides the state: none, add, or adapter (a linear
        map of both).
    state: what the first turn starts from: prelude (its output), noise, or learned.
    adapter_start: what an adapter gives before training: state (a turn is what it would be without
        one), or inputs (the prelude's output alone, so that the state is learned to be used); none
        for state where the first state is the prelude's output, else inputs.
    norm_between: whether a turn ends with a norm of its own.
    attention: sdpa or eager; none for the decoder's choice. Turns with a tangent have their own.
    width: hidden size of a tiny model.
    depth: layers of a tiny model.
    """

    family: Literal["looped_decoder"] = "looped_decoder"
    path: str = "HuggingFaceTB/SmolLM2-135M"
    prelude: int = 1
    block: int | None = None
    coda: int = 1
    layers: tuple[int, ...] | None = None
    injection: Literal["none", "add", "adapter"] = "none"
    state: Literal["prelude", "noise", "learned"] = "prelude"
    adapter_start: Literal["state", "inputs"] | None = None
    norm_between: bool = False
    attention: str | None = None
    width: int = 64
    depth: int = 4

    def __post_init__(self) -> None:
        for name, low in (("prelude", 0), ("coda", 0), ("width", 1), ("depth", 1)):
            check_integer(name, getattr(self, name), low)
        if self.block is not None:
            check_integer("block", self.block, 1)
        if self.width % 16:
            raise ValueError(f"width: expected a multiple of 16, got {self.width}")
        if self.path == TINY_MODEL:  # a folder may hold a loop of its own
            check_injection(self.injection, self.state, self.adapter_start)
        if self.attention not in (None, "sdpa", "eager"):
            raise ValueError(f"attention: expected sdpa, eager or none, got {self.attention!r}")

    @property
    def loop(self) -> dict[str, Any]:
        """The arguments of `from_decoder`."""
        return {name: getattr(self, name) for name in _LOOP}


class LoopedDecoderLoop(Loop):
    """A `LoopedDecoderForCausalLM` in parts. Pads stand on the right, where causality hides them
    without a mask."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model: Any = model

    def prelude(self, tokens: Tensor) -> Tensor:
        return self._prelude(tokens, None)

    def _prelude(self, tokens: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        inner = self.model.model
        context = inner.prepare(inner.like(tokens), cu_seqlens=cu_seqlens)
        return inner.prelude(inner.embed(tokens, context), context)

    def begin(self, tokens: Tensor, samples: Tokens, seeds: Sequence[int] | None = None) -> Start:
        e = self._prelude(tokens, samples.cu_seqlens)
        config = self.model.config
        if seeds is not None and self.model.training and config.state == "noise":
            h = seeded_noise(e, samples, seeds) * config.state_std
        else:
            positions = describe_tokens(e, cu_seqlens=samples.cu_seqlens).positions
            h = self.model.model.first_state(e, positions)
        return Start(h, None if config.injection == "none" else e)

    def turn(self, h: Tensor, samples: Tokens, inputs: Tensor | None = None) -> Turn:
        inner = self.model.model
        context = inner.prepare(h, cu_seqlens=samples.cu_seqlens, inputs=inputs)
        return lambda x: inner.turn(x, context)

    def _read(self, h: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """The coda's output."""
        inner = self.model.model
        return inner.coda(h, inner.prepare(h, cu_seqlens=cu_seqlens))

    def logits(self, h: Tensor) -> Tensor:
        """The logits of rows that are samples, not packed documents."""
        return self.model.logits(self._read(h, None))

    def token_loss(self, h: Tensor, batch: MicroBatch, count: int) -> Tensor:
        out = self._read(h, batch.samples.cu_seqlens)
        head = self.model.lm_head if self.model.head_is_linear else self.model.logits
        return head_loss(head, out, batch, count)

    @property
    def vocabulary(self) -> int:
        return self.model.config.vocab_size

    @property
    def layers(self) -> list[nn.Module]:
        return list(self.model.model.block)

    @property
    def turn_modules(self) -> list[nn.Module]:
        adapter = self.model.model.adapter
        return self.layers if adapter is None else [*self.layers, adapter]

    def outside_block(self, supervised: float) -> float:
        inner = self.model.model
        layers = matrix_weights(inner.prelude_layers, inner.coda_layers)
        head = supervised * matrix_weights(self.model.lm_head)
        return (layers + head) / matrix_weights(*self.layers)

    def turn_flops(self, lengths: list[int]) -> float:
        decoder = self.model.config.decoder
        heads = decoder.num_attention_heads
        width = heads * (getattr(decoder, "head_dim", None) or decoder.hidden_size // heads)
        attention = 2 * len(self.layers) * width * sum(n * n for n in lengths)
        adapter = self.model.model.adapter
        weights = matrix_weights(*self.layers, *([] if adapter is None else [adapter]))
        return 2 * weights * sum(lengths) + attention


class LoopedDecoderFamily(Family):
    title = "Looped decoder"
    model_type = "looped_decoder"
    section = LoopedDecoderSection
    packs = True
    captures = False  # layers of another library
    causal_lm = True
    code = "modeling_looped_decoder_portable"

    def describe(self, section: LoopedDecoderSection) -> str:
        return f"Looped decoder ({section.path})"

    def injects(self, section: LoopedDecoderSection) -> bool:
        return section.injection != "none"

    def turns_of(self, config: Mapping[str, Any]) -> int | None:
        return int(config.get("total_ut_steps", 4))

    def unread(self, section: LoopedDecoderSection) -> dict[str, str]:
        given = section.path != TINY_MODEL
        return dict.fromkeys(("width", "depth"), f"model.path is not {TINY_MODEL}") if given else {}

    def shape(self, section: LoopedDecoderSection) -> Shape:
        if section.path == TINY_MODEL:
            config: Mapping[str, Any] = tiny_sizes(section)
        else:
            config = checkpoint_config(section.path)
            if self.recognises(config):
                raise ConfigError(
                    f"model.path: expected a decoder, whose sizes can be told, got {section.path}, "
                    "which is looped already"
                )
        require_sizes(section.path, config, DECODER_SIZES)
        layers = len(section.layers or range(config["num_hidden_layers"]))
        block = section.block or layers - section.prelude - section.coda
        width = config["hidden_size"]
        return shape_of_config(
            config,
            layers=block,
            outside=section.prelude + section.coda,
            injection=2 * width**2 if section.injection == "adapter" else 0,
            native=False,
        )

    def skeleton(self, section: LoopedDecoderSection) -> nn.Module:
        need("transformers", "looped decoders")
        from transformers import AutoConfig, LlamaConfig

        from stars_fast.models.looped_decoder import LoopedDecoderConfig, LoopedDecoderForCausalLM

        if section.path == TINY_MODEL:
            config: Any = LlamaConfig(**tiny_sizes(section))
        else:
            config = AutoConfig.for_model(**checkpoint_config(section.path))
        loop = {name: value for name, value in section.loop.items() if name != "turns"}
        with torch.device("meta"):
            return LoopedDecoderForCausalLM(LoopedDecoderConfig(config, **loop))

    def base(self, section: LoopedDecoderSection) -> str | None:
        """A looped decoder; what is looped only when a training starts is in no folder."""
        if section.path == TINY_MODEL:
            return None
        return section.path if self.recognises(checkpoint_config(section.path)) else None

    def start(
        self, section: LoopedDecoderSection, dtype: torch.dtype, seed: int
    ) -> tuple[nn.Module, Any]:
        need("transformers", "looped decoders")
        if section.path != TINY_MODEL:
            return _start(section, dtype)
        return _start_tiny(section, dtype, derive(seed, "init") % 2**32)

    def outline(self, run: RunFolder) -> nn.Module:
        """Tables that are no weights are made with the modules, so that this takes no short way
        over the meta device."""
        need("transformers", "looped decoders")
        from transformers.initialization import no_init_weights

        from stars_fast.models.looped_decoder import LoopedDecoderConfig, LoopedDecoderForCausalLM

        config = LoopedDecoderConfig.from_pretrained(run.model)
        with no_init_weights():
            model: Any = LoopedDecoderForCausalLM(config)
        model.tie_weights()
        return model

    def load(self, path: str, dtype: torch.dtype | None) -> nn.Module:
        need("transformers", "looped decoders")
        from stars_fast.models.looped_decoder import LoopedDecoderForCausalLM

        return LoopedDecoderForCausalLM.from_pretrained(
            path, dtype="auto" if dtype is None else dtype
        )

    def loop(self, model: Any) -> LoopedDecoderLoop:
        return LoopedDecoderLoop(model)

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
        cast(model, dtype or model.config.dtype or torch.float32)
        model.save_pretrained(folder, max_shard_size=shard)

    def foreign_code(self, model: Any) -> str | None:
        """A decoder that was made known to transformers by other code than its own."""
        from stars_fast.models.looped_decoder.model import causal_class

        config = model.config.decoder
        for kind in (type(config), causal_class(config)):
            if not kind.__module__.startswith("transformers."):
                return f"{kind.__module__}.{kind.__name__}"
        return None

    def generate(self, model: Any, tokens: Tensor, turns: int, max_new_tokens: int) -> Tensor:
        return model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            turns=turns,
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )


def _start(section: LoopedDecoderSection, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    from transformers import AutoModelForCausalLM

    from stars_fast.models.looped_decoder import LoopedDecoderForCausalLM

    path = section.path
    options: dict[str, Any] = {"dtype": dtype}
    if section.attention is not None:
        options["attn_implementation"] = section.attention
    with reading(path, f"model.path {path}"):
        check_exists(path)
        config = checkpoint_config(path)
        if config.get("model_type") == LoopedDecoderFamily.model_type:
            model = LoopedDecoderForCausalLM.from_pretrained(path, **options)
            _check_same_loop(section, model.config)
        else:
            decoder = AutoModelForCausalLM.from_pretrained(path, **options)
            model = LoopedDecoderForCausalLM.from_decoder(decoder, **section.loop)
        return model, read_tokenizer(path)


def _check_same_loop(section: LoopedDecoderSection, config: Any) -> None:
    """Refuse a loop that is not the one that a looped decoder has.

    Raises:
        ConfigError: it names the first field.
    """
    default = LoopedDecoderSection()
    for name, value in section.loop.items():
        held = getattr(config, name)
        if name == "adapter_start" and config.injection == "adapter":
            held = "state" if config.adapter_keeps_state else "inputs"
        given = list(value) if isinstance(value, tuple) else value
        if value != getattr(default, name) and given != held:
            raise ConfigError(
                f"model.{name}: expected to be left out for {section.path}, which is looped with "
                f"{held}, got {given}"
            )


def tiny_sizes(section: LoopedDecoderSection) -> dict[str, Any]:
    """Sizes of the Llama that the package makes, as in a `config.json`."""
    return {
        "vocab_size": TINY_VOCABULARY,
        "hidden_size": section.width,
        "intermediate_size": 2 * section.width,
        "num_hidden_layers": section.depth,
        "num_attention_heads": 4,
    }


def _start_tiny(
    section: LoopedDecoderSection, dtype: torch.dtype, seed: int
) -> tuple[nn.Module, Any]:
    """A Llama with random weights, looped, and the package's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from stars_fast.models.looped_decoder import LoopedDecoderForCausalLM

    config = LlamaConfig(
        **tiny_sizes(section),
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=[2, 0],
        pad_token_id=0,
    )
    config._attn_implementation = section.attention
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        decoder: Any = LlamaForCausalLM(config)
    try:
        model = LoopedDecoderForCausalLM.from_decoder(cast(decoder, dtype), **section.loop)
    except ValueError as error:
        raise ConfigError(f"model: {error}") from error
    with tempfile.TemporaryDirectory() as folder, naming(folder):
        write_tokenizer(Path(folder), train_tokenizer(TINY_VOCABULARY), 512)
        return model, read_tokenizer(folder)


FAMILY = LoopedDecoderFamily()
