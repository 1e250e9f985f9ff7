"Ranks over gloo as forks of a test's process, which have imported everything."
import functools

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def fork_ranks(work, world, folder, *args, seconds=120):
    "Run `work(rank, world, tell, *args)` on each rank: what they told, but for those that ended without a word."
    told, context = mp.Manager().dict(), mp.get_context("fork")
    processes = [context.Process(target=_be, args=(work, r, world, str(folder), told, args)) for r in range(world)]
    for p in processes: p.start()
    for p in processes: p.join(seconds)
    alive = [p.pid for p in processes if p.is_alive()]
    for p in processes: p.kill()
    assert not alive, "a rank hangs"
    return [told[r] for r in range(world) if r in told]


def _be(work, rank, world, folder, told, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/met", rank=rank, world_size=world)
    work(rank, world, functools.partial(told.__setitem__, rank), *args)
    dist.barrier()
    dist.destroy_process_group()
