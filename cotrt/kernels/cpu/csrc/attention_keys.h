// What an attention job works on: its scratch, the keys of a chunk as tiles want them, and the keys
// to ask for meanwhile.

// Copies a multiple of 32 bytes, some hundred or thousand: what a call of memcpy costs shows.
static inline void copy_pieces(char* to, const char* from, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 32) memcpy(to + i, from + i, 32);
}

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
  using R = typename T::Row;
  static constexpr int kScoreStride = kAttentionChunk + 48;
  R* q;
  float* o;
  float* max;
  float* sum;
  int* visible;  // keys of the group that a stacked row sees
  float* scores;
  R* weights;
  char* v_tail;
  char* k_panels;
  char* v_tiles;  // V in runs of 16 steps, where matrix tiles do not find it so
  char* q_tail;   // see TileArgs::x_tail
  float* alpha;
  float* chunk_o;  // one chunk's output of one tile, where chunks are added up
  float* chunk_max;
  float* chunk_sum;
  explicit AttentionScratch(char* p) {
    Arena a{p};
    q = a.take<R>(size_t(kMaxJobRows) * kMaxHeadDim);
    o = a.take<float>(size_t(kMaxJobRows) * kMaxHeadDim);
    max = a.take<float>(kMaxJobRows);
    sum = a.take<float>(kMaxJobRows);
    visible = a.take<int>(kMaxJobRows);
    scores = a.take<float>(kMostTileRows * kScoreStride);
    weights = a.take<R>(kMostTileRows * kScoreStride);
    v_tail = a.take<char>(kMaxHeadDim * kStepBytes);
    alpha = a.take<float>(kMostTileRows);
    q_tail = a.take<char>(kMostTileRows * kLaneGroupBytes);
    chunk_o = a.take<float>(kMostTileRows * kMaxHeadDim);
    chunk_max = a.take<float>(kMostTileRows);
    chunk_sum = a.take<float>(kMostTileRows);
    k_panels = a.take<char>(size_t(kAttentionChunk) * kMaxHeadDim * sizeof(E));
    v_tiles = a.take<char>(sizeof(E) == 2 ? size_t(kAttentionChunk) * kMaxHeadDim * sizeof(E) : 0);
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

// Asks for K and V of keys to come, a few lines at a time, so that memory works while tiles compute:
// the keys of a job that follow a chunk, or the first of the job that this thread may get next. The
// heads of a job lie side by side in a block: a block's lines are one run.
struct Prefetcher {
  const AttentionArgs& a;
  const int32_t* blocks;  // from the first key's on
  int lines = 0, at = 0, lines_per_block = 1;
  int64_t first_head_bytes = 0, block_bytes = 0;

  // visible: how many keys the job reads; those from `first` on are to come.
  Prefetcher(const AttentionArgs& a_, const AttentionJob& job, const AttentionJob* next, int first,
             int visible)
      : a(a_), blocks(nullptr) {
    if (first < visible)
      come(job, first, min_int(kAttentionChunk, visible - first));
    else if (next)
      come(*next, 0, min_int(kAttentionChunk, a.group_len[next->group]));
  }
  void come(const AttentionJob& job, int first, int count) {
    const int64_t head_bytes = kv_head_bytes(a.type, a.block_size, a.head_dim);
    blocks = a.group_blocks + a.group_block_offsets[job.group] + first / a.block_size;
    block_bytes = head_bytes * a.num_kv_heads;
    first_head_bytes = head_bytes * job.kv_head;
    lines_per_block = int(head_bytes * job.num_kv_heads / 64);
    lines = ceil_div(count, a.block_size) * lines_per_block;
  }
  void ask(int n) {
    const int end = min_int(lines, at + n);
    while (at < end) {
      const int block = at / lines_per_block, line = at % lines_per_block;
      const int64_t offset = blocks[block] * block_bytes + first_head_bytes + int64_t(line) * 64;
      const int stop = min_int(end, at + lines_per_block - line);
      // Into the first level, which most of them leave again: memory gives more so than where the
      // second level alone is asked for (docs/kernels.md).
      for (int64_t o = offset; at < stop; ++at, o += 64) {
        __builtin_prefetch(a.k_cache + o, 0, 3);
        __builtin_prefetch(a.v_cache + o, 0, 3);
      }
    }
  }
};
