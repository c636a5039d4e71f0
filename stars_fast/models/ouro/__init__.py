"""Ouro, looped language models of ByteDance, as native transformers models.

Importing this package registers the model with `AutoConfig`, `AutoModel` and
`AutoModelForCausalLM`.
"""

from stars_fast.training.optional import need

need("transformers", "Ouro models")  # before the imports below, which would not say how

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM  # noqa: E402

from stars_fast.models.ouro.cache import OuroCache  # noqa: E402
from stars_fast.models.ouro.causal_lm import OuroForCausalLM  # noqa: E402
from stars_fast.models.ouro.config import OuroConfig  # noqa: E402
from stars_fast.models.ouro.exits import count_turns  # noqa: E402
from stars_fast.models.ouro.model import OuroModel  # noqa: E402

__all__ = ["OuroCache", "OuroConfig", "OuroForCausalLM", "OuroModel", "count_turns"]

AutoConfig.register("ouro", OuroConfig, exist_ok=True)
AutoModel.register(OuroConfig, OuroModel, exist_ok=True)
AutoModelForCausalLM.register(OuroConfig, OuroForCausalLM, exist_ok=True)
