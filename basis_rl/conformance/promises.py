"""The one driver of all checkers: it tries named promises, and tells all that are broken at once."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from basis_rl.names import article, kind_of


class PromiseError(AssertionError):
    """A promise of a contract is broken; the message says what was seen."""

    kind: ClassVar[str] = "contract"
    # To whoever reads of an exception that a missing argument may have caused.
    hint: ClassVar[str] = ""


def check_promises(
    error: type[PromiseError], name: str, promises: type, cases: Mapping[str, Callable[[], Any]]
) -> list[str]:
    """Try each promise in each case.

    Args:
        error: what is raised, by the kind of thing that is checked.
        name: of the thing, for the message.
        promises: a class with a public method for each promise, which raises `PromiseError` if it is broken.
        cases: what is special about a case -> builds an object of that class, once for each promise.

    Returns:
        The names of the promises, all of which are kept.

    Raises:
        PromiseError: an `error` that names all promises that are broken, each cause once.
    """
    public = {each: found for each, found in vars(promises).items() if not each.startswith("_")}
    names = [each for each, found in public.items() if inspect.isfunction(found)]
    # By its cause, which is told once, however many promises it breaks.
    broken: dict[str, str] = {}
    for promise in names:
        for description, case in cases.items():
            try:
                getattr(case(), promise)()
            except PromiseError as told:
                cause = message = str(told)
            except (Exception, SystemExit) as raised:
                # The code is anybody's: it may raise anything.
                where = _where(raised)
                cause = f"{type(raised).__name__}{where or text_of(raised)}"
                asked = isinstance(raised, (AttributeError, TypeError, AssertionError))
                message = f"raises {text_of(raised)}{where}{error.hint if asked else ''}"
            else:
                continue
            broken.setdefault(cause, f"- {promise}: {message}{f' ({description})' if description else ''}")
    if broken:
        count = f"{len(broken)} of the promises" if len(broken) > 1 else "a promise"
        raise error("\n".join([f"{name} breaks {count} of {article(error.kind)} {error.kind}:", *broken.values()]))
    return names


def _where(error: BaseException) -> str:
    """The first place outside of the checkers, and of the standard library, that an exception went through."""
    passed = {Path(__file__).parent, Path(functools.__file__).parent}
    frames = [each for each in traceback.extract_tb(error.__traceback__) if Path(each.filename).parent not in passed]
    return f" in `{frames[0].name}` ({Path(frames[0].filename).name}, line {frames[0].lineno})" if frames else ""


def text_of(error: BaseException) -> str:
    """An exception in one line: it is anybody's, and may have anything to say."""
    return " ".join("".join(traceback.format_exception_only(error)).split())[:300]


def builder(make: Any, base: type, error: type[PromiseError]) -> Callable[[], Any]:
    """A function that builds the object again: `make`, if it can be called, or what copies it.

    Raises:
        PromiseError: an `error`: nothing does, or what is built is no `base`.
    """
    contract = f"{base.__module__.removesuffix('.base')}.{base.__name__}"
    named = make.func if isinstance(make, functools.partial) else make
    name = getattr(named, "__name__", type(named).__name__)
    again = make
    done = "built"
    way_out = " (`basis-rl check NAME --ARGUMENT VALUE` gives arguments)"
    if isinstance(make, base):
        again = functools.partial(copy.deepcopy, make)
        done = "copied"
        way_out = ". Give its class, or a function that builds it each time"
    elif not callable(make):
        raise error(f"This is {kind_of(make)}, not {article(error.kind)} {error.kind}. Give a subclass of {contract}.")

    def build(time: str = " again") -> Any:
        try:
            built = again()
        except (Exception, SystemExit) as raised:
            raise error(f"{name} cannot be {done}{time}: {text_of(raised)}{way_out}.") from raised
        if not isinstance(built, base):
            raise error(f"{name} builds {kind_of(built)}, no subclass of {contract}.")
        return built

    build(time="")
    return build


def require(kept: bool | Tensor, message: str) -> None:
    """Raise `PromiseError` with the message if a promise is not kept."""
    if not kept:
        raise PromiseError(message)


def close(a: Tensor, b: Tensor, within: float, *, equal_nan: bool = False) -> bool:
    """Whether two tensors have one shape, and each number but a difference of `within`, relative or absolute."""
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=within, atol=within, equal_nan=equal_nan)


def require_unwritten(before: Any, after: Any, when: str = "") -> None:
    """Raise `PromiseError` if what was given, an object with tensors, differs from the copy that was made before."""
    for name, old in vars(before).items():
        new = getattr(after, name)
        same = close(old, new, 0.0, equal_nan=True) if isinstance(old, Tensor) else old == new
        require(same, f"writes into the `{name}` that it is given{when}")


def refusal(act: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """What the ValueError says that a call ends in; empty if there is none."""
    try:
        act(*arguments, **named)
    except ValueError as error:
        return str(error) or "ValueError"
    return ""


def saved(owner: Any) -> bytes:
    """The state of an object as it stands in a checkpoint."""
    state = owner.state_dict()
    buffer = io.BytesIO()
    require(isinstance(state, dict), f"returns {kind_of(state)} from `state_dict`, not a dict")
    try:
        torch.save(state, buffer)
    except Exception as error:
        raise PromiseError(f"has a state that cannot be saved: {text_of(error)}") from error
    return buffer.getvalue()


def require_restored(owner: Any, make: Callable[[], Any], same: Callable[[Any, Any], bool]) -> None:
    """Another object that is given the state of `owner` does the `same`, and no other keys than that state has."""
    try:
        state = torch.load(io.BytesIO(saved(owner)), weights_only=True)
    except pickle.UnpicklingError as error:
        raise PromiseError("has a state with more in it than tensors, numbers, strings and dicts of them") from error
    again = make()
    again.load_state_dict(state)
    require(same(owner, again), "does not come back the same from state_dict and load_state_dict")
    less = [{key: value for key, value in state.items() if key != gone} for gone in state]
    for wrong in [{**state, "not_a_key": 1}, *less]:
        refused = bool(refusal(make().load_state_dict, wrong))
        require(refused, f"loads a state with the keys {sorted(wrong)} without a ValueError")
