// The register tile under linears and attention alike: MR rows times NR lane groups.
//
//   c[m][j] = sum over steps of dot(w step of lane group j, x step of row m, broadcast)
//
// The steps of w may lie in several runs (the blocks of V); x is one row of consecutive steps.

struct TileArgs {
  const char* const* runs;    // first lane group of each run; with kDistinct, of each lane group
  const int* run_steps;       // steps a run
  int num_runs;
  ptrdiff_t step_stride;      // bytes from a step to the next
  ptrdiff_t group_stride;     // bytes from a lane group to the next
  const char* x;
  ptrdiff_t x_stride;         // bytes from a row to the next
  float* c;                   // [rows][c_stride]
  ptrdiff_t c_stride;         // floats
  const float* c_scale;       // [rows]: start from c * c_scale instead of 0
  const char* ahead;          // memory to ask for, ahead_stride bytes further every step
  ptrdiff_t ahead_stride;     // 0: nothing is wanted (the same line is asked for again)
  ptrdiff_t ahead_second;     // 64: the line after it too (of tiles of several groups); 0: not
  // Of matrix tiles alone (matrix_tile.h).
  const char* x_tail = nullptr;  // the last steps of x where they are no multiple of 16
  int second_row = 16;           // first row of the second tile of rows
  // Of scaled tiles alone (scaled_tile.h).
  const float* x_scale = nullptr;  // of the first row
  ptrdiff_t x_scale_stride = 0;    // floats from a row to the next
  // Of matrix tiles again: what sums that go on begin with, c scaled, c itself, or nothing yet.
  enum Start { kScaled, kAsIs, kZeros } start = kScaled;
};

// One part of a step: a lane group's weights times every row's element.
template <class T, int kPart, int MR, int NR>
inline __attribute__((always_inline)) void tile_part(typename T::Acc (&acc)[MR][NR],
                                                     const char* const (&w)[NR], const char* x,
                                                     ptrdiff_t x_stride) {
  decltype(T::template weights<kPart>(w[0])) ws[NR];
#pragma GCC unroll 16
  for (int j = 0; j < NR; ++j) ws[j] = T::template weights<kPart>(w[j]);
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m) {
    const auto xs = T::row(x + m * x_stride + kPart * kStepBytes);
#pragma GCC unroll 16
    for (int j = 0; j < NR; ++j) acc[m][j] = T::dot(acc[m][j], ws[j], xs);
  }
}

// kDistinct: one run, whose lane groups lie at runs[0], runs[1], ... (the panels of K).
// KU: copies of the accumulators over which the steps are split. With one, a row's sum is one chain
// in the order of the steps, whatever the number of rows beside it, of lane groups and of runs:
// the same bits in any tile.
template <class T, int MR, int NR, bool kDistinct, bool kAccumulate, int KU>
inline void tile(const TileArgs& a) {
  using Acc = typename T::Acc;
  Acc acc[KU][MR][NR];
#pragma GCC unroll 16
  for (int u = 0; u < KU; ++u)
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 16
      for (int j = 0; j < NR; ++j) {
        if constexpr (kAccumulate)
          acc[u][m][j] = u == 0 ? mul(load(a.c + m * a.c_stride + j * kLanes), set1(a.c_scale[m]))
                                : zero();
        else
          acc[u][m][j] = T::zero_acc();
      }
  const char* x = a.x;
  const char* ahead = a.ahead;
  const int num_runs = kDistinct ? 1 : a.num_runs;
  for (int r = 0; r < num_runs; ++r) {
    const char* w[NR];
#pragma GCC unroll 16
    for (int j = 0; j < NR; ++j) w[j] = kDistinct ? a.runs[j] : a.runs[r] + j * a.group_stride;
    const int steps = a.run_steps[r];
    int s = 0;
    for (; s + KU <= steps; s += KU) {
#pragma GCC unroll 16
      for (int u = 0; u < KU; ++u) {
        tile_part<T, 0, MR, NR>(acc[u], w, x, a.x_stride);
        if constexpr (T::kParts == 2) tile_part<T, 1, MR, NR>(acc[u], w, x, a.x_stride);
#pragma GCC unroll 16
        for (int j = 0; j < NR; ++j) w[j] += a.step_stride;
        if (!kDistinct && !kAccumulate) {
          __builtin_prefetch(ahead, 0, 2);
          if (NR > 1) __builtin_prefetch(ahead + a.ahead_second, 0, 2);
          ahead += a.ahead_stride;
        }
        x += T::kRowStepBytes;
      }
    }
    if constexpr (KU > 1) {
      for (; s < steps; ++s) {
        tile_part<T, 0, MR, NR>(acc[0], w, x, a.x_stride);
        if constexpr (T::kParts == 2) tile_part<T, 1, MR, NR>(acc[0], w, x, a.x_stride);
#pragma GCC unroll 16
        for (int j = 0; j < NR; ++j) w[j] += a.step_stride;
        x += T::kRowStepBytes;
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 16
    for (int j = 0; j < NR; ++j) {
      if constexpr (KU > 1) {
#pragma GCC unroll 16
        for (int u = 1; u < KU; ++u) acc[0][m][j] = add(acc[0][m][j], acc[u][m][j]);
      }
      store(a.c + m * a.c_stride + j * kLanes, acc[0][m][j]);
    }
}

using TileFn = void (*)(const TileArgs&);

template <class T, int NR, bool kDistinct, bool kAccumulate, int MR, int KU>
void tile_entry(const TileArgs& a) {
  tile<T, MR, NR, kDistinct, kAccumulate, KU>(a);
}

// The tile for a number of rows known at run time only; fixed_order: one copy of accumulators.
template <class T, int NR, bool kDistinct, bool kAccumulate>
struct TileTable {
  static inline TileFn get(int rows, bool fixed_order) {
    static constexpr TileFn table[2][12] = {
        {entry<1, false>(), entry<2, false>(), entry<3, false>(), entry<4, false>(),
         entry<5, false>(), entry<6, false>(), entry<7, false>(), entry<8, false>(),
         entry<9, false>(), entry<10, false>(), entry<11, false>(), entry<12, false>()},
        {entry<1, true>(), entry<2, true>(), entry<3, true>(), entry<4, true>(), entry<5, true>(),
         entry<6, true>(), entry<7, true>(), entry<8, true>(), entry<9, true>(), entry<10, true>(),
         entry<11, true>(), entry<12, true>()},
    };
    return table[fixed_order][rows - 1];
  }
  template <int ROWS, bool kFixed>
  static constexpr TileFn entry() {
    constexpr int rows = clamp_rows(ROWS);
    return &tile_entry<T, NR, kDistinct, kAccumulate, rows, kFixed ? 1 : tile_copies(rows, NR)>;
  }
  // No more instantiations than the machine has registers for.
  static constexpr int clamp_rows(int rows) {
    const int most = NR > kTileGroups ? kWideTileRows : kTileRows;
    return rows < most ? rows : most;
  }
};

// Tiles of at most kTileRows rows over [0, rows), as even as can be.
struct RowTiles {
  int rows, count;
  explicit RowTiles(int n) : rows(n), count((n + kTileRows - 1) / kTileRows) {}
  int first(int t) const { return int(int64_t(rows) * t / count); }
  int most() const { return ceil_div(rows, count); }
};

// The most rows that a tile of any kind has.
constexpr int kMostTileRows = 32;
static_assert(kTileRows <= kMostTileRows, "scratch is cut for kMostTileRows");
