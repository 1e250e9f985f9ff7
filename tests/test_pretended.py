"The pretended device: it refuses what a real one refuses, it sees races, and the main job runs on it."
import copy

import pytest
import torch
from pretend import PretendedCuda, Race
from torch import nn

from esper_nb.run.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def gpu():
    with PretendedCuda(devices=2) as machine: yield machine


# --- tensors and devices

def test_numbers_are_those_of_the_cpu_and_modules_keep_their_parameters(gpu):
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))
    x = torch.randn(5, 1, 4, 4)
    there = copy.deepcopy(net)
    first = there[0].weight
    there.cuda()
    assert there[0].weight is first and isinstance(first, nn.Parameter) and first.device == torch.device("cuda", 0)
    for n, v in ((net, x), (there, x.cuda())): n(v).square().mean().backward()
    for p, q in zip(net.parameters(), there.parameters()):
        assert torch.equal(p, q.cpu()) and torch.equal(p.grad, q.grad.cpu())

def test_two_devices_in_one_operation_are_refused(gpu):
    here, there, other = torch.ones(3), torch.ones(3, device="cuda"), torch.ones(3, device="cuda:1")
    for f in (lambda: here + there, lambda: there + other, lambda: nn.Linear(3, 2)(there), lambda: here[there > 0],
              lambda: torch.cat([here, there]), lambda: there.numpy()):
        with pytest.raises((RuntimeError, TypeError)): f()
    assert (there + torch.tensor(2.)).tolist() == [3., 3., 3.]   # a number without an axis may come along

def test_each_device_draws_from_a_stream_of_its_own(gpu):
    torch.cuda.manual_seed_all(3)
    state = torch.get_rng_state()
    draws = [torch.rand(4, device=d).cpu() for d in ("cuda:0", "cuda:1", "cuda:0")]
    assert not torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert torch.equal(torch.get_rng_state(), state) and sum(gpu.draws.values()) == 3
    with pytest.raises(RuntimeError, match="generator"): torch.rand(3, device="cuda", generator=torch.Generator())

# --- waits and launches

def test_waits_and_launches_are_counted_by_line(gpu):
    x = torch.zeros(4, device="cuda")
    gpu.reset()
    for f in (lambda: x.sum().item(), lambda: x.cpu(), lambda: x[x > 0], lambda: x.nonzero(), lambda: x[[0, 2]],
              lambda: torch.tensor([1.], device="cuda"), lambda: bool(x.any()), torch.cuda.synchronize):
        before = gpu.num_waits
        f()
        assert gpu.num_waits == before + 1
    assert all(where.startswith("test_pretended.py:") for _, where in gpu.waits)
    gpu.reset()
    for f in (lambda: x.view(2, 2), lambda: x[0], lambda: x.masked_fill(x > 0, 1.), lambda: x.mul_(2)): f()
    assert gpu.num_waits == 0 and gpu.num_launches == 3   # views are free
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchronizing"): x.sum().item()

# --- copies that arrive later

def test_a_copy_to_pinned_memory_arrives_when_somebody_waits(gpu):
    x, host = torch.arange(4., device="cuda"), torch.empty(4, pin_memory=True)
    assert host.is_pinned() and not torch.empty(4).is_pinned()
    host.copy_(x, non_blocking=True)
    with pytest.raises(Race, match="under way"): host.sum()
    torch.cuda.current_stream().synchronize()
    assert host.tolist() == [0., 1., 2., 3.]

def test_pinned_memory_must_not_change_before_its_copy_is_made(gpu):
    host = torch.ones(4, pin_memory=True)
    host.to("cuda", non_blocking=True)
    host.zero_()
    with pytest.raises(Race, match="overwritten before"): torch.cuda.synchronize()

# --- streams

def test_a_stream_that_was_not_told_to_wait_is_a_race(gpu):
    s, x = torch.cuda.Stream(), torch.ones(4, device="cuda")
    with torch.cuda.stream(s), pytest.raises(Race, match="may still be writing"): x * 2
    s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s): y = x * 2
    with pytest.raises(Race, match="may still be reading"): x.zero_()
    with pytest.raises(Race, match="may still be writing"): y + 1
    event = s.record_event()
    torch.cuda.current_stream().wait_event(event)
    assert (x.zero_() + y).tolist() == [2.] * 4

def test_memory_that_another_stream_may_still_use_must_not_be_freed():
    with pytest.raises(Race, match="freed"), PretendedCuda():
        s, x = torch.cuda.Stream(), torch.ones(4, device="cuda")
        s.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(s): y = x * 2
        del x
        torch.cuda.synchronize()
        del y


# --- the main job

def test_the_main_job_runs_on_two_devices(gpu, tmp_path, capsys):
    small = ["env.num_envs=2", "env.limit=64", "ppo.num_steps=4", "env.horizon=4", "env.batch_size=32",
             "ppo.num_updates=1", "ppo.update_epochs=1", "ppo.num_minibatches=2", "env.precision=fp32"]
    sets = [w for s in small for w in ("--set", s)]
    main(["train", "digits_impaired", "--device", "cuda:0,cuda:1", "--quiet", "--out", str(tmp_path), *sets])
    assert "1 update, 8 lane-epochs" in capsys.readouterr().out and gpu.num_launches > 1000
