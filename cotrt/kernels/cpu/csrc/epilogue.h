// Bias and epilogue of a linear: from a tile of float32 sums into y.

// One tile's float32 results, [rows][32] and rows c_stride floats apart, through bias and epilogue
// into y. epilogue, y_type and lanes: of a, where a caller knows them, so that nothing is asked a row.
__attribute__((always_inline)) static inline void finish_rows(
    const LinearArgs& a, const float* c, ptrdiff_t c_stride, int row0, int rows, int panel,
    Epilogue epilogue, DType y_type, int lanes) {
  const int n0 = panel * kPanel;
  F scale[2], bias[2];
  for (int j = 0; j < 2; ++j) {
    scale[j] = a.scale ? load(a.scale + n0 + j * kLanes) : set1(1.f);
    bias[j] = a.bias ? load(a.bias + n0 + j * kLanes) : zero();
  }
  const int y_bytes = y_type == DType::kFloat32 ? 4 : 2;
  for (int m = 0; m < rows; ++m) {
    F v[2];
    for (int j = 0; j < 2; ++j)
      v[j] = fma(load(c + m * c_stride + j * kLanes), scale[j], bias[j]);
    char* y = a.y + (row0 + m) * a.y_stride;
    if (epilogue == Epilogue::kSiluMul) {
      store_as(y + ptrdiff_t(panel) * kLanes * y_bytes, y_type, mul(silu(v[0]), v[1]));
      continue;
    }
    y += ptrdiff_t(n0) * y_bytes;
    if (lanes == kPanel) {
      for (int j = 0; j < 2; ++j) {
        char* p = y + j * kLanes * y_bytes;
        if (epilogue == Epilogue::kAdd) v[j] = add(v[j], load((const float*)p));
        store_as(p, y_type, v[j]);
      }
    } else {
      alignas(64) float tail[kPanel];
      alignas(64) char bytes[kPanel * 4];
      for (int j = 0; j < 2; ++j) store(tail + j * kLanes, v[j]);
      if (epilogue == Epilogue::kAdd)
        for (int i = 0; i < lanes; ++i) tail[i] += ((const float*)y)[i];
      for (int j = 0; j < 2; ++j)
        store_as(bytes + j * kLanes * y_bytes, y_type, load(tail + j * kLanes));
      memcpy(y, bytes, size_t(lanes) * y_bytes);
    }
  }
}

static void finish_tile(const LinearArgs& a, const float* c, ptrdiff_t c_stride, int row0, int rows,
                        int panel) {
  finish_rows(a, c, c_stride, row0, rows, panel, a.epilogue, a.y_type,
              min_int(kPanel, a.n - panel * kPanel));
}
