"The adapters against the real frameworks, where they are installed."
import copy, io, math, os, pickle, sys, types, warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from ten_classes import CHANCE, examples, network
from torch import nn
from torchrun import leave, start_ranks

from esper_nb.guard import (
    Governor, GovernorConfig, bar_note, fastai_governor, guard_accelerator, guard_trainer, lightning_governor,
    guard_update, skorch_governor)

QUICK = GovernorConfig(snapshot_every=20, probation=20, patience=0)

def poison(net): net[0].weight.data[0] = math.nan

@pytest.mark.parametrize("module, package, adapter", [
    ("lightning.pytorch", "lightning", lightning_governor), ("fastai.callback.core", "fastai", fastai_governor),
    ("skorch.callbacks", "skorch", skorch_governor)], ids=lambda x: x if isinstance(x, str) else "")
def test_a_framework_that_is_missing_is_named_with_what_installs_it(monkeypatch, module, package, adapter):
    for name in (module, "pytorch_lightning"): monkeypatch.setitem(sys.modules, name, None)
    said = f"{module} is not installed; install it with `pip install {package}`"
    with pytest.raises(RuntimeError, match=said): adapter(chance_loss=None)

@pytest.fixture
def pl():
    return pytest.importorskip("lightning.pytorch", reason="needs lightning")

def lightning_run(pl, tmp_path, callback, fault=None, at=(90,), batches=150, ckpt=None, callbacks=(), # noqa: PLR0913
                  drop=.1, **trainer):
    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses, self.calls = network(drop), [], 0
        def configure_optimizers(self):
            opt = torch.optim.AdamW(self.parameters(), lr=3e-3)
            return dict(
                optimizer=opt,
                lr_scheduler=dict(scheduler=torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, 200), interval="step"),
            )
        def training_step(self, batch, i):
            self.calls += 1
            loss = F.cross_entropy(self.net(batch[0]), batch[1]); self.losses.append(loss.item())
            return loss
    class Faults(pl.Callback): # outside of the step: a replay does not meet them
        calls = 0
        def on_train_batch_start(self, trainer, module, batch, i):
            self.calls += 1
            if fault and self.calls in at: fault(module.net)
    pl.seed_everything(0, verbose=False)
    model = Model()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*examples(32 * batches)), batch_size=32)
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    options = dict(max_epochs=1, accelerator="cpu", default_root_dir=str(tmp_path)) | quiet | trainer
    fit = pl.Trainer(callbacks=[Faults(), *callbacks, *([callback] if callback else [])], **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit.fit(model, data, ckpt_path=ckpt)
    return model, fit

def test_a_lightning_callback_is_copied_and_pickled(pl, tmp_path):
    "A library that saves its model with all that it was made with could not: the class could not be pickled."
    guard = lightning_governor(CHANCE, "epoch", metric="train_loss")
    lightning_run(pl, tmp_path, guard, batches=3)
    for clone in (copy.deepcopy(guard), pickle.loads(pickle.dumps(guard))):
        assert guard.governor is not None and clone.governor is None
        lightning_run(pl, tmp_path, clone, batches=3)
        assert clone.governor is not guard.governor and clone.governor.watched == 3
        assert clone.governor.chance_loss == guard.governor.chance_loss
        assert clone.governor.config == guard.governor.config

def test_lightning_has_two_names(monkeypatch):
    "What is built on it mostly needs `pytorch_lightning`, so that the other one is not there."
    there = types.ModuleType("pytorch_lightning")
    there.Callback = type("Callback", (), {})
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", there)
    assert isinstance(lightning_governor(CHANCE), there.Callback)

@pytest.mark.slow
def test_lightning_stops_at_the_end_of_the_budget(pl, tmp_path):
    callback = lightning_governor(CHANCE, QUICK.replace(rollbacks=1))
    model, fit = lightning_run(pl, tmp_path, callback, poison, at=range(90, 1000))
    assert (fit.should_stop and model.calls < 100 and callback.governor.reports[-1].action == "stop"
            and all(p.isfinite().all() for p in model.parameters()))

def test_a_resume_in_lightning_does_not_warn_of_streams_that_its_checkpoints_never_hold(pl, tmp_path, caplog):
    _, fit = lightning_run(pl, tmp_path, lightning_governor(CHANCE, QUICK), batches=30)
    fit.save_checkpoint(tmp_path/"a.ckpt")
    again = lightning_governor(CHANCE, QUICK)
    lightning_run(pl, tmp_path, again, batches=30, ckpt=str(tmp_path/"a.ckpt"), max_epochs=2) # dropout draws anew
    found = again.governor.resume.found
    assert found.right and "random stream of torch, which Lightning does not keep" in found.unchecked
    assert not [r for r in caplog.records if "resumed, but" in r.getMessage()]

def test_lightning_resumes_exactly(pl, tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint
    keep = dict(batches=60, drop=0., max_epochs=3, enable_checkpointing=True)
    whole = lightning_governor(CHANCE, QUICK)
    every = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    model, _ = lightning_run(pl, tmp_path, whole, callbacks=[every], **keep)
    again = lightning_governor(CHANCE, QUICK)
    ckpt = str(tmp_path/"epoch=0.ckpt")
    resumed, _ = lightning_run(pl, tmp_path, again, ckpt=ckpt, **keep | dict(enable_checkpointing=False))
    assert model.losses[60:] == resumed.losses
    a, b = whole.governor, again.governor
    assert a.watched == b.watched == 180 and (a.stats.ring == b.stats.ring).all()
    assert a.snapshot.steps == b.snapshot.steps

class Lines(io.StringIO):
    "What a progress bar writes."
    def said(self): return self.getvalue().replace("\r", "\n")

def test_a_bar_says_what_was_done():
    from tqdm import tqdm
    for title, shown in (("train", "train, Governor: non-finite -> rollback at batch 30"),
                         (None, "Governor: non-finite -> rollback at batch 30")):
        out = Lines()
        bar = tqdm(range(60), desc=title, file=out, ncols=120, mininterval=0)
        gov = Governor(network(), chance_loss=None, config=QUICK, callbacks=[bar_note(bar)])
        for t in bar: gov.watch(math.nan if t == 30 else 1.)
        assert "Governor" not in out.said().split("29/60")[0] and bar.desc == f"{shown}: "
        assert shown in out.said().splitlines()[-1], "it stays there"

def test_bars_of_healthy_runs_say_nothing():
    from tqdm import tqdm
    bar = tqdm(range(60), desc="train", file=Lines())
    gov = Governor(network(), chance_loss=None, config=QUICK, callbacks=[bar_note(bar)])
    for _ in bar: gov.watch(1.)
    assert bar.desc in ("train", "train: ")

@pytest.mark.slow
def test_the_bar_of_lightning_says_what_was_done(pl, tmp_path, capsys):
    from lightning.pytorch.callbacks import TQDMProgressBar
    callback = lightning_governor(CHANCE, QUICK)
    lightning_run(pl, tmp_path, callback, poison, callbacks=[TQDMProgressBar()], enable_progress_bar=True)
    shown = capsys.readouterr()
    assert f"governor_rollback={float(callback.governor.reports[0].batch)}" in shown.out + shown.err

class Small(nn.Module):
    def __init__(self, fault=None, at=(90,), drawn=None): # an iterator: no step can be repeated
        super().__init__()
        self.net, self.losses, self.fault, self.at, self.drawn = network(), [], fault, at, drawn
    def forward(self, x, labels):
        if self.drawn: next(self.drawn)
        logits = self.net(x); loss = F.cross_entropy(logits, labels); self.losses.append(loss.item())
        return dict(loss=loss, logits=logits)

def faults_of(transformers, model):
    "Ruins a model before some steps: outside of them, so a replay does not meet that."
    class Faults(transformers.TrainerCallback):
        calls = -1
        def on_step_begin(self, args, state, control, **kwargs):
            self.calls += 1
            if model.fault and self.calls in model.at: model.fault(model.net)
    return Faults()

def hf_run(tmp_path, model, governor=True, steps=150, config=QUICK, resume=None, **options):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("accelerate", reason="needs accelerate")
    transformers.logging.set_verbosity_error()
    data = [dict(x=x, labels=y) for x, y in zip(*examples(32 * 60))]
    args = transformers.TrainingArguments(output_dir=str(tmp_path), max_steps=steps, per_device_train_batch_size=32,
                                          learning_rate=3e-3, report_to=[], logging_strategy="no", use_cpu=True, seed=0,
                                          **dict(save_strategy="no", disable_tqdm=True) | options)
    trainer = transformers.Trainer(model=model, args=args, train_dataset=data)
    trainer.add_callback(faults_of(transformers, model))
    callback = guard_trainer(trainer, CHANCE, config) if governor else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train(resume)
    return trainer, callback

def new(**kw):
    torch.manual_seed(0)
    return Small(**kw)

def corrupt(net):
    with torch.no_grad(): net[0].weight.copy_(2 * torch.randn(32, 16, generator=torch.Generator().manual_seed(2)))

def check_validations(seen):
    "Weights that were validated while old ones were in place for a comparison: the live ones, which wait."
    waiting = [weight for comparing, weight in seen if comparing]
    assert len(waiting) > 1 and all(torch.equal(waiting[0], w) for w in waiting)
    assert not torch.equal(seen[0][1], seen[1][1]), "the others were trained on the way"

def validated_fit(pl, tmp_path, model, callback, **trainer):
    "Fit a Lightning module with a data set to validate on."
    sets = [torch.utils.data.TensorDataset(*examples(n)) for n in (4800, 32)]
    data = [torch.utils.data.DataLoader(d, batch_size=32) for d in sets]
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    options = dict(accelerator="cpu", default_root_dir=str(tmp_path), callbacks=[callback]) | quiet | trainer
    with warnings.catch_warnings(action="ignore"): pl.Trainer(**options).fit(model, *data)

def test_lightning_validates_the_live_weights(pl, tmp_path):
    callback, seen = lightning_governor(None, QUICK.replace(patience=12)), []
    class Model(pl.LightningModule):
        def __init__(self): super().__init__(); self.net, self.drawn = network(0.), iter(range(9999))
        def configure_optimizers(self): return torch.optim.AdamW(self.parameters(), lr=3e-4)
        def training_step(self, batch, i):
            next(self.drawn) # so no step can be repeated, and the weights take turns
            if i == 90: corrupt(self.net)
            return F.cross_entropy(self.net(batch[0]), batch[1])
        def validation_step(self, batch, i):
            governor = callback.governor
            if governor: seen.append((governor.comparing, self.net[0].weight.detach().clone()))
    pl.seed_everything(0, verbose=False)
    validated_fit(pl, tmp_path, Model(), callback, max_epochs=1, val_check_interval=1)
    check_validations(seen)
    assert [r.action for r in callback.governor.reports] == ["rollback"]

def evaluating_trainer(transformers, tmp_path, model):
    "A Trainer that evaluates after every step, and the Governor's callback."
    pytest.importorskip("accelerate", reason="needs accelerate")
    transformers.logging.set_verbosity_error()
    data = [dict(x=x, labels=y) for x, y in zip(*examples(32 * 60))]
    args = transformers.TrainingArguments(output_dir=str(tmp_path), max_steps=150, per_device_train_batch_size=32,
                                          learning_rate=3e-4, report_to=[], logging_strategy="no", use_cpu=True, seed=0,
                                          save_strategy="no", disable_tqdm=True, eval_strategy="steps", eval_steps=1)
    trainer = transformers.Trainer(model=model, args=args, train_dataset=data, eval_dataset=data[:8])
    trainer.add_callback(faults_of(transformers, model))
    return trainer, guard_trainer(trainer, None, QUICK.replace(patience=12))

def test_hugging_face_evaluates_the_live_weights(tmp_path):
    transformers, seen = pytest.importorskip("transformers", reason="needs transformers"), []
    class Seen(transformers.TrainerCallback):
        def on_evaluate(self, args, state, control, model=None, **kwargs):
            seen.append((callback.governor.comparing, model.net[0].weight.detach().clone()))
    model = new(fault=corrupt, drawn=iter(range(9999)))
    trainer, callback = evaluating_trainer(transformers, tmp_path, model)
    trainer.add_callback(Seen())
    with warnings.catch_warnings(action="ignore"): trainer.train()
    check_validations(seen)
    assert [r.action for r in callback.governor.reports] == ["rollback"]

@pytest.mark.parametrize("where", ["training", "validation"])
def test_lightning_leaves_the_live_weights_after_an_exception(where, pl, tmp_path):
    "And the next fit with the same callback starts from what its caller has put there."
    callback, live = lightning_governor(None, QUICK.replace(patience=12)), []
    seen = tmp_path/"seen" # a list that the step reads would be restored with it
    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.rate, self.drawn = network(0.), 3e-4, iter(range(9999))
        def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=self.rate)
        def training_step(self, batch, i):
            next(self.drawn) # so no step can be repeated, and the weights take turns
            if i == 90: corrupt(self.net)
            if seen.exists() and where == "training" and callback.governor.comparing: raise OSError("broken")
            return F.cross_entropy(self.net(batch[0]), batch[1])
        def validation_step(self, batch, i):
            if not (callback.governor and callback.governor.comparing): return
            live.append(self.net[0].weight.detach().clone())
            seen.touch()
            if where == "validation": raise OSError("broken")
    pl.seed_everything(0, verbose=False)
    model = Model()
    fit = partial(validated_fit, pl, tmp_path, model, callback)
    with pytest.raises(OSError, match="broken"): fit(max_epochs=1, val_check_interval=1)
    assert torch.equal(model.net[0].weight, live[0]) and not callback.governor.comparing
    model.rate = 0.
    with torch.no_grad(): model.net[0].weight.fill_(7)
    fit(max_steps=3)
    assert bool((model.net[0].weight == 7).all())

@pytest.mark.parametrize("where", ["training", "evaluation"])
def test_hugging_face_leaves_the_live_weights_after_an_exception(where, tmp_path):
    transformers, live = pytest.importorskip("transformers", reason="needs transformers"), []
    class Broken(transformers.TrainerCallback):
        def on_evaluate(self, args, state, control, model=None, **kwargs):
            if callback.governor.comparing: live.append(model.net[0].weight.detach().clone())
            if live and where == "evaluation": raise OSError("broken")
        def on_step_begin(self, args, state, control, **kwargs):
            if live and where == "training" and callback.governor.comparing: raise OSError("broken")
    model = new(fault=corrupt, drawn=iter(range(9999)))
    trainer, callback = evaluating_trainer(transformers, tmp_path, model)
    trainer.add_callback(Broken())
    with warnings.catch_warnings(action="ignore"), pytest.raises(OSError, match="broken"): trainer.train()
    assert torch.equal(model.net[0].weight, live[0]) and not callback.governor.comparing

@pytest.mark.slow
def test_hugging_face_healthy_run_is_untouched(tmp_path):
    _, callback = hf_run(tmp_path, guarded := new(), gradient_accumulation_steps=2)
    hf_run(tmp_path, alone := new(), governor=False, gradient_accumulation_steps=2)
    assert (guarded.losses == alone.losses and not callback.governor.reports
            and int(callback.governor.stats.judged[0]) == 150)
    assert abs(callback.governor.stats.ring[0, 0] - sum(guarded.losses[:2]) / 2) < 1e-5, "micro-batches are one loss"

@pytest.mark.slow
def test_hugging_face_stops_at_the_end_of_the_budget(tmp_path):
    trainer, callback = hf_run(tmp_path, new(fault=poison, at=range(90, 1000)), config=QUICK.replace(rollbacks=1))
    assert trainer.state.global_step < 100 and callback.governor.reports[-1].action == "stop"

@pytest.mark.slow
def test_lightning_manual_optimization(pl, tmp_path):
    class Manual(pl.LightningModule):
        def __init__(self, how):
            super().__init__()
            self.net, self.how, self.automatic_optimization = network(), how, False
        def configure_optimizers(self): return torch.optim.AdamW(self.parameters(), lr=3e-3)
        def training_step(self, batch, i):
            loss, opt = F.cross_entropy(self.net(batch[0]), batch[1]), self.optimizers()
            opt.zero_grad(); self.manual_backward(loss); opt.step()
            if self.how == "logged": self.log("loss", loss)
            return {"tensor": loss, "dict": dict(loss=loss)}.get(self.how)
    class Fault(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, i):
            if i == 90: poison(module.net)
    for how, seen in (("tensor", 1), ("dict", 1), ("logged", 1), ("nothing", 0)):
        callback, model = lightning_governor(CHANCE, QUICK), Manual(how)
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*examples(32 * 150)), batch_size=32)
        quiet = dict(enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, logger=False)
        root = str(tmp_path)
        fit = pl.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=root, callbacks=[Fault(), callback], **quiet)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit.fit(model, data)
        assert len(callback.governor.reports) == seen, how
        if seen: assert all(p.isfinite().all() for p in model.parameters())

def test_hugging_face_resumes_exactly(tmp_path):
    whole, first = hf_run(tmp_path/"a", alone := new(), steps=120)
    hf_run(tmp_path/"b", new(), steps=120, save_strategy="steps", save_steps=60)
    assert (tmp_path/"b/checkpoint-60/governor.pt").exists()
    _, again = hf_run(tmp_path/"b", resumed := new(), steps=120, resume=str(tmp_path/"b/checkpoint-60"))
    assert alone.losses[60:] == resumed.losses
    assert all(torch.equal(p, q) for p, q in zip(alone.parameters(), resumed.parameters()))
    a, b = first.governor, again.governor
    assert a.watched == b.watched == 120 and (a.stats.ring == b.stats.ring).all()
    assert a.snapshot.steps == b.snapshot.steps

@pytest.mark.slow
def test_hugging_face_logs_what_was_done(tmp_path):
    trainer, callback = hf_run(tmp_path, new(fault=poison))
    assert [x["governor_rollback"] for x in trainer.state.log_history if "governor_rollback" in x] == [
        float(callback.governor.reports[0].batch)]
    said, = [x["governor"] for x in trainer.state.log_history if "governor" in x]
    assert said == str(callback.governor.reports[0]) and "non-finite" in said and "rollback" in said

@pytest.mark.slow
def test_the_bar_of_hugging_face_says_what_was_done(tmp_path, capsys):
    _, callback = hf_run(tmp_path, new(fault=poison), steps=120, disable_tqdm=False)
    note = f"Governor: non-finite -> rollback at batch {callback.governor.reports[0].batch}"
    shown = capsys.readouterr()
    assert note in (shown.out + shown.err).replace("\r", "\n")

def accelerate_loop(tmp_path, start=0, stop=120, resume=None, corrupt=()):
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    torch.manual_seed(0)
    net, accelerator = network(), accelerate.Accelerator(cpu=True)
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 200)
    model, opt, sched = accelerator.prepare(net, opt, sched)
    gov = guard_accelerator(accelerator, model, opt, sched, chance_loss=CHANCE, config=QUICK)
    if resume: accelerator.load_state(str(resume))
    x, y = examples(32 * 120)
    for t in range(start, stop):
        if t in corrupt: poison(net)
        loss = F.cross_entropy(model(x[32 * t:32 * t + 32]), y[32 * t:32 * t + 32])
        opt.zero_grad(); accelerator.backward(loss); opt.step(); sched.step()
        gov.watch(loss)
        if t == 59 and not resume: accelerator.save_state(str(tmp_path/"half"))
    return net, gov, sched

def test_accelerate_rolls_back_and_resumes(tmp_path):
    net, gov, sched = accelerate_loop(tmp_path, corrupt=(90,))
    assert [r.batch for r in gov.reports] == [90] and all(p.isfinite().all() for p in net.parameters())
    assert "optimizer" in gov.reports[0].restored and "scheduler" in gov.reports[0].left
    again, other, _ = accelerate_loop(tmp_path, start=60, resume=tmp_path/"half", corrupt=(90,))
    assert other.watched == 120 and [r.restored_step for r in other.reports] == [r.restored_step for r in gov.reports]

# --- two processes: this file is what torchrun starts

def store_results(governor, net, losses, folder, rank):
    "What a rank did, for the test that started it."
    reports = [(r.batch, r.reason, r.action, r.rank) for r in governor.reports]
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    torch.save(dict(reports=reports, weights=weights, losses=losses, watched=governor.watched),
               Path(folder)/f"rank{rank}.pt")

def accelerate_on_ranks(folder, resume):
    from accelerate import Accelerator
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    rank, net = accelerator.process_index, network(0.)
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 200)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*examples(64 * 120)), batch_size=32)
    model, opt, sched, data = accelerator.prepare(net, opt, sched, data)
    gov = guard_accelerator(accelerator, model, opt, sched, chance_loss=CHANCE, config=QUICK)
    if resume: accelerator.load_state(f"{folder}/half")
    losses = []
    for t, (x, y) in enumerate(data):
        if resume and t < 60: continue
        if t == 90 and rank == 1: poison(net)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad(); accelerator.backward(loss); opt.step(); sched.step()
        gov.watch(loss); losses.append(loss.item())
        if t == 59 and not resume: accelerator.save_state(f"{folder}/half")
    store_results(gov, net, losses, f"{folder}/{'again' if resume else 'whole'}", rank)

def hugging_face_on_ranks(folder, resume):
    class OneRank(Small):
        def forward(self, x, labels):
            if int(os.environ["RANK"]) == 1 and len(self.losses) == (30 if resume else 90): poison(self.net)
            return super().forward(x, labels)
    torch.manual_seed(0)
    model = OneRank()
    where = f"{folder}/hf"
    _, callback = hf_run(where, model, steps=120, ddp_backend="gloo", save_strategy="steps", save_steps=60,
                         resume=f"{where}/checkpoint-60" if resume else None)
    place = f"{folder}/{'again' if resume else 'whole'}"
    store_results(callback.governor, model, model.losses, place, int(os.environ["RANK"]))

def on_two_ranks(tmp_path, what):
    "What both ranks did, in a whole run and in one that is resumed at the middle."
    for name in ("again", "whole"): (tmp_path/name).mkdir()
    start_ranks(__file__, 2, what, str(tmp_path), seconds=300)
    return [[torch.load(tmp_path/f"{name}/rank{r}.pt") for r in range(2)] for name in ("whole", "again")]

@pytest.mark.slow
@pytest.mark.parametrize("what", ["accelerate", "transformers"])
def test_two_processes_act_together_and_resume_exactly(tmp_path, what):
    pytest.importorskip("accelerate", reason="needs accelerate")
    pytest.importorskip(what, reason=f"needs {what}")
    whole, again = on_two_ranks(tmp_path, what)
    for a, b in (whole, again):
        assert a["reports"] == b["reports"] and torch.equal(a["weights"], b["weights"])
        assert a["weights"].isfinite().all() and a["watched"] == 120
        (batch, reason, action, _), = a["reports"]
        assert (batch, reason, action) == (90, "non-finite", "rollback")
    assert whole[0]["losses"] != whole[1]["losses"], "each rank has batches of its own"
    for r in range(2):
        assert str(whole[r]["losses"][60:]) == str(again[r]["losses"]), "to the bit (as text, where NaN is NaN)"
    assert torch.equal(whole[0]["weights"], again[0]["weights"])

def fastai_learner(*callbacks, at=60, fault=poison, drawn=None): # an iterator: no step can be repeated
    learner = pytest.importorskip("fastai.learner", reason="needs fastai")
    data = pytest.importorskip("fastai.data.core", reason="needs fastai")
    torch.manual_seed(0)
    x, y = examples(32 * 100)
    loaders = data.DataLoaders.from_dsets(*[torch.utils.data.TensorDataset(x, y)] * 2, bs=32, device="cpu")
    class Poison(learner.Callback):
        def before_batch(self):
            if self.learn.training and self.learn.train_iter == at: fault(self.learn.model)
    def loss(*args):
        if drawn: next(drawn)
        return F.cross_entropy(*args)
    return learner.Learner(loaders, network(0.), loss_func=loss, cbs=[Poison(), *callbacks])

def test_fastai(caplog):
    pytest.importorskip("fastai.learner", reason="needs fastai")
    callback = fastai_governor(CHANCE, QUICK)
    learn = fastai_learner(callback)
    with learn.no_logging(): learn.fit(1, 3e-3)
    assert [r.reason for r in callback.governor.reports] == ["non-finite"]
    assert "no optimizer" not in caplog.text
    assert all(p.isfinite().all() for p in learn.model.parameters())
    first = callback.governor
    learn.validate()
    assert callback.governor is first, "validation is no training"

@pytest.mark.slow
def test_fastai_says_above_its_bar_what_was_done(capsys):
    pytest.importorskip("fastai.learner", reason="needs fastai")
    pytest.importorskip("fastai.callback.progress") # it registers itself
    callback = fastai_governor(CHANCE, QUICK)
    learn = fastai_learner(callback)
    learn.fit(1, 3e-3)
    assert learn.guard is callback
    assert f"Governor: {callback.governor.reports[0]}" in capsys.readouterr().out

@pytest.mark.slow
def test_fastai_stops_at_the_end_of_the_budget():
    pytest.importorskip("fastai.learner", reason="needs fastai")
    calls = []
    def again(net): calls.append(1); poison(net)
    callback = fastai_governor(CHANCE, QUICK.replace(rollbacks=0, skips=0))
    learn = fastai_learner(callback, fault=again, drawn=iter(range(9999)))
    with learn.no_logging(): learn.fit(3, 3e-3)
    assert callback.governor.reports[-1].action == "stop" and len(calls) == 1
    assert all(p.isfinite().all() for p in learn.model.parameters())

@pytest.mark.slow
def test_fastai_goes_on_from_a_state(tmp_path):
    pytest.importorskip("fastai.learner", reason="needs fastai")
    first = fastai_governor(CHANCE, QUICK)
    learn = fastai_learner(first, at=-1)
    with learn.no_logging(): learn.fit(1, 3e-3)
    torch.save(first.state_dict(), tmp_path/"governor.pt")
    again = fastai_governor(CHANCE, QUICK)
    other = fastai_learner(again, at=-1)
    again.load_state_dict(torch.load(tmp_path/"governor.pt"))
    with other.no_logging(): other.fit(1, 3e-3)
    assert again.governor.watched == 2 * first.governor.watched == 200

@pytest.mark.parametrize("where", ["training", "validation"])
def test_fastai_leaves_the_live_weights_after_an_exception(where):
    learner, live = pytest.importorskip("fastai.learner", reason="needs fastai"), []
    class Broken(learner.Callback):
        order = 80
        def break_once(self):
            if not callback.governor.comparing or live: return
            with callback.governor.live_weights() if self.learn.training else nullcontext():
                live.append(self.learn.model[0].weight.detach().clone())
            raise KeyboardInterrupt
        def before_batch(self):
            if where == "training" and self.learn.training: self.break_once()
        def before_validate(self):
            if where == "validation": self.break_once()
    callback = fastai_governor(None, QUICK.replace(patience=12))
    learn = fastai_learner(callback, Broken(), at=86, fault=lambda net: live or corrupt(net), drawn=iter(range(9999)))
    with learn.no_logging(), pytest.raises(KeyboardInterrupt): learn.fit(3, 3e-4)
    first, model = callback.governor, learn.model
    assert torch.equal(model[0].weight, live[0]) and first.comparing == (where == "validation")
    with torch.no_grad(): model[0].weight.fill_(7)
    with learn.no_logging(): learn.fit(1, 0.)
    assert bool((model[0].weight == 7).all()) and callback.governor is not first

@pytest.mark.slow
def test_fastai_searches_a_rate_without_a_governor():
    pytest.importorskip("fastai.learner", reason="needs fastai")
    pytest.importorskip("fastai.callback.schedule") # it adds the search to the learner
    callback = fastai_governor(CHANCE, QUICK)
    learn = fastai_learner(callback, at=-1)
    with learn.no_logging(), learn.no_bar(): learn.lr_find(show_plot=False, num_it=60)
    assert callback.governor is None

if __name__ == "__main__":
    run = dict(accelerate=accelerate_on_ranks, transformers=hugging_face_on_ranks)[sys.argv[1]]
    for resume in (False, True): run(sys.argv[2], resume)
    leave()


def test_a_skorch_callback_is_cloned_pickled_and_finds_schedules(monkeypatch):
    "A clone was an error, so no search over settings was possible; a schedule in a callback was asked for in vain."
    for name in ("skorch", "skorch.callbacks"): monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["skorch.callbacks"].Callback = type("Callback", (), {})
    guard = skorch_governor(2.3, "epoch")
    net = types.SimpleNamespace(module_=network(), train_step=None, train_step_single=None, get_loss=None)
    net.optimizer_ = torch.optim.SGD(net.module_.parameters(), lr=.1)
    schedule = torch.optim.lr_scheduler.StepLR(net.optimizer_, 1)
    net.callbacks_ = [("rate", types.SimpleNamespace(lr_scheduler_=schedule)), ("guard", guard)]
    guard.on_train_begin(net)
    guard.on_epoch_begin(net)
    assert guard.governor.snapshot.objects["scheduler"] is schedule
    for clone in (type(guard)(**{k: v for k, v in vars(guard).items() if not k.endswith("_")}), # as scikit-learn does
                  pickle.loads(pickle.dumps(guard))):
        assert (clone.chance_loss, clone.config, clone.governor) == (2.3, "epoch", None)


def test_an_update_of_ignite_may_return_more_than_the_loss(monkeypatch):
    engines = types.ModuleType("ignite.engine")
    engines.Events = types.SimpleNamespace(COMPLETED=1, TERMINATE=2, EXCEPTION_RAISED=3)
    monkeypatch.setitem(sys.modules, "ignite.engine", engines)
    state = types.SimpleNamespace(iteration=1, metrics={})
    engine = types.SimpleNamespace(add_event_handler=lambda *_: None, state=state)
    out = [dict(pred=torch.zeros(3), loss=.5)]
    update = guard_update(lambda engine, batch: out, network(), chance_loss=None,
                          output_transform=lambda out: out[0]["loss"])
    assert update(engine, None) is out and update.governor.watched == 1
