"""The scheduler: one progress rule, leaders and followers, shared draws, preemption, refusal."""

from __future__ import annotations

from typing import Any

import pytest
from tree_rig import Desk

from cotrt.tree.schedule.step import Step
from cotrt.tree.schedule.work import Work, WorkState


def rows(step: Step | None) -> list[tuple[int, int, int]]:
    """(sequence, first position, rows) of each entry."""
    assert step is not None
    return [(e.work.seq.id, e.start, e.num_rows) for e in step.entries]


def drawing(step: Step | None) -> list[int]:
    assert step is not None
    return [work.seq.id for work in step.draws]


def run_to_end(desk: Desk, tokens: Any = None, limit: int = 2000) -> int:
    for count in range(limit):
        if not desk.scheduler.has_work:
            return count
        desk.run(tokens)
        desk.scheduler.take_exhausted()
    raise AssertionError("no end")


def grows_to(length: int) -> Any:
    """Tokens until a sequence is `length` long, different for each sequence and position."""

    def tokens(work: Work) -> int | None:
        seq = work.seq
        return None if seq.length >= length else 100 + 7 * seq.id + seq.length

    return tokens


def test_a_prompt_is_computed_in_chunks_of_the_budget() -> None:
    desk = Desk(max_num_batched_tokens=8)
    desk.generate(desk.root(range(20)))
    steps = [desk.run(), desk.run(), desk.run()]
    assert [rows(step) for step in steps] == [[(0, 0, 8)], [(0, 8, 8)], [(0, 16, 4)]]
    assert [drawing(step) for step in steps] == [[], [], [0]]


def test_running_works_come_before_waiting_ones_and_share_the_budget() -> None:
    desk = Desk(max_num_batched_tokens=10)
    desk.generate(desk.root(range(4)))
    desk.run(grows_to(9))
    desk.generate(desk.root(range(50, 70)))
    assert rows(desk.run(grows_to(9))) == [(0, 4, 1), (1, 0, 9)]


def test_lower_priority_numbers_and_tree_neighbours_come_first() -> None:
    desk = Desk(max_num_seqs=1)
    a, b = desk.root([1, 2]), desk.root([3, 4])
    a_child = desk.fork(a)
    desk.generate(b)
    desk.generate(a_child)
    desk.generate(desk.root([5, 6]), priority=-1)
    order = []
    while desk.scheduler.has_work:
        order += drawing(desk.run())
    assert order == [3, 2, 1]


def test_no_more_works_run_than_max_num_seqs() -> None:
    desk = Desk(max_num_seqs=3)
    works = [desk.generate(desk.root([i, i])) for i in range(5)]
    desk.run(grows_to(4))
    assert [work.state for work in works].count(WorkState.RUNNING) == 3
    assert run_to_end(desk, grows_to(4)) < 20


def test_one_of_many_equal_prompts_computes_and_all_draw_from_its_logits() -> None:
    desk = Desk()
    for _ in range(32):
        desk.generate(desk.root(range(100)))
    step = desk.run(grows_to(103))
    assert rows(step) == [(0, 0, 100)]
    assert drawing(step) == list(range(32))
    assert step is not None and step.plan.sample_rows.tolist() == [0] * 32
    desk.scheduler.counters.count_tokens()
    assert desk.scheduler.counters.prompt_tokens_computed == 100


def test_followers_wait_while_their_leader_is_chunked_and_draw_with_it() -> None:
    desk = Desk(max_num_batched_tokens=16)
    parent = desk.root(range(40))
    children = [desk.fork(parent) for _ in range(4)]
    for child in children:
        desk.generate(child)
    steps = [desk.run(), desk.run(), desk.run()]
    assert [len(rows(step)) for step in steps] == [1, 1, 1]
    assert drawing(steps[2]) == [child.id for child in children]
    assert not desk.scheduler.has_work


def test_a_prompt_with_a_common_beginning_waits_for_it_and_computes_the_rest() -> None:
    desk = Desk(max_num_batched_tokens=16)
    desk.generate(desk.root([*range(20), 1, 1]))
    desk.generate(desk.root([*range(20), 2, 2]))
    assert rows(desk.run()) == [(0, 0, 16)]
    assert rows(desk.run()) == [(0, 16, 6)]
    assert rows(desk.run()) == [(1, 20, 2)]


def test_the_prefix_is_taken_over_when_its_leader_is_cancelled() -> None:
    desk = Desk(max_num_batched_tokens=16)
    leader = desk.generate(desk.root(range(40)))
    follower = desk.generate(desk.root(range(40)))
    desk.run()
    assert follower.leader is leader
    desk.end(leader)
    # What the leader had computed is kept: the follower goes on from there.
    assert rows(desk.run()) == [(1, 16, 16)]
    assert drawing(desk.run()) == [1]


def test_a_follower_of_a_leader_that_is_pruned_takes_its_cached_blocks() -> None:
    desk = Desk(max_num_batched_tokens=16)
    leader = desk.generate(desk.root(range(40)))
    desk.generate(desk.root(range(40)))
    desk.run()
    desk.end(leader)
    desk.scheduler.drop_sequence(leader.seq, pruned=True)
    assert rows(desk.run()) == [(1, 16, 16)]


def test_a_fully_cached_prompt_computes_one_row_without_writing() -> None:
    for length in (3, 4, 5, 8, 12):
        desk = Desk()
        desk.generate(desk.root(range(length)))
        desk.run()
        desk.generate(desk.root(range(length)))
        step = desk.run()
        assert rows(step) == [(1, length - 1, 1)]
        assert step is not None and step.plan.slot_mapping.tolist() == [-1]
        desk.scheduler.counters.count_tokens()
        counters = desk.scheduler.counters
        assert (counters.prompt_tokens_computed, counters.recomputed_tokens) == (length, 1)


def test_without_prompt_matching_forks_share_and_roots_do_not() -> None:
    desk = Desk(match_prompts=False)
    parent = desk.root(range(9))
    desk.generate(desk.fork(parent))
    desk.run()
    desk.generate(desk.fork(parent))
    assert rows(desk.run()) == [(2, 8, 1)]
    desk.generate(desk.root(range(9)))
    assert rows(desk.run()) == [(3, 0, 9)]


def test_an_idle_ancestor_takes_the_kv_that_a_descendant_has_computed() -> None:
    desk = Desk()
    parent = desk.root(range(10))
    child = desk.fork(parent)
    desk.generate(desk.fork(child))
    desk.run()
    assert (parent.num_computed, child.num_computed) == (10, 10)


def test_scores_of_options_share_the_row_that_they_all_need() -> None:
    desk = Desk()
    parent = desk.root(range(10))
    works = []
    for option in ([20, 21], [20, 22], [30]):
        child = desk.fork(parent)
        child.span.extend(option)
        works.append(desk.score(child, 10))
    step = desk.run()
    assert step is not None
    # The prompt and option 0's first token, which is all that option 1 needs too.
    assert rows(step) == [(1, 0, 11)]
    assert sorted((w.seq.id, p) for w, p in step.scored) == [
        (1, 9),
        (1, 10),
        (2, 9),
        (2, 10),
        (3, 9),
    ]
    assert not desk.scheduler.has_work


def test_scored_rows_are_limited_and_do_not_keep_draws_waiting() -> None:
    desk = Desk(max_scored_rows=4)
    for _ in range(3):
        desk.score(desk.root(range(20)), 1)
    desk.generate(desk.root([50, 51]))
    drawn_in = None
    for number in range(20):
        step = desk.run()
        if step is None:
            break
        if step.draws:
            drawn_in = number
        assert len(step.plan.logits_rows) <= 4 + 1
    assert drawn_in == 0
    assert not desk.scheduler.has_work


def test_a_step_that_only_lengthens_is_equal_to_one_scheduled_afresh() -> None:
    def plans(afresh: bool) -> list[Any]:
        desk = Desk(block_size=4)
        parent = desk.root(range(10))
        for _ in range(3):
            desk.generate(desk.fork(parent))
        found = []
        while desk.scheduler.has_work:
            if afresh:
                desk.scheduler.disturb()
            step = desk.run(grows_to(30))
            assert step is not None
            found.append((step.plan, step.hashes.tolist()))
        return found

    for (a, a_hashes), (b, b_hashes) in zip(plans(False), plans(True), strict=True):
        assert a.input_ids.tolist() == b.input_ids.tolist()
        assert a.positions.tolist() == b.positions.tolist()
        assert a.slot_mapping.tolist() == b.slot_mapping.tolist()
        assert a.attention.group_len.tolist() == b.attention.group_len.tolist()
        assert a_hashes == b_hashes


def test_the_victim_is_a_later_work_that_holds_most_alone() -> None:
    desk = Desk(num_blocks=7, block_size=4)
    first = desk.generate(desk.root(range(8)))
    long = desk.generate(desk.root(range(100, 116)))
    short = desk.generate(desk.root(range(200, 204)))
    tokens = grows_to(60)
    desk.run(tokens)
    desk.run(tokens)  # all 7 blocks are taken, and the first needs one
    assert desk.scheduler.counters.preemptions == 1
    assert (first.state, long.state, short.state) == (
        WorkState.RUNNING,
        WorkState.WAITING,
        WorkState.RUNNING,
    )


@pytest.mark.parametrize("num_blocks", [7, 8, 10, 16])
@pytest.mark.parametrize("match_prompts", [True, False])
def test_works_that_need_more_than_the_pool_take_turns_and_all_end(
    num_blocks: int, match_prompts: bool
) -> None:
    desk = Desk(num_blocks=num_blocks, block_size=4, match_prompts=match_prompts)
    works = [desk.generate(desk.root(range(50 * i, 50 * i + 10))) for i in range(6)]
    run_to_end(desk, grows_to(27))
    assert [work.seq.length for work in works] == [27] * 6
    assert desk.scheduler.counters.preemptions > 0


def test_the_first_running_work_goes_on_at_every_step() -> None:
    desk = Desk(num_blocks=6, block_size=4)
    works = [desk.generate(desk.root(range(50 * i, 50 * i + 9))) for i in range(4)]
    for _ in range(200):
        first = next((w for w in works if w.state is not WorkState.DONE), None)
        if first is None:
            break
        before = (first.seq.num_computed, first.seq.length)
        desk.run(grows_to(20))
        assert first.state is WorkState.DONE or (first.seq.num_computed, first.seq.length) > before
    assert all(work.state is WorkState.DONE for work in works)


def test_a_work_that_alone_outgrows_the_pool_is_handed_over_and_others_go_on() -> None:
    desk = Desk(num_blocks=4, block_size=4)
    big = desk.generate(desk.root(range(10)))
    small = desk.generate(desk.root([50, 51]))
    exhausted: list[Work] = []
    for _ in range(100):
        if not desk.scheduler.has_work:
            break
        desk.run(lambda work: None if work is small and work.seq.length > 5 else work.seq.length)
        for work in desk.scheduler.take_exhausted():
            exhausted.append(work)
            desk.end(work)
    assert exhausted == [big]
    assert big.seq.length == 17
    assert small.state is WorkState.DONE


def test_a_work_alone_gives_up_a_shared_tail_before_it_is_called_too_long() -> None:
    desk = Desk(num_blocks=2, block_size=4)
    seq = desk.root(range(8))
    desk.generate(seq)
    desk.run()
    desk.tree.truncate_tip(seq, 6)
    seq.span = seq.span.truncated(6)
    seq.span.extend([90])
    desk.generate(seq)  # its tail views a sealed block, and there is no third block to copy to
    assert drawing(desk.run()) == [0]
    assert desk.scheduler.take_exhausted() == []


def test_idle_branches_give_up_their_kv_before_running_works_do() -> None:
    desk = Desk(num_blocks=6, block_size=4)
    idle = desk.root(range(16))
    desk.generate(idle)
    desk.run()
    desk.generate(desk.root(range(50, 66)))
    desk.run(grows_to(20))
    assert desk.scheduler.counters.preemptions == 0
    assert idle.num_computed == 0
    desk.generate(idle)
    assert run_to_end(desk, grows_to(20)) < 50


def test_of_idle_branches_those_with_blocks_of_their_own_go_first_and_then_the_longest_unused() -> (
    None
):
    desk = Desk(num_blocks=12, block_size=4)
    shared, old, new = desk.root(range(8)), desk.root(range(20, 28)), desk.root(range(40, 48))
    for seq in (shared, old, new):
        desk.generate(seq)
        desk.run()
    fork = desk.fork(shared)
    shared.last_used, fork.last_used, new.last_used, old.last_used = 1, 2, 4, 3

    def held(num_tokens: int) -> list[int]:
        """Tokens whose KV each has once there is room for so many others."""
        other = desk.root(range(100, 100 + num_tokens))
        desk.generate(other)
        desk.run()
        desk.scheduler.drop_sequence(other, pruned=True)
        return [seq.num_computed for seq in (shared, fork, old, new)]

    assert held(23) == [8, 8, 8, 8]
    assert held(31) == [8, 8, 0, 8]
    assert held(39) == [8, 8, 0, 0]
    assert held(47) == [0, 0, 0, 0]


def test_a_leased_branch_gives_up_its_kv_last() -> None:
    desk = Desk(num_blocks=6, block_size=4)
    kept, other = desk.root(range(8)), desk.root(range(20, 28))
    for seq in (kept, other):
        desk.generate(seq)
        desk.run()
    kept.last_used, other.last_used = 0, 1
    kept.keep_until = 1e18
    desk.generate(desk.root(range(50, 62)))
    desk.run()
    assert (kept.num_computed, other.num_computed) == (8, 0)


def test_a_work_started_in_this_step_keeps_its_kv_while_others_are_admitted() -> None:
    desk = Desk(num_blocks=4, block_size=4)
    for number in range(3):
        desk.generate(desk.root(range(20 * number, 20 * number + 7)))
    step = desk.run()
    assert step is not None
    for entry in step.entries:
        assert entry.work.seq.num_computed == 7


def test_token_counters_tell_given_from_sampled_and_first_from_again() -> None:
    desk = Desk()
    parent = desk.root(range(10))
    for child in [desk.fork(parent), desk.fork(parent)]:
        desk.generate(child)
    # Both draw the same tokens, so all but the first computation of each is again.
    run_to_end(desk, lambda work: None if work.seq.length >= 13 else 77)
    desk.scheduler.counters.count_tokens()
    counters = desk.scheduler.counters
    assert counters.prompt_tokens_computed == 10
    assert counters.generated_tokens_computed == 3
    assert counters.recomputed_tokens == 3
    assert counters.prompt_tokens_reused == 10


def test_a_long_prompt_leaves_room_for_decodes_behind_it_and_for_new_requests() -> None:
    desk = Desk(max_num_batched_tokens=8, max_num_seqs=4)
    desk.generate(desk.root(range(40)))  # ranks first
    desk.run(grows_to(60))  # 8 of its 40 tokens
    desk.generate(desk.root(range(50, 53)))
    step = desk.run(grows_to(60))
    assert rows(step) == [(0, 8, 4), (1, 0, 3)]  # half of the budget is left for those who wait
    step = desk.run(grows_to(60))
    assert rows(step) == [(0, 12, 7), (1, 3, 1)]  # and a row for each that runs behind it
    assert drawing(step) == [1]
