"In every framework: a healthy run is as if nobody watched; a ruined one is explained, and ends as if nothing had been."
import math
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import ten_classes
import torch
import torch.nn.functional as F
from ten_classes import CHANCE, examples, same
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from esper_nb.guard import (
    Governor, GovernorConfig, fastai_governor, guard_accelerator, guard_trainer, guard_update, lightning_governor,
    skorch_governor)

BATCHES, AT = 120, 90
QUIET = GovernorConfig(stop_raises=False)

pytestmark = pytest.mark.usefixtures("one_thread", "few_words")

def loader(): return DataLoader(TensorDataset(*examples(32 * BATCHES)), batch_size=32)
def network():
    torch.manual_seed(0)
    return ten_classes.network()

class Fault:
    "Comes before step AT, from outside."
    def __init__(self, kind): self.kind, self.count = kind, -1
    def __call__(self, net):
        self.count += 1
        if self.count == AT and self.kind == "nan": net[0].weight.data[0, 0] = math.nan
        if self.count == AT and self.kind == "dead": net[0].weight.data.mul_(1e-3)

def lightning(tmp_path, guarded, fault, manual=False, **trainer):
    pl = pytest.importorskip("lightning.pytorch")
    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.automatic_optimization, self.seen, self.means = network(), not manual, 0, []
        def configure_optimizers(self):
            opt = torch.optim.AdamW(self.parameters(), lr=3e-3)
            return dict(optimizer=opt, lr_scheduler=dict(
                scheduler=torch.optim.lr_scheduler.LinearLR(opt, 1., .1, 200), interval="step"))
        def training_step(self, batch, i):
            self.seen += 1
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("train", loss, on_step=True, on_epoch=True)
            if manual:
                opt = self.optimizers()
                opt.zero_grad()
                self.manual_backward(loss)
                opt.step()
            return loss
    class Ruin(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, i): fault(module.net)
        def on_train_epoch_end(self, trainer, module):
            module.means.append(float(trainer.callback_metrics["train_epoch"]))
    callback = lightning_governor(CHANCE, QUIET) if guarded else None
    model = Model()
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    options = dict(max_epochs=1, accelerator="cpu", default_root_dir=str(tmp_path)) | quiet | trainer
    fit = pl.Trainer(callbacks=[Ruin(), *([callback] if callback else [])], **options)
    fit.fit(model, loader())
    return model.net, callback and callback.governor, (fit.global_step, model.seen, model.means)

def hugging_face(tmp_path, guarded, fault, accumulate=1):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    transformers.logging.set_verbosity_error()
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()
        def forward(self, x, labels):
            logits = self.net(x)
            return dict(loss=F.cross_entropy(logits, labels), logits=logits)
    class Ruin(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs): fault(model.net)
    model = Small()
    data = [dict(x=x, labels=y) for x, y in zip(*examples(32 * BATCHES))]
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=BATCHES, per_device_train_batch_size=32 // accumulate, learning_rate=3e-3,
        gradient_accumulation_steps=accumulate, report_to=[], logging_steps=10, use_cpu=True, seed=0,
        save_strategy="no", disable_tqdm=True)
    trainer = transformers.Trainer(model=model, args=args, train_dataset=data)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(Ruin())
    guard = guard_trainer(trainer, CHANCE, QUIET) if guarded else None
    trainer.train()
    logged = [(x["step"], x["loss"], x["learning_rate"]) for x in trainer.state.log_history if "loss" in x]
    return model.net, guard and guard.governor, (trainer.state.global_step, [] if fault.kind else logged)

def trl(tmp_path, guarded, fault):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    transformers.logging.set_verbosity_error()
    letters = {k: i for i, k in enumerate(["<p>", "<e>", "<u>"])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, "<u>"))
    reader = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<p>", eos_token="<e>", unk_token="<u>")
    torch.manual_seed(0)
    shape = dict(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        **shape, bos_token_id=1, eos_token_id=1, pad_token_id=0))
    class Ruin(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs): fault([model.transformer.h[0].mlp.c_fc])
    start = torch.randint(29, (8 * BATCHES,), generator=torch.Generator().manual_seed(1))
    rows = [[3 + (int(a) * 3**k + k) % 29 for k in range(12)] for a in start]
    table = datasets.table.InMemoryTable.from_pydict(dict(input_ids=rows))
    args = trl.SFTConfig(
        output_dir=str(tmp_path), max_steps=BATCHES, per_device_train_batch_size=8, learning_rate=3e-3, report_to=[],
        logging_steps=10, use_cpu=True, seed=0, save_strategy="no", disable_tqdm=True, bf16=False,
        dataset_kwargs=dict(skip_prepare_dataset=True))
    trainer = trl.SFTTrainer(model=model, args=args, processing_class=reader,
                             train_dataset=datasets.Dataset(table, fingerprint="rows"))
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(Ruin())
    guard = guard_trainer(trainer, math.log(32), QUIET) if guarded else None
    trainer.train()
    kept = ("loss", "entropy", "mean_token_accuracy", "num_tokens")
    logged = [[x[k] for k in kept] for x in trainer.state.log_history if "loss" in x]
    return model, guard and guard.governor, (trainer.state.global_step, [] if fault.kind else logged)

def accelerated(tmp_path, guarded, fault):
    accelerate = pytest.importorskip("accelerate")
    net, accelerator = network(), accelerate.Accelerator(cpu=True)
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    clock = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 200)
    model, opt, clock, data = accelerator.prepare(net, opt, clock, loader())
    governor = guard_accelerator(accelerator, model, opt, clock, chance_loss=CHANCE, config=QUIET) if guarded else None
    def ruined():
        for batch in data:
            fault(net)
            yield batch
    count = 0
    for x, y in governor.batches(ruined()) if governor else ruined():
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.)
        opt.step()
        clock.step()
        count += 1
        if governor: governor.watch(loss)
    return net, governor, (count, clock.get_last_lr())

def fast(tmp_path, guarded, fault, wrapped=False):
    fastai = pytest.importorskip("fastai.basics", reason="needs fastai", exc_type=ImportError)
    for name in ("progress", "schedule"): pytest.importorskip(f"fastai.callback.{name}", exc_type=ImportError)
    class Ruin(fastai.Callback):
        def before_batch(self):
            if self.training and not (guarded and guard.governor and guard.governor.replaying): fault(self.model)
    guard = fastai_governor(CHANCE, QUIET) if guarded else None
    data = fastai.DataLoaders(fastai.DataLoader(TensorDataset(*examples(32 * BATCHES)), bs=32), fastai.DataLoader(
        TensorDataset(*[t[:64] for t in examples(32 * BATCHES)]), bs=32))
    options = dict(opt_func=fastai.partial(fastai.OptimWrapper, opt=torch.optim.AdamW)) if wrapped else {}
    learn = fastai.Learner(data, network(), loss_func=F.cross_entropy, cbs=[Ruin(), *([guard] if guard else [])],
                           path=tmp_path, **options)
    torch.manual_seed(1)
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(1, 3e-3)
    seen = learn.train_iter, len(learn.recorder.lrs), learn.opt.hypers[-1]["lr"]
    return learn.model, guard and guard.governor, seen

def sk(tmp_path, guarded, fault):
    skorch = pytest.importorskip("skorch")
    class Ruin(skorch.callbacks.Callback):
        def on_batch_begin(self, net, training=False, **kwargs):
            if training: fault(net.module_)
    guard = skorch_governor(CHANCE, QUIET) if guarded else None
    net = skorch.NeuralNet(network(), nn.CrossEntropyLoss, optimizer=torch.optim.AdamW, lr=3e-3, max_epochs=1,
                           batch_size=32, train_split=None, verbose=0,
                           callbacks=[("ruin", Ruin()), *([("guard", guard)] if guard else [])])
    torch.manual_seed(1)
    net.fit(*[t.numpy() for t in examples(32 * BATCHES)])
    return net.module_, guard and guard.governor, (len(net.history[-1]["batches"]),)

def ignite(tmp_path, guarded, fault):
    engine = pytest.importorskip("ignite.engine")
    net = network()
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    def update(engine, batch):
        net.train()
        loss = F.cross_entropy(net(batch[0]), batch[1])
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()
    guard = guard_update(update, net, opt, chance_loss=CHANCE, config=QUIET) if guarded else None
    trainer = engine.Engine(guard or update)
    trainer.add_event_handler(engine.Events.ITERATION_STARTED, lambda: fault(net))
    trainer.run(loader(), max_epochs=1)
    return net, guard and guard.governor, (trainer.state.iteration,)

LOOPS = {
    "lightning": lightning, "lightning by hand": lambda *a: lightning(*a, manual=True),
    "lightning clipped": lambda *a: lightning(*a, gradient_clip_val=.5),
    "lightning accumulating": lambda *a: lightning(*a, accumulate_grad_batches=2),
    "lightning bf16": lambda *a: lightning(*a, precision="bf16-mixed"),
    "trainer": hugging_face, "trainer accumulating": lambda *a: hugging_face(*a, accumulate=2),
    "trl": trl, "accelerate": accelerated, "fastai": fast, "fastai around torch": lambda *a: fast(*a, wrapped=True),
    "skorch": sk, "ignite": ignite}

@cache
def alone(name):
    "What a framework does with nobody watching."
    with TemporaryDirectory() as folder: return LOOPS[name](Path(folder), False, Fault(None))

SLOW = {name for name in LOOPS if " " in name}
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in LOOPS]

@pytest.mark.parametrize("name", NAMES)
def test_a_healthy_run_is_as_if_nobody_watched(name, tmp_path):
    guarded = LOOPS[name](tmp_path, True, Fault(None))
    assert guarded[1].repairs.dry.exact, guarded[1].repairs.dry.why
    assert same(alone(name)[0], guarded[0]) and alone(name)[2] == guarded[2]
    assert guarded[1].watched == BATCHES and not guarded[1].reports
    if name != "accelerate": assert guarded[1].explain().cause == "healthy" # after the end, too, steps repeat exactly

@pytest.mark.parametrize("kind", ["nan", "dead"])
@pytest.mark.parametrize("name", NAMES)
def test_a_ruined_run_ends_as_if_nothing_had_happened(name, kind, tmp_path):
    guarded = LOOPS[name](tmp_path, True, Fault(kind))
    governor: Governor = guarded[1]
    assert [(r.action, r.cause) for r in governor.reports] == [("rollback", "external")], [*map(str, governor.reports)]
    assert governor.reports[0].redone and governor.watched == BATCHES
    assert same(alone(name)[0], guarded[0])
    assert alone(name)[2][:1] == guarded[2][:1] # global steps
    if name not in ("accelerate",): assert governor.explain().cause == "external"
