"""Tensors that have a shape, a type and a device, but no values: what mixes devices fails with them on a CPU, too."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

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
        return super().__torch_dispatch__(func, types, args, kwargs)


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
