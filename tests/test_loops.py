"Loops whose batches come from `Governor.batches`: trained as by `run`, and as unguarded while all is well."
import copy
import math
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
from tiny import update

from esper_nb.guard import causes
from esper_nb.guard.footprint import ruined_around
from esper_nb.guard.governor import Governor
from esper_nb.guard.recorder import with_origins
from esper_nb.guard.reports import GovernorConfig, GovernorStop

QUIET = GovernorConfig(stop_raises=False)

pytestmark = pytest.mark.usefixtures("one_thread", "few_words")

def digits(n=2048):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(n, 16, generator=g)
    return TensorDataset(x, (x[:, :4].sum(1) > 0).long() + 2 * (x[:, 4] > 0).long())

def made(seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(.1), nn.Linear(32, 4))
    opt = torch.optim.AdamW(net.parameters(), 3e-3)
    return net, opt, torch.optim.lr_scheduler.OneCycleLR(opt, 1e-2, 400)

def spoil(net, k, fault):
    "What happens to a run before batch k."
    if fault == "nan" and k == 100: net[0].weight.data[0, 0] = math.nan
    if fault == "dead" and k == 100: net[0].weight.data.mul_(1e-3)

def train(make_loader, guarded, fault=None, epochs=3, every=1):
    "A loop of a user: counters, accumulation, a schedule; returns what it has counted beside its parts."
    net, opt, clock = made()
    loader = make_loader()
    governor = Governor(net, opt, clock, chance_loss=math.log(4), config=QUIET) if guarded else None
    steps, drawn, losses = 0, [0], []
    def spoiling(batches):
        for batch in batches:
            spoil(net, drawn[0], fault)
            drawn[0] += 1
            yield batch
    for _ in range(epochs):
        total = 0.
        source = loader if fault is None else spoiling(loader)
        for x, y in governor.batches(source) if guarded else source:
            loss = nn.functional.cross_entropy(net(x), y)
            (loss / every).backward()
            steps += 1
            if steps % every == 0:
                opt.step()
                opt.zero_grad()
            clock.step()
            total += loss.item()
            losses.append(loss.item())
            if guarded: governor.watch(loss)
    return dict(net=[p.detach().clone() for p in net.parameters()], steps=steps, total=total, losses=losses,
                rate=clock.get_last_lr(), random=torch.get_rng_state(), governor=governor, drawn=drawn[0])

def equal(a, b):
    return (all(torch.equal(x, y) for x, y in zip(a["net"], b["net"])) and torch.equal(a["random"], b["random"])
            and all(a[k] == b[k] for k in ("steps", "total", "losses", "rate", "drawn")))

class Rows(IterableDataset):
    def __iter__(self): return iter(digits())

def shuffled(): return DataLoader(digits(), 32, shuffle=True)
def two_workers(): return DataLoader(digits(512), 32, shuffle=True, num_workers=2)
def iterable(): return DataLoader(Rows(), 32)
def a_subset(): return DataLoader(Subset(digits(), range(512)), 32, shuffle=True) # makes a batch at once
def one_by_one(): return DataLoader(digits(64), batch_size=None)
def a_list(): return [digits()[32 * k:32 * k + 32] for k in range(64)]

@pytest.mark.parametrize("make", [shuffled, two_workers, iterable, a_list])
@pytest.mark.parametrize("every", [1, 4])
def test_a_healthy_loop_is_as_if_nobody_watched(make, every):
    alone, guarded = train(make, False, every=every), train(make, True, every=every)
    assert equal(alone, guarded)
    assert guarded["governor"].repairs.dry.exact, guarded["governor"].repairs.dry.why
    assert not guarded["governor"].reports

@pytest.mark.parametrize("fault", ["nan", "dead"])
@pytest.mark.parametrize("make", [shuffled, iterable])
def test_a_ruined_loop_ends_as_if_nothing_had_happened(make, fault):
    alone, guarded = train(make, False), train(make, True, fault)
    reports = guarded["governor"].reports
    assert [(r.action, r.cause) for r in reports] == [("rollback", "external")], [*map(str, reports)]
    assert reports[0].redone
    assert all(torch.equal(x, y) for x, y in zip(alone["net"], guarded["net"]))
    assert alone["losses"] == guarded["losses"] and alone["steps"] == guarded["steps"]
    assert alone["total"] == guarded["total"] and alone["rate"] == guarded["rate"]

def test_batches_that_caused_it_are_left_out_and_the_counters_know():
    def make():
        rows = a_list() * 5
        for k in range(220, 280): rows[k] = [rows[k][0], (rows[k][1] + 2) % 4]
        return rows
    out = train(make, True, epochs=1)
    report = out["governor"].reports[0]
    assert (report.action, report.cause) == ("rollback", "data"), str(report)
    left = 320 - out["steps"]
    assert left > 0 and len(out["losses"]) == out["steps"]
    assert out["governor"].explain().cause == "data" # from the incident: the loop is over

def test_replaying_is_told(tmp_path):
    net, opt, _ = made()
    governor = Governor(net, opt, chance_loss=math.log(4), config=QUIET)
    told = tmp_path/"told" # a list would be restored with the rest
    def source():
        for k, batch in enumerate(a_list()):
            spoil(net, k - 60 + 100, "nan")
            yield batch
    for x, y in governor.batches(source()):
        with told.open("a", encoding="utf-8") as out: out.write(f"{governor.replaying:d}")
        governor.watch(update(opt, nn.functional.cross_entropy(net(x), y)))
    assert not governor.replaying
    flags = told.read_text(encoding="utf-8")
    assert flags.count("0") == 64 and flags.count("1") > 60, flags # every batch once; the incident was replayed

def test_behind_the_loop_its_variables_are_those_of_its_last_batch():
    "The first epoch is as long as what is run twice at its end: the loss that is printed there was that of a replay."
    net, opt, _ = made()
    governor, losses = Governor(net, opt, chance_loss=math.log(4), config=QUIET), []
    for epoch in range(4):
        for i, (x, y) in governor.batches(enumerate(DataLoader(digits(50 * 32), 32))):
            loss = update(opt, nn.functional.cross_entropy(net(x), y))
            governor.watch(loss)
            if not governor.replaying: losses.append(loss.item())
        assert (i, loss.item(), len(losses)) == (49, losses[-1], 50 * epoch + 50)
    assert not governor.reports


def test_a_loop_that_is_left_ends_cleanly():
    net, opt, _ = made()
    governor = Governor(net, opt, chance_loss=None, config=QUIET)
    for x, y in governor.batches(a_list()): # a count around it would count repeated steps, too
        loss = update(opt, nn.functional.cross_entropy(net(x), y))
        governor.watch(loss)
        if governor.watched == 20: break
    assert governor.watched == 21 and governor.loop is None
    governor.watch(loss)
    with pytest.raises(ZeroDivisionError):
        for _ in governor.batches(a_list()): 1 / 0
    assert governor.watched == 22 and governor.loop is None
    with pytest.raises(RuntimeError, match="two losses"):
        for _ in governor.batches(a_list()):
            governor.watch(1.)
            governor.watch(1.)
    with pytest.raises(RuntimeError, match="inside of another"):
        for _ in governor.batches(a_list()):
            for _ in governor.batches(a_list()): pass
    with pytest.raises(RuntimeError, match="without `with`"):
        for _ in governor.batches(a_list()):
            with governor.step(): pass

@pytest.mark.parametrize("fault", ["", "nan", "flipped"])
@pytest.mark.parametrize("length", [21, 60])
def test_a_batch_that_has_left_its_loop_is_not_run_again_in_the_next(fault, length):
    "It left that one, too: the rest of an epoch was missing, in silence."
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    opt = torch.optim.Adam(net.parameters(), 1e-2)
    governor = Governor(net, opt, chance_loss=math.log(2))
    drawn, sign = [], {"now": 1}
    def feed(epoch):
        for _ in range(80):
            sign["now"] = -1 if fault == "flipped" and 110 < len(drawn) < 150 else 1
            if fault == "nan" and len(drawn) == 110: net.weight.data[0, 0] = math.nan
            drawn.append(epoch)
            yield torch.randn(8, 4)
    for epoch in range(240 // length):
        for i, x in governor.batches(enumerate(feed(epoch))):
            governor.watch(update(opt, sign["now"] * nn.functional.cross_entropy(net(x), (x.sum(1) > 0).long())))
            if i == length - 1: break
    assert [drawn.count(k) for k in range(240 // length)] == [length] * (240 // length)
    assert net.weight.isfinite().all() and len(governor.reports) >= (fault == "nan")

@pytest.mark.parametrize("ends", ["break", "batches"])
def test_a_loop_that_is_left_by_break_again_and_again_is_told_what_that_costs(ends):
    "No step was repeated, and nobody said so: neither in health nor beside the rollback."
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    opt = torch.optim.Adam(net.parameters(), 1e-2)
    governor = Governor(net, opt, chance_loss=math.log(2))
    for _ in range(20):
        rows = torch.randn(20, 8, 4)
        for i, x in governor.batches([*enumerate(rows if ends == "break" else rows[:10])]):
            if governor.watched == 150 and not governor.replaying: net.weight.data[0, 0] = math.nan
            governor.watch(update(opt, nn.functional.cross_entropy(net(x), (x.sum(1) > 0).long())))
            if ends == "break" and i == 9: break
    report, = governor.reports
    said = [text for text in governor.summary().remarks if "`break`" in text]
    if ends == "break": assert len(said) == 1 and "has left its loop, as by `break`" in report.why
    else: assert not said and report.cause == "external" and report.redone

def test_a_checkpoint_of_the_body_has_the_loss_of_its_batch():
    "It is judged when the loop asks for its next batch; a run that goes on from the checkpoint has not lost it."
    def whole(stop=None, saved=None, batches=slice(None)):
        net, opt, schedule = made()
        governor = Governor(net, opt, schedule, chance_loss=None, config=QUIET)
        if saved is not None:
            for part, state in zip((net, opt, schedule), saved[:3]): part.load_state_dict(state)
            governor.load_state_dict(saved[3])
            torch.set_rng_state(saved[4])
        for x, y in governor.batches(a_list()[batches]):
            loss = update(opt, nn.functional.cross_entropy(net(x), y))
            schedule.step()
            governor.watch(loss)
            if stop is not None and governor.watched == stop and not governor.replaying:
                return [copy.deepcopy(p.state_dict()) for p in (net, opt, schedule, governor)] + [torch.get_rng_state()]
        governor.close()
        return net, governor
    net, governor = whole()
    saved = whole(stop=20)
    again, resumed = whole(saved=saved, batches=slice(21, None))
    assert saved[3]["losses"]["watched"] == 21 and resumed.watched == governor.watched == 64
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), again.parameters()))
    assert list(resumed.losses.recent) == list(governor.losses.recent)
    assert torch.equal(resumed.stats.state_dict()["ring"], governor.stats.state_dict()["ring"])

def test_a_loop_that_has_ended_well_can_be_asked_and_answers_what_it_knows():
    net, opt, _ = made()
    governor = Governor(net, opt, chance_loss=None, config=QUIET)
    for x, y in governor.batches(a_list()):
        governor.watch(update(opt, nn.functional.cross_entropy(net(x), y)))
    found = governor.explain()
    assert found.cause == "unknown" and "nothing was acted on" in found.why and "inside of the loop" in found.why
    assert found.last == 63 and governor.watched == 64

def test_the_budget_ends_a_loop():
    net, opt, _ = made()
    config = GovernorConfig(rollbacks=1, patience=4) # each batch until then is explained
    governor = Governor(net, opt, chance_loss=math.log(4), config=config)
    with pytest.raises(GovernorStop):
        for x, y in governor.batches(a_list() * 20):
            for p in net.parameters(): p.data.fill_(math.nan)
            governor.watch(nn.functional.cross_entropy(net(x), y))
    assert governor.loop is None

def test_a_step_that_cannot_be_repeated_is_only_watched():
    net, opt, _ = made()
    governor = Governor(net, opt, chance_loss=math.log(4), config=QUIET)
    others, drawn = iter(range(1000)), []
    for x, y in governor.batches(a_list()):
        drawn.append(next(others))
        governor.watch(update(opt, nn.functional.cross_entropy(net(x), y)))
    assert drawn == list(range(64))
    assert "`others` (an iterator)" in governor.repairs.dry.why

def test_what_belongs_to_the_loader_stays():
    net, _, _ = made()
    governor = Governor(net, chance_loss=None)
    loader = shuffled()
    batches = governor.batches(loader)
    assert len(batches) == 64 and batches.dataset is loader.dataset and batches.batch_size == 32

@pytest.mark.parametrize("make", [shuffled, two_workers, a_subset, one_by_one])
def test_indices_make_the_same_batch(make):
    for batch, origin in with_origins(make()):
        assert all(torch.equal(a, b) for a, b in zip(batch, origin.fetch(origin.keys)))
    assert all(origin is None for _, origin in with_origins(iterable()))

def test_large_batches_are_kept_by_their_indices():
    net, opt, _ = made()
    loader = shuffled()
    governor = Governor(net, opt, chance_loss=math.log(4), config=QUIET)
    governor.recorder.nbytes = 10 * 32 * (16 * 4 + 8) # ten batches
    for _ in range(2):
        for k, (x, y) in enumerate(governor.batches(loader)):
            if k == 40: net[0].weight.data.mul_(1e-3)
            governor.watch(update(opt, nn.functional.cross_entropy(net(x), y)))
    recorder = governor.recorder
    assert recorder.held <= recorder.nbytes and len(recorder.steps) > 11
    assert sum(s.fetch is not None for s in recorder.steps) > 5

def test_a_loop_in_a_generator_of_the_user_is_a_loop():
    "Its variables are recorded, too: those of the generator and those of the loop around it."
    def counted(batches, told):
        n = 0
        for batch in batches:
            n += 1
            told[0] = n
            yield batch
    def run(guarded, ruined):
        net, opt, _ = made()
        governor, told, seen = Governor(net, opt, chance_loss=math.log(4), config=QUIET), [0], 0
        def source():
            for k, batch in enumerate(a_list()):
                if ruined: spoil(net, k - 40 + 100, "nan")
                yield batch
        for x, y in counted(governor.batches(source()) if guarded else source(), told):
            loss = update(opt, nn.functional.cross_entropy(net(x), y))
            seen += 1
            if guarded: governor.watch(loss)
        assert [r.cause for r in governor.reports] == ["external"] * ruined, [*map(str, governor.reports)]
        return [p.detach().clone() for p in net.parameters()], told[0], seen
    alone = run(False, False)
    for ruined in (False, True):
        weights, *counts = run(True, ruined)
        assert all(map(torch.equal, weights, alone[0])) and tuple(counts) == alone[1:] == (64, 64), (ruined, counts)

def test_without_greenlet_it_is_said_what_to_do(monkeypatch):
    from esper_nb.guard import loops
    loops._greenlets.cache_clear()  # noqa: SLF001
    monkeypatch.setitem(sys.modules, "greenlet", None)
    with pytest.raises(ImportError, match="pip install greenlet.*governor.run"):
        for _ in Governor(nn.Linear(1, 1), chance_loss=None).batches([1]): pass

def test_examples_that_caused_an_incident_are_left_out_of_later_batches():
    data, (net, opt, _) = digits(512), made()
    data.tensors[0][7] = math.nan
    governor = Governor(net, opt, chance_loss=math.log(4), config=QUIET.replace(gate=False, lost_confirm=1))
    for epoch in range(3):
        sizes = []
        for x, y in governor.batches(DataLoader(data, 32, shuffle=True)):
            loss = update(opt, nn.functional.cross_entropy(net(x), y))
            if not governor.replaying: sizes.append(len(x))
            governor.watch(loss)
    assert [r.cause for r in governor.reports] == ["data"], [*map(str, governor.reports)]
    assert 7 in governor.left_keys and len(governor.left_keys) == 32 and sum(sizes) == 480 and len(sizes) > 10, sizes

SCRIPT = """
n = 0
for x, y in governor.batches(source()):
    n += 1
    loss = cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    governor.watch(loss)
"""

def test_a_loop_of_a_script_is_a_loop_of_a_function():
    "Its variables are those of the module, as in a notebook."
    ends = []
    for ruined in (False, True):
        net, opt, _ = made()
        governor = Governor(net, opt, chance_loss=math.log(4), config=QUIET)
        def source():
            for k, batch in enumerate(a_list()):
                if ruined: spoil(net, k - 40 + 100, "nan")
                yield batch
        names = dict(__name__="__main__", governor=governor, source=source, net=net, opt=opt,
                     cross_entropy=nn.functional.cross_entropy)
        exec(compile(SCRIPT, "<typed in>", "exec"), names)
        assert [r.cause for r in governor.reports] == ["external"] * ruined and names["n"] == 64
        ends.append([p.detach().clone() for p in net.parameters()])
    assert all(map(torch.equal, *ends))

@pytest.mark.parametrize("before", [True, False])
def test_a_validation_before_the_loss_that_only_the_run_has_is_named_and_behind_it_does_no_harm(before):
    "It draws random numbers; a hook of the Governor's own, for states that are loaded, was said to be the reason."
    net, opt, _ = made()
    class Own(nn.Sequential): # code of the user, whose attributes may have any name
        def __init__(self, *layers):
            super().__init__(*layers)
            self.depth = len(layers)
        def forward(self, x): return getattr(self, "0")(x)
    model = Own(net)
    governor = Governor(model, opt, chance_loss=math.log(4), config=QUIET)
    def validate():
        if not governor.replaying: model(torch.randn(8, 16))
    for x, y in governor.batches(a_list()[:8]):
        if before: validate()
        governor.watch(update(opt, nn.functional.cross_entropy(model(x + .1 * torch.randn_like(x)), y)))
        if not before: validate()
    dry = governor.repairs.dry
    assert not any("hook" in str(what) for what in governor.recorder.footprint.unseen)
    assert dry.exact != before and ("draws other random numbers" in dry.why) == before

def test_a_file_is_no_obstacle_where_the_loop_asks_whether_it_runs_again(tmp_path):
    def dry(asks):
        net, opt, _ = made()
        governor = Governor(net, opt, chance_loss=math.log(4), config=QUIET)
        with (tmp_path/"log").open("w", encoding="utf-8") as log:
            for x, y in governor.batches(a_list()[:8]) if asks else ():
                governor.watch(update(opt, nn.functional.cross_entropy(net(x), y)))
                if not governor.replaying: log.write("a line")
            for x, y in () if asks else governor.batches(a_list()[:8]):
                governor.watch(update(opt, nn.functional.cross_entropy(net(x), y)))
                log.write("a line")
        return governor.repairs.dry
    assert dry(asks=True).exact and "`log` (an open file)" in dry(asks=False).why

COMPILED = """
import torch
from torch import nn
from esper_nb import Governor, GovernorConfig

net, x = nn.Linear(4, 1), torch.randn(8, 4)
loss_of = torch.compile(lambda x: net(x).square().mean(), backend="eager")
opt = torch.optim.SGD(net.parameters(), 1e-2)
def loader():
    for i in range(40):
        if i == 30: net.weight.data[0, 0] = torch.nan
        yield x
governor = Governor(net, opt, config=GovernorConfig(snapshot_every=10, probation=10))
for batch in governor.batches(loader()):
    loss = loss_of(batch)
    opt.zero_grad()
    loss.backward()
    opt.step()
    governor.watch(loss)
print(governor.reports[0].cause, governor.reports[0].redone, governor.repairs.dry)
"""

def test_a_compiled_step_is_repeated_in_place():
    "Autograd has threads where `torch.compile` came before the first backward: in a copy of the process it fails."
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith("external 1") and "replayed exactly" in done.stdout, done.stdout + done.stderr

def test_the_line_is_named_in_which_a_body_fails_that_runs_again():
    net = nn.Linear(4, 1)
    opt = torch.optim.SGD(net.parameters(), 1e-2)
    governor = Governor(net, opt, chance_loss=None, config=QUIET)
    here, k = os.getpid(), 0
    for x in governor.batches([torch.randn(8, 4)] * 30):
        if os.getpid() != here: raise ValueError("no copy of this process")
        governor.watch(update(opt, net(x).square().mean()))
        k += 1
    line = test_the_line_is_named_in_which_a_body_fails_that_runs_again.__code__.co_firstlineno + 6
    assert k == 30 and f"in line {line} of test_loops.py" in governor.repairs.dry.why

def test_one_loop_runs_once_at_a_time():
    governor = Governor(nn.Linear(1, 1), chance_loss=None)
    first, second = [iter(governor.batches([1, 2])) for _ in range(2)]
    assert next(first) == 1
    with pytest.raises(RuntimeError, match="this loop runs already"): next(second)


@pytest.mark.parametrize("forks", [True, False])
@pytest.mark.parametrize("ill", [True, False])
def test_a_body_that_bears_no_batch_out_of_turn_is_not_ended_by_one(ill, forks, monkeypatch):
    monkeypatch.setattr(causes, "can_fork", lambda: forks)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    opt = torch.optim.Adam(net.parameters(), 1e-2)
    governor = Governor(net, opt, chance_loss=math.log(10), config=QUIET.replace(snapshot_every=20, probation=20,
                                                                                 patience=24))
    centers, k = torch.randn(10, 16), 0
    def drawn():
        for i in range(200):
            y = torch.randint(10, (32 if i < (100 if ill else 78) else 24,))
            yield centers[y] + torch.randn(len(y), 16), (y + 1) % 10 if ill and 105 <= i < 125 else y
    for x, y in governor.batches(drawn()):
        if len(x) != (32 if k < (100 if ill else 78) else 24): raise ValueError(f"batch {k} of {len(x)} examples")
        loss = update(opt, nn.functional.cross_entropy(net(x), y))
        k += 1
        governor.watch(loss)
    assert k == 200 and not governor.reports
    if not ill: return
    assert governor.repairs.found.cause == "unknown" and "fails when it is run again" in governor.repairs.found.why


class InTheBody:
    "A loop that does something once in its body that a replay does not do, and counts its batches there."
    def __init__(self, guarded, do=None, at=150, batches=300, **settings):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        self.opt = torch.optim.AdamW(self.net.parameters(), 3e-3)
        self.governor = Governor(self.net, self.opt, chance_loss=math.log(4), config=QUIET.replace(
            snapshot_every=20, probation=20, **settings)) if guarded else None
        rows = (a_list() * 5)[:batches]
        k = 0
        for x, y in self.governor.batches(rows) if guarded else rows:
            loss = update(self.opt, nn.functional.cross_entropy(self.net(x), y))
            if guarded: self.governor.watch(loss)
            if not guarded or not self.governor.replaying:
                k += 1
                if k == at and do is not None: do(self)
        self.counted = k

    def same_as(self, other):
        return all(torch.equal(a, b) for a, b in zip(self.net.parameters(), other.net.parameters()))

@torch.no_grad()
def enlarge(run): run.net[0].weight.mul_(100)

@torch.no_grad()
def make_nan(run): run.net[0].weight[0, 0] = math.nan # whose update the gate does not let happen

@pytest.mark.parametrize("do, tail", [(enlarge, "call `governor.accept()` there"), (make_nan, "the run stays well")])
def test_what_the_body_writes_under_a_condition_is_named(do, tail):
    run = InTheBody(True, do)
    report, = run.governor.reports
    assert (report.cause, run.counted) == ("external", 300), str(report)
    assert "batch 149 the loop wrote into model.0.weight, and does not" in report.why and tail in report.why
    assert run.same_as(InTheBody(False)) # what was undone was trained on again, without that

def test_what_the_body_writes_past_torch_is_not_blamed_on_hardware_alone():
    report = InTheBody(True, lambda run: run.net[0].weight.data.mul_(100)).governor.reports[0]
    assert report.cause == "external" and "through `.data`" in report.why, str(report)

def reset_and_accept(run):
    run.net[-1].reset_parameters()
    if run.governor is not None: run.governor.accept()

def test_an_intended_change_in_the_body_is_accepted_when_its_step_is_over():
    run = InTheBody(True, reset_and_accept)
    assert not run.governor.reports, run.governor.reports[0]
    assert run.same_as(InTheBody(False, reset_and_accept))
    assert run.governor.explain().first >= 150 # no replay goes behind the change

def test_replays_of_a_body_ask_for_nothing():
    def ask(run):
        assert not run.governor.take_snapshot().published # not yet
        run.governor.rollback()
    run = InTheBody(True, ask)
    report, = run.governor.reports
    assert (report.reason, report.restored_step, report.redone) == ("by hand", 150, 0), str(report)
    torch.manual_seed(0)
    net = nn.Linear(16, 4)
    opt = torch.optim.SGD(net.parameters(), .1)
    governor = Governor(net, opt, chance_loss=math.log(4), config=QUIET)
    def step(batch):
        governor.accept() # in every replay, too
        if len(batch[0]) == 31: raise KeyError
        return update(opt, nn.functional.cross_entropy(net(batch[0]), batch[1]))
    rows = a_list()
    for batch in rows[:8]: governor.run(step, batch)
    with pytest.raises(KeyError): governor.run(step, [rows[0][0][:31], rows[0][1][:31]])
    assert governor.snapshot.steps == [8]
    governor.explain()
    governor.run(step, rows[8])
    assert governor.snapshot.steps == [9] and not governor.requests

def test_what_is_not_finite_between_two_steps_is_put_back_before_a_step_that_would_not_bear_it():
    def train(fault):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))
        opt = torch.optim.Adam(net.parameters(), 1e-2)
        governor = Governor(net, opt, chance_loss=math.log(2), config=QUIET)
        def source():
            for k, (x, y) in enumerate(a_list()):
                if fault and k == 48: net[0].weight.data[0, 0] = math.nan
                yield x, (y % 2).float()[:, None]
        for x, y in governor.batches(source()):
            loss = nn.functional.binary_cross_entropy(net(x).sigmoid(), y) # raises where it gets NaN
            governor.watch(update(opt, loss))
        return governor, net
    governor, net = train(True)
    report, = governor.reports
    assert (report.reason, report.cause, report.lost) == ("state", "external", None), str(report)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), train(False)[1].parameters()))

@pytest.mark.parametrize("part", ["moments", "a tensor"])
def test_what_is_not_finite_beside_the_weights_is_found_among_what_was_written(part):
    "It cost all batches since the good state: the health of a state and what writes into it had names of their own."
    def train(fault):
        torch.manual_seed(0)
        net, speed = nn.Linear(16, 4), [torch.zeros(4, 16), torch.zeros(4)]
        opt = torch.optim.Adam(net.parameters(), 1e-2)
        governor = Governor(net, opt, *speed, chance_loss=math.log(4), config=QUIET)
        def source():
            for k, batch in enumerate(a_list()):
                if fault and k == 48:
                    (opt.state[net.weight]["exp_avg"] if part == "moments" else speed[0])[0, 0] = math.nan
                yield batch
        for x, y in governor.batches(source()):
            loss = update(opt, nn.functional.cross_entropy(net(x), y))
            for s, p in zip(speed, net.parameters()): s.mul_(.9).add_(p.grad)
            governor.watch(loss)
        return governor, [*net.parameters(), *speed]
    governor, ended = train(True)
    report, = governor.reports
    assert (report.reason, report.cause, report.lost) == ("state", "external", None), str(report)
    assert all(torch.equal(a, b) for a, b in zip(ended, train(False)[1]))


def fit(net, opt, xs, aim, governor, spoilt=None):
    "The loop of a user, to be called for one network after another."
    def drawn():
        for k, x in enumerate(xs):
            if k == spoilt: net.weight.data[0, 0] = math.nan
            yield x
    for x in governor.batches(drawn()) if governor else drawn():
        loss = update(opt, (net(x) - aim(x)).square().mean())
        if governor: governor.watch(loss)

@pytest.mark.costly
@pytest.mark.parametrize("widths", [(4, 6), (4, 4)])
def test_a_loop_that_is_called_for_another_network_is_trained_on_with_that(widths):
    "As layer by layer: a replay trained the one of before, and a rollback left the loop with it."
    def train(guarded, spoilt=None):
        torch.manual_seed(0)
        nets = [nn.Linear(w, 1) for w in widths]
        opts = [torch.optim.SGD(net.parameters(), .01) for net in nets]
        aims = [lambda x: x.sum(1, keepdim=True), lambda x: x.diff(dim=1).sum(1, keepdim=True)]
        governor = Governor(*nets, *opts, chance_loss=None, config=QUIET) if guarded else None
        for epoch in range(2):
            for i, (net, opt, w, aim) in enumerate(zip(nets, opts, widths, aims)):
                fit(net, opt, torch.randn(60, 8, w), aim, governor, spoilt if (epoch, i) == (1, 0) else None)
        return [p for net in nets for p in net.parameters()], governor
    plain, (state, governor) = train(False)[0], train(True)
    assert not governor.reports and governor.repairs.dry.exact
    assert all(torch.equal(a, b) for a, b in zip(plain, state, strict=True))
    state, governor = train(True, spoilt=20)
    report, = governor.reports
    assert report.cause == "external" and report.redone and not report.lost
    assert all(torch.equal(a, b) for a, b in zip(plain, state, strict=True))


def test_a_loop_that_is_only_looked_at_needs_no_search_of_all_objects(monkeypatch):
    "Every NaN after a rollback in vain searched the process: a run of `watch` took fifty times as long."
    searched = []
    monkeypatch.setattr("esper_nb.guard.loops.gc.get_objects", lambda: searched.append(1) or [])
    target = torch.full((3,), math.nan)
    for _ in range(2): found, _ = ruined_around(), target.sum()
    assert found.others == ("target",) and not searched
