// Tree attention: one job is (group, kv head, some of the group's stacked rows).
//
// A chunk of keys is scored for a tile of rows, masked, exponentiated and multiplied into the
// output while the chunk's K and V lie in the nearest caches; then the next tile of rows takes the
// same chunk. Scores are kept times scale * log2(e), so that 2^x serves for e^x.

// Cuts a scratch buffer into aligned pieces.
struct Arena {
  char* at;
  template <class X>
  X* take(size_t n) {
    X* p = (X*)at;
    at += (n * sizeof(X) + 63) & ~size_t(63);
    return p;
  }
};

template <class T>
struct AttentionScratch {
  using E = typename T::Element;
  static constexpr int kScoreStride = kAttentionChunk + 48;
  E* q;
  float* o;
  float* max;
  float* sum;
  int* visible;  // keys of the group that a stacked row sees
  float* scores;
  E* weights;
  char* v_tail;
  char* k_panels;
  float* alpha;
  explicit AttentionScratch(char* p) {
    Arena a{p};
    q = a.take<E>(size_t(kMaxJobRows) * kMaxHeadDim);
    o = a.take<float>(size_t(kMaxJobRows) * kMaxHeadDim);
    max = a.take<float>(kMaxJobRows);
    sum = a.take<float>(kMaxJobRows);
    visible = a.take<int>(kMaxJobRows);
    scores = a.take<float>(12 * kScoreStride);
    weights = a.take<E>(12 * kScoreStride);
    v_tail = a.take<char>(kMaxHeadDim * kStepBytes);
    alpha = a.take<float>(16);
    k_panels = a.take<char>(size_t(kAttentionChunk) * kMaxHeadDim * sizeof(E));
  }
};

// The keys [first, first + count) of a job's kv head as the tiles want them.
template <class T>
struct Chunk {
  const char* k_panel[kAttentionChunk / kLanes + 4];   // 16 tokens each
  const char* v_run[kAttentionChunk / 8 + 2];          // a block each, then maybe the odd tail
  int v_steps[kAttentionChunk / 8 + 2];

  void gather_k(const AttentionArgs& a, const int32_t* blocks, int kv_head, int first, int count,
                char* k_panels) {
    const int bs = a.block_size, d = a.head_dim;
    const int64_t head_bytes = kv_head_bytes(a.type, bs, d);
    const int64_t block_bytes = head_bytes * a.num_kv_heads;
    const int n = ceil_div(count, kLanes);
    for (int p = 0; p < n; ++p) {
      const int token = first + p * kLanes;
      if (bs >= kLanes) {
        k_panel[p] = a.k_cache + blocks[token / bs] * block_bytes + kv_head * head_bytes +
                     int64_t(token % bs) * d * int(sizeof(typename T::Element));
      } else {  // blocks of 8: two of them side by side
        char* to = k_panels + int64_t(p) * kLanes * d * int(sizeof(typename T::Element));
        const int steps = d / T::kPerStep, half = kLaneGroupBytes / 2;
        const bool two = first + count > token + 8;
        const char* x = a.k_cache + blocks[token / bs] * block_bytes + kv_head * head_bytes;
        const char* y =
            two ? a.k_cache + blocks[token / bs + 1] * block_bytes + kv_head * head_bytes : x;
        for (int s = 0; s < steps; ++s) {
          memcpy(to + s * kLaneGroupBytes, x + s * half, half);
          memcpy(to + s * kLaneGroupBytes + half, y + s * half, half);
        }
        k_panel[p] = to;
      }
    }
    for (int p = n; p < n + 3; ++p) k_panel[p] = k_panel[n - 1];  // tiles may round up
  }

  // Runs of V for the first `count` tokens of the chunk. With an odd count the last pair is
  // copied with its second token zeroed: 0 * NaN would be NaN.
  int gather_v(const AttentionArgs& a, const int32_t* blocks, int kv_head, int first, int count,
               char* v_tail) {
    const int bs = a.block_size, d = a.head_dim;
    const int64_t head_bytes = kv_head_bytes(a.type, bs, d);
    const int64_t block_bytes = head_bytes * a.num_kv_heads;
    int n = 0;
    for (int t = 0; t < count; t += bs) {
      v_run[n] = a.v_cache + blocks[(first + t) / bs] * block_bytes + kv_head * head_bytes;
      v_steps[n++] = min_int(bs, count - t) / T::kPerStep;
    }
    if (T::kPerStep == 2 && count % 2) {
      const char* pair = v_run[n - 1] + int64_t(v_steps[n - 1]) * d * kStepBytes;
      for (int i = 0; i < d; ++i) {
        uint32_t x;
        memcpy(&x, pair + i * kStepBytes, 4);
        x &= 0xffffu;
        memcpy(v_tail + i * kStepBytes, &x, 4);
      }
      if (v_steps[n - 1] == 0) --n;
      v_run[n] = v_tail;
      v_steps[n++] = 1;
    }
    return n;
  }
};

// Asks for K and V of keys to come, a few lines at a time, so that memory works while tiles compute.
struct Prefetcher {
  const AttentionArgs& a;
  const int32_t* blocks;
  int kv_head, first, lines, at = 0, lines_per_block;
  int64_t head_bytes, block_bytes;

  // Keys [first, first + count) of a group; count may be 0.
  Prefetcher(const AttentionArgs& a_, const int32_t* blocks_, int kv_head_, int first_, int count)
      : a(a_), blocks(blocks_), kv_head(kv_head_), first(first_) {
    head_bytes = kv_head_bytes(a.type, a.block_size, a.head_dim);
    block_bytes = head_bytes * a.num_kv_heads;
    lines_per_block = int(head_bytes / 64);
    lines = count > 0 ? ceil_div(count, a.block_size) * lines_per_block : 0;
  }
  void ask(int n) {
    const int end = min_int(lines, at + n);
    while (at < end) {
      const int block = at / lines_per_block, line = at % lines_per_block;
      const int64_t offset = blocks[first / a.block_size + block] * block_bytes +
                             kv_head * head_bytes + int64_t(line) * 64;
      const int stop = min_int(end, at + lines_per_block - line);
      for (int64_t o = offset; at < stop; ++at, o += 64) {
        __builtin_prefetch(a.k_cache + o, 0, 2);
        __builtin_prefetch(a.v_cache + o, 0, 2);
      }
    }
  }
};

template <class T>
static void attention_job_typed(const AttentionArgs& a, const AttentionJob& job,
                                const AttentionJob* next, char* scratch) {
  using E = typename T::Element;
  AttentionScratch<T> w(scratch);
  const int g = a.num_q_heads / a.num_kv_heads, d = a.head_dim;
  const int32_t* rows = a.group_rows + a.group_row_offsets[job.group];
  const int32_t* blocks = a.group_blocks + a.group_block_offsets[job.group];
  const int len = a.group_len[job.group], start = a.group_start[job.group];
  const bool causal = a.group_causal[job.group] != 0;
  const int n = job.last - job.first;
  const float scale = a.scale * kLog2E;
  constexpr int stride = AttentionScratch<T>::kScoreStride;

  int most_visible = 0;
  for (int s = 0; s < n; ++s) {
    const int row = rows[(job.first + s) / g], head = job.kv_head * g + (job.first + s) % g;
    memcpy(w.q + s * d, a.q + row * a.q_stride + ptrdiff_t(head) * d * sizeof(E), d * sizeof(E));
    w.visible[s] = causal ? clamp_int(a.query_positions[row] - start + 1, 0, len) : len;
    most_visible = max_int(most_visible, w.visible[s]);
    w.max[s] = -INFINITY;
    w.sum[s] = 0.f;
  }
  memset(w.o, 0, size_t(n) * d * 4);

  Chunk<T> chunk;
  const RowTiles tiles(n);
  for (int c0 = 0; c0 < most_visible; c0 += kAttentionChunk) {
    const int chunk_len = min_int(kAttentionChunk, most_visible - c0);
    chunk.gather_k(a, blocks, job.kv_head, c0, chunk_len, w.k_panels);
    int v_count = -1, v_runs = 0;
    // What follows: this job's next chunk, or the first of the job that this thread may get next.
    const bool last_chunk = c0 + kAttentionChunk >= most_visible;
    const int ahead = min_int(kAttentionChunk, most_visible - c0 - kAttentionChunk);
    Prefetcher prefetch =
        !last_chunk ? Prefetcher(a, blocks, job.kv_head, c0 + kAttentionChunk, ahead)
        : next      ? Prefetcher(a, a.group_blocks + a.group_block_offsets[next->group],
                                 next->kv_head, 0, min_int(kAttentionChunk, a.group_len[next->group]))
                    : Prefetcher(a, blocks, job.kv_head, 0, 0);
    const int calls = tiles.count * ceil_div(chunk_len, 2 * kLanes);
    const int lines_per_call = max_int(4, ceil_div(prefetch.lines, calls));
    for (int t = 0; t < tiles.count; ++t) {
      const int s0 = tiles.first(t), mr = tiles.first(t + 1) - s0;
      int seen = 0;  // keys of this chunk that any row of the tile sees
      for (int m = 0; m < mr; ++m) seen = max_int(seen, min_int(chunk_len, w.visible[s0 + m] - c0));
      if (seen <= 0) continue;

      // Scores.
      const int steps = d / T::kPerStep, panels = ceil_div(seen, kLanes);
      TileArgs qk{nullptr, &steps, 1, kLaneGroupBytes, 0, (const char*)(w.q + s0 * d),
                  ptrdiff_t(d * sizeof(E)), nullptr, stride, nullptr, nullptr, 0, 0};
      const bool wide = mr <= kWideTileRows;
      const TileFn score = wide ? TileTable<T, 4, true, false>::get(mr)
                                : TileTable<T, 2, true, false>::get(mr);
      for (int p = 0; p < panels; p += wide ? 4 : 2) {
        qk.runs = chunk.k_panel + p;
        qk.c = w.scores + p * kLanes;
        score(qk);
        prefetch.ask(lines_per_call);
      }

      // Weights: 2^(score - max), exactly 0 past what the row sees.
      alignas(64) float top[kLanes], base[kLanes];
      for (int m = 0; m < mr; ++m) {
        float* sc = w.scores + m * stride;
        const int vis = clamp_int(w.visible[s0 + m] - c0, 0, seen);
        const int full = vis / kLanes;
        F most = set1(-INFINITY);
        for (int i = 0; i < full; ++i) most = max(most, load(sc + i * kLanes));
        if (vis % kLanes) {
          const F last = first_lanes(load(sc + full * kLanes), vis % kLanes, set1(-INFINITY));
          store(sc + full * kLanes, last);
          most = max(most, last);
        }
        top[m] = reduce_max(most) * scale;
      }
      for (int m = 0; m < mr; ++m) {
        const float before = w.max[s0 + m], now = top[m] > before ? top[m] : before;
        w.max[s0 + m] = now;
        base[m] = now == -INFINITY ? 0.f : now;
        top[m] = before - base[m];
      }
      for (int m = mr; m < kLanes; ++m) top[m] = 0.f;
      store(w.alpha, exp2(load(top)));
      const F vs = set1(scale);
      for (int m = 0; m < mr; ++m) {
        const float* sc = w.scores + m * stride;
        E* wt = w.weights + m * stride;
        const int used = ceil_div(clamp_int(w.visible[s0 + m] - c0, 0, seen), kLanes);
        F total = zero();
        const F vb = set1(base[m]);
        for (int i = 0; i < used; ++i) {
          const F p = exp2<T::kFastExp>(fms(load(sc + i * kLanes), vs, vb));
          total = add(total, p);
          T::store_row((char*)(wt + i * kLanes), p);
        }
        for (int i = used; i < panels; ++i) T::store_row((char*)(wt + i * kLanes), zero());
        w.sum[s0 + m] = w.sum[s0 + m] * w.alpha[m] + reduce_add(total);
      }

      // Output.
      if (v_count != seen) {
        v_runs = chunk.gather_v(a, blocks, job.kv_head, c0, seen, w.v_tail);
        v_count = seen;
      }
      TileArgs pv{chunk.v_run, chunk.v_steps, v_runs, ptrdiff_t(d) * kStepBytes, kLaneGroupBytes,
                  (const char*)w.weights, ptrdiff_t(stride * sizeof(E)), nullptr, d, w.alpha,
                  nullptr, 0, 0};
      const char* run0[kAttentionChunk / 8 + 2];
      for (int r = 0; r < v_runs; ++r) run0[r] = chunk.v_run[r];
      pv.runs = run0;
      int lane = 0;  // lane groups of the head dim done
      const int lanes = d / kLanes;
      auto run = [&](TileFn fn, int width) {
        for (; lane + width <= lanes; lane += width) {
          for (int r = 0; r < v_runs; ++r) run0[r] = chunk.v_run[r] + lane * kLaneGroupBytes;
          pv.c = w.o + s0 * d + lane * kLanes;
          fn(pv);
        }
      };
      if (wide) run(TileTable<T, 4, false, true>::get(mr), 4);
      run(TileTable<T, 2, false, true>::get(mr), 2);
      run(TileTable<T, 1, false, true>::get(mr), 1);
    }
  }

  const int group_first = a.group_row_offsets[job.group];
  for (int s = 0; s < n; ++s) {
    const int index = (job.first + s) / g, head = job.kv_head * g + (job.first + s) % g;
    const int row = rows[index];
    const float sum = w.sum[s];
    // A row that saw nothing has sum 0 and weight 0; a NaN goes through.
    const F inverse = set1(sum == 0.f ? 0.f : 1.f / sum);
    const float* o = w.o + s * d;
    if (a.row_partials[a.row_partial_offsets[row]] < 0) {
      char* to = a.out + row * a.out_stride + ptrdiff_t(head) * d * sizeof(E);
      for (int i = 0; i < d; i += kLanes)
        T::store_row(to + i * sizeof(E), mul(load(o + i), inverse));
    } else {
      const int64_t slot = int64_t(group_first + index) * a.num_q_heads + head;
      float* to = a.partial_out + slot * d;
      for (int i = 0; i < d; i += kLanes) store(to + i, mul(load(o + i), inverse));
      a.partial_lse[slot] = sum == 0.f ? -INFINITY : w.max[s] + ::log2f(sum);
    }
  }
}

template <class T>
static void attention_merge_typed(const AttentionArgs& a, int row0, int row1) {
  using E = typename T::Element;
  const int d = a.head_dim, lanes = d / kLanes;
  for (int row = row0; row < row1; ++row) {
    const int32_t* slots = a.row_partials + a.row_partial_offsets[row];
    const int n = a.row_partial_offsets[row + 1] - a.row_partial_offsets[row];
    if (n == 0 || slots[0] < 0) continue;  // written directly by its lone group
    for (int head = 0; head < a.num_q_heads; ++head) {
      float top = -INFINITY;
      for (int i = 0; i < n; ++i) {
        const float lse = a.partial_lse[int64_t(slots[i]) * a.num_q_heads + head];
        if (!(lse <= top)) top = lse;  // a NaN wins
      }
      F acc[kMaxHeadDim / kLanes];
      for (int j = 0; j < lanes; ++j) acc[j] = zero();
      float total = 0.f;
      for (int i = 0; i < n; ++i) {
        const int64_t slot = int64_t(slots[i]) * a.num_q_heads + head;
        const float lse = a.partial_lse[slot];
        if (lse == -INFINITY) continue;
        const float weight = ::exp2f(lse - top);
        total += weight;
        for (int j = 0; j < lanes; ++j)
          acc[j] = fma(load(a.partial_out + slot * d + j * kLanes), set1(weight), acc[j]);
      }
      const F inverse = set1(total == 0.f ? 0.f : 1.f / total);
      char* to = a.out + row * a.out_stride + ptrdiff_t(head) * d * sizeof(E);
      for (int j = 0; j < lanes; ++j)
        T::store_row(to + j * kLanes * sizeof(E), mul(acc[j], inverse));
    }
  }
}

static void attention(const AttentionArgs& a, const AttentionJob& job, const AttentionJob* next,
                      char* scratch) {
  if (a.type == DType::kFloat32)
    attention_job_typed<F32Type>(a, job, next, scratch);
  else
    attention_job_typed<Bf16Type>(a, job, next, scratch);
}

static void attention_merge(const AttentionArgs& a, int row0, int row1) {
  if (a.type == DType::kFloat32)
    attention_merge_typed<F32Type>(a, row0, row1);
  else
    attention_merge_typed<Bf16Type>(a, row0, row1);
}
