"""Huginn, depth-recurrent language models, and decoders retrofitted with its recurrence, as native
transformers models.

Importing this package registers the model with `AutoConfig` and `AutoModelForCausalLM`.
"""

from stars_fast.base.optional import need
from stars_fast.base.quiet import quiet_import

need("transformers", "Huginn models")  # before the imports below, which would not say how

with quiet_import():
    from transformers import AutoConfig, AutoModelForCausalLM

    from stars_fast.models.huginn.cache import HuginnCache
    from stars_fast.models.huginn.causal_lm import HuginnForCausalLM
    from stars_fast.models.huginn.config import HuginnConfig

__all__ = ["HuginnCache", "HuginnConfig", "HuginnForCausalLM"]

AutoConfig.register("huginn_raven", HuginnConfig, exist_ok=True)
AutoModelForCausalLM.register(HuginnConfig, HuginnForCausalLM, exist_ok=True)
