"""Spans of tokens: fork in constant time, cut without touching what children see."""

from __future__ import annotations

import random

from cotrt.tree.tokens import TokenSpan


def span_of(ids: list[int]) -> TokenSpan:
    span = TokenSpan()
    span.extend(ids)
    return span


def all_ids(span: TokenSpan) -> list[int]:
    return span.slice_ids(0, len(span))


def test_a_child_sees_the_parents_tokens_up_to_its_fork_point() -> None:
    parent = span_of([1, 2, 3, 4, 5])
    child = parent.child(3)
    child.extend([9])
    parent.extend([6])
    assert all_ids(child) == [1, 2, 3, 9]
    assert all_ids(parent) == [1, 2, 3, 4, 5, 6]
    assert child.slice_ids(1, 4) == [2, 3, 9]


def test_truncating_a_parent_below_a_fork_leaves_the_child_alone() -> None:
    parent = span_of([1, 2, 3, 4, 5])
    child = parent.child(4)
    parent = parent.truncated(2)
    parent.extend([7, 8, 9])
    assert all_ids(child) == [1, 2, 3, 4]
    assert all_ids(parent) == [1, 2, 7, 8, 9]


def test_truncating_below_its_own_fork_point_goes_up_the_parents() -> None:
    grand = span_of([1, 2, 3])
    parent = grand.child(3)
    parent.extend([4, 5])
    child = parent.child(5)
    child.extend([6])
    child = child.truncated(2)
    child.extend([0])
    assert (all_ids(child), all_ids(parent)) == ([1, 2, 0], [1, 2, 3, 4, 5])
    assert all_ids(child.truncated(0)) == []


def test_truncating_in_place_keeps_what_no_child_looks_at() -> None:
    span = span_of([1, 2, 3, 4])
    assert span.truncated(2) is span
    assert all_ids(span) == [1, 2]


def test_logprobs_and_sampled_marks_follow_the_tokens() -> None:
    parent = span_of([1, 2])
    parent.ids.append(3)
    parent.logprobs.append(-0.5)
    parent.sampled.append(1)
    child = parent.child(3)
    child.extend([4])
    assert child.slice_logprobs(0, 4) == [None, None, -0.5, None]
    assert child.slice_sampled(1, 4) == bytes([0, 1, 0])


def test_random_forks_and_cuts_agree_with_plain_lists() -> None:
    pick = random.Random(0)
    spans, lists = [span_of([1])], [[1]]
    for count in range(3000):
        at = pick.randrange(len(spans))
        if pick.random() < 0.4:
            length = pick.randint(0, len(lists[at]))
            spans.append(spans[at].child(length))
            lists.append(lists[at][:length])
        elif pick.random() < 0.4:
            length = pick.randint(0, len(lists[at]))
            spans[at] = spans[at].truncated(length)
            del lists[at][length:]
        else:
            spans[at].extend([count, count + 1])
            lists[at] += [count, count + 1]
        low = pick.randint(0, len(lists[at]))
        assert spans[at].slice_ids(low, len(lists[at])) == lists[at][low:]
    assert [all_ids(span) for span in spans] == lists


def test_a_chain_of_20_000_spans_needs_no_recursion() -> None:
    span = span_of([0])
    for number in range(1, 20_000):
        span = span.child(len(span))
        span.extend([number])
    assert all_ids(span) == list(range(20_000))
    del span  # nor does giving it back
