"Every class of settings refuses nonsense, in every field, with the field, the value and what is expected."
import dataclasses
import importlib
import math
import pkgutil
import typing
from typing import Annotated, get_args, get_origin

import numpy as np
import pytest

import esper_nb
from esper_nb.core import Config, OneOf, Range, check
from esper_nb.guard import GovernorConfig
from esper_nb.train import get_task

LEAST = { # what has no default
    "Task": lambda: {f.name: getattr(get_task("digits"), f.name) for f in dataclasses.fields(get_task("digits"))},
    "Fault": lambda: dict(kind="nan"), "ModuleHostConfig": lambda: dict(factory="a:b", slots=("x",)),
    "RunConfig": lambda: dict(name="x")}
EITHER_SIGN = {"Gates.contribution", "Gates.improvement", "HeuristicConfig.contribution", "HeuristicConfig.ransom"}


def all_configs():
    "Every subclass of `Config` in the package, whether or not it is offered."
    for module in pkgutil.walk_packages(esper_nb.__path__, "esper_nb."):
        if not module.name.endswith("__main__"): importlib.import_module(module.name)
    found, new = [], [Config]
    while new:
        new = [kind for parent in new for kind in parent.__subclasses__()]
        found += [kind for kind in new if kind.__module__.startswith("esper_nb.")]
    return sorted(set(found), key=lambda kind: kind.__name__)


def options(hint): return get_args(hint) if type(hint) in (type(int | str), type(typing.Optional[int])) else (hint,)


def split(hint): return get_args(hint) if get_origin(hint) is Annotated else (hint,)


class Odd:
    def __repr__(self): return "an odd thing"


def values_near(hint): # of every kind
    "Values that may be nonsense for a hint, each of which is right for some hint of some field."
    yield from (math.nan, -math.nan, math.inf, -math.inf, -1, -1., -1e-9, 10**400, -10**400, 1.5, True, False, None,
                "1", "nonsense", "", b"x", [], {}, (), [math.nan], ["nonsense"], (True,), [None], {"a": 1}, Odd(), 2j,
                np.nan, np.float32(-1), np.int64(-1), Config(), object, len)


def is_right(hint, value):
    "Whether a value is one that a field of this hint may have, written apart from the code that it tests."
    for option in options(hint):
        kind, *limits = split(option)
        origin = get_origin(kind)
        if origin is tuple:
            if isinstance(value, (list, tuple)) and all(is_right(get_args(kind)[0], v) for v in value): return True
        elif kind is type(None):
            if value is None: return True
        elif kind is bool:
            if value is True or value is False: return True
        elif isinstance(value, bool): continue
        elif kind is int:
            if isinstance(value, (int, np.integer)) and all(in_range(r, value) for r in limits): return True
        elif kind is float:
            fine = isinstance(value, (int, float, np.integer, np.floating)) and not math.isnan(as_float(value))
            if fine and all(in_range(r, value) for r in limits or [Range()]): return True
        elif kind is str:
            if isinstance(value, str) and all(value in o.known for o in limits): return True
        elif isinstance(kind, type) and issubclass(kind, Config):
            alone = sum(isinstance(o, type) and issubclass(o, Config) for o in options(hint)) == 1
            if isinstance(value, kind) or alone and isinstance(value, dict) and not value: return True # its defaults
        elif origin is not None or not isinstance(kind, type): # Callable
            if callable(value): return True
        elif isinstance(value, kind): return True
    return False


def as_float(value):
    try: return float(value)
    except OverflowError: return math.inf


def in_range(r, value):
    if math.isinf(as_float(value)): return r.infinite and value == math.inf
    above = r.low is None or value > r.low or value == r.low and not r.above
    return above and (r.high is None or value < r.high or value == r.high and not r.below)


KINDS = all_configs()
FIELDS = [(kind, f.name, typing.get_type_hints(kind, include_extras=True)[f.name])
          for kind in KINDS for f in dataclasses.fields(kind)]
NAMES = [f"{kind.__name__}.{name}" for kind, name, _ in FIELDS]

def test_all_classes_of_settings_are_found():
    assert {"GovernorConfig", "DetectorConfig", "GateConfig", "Gates", "Rules", "Repertoire", "PolicyConfig",
            "EnvConfig", "FitConfig", "PPOConfig", "RunConfig"} <= {kind.__name__ for kind in KINDS}


@pytest.mark.parametrize("kind, name, hint", FIELDS, ids=NAMES)
def test_every_nonsense_value_is_refused_by_name(kind, name, hint):
    least = LEAST.get(kind.__name__, dict)()
    for value in values_near(hint):
        if is_right(hint, value): continue
        with pytest.raises(ValueError) as e: kind(**least | {name: value})
        said = str(e.value)
        assert said.startswith(f"{name}=") and "expected " in said or "has no setting 'a'" in said, said
    with pytest.raises(ValueError): kind(**least).replace(**{name: Odd()})
    with pytest.raises(ValueError): kind.from_dict(least | {name: Odd()})


@pytest.mark.parametrize("kind, name, hint", FIELDS, ids=NAMES)
def test_every_number_has_a_range_and_every_default_is_in_it(kind, name, hint):
    field = next(f for f in dataclasses.fields(kind) if f.name == name)
    for option in options(hint):
        for part in get_args(option) if get_origin(option) is tuple else (option,):
            base, *limits = split(part)
            if base in (int, float) and f"{kind.__name__}.{name}" not in EITHER_SIGN:
                assert any(isinstance(r, Range) and r.low is not None for r in limits), "a number without a range"
            assert all(isinstance(r, Range | OneOf) for r in limits)
    if field.default is not dataclasses.MISSING: assert is_right(hint, field.default)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_defaults_survive_a_journey_through_a_dictionary(kind):
    made = kind(**LEAST.get(kind.__name__, dict)())
    assert kind.from_dict(made.to_dict()) == made


def test_numbers_of_numpy_become_plain_ones():
    made = GovernorConfig(sigma=np.float32(4), confirm=np.int64(2), window=np.int32(20))
    assert [type(x) for x in (made.sigma, made.confirm, made.window)] == [float, int, int] and made.sigma == 4


def test_a_subclass_of_a_user_cannot_forget_the_check():
    @dataclasses.dataclass(frozen=True)
    class Mine(Config):
        rate: Annotated[float, Range(0, 1)] = .5
        names: tuple[str, ...] = ()
        def __post_init__(self): check(self.rate != .25, "rate", self.rate, "anything but a quarter")
    @dataclasses.dataclass(frozen=True)
    class Child(Mine):
        more: int = 1
    for kind in (Mine, Child):
        for bad in (2, "x", math.nan, .25):
            with pytest.raises(ValueError, match="rate="): kind(rate=bad)
        assert kind(names=["a"]).names == ("a",)
    with pytest.raises(ValueError, match="more=1.5, expected a whole number"): Child(more=1.5)
