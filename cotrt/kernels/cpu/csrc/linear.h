// y = epilogue(x W^T): panels of 32 outputs, each a sequential stream, times tiles of rows.

template <class T, int NR>
struct LinearTiles : TileTable<T, NR, false, false> {};
#if defined(COTRT_INTEGER_PRODUCTS)
template <int NR>
struct LinearTiles<Int16Type, NR> : ScaledTileTable<Int16Type, NR> {};
template <int NR>
struct LinearTiles<Int8Type, NR> : ScaledTileTable<Int8Type, NR> {};
#endif

template <class T>
static void linear_panels(const LinearArgs& a, int m0, int m1, int panel0, int panel1) {
  alignas(64) float c[kTileRows * kPanel];
  const int64_t panel_bytes = packed_panel_bytes(a.weight_type, a.k);
  const int steps = a.k / T::kPerStep;
  constexpr int kGroups = kPanel / kLanes;
  const ptrdiff_t group_bytes = a.weight_type == DType::kInt8 ? 32 : kLaneGroupBytes;
  const RowTiles tiles(m1 - m0);
  for (int p = panel0; p < panel1; ++p) {
    const char* w = a.weight + p * panel_bytes;
    // The panel that comes next is asked for meanwhile: a line a step by the first two of a few
    // calls (by one alone, two lines), evenly by all of many, or memory would stall the first.
    const char* next = p + 1 < panel1 ? w + panel_bytes : a.next;
    const ptrdiff_t lines = panel_bytes / 64;
    const bool wide = kWideTileGroups <= kGroups && tiles.most() <= kWideTileRows;
    const int passes = wide ? 1 : kGroups / kTileGroups;
    const int calls = tiles.count * passes, asking = calls <= 3 ? min_int(2, calls) : calls;
    const ptrdiff_t stride = !next                   ? 0
                             : calls > 3             ? ceil_div(panel_bytes, int64_t(steps) * calls)
                             : lines > steps * asking ? 128
                                                      : 64;
    for (int t = 0; t < tiles.count; ++t) {
      const int row = m0 + tiles.first(t), rows = tiles.first(t + 1) - tiles.first(t);
      const TileFn fn = wide ? LinearTiles<T, kGroups>::get(rows, a.fixed_order)
                             : LinearTiles<T, kTileGroups>::get(rows, a.fixed_order);
      for (int pass = 0; pass < passes; ++pass) {
        const int call = t * passes + pass, group = pass * kTileGroups;
        const char* run = w + group * group_bytes;
        fn({&run, &steps, 1, kGroups * group_bytes, group_bytes, a.x + row * a.x_stride, a.x_stride,
            c + group * kLanes, kPanel, nullptr, next ? next + call * steps * stride : w,
            call < asking ? stride : 0, stride == 128 ? 64 : 0, nullptr, 0,
            a.x_scale ? a.x_scale + row * a.x_scale_stride : nullptr, a.x_scale_stride});
      }
      finish_tile(a, c, kPanel, row, rows, p);
    }
  }
}

static void linear(const LinearArgs& a, int m0, int m1, int panel0, int panel1) {
  switch (a.weight_type) {
    case DType::kFloat32: return linear_panels<F32Type>(a, m0, m1, panel0, panel1);
    case DType::kInt8: return linear_panels<Int8Type>(a, m0, m1, panel0, panel1);
#if defined(COTRT_INTEGER_PRODUCTS)
    case DType::kInt16: return linear_panels<Int16Type>(a, m0, m1, panel0, panel1);
#endif
    default: return linear_panels<Bf16Type>(a, m0, m1, panel0, panel1);
  }
}

static void unpack_row(const char* weight, DType type, int k, const float* scale, int64_t row,
                       float* out) {
  const int lane = int(row % kPanel);
  const char* w = weight + (row / kPanel) * packed_panel_bytes(type, k);
  if (type == DType::kFloat32) {
    for (int i = 0; i < k; ++i) memcpy(out + i, w + (ptrdiff_t(i) * kPanel + lane) * 4, 4);
  } else if (type == DType::kInt8) {
    const char* p = w + (lane / kLanes) * 32 + lane % kLanes;
    for (int i = 0; i < k; i += 2) {
      const signed char* q = (const signed char*)(p + ptrdiff_t(i) * kPanel);
      out[i] = float(q[0]) * scale[row];
      out[i + 1] = float(q[kLanes]) * scale[row];
    }
  } else if (type == DType::kInt16) {
    // Rounded to the bf16 that it was packed from: found again exactly, unless below 2^7 units.
    for (int i = 0; i < k; ++i) {
      int16_t q;
      memcpy(&q, w + (ptrdiff_t(i / 2) * kPanel + lane) * 4 + i % 2 * 2, 2);
      const float x = float(q) * scale[row];
      uint32_t u;
      memcpy(&u, &x, 4);
      if (x == x) u = (u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000u;
      memcpy(out + i, &u, 4);
    }
  } else {
    for (int i = 0; i < k; i += 2) {
      uint32_t pair;
      memcpy(&pair, w + (ptrdiff_t(i / 2) * kPanel + lane) * 4, 4);
      const uint32_t low = pair << 16, high = pair & 0xffff0000u;
      memcpy(out + i, &low, 4);
      memcpy(out + i + 1, &high, 4);
    }
  }
}
