"""Ouro, looped language models of ByteDance, as native transformers models.

Importing this package registers the model with `AutoConfig`, `AutoModel` and
`AutoModelForCausalLM`.
"""

from stars_fast.base.optional import need
from stars_fast.base.quiet import quiet_import

need("transformers", "Ouro models")  # before the imports below, which would not say how

with quiet_import():
    from stars_fast.models.ouro.cache import OuroCache
    from stars_fast.models.ouro.causal_lm import OuroForCausalLM
    from stars_fast.models.ouro.config import OuroConfig
    from stars_fast.models.ouro.model import OuroModel
    from stars_fast.models.ouro.turn_count import count_turns
    from stars_fast.models.registered import register

__all__ = ["OuroCache", "OuroConfig", "OuroForCausalLM", "OuroModel", "count_turns"]

register(OuroConfig, OuroForCausalLM, OuroModel)
