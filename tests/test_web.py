"A run in any browser: who gets the panel, who does not, and what is sent when it changes."
import json
import os
import re
import signal
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import warm

from esper_nb.record import RunFolder, encode_row, make_rows
from esper_nb.run import main, report
from esper_nb.show import follow_runs


@pytest.fixture
def run(tmp_path):
    "A run that has begun."
    return begin(tmp_path/"<mine>")

def begin(path):
    folder = RunFolder(path)
    folder.path.mkdir()
    folder.write_config(dict(fit=dict(lanes=2), task=dict(name="digits")))
    write(folder, make_rows("run", dict(run=dict(event="started", epochs=5, batches=2))), epoch(0))
    return folder

def epoch(number):
    held = dict(heldout=dict(accuracy_pp=[20. + number, 30. + number]))
    losses = [row for batch in range(2) for row in make_rows("batch", dict(batch=dict(loss=[.5, .25])), epoch=number,
                                                            batch=batch, step=2 * number + batch + 1)]
    return losses + make_rows("epoch", dict(seconds=30.), epoch=number) + make_rows("epoch", held, epoch=number)

def incident(number, lane=1):
    verdict = dict(step=2 * number, reason="non-finite", action="rollback", shown="nan", limit=None, mean=.5,
                   rollbacks_left=3, lost=2, restored_step=2 * number - 2)
    return make_rows("governor", dict(governor={k: [v] for k, v in verdict.items()}), lanes=[lane], epoch=number,
                     step=2 * number)

def write(folder, *several):
    with folder.rows_path.open("a") as file: file.writelines(encode_row(row) + "\n" for rows in several for row in rows)

@contextmanager
def served(folder, *more, beside=(), end=signal.SIGINT): # beside: folders laid over it
    "The address that the command prints, until it is interrupted."
    words = ["watch", *(str(f.path) for f in (folder, *beside)), "--web", "--every", "0.1", *more]
    with tempfile.TemporaryDirectory() as said:
        p = warm.begin(watch, words, said=said)
        out, err = Path(said, "out"), Path(said, "err")
        try:
            while p.is_alive() and not (out.exists() and "\n" in out.read_text()): time.sleep(.02)
            yield re.search(r"http://\S+:\d+/\S*", out.read_text().split("\n")[0])[0]
        finally:
            os.kill(p.pid, end)
            p.join(30)
        after = out.read_text().split("\n")[1:], err.read_text()
        assert p.exitcode == 0 and after == ([""], ""), after

def watch(words):
    "Run the command without pictures, which take most of the time."
    report.picture_html = lambda draw, alt: ""
    return main(words)

def get(address, **headers): # status, headers, text
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=60) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as e: return e.code, e.headers, e.read().decode()

def place_of(address, page): # address of another page
    place, _, query = address.partition("?")
    return place + page + (f"?{query}" if query else "")

@contextmanager
def events(address):
    "Packets of the stream that a page reads."
    with urllib.request.urlopen(place_of(address, "events"), timeout=60) as stream:
        assert stream.headers["Content-Type"].startswith("text/event-stream")
        yield (json.loads(line[6:]) for line in stream if line.startswith(b"data: "))

def until(packets, words): # the first packet whose log or status holds some words
    return next(p for p in packets if words in "".join(p["html"].values()))


def test_a_panel_is_shown_to_who_knows_the_token(run):
    with served(run) as address:
        place, token = address.split("?token=")
        assert len(token) > 30
        for page in ("", "events", "report"):
            for wrong in ("", "?token=", f"?token={token[:-1]}", "?token=%C3%A9%00"):
                status, headers, text = get(f"{place}{page}{wrong}")
                assert status == 403 and "epoch" not in text and headers["X-Frame-Options"] == "DENY"
        status, headers, text = get(address)
        assert status == 200 and "&lt;mine&gt;" in text and "<mine>" not in text and f"report?token={token}" in text
        assert headers["Referrer-Policy"] == "no-referrer" and headers["Cache-Control"] == "no-store"
        assert "script-src 'self';" in headers["Content-Security-Policy"] and "unsafe-eval" not in str(headers)
        for script in ("canvas.js", "page.js"): assert get(place + script)[0] == 200
        assert get(f"{place}panel.css")[0] == 404 and get(f"{place}../run/report.py")[0] == 404
        assert "epoch 1 of 5" in get(place_of(address, "report"))[2]

def test_several_browsers_receive_what_happens_each_from_the_beginning(run):
    with served(run) as address, events(address) as first:
        begun = next(first)
        assert begun["head"]["lanes"] == 2 and begun["number"] == 1
        write(run, epoch(1), incident(1), epoch(2))
        assert "head" not in until(first, "lane 1: non-finite")
        with events(address) as second:
            late = next(second)
            assert late["head"]["lanes"] == 2 and "lane 1: non-finite" in late["html"]["log"]
            write(run, epoch(3), make_rows("run", dict(run=dict(event="finished"))))
            for packets in (first, second): assert "epoch 4 of 5" in until(packets, "✓ done")["html"]["status"]

def test_without_a_token_only_this_machines_names_are_answered(run):
    with served(run, "--no-token") as address:
        assert "?" not in address and get(address)[0] == 200
        assert get(address, Host="elsewhere.example")[0] == 403
        assert get(place_of(address, "events"), Host="elsewhere.example")[0] == 403

def test_the_network_may_ask_where_that_was_wanted(run):
    with served(run, "--no-token", "--address", "0.0.0.0") as address:
        port, name = re.search(r":(\d+)/", address)[1], re.search(r"//(.+):", address)[1]
        here = f"http://127.0.0.1:{port}/"
        assert name != "0.0.0.0"
        for host in (name, f"{name}.local", "192.168.1.7", "localhost"):
            assert get(here, Host=f"{host}:{port}")[0] == 200, host
        assert get(here, Host=f"{name}.elsewhere.example")[0] == 403

def test_runs_are_laid_over_each_other(run, tmp_path):
    other = begin(tmp_path/"other")
    with served(run, beside=[other]) as address:
        with events(address) as packets:
            head = next(packets)["head"]
            assert (head["lanes"], head["names"]) == (2, ["<mine>", "other"])
            write(other, epoch(1), incident(1), epoch(2))
            write(run, epoch(1), epoch(2))
            assert "other, lane 1: non-finite" in until(packets, "non-finite")["html"]["log"]
        assert "&lt;mine&gt;, other" in get(address)[2]
        assert "Runs side by side" in get(place_of(address, "report"))[2]
        for folder in (run, other): write(folder, make_rows("run", dict(run=dict(event="finished"))))
        with events(address) as packets: words = until(packets, "✓ done")["html"]
        assert "batch 6" in words["status"] and "done after 6 batches" in words["log"]

def test_runs_that_count_otherwise_are_not_mixed(run, tmp_path):
    other = begin(tmp_path/"other")
    other.write_config(dict(run=dict(ppo=dict(num_updates=5, num_steps=2), env=dict(num_envs=2))))
    with pytest.raises(ValueError, match="<mine> counts batches but other counts steps"):
        follow_runs([run.path, other.path])

def test_several_runs_need_a_browser(run, tmp_path, capsys):
    assert main(["watch", str(run.path), str(run.path)]) == 2
    assert "--web" in capsys.readouterr().err
