// The Python face: tensors come as addresses (their Python callers checked dtype and layout),
// numpy arrays of a plan as arrays. The GIL is given up around all work.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "attention_work.h"
#include "cpu_features.h"
#include "decoder_stack.h"
#include "packed_linear.h"
#include "sampler.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace cotrt;

namespace {

template <class T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
T* address(uintptr_t p) {
  return reinterpret_cast<T*>(p);
}

std::vector<int32_t> copy(const Array<int32_t>& a) {
  return std::vector<int32_t>(a.data(), a.data() + a.shape(0));
}

// bf16 values as float32 and back, for callers whose rows are bf16 where the kernels' are not.
void widen(const char* from, int64_t from_stride, int rows, int64_t k, AlignedBuffer* to) {
  to->reserve(size_t(rows) * size_t(k) * 4);
  for (int r = 0; r < rows; ++r) {
    const uint16_t* x = reinterpret_cast<const uint16_t*>(from + r * from_stride);
    uint32_t* y = to->as<uint32_t>() + r * k;
    for (int64_t i = 0; i < k; ++i) y[i] = uint32_t(x[i]) << 16;
  }
}

void narrow(const float* from, int64_t count, uint16_t* to) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t u;
    std::memcpy(&u, from + i, 4);
    to[i] = from[i] == from[i] ? uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16) : uint16_t(0x7fc0);
  }
}

struct TreeAttention {
  AttentionPlan cut_plan;
  AttentionScratchPool scratch;
  AlignedBuffer q, out;
  std::mutex mutex;
};

// One scratch for all calls of the plain function; the decoder stack has its own.
TreeAttention& shared_attention() {
  static TreeAttention* a = new TreeAttention;
  return *a;
}

void tree_attention(const AttentionPlan& given, DType type, uintptr_t q, uintptr_t k_cache,
                    uintptr_t v_cache, uintptr_t out, int64_t num_blocks, int num_q_heads,
                    int num_kv_heads, int head_dim, float scale) {
  given.check(num_blocks);
  const auto pool = thread_pool();
  TreeAttention& shared = shared_attention();
  std::lock_guard<std::mutex> lock(shared.mutex);
  const bool cut = cut_long_runs(given, num_q_heads / num_kv_heads, &shared.cut_plan);
  const AttentionPlan& plan = cut ? shared.cut_plan : given;
  shared.scratch.reserve(pool->num_threads(), int64_t(plan.group_rows.size()), num_q_heads, head_dim);
  AttentionArgs a{};
  const DType row_type = kernels().row_type(type);
  const int64_t row = int64_t(num_q_heads) * head_dim;
  const ptrdiff_t stride = row * element_bytes(row_type);
  const bool convert = row_type != type;
  if (convert) {
    widen(address<const char>(q), row * element_bytes(type), plan.num_rows(), row, &shared.q);
    shared.out.reserve(size_t(plan.num_rows()) * size_t(stride));
  }
  a.type = type;
  a.q = convert ? shared.q.data() : address<const char>(q);
  a.q_stride = stride;
  a.k_cache = address<const char>(k_cache);
  a.v_cache = address<const char>(v_cache);
  a.out = convert ? shared.out.data() : address<char>(out);
  a.out_stride = stride;
  a.partial_out = shared.scratch.partial_out();
  a.partial_lse = shared.scratch.partial_lse();
  a.partial_sum = shared.scratch.partial_sum();
  a.num_q_heads = num_q_heads;
  a.num_kv_heads = num_kv_heads;
  a.head_dim = head_dim;
  a.scale = scale;
  bind_plan(plan, &a);
  const std::vector<AttentionJob> jobs =
      make_attention_jobs(plan, {num_q_heads, num_kv_heads, head_dim, type}, pool->num_threads());
  struct Run final : Work {
    const AttentionArgs& a;
    const std::vector<AttentionJob>& jobs;
    const AttentionScratchPool& scratch;
    int rows, threads;
    bool merge;
    Run(const AttentionArgs& a_, const std::vector<AttentionJob>& j, const AttentionScratchPool& s,
        const AttentionPlan& plan, int threads_)
        : a(a_), jobs(j), scratch(s), rows(plan.num_rows()), threads(threads_),
          merge(plan.needs_merge()) {}
    int num_phases() const override { return merge ? 2 : 1; }
    int num_chunks(int phase) override { return phase ? ceil_div(rows, 8) : int(jobs.size()); }
    void run(int phase, int chunk, int thread) override {
      if (phase)
        kernels().attention_merge(a, chunk * 8, min_int(rows, chunk * 8 + 8));
      else
        kernels().attention(a, jobs[size_t(chunk)], next_job(jobs, chunk, threads),
                            scratch.thread(thread));
    }
  } work(a, jobs, shared.scratch, plan, pool->num_threads());
  pool->run(work);
  if (convert) narrow(shared.out.as<float>(), plan.num_rows() * row, address<uint16_t>(out));
}

}  // namespace

NB_MODULE(_native, m) {
  // A program may end with a living model; what it leaves to the system is no leak worth a report.
  nb::set_leak_warnings(false);
  // Throws where COTRT_CPU_ISA asks for what this machine does not run.
  m.def("isa", [] { return std::string(kernels().name); });
  // Why a better instruction set was passed over, or "".
  m.def("isa_warning", [] { return isa_choice().warning; });
  m.def("built_isas", &built_isas);
  m.def("available_isas", &available_isas);
  m.def("emulated_isas", &emulated_isas);
  // For tests: the choice among `names` with a kernel taken for broken.
  m.def(
      "choose_isa",
      [](const std::vector<std::string>& names, const std::string& forced,
         const std::string& spoiled) {
        const IsaChoice choice = choose_isa(names, forced, spoiled);
        return std::make_pair(std::string(choice.table->name), choice.warning);
      },
      "names"_a, "forced"_a = "", "spoiled"_a = "");
  m.def("set_num_threads", &set_num_threads, "n"_a);
  m.def("num_threads", [] { return thread_pool()->num_threads(); });
  m.def("default_num_threads", &default_num_threads);

  nb::enum_<DType>(m, "DType")
      .value("float32", DType::kFloat32)
      .value("bfloat16", DType::kBFloat16)
      .value("int8", DType::kInt8)
      .value("float16", DType::kFloat16);
  nb::enum_<Epilogue>(m, "Epilogue")
      .value("store", Epilogue::kStore)
      .value("add", Epilogue::kAdd)
      .value("silu_mul", Epilogue::kSiluMul);

  nb::class_<AttentionPlan>(m, "AttentionPlan")
      .def(
          "__init__",
          [](AttentionPlan* self, int block_size, Array<int32_t> query_positions,
             Array<int32_t> group_blocks, Array<int32_t> group_block_offsets,
             Array<int32_t> group_start, Array<int32_t> group_len, Array<int32_t> group_rows,
             Array<int32_t> group_row_offsets, Array<int32_t> group_causal,
             Array<int32_t> row_partials, Array<int32_t> row_partial_offsets, int chunk_tokens) {
            new (self) AttentionPlan{block_size,
                                     chunk_tokens,
                                     copy(query_positions),
                                     copy(group_blocks),
                                     copy(group_block_offsets),
                                     copy(group_start),
                                     copy(group_len),
                                     copy(group_rows),
                                     copy(group_row_offsets),
                                     copy(group_causal),
                                     copy(row_partials),
                                     copy(row_partial_offsets)};
          },
          "block_size"_a, "query_positions"_a, "group_blocks"_a, "group_block_offsets"_a,
          "group_start"_a, "group_len"_a, "group_rows"_a, "group_row_offsets"_a, "group_causal"_a,
          "row_partials"_a, "row_partial_offsets"_a, "chunk_tokens"_a = 0)
      .def_prop_ro("num_rows", &AttentionPlan::num_rows)
      .def_ro("block_size", &AttentionPlan::block_size);

  m.def("tree_attention", &tree_attention, nb::call_guard<nb::gil_scoped_release>(), "plan"_a,
        "dtype"_a, "q"_a, "k_cache"_a, "v_cache"_a, "out"_a, "num_blocks"_a, "num_q_heads"_a,
        "num_kv_heads"_a, "head_dim"_a, "scale"_a);

  m.def(
      "write_kv",
      [](DType type, uintptr_t k, uintptr_t v, uintptr_t k_cache, uintptr_t v_cache,
         uintptr_t slot_mapping, int num_rows, int num_kv_heads, int head_dim, int block_size) {
        WriteKvArgs a{type,
                      address<const char>(k),
                      address<const char>(v),
                      address<const int64_t>(slot_mapping),
                      address<char>(k_cache),
                      address<char>(v_cache),
                      num_kv_heads,
                      head_dim,
                      block_size};
        parallel_for(ceil_div(num_rows, 8), [&](int c, int) {
          kernels().write_kv(a, c * 8, min_int(num_rows, c * 8 + 8));
        });
      },
      nb::call_guard<nb::gil_scoped_release>());

  // Whole blocks of every cache, (source, destination) pairs; no destination is a source.
  m.def(
      "copy_blocks",
      [](const std::vector<std::pair<uintptr_t, int64_t>>& caches,
         const std::vector<std::pair<int64_t, int64_t>>& pairs) {
        const auto copy = [&](int c, int) {
          char* base = address<char>(caches[size_t(c)].first);
          const int64_t bytes = caches[size_t(c)].second;
          for (const auto& [from, to] : pairs)
            std::memcpy(base + to * bytes, base + from * bytes, size_t(bytes));
        };
        int64_t total = 0;
        for (const auto& cache : caches) total += cache.second * int64_t(pairs.size());
        // Giving the GIL away may cost a busy thread's 5 ms: not for copies shorter than that.
        if (total < int64_t(16) << 20) return parallel_for(int(caches.size()), copy);
        nb::gil_scoped_release release;
        parallel_for(int(caches.size()), copy);
      },
      "caches"_a, "pairs"_a);

  m.def(
      "rms_norm",
      [](uintptr_t x, uintptr_t weight, int n, float eps, uintptr_t y, DType y_type, int rows) {
        kernels().rms_norm(address<const float>(x), n, address<const float>(weight), n, eps,
                           address<char>(y), ptrdiff_t(n) * element_bytes(y_type), y_type, 0, rows);
      },
      nb::call_guard<nb::gil_scoped_release>());

  m.def(
      "silu_mul",
      [](uintptr_t x, uintptr_t y, DType type, int n, int rows) {
        const ptrdiff_t bytes = element_bytes(type);
        parallel_for(ceil_div(rows, 8), [&](int c, int) {
          kernels().silu_mul(address<const char>(x), 2 * n * bytes, address<char>(y), n * bytes,
                             type, n, c * 8, min_int(rows, c * 8 + 8));
        });
      },
      nb::call_guard<nb::gil_scoped_release>());

  // D draws from rows of logits [.., vocab]; rows of raw logits give the logprobs.
  m.def(
      "sample",
      [](uintptr_t logits, uintptr_t raw, int vocab, Array<int32_t> rows, Array<int32_t> raw_rows,
         Array<float> temperature, Array<int32_t> top_k, Array<float> top_p, Array<float> min_p,
         Array<uint32_t> key_low, Array<uint32_t> key_high, uintptr_t ids, uintptr_t logprobs,
         uintptr_t bad) {
        const int n = int(rows.shape(0));
        for (size_t size : {raw_rows.shape(0), temperature.shape(0), top_k.shape(0), top_p.shape(0),
                            min_p.shape(0), key_low.shape(0), key_high.shape(0)})
          if (int(size) != n) throw std::invalid_argument("one value a draw");
        // The GIL is kept: beside a busy Python thread, getting it back would take longer than this.
        const auto pool = thread_pool();
        std::vector<Sampler> samplers(size_t(pool->num_threads()));
        parallel_for(n, [&](int i, int thread) {
          const Draw d{address<const float>(logits) + int64_t(rows.data()[i]) * vocab,
                       address<const float>(raw) + int64_t(raw_rows.data()[i]) * vocab,
                       temperature.data()[i],
                       top_k.data()[i],
                       top_p.data()[i],
                       min_p.data()[i],
                       DrawKey{key_low.data()[i], key_high.data()[i]}};
          const Drawn drawn = samplers[size_t(thread)].draw(d, vocab);
          address<int32_t>(ids)[i] = drawn.token;
          address<float>(logprobs)[i] = drawn.logprob;
          address<uint8_t>(bad)[i] = drawn.bad;
        });
      },
      "logits"_a, "raw"_a, "vocab"_a, "rows"_a, "raw_rows"_a, "temperature"_a, "top_k"_a, "top_p"_a,
      "min_p"_a, "key_low"_a, "key_high"_a, "ids"_a, "logprobs"_a, "bad"_a);

  nb::class_<PackedLinear>(m, "PackedLinear")
      .def(nb::init<int, int, DType, bool>(), "n"_a, "k"_a, "dtype"_a, "interleave"_a = false)
      .def(
          "fill",
          [](PackedLinear& self, int row0, int rows, uintptr_t source, DType source_type) {
            self.fill(row0, rows, address<const void>(source), source_type);
          },
          nb::call_guard<nb::gil_scoped_release>(), "row0"_a, "rows"_a, "source"_a,
          "source_dtype"_a)
      .def(
          "fill_bias",
          [](PackedLinear& self, int row0, int rows, uintptr_t bias) {
            self.fill_bias(row0, rows, address<const float>(bias));
          },
          "row0"_a, "rows"_a, "bias"_a)
      .def(
          "unpack_row",
          [](const PackedLinear& self, int64_t row, uintptr_t out) {
            if (row < 0 || row >= self.n()) throw std::invalid_argument("no such row");
            self.unpack_row(row, address<float>(out));
          },
          "row"_a, "out"_a)
      .def(
          "run",
          [](const PackedLinear& self, uintptr_t x, int64_t x_stride, int m, uintptr_t y,
             int64_t y_stride, DType y_type, Epilogue epilogue, bool fixed_order) {
            LinearArgs a = self.args();
            a.fixed_order = fixed_order;
            a.x = address<const char>(x);
            a.x_stride = x_stride;
            const KernelTable& k = kernels();
            const DType row_type = k.row_type(self.type());
            AlignedBuffer wide, integers, scale;
            if (self.type() != DType::kFloat32 && row_type != DType::kBFloat16) {
              widen(a.x, x_stride, m, self.k(), &wide);
              a.x = wide.data();
              a.x_stride = ptrdiff_t(self.k()) * 4;
            }
            if (row_type == DType::kInt16) {
              integers.reserve(size_t(m) * self.k() * 2);
              const int groups = num_scale_groups(self.k());
              scale.reserve(size_t(m) * groups * 4);
              k.quantise_rows(a.x, a.x_stride, self.k(), self.int16_limit(), integers.data(),
                              ptrdiff_t(self.k()) * 2, scale.as<float>(), groups, 0, m);
              a.x = integers.data();
              a.x_stride = ptrdiff_t(self.k()) * 2;
              a.x_scale = scale.as<float>();
              a.x_scale_stride = groups;
            }
            a.y = address<char>(y);
            a.y_stride = y_stride;
            a.y_type = y_type;
            a.epilogue = epilogue;
            const LinearChunks chunks(self, m, thread_pool()->num_threads());
            parallel_for(chunks.count(), [&](int c, int) { chunks.run(a, c); });
          },
          nb::call_guard<nb::gil_scoped_release>(), "x"_a, "x_stride"_a, "m"_a, "y"_a, "y_stride"_a,
          "y_dtype"_a, "epilogue"_a, "fixed_order"_a = false)
      .def_prop_ro("n", &PackedLinear::n)
      .def_prop_ro("k", &PackedLinear::k)
      .def_prop_ro("bytes", &PackedLinear::bytes);

  nb::class_<DecoderStack>(m, "DecoderStack")
      .def(
          "__init__",
          [](DecoderStack* self, int vocab_size, int hidden_size, int intermediate_size,
             int num_layers, int num_q_heads, int num_kv_heads, int head_dim, int rot_dim,
             float rms_norm_eps, DType dtype, bool fixed_order) {
            new (self) DecoderStack(StackShape{vocab_size, hidden_size, intermediate_size,
                                               num_layers, num_q_heads, num_kv_heads, head_dim,
                                               rot_dim, rms_norm_eps, dtype, fixed_order});
          },
          "vocab_size"_a, "hidden_size"_a, "intermediate_size"_a, "num_layers"_a, "num_q_heads"_a,
          "num_kv_heads"_a, "head_dim"_a, "rot_dim"_a, "rms_norm_eps"_a, "dtype"_a,
          "fixed_order"_a = false)
      .def(
          "set_layer",
          [](DecoderStack& self, int index, std::vector<float> input_norm,
             std::shared_ptr<PackedLinear> qkv, std::vector<float> q_norm,
             std::vector<float> k_norm, std::shared_ptr<PackedLinear> o,
             std::vector<float> post_norm, std::shared_ptr<PackedLinear> gate_up,
             std::shared_ptr<PackedLinear> down) {
            self.set_layer(index, StackLayer{std::move(input_norm), std::move(post_norm),
                                             std::move(q_norm), std::move(k_norm), std::move(qkv),
                                             std::move(o), std::move(gate_up), std::move(down)});
          },
          "index"_a, "input_norm"_a, "qkv"_a, "q_norm"_a, "k_norm"_a, "o"_a, "post_norm"_a,
          "gate_up"_a, "down"_a)
      .def("set_outer", &DecoderStack::set_outer, "embed"_a, "head"_a, "norm"_a)
      .def("bind_kv", &DecoderStack::bind_kv, "caches"_a, "num_blocks"_a, "block_size"_a)
      .def(
          "run",
          [](DecoderStack& self, const AttentionPlan& plan, Array<int32_t> input_ids,
             Array<int64_t> slot_mapping, uintptr_t cos, uintptr_t sin, int num_positions,
             Array<int32_t> logits_rows, uintptr_t logits, uintptr_t first_bad) {
            const StackStep step{int(input_ids.shape(0)),
                                 int(logits_rows.shape(0)),
                                 input_ids.data(),
                                 slot_mapping.data(),
                                 address<const float>(cos),
                                 address<const float>(sin),
                                 num_positions,
                                 logits_rows.data(),
                                 address<float>(logits),
                                 &plan,
                                 address<int32_t>(first_bad)};
            if (input_ids.shape(0) != slot_mapping.shape(0))
              throw std::invalid_argument("input_ids and slot_mapping differ in length");
            nb::gil_scoped_release release;
            self.run(step);
          },
          "plan"_a, "input_ids"_a, "slot_mapping"_a, "cos"_a, "sin"_a, "num_positions"_a,
          "logits_rows"_a, "logits"_a, "first_bad"_a = 0)
      .def("interrupt", &DecoderStack::interrupt)
      .def("timings", &DecoderStack::timings)
      .def("reset_timings", &DecoderStack::reset_timings);
}
