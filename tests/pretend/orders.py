"Who has to wait for whom: streams and events with vector clocks, and what each of them did to a piece of memory."
import itertools
import weakref

_numbers = itertools.count()


class Race(RuntimeError):
    "Work that is not ordered behind other work on the same memory."


def learn(clock, other):
    "What `other` has behind it, this clock has behind it, too."
    for k, t in other.items():
        if t > clock.get(k, 0): clock[k] = t


class Stream:
    "A queue of a device. Its clock says which work of which stream is certain to be over before its next."
    def __init__(self, machine, place, name=None):
        self.machine, self.place, self.number = machine, place, next(_numbers)
        self.name = name or f"stream {self.number}"
        self.clock = {self.number: 0}
        self.copies = [] # functions that let a copy to or from pinned memory happen, in order
        machine.streams.append(self)

    @property
    def device(self): return self.machine.device_at(self.place)

    def tick(self):
        "One more piece of work, behind all that the host has waited for."
        learn(self.clock, self.machine.host)
        self.clock[self.number] += 1
        return self.clock[self.number]

    def wait_stream(self, other):
        self.machine.note_order(self, other)
        if self.machine.graph is not None: self.machine.graph.fork(self, [other])
        learn(self.clock, other.clock)

    def wait_event(self, event):
        graph = self.machine.graph
        if graph is not None and event.stream is not None: graph.fork(self, [event.stream])
        learn(self.clock, event.clock)

    def record_event(self, event=None):
        event = Event(self.machine) if event is None else event
        event.record(self)
        return event

    def synchronize(self):
        self.machine.count_wait("stream.synchronize", asked=True)
        self.arrive()

    def arrive(self, upto=None):
        "The host has waited for this stream, or for a part of its work."
        learn(self.machine.host, self.clock if upto is None else upto)
        done = len(self.copies) if upto is None else sum(at <= upto.get(self.number, 0) for at, _ in self.copies)
        ready, self.copies = self.copies[:done], self.copies[done:]
        with self.machine.aside():
            for _, happen in ready: happen()

    def query(self): return not self.copies
    def is_capturing(self): return self.machine.graph is not None and self in self.machine.graph.streams
    def __enter__(self):
        self._inside = self.machine.use_stream(self)
        return self._inside.__enter__()
    def __exit__(self, *exc): return self._inside.__exit__(*exc)
    def __repr__(self): return f"<{self.name} of {self.device}>"


class Event:
    "A mark in a stream."
    def __init__(self, machine): self.machine, self.clock, self.stream, self.at = machine, {}, None, 0.

    def record(self, stream=None):
        self.stream = self.machine.current_stream() if stream is None else stream
        self.stream.tick()
        self.clock, self.at = dict(self.stream.clock), self.machine.num_launches

    def synchronize(self):
        self.machine.count_wait("event.synchronize", asked=True)
        if self.stream is not None: self.stream.arrive(self.clock)

    def wait(self, stream=None): (self.machine.current_stream() if stream is None else stream).wait_event(self)
    def query(self): return True
    def elapsed_time(self, other): return max(1e-3, 1e-3 * (other.at - self.at)) # a launch counts as a microsecond


class Memory:
    "A piece of a device's memory: who wrote it last, who has read it since, and whose queue it was made in."
    def __init__(self, stream, what):
        self.machine, self.home, self.what = stream.machine, stream, what
        self.write, self.reads, self.kept = None, {}, set()
        self.number, self.numbers_at, self.storage = next(_numbers), None, None
        weakref.finalize(self, _freed, stream, self.reads, self.kept, what)

    def touch(self, stream, now, writes, what):
        "Note one use; a race if it is not behind the uses that it depends on."
        if self.machine is not stream.machine: # it has outlived its machine, whose work is done
            self.machine, self.home, self.write = stream.machine, stream, None
            self.reads.clear()
        def early(number, at): return number != stream.number and stream.clock.get(number, 0) < at
        if self.write is not None and early(*self.write):
            self.machine.race(f"{what} on {stream} uses what {self.what} on another stream may still be writing")
        if writes and any(early(*use) for use in self.reads.items()):
            self.machine.race(f"{what} on {stream} overwrites what another stream may still be reading")
        if writes:
            self.write, self.what = (stream.number, now), what
            self.reads.clear()
        self.reads[stream.number] = now


def _freed(home, uses, kept, what):
    "The allocator gives freed memory to the next who asks on its home stream, whoever else is still using it."
    clock = {**home.machine.host}
    learn(clock, home.clock)
    for number, at in uses.items():
        if number != home.number and number not in kept and clock.get(number, 0) < at:
            home.machine.race(f"memory of {home} was freed while another stream may still be using it ({what})",
                              late=True)
