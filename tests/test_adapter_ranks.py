"Adapters on several processes: one rank's fault is everybody's rollback, and all states stay equal to the bit."
import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ten_classes import CHANCE, examples
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchrun import leave, start_ranks

from esper_nb.guard import GovernorConfig, guard_accelerator, guard_trainer, lightning_governor

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(),
                                                   reason="needs gloo")]
STEPS, AT, SIZE = 90, 63, 16
QUICK = GovernorConfig(snapshot_every=20, probation=20, stop_raises=False)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    def forward(self, x, labels):
        logits = self.net(x)
        return dict(loss=F.cross_entropy(logits, labels), logits=logits)

class Fault:
    "Comes on the last rank before step AT, from outside."
    def __init__(self, kind): self.kind = kind if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1 else ""
    def __call__(self, model, step):
        if step != AT or not self.kind: return
        with torch.no_grad():
            weight = next(model.parameters())
            weight = weight.to_local() if hasattr(weight, "to_local") else weight
            if self.kind == "nan": weight.view(-1)[0] = math.nan
            if self.kind == "weights": weight.mul_(300)

def split(net, mesh=None):
    "Keep a piece of every weight on each rank."
    from torch.distributed.fsdp import fully_shard
    for layer in (net.net[0], net.net[2], net): fully_shard(layer, mesh=mesh)

def lightning(folder, kind, sharded=False):
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ModelParallelStrategy
    fault = Fault(kind)
    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Net()
        def configure_model(self):
            if sharded: split(self.model, self.device_mesh["data_parallel"])
        def configure_optimizers(self): return torch.optim.AdamW(self.parameters(), 3e-3)
        def training_step(self, batch, i): return self.model(*batch)["loss"]
    class Ruin(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, i): fault(module.model, i)
    guard, module, world = lightning_governor(CHANCE, QUICK), Module(), int(os.environ["WORLD_SIZE"])
    strategy = ModelParallelStrategy(world, 1) if sharded else "ddp"
    pl.Trainer(max_steps=STEPS, accelerator="cpu", devices=world, strategy=strategy, callbacks=[Ruin(), guard],
               logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
               default_root_dir=folder).fit(module, DataLoader(TensorDataset(*examples(SIZE * STEPS * world)), SIZE))
    return module.model, guard.governor

def transformers(folder, kind):
    import transformers as hf
    hf.logging.set_verbosity_error()
    fault, model = Fault(kind), Net()
    class Ruin(hf.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs): fault(model, state.global_step)
    args = hf.TrainingArguments(output_dir=folder, max_steps=STEPS, per_device_train_batch_size=SIZE, report_to=[],
                                learning_rate=3e-3, use_cpu=True, ddp_backend="gloo", seed=0, disable_tqdm=True,
                                save_strategy="no", logging_strategy="no")
    rows = [dict(x=x, labels=y) for x, y in zip(*examples(SIZE * STEPS * int(os.environ["WORLD_SIZE"])))]
    trainer = hf.Trainer(model=model, args=args, train_dataset=rows)
    trainer.add_callback(Ruin())
    guard = guard_trainer(trainer, CHANCE, QUICK)
    trainer.train()
    return model, guard.governor

def accelerate(folder, kind, sharded=False):
    from accelerate import Accelerator
    accelerator, net, fault = Accelerator(cpu=True), Net(), Fault(kind)
    if sharded: split(net)
    opt = torch.optim.AdamW(net.parameters(), 3e-3)
    data = DataLoader(TensorDataset(*examples(SIZE * STEPS * accelerator.num_processes)), SIZE)
    model = net if sharded else accelerator.prepare(net)
    opt, data = accelerator.prepare(opt, data)
    governor = guard_accelerator(accelerator, model, opt, chance_loss=CHANCE, config=QUICK)
    def ruined():
        for step, batch in enumerate(data):
            fault(net, step)
            yield batch
    for x, y in governor.batches(ruined()):
        loss = model(x, y)["loss"]
        opt.zero_grad()
        accelerator.backward(loss)
        opt.step()
        governor.watch(loss)
    return net, governor

WAYS = {"lightning": lightning, "transformers": transformers, "accelerate": accelerate,
        "lightning sharded": lambda *a: lightning(*a, sharded=True),
        "accelerate sharded": lambda *a: accelerate(*a, sharded=True)}

def on_ranks(tmp_path, way, kind, world):
    "What every rank did, started by torchrun."
    start_ranks(__file__, world, way, kind, str(tmp_path))
    return [(json.loads((tmp_path/f"{r}.json").read_text()), torch.load(tmp_path/f"{r}.pt")) for r in range(world)]

CASES = [(way, kind, world) for way in WAYS for kind, world in (("none", 2), ("nan", 2), ("weights", 2), ("nan", 4))
         if not ("sharded" in way and world == 4)]

@pytest.mark.parametrize("way,kind,world", CASES)
def test_ranks_roll_back_alike_and_end_equal_to_the_bit(tmp_path, way, kind, world):
    pytest.importorskip(way.split()[0], reason=f"needs {way.split()[0]}")
    done = on_ranks(tmp_path, way, kind, world)
    (told, state), others = done[0], done[1:]
    for other, its_state in others:
        assert other == told
        assert all(torch.equal(a, b) for a, b in zip(state, its_state))
    assert all(t.isfinite().all() for t in state) and told["watched"] == STEPS
    if kind == "none":
        assert told["reports"] == []
        return
    if "sharded" in way and kind == "weights" and not told["reports"]: # half a layer: still watched when the run ends
        assert [AT, "wait"] in told["notes"]
        return
    assert told["reports"][0][1] == "rollback" and AT <= told["reports"][0][0] < AT + 20
    assert {cause for *_, cause in told["reports"]} <= {"external", "unknown"}

if __name__ == "__main__":
    torch.set_num_threads(1)
    name, fault_kind, out = sys.argv[1:]
    net, governor = WAYS[name](out, fault_kind)
    rank = int(os.environ["RANK"])
    whole = [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in net.parameters()]
    opt = next(o for o in governor.snapshot.objects.values() if isinstance(o, torch.optim.Optimizer))
    if not hasattr(next(net.parameters()), "full_tensor"):
        whole += [v.clone() for s in opt.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    said = [(r.batch, r.action, r.reason, r.redone, r.cause) for r in governor.reports]
    Path(out, f"{rank}.json").write_text(json.dumps(dict(
        reports=said, watched=governor.watched, notes=[(n.batch, n.action) for n in governor.notes],
        why=[r.why for r in governor.reports])))
    torch.save(whole, Path(out, f"{rank}.pt"))
    leave()
