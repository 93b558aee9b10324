// y = epilogue(x W^T): panels of 32 outputs, each a sequential stream, times tiles of rows.

// One tile's float32 results, [rows][32], through bias and epilogue into y.
static void finish_tile(const LinearArgs& a, const float* c, int row0, int rows, int panel) {
  const int n0 = panel * kPanel;
  const int lanes = min_int(kPanel, a.n - n0);
  F scale[2], bias[2];
  for (int j = 0; j < 2; ++j) {
    scale[j] = a.scale ? load(a.scale + n0 + j * kLanes) : set1(1.f);
    bias[j] = a.bias ? load(a.bias + n0 + j * kLanes) : zero();
  }
  const int y_bytes = a.y_type == DType::kFloat32 ? 4 : 2;
  for (int m = 0; m < rows; ++m) {
    F v[2];
    for (int j = 0; j < 2; ++j) v[j] = fma(load(c + m * kPanel + j * kLanes), scale[j], bias[j]);
    char* y = a.y + (row0 + m) * a.y_stride;
    if (a.epilogue == Epilogue::kSiluMul) {
      store_as(y + ptrdiff_t(panel) * kLanes * y_bytes, a.y_type, mul(silu(v[0]), v[1]));
      continue;
    }
    y += ptrdiff_t(n0) * y_bytes;
    if (lanes == kPanel) {
      for (int j = 0; j < 2; ++j) {
        char* p = y + j * kLanes * y_bytes;
        if (a.epilogue == Epilogue::kAdd) v[j] = add(v[j], load((const float*)p));
        store_as(p, a.y_type, v[j]);
      }
    } else {
      alignas(64) float tail[kPanel];
      alignas(64) char bytes[kPanel * 4];
      for (int j = 0; j < 2; ++j) store(tail + j * kLanes, v[j]);
      if (a.epilogue == Epilogue::kAdd)
        for (int i = 0; i < lanes; ++i) tail[i] += ((const float*)y)[i];
      for (int j = 0; j < 2; ++j)
        store_as(bytes + j * kLanes * y_bytes, a.y_type, load(tail + j * kLanes));
      memcpy(y, bytes, size_t(lanes) * y_bytes);
    }
  }
}

template <class T>
static void linear_panels(const LinearArgs& a, int m0, int m1, int panel0, int panel1) {
  alignas(64) float c[kTileRows * kPanel];
  const int64_t panel_bytes = packed_panel_bytes(a.weight_type, a.k);
  const int steps = a.k / T::kPerStep;
  const ptrdiff_t group_bytes = a.weight_type == DType::kInt8 ? 32 : kLaneGroupBytes;
  const RowTiles tiles(m1 - m0);
  for (int p = panel0; p < panel1; ++p) {
    const char* w = a.weight + p * panel_bytes;
    // The panel that comes next, asked for by the first two tiles, a line a step each (by one
    // alone, two lines).
    const char* next = p + 1 < panel1 ? w + panel_bytes : a.next;
    const ptrdiff_t lines = panel_bytes / 64;
    const int asking = tiles.count > 1 ? 2 : 1;
    const ptrdiff_t stride = next ? (lines > steps * asking ? 128 : 64) : 0;
    for (int t = 0; t < tiles.count; ++t) {
      const int row = m0 + tiles.first(t), rows = tiles.first(t + 1) - tiles.first(t);
      TileArgs args{&w,          &steps, 1,        2 * group_bytes, group_bytes, a.x + row * a.x_stride,
                    a.x_stride, c,      kPanel, nullptr,       next ? next + t * steps * stride : w,
                    t < asking ? stride : 0, stride == 128 ? 64 : 0};
      TileTable<T, 2, false, false>::get(rows)(args);
      finish_tile(a, c, row, rows, p);
    }
  }
}

static void linear(const LinearArgs& a, int m0, int m1, int panel0, int panel1) {
  switch (a.weight_type) {
    case DType::kFloat32: return linear_panels<F32Type>(a, m0, m1, panel0, panel1);
    case DType::kInt8: return linear_panels<Int8Type>(a, m0, m1, panel0, panel1);
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
