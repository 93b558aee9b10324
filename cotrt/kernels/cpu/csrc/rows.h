// Work on single rows: norm, rotary embedding with the KV write, silu * mul.

static void rms_norm_row(const float* x, const float* weight, int n, float eps, char* y,
                         DType y_type) {
  F squares = zero();
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const F v = load(x + i);
    squares = fma(v, v, squares);
  }
  float total = reduce_add(squares);
  for (; i < n; ++i) total += x[i] * x[i];
  const float r = 1.f / ::sqrtf(total / float(n) + eps);
  const F vr = set1(r);
  const int bytes = y_type == DType::kFloat32 ? 4 : 2;
  for (i = 0; i + kLanes <= n; i += kLanes)
    store_as(y + ptrdiff_t(i) * bytes, y_type, mul(mul(load(x + i), vr), load(weight + i)));
  if (i < n) {
    alignas(64) float tail[kLanes] = {};
    alignas(64) char out[kLanes * 4];
    for (int j = i; j < n; ++j) tail[j - i] = x[j] * r * weight[j];
    store_as(out, y_type, load(tail));
    memcpy(y + ptrdiff_t(i) * bytes, out, size_t(n - i) * bytes);
  }
}

static void rms_norm(const float* x, ptrdiff_t x_stride, const float* weight, int n, float eps,
                     char* y, ptrdiff_t y_stride, DType y_type, int row0, int row1) {
  for (int r = row0; r < row1; ++r)
    rms_norm_row(x + r * x_stride, weight, n, eps, y + r * y_stride, y_type);
}

// One token's K head into its block: head dim steps 64 bytes apart (32 in blocks of 8).
template <class T>
static inline void write_k(const typename T::Element* k, char* head, int token, int d, int bs) {
  const int lanes = k_lanes(bs);
  const ptrdiff_t stride = ptrdiff_t(lanes) * kStepBytes;
  char* to = head + ptrdiff_t(token / lanes) * d / T::kPerStep * stride +
             ptrdiff_t(token % lanes) * kStepBytes;
  for (int s = 0; s < d / T::kPerStep; ++s) memcpy(to + s * stride, k + s * T::kPerStep, kStepBytes);
}

// Asks for the lines that one token's K head and V head go to: every step of K has its own.
template <class T>
static inline void prefetch_kv(const char* k_head, const char* v_head, int token, int d, int bs) {
  const int lanes = k_lanes(bs);
  const ptrdiff_t stride = ptrdiff_t(lanes) * kStepBytes;
  const char* k = k_head + ptrdiff_t(token / lanes) * d / T::kPerStep * stride +
                  ptrdiff_t(token % lanes) * kStepBytes;
  for (int s = 0; s < d / T::kPerStep; ++s) __builtin_prefetch(k + s * stride, 1);
  const char* v = v_head + ptrdiff_t(token / T::kPerStep) * d * kStepBytes;
  for (int i = 0; i < d * kStepBytes; i += 64) __builtin_prefetch(v + i, 1);
}

// One token's V head: side by side in float32, every other element in bf16.
template <class T>
static inline void write_v(const typename T::Element* v, char* head, int token, int d) {
  using E = typename T::Element;
  E* to = (E*)(head + ptrdiff_t(token / T::kPerStep) * d * kStepBytes) + token % T::kPerStep;
  for (int i = 0; i < d; ++i) to[i * T::kPerStep] = v[i];
}

template <class T>
static void write_kv_typed(const WriteKvArgs& a, int row0, int row1) {
  using E = typename T::Element;
  const int d = a.head_dim, bs = a.block_size;
  const int64_t head_bytes = kv_head_bytes(a.type, bs, d);
  for (int r = row0; r < row1; ++r) {
    const int64_t slot = a.slot_mapping[r];
    if (slot < 0) continue;
    const int64_t block = slot / bs * head_bytes * a.num_kv_heads;
    for (int h = 0; h < a.num_kv_heads; ++h) {
      const int64_t from = (int64_t(r) * a.num_kv_heads + h) * d, to = block + h * head_bytes;
      write_k<T>((const E*)a.k + from, a.k_cache + to, int(slot % bs), d, bs);
      write_v<T>((const E*)a.v + from, a.v_cache + to, int(slot % bs), d);
    }
  }
}

static void write_kv(const WriteKvArgs& a, int row0, int row1) {
  if (a.type == DType::kFloat32)
    write_kv_typed<F32Type>(a, row0, row1);
  else
    write_kv_typed<Bf16Type>(a, row0, row1);
}

// Norm (if any) and rotation of one head, float32 to float32: pairs are (i, i + rot_dim / 2).
static inline void rope_head(const float* x, const float* norm, float eps, const float* cos,
                             const float* sin, int d, int rot_dim, float* y) {
  float buffer[kMaxHeadDim];
  if (norm) {
    rms_norm_row(x, norm, d, eps, (char*)buffer, DType::kFloat32);
    x = buffer;
  }
  const int half = rot_dim / 2;
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const F a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(y + i, fms(a, c, mul(b, s)));
    store(y + half + i, fma(b, c, mul(a, s)));
  }
  for (; i < half; ++i) {
    y[i] = x[i] * cos[i] - x[half + i] * sin[i];
    y[half + i] = x[half + i] * cos[i] + x[i] * sin[i];
  }
  for (i = rot_dim; i < d; ++i) y[i] = x[i];
}

// K or V of 16 rows that fill a block's 16 lanes, side by side in `rows`, as whole lines: one by one
// they would write every line of K sixteen times.
static inline void write_k_lanes(const char* rows, ptrdiff_t row_bytes, char* to, int steps) {
  for (int s = 0; s < steps; ++s)
    for (int t = 0; t < kLanes; ++t)
      memcpy(to + (s * kLanes + t) * kStepBytes, rows + t * row_bytes + s * kStepBytes, kStepBytes);
}
static inline void write_v_pairs(const bf16* rows, int d, char* to) {
  for (int t = 0; t < kLanes; t += 2) {
    const bf16 *even = rows + t * d, *odd = even + d;
    uint32_t* pairs = (uint32_t*)(to + ptrdiff_t(t / 2) * d * kStepBytes);
    for (int i = 0; i < d; ++i) pairs[i] = even[i].bits | uint32_t(odd[i].bits) << 16;
  }
}

// Whether rows [row, row + 16) go to 16 tokens that share their lines.
static inline bool fills_lanes(const RopeArgs& a, int row, int row1) {
  if (a.type != DType::kBFloat16 || a.block_size < kLanes || row + kLanes > row1) return false;
  const int64_t slot = a.slot_mapping[row];
  if (slot < 0 || slot % kLanes) return false;
  for (int i = 1; i < kLanes; ++i)
    if (a.slot_mapping[row + i] != slot + i) return false;
  return true;
}

// K and V of such rows; their q is rotated one by one.
template <class T>
static void write_lanes(const RopeArgs& a, int row) {
  const int d = a.head_dim, bs = a.block_size, half = a.rot_dim / 2;
  const int64_t head_bytes = kv_head_bytes(a.type, bs, d), slot = a.slot_mapping[row];
  const int64_t block = slot / bs * head_bytes * a.num_kv_heads;
  const ptrdiff_t within = ptrdiff_t(slot % bs) * d * 2;
  alignas(64) float rotated[kMaxHeadDim];
  alignas(64) bf16 rows[kLanes * kMaxHeadDim];
  for (int h = 0; h < 2 * a.num_kv_heads; ++h) {
    const bool is_k = h < a.num_kv_heads;
    for (int t = 0; t < kLanes; ++t) {
      const float* x = a.qkv + (row + t) * a.qkv_stride + ptrdiff_t(a.num_q_heads + h) * d;
      if (is_k) {
        const ptrdiff_t angles = ptrdiff_t(a.positions[row + t]) * half;
        rope_head(x, a.k_norm, a.eps, a.cos + angles, a.sin + angles, d, a.rot_dim, rotated);
        x = rotated;
      }
      for (int i = 0; i < d; i += kLanes) T::store_element((char*)(rows + t * d + i), load(x + i));
    }
    char* cache = is_k ? a.k_cache : a.v_cache;
    char* to = cache + block + (is_k ? h : h - a.num_kv_heads) * head_bytes + within;
    if (is_k)
      write_k_lanes((const char*)rows, ptrdiff_t(d) * 2, to, d / 2);
    else
      write_v_pairs(rows, d, to);
  }
}

template <class T>
static void rope_and_write_typed(const RopeArgs& a, int row0, int row1) {
  using E = typename T::Element;
  using R = typename T::Row;
  const int d = a.head_dim, bs = a.block_size, half = a.rot_dim / 2;
  const int64_t head_bytes = kv_head_bytes(a.type, bs, d);
  alignas(64) float rotated[kMaxHeadDim];
  alignas(64) E narrow[kMaxHeadDim];
  int written = row0;  // K and V of the rows before it
  for (int r = row0; r < row1; ++r) {
    if constexpr (sizeof(E) == 2) {
      if (r >= written && fills_lanes(a, r, row1)) {
        write_lanes<T>(a, r);
        written = r + kLanes;
      }
    }
    const float* x = a.qkv + r * a.qkv_stride;
    const ptrdiff_t angles = ptrdiff_t(a.positions[r]) * half;
    const float *cos = a.cos + angles, *sin = a.sin + angles;
    const int64_t slot = r < written ? -1 : a.slot_mapping[r];
    const int64_t block = slot / bs * head_bytes * a.num_kv_heads;
    const int token = int(slot % bs);
    for (int h = 0; h < a.num_kv_heads && slot >= 0; ++h)
      prefetch_kv<T>(a.k_cache + block + h * head_bytes, a.v_cache + block + h * head_bytes, token,
                     d, bs);
    for (int h = 0; h < a.num_q_heads; ++h, x += d) {
      rope_head(x, a.q_norm, a.eps, cos, sin, d, a.rot_dim, rotated);
      char* to = a.q_out + r * a.q_stride + ptrdiff_t(h) * d * sizeof(R);
      for (int i = 0; i < d; i += kLanes) T::store_row(to + i * sizeof(R), load(rotated + i));
    }
    if (slot < 0) continue;
    for (int h = 0; h < a.num_kv_heads; ++h, x += d) {
      rope_head(x, a.k_norm, a.eps, cos, sin, d, a.rot_dim, rotated);
      for (int i = 0; i < d; i += kLanes)
        T::store_element((char*)(narrow + i), load(rotated + i));
      write_k<T>(narrow, a.k_cache + block + h * head_bytes, token, d, bs);
    }
    for (int h = 0; h < a.num_kv_heads; ++h, x += d) {
      for (int i = 0; i < d; i += kLanes) T::store_element((char*)(narrow + i), load(x + i));
      write_v<T>(narrow, a.v_cache + block + h * head_bytes, token, d);
    }
  }
}

static void rope_and_write(const RopeArgs& a, int row0, int row1) {
  if (a.type == DType::kFloat32)
    rope_and_write_typed<F32Type>(a, row0, row1);
  else
    rope_and_write_typed<Bf16Type>(a, row0, row1);
}

#if defined(COTRT_INTEGER_PRODUCTS)
// n values as int16 of at most `limit` times the scale that is returned.
static inline __attribute__((always_inline)) float quantise_group(const float* from, int n,
                                                                  int limit, int16_t* to) {
  const F sign = set1(-0.f);
  F most = zero(), poison = zero();  // the latter 0, or NaN where a value is not finite
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const F v = load(from + i);
    most = max(and_not(sign, v), most);
    poison = fma(v, zero(), poison);
  }
  float top = reduce_max(most), bad = reduce_add(poison);
  for (int j = i; j < n; ++j) {
    const float v = from[j] < 0.f ? -from[j] : from[j];
    top = v > top ? v : top;
    bad += v * 0.f;
  }
  const float factor = top > 1e-30f && bad == 0.f ? float(limit) / top : 0.f;
  const F vf = set1(factor);
  for (i = 0; i + kLanes <= n; i += kLanes) store_int16(to + i, mul(load(from + i), vf));
  for (; i < n; ++i) to[i] = int16_t(_mm_cvtss_si32(_mm_set_ss(from[i] * factor)));
  return bad == 0.f ? (factor > 0.f ? top / float(limit) : 0.f) : bad;
}

static void quantise_rows(const char* x, ptrdiff_t x_stride, int k, int limit, char* y,
                          ptrdiff_t y_stride, float* scale, ptrdiff_t scale_stride, int row0,
                          int row1) {
  for (int r = row0; r < row1; ++r) {
    const float* from = (const float*)(x + r * x_stride);
    int16_t* to = (int16_t*)(y + r * y_stride);
    float* s = scale + r * scale_stride;
    int i = 0;
    for (; i + kScaleGroup <= k; i += kScaleGroup)
      *s++ = quantise_group(from + i, kScaleGroup, limit, to + i);
    if (i < k) *s = quantise_group(from + i, k - i, limit, to + i);
  }
}
#else  // no linear here takes int16 rows
constexpr void (*quantise_rows)(const char*, ptrdiff_t, int, int, char*, ptrdiff_t, float*,
                                ptrdiff_t, int, int) = nullptr;
#endif

// x [rows][gate n, up n] -> y [rows][n].
template <class T>
static void silu_mul_typed(const char* x, ptrdiff_t x_stride, char* y, ptrdiff_t y_stride, int n,
                           int row0, int row1) {
  using E = typename T::Element;
  for (int r = row0; r < row1; ++r) {
    const E* gate = (const E*)(x + r * x_stride);
    const E* up = gate + n;
    E* to = (E*)(y + r * y_stride);
    int i = 0;
    for (; i + kLanes <= n; i += kLanes)
      T::store_element((char*)(to + i), mul(silu(T::load_element((const char*)(gate + i))),
                                            T::load_element((const char*)(up + i))));
    if (i < n) {
      alignas(64) E g[kLanes] = {}, u[kLanes] = {}, z[kLanes];
      memcpy(g, gate + i, (n - i) * sizeof(E));
      memcpy(u, up + i, (n - i) * sizeof(E));
      T::store_element((char*)z, mul(silu(T::load_element((const char*)g)),
                                     T::load_element((const char*)u)));
      memcpy(to + i, z, (n - i) * sizeof(E));
    }
  }
}

static void silu_mul(const char* x, ptrdiff_t x_stride, char* y, ptrdiff_t y_stride, DType type,
                     int n, int row0, int row1) {
  if (type == DType::kFloat32)
    silu_mul_typed<F32Type>(x, x_stride, y, y_stride, n, row0, row1);
  else
    silu_mul_typed<Bf16Type>(x, x_stride, y, y_stride, n, row0, row1);
}
