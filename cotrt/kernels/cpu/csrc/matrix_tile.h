// The register tile of tile.h made of matrix tiles: RT tiles of 16 rows times NT lane groups.
//
// Both operands are read where they lie: 16 steps of 16 rows of x, and 16 steps of a lane group of
// w. Four sums are in the making, 2 x 2 or 1 x 4: a product takes 52 cycles, one begins every 16.
// An element's sum runs over the steps in order, 16 at a time, whatever RT and NT: what a row gives
// does not depend on the rows beside it.
//
// Registers: sums 0 to 3, x in 4 (and 5), w in the rest.

template <class T, int RT, int NT, int J>
inline void multiply_groups(const char* const* w, ptrdiff_t step_stride, char* expanded) {
  if constexpr (J < NT) {
    constexpr int kW = RT == 2 ? 6 + J % 2 : 5 + J % 3;
    if constexpr (T::kExpanded) {
      for (int s = 0; s < kTileSteps; ++s) {
        const Step step = T::template weights<0>(w[J] + s * step_stride);
        memcpy(expanded + s * kLaneGroupBytes, &step, kLaneGroupBytes);
      }
      tile_load<kW>(expanded, kLaneGroupBytes);
    } else {
      tile_load<kW>(w[J], step_stride);
    }
    tile_dot_bf16<J, 4, kW>();
    if constexpr (RT == 2) tile_dot_bf16<NT + J, 5, kW>();
    multiply_groups<T, RT, NT, J + 1>(w, step_stride, expanded + kTileSteps * kLaneGroupBytes);
  }
}

template <class T, int RT, int NT>
inline void multiply(const char* x, ptrdiff_t x_stride, int second_row, const char* const* w,
                     ptrdiff_t step_stride) {
  tile_load<4>(x, x_stride);
  if constexpr (RT == 2) tile_load<5>(x + second_row * x_stride, x_stride);
  alignas(64) char expanded[T::kExpanded ? NT * kTileSteps * kLaneGroupBytes : 1];
  multiply_groups<T, RT, NT, 0>(w, step_stride, expanded);
}

// begin: sums from zero, or with kAccumulate from c * c_scale. end: sums into c.
template <int RT, int NT, bool kAccumulate, int I = 0>
inline void begin_sums(const TileArgs& a) {
  if constexpr (I < RT * NT) {
    if (!kAccumulate || a.start == TileArgs::kZeros) {
      tile_zero<I>();
    } else {
      float* c = a.c + (I / NT ? a.second_row : 0) * a.c_stride + I % NT * kLanes;
      for (int m = 0; m < kTileHeight && a.start == TileArgs::kScaled; ++m) {
        float* row = c + m * a.c_stride;
        store(row, mul(load(row), set1(a.c_scale[I / NT * kTileHeight + m])));
      }
      tile_load<I>(c, a.c_stride * 4);
    }
    begin_sums<RT, NT, kAccumulate, I + 1>(a);
  }
}
template <int RT, int NT, int I = 0>
inline void end_sums(const TileArgs& a) {
  if constexpr (I < RT * NT) {
    float* c = a.c + (I / NT ? a.second_row : 0) * a.c_stride + I % NT * kLanes;
    tile_store<I>(c, a.c_stride * 4);
    end_sums<RT, NT, I + 1>(a);
  }
}

// Vector work between two products' loads: none.
struct NothingBeside {
  void operator()() {}
};

// TileArgs as tile.h has them, inside a TileScope, with these differences. kDistinct: at least 16
// steps; a number of them that is no multiple of 16 has its last ones in x_tail, and ahead_stride is
// a multiple of 4. Not kDistinct: every run has 16 steps.
// beside: called once every 16 steps; its vector instructions run while matrices are multiplied.
template <class T, int RT, int NT, bool kDistinct, bool kAccumulate, class Beside>
inline void matrix_tile_beside(const TileArgs& a, Beside&& beside) {
  static_assert(RT * NT <= 4, "four registers hold sums");
  begin_sums<RT, NT, kAccumulate>(a);
  const char* w[NT];
  if constexpr (kDistinct) {
    for (int j = 0; j < NT; ++j) w[j] = a.runs[j];
    const int steps = a.run_steps[0];
    const char* ahead = a.ahead;
    for (int s = 0; s + kTileSteps <= steps; s += kTileSteps) {
      for (const char* end = ahead + kTileSteps * a.ahead_stride; ahead < end; ahead += 64)
        __builtin_prefetch(ahead, 0, 2);
      multiply<T, RT, NT>(a.x + s * kStepBytes, a.x_stride, a.second_row, w, a.step_stride);
      for (int j = 0; j < NT; ++j) w[j] += kTileSteps * a.step_stride;
      beside();
    }
    if (const int rest = steps % kTileSteps) {
      // The last 16 steps once more: those that are done meet zeros.
      for (int j = 0; j < NT; ++j) w[j] -= (kTileSteps - rest) * a.step_stride;
      multiply<T, RT, NT>(a.x_tail, kLaneGroupBytes, a.second_row, w, a.step_stride);
    }
  } else {
    for (int r = 0; r < a.num_runs; ++r) {
      for (int j = 0; j < NT; ++j) w[j] = a.runs[r] + j * a.group_stride;
      multiply<T, RT, NT>(a.x + r * kTileSteps * kStepBytes, a.x_stride, a.second_row, w,
                          a.step_stride);
    }
  }
  end_sums<RT, NT>(a);
}
template <class T, int RT, int NT, bool kDistinct, bool kAccumulate>
static void matrix_tile(const TileArgs& a) {
  matrix_tile_beside<T, RT, NT, kDistinct, kAccumulate>(a, NothingBeside{});
}

// TileArgs::x_tail of `rows` rows: the last 16 steps, zeros for those that lie in whole tiles.
// Null where there is no rest.
static const char* pack_tail(const char* x, ptrdiff_t x_stride, int rows, int steps, char* to) {
  const int rest = steps % kTileSteps, done = (kTileSteps - rest) * kStepBytes;
  if (rest == 0) return nullptr;
  for (int m = 0; m < rows; ++m) {
    char* row = to + m * kLaneGroupBytes;
    memset(row, 0, size_t(done));
    memcpy(row + done, x + m * x_stride + (steps - rest) * kStepBytes, size_t(rest) * kStepBytes);
  }
  return to;
}

// Element types beside a flag: whether w must be made bf16 before a tile can load it.
struct MatrixBf16 : Bf16Type {
  static constexpr bool kExpanded = false;
};
struct MatrixInt8 : Int8Type {
  static constexpr bool kExpanded = true;
};
