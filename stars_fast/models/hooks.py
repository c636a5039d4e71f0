"""Whether something waits for the calls of modules."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as of_all

from stars_fast.dual.recognition.module_names import only_looks


def is_hooked(module: nn.Module) -> bool:
    """Whether a hook stands before or after a module or its backward: one of its own, or of all
    modules of the process (`register_module_forward_hook` and the like), so that the module is to
    be called. Names for `explain` are found by such a hook too, which does not count."""
    own = module._forward_hooks or module._forward_pre_hooks
    return bool(own or module._backward_hooks or module._backward_pre_hooks) or all_are_hooked()


def all_are_hooked() -> bool:
    """Whether a hook stands before or after all modules of the process, or their backward."""
    if of_all._global_forward_pre_hooks or of_all._global_backward_pre_hooks:
        return True
    if of_all._global_backward_hooks:
        return True
    forward = of_all._global_forward_hooks
    return bool(forward) and not all(map(only_looks, forward.values()))
