"""Any decoder of transformers as a looped model: its layers as prelude, repeated block and coda.

Importing this package registers the model with `AutoConfig`, `AutoModel` and
`AutoModelForCausalLM`.
"""

from stars_fast.base.optional import need
from stars_fast.base.quiet import quiet_import

need("transformers", "looped decoders")  # before the imports below, which would not say how

with quiet_import():
    from stars_fast.models.looped_decoder.cache import LoopedDecoderCache
    from stars_fast.models.looped_decoder.causal_lm import LoopedDecoderForCausalLM
    from stars_fast.models.looped_decoder.config import LoopedDecoderConfig
    from stars_fast.models.looped_decoder.model import LoopedDecoderModel
    from stars_fast.models.ouro.turn_count import count_turns
    from stars_fast.models.registered import register

__all__ = [
    "LoopedDecoderCache",
    "LoopedDecoderConfig",
    "LoopedDecoderForCausalLM",
    "LoopedDecoderModel",
    "count_turns",
]

register(LoopedDecoderConfig, LoopedDecoderForCausalLM, LoopedDecoderModel)
