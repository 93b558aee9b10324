// The register tiles of an attention job (attention.h) as matrix tiles: a K panel is a tile of w as
// it is stored, queries and weights are rows of x, and V is a tile of w where 32 tokens lie in one
// block.

// Fewer stacked rows stay with vector code: a tile has 16 rows, used or not, and V in small blocks
// is copied for it.
constexpr int kMatrixAttentionRows = 8;

// 32 rows a tile, each beginning where a whole tile ends: what a tile computes beside the last row
// falls on scratch.
struct MatrixRows {
  int rows, count;
  explicit MatrixRows(int n) : rows(n), count(ceil_div(n, kMostTileRows)) {}
  int first(int t) const { return min_int(rows, t * kMostTileRows); }
};
static_assert(kMaxJobRows % kMostTileRows == 0, "a job's scratch holds whole tiles");

struct MatrixTiles {
  using Rows = MatrixRows;
  static constexpr int kGroups = 2;
  static constexpr int kWideRows = kTileHeight, kWideGroups = 4;
  static constexpr int kRunTokens = 2 * kTileSteps;

  template <int NR, bool kDistinct, bool kAccumulate>
  static TileFn get(int rows, bool) {  // of one order in any case
    if constexpr (NR <= 2)
      if (rows > kTileHeight) return &matrix_tile<MatrixBf16, 2, NR, kDistinct, kAccumulate>;
    return &matrix_tile<MatrixBf16, 1, NR, kDistinct, kAccumulate>;
  }
  static int weight_groups(int panels) { return (panels + 1) / 2 * 2; }
  static const char* tail(const char* q, ptrdiff_t stride, int rows, int steps, char* to) {
    return pack_tail(q, stride, rows, steps, to);
  }

  // Runs of 32 tokens: as they lie where one block has them all, else a copy of the tokens that
  // there are and zeros behind them. Beside the product of 32 rows a copy costs little.
  static int gather_v(Chunk<Bf16Type>& chunk, const AttentionArgs& a, const int32_t* blocks,
                      int kv_head, int first, int count, const AttentionScratch<Bf16Type>& scratch) {
    const int bs = a.block_size;
    const int64_t head_bytes = kv_head_bytes(a.type, bs, a.head_dim);
    const int64_t block_bytes = head_bytes * a.num_kv_heads;
    const ptrdiff_t step_bytes = ptrdiff_t(a.head_dim) * kStepBytes;
    const auto at = [&](int token) {
      return a.v_cache + blocks[token / bs] * block_bytes + kv_head * head_bytes +
             token % bs / 2 * step_bytes;
    };
    int n = 0;
    for (int t = 0; t < count; t += kRunTokens, ++n) {
      const int tokens = min_int(kRunTokens, count - t);
      if (tokens == kRunTokens && bs >= kRunTokens) {
        chunk.v_run[n] = at(first + t);
        continue;
      }
      char* to = scratch.v_tiles + n * kTileSteps * step_bytes;
      chunk.v_run[n] = to;
      const int pairs = tokens / 2, piece = min_int(bs, kRunTokens) / 2;
      for (int s = 0; s < pairs; s += piece)
        copy_pieces(to + s * step_bytes, at(first + t + 2 * s),
                    size_t(min_int(piece, pairs - s)) * size_t(step_bytes));
      int filled = pairs;
      if (tokens % 2) {  // the last token beside a zero
        const char* pair = at(first + t + 2 * pairs);
        char* half = to + pairs * step_bytes;
        for (int i = 0; i < a.head_dim; ++i) {
          uint32_t x;
          memcpy(&x, pair + i * kStepBytes, 4);
          x &= 0xffffu;
          memcpy(half + i * kStepBytes, &x, 4);
        }
        ++filled;
      }
      memset(to + filled * step_bytes, 0, size_t(kTileSteps - filled) * size_t(step_bytes));
    }
    return n;
  }
};
