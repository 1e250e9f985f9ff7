"""What a Governor costs, from ten thousand to 120 million parameters, beside a plain copy of the same bytes:

    python -m benchmarks.price_bench                  # writes nbs/explanations/bench_price.json; quiet machine, 6 GB
    python -m benchmarks.price_bench --device cuda    # the same for a GPU, into bench_price_cuda.json
    python -m benchmarks.price_bench --sizes 10000 1000000

Everything is measured in one process, in turns: a plain copy, a snapshot, a restore, a step, and again. A figure is the
median of the turns. The network is a stack of linear layers under AdamW, so the state is three numbers a parameter.
"""
import argparse
import json
import logging
import math
import statistics
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.measure import machine
from esper_nb.core.devices import keep_freed_memory
from esper_nb.guard.snapshots import BackgroundCopy
from esper_nb.guard.governor import Governor
from esper_nb.guard.reports import GovernorConfig

FOLDER = Path(__file__).resolve().parents[1]/"nbs/explanations"
SIZES = (10_000, 100_000, 1_000_000, 11_000_000, 120_000_000)
STEP = .010      # seconds: the step that the overhead is compared with
LEAST = .02      # share of the step that a Governor may cost


def network(params, device):
    "Linear layers that are as wide as deep networks of that size are, with about so many parameters."
    layers = 4 if params < 10**7 else 12
    width = round(math.sqrt(params / layers))
    net = nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())]).to(device)
    return net, width


def wait(device):
    "Until the device has done what it was told."
    if device.type == "cuda": torch.cuda.synchronize(device)


def seconds(f, device):
    "Of one call, and of all that it starts."
    wait(device)
    start = time.perf_counter()
    f()
    wait(device)
    return time.perf_counter() - start


def watching(params, device, watches):
    "Seconds of one `watch`, no snapshot due: the median of some rounds."
    net, _ = network(params, device)
    rare = GovernorConfig(snapshot_every=10**9, sync_every=None)
    gov = Governor(net, torch.optim.AdamW(net.parameters()), chance_loss=math.log(10), config=rare)
    losses = [(.5 + .05 * x) for x in torch.randn(watches).tolist()]
    tensors = [torch.tensor(x, device=device) for x in losses]
    rounds = []
    for _ in range(7):
        wait(device)
        start = time.perf_counter()
        for loss in tensors: gov.watch(loss)
        rounds.append((time.perf_counter() - start) / watches)
    return statistics.median(rounds)


def price(params, device, turns):
    "All figures of one size: seconds, and bytes of host memory."
    torch.manual_seed(0)
    net, width = network(params, device)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-4)
    x = torch.randn(8 if device.type == "cpu" else 256, width, device=device)

    def step():
        opt.zero_grad()
        net(x).square().mean().backward()
        opt.step()

    step()
    both = Governor(net, opt, chance_loss=None, config=GovernorConfig())
    snap = both.snapshot
    for _ in range(2): snap.take()      # both banks are there
    state = [*net.state_dict().values(), *(v for s in opt.state.values() for v in s.values())]
    size = sum(t.nbytes for t in state)
    target = [torch.zeros_like(t, device="cpu", pin_memory=t.is_cuda) for t in state]
    late, figures = BackgroundCopy([opt]), {k: [] for k in ("copy", "take", "restore", "step", "background", "late")}

    def copy():
        for to, t in zip(target, state): to.copy_(t, non_blocking=True)

    copy()
    for _ in range(turns):
        figures["copy"].append(seconds(copy, device))
        figures["take"].append(seconds(lambda: snap.take(hold=True), device))
        snap.confirm()      # as in a run, where one snapshot is published before the next is taken
        figures["restore"].append(seconds(snap.restore, device))
        figures["step"].append(seconds(step, device))
        snap.background = late
        start = time.perf_counter()      # the pause is what it takes to begin, and by how much the step is longer
        snap.take(hold=True)
        figures["background"].append(time.perf_counter() - start)
        figures["late"].append(seconds(step, device))
        snap.find_late(wait=True)
        snap.confirm()
        snap.background = None
    out = {k: statistics.median(v) for k, v in figures.items()}
    out["background"] += max(0., out.pop("late") - out["step"])
    two, few = snap.nbytes, GovernorConfig(copies=1, probation=0)
    target.clear()
    for bank in snap.banks: bank.clear()      # room for the next
    one = Governor(net, opt, chance_loss=None, config=few).snapshot
    one.take()
    return dict(params=sum(p.numel() for p in net.parameters()), state=size, two=two, one=one.nbytes, **out)


def shown(result):
    "The figures as a table in Markdown."
    head = ("parameters", "state, MB", "`watch`, µs", "plain copy, ms", "snapshot, ms (in the background)",
            "restore, ms", "host memory, MB (with one copy)",
            f"% of a 10 ms step, a snapshot every {result['every']} steps", f"steps between snapshots for {LEAST:.0%}")

    def both(values, form=".3g"): return "{} ({})".format(*(format(v, form) for v in values))
    def row(r):
        pauses = [r["take"], r["background"]]
        shares = [100 * (r["watch"] + pause / result["every"]) / STEP for pause in pauses]
        apart = [math.ceil(pause / (LEAST * STEP - r["watch"])) for pause in pauses]
        held = [r["two"] / 1e6, r["one"] / 1e6]
        return (f"{r['params']:,}", f"{r['state'] / 1e6:,.1f}", f"{1e6 * r['watch']:.0f}", f"{1e3 * r['copy']:.3g}",
                both(1e3 * t for t in pauses), f"{1e3 * r['restore']:.3g}", both(held, ",.1f"), both(shares, ".2g"),
                both(apart, ",d"))
    rows = [head, ["--:"] * len(head), *map(row, result["rows"])]
    return "\n".join(f"| {' | '.join(r)} |" for r in rows)


def main():
    "Measure every size, print the table, store the figures."
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    logging.getLogger("esper_nb").setLevel(logging.CRITICAL)
    keep_freed_memory()
    torch.set_num_threads(asked.threads)
    device = torch.device(asked.device)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    rows = [price(n, device, asked.turns) | dict(watch=watching(min(n, 10**6), device, 1000)) for n in asked.sizes]
    result = dict(machine=machine(), gpu=gpu, threads=asked.threads, every=GovernorConfig().snapshot_every, rows=rows)
    result["table"] = shown(result)
    name = "bench_price.json" if device.type == "cpu" else f"bench_price_{device.type}.json"
    out = asked.out or FOLDER/name
    out.write_text(json.dumps(result, separators=(",", ":")) + "\n", encoding="utf-8")
    print(result["table"])


if __name__ == "__main__": main()
