#include "decoder_stack.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace cotrt {
namespace {

constexpr int kRowsPerChunk = 8;  // of norms, rotations and merges

// Blocks of rows pay from so many rows a thread on.
constexpr int kFewestBlockRows = 128;

void check(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

}  // namespace

void DecoderStack::Rows::reserve(int rows, int64_t row_bytes) {
  const int64_t lines = ceil_div(row_bytes, int64_t(64));
  stride = ptrdiff_t((lines | 1) * 64);
  buffer.reserve(size_t(rows) * size_t(stride));
}

DecoderStack::DecoderStack(const StackShape& shape)
    : shape_(shape), row_type_(kernels().row_type(shape.type)) {
  check(shape.head_dim % kLanes == 0 && shape.head_dim <= kMaxHeadDim,
        "head_dim must be a multiple of 16 up to 256");
  check(shape.num_kv_heads > 0 && shape.num_q_heads % shape.num_kv_heads == 0,
        "num_q_heads must be a multiple of num_kv_heads");
  check(shape.rot_dim % 2 == 0 && shape.rot_dim <= shape.head_dim, "rot_dim is out of range");
  layers_.resize(size_t(shape.num_layers));
}

void DecoderStack::set_layer(int index, StackLayer layer) {
  const StackShape& s = shape_;
  const auto fits = [](const std::shared_ptr<PackedLinear>& w, int n, int k) {
    return w && w->n() == n && w->k() == k;
  };
  const auto norm = [](const std::vector<float>& w, int n) {
    return w.empty() || int(w.size()) == n;
  };
  check(index >= 0 && index < s.num_layers, "no such layer");
  check(fits(layer.qkv, (s.num_q_heads + 2 * s.num_kv_heads) * s.head_dim, s.hidden_size), "qkv");
  check(fits(layer.o, s.hidden_size, s.num_q_heads * s.head_dim), "o");
  check(fits(layer.gate_up, 2 * s.intermediate_size, s.hidden_size), "gate_up");
  check(fits(layer.down, s.hidden_size, s.intermediate_size), "down");
  check(int(layer.input_norm.size()) == s.hidden_size, "input_norm");
  check(int(layer.post_norm.size()) == s.hidden_size, "post_norm");
  for (const auto& w : {layer.o, layer.gate_up, layer.down})
    check(w->type() == layer.qkv->type(), "the linears of a stack have one type of weights");
  check(norm(layer.q_norm, s.head_dim) && norm(layer.k_norm, s.head_dim), "q_norm or k_norm");
  layers_[size_t(index)] = std::move(layer);
}

void DecoderStack::set_outer(std::shared_ptr<PackedLinear> embed, std::shared_ptr<PackedLinear> head,
                             std::vector<float> norm) {
  check(embed && embed->n() == shape_.vocab_size && embed->k() == shape_.hidden_size, "embed");
  check(head && head->n() == shape_.vocab_size && head->k() == shape_.hidden_size, "head");
  check(int(norm.size()) == shape_.hidden_size, "norm");
  embed_ = std::move(embed);
  head_ = std::move(head);
  norm_ = std::move(norm);
}

void DecoderStack::bind_kv(const std::vector<std::pair<uintptr_t, uintptr_t>>& caches,
                           int64_t num_blocks, int block_size) {
  check(int(caches.size()) == shape_.num_layers, "one (k, v) pair a layer");
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < caches.size(); ++i) {
    layers_[i].k_cache = reinterpret_cast<char*>(caches[i].first);
    layers_[i].v_cache = reinterpret_cast<char*>(caches[i].second);
  }
  num_blocks_ = num_blocks;
  block_size_ = block_size;
}

void DecoderStack::run(const StackStep& step) {
  std::lock_guard<std::mutex> lock(mutex_);
  const StackShape& s = shape_;
  if (step.num_rows == 0) return;
  check(embed_ && layers_.front().k_cache, "weights and KV are bound before a step runs");
  check(step.plan->num_rows() == step.num_rows, "the plan has another number of rows");
  check(step.plan->block_size == block_size_, "the plan has another block size");
  check(!s.fixed_order || step.plan->chunk_tokens > 0, "fixed order needs a plan of fixed chunks");
  step.plan->check(num_blocks_);
  for (int i = 0; i < step.num_rows; ++i) {
    check(step.input_ids[i] >= 0 && step.input_ids[i] < s.vocab_size, "id outside the vocabulary");
    check(step.slot_mapping[i] < num_blocks_ * block_size_, "slot outside the cache");
    const int32_t position = step.plan->query_positions[size_t(i)];
    check(position >= 0 && position < step.num_positions, "position without angles");
  }
  for (int i = 0; i < step.num_logits_rows; ++i)
    check(step.logits_rows[i] >= 0 && step.logits_rows[i] < step.num_rows, "no such logits row");
  step_ = step;
  if (cut_long_runs(*step.plan, s.num_q_heads / s.num_kv_heads, &cut_plan_)) step_.plan = &cut_plan_;
  quantises_ = kernels().row_type(head_->type()) == DType::kInt16;
  pool_ = thread_pool();
  block_rows_ = choose_block_rows();
  reserve(step_);
  jobs_ = make_attention_jobs(*step_.plan, {s.num_q_heads, s.num_kv_heads, s.head_dim, s.type},
                              pool_->num_threads());
  list_phases();
  selecting_ = false;
  open_kind_ = -1;
  pool_->run(*this);
  if (open_kind_ >= 0)
    seconds_[open_kind_] +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - opened_).count();
  if (interrupted_) throw std::runtime_error("the step was broken off");
}

// Steps of many rows (prompts) take blocks of rows through all linears between two attentions: what
// lies between the linears of a block stays in its core's second-level cache, in rows that the next
// block uses again. Only weights are then read from further away, once a block.
int DecoderStack::choose_block_rows() const {
  const int threads = pool_->num_threads(), rows = step_.num_rows, most = kernels().row_block;
  // Between the linears of a block nobody looks for what is not finite, or makes rows int16.
  if (!most || quantises_ || step_.first_bad || rows < kFewestBlockRows * threads) return 0;
  const int blocks = threads * ceil_div(rows, most * threads);
  return ceil_div(ceil_div(rows, blocks), kPanel) * kPanel;
}

void DecoderStack::reserve(const StackStep& step) {
  const StackShape& s = shape_;
  const int t = step.num_rows, bytes = element_bytes(row_type_);
  const int q_size = s.num_q_heads * s.head_dim, kv_size = s.num_kv_heads * s.head_dim;
  const int between = block_rows_ ? max_int(block_rows_ * pool_->num_threads(), step.num_logits_rows)
                                  : t;
  residual_.reserve(t, int64_t(s.hidden_size) * 4);
  x_.reserve(between, int64_t(s.hidden_size) * bytes);
  qkv_.reserve(between, int64_t(q_size + 2 * kv_size) * 4);
  q_.reserve(t, int64_t(q_size) * bytes);
  attended_.reserve(t, int64_t(q_size) * bytes);
  act_.reserve(between, int64_t(s.intermediate_size) * bytes);
  selected_residual_.reserve(step.num_logits_rows, int64_t(s.hidden_size) * 4);
  selected_.reserve(step.num_logits_rows, int64_t(q_size) * bytes);
  if (quantises_) {
    const int widest = max_int(max_int(s.hidden_size, q_size), s.intermediate_size);
    quantised_.reserve(t, int64_t(widest) * element_bytes(DType::kInt16));
    scale_stride_ = num_scale_groups(widest);
    row_scale_.reserve(size_t(t) * size_t(scale_stride_) * 4);
  }
  scratch_.reserve(pool_->num_threads(), int64_t(step.plan->group_rows.size()), s.num_q_heads,
                   s.head_dim);
  attention_ = {};
  attention_.type = s.type;
  attention_.q = q_.at();
  attention_.q_stride = q_.stride;
  attention_.out = attended_.at();
  attention_.out_stride = attended_.stride;
  attention_.partial_out = scratch_.partial_out();
  attention_.partial_lse = scratch_.partial_lse();
  attention_.partial_sum = scratch_.partial_sum();
  attention_.num_q_heads = s.num_q_heads;
  attention_.num_kv_heads = s.num_kv_heads;
  attention_.head_dim = s.head_dim;
  attention_.scale = 1.f / std::sqrt(float(s.head_dim));
  bind_plan(*step.plan, &attention_);
  rope_ = {};
  rope_.type = s.type;
  rope_.qkv = reinterpret_cast<const float*>(qkv_.at());
  rope_.qkv_stride = qkv_.stride / 4;
  rope_.cos = step.cos;
  rope_.sin = step.sin;
  rope_.positions = step.plan->query_positions.data();
  rope_.eps = s.rms_norm_eps;
  rope_.slot_mapping = step.slot_mapping;
  rope_.q_out = q_.at();
  rope_.q_stride = q_.stride;
  rope_.num_q_heads = s.num_q_heads;
  rope_.num_kv_heads = s.num_kv_heads;
  rope_.head_dim = s.head_dim;
  rope_.rot_dim = s.rot_dim;
  rope_.block_size = block_size_;
}

void DecoderStack::list_phases() {
  phases_.clear();
  phases_.push_back({kEmbed, 0});
  const bool merge = step_.plan->needs_merge(), logits = step_.num_logits_rows > 0;
  for (int l = 0; l < shape_.num_layers; ++l) {
    const bool last = l + 1 == shape_.num_layers;
    if (block_rows_) {
      phases_.push_back({kRowBlock, l});
    } else {
      for (Kind kind : {kInputNorm, kQkv, kRope}) phases_.push_back({kind, l});
    }
    if (last && !logits) return;  // keys and values were all that was wanted
    phases_.push_back({kAttention, l});
    if (merge) phases_.push_back({kMerge, l});
    if (last)
      phases_.push_back({kSelect, l});
    else if (block_rows_)
      continue;  // the rest of the layer begins the next layer's blocks
    if (quantises_) phases_.push_back({kQuantiseO, l});
    for (Kind kind : {kO, kPostNorm, kGateUp}) phases_.push_back({kind, l});
    if (quantises_) phases_.push_back({kQuantiseDown, l});
    phases_.push_back({kDown, l});
  }
  phases_.push_back({kFinalNorm, 0});
  phases_.push_back({kHead, 0});
}

int DecoderStack::rows_of(const Phase&) const {
  return selecting_ ? step_.num_logits_rows : step_.num_rows;
}

const PackedLinear& DecoderStack::linear_of(const Phase& p) const {
  const StackLayer& layer = layers_[size_t(p.layer)];
  switch (p.kind) {
    case kInputNorm: case kQkv: return *layer.qkv;
    case kQuantiseO: case kO: return *layer.o;
    case kPostNorm: case kGateUp: return *layer.gate_up;
    case kQuantiseDown: case kDown: return *layer.down;
    default: return *head_;
  }
}

// First weights of the linear that follows p's, nothing between them taking long.
const char* DecoderStack::next_weights(const Phase& p) const {
  const size_t next = size_t(p.layer) + 1;
  switch (p.kind) {
    case kO: return layers_[size_t(p.layer)].gate_up->args().weight;
    case kGateUp: return layers_[size_t(p.layer)].down->args().weight;
    case kDown: return next < layers_.size() ? layers_[next].qkv->args().weight
                                             : head_->args().weight;
    default: return nullptr;
  }
}

LinearArgs DecoderStack::linear_args(const Phase& p) const {
  LinearArgs a = linear_of(p).args();
  a.fixed_order = shape_.fixed_order;
  const auto from = [&](const Rows& rows) {
    const Rows& r = quantises_ ? quantised_ : rows;
    a.x = r.at(), a.x_stride = r.stride;
    a.x_scale = quantises_ ? row_scale_.as<float>() : nullptr;
    a.x_scale_stride = scale_stride_;
  };
  const auto to = [&](const Rows& r, DType type, Epilogue epilogue) {
    a.y = r.at(), a.y_stride = r.stride, a.y_type = type, a.epilogue = epilogue;
  };
  const Rows& residual = selecting_ ? selected_residual_ : residual_;
  switch (p.kind) {
    case kQkv:
      from(x_), to(qkv_, DType::kFloat32, Epilogue::kStore);
      break;
    case kO:
      from(selecting_ ? selected_ : attended_), to(residual, DType::kFloat32, Epilogue::kAdd);
      break;
    case kGateUp:
      from(x_), to(act_, row_type_, Epilogue::kSiluMul);
      break;
    case kDown:
      from(act_), to(residual, DType::kFloat32, Epilogue::kAdd);
      break;
    default:
      from(x_);
      a.y = reinterpret_cast<char*>(step_.logits);
      a.y_stride = ptrdiff_t(shape_.vocab_size) * 4;
      a.y_type = DType::kFloat32;
      a.epilogue = Epilogue::kStore;
  }
  return a;
}

// Looks at the residual stream that `done` has left.
void DecoderStack::note_bad(const Phase& done) const {
  const int part = done.kind == kEmbed ? 0 : done.kind == kO ? 1 + 2 * done.layer
                                         : done.kind == kDown ? 2 + 2 * done.layer : -1;
  if (part < 0) return;
  const Rows& stream = selecting_ ? selected_residual_ : residual_;
  for (int r = 0; r < rows_of(done); ++r) {
    int32_t& first = step_.first_bad[selecting_ ? step_.logits_rows[r] : r];
    const float* x = reinterpret_cast<const float*>(stream.at(r));
    if (first < 0 && !std::all_of(x, x + shape_.hidden_size, [](float v) { return std::isfinite(v); }))
      first = part;
  }
}

int DecoderStack::num_chunks(int phase) {
  const Phase& p = phases_[size_t(phase)];
  if (step_.first_bad && phase > 0) note_bad(phases_[size_t(phase) - 1]);
  const auto now = std::chrono::steady_clock::now();
  if (open_kind_ >= 0) seconds_[open_kind_] += std::chrono::duration<double>(now - opened_).count();
  opened_ = now;
  open_kind_ = p.kind;
  if (p.kind == kSelect) selecting_ = true;
  const int rows = rows_of(p);
  switch (p.kind) {
    case kQkv: case kO: case kGateUp: case kDown: case kHead:
      args_ = linear_args(p);
      args_.next = next_weights(p);
      chunks_ = std::make_unique<LinearChunks>(linear_of(p), rows, pool_->num_threads());
      return chunks_->count();
    case kAttention:
      attention_.k_cache = layers_[size_t(p.layer)].k_cache;
      attention_.v_cache = layers_[size_t(p.layer)].v_cache;
      return int(jobs_.size());
    case kRowBlock:
    case kRope: {
      StackLayer& layer = layers_[size_t(p.layer)];
      rope_.q_norm = layer.q_norm.empty() ? nullptr : layer.q_norm.data();
      rope_.k_norm = layer.k_norm.empty() ? nullptr : layer.k_norm.data();
      rope_.k_cache = layer.k_cache;
      rope_.v_cache = layer.v_cache;
      if (p.kind == kRowBlock) return ceil_div(rows, block_rows_);
      return rows <= 2 ? 1 : ceil_div(rows, max_int(2, min_int(kRowsPerChunk, rows / 8)));
    }
    case kMerge:
      return rows <= 2 ? 1 : ceil_div(rows, kRowsPerChunk);
    default:
      return rows <= kRowsPerChunk ? 1 : ceil_div(rows, kRowsPerChunk);
  }
}

void DecoderStack::norm_rows(const Phase& p, int row0, int row1, ptrdiff_t shift) const {
  const Rows& from = selecting_ ? selected_residual_ : residual_;
  const float* weight = p.kind == kFinalNorm ? norm_.data()
                        : p.kind == kInputNorm ? layers_[size_t(p.layer)].input_norm.data()
                                               : layers_[size_t(p.layer)].post_norm.data();
  kernels().rms_norm(reinterpret_cast<const float*>(from.at()), from.stride / 4, weight,
                     shape_.hidden_size, shape_.rms_norm_eps, x_.at(shift), x_.stride, row_type_,
                     row0, row1);
  if (quantises_) quantise_rows(linear_of(p), x_, row0, row1);
}

// The end of the layer before, and this layer up to its attention. What lies between the linears is
// kept in rows of the thread's own.
void DecoderStack::run_row_block(int layer, int row0, int row1, int thread) const {
  const ptrdiff_t shift = ptrdiff_t(thread) * block_rows_ - row0;
  const auto multiply = [&](Kind kind, int of) {
    const Phase p{kind, of};
    LinearArgs a = linear_args(p);
    a.next = next_weights(p);
    if (kind != kO) a.x += shift * a.x_stride;
    if (kind == kQkv || kind == kGateUp) a.y += shift * a.y_stride;
    kernels().linear(a, row0, row1, 0, linear_of(p).num_panels());
  };
  if (layer > 0) {
    multiply(kO, layer - 1);
    norm_rows({kPostNorm, layer - 1}, row0, row1, shift);
    multiply(kGateUp, layer - 1);
    multiply(kDown, layer - 1);
  }
  norm_rows({kInputNorm, layer}, row0, row1, shift);
  multiply(kQkv, layer);
  RopeArgs rope = rope_;
  rope.qkv += shift * rope.qkv_stride;
  kernels().rope_and_write(rope, row0, row1);
}

void DecoderStack::quantise_rows(const PackedLinear& w, const Rows& from, int row0, int row1) const {
  kernels().quantise_rows(from.at(), from.stride, w.k(), w.int16_limit(), quantised_.at(),
                          quantised_.stride, row_scale_.as<float>(), scale_stride_, row0, row1);
}

void DecoderStack::run(int phase, int chunk, int thread) {
  if (interrupted_.load(std::memory_order_relaxed)) return;
  const Phase& p = phases_[size_t(phase)];
  const KernelTable& k = kernels();
  const int rows = rows_of(p);
  const int row0 = chunk * kRowsPerChunk, row1 = min_int(rows, row0 + kRowsPerChunk);
  switch (p.kind) {
    case kEmbed:
      for (int r = row0; r < row1; ++r)
        embed_->unpack_row(step_.input_ids[r], reinterpret_cast<float*>(residual_.at(r)));
      return;
    case kInputNorm: case kPostNorm: case kFinalNorm:
      return norm_rows(p, row0, row1);
    case kRowBlock:
      return run_row_block(p.layer, chunk * block_rows_, min_int(rows, (chunk + 1) * block_rows_),
                           thread);
    case kRope: {
      const int step = rows <= 2 ? rows : max_int(2, min_int(kRowsPerChunk, rows / 8));
      return k.rope_and_write(rope_, chunk * step, min_int(rows, (chunk + 1) * step));
    }
    case kAttention:
      return k.attention(attention_, jobs_[size_t(chunk)],
                         next_job(jobs_, chunk, pool_->num_threads()), scratch_.thread(thread));
    case kMerge:
      return k.attention_merge(attention_, row0, row1);
    case kSelect:
      for (int r = row0; r < row1; ++r) {
        const int from = step_.logits_rows[r];
        std::memcpy(selected_residual_.at(r), residual_.at(from), size_t(shape_.hidden_size) * 4);
        std::memcpy(selected_.at(r), attended_.at(from),
                    size_t(shape_.num_q_heads) * shape_.head_dim * element_bytes(row_type_));
      }
      return;
    case kQuantiseO:
      return quantise_rows(linear_of(p), selecting_ ? selected_ : attended_, row0, row1);
    case kQuantiseDown:
      return quantise_rows(linear_of(p), act_, row0, row1);
    default:
      return chunks_->run(args_, chunk);
  }
}

std::vector<std::pair<std::string, double>> DecoderStack::timings() const {
  static const char* const names[kNumKinds] = {
      "embed", "input_norm", "qkv", "rope_and_write", "attention", "merge", "select",
      "quantise_o", "o", "post_norm", "gate_up", "quantise_down", "down", "final_norm", "head",
      "row_blocks"};
  std::vector<std::pair<std::string, double>> out;
  for (int i = 0; i < kNumKinds; ++i) out.emplace_back(names[i], seconds_[i]);
  return out;
}

void DecoderStack::reset_timings() {
  for (double& s : seconds_) s = 0;
}

}  // namespace cotrt
