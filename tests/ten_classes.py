"A classification in sixteen dimensions that a small network learns in a hundred steps: what adapters are tried on."
import math

import torch
from torch import nn

CHANCE = math.log(10)
CENTERS = torch.randn(10, 16, generator=torch.Generator().manual_seed(0)) * .7


def examples(
    n: int, # how many
    seed: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]: # (n, 16) inputs, (n,) classes
    "Draw examples around the center of their class."
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 10, (n,), generator=g)
    return CENTERS[y] + torch.randn(n, 16, generator=g), y


def network(
    drop: float = .1, # dropout; 0 where random streams are not kept
) -> nn.Sequential:
    "Make the network; which weights it has the caller's seed decides."
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(drop), nn.Linear(32, 10))


def same(a: nn.Module, b: nn.Module) -> bool:
    "Whether two networks have the same numbers, to the bit."
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
