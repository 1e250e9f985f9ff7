"The report as a person opens it: wide and narrow, enlarged, in the dark, and without a word on the console."
import pytest
import torch

from conftest import open_browser
from esper_nb.run import begin_run, get_recipe, write_report

TINY = {"env.num_envs": 4, "env.horizon": 8, "env.limit": 256, "ppo.num_steps": 8, "ppo.num_updates": 2,
        "ppo.num_minibatches": 2, "env.faults": [dict(kind="nan", lane=2, epoch=3)]}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    "The report of one run, and that of two."
    torch.set_num_threads(1)
    out, runs = tmp_path_factory.mktemp("runs"), []
    for seed in (0, 1):
        runs.append(begin_run(get_recipe("digits_impaired", TINY | {"seed": seed}), out))
        runs[-1].drive(progress=False, say=lambda text: None)
    return dict(one=write_report(runs[0].folder.path), two=write_report([r.folder.path for r in runs]))

@pytest.mark.parametrize("which", ["one", "two"])
@pytest.mark.parametrize("look", ["light", "dark"])
def test_nothing_is_cut_and_nothing_is_asked_of_a_network(pages, tmp_path, which, look):
    with open_browser(tmp_path) as browser:
        page, asked = browser.page, []
        page.on("request", lambda r: asked.append(r.url))
        page.emulate_media(color_scheme=look)
        page.goto(f"file://{pages[which]}")
        lead = page.locator(".lead")
        assert lead.is_visible() and lead.bounding_box()["y"] < 300          # on the first screen
        for width, scale in ((1280, 1), (900, 1), (640, 1), (640, 2)):
            page.set_viewport_size(dict(width=width // scale, height=800 // scale))
            wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, (width, scale, wide)
            browser.shot(f"report-{which}-{look}-{width}-{scale}")
        for fold in page.locator("details").all(): fold.locator("summary").click()
        drawn = page.locator("img").evaluate_all("all => all.map(e => [e.alt, e.naturalWidth])")
        assert drawn and all(alt and size > 300 for alt, size in drawn), drawn
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(255, 255, 255)" if look == "light" else "rgb(30, 30, 30)")
        assert browser.errors == [] and [u for u in asked if not u.startswith(("file:", "data:"))] == []
