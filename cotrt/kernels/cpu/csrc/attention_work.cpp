#include "attention_work.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace cotrt {
namespace {

// Stacked rows of a kv head whose products take less time than their keys take to come.
constexpr int kFewRows = 16;

// Keys of few rows are read in pieces of about so many by several threads: a long context alone
// would keep one thread only. Whatever the number of threads, so that bits do not depend on it.
constexpr int kPieceKeys = 512;

// K and V that a job of several kv heads has in its core's second-level cache at once, and as much
// again that is on its way.
constexpr int64_t kChunkBytes = 256 << 10;

// Jobs of few rows wait for memory, those of many for their products: side by side each has what
// the other leaves. Half the threads begin with the latter; some of the former are kept for the
// end, where small jobs level the threads out. Of each kind the longest comes first.
std::vector<AttentionJob> in_claiming_order(const std::vector<AttentionJob>& jobs,
                                            const std::vector<int64_t>& costs, int num_threads) {
  std::vector<int> order(jobs.size()), few_rows, many_rows;
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return costs[a] > costs[b]; });
  for (int j : order)
    (jobs[j].last - jobs[j].first <= kFewRows ? few_rows : many_rows).push_back(j);
  const auto lead = ptrdiff_t(std::min(size_t(num_threads / 2), many_rows.size()));
  const auto kept = ptrdiff_t(few_rows.size() / 4);
  order.assign(many_rows.begin(), many_rows.begin() + lead);
  order.insert(order.end(), few_rows.begin(), few_rows.end() - kept);
  order.insert(order.end(), many_rows.begin() + lead, many_rows.end());
  order.insert(order.end(), few_rows.end() - kept, few_rows.end());
  std::vector<AttentionJob> sorted;
  for (int j : order) sorted.push_back(jobs[j]);
  return sorted;
}

}  // namespace

bool AttentionPlan::needs_merge() const {
  return std::any_of(row_partials.begin(), row_partials.end(), [](int32_t s) { return s >= 0; });
}

void AttentionPlan::check(int64_t num_blocks) const {
  const auto fail = [](const char* what) { throw std::invalid_argument(what); };
  const int t = num_rows(), g = num_groups();
  const int p = int(group_rows.size());
  const auto offsets = [&](const std::vector<int32_t>& o, int n, size_t end, const char* what) {
    if (int(o.size()) != n + 1 || o[0] != 0 || size_t(o[n]) != end) fail(what);
    for (int i = 0; i < n; ++i)
      if (o[i] > o[i + 1]) fail(what);
  };
  if (block_size < 8 || block_size > 256 || (block_size & (block_size - 1)))
    fail("block_size must be a power of two from 8 to 256");
  offsets(group_block_offsets, g, group_blocks.size(), "group_block_offsets");
  offsets(group_row_offsets, g, group_rows.size(), "group_row_offsets");
  offsets(row_partial_offsets, t, row_partials.size(), "row_partial_offsets");
  if (int(group_start.size()) != g || int(group_causal.size()) != g) fail("group arrays differ");
  if (chunk_tokens != 0 && chunk_tokens != kAttentionChunk) fail("chunk_tokens must be 0 or 256");
  for (int i = 0; i < g; ++i) {
    if (chunk_tokens && (group_start[i] % chunk_tokens != 0 ||
                         (group_start[i] != 0 && group_len[i] > chunk_tokens)))
      fail("a group is not made of the fixed chunks");
    const int blocks = ceil_div(group_len[i], block_size);
    if (group_len[i] < 0 || blocks > group_block_offsets[i + 1] - group_block_offsets[i])
      fail("group_len exceeds its blocks");
    for (int b = 0; b < blocks; ++b) {
      const int32_t id = group_blocks[group_block_offsets[i] + b];
      if (id < 0 || id >= num_blocks) fail("block id outside of the cache");
    }
  }
  for (int32_t r : group_rows)
    if (r < 0 || r >= t) fail("group row outside of the step");
  for (int32_t s : row_partials)
    if (s < -1 || s >= p) fail("partial slot out of range");
  for (int i = 0; i < t; ++i)
    if (row_partial_offsets[i] == row_partial_offsets[i + 1]) fail("a row without a group");
}

bool cut_long_runs(const AttentionPlan& plan, int heads_per_kv_head, AttentionPlan* cut) {
  if (plan.chunk_tokens) return false;  // its pieces are chosen already
  const auto pieces = [&](int g) {
    const int rows = plan.group_row_offsets[g + 1] - plan.group_row_offsets[g];
    const bool few = rows > 0 && rows * heads_per_kv_head <= kFewRows;
    return few ? max_int(1, (plan.group_len[g] + kPieceKeys / 2) / kPieceKeys) : 1;
  };
  const int groups = plan.num_groups();
  bool any = false;
  for (int g = 0; g < groups && !any; ++g) any = pieces(g) > 1;
  if (!any) return false;

  cut->block_size = plan.block_size;
  cut->chunk_tokens = 0;
  cut->query_positions = plan.query_positions;
  cut->group_block_offsets = cut->group_row_offsets = {0};
  cut->group_blocks.clear(), cut->group_start.clear(), cut->group_len.clear();
  cut->group_rows.clear(), cut->group_causal.clear();
  std::vector<int32_t> group_of_slot, lone_slot(size_t(plan.num_rows()), 0);
  std::vector<int32_t> first_slot, num_pieces;  // of each group
  for (int g = 0; g < groups; ++g) {
    const int n = pieces(g), blocks = ceil_div(plan.group_len[g], plan.block_size);
    const auto rows = plan.group_rows.begin() + plan.group_row_offsets[g];
    const auto rows_end = plan.group_rows.begin() + plan.group_row_offsets[g + 1];
    const auto run = plan.group_blocks.begin() + plan.group_block_offsets[g];
    first_slot.push_back(int32_t(cut->group_rows.size()));
    num_pieces.push_back(n);
    for (auto row = rows; row != rows_end; ++row) {
      lone_slot[size_t(*row)] = int32_t(group_of_slot.size());
      group_of_slot.push_back(g);
    }
    for (int p = 0; p < n; ++p) {
      const int from = int(int64_t(blocks) * p / n), to = int(int64_t(blocks) * (p + 1) / n);
      const int start = from * plan.block_size;
      cut->group_blocks.insert(cut->group_blocks.end(), run + from, run + to);
      cut->group_block_offsets.push_back(int32_t(cut->group_blocks.size()));
      cut->group_start.push_back(plan.group_start[g] + start);
      cut->group_len.push_back(min_int(plan.group_len[g], to * plan.block_size) - start);
      cut->group_causal.push_back(plan.group_causal[g]);
      cut->group_rows.insert(cut->group_rows.end(), rows, rows_end);
      cut->group_row_offsets.push_back(int32_t(cut->group_rows.size()));
    }
  }
  cut->row_partials.clear();
  cut->row_partial_offsets = {0};
  for (int r = 0; r < plan.num_rows(); ++r) {
    for (int i = plan.row_partial_offsets[r]; i < plan.row_partial_offsets[r + 1]; ++i) {
      const int lone = plan.row_partials[i] < 0, slot = lone ? lone_slot[r] : plan.row_partials[i];
      const int g = group_of_slot[slot], n = num_pieces[g];
      const int rows = plan.group_row_offsets[g + 1] - plan.group_row_offsets[g];
      const int first = first_slot[g] + slot - plan.group_row_offsets[g];
      for (int p = 0; p < n; ++p)
        cut->row_partials.push_back(lone && n == 1 ? -1 : first + p * rows);
    }
    cut->row_partial_offsets.push_back(int32_t(cut->row_partials.size()));
  }
  return true;
}

std::vector<AttentionJob> make_attention_jobs(const AttentionPlan& plan, const AttentionHeads& heads,
                                              int num_threads) {
  const int per_kv_head = heads.q / heads.kv, groups = plan.num_groups();
  // In units of one key of one row; reading a key's K and V costs about as much as 6 rows of it.
  const auto cost = [&](int g, int64_t rows) { return (rows + 6) * int64_t(plan.group_len[g]); };
  const auto rows_of = [&](int g) {
    return (plan.group_row_offsets[g + 1] - plan.group_row_offsets[g]) * per_kv_head;
  };
  int64_t total = 0;
  for (int g = 0; g < groups; ++g) total += cost(g, rows_of(g));
  total *= heads.kv;
  const int64_t target = std::max<int64_t>(total / (num_threads * 3), 1);
  const int64_t head_chunk = 2 * int64_t(kAttentionChunk) * heads.dim * element_bytes(heads.type);
  const int most_heads = int(std::max<int64_t>(kChunkBytes / head_chunk, 1));

  const int unit = kernels().job_row_unit;
  std::vector<AttentionJob> jobs;
  std::vector<int64_t> costs;
  for (int g = 0; g < groups; ++g) {
    const int rows = rows_of(g);
    if (rows == 0) continue;
    // Pieces of at least 24 rows: below that a key is read too often for its products.
    int pieces = int(std::min<int64_t>(ceil_div(cost(g, rows), target), std::max(rows / 24, 1)));
    pieces = std::max(pieces, ceil_div(rows, kMaxJobRows));
    // KV heads lie side by side in a block: where memory is what counts, one job reads a run of
    // several, as far as there are jobs enough for all threads.
    int together = 1;
    if (rows <= kFewRows)
      together = int(std::clamp<int64_t>(target / std::max<int64_t>(cost(g, rows), 1), 1,
                                         min_int(most_heads, kMaxJobRows / rows)));
    const int parts = ceil_div(heads.kv, together);
    for (int part = 0; part < parts; ++part)
      for (int p = 0; p < pieces; ++p) {
        const auto cut = [&](int piece) {
          return min_int(rows, int(int64_t(ceil_div(rows, unit)) * piece / pieces) * unit);
        };
        const int first = cut(p), last = cut(p + 1);
        if (first == last) continue;
        const int head = heads.kv * part / parts, end = heads.kv * (part + 1) / parts;
        jobs.push_back({g, first, last, head, end - head});
        int64_t tokens = plan.group_len[g];
        if (plan.group_causal[g]) {
          const int row = plan.group_rows[plan.group_row_offsets[g] + (last - 1) / per_kv_head];
          tokens = std::min<int64_t>(tokens, plan.query_positions[row] - plan.group_start[g] + 1);
        }
        costs.push_back(tokens * (last - first + 6) * (end - head));
      }
  }
  return in_claiming_order(jobs, costs, num_threads);
}

void bind_plan(const AttentionPlan& plan, AttentionArgs* a) {
  a->block_size = plan.block_size;
  a->fixed_chunks = plan.chunk_tokens != 0;
  a->query_positions = plan.query_positions.data();
  a->group_blocks = plan.group_blocks.data();
  a->group_block_offsets = plan.group_block_offsets.data();
  a->group_start = plan.group_start.data();
  a->group_len = plan.group_len.data();
  a->group_rows = plan.group_rows.data();
  a->group_row_offsets = plan.group_row_offsets.data();
  a->group_causal = plan.group_causal.data();
  a->row_partials = plan.row_partials.data();
  a->row_partial_offsets = plan.row_partial_offsets.data();
}

void AttentionScratchPool::reserve(int num_threads, int64_t num_partials, int num_q_heads,
                                   int head_dim) {
  stride_ = (attention_scratch_bytes() + 4095) / 4096 * 4096;
  threads_.reserve(size_t(num_threads) * stride_);
  out_.reserve(size_t(num_partials) * num_q_heads * head_dim * 4);
  lse_.reserve(size_t(num_partials) * num_q_heads * 4);
  sum_.reserve(size_t(num_partials) * num_q_heads * 4);
}

}  // namespace cotrt
