// The register tile of integer products: MR rows times NR lane groups of integers.
//
//   c[m][j] = sum over groups g of inputs, in order: x_scale[m][g] * sum over g of w * x
//
// The inner sum is exact in int32 (PackedLinear keeps it from overflowing), the outer one a chain in
// float32: the same bits in any tile. Scales of weights are the epilogue's.
#if defined(COTRT_INTEGER_PRODUCTS)

template <class T, int MR, int NR>
void scaled_tile(const TileArgs& a) {
  constexpr int kGroupSteps = kScaleGroup / T::kPerStep;
  const char* w[NR];
#pragma GCC unroll 16
  for (int j = 0; j < NR; ++j) w[j] = a.runs[0] + j * a.group_stride;
  const char* x = a.x;
  const char* ahead = a.ahead;
  const int steps = a.run_steps[0];
  for (int first = 0, g = 0; first < steps; first += kGroupSteps, ++g) {
    Step acc[MR][NR];
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 16
      for (int j = 0; j < NR; ++j) acc[m][j] = T::zero_acc();
    const int count = min_int(kGroupSteps, steps - first);
    for (int s = 0; s < count; ++s) {
      tile_part<T, 0, MR, NR>(acc, w, x, a.x_stride);
#pragma GCC unroll 16
      for (int j = 0; j < NR; ++j) w[j] += a.step_stride;
      __builtin_prefetch(ahead, 0, 2);
      if (NR > 1) __builtin_prefetch(ahead + a.ahead_second, 0, 2);
      ahead += a.ahead_stride;
      x += T::kRowStepBytes;
    }
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m) {
      const F scale = set1(a.x_scale[m * a.x_scale_stride + g]);
#pragma GCC unroll 16
      for (int j = 0; j < NR; ++j) {
        float* c = a.c + m * a.c_stride + j * kLanes;
        store(c, fma(to_float(acc[m][j]), scale, g ? load(c) : zero()));
      }
    }
  }
}

// The scaled tile for a number of rows known at run time only.
template <class T, int NR>
struct ScaledTileTable {
  static inline TileFn get(int rows, bool) {
    static constexpr TileFn table[] = {entry<1>(), entry<2>(), entry<3>(),
                                       entry<4>(), entry<5>(), entry<6>()};
    static_assert(kTileRows <= 6, "a tile for every number of rows");
    return table[rows - 1];
  }
  template <int ROWS>
  static constexpr TileFn entry() {
    constexpr int most = NR > kTileGroups ? kWideTileRows : kTileRows;
    return &scaled_tile<T, (ROWS < most ? ROWS : most), NR>;
  }
};

#endif
