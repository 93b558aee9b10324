// What one instruction set provides: plain functions over plain structs.
//
// Each isa_*.cpp compiles the same headers with its own flags and fills one KernelTable. Code
// outside those files is compiled for the baseline and calls through the table.
#pragma once

#include "common.h"
#include "layouts.h"

namespace cotrt {

enum class Epilogue : int {
  kStore = 0,    // y = acc (+ bias)
  kAdd = 1,      // y += acc (+ bias), float32 y: the residual stream
  kSiluMul = 2,  // y[16j + i] = silu(lane i of panel j) * (lane 16 + i)
};

struct LinearArgs {
  const char* weight;  // packed, see layouts.h
  DType weight_type;
  int n, k;            // outputs (lanes in use) and inputs
  const char* next;    // weights that will probably be read after these, or null
  const char* x;       // [m] rows of row_type(weight_type), x_stride bytes apart
  ptrdiff_t x_stride;
  const float* x_scale;  // of int16 rows one a kScaleGroup of inputs, else null
  ptrdiff_t x_scale_stride;  // floats from a row's scales to the next's
  const float* scale;  // [n] of int8 and int16 weights, else null
  const float* bias;   // [n] or null; interleaved as the lanes are
  Epilogue epilogue;
  char* y;  // [m] rows, y_stride bytes apart
  ptrdiff_t y_stride;
  DType y_type;
  // A row's bits may not depend on m or on its place among the rows: no path, tile or order of
  // sums is chosen by the number of rows.
  bool fixed_order;
};

struct AttentionArgs {
  DType type;       // of the caches; q and out are row_type(type)
  const char* q;    // [T][Hq][D], q_stride bytes a row
  ptrdiff_t q_stride;
  const char* k_cache;
  const char* v_cache;
  char* out;  // [T][Hq][D], out_stride bytes a row
  ptrdiff_t out_stride;
  float* partial_out;  // [P][Hq][D], each normalised
  float* partial_lse;  // [P][Hq], log2 units
  // With fixed_chunks a partial is not normalised yet: partial_lse has its largest score, and
  // partial_sum [P][Hq] the sum of its weights.
  float* partial_sum;
  int num_q_heads, num_kv_heads, head_dim, block_size;
  float scale;
  // The plan (see cotrt/plan.py).
  const int32_t* query_positions;
  const int32_t* group_blocks;
  const int32_t* group_block_offsets;
  const int32_t* group_start;
  const int32_t* group_len;
  const int32_t* group_rows;
  const int32_t* group_row_offsets;
  const int32_t* group_causal;
  const int32_t* row_partials;
  const int32_t* row_partial_offsets;
  // A group begins at a multiple of kAttentionChunk, and only one that begins at 0 is longer than a
  // chunk. Every chunk has a result of its own, and these are added up from root to leaf, in a job
  // or in the merge with the same bits: a row's result depends on its own keys only.
  bool fixed_chunks;
};

// Rows of a group times the query heads of one kv head, "stacked": stacked row s is row
// s / group_size of the group, query head s % group_size of the kv head.
struct AttentionJob {
  int32_t group, first, last;      // stacked rows [first, last) of each kv head
  int32_t kv_head, num_kv_heads;   // side by side in every block
  int32_t num_rows() const { return num_kv_heads * (last - first); }  // at most kMaxJobRows
};

constexpr int kMaxJobRows = 192;
constexpr int kMaxHeadDim = 256;
constexpr int kAttentionChunk = 256;  // tokens a softmax pass, the largest block size

struct RopeArgs {
  DType type;        // of the caches; q_out is row_type(type)
  const float* qkv;  // [T][(Hq + 2 Hkv) D]
  ptrdiff_t qkv_stride;  // floats
  const float* cos;      // [positions][rot_dim / 2]
  const float* sin;
  const int32_t* positions;  // [T]
  const float* q_norm;  // [D] or null
  const float* k_norm;
  float eps;
  const int64_t* slot_mapping;  // [T]
  char* q_out;                  // [T][Hq][D]
  ptrdiff_t q_stride;           // bytes
  char* k_cache;
  char* v_cache;
  int num_q_heads, num_kv_heads, head_dim, rot_dim, block_size;
};

struct WriteKvArgs {
  DType type;
  const char* k;  // [T][Hkv][D] in type
  const char* v;
  const int64_t* slot_mapping;
  char* k_cache;
  char* v_cache;
  int num_kv_heads, head_dim, block_size;
};

// The noise of a draw: a hash of (key, token id), see cotrt/sampling/noise.py.
struct DrawKey {
  uint32_t low, high;
};

inline uint32_t noise_bits(DrawKey key, uint32_t id) {
  uint32_t x = id * 0x9E3779B9u + key.low;
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15) ^ key.high) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

constexpr int kSampleBlock = 64;  // tokens whose largest logit is kept

struct KernelTable {
  const char* name;
  int max_tile_rows;    // rows that one register tile holds
  int products_per_ns;  // about, of one core at bf16: how much makes a chunk of work
  int job_row_unit;     // stacked rows by which attention is best cut
  // Rows that a thread takes through all linears between two attentions at once, where a step has
  // many; 0 where every linear takes all rows of the step.
  int row_block;
  // What weights that are asked for as a type are packed as: int16 for bf16 where integers are
  // multiplied faster, else what was asked for.
  DType (*packed_type)(DType asked);
  // What rows beside weights (or K and V) of a type are: float32, bf16, or int16 from
  // quantise_rows.
  DType (*row_type)(DType weights);

  // Rows [m0, m1) times panels [panel0, panel1).
  void (*linear)(const LinearArgs&, int m0, int m1, int panel0, int panel1);
  // Float32 rows as int16, |y| <= limit, times a scale every kScaleGroup inputs. A group that is
  // not finite gets a NaN for its scale, one below 1e-30 counts as 0. Null where no row_type is
  // int16.
  void (*quantise_rows)(const char* x, ptrdiff_t x_stride, int k, int limit, char* y,
                        ptrdiff_t y_stride, float* scale, ptrdiff_t scale_stride, int row0,
                        int row1);
  // One embedding row out of a packed linear, as float32.
  void (*unpack_row)(const char* weight, DType type, int k, const float* scale, int64_t row,
                     float* out);
  // scratch: attention_scratch_bytes(), 64-byte aligned.
  // next: the job whose keys to ask for meanwhile, or null.
  void (*attention)(const AttentionArgs&, const AttentionJob&, const AttentionJob* next,
                    char* scratch);
  void (*attention_merge)(const AttentionArgs&, int row0, int row1);
  void (*rope_and_write)(const RopeArgs&, int row0, int row1);
  void (*write_kv)(const WriteKvArgs&, int row0, int row1);
  // y = x / rms(x) * weight; x float32, y of y_type.
  void (*rms_norm)(const float* x, ptrdiff_t x_stride, const float* weight, int n, float eps,
                   char* y, ptrdiff_t y_stride, DType y_type, int row0, int row1);
  void (*silu_mul)(const char* x, ptrdiff_t x_stride, char* y, ptrdiff_t y_stride, DType type,
                   int n, int row0, int row1);

  // Largest logit of each block of 64 (-inf past the end), and the largest of all.
  float (*block_maxima)(const float* logits, int n, float* maxima);
  // weights[i] = exp((logits[i] - top) * inverse_temperature), 0 up to a multiple of 64; returns
  // their sum. weights may be null. A NaN among the logits makes the sum one.
  double (*exp_sum)(const float* logits, int n, float top, float inverse_temperature,
                    float* weights);
  // Sum of the weights that are at least t; n a multiple of 64.
  double (*sum_at_least)(const float* weights, int n, float t);
  // Tokens of a block of 64 whose noise may make weight * factor win: bit i of the answer.
  uint64_t (*race)(const float* weights, uint32_t first_id, DrawKey key, float at_least,
                   float factor);
};

inline size_t attention_scratch_bytes() {
  const size_t rows = kMaxJobRows;
  return rows * kMaxHeadDim * 4            // q
         + rows * kMaxHeadDim * 4          // o
         + rows * 4 * 4                    // max, sum, visible
         + 32 * (kAttentionChunk + 64) * 8 // scores and weights of one tile
         + kMaxHeadDim * 4                 // the last pair of V
         + kAttentionChunk * kMaxHeadDim * 4  // K panels of 8-token blocks; V in runs of 16 steps
         + 32 * 64                            // the last steps of q
         + 32 * kMaxHeadDim * 4               // one chunk's output of one tile
         + 8192;
}

const KernelTable* kernels_amx();
const KernelTable* kernels_amx_emulated();
const KernelTable* kernels_avx512bf16();
const KernelTable* kernels_avx2();
const KernelTable* kernels_generic();

// The table chosen for this process (cpu_features.cpp).
const KernelTable& kernels();

}  // namespace cotrt
