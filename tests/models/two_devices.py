"""CPU tensors that say they lie on one of two devices; ops on tensors of both fail, as on GPUs."""

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

DEVICES = torch.device("xpu:0"), torch.device("xpu:1")
_CPU = torch.device("cpu")
_OF_INDICES = frozenset("__getitem__ __setitem__ index_select gather index_copy".split())
_ON_THE_FIRST = ("embed_tokens", "wte", "stem", "early_exit_gate")


def device_of(x):
    return getattr(x, "said_device", _CPU)


def put(x, device):
    """The tensor, or those of a tuple or list, on a device."""
    if isinstance(x, (tuple, list)):
        return type(x)(put(each, device) for each in x)
    if not isinstance(x, Tensor) or device_of(x) == torch.device(device):
        return x
    x = x.detach() if isinstance(x, nn.Parameter) else x.view_as(x)
    x.said_device = torch.device(device)
    return x


class TwoDevices(TorchFunctionMode):
    """While it is on, tensors have the device that they say."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func == Tensor.device.__get__:
            return device_of(args[0])
        if func == Tensor.to or (func == torch.as_tensor and isinstance(args[0], Tensor)):
            return _moved(*args, **kwargs)
        name, device = func.__name__, kwargs.pop("device", None)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        # A number of the CPU may stand beside any, and indices of the CPU.
        free = given[1:] if name in _OF_INDICES else [x for x in given if x.dim() == 0]
        ids = {id(x) for x in free if device_of(x) == _CPU}
        devices = {device_of(x) for x in given if id(x) not in ids}
        if len(devices) > 1 and name != "__set__":
            raise RuntimeError(f"{name}: expected one device, got {sorted(map(str, devices))}")
        out = func(*args, **kwargs)
        where = torch.device(device) if device is not None else next(iter(devices), _CPU)
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and not any(x is each for each in given):
                x.said_device = where
        return out


def _moved(x, *rest, device=None, dtype=None, **options):
    for each in rest:
        if isinstance(each, torch.dtype):
            dtype = each
        elif isinstance(each, Tensor):
            device, dtype = device_of(each), each.dtype
        elif isinstance(each, (str, torch.device)):
            device = each
    out = x if dtype is None else x.to(dtype)
    if out is not x:
        out.said_device = device_of(x)
    return put(out, device_of(x) if device is None else device)


def spread(net):
    """The model as `device_map` may lay it over two devices: the first half of the layers and what
    stands before them on the first, the others and what follows on the second; each module moves
    its arguments to its own."""
    modules, whole = dict(net.named_modules()), set(net._no_split_modules)
    layers = [name for name, each in modules.items() if type(each).__name__ in whole]
    where = {name: DEVICES[2 * i >= len(layers)] for i, name in enumerate(layers)}
    for name in modules:
        around = not name or any(each.startswith(f"{name}.") for each in layers)
        if not around and not any(name == each or name.startswith(f"{each}.") for each in where):
            where[name] = DEVICES[not name.endswith(_ON_THE_FIRST)]
    skipped = set(net._skip_keys_device_placement)
    for name, device in where.items():
        held = [*modules[name].parameters(), *modules[name].buffers()]
        device = next((p.said_device for p in held if device_of(p) != _CPU), device)  # a tied one
        for p in held:
            p.said_device = device

        def move(module, args, kwargs, device=device):
            kept = {key: value for key, value in kwargs.items() if key in skipped}
            return put(args, device), {k: put(v, device) for k, v in kwargs.items()} | kept

        modules[name].register_forward_pre_hook(move, with_kwargs=True)
    return net
