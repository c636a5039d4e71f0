"""Tokenizers and templates for the tests of chat data."""

from pathlib import Path

from transformers import AutoTokenizer

from stars_fast.data.tiny_tokenizer import train_tokenizer, write_tokenizer

CHATML_MARKED = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{% generation %}{{- message['content'] + '<|im_end|>' -}}{% endgeneration %}"
    "{%- else -%}{{- message['content'] + '<|im_end|>' -}}{%- endif -%}"
    "{{- '\\n' -}}"
    "{%- endfor -%}"
)
"""ChatML with transformers' own marks around what the assistant generates."""


def tokenizer_in(folder: Path, vocab_size: int = 320, texts=None):
    folder.mkdir()
    write_tokenizer(folder, train_tokenizer(vocab_size, texts), 512)
    return AutoTokenizer.from_pretrained(folder)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}
