"""What a Governor costs, from ten thousand to 120 million parameters, beside a plain copy of the same bytes; and which
share of a training step the gate, `watch`, `run` and its fingerprints take:

    python -m benchmarks.price_bench                  # writes nbs/explanations/bench_price.json; quiet machine, 6 GB
    python -m benchmarks.price_bench steps            # only the shares of a step, eight minutes
    python -m benchmarks.price_bench copies --device cuda    # only the copies, on a GPU, into bench_price_cuda.json
    python -m benchmarks.price_bench copies --sizes 10000 1000000

Everything is measured in one process, in turns: a plain copy, a snapshot, a restore, a step, and again. A figure is the
median of the turns. The network is a stack of linear layers under AdamW, so the state is three numbers a parameter. The
shares of a step are of the processor time of the training thread, snapshots included, on one thread.
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

from benchmarks.loops import mlp
from benchmarks.measure import machine
from esper_nb.core.devices import keep_freed_memory
from esper_nb.guard.gate import UpdateGate
from esper_nb.guard.snapshots import BackgroundCopy
from esper_nb.guard.governor import Governor
from esper_nb.guard.reports import GovernorConfig
from esper_nb.guard.writes import StateWatch, tables_of, tensors_of_parts

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
    for bank in snap.banks.memory: bank.clear()      # room for the next
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


# --- which share of a step

class SmallGPT(nn.Module):
    "A decoder of 0.8 million parameters over 64 tokens; it is only timed, so it learns to repeat them."
    def __init__(self, tokens=64, width=128, layers=4):
        super().__init__()
        self.embed, self.place = nn.Embedding(tokens, width), nn.Embedding(64, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0., batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, tokens)
        self.mask = nn.Transformer.generate_square_subsequent_mask(64)

    def forward(self, x):
        h = self.embed(x) + self.place.weight
        return self.head(self.blocks(h, mask=self.mask, is_causal=True)).flatten(0, 1)


LEARNERS = { # name: (network, inputs of a batch, classes, steps in a turn)
    "MLP, 26 thousand parameters, batches of 64": (lambda: mlp(64, 128, 128, 10), (64, 64), 10, 200),
    "MLP, 3.6 million, batches of 64": (lambda: mlp(*[600] * 11), (64, 600), 600, 50),
    "GPT, 0.8 million, 16 texts of 64 tokens": (SmallGPT, None, 64, 50),
}
SHARES = ("alone", "gate", "watch", "fingerprints", "run")


class Learner:
    "A training loop that is guarded in one of several ways."
    def __init__(self, name, way):
        make, shape, classes, _ = LEARNERS[name]
        torch.manual_seed(0)
        self.net = make()
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=1e-4)
        draw = torch.Generator().manual_seed(1)
        def batch():
            if shape is None: return (tokens := torch.randint(0, 64, (16, 64), generator=draw)), tokens.flatten()
            return torch.randn(shape, generator=draw), torch.randint(0, classes, shape[:1], generator=draw)
        self.batches, self.taken = [batch() for _ in range(16)], 0
        self.governor = Governor(self.net, self.opt, chance_loss=math.log(classes)) if way in ("watch", "run") else None
        if way == "gate": self.gate = UpdateGate(self.opt)
        parts = dict(model=self.net, optimizer=self.opt)
        self.state = StateWatch(lambda: tensors_of_parts(parts), lambda: tables_of(parts))
        self.step = getattr(self, f"{way}_step", self.train)

    def train(self, batch):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return loss.detach()

    def watch_step(self, batch): self.governor.watch(self.train(batch))

    def run_step(self, batch): self.governor.run(self.train, batch)

    def fingerprints_step(self, batch):
        self.state.start_of_step()
        self.train(batch)
        self.state.end_of_step(self.taken)

    def seconds(self, steps):
        "Of the processor, for one step, on average."
        start = time.thread_time()
        for _ in range(steps):
            self.step(self.batches[self.taken % 16])
            self.taken += 1
        return (time.thread_time() - start) / steps


def step_shares(rounds=15):
    "{network: {way: quartiles over the rounds, per cent of a step}}, and what is paid once."
    out = {}
    for name, (*_, steps) in LEARNERS.items():
        learners = {way: Learner(name, way) for way in SHARES}
        for learner in learners.values(): learner.seconds(120) # the first snapshots, and the dry replay
        found = {way: [] for way in SHARES}
        for k in range(rounds):
            order = SHARES[k % len(SHARES):] + SHARES[:k % len(SHARES)]
            now = {way: learners[way].seconds(steps) for way in order}
            for way in SHARES: found[way].append(now[way] / now["alone"] - 1 if way != "alone" else now[way])
        run = learners["run"].governor
        assert run.repairs.dry.exact and not run.reports, (run.repairs.dry, run.reports)
        out[name] = dict(step=statistics.median(found["alone"]), dry=run.repairs.dry.seconds) | {
            way: [round(100 * x, 2) for x in statistics.quantiles(found[way], n=4)] for way in SHARES[1:]}
        print(name, out[name], flush=True)
    return out


def shares_shown(shares):
    "The shares as a table in Markdown: medians, and in brackets the middle half of the rounds."
    def share(x): return f"{x[1]:.1f} ({x[0]:.1f} to {x[2]:.1f})"
    ways = ("gate", "`watch`", "fingerprints", "`run`")
    rows = [("network", "step, ms", *(f"{way}, %" for way in ways), "dry replay, ms"), ("---", *["--:"] * 6),
            *((name, f"{1e3 * r['step']:.3g}", *(share(r[w]) for w in SHARES[1:]), f"{1e3 * r['dry']:.0f}")
              for name, r in shares.items())]
    return "\n".join(f"| {' | '.join(r)} |" for r in rows)


def main():
    "Measure what was asked for, print the tables, store the figures."
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("copies", "steps", "all"), default="all")
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
    name = "bench_price.json" if device.type == "cpu" else f"bench_price_{device.type}.json"
    out = asked.out or FOLDER/name
    result = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    if asked.what in ("copies", "all"):
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        rows = [price(n, device, asked.turns) | dict(watch=watching(min(n, 10**6), device, 1000)) for n in asked.sizes]
        result |= dict(machine=machine(), gpu=gpu, threads=asked.threads, rows=rows)
        result["every"] = GovernorConfig().snapshot_every
        result["table"] = shown(result)
        print(result["table"])
    if asked.what in ("steps", "all") and device.type == "cpu":
        torch.set_num_threads(1)
        shares = step_shares()
        result |= dict(steps=dict(machine=machine(), shares=shares, table=shares_shown(shares)))
        print(result["steps"]["table"])
    out.write_text(json.dumps(result, separators=(",", ":"), ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__": main()
