"The adapters against the real frameworks, where they are installed."
import math, warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from esper_nb.guard.adapters import fastai_governor, guard_accelerator, guard_trainer, lightning_governor
from esper_nb.guard.reports import GovernorConfig

CENTERS = torch.randn(10, 16, generator=torch.Generator().manual_seed(0)) * .7
QUICK = GovernorConfig(snapshot_every=20, probation=20, patience=0)

def examples(n):
    g = torch.Generator().manual_seed(1)
    y = torch.randint(0, 10, (n,), generator=g)
    return CENTERS[y] + torch.randn(n, 16, generator=g), y

def network(): return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(.1), nn.Linear(32, 10))

def poison(net): net[0].weight.data[0] = math.nan

@pytest.fixture
def pl():
    return pytest.importorskip("lightning.pytorch", reason="needs lightning")

def lightning_run(pl, tmp_path, callback, fault=None, at=(90,), batches=150, ckpt=None, callbacks=(),
                  **trainer):
    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses, self.calls = network(), [], 0
        def configure_optimizers(self):
            opt = torch.optim.AdamW(self.parameters(), lr=3e-3)
            return dict(
                optimizer=opt,
                lr_scheduler=dict(scheduler=torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, 200), interval="step"),
            )
        def training_step(self, batch, i):
            self.calls += 1
            if fault and self.calls in at: fault(self.net)
            loss = F.cross_entropy(self.net(batch[0]), batch[1]); self.losses.append(loss.item())
            return loss
    pl.seed_everything(0, verbose=False)
    model = Model()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*examples(32 * batches)), batch_size=32)
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    options = dict(max_epochs=1, accelerator="cpu", default_root_dir=str(tmp_path)) | quiet | trainer
    fit = pl.Trainer(callbacks=[*callbacks, *([callback] if callback else [])], **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit.fit(model, data, ckpt_path=ckpt)
    return model, fit

def test_lightning_goes_on_after_a_nan(pl, tmp_path):
    callback = lightning_governor(math.log(10), QUICK)
    model, _ = lightning_run(pl, tmp_path, callback, poison)
    report, = callback.governor.reports
    assert report.reason == "non-finite" and {"model", "optimizer"} <= {*report.restored} and "scheduler" in report.left
    assert all(p.isfinite().all() for p in model.parameters()) and len(model.losses) == 150
    assert sum(model.losses[-20:]) < 1.2 * sum(model.losses[60:80])

def test_lightning_healthy_run_is_untouched(pl, tmp_path):
    callback = lightning_governor(math.log(10), QUICK)
    guarded, alone = lightning_run(pl, tmp_path, callback)[0], lightning_run(pl, tmp_path, None)[0]
    assert guarded.losses == alone.losses and not callback.governor.reports

def test_lightning_stops_at_the_end_of_the_ladder(pl, tmp_path):
    callback = lightning_governor(math.log(10), QUICK.replace(rollbacks=1))
    model, fit = lightning_run(pl, tmp_path, callback, poison, at=range(90, 1000))
    assert (
        fit.should_stop
        and model.calls < 100
        and callback.governor.reports[-1].action == "stop"
        and all(p.isfinite().all() for p in model.parameters())
    )

def test_lightning_checkpoints_hold_the_governor(pl, tmp_path):
    callback = lightning_governor(math.log(10), QUICK)
    _, fit = lightning_run(pl, tmp_path, callback, batches=50)
    fit.save_checkpoint(tmp_path / "a.ckpt")
    again = lightning_governor(math.log(10), QUICK)
    lightning_run(pl, tmp_path, again, batches=50, ckpt=str(tmp_path / "a.ckpt"), max_epochs=2)
    assert int(again.governor.stats.judged[0]) == 100

class Small(nn.Module):
    def __init__(self, fault=None, at=(90,)):
        super().__init__()
        self.net, self.losses, self.fault, self.at = network(), [], fault, at
    def forward(self, x, labels):
        if self.fault and len(self.losses) in self.at: self.fault(self.net)
        logits = self.net(x); loss = F.cross_entropy(logits, labels); self.losses.append(loss.item())
        return dict(loss=loss, logits=logits)

def hf_run(tmp_path, model, governor=True, steps=150, config=QUICK, resume=None, **options):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("accelerate", reason="needs accelerate")
    transformers.logging.set_verbosity_error()
    data = [dict(x=x, labels=y) for x, y in zip(*examples(32 * 60))]
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=steps,
        per_device_train_batch_size=32,
        learning_rate=3e-3,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        use_cpu=True,
        seed=0,
        **dict(save_strategy="no") | options,
    )
    trainer = transformers.Trainer(model=model, args=args, train_dataset=data)
    callback = guard_trainer(trainer, math.log(10), config) if governor else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train(resume)
    return trainer, callback

def new(**kw):
    torch.manual_seed(0)
    return Small(**kw)

def test_hugging_face_goes_on_after_a_nan(tmp_path):
    trainer, callback = hf_run(tmp_path, model := new(fault=poison))
    report, = callback.governor.reports
    assert report.reason == "non-finite" and "model" in report.restored
    assert trainer.state.global_step == 150 and all(p.isfinite().all() for p in model.parameters())

def test_hugging_face_healthy_run_is_untouched(tmp_path):
    _, callback = hf_run(tmp_path, guarded := new(), gradient_accumulation_steps=2)
    hf_run(tmp_path, alone := new(), governor=False, gradient_accumulation_steps=2)
    assert (
        guarded.losses == alone.losses
        and not callback.governor.reports
        and int(callback.governor.stats.judged[0]) == 150
    )
    assert abs(callback.governor.stats.ring[0, 0] - sum(guarded.losses[:2]) / 2) < 1e-5, "micro-batches are one loss"

def test_hugging_face_stops_at_the_end_of_the_ladder(tmp_path):
    trainer, callback = hf_run(tmp_path, new(fault=poison, at=range(90, 1000)), config=QUICK.replace(rollbacks=1))
    assert trainer.state.global_step < 100 and callback.governor.reports[-1].action == "stop"

def test_lightning_manual_optimization(pl, tmp_path):
    class Manual(pl.LightningModule):
        def __init__(self, how):
            super().__init__()
            self.net, self.how, self.automatic_optimization, self.calls = network(), how, False, 0
        def configure_optimizers(self): return torch.optim.AdamW(self.parameters(), lr=3e-3)
        def training_step(self, batch, i):
            self.calls += 1
            if self.calls == 90: poison(self.net)
            loss, opt = F.cross_entropy(self.net(batch[0]), batch[1]), self.optimizers()
            opt.zero_grad(); self.manual_backward(loss); opt.step()
            if self.how == "logged": self.log("loss", loss)
            return {"tensor": loss, "dict": dict(loss=loss)}.get(self.how)
    for how, seen in (("tensor", 1), ("dict", 1), ("logged", 1), ("nothing", 0)):
        callback, model = lightning_governor(math.log(10), QUICK), Manual(how)
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*examples(32 * 150)), batch_size=32)
        quiet = dict(enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, logger=False)
        root = str(tmp_path)
        fit = pl.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=root, callbacks=[callback], **quiet)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit.fit(model, data)
        assert len(callback.governor.reports) == seen, how
        if seen: assert all(p.isfinite().all() for p in model.parameters())

def test_lightning_ranks_act_together(pl, tmp_path):
    from lightning.pytorch.callbacks import Callback
    class Poison(Callback):
        def on_train_batch_start(self, trainer, module, batch, i):
            if i == 40 and trainer.global_rank == 1: poison(module.net)
    class Told(Callback):
        def on_train_end(self, trainer, module):
            said = [(r.batch, r.reason, r.action) for r in callback.governor.reports]
            weights = torch.cat([p.detach().flatten() for p in module.net.parameters()])
            torch.save((said, weights), tmp_path/f"rank{trainer.global_rank}.pt")
    callback = lightning_governor(math.log(10), QUICK)
    said = [callback, Poison(), Told()]
    lightning_run(pl, tmp_path, None, batches=160, devices=2, strategy="ddp_fork", callbacks=said)
    (a, u), (b, v) = (torch.load(tmp_path/f"rank{r}.pt") for r in range(2))
    assert a == b and a[0] == (40, "non-finite", "rollback") and torch.equal(u, v)

def test_hugging_face_resumes_exactly(tmp_path):
    whole, first = hf_run(tmp_path/"a", new(), steps=120)
    hf_run(tmp_path/"b", new(), steps=120, save_strategy="steps", save_steps=60)
    assert (tmp_path/"b/checkpoint-60/governor.pt").exists()
    _, again = hf_run(tmp_path/"b", new(), steps=120, resume=str(tmp_path/"b/checkpoint-60"))
    a, b = first.governor, again.governor
    assert a.watched == b.watched == 120 and (a.stats.ring == b.stats.ring).all()
    assert a.snapshot.steps == b.snapshot.steps

def test_hugging_face_logs_what_was_done(tmp_path):
    trainer, callback = hf_run(tmp_path, new(fault=poison))
    assert [x["governor_rollback"] for x in trainer.state.log_history if "governor_rollback" in x] == [
        float(callback.governor.reports[0].batch)]

def accelerate_loop(tmp_path, start=0, stop=120, resume=None, spoil=()):
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    torch.manual_seed(0)
    net, accelerator = network(), accelerate.Accelerator(cpu=True)
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 200)
    model, opt, sched = accelerator.prepare(net, opt, sched)
    gov = guard_accelerator(accelerator, model, opt, sched, chance=math.log(10), config=QUICK)
    if resume: accelerator.load_state(str(resume))
    x, y = examples(32 * 120)
    for t in range(start, stop):
        if t in spoil: poison(net)
        loss = F.cross_entropy(model(x[32 * t:32 * t + 32]), y[32 * t:32 * t + 32])
        opt.zero_grad(); accelerator.backward(loss); opt.step(); sched.step()
        gov.watch(loss)
        if t == 59 and not resume: accelerator.save_state(str(tmp_path/"half"))
    return net, gov, sched

def test_accelerate_rolls_back_and_resumes(tmp_path):
    net, gov, sched = accelerate_loop(tmp_path, spoil=(90,))
    assert [r.batch for r in gov.reports] == [90] and all(p.isfinite().all() for p in net.parameters())
    assert "optimizer" in gov.reports[0].restored and "scheduler" in gov.reports[0].left
    again, other, _ = accelerate_loop(tmp_path, start=60, resume=tmp_path/"half", spoil=(90,))
    assert other.watched == 120 and [r.restored_step for r in other.reports] == [r.restored_step for r in gov.reports]

def test_fastai(tmp_path):
    learner = pytest.importorskip("fastai.learner", reason="needs fastai")
    data = pytest.importorskip("fastai.data.core", reason="needs fastai")
    torch.manual_seed(0)
    x, y = examples(32 * 100)
    loaders = data.DataLoaders.from_dsets(*[torch.utils.data.TensorDataset(x, y)] * 2, bs=32, device="cpu")
    class Poison(learner.Callback):
        def before_batch(self):
            if self.learn.training and self.learn.train_iter == 60: poison(self.learn.model)
    callback = fastai_governor(math.log(10), QUICK)
    learn = learner.Learner(loaders, network(), loss_func=F.cross_entropy, cbs=[Poison(), callback])
    with learn.no_logging(): learn.fit(1, 3e-3)
    assert [r.reason for r in callback.governor.reports] == ["non-finite"]
    assert all(p.isfinite().all() for p in learn.model.parameters())
