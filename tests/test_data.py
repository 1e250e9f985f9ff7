"Data for many lanes against plain references, over shapes, splits and sources."
import hashlib, math, pickle
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torchvision.datasets import CIFAR10
from torchvision.transforms import functional as TF

from esper_nb.train.data import Epoch, ImageData, TextData
from esper_nb.train.datasets import balanced_order, load_cifar10, load_prose, load_text_file, synthetic_cifar10
from esper_nb.train.yardsticks import yardsticks


def make(n=24, h=6, w=5, c=3, classes=4, dtype="uint8", **kw):
    g = torch.Generator().manual_seed(n * h + w * c)
    size = n + 7 + 9
    x = torch.randint(0, 256, (size, h, w, c), dtype=torch.uint8, generator=g)
    if dtype == "float": x = x / 255
    y = torch.arange(size) % classes
    cut = [n, n + 7]
    kw = dict(mean=(.4,), std=(.25,)) | kw
    (a, b, d), (p, q, r) = x.tensor_split(cut), y.tensor_split(cut)
    return ImageData(a, p, b, q, d, r, classes=classes, **kw), x, y


def plain(data, x, draws, b, lane):
    "One lane's batch as torchvision would make it, image by image."
    order, dy, dx, mirror = (draws[k][b][:, lane].tolist() for k in ("order", "dy", "dx", "mirror"))
    out = []
    for i, top, left, m in zip(order, dy, dx, mirror):
        image = TF.crop(TF.pad(x[i].permute(2, 0, 1), data.pad), top, left, *data.shape[1:])
        out.append(TF.hflip(image) if m else image)
    return torch.stack(out)


@settings(deadline=None, max_examples=20)
@given(shape=st.tuples(st.integers(1, 7), st.integers(1, 7), st.integers(1, 4)), pad=st.integers(0, 3),
       flip=st.booleans(), lanes=st.integers(1, 5), batch=st.integers(1, 24),
       dtype=st.sampled_from(["uint8", "float"]), epoch=st.integers(0, 3))
def test_batch_equals_torchvision_loop(shape, pad, flip, lanes, batch, dtype, epoch):
    h, w, c = shape
    data, x, y = make(h=h, w=w, c=c, dtype=dtype, pad=pad, flip=flip)
    made = data.epoch(5, range(lanes), epoch, batch)
    assert len(made) == 24 // batch
    for b, (got, labels) in enumerate(made):
        assert got.shape == (batch, lanes * c, h, w) and got.dtype == torch.float32 and labels.dtype == torch.int64
        assert got.is_contiguous(memory_format=torch.channels_last)
        for lane in range(lanes):
            want = plain(data, x, made.draws, b, lane)
            own = got.unflatten(1, (lanes, c))[:, lane]
            assert torch.equal(own, want.float() * data.scale[:, None, None] + data.shift[:, None, None])
            unit = want.float() / (255 if dtype == "uint8" else 1)
            torch.testing.assert_close(own, TF.normalize(unit, data.mean.tolist(), data.std.tolist()), atol=2e-6,
                                       rtol=2e-6)
            assert torch.equal(labels[:, lane], y[made.draws["order"][b][:, lane].long()])


def test_long_addresses_agree_with_short_ones():
    data, _, _ = make(pad=2, flip=True)
    short = data.epoch(0, range(3), 0, 8)
    order, dy, dx, mirror = (short.draws[k].long() for k in ("order", "dy", "dx", "mirror"))
    assert short.draws["order"].dtype == torch.int32
    long = Epoch(dict(order=order), data.reader(order, (dy, dx), mirror))
    for a, b in zip(short, long, strict=True): assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


def test_lanes_draw_from_the_seed_key_they_are_given():
    for data in (make(pad=2, flip=True)[0], letters()):
        def elsewhere(seed, lane): return seed + 5, lane + 2
        moved = data.to("cpu")
        moved.seed_key = elsewhere
        for a, b in zip(moved.epoch(0, [0, 3], 1, 4), data.epoch(5, [2, 5], 1, 4), strict=True):
            assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
        assert not torch.equal(moved.epoch(0, [0], 1, 4)[0][0], data.epoch(0, [0], 1, 4)[0][0])


def test_epochs_lanes_and_seeds_differ_and_batch_size_does_not_matter():
    data, _, _ = make(n=60, pad=1)
    def order(seed, lane, epoch, b=20):
        return tuple(data.epoch(seed, [lane], epoch, b).draws["order"].flatten().tolist())
    assert len({order(0, 0, 0), order(0, 0, 1), order(0, 1, 0), order(1, 0, 0)}) == 4
    assert order(0, 0, 0) == order(0, 0, 0, 15) == order(0, 0, 0, 60)
    assert sorted(order(0, 0, 0)) == list(range(60))
    assert len(set(order(0, 0, 0, 7))) == 56  # the tail that fills no batch is left out


def test_every_offset_and_both_mirrors_occur():
    data, _, _ = make(n=600, pad=2, flip=True)
    draws = data.epoch(0, [0], 0, 600).draws
    assert set(draws["dy"].flatten().tolist()) == set(draws["dx"].flatten().tolist()) == set(range(5))
    assert 240 < int(draws["mirror"].sum()) < 360
    assert not make(n=60)[0].epoch(0, [0], 0, 60).draws["mirror"].any()


@pytest.mark.parametrize("dtype", ["uint8", "float"])
def test_evaluation_is_clean_complete_and_leaves_the_data_alone(dtype):
    data, x, y = make(pad=2, flip=True, dtype=dtype)
    for split, part in dict(train=slice(0, 24), heldout=slice(24, 31), test=slice(31, 40)).items():
        for _ in range(2):  # a second pass sees the same: nothing was normalised in place
            batches = list(data.evaluate(split, 4))
            got, labels = torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches])
            plain = x[part].permute(0, 3, 1, 2).float() * data.scale[:, None, None] + data.shift[:, None, None]
            assert torch.equal(got, plain)
            assert torch.equal(labels, y[part])
        assert all(b[0].is_contiguous(memory_format=torch.channels_last) for b in batches)
        assert [len(b[1]) for b in batches[:-1]] == [4] * (len(batches) - 1) and 0 < len(batches[-1][1]) <= 4


def test_epoch_is_a_finite_sequence():
    made = make()[0].epoch(0, [0], 0, 10)
    assert len(list(made)) == len(made) == 2
    for b in (-1, 2):
        with pytest.raises(IndexError, match="2 batches"): made[b]


zeros = np.zeros((6, 4, 4, 1), "uint8")
nan = np.full((6, 4, 4, 1), np.nan, "float32")
inf = np.where(np.arange(6)[:, None, None, None] == 2, np.inf, np.zeros((6, 4, 4, 1)))
labels = np.array([0, 1, 2, 0, 1, 2])

bad_images = [
    (dict(train_x=nan), ["non-finite values in train_x=96", "expected 0", "repair"]),
    (dict(heldout_x=inf), ["non-finite values in heldout_x=16", "expected 0", "repair"]),
    (dict(test_x=zeros.astype("int32")), ["test_x.dtype=torch.int32", "expected torch.uint8", "convert"]),
    (dict(train_x=zeros[..., 0]), ["train_x.shape=(6, 4, 4)", "expected (N, H, W, C)", "add a channel axis"]),
    (dict(train_x=zeros[:0], train_y=labels[:0]),
     ["len(train_x)=0", "expected at least one", "give every split some data"]),
    (dict(heldout_x=zeros[:0], heldout_y=labels[:0]), ["len(heldout_x)=0", "expected at least one", "give"]),
    (dict(test_y=labels[:5]), ["test_y.shape=(5,)", "expected (6,)", "one label for each image"]),
    (dict(train_y=labels + 1), ["train_y range=(1, 3)", "expected labels within 0..2", "renumber"]),
    (dict(train_y=labels - 1), ["train_y range=(-1, 1)", "expected labels within 0..2", "renumber"]),
    (dict(train_y=labels.astype("float32")), ["train_y.dtype=torch.float32", "expected an integer", "convert"]),
    (dict(test_x=zeros[:, :3]), ["test_x.shape=(6, 3, 4, 1)", "expected (N, 4, 4, 1)", "training split"]),
    (dict(test_x=zeros / 2.), ["test_x.dtype=torch.float32", "expected torch.uint8", "training split"]),
    (dict(train_x=zeros + 2., heldout_x=zeros * 1., test_x=zeros * 1.),
     ["train_x range=(2.0, 2.0)", "expected values within 0..1", "rescale"]),
    (dict(train_x=zeros + 17, peak=16), ["train_x range=(17.0, 17.0)", "expected values within 0..16", "rescale"]),
    (dict(std=(0.,)), ["std=[0.0]", "expected numbers above 0", "takes std 1"]),
    (dict(mean=(.1, .2)), ["mean=[0.1, 0.2]", "expected 1 or 1 finite numbers", "units of 0..1"]),
    (dict(mean=(math.nan,)), ["mean=[nan]", "expected 1 or 1 finite", "units of 0..1"]),
    (dict(pad=-1), ["pad=-1", "expected a whole number", "at least 0"]),
    (dict(classes=1), ["classes=1", "expected a whole number", "at least 2"]),
]

@pytest.mark.parametrize("change, words", bad_images, ids=[w[0] for _, w in bad_images])
def test_bad_images_are_refused(change, words):
    right = dict(train_x=zeros, train_y=labels, heldout_x=zeros, heldout_y=labels, test_x=zeros, test_y=labels,
                 classes=3)
    ImageData(**right)
    with pytest.raises(ValueError) as e: ImageData(**right | change)
    for w in words: assert w in str(e.value)


@pytest.mark.parametrize("call, words", [
    (lambda d: d.epoch(0, [0], 0, 25), ["batch_size=25", "at most 24", "smaller batch"]),
    (lambda d: d.epoch(0, [0], 0, 0), ["batch_size=0", "at least 1"]),
    (lambda d: d.epoch(0, [0], 0, -8), ["batch_size=-8", "at least 1"]),
    (lambda d: d.epoch(0, [], 0, 8), ["lanes=[]", "at least one lane", "range(4)"]),
    (lambda d: d.epoch(0, [-1], 0, 8), ["lane=-1", "at least 0"]),
    (lambda d: d.epoch(0, [0], -1, 8), ["epoch=-1", "at least 0"]),
    (lambda d: d.epoch(0, [0, 1], [0], 8), ["epoch=[0]", "one for each of the 2 lanes"]),
    (lambda d: d.evaluate("valid", 8), ["split='valid'", "'train', 'heldout' or 'test'"]),
    (lambda d: d.evaluate("test", 0), ["batch_size=0", "at least 1"]),
])
def test_bad_requests_are_refused_at_once(call, words):
    for data in (make()[0], letters(24 * 5 + 5, block=5)):
        with pytest.raises(ValueError) as e: call(data)
        for w in words: assert w in str(e.value)


# sources


@settings(deadline=None, max_examples=15)
@given(counts=st.lists(st.integers(1, 60), min_size=2, max_size=6))
def test_balanced_order_is_a_permutation_with_even_stretches(counts):
    y = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    order = balanced_order(y, "test")
    assert sorted(order.tolist()) == list(range(len(y))) and torch.equal(order, balanced_order(y, "test"))
    half = torch.bincount(y[order][:len(y) // 2], minlength=len(counts))
    assert (half - torch.tensor(counts) / 2).abs().max() <= len(counts) / 2 + 1


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    "CIFAR-10's own file format with 60 training and 20 test images."
    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()
    rng = np.random.default_rng(0)
    def write(name, d):
        (folder / name).write_bytes(pickle.dumps(d))
        return [name, hashlib.md5((folder / name).read_bytes()).hexdigest()]
    def part(k, n):
        return dict(data=rng.integers(0, 256, (n, 3072), dtype="uint8"), labels=[(k + i) % 10 for i in range(n)])
    monkeypatch.setattr(CIFAR10, "train_list", [write(f"data_batch_{k}", part(k, 12)) for k in range(1, 6)])
    monkeypatch.setattr(CIFAR10, "test_list", [write("test_batch", part(0, 20))])
    name, md5 = write("batches.meta", dict(label_names=list("abcdefghij")))
    monkeypatch.setattr(CIFAR10, "meta", dict(filename=name, key="label_names", md5=md5))
    return tmp_path


def test_cifar10_splits_are_disjoint_and_complete(cifar):
    data, raw = load_cifar10(cifar, heldout=20), CIFAR10(cifar, train=True)
    assert data.num_train == 40 and len(data.y["heldout"]) == 20 and len(data.y["test"]) == 20
    assert data.shape == (3, 32, 32)
    def images(s): return [bytes(i) for i in (data.x[s][:, 4:-4, 4:-4] if s == "train" else data.x[s]).numpy()]
    train, held, test = map(images, ("train", "heldout", "test"))
    assert not set(train) & set(held) and sorted(train + held) == sorted(bytes(i) for i in raw.data)
    assert test == [bytes(i) for i in CIFAR10(cifar, train=False).data]  # test is the test split, in its order
    label = {bytes(i): t for i, t in zip(raw.data, raw.targets)}
    for s, part in dict(train=train, heldout=held).items(): assert [label[i] for i in part] == data.y[s].tolist()
    assert data.pad == 4 and data.flip and load_cifar10(cifar, heldout=20, limit=8).num_train == 8


def test_cifar10_files_that_are_missing_or_damaged(cifar, tmp_path):
    with pytest.raises(FileNotFoundError) as e: load_cifar10(tmp_path / "nowhere")
    for w in (str(tmp_path / "nowhere"), "expected", "cifar-10-batches-py", "download=True"): assert w in str(e.value)
    (cifar / CIFAR10.base_folder / "data_batch_3").write_bytes(b"short")
    with pytest.raises(FileNotFoundError) as e: load_cifar10(cifar)
    for w in (str(cifar), "damaged", "expected", "delete it and fetch it again", "download=True"):
        assert w in str(e.value)


def test_heldout_must_leave_something_to_train_on(cifar):
    with pytest.raises(ValueError, match="heldout=60, expected fewer than the 60"): load_cifar10(cifar, heldout=60)


def test_synthetic_images_can_be_learned():
    data = synthetic_cifar10(300)
    assert data.num_train == 300 and data.shape == (3, 32, 32)
    mean = torch.zeros(10, 3 * 32 * 32)
    for x, y in data.evaluate("train", 300): mean.index_add_(0, y, torch.nn.functional.normalize(x.flatten(1)))
    def nearest(x):
        return (torch.nn.functional.normalize(x.flatten(1)) @ torch.nn.functional.normalize(mean).T).argmax(1)
    right = sum(int((nearest(x) == y).sum()) for x, y in data.evaluate("heldout", 60))
    assert right / len(data.y["heldout"]) > .6
    assert torch.equal(synthetic_cifar10(300).x["train"], data.x["train"])
    assert not torch.equal(synthetic_cifar10(300, seed=1).x["train"], data.x["train"])


# text

def letters(n=107, block=10):
    return TextData(*(torch.arange(k) % 26 for k in (n, 60, 60)), vocab="abcdefghijklmnopqrstuvwxyz", block=block)


@settings(deadline=None, max_examples=20)
@given(n=st.integers(20, 200), block=st.integers(1, 10), lanes=st.integers(1, 4), batch=st.integers(1, 5))
def test_windows_are_whole_and_do_not_overlap(n, block, lanes, batch):
    tokens = torch.randint(0, 7, (n,), generator=torch.Generator().manual_seed(n))
    data = TextData(tokens, tokens, tokens, vocab="abcdefg", block=block)
    if batch > data.num_train: return
    made = data.epoch(2, range(lanes), 1, batch)
    for b, (x, y) in enumerate(made):
        assert x.shape == y.shape == (batch, block, lanes) and x.dtype == y.dtype == torch.int64
        for i in range(batch):
            for lane in range(lanes):
                s = int(made.draws["start"][b, i, lane])
                assert torch.equal(x[i, :, lane], tokens[s:s + block])
                assert torch.equal(y[i, :, lane], tokens[s + 1:s + 1 + block])
    for lane in made.draws["start"].flatten(0, 1).T:
        gaps = lane.sort().values.diff()
        assert (gaps >= block).all() and (gaps % block == 0).all()
    x = torch.cat([x for x, _ in data.evaluate("test", batch)]).flatten()
    y = torch.cat([y for _, y in data.evaluate("test", batch)]).flatten()
    assert torch.equal(x, tokens[:len(x)]) and torch.equal(y, tokens[1:len(x) + 1]) and len(tokens) - 1 - len(x) < block


@pytest.mark.parametrize("change, words", [
    (dict(train=torch.arange(15) % 26), ["len(train)=15", "at least 20 tokens", "smaller block"]),
    (dict(test=torch.arange(10) % 26), ["len(test)=10", "more than block=10", "use more text"]),
    (dict(heldout=torch.arange(60)), ["heldout token range=(0, 59)", "within 0..25"]),
    (dict(train=torch.rand(60)), ["train=(torch.float32", "1-D tensor of integer tokens"]),
    (dict(train=torch.zeros(4, 40, dtype=torch.int64)), ["train=(torch.int64, (4, 40))", "1-D tensor"]),
    (dict(block=0), ["block=0", "at least 1"]),
])
def test_bad_texts_are_refused(change, words):
    splits = {s: torch.arange(k) % 26 for s, k in dict(train=100, heldout=60, test=60).items()}
    right = splits | dict(vocab="abcdefghijklmnopqrstuvwxyz", block=10)
    TextData(**right)
    with pytest.raises(ValueError) as e: TextData(**right | change)
    for w in words: assert w in str(e.value)


def test_prose_is_the_same_everywhere_it_is_read():
    data = load_prose(block=32)
    assert data.classes == 96 and 2 < data.chance_loss < math.log(96)
    assert data.decode(data.encode("Grow, blend\n& keep.")) == "Grow, blend\n& keep."
    assert load_prose(block=32, limit=50).num_train == 50
    text = "".join(data.decode(data.tokens[s]) for s in ("train", "heldout", "test"))  # contiguous, nothing twice
    assert len(text) == sum(map(len, data.tokens.values())) and "\n\n" not in text and text.isascii()


def test_text_file_reads_bytes(tmp_path):
    path = tmp_path / "story.txt"
    with pytest.raises(FileNotFoundError) as e: load_text_file(path)
    for w in (str(path), "expected a UTF-8 text", "TinyStoriesV2-GPT4-train.txt", "save"): assert w in str(e.value)
    story = "Ein Mädchen fand 3 € im Gras. " * 30
    path.write_text(story, encoding="utf-8")
    data = load_text_file(path, block=8)
    assert data.classes == 256 and data.decode(torch.cat(list(data.tokens.values()))) == story
    assert data.decode(data.encode("3 €")) == "3 €"
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="more than block=256"): load_text_file(path)


def test_to_shares_what_is_already_there():
    data, _, _ = make(pad=1)
    other = data.to("cpu")
    assert other is not data and other.x["train"].data_ptr() == data.x["train"].data_ptr()
    assert other.chance_loss == data.chance_loss
    with pytest.raises(ValueError, match="cuda0"): data.to("cuda0")


@pytest.mark.cuda
@pytest.mark.parametrize("source", [lambda: make(pad=2, flip=True)[0], letters])
def test_cuda_gives_the_same_batches(source):
    data = source()
    there = data.to("cuda")
    for (x, y), (u, v) in zip(data.epoch(0, range(3), 1, 4), there.epoch(0, range(3), 1, 4)):
        assert u.device.type == "cuda" and torch.equal(x, u.cpu()) and torch.equal(y, v.cpu())
    for (x, y), (u, v) in zip(data.evaluate("heldout", 4), there.evaluate("heldout", 4)):
        assert torch.equal(x, u.cpu()) and torch.equal(y, v.cpu())


@pytest.mark.cuda
@pytest.mark.parametrize("source", [lambda: make(pad=2, flip=True)[0], letters])
def test_cuda_draws_ahead_are_those_of_the_epoch(source):
    "Other lanes, an epoch again, different epochs, another seed, other streams: never what was drawn for others."
    data = source()
    there = pickle.loads(pickle.dumps(data)).to("cuda")
    for seed, lanes, epoch in ((0, (0, 1), 0), (0, (0, 1), 1), (0, (0, 1), 1), (0, (1, 2), 2), (0, (0,), 2),
                               (0, (1, 2), 3), (0, (1, 2), [4, 7]), (0, (1, 2), [5, 8]),
                               (1, (1, 2), [6, 9]), (0, (1, 2), [7, 10])):
        for (x, y), (u, v) in zip(data.epoch(seed, lanes, epoch, 4), there.epoch(seed, lanes, epoch, 4), strict=True):
            assert torch.equal(x, u.cpu()) and torch.equal(y, v.cpu())
    data.seed_key = there.seed_key = lambda seed, lane: (seed + 5, lane)
    x, u = data.epoch(0, (1, 2), [8, 11], 4)[0][0], there.epoch(0, (1, 2), [8, 11], 4)[0][0]
    assert torch.equal(x, u.cpu())


@pytest.mark.parametrize("tokens", [7, 300])
def test_counts_of_tokens_in_a_row_are_those_of_a_dictionary(tokens):
    "The longest context that was seen decides, up to three tokens; of equally common tokens the smallest is taken."
    g = torch.Generator().manual_seed(tokens)
    train = (torch.randint(0, tokens, (900,), generator=g) * torch.randint(0, 2, (900,), generator=g))
    test = torch.cat([train[100:300], torch.randint(0, tokens, (200,), generator=g)])
    data = TextData(train, train, test, vocab=[str(k) for k in range(tokens)], block=5)
    after = defaultdict(Counter)
    for i, token in enumerate(train.tolist()):
        for k in range(4):
            if i >= k: after[tuple(train[i - k:i].tolist())][token] += 1
    def answer(context):
        while context not in after: context = context[1:]
        return min(after[context], key=lambda t: (-after[context][t], t))
    right = [answer(tuple(row[max(0, t - 2):t + 1])) == y for xs, ys in data.evaluate("test", 64)
             for row, targets in zip(xs.tolist(), ys.tolist()) for t, y in enumerate(targets)]
    common, counted = sorted(yardsticks(data), key=lambda s: s.name, reverse=True)
    assert common.name.startswith("always ") and counted.name == "4-gram counts"
    assert counted.score == pytest.approx(100 * sum(right) / len(right))
