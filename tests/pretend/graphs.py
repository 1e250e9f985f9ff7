"A pretended CUDA graph: what a capture calls is written down, or refused where a device refuses it, and replayed."
import contextlib
import gc
import weakref

import torch

from .orders import Race
from .tensors import leaves, machine

REFUSED = "operation not permitted when stream is capturing"
_aliases = {"set_", "resize_", "as_strided_"} # would give memory of the graph to others


def _place(t): return t.untyped_storage()._cdata # noqa: SLF001

def _flat(t): return torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())


class CUDAGraph:
    "Operations on fixed memory, in the order in which they were called."
    def __init__(self, keep_graph=False):
        self.machine, self.keep, self.ready = machine(), keep_graph, False
        self.generators = []
        self._clear()

    def _clear(self):
        self.calls, self.uses, self.streams, self.unjoined = [], {}, [], []
        self.own, self.held, self.saved = set(), [], {}  # memory made inside: by storage, and kept; what was before
        self.broken = None

    # --- capture

    def capture_begin(self, pool=None, capture_error_mode="global"):
        m = self.machine
        stream = m.current_stream()
        if m.graph is not None: raise RuntimeError("a capture is under way already")
        if stream in m.defaults: raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        self._clear()
        self.streams, m.graph, self.place = [stream], self, stream.place
        self.states = [g.get_state() for g in self.generators]

    def capture_end(self):
        m = self.machine
        if m.graph is not self: raise RuntimeError("capture_end without a capture")
        m.graph = None
        with m.aside():
            for t, numbers in self.saved.values(): t.copy_(numbers)   # a capture computes nothing ...
            for t in map(_flat, self.held):                           # ... and leaves rubbish behind
                t.fill_(torch.nan if t.is_floating_point() or t.is_complex() else 77)
        for g, state in zip(self.generators, self.states): g.set_state(state)
        self.saved = {}
        if self.broken is None and self.unjoined: self.broken = f"{self.unjoined[0]} was never joined"
        if self.broken is not None: m.stuck = True
        if self.broken is not None: raise RuntimeError(f"operation failed due to a previous error: {self.broken}")
        self.ready = True

    def refuse(self, what):
        "A capture that has met something that no graph can hold is over."
        self.broken = f"{REFUSED}: {what} at {self.machine.where()}"
        raise RuntimeError(self.broken)

    def fork(self, stream, others):
        "`stream` waits for work of `others`: it joins the capture, or may not."
        inside, outside = [s for s in others if s in self.streams], [s for s in others if s not in self.streams]
        if stream in self.streams and outside:
            self.refuse(f"{stream} waits for {outside[0]}, whose work is not part of the capture")
        if not inside: return
        if stream not in self.streams:
            self.streams.append(stream)
            self.unjoined.append(stream)
        for s in inside:
            if s in self.unjoined and s is not stream: self.unjoined.remove(s)

    def check_stream(self, stream):
        if stream not in self.streams: self.refuse(f"work on {stream}, which has not been forked from the capture")
        if stream is not self.streams[0] and stream not in self.unjoined: self.unjoined.append(stream)

    # --- what is written down

    def save(self, t):
        "Numbers as they were before the capture, which computes nothing."
        if _place(t) not in self.own and _place(t) not in self.saved:
            self.saved[_place(t)] = _flat(t), _flat(t).clone()

    def record(self, op, func, args, kwargs, written, stream):
        "Call it, and keep what is needed to call it again."
        if op.name in _aliases: self.refuse(op.name)
        self.check_stream(stream)
        for t in written: self.save(t)
        out = func(*args, **kwargs)
        before = {_place(t) for t in leaves((args, kwargs), [])}
        made = [t if _place(t) not in before else None for t in leaves(out, [])]
        fresh = [t for t in made if t is not None]
        self.held += fresh
        self.own |= {_place(t) for t in fresh}
        if written or (fresh and not op.name.startswith("empty") and not op.name.startswith("new_empty")):
            self.calls.append((func, args, kwargs, made))
        return out

    def use(self, memory, writes, what):
        "Memory that every replay reads or writes: its own is kept, that of others must still be there."
        ours = memory.numbers_at in self.own
        held, wrote = self.uses.get(memory.number, (None, False, what))[:2]
        if held is None: held = memory if ours else weakref.ref(memory)
        self.uses[memory.number] = held, wrote or writes, what

    # --- replay

    def replay(self):
        m = self.machine
        if not self.ready: raise RuntimeError("replay of a graph that has not been captured")
        if m.graph is not None: m.graph.refuse("a replay")
        stream = m.current_stream(self.place)
        now = stream.tick()
        m.launches["graph"] += 1
        for held, writes, what in self.uses.values():
            memory = held() if isinstance(held, weakref.ref) else held
            if memory is None: raise Race(f"a graph uses memory that has been freed ({what}), at {m.where()}")
            memory.touch(stream, now, writes, f"{what} of a graph")
            memory.kept.add(stream.number)
        with m.aside(), torch.no_grad():
            for func, args, kwargs, made in self.calls:
                for t, new in zip(made, leaves(func(*args, **kwargs), [])):
                    if t is not None: t.copy_(new)

    def register_generator_state(self, generator): self.generators.append(generator)
    def reset(self):
        self._clear()
        self.ready = False
    def pool(self): return (0, id(self))


class graph:
    "The context that captures, as PyTorch's own does it."
    def __init__(self, cuda_graph, pool=None, stream=None, capture_error_mode="global"):
        self.graph, self.mode = cuda_graph, capture_error_mode
        self.stream = stream or cuda_graph.machine.side_stream()

    def __enter__(self):
        self.graph.machine.synchronize()
        gc.collect()
        self.inside = contextlib.ExitStack()
        self.inside.enter_context(self.graph.machine.use_stream(self.stream))
        self.graph.capture_begin(capture_error_mode=self.mode)

    def __exit__(self, *error):
        try: self.graph.capture_end()
        finally: self.inside.close()


