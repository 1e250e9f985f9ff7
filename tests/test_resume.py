"What a resume has lost is named before its first step, in three trainers; a right resume hears nothing."
import copy
import gc
import io
import logging
import pickle
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tiny import update

from esper_nb.guard import Governor, check_resume, guard_trainer, lightning_governor, prove_state

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS, BATCH = 6, 8


class Net(nn.Module):
    "Tied weights, statistics, dropout, a head; called as each of the trainers calls a network."
    def __init__(self, tied):
        super().__init__()
        self.embed, self.norm, self.mid = nn.Embedding(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.drop, self.decode, self.head = nn.Dropout(.1), nn.Linear(8, 12, bias=False), nn.Linear(12, 3)
        if tied: self.decode.weight = self.embed.weight
    def forward(self, x, labels=None):
        last = self.top if hasattr(self, "top") else self.head
        z = last(self.decode(self.drop(self.mid(self.norm(self.embed(x))))))
        return dict(loss=F.cross_entropy(z, labels), logits=z) if labels is not None else z


def data():
    g = torch.Generator().manual_seed(0)
    return [dict(x=x, labels=y) for x, y in zip(torch.randint(0, 12, (80,), generator=g),
                                                torch.randint(0, 3, (80,), generator=g))]


def new_parts(tied=True):
    "All that a run consists of, freshly made, with other numbers every time."
    net = Net(tied)
    heads = [*net.head.parameters()]
    rest = [p for p in net.parameters() if not any(p is h for h in heads)]
    opt = torch.optim.AdamW([dict(params=rest), dict(params=heads, weight_decay=.1)], lr=.02)
    return SimpleNamespace(
        net=net, opt=opt, schedule=torch.optim.lr_scheduler.CosineAnnealingLR(opt, 50),
        scaler=torch.amp.GradScaler("cpu", init_scale=2.**20, growth_interval=2), # too large: it halves at once
        ema=torch.optim.swa_utils.AveragedModel(net), cursor=dict(at=0, seed=5, batch_size=BATCH))


def read(s):
    stateful = (s.net, s.opt, s.schedule, s.scaler, s.ema)
    return copy.deepcopy([*(x.state_dict() for x in stateful), s.cursor])

def extras(s): return dict(ema=s.ema, cursor=s.cursor, scaler=s.scaler)

def average(s):
    if len([*s.net.parameters()]) == len([*s.ema.module.parameters()]) and not hasattr(s.net, "top"):
        s.ema.update_parameters(s.net)

def load_extras(s, saved):
    s.scaler.load_state_dict(saved[3])
    s.ema.load_state_dict(saved[4])
    s.cursor.update(saved[5])


# --- the trainers: each saves after some steps, and goes on with other objects; `lose` is called in between

def plain(lose, folder):
    def steps(s, governor, count):
        examples = data()
        for _ in range(count):
            batch = examples[s.cursor["at"]:s.cursor["at"] + BATCH]
            x, y = (torch.stack([e[k] for e in batch]) for k in ("x", "labels"))
            loss = F.cross_entropy(s.net(x), y)
            s.opt.zero_grad()
            s.scaler.scale(loss).backward()
            s.scaler.step(s.opt)
            s.scaler.update()
            s.schedule.step()
            average(s)
            s.cursor["at"] += BATCH
            governor.watch(loss)
    s = new_parts()
    governor = Governor(s.net, s.opt, s.schedule, chance_loss=None, **extras(s))
    older = None
    for k in range(STEPS):
        if k == STEPS - 2: older = read(s)
        steps(s, governor, 1)
    file = io.BytesIO()
    torch.save(dict(parts=read(s), governor=governor.state_dict(banks=False), rng=torch.get_rng_state()), file)
    torch.manual_seed(987)
    file.seek(0)
    saved, s = torch.load(file, weights_only=True), new_parts()
    for obj, state in zip((s.net, s.opt, s.schedule), saved["parts"]): obj.load_state_dict(state)
    load_extras(s, saved["parts"])
    torch.set_rng_state(saved["rng"])
    governor = Governor(s.net, s.opt, s.schedule, chance_loss=None, **extras(s))
    s.older = older
    lose(s)
    governor.load_state_dict(saved["governor"])
    steps(s, governor, 1)
    return governor


def lightning(lose, folder):
    pl = pytest.importorskip("lightning.pytorch")
    loader = torch.utils.data.DataLoader(data(), batch_size=BATCH)
    class Module(pl.LightningModule):
        def __init__(self, s):
            super().__init__()
            self.s, self.net = s, s.net
        def training_step(self, batch, i):
            average(self.s)
            self.s.cursor["at"] += BATCH
            return self.net(**batch)["loss"]
        def configure_optimizers(self):
            return [self.s.opt], [dict(scheduler=self.s.schedule, interval="step")]
    class Lose(pl.Callback):
        def on_train_start(self, trainer, module): lose(module.s)
    class Older(pl.Callback):
        older = None
        def on_train_batch_start(self, trainer, module, batch, i):
            if i == STEPS - 2: self.older = read(module.s)
    def fit(s, steps, before, **options):
        guard = lightning_governor(chance_loss=None, **extras(s))
        trainer = pl.Trainer(max_steps=steps, accelerator="cpu", logger=False, enable_progress_bar=False,
                             enable_model_summary=False, enable_checkpointing=False, callbacks=[*before, guard])
        trainer.fit(Module(s), loader, **options)
        return trainer, guard.governor
    s, older = new_parts(), Older()
    trainer, _ = fit(s, STEPS, [older])
    trainer.save_checkpoint(folder/"x.ckpt")
    saved, s = read(s), new_parts()
    load_extras(s, saved)
    s.older = older.older
    return fit(s, STEPS + 1, [Lose()], ckpt_path=folder/"x.ckpt")[1]


def transformers(lose, folder):
    hf = pytest.importorskip("transformers")
    older: list = []
    def train(s, steps, callbacks, resume=None):
        args = hf.TrainingArguments(
            output_dir=str(folder), per_device_train_batch_size=BATCH, max_steps=steps, save_steps=STEPS,
            logging_steps=100, report_to=[], disable_tqdm=True, use_cpu=True)
        trainer = hf.Trainer(model=s.net, args=args, train_dataset=data(), optimizers=(s.opt, s.schedule),
                             callbacks=callbacks(s))
        guard = guard_trainer(trainer, chance_loss=None, **extras(s))
        trainer.train(resume_from_checkpoint=resume)
        return guard.governor
    class Count(hf.TrainerCallback):
        def __init__(self, s): self.s = s
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == STEPS - 2: older.append(read(self.s))
            average(self.s)
            self.s.cursor["at"] += BATCH
    class Lose(hf.TrainerCallback):
        def __init__(self, s): self.s = s
        def on_train_begin(self, args, state, control, **kwargs): lose(self.s)
    s = new_parts(tied=False)
    train(s, STEPS, lambda s: [Count(s)])
    saved, s = read(s), new_parts(tied=False)
    load_extras(s, saved)
    s.older = older[0]
    return train(s, STEPS + 1, lambda s: [Lose(s)], resume=str(folder/f"checkpoint-{STEPS}"))


TRAINERS = [plain, lightning, transformers]


# --- what can be lost, and the word for it

def state_of(s, p): return s.opt.state[p]

def one_moment(s): state_of(s, s.net.mid.weight)["exp_avg"].zero_()

def half_moments(s):
    for x in s.opt.state.values(): x["exp_avg_sq"].copy_(x["exp_avg_sq"].mul(1e-6).half().float())

def fresh_schedule(s):
    for group in s.opt.param_groups: group["lr"] = .02
    s.schedule.load_state_dict(torch.optim.lr_scheduler.CosineAnnealingLR(s.opt, 50).state_dict())

def untie(s): s.net.decode.weight = nn.Parameter(s.net.decode.weight.detach().clone())

def older_checkpoint(s):
    s.net.load_state_dict(s.older[0])
    s.opt.load_state_dict(s.older[1])

def renamed(s):
    s.net.top = nn.Linear(12, 3)
    del s.net.head

def counters(s):
    for x in s.opt.state.values(): x["step"].zero_()

def swapped(s): # the state of two parameters of one shape
    a, b = s.opt.state[s.net.norm.weight], s.opt.state[s.net.norm.bias]
    s.opt.state[s.net.norm.weight], s.opt.state[s.net.norm.bias] = b, a

def other_weight_decay(s): s.opt.param_groups[1]["weight_decay"] = .01
def other_rate(s): s.opt.param_groups[0]["lr"] *= 10

LOSSES = {
    "head": (lambda s: s.net.head.reset_parameters(), r"\bhead\.weight"),
    "one layer is zero": (lambda s: s.net.mid.bias.data.zero_(), r"mid\.bias.* is 0"),
    "one moment": (one_moment, r"exp_avg of 1 of \d+ tensors is 0"),
    "moments in half precision": (half_moments, r"exp_avg_sq of \d+ of \d+ tensors"),
    "all moments": (lambda s: s.opt.state.clear(), r"exp_avg of \d+ of \d+ tensors is missing"),
    "counters of steps": (counters, r"step of \d+ of \d+ tensors is 0, was [1-9]"),
    "moments of another parameter": (swapped, r"exp_avg of 2 of \d+ tensors"),
    "schedule": (fresh_schedule, rf"scheduler at 0, was {STEPS}"),
    "rate": (other_rate, r"optimizer\.group 0\.lr is"),
    "weight decay": (other_weight_decay, r"optimizer\.group 1\.weight_decay is 0\.01, was 0\.1"),
    "scaler": (lambda s: s.scaler.load_state_dict(s.scaler.state_dict() | dict(scale=2.)), r"scaler\.scale is 2\.0"),
    "averaged weights": (lambda s: [p.data.normal_() for p in s.ema.parameters()], r"ema\."),
    "sampler": (lambda s: s.cursor.update(at=0), r"cursor\.at is \d, was 48"),
    "seed of the order": (lambda s: s.cursor.update(seed=6), r"cursor\.seed is 6, was 5"),
    "batch size": (lambda s: s.cursor.update(batch_size=16), r"cursor\.batch_size is 16, was 8"),
    "random stream": (lambda s: torch.manual_seed(4), r"random stream of torch"),
    "frozen flag": (lambda s: s.net.mid.weight.requires_grad_(False), r"mid\.weight is frozen"),
    "tied weights": (untie, r"decode\.weight = .*embed\.weight is tied no more"),
    "statistics": (lambda s: s.net.norm.reset_running_stats(), r"norm\.running_mean"),
    "older checkpoint": (older_checkpoint, r"tensors of (model|optimizer)|exp_avg"),
    "rounded weights": (lambda s: s.net.mid.weight.data.copy_(s.net.mid.weight.data.bfloat16()),
                        r"mid\.weight.* is rounded"),
    "renamed layer": (renamed, r"top\.(weight|bias).* was not saved"),
}

FRAMED = ("head", "all moments", "schedule", "averaged weights", "sampler", "random stream") # also in frameworks
LOST = [(plain, name) for name in LOSSES] + [(trainer, name) for trainer in TRAINERS[1:] for name in FRAMED]

@pytest.mark.slow
@pytest.mark.parametrize("trainer, name", LOST, ids=lambda x: getattr(x, "__name__", x))
def test_what_is_lost_is_named_before_the_first_step(trainer, name, tmp_path, caplog):
    lose, words = LOSSES[name]
    if trainer is transformers and name == "random stream": pytest.skip("it sets the streams itself, later")
    torch.manual_seed(3)
    governor = trainer(lose, tmp_path)
    if trainer is lightning and name == "random stream": # its checkpoints hold none: no loss, but not checked either
        assert governor.resume.found.right and re.search(words, governor.resume.found.unchecked[-1])
        return
    said = [r.getMessage() for r in caplog.records if "resumed, but" in r.getMessage()]
    assert len(said) == 1 and re.search(words, said[0]), said


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda f: f.__name__)
def test_a_right_resume_hears_nothing(trainer, tmp_path, caplog):
    torch.manual_seed(3)
    governor = trainer(lambda s: None, tmp_path)
    assert governor.resume.found.right and not [r for r in caplog.records if "resumed" in r.getMessage()]


# --- right resumes of many kinds: nothing is said

KINDS = dict(sgd=lambda p: torch.optim.SGD(p, .1), momentum=lambda p: torch.optim.SGD(p, .1, momentum=.9),
             adam=torch.optim.Adam, adamw=torch.optim.AdamW, amsgrad=lambda p: torch.optim.Adam(p, amsgrad=True),
             adagrad=torch.optim.Adagrad, rmsprop=torch.optim.RMSprop, adafactor=torch.optim.Adafactor,
             nadam=torch.optim.NAdam, lbfgs=lambda p: torch.optim.LBFGS(p, max_iter=2))
SCHEDULES = dict(none=lambda opt: [], step=lambda opt: [torch.optim.lr_scheduler.StepLR(opt, 3)],
                 function=lambda opt: [torch.optim.lr_scheduler.LambdaLR(opt, lambda k: .9**k)],
                 chained=lambda opt: [torch.optim.lr_scheduler.SequentialLR(
                     opt, milestones=[2], schedulers=[torch.optim.lr_scheduler.LinearLR(opt),
                                                      torch.optim.lr_scheduler.ExponentialLR(opt, .9)])])

def small(kind, schedule):
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(.2), nn.Linear(8, 2))
    opt = KINDS[kind](net.parameters())
    return net, opt, *SCHEDULES[schedule](opt)

def steps(net, opt, *schedules, count=4):
    for _ in range(count):
        def closure():
            opt.zero_grad()
            x = torch.randn(8, 4, dtype=next(net.parameters()).dtype)
            loss = net(x).square().mean()
            loss.backward()
            return loss
        opt.step(closure)
        for s in schedules: s.step()

@pytest.mark.parametrize("way", ["plain", "weights_only", "other order"])
@pytest.mark.parametrize("kind", KINDS)
def test_right_resumes_of_all_optimizers_and_ways_to_load(kind, way, caplog):
    schedule = list(SCHEDULES)[(list(KINDS).index(kind)) % 4]
    parts = small(kind, schedule)
    steps(*parts)
    np.random.rand(3)
    governor = Governor(*parts, chance_loss=None)
    steps(*parts)
    file = io.BytesIO()
    torch.save([governor.state_dict(banks=False), *(p.state_dict() for p in parts), torch.get_rng_state()], file)
    torch.manual_seed(55)
    file.seek(0)
    guard, *states, rng = torch.load(file, weights_only=way == "weights_only")
    parts = small(kind, schedule)
    governor = Governor(*parts, chance_loss=None)
    if way == "other order": governor.load_state_dict(guard)
    for p, state in zip(parts, states): p.load_state_dict(state)
    torch.set_rng_state(rng)
    if way != "other order": governor.load_state_dict(guard)
    steps(*parts, count=1)
    assert governor.resume.found.right and not caplog.records


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_dtype_that_was_asked_for_is_not_wrong_but_unchecked(dtype):
    parts = small("adam", "step")
    steps(*parts)
    proof = prove_state(*parts)
    net = copy.deepcopy(parts[0]).to(dtype)
    opt = torch.optim.Adam(net.parameters())
    opt.load_state_dict(parts[1].state_dict())
    schedule = torch.optim.lr_scheduler.StepLR(opt, 3)
    schedule.load_state_dict(parts[2].state_dict())
    found = check_resume(proof, net, opt, schedule)
    tiny = [w for w in found.wrong if "exp_avg" in w and w.endswith("is 0")] # true: half precision
    assert list(found.wrong) == tiny and (not tiny or dtype == torch.float16)
    assert any("the bits of" in u for u in found.unchecked)
    net[3].reset_parameters()
    assert any("3.weight" in w for w in check_resume(proof, net, opt, schedule).wrong)


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda net: torch.compile(net, backend="eager")])
def test_a_wrapped_network_is_that_of_one_process(wrap):
    parts = small("adam", "step")
    steps(*parts)
    proof = prove_state(wrap(parts[0]), *parts[1:])
    assert check_resume(proof, *parts) == check_resume(prove_state(*parts), *parts)
    assert check_resume(proof, *parts).right
    parts[0][3].bias.data.zero_()
    assert check_resume(proof, *parts).wrong == ("3.bias is 0",)


@pytest.mark.parametrize("then, now, said", [
    (dict(at=np.arange(3)), dict(at=np.arange(3) + 1), "cursor.at is "), (dict(at=3), nn.Linear(1, 1), "another sort"),
    (dict(at=np.int64(3)), dict(at=np.int64(4)), "cursor.at is 4, was 3"),
    (dict(at=np.arange(3)), dict(at=np.arange(3)), "all is what was saved"),
    (dict(at={1, 2}), dict(at={1, 2}), "not checked: cursor.at")], ids=str)
def test_parts_of_every_sort_are_compared(then, now, said):
    assert said in str(check_resume(prove_state(cursor=then, streams=False), cursor=now, streams=False))

def test_what_a_module_saves_beside_its_tensors_is_compared():
    class Counting(nn.Linear):
        seen = 0
        def get_extra_state(self): return dict(seen=self.seen)
        def set_extra_state(self, state): self.seen = state["seen"]
    net = Counting(1, 1)
    proof = prove_state(net)
    assert check_resume(proof, net).right
    net.seen = 7
    assert "seen is 7, was 0" in str(check_resume(proof, net))

def test_without_a_loaded_state_nothing_is_said_to_be_right():
    found = Governor(nn.Linear(1, 1), chance_loss=None).check_resume()
    assert found.unchecked == ("everything: no state was loaded",), found


def test_it_is_said_once_and_costs_nothing_afterwards(caplog):
    net, opt, schedule = small("adam", "step")
    steps(net, opt, schedule)
    governor = Governor(net, opt, schedule, chance_loss=None)
    state = governor.state_dict(banks=False)
    net[0].weight.data.mul_(2)
    governor.load_state_dict(state)
    assert governor.resume.hooks
    net.eval()
    net(torch.randn(2, 4)) # a validation: what is loaded may not be all
    assert not caplog.records
    net.train()
    for _ in range(3):
        steps(net, opt, schedule, count=1)
        governor.watch(.5)
    assert [r.levelno for r in caplog.records] == [logging.WARNING] and "0.weight" in caplog.text
    assert not governor.resume.hooks and not governor.resume.waiting


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("lose, words", [(None, ""), ("cursor", "cursor.at is "), ("size", "cursor.size is 16")])
def test_a_loader_that_has_handed_out_a_batch_before_the_first_step_is_no_loss(first, lose, words, caplog):
    net, opt = small("adam", "none")
    steps(net, opt)
    cursor = dict(at=7, size=8)
    state = Governor(net, opt, cursor=cursor, chance_loss=None).state_dict(banks=False)
    size = 16 if lose == "size" else 8
    other = dict(at=0, size=size)
    governor = Governor(net, opt, cursor=other, chance_loss=None)
    def load():
        if lose != "cursor": other.update(at=7)
    if not first: load()
    governor.load_state_dict(state)
    if first: load()
    other["at"] += 1 # a batch is fetched
    steps(net, opt, count=1)
    said = [r.getMessage() for r in caplog.records]
    if lose is None: assert not said and governor.resume.found.right
    else: assert len(said) == 1 and words in said[0]


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x): return self.last(self.norm(self.first(x)))


@pytest.mark.parametrize("how", ["outside", "in place"])
@pytest.mark.parametrize("order", ["governor first", "governor last"])
@pytest.mark.parametrize("lose, words", [(None, ""), ("last", r"last\.weight"), ("norm", "")])
def test_a_compiled_network_is_compared_and_compiled_whole(how, order, lose, words, caplog):
    net = Normed()
    opt = torch.optim.Adam(net.parameters())
    steps(net, opt, count=4)
    saved = copy.deepcopy((net.state_dict(), opt.state_dict(), Governor(net, opt, chance_loss=None).state_dict(False)))
    torch.manual_seed(3)
    net = Normed()
    opt = torch.optim.Adam(net.parameters())
    governor = Governor(net, opt, chance_loss=None)
    def load():
        net.load_state_dict(saved[0])
        opt.load_state_dict(saved[1])
        if lose == "last": net.last.reset_parameters()
        if lose == "norm": net.norm.reset_running_stats()
    if order == "governor last": load()
    governor.load_state_dict(saved[2])
    if order == "governor first": load()
    torch.compiler.reset()
    if how == "in place": net.compile(backend="eager", fullgraph=True)
    called = net if how == "in place" else torch.compile(net, backend="eager", fullgraph=True)
    for _ in range(2):
        governor.watch(update(opt, called(torch.randn(8, 4)).square().mean()))
    said = [r.getMessage() for r in caplog.records if "resumed, but" in r.getMessage()]
    if lose == "norm": # a forward has moved what may have been loaded late: not sure, and not silent
        assert not said
        assert "model.norm.running_mean, which the first forward has moved" in governor.resume.found.unchecked
    elif lose: assert len(said) == 1 and re.search(words, said[0])
    else: assert not said and governor.resume.found.right
    assert not any(vars(m)["_forward_pre_hooks"] for m in net.modules()) and not governor.resume.hooks


def test_a_resumed_network_can_be_copied_and_saved_whole_before_its_first_step():
    net, opt = small("adam", "none")
    governor = Governor(net, opt, chance_loss=None)
    governor.load_state_dict(governor.state_dict(banks=False))
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))): other(torch.randn(2, 4))
    assert governor.resume.hooks # still waiting
    net(torch.randn(2, 4))
    assert not governor.resume.hooks


def test_modules_of_others_have_no_hook():
    "One that vanishes with its Governor while another network is compiled breaks that."
    from torch.nn.modules import module
    net, opt = small("adam", "none")
    governor = Governor(net, opt, chance_loss=None)
    governor.load_state_dict(governor.state_dict(banks=False))
    assert governor.resume.hooks and not vars(module)["_global_forward_pre_hooks"]


def test_a_run_that_is_given_up_before_its_first_step_leaves_no_hook():
    net, opt = small("adam", "none")
    governor = Governor(net, opt, chance_loss=None)
    governor.load_state_dict(governor.state_dict(banks=False))
    assert any(vars(m)["_forward_pre_hooks"] for m in net.modules())
    del governor
    gc.collect()
    assert not any(vars(m)["_forward_pre_hooks"] for m in net.modules())
