"Healthy runs in the ways people train: weights, steps, log entries and checkpoints are as if nobody watched."
import logging
import math

import pytest
import torch
import torch.nn.functional as F
from ten_classes import CHANCE, examples, network, same
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from esper_nb.guard import GovernorConfig, fastai_governor, guard_accelerator, guard_trainer, lightning_governor

SIZE, BATCHES = 16, 60 # examples a batch, batches an epoch
QUICK = GovernorConfig(snapshot_every=10, probation=10, stop_raises=False)

pytestmark = pytest.mark.usefixtures("one_thread", "few_words")

class Rows(torch.utils.data.Dataset):
    "Examples as a Trainer wants them."
    def __init__(self, *tensors): self.tensors = tensors
    def __len__(self): return len(self.tensors[0])
    def __getitem__(self, i): return dict(zip(("x", "labels"), [t[i] for t in self.tensors]))

class Flow(IterableDataset):
    "The same, one after the other, shared among workers."
    def __init__(self, rows): self.rows = rows
    def __iter__(self):
        info = get_worker_info()
        for i in range(info.id if info else 0, len(self.rows), info.num_workers if info else 1): yield self.rows[i]

def data_of(way, rows): return Flow(rows) if "iterable" in way else rows
def workers_of(way): return 2 if "workers" in way else 0
def loader_of(way, rows):
    kind = DataLoader
    if "stateful" in way:
        kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    return kind(data_of(way, rows), SIZE, num_workers=workers_of(way))

class Net(nn.Module):
    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        drop = 0. if "resume" in way else .1 # Lightning and fastai keep no random streams
        self.net = network(drop)
    def forward(self, x, labels):
        logits = self.net(x)
        return dict(loss=F.cross_entropy(logits, labels), logits=logits)

class Fault:
    "One NaN from outside before step `at` of a run."
    def __init__(self, at=None): self.at, self.count = at, 0
    def __call__(self, net):
        if self.count == self.at: net.net[0].weight.data[0, 0] = math.nan
        self.count += 1

def lightning(folder, way, guarded, fault=None, resume=None, until=2 * BATCHES):
    pl = pytest.importorskip("lightning.pytorch")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Net(way)
        def configure_optimizers(self):
            opt = torch.optim.AdamW(self.parameters(), 3e-3)
            return dict(optimizer=opt, lr_scheduler=dict(
                scheduler=torch.optim.lr_scheduler.LinearLR(opt, 1., .1, 200), interval="step"))
        def training_step(self, batch, i):
            loss = self.model(*batch)["loss"]
            self.log("train", loss)
            return loss
        def validation_step(self, batch, i): self.log("val", self.model(*batch)["loss"])
    class Ruin(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, i): fault and fault(module.model)
    class Log(pl.loggers.logger.Logger):
        name = version = "log"
        def __init__(self):
            super().__init__()
            self.rows = []
        def log_hyperparams(self, *args, **kwargs): pass
        def log_metrics(self, metrics, step=None): self.rows.append((step, metrics))
    log, module = Log(), Module()
    saves = pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=30, save_top_k=-1)
    stop = [pl.callbacks.EarlyStopping("val", min_delta=10., patience=1)] if "stopping" in way else []
    guard = [lightning_governor(CHANCE, QUICK)] if guarded else []
    trainer = pl.Trainer(
        max_steps=until, max_epochs=-1, accelerator="cpu", callbacks=[Ruin(), saves, *stop, *guard], logger=log,
        log_every_n_steps=5, accumulate_grad_batches=2 if "accumulating" in way else 1,
        precision="bf16-mixed" if "bf16" in way else "32-true", enable_progress_bar=False, enable_model_summary=False)
    check = DataLoader(TensorDataset(*examples(64, 2)), 32)
    trainer.fit(module, loader_of(way, TensorDataset(*examples(SIZE * BATCHES))), check,
                ckpt_path=str(folder/f"step={resume}.ckpt") if resume else None)
    return module.model, guard and guard[0].governor, (trainer.global_step, log.rows)

def transformers(folder, way, guarded, fault=None, resume=None, until=2 * BATCHES):
    hf = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    if "stateful" in way: pytest.skip("the Trainer makes its loader itself")
    hf.logging.set_verbosity_error()
    class Ruin(hf.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs): fault and fault(model)
    model, stops, accumulate = Net(way), "stopping" in way, 2 if "accumulating" in way else 1
    args = hf.TrainingArguments(
        output_dir=str(folder), max_steps=until, per_device_train_batch_size=SIZE, learning_rate=3e-3, report_to=[],
        logging_steps=5, save_steps=30, use_cpu=True, seed=0, disable_tqdm=True, dataloader_num_workers=workers_of(way),
        gradient_accumulation_steps=accumulate, bf16="bf16" in way, eval_strategy="steps" if stops else "no",
        eval_steps=30, load_best_model_at_end=stops, metric_for_best_model="eval_loss")
    trainer = hf.Trainer(model=model, args=args, train_dataset=data_of(way, Rows(*examples(SIZE * BATCHES))),
                         eval_dataset=Rows(*examples(64, 2)))
    trainer.remove_callback(hf.PrinterCallback)
    trainer.add_callback(Ruin())
    if stops: trainer.add_callback(hf.EarlyStoppingCallback(1, 10.))
    guard = guard_trainer(trainer, CHANCE, QUICK) if guarded else None
    trainer.train(resume_from_checkpoint=str(folder/f"checkpoint-{resume}") if resume else None)
    kept = ("step", "loss", "eval_loss", "learning_rate")
    rows = [[x.get(k) for k in kept] for x in trainer.state.log_history if "loss" in x or "eval_loss" in x]
    return model, guard and guard.governor, (trainer.state.global_step, rows)

def accelerated(folder, way, guarded, fault=None, resume=None, until=2 * BATCHES):
    accelerate = pytest.importorskip("accelerate")
    if "stopping" in way: pytest.skip("a loop of one's own ends by `break`")
    accelerate.state.AcceleratorState._reset_state(True) # noqa: SLF001  # of the test before
    accelerator = accelerate.Accelerator(
        cpu=True, mixed_precision="bf16" if "bf16" in way else "no",
        gradient_accumulation_steps=2 if "accumulating" in way else 1)
    net = Net(way)
    opt = torch.optim.AdamW(net.parameters(), 3e-3)
    model, opt, data = accelerator.prepare(net, opt, loader_of(way, TensorDataset(*examples(SIZE * BATCHES))))
    governor = guard_accelerator(accelerator, model, opt, chance_loss=CHANCE, config=QUICK) if guarded else None
    step, losses = 0, []
    if resume:
        accelerator.load_state(folder/str(resume))
        step = resume
        if not guarded: accelerator._custom_objects.clear() # noqa: SLF001
    while step < until:
        rest = accelerator.skip_first_batches(data, step % BATCHES) if step % BATCHES else data
        def ruined(rest=rest):
            for batch in rest:
                if fault: fault(net)
                yield batch
        for x, y in governor.batches(ruined()) if governor else ruined():
            with accelerator.accumulate(model):
                loss = model(x, y)["loss"]
                accelerator.backward(loss)
                opt.step()
                opt.zero_grad()
            if governor is None or not governor.replaying: losses.append(loss.item())
            if governor: governor.watch(loss)
            step += 1
            if step % 30 == 0 and not (governor and governor.replaying): accelerator.save_state(folder/str(step))
            if step == until: break
    return net, governor, (step, [] if fault else losses)

def fast(folder, way, guarded, fault=None, resume=None, until=2 * BATCHES):
    fastai = pytest.importorskip("fastai.basics", reason="needs fastai", exc_type=ImportError)
    tracker = pytest.importorskip("fastai.callback.tracker", exc_type=ImportError)
    pytest.importorskip("fastai.callback.progress", exc_type=ImportError)
    if {"resume", "iterable", "accumulating", "bf16", "stateful"} & set(way.replace(",", "").split()):
        pytest.skip("fastai has its own words for this, or none")
    guard = fastai_governor(CHANCE, QUICK) if guarded else None
    rows, check = TensorDataset(*examples(SIZE * BATCHES)), TensorDataset(*examples(64, 2))
    data = fastai.DataLoaders(*[fastai.DataLoader(d, bs=SIZE, num_workers=workers_of(way)) for d in (rows, check)])
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Net(way)
        def forward(self, x): return self.model.net(x)
    stop = [tracker.EarlyStoppingCallback(min_delta=10., patience=1)] if "stopping" in way else []
    learn = fastai.Learner(data, Flat(), loss_func=F.cross_entropy, cbs=[*stop, *([guard] if guard else [])])
    torch.manual_seed(1)
    with learn.no_bar(), learn.no_logging(): learn.fit(4, 3e-3)
    return learn.model.model, guard and guard.governor, (learn.train_iter, learn.recorder.values)

TRAINERS = dict(lightning=lightning, transformers=transformers, accelerate=accelerated, fastai=fast)
WAYS = ("two workers", "iterable", "iterable, two workers", "early stopping", "accumulating", "bf16", "stateful",
        "stateful, two workers")

def names(folder): return sorted(p.name for p in folder.iterdir())

def both(trainer, tmp_path, way, **options):
    "Run alone and guarded, in folders of their own."
    folders = [tmp_path/"alone", tmp_path/"guarded"]
    for f in folders: f.mkdir(exist_ok=True)
    return [TRAINERS[trainer](f, way, g, **options) for f, g in zip(folders, (False, True))], folders

@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_healthy_run_is_as_if_nobody_watched(trainer, way, tmp_path):
    (alone, guarded), folders = both(trainer, tmp_path, way)
    assert same(alone[0], guarded[0]) and alone[2] == guarded[2]
    assert names(folders[0]) == names(folders[1]) and not guarded[1].reports
    if "stopping" in way: assert guarded[1].watched < 4 * BATCHES # it has stopped

@pytest.mark.slow
@pytest.mark.parametrize("trainer", [k for k in TRAINERS if k != "fastai"])
def test_a_run_that_goes_on_in_the_middle_of_an_epoch_is_as_if_nobody_watched(trainer, tmp_path):
    both(trainer, tmp_path, "resume", until=BATCHES + 30)
    (alone, guarded), folders = both(trainer, tmp_path, "resume", resume=30)
    assert same(alone[0], guarded[0]) and alone[2] == guarded[2] and names(folders[0]) == names(folders[1])
    assert not guarded[1].reports and guarded[1].resume.found.right, str(guarded[1].resume.found)

@pytest.mark.slow
@pytest.mark.parametrize("trainer", [k for k in TRAINERS if k != "fastai"])
def test_a_run_that_goes_on_after_a_rollback_ends_as_a_healthy_one(trainer, tmp_path):
    run, whole, ruined = TRAINERS[trainer], tmp_path/"whole", tmp_path/"ruined"
    for f in (whole, ruined): f.mkdir()
    healthy = run(whole, "resume", False)
    first = run(ruined, "resume", True, fault=Fault(50))
    assert [(r.action, r.cause) for r in first[1].reports] == [("rollback", "external")]
    again = run(ruined, "resume", True, resume=BATCHES)
    assert same(healthy[0], again[0]) and healthy[2][0] == again[2][0]
    assert again[1].resume.found.right and again[1].watched == 2 * BATCHES
