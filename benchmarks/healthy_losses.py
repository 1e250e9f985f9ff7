"""Healthy losses of thirty-one kinds, on which no guard has any business: used by tests and by detector_bench.py"""
import math

import numpy as np

CHANCE, STEPS = math.log(10), 2000
t = np.arange(STEPS)

def wandering(rng, rho, sigma):
    "Noise with a memory."
    x = np.empty(STEPS)
    x[0] = sigma * rng.standard_normal()
    for i, e in enumerate(sigma * math.sqrt(1 - rho**2) * rng.standard_normal(STEPS - 1)): x[i + 1] = rho * x[i] + e
    return x


def falling(rng, noise, floor=.4):
    "From about ln 10 to a floor, with noise in proportion."
    return (floor + (2.3 - floor) * np.exp(-t / 150)) * np.exp(noise * rng.standard_normal(STEPS))

def bursts(rng):
    "Every now and then six losses of up to ten times the level."
    x = falling(rng, .2, .3)
    for k in range(300, STEPS, 200):
        j = k + rng.integers(50)
        x[j:j + 6] *= np.array([10, 8, 6, 4, 2.5, 1.6])
    return x


HEALTHY = {      # kind: (chance loss, losses from a random generator)
    "noise 0.08": (CHANCE, lambda r: falling(r, .08, .9)),
    "noise 0.6": (CHANCE, lambda r: falling(r, .6, .9)),
    "10 % of batches ×3": (CHANCE, lambda r: falling(r, .1) * np.where(r.random(STEPS) < .1, 3, 1)),
    "20 % of batches ×2": (CHANCE, lambda r: falling(r, .1) * np.where(r.random(STEPS) < .2, 2, 1)),
    "noise with a memory": (CHANCE, lambda r: falling(r, 0.) * np.exp(wandering(r, .9, .3))),
    "easy and hard in turn": (CHANCE, lambda r: falling(r, .1) * np.where(t // 40 % 2, 2.5, 1)),
    "from one step on +50 %": (CHANCE, lambda r: falling(r, .1, .6) * np.where(t > 1200, 1.5, 1)),
    "warm restarts": (CHANCE, lambda r: falling(r, .1) * (1 + .8 * np.exp(-(t % 250) / 60) * (t > 250))),
    "curriculum ×20": (CHANCE, lambda r: falling(r, .2, .1) + (t >= 1000) * (.1 + 2.4 * np.exp(
        -np.maximum(t - 1000, 0) / 120))),
    "another task": (CHANCE, lambda r: (.15 + 2.2 * np.exp(-(t % 700) / 90)) * np.exp(.15 * r.standard_normal(STEPS))),
    "bursts ×10": (CHANCE, bursts),
    "summed loss, twice the batch": (None, lambda r: 64 * falling(r, .1) * np.where(t >= 1200, 2, 1)),
    "mixup switched on": (CHANCE, lambda r: np.where(t < 1000, falling(r, .15, .3), .9 + .5 * r.random(STEPS))),
    "slow cycle ×3": (CHANCE, lambda r: falling(r, .1, .3) * np.exp(np.log(3) / 2 * np.sin(t / 80))),
    "curriculum of four jumps": (CHANCE, lambda r: falling(r, .15, .2) * (1 + t // 400) ** .7),
    "penalty of a KL that grows": (None, lambda r: .05 * (1 + t / 400) ** 2 + wandering(r, .9, .1) - .5),
    "double descent": (CHANCE, lambda r: (falling(r, 0., .3) + np.exp(-((t - 1000) / 200) ** 2)) * np.exp(
        .1 * r.standard_normal(STEPS))),
    "normal, around zero": (None, lambda r: r.standard_normal(STEPS)),
    "Student's t, df 3": (None, lambda r: r.standard_t(3, STEPS)),
    "−0.01 ± 0.02": (None, lambda r: -.01 + .02 * r.standard_normal(STEPS)),
    "a critic": (None, lambda r: -30 * (t / 200) * np.exp(-t / 200) - .5 + wandering(r, .8, .8)),
    "a generator": (None, lambda r: np.cumsum(.05 * r.standard_normal(STEPS)) + .3 * r.standard_normal(STEPS)),
    "REINFORCE": (None, lambda r: np.where(r.random(STEPS) < .08, 20 * r.standard_normal(STEPS),
                                           .2 * r.standard_normal(STEPS))),
    "triplet, 60 % zeros": (None, lambda r: .3 * np.maximum(0, r.standard_normal(STEPS) - .25)),
    "likelihood crossing zero": (None, lambda r: 3 * np.exp(-t / 400) - 1.5 + .1 * r.standard_normal(STEPS)),
    "ELBO around −1000": (None, lambda r: -1000 + 800 * np.exp(-t / 200) + 5 * r.standard_normal(STEPS)),
    "squared error near 1e-6": (None, lambda r: (1e-6 + .01 * np.exp(-t / 100)) * np.exp(
        .3 * r.standard_normal(STEPS))),
    "TD error that grows": (None, lambda r: .01 * np.exp(4.6 * t / STEPS + .4 * r.standard_normal(STEPS))),
    "Pareto, index 1.3": (None, lambda r: .3 * (1 + r.pareto(1.3, STEPS))),
    "value loss, rare rewards": (None, lambda r: .001 * np.exp(.5 * r.standard_normal(STEPS)) + np.where(
        r.random(STEPS) < .03, r.random(STEPS), 0)),
    "cyclic and signed": (None, lambda r: np.sin(t / 30) + .2 * r.standard_normal(STEPS))}
