"Runs of many hours: rows, frames, clocks and memory."
import gc
import os
import resource
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest

from esper_nb import FitConfig, Session, new_population
from esper_nb.grow import CNNConfig
from esper_nb.record.rows import decode_row, encode_row
from esper_nb.record import RunFolder
from esper_nb.run.follow import RunStatus, watch_text
from esper_nb.train import get_task
from esper_nb.show import Feed, Frame, FrameSource, PopulationSource, RowsSource

pytestmark = pytest.mark.usefixtures("one_thread")
LONG = "ESPER_NB_LONG" in os.environ # in whole lengths: a million rows, 2,000 epochs


def a_row(update, lane=0, **more):
    place = dict(kind="step", update=update, epoch=update % 12, lane=lane)
    return place | {"reward.total": .5, "action.op": "wait"} | more


def test_rows_that_are_read_share_their_names_and_words():
    one, other = (decode_row(encode_row(a_row(k))) for k in range(2))
    assert all(a is b for a, b in zip(one, other))
    assert one["kind"] is other["kind"] and one["action.op"] is other["action.op"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_report_of_many_rows_needs_less_than_a_kilobyte_a_row(tmp_path):
    folder, updates = RunFolder(tmp_path/"run"), 5000 if LONG else 1500
    folder.path.mkdir()
    folder.write_config(dict(run=dict(name="long", ppo=dict(num_updates=updates), env=dict(num_envs=16))))
    more = {f"reward.term{k}": .25 * k for k in range(5)} | {f"observation.seen{k}": .5 * k for k in range(4)}
    with open(folder.rows_path, "w") as file:
        for update in range(updates):
            for k in range(200): file.write(encode_row(a_row(update, k % 16, **more)) + "\n")
    call = f"from esper_nb.run.report import write_report; write_report({str(folder.path)!r})"
    peak = "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    done = subprocess.run([sys.executable, "-c", f"{call}; {peak}"], capture_output=True, text=True, check=True)
    needed = int(done.stdout.split()[-1])
    print(f"{200 * updates:,} rows: {needed:,} kB")
    assert needed < min(120_000 + 200 * updates, 10**6) # matplotlib and the rest of us take some 100,000
    assert (folder.path/"report.html").stat().st_size > 1000


class Page:
    "A browser that answers slowly."
    def __init__(self): self.packets = []
    def on_msg(self, callback): self.callback = callback
    def send(self, content, buffers): self.packets.append(sum(map(len, buffers)))


def test_a_thousand_frames_a_second_drop_packets_and_not_the_run():
    loss = np.full((1, 4), .5)
    session = Session(FrameSource((Frame(loss) for _ in range(3000)), lanes=4, total=3000), capacity=256)
    page = Page()
    feed = Feed(session, page, interval=.25)
    feed.start()
    page.callback(page, dict(kind="hello"), None)
    begun = time.perf_counter()
    session.start()
    session.wait()
    took = time.perf_counter() - begun
    feed.update()
    feed.close()
    assert session.history.steps == session.history.x == 3000 # every frame was filed
    assert len(page.packets) <= took / .25 + 3 # however many frames there were
    assert max(page.packets) <= 4 * (256 * 5 + 256 * session.history.layout.width + 256 * 16) # bytes
    session.close()


def memory_of(session, steps):
    session.step(steps)
    assert session.wait(1800) == "paused"
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.slow
def test_hundreds_of_epochs_keep_their_memory():
    host = CNNConfig(classes=10, in_channels=1, size=8, blocks=2, base=2, kernel=1, pools=1)
    epochs, task = 2000 if LONG else 500, get_task("digits").replace(host=host, slots=("r0c0",), batch_size=32)
    pop = new_population(task, FitConfig(lanes=2, epochs=epochs + 100), data=task.load(limit=32))
    session = Session(PopulationSource(pop), capacity=64, rows=500)
    tracemalloc.start()
    memory_of(session, 100)
    first, resident = memory_of(session, 50), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    later = memory_of(session, epochs - 150)
    tracemalloc.stop()
    session.close()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident
    print(f"{epochs:,} epochs: after epoch 150 {later - first:,} bytes of Python and {grown:,} kB of the process more")
    assert pop.epoch.tolist() == [epochs, epochs]
    assert later - first < 100_000 and grown < 30_000


def test_ten_hours_and_clocks_that_jump_change_no_figure(tmp_path):
    "Rows carry the clock of their machine; what is left is told by measured seconds, and nothing is sorted by time."
    folder = RunFolder(tmp_path/"run")
    folder.path.mkdir()
    folder.write_config(dict(run=dict(name="long", ppo=dict(num_updates=600, num_steps=1), env=dict(num_envs=1))))
    clock = [1e9 + 60 * k for k in range(300)] + [5e8 + 60 * k for k in range(300)] # back by sixteen years
    with open(folder.rows_path, "w") as file:
        for k, now in enumerate(clock, 1):
            epoch = {"kind": "epoch", "lane": 0, "epoch": k, "heldout.accuracy_pp": 50., "train.loss": .5, "time": now}
            update = {"kind": "update", "lane": None, "update": k, "update.seconds": 60., "time": now}
            file.writelines(encode_row(row) + "\n" for row in (epoch, update))
    os.utime(folder.rows_path, (4e9, 4e9)) # written in the future
    source, frames = RowsSource(folder.path, every=.001), 0
    begun = time.monotonic()
    while frames < 600 and time.monotonic() - begun < 20: frames += len(source.step().loss)
    assert frames == 600 # the last one too, though nothing follows it
    (folder.path/"final.jsonl").touch()
    lines = []
    watch_text(folder.path, say=lines.append)
    assert "update 1 of 600" in lines[0] and "left" not in lines[0] # it is over
    goes_on = RunStatus(folder.config()).lines({"kind": "update", "lane": None, "update": 1, "update.seconds": 60.})
    assert goes_on == ["▶ update 1 of 600, 0 rollbacks, about 10 hours left"]
    assert lines[-1].startswith("✓ update 600 of 600")
