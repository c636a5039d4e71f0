"""Huginn, depth-recurrent language models, and decoders retrofitted with its recurrence, as native
transformers models.

Importing this package registers the model with `AutoConfig` and `AutoModelForCausalLM`.
"""

from stars_fast.base.optional import need
from stars_fast.base.quiet import quiet_import

need("transformers", "Huginn models")  # before the imports below, which would not say how

with quiet_import():
    from stars_fast.models.huginn.cache import HuginnCache
    from stars_fast.models.huginn.causal_lm import HuginnForCausalLM
    from stars_fast.models.huginn.config import HuginnConfig
    from stars_fast.models.registered import register

__all__ = ["HuginnCache", "HuginnConfig", "HuginnForCausalLM"]

register(HuginnConfig, HuginnForCausalLM)
