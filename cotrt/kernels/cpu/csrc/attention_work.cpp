#include "attention_work.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace cotrt {

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

std::vector<AttentionJob> make_attention_jobs(const AttentionPlan& plan, int num_q_heads,
                                              int num_kv_heads, int num_threads) {
  const int heads = num_q_heads / num_kv_heads, groups = plan.num_groups();
  // In units of one key of one row; reading a key's K and V costs about as much as 6 rows of it.
  const auto cost = [&](int g, int64_t rows) { return (rows + 6) * int64_t(plan.group_len[g]); };
  int64_t total = 0;
  for (int g = 0; g < groups; ++g)
    total += cost(g, int64_t(plan.group_row_offsets[g + 1] - plan.group_row_offsets[g]) * heads);
  total *= num_kv_heads;
  const int64_t target = std::max<int64_t>(total / (num_threads * 3), 1);

  const int unit = kernels().job_row_unit;
  std::vector<AttentionJob> jobs;
  std::vector<int64_t> costs;
  for (int g = 0; g < groups; ++g) {
    const int rows = (plan.group_row_offsets[g + 1] - plan.group_row_offsets[g]) * heads;
    if (rows == 0) continue;
    // Pieces of at least 24 rows: below that a key is read too often for its products.
    int pieces = int(std::min<int64_t>(ceil_div(cost(g, rows), target), std::max(rows / 24, 1)));
    pieces = std::max(pieces, ceil_div(rows, kMaxJobRows));
    for (int h = 0; h < num_kv_heads; ++h)
      for (int p = 0; p < pieces; ++p) {
        const auto cut = [&](int piece) {
          return min_int(rows, int(int64_t(ceil_div(rows, unit)) * piece / pieces) * unit);
        };
        const int first = cut(p), last = cut(p + 1);
        if (first == last) continue;
        jobs.push_back({g, h, first, last});
        int64_t tokens = plan.group_len[g];
        if (plan.group_causal[g]) {
          const int row = plan.group_rows[plan.group_row_offsets[g] + (last - 1) / heads];
          tokens = std::min<int64_t>(tokens, plan.query_positions[row] - plan.group_start[g] + 1);
        }
        costs.push_back(tokens * (last - first + 6));
      }
  }
  std::vector<int> order(jobs.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return costs[a] > costs[b]; });
  std::vector<AttentionJob> sorted(jobs.size());
  for (size_t i = 0; i < order.size(); ++i) sorted[i] = jobs[order[i]];
  return sorted;
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
