"A page that watches a run: nothing grows, and it costs little. `WATCH_SECONDS=600` watches for ten minutes."
import os, sys

from conftest import ROOT
sys.path.insert(0, str(ROOT/"benchmarks"))
from dashboard_bench import cost, costs, grow, slope

SECONDS = int(os.environ.get("WATCH_SECONDS", 20))
# what a session keeps at most
MOST = dict(losses=1024, states=512, curves=1024, notes=200, incidents=200, rows=2000, _unrecovered=200,
            _unexplained=50, snapshots=200, reports=0)


def test_nothing_grows_while_a_page_watches():
    long = SECONDS >= 300
    samples = grow(SECONDS, every=15 if long else 4, warm=None if long else 4, shot="watch")
    for s in samples:
        # eight packets to an answer, and some on their way
        assert s["unanswered"] <= 12, s
        assert all(s["kept"][k] <= most for k, most in MOST.items()), s
    assert samples[-1]["steps"] > samples[0]["steps"] and samples[-1]["sent"] - samples[0]["sent"] <= 4 * SECONDS
    if not long: return
    for k, most in (("heap_mb", 2.), ("nodes", 200), ("listeners", 50), ("kernel_mb", 12.)):
        change = slope([s[k] for s in samples], 15)
        print(k, change)
        assert change["change"] < most, (k, change)

def test_a_page_that_watches_costs_little():
    found = costs(cost(1, 6))
    print("\nthe same run without and with a dashboard on a page:", found)
    # with a margin for a busy machine; the page quotes a quiet one
    assert 0 < found["updates_per_s"] <= 4 and found["share_pct"] < 8
