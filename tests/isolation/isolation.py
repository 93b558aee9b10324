"""A test that fails leaves nothing to the tests after it.

The frames that its error came through are emptied once the report is made: what they hold goes with
them (branches, say, whose blocks the next test would count). What it shared with other tests (an
engine, a server, a browser) is closed when the next test asks for it, and made anew.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest

_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[pytest.TestReport]:
    report: pytest.TestReport = yield
    if call.excinfo is not None and report.failed:
        item.stash[_FAILED] = True
        if not item.config.getoption("usepdb"):
            for error in _with_causes(call.excinfo.value):
                _empty_frames(error)
            gc.collect()
    return report


def _empty_frames(error: BaseException) -> None:
    traceback.clear_frames(error.__traceback__)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        # Up to Python 3.12 a frame keeps the dict that the report saw until it is asked again.
        _ = frame.f_locals


def _with_causes(error: BaseException) -> list[BaseException]:
    """The error and all that hang on it: causes, what was handled meanwhile, a group's members."""
    found: dict[int, BaseException] = {}
    ahead: list[BaseException | None] = [error]
    while ahead:
        each = ahead.pop()
        if each is not None and id(each) not in found:
            found[id(each)] = each
            ahead += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]
    return list(found.values())


@dataclass
class _Lent:
    """What is shared now, what it was made with, and the test that had it last."""

    opened: contextlib.ExitStack
    value: Any
    needs: dict[str, Any]
    borrower: pytest.Item


def shared_fixture(scope: Literal["module", "session"] = "module") -> Callable[..., Any]:
    """A fixture that is made once a module or session, and again after a test that failed with it.

    It decorates a generator function, as ``pytest.fixture`` does. The function may ask for fixtures
    of its own scope or a wider one; the fixture itself is given to each test anew, so only fixtures
    of single tests can ask for it.
    """

    def decorate(make: Callable[..., Iterator[Any]]) -> Any:
        slot = pytest.StashKey[_Lent]()

        def lend(request: pytest.FixtureRequest, **needs: Any) -> Iterator[Any]:
            test = request.node
            node = request.session if scope == "session" else test.getparent(pytest.Module)

            def close() -> None:
                if (lent := node.stash.get(slot, None)) is not None:
                    del node.stash[slot]
                    lent.opened.close()

            last = node.stash.get(slot, None)
            # Looked at here and not at this fixture's end, for a test may fail after that.
            if last is not None and last.borrower.stash.get(_FAILED, False):
                try:
                    close()
                except Exception as error:  # the failure that came before was reported
                    warnings.warn(f"{make.__name__} did not close: {error!r}", stacklevel=1)
            if slot not in node.stash:
                opened = contextlib.ExitStack()
                value = opened.enter_context(contextlib.contextmanager(make)(**needs))
                node.stash[slot] = _Lent(opened, value, needs, test)
                node.addfinalizer(close)
            lent = node.stash[slot]
            assert all(lent.needs[name] is need for name, need in needs.items()), (
                f"{make.__name__} was made with what belongs to one test; its scope is {scope!r}"
            )
            lent.borrower = test
            yield lent.value

        lend.__doc__ = make.__doc__
        # What pytest reads to know which fixtures are asked for.
        lend.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD),
                *inspect.signature(make).parameters.values(),
            ]
        )
        return pytest.fixture(name=make.__name__)(lend)

    return decorate
