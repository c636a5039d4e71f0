"""Tiny models of each looped family of transformers, and a Llama beside them."""

import huginn_models
import ouro_models
import torch
from decoder_models import decoder
from ouro_models import tokens

from stars_fast.models.looped_decoder import LoopedDecoderForCausalLM

FAMILIES = ["ouro", "looped", "huginn"]


def make(name, dtype=torch.float64):
    """A fresh model in evaluation mode, whose state before the first turn is not drawn."""
    if name == "llama":
        return decoder("llama", dtype)
    if name == "looped":
        return LoopedDecoderForCausalLM.from_decoder(decoder("llama", dtype), turns=3)
    if name == "huginn":
        return huginn_models.model(dtype=dtype, initial_state_mode="embed-init")
    return ouro_models.model(dtype)


def ids(rows=1, length=7, seed=0):
    return tokens(rows, length, seed)


GREEDY = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def greedy(model, *args, **options):
    """Prompt and five new tokens; no token stops."""
    return model.generate(*args, **GREEDY | options)
