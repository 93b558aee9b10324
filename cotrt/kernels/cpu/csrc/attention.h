// Tree attention: one job is (group, kv heads, some of the group's stacked rows).
//
// A chunk of keys is scored for a tile of rows, masked, exponentiated and multiplied into the
// output while the chunk's K and V lie in the nearest caches; then the next tile of rows takes the
// same chunk. Scores are kept times scale * log2(e), so that 2^x serves for e^x.

// Adds a later chunk's output, largest score and sum of weights to those of all chunks before it.
static inline void add_chunk(float* o, float* top, float* sum, const float* chunk_o,
                             float chunk_top, float chunk_sum, int d) {
  const float now = chunk_top > *top ? chunk_top : *top;
  const F before = exp2(set1(*top - now)), here = exp2(set1(chunk_top - now));
  for (int i = 0; i < d; i += kLanes)
    store(o + i, fma(load(chunk_o + i), here, mul(load(o + i), before)));
  alignas(64) float total[kLanes];
  store(total, fma(set1(chunk_sum), here, mul(set1(*sum), before)));
  *sum = total[0];
  *top = now;
}

// Rows times lanes held in vector registers.
template <class T>
struct VectorTiles {
  using Rows = RowTiles;
  static constexpr int kGroups = kTileGroups;          // lane groups a tile
  static constexpr int kWideRows = kWideTileRows;      // rows that leave room
  static constexpr int kWideGroups = kWideTileGroups;  // for so many
  template <int NR, bool kDistinct, bool kAccumulate>
  static TileFn get(int rows, bool fixed) {
    return TileTable<T, NR, kDistinct, kAccumulate>::get(rows, fixed);
  }
  // Groups of 16 weights that are read where `panels` hold keys.
  static int weight_groups(int panels) { return panels; }
  static int gather_v(Chunk<T>& chunk, const AttentionArgs& a, const int32_t* blocks, int kv_head,
                      int first, int count, const AttentionScratch<T>& w) {
    return chunk.gather_v(a, blocks, kv_head, first, count, w.v_tail);
  }
  static const char* tail(const char*, ptrdiff_t, int, int, char*) { return nullptr; }
};

// T: of q, K and V. Tiles: the register tiles, VectorTiles<T> or MatrixTiles (matrix_attention.h).
template <class T, class Tiles>
static void attention_job(const AttentionArgs& a, const AttentionJob& job,
                          const AttentionJob* next, char* scratch) {
  using R = typename T::Row;
  AttentionScratch<T> w(scratch);
  const int g = a.num_q_heads / a.num_kv_heads, d = a.head_dim;
  const int32_t* rows = a.group_rows + a.group_row_offsets[job.group];
  const int32_t* blocks = a.group_blocks + a.group_block_offsets[job.group];
  const int len = a.group_len[job.group], start = a.group_start[job.group];
  const bool causal = a.group_causal[job.group] != 0;
  const int n = job.last - job.first, num_heads = job.num_kv_heads;
  const float scale = a.scale * kLog2E;
  constexpr int stride = AttentionScratch<T>::kScoreStride;

  int most_visible = 0;
  for (int s = 0; s < n; ++s) {
    const int row = rows[(job.first + s) / g];
    w.visible[s] = causal ? clamp_int(a.query_positions[row] - start + 1, 0, len) : len;
    most_visible = max_int(most_visible, w.visible[s]);
  }
  for (int i = 0; i < num_heads * n; ++i) {
    const int s = job.first + i % n, head = (job.kv_head + i / n) * g + s % g;
    copy_pieces((char*)(w.q + i * d),
                a.q + rows[s / g] * a.q_stride + ptrdiff_t(head) * d * sizeof(R), d * sizeof(R));
    w.max[i] = -INFINITY;
    w.sum[i] = 0.f;
  }
  memset(w.o, 0, size_t(num_heads * n) * d * 4);

  Chunk<T> chunk;
  const typename Tiles::Rows tiles(n);
  const bool all_wide = tiles.first(1) <= Tiles::kWideRows;
  const int groups_per_call = all_wide ? Tiles::kWideGroups : Tiles::kGroups;
  for (int c0 = 0; c0 < most_visible; c0 += kAttentionChunk) {
    const int chunk_len = min_int(kAttentionChunk, most_visible - c0);
    Prefetcher prefetch(a, job, next, c0 + kAttentionChunk, most_visible);
    // Evenly over all products, of scores and of values.
    const int calls = num_heads * tiles.count *
                      (ceil_div(chunk_len, groups_per_call * kLanes) +
                       ceil_div(d, groups_per_call * kLanes));
    const int lines_per_call = max_int(4, ceil_div(prefetch.lines, calls));
    // The first chunk's result is where the later ones are added to.
    const bool apart = a.fixed_chunks && c0 > 0;
    int v_count = -1, v_runs = 0, head = -1;
    for (int t = 0; t < num_heads * tiles.count; ++t) {
      const int tile = t % tiles.count, s0 = tiles.first(tile), mr = tiles.first(tile + 1) - s0;
      if (tile == 0) {
        chunk.gather_k(a, blocks, job.kv_head + ++head, c0, chunk_len, w.k_panels);
        v_count = -1;
      }
      const int i0 = head * n + s0;  // the tile's first row among those of all heads
      int seen = 0;  // keys of this chunk that any row of the tile sees
      for (int m = 0; m < mr; ++m) seen = max_int(seen, min_int(chunk_len, w.visible[s0 + m] - c0));
      if (seen <= 0) continue;

      // Scores.
      const int steps = d / T::kPerStep, panels = ceil_div(seen, kLanes);
      TileArgs qk{nullptr, &steps, 1, kLaneGroupBytes, 0, (const char*)(w.q + i0 * d),
                  ptrdiff_t(d * sizeof(R)), nullptr, stride, nullptr, nullptr, 0, 0};
      const bool fixed = a.fixed_chunks;
      qk.x_tail = Tiles::tail(qk.x, qk.x_stride, mr, steps, w.q_tail);
      const bool wide = mr <= Tiles::kWideRows;
      const TileFn score = wide ? Tiles::template get<Tiles::kWideGroups, true, false>(mr, fixed)
                                : Tiles::template get<Tiles::kGroups, true, false>(mr, fixed);
      for (int p = 0; p < panels; p += wide ? Tiles::kWideGroups : Tiles::kGroups) {
        qk.runs = chunk.k_panel + p;
        qk.c = w.scores + p * kLanes;
        score(qk);
        prefetch.ask(lines_per_call);
      }

      float* o = apart ? w.chunk_o : w.o + i0 * d;
      float* row_max = apart ? w.chunk_max : w.max + i0;
      float* row_sum = apart ? w.chunk_sum : w.sum + i0;
      if (apart) {
        memset(o, 0, size_t(mr) * d * 4);
        for (int m = 0; m < mr; ++m) row_max[m] = -INFINITY, row_sum[m] = 0.f;
      }

      const bool unscaled = weigh_keys<T>(w, w.visible + s0, c0, seen, mr, scale,
                                          Tiles::weight_groups(panels), row_max, row_sum);

      // Output.
      if (v_count != seen) {
        v_runs = Tiles::gather_v(chunk, a, blocks, job.kv_head + head, c0, seen, w);
        v_count = seen;
      }
      TileArgs pv{chunk.v_run, chunk.v_steps, v_runs, ptrdiff_t(d) * kStepBytes, kLaneGroupBytes,
                  (const char*)w.weights, ptrdiff_t(stride * sizeof(R)), nullptr, d, w.alpha,
                  nullptr, 0, 0};
      // Nothing was there, or nothing that was there is scaled.
      pv.start = apart || c0 == 0 ? TileArgs::kZeros
                 : unscaled       ? TileArgs::kAsIs
                                  : TileArgs::kScaled;
      const char* run0[kAttentionChunk / 8 + 2];
      for (int r = 0; r < v_runs; ++r) run0[r] = chunk.v_run[r];
      pv.runs = run0;
      int lane = 0;  // lane groups of the head dim done
      const int lanes = d / kLanes;
      auto run = [&](TileFn fn, int width) {
        for (; lane + width <= lanes; lane += width) {
          for (int r = 0; r < v_runs; ++r) run0[r] = chunk.v_run[r] + lane * kLaneGroupBytes;
          pv.c = o + lane * kLanes;
          fn(pv);
          prefetch.ask(lines_per_call);
        }
      };
      if (wide) run(Tiles::template get<Tiles::kWideGroups, false, true>(mr, fixed), Tiles::kWideGroups);
      run(Tiles::template get<Tiles::kGroups, false, true>(mr, fixed), Tiles::kGroups);
      if (Tiles::kGroups > 1) run(Tiles::template get<1, false, true>(mr, fixed), 1);
      if (!apart) continue;
      for (int m = 0; m < mr; ++m)
        if (w.visible[s0 + m] > c0)
          add_chunk(w.o + (i0 + m) * d, w.max + i0 + m, w.sum + i0 + m, o + m * d, row_max[m],
                    row_sum[m], d);
    }
    prefetch.ask(prefetch.lines);  // what tiles that saw no key have not asked for
  }

  const int group_first = a.group_row_offsets[job.group];
  for (int i = 0; i < num_heads * n; ++i) {
    const int s = job.first + i % n, head = (job.kv_head + i / n) * g + s % g;
    const int index = s / g, row = rows[index];
    const float sum = w.sum[i];
    // A row that saw nothing has sum 0 and weight 0; a NaN goes through.
    const F inverse = set1(sum == 0.f ? 0.f : 1.f / sum);
    const float* o = w.o + i * d;
    if (a.row_partials[a.row_partial_offsets[row]] < 0) {
      char* to = a.out + row * a.out_stride + ptrdiff_t(head) * d * sizeof(R);
      for (int e = 0; e < d; e += kLanes)
        T::store_row(to + e * sizeof(R), mul(load(o + e), inverse));
    } else {
      const int64_t slot = int64_t(group_first + index) * a.num_q_heads + head;
      float* to = a.partial_out + slot * d;
      if (a.fixed_chunks) {
        memcpy(to, o, size_t(d) * 4);
        a.partial_lse[slot] = w.max[i];
        a.partial_sum[slot] = sum;
        continue;
      }
      for (int e = 0; e < d; e += kLanes) store(to + e, mul(load(o + e), inverse));
      a.partial_lse[slot] = sum == 0.f ? -INFINITY : w.max[i] + ::log2f(sum);
    }
  }
}
