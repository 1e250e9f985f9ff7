"What tests of tiny loops have in common: an update, the ways to train, and what is equal to the bit."
import numpy as np
import torch

from esper_nb.record import encode_row


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
    "Whether two trees are equal to the bit, the kinds of their numbers too; NaN equals NaN."
    if isinstance(a, torch.Tensor): return a.dtype == b.dtype and torch.equal(a.nan_to_num(7.25), b.nan_to_num(7.25))
    if isinstance(a, np.ndarray) and a.dtype == object: return same(a.tolist(), b.tolist())
    if isinstance(a, np.ndarray): return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if isinstance(a, dict): return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple): return len(a) == len(b) and all(map(same, a, b))
    return a == b or a != a and b != b


def timeless(rows):
    "Rows without the clock, as text: there NaN is equal to itself."
    return [encode_row({k: v for k, v in r.items() if not k.endswith(("seconds", "_per_s"))}) for r in rows]
