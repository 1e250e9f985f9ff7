"A run in a browser: who gets the page, who does not, and when it changes."
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

from esper_nb.record import RunFolder, encode_row, make_rows


@pytest.fixture
def run(tmp_path):
    "A run that has begun."
    folder = RunFolder(tmp_path/"mine")
    folder.path.mkdir()
    folder.write_config(dict(fit=dict(lanes=2), task=dict(name="<script>digits")))
    write(folder, make_rows("run", dict(run=dict(event="started", epochs=5))), epoch(0))
    return folder

def epoch(number):
    held = dict(heldout=dict(accuracy_pp=[20. + number, 30. + number]))
    return make_rows("epoch", dict(seconds=30.), epoch=number) + make_rows("epoch", held, epoch=number)

def write(folder, *several):
    with folder.rows_path.open("a") as file: file.writelines(encode_row(row) + "\n" for rows in several for row in rows)

@contextmanager
def served(folder, *more):
    "The address that the command prints, until it is interrupted."
    # a shell's background process ignores SIGINT, and so would its children
    words = ["watch", str(folder.path), "--web", "--every", "0.1", *more]
    code = ("import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
            "from esper_nb.run import cli, report; report.picture_html = lambda draw, alt: ''; "
            f"sys.exit(cli.main({words!r}))") # pictures take most of the time
    p = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                         env=os.environ | {"PYTHONUNBUFFERED": "1"})
    try:
        line = p.stdout.readline()
        yield re.search(r"http://127\.0\.0\.1:\d+/\S*", line)[0]
    finally:
        p.send_signal(signal.SIGINT)
        said = p.communicate(timeout=30)
    assert p.returncode == 0 and said == ("", ""), said

def get(address, **headers): # status, headers, text
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=60) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as e: return e.code, e.headers, e.read().decode()


def test_a_run_is_shown_to_who_knows_the_token_until_it_is_over(run):
    with served(run) as address:
        place, token = address.split("?token=")
        assert len(token) > 30
        for wrong in (place, f"{place}?token=", f"{place}?token={token[:-1]}", f"{place}?token=é%00"):
            status, _, text = get(wrong.replace("é", "%C3%A9"))
            assert status == 403 and "epoch" not in text
        status, headers, text = get(address)
        assert status == 200 and "epoch 1 of 5" in text and int(headers["Refresh"]) >= 2
        assert "<script" not in text and headers["Referrer-Policy"] == "no-referrer"
        write(run, epoch(1), make_rows("run", dict(run=dict(event="finished"))))
        while "after 2 epochs" not in text: _, headers, text = get(address)
        assert "Refresh" not in headers

def test_without_a_token_only_this_machines_names_are_answered(run):
    with served(run, "--no-token") as address:
        assert "?" not in address and get(address)[0] == 200
        assert get(address, Host="elsewhere.example")[0] == 404
