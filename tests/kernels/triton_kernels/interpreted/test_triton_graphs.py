"""Decode steps as graphs, recorded and replayed by a fake: against the eager reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import Sequences, make_model, random_ids, save
from fake_graphs import FakeGraphMaker
from test_triton_decoder import open_on

from cotrt.models.decoder import Decoder
from cotrt.models.graphs import bucket_sizes
from cotrt.plan import StepPlan

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the fake is the interpreter's")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_model("qwen3", head_dim=64, num_hidden_layers=1)
    return save(model, tmp_path_factory.mktemp("model"))


def with_graphs(folder: Path, max_num_seqs: int) -> tuple[Decoder, FakeGraphMaker]:
    decoder, maker = open_on("triton", folder, CPU), FakeGraphMaker()
    taken = decoder.warm_up(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=64, block_size=16, maker=maker
    )
    assert taken == 0  # there is no GPU whose memory could be taken
    return decoder, maker


def test_buckets() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(6) == [1, 2, 4, 6]
    assert bucket_sizes(8) == [1, 2, 4, 8]
    assert bucket_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert bucket_sizes(256)[:7] == [1, 2, 4, 8, 16, 24, 32] and len(bucket_sizes(256)) == 35


def test_replays_are_the_references_whatever_the_batch(folder: Path) -> None:
    """Prompts run eagerly; then decode steps of 1 to 5 sequences, in and out of the batch."""
    decoder, maker = with_graphs(folder, max_num_seqs=5)
    reference = open_on("reference", folder, CPU)
    runs = [Sequences(d, 64, 5) for d in (decoder, reference)]
    graphs = decoder.graphs
    assert graphs is not None and graphs.buckets == [1, 2, 4, 5]
    assert [key[0] for key in graphs.keys] == [5, 4, 2, 1]  # float32: one tile
    trials = len(maker.graphs) - len(graphs.keys)
    assert trials == 4  # recorded before the pool was there, and again when it was
    assert maker.num_clears == 1
    prompts = [(i, random_ids(3 + 4 * i, seed=i)) for i in range(5)]
    for run in runs:
        run.step(prompts, all_rows=False)
    assert (graphs.num_replays, graphs.num_eager) == (0, 1)
    rng = np.random.default_rng(0)
    batches = [[0, 1, 2, 3, 4], [3], [1, 3], [0, 2, 4], [4, 3, 2, 1, 0], [2]]
    for batch in batches:
        work = [(i, [int(rng.integers(3, 200))]) for i in batch]
        found, expected = (run.step(work) for run in runs)
        assert found.shape == expected.shape
        torch.testing.assert_close(
            torch.log_softmax(found, -1), torch.log_softmax(expected, -1), rtol=0, atol=1e-3
        )
    assert (graphs.num_replays, graphs.num_eager) == (len(batches), 1)
    replays = {key[0]: graph.num_replays for key, graph in graphs._graphs.items()}
    assert replays == {1: 2, 2: 1, 4: 1, 5: 2}  # three rows are padded to four


def test_the_graph_holds_the_kernels_and_copies_nothing_from_the_host(folder: Path) -> None:
    decoder, maker = with_graphs(folder, max_num_seqs=2)
    names = maker.graphs[0].names
    layers = decoder.config.num_layers
    assert names.count("norm_rotary_write_kernel") == layers
    assert names.count("attend_kernel") == names.count("merge_kernel") == layers
    assert names.count("rms_norm_kernel") == 2 * layers + 1
    assert not [name for name in names if "_to_copy" in name or "lift" in name or "item" in name]


def test_padding_rows_write_no_kv(folder: Path) -> None:
    decoder, _ = with_graphs(folder, max_num_seqs=4)
    run = Sequences(decoder, 32, 4)
    run.step([(i, [9 + i]) for i in range(4)])  # fills the static inputs
    run.step([(i, [19 + i]) for i in range(4)])
    before = [cache.clone() for layer in decoder.kv_caches for cache in layer]
    lengths = list(run.lengths)
    run.step([(i, [20 + i]) for i in range(3)])  # by the graph of four rows
    assert decoder.graphs is not None and decoder.graphs.num_replays == 3
    blocks = [int(run.tables[i][0]) for i in range(3)]
    after = [cache for layer in decoder.kv_caches for cache in layer]
    for old, new in zip(before, after, strict=True):
        changed = (old != new).any(dim=(1, 3)).nonzero().tolist()
        assert sorted(changed) == sorted([b, lengths[i]] for i, b in enumerate(blocks))


def test_ids_that_lie_on_the_device_stand_in_for_the_plans(folder: Path) -> None:
    decoder, _ = with_graphs(folder, max_num_seqs=3)
    plans: list[StepPlan] = []
    run = Sequences(decoder, 32, 2)
    run.step([(0, [5, 6]), (1, [7])])
    plain = decoder.run

    def keep(plan: StepPlan) -> torch.Tensor:
        plans.append(plan)
        return plain(plan)

    decoder.run = keep  # type: ignore[method-assign,assignment]
    expected = run.step([(0, [11]), (1, [0])]).clone()
    (plan,) = plans
    hidden = StepPlan(
        np.full(2, -1, np.int32), plan.positions, plan.slot_mapping, (), plan.attention,
        plan.logits_rows, plan.sample_rows,
    )  # fmt: skip
    given = torch.tensor([11, -1], dtype=torch.int32)  # a bad draw's -1 is read as token 0
    assert torch.equal(plain(hidden, given), expected)
    graphs, decoder.graphs = decoder.graphs, None
    eager = plain(hidden, given)
    torch.testing.assert_close(eager, expected, rtol=0, atol=1e-5)
    assert graphs is not None and graphs.num_replays == 3 and given.tolist() == [11, -1]


def test_a_plan_beyond_the_capacity_runs_eagerly(folder: Path, monkeypatch) -> None:
    import cotrt.models.decoder as module

    monkeypatch.setattr(module, "_MAX_GRAPH_ENTRIES", 64)
    decoder, _ = with_graphs(folder, max_num_seqs=2)
    reference = open_on("reference", folder, CPU)
    runs = [Sequences(d, 400, 3, block_size=8) for d in (decoder, reference)]
    for run in runs:
        run.lengths[:2] = 300, 300  # of zeros, as good as any other context
    graphs = decoder.graphs
    assert graphs is not None and graphs.num_replays == 0
    for work, replays in (
        ([(0, [5])], 1),  # 38 blocks
        ([(0, [6]), (1, [7])], 1),  # 76 blocks, the work list holds 64
        ([(0, [8]), (1, [9]), (2, [3])], 1),  # more rows than the largest bucket
        ([(1, [4])], 2),
        ([(2, [5, 6])], 3),  # two rows of one sequence, both with logits
    ):
        found, expected = (run.step(work) for run in runs)
        torch.testing.assert_close(
            torch.log_softmax(found, -1), torch.log_softmax(expected, -1), rtol=0, atol=1e-3
        )
        assert graphs.num_replays == replays, work


def test_eager_when_asked_for(folder: Path) -> None:
    decoder, maker = open_on("triton", folder, CPU), FakeGraphMaker()
    decoder.warm_up(
        max_num_seqs=2, max_num_batched_tokens=64, block_size=16, capture=False, maker=maker
    )
    decoder.allocate_kv(4, 16)
    assert decoder.graphs is None and not maker.graphs
