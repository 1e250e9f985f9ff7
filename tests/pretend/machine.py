"""A CUDA machine that is only pretended, and stricter than a real one.

    with PretendedCuda(devices=2) as gpu:
        ...
    gpu.waits, gpu.launches
"""
import collections
import contextlib
import functools
import sys
import threading
import warnings
import weakref
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from .api import in_place, of_device
from .orders import Memory, Race, Stream
from .tensors import DeviceTensor, _machines, leaves

limits = """no cuDNN, TF32 or atomics, whose sums depend on the order; no timing, no compiler; no memory that could run
out; LSTM, GRU, attention and autocast are stand-ins; backward runs on the stream of the call; a launch is a replay, or
an operation of ATen that is no view; a graph holds no copies to the host"""

_waiting = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_indexing = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
_idle = {"_local_scalar_dense", "detach", "alias", "lift_fresh", "lift", "empty", "empty_like", "empty_strided",
         "new_empty", "new_empty_strided", "_unsafe_view", "set_", "resize_", "_reshape_alias"}
_untold = {"native_batch_norm": ("running_mean", "running_var")} # written, though the schema does not say so
_COPY = torch.ops.aten.copy_.default
_twice = {"convolution_backward", "native_batch_norm_backward"} # for what is above and for what is below


class Known(NamedTuple):
    "What the machine has to know of an operation of ATen."
    name: str
    written: tuple # names and numbers of the arguments that it writes
    view: bool # whether the result is another look at an argument
    waits: bool # whether the host must know the result before it can go on
    draws: bool # whether it takes random numbers

def _span(t):
    "First and last byte of a tensor."
    size = 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride())) if t.numel() else 0
    return t.data_ptr(), t.data_ptr() + size * t.element_size() - 1

@functools.cache
def _known(func):
    schema = func._schema # noqa: SLF001
    alias = [(k, a.name, a.alias_info.is_write) for k, a in enumerate(schema.arguments) if a.alias_info is not None]
    name = schema.name.split("::")[1]
    written = tuple((k, name) for k, name, write in alias if write)
    written += tuple((k, a.name) for k, a in enumerate(schema.arguments) if a.name in _untold.get(name, ()))
    return Known(name, written, bool(alias) and not written, bool(_waiting & set(func.tags)),
                 torch.Tag.nondeterministic_seeded in func.tags)

def _each(f, x):
    "Nested arguments or results with `f` applied to every tensor."
    if isinstance(x, torch.Tensor): return f(x)
    if isinstance(x, list | tuple): return type(x)([_each(f, v) for v in x])
    return {k: _each(f, v) for k, v in x.items()} if isinstance(x, dict) else x


class _Mode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls): return False # what keeps a compiler out costs more than the rest of a call
    def __init__(self, machine):
        super().__init__()
        self.machine = machine
    def __torch_dispatch__(self, func, types, args=(), kwargs=None): return self.machine.call(func, args, kwargs or {})


class PretendedCuda:
    "Some CUDA devices, pretended inside a `with` block."
    def __init__(self, devices=1, strict=True, bf16=True, float64=True, memory=(2**33, 2**34)):
        self.devices, self.strict, self.bf16, self.memory, self.float64 = devices, strict, bf16, memory, float64
        self.waits, self.launches, self.draws = (collections.Counter() for _ in range(3))
        self.races, self.late, self.orders = collections.Counter(), [], []
        self.streams, self.host, self.sync_debug = [], {}, "default"
        self.stuck = False # a recording has failed, and the generators are inside of it still
        self.pinned = {} # storages of pinned memory, held weakly, by address
        self._sides = {} # streams for captures
        self.flying, self.copies = collections.Counter(), 0 # copies to the host under way: by storage and span, and all
        self.pieces, self._local, self._lock = {}, threading.local(), threading.RLock()
        self.defaults = [Stream(self, k, f"default stream {k}") for k in range(devices)]
        self.random = [torch.Generator().manual_seed(1000 + k).get_state() for k in range(devices)]
        self._places = [torch.device("cuda", k) for k in range(devices)]

    def __enter__(self):
        self._stack = contextlib.ExitStack()
        _machines.append(self)
        self._stack.callback(_machines.pop)
        self._stack.enter_context(in_place(self))
        self._stack.enter_context(self.mode())
        return self

    def __exit__(self, kind, *rest):
        self._stack.close()
        if self.strict and self.late and kind is None: raise Race("; ".join(self.late))

    def mode(self): return _Mode(self)

    @property
    def graph(self):
        "What this thread captures; captures are `thread_local` here, as those of the library are."
        return getattr(self._local, "graph", None)

    @graph.setter
    def graph(self, graph): self._local.graph = graph

    # --- devices and streams

    def device_at(self, place): return self._places[place]

    def place_of(self, device): # None, a number, or a device in words
        if isinstance(device, int): return device
        index = None if device is None else torch.device(device).index
        return getattr(self._local, "place", 0) if index is None else index

    def set_device(self, device): self._local.place = self.place_of(device)

    def current_stream(self, device=None):
        place = self.place_of(device)
        return getattr(self._local, "streams", {}).get(place, self.defaults[place])

    @contextlib.contextmanager
    def use_stream(self, stream):
        if stream is None:
            yield
            return
        streams, place = getattr(self._local, "streams", {}), self.place_of(None)
        self._local.streams, self._local.place = {**streams, stream.place: stream}, stream.place
        try: yield stream
        finally: self._local.streams, self._local.place = streams, place

    def side_stream(self):
        place = self.place_of(None)
        return self._sides.setdefault(place, Stream(self, place, f"capture stream {place}"))

    def synchronize(self, device=None):
        self.count_wait("synchronize", asked=True)
        place = self.place_of(device)
        self.orders.append(("host", f"device {place}"))
        for s in self.streams:
            if s.place == place: s.arrive()

    # --- counts

    def reset(self):
        "Count from here on."
        for c in (self.waits, self.launches, self.draws, self.races): c.clear()
        self.orders.clear()

    @property
    def num_waits(self): return sum(self.waits.values())
    @property
    def num_launches(self): return sum(self.launches.values())

    def where(self):
        "The line of the package, or of a test, that has led here."
        frame = sys._getframe(1) # noqa: SLF001
        while frame is not None:
            file = frame.f_code.co_filename
            if "/pretend/" not in file and any(f"/{d}/" in file for d in ("esper_nb", "tests", "scripts")):
                return f"{file.rsplit('/', 1)[1]}:{frame.f_lineno} {frame.f_code.co_name}"
            frame = frame.f_back
        return "backward"

    def count_wait(self, what, asked=False):
        "The host waits for the device."
        here = self.where()
        if self.graph is not None: self.graph.refuse(what)
        told = f"called a synchronizing CUDA operation: {what} at {here}"
        if self.sync_debug == "error" and not asked: raise RuntimeError(told)
        if self.sync_debug == "warn" and not asked: warnings.warn(told, stacklevel=2)
        self.waits[what, here] += 1

    def note_order(self, after, before): self.orders.append((after.name, before.name))

    def race(self, text, late=False):
        "An order is missing; inside a destructor it is told later."
        text = f"{text}, at {self.where()}"
        self.races[text] += 1
        if late: self.late.append(text)
        elif self.strict: raise Race(text)

    # --- pinned memory

    @contextlib.contextmanager
    def aside(self):
        "What the machine does itself is not part of what it watches."
        before, self._local.aside = getattr(self._local, "aside", False), True
        try: yield
        finally: self._local.aside = before

    def is_pinned(self, t):
        if isinstance(t, DeviceTensor): return False
        held = self.pinned.get(t.untyped_storage().data_ptr())
        return held is not None and not held.expired()

    def pin(self, t):
        if self.graph is not None: self.graph.refuse("an allocation of pinned memory")
        storage = t.untyped_storage()
        self.pinned[storage.data_ptr()] = StorageWeakRef(storage)
        return t

    def _send(self, stream, now, target, values):
        "A copy to pinned memory that arrives when somebody waits for it; till then there is rubbish, and a guard."
        key = target.untyped_storage().data_ptr()
        self.flying[key, *_span(target)] += 1
        self.copies += 1
        rubbish = torch.nan if target.is_floating_point() or target.is_complex() else 77
        target.fill_(rubbish) # in the middle of a dispatch: not seen by the machine
        def happen():
            target.copy_(values)
            self.flying -= collections.Counter([(key, *_span(target))]) # what is left is above zero
            self.copies -= 1
        stream.copies.append((now, happen))

    def _fetch(self, stream, now, source):
        "A copy from pinned memory: the host must leave it alone till somebody has waited."
        seen, here = source.clone(), self.where()
        def happen():
            same = (source == seen) | ((source != source) & (seen != seen))
            if not bool(same.all()): self.race(f"pinned memory was overwritten before its copy from {here} was made")
        stream.copies.append((now, happen))

    def _check_landed(self, func, tensors):
        for t in tensors:
            if isinstance(t, torch.Tensor) and not isinstance(t, DeviceTensor) and t.layout == torch.strided:
                key, (first, last) = t.untyped_storage().data_ptr(), _span(t)
                if any(k == key and a <= last and first <= b for k, a, b in self.flying):
                    self.race(f"{func} on the host reads a copy that is still under way")

    # --- one operation

    def call(self, func, args, kwargs):
        if getattr(self._local, "aside", False): return func(*args, **kwargs)
        with self._lock: return self._call(func, args, kwargs)

    def _call(self, func, args, kwargs):
        op, found = _known(func), leaves((args, kwargs), [])
        there = [t for t in found if isinstance(t, DeviceTensor)]
        asked = kwargs.get("device")
        away = asked is not None and torch.device(asked).type in ("cuda", "lazy")
        if self.copies: self._check_landed(op.name, found)
        if self.graph is not None and op.draws: self._check_draw(op, kwargs, bool(there) or away)
        if not there and not away: return self._on_host(func, args, kwargs)
        if op.name == "_to_copy": return self._convert(func, args, kwargs)
        if op.name == "copy_": return self._copy(*args, **kwargs)
        if there and asked is not None and not away: return self._on_host(func, _each(_numbers, args), kwargs)
        place = there[0].place if there else self.place_of(torch.device(asked))
        if len(there) < len(found) or len(there) > 1: self._check_devices(func, op.name, there, found, args)
        if op.waits or op.name in _indexing or op.name == "multinomial": self._count_waits(op, args, kwargs, there)
        plain = _each(_numbers, kwargs)
        if away: plain["device"] = torch.device("cpu")
        if "pin_memory" in plain: plain["pin_memory"] = False
        inputs = _each(_numbers, args)
        if self.graph is not None: out = self._record(func, args, kwargs, inputs, plain, place)
        else: out = self._drawn(func, place, inputs, plain) if op.draws else func(*inputs, **plain)
        return self._wrapped(op, args, kwargs, out, place, there)

    def _record(self, func, args, kwargs, inputs, plain, place):
        "Call an operation inside a capture."
        op = _known(func)
        given = [args[k] if k < len(args) else kwargs.get(name) for k, name in op.written]
        written = [_numbers(t) for t in leaves(given, [])]
        return self.graph.record(op, func, inputs, plain, written, self.current_stream(place))

    def _check_draw(self, op, kwargs, away):
        "What is drawn on the host would be the same in every replay; a device's generator must be known to the graph."
        generator = kwargs.get("generator")
        if not away: self.graph.refuse(f"{op.name} on the host")
        if generator is None: self.graph.refuse(f"{op.name} from the device's own stream of random numbers")
        if not any(torch.equal(g.get_state(), generator.get_state()) for g in self.graph.generators):
            self.graph.refuse(f"{op.name} from a generator that is not registered with the graph")

    def _on_host(self, func, args, kwargs):
        if not kwargs.get("pin_memory"): return func(*args, **kwargs)
        return self.pin(func(*args, **{**kwargs, "pin_memory": False}))

    def _check_devices(self, func, name, there, leaves, args):
        "Two devices in one operation are refused; numbers without an axis, and indices, may come from the host."
        places = {t.place for t in there}
        if len(places) > 1: self._mixed(func, " and ".join(f"cuda:{k}" for k in sorted(places)))
        if name.startswith(("_foreach", "_fused")):
            odd = [t for a in args if isinstance(a, list | tuple) for t in a if isinstance(t, torch.Tensor)]
            odd = [t for t in odd if not isinstance(t, DeviceTensor) and t.ndim]
        elif name in _indexing:
            if not isinstance(args[0], DeviceTensor): self._mixed(func, "an index on a device, for a tensor of cpu")
            odd = [t for t in args[2:3] if not isinstance(t, DeviceTensor) and t.ndim]
        else: odd = [t for t in leaves if isinstance(t, torch.Tensor) and not isinstance(t, DeviceTensor) and t.ndim]
        if odd: self._mixed(func, f"{there[0].device if there else 'cuda'} and cpu {tuple(odd[0].shape)}")

    def _mixed(self, func, what):
        raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices: {what} "
                           f"({func}) at {self.where()}")

    def _count_waits(self, op, args, kwargs, there):
        wait = op.name if op.waits or op.name == "multinomial" else None
        if op.name in _indexing:
            index = [t for t in args[1] if t is not None]
            masks = [t for t in index if t.dtype in (torch.bool, torch.uint8)]
            fill = len(args) > 2 and len(masks) == len(index) and args[2].numel() == 1 and not any(args[3:])
            off = any(not isinstance(t, DeviceTensor) for t in index)
            wait = "index by a mask" if masks and not fill else "index from the host" if off else None
        if wait is None or op.name == "repeat_interleave" and kwargs.get("output_size") is not None: return
        self.count_wait(wait)
        for t in there:
            stream = self.current_stream(t.place)
            t.memory.touch(stream, stream.tick(), False, op.name)
            stream.arrive()

    def _drawn(self, func, place, args, kwargs):
        "The result on the CPU, of what is drawn from the stream of random numbers of the device."
        name, generator = _known(func).name, kwargs.get("generator")
        self.draws[name, self.where()] += 1
        if self.stuck: raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        if generator is not None:
            if not of_device(generator):
                raise RuntimeError(f"Expected a 'cuda' device type for generator but found 'cpu' ({func})")
            return func(*args, **kwargs)
        ours = torch.default_generator.get_state()
        torch.default_generator.set_state(self.random[place])
        try: return func(*args, **kwargs)
        finally:
            self.random[place] = torch.default_generator.get_state()
            torch.default_generator.set_state(ours)

    def _piece(self, numbers, stream, what):
        "The piece of memory that a tensor lies in."
        key = numbers.untyped_storage()._cdata # noqa: SLF001
        held = self.pieces.get(key)
        piece = None if held is None else held()
        if piece is None:
            piece = Memory(stream, what)
            piece.numbers_at, piece.storage = key, numbers.untyped_storage() # while it lives, nothing else lies there
            self.pieces[key] = _weak(piece, self.pieces, key)
        return piece

    def _wrapped(self, op, args, kwargs, out, place, inputs):
        "What came out, on the device; uses of memory are noted, and the launch is counted."
        stream, own = self.current_stream(place), {id(t.numbers): t for t in inputs}
        if op.view: return _each(lambda t: self._new(t, own, place, stream, op.name), out)
        given = [args[k] if k < len(args) else kwargs.get(name) for k, name in op.written]
        writes, now = {id(t) for t in leaves(given, [])}, stream.tick()
        def touch(memory, wrote):
            if self.graph is None: memory.touch(stream, now, wrote, op.name)
            else: self.graph.use(memory, wrote, op.name)
        if op.name not in _idle:
            if self.graph is None: self.launches[op.name] += 1 + (op.name in _twice)
            for t in inputs: touch(t.memory, id(t) in writes)
        def made(t):
            new = self._new(t, own, place, stream, op.name)
            if isinstance(new, DeviceTensor) and id(t) not in own and op.name not in _idle: touch(new.memory, True)
            return new
        return _each(made, out)

    def _new(self, t, own, place, stream, what):
        if not isinstance(t, torch.Tensor) or isinstance(t, DeviceTensor): return t
        if t.dtype == torch.float64 and not self.float64: raise TypeError(f"{what}: this device has no float64")
        return own[id(t)] if id(t) in own else DeviceTensor(t, place, self._piece(t, stream, what))

    # --- copies between the host and devices

    def _convert(self, func, args, kwargs):
        source, to = args[0], kwargs.get("device")
        quick = kwargs.get("non_blocking", False)
        plain = {k: v for k, v in kwargs.items() if k not in ("device", "non_blocking", "pin_memory", "layout")}
        stays = isinstance(source, DeviceTensor) if to is None else torch.device(to).type != "cpu"
        if stays and not self.float64 and (kwargs.get("dtype") or source.dtype) == torch.float64:
            raise TypeError("Cannot convert a tensor to float64 dtype: this device doesn't support it")
        numbers = _numbers(source)
        if self.graph is not None: return self._convert_in_graph(func, source, plain, quick, to)
        out = func(numbers, **plain)
        if out is numbers: out = numbers.clone()
        away = isinstance(source, DeviceTensor) if to is None else torch.device(to).type != "cpu"
        if isinstance(source, DeviceTensor) and away:
            place = source.place if to is None else self.place_of(torch.device(to))
            if place != source.place: return self._across(source, out, place)
            return self._wrapped(_known(func), args, {}, out, place, [source])
        if isinstance(source, DeviceTensor): # to the host
            stream = self.current_stream(source.place)
            now = self._launch_copy(stream, source)
            if quick:
                self.pin(out)
                self._send(stream, now, out, out.clone())
                return out
            self.count_wait("copy to the host")
            stream.arrive()
            return out
        place = self.place_of(torch.device(to))
        stream = self.current_stream(place)
        now = self._launch_copy(stream)
        if quick and self.is_pinned(source): self._fetch(stream, now, source)
        elif not quick: self.count_wait("copy from the host")
        new = DeviceTensor(out, place, self._piece(out, stream, "copy from the host"))
        new.memory.touch(stream, now, True, "copy from the host")
        return new

    def _convert_in_graph(self, func, source, plain, quick, to):
        "A copy that every replay makes anew: on one device, or from pinned memory to it."
        here, away = isinstance(source, DeviceTensor), to is None or torch.device(to).type != "cpu"
        place = source.place if here and to is None else self.place_of(torch.device(to))
        self._check_copy(source, away, quick, here and source.place != place)
        out = self._record(func, (source,), {}, (_numbers(source),), plain, place)
        return self._wrapped(_known(func), (source,), {}, out, place, [source] if here else [])

    def _check_copy(self, source, away, quick, across):
        "Refuse what is no copy on one device or from pinned memory to it."
        if not away or across: self.graph.refuse("a copy to the host" if not away else "a copy to another device")
        if isinstance(source, DeviceTensor): return
        if not (quick and self.is_pinned(source)): self.graph.refuse("a copy from the host")

    def _across(self, source, out, place):
        "From device to device, ordered on both sides, as PyTorch does it."
        here, there = self.current_stream(source.place), self.current_stream(place)
        here.clock, there.clock = dict(here.clock), dict(there.clock)
        for a, b in ((here.clock, there.clock), (there.clock, here.clock)):
            for k, t in b.items(): a[k] = max(t, a.get(k, 0))
        now = self._launch_copy(here, source)
        there.clock[here.number] = now
        new = DeviceTensor(out, place, self._piece(out, there, "copy across"))
        new.memory.touch(there, there.tick(), True, "copy across")
        return new

    def _launch_copy(self, stream, source=None):
        now = stream.tick()
        self.launches["copy"] += 1
        if source is not None: source.memory.touch(stream, now, False, "copy")
        return now

    def _copy_in_graph(self, target, source, quick):
        there, here = isinstance(target, DeviceTensor), isinstance(source, DeviceTensor)
        self._check_copy(source, there, quick, there and here and source.place != target.place)
        args = target, source
        self._record(_COPY, args, {}, tuple(map(_numbers, args)), {}, target.place)
        self._wrapped(_known(_COPY), args, {}, target.numbers, target.place, [target, source] if here else [target])
        return target

    def _copy(self, target, source, non_blocking=False):
        if self.graph is not None: return self._copy_in_graph(target, source, non_blocking)
        values = _numbers(source)
        if isinstance(target, DeviceTensor):
            stream = self.current_stream(target.place)
            if isinstance(source, DeviceTensor) and source.place != target.place:
                values = self._across(source, values.clone(), target.place).numbers
                now = stream.tick()
            else: now = self._launch_copy(stream, source if isinstance(source, DeviceTensor) else None)
            if not isinstance(source, DeviceTensor):
                if non_blocking and self.is_pinned(source): self._fetch(stream, now, source)
                elif not non_blocking: self.count_wait("copy from the host")
            target.memory.touch(stream, now, True, "copy_")
            target.numbers.copy_(values)
            return target
        stream = self.current_stream(source.place)
        now = self._launch_copy(stream, source)
        if non_blocking and self.is_pinned(target):
            self._send(stream, now, target, values.to(target.dtype, copy=True))
            return target
        self.count_wait("copy to the host")
        stream.arrive()
        target.copy_(values)
        return target


def _numbers(t): return t.numbers if isinstance(t, DeviceTensor) else t


def _weak(piece, table, key):
    return weakref.ref(piece, lambda ref: table.pop(key, None) if table.get(key) is ref else None)
