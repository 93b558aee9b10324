// The matrix tile registers of AMX behind seven names: eight registers of up to 16 rows of 64 bytes.
//
// Two implementations: the instructions themselves, and (COTRT_AMX_EMULATED) the same in plain C++
// for machines without them, so that every test can run the kernels above this seam. Whatever this
// file allows, the machine must: the emulation ends the process where hardware would fault.
//
//   TileScope(rows)        shapes all registers for a call, gives them up at its end: a thread that
//                          holds tiles makes each switch to another save 8 KB. Registers 0 to 4
//                          have `rows` rows, 5 to 7 have 16; a row is 64 bytes.
//   tile_zero<R>, tile_load<R>(p, stride), tile_store<R>(p, stride)
//   tile_dot_bf16<C, A, B> C[m][n] += sum over k of A[m][k] . B[k][n], pairs of bf16: a row of A is
//                          16 steps of one row, a row of B one step of 16 lanes.

constexpr int kTileSteps = 16;  // k steps a product
constexpr int kTileHeight = 16; // rows of a full tile

struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

inline TileConfig tile_config(int rows) {
  TileConfig c{};
  c.palette = 1;
  for (int r = 0; r < 8; ++r) {
    c.row_bytes[r] = kLaneGroupBytes;
    c.rows[r] = uint8_t(r < 5 ? rows : kTileHeight);
  }
  return c;
}

#if !defined(COTRT_AMX_EMULATED)

// Assembly of our own: the intrinsics of some compilers do not say that a load reads memory, and
// stores to it that come before are then left out or moved behind it.
struct TileScope {
  explicit TileScope(int rows) {
    const TileConfig config = tile_config(rows);
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~TileScope() { asm volatile("tilerelease"); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};
template <int R>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(R));
}
template <int R>
inline void tile_load(const void* p, ptrdiff_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(R) : "memory");
}
template <int R>
inline void tile_store(void* p, ptrdiff_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(R) : "memory");
}
template <int C, int A, int B>
inline void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#else

struct EmulatedTiles {
  bool configured;
  int rows[8], row_bytes[8];
  alignas(64) char data[8][kTileHeight][kLaneGroupBytes];
};
static thread_local EmulatedTiles tiles_;

[[noreturn]] static void tile_fault(const char* what) {
  fprintf(stderr, "cotrt: emulated AMX: %s\n", what);
  abort();
}

// The register, where it may be used.
inline char (*tile_register(int r))[kLaneGroupBytes] {
  if (!tiles_.configured) tile_fault("tiles used outside of a TileScope");
  if (r < 0 || r > 7) tile_fault("no such tile");
  return tiles_.data[r];
}

struct TileScope {
  explicit TileScope(int rows) {
    if (tiles_.configured) tile_fault("tiles configured twice, or not released");
    const TileConfig config = tile_config(rows);
    if (config.palette != 1 || config.start_row != 0) tile_fault("palette or start row");
    memset(&tiles_, 0, sizeof tiles_);  // ldtilecfg zeroes the registers
    for (int r = 0; r < 8; ++r) {
      tiles_.rows[r] = config.rows[r];
      tiles_.row_bytes[r] = config.row_bytes[r];
      if (config.rows[r] < 1 || config.rows[r] > kTileHeight || config.row_bytes[r] < 1 ||
          config.row_bytes[r] > kLaneGroupBytes)
        tile_fault("shape of a tile");
    }
    tiles_.configured = true;
  }
  ~TileScope() { tiles_.configured = false; }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};
template <int R>
inline void tile_zero() {
  memset(tile_register(R), 0, sizeof tiles_.data[R]);
}
template <int R>
inline void tile_load(const void* p, ptrdiff_t stride) {
  char(*to)[kLaneGroupBytes] = tile_register(R);
  memset(to, 0, sizeof tiles_.data[R]);
  for (int m = 0; m < tiles_.rows[R]; ++m)
    memcpy(to[m], (const char*)p + m * stride, size_t(tiles_.row_bytes[R]));
}
template <int R>
inline void tile_store(void* p, ptrdiff_t stride) {
  char(*from)[kLaneGroupBytes] = tile_register(R);
  for (int m = 0; m < tiles_.rows[R]; ++m)
    memcpy((char*)p + m * stride, from[m], size_t(tiles_.row_bytes[R]));
}

// Denormals are taken for zeros, and made zeros.
inline float tile_flush(float x) {
  return __builtin_fabsf(x) < 1.17549435e-38f ? __builtin_copysignf(0.f, x) : x;
}
inline float tile_half(uint32_t pair, bool high) {
  const uint32_t u = high ? pair & 0xffff0000u : pair << 16;
  float f;
  memcpy(&f, &u, 4);
  return tile_flush(f);
}

// As Intel documents TDPBF16PS: even and odd elements are summed apart by fused multiply-adds, from
// zero, in order of k; the two sums are added, and then to C. Rounding to nearest even throughout.
static void tile_dot(int c, int a, int b) {
  char(*to)[kLaneGroupBytes] = tile_register(c);
  char(*rows)[kLaneGroupBytes] = tile_register(a);
  char(*steps)[kLaneGroupBytes] = tile_register(b);
  if (c == a || c == b || a == b) tile_fault("a product needs three tiles");
  const int num_steps = tiles_.row_bytes[a] / 4;
  if (tiles_.rows[b] != num_steps || tiles_.rows[a] != tiles_.rows[c] ||
      tiles_.row_bytes[b] != tiles_.row_bytes[c])
    tile_fault("shapes of a product differ");
  float even_b[kTileSteps][kLanes], odd_b[kTileSteps][kLanes];
  for (int k = 0; k < num_steps; ++k)
    for (int n = 0; n < kLanes; ++n) {
      uint32_t pair;
      memcpy(&pair, steps[k] + n * 4, 4);
      even_b[k][n] = tile_half(pair, false);
      odd_b[k][n] = tile_half(pair, true);
    }
  for (int m = 0; m < tiles_.rows[c]; ++m) {
    float even[kLanes] = {}, odd[kLanes] = {}, sum[kLanes];
    for (int k = 0; k < num_steps; ++k) {
      uint32_t pair;
      memcpy(&pair, rows[m] + k * 4, 4);
      const float x = tile_half(pair, false), y = tile_half(pair, true);
      for (int n = 0; n < kLanes; ++n) {
        even[n] = tile_flush(__builtin_fmaf(x, even_b[k][n], even[n]));
        odd[n] = tile_flush(__builtin_fmaf(y, odd_b[k][n], odd[n]));
      }
    }
    memcpy(sum, to[m], sizeof sum);
    for (int n = 0; n < kLanes; ++n)
      sum[n] = tile_flush(tile_flush(sum[n]) + tile_flush(even[n] + odd[n]));
    memcpy(to[m], sum, sizeof sum);
  }
}
template <int C, int A, int B>
inline void tile_dot_bf16() {
  tile_dot(C, A, B);
}

#endif
