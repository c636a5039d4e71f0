"""Tiny models of random weights, of every kind that is judged, which say digits, letters and stops
alone."""

import re

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from stars_fast.data.tiny_tokenizer import TINY_VOCABULARY, train_tokenizer, write_tokenizer
from stars_fast.models.huginn import HuginnForCausalLM
from stars_fast.models.huginn.tiny import write_tiny_huginn
from stars_fast.models.looped_decoder import LoopedDecoderForCausalLM
from stars_fast.models.ouro import OuroForCausalLM
from stars_fast.models.ouro.tiny import write_tiny_ouro

LENGTH = 512
CAP = 12


def llama(layers=2, seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=TINY_VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
        initializer_range=0.3, bos_token_id=0, eos_token_id=[2, 0], pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def speaking_plainly(model, tokenizer):
    """Of any other token the logit is half that of one of these."""
    head = model.get_output_embeddings().weight
    said = [tokenizer.decode([i]) if i < len(tokenizer) else "" for i in range(len(head))]
    plain = [0, 2, *(i for i in range(3, len(head)) if re.fullmatch("[0-9a-f]", said[i]))]
    others = [i for i in range(len(head)) if i not in plain]
    head[others] = head[[plain[i % len(plain)] for i in others]] / 2
    return model


def write_models(folder):
    """A folder for each by name: a standard model, Ouro, Huginn, a looped decoder."""
    (folder / "tokenizer").mkdir()
    write_tokenizer(folder / "tokenizer", train_tokenizer(TINY_VOCABULARY), LENGTH)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "remote_code": False}
    ouro = write_tiny_ouro(folder / "made-ouro", **sizes)
    huginn = write_tiny_huginn(folder / "made-huginn")
    models = {
        "standard": llama(),
        "ouro": OuroForCausalLM.from_pretrained(ouro),
        "huginn": HuginnForCausalLM.from_pretrained(huginn),
        "looped": LoopedDecoderForCausalLM.from_decoder(
            llama(4, seed=1), prelude=1, block=2, coda=1, injection="add"
        ),
    }
    for name, model in models.items():
        speaking_plainly(model, tokenizer).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return {name: folder / name for name in models}


CLASSES = {
    "standard": LlamaForCausalLM,
    "ouro": OuroForCausalLM,
    "huginn": HuginnForCausalLM,
    "looped": LoopedDecoderForCausalLM,
}


def answer(model, tokenizer, prompt, turns, cap=CAP):
    """The greedy answer to one prompt by itself: its text, and its tokens without a stop."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    depth = {} if turns is None else {"turns": turns}
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=cap, do_sample=False,
        eos_token_id=[2, 0], pad_token_id=0, **depth,
    )[0, ids.shape[1] :].tolist()  # fmt: skip
    tokens = made[:-1] if made[-1] in (0, 2) else made
    return tokenizer.decode(tokens), len(tokens)
