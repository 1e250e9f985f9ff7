"Every plot: on real rows in every theme, on rows of one thing only, on none; and colours in the eyes of others."
import contextlib, math, re
from pathlib import Path

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex, to_rgba

from esper_nb.control import QUICK, QUICK_RULES, Heuristic, as_controller
from esper_nb.record import decode_row, encode_row, find_metric, make_rows, population_rows, run_rows
from esper_nb.show import (
    COLORS, HATCHES, MARKERS, STAGE_STYLES, THEMES, plot_blueprints, plot_compare, plot_controller, plot_incidents,
    plot_lanes, plot_learning, plot_rewards, plot_run, plot_runs as runs_page, plot_slots, theme)
from esper_nb.train import Fault, FitConfig, disturb_at, fit, get_task, new_population


@pytest.fixture(scope="module")
def run():
    "Rows of a guarded run with seeds, a NaN and an explosion, as they come back from a file."
    torch.set_num_threads(1)
    config = FitConfig(lanes=4, epochs=16)
    pop = new_population("digits_impaired", config, rules=QUICK_RULES, blueprints=["norm", "conv_light"],
                         data=get_task("digits_impaired").load("cpu", None, 512))
    faults = [Fault("nan", 1, 8, 6), Fault("explode", 3, 11, 3)]
    rows = run_rows(pop)
    def disturb(*args): return args[-2:] if (d := disturb_at(faults, int(pop.epoch.max()))) is None else d(*args)
    for r in fit(pop, controller=as_controller(Heuristic(QUICK)), disturb=disturb):
        rent = -torch.rand(4, generator=torch.Generator().manual_seed(r.epoch))
        rows += population_rows(pop, r)
        gain = r.heldout.accuracy_pp / 10 - 2
        rows += make_rows("step", {"reward": dict(total=gain + rent, gain=gain, rent=rent)}, epoch=r.epoch)
    return [decode_row(encode_row(row)) for row in rows]

@pytest.fixture(scope="module")
def policy():
    g = np.random.default_rng(0)
    def update(u):
        measured = dict(return_mean=10. * u, return_low=8. * u, return_high=12. * u)
        if u % 4 == 0: measured = dict.fromkeys(measured)
        values = measured | dict(
            entropy_mean=.9 - .02 * u, approx_kl=.01 + .02 * g.random(), clipfrac=.3 * g.random(),
            explained_variance=float(g.normal(-1, 2)), value_loss=2. / (u + 1), grad_norm=3 + g.random())
        heads = {"update.head_entropy.op": .9 - .03 * u, "update.head_entropy.slot": .8}
        return dict(kind="update", lane=None, update=u) | {f"update.{k}": v for k, v in values.items()} | heads
    return [update(u) for u in range(20)]

SCORES = {"heuristic": np.linspace(30, 50, 16), "wait only": [18.] * 16, "ppo": [60., 55., math.nan, 58.], "one": [45.]}
PLOTS = {f.__name__: (lambda rows, f=f: f(rows))
         for f in (plot_incidents, plot_slots, plot_blueprints, plot_rewards, plot_run, plot_learning)}
PLOTS["plot_lanes"] = lambda rows: plot_lanes(rows, "heldout.accuracy_pp")
PLOTS["plot_controller"] = lambda rows: plot_controller(rows, dict(PPO=60., waiting=18.) if rows else None)
PLOTS["plot_compare"] = lambda rows: plot_compare(SCORES if rows else {})

@pytest.fixture(autouse=True)
def close():
    yield
    plt.close("all")

def figure(drawn): return drawn if hasattr(drawn, "savefig") else drawn.figure

def pixels(fig):
    fig.canvas.draw()
    return np.asarray(fig.canvas.buffer_rgba()).astype(int)

def texts(fig): return [t for t in fig.findobj(matplotlib.text.Text) if t.get_text().strip() and t.get_visible()]

def contrast(a, b):
    def linear(v): return v / 12.92 if v <= .04045 else ((v + .055) / 1.055)**2.4
    def lum(c): return sum(w * linear(v) for w, v in zip((.2126, .7152, .0722), to_rgba(c)[:3]))
    low, high = sorted((lum(a), lum(b)))
    return (high + .05) / (low + .05)


# --- pictures

def test_every_plot_of_the_page_is_here():
    names = [*runs_page.__all__, *runs_page.__all__]
    assert set(PLOTS) == {n for n in names if n.startswith("plot_")} - {"plot_side_by_side"} # of several runs

@pytest.mark.parametrize("name", PLOTS)
@pytest.mark.parametrize("look", [None, *(k for k in THEMES if k != "neutral")]) # which None is
def test_plots_draw_at_full_size_in_every_theme(name, look, run, policy):
    with theme(look) if look else contextlib.nullcontext():
        fig = figure(PLOTS[name](run + policy))
        fig.set_size_inches(12.8, 8); fig.set_dpi(100)
        image = pixels(fig)
    assert image.shape[:2] == (800, 1280)
    ground = THEMES[look or "neutral"]["ground"]
    corner = image[0, 0]
    if ground == "none": assert corner[3] == 0
    else: assert tuple(corner[:3]) == tuple(round(255 * v) for v in to_rgba(ground)[:3])
    assert (np.abs(image - corner).max(-1) > 20).mean() > .01      # something is there
    for t in texts(fig):
        if t.get_bbox_patch() or to_hex(t.get_color()) in ("#ffffff", "#111111"): continue      # on a fill of its own
        for page in (["#ffffff", "#1e1e1e", "#222222"] if ground == "none" else [ground]):
            assert contrast(t.get_color(), page) >= 3.7, f"{t.get_text()!r} in {t.get_color()} on {page}"

@pytest.mark.parametrize("name", PLOTS)
def test_axes_say_what_they_show(name, run, policy):
    fig = figure(PLOTS[name](run + policy))
    for ax in fig.axes:
        if not ax.has_data() or not ax.get_visible(): continue
        bottom = not any(o.get_subplotspec()
                         and o.get_subplotspec().rowspan.start > ax.get_subplotspec().rowspan.start for o in fig.axes)
        assert ax.get_xlabel() or not bottom
        assert ax.get_ylabel() or ax.get_title(loc="left") or [t for t in ax.get_yticklabels() if t.get_text()]

@pytest.mark.parametrize("name", PLOTS)
def test_no_text_leaves_the_picture_or_covers_another_label(name, run, policy):
    fig = figure(PLOTS[name](run + policy))
    fig.canvas.draw()
    frame = fig.bbox.padded(1)
    for t in texts(fig):
        box = t.get_window_extent()
        if box.width and t.get_clip_on() is False:
            assert frame.x0 <= box.x0 and box.x1 <= frame.x1, f"{t.get_text()!r} is cut off"

@pytest.mark.parametrize("name", PLOTS)
def test_no_rows_give_a_sentence(name):
    fig = figure(PLOTS[name]([]))
    said = [t.get_text() for t in texts(fig)]
    assert said and all(s.endswith((".", "measured")) for s in said if len(s) > 20), said
    pixels(fig)

@pytest.mark.parametrize("name", PLOTS)
def test_rows_of_one_kind_are_enough_not_to_fail(name, run, policy):
    for kind in sorted({r["kind"] for r in run + policy}):
        assert figure(PLOTS[name]([r for r in run + policy if r["kind"] == kind])).axes; plt.close("all")

@pytest.mark.parametrize("name", PLOTS)
def test_values_that_were_not_measured_do_no_harm(name, run, policy):
    blank = [{k: None if "." in k and find_metric(k).unit != "text" and not k.endswith((".germination", "reward.total"))
              else v for k, v in r.items()} for r in run + policy]
    assert figure(PLOTS[name](blank)).axes

@pytest.mark.parametrize("name", sorted(PLOTS.keys() - {"plot_run", "plot_learning", "plot_controller"}))
def test_axes_of_the_caller_are_used_and_keep_their_colours(name, run):
    args = dict(plot_lanes=(run, "train.loss"), plot_compare=(SCORES,)).get(name, (run,))
    draw = getattr(runs_page, name, None) or getattr(runs_page, name)
    with plt.style.context("dark_background"):
        fig, ax = plt.subplots()
        assert draw(*args, ax=ax) is ax and fig.axes == [ax]
        assert all(contrast(t.get_color(), "#000000") >= 4.5 for t in texts(fig) if not t.get_bbox_patch()
                   and to_hex(t.get_color()) != "#111111")

def test_a_panel_without_data_leaves_the_ticks_of_the_others(policy):
    fig = plot_learning([{k: v for k, v in r.items() if k != "update.grad_norm"} for r in policy])
    fig.canvas.draw()
    low = fig.axes[4]
    assert [t.get_text() for t in low.get_xticklabels() if t.get_visible() and t.get_text()]
    assert low.get_xlabel() == "update"

@pytest.mark.parametrize("name", ["plot_lanes", "plot_run", "plot_rewards", "plot_learning"])
def test_epochs_and_updates_are_whole_numbers(name, run, policy):
    fig = figure(PLOTS[name](run + policy))
    fig.canvas.draw()
    for ax in fig.axes: assert all(float(x).is_integer() for x in ax.get_xticks())

def test_plots_leave_settings_alone(run):
    before = dict(matplotlib.rcParams)
    for draw in PLOTS.values(): draw(run)
    with theme("dark"): pass
    assert dict(matplotlib.rcParams) == before


# --- what is drawn

def test_nothing_is_told_by_colour_alone():
    assert len(set(MARKERS)) == len(COLORS) == len(set(HATCHES)) == 8
    assert len({(look.hatch, look.letter) for look in STAGE_STYLES.values()}) == len(STAGE_STYLES)


# --- colours, in the eyes of others (Machado et al. 2009, severity 1, in linear RGB)

MACHADO = {"protanopia": [[.152286, 1.052583, -.204868], [.114503, .786281, .099216], [-.003882, -.048116, 1.051998]],
           "deuteranopia": [[.367322, .860646, -.227968], [.280085, .672501, .047413], [-.011820, .042940, .968881]],
           "tritanopia": [[1.255528, -.076749, -.178779], [-.078411, .930809, .147602],
                          [.004733, .691367, .303900]], "none": np.eye(3)}

def lab(colors, vision):
    c = np.array([to_rgba(x)[:3] for x in colors])
    c = np.clip(np.where(c <= .04045, c / 12.92, ((c + .055) / 1.055)**2.4) @ np.array(MACHADO[vision]).T, 0, 1)
    xyz = c @ np.array([[.4124564, .2126729, .0193339], [.3575761, .7151522, .1191920],
                        [.1804375, .0721750, .9503041]]) / [.95047, 1., 1.08883]
    f = np.where(xyz > .008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], 1)

@pytest.mark.parametrize("vision", MACHADO)
@pytest.mark.parametrize("page", ["LIGHT", "DARK"])
def test_lines_of_the_panel_stay_apart(vision, page):
    "The lines that cross in the live picture: lane, limit, rise, chance and recovery."
    script = (Path(__file__).parents[1]/"esper_nb/show/canvas.js").read_text(encoding="utf-8")
    found = dict(re.findall(r'(\w+): "(#[0-9a-f]{6})"', re.search(rf"const {page} = {{(.*?)}};", script, re.DOTALL)[1]))
    x = lab([found[k] for k in ("focus", "limit", "rise", "chance", "good")], vision)
    apart = np.linalg.norm(x[:, None] - x[None], axis=-1)[np.triu_indices(len(x), 1)]
    assert apart.min() >= 15
    ground = {"LIGHT": "#ffffff", "DARK": "#1e1e1e"}[page]
    assert min(contrast(found[k], ground) for k in ("focus", "limit", "rise", "chance", "good")) >= 3

def test_interactive_mode_survives_the_first_figure():
    "A notebook's backend turns it on while the first figure is made; a plot must not turn it off again."
    with theme("light"): plt.ion()
    try: assert plt.isinteractive()
    finally: plt.ioff()


@pytest.mark.parametrize("low, high", [(2.12, 2.29), (.7, 1.5), (.6, 3.), (.05, 2.2), (.001, 40.), (1e-6, 1e4)])
def test_a_logarithmic_axis_has_two_numbers_at_least(low, high):
    rows = [dict(kind="epoch", lane=0, epoch=t) | {"train.loss": v} for t, v in enumerate((high, low))]
    ax = plot_run(rows).axes[1]
    ax.figure.canvas.draw()
    bottom, top = ax.get_ylim()
    seen = {t.get_text() for at, t in zip(ax.get_yticks(), ax.get_yticklabels()) if bottom <= at <= top}
    assert ax.get_yscale() == "log" and 2 <= len(seen - {""}) <= 12
