"""How programs end while work runs: each one a process of its own."""

from __future__ import annotations

import os
import re
import signal
import sys

import pytest
from api_helpers import ROOT, eventually, is_idle, run_program, scripted

# Two seconds are promised; a machine that is busy with other things gets more. The work of these
# programs would go on for hours.
SOON = 20

SLOW = "llm = scripted(slowly(seconds=0.01))\nroot = llm.branch('a')\n"
ENDLESS = SLOW + "work = root.fork(4).generate(max_tokens=900_000)\nnext(iter(work[0]))\n"


def assert_clean(done, *, code: int = 0, said: str = ""):
    assert done.returncode == code, (done.returncode, done.stderr)
    assert done.elapsed < SOON, f"it took {done.elapsed:.1f} s to end"
    assert done.stderr == said, done.stderr


def test_sys_exit_keeps_its_code():
    assert_clean(run_program(ENDLESS + "print('ready')\nsys.exit(7)"), code=7)


def test_an_exception_exits_with_1_and_its_own_traceback_alone():
    done = run_program(ENDLESS + "print('ready')\nraise LookupError('mine')")
    assert done.returncode == 1 and done.elapsed < SOON
    assert done.stderr.startswith("Traceback") and done.stderr.count("Traceback") == 1
    assert done.stderr.endswith("LookupError: mine\n")


def test_exit_while_threads_wait_and_handles_live_in_cycles_generators_and_coroutines():
    source = """
    class Cycle:
        pass
    cycle = Cycle()
    cycle.me, cycle.branch, cycle.work = cycle, root.fork(3), work
    def generator():
        with root.fork(2) as pair:
            yield pair
    running = generator()
    next(running)
    async def waits():
        await work
    coroutine = waits()
    del cycle
    for handle in work:
        threading.Thread(target=handle.result, daemon=True).start()
    threading.Thread(target=lambda: list(work[0]), daemon=True).start()
    time.sleep(0.05)
    print('ready')
    """
    done = run_program(ENDLESS + _dedent(source))
    assert done.returncode == 0 and done.elapsed < SOON
    assert "Traceback" not in done.stderr


def test_exit_during_a_long_prompt_on_the_starter_model():
    """A native step is broken off within a layer; nothing is said about what was left alive."""
    source = """
    llm = LLM('smollm2-135m', dtype='float32', max_num_batched_tokens=8192)
    work = [llm.branch([5 + i] * 4000).generate(max_tokens=5) for i in range(2)]
    time.sleep(0.3)
    print('ready')
    sys.exit(3)
    """
    assert_clean(run_program(_dedent(source)), code=3)


def test_exit_during_a_step_that_takes_long():
    """The step is broken off between two of its operations."""
    source = """
    def probs(ids):
        for _ in range(1000):
            time.sleep(0.02)
        return {97: 1.0}
    llm = scripted(probs)
    work = llm.branch('a').generate(max_tokens=5)
    time.sleep(0.2)
    print('ready')
    """
    assert_clean(run_program(_dedent(source)))


def test_ctrl_c_in_each_blocking_call_is_a_keyboard_interrupt_and_the_engine_goes_on():
    source = """
    llm = scripted(slowly(seconds=0.01), chat_template="{{ messages[0].content }}")
    llm._runtime.engine._check_laws = True
    root = llm.branch('a')
    work = root.fork(4).generate(max_tokens=900_000)
    next(iter(work[0]))
    def memory():
        while True: llm.memory()
    def verbs():
        while True:
            with root.fork(3) as b: b.extend('x').fork(2)
    long = SamplingParams(max_tokens=900_000)
    beams = BeamSearchParams(beam_width=4, max_tokens=9999)
    calls = {
        'result': work.result,
        'timeout': lambda: work.result(timeout=1000),
        'iterate': lambda: [0 for _ in work[0]],
        'generate': lambda: llm.generate(['a'] * 3, long),
        'chat': lambda: llm.chat([{'role': 'user', 'content': 'a'}]),
        'score': lambda: root.fork()[0].score(['b' * 50] * 40).result(),
        'choose': lambda: root.fork()[0].choose(['b' * 50, 'c']).result(),
        'beams': lambda: llm.beam_search('a', beams),
        'memory': memory,
        'verbs': verbs,
    }
    for name, call in calls.items():
        before = llm.metrics['running'] + llm.metrics['waiting']
        timer = threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            call()
            print(name, 'went on')
        except KeyboardInterrupt:
            timer.join()
        if name in ('generate', 'chat', 'beams'):  # what was interrupted is cancelled
            print(name, llm.metrics['running'] + llm.metrics['waiting'] - before)
    work.cancel()
    print(root.generate(max_tokens=3).result().finish_reason)
    root.prune()
    gc.collect()
    print([llm.metrics[key] for key in ('running', 'waiting')], llm.memory().in_use)
    llm._runtime.engine.check_invariants()
    """
    done = run_program(_dedent(source))
    expected = "generate 0\nchat 0\nbeams 0\nlength\n[0, 0] 0\n"
    assert done.stdout == expected, (done.stdout, done.stderr)
    assert done.returncode == 0 and done.stderr == ""


def test_ctrl_c_ends_a_script_as_python_ends_one():
    done = run_program(
        ENDLESS + "threading.Timer(0.2, lambda: print('ready')).start()\nwork.result()",
        interrupt=True,
    )
    assert done.returncode == -signal.SIGINT and done.elapsed < SOON
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")


def test_ctrl_c_in_async_code_cancels_what_is_awaited():
    source = """
    import trio
    async def read(handle):
        async for _ in handle:
            pass
    async def wait(handle):
        await handle
    for run in (asyncio.run, trio.run):
        for main in (read, wait):
            branch = root.fork()[0]
            work = branch.generate(max_tokens=900_000)
            next(iter(work))
            def press():
                promise = work._state.promise
                while not (promise._for_end or promise._for_progress):
                    time.sleep(0.01)
                time.sleep(0.1)
                os.kill(os.getpid(), signal.SIGINT)
            presser = threading.Thread(target=press)
            presser.start()
            try:
                if run is trio.run:
                    trio.run(main, work)
                else:
                    asyncio.run(main(work))
            except KeyboardInterrupt:
                presser.join()
                print(main.__name__, work.done and work.result().finish_reason)
    """
    done = run_program(SLOW + _dedent(source))
    assert done.stdout == "read abort\nwait abort\n" * 2, (done.stdout, done.stderr)
    assert done.returncode == 0 and done.stderr == ""


def test_ctrl_c_again_and_again_never_tears_the_tree():
    """Verbs of the main thread under a rain of interrupts; the laws hold afterwards."""
    source = """
    llm = scripted(slowly(letters, 1e-4))
    root = llm.branch('abc' * 10)
    counts = {'rounds': 0, 'interrupts': 0}
    def rain():
        time.sleep(0.1)
        while counts["interrupts"] < 60:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.003)
    thread = threading.Thread(target=rain, daemon=True)
    thread.start()
    while thread.is_alive():
        try:
            with root.fork(3) as branches:
                branches.extend('xyz')
                branches.fork(2)
                work = branches[0].generate(max_tokens=20)
                branches[1].truncate(5)
                work.result()
                branches.score('q').result()
                counts['rounds'] += 1
        except KeyboardInterrupt:
            counts['interrupts'] += 1
    try:
        time.sleep(0.1)
    except KeyboardInterrupt:
        pass
    root.prune()
    del branches, work, root
    gc.collect()
    memory = llm.memory()
    llm._runtime.engine.check_invariants()
    print(memory.in_use, llm.metrics['running'], llm.metrics['waiting'])
    print(llm.generate('a', SamplingParams(max_tokens=3))[0].outputs[0].finish_reason)
    """
    done = run_program(_dedent(source))
    assert done.stdout == "0 0 0\nlength\n", (done.stdout, done.stderr)
    assert done.returncode == 0 and not without_pythons_own(done.stderr), done.stderr


def without_pythons_own(errors: str) -> str:
    """`errors` without what Python says when a Ctrl-C falls into a callback of its own library.

    Imports, for one, drop their locks in weak references' callbacks.
    """
    reports = re.split(r"^(?=Exception ignored )", errors, flags=re.M)
    inside = os.path.dirname(os.__file__)
    return "".join(
        report
        for report in reports
        if not report.endswith("KeyboardInterrupt: \n") or not _is_all_inside(report, inside)
    )


def _is_all_inside(report: str, folder: str) -> bool:
    files = re.findall(r'^  File "(.*?)"', report, flags=re.M)
    return all(f.startswith(("<frozen", folder)) and "site-packages" not in f for f in files)


def test_nothing_of_ours_runs_python_code_where_an_object_dies():
    """A Ctrl-C that falls into such code is printed and lost, and what it had to do undone."""
    banned = r"def __del__|\bWeak(Value|Key)Dictionary\b.*\(|\bWeakSet\b.*\(|weakref\.finalize"
    found = [
        f"{path}:{number}: {line.strip()}"
        for path in sorted((ROOT / "cotrt").rglob("*.py"))
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if re.search(banned, line)
    ]
    assert not found, found


@pytest.mark.skipif(sys.platform == "win32", reason="fork is a POSIX call")
def test_a_forked_child_gets_engine_dead_errors_and_ends_cleanly():
    source = """
    chat = llm.start_chat(chat_template='{{ messages }}')
    chunks = iter(work[1])
    finished = root.fork()[0].generate(max_tokens=1)
    finished.result()
    before = root.fork(2)
    pid = os.fork()
    if pid == 0:
        calls = {
            'result': work[0].result, 'cancel': work[0].cancel, 'finished': finished.result,
            'iterate': lambda: next(iter(work[0])), 'next': lambda: next(chunks),
            'generate': lambda: llm.generate('a'), 'branch': lambda: llm.branch('a'),
            'fork': root.fork, 'extend': lambda: root.extend('b'), 'prune': root.prune,
            'truncate': lambda: root.truncate(0), 'score': lambda: root.score('b'),
            'choose': lambda: root.choose(['b', 'c']), 'text': lambda: root.text,
            'len': lambda: len(root), 'kv': lambda: root.kv, 'parent': lambda: root.parent,
            'memory': llm.memory, 'metrics': lambda: llm.metrics, 'close': root.close,
            'keep': lambda: root.keep(1), 'send': lambda: chat.send('a'),
            'await': lambda: asyncio.run(wait()), 'undo': chat.undo,
            'beams': lambda: llm.beam_search('a', BeamSearchParams(beam_width=1, max_tokens=1)),
        }
        async def wait():
            await work[0]
        for name, call in calls.items():
            try:
                call()
            except EngineDeadError as error:
                assert 'fork' in str(error), error
            else:
                print('no error:', name)
        try:
            with root, work, before:
                raise LookupError('its own')
        except LookupError:
            pass
        del before, chunks
        gc.collect()
        llm.close()
        print('child is done')
        sys.exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    work.cancel()
    print('parent goes on', root.generate(max_tokens=2).result().finish_reason)
    print('ready')
    """
    done = run_program(ENDLESS + _dedent(source))
    assert done.stdout == "child is done\nparent goes on length\nready\n", done
    assert_clean(done)


@pytest.mark.skipif(sys.platform == "win32", reason="fork is a POSIX call")
def test_fork_while_other_threads_hold_the_engine():
    """Children never wait for a lock that a thread of the parent held."""
    source = """
    def churn():
        while not stop.is_set():
            with root.fork(4) as branches:
                branches.extend('b')
    stop = threading.Event()
    threads = [threading.Thread(target=churn) for _ in range(3)]
    for thread in threads: thread.start()
    for _ in range(20):
        pid = os.fork()
        if pid == 0:
            try:
                root.generate()
            except EngineDeadError:
                os._exit(5)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    stop.set()
    for thread in threads: thread.join()
    print('ready')
    """
    done = run_program(ENDLESS + _dedent(source))
    assert_clean(done)


def test_garbage_collection_of_handles_closes_them_in_any_thread_and_in_cycles():
    source = """
    gc.set_threshold(20)
    llm = scripted(slowly(letters, 1e-4))
    root = llm.branch('abc' * 20)
    def churn():
        for _ in range(60):
            class Cycle: pass
            cycle = Cycle()
            cycle.me, cycle.branches = cycle, root.fork(3)
            cycle.work = cycle.branches.generate(max_tokens=4)
            async def wait(work=cycle.work, cycle=cycle):
                await work
            cycle.coroutine = wait()
            cycle.coroutine.close()
    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    gc.collect()
    while llm.metrics['running'] or llm.metrics['waiting']: time.sleep(0.01)
    print(llm.memory().in_use == root.kv.blocks, len(root.children))
    root.close()
    print(llm.memory().in_use)
    print('ready')
    """
    done = run_program(_dedent(source))
    assert done.stdout == "True 0\n0\nready\n", (done.stdout, done.stderr)
    assert_clean(done)


def test_a_model_that_nobody_holds_gives_back_its_thread_and_its_pool():
    source = """
    import weakref
    llm = scripted()
    root = llm.branch('a')
    root.generate(max_tokens=3).result()
    engine, runtime = weakref.ref(llm._runtime.engine), weakref.ref(llm._runtime)
    del llm
    assert len(root.generate(max_tokens=3).result().token_ids) == 3  # the branch holds it
    work = root.generate(max_tokens=10)
    del root
    work.result()
    del work
    gc.collect()
    deadline = time.monotonic() + 10
    while engine() is not None and time.monotonic() < deadline: time.sleep(0.01)
    print(runtime(), engine(), threading.active_count())
    """
    done = run_program(_dedent(source))
    assert done.stdout == "None None 1\n", (done.stdout, done.stderr)


def test_a_model_that_raises_system_exit_ends_the_engine_and_not_the_program():
    source = """
    llm = scripted(lambda ids: sys.exit(9))
    try:
        llm.generate('a')
    except EngineDeadError as error:
        print('dead')
    try:
        llm.branch('b')
    except EngineDeadError:
        print('still dead')
    """
    done = run_program(_dedent(source))
    assert done.stdout == "dead\nstill dead\n" and done.returncode == 0, done.stderr


def test_dropped_handles_close_their_branches():
    with scripted() as llm:
        root = llm.branch("a" * 40)
        root.fork(5).generate(max_tokens=30).result()
        _look_at_the_dead(root)
        del root
        assert eventually(lambda: is_idle(llm))


def _look_at_the_dead(root):
    assert eventually(lambda: len(root.children) == 0)
    child = root.fork()[0]
    grandchild = child.fork()[0]
    identity = child.id
    del child
    assert grandchild.parent is not None and grandchild.parent.id == identity
    assert [c.id for c in root.children] == [identity]


def _dedent(source: str) -> str:
    import textwrap

    return textwrap.dedent(source)
