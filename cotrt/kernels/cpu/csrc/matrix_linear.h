// y = epilogue(x W^T) by matrix tiles: the same panels, the same epilogues.

// Fewer rows stay with vector code: up to 4 it takes 64 cycles for 1 KB of weights, and memory
// twice that to deliver them; a tile would gain nothing.
constexpr int kMatrixLinearRows = 5;

struct AnyPanels {
  static void finish(const LinearArgs& a, const float* c, ptrdiff_t c_stride, int row, int rows,
                     int panel) {
    finish_tile(a, c, c_stride, row, rows, panel);
  }
};
template <Epilogue kEpilogue, DType kType>
struct WholePanels {
  static inline void finish(const LinearArgs& a, const float* c, ptrdiff_t c_stride, int row,
                            int rows, int panel) {
    finish_rows(a, c, c_stride, row, rows, panel, kEpilogue, kType, kPanel);
  }
};

// A tile's sums whose epilogue is done beside the next tile's products, some rows at a time: 18
// products of 16 steps take 400 ns, the epilogue of 32 rows 200 ns more where it comes after them.
// Finish: what ends it, finish_tile for any linear or WholePanels for those of one kind.
template <class Finish>
struct PendingTile {
  const LinearArgs& a;
  const float* c = nullptr;
  ptrdiff_t c_stride = 0;
  int row = 0, rows = 0, panel = 0, rows_a_call = 1;

  void operator()() { finish(rows_a_call); }
  void finish(int most) {
    const int n = min_int(most, rows);
    if (n <= 0) return;
    Finish::finish(a, c, c_stride, row, n, panel);
    c += n * c_stride;
    row += n;
    rows -= n;
  }
};

// Rows of x beyond 16 are taken 32 at a time, and the last tile of 16 rows reaches back over rows
// that are done where it would reach past the end; up to 16 rows, two panels at a time. Either way a
// weight is read from memory once for all rows of the call.
template <class T, class Finish>
static void matrix_panels(const LinearArgs& a, int m0, int m1, int panel0, int panel1) {
  const int rows = m1 - m0, steps = a.k / T::kPerStep;
  const bool narrow = rows <= kTileHeight;
  const ptrdiff_t group_bytes = T::kExpanded ? kLaneGroupBytes / 2 : kLaneGroupBytes;
  const int64_t panel_bytes = packed_panel_bytes(a.weight_type, a.k);
  const TileScope scope(narrow ? rows : kTileHeight);
  alignas(64) float sums[2][kMostTileRows * kPanel];
  alignas(64) char x_tail[kMostTileRows * kLaneGroupBytes];
  const int tiles = ceil_div(rows, kMostTileRows);
  PendingTile<Finish> pending{a};
  pending.rows_a_call = max_int(4, ceil_div(kMostTileRows, max_int(steps / kTileSteps, 1)));
  int turn = 0;
  for (int p = panel0; p < panel1;) {
    const int panels = narrow && p + 1 < panel1 ? 2 : 1;
    const char* w[4];
    for (int j = 0; j < 2 * panels; ++j)
      w[j] = a.weight + (p + j / 2) * panel_bytes + j % 2 * group_bytes;
    // What comes next, asked for evenly by all tiles: whole lines every 16 steps.
    const char* next = p + panels < panel1 ? w[0] + panels * panel_bytes : a.next;
    const ptrdiff_t ahead_stride =
        next ? ceil_div(panels * panel_bytes, int64_t(4) * steps * tiles) * 4 : 0;
    for (int t = 0; t < tiles; ++t) {
      const int first = t * kMostTileRows, count = min_int(rows - first, kMostTileRows);
      const bool two = count > kTileHeight;
      const int start = two || narrow ? first : min_int(first, rows - kTileHeight);
      float* c = sums[narrow ? 0 : turn];
      TileArgs args{w, &steps, 1, 2 * group_bytes, 0, a.x + (m0 + start) * a.x_stride, a.x_stride,
                    c, panels * kPanel, nullptr, next ? next + t * steps * ahead_stride : nullptr,
                    ahead_stride, 0};
      args.x_tail = pack_tail(args.x, a.x_stride, min_int(rows - start, kMostTileRows), steps, x_tail);
      if (narrow) {
        if (panels == 2)
          matrix_tile<T, 1, 4, true, false>(args);
        else
          matrix_tile<T, 1, 2, true, false>(args);
        for (int q = 0; q < panels; ++q)
          finish_tile(a, c + q * kPanel, args.c_stride, m0 + first, count, p + q);
        continue;
      }
      if (two) {
        args.second_row = min_int(kTileHeight, count - kTileHeight);
        matrix_tile_beside<T, 2, 2, true, false>(args, pending);
      } else {
        matrix_tile_beside<T, 1, 2, true, false>(args, pending);
      }
      pending.finish(kMostTileRows);  // where there were fewer products than calls were wanted
      pending.c = c + (first - start) * args.c_stride;
      pending.c_stride = args.c_stride;
      pending.row = m0 + first;
      pending.rows = count;
      pending.panel = p;
      turn ^= 1;
    }
    p += panels;
  }
  pending.finish(kMostTileRows);
}

template <class T>
static void matrix_linear(const LinearArgs& a, int m0, int m1, int panel0, int panel1) {
  constexpr DType f32 = DType::kFloat32, bf16 = DType::kBFloat16;
  const bool narrow = m1 - m0 <= kTileHeight, whole = a.n % kPanel == 0;
  auto fn = &matrix_panels<T, AnyPanels>;
  if (narrow || !whole)
    ;  // nothing runs beside products, or the last panel ends in the middle
  else if (a.epilogue == Epilogue::kStore && a.y_type == f32)
    fn = &matrix_panels<T, WholePanels<Epilogue::kStore, f32>>;
  else if (a.epilogue == Epilogue::kAdd && a.y_type == f32)
    fn = &matrix_panels<T, WholePanels<Epilogue::kAdd, f32>>;
  else if (a.epilogue == Epilogue::kSiluMul && a.y_type == bf16)
    fn = &matrix_panels<T, WholePanels<Epilogue::kSiluMul, bf16>>;
  fn(a, m0, m1, panel0, panel1);
}
