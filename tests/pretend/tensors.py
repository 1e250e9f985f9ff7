"Tensors that say they are on a CUDA device, and hold their numbers in a CPU tensor."
import numpy as np
import torch

_machines = [] # the innermost is the one in use


def machine():
    "The machine in use."
    if not _machines: raise RuntimeError("a tensor of a pretended device has outlived it")
    return _machines[-1]


def leaves(x, out):
    "Tensors in nested arguments."
    if isinstance(x, torch.Tensor): out.append(x)
    elif isinstance(x, list | tuple):
        for v in x: leaves(v, out)
    elif isinstance(x, dict):
        for v in x.values(): leaves(v, out)
    return out


def hidden(place):
    "What PyTorch's core takes such a tensor's device to be: one that needs no driver, and no thread for backward."
    return torch.device("lazy", place)


def _index(i):
    "Lists in an index become tensors of the host, as in PyTorch."
    if isinstance(i, tuple): return tuple(map(_index, i))
    if isinstance(i, list | np.ndarray | range):
        i = np.asarray(i)
        return torch.from_numpy(i if i.dtype == bool else i.astype(np.int64))
    return i


class DeviceTensor(torch.Tensor):
    "Numbers of the CPU, said to be on `cuda:place`."
    @staticmethod
    def __new__(cls, numbers, place, memory):
        new = torch.Tensor._make_wrapper_subclass( # noqa: SLF001
            cls, numbers.size(), strides=numbers.stride(), storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype, layout=numbers.layout, device=hidden(place), requires_grad=False)
        new.numbers, new.place, new.memory = numbers, place, memory
        return new

    __torch_function__ = torch._C._disabled_torch_function_impl # noqa: SLF001

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None): return machine().call(func, args, kwargs or {})

    is_cuda, is_cpu = True, False
    @property
    def device(self): return machine().device_at(self.place)
    def get_device(self): return self.place
    def data_ptr(self): return self.numbers.data_ptr()
    def is_pinned(self, device=None): return False
    def untyped_storage(self): return self.numbers.untyped_storage()

    def numpy(self, *args, **kwargs):
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor "
                        "to host memory first.")
    def __array__(self, *args, **kwargs): return self.numpy()
    def tolist(self): return self.cpu().tolist()

    def __getitem__(self, i): return torch._C.TensorBase.__getitem__(self, _index(i)) # noqa: SLF001
    def __setitem__(self, i, v): torch._C.TensorBase.__setitem__(self, _index(i), v) # noqa: SLF001
    def __repr__(self): return f"{self.numbers!r} on {self.device}"
    def __format__(self, spec): return format(self.item() if self.ndim == 0 else repr(self), spec)

    def __deepcopy__(self, memo):
        if id(self) in memo: return memo[id(self)]
        if not self.is_leaf: raise RuntimeError("Only Tensors created explicitly by the user support deepcopy")
        with torch.no_grad(): new = self.detach().clone()
        parameter = isinstance(self, torch.nn.Parameter)
        memo[id(self)] = new = torch.nn.Parameter(new, self.requires_grad) if parameter else new
        return new if parameter else new.requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol): return _revived, (self.detach().cpu(), self.place, self.requires_grad)


def _revived(numbers, place, grad):
    "From a file: onto the device it came from, or to the host where there is none."
    if not _machines: return numbers.requires_grad_(grad)
    return numbers.to(machine().device_at(place)).requires_grad_(grad)
