// An AttentionPlan held natively, and its work items for a given shape of heads.
#pragma once

#include <vector>

#include "aligned_buffer.h"
#include "kernel_table.h"

namespace cotrt {

struct AttentionPlan {
  int block_size = 0;
  int chunk_tokens = 0;  // kAttentionChunk: fixed chunks (AttentionArgs); 0: none
  std::vector<int32_t> query_positions, group_blocks, group_block_offsets, group_start, group_len,
      group_rows, group_row_offsets, group_causal, row_partials, row_partial_offsets;

  int num_rows() const { return int(query_positions.size()); }
  int num_groups() const { return int(group_len.size()); }
  bool needs_merge() const;
  // Throws std::invalid_argument where an index points outside of its array or of the cache.
  void check(int64_t num_blocks) const;
};

struct AttentionHeads {
  int q, kv, dim;
  DType type;  // of the caches
};

// The plan with long runs of few rows cut into pieces, each with partial results of its own: `cut`
// is made, and true, where there are any. A decode row of a long context is several groups then.
bool cut_long_runs(const AttentionPlan& plan, int heads_per_kv_head, AttentionPlan* cut);

// Jobs of one step, in the order in which they are best claimed. Each is at most kMaxJobRows stacked
// rows of a group.
std::vector<AttentionJob> make_attention_jobs(const AttentionPlan& plan, const AttentionHeads& heads,
                                              int num_threads);

// The job that a thread will probably claim after `index`.
inline const AttentionJob* next_job(const std::vector<AttentionJob>& jobs, int index,
                                    int num_threads) {
  const size_t next = size_t(index) + size_t(num_threads);
  return next < jobs.size() ? &jobs[next] : nullptr;
}

// Points a's plan fields at the plan.
void bind_plan(const AttentionPlan& plan, AttentionArgs* a);

// Scratch of each thread and the partial results, kept between calls.
class AttentionScratchPool {
 public:
  void reserve(int num_threads, int64_t num_partials, int num_q_heads, int head_dim);
  char* thread(int t) const { return threads_.data() + size_t(t) * stride_; }
  float* partial_out() const { return out_.as<float>(); }
  float* partial_lse() const { return lse_.as<float>(); }
  float* partial_sum() const { return sum_.as<float>(); }

 private:
  size_t stride_ = 0;
  AlignedBuffer threads_, out_, lse_, sum_;
};

}  // namespace cotrt
