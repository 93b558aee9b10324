// The register tile under linears and attention alike: up to kTileRows rows times NR lane groups.
//
//   acc[m][j] = sum over steps of dot(w step of lane group j, x step of row m, broadcast)
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
  ptrdiff_t ahead_second;     // 64: the line after it too; 0: not
};

// kDistinct: one run, whose lane groups lie at runs[0], runs[1], ... (the panels of K).
template <class T, int MR, int NR, bool kDistinct, bool kAccumulate>
inline void tile(const TileArgs& a) {
  // Few accumulators would wait for each other: split the steps over copies of them.
  constexpr int KU = MR * NR <= 2 ? 4 : MR * NR <= 6 ? 2 : 1;
  F acc[KU][MR][NR];
#pragma GCC unroll 16
  for (int u = 0; u < KU; ++u)
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 16
      for (int j = 0; j < NR; ++j)
        acc[u][m][j] = kAccumulate && u == 0
                           ? mul(load(a.c + m * a.c_stride + j * kLanes), set1(a.c_scale[m]))
                           : zero();
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
        Step ws[NR];
#pragma GCC unroll 16
        for (int j = 0; j < NR; ++j) {
          ws[j] = T::weights(w[j]);
          w[j] += a.step_stride;
        }
        if (!kDistinct && !kAccumulate) {
          __builtin_prefetch(ahead, 0, 2);
          __builtin_prefetch(ahead + a.ahead_second, 0, 2);
          ahead += a.ahead_stride;
        }
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m) {
          const Step xs = broadcast_step(x + m * a.x_stride);
#pragma GCC unroll 16
          for (int j = 0; j < NR; ++j) acc[u][m][j] = T::dot(acc[u][m][j], ws[j], xs);
        }
        x += kStepBytes;
      }
    }
    if constexpr (KU > 1) {
      for (; s < steps; ++s) {
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m) {
          const Step xs = broadcast_step(x + m * a.x_stride);
#pragma GCC unroll 16
          for (int j = 0; j < NR; ++j) acc[0][m][j] = T::dot(acc[0][m][j], T::weights(w[j]), xs);
        }
#pragma GCC unroll 16
        for (int j = 0; j < NR; ++j) w[j] += a.step_stride;
        x += kStepBytes;
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 16
    for (int j = 0; j < NR; ++j) {
#pragma GCC unroll 16
      for (int u = 1; u < KU; ++u) acc[0][m][j] = add(acc[0][m][j], acc[u][m][j]);
      store(a.c + m * a.c_stride + j * kLanes, acc[0][m][j]);
    }
}

using TileFn = void (*)(const TileArgs&);

template <class T, int NR, bool kDistinct, bool kAccumulate, int MR>
void tile_entry(const TileArgs& a) {
  tile<T, MR, NR, kDistinct, kAccumulate>(a);
}

// The tile for a number of rows known at run time only.
template <class T, int NR, bool kDistinct, bool kAccumulate>
struct TileTable {
  static inline TileFn get(int rows) {
    static constexpr TileFn table[12] = {
        &tile_entry<T, NR, kDistinct, kAccumulate, clamp_rows(1)>,
        &tile_entry<T, NR, kDistinct, kAccumulate, clamp_rows(2)>,
        &tile_entry<T, NR, kDistinct, kAccumulate, clamp_rows(3)>,
        &tile_entry<T, NR, kDistinct, kAccumulate, clamp_rows(4)>,
        &tile_entry<T, NR, kDistinct, kAccumulate, clamp_rows(5)>,
        &tile_entry<T, NR, kDistinct, kAccumulate, clamp_rows(6)>,
        &tile_entry<T, NR, kDistinct, kAccumulate, clamp_rows(7)>,
        &tile_entry<T, NR, kDistinct, kAccumulate, clamp_rows(8)>,
        &tile_entry<T, NR, kDistinct, kAccumulate, clamp_rows(9)>,
        &tile_entry<T, NR, kDistinct, kAccumulate, clamp_rows(10)>,
        &tile_entry<T, NR, kDistinct, kAccumulate, clamp_rows(11)>,
        &tile_entry<T, NR, kDistinct, kAccumulate, clamp_rows(12)>,
    };
    return table[rows - 1];
  }
  // No more instantiations than the machine has registers for.
  static constexpr int clamp_rows(int rows) {
    const int most = NR > 2 ? (kTileRows + 1) / 2 : kTileRows;
    return rows < most ? rows : most;
  }
};
constexpr int kWideTileRows = (kTileRows + 1) / 2;  // rows that four lane groups leave room for

// Tiles of at most kTileRows rows over [0, rows), as even as can be.
struct RowTiles {
  int rows, count;
  explicit RowTiles(int n) : rows(n), count((n + kTileRows - 1) / kTileRows) {}
  int first(int t) const { return int(int64_t(rows) * t / count); }
};
