// y = epilogue(x W^T) by matrix tiles: the same panels, the same epilogues.

// Fewer rows stay with vector code: up to 4 it takes 64 cycles for 1 KB of weights, and memory
// twice that to deliver them; a tile would gain nothing.
constexpr int kMatrixLinearRows = 5;

// Rows of x beyond 16 are taken 32 at a time, and the last tile of 16 rows reaches back over rows
// that are done where it would reach past the end; up to 16 rows, two panels at a time. Either way a
// weight is read from memory once for all rows of the call.
template <class T>
static void matrix_linear(const LinearArgs& a, int m0, int m1, int panel0, int panel1) {
  const int rows = m1 - m0, steps = a.k / T::kPerStep;
  const bool narrow = rows <= kTileHeight;
  const ptrdiff_t group_bytes = T::kExpanded ? kLaneGroupBytes / 2 : kLaneGroupBytes;
  const int64_t panel_bytes = packed_panel_bytes(a.weight_type, a.k);
  const TileScope scope(narrow ? rows : kTileHeight);
  alignas(64) float c[kMostTileRows * kPanel];
  alignas(64) char x_tail[kMostTileRows * kLaneGroupBytes];
  const int tiles = ceil_div(rows, kMostTileRows);
  for (int p = panel0; p < panel1;) {
    const int panels = narrow && p + 1 < panel1 ? 2 : 1;
    const char* w[4];
    for (int j = 0; j < 2 * panels; ++j)
      w[j] = a.weight + (p + j / 2) * panel_bytes + j % 2 * group_bytes;
    // What comes next, asked for by the first two tiles.
    const char* next = p + panels < panel1 ? w[0] + panels * panel_bytes : a.next;
    const int asking = min_int(tiles, 2);
    const ptrdiff_t ahead_stride =
        next ? ceil_div(panels * panel_bytes, int64_t(64) * steps * asking) * 64 : 0;
    for (int t = 0; t < tiles; ++t) {
      const int first = t * kMostTileRows, count = min_int(rows - first, kMostTileRows);
      const bool two = count > kTileHeight;
      const int start = two || narrow ? first : min_int(first, rows - kTileHeight);
      TileArgs args{w, &steps, 1, 2 * group_bytes, 0, a.x + (m0 + start) * a.x_stride, a.x_stride,
                    c, panels * kPanel, nullptr, next ? next + t * steps * ahead_stride : nullptr,
                    t < asking ? ahead_stride : 0, 0};
      args.x_tail = pack_tail(args.x, a.x_stride, min_int(rows - start, kMostTileRows), steps, x_tail);
      if (two) {
        args.second_row = min_int(kTileHeight, count - kTileHeight);
        matrix_tile<T, 2, 2, true, false>(args);
      } else if (panels == 2) {
        matrix_tile<T, 1, 4, true, false>(args);
      } else {
        matrix_tile<T, 1, 2, true, false>(args);
      }
      for (int q = 0; q < panels; ++q)
        finish_tile(a, c + (first - start) * args.c_stride + q * kPanel, args.c_stride, m0 + first,
                    count, p + q);
    }
    p += panels;
  }
}
