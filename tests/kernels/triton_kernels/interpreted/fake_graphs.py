"""CUDA graphs without CUDA: every launch and every torch operation is written down, and done again.

Numbers and addresses are baked in, as in a real graph: what a call reads from anywhere but the
tensors that it was recorded with, a replay does not see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter


class FakeGraph:
    """Recorded operations, in order."""

    def __init__(self) -> None:
        self.operations: list[Callable[[], None]] = []
        self.names: list[str] = []
        self.num_replays = 0

    def add(self, name: str, operation: Callable[[], None]) -> None:
        self.names.append(name)
        self.operations.append(operation)

    def replay(self) -> None:
        self.num_replays += 1
        for operation in self.operations:
            operation()


class FakeGraphMaker:
    """A `cotrt.kernels.cuda.GraphMaker`; keeps all that it made."""

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []
        self.num_clears = 0

    def clear(self) -> None:
        self.num_clears += 1

    def capture(self, call: Callable[[], None]) -> FakeGraph:
        graph = FakeGraph()
        recorder = _Recorder(graph)
        plain_call = interpreter.GridExecutor.__call__

        def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
            def run() -> None:
                plain_call(executor, *args, **kwargs)

            graph.add(executor.fn.__name__, run)
            recorder.paused = True  # what the interpreter itself does with torch is no launch
            try:
                run()
            finally:
                recorder.paused = False

        interpreter.GridExecutor.__call__ = launch
        try:
            with recorder:
                call()
        finally:
            interpreter.GridExecutor.__call__ = plain_call
        self.graphs.append(graph)
        return graph


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: FakeGraph) -> None:
        super().__init__()
        self.graph = graph
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if self.paused:
            return made
        name = str(func)
        assert not isinstance(made, (int, float, bool)), f"{name} reads a number from the device"
        is_view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        is_factory = name.startswith(("aten.empty", "aten.new_empty"))
        if is_view or is_factory:
            return made  # memory stays where it is
        in_place = any(r.alias_info is not None for r in func._schema.returns)

        def again() -> None:
            result = func(*args, **kwargs)
            if not in_place:
                made.copy_(result)

        self.graph.add(name, again)
        return made
