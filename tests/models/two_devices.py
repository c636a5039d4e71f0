"""Two devices on a machine without: tensors of the CPU that pass for others, as the parts of a
model over several GPUs meet them (accelerate moves the arguments of each module to where it is)."""

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")


class TwoDevices(TorchFunctionMode):
    """Ops on tensors of both devices are errors, as on GPUs; those that belong to none, such as
    weights, go with each."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func == Tensor.device.__get__:
            return getattr(args[0], "passes_for", torch.device("cpu"))
        if func == Tensor.to:
            return self.moved(*args, **kwargs)
        wanted = kwargs.pop("device", None)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        found = {each.passes_for for each in tensors if hasattr(each, "passes_for")}
        if len(found) > 1:
            raise RuntimeError(f"{func.__name__}: expected all tensors on one device, got {found}")
        out = func(*args, **kwargs)
        place = torch.device(wanted) if wanted is not None else next(iter(found), None)
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and place is not None and place.type == "cuda":
                each.passes_for = place
        return out

    def moved(self, x, *args, **kwargs):
        device = kwargs.pop("device", None)
        for each in args:
            device = each if isinstance(each, str | torch.device) else device
            device = getattr(each, "passes_for", device) if isinstance(each, Tensor) else device
        rest = [each for each in args if not isinstance(each, str | torch.device | Tensor)]
        out = Tensor.to(x, *rest, **kwargs) if rest or kwargs else x
        device = torch.device(device) if device is not None else getattr(x, "passes_for", None)
        return out if device is None else on(out, device)


def on(x, device):
    """x as a tensor of `device`."""
    if getattr(x, "passes_for", None) == device:
        return x
    with torch._C.DisableTorchFunction():
        x = x.view_as(x)
    x.passes_for = device
    return x


def spread(model, second):
    """Put the modules whose name begins with one of `second` on the second device, others on the
    first: what they are called with goes there."""
    for name, module in model.named_modules():
        place = SECOND if name.startswith(second) else FIRST

        def move(module, args, kwargs, place=place):
            return tree_map(lambda x: on(x, place) if isinstance(x, Tensor) else x, (args, kwargs))

        module.register_forward_pre_hook(move, with_kwargs=True)
    return model
