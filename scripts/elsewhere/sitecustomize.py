"""Make every Python process of a test run compute as another machine would: ELSEWHERE=CHANGE,... in the environment.

onednn=off    convolutions by torch's own kernels
seeds=K       every seed of torch's and numpy's generators is another one
rounding=K    gradients differ in their last bits, as another processor's do: equal gradients in equal ways, so that
              what is exact stays exact

Python imports a module of this name at its start where its folder is on PYTHONPATH; scripts/anywhere.py puts it there.
"""
import importlib.util
import os
import sys

CHANGES = dict(c.split("=") for c in os.environ.get("ELSEWHERE", "").split(",") if c)
ROUNDING = 2.**-22      # two units in the last place of a float32


def turn_off_onednn(torch, how):
    "Let torch compute convolutions itself."
    torch.backends.mkldnn.set_flags(how != "off")


def shift_seeds(torch, by):
    "Add to every seed."
    import numpy as np
    class Generator(torch.Generator):
        def manual_seed(self, seed): return super().manual_seed((int(seed) + 1000 * int(by)) % 2**63)
    seed_all, new = torch.manual_seed, np.random.default_rng
    torch.Generator = Generator
    torch.manual_seed = lambda seed: seed_all((int(seed) + 1000 * int(by)) % 2**63)
    def default_rng(seed=None):
        numbers = isinstance(seed, int | list | tuple | np.integer | np.ndarray)
        return new([int(by), *np.ravel(seed).tolist()] if numbers else seed)
    np.random.default_rng = default_rng


def round_gradients(torch, by):
    "Move each number of a leaf's gradient in its last bits after a backward pass; which way, its own bits decide."
    backward = torch.autograd.backward
    def leaves(tensors):
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        todo, seen = [t.grad_fn for t in tensors if t.grad_fn is not None], set()
        while todo:
            node = todo.pop()
            if node in seen: continue
            seen.add(node)
            if hasattr(node, "variable"): yield node.variable
            todo += [n for n, _ in node.next_functions if n is not None]
    def rounded(tensors, *args, **kw):
        found = [t for t in leaves(tensors) if t.dtype == torch.float32]
        backward(tensors, *args, **kw)
        with torch.no_grad():
            for g in (t.grad for t in found):
                if g is None or g.layout != torch.strided: continue
                # multiplications alone: they round alike in every kernel
                side = (g.contiguous().view(torch.int32) * (2 * int(by) + 0x9E3779B) >> 20 & 1).reshape(g.shape)
                g.mul_(1 + ROUNDING * (2 * side - 1).to(g.dtype))
    torch.autograd.backward = rounded


APPLY = dict(onednn=turn_off_onednn, seeds=shift_seeds, rounding=round_gradients)


class WhenTorchIsImported:
    "Finds torch as it would be found, and changes it once it is there."
    def find_spec(self, name, path=None, target=None):
        if name != "torch": return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None: return None
        run = spec.loader.exec_module
        def run_and_change(module):
            run(module)
            for change, how in CHANGES.items(): APPLY[change](module, how)
        spec.loader.exec_module = run_and_change
        return spec


if CHANGES: sys.meta_path.insert(0, WhenTorchIsImported())
