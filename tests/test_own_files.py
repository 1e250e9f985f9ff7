"Pictures and texts as they come from cameras, scanners and other systems: each trains, or is refused in one line."
import os

import numpy as np
import pytest
from PIL import Image

from esper_nb.record import read_rows
from esper_nb.run import main
from esper_nb.train import picture_files, read_folder, read_picture, task_from_folder

pytestmark = pytest.mark.usefixtures("one_thread")
BARS = np.zeros((8, 8, 3), np.uint8) # red left, dark blue below
BARS[:, :3, 0], BARS[5:, :, 2] = 220, 90

def turned(place, picture):
    "A picture as a camera held upright stores it: lying, with a word about it."
    exif = Image.Exif()
    exif[0x0112] = 6 # turn by 90° to the right
    picture.transpose(Image.Transpose.ROTATE_90).save(place, exif=exif)

def deep(place, picture): Image.fromarray(np.asarray(picture.convert("L")).astype(np.uint16) * 257).save(place)

PICTURES = { # ending, and what writes the file
    "cmyk": ("tif", lambda place, p: p.convert("CMYK").save(place)),
    "cmyk-jpeg": ("jpg", lambda place, p: p.convert("CMYK").save(place, quality=95)),
    "palette": ("png", lambda place, p: p.quantize(16).save(place)),
    "gif": ("gif", lambda place, p: p.quantize(16).save(place)),
    "see-through": ("png", lambda place, p: p.convert("RGBA").save(place)),
    "one-bit": ("png", lambda place, p: p.convert("1", dither=Image.Dither.NONE).save(place)),
    "turned": ("png", turned),
    "16-bit": ("png", deep),
    "16-bit-tiff": ("tif", deep)}

def folder_of(kind, place, n=6):
    "Two classes of pictures that differ in their brightness."
    ending, write = PICTURES[kind]
    for name, share in (("bright", 1.), ("dim", .6)):
        (place/name).mkdir(parents=True)
        for i in range(n):
            pixels = np.where(BARS > 0, BARS * share - i, 255 * (share == 1)).astype(np.uint8)
            write(place/name/f"{i}.{ending}", Image.fromarray(pixels))
    return place

def fitted(place, out, *more):
    "The status of the command that trains two networks on it for an epoch."
    small = [word for setting in ("lanes=2", "epochs=1", "batch_size=4") for word in ("--set", setting)]
    return main([str(word) for word in ("fit", "--data", place, *small, "--quiet", "--out", out, *more)])

def refused(place, out, capsys, *more):
    "The line with which the command refuses it, before it has made anything."
    assert fitted(place, out, *more) == 2 and not out.exists()
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("esper-nb: "), said
    return said


@pytest.mark.parametrize("kind", PICTURES)
def test_pictures_of_every_kind_are_seen_as_on_a_screen(kind, tmp_path):
    ending, write = PICTURES[kind]
    place = tmp_path/f"one.{ending}"
    write(place, Image.fromarray(BARS))
    grey = kind in ("16-bit", "16-bit-tiff", "one-bit")
    wanted = np.asarray(Image.fromarray(BARS).convert("L" if grey else "RGB").convert("RGB")).astype(int)
    if kind == "one-bit": wanted = 255 * (wanted > 127)
    seen = read_picture(place).astype(int)
    assert seen.shape == (8, 8, 3)
    # a JPEG is exact nowhere, and a palette has few colours
    assert np.abs(seen - wanted).mean() < (12 if kind == "cmyk-jpeg" else 4 if kind in ("palette", "gif") else .5)

@pytest.mark.slow
@pytest.mark.parametrize("kind", PICTURES)
def test_pictures_of_every_kind_train(kind, tmp_path):
    assert fitted(folder_of(kind, tmp_path/"pictures"), tmp_path/"runs", "--size", "8") == 0
    losses = [r["batch.loss"] for r in read_rows(tmp_path/"runs/pictures/rows.jsonl") if r["kind"] == "batch"]
    assert losses and np.isfinite(losses).all()

def test_kinds_may_be_mixed(tmp_path):
    for kind in PICTURES: folder_of(kind, tmp_path/kind, 1)
    for name in ("bright", "dim"):
        (tmp_path/"all"/name).mkdir(parents=True)
        for kind, (ending, _) in PICTURES.items():
            os.replace(tmp_path/kind/name/f"0.{ending}", tmp_path/"all"/name/f"{kind}.{ending}")
    found = read_folder(tmp_path/"all", 8)
    assert tuple(found.x.shape) == (2 * len(PICTURES), 8, 8, 3)

BROKEN = {"empty": lambda content: b"", "cut": lambda content: content[:-30],
          "text": lambda content: b"<html></html>" * 9,
          "changed": lambda content: content[:60] + bytes(40) + content[100:]}

@pytest.mark.parametrize("how", BROKEN)
def test_one_broken_picture_among_many_is_named(how, tmp_path, capsys):
    place = folder_of("see-through", tmp_path/"pictures", 150)
    one = place/"dim/77.png"
    one.write_bytes(BROKEN[how](one.read_bytes()))
    said = refused(place, tmp_path/"runs", capsys, "--size", "8")
    assert "dim/77.png cannot be read as a picture" in said and "take it away" in said and len(said) < 400

def test_many_broken_pictures_are_counted_in_one_line(tmp_path, capsys):
    place = folder_of("palette", tmp_path/"pictures", 40)
    for i in range(20): (place/f"bright/{i}.png").write_bytes(b"")
    assert "and 15 more like these" in refused(place, tmp_path/"runs", capsys)

def test_pixels_without_a_meaning_on_a_screen_are_refused(tmp_path, capsys):
    place = folder_of("cmyk", tmp_path/"pictures")
    Image.fromarray(np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)).save(place/"dim/0.tif")
    said = refused(place, tmp_path/"runs", capsys, "--size", "8")
    assert "dim/0.tif" in said and "8 or 16 bits each" in said

def test_what_windows_leaves_beside_pictures_is_no_class_of_them(tmp_path):
    place = folder_of("palette", tmp_path/"pictures")
    for name in ("Thumbs.db", "desktop.ini"): (place/"dim"/name).write_bytes(b"not a picture")
    (place/"__MACOSX").mkdir() # and what a Mac leaves in an archive
    assert len(picture_files(place)) == 12

@pytest.mark.parametrize("size", [0, "8", (8, 8)])
def test_a_size_is_a_whole_number(size, tmp_path):
    with pytest.raises(ValueError, match="size=.*expected a whole number of at least 1"):
        task_from_folder(folder_of("palette", tmp_path/"pictures"), size)

def test_too_few_pictures_are_not_taken_for_numbers(tmp_path, capsys):
    said = refused(folder_of("palette", tmp_path/"pictures", 1), tmp_path/"runs", capsys)
    assert "at least 3 examples of each" in said and "values" not in said


WORDS = "the quick brown fox jumps over the lazy dog. "
TEXTS = {"one-line": (WORDS * 120).encode(), "lines": (WORDS + "\n").encode() * 120,
         "windows": (WORDS + "\r\n").encode() * 120,
         "mark": b"\xef\xbb\xbf" + (WORDS * 120).encode(), "umlauts": ("Füße, 日本, 🙂. " * 200).encode()}

@pytest.mark.slow
@pytest.mark.parametrize("kind", TEXTS)
def test_texts_of_every_kind_train(kind, tmp_path):
    (tmp_path/"words.txt").write_bytes(TEXTS[kind])
    assert fitted(tmp_path/"words.txt", tmp_path/"runs") == 0
    losses = [r["batch.loss"] for r in read_rows(tmp_path/"runs/words/rows.jsonl") if r["kind"] == "batch"]
    assert losses and np.isfinite(losses).all()

NO_TEXTS = {
    "utf-16": ((WORDS * 120).encode("utf-16"), "no text in UTF-8 (byte 0)"),
    "utf-16-without-mark": ((WORDS * 120).encode("utf-16-le"), "it looks like UTF-16"),
    "utf-32": ((WORDS * 120).encode("utf-32-be"), "it looks like UTF-16, or is none"),
    "latin-1": ((WORDS * 60 + "Füße. " + WORDS * 60).encode("latin-1"), "no text in UTF-8"),
    "empty": (b"", "expected at least 1280"),
    "short": (b"to be or not to be\n", "expected at least 1280"),
    "one-byte": (b"a" * 5000, "of one nothing can be learnt"),
    "zeros": (bytes(5000), "looks like UTF-16, or is none")}

@pytest.mark.parametrize("kind", NO_TEXTS)
def test_what_is_no_text_is_refused_by_name(kind, tmp_path, capsys):
    content, words = NO_TEXTS[kind]
    (tmp_path/"words.txt").write_bytes(content)
    said = refused(tmp_path/"words.txt", tmp_path/"runs", capsys)
    assert words in said and "words.txt" in said
