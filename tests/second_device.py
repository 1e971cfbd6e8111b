"""A second device, "cuda": a GPU where there is one; else simulated, in the CPU's memory, and mixing the two fails as on a GPU.

PyTorch's own FakeTensor cannot go backward on "cuda" where PyTorch was built without it, and has no values to choose positions
by. Here every value is computed, so that results can be compared bit by bit with those of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from accelerate.state import AcceleratorState, PartialState
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from transformers import TrainingArguments

CPU, SECOND = torch.device("cpu"), torch.device("cuda", 0)
MOVES = {"_to_copy", "copy_", "_copy_from"}
"""Operations that take tensors of any devices."""
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
"""Operations whose indices may be on the CPU, whatever they index."""


REAL = torch.cuda.is_available()
"""Whether the second device is a GPU."""


def is_second(tensor: Tensor) -> bool:
    """Whether a tensor is on the second device; a mark on a simulated one's storage says so, which views share."""
    return tensor.is_cuda if REAL else getattr(tensor.untyped_storage(), "second", False)


def _mark(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().second = True
    return tensor


def tensors_in(*trees: object) -> list[Tensor]:
    """The tensors of nested arguments; those of the meta device, which have no values, are left out."""
    leaves, _ = tree_flatten(trees)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.device.type != "meta"]


def _is_second_name(device: object) -> bool:
    return device is not None and torch.device(device).type == "cuda"


class _Operations(TorchDispatchMode):
    """Checks the devices of every operation below autograd, and marks its results."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        lands = _lands(name, args, kwargs)
        if name not in MOVES:
            _require_same(func, tensors_in(args, kwargs), args[0] if name in INDEXING else None)
        if _is_second_name(kwargs.get("device")):
            kwargs["device"] = CPU
        result = func(*args, **kwargs)
        if name == "copy_" or not lands:
            return result
        return tree_map(lambda leaf: _mark(leaf) if isinstance(leaf, Tensor) else leaf, result)


def _lands(name: str, args: tuple, kwargs: dict) -> bool:
    """Whether the result of an operation is on the second device."""
    asked = kwargs.get("device")
    # new_zeros and zeros_like are always asked for with their tensor's device, which in C++ is the CPU
    if asked is not None and not name.startswith("new_") and not name.endswith("_like"):
        return _is_second_name(asked)
    return any(map(is_second, tensors_in(args[0]) if name in INDEXING else tensors_in(args, kwargs)))


def _require_same(func: object, given: list[Tensor], indexed: Tensor | None) -> None:
    """Raise RuntimeError for tensors of both devices. Single numbers may be on the CPU, and so may indices of `indexed`."""
    there = is_second(indexed) if indexed is not None else any(map(is_second, given))
    if there:
        strays = [
            tensor for tensor in given if not is_second(tensor) and tensor.ndim and (indexed is None or tensor is indexed)
        ]
    else:
        strays = [tensor for tensor in given if is_second(tensor)]
    if strays:
        shapes = ", ".join(f"{tuple(tensor.shape)} on {'cuda' if is_second(tensor) else 'cpu'}" for tensor in given)
        raise RuntimeError(f"Expected all tensors to be on the same device: {func} of {shapes}")


class _Attributes(TorchFunctionMode):
    """What a tensor of the second device says of itself above autograd."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == Tensor.device.__get__ and is_second(args[0]):
            return SECOND
        if func == Tensor.is_cuda.__get__:
            return is_second(args[0])
        if func in (Tensor.numpy, Tensor.__array__) and is_second(args[0]):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")
        kwargs = kwargs or {}
        if (generator := kwargs.get("generator")) is not None:
            on = [_is_second_name(kwargs["device"])] if "device" in kwargs else [*map(is_second, tensors_in(args))] or [False]
            if generator.second not in on:
                raise RuntimeError(f"{func}: the generator is on another device")
        if func in (torch.tensor, torch.as_tensor) and _is_second_name(kwargs.get("device")):
            return func(*args, **{**kwargs, "device": CPU}).to(SECOND)
        if func == Tensor.cpu and is_second(args[0]):
            return _to_cpu(args[0])
        if func == Tensor.to:
            return _to(func, *args, **kwargs)
        return func(*args, **kwargs)


def _to(to: Callable, tensor: Tensor, *args, **kwargs) -> Tensor:
    """`Tensor.to`, which in C++ takes every tensor for one on the CPU."""
    like = args[0] if args else kwargs.get("other")
    if isinstance(like, Tensor):
        return _to(to, tensor, SECOND if is_second(like) else CPU, like.dtype)  # modes do not apply within a mode
    device = kwargs.get("device") or next((one for one in args if isinstance(one, str | torch.device | int)), None)
    if not is_second(tensor) or device is None:
        return to(tensor, *args, **kwargs)
    if _is_second_name(device):
        dtype = kwargs.get("dtype") or next((one for one in args if isinstance(one, torch.dtype)), None)
        return tensor if dtype is None else to(tensor, dtype)
    return to(_to_cpu(tensor), *args, **kwargs)


def _to_cpu(tensor: Tensor) -> Tensor:
    return torch.ops.aten._to_copy(tensor, device=CPU)


class _Generator(torch.Generator):
    """Random numbers of one of the devices; its numbers are those of the CPU."""

    def __new__(cls, device: object = "cpu"):
        made = super().__new__(cls)
        made.second = _is_second_name(device)
        return made


def _modules_to(parse: Callable) -> Callable:
    """What reads the arguments of `Module.to`, for which in C++ every tensor is on the CPU."""

    def parsed(*args, **kwargs) -> tuple:
        like = args[0] if args else None
        return parse(SECOND if is_second(like) else CPU, like.dtype) if isinstance(like, Tensor) else parse(*args, **kwargs)

    return parsed


def _train_on_it(initialize: Callable) -> Callable:
    """The initialization of accelerate's state, after which that is the device."""

    def on_second(state: PartialState, *args, **kwargs) -> None:
        initialize(state, *args, **kwargs)
        state.device = SECOND

    return on_second


@contextmanager
def second_device() -> Iterator[torch.device]:
    """Context in which there is a device "cuda", and training, outputs and scores are computed on it."""
    patches = [
        mock.patch.object(TrainingArguments, "device", property(lambda settings: settings._setup_devices and SECOND)),
        mock.patch.object(PartialState, "__init__", _train_on_it(PartialState.__init__)),
        mock.patch("compressor.accelerator.gpu", lambda: SECOND),
    ]
    simulated = [
        mock.patch("torch.cuda._lazy_init"),
        mock.patch("torch.Generator", _Generator),
        mock.patch("torch._C._nn._parse_to", _modules_to(torch._C._nn._parse_to)),
        _Attributes(),
        _Operations(),
    ]
    with ExitStack() as stack:
        stack.callback(AcceleratorState._reset_state, reset_partial_state=True)
        AcceleratorState._reset_state(reset_partial_state=True)
        for context in (*patches, *([] if REAL else simulated)):
            stack.enter_context(context)
        yield SECOND
