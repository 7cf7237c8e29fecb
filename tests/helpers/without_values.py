"""Tensors that have a shape, a type and a device, but no values: what mixes devices fails with them on a CPU, too."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten

# the first backward pass starts a thread for each GPU, which the mode below feigns, and a process with them cannot fork
torch.zeros(1, requires_grad=True).sum().backward()


class WithoutValues(FakeTensorMode):
    """Creates all tensors in its block without values; code that reads a value gets 1 or true."""

    def __deepcopy__(self, memo):
        return self  # tensors that are copied refer to it

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else args[0].dtype == torch.bool or 1
        if func is aten.equal.default:
            return True
        if func is aten._pin_memory.default:
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)


class IndexedByOperators(TorchFunctionMode):
    """Indexes by tensors through operators: torch 2.6 otherwise selects the device before, which needs a driver."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            tensor, keys, *values = args
            keys = keys if isinstance(keys, tuple) else (keys,)
            indices = [key if isinstance(key, torch.Tensor) else None for key in keys]
            if any(index is not None for index in indices):
                return aten.index_put_(tensor, indices, *values) if values else aten.index(tensor, indices)
        return func(*args, **(kwargs or {}))


def without_values(module, mode, device):
    """Replace the tensors of a module by tensors without values, on a device."""
    for part in module.modules():
        for name, value in part._parameters.items():
            if value is not None:
                new = mode.from_tensor(value).detach().to(device)
                part._parameters[name] = torch.nn.Parameter(new, value.requires_grad)
        for name, value in part._buffers.items():
            part._buffers[name] = None if value is None else mode.from_tensor(value).to(device)
    return module
