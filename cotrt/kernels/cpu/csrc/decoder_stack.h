// The whole decoder as one native call a step: embedding rows to logits.
//
// The residual stream, q/k/v before rotation and all sums are float32; what goes into a product is
// what the instruction set takes beside the weights (KernelTable::row_type).
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attention_work.h"
#include "packed_linear.h"
#include "thread_pool.h"

namespace cotrt {

struct StackShape {
  int vocab_size, hidden_size, intermediate_size, num_layers;
  int num_q_heads, num_kv_heads, head_dim, rot_dim;
  float rms_norm_eps;
  DType type;  // float32 or bf16: of the KV cache
  bool fixed_order;  // of every linear, see LinearArgs
};

struct StackLayer {
  std::vector<float> input_norm, post_norm, q_norm, k_norm;  // the last two may be empty
  std::shared_ptr<PackedLinear> qkv, o, gate_up, down;
  char* k_cache = nullptr;
  char* v_cache = nullptr;
};

// One step's inputs; the arrays outlive the call.
struct StackStep {
  int num_rows, num_logits_rows;
  const int32_t* input_ids;    // [T]
  const int64_t* slot_mapping; // [T]
  const float* cos;            // [num_positions][rot_dim / 2]
  const float* sin;
  int num_positions;
  const int32_t* logits_rows;  // [R]
  float* logits;               // [R][vocab_size]
  const AttentionPlan* plan;
  // [T] or null: the first part whose output is not finite, -1 where there is none. 0 is the
  // embedding, 1 + 2 l the attention of layer l, 2 + 2 l its MLP.
  int32_t* first_bad = nullptr;
};

class DecoderStack final : private Work {
 public:
  explicit DecoderStack(const StackShape& shape);
  void set_layer(int index, StackLayer layer);
  void set_outer(std::shared_ptr<PackedLinear> embed, std::shared_ptr<PackedLinear> head,
                 std::vector<float> norm);
  // Device memory of one (k, v) pair a layer, each num_blocks blocks.
  void bind_kv(const std::vector<std::pair<uintptr_t, uintptr_t>>& caches, int64_t num_blocks,
               int block_size);
  void run(const StackStep& step);

  // Seconds spent in each kind of phase since the last reset, and their names.
  std::vector<std::pair<std::string, double>> timings() const;
  void reset_timings();
  // Breaks off the step that runs, which then throws, and every later one: the program ends, and
  // the KV may be left unfinished. From any thread.
  void interrupt() { interrupted_ = true; }
  const StackShape& shape() const { return shape_; }

 private:
  enum Kind {
    kEmbed, kInputNorm, kQkv, kRope, kAttention, kMerge, kSelect, kQuantiseO, kO, kPostNorm,
    kGateUp, kQuantiseDown, kDown, kFinalNorm, kHead, kRowBlock, kNumKinds
  };
  struct Phase {
    Kind kind;
    int layer;
  };
  // Row-major activations whose rows begin an odd number of cache lines apart.
  struct Rows {
    AlignedBuffer buffer;
    ptrdiff_t stride = 0;  // bytes
    void reserve(int rows, int64_t row_bytes);
    char* at(int64_t row = 0) const { return buffer.data() + row * stride; }
  };

  int num_phases() const override { return int(phases_.size()); }
  int num_chunks(int phase) override;
  void run(int phase, int chunk, int thread) override;

  int choose_block_rows() const;
  void reserve(const StackStep& step);
  void list_phases();
  int rows_of(const Phase& p) const;
  LinearArgs linear_args(const Phase& p) const;
  void run_row_block(int layer, int row0, int row1, int thread) const;
  const char* next_weights(const Phase& p) const;
  const PackedLinear& linear_of(const Phase& p) const;
  // shift: rows of x_ from a row's place to where it is kept.
  void norm_rows(const Phase& p, int row0, int row1, ptrdiff_t shift = 0) const;
  void note_bad(const Phase& done) const;
  void quantise_rows(const PackedLinear& w, const Rows& from, int row0, int row1) const;

  StackShape shape_;
  std::vector<StackLayer> layers_;
  std::shared_ptr<PackedLinear> embed_, head_;
  std::vector<float> norm_;
  int64_t num_blocks_ = 0;
  int block_size_ = 0;
  std::mutex mutex_;
  std::atomic<bool> interrupted_{false};

  // The step that runs now.
  std::shared_ptr<ThreadPool> pool_;
  StackStep step_{};
  std::vector<Phase> phases_;
  AttentionPlan cut_plan_;  // the step's, where its runs are cut
  std::vector<AttentionJob> jobs_;
  AttentionArgs attention_{};
  RopeArgs rope_{};
  LinearArgs args_{};
  std::unique_ptr<LinearChunks> chunks_;
  Rows residual_, x_, qkv_, q_, attended_, act_;
  DType row_type_;         // of x, q, attended and act
  bool quantises_ = false;  // what goes into a linear is first made int16, with scales
  Rows quantised_;
  AlignedBuffer row_scale_;  // [rows][scale_stride_]
  ptrdiff_t scale_stride_ = 0;
  // The last layer goes on with the rows that have logits only.
  Rows selected_residual_, selected_;
  bool selecting_ = false;
  int block_rows_ = 0;  // rows a block where blocks of rows go through a layer, else 0
  AttentionScratchPool scratch_;

  double seconds_[kNumKinds] = {};
  std::chrono::steady_clock::time_point opened_;
  int open_kind_ = -1;
};

}  // namespace cotrt
