"""Eight healthy training loops under a Governor, ten seeds each, and what other rules say about the same losses:

    python -m benchmarks.healthy_loops            # writes nbs/explanations/bench_loops.json, ten minutes on one core
    python -m benchmarks.healthy_loops wgan --seeds 2

Nothing goes wrong in any of them, so whatever a guard does is an error. The seeds are none that a threshold was chosen
on. A loop is a generator: it trains a step, yields its losses by name, and goes on if nobody has to act.
"""
import functools
import json
import logging
import math
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path: sys.path.insert(0, str(ROOT))

from benchmarks import loops
from benchmarks.detector_bench import GUARDS, governor
from benchmarks.loops import descend

from esper_nb.guard.governor import Governor
from esper_nb.guard.reports import GovernorConfig

FIRST, SEEDS, STEPS = 30_000, 10, 800
Adam = torch.optim.Adam


mlp = functools.partial(loops.mlp, between=nn.GELU)


def digits(batch):
    "Batches of 8×8 pictures of digits in [−1, 1], without end."
    x = torch.as_tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1
    while True: yield x[torch.randint(len(x), (batch,))]


# --- the loops: each yields {name: (loss, parts that it trains)}

def wgan():
    "A Wasserstein critic with gradient penalty, three steps for one of the generator, on eight Gaussians."
    critic, maker = mlp(2, 64, 64, 1), mlp(4, 64, 64, 2)
    opt, other = Adam(critic.parameters(), 5e-4, (.5, .9)), Adam(maker.parameters(), 2e-4, (.5, .9))
    while True:
        for _ in range(3):
            angle = torch.randint(8, (64,)) * math.pi / 4
            real = 2 * torch.stack([angle.cos(), angle.sin()], 1) + .05 * torch.randn(64, 2)
            fake = maker(torch.randn(64, 4)).detach()
            at = (real + torch.rand(64, 1) * (fake - real)).requires_grad_()
            slope, = torch.autograd.grad(critic(at).sum(), at, create_graph=True)
            loss = critic(fake).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
            descend(opt, loss)
            yield {"WGAN-GP, critic": (loss, (critic, opt))}
        loss = -critic(maker(torch.randn(64, 4))).mean()
        descend(other, loss)
        yield {"WGAN-GP, generator": (loss, (maker, other))}


def dcgan():
    "A convolutional GAN on digits."
    judge = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.LeakyReLU(.2), nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32),
                          nn.LeakyReLU(.2), nn.Flatten(), nn.Linear(128, 1))
    maker = nn.Sequential(nn.ConvTranspose2d(16, 32, 2), nn.BatchNorm2d(32), nn.ReLU(),
                          nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.BatchNorm2d(16), nn.ReLU(),
                          nn.ConvTranspose2d(16, 1, 4, 2, 1), nn.Tanh())
    opt, other = (Adam(m.parameters(), 2e-4, (.5, .999)) for m in (judge, maker))
    yes, no = torch.ones(64, 1), torch.zeros(64, 1)
    for real in digits(64):
        fake = maker(torch.randn(64, 16, 1, 1))
        loss = F.binary_cross_entropy_with_logits(judge(real), yes) + F.binary_cross_entropy_with_logits(
            judge(fake.detach()), no)
        descend(opt, loss)
        trick = F.binary_cross_entropy_with_logits(judge(fake), yes)
        descend(other, trick)
        yield {"DCGAN, discriminator": (loss, (judge, opt)), "DCGAN, generator": (trick, (maker, other))}


def play(envs, states, actor, value, steps=32):
    "Some steps in all environments: states, actions, log-probabilities, advantages, returns."
    rows, rewards, ends = [], [], []
    for _ in range(steps):
        with torch.no_grad(): choice = torch.distributions.Categorical(logits=actor(states))
        action = choice.sample()
        seen, reward, over, cut, _ = envs.step(action.numpy())
        rows.append((states, action, choice.log_prob(action)))
        rewards.append(torch.as_tensor(reward, dtype=torch.float32))
        ends.append(torch.as_tensor(over | cut, dtype=torch.float32))
        states = torch.as_tensor(seen, dtype=torch.float32)
    x, a, p = (torch.stack(c) for c in zip(*rows))
    with torch.no_grad(): v = torch.cat([value(x)[..., 0], value(states)[None, :, 0]])
    gain, gains = torch.zeros(len(states)), []
    for t in reversed(range(steps)):
        gain = rewards[t] + .99 * (1 - ends[t]) * v[t + 1] - v[t] + .99 * .95 * (1 - ends[t]) * gain
        gains.insert(0, gain)
    gains = torch.stack(gains)
    return states, [t.flatten(0, 1) for t in (x, a, p, gains, gains + v[:-1])]


def ppo():
    "PPO on CartPole: the clipped policy loss, and the value loss, which grows with the returns."
    envs = gym.make_vec("CartPole-v1", num_envs=8, vectorization_mode="sync")
    states = torch.as_tensor(envs.reset(seed=int(torch.randint(10**6, ())))[0], dtype=torch.float32)
    actor, value = mlp(4, 32, 32, 2), mlp(4, 32, 32, 1)
    opt, other = Adam(actor.parameters(), 1e-3), Adam(value.parameters(), 1e-3)
    while True:
        states, batch = play(envs, states, actor, value)
        for i in [i for _ in range(2) for i in torch.randperm(256).split(64)]:
            x, a, old, gain, target = (t[i] for t in batch)
            choice, gain = torch.distributions.Categorical(logits=actor(x)), (gain - gain.mean()) / (gain.std() + 1e-8)
            ratio = (choice.log_prob(a) - old).exp()
            loss = -torch.minimum(ratio * gain, ratio.clip(.8, 1.2) * gain).mean() - .01 * choice.entropy().mean()
            descend(opt, loss)
            error = F.mse_loss(value(x)[:, 0], target)
            descend(other, error)
            yield {"PPO, policy": (loss, (actor, opt)), "PPO, value": (error, (value, other))}


def gaussian_nll():
    "A mean and a variance for every point; the loss starts above zero and ends below."
    net = mlp(1, 64, 64, 2)
    opt = Adam(net.parameters(), 2e-3)
    while True:
        x = 4 * torch.rand(64, 1) - 2
        mean, log_var = net(x).chunk(2, 1)
        y = (3 * x).sin() + .02 * (1 + x.abs()) * torch.randn_like(x)
        loss = F.gaussian_nll_loss(mean, y, log_var.exp())
        descend(opt, loss)
        yield {"Gaussian likelihood": (loss, (net, opt))}


def vae():
    "Digits through eight numbers; the loss is a bound of minus the log-likelihood, with a known variance."
    coder, decoder = mlp(64, 128, 16), nn.Sequential(*mlp(8, 128, 64), nn.Tanh())
    both = nn.ModuleList([coder, decoder])
    opt = Adam(both.parameters(), 1e-3)
    for x in digits(64):
        mean, log_var = coder(x.flatten(1)).chunk(2, 1)
        z = mean + (log_var / 2).exp() * torch.randn_like(mean)
        off = (decoder(z) - x.flatten(1)).square().sum(1) / (2 * .2**2) + 64 * math.log(.2)
        kl = (mean.square() + log_var.exp() - 1 - log_var).sum(1) / 2
        loss = (off + kl).mean()
        descend(opt, loss)
        yield {"VAE": (loss, (both, opt))}


def contrastive():
    "Two noisy views of a digit belong together (InfoNCE)."
    net = mlp(64, 128, 32)
    opt = Adam(net.parameters(), 1e-3)
    for x in digits(64):
        views = [F.normalize(net((x + .3 * torch.randn_like(x)).flatten(1)), dim=1) for _ in range(2)]
        loss = F.cross_entropy(views[0] @ views[1].T / .1, torch.arange(64))
        descend(opt, loss)
        yield {"contrastive": (loss, (net, opt))}


def regression():
    "A smooth function without noise, on a cosine with warm restarts: from 1 to about a hundred-thousandth."
    net = mlp(1, 64, 64, 1)
    opt = Adam(net.parameters(), 3e-3)
    clock = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, 200)
    while True:
        x = 4 * torch.rand(128, 1) - 2
        loss = F.mse_loss(net(x), (2 * x).sin())
        descend(opt, loss)
        clock.step()
        yield {"squared error": (loss, (net, opt, clock))}


def rnn():
    "A recurrent network that remembers one of eight symbols; about every fortieth batch asks for five times as long."
    class Memory(nn.Module):
        def __init__(self):
            super().__init__()
            self.read, self.gru, self.say = nn.Embedding(9, 16), nn.GRU(16, 48, batch_first=True), nn.Linear(48, 8)
        def forward(self, x): return self.say(self.gru(self.read(x))[0][:, -1])
    net = Memory()
    opt = Adam(net.parameters(), 3e-3)
    while True:
        delay = 30 if torch.rand(()) < 1 / 40 else 6
        first = torch.randint(8, (32, 1))
        loss = F.cross_entropy(net(torch.cat([first, torch.full((32, delay), 8)], 1)), first[:, 0])
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.)
        opt.step()
        yield {"RNN with bursts": (loss, (net, opt))}


LOOPS = dict(wgan=wgan, dcgan=dcgan, ppo=ppo, gaussian_nll=gaussian_nll, vae=vae, contrastive=contrastive,
             regression=regression, rnn=rnn)
CHANCE = {"contrastive": math.log(64), "RNN with bursts": math.log(8)}


def run(name, seed, guarded=True, steps=STEPS):
    """{loss: its values, its weights at the end, acts, looks} of one run.

    `untouched` losses come before the first comparison with old weights, in this loss or another one of the loop.
    """
    torch.manual_seed(seed)
    loop, out, governors = LOOPS[name](), {}, {}
    for _, losses in zip(range(steps), loop):
        for key, (loss, parts) in losses.items():
            mine = out.setdefault(key, dict(losses=[], acts=0, looks=0, weights=None, parts=parts, untouched=steps))
            if guarded and key not in governors:
                quiet = GovernorConfig(stop_raises=False)
                governors[key] = Governor(*parts, chance_loss=CHANCE.get(key), config=quiet)
            mine["losses"].append(loss.item())
            if not guarded: continue
            governors[key].watch(loss)
            if governors[key].observed.exchange is None: continue
            for m in out.values(): m["untouched"] = min(m["untouched"], len(m["losses"]))
    for key, mine in out.items():
        net = mine.pop("parts")[0]
        mine["weights"] = torch.cat([p.detach().flatten() for p in net.parameters()])
        if guarded:
            mine["acts"] = [str(r) for r in governors[key].reports]
            mine["looks"] = [r.action for r in governors[key].notes].count("wait")
            mine["scale"] = governors[key].stats.scale(0)
    return out


def main():
    "Every loop with every seed, and every rule on its losses."
    torch.set_num_threads(1)
    logging.getLogger("esper_nb").setLevel(logging.CRITICAL)
    names = [a for a in sys.argv[1:] if a in LOOPS] or list(LOOPS)
    seeds = int(sys.argv[sys.argv.index("--seeds") + 1]) if "--seeds" in sys.argv else SEEDS
    result = {}
    for name in names:
        start, runs = time.perf_counter(), [run(name, FIRST + s) for s in range(seeds)]
        for key in runs[0]:
            mine = [r[key] for r in runs]
            x = np.array([m["losses"] for m in mine]).T
            acts, looks = sum(len(m["acts"]) for m in mine), sum(m["looks"] for m in mine)
            result[key] = dict(
                runs=seeds, steps=len(x), acts=acts, looks=looks, scale=sorted({m["scale"] for m in mine}),
                first=float(np.median(x[:20])), last=float(np.median(x[-20:])),
                **{rule: int(np.count_nonzero(f(x))) for rule, f in GUARDS.items() if f is not governor})
            print(key, result[key], *[a for m in mine for a in m["acts"]], sep="\n  ")
        print(f"  ({time.perf_counter() - start:.0f} s)", flush=True)
    if names == list(LOOPS) and seeds == SEEDS:
        path = ROOT/"nbs/explanations/bench_loops.json"
        path.write_text(json.dumps(result, separators=(",", ":"), ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__": main()
