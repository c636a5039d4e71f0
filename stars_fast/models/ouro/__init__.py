"""Ouro, looped language models of ByteDance, as native transformers models.

Importing this package registers the model with `AutoConfig`, `AutoModel` and
`AutoModelForCausalLM`.
"""

from stars_fast.base.optional import need
from stars_fast.base.quiet import quiet_import

need("transformers", "Ouro models")  # before the imports below, which would not say how

with quiet_import():
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from stars_fast.models.ouro.cache import OuroCache
    from stars_fast.models.ouro.causal_lm import OuroForCausalLM
    from stars_fast.models.ouro.config import OuroConfig
    from stars_fast.models.ouro.model import OuroModel
    from stars_fast.models.ouro.turn_count import count_turns

__all__ = ["OuroCache", "OuroConfig", "OuroForCausalLM", "OuroModel", "count_turns"]

AutoConfig.register("ouro", OuroConfig, exist_ok=True)
AutoModel.register(OuroConfig, OuroModel, exist_ok=True)
AutoModelForCausalLM.register(OuroConfig, OuroForCausalLM, exist_ok=True)
