"""What the package takes from torch behind an underscore: each name once, and what it has to do.

Written against torch 2.11.0, 2.13.0 and 2.14.1. A failure here means that a torch took a name away
or changed what it does, and says which files of the package rest on it.
"""

import ast
import functools
import importlib
import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

ROOT = Path(__file__).parents[1]
FOLDERS = ("stars_fast", "benchmarks", "studies")
AGAINST = "2.11.0, 2.13.0 and 2.14.1"


def is_private(name):
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def dotted(node, imported):
    """`torch.a.b` for an attribute that is reached from an import, else None."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name) and node.id in imported:
        return ".".join([imported[node.id], *reversed(parts)])
    return None


def names_in(tree):
    """Private names of torch that a module imports, reaches or has as a string."""
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                imported[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    found = [name for name in imported.values() if name.startswith("torch.") and is_private(name)]
    outer = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node not in outer:
            outer.update(part for part in ast.walk(node) if isinstance(part, ast.Attribute))
            name = dotted(node, imported)
            if name is not None and re.match(r"torch\.", name) and is_private(name):
                found.append(name)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)+", str(node.value)):
            found += [node.value] if is_private(node.value) else []
    return found


@functools.cache
def in_use():
    """Private name of torch -> files that have it."""
    files = defaultdict(set)
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for name in names_in(ast.parse(path.read_text())):
            files[name].add(path.relative_to(ROOT).as_posix())
    return files


CHECKED = set()


def rests_on(*names):
    """Mark a test as the one that holds what these private names do."""
    CHECKED.update(names)

    def wrap(test):
        @functools.wraps(test)
        def told():
            try:
                test()
            except Exception as error:
                files = sorted(set().union(*(in_use()[name] for name in names)))
                raise AssertionError(
                    f"torch {torch.__version__}: {', '.join(names)}: gone, or not what it was in "
                    f"torch {AGAINST}; {', '.join(files)} rest on it: {error!r}"
                ) from error

        return told

    return wrap


@rests_on("torch.autograd.forward_ad._set_fwd_grad_enabled")
def test_forward_mode_can_be_turned_on_inside_a_function():
    from torch.autograd import forward_ad

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            with forward_ad._set_fwd_grad_enabled(True), forward_ad.dual_level():
                y = forward_ad.make_dual(x.detach(), torch.full_like(x, 3.0)).square()
                return forward_ad.unpack_dual(y).tangent.clone()

        @staticmethod
        def backward(ctx, bar):
            return bar

    x = torch.tensor([2.0], requires_grad=True)
    assert Once.apply(x).tolist() == [12.0]


@rests_on("torch._C._functorch.peek_interpreter_stack")
def test_a_transform_around_is_on_a_stack():
    inside = []

    def look(x):
        inside.append(torch._C._functorch.peek_interpreter_stack())
        return x.sum()

    look(torch.zeros(3))
    torch.vmap(look)(torch.zeros(2, 3))
    torch.func.grad(look)(torch.zeros(3))
    assert [each is None for each in inside] == [True, False, False]


@rests_on(
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map",
    "torch.utils._pytree.tree_unflatten",
)
def test_trees_of_arguments():
    from torch.utils import _pytree

    tree = ((1, [2, {"a": 3}]), {"b": None})
    leaves, spec = _pytree.tree_flatten(tree)
    assert leaves == _pytree.tree_leaves(tree) == [1, 2, 3, None]
    assert _pytree.tree_unflatten(leaves, spec) == tree
    assert _pytree.tree_map(str, (1, [2])) == ("1", ["2"])


@rests_on("torch._ops.OpOverload", "torch._ops.OpOverloadPacket")
def test_ops_of_the_library_are_known_by_type():
    assert type(torch.ops.aten.add) is torch._ops.OpOverloadPacket
    assert type(torch.ops.aten.add.Tensor) is torch._ops.OpOverload
    assert torch.ops.aten.add._qualified_op_name == "aten::add"
    assert torch.ops.aten.add.Tensor.name() == "aten::add.Tensor"


@rests_on("torch.Tensor._make_wrapper_subclass")
def test_a_wrapper_has_a_shape_and_no_memory():
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(
                cls, inner.shape[1:], dtype=inner.dtype, device=inner.device
            )

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return "answered"

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("reached below torch functions")

    wrapper = Wrapper(torch.ones(2, 3))
    assert torch.sin(wrapper) == "answered"
    with torch._C.DisableTorchFunctionSubclass():
        assert wrapper.shape == (3,)
        assert torch.Tensor.is_leaf.__get__(wrapper) is True
        assert torch.Tensor.grad_fn.__get__(wrapper) is None


@rests_on("torch._C._nn", "torch._C._nn.linear")
def test_functional_names_are_those_of_the_bindings():
    assert torch.nn.functional.linear is torch._C._nn.linear
    assert torch.nn.functional.gelu is torch._C._nn.gelu


@rests_on("torch._C._dispatch_has_kernel_for_dispatch_key")
def test_a_kernel_is_found_by_its_key():
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    library = torch.library.Library("stars_fast_private_names", "DEF")
    library.define("one(Tensor x) -> Tensor")
    assert not has("stars_fast_private_names::one", "CPU")
    library.impl("one", lambda x: x.clone(), "CPU")
    assert has("stars_fast_private_names::one", "CPU")


@rests_on("torch._C._will_engine_execute_node")
def test_a_backward_knows_whose_gradients_are_asked_for():
    seen = []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            return x * 1

        @staticmethod
        def backward(ctx, bar):
            seen.append(torch._C._will_engine_execute_node(ctx.next_functions[1][0]))
            return bar, None

    x, weight = (torch.ones(1, requires_grad=True) for _ in range(2))
    Asks.apply(x, weight).backward()
    torch.autograd.grad(Asks.apply(x, weight), x)
    Asks.apply(x, weight).backward(inputs=[weight])
    assert seen == [True, False, True]
    try:
        torch.autograd.grad(Asks.apply(x, weight), weight)
    except RuntimeError:
        return
    raise AssertionError("a leaf that torch.autograd.grad is given was no error")


@rests_on("torch._disable_dynamo")
def test_a_function_is_kept_from_the_compiler_without_loading_it_now():
    traced = []

    @torch._disable_dynamo
    def aside(x):
        traced.append(torch.compiler.is_compiling())
        return x.sin()

    found = torch.compile(lambda x: aside(x.cos()) + 1, backend="eager")(torch.ones(2))
    assert torch.equal(found, torch.ones(2).cos().sin() + 1)
    assert traced == [False]
    with pytest.raises(Exception, match=r"aside|disable"):
        torch.compile(aside, backend="eager", fullgraph=True)(torch.ones(2))


@rests_on("torch._C._autograd._top_saved_tensors_default_hooks")
def test_who_packs_saved_tensors_is_told():
    hooks = torch._C._autograd._top_saved_tensors_default_hooks
    assert hooks(False) is None
    with torch.autograd.graph.save_on_cpu():
        assert hooks(False) is not None
    assert hooks(False) is None


@rests_on(
    "torch._C._autograd._pop_saved_tensors_default_hooks",
    "torch._C._autograd._push_saved_tensors_default_hooks",
)
def test_what_packs_saved_tensors_can_be_laid_aside():
    autograd = torch._C._autograd
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(packed.append, lambda x: x):
        hooks = autograd._top_saved_tensors_default_hooks(False)
        autograd._pop_saved_tensors_default_hooks()
        torch.ones(2, requires_grad=True).sin()
        assert not packed
        autograd._push_saved_tensors_default_hooks(*hooks)
        torch.ones(2, requires_grad=True).sin()
    assert packed


@rests_on("torch._foreach_copy_")
def test_a_list_of_tensors_is_copied_into_another_of_another_dtype():
    lows = [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)]
    torch._foreach_copy_(lows, [torch.ones(2), torch.full((3,), 2.0)])
    assert [low.tolist() for low in lows] == [[1, 1], [2, 2, 2]]


@rests_on("torch._assert_async")
def test_a_condition_is_asserted_on_the_device():
    torch._assert_async(torch.tensor(True), "mine")
    with pytest.raises(RuntimeError, match="mine"):
        torch._assert_async(torch.tensor(False), "mine")


@rests_on(
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch._get_current_dispatch_mode",
)
def test_a_dispatch_mode_sees_the_ops():
    from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    assert _get_current_dispatch_mode() is None
    with Mode() as mode:
        assert _get_current_dispatch_mode() is mode
        torch.ones(2).sin()
    assert torch.ops.aten.sin.default in seen


@rests_on("torch._dynamo.lookup_backend")
def test_a_compiler_is_found_by_name():
    assert callable(torch._dynamo.lookup_backend("inductor"))


@rests_on("torch.cuda._sleep")
def test_the_device_can_be_kept_busy():
    assert callable(torch.cuda._sleep)
    if torch.cuda.is_available():
        torch.cuda._sleep(1000)


def function_named(name):
    module, _, leaf = name.rpartition(".")
    found = getattr(importlib.import_module(module), leaf)
    assert issubclass(found, torch.autograd.Function)
    assert f"{found.__module__}.{found.__qualname__}" == name
    return found


# Names that `dual/patches.py` compares with that of a running function.


@rests_on("torch.distributed.fsdp._fully_shard._fsdp_param_group.RegisterPostBackwardFunction")
def test_fsdp_hands_its_inputs_on():
    pytest.importorskip("torch.distributed.fsdp")
    name = "torch.distributed.fsdp._fully_shard._fsdp_param_group.RegisterPostBackwardFunction"
    x, y = torch.ones(2, requires_grad=True), torch.zeros(3, requires_grad=True)
    outputs = function_named(name).apply(None, x, y)
    assert [torch.equal(a, b) for a, b in zip(outputs, (x, y), strict=True)] == [True, True]


@rests_on("torch.nn.parallel.distributed._DDPSink")
def test_ddp_hands_its_inputs_on():
    sink = function_named("torch.nn.parallel.distributed._DDPSink")
    x = torch.ones(2, requires_grad=True)
    outputs = sink.apply(lambda: SimpleNamespace(_ddp_sink_clone=False), x)
    assert torch.equal(outputs[0], x)


@rests_on("torch.nn.modules._functions.BackwardHookFunction")
def test_modules_with_backward_hooks_hand_their_inputs_through_a_function():
    from torch.nn.modules._functions import BackwardHookFunction

    x = torch.ones(3, requires_grad=True)
    (y,) = BackwardHookFunction.apply(x)
    assert torch.equal(x, y)
    assert y.grad_fn is not None


@rests_on("torch._C._len_torch_function_stack")
def test_modes_of_torch_functions_are_counted_without_the_running_one():
    from torch.overrides import TorchFunctionMode

    counts = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            counts.append(torch._C._len_torch_function_stack())
            return func(*args, **(kwargs or {}))

    assert torch._C._len_torch_function_stack() == 0
    with Mode():
        torch.ones(1)
    with Mode(), Mode():
        torch.ones(1)
    assert counts == [0, 1, 0]


@rests_on("torch._C.DisableTorchFunction")
def test_torch_functions_can_be_disabled_for_subclasses_and_modes():
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            raise AssertionError

    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError

    x = torch.ones(2).as_subclass(Loud)
    with Mode(), torch._C.DisableTorchFunction():
        assert torch.Tensor.is_leaf.__get__(x)


@rests_on(
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator_impl",
)
def test_checkpointing_prepares_a_region_by_a_global_function_that_takes_it_first():
    part, given = torch.sin, []
    names = [name for name in vars(torch.utils.checkpoint) if "without_reentrant_gen" in name]
    assert names
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            prepare = getattr(torch.utils.checkpoint, name)

            def note(fn, *args, _prepare=prepare, **kwargs):
                given.append(fn)
                return _prepare(lambda x: fn(x), *args, **kwargs)

            patch.setattr(torch.utils.checkpoint, name, note)
        x = torch.ones(2, requires_grad=True)
        torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False).sum().backward()
    assert part in given
    assert torch.allclose(x.grad, x.detach().cos())


@rests_on("torch._C.ScriptMethod", "torch._ops.HigherOrderOperator")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_and_higher_order_ops_come_as_these_classes():
    seen = []

    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return args[0]

    torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))(torch.zeros(1, 2).as_subclass(Loud))
    assert isinstance(seen[0], torch._C.ScriptMethod)
    assert isinstance(torch.ops.higher_order.cond, torch._ops.HigherOrderOperator)


@rests_on("torch._C._is_fwd_grad_enabled")
def test_forward_mode_is_off_in_functions_and_in_inference_mode():
    asked = []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            asked.append(torch._C._is_fwd_grad_enabled())
            return x.clone()

        @staticmethod
        def backward(ctx, bar):
            return bar

    apply = Asks.apply
    with torch.no_grad():
        apply(torch.ones(1))
        asked.append(torch._C._is_fwd_grad_enabled())
    with torch.inference_mode():
        asked.append(torch._C._is_fwd_grad_enabled())
        with torch.autograd.forward_ad._set_fwd_grad_enabled(True):
            asked.append(torch._C._is_fwd_grad_enabled())
            apply(torch.ones(1))
        asked.append(torch._C._is_fwd_grad_enabled())
        with torch.inference_mode(False):
            asked.append(torch._C._is_fwd_grad_enabled())
    assert asked == [False, True, False, True, False, False, True]


@rests_on("torch._C._set_throw_on_mutable_data_ptr")
def test_the_address_of_a_tensor_without_memory_can_be_refused():
    tensor = torch.ones(2)
    torch.utils.dlpack.to_dlpack(tensor)
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    with pytest.raises(RuntimeError, match="data pointer"):
        torch.utils.dlpack.to_dlpack(tensor)


@rests_on("torch.utils.checkpoint._NoopSaveInputs")
def test_checkpointing_keeps_its_inputs_by_a_function():
    if not hasattr(torch.utils.checkpoint, "_NoopSaveInputs"):  # torch 2.13 and later have none
        return
    keeper = function_named("torch.utils.checkpoint._NoopSaveInputs")
    called = []
    apply = keeper.apply

    def counted(*args):
        called.append(args)
        return apply(*args)

    keeper.apply = counted
    try:
        x = torch.ones(2, requires_grad=True)
        torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    finally:
        del keeper.apply
    assert any(arg is x for args in called for arg in args)


@rests_on("torch.nn.modules.module._global_forward_hooks_with_kwargs")
def test_a_global_hook_with_keywords_is_kept_by_its_number():
    kept = torch.nn.modules.module._global_forward_hooks_with_kwargs
    hook = torch.nn.modules.module.register_module_forward_hook(print, with_kwargs=True)
    assert kept == {hook.id: True}
    hook.remove()
    kept.pop(hook.id, None)  # torch 2.13 leaves it
    assert kept == {}


@rests_on(
    "torch.nn.modules.module._global_forward_pre_hooks",
    "torch.nn.modules.module._global_forward_hooks",
    "torch.nn.modules.module._global_backward_pre_hooks",
    "torch.nn.modules.module._global_backward_hooks",
)
def test_hooks_of_all_modules_are_kept_in_these_dictionaries():
    of_all = torch.nn.modules.module
    for kind, kept in (
        ("forward_pre", of_all._global_forward_pre_hooks),
        ("forward", of_all._global_forward_hooks),
        ("full_backward_pre", of_all._global_backward_pre_hooks),
        ("full_backward", of_all._global_backward_hooks),
    ):
        hook = getattr(of_all, f"register_module_{kind}_hook")(print)
        assert list(kept.values()) == [print]
        hook.remove()
        assert not kept


def test_function_apply_can_be_put_in_place_and_back():
    """No private name, but the one place where torch's class is changed (`dual/patches.py`)."""
    plain = torch.autograd.Function.__dict__["apply"]

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, bar):
            return 2 * bar

    seen = []

    def noted(cls, *args):
        seen.append(cls)
        return plain.__get__(None, cls)(*args)

    torch.autograd.Function.apply = classmethod(noted)
    try:
        assert Twice.apply(torch.ones(1)).item() == 2
    finally:
        torch.autograd.Function.apply = plain
    assert seen == [Twice]
    assert torch.autograd.Function.__dict__["apply"] is plain
    assert Twice.apply(torch.ones(1)).item() == 2
    assert seen == [Twice]


def test_modules_keep_their_parts_in_these_dictionaries():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert set(module._modules) == {"0", "1"}
    assert set(module[0]._parameters) == {"weight", "bias"}
    assert set(module[1]._buffers) == {"running_mean", "running_var", "num_batches_tracked"}
    for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
        assert not getattr(module, kind)
    module.register_forward_hook(print)
    module.register_forward_pre_hook(print)
    module.register_full_backward_hook(print)
    for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
        assert len(getattr(module, kind)) == 1


def test_tensors_count_changes_and_know_their_base():
    x = torch.zeros(3, requires_grad=True)
    assert not x._backward_hooks
    assert not x._post_accumulate_grad_hooks
    x.register_post_accumulate_grad_hook(print)
    assert len(x._post_accumulate_grad_hooks) == 1
    x = torch.zeros(3)
    before = x._version
    view = x[:2]
    view.add_(1)
    assert x._version > before
    assert view._base is x


# Modules and functions that only hold or name the ones above, and a logger.
BESIDE = {"torch._C", "torch._ops", "torch.utils._pytree"}


def test_every_private_name_of_torch_has_a_test_here():
    assert set(in_use()) - CHECKED - BESIDE == set(), "add a test with @rests_on(name)"
    assert CHECKED - set(in_use()) == set(), "no longer in use: drop its test"
