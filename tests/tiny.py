"What tests of tiny loops have in common: an update, the ways to train, and what is equal to the bit."
import numpy as np
import torch


def update(opt, loss):
    "Step on the gradient of a loss, which is returned."
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss


def fed(governor, batches, way):
    "Batches for a loop: those of the Governor where the way to train is `batches`."
    return governor.batches(batches) if governor is not None and way == "batches" else batches


def take(governor, step, batch, way):
    "Train on a batch by `run`, or by `watch` behind the step, or without a Governor."
    if governor is None: step(batch)
    elif way == "run": governor.run(step, batch)
    else: governor.watch(step(batch))


def same(a, b):
    "Whether two trees of states are equal, tensors and arrays to the bit."
    if isinstance(a, torch.Tensor): return torch.equal(a, b)
    if isinstance(a, np.ndarray): return np.array_equal(a, b)
    if isinstance(a, dict): return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)): return len(a) == len(b) and all(map(same, a, b))
    return a == b
