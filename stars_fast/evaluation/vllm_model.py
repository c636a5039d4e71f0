"""Ouro and standard models in vLLM, through lm-eval's model of it; the turns are fixed when it is
loaded."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch

from stars_fast.base.errors import ConfigError
from stars_fast.data.chat import MESSAGE_END
from stars_fast.evaluation.kv_memory import KeyValues
from stars_fast.evaluation.recording import Key, Recording, check_room, keys_of
from stars_fast.evaluation.subjects import Subject, tokenizer_of
from stars_fast.evaluation.sweep_options import SweepOptions
from stars_fast.models.families import checkpoint_config
from stars_fast.models.portable import holds_code, register_config
from stars_fast.models.saved import ModelSource
from stars_fast.models.standard import StandardModel

VLLM_BATCH = 256
"""Prompts handed to vLLM at once by default. It makes the batches of its passes itself; but what it
was handed is kept once all of it is done, so all prompts of a task would be too many."""

GPU_SHARE = 0.9
"""Share of the GPU's memory that vLLM takes."""
RESERVE = 4 * 2**30
"""Bytes of it for activations and CUDA graphs: an estimate, ample for models of this size."""
VLLM_BLOCK = 16
"""Tokens of a block of its cache."""


class VllmModel:
    """A checkpoint, loaded anew for each number of turns.

    Raises:
        ConfigError: vLLM is not installed, a device is asked for, which vLLM chooses itself, or the
            model is of another family, a run, whose checkpoints vLLM can't read, or an adapter's
            folder.
    """

    backend = "vllm"

    def __init__(self, source: Subject, options: SweepOptions) -> None:
        if reason := why_not(source):
            raise ConfigError(reason)
        if options.device is not None:
            raise ConfigError(
                "--device: expected none with --backend vllm, which takes the first GPU of "
                f"CUDA_VISIBLE_DEVICES, got {options.device}"
            )
        if find_spec("vllm") is None:
            raise ConfigError("--backend vllm needs vllm: pip install vllm")
        self.source, self.options = source, options
        self.tokenizer = tokenizer_of(source)
        self._model: Any = None
        self._turns: int | None = None

    def at(self, turns: int | None, tol: float) -> Any:
        """As a model of lm-eval, at this depth; None for a model without turns."""
        if self._model is None or turns != self._turns:
            self.close()
            made_of = vllm_arguments(self.source, self.options, turns, _gpu_memory())
            self._model = _recording_class()(**made_of)
            self._turns = turns
        return self._model

    def key_values(self, turns: int | None) -> KeyValues | None:
        """Memory of the cache at a depth, by count; None for what is not Ouro."""
        if turns is None:
            return None
        config = checkpoint_config(self.source.path)
        token = token_bytes(config, self.options.dtype, turns)
        length = config["max_position_embeddings"]
        return KeyValues(token, token * length, length)

    def close(self) -> None:
        """Give the memory back."""
        self._model, self._turns = None, None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def why_not(source: Subject) -> str | None:
    """The reason for which vLLM can't take a model; None where it can."""
    if isinstance(source, ModelSource) and source.family.name != "ouro":
        return (
            f"--backend: expected native for {source.path}, a model of {source.family.title}: of "
            "looped models vLLM knows Ouro alone"
        )
    if isinstance(source, ModelSource) and source.step is not None:
        return (
            f"--backend vllm reads checkpoints, and {source.path} is a run: write one with "
            "stars-fast export"
        )
    if source.base is not None:
        return (
            f"--backend vllm reads whole models, and {source.path} is an adapter: write one "
            "with stars-fast export"
        )
    return None


def vllm_arguments(
    source: Subject, options: SweepOptions, turns: int | None, memory: int
) -> dict[str, Any]:
    """Arguments of lm-eval's `VLLM`; those that it does not know go on to `vllm.LLM`.

    The code of a folder is run only where it is this package's own, to the byte.

    Args:
        turns: of a looped model; None for a standard one, whose length is left to vLLM.
        memory: of the GPU, in bytes.

    Raises:
        ConfigError: the memory does not hold `options.cap` tokens of one sequence.
    """
    arguments = {
        "pretrained": source.path,
        "dtype": options.dtype or "auto",
        "batch_size": options.batch_size or VLLM_BATCH,
        "max_gen_toks": options.cap,
        "gpu_memory_utilization": GPU_SHARE,
    }
    if isinstance(source, StandardModel) or turns is None:
        return arguments
    config = checkpoint_config(source.path)
    longest = longest_sequence(config, options.dtype, turns, memory)
    if longest < min(options.cap, config["max_position_embeddings"]):
        raise ConfigError(
            f"--turns {turns}: the GPU holds keys and values of {longest} tokens, fewer than the "
            f"{options.cap} of --max-new-tokens"
        )
    code = source.family.code
    return {
        **arguments,
        "max_model_len": longest,
        "trust_remote_code": code is not None and holds_code(source.path, code),
        "hf_overrides": {"total_ut_steps": turns},
    }


def token_bytes(config: Mapping[str, Any], dtype: str | None, turns: int) -> int:
    """Bytes of the keys and values of a token: of every layer, each turn.

    Args:
        config: `config.json` of an Ouro checkpoint.
        dtype: of the cache; the checkpoint's by default.
    """
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or config["hidden_size"] // heads
    return 2 * kv_heads * head * config["num_hidden_layers"] * turns * _itemsize(config, dtype)


def _itemsize(config: Mapping[str, Any], dtype: str | None) -> int:
    name = dtype or config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return getattr(torch, name).itemsize


def longest_sequence(config: Mapping[str, Any], dtype: str | None, turns: int, memory: int) -> int:
    """Tokens whose keys and values fit beside the weights, at most those of the model.

    vLLM refuses to start where it can't hold one sequence of the model's full length, and a looped
    model keeps keys and values for every turn: of Ouro-1.4B in bf16 8 KiB a layer and turn, at 8
    turns 96 GiB for 65,536 tokens.

    Args:
        config: `config.json` of an Ouro checkpoint.
        dtype: of the weights and the cache; the checkpoint's by default.
        memory: of the GPU, in bytes.
    """
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or width // heads
    size, token = _itemsize(config, dtype), token_bytes(config, dtype, turns)
    layer = 2 * width * (heads + kv_heads) * head + 3 * width * config["intermediate_size"]
    embeddings = 1 if config.get("tie_word_embeddings") else 2
    weights = (layers * layer + embeddings * config["vocab_size"] * width) * size
    room = GPU_SHARE * memory - weights - RESERVE
    tokens = max(0, int(room / token))
    return min(config["max_position_embeddings"], tokens - tokens % VLLM_BLOCK)


def _gpu_memory() -> int:
    """Bytes of the GPU, as vLLM reads them: without starting CUDA in this process."""
    from vllm.platforms import current_platform

    return current_platform.get_device_total_memory()


def _recording_class() -> type:
    from lm_eval.models.vllm_causallms import VLLM

    register_config()

    class RecordingVLLM(Recording, VLLM):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self._measured: deque[dict[str, Any]] = deque()
            self._ends = (self.tokenizer.eos_token_id, self.tokenizer.get_vocab().get(MESSAGE_END))

        def measured(self, response: str) -> dict[str, Any]:
            """vLLM's own counts."""
            return self._measured.popleft()

        def seeded(self, options: dict[str, Any], key: Key) -> dict[str, Any]:
            """With vLLM's own seed of a request."""
            return options if self.sampling is None else {**options, "seed": key.seed}

        def tok_encode(self, string: Any, *given: Any, **options: Any) -> Any:
            """As lm-eval's; in a sweep a prompt that would lose its beginning is an error."""
            found = super().tok_encode(string, *given, **options)
            if self.journal is not None and any(keys_of(string)):
                room = self.max_length - self.max_gen_toks
                check_room(max(map(len, found)), room, self.max_length)
            return found

        def _model_generate(self, requests: Any, generate: bool = False, **options: Any) -> Any:
            """As lm-eval's; what vLLM says of each generation is noted for the journal."""
            begun = time.perf_counter()
            made = super()._model_generate(requests, generate, **options)
            if generate and self.journal is not None:
                seconds = (time.perf_counter() - begun) / len(made)
                self._measured.extend(self._measure(each.outputs[0], seconds) for each in made)
            return made

        def _measure(self, output: Any, seconds: float) -> dict[str, Any]:
            ids = output.token_ids  # with the token that stops it, which doesn't count
            ended = len(ids) > 0 and ids[-1] in self._ends
            cut = output.finish_reason == "length"
            return {"tokens": len(ids) - ended, "cut": cut, "seconds": seconds}

    return RecordingVLLM
